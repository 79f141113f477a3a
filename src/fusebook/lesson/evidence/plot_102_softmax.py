"""Evidence of the lesson on softmax."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusebook import tables
from fusebook.extras import extra
from fusebook.lesson.evidence import Claim, Frames, Measured, NotRecorded, Recorded, deterministic, steps_correct

with extra("book"):
    import pandas as pd

OPERATORS = ("softmax", "softmax_backward")
EXAMPLE = {"M": 32768, "N": 4096, "dtype": "float32"}
STEPS = ("eager", "one_row", "rows", "chunks")
SHAPES = ((262144, 256), (65536, 781), (32768, 4096), (16384, 12672))
DTYPES = ("float32", "bfloat16")
KERNELS = {"softmax": ("_softmax_rows", "_softmax_shared")}
IMPORTS = ("liger_kernel.ops",)
#: Rows and columns at which Nsight Compute counts.
COUNTED = (3168, 12672)

_ONE_ROW = ("one_row", "one_row, more warps")
_BOTH = "float32,bfloat16"
# Few enough to be measured in two minutes: the figure's widths, rows of 3 KiB to 256 KiB, vocabularies.
_WIDTHS = "4096x256,4096x1280,4096x3328,4096x8448,4096x12544"
_LARGE = "65536x781,32768x4096,16384x12672,8192x65536"
_GRADIENTS = "65536x781,32768x4096,8192x65536"
FRAMES = {
    "sweep": Recorded("softmax", _WIDTHS),
    "small": Recorded("softmax", "4096x256,64x8192,16x131072"),
    "large": Recorded("softmax", _LARGE, _BOTH),
    "vocabulary": Recorded("softmax", "4096x32000,256x128256,4096x128256", _BOTH),
    "gradient": Recorded("softmax_backward", _GRADIENTS, _BOTH, ("eager", "torch", "fusebook")),
    "steps": Measured("softmax_steps"),
    "counters": Measured("softmax_counters"),
    "exp": Recorded("exp", "8192x8192", variants=("CUDA C", "CUDA C, fast math"), borrowed=True),
}


# Steps that the lesson leaves out -------------------------------------------------------------------------------------


@triton.jit
def _persistent(y_ptr, x_ptr, M, N, BLOCK: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    start, programs = tl.program_id(0), tl.num_programs(0)
    for row in tl.range(start, M, programs, num_stages=STAGES):
        at = row * tl.cast(N, tl.int64) + columns
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))  # read N
        x = x.to(tl.float32)
        e = tl.exp(x - tl.max(x, 0))
        tl.store(y_ptr + at, e / tl.sum(e, 0), mask=inside)  # write N


@functools.cache
def _programs_that_fit(dtype: torch.dtype, N: int, constants: tuple[tuple[str, int], ...]) -> int:
    """As many programs as registers and shared memory have room for."""
    gpu: Any = torch.cuda.get_device_properties()
    row = torch.empty(N, dtype=dtype, device="cuda")
    built = _persistent[(1,)](row, row, 0, N, **dict(constants))
    warps = built.metadata.num_warps
    registers = max(built.n_regs, 16) * 32 * warps
    shared = built.metadata.shared + 1024
    fit = min(
        gpu.regs_per_multiprocessor // registers,
        gpu.shared_memory_per_multiprocessor // shared,
        64 // warps,
    )
    return int(gpu.multi_processor_count * max(fit, 1))


def persistent(x: Tensor) -> Tensor:
    """The kernel of Triton's current tutorial: as many programs as run at once, each with every so-many-th row."""
    M, N = x.shape
    y = torch.empty_like(x)
    constants = {"BLOCK": triton.next_power_of_2(N), "STAGES": 4, "num_warps": 8}
    programs = _programs_that_fit(x.dtype, N, tuple(constants.items())) if x.is_cuda else 4
    _persistent[(min(programs, M),)](y, x, M, N, **constants)
    return y


@functools.cache
def _scripted(eager: Callable[..., Tensor]) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(eager)


def _more_warps(one_row: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Step 1 with the warps of the tutorial of 2022: 8 from 2048 columns, 16 from 4096."""
    N = triton.next_power_of_2(x.shape[1])
    return one_row(x, num_warps=4 + 4 * (N >= 2048) + 8 * (N >= 4096))


EXTRA_STEPS: Mapping[str, Callable[..., Callable[[Tensor], Tensor]]] = {
    "TorchScript": lambda steps: lambda x: _scripted(steps["eager"])(x),
    "one_row, more warps": lambda steps: functools.partial(_more_warps, steps["one_row"]),
    "persistent": lambda steps: persistent,
}


# What claims read -----------------------------------------------------------------------------------------------------


def _reached(frames: Frames) -> pd.DataFrame:
    """The share of copy speed that each step reaches: a row per step, a column per shape and dtype."""
    steps = frames["steps"]
    steps = steps.assign(share=steps["copy_us"] / steps["gpu_us"])
    return steps.pivot_table("share", "step", ["shape", "dtype"], sort=False)


def _best(frames: Frames, *steps: str) -> pd.Series:
    """The share of copy speed that the best of some steps reaches, by shape and dtype."""
    reached = _reached(frames)
    if missing := [step for step in steps if step not in reached.index]:
        raise NotRecorded(f"{missing[0]} was not measured")
    return reached.loc[[*steps]].max()


def _gain(frames: Frames, step: str, *over: str) -> pd.Series:
    """The speed of a step over the best of others."""
    taken: Any = frames["steps"].pivot_table("gpu_us", "step", ["shape", "dtype"], sort=False)
    if missing := [name for name in (step, *over) if name not in taken.index]:
        raise NotRecorded(f"{missing[0]} was not measured")
    ratio: pd.Series = taken.loc[[*over]].min() / taken.loc[step]
    return ratio


def _at(values: pd.Series, shape: str, dtype: str = "") -> pd.Series:
    found = values[values.index.get_level_values("shape") == shape]
    return found[found.index.get_level_values("dtype") == dtype] if dtype else found


def _memory(frames: Frames) -> pd.DataFrame:
    return tables.where(frames["sweep"], zone="memory")


def _own_rate(frames: Frames, variant: str) -> float:
    """The rate at which an implementation moves its own bytes, over that of a copy, in the median."""
    rows = tables.where(_memory(frames), variant=variant, status="ok")
    least = rows["read_bytes"] + rows["write_bytes"]
    moved = rows["moved_bytes"].fillna(least)
    return float((moved / least * rows["copy_us"] / rows["gpu_us"]).median())


def _read(frames: Frames) -> pd.Series:
    """Elements read by the hardware counters, in multiples of MN, by step."""
    seen = frames["counters"]
    return seen.groupby("step", sort=False)["read"].sum() / (4 * COUNTED[0] * COUNTED[1])


def _sectors(frames: Frames) -> pd.Series:
    """Sectors that a load of an eager kernel asks for, by whether that broadcasts."""
    eager = tables.where(frames["counters"], step="eager")
    broadcasts = eager["kernel"].str.endswith("::elementwise_kernel").map({True: "broadcasts", False: "others"})
    return eager.set_index(broadcasts)["sectors"]


def _occupancy(frames: Frames) -> pd.Series:
    return frames["counters"].groupby("step", sort=False)["occupancy"].min()


def _bytes_of_row(df: pd.DataFrame) -> pd.Series:
    return df["N"] * df["dtype"].map(lambda name: getattr(torch, name).itemsize)


def _medium(df: pd.DataFrame) -> pd.DataFrame:
    """Rows of 4 to 64 KiB whose time memory decides."""
    kib = _bytes_of_row(df) / 1024
    return df[(kib >= 4) & (kib <= 64) & (df["zone"] == "memory")]


def _wide(frames: Frames) -> pd.DataFrame:
    return pd.concat([frames["large"], frames["vocabulary"]], ignore_index=True)


def _over_torch(frames: Frames) -> pd.Series:
    """The time over that of torch on rows that several programs share."""
    rows = _wide(frames)
    return tables.ratio(rows[rows["N"] >= 65536], "fusebook", "torch")


def _eager(frames: Frames) -> pd.DataFrame:
    """The rows of the sweep for eager, by size."""
    rows = tables.where(frames["sweep"], variant="eager")
    return rows.set_axis(tables.label(rows))


def _predicted(frames: Frames) -> pd.Series:
    """The traffic of eager over the least traffic, by size."""
    rows = _eager(frames)
    return rows["moved_bytes"] / (rows["read_bytes"] + rows["write_bytes"])


def _odd(frames: Frames) -> pd.DataFrame:
    return tables.where(frames["large"], N=781, zone="memory")


def _copy_targets(frames: Frames) -> pd.Series:
    """The share of copy speed over its target: 97 %, or 93 % above 8192 columns that are no power of two."""
    rows = _medium(_wide(frames))
    ragged = (rows["N"] > 8192) & (rows["N"] & (rows["N"] - 1) != 0)
    return pd.concat(
        [tables.share(rows[~ragged], "fusebook") / 0.97, tables.share(rows[ragged], "fusebook") / 0.93],
    )


def _peers(frames: Frames) -> pd.Series:
    rows = tables.where(frames.of("softmax"), variant=["fusebook", "quack", "Liger"])
    return tables.behind(rows)["times as long"]


def _over_sweep(other: str) -> Callable[[Frames], pd.Series]:
    return lambda frames: tables.ratio(frames["sweep"], "fusebook", other)


def _over_medium(other: str) -> Callable[[Frames], pd.Series]:
    return lambda frames: tables.ratio(_medium(_wide(frames)), "fusebook", other)


def _small(frames: Frames, kind: str) -> pd.DataFrame:
    return tables.times(frames["small"], kind)


def _warm_small(frames: Frames) -> pd.Series:
    warm = _small(frames, "warm")
    others = [name for name in warm if name not in ("eager", "fusebook")]
    return warm["fusebook"] / warm[others].min(axis=1)


def _warm_floor(frames: Frames) -> pd.Series:
    fused = tables.where(frames["small"], variant="fusebook").set_index(["M", "N"])
    return fused["gpu_warm_us"] / (fused["floor_warm_us"] + fused["roof_us"])


def _own(frames: Frames) -> pd.DataFrame:
    rows = tables.where(_wide(frames), variant="fusebook", status="ok")
    return rows.set_index([tables.label(rows), "dtype"])


def _tolerances(frames: Frames) -> pd.Series:
    rows = tables.where(frames.of("softmax"), variant="fusebook", status="ok")
    return (rows["error"] / rows["tolerance"]).set_axis([tables.label(rows), rows["dtype"]])


def _beyond(frames: Frames) -> pd.Series:
    rows = frames.of("softmax")
    rows = rows[(_bytes_of_row(rows) > 128 * 1024) & (rows["zone"] == "memory")]
    return tables.share(rows, "fusebook", of="roof")


def _script(frames: Frames, step: str = "one_row, more warps") -> pd.Series:
    found = _gain(frames, step, "TorchScript")
    return found[found.index.get_level_values("dtype") == "float32"]


def _exp_errors(frames: Frames) -> dict[str, Any]:
    scores = frames["exp"].set_index("variant")["error"] / 2**-23
    worst = tables.where(frames["sweep"], status="ok").groupby("variant")["error"].max() / 2**-23
    return {
        "fast": scores["CUDA C, fast math"],
        "plain": scores["CUDA C"],
        "fusebook": worst["fusebook"],
        "torch": worst["torch"],
    }


def _one(value: float) -> pd.Series:
    return pd.Series([value], index=[""])


# Claims ---------------------------------------------------------------------------------------------------------------

_SWEEP = "4096 rows, five widths of 256 to 12544 columns, float32, cold L2"
_MEMORY = "widths of the sweep at which memory decides; narrower rows are partly served by L2"
_MEDIUM = "rows of 4 to 64 KiB at which memory decides, float32 and bfloat16"
_STEPS = "the sizes of the step table, float32 and bfloat16"
_ALL = "every recorded size, float32 and bfloat16"
_COUNTERS = "3168 rows of 12672 columns, float32"
_SMALL = "three small sizes, float32, warm L2"
_2022 = "Triton 1.1.2, tutorial *Fused Softmax* (2022)"

CLAIMS = (
    # Traffic
    Claim(
        "eager-traffic",
        "Eager softmax moves 8MN + 4M elements, by the count of its five operations.",
        lambda frames: (rows := _eager(frames))["moved_bytes"] / (4 * rows["M"] * (8 * rows["N"] + 4)),
        "== 1",
        _SWEEP,
    ),
    Claim(
        "counters-eager",
        "The hardware counters show that eager softmax reads 5MN elements, within 2 %.",
        lambda frames: (_read(frames)[["eager"]] / 5 - 1).abs(),
        "<= 0.02",
        _COUNTERS,
    ),
    Claim(
        "counters-fused",
        "The hardware counters show that each fused kernel reads the rows once, within 2 %. Masked lanes read nothing.",
        lambda frames: (_read(frames).drop("eager") - 1).abs(),
        "<= 0.02",
        _COUNTERS,
    ),
    Claim(
        "counters-broadcast",
        "Two of the five eager kernels, the subtraction and the division, broadcast a value per row. They load "
        "{least:.1f} sectors of 32 bytes at a time, and the other three {others:.0f}.",
        lambda frames: _sectors(frames).filter(like="broadcasts"),
        "<= 8",
        _COUNTERS + "; 32 threads that load 4 bytes each ask for 4 sectors, and those that load 16 bytes for 16",
        numbers=lambda frames: {"others": _sectors(frames).filter(like="others").min()},
    ),
    Claim(
        "occupancy",
        "With 4 warps, step 1 keeps {four:.0f} % of the warps that a multiprocessor has room for. With 16 warps it "
        "keeps {more:.0f} %, step 3 {chunks:.0f} % and `fusebook.softmax` {fusebook:.0f} %.",
        _occupancy,
        "",
        _COUNTERS,
        numbers=lambda frames: {
            "four": (held := _occupancy(frames)).get("one_row"),
            "more": held.get("one_row, more warps"),
            "chunks": held.get("chunks"),
            "fusebook": held.get("fusebook"),
        },
    ),
    # Correctness
    Claim(
        "within-tolerance",
        "`fusebook.softmax` is within tolerance wherever it was timed.",
        _tolerances,
        "<= 1",
        _ALL,
    ),
    steps_correct(
        _STEPS,
        "Every step is correct on stress inputs at the sizes at which it was timed.",
        keys=["step", "shape", "dtype"],
    ),
    deterministic(
        _own,
        "large sizes and vocabularies, float32 and bfloat16",
        "Two runs of `fusebook.softmax` give the same bits.",
    ),
    Claim(
        "memory-output",
        "`fusebook.softmax` allocates its output and at most 2 MiB more.",
        lambda frames: (rows := _own(frames))["peak_bytes"] - rows["write_bytes"],
        "<= 2097152",
        "large sizes and vocabularies, float32 and bfloat16; bytes beyond the output",
    ),
    # The lesson's findings, and the gains in its headings
    Claim(
        "gain-over-eager",
        "Predicted 4.0x faster than eager, measured {median:.1x} (median of the wide rows of the figure). By the "
        "bytes that they move, eager's kernels reach {eager:.1%} of copy speed, the fused one {fused:.1%}: "
        "4.0 x {fused:.1%} / {eager:.1%} is {expected:.1f}.",
        lambda frames: tables.ratio(_memory(frames), "eager", "fusebook"),
        ">= 4",
        _MEMORY,
        lesson=True,
        numbers=lambda frames: {
            "eager": (eager := _own_rate(frames, "eager")),
            "fused": (fused := _own_rate(frames, "fusebook")),
            "expected": 4 * fused / eager,
        },
    ),
    Claim(
        "rows-narrow",
        "At N = 256, several rows per program are {float32:.2x} faster than one in float32, and {bfloat16:.2x} in "
        "bfloat16.",
        lambda frames: _at(_gain(frames, "rows", "one_row"), "262144x256"),
        "> 1.02",
        "262144 rows of 256 columns; step 2 over step 1",
        numbers=lambda frames: {
            dtype: _at(_gain(frames, "rows", "one_row"), "262144x256", dtype).max() for dtype in DTYPES
        },
    ),
    Claim(
        "chunks-wide",
        "At N = 12672, chunks reach {chunks:.0%} of copy speed in float32 and {half:.0%} in bfloat16. The padded tile "
        "of step 1 reaches {tile:.0%} and {half_tile:.0%}.",
        lambda frames: _at(_gain(frames, "chunks", "one_row"), "16384x12672"),
        "> 1.05",
        "16384 rows of 12672 columns; step 3 over step 1",
        numbers=lambda frames: {
            "chunks": _at(_best(frames, "chunks"), "16384x12672", "float32").max(),
            "half": _at(_best(frames, "chunks"), "16384x12672", "bfloat16").max(),
            "tile": _at(_best(frames, "one_row"), "16384x12672", "float32").max(),
            "half_tile": _at(_best(frames, "one_row"), "16384x12672", "bfloat16").max(),
        },
    ),
    Claim(
        "libraries",
        "`fusebook.softmax` takes at most 1.02 times as long as the faster of the libraries quack and Liger.",
        _peers,
        "<= 1.02",
        _ALL + "; time over that of the faster of the two",
        lesson=True,
    ),
    # Steps
    Claim(
        "warps-like-chunks",
        "At N = 12672, step 1 with 16 warps instead of 4 is as fast as step 3 in float32: {tile:.0%} of copy speed. In "
        "bfloat16 it reaches {half_tile:.0%}, and step 3 {half:.0%}.",
        lambda frames: (_at(_gain(frames, "one_row, more warps", "chunks"), "16384x12672", "float32") - 1).abs(),
        "<= 0.03",
        "16384 rows of 12672 columns, float32",
        lesson=True,
        numbers=lambda frames: {
            "tile": _at(_best(frames, "one_row, more warps"), "16384x12672", "float32").max(),
            "half_tile": _at(_best(frames, "one_row, more warps"), "16384x12672", "bfloat16").max(),
            "half": _at(_best(frames, "chunks"), "16384x12672", "bfloat16").max(),
        },
    ),
    Claim(
        "odd-half",
        "At N = 781 the best step reaches {best:.0%} of copy speed in float32 and {half:.0%} in bfloat16. "
        "`fusebook.softmax` reaches {own:.0%} and {own_half:.0%}.",
        lambda frames: _at(_best(frames, "fusebook") / _best(frames, "one_row", "rows", "chunks"), "65536x781"),
        ">= 0.98",
        "65536 rows of 781 columns, float32 and bfloat16; `fusebook.softmax` over the best step of the lesson",
        lesson=True,
        numbers=lambda frames: {
            "best": _at(_best(frames, "one_row", "rows", "chunks"), "65536x781", "float32").max(),
            "half": _at(_best(frames, "one_row", "rows", "chunks"), "65536x781", "bfloat16").max(),
            "own": _at(_best(frames, "fusebook"), "65536x781", "float32").max(),
            "own_half": _at(_best(frames, "fusebook"), "65536x781", "bfloat16").max(),
        },
    ),
    Claim(
        "chunks-bf16",
        "At N = 12672 in bfloat16, chunks reach {chunks:.0%} of copy speed, and the padded tile {tile:.0%} with the "
        "better of 4 and 16 warps.",
        lambda frames: _at(_gain(frames, "chunks", *_ONE_ROW), "16384x12672", "bfloat16"),
        "> 1.05",
        "16384 rows of 12672 columns, bfloat16; step 3 over step 1 with its better number of warps",
        numbers=lambda frames: {
            "chunks": _at(_best(frames, "chunks"), "16384x12672", "bfloat16").max(),
            "tile": _at(_best(frames, *_ONE_ROW), "16384x12672", "bfloat16").max(),
        },
    ),
    Claim(
        "rows-odd",
        "At N = 781, four rows per program gain nothing over one.",
        lambda frames: _at(_gain(frames, "rows", *_ONE_ROW), "65536x781"),
        "<= 1.02",
        "65536 rows of 781 columns; step 2 over step 1 with its better number of warps",
    ),
    Claim(
        "library-best-step",
        "`fusebook.softmax` is within 2 % of the best step, or faster.",
        lambda frames: _best(frames, "fusebook") / _reached(frames).max(),
        ">= 0.98",
        _STEPS,
    ),
    Claim(
        "persistent",
        "The persistent kernel of Triton's current tutorial reaches {least:.0%} to {most:.0%} of copy speed.",
        lambda frames: _best(frames, "persistent"),
        "",
        _STEPS,
    ),
    # Other implementations
    *(
        Claim(
            f"sweep-{name.lower().replace('.', '-')}",
            f"`fusebook.softmax` takes {{least:.2f}} to {{most:.2f}} of the time of {name}, and is never more than "
            "2 % slower.",
            _over_sweep(name),
            "<= 1.02",
            _SWEEP,
        )
        for name in ("eager", "torch", "torch.compile", "Liger", "quack")
    ),
    Claim(
        "wide-roof",
        "Rows of more than 128 KiB reach {least:.0%} of the roofline or more. A kernel that reads them twice cannot "
        "exceed two thirds.",
        _beyond,
        "> 0.667",
        "rows of more than 128 KiB at which memory decides, float32 and bfloat16",
    ),
    Claim(
        "warm-small",
        "With a warm L2, no other implementation is more than 2 % faster.",
        _warm_small,
        "<= 1.02",
        _SMALL,
    ),
    Claim(
        "warm-floor",
        "With a warm L2, the kernel takes at most 1.3 times the launch floor plus the roofline.",
        _warm_floor,
        "<= 1.3",
        _SMALL,
    ),
    Claim(
        "launch",
        "At 4096 x 256 the CPU takes {fusebook:.1f} us to launch `fusebook.softmax`, and {torch:.1f} us to launch "
        "`torch.softmax`. The kernel itself takes {warm:.1f} us with a warm L2.",
        lambda frames: _small(frames, "host")["fusebook"],
        "",
        _SMALL,
        numbers=lambda frames: {
            "fusebook": _small(frames, "host").loc[(4096, 256), "fusebook"],
            "torch": _small(frames, "host").loc[(4096, 256), "torch"],
            "warm": _small(frames, "warm").loc[(4096, 256), "fusebook"],
        },
    ),
    # Targets
    Claim(
        "target-copy",
        "Rows of 4 to 64 KiB run at 97 % of copy speed, and at 93 % above 8192 columns that are no power of two.",
        _copy_targets,
        ">= 1",
        _MEDIUM + "; share of copy speed over its target",
        kind="target",
    ),
    *(
        Claim(
            f"target-{name.lower()}",
            f"On rows of 4 to 64 KiB `fusebook.softmax` is never more than 2 % slower than {name}.",
            _over_medium(name),
            "<= 1.02",
            _MEDIUM,
            kind="target",
        )
        for name in ("Liger", "quack")
    ),
    Claim(
        "target-odd-copy",
        "Rows of 781 elements run at 97 % of copy speed.",
        lambda frames: tables.share(_odd(frames), "fusebook"),
        ">= 0.97",
        "65536 rows of 781 columns at which memory decides, float32 and bfloat16",
        kind="target",
    ),
    Claim(
        "target-odd-compile",
        "Rows of 781 elements are never more than 2 % slower than torch.compile.",
        lambda frames: tables.ratio(_odd(frames), "fusebook", "torch.compile"),
        "<= 1.02",
        "65536 rows of 781 columns at which memory decides, float32 and bfloat16",
        kind="target",
    ),
    Claim(
        "target-gradient",
        "The gradient reaches 95 % of its roofline on rows of 4 to 64 KiB.",
        lambda frames: tables.share(_medium(frames["gradient"]), "fusebook", of="roof"),
        ">= 0.95",
        _MEDIUM,
        kind="target",
    ),
    # Published by others
    Claim(
        "2022-native",
        "\"Significantly faster than PyTorch's native op for a particular class of matrices: those whose rows can fit "
        "in the GPU's SRAM\": `fusebook.softmax` takes {least:.2f}x to {most:.2f}x the time of torch.softmax. For rows "
        "of 65536 elements and more, which several programs share, it is {few:.2f}x to {many:.2f}x.",
        _over_sweep("torch"),
        "< 0.98",
        f"{_2022}; {_SWEEP}",
        kind="statement",
        numbers=lambda frames: {
            "few": _over_torch(frames).min(),
            "many": _over_torch(frames).max(),
        },
    ),
    Claim(
        "2022-warps",
        '"Use more threads per row by increasing the number of warps": step 1 with the warps of the tutorial over '
        "step 1 with 4 warps. Narrower rows get 4 warps.",
        lambda frames: pd.concat(
            [_at(_gain(frames, "one_row, more warps", "one_row"), shape) for shape in ("32768x4096", "16384x12672")]
        ),
        "> 1.02",
        f"{_2022}; 4096 and 12672 columns, float32 and bfloat16",
        kind="statement",
    ),
    Claim(
        "2022-theory",
        '"A theoretical speed-up of ~4x (i.e., (8MN + 4M) / 2MN)": counted from the operations, {median:.2x}.',
        lambda frames: (_predicted(frames) - 4).abs(),
        "< 0.1",
        f"{_2022}; {_SWEEP}; distance from 4",
        kind="statement",
        numbers=lambda frames: {"median": _predicted(frames).median()},
    ),
    Claim(
        "2022-jit",
        '"Triton is 4x faster than the Torch JIT", which is "still far from ideal": step 1 with the warps of the '
        "tutorial is {least:.1x} to {most:.1x} faster than TorchScript. TorchScript is deprecated now, and "
        "torch.compile has replaced it.",
        _script,
        ">= 4",
        f"{_2022}; the sizes of the step table, float32",
        kind="statement",
    ),
    Claim(
        "2022-fusion",
        'Then: the JIT "does not do any fusion here". Now: TorchScript takes {least:.2f} to {most:.2f} of the time of '
        "the eager code that it was given. The fused kernel is {fused:.1x} faster than eager where memory decides, "
        "and torch.compile, which does fuse, {compiled:.1x} (medians).",
        lambda frames: _gain(frames, "eager", "TorchScript"),
        "",
        f"{_2022}; {_STEPS}",
        kind="statement",
        numbers=lambda frames: {
            "fused": tables.ratio(_memory(frames), "eager", "fusebook").median(),
            "compiled": tables.ratio(_memory(frames), "eager", "torch.compile").median(),
        },
    ),
    Claim(
        "2022-exp",
        '"Exponentials in Triton are fast but approximate (i.e., think __expf in CUDA)": over 67 million elements the '
        "fast math of CUDA C has an error of {fast:.1f} eps, and its expf {plain:.1f}. Fast math is a power of two by "
        "the instruction that Triton takes. In softmax the largest error of the sweep is {fusebook:.1f} eps for "
        "Fusebook and {torch:.1f} for torch.softmax, with a tolerance of 64.",
        lambda frames: _one(_exp_errors(frames)["fast"] / _exp_errors(frames)["plain"]),
        "> 1.02",
        f"{_2022}; 8192 x 8192, float32; error of fast math over that of expf",
        kind="statement",
        numbers=_exp_errors,
    ),
    Claim(
        "2022-identical",
        '"As expected, the results are identical", by allclose: step 1 is within tolerance of the float64 reference.',
        lambda frames: tables.where(frames["steps"], step="one_row").set_index(["shape", "dtype"])["correct"],
        "== 1",
        f"{_2022}; {_STEPS}",
        kind="statement",
    ),
    Claim(
        "2022-readable",
        'Then: "easier to read, understand and maintain". Now: the step table counts the lines of each step and of the '
        "library.",
        lambda frames: _one(1.0),
        "",
        _2022,
        kind="statement",
    ),
    Claim(
        "2022-general",
        'Then: PyTorch\'s "is more general and will work on tensors of any shape". Now: `fusebook.softmax` takes any '
        "axis of any strided tensor, and its tests check that.",
        lambda frames: _one(1.0),
        "",
        _2022,
        kind="statement",
    ),
)

LOG = (
    "The lesson grew from the tutorial *Fused Softmax* of Triton 1.1.2 (2022). The current tutorial has another kernel "
    "and most of the old sentences. TorchScript, the baseline of 2022, is deprecated. It is among the steps here; "
    "torch.compile has its place elsewhere.",
    "The current tutorial has a persistent kernel. It launches as many programs as run at the same time. Each program "
    "computes one row after another and loads the next row during the current one (`num_stages`). At every size of the "
    "step table it is slower than the best step.",
    "Rows of more than 128 KiB do not fit the registers of one program, so several programs share a row. They exchange "
    "(max, sum) pairs through a workspace in global memory. A program that has waited too long computes the missing "
    "pairs itself, because an ordinary launch does not promise that all programs run at the same time.",
    "GPUs since Hopper can form a cluster of up to 16 blocks on neighbouring multiprocessors. The hardware promises "
    "that the blocks of a cluster run at the same time, and they read each other's shared memory. No workspace has to "
    "be cleared first. quack spreads a wide row over a cluster. Triton can spread one program over a cluster "
    "(`num_ctas`), but version 3.6 does not compile a reduction across it. Fusebook therefore gives a tile one more "
    "axis, with an entry per block, and a few lines of assembly exchange the partial results. The number of rows has "
    "no part in this choice: the bits of a row must not depend on how many rows there are.",
    "Step 1 leaves `num_warps` at Triton's default of 4, whatever the width. The tutorial of 2022 used 8 warps from "
    "2048 columns and 16 from 4096. The library has its own table.",
    "Random problems: with few wide rows only a handful of programs run. Their time is a chain of loads, sums and "
    "stores, and not the time that memory needs. quack is faster there. Clusters of 2 to 8 programs with 4 to 16 "
    "warps were tried: faster for a few rows, and most of them slower for thousands.",
    "Random problems: narrow rows of a permuted tensor may be neighbours in memory and far apart in the result. A "
    "table of a few lines chooses the launch config by the width alone. Transposed rows are read in tiles of several "
    "rows, or copied first where they do not fit into registers. PyTorch computes wide rows of float64.",
)
