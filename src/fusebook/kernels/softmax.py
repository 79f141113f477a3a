"""Softmax along one axis, and its gradient: every row is read once and written once.

For a row of N elements,

    y[i] = exp(x[i] - max_j x[j]) / sum_k exp(x[k] - max_j x[j])
    dx[i] = y[i] * (dy[i] - sum_k y[k] dy[k])

A tensor of any shape and strides is seen as three axes, ``[OUTER, INNER, N]``: the axis that is normalised comes last,
the others become OUTER and INNER, and no element is moved for that. M = OUTER * INNER is the number of rows.

Fused: the maximum, the subtraction, the exponential, the sum and the division. A chain of separate operations reads
5MN + 2M elements and writes 3MN + 2M; the fused kernel reads MN and writes MN. For the gradient it is 6MN + M and
3MN + M against 2MN and MN.

A row of up to 128 KiB in float32, 104 KiB and more in half types and 64 KiB in the gradient of these, stays in the
registers of one program between its load and its store. A wider one is shared by several programs: each holds a part of
it, and they tell one another what they found there. So it is read once, too.

Limits: a row of float64 of more than 128 KiB, a wide row whose numbers do not lie side by side, and in half types the
gradient of a wide row of whole 16-byte vectors are read twice: once to find the maximum and the sum in one pass, once
to divide. Where there are fewer such rows than the GPU has room for, several programs share a row.
"""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._operator import (
    Operator,
    apply,
    check_alike,
    check_device,
    check_tensor,
    empty,
    gpu,
    launch,
    overlapping,
)
from ._tl import fill

__all__ = ["softmax", "softmax_backward", "softmax_eager"]

# The unfused chain ---------------------------------------------------------------------------------------------------


def softmax_eager(x: Tensor) -> Tensor:
    """Softmax over the last axis, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        M rows of N elements.

    Returns
    -------
    torch.Tensor
        Of the shape and dtype of `x`.
    """
    top = x.amax(-1, keepdim=True)  # read MN, write M
    shifted = x - top  # read MN + M, write MN
    e = shifted.exp()  # read MN, write MN
    total = e.sum(-1, keepdim=True)  # read MN, write M
    return e / total  # read MN + M, write MN: in all read 5MN + 2M, write 3MN + 2M


def _softmax_backward_eager(y: Tensor, dy: Tensor) -> Tensor:
    product = y * dy  # read 2MN, write MN
    dot = product.sum(-1, keepdim=True)  # read MN, write M
    centred = dy - dot  # read MN + M, write MN
    return y * centred  # read 2MN, write MN: in all read 6MN + M, write 3MN + M


# Kernels -------------------------------------------------------------------------------------------------------------
#
# Every kernel sees its tensors as [OUTER, INNER, N] and takes three strides of each. The output is contiguous. A
# program takes a tile of ROWS neighbours along INNER: several where rows are short, and 32 where the normalised axis is
# not the last one, since then it is INNER whose elements lie side by side in memory.
#
# N, outer and inner strides are counted in units of ALIGN elements. Triton knows of an integer only whether 16 divides
# it; in units of ALIGN it can see that rows of 1000 half-precision numbers begin at multiples of 16 bytes, and moves
# them by 16 bytes instead of 2. Addresses are int64, because tensors may have more than 2**31 elements.


@triton.jit
def _exp(x):
    """By way of exp2, which the hardware has. Unlike tl.exp it may round results below 1e-38 to zero: half the work."""
    return tl.exp2(x * 1.4426950408889634)  # log2(e)


@triton.jit
def _rows_of(program, INNER, ROWS: tl.constexpr, FLAT: tl.constexpr = False):
    """Of a program, its place along OUTER and its rows along INNER; with FLAT, OUTER is 1 and rows lie side by side."""
    tiles = 1 if FLAT else tl.cdiv(INNER, ROWS)
    # Two integer divisions are a visible part of a program that only loads, reduces and stores a kilobyte.
    outer = tl.zeros([], tl.int64) if FLAT else (program // tiles).to(tl.int64)
    tile = program if FLAT else program % tiles
    rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    return outer, rows


@triton.jit
def _along(outer, OUTERS, strides):
    """Where a place along OUTER begins. OUTER may be several axes: `OUTERS` are their sizes but that of the slowest."""
    if OUTERS is None:
        at = outer * strides
    else:
        at = tl.zeros([], tl.int64)
        for i in tl.static_range(len(OUTERS)):
            at += (outer % OUTERS[i]) * strides[i]
            outer = outer // OUTERS[i]
        at += outer * strides[len(OUTERS)]
    return at


@triton.jit
def _softmax_rows(
    y_ptr, x_ptr, INNER, N, y_outer, y_inner, y_step, x_outer, x_inner, x_step,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, FLAT: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """ROWS rows in registers, as CHUNKS tiles of BLOCK columns, of which only the last is masked."""
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N * ALIGN
    outer, rows = _rows_of(tl.program_id(0), INNER, ROWS, FLAT)
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    # One product in int64 instead of four, for the same reason.
    x_ptr += (
        rows[:, None] * N if FLAT else (_along(outer, OUTERS, x_outer) + rows[:, None] * x_inner) * ALIGN
    )  # [ROWS, 1]
    y_ptr += (
        rows[:, None] * N if FLAT else (_along(outer, OUTERS, y_outer) + rows[:, None] * y_inner) * ALIGN
    )  # [ROWS, 1]

    chunks = ()
    tops = tl.full([ROWS, BLOCK], float("-inf"), FLOAT)
    for i in tl.static_range(CHUNKS):
        inside = live if i < CHUNKS - 1 else live & (i * BLOCK + columns < N)
        at = (i * BLOCK + columns).to(tl.int64)
        x = tl.load(x_ptr + at * x_step, mask=inside, other=float("-inf"))  # [ROWS, BLOCK]; read MN
        x = x.to(FLOAT)  # bfloat16 keeps 8 bits: a sum of 256 such terms would lose the next one
        chunks += (x,)
        tops = tl.maximum(tops, x)
    # Chunks are combined element by element first, so that there is one reduction across threads, not one a chunk.
    top = tl.max(tops, 1)[:, None]  # [ROWS, 1]
    # Without its maximum, exp overflows from 89 on in float32. A row of nothing but -inf becomes NaN, as it should.
    exps = ()
    totals = tl.zeros([ROWS, BLOCK], FLOAT)
    for i in tl.static_range(CHUNKS):
        e = _exp(chunks[i] - top)
        exps += (e,)
        totals += e
    scale = 1 / tl.sum(totals, 1)[:, None]  # [ROWS, 1]: one division a row, not one an element
    for i in tl.static_range(CHUNKS):
        inside = live if i < CHUNKS - 1 else live & (i * BLOCK + columns < N)
        at = (i * BLOCK + columns).to(tl.int64)
        tl.store(y_ptr + at * y_step, exps[i] * scale, mask=inside)  # write MN


@triton.jit
def _unpacked(pairs, HALF: tl.constexpr):
    """Of pairs of half-precision numbers in 32-bit words, the lower and the upper ones in float32."""
    if HALF == tl.bfloat16:  # bfloat16 is the upper half of a float32
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        low = pairs.to(tl.int16).to(HALF, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.int16).to(HALF, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _softmax_pairs(
    y_ptr, x_ptr, N, y_inner, x_inner,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """One row of half-precision numbers, held as CHUNKS tiles of BLOCK pairs: two numbers a register.

    Where ALIGN is 1, rows may begin and end in the middle of a pair: the first and the last number are taken alone, and
    x and y begin alike. With TWICE, exponentials are computed twice and only the pairs are held.
    """
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    N = N * ALIGN
    x_pairs = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    y_pairs = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if ALIGN == 1:
        begin = row * x_inner
        head = (begin % 2).to(tl.int32)  # 1 where the row begins with the upper half of a pair
        tail = (N - head) % 2  # 1 where it ends with the lower half of one
        PAIRS = (N - head) // 2
        x_pairs += (begin + 1) // 2
        y_pairs += (begin + 1) // 2
        first = tl.load(x_ptr + begin, mask=head == 1, other=float("-inf")).to(tl.float32)
        final = tl.load(x_ptr + begin + N - 1, mask=tail == 1, other=float("-inf")).to(tl.float32)
    else:
        PAIRS = N // 2
        x_pairs += row * (x_inner * (ALIGN // 2))
        y_pairs += row * (y_inner * (ALIGN // 2))
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    NOTHING: tl.constexpr = -8323200 if HALF == tl.bfloat16 else -67044352  # two -inf

    chunks = ()
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK + columns
        if i < CHUNKS - 1:
            pairs = tl.load(x_pairs + at)  # [BLOCK]; read MN
        else:
            pairs = tl.load(x_pairs + at, mask=at < PAIRS, other=NOTHING)
        chunks += (pairs,)
        low, high = _unpacked(pairs, HALF)
        tops = tl.maximum(tops, tl.maximum(low, high))
    top = tl.max(tops, 0)
    if ALIGN == 1:
        top = tl.maximum(top, tl.maximum(first, final))
    # Always zero, but the compiler cannot know. Without it, it would see that the numbers and exponentials below are
    # those above and keep them, in twice the registers that the pairs take.
    zero = tl.minimum(N, 0) & top.to(tl.int32, bitcast=True)
    totals = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        low, high = _unpacked(chunks[i] ^ zero if TWICE else chunks[i], HALF)
        totals += _exp(low - top) + _exp(high - top)
    total = tl.sum(totals, 0)
    if ALIGN == 1:
        total += _exp(first - top) + _exp(final - top)
    scale = 1 / total
    zero = tl.minimum(N, 0) & total.to(tl.int32, bitcast=True)
    # Stored as single numbers, side by side: so they are also rounded two at a time, by one instruction.
    y_halves = y_pairs.to(tl.pointer_type(HALF), bitcast=True)
    for i in tl.static_range(CHUNKS):
        low, high = _unpacked(chunks[i] ^ zero if TWICE else chunks[i], HALF)
        y = tl.join(_exp(low - top) * scale, _exp(high - top) * scale)  # [BLOCK, 2]
        y = tl.reshape(y, [2 * BLOCK]).to(HALF)
        at = 2 * i * BLOCK + tl.arange(0, 2 * BLOCK)
        if i < CHUNKS - 1:
            tl.store(y_halves + at, y)  # write MN
        else:
            tl.store(y_halves + at, y, mask=at < 2 * PAIRS)
    if ALIGN == 1:
        tl.store(y_ptr + begin, _exp(first - top) * scale, mask=head == 1)
        tl.store(y_ptr + begin + N - 1, _exp(final - top) * scale, mask=tail == 1)


@triton.jit
def _merge(tops, totals):
    """Maximum and sum of a row from maxima of its pieces and sums of exponentials relative to them."""
    top = tl.max(tops, 1)[:, None]  # [ROWS, 1]
    # A piece that has seen nothing but -inf has the sum 0; relative to 0 it stays 0, relative to -inf it would be NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * _exp(tops - shift), 1)[:, None]  # [ROWS, 1]
    return top, total


@triton.jit
def _top_and_total(
    x_ptr, live, begin, end, x_step, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FLOAT: tl.constexpr
):  # fmt: skip
    """Maximum and sum of the columns from `begin` to `end`, in one pass.

    Every GROUP neighbours, which one thread holds, share a running maximum: a sum is rescaled once a group and not once
    an element, which would double the exponentials. The groups meet at the end.
    """
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)  # [1, BLOCK]
    tops = tl.full([ROWS, BLOCK // GROUP], float("-inf"), FLOAT)
    totals = tl.zeros([ROWS, BLOCK // GROUP], FLOAT)
    for start in range(begin, end, BLOCK):
        at = start + columns
        x = tl.load(x_ptr + at * x_step, mask=live & (at < end), other=float("-inf"))  # [ROWS, BLOCK]; read MN
        x = tl.reshape(x.to(FLOAT), [ROWS, BLOCK // GROUP, GROUP])
        new = tl.maximum(tops, tl.max(x, 2))  # [ROWS, BLOCK / GROUP]
        shift = tl.where(new == float("-inf"), 0.0, new)
        totals = totals * _exp(tops - shift) + tl.sum(_exp(x - shift[:, :, None]), 2)
        tops = new
    return _merge(tops, totals)


@triton.jit
def _divided(y_ptr, x_ptr, live, begin, end, y_step, x_step, top, total, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The second pass, from the end back: what was read last is likeliest to be in a cache still."""
    scale = 1 / total  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)  # [1, BLOCK]
    last = begin + (tl.cdiv(end - begin, BLOCK) - 1) * BLOCK
    for start in range(begin, end, BLOCK):
        at = last - (start - begin) + columns
        inside = live & (at < end)
        x = tl.load(x_ptr + at * x_step, mask=inside, other=0.0, eviction_policy="evict_first")  # read MN again
        y = _exp(x.to(top.dtype) - top) * scale  # [ROWS, BLOCK]
        tl.store(y_ptr + at * y_step, y, mask=inside)  # write MN


@triton.jit
def _softmax_online(
    y_ptr, x_ptr, INNER, N, y_outer, y_inner, y_step, x_outer, x_inner, x_step,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """ROWS rows of any width, read twice."""
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N.to(tl.int64) * ALIGN
    outer, rows = _rows_of(tl.program_id(0), INNER, ROWS)
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    x_ptr += (_along(outer, OUTERS, x_outer) + rows[:, None] * x_inner) * ALIGN  # [ROWS, 1]
    y_ptr += (_along(outer, OUTERS, y_outer) + rows[:, None] * y_inner) * ALIGN  # [ROWS, 1]
    top, total = _top_and_total(x_ptr, live, 0, N, x_step, ROWS, BLOCK, GROUP, FLOAT)
    _divided(y_ptr, x_ptr, live, 0, N, y_step, x_step, top, total, ROWS, BLOCK)


@triton.jit
def _softmax_parts(
    tops_ptr, totals_ptr, x_ptr, INNER, N, SPAN, x_outer, x_inner, x_step,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """Few wide rows, first half: PARTS programs share a row, and each leaves the maximum and sum of SPAN columns."""
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N.to(tl.int64) * ALIGN
    part = tl.program_id(0) % PARTS
    outer, rows = _rows_of(tl.program_id(0) // PARTS, INNER, ROWS)
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    x_ptr += (_along(outer, OUTERS, x_outer) + rows[:, None] * x_inner) * ALIGN  # [ROWS, 1]
    begin = part.to(tl.int64) * SPAN
    top, total = _top_and_total(x_ptr, live, begin, tl.minimum(begin + SPAN, N), x_step, ROWS, BLOCK, GROUP, FLOAT)
    at = (outer * INNER + rows[:, None]) * PARTS + part  # [ROWS, 1]
    tl.store(tops_ptr + at, top, mask=live)
    tl.store(totals_ptr + at, total, mask=live)


@triton.jit
def _softmax_parts_divided(
    y_ptr, tops_ptr, totals_ptr, x_ptr, INNER, N, SPAN, y_outer, y_inner, y_step, x_outer, x_inner, x_step,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """Few wide rows, second half: every program merges what all parts of its rows found and divides its own columns."""
    N = N.to(tl.int64) * ALIGN
    part = tl.program_id(0) % PARTS
    outer, rows = _rows_of(tl.program_id(0) // PARTS, INNER, ROWS)
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    x_ptr += (_along(outer, OUTERS, x_outer) + rows[:, None] * x_inner) * ALIGN  # [ROWS, 1]
    y_ptr += (_along(outer, OUTERS, y_outer) + rows[:, None] * y_inner) * ALIGN  # [ROWS, 1]
    at = (outer * INNER + rows[:, None]) * PARTS + tl.arange(0, PARTS)[None, :]  # [ROWS, PARTS]
    tops = tl.load(tops_ptr + at, mask=live, other=float("-inf"))
    totals = tl.load(totals_ptr + at, mask=live, other=0.0)
    top, total = _merge(tops, totals)
    begin = part.to(tl.int64) * SPAN
    _divided(y_ptr, x_ptr, live, begin, tl.minimum(begin + SPAN, N), y_step, x_step, top, total, ROWS, BLOCK)


# Rows beyond the registers of one program ----------------------------------------------------------------------------
#
# Rows of any width and beginning are taken by whole vectors of VEC numbers, 16 bytes. The first and the last vector of
# a row may hold numbers of its neighbours: these are read and passed over, and written by whoever owns them. Both
# tensors' rows must begin at the same place within a vector; where they do not, VEC is 1.


@triton.jit
def _window(begin, N, first, SIZE, VEC: tl.constexpr):
    """SIZE numbers of a row that begins at `begin`, the first of them `first` behind the row's first vector.

    Returns where they stand, and from which on and below which they are the row's own.
    """
    head = (begin % VEC).to(tl.int32)
    return (begin // VEC) * VEC + first, head - first, tl.minimum(SIZE, head + N - first)


@triton.jit
def _taken(x_ptr, at, inner, low, high, OTHER: tl.constexpr, VEC: tl.constexpr):
    """Numbers `inner` of a window, OTHER in place of what is not the row's own."""
    x = tl.load(x_ptr + at + inner, mask=inner < (high + VEC - 1) // VEC * VEC, other=OTHER)
    if VEC > 1:
        if (low > 0) | (high % VEC != 0):
            x = tl.where((inner >= low) & (inner < high), x, OTHER).to(x.dtype)
    return x


@triton.jit
def _put(y_ptr, y, inner, low, high, VEC: tl.constexpr):
    """Store the row's own numbers of a window: whole vectors, and at the row's ends single numbers."""
    y = y.to(y_ptr.dtype.element_ty)
    if VEC == 1:
        tl.store(y_ptr + inner, y, mask=inner < high)
    else:
        begin = (tl.maximum(low, 0) + VEC - 1) // VEC * VEC
        end = high // VEC * VEC
        tl.store(y_ptr + inner, y, mask=(inner >= begin) & (inner < end))
        if (low > 0) | (high % VEC != 0):
            own = (inner >= low) & (inner < high)
            tl.store(y_ptr + inner, y, mask=own & ((inner < begin) | (inner >= end)))


@triton.jit
def _again(x, zero, ANEW: tl.constexpr):
    """Half-precision numbers in float32; ANEW: converted again, not held meanwhile in twice the registers."""
    if ANEW:
        x = (x.to(tl.int16, bitcast=True) ^ zero).to(x.dtype, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _softmax_whole(
    y_ptr, x_ptr, INNER, N, y_outer, y_inner, x_outer, x_inner,
    VEC: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, ANEW: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """One row, one program: CHUNKS tiles, held as they were loaded. Half types take half the registers so."""
    outer = (tl.program_id(0) // INNER).to(tl.int64)
    inner = (tl.program_id(0) % INNER).to(tl.int64)
    at, low, high = _window(_along(outer, OUTERS, x_outer) + inner * x_inner, N, 0, CHUNKS * BLOCK, VEC)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    chunks = ()
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(CHUNKS):
        if i < CHUNKS - 2:
            x = tl.load(x_ptr + at + i * BLOCK + columns)  # [BLOCK]; read MN
        else:  # the last tile may hold nothing but what a first vector has pushed there
            inside = i * BLOCK + columns < (high + VEC - 1) // VEC * VEC
            x = tl.load(x_ptr + at + i * BLOCK + columns, mask=inside, other=float("-inf"))
        if i == 0 or i >= CHUNKS - 2:
            own = (i * BLOCK + columns >= low) & (i * BLOCK + columns < high)
            x = tl.where(own, x, float("-inf")).to(x_ptr.dtype.element_ty)
        chunks += (x,)
        tops = tl.maximum(tops, x.to(tl.float32))
    top = tl.max(tops, 0)
    # Always zero, but the compiler cannot know, as in `_softmax_pairs`.
    zero = (tl.minimum(N, 0) & top.to(tl.int32, bitcast=True)).to(tl.int16)
    totals = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        totals += _exp(_again(chunks[i], zero, ANEW) - top)
    total = tl.sum(totals, 0)
    scale = 1 / total
    zero = (tl.minimum(N, 0) & total.to(tl.int32, bitcast=True)).to(tl.int16)
    y_ptr += _window(_along(outer, OUTERS, y_outer) + inner * y_inner, N, 0, CHUNKS * BLOCK, VEC)[0]
    for i in tl.static_range(CHUNKS):
        y = _exp(_again(chunks[i], zero, ANEW) - top) * scale
        if i == 0 or i >= CHUNKS - 2:
            _put(y_ptr + i * BLOCK, y, columns, low - i * BLOCK, tl.minimum(high - i * BLOCK, BLOCK), VEC)  # write MN
        else:
            tl.store(y_ptr + i * BLOCK + columns, y.to(y_ptr.dtype.element_ty))


# Several programs share a row: each takes a part of it, and leaves what it found there on a board, one word a part, for
# the others to read. A word is zero until it is written, and never zero afterwards, so that nobody reads half of one.
#
# All programs of a row run at once, or nearly so, and the words of the others come soon. But nothing promises that: a
# GPU may start programs in any order, and be busy with something else. So nobody waits for ever. A program that has
# looked TRIES times finds out for itself what is missing, by the very steps of the program that did not come, and so to
# the same bits. Whatever the order of the programs, each of them ends, and each comes to the same result. (Interpreted
# programs run one after another: there the first of each row does this.)


@triton.jit
def _words(board_ptr, lanes, PARTS, NOTHING: tl.constexpr, TRIES: tl.constexpr):
    """The words of a row [LANES], as soon as all are there or after so many tries; and the first that is not, or LANES.

    There are as many lanes as threads or more: each word is loaded by one thread, and the number that is returned has
    gone through memory that all threads share. So all of them take the same way from here.
    """
    # volatile: from where other multiprocessors' words arrive, each time anew.
    words = tl.load(board_ptr + lanes, mask=lanes < PARTS, other=NOTHING, volatile=True)
    missing = _missing(words, lanes)
    tries = 0
    while (missing < lanes.shape[0]) & (tries < TRIES):
        words = tl.load(board_ptr + lanes, mask=lanes < PARTS, other=NOTHING, volatile=True)
        missing = _missing(words, lanes)
        tries += 1
    return words, missing


@triton.jit
def _missing(words, lanes):
    """The first word that is zero, or their number."""
    return tl.min(tl.where(words == 0, lanes, lanes.shape[0]), 0)


@triton.jit
def _left(board_ptr, word):
    """Leave a word, whole and at once. No order is asked for: it is all that there is to see."""
    tl.atomic_xchg(board_ptr, word, sem="relaxed")


@triton.jit
def _part(x_ptr, begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Exponentials [BLOCK] of a part of a row, relative to the part's maximum; that and their sum, in one word."""
    at, low, high = _window(begin, N, part * SPAN, SPAN, VEC)
    x = _taken(x_ptr, at, tl.arange(0, BLOCK), low, high, float("-inf"), VEC).to(tl.float32)  # [BLOCK]; read MN
    top = tl.max(x, 0)
    e = _exp(x - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(e, 0)
    # Never zero: the sum is one at least, or the maximum is -inf.
    upper = top.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return e, top, upper | (total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _divided_part(y_ptr, e, top, words, begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Store a part of a row: its exponentials over the sum of all, by the words of all parts."""
    tops = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)  # [LANES]
    totals = words.to(tl.int32).to(tl.float32, bitcast=True)
    highest = tl.max(tops, 0)
    total = tl.sum(totals * _exp(tops - tl.where(highest == float("-inf"), 0.0, highest)), 0)
    _, low, high = _window(begin, N, part * SPAN, SPAN, VEC)
    _put(y_ptr, e * (_exp(top - highest) / total), tl.arange(0, BLOCK), low, high, VEC)  # write MN


@triton.jit
def _softmax_shared(
    y_ptr, x_ptr, board_ptr, INNER, N, y_outer, y_inner, x_outer, x_inner, SPAN, PARTS,
    VEC: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr, LATE: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """A row of any width by PARTS programs, each of which holds up to SPAN of its numbers: SPAN in vectors."""
    NOTHING: tl.constexpr = -36028797018963968  # the word of a part without numbers: -inf and 0
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    outer = (row // INNER).to(tl.int64)
    inner = (row % INNER).to(tl.int64)
    begin = _along(outer, OUTERS, x_outer) + inner * x_inner
    SPAN = SPAN * VEC
    e, top, word = _part(x_ptr, begin, N, part, SPAN, VEC, BLOCK)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros on the board; the row is here already
    board_ptr += row.to(tl.int64) * PARTS
    _left(board_ptr + part, word)
    lanes = tl.arange(0, LANES)  # [LANES]
    words, missing = _words(board_ptr, lanes, PARTS, NOTHING, TRIES)
    y_ptr += _window(_along(outer, OUTERS, y_outer) + inner * y_inner, N, part * SPAN, SPAN, VEC)[0]
    if missing == LANES:
        _divided_part(y_ptr, e, top, words, begin, N, part, SPAN, VEC, BLOCK)
    else:
        while missing < LANES:
            _, _, word = _part(x_ptr, begin, N, missing, SPAN, VEC, BLOCK)
            _left(board_ptr + missing, word)  # so that others find it
            words = tl.where(lanes == missing, word, words)
            missing = _missing(words, lanes)
        # Its own numbers again, rather than held meanwhile. missing - LANES is zero here, but the compiler cannot know,
        # and keeps no addresses for it.
        part += missing - LANES
        e, top, _ = _part(x_ptr, begin, N, part, SPAN, VEC, BLOCK)
        _divided_part(y_ptr, e, top, words, begin, N, part, SPAN, VEC, BLOCK)


@triton.jit
def _softmax_backward_whole(
    dx_ptr, y_ptr, dy_ptr, INNER, N, y_outer, y_inner, dy_outer, dy_inner,
    VEC: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """The gradient of one row by one program, y and dy held as CHUNKS tiles of whole vectors. dx lies as y does."""
    outer = (tl.program_id(0) // INNER).to(tl.int64)
    inner = (tl.program_id(0) % INNER).to(tl.int64)
    at, low, high = _window(_along(outer, OUTERS, y_outer) + inner * y_inner, N, 0, CHUNKS * BLOCK, VEC)
    y_ptr += at
    dx_ptr += at
    dy_ptr += _window(_along(outer, OUTERS, dy_outer) + inner * dy_inner, N, 0, CHUNKS * BLOCK, VEC)[0]
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    ys = ()
    dys = ()
    dots = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        inside = i * BLOCK + columns < (high + VEC - 1) // VEC * VEC
        mask = None if i < CHUNKS - 2 else inside
        y = tl.load(y_ptr + i * BLOCK + columns, mask=mask)  # [BLOCK]; read MN
        dy = tl.load(dy_ptr + i * BLOCK + columns, mask=mask)  # [BLOCK]; read MN
        product = y.to(tl.float32) * dy.to(tl.float32)
        if i == 0 or i >= CHUNKS - 2:
            product = tl.where((i * BLOCK + columns >= low) & (i * BLOCK + columns < high), product, 0.0)
        ys += (y,)
        dys += (dy,)
        dots += product
    dot = tl.sum(dots, 0)
    for i in tl.static_range(CHUNKS):
        dx = ys[i].to(tl.float32) * (dys[i].to(tl.float32) - dot)
        if i == 0 or i >= CHUNKS - 2:
            _put(dx_ptr + i * BLOCK, dx, columns, low - i * BLOCK, tl.minimum(high - i * BLOCK, BLOCK), VEC)  # write MN
        else:
            tl.store(dx_ptr + i * BLOCK + columns, dx.to(dx_ptr.dtype.element_ty))


@triton.jit
def _part_dot(y_ptr, dy_ptr, y_begin, dy_begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """y and dy [BLOCK] of a part of a row, with neighbours' numbers at its ends; the sum of products, as a word."""
    inner = tl.arange(0, BLOCK)
    at, low, high = _window(y_begin, N, part * SPAN, SPAN, VEC)
    inside = inner < (high + VEC - 1) // VEC * VEC
    y = tl.load(y_ptr + at + inner, mask=inside, other=0.0)  # [BLOCK]; read MN
    at = _window(dy_begin, N, part * SPAN, SPAN, VEC)[0]
    dy = tl.load(dy_ptr + at + inner, mask=inside, other=0.0)  # [BLOCK]; read MN
    products = y.to(tl.float32) * dy.to(tl.float32)
    if VEC > 1:
        if (low > 0) | (high % VEC != 0):
            products = tl.where((inner >= low) & (inner < high), products, 0.0)
    word = tl.sum(products, 0).to(tl.int32, bitcast=True)
    return y, dy, tl.where(word == 0, -2147483648, word)  # -0.0 in place of 0.0, whose word would be zero


@triton.jit
def _centred_part(dx_ptr, y, dy, words, begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Store a part of a gradient, by the words of all parts."""
    dot = tl.sum(words.to(tl.float32, bitcast=True), 0)
    at, low, high = _window(begin, N, part * SPAN, SPAN, VEC)
    _put(dx_ptr + at, y.to(tl.float32) * (dy.to(tl.float32) - dot), tl.arange(0, BLOCK), low, high, VEC)  # write MN


@triton.jit
def _softmax_backward_shared(
    dx_ptr, y_ptr, dy_ptr, board_ptr, INNER, N, y_outer, y_inner, dy_outer, dy_inner, SPAN, PARTS,
    VEC: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr, LATE: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """The gradient of a row of any width by PARTS programs, as `_softmax_shared`: a word is a sum of y dy."""
    NOTHING: tl.constexpr = -2147483648  # -0.0
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    outer = (row // INNER).to(tl.int64)
    inner = (row % INNER).to(tl.int64)
    y_begin = _along(outer, OUTERS, y_outer) + inner * y_inner
    dy_begin = _along(outer, OUTERS, dy_outer) + inner * dy_inner
    SPAN = SPAN * VEC
    y, dy, word = _part_dot(y_ptr, dy_ptr, y_begin, dy_begin, N, part, SPAN, VEC, BLOCK)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros on the board; the row is here already
    board_ptr += row.to(tl.int64) * PARTS
    _left(board_ptr + part, word)
    lanes = tl.arange(0, LANES)  # [LANES]
    words, missing = _words(board_ptr, lanes, PARTS, NOTHING, TRIES)
    if missing == LANES:
        _centred_part(dx_ptr, y, dy, words, y_begin, N, part, SPAN, VEC, BLOCK)
    else:
        while missing < LANES:
            _, _, word = _part_dot(y_ptr, dy_ptr, y_begin, dy_begin, N, missing, SPAN, VEC, BLOCK)
            _left(board_ptr + missing, word)
            words = tl.where(lanes == missing, word, words)
            missing = _missing(words, lanes)
        part += missing - LANES
        y, dy, _ = _part_dot(y_ptr, dy_ptr, y_begin, dy_begin, N, part, SPAN, VEC, BLOCK)
        _centred_part(dx_ptr, y, dy, words, y_begin, N, part, SPAN, VEC, BLOCK)


@triton.jit
def _softmax_backward_rows(
    dx_ptr, y_ptr, dy_ptr, INNER, N, y_outer, y_inner, y_step, dy_outer, dy_inner, dy_step,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, FLAT: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """The gradient of ROWS rows; y and dy stay in registers as CHUNKS tiles. dx lies in memory as y does."""
    FLOAT: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N * ALIGN
    outer, rows = _rows_of(tl.program_id(0), INNER, ROWS, FLAT)
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    dx_ptr += (_along(outer, OUTERS, y_outer) + rows[:, None] * y_inner) * ALIGN  # [ROWS, 1]
    y_ptr += (_along(outer, OUTERS, y_outer) + rows[:, None] * y_inner) * ALIGN  # [ROWS, 1]
    dy_ptr += (_along(outer, OUTERS, dy_outer) + rows[:, None] * dy_inner) * ALIGN  # [ROWS, 1]

    ys = ()
    dys = ()
    dots = tl.zeros([ROWS, BLOCK], FLOAT)
    for i in tl.static_range(CHUNKS):
        inside = live if i < CHUNKS - 1 else live & (i * BLOCK + columns < N)
        at = (i * BLOCK + columns).to(tl.int64)
        y = tl.load(y_ptr + at * y_step, mask=inside, other=0.0)  # [ROWS, BLOCK]; read MN
        dy = tl.load(dy_ptr + at * dy_step, mask=inside, other=0.0)  # [ROWS, BLOCK]; read MN
        ys += (y,)
        dys += (dy,)
        dots += y.to(FLOAT) * dy.to(FLOAT)
    dot = tl.sum(dots, 1)[:, None]  # [ROWS, 1]
    for i in tl.static_range(CHUNKS):
        inside = live if i < CHUNKS - 1 else live & (i * BLOCK + columns < N)
        at = (i * BLOCK + columns).to(tl.int64)
        tl.store(dx_ptr + at * y_step, ys[i].to(FLOAT) * (dys[i].to(FLOAT) - dot), mask=inside)  # write MN


@triton.jit
def _dot(
    y_ptr, dy_ptr, live, begin, end, y_step, dy_step, ROWS: tl.constexpr, BLOCK: tl.constexpr, FLOAT: tl.constexpr
):
    """Sum of y dy over the columns from `begin` to `end`."""
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)  # [1, BLOCK]
    dots = tl.zeros([ROWS, BLOCK], FLOAT)
    for start in range(begin, end, BLOCK):
        at = start + columns
        inside = live & (at < end)
        y = tl.load(y_ptr + at * y_step, mask=inside, other=0.0)  # [ROWS, BLOCK]; read MN
        dy = tl.load(dy_ptr + at * dy_step, mask=inside, other=0.0)  # [ROWS, BLOCK]; read MN
        dots += y.to(FLOAT) * dy.to(FLOAT)
    return tl.sum(dots, 1)[:, None]  # [ROWS, 1]


@triton.jit
def _centred(dx_ptr, y_ptr, dy_ptr, live, begin, end, y_step, dy_step, dot, BLOCK: tl.constexpr):
    """The second pass over y and dy, from the end back."""
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)  # [1, BLOCK]
    last = begin + (tl.cdiv(end - begin, BLOCK) - 1) * BLOCK
    for start in range(begin, end, BLOCK):
        at = last - (start - begin) + columns
        inside = live & (at < end)
        y = tl.load(y_ptr + at * y_step, mask=inside, other=0.0, eviction_policy="evict_first")  # read MN again
        dy = tl.load(dy_ptr + at * dy_step, mask=inside, other=0.0, eviction_policy="evict_first")  # read MN again
        tl.store(dx_ptr + at * y_step, y.to(dot.dtype) * (dy.to(dot.dtype) - dot), mask=inside)  # write MN


@triton.jit
def _softmax_backward_twice(
    dx_ptr, y_ptr, dy_ptr, INNER, N, y_outer, y_inner, y_step, dy_outer, dy_inner, dy_step,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """The gradient of ROWS rows of any width; y and dy are read twice."""
    FLOAT: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N.to(tl.int64) * ALIGN
    outer, rows = _rows_of(tl.program_id(0), INNER, ROWS)
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    dx_ptr += (_along(outer, OUTERS, y_outer) + rows[:, None] * y_inner) * ALIGN  # [ROWS, 1]
    y_ptr += (_along(outer, OUTERS, y_outer) + rows[:, None] * y_inner) * ALIGN  # [ROWS, 1]
    dy_ptr += (_along(outer, OUTERS, dy_outer) + rows[:, None] * dy_inner) * ALIGN  # [ROWS, 1]
    dot = _dot(y_ptr, dy_ptr, live, 0, N, y_step, dy_step, ROWS, BLOCK, FLOAT)
    _centred(dx_ptr, y_ptr, dy_ptr, live, 0, N, y_step, dy_step, dot, BLOCK)


@triton.jit
def _softmax_backward_parts(
    dots_ptr, y_ptr, dy_ptr, INNER, N, SPAN, y_outer, y_inner, y_step, dy_outer, dy_inner, dy_step,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """Few wide rows, first half: PARTS programs share a row, and each leaves its sum of y dy over SPAN columns."""
    FLOAT: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N.to(tl.int64) * ALIGN
    part = tl.program_id(0) % PARTS
    outer, rows = _rows_of(tl.program_id(0) // PARTS, INNER, ROWS)
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    y_ptr += (_along(outer, OUTERS, y_outer) + rows[:, None] * y_inner) * ALIGN  # [ROWS, 1]
    dy_ptr += (_along(outer, OUTERS, dy_outer) + rows[:, None] * dy_inner) * ALIGN  # [ROWS, 1]
    begin = part.to(tl.int64) * SPAN
    dot = _dot(y_ptr, dy_ptr, live, begin, tl.minimum(begin + SPAN, N), y_step, dy_step, ROWS, BLOCK, FLOAT)
    tl.store(dots_ptr + (outer * INNER + rows[:, None]) * PARTS + part, dot, mask=live)


@triton.jit
def _softmax_backward_parts_centred(
    dx_ptr, dots_ptr, y_ptr, dy_ptr, INNER, N, SPAN, y_outer, y_inner, y_step, dy_outer, dy_inner, dy_step,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """Few wide rows, second half: every program adds up the sums of its rows and finishes its own columns."""
    N = N.to(tl.int64) * ALIGN
    part = tl.program_id(0) % PARTS
    outer, rows = _rows_of(tl.program_id(0) // PARTS, INNER, ROWS)
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    dx_ptr += (_along(outer, OUTERS, y_outer) + rows[:, None] * y_inner) * ALIGN  # [ROWS, 1]
    y_ptr += (_along(outer, OUTERS, y_outer) + rows[:, None] * y_inner) * ALIGN  # [ROWS, 1]
    dy_ptr += (_along(outer, OUTERS, dy_outer) + rows[:, None] * dy_inner) * ALIGN  # [ROWS, 1]
    at = (outer * INNER + rows[:, None]) * PARTS + tl.arange(0, PARTS)[None, :]  # [ROWS, PARTS]
    dot = tl.sum(tl.load(dots_ptr + at, mask=live, other=0.0), 1)[:, None]  # [ROWS, 1]
    begin = part.to(tl.int64) * SPAN
    _centred(dx_ptr, y_ptr, dy_ptr, live, begin, tl.minimum(begin + SPAN, N), y_step, dy_step, dot, BLOCK)


# Plans ---------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a launch is made: which kernel, with which constants, by how many programs of how many warps.

    Attributes
    ----------
    kernel : str
        ``"rows"``, ``"pairs"``, ``"whole"``, ``"shared"``, ``"twice"`` or ``"parts"``.
    constants : dict
        The kernel's ``constexpr`` arguments.
    programs : int
        The grid.
    warps : int
        Warps per program.
    span : int
        Columns of a part; 0 where a row belongs to one program.
    parts : int
        Programs that share a row.
    registers : int, optional
        The most that a thread takes; None leaves it to the compiler.
    """

    kernel: str
    constants: Mapping[str, int]
    programs: int
    warps: int
    span: int = 0
    parts: int = 1
    registers: int | None = None


def _softmax_plan(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    *,
    processors: int = 132,
    last: bool = True,
    pairs: bool = False,
    vector: int = 1,
    flat: bool = False,
    tensors: int = 1,
) -> Plan:
    """Choose the kernel and its constants.

    Parameters
    ----------
    sizes : tuple of int
        OUTER, INNER and N.
    dtype : torch.dtype
    capability : tuple of int, optional
        The GPU's; None for the interpreter.
    processors : int
        Its multiprocessors.
    last : bool
        Whether the elements of a row lie side by side; otherwise those along INNER do.
    pairs : bool
        Whether rows can be read as 32-bit pairs of half-precision numbers.
    vector : int
        Numbers in 16 bytes, where each row begins at the same place within 16 bytes in every tensor; otherwise 1.
    flat : bool
        Whether OUTER is 1 and rows lie side by side in every tensor.
    tensors : int
        How many tensors a row keeps in registers: 1 for softmax, 2 for its gradient.

    Returns
    -------
    Plan
    """
    outer, inner, n = sizes
    size = dtype.itemsize
    kernel, rows, held_twice = "rows", 1, False
    # Rows of half types that lie across 16-byte vectors are slow as pairs where they are wide.
    least = 12800 if vector > 1 and n % vector else 40960 if pairs else 32768
    if not last:
        # 32 neighbours along INNER, so that a warp reads 64 bytes and more in one piece. Eight elements a thread and a
        # tile, 64 in all: more would spill. Beyond that two passes, in tiles of at most 64 KiB, since a tile that is
        # read along one axis and written along the other passes through shared memory.
        rows = min(32, triton.next_power_of_2(inner))
        numbers = rows * triton.next_power_of_2(n) * tensors * max(1, size // 4)
        if rows == 32 and 32768 < numbers <= 65536:
            rows, numbers = 16, numbers // 2
        if numbers <= 32768:
            warps = 4 if numbers <= 8192 else 16
            block = max(1, (1024 if warps == 4 else 2048) // rows)
        else:
            kernel, warps = "twice", 16
            rows = min(64, triton.next_power_of_2(inner))
            block = 65536 // max(4, size) // rows
        block = min(block, triton.next_power_of_2(n))
    elif size == 2 and tensors == 1 and least < n <= 13 * 4096:
        # 13 tiles are 52 registers of each of 512 threads; more would spill.
        chunks = triton.cdiv(n + vector - 1, 4096)
        constants = {"VEC": vector, "BLOCK": 4096, "CHUNKS": chunks, "ANEW": 0}
        return Plan("whole", constants, outer * inner, 16)
    elif pairs and tensors == 1 and (n % 2 or n == 4096 or n > 12800) and n <= 65536:
        kernel = "pairs"
        if n < 2048:
            block, warps = 64, 1
        elif n < 8192:
            block, warps = 256, 4
        elif n <= 16384:
            block, warps = 2048, 16
        elif n <= 20480:
            block, warps = 2048, 8
        elif n <= 40960:
            block, warps = (4096, 32) if 24576 < n < 32768 else (2048, 16)
        else:
            block, warps = 8192, 32
        # Up to 80 numbers a thread the exponentials are kept; with more there would be one row at a time on a
        # multiprocessor, which waits for its loads and then for its stores.
        # Where one row more fits on a multiprocessor if only the pairs are held, that is faster for fewer numbers too.
        held_twice = n == 4096 or 12800 < n <= 16384 or n > 24576
    elif size == 2 and tensors == 2 and vector > 1 and n % 4 and 512 < n <= 32768:
        # Odd widths, whose rows lie across vectors.
        block, warps = _tile(n, size, tensors)
        chunks = triton.cdiv(n + vector - 1, block)
        return Plan("whole", {"VEC": vector, "BLOCK": block, "CHUNKS": chunks}, outer * inner, warps)
    elif n <= {2: 32768, 4: 32768, 8: 16384 // tensors}[size]:
        # float32 rows of 128 KiB still fit: they leave room for one program of 32 warps, which is enough.
        block, warps = _tile(n, size, tensors)
        rows = max(1, (1024 if size == 2 else 512) // triton.next_power_of_2(n))
    elif (
        # A gradient's aligned rows of half types are as fast read twice.
        (size == 4 or (size == 2 and (tensors == 1 or n % 8)))
        and (plan := _shared_plan(sizes, size, capability, processors, vector, tensors))
    ):
        return plan
    else:
        # The second pass finds in L2 what is left there of the first: the larger the tile, the fewer rows at once.
        kernel, warps = "twice", 32
        block = 32768 if size == 4 and tensors == 1 else 16384 if size < 8 else 8192
    columns = n // 2 if kernel == "pairs" else n
    chunks = max(1, triton.cdiv(columns, block))
    if capability is None and kernel != "pairs":
        # The interpreter's cost is programs times operations, whatever their size.
        tile = block * chunks if kernel == "rows" else block
        most = 1 << max(1, 65536 // tile).bit_length() - 1
        rows = max(rows, min(triton.next_power_of_2(inner), most))
    tiles = outer * triton.cdiv(inner, rows)
    if kernel == "pairs":
        return Plan(kernel, {"BLOCK": block, "CHUNKS": chunks, "TWICE": held_twice}, tiles, warps)
    if kernel == "rows":
        return Plan(kernel, {"ROWS": rows, "BLOCK": block, "CHUNKS": chunks, "FLAT": flat}, tiles, warps)
    # Where rows are fewer than multiprocessors, the rest of the GPU would watch: share each row among several programs,
    # about eight for each multiprocessor in all, each with a tile of columns at least.
    few = tiles < processors if last else 2 * tiles <= processors
    if last and few:
        block, warps = min(block, 16384 // max(4, size)), 8
    parts = min(8 * processors // max(1, tiles), triton.cdiv(n, block), 512)
    group = {"GROUP": min(block, 16 // size) if last else 1} if tensors == 1 else {}
    constants = {"ROWS": rows, "BLOCK": block, **group}
    if few and parts > 1:
        parts = triton.next_power_of_2(parts)
        span = triton.cdiv(triton.cdiv(n, parts), block) * block
        return Plan("parts", constants | {"PARTS": parts}, tiles * parts, warps, span)
    return Plan("twice", constants, tiles, warps)


def _shared_plan(
    sizes: tuple[int, int, int],
    size: int,
    capability: tuple[int, int] | None,
    processors: int,
    vector: int,
    tensors: int,
) -> Plan | None:
    """Rows whose parts are held by several programs; None where the GPU has no room for all parts of a row at once.

    The width alone decides how a row is cut: so a row's result is the same, bit for bit, however many rows there are.
    """
    outer, inner, n = sizes
    # Small parts start and end quickly, large ones are few: both count where all parts of a row meet.
    block, warps, registers = (4096, 4, 64) if n <= 2**18 else (8192, 8, 64)
    if tensors == 2:
        if size == 4:
            warps *= 2  # two numbers in place of one
        else:
            registers = 80
    if capability is None:
        # The interpreter's cost is programs times operations: few large parts, and of few rows only.
        if outer * inner > 8:
            return None
        block = 16384
    # Parts are whole lines of 128 bytes, and a row may lie across one vector more than it fills.
    line = 128 // size
    reach = n + vector - 1
    span = triton.cdiv(triton.cdiv(reach, triton.cdiv(reach, block)), line) * line
    parts = triton.cdiv(reach, span)
    if parts > 2 * processors:
        return None
    constants = {
        "VEC": vector,
        "BLOCK": block,
        "LANES": max(32 * warps, triton.next_power_of_2(parts)),
        "TRIES": 0 if capability is None else 4096,  # some milliseconds
    }
    # About half of a thread's registers hold numbers. Left to itself, the compiler takes more, and fewer parts at once
    # are under way.
    return Plan("shared", constants, outer * inner * parts, warps, span, parts, registers)


def _tile(n: int, size: int, tensors: int) -> tuple[int, int]:
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
        return whole, 1 if n <= 512 else 2 if n == 1024 else 4
    if n < 4096:
        return 1024 // wide, 8
    if n < 8192:
        return 2048 // wide, 16
    if n <= 20480:
        return 2048 // wide, 8 * wide
    return 4096 // wide, 32


# Launchers -----------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Tensors of one shape seen as [OUTER, INNER, N].

    Attributes
    ----------
    sizes : tuple of int
        OUTER, INNER and N.
    outers : tuple of int
        OUTER's axes, from the fastest to the slowest, where it is more than one that no strides fold.
    strides : list of tuple
        Of each tensor: those of OUTER's axes, that of INNER, that of N.
    """

    sizes: tuple[int, int, int]
    outers: tuple[int, ...]
    strides: list[tuple[tuple[int, ...], int, int]]


def _layout(dim: int, *tensors: Tensor) -> Layout:
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


_plan = functools.lru_cache(maxsize=4096)(_softmax_plan)


def _prepared(
    dense: Tensor, free: Tensor, dim: int, tensors: int
) -> tuple[Plan, list[int | tuple[int, ...]], dict[str, Any]]:
    """What both launchers need: the plan; INNER, N and the strides for the kernel; ALIGN and OUTER's axes.

    `dense` is contiguous; `free` has its shape and any strides.
    """
    (outer, inner, n), outers, strides = _layout(dim, dense, free)
    last = n == 1 or all(step == 1 for _, _, step in strides)
    starts = [(*along, step) for along, step, _ in strides]
    whole = 16 // dense.element_size()
    align = math.gcd(whole, n, *(v for s in starts for v in s)) if last else 1
    # Rows that begin in the middle of a pair can be read as pairs if both tensors' rows do.
    alike = align > 1 or starts[0] == starts[1]
    pairs = dense.element_size() == 2 and last and outer == 1 and alike and free.data_ptr() % 4 == 0
    alike = all((a - b) % whole == 0 for a, b in zip(*starts, strict=True))
    vector = whole if alike and dense.data_ptr() % 16 == free.data_ptr() % 16 == 0 else 1
    capability, processors = gpu(dense.device)
    flat = outer == 1 and last and (inner == 1 or all(along == n for _, along, _ in strides))
    known = {"processors": processors, "last": last, "pairs": pairs, "vector": vector, "flat": flat, "tensors": tensors}
    plan = _plan((outer, inner, n), dense.dtype, capability, **known)
    windowed = plan.kernel in ("whole", "shared")  # these find out where a row begins
    align = 1 if windowed else align
    numbers: list[int | tuple[int, ...]] = [inner, n // align]
    for along, b, step in strides:
        a = tuple(v // align for v in along)
        numbers += [a if len(a) > 1 else a[0], b // align, step if n > 1 else 1]
    layout = {} if windowed else {"ALIGN": align}
    return plan, numbers, layout | ({"OUTERS": outers[:-1]} if len(outers) > 1 else {})


def _board(plan: Plan, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, dict[str, bool]]:
    """A word of zeros for each program, and how the kernel is launched that reads its rows while they are written."""
    early = overlapping(device)
    board = empty((plan.programs,), dtype, device)
    block = 16384 // dtype.itemsize
    launch(
        fill, (triton.cdiv(plan.programs, block),), board, plan.programs, BLOCK=block, EARLY=bool(early), num_warps=8
    )
    return board, early


def _softmax_into(y: Tensor, x: Tensor, dim: int) -> None:
    plan, (inner, n, *strides), layout = _prepared(y, x, dim, tensors=1)
    constants = {**layout, **plan.constants, "num_warps": plan.warps}
    grid = (plan.programs,)
    if plan.kernel == "rows":
        launch(_softmax_rows, grid, y, x, inner, n, *strides, **constants)
    elif plan.kernel == "pairs":
        launch(_softmax_pairs, grid, y, x, n, strides[1], strides[4], **constants)
    elif plan.kernel == "whole":
        launch(_softmax_whole, grid, y, x, inner, n, *strides[:2], *strides[3:5], maxnreg=plan.registers, **constants)
    elif plan.kernel == "shared":
        board, early = _board(plan, torch.int64, x.device)
        launch(
            _softmax_shared, grid, y, x, board, inner, n, *strides[:2], *strides[3:5],
            plan.span // plan.constants["VEC"], plan.parts, LATE=bool(early), maxnreg=plan.registers,
            **constants, **early,
        )  # fmt: skip
    elif plan.kernel == "twice":
        launch(_softmax_online, grid, y, x, inner, n, *strides, **constants)
    else:
        # Sums in float32 for half types: the merged sum must not be rounded before the division.
        rows = x.numel() // x.shape[dim]
        tops, totals = empty((2, rows, plan.constants["PARTS"]), _sums(x.dtype), x.device)
        launch(_softmax_parts, grid, tops, totals, x, inner, n, plan.span, *strides[3:], **constants)
        constants.pop("GROUP")
        launch(_softmax_parts_divided, grid, y, tops, totals, x, inner, n, plan.span, *strides, **constants)


def _softmax_backward_into(dx: Tensor, y: Tensor, dy: Tensor, dim: int) -> None:
    if not y.is_contiguous():
        y = apply(Tensor.contiguous, y)
    plan, (inner, n, *strides), layout = _prepared(y, dy, dim, tensors=2)
    constants = {**layout, **plan.constants, "num_warps": plan.warps}
    grid = (plan.programs,)
    if plan.kernel == "rows":
        launch(_softmax_backward_rows, grid, dx, y, dy, inner, n, *strides, **constants)
    elif plan.kernel == "twice":
        launch(_softmax_backward_twice, grid, dx, y, dy, inner, n, *strides, **constants)
    elif plan.kernel == "whole":
        launch(
            _softmax_backward_whole,
            grid,
            dx,
            y,
            dy,
            inner,
            n,
            *strides[:2],
            *strides[3:5],
            maxnreg=plan.registers,
            **constants,
        )
    elif plan.kernel == "shared":
        board, early = _board(plan, torch.int32, y.device)
        launch(
            _softmax_backward_shared, grid, dx, y, dy, board, inner, n, *strides[:2], *strides[3:5],
            plan.span // plan.constants["VEC"], plan.parts, LATE=bool(early), maxnreg=plan.registers,
            **constants, **early,
        )  # fmt: skip
    else:
        dots = empty((y.numel() // y.shape[dim], plan.constants["PARTS"]), _sums(y.dtype), y.device)
        launch(_softmax_backward_parts, grid, dots, y, dy, inner, n, plan.span, *strides, **constants)
        launch(_softmax_backward_parts_centred, grid, dx, dots, y, dy, inner, n, plan.span, *strides, **constants)


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _keep_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dim = inputs[1]


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    return softmax_backward(y, dy, ctx.dim), None


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, dy, dim = inputs
    ctx.save_for_backward(y, dy)
    ctx.dim = dim


def _second_gradient(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
    """Of dx = y (dy - sum(y dy)), with respect to y in separate operations and with respect to dy fused."""
    y, dy = ctx.saved_tensors
    if y.dim() == 0:
        return torch.zeros_like(y), torch.zeros_like(dy), None
    # float32 for half types, as in the kernels: both sums cancel.
    wide = _sums(y.dtype)
    wide_y, wide_dy, wide_g = y.to(wide), dy.to(wide), g.to(wide)
    dot = (wide_y * wide_dy).sum(ctx.dim, keepdim=True)
    for_y = wide_g * (wide_dy - dot) - wide_dy * (wide_y * wide_g).sum(ctx.dim, keepdim=True)
    return for_y.to(y.dtype), softmax_backward(y, g, ctx.dim), None


def _batched(op: Operator, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    """The rule under torch.vmap: the batch becomes the first axis, and `dim` moves by one."""
    *tensors, dim = arguments
    moved = [
        t.expand(info.batch_size, *t.shape) if at is None else t.movedim(at, 0)
        for t, at in zip(tensors, in_dims, strict=False)
    ]
    if moved[0].dim() == 1:  # a batch of tensors without axes
        return op.dispatched(*(t[:, None] for t in moved), 1)[:, 0], 0
    return op.dispatched(*moved, dim + 1), 0


def _check(x: Any, dim: Any, what: str = "x", name: str = "softmax") -> tuple[Tensor, int]:
    """The arguments, with `dim` counted from the front."""
    check_tensor(name, what, x)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{name}: expected dim to be an int, got {type(dim).__name__}; give one axis")
    axes = max(1, x.dim())  # a tensor without axes counts as one with a single axis, as in torch
    if not -axes <= dim < axes:
        raise IndexError(
            f"{name}: expected dim from {-axes} to {axes - 1} for {what} of shape {tuple(x.shape)}, got {dim}; "
            "give an axis that the tensor has"
        )
    check_device(name, x)
    return x, dim % axes


def _check_backward(y: Any, dy: Any, dim: Any) -> tuple[Tensor, Tensor, int]:
    name = "softmax_backward"
    y, dim = _check(y, dim, "y", name)
    check_tensor(name, "dy", dy)
    check_alike(name, "dy", dy, "y", y)
    if dy.shape != y.shape:
        raise ValueError(
            f"{name}: expected dy of shape {tuple(y.shape)} as y has, got {tuple(dy.shape)}; expand it first"
        )
    return y, dy, dim


def _like(x: Tensor, *_: Any) -> Tensor:
    return empty(x.shape, x.dtype, x.device)


_softmax: Operator = Operator(
    "softmax",
    "(Tensor x, SymInt dim) -> Tensor",
    check=_check,
    outputs=_like,
    into=_softmax_into,
    gradient=(_gradient, _keep_output),
    batched=lambda *batch: _batched(_softmax, *batch),
)
_softmax_backward: Operator = Operator(
    "softmax_backward",
    "(Tensor y, Tensor dy, SymInt dim) -> Tensor",
    check=_check_backward,
    outputs=_like,
    into=_softmax_backward_into,
    gradient=(_second_gradient, _keep_inputs),
    batched=lambda *batch: _batched(_softmax_backward, *batch),
)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax along one axis, in one read and one write.

    Parameters
    ----------
    x : torch.Tensor
        float16, bfloat16, float32 or float64, of any shape and strides, on a CUDA device (or on the CPU where Triton
        interprets). Half types are computed in float32.
    dim : int, default -1
        The axis that is normalised.

    Returns
    -------
    torch.Tensor
        Contiguous, of the shape, dtype and device of `x`. Each row along `dim` sums to one; a row that holds NaN or
        +inf, or nothing but -inf, is NaN, as in `torch.softmax`.

    Raises
    ------
    TypeError
        If `x` is no dense floating-point tensor or `dim` no integer.
    IndexError
        If `x` has no axis `dim`.
    ValueError
        If `x` is on the CPU and Triton compiles, or a view that negates.

    Notes
    -----
    Differentiable, twice as well; works under `torch.compile` and `torch.vmap`.

    Examples
    --------
    >>> import fusebook, torch
    >>> y = fusebook.softmax(torch.randn(3, 5, device="cuda"), dim=-1)  # doctest: +SKIP
    """
    return _softmax(x, dim)


def softmax_backward(y: Tensor, dy: Tensor, dim: int = -1) -> Tensor:
    """Gradient of softmax along one axis, in two reads and one write.

    Parameters
    ----------
    y : torch.Tensor
        What `softmax` returned.
    dy : torch.Tensor
        The gradient with respect to `y`, of its shape and dtype.
    dim : int, default -1
        The axis that was normalised.

    Returns
    -------
    torch.Tensor
        The gradient with respect to the input of softmax; contiguous, of the shape and dtype of `y`.

    Raises
    ------
    TypeError
        If `y` or `dy` is no dense floating-point tensor, their dtypes differ, or `dim` is no integer.
    IndexError
        If `y` has no axis `dim`.
    ValueError
        If shapes or devices differ, or the tensors are on the CPU and Triton compiles, or views that negate.
    """
    return _softmax_backward(y, dy, dim)
