# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/_entropy.py. It needs torch, Triton, NumPy, _call.py, _layouts.py and _rows.py.
"""What cross entropy of logits and of hidden states share: kernels that find a row's loss and its gradient at once.

A row of N logits x with the class t has

    lse  = log(sum_j exp(x[j]))
    loss = w[t] ((1 - s) (lse - x[t]) + z lse**2) + s / N sum_j w[j] (lse - x[j])

with the weights w of classes, the smoothing s and the factor z, and the gradient

    dx[j] = exp(x[j] - lse) (w[t] (1 - s + 2 z lse) + s / N sum_k w[k]) - w[t] (1 - s) [j = t] - s / N w[j]

With a cap c, x is c tanh(l / c) of the logits l, and the gradient has the factor 1 - (x / c)**2.

The gradient may be written where the logits are: nobody writes to a part of a row before everybody has its word, and a
word that comes late from somebody else does not count. A row that is ignored has no loss and no gradient, whatever it
holds.
"""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import (
    FLOATING,
    INTEGERS,
    Operator,
    accumulated,
    apply,
    as_it_is,
    capturing,
    contiguous,
    empty,
    gpu,
    integer,
    launch,
    number,
    one_of,
    overlapping,
    recorder,
    shapes,
)
from ._layouts import Plan
from ._rows import aligned, first_missing, publish, row_vectors, store_row_part, wait_for

# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _exp(x):
    """By way of exp2, which the hardware has. It rounds results below 1e-38 to zero."""
    return tl.exp2(x * 1.4426950408889634)  # log2(e)


@triton.jit
def _factor_of(top):
    """log2(e), unless its product with a bfloat16 maximum overflows. Such elements are equal, or 2**119 apart."""
    return tl.where(tl.abs(top) < 1e38, 1.4426950408889634, 0.5)


@triton.jit
def _exp_from(x, top, HALF: tl.constexpr):
    """exp(x - top). For fp16 and bf16 one multiply-add an element, which leaves `_rounding_of` for the row."""
    if HALF:
        factor = _factor_of(top)
        return tl.exp2(tl.fma(x, factor, -(top * factor)))
    else:
        return _exp(x - top)


@triton.jit
def _rounding_of(top, HALF: tl.constexpr):
    """The factor that `_exp_from` lacks: 2 to the rounding error of the product with `top`, far from 1 at 65504."""
    if HALF:
        factor = _factor_of(top)
        return tl.exp2(-tl.fma(top, factor, -(top * factor)))
    else:
        return top * 0 + 1


@triton.jit
def _tanh(u):
    """Of what is not negative: by an exponential that never overflows, which would leave small numbers no digits.

    Those go by the polynomials of Cephes (netlib.org/cephes, tanhf.c and tanh.c).
    """
    e = _exp(-2.0 * u)
    z = u * u
    if u.dtype == tl.float64:
        p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
        q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
        p = p / q
    else:
        p = (-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2
        p = (p * z + 1.33314422036e-1) * z - 3.33332819422e-1
    return tl.where(u < 0.625, u + u * (z * p), (1.0 - e) / (1.0 + e))


@triton.jit
def _capped(x, CAP: tl.constexpr):
    """CAP tanh(x / CAP); -inf, of what is masked, stays -inf."""
    if CAP is not None:
        y = CAP * _tanh(tl.abs(x) / CAP)
        x = tl.where(x == float("-inf"), x, tl.where(x < 0, -y, y))
    return x


@triton.jit
def _class_of(target_ptr, weight_ptr, rows, live, N, IGNORE, FLOAT: tl.constexpr):
    """Of rows their class, whether they count, and the weight of their class: NaN where there is no such class."""
    target = tl.load(target_ptr + rows, mask=live)
    known = (target >= 0) & (target < N)
    counts = target != IGNORE if live is None else live & (target != IGNORE)
    if weight_ptr is None:
        weight = tl.where(known, 1.0, float("nan")).to(FLOAT)
    else:
        weight = tl.load(weight_ptr + target, mask=counts & known, other=float("nan"))
    return tl.where(known, target, 0).to(tl.int32), counts, weight


@triton.jit
def _begin(
    board_ptr, sums_ptr, target_ptr, weight_ptr, WORDS, M, N, IGNORE,
    BLOCK: tl.constexpr, COUNTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Zeros on the board; and by each of COUNTS programs the weights of its share of targets, and of classes."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    inner = tl.arange(0, BLOCK)
    if board_ptr is not None:
        at = program.to(tl.int64) * BLOCK + inner  # [BLOCK]
        tl.store(board_ptr + at, tl.zeros([BLOCK], board_ptr.dtype.element_ty), mask=at < WORDS)
    if COUNTS > 0:
        if program < COUNTS:
            FLOAT: tl.constexpr = sums_ptr.dtype.element_ty
            sums = tl.zeros([BLOCK], FLOAT)
            for start in range(program * BLOCK, M, COUNTS * BLOCK):
                rows = start + inner  # [BLOCK]
                _, counts, weight = _class_of(target_ptr, weight_ptr, rows, rows < M, N, IGNORE, FLOAT)
                sums += tl.where(counts, weight, 0.0)
            tl.store(sums_ptr + program, tl.sum(sums, 0))
            if weight_ptr is not None:
                sums = tl.zeros([BLOCK], FLOAT)
                for start in range(program * BLOCK, N, COUNTS * BLOCK):
                    sums += tl.load(weight_ptr + start + inner, mask=start + inner < N, other=0.0)
                tl.store(sums_ptr + COUNTS + program, tl.sum(sums, 0))


@triton.jit
def _end(loss_ptr, left_ptr, sums_ptr, COUNT, COUNTS: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of what the rows have left, or their mean: one program, always in the same order."""
    sums = tl.zeros([BLOCK], left_ptr.dtype.element_ty)
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)  # [BLOCK]
        sums += tl.load(left_ptr + at, mask=at < COUNT, other=0.0)
    loss = tl.sum(sums, 0)
    if MEAN:
        loss = loss / tl.sum(tl.load(sums_ptr + tl.arange(0, COUNTS)), 0)
    tl.store(loss_ptr, loss)


@triton.jit
def _known(
    scale_ptr, sums_ptr, rows, live, SCALE_STEP, N, weight,
    COUNTS: tl.constexpr, MEAN: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Before the first logit: what the gradients of rows are scaled by, and the weights of all classes together."""
    none = tl.zeros_like(weight)
    scale = none + 1.0
    classes = none + N
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + rows * SCALE_STEP, mask=live).to(weight.dtype)
    if MEAN:
        scale = scale / tl.sum(tl.load(sums_ptr + tl.arange(0, COUNTS)), 0)
    if SUMMED:
        classes = none + tl.sum(tl.load(sums_ptr + COUNTS + tl.arange(0, COUNTS)), 0)
    return scale, classes


@triton.jit
def _factors(scale, classes, N, weight, lse, SMOOTHING: tl.constexpr, Z: tl.constexpr):
    """What the gradient multiplies probabilities with, subtracts at the class, and subtracts at every class by weight.

    And the last of them without the scale, as the loss has it.
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
    """Of a row; `spread`, which several programs may share, is the sum of what `_spread` makes of it."""
    lse = top + log_total
    loss = weight * (1.0 - SMOOTHING) * ((top - x_t) + log_total)
    if SMOOTHING != 0.0:
        loss += every * classes * log_total - spread
    if Z != 0.0:
        loss += Z * weight * lse * lse
    return loss


@triton.jit
def _gradient(
    x, columns, inside, top, of_p, every, weight_ptr,
    HALF: tl.constexpr, SMOOTHING: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The gradient at some columns, as if none were the class; of logits that are capped already.

    `of_p` is what exponentials are multiplied with, relative to `top`.
    """
    dx = _exp_from(x, top, HALF) * of_p
    if SMOOTHING != 0.0:
        if weight_ptr is None:
            dx -= every
        else:
            dx -= every * tl.load(weight_ptr + columns, mask=inside, other=0.0)
    return _bent(dx, x, CAP)


@triton.jit
def _bent(dx, x, CAP: tl.constexpr):
    """The gradient before the cap."""
    if CAP is not None:
        u = x / CAP
        dx = tl.where(x == float("-inf"), 0.0, dx * ((1.0 - u) * (1.0 + u)))
    return dx


@triton.jit
def _share(N, FLOAT: tl.constexpr, SMOOTHING: tl.constexpr):
    """The smoothing of one class of N."""
    return (tl.zeros([], FLOAT) + SMOOTHING) / N


@triton.jit
def _shares(columns, own, share, weight_ptr):
    """The smoothing of classes, by their weights."""
    if weight_ptr is None:
        return tl.where(own, share, 0.0)
    else:
        return share * tl.load(weight_ptr + columns, mask=own, other=0.0)


@triton.jit
def _spread(x, top, own, shares):
    """How far logits are below `top`, by their smoothing: of a whole row none of their sums cancels or overflows."""
    return tl.where(own, (x - top) * shares, 0.0)


@triton.jit
def _finite(top):
    """What logits are taken relative to; nothing but -inf relative to that would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _entropy_rows(
    left_ptr, dx_ptr, x_ptr, target_ptr, weight_ptr, scale_ptr, sums_ptr, M, N, dx_stride, x_stride, SCALE_STEP, IGNORE,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr, MEAN: tl.constexpr,
    APART: tl.constexpr, SMOOTHING: tl.constexpr, Z: tl.constexpr, CAP: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """ROWS rows at a time, whole in registers. APART: the loss of each is left by itself, otherwise a program's sum."""
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N * ALIGN
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    losses = tl.zeros([ROWS], FLOAT)
    for start in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        rows = tl.zeros([], tl.int64) + start + tl.arange(0, ROWS)  # [ROWS]
        live = rows < M
        at = x_ptr + rows * (x_stride * ALIGN)
        target, counts, weight = _class_of(target_ptr, weight_ptr, rows, live, N, IGNORE, FLOAT)
        inside = (columns < N) & counts[:, None]  # [ROWS, BLOCK]
        x = tl.load(at[:, None] + columns, mask=inside, other=float("-inf"))  # read MN
        x_t = _capped(tl.load(at + target, mask=counts, other=0.0).to(FLOAT), CAP)  # [ROWS]
        x = _capped(x.to(FLOAT), CAP)
        top = tl.where(counts, tl.max(x, 1), 0.0)  # [ROWS]
        total = tl.sum(_exp(x - top[:, None]), 1)
        log_total = tl.log(total)
        spread = x_t
        if SMOOTHING != 0.0:
            shares = _shares(columns, inside, _share(N, FLOAT, SMOOTHING), weight_ptr)
            spread = tl.sum(_spread(x, top[:, None], inside, shares), 1)
        if LATE:
            tl.extra.cuda.gdc_wait()  # for the sums
        SUMMED: tl.constexpr = SMOOTHING != 0.0 and weight_ptr is not None
        scale, classes = _known(scale_ptr, sums_ptr, rows, live, SCALE_STEP, N, weight, COUNTS, MEAN, SUMMED)
        of_p, hit, every, of_loss = _factors(scale, classes, N, weight, top + log_total, SMOOTHING, Z)
        loss = tl.where(counts, _loss(x_t, top, log_total, weight, of_loss, classes, spread, SMOOTHING, Z), 0.0)
        if APART:
            tl.store(left_ptr + rows, loss, mask=live)
        losses += loss
        if dx_ptr is not None:
            to = dx_ptr + rows * (dx_stride * ALIGN)
            of_p = tl.where(counts, of_p / total, 0.0)
            dx = _gradient(
                x, columns, inside, top[:, None], of_p[:, None], every[:, None], weight_ptr, False, SMOOTHING, CAP
            )  # fmt: skip
            if SMOOTHING != 0.0:
                dx = tl.where(counts[:, None], dx, 0.0)
            own = (columns < N) & live[:, None]
            tl.debug_barrier()  # all logits are here: the gradient may be written over them
            tl.store(to[:, None] + columns, dx.to(dx_ptr.dtype.element_ty), mask=own)  # write MN
            # At the class once more, behind all that the program has written: cheaper than to ask at every column.
            there = _gradient(x_t, target, counts, top, of_p, every, weight_ptr, False, SMOOTHING, CAP)
            there -= _bent(hit, x_t, CAP)
            tl.debug_barrier()
            tl.store(to + target, there.to(dx_ptr.dtype.element_ty), mask=counts)
    if not APART:
        tl.store(left_ptr + tl.program_id(0), tl.sum(losses, 0))


@triton.jit
def _tile_of(x_ptr, at, inner, low, high, VEC: tl.constexpr, EDGE: tl.constexpr):
    """Logits `inner` of a window, as they stand in memory; -inf in place of what is not the row's own."""
    if EDGE:
        x = tl.load(x_ptr + at + inner, mask=inner < (high + VEC - 1) // VEC * VEC, other=float("-inf"))
        return tl.where((inner >= low) & (inner < high), x, float("-inf")).to(x_ptr.dtype.element_ty)
    else:
        return tl.load(x_ptr + at + inner)


@triton.jit
def _float(x, CAP: tl.constexpr):
    """As it is computed with, and capped."""
    return _capped(x.to(tl.float64 if x.dtype == tl.float64 else tl.float32), CAP)


@triton.jit
def _kept(
    x_ptr, at, start, low, high, VEC: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """As `_tile_of`, to be held: of half types two numbers in a register, which 16 bits would have for themselves."""
    if x_ptr.dtype.element_ty.primitive_bitwidth != 16:
        return _tile_of(x_ptr, at, start + tl.arange(0, BLOCK), low, high, VEC, EDGE)
    else:
        UPPER: tl.constexpr = -8388608 if x_ptr.dtype.element_ty == tl.bfloat16 else -67108864  # -inf and 0.0
        LOWER: tl.constexpr = 0xFF80 if x_ptr.dtype.element_ty == tl.bfloat16 else 0xFC00
        pairs = start // 2 + tl.arange(0, BLOCK // 2)
        pairs_ptr = (x_ptr + at).to(tl.pointer_type(tl.int32), bitcast=True) + pairs
        first = 2 * pairs
        inside = pairs < (high + VEC - 1) // VEC * (VEC // 2)  # whole vectors
        if EDGE and EVEN:
            return tl.load(pairs_ptr, mask=inside, other=UPPER | LOWER)
        elif EDGE:
            pair = tl.load(pairs_ptr, mask=inside, other=0)
            pair = tl.where((first >= low) & (first < high), pair, (pair & -65536) | LOWER)
            return tl.where((first + 1 >= low) & (first + 1 < high), pair, (pair & 65535) | UPPER)
        else:
            return tl.load(pairs_ptr)


@triton.jit
def _anew(x, seen, N, HALF: tl.constexpr, CAP: tl.constexpr):
    """Numbers that were held; half types are converted each time, not held meanwhile in twice the registers."""
    if x.dtype == tl.int32:
        # Always zero, but the compiler cannot know.
        zero = tl.minimum(N, 0) & seen.to(tl.int32, bitcast=True)
        if HALF == tl.bfloat16:
            low = ((x << 16) + zero).to(tl.float32, bitcast=True)
            high = ((x ^ zero) & -65536).to(tl.float32, bitcast=True)
        else:
            x ^= zero
            low = x.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        x = tl.reshape(tl.join(low, high), [2 * x.shape[0]])
    return _float(x, CAP)


@triton.jit
def _word(top, total):
    """The maximum of a part and its sum of exponentials, relative to it, in one word, which is never zero."""
    upper = top.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return upper | (total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _merge(tops, totals):
    """Maximum and sum of exponentials of a whole, from those of its pieces."""
    top = tl.max(tops, 0)
    # A piece that has seen nothing but -inf has the sum 0; relative to 0 it stays 0, relative to -inf it would be NaN.
    return top, tl.sum(totals * _exp(tops - _finite(top)), 0)


@triton.jit
def _read(
    x_ptr, weight_ptr, at, share, low, high, VEC: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    SMOOTHING: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Of a part of a row, in one pass, maximum, sum of exponentials, and sums of `_spread` and of `_shares`.

    Every GROUP neighbours, which one thread holds, share a running maximum: a sum is rescaled once a group and not once
    an element, which would double the exponentials. The groups meet at the end.
    """
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    HALF: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    inner = tl.arange(0, BLOCK)  # [BLOCK]
    tops = tl.full([BLOCK // GROUP], float("-inf"), FLOAT)
    totals = tl.zeros([BLOCK // GROUP], FLOAT)
    spreads = tl.zeros([BLOCK // GROUP], FLOAT)
    weights = tl.zeros([BLOCK // GROUP], FLOAT)
    for start in range(0, high, BLOCK):
        x = _float(_tile_of(x_ptr, at, start + inner, low, high, VEC, True), CAP)  # read MN
        x = tl.reshape(x, [BLOCK // GROUP, GROUP])
        new = tl.maximum(tops, tl.max(x, 1))
        shift = _finite(new)
        totals = totals * _exp(tops - shift) + tl.sum(_exp_from(x, shift[:, None], HALF), 1) * _rounding_of(shift, HALF)
        if SMOOTHING != 0.0:
            own = (start + inner >= low) & (start + inner < high)
            shares = tl.reshape(_shares(start + inner - low, own, share, weight_ptr), [BLOCK // GROUP, GROUP])
            own = tl.reshape(own, [BLOCK // GROUP, GROUP])
            spreads += (_finite(tops) - shift) * weights + tl.sum(_spread(x, shift[:, None], own, shares), 1)
            weights += tl.sum(shares, 1)
        tops = new
    top, total = _merge(tops, totals)
    return top, total, tl.sum(spreads + (_finite(tops) - _finite(top)) * weights, 0), tl.sum(weights, 0)


@triton.jit
def _most(x, y, HALF: tl.constexpr):
    """The larger of pairs of half-precision numbers, by one instruction for both."""
    if HALF == tl.bfloat16:
        return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], tl.int32, True, 1)
    else:
        return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [x, y], tl.int32, True, 1)


@triton.jit
def _held(
    chunks, weight_ptr, N, share, low, high, HALF: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    SMOOTHING: tl.constexpr, CAP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The same of tiles that are held."""
    inner = tl.arange(0, BLOCK)  # [BLOCK]
    if PACKED:
        pairs = chunks[0]
        for i in tl.static_range(1, CHUNKS):
            pairs = _most(pairs, chunks[i], HALF)
        tops = _anew(pairs, N, N, HALF, CAP)
    else:
        tops = _anew(chunks[0], N, N, HALF, CAP)
        for i in tl.static_range(1, CHUNKS):
            tops = tl.maximum(tops, _anew(chunks[i], N, N, HALF, CAP))
    top = tl.max(tops, 0)
    shift = _finite(top)
    totals = tl.zeros([BLOCK], top.dtype)
    spreads = tl.zeros([BLOCK], top.dtype)
    weights = tl.zeros([BLOCK], top.dtype)
    for i in tl.static_range(CHUNKS):
        x = _anew(chunks[i], top, N, HALF, CAP)
        totals += _exp_from(x, shift, HALF.primitive_bitwidth == 16)
        if SMOOTHING != 0.0:
            own = (i * BLOCK + inner >= low) & (i * BLOCK + inner < high)
            shares = _shares(i * BLOCK + inner - low, own, share, weight_ptr)
            spreads += _spread(x, shift, own, shares)
            if weight_ptr is not None:
                weights += shares
    shares = share * (high - tl.maximum(low, 0)) if weight_ptr is None else tl.sum(weights, 0)
    total = tl.sum(totals, 0) * _rounding_of(shift, HALF.primitive_bitwidth == 16)
    return top, total, tl.sum(spreads, 0), shares


@triton.jit
def _found(
    x_ptr, at, N, low, high, HALF: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    EVEN: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials as `_held` finds them, to the same bits, of a part that nobody holds."""
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in range(CHUNKS):
        tops = tl.maximum(tops, _anew(_kept(x_ptr, at, i * BLOCK, low, high, VEC, BLOCK, EVEN, True), N, N, HALF, CAP))
    top = tl.max(tops, 0)
    shift = _finite(top)
    totals = tl.zeros([BLOCK], tl.float32)
    for i in range(CHUNKS):
        x = _anew(_kept(x_ptr, at, i * BLOCK, low, high, VEC, BLOCK, EVEN, True), top, N, HALF, CAP)
        totals += _exp_from(x, shift, HALF.primitive_bitwidth == 16)
    return top, tl.sum(totals, 0) * _rounding_of(shift, HALF.primitive_bitwidth == 16)


@triton.jit
def _tiles_of(
    x_ptr, at, low, high, VEC: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """A part of a row as CHUNKS tiles, as they stand in memory."""
    chunks = ()
    for i in tl.static_range(CHUNKS):  # only the first tile and the last two may reach beyond the row
        chunks += (_kept(x_ptr, at, i * BLOCK, low, high, VEC, BLOCK, EVEN, (i == 0 and not EVEN) or i >= CHUNKS - 2),)
    return chunks


@triton.jit
def _entropy_parts(
    left_ptr, dx_ptr, x_ptr, board_ptr, target_ptr, weight_ptr, scale_ptr, sums_ptr,
    N, dx_stride, x_stride, SPAN, PARTS, SCALE_STEP, IGNORE,
    VEC: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    TRIES: tl.constexpr, COUNTS: tl.constexpr, MEAN: tl.constexpr,
    SMOOTHING: tl.constexpr, Z: tl.constexpr, CAP: tl.constexpr, LATE: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """A row by PARTS programs, each of which takes SPAN of its numbers.

    CHUNKS tiles of them are held until they are needed again; with no CHUNKS, they are read again, from a cache if that
    still has them. EVEN: rows are whole vectors. LANES is zero where a row belongs to one program.
    """
    NOTHING: tl.constexpr = -36028797018963968  # the word of a part without numbers: -inf and 0
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    SPAN = SPAN * VEC
    at, low, high = row_vectors(row * x_stride, N, part * SPAN, SPAN, VEC)
    to = row_vectors(row * dx_stride, N, part * SPAN, SPAN, VEC)[0]
    inner = tl.arange(0, BLOCK)  # [BLOCK]
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    if CHUNKS > 0:
        chunks = _tiles_of(x_ptr, at, low, high, VEC, BLOCK, CHUNKS, EVEN)  # read MN
    target, counts, weight = _class_of(target_ptr, weight_ptr, row, None, N, IGNORE, FLOAT)
    mine = (target + low >= 0) & (target + low < high)
    x_t = _float(tl.load(x_ptr + row * x_stride + target), CAP)  # of use where it is this program's own
    share = _share(N, FLOAT, SMOOTHING)
    if CHUNKS > 0:
        top, total, spread, shares = _held(
            chunks, weight_ptr, N, share, low, high, HALF, BLOCK, CHUNKS, SMOOTHING, CAP, PACKED
        )  # fmt: skip
    else:
        top, total, spread, shares = _read(x_ptr, weight_ptr, at, share, low, high, VEC, BLOCK, GROUP, SMOOTHING, CAP)
    own_top = _finite(top)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros on the board, and the sums; the row is here already
    SUMMED: tl.constexpr = SMOOTHING != 0.0 and weight_ptr is not None
    if counts:
        if LANES > 0:
            board_ptr += row * PARTS
            publish(board_ptr + part, _word(top, total))
        # Behind the word, for which others wait.
        scale, classes = _known(scale_ptr, sums_ptr, row, None, SCALE_STEP, N, weight, COUNTS, MEAN, SUMMED)
        if LANES > 0:
            lanes = tl.arange(0, LANES)  # [LANES]
            words, missing = wait_for(board_ptr, lanes, PARTS, NOTHING, TRIES)
            while missing < LANES:
                # By the very steps of the program that has not come, and so to the same bits.
                begin, first, last = row_vectors(row * x_stride, N, missing * SPAN, SPAN, VEC)
                if CHUNKS > 0:
                    most, sum = _found(x_ptr, begin, N, first, last, HALF, VEC, BLOCK, CHUNKS, EVEN, CAP)
                else:
                    most, sum, _, _ = _read(x_ptr, weight_ptr, begin, share, first, last, VEC, BLOCK, GROUP, 0.0, CAP)
                # Left for others to find. If it has come meanwhile, its word counts: its logits may be overwritten.
                found = tl.atomic_cas(board_ptr + missing, tl.zeros([], tl.int64), _word(most, sum), sem="acq_rel")
                words = tl.where(lanes == missing, tl.where(found == 0, _word(most, sum), found), words)
                missing = first_missing(words, lanes)
            tops = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)  # [LANES]
            top, total = _merge(tops, words.to(tl.int32).to(tl.float32, bitcast=True))
            # missing - LANES is zero, but the compiler cannot know.
            low += missing - LANES
        log_total = tl.log(total)
        of_p, hit, every, of_loss = _factors(scale, classes, N, weight, top + log_total, SMOOTHING, Z)
        loss = _loss(x_t, top, log_total, weight, of_loss, classes, 0.0, SMOOTHING, Z)
        if SMOOTHING != 0.0:
            spread += (own_top - top) * shares
            tl.store(left_ptr + tl.program_id(0), tl.where(mine, loss, 0.0) - spread)
        elif mine:
            tl.store(left_ptr + row, loss)
        if dx_ptr is not None:
            HALVES: tl.constexpr = HALF.primitive_bitwidth == 16
            of_p *= _rounding_of(top, HALVES) / total
            if CHUNKS > 0:
                for i in tl.static_range(CHUNKS):
                    own = (i * BLOCK + inner >= low) & (i * BLOCK + inner < high)
                    x = _anew(chunks[i], total, N, HALF, CAP)
                    columns = i * BLOCK + inner - low
                    dx = _gradient(x, columns, own, top, of_p, every, weight_ptr, HALVES, SMOOTHING, CAP)
                    here = dx_ptr + to + i * BLOCK
                    if (i > 0 or EVEN) and i < CHUNKS - 2:
                        tl.store(here + inner, dx.to(dx_ptr.dtype.element_ty))  # write MN
                    elif EVEN:
                        inside = i * BLOCK + inner < high // VEC * VEC  # whole vectors
                        tl.store(here + inner, dx.to(dx_ptr.dtype.element_ty), mask=inside)
                    else:
                        store_row_part(here, dx, inner, low - i * BLOCK, tl.minimum(high - i * BLOCK, BLOCK), VEC)
            else:
                # From the end back: what was read last is likeliest to be in a cache still.
                final = (high - 1) // BLOCK * BLOCK
                for back in range(0, high, BLOCK):
                    start = final - back
                    x = _float(_tile_of(x_ptr, at, start + inner, low, high, VEC, True), CAP)  # read MN again
                    own = (start + inner >= low) & (start + inner < high)
                    columns = start + inner - low
                    dx = _gradient(x, columns, own, top, of_p, every, weight_ptr, HALVES, SMOOTHING, CAP)
                    store_row_part(
                        dx_ptr + to + start, dx, inner, low - start, tl.minimum(high - start, BLOCK), VEC
                    )  # write MN
            if mine:
                # At the class once more, behind all that the program has written: cheaper than to ask at every column.
                tl.debug_barrier()
                there = _gradient(x_t, target, mine, top, of_p, every, weight_ptr, HALVES, SMOOTHING, CAP)
                there -= _bent(hit, x_t, CAP)
                tl.store(dx_ptr + row * dx_stride + target, there.to(dx_ptr.dtype.element_ty))
    else:
        if SMOOTHING != 0.0:
            tl.store(left_ptr + tl.program_id(0), tl.zeros([], FLOAT))
        elif mine:
            tl.store(left_ptr + row, tl.zeros([], FLOAT))
        if dx_ptr is not None:
            for start in range(0, high, BLOCK):
                zeros = tl.zeros([BLOCK], FLOAT)
                store_row_part(dx_ptr + to + start, zeros, inner, low - start, tl.minimum(high - start, BLOCK), VEC)


@triton.jit
def _times(dx_ptr, scale_ptr, TILES, N, dx_stride, SCALE_STEP, BLOCK: tl.constexpr):
    """Rows times a factor, in place: nothing is read or written where one factor is for all, and is one."""
    scale = tl.load(scale_ptr)
    if (SCALE_STEP != 0) | (scale != 1.0):
        across = tl.cdiv(N, BLOCK)
        for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
            row = (tile // across).to(tl.int64)
            columns = tile % across * BLOCK + tl.arange(0, BLOCK)
            scale = tl.load(scale_ptr + row * SCALE_STEP)
            at = dx_ptr + row * dx_stride + columns
            dx = tl.load(at, mask=columns < N).to(scale.dtype)
            dx = tl.where(dx == 0, dx, dx * scale)  # a row that is ignored has no gradient, whatever its factor
            tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=columns < N)


# Plans ---------------------------------------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """How rows are cut: numbers of a tile, warps, tiles of a part at most, whether they are held, registers."""

    block: int
    warps: int
    most: int
    held: bool
    registers: int | None


#: By the bytes of a number, for ever wider rows; the last is for rows that several programs share. A row of one program
#: waits for nobody: programs of few warps, several on a multiprocessor, wait in turn. What they hold of a row takes
#: registers, so that wider rows take more warps. Parts are small for the same reason.
_CUTS: dict[int, tuple[_Cut, ...]] = {
    2: (
        _Cut(2048, 4, 8, True, None), _Cut(2048, 8, 10, True, 64), _Cut(4096, 16, 8, True, 64),
        _Cut(1024, 4, 22, True, 128),
    ),
    4: (_Cut(4096, 8, 2, True, None), _Cut(4096, 16, 8, True, None), _Cut(1024, 4, 8, True, 128)),
    8: (_Cut(4096, 16, 8, False, None),),
}  # fmt: skip
#: The interpreter pays by the program and the operation: few large tiles.
_INTERPRETED = _Cut(16384, 16, 2, True, None)


@functools.lru_cache(maxsize=4096)
def entropy_plan(
    m: int, n: int, dtype: torch.dtype, capability: tuple[int, int] | None, *, vector: int = 1, even: bool = False
) -> Plan:
    """Choose the kernel and its constants for `m` rows of `n` numbers.

    `capability` is None in the interpreter. `vector`: numbers in 16 bytes, where each row begins at the same place
    within 16 bytes in logits and gradient; otherwise 1. `even`: that place is the first.
    """
    size = dtype.itemsize
    if n <= 4096:
        # One warp of 16 numbers a thread; where there is little to do, of 16 bytes, since such programs are short and
        # end soon. In both a row is added up alike.
        block = triton.next_power_of_2(max(n, 1))
        rows = max(1, (512 if m * block > 2**18 else 512 // size) // block)
        if capability is None:
            rows = min(max(1, 65536 // block), triton.next_power_of_2(max(1, m)))
        warps = max(1, block * size // 2048)
        # Each of many programs leaves a number, and one program sums up what they have left.
        return Plan("rows", {"ROWS": rows, "BLOCK": block}, min(triton.cdiv(m, rows), 16384), warps)
    # Parts are whole lines of 128 bytes, and a row may lie across one vector more than it fills.
    line = 128 // size
    even = even and n % vector == 0
    reach = n if even else n + vector - 1
    cuts = _CUTS[size] if capability else (_INTERPRETED, _INTERPRETED._replace(held=size == 2))
    if size == 2 and vector > 1 and not even:  # to tell a row's ends from its neighbours' numbers takes registers
        cuts = cuts[-1:]
    elif size == 2 and vector == 1:  # nothing is held
        cuts = cuts[-2:]
    block, warps, most, held, registers = next((cut for cut in cuts if reach <= cut.block * cut.most), cuts[-1])
    # A word of the board has no room for numbers of float64.
    parts = 1 if size == 8 else triton.cdiv(reach, block * most)
    span = triton.cdiv(triton.cdiv(reach, parts), line) * line
    chunks = triton.cdiv(span, block)
    # Only the last two tiles may reach beyond a row, so a last part must not be shorter than others by a tile.
    held = held and n - (parts - 1) * span > (chunks - 2) * block and (vector > 1 or size > 2)
    constants = {
        "VEC": vector,
        "BLOCK": block,
        "GROUP": 16 // size,
        "CHUNKS": chunks if held else 0,
        "LANES": max(32 * warps, triton.next_power_of_2(parts)) if parts > 1 else 0,
        "TRIES": 0 if capability is None else 4096,  # some milliseconds
        "EVEN": even,
        "PACKED": capability is not None and size == 2,
    }
    return Plan("parts", constants, m * parts, warps, span, parts, registers)


# Launching -----------------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """What a loss is made of, beside logits and classes."""

    weight: Tensor | None
    reduction: str
    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float | None

    def of(self, x: Tensor) -> Terms:
        """With weights side by side, in what rows of `x` are computed in."""
        if self.weight is None:
            return self
        wide = accumulated(x.dtype)
        weight = self.weight if self.weight.dtype == wide else apply(Tensor.to, self.weight, wide)
        return self._replace(weight=contiguous(weight))


#: The same in a schema of an operator.
TERMS = "Tensor target, Tensor? weight, str reduction, SymInt ignore_index, float smoothing, float z, float? cap"


def line(x: Tensor) -> Tensor:
    """As one axis."""
    return contiguous(x).view(-1)


def loss_like(x: Tensor, target: Tensor, reduction: str) -> Tensor:
    """Memory for a loss, or one for each target."""
    return empty(target.shape if reduction == "none" else (), accumulated(x.dtype), x.device)


class Sums(NamedTuple):
    """What is known before the first row: weights of targets and of classes, in parts; and a board of zeros."""

    sums: Tensor | None
    counts: int
    board: Tensor | None
    late: dict[str, bool]


def plan_of(x: Tensor, dx: Tensor | None) -> Plan:
    """The plan for logits and, where it is asked for, their gradient."""
    whole = 16 // x.element_size()
    alike = x.data_ptr() % 16 == 0
    if dx is not None and dx is not x:
        alike = alike and dx.data_ptr() % 16 == 0 and (x.stride(0) - dx.stride(0)) % whole == 0
    vector = whole if alike else 1
    even = vector > 1 and x.stride(0) % vector == 0
    return entropy_plan(*x.shape, x.dtype, gpu(x.device)[0], vector=vector, even=even)


def begin(x: Tensor, target: Tensor, terms: Terms, words: int) -> Sums:
    """Sum up the weights of the targets, where somebody asks for that, and zero `words` words."""
    mean = terms.reduction == "mean"
    counts = 0
    if mean or (terms.smoothing and terms.weight is not None):
        counts = min(64, triton.next_power_of_2(triton.cdiv(max(1, len(target)), 16384)))
    if not counts and not words:
        return Sums(None, 0, None, {})
    sums = empty((2 * counts,), accumulated(x.dtype), x.device) if counts else None
    board = empty((words,), torch.int64, x.device) if words else None
    early = overlapping(x.device)
    grid = (max(counts, triton.cdiv(words, 4096)),)
    launch(
        _begin, grid, board, sums, target, terms.weight, words, len(target), x.shape[1], terms.ignore_index,
        BLOCK=4096, COUNTS=counts, EARLY=bool(early), num_warps=16,
    )  # fmt: skip
    return Sums(sums, counts, board, early)


def rows_into(
    left: Tensor, dx: Tensor | None, x: Tensor, target: Tensor, scale: Tensor | None, terms: Terms, sums: Sums,
    plan: Plan,
) -> None:  # fmt: skip
    """Launch what finds losses and gradients of rows."""
    common = {
        "COUNTS": sums.counts, "MEAN": terms.reduction == "mean", "SMOOTHING": terms.smoothing, "Z": terms.z_loss,
        "CAP": terms.softcap, "LATE": bool(sums.late), "num_warps": plan.warps, **plan.constants, **sums.late,
    }  # fmt: skip
    known = (target, terms.weight, scale, sums.sums)
    strides = (dx.stride(0) if dx is not None else 0, x.stride(0))
    step = scale.stride(0) if scale is not None and scale.dim() else 0
    m, n = x.shape
    if not m:
        return
    if plan.kernel == "rows":
        align = aligned(n, x, dx)
        strides = (strides[0] // align, strides[1] // align)
        launch(
            _entropy_rows, (plan.programs,), left, dx, x, *known, m, n // align, *strides, step, terms.ignore_index,
            ALIGN=align, APART=len(left) == m, **common,
        )  # fmt: skip
    else:
        if plan.registers:
            common["maxnreg"] = plan.registers
        span = plan.span // plan.constants["VEC"]
        launch(
            _entropy_parts, (plan.programs,), left, dx, x, sums.board, *known, n, *strides, span, plan.parts, step,
            terms.ignore_index, **common,
        )  # fmt: skip


def left_by(plan: Plan, m: int, terms: Terms, apart: bool) -> tuple[int, ...]:
    """The shape of what rows leave for their sum: numbers of rows, of parts where logits are summed up, or less."""
    if terms.smoothing and plan.parts > 1:
        return (m, plan.parts)
    return (m,) if apart or plan.kernel != "rows" else (plan.programs,)


def end(loss: Tensor, left: Tensor, terms: Terms, sums: Sums) -> None:
    """The loss of all rows from what each has left."""
    if terms.reduction == "none":
        if left.dim() > 1:
            apply(torch.sum, left, 1, out=loss)
        return
    block, warps = (4096, 16) if left.numel() > 1024 else (1024, 4)
    known = {"COUNTS": sums.counts, "MEAN": terms.reduction == "mean"}
    launch(_end, (1,), loss, left, sums.sums, left.numel(), **known, BLOCK=block, num_warps=warps)


def entropy_into(
    loss: Tensor, dx: Tensor | None, x: Tensor, target: Tensor, scale: Tensor | None, terms: Terms
) -> None:
    """Loss of logits [M, N], and their gradient, which may be written where they are."""
    plan = plan_of(x, dx)
    apart = terms.reduction == "none"
    sums = begin(x, target, terms, plan.programs if plan.parts > 1 else 0)
    shape = left_by(plan, len(x), terms, apart)
    left = loss if apart and len(shape) == 1 else empty(shape, loss.dtype, x.device)
    rows_into(left, dx, x, target, scale, terms, sums, plan)
    end(loss, left, terms, sums)


def _times_into(_: None, dx: Tensor, scale: Tensor) -> None:
    m, n = dx.shape
    block = min(4096, triton.next_power_of_2(n))
    tiles = m * triton.cdiv(n, block)
    grid = (min(tiles, 8 * gpu(dx.device)[1]),)
    step = scale.stride(0) if scale.dim() else 0
    launch(_times, grid, dx, scale, tiles, n, dx.stride(0), step, BLOCK=block, num_warps=8)


_scale = Operator(
    "scale_rows", "(Tensor(a!) dx, Tensor scale) -> ()",
    check=lambda *given: given, outputs=lambda *_: None, into=_times_into,
)  # fmt: skip


def times(dx: Tensor, scale: Tensor) -> None:
    """Multiply rows in place by a number, or each by its own; costs a launch where that is a single one."""
    if dx.numel():
        _scale.call(dx, scale)


# Arguments and gradients ---------------------------------------------------------------------------------------------


def check_terms(
    name: str, target: Any, weight: Any, reduction: Any, ignore_index: Any, smoothing: Any, z_loss: Any, softcap: Any,
    **rows: Any,
) -> Terms:  # fmt: skip
    """Refuse what is no target, no weight of classes or no term; `rows` are those that have C classes, see `shapes`."""
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


def read_target(name: str, target: Tensor, classes: int, ignore_index: int, check: bool | None) -> None:
    """Read the targets and raise IndexError for the first that is no class, where `check` asks for it.

    That waits for a GPU, so None reads only what is on the CPU.
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


def once_only(name: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Of an operator that returns gradients: that they have none."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            f"{name}: expected first derivatives to be asked for, got a gradient of its gradient, for which it has no "
            f"rule; use torch.nn.functional.cross_entropy"
        )

    return backward, lambda ctx, inputs, output: None


class Once(torch.autograd.Function):
    """A loss whose gradients are found with it, and handed out by the first backward pass; another finds them anew.

    ``found()`` returns the loss and the gradients of the first tensors, and ``anew(g, *tensors)`` the gradients again,
    given that of the loss. Or in place of the first gradients what finds them, called as `anew` is, once at most. The
    tensors are all that a gradient depends on: one that was changed in place meanwhile is refused.
    """

    @staticmethod
    def forward(
        ctx: Any, found: Callable[[], Sequence[Tensor]], anew: Callable[..., Sequence[Tensor]] | None,
        *tensors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        loss, *ctx.gradients = found()
        ctx.anew = anew
        if anew is not None:
            ctx.save_for_backward(*tensors)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        g = as_it_is(g)
        gradients, ctx.gradients = ctx.gradients, None
        # A batch of gradients, as torch.autograd asks for it, or zeros without memory.
        batched = not (torch._C._has_storage(g) and g.data_ptr())
        later = gradients is not None and callable(gradients[0])
        if gradients is None or torch.is_grad_enabled() or (later and batched):
            if ctx.anew is None:
                raise RuntimeError(
                    "cross_entropy: expected one backward pass, since inplace=True keeps the gradient in the logits' "
                    "memory and hands it out once; pass inplace=False to go back several times"
                )
            gradients = ctx.anew(g, *ctx.saved_tensors)
        elif later:
            gradients = gradients[0](g, *ctx.saved_tensors)
        elif batched:
            gradients = [dx * g.view(g.shape + (1,) * (dx.dim() - g.dim())) for dx in gradients]
        else:
            for dx in gradients:
                times(dx.view(-1, dx.shape[-1]) if dx.is_contiguous() else dx, g.reshape(-1) if g.dim() else g)
        return None, None, *gradients, *[None] * (len(ctx.needs_input_grad) - 2 - len(gradients))


#: `Once.apply`, for callers that are not traced or transformed.
once = recorder(Once)
