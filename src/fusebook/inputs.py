"""Inputs that do not forgive: on plain normal rows, a softmax that forgets its maximum passes every check."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["generator", "poison", "rough"]


def generator(seed: int = 0, device: str | torch.device | None = None) -> torch.Generator:
    """A seeded generator of random inputs; its device is where the inputs are made.

    Parameters
    ----------
    seed : int
    device : str or torch.device, optional
        The current CUDA device where there is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.Generator(device=device).manual_seed(seed)


def rough(rng: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Random rows of three kinds, in turn: plain normal, with three large values, and far from zero.

    Every third row holds three values twenty times too large, which dominate its sums; every third is shifted by 100
    (by 1000 in float64), so that exponentials overflow where no maximum is subtracted, and differences cancel where
    sums are kept in too low a precision.

    Parameters
    ----------
    rng : torch.Generator
        From `generator`; the tensor is made on its device.
    shape : sequence of int
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


def poison(outputs: Sequence[torch.Tensor]) -> None:
    """Free a block of NaN of each output's size, so that the next allocation of that size finds it.

    A kernel that leaves part of its output unwritten then shows NaN there instead of an earlier, right result.
    Integer outputs are filled with their largest value.
    """
    blocks = [
        torch.full_like(out, float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max) for out in outputs
    ]
    del blocks
