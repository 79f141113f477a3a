"""Evidence of the lesson on elementwise kernels."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

import fusebook
from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.lesson.evidence import Claim, Frames, Measured, NotRecorded, Recorded, steps_correct, within_tolerance

with extra("book"):
    import pandas as pd

OPERATORS = ("add_sub", "multiply", "multiply_add", "silu", "add_add_multiply", "double", "exp")
EXAMPLE = {"M": 8192, "N": 8192, "dtype": "float32"}
WORDS = "{M} x {N} in {dtype}"
STEPS = ("torch_multiply", "grid", "strided", "eager", "both")
SHAPES = ((8192, 8192),)
DTYPES = ("float32",)
KERNELS: Mapping[str, tuple[str, ...]] = {}
COUNTED = (4096, 4096)

# Steps that only the evidence shows -----------------------------------------------------------------------------------

_BY_FOUR = """
extern "C" __global__
void multiply_by_four(float* out, const float* x, const float* y, long long n)
{
    const long long i = (long long) blockIdx.x * blockDim.x + threadIdx.x;
    const long long fours = n / 4;
    if (i < fours) {
        const float4 a = reinterpret_cast<const float4*>(x)[i];
        const float4 b = reinterpret_cast<const float4*>(y)[i];
        const float4 c = {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
        reinterpret_cast<float4*>(out)[i] = c;
    }
    if (i < n % 4)  // what is left
        out[4 * fours + i] = x[4 * fours + i] * y[4 * fours + i];
}
"""


@functools.cache
def _by_four() -> Any:
    import cupy

    return cupy.RawKernel(_BY_FOUR, "multiply_by_four")


def multiply_by_four(x: Tensor, y: Tensor) -> Tensor:
    """The product in CUDA C with 16 bytes per thread, of contiguous float32 on a GPU."""
    import cupy
    import numpy as np

    out, n = torch.empty_like(x), x.numel()
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        given = [np.uint64(t.data_ptr()) for t in (out, x, y)]
        _by_four()((max(triton.cdiv(n, 1024), 1),), (256,), (*given, np.int64(n)))
    return out


def _with_cupy(function: Callable[..., Any]) -> Callable[..., Any] | None:
    return function if importlib.util.find_spec("cupy") else None


def _transposed(function: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """A product whose second operand is transposed; the counts leave out the copy that makes it so."""
    return function(x, y.mT.contiguous().mT)


EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {
    "CUDA C": lambda steps: _with_cupy(OPS["multiply"].variants["CUDA C"].run),
    "CUDA C, 16 bytes a thread": lambda steps: _with_cupy(multiply_by_four),
    "strided, transposed": lambda steps: functools.partial(_transposed, steps["strided"]),
    "fusebook.multiply, transposed": lambda steps: functools.partial(_transposed, fusebook.multiply),
}
OTHER_STEPS = dict.fromkeys(("torch_multiply", "grid", "strided", *EXTRA_STEPS), "multiply")


# Records --------------------------------------------------------------------------------------------------------------

_TWO = ("multiply", "multiply_add")
FRAMES: dict[str, Any] = {
    "sweep": Recorded("add_sub", "large", "float32"),
    "steps": Measured("elementwise_steps"),
    "counters": Measured("elementwise_counters"),
    **{op: Recorded(op, "large", "float32") for op in OPERATORS[1:]},
    **{f"small {op}": Recorded(op, "small", "float32") for op in OPERATORS},
    **{f"half {op}": Recorded(op, "8192x8192", "bfloat16") for op in OPERATORS},
    **{f"shapes {op}": Recorded(op, "shapes", "float32") for op in _TWO},
}


# What claims read -----------------------------------------------------------------------------------------------------

_CHAINS = ("add_sub", "multiply_add", "silu", "add_add_multiply")
#: What fusing a chain saves by its passes over memory.
_PREDICTED = {"add_sub": 6 / 4, "multiply_add": 6 / 4, "silu": 5 / 2, "add_add_multiply": 9 / 5}


def _large(frames: Frames, ops: Sequence[str] = OPERATORS) -> pd.DataFrame:
    """The large sizes of operators."""
    return pd.concat([frames["sweep" if op == OPERATORS[0] else op] for op in ops], ignore_index=True)


def _small(frames: Frames) -> pd.DataFrame:
    return pd.concat([frames[f"small {op}"] for op in OPERATORS], ignore_index=True)


def _own(frames: Frames) -> pd.DataFrame:
    """The library's rows of all operators and sizes."""
    rows = pd.concat([tables.where(frames.of(op), variant="fusebook") for op in OPERATORS], ignore_index=True)
    rows = rows.assign(size=tables.label(rows)).rename(columns={"op": "operator"})
    return rows.set_index(["operator", "size", "dtype"])


def _of(frames: Frames, limit: str, ops: Sequence[str] = OPERATORS, M: int = 0) -> pd.Series:
    """The share of a limit that the library reaches where 256 MiB and more are moved."""
    rows = tables.where(_large(frames, ops), variant="fusebook", status="ok")
    rows = rows[(rows["read_bytes"] + rows["write_bytes"] >= 256 * 2**20) & (rows["M"] >= M)]
    return (rows[f"{limit}_us"] / rows["gpu_us"]).set_axis(rows["op"] + " " + tables.label(rows))


def _as_predicted(frames: Frames) -> pd.Series:
    """What fusing gains at 8192 x 8192, over what its passes predict, less one."""
    gain = {op: tables.ratio(tables.where(_large(frames, [op]), M=8192), "eager", "fusebook").iloc[0] for op in _CHAINS}
    return (pd.Series(gain) / pd.Series(_PREDICTED) - 1).abs()


def _steps(frames: Frames) -> pd.Series:
    return frames["steps"].set_index("step")["gpu_us"]


def _step_ratio(step: str, over: str) -> Callable[[Frames], pd.Series]:
    def ratio(frames: Frames) -> pd.Series:
        us = _steps(frames)
        if not {step, over} <= {*us.index}:
            raise NotRecorded(f"{step} or {over} was not measured")
        return pd.Series({"8192 x 8192": us[step] / us[over]})

    return ratio


def _counted(frames: Frames) -> pd.DataFrame:
    """By step: elements read over those of both operands, sectors per load and occupancy of its largest kernel."""
    seen = frames["counters"]
    seen = seen[~seen["kernel"].str.startswith("native")]
    largest = seen.loc[seen.groupby("step", sort=False)["read"].idxmax()].set_index("step")
    read = seen.groupby("step", sort=False)["read"].sum() / (2 * 4 * COUNTED[0] * COUNTED[1])
    return largest.assign(read=read)


def _more_sectors(frames: Frames, step: str, over: str) -> pd.Series:
    sectors = _counted(frames)["sectors"]
    return pd.Series({"4096 x 4096": sectors[step] / sectors[over]})


def _latency(frames: Frames) -> pd.Series:
    """The latency of small calls over that of eager PyTorch, by operator, size and dtype."""
    return tables.ratio(_small(frames), "fusebook", "eager", "call")


def _floor(frames: Frames) -> pd.Series:
    rows = tables.where(frames["small exp"], M=480, status="ok").set_index("variant")
    return (rows["gpu_warm_us"] / (rows["floor_warm_us"] + rows["roof_us"]))[["fusebook"]]


# Claims ---------------------------------------------------------------------------------------------------------------

_SWEEP = "2048 to 8192 rows of 8192 elements, float32, cold L2"
_FOUR = "four chains; " + _SWEEP
_EVERY = "seven expressions; " + _SWEEP
_STEP = "8192 x 8192, float32, cold L2"
_COUNTERS = "4096 x 4096, float32"

CLAIMS = (
    # The lesson's findings
    Claim(
        "gain-over-eager",
        "Predicted 1.5x faster than eager, measured {median:.2x} (median).",
        lambda frames: tables.ratio(frames["sweep"], "eager", "fusebook"),
        ">= 1.4",
        _SWEEP,
        lesson=True,
    ),
    Claim(
        "compile-as-fast",
        "Let torch.compile fuse chains of elementwise operations. At large sizes, a hand-written kernel takes "
        "{least:.2f} to {most:.2f} times as long, so it gains 5 % at most.",
        lambda frames: tables.ratio(_large(frames, _CHAINS), "fusebook", "torch.compile"),
        ">= 0.95",
        _FOUR,
        lesson=True,
    ),
    Claim(
        "cuda-c-vector",
        "In CUDA C, 16 bytes per thread are as fast as Fusebook: {median:.2f} times its GPU time.",
        _step_ratio("CUDA C, 16 bytes a thread", "fusebook.multiply"),
        "<= 1.02",
        _STEP + "; a product",
    ),
    Claim(
        "cuda-c-element",
        "In CUDA C, one element per thread takes {least:.2f} to {most:.2f} times as long as Fusebook, which loads 16 "
        "bytes per thread.",
        lambda frames: tables.ratio(_large(frames), "CUDA C", "fusebook"),
        "> 1.02",
        _EVERY + "; where CUDA C has a time",
        lesson=True,
    ),
    Claim(
        "compile-never-slower",
        "Fusebook is not slower than torch.compile by more than 2 %.",
        lambda frames: tables.ratio(_large(frames, _CHAINS), "fusebook", "torch.compile"),
        "<= 1.02",
        _FOUR,
    ),
    Claim(
        "as-predicted",
        "Each chain is as many times faster as its passes over memory predict, within 10 %.",
        _as_predicted,
        "<= 0.1",
        "four chains; " + _STEP,
    ),
    # Correctness
    within_tolerance(
        _own,
        "every recorded size of seven expressions, float32 and bfloat16",
        "Fusebook is within tolerance wherever it was timed.",
    ),
    steps_correct(_STEP, "Every step gives the elements of PyTorch.", keys=["step"]),
    # Hardware counters
    Claim(
        "counters-once",
        "The hardware counters show that each kernel reads both operands once, within 2 %.",
        lambda frames: (_counted(frames)["read"] - 1).abs(),
        "< 0.02",
        _COUNTERS + "; a product",
    ),
    Claim(
        "counters-sectors",
        "A load of the library's kernel asks for {median:.0f} sectors, as 16 bytes per thread do. One element per "
        "thread in CUDA C asks for {cuda:.0f}.",
        lambda frames: _counted(frames)["sectors"].filter(items=["fusebook.multiply"]),
        "== 16",
        _COUNTERS + "; a product",
        numbers=lambda frames: {"cuda": _counted(frames)["sectors"].get("CUDA C")},
    ),
    Claim(
        "counters-transposed",
        "With a transposed operand, the loads of step 2 ask for {median:.1f} times as many sectors as the library's "
        "tiles.",
        lambda frames: _more_sectors(frames, "strided, transposed", "fusebook.multiply, transposed"),
        "> 1",
        _COUNTERS + "; a product",
    ),
    Claim(
        "more-warps",
        "More warps are not more speed. CUDA C with one element per thread takes {median:.2f} times as long as step 2, "
        "with {many:.0f} % of the warps against {few:.0f} %.",
        _step_ratio("CUDA C", "strided"),
        "> 1",
        _STEP + "; warps at 4096 x 4096",
        numbers=lambda frames: {
            "many": _counted(frames)["occupancy"].get("CUDA C"),
            "few": _counted(frames)["occupancy"].get("strided"),
        },
    ),
    # Targets
    Claim(
        "target-chains",
        "Chains of 8192 x 8192 elements reach 95 % of the roofline.",
        lambda frames: _of(frames, "roof", _CHAINS, 8192),
        ">= 0.95",
        "four chains; " + _STEP,
        kind="target",
    ),
    Claim(
        "target-copy",
        "Kernels that move 256 MiB and more reach 95 % of copy speed.",
        lambda frames: _of(frames, "copy"),
        ">= 0.95",
        _EVERY,
        kind="target",
    ),
    Claim(
        "target-small-exp",
        "exp of 230400 elements takes 1.1 times the time of an empty kernel plus the roofline: {median:.2f} times.",
        _floor,
        "<= 1.1",
        "480 x 480, float32, warm L2",
        kind="target",
    ),
    Claim(
        "roof",
        "Kernels that move 256 MiB and more reach 95 % of the roofline. The least is {least:.1%}.",
        lambda frames: _of(frames, "roof"),
        ">= 0.95",
        _EVERY,
    ),
    Claim(
        "latency-small",
        "The latency of a small call is {least:.2f} to {most:.2f} times that of eager PyTorch. In the median it is "
        "{chains:.2f} times for chains, which eager launches as several kernels, and {single:.2f} times for one "
        "operation.",
        _latency,
        "",
        "20 x 10 and 480 x 480, float32",
        numbers=lambda frames: {
            name: _latency(frames).groupby("op").median()[[*ops]].median()
            for name, ops in (("chains", _CHAINS), ("single", ("multiply", "double", "exp")))
        },
    ),
)

LOG = (
    "The library's kernel takes its expression as an argument: a small function of the operands' values. Triton "
    "compiles the kernel for each expression, which costs nothing at run time.",
    "A mask that may end within 16 bytes keeps the compiler from wide loads. The library masks whole groups of 16 "
    "bytes, and the last block takes what is left by elements.",
    "The hardware has powers of two, so an exponential is computed as a power of two. The product with log2(e) is "
    "rounded, and the error grows with x. A few more operations correct it.",
    "An operand that is transposed goes through tiles, which are read along its rows and written along those of the "
    "result.",
    "Random problems: rows that are narrow and cut from a wider matrix leave tiles mostly empty. So the kernel counts "
    "elements along the result, and each group of neighbours finds its place by one division.",
    "Random problems: up to 65536 elements are taken one by one, since that needs fewer instructions. Rows of an odd "
    "number of elements are, too. For more elements, blocks of a quarter to twice the size were tried: they are "
    "within a few percent of each other.",
)
