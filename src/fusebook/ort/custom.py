"""Operators of ONNX Runtime whose kernels are Python functions: a Triton launcher becomes a node of a graph.

ONNX Runtime takes operators from a shared library. Fusebook's is a small C file without any operator. The system's C
compiler compiles it at its first use, as Triton compiles its launchers, and a cache keeps it.
When a node runs, it hands its tensors to Python as DLPack structs over ONNX Runtime's memory, and Python launches on
ONNX Runtime's stream.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import hashlib
import inspect
import itertools
import operator
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fusebook.kernels._call import INTERPRETED, _modes, _private, _transforms, skipped
from fusebook.measure.machine import cache_folder

#: An attribute of torch, because modules of this package may be reloaded or dropped. The C library keeps addresses of
#: objects in this module, and sessions keep numbers of its operators.
_MARK = "_fusebook_ort"
if _MARK in vars(torch):
    raise ImportError("fusebook.ort.custom: expected one import in a process, got a reload; start the process again")

__all__ = ["CustomOp", "custom_op", "register"]

C = pathlib.Path(__file__).parent / "c"
_MESSAGE = 2048  # as in shim.c
# Numbers of onnx.TensorProto, so that running a graph does not need the package onnx.
_ELEMENTS = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}

# The library -----------------------------------------------------------------------------------------------------


def compile_c(
    sources: Sequence[pathlib.Path],
    out: pathlib.Path,
    *options: str,
    remedy: str = "set FUSEBOOK_CACHE to a folder",
    folder: pathlib.Path | None = None,
) -> pathlib.Path:
    """Make a shared library with the system's C compiler.

    Parameters
    ----------
    out : pathlib.Path
        Whole or not there, whatever happens meanwhile.
    *options : str
        Further options of the compiler.
    remedy : str
        What helps where `out` cannot be written.
    folder : pathlib.Path, optional
        Where the compiler runs.

    Returns
    -------
    pathlib.Path
        `out`.

    Raises
    ------
    RuntimeError
        Where there is no compiler, it fails, or `out` cannot be written; in one sentence.
    """
    asked = os.environ.get("CC")
    compiler = shutil.which(asked) if asked else next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise RuntimeError(
            f"fusebook.ort: found no C compiler ({asked or 'cc, gcc or clang'}), which operators of ONNX Runtime are "
            "made with; install gcc, or set CC to the one to use"
        )
    part = beside(out, remedy)
    flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{C}"]
    try:
        try:
            done = subprocess.run(
                [os.path.abspath(compiler), *flags, *map(str, sources), "-o", str(part), *options],
                capture_output=True, text=True, errors="replace", check=False, cwd=folder,
            )  # fmt: skip
        except OSError as error:
            raise RuntimeError(
                f"fusebook.ort: cannot run {compiler} ({error.strerror}); set CC to a compiler of C11"
            ) from error
        if done.returncode or not part.stat().st_size:
            lines = [line[:200] for line in done.stderr.splitlines() if line.strip()]
            full = next((line for line in lines if "No space left" in line), "")
            first = full or next((line for line in lines if "error" in line), lines[0] if lines else "")
            first = first or f"it returned {done.returncode}" + " and wrote nothing" * (not done.returncode)
            advice = "free some, or set TMPDIR to another folder" if full else "set CC to a compiler of C11"
            raise RuntimeError(f"fusebook.ort: {compiler} failed: {first}; {advice}")
        part.chmod(0o755)  # the temporary file is for one user only
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return out


def beside(out: pathlib.Path, remedy: str) -> pathlib.Path:
    """A new, empty file in the folder of `out`; RuntimeError with the remedy where there can be none."""
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(out.stat().st_mode):  # a device would be replaced too
                raise FileExistsError(errno.EEXIST, "it is a folder or a special file")
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".so", dir=out.parent)
    except (OSError, ValueError) as error:  # of a name that no file can have
        why = getattr(error, "strerror", error)
        raise RuntimeError(f"fusebook.ort: cannot write {out} ({why}); {remedy} that can be written") from error
    os.close(handle)
    return pathlib.Path(name)


def _library_path() -> pathlib.Path:
    """The compiled shim of this version of the library; compiled where it is not there yet."""
    text = b"".join((C / name).read_bytes() for name in ("ort_api.h", "shim.c"))
    path = cache_folder() / f"shim-{hashlib.sha256(text).hexdigest()[:16]}.so"
    return path if os.path.exists(path) else compile_c([C / "shim.c"], path)  # Path.exists may raise


_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_done = ctypes.POINTER(ctypes.c_int)
_CREATE = ctypes.PYFUNCTYPE(None, _size, _pointer, _pointer, ctypes.POINTER(_size), _pointer, _done)
_DESTROY = ctypes.CFUNCTYPE(None, _size)


class _Shim:
    """The compiled library, as Python sees it."""

    def __init__(self) -> None:
        self.path = _library_path()
        try:
            library = ctypes.PyDLL(str(self.path))  # keeps the GIL: all of its functions take no time
        except OSError as error:
            raise RuntimeError(
                f"fusebook.ort: cannot load {self.path} ({error}); delete it, so that it is compiled for this machine"
            ) from error
        self.library = library
        self.callbacks = (_CREATE_CALLBACK, ctypes.py_object(_compute), _DESTROY_CALLBACK)
        library.fusebook_callbacks(*self.callbacks)
        # A session may outlive the interpreter, which must not be called back then.
        atexit.register(library.fusebook_callbacks, None, None, None)
        library.fusebook_define.restype = _pointer
        library.fusebook_together.restype = _pointer
        library.fusebook_select.argtypes = [_pointer]
        self.output = library.fusebook_output
        self.output.restype = ctypes.py_object
        self.output.argtypes = [_pointer, _size, ctypes.py_object]
        self.selections: dict[tuple[str, tuple[int, ...]], int] = {}


#: For one thread at a time: the library has one place for what is registered next, and is loaded once.
_registering = threading.RLock()
# A process that is forked meanwhile would wait for a thread that it does not have.
os.register_at_fork(
    before=_registering.acquire, after_in_parent=_registering.release, after_in_child=_registering.release
)


@functools.cache
def _shim() -> _Shim:
    return _Shim()


_F = TypeVar("_F", bound=Callable[..., Any])
_of_capsule = _private("torch:_C._from_dlpack", torch.from_dlpack)
_outside = _private("torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack", contextlib.nullcontext)


def untransformed(function: _F) -> _F:
    """A function that runs outside of torch.func's transforms, which wrap what it makes and refuse what it writes."""

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        if not _transforms():
            return function(*args, **options)
        with _outside():
            return function(*args, **options)

    return called  # type: ignore[return-value]


def _stored(x: Tensor) -> bool:
    """Whether numbers are in memory on its device: not for fake, functional, wrapped, sparse or nested tensors."""
    if x.is_nested:
        return False
    try:
        memory = x.untyped_storage()
        if memory.device != x.device:  # that of a fake tensor is on meta
            return False
        memory.data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    # It may have been given back.
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    needed = (x.storage_offset() + last + 1) * x.element_size() if x.numel() else 0
    return memory.nbytes() >= needed


# Kernels ---------------------------------------------------------------------------------------------------------


class _Kernel:
    """A node of a session: an operator and the attributes of the node."""

    __slots__ = ("attributes", "op", "pool")

    def __init__(self, op: CustomOp, attributes: dict[str, Any]) -> None:
        self.op = op
        self.attributes = attributes
        self.pool: Any = None  # what a launcher allocates while a graph is captured belongs to that graph

    def run(self, capsules: Sequence[Any], running: int, stream: int, device: int) -> None:
        given = [None if capsule is None else _of_capsule(capsule) for capsule in capsules]
        if device < 0:
            self._launch(given, running)
            return
        # ONNX Runtime's stream becomes the current one of this thread. The first of these prepares torch for CUDA.
        theirs, before = _stream(stream, device), _current_stream(device)
        _set_stream(*theirs)
        try:
            if not torch.cuda.is_current_stream_capturing():
                self._launch(given, running)
                return
            # The captured graph is replayed without us: what its kernels use besides its inputs and outputs must stay.
            self.pool = self.pool or torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self.pool, device=torch.device("cuda", device)):
                self._launch(given, running)
        finally:
            _set_stream(*before)

    def _launch(self, given: list[Tensor | None], running: int) -> None:
        op = self.op
        if op.shape is None:
            results = op.launcher(*given, **self.attributes)
            results = results if isinstance(results, (tuple, list)) else (results,)
            op._complete(results)
            for i, result in enumerate(results):
                out = self._output(running, i, tuple(result.shape))
                if not torch.can_cast(result.dtype, out.dtype):
                    raise TypeError(
                        f"expected the launcher to return {list(op.outputs)[i]} as {out.dtype}, got {result.dtype}, "
                        "which loses a part of each element; cast it there"
                    )
                out.copy_(result)
            return
        shapes = op._shapes(given, self.attributes)
        memory = [self._output(running, i, shape) for i, shape in enumerate(shapes)]
        places = [out.data_ptr() for out in memory]
        results = op.launcher(*given, out=memory[0] if len(memory) == 1 else tuple(memory), **self.attributes)
        results = memory if results is None else results if isinstance(results, (tuple, list)) else (results,)
        if results is not memory:
            op._complete(results)
        for i, result in enumerate(results):
            # Torch resizes an out that does not fit; a view of it that is returned may mean other numbers.
            moved = result.data_ptr() != places[i] or result.shape != shapes[i] or result.dtype != memory[i].dtype
            if moved or not result.is_contiguous() or result.is_neg():
                raise ValueError(
                    f"{op.name}: expected the launcher to write {[*op.outputs][i]} into the memory given as out, got "
                    "another tensor; write to out and return it, or leave shape out so that the result is copied"
                )

    def _output(self, running: int, i: int, shape: tuple[int, ...]) -> Tensor:
        if len(shape) > 16:  # as ort_api.h has it
            raise ValueError(f"expected outputs of at most 16 axes, got {len(shape)}; reshape it")
        capsule = _shim().output(running, i, shape)
        if capsule is None:
            raise _Refused
        return _of_capsule(capsule)


class _Refused(Exception):
    """ONNX Runtime has set its status, which ends the run."""


#: What a stream is to torch's functions in C, which are many times as fast as those in Python.
_key = operator.attrgetter("stream_id", "device_index", "device_type")
_current_stream = _private("torch:_C._cuda_getCurrentStream", lambda device: _key(torch.cuda.current_stream(device)))
_set_stream = _private(
    "torch:_C._cuda_setStream",
    lambda s, d, t: torch.cuda.set_stream(torch.cuda.Stream(stream_id=s, device_index=d, device_type=t)),
)


@functools.lru_cache(maxsize=256)
def _stream(address: int, device: int) -> Any:
    return _key(torch.cuda.ExternalStream(address, device=device) if address else torch.cuda.default_stream(device))


#: A launcher may hold weights, so an operator lives no longer than options and kernels that have it.
_OPS: weakref.WeakValueDictionary[int, CustomOp] = weakref.WeakValueDictionary()
_KERNELS: dict[int, _Kernel] = {}
_numbers = itertools.count(1)


def _say(error: BaseException, name: str, into: int) -> None:
    """Leave one line of an exception where C takes it from."""
    try:
        line = (str(error).strip().splitlines() or [""])[0]
    except Exception:  # of a class that cannot say what it is
        line = ""
    text = f"{name}: {type(error).__name__}: {line}" if line else f"{name}: {type(error).__name__}"
    data = text.encode(errors="backslashreplace")[: _MESSAGE - 1].decode(errors="ignore").encode() + b"\0"
    ctypes.memmove(into, data, len(data))


def _create(op: int, api: int, info: int, kernel: Any, message: int, done: Any) -> None:
    try:
        made = _Kernel(_OPS[op], _OPS[op]._attributes_of(api, info))
        number = next(_numbers)
        _KERNELS[number] = made
        kernel[0] = number
        done[0] = 1
    except BaseException as error:  # it would be printed, and ONNX Runtime would not say what it was
        _say(error, _OPS[op].name if op in _OPS else "fusebook", message)


def _compute(kernel: int, capsules: Sequence[Any], running: int, stream: int, device: int, message: int) -> bool:
    try:
        run = _KERNELS[kernel].run
        if _transforms():
            run = untransformed(run)
        if _modes():  # they may leave outputs as they are, or record addresses that are worth nothing after the run
            run = _disable_current_modes()(run)
        if INTERPRETED and "torch._dynamo" in sys.modules:  # torch.compile would follow into Triton's interpreter
            run = torch.compiler.disable(run)
        run(capsules, running, stream, device)
        return True
    except _Refused:
        pass
    except BaseException as error:
        _say(error, _KERNELS[kernel].op.name, message)
    return False


def _destroy(kernel: int) -> None:
    _KERNELS.pop(kernel, None)


# torch.compile would trace these, and look through tables that change meanwhile.
for _callback in (_create, _compute, _destroy):
    skipped(_callback)

_CREATE_CALLBACK = _CREATE(_create)
_DESTROY_CALLBACK = _DESTROY(_destroy)


# Operators -------------------------------------------------------------------------------------------------------

#: Names by which ONNX Runtime knows a node in any domain: it leaves such nodes out, or reads inputs that they do not
#: have, which ends the process.
_TAKEN = {
    *("Add", "Cast", "Clip", "Constant", "Conv", "ConvTranspose", "DequantizeLinear", "Div", "Expand", "Gather"),
    *("Gemm", "Identity", "If", "MatMulInteger", "Mul", "QuantizeLinear", "Shape", "Size", "Squeeze", "Sub"),
    *("Transpose", "Unsqueeze", "Where", "YieldOp"),
}

Kinds = Mapping[str, torch.dtype | str]
Shape = str | Callable[..., Any]


class CustomOp:
    """An operator of ONNX Runtime; made by `custom_op`, given to `register` or to `fusebook.ort.Graph`."""

    def __init__(
        self,
        name: str,
        launcher: Callable[..., Any],
        inputs: Kinds,
        outputs: Kinds,
        shape: Shape | None,
        types: Mapping[str, Sequence[torch.dtype]],
        attributes: Mapping[str, Any],
        host: Sequence[str],
        optional: Sequence[str],
        domain: str,
    ) -> None:
        self.name = name
        self.launcher = launcher
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"onnx.custom_op: expected a name such as MaskedScatter, got {name!r}; use letters")
        if name in _TAKEN:
            raise ValueError(
                f"onnx.custom_op: expected a name that ONNX Runtime's optimizer does not know, got {name}, which it "
                f"takes for ONNX's; call it My{name}"
            )
        given = {"inputs": inputs, "outputs": outputs, "types": types, "attributes": attributes}
        for what, names in given.items():
            if not isinstance(names, Mapping) or not all(isinstance(n, str) and n.isprintable() for n in names):
                got = [*names] if isinstance(names, Mapping) else type(names).__name__
                raise TypeError(
                    f"onnx.custom_op: {name}: expected {what} to map names to types, got {got}; pass a dict such as "
                    "{'x': torch.float32}"
                )
        for what, some in (("host", host), ("optional", optional)):
            if isinstance(some, str) or not isinstance(some, Iterable):
                raise TypeError(
                    f"onnx.custom_op: {name}: expected {what} to list names of inputs, got {some!r}; put it in a list"
                )
        if not isinstance(domain, str) or not domain.isprintable():
            raise TypeError(
                f"onnx.custom_op: {name}: expected domain to be a str that can be printed, got {domain!r}; leave it out"
            )
        if domain in ("", "ai.onnx") or domain.startswith(("ai.onnx.", "com.microsoft", "com.ms.")):
            raise ValueError(
                f"onnx.custom_op: {name}: expected a domain of your own, got {domain!r}, whose nodes ONNX Runtime's "
                "optimizer takes for ONNX's operators; leave it out"
            )
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.shape = shape
        listed = {k: (v,) if isinstance(v, torch.dtype) else v for k, v in types.items()}
        self.types = {k: tuple(v) if isinstance(v, Iterable) else (v,) for k, v in listed.items()}
        self.attributes = dict(attributes)
        self.host = tuple(host)
        self.optional = tuple(optional)
        self.domain = domain
        self._check()
        self._model = [*self.inputs].index(shape) if isinstance(shape, str) else -1
        self.number = next(_numbers)
        self._overloads: list[int] = []

    def __reduce__(self) -> Any:
        # A copy has a number and overloads of its own: these are of this process, and would end another one.
        given = self.name, self.launcher, self.inputs, self.outputs, self.shape, self.types, self.attributes
        return CustomOp, (*given, self.host, self.optional, self.domain)

    def __repr__(self) -> str:
        return f"CustomOp({self.domain}::{self.name}({', '.join(self.inputs)}) -> {', '.join(self.outputs)})"

    def _check(self) -> None:
        def refuse(what: str) -> None:
            raise ValueError(f"onnx.custom_op: {self.name}: {what}")

        if not callable(self.launcher):
            raise TypeError(
                f"onnx.custom_op: {self.name}: expected launcher to be a function, got "
                f"{type(self.launcher).__name__}; pass the function itself"
            )
        if not self.outputs:
            refuse("expected at least one output, got none; name them with their types")
        if max(len(self.inputs), len(self.outputs)) > 32:
            refuse("expected at most 32 inputs and 32 outputs; split the operator")
        for name, kind in {**self.inputs, **self.outputs}.items():
            known = self.types if isinstance(kind, str) else _ELEMENTS
            if not isinstance(kind, (str, torch.dtype)) or kind not in known:
                refuse(
                    f"expected the type of {name} to be a torch dtype ({', '.join(str(d)[6:] for d in _ELEMENTS)}) or "
                    f"one of types ({', '.join(self.types)}), got {kind!r}; choose one, or name it in types"
                )
        for key, kinds in self.types.items():
            if not kinds or not all(isinstance(kind, torch.dtype) and kind in _ELEMENTS for kind in kinds):
                refuse(f"expected types[{key!r}] to list torch dtypes, got {kinds!r}; list those to accept")
        if lost := {k for k in self.outputs.values() if isinstance(k, str)} - set(self.inputs.values()):
            refuse(f"expected each type of an output to be that of an input, got {', '.join(lost)}; give a dtype")
        for what, names in (("host", self.host), ("optional", self.optional)):
            if unknown := [name for name in names if name not in self.inputs]:
                refuse(f"expected {what} to name inputs ({', '.join(self.inputs)}), got {', '.join(unknown)}")
        for key, value in self.attributes.items():
            _reader_of(self.name, key, value)
        if self.shape is not None and not callable(self.shape) and self.shape not in [*self.inputs]:
            refuse(f"expected shape to name an input ({', '.join(self.inputs)}) or be a function, got {self.shape!r}")
        if self.shape is not None and "out" in self.attributes:
            refuse("expected attributes without out, which is the memory to write to; choose another name")
        if self.shape is not None and "out" not in _parameters(self.launcher):
            refuse(
                "expected the launcher to take out=, the memory to write to, as a shape is given; leave shape out to "
                "have its results copied"
            )

    def _shapes(self, given: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """The shapes of all outputs."""
        if isinstance(self.shape, str):
            of = given[self._model]
            if of is None:
                raise ValueError(f"expected the input {self.shape}, whose shape the output has; the node leaves it out")
            if self.shape not in self.host:
                return [of.shape] * len(self.outputs)
            if of.dim() != 1:
                raise ValueError(f"expected {self.shape} to have one axis, got {tuple(of.shape)}; pass a vector")
            shapes: Any = [tuple(of.tolist())] * len(self.outputs)
            if min(shapes[0], default=0) >= 0:
                return shapes
        else:
            assert self.shape is not None
            shapes = self.shape(*given, **attributes)
        try:
            several = len(shapes) > 0 and not hasattr(shapes[0], "__index__")
            shapes = [tuple(map(operator.index, shape)) for shape in (shapes if several else [shapes])]
        except (KeyError, TypeError) as error:
            raise TypeError(
                f"expected a tuple of sizes from shape, or one an output, got {shapes!r}; return x.shape for instance"
            ) from error
        if len(shapes) != len(self.outputs):
            raise ValueError(f"expected {len(self.outputs)} shapes, got {len(shapes)}; shape must give one an output")
        for shape in shapes:
            if any(not 0 <= size < 2**63 for size in shape):
                raise ValueError(f"expected sizes from 0 up in a shape, got {shape}; give each axis its length")
        return shapes

    def _complete(self, results: Sequence[Any]) -> None:
        if len(results) != len(self.outputs):
            raise ValueError(
                f"expected {len(self.outputs)} outputs ({', '.join(self.outputs)}) from the launcher, got "
                f"{len(results)}; return them as a tuple"
            )
        for name, result in zip(self.outputs, results, strict=True):
            if not isinstance(result, Tensor) or not _stored(result):
                got = type(result).__name__ + " without" * isinstance(result, Tensor)
                raise TypeError(
                    f"expected the launcher to return a tensor with memory for {name}, got a {got}; return a "
                    "dense tensor"
                )

    def _attributes_of(self, api: int, info: int) -> dict[str, Any]:
        return {name: _reader_of(self.name, name, value)(api, info) for name, value in self.attributes.items()}

    def _defined(self) -> list[int]:
        """Pointers to the overloads, each choice of types for each provider; made when they are first asked for."""
        if not self._overloads:
            library = _shim().library
            _OPS[self.number] = self
            used = [key for key in self.types if key in {*self.inputs.values(), *self.outputs.values()}]
            for chosen in itertools.product(*(self.types[key] for key in used)):
                known = dict(zip(used, chosen, strict=True))

                def elements(kinds: Kinds, known: dict[str, torch.dtype] = known) -> Any:
                    values = [_ELEMENTS[known[k] if isinstance(k, str) else k] for k in kinds.values()]
                    return (ctypes.c_int * len(values))(*values)

                flags = ctypes.c_int * len(self.inputs)
                for cuda in (0, 1):
                    pointer = library.fusebook_define(
                        _size(self.number), self.name.encode(), cuda,
                        _size(len(self.inputs)), elements(self.inputs),
                        flags(*(name in self.optional for name in self.inputs)),
                        flags(*(name in self.host for name in self.inputs)),
                        _size(len(self.outputs)), elements(self.outputs),
                    )  # fmt: skip
                    self._overloads.append(pointer)
        return self._overloads


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {"out"}
    return set(found) | ({"out"} if any(p.kind is p.VAR_KEYWORD for p in found.values()) else set())


#: The kinds of attributes that the C library can read, by the names of its functions.
_ATTRIBUTES = ("int", "float", "string", "ints", "floats")


def _reader_of(op: str, name: str, default: Any) -> Callable[[int, int], Any]:
    """How an attribute is read from a node; `default` is its value, or its type where a node must have it."""
    kind = default if isinstance(default, type) else type(default)
    words = {int: "int", float: "float", str: "string", tuple: "ints"}
    values = default if isinstance(default, tuple) else () if isinstance(default, type) else (default,)
    fit = all(type(v) is float or (type(v) is int and -(2**63) <= v < 2**63) for v in values) or kind is str
    if kind not in words or not fit:
        raise TypeError(
            f"onnx.custom_op: {op}: expected the attribute {name} to be an int of 64 bits, a float, a str or a tuple "
            f"of numbers, got {default!r}; give its default, or its type"
        )
    floats = kind is tuple and not isinstance(default, type) and any(isinstance(v, float) for v in default)
    if floats:
        words[tuple] = "floats"

    def read(api: int, info: int) -> Any:
        library, key = _shim().library, name.encode()
        where = (_pointer(api), _pointer(info), key)
        count = _size(0)
        if kind is int:
            whole = ctypes.c_int64()
            if library.fusebook_int(*where, ctypes.byref(whole)):
                return whole.value
        elif kind is float:
            real = ctypes.c_float()
            if library.fusebook_float(*where, ctypes.byref(real)):
                return real.value
        elif kind is str:
            # Asked for its size first; ONNX Runtime then says no, as there is no room, or yes, as there need be none.
            library.fusebook_string(*where, None, ctypes.byref(count))
            text = ctypes.create_string_buffer(max(1, count.value))
            if count.value and library.fusebook_string(*where, text, ctypes.byref(count)):
                return text.raw[: count.value - 1].decode()
        else:
            call = library.fusebook_floats if floats else library.fusebook_ints
            call(*where, None, ctypes.byref(count))
            room = ((ctypes.c_float if floats else ctypes.c_int64) * max(1, count.value))()
            if count.value and call(*where, room, ctypes.byref(count)):
                return tuple(room[: count.value])
        # Absent, or of another kind: tell them apart, so that a wrong one is not taken for the default.
        for word in _ATTRIBUTES:
            count = _size(0)
            buffer = ctypes.create_string_buffer(8)
            single = word in ("int", "float")
            last = (buffer,) if single else (None, ctypes.byref(count))
            there = getattr(library, f"fusebook_{word}")(*where, *last)
            # An array of the other kind of numbers is there, ONNX Runtime says, and has no elements.
            if (there if single else count.value) and word != words[kind]:
                raise TypeError(
                    f"expected the attribute {name} to be {words[kind]}, got {word}; set it as {words[kind]}"
                )
        if library.fusebook_ints(*where, None, ctypes.byref(count)):  # there, whatever it is
            if kind is tuple:
                return ()
            raise TypeError(
                f"expected the attribute {name} to be {words[kind]}, got another kind; set it as {words[kind]}"
            )
        if isinstance(default, type):
            raise ValueError(f"expected the attribute {name}, got a node without it; set it")
        return default

    return read


def custom_op(
    name: str,
    launcher: Callable[..., Any],
    inputs: Kinds,
    outputs: Kinds,
    shape: Shape | None = None,
    *,
    types: Mapping[str, Sequence[torch.dtype]] | None = None,
    attributes: Mapping[str, Any] | None = None,
    host: Sequence[str] = (),
    optional: Sequence[str] = (),
    domain: str = "fusebook",
) -> CustomOp:
    """Make an operator of ONNX Runtime out of a function of torch tensors.

    Parameters
    ----------
    name : str
        Of the operator in a graph. Some are refused, such as Identity: ONNX Runtime takes them for ONNX's in any
        domain.
    launcher : callable
        Called with a tensor for each input (None for an optional one that a node leaves out) and the node's attributes
        by name. The tensors lie over ONNX Runtime's memory, the current stream is ONNX Runtime's. With a `shape` it
        also takes ``out``, a tensor or a tuple of them over the memory of the outputs, and writes there.
    inputs, outputs : mapping of str to torch.dtype or str
        Names in their order, each with its dtype, or with the name of one of `types`.
    shape : str or callable, optional
        What the outputs are as large as. The name of an input: as that input; of an input on the host: as its values
        say. A function: of all that the launcher gets, it returns a shape, or one for each output. Without it, the
        launcher returns its results, and these are copied into ONNX Runtime's memory.
    types : mapping of str to sequence of torch.dtype, optional
        What a name among the types may stand for: ``{"T": (torch.float32, torch.float16)}``.
    attributes : mapping of str to int, float, str, tuple or type, optional
        Of the node, each with its default, or with its type where a node must have it; ``tuple`` is one of integers.
        Where a node has strings or tensors instead of numbers, a tuple is empty: ONNX Runtime does not tell them apart.
    host : sequence of str
        Inputs that are wanted on the CPU, such as a shape.
    optional : sequence of str
        Inputs that a node may leave out.
    domain : str, default "fusebook"
        Of the operator in a graph; none of ONNX's or ONNX Runtime's own.

    Returns
    -------
    CustomOp
        For `register`, or for ``ops`` of `fusebook.ort.Graph`.

    Raises
    ------
    TypeError, ValueError
        For a description that contradicts itself.

    Notes
    -----
    What the launcher raises becomes an error of ONNX Runtime with its message. A tensor that it keeps is worth nothing
    once it has returned. It runs in the grad mode of its thread, and autograd keeps tensors too: a launcher with
    weights that require a gradient must use ``torch.no_grad()``, or compute with clones of its inputs. An object that
    owns a `fusebook.ort.Graph` is never freed if the launcher is its method. Use ``weakref.ref`` in the launcher. ONNX
    Runtime calls a launcher several times before it has captured a CUDA graph, and then replays the graph without the
    launcher. Memory that the launcher allocates during the capture is kept for as long as the session.

    ONNX Runtime keeps pointers to each operator, so its description stays in memory until the process ends. Make an
    operator once, not for each session.

    Examples
    --------
    >>> def twice(x, out):
    ...     torch.mul(x, 2, out=out)
    >>> op = custom_op("Twice", twice, {"x": torch.float32}, {"y": torch.float32}, shape="x")
    >>> graph = fusebook.ort.Graph("model.onnx", ops=[op])  # doctest: +SKIP
    """
    return CustomOp(
        name, launcher, inputs, outputs, shape, types or {}, attributes or {}, host, optional, domain
    )  # fmt: skip


def register(options: Any, *ops: CustomOp) -> None:
    """Make operators known to the sessions that are made with these options.

    Parameters
    ----------
    options : onnxruntime.SessionOptions
    *ops : CustomOp

    Raises
    ------
    RuntimeError
        If there is no C compiler, or no folder for the compiled library. From ONNX Runtime, if the options have the
        domain of the operators already: a session takes one set of operators for each domain.
    TypeError, ValueError
        For something else than options and operators, and for two of one name.

    Notes
    -----
    Do not run such a session where ``make_fx(..., pre_dispatch=True)`` traces with real tensors: what a launcher writes
    would be in the traced program, by addresses of this run. `fusebook.ort.Graph` refuses to be called there.

    The handler of a signal must not make a Graph with operators, or call this, while the same thread does: one of the
    two may be refused, or get the operators of the other. In Triton's interpreter the handler must not do so while
    other threads fork: they would wait for each other. On a GPU an error of a signal's handler, as of Ctrl-C, may leave
    ONNX Runtime's stream as torch's current stream: set the one that was before. A `fusebook.ort.Graph` does that.
    """
    if not hasattr(type(options), "register_custom_ops_library"):
        raise TypeError(
            f"onnx.register: expected options to be onnxruntime.SessionOptions, got {type(options).__name__}; make one"
        )
    for op in ops:
        if not isinstance(op, CustomOp):
            raise TypeError(
                f"onnx.register: expected operators from onnx.custom_op, got {type(op).__name__}; make one of it"
            )
    weakref.finalize(options, len, ops).atexit = False  # holds the operators as long as there are the options
    for domain in dict.fromkeys(op.domain for op in ops):
        chosen = [op for op in ops if op.domain == domain]
        names = [op.name for op in chosen]
        if len(set(names)) < len(names):
            raise ValueError(f"onnx.register: expected names that differ in {domain}, got {', '.join(names)}")
        with _registering:
            shim = _shim()
            key = domain, tuple(op.number for op in chosen)
            if key not in shim.selections:
                overloads = [pointer for op in chosen for pointer in op._defined()]
                array = (_pointer * len(overloads))(*overloads)
                shim.selections[key] = shim.library.fusebook_together(domain.encode(), array, _size(len(overloads)))
            shim.library.fusebook_select(shim.selections[key])
            try:
                options.register_custom_ops_library(os.fsencode(shim.path))  # which need not be UTF-8
            finally:
                shim.library.fusebook_select(None)


vars(torch)[_MARK] = True
