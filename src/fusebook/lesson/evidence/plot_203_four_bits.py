"""Evidence of the lesson on weights of four bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fusebook import tables
from fusebook.extras import extra
from fusebook.lesson import _decode, _weights
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

PAGE = _weights.WeightsPage
LOOK = _weights.look
OPERATORS = ("quantized_matmul",)
EXAMPLE = {"M": 1, "K": 8192, "N": 28672, "weights": "int4", "dtype": "float16"}
WORDS = "{M} x {K} by a weight of {N} x {K} in {weights}"
MEMORY = "Fusebook allocates the output, and above 96 rows 2NK bytes more. Eager PyTorch converts the weight each time."
STEPS = ("float16", "shift", "pairs", "tensor")
SHAPES = ((1, 8192, 28672), (8, 8192, 28672), (16, 8192, 28672))
DTYPES = ("float16",)
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS = {"quantized_matmul": ("_quantized",)}

_DENSE, _ORT = "torch in 16 bits", "ONNX Runtime"
FRAMES = {
    "sweep": Recorded("quantized_matmul", "rows", "float16", ("eager", _DENSE, "fusebook", _ORT)),
    "decode": Recorded("quantized_matmul", "decode", "float16", (_DENSE, "fusebook", _ORT)),
    "tinygemm": Recorded("quantized_matmul", "one", "bfloat16", (_DENSE, "tinygemm", "fusebook")),
    "int8": Recorded("quantized_matmul", "int8", "float16", (_DENSE, "fusebook", _ORT)),
    "steps": Measured("quantized_matmul_steps"),
    "tokens": Measured("quantized_matmul_tokens", {"implementation": "step"}, _decode.tokens),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _large(frame: pd.DataFrame) -> pd.DataFrame:
    """Weights of 120 MB and more."""
    return frame[frame["read_bytes"] >= 120e6]


def _copy(frame: pd.DataFrame) -> pd.Series:
    return tables.share(frame, "fusebook", of="copy")


def _one(frames: Frames) -> pd.DataFrame:
    return tables.where(frames["decode"], M=1)


def _over_one(frames: Frames, M: int) -> pd.Series:
    """The time of so many rows over that of one, by weight."""
    own = tables.where(frames["decode"], variant="fusebook", status="ok").set_index(["K", "N", "M"])["gpu_us"]
    return (own.xs(M, level="M") / own.xs(1, level="M")).dropna()


def _step(frames: Frames, M: int = 1) -> pd.Series:
    """GPU time by step, with so many rows."""
    steps = frames["steps"]
    found = steps[steps["shape"].str.startswith(f"{M}x")].set_index("step")["gpu_us"]
    if not {*STEPS, "fusebook"} <= {*found.index}:
        raise NotRecorded("some steps were not measured")
    return found


def _one_value(value: float) -> pd.Series:
    return pd.Series([value], index=[""])


def _issued(frames: Frames) -> pd.Series:
    """The share of all instructions that the GPU could issue in its GPU time, by step, for one row."""
    origin = frames["steps"].attrs.get("origin")
    if origin is None or origin.machine is None:
        raise NotRecorded("the machine is unknown")
    rate = origin.machine.sms * 4 * 32 * origin.machine.clocks["sm"] * 1e6
    weights = SHAPES[0][1] * SHAPES[0][2]
    count = _weights.per_weight(frames)
    return (count * weights / rate / (_step(frames)[count.index] * 1e-6)).drop("fusebook")


def _tokens(frames: Frames) -> pd.Series:
    """Tokens per second of the decode loop, by implementation."""
    return frames["tokens"].set_index("step")["tokens per second"]


def _every(frames: Frames) -> pd.DataFrame:
    rows = tables.where(frames.of("quantized_matmul"), variant="fusebook", status="ok")
    return rows.set_index([tables.label(rows), "dtype"])


def _crossover(frames: Frames) -> pd.Series:
    """The time of torch with 16 bits over Fusebook's, by rows of x."""
    return tables.ratio(frames["sweep"], _DENSE, "fusebook")


# Claims ---------------------------------------------------------------------------------------------------------------

_ONE = "one row of x, weights from 8.7 to 450 MB, float16, cold L2"
_LARGE = "one row of x, weights of 120 MB and more, float16"
_STEPS = "a weight of 28672 x 8192, float16"
_DECODE = "the same weight with one row of x; five weights, float16"
_ALL = "every recorded size"

CLAIMS = (
    # The lesson's findings
    Claim(
        "over-cublas",
        "With one row of x and a packed weight of 120 MB or more, `fusebook.quantized_matmul` should be at least 3.4x "
        "faster than cuBLAS with float16. It is {least:.2x} to {most:.2x} faster. The bytes promise 3.9x. A packed "
        "weight of 450 MB is read at {largest:.0%} of copy speed, and a smaller one, of 34.6 MB, at {middle:.0%}.",
        lambda frames: tables.ratio(_large(_one(frames)), _DENSE, "fusebook"),
        ">= 3.4",
        _LARGE,
        kind="target",
        lesson=True,
        numbers=lambda frames: {
            "middle": _copy(tables.where(_one(frames), K=8192, N=8192)).median(),
            "largest": _copy(tables.where(_one(frames), K=53248, N=16384)).median(),
        },
    ),
    Claim(
        "eight-like-one",
        "Eight rows take at most {most:.2f} times as long as one, and {median:.2f} times by the median.",
        lambda frames: _over_one(frames, 8),
        "<= 1.15",
        _DECODE,
        kind="target",
        lesson=True,
    ),
    Claim(
        "tinygemm-never-slower",
        "In bfloat16, tinygemm takes {least:.2f} to {most:.2f} times as long as `fusebook.quantized_matmul`.",
        lambda frames: tables.ratio(frames["tinygemm"], "tinygemm", "fusebook"),
        ">= 1",
        "one row of x, weights from 8.7 to 450 MB, bfloat16",
        kind="target",
        lesson=True,
    ),
    Claim(
        "pairs-under-budget",
        "Step 1 needs {shift:.1f} instructions for each weight, step 2 {pairs:.1f}, step 3 {tensor:.1f} and the "
        "library {fusebook:.1f}.",
        lambda frames: _weights.per_weight(frames)[["pairs", "tensor", "fusebook"]],
        "< 5",
        "loops of the compiled kernels, one row of x",
        lesson=True,
        numbers=lambda frames: dict(_weights.per_weight(frames)),
    ),
    # Targets
    Claim(
        "copy-large",
        "With one row of x, weights of 120 MB and more run at 85 % of copy speed.",
        lambda frames: _copy(_large(_one(frames))),
        ">= 0.85",
        _LARGE,
        kind="target",
    ),
    Claim(
        "copy-middle",
        "With one row of x, a weight of 8192 x 8192 runs at 78 % of copy speed.",
        lambda frames: _copy(tables.where(_one(frames), K=8192, N=8192)),
        ">= 0.78",
        "one row of x, 34.6 MB, float16",
        kind="target",
    ),
    Claim(
        "tinygemm-median",
        "`fusebook.quantized_matmul` is 1.3x faster than tinygemm by the median: {value:.2f}x.",
        lambda frames: _one_value(tables.ratio(frames["tinygemm"], "tinygemm", "fusebook").median()),
        ">= 1.3",
        "one row of x, weights from 8.7 to 450 MB, bfloat16",
        kind="target",
        numbers=lambda frames: {"value": tables.ratio(frames["tinygemm"], "tinygemm", "fusebook").median()},
    ),
    Claim(
        "sixteen-like-one",
        "Sixteen rows take at most 1.3 times as long as one: {least:.2f} to {most:.2f}.",
        lambda frames: _over_one(frames, 16),
        "<= 1.3",
        _DECODE,
        kind="target",
    ),
    Claim(
        "int8-copy",
        "With one row of x, weights of eight bits and 120 MB and more run at 92 % of copy speed.",
        lambda frames: _copy(_large(frames["int8"])),
        ">= 0.92",
        "one row of x, eight bits, float16",
        kind="target",
    ),
    Claim(
        "onnxruntime-never-slower",
        "From one to sixteen rows, MatMulNBits of ONNX Runtime takes {least:.2f} to {most:.2f} times as long as "
        "`fusebook.quantized_matmul`.",
        lambda frames: tables.ratio(frames["decode"], _ORT, "fusebook"),
        ">= 1",
        "1, 4, 8 and 16 rows, five weights, float16",
        kind="target",
    ),
    # Steps
    steps_correct(_STEPS + "; 1, 8 and 16 rows"),
    Claim(
        "shift-over-budget",
        "Step 1 needs more instructions for each weight than the budget of five.",
        lambda frames: _weights.per_weight(frames)[["shift"]],
        "> 5",
        "the loop of the compiled kernel",
    ),
    Claim(
        "pairs-faster",
        "With one row of x, step 2 is {median:.1x} faster than step 1.",
        lambda frames: _one_value((taken := _step(frames))["shift"] / taken["pairs"]),
        "> 1.02",
        _STEPS,
    ),
    Claim(
        "tensor-eight",
        "Step 3 takes {median:.2f} times as long for eight rows as for one. Step 2 takes {pairs:.1f} times as long.",
        lambda frames: _one_value(_step(frames, 8)["tensor"] / _step(frames)["tensor"]),
        "<= 1.15",
        _STEPS,
        numbers=lambda frames: {"pairs": _step(frames, 8)["pairs"] / _step(frames)["pairs"]},
    ),
    Claim(
        "tensor-over-pairs",
        "With one row of x, step 2 takes {one:.2f} times as long as step 3. With eight rows it takes {median:.1f} "
        "times as long.",
        lambda frames: _one_value((taken := _step(frames, 8))["pairs"] / taken["tensor"]),
        "> 1",
        _STEPS,
        numbers=lambda frames: {"one": (taken := _step(frames))["pairs"] / taken["tensor"]},
    ),
    Claim(
        "library-best-step",
        "With one row of x, `fusebook.quantized_matmul` is within 2 % of the best step, or faster.",
        lambda frames: _one_value(_step(frames)[[*STEPS]].min() / _step(frames)["fusebook"]),
        ">= 0.98",
        _STEPS,
    ),
    Claim(
        "issued",
        "In their GPU time, the steps issue {least:.0%} to {most:.0%} of the instructions that all schedulers could. "
        "The clock is that of the record's machine.",
        _issued,
        "",
        _STEPS + "; loops alone, one row of x",
    ),
    # The library
    Claim(
        "tokens",
        "A stack of 8 Llama layers decodes {fusebook:.0f} tokens per second, where bfloat16 gives {bfloat16:.0f} and "
        "tinygemm {tinygemm:.0f}.",
        lambda frames: (found := _tokens(frames))["fusebook"] / found.drop("fusebook"),
        "> 1",
        "one sequence with 512 tokens before, hidden states of 4096, random weights, a step in a CUDA graph",
        numbers=lambda frames: dict(_tokens(frames)),
    ),
    within_tolerance(_every, _ALL, "`fusebook.quantized_matmul` is within tolerance wherever it was timed."),
    deterministic(_every, _ALL, "Two runs of `fusebook.quantized_matmul` give the same bits."),
    Claim(
        "crossover",
        "With a weight of 8192 x 8192, cuBLAS with a float16 weight is faster at {lost} of {count} numbers of rows. "
        "The first one is {first}.",
        _crossover,
        "",
        "1 to 512 rows, float16; time of cuBLAS over that of Fusebook",
        numbers=lambda frames: {
            "lost": int((_crossover(frames) < 1 - tables.WITHIN).sum()),
            "first": next(iter(_lost_rows(frames)), "none"),
        },
    ),
)


def _lost_rows(frames: Frames) -> list[int]:
    wide = frames["sweep"].pivot_table("gpu_us", "M", "variant")
    return [int(M) for M in wide.index[wide[_DENSE] < (1 - tables.WITHIN) * wide["fusebook"]]]


LOG = (
    "The budget counts instructions of threads: multiprocessors times four schedulers times 32 threads times the "
    "clock. The count of a kernel is that of its longest loop, in the code that Triton's disassembler prints. It is "
    "divided by the weights that a thread converts in one turn.",
    "Steps 1 and 2 have one warp a program. With four warps, Triton loads x once for the program and exchanges it "
    "through shared memory, which adds barriers to each turn of the loop.",
    "The number of words in a row is an argument of the kernels, and so is the number of groups. Computed from K in "
    "the kernel, Triton does not see that they are multiples of 16, and loads one word at a time.",
    "The decode loop times a whole step in a CUDA graph, whose result is the input of the next one. Norms, rotary "
    "positions and attention over the cache are alike in all; `quantized_swiglu` computes gate and up in one launch.",
    "Times of Marlin are published, and not measured here: https://github.com/tile-ai/TileOPs/issues/1874. On one H200 "
    "a weight of 8192 x 8192 takes 20.3 us, one of 8192 x 16384 38.1 us, and one of 8192 x 81920 138.4 us. That is 37 "
    "to 54 % of the GPU's bandwidth.",
    "The package of ONNX Runtime 1.31 has its fpA_intB kernels for four bits in blocks of 32 alone, where the weight "
    "is a constant of the graph. Groups of 128 take other kernels, whatever ORT_FPA_INTB_GEMM says.",
    "Random problems: the warps of one program divide a sum over K, and programs do not. So a weight of few rows and "
    "a long K keeps a few multiprocessors busy. A library's matmul divides such a sum among programs.",
    "ONNX Runtime gets the weight as an input of the graph, so that one session serves all values of it. tinygemm "
    "takes bfloat16 alone.",
)
