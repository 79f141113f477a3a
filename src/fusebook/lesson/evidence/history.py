"""What became of the advice of Theano's manual *Using the GPU* (2012 to 2014), as page 001 shows it.

The records are those of a page that measured each piece of advice. Nothing measures them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fusebook import tables
from fusebook.extras import extra
from fusebook.lesson.evidence import Claim, Frames, Measured, Recorded

with extra("book"):
    import pandas as pd

__all__ = ["ADVICE", "CLAIMS", "FRAMES", "GPU", "SOURCES", "Advice"]

#: The page measured these on one GPU, once. It measures nothing today.
GPU = "nvidia-h200"

#: What the book grew from, and the lessons on each; the manual has none of its own.
SOURCES: dict[str, tuple[str, ...]] = {
    "Theano, 2012": (),
    "Triton, 2022": ("plot_102_softmax",),
    "PyTorch, 2023": ("plot_302_numpy_to_cuda",),
    "onnx-extended, 2024, ScatterND": ("plot_103_scatter_nd", "plot_501_onnxruntime"),
    "onnx-extended, 2024, Gemm": ("plot_201_gemm_concat",),
}

FRAMES = {
    **{
        name: Measured(f"using_{name}")
        for name in (
            "answers", "chains", "clock", "errors", "memory", "operations", "profile", "switches", "thousand", "types",
        )
    },
    "pair": Recorded("add_sub", "8192x8192", variants=("eager", "torch.compile")),
}  # fmt: skip


class Advice(NamedTuple):
    """A piece of advice, what to do today, and the claim that decides whether it holds."""

    then: str
    now: str
    claim: Claim


def _answer(frames: Frames, question: str) -> str:
    answers = frames["answers"]
    return str(answers.set_index("question")["answer"][question])


def _us(frames: Frames) -> pd.Series:
    """Microseconds of one of a thousand exponentials, by implementation."""
    return frames["thousand"].set_index("way")["us"]


def _gains(frames: Frames, *names: str, column: str = "GPU us") -> pd.Series:
    """CPU time over GPU time, by operation."""
    work = frames["operations"].set_index("what")
    return (work["CPU us"] / work[column]).loc[list(names) or list(work.index)]


def _memory(frames: Frames) -> pd.Series:
    return frames["memory"].set_index("what")["us"]


def _switched(frames: Frames, column: str) -> float:
    """Divisions without a switch over those with all switches of fast math, in time or in error."""
    rows = frames["switches"].set_index(["work", "switch"])[column]
    return float(rows["divisions", "none"] / rows["divisions", "'--use_fast_math"])


def _exp(frames: Frames, dtype: str) -> float:
    return float(frames["types"].set_index("dtype")["exp us"][dtype])


def _rates(frames: Frames) -> Mapping[str, float]:
    rates: Mapping[str, float] = frames["types"].attrs["origin"].machine.rates
    return rates


def _carried(frames: Frames) -> float:
    """The share of transfers in the GPU's time of ten training steps."""
    parts = frames["profile"].set_index("operation")["GPU us"]
    parts = parts[parts.index.str.startswith("aten::")]
    return float(parts[parts.index.str.contains("copy_|local_scalar")].sum() / parts.sum())


def _advice(
    name: str,
    then: str,
    now: str,
    text: str,
    value: Callable[[Frames], Any],
    condition: str,
    scope: str = "GPU time, or as the question says",
    **numbers: Callable[[Frames], Any],
) -> Advice:
    """A piece of advice whose claim is about one value, or about a series of them."""

    def values(frames: Frames) -> pd.Series:
        found = value(frames)
        return found if isinstance(found, pd.Series) else pd.Series({"": float(found)})

    def more(frames: Frames) -> dict[str, Any]:
        return {key: number(frames) for key, number in numbers.items()}

    return Advice(then, now, Claim(f"theano-{name}", text, values, condition, scope, "statement", numbers=more))


_LATENCY = "latency, GPU against all cores of the CPU of its machine"
_LOOP = "a loop over the exponential of 230400 elements"
_HEAVY = "matrix product, 4096", "convolution, 3 x 3", "exp of 67 million"

ADVICE = (
    _advice(
        "on-gpu",
        "Check that the GPU is used",
        "A tensor has a device, and an operation runs where its operands are. The profiler names the kernels.",
        "an operation on GPU tensors returns a tensor on {device}",
        lambda frames: _answer(frames, "device").startswith("cuda"),
        "== 1",
        device=lambda frames: _answer(frames, "device"),
    ),
    _advice(
        "left-there",
        "Leave results on the GPU",
        "The default. Call .cpu() only where the CPU needs the values.",
        "copied back, a loop takes {median:.0f} times as long",
        lambda frames: (us := _us(frames))["GPU, copied back"] / us["GPU, left there"],
        "> 1.1",
        _LOOP,
    ),
    _advice(
        "borrow",
        "Reuse the memory of results (borrow)",
        "Pass out= where the CPU launches more slowly than the GPU computes. A CUDA graph gains more.",
        "with out= a loop takes {median:.2f} of the time",
        lambda frames: (us := _us(frames))["the same, into one tensor"] / us["GPU, left there"],
        "< 0.9",
        _LOOP,
    ),
    _advice(
        "only-float32",
        "Only float32 is accelerated",
        "Every dtype is. float64 is slow on GPUs that are not made for data centers.",
        "matmuls in float64 run at {median:.2f} of the rate of float32",
        lambda frames: (rates := _rates(frames))["float64"] / rates["float32"],
        "< 0.5",
        "measured rates of square matmuls",
    ),
    _advice(
        "prefer-float32",
        "Use float32 and not float64 wherever you can",
        "Still true. bf16 and TF32 are faster again in matmuls.",
        "exp takes {median:.1f} times as long in float64; bf16 multiplies {half:.0f} times as fast as float32",
        lambda frames: _exp(frames, "float64") / _exp(frames, "float32"),
        "> 1.1",
        "exp of 134 million elements, cold L2",
        half=lambda frames: (rates := _rates(frames))["bfloat16"] / rates["float32"],
    ),
    _advice(
        "accelerated",
        "Large matmuls, convolutions and elementwise operations: 5 to 50 times faster",
        "As much, against all cores of a CPU.",
        "{product:.0f}, {convolution:.0f} and {exp:.0f} times",
        lambda frames: (_gains(frames, *_HEAVY) - 27.5).abs(),
        "<= 22.5",
        f"{_LATENCY}; distance from 27.5, the middle of 5 to 50",
        product=lambda frames: _gains(frames, _HEAVY[0]).iloc[0],
        convolution=lambda frames: _gains(frames, _HEAVY[1]).iloc[0],
        exp=lambda frames: _gains(frames, _HEAVY[2]).iloc[0],
    ),
    _advice(
        "large-enough",
        "Arguments must be large enough",
        "Still true. A small operation costs its launch.",
        "exp of 230400 elements: {small:.1f} times; of 67 million: {large:.0f} times",
        lambda frames: _gains(frames, "exp of 67 million").iloc[0] / _gains(frames, "exp of 230400").iloc[0],
        "> 2",
        _LATENCY,
        small=lambda frames: _gains(frames, "exp of 230400").iloc[0],
        large=lambda frames: _gains(frames, "exp of 67 million").iloc[0],
    ),
    _advice(
        "views",
        "Reshaping and shuffling dimensions: equally fast on both",
        "True of views, which move nothing. A transposition that moves data is far faster on the GPU.",
        "a transposed view: {median:.2f} times as fast",
        lambda frames: _gains(frames, "transposed, a view").map(lambda gain: max(gain, 1 / gain)),
        "< 2",
        f"{_LATENCY}; the faster over the slower",
    ),
    _advice(
        "indexing",
        "Indexing: equally fast on both",
        "Indexing moves data, and a GPU has more bandwidth.",
        "rows by index: {median:.0f} times as fast",
        lambda frames: _gains(frames, "rows by index"),
        "< 2",
        _LATENCY,
    ),
    _advice(
        "sums",
        "Sums over rows and columns can be slower",
        "A sum reads its input at the bandwidth of memory.",
        "rows {rows:.0f}, columns {columns:.0f} times as fast",
        lambda frames: _gains(frames, "sum of each row", "sum of each column").min(),
        "< 1",
        _LATENCY,
        rows=lambda frames: _gains(frames, "sum of each row").iloc[0],
        columns=lambda frames: _gains(frames, "sum of each column").iloc[0],
    ),
    _advice(
        "copies",
        "Copies often cancel the advantage",
        "Keep data on the GPU. Pin, reuse and overlap what has to move.",
        "with copies, {lost:.0f} of {all:.0f} operations are slower than on the CPU",
        lambda frames: (_gains(frames, column="there and back us") < 1).mean(),
        ">= 0.5",
        f"{_LATENCY}, operands and result copied in pageable memory",
        lost=lambda frames: (_gains(frames, column="there and back us") < 1).sum(),
        all=lambda frames: len(_gains(frames)),
    ),
    _advice(
        "chains",
        "Copies cancel most of the advantage of one or two functions",
        "Still true with pageable memory.",
        "with copies, one tanh takes {least:.0f} times as long or more",
        lambda frames: (c := frames["chains"].set_index("operations"))["GPU, pageable"][:2] / c["GPU, left there"][:2],
        "> 2",
        "one and two tanh of 16 million elements; time with copies over that without",
    ),
    _advice(
        "keep-memory",
        "allow_gc=False: keep the memory of intermediate results",
        "PyTorch's caching allocator does that.",
        "a block that is given back after each call costs {median:.1f} times the time",
        lambda frames: (us := _memory(frames))["a block that is given back"] / us["a block that was kept"],
        "> 1.02",
        "exp of 230400 elements, latency",
    ),
    _advice(
        "profile",
        "Profile: is time used sensibly?",
        "torch.profiler answers that.",
        "transfers took {share:.0%} of the GPU's time; pinned memory makes the program {median:.1f} times as fast",
        lambda frames: (p := frames["profile"].iloc[0])["wall us"] / p["wall us, pinned"],
        "> 1.1",
        "ten training steps of a small network",
        share=_carried,
    ),
    _advice(
        "fast-math",
        "nvcc --use_fast_math",
        "It helps a kernel that divides, and not one that waits for memory.",
        "64 divisions for each element: {median:.1f} times as fast, and {error:.1f} times the error",
        lambda frames: _switched(frames, "us"),
        "> 1.1",
        "16 million elements, cold L2",
        error=lambda frames: 1 / _switched(frames, "error"),
    ),
    _advice(
        "no-cpu",
        "assert_no_cpu_op: no operation on the CPU by accident",
        "PyTorch refuses operands on two devices. torch.cuda.set_sync_debug_mode finds hidden waits.",
        "a GPU tensor plus a CPU tensor: an error",
        lambda frames: _answer(frames, "a tensor of the GPU plus one of the CPU") == "nothing",
        "== 1",
    ),
    _advice(
        "asynchronous",
        "Times of single calls mislead, because calls are asynchronous",
        "Still true. Synchronize, or use events: lesson 002.",
        "the call of a matmul returns after {median:.1%} of the time that the matmul takes",
        lambda frames: (clock := frames["clock"].iloc[0])["returns us"] / clock["done us"],
        "< 0.5",
        "one matmul of 8192 x 8192 in bf16",
    ),
    _advice(
        "blocking",
        "CUDA_LAUNCH_BLOCKING=1 finds errors",
        "Still true.",
        "an error is raised at `{blocking}`, and without it at `{late}`",
        lambda frames: _raised(frames, 1) == "y = x[wrong]",
        "== 1",
        "an index out of range",
        blocking=lambda frames: _raised(frames, 1),
        late=lambda frames: _raised(frames, 0),
    ),
    _advice(
        "set-value",
        "set_value changes shared data",
        "x.copy_(new) writes into the memory of a tensor.",
        "a CUDA graph that was replayed saw the new values",
        lambda frames: _answer(frames, "a graph sees values copied in") == "yes",
        "== 1",
    ),
    _advice(
        "int32",
        "int32 with float32 gives float64: cast one of them",
        "Not in PyTorch. NumPy still does that.",
        "{dtype}",
        lambda frames: _answer(frames, "int32 times float32") == "torch.float64",
        "== 1",
        dtype=lambda frames: _answer(frames, "int32 times float32"),
    ),
    _advice(
        "mean",
        "Cast around the mean",
        "The mean of float32 is float32.",
        "{dtype}",
        lambda frames: _answer(frames, "mean of float32") == "torch.float64",
        "== 1",
        dtype=lambda frames: _answer(frames, "mean of float32"),
    ),
    _advice(
        "complex",
        "Complex numbers are broken",
        "They work.",
        "exp of i is {found}",
        lambda frames: _answer(frames, "exp of i").strip("()") != "0.540+0.841j",
        "== 1",
        found=lambda frames: _answer(frames, "exp of i"),
    ),
    _advice(
        "differ",
        "Results differ from those of the CPU",
        "By rounding.",
        "exp by at most {median:.1f} eps",
        lambda frames: float(_answer(frames, "CPU and GPU differ by, in eps")),
        "> 0",
        "230400 elements, float32",
    ),
    _advice(
        "one-output",
        "Fusion works for a single output only",
        "torch.compile and Triton fuse several outputs: lesson 101.",
        "x + y and x - y, compiled: {median:.2f} times as fast",
        lambda frames: tables.ratio(frames["pair"], "eager", "torch.compile").iloc[0],
        "< 1.1",
        "8192 x 8192, float32, cold L2",
    ),
)

CLAIMS = tuple(one.claim for one in ADVICE)


def _raised(frames: Frames, blocking: int) -> str:
    return str(frames["errors"].set_index("blocking")["raised at"][blocking])
