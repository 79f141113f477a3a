"""Softmax along one axis: every row is read once and written once.

For a row of N elements,

    y[i] = exp(x[i] - max_j x[j]) / sum_k exp(x[k] - max_j x[j])

A tensor of any shape and strides is seen as three axes, ``[OUTER, INNER, N]``: the axis that is normalised comes last,
the others become OUTER and INNER, and no element is moved for that. M = OUTER * INNER is the number of rows.

Fused: the maximum, the subtraction, the exponential, the sum and the division. A chain of separate operations reads
5MN + 2M elements and writes 3MN + 2M; the fused kernel reads MN and writes MN. The gradient is in `softmax_backward`.

A row of up to 128 KiB in float32, 104 KiB and more in half types and 64 KiB in the gradient of these, stays in the
registers of one program between its load and its store. A wider one is shared by several programs: each holds a part of
it, and they tell one another what they found there, in memory or, in a cluster, which Hopper and later have, in shared
memory. So it is read once, too.

Limits: wide rows whose numbers do not lie side by side are first laid so, and then results where they belong. A row of
more than some two million numbers, of float64 half a million, is read twice by one program: once to find the maximum
and the sum in one pass, once to divide.
"""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import Operator, wide
from ._rows import (
    again,
    alike,
    batched,
    begin_of,
    begun,
    checked_axis,
    launch_rows,
    leave,
    missing_of,
    narrow_rows_of,
    place_of,
    put,
    rows_of,
    told,
    window,
    word_of,
    words_of,
    zero_of,
)
from .softmax_backward import _softmax_backward

__all__ = ["softmax", "softmax_eager"]

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


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _exp(x):
    """By way of exp2, which the hardware has. Unlike tl.exp it may round results below 1e-38 to zero: half the work."""
    if x.dtype == tl.float64:  # which it has not: the product would be fused with what follows, in some rows only
        return tl.exp(x)
    else:
        return tl.exp2(x * 1.4426950408889634)  # log2(e)


@triton.jit
def _softmax_rows(
    y_ptr, x_ptr, INNER, N, y_strides, x_strides,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, FLAT: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """ROWS rows in registers, as CHUNKS tiles of BLOCK columns, of which only the last is masked."""
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N * ALIGN
    outer, rows = rows_of(tl.program_id(0), INNER, ROWS, FLAT)
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    # One product in int64 instead of four, for the same reason.
    x_ptr += rows[:, None] * N if FLAT else begin_of(outer, rows[:, None], OUTERS, x_strides) * ALIGN  # [ROWS, 1]
    y_ptr += rows[:, None] * N if FLAT else begin_of(outer, rows[:, None], OUTERS, y_strides) * ALIGN  # [ROWS, 1]

    chunks = ()
    tops = tl.full([ROWS, BLOCK], float("-inf"), FLOAT)
    for i in tl.static_range(CHUNKS):
        inside = live if i < CHUNKS - 1 else live & (i * BLOCK + columns < N)
        at = (i * BLOCK + columns).to(tl.int64)
        x = tl.load(x_ptr + at * x_strides[2], mask=inside, other=float("-inf"))  # [ROWS, BLOCK]; read MN
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
        tl.store(y_ptr + at * y_strides[2], exps[i] * scale, mask=inside)  # write MN


@triton.jit
def _softmax_narrow(
    y_ptr, x_ptr, M, INNER, N, y_strides, x_strides,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """ROWS of M narrow rows whose numbers lie apart, counted along INNER, then OUTER: a thread has whole rows."""
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    outer, inner, live = narrow_rows_of(tl.program_id(0), M, INNER, ROWS, FLAT)  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = live & (columns < N)
    at = begin_of(outer, inner, OUTERS, x_strides) + columns.to(tl.int64) * x_strides[2]
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(FLOAT)  # [ROWS, BLOCK]; read MN
    e = _exp(x - tl.max(x, 1)[:, None])
    y = e * (1 / tl.sum(e, 1)[:, None])
    at = begin_of(outer, inner, OUTERS, y_strides) + columns.to(tl.int64) * y_strides[2]
    tl.store(y_ptr + at, y, mask=inside)  # write MN


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
    # Without it, the compiler would see that the numbers and exponentials below are those above and keep them, in twice
    # the registers that the pairs take.
    zero = zero_of(N, top).to(tl.int32)
    totals = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        low, high = _unpacked(chunks[i] ^ zero if TWICE else chunks[i], HALF)
        totals += _exp(low - top) + _exp(high - top)
    total = tl.sum(totals, 0)
    if ALIGN == 1:
        total += _exp(first - top) + _exp(final - top)
    scale = 1 / total
    zero = zero_of(N, total).to(tl.int32)
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
def _softmax_online(
    y_ptr, x_ptr, INNER, N, y_strides, x_strides,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """ROWS rows of any width, read twice: once for the maximum and the sum of exponentials, once to divide.

    Every GROUP neighbours, which one thread holds, share a running maximum: a sum is rescaled once a group and not once
    an element, which would double the exponentials. The groups meet at the end.
    """
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N.to(tl.int64) * ALIGN
    outer, rows = rows_of(tl.program_id(0), INNER, ROWS)
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    x_ptr += begin_of(outer, rows[:, None], OUTERS, x_strides) * ALIGN  # [ROWS, 1]
    y_ptr += begin_of(outer, rows[:, None], OUTERS, y_strides) * ALIGN  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)  # [1, BLOCK]
    tops = tl.full([ROWS, BLOCK // GROUP], float("-inf"), FLOAT)
    totals = tl.zeros([ROWS, BLOCK // GROUP], FLOAT)
    for start in range(0, N, BLOCK):
        at = start + columns
        x = tl.load(x_ptr + at * x_strides[2], mask=live & (at < N), other=float("-inf"))  # [ROWS, BLOCK]; read MN
        x = tl.reshape(x.to(FLOAT), [ROWS, BLOCK // GROUP, GROUP])
        new = tl.maximum(tops, tl.max(x, 2))  # [ROWS, BLOCK / GROUP]
        # What has seen nothing but -inf has the sum 0; relative to 0 it stays 0, relative to -inf it would be NaN.
        shift = tl.where(new == float("-inf"), 0.0, new)
        totals = totals * _exp(tops - shift) + tl.sum(_exp(x - shift[:, :, None]), 2)
        tops = new
    top = tl.max(tops, 1)[:, None]  # [ROWS, 1]
    scale = 1 / tl.sum(totals * _exp(tops - top), 1)[:, None]  # [ROWS, 1]
    # From the end back: what was read last is likeliest to be in a cache still.
    last = (tl.cdiv(N, BLOCK) - 1) * BLOCK
    for start in range(0, N, BLOCK):
        at = last - start + columns
        inside = live & (at < N)
        x = tl.load(x_ptr + at * x_strides[2], mask=inside, other=0.0, eviction_policy="evict_first")  # read MN again
        tl.store(y_ptr + at * y_strides[2], _exp(x.to(FLOAT) - top) * scale, mask=inside)  # write MN


@triton.jit
def _taken(x_ptr, at, inner, low, high, OTHER: tl.constexpr, VEC: tl.constexpr):
    """Numbers `inner` of a window, OTHER in place of what is not the row's own."""
    x = tl.load(x_ptr + at + inner, mask=inner < (high + VEC - 1) // VEC * VEC, other=OTHER)
    if VEC > 1:
        if (low > 0) | (high % VEC != 0):
            x = tl.where((inner >= low) & (inner < high), x, OTHER).to(x.dtype)
    return x


@triton.jit
def _word(top, total):
    """A maximum and a sum in one word, which is never zero: the sum is one at least, or the maximum is -inf."""
    upper = top.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return upper | (total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _top(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _total(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _softmax_whole(
    y_ptr, x_ptr, INNER, N, y_strides, x_strides,
    VEC: tl.constexpr, CTAS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """One row by one program, or by CTAS of a cluster: CHUNKS tiles of whole vectors, which stay in registers."""
    begun(CTAS)
    outer, inner = place_of(tl.program_id(0), INNER)
    at, low, high = window(begin_of(outer, inner, OUTERS, x_strides), N, 0, CHUNKS * CTAS * BLOCK, VEC)
    columns = tl.arange(0, CTAS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [CTAS, BLOCK]
    chunks = ()
    tops = tl.full([CTAS, BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(CHUNKS):
        here = i * CTAS * BLOCK + columns
        if i < CHUNKS - 2:
            x = tl.load(x_ptr + at + here)  # [CTAS, BLOCK]; read MN
        else:  # the last tile may hold nothing but what a first vector has pushed there
            x = tl.load(x_ptr + at + here, mask=here < (high + VEC - 1) // VEC * VEC, other=float("-inf"))
        if i == 0 or i >= CHUNKS - 2:
            x = tl.where((here >= low) & (here < high), x, float("-inf")).to(x_ptr.dtype.element_ty)
        chunks += (x,)
        tops = tl.maximum(tops, x.to(tl.float32))
    top = tl.max(tops, 1)  # [CTAS]
    # A program of several may hold nothing but -inf.
    shift = (top if CTAS == 1 else tl.where(top == float("-inf"), 0.0, top))[:, None]
    totals = tl.zeros([CTAS, BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        totals += _exp(chunks[i].to(tl.float32) - shift)
    total = tl.sum(totals, 1)  # [CTAS]
    scale = 1 / total
    if CTAS > 1:
        words = told(_word(top, total), CTAS)
        highest = top
        for k in tl.static_range(CTAS):
            highest = tl.maximum(highest, _top(words[k]))
        total = tl.zeros([CTAS], tl.float32)  # everywhere the same
        for k in tl.static_range(CTAS):
            total += _total(words[k]) * _exp(_top(words[k]) - tl.where(highest == float("-inf"), 0.0, highest))
        scale = _exp(top - highest) / total
    y_ptr += window(begin_of(outer, inner, OUTERS, y_strides), N, 0, CHUNKS * CTAS * BLOCK, VEC)[0]
    for i in tl.static_range(CHUNKS):
        y = _exp(chunks[i].to(tl.float32) - shift) * scale[:, None]
        if i == 0 or i >= CHUNKS - 2:
            first = i * CTAS * BLOCK
            put(y_ptr + first, y, columns, low - first, tl.minimum(high - first, CTAS * BLOCK), VEC)  # write MN
        else:
            tl.store(y_ptr + i * CTAS * BLOCK + columns, y.to(y_ptr.dtype.element_ty))


@triton.jit
def _part(x_ptr, begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers [BLOCK] of a part of a row; their maximum and the sum of exponentials relative to it, in one word."""
    at, low, high = window(begin, N, part * SPAN, SPAN, VEC)
    x = _taken(x_ptr, at, tl.arange(0, BLOCK), low, high, float("-inf"), VEC)  # [BLOCK]; read MN
    top = tl.max(x.to(tl.float32), 0)
    zero = zero_of(N, top)
    total = tl.sum(_exp(again(x, zero, x.dtype != tl.float32) - tl.where(top == float("-inf"), 0.0, top)), 0)
    return x, _word(top, total)


@triton.jit
def _divided_part(y_ptr, x, words, begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Store a part of a row, by the words of all parts."""
    highest = tl.max(_top(words), 0)
    scale = 1 / tl.sum(_total(words) * _exp(_top(words) - tl.where(highest == float("-inf"), 0.0, highest)), 0)
    # Exponentials once more, of numbers as they were loaded: those of half types take half the registers meanwhile.
    zero = zero_of(N, scale)
    _, low, high = window(begin, N, part * SPAN, SPAN, VEC)
    y = _exp(again(x, zero, x.dtype != tl.float32) - highest) * scale
    put(y_ptr, y, tl.arange(0, BLOCK), low, high, VEC)  # write MN


@triton.jit
def _softmax_shared(
    y_ptr, x_ptr, board_ptr, INNER, N, y_strides, x_strides, SPAN, PARTS: tl.constexpr,
    VEC: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr, LATE: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """A row of any width by PARTS programs, each of which holds up to SPAN of its numbers: SPAN in vectors."""
    NOTHING: tl.constexpr = -36028797018963968  # the word of a part without numbers: -inf and 0
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    outer, inner = place_of(row, INNER)
    begin = begin_of(outer, inner, OUTERS, x_strides)
    SPAN = SPAN * VEC
    x, word = _part(x_ptr, begin, N, part, SPAN, VEC, BLOCK)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros on the board; the row is here already
    board_ptr += row.to(tl.int64) * PARTS
    leave(board_ptr + part, word)
    lanes = tl.arange(0, LANES)  # [LANES]
    words, missing = words_of(board_ptr, lanes, PARTS, NOTHING, TRIES)
    y_ptr += window(begin_of(outer, inner, OUTERS, y_strides), N, part * SPAN, SPAN, VEC)[0]
    if missing == LANES:
        _divided_part(y_ptr, x, words, begin, N, part, SPAN, VEC, BLOCK)
    else:
        while missing < LANES:
            _, word = _part(x_ptr, begin, N, missing, SPAN, VEC, BLOCK)
            leave(board_ptr + missing, word)  # so that others find it
            words = tl.where(lanes == missing, word, words)
            missing = missing_of(words, lanes)
        # Its own numbers again, rather than held meanwhile. missing - LANES is zero here, but the compiler cannot know,
        # and keeps no addresses for it.
        part += missing - LANES
        x, _ = _part(x_ptr, begin, N, part, SPAN, VEC, BLOCK)
        _divided_part(y_ptr, x, words, begin, N, part, SPAN, VEC, BLOCK)


# Of float64 a part leaves two words, its maximum and its sum, side by side. It keeps exponentials, not numbers: they
# take no more registers, and to compute them twice costs more than memory does.


@triton.jit
def _wide_part(x_ptr, begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """The exponentials [BLOCK] of a part of a row, relative to its maximum; that and their sum, as words."""
    at, low, high = window(begin, N, part * SPAN, SPAN, VEC)
    x = _taken(x_ptr, at, tl.arange(0, BLOCK), low, high, float("-inf"), VEC)  # [BLOCK]; read MN
    top = tl.max(x, 0)
    e = _exp(x - tl.where(top == float("-inf"), 0.0, top))
    return e, word_of(top), word_of(tl.sum(e, 0))


@triton.jit
def _softmax_shared_wide(
    y_ptr, x_ptr, board_ptr, INNER, N, y_strides, x_strides, SPAN, PARTS: tl.constexpr,
    VEC: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr, LATE: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """As `_softmax_shared`, of float64."""
    NOTHING: tl.constexpr = -9223372036854775808  # -0.0
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    outer, inner = place_of(row, INNER)
    begin = begin_of(outer, inner, OUTERS, x_strides)
    SPAN = SPAN * VEC
    e, top_word, total_word = _wide_part(x_ptr, begin, N, part, SPAN, VEC, BLOCK)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros on the board; the row is here already
    board_ptr += row.to(tl.int64) * (2 * PARTS)
    leave(board_ptr + 2 * part, top_word)
    leave(board_ptr + 2 * part + 1, total_word)
    lanes = tl.arange(0, LANES)  # [LANES]
    words, missing = words_of(board_ptr, lanes, 2 * PARTS, NOTHING, TRIES)
    while missing < LANES:
        absent = missing // 2
        _e, found_top, found_total = _wide_part(x_ptr, begin, N, absent, SPAN, VEC, BLOCK)
        leave(board_ptr + 2 * absent, found_top)
        leave(board_ptr + 2 * absent + 1, found_total)
        words = tl.where(lanes == 2 * absent, found_top, tl.where(lanes == 2 * absent + 1, found_total, words))
        missing = missing_of(words, lanes)
    tops, totals = tl.split(tl.reshape(words.to(tl.float64, bitcast=True), [LANES // 2, 2]))  # [LANES / 2]
    tops = tl.where(tl.arange(0, LANES // 2) < PARTS, tops, float("-inf"))
    highest = tl.max(tops, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    own = _exp(top_word.to(tl.float64, bitcast=True) - highest) / tl.sum(totals * _exp(tops - shift), 0)
    y_ptr += window(begin_of(outer, inner, OUTERS, y_strides), N, part * SPAN, SPAN, VEC)[0]
    _, low, high = window(begin, N, part * SPAN, SPAN, VEC)
    put(y_ptr, e * own, tl.arange(0, BLOCK), low, high, VEC)  # write MN


_KERNELS = {
    "rows": _softmax_rows,
    "narrow": _softmax_narrow,
    "pairs": _softmax_pairs,
    "whole": _softmax_whole,
    "shared": _softmax_shared,
    "twice": _softmax_online,
}
_WIDE_KERNELS = _KERNELS | {"shared": _softmax_shared_wide}

# Launchers -----------------------------------------------------------------------------------------------------------


def _into(y: Tensor, x: Tensor, dim: int) -> None:
    if x.dtype == torch.float64:
        launch_rows(_WIDE_KERNELS, y, (x,), dim, torch.int64, 2)
    else:
        launch_rows(_KERNELS, y, (x,), dim, torch.int64)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dim = inputs[1]


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    return _softmax_backward.call(y, dy, ctx.dim), None


_softmax: Operator = Operator(
    "softmax",
    "(Tensor x, SymInt dim) -> Tensor",
    check=lambda x, dim: checked_axis("softmax", "x", x, dim),
    outputs=alike,
    into=_into,
    gradient=(_gradient, _keep),
    batched=lambda *batch: batched(_softmax, *batch),
    traced=lambda x, dim: (x, dim + x.dim() if dim < 0 else dim),
    autocast=wide,
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
    return _softmax.call(x, dim)
