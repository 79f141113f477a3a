# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/_norms.py. It needs torch, Triton, NumPy, _call.py, _layouts.py and _rows.py.
"""Norms of rows on the device: kernels, how they are planned and launched, and what their gradients share with them."""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import FLOATING, accumulated, apply, contiguous, empty, gpu, launch, number, overlapping, shapes
from ._layouts import Plan, layout_of, row_offset_of_axes, tile_of, to_word
from ._rows import WIDEST, aligned, contiguous_rows, fill, first_missing, publish, store_row_part, wait_for

# Kernels -------------------------------------------------------------------------------------------------------------

# What is read asks L2 to keep it (evict_last), weights and rows alike, though a row does not come again: lines that are
# written then seem to leave L2 sooner, while more is read. Of three hints it was the fastest at every width tried, from
# 2880 to 262144 numbers in bfloat16; to let go of rows first (evict_first) was slower than no hint.


@triton.jit
def _row(x_ptr, r_ptr, at_x, at_r, inside):
    """Numbers of x, the residual's added to them and rounded, as they are stored for the next layer."""
    x = tl.load(x_ptr + at_x, mask=inside, other=0.0, eviction_policy="evict_last")
    if r_ptr is not None:
        FLOAT: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
        r = tl.load(r_ptr + at_r, mask=inside, other=0.0, eviction_policy="evict_last")
        x = (x.to(FLOAT) + r.to(FLOAT)).to(x.dtype)
    return x


# FAR: rows of float32 and float64 may be so far from zero that sums of their elements lose the differences. fp16 and
# bf16 rows are not: the steps between their elements are larger than what sums in float32 lose. It is written out in
# each kernel, because a device function returns a tensor in Triton 3.6.


@triton.jit
def anchor_of(x_ptr, r_ptr, at_x, at_r, step_x, step_r, N, live, FAR: tl.constexpr, WIDE: tl.constexpr):
    """A number near those of a row, which is normalised relative to it: so large numbers lose no digits in sums.

    It is the first one, or of a WIDE row the median of three: relative to one that is far from all others, these would
    lose digits, the more the wider the row.
    """
    if not FAR:
        return 0.0
    elif not WIDE:
        return _row(x_ptr, r_ptr, at_x, at_r, tl.where(live, N, 0) > 0)
    else:
        first = _row(x_ptr, r_ptr, at_x, at_r, live)
        middle = _row(x_ptr, r_ptr, at_x + N // 2 * step_x, at_r + N // 2 * step_r, live)
        last = _row(x_ptr, r_ptr, at_x + (N - 1) * step_x, at_r + (N - 1) * step_r, live)
        low, high = tl.minimum(first, middle), tl.maximum(first, middle)
        return tl.maximum(low, tl.minimum(high, last))


@triton.jit
def since(x, anchor, FLOAT: tl.constexpr, FAR: tl.constexpr):
    """Numbers of a row as they are computed with."""
    if FAR:
        return x.to(FLOAT) - anchor
    else:
        return x.to(FLOAT)


@triton.jit
def _inside(at, first, last, VEC: tl.constexpr):
    """From `first` on and below `last`; where rows begin with a vector, `first` is 0."""
    return at < last if VEC == 1 else (at >= first) & (at < last)


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_both(a, b, axis: tl.constexpr, TOGETHER: tl.constexpr):
    """Two sums, for which the threads meet once; interpreted, that would take thousands of steps."""
    if TOGETHER:
        return tl.reduce((a, b), axis, add_both)
    else:
        return tl.sum(a, axis), tl.sum(b, axis)


@triton.jit
def loaded(ptr, columns, inside, OTHER: tl.constexpr, KEEP: tl.constexpr = False):
    """A weight or a bias; OTHER everywhere where there is none."""
    if ptr is None:
        return tl.full(columns.shape, OTHER, tl.float32)
    elif inside is None:
        return tl.load(ptr + columns, eviction_policy="evict_last" if KEEP else "")
    else:
        return tl.load(ptr + columns, mask=inside, other=0.0, eviction_policy="evict_last" if KEEP else "")


@triton.jit
def _normed(x, mean, factor, w, b):
    """Weighted numbers of a row, in the precision of its statistics."""
    return (x.to(mean.dtype) - mean) * factor * w.to(mean.dtype) + b.to(mean.dtype)


@triton.jit
def _result(x, mean, factor, w_ptr, b_ptr, columns, inside):
    """The same, with weight and bias from memory."""
    w = loaded(w_ptr, columns, inside, 1.0, True)
    return _normed(x, mean, factor, w, loaded(b_ptr, columns, inside, 0.0, True))


@triton.jit
def _magnitude(y):
    """|y| as an integer: such integers are ordered as the numbers are, and NaN stands above all."""
    if y.dtype == tl.float64:
        return y.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(top, FLOAT: tl.constexpr, LIMIT: tl.constexpr):
    """The scale of rows whose largest magnitude is `top`; of zeros alone it is 1."""
    scale = top.to(FLOAT, bitcast=True) / LIMIT
    return tl.where(top == 0, 1.0, scale)


@triton.jit
def _quantised(y, scale, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """To the nearest number of eight bits, the even one of two."""
    y = (y / scale).to(tl.float32)
    if TYPE == tl.int8:
        y = y + 12582912.0 - 12582912.0  # the sum has no room for a fraction
    elif INTERPRETED:
        # Triton's interpreter loses the carry into the exponent: it is given what needs no rounding, of the steps
        # of 2**-9 that there are below 2**-6, of three bits behind the first one above.
        word = y.to(tl.int32, bitcast=True)
        near = ((word + 0x7FFFF + ((word >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        y = tl.where(tl.abs(y) < 0.015625, y + 24576.0 - 24576.0, near)
    return y.to(TYPE)


@triton.jit
def _norm_rows(
    y_ptr, sum_ptr, scale_ptr, x_ptr, r_ptr, w_ptr, b_ptr, M, N, x_stride, r_stride,
    ALIGN: tl.constexpr, VEC: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, LIMIT: tl.constexpr,
    INTERPRETED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """ROWS rows in registers, as CHUNKS tiles of BLOCK columns, of which only the last is masked.

    AHEAD: weight and bias are loaded while nobody waits for anything else.
    Where VEC is not 1, rows begin anywhere within vectors of so many numbers, and are taken by whole vectors. Every
    VEC-th row begins alike, so a program takes such rows.
    """
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    FLOAT: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    N = N * ALIGN
    turn = tl.program_id(0) % VEC
    rows = ((tl.program_id(0) // VEC).to(tl.int64) * ROWS + tl.arange(0, ROWS)) * VEC + turn  # [ROWS]
    live = (rows < M)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    LATER: tl.constexpr = CHUNKS - 1 if VEC == 1 else CHUNKS - 2  # a row that begins late may reach one tile further
    at_x = (rows * (x_stride * ALIGN) // VEC * VEC)[:, None]
    at_r = (rows * (r_stride * ALIGN) // VEC * VEC)[:, None]
    at_y = (rows * N // VEC * VEC)[:, None]
    head = turn * N % VEC
    end = head + N
    first = tl.cdiv(head, VEC) * VEC  # from here on, and below `last`, vectors are the row's alone
    last = end // VEC * VEC

    FAR: tl.constexpr = CENTRED and TYPE.primitive_bitwidth > 16
    anchor = anchor_of(x_ptr, r_ptr, at_x, at_r, 1, 1, N, live, FAR, BLOCK * CHUNKS > 4096)  # [ROWS, 1]
    chunks = ()
    vectors = ()
    totals = tl.zeros([ROWS, BLOCK], FLOAT)
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK + columns
        inside = live & (at < tl.cdiv(end, VEC) * VEC) if i >= LATER else live
        step = at.to(tl.int64)
        x = _row(x_ptr, r_ptr, at_x + step, at_r + step, inside)  # [ROWS, BLOCK]; read MN, with a residual 2MN
        if VEC > 1 and (i == 0 or i >= LATER):
            x = tl.where((at >= head) & (at < end), x, 0.0).to(TYPE)
        if AHEAD:
            own = _inside(at, head, end, VEC) if i >= LATER or (VEC > 1 and i == 0) else None
            vectors += (loaded(w_ptr, at - head, own, 1.0), loaded(b_ptr, at - head, own, 0.0))
        if r_ptr is not None and not AHEAD:
            inside = live & _inside(at, first, last, VEC) if i >= LATER or (VEC > 1 and i == 0) else live
            tl.store(sum_ptr + at_y + at, x, mask=inside)  # write MN
        chunks += (x,)
        x = since(x, anchor, FLOAT, FAR)
        if FAR and i >= LATER:
            x = tl.where(at < N, x, 0.0)
        totals += x if CENTRED else x * x
    if r_ptr is not None and AHEAD:  # no load is moved before a store: of few rows all are asked for first
        for i in tl.static_range(CHUNKS):
            at = i * BLOCK + columns
            inside = live & _inside(at, first, last, VEC) if i >= LATER or (VEC > 1 and i == 0) else live
            tl.store(sum_ptr + at_y + at, chunks[i], mask=inside)  # write MN
    if VEC > 1:  # the numbers of vectors that are neighbours' too, to be written one by one
        inner = tl.arange(0, 2 * VEC)[None, :]  # [1, 2 VEC]
        ends = tl.where(inner < VEC, inner, last + inner - VEC)
        lone = live & (ends >= head) & (ends < end) & ((inner >= VEC) | (ends < first))
        x_ends = _row(x_ptr, r_ptr, at_x + ends, at_r + ends, lone)  # [ROWS, 2 VEC]
    total = tl.sum(totals, 1)[:, None]  # [ROWS, 1]
    mean = tl.zeros([ROWS, 1], FLOAT)
    if CENTRED:
        mean = total / N
        # Not the mean of squares less the square of the mean, which cancels where a row lies far from zero.
        totals = tl.zeros([ROWS, BLOCK], FLOAT)
        for i in tl.static_range(CHUNKS):
            x = since(chunks[i], anchor, FLOAT, FAR) - mean
            if i >= LATER or (VEC > 1 and i == 0):
                x = tl.where(_inside(i * BLOCK + columns, head, end, VEC), x, 0.0)
            totals += x * x
        total = tl.sum(totals, 1)[:, None]
    factor = 1 / tl.sqrt(total / N + EPS)  # [ROWS, 1]
    if LIMIT > 0:
        tops = tl.zeros([ROWS, BLOCK], tl.int64 if FLOAT == tl.float64 else tl.int32)
        for i in tl.static_range(CHUNKS):
            at = i * BLOCK + columns
            own = _inside(at, head, end, VEC)
            y = _result(since(chunks[i], anchor, FLOAT, FAR), mean, factor, w_ptr, b_ptr, at - head, own)
            if i >= LATER or (VEC > 1 and i == 0):
                y = tl.where(own, y, 0.0)
            tops = tl.maximum(tops, _magnitude(y))
        scale = _scale_of(tl.max(tops, 1)[:, None], FLOAT, LIMIT)  # [ROWS, 1]
        tl.store(scale_ptr + rows[:, None], scale, mask=live)  # write M
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK + columns
        x = since(chunks[i], anchor, FLOAT, FAR)
        if AHEAD:
            y = _normed(x, mean, factor, vectors[2 * i], vectors[2 * i + 1])
        else:
            own = _inside(at, head, end, VEC) if i >= LATER or (VEC > 1 and i == 0) else None
            y = _result(x, mean, factor, w_ptr, b_ptr, at - head, own)
        if LIMIT > 0:
            y = _quantised(y, scale, y_ptr.dtype.element_ty, INTERPRETED)
        inside = live & _inside(at, first, last, VEC) if i >= LATER or (VEC > 1 and i == 0) else live
        tl.store(y_ptr + at_y + at, y.to(y_ptr.dtype.element_ty), mask=inside)  # write MN
    if VEC > 1:
        if r_ptr is not None:
            tl.store(sum_ptr + at_y + ends, x_ends, mask=lone)
        y = _result(x_ends, mean, factor, w_ptr, b_ptr, ends - head, (ends >= head) & (ends < end))
        if LIMIT > 0:
            y = _quantised(y, scale, y_ptr.dtype.element_ty, INTERPRETED)
        tl.store(y_ptr + at_y + ends, y.to(y_ptr.dtype.element_ty), mask=lone)


# Rows whose numbers lie apart, as those of a transposed matrix do, while those of neighbouring rows lie together: tiles
# of many rows are read across them and written along them. Wide rows are read twice: once for what a part of a row adds
# to its statistics, which is left in memory, and once by those of all parts. A copy by tiles that is then normalised
# reads and writes once more.


@triton.jit
def _norm_across(
    y_ptr, sum_ptr, scale_ptr, stats_ptr, x_ptr, r_ptr, w_ptr, b_ptr, OUTER, INNER, N, PARTS,
    y_strides, x_strides, r_strides, ALIGN: tl.constexpr,
    EPS: tl.constexpr, CENTRED: tl.constexpr, LIMIT: tl.constexpr, INTERPRETED: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr,
    LANES: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """ROWS rows, neighbours along INNER first: CHUNKS tiles of BLOCK columns. Each of PARTS is of SPAN columns.

    INNER, and of x and r the strides of OUTER and N, are counted in units of ALIGN rows, which lie side by side.
    STEP 0: all of a row; 1: what a part adds to its statistics, and the sum with the residual; 2: the rest by these.
    """
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    FLOAT: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    # From the end back: what was read last is likeliest to be in a cache still.
    program = tl.num_programs(0) - 1 - tl.program_id(0) if STEP == 2 else tl.program_id(0)
    tiles = tl.cdiv((tl.zeros([], tl.int64) + OUTER) * INNER, ROWS // ALIGN).to(tl.int32)
    part = program // tiles
    unit = (program % tiles).to(tl.int64) * (ROWS // ALIGN)
    lane = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    units = (unit % INNER).to(tl.int32) + lane // ALIGN
    inner = units % INNER * ALIGN + lane % ALIGN
    if ALIGN == 1:  # nearly so, and neighbours of a warp are to be neighbours in memory
        inner = tl.max_contiguous(inner, [ROWS, 1])
    inner = inner.to(tl.int64)
    outer = unit // INNER + units // INNER
    live = outer < OUTER
    first = tl.zeros([ROWS, 1], tl.int64)
    at_x = row_offset_of_axes(outer, first, OUTERS, x_strides) * ALIGN + inner * x_strides[1]
    at_r = row_offset_of_axes(outer, first, OUTERS, r_strides) * ALIGN + inner * r_strides[1]
    at_y = row_offset_of_axes(outer, inner, OUTERS, y_strides)
    begin = part * (CHUNKS * BLOCK)
    columns = begin + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    FAR: tl.constexpr = CENTRED and TYPE.primitive_bitwidth > 16
    step_x, step_r = tl.cast(x_strides[2], tl.int64) * ALIGN, tl.cast(r_strides[2], tl.int64) * ALIGN
    anchor = anchor_of(x_ptr, r_ptr, at_x, at_r, step_x, step_r, N, live, FAR, STEP > 0)  # [ROWS, 1]
    chunks = ()
    for i in tl.static_range(CHUNKS):  # all of them before the first is stored
        at = (columns + i * BLOCK).to(tl.int64)
        inside = live & (columns + i * BLOCK < N)
        x = _row(x_ptr, r_ptr, at_x + at * step_x, at_r + at * step_r, inside)  # [ROWS, BLOCK]; read MN
        chunks += (x,)
    if STEP < 2:
        totals = tl.zeros([ROWS, BLOCK], FLOAT)
        for i in tl.static_range(CHUNKS):
            if r_ptr is not None:
                tl.store(sum_ptr + at_y + columns + i * BLOCK, chunks[i], mask=live & (columns + i * BLOCK < N))
            x = since(chunks[i], anchor, FLOAT, FAR)
            if FAR:
                x = tl.where(columns + i * BLOCK < N, x, 0.0)
            totals += x if CENTRED else x * x
        total = tl.sum(totals, 1)[:, None]  # [ROWS, 1]
        mean = tl.zeros([ROWS, 1], FLOAT)
        if CENTRED:
            mean = total / tl.minimum(N - begin, SPAN)
            totals = tl.zeros([ROWS, BLOCK], FLOAT)
            for i in tl.static_range(CHUNKS):
                x = tl.where(columns + i * BLOCK < N, since(chunks[i], anchor, FLOAT, FAR) - mean, 0.0)
                totals += x * x
        squares = tl.sum(totals, 1)[:, None] if CENTRED else total
    row = outer * (INNER * ALIGN) + inner
    if STEP == 1:
        rows = (tl.zeros([], tl.int64) + OUTER) * (INNER * ALIGN)
        tl.store(stats_ptr + part * rows + row, squares, mask=live)
        if CENTRED:
            tl.store(stats_ptr + (PARTS + part) * rows + row, total, mask=live)
    else:
        if STEP == 2:
            rows = (tl.zeros([], tl.int64) + OUTER) * (INNER * ALIGN)
            lanes = tl.arange(0, LANES)[None, :]  # [1, LANES]
            found = live & (lanes < PARTS)
            squares = tl.load(stats_ptr + lanes * rows + row, mask=found, other=0.0)  # [ROWS, LANES]
            mean = tl.zeros([ROWS, 1], FLOAT)
            if CENTRED:
                totals = tl.load(stats_ptr + (PARTS + lanes) * rows + row, mask=found, other=0.0)
                mean = tl.sum(totals, 1)[:, None] / N
                counts = tl.maximum(tl.minimum(N - lanes * SPAN, SPAN), 0).to(FLOAT)
                away = totals / tl.maximum(counts, 1.0) - mean
                squares += counts * away * away
            squares = tl.sum(squares, 1)[:, None]
        factor = 1 / tl.sqrt(squares / N + EPS)  # [ROWS, 1]
        scale = factor
        if LIMIT > 0:
            tops = tl.zeros([ROWS, BLOCK], tl.int64 if FLOAT == tl.float64 else tl.int32)
            for i in tl.static_range(CHUNKS):
                inside = columns + i * BLOCK < N
                x = since(chunks[i], anchor, FLOAT, FAR)
                y = _result(x, mean, factor, w_ptr, b_ptr, columns + i * BLOCK, inside)
                tops = tl.maximum(tops, _magnitude(tl.where(inside, y, 0.0)))
            scale = _scale_of(tl.max(tops, 1)[:, None], FLOAT, LIMIT)
            tl.store(scale_ptr + at_y // N, scale, mask=live)  # write M
        for i in tl.static_range(CHUNKS):
            inside = columns + i * BLOCK < N
            x = since(chunks[i], anchor, FLOAT, FAR)
            y = _result(x, mean, factor, w_ptr, b_ptr, columns + i * BLOCK, inside)
            if LIMIT > 0:
                y = _quantised(y, scale, y_ptr.dtype.element_ty, INTERPRETED)
            tl.store(y_ptr + at_y + columns + i * BLOCK, y.to(y_ptr.dtype.element_ty), mask=live & inside)  # write MN


# Rows that no program can hold are shared by several, see `_rows`: each reads its part once, in tiles that it holds
# until it knows what the others have found. Half types are held as pairs in 32-bit words, since a number that is held
# takes a register of its own.


@triton.jit
def held(
    ptr, at, count, BLOCK: tl.constexpr, PAIRS: tl.constexpr, OTHER: tl.constexpr = 0.0, KEEP: tl.constexpr = False
):  # fmt: skip
    """So many numbers from a place on, or pairs of them in words; OTHER everywhere where there is no tensor."""
    if ptr is None:
        return tl.full([BLOCK], OTHER, tl.float32)
    elif PAIRS and ptr.dtype.element_ty.primitive_bitwidth == 16:
        words = (ptr + at).to(tl.pointer_type(tl.int32), bitcast=True)
        pairs = tl.arange(0, BLOCK // 2)  # [BLOCK / 2]
        return tl.load(words + pairs, mask=pairs < count // 2, other=0, eviction_policy="evict_last" if KEEP else "")
    else:
        inner = tl.arange(0, BLOCK)  # [BLOCK]
        return tl.load(ptr + at + inner, mask=inner < count, other=0.0, eviction_policy="evict_last" if KEEP else "")


@triton.jit
def numbers(pairs, TYPE: tl.constexpr, FLOAT: tl.constexpr, BLOCK: tl.constexpr):
    """What is held of a tensor of TYPE, as BLOCK floats."""
    if pairs.shape[0] == BLOCK:
        return pairs.to(FLOAT)
    else:
        if TYPE == tl.bfloat16:  # the upper half of a float32
            low = (pairs << 16).to(tl.float32, bitcast=True)
            high = (pairs & -65536).to(tl.float32, bitcast=True)
        else:
            low = pairs.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
            high = (pairs >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), [BLOCK])


@triton.jit
def _as_held(x, PAIRS: tl.constexpr):
    """Numbers [BLOCK] of a half type in words, two in each."""
    if PAIRS:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), [x.shape[0] // 2, 2]))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        return x


@triton.jit
def _anew(x, zero):
    """What is held; its numbers are found anew, not held meanwhile in twice the registers. `zero` always is that."""
    return x ^ zero if x.dtype == tl.int32 else x


@triton.jit
def _tile(x_ptr, r_ptr, at_x, at_r, count, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """So many numbers of x, or of its sum with the residual, as they are held."""
    x = held(x_ptr, at_x, count, BLOCK, PAIRS, 0.0, True)  # read MN
    if r_ptr is not None:
        TYPE: tl.constexpr = x_ptr.dtype.element_ty
        FLOAT: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
        r = held(r_ptr, at_r, count, BLOCK, PAIRS, 0.0, True)  # read MN
        x = _as_held((numbers(x, TYPE, FLOAT, BLOCK) + numbers(r, TYPE, FLOAT, BLOCK)).to(TYPE), PAIRS)
    return x


@triton.jit
def _own(x, mean, low, high, MASKED: tl.constexpr):
    """Numbers from `low` on and below `high`, less their mean; the others are zero."""
    inner = tl.arange(0, x.shape[0])
    return tl.where((inner >= low) & (inner < high), x - mean, 0.0) if MASKED else x


@triton.jit
def _put(ptr, y, at, low, high, VEC: tl.constexpr, EDGE: tl.constexpr):
    """Store a tile's own numbers; only at an EDGE there may be vectors that are neighbours' too."""
    inner = tl.arange(0, y.shape[0])
    if VEC > 1 and EDGE:
        store_row_part(ptr + at, y, inner, low - at, tl.minimum(high - at, y.shape[0]), VEC)
    else:
        tl.store(ptr + at + inner, y.to(ptr.dtype.element_ty), mask=at + inner < high // VEC * VEC)


@triton.jit
def _found(
    x_ptr, r_ptr, at_x, at_r, anchor, low, high, TYPE: tl.constexpr, FLOAT: tl.constexpr, CENTRED: tl.constexpr,
    PAIRS: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of a part that nobody holds, the squares around its mean and its sum, by the steps of who holds it."""
    FAR: tl.constexpr = CENTRED and TYPE.primitive_bitwidth > 16
    whole = tl.cdiv(high, VEC) * VEC
    total = tl.zeros([], FLOAT)
    if CENTRED:
        sums = tl.zeros([BLOCK], FLOAT)
        for at in range(0, CHUNKS * BLOCK, BLOCK):
            x = numbers(_tile(x_ptr, r_ptr, at_x + at, at_r + at, whole - at, BLOCK, PAIRS), TYPE, FLOAT, BLOCK)
            sums += _own(since(x, anchor, FLOAT, FAR), 0.0, low - at, high - at, FAR or VEC > 1)
        total = tl.sum(sums, 0)
    sums = tl.zeros([BLOCK], FLOAT)
    for at in range(0, CHUNKS * BLOCK, BLOCK):
        x = numbers(_tile(x_ptr, r_ptr, at_x + at, at_r + at, whole - at, BLOCK, PAIRS), TYPE, FLOAT, BLOCK)
        x = _own(since(x, anchor, FLOAT, FAR), total / (high - low), low - at, high - at, CENTRED or VEC > 1)
        sums += x * x
    return tl.sum(sums, 0), total


@triton.jit
def _norm_shared(
    y_ptr, sum_ptr, x_ptr, r_ptr, w_ptr, b_ptr, board_ptr, N, x_stride, r_stride, SPAN, PARTS,
    ALIGN: tl.constexpr, VEC: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Rows of any width, each by PARTS programs, which hold up to SPAN of its numbers in CHUNKS tiles.

    Where VEC is not 1, rows begin anywhere within vectors of so many numbers, and are taken by whole vectors.
    """
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    FLOAT: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    NOTHING: tl.constexpr = -9223372036854775808 if FLOAT == tl.float64 else -2147483648  # -0.0
    W_TYPE: tl.constexpr = tl.float32 if w_ptr is None else w_ptr.dtype.element_ty
    # Weights of the next tile are on their way while one is stored, behind which no load is moved; more do not fit.
    AHEAD: tl.constexpr = VEC == 1 and r_ptr is None and not CENTRED
    N = N * ALIGN
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    inner = tl.arange(0, BLOCK)  # [BLOCK]
    head = (row * N % VEC).to(tl.int32)
    begin = part * SPAN
    low = tl.maximum(head - begin, 0) if VEC > 1 else 0
    high = tl.minimum(head + N - begin, SPAN)
    whole = tl.cdiv(high, VEC) * VEC
    at_x = row * (x_stride * ALIGN) // VEC * VEC + begin
    at_r = row * (r_stride * ALIGN) // VEC * VEC + begin
    to = row * N // VEC * VEC + begin
    FAR: tl.constexpr = CENTRED and TYPE.primitive_bitwidth > 16
    anchor = anchor_of(x_ptr, r_ptr, at_x - begin, at_r - begin, 1, 1, N, row >= 0, FAR, True)
    chunks = ()
    for i in tl.static_range(CHUNKS):  # all of them before the first is stored
        at = i * BLOCK
        chunks += (_tile(x_ptr, r_ptr, at_x + at, at_r + at, whole - at, BLOCK, PAIRS),)
    sums = tl.zeros([BLOCK], FLOAT)
    for i in tl.static_range(CHUNKS):
        if r_ptr is not None:
            total = numbers(chunks[i], TYPE, TYPE, BLOCK)
            _put(sum_ptr + to, total, i * BLOCK, low, high, VEC, i == 0 or i >= CHUNKS - 2)  # write MN
        if CENTRED:
            x = since(numbers(chunks[i], TYPE, FLOAT, BLOCK), anchor, FLOAT, FAR)
            sums += _own(x, 0.0, low - i * BLOCK, high - i * BLOCK, FAR or (VEC > 1 and (i == 0 or i >= CHUNKS - 2)))
    total = tl.sum(sums, 0) if CENTRED else tl.zeros([], FLOAT)
    zero = tl.minimum(N, 0) & total.to(tl.int32)
    sums = tl.zeros([BLOCK], FLOAT)
    for i in tl.static_range(CHUNKS):
        x = since(numbers(_anew(chunks[i], zero), TYPE, FLOAT, BLOCK), anchor, FLOAT, FAR)
        x = _own(
            x, total / (high - low), low - i * BLOCK, high - i * BLOCK,
            CENTRED or (VEC > 1 and (i == 0 or i >= CHUNKS - 2)),
        )  # fmt: skip
        sums += x * x
    squares = tl.sum(sums, 0)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros on the board; the row is here already
    board_ptr += row * PARTS * (2 if CENTRED else 1)
    publish(board_ptr + part, to_word(squares))
    if CENTRED:
        publish(board_ptr + PARTS + part, to_word(total))
    if AHEAD:
        next_w = held(w_ptr, begin, high, BLOCK, PAIRS, 1.0, True)
    lanes = tl.arange(0, LANES)  # [LANES]
    words, missing = wait_for(board_ptr, lanes, PARTS, NOTHING, TRIES)
    totals = words
    if CENTRED:
        totals, lacking = wait_for(board_ptr + PARTS, lanes, PARTS, NOTHING, TRIES)
        missing = tl.minimum(missing, lacking)
    while missing < LANES:
        there = missing * SPAN
        its_low = tl.maximum(head - there, 0) if VEC > 1 else 0
        its_high = tl.minimum(head + N - there, SPAN)
        there -= begin
        square, sum_ = _found(
            x_ptr, r_ptr, at_x + there, at_r + there, anchor, its_low, its_high, TYPE, FLOAT, CENTRED, PAIRS, VEC,
            BLOCK, CHUNKS,
        )  # fmt: skip
        words = tl.where(lanes == missing, to_word(square), words)
        totals = tl.where(lanes == missing, to_word(sum_), totals) if CENTRED else words
        missing = tl.minimum(first_missing(words, lanes), first_missing(totals, lanes))
    mean = tl.zeros([], FLOAT)
    variance = tl.sum(words.to(FLOAT, bitcast=True), 0) / N
    if CENTRED:
        mean = tl.sum(totals.to(FLOAT, bitcast=True), 0) / N
        ends = tl.minimum(head + N - lanes * SPAN, SPAN)  # [LANES]
        counts = tl.maximum(ends - tl.maximum(head - lanes * SPAN, 0), 0).to(FLOAT)
        away = totals.to(FLOAT, bitcast=True) / tl.maximum(counts, 1.0) - mean
        variance += tl.sum(counts * away * away, 0) / N
    factor = 1 / tl.sqrt(variance + EPS)
    zero = missing - LANES
    for i in tl.static_range(CHUNKS):
        own = _inside(i * BLOCK + inner, low, high, VEC)
        columns = begin - head + zero * 16 + i * BLOCK + inner  # by 16 bytes at a time
        y = since(numbers(_anew(chunks[i], zero), TYPE, FLOAT, BLOCK), anchor, FLOAT, FAR)
        if AHEAD:
            w = numbers(next_w, W_TYPE, FLOAT, BLOCK)
            if i < CHUNKS - 1:
                later = (i + 1) * BLOCK
                next_w = held(w_ptr, begin + zero * 16 + later, high - later, BLOCK, PAIRS, 1.0, True)
            y = _normed(y, mean, factor, w, loaded(b_ptr, columns, own, 0.0))
        else:
            y = _result(y, mean, factor, w_ptr, b_ptr, columns, own)
        _put(y_ptr + to, y, i * BLOCK, low, high, VEC, i == 0 or i >= CHUNKS - 2)  # write MN


# Plans ---------------------------------------------------------------------------------------------------------------


#: The widest row that one program holds, by the bytes of an element.
_HELD = {2: 32768, 4: 32768, 8: 16384}

#: Rows of half types that begin anywhere within 16 bytes: up to which width, then BLOCK, warps and ROWS.
_WINDOWS = (
    (512, (128, 1, 4)),
    (1024, (128, 2, 4)),
    (4096, (512, 4, 2)),
    (8192, (1024, 8, 2)),
    (32768, (2048, 8, 1)),
)


#: Sums of such rows with a residual: beyond this width 8 warps leave a multiprocessor no room for a second program.
_WIDE_SUMS = 24576


def norm_plan(
    rows: int,
    n: int,
    size: int,
    capability: tuple[int, int] | None,
    added: bool,
    vector: int = 1,
    pairs: bool = False,
    processors: int = 132,
    centred: bool = False,
    lined: bool = False,
) -> Plan:
    """Choose the kernel and its constants, for `rows` rows of `n` numbers of `size` bytes; `added`: of two tensors.

    `vector`: the numbers in 16 bytes, where rows begin anywhere within these, otherwise 1. `pairs`: half types can be
    read in pairs. `lined`: all rows begin where vectors of 16 bytes do.

    But for the interpreter, whose `capability` is None, the width and how rows lie decide how one is cut and added up:
    so its result is the same, bit for bit, however many rows there are.
    """
    reach = n + vector - 1
    if n <= _HELD[size]:
        block, warps = tile_of(n, size, 1)
        whole = triton.next_power_of_2(n)
        together = max(1, (1024 if size == 2 else 512) // whole)
        if size == 2 and 512 < n <= 1024 and n % 8:  # read number by number: more of them at once
            together = 2
        elif size == 2 and 64 < n <= min(whole - whole // 8, 4096 if added else 8192):  # a narrow last tile wastes less
            block, together = max(64, whole // 8), 8 if n <= 128 else 4 if n <= 512 else 2
        elif size == 2 and added and n >= 4096:
            # Of two tensors a thread has twice the loads under way: fewer warps, or of long rows twice as many, which
            # leaves room for a second program.
            block, warps = (4096, 16) if n > 8192 else (2048, 4 if n in (4096, 8192) else 8)
        few = rows <= 8 * processors * together
        if vector > 1:
            block, warps, together = next(tile for most, tile in _WINDOWS if n <= most)
            if added and n > _WIDE_SUMS:
                block, warps = 4096, 16
        elif few:
            # Each thread still takes 16 bytes of a row, or what rows of this width let it, so that it is added up as
            # among many. In a tile of one row it takes as many numbers of that as of weights, which are aligned.
            least = 1 if lined else min(2, together)
            together = max(least, min(together, 32 * math.gcd(n, 16 // size) // block))
        chunks = max(1, triton.cdiv(reach, block))
        if capability is None:  # the interpreter's cost is programs times operations, whatever their size
            most = max(1, 2**15 // triton.next_power_of_2(block * chunks))  # a power of two, as it must be
            together = max(together, min(triton.next_power_of_2(rows), most))
        # Where a warp takes whole vectors, Triton 3.6 makes one shift of 64 bits of two of a thread's number, and wrong
        # addresses of it, if weights are asked for ahead.
        ahead = few and (vector == 1 or warps > 1)
        # A thread holds numbers, weights and biases: in more registers than it has they would go through memory.
        words = chunks * block * size * (3 if centred else 2) // (4 * 32 * warps)
        ahead = ahead and words <= min(255, 65536 // (32 * warps)) - 8
        constants = {"VEC": vector, "ROWS": together, "BLOCK": block, "CHUNKS": chunks, "AHEAD": ahead}
        return Plan("rows", constants, triton.cdiv(rows, together * vector) * vector, warps)
    # Parts of 16 KiB take half of 64 registers, and of sums, which load two tensors at once, half of 128; weights that
    # are asked for ahead take some more. Numbers of half types that are no pairs take a register each.
    block, most = 1024, {2: 8 if pairs or vector > 1 else 4, 4: 4, 8: 2}[size]
    if capability is None:
        block, most = 16384, 2
    parts, span = parts_of(reach, size, block * most)
    chunks = triton.cdiv(span, block)
    if vector > 1 and n - (parts - 1) * span <= (chunks - 2) * block:  # only the last two tiles may reach beyond a row
        return norm_plan(rows, n, size, capability, added)
    # As many lanes as threads or more: so each word is loaded by one thread.
    lanes = max(128, triton.next_power_of_2(parts))
    constants = {"VEC": vector, "BLOCK": block, "CHUNKS": chunks, "LANES": lanes}
    registers = 128 if added else 64 if centred else 72
    return Plan("shared", constants, rows * parts, 4, span, parts, registers)


def across_plan(rows: int, n: int, size: int, capability: tuple[int, int] | None) -> Plan:
    """Choose the constants for so many rows whose numbers lie apart.

    A plan of one part is of one step, another one of two; its programs are those of one part.
    """
    wide = max(1, size // 4)
    if capability is None:  # the interpreter's cost is programs times operations, whatever their size
        span = triton.next_power_of_2(n) if n <= _AT_ONCE else 1024
        together = max(8, min(triton.next_power_of_2(rows), 2**16 // span))
        constants = {"ROWS": together, "BLOCK": span, "SPAN": span}
        return Plan("across", constants, triton.cdiv(rows, together), 1, span, triton.cdiv(n, span))
    # Neighbours of 32 bytes, which is what memory is read by; more of them of short rows. With more numbers a program
    # fewer programs run at once, and while one waits for its loads, nobody stores.
    together = min(8 if size > 2 else 16, triton.next_power_of_2(rows))
    if n <= _AT_ONCE:
        while together < min(32, rows) and 2 * together * n <= 4096:
            together *= 2
        while together > 4 and triton.cdiv(rows, together) < 132:
            together //= 2
        warps = max(1, min(16, triton.next_power_of_2(together * n * wide) // 1024))
        block = min(triton.next_power_of_2(n), max(64, warps * 128 // together))
        span = triton.cdiv(n, block) * block  # the last tile wastes less than a power of two
    else:
        span = 1024 // wide
        while span > 128 and triton.cdiv(rows, together) * triton.cdiv(n, span) < 264 and 128 * span >= n:
            span //= 2
        warps = max(1, min(16, together * span // 1024))
        block = max(64, warps * 64 // together)
    constants = {"ROWS": together, "BLOCK": block, "SPAN": span}
    return Plan("across", constants, triton.cdiv(rows, together), warps, span, triton.cdiv(n, span))


def parts_of(n: int, size: int, block: int) -> tuple[int, int]:
    """Into how many parts of at most `block` numbers a row is cut, and their width: whole lines of 128 bytes."""
    line = 128 // size
    span = triton.cdiv(triton.cdiv(n, triton.cdiv(n, block)), line) * line
    return triton.cdiv(n, span), span


_plan = functools.lru_cache(maxsize=4096)(norm_plan)
_across_plan = functools.lru_cache(maxsize=4096)(across_plan)

# Launching -----------------------------------------------------------------------------------------------------------


#: Up to this width rows whose numbers lie apart are held between their loads and their stores.
_AT_ONCE = 1024

#: From how many numbers on two readings of wide rows take less time than a copy by tiles and its norm.
_ENOUGH = 2**24


def _across(x: Tensor, residual: Tensor | None) -> bool:
    """Whether rows whose numbers lie apart are read where they are, and not laid side by side first.

    Wide ones with a residual always are: that would be copied as well. Of others half types are moved number by number
    twice, which is not worth it.
    """
    n, size = x.shape[-1], x.element_size()
    if n <= 1 or not x.numel() or (x.stride(-1) == 1 and (residual is None or residual.stride(-1) == 1)):
        return False
    if n <= _AT_ONCE:
        return True
    if n > 2**18:
        return False
    return residual is not None or (size > 2 and n > 2048 and (x.numel() >= _ENOUGH or x.numel() <= 3 * n))


def in_pairs(align: int, x: Tensor, *others: Tensor | None) -> bool:
    """Whether numbers of a half type can be read as pairs, in 32-bit words."""
    halves = [t for t in (x, *others) if t is not None and t.element_size() == 2]
    return x.element_size() == 2 and align % 2 == 0 and all(t.data_ptr() % 4 == 0 for t in halves)


def _window(n: int, align: int, x: Tensor, residual: Tensor | None) -> int:
    """How many numbers 16 bytes have, if rows of all tensors begin at the same place within them; 1 if nobody gains."""
    alike = all(t is None or (t.data_ptr() % 16 == 0 and (t.stride(0) - n) % 8 == 0) for t in (x, residual))
    return 8 if x.element_size() == 2 and align == 1 and n > 256 and alike else 1


def board_of(words: int, dtype: torch.dtype, device: torch.device, early: bool = False) -> Tensor:
    """Zeros for programs to leave words on; EARLY where the next kernel waits for them itself."""
    board = empty((words,), torch.int64 if dtype == torch.float64 else torch.int32, device)
    block = 16384 // board.element_size()
    launch(fill, (triton.cdiv(words, block),), board, words, BLOCK=block, EARLY=early, num_warps=8)
    return board


#: The largest magnitude in eight bits.
LIMITS = {torch.float8_e4m3fn: 448, torch.int8: 127}


def _across_into(
    y: Tensor,
    total: Tensor | None,
    scale: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    eps: float,
) -> None:
    """Rows whose numbers lie apart, in one step or in two."""
    given = (y, x) if residual is None else (y, x, residual)
    (outer, inner, n), outers, strides = layout_of(x.dim() - 1, *given)
    capability = gpu(x.device)[0]
    plan = _across_plan(outer * inner, n, x.element_size(), capability)
    # Whole vectors of so many rows, where these lie side by side.
    vector = math.gcd(16 // x.element_size(), plan.constants["ROWS"], inner)
    side = math.gcd(vector, *(stride for along, _, step in strides[1:] for stride in (step, *along)))
    of_y, *of = strides
    constants = {"EPS": eps, "CENTRED": centred, "INTERPRETED": capability is None, **plan.constants}
    constants |= {"LANES": triton.next_power_of_2(plan.parts)}
    if len(outers) > 1:
        constants["OUTERS"] = outers[:-1]
    limit = LIMITS.get(y.dtype, 0)

    def step(which: int, align: int, stats: Tensor | None, x: Tensor, residual: Tensor | None, *of: Any) -> None:
        # The second step holds numbers only from their loads to their stores: a quarter of a part at once.
        less = min(4, plan.span // plan.constants["BLOCK"]) if which == 2 and plan.span > 256 else 1
        columns = plan.span // less
        programs = plan.programs * triton.cdiv(n, columns)
        warps = max(1, min(plan.warps, 2 * plan.warps // less))
        launch(
            _norm_across, (programs,), y, total, scale, stats, x, residual, weight, bias, outer, inner // align, n,
            plan.parts, _in_units(of_y, 1), *(_in_units(places, align) for places in of), align, STEP=which,
            LIMIT=limit, CHUNKS=columns // plan.constants["BLOCK"], num_warps=warps, **constants,
        )  # fmt: skip

    if plan.parts == 1:
        step(0, side, None, x, residual, of[0], of[-1])
        return
    words = plan.parts * outer * inner * (2 if centred else 1)
    stats = empty((words,), accumulated(x.dtype), x.device)
    step(1, side, stats, x, residual, of[0], of[-1])
    if total is not None:
        step(2, 1, stats, total, None, of_y, of_y)
    else:
        step(2, side, stats, x, None, of[0], of[0])


def _in_units(strides: tuple[tuple[int, ...], int, int], align: int) -> tuple[Any, int, int]:
    """Strides of OUTER's axes, or of its only one, and of N, in units of `align` neighbours along INNER."""
    along = tuple(stride // align for stride in strides[0])
    return along if len(along) > 1 else along[0], strides[1], strides[2] // align


def _quantise(y: Tensor, scale: Tensor, exact: Tensor) -> None:
    """Round rows to eight bits by operations of torch."""
    top = exact.abs().amax(-1, keepdim=True)
    scale.copy_(torch.where(top == 0, 1.0, top / LIMITS[y.dtype]))
    scaled = (exact / scale).float()
    y.copy_(scaled.round() if y.dtype == torch.int8 else scaled)


def _by_torch(
    y: Tensor,
    total: Tensor | None,
    scale: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    eps: float,
) -> None:
    """Normalise rows of any width by operations of torch."""
    if residual is not None:
        x = torch.add(x, residual, out=total)
    exact = x.to(accumulated(x.dtype))
    if centred:
        exact = exact - exact.mean(-1, keepdim=True)
        exact = exact - exact.mean(-1, keepdim=True)  # the first mean is rounded, which counts far from zero
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    exact = exact if weight is None else exact * weight.to(exact.dtype)
    exact = exact if bias is None else exact + bias.to(exact.dtype)
    if scale is None:
        y.copy_(exact)
    else:
        _quantise(y, scale, exact)


def norm_into(
    y: Tensor,
    total: Tensor | None,
    scale: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    eps: float,
) -> None:
    capability, processors = gpu(x.device)
    if y.dtype == torch.float8_e4m3fn and capability is not None and capability < (8, 9):
        raise NotImplementedError(
            f"norms: expected a GPU of capability 8.9 or more for float8_e4m3fn, got {capability[0]}.{capability[1]}; "
            "ask for torch.int8"
        )
    n = x.shape[-1]
    if n > WIDEST:
        apply(_by_torch, y, total, scale, x, residual, weight, bias, centred, eps)
        return
    if scale is not None and n > _HELD[x.element_size()]:
        exact = empty(x.shape, accumulated(x.dtype), x.device)
        norm_into(exact, total, None, x, residual, weight, bias, centred, eps)
        apply(_quantise, y, scale, exact)
        return
    weight = None if weight is None else contiguous(weight)
    bias = None if bias is None else contiguous(bias)
    if _across(x, residual):
        _across_into(y, total, scale, x, residual, weight, bias, centred, eps)
        return
    x = contiguous_rows(x)
    residual = None if residual is None else contiguous_rows(residual)
    align = aligned(n, x, residual)
    vector = _window(n, align, x, residual)
    pairs = in_pairs(align, x, residual, weight)
    lined = align * x.element_size() % 16 == 0 and all(t is None or t.data_ptr() % 16 == 0 for t in (x, residual))
    added = residual is not None
    plan = _plan(len(x), n, x.element_size(), capability, added, vector, pairs, processors, centred, lined)
    sizes = (len(x), n // align, x.stride(0) // align, 0 if residual is None else residual.stride(0) // align)
    constants = {"ALIGN": align, "EPS": eps, "CENTRED": centred, **plan.constants, "num_warps": plan.warps}
    grid = (plan.programs,)
    if plan.kernel == "shared":
        early = overlapping(x.device)
        board = board_of(plan.programs * (2 if centred else 1), x.dtype, x.device, bool(early))
        launch(
            _norm_shared, grid, y, total, x, residual, weight, bias, board, *sizes[1:], plan.span, plan.parts,
            PAIRS=pairs or plan.constants["VEC"] > 1, TRIES=0 if capability is None else 4096, LATE=bool(early),
            maxnreg=plan.registers, **constants, **early,
        )  # fmt: skip
    else:
        launch(
            _norm_rows, grid, y, total, scale, x, residual, weight, bias, *sizes,
            LIMIT=LIMITS.get(y.dtype, 0), INTERPRETED=capability is None, **constants,
        )  # fmt: skip


def check_norm(
    name: str, x: Any, like: Mapping[str, Any], vectors: Mapping[str, Any], centred: bool, eps: Any
) -> tuple[Any, ...]:
    """The arguments of a norm or its gradient: x, tensors `like` it, `vectors` of its width, or a sentence."""
    shapes(
        name, x=(x, "[..., D]"), **{what: (tensor, "[..., D]") for what, tensor in like.items()},
        **{what: (vector, "[D]?", FLOATING) for what, vector in vectors.items()},
    )  # fmt: skip
    eps = number(name, "eps", eps, "give a float such as 1e-6")
    return x, *like.values(), *vectors.values(), bool(centred), eps
