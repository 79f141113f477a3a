"""Norms and their gradients: what they mean, what they must cost, at which sizes, and who else computes them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import card, compiled, compiling, foreign, liger_takes, matrices, quack_takes
from fusebook.kernels._call import FLOATING
from fusebook.kernels.norms import (
    add_rms_norm,
    layer_norm,
    layer_norm_backward,
    layer_norm_eager,
    rms_norm,
    rms_norm_backward,
    rms_norm_eager,
)
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["ADD_RMS_NORM", "LAYER_NORM", "LAYER_NORM_BACKWARD", "PAGE", "RMS_NORM", "RMS_NORM_BACKWARD", "RMS_NORM_FP8"]

#: The page that tells of them.
PAGE = 104

_EPS = 1e-6
_FP8 = torch.float8_e4m3fn


def _normed(x: Tensor, centred: bool) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if centred else x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS)


# RMSNorm --------------------------------------------------------------------------------------------------------------


def _make(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int) -> tuple[Tensor, Tensor]:
    return rough(rng, (M, N), dtype), _weight(rng, N, dtype)


def _weight(rng: torch.Generator, N: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(N, generator=rng, dtype=dtype, device=rng.device)


def _reference(x: Tensor, weight: Tensor) -> Tensor:
    return _normed(x, False) * weight


def _cost(itemsize: int, *, M: int, N: int, passes: tuple[float, float] = (1, 1), vectors: int = 1) -> Cost:
    """Of so many readings and writings of the matrix, and of vectors that are read."""
    read, write = (int(times * M * N * itemsize) for times in passes)
    # An element costs a square, an addition and two products.
    return Cost(read=read + vectors * N * itemsize, write=write, flop=4 * M * N)


def _cost_eager(itemsize: int, *, M: int, N: int) -> Cost:
    # float32 is read four times and written three; of half types, what is between the first operation and the last is
    # twice as long.
    wide = max(4, itemsize)
    first = (itemsize, wide) if wide > itemsize else (0, 0)
    last = (wide, itemsize) if wide > itemsize else (0, 0)
    read = M * N * (first[0] + 3 * wide + last[0] + itemsize) + 2 * M * wide + N * itemsize
    write = M * N * (first[1] + 2 * wide + last[1] + itemsize) + 2 * M * wide
    return Cost(read=read, write=write, flop=4 * M * N)


def _torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, _EPS)


def _liger(x: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    _liger_takes(x)
    return LigerRMSNormFunction.apply(x, weight, _EPS, 0.0, "llama", False)


def _liger_takes(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise NotImplementedError("Liger's norms compute in float32, got float64")
    liger_takes(x)


def _quack(x: Tensor, weight: Tensor, **more: Any) -> Any:
    from quack.rmsnorm import rmsnorm_fwd

    quack_takes(x)
    return rmsnorm_fwd(x, weight, eps=_EPS, **more)


def _drawing(tensors: int, dtypes: tuple[torch.dtype, ...] = FLOATING) -> Callable[[random.Random], Dims]:
    """Rows most often as wide as a model's hidden state, of so many matrices, in one of `dtypes`."""
    drawn = _draws.matrices(tensors, 32, 2**17, _draws.HIDDEN, dtypes=FLOATING)

    def draw(rng: random.Random) -> Dims:
        dims = drawn(rng)
        return dims if getattr(torch, str(dims["dtype"])) in dtypes else draw(rng)

    return draw


# The sum with a residual before it ------------------------------------------------------------------------------------


def _make_sum(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int) -> tuple[Tensor, ...]:
    x, weight = _make(rng, dtype, M=M, N=N)
    return x, torch.randn(M, N, generator=rng, dtype=dtype, device=rng.device), weight


def _reference_sum(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _normed(total, False) * weight, total


def _eager_sum(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_eager(total, weight), total


def _torch_sum(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch(total, weight), total


def _liger_sum(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    _liger_takes(x)
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, _EPS, 0.0, "llama", False)


def _quack_sum(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _quack(x, weight, residual=residual)[:2]


# LayerNorm ------------------------------------------------------------------------------------------------------------


def _make_layer(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int) -> tuple[Tensor, ...]:
    # As far from zero as a mean that is rounded once allows.
    x = torch.randn(M, N, generator=rng, dtype=dtype, device=rng.device)
    x[1::3] *= 20
    x[2::3] += 10
    return x, _weight(rng, N, dtype), _weight(rng, N, dtype)


def _reference_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _normed(x, True) * weight + bias


def _eager_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm_eager(x, weight, bias, _EPS)


def _torch_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, _EPS)


def _liger_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    _liger_takes(x)
    return LigerLayerNormFunction.apply(x, weight, bias, _EPS)


# Straight to eight bits -----------------------------------------------------------------------------------------------


def _reference_fp8(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """In float64 nothing is rounded: what is near to that is right."""
    y = _normed(x.to(torch.promote_types(x.dtype, torch.float32)), False) * weight
    scale = y.abs().amax(-1, keepdim=True) / 448
    return (y / scale).to(x.dtype if x.dtype == torch.float64 else _FP8), scale


def _meaning_fp8(inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    quantised, scale = outputs
    return quantised.to(scale.dtype) * scale, scale


def _quantise(y: Tensor) -> tuple[Tensor, Tensor]:
    wide = y.float()
    scale = wide.abs().amax(-1, keepdim=True) / 448
    return (wide / scale).to(_FP8), scale


def _eager_fp8(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _quantise(rms_norm_eager(x, weight))


def _then_quantised(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return compiled(_quantise)(rms_norm(x, weight, eps=_EPS))


def _cost_fp8(itemsize: int, *, M: int, N: int) -> Cost:
    return Cost(read=(M + 1) * N * itemsize, write=M * N + 4 * M, flop=6 * M * N)


def _cost_then_quantised(itemsize: int, *, M: int, N: int) -> Cost:
    return Cost(read=(2 * M + 1) * N * itemsize, write=M * N * (itemsize + 1) + 4 * M, flop=6 * M * N)


# Gradients ------------------------------------------------------------------------------------------------------------


def _make_backward(
    rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int, centred: bool = False
) -> tuple[Tensor, ...]:
    # dy has a mean of its own, so that sums over rows and columns do not cancel.
    x, dy = (torch.randn(M, N, generator=rng, dtype=dtype, device=rng.device) for _ in range(2))
    weight = _weight(rng, N, dtype)
    return (x, dy + 1, weight, weight.clone()) if centred else (x.abs() + 1, dy + 1, weight)


def _backward(x: Tensor, dy: Tensor, weight: Tensor, centred: bool) -> tuple[Tensor, ...]:
    kinds = x.dtype, weight.dtype
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dy, weight = x.to(wide), dy.to(wide), weight.to(wide)
    x = x - x.mean(-1, keepdim=True) if centred else x
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS)
    n, g = x * factor, dy * weight
    dx = g - n * (g * n).mean(-1, keepdim=True)
    dx = (dx - g.mean(-1, keepdim=True) if centred else dx) * factor
    each = [dy * n, dy] if centred else [dy * n]
    sums = [t.flatten(0, -2).sum(0) for t in each]  # of all rows, however many axes they have
    return dx.to(kinds[0]), *(s.to(kinds[1]) for s in sums)


def _backward_rms(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return _backward(x, dy, weight, False)


def _backward_layer(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return _backward(x, dy, weight, True)


def _with_factor(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    _, factor = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, _EPS)
    return x, dy, weight, factor


def _torch_backward(x: Tensor, dy: Tensor, weight: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.aten._fused_rms_norm_backward(dy, x, weight.shape, factor, weight, [True, True])


def _with_statistics(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    _, mean, factor = torch.ops.aten.native_layer_norm(x, weight.shape, weight, bias, _EPS)
    return x, dy, weight, bias, mean, factor


def _torch_backward_layer(
    x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, factor: Tensor
) -> tuple[Tensor, ...]:
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(dy, x, weight.shape, mean, factor, weight, bias, [True, True, True])


def _of_liger(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Any, ...]:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    _liger_takes(x)
    _, x, factor, *settings = rms_norm_forward(x, weight, _EPS, 0.0, "llama", False)
    return x, dy, weight, factor, settings


def _liger_backward(x: Tensor, dy: Tensor, weight: Tensor, factor: Tensor, settings: list[Any]) -> tuple[Tensor, ...]:
    from liger_kernel.ops.rms_norm import rms_norm_backward as backward

    block, warps, mode = settings
    return backward(dy, x, weight, factor, 0.0, mode, block, warps, False, False)


def _of_quack(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Any, ...]:
    return x, dy, weight, _quack(x, weight, store_rstd=True)[2]


def _quack_backward(x: Tensor, dy: Tensor, weight: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    from quack.rmsnorm import rmsnorm_bwd

    return rmsnorm_bwd(x, weight, dy, factor)[:2]


# The cards ------------------------------------------------------------------------------------------------------------

_CONFIGS = {
    "small": matrices((256, 256), (512, 512), (1024, 1024)),
    # Hidden states of models, with few rows and many.
    "llama": matrices((16, 4096), (4096, 4096)),
    # Four times the L2 of an H200 in traffic or more, for rows of 1.5 KiB to 512 KiB in half types.
    "large": matrices((131072, 781), (65536, 2880), (32768, 4096), (32768, 8192), (8192, 65536), (2048, 262144)),
    "wide": matrices((32768, 8192), (8192, 65536)),
    "target": matrices((32768, 8192)),
}

# One column; several rows a program; an odd width; a row in chunks, the last one ragged; a row of several programs, in
# more rows than there are groups of programs; nothing at all.
_EDGES = matrices((1, 1), (37, 100), (3, 781), (2, 8200), (3, 33000), (300, 50257), (0, 5))
# Of operators that take the same ways: of one program and of several, and nothing at all.
_FEW = tuple(dims for dims in _EDGES if dims["N"] in (100, 33000, 5))
_ROWS: dict[str, Any] = {"configs": _CONFIGS, "dtypes": FLOATING}
_LIGER, _QUACK = "liger_kernel", "quack"
RMS_NORM = card(
    "rms_norm",
    rms_norm_eager,
    rms_norm,
    torch=Variant(_torch),
    others={
        "Liger": foreign(_LIGER, _liger),
        "quack": foreign(_QUACK, lambda x, weight: _quack(x, weight)[0]),
    },
    reference=_reference,
    make=_make,
    cost=_cost,
    cost_eager=_cost_eager,
    draw=_drawing(2),
    edges=_EDGES,
    rows=(0,),
    **_ROWS,
)
ADD_RMS_NORM = card(
    "add_rms_norm",
    _eager_sum,
    add_rms_norm,
    torch=Variant(_torch_sum),
    others={"Liger": foreign(_LIGER, _liger_sum), "quack": foreign(_QUACK, _quack_sum)},
    reference=_reference_sum,
    make=_make_sum,
    cost=functools.partial(_cost, passes=(2, 2)),
    draw=_drawing(4),
    edges=_FEW,
    rows=(0, 1),
    **_ROWS,
)
LAYER_NORM = card(
    "layer_norm",
    _eager_layer,
    lambda *args: layer_norm(*args, eps=_EPS),
    torch=Variant(_torch_layer),
    others={"Liger": foreign(_LIGER, _liger_layer)},
    reference=_reference_layer,
    make=_make_layer,
    cost=functools.partial(_cost, vectors=2),
    draw=_drawing(2),
    edges=_FEW,
    rows=(0,),
    **_ROWS,
)
RMS_NORM_FP8 = Op(
    name="rms_norm_fp8",
    reference=_reference_fp8,
    make=_make,
    cost=_cost_fp8,
    variants={
        "eager": Variant(_eager_fp8, needs=()),
        "norm, then quantise": Variant(_then_quantised, cost=_cost_then_quantised, recompiles=True),
        "torch.compile": compiling(_eager_fp8, needs=("cuda",)),
        "fusebook": Variant(lambda x, weight: rms_norm(x, weight, dtype=_FP8), needs=()),
    },
    configs=_CONFIGS,
    draw=_drawing(2, FLOATING[:3]),
    edges=_FEW,
    dtypes=FLOATING[:3],
    meaning=_meaning_fp8,
    rows=(0,),
)
RMS_NORM_BACKWARD = card(
    "rms_norm_backward",
    _backward_rms,
    rms_norm_backward,
    torch=Variant(_torch_backward, prepare=_with_factor),
    others={
        "Liger": foreign(_LIGER, _liger_backward, prepare=_of_liger),
        "quack": foreign(_QUACK, _quack_backward, prepare=_of_quack),
    },
    reference=_backward_rms,
    make=_make_backward,
    cost=functools.partial(_cost, passes=(2, 1), vectors=2),
    draw=_drawing(3),
    edges=_EDGES[1:],
    **_ROWS,
)
LAYER_NORM_BACKWARD = card(
    "layer_norm_backward",
    _backward_layer,
    lambda *args: layer_norm_backward(*args, eps=_EPS),
    torch=Variant(_torch_backward_layer, prepare=_with_statistics),
    reference=_backward_layer,
    make=functools.partial(_make_backward, centred=True),
    cost=functools.partial(_cost, passes=(2, 1), vectors=2),
    draw=_drawing(3),
    edges=_FEW,
    **_ROWS,
)
