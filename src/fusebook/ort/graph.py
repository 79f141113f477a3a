"""An ONNX graph as a function of torch tensors: session, IO binding on torch's memory, torch's streams.

Only ONNX Runtime's public API is used. On a CUDA device nothing is copied and nothing waits for the GPU: inputs and
outputs are bound to the memory of torch tensors. Only tensors on the CPU are copied. A run waits for the GPU if an
input is in pinned memory, or an output on the CPU. The graph runs on a side stream of torch, which waits for the
current stream, and the current stream for it. On the CPU a session has one thread: with more, ONNX Runtime's ScatterND
loses updates of repeated indices.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from fusebook.kernels._call import _ahead, _modes, _tracing, flag, integer, plain
from fusebook.ort.custom import _ELEMENTS, CustomOp, _stored, register, untransformed

__all__ = ["Bound", "Graph"]

#: Names and numbers that ONNX Runtime has for torch's dtypes.
_NAMES = {
    torch.float32: "tensor(float)",
    torch.uint8: "tensor(uint8)",
    torch.int8: "tensor(int8)",
    torch.uint16: "tensor(uint16)",
    torch.int16: "tensor(int16)",
    torch.int32: "tensor(int32)",
    torch.int64: "tensor(int64)",
    torch.bool: "tensor(bool)",
    torch.float16: "tensor(float16)",
    torch.float64: "tensor(double)",
    torch.uint32: "tensor(uint32)",
    torch.uint64: "tensor(uint64)",
    torch.bfloat16: "tensor(bfloat16)",
    torch.float8_e4m3fn: "tensor(float8e4m3fn)",
    torch.float8_e4m3fnuz: "tensor(float8e4m3fnuz)",
    torch.float8_e5m2: "tensor(float8e5m2)",
    torch.float8_e5m2fnuz: "tensor(float8e5m2fnuz)",
}
_NUMBERS = _ELEMENTS | {
    torch.uint16: 4,
    torch.uint32: 12,
    torch.uint64: 13,
    torch.float8_e4m3fn: 17,
    torch.float8_e4m3fnuz: 18,
    torch.float8_e5m2: 19,
    torch.float8_e5m2fnuz: 20,
}
#: What ONNX Runtime says of weights in another file that it does not find, or that is too short.
_OUTSIDE = ("External data", "External initializer", "model_path must not be empty")
_WEIGHTS = (
    "ort.Graph: expected weights within the model, or in files beside its path, got {}; pass the path, or load them "
    "with onnx.load or onnx_ir.external_data.load_to_model"
)


class Graph:
    """An ONNX model, ready to be called.

    Parameters
    ----------
    model : onnx.ModelProto, onnx_ir.Model, torch.onnx.ONNXProgram, bytes or path
        External weights of an onnx_ir.Model are read from their files.
    device : str or torch.device, optional
        CUDA where there is a GPU, else the CPU.
    tf32 : bool, default False
        On CUDA, multiply float32 in TF32. It is ONNX Runtime's default and not torch's, so it is asked for here.
    threads : int, default 1
        Of an operator on the CPU.
    library : path, optional
        A library of custom operators to register. The system's loader knows a file by the name that it was given first:
        a link that leads to another file meanwhile still names the old one while that is loaded.
    ops : sequence of CustomOp
        Operators whose kernels are Python functions, see `custom_op`.
    options : mapping of str to str, optional
        Further options of the CUDA provider, without its device and stream. With ``{"enable_cuda_graph": "1"}``, runs
        of one `Bound` are captured and replayed. A second `Bound` of the same graph is refused.

    Raises
    ------
    ModuleNotFoundError
        Where ONNX Runtime is not installed.
    RuntimeError
        Where the ONNX Runtime that is installed cannot use the device.
    TypeError
        For something else than a model, and for a model with inputs or outputs that no tensor of torch can be: strings,
        sequences, maps, optional values, numbers of four bits.
    ValueError
        For another device than the CPU or CUDA, options that set the device or the stream, weights in files that cannot
        be read, and a model of 2 GiB or more that is not given by path.

    Notes
    -----
    No gradient is recorded. Autograd detects writes to given memory. `torch.func` and forward mode do not detect them,
    as for `torch.library.custom_op`. On the CPU, several threads may call one graph at once. `inputs`, `defaults` and
    `outputs` map names to ONNX Runtime's types; `defaults` are initializers that a caller may replace. If a tensor is
    of a subclass with memory, a call uses that memory directly. A launcher, or the handler of a signal, that runs
    during a call must not give its tensors other memory.

    On CUDA a call waits for the stream that is current, and may write to the memory of a result of an earlier call that
    was dropped. Another stream that still reads it must be waited for first.

    Examples
    --------
    >>> graph = Graph("softmax.onnx")  # doctest: +SKIP
    >>> graph({"x": torch.randn(3, 5, device="cuda")})["y"]  # doctest: +SKIP
    """

    @untransformed
    def __init__(
        self,
        model: Any,
        *,
        device: str | torch.device | None = None,
        tf32: bool = False,
        threads: int = 1,
        library: str | os.PathLike[str] | None = None,
        ops: Sequence[CustomOp] = (),
        options: Mapping[str, str] | None = None,
    ) -> None:
        ort = _onnxruntime()
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(default if device is None else device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"ort.Graph: expected device to be cpu or cuda, got {self.device}; choose one of them")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("ort.Graph: expected a CUDA device, and torch finds none; pass device='cpu'")
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = integer(
            "ort.Graph", "threads", threads, "give 1, or 0 for one a core", "from 0 to 1024", lambda n: 0 <= n <= 1024
        )
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 4  # errors are raised, and need not be printed as well
        if library is not None:
            # A name without a folder would be looked for in the system's folders only; bytes, as it may be no UTF-8.
            path = os.path.abspath(library) if os.path.isfile(library) else library
            settings.register_custom_ops_library(os.fsencode(path))
        if isinstance(ops, CustomOp) or not isinstance(ops, Iterable):
            got = "one operator" if isinstance(ops, CustomOp) else type(ops).__name__
            raise TypeError(f"ort.Graph: expected ops to be a list of operators, got {got}; put them in a list")
        if not isinstance(options, Mapping) and options is not None:
            raise TypeError(f"ort.Graph: expected options to map names to text, got {options!r}; pass a dict")
        if taken := {"device_id", "user_compute_stream", "has_user_compute_stream"} & {*(options or ())}:
            raise ValueError(
                f"ort.Graph: expected options without {taken.pop()}, which Graph sets by device; leave it out"
            )
        flag("ort.Graph", "tf32", tf32)
        register(settings, *ops)
        self.stream: torch.cuda.Stream | None = None
        providers: list[Any] = ["CPUExecutionProvider"]
        self._run = ort.RunOptions()
        self._run.log_severity_level = 4
        if self.device.type == "cuda":
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            # Torch's own stream is the null stream, which ONNX Runtime takes for none given: hence a side stream.
            self.stream = torch.cuda.Stream(self.device)
            cuda = {
                "device_id": str(self.device.index),
                "user_compute_stream": str(self.stream.cuda_stream),
                "use_tf32": str(int(tf32)),
                **(options or {}),
            }
            providers.insert(0, ("CUDAExecutionProvider", cuda))
            if "CUDAExecutionProvider" not in ort.get_available_providers():
                raise RuntimeError(
                    f"ort.Graph: onnxruntime {ort.__version__} has no CUDA provider; install onnxruntime-gpu"
                )
            # Otherwise every run ends in waiting for the GPU.
            self._run.add_run_config_entry("disable_synchronize_execution_providers", "1")
        # The default. ONNX Runtime 1.31 looks for it in every run. Without it, a C++ exception takes longer than the
        # rest of a small run.
        self._run.add_run_config_entry("gpu_graph_id", "0")
        readable = _readable(model)
        try:
            with self._there():
                self.session = ort.InferenceSession(readable, settings, providers=providers)
        except Exception as error:  # ONNX Runtime has its own classes
            if not any(words in str(error) for words in _OUTSIDE):
                raise
            raise ValueError(_WEIGHTS.format(str(error).strip())) from error
        if self.stream is not None and "CUDAExecutionProvider" not in self.session.get_providers():
            raise RuntimeError(
                "ort.Graph: ONNX Runtime could not load its CUDA provider and fell back to the CPU; check that its "
                "CUDA version is torch's, and import torch first"
            )
        # An empty tensor has no address, and ONNX Runtime takes no null pointer: this one is never read.
        with _disable_current_modes():  # FakeTensorMode would make a fake tensor
            self._nothing = torch.empty(16, dtype=torch.uint8, device=self.device)
        self.inputs = _tensors("inputs", self.session.get_inputs())
        self.outputs = _tensors("outputs", self.session.get_outputs())
        known = _NAMES.values()
        self.defaults = {n.name: n.type for n in self.session.get_overridable_initializers() if n.type in known}
        # Inputs that all nodes are known to read on the GPU. ONNX Runtime reports the devices from 1.23 on.
        self._on_gpu: set[str] = set()
        with contextlib.suppress(Exception):  # it has its own classes
            read = zip(self.session.get_inputs(), self.session.get_input_memory_infos(), strict=True)
            self._on_gpu = {node.name for node, place in read if place.name.lower() == "cuda"}
        # A captured CUDA graph writes to the same memory in every run.
        captured = str((options or {}).get("enable_cuda_graph")).lower() in ("1", "true")
        self._fixed = captured and self.device.type == "cuda"
        # Tensors of the captured Bound, which are kept because replays write to them, and whether it ran.
        self._captured: dict[str, Any] = {}
        self._replays = threading.local()  # ONNX Runtime captures once in each thread

    def _there(self) -> Any:
        """A context for calls of ONNX Runtime, which leaves the graph's device as the current device."""
        here = self.stream is None or torch.cuda.current_device() == self.device.index
        return contextlib.nullcontext() if here else torch.cuda.device(self.device)

    def _crosses(self, place: tuple[Any, ...]) -> bool:
        """Whether ONNX Runtime may copy an input to another device when it is bound."""
        name, device = place[:2]
        return self.stream is not None and (device == "cpu" or name not in self._on_gpu)

    def __reduce__(self) -> Any:
        raise TypeError(
            "ort.Graph: expected a session to stay where it is, got a copy or pickle of it; make another one"
        )

    def bind(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor] | None = None) -> Bound:
        """Bind tensors once, to run on them many times.

        Parameters
        ----------
        inputs : mapping of str to torch.Tensor
            Every input of the graph, on its device or on the CPU. Contiguous. What they hold may change between runs.
            Exception: a captured CUDA graph reads an input when it is bound, if the input is on the CPU or if a node
            reads it on the CPU. Initializers that are inputs of the graph too may be given.
        outputs : mapping of str to torch.Tensor, optional
            Memory for outputs, of the right shape and dtype. Those not given are allocated by ONNX Runtime. It may be
            that of an input where the graph allows for that.

        Returns
        -------
        Bound
            A function without arguments.

        Raises
        ------
        ValueError, TypeError
            For a missing or unknown name, a wrong dtype, a tensor that is not contiguous or has no memory, and for
            outputs that overlap each other or a part of an input.
        NotImplementedError
            Where the call is traced, or tensors are fake.
        """
        return Bound(self, inputs, {} if outputs is None else outputs)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Run once.

        Parameters
        ----------
        inputs, outputs
            As for `bind`; inputs that are not contiguous are copied.

        Returns
        -------
        dict of str to torch.Tensor
            Every output of the graph, on its device. None shares memory with an input unless it was given.
        """
        return Bound(self, inputs, {} if outputs is None else outputs, copied=True)()


class Bound:
    """A graph with its tensors; made by `Graph.bind`. Calling it runs the graph and returns its outputs by name.

    Where `Graph` may be called by several threads at once, this may be, too. Only runs that write to given memory must
    not overlap: as with ``out=`` of torch, it would hold some of each.
    """

    @untransformed
    def __init__(
        self, graph: Graph, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, copied: bool = False
    ) -> None:
        _check_tracing(graph)
        self.graph = graph
        types = graph.inputs | graph.defaults
        inputs = _named("inputs", inputs, types, graph.inputs)
        outputs = _named("outputs", outputs, graph.outputs, ())
        # Their memory is bound by address, so they are kept.
        self._inputs = {name: _own(name, value, graph, types[name], copied) for name, value in inputs.items()}
        self._given = {name: _own(name, value, graph, graph.outputs[name]) for name, value in outputs.items()}
        _apart(self._inputs, self._given)
        self._check_given()
        self._over: list[Tensor] = []  # inputs over which a captured graph writes
        if graph._fixed:
            places = {value.data_ptr() for value in self._given.values()}
            self._over = [value for value in self._inputs.values() if value.data_ptr() in places]
            host = [name for name, value in self._inputs.items() if value.device.type == "cpu"]  # read now, see `bind`
            self._inputs |= {name: self._inputs[name].detach().clone() for name in host}
        # ONNX Runtime hands an input on as it is, and leaves memory that is given for it alone.
        self._passed = [name for name in graph.outputs if name in inputs]
        self._computed = [name for name in graph.outputs if name not in inputs]
        self._fresh = [name for name in self._computed if name not in outputs]
        self._written = [value for value in self._given.values() if not value.is_inference()]
        bound = () if copied else (*inputs.items(), *outputs.items())  # `copied` is for one run, at once
        self._places = [(name, value, _layout(value)) for name, value in bound]
        for name in self._passed:
            given, value = self._given.get(name), self._inputs[name]
            if given is not None and given.shape != value.shape:
                raise ValueError(
                    f"ort.Graph: expected {name} of shape {list(value.shape)}, as the input that it is, got "
                    f"{list(given.shape)}; give memory of that shape"
                )
        # Where they are now, for all bindings: by the time that one is made, tensors may be elsewhere.
        self._read = [(name, *_place(value, graph)) for name, value in self._inputs.items()]
        self._write = {name: _place(value, graph) for name, value in self._given.items()}
        # ONNX Runtime copies these to the GPU, or from it, when they are bound: for each run again, but for the one of
        # `copied`. A captured graph would read the first copies anyway.
        across = [place for place in self._read if graph._crosses(place)]
        # ONNX Runtime copies pinned inputs, and outputs to the CPU, while the run goes on.
        self._awaited = graph.stream is not None and (
            any(value.device.type == "cpu" for value in self._given.values())
            or any(value.device.type == "cpu" and value.is_pinned() for value in self._inputs.values())
        )
        self._across = [] if copied or graph._fixed else across
        self._idle = [self._another()]

    __reduce__ = Graph.__reduce__

    def _check_given(self) -> None:
        for name, value in self._given.items():
            if value.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"ort.Graph: expected memory for {name} without a gradient, got a tensor that requires one, and "
                    "none is recorded; detach() it"
                )

    def _another(self) -> tuple[Any, ...]:
        """A binding, which holds the outputs of one run, and the events around that run."""
        graph = self.graph
        binding = graph.session.io_binding()
        with graph._there():
            if graph.stream is not None and any(map(graph._crosses, self._read)):
                # ONNX Runtime copies on its stream, perhaps to the memory of a dropped result that is still read.
                graph.stream.wait_stream(torch.cuda.current_stream(graph.device))
            for place in self._read:
                binding.bind_input(*place)
        for name in self._computed:
            if name in self._write:
                binding.bind_output(name, *self._write[name])
            else:
                self._allocate(binding, name)
        # Made once: to make an event takes as long as to record one.
        events = (torch.cuda.Event(), torch.cuda.Event()) if graph.stream is not None else ()
        return binding, *events

    def _allocate(self, binding: Any, name: str) -> None:
        binding.bind_output(name, self.graph.device.type, self.graph.device.index or 0)

    @untransformed
    def __call__(self) -> dict[str, Tensor]:
        """Run on what the bound tensors hold now.

        Every output. What ONNX Runtime allocated belongs to this run, or, in a captured CUDA graph, to all runs.
        """
        _check_tracing(self.graph)
        self._check_given()
        for name, value, layout in self._places:
            if _layout(value) != layout:
                raise RuntimeError(
                    f"ort.Graph: expected {name} to stay where it was bound, and as it was, got another address, "
                    "dtype, shape or strides; bind it again"
                )
        # A run that meets another, of a thread or of a launcher, has a binding of its own. None waits for the other,
        # which may wait for this one, or be of the process that this one was forked from.
        fixed = self.graph._fixed
        # Claimed before the run, since another thread may start one during it.
        if fixed and self.graph._captured.setdefault("tensors", (self._inputs, self._given))[0] is not self._inputs:
            raise ValueError(
                "ort.Graph: expected the bound graph that ran first, since a captured CUDA graph uses its tensors, got "
                "another; call that one, or make another Graph"
            )
        try:
            binding = self._idle[0] if fixed else self._idle.pop()
        except IndexError:
            binding = self._another()
        try:  # versions are raised here, since torch.compile loses them in a function that it can compile
            if self._written:  # a run that fails, or is interrupted, may have written too
                torch.autograd.graph.increment_version(self._written)
            with self.graph._there():
                return self._run(*binding)
        except Exception:
            if "ran" not in self.graph._captured:
                self.graph._captured.clear()
            raise
        finally:
            if not fixed:
                self._idle.append(binding)
            if self._written:  # for what was saved during the run
                torch.autograd.graph.increment_version(self._written)

    def _run(self, binding: Any, *events: torch.cuda.Event) -> dict[str, Tensor]:
        graph = self.graph
        # Copied before the run, which may write over them where memory of an input is given for an output.
        passed = {name: self._inputs[name].detach().to(graph.device, copy=True) for name in self._passed}
        if not graph._fixed:
            for name in self._fresh:  # else it would write over those of the last run, if only they have its shapes
                self._allocate(binding, name)
        if not self._computed:
            pass  # ONNX Runtime runs nothing for no outputs
        elif graph.stream is None:
            graph.session.run_with_iobinding(binding, graph._run)
        else:
            current = torch.cuda.current_stream(graph.device.index)
            before, after = events
            # ONNX Runtime runs a graph several times before it has captured it.
            saved = [(value, value.clone()) for value in self._over if not hasattr(graph._replays, "ran")]
            before.record(current)
            graph.stream.wait_event(before)
            for place in self._across:  # behind this wait, as in `_another`
                binding.bind_input(*place)
            try:
                graph.session.run_with_iobinding(binding, graph._run)
                graph._captured["ran"] = graph._replays.ran = True
            except BaseException:  # of a signal's handler, as Ctrl-C: the stream of a launcher may still be current
                torch.cuda.set_stream(current)
                raise
            finally:  # if a node fails, the nodes before it are still queued
                after.record(graph.stream)
                current.wait_event(after)
                if self._awaited:
                    after.synchronize()
                for value, old in saved:
                    with torch.inference_mode():
                        value.copy_(old)
            if saved:
                return self._run(binding, *events)
        found = dict(self._given)
        if self._fresh:
            values = zip(self._computed, binding.get_outputs(), strict=True)
            found |= {name: _over_its_memory(value) for name, value in values if name not in self._given}
        for name, value in passed.items():
            found[name] = found[name].detach().copy_(value) if name in found else value
        return {name: self._given.get(name, found[name]) for name in graph.outputs}


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "ort.Graph: needs ONNX Runtime, which is not installed; install onnxruntime-gpu, or onnxruntime without "
            "a GPU"
        ) from error
    return onnxruntime


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Say in a sentence what onnx_ir fails with, whose own errors name the outermost part of a model."""
    try:
        yield
    except Exception as error:
        inner: BaseException = error
        passed: set[int] = set()
        while inner.__cause__ is not None and id(inner) not in passed:  # `raise error from error` makes a ring
            passed.add(id(inner))
            inner = inner.__cause__
        line = (str(inner).splitlines() or [type(inner).__name__])[0][:200].rstrip(".")
        raise ValueError(
            f"{what}: expected a model that onnx_ir can take, got one with which it fails: {line}; see what "
            "onnx.checker.check_model says"
        ) from error


def _readable(model: Any) -> Any:
    """A model as ONNX Runtime takes it: a path, or bytes."""
    if isinstance(model, bytes):
        return model
    if isinstance(model, (str, os.PathLike)):
        path = os.fsdecode(model)
        if not os.path.isfile(path) or path.encode(errors="replace").decode() != path:
            raise FileNotFoundError(
                f"ort.Graph: expected the path of a file, whose name is UTF-8, got {path!r}; correct it, or pass "
                "the file's bytes"
            )
        return path
    model = model.model if hasattr(type(model), "model_proto") else model  # a torch.onnx.ONNXProgram
    if type(model).__module__.partition(".")[0] == "onnx_ir" and type(model).__name__ == "Model":
        import onnx_ir

        with understood("ort.Graph"):
            proto = onnx_ir.to_proto(model)
        # Given bytes, ONNX Runtime looks for external weights in the working directory, where other files may have
        # these names.
        try:
            functions = zip(model.functions.values(), proto.functions, strict=True)
            if any(True for function, made in functions for _ in _outside(function, made)):
                raise ValueError("some of functions in files, whose folder onnx_ir does not know")
            for tensor, made in _outside(model.graph, proto.graph):
                if tensor.raw is None and tensor.valid():
                    if not os.path.isfile(tensor.path):  # to open a pipe waits
                        raise ValueError(f"some in {tensor.path}, which is no file")
                    if type(tensor) is onnx_ir.ExternalTensor:  # a copy, else the caller's model keeps the file open
                        tensor = onnx_ir.ExternalTensor(
                            tensor.location, tensor.offset, tensor.length, tensor.dtype,
                            shape=tensor.shape, name=tensor.name, base_dir=tensor.base_dir,
                        )  # fmt: skip
                if isinstance(tensor, onnx_ir.ExternalTensor) and type(tensor) is not onnx_ir.ExternalTensor:
                    tensor = onnx_ir.Tensor(tensor.numpy(), dtype=tensor.dtype)  # its numbers may be no file's
                made.raw_data = tensor.tobytes() if tensor.size else b""  # onnx_ir reads no empty one
                made.ClearField("external_data")
                made.ClearField("data_location")
        except Exception as error:  # of onnx_ir
            raise ValueError(_WEIGHTS.format(error)) from error
        model = proto
    if type(model).__name__ != "ModelProto":
        raise TypeError(
            f"ort.Graph: expected a model (onnx.ModelProto, onnx_ir.Model, torch.onnx.ONNXProgram, bytes or a path), "
            f"got {type(model).__name__}; load or export it first"
        )
    try:
        return model.SerializeToString()
    except Exception as error:  # protobuf's own, for more than 2 GiB
        raise ValueError(
            f"ort.Graph: expected a model of less than 2 GiB, got one that cannot be serialised ({error}); save its "
            "weights as external data and pass the path"
        ) from error


def _outside(part: Any, proto: Any) -> Iterator[tuple[Any, Any]]:
    """Each external tensor of a graph or function of onnx_ir, with its TensorProto."""
    import onnx_ir

    weights = getattr(part, "initializers", {})
    pairs = [
        (weights[made.name].const_value, made) for made in getattr(proto, "initializer", ()) if made.name in weights
    ]
    owners = [(node.attributes, of.attribute) for node, of in zip(part, proto.node, strict=True)]
    if hasattr(proto, "attribute_proto"):  # a function's attributes have defaults
        owners.append((part.attributes, proto.attribute_proto))
    for attributes, protos in owners:
        for made in protos:
            value = getattr(attributes[made.name], "value", None)
            values = value if isinstance(value, (list, tuple)) else [value]
            pairs += zip(
                values, [*made.tensors, *made.graphs] or [made.t if made.HasField("t") else made.g], strict=False
            )
    for value, made in pairs:
        if isinstance(value, onnx_ir.Graph):
            yield from _outside(value, made)
        elif getattr(made, "data_location", 0):
            yield value, made


def _tensors(what: str, nodes: Sequence[Any]) -> dict[str, str]:
    """Types by names; TypeError for those that no tensor of torch has."""
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        raise ValueError(f"ort.Graph: expected {what} of different names, got {', '.join(names)}; rename them")
    for node in nodes:
        if node.type not in _NAMES.values():
            raise TypeError(
                f"ort.Graph: expected {what} to be tensors whose dtype torch has, got {node.name}, {node.type}; cut it "
                "off with onnx.utils.extract_model, or run onnxruntime.InferenceSession"
            )
    return {node.name: node.type for node in nodes}


def _named(what: str, given: Any, known: Mapping[str, str], needed: Iterable[str]) -> dict[str, Any]:
    """Tensors by names; refuse what maps no names, names that are not known, and those that lack."""
    if not isinstance(given, Mapping):
        raise TypeError(f"ort.Graph: expected {what} to map names to tensors, got {type(given).__name__}; pass a dict")
    given = dict(given)  # another mapping may also have names that it does not list
    unknown = [str(name) for name in given if name not in known]
    lacking = [name for name in needed if name not in given]
    if unknown or lacking:
        wrong = f"unknown {', '.join(unknown)}" if unknown else f"no {', '.join(lacking)}"
        accepted = ", ".join(known) or "no name"
        raise ValueError(f"ort.Graph: expected {what} of {accepted}, got {wrong}; name them as the graph does")
    return given


def _check_tracing(graph: Graph) -> None:
    """Refuse a call that is traced, whose outputs would be constants, and a call under FakeTensorMode.

    A call that torch captures is refused too: ONNX Runtime would reuse the memory that the replays write to.
    """
    if graph.stream is not None and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "ort.Graph: expected a call that is made, got one while a CUDA graph is captured; make the graph with "
            'options={"enable_cuda_graph": "1"}, and call it outside'
        )
    modes = _get_current_dispatch_mode_stack() if _modes() else []
    proxies = any(type(mode).__name__ == "ProxyTorchDispatchMode" for mode in modes)
    if _tracing() or _ahead() or proxies or any(hasattr(mode, "allow_non_fake_inputs") for mode in modes):
        raise NotImplementedError(
            "ort.Graph: expected a call that is made, got one under torch.export, torch.jit.trace, "
            "make_fx or FakeTensorMode; call it outside of them"
        )


def _own(name: str, value: Any, graph: Graph, type_: str, copied: bool = False) -> Tensor:
    """A tensor whose memory can be bound; a copy where it cannot and `copied` is set."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"ort.Graph: expected {name} to be a torch.Tensor, got {type(value).__name__}; use torch.as_tensor"
        )
    if type(value) not in (Tensor, Parameter) and _stored(value):
        value = plain(value)
    if _NAMES.get(value.dtype) != type_:
        raise TypeError(f"ort.Graph: expected {name} to be {type_}, got {value.dtype}; cast it first")
    if value.device.type != "cpu" and value.device != graph.device:
        raise ValueError(
            f"ort.Graph: expected {name} on {graph.device} or the CPU, got {value.device}; move it, or make the graph "
            "there"
        )
    dense = value
    if copied and _stored(value) and (value.is_neg() or not value.is_contiguous()):
        dense = value.resolve_neg().contiguous()
    if not _stored(dense):
        raise TypeError(
            f"ort.Graph: expected {name} to have memory of its own, got a {type(dense).__name__} without; pass the "
            "plain, dense tensor that it is made of (to_local() of a DTensor)"
        )
    if not dense.is_contiguous() or dense.is_neg():
        raise ValueError(
            f"ort.Graph: expected {name} to be contiguous, since its memory is bound; call resolve_neg().contiguous() "
            "first"
        )
    return dense


def _apart(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    """Refuse outputs that share memory, and those over a part of an input."""

    def spans(tensors: Mapping[str, Tensor]) -> list[tuple[int, int, str]]:
        # Dynamo has no nbytes of symbolic sizes.
        sized = [(t.data_ptr(), t.numel() * t.element_size(), name) for name, t in tensors.items()]
        return [(start, start + size, name) for start, size, name in sized if size]

    written = spans(outputs)
    read = spans(inputs)
    for i, (start, end, name) in enumerate(written):
        shared = [other for begin, last, other in written[:i] if begin < end and start < last]
        shared += [o for begin, last, o in read if begin < end and start < last and (begin, last) != (start, end)]
        if shared:
            raise ValueError(
                f"ort.Graph: expected memory for {name} that holds nothing else, got some of {shared[0]}'s; give "
                "memory of its own, or all of an input's"
            )


def _layout(value: Tensor) -> tuple[Any, ...]:
    """What a program may change of a tensor, and a binding does not notice."""
    value = plain(value)
    memory = value.untyped_storage().nbytes()  # less of it may be at the same address
    return value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_neg(), memory


def _place(value: Tensor, graph: Graph) -> tuple[str, int, int, Sequence[int], int]:
    """Device, element type, shape and address of a tensor, as ONNX Runtime takes them."""
    memory = value if value.numel() else graph._nothing
    return memory.device.type, memory.device.index or 0, _NUMBERS[value.dtype], tuple(value.shape), memory.data_ptr()


def _over_its_memory(value: Any) -> Tensor:
    """What ONNX Runtime allocated, as a tensor over the same memory."""
    try:
        tensor = torch.from_dlpack(value)
    except RuntimeError as error:
        if "float8" not in value.data_type():
            raise
        raise NotImplementedError(
            f"ort.Graph: expected memory for an output of float8, which ONNX Runtime before 1.32 does not hand on, got "
            f"none for one of {value.data_type()}; give it, or install a newer one"
        ) from error
    if not tensor.numel():  # ONNX Runtime gives it strides of 0
        tensor = tensor.new_empty(tensor.shape)
    return tensor.bool() if value.data_type() == "tensor(bool)" else tensor
