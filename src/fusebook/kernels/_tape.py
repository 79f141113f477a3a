"""What a call of a launcher does, written down as the source of a function that does it again."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

#: Memory of given sizes and strides on the current GPU; torch.compile's own call, which skips torch's dispatcher.
fresh_memory = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

#: Launches of a plan at most. What takes more is no small call.
_LONGEST = 64


class _At:
    """An address that passes for a tensor where Triton only asks for its address."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Name:
    """Stands in a launcher's arguments for what a plan calls by a name."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


_STREAM = _Name("stream")


class Distance(int):
    """How many elements behind the beginning of one tensor another begins, as a stride of a tensor descriptor.

    A plan computes it anew, since two tensors need not lie so in the next call.
    """

    ends: tuple[Tensor, Tensor]

    def __new__(cls, start: Tensor, end: Tensor) -> Distance:
        made = super().__new__(cls, (end.data_ptr() - start.data_ptr()) // start.element_size())
        made.ends = start, end
        return made


def _descriptor(values: dict[str, Any], address: int, strides: list[int]) -> TensorDescriptor:
    """A tensor descriptor as it was, at another address."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(values, base=_At(address), strides=strides)
    return made


class _Launcher:
    """What Triton's launcher passes to the driver, so that a plan can pass it without asking again.

    Triton's launcher is a class of Python: it looks for scratch memory and encodes tensor descriptors before it calls a
    function of C. What it passes on is learned by having it call another function, and is not written down here, where
    it would hold for one version of Triton.

    `run` is that of a ``CompiledKernel``, and `known` what stands between the stream and a kernel's arguments.
    """

    #: Addresses for which descriptors are kept, at most.
    MOST = 256

    def __init__(self, run: Any, grid: tuple[int, ...], known: tuple[Any, ...]) -> None:
        self.run, self.grid, self.known = run, grid, known
        self.kept: dict[tuple[int, ...], tuple[Any, ...]] = {}
        inner = run.launch
        self.call = inner
        if getattr(inner, "__closure__", None) and "launcher" in inner.__code__.co_freevars:
            # A function that encodes descriptors, and calls this.
            self.call = inner.__closure__[inner.__code__.co_freevars.index("launcher")].cell_contents

    def passed(self, stream: Any, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """What reaches the function of C."""
        seen: list[tuple[Any, ...]] = []

        def note(*passed: Any) -> None:
            seen.append(passed)

        probe, inner = copy.copy(self.run), self.run.launch
        if self.call is inner:
            probe.launch = note
        else:
            cells = zip(inner.__code__.co_freevars, inner.__closure__, strict=True)
            closure = tuple(types.CellType(note) if name == "launcher" else cell for name, cell in cells)
            probe.launch = types.FunctionType(inner.__code__, inner.__globals__, "launch", None, closure)
        probe(*self.grid, stream, *self.known, *arguments)
        return seen[0]

    def encoded(self, addresses: tuple[int, ...], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """What is passed behind the stream where descriptors are made of these addresses; kept for the next time."""
        if len(self.kept) >= self.MOST:
            self.kept.clear()
        found = self.kept[addresses] = self.passed(None, arguments)[len(self.grid) + 1 :]
        return found


class Tape:
    """What one call of a launcher does, as the source of a function that does it again.

    A launcher computes its plan from shapes, strides, dtypes, devices and plain arguments, all of which are in the key
    of a plan. What remains at each call is to allocate, and to launch the same kernels with other addresses. Triton's
    own ``kernel[grid](...)`` derives everything anew: which specialisation, which options, which device.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.quiet = False
        self.spoiled = False
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"memory": fresh_memory, "descriptor": _descriptor}
        self.known: list[tuple[Tensor, str]] = [(t, f"a{i}") for i, t in enumerate(given)]  # alive, so ids are unique
        self.fresh: set[str] = set()  # begin where their memory does
        self.views: list[tuple[Tensor, str]] = []
        self.made = self.launches = 0
        self.devices = {t.get_device() for t in given}

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """What happens inside is taken down by the caller."""
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False

    def constant(self, value: Any) -> str:
        """How a value is written in the source."""
        if value is None or type(value) in (bool, int):
            return repr(value)
        if type(value) is tuple:
            return f"({''.join(self.constant(v) + ', ' for v in value)})"
        name = f"v{len(self.names)}"
        self.names[name] = value
        return name

    def tensor(self, t: Tensor) -> tuple[str, int]:
        """Which tensor it is, or shares the memory of, and how many bytes behind that one's beginning it begins."""
        for other, name in self.known:
            if other is t:
                return name, 0
        sharing = [(o, n) for o, n in self.known if o.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()]
        if len(sharing) != 1:  # a stranger; or two arguments in one memory, which need not lie so in the next call
            self.spoiled = True
            return "a0", 0
        other, name = sharing[0]  # addresses would not do: torch says that what has no elements begins at 0
        return name, int(t.storage_offset() * t.element_size() - other.storage_offset() * other.element_size())

    def address(self, t: Tensor) -> str:
        if not t.numel():  # torch says that it begins at 0, wherever its memory is
            return "0"
        name, offset = self.tensor(t)
        return f"{name}.data_ptr(){f' + {offset}' if offset else ''}"

    def argument(self, value: Any) -> str:
        """An argument of a kernel."""
        if isinstance(value, Tensor):
            return self.address(value)
        if isinstance(value, TensorDescriptor):
            values = {k: v for k, v in value.__dict__.items() if k not in ("base", "strides")}
            strides = ", ".join(self.stride(n) for n in value.strides)
            return f"descriptor({self.constant(values)}, {self.address(value.base)}, [{strides}])"
        if type(value) is tuple:
            return f"({''.join(self.argument(v) + ', ' for v in value)})"
        return self.constant(value)

    def stride(self, value: int) -> str:
        """A stride of a tensor descriptor."""
        if isinstance(value, Distance):
            start, end = value.ends
            return f"({self.address(end)} - {self.address(start)}) // {start.element_size()}"
        return repr(int(value))

    def whole(self, value: Any) -> str:
        """An argument of an operation of torch, which needs the tensor itself."""
        if isinstance(value, Tensor):
            for view, name in self.views:
                if view is value:
                    return name
            name, offset = self.tensor(value)
            base = next(other for other, n in self.known if n == name)
            if base is value or self.spoiled:
                return name
            self.spoiled = value.dtype != base.dtype
            start = str(offset // value.element_size())
            if name not in self.fresh:  # where it begins in its memory is another matter at each call
                start = f"{name}.storage_offset() + {start}"
            self.views.append((value, f"s{len(self.views)}"))
            shape, strides = tuple(value.shape), tuple(value.stride())
            self.lines.append(f"{self.views[-1][1]} = {name}.as_strided({shape}, {strides}, {start})")
            return self.views[-1][1]
        if type(value) in (tuple, list):
            inside = "".join(self.whole(v) + ", " for v in value)
            return f"({inside})" if type(value) is tuple else f"[{inside}]"
        return self.constant(value)

    def allocated(self, memory: Tensor) -> None:
        name = f"t{self.made}"
        self.made += 1
        self.known.append((memory, name))
        self.fresh.add(name)
        self.lines.append(
            f"{name} = memory({tuple(memory.shape)}, {tuple(memory.stride())}, {self.constant(memory.dtype)})"
        )

    def launched(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], compiled: Any
    ) -> None:
        self.launches += 1
        scratch = getattr(getattr(compiled, "metadata", None), "global_scratch_size", 0)  # memory that Triton asks for
        odd = not hasattr(compiled, "packed_metadata") or kernel.pre_run_hooks
        if odd or scratch or self.launches > _LONGEST:
            self.spoiled = True
            return
        bound = dict(zip(kernel.arg_names, args, strict=False)) | constants
        values = [bound[p.name] if p.name in bound else p.default for p in kernel.params]
        known = compiled.function, compiled.packed_metadata, None, None, None
        sizes = (*grid, 1, 1)[:3]
        name = f"k{len(self.names)}"
        if not hasattr(compiled.run, "launch"):  # a test put it in its place
            self.names[name] = compiled.run
            arguments = ", ".join(self.argument(v) for v in values)
            self.lines.append(f"{name}(*{self.written((*sizes, _STREAM, *known))}, {arguments})")
            return
        launcher = _Launcher(compiled.run, sizes, known)
        self.names[name] = launcher.call
        if launcher.call is compiled.run.launch:
            passed = launcher.passed(_STREAM, [self.placed(v) for v in values])
            self.lines.append(f"{name}{self.written(passed)}")
            return
        # Descriptors are encoded once for each place where their tensors lie.
        at = f"at{len(self.names)}"
        self.names |= {f"{name}_kept": launcher.kept, f"{name}_encoded": launcher.encoded}
        addresses = "".join(f"{self.address(t)}, " for t in self.pointed(values))
        self.lines.append(f"{at} = ({addresses})")
        arguments = ", ".join(self.argument(v) for v in values)
        rest = f"({name}_kept.get({at}) or {name}_encoded({at}, ({arguments},)))"
        self.lines.append(f"{name}({', '.join(map(str, sizes))}, stream, *{rest})")

    def placed(self, value: Any) -> Any:
        """An argument of a kernel with the names of tensors in their places."""
        if type(value) is tuple:
            return tuple(self.placed(v) for v in value)
        return _Name(self.address(value)) if isinstance(value, Tensor) else value

    def pointed(self, values: Sequence[Any]) -> list[Tensor]:
        """The tensors to which arguments of a kernel point."""
        found: list[Tensor] = []
        for v in values:
            if type(v) is tuple:
                found += self.pointed(v)
            elif isinstance(v, (Tensor, TensorDescriptor)):
                found.append(v if isinstance(v, Tensor) else v.base)
                strides = v.strides if isinstance(v, TensorDescriptor) else ()
                found += [end for n in strides if isinstance(n, Distance) for end in n.ends]
        return found

    def written(self, value: Any) -> str:
        """Arguments in the source, those with names by these."""
        if type(value) is _Name:
            return value.text
        if type(value) is tuple:
            return f"({''.join(self.written(v) + ', ' for v in value)})"
        return self.constant(value)

    def applied(self, function: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        call = f"{self.constant(function)}({''.join(self.whole(a) + ', ' for a in args)}"
        call += "".join(f"{k}={self.whole(v)}, " for k, v in options.items()) + ")"
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(r, Tensor) for r in results):
            self.lines.append(call)
            return
        targets = []
        for r in results:
            if any(r is other for other, _ in (*self.known, *self.views)):  # out=, or what needed no copy
                targets.append("_")
                continue
            name = f"t{self.made}"
            self.made += 1
            self.known.append((r, name))
            targets.append(name)
        self.lines.append(f"{', '.join(targets)}{',' if isinstance(result, (tuple, list)) else ''} = {call}")

    def finished(self, result: Any) -> Callable[..., Any] | None:
        """The function; None where the call did something that it would not do again."""
        index = next(iter(self.devices))
        results = result if isinstance(result, (tuple, list)) else () if result is None else (result,)
        found = [next((n for other, n in self.known if other is r), "") for r in results]
        if self.spoiled or len(self.devices) != 1 or "" in found or fresh_memory is None:
            return None
        returned = found[0] if isinstance(result, Tensor) else f"({''.join(n + ', ' for n in found)})"
        if isinstance(result, list):
            returned = f"[{', '.join(found)}]"
        lines = list(self.lines)
        if self.launches:
            self.names["current_stream"] = _stream
            lines.insert(0, f"stream = current_stream({index})")
        lines.append(f"return {returned if results else None}")
        source = f"def replay({', '.join(n for _, n in self.known if n[0] == 'a')}):\n" + "".join(
            f"    {x}\n" for x in lines
        )
        exec(compile(source, "<plan>", "exec"), self.names)
        replay = self.names["replay"]
        replay.source, replay.lines = source, lines
        return replay


#: Operations of torch that leave nothing behind that a replay would miss, views aside.
_HARMLESS = ("empty", "empty_like", "empty_strided", "detach", "promote_types", "_unsafe_view")


class Overheard(TorchDispatchMode):
    """Notices operations of torch that a tape does not hold: what they do would be missing from a replay."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (self.tape.quiet or func.is_view or name in _HARMLESS):
            self.tape.spoiled = True
        return func(*args, **(kwargs or {}))
