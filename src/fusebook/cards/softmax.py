"""Softmax and its gradient: what they mean, what they must cost, at which sizes, and who else computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import card, foreign, liger_takes, matrices, quack_takes
from fusebook.kernels._call import FLOATING
from fusebook.kernels.softmax import softmax, softmax_backward, softmax_backward_eager, softmax_eager
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Variant

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
_ROWS: dict[str, Any] = {"configs": _CONFIGS, "edges": _EDGES, "dtypes": FLOATING, "needs": ()}
_WIDTHS = 2, 2**18, _draws.VOCABULARIES, _draws.HIDDEN
SOFTMAX = card(
    "softmax",
    softmax_eager,
    softmax,
    torch=Variant(lambda x: torch.softmax(x, -1)),
    others={"Liger": foreign("liger_kernel", _liger), "quack": foreign("quack", _quack)},
    reference=_reference,
    make=_make,
    cost=_cost,
    cost_eager=_cost_eager,
    draw=_draws.matrices(2, *_WIDTHS, dtypes=FLOATING),
    rows=(0,),
    **_ROWS,
)
SOFTMAX_BACKWARD = card(
    "softmax_backward",
    softmax_backward_eager,
    softmax_backward,
    torch=Variant(_torch_backward, needs=(), prepare=_after_forward),
    others={
        "Liger": foreign("liger_kernel", _liger_backward, prepare=_after_forward),
        "quack": foreign("quack", _quack_backward, prepare=_after_forward),
    },
    reference=softmax_backward_eager,
    make=_make_backward,
    cost=_cost_backward,
    cost_eager=_cost_backward_eager,
    prepare=_after_forward,
    draw=_draws.matrices(3, *_WIDTHS, dtypes=FLOATING),
    rows=(0, 1),
    **_ROWS,
)
