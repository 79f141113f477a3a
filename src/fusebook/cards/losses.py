"""Cross entropy of logits and of hidden states: what they mean, what they must cost, and who else computes them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import compiling, foreign, matrices
from fusebook.kernels._call import FLOATING, accumulated
from fusebook.kernels.losses import (
    cross_entropy_eager,
    cross_entropy_with_gradient,
    linear_cross_entropy,
    linear_cross_entropy_eager,
    linear_cross_entropy_with_gradients,
)
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["CROSS_ENTROPY", "PAGE"]

#: The page on cross entropy of logits; that of hidden states is on another, see `fusebook.cards.chunked_head`.
PAGE = 105


def _alone(loss: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
    """Apart from autograd's graph, the loss in what all ways return it in."""
    return loss.detach().to(accumulated(loss.dtype)), *gradients


def _by_autograd(
    loss_of: Callable[..., Tensor], count: int = 1, scale: float = 1.0
) -> Callable[..., tuple[Tensor, ...]]:
    """Loss, and its gradients of the first `count` arguments times `scale`, as a training step gets them."""

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            own = [t.detach().requires_grad_() for t in given[:count]]
            loss = loss_of(*own, *given[count:])
            return _alone(loss, *torch.autograd.grad(loss, own, loss.new_full((), scale) if scale != 1 else None))

    return run


# Cross entropy -------------------------------------------------------------------------------------------------------


def _reference(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.to(accumulated(x.dtype))
    at = target[:, None]
    e = wide - wide.amax(-1, keepdim=True)
    x_t = e.gather(1, at)
    total = e.exp_().sum(-1, keepdim=True)  # in place: in float64 a vocabulary of many tokens is tens of GiB
    loss = (total.log() - x_t).mean()
    p = e.div_(total)
    p.scatter_add_(1, at, torch.full_like(at, -1, dtype=p.dtype))
    return loss, p.div_(max(1, len(x))).to(x.dtype)


def _make(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int) -> tuple[Tensor, Tensor]:
    # The class is never the likeliest: where a row is saturated, the gradient at that one would be rounding.
    x = rough(rng, (M, N), dtype)
    other = torch.randint(1, max(2, N), (M,), generator=rng, device=rng.device)
    return x, (x.argmax(1) + other) % N if M else other


def _cost(itemsize: int, *, M: int, N: int) -> Cost:
    # An element costs a maximum, a subtraction, an exponential, an addition, and a product and a subtraction.
    return Cost(read=M * N * itemsize + 8 * M, write=M * N * itemsize, flop=6 * M * N)


def _cost_eager(itemsize: int, *, M: int, N: int) -> Cost:
    return Cost(read=6 * M * N * itemsize, write=4 * M * N * itemsize, flop=6 * M * N)


def _cost_twice_read(itemsize: int, *, M: int, N: int) -> Cost:
    # The loss reads the logits, the gradient reads them again.
    return Cost(read=2 * M * N * itemsize, write=M * N * itemsize, flop=8 * M * N)


def _eager(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return _alone(*cross_entropy_eager(x, target))


def _fusebook(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy_with_gradient(x, target, check=False)


def _liger(x: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    _takes("Liger", x)
    return LigerCrossEntropyFunction.apply(x.clone(), target, None)[0]  # it overwrites what it is given


def _quack(x: Tensor, target: Tensor) -> Tensor:
    from quack.cross_entropy import cross_entropy

    _takes("quack", x)
    if x.shape[-1] * x.element_size() % 4:
        raise NotImplementedError(f"quack takes rows of whole 32-bit words, got {x.shape[-1]} columns of {x.dtype}")
    return cross_entropy(x, target)


def _takes(who: str, x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise NotImplementedError(f"{who} computes in float32, got float64")
    if not x.numel():
        raise NotImplementedError(f"{who} launches an empty grid on an empty tensor")


_VOCABULARIES = (32000, 50257, 128256, 151936, 256000)
CROSS_ENTROPY = Op(
    name="cross_entropy",
    reference=_reference,
    make=_make,
    cost=_cost,
    variants={
        "eager": Variant(_eager, cost=_cost_eager, needs=()),
        "torch": Variant(_by_autograd(F.cross_entropy), needs=()),
        "torch.compile": Variant(_by_autograd(compiling(F.cross_entropy).run), needs=(), recompiles=True),
        "fusebook": Variant(_fusebook, needs=()),
        "Liger (of a copy)": foreign("liger_kernel", _by_autograd(_liger)),
        "quack": foreign("quack", _by_autograd(_quack), cost=_cost_twice_read),
    },
    configs={
        "small": matrices((8, 32000), (64, 32000), (512, 32000)),
        "large": matrices((8192, 131072)),
        "vocabularies": matrices(*((2048, n) for n in _VOCABULARIES)),
        "classes": matrices((65536, 1000), (32768, 4096)),
    },
    # Rows of the vocabularies that models have, or of few classes.
    draw=_draws.matrices(2, 2, 2**18, _draws.VOCABULARIES, rows=2**22, dtypes=FLOATING, views=(*_draws.ROWS, "across")),
    # One class; few; several rows a program, the last tile ragged; a row in tiles, whose last is ragged and whose first
    # begins within a vector; a row of several programs, or in float64 one that is read twice; no rows.
    edges=matrices((1, 1), (5, 2), (37, 100), (3, 781), (2, 8200), (3, 13001), (2, 33001), (0, 5)),
    dtypes=FLOATING,
)

# Of hidden states ----------------------------------------------------------------------------------------------------


def _make_linear(rng: torch.Generator, dtype: torch.dtype, *, M: int, K: int, N: int) -> tuple[Any, ...]:
    # Logits of a few units: rounded to a half type, larger ones would change probabilities by more than is told apart.
    # No hidden state is negative: in the gradient of a class that is no target, they would cancel.
    scale = 2.0 ** -round(math.log2(max(1, K)) / 2)
    head = torch.randn(N, K, generator=rng, device=rng.device, dtype=dtype) * scale
    target = torch.randint(0, N, (M,), generator=rng, device=rng.device)
    # In float16 gradients of unlikely classes are no normal numbers, unless they are scaled, as in training.
    scale = 2.0 ** min(15, M.bit_length() + 3) if dtype == torch.float16 else 1.0
    return rough(rng, (M, K), dtype).abs() / 64, head, target, scale


#: Logits that the reference holds at a time: in float64 those of a whole vocabulary are gigabytes, several times over.
_HELD = 2**27


def _reference_linear(h: Tensor, head: Tensor, target: Tensor, scale: float) -> tuple[Tensor, ...]:
    loss = torch.zeros((), dtype=accumulated(h.dtype), device=h.device)
    dh, dhead = torch.empty_like(h), torch.zeros_like(head)
    rows = max(1, _HELD // max(1, len(head)))
    for start in range(0, max(1, len(h)), rows):  # once where there are no rows: the mean of nothing is NaN
        at = slice(start, start + rows)
        part, dx = _reference((h[at] @ head.T).to(accumulated(h.dtype)), target[at])
        share = len(h[at]) / max(1, len(h))  # a mean of means
        loss = loss + part * share if len(h) else part
        dx = dx.mul_(scale * share).to(h.dtype)
        dh[at] = dx @ head
        dhead.addmm_(dx.T, h[at])
    return loss, dh, dhead


def _added_up(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Twice what is taken off for the targets is put back to both gradients.

    They are differences: of what probabilities, which are rounded, weigh, and of what belongs to the targets. Where the
    two are nearly alike, as of a hidden state whose class is all but certain, no dtype has digits for what is left, nor
    has the reference in float64. So the error is scored beside what is added up.
    """
    h, head, target, scale = inputs
    loss, dh, dhead = outputs
    each = 2 * scale / max(1, len(h))
    taken = torch.zeros_like(head).index_add_(0, target, h)
    return loss, dh + each * head[target], taken.mul_(each).add_(dhead)


def _cost_linear(itemsize: int, *, M: int, K: int, N: int) -> Cost:
    moved = (M * K + N * K) * itemsize
    return Cost(read=moved + 8 * M, write=moved, flop=6 * M * K * N)


def _linear_loss(h: Tensor, head: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(h @ head.T, target)


def _linear_eager(h: Tensor, head: Tensor, target: Tensor, scale: float) -> tuple[Tensor, ...]:
    if scale != 1:
        raise NotImplementedError("the chain has no scale of its loss, which float16 needs")
    return _alone(*linear_cross_entropy_eager(h, head, target))


def _linear_torch(h: Tensor, head: Tensor, target: Tensor) -> Tensor:
    try:
        from torch.nn import LinearCrossEntropyOptions
        from torch.nn.functional import linear_cross_entropy
    except ImportError:
        raise NotImplementedError("torch has it from 2.13 on") from None
    if h.dtype == torch.float16:
        raise NotImplementedError("torch scales gradients when they are found, and float16 has no digits for them")
    return linear_cross_entropy(h, head, target, options=LinearCrossEntropyOptions())


def _linear_fusebook(h: Tensor, head: Tensor, target: Tensor, scale: float) -> tuple[Tensor, ...]:
    if scale != 1:
        return _scaled(functools.partial(linear_cross_entropy, check=False))(h, head, target, scale)
    return linear_cross_entropy_with_gradients(h, head, target, check=False)


def _linear_liger(h: Tensor, head: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    _takes("Liger", h)
    return LigerFusedLinearCrossEntropyFunction.apply(h, head, target)[0]


def _linear_quack(h: Tensor, head: Tensor, target: Tensor) -> Tensor:
    _takes("quack", h)
    if len(h) % 8:
        raise NotImplementedError(f"quack takes hidden states in eights, got {len(h)}")
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy
    except TypeError as error:  # its import names what its epilogues use, and CuTe may hold what it cannot name
        raise NotImplementedError(f"quack cannot be imported beside this CuTe: {error}"[:160]) from error
    # By its length it tells a vector for the rows from one for the columns: as many of both it refuses.
    rows = next(n for n in (4096, 2048, 1024) if min(n, len(h)) != h.shape[1])  # 4096 if nobody asks
    return chunked_linear_cross_entropy(h, head, target, chunk_size=rows)


def _draw_linear(rng: random.Random) -> Dims:
    """Hidden states and vocabularies of models."""
    dtype = _draws.dtype(rng, FLOATING)
    N = _draws.size(rng, 2, 2**18, _draws.VOCABULARIES)
    K = _draws.size(rng, 32, max(32, min(8192, _draws.BYTES // (4 * N * _draws.itemsize(dtype)))))
    M = _draws.count(rng, _draws.most_rows(dtype, moved=2 * (K + N), held=2 * K * N, flop=6 * K * N))
    return {"M": M, "K": K, "N": N, "dtype": dtype, "layout": _draws.layout(rng, _draws.ROWS)}


def _scaled(loss_of: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Loss and gradients of a scaled loss."""

    def run(h: Tensor, head: Tensor, target: Tensor, scale: float) -> tuple[Tensor, ...]:
        return _by_autograd(loss_of, 2, scale)(h, head, target)

    return run


LINEAR_CROSS_ENTROPY = Op(
    name="linear_cross_entropy",
    reference=_reference_linear,
    make=_make_linear,
    cost=_cost_linear,
    variants={
        "eager": Variant(_linear_eager, needs=()),
        "torch": Variant(_scaled(_linear_loss), needs=()),
        "torch.compile": Variant(_scaled(compiling(_linear_loss).run), needs=(), recompiles=True),
        "torch, in chunks": Variant(_scaled(_linear_torch), needs=()),
        "fusebook": Variant(_linear_fusebook, needs=()),
        "Liger": foreign("liger_kernel", _scaled(_linear_liger)),
        "quack": foreign("quack", _scaled(_linear_quack)),
    },
    configs={
        "small": ({"M": 512, "K": 1024, "N": 32000},),
        "llama": ({"M": 8192, "K": 4096, "N": 128256},),
        "heads": (
            {"M": 8192, "K": 4096, "N": 32000},
            {"M": 4096, "K": 3584, "N": 151936},
        ),
    },
    draw=_draw_linear,
    # Few of everything; several rows a program of the loss; a row in tiles; a row of several programs; no states.
    edges=(
        {"M": 5, "K": 3, "N": 7},
        {"M": 37, "K": 16, "N": 100},
        {"M": 3, "K": 8, "N": 8201},
        {"M": 2, "K": 2, "N": 33001},
        {"M": 0, "K": 4, "N": 5},
    ),
    dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),  # the plainest first, which tests take
    meaning=_added_up,
)
