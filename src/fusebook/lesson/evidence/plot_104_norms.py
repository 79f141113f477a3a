"""Evidence of the lesson on norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fusebook import tables
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

with extra("book"):
    import pandas as pd

OPERATORS = ("rms_norm", "add_rms_norm", "rms_norm_fp8", "layer_norm", "rms_norm_backward", "layer_norm_backward")
EXAMPLE = {"M": 32768, "N": 8192, "dtype": "bfloat16"}
STEPS = ("eager", "one_row", "rows", "two_kernels", "residual", "eager_gradient", "atomic", "partial")
OTHER_STEPS = {
    **dict.fromkeys(("two_kernels", "residual"), "add_rms_norm"),
    **dict.fromkeys(("eager_gradient", "atomic", "partial"), "rms_norm_backward"),
}
SHAPES = ((262144, 256), (32768, 8192))
DTYPES = ("bfloat16",)
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS: Mapping[str, tuple[str, ...]] = {}
IMPORTS = ("liger_kernel.ops",)
#: Rows and columns at which Nsight Compute counts.
COUNTED = (8192, 8192)
#: Bytes per second of a GPU's memory, as its datasheet has them.
_DATASHEET = {"H100 80GB HBM3": 3.35e12, "H200": 4.8e12}


FRAMES: dict[str, Any] = {
    "sweep": Recorded("rms_norm", "large", "bfloat16"),
    "llama": Recorded("rms_norm", "llama", "bfloat16"),
    "residual": Recorded("add_rms_norm", "target", "bfloat16"),
    "fp8": Recorded("rms_norm_fp8", "target", "bfloat16"),
    "layers": Recorded("layer_norm", "target", "bfloat16"),
    "gradient": Recorded("rms_norm_backward", "wide", "bfloat16"),
    "gradient of layers": Recorded("layer_norm_backward", "target", "bfloat16"),
    "steps": Measured("norms_steps"),
    "counters": Measured("norms_counters"),
}


# What claims read -----------------------------------------------------------------------------------------------------

_LIBRARIES = ("quack", "torch.compile", "Liger")


def _keyed(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.set_index([tables.label(frame), "dtype"])


def _own(frames: Frames) -> pd.DataFrame:
    """The rows of the library, of all operators of the page."""
    found = {op: _keyed(tables.where(frames.of(op), variant="fusebook", status="ok")) for op in OPERATORS}
    return pd.concat(found, names=["operator"])


def _of_copy(frame: pd.DataFrame, **where: Any) -> pd.Series:
    return tables.share(tables.where(frame, **where), "fusebook")


def _beaten(frame: pd.DataFrame) -> pd.Series:
    """GPU time over that of the fastest of quack, torch.compile and Liger, by size."""
    times = tables.times(frame)
    return (times["fusebook"] / times[[name for name in _LIBRARIES if name in times]].min(axis=1)).dropna()


def _of_limit(frames: Frames, limit: str, *variants: str) -> pd.Series:
    """The share of the roofline, or of a copy, that implementations of the gradients reach."""
    parts = [
        tables.share(frames[name], variant, of=limit)
        for name in ("gradient", "gradient of layers")
        for variant in variants
        if variant in set(frames[name]["variant"])
    ]
    return pd.concat(parts)


def _read(frames: Frames) -> pd.Series:
    """Elements read by the hardware counters, in multiples of MN, by step."""
    seen = frames["counters"]
    return seen.groupby("step", sort=False)["read"].sum() / (2 * COUNTED[0] * COUNTED[1])


def _step_us(frames: Frames) -> Any:
    """GPU time: a row per step, a column per width."""
    steps = frames["steps"]
    width = steps["shape"].str.rpartition("x")[2].astype(int)
    return steps.assign(width=width).pivot_table("gpu_us", "step", "width", sort=False)


def _gain(step: str, over: str, width: int) -> Callable[[Frames], pd.Series]:
    def ratio(frames: Frames) -> pd.Series:
        us = _step_us(frames)
        if not {step, over} <= {*us.index} or width not in us or us.loc[[step, over], width].isna().any():
            raise NotRecorded(f"{step} or {over} was not measured at {width}")
        return pd.Series({f"N = {width}": us.loc[over, width] / us.loc[step, width]})

    return ratio


def _over_best_step(frames: Frames) -> pd.Series:
    """GPU time of the library over that of the best step of the same operator, by operator and width."""
    us, found = _step_us(frames), {}
    for operator, steps in (
        ("rms_norm", ("one_row", "rows")),
        ("add_rms_norm", ("residual",)),
        ("rms_norm_backward", ("atomic", "partial")),
    ):
        own = "fusebook" if operator == OPERATORS[0] else f"fusebook.{operator}"
        if own in us.index:
            found[operator] = us.loc[own] / us.reindex(steps).min()
    return pd.concat(found, names=["operator"]).dropna()


def _rate_of_two(frames: Frames) -> float:
    """The rate at which a sum and torch's norm move their 5MN elements, over that of a copy; one kernel moves 4MN."""
    row = tables.where(frames["steps"], step="two_kernels", shape="32768x8192")
    return float((row["copy_us"] / row["gpu_us"]).median()) * 5 / 4


def _eight(frames: Frames) -> pd.Series:
    return tables.ratio(frames["fp8"], "norm, then quantise", "fusebook")


def _quack_of_copy(frames: Frames) -> pd.Series:
    """What quack reaches of a copy from 4096 columns on."""
    rows = tables.where(frames["sweep"], variant="quack", status="ok").query("N >= 4096")
    return (rows["copy_us"] / rows["gpu_us"]).set_axis(tables.label(rows))


def _quack_of_datasheet(frames: Frames) -> pd.Series:
    sweep = frames["sweep"]
    on = sweep.attrs["origin"].machine.name.removeprefix("NVIDIA ")
    rows = tables.where(sweep, variant="quack", status="ok").query("N >= 4096")
    return (rows["read_bytes"] + rows["write_bytes"]) / (rows["gpu_us"] * 1e-6) / _DATASHEET.get(on, float("nan"))


def _far(frames: Frames) -> pd.DataFrame:
    return tables.where(frames["sweep"], N=[65536, 262144])


def _own_rate(frames: Frames, variant: str) -> float:
    """The rate at which an implementation moves its own bytes, over that of a copy, in the median."""
    rows = tables.where(frames["sweep"], variant=variant, status="ok")
    least = rows["read_bytes"] + rows["write_bytes"]
    return float((rows["moved_bytes"] / least * rows["copy_us"] / rows["gpu_us"]).median())


# Claims ---------------------------------------------------------------------------------------------------------------

_SWEEP = "rows of 781 to 262144 elements, bfloat16, cold L2"
_TARGET = "32768 rows of 8192 elements, bfloat16, cold L2"
_GRADIENTS = "32768 rows of 8192 elements, and RMSNorm also 8192 rows of 65536; bfloat16, cold L2"
_STEPS = "the sizes of the step table, bfloat16"
_COUNTERS = "8192 rows of 8192 elements, bfloat16"
_ALL = "every recorded size of all six operators, bfloat16"

CLAIMS = (
    # The lesson's findings
    Claim(
        "gain-over-eager",
        "Predicted 9.0x faster than eager, measured {median:.1x} (median). The eager kernels move their own bytes at "
        "{eager:.0%} of copy speed, and the fused kernel at {fused:.0%}.",
        lambda frames: tables.ratio(frames["sweep"], "eager", "fusebook"),
        ">= 9",
        _SWEEP,
        lesson=True,
        numbers=lambda frames: {"eager": _own_rate(frames, "eager"), "fused": _own_rate(frames, "fusebook")},
    ),
    Claim(
        "residual-gain",
        "With the residual in the same kernel: predicted 1.25x faster, measured {median:.2x}. The two kernels move "
        "their own bytes at {rate:.0%} of copy speed.",
        _gain("residual", "two_kernels", 8192),
        ">= 1.25",
        _TARGET + "; step 3",
        lesson=True,
        numbers=lambda frames: {"rate": _rate_of_two(frames)},
    ),
    Claim(
        "gradient-gain",
        "Partial sums in registers, with early loads, make the gradient {median:.2x} faster than atomic additions.",
        _gain("partial", "atomic", 8192),
        "> 1.02",
        _TARGET + "; step 5 over step 4",
    ),
    Claim(
        "rows-narrow",
        "Several rows per program are {median:.2x} faster than one at N = 256.",
        _gain("rows", "one_row", 256),
        "> 1.02",
        "262144 rows of 256 elements, bfloat16; step 2 over step 1",
    ),
    Claim(
        "library-best-step",
        "The library takes at most 1.02 times the GPU time of the best step: {least:.2f} to {most:.2f}.",
        _over_best_step,
        "<= 1.02",
        _STEPS,
    ),
    # Correctness
    within_tolerance(_own, _ALL, "The library is within tolerance wherever it was timed."),
    steps_correct(_STEPS),
    deterministic(_own, _ALL, "Two runs give the same bits, of gradients too."),
    Claim(
        "rows-alone",
        "A row that is normalised has the same bits alone and among others.",
        lambda frames: (alone := _own(frames)["alone"])[alone.ne("")].eq("yes"),
        "== 1",
        _ALL + ", gradients excepted: their dw is a sum over rows",
    ),
    # Hardware counters
    Claim(
        "counters-gradient",
        "The hardware counters show that the library's gradient reads 2MN elements, within 5 %.",
        lambda frames: (_read(frames).filter(like="fusebook.rms_norm_backward") / 2 - 1).abs(),
        "<= 0.05",
        _COUNTERS,
    ),
    Claim(
        "counters-eager-gradient",
        "By the same counters the eager gradient reads {eager:.0f}MN.",
        lambda frames: _read(frames).filter(like="eager_gradient"),
        "",
        _COUNTERS,
        numbers=lambda frames: {"eager": float(_read(frames)["eager_gradient"])},
    ),
    # Targets
    Claim(
        "target-copy",
        "Rows of 781 to 8192 elements run at 96 % of copy speed, odd ones too: {least:.1%} to {most:.1%}.",
        lambda frames: _of_copy(frames["sweep"], N=[781, 2880, 4096, 8192]),
        ">= 0.96",
        "RMSNorm, bfloat16, cold L2",
        kind="target",
    ),
    Claim(
        "target-copy-shared",
        "Rows that several programs share run at 96 % of copy speed: {least:.1%} to {most:.1%}.",
        lambda frames: _of_copy(frames["sweep"], N=[65536, 262144]),
        ">= 0.96",
        "RMSNorm of rows of 65536 and 262144 elements, bfloat16, cold L2",
        kind="target",
    ),
    Claim(
        "target-copy-residual",
        "With a residual, rows run at 96 % of copy speed: {least:.1%}.",
        lambda frames: _of_copy(frames["residual"]),
        ">= 0.96",
        _TARGET,
        kind="target",
    ),
    Claim(
        "target-libraries",
        "RMSNorm is not slower than quack, torch.compile and Liger by more than 2 %. It takes {least:.2f} to "
        "{most:.2f} of the GPU time of the fastest of them.",
        lambda frames: _beaten(frames["sweep"]),
        "<= 1.02",
        _SWEEP,
        kind="target",
    ),
    Claim(
        "target-libraries-residual",
        "With a residual, RMSNorm is not slower than the same three by more than 2 %: it takes {most:.2f} of the GPU "
        "time of the fastest.",
        lambda frames: _beaten(frames["residual"]),
        "<= 1.02",
        _TARGET,
        kind="target",
    ),
    Claim(
        "target-gradient-roof",
        "The gradients reach at least 90 % of the roofline: {least:.0%} to {most:.0%} by size. The best other "
        "implementation reaches {other:.0%} of it. The table has another run, as a share of copy speed.",
        lambda frames: _of_limit(frames, "roof", "fusebook"),
        ">= 0.9",
        _GRADIENTS,
        kind="target",
        lesson=True,
        numbers=lambda frames: {"other": _of_limit(frames, "roof", "torch", *_LIBRARIES).max()},
    ),
    Claim(
        "target-libraries-gradient",
        "The gradient of RMSNorm is not slower than quack, torch.compile and Liger by more than 2 %. It takes "
        "{least:.2f} to {most:.2f} of the GPU time of the fastest of them.",
        lambda frames: _beaten(frames["gradient"]),
        "<= 1.02",
        _GRADIENTS,
        kind="target",
    ),
    Claim(
        "target-fp8",
        "RMSNorm that rounds to eight bits is twice as fast as a fused norm and then a fused quantisation. It is "
        "{median:.2x} faster; its bytes predict {predicted:.2x}.",
        _eight,
        ">= 2",
        _TARGET,
        kind="target",
        numbers=lambda frames: {"predicted": _moved_fp8(frames)},
    ),
    # Published by others
    Claim(
        "quack-peak",
        "quack (2025, on an H100): about 90 % of peak bandwidth from 4096 columns on. Here quack reaches {least:.0%} "
        "to {most:.0%} of a copy, and {low:.0%} to {high:.0%} of the datasheet's bandwidth.",
        _quack_of_copy,
        ">= 0.9",
        "rows of 4096 to 262144 elements, bfloat16, cold L2; tested as 90 % of a copy",
        kind="statement",
        numbers=lambda frames: {
            "low": _quack_of_datasheet(frames).min(),
            "high": _quack_of_datasheet(frames).max(),
        },
    ),
    Claim(
        "quack-ahead",
        "quack (2025): clearly ahead of torch.compile and Liger from 65536 columns on. They take {least:.2f} to "
        "{most:.2f} times its GPU time.",
        lambda frames: pd.concat(
            {name: tables.ratio(_far(frames), name, "quack").dropna() for name in ("torch.compile", "Liger")},
            names=["implementation"],
        ),
        ">= 1.1",
        "rows of 65536 and 262144 elements, where an implementation has a time; tested as 10 % or more",
        kind="statement",
    ),
    Claim(
        "quack-clusters",
        "quack (2025): rows that no multiprocessor can hold need clusters, or are read again. Fusebook has no "
        "clusters, and takes {least:.2f} to {most:.2f} of quack's GPU time.",
        lambda frames: tables.ratio(_far(frames), "fusebook", "quack"),
        "> 1.1",
        "rows of 65536 and 262144 elements; a second read would take 1.5 times, tested as more than 1.1",
        kind="statement",
    ),
    Claim(
        "compile-on-par",
        "PyTorch: torch.compile is on a par with quack, larger widths excepted. It takes {least:.2f} to {most:.2f} of "
        "quack's GPU time.",
        lambda frames: tables.ratio(tables.where(frames["sweep"], N=[2880, 4096, 8192]), "torch.compile", "quack"),
        "<= 1.1",
        "rows of 2880 to 8192 elements, bfloat16, cold L2; tested as within 10 %",
        kind="statement",
    ),
)


def _moved_fp8(frames: Frames) -> float:
    """What the norm and the quantisation move as two kernels, over what one moves."""
    rows = tables.where(frames["fp8"], variant="norm, then quantise", status="ok")
    return float((rows["moved_bytes"] / (rows["read_bytes"] + rows["write_bytes"])).median())


LOG = (
    "Rows of 781 elements in 16 bits begin anywhere within 16 bytes. The library reads them by whole vectors of 16 "
    "bytes. The first and the last vector of a row may hold elements of its neighbours, which count as zeros.",
    "With a residual, the kernel loads all of both tensors before it stores the first element of their sum. The "
    "compiler moves no load ahead of a store, since both might have the same address.",
    "All loads ask the L2 cache to keep their lines, although no row comes again. Lines that are written then leave "
    "the cache earlier. Of three hints it was the fastest at every width tried. No counter shows why.",
    "With few rows, nothing hides the latency of loads. There the library loads the weight together with the row.",
    "torch, Liger and quack get the statistics of the forward pass for their gradients. torch.compile gets the code.",
    "Sources of the statements: W. Guo, T. Zadouri and T. Dao, Getting Memory-bound Kernels to Speed-of-Light (2025); "
    "and PyTorch's SOTA Normalization Performance with torch.compile, on H100 and B200.",
    "Random problems: transposed rows of up to 1024 elements are read where they are. Wider ones are read twice if a "
    "residual comes with them, or if they are many in float32. All others are copied first, which takes two more "
    "passes, and four in the gradient.",
    "Random problems: one to a few wide rows wait for the launch that clears a workspace. One program of 32 warps and "
    "smaller parts of a row were tried: both are faster for a few rows and slower for many. A launch config may look "
    "at the width alone.",
    "Random problems, changed since: rows that begin within 16 bytes are read by whole vectors. The weights of wide "
    "rows are loaded one tile ahead, as far as registers go.",
    "Random problems, gradients: a single row is one launch, whose loop is made for many rows. A loop with one tile "
    "in flight is shorter there. But its threads hold other elements of the row, and the bits of a row must not "
    "depend on the number of rows. Two to eight warps for narrow rows were faster at the two problems where they were "
    "tried.",
    "Random problems, gradients, changed since: partial rows of the weight's gradient are added 512 at a time, by a "
    "kernel that starts while they are made. With few rows, one program writes the sum itself. In fp16 and bf16 a "
    "thread has 16 elements of a row, since 32 did not fit into its registers.",
)
