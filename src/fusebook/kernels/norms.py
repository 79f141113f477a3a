# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/norms.py. It needs torch, Triton, NumPy, _call.py and _rows.py.
"""RMSNorm and LayerNorm of rows and their gradients, with a residual added before and a result in eight bits.

For a row of N elements x, to which a residual may have been added,

    rms_norm:    y[i] = x[i] / sqrt(mean_j x[j]**2 + eps) * weight[i] + bias[i]
    layer_norm:  y[i] = (x[i] - mean_j x[j]) / sqrt(mean_j (x[j] - mean)**2 + eps) * weight[i] + bias[i]

Fused: the sum with the residual, the statistics of the row, the division, weight and bias. For a result in eight bits,
the row's largest magnitude and the rounding are fused too. A row is read once and written once. The sum with the
residual is written too, since the next layer needs it.

For the gradients, n[i] = (x[i] - mean) * factor is what weight and bias are applied to, and g[i] = dy[i] * weight[i]:

    dx[i] = factor * (g[i] - mean_j g[j] - n[i] * mean_j g[j] n[j])  (+ dtotal[i])
    dweight[i] = sum of dy[i] n[i] over all rows,  dbias[i] = sum of dy[i] over all rows

RMSNorm has no mean_j g[j]. `dtotal` is the gradient of the sum with the residual. Only the input of the forward pass is
kept: the statistics of a row are computed again while it is in registers.

A row of up to 32768 elements, in the gradient of up to 16 KiB, is held in the registers of one program. A wider row is
shared by several programs, see `_rows`; in eight bits, up to 65536 are held. Limits: float64 rows wider than that, rows
of more than 2**20 elements, and wider ones in eight bits are computed by torch. A tensor of an unusual layout is copied
first. There is no gradient of the gradient.
"""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment,var-annotated"

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import FLOATING, INTERPRETED, Operator, apply, contiguous, gpu, launch, number, overlapping, shapes, wide
from ._call import accumulated as accumulated_in
from ._rows import (
    INTERPRETER,
    NEUTRAL_SUM,
    WIDEST,
    Config,
    Layout,
    Parts,
    accumulated,
    across_constants,
    alignment,
    first_missing,
    first_that_fits,
    layout_of,
    load_chunk,
    load_row_part,
    opaque_zero,
    pack,
    publish,
    reconvert,
    row_constants,
    row_offset,
    row_vectors,
    rows_of_program,
    rows_of_tile,
    shared,
    store_chunk,
    store_row_part,
    unpack,
    vector_width,
    wait_for,
    wait_for_both,
    with_adjacent_elements,
    workspace,
)

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_eager",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_eager",
]

# The unfused chains --------------------------------------------------------------------------------------------------


def rms_norm_eager(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last axis, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        M rows of N elements.
    weight : torch.Tensor
        N elements.
    eps : float

    Returns
    -------
    torch.Tensor
        Of the shape of `x`.
    """
    wide = x.to(accumulated_in(x.dtype))  # half types: read MN, write 2MN, and all below counts twice
    squares = wide * wide  # read MN, write MN
    mean = squares.mean(-1, keepdim=True)  # read MN, write M
    normed = wide * torch.rsqrt(mean + eps)  # read MN + M, write MN
    return normed.to(x.dtype) * weight  # read MN + N, write MN


def layer_norm_eager(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last axis, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        M rows of N elements.
    weight, bias : torch.Tensor
        N elements.
    eps : float

    Returns
    -------
    torch.Tensor
        Of the shape of `x`.
    """
    wide = x.to(accumulated_in(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return (centred * torch.rsqrt(variance + eps)).to(x.dtype) * weight + bias


# Device functions ----------------------------------------------------------------------------------------------------

# Loads and weights ask L2 to keep their lines (evict_last), although a row does not come again. Lines that are written
# then seem to leave L2 sooner, while more is read. Of three hints it was the fastest at every width tried.


@triton.jit
def _load_vector(ptr, columns, inside, OTHER: tl.constexpr):
    """Elements of a weight or a bias; OTHER everywhere if there is none. `inside` is None where all columns exist."""
    if ptr is None:
        return tl.full(columns.shape, OTHER, tl.float32)
    elif inside is None:
        return tl.load(ptr + columns, eviction_policy="evict_last")
    else:
        return tl.load(ptr + columns, mask=inside, other=0.0, eviction_policy="evict_last")


@triton.jit
def _load_vectors(w_ptr, b_ptr, i, N, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Chunk `i` of weight and bias [1, BLOCK]."""
    columns = i * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < N if i == CHUNKS - 1 else None
    return _load_vector(w_ptr, columns, inside, 1.0), _load_vector(b_ptr, columns, inside, 0.0)


@triton.jit
def _rounded_sum(x, r):
    """x + r as it is stored for the next layer: the norm is that of the rounded sum."""
    return (accumulated(x) + accumulated(r)).to(x.dtype)


@triton.jit
def _load_element(x_ptr, r_ptr, x_at, r_at, live):
    x = tl.load(x_ptr + x_at, mask=live, other=0.0)
    if r_ptr is not None:
        x = _rounded_sum(x, tl.load(r_ptr + r_at, mask=live, other=0.0))
    return x


# FAR: float32 and float64 rows that are centred. They may be so far from zero that sums of their elements lose the
# differences. fp16 and bf16 rows are not: the steps between their elements are larger than what float32 sums lose.


@triton.jit
def _anchor_of(x_ptr, r_ptr, x_at, r_at, x_step, r_step, N, live, FAR: tl.constexpr, WIDE: tl.constexpr):
    """An element near those of a row. The row is normalised relative to it, so that sums lose no digits.

    It is the first element, or of a WIDE row the median of three. Relative to an element that is far from all others,
    these would lose digits, the more the wider the row.
    """
    if not FAR:
        return 0.0
    elif not WIDE:
        return _load_element(x_ptr, r_ptr, x_at, r_at, tl.where(live, N, 0) > 0)
    else:
        x_step, r_step = tl.cast(x_step, tl.int64), tl.cast(r_step, tl.int64)
        first = _load_element(x_ptr, r_ptr, x_at, r_at, live)
        middle = _load_element(x_ptr, r_ptr, x_at + N // 2 * x_step, r_at + N // 2 * r_step, live)
        last = _load_element(x_ptr, r_ptr, x_at + (N - 1) * x_step, r_at + (N - 1) * r_step, live)
        low, high = tl.minimum(first, middle), tl.maximum(first, middle)
        return tl.maximum(low, tl.minimum(high, last))


@triton.jit
def _relative(x, anchor, FAR: tl.constexpr):
    """The elements of a row, relative to its anchor if the row may be far from zero."""
    x = accumulated(x)
    return x - anchor if FAR else x


@triton.jit
def _mean(total, N):
    """total / N, to which what is left of the division is added.

    The quotient alone may be an ulp off, or be fused with a subtraction that follows and not be rounded. Far from zero
    that is more than the differences between elements.
    """
    N = tl.cast(N, total.dtype)
    mean = total / N
    return mean + tl.fma(-mean, N, total) / N


# Norms of rows in registers ------------------------------------------------------------------------------------------


@triton.jit
def _statistics(x, anchor, N, EPS: tl.constexpr, CENTRED: tl.constexpr, FAR: tl.constexpr, CHUNKS: tl.constexpr):
    """The mean of each row [ROWS, 1], and the factor 1 / sqrt(mean of squares + EPS); squares are around the mean."""
    ROWS: tl.constexpr = x[0].shape[0]
    BLOCK: tl.constexpr = x[0].shape[1]
    last = (CHUNKS - 1) * BLOCK + tl.arange(0, BLOCK)[None, :] < N  # only the last chunk can be partly empty
    FLOAT: tl.constexpr = tl.float64 if x[0].dtype == tl.float64 else tl.float32
    mean = tl.zeros([ROWS, 1], FLOAT)
    if CENTRED:
        totals = tl.zeros([ROWS, BLOCK], FLOAT)
        for i in tl.static_range(CHUNKS):
            away = _relative(x[i], anchor, FAR)
            totals += tl.where(last, away, 0.0) if FAR and i == CHUNKS - 1 else away
        mean = _mean(tl.sum(totals, 1)[:, None], N)
    # Not the mean of squares less the square of the mean, which cancels in a row far from zero.
    squares = tl.zeros([ROWS, BLOCK], FLOAT)
    for i in tl.static_range(CHUNKS):
        away = _relative(x[i], anchor, FAR) - mean
        away = tl.where(last, away, 0.0) if CENTRED and i == CHUNKS - 1 else away
        squares += away * away
    return mean, 1 / tl.sqrt(tl.sum(squares, 1)[:, None] / N + EPS)


@triton.jit
def _load_rows(
    total_ptr, x_ptr, r_ptr, at, x_at, r_at, step, x_step, r_step, N, live, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The rows, or their sums with the residual, which are stored: AHEAD, after all loads."""
    chunks = ()
    for i in tl.static_range(CHUNKS):
        x = load_chunk(x_ptr + x_at, i, x_step, N, live, 0.0, BLOCK, CHUNKS, True)  # read MN
        if r_ptr is not None:
            x = _rounded_sum(x, load_chunk(r_ptr + r_at, i, r_step, N, live, 0.0, BLOCK, CHUNKS, True))  # read MN
            if not AHEAD:
                store_chunk(total_ptr + at, x, i, step, N, live, BLOCK, CHUNKS)  # write MN
        chunks += (x,)
    if r_ptr is not None and AHEAD:
        for i in tl.static_range(CHUNKS):
            store_chunk(total_ptr + at, chunks[i], i, step, N, live, BLOCK, CHUNKS)  # write MN
    return chunks


@triton.jit
def _result(x, anchor, mean, factor, w, b, FAR: tl.constexpr):
    """Elements of the norm, in the precision of its statistics."""
    return (_relative(x, anchor, FAR) - mean) * factor * w.to(mean.dtype) + b.to(mean.dtype)


@triton.jit(do_not_specialize=["INNER"])
def _norm_rows(
    y_ptr, total_ptr, x_ptr, r_ptr, w_ptr, b_ptr, INNER, N, y_strides, x_strides, r_strides,
    ALIGN: tl.constexpr, FLAT: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, FAR: tl.constexpr,
    AHEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """ROWS rows, held in registers as CHUNKS tiles of BLOCK columns. AHEAD: weights are loaded together with rows."""
    N = N * ALIGN
    outer, inner, live = rows_of_program(INNER, ROWS, FLAT)
    x_at = row_offset(outer, inner, x_strides, ALIGN)  # [ROWS, 1]
    r_at = row_offset(outer, inner, r_strides, ALIGN)
    at = row_offset(outer, inner, y_strides, ALIGN)
    step, x_step, r_step = y_strides[2], x_strides[2], r_strides[2]
    anchor = _anchor_of(x_ptr, r_ptr, x_at, r_at, x_step, r_step, N, live, FAR, BLOCK * CHUNKS > 4096)  # [ROWS, 1]
    vectors = ()
    if AHEAD:  # with few rows, nothing else hides the latency of these loads
        for i in tl.static_range(CHUNKS):
            vectors += _load_vectors(w_ptr, b_ptr, i, N, BLOCK, CHUNKS)
    x = _load_rows(
        total_ptr, x_ptr, r_ptr, at, x_at, r_at, step, x_step, r_step, N, live, AHEAD, BLOCK, CHUNKS
    )  # fmt: skip
    mean, factor = _statistics(x, anchor, N, EPS, CENTRED, FAR, CHUNKS)  # [ROWS, 1]
    for i in tl.static_range(CHUNKS):
        if AHEAD:
            w, b = vectors[2 * i], vectors[2 * i + 1]
        else:
            w, b = _load_vectors(w_ptr, b_ptr, i, N, BLOCK, CHUNKS)
        y = _result(x[i], anchor, mean, factor, w, b, FAR)
        store_chunk(y_ptr + at, y, i, step, N, live, BLOCK, CHUNKS)  # write MN


# The same, rounded to eight bits -------------------------------------------------------------------------------------


@triton.jit
def _magnitude(y):
    """|y| as an integer. Such integers are ordered as the elements are, and NaN is above all."""
    if y.dtype == tl.float64:
        return y.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(magnitudes, like, LIMIT: tl.constexpr):
    """The scale of each row [ROWS, 1], from the magnitudes of its elements; of a row of zeros it is 1."""
    top = tl.max(magnitudes, 1)[:, None]
    return tl.where(top == 0, 1.0, top.to(like.dtype, bitcast=True) / LIMIT)


@triton.jit
def _quantised(y, scale, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """y / scale, rounded to the nearest number of TYPE, or to the even one of two."""
    y = (y / scale).to(tl.float32)
    if TYPE == tl.int8:
        y = y + 12582912.0 - 12582912.0  # the sum has no room for a fraction
    elif INTERPRETED:
        # Triton's interpreter loses the carry into the exponent, so it gets values that need no rounding: multiples of
        # 2**-9 below 2**-6, three bits behind the first one above.
        word = y.to(tl.int32, bitcast=True)
        near = ((word + 0x7FFFF + ((word >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        y = tl.where(tl.abs(y) < 0.015625, y + 24576.0 - 24576.0, near)
    return y.to(TYPE)


@triton.jit(do_not_specialize=["INNER"])
def _norm_rows_quantised(
    y_ptr, scale_ptr, total_ptr, x_ptr, r_ptr, w_ptr, b_ptr, INNER, N, scale_strides, y_strides, x_strides, r_strides,
    LIMIT: tl.constexpr, INTERPRETED: tl.constexpr, ALIGN: tl.constexpr, FLAT: tl.constexpr, EPS: tl.constexpr,
    CENTRED: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The same, each row divided by its largest magnitude over LIMIT and rounded to eight bits."""
    N = N * ALIGN
    outer, inner, live = rows_of_program(INNER, ROWS, FLAT)
    x_at = row_offset(outer, inner, x_strides, ALIGN)  # [ROWS, 1]
    r_at = row_offset(outer, inner, r_strides, ALIGN)
    at = row_offset(outer, inner, y_strides, ALIGN)
    step, x_step, r_step = y_strides[2], x_strides[2], r_strides[2]
    anchor = _anchor_of(x_ptr, r_ptr, x_at, r_at, x_step, r_step, N, live, FAR, BLOCK * CHUNKS > 4096)  # [ROWS, 1]
    x = _load_rows(
        total_ptr, x_ptr, r_ptr, at, x_at, r_at, step, x_step, r_step, N, live, False, BLOCK, CHUNKS
    )  # fmt: skip
    mean, factor = _statistics(x, anchor, N, EPS, CENTRED, FAR, CHUNKS)  # [ROWS, 1]
    tops = _magnitude(tl.zeros([ROWS, BLOCK], mean.dtype))
    for i in tl.static_range(CHUNKS):
        w, b = _load_vectors(w_ptr, b_ptr, i, N, BLOCK, CHUNKS)
        y = _result(x[i], anchor, mean, factor, w, b, FAR)
        y = tl.where(i * BLOCK + tl.arange(0, BLOCK)[None, :] < N, y, 0.0) if i == CHUNKS - 1 else y
        tops = tl.maximum(tops, _magnitude(y))
    scale = _scale_of(tops, mean, LIMIT)  # [ROWS, 1]
    tl.store(scale_ptr + row_offset(outer, inner, scale_strides), scale, mask=live)  # write M
    for i in tl.static_range(CHUNKS):
        w, b = _load_vectors(w_ptr, b_ptr, i, N, BLOCK, CHUNKS)
        y = _quantised(_result(x[i], anchor, mean, factor, w, b, FAR), scale, y_ptr.dtype.element_ty, INTERPRETED)
        store_chunk(y_ptr + at, y, i, step, N, live, BLOCK, CHUNKS)  # write MN


# Norms of rows that several programs share ---------------------------------------------------------------------------


@triton.jit
def _load_part(
    x_ptr, r_ptr, x_begin, r_begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """A part of a row, or of its sum with the residual, as CHUNKS tiles [BLOCK]."""
    x_at, low, high = row_vectors(x_begin, N, part * SPAN, SPAN, VEC)
    r_at, _, _ = row_vectors(r_begin, N, part * SPAN, SPAN, VEC)
    chunks = ()
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK
        x = load_row_part(x_ptr + x_at + at, low - at, high - at, 0.0, VEC, BLOCK, True)  # read MN
        if r_ptr is not None:
            r = load_row_part(r_ptr + r_at + at, low - at, high - at, 0.0, VEC, BLOCK, True)  # read MN
            x = _rounded_sum(x, r)
        chunks += (x,)
    return chunks


@triton.jit
def _part_word(x, anchor, low, high, N, CENTRED: tl.constexpr, FAR: tl.constexpr, CHUNKS: tl.constexpr):
    """Of the elements of a part the sum of squares around their mean, and the sum, as a word."""
    BLOCK: tl.constexpr = x[0].shape[0]
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([], tl.float32)
    if CENTRED:
        totals = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            away = _relative(x[i], anchor, FAR)
            own = (columns >= low - i * BLOCK) & (columns < high - i * BLOCK)
            totals += tl.where(own, away, 0.0) if FAR else away
        total = tl.sum(totals, 0)
    mean = _mean(total, high - tl.maximum(low, 0))
    zero = opaque_zero(N, total)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        away = _relative(reconvert(x[i], zero), anchor, FAR)
        if CENTRED:
            own = (columns >= low - i * BLOCK) & (columns < high - i * BLOCK)
            away = tl.where(own, away - mean, 0.0)
        squares += away * away
    return pack(tl.sum(squares, 0), total)


@triton.jit
def _load_vectors_part(w_ptr, b_ptr, at, low, high, BLOCK: tl.constexpr):
    """Weight and bias [BLOCK] for the elements of a part from `at` on."""
    columns = tl.arange(0, BLOCK) + at
    own = (columns >= low) & (columns < high)
    return _load_vector(w_ptr, columns - low, own, 1.0), _load_vector(b_ptr, columns - low, own, 0.0)


@triton.jit
def _merge_statistics(words, lanes, head, N, SPAN, EPS: tl.constexpr, CENTRED: tl.constexpr):
    """The mean of a row, and 1 / sqrt(mean of squares + EPS), from the words of its parts."""
    squares, totals = unpack(words)
    mean = tl.zeros([], tl.float32)
    if CENTRED:
        mean = _mean(tl.sum(totals, 0), N)
        ends = tl.minimum(head + N - lanes * SPAN, SPAN)  # [LANES]
        counts = tl.maximum(ends - tl.maximum(head - lanes * SPAN, 0), 0).to(tl.float32)
        away = totals / tl.maximum(counts, 1.0) - mean
        squares += counts * away * away
    return mean, 1 / tl.sqrt(tl.sum(squares, 0) / N + EPS)


@triton.jit
def _store_result_part(
    y_ptr, x, anchor, mean, factor, w_ptr, b_ptr, w, b, low, high, zero, FAR: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Normalise and store a part; `w` and `b` are for its first chunk."""
    BLOCK: tl.constexpr = x[0].shape[0]
    for i in tl.static_range(len(x)):
        at = i * BLOCK
        y = _result(reconvert(x[i], zero), anchor, mean, factor, w, b, FAR)
        if i < len(x) - 1:  # no load is moved ahead of the store
            w, b = _load_vectors_part(w_ptr, b_ptr, at + BLOCK, low, high, BLOCK)
        store_row_part(y_ptr + at, y, tl.arange(0, BLOCK), low - at, high - at, VEC)  # write MN


@triton.jit(do_not_specialize=["INNER", "SPAN", "PARTS"])
def _norm_shared(
    y_ptr, total_ptr, x_ptr, r_ptr, w_ptr, b_ptr, workspace_ptr, INNER, N, y_strides, x_strides, r_strides, SPAN, PARTS,
    ALIGN: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, FAR: tl.constexpr, VEC: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """A row shared by PARTS programs, each of which holds up to SPAN units of ALIGN * VEC elements in CHUNKS tiles."""
    N = N * ALIGN
    SPAN = SPAN * (ALIGN * VEC)
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    outer, inner = (row // INNER).to(tl.int64), (row % INNER).to(tl.int64)
    x_begin = row_offset(outer, inner, x_strides, ALIGN)
    r_begin = row_offset(outer, inner, r_strides, ALIGN)
    anchor = _anchor_of(x_ptr, r_ptr, x_begin, r_begin, 1, 1, N, row >= 0, FAR, True)
    x = _load_part(x_ptr, r_ptr, x_begin, r_begin, N, part, SPAN, VEC, BLOCK, CHUNKS)
    y_at, low, high = row_vectors(row_offset(outer, inner, y_strides, ALIGN), N, part * SPAN, SPAN, VEC)
    if r_ptr is not None:
        for i in tl.static_range(CHUNKS):
            at = i * BLOCK
            store_row_part(total_ptr + y_at + at, x[i], tl.arange(0, BLOCK), low - at, high - at, VEC)  # write MN
    word = _part_word(x, anchor, low, high, N, CENTRED, FAR, CHUNKS)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the workspace's zeros; the part is already here
    workspace_ptr += row.to(tl.int64) * PARTS
    publish(workspace_ptr + part, word)
    w, b = _load_vectors_part(w_ptr, b_ptr, 0, low, high, BLOCK)
    lanes = tl.arange(0, LANES)  # [LANES]
    words, missing = wait_for(workspace_ptr, lanes, PARTS, NEUTRAL_SUM, TRIES)
    if missing < LANES:
        while missing < LANES:
            other = _load_part(x_ptr, r_ptr, x_begin, r_begin, N, missing, SPAN, VEC, BLOCK, CHUNKS)
            _, its_low, its_high = row_vectors(x_begin, N, missing * SPAN, SPAN, VEC)
            word = _part_word(other, anchor, its_low, its_high, N, CENTRED, FAR, CHUNKS)
            publish(workspace_ptr + missing, word)
            words = tl.where(lanes == missing, word, words)
            missing = first_missing(words, lanes)
        # Its own part again, so that the loop need not hold it. missing - LANES is an opaque zero.
        part += missing - LANES
        x = _load_part(x_ptr, r_ptr, x_begin, r_begin, N, part, SPAN, VEC, BLOCK, CHUNKS)
    mean, factor = _merge_statistics(words, lanes, (x_begin % VEC).to(tl.int32), N, SPAN, EPS, CENTRED)
    _store_result_part(
        y_ptr + y_at, x, anchor, mean, factor, w_ptr, b_ptr, w, b, low, high, opaque_zero(N, factor), FAR, VEC
    )  # fmt: skip


# Gradients -----------------------------------------------------------------------------------------------------------

# A program takes many rows, one after another, and the same columns of each. It adds up its part of dweight and dbias
# in registers, and leaves a partial row. A second kernel adds up partial rows in a fixed order: equal calls have equal
# bits, without atomics.


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _two_sums(a, b, axis: tl.constexpr, TOGETHER: tl.constexpr):
    """Two sums with one exchange between threads; interpreted, that would take thousands of steps."""
    if TOGETHER:
        return tl.reduce((a, b), axis, _add_pairs)
    else:
        return tl.sum(a, axis), tl.sum(b, axis)


@triton.jit
def _gradient_sums(x, g, inside, count, axis: tl.constexpr, CENTRED: tl.constexpr, TOGETHER: tl.constexpr):
    """The sums of x * x, g * x, x and g along an axis. CENTRED: the first two around the mean of x; else no others."""
    total = tl.sum(tl.zeros_like(x), axis)
    gs = total
    if CENTRED:
        total, gs = _two_sums(x, g, axis, TOGETHER)
        mean = _mean(total, count)
        x = tl.where(inside, x - (mean if axis == 0 else mean[:, None]), 0.0)
    squares, products = _two_sums(x * x, g * x, axis, TOGETHER)
    return squares, products, total, gs


@triton.jit
def _add_total(dx, dtotal_ptr, at, columns, inside):
    """The gradient of the sum with the residual, added if there is one."""
    if dtotal_ptr is not None:
        dx += accumulated(tl.load(dtotal_ptr + at + columns, mask=inside, other=0.0))  # read MN
    return dx


@triton.jit
def _store_partial_row(sums_ptr, sums, group, columns, inside, N):
    """Leave what a group of programs added up. One group alone writes the gradient of the weights itself."""
    if sums_ptr is not None:
        tl.store(sums_ptr + group.to(tl.int64) * N + columns, sums, mask=inside)


@triton.jit
def _norm_backward_rows(
    dx_ptr, dw_ptr, db_ptr, x_ptr, dy_ptr, dtotal_ptr, w_ptr, OUTER, INNER, N, GROUPS, dx_strides, x_strides,
    dy_strides, dtotal_strides, ALIGN: tl.constexpr, FLAT: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr,
    FAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, TOGETHER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows; GROUPS programs take all of them in turn. Rows of STAGES loops are loaded ahead."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    N = N * ALIGN
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    w = _load_vector(w_ptr, columns, columns < N, 1.0)
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    dw = tl.zeros([ROWS, BLOCK], FLOAT)
    db = tl.zeros([ROWS, BLOCK], FLOAT)
    for tile in tl.range(tl.program_id(0), OUTER * tl.cdiv(INNER, ROWS), GROUPS, num_stages=STAGES):
        outer, inner, live = rows_of_tile(tile, INNER, ROWS, FLAT)
        inside = live & (columns < N)
        x_at = row_offset(outer, inner, x_strides, ALIGN)  # [ROWS, 1]
        x = load_chunk(x_ptr + x_at, 0, x_strides[2], N, live, 0.0, BLOCK, 1)  # read MN
        dy_at = row_offset(outer, inner, dy_strides, ALIGN)
        dy = accumulated(load_chunk(dy_ptr + dy_at, 0, dy_strides[2], N, live, 0.0, BLOCK, 1))  # read MN
        anchor = _anchor_of(x_ptr, None, x_at, x_at, x_strides[2], x_strides[2], N, live, FAR, BLOCK > 4096)
        x = tl.where(inside, _relative(x, anchor, FAR), 0.0) if FAR else accumulated(x)
        squares, products, total, gs = _gradient_sums(x, dy * w.to(FLOAT), inside, N, 1, CENTRED, TOGETHER)
        factor = (1 / tl.sqrt(squares / N + EPS))[:, None]  # [ROWS, 1]
        factor = tl.where(live, factor, 0.0)  # of rows beyond the last it may be infinite, or NaN
        n = (x - _mean(total[:, None], N) if CENTRED else x) * factor  # [ROWS, BLOCK]
        dw = dw + dy * n if dw_ptr is not None else dw
        db = db + dy if db_ptr is not None else db
        dx = dy * w.to(FLOAT) - n * (products[:, None] * factor / N)
        dx = (dx - gs[:, None] / N if CENTRED else dx) * factor
        at = row_offset(outer, inner, dtotal_strides, ALIGN)
        dx = _add_total(dx, dtotal_ptr, at, columns.to(tl.int64) * dtotal_strides[2], inside)
        at = row_offset(outer, inner, dx_strides, ALIGN)
        store_chunk(dx_ptr + at, dx, 0, dx_strides[2], N, live, BLOCK, 1)  # write MN
    _store_partial_row(dw_ptr, tl.sum(dw, 0)[None, :], tl.program_id(0), columns, columns < N, N)
    _store_partial_row(db_ptr, tl.sum(db, 0)[None, :], tl.program_id(0), columns, columns < N, N)


# Gradients of rows that several programs share -----------------------------------------------------------------------


@triton.jit
def _neighbours_share(PROCESSORS):
    """This program's number, so that neighbours share a multiprocessor if these get programs in turn.

    Nothing relies on that. Where the parts of a row were on few multiprocessors, rows took less time in trials.
    """
    programs = tl.num_programs(0)
    processor = tl.program_id(0) % PROCESSORS
    before = processor * (programs // PROCESSORS) + tl.minimum(processor, programs % PROCESSORS)
    return before + tl.program_id(0) // PROCESSORS


@triton.jit
def _backward_part(
    x_ptr, dy_ptr, w, row, M, N, x_stride, dy_stride, begin, count, CENTRED: tl.constexpr, FAR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """x relative to its anchor and dy of a part [BLOCK], which are zero beyond the last row, and its sums as words."""
    columns = tl.arange(0, BLOCK)
    inside = columns < tl.where(row < M, count, 0)
    x = tl.load(x_ptr + (row * x_stride + begin) + columns, mask=inside, other=0.0)  # read MN
    dy = tl.load(dy_ptr + (row * dy_stride + begin) + columns, mask=inside, other=0.0)  # read MN
    anchor = _anchor_of(x_ptr, None, row * x_stride, row * x_stride, 1, 1, N, row < M, FAR, True)
    if FAR:
        x = tl.where(inside, x - anchor, 0.0)
    g = accumulated(dy) * accumulated(w)
    squares, products, total, gs = _gradient_sums(accumulated(x), g, columns < count, count, 0, CENTRED, False)
    return x, dy, pack(squares, products), pack(total, gs)


@triton.jit
def _workspace_of(workspace_ptr, row, PARTS, CENTRED: tl.constexpr):
    """Where the words of a row are: one of each part, and behind them, CENTRED, another one of each."""
    return workspace_ptr + row * (PARTS * (2 if CENTRED else 1))


@triton.jit
def _publish_words(workspace_ptr, PARTS, word, more, CENTRED: tl.constexpr):
    publish(workspace_ptr, word)
    if CENTRED:
        publish(workspace_ptr + PARTS, more)


@triton.jit
def _words_of_row(
    workspace_ptr, published, lanes, x_ptr, dy_ptr, w_ptr, row, M, N, x_stride, dy_stride, SPAN, PARTS,
    CENTRED: tl.constexpr, FAR: tl.constexpr, BLOCK: tl.constexpr, TRIES: tl.constexpr,
):  # fmt: skip
    """The words of all parts [LANES], of which `published` is one of the next row."""
    words = tl.zeros(lanes.shape, tl.int64)
    more = words
    # Always true. The compiler would otherwise move these loads ahead of what is published, which loads the next row.
    if published != 0:
        if CENTRED:
            words, more, missing = wait_for_both(workspace_ptr, lanes, PARTS, NEUTRAL_SUM, TRIES)
        else:
            words, missing = wait_for(workspace_ptr, lanes, PARTS, NEUTRAL_SUM, TRIES)
        while missing < lanes.shape[0]:
            begin = missing * SPAN
            count = tl.minimum(N - begin, SPAN)
            columns = tl.arange(0, BLOCK)
            w = _load_vector(w_ptr, begin + columns, columns < count, 1.0)
            _, _, word, its_more = _backward_part(
                x_ptr, dy_ptr, w, row, M, N, x_stride, dy_stride, begin, count, CENTRED, FAR, BLOCK
            )  # fmt: skip
            _publish_words(workspace_ptr + missing, PARTS, word, its_more, CENTRED)
            words = tl.where(lanes == missing, word, words)
            more = tl.where(lanes == missing, its_more, more)
            missing = first_missing(tl.where(more == 0, more, words) if CENTRED else words, lanes)
    return words, more


@triton.jit
def _merge_sums(words, more, lanes, N, SPAN, EPS: tl.constexpr, CENTRED: tl.constexpr):
    """The mean of a row, its factor, and the means of g * n and of g, from the words of its parts."""
    squares, products = unpack(words)
    mean = tl.zeros([], tl.float32)
    mean_g = mean
    if CENTRED:
        totals, gs = unpack(more)
        mean, mean_g = _mean(tl.sum(totals, 0), N), tl.sum(gs, 0) / N
        counts = tl.maximum(tl.minimum(N - lanes * SPAN, SPAN), 0).to(tl.float32)  # [LANES]
        away = totals / tl.maximum(counts, 1.0) - mean
        squares += counts * away * away
        products += gs * away
    factor = 1 / tl.sqrt(tl.sum(squares, 0) / N + EPS)
    return mean, factor, tl.sum(products, 0) * factor / N, mean_g


@triton.jit(do_not_specialize=["M", "GROUPS", "PARTS", "PROCESSORS"])
def _norm_backward_shared(
    dx_ptr, dw_ptr, db_ptr, workspace_ptr, x_ptr, dy_ptr, dtotal_ptr, w_ptr, M, N, x_stride, dy_stride, dtotal_stride,
    GROUPS, SPAN, PARTS, PROCESSORS, ALIGN: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, FAR: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
    TRIES: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """One row after another is shared by PARTS programs, each of which has SPAN columns; GROUPS such groups have all.

    A program publishes its words of the next row before it waits for those of this one: then these have arrived.
    """
    N = N * ALIGN
    x_stride, dy_stride = x_stride * ALIGN, dy_stride * ALIGN
    program = _neighbours_share(PROCESSORS)
    group, part = program // PARTS, program % PARTS
    begin = part * SPAN
    count = tl.minimum(N - begin, SPAN)
    columns, lanes = tl.arange(0, BLOCK), tl.arange(0, LANES)
    inside = columns < count
    w = _load_vector(w_ptr, begin + columns, inside, 1.0)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    row = group.to(tl.int64)
    x, dy, word, more = _backward_part(
        x_ptr, dy_ptr, w, row, M, N, x_stride, dy_stride, begin, count, CENTRED, FAR, BLOCK
    )  # fmt: skip
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the workspace's zeros
    _publish_words(_workspace_of(workspace_ptr, row, PARTS, CENTRED) + part, PARTS, word, more, CENTRED)
    for start in tl.range(group, M, GROUPS, num_stages=STAGES):
        row = tl.zeros([], tl.int64) + start
        next_x, next_dy, word, more = _backward_part(
            x_ptr, dy_ptr, w, row + GROUPS, M, N, x_stride, dy_stride, begin, count, CENTRED, FAR, BLOCK
        )  # fmt: skip
        at = _workspace_of(workspace_ptr, row + GROUPS, PARTS, CENTRED)
        _publish_words(at + part, PARTS, word, more, CENTRED)
        at = _workspace_of(workspace_ptr, row, PARTS, CENTRED)
        words, more_words = _words_of_row(
            at, word, lanes, x_ptr, dy_ptr, w_ptr, row, M, N, x_stride, dy_stride, SPAN, PARTS, CENTRED, FAR, BLOCK,
            TRIES,
        )  # fmt: skip
        mean, factor, mean_product, mean_g = _merge_sums(words, more_words, lanes, N, SPAN, EPS, CENTRED)
        away = accumulated(x) - mean  # [BLOCK]
        scaled = accumulated(dy) * factor
        dw = dw + scaled * away if dw_ptr is not None else dw
        db = db + accumulated(dy) if db_ptr is not None else db
        dx = scaled * accumulated(w) - away * (mean_product * factor * factor)
        dx = dx - mean_g * factor if CENTRED else dx
        dx = _add_total(dx, dtotal_ptr, row * (dtotal_stride * ALIGN) + begin, columns, inside)
        tl.store(dx_ptr + (row * N + begin) + columns, dx, mask=inside)  # write MN
        x, dy = next_x, next_dy
    _store_partial_row(dw_ptr, dw, group, begin + columns, inside, N)
    _store_partial_row(db_ptr, db, group, begin + columns, inside, N)


@triton.jit
def _column_sums(
    dw_ptr, db_ptr, sums_ptr, GROUPS, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, LATE: tl.constexpr
):  # fmt: skip
    """Sums of the partial rows of all groups, ROWS of them at a time: of dweight, and behind it of dbias."""
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
            tl.store(dw_ptr + columns, total, mask=columns < N)
    if db_ptr is not None:
        if which == (1 if dw_ptr is not None else 0):
            tl.store(db_ptr + columns, total, mask=columns < N)


# Launch configs and launchers ----------------------------------------------------------------------------------------

# For each element size, the first line whose limit holds a row. Measured on an H200; up to 16 KiB on an H100.
_ROWS = {  # bytes of a row, columns of a chunk, warps, elements of a program
    2: (
        Config(1024, 512, 1, 1024), Config(4096, 512, 2), Config(6144, 1024, 4), Config(8192, 4096, 8),
        Config(14336, 2048, 8), Config(16384, 4096, 8), Config(65536, 2048, 8),
    ),
    4: (
        Config(2048, 512, 1, 512), Config(8192, 1024, 4), Config(12288, 1024, 8), Config(28672, 2048, 16),
        Config(81920, 2048, 8), Config(131072, 4096, 32),
    ),
    8: (Config(2048, 256, 1, 256), Config(16384, 2048, 4), Config(32768, 512, 8), Config(131072, 1024, 16)),
}  # fmt: skip
#: fp16 and bf16 rows that begin at odd elements are loaded one element at a time: more of them at once.
_ODD_ROWS = _ROWS | {
    2: (
        Config(1024, 256, 1, 1024), Config(2048, 256, 1, 2048), Config(4096, 512, 2), Config(6144, 512, 2, 6144),
        *_ROWS[2][3:],
    )
}  # fmt: skip
#: With a residual, each thread has twice as many loads under way: twice as many warps for long rows.
_ROWS_OF_SUMS = _ROWS | {2: (*_ROWS[2][:-1], Config(65536, 4096, 16))}
#: Wider rows whose result is quantised: one program holds each, since all of a row is read before any is written.
_QUANTISED = {2: (Config(2**17, 4096, 32),), 4: (Config(2**18, 4096, 32),), 8: ()}
_PARTS = {2: (Parts(2**21, 8192, 4),), 4: (Parts(2**22, 4096, 4),), 8: ()}  # bytes of a row, columns of a part, warps
#: The registers of a thread where rows are shared, by whether they are centred, and whether a residual is added.
_REGISTERS = {(False, False): 72, (True, False): 96, (False, True): 128, (True, True): 128}
#: fp16 and bf16 rows wider than this, in bytes, are shared if they begin at odd elements.
_UNALIGNED = 40960
#: A part is held in chunks of so many columns.
_CHUNK = 1024

_BACKWARD_ROWS = {
    2: tuple(Config(limit, 8192, limit // 1024, 512) for limit in (1024, 2048, 4096, 8192, 16384)),
    4: tuple(Config(limit, 4096, limit // 1024, 512) for limit in (1024, 2048, 4096, 8192, 16384)),
    8: (*(Config(limit, 4096, limit // 1024, 256) for limit in (1024, 2048, 4096, 8192)), Config(32768, 4096, 16)),
}
#: A program of one warp needs no barrier, but each reads a word of all others: wider rows have wider programs.
_BACKWARD_PARTS = {
    2: (Parts(2**17, 512, 1), Parts(2**21, 2048, 4)),
    4: (Parts(2**17, 256, 1), Parts(2**21, 1024, 4), Parts(2**22, 2048, 4)),
    8: (),
}
_BACKWARD_REGISTERS = {False: 128, True: 168}  # of a thread where rows are shared, by whether they are centred
#: Up to how many bytes, read and written, it is noticeable that the second kernel of a gradient starts early.
_NOTICEABLE = 2**26

#: The largest magnitude in eight bits.
_LIMITS = {torch.float8_e4m3fn: 448, torch.int8: 127}


def _laid_out(out: Tensor, ins: list[Tensor], fits: Callable[[Layout], Any]) -> tuple[Layout, list[Tensor], Any]:
    """The layout of all tensors, and the constants for rows across; tensors are copied if there are none."""
    layout = layout_of(out.dim() - 1, out, *ins)
    constants = None if layout is None or layout.along else fits(layout)
    if layout is None or not (layout.along or constants):
        ins = [with_adjacent_elements(t) for t in ins]
        layout = layout_of(out.dim() - 1, out, *ins)
        assert layout is not None
    return layout, ins, constants


def _norm_into(
    y: Tensor, total: Tensor | None, scale: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, centred: bool, eps: float,
) -> None:  # fmt: skip
    capability, processors = gpu(x.device)
    if y.dtype == torch.float8_e4m3fn and capability is not None and capability < (8, 9):
        raise NotImplementedError(
            f"norms: expected a GPU of capability 8.9 or more for float8_e4m3fn, got {capability[0]}.{capability[1]}; "
            "ask for torch.int8"
        )
    if not y.numel():
        apply(Tensor.fill_, scale, 1.0)
        return
    n, size = x.shape[-1], x.element_size()
    parts: Any = first_that_fits(_PARTS, n, size) if scale is None and not INTERPRETED else None
    wide = None if scale is None else first_that_fits(_QUANTISED, n, size)
    if n > WIDEST or (not (parts or wide or INTERPRETED) and first_that_fits(_ROWS, n, size) is None):
        apply(_by_torch, y, total, scale, x, residual, weight, bias, centred, eps)
        return
    layout, ins, constants = _laid_out(
        y, [x] if residual is None else [x, residual], lambda layout: across_constants(layout, size, INTERPRETED)
    )
    if layout.along and layout.sizes[:2] == (1, 1):  # where others would begin decides in which order it is added up
        layout = Layout(layout.sizes, [(0, t.stride(-2) if t.dim() > 1 else n, 1) for t in (y, *ins)])
    (outer, inner, n), strides = layout
    align = alignment(layout, *ins, y)
    odd = align * size < 4
    table = _ROWS_OF_SUMS if residual is not None else _ODD_ROWS if odd else _ROWS
    config: Any = INTERPRETER if INTERPRETED else first_that_fits(table, n, size) or wide
    if odd and n * size > _UNALIGNED and parts is not None:
        config = None  # parts are loaded by whole vectors
    tensors = (ins[0], ins[1] if len(ins) > 1 else None, *(v if v is None else contiguous(v) for v in (weight, bias)))
    places = [(a // align, b // align, step) for a, b, step in (strides[0], strides[1], strides[-1])]
    given = {"ALIGN": align, "EPS": eps, "CENTRED": centred, "FAR": centred and size > 2}
    if layout.along and config is None:
        vec = vector_width(layout, *ins, y) if odd else 1
        share = shared(parts._replace(registers=_REGISTERS[centred, total is not None]), n, size, vec)
        chunk = min(_CHUNK, parts.block)
        programs = outer * inner * share.parts
        words, late = workspace(programs, x.device)
        launch(
            _norm_shared, (programs,), y, total, *tensors, words, inner, n // align, *places, share.span // align,
            share.parts, **given, **share.constants | {"BLOCK": chunk, "CHUNKS": parts.block // chunk}, **late,
        )  # fmt: skip
        return
    # Not fewer rows of a program for few rows: the compiler would add up a row in another order.
    constants = constants or row_constants(config, n, inner if INTERPRETED else max(1, config.elements))
    grid = (outer * triton.cdiv(inner, constants["ROWS"]),)
    given |= {"FLAT": outer == 1, **constants}
    if scale is None:
        # Weights are held from their loads to the result: of few rows, and where a thread has registers for them.
        threads = 32 * constants["num_warps"]
        held = constants["CHUNKS"] * constants["BLOCK"] * size * (3 if centred else 2) // (4 * threads)
        few = outer * inner <= 8 * processors * constants["ROWS"]
        ahead = layout.along and few and held <= min(255, 65536 // threads) - 8
        launch(_norm_rows, grid, y, total, *tensors, inner, n // align, *places, AHEAD=ahead, **given)
    else:
        of_scale = tuple(stride // n for stride in strides[0])
        launch(
            _norm_rows_quantised, grid, y, scale, total, *tensors, inner, n // align, of_scale, *places,
            LIMIT=_LIMITS[y.dtype], INTERPRETED=capability is None, **given,
        )  # fmt: skip


def _normalised(x: Tensor, centred: bool, eps: float) -> tuple[Tensor, Tensor]:
    """Normalised rows and their factors, by operations of torch."""
    x = x.to(accumulated_in(x.dtype))
    if centred:
        x = x - x.mean(-1, keepdim=True)
        x = x - x.mean(-1, keepdim=True)  # the first mean is rounded, which counts far from zero
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * factor, factor


def _by_torch(
    y: Tensor, total: Tensor | None, scale: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, centred: bool, eps: float,
) -> None:  # fmt: skip
    """Norms of rows of any width."""
    exact, _ = _normalised(x if residual is None else torch.add(x, residual, out=total), centred, eps)
    exact = exact if weight is None else exact * weight.to(exact.dtype)
    exact = exact if bias is None else exact + bias.to(exact.dtype)
    if scale is not None:
        top = exact.abs().amax(-1, keepdim=True)
        scale.copy_(torch.where(top == 0, 1.0, top / _LIMITS[y.dtype]))
        exact = (exact / scale).float()
        exact = exact.round() if y.dtype == torch.int8 else exact
    y.copy_(exact)


def _backward_by_torch(
    dx: Tensor, dw: Tensor | None, db: Tensor | None, x: Tensor, dy: Tensor, dtotal: Tensor | None,
    weight: Tensor | None, centred: bool, eps: float,
) -> None:  # fmt: skip
    """Gradients of rows of any width."""
    n, factor = _normalised(x, centred, eps)
    dy = dy.to(n.dtype)
    for found, terms in ((dw, dy * n), (db, dy)):
        if found is not None:
            found.copy_(terms.reshape(-1, n.shape[-1]).sum(0))
    g = dy if weight is None else dy * weight.to(n.dtype)
    exact = g - n * (g * n).mean(-1, keepdim=True)
    exact = (exact - g.mean(-1, keepdim=True) if centred else exact) * factor
    dx.copy_(exact if dtotal is None else exact + dtotal)


def _across_backward(layout: Layout, size: int) -> dict[str, Any] | None:
    """A tile of rows whose neighbours are adjacent; None if 8 rows of them (4 in float64) do not fit into registers."""
    _, inner, n = layout.sizes
    block = triton.next_power_of_2(n)
    if block > 1024:
        return None
    elements = 8192 if size < 8 else 4096  # 16 of each tensor and each sum to a thread
    rows = min(64, elements // block, triton.next_power_of_2(inner))
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(1, rows * block // 512)}


def _partial_rows(
    dw: Tensor | None, db: Tensor | None, groups: int, x: Tensor
) -> tuple[Tensor | None, tuple[Tensor | None, Tensor | None]]:
    """Memory for what groups add up for dw and db, and its parts; one group alone writes dw and db."""
    vectors = (dw is not None) + (db is not None)
    if groups == 1 or not vectors:
        return None, (dw, db)
    sums = x.new_empty((vectors, groups, x.shape[-1]), dtype=accumulated_in(x.dtype))
    return sums, (None if dw is None else sums[0], None if db is None else sums[-1])


def _backward_into(
    found: list[Tensor], x: Tensor, dy: Tensor, dtotal: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    centred: bool, eps: float,
) -> None:  # fmt: skip
    dx, *rest = found
    dw = rest.pop(0) if weight is not None else None
    db = rest[0] if rest else None
    if not dx.numel():
        for vector in found[1:]:
            apply(Tensor.zero_, vector)
        return
    (capability, processors), (n, size) = gpu(x.device), (x.shape[-1], x.element_size())
    config = INTERPRETER if INTERPRETED else first_that_fits(_BACKWARD_ROWS, n, size)
    parts = first_that_fits(_BACKWARD_PARTS, n, size)
    # All parts of a row must run at once: a program would wait for those that have not begun.
    resident = 65536 // (32 * parts.warps * _BACKWARD_REGISTERS[centred]) * processors if parts else 0
    if n > WIDEST or (config is None and (parts is None or triton.cdiv(n, parts.block) > resident)):
        apply(_backward_by_torch, dx, dw, db, x, dy, dtotal, weight, centred, eps)
        return
    ins = [x, dy] if dtotal is None else [x, dy, dtotal]
    layout, ins, constants = _laid_out(dx, ins, lambda layout: _across_backward(layout, size))
    if config is None and constants is None and layout.sizes[0] > 1:  # rows of a matrix are shared
        layout, ins, _ = _laid_out(dx, [contiguous(t) for t in ins], lambda layout: None)
    (outer, inner, n), strides = layout
    align = alignment(layout, dx, *ins)
    places = [(a // align, b // align, step) for a, b, step in (*strides, strides[-1])[:4]]
    tensors = (*ins, *([None] if dtotal is None else []), weight if weight is None else contiguous(weight))
    newer = capability is not None and capability >= (9, 0)  # whose multiprocessors have more shared memory
    given = {"ALIGN": align, "EPS": eps, "CENTRED": centred, "FAR": centred and size > 2}
    early: dict[str, bool] = {}  # how the second kernel is launched
    if constants is None and config is None:
        share = shared(parts._replace(registers=_BACKWARD_REGISTERS[centred]), n, size, 1)
        groups = min(inner, resident // share.parts)
        sums, left = _partial_rows(dw, db, groups, x)
        words, late = workspace((inner + groups) * share.parts * (2 if centred else 1), x.device)
        given |= {**share.constants, "STAGES": (4 if newer else 2) - (dtotal is not None), **late}
        del given["VEC"]
        launch(
            _norm_backward_shared, (groups * share.parts,), dx, *left, words, *tensors, inner, n // align,
            *(stride for _, stride, _ in places[1:]), groups, share.span, share.parts, processors, **given,
        )  # fmt: skip
    else:
        constants = constants or row_constants(config, n, inner)
        warps = constants["num_warps"]
        groups = min(outer * triton.cdiv(inner, constants["ROWS"]), max(1, 16 // warps) * processors)
        sums, left = _partial_rows(dw, db, groups, x)
        # Where wide programs fill the multiprocessors, those of the second kernel would be in the way of the last.
        room = warps <= 4 or groups * warps <= 8 * processors
        if sums is not None and room and 3 * dx.numel() * size <= _NOTICEABLE:
            early = overlapping(x.device)
        stages = (4 if newer and centred else 3) - (dtotal is not None) if layout.along else 1
        given |= {**constants, "STAGES": min(stages, 16 // size), "TOGETHER": capability is not None}
        # With one column, the compiler would fuse g of a row with the subtraction of its mean, g once more.
        given["BLOCK"] = max(2, given["BLOCK"])
        given.pop("CHUNKS", None)
        launch(
            _norm_backward_rows, (groups,), dx, *left, *tensors, outer, inner, n // align, groups, *places,
            FLAT=outer == 1, EARLY=bool(early), maxnreg=128, **given,
        )  # fmt: skip
    if sums is not None:
        vectors = len(sums)
        # Many partial rows of few columns: one load after another would wait for memory.
        many = groups > 32 and n * vectors < 32 * processors
        rows, block, warps = (min(512, triton.next_power_of_2(groups)), 8, 8) if many else (32, 32, 4)
        block = block if capability else 1024  # in the interpreter, few programs
        launch(
            _column_sums, (triton.cdiv(n, block), vectors), dw, db, sums, groups, n, ROWS=rows, BLOCK=block,
            LATE=bool(early), num_warps=warps, **early,
        )  # fmt: skip


# Arguments and results -----------------------------------------------------------------------------------------------


def _check(name: str, like: Mapping[str, Any], x: Any, weight: Any, bias: Any, centred: bool, eps: Any) -> Any:
    """The arguments of a norm or its gradient: x, tensors `like` it, and the rest; `name` is for a refusal."""
    name = name.format(_name(centred))
    same = {what: (tensor, "[..., D]") for what, tensor in like.items()}
    shapes(name, x=(x, "[..., D]"), **same, weight=(weight, "[D]?", FLOATING), bias=(bias, "[D]?", FLOATING))
    eps = number(name, "eps", eps, "give a float such as 1e-6")
    return x, *like.values(), weight, bias, bool(centred), eps


def _check_sum(x: Any, residual: Any, *rest: Any) -> Any:
    return _check("add_{}", {"residual": residual}, x, *rest)


def _check_quantised(x: Any, residual: Any, *rest: Any) -> Any:
    *rest, dtype = rest
    if not isinstance(dtype, torch.dtype) or dtype not in _LIMITS:
        raise TypeError(
            f"{_name(rest[2])}: expected dtype to be float8_e4m3fn or int8, got {dtype}; leave it out for that of x"
        )
    if residual is None:
        x, *rest = _check("{}", {}, x, *rest)
    else:
        x, residual, *rest = _check_sum(x, residual, *rest)
    return x, residual, *rest, dtype


def _check_backward(x: Any, dy: Any, dtotal: Any, *rest: Any) -> Any:
    if dtotal is not None:
        return _check("{}_backward", {"dy": dy, "dtotal": dtotal}, x, *rest)
    x, dy, *rest = _check("{}_backward", {"dy": dy}, x, *rest)
    return x, dy, None, *rest


def _name(centred: bool) -> str:
    return "layer_norm" if centred else "rms_norm"


def _with_scale(x: Tensor, residual: Tensor | None, weight: Any, bias: Any, *rest: Any) -> list[Tensor]:
    quantised = [x.new_empty(x.shape, dtype=rest[-1]), x.new_empty((*x.shape[:-1], 1), dtype=accumulated_in(x.dtype))]
    return quantised if residual is None else [*quantised, x.new_empty(x.shape)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, *_, weight, bias, centred, eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if isinstance(output, tuple) else x, weight, bias)
    ctx.centred, ctx.eps = centred, eps


def _gradients(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> tuple[Any, ...]:
    """For what was normalised, for weight and bias, for nothing of the rest."""
    x, weight, bias = ctx.saved_tensors
    if dy is None:
        return dtotal, None, None, None, None
    dx, *rest = _norm_backward.call(x, dy, dtotal, weight, bias, ctx.centred, ctx.eps)
    dweight = None if weight is None else rest.pop(0)
    return dx, dweight, rest[0] if rest else None, None, None


def _gradients_of_sum(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Any, ...]:
    dx, *rest = _gradients(ctx, dy, dtotal)
    return dx, dx, *rest


def _under_autocast(device: str, call: Any, x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The sum in the wider dtype, as torch adds; the norm of it as torch.autocast asks for it."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    y, total = wide(device, call, x.to(dtype), residual.to(dtype), *rest, like=_name(rest[2]))
    return y, total.to(dtype)


def _gradients_like(x: Tensor, dy: Any, dtotal: Any, *vectors: Any) -> list[Tensor]:
    return [x.new_empty(x.shape), *(v.new_empty(v.shape) for v in vectors[:2] if v is not None)]


_norm_backward: Operator = Operator(
    "norm_backward",
    "(Tensor x, Tensor dy, Tensor? dtotal, Tensor? weight, Tensor? bias, bool centred, float eps) -> Tensor[]",
    check=_check_backward,
    outputs=_gradients_like,
    into=_backward_into,
)
_norm: Operator = Operator(
    "norm",
    "(Tensor x, Tensor? weight, Tensor? bias, bool centred, float eps) -> Tensor",
    check=lambda *given: _check("{}", {}, *given),
    outputs=lambda x, *_: x.new_empty(x.shape),
    into=lambda y, x, *rest: _norm_into(y, None, None, x, None, *rest),
    gradient=(_gradients, _keep),
    traced=lambda *given: given,
    autocast=lambda device, call, *given: wide(device, call, *given, like=_name(given[3])),
)
_add_norm: Operator = Operator(
    "add_norm",
    "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, bool centred, float eps) -> (Tensor, Tensor)",
    check=_check_sum,
    outputs=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)),
    into=lambda found, *rest: _norm_into(found[0], found[1], None, *rest),
    gradient=(_gradients_of_sum, _keep),
    traced=lambda *given: given,
    autocast=_under_autocast,
)
_quantised_norm: Operator = Operator(
    "quantised_norm",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, bool centred, float eps, ScalarType dtype) -> Tensor[]",
    check=_check_quantised,
    outputs=_with_scale,
    into=lambda found, *rest: _norm_into(found[0], found[2] if len(found) > 2 else None, found[1], *rest[:-1]),
)

# The functions -------------------------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows over the root of the mean of their squares, in one read and one write.

    Parameters
    ----------
    x : torch.Tensor
        Rows of N elements along the last axis, of any shape and strides: float16, bfloat16, float32 or float64, on a
        CUDA device (or on the CPU where Triton interprets). Half types are computed in float32 and rounded once.
    weight, bias : torch.Tensor, optional
        N elements, of any of these dtypes.
    eps : float, default 1e-6
        Added to the mean of the squares.
    dtype : torch.dtype, optional
        ``torch.float8_e4m3fn`` or ``torch.int8``: the result in eight bits, each row over its scale, which is the
        row's largest magnitude over 448 or 127 (1 for a row of zeros).

    Returns
    -------
    y : torch.Tensor
        Contiguous, of the shape, dtype and device of `x`.
    scale : torch.Tensor
        With `dtype`: one number a row, in float32 (float64 for that), of the shape of `x` with a last axis of 1. The
        result is ``y * scale``.

    Raises
    ------
    TypeError
        If an argument is no dense floating-point tensor, `eps` no number, or `dtype` another one.
    ValueError
        If shapes or devices do not fit, or the tensors are on the CPU and Triton compiles, or views that negate.
    NotImplementedError
        If `dtype` is ``torch.float8_e4m3fn`` and the GPU has no such numbers, or if its gradient is asked for.

    Notes
    -----
    Differentiable once, but for results in eight bits; works under `torch.compile` and `torch.vmap`. The result of a
    row depends on no other row, bit for bit, where its elements are adjacent and at most 2**20.

    Examples
    --------
    >>> import fusebook, torch
    >>> y = fusebook.rms_norm(torch.randn(3, 5, device="cuda"), torch.ones(5, device="cuda"))  # doctest: +SKIP
    """
    if dtype is None:
        return _norm.call(x, weight, bias, False, eps)
    return tuple(_quantised_norm(x, None, weight, bias, False, eps, dtype))


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows less their mean, over the root of their variance, in one read and one write.

    Parameters
    ----------
    x, weight, bias, eps, dtype
        As of `rms_norm`; `eps` is added to the variance.

    Returns
    -------
    y, scale : torch.Tensor
        As of `rms_norm`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `rms_norm`.
    """
    if dtype is None:
        return _norm.call(x, weight, bias, True, eps)
    return tuple(_quantised_norm(x, None, weight, bias, True, eps, dtype))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Add a residual and normalise the sum as `rms_norm` does, in two reads and two writes.

    Parameters
    ----------
    x, weight, bias, eps, dtype
        As of `rms_norm`.
    residual : torch.Tensor
        Of the shape and dtype of `x`, of any strides.

    Returns
    -------
    y : torch.Tensor
        The norm of the sum.
    scale : torch.Tensor
        With `dtype`, as of `rms_norm`.
    total : torch.Tensor
        The sum, rounded to the dtype of `x`: what is normalised, and what the next layer adds to.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `rms_norm`.
    """
    if dtype is None:
        return _add_norm.call(x, residual, weight, bias, False, eps)
    return tuple(_quantised_norm(x, residual, weight, bias, False, eps, dtype))


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Add a residual and normalise the sum as `layer_norm` does, in two reads and two writes.

    Parameters
    ----------
    x, residual, weight, bias, eps, dtype
        As of `add_rms_norm`; `eps` is added to the variance.

    Returns
    -------
    y, scale, total : torch.Tensor
        As of `add_rms_norm`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `rms_norm`.
    """
    if dtype is None:
        return _add_norm.call(x, residual, weight, bias, True, eps)
    return tuple(_quantised_norm(x, residual, weight, bias, True, eps, dtype))


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
    return tuple(_norm_backward(x, dy, dtotal, weight, bias, False, eps))


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
    return tuple(_norm_backward(x, dy, dtotal, weight, bias, True, eps))
