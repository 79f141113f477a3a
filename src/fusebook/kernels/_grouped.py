"""ScatterND whose updates are found before they are added: sorted by row, or grouped by it.

The output is [R, D] and contiguous, updates are [n, D] with a stride between rows. D and that stride are counted in
units of ALIGN elements: Triton knows of an integer only whether 16 divides it; in units of ALIGN it can see that rows
begin at multiples of 16 bytes. Addresses are int64, because tensors may have more than 2**31 elements.

A *key* is the row that an update goes to, -1 where it goes nowhere. `order` lists the numbers of the updates so that
those of one row stand side by side, `keys` their rows; a row's *span* is the part of `order` that is its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ._call import INTERPRETED, launch, overlapping


class Plan(NamedTuple):
    """How a scatter is launched."""

    strategy: str
    find: str  # "scan" all indices, "count" or "sort" (by torch.sort) them, make "lists" by atomics; empty for atomic
    steps: int  # tiles of the output that an owner takes, one above the other
    rows: int  # the tile: of the output for an owner, of updates for the others
    block: int
    together: int  # updates whose loads are under way at once
    chunk: int  # updates of one row that one program adds up; further ones are other programs' work
    fill: int  # zeros that a program writes
    warps: int


@triton.jit
def _zeros(out_ptr, block, SIZE, BLOCK: tl.constexpr):
    """BLOCK neighbours of SIZE zeros; without a mask where all are there, so that stores are wide whatever SIZE is."""
    first = block.to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)  # [BLOCK]
    none = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    if first + BLOCK <= SIZE:
        tl.store(out_ptr + at, none)  # write SIZE
    else:
        tl.store(out_ptr + at, none, mask=at < SIZE)


@triton.jit
def scatter_nd_fill(out_ptr, SIZE, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """Zeros, BLOCK neighbours a program. EARLY: the next kernel may start now, and wait where it needs them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    _zeros(out_ptr, tl.program_id(0), SIZE, BLOCK)


@triton.jit
def row_of(index, R, masked, MASKED: tl.constexpr):
    """The row that an index names: counted from the end where it is negative; -1 where it is masked or out of range."""
    index = index.to(tl.int64)
    row = tl.where(index < 0, index + R, index)
    live = (row >= 0) & (row < R)
    if MASKED:
        live = live & (index != masked)
    return tl.where(live, row, -1)


# Sorted: zeros, and behind them the rows with updates -----------------------------------------------------------------


@triton.jit
def _scatter_nd_sort(
    out_ptr, order_ptr, keys_ptr, starts_ptr, ends_ptr, counters_ptr, indices_ptr, SIZE, R, n, COUNTERS, masked,
    MASKED: tl.constexpr, WIDE: tl.constexpr, MINE: tl.constexpr, THEIRS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """SIZE zeros, and behind them a sort by counting: an update's place is the number of updates that go before it.

    The first programs compare each of n updates with every other, while the others write zeros.
    """
    sorting = tl.cdiv(n, MINE)
    if tl.program_id(0) >= sorting:
        _zeros(out_ptr, tl.program_id(0) - sorting, SIZE, BLOCK)  # write RD
        return
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # Row and number in one integer: all differ, and one comparison sorts by row first and by number within a row.
    KEY: tl.constexpr = tl.int64 if WIDE else tl.int32
    i = tl.program_id(0) * MINE + tl.arange(0, MINE)  # [MINE]
    row = row_of(tl.load(indices_ptr + i, mask=i < n, other=0), R, masked, MASKED).to(KEY)
    least = ((row + 1) * n)[:, None]  # [MINE, 1]; of the updates of this row
    before = tl.zeros([MINE, THEIRS], tl.int32)
    ahead = tl.zeros([MINE, THEIRS], tl.int32)
    upto = tl.zeros([MINE, THEIRS], tl.int32)
    for start in range(0, n, THEIRS):
        j = start + tl.arange(0, THEIRS)  # [THEIRS]
        theirs = row_of(tl.load(indices_ptr + j, mask=j < n, other=0), R, masked, MASKED).to(KEY)
        last = tl.cast(R + 1, KEY) * n  # a number that is 1 is no tensor
        theirs = tl.where(j < n, (theirs + 1) * n + j, last)[None, :]  # [1, THEIRS]; behind the last: after all
        before += (theirs < least + i[:, None]).to(tl.int32)  # [MINE, THEIRS]
        ahead += (theirs < least).to(tl.int32)
        upto += (theirs < least + n).to(tl.int32)
    place = tl.sum(before, 1)  # [MINE]
    tl.store(order_ptr + place, i, mask=i < n)
    tl.store(keys_ptr + place, row, mask=i < n)
    live = (i < n) & (row >= 0)
    tl.store(starts_ptr + row, tl.sum(ahead, 1), mask=live)  # by each update of the row, and by each the same
    tl.store(ends_ptr + row, tl.sum(upto, 1), mask=live)
    # On the way: zeros for what the next kernel counts with.
    for start in range(tl.program_id(0) * THEIRS, COUNTERS, sorting * THEIRS):
        at = start + tl.arange(0, THEIRS)
        tl.store(counters_ptr + at, tl.zeros([THEIRS], counters_ptr.dtype.element_ty), mask=at < COUNTERS)


@triton.jit
def _scatter_nd_segments(
    out_ptr, updates_ptr, parts_ptr, counters_ptr, order_ptr, keys_ptr, starts_ptr, ends_ptr, D, n, stride,
    ALIGN: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    LATE: tl.constexpr = False,
):  # fmt: skip
    """Rows that have updates: the sum of each stretch of equal keys.

    A stretch that crosses a multiple of CHUNK is cut there into pieces that different programs add up; the program that
    is done last adds the pieces, in their order: the same bits in every run.
    """
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the sort, before anything is read that it writes
        tl.extra.cuda.gdc_launch_dependents()
    FLOAT: tl.constexpr = parts_ptr.dtype.element_ty
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles
    columns = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = columns < D
    # A position of `order` for each of ROWS, and the keys from there on. None of these loads waits for another.
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
            base = start // CHUNK
            pieces = tl.where(shared, (end - 1) // CHUNK - base + 1, 0)
            # In a stretch of CHUNK positions begin at most one first piece of several and one later piece.
            slot = (2 * (p // CHUNK) + (p % CHUNK != 0).to(p.dtype)).to(tl.int64)
            tl.store(parts_ptr + (slot * D)[:, None] + columns, acc, mask=shared[:, None] & inside)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = base * tiles + tile
            if ROWS == 1:
                met = tl.atomic_add(counters_ptr + tl.max(counter, 0), 1)
            else:
                one = tl.full([ROWS], 1, counters_ptr.dtype.element_ty)
                met = tl.atomic_add(counters_ptr + counter, one, mask=shared)
            tl.debug_barrier()
            left = tl.where(shared & (met == pieces - 1), pieces, 0)  # [ROWS]; for the last to be done
            acc = tl.zeros([ROWS, BLOCK], FLOAT)
            for piece in range(0, tl.max(left, 0), TOGETHER):  # of another dtype than t, where rows are int64
                for u in tl.static_range(TOGETHER):
                    within = (piece + u == 0) & (start % CHUNK != 0)  # the first piece may begin within its chunk
                    slot = (2 * (base + piece + u) + within.to(base.dtype)).to(tl.int64)
                    part = parts_ptr + (slot * D)[:, None] + columns
                    # .cg: from L2, where other multiprocessors' stores are; L1 may hold what was there before.
                    acc += tl.load(part, mask=(piece + u < left)[:, None] & inside, other=0.0, cache_modifier=".cg")
            tl.store(out, acc, mask=(left > 0)[:, None] & inside)


# Owner: every row of the output, written once -------------------------------------------------------------------------


@triton.jit
def _scatter_nd_count(slots_ptr, counts_ptr, indices_ptr, R, n, masked, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """How many updates each row has; the counter that an update meets is its slot within the row."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = row_of(tl.load(indices_ptr + i, mask=i < n, other=0), R, masked, MASKED)
    live = (i < n) & (row >= 0)
    slot = tl.atomic_add(counts_ptr + row, tl.full([BLOCK], 1, counts_ptr.dtype.element_ty), mask=live, sem="relaxed")
    tl.store(slots_ptr + i, slot, mask=live)


@triton.jit
def _scatter_nd_spans(starts_ptr, ends_ptr, R, BLOCK: tl.constexpr):
    """Of counts, which `ends` holds, make each row's span of `order`. ends[R] is how much of it has been given away."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    count = tl.load(ends_ptr + row, mask=row < R, other=0)
    # Blocks of rows take their part of `order` in any order: nothing asks for sorted rows, only for neighbours.
    base = tl.atomic_add(ends_ptr + R, tl.sum(count, 0), sem="relaxed")
    end = base + tl.cumsum(count, 0)
    tl.store(starts_ptr + row, end - count, mask=row < R)
    tl.store(ends_ptr + row, end, mask=row < R)


@triton.jit
def _scatter_nd_lists(
    order_ptr, keys_ptr, starts_ptr, slots_ptr, indices_ptr, R, n, masked, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Write each update's number into its row's span of `order`."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = row_of(tl.load(indices_ptr + i, mask=i < n, other=0), R, masked, MASKED)
    live = (i < n) & (row >= 0)
    at = tl.load(starts_ptr + row, mask=live, other=0) + tl.load(slots_ptr + i, mask=live, other=0)
    tl.store(order_ptr + at, i, mask=live)
    tl.store(keys_ptr + at, row, mask=live)


@triton.jit
def _scatter_nd_chunks(
    parts_ptr, updates_ptr, order_ptr, keys_ptr, starts_ptr, ends_ptr, R, D, n, stride,
    ALIGN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Add up each CHUNK of `order` that belongs to one row as a whole, so that no row is left to one program alone."""
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    begin = chunk * CHUNK
    if SORTED:
        if tile == 0:  # where the row changes, one span ends and another starts
            p = begin + tl.arange(0, CHUNK)  # [CHUNK]
            row = tl.load(keys_ptr + p, mask=p < n, other=-1)
            earlier = tl.load(keys_ptr + p - 1, mask=(p > 0) & (p < n), other=-1)
            later = tl.load(keys_ptr + p + 1, mask=p + 1 < n, other=-1)
            tl.store(starts_ptr + row, p, mask=(row >= 0) & (earlier != row))
            tl.store(ends_ptr + row, p + 1, mask=(row >= 0) & (later != row))
        filled = n
    else:
        filled = tl.load(ends_ptr + R)  # behind it, `order` holds nothing
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
    """STEPS times ROWS rows of the output, each written once: its updates and its whole chunks added up, or zeros."""
    FLOAT: tl.constexpr = parts_ptr.dtype.element_ty
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    first = (tl.program_id(0) // tiles).to(tl.int64) * (STEPS * ROWS)
    columns = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = columns < D
    # A loop over rows, not a program a row: most rows are zeros, and to start a program costs as much as to write them.
    for step in range(STEPS):
        rows = first + step * ROWS + tl.arange(0, ROWS)  # [ROWS]
        begin = tl.load(starts_ptr + rows, mask=rows < R, other=0)
        end = tl.load(ends_ptr + rows, mask=rows < R, other=0)
        acc = tl.zeros([ROWS, BLOCK], FLOAT)
        if tl.max(end - begin, 0) > 0:
            # Chunks that lie between begin and end as a whole have been added up; before and after them are at most
            # CHUNK - 1 updates each. `loose` counts those, `head` those before.
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


# Launching ------------------------------------------------------------------------------------------------------------


def steps_of(updates: Tensor, D: int) -> tuple[int, int]:
    """The stride between updates, and the number of elements whose multiples all rows begin at."""
    stride = updates.stride(0) if updates.dim() == 2 else D
    return stride, math.gcd(max(1, 16 // updates.element_size()), D, stride)


def launch_segments(
    out: Tensor, indices: Tensor, updates: Tensor, parts: Tensor, counters: Tensor, order: Tensor, keys: Tensor,
    spans: Tensor, sizes: tuple[int, int, int], masked: int | None, plan: Plan,
) -> None:  # fmt: skip
    """A sort by counting beside the zeros of all rows; then the rows that have updates.

    Where the GPU can, the second kernel starts while the first one still runs.
    """
    R, D, n = sizes
    stride, align = steps_of(updates, D)
    early = overlapping(out.device)
    mine, theirs = (256, 256) if INTERPRETED else (4, min(256, max(32, triton.next_power_of_2(n))))
    launch(
        _scatter_nd_sort, (triton.cdiv(n, mine) + triton.cdiv(R * D, plan.fill),),
        out, order, keys, spans[0], spans[1], counters, indices, R * D, R, n, len(counters), masked or 0,
        MASKED=masked is not None, WIDE=(R + 2) * n >= 2**31, MINE=mine, THEIRS=theirs, BLOCK=plan.fill,
        EARLY=bool(early),
    )  # fmt: skip
    launch(
        _scatter_nd_segments, (triton.cdiv(n, plan.rows) * triton.cdiv(D, plan.block),),
        out, updates, parts, counters, order, keys, spans[0], spans[1], D // align, n, stride // align,
        ALIGN=align, CHUNK=plan.chunk, ROWS=plan.rows, BLOCK=plan.block, TOGETHER=plan.together, LATE=bool(early),
        num_warps=plan.warps, **early,
    )  # fmt: skip


def launch_lists(
    order: Tensor, keys: Tensor, spans: Tensor, slots: Tensor, indices: Tensor, R: int, n: int, masked: int | None
) -> None:  # fmt: skip
    """Group the updates by row with integer atomics."""
    starts, ends = spans[0], spans[1]
    constants = {"MASKED": masked is not None, "BLOCK": 256}
    grid = (triton.cdiv(n, 256),)
    launch(scatter_nd_fill, (triton.cdiv(R + 1, 4096),), ends, R + 1, BLOCK=4096)
    launch(_scatter_nd_count, grid, slots, ends, indices, R, n, masked or 0, **constants)
    launch(_scatter_nd_spans, (triton.cdiv(R, 1024),), starts, ends, R, BLOCK=1024)
    launch(_scatter_nd_lists, grid, order, keys, starts, slots, indices, R, n, masked or 0, **constants)


def launch_owner(
    out: Tensor, updates: Tensor, parts: Tensor, order: Tensor, keys: Tensor, spans: Tensor,
    sizes: tuple[int, int, int], plan: Plan,
) -> None:  # fmt: skip
    """Whole chunks, then every row. Where updates are sorted, the spans are zeros before and written on the way."""
    R, D, n = sizes
    stride, align = steps_of(updates, D)
    starts, ends = spans[0], spans[1]
    constants = {"ALIGN": align, "CHUNK": plan.chunk, "TOGETHER": plan.together}
    block = min(plan.block, 512)  # small: chunks are few, and their columns are what is left to share out
    launch(
        _scatter_nd_chunks, (triton.cdiv(n, plan.chunk) * triton.cdiv(D, block),),
        parts, updates, order, keys, starts, ends, R, D // align, n, stride // align,
        BLOCK=block, SORTED=plan.find == "sort", **constants,
    )  # fmt: skip
    launch(
        _scatter_nd_owner, (triton.cdiv(R, plan.steps * plan.rows) * triton.cdiv(D, plan.block),),
        out, updates, order, starts, ends, parts, R, D // align, stride // align,
        STEPS=plan.steps, ROWS=plan.rows, BLOCK=plan.block, num_warps=plan.warps, **constants,
    )  # fmt: skip
