"""How products are tuned: which classes of problems have a plan, which plans are tried, how a problem looks.

`name` is ``"concat_gemm"`` or ``"swiglu"``; `math`, `layout` and `shape` are those of a class.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusebook.kernels._products import Plan, _square_of, layout_of
from fusebook.kernels.concat_gemm import _launch_concat, _products_of
from fusebook.kernels.swiglu import _launch_swiglu, _products_gated

__all__ = ["attempt", "candidates", "classes", "problem"]


def classes(name: str) -> tuple[tuple[str, str, str], ...]:
    """The classes of problems that have a plan of their own: math, layout of the weights and shape.

    The layout ``"any"`` stands for what no descriptor describes; `_kind` says what a second word means.
    """
    rows = tuple(f"rows {n}" for n in (16, 32, 64))
    sizes = tuple(f"2**{n}" for n in range(15, 29, 2))
    found = [("half", layout, shape) for layout in ("row", "column") for shape in rows + sizes]
    found += [("half", "any", shape) for shape in (*rows, *sizes[:5])]
    if name == "concat_gemm":  # in half types SwiGLU has nothing to choose
        found += [("half", layout, shape) for layout in ("row short", "column short") for shape in sizes[3:]]
    found += [("tf32", "row", shape) for shape in sizes[1:6]]  # of columns what is smaller is planned by costs
    found += [("tf32", "column", shape) for shape in sizes[4:6]]
    return tuple(found)


def candidates(name: str, math: str, layout: str, shape: str) -> tuple[Plan, ...]:
    """The plans that tuning tries for a class of problems."""

    def tiles(bm: int, bn: int, bk: int, stages: int, warps: int, **more: Any) -> Plan:
        return Plan("tiles", bm, bn, bk, stages=stages, warps=warps, **more)

    def strided(bm: int, bn: int, bk: int, stages: int, warps: int, split: int = 1) -> Plan:
        return Plan("strided", bm, bn, bk, stages=stages, warps=warps, split=split)

    plans: list[Plan]
    order, _, _ = layout.partition(" ")
    if shape.startswith("rows"):
        bm = int(shape.split()[1])
        steps = ((32, 128, 3), (32, 128, 4), (32, 64, 6), (64, 128, 3), (64, 64, 4))
        plans = [strided(bm, bn, bk, stages, 4, split) for bn, bk, stages in steps for split in (1, 2)]
        if bm == 64 and order != "any":
            plans += [tiles(64, 64, 64, 4, 4, waves=0), tiles(64, 32, 128, 4, 4, waves=0)]
        if name == "swiglu" and order == "column":
            turned = ((64, 128, 3), (64, 128, 2), (64, 256, 2), (32, 256, 2), (32, 128, 3), (128, 128, 3), (128, 64, 4))
            plans += [tiles(bm, bn, bk, stages, 4, waves=0, swap=True, late=True) for bn, bk, stages in turned]
    elif order == "any":
        plans = [strided(128, 256, 64, 3, 8), strided(128, 128, 64, 3, 8), strided(64, 128, 64, 3, 4),
                 strided(64, 64, 64, 4, 4), strided(64, 64, 128, 3, 4)]  # fmt: skip
    elif int(shape.removeprefix("2**")) <= 21:  # few tiles: a program each, and small ones
        few = ((64, 32, 256, 2, 4), (64, 32, 128, 3, 4), (64, 64, 128, 3, 4), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4),
               (64, 256, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 4, 4), (128, 128, 64, 4, 8))  # fmt: skip
        plans = [tiles(*sizes, waves=0, late=True) for sizes in few]
        plans += [tiles(64, 64, 128, 3, 4, waves=0, late=True, bulk=1)]
        plans += [tiles(128, 128, 64, 4, 8, waves=0, late=True, bulk=bulk) for bulk in (1, 2)]
        plans += [strided(64, 32, 64, 5, 4)]
    else:
        plans = [tiles(128, 256, 64, 4, 8, group=group, flat=True, bulk=2, late=True) for group in (8, 16)]
        plans += [tiles(128, 256, 64, 3, 8, group=group, flat=True, bulk=1, late=True) for group in (8, 16)]
        plans += [tiles(128, 256, 64, 4, 8, group=16, flat=flat, late=True) for flat in (False, True)]
        plans += [tiles(128, 128, 64, 4, 8, waves=0, late=True)]
    if math == "tf32":  # elements of twice the size
        plans = [plan._replace(bk=plan.bk // 2) for plan in plans]
    if name == "swiglu":  # two sums, and one store
        plans = [plan._replace(bn=plan.bn // 2, bulk=min(plan.bulk, 1)) for plan in plans]
    if name == "swiglu" and order == "row":  # that kernel is not launched late
        plans = [plan._replace(late=False) for plan in plans]
    return tuple(dict.fromkeys(plans))


def problem(math: str, layout: str, shape: str, device: torch.device) -> tuple[Tensor, ...]:
    """Inputs in the middle of a class, to tune on: x and two weights."""
    dtype = torch.bfloat16 if math == "half" else torch.float32
    if shape.startswith("rows"):
        M, K, N = int(shape.split()[1]), 4096, 11008
    else:
        M = K = N = _square_of(shape)
    order, _, kind = layout.partition(" ")
    if order == "any":
        K, N = K - 3, N - 3
    elif kind == "short":
        K, N = K - 8, N - 8
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    weights = [draw(N, K).T if order == "column" else draw(K, N) for _ in range(2)]
    return draw(M, K), *weights


def attempt(name: str, math: str, inputs: Sequence[Tensor], plan: Plan | None) -> Tensor | None:
    """One call by a plan, or by torch's products where None; `inputs` are x and weights.

    None where torch's way is no choice: SwiGLU in half types, whose products it would round.
    """
    x, *weights = inputs
    layout = layout_of(weights[0])
    if name == "swiglu":
        if plan is None and math == "half":
            return None
        out = x.new_empty(len(x), weights[0].shape[1])
        gate, up = weights
        if plan is None:
            _products_gated(out, x, gate, up, None, math == "tf32")
        else:
            _launch_swiglu(out, x, gate, up, None, math, layout, plan)
        return out
    out = x.new_empty(len(x), sum(w.shape[1] for w in weights))
    if plan is None:
        _products_of(out, x, weights, math == "tf32")
    else:
        _launch_concat(out, x, weights, math, layout, plan)
    return out
