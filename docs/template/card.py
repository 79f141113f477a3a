"""Squared ReLU: what it means, what it must cost, and who else computes it."""

import torch
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import card, matrices
from fusebook.kernels.squared_relu import squared_relu, squared_relu_eager
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost

__all__ = ["PAGE", "SQUARED_RELU"]

#: The lesson that owns its record.
PAGE = 109


def _make(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int) -> tuple[Tensor]:
    return (rough(rng, (M, N), dtype),)


def _cost(itemsize: int, *, M: int, N: int) -> Cost:
    return Cost(read=M * N * itemsize, write=M * N * itemsize, flop=2 * M * N)


def _cost_eager(itemsize: int, *, M: int, N: int) -> Cost:
    return Cost(read=2 * M * N * itemsize, write=2 * M * N * itemsize, flop=2 * M * N)


SQUARED_RELU = card(
    "squared_relu",
    squared_relu_eager,
    squared_relu,
    needs=(),
    reference=squared_relu_eager,
    make=_make,
    cost=_cost,
    cost_eager=_cost_eager,
    configs={
        "small": matrices((256, 256), (512, 512), (1024, 1024)),
        "large": matrices((32768, 4096), (32768, 4095)),
    },
    draw=_draws.matrices(2, 1, 2**18, _draws.HIDDEN),
    edges=matrices((1, 1), (3, 781), (0, 5)),
    rows=(0,),
)
