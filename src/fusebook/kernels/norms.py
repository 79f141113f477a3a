# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/norms.py. It needs torch, Triton, NumPy, _call.py, _norms.py, _rows.py and
# norms_backward.py.
"""Norms of rows: RMSNorm and LayerNorm, with a residual added before and a quantised result, in one pass.

For a row of N elements x (of which a residual may be a part: x = x + residual),

    rms_norm:    y[i] = x[i] / sqrt(mean_j x[j]**2 + eps) * weight[i] + bias[i]
    layer_norm:  y[i] = (x[i] - mean_j x[j]) / sqrt(mean_j (x[j] - mean)**2 + eps) * weight[i] + bias[i]

Fused: the sum with the residual, the statistics of the row, the division, weight and bias, and, where the result is
asked for in eight bits, the row's largest magnitude and the rounding. A row is read once and written once; the sum with
the residual, which the next layer needs, is written too. The gradients are in `norms_backward`.

A row of up to 32768 numbers stays in the registers of one program between its load and its store. A wider one is
shared by several programs, each of which holds a part of it, and tells the others what it found.

Limits: rows of more than 2**20 elements are computed by operations of torch, as is the rounding to eight bits of rows
that one program cannot hold. Rows whose elements are apart in memory, as in a transposed matrix, are read where they
are if they are short. Wide ones are read twice if they come with a residual or are many; others are copied first, as
are rows at no equal distances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._call import Operator, accumulated, empty, wide
from ._norms import LIMITS, check_norm, norm_into
from ._rows import empty_result
from .norms_backward import norm_backward

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "layer_norm_eager", "rms_norm", "rms_norm_eager"]

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
    wide = x.to(accumulated(x.dtype))  # half types: read MN, write 2MN, and all below counts twice
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
    wide = x.to(accumulated(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return (centred * torch.rsqrt(variance + eps)).to(x.dtype) * weight + bias


# Arguments and results -----------------------------------------------------------------------------------------------


def _check(x: Any, weight: Any, bias: Any, centred: bool, eps: Any) -> tuple[Any, ...]:
    return check_norm(_name(centred), x, {}, {"weight": weight, "bias": bias}, centred, eps)


def _check_sum(x: Any, residual: Any, weight: Any, bias: Any, centred: bool, eps: Any) -> tuple[Any, ...]:
    like, vectors = {"residual": residual}, {"weight": weight, "bias": bias}
    return check_norm(f"add_{_name(centred)}", x, like, vectors, centred, eps)


def _check_quantised(
    x: Any, residual: Any, weight: Any, bias: Any, centred: bool, eps: Any, dtype: Any
) -> tuple[Any, ...]:
    if not isinstance(dtype, torch.dtype) or dtype not in LIMITS:
        raise TypeError(
            f"{_name(centred)}: expected dtype to be float8_e4m3fn or int8, got {dtype}; leave it out for that of x"
        )
    if residual is None:
        x, *found = _check(x, weight, bias, centred, eps)
    else:
        x, residual, *found = _check_sum(x, residual, weight, bias, centred, eps)
    return x, residual, *found, dtype


def _name(centred: bool) -> str:
    return "layer_norm" if centred else "rms_norm"


def _with_sum(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_result(x), empty_result(x)


def _with_scale(x: Tensor, residual: Tensor | None, weight: Any, bias: Any, *rest: Any) -> list[Tensor]:
    quantised = [empty(x.shape, rest[-1], x.device), empty((*x.shape[:-1], 1), accumulated(x.dtype), x.device)]
    return quantised if residual is None else [*quantised, empty_result(x)]


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
    dx, *rest = norm_backward.call(x, dy, dtotal, weight, bias, ctx.centred, ctx.eps)
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


_norm: Operator = Operator(
    "norm",
    "(Tensor x, Tensor? weight, Tensor? bias, bool centred, float eps) -> Tensor",
    check=_check,
    outputs=empty_result,
    into=lambda y, x, *rest: norm_into(y, None, None, x, None, *rest),
    gradient=(_gradients, _keep),
    traced=lambda *given: given,
    autocast=lambda device, call, *given: wide(device, call, *given, like=_name(given[3])),
)
_add_norm: Operator = Operator(
    "add_norm",
    "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, bool centred, float eps) -> (Tensor, Tensor)",
    check=_check_sum,
    outputs=_with_sum,
    into=lambda found, *rest: norm_into(found[0], found[1], None, *rest),
    gradient=(_gradients_of_sum, _keep),
    traced=lambda *given: given,
    autocast=_under_autocast,
)
_quantised_norm: Operator = Operator(
    "quantised_norm",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, bool centred, float eps, ScalarType dtype) -> Tensor[]",
    check=_check_quantised,
    outputs=_with_scale,
    into=lambda found, *rest: norm_into(found[0], found[2] if len(found) > 2 else None, found[1], *rest[:-1]),
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
