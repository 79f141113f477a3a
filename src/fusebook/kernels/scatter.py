# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/scatter.py. It needs torch, Triton, NumPy and _call.py.
"""ScatterND into zeros, masked: rows of updates are added to the rows of a new tensor that their indices name.

For indices ``[n, k]`` into an output whose first k axes hold R rows of D elements each, and updates ``[n, D]``,

    out[r, :] = sum of updates[i, :] over all i whose index names row r and is not masked

Rows without updates are zero. A negative index counts from the end, except for the masked value.

The kernels fuse four operations: write zeros, compare with the masked value, replace masked updates, add. The unfused
chain writes RD zeros. It reads and writes the nD updates to mask them. Then it reads them again and adds them to nD
elements of the output, which it reads and writes. The least traffic is to read nD and to write RD.

Sums are float32 (float64 in float64) and rounded once: a sum kept in float16 loses its tail after some hundred terms.
Limits: the output is contiguous; the only reduction is ``add``.

There are three strategies:

- *atomic*: write zeros, then add by atomic additions, in the order that the hardware takes.
- *sorted*: sort the updates by row, then add up each segment of one row in the order of its updates. The result has the
  same bits in every run. Up to some thousand updates, the first kernel sorts while it writes the zeros.
- *owner*: group the updates by row with integer atomics, then write each row of the output exactly once, zeros
  included. If the output and the updates are few, each program reads all indices instead.

In the kernels, the output is [R, D] and contiguous, and updates are [n, D] with a stride between rows. D and that
stride are counted in units of ALIGN elements: Triton only knows of an integer whether 16 divides it, and these units
show it that rows begin at multiples of 16 bytes. Offsets are int64, because tensors may have more than 2**31 elements.

A *key* is the row of an update, -1 if the update is left out. `order` lists the updates so that those of one row are
adjacent, `keys` their rows. The *span* of a row is its part of `order`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import (
    FLOATING,
    INTEGERS,
    INTERPRETED,
    Operator,
    accumulated,
    apply,
    capturing,
    contiguous,
    gpu,
    integer,
    launch,
    one_of,
    overlapping,
    shapes,
    side_by_side,
)

__all__ = ["embedding_backward", "masked_scatter_nd_eager", "masked_scatter_nd_of_shape", "scatter_nd_of_shape"]

# The unfused chain ---------------------------------------------------------------------------------------------------


def masked_scatter_nd_eager(shape: Sequence[int], indices: Tensor, updates: Tensor) -> Tensor:
    """Masked ScatterND as separate torch operations, to show what fusion saves.

    Parameters
    ----------
    shape : sequence of int
        R, D.
    indices : torch.Tensor
        ``[n, 1]``, from -1 to R - 1; -1 is masked.
    updates : torch.Tensor
        ``[n, D]``.

    Returns
    -------
    torch.Tensor
        ``[R, D]``, of the dtype of `updates`.
    """
    data = updates.new_zeros(shape)  # write RD
    masked = indices == -1  # read n indices, write n
    kept = torch.where(masked, 0, updates)  # read nD, write nD
    rows = indices[:, 0].clamp(min=0)  # read n indices, write n indices
    return data.index_add_(0, rows, kept)  # read 2nD, write nD: in all read 3nD, write RD + 2nD


# Zeros and keys ------------------------------------------------------------------------------------------------------


@triton.jit
def _zeros(out_ptr, block, SIZE, BLOCK: tl.constexpr):
    """Block number `block` of SIZE zeros. A full block has no mask, so that stores are wide whatever SIZE is."""
    first = block.to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)  # [BLOCK]
    none = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    if first + BLOCK <= SIZE:
        tl.store(out_ptr + at, none)  # write SIZE
    else:
        tl.store(out_ptr + at, none, mask=at < SIZE)


@triton.jit
def _scatter_nd_fill(out_ptr, SIZE, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """Write zeros. With EARLY, the next kernel may start now and waits itself before it needs them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    _zeros(out_ptr, tl.program_id(0), SIZE, BLOCK)


@triton.jit
def _row_of(indices_ptr, i, inside, sizes, masked, MASKED: tl.constexpr):
    """The row that index `i` names by a component for each of `sizes`, which may count from the end.

    It is -1 if a component is masked or out of range.
    """
    row = tl.zeros(i.shape, tl.int64)
    live = inside
    for axis in tl.static_range(len(sizes)):
        at = tl.load(indices_ptr + i * len(sizes) + axis, mask=inside, other=0).to(tl.int64)
        if MASKED:
            live = live & (at != masked)
        at = tl.where(at < 0, at + sizes[axis], at)
        live = live & (at >= 0) & (at < sizes[axis])
        row = row * sizes[axis] + at
    return tl.where(live, row, -1)


@triton.jit
def _scatter_nd_keys(
    keys_ptr, indices_ptr, n, masked, sizes, MASKED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False
):
    """Write the row that each index names, for a sort that reads it often."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(keys_ptr + i, _row_of(indices_ptr, i, i < n, sizes, masked, MASKED), mask=i < n)


# Atomic --------------------------------------------------------------------------------------------------------------


@triton.jit
def _scatter_nd_atomic(
    sums_ptr, indices_ptr, updates_ptr, sizes, D, n, stride, masked,
    MASKED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LATE: tl.constexpr = False,
):  # fmt: skip
    """Add ROWS updates to zeros. The hardware orders the additions to one element, differently from run to run."""
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    i = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    columns = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = _row_of(indices_ptr, i, i < n, sizes, masked, MASKED)  # [ROWS]
    live = (row >= 0)[:, None] & (columns < D)[None, :]  # [ROWS, BLOCK]
    at = (i * stride * ALIGN)[:, None] + columns[None, :]
    values = tl.load(updates_ptr + at, mask=live, other=0.0).to(sums_ptr.dtype.element_ty)  # read nD
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros, while the updates are already loading
    # relaxed: additions need no order among each other, and only a later kernel reads the sums.
    tl.atomic_add(sums_ptr + (row * D)[:, None] + columns[None, :], values, mask=live, sem="relaxed")  # read, write nD


@triton.jit
def _scatter_nd_round(out_ptr, sums_ptr, SIZE, BLOCK: tl.constexpr, LATE: tl.constexpr = False):
    """Round float32 sums to the dtype of the output."""
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the sums
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    sums = tl.load(sums_ptr + at, mask=at < SIZE, other=0.0)  # read RD
    tl.store(out_ptr + at, sums, mask=at < SIZE)  # write RD


# Sorted: zeros, then the rows that have updates ----------------------------------------------------------------------


@triton.jit
def _scatter_nd_sort(
    out_ptr, order_ptr, keys_ptr, starts_ptr, ends_ptr, counters_ptr, indices_ptr, SIZE, sizes, n, COUNTERS, masked,
    MASKED: tl.constexpr, WIDE: tl.constexpr, MINE: tl.constexpr, THEIRS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False, LATE: tl.constexpr = False,
):  # fmt: skip
    """Write SIZE zeros, and sort the updates by counting: the position of an update is the number that precede it.

    The first programs compare each of n updates with all others while the other programs write zeros.
    """
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the keys
    sorting = tl.cdiv(n, MINE)
    if tl.program_id(0) >= sorting:
        _zeros(out_ptr, tl.program_id(0) - sorting, SIZE, BLOCK)  # write RD
        return
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # Row and number in one integer: all differ, and one comparison sorts by row first and by number within a row.
    KEY: tl.constexpr = tl.int64 if WIDE else tl.int32
    LAST: tl.constexpr = 2**63 - 1 if WIDE else 2**31 - 1
    i = tl.program_id(0) * MINE + tl.arange(0, MINE)  # [MINE]
    row = _row_of(indices_ptr, i, i < n, sizes, masked, MASKED).to(KEY)
    least = ((row + 1) * n)[:, None]  # [MINE, 1]; of the updates of this row
    before = tl.zeros([MINE, THEIRS], tl.int32)
    ahead = tl.zeros([MINE, THEIRS], tl.int32)
    upto = tl.zeros([MINE, THEIRS], tl.int32)
    for start in range(0, n, THEIRS):
        j = start + tl.arange(0, THEIRS)  # [THEIRS]
        theirs = _row_of(indices_ptr, j, j < n, sizes, masked, MASKED).to(KEY)
        theirs = tl.where(j < n, (theirs + 1) * n + j, LAST)[None, :]  # [1, THEIRS]; padding sorts after all updates
        before += (theirs < least + i[:, None]).to(tl.int32)  # [MINE, THEIRS]
        ahead += (theirs < least).to(tl.int32)
        upto += (theirs < least + n).to(tl.int32)
    place = tl.sum(before, 1)  # [MINE]
    tl.store(order_ptr + place, i, mask=i < n)
    tl.store(keys_ptr + place, row, mask=i < n)
    tl.store(starts_ptr + row, tl.sum(ahead, 1), mask=row >= 0)  # all updates of a row store the same values
    tl.store(ends_ptr + row, tl.sum(upto, 1), mask=row >= 0)
    # The next kernel counts with these.
    for start in range(tl.program_id(0) * THEIRS, COUNTERS, sorting * THEIRS):
        at = start + tl.arange(0, THEIRS)
        tl.store(counters_ptr + at, tl.zeros([THEIRS], counters_ptr.dtype.element_ty), mask=at < COUNTERS)


@triton.jit
def _scatter_nd_segments(
    out_ptr, updates_ptr, parts_ptr, counters_ptr, order_ptr, keys_ptr, starts_ptr, ends_ptr, D, n, stride,
    ALIGN: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    LATE: tl.constexpr = False,
):  # fmt: skip
    """Write the rows that have updates: the sum of each segment of equal keys.

    A segment that crosses a multiple of CHUNK is cut there into pieces, which different programs add up.
    """
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the sort, before the kernel reads anything that the sort writes
        tl.extra.cuda.gdc_launch_dependents()
    FLOAT: tl.constexpr = parts_ptr.dtype.element_ty
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles
    columns = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = columns < D
    # ROWS positions of `order`, and the CHUNK keys from each position on. None of these loads waits for another.
    p = group * ROWS + tl.arange(0, ROWS)  # [ROWS]
    q = p[:, None] + tl.arange(0, CHUNK)[None, :]  # [ROWS, CHUNK]
    row = tl.load(keys_ptr + p, mask=p < n, other=-1)
    i = tl.load(order_ptr + p, mask=p < n, other=0).to(tl.int64)
    first = row != tl.load(keys_ptr + p - 1, mask=(p > 0) & (p < n), other=-1)
    theirs = tl.load(keys_ptr + q, mask=(q < n) & (q // CHUNK == (p // CHUNK)[:, None]), other=-1)
    begins = (row >= 0) & (first | (p % CHUNK == 0))
    if tl.max(begins.to(tl.int32), 0) > 0:
        at = (i * stride * ALIGN)[:, None] + columns
        acc = tl.load(updates_ptr + at, mask=begins[:, None] & inside, other=0.0).to(FLOAT)  # read nD, with those below
        count = tl.where(begins, tl.sum((theirs == row[:, None]).to(tl.int32), 1), 0)
        for t in range(1, tl.max(count, 0), TOGETHER):
            for u in tl.static_range(TOGETHER):
                live = t + u < count
                i = tl.load(order_ptr + p + t + u, mask=live, other=0).to(tl.int64)  # [ROWS]
                at = (i * stride * ALIGN)[:, None] + columns
                acc += tl.load(updates_ptr + at, mask=live[:, None] & inside, other=0.0).to(FLOAT)
        out = out_ptr + (row.to(tl.int64) * D)[:, None] + columns
        goes_on = row == tl.load(keys_ptr + p + count, mask=begins & (p + count < n), other=-1)
        whole = first & (goes_on == 0)
        tl.store(out, acc, mask=(begins & whole)[:, None] & inside)  # write up to nD
        shared = begins & (whole == 0)
        if tl.max(shared.to(tl.int32), 0) > 0:
            start = tl.load(starts_ptr + row, mask=shared, other=0)
            end = tl.load(ends_ptr + row, mask=shared, other=0)
            _add_pieces(
                out, acc, parts_ptr, counters_ptr, p, start, end, shared, columns, D, tile, tiles,
                CHUNK, ROWS, BLOCK, TOGETHER,
            )  # fmt: skip


@triton.jit
def _add_pieces(
    out, acc, parts_ptr, counters_ptr, p, start, end, shared, columns, D, tile, tiles,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Store one piece of a segment. The program that is last adds all pieces, in their order: always the same bits."""
    inside = columns < D
    base = start // CHUNK
    pieces = tl.where(shared, (end - 1) // CHUNK - base + 1, 0)
    # In CHUNK positions of `order` begin at most one first piece of several, and one later piece.
    slot = (2 * (p // CHUNK) + (p % CHUNK != 0).to(p.dtype)).to(tl.int64)
    tl.store(parts_ptr + (slot * D)[:, None] + columns, acc, mask=shared[:, None] & inside)
    tl.debug_barrier()  # all threads store before one of them counts
    counter = base * tiles + tile
    if ROWS == 1:
        met = tl.atomic_add(counters_ptr + tl.max(counter, 0), 1)
    else:
        one = tl.full([ROWS], 1, counters_ptr.dtype.element_ty)
        met = tl.atomic_add(counters_ptr + counter, one, mask=shared)
    tl.debug_barrier()
    left = tl.where(shared & (met == pieces - 1), pieces, 0)  # [ROWS]; 0 unless this program is the last
    acc = tl.zeros([ROWS, BLOCK], acc.dtype)
    for piece in range(0, tl.max(left, 0), TOGETHER):
        for u in tl.static_range(TOGETHER):
            within = (piece + u == 0) & (start % CHUNK != 0)  # the first piece may begin within its chunk
            slot = (2 * (base + piece + u) + within.to(base.dtype)).to(tl.int64)
            part = parts_ptr + (slot * D)[:, None] + columns
            # .cg: read from L2, which has what other multiprocessors stored; L1 may hold older values.
            acc += tl.load(part, mask=(piece + u < left)[:, None] & inside, other=0.0, cache_modifier=".cg")
    tl.store(out, acc, mask=(left > 0)[:, None] & inside)


# Owner: every row of the output, written once ------------------------------------------------------------------------


@triton.jit
def _scatter_nd_scan(
    out_ptr, indices_ptr, updates_ptr, sizes, D, n, stride, masked,
    MASKED: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Small outputs: each program has one row, reads all indices, and adds up the updates of its row."""
    FLOAT: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    i = tl.arange(0, N)  # [N]
    mine = _row_of(indices_ptr, i, i < n, sizes, masked, MASKED) == row  # read n indices
    count = tl.sum(mine.to(tl.int32), 0)
    acc = tl.zeros([1, BLOCK], FLOAT)
    if N <= 8 or count <= 8:
        # Few: find their numbers one after another, in rising order; the four loads are in flight together.
        last = tl.full([], -1, tl.int32)
        for _ in range(0, count, 4):
            for _u in tl.static_range(4):
                last = tl.min(tl.where(mine & (i > last), i, N), 0)
                at = last.to(tl.int64) * stride * ALIGN + columns
                # A bound, not a mask of one element: Triton 3.9 interprets no load under a mask that is made of one.
                within = tl.where(last < N, D, 0)
                acc += tl.load(updates_ptr + at, mask=columns < within, other=0.0).to(FLOAT)  # read nD
    else:
        # Many: go through all updates and load those of this row.
        sums = tl.zeros([GROUP, BLOCK], FLOAT)
        for first in range(0, n, 4 * GROUP):
            for u in tl.static_range(4):
                j = first + u * GROUP + tl.arange(0, GROUP)[:, None]  # [GROUP, 1]
                live = (_row_of(indices_ptr, j, j < n, sizes, masked, MASKED) == row) & (columns < D)
                sums += tl.load(updates_ptr + j.to(tl.int64) * stride * ALIGN + columns, mask=live, other=0.0).to(FLOAT)
        acc = tl.sum(sums, 0)[None, :]
    tl.store(out_ptr + row * D + columns, acc, mask=columns < D)  # write RD


@triton.jit
def _scatter_nd_count(slots_ptr, counts_ptr, indices_ptr, sizes, n, masked, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Count the updates of each row. The count that an update finds is its slot within the row."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = _row_of(indices_ptr, i, i < n, sizes, masked, MASKED)
    live = row >= 0
    slot = tl.atomic_add(counts_ptr + row, tl.full([BLOCK], 1, counts_ptr.dtype.element_ty), mask=live, sem="relaxed")
    tl.store(slots_ptr + i, slot, mask=live)


@triton.jit
def _scatter_nd_spans(starts_ptr, ends_ptr, R, BLOCK: tl.constexpr):
    """Turn the counts in `ends` into the span of each row. ends[R] is how much of `order` has been assigned."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    count = tl.load(ends_ptr + row, mask=row < R, other=0)
    # Blocks of rows take their part of `order` in any order: rows need not be sorted, only their updates adjacent.
    base = tl.atomic_add(ends_ptr + R, tl.sum(count, 0), sem="relaxed")
    end = base + tl.cumsum(count, 0)
    tl.store(starts_ptr + row, end - count, mask=row < R)
    tl.store(ends_ptr + row, end, mask=row < R)


@triton.jit
def _scatter_nd_lists(
    order_ptr, keys_ptr, starts_ptr, slots_ptr, indices_ptr, sizes, n, masked, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the number of each update into the span of its row."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = _row_of(indices_ptr, i, i < n, sizes, masked, MASKED)
    live = row >= 0
    at = tl.load(starts_ptr + row, mask=live, other=0) + tl.load(slots_ptr + i, mask=live, other=0)
    tl.store(order_ptr + at, i, mask=live)
    tl.store(keys_ptr + at, row, mask=live)


@triton.jit
def _scatter_nd_chunks(
    parts_ptr, updates_ptr, order_ptr, keys_ptr, ends_ptr, R, D, stride,
    ALIGN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add up each CHUNK of `order` that belongs to one row alone, so that a long row is not the work of one program."""
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    begin = chunk * CHUNK
    filled = tl.load(ends_ptr + R)  # the rest of `order` is not written
    if begin + CHUNK <= filled:
        row = tl.load(keys_ptr + begin)
        if (row >= 0) & (row == tl.load(keys_ptr + begin + CHUNK - 1)):
            columns = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
            acc = tl.zeros([BLOCK], parts_ptr.dtype.element_ty)
            for t in range(0, CHUNK, TOGETHER):
                for u in tl.static_range(TOGETHER):
                    i = tl.load(order_ptr + begin + t + u).to(tl.int64)
                    values = tl.load(updates_ptr + i * stride * ALIGN + columns, mask=columns < D, other=0.0)
                    acc += values.to(acc.dtype)  # read up to nD
            tl.store(parts_ptr + chunk * D + columns, acc, mask=columns < D)


@triton.jit
def _scatter_nd_owner(
    out_ptr, updates_ptr, order_ptr, starts_ptr, ends_ptr, parts_ptr, R, D, stride,
    ALIGN: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Write STEPS times ROWS rows of the output once: the sum of their updates and of their whole chunks, or zeros."""
    FLOAT: tl.constexpr = parts_ptr.dtype.element_ty
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    first = (tl.program_id(0) // tiles).to(tl.int64) * (STEPS * ROWS)
    columns = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = columns < D
    # Most rows are zeros, and to start a program takes as long as to write such a row: so programs loop over rows.
    for step in range(STEPS):
        rows = first + step * ROWS + tl.arange(0, ROWS)  # [ROWS]
        begin = tl.load(starts_ptr + rows, mask=rows < R, other=0)
        end = tl.load(ends_ptr + rows, mask=rows < R, other=0)
        acc = tl.zeros([ROWS, BLOCK], FLOAT)
        if tl.max(end - begin, 0) > 0:
            # Another kernel has added up the whole chunks between begin and end. At most CHUNK - 1 updates precede
            # them, and as many follow. `loose` counts all of these updates, `head` those that precede.
            chunk = (begin + CHUNK - 1) // CHUNK
            whole = tl.maximum(end // CHUNK - chunk, 0)
            head = chunk * CHUNK - begin
            loose = end - begin - whole * CHUNK
            for t in range(0, tl.max(loose, 0), TOGETHER):
                for u in tl.static_range(TOGETHER):
                    live = t + u < loose
                    at = begin + t + u + tl.where(t + u >= head, whole * CHUNK, 0)
                    i = tl.load(order_ptr + at, mask=live, other=0).to(tl.int64)  # [ROWS]
                    at = (i * stride * ALIGN)[:, None] + columns
                    values = tl.load(updates_ptr + at, mask=live[:, None] & inside, other=0.0)  # read nD
                    acc += values.to(FLOAT)
            for t in range(0, tl.max(whole, 0), TOGETHER):
                for u in tl.static_range(TOGETHER):
                    at = ((chunk + t + u).to(tl.int64) * D)[:, None] + columns
                    acc += tl.load(parts_ptr + at, mask=(t + u < whole)[:, None] & inside, other=0.0)
        tl.store(out_ptr + (rows * D)[:, None] + columns, acc, mask=(rows < R)[:, None] & inside)  # write RD


# The gradient --------------------------------------------------------------------------------------------------------


@triton.jit
def _gather_nd_rows(
    out_ptr, indices_ptr, source_ptr, sizes, D, n, masked,
    MASKED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the row that each index names, zeros if it names none."""
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    i = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    columns = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    row = _row_of(indices_ptr, i, i < n, sizes, masked, MASKED)  # [ROWS]
    live = (row >= 0)[:, None] & (columns < D)
    values = tl.load(source_ptr + (row * D)[:, None] + columns, mask=live, other=0.0)  # read nD
    tl.store(out_ptr + (i * D)[:, None] + columns, values, mask=(i < n)[:, None] & (columns < D))  # write nD


# Launch configs ------------------------------------------------------------------------------------------------------

STRATEGIES = ("atomic", "sorted", "owner")


class Config(NamedTuple):
    """A strategy and its launch config."""

    strategy: str
    grouping: str  # of updates by row: "count" or torch's "sort", "lists" by atomics, "scan" of all indices, or none
    block: int  # columns of a tile
    rows: int  # rows of a tile: of the output for an owner, of updates otherwise
    together: int  # updates whose loads are in flight together
    chunk: int  # updates of one row that one program adds up
    steps: int  # tiles of the output that an owner takes in turn
    warps: int
    fill: int  # zeros that a program writes


_ANY = 2**63
_GROUPING = 576  # bytes of additions that take as long as to group an update
# Updates up to which a kernel folds components itself. Beyond, it would read them too often, or run out of registers.
_FOLDING = {"scan": 8, "count": 1536}
# Tuned on an H200, by bytes of an element. The first line whose limit fits: bytes of a row up to which it holds, bytes
# of a row that a program takes, elements of a tile that short rows share, together, chunk, steps, warps. A negative
# chunk is an exponent: 2 ** (bits of the root of n + chunk), at least 16, balances chunks against their sums.
_SHORT, _LONG = (8191, 2048, 1024, 8, 16, 1, 4), (_ANY, 4096, 1024, 8, 32, 1, 8)
_TABLES: dict[str, dict[int, tuple[tuple[int, ...], ...]]] = {
    "scan": dict.fromkeys((2, 4, 8), ((_ANY, 2048, 1, 16, 0, 1, 4),)),
    "atomic": dict.fromkeys((2, 4, 8), ((_ANY, 8192, 1024, 1, 0, 1, 4),)),
    "atomic in L2": dict.fromkeys((2, 4, 8), ((_ANY, 2048, 512, 1, 0, 1, 4),)),
    "count": {
        2: ((256, 2048, 256, 8, 32, 1, 4), (_ANY, 2048, 1024, 8, 16, 1, 4)),
        4: (_SHORT, _LONG),
        8: (_SHORT, _LONG),
    },
    "count in L2": dict.fromkeys((2, 4, 8), ((_ANY, 2048, 1024, 8, 16, 1, 4),)),
    "lists": dict.fromkeys((2, 4, 8), ((8191, 4096, 1024, 4, -3, 4, 4), (_ANY, 4096, 1024, 4, -2, 4, 4))),
    # 256 updates of each row or more: there are few owners, so their tiles are small.
    "long lists": {size: ((_ANY, 512 * size, 1024, 8, 64, 1, 4),) for size in (2, 4, 8)},
    "interpreted": dict.fromkeys((2, 4, 8), ((_ANY, 65536, 16384, 2, 0, 2, 1),)),
}


def _scan_pays(R: int, D: int, n: int, few: int) -> bool:
    """Whether all programs read all indices, in one launch: launches take most of the time of little work."""
    return R <= 512 and R * D <= (2**20 if n <= few else 2**17) and n <= max(few, min(512, 2 * R))


def _fastest(R: int, D: int, n: int, size: int, few: int, many: int) -> str:
    """The strategy that was fastest on an H200. `few` and `many` are numbers of updates."""
    cached = R * D * max(size, 4) <= 2**24  # sums that stay in L2 between the zeros and the additions
    if _scan_pays(R, D, n, few) and (size < 4 or n <= 16 or n > few):
        return "owner"
    # Comparing all pairs of updates costs little next to writing the zeros, if most rows have no update.
    named = R // 4 if size >= 4 else 3 * R // 2
    strategy = "sorted" if n <= many and (cached or n <= max(few, named)) else "owner"
    # Atomic additions move fewer bytes a second than loads. But grouping costs time for
    # each update and for its launches. fp16 and bf16 are rounded by one more kernel.
    if cached:
        # In fp16 and bf16, thousands of updates of one row would wait for each other.
        suits = size >= 4 or (few < n <= 4096 * R and R * D <= (2**20 if n <= 2048 else 2**22))
        atomic = suits and n * D <= (2**26 if size >= 4 else 2**25)
    else:
        # For short rows, rounding all sums costs less than looking up the updates of each row.
        suits = size >= 4 or (D <= 24 and n > many)
        atomic = suits and n > few and n * (D * size - _GROUPING) <= (14 if strategy == "sorted" else 48) * 2**20
    return "atomic" if atomic else strategy


def scatter_config(
    sizes: tuple[int, int, int], dtype: torch.dtype, capability: tuple[int, int] | None, *, strategy: str | None = None,
    deterministic: bool = False,
) -> Config:  # fmt: skip
    """The strategy, the fastest unless given, and its launch config.

    `sizes` are R, D and n; `capability` is None in the interpreter. With `deterministic`, the result must have the same
    bits in every run, which *sorted* has.
    """
    R, D, n = sizes
    size = dtype.itemsize
    # The interpreter's time is programs times operations. It has large tiles, and meets each kernel with fewer updates.
    few, many = (16, 256) if capability is None else (64, 4096)
    strategy = strategy or ("sorted" if deterministic else _fastest(R, D, n, size, few, many))
    grouping = ""
    if strategy == "sorted":
        grouping = "count" if n <= many else "sort"
    elif strategy == "owner":
        grouping = "scan" if _scan_pays(R, D, n, few) else "lists"
    table = grouping or "atomic"
    if table in ("sort", "lists"):
        table = "long lists" if n >= 256 * R else "lists"
    elif table != "scan" and R * D * max(size, 4) <= 2**24:
        table += " in L2"
    row = _TABLES["interpreted" if capability is None else table][size]
    _, width, tile, together, chunk, steps, warps = next(line for line in row if D * size <= line[0])
    if capability is None:
        chunk = 8 if n <= 64 else 32
    elif chunk < 0:
        chunk = 2 ** max(4, math.isqrt(n).bit_length() + chunk)
    block = min(triton.next_power_of_2(D), width // size)
    most = triton.next_power_of_2(max(1, R if grouping in ("sort", "lists") else n))
    rows = max(1, min(tile // block, most))
    # Few programs start quickly; from 64 MiB on, small ones in the order of addresses write faster.
    fill = 2**18 if capability is None else 16384 if R * D * size <= 2**26 else 4096
    return Config(strategy, grouping, block, rows, together, chunk, steps, warps, fill // size)


_config = functools.lru_cache(maxsize=4096)(scatter_config)

# Launchers -----------------------------------------------------------------------------------------------------------


def _launch_lists(
    order: Tensor, keys: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, indices: Tensor, R: int,
    axes: tuple[int, ...], n: int, masked: int | None,
) -> None:  # fmt: skip
    """Group the updates by row with integer atomics."""
    constants = {"MASKED": masked is not None, "BLOCK": 256}
    grid = (triton.cdiv(n, 256),)
    launch(_scatter_nd_fill, (triton.cdiv(R + 1, 4096),), ends, R + 1, BLOCK=4096)
    launch(_scatter_nd_count, grid, slots, ends, indices, axes, n, masked or 0, **constants)
    launch(_scatter_nd_spans, (triton.cdiv(R, 1024),), starts, ends, R, BLOCK=1024)
    launch(_scatter_nd_lists, grid, order, keys, starts, slots, indices, axes, n, masked or 0, **constants)


def _folded(shape: Sequence[int], indices: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, int, int]]:
    """Indices as a contiguous ``[n, k]``, the axes that they name, and R, D and n."""
    k = indices.shape[-1]
    n = math.prod(indices.shape[:-1])
    sizes = math.prod(shape[:k]), math.prod(shape[k:]), n
    if k == 0:  # every index names the whole output
        return apply(torch.zeros, (n, 1), dtype=indices.dtype, device=indices.device), (1,), sizes
    return contiguous(indices).view(n, k), tuple(shape[:k]), sizes


def _rows(updates: Tensor, n: int, D: int) -> Tensor:
    """Updates as ``[n, D]`` with adjacent elements in each row."""
    try:
        rows = updates.view(n, D)
    except RuntimeError:  # no two strides describe these axes
        return apply(Tensor.contiguous, updates).view(n, D)
    return apply(Tensor.contiguous, rows) if D > 1 and rows.stride(1) != 1 else rows


def _scatter_outputs(
    shape: Sequence[int], indices: Tensor, updates: Tensor, masked: int | None, strategy: str
) -> Tensor:
    try:
        return updates.new_empty(shape)
    except RuntimeError as error:  # torch.OutOfMemoryError is one kind
        size = math.prod(shape) * updates.element_size()
        raise torch.OutOfMemoryError(
            f"scatter_nd: expected an output that memory on {updates.device} can hold, got shape {tuple(shape)} of "
            f"{updates.dtype}, {size} bytes; give a smaller shape, or free memory first"
        ) from error


def _scatter_into(
    out: Tensor, shape: Sequence[int], indices: Tensor, updates: Tensor, masked: int | None, strategy: str
) -> None:
    """An empty `strategy` is the fastest one."""
    dtype, device = updates.dtype, updates.device
    masked = masked if indices.shape[-1] else None
    indices, axes, sizes = _folded(shape, indices)
    R, D, n = sizes
    if n == 0:
        apply(Tensor.zero_, out)
        return
    updates = _rows(updates, n, D)
    c = _config(
        sizes, dtype, gpu(device)[0], strategy=strategy or None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    # Numbers of rows and of updates: int32 halves the traffic for them.
    whole = torch.int32 if max(R, n) < 2**31 - 1 else torch.int64
    late = {}
    if c.grouping == "sort" or (len(axes) > 1 and n > _FOLDING.get(c.grouping, n)):
        # The sort is launched while the rows are written.
        keys, late = indices.new_empty((n,), dtype=whole), overlapping(device) if c.grouping == "count" else {}
        block = 4096 if INTERPRETED else 256
        launch(
            _scatter_nd_keys, (triton.cdiv(n, block),), keys, indices, n, masked or 0, axes,
            MASKED=masked is not None, BLOCK=block, EARLY=bool(late),
        )  # fmt: skip
        indices, axes, masked = keys, (R,), -1  # updates that are left out have key -1 now
    stride = updates.stride(0) if updates.dim() == 2 else D
    align = math.gcd(max(1, 16 // updates.element_size()), D, stride)  # all rows begin at multiples of it
    named = indices, updates, axes, D // align, n, stride // align, masked or 0
    constants = {"MASKED": masked is not None, "ALIGN": align, "BLOCK": c.block, "num_warps": c.warps}
    tiles = triton.cdiv(D, c.block)
    if c.strategy == "atomic":
        sums = out if accumulated(dtype) == dtype else torch.empty(shape, dtype=torch.float32, device=device)
        fills = triton.cdiv(R * D, c.fill)
        # Each program signals; from some thousand programs on, that costs more than it saves.
        early = overlapping(device) if fills <= 4096 else {}
        warps = 8 if c.fill >= 4096 else 4
        launch(_scatter_nd_fill, (fills,), sums, R * D, BLOCK=c.fill, EARLY=bool(early), num_warps=warps)
        programs = triton.cdiv(n, c.rows) * tiles
        launch(_scatter_nd_atomic, (programs,), sums, *named, ROWS=c.rows, LATE=bool(early), **constants, **early)
        if sums is not out:
            late = overlapping(device)
            launch(_scatter_nd_round, (fills,), out, sums, R * D, BLOCK=c.fill, LATE=bool(late), **late)
    elif c.grouping == "scan":
        most = triton.next_power_of_2(n)
        launch(_scatter_nd_scan, (R * tiles,), out, *named, N=most, GROUP=c.together, **constants)
    else:
        _launch_grouped(out, named, whole, masked, c, **late)


def _launch_grouped(
    out: Tensor, named: tuple[Any, ...], whole: torch.dtype, masked: int | None, c: Config, **late: bool
) -> None:  # fmt: skip
    """Bring the updates of a row together, and add them up."""
    indices, updates, axes, units, n, stride, _ = named
    device = out.device
    R = math.prod(axes)
    D = out.numel() // R
    tiles, pieces = triton.cdiv(D, c.block), 2 * (n // c.chunk + 1)
    room = [((pieces, D), accumulated(out.dtype)), ((2, R + 1), whole), ((n,), whole), ((n,), whole)]
    constants = {"ALIGN": D // units, "CHUNK": c.chunk, "TOGETHER": c.together}
    if c.grouping == "count":
        parts, (starts, ends), keys, order, counters = side_by_side(device, *room, ((pieces * tiles,), torch.int32))
        # A sort while all zeros are written. On GPUs that can do so, the second kernel starts while the first one runs.
        early = overlapping(device)
        mine, theirs = (256, 256) if INTERPRETED else (4, min(256, max(32, triton.next_power_of_2(n))))
        launch(
            _scatter_nd_sort, (triton.cdiv(n, mine) + triton.cdiv(R * D, c.fill),),
            out, order, keys, starts, ends, counters, indices, R * D, axes, n, len(counters), masked or 0,
            MASKED=masked is not None, WIDE=(R + 2) * n >= 2**31, MINE=mine, THEIRS=theirs, BLOCK=c.fill,
            EARLY=bool(early), LATE=bool(late), **late,
        )  # fmt: skip
        launch(
            _scatter_nd_segments, (triton.cdiv(n, c.rows) * tiles,),
            out, updates, parts, counters, order, keys, starts, ends, units, n, stride,
            ROWS=c.rows, BLOCK=c.block, LATE=bool(early), num_warps=c.warps, **constants, **early,
        )  # fmt: skip
        return
    parts, (starts, ends), keys, order, slots = side_by_side(device, *room, ((n,), whole))
    if c.grouping == "sort":
        keys, order = apply(torch.sort, indices, stable=True)
        rows = apply(torch.arange, R + 2, dtype=whole, device=device)
        starts = apply(torch.searchsorted, keys, rows, out_int32=whole == torch.int32)
        ends = starts[1:]
    else:
        _launch_lists(order, keys, starts, ends, slots, indices, R, axes, n, masked)
    block = min(c.block, 512)  # chunks are few, so their columns are shared by more programs
    launch(
        _scatter_nd_chunks, (triton.cdiv(n, c.chunk) * triton.cdiv(D, block),),
        parts, updates, order, keys, ends, R, units, stride, BLOCK=block, **constants,
    )  # fmt: skip
    launch(
        _scatter_nd_owner, (triton.cdiv(R, c.steps * c.rows) * tiles,),
        out, updates, order, starts, ends, parts, R, units, stride,
        STEPS=c.steps, ROWS=c.rows, BLOCK=c.block, num_warps=c.warps, **constants,
    )  # fmt: skip


def _gather_into(out: Tensor, source: Tensor, indices: Tensor, masked: int | None) -> None:
    """The rows of `source` that indices ``[..., k]`` name, zeros for an index that names none."""
    k = indices.shape[-1]
    source = contiguous(source)
    indices, axes, (R, D, n) = _folded(source.shape, indices)
    if R == 0:
        apply(Tensor.zero_, out)
        return
    align = math.gcd(max(1, 16 // source.element_size()), D)
    block = min(triton.next_power_of_2(D), 2048)
    rows = max(1, min((65536 if INTERPRETED else 1024) // block, triton.next_power_of_2(n)))
    masked = masked if k else None
    launch(
        _gather_nd_rows, (triton.cdiv(n, rows) * triton.cdiv(D, block),),
        out, indices, source, axes, D // align, n, masked or 0,
        MASKED=masked is not None, ALIGN=align, ROWS=rows, BLOCK=block,
    )  # fmt: skip


def _keep_for_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, indices, _, ctx.masked, ctx.strategy = inputs
    ctx.save_for_backward(indices)


def _gradient_of_updates(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor, None, None]:
    (indices,) = ctx.saved_tensors
    return None, None, _gather(dy, indices, ctx.masked), None, None


def _keep_for_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    source, indices, ctx.masked = inputs
    ctx.shape = source.shape
    ctx.save_for_backward(indices)


def _gradient_of_source(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    (indices,) = ctx.saved_tensors
    return _scatter("scatter_nd_of_shape", ctx.shape, indices, dy, ctx.masked, "add", False, None), None, None


# Arguments -----------------------------------------------------------------------------------------------------------

_REDUCTIONS = ("none", "add", "mul", "max", "min")


def _shape_of(name: str, shape: Any) -> tuple[int, ...]:
    """The shape as a tuple of integers."""
    if isinstance(shape, Tensor):
        if shape.is_cuda:
            raise TypeError(
                f"{name}: expected shape on the host, got a tensor on {shape.device}, and reading it would wait for "
                "the GPU; pass shape.tolist() once"
            )
        if shape.dim() != 1 or shape.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"{name}: expected a shape tensor with one axis of int32 or int64, got {shape.dim()} axes of "
                f"{shape.dtype}; pass a tuple of integers"
            )
        shape = shape.tolist()
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence):
        raise TypeError(
            f"{name}: expected shape to be a sequence of integers, got {type(shape).__name__}; pass a tuple"
        )
    sizes = tuple(integer(name, "each size in shape", size, "convert it first") for size in shape)
    if any(not isinstance(size, torch.SymInt) and size < 0 for size in sizes):
        raise ValueError(f"{name}: expected sizes from 0 up in shape, got {sizes}; give each axis its length")
    return sizes


def _checked_shape(name: str, shape: Any, indices: Any, updates: Any, reduction: Any, strategy: Any) -> tuple[int, ...]:
    """Check all that is known without reading values; return the shape."""
    shape = _shape_of(name, shape)
    given = {"indices": (indices, "[..., k]", INTEGERS)}
    k = shapes(name, **given)["k"]
    if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
        raise ValueError(
            f"{name}: expected reduction to be 'add', got {reduction!r}; ONNX knows {', '.join(_REDUCTIONS)}"
        )
    if reduction != "add":
        raise NotImplementedError(
            f"{name}: expected reduction to be 'add', got {reduction!r}, which is not implemented; use torch's "
            "index_reduce_ or index_put_ on a tensor of zeros"
        )
    one_of(name, "strategy", strategy, (None, *STRATEGIES), "None chooses")
    if k > len(shape):
        raise ValueError(
            f"{name}: expected indices of at most {len(shape)} components, since shape {shape} has {len(shape)} axes, "
            f"got {k}; the last axis of indices holds the components"
        )
    what = "dy" if name == "embedding_backward" else "updates"
    shapes(name, **given, **{what: (updates, (*indices.shape[:-1], *shape[k:]), FLOATING)})
    known = not torch.compiler.is_compiling() and all(isinstance(size, int) for size in shape)
    if known and math.prod(shape) * updates.element_size() >= 2**63:
        raise ValueError(
            f"{name}: expected an output of less than 2**63 bytes, got shape {shape} of {updates.dtype}; give a shape "
            "that memory can hold"
        )
    return shape


def _refuse_out_of_range(name: str, shape: tuple[int, ...], indices: Tensor, masked: int | None) -> None:
    """Read the indices and raise IndexError for the first one out of range. Waits for the GPU."""
    if indices.numel() == 0 or capturing(indices):
        return
    k = indices.shape[-1]
    flat = indices.reshape(-1, k)
    least, most = torch.stack(torch.aminmax(flat, dim=0)).tolist()  # one transfer, and usually the end
    if all(-size <= low and high < size for size, low, high in zip(shape, least, most, strict=False)):
        return
    sizes = torch.tensor(shape[:k], device=flat.device)
    wrong = (flat < -sizes) | (flat >= sizes)
    if masked is not None:
        wrong &= ~(flat == masked).any(1, keepdim=True)  # a masked index may be out of range
    positions = wrong.nonzero()
    if not len(positions):
        return
    i, axis = positions[0].tolist()
    place = torch.unravel_index(torch.tensor(i), indices.shape[:-1])
    position = [*map(int, place), axis]
    size, got = shape[axis], int(indices[tuple(position)])
    raise IndexError(
        f"{name}: expected indices from {-size} to {size - 1} in component {axis} for shape {shape}, got {got} at "
        f"indices[{', '.join(map(str, position))}]"
        + ("" if masked is None else f", and only {masked} is masked")
        + "; fix it, or pass check=False to leave such updates out"
    )


def _check(
    name: str, shape: Any, indices: Any, updates: Any, masked: int | None, reduction: str, check: bool, strategy: Any
) -> tuple[Any, ...]:  # fmt: skip
    return _checked_shape(name, shape, indices, updates, reduction, strategy), indices, updates, masked, strategy or ""


def _read(
    name: str, shape: Any, indices: Tensor, updates: Tensor, masked: int | None, reduction: str, check: bool, *_: Any
) -> None:  # fmt: skip
    if check:
        _refuse_out_of_range(name, _shape_of(name, shape), indices, masked)


_scatter = Operator(
    "scatter_nd",
    "(SymInt[] shape, Tensor indices, Tensor updates, int? masked, str strategy) -> Tensor",
    check=_check,
    outputs=_scatter_outputs,
    into=_scatter_into,
    modes=torch.are_deterministic_algorithms_enabled,
    read=_read,
    gradient=(_gradient_of_updates, _keep_for_gather),
)
_gather = Operator(
    "gather_nd",
    "(Tensor source, Tensor indices, int? masked) -> Tensor",
    check=lambda *valid: valid,
    outputs=lambda x, indices, _: x.new_empty((*indices.shape[:-1], *x.shape[indices.shape[-1] :])),
    into=_gather_into,
    gradient=(_gradient_of_source, _keep_for_scatter),
)


def scatter_nd_of_shape(
    shape: Sequence[int] | Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "add", check: bool = True,
    strategy: str | None = None,
) -> Tensor:  # fmt: skip
    """ONNX's ScatterND with reduction ``add`` into zeros.

    Parameters
    ----------
    shape : sequence of int, or torch.Tensor of int64 on the host
        The shape of the output.
    indices : torch.Tensor
        ``[..., k]``, int64 or int32. Each names ``out[index[0], ..., index[k - 1]]``. Negative components count from
        the end of their axis.
    updates : torch.Tensor
        ``indices.shape[:-1] + shape[k:]``, float16, bfloat16, float32 or float64, of any strides, on the device of
        `indices`: CUDA, or the CPU if Triton's interpreter is on.
    reduction : str, default "add"
        ONNX's name of the reduction. Others raise an error.
    check : bool, default True
        Read the indices first and raise an error for one out of range, which waits for the GPU. Without the check, and
        under torch.compile and graph capture, an update whose index is out of range is left out. The kernels never
        write outside the output.
    strategy : str, optional
        ``"atomic"``, ``"sorted"`` or ``"owner"``, see Notes; the fastest for the sizes unless given.

    Returns
    -------
    torch.Tensor
        A contiguous tensor of `shape` and of the dtype of `updates`. Sums are float32 (float64 in float64), rounded
        once.

    Raises
    ------
    TypeError
        For arguments that are not tensors, for other dtypes, and for a shape on a GPU.
    ValueError
        For shapes that do not match, tensors on different devices, and an unknown reduction or strategy.
    NotImplementedError
        For a reduction other than ``add``.
    IndexError
        With `check`, for an index out of range. The message names its position.

    Notes
    -----
    *atomic* writes zeros and adds to them, in the order that the hardware takes. *sorted* gives the same bits in every
    run, and is used under torch.use_deterministic_algorithms(True). *owner* groups the updates by row without sorting
    the rows, or lets every row look through all indices if these are few. It writes each row of the output exactly
    once, zeros included.

    Unless a strategy is given, an output that stays in the L2 cache is atomic, or owner or sorted with few updates. A
    larger output is sorted if few of its rows have updates, else owner.

    The operator is differentiable in `updates`, any number of times. It works under torch.compile and in CUDA graphs.

    Examples
    --------
    >>> import fusebook, torch
    >>> indices = torch.tensor([[1], [3], [1]], device="cuda")  # doctest: +SKIP
    >>> fusebook.scatter_nd_of_shape((4, 2), indices, torch.ones(3, 2, device="cuda"))[:, 0]  # doctest: +SKIP
    tensor([0., 2., 0., 1.], device='cuda:0')
    """
    return _scatter("scatter_nd_of_shape", shape, indices, updates, None, reduction, check, strategy)


def masked_scatter_nd_of_shape(
    shape: Sequence[int] | Tensor, indices: Tensor, updates: Tensor, *, masked_value: int = -1, reduction: str = "add",
    check: bool = True, strategy: str | None = None,
) -> Tensor:  # fmt: skip
    """`scatter_nd_of_shape` without the updates whose index is the masked value.

    Parameters
    ----------
    shape, indices, updates, reduction, check, strategy
        As in `scatter_nd_of_shape`.
    masked_value : int, default -1
        An update is left out if a component of its index equals this value, in or out of range. Other negative
        components count from the end.

    Returns
    -------
    torch.Tensor
        As from `scatter_nd_of_shape`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, IndexError
        As `scatter_nd_of_shape`. Also TypeError for a masked value that is not an integer, and ValueError for one of
        more than 64 bits.
    """
    name = "masked_scatter_nd_of_shape"
    masked_value = integer(name, "masked_value", masked_value, "give a whole number of 64 bits")
    return _scatter(name, shape, indices, updates, masked_value, reduction, check, strategy)


def embedding_backward(
    dy: Tensor, indices: Tensor, rows: int, *, padding_idx: int | None = None, check: bool = True,
    strategy: str | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of an embedding table: for each row, the sum of the gradients of its lookups.

    Parameters
    ----------
    dy : torch.Tensor
        ``[..., D]``, the gradient of the rows that were looked up.
    indices : torch.Tensor
        ``[...]``, int64 or int32: the numbers of these rows.
    rows : int
        The number of rows of the table.
    padding_idx : int, optional
        A row that gets no gradient. A negative one counts from the end, as in ``torch.nn.functional.embedding``. An
        export stores the row as a constant, so give a number from 0 up if the number of rows is dynamic.
    check, strategy
        As in `scatter_nd_of_shape`.

    Returns
    -------
    torch.Tensor
        ``[rows, D]``, of the dtype of `dy`.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `scatter_nd_of_shape`.
    """
    name = "embedding_backward"
    try:
        shape, indices = (rows, dy.shape[-1]), indices.unsqueeze(-1)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        shapes(name, dy=(dy, "[..., D]"), indices=(indices, "[...]", INTEGERS))
        raise
    if padding_idx is not None:
        padding_idx = integer(name, "padding_idx", padding_idx, "give a row of the table")
        rows = integer(name, "rows", rows, "give the number of rows of the table")
        if not -rows <= padding_idx < rows:  # a text of `rows` would make a symbolic size a number
            raise ValueError(
                f"{name}: expected padding_idx from {-rows} to {rows - 1}, got {padding_idx}; give a row of the table"
            )
        padding_idx = padding_idx + rows if padding_idx < 0 else padding_idx
        shapes(name, indices=(indices, "", INTEGERS))
        # A lookup may name the row from the end, too.
        indices = indices.masked_fill(indices == padding_idx - rows, padding_idx)
    return _scatter(name, shape, indices, dy, padding_idx, "add", check, strategy)
