"""Rotary position embedding of queries and keys: what it means, what it must cost, and who else computes it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import compiling, foreign
from fusebook.kernels._call import FLOATING
from fusebook.kernels.rope import rope, rope_eager
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["PAGE", "ROPE"]

#: The page that explains it.
PAGE = 305


def _make(
    rng: torch.Generator, dtype: torch.dtype, *, B: int, H: int, K: int, R: int, P: int, N: int, style: str
) -> tuple[Any, ...]:
    """Queries and keys (batch, heads, sequence, dim) as a linear layer returns them, and half tables."""
    q, k = (rough(rng, (B, N, heads, 2 * R + P), dtype).transpose(1, 2) for heads in (H, K))
    # Far positions too, where the cosine of the last pair is not near 1.
    at = torch.arange(N, device=rng.device, dtype=torch.float64) * 37
    angles = at[:, None] * 10000.0 ** (-torch.arange(R, device=rng.device, dtype=torch.float64) / max(1, R))
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype), style


def _pairs(x: Tensor, half: int, style: str) -> tuple[Tensor, Tensor]:
    if style == "interleaved":
        return x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def _reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str) -> tuple[Tensor, Tensor]:
    half, found = cos.shape[-1], []
    for x in (q, k):
        a, b = _pairs(x, half, style)
        turned = a * cos - b * sin, b * cos + a * sin
        rotated = torch.stack(turned, -1).flatten(-2) if style == "interleaved" else torch.cat(turned, -1)
        found.append(torch.cat((rotated, x[..., 2 * half :]), -1))
    return found[0], found[1]


def _doubled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str) -> tuple[Any, ...]:
    """Tables with each angle twice, as a model makes them once for all layers."""
    if style == "interleaved":
        return q, k, cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1), style
    return q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), style


def _one_eager(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    rotary = cos.shape[-1]
    first = x if rotary == x.shape[-1] else x[..., :rotary]
    if style == "interleaved":
        turned = torch.stack((-first[..., 1::2], first[..., ::2]), -1).flatten(-2)
        found = first * cos + turned * sin
    else:
        found = rope_eager(first, cos, sin)
    return found if rotary == x.shape[-1] else torch.cat((found, x[..., rotary:]), -1)


def _eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str) -> tuple[Tensor, Tensor]:
    return _one_eager(q, cos, sin, style), _one_eager(k, cos, sin, style)


def _fusebook(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str) -> Any:
    return rope(q, cos, sin, k, rotary_dim=2 * cos.shape[-1], interleaved=style == "interleaved")


def _copies(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str) -> tuple[Any, ...]:
    """Liger writes over queries and keys, and takes tables of a batch."""
    q, k, cos, sin, _ = _doubled(q, k, cos, sin, style)
    apart = (t.transpose(1, 2).clone().transpose(1, 2) for t in (q, k))
    return *apart, cos[None], sin[None], style


def _liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str) -> Any:
    from liger_kernel.ops.rope import LigerRopeFunction

    if style == "interleaved" or cos.shape[-1] != q.shape[-1]:
        raise NotImplementedError(f"Liger rotates all elements of a head in neox style, got {style}")
    if q.numel() == 0 or k.numel() == 0:
        raise NotImplementedError("Liger launches an empty grid on an empty tensor")
    return LigerRopeFunction.apply(q, k, cos, sin)


def _cost(itemsize: int, *, B: int, H: int, K: int, R: int, P: int, N: int, style: str) -> Cost:
    size = B * N * (H + K) * (2 * R + P)
    return Cost(read=(size + 2 * N * R) * itemsize, write=size * itemsize, flop=6 * B * N * (H + K) * R)


def _cost_eager(itemsize: int, *, B: int, H: int, K: int, R: int, P: int, N: int, style: str) -> Cost:
    # See `rope_eager`; what is not rotated is copied by a concatenation of all.
    size = 2 * B * N * (H + K) * R
    whole = B * N * (H + K) * (2 * R + P) if P else 0
    read, write = 11 * size // 2 + whole + 8 * N * R, 9 * size // 2 + whole
    return Cost(read=read * itemsize, write=write * itemsize, flop=6 * B * N * (H + K) * R)


def _point(B: int, N: int, H: int, K: int, R: int, P: int = 0, style: str = "neox") -> dict[str, int | str]:
    return {"B": B, "H": H, "K": K, "R": R, "P": P, "N": N, "style": style}


#: Heads of queries, of keys, rotated pairs, and elements that are not rotated: Llama 3 8B (and Qwen 3
#: 4B), Llama 3 70B, Llama 3.2 1B, Qwen 2.5 7B, Gemma 2 9B, Phi 2, GLM 4 9B, and the rotated part of DeepSeek V3.
_MODELS = (
    *((32, 8, 64, 0, "neox"), (64, 8, 64, 0, "neox"), (32, 8, 32, 0, "neox")),
    *((28, 4, 64, 0, "neox"), (16, 8, 128, 0, "neox"), (32, 32, 16, 48, "neox"), (32, 2, 32, 64, "interleaved")),
    (128, 1, 32, 0, "interleaved"),
)


def _draw(rng: random.Random) -> Dims:
    """The heads of a model, and as many tokens as the bytes allow: one sequence, several, or one token of each."""
    kind = _draws.dtype(rng)
    H, K, R, P, style = rng.choice(_MODELS)
    # Read and written once, with a row of both tables where there is one sequence.
    each = (2 * (H + K) * (2 * R + P) + 2 * R) * _draws.itemsize(kind)
    tokens = _draws.count(rng, _draws.BYTES // each)
    B = rng.choice([1, 1, min(tokens, 4), tokens])
    point = _point(B, max(1, tokens // B), H, K, R, P, style)
    return point | {"dtype": kind, "layout": _draws.layout(rng, _draws.ROWS)}


ROPE = Op(
    name="rope",
    variants={
        "eager": Variant(_eager, cost=_cost_eager, needs=(), prepare=_doubled),
        "torch.compile": compiling(_eager, prepare=_doubled),
        "fusebook": Variant(_fusebook, needs=()),
        "Liger": foreign("liger_kernel", _liger, prepare=_copies, in_place=True),
    },
    reference=_reference,
    make=_make,
    cost=_cost,
    configs={
        "small": tuple(_point(1, N, 32, 8, 64) for N in (1, 16, 512)),
        "medium": (_point(1, 2048, 32, 8, 64), _point(1, 2048, 32, 8, 64, 0, "interleaved")),
        "large": (
            _point(4, 2048, 32, 8, 64), _point(1, 8192, 32, 8, 64), _point(4, 2048, 32, 8, 64, 0, "interleaved"),
            _point(4, 4096, 32, 32, 16, 48), _point(1, 131072, 28, 4, 64),
        ),
        "decode": (_point(64, 1, 32, 8, 64), _point(4096, 1, 32, 8, 64)),
    },
    draw=_draw,
    # One pair; both styles with a rest that is copied; heads and pairs that are no powers of two; nothing at all.
    edges=(
        _point(1, 1, 1, 1, 1), _point(2, 3, 4, 2, 4, 2), _point(2, 3, 4, 2, 4, 2, "interleaved"),
        _point(2, 37, 5, 3, 24), _point(1, 5, 20, 1, 33, 0, "interleaved"), _point(0, 5, 4, 2, 8),
    ),
    dtypes=FLOATING,
)  # fmt: skip
