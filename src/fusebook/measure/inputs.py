"""Inputs that show mistakes: with plain normal rows, a softmax without its maximum passes every check."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["LAYOUTS", "generator", "laid", "poison", "rough"]

#: The words of `laid`.
LAYOUTS = ("contiguous", "across", "permuted", "sliced", "offset")

# Columns of the matrix that a slice is cut from and does not have: whole vectors, so that its rows stay aligned.
_BESIDE = 64


def generator(seed: int = 0, device: str | torch.device | None = None) -> torch.Generator:
    """A seeded generator of random inputs; its device is where the inputs are made.

    Parameters
    ----------
    device : str or torch.device, optional
        The current CUDA device where there is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.Generator(device=device).manual_seed(seed)


def rough(rng: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Random rows of three kinds, in turn: plain normal, with three large values, and far from zero.

    Every third row has three values that are twenty times larger and dominate its sums. Every third row is shifted by
    100, or by 1000 in float64: exponentials overflow unless the maximum is subtracted, and differences cancel in sums
    of too low precision.

    Parameters
    ----------
    rng : torch.Generator
        From `generator`; the tensor is made on its device.
    dtype : torch.dtype
        float16, bfloat16, float32 or float64.

    Returns
    -------
    torch.Tensor
        Contiguous, of the shape and dtype asked for.
    """
    x = torch.randn(tuple(shape), generator=rng, dtype=dtype, device=rng.device)
    if x.numel() == 0:
        return x
    rows = x.view(-1, x.shape[-1]) if x.dim() else x.view(1, 1)
    spikes = rows[1::3]
    where = torch.randint(rows.shape[1], (spikes.shape[0], 3), generator=rng, device=rng.device)
    spikes.scatter_(1, where, spikes.gather(1, where) * 20)
    rows[2::3] += 1000 if dtype == torch.float64 else 100  # exp overflows above 709 in float64, 88 in float32
    return x


def laid(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in another layout, such as views that users pass.

    Parameters
    ----------
    x : torch.Tensor
        Of two or more axes; others are returned as they are.
    how : str
        ``contiguous``: unchanged. ``across``: the last two axes are swapped in memory, as for an operation along
        another axis. ``permuted``: the rows become two axes, the second first in memory and the first last, so that no
        two axes merge. ``sliced``: some columns of a wider matrix, with NaN in the others. ``offset``: one element
        after an aligned address.

    Returns
    -------
    torch.Tensor
        Of the shape of `x`; of one axis more where it is ``permuted``.

    Raises
    ------
    ValueError
        Where `how` is another word.
    """
    if how not in LAYOUTS:
        raise ValueError(f"inputs.laid: expected a layout of {', '.join(LAYOUTS)}, got {how!r}")
    if how == "contiguous" or x.dim() < 2 or x.numel() == 0:
        return x
    if how == "across":
        return x.mT.contiguous().mT
    if how == "permuted":
        first = next(n for n in range(math.isqrt(len(x)), 0, -1) if len(x) % n == 0)
        return x.reshape(first, -1, *x.shape[1:]).movedim(0, -1).contiguous().movedim(-1, 0)
    if not x.is_contiguous() and x.mT.is_contiguous():  # the last axis remains strided
        return laid(x.mT, how).mT
    if how == "sliced":
        gap = math.nan if x.is_floating_point() else 0
        view = x.new_full((*x.shape[:-1], x.shape[-1] + _BESIDE), gap)[..., : x.shape[-1]]
    else:
        view = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    return view.copy_(x)


def poison(outputs: Sequence[torch.Tensor]) -> None:
    """Free a block of NaN of each output's size, so that the next allocation of that size finds it.

    A kernel that leaves part of its output unwritten then shows NaN there instead of an earlier, correct result.
    Integer outputs are filled with their largest value.
    """
    blocks = [
        torch.full_like(out, float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max) for out in outputs
    ]
    del blocks
