"""Softmax and its gradient: what they mean, what they must cost, at which sizes, and who else computes them."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import compiled, liger_takes, matrices, quack_takes
from fusebook.kernels._call import FLOATING
from fusebook.kernels.softmax import softmax, softmax_backward, softmax_backward_eager, softmax_eager
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["PAGE", "SOFTMAX", "SOFTMAX_BACKWARD"]

#: The page that tells of them.
PAGE = 102


def _reference(x: Tensor) -> Tensor:
    # Not torch.softmax: in float64 on the CPU it is off by hundreds of eps in wide rows.
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def _make(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int) -> tuple[Tensor]:
    return (rough(rng, (M, N), dtype),)


def _cost(itemsize: int, *, M: int, N: int) -> Cost:
    # An element costs a maximum, a subtraction, an exponential, an addition and a product.
    return Cost(read=M * N * itemsize, write=M * N * itemsize, flop=5 * M * N)


def _cost_eager(itemsize: int, *, M: int, N: int) -> Cost:
    return Cost(read=(5 * M * N + 2 * M) * itemsize, write=(3 * M * N + 2 * M) * itemsize, flop=5 * M * N)


def _torch_compile(x: Tensor) -> Tensor:
    return compiled(softmax_eager)(x)


def _liger(x: Tensor) -> Tensor:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    liger_takes(x)
    return LigerSoftmaxFunction.apply(x)


def _quack(x: Tensor) -> Tensor:
    from quack.softmax import softmax_fwd

    quack_takes(x)
    return softmax_fwd(x)


def _make_backward(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int) -> tuple[Tensor, Tensor]:
    # y is rounded, and the gradient is judged as that of the rounded one, which every way is given. A saturated row has
    # y near 1 and dy - sum(y dy) near 0 at the same element: its gradient is rounding. So y is the softmax of numbers
    # within one of zero. dy alternates in sign, at least one away from a mean of one: differences do not cancel where
    # rows are short, and a sum left out shows where they are long.
    x = 2 * torch.rand(M, N, generator=rng, device=rng.device, dtype=dtype) - 1
    size = 1 + torch.randn(M, N, generator=rng, device=rng.device, dtype=dtype).abs()
    size[:, 1::2] *= -1
    return torch.softmax(x, -1), 1 + size


def _cost_backward(itemsize: int, *, M: int, N: int) -> Cost:
    # An element costs a product and an addition for the sum, a subtraction and a product.
    return Cost(read=2 * M * N * itemsize, write=M * N * itemsize, flop=4 * M * N)


def _cost_backward_eager(itemsize: int, *, M: int, N: int) -> Cost:
    return Cost(read=(6 * M * N + M) * itemsize, write=(3 * M * N + M) * itemsize, flop=4 * M * N)


def _after_forward(y: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    return y.contiguous(), dy  # as softmax returns it, however its gradient lies


def _torch_backward(y: Tensor, dy: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)


def _torch_compile_backward(y: Tensor, dy: Tensor) -> Tensor:
    return compiled(softmax_backward_eager)(y, dy)


def _liger_backward(y: Tensor, dy: Tensor) -> Tensor:
    from liger_kernel.ops.softmax import _softmax_backward as backward
    from liger_kernel.ops.utils import calculate_settings

    liger_takes(y)
    block, warps = calculate_settings(y.shape[-1])
    return backward(dy, y, block, warps, False)


def _quack_backward(y: Tensor, dy: Tensor) -> Tensor:
    from quack.softmax import softmax_bwd

    quack_takes(y)
    return softmax_bwd(dy, y)


def _draw(rng: random.Random, tensors: int = 2) -> Dims:
    """Rows of 2 to 262144 numbers, from attention's to those of a vocabulary; one of them, and up to millions."""
    dtype = _draws.dtype(rng, FLOATING)
    N = _draws.size(rng, 2, 2**18, rng.choice([_draws.VOCABULARIES, _draws.HIDDEN]))
    M = _draws.count(rng, min(2**24, _draws.BYTES // (tensors * N * _draws.itemsize(dtype))))
    return {"M": M, "N": N, "dtype": dtype, "layout": _draws.layout(rng)}


def _draw_backward(rng: random.Random) -> Dims:
    """As of the softmax itself; three tensors are moved."""
    return _draw(rng, 3)


_CONFIGS = {
    "small": matrices((256, 256), (512, 512), (1024, 1024)),
    "medium": matrices((4096, 256), (4096, 1024), (4096, 4096), (4096, 8192)),
    # Four times the L2 of an H200 in traffic or more, for rows of 4 to 64 KiB in one dtype or the other; an odd width;
    # a width that no power of two is near.
    "large": matrices(
        (65536, 781), (131072, 1024), (32768, 4096), (16384, 12672), (32768, 16384), (16384, 32768), (8192, 65536),
        (2048, 262144),
    ),
    "llama": matrices((4096, 32000), (16, 128256), (256, 128256), (4096, 128256)),
    # Widths of the tutorial's sweep, few enough that every implementation is compiled for each.
    "triton": matrices(*((4096, 256 * i) for i in (1, 5, 9, 13, 17, 25, 33, 41, 49))),
}  # fmt: skip

# One column; several rows a program, the last tile ragged; a row in one tile; a row in chunks, the last one ragged; a
# row of one program in one dtype and of several in another, which begins anywhere; a row of several programs; more such
# rows than multiprocessors of the interpreter, and of a GPU; nothing at all.
_EDGES = matrices(
    (1, 1), (5, 2), (37, 100), (3, 781), (2, 8200), (2, 24578), (3, 50257), (2, 66000), (25, 33000), (140, 33000),
    (0, 5),
)  # fmt: skip
SOFTMAX = Op(
    name="softmax",
    reference=_reference,
    make=_make,
    cost=_cost,
    variants={
        "eager": Variant(softmax_eager, cost=_cost_eager, needs=()),
        "torch": Variant(lambda x: torch.softmax(x, -1)),
        "torch.compile": Variant(_torch_compile, needs=(), recompiles=True),
        "fusebook": Variant(softmax, needs=()),
        "Liger": Variant(_liger, needs=("cuda", "liger_kernel"), recompiles=True),
        "quack": Variant(_quack, needs=("cuda", "quack"), recompiles=True),
    },
    configs=_CONFIGS,
    draw=_draw,
    edges=_EDGES,
    dtypes=FLOATING,
    rows=(0,),
)
SOFTMAX_BACKWARD = Op(
    name="softmax_backward",
    reference=softmax_backward_eager,
    make=_make_backward,
    cost=_cost_backward,
    variants={
        "eager": Variant(softmax_backward_eager, cost=_cost_backward_eager, needs=(), prepare=_after_forward),
        "torch": Variant(_torch_backward, needs=(), prepare=_after_forward),
        "torch.compile": Variant(_torch_compile_backward, needs=(), prepare=_after_forward, recompiles=True),
        "fusebook": Variant(softmax_backward, needs=(), prepare=_after_forward),
        "Liger": Variant(_liger_backward, needs=("cuda", "liger_kernel"), prepare=_after_forward, recompiles=True),
        "quack": Variant(_quack_backward, needs=("cuda", "quack"), prepare=_after_forward, recompiles=True),
    },
    configs=_CONFIGS,
    draw=_draw_backward,
    edges=_EDGES,
    dtypes=FLOATING,
    rows=(0, 1),
)
