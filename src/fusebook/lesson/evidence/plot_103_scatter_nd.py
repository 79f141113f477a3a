"""Evidence of the lesson on masked ScatterND."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

import fusebook
from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.lesson.evidence import Claim, Frames, Measured, NotRecorded, Recorded, deterministic, within_tolerance
from fusebook.measure import bench

with extra("book"):
    import pandas as pd

OPERATORS = ("masked_scatter_nd_of_shape", "scatter_nd_of_shape", "embedding_backward")
EXAMPLE = {"R": 32000, "D": 4096, "n": 2048, "law": "uniform", "dtype": "float32"}
WORDS = "{n} updates of {D} elements to a table of {R} rows in {dtype}"
STEPS = ("eager", "atomic", "owner", "sorted")
#: Rows, columns and updates: the sizes of the source, and a Llama's embedding.
SHAPES = ((256, 512, 512), (512, 1024, 1024), (1024, 2048, 2048), (32000, 4096, 2048))
DTYPES = ("float32",)
BY = "by rows and columns of the table, float32"
XLABEL = "rows of the table, M"
KERNELS = {"masked_scatter_nd_of_shape": ("_scatter_nd_sort", "_scatter_nd_segments")}
#: Rows, columns and updates at which Nsight Compute counts.
COUNTED = (4096, 4096, 2048)

#: Bytes of the updates that are counted, in float32.
_UPDATES = 4 * COUNTED[1] * COUNTED[2]

_OP = OPS["masked_scatter_nd_of_shape"]
_MAIN = ("eager", "torch.compile", "ONNX Runtime", "fusebook")
_STRATEGIES = ("fusebook atomic", "fusebook sorted", "fusebook owner")


# Kernels of the source, in CUDA C -------------------------------------------------------------------------------------
#
# A thread for each column: it writes zeros down its column and goes over all updates. `SHARED` loads 128 indices at a
# time into shared memory. Where `WHOSE` is threadIdx.x, it is the published mistake: the index of the thread.

_BY_COLUMN = """
extern "C" __global__
void by_column(float* __restrict__ y, const long long* __restrict__ k, const float* __restrict__ u, long long R,
               long long D, int n)
{
    const long long c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= D) return;
    for (long long r = 0; r < R; ++r) y[r * D + c] = 0;
    for (int i = 0; i < n; ++i)
        if (k[i] != -1) y[k[i] * D + c] += u[i * D + c];
}

extern "C" __global__
void by_column_shared(float* __restrict__ y, const long long* __restrict__ k, const float* __restrict__ u, long long R,
                      long long D, int n)
{
    __shared__ long long some[128];
    const long long c = blockIdx.x * 128 + threadIdx.x;
    if (c < D)
        for (long long r = 0; r < R; ++r) y[r * D + c] = 0;
    for (int begin = 0; begin < n; begin += 128) {
        const int m = min(128, n - begin);
        __syncthreads();  // all threads are done with the last 128
        if (threadIdx.x < m) some[threadIdx.x] = k[begin + threadIdx.x];
        __syncthreads();
        if (c < D)
            for (int i = 0; i < m; ++i)
                if (some[WHOSE] != -1) y[some[WHOSE] * D + c] += u[(begin + i) * D + c];
    }
}
"""


@functools.cache
def _kernel(name: str, whose: str) -> Any:
    import cupy

    return cupy.RawModule(code=_BY_COLUMN.replace("WHOSE", whose)).get_function(name)


def by_column(
    shape: tuple[int, int], indices: Tensor, updates: Tensor, name: str = "by_column", whose: str = "i"
) -> Tensor:
    """A kernel of the source, of float32 on a GPU."""
    import cupy
    import numpy as np

    y = updates.new_empty(shape)
    pointers = [np.uint64(t.data_ptr()) for t in (y, indices, updates)]
    sizes = np.int64(shape[0]), np.int64(shape[1]), np.int32(len(indices))
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        _kernel(name, whose)((triton.cdiv(shape[1], 128),), (128,), (*pointers, *sizes))
    return y


def _with_cupy(function: Callable[..., Any]) -> Callable[..., Any] | None:
    return function if importlib.util.find_spec("cupy") else None


@functools.lru_cache(maxsize=1)
def _session(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return _OP.variants["ONNX Runtime"].given(*given)


def _onnx(*given: Any) -> Any:
    return _OP.variants["ONNX Runtime"].run(*_session(given))


_shared = functools.partial(by_column, name="by_column_shared")
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {
    "by column": lambda steps: _with_cupy(by_column),
    "by column, shared": lambda steps: _with_cupy(_shared),
    "as published": lambda steps: _with_cupy(functools.partial(_shared, whose="threadIdx.x")),
    "fusebook sorted": lambda steps: functools.partial(
        fusebook.masked_scatter_nd_of_shape, check=False, strategy="sorted"
    ),
    "ONNX Runtime": lambda steps: None if bench.missing(_OP.variants["ONNX Runtime"]) else _onnx,
}


# Records --------------------------------------------------------------------------------------------------------------


class _Steps(Measured):
    """Steps, and by which size the lesson's table shows them."""

    def renamed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The same rows, and where they are in the table."""
        return frame.assign(at=frame["shape"].str.rpartition("x")[0].str.replace("x", " x "))


_SQUARES = "256x512x512,512x1024x1024,1024x2048x2048,2048x4096x4096,4096x8192x8192,8192x16384x16384"
_CHECKED = "256x512x512,2048x4096x4096,8192x16384x16384"
_NAME = "masked_scatter_nd_of_shape"
FRAMES: dict[str, Any] = {
    "sweep": Recorded(_NAME, _SQUARES, "float32", _MAIN),
    "llama": Recorded(_NAME, "llama", "float32,float16", _MAIN),
    "contention": Recorded(_NAME, "contention", "float32,float16", _MAIN),
    "strategies": Recorded(_NAME, "llama,contention", "float32,float16", _STRATEGIES),
    "checked": Recorded(_NAME, _CHECKED, "float32", ("fusebook sorted", "fusebook, checked")),
    "components": Recorded("scatter_nd_of_shape", "components", "float32"),
    "embedding": Recorded("embedding_backward", "llama", "float32"),
    "steps": _Steps("scatter_nd_source"),
    "counters": Measured("scatter_nd_counters"),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _rows(frame: pd.DataFrame, variant: str, **where: Any) -> pd.DataFrame:
    rows = tables.where(frame, variant=variant, **where)
    return rows.set_index([tables.label(rows), "dtype"])


def _every(frames: Frames, variant: str) -> pd.DataFrame:
    return _rows(frames.of(_NAME), variant)


def _of_roof(frame: pd.DataFrame, variant: str, **where: Any) -> pd.Series:
    """GPU time over the roofline."""
    rows = _rows(frame, variant, status="ok", **where)
    if not len(rows):
        raise NotRecorded(f"{variant} was not measured")
    return rows["gpu_us"] / rows["roof_us"]


def _predicted(R: int, D: int, n: int) -> float:
    """What the eager chain moves over what has to move, in float32."""
    dims = {"R": R, "D": D, "n": n, "law": "uniform"}
    least, cost = _OP.cost(4, **dims), _OP.variants["eager"].cost
    assert cost is not None
    chain = cost(4, **dims)
    return (chain.read + chain.write) / (least.read + least.write)


def _repeats(frames: Frames) -> pd.Series:
    """Time of sorted updates with repeated indices over that with uniform ones."""
    rows = tables.where(frames["strategies"], variant="fusebook sorted", R=32000, n=2048, dtype="float32")
    us = rows.drop_duplicates("law").set_index("law")["gpu_us"]
    return us[["zipf", "equal"]] / us["uniform"]


def _source(frames: Frames, variant: str, over: str) -> pd.Series:
    """Time of one implementation over another's at the three sizes of the source."""
    return tables.ratio(tables.where(frames["sweep"], R=lambda R: R <= 1024), variant, over)


def _llama(frames: Frames, variant: str, over: str) -> pd.Series:
    return tables.ratio(tables.where(frames["llama"], dtype="float32", n=2048), variant, over)


def _one(value: float) -> pd.Series:
    return pd.Series([value], index=[""])


def _read(frames: Frames) -> pd.Series:
    """Bytes read from memory over those of the updates, by step."""
    return frames["counters"].groupby("step", sort=False)["read"].sum() / _UPDATES


def _onnx_kernel(frames: Frames) -> pd.DataFrame:
    seen = frames["counters"]
    found = seen[seen["kernel"].str.contains("ScatterND")]
    if not len(found):
        raise NotRecorded("ONNX Runtime was not counted")
    return found


def _step_us(frames: Frames) -> Any:
    """GPU time: a row per step, a column per size."""
    return frames["steps"].pivot_table("gpu_us", "step", "shape", sort=False)


def _steps_over(frames: Frames, step: str, over: str) -> pd.Series:
    us = _step_us(frames)
    if not {step, over} <= {*us.index}:
        raise NotRecorded(f"{step} or {over} was not measured")
    return (us.loc[step] / us.loc[over]).dropna()


def _steps_correct(frames: Frames, published: bool) -> pd.Series:
    steps = frames["steps"]
    rows = steps[(steps["step"] == "as published") == published]
    if not len(rows):
        raise NotRecorded("the published kernel was not run")
    return rows.set_index(["step", "shape"])["correct"]


def _floor(frames: Frames) -> pd.Series:
    """Time in a warm cache over that of a launch and the roofline."""
    rows = _rows(frames["sweep"], "fusebook", R=[256, 1024])
    return rows["gpu_warm_us"] / (rows["floor_warm_us"] + rows["roof_us"])


def _small(frames: Frames) -> pd.Series:
    """Time over that of torch.compile, in a cold and in a warm cache."""
    rows = tables.where(frames["sweep"], R=[256, 1024])
    return pd.concat({kind: tables.ratio(rows, "fusebook", "torch.compile", kind) for kind in ("cold", "warm")})


def _checked(frames: Frames) -> pd.Series:
    """Latency with the check over that without."""
    found = [
        _rows(frames[name], variant) for name, variant in (("checked", "fusebook, checked"), ("sweep", "fusebook"))
    ]
    return (found[0]["latency_us"] / found[1]["latency_us"]).dropna()


# Claims ---------------------------------------------------------------------------------------------------------------

_SQUARE = "squares: R rows of 2R columns and 2R updates, R from 256 to 8192, float32"
_LLAMA = "32000 x 4096 with 2048 updates, uniform indices"
_REPEATED = "2048 updates to 32000 x 4096 and 16384 to 8192 x 16384; indices by Zipf's law, equal or masked"
_THEIRS = "R = 256, 512 and 1024, float32, cold L2"
_COUNTS = "2048 updates to 4096 x 4096, float32, by the hardware counters"

CLAIMS = (
    # The lesson's findings
    Claim(
        "seven-to-fifty",
        "At M = 256, 512 and 1024, for which 7x to 50x was published, torch's chain is {least:.0f}x or more "
        "faster than ONNX Runtime's. From torch's chain to Fusebook, the gain is {rest:.1f}x at most.",
        lambda frames: _source(frames, "ONNX Runtime", "eager") / _source(frames, "eager", "fusebook"),
        "> 1",
        _THEIRS + "; gain of torch's chain over that of Fusebook",
        lesson=True,
        numbers=lambda frames: {
            "least": _source(frames, "ONNX Runtime", "eager").min(),
            "rest": _source(frames, "eager", "fusebook").max(),
        },
    ),
    Claim(
        "llama-parts",
        "On the Llama's embedding `fusebook.masked_scatter_nd_of_shape` is {both:.0f}x faster than ONNX Runtime: "
        "{left:.1f}x by torch's chain, and {fused:.2f}x from there, where traffic predicts {predicted:.2f}x.",
        lambda frames: _llama(frames, "ONNX Runtime", "eager") / _llama(frames, "eager", "fusebook"),
        "> 1",
        _LLAMA + ", float32, cold L2; gain of torch's chain over that of Fusebook",
        lesson=True,
        numbers=lambda frames: {
            "both": _llama(frames, "ONNX Runtime", "fusebook").iloc[0],
            "left": _llama(frames, "ONNX Runtime", "eager").iloc[0],
            "fused": _llama(frames, "eager", "fusebook").iloc[0],
            "predicted": _predicted(32000, 4096, 2048),
        },
    ),
    Claim(
        "source-atomic",
        'The source explains: "ScatterND seems very slow as it is using atomic addition". '
        "But Fusebook's kernel with atomic additions is {least:.0f}x to {most:.0f}x faster than ONNX "
        "Runtime, so they are not the cause.",
        lambda frames: tables.ratio(
            pd.concat([frames["llama"], frames["strategies"]], ignore_index=True), "ONNX Runtime", "fusebook atomic"
        ),
        "<= 2",
        "three embeddings, float32 and float16, uniform indices, cold L2; time of ONNX Runtime over that of atomics",
        kind="statement",
        lesson=True,
    ),
    Claim(
        "repeats",
        "If all updates meet in one row, or in a few, the library's sorted updates take {least:.2f} to {most:.2f} "
        "times as long as with uniform indices.",
        _repeats,
        "<= 2",
        _LLAMA.partition(",")[0] + ", equal indices and Zipf's law, float32, cold L2",
        kind="target",
    ),
    # The prediction
    Claim(
        "predicted",
        "The traffic predicts a gain of {llama:.2f}x on the Llama's embedding and of {square:.2f}x on a square, and "
        "neither is 7x.",
        lambda frames: pd.Series({"embedding": _predicted(32000, 4096, 2048), "square": _predicted(1024, 2048, 2048)}),
        "< 7",
        "bytes of the eager chain over those that have to move, float32",
        numbers=lambda frames: {"llama": _predicted(32000, 4096, 2048), "square": _predicted(1024, 2048, 2048)},
    ),
    Claim(
        "beyond-prediction",
        "At all sizes of the figure the library is {least:.1f}x to {most:.1f}x faster than torch's chain. Traffic "
        "predicts {square:.1f}x.",
        lambda frames: tables.ratio(frames["sweep"], "eager", "fusebook"),
        "> 1",
        _SQUARE + ", cold L2; time of torch's chain over that of Fusebook",
        lesson=True,
        numbers=lambda frames: {"square": _predicted(1024, 2048, 2048)},
    ),
    # Hardware counters
    Claim(
        "sectors",
        "In ONNX Runtime's ScatterND a load fetches {median:.0f} sectors of 32 bytes, one for each thread of a warp.",
        lambda frames: _onnx_kernel(frames)["sectors"],
        ">= 30",
        _COUNTS,
    ),
    Claim(
        "onnx-reads",
        "ONNX Runtime's ScatterND reads {onnx:.2f} times the bytes of the updates from memory, and atomic additions "
        "read {atomic:.2f} times. So bytes are not what makes it slow.",
        lambda frames: _one(_onnx_kernel(frames)["read"].sum() / _UPDATES / _read(frames)["atomic"]),
        "<= 1.02",
        _COUNTS + "; the first over the second",
        numbers=lambda frames: {
            "onnx": _onnx_kernel(frames)["read"].sum() / _UPDATES,
            "atomic": _read(frames)["atomic"],
        },
    ),
    Claim(
        "atomic-reads",
        "Atomic additions read {atomic:.2f} times the bytes of the updates, since they fetch what they add to. Sorted "
        "updates read {sorted:.2f} times these bytes.",
        lambda frames: _one((read := _read(frames))["atomic"] / read["fusebook sorted"]),
        "> 1.1",
        _COUNTS + "; the first over the second",
        numbers=lambda frames: {"atomic": (read := _read(frames))["atomic"], "sorted": read["fusebook sorted"]},
    ),
    # Correctness
    within_tolerance(
        lambda frames: _every(frames, "fusebook"),
        "every recorded size, float32 and float16",
        "`fusebook.masked_scatter_nd_of_shape` is within tolerance wherever it was timed.",
    ),
    Claim(
        "repeats-correct",
        "If indices repeat, every strategy of the library is within tolerance, also where sums in float16 are not.",
        lambda frames: (
            (rows := frames["strategies"])["error"].set_axis(
                pd.MultiIndex.from_arrays([rows["variant"], tables.label(rows), rows["dtype"]])
            )
            / rows["tolerance"].to_numpy()
        ),
        "<= 1",
        _REPEATED + ", float32 and float16",
    ),
    deterministic(
        lambda frames: _every(frames, "fusebook sorted"),
        "every recorded size, float32 and float16",
        "Two runs with sorted updates give the same bits.",
    ),
    Claim(
        "steps-correct",
        "Every step is correct at the sizes at which it was timed, and so are the kernels of the source without their "
        "mistake.",
        lambda frames: _steps_correct(frames, False),
        "== 1",
        _THEIRS.partition(",")[0] + " and 1024, and the Llama's embedding, float32",
    ),
    Claim(
        "published-incorrect",
        "As it was published, the kernel of the source is incorrect at all of these sizes.",
        lambda frames: _steps_correct(frames, True),
        "== 0",
        "R = 256, 512 and 1024, and the Llama's embedding, float32",
    ),
    # Steps
    Claim(
        "sorted-gain",
        "On the Llama's embedding step 3 is {median:.2x} faster than step 1.",
        lambda frames: _steps_over(frames, "atomic", "sorted")[["32000x4096x2048"]],
        "> 1.02",
        _LLAMA + ", float32, cold L2; time of step 1 over step 3",
    ),
    Claim(
        "library-over-source",
        "The library is {least:.0f}x to {most:.0f}x faster than the kernel of the source without its mistake.",
        lambda frames: _steps_over(frames, "by column, shared", "fusebook"),
        "> 1",
        "R = 256, 512 and 1024, and the Llama's embedding, float32, cold L2",
    ),
    Claim(
        "mistake-is-fast",
        "The mistake makes the kernel of the source {least:.1f}x to {most:.1f}x faster.",
        lambda frames: _steps_over(frames, "by column, shared", "as published"),
        "",
        "R = 256, 512 and 1024, and the Llama's embedding, float32, cold L2",
    ),
    # Other implementations
    Claim(
        "over-eager",
        "On squares the library is {least:.1f}x to {most:.1f}x faster than torch's chain, in a cold and a warm cache.",
        lambda frames: pd.concat(
            {kind: tables.ratio(frames["sweep"], "eager", "fusebook", kind) for kind in ("cold", "warm")}
        ),
        "> 1",
        _SQUARE,
    ),
    Claim(
        "over-compiled-repeats",
        "However the indices are drawn, the library takes at most {most:.2f} times as long as torch.compile, where "
        "that is correct.",
        lambda frames: tables.ratio(frames["contention"], "fusebook", "torch.compile"),
        "<= 1.02",
        _REPEATED + ", float32 and float16, cold L2",
    ),
    Claim(
        "embedding",
        "`fusebook.embedding_backward` takes {least:.2f} to {most:.2f} times as long as torch's own operator.",
        lambda frames: tables.ratio(frames["embedding"], "fusebook", "torch"),
        "<= 1.02",
        "2048 and 32000 lookups in 32000 x 4096, three kinds of indices, float32, cold L2",
    ),
    Claim(
        "checked",
        "With ``check=True`` a call takes {least:.1f} to {most:.1f} times as long as without, by latency.",
        _checked,
        "",
        "three " + _SQUARE,
    ),
    # Targets
    Claim(
        "target-square",
        "On the largest square the library takes at most 1.25 times as long as the roofline: {median:.2f} times.",
        lambda frames: _of_roof(frames["sweep"], "fusebook", R=8192),
        "<= 1.25",
        "8192 x 16384 with 16384 updates, float32, cold L2",
        kind="target",
    ),
    Claim(
        "target-llama",
        "On the Llama's embedding the library takes at most 1.10 times as long as the roofline: {median:.2f} times.",
        lambda frames: _of_roof(frames["llama"], "fusebook", R=32000, n=2048, dtype="float32"),
        "<= 1.10",
        _LLAMA + ", float32, cold L2; the roofline has no launches and no sort",
        kind="target",
    ),
    Claim(
        "target-llama-sorted",
        "Sorted updates take at most 1.25 times as long as the roofline there: {median:.2f} times.",
        lambda frames: _of_roof(
            frames["strategies"], "fusebook sorted", R=32000, n=2048, law="uniform", dtype="float32"
        ).iloc[:1],
        "<= 1.25",
        _LLAMA + ", float32, cold L2",
        kind="target",
    ),
    Claim(
        "target-llama-float16",
        "In float16 the library takes at most 1.15 times as long as the roofline there: {median:.2f} times.",
        lambda frames: _of_roof(frames["llama"], "fusebook", R=32000, n=2048, dtype="float16"),
        "<= 1.15",
        _LLAMA + ", float16, cold L2",
        kind="target",
    ),
    Claim(
        "target-compiled-small",
        "On small squares the library is faster than torch.compile: it takes {least:.2f} to {most:.2f} times as long.",
        _small,
        "< 1",
        "R = 256 and 1024, float32, cold and warm L2",
        kind="target",
    ),
    Claim(
        "target-floor",
        "On small squares the library takes at most 1.5 times as long as a launch and the roofline, warm: {least:.2f} "
        "to {most:.2f} times.",
        _floor,
        "<= 1.5",
        "R = 256 and 1024, float32, warm L2",
        kind="target",
    ),
)

LOG = (
    "The source is *Optimizing Masked ScatterND operator on CUDA* of onnx-extended (2024). For R = 256, 512 and 1024 "
    "it prints gains of 10.6, 6.8 and 49.8 over ONNX Runtime's standard nodes, by the clock of the host.",
    "Its script never compares the kernels: the check calls the reference a second time. The kernel with the mistake "
    "is the one for 128 columns or more, in ``scatter_nd_of_shape_masked.cu``. A thread that adds 128 updates to one "
    "row can keep their sum in a register, so the mistake is also faster.",
    "Both kernels of the source have a thread for each column. On 4096 columns these are 32 blocks of 128 threads, "
    "and each goes over all updates one after another.",
    "ONNX Runtime's kernel has a thread for each index, which goes over the columns of its update. 2048 updates are "
    "eight blocks of 256 threads. Neighbouring threads read 16 KiB apart in float32.",
    "On a CPU, ONNX Runtime's ScatterND shares the updates among threads that add without synchronisation, and may "
    "lose some. Fusebook's sessions on a CPU have one thread.",
    "With very many updates the library does not compare all with all. Atomic operations on integers count and number "
    "the updates of each row, and a program owns each row.",
    "The second launch of sorted updates is programmatic and dependent: it starts while the first one still sorts.",
    "Random problems: in fp16 and bf16 the compiled gradient of an embedding adds into the table itself and rounds at "
    "every addition. That is correct as long as a row is looked up a few times. Fusebook adds in float32 and rounds "
    "once. It sorts the lookups first, or rounds a table of float32 afterwards: one more launch, or one more pass.",
    "Random problems: by Zipf's law a few rows have most of the lookups. Fusebook cuts these rows in pieces and adds "
    "them in one order. Atomic additions have no second pass, and no order either. With a handful of lookups in a "
    "large table most of the time goes into writing zeros.",
    "Random problems: each of the three strategies was tried next to the one that is chosen. That one was the fastest "
    "at all but a few problems of fp16 and bf16. Those with hundreds of lookups for each row are no longer grouped.",
)
