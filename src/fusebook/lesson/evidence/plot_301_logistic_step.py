"""Evidence of the lesson on a training step in one kernel."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import fusebook
from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.lesson import _launches
from fusebook.lesson.evidence import (
    Claim,
    Frames,
    Measured,
    NotRecorded,
    Recorded,
    deterministic,
    steps_correct,
    within_tolerance,
)
from fusebook.measure import bench, inputs

with extra("book"):
    import pandas as pd

PAGE = _launches.LaunchesPage
CLOCK = "paid"
OPERATORS = ("logistic_fit", "logistic_step")
EXAMPLE = {"N": 400, "D": 784, "steps": 50, "dtype": "float32"}
WORDS = "{steps:.0f} steps with {N:.0f} rows of {D:.0f} features, {dtype}"
OVER = "rows of 784 features, M"
SHOWN = {"D": 784}
UNIT = {"N": "M", "D": "N"}
STEPS = ("eager", "rows", "alone", "barriers")
SHAPES = ((16, 784), (400, 784))
DTYPES = ("float32",)
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS = {"logistic_fit": ("_logistic_fit_rows",)}
CAPTION = "Microseconds of a step with 784 features, warm L2"
TABLE = {"16 rows": ("gpu_warm_us", "16x784"), "400 rows": ("gpu_warm_us", "400x784")}

_STEPS = 100
_ON_CPU = ("NumPy", "torch on the CPU")
_ONE_CORE = "torch on one core"


# What is measured -----------------------------------------------------------------------------------------------------


def missing(*given: Any) -> tuple[Tensor]:
    """The loss, which the steps of the lesson do not compute: of one step, or of many."""
    if len(given) == 6:
        return (fusebook.logistic_step(*given, check=False)[2],)
    return (fusebook.logistic_fit(*given[:6], steps=given[6], check=False)[2],)


def problem(N: int = 400, D: int = 784) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data, targets and first weights as the text of 2012 draws them."""
    rng = inputs.generator(301)
    at: dict[str, Any] = {"generator": rng, "device": rng.device}
    y = torch.randint(0, 2, (N,), **at).float()
    return torch.randn(N, D, **at), y, torch.randn(D, **at), torch.zeros((), device=rng.device)


def _loop(step: Callable[..., Any], given: tuple[Tensor, ...]) -> Callable[[], Any]:
    def run() -> Any:
        now = given[2:]
        for _ in range(_STEPS):
            now = step(*given[:2], *now, 0.01, 0.01)[:2]
        return now

    return run


def timed(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """A step of a hundred in a CUDA graph; one program alone has room for 16 rows."""
    parts = []
    for N, D in SHAPES:
        given = problem(N, D)
        want = _loop(fusebook.logistic_step_eager, tuple(v.double() for v in given))()[0]
        scale = want.abs() + want.square().mean().sqrt()

        def error(got: Any, want: Tensor = want, scale: Tensor = scale) -> float:
            return float(((got[0] - want).abs() / scale).max())

        tolerance = max(64 * torch.finfo(torch.float32).eps, 2 * error(_loop(fusebook.logistic_step_eager, given)()))
        calls = {name: _loop(steps[name], given) for name in ("eager", "rows")}
        for name in ("alone", "barriers"):
            calls[name] = functools.partial(steps[name], *given, 0.01, 0.01, _STEPS)
        if N > 16:
            del calls["alone"]
        if torch.cuda.is_available():
            torch.compiler.reset()
            calls["torch.compile"] = _loop(torch.compile(steps["eager"], dynamic=False), given)
        calls["fusebook.logistic_step"] = _loop(functools.partial(fusebook.logistic_step, check=False), given)
        calls["fusebook"] = functools.partial(
            fusebook.logistic_fit, *given, 0.01, 0.01, steps=_STEPS, check=False
        )  # fmt: skip

        def right(got: Any, tolerance: float = tolerance, error: Callable[[Any], float] = error) -> bool:
            return error(got) <= tolerance

        frame = bench.staircase(calls, right, kind="warm", repeat=15).rename(columns={"right": "correct"})
        frame["gpu_warm_us"] = frame.pop("us") / _STEPS
        parts.append(frame.assign(shape=f"{N}x{D}", dtype="float32"))
    return pd.concat(parts, ignore_index=True)


def to_count(steps: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[[], Any]]:
    """One step of 100000 rows, and a hundred of 400 in one launch."""
    many, few = problem(100_000), problem()
    return {
        **{name: functools.partial(steps[name], *many, 0.01, 0.01) for name in ("eager", "rows")},
        "fusebook.logistic_step": lambda: fusebook.logistic_step(*many, 0.01, 0.01, check=False),
        "fusebook": lambda: fusebook.logistic_fit(*few, 0.01, 0.01, steps=_STEPS, check=False),
    }


def ten_thousand() -> pd.DataFrame:
    """Seconds of ten thousand steps by each implementation, and how far losses and predictions are from float64."""
    given = (*problem(), 0.01, 0.01, 10_000)
    variants, cores = OPS["logistic_fit"].variants, torch.get_num_threads()

    def run(name: str, given: tuple[Any, ...]) -> tuple[float, Tensor, Tensor]:
        variant = variants["torch on the CPU" if name == _ONE_CORE else name]
        torch.set_num_threads(1 if name == _ONE_CORE else cores)
        for steps in (20, given[-1]):  # the first call compiles
            ready = variant.given(*given[:-1], steps)
            torch.cuda.synchronize()
            start = time.perf_counter()
            w, b, losses = variant.run(*ready)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        w, b, losses = (v.to(given[0].device) for v in (w, b, losses))
        return seconds, given[0].to(w.dtype) @ w + b > 0, losses.double()

    exact = tuple(v.double() if isinstance(v, Tensor) else v for v in given)
    _, truth, want = run("eager in a graph", exact)
    scale = want.abs() + want.square().mean().sqrt()
    rows = []
    for name in ("NumPy", _ONE_CORE, *(n for n in variants if n not in _ON_CPU)):
        seconds, predicted, losses = run(name, given)
        error = float(((losses - want).abs() / scale).max())
        rows.append((name, seconds, int((predicted != truth).sum()), error))
    torch.set_num_threads(cores)
    frame = pd.DataFrame(rows, columns=["step", "seconds", "predictions that differ", "error"])
    rounded = float(frame.set_index("step")["error"]["eager"])
    return frame.assign(tolerance=max(64 * torch.finfo(torch.float32).eps, 2 * rounded))


# Records --------------------------------------------------------------------------------------------------------------

_LOOPS = ("eager", "torch.compile", "eager in a graph", "torch.compile in a graph", "fusebook steps", "fusebook")
FRAMES: dict[str, Any] = {
    "sweep": Recorded("logistic_fit", "rows,features", "float32", _LOOPS),
    "step": Recorded("logistic_step", "classic", "float32"),
    "large": Recorded("logistic_step", "roof", "float32", ("eager", "torch.compile", "fusebook")),
    "steps": Measured("logistic_steps"),
    "seconds": Measured("logistic_seconds", function=ten_thousand),
    "counters": Measured("logistic_counters"),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _one(value: float, name: str = "") -> pd.Series:
    return pd.Series({name: float(value)})


def _us(frames: Frames, rows: int = 400) -> pd.Series:
    """Warm GPU time of each step."""
    found = tables.where(frames["steps"], shape=f"{rows}x784").set_index("step")["gpu_warm_us"]
    if not {"rows", "barriers", "fusebook"} <= {*found.index}:
        raise NotRecorded(f"steps were not measured with {rows} rows")
    return found


def _seconds(frames: Frames) -> pd.Series:
    return frames["seconds"].set_index("step")["seconds"]


def _step(frames: Frames, variant: str) -> Any:
    """The row of one step with 400 rows."""
    return tables.where(frames["step"], variant=variant).iloc[0]


def _points(frames: Frames, kind: str) -> pd.DataFrame:
    """Microseconds by problem and implementation, once for each problem."""
    sweep = frames["sweep"]
    column = tables.column(kind)
    return sweep.pivot_table(column, ["N", "D"], "variant", sort=False)


def _fits(frames: Frames, points: pd.DataFrame) -> Any:
    """Whether X fits into half of the registers of all multiprocessors: 2**16 of four bytes in each."""
    room = frames["sweep"].attrs["origin"].machine.sms * 2**17
    return [4 * N * D <= room for N, D in points.index]


def _fitting(frames: Frames, kind: str) -> pd.Series:
    """Time of `logistic_fit` over that of the fastest other, where X fits into registers."""
    points = _points(frames, kind)
    if kind == "warm":  # a graph is not captured in another one
        points = points[[name for name in points if not str(name).endswith("in a graph")]]
    return (points["fusebook"] / points.drop(columns="fusebook").min(axis=1))[_fits(frames, points)]


def _not_fitting(frames: Frames) -> pd.Series:
    points = _points(frames, "warm")
    return (points["fusebook"] / points["fusebook steps"])[[not fits for fits in _fits(frames, points)]]


def _on_chip(frames: Frames) -> float:
    """A step of fifty in one launch, with 400 rows of 784 features."""
    rows = tables.where(frames["sweep"], variant="fusebook", N=400, D=784)
    return float(rows["gpu_warm_us"].mean()) / 50


def _read(frames: Frames) -> pd.Series:
    """Bytes read over those of X, by step."""
    of = {"eager": 100_000, "rows": 100_000, "fusebook.logistic_step": 100_000, "fusebook": 400}
    read = frames["counters"].groupby("step", sort=False)["read"].sum()
    return pd.Series({name: read[name] / (4 * 784 * N) for name, N in of.items() if name in read})


def _every(frames: Frames) -> pd.DataFrame:
    rows = {op: tables.where(frames.of(op), variant="fusebook", status="ok") for op in OPERATORS}
    sizes = {op: found.set_index(tables.label(found).rename("size")) for op, found in rows.items()}
    return pd.concat(sizes, names=["operator"])


# Claims ---------------------------------------------------------------------------------------------------------------

_CLASSIC = "400 rows of 784 features, float32"
_TEN = "ten thousand steps with 400 rows of 784 features, float32; wall-clock time of the loop"
_LARGE = "a step with a million rows of 784 features, float32, cold L2"
_SWEEP = "fifty steps, 100 to 16000 rows of 784 features, and 400 rows of 16 to 4096, float32"
_ALL = "every recorded size of both operators, float32"

CLAIMS = (
    # The lesson's findings
    Claim(
        "ten-thousand",
        "Ten thousand steps take NumPy on the CPU {numpy:.2f} s, eager PyTorch {eager:.2f} s, torch.compile in a CUDA "
        "graph {compiled:.3f} s and `logistic_fit` {own:.3f} s.",
        lambda frames: _one((s := _seconds(frames))["fusebook"] / s["NumPy"]),
        "<= 0.1",
        _TEN + "; of `logistic_fit` over NumPy",
        lesson=True,
        numbers=lambda frames: {
            "numpy": (s := _seconds(frames))["NumPy"],
            "eager": s["eager"],
            "compiled": s["torch.compile in a graph"],
            "own": s["fusebook"],
        },
    ),
    Claim(
        "gpu-idle",
        "The GPU works for {median:.0%} of the time of an eager step.",
        lambda frames: _one((row := _step(frames, "eager"))["gpu_warm_us"] / row["latency_us"]),
        "< 0.5",
        _CLASSIC + "; warm GPU time over latency",
        lesson=True,
    ),
    Claim(
        "gain-large",
        "With a million rows, one read instead of two predicts 2.0x faster than eager. Measured is {median:.2x}: eager "
        "takes {eager:.0%} longer than memory needs for its reads, and the library {own:.0%}.",
        lambda frames: tables.ratio(frames["large"], "eager", "fusebook"),
        ">= 1.9",
        _LARGE,
        lesson=True,
        numbers=lambda frames: {
            "eager": 0.5 / tables.share(frames["large"], "eager", of="roof").iloc[0] - 1,
            "own": 1 / tables.share(frames["large"], "fusebook", of="roof").iloc[0] - 1,
        },
    ),
    Claim(
        "messages",
        "With 400 rows, messages instead of barriers save {saved:.0%} of a step.",
        lambda frames: _one((us := _us(frames))["fusebook"] / us["barriers"]),
        "< 0.98",
        _CLASSIC + "; `logistic_fit` over step 3, warm",
        lesson=True,
        numbers=lambda frames: {"saved": 1 - (us := _us(frames))["fusebook"] / us["barriers"]},
    ),
    # Steps
    steps_correct("16 and 400 rows of 784 features, float32, after a hundred steps"),
    Claim(
        "each-faster",
        "With 400 rows, each kernel is faster than the one before: atomic additions, two launches, barriers, messages.",
        lambda frames: _us(frames)[["rows", "fusebook.logistic_step", "barriers", "fusebook"]].pct_change().dropna(),
        "< 0",
        _CLASSIC + "; relative change of warm GPU time",
    ),
    Claim(
        "alone-faster",
        "With 16 rows, one program that waits for no other takes {median:.2f} times as long as `logistic_fit`.",
        lambda frames: _one((us := _us(frames, 16))["alone"] / us["fusebook"]),
        "< 1",
        "16 rows of 784 features, float32, warm",
    ),
    Claim(
        "graph-fused",
        "In a CUDA graph, a fused step takes at most half the time of an eager one: {median:.2f}.",
        lambda frames: _one(_step(frames, "fusebook")["gpu_warm_us"] / _step(frames, "eager")["gpu_warm_us"]),
        "<= 0.5",
        _CLASSIC + ", warm",
    ),
    Claim(
        "compiled-step",
        "In a CUDA graph, a step of torch.compile takes {median:.1f} times as long as one of `logistic_fit`.",
        lambda frames: _one((us := _us(frames))["torch.compile"] / us["fusebook"]),
        "",
        _CLASSIC + ", warm",
    ),
    # Ten thousand steps
    Claim(
        "eager-slower",
        "Eager PyTorch on the GPU takes {median:.1f} times as long as NumPy on the CPU.",
        lambda frames: _one((s := _seconds(frames))["eager"] / s["NumPy"]),
        "> 1",
        _TEN,
    ),
    Claim(
        "losses",
        "The losses of every implementation are within tolerance of those in float64.",
        lambda frames: (f := frames["seconds"].set_index("step"))["error"] / f["tolerance"],
        "<= 1",
        _TEN,
    ),
    Claim(
        "predictions",
        "After ten thousand steps, every implementation predicts the same as float64 for all rows.",
        lambda frames: frames["seconds"].set_index("step")["predictions that differ"],
        "== 0",
        _TEN,
    ),
    Claim(
        "clocks-agree",
        "A step among ten thousand takes {median:.2f} times as long as one among fifty.",
        lambda frames: _one(_seconds(frames)["fusebook"] * 100 / _on_chip(frames)),
        "< 1.2",
        _CLASSIC + "; wall-clock time of one loop over warm GPU time of another",
    ),
    # Targets
    Claim(
        "target-chip",
        "A step in one launch of many takes at most 5 microseconds: {median:.2f}.",
        lambda frames: _one(_on_chip(frames)),
        "<= 5",
        _CLASSIC + "; one of fifty, warm",
        kind="target",
    ),
    Claim(
        "target-roof",
        "A fused step with a million rows reaches 85 % of the roofline of one read: {least:.0%}.",
        lambda frames: tables.share(frames["large"], "fusebook", of="roof"),
        ">= 0.85",
        _LARGE,
        kind="target",
    ),
    # The library
    Claim(
        "chip-fastest",
        "Where X fits into registers, `logistic_fit` takes at most {most:.2f} of the GPU time of any other loop.",
        lambda frames: _fitting(frames, "warm"),
        "<= 1.02",
        _SWEEP + "; warm, loops in graphs excluded",
    ),
    Claim(
        "chip-fastest-call",
        "Where X fits into registers, one call of `logistic_fit` has at most {most:.2f} of the latency of any other "
        "loop, those in CUDA graphs included.",
        lambda frames: _fitting(frames, "call"),
        "<= 1.02",
        _SWEEP,
    ),
    Claim(
        "beyond-chip",
        "Where X does not fit, `logistic_fit` takes {most:.2f} times as long as single fused steps.",
        _not_fitting,
        "<= 1.05",
        _SWEEP + "; warm",
    ),
    within_tolerance(_every, _ALL, "Both functions are within tolerance wherever they were timed."),
    deterministic(_every, _ALL, "Two runs give the same bits."),
    # Hardware counters
    Claim(
        "counters-eager",
        "The hardware counters show that eager PyTorch reads X {median:.2f} times.",
        lambda frames: (_read(frames)[["eager"]] - 2).abs() / 2,
        "< 0.05",
        "100000 rows of 784 features, float32; relative distance from 2",
    ),
    Claim(
        "counters-once",
        "Step 1 and `logistic_step` read X once, within 2 %.",
        lambda frames: (_read(frames)[["rows", "fusebook.logistic_step"]] - 1).abs(),
        "< 0.02",
        "100000 rows of 784 features, float32",
    ),
    Claim(
        "counters-chip",
        "A hundred steps in one launch read {median:.2f} times the bytes of X.",
        lambda frames: _read(frames)[["fusebook"]],
        "< 2",
        _CLASSIC,
    ),
)

LOG = (
    "The problem is an exercise of a text of 2012: 400 pictures of 784 pixels and ten thousand steps. The text asked "
    "what can be done to make the GPU faster, and left the answer to the reader.",
    "The library's step has two launches. The first keeps one partial gradient per program, and the second adds all of "
    "them in a fixed order and takes the step.",
    "In one launch, each program sends its part of the gradient to the owners of the slices, and receives new weights. "
    "Two buffers alternate for even and odd steps. A program may overwrite a buffer once all others have answered.",
    "The thread that waits for a word must be the one that uses it. So a tile of words has as many words as threads. "
    "With fewer, two threads would load one word, and the loop would look at one of the copies only.",
    "The kernel keeps X in half of the registers. More data, and float64, goes to a loop of fused steps: a word of 64 "
    "bits has no room for a float64 and a number.",
    "torch on all cores is not among the ten thousand steps, as waking its threads takes far longer than the work.",
    "Loops in CUDA graphs are captured before they are timed. A graph that is replayed is not captured in another one, "
    "so such loops have no warm GPU time.",
    "Random problems: a transposed X of up to 2048 features is read as it is, once, and the compiled step reads it "
    "twice. With more features X is copied to rows first. Two passes with tiles that follow the columns were tried "
    "instead: slower at each of nine problems.",
    "Random problems: rows are padded to a power of two. With 278 features only 278 of 512 lanes have work, and a "
    "library has no padding. With more than 16384 features X is read twice.",
    "Random problems, changed since: rows that begin within 16 bytes come in tiles of half the size. With more than "
    "16384 features a program takes one row for the margins. The programs of the columns share the rows where "
    "launches had fewer programs than the GPU has room for.",
)
