"""Evidence of the lesson on an optimizer step in one launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

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
OPERATORS = ("adamw_step",)
EXAMPLE = {"numbers": 10**7, "tensors": 1000, "sizes": "equal", "kind": "plain", "dtype": "float32"}
WORDS = "{numbers:,.0f} elements in {tensors:.0f} tensors, {dtype}"
OVER = "tensors of ten million elements in all, N"
UNIT = {"numbers": "M"}
STEPS = ("loop", "per_tensor", "table", "kept")
SHAPES = ((10**7, 1), (10**7, 1000))
DTYPES = ("float32",)
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS = {"adamw_step": ("_adamw_chunks",)}
KEPT = "Between steps, Fusebook keeps tables on the GPU: 64 bytes for each tensor, and 8 for each chunk of elements."
CAPTION = "Microseconds for ten million float32 elements in N tensors"
TABLE = {
    "end to end, N = 1": ("end_to_end_us", "10000000x1"),
    "end to end, N = 1000": ("end_to_end_us", "10000000x1000"),
    "CPU launch, N = 1000": ("launch_us", "10000000x1000"),
    "GPU, N = 1000": ("gpu_us", "10000000x1000"),
}

Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


# What is measured -----------------------------------------------------------------------------------------------------


def taking(*given: Any) -> tuple[Any, ...]:
    """The arguments of a step: copies of p, g, m and v as lists, the number of the step and the learning rate."""
    ps, gs, ms, vs, _, _, t, lr = OPS["adamw_step"].variants["fusebook"].given(*given)
    return ps, gs, ms, vs, t, lr


def timed(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """The steps and the library, each on copies of the same lists."""
    op, parts = OPS["adamw_step"], []
    library = op.variants["fusebook"]
    for numbers, tensors in SHAPES:
        dims = {**op.edges[0], "numbers": numbers, "tensors": tensors}
        made = op.make(inputs.generator(0), torch.float32, **dims)
        calls = {name: functools.partial(step, *taking(*made)) for name, step in steps.items()}
        calls["fusebook"] = functools.partial(library.run, *library.given(*made))
        frame = _launches.clocked(calls, check.yardstick(op, made))
        parts.append(frame.assign(shape=f"{numbers}x{tensors}", dtype="float32"))
    return pd.concat(parts, ignore_index=True)


def to_count(steps: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[[], Any]]:
    """One step of two tensors of 16 million elements."""
    op = OPS["adamw_step"]
    made = op.make(inputs.generator(0), torch.float32, **{**op.edges[0], "numbers": 2**25, "tensors": 2})
    library = op.variants["fusebook"]
    calls: dict[str, Callable[[], Any]] = {name: functools.partial(f, *taking(*made)) for name, f in steps.items()}
    return {**calls, "fusebook": functools.partial(library.run, *library.given(*made))}


def model(sizes: Sequence[int]) -> Lists:
    """Parameters, gradients and averages of a model after some steps."""
    rng = inputs.generator(0)
    ps, gs, ms = ([torch.randn(n, generator=rng, device=rng.device) for n in sizes] for _ in range(3))
    return ps, gs, ms, [torch.rand(n, generator=rng, device=rng.device) for n in sizes]


def _fused(ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor]) -> Callable[[], Any]:
    """A step of torch's fused kernels without the class around it."""
    step = functools.partial(
        adamw, ps, gs, ms, vs, [], [torch.ones((), device=p.device) for p in ps], lr=1e-3, beta1=0.9, beta2=0.999,
        eps=1e-8, weight_decay=0.01, amsgrad=False, maximize=False, fused=True, foreach=False,
    )  # fmt: skip
    return torch.no_grad()(step)


def host_times() -> pd.DataFrame:
    """CPU launch time of functions and of optimizers, by the number of tensors."""
    rows = []
    for n in (1, 100, 1000):
        ps, gs, ms, vs = lists = model([10**7 // n] * n)
        others = [[g.clone() for g in gs], gs]

        def moved(ps: Any = ps, ms: Any = ms, vs: Any = vs, others: Any = others) -> None:
            others.reverse()
            fusebook.adamw_step(ps, others[0], ms, vs, step=7)

        everything = [t for of in lists for t in of]
        calls: dict[str, Callable[[], Any]] = {
            "adamw_step": functools.partial(fusebook.adamw_step, *lists, step=7),
            "adamw_step, gradients moved": moved,
            "all addresses": lambda every=everything: [t.data_ptr() for t in every],  # type: ignore[misc]
            "adamw(fused=True)": _fused(*lists),
        }
        optimizers: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "fusebook.optim.AdamW.step": fusebook.optim.AdamW,
            "torch.optim.AdamW(foreach=True).step": functools.partial(torch.optim.AdamW, foreach=True),
            "torch.optim.AdamW(fused=True).step": functools.partial(torch.optim.AdamW, fused=True),
        }
        for name, kind in optimizers.items():
            own = [torch.nn.Parameter(p.clone()) for p in ps]
            for p, g in zip(own, gs, strict=True):
                p.grad = g
            calls[name] = kind(own).step
        times = timing.host(calls, warmup=3, repeat=15)
        rows += [(n, name, 1e6 * q.q50 if (q := times[name]) else math.nan) for name in calls]
    return pd.DataFrame(rows, columns=["tensors", "step", "host us"])


def billion() -> pd.DataFrame:
    """A step of 16 GB of state and gradients, next to a copy of as many bytes; samples are compared with float64."""
    ps, gs, ms, vs = lists = model([10**6] * 1000)
    at = slice(None, None, 9973)
    first = [torch.stack([t[at] for t in ts]).double() for ts in lists]
    fusebook.adamw_step(*lists, step=1, lr=1e-3)
    p, g, m, v = first
    fusebook.adamw_step_eager([p], [g], [m], [v], 1, 1e-3, 0.9, 0.999, 1e-8, 0.01)
    got = torch.stack([t[at] for t in ps]).double()
    error = ((got - p).abs() / (p.abs() + p.square().mean().sqrt())).max()
    x = torch.empty(28 * 10**9 // 8, device="cuda").normal_()
    y = torch.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: y.copy_(x),
        "fusebook": lambda: fusebook.adamw_step(ps, gs, ms, vs, step=2),
        "fused=True": _fused(*lists),
    }
    times = timing.measure(calls, kinds=("cold", "host", "call"), warmup=2, repeat=10)
    rows = []
    for name, kinds in times.items():
        clock = "cold" if kinds["cold"] else "call"  # a step that fills the GPU's queue has no GPU time
        rows.append((name, 1e6 * q.q50 if (q := kinds[clock]) else math.nan, clock))
    return pd.DataFrame(rows, columns=["step", "us", "clock"]).assign(error=float(error))


def _walked(dtype: torch.dtype, exact: bool = False, **options: Any) -> Tensor:
    ones = torch.ones(1000, device=inputs.generator(0).device)
    ps, ms, vs = [ones.to(dtype)], [torch.zeros_like(ones)], [torch.zeros_like(ones)]
    masters = [ones.clone()] if exact else []
    for t in range(1, 41):
        gs = [torch.ones_like(ps[0])]
        fusebook.adamw_step(ps, gs, ms, vs, masters=masters, step=t, lr=5e-4, weight_decay=0.0, **options)
    return ps[0].double()


def walks() -> pd.DataFrame:
    """Where forty steps of 0.0005 lead from 1."""
    ways = {
        "float32": _walked(torch.float32),
        "nearest": _walked(torch.bfloat16),
        "chance": _walked(torch.bfloat16, seed=1),
        "master": _walked(torch.bfloat16, exact=True),
    }
    rows = [(name, float(p.mean()), len(p.unique())) for name, p in ways.items()]
    return pd.DataFrame(rows, columns=["step", "mean", "different values"])


# Records --------------------------------------------------------------------------------------------------------------

_TWO = ("fused=True", "fusebook")
FRAMES: dict[str, Any] = {
    "sweep": Recorded("adamw_step", "small", "float32"),
    "uneven": Recorded("adamw_step", "uneven", "float32", _TWO),
    "kinds": Recorded("adamw_step", "kinds", "bfloat16", _TWO),
    "steps": Measured("adamw_steps"),
    "host": Measured("adamw_host", function=host_times),
    "walk": Measured("adamw_walk", function=walks),
    "billion": Measured("adamw_billion", function=billion),
    "counters": Measured("adamw_counters"),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _every(frames: Frames) -> pd.DataFrame:
    rows = tables.where(frames.of("adamw_step"), variant="fusebook", status="ok")
    return rows.set_index([tables.label(rows), "dtype"])


def _longer(frames: Frames, variant: str, tensors: int) -> float:
    """How many times as long another implementation takes end to end."""
    rows = tables.where(frames["sweep"], tensors=tensors)
    return float(tables.ratio(rows, variant, "fusebook", "paid").iloc[0])


def _one(name: str, value: float) -> pd.Series:
    return pd.Series({name: value})


def _host(frames: Frames) -> Any:
    """CPU launch time: a row per call, a column per number of tensors."""
    return frames["host"].pivot_table("host us", "step", "tensors", sort=False)


def _over_class(step: str) -> Callable[[Frames], pd.Series]:
    """CPU launch time of a step over that of torch's fused optimizer, by the number of tensors."""

    def ratio(frames: Frames) -> pd.Series:
        us = _host(frames)
        if step not in us.index:
            raise NotRecorded(f"{step} was not measured")
        found: pd.Series = us.loc[step] / us.loc["torch.optim.AdamW(fused=True).step"]
        return found.rename(index=lambda n: f"{n} tensors")

    return ratio


def _gain(step: str, over: str, tensors: int = 1000) -> Callable[[Frames], pd.Series]:
    """End-to-end time of a step over that of another."""

    def ratio(frames: Frames) -> pd.Series:
        rows = tables.where(frames["steps"], shape=f"10000000x{tensors}").set_index("step")["end_to_end_us"]
        if rows.reindex([step, over]).isna().any():
            raise NotRecorded(f"{step} or {over} was not measured")
        return _one(f"{tensors} tensors", rows[over] / rows[step])

    return ratio


def _of_roof(frames: Frames) -> pd.Series:
    parts = [frames[name] for name in ("sweep", "uneven", "kinds")]
    return pd.concat([tables.share(part, "fusebook", of="roof") for part in parts])


def _walk(frames: Frames, name: str) -> float:
    return float(frames["walk"].set_index("step")["mean"][name])


def _billion(frames: Frames) -> Any:
    return frames["billion"].set_index("step")


def _counted(frames: Frames, column: str) -> pd.Series:
    """Elements read in multiples of the parameters, or sectors per load of the kernel that reads most, by step."""
    seen = frames["counters"]
    if column == "read":
        return seen.groupby("step", sort=False)["read"].sum() / (4 * 2**25)
    largest = seen.loc[seen.groupby("step", sort=False)["read"].idxmax()]
    return largest.set_index("step")[column]


def _replayed(frames: Frames) -> pd.Series:
    rows = tables.where(frames["sweep"], variant="fusebook").set_index("tensors")
    return rows["gpu_warm_us"] / rows["gpu_us"]


# Claims ---------------------------------------------------------------------------------------------------------------

_SMALL = "ten million float32 elements in 1, 100 and 1000 tensors"
_THOUSAND = "ten million float32 elements in 1000 tensors"
_COUNTERS = "two tensors of 2**24 float32 elements"
_WALK = "a thousand parameters of 1, forty steps of 0.0005 downward"
_ALL = "every recorded list: float32 and bfloat16, 1 to 1000 tensors, four kinds of step"

CLAIMS = (
    # The lesson's findings
    Claim(
        "gain-over-loop",
        "For one tensor, the bytes predict 2.9x faster than the loop. Measured is {median:.2x}. With 1000 tensors "
        "launches decide, and the gain is {thousand:.0x}.",
        lambda frames: _one("1 tensor", _longer(frames, "loop", 1)),
        ">= 2.15",
        _SMALL + "; end to end, within a quarter of the prediction",
        lesson=True,
        numbers=lambda frames: {"thousand": _longer(frames, "loop", 1000)},
    ),
    Claim(
        "fused-thousand",
        "With 1000 tensors, torch's `fused=True` takes {median:.1f} times as long end to end, and `foreach` takes "
        "{foreach:.0f} times as long.",
        lambda frames: _one("1000 tensors", _longer(frames, "fused=True", 1000)),
        "> 1.02",
        _THOUSAND,
        lesson=True,
        numbers=lambda frames: {"foreach": _longer(frames, "foreach", 1000)},
    ),
    Claim(
        "roof",
        "On the GPU, a step is {least:.0%} to {most:.0%} as fast as memory could move the bytes, for any number of "
        "tensors.",
        _of_roof,
        ">= 0.9",
        _ALL + "; GPU time, cold L2",
        lesson=True,
    ),
    Claim(
        "class-host",
        "A step of `fusebook.optim.AdamW` takes {least:.2f} times the CPU time of torch's with `fused=True` for 1000 "
        "tensors, and {one:.2f} times for one tensor.",
        lambda frames: _over_class("fusebook.optim.AdamW.step")(frames)[["1000 tensors"]],
        "< 1",
        _SMALL + "; gradients in the same memory as before; the condition is that of 1000 tensors",
        lesson=True,
        numbers=lambda frames: {"one": _over_class("fusebook.optim.AdamW.step")(frames)["1 tensors"]},
    ),
    # The CPU's time
    Claim(
        "function-host",
        "Where no gradient has moved, `fusebook.adamw_step` takes {least:.2f} to {most:.2f} times the CPU time of "
        "`torch.optim.AdamW.step` with `fused=True`.",
        _over_class("adamw_step"),
        "< 1",
        _SMALL,
    ),
    Claim(
        "function-host-moved",
        "Where all gradients have moved, `fusebook.adamw_step` takes {least:.2f} to {most:.2f} times the CPU time of "
        "`torch.optim.AdamW.step` with `fused=True`.",
        _over_class("adamw_step, gradients moved"),
        "< 1",
        _SMALL,
    ),
    Claim(
        "addresses-host",
        "Reading 4000 addresses is {share:.0%} of the CPU time of a step of 1000 tensors.",
        lambda frames: _host(frames).loc["all addresses", [1000]] / _host(frames).loc["adamw_step", 1000],
        "",
        _THOUSAND,
        numbers=lambda frames: {"share": (us := _host(frames)).loc["all addresses", 1000] / us.loc["adamw_step", 1000]},
    ),
    Claim(
        "target-host",
        "A step of 1000 tensors takes at most 1000 microseconds of CPU time: {median:.0f}.",
        lambda frames: _host(frames).loc["adamw_step", [1000]],
        "<= 1000",
        _THOUSAND + "; no gradient has moved",
        kind="target",
    ),
    # Steps
    Claim(
        "table-gain",
        "One launch for all tensors is {median:.1x} faster than one per tensor, although it builds its table in each "
        "step.",
        _gain("table", "per_tensor"),
        "> 1.02",
        _THOUSAND + "; step 2 over step 1, end to end",
    ),
    Claim(
        "kept-gain",
        "A table that is kept makes a step {median:.1x} faster than one that is built in each step.",
        _gain("kept", "table"),
        "> 1.02",
        _THOUSAND + "; step 3 over step 2, end to end",
    ),
    Claim(
        "library-over-kept",
        "The library takes {median:.2f} times as long as step 3. It also compares shapes, strides and dtypes.",
        _gain("kept", "fusebook"),
        "",
        _THOUSAND + "; end to end",
    ),
    steps_correct("ten million float32 elements in 1 and in 1000 tensors"),
    # Larger lists
    Claim(
        "target-billion",
        "A step of 10**9 parameters runs at 96 % of the rate of a copy of the same bytes: {median:.1%}.",
        lambda frames: _one("", (us := _billion(frames)["us"])["copy"] / us["fusebook"]),
        ">= 0.96",
        "10**9 float32 elements in 1000 tensors, cold L2; a copy of as many bytes",
        kind="target",
    ),
    Claim(
        "billion-correct",
        "Samples of all tensors agree with float64.",
        lambda frames: _billion(frames)["error"].iloc[[0]] / (64 * torch.finfo(torch.float32).eps),
        "<= 1",
        "10**9 float32 elements in 1000 tensors; error over 64 eps",
    ),
    # Small steps
    Claim(
        "nearest-never-moves",
        "In bfloat16, rounded to the nearest, a parameter of 1 stays {median:.0f}.",
        lambda frames: _one("", _walk(frames, "nearest")),
        "== 1",
        _WALK,
    ),
    Claim(
        "chance-mean",
        "Rounded by chance, a thousand parameters have the mean {mean:.4f}. Exact is 0.98.",
        lambda frames: _one("", abs(_walk(frames, "chance") - 0.98)),
        "< 0.002",
        _WALK + "; distance of the mean from 0.98",
        numbers=lambda frames: {"mean": _walk(frames, "chance")},
    ),
    Claim(
        "master-nearest",
        "With a float32 master, a bfloat16 parameter ends at {mean:.4f}, the nearest number to 0.98.",
        lambda frames: _one("", abs(_walk(frames, "master") - 0.98)),
        "< 0.002",
        _WALK + "; distance of the mean from 0.98",
        numbers=lambda frames: {"mean": _walk(frames, "master")},
    ),
    # Correctness
    within_tolerance(_every, _ALL, "`fusebook.adamw_step` is within tolerance wherever it was timed."),
    deterministic(_every, _ALL, "Two runs give the same bits."),
    # Hardware counters
    Claim(
        "counters-once",
        "Steps 1 and 2 and the library read four elements for each parameter, within 2 %. The loop reads {loop:.1f}.",
        lambda frames: (_counted(frames, "read").drop("loop", errors="ignore") / 4 - 1).abs(),
        "< 0.02",
        _COUNTERS,
        numbers=lambda frames: {"loop": _counted(frames, "read").get("loop")},
    ),
    Claim(
        "counters-sectors",
        "A load of the library's kernel asks for {median:.1f} times as many sectors as one of step 2, which loads 4 "
        "bytes per thread.",
        lambda frames: _one("", (seen := _counted(frames, "sectors"))["fusebook"] / seen["table"]),
        ">= 2",
        _COUNTERS + "; averages over loads, those from the table included",
    ),
    # Graphs
    Claim(
        "replayed",
        "In a CUDA graph, a step takes {least:.2f} to {most:.2f} times its cold GPU time.",
        _replayed,
        "<= 1.05",
        _SMALL,
    ),
)

LOG = (
    "End-to-end time is the larger of CPU launch time and GPU time: in a training loop the GPU works while the CPU "
    "queues what comes next. A step that fills the GPU's queue has no GPU time, and counts by the CPU.",
    "A kept table is valid only while all addresses, shapes and dtypes are the same. The library compares the "
    "addresses of all tensors in each step, and PyTorch's guards compare the rest. Each is one call of C for a whole "
    "list. An address alone is not enough, as `p.data = p.data[:5]` keeps it.",
    "Only addresses of gradients that moved are copied to the GPU again. The gradient of a list of one tensor is an "
    "argument of the launch instead. A CUDA graph reads the same tables.",
    "Triton loads 16 bytes per thread where it knows that an address is a multiple of 16. It knows nothing of an "
    "address from a table. The library's table says which tensors are aligned, and the kernel has a branch for whole "
    "chunks of these. With enough programs, loads of 4 bytes are as fast.",
    "The learning rate, the number of the step and the norm of the gradients may be on the GPU. The last program to "
    "finish counts the step: each takes a ticket, and only then has every program read the number.",
    "torch.compile is timed up to 100 tensors, as it compiles for minutes with more. PyTorch's fused optimizer passes "
    "its table as an argument of the kernel, 4 KB at most, and launches again for the rest.",
    "Random bits come from a counter, mixed by a few multiplications. Nothing is stored, and the same seed and step "
    "give the same bits.",
    "Random problems: lists of few elements are one launch, which first reads from a table where its tensors are. A "
    "compiled step has the addresses as arguments.",
    "Random problems: chunks of 256 to 1024 elements with one to four blocks of each were tried. From three million "
    "elements on all are within a few percent. Few elements of fp16 and bf16 are stepped by short chunks, whose "
    "programs all run at once.",
)
