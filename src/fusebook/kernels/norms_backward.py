# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/norms_backward.py. It needs torch, Triton, NumPy, _call.py, _layouts.py,
# _norms.py, _norms_across.py and _rows.py.
"""Gradients of RMSNorm and LayerNorm: the input and the gradient are read once, the result is written once.

For a row x of N elements, its normalised numbers n[i] = (x[i] - mean) * factor, and g[i] = dy[i] * weight[i],

    dx[i] = factor * (g[i] - mean_j g[j] - n[i] * mean_j g[j] n[j])  (+ dtotal[i])
    dweight[i] = sum of dy[i] n[i] over all rows,  dbias[i] = sum of dy[i] over all rows

where RMSNorm leaves out both means but the last. `dtotal` is the gradient of the sum with the residual: what is
normalised is that sum, which takes both gradients.

Nothing is kept from the forward pass but its input: the statistics of a row are found anew while it is in registers.
A program takes many rows and the same columns of each, and adds up its part of dweight and dbias in registers. So
there is one partial row for each group of programs, and a second kernel adds these up in a fixed order: the same bits
each time, without atomics. Where one program takes all rows, its part is the whole, and there is no second kernel.

A row of up to 16 KiB belongs to one program. Several programs share a wider one and publish their sums to each other:
programs of one warp up to 128 KiB, of four warps beyond.

Limits: there is no gradient of the gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import Operator, accumulated, contiguous, empty, gpu, launch, overlapping
from ._layouts import layout_of, to_word
from ._norms import add_both, anchor_of, board_of, check_norm, loaded, parts_of, sum_both
from ._norms_across import LEAST_EPS, across_into, places_of, planned
from ._rows import aligned, as_rows, contiguous_rows, publish

__all__ = ["layer_norm_backward", "rms_norm_backward"]

# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _mean(total, count, share):
    """total / count; in float64 by `share`, which is 1 / count: there a division takes some forty steps."""
    return total / count if share is None else total * share


@triton.jit
def _sums(x, g, own, count, axis: tl.constexpr, CENTRED: tl.constexpr, TOGETHER: tl.constexpr, share=None):
    """Of rows the sums of x x, g x, x and g: centred, the first two around x's mean, else the last two are zero."""
    total = tl.sum(tl.zeros_like(x), axis)
    gs = total
    if CENTRED:
        total, gs = sum_both(x, g, axis, TOGETHER)
        mean = _mean(total, count, share)
        x = tl.where(own, x - (mean if axis == 0 else mean[:, None]), 0.0)
    squares, products = sum_both(x * x, g * x, axis, TOGETHER)
    return squares, products, total, gs


@triton.jit
def _at(rows, columns, strides, ALIGN: tl.constexpr, APART: tl.constexpr):
    """Where numbers of rows are, by the stride of rows; APART: by how many INNER are, and strides of all three axes."""
    if APART:
        inner = rows % strides[0]
        if rows.shape[0] > 1:  # nearly so, and neighbours of a warp are to be neighbours in memory
            inner = tl.max_contiguous(inner, [rows.shape[0], 1])
        return rows // strides[0] * strides[1] + inner * strides[2] + columns.to(tl.int64) * strides[3]
    else:
        return rows * (strides * ALIGN) + columns


@triton.jit
def _anchors_of(x_ptr, rows, M, N, x_stride, ALIGN: tl.constexpr, APART: tl.constexpr, FAR: tl.constexpr):
    """What `rows` [ROWS, 1], which are not wide, are taken relative to."""
    at = _at(rows, tl.zeros([1, 1], tl.int32), x_stride, ALIGN, APART)
    return anchor_of(x_ptr, None, at, at, 1, 1, N, rows < M, FAR, False)


@triton.jit
def _norm_backward(
    dx_ptr, sums_ptr, dw_ptr, db_ptr, x_ptr, dy_ptr, dtotal_ptr, w_ptr, M, N, dx_stride, x_stride, dy_stride,
    dtotal_stride, GROUPS,
    ALIGN: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, APART: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS rows at a time; GROUPS programs take all rows. Rows of STAGES loops are on their way into shared memory.

    Partial rows are left in `sums_ptr`; EARLY: who adds them up may start at once. One program alone has none: it
    writes dweight and dbias.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N * ALIGN
    group = tl.program_id(0)
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    mine = columns < N
    share = 1 / N.to(FLOAT) if FLOAT == tl.float64 else None
    w = loaded(w_ptr, columns, mine, 1.0)  # [1, BLOCK]
    dw = tl.zeros([ROWS, BLOCK], FLOAT)
    db = tl.zeros([ROWS, BLOCK], FLOAT)
    FAR: tl.constexpr = CENTRED and x_ptr.dtype.element_ty.primitive_bitwidth > 16
    lane = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    for start in tl.range(group * ROWS, M, GROUPS * ROWS, num_stages=STAGES):
        row = tl.zeros([], tl.int64) + start
        rows = row + lane  # [ROWS, 1]
        own = mine & (rows < M)
        x = tl.load(x_ptr + _at(rows, columns, x_stride, ALIGN, APART), mask=own, other=0.0)  # read MN
        if FAR:
            x = tl.where(own, x - _anchors_of(x_ptr, rows, M, N, x_stride, ALIGN, APART, FAR), 0.0)
        x = x.to(FLOAT)
        dy = tl.load(dy_ptr + _at(rows, columns, dy_stride, ALIGN, APART), mask=own, other=0.0).to(FLOAT)  # read MN
        squares, products, total, gs = _sums(x, dy * w.to(FLOAT), own, N, 1, CENTRED, TOGETHER, share)
        factor = 1 / tl.sqrt(_mean(squares, N, share) + EPS)  # [ROWS]
        n = (x - _mean(total, N, share)[:, None] if CENTRED else x) * factor[:, None]  # [ROWS, BLOCK]
        # Of rows beyond the last all numbers are zero, of columns beyond it dy is.
        if DW:
            dw += dy * n
        if DB:
            db += dy
        dx = dy * w.to(FLOAT) - n * _mean(products * factor, N, share)[:, None]
        if CENTRED:
            dx -= _mean(gs, N, share)[:, None]
        dx *= factor[:, None]
        if dtotal_ptr is not None:
            at = _at(rows, columns, dtotal_stride, ALIGN, APART)
            dx += tl.load(dtotal_ptr + at, mask=own, other=0.0).to(FLOAT)
        at = _at(rows, columns, dx_stride, ALIGN, True) if APART else rows * N + columns
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=own)  # write MN
    if sums_ptr is not None:
        sums_ptr += group.to(tl.int64) * N
        if DW:
            tl.store(sums_ptr + columns, tl.sum(dw, 0)[None, :], mask=mine)
        if DB:
            sums_ptr += (tl.zeros([], tl.int64) + GROUPS) * N if DW else 0
            tl.store(sums_ptr + columns, tl.sum(db, 0)[None, :], mask=mine)
    else:
        if DW:
            tl.store(dw_ptr + columns, tl.sum(dw, 0)[None, :].to(dw_ptr.dtype.element_ty), mask=mine)
        if DB:
            tl.store(db_ptr + columns, tl.sum(db, 0)[None, :].to(db_ptr.dtype.element_ty), mask=mine)


# Wide rows are shared by several programs, as in `_norms._norm_shared`.


@triton.jit
def _leave_two(at, PARTS, a, b):
    """Leave two numbers: of 32 bits in one word, which takes one access where two words take two."""
    if a.dtype == tl.float64:
        publish(at, to_word(a))
        publish(at + PARTS, to_word(b))
    else:
        publish(at, to_word(a).to(tl.uint32, bitcast=True).to(tl.int64) | (to_word(b).to(tl.int64) << 32))


@triton.jit
def _leave_sums(at, PARTS, squares, products, total, gs, CENTRED: tl.constexpr):
    _leave_two(at, PARTS, squares, products)
    if CENTRED:
        _leave_two(at + (2 * PARTS if squares.dtype == tl.float64 else PARTS), PARTS, total, gs)


@triton.jit
def _look_for_two(at, lanes, PARTS, FLOAT: tl.constexpr):
    # volatile: from where other multiprocessors' words arrive, each time anew.
    own = lanes < PARTS
    if FLOAT == tl.float64:
        first = tl.load(at + lanes, mask=own, other=-9223372036854775808, volatile=True)  # -0.0
        return first, tl.load(at + PARTS + lanes, mask=own, other=-9223372036854775808, volatile=True)
    else:
        both = tl.load(at + lanes, mask=own, other=-9223372034707292160, volatile=True)  # -0.0 twice
        return both.to(tl.int32), (both >> 32).to(tl.int32)


@triton.jit
def _look(at, lanes, PARTS, FLOAT: tl.constexpr, CENTRED: tl.constexpr):
    """The numbers of all parts as words that are zero where none is left yet, four of each; or the first two again."""
    squares, products = _look_for_two(at, lanes, PARTS, FLOAT)
    totals = squares
    gs = products
    if CENTRED:
        totals, gs = _look_for_two(at + (2 * PARTS if FLOAT == tl.float64 else PARTS), lanes, PARTS, FLOAT)
    return squares, products, totals, gs


@triton.jit
def _beside(PROCESSORS):
    """This program's number, so that neighbours by it share a multiprocessor, if these are given programs by turns.

    Nobody relies on that; where the parts of a row lie on few multiprocessors, rows took less time in trials.
    """
    programs = tl.num_programs(0)
    processor = tl.program_id(0) % PROCESSORS
    before = processor * (programs // PROCESSORS) + tl.minimum(processor, programs % PROCESSORS)
    return before + tl.program_id(0) // PROCESSORS


@triton.jit
def _missing(squares, products, totals, gs, lanes):
    """The first part of which a word is missing, or their number."""
    lacks = (squares == 0) | (products == 0) | (totals == 0) | (gs == 0)
    return tl.min(tl.where(lacks, lanes, lanes.shape[0]), 0)


@triton.jit
def _met(squares, products, totals, gs, FLOAT: tl.constexpr):
    """The sums of the last two; NaN where a word is missing."""
    lacks = (squares == 0) | (products == 0) | (totals == 0) | (gs == 0)
    totals = tl.where(lacks, float("nan"), totals.to(FLOAT, bitcast=True))
    return tl.reduce((totals, gs.to(FLOAT, bitcast=True)), 0, add_both)


@triton.jit
def _anchor_in(x_ptr, row, M, N, x_stride, FAR: tl.constexpr):
    """What one row is taken relative to."""
    at = row * x_stride
    return anchor_of(x_ptr, None, at, at, 1, 1, N, row < M, FAR, True)


@triton.jit
def _norm_backward_shared(
    dx_ptr, sums_ptr, board_ptr, x_ptr, dy_ptr, dtotal_ptr, w_ptr, M, N, x_stride, dy_stride, dtotal_stride,
    GROUPS, SPAN, PARTS, PROCESSORS,
    ALIGN: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    STAGES: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """Parts of up to SPAN columns of one row after another, by PARTS programs; GROUPS such groups take all rows."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    FLOAT: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    WORDS: tl.constexpr = (2 if CENTRED else 1) * (2 if FLOAT == tl.float64 else 1)
    N = N * ALIGN
    program = _beside(PROCESSORS)
    group = program // PARTS
    part = program % PARTS
    lanes = tl.arange(0, LANES)  # [LANES]
    inner = tl.arange(0, BLOCK)  # [BLOCK]
    begin = part * SPAN
    count = tl.minimum(N - begin, SPAN)
    own = inner < count
    weight = loaded(w_ptr, begin + inner, own, 1.0)
    dw = tl.zeros([BLOCK], FLOAT)
    db = tl.zeros([BLOCK], FLOAT)
    row = tl.zeros([], tl.int64) + group
    rest = tl.where(row < M, count, 0)
    x = loaded(x_ptr + (row * (x_stride * ALIGN) + begin), inner, inner < rest, 0.0)
    dy = loaded(dy_ptr + (row * (dy_stride * ALIGN) + begin), inner, inner < rest, 0.0)
    FAR: tl.constexpr = CENTRED and TYPE.primitive_bitwidth > 16
    anchor = _anchor_in(x_ptr, row, M, N, x_stride * ALIGN, FAR)
    if FAR:
        x = tl.where(own, x - anchor, 0.0)
    g = dy.to(FLOAT) * weight.to(FLOAT)
    one, two, three, four = _sums(x.to(FLOAT), g, own, count, 0, CENTRED, TRIES > 0)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros on the board
    _leave_sums(board_ptr + row * (PARTS * WORDS) + part, PARTS, one, two, three, four, CENTRED)
    for start in tl.range(group, M, GROUPS, num_stages=STAGES):
        row = tl.zeros([], tl.int64) + start
        later = row + GROUPS
        rest = tl.where(later < M, count, 0)
        next_x = loaded(x_ptr + (later * (x_stride * ALIGN) + begin), inner, inner < rest, 0.0)  # read MN
        next_dy = loaded(dy_ptr + (later * (dy_stride * ALIGN) + begin), inner, inner < rest, 0.0)  # read MN
        at = board_ptr + row * (PARTS * WORDS)
        if FAR:
            next_anchor = _anchor_in(x_ptr, later, M, N, x_stride * ALIGN, FAR)
            next_x = tl.where(own, next_x - next_anchor, 0.0)
        w = weight.to(FLOAT)
        g = next_dy.to(FLOAT) * w
        one, two, three, four = _sums(next_x.to(FLOAT), g, own, count, 0, CENTRED, TRIES > 0)
        _leave_sums(at + GROUPS * (PARTS * WORDS) + part, PARTS, one, two, three, four, CENTRED)
        squares = to_word(tl.zeros([LANES], FLOAT))
        products, totals, gs = squares, squares, squares
        total = tl.zeros([], FLOAT)
        all_gs = total
        if to_word(one) != 0:  # always: what depends on nothing that is loaded would come before the words are left
            squares, products, totals, gs = _look(at, lanes, PARTS, FLOAT, CENTRED)
            total, all_gs = _met(squares, products, totals, gs, FLOAT)
            if (total != total) | (all_gs != all_gs):  # a word is missing, or a number is NaN
                missing = _missing(squares, products, totals, gs, lanes)
                tries = 0
                while missing < LANES:
                    if tries < TRIES:
                        squares, products, totals, gs = _look(at, lanes, PARTS, FLOAT, CENTRED)
                    else:  # Nothing promises that the others run at the same time: by their own steps, then.
                        there = missing * SPAN
                        many = tl.minimum(N - there, SPAN)
                        its_x = loaded(x_ptr + (row * (x_stride * ALIGN) + there), inner, inner < many, 0.0)
                        if FAR:
                            its_x = tl.where(inner < many, its_x - anchor, 0.0)
                        its_dy = loaded(dy_ptr + (row * (dy_stride * ALIGN) + there), inner, inner < many, 0.0)
                        its_weight = loaded(w_ptr, there + inner, inner < many, 1.0)
                        g = its_dy.to(FLOAT) * its_weight.to(FLOAT)
                        one, two, three, four = _sums(
                            its_x.to(FLOAT), g, inner < many, many, 0, CENTRED, TRIES > 0
                        )  # fmt: skip
                        squares = tl.where(lanes == missing, to_word(one), squares)
                        products = tl.where(lanes == missing, to_word(two), products)
                        totals = tl.where(lanes == missing, to_word(three), totals) if CENTRED else squares
                        gs = tl.where(lanes == missing, to_word(four), gs) if CENTRED else products
                    missing = _missing(squares, products, totals, gs, lanes)
                    tries += 1
                total, all_gs = _met(squares, products, totals, gs, FLOAT)
        mean = tl.zeros([], FLOAT)
        square, product = total, all_gs
        if CENTRED:
            mean = total / N
            counts = tl.maximum(tl.minimum(N - lanes * SPAN, SPAN), 0).to(FLOAT)  # [LANES]
            away = totals.to(FLOAT, bitcast=True) / tl.maximum(counts, 1.0) - mean
            square, product = tl.reduce(
                (
                    squares.to(FLOAT, bitcast=True) + counts * away * away,
                    products.to(FLOAT, bitcast=True) + gs.to(FLOAT, bitcast=True) * away,
                ),
                0,
                add_both,
            )
        factor = 1 / tl.sqrt(square / N + EPS)
        away_x = x.to(FLOAT) - mean  # [BLOCK]
        scaled = dy.to(FLOAT) * factor
        if DW:
            dw += scaled * away_x
        if DB:
            db += dy.to(FLOAT)
        dx = scaled * w - away_x * (product * factor / N * factor * factor)
        if CENTRED:
            dx -= all_gs / N * factor
        if dtotal_ptr is not None:
            more = tl.load(dtotal_ptr + row * (dtotal_stride * ALIGN) + begin + inner, mask=own, other=0.0)
            dx += more.to(FLOAT)
        tl.store(dx_ptr + row * N + begin + inner, dx.to(TYPE), mask=own)  # write MN
        x = next_x
        dy = next_dy
        if FAR:
            anchor = next_anchor
    if sums_ptr is not None:
        sums_ptr += group.to(tl.int64) * N + begin
    if DW:
        tl.store(sums_ptr + inner, dw, mask=own)
    if DB:
        sums_ptr += (tl.zeros([], tl.int64) + GROUPS) * N if DW else 0
        tl.store(sums_ptr + inner, db, mask=own)


@triton.jit
def _column_sums(
    dw_ptr, db_ptr, sums_ptr, GROUPS, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, LATE: tl.constexpr
):  # fmt: skip
    """Sums of columns over all groups, ROWS of them at a time: of dweight, and behind it of dbias."""
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the partial rows
    which = tl.program_id(1)
    sums_ptr += which.to(tl.int64) * GROUPS * N
    columns = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]  # [1, BLOCK]
    totals = tl.zeros([ROWS, BLOCK], sums_ptr.dtype.element_ty)
    for start in range(0, GROUPS, ROWS):
        groups = (start + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
        inside = (groups < GROUPS) & (columns < N)
        totals += tl.load(sums_ptr + groups.to(tl.int64) * N + columns, mask=inside, other=0.0)
    total = tl.sum(totals, 0)[None, :]  # [1, BLOCK]
    if dw_ptr is not None:
        if which == 0:
            tl.store(dw_ptr + columns, total.to(dw_ptr.dtype.element_ty), mask=columns < N)
    if db_ptr is not None:
        if which == (1 if dw_ptr is not None else 0):
            tl.store(db_ptr + columns, total.to(db_ptr.dtype.element_ty), mask=columns < N)


# Plans ---------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a gradient is launched."""

    constants: Mapping[str, Any]
    groups: int  # of programs; each takes its share of all rows
    parts: int  # programs of a group, which share a row
    span: int  # columns of a program
    warps: int
    registers: int  # the most that a thread takes


def norm_backward_plan(
    rows: int, n: int, size: int, capability: tuple[int, int] | None, processors: int, centred: bool, added: bool,
    apart: bool = False,
) -> Plan:  # fmt: skip
    """Choose the constants, for `rows` rows of `n` numbers of `size` bytes; `added`: a gradient is added to dx.

    `apart`: the numbers of a row lie apart, those of neighbouring rows side by side.

    The width decides how a row of dx is added up, the number of rows and of multiprocessors how dweight is. Where
    numbers of a row lie apart, the number of rows decides about both: bits of dx may differ with it.
    """
    hopper = capability is not None and capability >= (9, 0)
    if n <= 16384 // size:
        # What the loop loads ahead shall fit into 96 KiB where there is no more.
        stages = (4 if hopper and centred else 3) - added
        # At most 32 bytes and 16 numbers a thread: x, dy, weight and dweight fit into 128 registers. 16 warps in all.
        block = triton.next_power_of_2(n)
        warps = max(1, min(16, block * size // 1024))
        together = max(1, min(64, min(512, 2048 // size) // block))
        if size == 8 and warps == 16:  # two programs of half the warps, which wait for memory by turns
            warps, stages = 8, 2
        if apart:  # addresses take registers, too: four numbers a thread
            together = max(2, 1024 // block)
            warps = together * block // 128
        if capability is None:  # the interpreter's cost is programs times operations, whatever their size
            together = min(max(2, triton.next_power_of_2(rows) // 2), max(1, 2**15 // block))
        groups = max(1, min(triton.cdiv(rows, together), 16 // warps * processors))
        return Plan({"STAGES": stages, "ROWS": together, "BLOCK": block}, groups, 1, n, warps, 128)
    # All parts of a row run at once, or they would wait for those that have no place. A program is one warp, whose
    # threads need not meet; but each part reads a word of every other. Beyond 128 parts that is as much traffic as the
    # row, and more words than a warp has registers for: then four warps share a part of four times the width.
    warps = 1 if n * size <= 2**17 else 4
    registers = 168 if centred else 128
    resident = 65536 // (32 * warps * registers) * processors
    least = triton.next_power_of_2(triton.cdiv(n, resident))
    parts, span = parts_of(n, size, max(1024 * warps // size, least) if capability is not None else 16384 // size)
    groups = max(1, min(rows, resident // parts))
    block = triton.next_power_of_2(span)
    # What is loaded ahead shall leave room for all programs of a multiprocessor; some have 100 KiB.
    ahead = triton.cdiv(groups * parts, processors) * (2 + added) * block * size
    stages = min(4, 1 + (200 if hopper else 80) * 1024 // ahead)
    # As many lanes as threads or more: so each word is loaded by one thread.
    lanes = max(32 * warps, triton.next_power_of_2(parts))
    constants = {"STAGES": stages, "BLOCK": block, "LANES": lanes}
    return Plan(constants, groups, parts, span, warps, registers)


_plan = functools.lru_cache(maxsize=4096)(norm_backward_plan)


def sums_plan(groups: int, columns: int, capability: tuple[int, int] | None, processors: int) -> tuple[int, int, int]:
    """Choose rows, columns and warps of a tile, for partial rows of `groups` with so many `columns`."""
    if capability is None:  # interpreted, few programs
        return 32, min(triton.next_power_of_2(columns), 1024), 4
    if groups <= 32 or columns >= 32 * processors:
        return 32, 32, 4
    # One program after another would wait for memory: many rows of 32 bytes at once.
    return min(512, triton.next_power_of_2(groups)), 8, 8


_sums_plan = functools.lru_cache(maxsize=4096)(sums_plan)

# Launchers -----------------------------------------------------------------------------------------------------------


#: Up to how many numbers rows whose numbers lie apart are read where they are; others are laid side by side first.
_DIRECT = 2**19

#: From how many bytes on, read and written, nobody sees when the second kernel starts.
_SEEN = 2**26


def _apart(*tensors: Tensor | None) -> tuple[Any, ...] | None:
    """Of dx, x, dy and dtotal INNER and all strides, where x is read in place though numbers of a row lie apart."""
    given = [t for t in tensors if t is not None]
    dx, *others = given
    n = dx.shape[-1]
    if not 0 < dx.numel() <= _DIRECT or n > 1024 or all(as_rows(t) is not None for t in others):
        return None
    (_, inner, _), outers, strides = layout_of(dx.dim() - 1, *given)
    if len(outers) > 1:
        return None
    found = iter([(inner, along[0], step, apart) for along, step, apart in strides])
    return tuple(None if t is None else next(found) for t in tensors)


def _into(
    found: list[Tensor],
    x: Tensor,
    dy: Tensor,
    dtotal: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    eps: float,
) -> None:
    dx, *rest = found
    dw = rest.pop(0) if weight is not None else None
    db = rest[0] if rest else None
    n, kind = x.shape[-1], accumulated(x.dtype)
    summed = [d for d in (dw, db) if d is not None]
    apart, align = _apart(dx, x, dy, dtotal), 1
    if apart is None and (places := places_of(dx, x, dy, dtotal)) is not None:
        across = planned(places, x)
        sums = empty((len(summed), across.groups, n), kind, x.device) if summed else None
        given = {"EPS": eps, "CENTRED": centred, "DW": dw is not None, "DB": db is not None}
        across_into(across, places, dx, sums, x, dy, dtotal, None if weight is None else contiguous(weight), given)
        _added_up(dw, db, sums)
        return
    if apart is None:
        x, dy = contiguous_rows(x), contiguous_rows(dy)
        dtotal = None if dtotal is None else contiguous_rows(dtotal)
        align = aligned(n, x, dy, dtotal)
    rows = dx.numel() // max(1, n)
    weight = None if weight is None else contiguous(weight)
    capability, processors = gpu(x.device)
    plan = _plan(rows, n, x.element_size(), capability, processors, centred, dtotal is not None, apart is not None)
    alone = plan.groups == plan.parts == 1
    sums = empty((len(summed), plan.groups, n), kind, x.device) if summed and not alone else None
    strides = apart or (None, *(0 if t is None else t.stride(0) // align for t in (x, dy, dtotal)))
    constants = {"ALIGN": align, "EPS": eps, "CENTRED": centred, "DW": dw is not None, "DB": db is not None}
    options = {**plan.constants, "num_warps": plan.warps, "maxnreg": plan.registers}
    soon: dict[str, bool] = {}  # how the second kernel is launched
    if plan.parts == 1:
        if not eps > LEAST_EPS.value:  # rows beyond the last have no finite factor, nor had dweight: there are none
            options["ROWS"] = 1
        # Where programs of many warps fill the multiprocessors, its own crowd where the first ones end.
        room = plan.warps <= 4 or plan.groups * plan.warps <= 8 * processors
        if sums is not None and room and 3 * dx.numel() * dx.element_size() <= _SEEN:
            soon = overlapping(x.device)
        launch(
            _norm_backward, (plan.groups,), dx, sums, *((dw, db) if alone else (None, None)), x, dy, dtotal, weight,
            rows, n // align, *strides, plan.groups, TOGETHER=capability is not None, APART=apart is not None,
            EARLY=bool(soon), **constants, **options,
        )  # fmt: skip
    else:
        early = overlapping(x.device)
        words = (rows + plan.groups) * plan.parts * (2 if centred else 1) * (2 if kind == torch.float64 else 1)
        board = board_of(words, torch.float64, x.device, bool(early))
        launch(
            _norm_backward_shared, (plan.groups * plan.parts,), dx, sums, board, x, dy, dtotal, weight, rows,
            n // align, *strides[1:], plan.groups, plan.span, plan.parts, processors,
            TRIES=0 if capability is None else 4096, LATE=bool(early), **constants, **options, **early,
        )  # fmt: skip
    _added_up(dw, db, sums, **soon)


def _added_up(dw: Tensor | None, db: Tensor | None, sums: Tensor | None, **soon: bool) -> None:
    """Gradients of weights from partial rows, if there are such; `soon`: how that is launched."""
    if sums is None:
        return
    vectors, groups, n = sums.shape
    at_once, block, warps = _sums_plan(groups, n * vectors, *gpu(sums.device))
    launch(
        _column_sums, (triton.cdiv(n, block), vectors), dw, db, sums, groups, n, ROWS=at_once, BLOCK=block,
        LATE=bool(soon), num_warps=warps, **soon,
    )  # fmt: skip


def _outputs(x: Tensor, dy: Any, dtotal: Any, weight: Tensor | None, bias: Tensor | None, *_: Any) -> list[Tensor]:
    vectors = [empty(v.shape, v.dtype, v.device) for v in (weight, bias) if v is not None]
    return [empty(x.shape, x.dtype, x.device), *vectors]


def _check(x: Any, dy: Any, dtotal: Any, weight: Any, bias: Any, centred: bool, eps: Any) -> tuple[Any, ...]:
    name = f"{'layer' if centred else 'rms'}_norm_backward"
    like = {"dy": dy} if dtotal is None else {"dy": dy, "dtotal": dtotal}
    x, dy, *rest = check_norm(name, x, like, {"weight": weight, "bias": bias}, centred, eps)
    return x, dy, *([None, *rest] if dtotal is None else rest)


norm_backward: Operator = Operator(
    "norm_backward",
    "(Tensor x, Tensor dy, Tensor? dtotal, Tensor? weight, Tensor? bias, bool centred, float eps) -> Tensor[]",
    check=_check,
    outputs=_outputs,
    into=_into,
)


def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dtotal: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, ...]:
    """Gradients of `rms_norm`, in two reads and one write.

    Parameters
    ----------
    x : torch.Tensor
        What was normalised; of `add_rms_norm` the sum.
    dy : torch.Tensor
        The gradient with respect to the result, of the shape and dtype of `x`.
    weight, bias : torch.Tensor, optional
        As they were given to the norm; of `bias` only the dtype matters.
    dtotal : torch.Tensor, optional
        The gradient with respect to the sum, of the shape and dtype of `x`, which is added to dx: one read more.
    eps : float, default 1e-6

    Returns
    -------
    dx : torch.Tensor
        Contiguous, of the shape and dtype of `x`.
    dweight, dbias : torch.Tensor
        Where there is a weight, a bias: of its shape and dtype. They have the same bits each time.

    Raises
    ------
    TypeError
        If an argument is no dense floating-point tensor, or dtypes of `x`, `dy` and `dtotal` differ.
    ValueError
        If shapes or devices do not fit, or the tensors are on the CPU and Triton compiles, or views that negate.
    """
    return tuple(norm_backward(x, dy, dtotal, weight, bias, False, eps))


def layer_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dtotal: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, ...]:
    """Gradients of `layer_norm`, in two reads and one write.

    Parameters
    ----------
    x, dy, weight, bias, dtotal, eps
        As of `rms_norm_backward`.

    Returns
    -------
    dx, dweight, dbias : torch.Tensor
        As of `rms_norm_backward`.

    Raises
    ------
    TypeError, ValueError
        As `rms_norm_backward`.
    """
    return tuple(norm_backward(x, dy, dtotal, weight, bias, True, eps))
