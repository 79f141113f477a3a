"""Evidence of the lesson on a TF32 filter with an error bound."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

import fusebook
from fusebook import tables
from fusebook.cards.kmeans import KMEANS_ASSIGN
from fusebook.extras import extra
from fusebook.lesson import _numbers, _points
from fusebook.lesson.evidence import Claim, Frames, Measured, NotRecorded, Recorded, steps_correct, within_tolerance
from fusebook.measure import bench, check, inputs, timing

with extra("book"):
    import pandas as pd

PAGE = _points.PointsPage
OPERATORS = ("kmeans_assign",)
EXAMPLE = {"n": 1_000_000, "d": 64, "k": 256, "labels": "int64", "law": "near", "dtype": "float32"}
WORDS = "{n:,.0f} points of {d} coordinates in {dtype}, {k} centres"
ROWS = "{n} x {d}, k = {k}"
STEPS = ("cdist", "float64", "filtered")
#: Points, coordinates and centres.
SHAPES = ((1_000_000, 64, 256), (65_536, 128, 1024))
DTYPES = ("float32",)
INTERPRETED = 3000
STRESS = {"law": "near"}
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS = {"kmeans_assign": ("_kmeans_screen",)}
CAPTION = "GPU time in microseconds, cold L2: points of d coordinates in float32, k centres"
TABLE = {
    "1,000,000 x 64, k = 256": ("gpu_us", "64x256x1000000"),
    "65,536 x 128, k = 1024": ("gpu_us", "128x1024x65536"),
}


# What is measured -----------------------------------------------------------------------------------------------------


def _given(n: int, d: int, k: int) -> tuple[Any, ...]:
    return KMEANS_ASSIGN.make(inputs.generator(0), torch.float32, n=n, d=d, k=k, labels="int64", law="near")


def timed(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """Check and time every step, a compiled matmul and the library, and count what the filter leaves undecided."""
    parts = []
    for shape in SHAPES:
        given = _given(*shape)
        yard = check.yardstick(KMEANS_ASSIGN, given)
        every = {**steps, "fusebook": KMEANS_ASSIGN.variants["fusebook"].run}
        if torch.cuda.is_available():
            torch.compiler.reset()
            every["compiled matmul"] = KMEANS_ASSIGN.variants["torch.compile, product"].run
        calls = {name: functools.partial(step, *given) for name, step in every.items()}
        frame = bench.staircase(calls, functools.partial(_numbers._is_correct, yard))
        count = torch.zeros(1, dtype=torch.int32, device=given[0].device)
        steps["filtered"](*given, count=count)
        n, d, k = shape
        named = frame.rename(columns={"us": "gpu_us", "right": "correct"})
        parts.append(named.assign(doubt=count.item() / n, shape=f"{d}x{k}x{n}", dtype="float32"))
    return pd.concat(parts, ignore_index=True)


def products() -> pd.DataFrame:
    """The matmul alone, in float32 without TF32, and the library."""
    rows = []
    for n, d, k in SHAPES:
        points, centres, _ = _given(n, d, k)
        out = points.new_empty(n, k)
        calls: dict[str, Callable[[], Any]] = {
            "bare product": functools.partial(torch.mm, points, centres.T, out=out),
            "fusebook": functools.partial(fusebook.kmeans_assign, points, centres, check=False),
        }
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        times = timing.cold(calls)
        torch.set_float32_matmul_precision(before)
        rows.append({"n": n, "d": d, "k": k, **{name: q.q50 * 1e6 for name, q in times.items() if q}})
    return pd.DataFrame(rows)


# Records --------------------------------------------------------------------------------------------------------------


_PRODUCTS = ("torch.cdist", "torch.compile", "torch.compile, product", "fusebook")
FRAMES: dict[str, Any] = {
    "sweep": Recorded("kmeans_assign", "wide", "float32", _PRODUCTS, borrowed=True),
    "laws": Recorded("kmeans_assign", "laws", "float32", ("torch.cdist", "fusebook"), borrowed=True),
    "steps": Measured("kmeans_screen_steps"),
    "product": Measured("kmeans_product", function=products),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _wider(frames: Frames, variant: str) -> pd.Series:
    """How many times as long another implementation takes with 64 and with 128 coordinates."""
    return tables.ratio(tables.where(frames["sweep"], d=[64, 128]), variant, "fusebook")


def _correct(frames: Frames, variant: str) -> pd.Series:
    """Whether labels are correct, by where the points are."""
    return tables.where(frames["laws"], variant=variant).set_index("law")["status"].eq("ok")


def _gain(step: str, over: str) -> Callable[[Frames], pd.Series]:
    """GPU time of one step over that of another, by size."""

    def ratio(frames: Frames) -> pd.Series:
        us: Any = frames["steps"].pivot_table("gpu_us", "step", "shape", sort=False)
        if {step, over} - {*us.index}:
            raise NotRecorded(f"{step} or {over} was not measured")
        found: pd.Series = us.loc[over] / us.loc[step]
        return found

    return ratio


def _in_order(values: Callable[[Frames], pd.Series]) -> Callable[[Frames], Mapping[str, Any]]:
    """The numbers of a claim in the order in which sizes were measured, that of the table's columns."""
    return lambda frames: {"first": (found := values(frames)).iloc[0], "second": found.iloc[-1]}


def _doubt(frames: Frames) -> pd.Series:
    """Which share of the points the filter of step 2 leaves undecided."""
    return frames["steps"].drop_duplicates("shape").set_index("shape")["doubt"]


def _library(frames: Frames) -> pd.DataFrame:
    rows = tables.where(frames.of("kmeans_assign"), variant="fusebook")
    return rows.set_index([tables.label(rows), "dtype"])


def _rough(frames: Frames) -> pd.Series:
    """Time with centres far from each other over that with clusters."""
    us = tables.where(frames["laws"], variant="fusebook").set_index("law")["gpu_us"]
    return us[["rough"]] / us["blobs"]


# Claims ---------------------------------------------------------------------------------------------------------------

_WIDE = "1,000,000 x 64 by 256 centres and 65,536 x 128 by 1024; float32, no clusters; GPU time, cold L2"
_LAWS = "1,000,000 x 64 by 256 centres, float32"

CLAIMS = (
    # The lesson's findings
    Claim(
        "undecided",
        "At the two sizes of the table, step 2 leaves {first:.0%} and {second:.0%} of the points undecided.",
        _doubt,
        "<= 0.25",
        _WIDE.partition("; GPU")[0],
        lesson=True,
        numbers=_in_order(_doubt),
    ),
    Claim(
        "filter-gain",
        "There, step 2 is {first:.2x} and {second:.2x} faster than float64 for all points.",
        _gain("filtered", "float64"),
        "> 1.1",
        _WIDE + "; step 1 over step 2",
        lesson=True,
        numbers=_in_order(_gain("filtered", "float64")),
    ),
    Claim(
        "library-over-filtered",
        "The library's filter, which rounds and subtracts the mean, is {first:.2x} and {second:.2x} faster than step "
        "2.",
        _gain("fusebook", "filtered"),
        "> 1.1",
        _WIDE,
        lesson=True,
        numbers=_in_order(_gain("fusebook", "filtered")),
    ),
    Claim(
        "rough",
        "Where centres are so far from their mean that the filter decides few points, the library takes {median:.1f} "
        "times as long as with clusters.",
        _rough,
        "> 1.1",
        _LAWS + "; GPU time, cold L2",
        lesson=True,
    ),
    # Other implementations
    Claim(
        "target-cdist",
        "With 64 and 128 coordinates the library is at least twice as fast as `torch.cdist` and `argmin`: {least:.1f}x "
        "to {most:.1f}x.",
        lambda frames: _wider(frames, "torch.cdist"),
        ">= 2",
        _WIDE,
        kind="target",
    ),
    Claim(
        "target-compiled-wide",
        "There it is at least twice as fast as `torch.compile` of the eager code: {least:.0f}x to {most:.0f}x.",
        lambda frames: _wider(frames, "torch.compile"),
        ">= 2",
        _WIDE,
        kind="target",
    ),
    Claim(
        "target-compiled-matmul",
        "There it is at least twice as fast as a compiled matmul, which is how scikit-learn computes distances: "
        "{least:.1f}x to {most:.1f}x.",
        lambda frames: _wider(frames, "torch.compile, product"),
        ">= 2",
        _WIDE,
        kind="target",
    ),
    Claim(
        "target-matmul",
        "There it takes at most 1.5 times as long as the matmul alone, in float32 without TF32: {least:.2f} to "
        "{most:.2f} times.",
        lambda frames: (rows := frames["product"].set_index(["n", "d", "k"]))["fusebook"] / rows["bare product"],
        "<= 1.5",
        _WIDE,
        kind="target",
    ),
    Claim(
        "fastest-wide",
        "With 16, 64 and 128 coordinates the library takes {least:.2f} to {most:.2f} times as long as the fastest "
        "other implementation.",
        lambda frames: tables.behind(frames["sweep"])["times as long"],
        "< 0.98",
        "1,000,000 x 16 by 16 centres, 1,000,000 x 64 by 256 and 65,536 x 128 by 1024; float32, GPU time, cold L2",
    ),
    Claim(
        "float64-gain",
        "A matmul in float64 that is not written is {least:.1x} and {most:.1x} faster than `torch.cdist` and `argmin`.",
        _gain("float64", "cdist"),
        "> 1.5",
        _WIDE,
    ),
    Claim(
        "float64-compiled",
        "It takes {least:.2f} and {most:.2f} times as long as a compiled matmul in float32, which is written.",
        _gain("compiled matmul", "float64"),
        "< 1",
        _WIDE,
    ),
    # Correctness
    steps_correct(_WIDE),
    Claim(
        "anywhere-correct",
        "The library is correct for points in clusters, far from the origin, and with centres far from each other.",
        lambda frames: _correct(frames, "fusebook"),
        "== 1",
        _LAWS,
    ),
    Claim(
        "cdist-incorrect",
        "`torch.cdist` with `argmin` is incorrect far from the origin, and where centres are far from each other: for "
        "more than 25 rows it computes a matmul.",
        lambda frames: _correct(frames, "torch.cdist").drop("blobs"),
        "== 0",
        _LAWS,
    ),
    within_tolerance(_library, _WIDE.partition("; GPU")[0] + "; other data", "The library is within tolerance."),
)

LOG = (
    "The bound: a factor that is cut to eleven bits loses at most one part in 2**10 of itself. By Cauchy and Schwarz a "
    "product of two such vectors is wrong by at most 2 * 2**-10 |x| |c|, and the distance by twice that.",
    "Two distances may be wrong in opposite directions, so the limit is 2**-7 |x| max |c|. The kernel adds 5 % for the "
    "rounding of squares and roots, and 2**-18 max |c|**2 for sums in float32.",
    "How PyTorch sets its switches of TF32 changes nothing: the filter only decides points that are certain.",
    "On GPUs whose tensor cores do not multiply float64, the library adds three products in TF32, which lose more. "
    "The points that they leave undecided are compared with all centres by differences.",
    "A dozen points are one program, however many the centres. There the centres are shared among programs, too, and "
    "a second kernel compares what each found.",
    "The library's matmul goes through long points in pieces. It also knows for which points float64 cannot tell two "
    "centres apart, and puts these on the list.",
)
