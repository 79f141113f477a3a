"""From a launcher to an operator: what a call checks, launches, remembers and differentiates, in one path.

    call -> the same call as before?  replay what it did: allocate, launch, return
            another one?              check, launch as usual, and record what was done

Under a compiler, a transform, a tracer or fake tensors, the operator goes through torch's dispatcher instead. There it
is registered as ``torch.ops.<package>.<name>``, after the package that this file is in: a copy is another package.

Launchers ask here, and not ``x.is_cuda``: they also run in Triton's interpreter, and compile for a GPU that is absent.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
import itertools
import math
import numbers
import operator
import os
import pkgutil
import threading
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from triton.tools.tensor_descriptor import TensorDescriptor

# Private names -------------------------------------------------------------------------------------------------------


def _private(path: str, fallback: Any) -> Any:
    """What torch or Triton has under a private name; without it, the fallback, which is slower and as correct."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return fallback


# Without the first three, calls take the long path through torch's dispatcher.
_modes = _private("torch:_C._len_torch_dispatch_stack", lambda: 1)
_transforms = _private("torch:_C._are_functorch_transforms_active", lambda: True)
_tracing = _private("torch:_C._get_tracing_state", torch.jit.is_tracing)
_includes = _private("torch:_C._dispatch_tls_is_dispatch_key_included", lambda key: True)
#: Whether ``make_fx`` traces this thread ahead of autograd, as ``pre_dispatch=True`` asks for. By ``__call__``, since
#: torch.compile of torch 2.11 would have the function itself in its graph, and fail.
_ahead = functools.partial(_includes.__call__, torch._C.DispatchKey.PreDispatch)
_autocast = _private("torch:_C._is_any_autocast_enabled", lambda: True)
_wrapped = _private("torch:_C._functorch.is_functorch_wrapped_tensor", lambda x: True)
_apply = _private("torch:_C._FunctionBase.apply", None)  # an attribute of each class; see `_Recorded`
_memory = _private(
    "torch:_C._dynamo.guards._empty_strided_cuda",
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"),
)
_tensor_guards = _private("torch:_C._dynamo.guards.TensorGuards", None)
#: The current GPU, its stream; without a GPU, nothing that the device of a tensor could equal.
_current: Callable[[], int | None] = lambda: None  # noqa: E731
if torch.cuda.is_available():
    _current = _private("torch:_C._cuda_getDevice", torch.cuda.current_device)
_stream = _private("torch:_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
_has_kernel = _private("torch:_C._dispatch_has_kernel_for_dispatch_key", lambda name, key: True)
_NODE = "_backward_cls"  # an attribute of such a class: that of its nodes
_functorch = _private("torch:_C._functorch.peek_interpreter_stack", lambda: True)
_functionalize = _private("torch:_C._functorch.TransformType.Functionalize", None)
_ad = vars(torch.autograd.forward_ad)  # of forward-mode differentiation whether it is under way
_LEVEL = "_current_level"
if _LEVEL not in _ad:
    _ad = {_LEVEL: 0}
_profiler = vars(torch.autograd.profiler)
_PROFILING = "_is_profiler_enabled"
if _PROFILING not in _profiler:
    _profiler = {_PROFILING: False}
_knobs = triton.knobs.runtime
_runtime, _compilation = _knobs.__dict__, triton.knobs.compilation.__dict__  # knobs of Triton that a program has set
_enter, _leave = (getattr(hook, "calls", []) for hook in (_knobs.launch_enter_hook, _knobs.launch_exit_hook))
_dynamo = torch.compiler.is_dynamo_compiling
_grad = torch.is_grad_enabled

# The interpreter -----------------------------------------------------------------------------------------------------

#: Whether Triton interprets; decided when it is imported.
INTERPRETED: bool = _knobs.interpret
if INTERPRETED:
    from triton.language import bfloat16, float32, float64
    from triton.runtime import interpreter

    _builder, _patched = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    if not hasattr(_builder, "get_bf16"):  # Triton 3.6 interprets no constants of bfloat16
        _builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), bfloat16)

        def _with_index(tensor: Any, scope: Any) -> None:
            """Take an array of one number for a number, which NumPy does not from 2.4 on."""
            _patched(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = _with_index

    if not hasattr(_builder, "_cast_directly"):  # by another copy of this file
        _builder._cast_directly = _builder.cast_impl

        def _cast_by_steps(self: Any, source: Any, kind: Any) -> Any:
            """Round to the nearest bfloat16, as a GPU does. The interpreter cuts off bits, or makes integers.

            It also reads bfloat16 below the normal range as other numbers.
            """
            of, to = source.dtype.scalar, kind.scalar
            if to == bfloat16 and of in (float32, float64):
                bits = source.data.astype("float32").view("uint32")
                nearest = bits + 0x7FFF + (bits >> 16 & 1)
                nan = (bits & 0x7FFFFFFF) > 0x7F800000  # whose bits could be rounded to those of infinity
                bits = nearest * ~nan + (bits | 1 << 22) * nan
                return interpreter.TensorHandle((bits >> 16).astype("uint16"), to)
            if of == bfloat16 and to == float32:
                return interpreter.TensorHandle((source.data.astype("uint32") << 16).view("float32"), to)
            return self._cast_directly(source, kind)

        _builder.cast_impl = _cast_by_steps

#: The interpreter replaces Triton's language while a kernel runs: in one thread at a time.
_by_turns: Any = threading.RLock() if INTERPRETED else contextlib.nullcontext()
if INTERPRETED:  # a process that is forked meanwhile would wait for a thread that it does not have
    os.register_at_fork(before=_by_turns.acquire, after_in_parent=_by_turns.release, after_in_child=_by_turns.release)

# Devices and states --------------------------------------------------------------------------------------------------


#: The capability of a GPU of AMD, which has nothing that launchers choose by: the driver's 9.4 is not NVIDIA's.
AMD = (0, 0)


@functools.cache
def gpu(device: torch.device) -> tuple[tuple[int, int] | None, int]:
    """Capability and multiprocessors of a device; in the interpreter None, and few enough for small tests to share."""
    if INTERPRETED:
        return None, 4
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            return AMD, properties.multi_processor_count
        return (properties.major, properties.minor), properties.multi_processor_count
    driver = triton.runtime.driver.active  # of a GPU that is absent
    target = driver.get_current_target()
    capability = divmod(target.arch, 10) if target.backend == "cuda" else AMD
    return capability, driver.utils.get_device_properties(0)["multiprocessor_count"]


def refuse(error: type[Exception], name: str, expected: str, got: object, remedy: str) -> NoReturn:
    """Raise an error that says what a function expected, what it got, and what to do."""
    raise error(f"{name}: expected {expected}, got {got}; {remedy}")


@contextlib.contextmanager
def launching(tensor: Tensor) -> Iterator[None]:
    """Launch on the tensor's device. In the interpreter, NaN raises no warning, as on a GPU."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            yield
    else:
        import numpy

        with numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield


def capturing(x: Tensor) -> bool:
    """Whether a graph is captured, so that values cannot be read."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which elements of a dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def overlapping(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that starts before the previous one has ended: on Hopper and later, none elsewhere.

    Such a kernel reads what the previous one has written only after `gdc_wait`.
    """
    capability, _ = gpu(device)
    return {"launch_pdl": True} if capability is not None and capability >= (9, 0) else {}


def watched() -> bool:
    """Whether a compiler, tracer or transform is at work, so that a call must go through torch's dispatcher."""
    if torch.compiler.is_compiling():
        return True
    return bool(_modes() or _ahead() or _transforms() or _ad[_LEVEL] >= 0 or _tracing())


def readable(x: Tensor) -> bool:
    """Whether its values can be read: not under torch.jit.trace or torch.func."""
    return not (x.is_meta or _tracing() or (_transforms() and _wrapped(x)))


_uncached: list[None] = []
#: What is empty, unless the launches of a replay might not be those that a program asks for.
_settings = _uncached, _enter, _leave, _runtime, _compilation


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Inside, every call goes through its launcher, as the first one does."""
    _uncached.append(None)
    try:
        yield
    finally:
        _uncached.pop()


def unhooked() -> bool:
    """Whether a launch may bypass Triton's `run`: no hooks, no debugging, no instrumentation."""
    enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    return not (
        _uncached
        or getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or _knobs.debug
        or "instrumentation_mode" in _compilation
    )


class _Guards:
    """What tells whether as many tensors are of the same kinds as these, by the guards of torch.compile.

    Those end the process where sizes cannot be asked: of nested tensors, of their members within torch.vmap, which have
    no address, and of a subclass that answers for them itself and fails.
    """

    def __init__(self, *tensors: Tensor, **dims: None) -> None:
        own = any([type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in tensors])
        self._check = (lambda *others: False) if own else _tensor_guards(*tensors, **dims).check

    def addresses(self, others: Sequence[Any]) -> list[int] | None:
        """Those of the other tensors, or None if these are of other kinds."""
        try:
            found = [*map(_address, others)]
            for t in others:  # for few tensors faster than a generator
                if t.is_nested:
                    return None
            return found if self._check(*others) else None
        except (AttributeError, TypeError, RuntimeError):  # no tensor, or one without memory of its own
            return None

    def check(self, *others: Any) -> bool:
        """Whether the other tensors are of these kinds."""
        return self.addresses(others) is not None


_guards: Any = _tensor_guards and _Guards  # without them, calls are looked up by a key

# What a call does, recorded and replayed -----------------------------------------------------------------------------

#: Calls that an operator remembers; with one more it forgets all. One takes some kilobytes.
_MOST_CALLS = 1024
#: Calls that it recognises without a key, by the guards of torch.compile: the last ones.
_RECENT = 4
#: Launches of a call that is remembered, at most.
_MOST_LAUNCHES = 64
_ALLOCATE, _LAUNCH, _TORCH = range(3)


class Distance(int):
    """The elements from the beginning of one tensor to that of another, as a stride of a tensor descriptor.

    A replay computes it again, since the next tensors may be elsewhere.
    """

    ends: tuple[Tensor, Tensor]

    def __new__(cls, start: Tensor, end: Tensor) -> Distance:
        made = super().__new__(cls, (end.data_ptr() - start.data_ptr()) // start.element_size())
        made.ends = start, end
        return made


def _pick(places: Sequence[int]) -> Callable[..., Any]:
    """A function that returns several items of a tuple, as a tuple."""
    first = places[0] if places else 0
    if [*places] == [*range(first, first + len(places))]:
        return operator.itemgetter(slice(first, first + len(places)))
    return operator.itemgetter(*places)


def _spread(args: Sequence[Any]) -> tuple[list[Any], list[int | None] | None]:
    """Arguments without lists, and the lengths of these, None where an argument is none; None without any list."""
    lengths = [len(a) if type(a) in (list, tuple) else None for a in args]
    if not any([n is not None for n in lengths]):
        return [*args], None
    return [b for a, n in zip(args, lengths, strict=True) for b in ((a,) if n is None else a)], lengths


def _nested(flat: Sequence[Any], lengths: list[int | None] | None) -> Sequence[Any]:
    """Arguments with lists again."""
    if lengths is None:
        return flat
    ahead = iter(flat)
    return [next(ahead) if n is None else [*itertools.islice(ahead, n)] for n in lengths]


def _flat(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, also in lists."""
    return [b for a in args for b in (a if type(a) in (list, tuple) else (a,)) if isinstance(b, Tensor)]


@dataclasses.dataclass(eq=False)
class _Replay:
    """What a call did, to be done with other tensors of the same kind."""

    device: int
    steps: list[Any]
    results: Any
    # Where a gradient is recorded: the operator, its arguments that are no tensors, a function that puts these and the
    # tensors in order, and the lengths of lists.
    op: Operator | None = None
    rest: tuple[Any, ...] = ()
    inputs: Any = None
    lengths: list[int | None] | None = None
    known: Any = None  # what tells whether a call is this one: see `Operator.call`; () where nothing does but a key

    def run(self, slots: list[Tensor], at: list[int]) -> Any:
        """Allocate and launch, given tensors and their addresses, to which those of fresh memory are added."""
        stream = _stream(self.device)
        for kind, step in self.steps:
            if kind == _ALLOCATE:
                memory = _memory(*step)
                slots.append(memory)
                at.append(memory.data_ptr())
            elif kind == _LAUNCH:
                run, grid, known, template, holes, packed, _ = step
                values = template.copy()
                for i, find in holes:
                    values[i] = find(at)
                if packed:
                    run(*grid, stream, *known, tuple(values))
                else:
                    run(*grid, stream, *known, *values)
            else:
                function, args, options, views, made = step
                args, options = args.copy(), options.copy()
                for i, find in views:
                    (args if type(i) is int else options)[i] = find(slots)
                found = function(*args, **options)
                for i in made:
                    slots.append(found if i is None else found[i])
                    at.append(slots[-1].data_ptr())
        return None if self.results is None else self.results(slots)


#: Operations of torch that return fresh memory, and those that a replay can leave out, besides views.
_FRESH = ("empty", "empty_like", "empty_strided", "new_empty")
_HARMLESS = (*_FRESH, "detach", "promote_types", "_unsafe_view")


class _Recording(TorchDispatchMode):
    """Records the memory that a launcher allocates, its `launch` and `apply`; notices whether it does anything else.

    A launcher chooses its launches from shapes, strides, dtypes, devices and plain arguments, which are all in the key
    of a call. A replay only allocates, and launches the same kernels with other addresses.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors = list(tensors)  # by slot; alive, so that no other tensor has their memory
        self.steps: list[tuple[int, Any]] = []
        self.inside = self.incomplete = False
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if self.inside or func.is_view:
            return result
        # Kernels write it as a whole: a replay need not fill it, as torch does where algorithms are deterministic.
        if name in _FRESH and result.device == self.tensors[0].device:
            self.tensors.append(result)
            self.steps.append((_ALLOCATE, (tuple(result.shape), tuple(result.stride()), result.dtype)))
        self.incomplete |= name not in _HARMLESS
        return result

    def place(self, t: Tensor) -> tuple[int, int]:
        """The slot of a tensor, or of the one whose memory it shares, and the bytes between them."""
        for i, other in enumerate(self.tensors):
            if other is t:
                return i, 0
        memory = t.untyped_storage().data_ptr()
        sharing = [i for i, other in enumerate(self.tensors) if other.untyped_storage().data_ptr() == memory]
        if len(sharing) != 1:  # unknown, or of two arguments in one memory, which the next two need not be
            self.incomplete = True
            return 0, 0
        other = self.tensors[sharing[0]]  # addresses would not do: an empty tensor begins at 0
        start = int(other.storage_offset()) * other.element_size()
        return sharing[0], int(t.storage_offset()) * t.element_size() - start

    def address(self, value: Any) -> Callable[[Sequence[int]], Any] | None:
        """What makes an argument of a kernel from addresses, in C where it can; None where it depends on none."""
        if isinstance(value, Tensor) and value.numel():
            slot, offset = self.place(value)
            return operator.itemgetter(slot) if not offset else lambda at: at[slot] + offset
        if type(value) is tuple:
            found = [(self.address(v), 0 if isinstance(v, Tensor) else v) for v in value]
            if found and all([type(find) is operator.itemgetter for find, _ in found]):
                slot, *slots = (self.place(v)[0] for v in value)
                return operator.itemgetter(slot, *slots) if slots else lambda at: (at[slot],)
            if any([find or isinstance(v, Tensor) for (find, _), v in zip(found, value, strict=True)]):
                return lambda at: tuple([v if find is None else find(at) for find, v in found])
        if isinstance(value, TensorDescriptor):
            base, fields = self.address(value.base), {**value.__dict__, "base": None, "strides": None}
            strides: list[Any] = [
                (*map(self.address, s.ends), s.ends[0].element_size()) if isinstance(s, Distance) else s
                for s in value.strides
            ]

            def descriptor(at: Sequence[int]) -> TensorDescriptor:
                made, address = object.__new__(TensorDescriptor), base(at) if base else 0
                now = [(s[1](at) - s[0](at)) // s[2] if type(s) is tuple else s for s in strides]
                # Triton reads nothing but `data_ptr` from the base.
                made.__dict__.update(fields, base=types.SimpleNamespace(data_ptr=lambda: address), strides=now)
                return made

            return descriptor
        return None

    def tensor(self, value: Any) -> Callable[[Sequence[Tensor]], Any] | None:
        """What makes an argument of an operation of torch, or a result, from tensors; None where it depends on none."""
        if isinstance(value, Tensor):
            slot, offset = self.place(value)
            base, shape, strides = self.tensors[slot], tuple(value.shape), tuple(value.stride())
            self.incomplete |= value.dtype != base.dtype
            if not offset and (shape, strides) == (base.shape, base.stride()):
                return operator.itemgetter(slot)
            offset //= value.element_size()
            return lambda slots: slots[slot].as_strided(shape, strides, slots[slot].storage_offset() + offset)
        if type(value) in (tuple, list):
            kind, found = type(value), [(self.tensor(v), None if isinstance(v, Tensor) else v) for v in value]
            return lambda slots: kind([v if find is None else find(slots) for find, v in found])
        return None

    def launched(self, kernel: Any, grid: Sequence[int], args: Any, constants: dict[str, Any], compiled: Any) -> None:
        """Note a launch: the compiled kernel, and its arguments with holes for addresses."""
        self.launches += 1
        known = tuple(getattr(compiled, name, None) for name in ("function", "packed_metadata"))
        if known[1] is None or kernel.pre_run_hooks or self.launches > _MOST_LAUNCHES:
            self.incomplete = True
            return
        bound = dict(zip(kernel.arg_names, args, strict=False)) | constants
        values = [bound[p.name] if p.name in bound else p.default for p in kernel.params]
        holes = [(i, find) for i, find in enumerate(map(self.address, values)) if find is not None]
        template = [0 if isinstance(v, Tensor) else v for v in values]  # a replay holds no tensors
        for i, _ in holes:
            template[i] = None
        sizes = (*grid, 1, 1)[:3]
        run, known, packed = _below(compiled, sizes, (*known, None, None, None), len(values))
        # With the kernel, since Triton unloads what nobody holds.
        self.steps.append((_LAUNCH, (run, sizes, known, template, holes, packed, compiled)))

    def applied(self, function: Any, args: Any, options: dict[str, Any]) -> Any:
        """Call an operation of torch, and note it with the slots of its results."""
        self.inside = True
        try:
            result = function(*args, **options)
        finally:
            self.inside = False
        several = isinstance(result, (tuple, list))
        given: dict[Any, Any] = {**dict(enumerate(args)), **options}
        views = {i: find for i, find in ((i, self.tensor(v)) for i, v in given.items()) if find is not None}
        made, known = [], [*self.tensors, *_flat([*given.values()])]
        for i, t in enumerate(result if several else [result]):  # but for what was written to, or needed no copy
            if isinstance(t, Tensor) and not any(t is other for other in known):
                self.tensors.append(t)
                made.append(i if several else None)
        given.update(dict.fromkeys(views))  # a replay holds no tensors
        plain = [given.pop(i) for i in range(len(args))]
        self.steps.append((_TORCH, (function, plain, given, [*views.items()], made)))
        return result


def _below(compiled: Any, grid: Any, known: Any, count: int) -> tuple[Any, tuple[Any, ...], bool]:
    """The function that Triton's launcher calls, what it passes before a kernel's arguments, and whether as a tuple.

    Triton's launcher is a Python object around a function in C. It is called once with stand-ins, and the function
    replaced by one that keeps what is passed. Where this fails, the launcher itself is called.
    """
    run, metadata = compiled.run, compiled.metadata
    scratch = any(getattr(metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
    if hasattr(run, "launch") and not scratch:
        passed: list[Any] = []
        stream, arguments = object(), tuple(object() for _ in range(count))
        probe = copy.copy(run)
        probe.launch = lambda *found: passed.extend(found)
        probe(*grid, stream, *known, *arguments)
        if tuple(passed[:4]) == (*grid, stream):
            if passed[-1] == arguments:
                return run.launch, tuple(passed[4:-1]), True
            if tuple(passed[-count:]) == arguments:
                return run.launch, tuple(passed[4:-count]), False
    return run, known, False


#: What a thread is recording, if anything.
_recording: contextvars.ContextVar[_Recording | None] = contextvars.ContextVar("recording", default=None)


def side_by_side(device: torch.device, *wanted: tuple[Sequence[int], torch.dtype]) -> list[Tensor]:
    """Tensors of given shapes and dtypes in one piece of memory: an allocation is host time, whatever its size."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
    starts = [0, *itertools.accumulate(triton.cdiv(size, 256) * 256 for size in sizes)]
    memory = torch.empty(starts[-1:], dtype=torch.uint8, device=device)
    cut = zip(wanted, sizes, starts, strict=False)
    return [memory[start : start + size].view(dtype).view(shape) for (shape, dtype), size, start in cut]


@functools.cache
def _nvidia() -> bool:
    """Whether launches are for a GPU of NVIDIA."""
    return INTERPRETED or triton.runtime.driver.active.get_current_target().backend == "cuda"


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> Any:
    """Launch a kernel: ``kernel[grid](*args, **constants)``."""
    if not _nvidia():  # AMD's compiler limits no registers, and 16 of its warps are 1024 threads, the most
        constants.pop("maxnreg", None)
        constants["num_warps"] = min(16, constants.get("num_warps", 4))
    with _by_turns:
        compiled = kernel[grid](*args, **constants)
    if (recording := _recording.get()) is not None:
        recording.launched(kernel, grid, args, constants, compiled)
    return compiled


def apply(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call an operation of torch, so that a replay calls it too."""
    recording = _recording.get()
    return function(*args, **options) if recording is None else recording.applied(function, args, options)


def contiguous(x: Tensor) -> Tensor:
    """A tensor without gaps, copied where it has some."""
    return x if x.is_contiguous() else apply(Tensor.contiguous, x)


def record(tensors: Sequence[Tensor], call: Callable[[], Any]) -> tuple[Any, _Replay | None]:
    """Make a call; return its result, and what does the same with other tensors of the same kind, or None."""
    recording = _Recording(tensors)
    token = _recording.set(recording)
    try:
        with recording:
            result = call()
    finally:
        _recording.reset(token)
    results, devices = recording.tensor(result), {t.get_device() for t in tensors}
    if recording.incomplete or len(devices) != 1:
        return result, None
    return result, _Replay(devices.pop(), recording.steps, results)


# Arguments of an operator --------------------------------------------------------------------------------------------

#: Of arguments that are equal where they have one type.
_PLAIN = {int, float, bool, str, type(None), torch.dtype}
_address = Tensor.data_ptr


def _described(args: Sequence[Any], tensors: list[Tensor], at: list[int]) -> tuple[Any, ...]:
    """All of the arguments that a launcher may depend on; collects tensors and addresses. TypeError without a key.

    It is finer than what Triton specialises kernels for: sizes and strides, not what divides them.
    """
    parts: list[Any] = []
    for a in args:
        kind = type(a)
        if kind is Tensor or kind is Parameter:
            tensors.append(a)
            address = a.data_ptr()  # raises without memory
            if not address and a.numel():
                raise TypeError("memory elsewhere")
            at.append(address)
            parts.append((a.get_device(), a.dtype, a.shape, a.stride(), address & 15, a.is_neg(), a.requires_grad))
        elif kind is int or kind is str or a is None:
            parts.append(a)
        elif kind is tuple or kind is list:
            parts.append((kind, _described(a, tensors, at)))
        elif isinstance(a, Tensor):
            raise TypeError("a subclass may mean something else by any of this")
        else:
            parts.append((kind, a))
    return tuple(parts)


def as_it_is(g: Any) -> Any:
    """A gradient whose memory holds its values: a view may negate them."""
    if isinstance(g, list):
        return [as_it_is(one) for one in g]
    return g.resolve_neg() if isinstance(g, Tensor) and g.is_neg() else g


def autocasts(device: str) -> bool:
    """Whether autocast is on for tensors of a device; there are devices that it does not know, such as meta."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocasts_in_graph(device: str) -> bool:
    """The same by what torch.compile of torch 2.11 traces, too."""
    return device != "meta" and torch.is_autocast_enabled(device)


def _cast(args: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Arguments with tensors in a dtype, but for integers and float64, which autocast leaves as they are."""
    return [
        _cast(a, dtype)
        if isinstance(a, (list, tuple))
        else a.to(dtype)
        if isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64
        else a
        for a in args
    ]


def lower(device: str, call: Callable[..., Any], *args: Any) -> Any:
    """The rule of autocast for products: everything in autocast's dtype."""
    return call(*_cast(args, torch.get_autocast_dtype(device)))


def wide(device: str, call: Callable[..., Any], *args: Any, like: str = "layer_norm") -> Any:
    """The rule of autocast for softmax, norms and exp: float32 on a GPU, and no cast on the CPU.

    `like` is the operator of torch whose rule it is: older versions have none for rms_norm.
    """
    casts = device == "cuda" and _has_kernel(f"aten::{like}", "AutocastCUDA")
    return call(*(_cast(args, torch.float32) if casts else args))


# Operators -----------------------------------------------------------------------------------------------------------

#: The package that this file is in, and its operators by name.
NAMESPACE = __name__.partition(".")[0]
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
OPERATORS: dict[str, Operator] = {}


@functools.cache
def _writes(custom: Any) -> list[int]:
    """Which arguments an operator writes, by position."""
    aliases = [argument.alias_info for argument in custom._schema.arguments]
    return [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]


def _written(custom: Any, inputs: Sequence[Any]) -> list[Tensor]:
    """The tensors among the arguments of an operator that it writes."""
    return _flat([inputs[i] for i in _writes(custom)])


def register_writes(custom: Any) -> None:
    """Make autograd refuse a gradient that needs an element which the operator has overwritten.

    Launchers raise the versions of tensors, but a compiler runs no launcher while it traces. An operator that writes
    nothing stays as it is. `torch.library.custom_op` does the same.
    """

    def kernel(keyset: Any, *inputs: Any) -> Any:
        written = _written(custom, inputs)
        if torch.is_grad_enabled() and any(t.requires_grad for t in written):
            remedy = "detach it, or call it under torch.no_grad()"
            refuse(NotImplementedError, custom._opname, "no gradient of what it writes to be recorded", "one", remedy)
        found = custom.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *inputs)
        torch.autograd.graph.increment_version(written)  # afterwards, as torch: modes look up what was saved by version
        return found

    if _writes(custom):
        LIBRARY.impl(custom.name(), kernel, "ADInplaceOrView", with_keyset=True)


def skipped(function: Any) -> None:
    """Make torch.compile leave a function, and what that calls, as they are; see ``torch.compiler.set_stance``."""
    frames = _private("torch:_C._dynamo.eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


class _Recorded(torch.autograd.Function):
    """The gradient of a call: ``apply(what, tensors, addresses, *flat)``, where ``what`` has `op`, `run`, `lengths`.

    The operator's arguments are flat: lists are spread.
    """

    @staticmethod
    def forward(ctx: Any, what: Any, tensors: list[Tensor], at: list[int], *flat: Any) -> Any:
        result = what.run(tensors, at)
        ctx.what, op = what, what.op
        op.keep(ctx, flat if what.lengths is None else _nested(flat, what.lengths), result)
        return tuple(result) if op.listed else result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """A gradient for each argument."""
        op, lengths = ctx.what.op, ctx.what.lengths
        given = [g.resolve_neg() if g is not None and g.is_neg() else g for g in gradients]
        found = op.rule(ctx, given) if op.listed else op.rule(ctx, *given)
        found = found if isinstance(found, tuple) else (found,)
        if lengths is not None:
            found = [[g] if n is None else [None] * n if g is None else g for g, n in zip(found, lengths, strict=True)]
            found = itertools.chain(*found)
        return None, None, None, *found


class _Transformed(_Recorded):
    """The same for torch.func, which has to see what is saved, and needs a rule for batches."""

    @staticmethod
    def forward(what: Any, tensors: None, at: None, *flat: Any) -> Any:  # type: ignore[override]
        result = what.op.custom(*_nested(flat, what.lengths))
        return tuple(result) if what.op.listed else result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.what, _, _, *flat = inputs
        ctx.what.op.keep(ctx, _nested(flat, ctx.what.lengths), output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _no_tangents(ctx.what.op.name)

    @staticmethod
    def vmap(info: Any, in_dims: Any, what: Any, tensors: None, at: None, *flat: Any) -> Any:
        axes, inputs = (_nested(of, what.lengths) for of in (in_dims[3:], flat))
        found, places = (what.op.batched or what.op.one_by_one)(info, tuple(axes), *inputs)
        # Of a list, torch.func would record no gradient.
        return (tuple(found), tuple(places)) if what.op.listed else (found, places)


def recorder(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The `apply` of a function without a look for transforms, which its caller has done.

    The engine calls its `backward` directly, and not through a function of torch that looks it up.
    """
    if hasattr(function, _NODE):
        getattr(function, _NODE).apply = function.backward
    return function.apply if _apply is None else super(torch.autograd.Function, function).apply  # type: ignore[misc]


_recorded = recorder(_Recorded)


def _no_tangents(name: str) -> NoReturn:
    remedy = "use torch.func.jacrev for torch.func.jacfwd, twice for torch.func.hessian"
    expected = "derivatives in reverse mode"
    refuse(NotImplementedError, name, expected, "forward mode, for which it has no rule", remedy)


@dataclasses.dataclass(eq=False, repr=False)
class Operator:
    """A launcher as an operator of PyTorch: called at once, or by the dispatcher under a compiler or a transform.

    The second call is cheap: what a call did is kept under all that it depends on, which are shapes, strides, dtypes,
    devices, alignments, plain arguments, `modes` and `places`, and is replayed with other addresses. Nothing is kept
    for tensors on the CPU, in the interpreter, for subclasses of tensors, on a device that is not the current one,
    where Triton has hooks or debugs, and where a launcher did something besides `torch.empty`, `launch` and `apply`.
    """

    #: The operator is ``torch.ops.<package>.<name>``.
    name: str
    #: In torch's notation: ``"(Tensor x, int dim) -> Tensor"``.
    schema: str
    _: dataclasses.KW_ONLY
    #: Takes what callers give. Returns the operator's arguments, or raises an error.
    check: Callable[..., tuple[Any, ...]]
    #: Takes the operator's arguments, also without memory. Returns memory for the results: a tensor, or a tuple or list
    #: of tensors, from `torch.empty` and the like.
    outputs: Callable[..., Any]
    #: ``into(outputs, *arguments)`` launches kernels, by `launch`, that write all elements of the results.
    into: Callable[..., None]
    #: Returns a hashable value of the global modes that `into` depends on, such as determinism.
    modes: Callable[[], Hashable] | None = None
    #: ``places(*arguments)`` returns a hashable value of the relative positions of tensors in memory, where `into`
    #: depends on them. Called before `check`, too.
    places: Callable[..., Hashable] | None = None
    #: Takes what callers give, after it has been checked. Reads values, in every call, to refuse some.
    read: Callable[..., None] | None = None
    #: ``backward(ctx, *gradients)``, which returns a gradient or None for each argument of the operator, and
    #: ``keep(ctx, inputs, output)``: see `torch.library.register_autograd`. Without them a gradient is refused.
    gradient: tuple[Any, Any] | None = None
    #: The rule for `torch.vmap`, see `torch.library.register_vmap`. Without one, each member of a batch is a call.
    batched: Callable[..., Any] | None = None
    #: What torch.compile traces in place of `check`, which then also takes the operator's arguments: a compiled program
    #: guards each Python object that it was traced through, so the call for the results' shapes checks.
    traced: Callable[..., tuple[Any, ...]] | None = None
    #: ``autocast(device_type, call, *arguments)`` makes the call that `torch.autocast` asks for, such as `lower` and
    #: `wide`. Without it, autocast changes nothing.
    autocast: Callable[..., Any] | None = None
    #: Records a gradient in place of `_Recorded`: ``recorded(what, tensors, addresses, *arguments)``.
    recorded: Callable[..., Any] = _recorded
    #: What is called in place of an operator without a schema, which is unknown to torch, by a compiler or a transform.
    instead: Operator | None = None

    def __post_init__(self) -> None:
        name, self.listed = f"{NAMESPACE}::{self.name}", self.schema.endswith("[]")
        self.custom: Any = lambda *inputs: self._computed(inputs)
        self.calls: dict[Hashable, _Replay] = {}
        self.recent: list[Any] = []
        none: Any = self._no_gradient, lambda ctx, inputs, output: None
        self.rule: Callable[..., Any]
        self.keep: Callable[..., None]
        self.rule, self.keep = self.gradient or none
        for attribute in ("custom", "dispatched", "_compiled") if self.instead else ():
            setattr(self, attribute, getattr(self.instead, attribute))
        if not self.schema:
            return
        # Not torch.library.custom_op: its guards against changed or returned inputs take longer than a launch.
        LIBRARY.define(self.name + self.schema, tags=torch.Tag.pt2_compliant_tag)
        for device in ("CUDA", "CPU"):
            LIBRARY.impl(self.name, self._launched, device)
        custom = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        self.custom = custom.planned = custom  # called by code that torch.compile cached with version 0.1.0
        torch.library.register_fake(name, self._shaped, lib=LIBRARY)
        torch.library.register_vmap(name, self.batched or self.one_by_one, lib=LIBRARY)
        if "!" not in self.schema:
            torch.library.register_autograd(name, self.backward, setup_context=self.keep, lib=LIBRARY)
        register_writes(custom)
        OPERATORS[self.name] = self

    # Calls --------------------------------------------------------------------------------------------------------

    def call(self, *args: Any) -> Any:
        """Check and compute, with a gradient where one is recorded."""
        if _dynamo():
            return self._compiled(*args)
        kinds = [*map(type, args)]
        for known, find, check, others, values, asked, grad, replay in self.recent:
            if known == kinds and grad is _grad():
                tensors = find(args)
                at = check(tensors)
                if (
                    at is not None  # also that no mode, transform, tracer or autocast is at work
                    and others(args) == values
                    and (asked is None or asked == self._asked(args))
                    and _ad[_LEVEL] < 0
                    and not _profiler[_PROFILING]
                    and replay.device == _current()
                    and not (any(_settings) and not unhooked())
                ):
                    if all(at) and not functools.reduce(operator.or_, at) & 15:
                        if self.read is not None:
                            self.read(*args)
                        if replay.op is None:
                            return replay.run([*tensors], at)
                        result = self.recorded(replay, [*tensors], at, *replay.inputs((*tensors, *replay.rest)))
                        return list(result) if self.listed else result
        modes = _modes() or _ahead() or _transforms() or _autocast()
        if modes or _ad[_LEVEL] >= 0 or _tracing() or _profiler[_PROFILING]:
            return self._unusual(*args)
        return self._usual(*args)

    __call__ = call

    def _asked(self, args: Sequence[Any]) -> Any:
        """What a launcher may depend on besides its arguments."""
        return self.modes and self.modes(), self.places and self.places(*args)

    def _usual(self, *args: Any) -> Any:
        """Replay what the same call did before, or make it and remember."""
        tensors: list[Tensor] = []
        at: list[int] = []
        try:
            asked = self._asked(args) if self.modes or self.places else None
            key = _grad(), asked, _described(args, tensors, at)
            replay = self.calls.get(key)
        except (AttributeError, RuntimeError, TypeError):  # without memory, not to be hashed, or about to be refused
            return self._first(args, None, tensors)
        if replay is None:
            result = self._first(args, key, tensors)
            replay = self.calls.get(key)
        elif replay.device != _current() or (any(_settings) and not unhooked()):
            return self._first(args, None, tensors)
        else:
            if self.read is not None:
                self.read(*args)
            if replay.op is None:
                result = replay.run([*tensors], [*at])
            else:
                result = self.recorded(replay, [*tensors], [*at], *replay.inputs((*tensors, *replay.rest)))
                result = list(result) if self.listed else result
        if replay is not None and replay.known != () and not functools.reduce(operator.or_, at, 0) & 15:
            kinds = [*map(type, args)]
            if replay.known is None or replay.known[0] != kinds:
                where = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
                others = [i for i in range(len(args)) if i not in where]
                if _guards is None or len(where) != len(tensors) or not {kinds[i] for i in others} <= _PLAIN:
                    replay.known = ()
                    return result
                check = _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).addresses
                replay.known = kinds, _pick(where), check, _pick(others), _pick(others)(args), asked, _grad(), replay
            self.recent = [replay.known, *[r for r in self.recent if r is not replay.known][: _RECENT - 1]]
        return result

    def _first(self, args: tuple[Any, ...], key: Any, tensors: list[Tensor]) -> Any:
        """A call that is not known: checked, launched and, with a key, remembered."""
        inputs = self.check(*args)
        found = _flat(inputs)
        if len(found) != len(tensors) or any([a is not b for a, b in zip(found, tensors, strict=False)]):
            key = None
        if key is None:  # what has a key is plain and has memory
            for t in found:
                check_local(self.name, "each tensor", t)
            try:
                _described(found, [], [])
            except TypeError:
                return self.custom(*inputs)
            except RuntimeError:  # a batch of gradients, or what torch.func.vjp's function is given after the transform
                if self.listed and not any(map(_wrapped, found)):
                    got = "a batch of them, for which torch's is_grads_batched has no rule"
                    remedy = "use torch.func.vmap of what torch.func.vjp returns, or torch.func.jacrev"
                    refuse(NotImplementedError, self.name, "a gradient at a time", got, remedy)
                return self.custom(*inputs)
        if self.read is not None:
            self.read(*args)
        gradient = bool(self.schema or self.instead) and _grad() and any([t.requires_grad for t in found])
        with torch.no_grad():
            result = self._made(key, inputs, found, gradient)
        if not gradient:
            return result
        flat, lengths = _spread(inputs)
        made = types.SimpleNamespace(op=self, run=lambda *_: result, lengths=lengths)
        result = self.recorded(made, found, None, *flat)
        made.run = None  # the node of the result would keep the result
        return list(result) if self.listed else result

    def _made(self, key: Any, inputs: Sequence[Any], tensors: Sequence[Tensor], gradient: bool = False) -> Any:
        """Allocate and launch, and remember that under a key, where it can be replayed."""
        device = _current()
        if (
            key is None
            or INTERPRETED
            or _recording.get() is not None
            or not tensors
            or any([t.get_device() != device for t in tensors])
            or (any(_settings) and not unhooked())
        ):
            return self._computed(inputs)
        flat, lengths = _spread(inputs)
        if len({*map(id, tensors)}) < len(tensors):  # one that is given twice is two: the next call may give two
            tensors = [t.view_as(t) for t in tensors]
            ahead = iter(tensors)
            inputs = _nested([next(ahead) if isinstance(a, Tensor) else a for a in flat], lengths)
        result, replay = record(tensors, lambda: self._computed(inputs))
        if replay is not None:
            if gradient:
                replay.op, replay.lengths = self, lengths
                order = sorted(range(len(flat)), key=lambda i: not isinstance(flat[i], Tensor))
                replay.rest = tuple(flat[i] for i in order[len(tensors) :])
                replay.inputs = _pick([order.index(i) for i in range(len(flat))])
            if len(self.calls) >= _MOST_CALLS:
                self.calls.clear()
            self.calls[key] = replay
        return result

    def _computed(self, inputs: Sequence[Any]) -> Any:
        """Allocate and launch."""
        found = self.outputs(*inputs)
        outs = _flat([found])
        if not outs or any(o.numel() for o in outs):
            with launching((outs or _flat(inputs))[0]):
                self.into(found, *inputs)
        return found

    @functools.cached_property
    def write(self) -> Operator:
        """The same for memory that is given, as `outputs` would return it: ``write(out, *arguments)`` returns it.

        It may hold anything, and overlaps no argument. No gradient is recorded.
        """
        read, places = (f and (lambda out, *args, f=f: f(*args)) for f in (self.read, self.places))
        return Operator(
            self.name, "", check=lambda out, *args: (out, *self.check(*args)), outputs=lambda out, *_: out,
            into=lambda out, _, *args: self.into(out, *args), modes=self.modes, places=places, read=read,
        )  # fmt: skip

    # Under torch's dispatcher -------------------------------------------------------------------------------------

    def _compiled(self, *args: Any) -> Any:
        """A call that torch.compile traces."""
        traced = self.traced or self.check
        if self.autocast is not None and autocasts_in_graph(args[0].device.type):
            with torch.autocast(args[0].device.type, enabled=False):
                return self.autocast(args[0].device.type, lambda *cast: self.custom(*traced(*cast)), *args)
        return self.custom(*traced(*args))

    def _unusual(self, *args: Any) -> Any:
        """A call under autocast, a profiler, a mode, a tracer or a transform."""
        device = next((t.device.type for t in _flat(args)), "cpu")
        if _autocast() and autocasts(device):
            torch.set_autocast_enabled(device, False)
            try:
                return self.call(*args) if self.autocast is None else self.autocast(device, self.call, *args)
            finally:
                torch.set_autocast_enabled(device, True)
        if watched():
            return self.dispatched(*self.check(*args))
        if _profiler[_PROFILING]:
            with torch.profiler.record_function(f"{NAMESPACE}::{self.name}"):
                return self._usual(*args)
        return self._usual(*args)

    def dispatched(self, *inputs: Any) -> Any:
        """Through torch's dispatcher; arguments as of the operator."""
        transform = _functorch() if _transforms() else None
        if transform is None:
            unpacked = torch.autograd.forward_ad.unpack_dual
            if _ad[_LEVEL] >= 0 and any(unpacked(t).tangent is not None for t in _flat(inputs)):
                _no_tangents(self.name)
            return self.custom(*inputs)
        if transform is not True and transform.key() == _functionalize:
            return self.custom(*inputs)
        if torch.compiler.is_exporting():  # which traces no operator with a gradient in a transform
            expected, remedy = "no torch.vmap or torch.func under torch.export", "give it the whole batch"
            refuse(NotImplementedError, self.name, expected, "a call in one", remedy)
        torch.autograd.graph.increment_version(_written(self.custom, inputs))  # the transform has wrapped these tensors
        flat, lengths = _spread(inputs)
        result = _Transformed.apply(types.SimpleNamespace(op=self, lengths=lengths), None, None, *flat)
        return list(result) if self.listed else result

    def _launched(self, *inputs: Any) -> Any:
        """Called by torch's dispatcher with tensors that have memory, and checked arguments."""
        tensors: list[Tensor] = []
        at: list[int] = []
        try:
            key = None, self._asked(inputs), _described(inputs, tensors, at)
            replay = self.calls.get(key)
        except (RuntimeError, TypeError):
            return self._computed(inputs)
        hooked = any(_settings) and not unhooked()
        if replay is not None and replay.device == _current() and _recording.get() is None and not hooked:
            return replay.run(tensors, at)
        return self._made(key if replay is None else None, inputs, tensors)

    def _shaped(self, *inputs: Any) -> Any:
        """Results without memory."""
        return self.outputs(*(inputs if self.traced is None else self.check(*inputs)))

    def backward(self, ctx: Any, *gradients: Any) -> Any:
        """Gradients of the operator's arguments, given those of its results."""
        return self.rule(ctx, *map(as_it_is, gradients))

    def _no_gradient(self, ctx: Any, *gradients: Any) -> NoReturn:
        remedy = "detach its arguments, or call it under torch.no_grad()"
        refuse(NotImplementedError, self.name, "no gradient to be asked for, since it has none", "one", remedy)

    def one_by_one(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """The rule of an operator without one: a call for each member of the batch."""
        if "!" in self.schema:
            refuse(NotImplementedError, self.name, "no torch.vmap of what is written", "one", "give it the whole batch")
        n = info.batch_size

        def member(i: int, a: Any, at: Any) -> Any:
            if isinstance(a, Tensor) and at is not None:  # of an empty batch, a member of zeros
                return a.select(at, i) if n else a.new_zeros(a.shape[:at] + a.shape[at + 1 :])
            if isinstance(a, (list, tuple)) and at is not None:
                return [member(i, v, d) for v, d in zip(a, at, strict=True)]
            return a

        found = [
            self.dispatched(*[member(i, *given) for given in zip(args, in_dims, strict=True)]) for i in range(n or 1)
        ]
        stacked = tree_map(lambda *members: torch.stack(members)[:n], *found)
        return stacked, tree_map(lambda _: 0, stacked)


# Refusals ------------------------------------------------------------------------------------------------------------

#: The dtypes that floating-point kernels take.
FLOATING: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Those of classes and indices.
INTEGERS: tuple[torch.dtype, ...] = (torch.int64, torch.int32)


def check_tensor(
    name: str, what: str, value: object, dtypes: Sequence[torch.dtype] | None = None,
    like: tuple[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Refuse what is not a dense tensor of one of `dtypes`, whose numbers stand in memory as they are.

    `name` is the function that was called, and `what` the argument, for the message. `like` is another argument, of the
    same device, and of the same dtype unless `dtypes` are given, which are `FLOATING` otherwise.

    TypeError for what is no tensor, of another dtype, or not dense. ValueError on another device, and on the CPU where
    Triton does not interpret; for a view that negates what it shows, as the imaginary part of a conjugate is: a kernel
    would read the numbers with their old sign.
    """
    if not isinstance(value, Tensor):
        refuse(TypeError, name, f"{what} to be a torch.Tensor", type(value).__name__, "use torch.as_tensor")
    if value.dtype not in (dtypes or FLOATING):
        refuse(TypeError, name, f"{what} to be {_any_of(dtypes or FLOATING)}", value.dtype, "cast it first")
    if value.layout is not torch.strided or value.is_nested:
        kind, remedy = ("a nested tensor", "to_padded_tensor") if value.is_nested else (value.layout, "to_dense")
        refuse(TypeError, name, f"{what} to be dense", kind, f"call {remedy}() first")
    # Compiled code passes torch's dispatcher, which negates; there this cannot be asked.
    if not torch.compiler.is_compiling() and value.is_neg():
        expected = f"{what} to stand in memory as it is"
        refuse(ValueError, name, expected, "a view that negates", "call resolve_neg() first")
    if like is not None:
        model, other = like
        if dtypes is None and value.dtype != other.dtype:
            refuse(TypeError, name, f"{what} to be {other.dtype} as {model} is", value.dtype, "cast one of them")
        if value.device != other.device:
            refuse(ValueError, name, f"{what} on {other.device} as {model} is", value.device, "move one of them")
    # Of a tensor on another device, such as meta, only the shape is asked.
    if value.is_cuda or INTERPRETED or value.device.type != "cpu":
        return
    with contextlib.suppress(RuntimeError):  # no GPU, so no driver
        if triton.runtime.driver.active.get_active_torch_device().type == "cpu":  # compiled for a GPU that is absent
            return
    remedy = "move it to a GPU, or set TRITON_INTERPRET=1 before Triton is imported, which runs the kernel in Triton's"
    refuse(ValueError, name, "a CUDA tensor", "one on cpu", f"{remedy} interpreter on the CPU")


def check_local(name: str, what: str, value: object) -> None:
    """Refuse, by TypeError, a DTensor: each process holds a part of it, and `to_local` returns that part."""
    if hasattr(value, "to_local"):
        refuse(TypeError, name, f"{what} to be a local tensor", "a DTensor", "pass to_local()")


def plain(t: Tensor) -> Tensor:
    """The same memory without the subclass, which may describe other memory than there is."""
    if type(t) in (Tensor, Parameter):
        return t
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return Tensor.as_subclass(t, Tensor)  # type: ignore[arg-type]


def check_stored(name: str, what: str, value: Tensor, *, meta: bool = False) -> None:
    """Refuse, by TypeError, a tensor without memory for all of its elements. `meta`: those on meta pass.

    Every launcher that passes addresses without torch's dispatcher asks this. The dispatcher hands wrappers to their
    own class; their address is 0, or that of an offset. The same holds for fake tensors and for freed storage.
    """
    if torch.compiler.is_compiling():
        return
    check_local(name, what, value)
    if meta and value.is_meta:
        return
    try:  # not by methods of a subclass, which may answer for what it wraps
        storage = Tensor.untyped_storage(value)
        address = storage.data_ptr()  # that of a wrapper is refused
        extents = zip(Tensor.size(value), Tensor.stride(value), strict=True)
        end = Tensor.storage_offset(value) + 1 + sum((n - 1) * stride for n, stride in extents)
        if not Tensor.numel(value) or (address and storage.nbytes() >= end * Tensor.element_size(value)):
            return
    except RuntimeError:
        pass
    got, remedy = f"{type(value).__name__} without", "pass the tensor that it wraps, or a clone"
    refuse(TypeError, name, f"{what} with memory for its elements", got, remedy)


def _any_of(accepted: Sequence[Any]) -> str:
    *others, last = (str(value).removeprefix("torch.") for value in accepted)
    return f"{', '.join(others)} or {last}" if others else last


def _sizes_of(shape: Sequence[Any], letters: Sequence[Any], known: dict[Any, Any]) -> dict[Any, Any] | None:
    """What letters stand for, where they can stand for this shape; those that are `known` stand for no other size."""
    some = "..." in letters[:1]
    ahead = len(shape) - len(letters) + some
    if ahead < 0 or (ahead and not some):
        return None
    found = dict(known)
    if some and found.setdefault("...", shape[:ahead]) != shape[:ahead]:
        return None
    for letter, size in zip(letters[some:], shape[ahead:], strict=True):
        if isinstance(letter, str) and not letter.isdigit():
            letter, _, rule = letter.partition(" ")
            size -= int(rule.removeprefix("+ ")) if rule.startswith("+") else 0
            if size < int(rule == "> 0") or size != found.setdefault(letter, size):
                return None
        elif size != (int(letter) if isinstance(letter, str) else letter):  # int() would make a symbol a number
            return None
    return found


def _filled(letter: Any, sizes: dict[Any, Any]) -> Any:
    """What a letter stands for, or the letter where that is not known; ``D + 1`` too."""
    base, _, more = str(letter).partition(" + ")
    return sizes[base] + int(more) if more and base in sizes else sizes.get(letter, letter)


def shapes(name: str, /, **arguments: Any) -> dict[Any, Any]:
    """Refuse arguments that are not tensors of one device whose shapes fit together; return the sizes of letters.

    ``shapes("f", x=(x, "[..., D]"), weight=(weight, "[D]?", FLOATING))`` takes an `x` of any floating dtype and of one
    axis or more, and a weight, or None, for each of its columns. A shape is a tuple of sizes, or a text of numbers and
    letters. A letter stands for one size wherever it is, ``N > 0`` for one that is not 0, ``N + 1`` for one that is
    larger by 1, and ``...`` in front for any axes, a tuple. With ``?`` behind, None passes; an empty text is any shape.
    Dtypes that are not given are those of `FLOATING` for the first argument, and its dtype for the others.
    """
    sizes: dict[Any, Any] = {}
    owners: dict[Any, tuple[str, Any]] = {}  # of each letter the argument that had it first
    first: tuple[str, Tensor] | None = None
    for what, (value, shape, *dtypes) in arguments.items():
        if value is None and "?" in shape:
            continue
        check_tensor(name, what, value, dtypes[0] if dtypes else None, first)
        first = first or (what, value)
        if shape == "":
            continue
        letters = shape.strip("[]?").split(", ") if isinstance(shape, str) else shape
        found = _sizes_of(value.shape, letters, sizes)
        if found is None:
            filled = [_filled(letter, sizes) for letter in letters]
            text = f"[{', '.join(str(list(s))[1:-1] if isinstance(s, tuple) else str(s) for s in filled)}]"
            names = [str(letter).partition(" + ")[0] for letter in letters]
            if models := dict.fromkeys(owners[letter] for letter in names if letter in owners):
                text += f", {shape.strip('?')} where {' and '.join(f'{other} is {its}' for other, its in models)}"
            remedy = "give one at least" if 0 in value.shape and " > " in text else "slice, expand or reshape it"
            refuse(ValueError, name, f"{what} of shape {text}", list(value.shape), remedy)
        owners = {letter: owners.get(letter, (what, shape)) for letter in found}
        sizes = found
    return sizes


def one_of(name: str, what: str, value: Any, accepted: Sequence[Any], remedy: str = "choose one of them") -> None:
    """Refuse, by ValueError, what is none of the values that are accepted."""
    if not any(value is a or (type(value) is type(a) and value == a) for a in accepted):
        refuse(ValueError, name, f"{what} to be {_any_of(accepted)}", repr(value), remedy)


def flag(name: str, what: str, value: Any) -> None:
    """Refuse, by TypeError, what is neither True nor False: a text such as "no" would count as True."""
    if type(value) is not bool:
        refuse(TypeError, name, f"{what} to be True or False", repr(value), "give one of the two")


def integer(
    name: str, what: str, value: Any, remedy: str, accepted: str = "", fine: Callable[[int], bool] | None = None
) -> int:
    """An argument that counts, as Python's int: NumPy's integers too, but no bool, no float and no tensor.

    `name`, `what` and `remedy` are for the message: the function, the argument and what to do. What is not `fine` is
    refused as well, in the words of `accepted`, such as "of 1 or more".
    """
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    # What torch.compile traces as an integer has no more attributes to be asked for.
    if not isinstance(value, int) and not isinstance(value, Tensor) and hasattr(value, "__index__"):
        with contextlib.suppress(TypeError):  # an array has one, and is no number
            value = operator.index(value)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(TypeError, name, f"{what} to be an integer", type(value).__name__, remedy)
    # A size that torch.compile traces has 64 bits, and to compare it would bound the sizes that an export takes.
    if not torch.compiler.is_compiling() and not -(2**63) <= value < 2**63:
        refuse(ValueError, name, f"{what} to be an integer of 64 bits", value, remedy)
    if fine is not None and not fine(value):
        refuse(ValueError, name, f"{what} {accepted}", value, remedy)
    return value  # type: ignore[no-any-return]


def number(
    name: str, what: str, value: Any, remedy: str, accepted: str = "", fine: Callable[[float], bool] | None = None
) -> float:
    """An argument that measures, as Python's float: NumPy's numbers too, but no bool, no text and no tensor.

    The other arguments are as those of `integer`.
    """
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(TypeError, name, f"{what} to be a number", type(value).__name__, remedy)
    try:
        size = float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected {what} that float64 can hold, got an integer beyond it; {remedy}") from None
    if fine is not None and not fine(size):
        refuse(ValueError, name, f"{what} {accepted}", value, remedy)
    return size
