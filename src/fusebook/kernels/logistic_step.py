# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/logistic_step.py. It needs torch, Triton, NumPy, _call.py and _rows.py.
"""Logistic regression by gradient descent: a step in one pass over the data, and many steps with the data on the chip.

With data ``X [N, D]``, targets ``y [N]`` from 0 to 1, weights ``w [D]`` and a bias ``b``,

    z[i]  = sum_j X[i, j] * w[j] + b
    loss  = mean_i (log(1 + exp(z[i])) - y[i] * z[i]) + l2 * sum_j w[j]**2
    w[j] -= lr * (mean_i X[i, j] * (sigmoid(z[i]) - y[i]) + 2 * l2 * w[j])
    b    -= lr * mean_i (sigmoid(z[i]) - y[i])

Fused, a step: a program keeps a few rows of X while it computes their margins z, and uses the same rows once more for
the gradient. X is read once, where a chain of operations reads it twice: once for X w and once for X^T r. The programs'
partial gradients, far smaller than X, are added up by a second launch, always in the same order.

Fused, a fit: where X fits into the registers of all multiprocessors together, each keeps its rows there for all steps,
and what moves is two messages a step, of the size of w. X is read once in a whole fit.

Of few numbers one program takes the whole step, which is one launch.

Sums are float32 at least, float64 where X is float64; w and b have that dtype. Two runs give the same bits. Limits:
a step with more than 16384 features reads X twice; a fit whose X does not fit on the chip is a loop of fused steps.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ._call import (
    FLOATING,
    INTERPRETED,
    Operator,
    accumulated,
    apply,
    capturing,
    contiguous,
    gpu,
    integer,
    launch,
    number,
    one_of,
    overlapping,
    shapes,
    side_by_side,
)
from ._rows import aligned

__all__ = ["logistic_fit", "logistic_step", "logistic_step_eager"]

# The unfused chain ---------------------------------------------------------------------------------------------------


def logistic_step_eager(
    X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One step of gradient descent, one operation after another: what fusing saves.

    Parameters
    ----------
    X, y, w, b : torch.Tensor
        ``[N, D]``, ``[N]``, ``[D]`` and a single number, of one dtype.
    lr, l2 : float

    Returns
    -------
    tuple of torch.Tensor
        New w, new b, and the loss before the step.
    """
    z = X @ w + b  # read ND
    loss = F.binary_cross_entropy_with_logits(z, y) + l2 * (w * w).sum()  # a few launches of N or D elements each
    r = (torch.sigmoid(z) - y) / len(y)
    return w - lr * (X.T @ r + 2 * l2 * w), b - lr * r.sum(), loss  # read ND: in all read 2ND


# Kernels -------------------------------------------------------------------------------------------------------------
#
# Rows of X are contiguous, with a stride between them. D and that stride are counted in units of ALIGN elements: Triton
# knows of an integer only whether 16 divides it; in units of ALIGN it can see that rows begin at multiples of 16 bytes.
# Row numbers are int64, because X may have more than 2**31 elements.
#
# What is kept in FLOAT: float64 where w is, else float32.


@triton.jit
def _cross_entropy(z, y):
    """The loss of margins z, and its slope: sigmoid(z) - y. Both are exact to rounding however large the margin."""
    e = tl.exp(-tl.abs(z))  # from 0 to 1: no overflow
    # log(1 + e) where 1 + e has lost digits of e: the quotient puts them back.
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))
    loss = (tl.maximum(-z, 0.0, propagate_nan=tl.PropagateNan.ALL) + (1.0 - y) * z) + log1p
    tail = e / u  # the smaller of sigmoid(z) and 1 - sigmoid(z)
    return loss, tl.where(z >= 0.0, (1.0 - y) - tail, tail - y)


@triton.jit
def _summed_rows(
    x_ptr, y_ptr, w, b, first, hop, N, D, stride, step, ROWS: tl.constexpr, BLOCK: tl.constexpr, FLOAT: tl.constexpr
):  # fmt: skip
    """Tiles of ROWS whole rows from `first` on, `hop` apart: their part of the gradient, their slopes and losses."""
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < D
    gradient = tl.zeros([BLOCK], FLOAT)
    slopes = tl.zeros([ROWS], FLOAT)
    losses = tl.zeros([ROWS], FLOAT)
    for start in tl.range(first, N, hop, num_stages=1):
        i = start + tl.arange(0, ROWS)  # [ROWS]
        at = (i * stride)[:, None] + (columns.to(tl.int64) * step)[None, :]
        x = tl.load(x_ptr + at, mask=(i < N)[:, None] & inside[None, :], other=0.0).to(FLOAT)  # [ROWS, BLOCK]; read ND
        y = tl.load(y_ptr + i, mask=i < N, other=0.0).to(FLOAT)  # [ROWS]
        loss, slope = _cross_entropy(tl.sum(x * w[None, :], 1) + b, y)
        slope = tl.where(i < N, slope, 0.0)
        gradient += tl.sum(x * slope[:, None], 0)  # the same x: nothing is read again
        slopes += slope
        losses += tl.where(i < N, loss, 0.0)
    return gradient, tl.sum(slopes, 0), tl.sum(losses, 0)


@triton.jit
def _logistic_step_rows(
    parts_ptr, sums_ptr, x_ptr, y_ptr, w_ptr, b_ptr, N, D, stride, step,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Every so many tiles of whole rows: margins, and with the rows still at hand, their part of the gradient."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    FLOAT: tl.constexpr = parts_ptr.dtype.element_ty
    D = D * ALIGN
    p = tl.program_id(0)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    w = tl.load(w_ptr + columns, mask=columns < D, other=0.0)  # [BLOCK]
    gradient, slopes, losses = _summed_rows(
        x_ptr, y_ptr, w, tl.load(b_ptr), p.to(tl.int64) * ROWS, tl.num_programs(0) * ROWS, N, D, stride * ALIGN, step,
        ROWS, BLOCK, FLOAT,
    )  # fmt: skip
    tl.store(parts_ptr + p.to(tl.int64) * D + columns, gradient, mask=columns < D)
    tl.store(sums_ptr + 2 * p, slopes)
    tl.store(sums_ptr + 2 * p + 1, losses)


@triton.jit
def _rates(lr, l2, N, FLOAT: tl.constexpr):
    """Learning rate, weight of the squares and number of rows [1], of the dtype of what they are multiplied with."""
    # Where N is beyond 2**24 float32 rounds it: one rounding among many.
    return tl.full([1], lr, FLOAT), tl.full([1], l2, FLOAT), tl.full([1], N, FLOAT)


@triton.jit
def _logistic_step_alone(
    w_out_ptr, b_out_ptr, loss_ptr, x_ptr, y_ptr, w_ptr, b_ptr, N, D, stride, step, lr: tl.float64, l2: tl.float64,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A whole step by one program, of what is over before a second launch would have begun."""
    FLOAT: tl.constexpr = w_ptr.dtype.element_ty
    D = D * ALIGN
    rate, decay, n = _rates(lr, l2, N, FLOAT)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    w = tl.load(w_ptr + columns, mask=columns < D, other=0.0)  # [BLOCK]
    b = tl.load(b_ptr)
    gradient, slopes, losses = _summed_rows(
        x_ptr, y_ptr, w, b, tl.zeros([], tl.int64), ROWS, N, D, stride * ALIGN, step, ROWS, BLOCK, FLOAT
    )
    tl.store(w_out_ptr + columns, w - rate * (gradient / n + 2.0 * decay * w), mask=columns < D)
    one = tl.arange(0, 1)
    tl.store(b_out_ptr + one, b - rate * (slopes / n))
    tl.store(loss_ptr + one, losses / n + decay * tl.sum(w * w, 0))


@triton.jit
def _logistic_step_update(
    w_out_ptr, b_out_ptr, loss_ptr, parts_ptr, sums_ptr, w_ptr, b_ptr, P, S, N, D, lr: tl.float64, l2: tl.float64,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, LATE: tl.constexpr = False,
):  # fmt: skip
    """Add up P partial gradients, in their order, and take the step; the first program does the bias and the loss."""
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the parts
    FLOAT: tl.constexpr = parts_ptr.dtype.element_ty
    rate, decay, n = _rates(lr, l2, N, FLOAT)
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    p = tl.arange(0, PARTS)  # [PARTS]
    gradient = tl.zeros([PARTS, BLOCK], FLOAT)
    for start in range(0, P, PARTS):
        at = (start + p).to(tl.int64)[:, None] * D + columns[None, :]
        inside = (start + p < P)[:, None] & (columns < D)[None, :]
        gradient += tl.load(parts_ptr + at, mask=inside, other=0.0)  # [PARTS, BLOCK]
    w = tl.load(w_ptr + columns, mask=columns < D, other=0.0)
    new = w - rate * (tl.sum(gradient, 0) / n + 2.0 * decay * w)
    tl.store(w_out_ptr + columns, new, mask=columns < D)
    if tl.program_id(0) == 0:
        slopes = tl.zeros([WIDE], FLOAT)
        losses = tl.zeros([WIDE], FLOAT)
        squares = tl.zeros([WIDE], FLOAT)
        for start in range(0, S, WIDE):
            s = start + tl.arange(0, WIDE)
            slopes += tl.load(sums_ptr + 2 * s, mask=s < S, other=0.0)
            losses += tl.load(sums_ptr + 2 * s + 1, mask=s < S, other=0.0)
        for start in range(0, D, WIDE):
            j = start + tl.arange(0, WIDE)
            wide = tl.load(w_ptr + j, mask=j < D, other=0.0)
            squares += wide * wide
        one = tl.arange(0, 1)
        tl.store(b_out_ptr + one, tl.load(b_ptr + one) - rate * (tl.sum(slopes, 0) / n))
        tl.store(loss_ptr + one, tl.sum(losses, 0) / n + decay * tl.sum(squares, 0))


@triton.jit
def _logistic_step_margins(
    slopes_ptr, sums_ptr, x_ptr, y_ptr, w_ptr, b_ptr, N, D, stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Margins of rows too wide to be kept: the slope of each loss, and the sums of a program's rows."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    FLOAT: tl.constexpr = slopes_ptr.dtype.element_ty
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    z = tl.zeros([ROWS, BLOCK], FLOAT)
    for start in range(0, D, BLOCK):
        j = start + tl.arange(0, BLOCK)  # [BLOCK]
        inside = (i < N)[:, None] & (j < D)[None, :]
        x = tl.load(x_ptr + (i * stride)[:, None] + j[None, :], mask=inside, other=0.0).to(FLOAT)  # read ND
        z += x * tl.load(w_ptr + j, mask=j < D, other=0.0)[None, :]
    y = tl.load(y_ptr + i, mask=i < N, other=0.0).to(FLOAT)
    loss, slope = _cross_entropy(tl.sum(z, 1) + tl.load(b_ptr), y)
    slope = tl.where(i < N, slope, 0.0)
    tl.store(slopes_ptr + i, slope, mask=i < N)
    tl.store(sums_ptr + 2 * tl.program_id(0), tl.sum(slope, 0))
    tl.store(sums_ptr + 2 * tl.program_id(0) + 1, tl.sum(tl.where(i < N, loss, 0.0), 0))


@triton.jit
def _logistic_step_columns(
    parts_ptr, slopes_ptr, x_ptr, N, D, stride, P, ROWS: tl.constexpr, BLOCK: tl.constexpr, LATE: tl.constexpr = False
):  # fmt: skip
    """Partial gradients of BLOCK features of rows too wide to be kept: one of P shares of them, and their slopes."""
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the slopes
        tl.extra.cuda.gdc_launch_dependents()
    FLOAT: tl.constexpr = slopes_ptr.dtype.element_ty
    share = tl.program_id(0) % P
    j = (tl.program_id(0) // P).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    gradient = tl.zeros([ROWS, BLOCK], FLOAT)
    for start in range(share * ROWS, N, P * ROWS):
        i = start + tl.arange(0, ROWS).to(tl.int64)  # [ROWS]
        inside = (i < N)[:, None] & (j < D)[None, :]
        x = tl.load(x_ptr + (i * stride)[:, None] + j[None, :], mask=inside, other=0.0).to(FLOAT)  # read ND again
        gradient += x * tl.load(slopes_ptr + i, mask=i < N, other=0.0)[:, None]
    tl.store(parts_ptr + share.to(tl.int64) * D + j, tl.sum(gradient, 0), mask=j < D)


# A message between programs of one launch is a word of 64 bits: a float32 in the lower half, and above it the number of
# the step that it belongs to. The hardware reads and writes such a word as a whole. So who waits for a number looks at
# the number itself until it is of the right step, and there is no barrier beside it that would have to be waited for
# as well.
@triton.jit
def _sent(to, value, step, mask):
    """Write numbers with the step that they belong to."""
    bits = value.to(tl.uint32, bitcast=True).to(tl.uint64)
    word = (step.to(tl.uint64) << 32) | bits
    tl.store(to, word.to(tl.int64, bitcast=True), mask=mask)


@triton.jit
def _received(of, step, mask):
    """Wait until all numbers belong to the step, and return them.

    There must be as many words as threads at least. Of fewer, several threads would hold a copy, each of a load of its
    own, and only one copy would be looked at.
    """
    # volatile: from L2, where the others' words arrive, and anew each time.
    word = tl.load(of, mask=mask, other=0, volatile=True)
    while tl.max(tl.where(mask, (word >> 32).to(tl.int32) != step, False).to(tl.int32)) > 0:
        word = tl.load(of, mask=mask, other=0, volatile=True)
    return (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["first", "steps"])
def _logistic_fit_rows(
    w_out_ptr, b_out_ptr, losses_ptr, gradients_ptr, weights_ptr, slopes_ptr, x_ptr, y_ptr, w_ptr, b_ptr, N, D, stride,
    first, steps, lr, l2,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, PARTS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """All steps in one launch. Each program keeps ROWS rows of X, and answers for SLICE of the weights.

    Two messages a step: each program sends its part of the gradient to those who answer for it; they add up the parts,
    take the step, and send the new weights to all. Buffers are used in turn: who writes to one again has heard from
    all programs since they read it.
    """
    D = D * ALIGN
    P = tl.num_programs(0)
    p = tl.program_id(0)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < D
    i = p * ROWS + tl.arange(0, ROWS)  # [ROWS]
    at = (i.to(tl.int64) * stride * ALIGN)[:, None] + columns[None, :]
    x = tl.load(x_ptr + at, mask=(i < N)[:, None] & inside[None, :], other=0.0)  # [ROWS, BLOCK]; read ND, once for all
    y = tl.load(y_ptr + i, mask=i < N, other=0.0).to(tl.float32)  # [ROWS]
    w = tl.load(w_ptr + columns, mask=inside, other=0.0)  # [BLOCK]
    b = tl.load(b_ptr)
    mine = p * SLICE + tl.arange(0, SLICE)  # [SLICE]; the weights that this program answers for
    own = tl.load(w_ptr + mine, mask=mine < D, other=0.0)
    q = tl.arange(0, PARTS)  # [PARTS]; all programs
    every = tl.arange(0, WORDS)  # [WORDS]; all programs too
    for t in range(steps):
        turn = t % 2
        tag = first + t + 1
        loss, slope = _cross_entropy(tl.sum(x.to(tl.float32) * w[None, :], 1) + b, y)
        slope = tl.where(i < N, slope, 0.0) / N
        part = tl.sum(x.to(tl.float32) * slope[:, None], 0)  # [BLOCK]
        _sent(gradients_ptr + (turn * P + p) * D + columns, part, tag, inside)
        _sent(slopes_ptr + turn * P + p, tl.sum(slope, 0), tag, True)
        # Each program's share of the loss is added to the others' when all steps are done.
        share = tl.sum(tl.where(i < N, loss, 0.0), 0) / N + l2 * tl.sum(own * own, 0)
        tl.store(losses_ptr + t * P + p, share)
        if p * SLICE < D:
            wanted = (q < P)[:, None] & (mine < D)[None, :]
            parts = _received(gradients_ptr + (turn * P + q)[:, None] * D + mine[None, :], tag, wanted)
            own -= lr * (tl.sum(tl.where(wanted, parts, 0.0), 0) + 2.0 * l2 * own)
            _sent(weights_ptr + turn * D + mine, own, tag, mine < D)
        # Everybody needs the bias, and everybody adds it up, in the same order.
        slopes = _received(slopes_ptr + turn * P + every, tag, every < P)
        b -= lr * tl.sum(tl.where(every < P, slopes, 0.0), 0)
        w = tl.where(inside, _received(weights_ptr + turn * D + columns, tag, inside), 0.0)
    tl.store(w_out_ptr + mine, own, mask=mine < D)
    if p == 0:
        tl.store(b_out_ptr, b)


@triton.jit(do_not_specialize=["steps"])
def _logistic_fit_losses(losses_ptr, shares_ptr, P, steps, STEPS: tl.constexpr, PARTS: tl.constexpr):
    """The loss of each step from the shares of P programs."""
    t = tl.program_id(0) * STEPS + tl.arange(0, STEPS)  # [STEPS]
    q = tl.arange(0, PARTS)  # [PARTS]
    shares = tl.load(shares_ptr + t[:, None] * P + q[None, :], mask=(t < steps)[:, None] & (q < P)[None, :], other=0.0)
    tl.store(losses_ptr + t, tl.sum(shares, 1), mask=t < steps)


# Plans ---------------------------------------------------------------------------------------------------------------


# Steps whose launches one plan of a call holds: of more there is no plan, and each launch is Triton's own, which takes
# the host several times as long.
_PLANNED = 20
# A launch of the fit that keeps X on the chip does at most so many steps, to bound the memory for their losses.
_TOGETHER = 8192


class StepPlan(NamedTuple):
    """Constants of a step."""

    kept: bool  # whether a program can keep a whole row; else X is read twice
    rows: int
    block: int
    programs: int
    warps: int
    update: int  # weights that a program of the update answers for
    parts: int  # partial gradients that it reads at a time; where X is read twice, all
    wide: int  # elements that its first program adds up at a time
    alone: bool = False  # one program does all


class FitPlan(NamedTuple):
    """Constants of a fit on the chip."""

    rows: int
    block: int
    slice: int
    parts: int
    words: int
    programs: int
    warps: int


def _logistic_step_plan(
    N: int, D: int, itemsize: int, capability: tuple[int, int] | None, multiprocessors: int, align: int = 16,
    across: bool = False,
) -> StepPlan:  # fmt: skip
    """Choose the constants of a step; `itemsize` is that of the sums, `capability` None in the interpreter.

    Rows begin at multiples of `align` elements, or lie `across`.
    """
    interpreted = capability is None
    block = triton.next_power_of_2(max(D, 1))
    widest = 512 if interpreted else 65536 // itemsize
    tall = triton.next_power_of_2(N)
    # What takes a program less time than a second launch: a tile, of few features two or three.
    rows = max(1, min(tall, 32768 // itemsize // block))
    if D and N * D <= (256 if interpreted else 2**14) and block <= widest and (N <= rows or block <= 32 or interpreted):
        # More threads than numbers would hold some twice, and write them to shared memory together.
        return StepPlan(True, rows, block, 1, max(1, min(8, rows * block // 32)), 32, 1, 1024, alone=True)
    if block > widest:
        # A program takes one row; of few rows large tiles, since one follows another. The columns' programs share out
        # the rows until they fill the GPU several times over.
        large = N <= 2 * multiprocessors
        tile, warps = (65536, 16) if large else (16384, 4)
        rows, block, update = (8, 4096, 4096) if interpreted else (1, tile // itemsize, 512 // itemsize)
        shares = min(N // 32, 2 if interpreted else 8 * multiprocessors * update // D)
        parts = triton.next_power_of_2(max(1, shares))
        return StepPlan(False, rows, block, triton.cdiv(N, rows), warps, update, parts, min(block, 16384 // itemsize))
    # A tile of 32 KiB: enough loads are under way when each multiprocessor has four, and with 4 warps they are few
    # enough to agree on a sum quickly. Where a row has many elements, one row is a tile; where it has few, or they are
    # wide, or must be loaded one by one, half of the tile is better. 64 registers a thread hold it.
    tile = 4096 if block <= 32 or block >= 4096 or (itemsize == 4 and align < 4 and not across) else 8192
    rows = 16384 // block if interpreted else max(tile * 4 // itemsize // (2 if itemsize > 4 else 1) // block, 1)
    rows = max(1, min(rows, tall))
    warps = 1 if interpreted else 8 if block >= 8192 else 4
    if not interpreted and 32 * align < block <= 256:
        # Warps would lie side by side, and each compute the loss of all rows of a tile: so one warp a tile.
        rows, times = (1024 // block, 16) if block > 64 else (2048 // block, 8)
        rows = min(rows, tall)
        programs = min(triton.cdiv(N, rows), times * multiprocessors)
        return StepPlan(True, rows, block, programs, 1, 8, min(256, triton.next_power_of_2(programs)), 1024)
    times = 1 if interpreted else 2 if block > 8192 else 4
    programs = min(triton.cdiv(N, rows), times * multiprocessors)
    parts = min(64, triton.next_power_of_2(programs))
    wide = max(1024, min(4096, block))
    return StepPlan(True, rows, block, programs, warps, 1024 if interpreted else 32, parts, wide)


def _logistic_fit_plan(
    N: int, D: int, itemsize: int, capability: tuple[int, int] | None, multiprocessors: int
) -> FitPlan | None:
    """Choose the constants of a fit with X on the chip, or None where it is too large for that.

    `itemsize` is that of X; `capability` is None in the interpreter.
    """
    block = triton.next_power_of_2(max(D, 1))
    if capability is None:  # programs that wait for each other cannot run one after the other: a single one
        rows = triton.next_power_of_2(N)
        return FitPlan(rows, block, block, 1, 1, 1, 1) if rows * block <= 2**17 else None
    # Half of a multiprocessor's registers for X, the rest for everything else; a quarter where most of it is padding.
    most = 2**17 // max(itemsize, 4) // (block if block >= 256 else 512)
    # At least a word for each thread, see _received; so of 256 features 8 warps at most.
    block = max(block, 256)
    rows = min(4, most, triton.next_power_of_2(N))
    while 0 < rows <= most and triton.cdiv(N, rows) > multiprocessors:
        rows *= 2
    if not 0 < rows <= most:
        return None
    programs = triton.cdiv(N, rows)
    warps = max(4, min(16, block // 32, rows * block // 4096))  # 128 registers a thread: few warps agree sooner
    slice = triton.next_power_of_2(triton.cdiv(max(D, 1), programs))
    words = max(triton.next_power_of_2(programs), 32 * warps)
    parts = max(triton.next_power_of_2(programs), 32 * warps // slice)
    if parts * slice > 2**14:  # what a program receives of all others would not fit into its registers
        return None
    return FitPlan(rows, block, slice, parts, words, programs, warps)


# Launchers -----------------------------------------------------------------------------------------------------------

_step_plan = functools.lru_cache(maxsize=4096)(_logistic_step_plan)
_fit_plan = functools.lru_cache(maxsize=4096)(_logistic_fit_plan)


def _launch_step(
    X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float, into: tuple[Tensor, Tensor, Tensor],
    work: tuple[Tensor, Tensor, Tensor | None], plan: StepPlan,
) -> None:  # fmt: skip
    """Two launches, or three where rows are too wide to be kept."""
    N, D = X.shape
    if plan.alone:
        align = aligned(X.shape[1], X)
        launch(
            _logistic_step_alone, (1,),
            *into, X, y, w, b, N, D // align, X.stride(0) // align, X.stride(1), lr, l2,
            ALIGN=align, ROWS=plan.rows, BLOCK=plan.block, num_warps=plan.warps,
        )  # fmt: skip
        return
    parts, sums, slopes = work
    early = overlapping(X.device)
    if plan.kept:
        align = aligned(X.shape[1], X)
        launch(
            _logistic_step_rows, (plan.programs,),
            parts, sums, X, y, w, b, N, D // align, X.stride(0) // align, X.stride(1),
            ALIGN=align, ROWS=plan.rows, BLOCK=plan.block, EARLY=bool(early), num_warps=plan.warps,
        )  # fmt: skip
    else:
        launch(
            _logistic_step_margins, (plan.programs,),
            slopes, sums, X, y, w, b, N, D, X.stride(0),
            ROWS=plan.rows, BLOCK=plan.block, EARLY=bool(early), num_warps=plan.warps,
        )  # fmt: skip
        launch(
            _logistic_step_columns, (len(parts) * triton.cdiv(D, plan.update),),
            parts, slopes, X, N, D, X.stride(0), len(parts),
            ROWS=32, BLOCK=plan.update, LATE=bool(early), num_warps=4, **early,
        )  # fmt: skip
    launch(
        _logistic_step_update, (max(1, triton.cdiv(D, plan.update)),),
        *into, parts, sums, w, b, len(parts), len(sums), N, D, lr, l2,
        PARTS=plan.parts, BLOCK=plan.update, WIDE=plan.wide, LATE=bool(early), num_warps=4, **early,
    )  # fmt: skip


def _workspace(X: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Memory for partial gradients, for sums of slopes and losses, and for slopes where X is read twice."""
    if plan.alone:
        return X, X, None
    dtype, device = accumulated(X.dtype), X.device
    parts = plan.programs if plan.kept else plan.parts
    wanted: list[tuple[tuple[int, ...], torch.dtype]] = [((parts, X.shape[1]), dtype)]
    wanted += [((plan.programs, 2), dtype), *([] if plan.kept else [((len(X),), dtype)])]
    gradients, sums, *slopes = side_by_side(device, *wanted)
    return gradients, sums, slopes[0] if slopes else None


def _packed(X: Tensor, y: Tensor, w: Tensor, across: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, targets and weights without gaps; X is copied where its rows have some, unless it may lie `across`."""
    if X.shape[1] > 1 and X.stride(1) != 1 and not (across and _taken_across(X)):
        X = apply(Tensor.contiguous, X)
    return X, contiguous(y), contiguous(w)


def _taken_across(X: Tensor) -> bool:
    """Whether a step takes rows that are not dense as they lie: a copy costs more than the step.

    Where neighbours in memory are of several rows that a program has at once, or X stays in the L2 cache.
    """
    size, block = X.element_size(), triton.next_power_of_2(X.shape[1])
    few = block <= (512 if INTERPRETED else 65536 // max(size, 4))  # a program can keep a row
    return few and X.stride(0) == 1 and (block * max(size, 4) <= 8192 or X.numel() * size <= 2**24)


def _step_outputs(X: Tensor, y: Tensor, w: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return w.new_empty(w.shape), torch.empty_like(b), w.new_empty(())


def _step_into(
    outs: tuple[Tensor, Tensor, Tensor], X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float
) -> None:
    X, y, w = _packed(X, y, w, across=True)
    plan = _step_plan(*X.shape, w.element_size(), *gpu(X.device), aligned(X.shape[1], X), X.stride(1) != 1)
    _launch_step(X, y, w, b, lr, l2, outs, _workspace(X, plan), plan)


def _fit_into(
    outs: tuple[Tensor, Tensor, Tensor], X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float, steps: int,
    on_chip: bool | None,
) -> None:  # fmt: skip
    *last, losses = outs
    if steps == 0:
        apply(Tensor.copy_, last[0], w)
        apply(Tensor.copy_, last[1], b)
        return
    X, y, w = _packed(X, y, w)
    capability, multiprocessors = gpu(X.device)
    if on_chip is not False and w.dtype == torch.float32:
        chip = _fit_plan(*X.shape, X.element_size(), capability, multiprocessors)
        if chip is not None:
            _launch_fit(X, y, w, b, lr, l2, (last[0], last[1]), losses, chip)
            return
    plan = _step_plan(*X.shape, w.element_size(), capability, multiprocessors, aligned(X.shape[1], X))
    work = _workspace(X, plan)
    spare = (w.new_empty(w.shape), torch.empty_like(b)) if steps > 1 else last
    for t in range(steps):
        into = last if (steps - t) % 2 else spare  # the last step writes where the results are wanted
        _launch_step(X, y, w, b, lr, l2, (*into, losses[t]), work, plan)
        w, b = into


def _launch_fit(
    X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float, last: tuple[Tensor, Tensor], losses: Tensor,
    plan: FitPlan,
) -> None:  # fmt: skip
    """The fit on the chip; launched several times where there are very many steps."""
    (N, D), P = X.shape, plan.programs
    align = aligned(X.shape[1], X)
    # Words of no step: the first is number 1.
    sizes = (2 * P * D, 2 * D, 2 * P)
    words = apply(torch.zeros, sum(sizes), dtype=torch.int64, device=X.device)
    gradients, weights, slopes = words.split(sizes)
    shares = X.new_empty((min(len(losses), _TOGETHER), P), dtype=torch.float32)
    for start in range(0, len(losses), _TOGETHER):
        steps = min(_TOGETHER, len(losses) - start)
        into = last if start + steps == len(losses) else (w.new_empty(w.shape), torch.empty_like(b))
        # Cooperative: all programs at once or none, since they wait for each other.
        launch(
            _logistic_fit_rows, (P,),
            *into, shares, gradients, weights, slopes, X, y, w, b,
            N, D // align, X.stride(0) // align, start, steps, lr, l2,
            ALIGN=align, ROWS=plan.rows, BLOCK=plan.block, SLICE=plan.slice, PARTS=plan.parts, WORDS=plan.words,
            num_warps=plan.warps, launch_cooperative_grid=True,
        )  # fmt: skip
        rows = max(1, 4096 // plan.words)
        launch(
            _logistic_fit_losses, (triton.cdiv(steps, rows),),
            losses[start:], shares, P, steps, STEPS=rows, PARTS=plan.words,
        )  # fmt: skip
        w, b = into


def _check(name: str, X: Any, y: Any, w: Any, b: Any, lr: Any, l2: Any) -> tuple[float, float]:
    """Validate what can be seen without reading values; the numbers as floats."""
    # Steps are too small for fewer digits than these.
    wide = (accumulated(X.dtype),) if isinstance(X, Tensor) else FLOATING
    shapes(name, X=(X, "[N > 0, D]"), y=(y, "[N]"), w=(w, "[D]", wide), b=(b, "", wide))
    if tuple(b.shape) not in ((), (1,)):
        raise ValueError(f"{name}: expected b to be a single number, got shape {tuple(b.shape)}; give one bias")
    remedy = "pass a Python float, since reading a tensor would wait for the GPU"
    lr, l2 = number(name, "lr", lr, remedy), number(name, "l2", l2, remedy)
    for what, value in (("lr", lr), ("l2", l2)):
        # torch.compile may take the number for one that varies, and then it has no value yet.
        if not torch.compiler.is_compiling() and isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}: expected {what} to be finite, got {value}; every weight would become NaN")
    return lr, l2


def _refuse_other_targets(name: str, y: Tensor) -> None:
    """Read the targets and raise ValueError for the first that is neither 0 nor 1. Waits for the GPU."""
    if capturing(y):
        return
    wrong = (y != 0) & (y != 1)
    if not wrong.any():
        return
    i = int(wrong.nonzero()[0])
    raise ValueError(
        f"{name}: expected targets of 0 and 1, got {y[i].item():g} at y[{i}]; mend it, or pass check=False if "
        "targets between them are meant"
    )


def _check_fit(
    X: Any, y: Any, w: Any, b: Any, lr: Any, l2: Any, check: bool, steps: Any, on_chip: Any
) -> tuple[Any, ...]:
    name = "logistic_fit"
    numbers = _check(name, X, y, w, b, lr, l2)
    remedy, few = "give how many to take", lambda steps: 0 <= steps < 2**31
    steps = integer(name, "steps", steps, remedy, "from 0 to 2**31 - 1", few)
    one_of(name, "on_chip", on_chip, (True, False, None), "None takes what is faster")
    if on_chip and X.device.type in ("cpu", "cuda") and not _fits(X):
        raise NotImplementedError(
            f"{name}: expected X to fit on the chip, got {X.dtype} of shape {tuple(X.shape)}; leave on_chip to be "
            "chosen, which takes single steps"
        )
    return X, y, w, b, *numbers, steps, on_chip


def _read(name: str, X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float, check: bool, *_: Any) -> None:
    if check:
        _refuse_other_targets(name, y)


_step = Operator(
    "logistic_step",
    "(Tensor X, Tensor y, Tensor w, Tensor b, float lr, float l2) -> (Tensor, Tensor, Tensor)",
    check=lambda X, y, w, b, lr, l2, check: (X, y, w, b, *_check("logistic_step", X, y, w, b, lr, l2)),
    outputs=_step_outputs,
    into=_step_into,
    read=functools.partial(_read, "logistic_step"),
)
_fit = Operator(
    "logistic_fit",
    "(Tensor X, Tensor y, Tensor w, Tensor b, float lr, float l2, SymInt steps, bool? on_chip)"
    " -> (Tensor, Tensor, Tensor)",
    check=_check_fit,
    outputs=lambda X, y, w, b, lr, l2, steps, _: (w.new_empty(w.shape), torch.empty_like(b), w.new_empty((steps,))),
    into=_fit_into,
    read=functools.partial(_read, "logistic_fit"),
)


def logistic_step(
    X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float, *, check: bool = True
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One step of gradient descent on the cross entropy of logistic regression, with one pass over the data.

    Parameters
    ----------
    X : torch.Tensor
        ``[N, D]``, float16, bfloat16, float32 or float64, on a CUDA device, or on the CPU where Triton interprets.
        Rows that are not contiguous are copied first, but for a transposed matrix of up to 2048 features or 16 MiB.
    y : torch.Tensor
        ``[N]``, targets of 0 and 1, in the dtype of `X`.
    w : torch.Tensor
        ``[D]``, weights, float32; float64 where `X` is float64.
    b : torch.Tensor
        The bias, a single number in the dtype of `w`, of shape ``[]`` or ``[1]``.
    lr : float
        The learning rate.
    l2 : float
        Weight of the sum of squares of `w` in the loss.
    check : bool, default True
        Read the targets first and refuse others than 0 and 1, which waits for the GPU. Without it, and under
        torch.compile and graph capture, a target is a probability and what lies outside of 0 to 1 is computed with.

    Returns
    -------
    w : torch.Tensor
        ``[D]``, new weights; what was given is not changed.
    b : torch.Tensor
        The new bias, of the shape of `b`.
    loss : torch.Tensor
        ``[]``, the mean cross entropy plus `l2` times the sum of squares of `w`, before the step.

    Raises
    ------
    TypeError
        For arguments that are no tensors, and other dtypes than those above.
    ValueError
        For shapes that do not match, no rows at all, tensors on different devices, a learning rate or an `l2` that is
        not finite, and with `check` for targets other than 0 and 1.

    See Also
    --------
    logistic_fit : Many steps.

    Notes
    -----
    Sums are float32 at least, and always in the same order: two runs on a machine give the same bits. Where a step
    diverges, infinities and NaN come out as they do in PyTorch. The step is not differentiable.

    Examples
    --------
    >>> import fusebook, torch
    >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device="cuda")  # doctest: +SKIP
    >>> y, w, b = X[:, 0], torch.zeros_like(X[0]), torch.zeros_like(X[0, 0])  # doctest: +SKIP
    >>> fusebook.logistic_step(X, y, w, b, lr=1.0, l2=0.0)  # doctest: +SKIP
    (tensor([ 0.2500, -0.2500], device='cuda:0'), tensor(0., device='cuda:0'), tensor(0.6931, device='cuda:0'))
    """
    return _step(X, y, w, b, lr, l2, check)


def logistic_fit(
    X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float, *, steps: int, check: bool = True,
    on_chip: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Many steps of `logistic_step`, in one launch where the data fits on the chip.

    Parameters
    ----------
    X, y, w, b, lr, l2, check
        As those of `logistic_step`.
    steps : int
        How many, from 0 up.
    on_chip : bool, optional
        True refuses what does not fit on the chip, False takes single steps; chosen by size unless given.

    Returns
    -------
    w : torch.Tensor
        ``[D]``, the weights after the last step; what was given is not changed.
    b : torch.Tensor
        The bias after the last step, of the shape of `b`.
    losses : torch.Tensor
        ``[steps]``, the loss before each step.

    Raises
    ------
    TypeError, ValueError
        As `logistic_step`; TypeError for `steps` that are no whole number, ValueError for negative ones.
    NotImplementedError
        With ``on_chip=True``, where X does not fit on the chip or is float64.

    See Also
    --------
    logistic_step : One step.

    Notes
    -----
    X fits where each multiprocessor can hold its part of the rows in half of its registers, with the features padded
    to a power of two, 256 at least, and is not float64: some 16 MB on a GPU of 132 multiprocessors. What does not fit
    becomes a loop of fused steps, which reads X once a step.

    On the chip all programs run at the same time and wait for each other, so the launch is a cooperative one: a GPU
    that is busy with other work starts it when all its programs find a place.
    """
    if type(steps) is not int or steps <= _PLANNED or torch.compiler.is_compiling() or not _by_steps(X, on_chip):
        return _fit(X, y, w, b, lr, l2, check, steps, on_chip)
    if X.stride(1) != 1:
        X = X.contiguous()
    losses = []
    for start in range(0, steps, _PLANNED):
        w, b, loss = _fit(X, y, w, b, lr, l2, check and not start, min(_PLANNED, steps - start), False)
        losses.append(loss)
    return w, b, torch.cat(losses)


def _by_steps(X: Any, on_chip: bool | None) -> bool:
    """Whether a fit is a loop of single steps; what is no matrix is refused elsewhere."""
    if not isinstance(X, Tensor) or X.is_nested or X.layout is not torch.strided or X.dim() != 2:
        return False
    return on_chip is not True and (on_chip is False or not _fits(X))


def _fits(X: Tensor) -> bool:
    """Whether a fit would keep X on the chip."""
    capability, multiprocessors = gpu(X.device)
    plan = _fit_plan(*X.shape, X.element_size(), capability, multiprocessors)
    return X.dtype != torch.float64 and plan is not None
