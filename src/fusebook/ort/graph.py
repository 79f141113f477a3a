"""An ONNX graph as a function of torch tensors: session, IO binding on torch's memory, torch's streams.

Only ONNX Runtime's public API is used. On a CUDA device nothing is copied and nothing waits for the GPU: inputs and
outputs are bound to the memory of torch tensors, and the graph runs on a side stream of torch's that waits for the
current stream and is waited for by it. On the CPU a session has one thread, because ONNX Runtime's ScatterND loses
updates with more where indices repeat.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusebook.ort.custom import _ELEMENTS, CustomOp, register

__all__ = ["Bound", "Graph"]

_NAMES = {
    torch.float32: "tensor(float)",
    torch.uint8: "tensor(uint8)",
    torch.int8: "tensor(int8)",
    torch.int16: "tensor(int16)",
    torch.int32: "tensor(int32)",
    torch.int64: "tensor(int64)",
    torch.bool: "tensor(bool)",
    torch.float16: "tensor(float16)",
    torch.float64: "tensor(double)",
    torch.bfloat16: "tensor(bfloat16)",
}


class Graph:
    """An ONNX model, ready to be called.

    Parameters
    ----------
    model : onnx.ModelProto, bytes or path
    device : str or torch.device, optional
        CUDA where there is a GPU, else the CPU.
    tf32 : bool, default False
        On CUDA, multiply float32 in TF32. It is ONNX Runtime's default and not torch's, so it is asked for here.
    threads : int, default 1
        Of an operator on the CPU.
    library : path, optional
        A library of custom operators to register.
    ops : sequence of CustomOp
        Operators whose kernels are Python functions, see `custom_op`.
    options : mapping of str to str, optional
        Further options of the CUDA provider, e.g. ``{"enable_cuda_graph": "1"}``.

    Raises
    ------
    ModuleNotFoundError
        Where ONNX Runtime is not installed.
    RuntimeError
        Where the ONNX Runtime that is installed cannot use the device.

    Examples
    --------
    >>> graph = Graph("softmax.onnx")  # doctest: +SKIP
    >>> graph({"x": torch.randn(3, 5, device="cuda")})["y"]  # doctest: +SKIP
    """

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
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"ort.Graph: expected device to be cpu or cuda, got {self.device}; choose one of them")
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 4  # errors are raised, and need not be printed as well
        if library is not None:
            settings.register_custom_ops_library(os.fspath(library))
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
        # The default, said aloud: ONNX Runtime 1.31 looks for it in every run, and finds out that it is missing by an
        # exception thrown in C++, which takes longer than all the rest of a small run.
        self._run.add_run_config_entry("gpu_graph_id", "0")
        if not isinstance(model, (str, bytes, os.PathLike)):
            model = model.SerializeToString()
        elif isinstance(model, os.PathLike):
            model = os.fspath(model)
        self.session = ort.InferenceSession(model, settings, providers=providers)
        if self.stream is not None and "CUDAExecutionProvider" not in self.session.get_providers():
            raise RuntimeError(
                "ort.Graph: ONNX Runtime could not load its CUDA provider and fell back to the CPU; check that its "
                "CUDA version is torch's, and import torch first"
            )
        # An empty tensor has no address, and ONNX Runtime takes no null pointer: this one is never read.
        self._nothing = torch.empty(16, dtype=torch.uint8, device=self.device)
        self.inputs = {node.name: node.type for node in self.session.get_inputs()}
        self.outputs = {node.name: node.type for node in self.session.get_outputs()}

    def bind(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor] | None = None) -> Bound:
        """Bind tensors once, to run on them many times.

        Parameters
        ----------
        inputs : mapping of str to torch.Tensor
            Every input of the graph, on its device or on the CPU. Contiguous. What they hold may change between runs.
        outputs : mapping of str to torch.Tensor, optional
            Memory for outputs, of the right shape and dtype. Those not given are allocated by ONNX Runtime.

        Returns
        -------
        Bound
            A function without arguments.

        Raises
        ------
        ValueError, TypeError
            For a missing or unknown name, a wrong dtype, or a tensor that is not contiguous.
        """
        return Bound(self, dict(inputs), dict(outputs or {}))

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Run once.

        Parameters
        ----------
        inputs, outputs
            As for `bind`; inputs that are not contiguous are copied.

        Returns
        -------
        dict of str to torch.Tensor
            Every output of the graph, on its device.
        """
        return self.bind({name: _dense(value) for name, value in inputs.items()}, outputs)()


class Bound:
    """A graph with its tensors; made by `Graph.bind`. Calling it runs the graph and returns its outputs by name."""

    def __init__(self, graph: Graph, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        self.graph = graph
        self._binding = graph.session.io_binding()
        self._kept = inputs  # their memory is bound by address
        self._given = outputs
        if graph.stream is not None:
            # Made once: to make an event takes as long as to record one.
            self._before, self._after = torch.cuda.Event(), torch.cuda.Event()
        _named("inputs", inputs, graph.inputs, all_of=True)
        _named("outputs", outputs, graph.outputs, all_of=False)
        for name, value in inputs.items():
            self._binding.bind_input(name, *_place(name, value, graph, graph.inputs[name]))
        for name in graph.outputs:
            if name in outputs:
                kind, index, element, shape, address = _place(name, outputs[name], graph, graph.outputs[name])
                self._binding.bind_output(name, kind, index, element, shape, address)
            else:
                self._binding.bind_output(name, graph.device.type, graph.device.index or 0)

    def __call__(self) -> dict[str, Tensor]:
        """Run on what the bound tensors hold now.

        Every output. What ONNX Runtime allocated is valid until the next run.
        """
        graph = self.graph
        if graph.stream is None:
            graph.session.run_with_iobinding(self._binding, graph._run)
        else:
            current = torch.cuda.current_stream(graph.device.index)
            self._before.record(current)
            graph.stream.wait_event(self._before)
            graph.session.run_with_iobinding(self._binding, graph._run)
            self._after.record(graph.stream)
            current.wait_event(self._after)
        if len(self._given) == len(graph.outputs):
            return dict(self._given)
        values = zip(graph.outputs, self._binding.get_outputs(), strict=True)
        return {name: self._given[name] if name in self._given else _over_its_memory(value) for name, value in values}


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "ort.Graph: needs ONNX Runtime, which is not installed; install onnxruntime-gpu, or onnxruntime without "
            "a GPU"
        ) from error
    return onnxruntime


def _dense(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _named(what: str, given: Mapping[str, Any], known: Mapping[str, str], *, all_of: bool) -> None:
    unknown = [name for name in given if name not in known]
    lacking = [name for name in known if name not in given] if all_of else []
    if unknown or lacking:
        wrong = f"unknown {', '.join(unknown)}" if unknown else f"no {', '.join(lacking)}"
        raise ValueError(f"ort.Graph: expected {what} of {', '.join(known)}, got {wrong}; name them as the graph does")


def _place(name: str, value: Any, graph: Graph, type_: str) -> tuple[str, int, int, Sequence[int], int]:
    """Device, element type, shape and address of a tensor, as ONNX Runtime wants to be told."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"ort.Graph: expected {name} to be a torch.Tensor, got {type(value).__name__}; use torch.as_tensor"
        )
    if _NAMES.get(value.dtype) != type_:
        raise TypeError(f"ort.Graph: expected {name} to be {type_}, got {value.dtype}; cast it first")
    if not value.is_contiguous():
        raise ValueError(
            f"ort.Graph: expected {name} to be contiguous, since its memory is bound; call contiguous() first"
        )
    if value.device.type != "cpu" and value.device != graph.device:
        raise ValueError(
            f"ort.Graph: expected {name} on {graph.device} or the CPU, got {value.device}; move it, or make the graph "
            "there"
        )
    memory = value if value.numel() else graph._nothing
    return memory.device.type, memory.device.index or 0, _ELEMENTS[value.dtype], tuple(value.shape), memory.data_ptr()


def _over_its_memory(value: Any) -> Tensor:
    """What ONNX Runtime allocated, as a tensor over the same memory."""
    tensor = torch.from_dlpack(value)
    return tensor.bool() if value.data_type() == "tensor(bool)" else tensor
