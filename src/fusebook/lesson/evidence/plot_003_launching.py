"""Evidence of the lesson on launching."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

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
from fusebook.measure import check, inputs, timing

with extra("book"):
    import pandas as pd

PAGE = _launches.LaunchesPage
CLOCK = "paid"
OPERATORS = ("exp",)
EXAMPLE = {"M": 20, "N": 10, "dtype": "float32"}
WORDS = "{M} x {N} in {dtype}"
STEPS = ("eager", "brackets", "planned")
SHAPES = ((64, 64),)
DTYPES = ("float32",)
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS: Mapping[str, tuple[str, ...]] = {}
CAPTION = "Microseconds for a call of 64 x 64 elements in float32"
TABLE = {
    "CPU launch": ("launch_us", "64x64"),
    "with a gradient": ("gradient_us", "64x64"),
    "GPU, warm": ("gpu_warm_us", "64x64"),
}
GRAPH = "a graph of 100 calls, per call"


# What is measured -----------------------------------------------------------------------------------------------------


def timed(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """The steps and the library; on a GPU, also the replay of a graph of a hundred calls of step 1."""
    op, parts = OPS["exp"], []
    functions = {**steps, "fusebook": fusebook.exp}
    for M, N in SHAPES:
        (x,) = op.make(inputs.generator(0), torch.float32, M=M, N=N)
        leaf = x.clone().requires_grad_()
        calls = {name: functools.partial(f, x) for name, f in functions.items()}
        frame = _launches.clocked(calls, check.yardstick(op, (x,)))
        warm = timing.warm(calls)
        recorded = timing.host({name: functools.partial(functions[name], leaf) for name in ("eager", "fusebook")})
        for column, times in (("gpu_warm_us", warm), ("gradient_us", recorded)):
            frame[column] = [1e6 * q.q50 if (q := times.get(name)) else math.nan for name in frame["step"]]
        if x.is_cuda:
            graph = _captured(calls["brackets"])
            if q := timing.host({GRAPH: graph.replay})[GRAPH]:
                frame = pd.concat([frame, pd.DataFrame({"step": [GRAPH], "launch_us": 1e4 * q.q50})])
        parts.append(frame.assign(shape=f"{M}x{N}", dtype="float32"))
    return pd.concat(parts, ignore_index=True)


def _captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A hundred calls in one graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            call()
    return graph


def compiled_calls() -> pd.DataFrame:
    """CPU launch time of compiled functions, by what they compute.

    A second kernel is added to ``2 x + 1``: one of the compiler's own, an operator of torch that it calls, or the
    library's. ``torch.exp`` alone is no measure, as a function in C is wrapped before it is compiled.
    """
    x = torch.randn(4096, device="cuda")
    functions: dict[str, Callable[..., Any]] = {
        "2 x + 1": lambda x: 2 * x + 1,
        "two kernels of its own": lambda x: (2 * x + 1, x[:1000].exp()),
        "airy_ai(2 x + 1)": lambda x: torch.special.airy_ai(2 * x + 1),
        "fusebook.exp(2 x + 1)": lambda x: fusebook.exp(2 * x + 1),
        "fusebook.exp twice": lambda x: fusebook.exp(fusebook.exp(2 * x + 1)),
    }
    calls = {f"torch.compile, {name}": functools.partial(torch.compile(f), x) for name, f in functions.items()}
    for name in ("2 x + 1", "fusebook.exp(2 x + 1)"):
        replayed = torch.compile(functions[name], mode="reduce-overhead")
        calls[f"reduce-overhead, {name}"] = functools.partial(replayed, x)
    for call in calls.values():
        for _ in range(3):  # the second call captures a graph
            call()
    times = timing.host(calls)
    return pd.DataFrame([(name, 1e6 * q.q50) for name, q in times.items() if q], columns=["step", "launch_us"])


def checks() -> pd.DataFrame:
    """Latency of functions that look at their input first, with the check and without it."""
    on = {"device": "cuda"}
    rows = torch.randint(0, 32000, (2048, 1), **on)  # type: ignore[call-overload]
    logits = torch.randn(2048, 32000, dtype=torch.bfloat16, **on)  # type: ignore[call-overload]
    points, updates = torch.randn(1_000_000, 16, device="cuda"), torch.randn(2048, 4096, device="cuda")
    X, w, b = torch.randn(400, 784, device="cuda"), torch.zeros(784, device="cuda"), torch.zeros((), device="cuda")
    y = (torch.rand(400, device="cuda") < 0.5).float()
    functions: dict[str, Callable[..., Any]] = {
        "masked_scatter_nd_of_shape, 2048 updates": functools.partial(
            fusebook.masked_scatter_nd_of_shape, (32000, 4096), rows, updates
        ),
        "cross_entropy, 2048 x 32000": functools.partial(fusebook.cross_entropy, logits, rows[:, 0]),
        "kmeans_assign, a million points": functools.partial(fusebook.kmeans_assign, points, points[:16].clone()),
        "logistic_step, 400 x 784": functools.partial(fusebook.logistic_step, X, y, w, b, 0.1, 0.01),
    }
    found = []
    for name, function in functions.items():
        with torch.no_grad():
            times = timing.call({str(c): functools.partial(function, check=c) for c in (False, True)})
        found.append({"step": name, **{f"check={c} us": 1e6 * q.q50 for c, q in times.items()}})
    return pd.DataFrame(found)


# Records --------------------------------------------------------------------------------------------------------------


FRAMES: dict[str, Any] = {
    "sweep": Recorded("exp", "small", "float32", ("eager", "torch.compile", "fusebook"), borrowed=True),
    "steps": Measured("launching_ways"),
    "compiled": Measured("launching_compiled", function=compiled_calls),
    "parts": Measured("launching_parts"),
    "checks": Measured("launching_checks", function=checks),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _us(frames: Frames, column: str = "launch_us") -> pd.Series:
    """Times by step."""
    steps = frames["steps"]
    if column not in steps:
        raise NotRecorded(f"{column} was not measured")
    return steps.set_index("step")[column]


def _times(frames: Frames) -> Mapping[str, Any]:
    """The CPU launch times of all steps, for a sentence."""
    return {str(name): us for name, us in _us(frames).items()}


def _ratio(step: str, over: str, column: str = "launch_us") -> Callable[[Frames], pd.Series]:
    """The CPU launch time of a step, or of one that records a gradient, over that of another one."""

    def ratio(frames: Frames) -> pd.Series:
        us = _us(frames, column)
        if step not in us:
            raise NotRecorded(f"{step} was not measured")
        return pd.Series({"64 x 64": us[step] / _us(frames)[over]})

    return ratio


def _added(frames: Frames) -> pd.Series:
    """What a second kernel adds to a compiled function, by kernel."""
    us = frames["compiled"].set_index("step")["launch_us"]
    us = us[us.index.str.startswith("torch.compile, ")].rename(lambda name: name.removeprefix("torch.compile, "))
    return us - us["2 x + 1"]


def _compiled(frames: Frames) -> Mapping[str, Any]:
    added = _added(frames)
    return {
        "own": added["two kernels of its own"],
        "torch": added["airy_ai(2 x + 1)"],
        "library": added["fusebook.exp(2 x + 1)"],
        "more": added["fusebook.exp twice"] - added["fusebook.exp(2 x + 1)"],
    }


def _part(frames: Frames) -> pd.Series:
    return frames["parts"].set_index("step")["us"]


def _own(frames: Frames) -> pd.DataFrame:
    rows = tables.where(frames["sweep"], variant="fusebook", status="ok")
    return rows.set_index([tables.label(rows), "dtype"])


# Claims ---------------------------------------------------------------------------------------------------------------

_SMALL = "64 x 64, float32, CPU launch time"
_OWN = "20 x 10 and 480 x 480, float32"

CLAIMS = (
    # The lesson's findings
    Claim(
        "launch-decides",
        "The kernel takes {gpu:.1f} us. The CPU takes {brackets:.0f} us to launch it by brackets, {planned:.0f} us by "
        "a plan and {eager:.0f} us by torch.",
        lambda frames: (_us(frames) / _us(frames, "gpu_warm_us")).reindex([*STEPS, "fusebook"]),
        "> 1",
        "64 x 64, float32; CPU launch time over GPU time",
        lesson=True,
        numbers=lambda frames: {**_times(frames), "gpu": _us(frames, "gpu_warm_us")["brackets"]},
    ),
    Claim(
        "graph",
        "In a graph of a hundred calls, a call costs the CPU {graph:.2f} us: {median:.0x} less than by brackets.",
        _ratio("brackets", GRAPH),
        "> 10",
        _SMALL + "; time of step 1 over a call in the graph",
        lesson=True,
        numbers=lambda frames: {"graph": _us(frames).get(GRAPH)},
    ),
    Claim(
        "compiled-adds",
        "We expected `fusebook.exp` inside `torch.compile` to add at most 5 us more than a kernel that the compiler "
        "generates. It adds {library:.0f} us, and the compiler's kernel {own:.0f} us.",
        lambda frames: pd.Series({"4096 elements": (us := _compiled(frames))["library"] - us["own"]}),
        "<= 5",
        "4096 elements, float32, CPU launch time; the difference in microseconds",
        lesson=True,
        numbers=_compiled,
    ),
    Claim(
        "check-costs",
        "With `check=True`, the latency of a call is {least:.1f} to {most:.1f} times that without it.",
        lambda frames: (us := frames["checks"].set_index("step"))["check=True us"] / us["check=False us"],
        "> 1.02",
        "a scatter, a loss, an assignment of a million points, and a training step",
        lesson=True,
    ),
    # The plan
    Claim(
        "plan-cheaper",
        "A plan takes less than three quarters of the CPU launch time of brackets.",
        _ratio("planned", "brackets"),
        "< 0.75",
        _SMALL + "; time of step 2 over step 1",
    ),
    Claim(
        "look-up-cheaper",
        "Of the {whole:.1f} us of a planned call, the look-up takes {look_up:.1f} us, the memory of the result "
        "{memory:.1f} us, and the launch {launch:.1f} us.",
        lambda frames: pd.Series({"64 x 64": (us := _part(frames))["look-up of the plan"] / us["launch"]}),
        "< 1",
        "4096 elements, float32; each part alone, the best of nine loops",
        numbers=lambda frames: {
            "look_up": (us := _part(frames))["look-up of the plan"],
            "whole": us["whole call"],
            "launch": us["launch"],
            "memory": us["memory of y"],
        },
    ),
    Claim(
        "library-as-torch",
        "A call of `fusebook.exp` takes at most twice the CPU launch time of `torch.exp`: {fusebook:.1f} and "
        "{eager:.1f} us.",
        _ratio("fusebook", "eager"),
        "<= 2",
        _SMALL + "; time of the library over torch",
        numbers=_times,
    ),
    Claim(
        "gradient",
        "A call of the library that records a gradient takes less CPU launch time than brackets, which record none.",
        _ratio("fusebook", "brackets", "gradient_us"),
        "< 1",
        _SMALL + "; time with a gradient over step 1",
    ),
    # Compiled programs
    Claim(
        "compiled-once-more",
        "A second call of the library adds {more:.0f} us to a compiled program, and an operator of torch that the "
        "compiler does not fuse adds {torch:.0f} us.",
        lambda frames: pd.Series({"4096 elements": (us := _compiled(frames))["more"] / us["torch"]}),
        "",
        "4096 elements, float32, CPU launch time",
        numbers=_compiled,
    ),
    Claim(
        "reduce-overhead",
        'With `mode="reduce-overhead"`, a compiled program takes {least:.1f} to {most:.1f} times the CPU launch time '
        "of the same program without it.",
        lambda frames: (
            (us := frames["compiled"].set_index("step")["launch_us"])
            .filter(like="reduce-overhead, ")
            .rename(lambda name: name.removeprefix("reduce-overhead, "))
            .pipe(lambda some: some / [us[f"torch.compile, {name}"] for name in some.index])
        ),
        "",
        "one kernel and two kernels of 4096 elements, float32",
    ),
    # Correctness
    steps_correct("64 x 64, float32"),
    within_tolerance(_own, _OWN, "The library's kernel is within tolerance wherever it was timed."),
    deterministic(_own, _OWN, "Two runs of the library's kernel give the same bits."),
)

LOG = (
    "Asking torch for the current stream makes an object around its address, which takes longer than the look-up of "
    "the plan. There is another function for the address alone.",
    "The library keeps plans for any number of tensors, allocations and launches: the first call is recorded, and a "
    "loop replays the record. It calls the function in C below Triton's launcher.",
    "Before each call a compiled program compares each Python object that it was traced through. So an operator that "
    "shows the compiler one call only costs its caller least.",
)
