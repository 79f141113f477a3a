"""Evidence of the lesson on k-means assignment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusebook import tables
from fusebook.cards.kmeans import KMEANS_ASSIGN, KMEANS_STEP
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
from fusebook.measure import bench, check, inputs

with extra("book"):
    import pandas as pd

PAGE = _points.PointsPage
OPERATORS = ("kmeans_assign", "kmeans_update", "kmeans_step")
EXAMPLE = {"n": 20_000_000, "d": 2, "k": 2, "labels": "int64", "law": "blobs", "dtype": "float32"}
WORDS = "{n:,.0f} points of {d} coordinates in {dtype}, {k} centres, {labels} labels"
ROWS = "{labels} labels"
#: The lesson on a TF32 filter has more coordinates.
ONLY = {"d": 2}
STEPS = ("eager", "one_pass", "pairs")
SHAPES = ((20_000_000, 2, 2),)
#: Of labels: the points are float32.
DTYPES = ("int64", "int32", "uint8")
INTERPRETED = 3000
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS = {"kmeans_assign": ("_kmeans_few",)}
CAPTION = "GPU time in microseconds, cold L2: 20 million points of two coordinates in float32, two centres"
TABLE = {f"{labels} labels": ("gpu_us", f"{labels}x20000000") for labels in DTYPES}


# What is measured -----------------------------------------------------------------------------------------------------


def timed(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """Check and time every step, and the library, with labels of each dtype."""
    parts = []
    n, d, k = SHAPES[0]
    for labels in DTYPES:
        given = KMEANS_ASSIGN.make(inputs.generator(0), torch.float32, n=n, d=d, k=k, labels=labels, law="blobs")
        yard = check.yardstick(KMEANS_ASSIGN, given)
        every = {**steps, "fusebook": KMEANS_ASSIGN.variants["fusebook"].run}
        calls = {name: functools.partial(step, *given) for name, step in every.items()}
        frame = bench.staircase(calls, functools.partial(_numbers._is_correct, yard))
        frame = frame.rename(columns={"us": "gpu_us", "right": "correct"})
        parts.append(frame.assign(shape=f"{labels}x{n}", dtype=labels))
    return pd.concat(parts, ignore_index=True)


def to_count(steps: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[[], Any]]:
    """What Nsight Compute counts: the steps, and an iteration in two calls and in one pass."""
    points = torch.randn(*SHAPES[0][:2], device="cuda")
    given = points, points[:2].clone(), torch.int64
    every = {name: steps[name] for name in STEPS[1:]}
    every |= {"two calls": KMEANS_STEP.variants["fusebook, two calls"].run}
    every |= {"one iteration": KMEANS_STEP.variants["fusebook"].run}
    return {name: functools.partial(step, *given) for name, step in every.items()}


# Records --------------------------------------------------------------------------------------------------------------


_PLANE = ("eager", "torch.cdist", "torch.compile", "fusebook", "fusebook, checked")
_PRODUCTS = ("torch.cdist", "torch.compile", "torch.compile, product", "fusebook")
_UPDATES = ("eager", "torch.compile", "sorted", "product", "torch.compile, product", "fusebook")
_ITERATIONS = ("eager", "torch.compile", "fusebook", "fusebook, two calls")
FRAMES: dict[str, Any] = {
    "sweep": Recorded("kmeans_assign", "plane", "float32", _PLANE),
    "double": Recorded("kmeans_assign", "20000000x2x2", "float64", ("eager", "torch.compile", "fusebook")),
    "wide": Recorded("kmeans_assign", "wide", "float32", _PRODUCTS),
    "laws": Recorded("kmeans_assign", "laws", "float32", ("torch.cdist", "fusebook")),
    "update": Recorded("kmeans_update", "plane,wide", "float32", _UPDATES),
    "step": Recorded("kmeans_step", "plane,wide", "float32", _ITERATIONS),
    "steps": Measured("kmeans_teaching"),
    "counters": Measured("kmeans_counters"),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _every(frames: Frames) -> pd.DataFrame:
    rows = tables.where(frames.of("kmeans_assign"), variant="fusebook")
    return rows.set_index([tables.label(rows), "dtype"])


def _plane(frames: Frames) -> pd.DataFrame:
    return tables.together(frames["sweep"], frames["double"])


def _over(frames: Frames, name: str = "sweep", of: str = "roof", **where: Any) -> pd.Series:
    """The library's GPU time over a ceiling."""
    rows = tables.where(frames[name], **where)
    return 1 / tables.share(rows, "fusebook", of=of)


def _us(frames: Frames) -> Any:
    """GPU time: a row per step, a column per dtype of labels."""
    return frames["steps"].pivot_table("gpu_us", "step", "dtype", sort=False)


def _one(value: float, name: str = "") -> pd.Series:
    return pd.Series([value], index=[name])


def _counted(frames: Frames, column: str) -> pd.Series:
    """Points' bytes that are read, or sectors per load of the kernel that reads most, by step."""
    seen = frames["counters"]
    if column == "read":
        return seen.groupby("step", sort=False)["read"].sum() / 160e6
    largest = seen.loc[seen.groupby("step", sort=False)["read"].idxmax()]
    return largest.set_index("step")[column]


def _checked(frames: Frames) -> pd.Series:
    """Latency of a checked call over that of one without a check."""
    us = frames["sweep"].pivot_table("latency_us", "labels", "variant", sort=False)
    ratio: pd.Series = us["fusebook, checked"] / us["fusebook"]
    return ratio


# Claims ---------------------------------------------------------------------------------------------------------------

_POINTS = "20 million points of two coordinates in float32, two centres"
_LABELS = _POINTS + "; labels in int64, int32 and uint8; GPU time, cold L2"
_INT64 = _POINTS + "; labels in int64; GPU time, cold L2"
_ALL = "every recorded size and dtype"
_COUNTERS = _POINTS + "; hardware counters"

CLAIMS = (
    # The lesson's findings
    Claim(
        "gain-over-eager",
        "With int64 labels, the bytes predict 4x faster than eager PyTorch. Measured is {median:.1x}, and {narrow:.1x} "
        "with uint8 labels.",
        lambda frames: tables.ratio(tables.where(frames["sweep"], labels="int64"), "eager", "fusebook"),
        ">= 3",
        _INT64,
        lesson=True,
        numbers=lambda frames: {
            "narrow": tables.ratio(tables.where(frames["sweep"], labels="uint8"), "eager", "fusebook").iloc[0]
        },
    ),
    Claim(
        "narrow-labels",
        "The library is {median:.2x} faster with uint8 labels than with int64 labels; the bytes predict 1.78x.",
        lambda frames: _one((us := _us(frames).loc["fusebook"])["int64"] / us["uint8"]),
        ">= 1.6",
        _LABELS,
        lesson=True,
    ),
    Claim(
        "pairs-wider",
        "With int64 and int32 labels, the two steps differ by less than 5 %.",
        lambda frames: ((us := _us(frames)).loc["one_pass"] / us.loc["pairs"]).drop("uint8").sub(1).abs(),
        "< 0.05",
        _LABELS + "; step 1 over step 2, less 1",
    ),
    Claim(
        "compiled-plane",
        "`torch.compile` takes {least:.2f} to {most:.2f} times as long as the library.",
        lambda frames: tables.ratio(_plane(frames), "torch.compile", "fusebook"),
        ">= 0.98",
        _LABELS + "; also float64 points with int64 labels",
        lesson=True,
    ),
    Claim(
        "checked",
        "The latency of a checked call, which waits for its answer, is {least:.1f} to {most:.1f} times that of a call "
        "without a check.",
        _checked,
        "> 1.5",
        _POINTS + "; labels in int64, int32 and uint8; latency",
        lesson=True,
    ),
    # Steps
    Claim(
        "pairs-narrow",
        "With uint8 labels, loading pairs is {median:.2x} faster.",
        lambda frames: _one((us := _us(frames)["uint8"])["one_pass"] / us["pairs"]),
        "> 1.2",
        _LABELS + "; step 1 over step 2",
    ),
    steps_correct(_LABELS),
    # Ceilings
    Claim(
        "target-int64",
        "With int64 labels the library takes at most 1.10 times as long as the roofline: {median:.2f} times.",
        lambda frames: _over(frames, labels="int64"),
        "<= 1.10",
        _INT64,
        kind="target",
    ),
    Claim(
        "target-float64",
        "With float64 points the library takes at most 1.10 times as long as the roofline: {median:.2f} times.",
        lambda frames: _over(frames, "double"),
        "<= 1.10",
        _INT64.replace("float32", "float64"),
        kind="target",
    ),
    Claim(
        "target-int32",
        "With int32 labels the library takes at most 1.15 times as long as the roofline: {median:.2f} times.",
        lambda frames: _over(frames, labels="int32"),
        "<= 1.15",
        _INT64.replace("int64", "int32"),
        kind="target",
    ),
    Claim(
        "target-uint8",
        "With uint8 labels the library takes at most 1.15 times as long as the roofline: {median:.2f} times.",
        lambda frames: _over(frames, labels="uint8"),
        "<= 1.15",
        _INT64.replace("int64", "uint8"),
        kind="target",
    ),
    Claim(
        "over-copy",
        "With two coordinates the library takes at most {most:.2f} times as long as a copy of the same bytes.",
        lambda frames: pd.concat([_over(frames, name, "copy") for name in ("sweep", "double")]),
        "<= 1.02",
        _LABELS + "; also float64 points with int64 labels",
    ),
    # Correctness
    within_tolerance(_every, _ALL, "`fusebook.kmeans_assign` is within tolerance wherever it was timed."),
    deterministic(_every, _ALL, "Two runs give the same labels."),
    # Hardware counters
    Claim(
        "counters-once",
        "Steps 1 and 2 read the points once, within 2 %.",
        lambda frames: (_counted(frames, "read").reindex(STEPS[1:]) - 1).abs(),
        "< 0.02",
        _COUNTERS,
    ),
    Claim(
        "counters-sectors",
        "A load of step 1 asks for {one:.1f} sectors of 32 bytes on average, and one of step 2 for {two:.1f}. Four of "
        "five loads of step 2 are of centres, a sector each, and the fifth has 16 sectors of points.",
        lambda frames: _one(abs(_counted(frames, "sectors")["pairs"] - (4 * 1 + 16) / 5)),
        "< 0.1",
        _COUNTERS + "; distance of step 2 from 4",
        numbers=lambda frames: {
            "one": (sectors := _counted(frames, "sectors"))["one_pass"],
            "two": sectors["pairs"],
        },
    ),
)

LOG = (
    "Inductor's kernel for the eager code is step 1: it loads every second word, twice. The second load finds its "
    "bytes in the L1 cache, so both steps read the points once.",
    "With uint8 labels the library asks the L2 cache to evict points first, as they are read once. With wider labels "
    "that costs a little, and it does not.",
    "A checked call has no GPU time, as it waits for its answer: events cannot time what waits.",
    "Random problems, few coordinates: each of millions of points has a thread, which compares it with every centre. "
    "Where points are few, a tile has pairs of a point and a centre. A matmul was tried and was slower: six "
    "coordinates are padded to sixteen, and finding the nearest centre is most of the work.",
    "Random problems, many coordinates: some hundred or thousand points make tiles for only a part of the "
    "multiprocessors. Seven tiles were tried, from 32 x 32 to 128 x 64 in steps of 16 and 32 coordinates. The "
    "smallest is faster there, and slower everywhere else.",
    "Random problems: the matmul leaves a point or two without a label, where it cannot distinguish the two nearest "
    "centres. A program compares such a point with all centres, which takes long with thousands of coordinates.",
    "Random problems: transposed points, and points that begin within a word, are loaded element by element. For rows "
    "of odd length a copy pays, and is made. For these it would cost what it saves.",
)
