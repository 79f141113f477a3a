"""SwiGLU: what it means, what it must cost, and who else computes it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import (
    ORT,
    compiling,
    foreign,
    in_tf32,
    needs_float32,
    onnx_graph,
    onnx_run,
    onnx_session,
    pack,
    weight,
)
from fusebook.kernels.products import swiglu, swiglu_eager
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["PAGE", "SWIGLU"]

#: The page that tells of them.
PAGE = 202


def _make_swiglu(rng: torch.Generator, dtype: torch.dtype, *, M: int, K: int, N: int) -> tuple[Tensor, ...]:
    # Products of a few units, where silu bends. Weights as torch.nn.Linear keeps them.
    scale = 2.0 ** -round(math.log2(max(1, K)) / 2)
    return rough(rng, (M, K), dtype) / 64, *(weight(rng, K, N, dtype, scale, True) for _ in range(2))


def _reference_swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    g = x @ gate
    return g * torch.sigmoid(g) * (x @ up)


def _cost_swiglu(itemsize: int, *, M: int, K: int, N: int) -> Cost:
    # Beside the products, an element of the output costs an exponential, an addition, a division and a product.
    return Cost(read=(M * K + 2 * K * N) * itemsize, write=M * N * itemsize, flop=4 * M * K * N + 4 * M * N)


def _cost_swiglu_eager(itemsize: int, *, M: int, K: int, N: int) -> Cost:
    least = _cost_swiglu(itemsize, M=M, K=K, N=N)
    return Cost(least.read + (M * K + 3 * M * N) * itemsize, least.write + 3 * M * N * itemsize, least.flop)


def _cost_swiglu_written(itemsize: int, *, M: int, K: int, N: int) -> Cost:
    # One product of twice the columns, written and read again by one kernel that does the rest.
    least = _cost_swiglu(itemsize, M=M, K=K, N=N)
    return Cost(least.read + 2 * M * N * itemsize, least.write + 2 * M * N * itemsize, least.flop)


def _cost_swiglu_packed(itemsize: int, *, M: int, K: int, N: int) -> Cost:
    # As eager, but x is read by one product.
    own = _cost_swiglu_eager(itemsize, M=M, K=K, N=N)
    return Cost(own.read - M * K * itemsize, own.write, own.flop)


def _cost_swiglu_two(itemsize: int, *, M: int, K: int, N: int) -> Cost:
    # Both products written and read again by one kernel; x is read by either.
    own = _cost_swiglu_written(itemsize, M=M, K=K, N=N)
    return Cost(own.read + M * K * itemsize, own.write, own.flop)


def _swiglu_packed(x: Tensor, packed: Tensor) -> Tensor:
    g, u = (x @ packed).chunk(2, 1)
    return torch.nn.functional.silu(g) * u


def _liger(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    if x.shape[0] == 0:
        raise NotImplementedError("Liger launches an empty grid on an empty tensor")
    # Two products, as in its own layer: the halves of a packed one are not dense, and it would copy them.
    return LigerSiLUMulFunction.apply(x @ gate, x @ up)


def _interleave(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of gate and up in turn, as quack's epilogue wants them."""
    return x, torch.stack([gate.T, up.T], 1).flatten(0, 1).T


def _quack(x: Tensor, interleaved: Tensor) -> Tensor:
    from quack.gemm_interface import gemm_gated

    if x.dtype == torch.float32:
        raise NotImplementedError("quack takes float16 and bfloat16 on Hopper, got float32")
    if any(size % 8 for size in (x.shape[1], interleaved.shape[1] // 2)) or x.numel() == 0:
        raise NotImplementedError(f"quack takes rows of whole 16-byte vectors, got {tuple(interleaved.shape)}")
    # Its own choice of a configuration, not the search over all of them: that takes minutes a shape.
    return gemm_gated(x, interleaved, activation="swiglu", store_preact=False, tuned=False)[1]


def _fusebook_swiglu(strategy: str | None, tf32: bool = False) -> Callable[..., Tensor]:
    def run(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        if tf32:
            needs_float32(x)
        return swiglu(x, gate, up, tf32=tf32, strategy=strategy)

    return run


def _onnx_swiglu(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Any]:
    from onnx import helper

    if 0 in (*x.shape, *gate.shape):
        raise NotImplementedError("this graph takes nothing empty")
    nodes = [
        helper.make_node("Gemm", ["x", "gate"], ["g"], transB=1),
        helper.make_node("Gemm", ["x", "up"], ["u"], transB=1),
        helper.make_node("Sigmoid", ["g"], ["s"]),
        helper.make_node("Mul", ["g", "s"], ["silu"]),
        helper.make_node("Mul", ["silu", "u"], ["y"]),
    ]
    inputs = {"x": x, "gate": gate.T.contiguous(), "up": up.T.contiguous()}
    graph = onnx_session(onnx_graph(x.dtype, nodes, list(inputs)), x.device)
    return (graph.bind(inputs, {"y": x.new_empty(x.shape[0], gate.shape[1])}),)


def _layer(M: int, K: int, N: int) -> dict[str, int]:
    return {"M": M, "K": K, "N": N}


def _draw(rng: random.Random) -> Dims:
    """Layers of models and of single experts, and others; from one token to as many as memory and arithmetic allow."""
    dtype = _draws.dtype(rng, (torch.float32, torch.float16, torch.bfloat16))
    K, N = _draws.layer(rng, dtype)
    M = _draws.count(rng, _draws.most_rows(dtype, moved=K + N, held=2 * K * N, flop=4 * K * N))
    return {"M": M, "K": K, "N": N, "dtype": dtype, "layout": _draws.layout(rng, _draws.ROWS)}


SWIGLU = Op(
    name="swiglu",
    reference=_reference_swiglu,
    make=_make_swiglu,
    cost=_cost_swiglu,
    variants={
        "eager": Variant(swiglu_eager, cost=_cost_swiglu_eager, needs=()),
        "packed": Variant(_swiglu_packed, cost=_cost_swiglu_packed, needs=(), prepare=pack),
        "packed + compiled": compiling(_swiglu_packed, cost=_cost_swiglu_written, prepare=pack),
        "fusebook": Variant(_fusebook_swiglu("fused"), needs=()),
        "fusebook (chosen)": Variant(_fusebook_swiglu(None), cost=_cost_swiglu_two, needs=()),
        "Liger": foreign("liger_kernel", _liger, cost=_cost_swiglu_two),
        "quack": foreign("quack", _quack, prepare=_interleave),
        "ONNX Runtime": Variant(onnx_run, cost=_cost_swiglu_eager, needs=ORT, prepare=_onnx_swiglu),
        "packed, TF32": Variant(in_tf32(_swiglu_packed), cost=_cost_swiglu_packed, prepare=pack, math="tf32"),
        "fusebook, TF32": Variant(_fusebook_swiglu("fused", True), needs=(), math="tf32"),
        "fusebook (chosen), TF32": Variant(_fusebook_swiglu(None, True), cost=_cost_swiglu_two, needs=(), math="tf32"),
    },
    configs={
        "small": (_layer(256, 1024, 2816), _layer(1024, 4096, 11008)),
        # The feed-forward layers of Llama 2 7B and Llama 3 8B, on as many tokens.
        "llama": (_layer(4096, 4096, 11008), _layer(8192, 4096, 14336)),
        # A few tokens; the last is Llama 3 70B, whose weights are many times the L2 cache.
        "decode": (_layer(1, 4096, 11008), _layer(16, 4096, 11008), _layer(64, 4096, 11008), _layer(16, 8192, 28672)),
    },
    draw=_draw,
    # One of everything; few rows, nothing aligned, and sums that are cut in parts; descriptors, with several tiles and
    # steps; no rows; nothing to add.
    edges=(_layer(1, 1, 1), _layer(7, 150, 65), _layer(100, 96, 72), _layer(0, 4, 4), _layer(4, 0, 4)),
    dtypes=(torch.float32, torch.bfloat16),
    rows=(0,),
)
