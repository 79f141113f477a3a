"""Cross entropy of hidden states by the weight of a head, without the logits of all of them in memory at once.

For M hidden states h of K numbers and N classes with the weight W [N, K]:

    loss = cross_entropy(h W^T, target)    dh = dx W    dW = dx^T h

where dx is the gradient of the logits. The states are taken some rows at a time: their logits by a product, loss and
gradient by one kernel in place, see `_entropy`, and then two more products. So the logits take the memory of some rows,
and are written once, read and overwritten once, and read twice; the products are cuBLAS's, but those of few classes in
half types, see `_few`.

In half types each product adds up in float32, and the gradient of the weight is rounded once for each chunk of rows,
where it is added to what the chunks before have left: the fewer chunks, the fewer roundings.

In float16 the gradient of a logit among many is no normal number, even of a loss that is scaled: of 256000 classes the
average has a bit less than others at a scale of 8 a row, and unlikely ones have few. So rows of many logits are raised,
each by a power of two that leaves it room, and the products lower what they have added up, before it is rounded.

Its gradients wait for the scale of the loss. Logits that are few are kept for them, others multiplied anew.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter

from . import _entropy, _few
from ._arguments import integer
from ._entropy import TERMS, Once, Terms, _class_of, _factors, _known, line, loss_like
from ._operator import Operator, accumulated, apply, empty, gpu, launch, watched
from ._rows import rows_in

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
def _linear_times(out_ptr, x_ptr, rest_ptr, K, out_stride, x_stride, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Rows by powers of two, which round nothing that float32 has not rounded."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < K).to(tl.float32)
    x *= tl.load(rest_ptr + row) * FACTOR
    tl.store(out_ptr + row * out_stride + columns, x.to(out_ptr.dtype.element_ty), mask=columns < K)


@triton.jit
def _linear_whole(
    out_ptr, x_ptr, M, K, HEIGHT, WIDTH, out_stride, x_stride, WORD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy [M, K] numbers of half types into [HEIGHT, WIDTH], zeros behind them; all in words of WORD numbers."""
    KIND: tl.constexpr = tl.int64 if WORD == 4 else tl.int32 if WORD == 2 else tl.int16
    x_ptr, out_ptr = x_ptr.to(tl.pointer_type(KIND), bitcast=True), out_ptr.to(tl.pointer_type(KIND), bitcast=True)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    x = tl.load(x_ptr + rows * x_stride + columns, mask=(rows < M) & (columns < K), other=0)
    tl.store(out_ptr + rows * out_stride + columns, x, mask=(rows < HEIGHT) & (columns < WIDTH))


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


def _times_into(out: Tensor, x: Tensor, rest: Tensor, factor: float) -> None:
    m, k = x.shape
    block = min(1024, triton.next_power_of_2(k))
    launch(
        _linear_times, (m, triton.cdiv(k, block)), out, x, rest, k, out.stride(0), x.stride(0),
        FACTOR=factor, BLOCK=block,
    )  # fmt: skip


def _whole_into(out: Tensor, x: Tensor) -> None:
    """Copy rows of half types into others; where those are more, or longer, the rest becomes zero."""
    (height, width), (m, k) = out.shape, x.shape
    places = (width, k, out.stride(0), x.stride(0), *(t.data_ptr() // t.element_size() for t in (out, x)))
    word = next(w for w in (4, 2, 1) if not any(n % w for n in places))
    width, k = width // word, k // word
    block = min(1024, triton.next_power_of_2(width))
    rows = 2048 // block
    launch(
        _linear_whole, (triton.cdiv(height, rows), triton.cdiv(width, block)), out, x, m, k, height, width,
        out.stride(0) // word, x.stride(0) // word, WORD=word, ROWS=rows, BLOCK=block,
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
    loss: Tensor | None, gradients: tuple[Tensor, Tensor] | None, h: Tensor, head: Tensor, target: Tensor,
    scale: Tensor | None, terms: Terms, rows: int | None, kept: Tensor | None = None,
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
    if whole:
        width, pitch = (triton.cdiv(length, 8) * 8 for length in (k, n))
        pieces = (slice(0, pitch),)
        factor = empty((pitch, width), h.dtype, h.device)
        _whole_into(factor, head)
        states = empty((rows, width), h.dtype, h.device)
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
        dh, dhead = gradients
        if whole:
            dhead = empty((pitch, width), h.dtype, h.device)
            near = empty((rows, width), h.dtype, h.device) if raised is None else dh
    for first in range(0, m, rows):
        part = slice(first, min(m, first + rows))
        logits = x[: part.stop - first]
        full = board[: len(logits)] if whole else logits
        given = h[part]
        if whole:
            given = states[: len(logits)]
            _whole_into(given, h[part])
        if gradients is None or kept is None:
            if few:
                _few.logits_into(logits, h, head, few)
            else:
                for at in pieces:
                    apply(torch.mm, given, factor[at].T, out=full[:, at])
        here = sums if sums.board is None else sums._replace(board=sums.board[first * plan.parts :])
        _entropy.rows_into(
            left[part], logits if gradients else None, logits, target[part],
            scale[part] if scale is not None and scale.dim() else scale, terms, here, _entropy.plan_of(logits, logits),
        )  # fmt: skip
        if gradients is None:
            continue
        if few:
            _few.gradients_into(dh, dhead, logits, h, head, few)
            continue
        if whole and pitch > n:  # beside hidden states that are no numbers, nor are products with zeros
            apply(Tensor.zero_, full[:, n:])
        if raised is not None:
            product, lifted = wide[: len(logits)], higher[: len(logits)]
            _product_into(product, full, factor, pieces)
            _times_into(dh[part], product[:, :k], raised[part], 1 / RAISED)
            _times_into(lifted, given, raised[part], 1.0)
        else:
            product, lifted = near[: len(logits)] if whole else dh[part], given
            _product_into(product, full, factor, pieces)
            if whole:
                _whole_into(dh[part], product[:, :k])
        for at in pieces:
            turned, there = full[:, at].T, dhead[at]
            if raised is not None:
                apply(_add_lowered, there, turned, lifted, not first)
            elif first:
                apply(torch.addmm, there, turned, lifted, out=there)
            else:
                apply(torch.mm, turned, lifted, out=there)
    if loss is not None:
        _entropy.end(loss, left, terms, sums)
    if gradients and not m:
        apply(Tensor.zero_, gradients[1])
    elif gradients and whole:
        _whole_into(gradients[1], dhead[:n, :k])


def _into(loss: Tensor, h: Tensor, head: Tensor, target: Tensor, *rest: Any) -> None:
    *terms, rows = rest
    _chunks_into(line(loss), None, rows_in(h), rows_in(head), line(target), None, Terms(*terms).of(h), rows)


def _all_into(found: tuple[Tensor, ...], h: Tensor, head: Tensor, target: Tensor, *rest: Any) -> None:
    *terms, rows, scale = rest
    loss, dh, dhead = found
    scale = line(scale) if scale is not None and scale.dim() > 1 else scale
    given = rows_in(h), rows_in(head), line(target), scale
    _chunks_into(line(loss), (rows_in(dh), dhead), *given, Terms(*terms).of(h), rows)


def _kept_into(found: tuple[Tensor, Tensor], h: Tensor, head: Tensor, target: Tensor, *terms: Any) -> None:
    loss, kept = found
    given = rows_in(h), rows_in(head), line(target), None, Terms(*terms).of(h)
    _chunks_into(line(loss), None, *given, None, kept)


def _over_into(found: tuple[Tensor, Tensor], kept: Tensor, h: Tensor, head: Tensor, target: Tensor, *rest: Any) -> None:
    *terms, scale = rest
    given = rows_in(h), rows_in(head), line(target), line(scale) if scale.dim() > 1 else scale, Terms(*terms).of(h)
    _chunks_into(None, (rows_in(found[0]), found[1]), *given, None, kept)


def _check(h: Any, head: Any, target: Any, weight: Any, *rest: Any) -> tuple[Any, ...]:
    name = "linear_cross_entropy"
    # The head has a row for each class, as the weight of torch.nn.Linear has.
    terms = _entropy.check_terms(name, target, weight, *rest[:5], hidden=(h, "[..., K > 0]"), head=(head, "[C > 0, K]"))
    if len(rest) > 6 and rest[6] is not None:
        integer(name, "rows", rest[6], "None lets the plan choose", "of 1 or more", lambda rows: rows >= 1)
    return h, head, target, *terms, *rest[6:]


def _read(h: Tensor, head: Tensor, target: Tensor, weight: Any, reduction: Any, ignore_index: int, *rest: Any) -> None:
    if rest[3]:
        _entropy.read_target("linear_cross_entropy", target, len(head), ignore_index)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, head, target, weight, *ctx.rest = inputs
    ctx.save_for_backward(h, head, target, *([] if weight is None else [weight]))


def _gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    h, head, target, *weight = ctx.saved_tensors
    *rest, rows = ctx.rest
    found = _all(h, head, target, weight[0] if weight else None, *rest, False, rows, g)
    return *found[1:], *[None] * (2 + len(ctx.rest))


def _loss_of(h: Tensor, head: Tensor, target: Tensor, weight: Any, reduction: str, *_: Any) -> Tensor:
    return loss_like(h, target, reduction)


def _all_of(h: Tensor, head: Tensor, target: Tensor, weight: Any, reduction: str, *_: Any) -> tuple[Tensor, ...]:
    gradients = (empty(t.shape, t.dtype, t.device) for t in (h, head))
    return loss_like(h, target, reduction), *gradients


def _kept_of(h: Tensor, head: Tensor, target: Tensor, weight: Any, reduction: str, *_: Any) -> tuple[Tensor, Tensor]:
    whole = 16 // h.element_size()
    pitch = (len(head) + whole - 1) // whole * whole
    return loss_like(h, target, reduction), padded((h.numel() // h.shape[-1], len(head)), pitch, h.dtype, h.device)


def _over_of(kept: Tensor, h: Tensor, head: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(empty(t.shape, t.dtype, t.device) for t in (h, head))


_loss = Operator(
    "linear_cross_entropy", f"(Tensor h, Tensor head, {TERMS}, SymInt? rows) -> Tensor",
    check=_check, outputs=_loss_of, into=_into, read=_read, gradient=(_gradient, _keep),
)  # fmt: skip
_all = Operator(
    "linear_cross_entropy_with_gradients",
    f"(Tensor h, Tensor head, {TERMS}, SymInt? rows, Tensor? scale) -> (Tensor, Tensor, Tensor)",
    check=_check, outputs=_all_of, into=_all_into, read=_read, gradient=_entropy.once_only("linear_cross_entropy"),
)  # fmt: skip


def _keeps(rows: int | None, h: Tensor, head: Tensor) -> bool:
    """Whether logits of these are kept for the backward pass."""
    if rows is not None or any(t.is_nested or not t.dim() or not t.numel() for t in (h, head)):
        return False
    return kept_plan(h.numel() // h.shape[-1], h.shape[-1], len(head), h.element_size())


#: The loss, and the logits that it is of.
_kept = Operator(
    "linear_cross_entropy_kept", f"(Tensor h, Tensor head, {TERMS}) -> (Tensor, Tensor)",
    check=_check, outputs=_kept_of, into=_kept_into, read=_read, gradient=_entropy.once_only("linear_cross_entropy"),
)  # fmt: skip
#: The gradients of a loss whose logits are kept, over which theirs are written.
_over = Operator(
    "linear_cross_entropy_over",
    f"(Tensor(a!) kept, Tensor h, Tensor head, {TERMS}, Tensor scale) -> (Tensor, Tensor)",
    check=lambda kept, *rest: (kept, *_check(*rest[:9]), rest[9]), outputs=_over_of, into=_over_into,
)  # fmt: skip


def linear_cross_entropy(
    hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    rows: int | None = None, check: bool = True,
) -> Tensor:  # fmt: skip
    """Cross entropy of ``hidden @ head.T``, whose gradients are found with it, some rows at a time.

    Parameters
    ----------
    hidden : torch.Tensor
        [..., K], float16, bfloat16, float32 or float64, on a CUDA device (or on the CPU where Triton interprets).
    head : torch.Tensor
        [N, K], of the same dtype: a row for each class.
    target, weight, reduction, ignore_index, label_smoothing, z_loss, softcap, check
        As of `cross_entropy`.
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
        As `cross_entropy`; also if `hidden` and `head` differ in dtype or do not fit, or `rows` is no count.

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
    given = [t for t in (hidden, head) if isinstance(t, Tensor)]
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    plain = len(given) == 2 and all(type(t) in (Tensor, Parameter) for t in given)
    plain = plain and not getattr(weight, "requires_grad", False)  # which is refused where gradients are recorded
    scaled = any(t.dtype == torch.float16 for t in given)
    if not recorded or not plain or watched() or (not _keeps(rows, *given) if scaled else reduction == "none"):
        return _loss(hidden, head, target, weight, *rest)

    def found() -> tuple[Any, ...]:
        if not scaled:
            return _all(hidden.detach(), head.detach(), target, weight, *rest, None)
        loss, kept = _kept(hidden.detach(), head.detach(), target, weight, *rest[:6])
        return loss, lambda g, hidden, head, *known: _over(kept, hidden.detach(), head.detach(), *known, *rest[:5], g)

    def anew(g: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        return _all(*tensors, *rest[:5], False, rows, g)[1:]

    return Once.apply(found, anew, hidden, head, target, weight)


def linear_cross_entropy_with_gradients(
    hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    rows: int | None = None, check: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Cross entropy of ``hidden @ head.T`` and its gradients, without autograd.

    Parameters
    ----------
    hidden, head, target, weight, reduction, ignore_index, label_smoothing, z_loss, softcap, rows, check
        As of `linear_cross_entropy`.

    Returns
    -------
    loss : torch.Tensor
        As of `linear_cross_entropy`.
    dhidden, dhead : torch.Tensor
        Gradients of the loss, or of the sum of losses without reduction; contiguous, as `hidden` and `head`.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `linear_cross_entropy`.
    """
    rest = (reduction, ignore_index, label_smoothing, z_loss, softcap, check, rows)
    return _all(hidden, head, target, weight, *rest, None)
