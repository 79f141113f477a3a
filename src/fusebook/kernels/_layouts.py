"""Launch plans and layouts of norms and losses, until these use the tables and layouts of `_rows`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def row_offset_of_axes(outer, inner, OUTERS, strides):
    """Where rows begin: at places along OUTER and INNER, of a tensor whose strides are those of OUTER, INNER and N.

    OUTER may be several axes: `OUTERS` are their sizes but that of the slowest, and its stride is a tuple.
    """
    if OUTERS is None:
        at = outer * strides[0]
    else:
        at = tl.zeros([], tl.int64)
        for i in tl.static_range(len(OUTERS)):
            at += (outer % OUTERS[i]) * strides[0][i]
            outer = outer // OUTERS[i]
        at += outer * strides[0][len(OUTERS)]
    return at + inner * strides[1]


@triton.jit
def to_word(number):
    """A number as a word that is not zero: -0.0 stands for 0.0."""
    if number.dtype == tl.float64:
        word = number.to(tl.int64, bitcast=True)
        return tl.where(word == 0, -9223372036854775808, word)
    else:
        word = number.to(tl.int32, bitcast=True)
        return tl.where(word == 0, -2147483648, word)


class Plan(NamedTuple):
    """How rows are launched: by which kernel, with which constants, by how many programs of how many warps."""

    kernel: str  # "rows", "narrow", "pairs", "whole", "shared" or "twice"; "turned": laid side by side first, and again
    constants: Mapping[str, int]
    programs: int
    warps: int
    span: int = 0  # columns of a part; 0 where a row belongs to one program
    parts: int = 1  # programs that share a row
    registers: int | None = None  # the most that a thread takes; None leaves it to the compiler


def tile_of(n: int, size: int, tensors: int) -> tuple[int, int]:
    """BLOCK and warps for a row of `n` elements of `size` bytes that stays in registers.

    A tile of a power of two wastes up to half its lanes, so a row is cut into tiles of 16 bytes a thread, and only the
    last has lanes to spare. 16 to 64 numbers a thread keep enough loads in flight while several rows share a processor.
    """
    whole = triton.next_power_of_2(n)
    if size == 2:
        if n <= 1024:
            return min(whole, 256 if n > 512 else 512), 1
        if n <= 3072:
            return 512, 2
        if n in (4096, 8192):
            return 4096, 8
        if n <= 6144:
            return 1024, 4
        if tensors == 2 and 12800 < n <= 16384:
            return 16384, 16
        return 2048, 8
    # float64 takes two registers a number: half the tile for the same bytes a thread.
    wide = max(1, size // 4)
    if n <= 2048:
        if 512 < n <= 3 * whole // 4:
            return whole // 4, 2
        return whole, 1 if n * wide <= 512 else 2 if n == 1024 else 4
    if n < 4096:
        return 1024 // wide, 8
    if n < 8192:
        return 2048 // wide, 16
    if n <= 20480:
        return 2048 // wide, 8 * wide
    return 4096 // wide, 32


class Layout(NamedTuple):
    """Tensors of one shape seen as [OUTER, INNER, N]."""

    sizes: tuple[int, int, int]  # OUTER, INNER and N
    outers: tuple[int, ...]  # OUTER's axes, the fastest first, where it is more than one that no strides fold
    strides: list[tuple[tuple[int, ...], int, int]]  # of each tensor: those of OUTER's axes, that of INNER, that of N


def layout_of(dim: int, *tensors: Tensor) -> Layout:
    """See tensors of one shape as [OUTER, INNER, N], where N is the axis `dim`."""
    shape = tensors[0].shape
    if not shape:
        return Layout((1, 1, 1), (1,), [((1,), 1, 1) for _ in tensors])
    strides = [t.stride() for t in tensors]
    folded: list[tuple[int, list[int]]] = []  # sizes and strides of the axes beside `dim`, after folding neighbours
    for i, size in enumerate(shape):
        if i == dim or size == 1:
            continue
        here = [s[i] for s in strides]
        if folded and all(before == now * size for before, now in zip(folded[-1][1], here, strict=True)):
            folded[-1] = (folded[-1][0] * size, here)
        else:
            folded.append((size, here))
    folded = [(1, [0] * len(tensors))] * (2 - len(folded)) + folded
    steps = [s[dim] for s in strides]
    # Where the numbers of a row lie apart, those of INNER shall lie together.
    apart = [i for i, step in enumerate(steps) if step != 1]
    axes = [k for k, (size, _) in enumerate(folded) if size > 1]
    nearest = (
        min(reversed(axes), key=lambda k: min(folded[k][1][i] or math.inf for i in apart)) if apart and axes else -1
    )
    inner, inners = folded.pop(nearest)
    outers = tuple(size for size, _ in reversed(folded))
    along = [tuple(axis[i] for _, axis in reversed(folded)) for i in range(len(tensors))]
    return Layout((math.prod(outers), inner, shape[dim]), outers, list(zip(along, inners, steps, strict=True)))
