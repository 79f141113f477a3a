"""What ways to multiply cost: problems that cards draw are timed by each way, and a formula is fitted to the times.

`name` is ``"concat_gemm"`` or ``"swiglu"``, and `math` ``"tf32"`` or ``"float32"``: of half types classes have plans.
"""

from __future__ import annotations

import csv
import functools
import math
import pathlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusebook import check, timing
from fusebook.cards import OPS
from fusebook.inputs import generator
from fusebook.kernels import _products
from fusebook.kernels._products import Cost, Plan, layout_of
from fusebook.op import Dims
from fusebook.tune import products

__all__ = ["Point", "candidates", "fit", "fitted", "points", "problems", "write"]

#: The times that a fit needs at least; so many seeds are drawn by, from 0 on: those below 100 are there to tune by.
_LEAST, _SEEDS = 4, 60
_COLUMNS = ("start", "alone", "each", "finish")


class Point(NamedTuple):
    """A time."""

    plan: Plan
    M: int
    K: int
    widths: tuple[int, ...]
    itemsize: int
    copying: float  # microseconds of it that are copies, by `copying`
    taken: float  # microseconds


def problems(name: str, count: int) -> Iterator[Dims]:
    """So many problems of float32, of seeds to tune by: more rows than a tile holds, and few tiles."""
    op = OPS[name]
    for i in range(100 * _SEEDS):
        dims = op.problem(*divmod(i, 100))
        M, N, work = int(dims["M"]), 2 * int(dims["N"]), int(dims["M"]) * int(dims["K"]) * int(dims["N"])
        few = M <= _products._MIDDLE or M * N <= 2**23
        if dims["dtype"] == "float32" and M > _products._FEW and few and work < 2**35:
            yield dims
            count -= 1
        if not count:
            return


def candidates(name: str, math: str) -> dict[str, tuple[Plan, ...]]:
    """The plans whose costs are worth to be known, by how tiles are fetched."""

    def tiles(bm: int, bn: int, bk: int, stages: int, warps: int, **more: Any) -> Plan:
        return Plan("tiles", bm, bn, bk, stages=stages, warps=warps, **{"waves": 0, "late": True} | more)

    def strided(bm: int, bn: int, bk: int, stages: int) -> Plan:
        return Plan("strided", bm, bn, bk, stages=stages, warps=4)

    if math == "float32":
        few = [strided(64, 64, 32, 3)] if name == "concat_gemm" else [strided(32, 32, 64, 3)]
        one_by_one = [strided(32, 64, 32, 3), strided(32, 32, 64, 3)]  # of what no descriptor describes
        many = [tiles(64, 64, 64, 3, 4), tiles(128, 64, 32, 3, 4), tiles(64, 32, 64, 3, 4)]
    else:
        few = one_by_one = [strided(64, 64, 32, 4)]
        many = [tiles(64, 32, 128, 2, 4), tiles(64, 64, 64, 3, 4), tiles(64, 128, 32, 4, 4), tiles(128, 128, 32, 4, 4),
                tiles(128, 256, 32, 4, 8, group=16, waves=1)]  # fmt: skip
    found = {"descriptors": many + few, "pointers": one_by_one}
    if name == "swiglu":  # two sums
        found = {fetch: [plan._replace(bn=plan.bn // 2) for plan in plans] for fetch, plans in found.items()}
    return {fetch: tuple(plans) for fetch, plans in found.items()}


def fitted(given: Sequence[Point], multiprocessors: int, both: int = 1) -> Cost:
    """The costs of a way of which there are times, with the least mean square of the logarithms of what is off.

    Parameters
    ----------
    given : sequence of Point
        Of one plan, but for the parts that sums are cut into.
    multiprocessors : int
        Of the GPU that took the times.
    both : int
        2 for SwiGLU.
    """
    rng = random.Random(0)

    def off(cost: Cost) -> float:
        # Few points do not tell all four: what they leave open stays near what is usual.
        usual = 0.002 * math.log(cost.start / 4) ** 2 + 0.0005 * math.log(cost.finish / 0.5) ** 2
        found = 0.0
        for p in given:
            way = cost._replace(plan=p.plan)
            time = p.copying + _products.microseconds(way, p.M, p.K, p.widths, p.itemsize, multiprocessors, both)
            found += math.log(time / p.taken) ** 2
        return usual + found / len(given)

    first = Cost(given[0].plan._replace(split=1), 5.0, 0.5, 0.3, 0.5)
    # Steps of some products of torch's take far longer than those of others.
    firsts = [first._replace(alone=alone, each=each) for alone in (0.1, 1.0, 5.0) for each in (0.1, 1.0, 10.0, 50.0)]
    least, best = min((off(cost), i, cost) for i, cost in enumerate(firsts))[::2]
    tries = 2000
    for i in range(tries):
        spread = 0.8 * (1 - i / tries) + 0.02
        moved = {k: getattr(best, k) * math.exp(rng.gauss(0, spread)) for k in _COLUMNS if rng.random() < 0.6}
        moved["start"] = min(max(moved.get("start", best.start), 2.5), 12.0)
        cost = best._replace(**moved)
        if (now := off(cost)) < least:
            best, least = cost, now
    return best._replace(**{k: round(getattr(best, k), 4) for k in _COLUMNS})


def _attempt(name: str, inputs: Sequence[Tensor], math: str, way: tuple[str, Plan]) -> Tensor | None:
    """A call by one way; None where it is none, as descriptors of what none describes."""
    fetch, plan = way
    if fetch == "library":
        return products.attempt(name, math, inputs, None)
    x, *weights = inputs
    capability, wanted = torch.cuda.get_device_capability(), (plan, fetch == "descriptors")
    layout, merge = layout_of(weights[0]), name == "concat_gemm"
    x, given, aligned, copied = _products._fetchable(x, weights, layout, math, capability, "", merge, wanted)
    if aligned != (fetch == "descriptors") or (copied and plan.kernel != "tiles"):
        return None
    return products.attempt(name, math, (x, *given), plan)


def _ways(name: str, math: str, M: int, K: int, widths: Sequence[int], sms: int) -> list[tuple[str, Plan]]:
    """All ways, and those by pointers with sums in so many parts that two or four programs share a multiprocessor."""
    found = [("library", Plan("torch"))]
    for fetch, plans in candidates(name, math).items():
        for plan in plans:
            tiles = -(-M // plan.bm) * sum(-(-n // plan.bn) for n in widths)
            most = [min(beside * sms // tiles, K // (2 * plan.bk)) for beside in (2, 4)]
            splits = {1 << max(0, n.bit_length() - 1) for n in most} if plan.kernel == "strided" else {1}
            found += [(fetch, plan._replace(split=split)) for split in sorted(splits)]
    return found


def points(name: str, count: int = 100) -> dict[tuple[str, str, Plan], list[Point]]:
    """Times of so many drawn problems by each way, cold, where its result is right; by math, fetch and plan."""
    op, found = OPS[name], dict[tuple[str, str, Plan], list[Point]]()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for dims in problems(name, count):
        sizes = {k: v for k, v in dims.items() if k not in ("dtype", "layout")}
        x, *weights = inputs = op.make(generator(0, "cuda"), torch.float32, **sizes)
        (M, K), widths = x.shape, tuple(w.shape[1] for w in weights)
        alike = widths[:1] if name == "swiglu" else widths
        layout, yard = layout_of(weights[0]), check.yardstick(op, inputs)
        there = _products._describable(x, "row"), all(_products._describable(w, layout) for w in weights)
        for math_of in ("float32", "tf32"):
            calls = {}
            for way in _ways(name, math_of, M, K, alike, sms):
                try:
                    out = _attempt(name, inputs, math_of, way)
                    torch.cuda.synchronize()
                except Exception:  # more shared memory than there is, for one
                    continue
                if out is not None and yard.judge(out, math_of).ok:
                    calls[way] = functools.partial(_attempt, name, inputs, math_of, way)
            times = timing.cold({str(way): call for way, call in calls.items()}, warmup=1, repeat=7)
            for fetch, plan in calls:
                if (q := times[str((fetch, plan))]) is None:
                    continue
                turned = layout == "row" and plan.kernel == "tiles"
                moved = fetch == "descriptors" and not there[0], fetch == "descriptors" and (turned or not there[1])
                copies = _products.copying(M, K, widths, x.element_size(), *moved)
                point = Point(plan, M, K, alike, x.element_size(), copies, q.q50 * 1e6)
                found.setdefault((math_of, fetch, plan._replace(split=1)), []).append(point)
    return found


def fit(
    given: Mapping[tuple[str, str, Plan], Sequence[Point]], multiprocessors: int, both: int = 1
) -> dict[tuple[str, str], list[Cost]]:
    """The costs of all ways of which there are times enough, by math and how tiles are fetched."""
    found: dict[tuple[str, str], list[Cost]] = {}
    for (math_of, fetch, _), times in sorted(given.items()):
        if len(times) >= _LEAST:
            found.setdefault((math_of, fetch), []).append(fitted(times, multiprocessors, both))
    return found


def write(file: pathlib.Path, capability: str, costs: Mapping[tuple[str, str], Sequence[Cost]]) -> None:
    """Write what `fusebook.kernels._products.read_costs` reads; the costs on other GPUs stay as they are."""
    rows = {key: list(ways) for key, ways in _products.read_costs(file).items() if key[0] != capability}
    rows |= {(capability, *key): list(ways) for key, ways in costs.items()}
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["capability", "math", "fetch", *Plan._fields, *_COLUMNS])
        for key, ways in sorted(rows.items()):
            for cost in ways:
                plan = [int(v) for v in cost.plan[1:]] if cost.plan.bm else [""] * (len(cost.plan) - 1)
                writer.writerow([*key, cost.plan.kernel, *plan, *(getattr(cost, k) for k in _COLUMNS)])
