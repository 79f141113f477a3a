"""Products of hidden states with few classes in half types, for logits and for the gradients of both.

A library's products are made for wide matrices: of few classes they take several times the time of their memory. Here
one kernel reads the hidden states for the logits; another reads them for the gradient of the head, and writes their own
gradient beside that. What is missing to as many classes as tensor cores multiply is zero, in registers.

The head's gradient is a sum over rows, which programs share: each leaves what it has added up in float32, and a third
kernel adds that up, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import INTERPRETED, empty, launch
from ._rows import aligned

# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _few_logits(
    x_ptr, h_ptr, head_ptr, bias_ptr, M, N, K, x_stride, h_stride, head_stride,
    ALIGN: tl.constexpr, CLASSES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Logits of ROWS hidden states, BLOCK numbers of each at a time."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    classes = tl.arange(0, CLASSES)[None, :]  # [1, CLASSES]
    h_ptr += rows * (h_stride * ALIGN)
    head_ptr += classes.to(tl.int64) * (head_stride * ALIGN)
    K = K * ALIGN
    x = tl.zeros([ROWS, CLASSES], tl.float32)
    for start in tl.range(0, K, BLOCK, num_stages=STAGES):
        inner = start + tl.arange(0, BLOCK)  # [BLOCK]
        h = tl.load(h_ptr + inner[None, :], mask=(rows < M) & (inner[None, :] < K), other=0.0)  # read MK
        head = tl.load(head_ptr + inner[:, None], mask=(classes < N) & (inner[:, None] < K), other=0.0)
        if WIDE:  # the interpreter multiplies no bfloat16
            h, head = h.to(tl.float32), head.to(tl.float32)
        x = tl.dot(h, head, x)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + classes, mask=classes < N, other=0.0).to(tl.float32)
    tl.store(x_ptr + rows * x_stride + classes, x.to(x_ptr.dtype.element_ty), mask=(rows < M) & (classes < N))


@triton.jit
def _few_gradients(
    dh_ptr, left_ptr, dx_ptr, h_ptr, head_ptr, target_ptr, M, N, K, dh_stride, dx_stride, h_stride, head_stride, SPAN,
    IGNORE,
    ALIGN: tl.constexpr, CLASSES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the gradients of SPAN hidden states, and what these add to the gradient of the head.

    Rows that are ignored take no part: a NaN of theirs times a gradient of zero would be NaN.
    """
    K = K * ALIGN
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    classes = tl.arange(0, CLASSES)  # [CLASSES]
    own = (classes[:, None] < N) & (columns < K)  # [CLASSES, BLOCK]
    at = classes[:, None].to(tl.int64) * (head_stride * ALIGN) + columns
    head = tl.load(head_ptr + at, mask=own, other=0.0)
    if WIDE:
        head = head.to(tl.float32)
    first = tl.program_id(1).to(tl.int64) * SPAN
    dhead = tl.zeros([CLASSES, BLOCK], tl.float32)
    for start in tl.range(0, tl.minimum(SPAN, M - first), ROWS, num_stages=STAGES):
        rows = first + start + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
        inside = (rows < M) & (columns < K)  # [ROWS, BLOCK]
        dx = tl.load(dx_ptr + rows * dx_stride + classes[None, :], mask=(rows < M) & (classes[None, :] < N), other=0.0)
        counts = tl.load(target_ptr + rows, mask=rows < M, other=IGNORE) != IGNORE  # [ROWS, 1]
        h = tl.load(h_ptr + rows * (h_stride * ALIGN) + columns, mask=inside & counts, other=0.0)  # read MK
        if WIDE:
            dx, h = dx.to(tl.float32), h.to(tl.float32)
        dh = tl.where(counts, tl.dot(dx, head), 0.0)
        tl.store(dh_ptr + rows * (dh_stride * ALIGN) + columns, dh.to(dh_ptr.dtype.element_ty), mask=inside)  # write MK
        dhead = tl.dot(tl.trans(dx), h, dhead)
    to = left_ptr + (tl.program_id(1).to(tl.int64) * N + classes[:, None]) * K + columns
    tl.store(to, dhead.to(left_ptr.dtype.element_ty), mask=own)


@triton.jit
def _few_sums(out_ptr, left_ptr, COUNT, PARTS, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of PARTS times COUNT numbers."""
    parts = tl.arange(0, LANES)[:, None]  # [LANES, 1]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    left = tl.load(left_ptr + parts * COUNT + at[None, :], mask=(parts < PARTS) & (at[None, :] < COUNT), other=0.0)
    tl.store(out_ptr + at, tl.sum(left, 0).to(out_ptr.dtype.element_ty), mask=at < COUNT)


# Plan ----------------------------------------------------------------------------------------------------------------

#: Classes at most: as many as tensor cores multiply at once. Of twice as many, a library's products took no longer; nor
#: of eight or sixteen whose rows are whole vectors, which is what these are made for.
MOST = 16
#: Numbers of a hidden state at most, whose logits one program adds up. Longer ones were not tried.
LONGEST = 8192


class Few(NamedTuple):
    """Rows, columns, warps and stages of a tile, for logits and for gradients; and how many parts rows are cut into."""

    logits: tuple[int, int, int, int]
    gradients: tuple[int, int, int, int]
    parts: int


def few_plan(m: int, k: int, n: int, dtype: torch.dtype, processors: int, *, whole: bool) -> Few | None:
    """How `m` hidden states of `k` numbers are multiplied with `n` classes; None where a library does it.

    `whole`: rows are whole vectors of 16 bytes. Others go through registers to where tensor cores read them.
    """
    if dtype.itemsize != 2 or n > MOST or k > LONGEST or (whole and n % 8 == 0):
        return None
    if whole:
        logits = (64, 128, 4, 3) if m >= 32 * processors else (16, 256, 4, 3)
        gradients = 32, 128, 8, 3
    else:
        logits, gradients = (32, 64, 8, 2), (32, 128, 8, 2)
    rows, block, *_ = gradients
    parts = min(64, triton.cdiv(m, 2 * rows), triton.cdiv(6 * processors, triton.cdiv(k, block)))
    return Few(logits, gradients, parts)


# Launching -----------------------------------------------------------------------------------------------------------


def _tile(tile: tuple[int, int, int, int], align: int, dtype: torch.dtype) -> dict[str, int]:
    """The constants of a kernel of products."""
    rows, block, warps, stages = tile
    wide = INTERPRETED and dtype == torch.bfloat16
    return {
        "ALIGN": align, "CLASSES": MOST, "WIDE": wide, "ROWS": rows, "BLOCK": block, "STAGES": stages,
        "num_warps": warps,
    }  # fmt: skip


def logits_into(x: Tensor, h: Tensor, head: Tensor, bias: Tensor | None, plan: Few) -> None:
    """``x[:] = h @ head.T + bias``; the bias is contiguous."""
    (m, k), n, align = h.shape, len(head), aligned(h.shape[1], h, head)
    launch(
        _few_logits, (triton.cdiv(m, plan.logits[0]),), x, h, head, bias, m, n, k // align, x.stride(0),
        h.stride(0) // align, head.stride(0) // align, **_tile(plan.logits, align, h.dtype),
    )  # fmt: skip


def gradients_into(
    dh: Tensor, dhead: Tensor, dx: Tensor, h: Tensor, head: Tensor, target: Tensor, ignored: int, plan: Few
) -> None:
    """``dh[:] = dx @ head`` and ``dhead[:] = dx.T @ h``, which is contiguous, without rows whose target is ignored."""
    (m, k), n, align = h.shape, len(head), aligned(h.shape[1], h, head, dh)
    rows, block, *_ = plan.gradients
    span = triton.cdiv(triton.cdiv(m, plan.parts), rows) * rows
    parts = triton.cdiv(m, span)
    left = dhead if parts == 1 else empty((parts, n, k), torch.float32, h.device)
    launch(
        _few_gradients, (triton.cdiv(k, block), parts), dh, left, dx, h, head, target, m, n, k // align,
        dh.stride(0) // align, dx.stride(0), h.stride(0) // align, head.stride(0) // align, span, ignored,
        **_tile(plan.gradients, align, h.dtype),
    )  # fmt: skip
    if parts > 1:
        lanes = triton.next_power_of_2(parts)
        block = 4096 // lanes
        launch(
            _few_sums, (triton.cdiv(n * k, block),), dhead, left, n * k, parts, LANES=lanes, BLOCK=block, num_warps=4
        )  # fmt: skip
