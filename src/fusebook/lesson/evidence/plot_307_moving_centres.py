"""Evidence of the lesson on moving the centres."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

import fusebook
from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.lesson import _numbers, _points
from fusebook.lesson.evidence import (
    Claim,
    Frames,
    Measured,
    Recorded,
    deterministic,
    steps_correct,
    within_tolerance,
)
from fusebook.measure import bench, check, inputs, timing

with extra("book"):
    import pandas as pd

PAGE = _points.PointsPage
OPERATORS = ("kmeans_update", "kmeans_step")
EXAMPLE = {"n": 20_000_000, "d": 2, "k": 2, "labels": "int64", "law": "blobs", "dtype": "float32"}
WORDS = "{n:,.0f} points of {d} coordinates in {dtype}, {k} centres, {labels} labels"
ROWS = "{n} x {d}, k = {k}, {labels} {law}"
STEPS = ("eager", "registers", "parts", "two_calls", "one_pass")
OTHER_STEPS = {"two_calls": "kmeans_step", "one_pass": "kmeans_step"}
#: Points, coordinates and centres.
SHAPES = ((20_000_000, 2, 2),)
DTYPES = ("float32",)
INTERPRETED = 6000
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS = {"kmeans_update": ("_kmeans_few", "_kmeans_means")}
CAPTION = "GPU time in microseconds, cold L2: 20 million points in the plane, float32, two centres, int64 labels"
TABLE = {"GPU time": ("gpu_us", "2x2x20000000")}


# What is measured -----------------------------------------------------------------------------------------------------


def timed(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """Check and time every step of each operator, and the library."""
    parts = []
    for n, d, k in SHAPES:
        for op, own, some in _numbers.by_operator(OPS["kmeans_update"], sys.modules[__name__], steps):
            given = op.make(inputs.generator(0), torch.float32, n=n, d=d, k=k, labels="int64", law="blobs")
            yard = check.yardstick(op, given)
            every = {**some, own: op.variants["fusebook"].run}
            calls = {name: functools.partial(step, *given) for name, step in every.items()}
            frame = bench.staircase(calls, functools.partial(_numbers._is_correct, yard))
            frame = frame.rename(columns={"us": "gpu_us", "right": "correct"})
            parts.append(frame.assign(shape=f"{d}x{k}x{n}", dtype="float32"))
    return pd.concat(parts, ignore_index=True)


def interleaved() -> pd.DataFrame:
    """Assignment, update, and an iteration in two calls and in one, and a hundred iterations bit by bit."""
    rows = []
    op = OPS["kmeans_step"]
    for n, d, k in ((20_000_000, 2, 2), (1_000_000, 64, 256)):
        x, c, _ = op.make(inputs.generator(0), torch.float32, n=n, d=d, k=k, labels="int64", law="blobs")
        labels = fusebook.kmeans_assign(x, c, check=False)
        once = functools.partial(op.variants["fusebook"].run, x, c, torch.int64)
        calls: dict[str, Callable[[], Any]] = {
            "assign": functools.partial(fusebook.kmeans_assign, x, c, check=False),
            "update": functools.partial(fusebook.kmeans_update, x, labels, k, centres=c, check=False),
            "both, two calls": functools.partial(op.variants["fusebook, two calls"].run, x, c, torch.int64),
            "one iteration": once,
        }
        times = timing.cold(calls)
        first = once()
        same = sum(all(map(torch.equal, first, once())) for _ in range(100))
        us = {name: 1e6 * q.q50 for name, q in times.items() if q}
        rows.append({"n": n, "d": d, "k": k, **us, "same of 100": same})
    return pd.DataFrame(rows)


# Records --------------------------------------------------------------------------------------------------------------

_UPDATES = ("eager", "torch.compile", "sorted", "product", "torch.compile, product", "fusebook")
_ITERATIONS = ("eager", "torch.compile", "fusebook", "fusebook, two calls")
FRAMES: dict[str, Any] = {
    "sweep": Recorded("kmeans_update", "plane,wide", "float32", _UPDATES, borrowed=True),
    "iterations": Recorded("kmeans_step", "plane,wide", "float32", _ITERATIONS, borrowed=True),
    "steps": Measured("kmeans_update_steps"),
    "interleaved": Measured("kmeans_iteration", function=interleaved),
    "counted": Measured("kmeans_counters"),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _every(frames: Frames) -> pd.DataFrame:
    rows = tables.where(pd.concat([frames["sweep"], frames["iterations"]]), variant="fusebook")
    return rows.set_index(pd.MultiIndex.from_arrays([rows["op"], tables.label(rows), rows["dtype"]]))


def _plane(frames: Frames, name: str, variant: str) -> pd.Series:
    """How many times as long another implementation takes for 20 million points in the plane."""
    return tables.ratio(tables.where(frames[name], d=2), variant, "fusebook")


def _of_plane(frames: Frames, what: str) -> pd.Series:
    """Time over that of the assignment, for 20 million points."""
    rows = tables.where(frames["interleaved"], d=2)
    ratio: pd.Series = rows[what] / rows["assign"]
    return ratio.set_axis(["plane"])


def _read(frames: Frames) -> pd.Series:
    """Bytes that are read, in multiples of the points."""
    return frames["counted"].groupby("step", sort=False)["read"].sum() / 160e6


def _gain(step: str, over: str) -> Callable[[Frames], pd.Series]:
    """GPU time of one step over that of another."""

    def ratio(frames: Frames) -> pd.Series:
        us = frames["steps"].set_index("step")["gpu_us"]
        return pd.Series([us[over] / us[step]], index=[""])

    return ratio


# Claims ---------------------------------------------------------------------------------------------------------------

_POINTS = "20 million points of two coordinates in float32, two centres"
_INT64 = _POINTS + "; labels in int64; GPU time, cold L2"
_COUNTERS = _POINTS + "; hardware counters"

CLAIMS = (
    # The lesson's findings
    Claim(
        "over-eager",
        "In the plane `fusebook.kmeans_update` is {least:.0f}x to {most:.0f}x faster than eager PyTorch, whose "
        "additions meet in six numbers.",
        lambda frames: _plane(frames, "sweep", "eager"),
        "> 2",
        _POINTS + "; labels in int64 and uint8; GPU time, cold L2",
        lesson=True,
    ),
    Claim(
        "update-fastest",
        "From a million points on, the update takes at most {most:.2f} times as long as the fastest other "
        "implementation. With 65,536 points and 1024 centres, where additions hardly meet, it takes {few:.2f} times.",
        lambda frames: tables.behind(tables.where(frames["sweep"], n=[1_000_000, 20_000_000]))["times as long"],
        "<= 1.02",
        "20 million points in the plane, 1,000,000 x 64 by 256 centres, even and skewed; float32, GPU time, cold L2",
        lesson=True,
        numbers=lambda frames: {"few": tables.behind(tables.where(frames["sweep"], n=65536))["times as long"].iloc[0]},
    ),
    Claim(
        "target-two-calls",
        "Assignment and update, two calls, take at most 2.2 times as long as the assignment: {median:.2f} times.",
        lambda frames: _of_plane(frames, "both, two calls"),
        "<= 2.2",
        _INT64,
        kind="target",
    ),
    Claim(
        "target-one-pass",
        "An iteration in one pass takes {median:.2f} times as long as the assignment alone; the target is at most 1.5.",
        lambda frames: _of_plane(frames, "one iteration"),
        "<= 1.5",
        _INT64,
        kind="target",
        lesson=True,
    ),
    Claim(
        "same-bits",
        "An iteration that is repeated a hundred times, from the same centres, gives the same bits each time.",
        lambda frames: frames["interleaved"].set_index(["n", "d", "k"])["same of 100"],
        "== 100",
        "20 million points in the plane and two centres; 1,000,000 x 64 and 256 centres; float32",
        lesson=True,
    ),
    Claim(
        "counters-iteration",
        "An iteration in one pass reads the bytes of the points once, and two calls read {two:.2f} times as many.",
        lambda frames: abs(_read(frames)[["one iteration"]] - 1),
        "< 0.02",
        _COUNTERS + "; distance of one pass from 1",
        numbers=lambda frames: {"two": _read(frames)["two calls"]},
    ),
    # Steps
    Claim(
        "registers-gain",
        "Adding in registers first is {median:.0f}x faster than eager PyTorch.",
        _gain("registers", "eager"),
        "> 2",
        _INT64,
    ),
    Claim(
        "parts-cost",
        "A fixed order takes {median:.2f} times as long as atomic additions of the programs' sums.",
        _gain("registers", "parts"),
        "<= 1.05",
        _INT64 + "; step 2 over step 1",
    ),
    Claim(
        "one-pass-gain",
        "An iteration in one pass is {median:.2x} faster than two calls of the library.",
        _gain("one_pass", "two_calls"),
        "> 1.2",
        _INT64,
    ),
    steps_correct(_INT64),
    # Correctness
    within_tolerance(_every, "every recorded size", "Updates and iterations are within tolerance wherever timed."),
    deterministic(_every, "every recorded size", "Two runs give the same bits."),
)

LOG = (
    "Where there are too many centres for registers, points are sorted by label. Each program adds as many neighbours "
    "as any other, and has a part for each label among them. So a large cluster is the work of many programs. Few "
    "points are not sorted: each program compares all labels with its centres, and loads only their points.",
    "Many points of up to 64 centres are multiplied by a matrix of ones and zeros, which only registers hold. Points "
    "in float32 are split into three bfloat16, whose products with one are exact.",
    "The parts are added in float64, in the order of the programs. A cluster without points keeps its centre.",
    "Many centres with few points each are where atomic additions hardly meet, and where nothing has to be sorted "
    "first. Their order changes from run to run, and the library's does not.",
    "``sorted`` adds as PyTorch does for the gradient of an embedding. ``product`` multiplies with a matrix of ones "
    "and zeros, which is small where there are few centres.",
)
