"""Evidence of the lesson on measuring."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

import fusebook
from fusebook import tables
from fusebook.extras import extra
from fusebook.lesson import _launches
from fusebook.lesson.evidence import Claim, Frames, Measured, NotRecorded, Recorded, deterministic, within_tolerance
from fusebook.measure import inputs, machine, timing

with extra("book"):
    import pandas as pd

PAGE = _launches.LaunchesPage
OPERATORS = ("double",)
EXAMPLE = {"M": 8192, "N": 8192, "dtype": "float32"}
WORDS = "{M} x {N} in {dtype}"
STEPS = ("naive", "wait", "repeat", "events", "flushed")
SHAPES = tuple((n, n) for n in (512, 2048, 4096, 16384, 32768))
DTYPES = ("float32",)
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS: Mapping[str, tuple[str, ...]] = {}
CAPTION = "Microseconds that a stopwatch shows for a copy of N x N elements"
TABLE = {f"N = {n}": ("gpu_us", f"{n}x{n}") for n, _ in SHAPES}
TIMING = "fusebook.measure.timing"


# What is measured -----------------------------------------------------------------------------------------------------


def timed(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """What each stopwatch of the lesson, and that of the library, shows for a copy."""
    rows = []
    for M, N in SHAPES:
        x = torch.randn(M, N, device="cuda")
        y = torch.empty_like(x)

        def copy(x: Tensor = x, y: Tensor = y) -> Tensor:
            return y.copy_(x)

        for _ in range(3):
            copy()
        shown = {name: statistics.median(step(copy) for _ in range(7)) for name, step in steps.items()}
        shown[TIMING] = 1e6 * timing.cold({"copy": copy})["copy"].q50  # type: ignore[union-attr]
        rows += [(name, us, f"{M}x{N}", "float32") for name, us in shown.items()]
    return pd.DataFrame(rows, columns=["step", "gpu_us", "shape", "dtype"])


def cache_not_flushed() -> pd.DataFrame:
    """The rate of a copy in a loop and after a flush, by the bytes that it moves."""
    rows = []
    for mib in (2, 8, 16, 32, 64, 128, 512, 2048):
        x = torch.randn(mib * 2**17, device="cuda")  # half of mib MiB
        y = torch.empty_like(x)

        def copy(x: Tensor = x, y: Tensor = y) -> Tensor:
            return y.copy_(x)

        moved = 8 * x.numel()
        clocks = [timing.warm({"copy": copy})["copy"], timing.cold({"copy": copy})["copy"]]
        rows.append((moved / 1e6, *(moved / q.q50 / 1e9 if q else math.nan for q in clocks)))
    return pd.DataFrame(rows, columns=["step", "looped GB/s", "flushed GB/s"])


@triton.jit
def _doubled(y_ptr, x_ptr, n, SALT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x + x, mask=at < n)


def _double(x: Tensor, part: int = 1, salt: int = 0) -> Tensor:
    """Twice `x`, or the first `part` of it and nothing after that."""
    y, n = torch.empty_like(x), x.numel() // part
    _doubled[(triton.cdiv(n, 4096),)](y, x, n, SALT=salt, BLOCK=4096)
    return y


def first_call() -> pd.DataFrame:
    """The first call of a kernel, and what it does to a mean of thirty."""
    x = torch.randn(2**26, device="cuda")
    salt = time.time_ns() % 2**30  # a constant never seen: nothing is cached
    taken = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        _double(x, salt=salt)
        torch.cuda.synchronize()
        taken.append(1e6 * (time.perf_counter() - start))
    rows = [
        ("first call (us)", taken[0]),
        ("mean of 30, first included (us)", statistics.mean(taken)),
        ("median of 30 (us)", statistics.median(taken)),
    ]
    return pd.DataFrame(rows, columns=["step", "value"])


def flush_that_ends_in_writes() -> pd.DataFrame:
    """Three kernels after a flush that ends in writes, and after one that ends in reads."""
    buffer, total = torch.empty(4096, 2**14, device="cuda"), torch.empty(4096, device="cuda")  # 256 MiB
    few = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(4096, 11008, device="cuda", dtype=torch.bfloat16)
    product, x = few @ weights, torch.randn(4096, 4096, device="cuda")
    y, sums = torch.empty_like(x), torch.empty(4096, device="cuda")
    works: dict[str, Callable[[], Any]] = {
        "product of 16 rows": lambda: torch.mm(few, weights, out=product),
        "read of 64 MiB": lambda: torch.sum(x, 1, out=sums),
        "copy of 64 MiB": lambda: y.copy_(x),
    }
    flushes: dict[str, Callable[[], Any]] = {
        "in writes us": lambda: buffer.zero_().zero_(),  # twice: the GPU must not wait for the CPU
        "in reads us": lambda: torch.sum(buffer.zero_(), 1, out=total),
    }
    rows = []
    for name, work in works.items():
        pairs: dict[str, list[Any]] = {flush: [] for flush in flushes}
        for _ in range(35):
            for flush, empty in flushes.items():  # in turn
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                empty()
                a.record()
                work()
                b.record()
                pairs[flush].append((a, b))
        torch.cuda.synchronize()
        us = {flush: 1e3 * statistics.median(a.elapsed_time(b) for a, b in of[5:]) for flush, of in pairs.items()}
        rows.append({"step": name, **us})
    return pd.DataFrame(rows)


def fresh_and_reused() -> pd.DataFrame:
    """The time of functions with a fresh result of 256 MiB, and with one that is reused."""
    x = torch.rand(2**26)
    out, there, order = torch.zeros_like(x), x.cuda(), torch.randperm(8192)
    result, rows, kept = torch.zeros_like(there), x.view(8192, 8192), out.view(8192, 8192)
    on_cpu: dict[tuple[str, str], Callable[[], Any]] = {
        ("exp in NumPy", "fresh"): lambda: np.exp(x.numpy()),
        ("exp in NumPy", "reused"): lambda: np.exp(x.numpy(), out=out.numpy()),
        ("rows by index on the CPU", "fresh"): lambda: rows[order],
        ("rows by index on the CPU", "reused"): lambda: torch.index_select(rows, 0, order, out=kept),
        ("exp on the CPU", "fresh"): lambda: torch.exp(x),
        ("exp on the CPU", "reused"): lambda: torch.exp(x, out=out),
        ("copy to the CPU", "fresh"): lambda: there.cpu(),
        ("copy to the CPU", "reused"): lambda: out.copy_(there),
    }
    on_gpu: dict[tuple[str, str], Callable[[], Any]] = {
        ("exp on the GPU", "fresh"): lambda: torch.exp(there),
        ("exp on the GPU", "reused"): lambda: torch.exp(there, out=result),
    }
    # Apart, as a call right after work of the CPU may pay for that.
    times: dict[Any, Any] = {}
    for calls, warmup, repeat in ((on_cpu, 2, 15), (on_gpu, 20, 100)):
        named = {"/".join(key): call for key, call in calls.items()}
        times |= timing.call(named, warmup=warmup, repeat=repeat)
    found: dict[str, dict[str, Any]] = {}
    for name, taken in times.items():
        what, how = name.split("/")
        found.setdefault(what, {"step": what})[f"{how} ms"] = 1e3 * taken.q50
    return pd.DataFrame(list(found.values()))


def _agrees(x: Tensor, part: int, poisoned: bool) -> str:
    """Compare with PyTorch as a careless test does, or on poisoned memory."""
    torch.cuda.empty_cache()
    want = (x + x).cpu()  # its memory on the GPU is free again after this
    if poisoned:
        inputs.poison([x])
    return "yes" if torch.equal(_double(x, part).cpu(), want) else "no"


def zeros_and_unwritten() -> pd.DataFrame:
    """Matmuls of zeros and of random elements; and whether a half-written output passes a test."""
    rows: list[tuple[Any, ...]] = []
    out = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for name, a in (("zeros", torch.zeros_like(out)), ("random", torch.randn_like(out))):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(100):  # long enough for the power to settle
            torch.mm(a, a, out=out)
        start.record()
        for _ in range(100):
            torch.mm(a, a, out=out)
        end.record()
        end.synchronize()
        rows.append((f"matrix product of {name}", start.elapsed_time(end) * 10, "", ""))
    x = torch.randn(2**26, device="cuda")
    for name, part in (("the whole output", 1), ("half of it", 2)):
        quantiles = timing.cold({name: functools.partial(_double, x, part)})[name]
        passes = [_agrees(x, part, poisoned) for poisoned in (False, True)]
        rows.append((f"kernel that writes {name}", 1e6 * quantiles.q50 if quantiles else None, *passes))
    return pd.DataFrame(rows, columns=["step", "us", "passes", "passes on poisoned memory"])


def small_calls() -> pd.DataFrame:
    """The four clocks of one call, of ten calls, and of an empty kernel."""
    x = torch.rand(230400, device="cuda")  # an image of 480 x 480
    y = torch.empty_like(x)
    kinds = timing.measure(
        {"exp": lambda: torch.exp(x, out=y), "10 exp": lambda: [torch.exp(x, out=y) for _ in range(10)]}
    )
    rows = [
        {"step": name, **{f"{kind} us": 1e6 * q.q50 for kind, q in times.items() if q}} for name, times in kinds.items()
    ]
    here = machine.here()
    floor = {"cold us": here.floor() * 1e6, "warm us": here.floor(kind="warm") * 1e6}
    return pd.DataFrame([*rows, {"step": "empty kernel", **floor}])


def second_opinion() -> pd.DataFrame:
    """The same work by the library's clock and by `triton.testing.do_bench`."""
    rows = []
    for mib in (256, 1024, 4096):
        x = torch.randn(mib * 2**17 // 4096, 4096, device="cuda")
        y = torch.empty_like(x)
        calls: dict[str, Callable[[], Any]] = {
            "copy": lambda x=x, y=y: y.copy_(x),  # type: ignore[misc]
            "fusebook.softmax": lambda x=x: fusebook.softmax(x),  # type: ignore[misc]
        }
        cold = timing.cold(calls)
        for name, call in calls.items():
            other = triton.testing.do_bench(call, warmup=50, rep=200, quantiles=[0.5])
            other = other[0] if isinstance(other, (list, tuple)) else other  # a list in some versions
            us = q.q50 * 1e6 if (q := cold[name]) else None
            rows.append((name, mib, us, other * 1e3))
    return pd.DataFrame(rows, columns=["step", "MiB read and written", "fusebook us", "do_bench us"])


# Records --------------------------------------------------------------------------------------------------------------


FRAMES: dict[str, Any] = {
    "sweep": Recorded("double", "large", "float32", ("eager", "CUDA C", "fusebook", "torch.compile"), borrowed=True),
    "steps": Measured("measuring_clock"),
    "cache": Measured("measuring_cache", function=cache_not_flushed),
    "first": Measured("measuring_first", function=first_call),
    "flush": Measured("measuring_flush", function=flush_that_ends_in_writes),
    "fresh": Measured("measuring_fresh", function=fresh_and_reused),
    "lazy": Measured("measuring_lazy", function=zeros_and_unwritten),
    "small": Measured("measuring_host", function=small_calls),
    "second": Measured("measuring_second", function=second_opinion),
}


# What claims read -----------------------------------------------------------------------------------------------------

#: Bytes per second by the datasheets of NVIDIA.
_DATASHEET = {"nvidia-h200": 4.8e12, "nvidia-h100-80gb-hbm3": 3.35e12}


def _machine(frame: pd.DataFrame) -> Any:
    return frame.attrs["origin"].machine


def _shown(step: str, over: str, n: int) -> Callable[[Frames], pd.Series]:
    """What a stopwatch shows over what another one shows."""

    def ratio(frames: Frames) -> pd.Series:
        us = tables.where(frames["steps"], shape=f"{n}x{n}").set_index("step")["gpu_us"]
        if us.reindex([step, over]).isna().any():
            raise NotRecorded(f"{step} or {over} was not measured")
        return pd.Series({f"N = {n}": us[step] / us[over]})

    return ratio


def _looped(frames: Frames) -> pd.Series:
    """The best rate of a copy in a loop over that of memory."""
    best = frames["cache"].sort_values("looped GB/s").iloc[-1]
    return pd.Series({f"{best['step']:.0f} MB": best["looped GB/s"] * 1e9 / _machine(frames["cache"]).copy})


def _flushed(frames: Frames) -> pd.Series:
    """The rate of large copies after a flush over the roofline, without the writes that the cache keeps."""
    frame, on = frames["cache"], _machine(frames["cache"])
    large = frame[frame["step"] * 1e6 >= 4 * on.l2].set_index("step")["flushed GB/s"]
    kept = pd.Series(on.l2 / (large.index * 1e6), large.index)
    return (large * 1e9 * (1 - kept) / on.copy).rename(index=lambda mb: f"{mb:.0f} MB")


def _of(frames: Frames, frame: str, column: str) -> pd.Series:
    return frames[frame].set_index("step")[column]


def _first(name: str) -> Callable[[Frames], pd.Series]:
    """A time over the median of thirty."""
    return lambda frames: (us := _of(frames, "first", "value"))[[name]] / us["median of 30 (us)"]


def _fresh(frames: Frames, where: str) -> pd.Series:
    """The time with a fresh result over that with one that is reused."""
    ratio = _of(frames, "fresh", "fresh ms") / _of(frames, "fresh", "reused ms")
    return ratio[ratio.index.str.endswith(where)]


def _half(frames: Frames) -> pd.Series:
    """Whether the test is fooled: 1 where each kernel passes or fails as claimed."""
    rows, want = frames["lazy"].set_index("step"), {"the whole output": ("yes", "yes"), "half of it": ("yes", "no")}
    named = {f"kernel that writes {name}": answers for name, answers in want.items()}
    columns = ["passes", "passes on poisoned memory"]
    return pd.Series({name: float(tuple(rows.loc[name, columns]) == answers) for name, answers in named.items()})


def _do_bench(frames: Frames) -> pd.Series:
    """The time of the library's clock over that of do_bench, by function and size."""
    frame = frames["second"].set_index(["step", "MiB read and written"])
    return frame["fusebook us"] / frame["do_bench us"]


def _charged(frames: Frames) -> pd.Series:
    """The bytes that memory could move in the extra time of do_bench, less 3 % of the traffic, in L2 caches."""
    frame, on = frames["second"].set_index(["step", "MiB read and written"]), _machine(frames["second"])
    extra = (frame["do_bench us"] - frame["fusebook us"]) * 1e-6 * on.copy
    return (extra - 0.03 * 2**20 * frame.index.get_level_values(1)) / on.l2


def _datasheet(frames: Frames) -> pd.Series:
    on = _machine(frames["small"])
    if on.slug not in _DATASHEET:
        raise NotRecorded(f"the datasheet of {on.name} is not listed")
    return pd.Series({on.name: on.copy / _DATASHEET[on.slug]})


def _own(frames: Frames) -> pd.DataFrame:
    rows = tables.where(frames["sweep"], variant="fusebook", status="ok")
    return rows.set_index([tables.label(rows), "dtype"])


# Claims ---------------------------------------------------------------------------------------------------------------

_COPY = "a copy of 32768 x 32768 float32 elements"
_OWN = "2048 to 8192 rows of 8192 elements, float32"

CLAIMS = (
    # The lesson's findings
    Claim(
        "no-wait",
        "A stopwatch that does not wait shows {median:.1%} of the time of a copy of 4 GiB.",
        _shown("naive", "flushed", 32768),
        "< 0.05",
        _COPY + "; naive over flushed",
        lesson=True,
    ),
    Claim(
        "first-call",
        "The first call of a Triton kernel takes {median:.0f} times the median: it compiles.",
        _first("first call (us)"),
        "> 100",
        "a kernel that reads and writes 512 MiB; 30 calls",
        lesson=True,
    ),
    Claim(
        "warm-cache",
        "In a CUDA graph, which launches many recorded calls at once, a copy of the same memory seems to run at "
        "{median:.2f} times the bandwidth of memory.",
        _looped,
        "> 1.05",
        "copies that move 2 to 2147 MB; the best one",
        lesson=True,
    ),
    Claim(
        "half-output",
        "A kernel that writes half of its output takes {share:.2f} times as long, and passes a careless test. On "
        "poisoned memory it fails.",
        _half,
        "== 1",
        "64 million float32 elements; 1 where a kernel passes or fails as claimed",
        lesson=True,
        numbers=lambda frames: {
            "share": (us := _of(frames, "lazy", "us"))["kernel that writes half of it"]
            / us["kernel that writes the whole output"]
        },
    ),
    # The clocks
    Claim(
        "clocks-agree",
        "For a large copy, the CPU's clock, which waits, and events agree within 5 %.",
        lambda frames: (_shown("wait", "flushed", 32768)(frames) - 1).abs(),
        "< 0.05",
        _COPY,
    ),
    Claim(
        "first-in-mean",
        "With its first call, the mean of thirty calls is {median:.0f} times the median.",
        _first("mean of 30, first included (us)"),
        "> 2",
        "a kernel that reads and writes 512 MiB; 30 calls",
    ),
    Claim(
        "latency-small",
        "The latency of a small call is {least:.1f} to {most:.1f} times the GPU time with a warm cache.",
        lambda frames: (_of(frames, "small", "call us") / _of(frames, "small", "warm us")).dropna(),
        "> 3",
        "exp of 230400 elements, once and ten times",
    ),
    # The cache
    Claim(
        "flushed-below-roof",
        "After a flush, large copies exceed the roofline by at most 3 %, without the writes that the cache keeps.",
        _flushed,
        "<= 1.03",
        "copies that move at least four times the L2 cache",
    ),
    Claim(
        "dirty-flush",
        "After a flush that ends in writes, a kernel seems to take {least:.0%} to {most:.0%} longer.",
        lambda frames: _of(frames, "flush", "in writes us") / _of(frames, "flush", "in reads us") - 1,
        "> 0.05",
        "a matmul of 16 rows, a read and a copy of 64 MiB",
    ),
    # Inputs and outputs
    Claim(
        "fresh-cpu",
        "On all cores of the CPU, a fresh result makes a call {least:.1f} to {most:.1f} times as long.",
        lambda frames: _fresh(frames, "CPU"),
        "> 2",
        "256 MiB; exp, rows by index, and a copy from the GPU",
    ),
    Claim(
        "fresh-gpu",
        "On the GPU, whose memory PyTorch keeps, a fresh result makes exp {median:.2f} times as long.",
        lambda frames: _fresh(frames, "GPU"),
        "< 1.05",
        "256 MiB",
    ),
    Claim(
        "zeros-faster",
        "A matmul of zeros is {median:.2x} faster than one of random elements.",
        lambda frames: pd.Series(
            {
                "8192 x 8192": (us := _of(frames, "lazy", "us"))["matrix product of random"]
                / us["matrix product of zeros"]
            }
        ),
        "> 1.05",
        "8192 x 8192, bfloat16, a hundred calls in a row",
    ),
    # Second opinions
    Claim(
        "do-bench-agrees",
        "`triton.testing.do_bench` and this book's clock agree within 3 % for large work.",
        lambda frames: (_do_bench(frames).xs(4096, level=1) - 1).abs(),
        "<= 0.03",
        "a copy and a softmax that move 4 GiB",
    ),
    Claim(
        "do-bench-flush",
        "The flush of do_bench ends in writes. Its extra time is at most that of writing one L2 cache, to 3 %.",
        _charged,
        "<= 1",
        "a copy and a softmax that move 256 MiB to 4 GiB; in L2 caches",
    ),
    Claim(
        "datasheet",
        "A copy reaches the bandwidth of the datasheet: {median:.0%} of it.",
        _datasheet,
        ">= 1",
        "a copy of 4 GiB; datasheets of NVIDIA",
        kind="statement",
    ),
    # The library
    within_tolerance(_own, _OWN, "The library's kernel is within tolerance wherever it was timed."),
    deterministic(_own, _OWN, "Two runs of the library's kernel give the same bits."),
)

LOG = (
    "After a flush the cache still keeps what a kernel writes last. So a time of a small kernel is too good by as much "
    "as one cache full of writes takes. Points below four times the cache are marked L2.",
    "In a CUDA graph the largest copy ran more slowly than alone on an H200. No cache explains that, and we have not "
    "found the cause. The graph may copy by another kernel.",
    "Of an odd number of rounds, forward and back in turn, the fresh result was first more often. So calls of the CPU "
    "and of the GPU are timed apart.",
)
