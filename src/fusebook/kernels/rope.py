# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/rope.py. It needs torch, Triton, NumPy and _call.py.
"""Rotary position embedding and its gradient: queries and keys in one launch, read once and written once.

The elements of a head are taken in pairs, and each pair (a, b) of a token is rotated by an angle of its position:

    a' = a cos - b sin
    b' = b cos + a sin

A pair is elements i and i + R/2 (*neox*, as in Llama), or 2i and 2i + 1 (*interleaved*), for a rotary dimension R.
The gradient is the rotation by the opposite angle: the same kernel with -sin.

Fused: four products and two sums, the copies that bring b to a, and the copy of what is not rotated. For SIZE elements
a chain of separate operations reads 5.5 SIZE and writes 4.5 SIZE; the kernel reads SIZE and writes SIZE. A program
loads the cosines of a token once for all heads that it rotates. Arithmetic is float32, in float64 it is float64, and
each result is rounded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import FLOATING, INTEGERS, Operator, contiguous, flag, gpu, integer, launch, shapes, watched

__all__ = ["rope", "rope_eager"]

# The unfused chain ---------------------------------------------------------------------------------------------------


def rope_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in neox style, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        SIZE elements.
    cos, sin : torch.Tensor
        Of shapes that broadcast with `x`; the second half of the last axis repeats the first.

    Returns
    -------
    torch.Tensor
        Of the shape of `x`.
    """
    half = x.shape[-1] // 2
    negated = -x[..., half:]  # read SIZE / 2, write SIZE / 2
    turned = torch.cat((negated, x[..., :half]), -1)  # read SIZE, write SIZE
    turned = turned * sin  # read SIZE, write SIZE
    return x * cos + turned  # read 3 SIZE, write 2 SIZE: in all read 5.5 SIZE, write 4.5 SIZE


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _position_at(t, SIZES, strides):
    """Where a tensor has token t, counted along axes of SIZES and a slowest one, fastest first; two strides precede."""
    place = tl.zeros_like(t).to(tl.int64)
    for k in tl.static_range(len(SIZES)):
        place += (t % SIZES[k]).to(tl.int64) * strides[k + 2]
        t = t // SIZES[k]
    return place + t.to(tl.int64) * strides[len(SIZES) + 2]


@triton.jit
def _rotate_heads(
    y_ptr, x_ptr, t, live, first, H, cos, sin, SIZES, y_strides, x_strides, INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of each token t, from `first` on; `cos` and `sin` are [TOKENS, 1, BLOCK]."""
    h = first + tl.arange(0, HEADS)[None, :, None]  # [1, HEADS, 1]
    live = live & (h < H)  # [TOKENS, HEADS, 1]
    x_ptr += _position_at(t, SIZES, x_strides) + h.to(tl.int64) * x_strides[1]
    y_ptr += _position_at(t, SIZES, y_strides) + h.to(tl.int64) * y_strides[1]
    if INTERLEAVED:  # neighbours are loaded together, and split in registers
        d = tl.arange(0, 2 * BLOCK)[None, None, :]
        inside = live & (d < 2 * HALF)
        x = tl.load(x_ptr + d * x_strides[0], mask=inside).to(cos.dtype)  # read SIZE
        a, b = tl.split(tl.reshape(x, [live.shape[0], HEADS, BLOCK, 2]))
        y = tl.join(a * cos - b * sin, b * cos + a * sin)
        tl.store(y_ptr + d * y_strides[0], tl.reshape(y, [live.shape[0], HEADS, 2 * BLOCK]), mask=inside)  # write SIZE
    else:
        d = tl.arange(0, BLOCK)[None, None, :]
        inside = live & (d < HALF)
        a = tl.load(x_ptr + d * x_strides[0], mask=inside).to(cos.dtype)  # read SIZE / 2
        b = tl.load(x_ptr + (d + HALF) * x_strides[0], mask=inside).to(cos.dtype)  # read SIZE / 2
        tl.store(y_ptr + d * y_strides[0], a * cos - b * sin, mask=inside)  # write SIZE / 2
        tl.store(y_ptr + (d + HALF) * y_strides[0], b * cos + a * sin, mask=inside)  # write SIZE / 2
    if REST > 0:  # what is not rotated
        d = 2 * HALF + tl.arange(0, REST_BLOCK)[None, None, :]
        inside = live & (d < 2 * HALF + REST)
        tl.store(y_ptr + d * y_strides[0], tl.load(x_ptr + d * x_strides[0], mask=inside), mask=inside)


@triton.jit
def _rope_heads(
    y_ptr, x_ptr, k_out_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, N, H, K_HEADS, ROWS, SIZES,
    y_strides, x_strides, k_out_strides, k_strides, table_strides,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, K_TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens, and of each one of TILES tiles of heads, of x and of k. Positions choose among ROWS of a table."""
    program = tl.program_id(0).to(tl.int64 if WIDE else tl.int32)
    t = program // TILES * TOKENS + tl.arange(0, TOKENS)[:, None, None]  # [TOKENS, 1, 1]
    tile = (program % TILES).to(tl.int32)
    live = t < N
    known = live
    at = _position_at(t, SIZES, table_strides)
    if positions_ptr is not None:
        row = tl.load(positions_ptr + at, mask=live, other=0).to(tl.int64)
        known = live & (row >= 0) & (row < ROWS)
        at = row * table_strides[1]
    d = tl.arange(0, BLOCK)[None, None, :]
    at += d * table_strides[0]
    single: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    # A position without a row gives NaN: memory behind the table is not read.
    cos = tl.load(cos_ptr + at, mask=known & (d < HALF), other=float("nan")).to(single)
    sin = tl.load(sin_ptr + at, mask=known & (d < HALF), other=float("nan")).to(single)
    sin = -sin if INVERSE else sin
    if tile * HEADS < H:
        _rotate_heads(
            y_ptr, x_ptr, t, live, tile * HEADS, H, cos, sin, SIZES, y_strides, x_strides,
            INTERLEAVED, HALF, REST, HEADS, BLOCK, REST_BLOCK,
        )  # fmt: skip
    if k_ptr is not None:
        if tile * K_TILE < K_HEADS:
            _rotate_heads(
                k_out_ptr, k_ptr, t, live, tile * K_TILE, K_HEADS, cos, sin, SIZES, k_out_strides, k_strides,
                INTERLEAVED, HALF, REST, K_TILE, BLOCK, REST_BLOCK,
            )  # fmt: skip


# Launch config -------------------------------------------------------------------------------------------------------


#: Bytes of the first elements of a program's pairs. On an H100, programs of 256 to 4096 pairs and 1 to 8 warps are as
#: fast as each other, for 512 tokens and for 8192, in bfloat16 and in float32. So one number serves all sizes.
_BYTES = 4096
#: In the interpreter a program costs more than its elements.
_INTERPRETED = 2**20


def _rope_config(tokens: int, heads: int, k_heads: int, half: int, itemsize: int, interpret: bool) -> dict[str, int]:
    """Constants of a launch: the tiles of heads, as many as fit, and then tokens."""
    block = triton.next_power_of_2(half)
    most = max(1, (_INTERPRETED if interpret else _BYTES) // itemsize // block)
    tile, k_tile = (min(most, triton.next_power_of_2(max(1, n))) for n in (heads, k_heads))
    return {
        "TOKENS": min(max(1, most // tile), triton.next_power_of_2(tokens)), "HEADS": tile, "K_TILE": k_tile,
        "TILES": max(triton.cdiv(heads, tile), triton.cdiv(k_heads, k_tile)), "BLOCK": block,
        "num_warps": 4,
    }  # fmt: skip


# Launchers -----------------------------------------------------------------------------------------------------------

#: The widest head: one block, and two in registers.
_WIDEST = 8192


def _folded(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Axes, fastest first, neighbours folded where all tensors allow it: their sizes but the last, and all strides."""
    axes: list[tuple[int, list[int]]] = []
    for size, *steps in reversed([*zip(sizes, *strides, strict=True)]):
        if size == 1:
            continue
        if axes and all(step == inner * axes[-1][0] for step, inner in zip(steps, axes[-1][1], strict=True)):
            axes[-1] = (axes[-1][0] * size, axes[-1][1])
        else:
            axes.append((size, steps))
    axes = axes or [(1, [0] * len(strides))]
    return tuple(size for size, _ in axes[:-1]), [*zip(*(steps for _, steps in axes), strict=True)]


def _rope_into(
    outs: Sequence[Tensor], ins: Sequence[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None, rotary: int,
    heads: int | None, interleaved: bool, inverse: bool,
) -> None:  # fmt: skip
    """Rotate one tensor or two, whose results may lie over them."""
    if cos.stride() != sin.stride():
        cos, sin = contiguous(cos), contiguous(sin)
    axes = [i for i in range(-ins[0].dim(), -1) if i != heads]
    sizes = [ins[0].shape[i] for i in axes]
    tensors = [t for pair in zip(outs, ins, strict=True) for t in pair]
    by_position = (cos if positions is None else positions[..., None]).expand(*sizes, -1)
    folded, strides = _folded(sizes, [*([t.stride(i) for i in axes] for t in tensors), by_position.stride()[:-1]])
    # A table with as many columns as elements are rotated has each angle twice.
    twice = 2 if interleaved and cos.shape[-1] == rotary else 1
    steps = [(t.stride(-1), 0 if heads is None else t.stride(heads)) for t in tensors]
    steps.append((cos.stride(-1) * twice, cos.stride(0) if positions is not None else 0))
    y_strides, x_strides, *rest, table = [step + at for step, at in zip(steps, strides, strict=True)]
    counts = [1 if heads is None else t.shape[heads] for t in ins]
    config = _rope_config(
        math.prod(sizes), counts[0], sum(counts[1:]), rotary // 2, ins[0].element_size(), gpu(cos.device)[0] is None
    )
    tokens, left = math.prod(sizes), 0 if outs is ins else ins[0].shape[-1] - rotary
    k_out, k = tensors[2:] or (None, None)
    k_out_strides, k_strides = rest or ((), ())
    launch(
        _rope_heads, (triton.cdiv(tokens, config["TOKENS"]) * config["TILES"],),
        outs[0], ins[0], k_out, k, cos, sin, positions, tokens, counts[0], sum(counts[1:]), cos.shape[0], folded,
        y_strides, x_strides, k_out_strides, k_strides, table,
        INTERLEAVED=interleaved, INVERSE=inverse, WIDE=tokens >= 2**31 // 2, HALF=rotary // 2, REST=left,
        REST_BLOCK=triton.next_power_of_2(max(1, left)), **config,
    )  # fmt: skip


# Arguments, gradients, batches ---------------------------------------------------------------------------------------


def _check(
    x: Any, k: Any, cos: Any, sin: Any, positions: Any, rotary_dim: Any, heads: Any, interleaved: Any, inverse: bool
) -> tuple[Any, ...]:
    """The arguments, with the rotary dimension, and with the axis of heads counted from the end."""
    name = "rope"
    given = {
        "k": (k, ""),
        "cos": (cos, "", FLOATING),
        "sin": (sin, "", FLOATING),
        "positions": (positions, "", INTEGERS),
    }
    optional = {what: value for what, value in given.items() if value[0] is not None or what in ("cos", "sin")}
    shapes(name, x=(x, ""), **optional)
    flag(name, "interleaved", interleaved)
    least = 1 if heads is None else 2
    if x.dim() < least:
        raise ValueError(f"{name}: expected x of {least} axes or more, got {x.dim()}; add the missing ones")
    width = x.shape[-1]
    if heads is not None:
        heads = integer(name, "heads", heads, "give the axis of heads, or None")
        heads = heads - x.dim() if heads >= 0 else heads
        if not -x.dim() <= heads < -1:
            raise IndexError(
                f"{name}: expected heads to be an axis before the last of x of shape {tuple(x.shape)}, got {heads}; "
                "give -2 for (tokens, heads, dim), None where there is no axis of heads"
            )
    rotary = width if rotary_dim is None else integer(name, "rotary_dim", rotary_dim, "None rotates all elements")
    if rotary % 2 or not 2 <= rotary <= width or width > _WIDEST:
        raise ValueError(
            f"{name}: expected an even rotary_dim from 2 to the last axis of x, at most {_WIDEST}, got {rotary} for "
            f"shape {tuple(x.shape)}; give rotary_dim"
        )
    if k is not None:
        like = [n if i - x.dim() != heads else -1 for i, n in enumerate(x.shape)]
        if k.dim() != x.dim() or any(n not in (-1, m) for n, m in zip(like, k.shape, strict=True)):
            raise ValueError(
                f"{name}: expected k of shape {like} as x has, with any number of heads, got {list(k.shape)}; rotate "
                "it by a call of its own"
            )
    if cos.shape != sin.shape or not cos.dim() or cos.shape[-1] not in (rotary // 2, rotary):
        raise ValueError(
            f"{name}: expected cos and sin of one shape with {rotary // 2} or {rotary} columns, got {list(cos.shape)} "
            f"and {list(sin.shape)}; rotary_dim is {rotary}, give another one if that is wrong"
        )
    sizes = [n for i, n in enumerate(x.shape[:-1]) if i - x.dim() != heads]
    if positions is not None and cos.dim() != 2:
        raise ValueError(
            f"{name}: expected cos of shape [positions, columns] where positions are given, got {list(cos.shape)}; "
            "index it first, and give no positions"
        )
    what, by = ("cos", list(cos.shape[:-1])) if positions is None else ("positions", list(positions.shape))
    if len(by) > len(sizes) or any(n not in (1, m) for n, m in zip(by[::-1], sizes[::-1], strict=False)):
        raise ValueError(
            f"{name}: expected {what} for positions {sizes}, which are the axes of x without heads and the last, got "
            f"{by}; give heads, or reshape {what}"
        )
    return x, k, cos, sin, positions, rotary, heads, interleaved, inverse


def _check_one(x: Any, *rest: Any) -> tuple[Any, ...]:
    x, _, *rest = _check(x, None, *rest)  # type: ignore[assignment]
    return x, *rest


def _check_over(x: Any, k: Any, *rest: Any) -> tuple[Any, ...]:
    checked = _check(x, k, *rest)
    for what, t in (("x", x), ("k", k)):
        if t is None:
            continue
        if torch.is_grad_enabled() and t.requires_grad:
            raise NotImplementedError(
                f"rope: expected no gradient to be recorded for inplace=True, got {what} that requires one; pass "
                "inplace=False, or call it under torch.no_grad()"
            )
        reach = 0  # of the axes with smaller strides
        for stride, n in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
            if stride <= reach:
                raise ValueError(
                    f"rope: expected {what} without overlap for inplace=True, got strides {t.stride()}; clone it"
                )
            reach += stride * (n - 1)
    if k is x:
        raise ValueError("rope: expected x and k apart for inplace=True, got one tensor twice; give no k")
    return checked


def _keep(tensors: int, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    cos, sin, positions, *rest, inverse = inputs[tensors:]
    if cos.requires_grad or sin.requires_grad:
        raise NotImplementedError(
            "rope: expected cos and sin that require no gradient, since it has none for them, got one that does; "
            "detach it"
        )
    ctx.rest = *rest, not inverse
    ctx.save_for_backward(cos, sin, *([] if positions is None else [positions]))


def _backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """The rotation back."""
    cos, sin, *positions = ctx.saved_tensors
    rest = cos, sin, positions[0] if positions else None, *ctx.rest
    if len(gradients) == 2 and None not in gradients:
        found = _rope_two(*gradients, *rest)
    else:
        found = [None if g is None else _rope_one(g, *rest) for g in gradients]
    return *found, *[None] * len(rest)


def _batched(tensors: int, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    """The rule for torch.vmap: the batch is one more axis in front, of positions."""
    op = _rope_one if tensors == 1 else _rope_two
    n, axes = info.batch_size, inputs[0].dim() - (in_dims[0] is not None)
    *xs, cos, sin, positions = inputs[: tensors + 3]
    at = in_dims[: tensors + 3]
    xs = [t.expand(n, *t.shape) if i is None else t.movedim(i, 0) for t, i in zip(xs, at, strict=False)]
    if positions is not None and (at[-3] is not None or at[-2] is not None):
        return op.one_by_one(info, in_dims, *inputs)  # a table for each member
    heads = inputs[tensors + 4]

    def placed(t: Any, i: Any, columns: int) -> Any:
        if t is None or i is None:
            return t
        missing = axes - (1 if heads is None else 2) - (t.dim() - 1 - columns)
        t = t.movedim(i, 0)
        return t.reshape(n, *[1] * missing, *t.shape[1:])

    if (at[-3] is None) != (at[-2] is None):
        cos, sin = (t.expand(n, *t.shape) if i is None else t.movedim(i, 0) for t, i in ((cos, at[-3]), (sin, at[-2])))
        at = (*at[:-3], 0, 0, at[-1])
    found = op.dispatched(
        *xs, placed(cos, at[-3], 1), placed(sin, at[-2], 1), placed(positions, at[-1], 0), *inputs[tensors + 3 :]
    )
    return found, 0 if tensors == 1 else (0, 0)


_TERMS = "Tensor cos, Tensor sin, Tensor? positions, SymInt rotary_dim, int? heads, bool interleaved, bool inverse"
_rope_one = Operator(
    "rope",
    f"(Tensor x, {_TERMS}) -> Tensor",
    check=_check_one,
    outputs=lambda x, *_: torch.empty_like(x),
    into=lambda y, x, *rest: _rope_into((y,), (x,), *rest),
    gradient=(_backward, functools.partial(_keep, 1)),
    batched=lambda *given: _batched(1, *given),
)
_rope_two = Operator(
    "rope_two",
    f"(Tensor x, Tensor k, {_TERMS}) -> (Tensor, Tensor)",
    check=_check,
    outputs=lambda x, k, *_: (torch.empty_like(x), torch.empty_like(k)),
    into=lambda found, x, k, *rest: _rope_into(found, (x, k), *rest),
    gradient=(_backward, functools.partial(_keep, 2)),
    batched=lambda *given: _batched(2, *given),
)


def _over_into(_: None, x: Tensor, k: Tensor | None, *rest: Any) -> None:
    same = (x,) if k is None else (x, k)
    if any(t.numel() for t in same):
        _rope_into(same, same, *rest)


_rope_over = Operator(
    "rope_over",
    f"(Tensor(a!) x, Tensor(b!)? k, {_TERMS}) -> ()",
    check=_check_over,
    outputs=lambda *_: None,
    into=_over_into,
)


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, k: Tensor | None = None, *, positions: Tensor | None = None,
    rotary_dim: int | None = None, heads: int | None = -3, interleaved: bool = False, inplace: bool = False,
) -> Any:  # fmt: skip
    """Rotary position embedding of queries, or of queries and keys in one launch.

    Parameters
    ----------
    x : torch.Tensor
        Queries, such as (batch, heads, sequence, dim), with any strides. Its dtype is float16, bfloat16, float32 or
        float64. It is on a CUDA device, or on the CPU where Triton interprets. All axes except `heads` and the last
        one are axes of positions.
    cos, sin : torch.Tensor
        Tables of any floating dtype, such as (sequence, columns), or (batch, sequence, columns) as in transformers.
        The axes before the columns broadcast to the axes of positions. There are ``rotary_dim / 2`` columns, one a
        pair. Or there are ``rotary_dim`` columns: then the second half must repeat the first. If `interleaved`, every
        second column must repeat the one before it. Repeated columns are not read.
    k : torch.Tensor, optional
        Keys, with the shape and dtype of `x`, but any number of heads.
    positions : torch.Tensor, optional
        Rows of tables of shape (rows, columns), int32 or int64. Their shape broadcasts to the axes of positions.
    rotary_dim : int, optional
        How many elements of a head are rotated. The others are copied. By default, all are rotated.
    heads : int or None
        The axis of heads. It is -3 for (batch, heads, sequence, dim), and -2 for (tokens, heads, dim) or (batch,
        sequence, heads, dim). None if there is no such axis.
    interleaved : bool
        Whether a pair is two neighbours, as in GPT-J. Otherwise a pair has an element of each half, as in Llama and
        GPT-NeoX.
    inplace : bool
        Overwrite `x` and `k`, which must not overlap, and return them. No gradient can be recorded.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The rotated `x`, or both if `k` is given. Dtypes are those of the arguments, and so are strides without gaps.

    Raises
    ------
    TypeError
        For what is no dense tensor or of another dtype.
    ValueError
        For shapes that do not fit, an odd `rotary_dim`, heads of more than 8192 elements, tensors on different devices,
        and with `inplace` for tensors that overlap themselves.
    IndexError
        If `heads` is no axis before the last.
    NotImplementedError
        If `cos` or `sin` require a gradient, or with `inplace`, if `x` or `k` do.

    Notes
    -----
    A position without a row in the table gives NaN. Arithmetic is float32, float64 for float64, and each result is
    rounded once. It can be differentiated any number of times, with respect to `x` and `k`. With dynamic shapes,
    ``inplace=True`` causes a graph break under `torch.compile`.

    Rotary embeddings are from J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Examples
    --------
    >>> import fusebook, torch
    >>> q, k = torch.randn(2, 1, 32, 512, 128, device="cuda")  # doctest: +SKIP
    >>> angles = torch.arange(512.0)[:, None] * 10000 ** (-torch.arange(64) / 64)
    >>> q, k = fusebook.rope(q, angles.cos().cuda(), angles.sin().cuda(), k)  # doctest: +SKIP
    """
    flag("rope", "inplace", inplace)
    rest = (cos, sin, positions, rotary_dim, heads, interleaved, False)
    if not inplace:
        return _rope_one(x, *rest) if k is None else _rope_two(x, k, *rest)
    _rope_over(x, k, *rest)
    written = [x] if k is None else [x, k]
    if not watched():
        torch.autograd.graph.increment_version(written)
    return x if k is None else (x, k)
