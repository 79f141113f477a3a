# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/linear_cross_entropy.py. It needs torch, Triton, NumPy, _call.py, _entropy.py,
# _few.py and _rows.py.
"""Cross entropy of hidden states by the weight of a head, without the logits of all of them in memory at once.

For M hidden states h of K numbers and N classes with the weight W [N, K]:

    loss = cross_entropy(h W^T + b, target)    dh = dx W    dW = dx^T h    db = sum of dx's rows

where dx is the gradient of the logits. The states are taken some rows at a time: their logits by a product, loss and
gradient by one kernel in place, see `_entropy`, and then two more products. So the logits take the memory of some rows,
and are written once, read and overwritten once, and read twice; the products are cuBLAS's, but those of few classes in
half types, see `_few`.

In half types each product adds up in float32, and the gradient of the weight is rounded once for each chunk of rows,
where it is added to what the chunks before have left: the fewer chunks, the fewer roundings.

In float16 the gradient of a logit among many is no normal number, even of a loss that is scaled: of 256000 classes the
average has a bit less than others at a scale of 8 a row, and unlikely ones have few. So rows of many logits are raised,
each by a power of two that leaves it room, and the products lower what they have added up, before it is rounded.

The gradient of the bias is that of one more number in each hidden state, which is always one.

Rows that are ignored take no part, whatever they hold: a product would make NaN of a NaN and the zeros of their
gradient. So the products for the gradients read hidden states in which these rows are zero.

Its gradients wait for the scale of the loss. Logits that are few are kept for them, others multiplied anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter

from . import _entropy, _few
from ._call import Operator, accumulated, apply, contiguous, empty, gpu, integer, launch, lower, lowered, watched
from ._entropy import TERMS, Terms, _class_of, _factors, _known, line, loss_like, once
from ._rows import contiguous_rows

__all__ = ["linear_cross_entropy", "linear_cross_entropy_eager", "linear_cross_entropy_with_gradients"]

# The unfused chain ---------------------------------------------------------------------------------------------------


def linear_cross_entropy_eager(h: Tensor, head: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss and its gradients by way of all logits: what chunks of rows save.

    Parameters
    ----------
    h : torch.Tensor
        M hidden states of K numbers.
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
    p = torch.softmax(x.to(accumulated(x.dtype)), -1)  # read and write MN twice, in float32
    at = target[:, None]
    loss = -p.gather(1, at).log().mean()
    p.scatter_add_(1, at, torch.full_like(at, -1, dtype=p.dtype))
    dx = (p / len(h)).to(h.dtype)  # read and write MN twice
    return loss, dx @ head, dx.T @ h  # read MN twice


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _linear_raises(
    raised_ptr, rest_ptr, target_ptr, weight_ptr, scale_ptr, sums_ptr, M, N, SCALE_STEP, IGNORE,
    COUNTS: tl.constexpr, MEAN: tl.constexpr, SMOOTHING: tl.constexpr, Z: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """By how much rows are scaled, MOST times as much or a smaller power of two, and what is left to MOST."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = rows < M
    _, counts, weight = _class_of(target_ptr, weight_ptr, rows, live, N, IGNORE, tl.float32)
    SUMMED: tl.constexpr = SMOOTHING != 0.0 and weight_ptr is not None
    scale, classes = _known(scale_ptr, sums_ptr, rows, live, SCALE_STEP, N, weight, COUNTS, MEAN, SUMMED)
    # No logarithm of a sum is beyond what float16 holds, and a bit. Nothing in a row is above all its factors together.
    of_p, hit, every, _ = _factors(scale, classes, N, weight, tl.full([BLOCK], 65536.0, tl.float32), SMOOTHING, Z)
    room = 32768.0 / (tl.abs(of_p) + tl.abs(hit) + tl.abs(every * classes))
    power = (room.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # What is left raises hidden states: beside no gradient they must not become infinite.
    times = tl.where(counts & (room < MOST), tl.where(room >= 1.0, power, 1.0), MOST)
    given = 1.0
    if scale_ptr is not None:
        given = tl.load(scale_ptr + rows * SCALE_STEP, mask=live).to(tl.float32)
    tl.store(raised_ptr + rows, given * times, mask=live)
    tl.store(rest_ptr + rows, MOST / times, mask=live)


@triton.jit
def _linear_times(
    out_ptr, x_ptr, rest_ptr, target_ptr, K, out_stride, x_stride, IGNORE, FACTOR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows by powers of two, which round nothing that float32 has not rounded; zeros in rows that are ignored."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    own = columns < tl.where(tl.load(target_ptr + row) != IGNORE, K, 0)
    x = tl.load(x_ptr + row * x_stride + columns, mask=own, other=0.0).to(tl.float32)
    x *= tl.load(rest_ptr + row) * FACTOR
    tl.store(out_ptr + row * out_stride + columns, x.to(out_ptr.dtype.element_ty), mask=columns < K)


@triton.jit
def _linear_whole(
    out_ptr, x_ptr, target_ptr, M, K, HEIGHT, WIDTH, out_stride, x_stride, IGNORE, WORD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy [M, K] numbers into [HEIGHT, WIDTH], zeros behind them; all in words of WORD numbers.

    With targets, rows that are ignored are zeros too. Without `x_ptr`, nothing but these zeros is written.
    """
    BITS: tl.constexpr = WORD * out_ptr.dtype.element_ty.primitive_bitwidth
    KIND: tl.constexpr = tl.int64 if BITS == 64 else tl.int32 if BITS == 32 else tl.int16
    out_ptr = out_ptr.to(tl.pointer_type(KIND), bitcast=True)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    counts = rows < M
    if target_ptr is not None:
        counts &= tl.load(target_ptr + rows, mask=counts, other=IGNORE) != IGNORE
    own = (rows < HEIGHT) & (columns < WIDTH)  # [ROWS, BLOCK]
    out_ptr += rows * out_stride + columns
    if x_ptr is None:
        tl.store(out_ptr, tl.zeros([ROWS, BLOCK], KIND), mask=own & (counts == 0))
    else:
        x_ptr = x_ptr.to(tl.pointer_type(KIND), bitcast=True) + rows * x_stride + columns
        tl.store(out_ptr, tl.load(x_ptr, mask=counts & (columns < K), other=0), mask=own)


# Plan ----------------------------------------------------------------------------------------------------------------

#: What the logits of a chunk may take, in bytes.
CHUNK_BYTES = 2**30


def chunk_plan(m: int, n: int, itemsize: int) -> int:
    """How many rows of `n` logits are taken at a time.

    As many as fit into a GiB: a product of few rows reads the whole weight for little work, and each chunk rounds the
    gradient of the weight once more and reads and writes all of it. Beyond some thousands of rows a product is as fast
    as it gets, and more memory buys nothing. Chunks are alike, and whole tiles of 128 rows.
    """
    most = max(1, CHUNK_BYTES // (n * itemsize))
    if m <= most:
        return max(1, m)
    most = most // 128 * 128 or most
    chunks = -(-m // most)
    rows = -(-m // chunks)
    return min(most, -(-rows // 128) * 128)


#: Classes, and multiplications of a product, from which classes beside whole vectors are multiplied apart.
APART = 1024, 2**32


def pieces_plan(m: int, k: int, n: int, itemsize: int, *, aligned: bool) -> tuple[int, tuple[slice, ...]]:
    """How far apart rows of logits begin, and which classes are multiplied at a time.

    Tensor cores are fed by vectors of 16 bytes, and cuBLAS's fast products ask that rows of all matrices begin at whole
    vectors, as those of what is given do where `aligned`, and are made of them. So a few classes are left over.
    """
    whole = 16 // itemsize
    if itemsize != 2 or not aligned or n < whole or n % whole == 0:
        return n, (slice(0, n),)
    even = n - n % whole
    apart = k % whole == 0 and n >= APART[0] and m * k * n >= APART[1]
    return even + whole, (slice(0, even), slice(even, n)) if apart else (slice(0, n),)


#: Multiplications that products of rows beside whole vectors lose while a byte is copied, and while a copy is launched.
WHOLE = 8, 2**23


def whole_plan(m: int, k: int, n: int, itemsize: int, *, aligned: bool, products: int, copies: int) -> bool:
    """Whether half types whose rows are no whole vectors are copied into rows that are, for so many products.

    cuBLAS moves such rows by words of 2 to 8 bytes, and multiplies slower. A copy reads and writes hidden states
    or the head: worth it where both sides of the logits are long, since each number is multiplied with one of them.
    Rows of an even length are moved by 4 bytes or more, which costs less where few classes make the hidden states most
    of what is moved.
    """
    if itemsize != 2 or (aligned and k % 8 == 0):
        return False
    a_byte, a_launch = WHOLE
    if k % 2 == 0 and n < m:
        a_byte *= 4
    return products * m * k * n > copies * ((m + n) * k * itemsize * a_byte + a_launch)


def kept_plan(m: int, k: int, n: int, itemsize: int) -> bool:
    """Whether logits are kept for a backward pass that needs them, which would multiply anew otherwise.

    Where they take no more memory than what they are a product of, which is kept too, and are one chunk.
    """
    return KEPT and m * n <= (m + n) * k and m <= chunk_plan(m, n, itemsize)


#: Whether any are.
KEPT = True


#: By how much gradients of logits in float16 are raised at most: those of a row that is scaled by 1 and has a million
#: classes are normal numbers then, and a row that is scaled by 256 still has room for it.
RAISED = 64
#: Classes above which they are. Of fewer the average is a normal number of a loss that is scaled.
FEW = 4096


# Launchers -----------------------------------------------------------------------------------------------------------


def padded(shape: tuple[int, int], pitch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for rows that begin so far apart. Whole vectors are read of it, and what lies between rows passed over."""
    return empty((shape[0], pitch), dtype, device)


def _raised(target: Tensor, scale: Tensor | None, terms: Terms, sums: _entropy.Sums, n: int) -> tuple[Tensor, Tensor]:
    """What rows of logits are scaled by, and what is left to do."""
    m = len(target)
    both = empty((2, m), torch.float32, target.device)
    step = scale.stride(0) if scale is not None and scale.dim() else 0
    launch(
        _linear_raises, (triton.cdiv(m, 1024),), both[0], both[1], target, terms.weight, scale, sums.sums, m, n, step,
        terms.ignore_index, COUNTS=sums.counts, MEAN=terms.reduction == "mean", SMOOTHING=terms.smoothing,
        Z=terms.z_loss, MOST=RAISED, BLOCK=1024,
    )  # fmt: skip
    return both[0], both[1]


def _times_into(out: Tensor, x: Tensor, rest: Tensor, target: Tensor, ignored: int, factor: float) -> None:
    m, k = x.shape
    block = min(1024, triton.next_power_of_2(k))
    launch(
        _linear_times, (m, triton.cdiv(k, block)), out, x, rest, target, k, out.stride(0), x.stride(0), ignored,
        FACTOR=factor, BLOCK=block,
    )  # fmt: skip


def _whole_into(out: Tensor, x: Tensor | None, target: Tensor | None = None, ignored: int = 0) -> None:
    """Copy rows into others; where those are more, or longer, the rest becomes zero.

    With targets, rows that are ignored become zero; without `x` that is all that is done.
    """
    height, width = out.shape
    m, k = out.shape if x is None else x.shape
    tensors = [t for t in (out, x) if t is not None]
    strides = [t.stride(0) for t in tensors]
    places = (width, k, *strides, *(t.data_ptr() // t.element_size() for t in tensors))
    word = next(w for w in (4, 2, 1) if w * out.element_size() <= 8 and not any(n % w for n in places))
    width, k = width // word, k // word
    block = min(1024, triton.next_power_of_2(width))
    rows = 2048 // block
    launch(
        _linear_whole, (triton.cdiv(height, rows), triton.cdiv(width, block)), out, x, target, m, k, height, width,
        strides[0] // word, strides[-1] // word, ignored, WORD=word, ROWS=rows, BLOCK=block,
    )  # fmt: skip


def _wide_product(out: Tensor, x: Tensor, w: Tensor, first: bool) -> None:
    """Add a product of half types in float32."""
    if first and x.is_cuda:
        torch.mm(x, w, out.dtype, out=out)
    else:
        torch.addmm(out, x.to(out.dtype), w.to(out.dtype), beta=0 if first else 1, out=out)


def _product_into(out: Tensor, x: Tensor, w: Tensor, pieces: tuple[slice, ...]) -> None:
    """Logits by the head. In half types few classes come first, so that what is rounded between is as small as they."""
    wide = out.dtype != x.dtype
    for later, at in enumerate(pieces if wide else reversed(pieces)):
        if wide:
            apply(_wide_product, out, x[:, at], w[at], not later)
        elif later:
            apply(torch.addmm, out, x[:, at], w[at], out=out)
        else:
            apply(torch.mm, x[:, at], w[at], out=out)


def _add_lowered(out: Tensor, x: Tensor, w: Tensor, first: bool) -> None:
    """Add a product, lowered; no part of its sum is rounded before that, or it might be infinite."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    try:
        if before:
            matmul.allow_fp16_reduced_precision_reduction = False
        torch.addmm(out, x, w, beta=0 if first else 1, alpha=1 / RAISED, out=out)
    finally:
        if before:
            matmul.allow_fp16_reduced_precision_reduction = before


def _chunks_into(
    loss: Tensor | None, gradients: Sequence[Tensor] | None, h: Tensor, head: Tensor, bias: Tensor | None,
    target: Tensor, scale: Tensor | None, terms: Terms, rows: int | None, kept: Tensor | None = None,
) -> None:  # fmt: skip
    """Loss and gradients; the loss alone, which leaves all logits where they are kept; or gradients alone, of those."""
    (m, k), n, size = h.shape, len(head), h.element_size()
    rows = min((rows or chunk_plan(m, n, size)) if kept is None else m, max(1, m))
    aligned = not any(t.stride(0) * t.element_size() % 16 or t.data_ptr() % 16 for t in (h, head))
    products, copies = (1, 2) if gradients is None else (3, 4)
    if kept is not None:
        products, copies = 3, 6  # both passes decide alike: what lies behind logits is zero in both or in none
    few = None
    if rows >= m:  # all states at once
        few = _few.few_plan(m, k, n, h.dtype, gpu(h.device)[1], whole=aligned and k % 8 == 0)
    whole = not few and whole_plan(m, k, n, size, aligned=aligned, products=products, copies=copies)
    pitch, pieces = pieces_plan(m, k, n, size, aligned=aligned)
    width, factor = k, head
    bias = None if bias is None else contiguous(bias)
    if whole:
        width, pitch = (triton.cdiv(length, 8) * 8 for length in (k, n))
        pieces = (slice(0, pitch),)
        factor = empty((pitch, width), h.dtype, h.device)
        _whole_into(factor, head)
        states = empty((rows, width), h.dtype, h.device)
        if bias is not None:
            longer = empty((1, pitch), h.dtype, h.device)
            _whole_into(longer, bias[None])
            bias = longer[0]
    board = padded((rows, n), pitch, h.dtype, h.device) if kept is None else kept
    x = board[:, :n]
    plan = _entropy.plan_of(x, x)
    shape = _entropy.left_by(plan, m, terms, True)
    if loss is None or terms.reduction != "none" or len(shape) > 1:
        left = empty(shape, accumulated(h.dtype), h.device)
    else:
        left = loss
    sums = _entropy.begin(x, target, terms, m * plan.parts if plan.parts > 1 else 0)._replace(late={})
    raised: Tensor | None = None
    if gradients and m and h.dtype == torch.float16 and n > FEW:
        scale, raised = _raised(target, scale, terms, sums, n)
        wide, higher = (empty((rows, width), dtype, h.device) for dtype in (torch.float32, h.dtype))
    if gradients:
        dh, dhead, dbias = gradients[0], gradients[1], None if bias is None else gradients[2][:, None]
        ones = None
        if dbias is not None and not few:
            ones = empty((rows, 1), h.dtype, h.device)
            apply(Tensor.fill_, ones, 1.0)
        if whole:
            dhead = empty((pitch, width), h.dtype, h.device)
            dbias = None if dbias is None else empty((pitch, 1), h.dtype, h.device)
            near = empty((rows, width), h.dtype, h.device) if raised is None else dh
    for first in range(0, m, rows):
        part = slice(first, min(m, first + rows))
        logits = x[: part.stop - first]
        full = board[: len(logits)] if whole else logits
        given, ignored = h[part], (target[part], terms.ignore_index)
        if whole:
            given = states[: len(logits)]
            _whole_into(given, h[part], *ignored)
        if gradients is None or kept is None:
            if few:
                _few.logits_into(logits, h, head, bias, few)
            else:
                for at in pieces:
                    if bias is None:
                        apply(torch.mm, given, factor[at].T, out=full[:, at])
                    else:
                        apply(torch.addmm, bias[at], given, factor[at].T, out=full[:, at])
        here = sums if sums.board is None else sums._replace(board=sums.board[first * plan.parts :])
        _entropy.rows_into(
            left[part], logits if gradients else None, logits, target[part],
            scale[part] if scale is not None and scale.dim() else scale, terms, here, _entropy.plan_of(logits, logits),
        )  # fmt: skip
        if gradients is None:
            continue
        if few:
            _few.gradients_into(dh, dhead, logits, h, head, *ignored, few)
            if dbias is not None:
                apply(torch.sum, logits, 0, out=dbias[:, 0])
            continue
        if whole and pitch > n:  # beside hidden states that are no numbers, nor are products with zeros
            apply(Tensor.zero_, full[:, n:])
        one = None if ones is None else ones[: len(logits)]
        if raised is not None:
            product, lifted = wide[: len(logits)], higher[: len(logits)]
            _product_into(product, full, factor, pieces)
            _times_into(dh[part], product[:, :k], raised[part], *ignored, 1 / RAISED)
            _times_into(lifted, given, raised[part], *ignored, 1.0)
            if one is not None:
                apply(Tensor.copy_, one[:, 0], raised[part])
        elif whole:
            product, lifted = near[: len(logits)], given
            _product_into(product, full, factor, pieces)
            _whole_into(dh[part], product[:, :k], *ignored)
        else:  # the gradient's memory holds the hidden states that count, until it is written
            lifted = dh[part]
            _whole_into(lifted, given, *ignored)
        for at in pieces:
            turned = full[:, at].T
            for there, right in ((dhead[at], lifted), *([] if dbias is None else [(dbias[at], one)])):
                if raised is not None:
                    apply(_add_lowered, there, turned, right, not first)
                elif first:
                    apply(torch.addmm, there, turned, right, out=there)
                else:
                    apply(torch.mm, turned, right, out=there)
        if raised is None and not whole:
            _product_into(dh[part], full, factor, pieces)
            _whole_into(dh[part], None, *ignored)  # zeros, also beside a head that is not finite
    if loss is not None:
        _entropy.end(loss, left, terms, sums)
    if gradients and not m:
        for none in gradients[1:]:
            apply(Tensor.zero_, none)
    elif gradients and whole:
        _whole_into(gradients[1], dhead[:n, :k])
        if dbias is not None:
            apply(Tensor.copy_, gradients[2], dbias[:n, 0])


def _given(
    h: Tensor, head: Tensor, bias: Tensor | None, target: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    return contiguous_rows(h), contiguous_rows(head), bias, line(target)


def _into(loss: Tensor, h: Tensor, head: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> None:
    *terms, rows = rest
    _chunks_into(line(loss), None, *_given(h, head, bias, target), None, Terms(*terms).of(h), rows)


def _all_into(
    found: tuple[Tensor, ...], h: Tensor, head: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> None:
    *terms, rows, scale = rest
    loss, dh, *others = found
    scale = line(scale) if scale is not None and scale.dim() > 1 else scale
    given = *_given(h, head, bias, target), scale
    _chunks_into(line(loss), (contiguous_rows(dh), *others), *given, Terms(*terms).of(h), rows)


def _kept_into(
    found: tuple[Tensor, Tensor], h: Tensor, head: Tensor, bias: Tensor | None, target: Tensor, *terms: Any
) -> None:
    loss, kept = found
    _chunks_into(line(loss), None, *_given(h, head, bias, target), None, Terms(*terms).of(h), None, kept)


def _over_into(
    found: tuple[Tensor, ...], kept: Tensor, h: Tensor, head: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> None:
    *terms, scale = rest
    given = *_given(h, head, bias, target), line(scale) if scale.dim() > 1 else scale, Terms(*terms).of(h)
    _chunks_into(None, (contiguous_rows(found[0]), *found[1:]), *given, None, kept)


def _check(h: Any, head: Any, bias: Any, target: Any, weight: Any, *rest: Any) -> tuple[Any, ...]:
    name = "linear_cross_entropy"
    # The head has a row for each class, as the weight of torch.nn.Linear has.
    rows = {"hidden": (h, "[..., K > 0]"), "head": (head, "[C > 0, K]"), "bias": (bias, "[C]?")}
    terms = _entropy.check_terms(name, target, weight, *rest[:5], **rows)
    if len(rest) > 6 and rest[6] is not None:
        integer(name, "rows", rest[6], "None lets the plan choose", "of 1 or more", lambda rows: rows >= 1)
    return h, head, bias, target, *terms, *rest[6:]


def _read(h: Tensor, head: Tensor, bias: Any, target: Tensor, weight: Any, reduction: Any, *rest: Any) -> None:
    ignore_index, *_, check = rest[:5]
    if check is not False:
        _entropy.read_target("linear_cross_entropy", target, len(head), ignore_index, check)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.reduction = inputs[:6]
    ctx.rest = inputs[6:]
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    tensors, (*rest, rows) = ctx.saved_tensors, ctx.rest
    _, dh, dhead, dbias = _all(*tensors, ctx.reduction, *rest, False, rows, g)
    return dh, dhead, None if tensors[2] is None else dbias, *[None] * (3 + len(ctx.rest))


def _loss_of(h: Tensor, head: Tensor, bias: Any, target: Tensor, weight: Any, reduction: str, *_: Any) -> Tensor:
    return loss_like(h, target, reduction)


def _gradients_of(h: Tensor, head: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    """Without a bias, that of the bias has no elements."""
    return tuple(
        empty(shape, h.dtype, h.device) for shape in (h.shape, head.shape, (0,) if bias is None else bias.shape)
    )


def _all_of(
    h: Tensor, head: Tensor, bias: Any, target: Tensor, weight: Any, reduction: str, *_: Any
) -> tuple[Tensor, ...]:
    return loss_like(h, target, reduction), *_gradients_of(h, head, bias)


def _kept_of(
    h: Tensor, head: Tensor, bias: Any, target: Tensor, weight: Any, reduction: str, *_: Any
) -> tuple[Tensor, Tensor]:
    whole = 16 // h.element_size()
    pitch = (len(head) + whole - 1) // whole * whole
    return loss_like(h, target, reduction), padded((h.numel() // h.shape[-1], len(head)), pitch, h.dtype, h.device)


def _lower(device: str, call: Any, h: Tensor, head: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """The rule of autocast: the product is in its dtype, the loss in float32."""
    return lower(device, lambda *both: call(*both, *rest), h, head, bias)


_GIVEN = f"Tensor h, Tensor head, Tensor? bias, {TERMS}"
_loss = Operator(
    "linear_cross_entropy", f"({_GIVEN}, SymInt? rows) -> Tensor",
    check=_check, outputs=_loss_of, into=_into, read=_read, gradient=(_gradient, _keep), autocast=_lower,
)  # fmt: skip
#: The loss, and the gradients of hidden states, head and bias.
_all = Operator(
    "linear_cross_entropy_with_gradients",
    f"({_GIVEN}, SymInt? rows, Tensor? scale) -> (Tensor, Tensor, Tensor, Tensor)",
    check=_check, outputs=_all_of, into=_all_into, read=_read, gradient=_entropy.once_only("linear_cross_entropy"),
    autocast=_lower,
)  # fmt: skip


def _keeps(rows: int | None, h: Tensor, head: Tensor) -> bool:
    """Whether logits of these are kept for the backward pass."""
    if rows is not None or any(t.is_nested or not t.dim() or not t.numel() for t in (h, head)):
        return False
    return kept_plan(h.numel() // h.shape[-1], h.shape[-1], len(head), h.element_size())


#: The loss, and the logits that it is of.
_kept = Operator(
    "linear_cross_entropy_kept", f"({_GIVEN}) -> (Tensor, Tensor)",
    check=_check, outputs=_kept_of, into=_kept_into, read=_read, gradient=_entropy.once_only("linear_cross_entropy"),
)  # fmt: skip
#: The gradients of a loss whose logits are kept, over which theirs are written.
_over = Operator(
    "linear_cross_entropy_over", f"(Tensor(a!) kept, {_GIVEN}, Tensor scale) -> (Tensor, Tensor, Tensor)",
    check=lambda kept, *rest: (kept, *_check(*rest[:10]), rest[10]), outputs=lambda _, *rest: _gradients_of(*rest),
    into=_over_into,
)  # fmt: skip


def linear_cross_entropy(
    hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None,
    reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, rows: int | None = None, check: bool | None = None,
) -> Tensor:  # fmt: skip
    """Cross entropy of ``hidden @ head.T + bias``, whose gradients are found with it, some rows at a time.

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
        Hidden states that are taken at a time. Their logits are all that the call takes beside its results, 2 bytes a
        number in half types; by default they fill up to a GiB. In float16, of more than 4096 classes, there are 6 bytes
        for each of their own numbers besides. Half types whose rows do not begin at multiples of 16 bytes may be
        copied into rows that do, and their gradients out of such. Those of 16 classes or fewer may take some MiB for
        sums in float32.

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
    Differentiable once; works under `torch.compile`. Where a gradient is recorded, both are found in the forward pass,
    and the backward pass hands them out. A second backward pass, one without reduction, one in float16, whose loss has
    to be scaled before, and one under `torch.compile` compute the logits anew; but in float16, unless `rows` are given,
    logits of one chunk that take no more memory than `hidden` and `head` are kept for the first backward pass.

    Examples
    --------
    >>> import fusebook, torch
    >>> h, head = torch.randn(3, 8, device="cuda"), torch.randn(5, 8, device="cuda", requires_grad=True)
    >>> t = torch.tensor([0, 4, -100], device="cuda")
    >>> fusebook.linear_cross_entropy(h, head, t).backward()  # doctest: +SKIP
    """
    rest = (reduction, ignore_index, label_smoothing, z_loss, softcap, check, rows)
    if isinstance(hidden, Tensor) and isinstance(head, Tensor):
        hidden, head, *low = lowered(hidden, head, *([] if bias is None else [bias]))
        bias = low[0] if low else bias
    given = [t for t in (hidden, head) if isinstance(t, Tensor)]
    learned = given if bias is None else [*given, bias]
    recorded = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in learned)
    plain = len(given) == 2 and all(type(t) in (Tensor, Parameter) for t in learned)
    plain = plain and not getattr(weight, "requires_grad", False)  # which is refused where gradients are recorded
    scaled = any(t.dtype == torch.float16 for t in given)
    if not recorded or not plain or watched() or (not _keeps(rows, *given) if scaled else reduction == "none"):
        return _loss(hidden, head, bias, target, weight, *rest)
    count = 2 if bias is None else 3  # of gradients
    apart = hidden.detach(), head.detach(), None if bias is None else bias.detach()

    def found() -> Sequence[Any]:
        if not scaled:
            return _all(*apart, target, weight, *rest, None)[: 1 + count]
        loss, kept = _kept(*apart, target, weight, *rest[:6])

        def later(g: Tensor, *tensors: Tensor | None) -> Sequence[Tensor]:
            return _over(kept, *(t if t is None else t.detach() for t in tensors), *rest[:5], g)[:count]

        return loss, later

    def anew(g: Tensor, *tensors: Any) -> Sequence[Tensor]:
        return _all(*tensors, *rest[:5], False, rows, g)[1 : 1 + count]

    return once(found, anew, hidden, head, bias, target, weight)


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
    return _all(hidden, head, bias, target, weight, *rest, None)[: 3 if bias is None else 4]
