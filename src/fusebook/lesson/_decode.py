"""A decode loop: tokens per second of a stack of Llama layers with weights of four bits, by the matmul."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import fusebook
from fusebook.cards import quantized as card
from fusebook.kernels.quantized import PackedWeight

__all__ = ["KINDS", "Stack", "tokens"]

Matmul = Callable[[Tensor], Tensor]


def _dense(packed: PackedWeight) -> Matmul:
    weight = packed.dequantize(torch.bfloat16)
    return lambda x: torch.nn.functional.linear(x, weight)


def _tinygemm(packed: PackedWeight) -> Matmul:
    codes, scales, _ = packed.codes()
    _, *given = card._for_tinygemm(scales, codes, scales, packed.bits)
    return lambda x: card._tinygemm(x, *given)


def _fusebook(packed: PackedWeight) -> Matmul:
    return lambda x: fusebook.quantized_matmul(x, packed)


#: Matmuls with one and the same weight, in bfloat16.
KINDS = {"bfloat16": _dense, "tinygemm": _tinygemm, "fusebook": _fusebook}


class Stack:
    """Layers of a Llama with random weights, which decode one token of each sequence.

    All but the matmuls is alike in the `KINDS`; Fusebook's also computes gate and up in one launch.

    Parameters
    ----------
    layers, hidden, inner, heads, shared : int
        Layers, the elements of a hidden state and of a row between the matmuls of the MLP, heads, and heads of keys.
    past : int
        Tokens of each sequence that are in the cache already.
    sequences : int
    device : torch.device
    """

    def __init__(
        self, layers: int = 8, hidden: int = 4096, inner: int = 14336, heads: int = 32, shared: int = 8,
        past: int = 512, sequences: int = 1, device: torch.device | str = "cuda",
    ) -> None:  # fmt: skip
        self.heads, self.shared, self.width, self.past = heads, shared, hidden // heads, past
        rng = torch.Generator(device).manual_seed(0)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=rng, device=device, dtype=torch.bfloat16)

        def weight(N: int, K: int) -> PackedWeight:
            return fusebook.quantize(draw(N, K) / K**0.5)

        rows = (heads + 2 * shared) * self.width
        self.packed = [
            {
                "attend": weight(rows, hidden), "join": weight(hidden, hidden),
                "gate": weight(inner, hidden), "up": weight(inner, hidden), "down": weight(hidden, inner),
            }
            for _ in range(layers)
        ]  # fmt: skip
        self.norm = torch.ones(hidden, device=device, dtype=torch.bfloat16)
        self.cache = [draw(2, sequences, shared, past + 1, self.width) for _ in range(layers)]
        angles = past / 10000 ** (torch.arange(0, self.width, 2, device=device)[None] / self.width)
        self.turn = angles.cos(), angles.sin()
        self.begin = draw(sequences, hidden)

    def step(self, kind: str) -> Callable[[Tensor], Tensor]:
        """A function of hidden states ``[sequences, hidden]`` that returns those behind the last layer."""
        made = [{name: KINDS[kind](w) for name, w in each.items()} for each in self.packed]
        if kind == "fusebook":
            mlps = [lambda x, w=w: fusebook.quantized_swiglu(x, w["gate"], w["up"]) for w in self.packed]
        else:
            mlps = [lambda x, f=f: fusebook.silu_mul(f["gate"](x), f["up"](x)) for f in made]

        def run(h: Tensor) -> Tensor:
            total: Any = h
            rows: Any = fusebook.rms_norm(h, self.norm)
            for functions, mlp, cache in zip(made, mlps, self.cache, strict=True):
                rows = functions["join"](self._attended(functions["attend"](rows), cache))
                rows, total = fusebook.add_rms_norm(rows, total, self.norm)
                rows, total = fusebook.add_rms_norm(functions["down"](mlp(rows)), total, self.norm)
            return rows  # type: ignore[no-any-return]

        return run

    def _attended(self, rows: Tensor, cache: Tensor) -> Tensor:
        """Attention of one token a sequence, whose key and value enter the cache."""
        each = rows.view(len(rows), -1, 1, self.width)
        q, k, v = each.split([self.heads, self.shared, self.shared], 1)
        q, cache[0, :, :, self.past :] = fusebook.rope(q, *self.turn, k, interleaved=True)
        cache[1, :, :, self.past :] = v
        attend: Any = torch.nn.functional.scaled_dot_product_attention
        return attend(q, cache[0], cache[1], enable_gqa=True).reshape(len(rows), -1)  # type: ignore[no-any-return]


@torch.no_grad()
def tokens(replays: int = 50, **sizes: Any) -> pd.DataFrame:
    """Tokens per second, by implementation: a step in a CUDA graph, whose result is the next step's input.

    Without a GPU, steps are run and compared, and have no times.

    Parameters
    ----------
    replays : int
        Steps timed.
    **sizes
        Of the `Stack`.
    """
    stack = Stack(**sizes)
    cuda = stack.begin.is_cuda
    rows, first = [], None
    for kind in KINDS:
        if kind == "tinygemm" and not cuda:
            continue  # another function and another packing
        step, h = stack.step(kind), stack.begin.clone()
        found = step(h).double()
        first = found if first is None else first
        off = float((found - first).norm() / first.norm())
        row: dict[str, Any] = {"implementation": kind, "sequences": len(h), "layers": len(stack.packed), "off": off}
        rows.append({**row, "tokens per second": len(h) / _seconds(step, h, replays) if cuda else float("nan")})
        del step
    return pd.DataFrame(rows)


def _seconds(step: Callable[[Tensor], Tensor], h: Tensor, replays: int) -> float:
    """The median GPU time of a step, in rounds of ten replays."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            h.copy_(step(h))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h.copy_(step(h))
    found = []
    for _ in range(max(1, replays // 10)):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(10):
            graph.replay()
        after.record()
        after.synchronize()
        found.append(before.elapsed_time(after) / 1e4)
    return float(pd.Series(found).median())
