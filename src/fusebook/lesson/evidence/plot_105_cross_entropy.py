"""Evidence of the lesson on cross entropy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusebook
from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
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
from fusebook.measure import bench, timing

with extra("book"):
    import pandas as pd

OPERATORS = ("cross_entropy",)
EXAMPLE = {"M": 2048, "N": 128256, "dtype": "bfloat16"}
STEPS = ("eager", "two", "one", "chunks")
SHAPES = ((65536, 1000), (4096, 32000), (2048, 128256))
DTYPES = ("bfloat16",)
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS: Mapping[str, tuple[str, ...]] = {}
IMPORTS = ("liger_kernel.ops",)
#: Rows and columns at which Nsight Compute counts.
COUNTED = (4096, 32000)


# What is measured besides the steps -----------------------------------------------------------------------------------


def _of_liger(x: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    loss: Tensor = LigerCrossEntropyFunction.apply(x, target, None)[0]
    return loss


def _of_quack(x: Tensor, target: Tensor) -> Tensor:
    from quack.cross_entropy import cross_entropy

    loss: Tensor = cross_entropy(x, target, inplace_backward=True)
    return loss


def _trained(loss_of: Callable[..., Tensor], x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and its gradient by autograd; the logits may be overwritten."""
    logits = x.detach().requires_grad_()
    loss = loss_of(logits, target)
    return loss, torch.autograd.grad(loss, logits)[0]


def in_place() -> pd.DataFrame:
    """GPU time and peak memory of a training step that may overwrite the logits, by implementation."""
    x = torch.randn(8192, 131072, device="cuda").to(torch.bfloat16)
    target = torch.randint(0, 131072, (8192,), device="cuda")
    losses: dict[str, Callable[..., Tensor]] = {
        "fusebook": functools.partial(fusebook.cross_entropy, inplace=True, check=False),
        "Liger": _of_liger,
        "quack": _of_quack,
        "torch": F.cross_entropy,
    }
    rows: list[dict[str, Any]] = []
    calls = {}
    for name, loss_of in losses.items():
        call = functools.partial(_trained, loss_of, x, target)
        try:
            call()
            rows.append({"variant": name, "peak_bytes": bench._peak(OPS["cross_entropy"].variants["fusebook"], call)})
            calls[name] = call
        except Exception as error:  # a library may raise anything
            rows.append({"variant": name, "note": f"{type(error).__name__}: {error}".splitlines()[0][:100]})
    times = timing.measure(calls, repeat=10, kinds=("cold", "call"))
    for row in rows:
        kinds = times.get(row["variant"], {})
        taken = kinds.get("cold") or kinds.get("call")  # a call that waits for the GPU has only a latency
        row |= {"gpu_us": taken.q50 * 1e6} if taken else {}
    return pd.DataFrame(rows)


FRAMES = {
    "sweep": Recorded("cross_entropy", "2048x32000,2048x50257,2048x128256,2048x256000", "bfloat16"),
    "large": Recorded("cross_entropy", "large", "bfloat16"),
    "classes": Recorded("cross_entropy", "65536x1000", "bfloat16"),
    "steps": Measured("cross_entropy_steps"),
    "counters": Measured("cross_entropy_counters"),
    "in place": Measured("cross_entropy_in_place", {"variant": "step"}, in_place),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _all(frames: Frames) -> pd.DataFrame:
    return frames.of("cross_entropy")


def _own(frames: Frames) -> pd.DataFrame:
    rows = tables.where(_all(frames), variant="fusebook", status="ok")
    return rows.set_index([tables.label(rows), "dtype"])


def _read(frames: Frames) -> pd.Series:
    """Elements read by the hardware counters, in multiples of MN, by step."""
    seen = frames["counters"]
    return seen.groupby("step", sort=False)["read"].sum() / (2 * COUNTED[0] * COUNTED[1])


def _moved(frames: Frames, variant: str) -> pd.Series:
    """What an implementation moves by its formula, in multiples of MN, by size."""
    rows = tables.where(_all(frames), variant=variant)
    return (rows["moved_bytes"] / (2 * rows["M"] * rows["N"])).set_axis(tables.label(rows))


def _own_rate(frames: Frames, variant: str) -> float:
    """The rate at which an implementation moves its own bytes, over that of a copy, in the median."""
    rows = tables.where(frames["sweep"], variant=variant, status="ok")
    least = rows["read_bytes"] + rows["write_bytes"]
    return float((rows["moved_bytes"] / least * rows["copy_us"] / rows["gpu_us"]).median())


def _step_us(frames: Frames) -> Any:
    """GPU time: a row per step, a column per width."""
    steps = frames["steps"]
    width = steps["shape"].str.rpartition("x")[2].astype(int)
    return steps.assign(width=width).pivot_table("gpu_us", "step", "width", sort=False)


def _gain(frames: Frames, step: str, over: str, width: int) -> pd.Series:
    us = _step_us(frames)
    if not {step, over} <= {*us.index} or width not in us:
        raise NotRecorded(f"{step} or {over} was not measured at {width}")
    return pd.Series({f"N = {width}": us.loc[over, width] / us.loc[step, width]})


def _rate(frames: Frames, step: str, width: int) -> float:
    """The share of copy speed of a step, as the lesson's table has it."""
    rows = tables.where(frames["steps"], step=step, shape=lambda s: s.str.endswith(f"x{width}"))
    return float((rows["copy_us"] / rows["gpu_us"]).iloc[0])


def _others(frames: Frames) -> pd.Series:
    """GPU time of the fastest other implementation over that of Fusebook, by size."""
    return 1 / tables.behind(_all(frames))["times as long"]


def _over(other: str) -> Callable[[Frames], pd.Series]:
    return lambda frames: tables.ratio(_all(frames), "fusebook", other)


def _in_place(frames: Frames) -> Any:
    return frames["in place"].set_index("step")


def _mib(frames: Frames, name: str) -> float:
    return float(_in_place(frames).loc[name, "peak_bytes"]) / 2**20


# Claims ---------------------------------------------------------------------------------------------------------------

_SWEEP = "2048 rows of 32000 to 256000 classes, bfloat16, cold L2"
_ALL = "every recorded size, bfloat16, cold L2"
_COUNTERS = "4096 rows of 32000 classes, bfloat16"
_STEPS = "the sizes of the step table, bfloat16"
_LARGE = "8192 rows of 131072 classes, bfloat16"

CLAIMS = (
    # Traffic
    Claim(
        "two-passes",
        "A loss that leaves its gradient to a backward pass moves 3MN elements: 1.5 times the least.",
        lambda frames: (_moved(frames, "quack") / 3 - 1).abs(),
        "<= 0.001",
        _ALL + "; distance of quack's formula from 3MN",
    ),
    Claim(
        "counters-read-once",
        "The hardware counters show that `fusebook.cross_entropy` reads the logits once, within 2 %.",
        lambda frames: (_read(frames).filter(like="fusebook") - 1).abs(),
        "<= 0.02",
        _COUNTERS,
    ),
    Claim(
        "counters-others",
        "By the same counters the eager kernels read {median:.1f}MN.",
        lambda frames: _read(frames).filter(items=["eager"]),
        "",
        _COUNTERS,
    ),
    # Correctness
    within_tolerance(_own, _ALL, "`fusebook.cross_entropy` is within tolerance wherever it was timed."),
    steps_correct(_STEPS, "Every step is correct on stress inputs at the sizes at which it was timed."),
    deterministic(_own, _ALL, "Two runs of `fusebook.cross_entropy` give the same bits."),
    Claim(
        "memory-output",
        "`fusebook.cross_entropy` allocates the gradient, and at most 2 MiB for loss and workspace.",
        lambda frames: (rows := _own(frames))["peak_bytes"] - rows["write_bytes"],
        "<= 2097152",
        _ALL + "; bytes beyond the gradient",
    ),
    # The lesson's findings
    Claim(
        "gain-over-eager",
        "Predicted 5.0x faster than eager, measured {median:.1f}x (median of the figure). Eager's kernels reach "
        "{eager:.1%} of copy speed, the library's {fused:.1%}: 5.0 x {fused:.1%} / {eager:.1%} is {expected:.1f}.",
        lambda frames: tables.ratio(frames["sweep"], "eager", "fusebook"),
        ">= 5",
        _SWEEP,
        lesson=True,
        numbers=lambda frames: {
            "eager": (eager := _own_rate(frames, "eager")),
            "fused": (fused := _own_rate(frames, "fusebook")),
            "expected": 5 * fused / eager,
        },
    ),
    Claim(
        "one-kernel",
        "At N = 32000, eager moves its 10MN elements at {eager:.1%} of copy speed, step 1 its 3MN at {two:.1%} and "
        "step 2 its 2MN at {one:.1%}. So step 1 gains 10 / 3 x {two:.1%} / {eager:.1%} = {first:.1f}x, and step 2 "
        "gains 1.5 x {one:.1%} / {two:.1%} = {median:.2f}x.",
        lambda frames: _gain(frames, "one", "two", 32000),
        "> 1.02",
        "4096 rows of 32000 classes, bfloat16; step 2 over step 1",
        lesson=True,
        numbers=lambda frames: {
            "eager": (eager := 5 * _rate(frames, "eager", 32000)),
            "two": (two := 1.5 * _rate(frames, "two", 32000)),
            "one": _rate(frames, "one", 32000),
            "first": 10 / 3 * two / eager,
        },
    ),
    Claim(
        "fastest",
        "`fusebook.cross_entropy` is the fastest at all {count} recorded sizes. The next implementation takes "
        "{least:.1f} to {most:.1f} times its GPU time.",
        _others,
        "> 1.02",
        _ALL + "; GPU time of the fastest other implementation over that of Fusebook",
    ),
    Claim(
        "in-place-memory",
        "In place, a training step of 8192 rows and 131072 classes allocates {fusebook:.1f} MiB, loss and workspace "
        "included. torch allocates {torch:,.0f} MiB.",
        lambda frames: _in_place(frames).loc[["fusebook"], "peak_bytes"],
        "<= 2097152",
        _LARGE + ", by autograd; bytes beyond the logits",
        lesson=True,
        numbers=lambda frames: {name: _mib(frames, name) for name in ("fusebook", "torch")},
    ),
    # Steps
    Claim(
        "chunks-wide",
        "At N = 128256, where a row spills, step 2 runs at {spilled:.2f} of the speed of step 1, and step 3 is "
        "{median:.1f}x faster than step 1. At N = 1000 and N = 32000, step 3 runs at {few:.2f} and {many:.2f} of "
        "the speed of step 2.",
        lambda frames: _gain(frames, "chunks", "two", 128256),
        "> 1.02",
        "2048 rows of 128256 classes, bfloat16; step 3 over step 1",
        lesson=True,
        numbers=lambda frames: {
            "spilled": _gain(frames, "one", "two", 128256).iloc[0],
            "few": _gain(frames, "chunks", "one", 1000).iloc[0],
            "many": _gain(frames, "chunks", "one", 32000).iloc[0],
        },
    ),
    Claim(
        "library-best-step",
        "`fusebook.cross_entropy` takes at most 1.02 times the GPU time of the best step.",
        lambda frames: (us := _step_us(frames)).loc["fusebook"] / us.drop("fusebook").min(),
        "<= 1.02",
        _STEPS,
    ),
    # Other implementations
    *(
        Claim(
            f"over-{name.lower().replace('.', '-')}",
            f"`fusebook.cross_entropy` takes {{least:.2f}} to {{most:.2f}} of the GPU time of {name}.",
            _over(name),
            "<= 1.02",
            _ALL,
        )
        for name in ("torch", "torch.compile", "quack")
    ),
    Claim(
        "in-place-time",
        "In place, the same training step takes {fusebook:.2f} ms of GPU time, and {torch:.2f} ms in torch. quack "
        "takes {quack:.2f} ms. Liger waits for the GPU in every call; its latency is {liger:.2f} ms.",
        lambda frames: _in_place(frames)["gpu_us"],
        "",
        _LARGE + ", by autograd",
        numbers=lambda frames: {
            str(name).lower(): float(us) / 1000 for name, us in _in_place(frames)["gpu_us"].items() if us == us
        },
    ),
    # Targets
    Claim(
        "target-roof",
        "8192 rows of 131072 classes take at most 1.1 times the roofline.",
        lambda frames: 1 / tables.share(frames["large"], "fusebook", of="roof"),
        "<= 1.1",
        _LARGE,
        kind="target",
    ),
)

LOG = (
    "Liger overwrites the logits, so it is given a copy wherever implementations are compared. It also waits for the "
    "GPU in every call. CUDA events cannot time such a call, and it has a latency but no GPU time.",
    "The second pass of step 3 reads rows that were read a moment before. With 8192 elements per chunk and 8 warps, "
    "few programs run at once on a multiprocessor, and L2 holds most of their rows.",
    "A row above 64 KiB is shared by several programs. They exchange the maximum and the sum of their parts in one "
    "word of 64 bits each. In place, a program that has waited too long reads logits that their owner may be "
    "overwriting. It therefore publishes by a compare-and-swap, and the word that the owner has published counts.",
    "In float16 most gradients of a mean are too small for normal numbers until the loss is scaled, as "
    "`torch.amp.GradScaler` does. There the gradient is computed in the backward pass, when the scale is known.",
    "A page before this one also measured a function of quack that returns the summed loss without autograd. It needs "
    "no count of the rows. It is left out, since a training step cannot call it.",
    "Random problems: in float64 a loss reads rows of a whole vocabulary twice. A word of the workspace has no room "
    "for a maximum and a sum of float64. A small problem is a launch and the latency of one row.",
)
