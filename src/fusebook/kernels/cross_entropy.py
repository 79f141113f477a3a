# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/cross_entropy.py. It needs torch, Triton, NumPy, _call.py, _entropy.py and
# _rows.py.
"""Cross entropy of logits: loss and gradient in one read and one write.

The formulas are in `_entropy`. Fused: the cap, the maximum, exponentials and their sum, the logarithm, the choice of
the class, smoothing, the reduction over rows, and the gradient of all of it. A chain of separate operations reads
6MN and writes 4MN numbers, for M rows of N; the fused kernel reads MN and writes MN, and can write the gradient over
the logits.

A row of up to 32768 numbers stays in the registers of one program between its load and its store; a wider one is shared
by several programs, see `_rows`.

Limits: rows of float64 of more than 4096 numbers, and in half types such rows that begin at another place within 16
bytes in the logits than in the gradient, are read twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ._call import Operator, empty, flag, watched
from ._entropy import TERMS, Terms, check_terms, entropy_into, line, loss_like, once, once_only, read_target
from ._rows import contiguous_rows

__all__ = ["cross_entropy", "cross_entropy_eager", "cross_entropy_with_gradient"]

# The unfused chain ---------------------------------------------------------------------------------------------------


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


# Launchers -----------------------------------------------------------------------------------------------------------


def _into(loss: Tensor, x: Tensor, target: Tensor, *terms: Any) -> None:
    entropy_into(line(loss), None, contiguous_rows(x), line(target), None, Terms(*terms).of(x))


def _over_into(loss: Tensor, x: Tensor, target: Tensor, *terms: Any) -> None:
    x = contiguous_rows(x)
    entropy_into(line(loss), x, x, line(target), None, Terms(*terms).of(x))


def _both_into(found: tuple[Tensor, Tensor], x: Tensor, target: Tensor, *rest: Any) -> None:
    *terms, scale = rest
    loss, dx = found
    scale = line(scale) if scale is not None and scale.dim() > 1 else scale
    entropy_into(line(loss), contiguous_rows(dx), contiguous_rows(x), line(target), scale, Terms(*terms).of(x))


def _check(x: Any, target: Any, weight: Any, *rest: Any) -> tuple[Any, ...]:
    name = "cross_entropy"
    terms = check_terms(name, target, weight, *rest[:5], logits=(x, "[..., C > 0]"))
    return x, target, *terms, *rest[6:]


def _check_over(x: Any, *rest: Any) -> tuple[Any, ...]:
    checked = _check(x, *rest)
    if not (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1])):
        raise ValueError(
            f"cross_entropy: expected logits for inplace=True to be rows side by side, got strides {x.stride()}; make "
            "them contiguous, or pass inplace=False"
        )
    return checked


def _read(x: Tensor, target: Tensor, weight: Any, reduction: Any, ignore_index: int, *rest: Any) -> None:
    if rest[3] is not False:
        read_target("cross_entropy", target, x.shape[-1], ignore_index, rest[3])


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


def _gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, target, *weight = ctx.saved_tensors
    return _again(x, target, weight[0] if weight else None, ctx.rest, g), *[None] * (2 + len(ctx.rest))


def _again(x: Tensor, target: Tensor, weight: Tensor | None, rest: Any, g: Tensor) -> Tensor:
    """The gradient, given that of the loss."""
    return _both(x, target, weight, *rest, False, g)[1]


def _loss_of(x: Tensor, target: Tensor, weight: Any, reduction: str, *_: Any) -> Tensor:
    return loss_like(x, target, reduction)


def _both_of(x: Tensor, target: Tensor, weight: Any, reduction: str, *_: Any) -> tuple[Tensor, Tensor]:
    return loss_like(x, target, reduction), empty(x.shape, x.dtype, x.device)


_loss = Operator(
    "cross_entropy", f"(Tensor x, {TERMS}) -> Tensor",
    check=_check, outputs=_loss_of, into=_into, read=_read, gradient=(_gradient, _keep),
)  # fmt: skip
_both = Operator(
    "cross_entropy_with_gradient", f"(Tensor x, {TERMS}, Tensor? scale) -> (Tensor, Tensor)",
    check=_check, outputs=_both_of, into=_both_into, read=_read, gradient=once_only("cross_entropy"),
)  # fmt: skip
#: Writes the gradient over the logits.
_over = Operator(
    "cross_entropy_over", f"(Tensor(a!) x, {TERMS}) -> Tensor",
    check=_check_over, outputs=_loss_of, into=_over_into, read=_read_over,
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
        classes stand on the last axis. Half types are computed in float32.
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
        Allow that the gradient overwrites the logits, where one is recorded. In float16, and traced by torch, it does
        not.
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
        or the logits cannot be overwritten and shall be.
    IndexError
        If a target is no class and is read, see `check`.
    RuntimeError
        If a second backward pass asks for a gradient that has overwritten the logits.

    Notes
    -----
    Differentiable once; works under `torch.compile` and `torch.vmap`. The gradient takes the memory of the logits once
    more, or none with `inplace`. A second backward pass computes it anew. In float16, where most gradients are no
    normal numbers before the loss is scaled, as `torch.amp.GradScaler` does, it is found in the backward pass.

    Examples
    --------
    >>> import fusebook, torch
    >>> x, t = torch.randn(3, 5, device="cuda"), torch.tensor([0, 4, -100], device="cuda")
    >>> loss = fusebook.cross_entropy(x.requires_grad_(), t)  # doctest: +SKIP
    """
    if type(inplace) is not bool:
        flag("cross_entropy", "inplace", inplace)
    rest = (reduction, ignore_index, label_smoothing, z_loss, softcap)
    recorded = torch.is_grad_enabled() and isinstance(logits, (Tensor, Parameter)) and logits.requires_grad
    plain = type(logits) in (Tensor, Parameter) and logits.dtype != torch.float16
    plain = plain and not getattr(weight, "requires_grad", False)  # which is refused where gradients are recorded
    if not recorded or not plain or watched():
        return _loss(logits, target, weight, *rest, check)
    x = logits.detach()

    def found() -> tuple[Tensor, Tensor]:
        if not inplace:
            return _both(x, target, weight, *rest, check, None)
        loss = _over(x, target, weight, *rest, check)
        torch.autograd.graph.increment_version(logits)  # who has kept them for a gradient is told
        return loss, x

    def anew(g: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor]:
        return (_again(logits, target, weight, rest, g),)

    return once(found, None if inplace else anew, logits, target, weight)


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
