"""Gradients of RMSNorm and LayerNorm: the input and the gradient are read once, the result is written once.

For a row x of N elements, its normalised numbers n[i] = (x[i] - mean) * factor, and g[i] = dy[i] * weight[i],

    dx[i] = factor * (g[i] - mean_j g[j] - n[i] * mean_j g[j] n[j])  (+ dtotal[i])
    dweight[i] = sum of dy[i] n[i] over all rows,  dbias[i] = sum of dy[i] over all rows

where RMSNorm leaves out both means but the last. `dtotal` is the gradient of the sum with the residual: what is
normalised is that sum, which takes both gradients.

Nothing is kept from the forward pass but its input: the statistics of a row are found anew while it is in registers.
Every program takes many rows and the same columns of each, and adds up its part of dweight and dbias in registers. So
there is one partial row for each group of programs, and a second kernel adds these up in a fixed order: the same bits
each time, without atomics.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._operator import Operator, accumulated, contiguous, empty, gpu, launch
from ._rows import leave, missing_of, words_of
from .norms import aligned, board_of, check_norm, loaded, parts_of, rows_in, waiting, word_of

__all__ = ["layer_norm_backward", "rms_norm_backward"]

# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _sums(x, g, own, count, CENTRED: tl.constexpr):
    """Of each row: the sum of x, that of its squares, of g and of g x; centred, the latter around x's mean. [ROWS]"""
    if CENTRED:
        total = tl.sum(x, 1)
        x = tl.where(own, x - (total / count)[:, None], 0.0)
        return total, tl.sum(x * x, 1), tl.sum(g, 1), tl.sum(g * x, 1)
    squares = tl.sum(x * x, 1)
    products = tl.sum(g * x, 1)
    return squares, squares, products, products


@triton.jit
def _norm_backward(
    dx_ptr, sums_ptr, board_ptr, x_ptr, dy_ptr, dtotal_ptr, w_ptr, M, N, x_stride, dy_stride, dtotal_stride,
    GROUPS, SPAN, PARTS,
    ALIGN: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    ALONE: tl.constexpr, AHEAD: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr = 0, TRIES: tl.constexpr = 0, LATE: tl.constexpr = False,
    SAFE: tl.constexpr = True,
):  # fmt: skip
    """ROWS rows at a time, up to SPAN columns of them, by PARTS programs; GROUPS such groups take all rows.

    ALONE: PARTS is 1, and nobody waits for words. AHEAD: the numbers of the next rows are loaded before these are
    stored.
    """
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    NOTHING: tl.constexpr = -9223372036854775808 if FLOAT == tl.float64 else -2147483648  # -0.0
    WORDS: tl.constexpr = 4 if CENTRED else 2
    N = N * ALIGN
    group = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    inner = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    columns = inner if ALONE else part * SPAN + inner
    mine = columns < N if ALONE else (inner < SPAN) & (columns < N)
    count = N if ALONE else tl.minimum(N - part * SPAN, SPAN)
    if KEEP:
        w = loaded(w_ptr, columns, mine, 1.0)  # [1, BLOCK]
    dw = tl.zeros([ROWS, BLOCK], FLOAT)
    db = tl.zeros([ROWS, BLOCK], FLOAT)
    if AHEAD:
        rows = (group.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
        own = mine & (rows < M)
        x_next = tl.load(x_ptr + rows * (x_stride * ALIGN) + columns, mask=own, other=0.0)
        dy_next = tl.load(dy_ptr + rows * (dy_stride * ALIGN) + columns, mask=own, other=0.0)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros on the board; the first row is here already
    for start in tl.range(group * ROWS, M, GROUPS * ROWS, num_stages=STAGES):
        row = tl.zeros([], tl.int64) + start
        rows = (row + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
        own = mine & (rows < M)
        later = rows + GROUPS * ROWS
        on = mine & (later < M)
        if AHEAD:
            x_held = x_next  # [ROWS, BLOCK]; read MN
            dy_held = dy_next  # [ROWS, BLOCK]; read MN
            x_next = tl.load(x_ptr + later * (x_stride * ALIGN) + columns, mask=on, other=0.0)
            dy_next = tl.load(dy_ptr + later * (dy_stride * ALIGN) + columns, mask=on, other=0.0)
        else:
            x_held = tl.load(x_ptr + rows * (x_stride * ALIGN) + columns, mask=own, other=0.0)
            dy_held = tl.load(dy_ptr + rows * (dy_stride * ALIGN) + columns, mask=own, other=0.0)
        if not KEEP:
            w = loaded(w_ptr, columns, mine, 1.0)  # [1, BLOCK]
        g = dy_held.to(FLOAT) * w.to(FLOAT)
        total, squares, gs, products = _sums(x_held.to(FLOAT), g, own, count, CENTRED)
        mean = tl.zeros([ROWS], FLOAT)
        if ALONE:
            if CENTRED:
                mean = total / N
        else:
            at = board_ptr + row * (PARTS * WORDS)
            _leave_all(at + part * WORDS, total, squares, gs, products, CENTRED)
            lanes = tl.arange(0, LANES)  # [LANES]
            words = tl.full([LANES], NOTHING, tl.int64 if FLOAT == tl.float64 else tl.int32)
            if PARTS > 1:  # it is; Triton loads ahead in loops whose inner loops it does not see
                words, missing = words_of(at, lanes, PARTS * WORDS, NOTHING, TRIES)
                while missing < (LANES if SAFE else 0):
                    # Nothing promises that the others run at the same time: what is missing is found by their own
                    # steps.
                    other = missing // WORDS
                    its = other * SPAN + inner
                    there = (inner < SPAN) & (its < N)
                    x = tl.load(x_ptr + row * (x_stride * ALIGN) + its, mask=there, other=0.0).to(FLOAT)
                    g = tl.load(dy_ptr + row * (dy_stride * ALIGN) + its, mask=there, other=0.0).to(FLOAT)
                    g *= loaded(w_ptr, its, there, 1.0).to(FLOAT)
                    total, squares, gs, products = _sums(x, g, there, tl.minimum(N - other * SPAN, SPAN), CENTRED)
                    _leave_all(at + other * WORDS, total, squares, gs, products, CENTRED)
                    fresh = tl.where(lanes % WORDS == WORDS - 1, word_of(products), word_of(squares))
                    if CENTRED:
                        fresh = tl.where(lanes % WORDS == 0, word_of(total), fresh)
                        fresh = tl.where(lanes % WORDS == 2, word_of(gs), fresh)
                    words = tl.where(lanes // WORDS == other, fresh, words)
                    missing = missing_of(words, lanes)
            found = words.to(FLOAT, bitcast=True)  # [LANES]
            if CENTRED:
                counts = tl.maximum(tl.minimum(N - tl.arange(0, LANES // 4) * SPAN, SPAN), 0).to(FLOAT)  # [LANES / 4]
                left, right = tl.split(tl.reshape(found, [LANES // 4, 2, 2]))
                totals, all_gs = tl.split(left)
                all_squares, all_products = tl.split(right)
                mean += tl.sum(totals, 0) / N
                away = totals / tl.maximum(counts, 1.0) - tl.sum(mean, 0)
                squares = tl.zeros([ROWS], FLOAT) + tl.sum(all_squares + counts * away * away, 0)
                gs = tl.zeros([ROWS], FLOAT) + tl.sum(all_gs, 0)
                products = tl.zeros([ROWS], FLOAT) + tl.sum(all_products + all_gs * away, 0)
            else:
                all_squares, all_products = tl.split(tl.reshape(found, [LANES // 2, 2]))
                squares = tl.zeros([ROWS], FLOAT) + tl.sum(all_squares, 0)
                products = tl.zeros([ROWS], FLOAT) + tl.sum(all_products, 0)
        factor = 1 / tl.sqrt(squares / N + EPS)  # [ROWS]
        n = (x_held.to(FLOAT) - mean[:, None]) * factor[:, None]  # [ROWS, BLOCK]
        dy = dy_held.to(FLOAT)
        # Of rows beyond the last all numbers are zero, of columns beyond it dy is.
        if DW:
            dw += dy * n
        if DB:
            db += dy
        dx = dy * w.to(FLOAT) - n * (products * factor / N)[:, None]
        if CENTRED:
            dx -= (gs / N)[:, None]
        dx *= factor[:, None]
        if dtotal_ptr is not None:
            dx += tl.load(dtotal_ptr + rows * (dtotal_stride * ALIGN) + columns, mask=own, other=0.0).to(FLOAT)
        tl.store(dx_ptr + rows * N + columns, dx.to(dx_ptr.dtype.element_ty), mask=own)  # write MN
    if DW or DB:
        sums_ptr += group.to(tl.int64) * N
    if DW:
        tl.store(sums_ptr + columns, tl.sum(dw, 0)[None, :], mask=mine)
        sums_ptr += (tl.zeros([], tl.int64) + GROUPS) * N
    if DB:
        tl.store(sums_ptr + columns, tl.sum(db, 0)[None, :], mask=mine)


@triton.jit
def _leave_all(at, total, squares, gs, products, CENTRED: tl.constexpr):
    """Leave the words of a part of one row."""
    if CENTRED:
        leave(at, word_of(tl.sum(total, 0)))
        leave(at + 2, word_of(tl.sum(gs, 0)))
    leave(at + (1 if CENTRED else 0), word_of(tl.sum(squares, 0)))
    leave(at + (3 if CENTRED else 1), word_of(tl.sum(products, 0)))


@triton.jit
def _column_sums(dw_ptr, db_ptr, sums_ptr, GROUPS, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of columns over all groups, ROWS of them at a time: of dweight, and behind it of dbias."""
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


def norm_backward_plan(
    rows: int, n: int, size: int, capability: tuple[int, int] | None, processors: int, words: int
) -> Plan:
    """Choose the constants, for `rows` rows of `n` numbers of `size` bytes, whose parts find `words` sums.

    The width decides how a row of dx is added up, the number of rows and of multiprocessors how dweight is.
    """
    block, warps, ahead, keep, stages, resident, registers, safe = TUNED or (16384 // size, 8, False, False, 2, 2, 128, True)
    most = 16384 if capability is None else block
    parts, span = parts_of(n, size, most)
    block = triton.next_power_of_2(span)
    together = 1
    if parts == 1:
        if not TUNED:
            warps = max(1, min(8, block * size // 2048))
            resident, registers = resident * 8 // warps, registers if warps == 8 else None
            together = max(1, min(2048 // size // block, 64))
        if capability is None:
            together = min(triton.next_power_of_2(rows), max(1, 2**15 // block))
    constants: dict[str, Any] = {
        "ALONE": parts == 1, "AHEAD": ahead, "KEEP": keep, "STAGES": stages, "ROWS": together, "BLOCK": block,
        "maxnreg": registers, "SAFE": safe,
    }  # fmt: skip
    if parts > 1:
        constants |= waiting(parts, words, warps, capability)
        if not safe:
            constants["TRIES"] = 2**30
    groups = max(1, min(triton.cdiv(rows, together), resident * processors // parts))
    return Plan(constants, groups, parts, span, warps)


TUNED: Any = None
_plan = functools.lru_cache(maxsize=4096)(norm_backward_plan)

# Launchers -----------------------------------------------------------------------------------------------------------


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
    x, dy = rows_in(x), rows_in(dy)
    dtotal = None if dtotal is None else rows_in(dtotal)
    weight = None if weight is None else contiguous(weight)
    words = 4 if centred else 2
    capability, processors = gpu(x.device)
    plan = _plan(len(x), n, x.element_size(), capability, processors, words)
    align = aligned(n, x, dy, dtotal)
    summed = [d for d in (dw, db) if d is not None]
    sums = empty((len(summed), plan.groups, n), kind, x.device) if summed else None
    late: dict[str, Any] = {}
    early: dict[str, bool] = {}
    board = None
    if plan.parts > 1:
        board, late, early = board_of(len(x) * plan.parts * words, x.dtype, x.device)
    strides = [0 if t is None else t.stride(0) // align for t in (x, dy, dtotal)]
    launch(
        _norm_backward, (plan.groups * plan.parts,), dx, sums, board, x, dy, dtotal, weight, len(x), n // align,
        *strides, plan.groups, plan.span, plan.parts, ALIGN=align, EPS=eps, CENTRED=centred, DW=dw is not None,
        DB=db is not None, num_warps=plan.warps, **plan.constants, **late, **early,
    )  # fmt: skip
    if sums is not None:
        block = 32 if n >= 32 else triton.next_power_of_2(n)
        grid = (triton.cdiv(n, block), len(summed))
        launch(_column_sums, grid, dw, db, sums, plan.groups, n, ROWS=32, BLOCK=block, num_warps=4)


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
