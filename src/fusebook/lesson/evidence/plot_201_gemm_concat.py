"""Evidence of the lesson on matmuls and concat."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.lesson import _products
from fusebook.lesson.evidence import Claim, Frames, Measured, NotRecorded, Recorded, steps_correct
from fusebook.measure import bench, check, inputs
from fusebook.measure.op import Cost

with extra("book"):
    import pandas as pd

PAGE = _products.ProductsPage
OPERATORS = ("concat_gemm",)
EXAMPLE = {"M": 1024, "K": 1024, "N": 1024, "weights": "two", "dtype": "bfloat16"}
WORDS = "{M} x {K} with two weights of {K} x {N} in {dtype}"
STEPS = ("eager", "small", "large", "grouped")
SHAPES = ((1024, 1024, 1024), (4096, 4096, 4096))
DTYPES = ("bfloat16",)
WARM = True
KERNELS: Mapping[str, tuple[str, ...]] = {}
#: M, K and N at which Nsight Compute counts.
COUNTED = (8192, 8192, 8192)

_OP = OPS["concat_gemm"]
_FREE = ("two + cat", "cat + one", "packed", "views")
_OWN = ("fusebook", "fusebook (chosen)")
_GRAPHS = ("ORT two + Concat", "ORT Concat + one")


def _medium(steps: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Step 1 in tiles between those of steps 1 and 2."""
    scope = steps["small"].__globals__
    return functools.partial(scope["launched"], scope["side_by_side"], BM=128, BN=128, warps=8)


EXTRA_STEPS: Mapping[str, Callable[..., Callable[..., Any]]] = {
    "medium": _medium,
    "views": lambda steps: _OP.variants["views"].run,
}


# What is measured besides the steps -----------------------------------------------------------------------------------


def _by_quack(x: Tensor, *weights: Tensor) -> Tensor:
    """Matmuls of quack, each into its view of the output."""
    from quack.gemm_interface import gemm

    y = x.new_empty(x.shape[0], sum(w.shape[1] for w in weights))
    for part, w in zip(y.split([w.shape[1] for w in weights], 1), weights, strict=True):
        gemm(x, w, out=part, tuned=False)
    return y


def with_quack() -> pd.DataFrame:
    """GPU time of quack's matmuls, and of torch's and the library's, at four sizes."""
    parts = []
    for n in (256, 1024, 4096, 8192):
        given = _OP.make(inputs.generator(0), torch.bfloat16, M=n, K=n, N=n, weights="two")
        yard = check.yardstick(_OP, given)
        calls = {"quack, in views": functools.partial(_by_quack, *given)}
        for name in ("views", "packed", "fusebook"):
            variant = _OP.variants[name]
            calls[name] = functools.partial(variant.run, *variant.given(*given))
        frame = bench.staircase(calls, lambda got, yard=yard: yard.judge(got).ok)  # type: ignore[misc]
        parts.append(frame.assign(n=n))
    return pd.concat(parts, ignore_index=True)


FRAMES = {
    "sweep": Recorded("concat_gemm", "small,medium,large", "bfloat16,float16", (*_FREE, *_OWN, *_GRAPHS)),
    "float32": Recorded(
        "concat_gemm",
        "small,medium",
        "float32",
        tuple(name for name in _OP.variants if name not in ("torch.compile", "max-autotune")),
    ),
    "odd": Recorded("concat_gemm", "odd", "bfloat16", (*_FREE, *_OWN)),
    "decode": Recorded("concat_gemm", "decode", "bfloat16", (*_FREE, *_OWN)),
    "compiled": Recorded("concat_gemm", "compiled", "bfloat16", (*_FREE, "torch.compile", "max-autotune", "fusebook")),
    "steps": Measured("gemm_steps"),
    "counters": Measured("gemm_counters"),
    "quack": Measured("gemm_quack", {"us": "gpu_us", "right": "correct"}, with_quack),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _half(frames: Frames, variant: str, over: str, kind: str = "cold") -> pd.Series:
    """The time of one implementation over another's, by dtype and n, in bfloat16 and float16."""
    return _ratio(frames["sweep"], variant, over, kind)


def _ratio(frame: pd.DataFrame, variant: str, over: str, kind: str = "cold") -> pd.Series:
    """The time of one implementation over another's, by n and dtype."""
    wide = tables.times(frame, kind)
    if not {variant, over} <= {*wide}:
        raise NotRecorded(f"{variant} or {over} was not measured")
    return _by_n(wide[variant] / wide[over])


def _by_n(values: Any) -> Any:
    return values.droplevel([name for name in ("M", "K", "weights") if name in values.index.names])


def _from(values: pd.Series, n: int) -> pd.Series:
    return values[values.index.get_level_values("N") >= n]


def _up_to(values: pd.Series, n: int) -> pd.Series:
    return values[values.index.get_level_values("N") <= n]


def _chosen(frame: pd.DataFrame) -> pd.Series:
    """The time of what the library chooses over the best other implementation's, packed weights included."""
    wide = tables.times(frame)
    others = [name for name in (*_FREE, *_GRAPHS) if name in wide]
    return _by_n(wide["fusebook (chosen)"] / wide[others].min(axis=1))


def _predicted(frames: Frames) -> pd.DataFrame:
    """Predicted times by n in microseconds, from the rates that the machine was measured to reach."""
    origin = frames["sweep"].attrs.get("origin")
    if origin is None or origin.machine is None:
        raise NotRecorded("the machine is unknown")
    on, rows = origin.machine, {}
    for n in (256, 512, 1024, 2048, 4096, 8192):
        product = max(on.roof(_OP.cost(2, M=n, K=n, N=n, weights="two"), "bfloat16"), on.floor())
        copied = on.memory_seconds(Cost(4 * n * n, 4 * n * n, 0))
        rows[n] = {"product": 1e6 * product, "copy": 1e6 * copied, "launch": 1e6 * on.floor()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("N")


def _share(frames: Frames) -> pd.Series:
    """A concat and both launches over the matmul, predicted."""
    told = _predicted(frames)
    return (told["copy"] + 2 * told["launch"]) / told["product"]


def _beyond(frames: Frames) -> pd.Series:
    """Microseconds beyond the packed matmul in bfloat16, less those that were predicted, by n, over the matmul's."""
    wide = _by_n(tables.times(tables.where(frames["sweep"], dtype="bfloat16")))
    told = _predicted(frames)
    allowed = pd.DataFrame(
        {
            "two + cat": told["copy"] + 2 * told["launch"],
            "cat + one": told["copy"] + told["launch"],
            "views": told["launch"],
        }
    )
    n = wide.index.get_level_values("N")
    beyond = {
        name: (wide[name] - wide["packed"] - cost.reindex(n).to_numpy()) / wide["packed"]
        for name, cost in allowed.items()
    }
    return pd.concat(beyond)


def _read(frames: Frames) -> pd.Series:
    """Bytes read by the hardware counters over those of x and both weights, by step."""
    seen = frames["counters"]
    return seen.groupby("step", sort=False)["read"].sum() / (3 * 2 * COUNTED[0] ** 2)


def _less(values: pd.Series, step: str, other: str) -> pd.Series:
    if not {step, other} <= {*values.index}:
        raise NotRecorded(f"{step} or {other} was not measured")
    return pd.Series([values[other] / values[step]], index=[step])


def _step_us(frames: Frames, n: int) -> pd.Series:
    steps = frames["steps"]
    return steps[steps["shape"].str.endswith(f"x{n}")].drop_duplicates("step").set_index("step")["gpu_us"]


def _drawn(frames: Frames, column: str, n: int = 4096) -> float:
    """A number of the library's kernel in bfloat16 at n: a clock, a power or a time."""
    rows = tables.where(frames["sweep"], variant="fusebook", dtype="bfloat16").set_index("N")
    if column not in rows:
        raise NotRecorded("the record has no clocks")
    return float(rows[column].to_dict()[n])


def _one_over_two(frames: Frames, suffix: str = "", kind: str = "cold") -> pd.Series:
    """In ONNX Runtime: the time of a Concat and one Gemm over that of two Gemm and a Concat, by n."""
    return _ratio(frames["float32"], f"{_GRAPHS[1]}{suffix}", f"{_GRAPHS[0]}{suffix}", kind)


def _float32_chosen(frames: Frames) -> pd.Series:
    """The time of what the library chooses over the better of its kernel and views, in float32 and TF32."""
    wide, parts = tables.times(frames["float32"]), {}
    for name, suffix in (("float32", ""), ("TF32", ", TF32")):
        best = wide[[f"fusebook{suffix}", f"views{suffix}"]].min(axis=1)
        parts[name] = (wide[f"fusebook (chosen){suffix}"] / best).groupby("N").first()
    return pd.concat(parts).dropna()


def _odd(frames: Frames, variant: str) -> pd.Series:
    return tables.times(frames["odd"])[variant].groupby("N").first()


def _per_product(frames: Frames) -> pd.Series:
    taken = _odd(frames, "fusebook")
    return taken / pd.Series(taken.index, taken.index) ** 3


def _quack(frames: Frames) -> Any:
    return frames["quack"].pivot_table("gpu_us", "n", "step", sort=False)


#: What the page that this one grew from printed for its sizes: one Gemm over two, in ONNX Runtime, float32.
SOURCE = {256: 0.675043, 512: 1.128154, 1024: 0.914766}


# Claims ---------------------------------------------------------------------------------------------------------------

_SQUARE = "n x n matrices, n from 256 to 8192, bfloat16 and float16, where both have a time; cold L2"
_STEPS = "n = 1024 and n = 4096, bfloat16"
_ORT = "ONNX Runtime on CUDA, n x n matrices, float32"
_THEIRS = "*Gemm Exploration with CUDA* of onnx-extended, 2024"

CLAIMS = (
    # The lesson's findings
    Claim(
        "packed-over-concat",
        "One matmul of packed weights is {least:.2x} to {most:.2x} faster than two matmuls and a concat.",
        lambda frames: _half(frames, "two + cat", "packed"),
        "> 1",
        _SQUARE,
        lesson=True,
    ),
    Claim(
        "over-concat",
        "Without packing, the kernel of the library is {least:.2x} to {most:.2x} faster than two matmuls and a "
        "concat. From n = 2048 on it is {large:.2x} at most.",
        lambda frames: _half(frames, "two + cat", "fusebook"),
        "> 1",
        _SQUARE,
        lesson=True,
        numbers=lambda frames: {"large": _from(_half(frames, "two + cat", "fusebook"), 2048).max()},
    ),
    Claim(
        "large-tiles",
        "At n = 4096 tiles of 128 x 256 are {median:.1x} faster than tiles of 64 x 64. At n = 1024 they are too few, "
        "and take {few:.2f} times as long.",
        lambda frames: _less(_step_us(frames, 4096), "large", "small"),
        "> 1.02",
        "n = 4096, bfloat16; GPU time of step 1 over step 2",
        lesson=True,
        numbers=lambda frames: {"few": (us := _step_us(frames, 1024))["large"] / us["small"]},
    ),
    Claim(
        "order-of-tiles",
        "At n = 8192, by the hardware counters, step 2 reads x and the weights {large:.0f} times from memory. Step 3 "
        "reads them {grouped:.0f} times, and the library {fusebook:.0f} times. Predicted: 22 for step 2, 6 for step 3. "
        "The prediction assumes that programs which run together stay at the same turn of their loops.",
        lambda frames: pd.concat([_less(_read(frames), name, "large") for name in ("grouped", "fusebook")]),
        "> 1",
        "n = 8192, bfloat16; bytes that step 2 reads over those of step 3, and of the library",
        lesson=True,
        numbers=lambda frames: dict(_read(frames)),
    ),
    # The prediction
    Claim(
        "predicted-small",
        "Predicted: up to n = 2048 a concat and both launches can cost more than a fifth of the matmul.",
        lambda frames: _share(frames)[[256, 512, 1024, 2048]],
        "> 0.2",
        "n from 256 to 2048, bfloat16, from the rates of the machine",
    ),
    Claim(
        "predicted-large",
        "Predicted: from n = 4096 on they cost at most a fifth of it.",
        lambda frames: _share(frames)[[4096, 8192]],
        "<= 0.2",
        "n = 4096 and 8192, bfloat16, from the rates of the machine",
    ),
    Claim(
        "prediction-bounds",
        "Beyond the packed matmul no implementation takes more than predicted, give or take 10 % of that matmul.",
        _beyond,
        "<= 0.1",
        "n from 256 to 8192, bfloat16; time beyond the prediction over that of the packed matmul",
    ),
    # Correctness
    Claim(
        "within-tolerance",
        "All implementations are within tolerance wherever they were timed, those of ONNX Runtime included.",
        lambda frames: _errors(frames),
        "<= 1",
        "every recorded size",
    ),
    steps_correct(_STEPS),
    Claim(
        "quack-correct",
        "The matmuls of quack, torch and the library are correct at the sizes at which they were compared.",
        lambda frames: frames["quack"].set_index(["step", "n"])["correct"],
        "== 1",
        "n = 256, 1024, 4096 and 8192, bfloat16",
    ),
    # Steps
    Claim(
        "grouped-gain",
        "At n = 4096 the order in groups is {median:.2x} faster than row by row.",
        lambda frames: _less(_step_us(frames, 4096), "grouped", "large"),
        "> 1.02",
        "n = 4096, bfloat16; GPU time of step 2 over step 3",
        kind="target",
    ),
    Claim(
        "power",
        "At n = 4096 the GPU draws {watts:.0f} W, and its clock is at {median:.0%} of that at n = 256. Calls in a row "
        "take {warm:.2f} times as long as one with a cold L2.",
        lambda frames: pd.Series({"n = 4096": _drawn(frames, "sm_mhz") / _drawn(frames, "sm_mhz", 256)}),
        "< 0.95",
        "n = 4096 and n = 256, bfloat16; clock and power seen after all implementations, time of the library's kernel",
        numbers=lambda frames: {
            "watts": _drawn(frames, "power_w"),
            "warm": _drawn(frames, "gpu_warm_us") / _drawn(frames, "gpu_us"),
        },
    ),
    Claim(
        "grouped-reads",
        "At n = 8192 step 3 reads x and the weights {grouped:.0f} times from memory.",
        lambda frames: _less(_read(frames), "grouped", "large"),
        "> 1",
        "n = 8192, bfloat16; bytes that step 2 reads over those of step 3",
        kind="target",
        numbers=lambda frames: dict(_read(frames)),
    ),
    Claim(
        "library-over-steps",
        "At n = 4096 the library is {median:.2x} faster than tiles of 128 x 256 row by row.",
        lambda frames: _less(_step_us(frames, 4096), "fusebook", "large"),
        "> 1.02",
        "n = 4096, bfloat16; GPU time of step 2 over the library",
    ),
    # Other implementations
    Claim(
        "over-concat-end-to-end",
        "End to end, from n = 2048 on, the kernel of the library is {least:.2x} to {most:.2x} faster than two matmuls "
        "and a concat. Up to n = 1024, where the CPU's time to launch decides, two matmuls and a concat take "
        "{few:.2f} to {many:.2f} times as long as the kernel.",
        lambda frames: _from(_half(frames, "two + cat", "fusebook", "paid"), 2048),
        "> 1",
        _SQUARE + "; n from 2048 on",
        numbers=lambda frames: {
            "few": (small := _up_to(_half(frames, "two + cat", "fusebook", "paid"), 1024)).min(),
            "many": small.max(),
        },
    ),
    Claim(
        "compile-as-views",
        "torch.compile takes as long as matmuls into views, within 10 %.",
        lambda frames: (_ratio(frames["compiled"], "torch.compile", "views") - 1).abs(),
        "<= 0.1",
        "n = 256, 1024 and 4096, bfloat16; distance of the ratio from 1",
    ),
    Claim(
        "max-autotune",
        "The search of max-autotune finds nothing faster than the default of torch.compile. Its code takes {least:.2f} "
        "to {most:.2f} times as long.",
        lambda frames: _ratio(frames["compiled"], "max-autotune", "torch.compile"),
        "> 0.98",
        "n = 256, 1024 and 4096, bfloat16",
    ),
    Claim(
        "quack-views",
        "Two matmuls of quack into views take {least:.2f} to {most:.2f} times as long as the library's kernel.",
        lambda frames: _quack(frames)["quack, in views"] / _quack(frames)["fusebook"],
        "",
        "n = 256, 1024, 4096 and 8192, bfloat16",
    ),
    Claim(
        "float32-chosen",
        "In float32 and in TF32 the library chooses the better of its kernel and views, within 5 %.",
        _float32_chosen,
        "<= 1.05",
        "n from 256 to 4096; time of its choice over the better one",
    ),
    Claim(
        "float32-large",
        "In float32, from n = 2048 on, the library's kernel takes {least:.2f} to {most:.2f} times as long as views. It "
        "adds three matmuls in TF32.",
        lambda frames: _from(_ratio(frames["float32"], "fusebook", "views"), 2048),
        "",
        "n = 2048 and 4096, float32",
    ),
    Claim(
        "tf32-large",
        "In TF32, from n = 1024 on, the library's kernel takes {least:.1f} to {most:.1f} times as long as views.",
        lambda frames: _from(_ratio(frames["float32"], "fusebook, TF32", "views, TF32"), 1024),
        "",
        "n = 1024, 2048 and 4096, TF32",
    ),
    Claim(
        "awkward-3000",
        "For the same work the library's kernel takes {median:.2f} times as long at n = 3000 as at n = 3072.",
        lambda frames: pd.Series([(work := _per_product(frames))[3000] / work[3072]], index=[""]),
        "> 1.1",
        "bfloat16; rows of 6000 bytes begin inside a line of the cache",
    ),
    Claim(
        "chosen-gains",
        "At n = 3000 and n = 3072 the library chooses views, and gains more than 2 % over its kernel.",
        lambda frames: (_odd(frames, "fusebook (chosen)") / _odd(frames, "fusebook"))[[3000, 3072]],
        "< 0.98",
        "bfloat16; time of its choice over its kernel",
    ),
    # Targets
    Claim(
        "target-chosen",
        "The library's choice takes at most 1.03 times as long as the best other implementation, packed weights "
        "included: {least:.2f} to {most:.2f} times.",
        lambda frames: _chosen(frames["sweep"]),
        "<= 1.03",
        _SQUARE,
        kind="target",
    ),
    Claim(
        "target-awkward",
        "At awkward shapes the library's choice takes at most 1.03 times as long as the best other implementation: "
        "{least:.2f} to {most:.2f} times.",
        lambda frames: _chosen(frames["odd"]),
        "<= 1.03",
        "n = 781, 3000 and 3072, weights by columns, unequal widths; bfloat16",
        kind="target",
    ),
    Claim(
        "target-packed-large",
        "From n = 2048 on, the library's kernel reaches 90 % of the packed matmul.",
        lambda frames: _from(_half(frames, "packed", "fusebook"), 2048),
        ">= 0.9",
        "n from 2048 to 8192, bfloat16 and float16, cold L2",
        kind="target",
    ),
    Claim(
        "target-packed-small",
        "Up to n = 1024, the library's kernel takes at most 1.15 times as long as the packed matmul, warm.",
        lambda frames: _up_to(_half(frames, "fusebook", "packed", "warm"), 1024),
        "<= 1.15",
        "n from 256 to 1024, bfloat16 and float16, warm L2",
        kind="target",
    ),
    # Published statements
    Claim(
        "source-33-own",
        '"It seems the fused operator is 33% faster": in the table of the source, one Gemm takes 33 % less time at n = '
        "256, 13 % more at n = 512 and 9 % less at n = 1024.",
        lambda frames: pd.Series(SOURCE),
        "<= 0.675043",
        _THEIRS,
        kind="statement",
    ),
    Claim(
        "source-33-here",
        '"33% faster" here: at the same sizes one Gemm takes {least:.2f} to {most:.2f} of the time.',
        lambda frames: _one_over_two(frames, kind="call").groupby("N").first()[[*SOURCE]],
        "<= 0.689",
        _ORT + ", latency",
        kind="statement",
    ),
    Claim(
        "source-one-gemm",
        "One large Gemm is the better one, its Concat included: it takes {least:.2f} to {most:.2f} of the time of two.",
        _one_over_two,
        "<= 1.02",
        _ORT + ", GPU time",
        kind="statement",
    ),
    Claim(
        "source-one-gemm-tf32",
        "In TF32, which ONNX Runtime computes by default, it takes {least:.2f} to {most:.2f} of the time.",
        lambda frames: _one_over_two(frames, ", TF32"),
        "",
        "ONNX Runtime on CUDA, n x n matrices, TF32, GPU time",
        kind="statement",
    ),
)


def _errors(frames: Frames) -> pd.Series:
    rows = tables.where(frames.of("concat_gemm"), status="ok")
    return (rows["error"] / rows["tolerance"]).set_axis(
        pd.MultiIndex.from_arrays([rows["variant"], tables.label(rows), rows["dtype"]])
    )


LOG = (
    "The packed matmul of torch has no time in float16 at n = 4096. Its stream was done, and the GPU seemed busy, "
    "so the clock rejects it. We have not found out why.",
    "At n = 8192 step 2 reads more than predicted. The prediction is for running programs that keep step. If some are "
    "ahead, a strip can leave L2 before the others have read it. No counter shows that.",
    "The question is that of *Gemm Exploration with CUDA* in onnx-extended (2024): two Gemm and a Concat, or a Concat "
    "and one Gemm? Its table has ratios for n of 256, 512 and 1024 in float32, by the clock of the host.",
    "In float32 the library's kernel divides each number into its first eleven bits and the rest, and adds three "
    "matmuls in TF32. It keeps the tolerance of float32. Tensor cores take TF32 only where the elements along K are "
    "neighbours, so weights that are stored by rows are copied into columns first.",
    "At n = 3072 the output has 576 tiles of 128 x 256. A GPU with 132 multiprocessors computes them in five rounds, "
    "and the last one is hardly more than a third full. torch has tiles of more sizes.",
    "The search of max-autotune chooses an implementation for each matmul without the concat that follows. It gives up "
    "the views that the default of torch.compile writes into. This is a reading of the times, not of the code.",
    "Large matmuls draw as much power as the GPU may, and its clock depends on what ran before. Implementations in one "
    "table are timed in turn and can be compared. The same kernel in two tables may differ.",
    "Random problems: packed weights are concatenated before the clock starts, and are one matmul to PyTorch. "
    "Fusebook takes both as they are.",
    "Random problems, up to 64 rows: each weight is read once, and memory decides the time. Tiles are narrow there, "
    "and long sums along K are cut into parts. Tiles of 16 to 64 rows by 16 to 128 columns were tried, with sums in "
    "one to 64 parts. Hints to keep the weights in L2 changed nothing.",
    "Random problems, 65 to 512 rows: the last round of tiles is not full. Triton's tiles are powers of two. A "
    "library also has 192 columns, and divides the sums of the last round. Tiles of 64 x 32 to 128 x 256 were tried.",
    "Random problems, changed since: a table gives the tiles for each size, and says where PyTorch's matmul was "
    "faster. Formulas predicted both before. Matmuls without tensor cores for one and two rows are gone.",
    "Random problems: with odd widths and few steps along K, as 30164 x 222, threads have to store element by "
    "element. Such weights are copied side by side first, as one weight with one edge.",
)
