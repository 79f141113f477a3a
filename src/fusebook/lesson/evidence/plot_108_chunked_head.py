"""Evidence of the lesson on the chunked head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

import fusebook
from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.lesson import _memory
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
from fusebook.measure import bench, inputs, timing

with extra("book"):
    import pandas as pd

PAGE = _memory.MemoryPage
OPERATORS = ("linear_cross_entropy",)
_SIZES = {"M": 8192, "K": 4096, "N": 128256}
EXAMPLE = {**_SIZES, "dtype": "bfloat16"}
WORDS = "{M} hidden states of {K} elements and {N} classes in {dtype}"
STEPS = ("torch", "in_place", "chunks")
SHAPES = ((8192, 4096, 128256),)
DTYPES = ("bfloat16",)
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS: Mapping[str, tuple[str, ...]] = {}
IMPORTS = ("liger_kernel.ops",)

_OP = OPS["linear_cross_entropy"]


def by_rows() -> pd.DataFrame:
    """GPU time and peak memory of the library by the rows of a chunk."""
    *given, _ = _OP.make(inputs.generator(0), torch.bfloat16, **_SIZES)
    call = functools.partial(fusebook.linear_cross_entropy_with_gradients, *given)
    calls = {str(rows): functools.partial(call, rows=rows, check=False) for rows in (256, 512, 1024, 2048, 4096, 8192)}
    times = timing.cold(calls, repeat=10)
    gradients = sum(2 * tensor.numel() for tensor in given[:2])
    rows = []
    for name, run in calls.items():
        peak, taken = bench._peak(_OP.variants["fusebook"], run), times[name]
        row = {"rows": int(name), "gpu_us": taken.q50 * 1e6 if taken else float("nan")}
        rows.append({**row, "peak_bytes": peak, "beyond": peak - gradients})
    return pd.DataFrame(rows)


FRAMES = {
    "sweep": Recorded("linear_cross_entropy", "llama,heads", "bfloat16"),
    "steps": Measured("linear_cross_entropy_steps"),
    "rows": Measured("linear_cross_entropy_chunks", {"rows": "step"}, by_rows),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _own(frames: Frames) -> pd.DataFrame:
    rows = tables.where(frames["sweep"], variant="fusebook", status="ok")
    return rows.set_index(tables.label(rows))


def _at(frames: Frames, N: int = _SIZES["N"]) -> Any:
    """The implementations at one vocabulary, those that are correct."""
    return tables.where(frames["sweep"], N=N, M=_SIZES["M"], status="ok").set_index("variant")


def _gib(frames: Frames, N: int = _SIZES["N"]) -> pd.Series:
    """Memory beyond inputs and gradients at one vocabulary."""
    return _memory._beyond(_at(frames, N))


def _one(value: float) -> pd.Series:
    return pd.Series([value], index=[""])


def _next(values: pd.Series) -> tuple[str, float]:
    others = values.drop("fusebook").dropna()
    return str(others.idxmin()), float(others.min())


def _behind(frames: Frames) -> pd.Series:
    return tables.behind(frames["sweep"])["times as long"]


def _rows(frames: Frames) -> Any:
    return frames["rows"].set_index("step")


def _same(frames: Frames) -> list[float]:
    """Milliseconds of the library's call in the sweep, by rows of a chunk, and among the steps."""
    us = _at(frames)["gpu_us"]["fusebook"], _rows(frames)["gpu_us"].get(4096, float("nan")), _step(frames, "gpu_us")
    return [us[0] / 1000, us[1] / 1000, us[2]["fusebook"] / 1000]


def _step(frames: Frames, column: str) -> pd.Series:
    taken = frames["steps"].set_index("step")[column]
    if not {*STEPS, "fusebook"} <= {*taken.index}:
        raise NotRecorded("some steps were not measured")
    return taken


def _counted(frames: Frames) -> pd.Series:
    """Peaks that are counted on meta tensors over those that were recorded, where all kernels are PyTorch's."""
    recorded = _at(frames)["peak_bytes"]
    peaks = {name: max(_memory.counted(_OP, _OP.variants[name].run, _SIZES, torch.bfloat16)) for name in _COUNTED}
    return pd.Series({name: peak / recorded[name] for name, peak in peaks.items()})


_COUNTED = ("eager", "torch")


def _liger(frames: Frames) -> pd.Series:
    rows = tables.where(frames["sweep"], variant="Liger")
    return rows["status"].eq("ok").set_axis(tables.label(rows))


# Claims ---------------------------------------------------------------------------------------------------------------

_EXAMPLE = "8192 hidden states of 4096 elements, 128256 classes, bfloat16"
_ALL = "every recorded size, bfloat16"

CLAIMS = (
    # Correctness
    within_tolerance(_own, _ALL, "`fusebook.linear_cross_entropy` is within tolerance wherever it was timed."),
    steps_correct(_EXAMPLE, "Every step is correct at the size at which it was timed."),
    deterministic(_own, _ALL, "Two runs of `fusebook.linear_cross_entropy` give the same bits."),
    Claim(
        "liger-correct",
        "Liger is within tolerance at {fine} of {count} sizes. It has no row in the lesson's table where it is not.",
        _liger,
        "",
        _ALL + "; 1 where it is",
        numbers=lambda frames: {"fine": int(_liger(frames).sum())},
    ),
    # The lesson's findings
    Claim(
        "memory-half",
        "`fusebook.linear_cross_entropy` takes {own:.2f} GiB beyond inputs and gradients. Of the others, {name} takes "
        "the least: {other:.2f} GiB.",
        lambda frames: _one((held := _gib(frames))["fusebook"] / _next(held)[1]),
        "<= 0.6",
        _EXAMPLE + "; memory of Fusebook over the least of the others",
        lesson=True,
        numbers=lambda frames: {
            "own": (held := _gib(frames))["fusebook"],
            "name": _next(held)[0],
            "other": _next(held)[1],
        },
    ),
    Claim(
        "time-kept",
        "Saving memory costs little or no time: at {count} sizes a call takes {least:.2f} to {most:.2f} times the GPU "
        "time of the fastest other implementation.",
        _behind,
        "<= 1.02",
        _ALL + "; GPU time of Fusebook over that of the fastest other implementation",
        lesson=True,
    ),
    Claim(
        "rows-trade",
        "Chunks of 1024 rows instead of 8192 need {memory:.0%} of the memory, gradients left out, and take "
        "{median:.2f} times as long. Chunks of 512 rows take {few:.2f} times as long.",
        lambda frames: _one((us := _rows(frames)["gpu_us"])[1024] / us[8192]),
        "<= 1.1",
        _EXAMPLE + "; time of 1024 rows over that of 8192",
        lesson=True,
        numbers=lambda frames: {
            "memory": (held := _rows(frames)["beyond"])[1024] / held[8192],
            "few": (us := _rows(frames)["gpu_us"]).get(512, float("nan")) / us[8192],
        },
    ),
    Claim(
        "counted-memory",
        "The count of the pictures is within 1 % of the peak that PyTorch's allocator recorded.",
        lambda frames: (_counted(frames) - 1).abs(),
        "<= 0.01",
        _EXAMPLE + "; eager and torch, distance of the ratio from 1",
    ),
    Claim(
        "same-call",
        "Three matmuls take at least {roof:.1f} ms at the rate that this GPU was measured to reach: they draw "
        "{power:.0f} W, so the GPU lowers its clock. The library's call takes {box:.1f} ms in the box, "
        "{picture:.1f} ms in the picture and {table:.1f} ms in the table, which are three runs. Compare times within "
        "one.",
        lambda frames: _one(max(ms := _same(frames)) / min(ms)),
        "<= 1.1",
        _EXAMPLE + "; longest over shortest",
        lesson=True,
        numbers=lambda frames: {
            **dict(zip(("box", "picture", "table"), _same(frames), strict=True)),
            "power": (own := _at(frames).loc["fusebook"])["power_w"],
            "roof": own["roof_us"] / 1000,
        },
    ),
    # Memory and time
    Claim(
        "small-vocabulary",
        "With 32000 classes all logits are one chunk. Fusebook then takes {own:.2f} GiB beyond inputs and gradients, "
        "and {name} takes {other:.2f} GiB.",
        lambda frames: _gib(frames, 32000),
        "",
        "8192 hidden states of 4096 elements, 32000 classes, bfloat16",
        numbers=lambda frames: {
            "own": (held := _gib(frames, 32000))["fusebook"],
            "name": _next(held)[0],
            "other": _next(held)[1],
        },
    ),
    Claim(
        "in-place-gain",
        "Writing the gradient over the logits takes {median:.2f} of the memory of torch, gradients included.",
        lambda frames: _one((held := _step(frames, "peak_bytes"))["in_place"] / held["torch"]),
        "<= 0.6",
        _EXAMPLE + "; memory of step 1 over torch",
    ),
    Claim(
        "chunks-gain",
        "Chunks of 1024 rows take {median:.2f} of the memory of all rows at once, gradients included, and {time:.2f} "
        "of their time.",
        lambda frames: _one((held := _step(frames, "peak_bytes"))["chunks"] / held["in_place"]),
        "<= 0.6",
        _EXAMPLE + "; memory of step 2 over step 1",
        numbers=lambda frames: {"time": (us := _step(frames, "gpu_us"))["chunks"] / us["in_place"]},
    ),
    # Targets
    Claim(
        "target-memory",
        "Memory beyond inputs and gradients is at most 1.2 GiB: {median:.2f} GiB. The fastest other implementation, "
        "{name}, takes {other:.2f} GiB.",
        lambda frames: _gib(frames)[["fusebook"]],
        "<= 1.2",
        _EXAMPLE + "; GiB",
        kind="target",
        numbers=lambda frames: {
            "name": (name := _next(_at(frames)["gpu_us"])[0]),
            "other": _gib(frames)[name],
        },
    ),
    Claim(
        "target-time",
        "GPU time is at most 1.05 times that of the fastest other implementation.",
        lambda frames: _one((us := _at(frames)["gpu_us"])["fusebook"] / _next(us)[1]),
        "<= 1.05",
        _EXAMPLE,
        kind="target",
    ),
)

LOG = (
    "Each matmul adds up in float32 and rounds its result once. The head's gradient is a sum over chunks in the dtype "
    "of the head, so it is rounded once more per chunk. A sum in float32 would take twice the memory of the gradient. "
    "By default there are few chunks: as many rows as fit into 1 GiB of logits.",
    "The head's gradient of a class is the difference of two sums: hidden states weighted by probabilities, less those "
    "of the tokens of this class. With a hundred thousand classes the two are nearly equal for some classes, and both "
    "were rounded before. Errors are therefore scored relative to the sums, and not to their difference.",
    "`torch.nn.functional.linear_cross_entropy` exists from PyTorch 2.13 on. It has rows only where it was timed with "
    "that version.",
    "In float16 gradients of unlikely classes are too small for normal numbers. The rows of a chunk are raised by "
    "powers of two, and the matmuls lower their results before rounding.",
    "Random problems: PyTorch's matmuls are slow where rows of hidden states or of the head begin within 16 bytes. "
    "Small problems are about ten launches. Copies to aligned addresses of the hidden states alone, or of the head "
    "alone, were slower at most problems.",
    "Random problems, changed since: a number of classes that is no multiple of eight, as 50257, leaves a few besides "
    "whole vectors, and these are multiplied apart. In float16, logits that take no more memory than their inputs are "
    "kept for the gradient. In fp16 and bf16, rows that are no whole vectors are copied into rows that are, where the "
    "matmuls are large enough to pay for it.",
    "Random problems, changed since: in float16 with 256000 classes the gradients of logits were no normal numbers, "
    "and the head's gradient was incorrect. A problem of a tuning seed had shown it. They are raised by a power of "
    "two until they are multiplied.",
)
