"""Cross entropy of hidden states by the weight of a head, without the logits of all of them in memory at once.

For M hidden states h of K numbers and N classes with the weight W [N, K]:

    loss = cross_entropy(h W^T, target)    dh = dx W    dW = dx^T h

where dx is the gradient of the logits. The states are taken some rows at a time: their logits by a product, loss and
gradient by one kernel in place, see `_entropy`, and then two more products. So the logits take the memory of some rows,
and are written once, read and overwritten once, and read twice; the products are cuBLAS's.

In half types each product adds up in float32, and the gradient of the weight is rounded once for each chunk of rows,
where it is added to what the chunks before have left: the fewer chunks, the fewer roundings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _entropy
from ._arguments import integer
from ._entropy import TERMS, Once, Terms, line, loss_like
from ._operator import Operator, accumulated, apply, empty, watched
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


# Launchers -----------------------------------------------------------------------------------------------------------


def _chunks_into(
    loss: Tensor, dh: Tensor | None, dhead: Tensor | None, h: Tensor, head: Tensor, target: Tensor,
    scale: Tensor | None, terms: Terms, rows: int | None,
) -> None:  # fmt: skip
    (m, _), n = h.shape, len(head)
    rows = min(rows or chunk_plan(m, n, h.element_size()), max(1, m))
    x = empty((rows, n), h.dtype, h.device)
    plan = _entropy.plan_of(x, x)
    shape = _entropy.left_by(plan, m, terms, True)
    left = loss if terms.reduction == "none" and len(shape) == 1 else empty(shape, loss.dtype, h.device)
    sums = _entropy.begin(x, target, terms, m * plan.parts if plan.parts > 1 else 0)._replace(late={})
    for first in range(0, m, rows):
        part = slice(first, min(m, first + rows))
        logits = x[: part.stop - first]
        apply(torch.mm, h[part], head.T, out=logits)
        here = sums if sums.board is None else sums._replace(board=sums.board[first * plan.parts :])
        _entropy.rows_into(
            left[part], None if dh is None else logits, logits, target[part],
            scale[part] if scale is not None and scale.dim() else scale, terms, here, _entropy.plan_of(logits, logits),
        )  # fmt: skip
        if dh is not None:
            apply(torch.mm, logits, head, out=dh[part])
        if dhead is not None:
            if first:
                apply(torch.addmm, dhead, logits.T, h[part], out=dhead)
            else:
                apply(torch.mm, logits.T, h[part], out=dhead)
    _entropy.end(loss, left, terms, sums)
    if not m and dhead is not None:
        apply(Tensor.zero_, dhead)


def _into(loss: Tensor, h: Tensor, head: Tensor, target: Tensor, *rest: Any) -> None:
    *terms, rows = rest
    _chunks_into(line(loss), None, None, rows_in(h), rows_in(head), line(target), None, Terms(*terms).of(h), rows)


def _all_into(found: tuple[Tensor, ...], h: Tensor, head: Tensor, target: Tensor, *rest: Any) -> None:
    *terms, rows, scale = rest
    loss, dh, dhead = found
    scale = line(scale) if scale is not None and scale.dim() > 1 else scale
    given = rows_in(h), rows_in(head), line(target), scale
    _chunks_into(line(loss), rows_in(dh), dhead, *given, Terms(*terms).of(h), rows)


def _check(h: Any, head: Any, target: Any, weight: Any, *rest: Any) -> tuple[Any, ...]:
    name = "linear_cross_entropy"
    # The head has a row for each class, as the weight of torch.nn.Linear has.
    terms = _entropy.check_terms(name, target, weight, *rest[:5], hidden=(h, "[..., K > 0]"), head=(head, "[C > 0, K]"))
    if rest[6] is not None:
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


_loss = Operator(
    "linear_cross_entropy", f"(Tensor h, Tensor head, {TERMS}, SymInt? rows) -> Tensor",
    check=_check, outputs=_loss_of, into=_into, read=_read, gradient=(_gradient, _keep),
)  # fmt: skip
_all = Operator(
    "linear_cross_entropy_with_gradients",
    f"(Tensor h, Tensor head, {TERMS}, SymInt? rows, Tensor? scale) -> (Tensor, Tensor, Tensor)",
    check=_check, outputs=_all_of, into=_all_into, read=_read, gradient=_entropy.once_only("linear_cross_entropy"),
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
        number in half types; by default they fill up to a GiB.

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
    to be scaled before, and one under `torch.compile` compute the logits anew.

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
    plain = all(type(t) in (Tensor, Parameter) and t.dtype != torch.float16 for t in given)
    if not recorded or not plain or watched() or reduction == "none":
        return _loss(hidden, head, target, weight, *rest)

    def found() -> tuple[Tensor, ...]:
        return _all(hidden.detach(), head.detach(), target, weight, *rest, None)

    def anew(g: Tensor, hidden: Tensor, head: Tensor) -> tuple[Tensor, ...]:
        return _all(hidden, head, target, weight, *rest[:5], False, rows, g)[1:]

    return Once.apply(found, anew, hidden, head)


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
