"""Squared ReLU: what it means, what it must cost, and who else computes it."""

import random

import torch
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import compiled
from fusebook.kernels.squared_relu import squared_relu, squared_relu_eager
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["PAGE", "SQUARED_RELU"]

#: The lesson that owns its record.
PAGE = 109


def _make(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int) -> tuple[Tensor]:
    return (rough(rng, (M, N), dtype),)


def _cost(itemsize: int, *, M: int, N: int) -> Cost:
    return Cost(read=M * N * itemsize, write=M * N * itemsize, flop=2 * M * N)


def _cost_eager(itemsize: int, *, M: int, N: int) -> Cost:
    return Cost(read=2 * M * N * itemsize, write=2 * M * N * itemsize, flop=2 * M * N)


def _torch_compile(x: Tensor) -> Tensor:
    return compiled(squared_relu_eager)(x)


def _draw(rng: random.Random) -> Dims:
    """Matrices of one element and up to gigabytes; the width is drawn first."""
    dtype = _draws.dtype(rng)
    N = _draws.size(rng, 1, 2**18)
    M = _draws.count(rng, _draws.BYTES // (2 * N * _draws.itemsize(dtype)))
    return {"M": M, "N": N, "dtype": dtype, "layout": _draws.layout(rng)}


SQUARED_RELU = Op(
    name="squared_relu",
    reference=squared_relu_eager,
    make=_make,
    cost=_cost,
    variants={
        "eager": Variant(squared_relu_eager, cost=_cost_eager, needs=()),
        "torch.compile": Variant(_torch_compile, needs=(), recompiles=True),
        "fusebook": Variant(squared_relu, needs=()),
    },
    configs={
        "small": [{"M": n, "N": n} for n in (256, 512, 1024)],
        "large": [{"M": 32768, "N": n} for n in (4096, 4095)],
    },
    draw=_draw,
    edges=[{"M": 1, "N": 1}, {"M": 3, "N": 781}, {"M": 0, "N": 5}],
    rows=(0,),
)
