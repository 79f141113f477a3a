# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/losses.py. It needs torch, Triton, NumPy, _call.py and _rows.py.
"""Cross entropy of logits, and of hidden states and the weight of a head: the loss and its gradient in one pass.

A row of N logits x with the class t has

    lse  = log(sum_j exp(x[j]))
    loss = w[t] ((1 - s) (lse - x[t]) + z lse**2) + s / N sum_j w[j] (lse - x[j])

with the weights w of classes, the smoothing s and the factor z, and the gradient

    dx[j] = exp(x[j] - lse) (w[t] (1 - s + 2 z lse) + s / N sum_k w[k]) - w[t] (1 - s) [j = t] - s / N w[j]

With a cap c, x is c tanh(l / c) of the logits l, and the gradient has the factor 1 - (x / c)**2. An ignored row has no
loss and no gradient, whatever it holds.

Fused: the cap, the maximum, exponentials and their sum, the logarithm, the choice of the class, smoothing, the
reduction over rows, and the gradient of all of it. For M rows, a chain of separate operations reads 6MN and writes 4MN
elements. The fused kernel reads MN and writes MN, and can write the gradient over the logits.

A row of up to 64 KiB in fp16 and bf16, or 128 KiB in float32, is held in the registers of one program. A wider row is
shared by several programs, see `_rows`. Limits: float64 rows of more than 4096 logits, and rows of more than 2**20, are
computed by torch. A tensor of an unusual layout is copied first.

For M hidden states h of K elements and a head W [N, K], the logits are h W^T + b, and

    dh = dx W    dW = dx^T h    db = sum of dx's rows

Some hidden states are taken at a time: their logits by a matmul, loss and gradient in place, and two more matmuls.
Thus the logits take the memory of some rows. The matmuls are cuBLAS's. In fp16 and bf16 each chunk of rows rounds the
gradient of the head once more. The gradient of the bias is that of one more element, 1, of each hidden state.

In fp16, the gradient of one logit among many is no normal number, even if the loss is scaled. Rows of many logits are
therefore raised, each by a power of two that leaves it room, and the matmuls lower their sums before rounding them.
"""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter

from ._call import (
    FLOATING,
    INTEGERS,
    INTERPRETED,
    Operator,
    _autocast,
    apply,
    capturing,
    contiguous,
    flag,
    gpu,
    integer,
    launch,
    lower,
    number,
    one_of,
    overlapping,
    recorder,
    shapes,
)
from ._call import accumulated as accumulated_in
from ._call import autocasts_in_graph as autocasts
from ._rows import (
    INTERPRETER,
    NEUTRAL_MAX_SUM,
    WIDEST,
    Config,
    Parts,
    Sharing,
    accumulated,
    aligned,
    contiguous_rows,
    fast_exp,
    fill,
    finite_or_zero,
    first_missing,
    first_that_fits,
    load_row,
    load_row_part,
    merge_max_sum,
    opaque_zero,
    pack,
    publish,
    row_constants,
    row_vectors,
    shared,
    store_chunk,
    store_row_part,
    wait_for,
)

__all__ = [
    "cross_entropy",
    "cross_entropy_eager",
    "cross_entropy_with_gradient",
    "linear_cross_entropy",
    "linear_cross_entropy_eager",
    "linear_cross_entropy_with_gradients",
]

# The unfused chains --------------------------------------------------------------------------------------------------


def cross_entropy_eager(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss and its gradient, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        M rows of N logits.
    target : torch.Tensor
        M classes.

    Returns
    -------
    loss : torch.Tensor
        A number.
    dx : torch.Tensor
        The gradient, of the shape and dtype of `x`.
    """
    rows = torch.arange(len(x), device=x.device)
    top = x.amax(-1, keepdim=True)  # read MN, write M
    shifted = x - top  # read MN + M, write MN
    e = shifted.exp()  # read MN, write MN
    total = e.sum(-1, keepdim=True)  # read MN, write M
    loss = (total.log()[:, 0] - shifted[rows, target]).mean()  # read and write some M
    p = e / total  # read MN + M, write MN
    p[rows, target] -= 1  # read and write some M
    return loss, p / len(x)  # read MN, write MN: in all read 6MN, write 4MN, and some M


def linear_cross_entropy_eager(h: Tensor, head: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss and its gradients from all logits at once: what chunks of rows save.

    Parameters
    ----------
    h : torch.Tensor
        M hidden states of K elements.
    head : torch.Tensor
        [N, K], the weight of each class.
    target : torch.Tensor
        M classes.

    Returns
    -------
    loss, dh, dhead : torch.Tensor
        A number, and the gradients of `h` and of `head`.
    """
    x = h @ head.T  # write MN
    p = torch.softmax(x.to(accumulated_in(x.dtype)), -1)  # read and write MN twice, in float32
    at = target[:, None]
    loss = -p.gather(1, at).log().mean()
    p.scatter_add_(1, at, torch.full_like(at, -1, dtype=p.dtype))
    dx = (p / len(h)).to(h.dtype)  # read and write MN twice
    return loss, dx @ head, dx.T @ h  # read MN twice


# Arithmetic of a row -------------------------------------------------------------------------------------------------

# In these functions a value of a row is a scalar, or [ROWS] where a program has several rows. AXIS is the axis of
# columns in a tile: 0, or 1 where there are several rows.


@triton.jit
def _tanh(u):
    """Tanh of what is not negative, from an exponential that never overflows.

    The exponential would leave small results no digits. They come from the polynomials of Cephes (netlib.org/cephes,
    tanhf.c and tanh.c).
    """
    e = fast_exp(-2.0 * u)
    z = u * u
    if u.dtype == tl.float64:
        p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
        q = ((z + 1.12811678491631932402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
        p = p / q
    else:
        p = (-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2
        p = (p * z + 1.33314422036e-1) * z - 3.33332819422e-1
    return tl.where(u < 0.625, u + u * (z * p), (1.0 - e) / (1.0 + e))


@triton.jit
def _softcap(x, CAP: tl.constexpr):
    """CAP tanh(x / CAP); a masked logit, -inf, stays -inf."""
    if CAP is not None:
        y = CAP * _tanh(tl.abs(x) / CAP)
        x = tl.where(x == float("-inf"), x, tl.where(x < 0, -y, y))
    return x


@triton.jit
def _softcap_backward(dx, x, CAP: tl.constexpr):
    """The gradient with respect to logits before the cap; `x` is capped."""
    if CAP is not None:
        u = x / CAP
        dx = tl.where(x == float("-inf"), 0.0, dx * ((1.0 - u) * (1.0 + u)))
    return dx


@triton.jit
def _factor_of(top):
    """log2(e), unless its product with a bfloat16 maximum overflows. Such elements are equal, or 2**119 apart."""
    return tl.where(tl.abs(top) < 1e38, 1.4426950408889634, 0.5)


@triton.jit
def _exp_from(x, top, HALF: tl.constexpr):
    """exp(x - top). In fp16 and bf16 this is one multiply-add an element, and the row needs `_rounding_of`."""
    if HALF:
        factor = _factor_of(top)
        return tl.exp2(tl.fma(x, factor, -(top * factor)))
    else:
        return fast_exp(x - top)


@triton.jit
def _rounding_of(top, HALF: tl.constexpr):
    """The factor that `_exp_from` lacks: 2 to the rounding error of the product with `top`, far from 1 at 65504."""
    if HALF:
        factor = _factor_of(top)
        return tl.exp2(-tl.fma(top, factor, -(top * factor)))
    else:
        return top * 0 + 1


@triton.jit
def _beside_tiles(value, AXIS: tl.constexpr):
    """A value of a row in a shape that is broadcast to tiles."""
    if AXIS == 1:
        return value[:, None]
    else:
        return value


@triton.jit
def _pack_pairs(x):
    """fp16 and bf16 elements of the last axis by pairs: 16 bits alone would each take a register."""
    if x.dtype.primitive_bitwidth == 16:
        x = x.to(tl.int16, bitcast=True)
        low, high = tl.split(tl.reshape(x, x.shape[:-1] + (x.shape[-1] // 2, 2)))  # noqa: RUF005
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        return x


@triton.jit
def _pack_chunks(chunks, CHUNKS: tl.constexpr):
    """A tuple of chunks whose elements are packed."""
    packed = ()
    for i in tl.static_range(CHUNKS):
        packed += (_pack_pairs(chunks[i]),)
    return packed


@triton.jit
def _convert(x, zero, TYPE: tl.constexpr, CAP: tl.constexpr):
    """A chunk, capped, in the type of the arithmetic. With another opaque `zero`, pairs are converted once more."""
    if x.dtype == tl.int32:
        if TYPE == tl.bfloat16:
            low = ((x ^ zero) << 16).to(tl.float32, bitcast=True)
            high = ((x ^ zero) & -65536).to(tl.float32, bitcast=True)
        else:
            x ^= zero
            low = x.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        x = tl.reshape(tl.join(low, high), x.shape[:-1] + (2 * x.shape[-1],))  # noqa: RUF005
    return _softcap(accumulated(x), CAP)


@triton.jit
def _zero_after(value, N, AXIS: tl.constexpr):
    """An opaque zero for `_convert`, known after a float32 value of each row."""
    return _beside_tiles(opaque_zero(N, value.to(tl.float32)).to(tl.int32), AXIS)


@triton.jit
def _max(chunks, TYPE: tl.constexpr, CAP: tl.constexpr, CHUNKS: tl.constexpr, AXIS: tl.constexpr):
    """The maximum of each row, capped. Chunks are combined first, so that threads are reduced across once."""
    tops = _convert(chunks[0], 0, TYPE, None)
    for i in tl.static_range(1, CHUNKS):
        tops = tl.maximum(tops, _convert(chunks[i], 0, TYPE, None))
    return _softcap(tl.max(tops, AXIS), CAP)


@triton.jit
def _smoothing_of(columns, own, every, weight_ptr):
    """The smoothing of classes by their weights; zero outside of the row. `every` is that of a class of weight 1."""
    if weight_ptr is None:
        return tl.where(own, every, 0.0)
    else:
        return every * tl.load(weight_ptr + columns, mask=own, other=0.0)


@triton.jit
def _sums(
    chunks, top, every, weight_ptr, N, low, high, TYPE: tl.constexpr,
    SMOOTHING: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Sums over the columns `low` to `high`: exp(x - top), smoothing times (x - top), and smoothing.

    Relative to the maximum of a whole row, no sum of smoothed logits cancels or overflows.
    """
    HALF: tl.constexpr = TYPE.primitive_bitwidth == 16
    top_tile = _beside_tiles(top, AXIS)
    zero = _zero_after(top, N, AXIS)
    totals = tl.zeros_like(_convert(chunks[0], zero, TYPE, None))
    spreads = tl.zeros_like(totals)
    shares = tl.zeros([BLOCK], top.dtype)
    for i in tl.static_range(CHUNKS):
        x = _convert(chunks[i], zero, TYPE, CAP)
        totals += _exp_from(x, top_tile, HALF)
        if SMOOTHING != 0.0:
            at = i * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
            own = (at >= low) & (at < high)
            share = _smoothing_of(at - low, own, every, weight_ptr)
            spreads += tl.where(own, (x - top_tile) * share, 0.0)
            shares += share
    return tl.sum(totals, AXIS) * _rounding_of(top, HALF), tl.sum(spreads, AXIS), tl.sum(shares, 0)


@triton.jit
def _factors(scale, classes, N, weight, lse, SMOOTHING: tl.constexpr, Z: tl.constexpr):
    """What the gradient multiplies probabilities by, subtracts at the class, and at every class by its weight.

    The last factor is the third without the scale, as the loss has it.
    """
    every = tl.zeros_like(weight)
    if SMOOTHING != 0.0:
        every = (every + SMOOTHING) / N
    hit = weight * (1.0 - SMOOTHING)
    of_p = hit + every * classes
    if Z != 0.0:
        of_p += 2.0 * Z * weight * lse
    return scale * of_p, scale * hit, scale * every, every


@triton.jit
def _loss(x_t, top, log_total, weight, every, classes, spread, SMOOTHING: tl.constexpr, Z: tl.constexpr):
    """The loss of a row; `spread` is the second sum of `_sums`, relative to the row's maximum."""
    lse = top + log_total
    loss = weight * (1.0 - SMOOTHING) * ((top - x_t) + log_total)
    if SMOOTHING != 0.0:
        loss += every * classes * log_total - spread
    if Z != 0.0:
        loss += Z * weight * lse * lse
    return loss


@triton.jit
def _gradient(
    x, columns, own, top, of_p, every, weight_ptr,
    HALF: tl.constexpr, SMOOTHING: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The gradient of some capped logits, as if none were the class. `of_p` multiplies exponentials."""
    dx = _exp_from(x, top, HALF) * of_p
    if SMOOTHING != 0.0:
        if weight_ptr is None:
            dx -= every
        else:
            dx -= every * tl.load(weight_ptr + columns, mask=own, other=0.0)
    return _softcap_backward(dx, x, CAP)


# Targets -------------------------------------------------------------------------------------------------------------


@triton.jit
def _targets(target_ptr, weight_ptr, rows, live, N, IGNORE, FLOAT: tl.constexpr):
    """The classes of rows, which rows count, and the weights of their classes: NaN if there is no such class."""
    target = tl.load(target_ptr + rows, mask=live)
    known = (target >= 0) & (target < N)
    counts = target != IGNORE if live is None else live & (target != IGNORE)
    if weight_ptr is None:
        weight = tl.where(known, 1.0, float("nan")).to(FLOAT)
    else:
        weight = tl.load(weight_ptr + target, mask=counts & known, other=float("nan"))
    return tl.where(known, target, 0).to(tl.int32), counts, weight


@triton.jit
def _sum_weights(target_ptr, weight_ptr, first, step, M, N, IGNORE, FLOAT: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the weights of targets: BLOCK from `first` on, and again after each `step`."""
    sums = tl.zeros([BLOCK], FLOAT)
    for start in range(first, M, step):
        rows = start + tl.arange(0, BLOCK)  # [BLOCK]
        _, counts, weight = _targets(target_ptr, weight_ptr, rows, rows < M, N, IGNORE, FLOAT)
        sums += tl.where(counts, weight, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _divisor(sums_ptr, target_ptr, weight_ptr, M, N, IGNORE, COUNTS: tl.constexpr, FLOAT: tl.constexpr):
    """The divisor of a mean: the sum of COUNTS sums, or without any of all weights of targets."""
    if COUNTS > 0:
        return tl.sum(tl.load(sums_ptr + tl.arange(0, COUNTS)), 0)
    else:
        return _sum_weights(target_ptr, weight_ptr, 0, 128, M, N, IGNORE, FLOAT, 128)


@triton.jit
def _scale_of(
    scale_ptr, sums_ptr, classes_ptr, target_ptr, weight_ptr, rows, live, SCALE_STEP, M, N, IGNORE, weight,
    COUNTS: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """The factor of the gradients of rows, and the sum of the weights of all classes."""
    none = tl.zeros_like(weight)
    scale = none + 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + rows * SCALE_STEP, mask=live).to(weight.dtype)
    if MEAN:
        scale = scale / _divisor(sums_ptr, target_ptr, weight_ptr, M, N, IGNORE, COUNTS, weight.dtype)
    classes = none + N
    if classes_ptr is not None:
        classes = none + tl.load(classes_ptr)
    return scale, classes


@triton.jit
def _sum_targets(
    words_ptr, sums_ptr, target_ptr, weight_ptr, WORDS, M, N, IGNORE,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Zeros for the workspace, and by each of COUNTS programs the weights of its share of the targets."""
    fill(words_ptr, WORDS, BLOCK, EARLY)
    program = tl.program_id(0)
    if COUNTS > 0:
        if program < COUNTS:
            FLOAT: tl.constexpr = sums_ptr.dtype.element_ty
            step = COUNTS * BLOCK
            total = _sum_weights(target_ptr, weight_ptr, program * BLOCK, step, M, N, IGNORE, FLOAT, BLOCK)
            tl.store(sums_ptr + program, total)


@triton.jit
def _sum_losses(
    loss_ptr, left_ptr, sums_ptr, target_ptr, weight_ptr, COUNT, M, N, IGNORE,
    COUNTS: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum or the mean of what programs have left, by one program, always in the same order."""
    sums = tl.zeros([BLOCK], left_ptr.dtype.element_ty)
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)  # [BLOCK]
        sums += tl.load(left_ptr + at, mask=at < COUNT, other=0.0)
    loss = tl.sum(sums, 0)
    if MEAN:
        loss = loss / _divisor(sums_ptr, target_ptr, weight_ptr, M, N, IGNORE, COUNTS, loss.dtype)
    tl.store(loss_ptr, loss)


# Rows in registers ---------------------------------------------------------------------------------------------------


@triton.jit
def _store_rows(
    dx_ptr, chunks, target, x_t, counts, live, top, of_p, hit, every, weight_ptr, N, TYPE: tl.constexpr,
    SMOOTHING: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The gradients of rows at `dx_ptr` [ROWS], which may be where the logits are."""
    HALF: tl.constexpr = TYPE.primitive_bitwidth == 16
    zero = _zero_after(of_p, N, 1)
    tl.debug_barrier()  # all logits are loaded: they may be overwritten
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
        x = _convert(chunks[i], zero, TYPE, CAP)
        dx = _gradient(
            x, at, at < N, top[:, None], of_p[:, None], every[:, None], weight_ptr, HALF, SMOOTHING, CAP
        )  # fmt: skip
        dx = tl.where(counts[:, None], dx, 0.0)
        store_chunk(dx_ptr[:, None], dx, i, 1, N, live[:, None], BLOCK, CHUNKS)  # write MN
    # The class once more, after everything else: cheaper than a comparison at every column.
    there = _gradient(x_t, target, counts, top, of_p, every, weight_ptr, HALF, SMOOTHING, CAP)
    there -= _softcap_backward(hit, x_t, CAP)
    tl.debug_barrier()
    tl.store(dx_ptr + target, there, mask=counts)


@triton.jit
def _cross_entropy_rows(
    left_ptr, dx_ptr, x_ptr, target_ptr, weight_ptr, scale_ptr, sums_ptr, classes_ptr,
    M, N, dx_stride, x_stride, SCALE_STEP, IGNORE,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, COUNTS: tl.constexpr,
    MEAN: tl.constexpr, EACH: tl.constexpr, SMOOTHING: tl.constexpr, Z: tl.constexpr, CAP: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """ROWS rows at a time, held as CHUNKS tiles. EACH: the loss of each row is stored, otherwise a program's sum."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    FLOAT: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    N = N * ALIGN
    losses = tl.zeros([ROWS], FLOAT)
    first = tl.program_id(0) * ROWS
    # A row of several chunks takes most registers: its program has no other row, and no loop.
    end = M if CHUNKS == 1 else first + 1
    step = tl.num_programs(0) * ROWS if CHUNKS == 1 else 1
    for start in range(first, end, step):
        rows = tl.zeros([], tl.int64) + start + tl.arange(0, ROWS)  # [ROWS]
        live = rows < M
        at = x_ptr + rows * (x_stride * ALIGN)
        x = load_row(at[:, None], 1, N, live[:, None], float("-inf"), BLOCK, CHUNKS)  # read MN
        if CHUNKS > 1:
            x = _pack_chunks(x, CHUNKS)
        target, counts, weight = _targets(target_ptr, weight_ptr, rows, live, N, IGNORE, FLOAT)
        x_t = _softcap(accumulated(tl.load(at + target, mask=counts, other=0.0)), CAP)
        top = _max(x, TYPE, CAP, CHUNKS, 1)  # [ROWS]
        every = (tl.zeros([], FLOAT) + SMOOTHING) / N
        total, spread, _ = _sums(x, top, every, weight_ptr, N, 0, N, TYPE, SMOOTHING, CAP, BLOCK, CHUNKS, 1)
        log_total = tl.log(total)
        if LATE:
            tl.extra.cuda.gdc_wait()  # for the sums of weights
        scale, classes = _scale_of(
            scale_ptr, sums_ptr, classes_ptr, target_ptr, weight_ptr, rows, live, SCALE_STEP, M, N, IGNORE, weight,
            COUNTS, MEAN,
        )  # fmt: skip
        of_p, hit, scaled, every = _factors(scale, classes, N, weight, top + log_total, SMOOTHING, Z)
        loss = tl.where(counts, _loss(x_t, top, log_total, weight, every, classes, spread, SMOOTHING, Z), 0.0)
        if EACH:
            tl.store(left_ptr + rows, loss, mask=live)
        losses += loss
        if dx_ptr is not None:
            of_p *= _rounding_of(top, TYPE.primitive_bitwidth == 16) / total
            _store_rows(
                dx_ptr + rows * (dx_stride * ALIGN), x, target, x_t, counts, live, top, of_p, hit, scaled, weight_ptr,
                N, TYPE, SMOOTHING, CAP, BLOCK, CHUNKS,
            )  # fmt: skip
    if not EACH:
        tl.store(left_ptr + tl.program_id(0), tl.sum(losses, 0))


# Shared rows ---------------------------------------------------------------------------------------------------------


@triton.jit
def _load_pairs(x_ptr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements at `x_ptr` as `_pack_pairs` packs them. The compiler is slow with what packing takes."""
    if VEC > 1 and x_ptr.dtype.element_ty.primitive_bitwidth == 16:
        return tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + tl.arange(0, BLOCK // 2))
    else:
        return _pack_pairs(tl.load(x_ptr + tl.arange(0, BLOCK)))


@triton.jit
def _load_part(
    x_ptr, begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, INNER: tl.constexpr
):  # fmt: skip
    """A part of the row at `begin` as CHUNKS tiles, and from which to below which of its elements belong to the row.

    In every part, the chunks from 1 to below INNER are inside of the row.
    """
    at, low, high = row_vectors(begin, N, part * SPAN, SPAN, VEC)
    chunks = ()
    for i in tl.static_range(CHUNKS):
        chunk_ptr = x_ptr + at + i * BLOCK
        if i > 0 and i < INNER:
            chunks += (_load_pairs(chunk_ptr, VEC, BLOCK),)
        else:
            x = load_row_part(chunk_ptr, low - i * BLOCK, high - i * BLOCK, float("-inf"), VEC, BLOCK)
            chunks += (_pack_pairs(x),)
    return chunks, low, high


@triton.jit
def _part_word(
    x_ptr, begin, N, part, SPAN, CAP: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """The word of a part, by the arithmetic of the program that has the part.

    It is rarely needed. So it reads the part twice, in loops, which compile faster and take fewer registers.
    """
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    HALF: tl.constexpr = TYPE.primitive_bitwidth == 16
    at, low, high = row_vectors(begin, N, part * SPAN, SPAN, VEC)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in range(CHUNKS):
        x = load_row_part(x_ptr + at + i * BLOCK, low - i * BLOCK, high - i * BLOCK, float("-inf"), VEC, BLOCK)
        tops = tl.maximum(tops, _convert(_pack_pairs(x), 0, TYPE, None))
    top = _softcap(tl.max(tops, 0), CAP)
    base = finite_or_zero(top)
    totals = tl.zeros([BLOCK], tl.float32)
    for i in range(CHUNKS):
        x = load_row_part(x_ptr + at + i * BLOCK, low - i * BLOCK, high - i * BLOCK, float("-inf"), VEC, BLOCK)
        totals += _exp_from(_convert(_pack_pairs(x), 0, TYPE, CAP), base, HALF)
    return pack(top, tl.sum(totals, 0) * _rounding_of(base, HALF))


@triton.jit
def _store_part(
    dx_ptr, chunks, low, high, top, of_p, every, weight_ptr, N, TYPE: tl.constexpr, SMOOTHING: tl.constexpr,
    CAP: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """The gradient of a part at `dx_ptr`."""
    HALF: tl.constexpr = TYPE.primitive_bitwidth == 16
    zero = _zero_after(of_p, N, 0)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK + columns
        own = (at >= low) & (at < high)
        x = _convert(chunks[i], zero, TYPE, CAP)
        dx = _gradient(x, at - low, own, top, of_p, every, weight_ptr, HALF, SMOOTHING, CAP)
        here = dx_ptr + i * BLOCK
        if i > 0 and i < INNER:
            tl.store(here + columns, dx)  # write MN
        else:
            store_row_part(here, dx, columns, low - i * BLOCK, tl.minimum(high - i * BLOCK, BLOCK), VEC)


@triton.jit(do_not_specialize=["SPAN", "PARTS"])
def _cross_entropy_shared(
    left_ptr, dx_ptr, x_ptr, workspace_ptr, target_ptr, weight_ptr, scale_ptr, sums_ptr, classes_ptr,
    N, dx_stride, x_stride, SPAN, PARTS, SCALE_STEP, IGNORE,
    VEC: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, INNER: tl.constexpr, LANES: tl.constexpr,
    TRIES: tl.constexpr, COUNTS: tl.constexpr, MEAN: tl.constexpr, SMOOTHING: tl.constexpr, Z: tl.constexpr,
    CAP: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """A row shared by PARTS programs, each of which holds SPAN vectors as CHUNKS tiles."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    HALF: tl.constexpr = TYPE.primitive_bitwidth == 16
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    SPAN = SPAN * VEC
    begin = row * x_stride
    x, low, high = _load_part(x_ptr, begin, N, part, SPAN, VEC, BLOCK, CHUNKS, INNER)  # read MN
    target, counts, weight = _targets(target_ptr, weight_ptr, row, None, N, IGNORE, tl.float32)
    mine = (target + low >= 0) & (target + low < high)
    x_t = _softcap(accumulated(tl.load(x_ptr + begin + target)), CAP)  # used by the program of this element only
    own_top = _max(x, TYPE, CAP, CHUNKS, 0)
    every = (tl.zeros([], tl.float32) + SMOOTHING) / N
    total, spread, shares = _sums(
        x, finite_or_zero(own_top), every, weight_ptr, N, low, high, TYPE, SMOOTHING, CAP, BLOCK, CHUNKS, 0
    )
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the workspace's zeros and the sums of weights; the part is already here
    dx_at, _, _ = row_vectors(row * dx_stride, N, part * SPAN, SPAN, VEC)
    loss = tl.zeros([], tl.float32)
    if counts:
        workspace_ptr += row * PARTS
        publish(workspace_ptr + part, pack(own_top, total))
        scale, classes = _scale_of(
            scale_ptr, sums_ptr, classes_ptr, target_ptr, weight_ptr, row, None, SCALE_STEP,
            tl.num_programs(0) // PARTS, N, IGNORE, weight, COUNTS, MEAN,
        )  # fmt: skip
        lanes = tl.arange(0, LANES)  # [LANES]
        words, missing = wait_for(workspace_ptr, lanes, PARTS, NEUTRAL_MAX_SUM, TRIES)
        while missing < LANES:
            word = _part_word(x_ptr, begin, N, missing, SPAN, CAP, VEC, BLOCK, CHUNKS)
            # If the word was published meanwhile, it counts: its logits may be overwritten.
            found = tl.atomic_cas(workspace_ptr + missing, tl.zeros([], tl.int64), word, sem="acq_rel")
            words = tl.where(lanes == missing, tl.where(found == 0, word, found), words)
            missing = first_missing(words, lanes)
        top, total = merge_max_sum(words)
        log_total = tl.log(total)
        of_p, hit, scaled, every = _factors(scale, classes, N, weight, top + log_total, SMOOTHING, Z)
        if mine:
            loss = _loss(x_t, top, log_total, weight, every, classes, 0.0, SMOOTHING, Z)
        if SMOOTHING != 0.0:
            loss -= spread + (finite_or_zero(own_top) - top) * shares
        if dx_ptr is not None:
            of_p *= _rounding_of(top, HALF) / total
            _store_part(
                dx_ptr + dx_at, x, low, high, top, of_p, scaled, weight_ptr, N, TYPE, SMOOTHING, CAP, VEC, BLOCK,
                CHUNKS, INNER,
            )  # fmt: skip
            if mine:
                # The class once more, after everything else: cheaper than a comparison at every column.
                there = _gradient(x_t, target, mine, top, of_p, scaled, weight_ptr, HALF, SMOOTHING, CAP)
                there -= _softcap_backward(hit, x_t, CAP)
                tl.debug_barrier()
                tl.store(dx_ptr + row * dx_stride + target, there)
    elif dx_ptr is not None:
        for start in range(0, high, BLOCK):
            zeros = tl.zeros([BLOCK], tl.float32)
            to = dx_ptr + dx_at + start
            store_row_part(to, zeros, tl.arange(0, BLOCK), low - start, tl.minimum(high - start, BLOCK), VEC)
    if SMOOTHING != 0.0:
        tl.store(left_ptr + tl.program_id(0), loss)
    elif mine:
        tl.store(left_ptr + row, loss)


@triton.jit
def _scale_rows(dx_ptrs, scale_ptr, rows, columns, strides, SCALE_STEP, BLOCK: tl.constexpr):
    """Rows of several matrices times a factor, in place. If one factor of 1 is for all, nothing is read or written."""
    scale = tl.load(scale_ptr)
    if (SCALE_STEP != 0) | (scale != 1.0):
        for i in tl.static_range(len(dx_ptrs)):
            across = tl.cdiv(columns[i], BLOCK)
            for tile in range(tl.program_id(0), rows[i] * across, tl.num_programs(0)):
                row = (tile // across).to(tl.int64)
                at = tile % across * BLOCK + tl.arange(0, BLOCK)
                scale = tl.load(scale_ptr + row * SCALE_STEP)
                dx_at = dx_ptrs[i] + row * strides[i] + at
                dx = tl.load(dx_at, mask=at < columns[i]).to(scale.dtype)
                dx = tl.where(dx == 0, dx, dx * scale)  # an ignored row has no gradient, whatever its factor
                tl.store(dx_at, dx, mask=at < columns[i])


# The head ------------------------------------------------------------------------------------------------------------


@triton.jit
def _raise_rows(
    raised_ptr, rest_ptr, target_ptr, weight_ptr, scale_ptr, sums_ptr, classes_ptr, M, N, SCALE_STEP, IGNORE,
    COUNTS: tl.constexpr, MEAN: tl.constexpr, SMOOTHING: tl.constexpr, Z: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The scales of rows times MOST or a smaller power of two, and what is missing to MOST."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = rows < M
    _, counts, weight = _targets(target_ptr, weight_ptr, rows, live, N, IGNORE, tl.float32)
    scale, classes = _scale_of(
        scale_ptr, sums_ptr, classes_ptr, target_ptr, weight_ptr, rows, live, SCALE_STEP, M, N, IGNORE, weight, COUNTS,
        MEAN,
    )  # fmt: skip
    # No logarithm of a sum is far above what fp16 holds. Nothing in a row is above the sum of its factors.
    of_p, hit, every, _ = _factors(scale, classes, N, weight, tl.full([BLOCK], 65536.0, tl.float32), SMOOTHING, Z)
    room = 32768.0 / (tl.abs(of_p) + tl.abs(hit) + tl.abs(every * classes))
    power = (room.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # The rest raises hidden states: where there is no gradient, they must not become infinite.
    times = tl.where(counts & (room < MOST), tl.where(room >= 1.0, power, 1.0), MOST)
    given = 1.0
    if scale_ptr is not None:
        given = tl.load(scale_ptr + rows * SCALE_STEP, mask=live).to(tl.float32)
    tl.store(raised_ptr + rows, given * times, mask=live)
    tl.store(rest_ptr + rows, MOST / times, mask=live)


@triton.jit
def _copy_states(
    out_ptr, x_ptr, rest_ptr, target_ptr, M, K, HEIGHT, WIDTH, out_stride, x_stride, IGNORE,
    ALIGN: tl.constexpr, FACTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy [M, K] elements into [HEIGHT, WIDTH], followed by zeros; times FACTOR and a factor of each row, if given.

    With targets, ignored rows become zero too.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    counts = rows < M
    if target_ptr is not None:
        counts &= tl.load(target_ptr + rows, mask=counts, other=IGNORE) != IGNORE
    own = (rows < HEIGHT) & (columns < WIDTH * ALIGN)  # [ROWS, BLOCK]
    x_ptr += rows * (x_stride * ALIGN) + columns
    x = tl.load(x_ptr, mask=counts & (columns < K * ALIGN), other=0.0)
    if rest_ptr is not None:  # powers of two, which add no rounding
        x = x.to(tl.float32) * (tl.load(rest_ptr + rows, mask=counts, other=0.0) * FACTOR)
    tl.store(out_ptr + rows * (out_stride * ALIGN) + columns, x, mask=own)


@triton.jit
def _cross_entropy_ignored(
    dh_ptr, h_ptr, spoiled_ptr, target_ptr, M, K, dh_stride, h_stride, IGNORE,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros for the gradients of ignored rows. If hidden states are given, note whether one of these is not finite."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    ignored = (tl.load(target_ptr + rows, mask=rows < M, other=IGNORE) == IGNORE) & (rows < M)
    if tl.max(ignored.to(tl.int32)) > 0:
        most = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, K * ALIGN, BLOCK):
            columns = start + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
            own = ignored & (columns < K * ALIGN)
            if h_ptr is not None:
                h = tl.load(h_ptr + rows * (h_stride * ALIGN) + columns, mask=own, other=0.0).to(tl.float32)
                most = tl.where(tl.abs(h) < float("inf"), most, 1.0)
            zeros = tl.zeros([ROWS, BLOCK], dh_ptr.dtype.element_ty)
            tl.store(dh_ptr + rows * (dh_stride * ALIGN) + columns, zeros, mask=own)
        if h_ptr is not None:
            if tl.max(most) > 0:
                tl.store(spoiled_ptr, 1)


@triton.jit
def _cross_entropy_head(
    dhead_ptr, spoiled_ptr, dx_ptr, h_ptr, target_ptr, M, N, K, dhead_stride, dx_stride, h_stride, IGNORE,
    WIDE: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the head without ignored rows, if one of these is not finite and has made it NaN."""
    if tl.load(spoiled_ptr) != 0:
        across = tl.cdiv(K, BLOCK)
        for tile in range(tl.program_id(0), tl.cdiv(N, CLASSES) * across, tl.num_programs(0)):
            classes = (tile // across).to(tl.int64) * CLASSES + tl.arange(0, CLASSES)[:, None]  # [CLASSES, 1]
            columns = tile % across * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
            sums = tl.zeros([CLASSES, BLOCK], tl.float32)
            for start in range(0, M, ROWS):
                rows = tl.zeros([], tl.int64) + start + tl.arange(0, ROWS)  # [ROWS]
                counts = tl.load(target_ptr + rows, mask=rows < M, other=IGNORE) != IGNORE
                known, own = counts[None, :] & (classes < N), counts[:, None] & (columns < K)
                dx = tl.load(dx_ptr + rows[None, :] * dx_stride + classes, mask=known, other=0.0)
                h = tl.load(h_ptr + rows[:, None] * h_stride + columns, mask=own, other=0.0)
                if WIDE:
                    dx = dx.to(tl.float32)
                    h = h.to(tl.float32)
                sums = tl.dot(dx, h, sums, input_precision="ieee")
            tl.store(dhead_ptr + classes * dhead_stride + columns, sums, mask=(classes < N) & (columns < K))


# Launch configs ------------------------------------------------------------------------------------------------------

#: For each element size, the first line whose limit holds a row; tuned on an H200. Programs of few warps wait in turn,
#: and what they hold of a row takes registers: wider rows take more warps, and several programs fit a multiprocessor.
_ROWS: Mapping[int, Sequence[Config]] = {  # bytes of a row, columns of a chunk, warps, elements of a program, registers
    2: (
        Config(2048, 1024, 1, 512), Config(4096, 2048, 2), Config(8192, 4096, 4), Config(32768, 2048, 4),
        Config(65536, 4096, 16, registers=64),
    ),
    4: (
        Config(2048, 512, 1, 512), Config(4096, 1024, 2), Config(8192, 2048, 4), Config(32768, 4096, 8),
        Config(131072, 4096, 16),
    ),
    8: (
        Config(2048, 256, 1, 128), Config(4096, 512, 2), Config(8192, 1024, 4), Config(16384, 2048, 8),
        Config(32768, 4096, 16),
    ),
}  # fmt: skip
_PARTS: Mapping[int, Sequence[Parts]] = {  # bytes of a row, columns of a part, warps, registers of a thread
    2: (Parts(2**21, 22528, 4, 128),),
    4: (Parts(2**22, 8192, 4, 128),),
    8: (),
}
#: The columns of a chunk of a part.
_CHUNK = 1024
#: Rows that are wider than this, and do not begin at whole vectors, are shared: their parts are loaded by vectors.
_UNALIGNED = 4096
#: A program leaves the sum of its rows' losses, and one program adds these up: it must not be left too many.
_MOST_PROGRAMS = 16384
#: The targets whose weights each program sums itself, and those that the last program does; more take another launch.
_FEW_TARGETS, _MORE_TARGETS = 256, 4096


class _Launch(NamedTuple):
    """How rows of logits are launched: in registers, or shared if there are `parts`."""

    programs: int
    constants: dict[str, Any]
    parts: int = 0
    span: int = 0  # vectors of a part


def _launch_config(x: Tensor, dx: Tensor | None) -> _Launch | None:
    """The launch config for logits and, if wanted, their gradient; None if torch computes them."""
    (m, n), size = x.shape, x.element_size()
    if n > WIDEST:
        return None
    vec = 16 // size
    tensors = [x] if dx is None or dx is x else [x, dx]
    on_vectors = all(t.data_ptr() % 16 == 0 for t in tensors)
    config = INTERPRETER if INTERPRETED else first_that_fits(_ROWS, n, size)
    parts = first_that_fits(_PARTS, n, size)
    if not INTERPRETED and n > _UNALIGNED and parts is not None and not (on_vectors and aligned(n, *tensors) == vec):
        config = None
    if config is not None:
        # Not fewer rows of a program for few rows: the compiler would add up a row in another order.
        constants = row_constants(config, n, m if INTERPRETED else max(1, config.elements))
        programs = triton.cdiv(m, constants["ROWS"])
        return _Launch(min(programs, _MOST_PROGRAMS) if constants["CHUNKS"] == 1 else programs, constants)
    if parts is None:
        return None
    vec = vec if on_vectors and all((x.stride(0) - t.stride(0)) % vec == 0 for t in tensors) else 1
    share: Sharing = shared(parts, n if x.stride(0) % vec == 0 else n + vec - 1, size, vec)
    span = share.span * vec
    inner = max(0, n - (share.parts - 1) * span) // _CHUNK  # chunks of the last part, which is the shortest
    chunks = {"BLOCK": _CHUNK, "CHUNKS": triton.cdiv(span, _CHUNK), "INNER": inner}
    return _Launch(m * share.parts, share.constants | chunks, share.parts, share.span)


# Launchers -----------------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """The terms of a loss, besides logits and classes."""

    weight: Tensor | None
    reduction: str
    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float | None

    def of(self, x: Tensor) -> Terms:
        """With contiguous weights in the dtype of the arithmetic."""
        if self.weight is None:
            return self
        wide = accumulated_in(x.dtype)
        weight = self.weight if self.weight.dtype == wide else apply(Tensor.to, self.weight, wide)
        return self._replace(weight=contiguous(weight))


#: The same in the schema of an operator.
_TERMS = "Tensor target, Tensor? weight, str reduction, SymInt ignore_index, float smoothing, float z, float? cap"


class _Known(NamedTuple):
    """What is known before the first row."""

    sums: Tensor | None  # of the weights of targets, by shares of these
    counts: int  # how many; without any, kernels sum the weights themselves
    words: Tensor | None  # of the workspace, zeros
    classes: Tensor | None  # the sum of the weights of classes
    late: dict[str, bool]


def _line(x: Tensor) -> Tensor:
    """A tensor with one axis."""
    return contiguous(x).view(-1)


def _loss_memory(x: Tensor, target: Tensor, reduction: str) -> Tensor:
    """Memory for a loss, or for one of each target."""
    return x.new_empty(target.shape if reduction == "none" else (), dtype=accumulated_in(x.dtype))


def _prepare(x: Tensor, target: Tensor, terms: Terms, words: int, few: int) -> _Known:
    """Zero `words` words, and sum weights: of classes, and for a mean those of more than `few` targets."""
    smoothed = terms.smoothing and terms.weight is not None
    classes = apply(torch.sum, terms.weight) if smoothed else None
    counts = 0
    if terms.reduction == "mean" and len(target) > few:
        counts = min(64, triton.next_power_of_2(triton.cdiv(max(1, len(target)), 16384)))
    if not counts and not words:
        return _Known(None, 0, None, classes, {})
    sums = x.new_empty((counts,), dtype=accumulated_in(x.dtype)) if counts else None
    zeros = x.new_empty((words,), dtype=torch.int64) if words else None
    early = overlapping(x.device)
    launch(
        _sum_targets, (max(counts, triton.cdiv(words, 4096)),), zeros if words else sums, sums, target, terms.weight,
        words, len(target), x.shape[1], terms.ignore_index, COUNTS=counts, BLOCK=4096, EARLY=bool(early), num_warps=16,
    )  # fmt: skip
    return _Known(sums, counts, zeros, classes, early)


def _few_targets(config: _Launch | None, gradients: Any) -> int:
    """The targets whose weights are not summed ahead; those of shared rows are, by the launch that zeros words."""
    return -1 if config is None or config.parts else _MORE_TARGETS if gradients is None else _FEW_TARGETS


def _left_shape(config: _Launch | None, m: int, terms: Terms, each: bool) -> tuple[int, ...]:
    """The shape of what a kernel leaves: a loss of each row, of each part if losses are smoothed, or of a program."""
    if config is not None and config.parts > 1 and terms.smoothing:
        return (m, config.parts)
    return (m,) if each or config is None or config.parts else (config.programs,)


def _launch_rows(
    left: Tensor, dx: Tensor | None, x: Tensor, target: Tensor, scale: Tensor | None, terms: Terms, known: _Known,
    config: _Launch | None,
) -> None:  # fmt: skip
    """Find losses of rows, and their gradients."""
    m, n = x.shape
    if not m:
        return
    scaled = terms.smoothing, terms.z_loss, terms.softcap
    mean = terms.reduction == "mean" and dx is not None
    if config is None:
        sums = known.sums if mean else None
        apply(_torch_rows, left, dx, x, target, terms.weight, scale, sums, terms.ignore_index, *scaled)
        return
    common = {
        "COUNTS": known.counts, "MEAN": mean, "SMOOTHING": terms.smoothing, "Z": terms.z_loss, "CAP": terms.softcap,
        "LATE": bool(known.late), **config.constants, **known.late,
    }  # fmt: skip
    given = target, terms.weight, scale, known.sums, known.classes
    strides = (dx.stride(0) if dx is not None else 0, x.stride(0))
    step = scale.stride(0) if scale is not None and scale.dim() else 0
    if config.parts:
        launch(
            _cross_entropy_shared, (m * config.parts,), left, dx, x, known.words, *given, n, *strides, config.span,
            config.parts, step, terms.ignore_index, **common,
        )  # fmt: skip
        return
    align = aligned(n, x, dx)
    programs = min(triton.cdiv(m, common["ROWS"]), config.programs)  # a chunk of hidden states may be the last
    launch(
        _cross_entropy_rows, (programs,), left, dx, x, *given, m, n // align, *(s // align for s in strides), step,
        terms.ignore_index, ALIGN=align, EACH=len(left) == m, **common,
    )  # fmt: skip


def _torch_rows(
    losses: Tensor, dx: Tensor | None, x: Tensor, target: Tensor, weight: Tensor | None, scale: Tensor | None,
    sums: Tensor | None, ignored: int, smoothing: float, z_loss: float, cap: float | None,
) -> None:  # fmt: skip
    """The same for rows that no kernel holds, by operations of torch."""
    n = x.shape[1]
    x = x.to(losses.dtype)
    if cap is not None:
        x = torch.where(x == -math.inf, x, cap * torch.tanh(x / cap))
    bent = None if cap is None else torch.where(x == -math.inf, 0.0, (1 - x / cap) * (1 + x / cap))
    counts, known = target != ignored, (target >= 0) & (target < n)
    at = torch.where(known, target, 0).long()
    weights = x.new_ones(n) if weight is None else weight
    weight = torch.where(known, weights[at], math.nan)
    top = x.amax(1)
    shifted = x - torch.where(top == -math.inf, 0.0, top)[:, None]
    log_total = torch.logsumexp(shifted, 1)
    lse, every = top + log_total, smoothing / n * weights
    loss = weight * (1 - smoothing) * (log_total - shifted.gather(1, at[:, None])[:, 0])
    if z_loss:  # otherwise a square may be infinite, and its product with 0 NaN
        loss += weight * z_loss * lse**2
    if smoothing:
        loss += ((log_total[:, None] - shifted) * every).sum(1)
    losses.copy_(torch.where(counts, loss, 0.0))
    if dx is None:
        return
    of_p = weight * (1 - smoothing + 2 * z_loss * lse) + every.sum()
    found = torch.exp(shifted - log_total[:, None]) * of_p[:, None] - every
    found.scatter_add_(1, at[:, None], (weight * (smoothing - 1))[:, None])
    for factor in (bent, None if scale is None else scale.reshape(-1, 1), None if sums is None else 1 / sums.sum()):
        if factor is not None:
            found *= factor
    dx.copy_(torch.where(counts[:, None], found, 0.0))


def _reduce(loss: Tensor, left: Tensor, target: Tensor, terms: Terms, known: _Known, n: int) -> None:
    """The loss of all rows from what kernels have left."""
    if terms.reduction == "none":
        if left.dim() > 1:
            apply(torch.sum, left, 1, out=loss)
        return
    mean = terms.reduction == "mean"
    most = max(left.numel(), len(target) if mean and not known.counts else 0)
    block, warps = (4096, 16) if most > 1024 else (1024, 4)
    launch(
        _sum_losses, (1,), loss, left, known.sums, target, terms.weight, left.numel(), len(target), n,
        terms.ignore_index, COUNTS=known.counts, MEAN=mean, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _entropy_into(
    loss: Tensor, dx: Tensor | None, x: Tensor, target: Tensor, scale: Tensor | None, terms: Terms
) -> None:
    """The loss of logits, and their gradient, which may be written over them."""
    over = dx is x
    loss, x, target, terms = _line(loss), contiguous_rows(x), _line(target), terms.of(x)
    dx = x if over else None if dx is None else contiguous_rows(dx)
    scale = _line(scale) if scale is not None and scale.dim() > 1 else scale
    config = _launch_config(x, dx)
    few = _few_targets(config, dx)
    known = _prepare(x, target, terms, config.programs if config is not None and config.parts else 0, few)
    each = terms.reduction == "none"
    shape = _left_shape(config, len(x), terms, each)
    left = loss if each and len(shape) == 1 else x.new_empty(shape, dtype=loss.dtype)
    _launch_rows(left, dx, x, target, scale, terms, known, config)
    _reduce(loss, left, target, terms, known, x.shape[1])


def _scale_into(_: None, *given: Tensor | None) -> None:
    """Multiply gradients by a number, or rows by one each. A single number 1 costs no more than the launch."""
    *gradients, scale = (t for t in given if t is not None)
    gradients = [dx if dx.dim() == 2 else dx.view(-1, dx.shape[-1]) for dx in gradients if dx.numel()]
    if not gradients:
        return
    scale = _line(scale) if scale.dim() > 1 else scale
    (rows, columns), step = zip(*(dx.shape for dx in gradients), strict=True), scale.stride(0) if scale.dim() else 0
    block = min(4096, triton.next_power_of_2(max(columns)))
    tiles = sum(m * triton.cdiv(n, block) for m, n in zip(rows, columns, strict=True))
    strides = tuple(dx.stride(0) for dx in gradients)
    grid = (min(tiles, 8 * gpu(scale.device)[1]),)
    launch(_scale_rows, grid, tuple(gradients), scale, rows, columns, strides, step, BLOCK=block, num_warps=8)


#: Not of a list: a call with one is not among those that are known without a key.
_scale = Operator(
    "scale_gradients", "(Tensor(a!) first, Tensor(b!)? second, Tensor(c!)? third, Tensor scale) -> ()",
    check=lambda *given: given, outputs=lambda *_: None, into=_scale_into,
)  # fmt: skip


# Launchers of hidden states ------------------------------------------------------------------------------------------

#: The bytes of the logits of a chunk, at most.
CHUNK_BYTES = 2**30
#: Classes, and elements of the head, from which the classes after the last whole vector are multiplied apart.
APART = 1024, 2**22
#: Multiplications that a matmul of unaligned rows loses while a byte is copied, and while a copy is launched.
PADDED = 8, 2**23
#: Classes up to which the gradients of unaligned hidden states are written where they belong, and not copied there.
DIRECT = 64
#: The same of classes that are no whole vector.
FILLED = 16, 2**27
#: Whether fp16 logits are kept for the backward pass.
KEPT = True
#: By how much fp16 gradients of logits are raised at most: those of a row with a scale of 1 and a million classes
#: become normal numbers, and a row with a scale of 256 still has room for it.
RAISED = 64
#: The classes above which they are raised. With fewer, the average is a normal number if the loss is scaled.
FEW_CLASSES = 4096


def _rows_of_chunk(m: int, n: int, itemsize: int) -> int:
    """How many rows of `n` logits are taken at a time.

    As many as fit into a GiB. A matmul of few rows reads the whole head for little work, and each chunk rounds the
    gradient of the head once more. Beyond some thousands of rows, a matmul becomes no faster. Chunks are alike, and
    whole tiles of 128 rows.
    """
    most = max(1, CHUNK_BYTES // (n * itemsize))
    if m <= most:
        return max(1, m)
    most = most // 128 * 128 or most
    rows = triton.cdiv(m, triton.cdiv(m, most))
    return min(most, triton.cdiv(rows, 128) * 128)


def _pieces(m: int, k: int, n: int, itemsize: int, *, on_vectors: bool) -> tuple[int, tuple[slice, ...]]:
    """How far apart rows of logits begin, and which classes are multiplied at a time.

    cuBLAS's fast fp16 and bf16 matmuls take matrices whose rows are whole vectors of 16 bytes. A few classes may be
    left over. They are multiplied apart if the head is large and has twice as many rows as the hidden states, which are
    then read again. `on_vectors`: the rows of hidden states and head begin at whole vectors.
    """
    whole = 16 // itemsize
    if itemsize != 2 or not on_vectors or n < whole or n % whole == 0:
        return n, (slice(0, n),)
    even = n - n % whole
    apart = k % whole == 0 and n >= max(APART[0], 2 * m) and n * k >= APART[1]
    return even + whole, (slice(0, even), slice(even, n)) if apart else (slice(0, n),)


def _pads(m: int, k: int, n: int, itemsize: int, *, on_vectors: bool, products: int, copies: int) -> bool:
    """Whether unaligned fp16 or bf16 rows are copied into rows of whole vectors, for so many matmuls.

    cuBLAS loads unaligned rows by 2 to 8 bytes, and multiplies slower. The copy pays if there are many rows and many
    classes. Rows of an even length are loaded by 4 bytes or more, which costs less if hidden states are most of what is
    loaded.
    """
    if itemsize != 2 or (on_vectors and k % 8 == 0):
        return False
    a_byte, a_launch = PADDED
    if k % 2 == 0 and n < m:
        a_byte *= 4
    return products * m * k * n > copies * ((m + n) * k * itemsize * a_byte + a_launch)


def _fills(m: int, k: int, n: int, *, products: int, copies: int) -> bool:
    """Whether the head is copied with zeros behind its classes, for so many matmuls of whole vectors of classes.

    cuBLAS multiplies slower where the number of classes is no multiple of 8, even if rows begin at whole vectors.
    """
    a_byte, a_launch = FILLED
    return products * m * k * n > copies * (2 * n * k * a_byte + a_launch)


def _keeps(m: int, k: int, n: int, itemsize: int) -> bool:
    """Whether the backward pass uses kept logits: one chunk that takes no more memory than its factors."""
    return KEPT and m * n <= (m + n) * k and m <= _rows_of_chunk(m, n, itemsize)


def padded(shape: tuple[int, int], pitch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for rows that begin so far apart. Whole vectors of it are loaded, and what is between rows ignored."""
    return torch.empty((shape[0], pitch), dtype=dtype, device=device)


def _copy_into(
    out: Tensor, x: Tensor, target: Tensor | None = None, ignored: int = 0, rest: Tensor | None = None,
    factor: float = 1.0,
) -> None:  # fmt: skip
    """Copy rows, times `factor` and a factor each; if `out` has more or longer ones, the rest becomes zero.

    With targets, ignored rows become zero.
    """
    (height, width), (m, k), x_stride = out.shape, x.shape, x.stride(0)
    align = math.gcd(k, x_stride, aligned(width, out))
    block = min(1024, triton.next_power_of_2(width))
    rows = 2048 // block
    launch(
        _copy_states, (triton.cdiv(height, rows), triton.cdiv(width, block)), out, x, rest, target, m, k // align,
        height, width // align, out.stride(0) // align, x_stride // align, ignored, ALIGN=align, FACTOR=factor,
        ROWS=rows, BLOCK=block,
    )  # fmt: skip


def _clear(dh: Tensor, h: Tensor | None, spoiled: Tensor | None, target: Tensor, ignored: int) -> None:
    """Zeros for the gradients of ignored rows; `spoiled` becomes 1 if one of their hidden states is not finite."""
    (m, k), align = dh.shape, aligned(dh.shape[1], dh, h)
    block = min(256, triton.next_power_of_2(k))
    rows = 4096 // block
    launch(
        _cross_entropy_ignored, (triton.cdiv(m, rows),), dh, h, spoiled, target, m, k // align, dh.stride(0) // align,
        0 if h is None else h.stride(0) // align, ignored, ALIGN=align, ROWS=rows, BLOCK=block,
    )  # fmt: skip


def _repair(dhead: Tensor, spoiled: Tensor, dx: Tensor, h: Tensor, target: Tensor, ignored: int) -> None:
    """Find the gradient of the head again, without ignored rows, where these have spoiled it."""
    n, k = dhead.shape
    grid = (min(triton.cdiv(n, 64) * triton.cdiv(k, 64), 2 * gpu(h.device)[1]),)
    launch(
        _cross_entropy_head, grid, dhead, spoiled, dx, h, target, len(h), n, k, dhead.stride(0), dx.stride(0),
        h.stride(0), ignored, WIDE=INTERPRETED, ROWS=32, CLASSES=64, BLOCK=64,
    )  # fmt: skip


def _raise(target: Tensor, scale: Tensor | None, terms: Terms, known: _Known, n: int) -> tuple[Tensor, Tensor]:
    """The scales of rows of logits, and what is missing to RAISED."""
    m = len(target)
    both = target.new_empty((2, m), dtype=torch.float32)
    step = scale.stride(0) if scale is not None and scale.dim() else 0
    launch(
        _raise_rows, (triton.cdiv(m, 1024),), both[0], both[1], target, terms.weight, scale, known.sums, known.classes,
        m, n, step, terms.ignore_index, COUNTS=known.counts, MEAN=terms.reduction == "mean", SMOOTHING=terms.smoothing,
        Z=terms.z_loss, MOST=RAISED, BLOCK=1024,
    )  # fmt: skip
    return both[0], both[1]


def _wide_matmul(out: Tensor, x: Tensor, w: Tensor, first: bool) -> None:
    """Add a matmul of fp16 or bf16 in float32."""
    if first and x.is_cuda:
        torch.mm(x, w, out.dtype, out=out)
    else:
        torch.addmm(out, x.to(out.dtype), w.to(out.dtype), beta=0 if first else 1, out=out)


def _add_across(out: Tensor, x: Tensor, w: Tensor, first: bool) -> None:
    """Add ``x.T @ w``. A replay makes the transpose in less time here than as an argument."""
    if first:
        torch.mm(x.t(), w, out=out)
    else:
        torch.addmm(out, x.t(), w, out=out)


def _add_lowered(out: Tensor, x: Tensor, w: Tensor, first: bool) -> None:
    """Add ``x.T @ w``, lowered. No part of its sum is rounded before, or it might become infinite."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    try:
        if before:
            matmul.allow_fp16_reduced_precision_reduction = False
        torch.addmm(out, x.t(), w, beta=0 if first else 1, alpha=1 / RAISED, out=out)
    finally:
        if before:
            matmul.allow_fp16_reduced_precision_reduction = before


class _Head:
    """The head and the bias of a call, ready for matmuls, and the logits of a chunk of `rows` hidden states."""

    def __init__(
        self, h: Tensor, head: Tensor, bias: Tensor | None, rows: int, products: int, copies: int, kept: Tensor | None
    ) -> None:
        (m, k), n, size = h.shape, len(head), h.element_size()
        on_vectors = not any(t.stride(0) * size % 16 or t.data_ptr() % 16 for t in (h, head))
        direct = n <= DIRECT and copies > 2
        self.copied = _pads(m, k, n, size, on_vectors=on_vectors, products=products, copies=copies - direct)
        self.pitch, self.pieces = _pieces(m, k, n, size, on_vectors=on_vectors)
        few = len(self.pieces) == 1 and self.pitch > n and k % 8 == 0
        self.padded = self.copied or (few and _fills(m, k, n, products=products, copies=copies // 2))
        self.width, self.classes, self.factor = k, n, head
        self.bias = None if bias is None else contiguous(bias)
        if self.padded:
            self.width, self.pitch = (triton.cdiv(length, 8) * 8 for length in (k, n))
            self.pieces = (slice(0, self.pitch),)
            self.factor = self.memory(self.pitch)
            _copy_into(self.factor, head)
            if self.copied:
                self.copies = self.memory(rows)
            if bias is not None:
                longer = h.new_empty((1, self.pitch))
                _copy_into(longer, bias[None])
                self.bias = longer[0]
        self.kept = kept
        if kept is None and (rows < m or self.pitch > n):
            self.kept = padded((rows, n), self.pitch, h.dtype, h.device)

    def memory(self, rows: int) -> Tensor:
        """For so many rows of the width of hidden states."""
        return self.factor.new_empty((rows, self.width))

    def states(self, h: Tensor, target: Tensor, ignored: int) -> Tensor:
        """Hidden states as they are multiplied."""
        if not self.copied:
            return h
        states = self.copies[: len(h)]
        _copy_into(states, h, target, ignored)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Logits of hidden states, with what is behind them."""
        if self.kept is None:
            return apply(F.linear, states, self.factor, self.bias)  # type: ignore[no-any-return]
        full = self.full(len(states))
        for at in self.pieces:
            if self.bias is None:
                apply(torch.mm, states, self.factor[at].T, out=full[:, at])
            else:
                apply(torch.addmm, self.bias[at], states, self.factor[at].T, out=full[:, at])
        return full

    def full(self, rows: int) -> Tensor:
        """The memory of logits, with what is behind them if that is multiplied too."""
        assert self.kept is not None
        return self.kept[:rows] if self.padded else self.kept[:rows, : self.classes]

    def backward(self, out: Tensor, dx: Tensor) -> None:
        """``out[:] = dx @ head``. If fp16 or bf16 is rounded in between, few classes come first, and round little."""
        wide = out.dtype != dx.dtype
        for later, at in enumerate(self.pieces if wide else reversed(self.pieces)):
            if wide:
                apply(_wide_matmul, out, dx[:, at], self.factor[at], not later)
            elif later:
                apply(torch.addmm, out, dx[:, at], self.factor[at], out=out)
            else:
                apply(torch.mm, dx[:, at], self.factor[at, : out.shape[1]], out=out)


class _Gradients:
    """The gradients of hidden states, head and bias, from those of the logits of one chunk after another."""

    def __init__(self, found: Sequence[Tensor], head: _Head, rows: int, raised: Tensor | None, ignored: int) -> None:
        self.found, self.head, self.raised, self.ignored = found, head, raised, ignored
        dtype, device = head.factor.dtype, head.factor.device
        self.dh, self.dhead = found[0], found[1]
        self.dbias = None if head.bias is None else found[2][:, None]
        self.ones: Tensor | None = None
        if self.dbias is not None:
            self.ones = torch.empty((rows, 1), dtype=dtype, device=device)
            apply(Tensor.fill_, self.ones, 1.0)
        if head.padded:
            self.dhead = head.memory(head.pitch)
            self.dbias = None if self.dbias is None else torch.empty((head.pitch, 1), dtype=dtype, device=device)
        self.spoiled: Tensor | None = None
        self.near: Tensor | None = None
        if raised is not None:
            self.wide = torch.empty((rows, head.width), dtype=torch.float32, device=device)
            self.lifted = head.memory(rows)
        elif head.copied:
            self.near = None if head.classes <= DIRECT else head.memory(rows)
        elif rows >= len(self.dh) and dtype != torch.float64:
            self.spoiled = torch.empty((), dtype=torch.int32, device=device)
            apply(Tensor.zero_, self.spoiled)

    def add(self, part: slice, dx: Tensor, states: Tensor, target: Tensor) -> None:
        """Those of some hidden states.

        A NaN times zero is NaN, so matmuls read zeros instead of ignored rows; or the rare gradient that these have
        spoiled is found again, if all hidden states are multiplied at once.
        """
        head, count, dh, ignored = self.head, len(states), self.dh[part], (target, self.ignored)
        if head.padded and dx.shape[1] > head.classes:  # NaN in hidden states would make NaN of zeros of the head
            apply(Tensor.zero_, dx[:, head.classes :])
        ones = None if self.ones is None else self.ones[:count]
        if self.raised is not None:
            wide, lifted, rest = self.wide[:count], self.lifted[:count], self.raised[part]
            head.backward(wide, dx)
            _copy_into(dh, wide[:, : dh.shape[1]], *ignored, rest, 1 / RAISED)
            _copy_into(lifted, states, *ignored, rest)
            if ones is not None:
                apply(Tensor.copy_, ones[:, 0], rest)
        elif self.near is not None:
            near, lifted = self.near[:count], states
            head.backward(near, dx)
            _copy_into(dh, near[:, : dh.shape[1]], *ignored)
        elif head.copied or self.spoiled is not None:
            lifted = states
        else:  # the memory of their gradient holds hidden states without ignored rows, until it is written
            lifted = dh
            _copy_into(lifted, states, *ignored)
        add = _add_across if self.raised is None else _add_lowered
        for at in head.pieces:
            apply(add, self.dhead[at], dx[:, at], lifted, not part.start)
            if self.dbias is not None:
                apply(add, self.dbias[at], dx[:, at], ones, not part.start)
        if self.raised is None and self.near is None:
            head.backward(dh, dx)
            # Zeros even if the head is not finite.
            _clear(dh, None if self.spoiled is None else states, self.spoiled, *ignored)
        if self.spoiled is not None:
            _repair(self.dhead[: head.classes], self.spoiled, dx, states, *ignored)

    def finish(self) -> None:
        """Copy what was found in padded memory."""
        if self.head.padded:
            _copy_into(self.found[1], self.dhead[: self.head.classes, : self.found[1].shape[1]])
            if self.dbias is not None:
                apply(Tensor.copy_, self.found[2], self.dbias[: self.head.classes, 0])


def _linear_into(
    loss: Tensor | None, gradients: Sequence[Tensor] | None, given: Sequence[Any], terms: Terms,
    rows: int | None = None, scale: Tensor | None = None, kept: Tensor | None = None,
) -> None:  # fmt: skip
    """Loss and gradients; the loss alone, which leaves all logits in `kept`; or gradients alone, from `kept`."""
    h, head, bias, target = contiguous_rows(given[0]), contiguous_rows(given[1]), given[2], _line(given[3])
    terms = terms.of(h)
    loss = None if loss is None else _line(loss)
    gradients = None if gradients is None else (contiguous_rows(gradients[0]), *gradients[1:])
    scale = _line(scale) if scale is not None and scale.dim() > 1 else scale
    m, n, size = len(h), len(head), h.element_size()
    rows = min((rows or _rows_of_chunk(m, n, size)) if kept is None else m, max(1, m))
    products, copies = (3, 6) if kept is not None else (1, 2) if gradients is None else (3, 4)
    ready = _Head(h, head, bias, rows, products, copies, kept)
    again = kept is not None and gradients is not None
    states = ready.states(h[:rows], target[:rows], terms.ignore_index)
    full = ready.full(rows) if again else ready.logits(states)
    x = full[:, :n]
    config = _launch_config(x, x)
    few = -1 if rows < m else _few_targets(config, gradients)
    parts = 0 if config is None else config.parts
    known = _prepare(x, target, terms, m * parts, few)._replace(late={})
    shape = _left_shape(config, m, terms, terms.reduction == "none" or rows < m)
    own = loss is not None and terms.reduction == "none" and len(shape) == 1
    left = loss if loss is not None and own else h.new_empty(shape, dtype=accumulated_in(h.dtype))
    raised: Tensor | None = None
    if gradients and m and h.dtype == torch.float16 and n > FEW_CLASSES:
        scale, raised = _raise(target, scale, terms, known, n)
    found = _Gradients(gradients, ready, rows, raised, terms.ignore_index) if gradients and m else None
    for first in range(0, m, rows):
        part = slice(first, min(m, first + rows))
        if first:
            states = ready.states(h[part], target[part], terms.ignore_index)
            full = ready.logits(states)
            x = full[:, :n]
        words = None if known.words is None else known.words[first * parts :]
        _launch_rows(
            left[part], x if gradients else None, x, target[part],
            scale[part] if scale is not None and scale.dim() else scale, terms, known._replace(words=words), config,
        )  # fmt: skip
        if found is not None:
            found.add(part, full, states, target[part])
    if loss is not None:
        _reduce(loss, left, target, terms, known, n)
    if found is not None:
        found.finish()
    elif gradients:
        for none in gradients[1:]:
            apply(Tensor.zero_, none)


# Arguments and gradients ---------------------------------------------------------------------------------------------


def _check_terms(
    name: str, target: Any, weight: Any, reduction: Any, ignore_index: Any, smoothing: Any, z_loss: Any, softcap: Any,
    **rows: Any,
) -> Terms:  # fmt: skip
    """Refuse wrong targets, weights and terms; `rows` are the arguments with C classes, see `shapes`."""
    shapes(name, **rows, target=(target, "[...]", INTEGERS), weight=(weight, "[C]?", FLOATING))
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: expected a weight that needs no gradient, got one that does; detach it")
    one_of(name, "reduction", reduction, ("mean", "sum", "none"))
    smoothing = number(
        name, "label_smoothing", smoothing, "give a share", "from 0 to 1", lambda share: 0 <= share <= 1
    )  # fmt: skip
    if softcap is not None:
        remedy, finite = "None leaves logits as they are", lambda most: 0 < most < math.inf
        softcap = number(name, "softcap", softcap, remedy, "above 0 and finite, or None", finite)
    ignored = integer(name, "ignore_index", ignore_index, "give one class")
    return Terms(weight, reduction, ignored, smoothing, number(name, "z_loss", z_loss, "0 leaves it out"), softcap)


def _read_target(name: str, target: Tensor, classes: int, ignore_index: int, check: bool | None) -> None:
    """Read the targets and raise IndexError for the first that is no class, if `check` is True.

    That waits for a GPU. With None, only targets on the CPU are read.
    """
    wanted = not target.is_cuda if check is None else check
    if not wanted or target.numel() == 0 or capturing(target):
        return
    least, most = torch.stack(torch.aminmax(target)).tolist()  # one transfer: the usual case ends here
    if 0 <= least and most < classes:
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    places = wrong.nonzero()
    if len(places):
        at = tuple(places[0].tolist())
        raise IndexError(
            f"{name}: expected targets from 0 to {classes - 1} or {ignore_index}, got {int(target[at])} at "
            f"target[{', '.join(map(str, at))}]; fix it, or pass check=False, which makes such a loss NaN"
        )


def _first_only(name: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    """The rule of an operator that returns gradients: these have none."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            f"{name}: expected first derivatives to be asked for, got a gradient of its gradient, for which it has no "
            f"rule; use torch.nn.functional.cross_entropy"
        )

    return backward, lambda ctx, inputs, output: None


class Once(torch.autograd.Function):
    """Records a loss whose gradients an operator without a schema finds with it, after the loss.

    The first backward pass returns them. Another one computes them again, by the rule of the operator, which is given
    the gradient of the loss and the arguments: an argument that was changed in place meanwhile is refused. An operator
    that keeps logits has a second rule, which is given them too, once.
    """

    @staticmethod
    def forward(ctx: Any, what: Any, tensors: list[Tensor], at: list[int], *inputs: Any) -> Any:
        loss, *ctx.found = what.run(tensors, at)
        ctx.op, count = what.op, 3 if what.op.name == "cross_entropy" else 5  # of tensors, the last the weight
        if ctx.op is _over:
            torch.autograd.graph.increment_version(inputs[0])  # an operation that saved them for its gradient raises
            ctx.found = [inputs[0].detach()]
        else:
            ctx.save_for_backward(*inputs[:count])
        ctx.rest = inputs[count:]
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        found, ctx.found = ctx.found, None
        g = g.resolve_neg()
        # A batch of gradients, as torch.autograd makes it, or zeros without memory.
        batched = not (torch._C._has_storage(g) and g.data_ptr())
        again, first = ctx.op.gradient
        if found is None or torch.is_grad_enabled() or (first and batched):
            if ctx.op is _over:
                raise RuntimeError(
                    "cross_entropy: expected one backward pass, since inplace=True keeps the gradient in the logits' "
                    "memory and hands it out once; pass inplace=False to go back several times"
                )
            found = again(g, *ctx.saved_tensors, *ctx.rest)
        elif first:
            found = first(*found, g, *ctx.saved_tensors, *ctx.rest)
        elif batched:
            found = [dx * g.view(g.shape + (1,) * (dx.dim() - g.dim())) for dx in found]
        else:
            _scale.call(*found, *[None] * (3 - len(found)), g)
        return None, None, None, *found, *[None] * (len(ctx.needs_input_grad) - 3 - len(found))


#: `Once.apply`, for callers that are not traced or transformed.
_once = recorder(Once)

# Cross entropy -------------------------------------------------------------------------------------------------------


def _check(x: Any, target: Any, weight: Any, *rest: Any) -> tuple[Any, ...]:
    name = "cross_entropy"
    terms = _check_terms(name, target, weight, *rest[:5], logits=(x, "[..., C > 0]"))
    return x, target, *terms, *rest[6:]


def _check_over(x: Any, *rest: Any) -> tuple[Any, ...]:
    checked = _check(x, *rest)
    if not (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1])):
        raise ValueError(
            f"cross_entropy: expected logits for inplace=True whose rows are contiguous, got strides {x.stride()}; "
            "make them contiguous, or pass inplace=False"
        )
    return checked


def _read(x: Tensor, target: Tensor, weight: Any, reduction: Any, ignore_index: int, *rest: Any) -> None:
    if rest[3] is not False:
        _read_target("cross_entropy", target, x.shape[-1], ignore_index, rest[3])


def _read_over(x: Tensor, target: Tensor, weight: Any, *rest: Any) -> None:
    end = x.data_ptr() + sum(s * (n - 1) for n, s in zip(x.shape, x.stride(), strict=True)) * x.element_size()
    for what, t in (("target", target), ("weight", weight)):
        if t is not None and x.data_ptr() < t.data_ptr() + t.nbytes and t.data_ptr() <= end:
            raise ValueError(
                f"cross_entropy: expected {what} apart from logits that are overwritten, got it in their memory; clone "
                "it, or pass inplace=False"
            )
    _read(x, target, weight, *rest)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, target, weight, *ctx.rest = inputs
    ctx.weighted = weight is not None
    ctx.save_for_backward(x, target, *([weight] if ctx.weighted else []))


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, target, *weight = ctx.saved_tensors
    _, dx = _both(x, target, *(weight or [None]), *ctx.rest, False, g)
    return dx, *[None] * (2 + len(ctx.rest))


_cross_entropy = Operator(
    "cross_entropy", f"(Tensor x, {_TERMS}) -> Tensor",
    check=_check,
    outputs=lambda x, target, weight, reduction, *_: _loss_memory(x, target, reduction),
    into=lambda loss, x, target, *terms: _entropy_into(loss, None, x, target, None, Terms(*terms)),
    read=_read,
    gradient=(_backward, _keep),
)  # fmt: skip
_both = Operator(
    "cross_entropy_with_gradient", f"(Tensor x, {_TERMS}, Tensor? scale) -> (Tensor, Tensor)",
    check=_check,
    outputs=lambda x, target, _, reduction, *rest: (_loss_memory(x, target, reduction), x.new_empty(x.shape)),
    into=lambda found, x, target, *rest: _entropy_into(found[0], found[1], x, target, rest[-1], Terms(*rest[:-1])),
    read=_read,
    gradient=_first_only("cross_entropy"),
)  # fmt: skip
#: Of logits that need a gradient, which is found in the same pass.
_trained = Operator(
    "cross_entropy", "",
    check=_check,
    outputs=_both.outputs,
    into=lambda found, *given: _both.into(found, *given, None),
    read=_read,
    gradient=(lambda g, *given: _both(*given, False, g)[1:], None),
    recorded=_once,
    instead=_cross_entropy,
)  # fmt: skip
#: Writes the gradient over the logits.
_over = Operator(
    "cross_entropy", "",
    check=_check_over,
    outputs=lambda x, target, weight, reduction, *_: (_loss_memory(x, target, reduction),),
    into=lambda found, x, target, *terms: _entropy_into(found[0], x, x, target, None, Terms(*terms)),
    read=_read_over,
    gradient=(None, None),
    recorded=_once,
    instead=_cross_entropy,
)  # fmt: skip


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, inplace: bool = False,
    check: bool | None = None,
) -> Tensor:  # fmt: skip
    """Cross entropy of logits, whose gradient is found in the same pass.

    Parameters
    ----------
    logits : torch.Tensor
        [..., N], float16, bfloat16, float32 or float64, on a CUDA device (or on the CPU where Triton interprets). The
        classes are on the last axis. Half types are computed in float32.
    target : torch.Tensor
        [...], int64 or int32: the class of each row, or `ignore_index`.
    weight : torch.Tensor, optional
        [N], a factor for each class, floating-point; it gets no gradient.
    reduction : str, default "mean"
        ``"mean"``: divided by the sum of the weights of the targets; ``"sum"``; ``"none"``: a loss for each row.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient, even where they hold NaN.
    label_smoothing : float, default 0
        The share, from 0 to 1, of a target that is spread evenly over all classes, as in torch.
    z_loss : float, default 0
        Adds so many times the squared logarithm of the row's sum of exponentials, times the weight of the target.
    softcap : float, optional
        Logits l are taken as ``softcap * tanh(l / softcap)``; -inf, of what is masked, stays -inf.
    inplace : bool, default False
        Allow that the gradient overwrites the logits, if one is recorded. In float16, and if torch traces, it does not.
    check : bool, optional
        A target that is no class makes the loss and the gradient of its row NaN, and so the mean or the sum. True reads
        the targets first, which waits for the GPU, and raises an IndexError that names the first such target. None does
        so on the CPU only; False never.

    Returns
    -------
    torch.Tensor
        A number, or [...] without reduction; float32, or float64 where the logits are. NaN for the mean of no rows; a
        row that holds NaN or +inf, or nothing but -inf, has the loss NaN, as in torch.

    Raises
    ------
    TypeError
        If a tensor has a dtype that is not named here, or is not dense.
    ValueError
        If shapes or devices do not match, a number is out of its range, the tensors are on the CPU and Triton compiles,
        or ``inplace`` is True and the logits cannot be overwritten.
    IndexError
        If a target is no class and is read, see `check`.
    RuntimeError
        If a second backward pass asks for a gradient that has overwritten the logits.

    Notes
    -----
    Differentiable once; works under `torch.compile` and `torch.vmap`. The gradient takes the memory of the logits once
    more, or none with `inplace`. A second backward pass computes it again. In float16, where most gradients are no
    normal numbers before the loss is scaled, as `torch.amp.GradScaler` does, it is found in the backward pass.

    Under torch's compiled autograd, run one backward pass only. With ``retain_graph=True``, further passes return
    incorrect gradients.

    Examples
    --------
    >>> import fusebook, torch
    >>> x, t = torch.randn(3, 5, device="cuda"), torch.tensor([0, 4, -100], device="cuda")
    >>> loss = fusebook.cross_entropy(x.requires_grad_(), t)  # doctest: +SKIP
    """
    if type(inplace) is not bool:
        flag("cross_entropy", "inplace", inplace)
    learned = torch.is_grad_enabled() and isinstance(logits, Tensor) and logits.requires_grad
    op = (_over if inplace else _trained) if learned and logits.dtype is not torch.float16 else _cross_entropy
    rest = reduction, ignore_index, label_smoothing, z_loss, softcap, check
    return op.call(logits, target, weight, *rest)  # type: ignore[no-any-return]


def cross_entropy_with_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, check: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cross entropy of logits and its gradient, without autograd: one read, one write.

    Parameters
    ----------
    logits, target, weight, reduction, ignore_index, label_smoothing, z_loss, softcap, check
        As of `cross_entropy`.

    Returns
    -------
    loss : torch.Tensor
        As of `cross_entropy`.
    gradient : torch.Tensor
        Of the loss, or of the sum of losses without reduction; contiguous, of the shape and dtype of `logits`.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `cross_entropy`.
    """
    return _both(logits, target, weight, reduction, ignore_index, label_smoothing, z_loss, softcap, check, None)


# Linear cross entropy ------------------------------------------------------------------------------------------------


def _check_linear(h: Any, head: Any, bias: Any, target: Any, weight: Any, *rest: Any) -> tuple[Any, ...]:
    name = "linear_cross_entropy"
    # The head has a row for each class, as the weight of torch.nn.Linear has.
    rows = {"hidden": (h, "[..., K > 0]"), "head": (head, "[C > 0, K]"), "bias": (bias, "[C]?")}
    terms = _check_terms(name, target, weight, *rest[:5], **rows)
    if len(rest) > 6 and rest[6] is not None:
        integer(name, "rows", rest[6], "None chooses a number", "of 1 or more", lambda rows: rows >= 1)
    return h, head, bias, target, *terms, *rest[6:]


def _read_linear(
    h: Tensor, head: Tensor, bias: Any, target: Tensor, weight: Any, reduction: Any, ignore_index: Any,
    smoothing: Any, z_loss: Any, softcap: Any, check: Any, *_: Any,
) -> None:  # fmt: skip
    if check is not False:
        _read_target("linear_cross_entropy", target, len(head), ignore_index, check)


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.reduction = inputs[:6]
    ctx.rest = inputs[6:]
    ctx.save_for_backward(*tensors)


def _linear_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    tensors, (*rest, rows) = ctx.saved_tensors, ctx.rest
    _, dh, dhead, dbias = _linear_all(*tensors, ctx.reduction, *rest, False, rows, g)
    return dh, dhead, None if tensors[2] is None else dbias, *[None] * (3 + len(ctx.rest))


def _gradients_of(h: Tensor, head: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    """Without a bias, that of the bias has no elements."""
    return tuple(h.new_empty(shape) for shape in (h.shape, head.shape, (0,) if bias is None else bias.shape))


def _linear_kept_of(
    h: Tensor, head: Tensor, bias: Any, target: Tensor, weight: Any, reduction: str, *_: Any
) -> tuple[Tensor, Tensor]:
    whole = 16 // h.element_size()
    pitch = (len(head) + whole - 1) // whole * whole
    kept = padded((h.numel() // h.shape[-1], len(head)), pitch, h.dtype, h.device)
    return _loss_memory(h, target, reduction), kept


def _lower(device: str, call: Any, h: Tensor, head: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """The rule of autocast: the matmul is in its dtype, the loss in float32."""
    return lower(device, lambda *both: call(*both, *rest), h, head, bias)


_GIVEN = f"Tensor h, Tensor head, Tensor? bias, {_TERMS}"
_linear = Operator(
    "linear_cross_entropy", f"({_GIVEN}, SymInt? rows) -> Tensor",
    check=_check_linear,
    outputs=lambda h, head, bias, target, weight, reduction, *_: _loss_memory(h, target, reduction),
    into=lambda loss, *given: _linear_into(loss, None, given[:4], Terms(*given[4:10]), rows=given[10]),
    read=_read_linear,
    gradient=(_linear_backward, _keep_linear),
    autocast=_lower,
)  # fmt: skip
#: The loss, and the gradients of hidden states, head and bias.
_linear_all = Operator(
    "linear_cross_entropy_with_gradients",
    f"({_GIVEN}, SymInt? rows, Tensor? scale) -> (Tensor, Tensor, Tensor, Tensor)",
    check=_check_linear,
    outputs=lambda h, head, bias, target, weight, reduction, *_: (
        _loss_memory(h, target, reduction), *_gradients_of(h, head, bias)
    ),
    into=lambda found, *given: _linear_into(
        found[0], found[1:], given[:4], Terms(*given[4:10]), rows=given[10], scale=given[11]
    ),
    read=_read_linear,
    gradient=_first_only("linear_cross_entropy"),
    autocast=_lower,
)  # fmt: skip
#: The gradients of a loss whose logits are kept, and overwritten by theirs.
_linear_over = Operator(
    "linear_cross_entropy_over", f"(Tensor(a!) kept, {_GIVEN}, Tensor scale) -> (Tensor, Tensor, Tensor)",
    check=lambda kept, *rest: (kept, *_check_linear(*rest[:10]), rest[10]),
    outputs=lambda _, *rest: _gradients_of(*rest),
    into=lambda found, kept, *given: _linear_into(
        None, found, given[:4], Terms(*given[4:10]), scale=given[10], kept=kept
    ),
)  # fmt: skip


def _linear_again(g: Tensor, *given: Any) -> Sequence[Tensor]:
    *given, rows = given
    return _linear_all(*given, False, rows, g)[1 : 3 if given[2] is None else 4]  # type: ignore[no-any-return]


def _linear_first(kept: Tensor, g: Tensor, *given: Any) -> Sequence[Tensor]:
    apart = (t.detach() if isinstance(t, Tensor) else t for t in given[:-1])
    return _linear_over(kept, *apart, g)[: 2 if given[2] is None else 3]  # type: ignore[no-any-return]


#: The loss of what needs a gradient, which is found in the same pass.
_linear_trained = Operator(
    "linear_cross_entropy", "",
    check=_check_linear,
    outputs=lambda h, head, bias, target, weight, reduction, *_: (
        _loss_memory(h, target, reduction),
        *[h.new_empty(t.shape) for t in (h, head, bias) if t is not None],
    ),
    into=lambda found, *given: _linear_into(found[0], found[1:], given[:4], Terms(*given[4:10]), rows=given[10]),
    read=_read_linear,
    gradient=(_linear_again, None),
    recorded=_once,
    instead=_linear,
)  # fmt: skip
#: The loss, and its logits, from which the gradient is found when its scale is known.
_linear_kept = Operator(
    "linear_cross_entropy", "",
    check=_check_linear,
    outputs=_linear_kept_of,
    into=lambda found, *given: _linear_into(found[0], None, given[:4], Terms(*given[4:10]), kept=found[1]),
    read=_read_linear,
    gradient=(_linear_again, _linear_first),
    recorded=_once,
    instead=_linear,
)  # fmt: skip


def _keeps_logits(rows: int | None, h: Tensor, head: Tensor) -> bool:
    """Whether the logits of these are kept for the backward pass."""
    if rows is not None or any(t.is_nested or not t.dim() or not t.numel() for t in (h, head)):
        return False
    return _keeps(h.numel() // h.shape[-1], h.shape[-1], len(head), h.element_size())


class _InGraph(torch.autograd.Function):
    """The loss and its gradients in one pass, as torch.compile traces it: the backward pass scales the gradients."""

    @staticmethod
    def forward(ctx: Any, rest: Any, *tensors: Any) -> Any:
        loss, dh, dhead, dbias = _linear_all(*tensors, *rest, None)
        ctx.save_for_backward(dh, dhead, dbias)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        dh, dhead, dbias = (d * g for d in ctx.saved_tensors)
        return None, dh, dhead, dbias if ctx.needs_input_grad[3] else None, None, None


def linear_cross_entropy(
    hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None,
    reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, rows: int | None = None, check: bool | None = None,
) -> Tensor:  # fmt: skip
    """Cross entropy of ``hidden @ head.T + bias``, whose gradients are found in the same pass, some rows at a time.

    Parameters
    ----------
    hidden : torch.Tensor
        [..., K], float16, bfloat16, float32 or float64, on a CUDA device (or on the CPU where Triton interprets).
    head : torch.Tensor
        [N, K], of the same dtype: a row for each class.
    target, weight, reduction, ignore_index, label_smoothing, z_loss, softcap, check
        As of `cross_entropy`.
    bias : torch.Tensor, optional
        [N], of the same dtype: what is added to the logits of each class.
    rows : int, optional
        Hidden states that are taken at a time. Besides its results, the call takes memory for their logits: by default
        up to a GiB. In float16, with more than 4096 classes, it takes 6 bytes more for each of their elements. fp16
        and bf16 rows that do not begin at multiples of 16 bytes may be copied into rows that do.

    Returns
    -------
    torch.Tensor
        As of `cross_entropy`.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `cross_entropy`; also if `hidden`, `head` and `bias` differ in dtype or do not fit, or `rows` is no count.

    Notes
    -----
    Differentiable once; works under `torch.compile`. If a gradient is recorded, gradients are found in the forward
    pass, and the backward pass returns them. The logits are computed again by a second backward pass, by one without
    reduction, and in float16, where the loss is scaled first. In float16, logits of one
    chunk are kept for the first backward pass, unless they take more memory than `hidden` and `head`, or `rows` is
    given.

    Under torch's compiled autograd, run one backward pass only. With ``retain_graph=True``, further passes return
    incorrect gradients.

    Examples
    --------
    >>> import fusebook, torch
    >>> h, head = torch.randn(3, 8, device="cuda"), torch.randn(5, 8, device="cuda", requires_grad=True)
    >>> t = torch.tensor([0, 4, -100], device="cuda")
    >>> fusebook.linear_cross_entropy(h, head, t).backward()  # doctest: +SKIP
    """
    op, rest = _linear, (reduction, ignore_index, label_smoothing, z_loss, softcap, check, rows)
    learned = getattr(hidden, "requires_grad", False) or getattr(head, "requires_grad", False)
    learned = (learned or getattr(bias, "requires_grad", False)) and torch.is_grad_enabled()
    if learned and isinstance(hidden, Tensor) and isinstance(head, Tensor):
        if _autocast() and autocasts(hidden.device.type):
            hidden, head, bias = lower(hidden.device.type, lambda *cast: cast, hidden, head, bias)
        scaled = hidden.dtype is torch.float16 or head.dtype is torch.float16
        if torch.compiler.is_dynamo_compiling():
            plain = all([t is None or type(t) in (Tensor, Parameter) for t in (hidden, head, bias)])
            if plain and not scaled and reduction != "none" and not getattr(weight, "requires_grad", False):
                return _InGraph.apply(rest, hidden, head, bias, target, weight)  # type: ignore[no-any-return]
        elif not scaled:
            op = _linear if reduction == "none" else _linear_trained
        elif _keeps_logits(rows, hidden, head):
            op = _linear_kept
    return op.call(hidden, head, bias, target, weight, *rest)  # type: ignore[no-any-return]


def linear_cross_entropy_with_gradients(
    hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None,
    reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, rows: int | None = None, check: bool | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Cross entropy of ``hidden @ head.T + bias`` and its gradients, without autograd.

    Parameters
    ----------
    hidden, head, target, weight, bias, reduction, ignore_index, label_smoothing, z_loss, softcap, rows, check
        As of `linear_cross_entropy`.

    Returns
    -------
    loss : torch.Tensor
        As of `linear_cross_entropy`.
    dhidden, dhead, dbias : torch.Tensor
        Gradients of the loss, or of the sum of losses without reduction; contiguous, as `hidden`, `head` and `bias`.
        The last one only with a bias.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `linear_cross_entropy`.
    """
    rest = (reduction, ignore_index, label_smoothing, z_loss, softcap, check, rows)
    return _linear_all(hidden, head, bias, target, weight, *rest, None)[: 3 if bias is None else 4]
