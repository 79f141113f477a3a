"""Gradients of RMSNorm and LayerNorm: the input and the gradient are read once, the result is written once.

For a row x of N elements, its normalised numbers n[i] = (x[i] - mean) * factor, and g[i] = dy[i] * weight[i],

    dx[i] = factor * (g[i] - mean_j g[j] - n[i] * mean_j g[j] n[j])  (+ dtotal[i])
    dweight[i] = sum of dy[i] n[i] over all rows,  dbias[i] = sum of dy[i] over all rows

where RMSNorm leaves out both means but the last. `dtotal` is the gradient of the sum with the residual: what is
normalised is that sum, which takes both gradients.

Nothing is kept from the forward pass but its input: the statistics of a row are found anew while it is in registers.
A program takes many rows and the same columns of each, and adds up its part of dweight and dbias in registers. So
there is one partial row for each group of programs, and a second kernel adds these up in a fixed order: the same bits
each time, without atomics.

Limits: a row of more than 16 KiB is shared by several programs, and a launch before finds the sums of its parts: so it
is read twice. It has no gradient of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ._norms import aligned, check_norm, loaded, parts_of, rows_in
from ._operator import Operator, accumulated, contiguous, empty, gpu, launch

__all__ = ["layer_norm_backward", "rms_norm_backward"]

# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _sums(x, g, own, count, CENTRED: tl.constexpr):
    """Of each row: the sum of x, that of its squares, of g and of g x; centred, the latter around x's mean. [ROWS]"""
    total = tl.sum(x, 1) if CENTRED else tl.zeros([x.shape[0]], x.dtype)
    if CENTRED:
        x = tl.where(own, x - (total / count)[:, None], 0.0)
    gs = tl.sum(g, 1) if CENTRED else total
    return total, tl.sum(x * x, 1), gs, tl.sum(g * x, 1)


@triton.jit
def _part_sums(
    found_ptr, x_ptr, dy_ptr, w_ptr, N, x_stride, dy_stride, SPAN, PARTS,
    ALIGN: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of a part of a row, of SPAN columns."""
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    WORDS: tl.constexpr = 4 if CENTRED else 2
    N = N * ALIGN
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    inner = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    columns = part * SPAN + inner
    own = (inner < SPAN) & (columns < N)
    x = tl.load(x_ptr + row * (x_stride * ALIGN) + columns, mask=own, other=0.0).to(FLOAT)  # read MN
    dy = tl.load(dy_ptr + row * (dy_stride * ALIGN) + columns, mask=own, other=0.0).to(FLOAT)  # read MN
    g = dy * loaded(w_ptr, columns, own, 1.0).to(FLOAT)
    total, squares, gs, products = _sums(x, g, own, tl.minimum(N - part * SPAN, SPAN), CENTRED)
    at = found_ptr + (row * PARTS + part) * WORDS + tl.arange(0, 1)
    tl.store(at, squares)
    tl.store(at + 1, products)
    if CENTRED:
        tl.store(at + 2, total)
        tl.store(at + 3, gs)


@triton.jit
def _norm_backward(
    dx_ptr, sums_ptr, found_ptr, x_ptr, dy_ptr, dtotal_ptr, w_ptr, M, N, x_stride, dy_stride, dtotal_stride,
    GROUPS, SPAN, PARTS,
    ALIGN: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    ALONE: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """ROWS rows at a time, up to SPAN columns of them, by PARTS programs; GROUPS such groups take all rows.

    ALONE: PARTS is 1. Otherwise the sums of all parts were found before. Rows are loaded ahead, into shared memory, so
    that those of STAGES loops are under way.
    """
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    WORDS: tl.constexpr = 4 if CENTRED else 2
    N = N * ALIGN
    group = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    inner = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    columns = inner if ALONE else part * SPAN + inner
    mine = columns < N if ALONE else (inner < SPAN) & (columns < N)
    count = N if ALONE else tl.minimum(N - part * SPAN, SPAN)
    w = loaded(w_ptr, columns, mine, 1.0)  # [1, BLOCK]
    dw = tl.zeros([ROWS, BLOCK], FLOAT)
    db = tl.zeros([ROWS, BLOCK], FLOAT)
    for start in tl.range(group * ROWS, M, GROUPS * ROWS, num_stages=STAGES):
        row = tl.zeros([], tl.int64) + start
        rows = (row + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
        own = mine & (rows < M)
        x = tl.load(x_ptr + rows * (x_stride * ALIGN) + columns, mask=own, other=0.0).to(FLOAT)  # read MN
        dy = tl.load(dy_ptr + rows * (dy_stride * ALIGN) + columns, mask=own, other=0.0).to(FLOAT)  # read MN
        total, squares, gs, products = _sums(x, dy * w.to(FLOAT), own, count, CENTRED)
        mean = total / N
        if not ALONE:
            lanes = tl.arange(0, LANES)  # [LANES]
            at = found_ptr + row * (PARTS * WORDS) + lanes
            found = tl.load(at, mask=lanes < PARTS * WORDS, other=0.0)  # [LANES]
            if CENTRED:
                counts = tl.maximum(tl.minimum(N - tl.arange(0, LANES // 4) * SPAN, SPAN), 0).to(FLOAT)  # [LANES / 4]
                left, right = tl.split(tl.reshape(found, [LANES // 4, 2, 2]))
                all_squares, totals = tl.split(left)
                all_products, all_gs = tl.split(right)
                mean = tl.zeros([ROWS], FLOAT) + tl.sum(totals, 0) / N
                away = totals / tl.maximum(counts, 1.0) - tl.sum(totals, 0) / N
                squares = tl.zeros([ROWS], FLOAT) + tl.sum(all_squares + counts * away * away, 0)
                gs = tl.zeros([ROWS], FLOAT) + tl.sum(all_gs, 0)
                products = tl.zeros([ROWS], FLOAT) + tl.sum(all_products + all_gs * away, 0)
            else:
                all_squares, all_products = tl.split(tl.reshape(found, [LANES // 2, 2]))
                squares = tl.zeros([ROWS], FLOAT) + tl.sum(all_squares, 0)
                products = tl.zeros([ROWS], FLOAT) + tl.sum(all_products, 0)
        factor = 1 / tl.sqrt(squares / N + EPS)  # [ROWS]
        n = (x - mean[:, None]) * factor[:, None] if CENTRED else x * factor[:, None]  # [ROWS, BLOCK]
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
    if sums_ptr is not None:
        sums_ptr += group.to(tl.int64) * N
    if DW:
        tl.store(sums_ptr + columns, tl.sum(dw, 0)[None, :], mask=mine)
    if DB:
        sums_ptr += (tl.zeros([], tl.int64) + GROUPS) * N if DW else 0
        tl.store(sums_ptr + columns, tl.sum(db, 0)[None, :], mask=mine)


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
    registers: int  # the most that a thread takes


def norm_backward_plan(
    rows: int, n: int, size: int, capability: tuple[int, int] | None, processors: int, centred: bool, added: bool
) -> Plan:
    """Choose the constants, for `rows` rows of `n` numbers of `size` bytes; `added`: a gradient is added to dx.

    The width decides how a row of dx is added up, the number of rows and of multiprocessors how dweight is.
    """
    hopper = capability is not None and capability >= (9, 0)
    stages = (4 if hopper else 3) - added  # what the loop loads ahead shall fit into 96 KiB where there is no more
    if n <= 16384 // size:
        # 32 bytes of a row a thread, so that x, dy, weight and dweight fit into 128 registers; 16 warps in all.
        parts, span, block = 1, n, triton.next_power_of_2(n)
        warps = max(1, min(16, block * size // 1024))
        together = max(1, min(2048 // size // block, 64))
        if capability is None:  # the interpreter's cost is programs times operations, whatever their size
            together = min(max(1, triton.next_power_of_2(rows)), max(1, 2**15 // block))
        resident, registers = 16 // warps, 128
    else:
        parts, span = parts_of(n, size, 8192 // size)
        together, block, warps = 1, triton.next_power_of_2(span), 8
        resident, registers = (3, 80) if hopper and not centred else (2, 128)
    groups = max(1, min(triton.cdiv(rows, together), resident * processors // parts))
    lanes = max(32 * warps, triton.next_power_of_2(parts * (4 if centred else 2)))
    constants = {"STAGES": stages, "ROWS": together, "BLOCK": block, "LANES": lanes}
    return Plan(constants, groups, parts, span, warps, registers)


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
    plan = _plan(len(x), n, x.element_size(), capability, processors, centred, dtotal is not None)
    alone = plan.parts == 1
    align = aligned(n, x, dy, dtotal)
    summed = [d for d in (dw, db) if d is not None]
    sums = empty((len(summed), plan.groups, n), kind, x.device) if summed else None
    strides = [0 if t is None else t.stride(0) // align for t in (x, dy, dtotal)]
    found_sums = None
    if not alone:
        found_sums = empty((len(x), plan.parts, words), kind, x.device)
        launch(
            _part_sums, (len(x) * plan.parts,), found_sums, x, dy, weight, n // align, strides[0], strides[1],
            plan.span, plan.parts, ALIGN=align, CENTRED=centred, BLOCK=plan.constants["BLOCK"], num_warps=plan.warps,
        )  # fmt: skip
    launch(
        _norm_backward, (plan.groups * plan.parts,), dx, sums, found_sums, x, dy, dtotal, weight, len(x), n // align,
        *strides, plan.groups, plan.span, plan.parts, ALIGN=align, EPS=eps, CENTRED=centred, DW=dw is not None,
        DB=db is not None, ALONE=alone, num_warps=plan.warps, maxnreg=plan.registers, **plan.constants,
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
