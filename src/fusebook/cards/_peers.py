"""What several cards share: the usual baselines, sizes, products in TF32, weights, graphs of ONNX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusebook.kernels.products import layout_of, torch_in_tf32
from fusebook.measure.op import Op, Variant

__all__ = [
    *("ORT", "card", "compiled", "compiling", "foreign", "in_tf32", "liger_takes", "matrices", "needs_float32"),
    *("onnx_graph", "onnx_run", "onnx_session", "pack", "quack_takes", "side_by_side", "weight"),
]


def card(
    name: str,
    eager: Callable[..., Any],
    fusebook: Callable[..., Any],
    *,
    torch: Variant | None = None,
    others: Mapping[str, Variant] | None = None,
    compile: Callable[..., Any] | None = None,
    cost_eager: Callable[..., Any] | None = None,
    prepare: Callable[..., Any] | None = None,
    needs: tuple[str, ...] = ("cuda",),
    **more: Any,
) -> Op:
    """The card of an operator with the usual baselines.

    Parameters
    ----------
    name : str
        The name of the operator.
    eager, fusebook : callable
        The chain of torch's operators, and the kernel.
    torch : Variant, optional
        The operator of torch that does the same.
    others : mapping of str to Variant, optional
        Further baselines; quack, Liger and their like.
    compile : callable, optional
        What torch.compile compiles, if not `eager`, where there is what `needs` names.
    cost_eager : callable, optional
        What `eager` moves.
    prepare : callable, optional
        What comes before each of them, untimed.
    needs : tuple of str
        What a machine must have to run torch.compile.
    **more
        The other fields of the card.
    """
    variants = {
        "eager": Variant(eager, cost=cost_eager, needs=(), prepare=prepare),
        **({"torch": torch} if torch else {}),
        "torch.compile": compiling(compile or eager, needs=needs, prepare=prepare),
        "fusebook": Variant(fusebook, needs=(), prepare=prepare),
        **(others or {}),
    }
    return Op(name=name, variants=variants, **more)


def compiling(
    function: Callable[..., Any], mode: str | None = None, needs: tuple[str, ...] = (), **options: Any
) -> Variant:
    """A function by torch.compile."""
    return Variant(lambda *given: compiled(function, mode)(*given), needs=needs, recompiles=True, **options)


def foreign(package: str, function: Callable[..., Any], **options: Any) -> Variant:
    """A kernel of another package, which is compiled for every shape."""
    return Variant(function, needs=("cuda", package), recompiles=True, **options)


def matrices(*sizes: tuple[int, int]) -> tuple[dict[str, int], ...]:
    """Points of a sweep over matrices of so many rows and columns."""
    return tuple({"M": M, "N": N} for M, N in sizes)


def weight(rng: torch.Generator, K: int, N: int, dtype: torch.dtype, scale: float, columns: bool) -> Tensor:
    shape = (N, K) if columns else (K, N)
    w = torch.randn(shape, generator=rng, dtype=dtype, device=rng.device) * scale
    return w.T if columns else w


def side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """One weight of several, in the layout that they have."""
    if all(layout_of(w) == "column" for w in weights):
        return torch.cat([w.T for w in weights]).T
    return torch.cat(list(weights), 1)


def pack(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    return x, side_by_side(weights)


def in_tf32(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same with float32 in TF32, as torch multiplies where its setting allows it."""

    @functools.wraps(function)
    def run(x: Tensor, *rest: Any) -> Any:
        needs_float32(x)
        with torch_in_tf32(True):
            return function(x, *rest)

    return run


def needs_float32(x: Tensor) -> None:
    if x.dtype in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"TF32 is a way to multiply float32, got {str(x.dtype)[6:]}")


def liger_takes(x: Tensor) -> None:
    """Refuse rows that Liger's kernels of rows do not take."""
    if x.shape[-1] > 65536:
        raise NotImplementedError(f"Liger takes rows of at most 65536 columns, got {x.shape[-1]}")
    if x.numel() == 0:
        raise NotImplementedError("Liger launches an empty grid on an empty tensor")


def quack_takes(x: Tensor) -> None:
    """Refuse rows that quack's kernels of rows do not take."""
    if x.dtype == torch.float64:
        raise NotImplementedError("quack takes float16, bfloat16 and float32, got float64")
    if x.shape[-1] * x.element_size() % 16:
        raise NotImplementedError(f"quack takes rows of whole 16-byte vectors, got {x.shape[-1]} columns of {x.dtype}")


@functools.cache
def compiled(function: Any, mode: str | None = None) -> Any:
    # For one shape at a time: what a reader gets from the decorator, at its best.
    return torch.compile(function, dynamic=False, mode=mode)


def onnx_graph(dtype: torch.dtype, nodes: Sequence[Any], names: Sequence[str]) -> Any:
    """A graph of matrices: inputs by name, and the output y."""
    from onnx import TensorProto, helper

    kinds = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}
    shaped = [helper.make_tensor_value_info(name, kinds[dtype], [None, None]) for name in (*names, "y")]
    graph = helper.make_graph(nodes, "gemm", shaped[:-1], shaped[-1:])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


def onnx_session(model: Any, device: torch.device, tf32: bool = False) -> Any:
    """A session of a graph, kept: to make one takes longer than to run it."""
    return _session(model.SerializeToString(), device, tf32)


@functools.lru_cache(maxsize=4)  # as many as there are at one point, since each holds memory
def _session(model: bytes, device: torch.device, tf32: bool) -> Any:
    from fusebook.ort import Graph

    return Graph(model, device=device, tf32=tf32)


def onnx_run(bound: Any) -> Tensor:
    return bound()["y"]


ORT = ("cuda", "onnxruntime", "onnx")
