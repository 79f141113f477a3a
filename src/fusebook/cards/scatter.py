"""ScatterND into zeros, masked or not, and the gradient of an embedding: their meaning, costs and rivals."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import torch
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import compiling, onnx_session
from fusebook.kernels.scatter import (
    embedding_backward,
    masked_scatter_nd_eager,
    masked_scatter_nd_of_shape,
    scatter_nd_of_shape,
)
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["EMBEDDING_BACKWARD", "MASKED_SCATTER_ND", "PAGE", "SCATTER_ND_OF_SHAPE"]

#: The page that tells of them.
PAGE = 103


def _draw(rng: torch.Generator, R: int, n: int, law: str) -> Tensor:
    """Rows to scatter to, by the law that the card names."""
    device = rng.device
    if law == "uniform":
        return torch.randint(R, (n,), generator=rng, device=device)
    if law == "equal":
        return torch.full((n,), R // 2, device=device)
    if law == "zipf":  # the r-th most frequent row, r**-1.1 times as often as the first; a token's law, roughly
        weights = torch.arange(1, R + 1, device=device, dtype=torch.float64) ** -1.1
        drawn = torch.multinomial(weights, n, replacement=True, generator=rng) if n else torch.zeros(0, device=device)
        return torch.randperm(R, generator=rng, device=device)[drawn.long()]
    if law == "masked":
        return torch.full((n,), -1, device=device)
    raise ValueError(f"scatter_nd: law {law!r} is none of uniform, equal, zipf, masked")


def _drawn_updates(rng: torch.Generator, n: int, D: int, dtype: torch.dtype) -> Tensor:
    # A 64th: a power of two changes no digit, and sums of thousands of rows stay within float16.
    return rough(rng, (n, D), dtype) / 64


def _make_masked(rng: torch.Generator, dtype: torch.dtype, *, R: int, D: int, n: int, law: str) -> tuple[Any, ...]:
    indices = _draw(rng, R, n, law)
    if law == "uniform":  # from -1 to R - 1, each as likely as the others
        indices = torch.where(torch.rand(n, generator=rng, device=rng.device) < 1 / (R + 1), -1, indices)
    return (R, D), indices[:, None], _drawn_updates(rng, n, D, dtype)


def _reference_masked(shape: tuple[int, int], indices: Tensor, updates: Tensor) -> Tensor:
    live = indices[:, 0] != -1
    kept = torch.where(live[:, None], updates, 0)
    return updates.new_zeros(shape).index_add_(0, torch.where(live, indices[:, 0], 0), kept)


def _cost(itemsize: int, *, R: int, D: int, n: int, law: str, **_: Any) -> Cost:
    # What is masked need not be read; indices of 8 bytes. An addition for each element of an update.
    live = 0 if law == "masked" else n
    return Cost(read=live * D * itemsize + 8 * n, write=R * D * itemsize, flop=live * D)


def _cost_eager(itemsize: int, *, R: int, D: int, n: int, law: str) -> Cost:
    return Cost(read=3 * n * D * itemsize + 24 * n, write=(R * D + 2 * n * D) * itemsize + 9 * n, flop=n * D)


def _cost_atomic(itemsize: int, *, R: int, D: int, n: int, law: str, **_: Any) -> Cost:
    # Zeros, then each update read and its row read and written again; half types go through float32 sums.
    live, wide = (0 if law == "masked" else n), max(itemsize, 4)
    again = (R * D * wide, R * D * itemsize) if wide != itemsize else (0, 0)
    return Cost(
        read=live * D * (itemsize + wide) + 8 * n + again[0], write=(R * D + live * D) * wide + again[1], flop=live * D
    )


def _fusebook(strategy: str | None = None, check: bool = False) -> Any:
    return functools.partial(masked_scatter_nd_of_shape, check=check, strategy=strategy)


def _fusebook_of_shape(strategy: str | None = None) -> Any:
    return functools.partial(scatter_nd_of_shape, check=False, strategy=strategy)


def _make_of_shape(
    rng: torch.Generator, dtype: torch.dtype, *, R: int, D: int, n: int, K: int, law: str
) -> tuple[Any, ...]:
    # R rows as K axes; where that leaves a remainder, the first axis is the smaller one.
    shape = (R,) if K == 1 else (R // 4, 4) if K == 2 else (R // 8, 4, 2)
    row = _draw(rng, math.prod(shape), n, law)
    components: list[Tensor] = []
    for size in reversed(shape):
        components.insert(0, row % size)
        row = row // size
    indices = torch.stack(components, -1)
    # Every other component is counted from the end: the same place by its other name.
    flip = torch.rand(indices.shape, generator=rng, device=rng.device) < 0.5
    indices = torch.where(flip, indices - torch.tensor(shape, device=rng.device), indices)
    return (*shape, D), indices, _drawn_updates(rng, n, D, dtype)


def _reference_of_shape(shape: tuple[int, ...], indices: Tensor, updates: Tensor) -> Tensor:
    out = updates.new_zeros(shape)
    return out.index_put_(tuple(indices.unbind(-1)), updates, accumulate=True)


def _make_embedding(rng: torch.Generator, dtype: torch.dtype, *, R: int, D: int, n: int, law: str) -> tuple[Any, ...]:
    return _drawn_updates(rng, n, D, dtype), _draw(rng, R, n, law), R


def _reference_embedding(dy: Tensor, indices: Tensor, rows: int) -> Tensor:
    return dy.new_zeros(rows, dy.shape[1]).index_add_(0, indices, dy)


def _torch_embedding(dy: Tensor, indices: Tensor, rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(dy, indices, rows, -1, False)


def _fusebook_embedding(strategy: str | None = None) -> Any:
    return functools.partial(embedding_backward, check=False, strategy=strategy)


def _onnx_model(dtype: torch.dtype) -> Any:
    """ONNX's standard chain: zeros, Equal, Where, ScatterND."""
    from onnx import TensorProto, helper, numpy_helper

    kinds = {
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.bfloat16: TensorProto.BFLOAT16,
        torch.float64: TensorProto.DOUBLE,
    }
    kind = kinds[dtype]
    zero = helper.make_tensor("zero", kind, [1], [0.0])
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["data"], value=zero),
        helper.make_node("Equal", ["indices", "masked"], ["eq"]),
        helper.make_node("Where", ["eq", "nothing", "updates"], ["kept"]),
        helper.make_node("ScatterND", ["data", "indices", "kept"], ["out"], reduction="add"),
    ]
    constants = [
        numpy_helper.from_array(torch.tensor([-1]).numpy(), "masked"),
        helper.make_tensor("nothing", kind, [1], [0.0]),
    ]
    inputs = [
        helper.make_tensor_value_info("shape", TensorProto.INT64, ["axes"]),
        helper.make_tensor_value_info("indices", TensorProto.INT64, ["n", 1]),
        helper.make_tensor_value_info("updates", kind, ["n", "D"]),
    ]
    outputs = [helper.make_tensor_value_info("out", kind, ["R", "D"])]
    graph = helper.make_graph(nodes, "masked_scatter_nd", inputs, outputs, constants)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


def _onnx_session(shape: tuple[int, int], indices: Tensor, updates: Tensor) -> tuple[Any]:
    if updates.dtype == torch.bfloat16:
        raise NotImplementedError("ONNX Runtime's ScatterND does not add bfloat16")
    unable = {"cpu": torch.float16, "cuda": torch.float64}.get(updates.device.type)
    if updates.dtype == unable:
        raise NotImplementedError(f"ONNX Runtime's ScatterND does not add {str(unable)[6:]} on {updates.device.type}")
    if 0 in shape:
        raise NotImplementedError(f"an output without elements has no memory to bind, got shape {shape}")
    graph = onnx_session(_onnx_model(updates.dtype), updates.device)
    out = torch.empty(shape, dtype=updates.dtype, device=updates.device)
    return (graph.bind({"shape": torch.tensor(shape), "indices": indices, "updates": updates}, {"out": out}),)


def _onnx_run(bound: Any) -> Tensor:
    return bound()["out"]


def _point(R: int, D: int, n: int, law: str = "uniform") -> dict[str, int | str]:
    return {"R": R, "D": D, "n": n, "law": law}


def _draw_masked(rng: random.Random, laws: tuple[str, ...] = ("uniform", "zipf", "equal", "masked")) -> Dims:
    """Tables as long as a vocabulary or of any length, rows of one number or as wide as a token; few updates and many.

    Where they go is uniform or by Zipf's law, each two times of five; rarely all meet in one row, or all are masked. In
    float16 they are at most 65536, whose sum it can hold.
    """
    dtype = _draws.dtype(rng)
    itemsize = _draws.itemsize(dtype)
    D = _draws.size(rng, 1, 8192)
    R = min(_draws.size(rng, 8, 2**21, _draws.VOCABULARIES), _draws.BYTES // 2 // (D * itemsize))
    n = _draws.count(rng, min(2**20 if itemsize > 2 else 2**16, _draws.BYTES // 2 // (D * itemsize + 8)))
    law = rng.choices(laws, [4, 4, 1, 1][: len(laws)])[0]
    layout = _draws.layout(rng, _draws.ROWS)
    return {"R": R, "D": D, "n": n, "law": law, "dtype": dtype, "layout": layout}


def _draw_of_shape(rng: random.Random) -> Dims:
    """As of the masked one; indices of one to three components."""
    dims = _draw_masked(rng, ("uniform", "zipf", "equal"))
    K = rng.choice([1, 2, 3])
    return {name: dims[name] for name in ("R", "D", "n")} | {"K": K} | {n: dims[n] for n in ("law", "dtype", "layout")}


def _draw_embedding(rng: random.Random) -> Dims:
    """As of the masked one; no lookup is masked."""
    return _draw_masked(rng, ("uniform", "zipf", "equal"))


_CONFIGS: dict[str, tuple[dict[str, int | str], ...]] = {
    # size rows of twice as many columns, and twice as many updates.
    "small": tuple(_point(s, 2 * s, 2 * s) for s in (256, 512, 1024)),
    "medium": tuple(_point(s, 2 * s, 2 * s) for s in (512, 1024, 2048)),
    "large": tuple(_point(s, 2 * s, 2 * s) for s in (1024, 2048, 4096, 6144, 8192)),
    # The gradient of an embedding of 32000 tokens, of 2 x 1024 of them; of larger batches; of a larger vocabulary.
    "llama": (_point(32000, 4096, 2048), _point(32000, 4096, 32000), _point(128256, 4096, 16384)),
    # The same work with indices that meet: a few rows get most updates, one row gets all, no row gets any.
    "contention": tuple(_point(32000, 4096, 2048, law) for law in ("uniform", "zipf", "equal", "masked"))
    + tuple(_point(8192, 16384, 16384, law) for law in ("zipf", "equal")),
}

# One of everything; several rows a tile, the last ragged, masked ones among them; duplicates enough for chunks; a row
# wider than a tile; all updates to one row, more than a chunk and less than two; Zipf; everything masked; no updates;
# no columns; more updates than one scan and one sort by counting take in the interpreter.
_EDGES = (
    _point(1, 1, 1),
    _point(5, 3, 11),
    _point(7, 100, 60),
    _point(2, 9000, 9),
    _point(6, 33, 15, "equal"),
    _point(50, 12, 100, "zipf"),
    _point(4, 6, 10, "masked"),
    _point(5, 3, 0),
    _point(5, 0, 4),
    _point(70, 2, 300),
)
MASKED_SCATTER_ND = Op(
    name="masked_scatter_nd_of_shape",
    reference=_reference_masked,
    make=_make_masked,
    cost=_cost,
    variants={
        "eager": Variant(masked_scatter_nd_eager, cost=_cost_eager, needs=()),
        "torch.compile": compiling(masked_scatter_nd_eager),
        "ONNX Runtime": Variant(
            _onnx_run, cost=_cost_eager, needs=("cuda", "onnxruntime", "onnx"), prepare=_onnx_session
        ),
        "fusebook": Variant(_fusebook(), needs=()),
        "fusebook atomic": Variant(_fusebook("atomic"), cost=_cost_atomic, needs=()),
        "fusebook sorted": Variant(_fusebook("sorted"), needs=()),
        "fusebook owner": Variant(_fusebook("owner"), needs=()),
        "fusebook, checked": Variant(_fusebook(check=True), needs=()),
    },
    configs=_CONFIGS,
    draw=_draw_masked,
    edges=_EDGES,
)
SCATTER_ND_OF_SHAPE = Op(
    name="scatter_nd_of_shape",
    reference=_reference_of_shape,
    make=_make_of_shape,
    cost=_cost,
    variants={
        "eager": Variant(_reference_of_shape, needs=()),
        "torch.compile": compiling(_reference_of_shape),
        "fusebook": Variant(_fusebook_of_shape(), needs=()),
        "fusebook atomic": Variant(_fusebook_of_shape("atomic"), cost=_cost_atomic, needs=()),
        "fusebook sorted": Variant(_fusebook_of_shape("sorted"), needs=()),
        "fusebook owner": Variant(_fusebook_of_shape("owner"), needs=()),
    },
    configs={
        name: tuple({"R": d["R"], "D": d["D"], "n": d["n"], "K": 1, "law": d["law"]} for d in _CONFIGS[name])
        for name in ("small", "llama")
    }
    # The same rows, named by indices of one, two and three components.
    | {"components": tuple({"R": 32000, "D": 4096, "n": 2048, "K": K, "law": "uniform"} for K in (1, 2, 3))},
    draw=_draw_of_shape,
    edges=(
        {"R": 1, "D": 1, "n": 1, "K": 1, "law": "uniform"},
        {"R": 16, "D": 5, "n": 30, "K": 2, "law": "uniform"},
        {"R": 24, "D": 1, "n": 40, "K": 3, "law": "uniform"},
        {"R": 16, "D": 100, "n": 20, "K": 3, "law": "equal"},
    ),
)
EMBEDDING_BACKWARD = Op(
    name="embedding_backward",
    reference=_reference_embedding,
    make=_make_embedding,
    cost=_cost,
    variants={
        "torch": Variant(_torch_embedding, needs=()),
        "torch.compile": compiling(_torch_embedding),
        "fusebook": Variant(_fusebook_embedding(), needs=()),
        "fusebook sorted": Variant(_fusebook_embedding("sorted"), needs=()),
    },
    configs={
        "small": tuple(_point(s, 2 * s, 2 * s, law) for s in (256, 1024) for law in ("uniform", "zipf")),
        "llama": tuple(_point(32000, 4096, n, law) for n in (2048, 32000) for law in ("uniform", "zipf", "equal")),
    },
    draw=_draw_embedding,
    edges=(_point(1, 1, 1), _point(7, 100, 70), _point(9, 12, 40, "zipf"), _point(6, 8, 20, "equal"), _point(5, 3, 0)),
)
