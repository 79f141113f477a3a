"""The gradient of softmax along one axis: of what softmax returned and of its gradient, both are read once.

For a row of N elements,

    dx[i] = y[i] * (dy[i] - sum_k y[k] dy[k])

A chain of separate operations reads 6MN + M elements and writes 3MN + M, for M rows; the fused kernel reads 2MN and
writes MN. Rows are found, cut and shared as those of softmax, see `_rows`.
"""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import Operator, accumulated, contiguous, shapes
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

__all__ = ["softmax_backward", "softmax_backward_eager"]

# The unfused chain ---------------------------------------------------------------------------------------------------


def softmax_backward_eager(y: Tensor, dy: Tensor) -> Tensor:
    """The gradient of softmax over the last axis, one operation after another: what fusing saves.

    Parameters
    ----------
    y, dy : torch.Tensor
        M rows of N elements.

    Returns
    -------
    torch.Tensor
        Of the shape and dtype of `y`.
    """
    product = y * dy  # read 2MN, write MN
    dot = product.sum(-1, keepdim=True)  # read MN, write M
    centred = dy - dot  # read MN + M, write MN
    return y * centred  # read 2MN, write MN: in all read 6MN + M, write 3MN + M


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _softmax_backward_rows(
    dx_ptr, y_ptr, dy_ptr, INNER, N, y_strides, dy_strides,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, FLAT: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """The gradient of ROWS rows; y and dy stay in registers as CHUNKS tiles. dx lies in memory as y does."""
    FLOAT: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N * ALIGN
    outer, rows = rows_of(tl.program_id(0), INNER, ROWS, FLAT)
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    dx_ptr += begin_of(outer, rows[:, None], OUTERS, y_strides) * ALIGN  # [ROWS, 1]
    y_ptr += begin_of(outer, rows[:, None], OUTERS, y_strides) * ALIGN  # [ROWS, 1]
    dy_ptr += begin_of(outer, rows[:, None], OUTERS, dy_strides) * ALIGN  # [ROWS, 1]

    ys = ()
    dys = ()
    dots = tl.zeros([ROWS, BLOCK], FLOAT)
    for i in tl.static_range(CHUNKS):
        inside = live if i < CHUNKS - 1 else live & (i * BLOCK + columns < N)
        at = (i * BLOCK + columns).to(tl.int64)
        y = tl.load(y_ptr + at * y_strides[2], mask=inside, other=0.0)  # [ROWS, BLOCK]; read MN
        dy = tl.load(dy_ptr + at * dy_strides[2], mask=inside, other=0.0)  # [ROWS, BLOCK]; read MN
        ys += (y,)
        dys += (dy,)
        dots += y.to(FLOAT) * dy.to(FLOAT)
    dot = tl.sum(dots, 1)[:, None]  # [ROWS, 1]
    for i in tl.static_range(CHUNKS):
        inside = live if i < CHUNKS - 1 else live & (i * BLOCK + columns < N)
        at = (i * BLOCK + columns).to(tl.int64)
        tl.store(dx_ptr + at * y_strides[2], ys[i].to(FLOAT) * (dys[i].to(FLOAT) - dot), mask=inside)  # write MN


@triton.jit
def _softmax_backward_narrow(
    dx_ptr, y_ptr, dy_ptr, M, INNER, N, y_strides, dy_strides,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """The gradient of ROWS of M narrow rows whose numbers lie apart, counted along INNER and on along OUTER."""
    FLOAT: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    outer, inner, live = narrow_rows_of(tl.program_id(0), M, INNER, ROWS, FLAT)  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = live & (columns < N)
    at = begin_of(outer, inner, OUTERS, y_strides) + columns.to(tl.int64) * y_strides[2]
    dy_at = begin_of(outer, inner, OUTERS, dy_strides) + columns.to(tl.int64) * dy_strides[2]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(FLOAT)  # [ROWS, BLOCK]; read MN
    dy = tl.load(dy_ptr + dy_at, mask=inside, other=0.0).to(FLOAT)  # [ROWS, BLOCK]; read MN
    tl.store(dx_ptr + at, y * (dy - tl.sum(y * dy, 1)[:, None]), mask=inside)  # write MN


@triton.jit
def _softmax_backward_twice(
    dx_ptr, y_ptr, dy_ptr, INNER, N, y_strides, dy_strides,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """The gradient of ROWS rows of any width; y and dy are read twice."""
    FLOAT: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N.to(tl.int64) * ALIGN
    outer, rows = rows_of(tl.program_id(0), INNER, ROWS)
    live = (rows < INNER)[:, None]  # [ROWS, 1]
    dx_ptr += begin_of(outer, rows[:, None], OUTERS, y_strides) * ALIGN  # [ROWS, 1]
    y_ptr += begin_of(outer, rows[:, None], OUTERS, y_strides) * ALIGN  # [ROWS, 1]
    dy_ptr += begin_of(outer, rows[:, None], OUTERS, dy_strides) * ALIGN  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :].to(tl.int64)  # [1, BLOCK]
    dots = tl.zeros([ROWS, BLOCK], FLOAT)
    for start in range(0, N, BLOCK):
        at = start + columns
        inside = live & (at < N)
        y = tl.load(y_ptr + at * y_strides[2], mask=inside, other=0.0)  # [ROWS, BLOCK]; read MN
        dy = tl.load(dy_ptr + at * dy_strides[2], mask=inside, other=0.0)  # [ROWS, BLOCK]; read MN
        dots += y.to(FLOAT) * dy.to(FLOAT)
    dot = tl.sum(dots, 1)[:, None]  # [ROWS, 1]
    # From the end back: what was read last is likeliest to be in a cache still.
    last = (tl.cdiv(N, BLOCK) - 1) * BLOCK
    for start in range(0, N, BLOCK):
        at = last - start + columns
        inside = live & (at < N)
        y = tl.load(y_ptr + at * y_strides[2], mask=inside, other=0.0, eviction_policy="evict_first")  # read MN again
        dy = tl.load(dy_ptr + at * dy_strides[2], mask=inside, other=0.0, eviction_policy="evict_first")  # and again
        tl.store(dx_ptr + at * y_strides[2], y.to(FLOAT) * (dy.to(FLOAT) - dot), mask=inside)  # write MN


@triton.jit
def _softmax_backward_whole(
    dx_ptr, y_ptr, dy_ptr, INNER, N, y_strides, dy_strides,
    VEC: tl.constexpr, CTAS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """The gradient of one row by one program, or by CTAS of a cluster; y and dy are held as CHUNKS tiles of vectors.

    dx lies as y does.
    """
    begun(CTAS)
    outer, inner = place_of(tl.program_id(0), INNER)
    at, low, high = window(begin_of(outer, inner, OUTERS, y_strides), N, 0, CHUNKS * CTAS * BLOCK, VEC)
    y_ptr += at
    dx_ptr += at
    dy_ptr += window(begin_of(outer, inner, OUTERS, dy_strides), N, 0, CHUNKS * CTAS * BLOCK, VEC)[0]
    columns = tl.arange(0, CTAS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [CTAS, BLOCK]
    ys = ()
    dys = ()
    dots = tl.zeros([CTAS, BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        here = i * CTAS * BLOCK + columns
        mask = None if i < CHUNKS - 2 else here < (high + VEC - 1) // VEC * VEC
        y = tl.load(y_ptr + here, mask=mask)  # [CTAS, BLOCK]; read MN
        dy = tl.load(dy_ptr + here, mask=mask)  # [CTAS, BLOCK]; read MN
        product = y.to(tl.float32) * dy.to(tl.float32)
        if i == 0 or i >= CHUNKS - 2:
            product = tl.where((here >= low) & (here < high), product, 0.0)
        ys += (y,)
        dys += (dy,)
        dots += product
    words = told(tl.sum(dots, 1).to(tl.int32, bitcast=True).to(tl.int64), CTAS)
    dot = tl.zeros([CTAS], tl.float32)
    for k in tl.static_range(CTAS):
        dot += words[k].to(tl.int32).to(tl.float32, bitcast=True)
    ANEW: tl.constexpr = (CTAS > 1) & (y_ptr.dtype.element_ty.primitive_bitwidth == 16)
    zero = zero_of(N, dot)[:, None]
    dot = dot[:, None]
    for i in tl.static_range(CHUNKS):
        dx = again(ys[i], zero, ANEW) * (again(dys[i], zero, ANEW) - dot)
        if i == 0 or i >= CHUNKS - 2:
            first = i * CTAS * BLOCK
            put(dx_ptr + first, dx, columns, low - first, tl.minimum(high - first, CTAS * BLOCK), VEC)  # write MN
        else:
            tl.store(dx_ptr + i * CTAS * BLOCK + columns, dx.to(dx_ptr.dtype.element_ty))


@triton.jit
def _part(y_ptr, dy_ptr, y_begin, dy_begin, N, part, SPAN, there, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """y and dy [BLOCK] of a part of a row, with neighbours' numbers at its ends; the sum of products, as a word."""
    FLOAT: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    inner = tl.arange(0, BLOCK)
    at, low, high = window(y_begin, N, part * SPAN, SPAN, VEC)
    inside = inner < tl.where(there, (high + VEC - 1) // VEC * VEC, 0)
    y = tl.load(y_ptr + at + inner, mask=inside, other=0.0)  # [BLOCK]; read MN
    at = window(dy_begin, N, part * SPAN, SPAN, VEC)[0]
    dy = tl.load(dy_ptr + at + inner, mask=inside, other=0.0)  # [BLOCK]; read MN
    products = y.to(FLOAT) * dy.to(FLOAT)
    if VEC > 1:
        if (low > 0) | (high % VEC != 0):
            products = tl.where((inner >= low) & (inner < high), products, 0.0)
    return y, dy, word_of(tl.sum(products, 0))


@triton.jit
def _others(
    y_ptr, dy_ptr, board, y_begin, dy_begin, N, part, lanes, SPAN, PARTS, NOTHING: tl.constexpr,
    VEC: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr,
):  # fmt: skip
    """The words of all parts of a row: found on the board, or here where they do not come."""
    words, missing = words_of(board, lanes, PARTS, NOTHING, TRIES)
    while missing < LANES:
        _y, _dy, found = _part(y_ptr, dy_ptr, y_begin, dy_begin, N, missing, SPAN, part >= 0, VEC, BLOCK)
        leave(board + missing, found)  # so that others find it
        words = tl.where(lanes == missing, found, words)
        missing = missing_of(words, lanes)
    return words


@triton.jit
def _finished(dx_ptr, y, dy, words, y_begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Store the gradient of a part of a row, by the words of all parts."""
    FLOAT: tl.constexpr = tl.float64 if y.dtype == tl.float64 else tl.float32
    HALF: tl.constexpr = y.dtype.primitive_bitwidth == 16
    dot = tl.sum(words.to(FLOAT, bitcast=True), 0)
    zero = zero_of(N, dot) if HALF else 0
    dx = again(y, zero, HALF) * (again(dy, zero, HALF) - dot)
    at, low, high = window(y_begin, N, part * SPAN, SPAN, VEC)
    put(dx_ptr + at, dx, tl.arange(0, BLOCK), low, high, VEC)  # write MN


@triton.jit(do_not_specialize=["ROWS", "INNER", "SPAN", "PARTS"])
def _softmax_backward_shared(
    dx_ptr, y_ptr, dy_ptr, board_ptr, ROWS, INNER, N, y_strides, dy_strides, SPAN, PARTS, ONCE: tl.constexpr,
    VEC: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr, LATE: tl.constexpr, OUTERS=None,
):  # fmt: skip
    """The gradients of rows of any width, each by PARTS programs, which go from row to row; a word is a sum of y dy.

    While a part of one row is finished, the next one has been read and its word left, and the one behind it is on its
    way into shared memory: nobody waits for words of others, nor for memory, unless it is the memory's own pace. ONCE,
    where there are programs for all rows: there is no next one.
    """
    NOTHING: tl.constexpr = -9223372036854775808 if y_ptr.dtype.element_ty == tl.float64 else -2147483648  # -0.0
    group = tl.program_id(0) // PARTS
    groups = tl.num_programs(0) // PARTS
    part = tl.program_id(0) % PARTS
    SPAN = SPAN * VEC
    lanes = tl.arange(0, LANES)  # [LANES]
    outer, inner = place_of(group, INNER)
    y_begin = begin_of(outer, inner, OUTERS, y_strides)
    dy_begin = begin_of(outer, inner, OUTERS, dy_strides)
    y, dy, word = _part(y_ptr, dy_ptr, y_begin, dy_begin, N, part, SPAN, part >= 0, VEC, BLOCK)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros on the board; the first row is here already
    leave(board_ptr + group.to(tl.int64) * PARTS + part, word)
    if ONCE:
        board = board_ptr + group.to(tl.int64) * PARTS
        words = _others(
            y_ptr, dy_ptr, board, y_begin, dy_begin, N, part, lanes, SPAN, PARTS, NOTHING, VEC, BLOCK, LANES, TRIES
        )
        _finished(dx_ptr, y, dy, words, y_begin, N, part, SPAN, VEC, BLOCK)
    else:
        for turn in tl.range(0, tl.cdiv(ROWS - group, groups), num_stages=3):
            row = group + turn * groups
            there = row + groups < ROWS
            outer, inner = place_of(row + groups, INNER)
            next_y_begin = begin_of(outer, inner, OUTERS, y_strides)
            next_dy_begin = begin_of(outer, inner, OUTERS, dy_strides)
            next_y, next_dy, next_word = _part(
                y_ptr, dy_ptr, next_y_begin, next_dy_begin, N, part, SPAN, there, VEC, BLOCK
            )
            words = tl.where(lanes == part, word, NOTHING)
            # Always so. What stands in a branch stays in its order where the compiler fetches for later rows.
            if PARTS > 1:
                board = board_ptr + row.to(tl.int64) * PARTS
                if there:
                    leave(board + groups * PARTS + part, next_word)
                words = _others(
                    y_ptr,
                    dy_ptr,
                    board,
                    y_begin,
                    dy_begin,
                    N,
                    part,
                    lanes,
                    SPAN,
                    PARTS,
                    NOTHING,
                    VEC,
                    BLOCK,
                    LANES,
                    TRIES,
                )
            _finished(dx_ptr, y, dy, words, y_begin, N, part, SPAN, VEC, BLOCK)
            y, dy, word = next_y, next_dy, next_word
            y_begin, dy_begin = next_y_begin, next_dy_begin


_KERNELS = {
    "rows": _softmax_backward_rows,
    "narrow": _softmax_backward_narrow,
    "whole": _softmax_backward_whole,
    "shared": _softmax_backward_shared,
    "twice": _softmax_backward_twice,
}

# Launchers -----------------------------------------------------------------------------------------------------------


def _into(dx: Tensor, y: Tensor, dy: Tensor, dim: int) -> None:
    word = torch.int64 if y.dtype == torch.float64 else torch.int32
    launch_rows(_KERNELS, dx, (contiguous(y), dy), dim, word)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, dy, dim = inputs
    ctx.save_for_backward(y, dy)
    ctx.dim = dim


def _gradient(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
    """Of dx = y (dy - sum(y dy)), with respect to y in separate operations and with respect to dy fused."""
    y, dy = ctx.saved_tensors
    if y.dim() == 0:
        return torch.zeros_like(y), torch.zeros_like(dy), None
    # float32 for half types, as in the kernels: both sums cancel.
    wide = accumulated(y.dtype)
    wide_y, wide_dy, wide_g = y.to(wide), dy.to(wide), g.to(wide)
    dot = (wide_y * wide_dy).sum(ctx.dim, keepdim=True)
    for_y = wide_g * (wide_dy - dot) - wide_dy * (wide_y * wide_g).sum(ctx.dim, keepdim=True)
    return for_y.to(y.dtype), softmax_backward(y, g, ctx.dim), None


def _check(y: Any, dy: Any, dim: Any) -> tuple[Tensor, Tensor, int]:
    name = "softmax_backward"
    y, dim = checked_axis(name, "y", y, dim)
    shapes(name, y=(y, "[...]"), dy=(dy, "[...]"))
    return y, dy, dim


_softmax_backward: Operator = Operator(
    "softmax_backward",
    "(Tensor y, Tensor dy, SymInt dim) -> Tensor",
    check=_check,
    outputs=alike,
    into=_into,
    gradient=(_gradient, _keep),
    batched=lambda *batch: batched(_softmax_backward, *batch),
)


def softmax_backward(y: Tensor, dy: Tensor, dim: int = -1) -> Tensor:
    """Gradient of softmax along one axis, in two reads and one write.

    Parameters
    ----------
    y : torch.Tensor
        What `softmax` returned.
    dy : torch.Tensor
        The gradient with respect to `y`, of its shape and dtype.
    dim : int, default -1
        The axis that was normalised.

    Returns
    -------
    torch.Tensor
        The gradient with respect to the input of softmax; contiguous, of the shape and dtype of `y`.

    Raises
    ------
    TypeError
        If `y` or `dy` is no dense floating-point tensor, their dtypes differ, or `dim` is no integer.
    IndexError
        If `y` has no axis `dim`.
    ValueError
        If shapes or devices differ, or the tensors are on the CPU and Triton compiles, or views that negate.
    """
    return _softmax_backward(y, dy, dim)
