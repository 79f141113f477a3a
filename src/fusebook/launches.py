"""What a call launches, as a fingerprint: whether a recorded time is still that of the code, told without a GPU.

A time belongs to what was launched. `launches` names it before anything is compiled: in order, each Triton kernel by
its syntax tree (without docstrings, comments, annotations and the names that it chose, and with every global that it
uses replaced by what that stands for), with its constants, grid, options, dtypes and integers; and each call of torch
that is neither a view nor an allocation. `code` names it afterwards: the kernels by their PTX. So a kernel can be
renamed, moved and commented upon, and cleaned as long as it compiles to the same.

Nothing runs to find this out. `nowhere` puts a GPU that is not there in Triton's place, hands out memory that nobody
touches, and takes down what launchers ask of torch and Triton. `observed` takes down the same of calls that do run.

    python -m fusebook.launches fusebook.cards:OPS < asked.json > found.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import mmap
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from fusebook.digests import digest, twelve
from fusebook.kernels import _operator
from fusebook.op import Dims, Op, Variant

__all__ = [
    "REFUSED", "AbsentGPU", "Trace", "Unknown", "elsewhere", "found", "kernels", "launching", "nowhere", "observed",
    "of_wrapper", "registers",
]  # fmt: skip

#: What stands for the launches of a call that was refused.
REFUSED = "refused"


def of_wrapper(variant: Variant) -> str:
    """The fingerprint of a way to compute that is not ours: the functions that call it.

    The digest of ``run`` and ``prepare``.
    """
    return digest([variant.run, variant.prepare])


def launching(name: str, variant: Variant) -> bool:
    """Whether a variant launches kernels of this library by Triton, so that its launches can be taken down.

    Parameters
    ----------
    name : str
        Of the variant; ours begin with "fusebook".
    """
    return name.startswith("fusebook") and "onnxruntime" not in variant.needs


# What a call launches -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Trace:
    """What was launched, in order.

    Attributes
    ----------
    steps : list of tuple
        Launches of kernels before they are compiled, and calls of torch.
    compiled : list
        The same for kernels that were compiled: what the GPU is given. None where one was not.
    """

    steps: list[Any] = dataclasses.field(default_factory=list)
    compiled: list[Any] = dataclasses.field(default_factory=list)

    @property
    def launches(self) -> str:
        """Twelve digits of the sha256 of the launches."""
        return twelve(repr(self.steps))

    @property
    def code(self) -> str:
        """Twelve digits of the sha256 of the code that the GPU runs; empty where a kernel was not compiled."""
        return "" if None in self.compiled else twelve(repr(self.compiled))

    def clear(self) -> None:
        """Forget."""
        self.steps.clear()
        self.compiled.clear()

    def launched(self, kernel: Any, args: Sequence[Any], grid: Any, given: Mapping[str, Any], compiled: Any) -> None:
        """Take down a launch of a kernel."""
        names = [p.name for p in kernel.params]
        bound = dict(zip(names, args, strict=False)) | {k: v for k, v in given.items() if k in names}
        bound |= {p.name: p.default for p in kernel.params if p.name not in bound and p.has_default}
        options = sorted((k, v) for k, v in given.items() if k not in names)
        if callable(grid):
            grid = grid({**bound, **dict(options)})
        grid = (*(int(n) for n in grid), 1, 1)[:3]
        values = tuple(_argument(bound.get(name)) for name in names)
        self.steps.append((_of_kernel(kernel), values, grid, options))
        text = getattr(compiled, "asm", {}).get("ptx")
        if text is None:
            self.compiled.append(None)
            return
        numbers = [n for p in kernel.params if not p.is_constexpr for n in _numbers(bound.get(p.name))]
        how = [(k, v) for k, v in options if k.startswith("launch_")]
        self.compiled.append((_ptx(text, compiled.metadata.name), grid, numbers, how))

    def called(self, name: str, args: Any, kwargs: Any) -> None:
        """Take down a call of torch."""
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        step = (name.strip("_"), _argument(args, shaped=True), _argument(kwargs, shaped=True), tf32)
        self.steps.append(step)
        self.compiled.append(step)


_of_kernel = functools.lru_cache(maxsize=None)(digest)


def _argument(value: Any, shaped: bool = False) -> Any:
    """What of an argument a launch depends on. Where memory lies is chance; that it begins at 16 bytes is not."""
    if isinstance(value, torch.Tensor):
        how = (tuple(value.shape), tuple(value.stride())) if shaped else (value.data_ptr() % 16 == 0,)
        return str(value.dtype), *how
    if hasattr(value, "block_shape"):  # its strides may be distances between tensors, which are chance too
        return "tiles", str(value.base.dtype), list(value.shape), list(value.block_shape), value.padding
    if isinstance(value, (list, tuple)):
        return tuple(_argument(v, shaped) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _argument(v, shaped)) for k, v in value.items() if k not in ("device", "generator")))
    if isinstance(value, tl.constexpr):
        return _argument(value.value)
    if isinstance(value, JITFunction):
        return _of_kernel(value)
    if isinstance(value, (bool, int, float, str, types.NoneType)):
        return value
    return str(value)


def _numbers(value: Any) -> list[Any]:
    """The numbers among arguments as a kernel gets them; ones and None are part of its code."""
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in _numbers(v)]
    return [value] if isinstance(value, (bool, int, float)) and value != 1 else []


def _ptx(text: str, name: str) -> str:
    """The digest of PTX without comments, lines of the source, sections for debuggers, the kernel's name and spaces."""
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"(?m)^\s*\.(file|loc)\b.*$", "", text)
    text = re.sub(r"\$L__tmp\d+:", "", text)
    text = re.sub(r"(?m)^\s*\.section\s+\.debug[\s\S]*", "", text)
    text = text.replace(name, "kernel")
    # The version follows the ptxas that was found, and the rest of the text does not. 9.0 is what records have.
    text = re.sub(r"(?m)^\.version .*$", ".version 9.0", text)
    return twelve(" ".join(text.split()))


# Names of what only hands out memory, of what is memory already, and of what waits for values.
_EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_VALUES = {"tensor", "as_tensor", "from_numpy", "scalar_tensor"}
_READS = {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__"),
}
_NOTHING = {
    *("__get__", "__set__", "__len__", "__hash__", "__repr__", "dim", "size", "stride", "numel", "element_size"),
    *("data_ptr", "storage_offset", "untyped_storage", "get_device", "is_contiguous", "is_neg", "is_floating_point"),
    *("set_", "requires_grad_", "detach_", "retain_grad"),
}
_MAKES = _EMPTY | {
    *("zeros", "ones", "full", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm", "normal"),
}
_IN_PLACE = re.compile(r"__i\w+__|__setitem__|(?!__)\w*[a-z0-9]_")


class _Watched(TorchFunctionMode):
    """Takes down what is asked of torch, and lets it happen."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _NOTHING or name in _EMPTY | _VALUES | _READS:
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        before = len(self.trace.steps)
        out = func(*args, **kwargs)
        if len(self.trace.steps) == before and _works(name, kwargs, given, _tensors(out)):
            self.trace.called(name, args, kwargs)
        return out


def _works(name: str, kwargs: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether a call of torch did something: wrote in place, or made memory that is not its arguments'."""
    if _IN_PLACE.fullmatch(name) or kwargs.get("out") is not None:
        return True
    memory = {t.untyped_storage()._cdata for t in given}
    return any(t.untyped_storage()._cdata not in memory for t in made)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@contextlib.contextmanager
def observed() -> Iterator[Trace]:
    """Take down what the calls in this block launch, while they run."""
    trace = Trace()
    with _told(trace.launched), _Watched(trace):
        yield trace


@contextlib.contextmanager
def kernels() -> Iterator[list[Any]]:
    """Collect the compiled kernels that the calls in this block launch, and nothing of torch: it may compile.

    In their order.
    """
    found: list[Any] = []
    with _told(lambda *launch: found.append(launch[-1])):
        yield found


@contextlib.contextmanager
def _told(launched: Callable[..., None]) -> Iterator[None]:
    """Call `launched` after each launch of Triton's, as `Trace.launched` is called."""
    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            compiled = run(self, *args, grid=grid, warmup=warmup, **kwargs)
            if not warmup:
                launched(self, args, grid, kwargs, compiled)
        return compiled

    JITFunction.run = launch
    try:
        with _operator.plans_aside():
            yield
    finally:
        JITFunction.run = run


# The same without a GPU -----------------------------------------------------------------------------------------------


class AbsentGPU(DriverBase):
    """A driver of Triton for a GPU that is not there: it names an architecture, takes tensors of the CPU, runs nothing.

    Parameters
    ----------
    capability : tuple of int
        (9, 0) is Hopper.
    multiprocessors : int
    shared : int
        Bytes of shared memory a block may take.
    launched : callable, optional
        Called with the metadata of each kernel that was compiled and would be launched.
    """

    def __init__(
        self,
        capability: tuple[int, int] = (9, 0),
        multiprocessors: int = 132,
        shared: int = 227 * 1024,
        launched: Callable[[Any], None] = lambda metadata: None,
    ) -> None:
        self.arch = 10 * capability[0] + capability[1]
        self.properties = {"max_shared_mem": shared, "multiprocessor_count": multiprocessors, "warpSize": 32}
        self.launched = launched
        self.utils = self  # Triton looks for get_device_properties and load_binary there

    # What Triton asks of a driver.
    is_active = staticmethod(lambda: True)
    get_current_device = get_current_stream = staticmethod(lambda *device: 0)

    def _unasked(self, *given: Any) -> Any:
        """Refuse: it is asked for launchers, and for what times them."""
        raise NotImplementedError("nothing is launched, so there is no launcher to generate and nothing to time")

    map_python_to_cpp_type = get_benchmarker = _unasked

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self.properties

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, None, 0, 0, 1024  # module, function, registers, spills, most threads a block

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: self.launched(metadata)


class _Nowhere(TorchFunctionMode):
    """Takes down what is asked of torch and does none of it: results are memory of the right shape, all zeros.

    The memory is one range of addresses that the system has promised and never gives, handed out in ascending order;
    so sizes do not matter, and where tensors lie does not differ from one call to the next. Only where a launcher reads
    a value is that value computed, and what it was made of.
    """

    RANGE = 2**40

    def __init__(self) -> None:
        super().__init__()
        unreserved = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved
        self.memory = mmap.mmap(-1, self.RANGE, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.trace = Trace()
        self.kept = self.at = 0
        self.later: dict[int, tuple[Any, Any, Any, Any]] = {}  # how memory would be filled
        self.touched = False

    def keep(self) -> None:
        """What there is now stays: inputs are zeros, whatever they were made of."""
        self.kept = self.at
        self.later.clear()
        self.trace.clear()

    def again(self, everything: bool = False) -> None:
        """Hand out the memory behind what was kept once more, or all of it."""
        self.at = self.kept = 0 if everything else self.kept
        self.later.clear()
        self.trace.clear()
        if self.touched:
            self.memory.madvise(mmap.MADV_DONTNEED)  # zeros once more
            self.touched = False

    def hand_out(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor of the meta device."""
        shape, stride = like.shape, like.stride()
        last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if like.numel() else 0
        size = last * like.element_size()
        if not size:
            return torch.empty_strided(shape, stride, dtype=like.dtype)
        if self.at + size > self.RANGE:
            raise MemoryError(f"launches: more than {self.RANGE} bytes in one call")
        flat = torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=self.at).view(like.dtype)
        self.at += -(-size // 512) * 512
        return flat.as_strided(shape, stride)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call whose arguments hold what they would hold."""
        for tensor in _tensors((args, kwargs)):
            self.read(tensor)
        return func(*args, **kwargs)

    def read(self, tensor: torch.Tensor) -> None:
        """Fill memory whose values are asked for."""
        key = tensor.untyped_storage().data_ptr()
        if key in self.later:
            out, func, args, kwargs = self.later.pop(key)
            self.touched = True
            made = self._computed(func, args, kwargs)
            for to, value in zip(_tensors(out), _tensors(made), strict=True):
                self.later.pop(to.untyped_storage().data_ptr(), None)
                to.copy_(value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        given = [] if name in _NOTHING or name in _VALUES else _tensors((args, kwargs))
        if not given and name not in _MAKES:
            return func(*args, **kwargs)
        if name in _READS:
            return self._computed(func, args, kwargs)
        twins: dict[int, torch.Tensor] = {}

        def twin(t: torch.Tensor) -> torch.Tensor:
            return twins.setdefault(id(t), torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))

        stand_ins = tree_map_only(torch.Tensor, twin, (args, {k: v for k, v in kwargs.items() if k != "generator"}))
        if not given or "device" in kwargs:
            stand_ins[1]["device"] = "meta"
        try:
            out = func(*stand_ins[0], **stand_ins[1])
        except (RuntimeError, NotImplementedError):
            if not given:
                raise
            return self._computed(func, args, kwargs)  # its shape depends on values, or there is an error to tell
        made = _tensors(out)
        if name not in _EMPTY and _works(name, stand_ins[1], _tensors(stand_ins), made):
            self.trace.called(name, args, kwargs)
        elif given and name not in _EMPTY:
            return func(*args, **kwargs)  # a view, or a number
        real = {id(twins[id(t)]): t for t in given}
        result = tree_map_only(torch.Tensor, lambda t: real[id(t)] if id(t) in real else self.hand_out(t), out)
        if name not in _EMPTY:
            for tensor in _tensors(result):
                if not any(tensor is t for t in given):
                    self.later[tensor.untyped_storage().data_ptr()] = (result, func, args, kwargs)
        return result


@contextlib.contextmanager
def nowhere(gpu: AbsentGPU, compile: bool = False) -> Iterator[_Nowhere]:
    """A place where calls are taken down and nothing runs. A process in which Triton compiles; the driver is for good.

    Parameters
    ----------
    gpu : AbsentGPU
        For which launchers plan.
    compile : bool
        Compile what is launched, so that `Trace.code` is known.
    """
    triton.runtime.driver.set_active(gpu)
    place = _Nowhere()
    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            compiled = run(self, *args, grid=grid, warmup=True, **dict(kwargs)) if compile else None
            place.trace.launched(self, args, grid, kwargs, compiled)
        return compiled

    JITFunction.run = launch
    try:
        yield place
    finally:
        JITFunction.run = run


def found(
    op: Op, points: Iterable[tuple[str, str, Dims]], gpu: AbsentGPU, compile: bool = False
) -> list[tuple[str, str]]:
    """What variants of an operator would launch on a GPU that need not be there; of others, their wrappers.

    Parameters
    ----------
    points : iterable of (variant, dtype, dims)
        A variant's name, a dtype's name such as ``"float16"``, and sizes; of a drawn problem ``layout``, too.
    compile : bool
        Whether `code` is asked for too.

    Returns
    -------
    list of (launches, code)
        Empty `code` where nothing was compiled. `REFUSED` for what a variant refuses; ``"failed: why"`` where it
        could not be found out.
    """
    results: list[tuple[str, str]] = []
    before: Any = None
    made: Any = ()
    with nowhere(gpu, compile) as place:
        for name, dtype, dims in points:
            if not launching(name, op.variants[name]):
                results.append((of_wrapper(op.variants[name]), ""))
                continue
            if before != (dtype, dims):
                before = (dtype, dims)
                place.again(everything=True)
                with place:
                    made = op.made({**dims, "dtype": dtype}, "cpu")
                place.keep()
            place.again()
            results.append(_one(op.variants[name], made, place))
    return results


def _one(variant: Variant, made: tuple[Any, ...], place: _Nowhere) -> tuple[str, str]:
    try:
        with place:
            args = variant.given(*made)
            place.trace.clear()
            variant.run(*args)
    except NotImplementedError:
        return REFUSED, ""
    except Exception as error:  # whatever a launcher raises: what it launches is unknown
        return f"failed: {type(error).__name__}: {error}"[:200], ""
    return place.trace.launches, place.trace.code


class Unknown(RuntimeError):
    """What would be launched cannot be found out here; the message says why."""


def elsewhere(
    asked: Mapping[str, Sequence[tuple[str, str, Dims]]],
    capability: tuple[int, int],
    multiprocessors: int,
    compile: bool = False,
    triton: str = "",
    cards: str = "fusebook.cards:OPS",
    library: pathlib.Path = pathlib.Path(__file__).parents[1],
) -> dict[str, list[tuple[str, str]]]:
    """`found`, in a process where Triton compiles: this one may interpret, or have a GPU.

    Parameters
    ----------
    asked : mapping of str to sequence of (variant, dtype, dims)
        Points by operator.
    capability, multiprocessors
        Of the GPU for which launchers plan.
    triton : str
        The version of Triton that must be used; the folder FUSEBOOK_TRITON is looked through first.
    cards : str
        A module and the name of a mapping of operators in it.
    library : pathlib.Path
        The folder where the package is imported from.

    Returns
    -------
    dict of str to list of (launches, code)

    Raises
    ------
    Unknown
        Where Triton cannot be used without a GPU here, or not the version that is asked for; it says how to get it.
    """
    request = {"capability": capability, "sms": multiprocessors, "compile": compile, "triton": triton, "asked": asked}
    said = _compiling(["-m", "fusebook.launches", cards], json.dumps(request), library)
    answers = [answer for line in said for answer in json.loads(line).items()]
    return {name: [tuple(pair) for pair in pairs] for name, pairs in answers}


def _compiling(words: Sequence[str], text: str, library: pathlib.Path) -> list[str]:
    """The lines that Python says, given these words and a text, where Triton compiles."""
    paths = [os.environ.get("FUSEBOOK_TRITON", ""), str(library), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["OMP_NUM_THREADS"] = "1"  # nothing is computed
    command = [sys.executable, "-W", "ignore", *words]
    process = subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
    if process.returncode:
        raise Unknown((process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return process.stdout.splitlines()


_REGISTERS = """
import json, re, subprocess, sys, tempfile
import fusebook, torch, triton
from fusebook import launches
triton.runtime.driver.set_active(launches.AbsentGPU())
names = {}
exec(sys.stdin.read(), names)
with launches.kernels() as found:
    names[sys.argv[1]](*json.loads(sys.argv[2]))
print(triton.__version__)
for kernel in found:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], text=True)
    print(re.search(r"REG:(\\d+)", said)[1])
"""


def registers(launch: Callable[..., Any], *given: Any) -> tuple[str, list[int]]:
    """Registers a thread of what a function launches, as it is compiled here for Hopper, which need not be here.

    Parameters
    ----------
    launch : callable
        Its source stands by itself: it imports what it uses.
    *given
        Its arguments, as JSON can hold them.

    Returns
    -------
    version : str
        Of the Triton that compiled.
    registers : list of int
        Of each launch, in their order, by the cuobjdump that comes with Triton.

    Raises
    ------
    Unknown
        Where it does not compile; the message is the compiler's.
    """
    text = textwrap.dedent(inspect.getsource(launch))
    words = ["-c", _REGISTERS, launch.__name__, json.dumps(given)]
    version, *said = _compiling(words, text, pathlib.Path(__file__).parents[1])
    return version, [int(line) for line in said]


def main(argv: Sequence[str]) -> int:
    """Read what `elsewhere` asks as JSON from standard input, and print what was found; `argv` names the cards."""
    given = json.load(sys.stdin)
    if given.get("triton") not in (None, "", triton.__version__):
        raise SystemExit(
            f"what was compiled by Triton {given['triton']} needs that version, and here is {triton.__version__}: "
            f"`pip install --no-deps --target DIR triton=={given['triton']}`, then set FUSEBOOK_TRITON=DIR"
        )
    cards = pkgutil.resolve_name(argv[0])
    gpu = AbsentGPU(tuple(given["capability"]), given["sms"])
    for op, points in given["asked"].items():
        print(json.dumps({op: found(cards[op], points, gpu, given.get("compile", False))}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
