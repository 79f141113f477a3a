"""What launchers share on the host's side: an operator of PyTorch whose second call is cheap.

A launcher that asks here, and not ``x.is_cuda``, also takes tensors on the CPU: in Triton's interpreter, and where a
test puts a driver in the GPU's place to compile without one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import triton
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from . import _tape
from ._tape import Overheard, Tape

#: Whether Triton interprets; decided when it is imported.
INTERPRETED: bool = triton.knobs.runtime.interpret
if INTERPRETED:
    from triton.language import bfloat16, float32, float64
    from triton.runtime import interpreter

    _builder, _patched = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    if not hasattr(_builder, "get_bf16"):  # Triton 3.6 interprets no constants of bfloat16
        _builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), bfloat16)

        def _with_index(tensor: Any, scope: Any) -> None:
            """It also takes an array of one number for a number, which NumPy does not from 2.4 on."""
            _patched(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = _with_index

    _cast = _builder.cast_impl

    def _cast_by_steps(self: Any, source: Any, kind: Any) -> Any:
        """It makes integers of numbers of float64 where they become bfloat16, unless float32 is between them."""
        if source.dtype.scalar == float64 and kind.scalar == bfloat16:
            source = _cast(self, source, float32)
        return _cast(self, source, kind)

    _builder.cast_impl = _cast_by_steps


@functools.cache
def gpu(device: torch.device) -> tuple[tuple[int, int] | None, int]:
    """Capability and multiprocessors of a device; in the interpreter None, and few enough for small tests to share."""
    if INTERPRETED:
        return None, 4
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return (properties.major, properties.minor), properties.multi_processor_count
    driver = triton.runtime.driver.active  # of a GPU that is not there
    return divmod(driver.get_current_target().arch, 10), driver.utils.get_device_properties(0)["multiprocessor_count"]


def runs_on(device: torch.device) -> bool:
    """Whether Triton can launch a kernel on a tensor of this device."""
    if device.type == "cuda":
        return True
    if INTERPRETED:
        return device.type == "cpu"
    try:
        return triton.runtime.driver.active.get_active_torch_device().type == device.type
    except RuntimeError:  # no GPU, so no driver
        return False


def check_device(name: str, tensor: Tensor) -> None:
    """Refuse, by ValueError, a tensor on the CPU where Triton does not interpret; `name` is for the message."""
    # A stand-in on another device, meta for instance, is only asked for its shape.
    if tensor.device.type in ("cpu", "cuda") and not runs_on(tensor.device):
        raise ValueError(
            f"{name}: expected a CUDA tensor, got one on {tensor.device.type}; move it to a GPU, or set "
            "TRITON_INTERPRET=1 before Triton is imported, which runs the kernel in Triton's interpreter on the CPU"
        )


@contextlib.contextmanager
def launching(tensor: Tensor) -> Iterator[None]:
    """Launch on the tensor's device. In the interpreter NaN shall raise no warning, as it raises none on a GPU."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            yield
    else:
        import numpy

        with numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield


def capturing(x: Tensor) -> bool:
    """Whether a graph is captured, so that nobody may wait for values."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """What numbers of a dtype are added up in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Launching ------------------------------------------------------------------------------------------------------------

#: The current GPU's number; of a machine without one, nothing that a tensor's device could equal.
_current: Callable[[], int | None] = torch._C._cuda_getDevice if torch.cuda.is_available() else lambda: None
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_stored = torch._C._has_storage
#: Of forward-mode differentiation whether it is under way; a tensor with a tangent looks like any other.
_forward = vars(torch.autograd.forward_ad)
#: What torch.compile asks of tensors before it runs what it compiled: one call tells whether their types, dtypes,
#: devices, sizes, strides, what dispatches them and whether they require gradients are as they were.
_guards = torch._C._dynamo.guards.TensorGuards


class _State(threading.local):
    """What a thread is recording, if anything."""

    tape: Tape | None = None


_state = _State()


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Sequence[int] | None = None
) -> Tensor:
    """Memory that kernels write as a whole, contiguous unless strides are given.

    Under torch.use_deterministic_algorithms, torch.empty fills its memory with NaN. A plan does not: kernels write
    every element, so there is nothing to guard against.
    """
    if strides is None:
        memory = torch.empty(shape, dtype=dtype, device=device)
    else:
        memory = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if _state.tape is not None:
        _state.tape.allocated(memory)
    return memory


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory that kernels write as a whole, laid out as `x` where that has no gaps."""
    memory = torch.empty_like(x, dtype=dtype)
    if _state.tape is not None:
        _state.tape.allocated(memory)
    return memory


#: The interpreter puts itself in the place of Triton's language while a kernel runs: in one thread at a time.
_by_turns: Any = threading.RLock() if INTERPRETED else contextlib.nullcontext()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> Any:
    """Launch a kernel: ``kernel[grid](*args, **constants)``, taken down where a plan is being made."""
    tape = _state.tape
    if tape is None:
        with _by_turns:
            return kernel[grid](*args, **constants)
    with tape.heard():
        compiled = kernel[grid](*args, **constants)
    tape.launched(kernel, grid, args, constants, compiled)
    return compiled


def overlapping(device: torch.device) -> dict[str, bool]:
    """How a kernel is launched that starts before the one ahead of it has ended, where the GPU can: Hopper and later.

    Such a kernel sees what the one ahead has written only behind a wait of its own, `gdc_wait`. On other GPUs, and for
    whoever launches the kernels without this, neither the signal nor the wait is there and nothing else changes.
    """
    capability, _ = gpu(device)
    return {"launch_pdl": True} if capability is not None and capability >= (9, 0) else {}


def apply(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call what is no kernel of ours, an operation of torch for instance, taken down where a plan is being made."""
    tape = _state.tape
    if tape is None:
        return function(*args, **options)
    with tape.heard():
        result = function(*args, **options)
    tape.applied(function, args, options, result)
    return result


def contiguous(x: Tensor) -> Tensor:
    """Without gaps, the last axis dense; copied where it is not."""
    return x if x.is_contiguous() else apply(Tensor.contiguous, x)


def record(tensors: Sequence[Tensor], call: Callable[[], Any]) -> tuple[Any, Callable[..., Any] | None]:
    """Make a call, and return its result and a function of `tensors` that does the same with others of their kind.

    None instead of the function where the call did what `empty`, `launch` and `apply` do not know of. The function
    takes anything with ``data_ptr`` for a tensor, unless `apply` was used.
    """
    tape = _state.tape = Tape(tensors)
    try:
        with Overheard(tape):
            result = call()
    finally:
        _state.tape = None
    return result, tape.finished(result)


# Operators ------------------------------------------------------------------------------------------------------------

#: Plans that an operator keeps; with one more it begins anew. A plan takes some kilobytes.
_PLANS = 1024

_LIBRARY = torch.library.Library("fusebook", "FRAGMENT")

#: Every operator by its name.
OPERATORS: dict[str, Operator] = {}

_knobs = triton.knobs.runtime
#: What somebody has set of Triton's: knobs as a program runs, and as it compiles, and hooks of launches.
_runtime, _compilation = _knobs.__dict__, triton.knobs.compilation.__dict__
_enters, _leaves = (getattr(h, "calls", []) for h in (_knobs.launch_enter_hook, _knobs.launch_exit_hook))
_compiling = torch.compiler.is_compiling
_tracing = torch._C._get_tracing_state
_traced = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_FUNCTIONAL = torch._C._functorch.TransformType.Functionalize
_aside: list[None] = []


def watched() -> bool:
    """Whether somebody traces or transforms, so that a call is to go through torch's dispatcher."""
    return bool(_compiling() or _modes() or _transforms() or _forward["_current_level"] >= 0 or _tracing())


def readable(x: Tensor) -> bool:
    """Whether its values are numbers yet: not where torch.jit traces, or torch.func transforms."""
    return not (x.is_meta or _tracing() or _wrapped(x))


@contextlib.contextmanager
def plans_aside() -> Iterator[None]:
    """Inside, every call goes through its launcher, as the first one does."""
    _aside.append(None)
    try:
        yield
    finally:
        _aside.pop()


def unhooked() -> bool:
    """Whether nobody asked Triton to tell of launches, or to compile kernels otherwise than is usual."""
    enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    return not (
        _aside
        or getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or _knobs.debug
        or "instrumentation_mode" in _compilation
    )


def _described(args: Sequence[Any], tensors: list[Tensor]) -> tuple[Any, ...] | None:
    """All of the arguments that a plan can depend on, collecting the tensors; None where no plan may be kept.

    It is finer than what Triton specialises kernels for: sizes and strides themselves, not what divides them.
    """
    parts: list[Any] = []
    for a in args:
        kind = type(a)
        if kind is Tensor or kind is Parameter:
            tensors.append(a)
            address = a.data_ptr()
            if not address and a.numel():
                return None  # a wrapper, which has no memory of its own
            parts.append(
                (kind, a.get_device(), a.dtype, a.shape, a.stride(), address & 15, a.is_neg(), a.requires_grad)
            )
        elif kind is int or a is None:
            parts.append(a)
        elif kind is tuple or kind is list:
            inside = _described(a, tensors)
            if inside is None:
                return None
            parts.append((kind, inside))
        elif isinstance(a, Tensor):
            return None  # a subclass may mean something else by any of this
        else:
            parts.append((kind, a))
    return tuple(parts)


def _flat(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, those in lists too."""
    found: list[Tensor] = []
    for a in args:
        found += [a] if isinstance(a, Tensor) else _flat(a) if isinstance(a, (list, tuple)) else []
    return found


_HOLE = object()


def _template(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with a hole for each tensor."""
    return tuple(
        _HOLE if isinstance(a, Tensor) else (type(a), _template(a)) if isinstance(a, (list, tuple)) else a for a in args
    )


def _refilled(template: Sequence[Any], tensors: Iterator[Tensor]) -> tuple[Any, ...]:
    """Arguments again."""
    return tuple(
        next(tensors) if a is _HOLE else a[0](_refilled(a[1], tensors)) if type(a) is tuple else a for a in template
    )


def _places(a: Any, places: Iterator[Any]) -> Any:
    """Along which axes the tensors of one argument of a template are batches."""
    return next(places) if a is _HOLE else [_places(v, places) for v in a[1]] if type(a) is tuple else None


def _one_of_zeros(a: Any, at: Any) -> Any:
    """An argument whose batch along `at` is empty, with a member of zeros."""
    if isinstance(a, Tensor):
        return a if at is None else a.new_zeros([1 if axis == at else n for axis, n in enumerate(a.shape)])
    if isinstance(a, (list, tuple)) and at is not None:
        return [_one_of_zeros(v, d) for v, d in zip(a, at, strict=True)]
    return a


class _Plan:
    """What a call does: ``replay(*tensors)`` on a device, and the operator's arguments but for the tensors."""

    __slots__ = ("again", "device", "replay", "template")

    def __init__(self, device: int | None, replay: Any, template: tuple[Any, ...]) -> None:
        self.device, self.replay, self.template = device, replay, template
        self.again: Callable[..., Any] | None = None  # knows this call again, from the second one on


def as_it_is(g: Any) -> Any:
    """A gradient whose numbers stand in memory as they are, which no kernel asks: a view may negate them."""
    if isinstance(g, list):
        return [as_it_is(one) for one in g]
    return g.resolve_neg() if isinstance(g, Tensor) and g.is_neg() else g


def _as_they_are(backward: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
    return backward(ctx, *map(as_it_is, gradients))


_OTHER = object()


def _other(*args: Any) -> Any:
    """What is asked before there was a call."""
    return _OTHER


class _Plans(dict[Hashable, _Plan]):
    """Plans under all that calls depend on, and a function that knows the last of them again.

    A program often makes the same call again. To see that takes a fraction of the time of a key: all of its tensors are
    looked at by one call, and nothing is made to be thrown away. ``again(*args)`` makes the call, or returns `_OTHER`
    where it is another one. Threads share it: it is replaced as a whole.

    Or it makes some calls by turns, of different shapes: then ``before(args)`` makes the last one of that shape.
    """

    again: Callable[..., Any] = staticmethod(_other)

    def __init__(self) -> None:
        self.of_shape: dict[Any, Callable[..., Any]] = {}

    def before(self, args: Sequence[Any]) -> Any:
        """The last call again that had a first argument of this shape; `_OTHER` where it is another one."""
        try:
            again = self.of_shape.get(getattr(args[0], "shape", None), _other)
        except (RuntimeError, TypeError):  # nested tensors have no shape, and a list is no key
            return _OTHER
        result = again(*args)
        if result is not _OTHER:
            self.again = again
        return result

    def last(self, args: Sequence[Any], again: Callable[..., Any]) -> None:
        """Note what knows this call, the last one, again."""
        self.again = self.of_shape[getattr(args[0], "shape", None)] = again

    def keep(self, key: Hashable, plan: _Plan) -> None:
        """Add a plan, among a thousand at most."""
        if len(self) >= _PLANS:
            self.clear()
        self[key] = _Plan(plan.device, plan.replay, plan.template)

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self.of_shape.clear()
        self.again = _other


def _guarded(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    return _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[no-any-return]


class Operator:
    """A launcher as an operator of PyTorch: called at once, or by the dispatcher where somebody traces or transforms.

    Calling it is cheap the second time: the plan of a call is kept under all that it depends on, which are shapes,
    strides, dtypes, devices, alignments, plain arguments and `modes`, and done again with other addresses.

    Parameters
    ----------
    name : str
        The operator is ``torch.ops.fusebook.<name>``.
    schema : str
        Of the operator, in torch's notation: ``"(Tensor x, int dim) -> Tensor"``.
    check : callable
        Takes what callers give. Returns the operator's arguments, or raises a sentence.
    outputs : callable
        Takes the operator's arguments. Returns memory for the results, by `empty`: a tensor, or a tuple or list of
        tensors. It is asked for tensors without memory too.
    into : callable
        ``into(outputs, *arguments)`` launches kernels, by `launch`, that write the results as a whole.
    modes : callable, optional
        Returns a hashable value of the global modes that `into` asks for, such as determinism.
    places : callable, optional
        ``places(*arguments)`` returns a hashable value of how tensors lie to each other in memory, where `into` asks
        for that. Called before `check`, too.
    read : callable, optional
        Takes what callers give, after it has been checked; reads values, in every call, to refuse some.
    gradient : tuple of two callables, optional
        ``backward(ctx, *gradients)``, which returns a gradient or None for each argument of the operator, and
        ``keep(ctx, inputs, output)``, which saves what it needs: see `torch.library.register_autograd`. Without them a
        gradient that is asked for is refused.
    batched : callable, optional
        The rule for `torch.vmap`, see `torch.library.register_vmap`. Without one each member of a batch has a call of
        its own.
    traced : callable, optional
        Takes what callers give, and returns the operator's arguments without a check: what torch.compile traces, where
        `check` can be asked of the operator's arguments too. A compiled program looks at each object of Python that it
        was traced through, before every call; so `check` is left to whoever asks for the results' shapes.

    Notes
    -----
    No plan is kept for tensors on the CPU, in the interpreter, for subclasses of tensors, on a device that is not the
    current one, where Triton has hooks or debugs, where a launcher did something that `empty`, `launch` and `apply` do
    not know of, and while torch traces or transforms.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        *,
        check: Callable[..., tuple[Any, ...]],
        outputs: Callable[..., Any],
        into: Callable[..., None],
        modes: Callable[[], Hashable] | None = None,
        places: Callable[..., Hashable] | None = None,
        read: Callable[..., None] | None = None,
        gradient: tuple[Callable[..., Any], Callable[..., None]] | None = None,
        batched: Callable[..., Any] | None = None,
        traced: Callable[..., tuple[Any, ...]] | None = None,
    ) -> None:
        self.name = name
        self.check = check
        self.outputs = outputs
        self.into = into
        self.modes = modes
        self.places = places
        self.read = read
        self.traced = traced
        self.listed = schema.endswith("[]")
        self.plans = _Plans()  # by what callers give
        self.checked = _Plans()  # by the operator's arguments
        self.written = _Plans()  # by memory for the results and what callers give
        OPERATORS[name] = self
        # Not torch.library.custom_op, whose guards against operators that keep or change their inputs take longer than
        # a launch.
        _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        for device in ("CUDA", "CPU"):
            _LIBRARY.impl(name, self._launched, device)
        self.custom = getattr(torch.ops.fusebook, name).default
        torch.library.register_fake(f"fusebook::{name}", self._shaped, lib=_LIBRARY)
        self.custom.planned = self._compiled
        self.batched = batched or self.one_by_one
        torch.library.register_vmap(f"fusebook::{name}", self.batched, lib=_LIBRARY)
        self._differentiated(*(gradient or (self._no_gradient, lambda ctx, inputs, output: None)))
        self.call = self._caller()

    # Calls --------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        """Check and compute, with a gradient where one is recorded."""
        return self.call(*args)

    def _caller(self) -> Callable[..., Any]:
        """`call`, which is this operator as a function: Python takes longer to call an object."""
        plans, custom, traced = self.plans, self.custom, self.traced or self.check

        def call(*args: Any) -> Any:
            if _traced():
                return custom(*traced(*args))
            result = plans.again(*args)
            return self._looked_up(args) if result is _OTHER else result

        return call

    def _looked_up(self, args: tuple[Any, ...]) -> Any:
        """A call that is not the last one again."""
        if watched():
            return self.dispatched(*self.check(*args))
        result = self.plans.before(args)
        if result is not _OTHER:
            return result
        tensors: list[Tensor] = []
        key, plan = self._planned(self.plans, args, tensors, _grad_enabled())
        if plan is None:
            return self._first(args, key, tensors)
        self._remember(self.plans, args, tensors, key, plan)
        if self.read is not None:
            self.read(*args)
        return self._again(self._apply(plan.replay, plan.template, *tensors)) if key[0] else plan.replay(*tensors)

    def _remember(self, plans: _Plans, args: Sequence[Any], tensors: Sequence[Tensor], key: Any, plan: _Plan) -> None:
        """Have a call of its kind known without a key, if it is the next one."""
        if plan.again is None:
            plan.again = self._knowing(plans, args, tensors, key, plan)
        elif plan.again is plans.again:  # what dispatches tensors has changed, by autocast for instance
            plan.again.__globals__["guard"] = _guarded(tensors)
        plans.last(args, plan.again)

    def _knowing(
        self, plans: _Plans, args: Sequence[Any], tensors: Sequence[Tensor], key: Any, plan: _Plan
    ) -> Callable[..., Any]:
        """The function that knows a call again: the plan, behind one question for all that its key holds."""
        recorded, modes, _, places = key
        names = plan.replay.__globals__ | {
            "guard": _guarded(tensors), "current": _current, "device": plan.device, "OTHER": _OTHER,
            "aside": _aside, "enters": _enters, "leaves": _leaves, "runtime": _runtime, "compilation": _compilation,
            "unhooked": unhooked, "grad": _grad_enabled, "modes": self.modes, "places": self.places, "read": self.read,
            "apply": self._apply, "template": plan.template, "listed": self._again, "forward": _forward,
        }  # fmt: skip
        found: list[str] = []  # where the tensors are
        tests: list[str] = []

        def constant(value: Any) -> str:
            names[name := f"v{len(names)}"] = value
            return name

        def look(value: Any, name: str) -> None:
            if isinstance(value, Tensor):
                found.append(name)
            elif type(value) in (list, tuple):
                tests.append(f"type({name}) is {type(value).__name__} and len({name}) == {len(value)}")
                for i, v in enumerate(value):
                    look(v, f"{name}[{i}]")
            else:
                like, kind = constant(value), constant(type(value))
                tests.append(f"({name} is {like} or type({name}) is {kind} and {name} == {like})")

        given: list[str] = []
        for value in args:
            given.append(f"a{len(found)}" if isinstance(value, Tensor) else f"g{len(given)}")
            look(value, given[-1])
        inputs = ", ".join(given[plans is self.written :])
        tests.append(f"guard({', '.join(found)})")
        tests += [f"{n}.data_ptr() & 15 == {t.data_ptr() & 15}" for n, t in zip(found, tensors, strict=True)]
        if plans is self.plans and any(t.requires_grad for t in tensors):
            tests.append(f"grad() is {recorded}")
        if self.modes is not None:
            tests.append(f"modes() == {constant(modes)}")
        if self.places is not None:
            tests.append(f"places({inputs}) == {constant(places)}")
        tests.append("current() == device")
        tests.append("forward['_current_level'] < 0")
        # Where nothing of Triton's is set, there is nothing to ask.
        tests.append("(not (aside or enters or leaves or runtime or compilation) or unhooked())")
        lines = [f"a{i} = {n}" for i, n in enumerate(found) if n != f"a{i}"] + plan.replay.lines
        if recorded:
            lines = [f"return listed(apply(replay, template, {', '.join(found)}))"]
        if self.read is not None and plans is not self.checked:
            lines.insert(0, f"read({inputs})")
        source = "".join(f"        {line}\n" for line in lines)
        source = f"def again({', '.join(given)}):\n    if {' and '.join(tests)}:\n{source}    return OTHER\n"
        exec(compile(source, "<again>", "exec"), names)
        names["again"].source = source
        return names["again"]  # type: ignore[no-any-return]

    def dispatched(self, *inputs: Any) -> Any:
        """Through torch's dispatcher, for whoever traces or transforms; arguments as of the operator."""
        if _compiling():
            return self.custom(*inputs)
        if not _transforms():
            if _forward["_current_level"] >= 0 and any(unpack_dual(t).tangent is not None for t in _flat(inputs)):
                self._no_tangents()
            return self.custom(*inputs)
        if torch._C._functorch.peek_interpreter_stack().key() == _FUNCTIONAL:
            return self.custom(*inputs)
        return self._again(self._transformed.apply(_template(inputs), *_flat(inputs)))

    def _again(self, result: Any) -> Any:
        """A list again, of which autograd's functions have made a tuple."""
        return list(result) if self.listed else result

    def _planned(
        self,
        plans: _Plans,
        args: Sequence[Any],
        tensors: list[Tensor],
        grad: bool,
        outs: tuple[Any, ...] = (),
    ) -> tuple[Any, _Plan | None]:
        """The key of a call and its plan, collecting the tensors; two None where no plan may be kept or used."""
        try:
            described = _described((*outs, *args) if outs else args, tensors)
            if described is None:
                return None, None
            recorded = grad and any([t.requires_grad for t in tensors])
            modes = self.modes() if self.modes is not None else None
            places = self.places(*args) if self.places is not None else None
            key = recorded, modes, described, places
            plan = plans.get(key)
        # Without strides, not to be hashed, or about to be refused.
        except (AttributeError, RuntimeError, TypeError):
            return None, None
        device = _current()
        if plan is None and any([t.get_device() != device for t in tensors]):
            return None, None
        return (key, plan) if (plan is None or plan.device == device) and unhooked() else (None, None)

    def _first(self, args: tuple[Any, ...], key: Any, tensors: list[Tensor]) -> Any:
        """A call for which there is no plan: checked, launched, and remembered."""
        inputs = self.check(*args)
        found = _flat(inputs)
        if self.listed and not all(map(_stored, found)):
            raise NotImplementedError(
                f"{self.name}: expected a gradient at a time, got a batch of them, for which torch's is_grads_batched "
                "has no rule; use torch.func.vmap of what torch.func.vjp returns, or torch.func.jacrev"
            )
        # What torch.func.vjp returns is called with wrapped tensors when nothing is transformed any more, and gradients
        # that torch.autograd asks for by the batch have no memory.
        if any(
            type(t) not in (Tensor, Parameter)
            or t.device.type not in ("cpu", "cuda")
            or _wrapped(t)
            or not (_stored(t) and (t.data_ptr() or not t.numel()))
            for t in found
        ):
            return self.custom(*inputs)
        if self.read is not None:
            self.read(*args)
        if _grad_enabled() and any(t.requires_grad for t in found):
            result = self._again(self._eager.apply(lambda *_: self._launched(*inputs), _template(inputs), *found))
        else:
            result = self._launched(*inputs)
        if key is not None and len(found) == len(tensors) and all(a is b for a, b in zip(found, tensors, strict=True)):
            _, plan = self._planned(self.checked, inputs, [], False)
            if plan is not None:
                self.plans.keep(key, plan)
        return result

    def _shaped(self, *inputs: Any) -> Any:
        """Results without memory, for whoever traces."""
        # The code that torch.compile generates need not ask torch's dispatcher either.
        writers = sys.modules.get("torch._inductor.codegen.custom_extern_kernel_codegen")
        if writers is not None:
            call = f"torch.ops.fusebook.{self.name}.default"

            def write(node: Any, line: Callable[[str], None]) -> None:
                line(f"{node.get_name()} = {call}.planned({', '.join([*node.codegen_args(), *node.codegen_kwargs()])})")

            writers.CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(call, writers.CustomCodegen(python=write))
        if self.traced is not None:
            inputs = self.check(*inputs)
        return self.outputs(*inputs)

    def _compiled(self, *inputs: Any) -> Any:
        """Called by code that torch.compile has generated, in place of the dispatcher where that has nothing to do."""
        result = self.checked.again(*inputs)
        if result is _OTHER:
            result = self.checked.before(inputs)
        if result is not _OTHER:
            return result
        plain = not watched() and all(
            type(t) in (Tensor, Parameter) and not t.is_neg() and not (t.requires_grad and _grad_enabled())
            for t in _flat(inputs)
        )
        return self._launched(*inputs) if plain else self.custom(*inputs)

    def _launched(self, *inputs: Any) -> Any:
        """Allocate and launch; the arguments are checked."""
        result = self.checked.again(*inputs)
        if result is not _OTHER:
            return result
        if INTERPRETED or _tape.fresh_memory is None or _state.tape is not None:
            return self._computed(*inputs)
        tensors: list[Tensor] = []
        key, plan = self._planned(self.checked, inputs, tensors, False)
        if plan is not None:
            self._remember(self.checked, inputs, tensors, key, plan)
            return plan.replay(*tensors)
        if key is None:
            return self._computed(*inputs)
        # A tensor that is given twice is two arguments: another call may give two.
        apart = [t if all(t is not o for o in tensors[:i]) else t.view_as(t) for i, t in enumerate(tensors)]
        inputs = _refilled(_template(inputs), iter(apart))
        result, replay = record(apart, lambda: self._computed(*inputs))
        if replay is not None:
            self.checked.keep(key, _Plan(_current(), replay, _template(inputs)))
        return result

    def _computed(self, *inputs: Any) -> Any:
        found = self.outputs(*inputs)
        self._filled(found, inputs)
        return found

    def _filled(self, found: Any, inputs: Sequence[Any]) -> None:
        outs = _flat([found])
        if any(o.numel() for o in outs):
            with launching(outs[0]):
                self.into(found, *inputs)

    def write(self, out: Any, *args: Any) -> None:
        """Check and compute into memory that is given, as `outputs` would return it; no gradient is recorded.

        What it holds does not matter, and it overlaps no argument.
        """
        if self.written.again(out, *args) is not _OTHER or self.written.before((out, *args)) is not _OTHER:
            return
        tensors: list[Tensor] = []
        key, plan = self._planned(self.written, args, tensors, False, (out,))
        inputs = self.check(*args) if plan is None else ()
        if self.read is not None:
            self.read(*args)
        if plan is not None:
            self._remember(self.written, (out, *args), tensors, key, plan)
            plan.replay(*tensors)
        elif key is None:
            self._filled(out, inputs)
        else:
            _, replay = record(tensors, lambda: self._filled(out, inputs))
            if replay is not None:
                self.written.keep(key, _Plan(_current(), replay, ()))

    # Gradients, batches -------------------------------------------------------------------------------------------

    def _differentiated(self, backward: Callable[..., Any], keep: Callable[..., None]) -> None:
        """Register the gradient twice: with torch's dispatcher, and without it, which takes a fraction of the time."""
        backward = functools.partial(_as_they_are, backward)
        _LIBRARY.impl(self.name, make_autograd_impl(self.custom, Info(backward, keep)), "Autograd", with_keyset=True)

        def flattened(ctx: Any, *gradients: Any) -> list[Any]:
            """A gradient for each tensor among the arguments."""
            found = backward(ctx, list(gradients)) if self.listed else backward(ctx, *gradients)
            flat: list[Any] = []
            for g, a in zip(found if isinstance(found, tuple) else (found,), ctx.template, strict=True):
                if a is _HOLE:
                    flat.append(g)
                elif type(a) is tuple:
                    inside = [None] * len(a[1]) if g is None else g
                    flat += [v for v, b in zip(inside, a[1], strict=True) if b is _HOLE]
            return flat

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, call: Callable[..., Any], template: tuple[Any, ...], *tensors: Tensor) -> Any:
                result = call(*tensors)
                ctx.template = template
                keep(ctx, _refilled(template, iter(tensors)), result)
                return tuple(result) if isinstance(result, list) else result

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return None, None, *flattened(ctx, *gradients)

        class Transformed(torch.autograd.Function):
            """For torch.func, which wants to see what a function saves, and its rule for batches."""

            @staticmethod
            def forward(template: tuple[Any, ...], *tensors: Tensor) -> Any:
                result = self.custom(*_refilled(template, iter(tensors)))
                return tuple(result) if isinstance(result, list) else result

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                ctx.template = inputs[0]
                keep(ctx, _refilled(inputs[0], iter(inputs[1:])), output)

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return None, *flattened(ctx, *gradients)

            @staticmethod
            def jvp(ctx: Any, *tangents: Any) -> Any:
                self._no_tangents()

            @staticmethod
            def vmap(info: Any, in_dims: Sequence[Any], template: tuple[Any, ...], *tensors: Tensor) -> Any:
                places = iter(in_dims[1:])
                along = tuple(_places(a, places) for a in template)
                return self.batched(info, along, *_refilled(template, iter(tensors)))

        self._eager, self._transformed = Eager, Transformed
        # Torch's own `apply` first looks for transforms, which is done here already.
        self._apply = super(torch.autograd.Function, Eager).apply

    def _no_tangents(self) -> NoReturn:
        raise NotImplementedError(
            f"{self.name}: expected derivatives in reverse mode, got forward mode, for which it has no rule; "
            "use torch.func.jacrev for torch.func.jacfwd, twice for torch.func.hessian"
        )

    def _no_gradient(self, ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            f"{self.name}: expected no gradient to be asked for, since it has none; detach its arguments, or call it "
            "under torch.no_grad()"
        )

    def one_by_one(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """The rule of an operator without one: each member of the batch by itself."""

        def member(i: int, a: Any, at: Any) -> Any:
            if isinstance(a, Tensor):
                return a if at is None else a.select(at, i)
            if isinstance(a, (list, tuple)) and at is not None:
                return [member(i, v, d) for v, d in zip(a, at, strict=True)]
            return a

        def made(i: int) -> Any:
            return self.dispatched(*(member(i, a, d) for a, d in zip(args, in_dims, strict=True)))

        if not info.batch_size:  # nobody to ask how a result looks: one of zeros is, and left out
            args = tuple(_one_of_zeros(a, d) for a, d in zip(args, in_dims, strict=True))
            found = made(0)
            return tree_map_only(Tensor, lambda t: t[None][:0], found), tree_map_only(Tensor, lambda t: 0, found)
        found = [made(i) for i in range(info.batch_size)]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        stacked = [torch.stack(members) for members in zip(*found, strict=True)]
        return type(found[0])(stacked), type(found[0])(0 for _ in stacked)
