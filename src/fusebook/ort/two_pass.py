"""Softmax in two passes, for rows of any width and any layout: compiled ahead of time, where no row can be shared.

Programs that share a row must run at the same time, or recompute what is missing; a loop needs neither.
"""

# Device code has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from fusebook.kernels._rows import accumulated, fast_exp, finite_or_zero, row_offset, rows_of_program


@triton.jit
def softmax_two_pass(
    y_ptr, x_ptr, INNER, N, y_strides, x_strides,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """ROWS rows of any width, read twice: once for the maximum and the sum of exponentials, once to divide.

    GROUP neighbours, which one thread holds, share a running maximum. A sum is rescaled once for each group, not once
    for each element, which would double the exponentials.
    """
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N.to(tl.int64) * ALIGN
    outer, inner, live = rows_of_program(INNER, ROWS, False)
    x_ptr += row_offset(outer, inner, x_strides, ALIGN)  # [ROWS, 1]
    y_ptr += row_offset(outer, inner, y_strides, ALIGN)
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)  # [1, BLOCK]
    tops = tl.full([ROWS, BLOCK // GROUP], float("-inf"), FLOAT)
    totals = tl.zeros([ROWS, BLOCK // GROUP], FLOAT)
    for start in range(0, N, BLOCK):
        at = start + columns
        x = tl.load(x_ptr + at * x_strides[2], mask=live & (at < N), other=float("-inf"))  # [ROWS, BLOCK]; read MN
        x = tl.reshape(accumulated(x), [ROWS, BLOCK // GROUP, GROUP])
        new = tl.maximum(tops, tl.max(x, 2))  # [ROWS, BLOCK / GROUP]
        shift = finite_or_zero(new)
        totals = totals * fast_exp(tops - shift) + tl.sum(fast_exp(x - shift[:, :, None]), 2)
        tops = new
    top = tl.max(tops, 1)[:, None]  # [ROWS, 1]
    scale = 1 / tl.sum(totals * fast_exp(tops - top), 1)[:, None]  # [ROWS, 1]
    # From the end to the beginning: L2 most likely still has what was read last.
    last = (tl.cdiv(N, BLOCK) - 1) * BLOCK
    for start in range(0, N, BLOCK):
        at = last - start + columns
        inside = live & (at < N)
        x = tl.load(x_ptr + at * x_strides[2], mask=inside, other=0.0, eviction_policy="evict_first")  # read MN again
        tl.store(y_ptr + at * y_strides[2], fast_exp(accumulated(x) - top) * scale, mask=inside)  # write MN
