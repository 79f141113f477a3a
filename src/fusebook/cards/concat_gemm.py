"""Products side by side: what they mean, what they must cost, and who else computes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import (
    ORT,
    compiling,
    in_tf32,
    needs_float32,
    onnx_graph,
    onnx_run,
    onnx_session,
    pack,
    side_by_side,
    weight,
)
from fusebook.kernels.products import concat_gemm, concat_gemm_eager
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["CONCAT_GEMM", "PAGE"]

#: The page that tells of them.
PAGE = 201


def _make_concat(rng: torch.Generator, dtype: torch.dtype, *, M: int, K: int, N: int, weights: str) -> tuple[Any, ...]:
    widths = _widths(N, weights)
    # A 16th: a power of two changes no digit, and rows of x that lie far from zero stay within float16.
    columns = weights in ("columns", "grouped")
    made = [weight(rng, K, width, dtype, 1 / 16, columns) for width in widths]
    return rough(rng, (M, K), dtype), *made


def _widths(N: int, weights: str) -> tuple[int, ...]:
    return {
        "two": (N, N),
        "columns": (N, N),
        "uneven": (N, N // 16 * 8),
        "ragged": (N, N // 2 + 1, 1),
        "grouped": (N, max(1, N // 4), max(1, N // 4)),
    }[weights]


def _width(N: int, weights: str) -> int:
    return sum(_widths(N, weights))


def _cost_concat(itemsize: int, *, M: int, K: int, N: int, weights: str) -> Cost:
    W = _width(N, weights)
    return Cost(read=(M * K + K * W) * itemsize, write=M * W * itemsize, flop=2 * M * K * W)


def _cost_two(itemsize: int, *, M: int, K: int, N: int, weights: str) -> Cost:
    # x for each weight; the products once more on their way into the concatenation.
    W, count = _width(N, weights), len(_widths(N, weights))
    return Cost(
        read=(count * M * K + K * W + M * W) * itemsize, write=2 * M * W * itemsize, flop=2 * M * K * W
    )  # fmt: skip


def _cost_cat(itemsize: int, *, M: int, K: int, N: int, weights: str) -> Cost:
    # The weights are read, written side by side, and read again.
    W = _width(N, weights)
    return Cost(read=(M * K + 2 * K * W) * itemsize, write=(M * W + K * W) * itemsize, flop=2 * M * K * W)


def _cost_views(itemsize: int, *, M: int, K: int, N: int, weights: str) -> Cost:
    W, count = _width(N, weights), len(_widths(N, weights))
    return Cost(read=(count * M * K + K * W) * itemsize, write=M * W * itemsize, flop=2 * M * K * W)


def _cat_one(x: Tensor, *weights: Tensor) -> Tensor:
    return x @ side_by_side(weights)


def _packed(x: Tensor, packed: Tensor) -> Tensor:
    return x @ packed


def _in_views(x: Tensor, *weights: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], sum(w.shape[1] for w in weights))
    for w, columns in zip(weights, out.split([w.shape[1] for w in weights], 1), strict=True):
        torch.mm(x, w, out=columns)
    return out


def _fusebook(strategy: str | None, tf32: bool = False) -> Callable[..., Tensor]:
    def run(x: Tensor, *weights: Tensor) -> Tensor:
        if tf32:
            needs_float32(x)
        return concat_gemm(x, weights, tf32=tf32, strategy=strategy)

    return run


def _onnx_concat(one: bool, tf32: bool) -> Callable[..., tuple[Any]]:
    """The two graphs of the question: two Gemm and a Concat, or a Concat and one Gemm."""

    def prepare(x: Tensor, *weights: Tensor) -> tuple[Any]:
        from onnx import helper

        if tf32:
            needs_float32(x)
        if x.dtype == torch.bfloat16:
            raise NotImplementedError("the graphs are compared in float32 and float16, as where they come from")
        if len(weights) != 2 or any(not w.is_contiguous() for w in weights) or 0 in (*x.shape, *weights[0].shape):
            raise NotImplementedError("these graphs take two contiguous weights, and nothing empty")
        if one:
            nodes = [
                helper.make_node("Concat", ["w0", "w1"], ["w"], axis=1),
                helper.make_node("Gemm", ["x", "w"], ["y"]),
            ]
        else:
            nodes = [
                helper.make_node("Gemm", ["x", "w0"], ["y0"]),
                helper.make_node("Gemm", ["x", "w1"], ["y1"]),
                helper.make_node("Concat", ["y0", "y1"], ["y"], axis=1),
            ]
        inputs = {"x": x, "w0": weights[0], "w1": weights[1]}
        graph = onnx_session(onnx_graph(x.dtype, nodes, list(inputs)), x.device, tf32)
        out = x.new_empty(x.shape[0], sum(w.shape[1] for w in weights))
        return (graph.bind(inputs, {"y": out}),)

    return prepare


def _square(n: int, weights: str = "two") -> dict[str, int | str]:
    return {"M": n, "K": n, "N": n, "weights": weights}


def _draw(rng: random.Random) -> Dims:
    """Gate and up of models and experts, keys and values, queries with their fewer keys and values, and others.

    Half of the weights are columns, as torch.nn.Linear keeps them.
    """
    dtype = _draws.dtype(rng, (torch.float32, torch.float16, torch.bfloat16))
    weights = rng.choice(["columns", "columns", "grouped", "two", "uneven", "ragged"])
    K, N = _draws.layer(rng, dtype)
    if weights == "grouped":
        N = K  # as many queries as the token is wide
    elif rng.randrange(4) == 0:
        N = rng.choice([256, 512, 1024, 2048])  # 2 to 16 heads of keys and of values
    W = _width(N, weights)
    M = _draws.count(rng, _draws.most_rows(dtype, moved=K + W, held=K * W, flop=2 * K * W))
    layout = _draws.layout(rng, _draws.ROWS)
    return {"M": M, "K": K, "N": N, "weights": weights, "dtype": dtype, "layout": layout}


CONCAT_GEMM = Op(
    name="concat_gemm",
    reference=concat_gemm_eager,
    make=_make_concat,
    cost=_cost_concat,
    variants={
        "two + cat": Variant(concat_gemm_eager, cost=_cost_two, needs=()),
        "cat + one": Variant(_cat_one, cost=_cost_cat, needs=()),
        "packed": Variant(_packed, needs=(), prepare=pack),
        "views": Variant(_in_views, cost=_cost_views, needs=()),
        "torch.compile": compiling(concat_gemm_eager),
        # Without its CUDA graphs, which copy inputs and outputs: every implementation can be captured in one.
        "max-autotune": compiling(concat_gemm_eager, "max-autotune-no-cudagraphs", needs=("cuda",)),
        "fusebook": Variant(_fusebook("fused"), needs=()),
        "fusebook (chosen)": Variant(_fusebook(None), needs=()),
        "ORT two + Concat": Variant(onnx_run, cost=_cost_two, needs=ORT, prepare=_onnx_concat(False, False)),
        "ORT Concat + one": Variant(onnx_run, cost=_cost_cat, needs=ORT, prepare=_onnx_concat(True, False)),
        "two + cat, TF32": Variant(in_tf32(concat_gemm_eager), cost=_cost_two, math="tf32"),
        "packed, TF32": Variant(in_tf32(_packed), prepare=pack, math="tf32"),
        "views, TF32": Variant(in_tf32(_in_views), cost=_cost_views, math="tf32"),
        "fusebook, TF32": Variant(_fusebook("fused", True), needs=(), math="tf32"),
        "fusebook (chosen), TF32": Variant(_fusebook(None, True), needs=(), math="tf32"),
        "ORT two + Concat, TF32": Variant(
            onnx_run, cost=_cost_two, needs=ORT, prepare=_onnx_concat(False, True), math="tf32"
        ),
        "ORT Concat + one, TF32": Variant(
            onnx_run, cost=_cost_cat, needs=ORT, prepare=_onnx_concat(True, True), math="tf32"
        ),
    },
    configs={
        "small": tuple(_square(n) for n in (256, 512, 1024)),
        "medium": tuple(_square(n) for n in (2048, 4096)),
        "large": (_square(8192),),
        # The feed-forward layers of Llama 2 7B and Llama 3 8B, by columns as torch.nn.Linear keeps them.
        "llama": (
            {"M": 4096, "K": 4096, "N": 11008, "weights": "columns"},
            {"M": 8192, "K": 4096, "N": 14336, "weights": "columns"},
        ),
        # Rows that begin anywhere; tiles that fill their rounds badly, with rows that begin amid a line of the cache
        # and with others; the weights of torch.nn.Linear; widths that differ.
        "odd": (_square(781), _square(3000), _square(3072), _square(2048, "columns"), _square(4096, "uneven")),
        # What takes seconds to compile, where it is compared.
        "compiled": tuple(_square(n) for n in (256, 1024, 4096)),
        "decode": tuple({"M": M, "K": 4096, "N": 11008, "weights": "columns"} for M in (1, 16, 64)),
    },
    draw=_draw,
    # One of everything; few rows, nothing aligned, widths that differ, and a sum that is cut in parts; descriptors with
    # several tiles and steps, of rows and of columns; widths that differ but are aligned; no rows; nothing to add.
    edges=(
        {"M": 1, "K": 1, "N": 1, "weights": "two"},
        {"M": 7, "K": 150, "N": 65, "weights": "ragged"},
        {"M": 100, "K": 96, "N": 72, "weights": "two"},
        {"M": 65, "K": 40, "N": 72, "weights": "columns"},
        {"M": 70, "K": 64, "N": 80, "weights": "uneven"},
        {"M": 0, "K": 4, "N": 4, "weights": "two"},
        {"M": 4, "K": 0, "N": 4, "weights": "two"},
    ),
    rows=(0,),
    dtypes=(torch.float32, torch.bfloat16),  # each kernel compiles for seconds; float16 has tests of its own
)
