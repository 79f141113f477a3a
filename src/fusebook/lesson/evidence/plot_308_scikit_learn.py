"""Evidence of the lesson on k-means against scikit-learn."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fusebook
from fusebook.cards.kmeans import KMEANS_STEP
from fusebook.extras import extra
from fusebook.lesson import _points
from fusebook.lesson.evidence import Claim, Frames, Measured, NotRecorded, Recorded, steps_correct
from fusebook.measure import inputs, timing

with extra("book"):
    import pandas as pd

PAGE = _points.EndsPage
CLOCK = "call"
OPERATORS = ("kmeans_step",)
CALLED = "kmeans"
EXAMPLE = {"n": 20_000_000, "d": 2, "k": 2, "labels": "int64", "law": "blobs", "dtype": "float32"}
STEPS = ("eager", "loop", "ahead")
#: Points, coordinates and centres.
SHAPES = ((2_000_000, 2, 3),)
DTYPES = ("float32",)
INTERPRETED = 3000
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS = {"kmeans": ("_kmeans_few", "_kmeans_means")}
CAPTION = "Latency in microseconds, from the start to the end: 2 million points of two coordinates, three centres"
TABLE = {"latency": ("latency_us", "2x3x2000000")}

#: Centres that are no mirror image of each other when the axes change places.
_MIDDLE = ((5.0, 1.0), (0.0, 9.0), (-8.0, 3.0))


# What is measured -----------------------------------------------------------------------------------------------------


def problem(n: int, d: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Points in clusters, and the first centres, which are some of the points."""
    rng = np.random.default_rng(0)
    middle = np.array(_MIDDLE) if d == 2 else 4 * rng.standard_normal((k, d))
    label = rng.integers(k, size=n)
    points = (middle[label] + rng.standard_normal((n, d))).astype(np.float32)
    return points, points[:k].copy()


def _inertia(points: Tensor, centres: Tensor) -> float:
    labels = fusebook.kmeans_assign(points, centres, check=False)
    return float((points - centres[labels]).double().square().sum())


def timed(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """Time each loop from the start to the end; it is correct if its inertia is that of the library."""
    parts = []
    for n, d, k in SHAPES:
        device = inputs.generator(0).device
        x, c = (torch.from_numpy(a).to(device) for a in problem(n, d, k))
        fit = functools.partial(fusebook.kmeans, x, k, init=c, tol=0)
        calls: dict[str, Callable[[], Any]] = {name: functools.partial(step, x, c) for name, step in steps.items()}
        calls["fusebook"] = lambda fit=fit: fit().centres  # type: ignore[misc]
        want = fit().inertia
        rows = [(name, abs(_inertia(x, call()) / want - 1) < 1e-5) for name, call in calls.items()]
        times = timing.measure(calls, warmup=1, repeat=5, kinds=("call",))
        frame = pd.DataFrame(rows, columns=["step", "correct"])
        frame["latency_us"] = [1e6 * q.q50 if (q := times[name]["call"]) else float("nan") for name in calls]
        parts.append(frame.assign(shape=f"{d}x{k}x{n}", dtype="float32"))
    return pd.concat(parts, ignore_index=True)


def _graph(x: Tensor, centres: Tensor) -> torch.cuda.CUDAGraph:
    """A CUDA graph of an iteration by torch.compile, which moves the centres in place."""
    step = KMEANS_STEP.variants["torch.compile"].run
    with torch.cuda.stream(torch.cuda.Stream()):
        step(x, centres, torch.int64)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        centres.copy_(step(x, centres, torch.int64)[1])
    return graph


def _by_scikit_learn(points: np.ndarray, first: np.ndarray) -> Any:
    from sklearn.cluster import KMeans

    return KMeans(len(first), init=first, n_init=1, tol=0, algorithm="lloyd").fit(points)


def ends() -> pd.DataFrame:
    """Seconds, inertia and iterations of whole runs from the same start."""
    rows = []
    for name, (n, d, k) in {"plane": (2_000_000, 2, 3), "wide": (200_000, 16, 16)}.items():
        points, first = problem(n, d, k)
        x, c = (torch.from_numpy(a).cuda() for a in (points, first))
        found = fusebook.kmeans(x, k, init=c, tol=0)
        centres = c.clone()
        graph = _graph(x, centres)

        def replayed(c: Tensor = c, centres: Tensor = centres, graph: Any = graph, n: int = found.iterations) -> None:
            centres.copy_(c)
            for _ in range(n):
                graph.replay()

        calls: dict[str, Callable[[], Any]] = {
            "torch.compile in a graph": replayed,
            "fusebook": functools.partial(fusebook.kmeans, x, k, init=c, tol=0),
            "fusebook, arrays": functools.partial(fusebook.kmeans, points, k, init=first, tol=0),
        }
        if there := importlib.util.find_spec("sklearn") is not None:
            calls["scikit-learn"] = functools.partial(_by_scikit_learn, points, first)
        taken = timing.call(calls, warmup=1, repeat=3)
        replayed()
        made = _by_scikit_learn(points, first) if there else None
        rows.append(
            {
                "points": name,
                "n": n,
                "d": d,
                "k": k,
                **{f"{call}, s": quantiles.q50 for call, quantiles in taken.items()},
                "inertia, scikit-learn": made.inertia_ if made else float("nan"),
                "inertia, torch.compile": _inertia(x, centres),
                "inertia, fusebook": found.inertia,
                "iterations, scikit-learn": made.n_iter_ if made else float("nan"),
                "iterations, fusebook": found.iterations,
            }
        )
    return pd.DataFrame(rows)


FRAMES: dict[str, Any] = {
    "sweep": Recorded("kmeans_step", "plane,wide", "float32", borrowed=True),
    "ends": Measured("kmeans_end", function=ends),
    "steps": Measured("kmeans_loops"),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _rows(frames: Frames) -> pd.DataFrame:
    return frames["ends"].set_index("points")


def _sooner(frames: Frames, other: str, over: str = "fusebook") -> pd.Series:
    """Seconds of one implementation over those of another."""
    rows = _rows(frames)
    if f"{other}, s" not in rows:
        raise NotRecorded(f"{other} was not measured")
    ratio: pd.Series = rows[f"{other}, s"] / rows[f"{over}, s"]
    return ratio


def _turns(frames: Frames) -> pd.Series:
    rows = _rows(frames)
    return rows["iterations, fusebook"] / rows["iterations, scikit-learn"]


def _gain(step: str, over: str) -> Callable[[Frames], pd.Series]:
    """Latency of one step over that of another."""

    def ratio(frames: Frames) -> pd.Series:
        us = frames["steps"].set_index("step")["latency_us"]
        return pd.Series([us[over] / us[step]], index=[""])

    return ratio


# Claims ---------------------------------------------------------------------------------------------------------------

_PLANE = "2,000,000 points in the plane and 3 centres, float32"
_BOTH = "2,000,000 x 2 by 3 centres and 200,000 x 16 by 16; float32; latency of a whole run from the same start"

CLAIMS = (
    Claim(
        "sooner",
        "With points on the GPU, `fusebook.kmeans` is {plane:.0f}x faster than scikit-learn in the plane and "
        "{wide:.0f}x faster with 16 coordinates.",
        lambda frames: _sooner(frames, "scikit-learn"),
        "> 10",
        _BOTH,
        lesson=True,
        numbers=lambda frames: dict(_sooner(frames, "scikit-learn")),  # type: ignore[call-overload]
    ),
    Claim(
        "sooner-arrays",
        "With NumPy arrays, which are copied to the GPU, it is {plane:.0f}x and {wide:.0f}x faster than scikit-learn.",
        lambda frames: _sooner(frames, "scikit-learn", "fusebook, arrays"),
        "> 10",
        _BOTH,
        lesson=True,
        numbers=lambda frames: dict(_sooner(frames, "scikit-learn", "fusebook, arrays")),
    ),
    Claim(
        "iterations",
        "In the plane both take as many iterations. With 16 coordinates `fusebook.kmeans` takes {wide:.1f} times as "
        "many.",
        lambda frames: _turns(frames)[["plane"]],
        "== 1",
        _BOTH.partition("; latency")[0],
        lesson=True,
        numbers=lambda frames: {"wide": _turns(frames)["wide"]},
    ),
    Claim(
        "graph",
        "A loop of torch.compile in a CUDA graph takes {median:.1f} times as long as `fusebook.kmeans` in the plane, "
        "and {wide:.2f} times with 16 coordinates.",
        lambda frames: _sooner(frames, "torch.compile in a graph")[["plane"]],
        "> 1.1",
        _BOTH.partition("; latency")[0] + "; latency of as many iterations; the condition is that of the plane",
        lesson=True,
        numbers=lambda frames: {"wide": _sooner(frames, "torch.compile in a graph")["wide"]},
    ),
    Claim(
        "inertia",
        "The inertia is that of scikit-learn, to one part in ten thousand.",
        lambda frames: (_rows(frames)["inertia, fusebook"] / _rows(frames)["inertia, scikit-learn"] - 1).abs(),
        "< 0.0001",
        _BOTH.partition("; latency")[0] + "; distance of the ratio from 1",
    ),
    # Steps
    Claim(
        "loop-gain",
        "A loop of two kernels, which asks after each iteration, is {median:.1x} faster than eager PyTorch.",
        _gain("loop", "eager"),
        "> 2",
        _PLANE + "; latency",
    ),
    Claim(
        "ahead-gain",
        "Asking after every eighth iteration makes the loop {median:.2x} faster.",
        _gain("ahead", "loop"),
        "",
        _PLANE + "; latency; some iterations are not needed then",
    ),
    steps_correct(_PLANE, "Every loop ends with the inertia of the library, to one part in a hundred thousand."),
)

LOG = (
    "Points start from the same centres, the tolerance is 0, and there is one start. scikit-learn's algorithm is "
    "``lloyd``, which is the one of this page.",
    "In the plane the clusters are far apart, and both take the same path. With 16 coordinates some of the first "
    "centres are in one cluster. The last bit decides on a point halfway between two centres, and then the paths part.",
    "The graph of torch.compile is replayed as many times as the library iterates. It never asks whether the centres "
    "are at rest: its atomic additions may differ in the last bit for ever.",
    "FAISS and cuML have k-means for GPUs, too. They were not installed where this was measured.",
    "An empty cluster keeps its centre in Fusebook; scikit-learn moves it to the point that is farthest from its own.",
)
