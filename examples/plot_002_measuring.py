# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Measuring: five ways to be wrong
================================

A GPU runs beside the program that commands it, keeps what it has just
touched in a cache, compiles at the first call, and hands out memory that
still holds the last result. Each of these makes some plausible measurement
wrong, by a few percent or by a factor of a thousand. This page makes five of
those mistakes on purpose, and the right measurement beside each.

What the other pages mean by *cold*, *warm*, *call* and *roof* is what is
right here; the definitions stand in :doc:`/method`.

With a CUDA GPU everything is measured as the page runs. Without one, it is
replayed from the record of a GPU that is named at the end.
"""

# %%
# Three clocks
# ------------
#
# ``fusebook.timing`` has three, and they answer three questions:
#
# - *cold*: CUDA events around one call, after a flush of the L2 cache. What
#   does the kernel cost in a program that did something else before?
# - *warm*: many calls in a CUDA graph, the time divided by their number. What
#   does the device need when the host is out of the way?
# - *call*: the host's clock around one call, synchronised before and after.
#   What does Python wait for?
#
# A time without its clock means nothing, and two times of different clocks
# must not be compared. All are medians, with the 20 % and 80 % quantiles kept.

import time

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import machine, plots, timing
from fusebook.page import (
    claim,
    claims,
    downloads,
    holds,
    measured,
    provenance,
    say,
    table,
)

import pandas as pd
import torch
import triton
import triton.language as tl

# %%
# 1. The clock that does not wait
# -------------------------------
#
# A launch returns as soon as the work is queued. A host clock around it times
# the queueing: the same few microseconds whether the kernel moves a megabyte
# or eight gigabytes. Right is to synchronise before both readings, or better,
# to let the device keep the time with events.


def clock_without_waiting():
    rows = []
    for mib in (1, 64, 1024, 4096):
        x = torch.randn(mib * 2**18, device="cuda")  # mib MiB of float32
        y = torch.empty_like(x)

        def copy(x=x, y=y):
            y.copy_(x)

        for _ in range(5):
            copy()
        torch.cuda.synchronize()
        naive = []
        for _ in range(10):
            start = time.perf_counter()
            copy()
            naive.append(time.perf_counter() - start)
            torch.cuda.synchronize()  # outside the clock: that is the mistake
        right = timing.measure({"copy": copy}, kinds=("cold", "call"))["copy"]
        rows.append(
            {
                "MiB copied": mib,
                "not waiting us": 1e6 * sorted(naive)[5],
                "call us": 1e6 * right["call"].q50,
                "cold us": 1e6 * right["cold"].q50,
            }
        )
    return pd.DataFrame(rows)


clock = measured("measuring_clock", clock_without_waiting)
table(clock, "One copy by three clocks, in microseconds")

# %%
first, last = clock.iloc[0], clock.iloc[-1]
claims(
    say(
        "Without waiting, {big:.0f} times the bytes seem to take "
        "{ratio:.1f} times as long.",
        big=last["MiB copied"] / first["MiB copied"],
        ratio=last["not waiting us"] / first["not waiting us"],
    ),
    claim(
        "At 4 GiB it shows less than a twentieth of the time",
        last["not waiting us"] < last["cold us"] / 20,
    ),
    claim(
        "Waiting, host and events agree within 5 % at 4 GiB",
        abs(last["call us"] / last["cold us"] - 1) < 0.05,
    ),
)

# %%
# 2. The cache that was not emptied
# ---------------------------------
#
# A loop over the same buffers leaves them in the L2 cache, and then times the
# cache. The number is not wrong, it answers another question; divided into
# bytes and compared with the bandwidth of memory it is nonsense. Flush the
# cache before each call, with several times its size, and do not synchronise
# between the flush and the start event: the device would run dry, and the
# host's launch would be timed as well.


def cache_not_emptied():
    rows = []
    for mib in (2, 8, 16, 32, 64, 128, 512, 2048):
        x = torch.randn(mib * 2**17, device="cuda")  # half of mib MiB
        y = torch.empty_like(x)

        def copy(x=x, y=y):
            y.copy_(x)

        looped = timing.warm({"copy": copy})["copy"]
        flushed = timing.cold({"copy": copy})["copy"]
        moved = 2 * x.numel() * 4
        rows.append(
            {
                "MB read and written": moved / 1e6,
                "looped GB/s": moved / looped.q50 / 1e9,
                "flushed GB/s": moved / flushed.q50 / 1e9,
            }
        )
    return pd.DataFrame(rows)


cache = measured("measuring_cache", cache_not_emptied)
on = cache.attrs["machine"]
ax = plots.lines(
    cache.set_index("MB read and written"),
    title="A copy in a loop, and after a flush",
    ylabel="GB/s",
    marks={"the roof: the best copy of 4 GiB": on.copy / 1e9},
)

# %%
large = cache[cache["MB read and written"] * 1e6 >= 4 * on.l2]
claims(
    say(
        "In a loop the best rate is {best:.0f} GB/s, {ratio:.1f} times what "
        "the memory of this machine can do.",
        best=cache["looped GB/s"].max(),
        ratio=cache["looped GB/s"].max() * 1e9 / on.copy,
    ),
    claim(
        "Some looped copy is faster than memory can be",
        cache["looped GB/s"].max() * 1e9 > 1.05 * on.copy,
    ),
    claim(
        "Flushed, no copy of 4 x L2 or more passes the roof by 3 %",
        large.set_index("MB read and written")["flushed GB/s"] * 1e9
        <= 1.03 * on.copy,
    ),
    say(
        "Even a flushed copy of less than {edge:.0f} MB is partly served by "
        "the cache, which takes in what is written. Bandwidth is claimed for "
        "more than that only.",
        edge=4 * on.l2 / 1e6,
    ),
)

# %%
# 3. The first call, the mean, and the order
# ------------------------------------------
#
# The first call of a Triton kernel compiles it. One such call in a mean of
# thirty is all that the mean shows. So: warm up, take the median, show the
# quantiles, and report the first call by itself, since a program that runs
# once pays it.
#
# The second half of the mistake is to time all of A and then all of B. Clocks
# and temperature drift, and the difference between two halves of a minute is
# taken for a difference between A and B. Here A and B are the same function.


@triton.jit
def doubled(y_ptr, x_ptr, n, SALT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x + x, mask=at < n)


def first_call_and_order():
    n = 2**26
    x, y = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    salt = time.time_ns() % 2**30  # a constant never seen: nothing is cached

    def double():
        doubled[(triton.cdiv(n, 4096),)](y, x, n, SALT=salt, BLOCK=4096)

    samples = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        double()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    samples = pd.Series(samples) * 1e6

    def alone(function, calls=200):
        """The mean of calls one after another, as a simple loop has it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    # The device idles and cools, then A is timed, then B, which is A.
    apart = []
    for _ in range(5):
        time.sleep(0.5)
        apart.append(alone(double) / alone(double))
    pair = {"A": double, "B": lambda: double()}
    together = []
    for _ in range(5):
        both = timing.cold(pair)
        together.append(both["A"].q50 / both["B"].q50)
    rows = [
        ("first call (us)", samples[0]),
        ("mean of 30, first included (us)", samples.mean()),
        ("median of 30 (us)", samples.median()),
        ("A over A, one after the other, worst", worst(apart)),
        ("A over A, interleaved, worst", worst(together)),
    ]
    return pd.DataFrame(rows, columns=["what", "value"])


def worst(ratios):
    """The ratio that is furthest from one."""
    return max(ratios, key=lambda r: max(r, 1 / r))


first = measured("measuring_first", first_call_and_order)
table(first, "One kernel, 512 MiB read and written", fold=False)

# %%
value = first.set_index("what")["value"]
drift = value["A over A, one after the other, worst"]
level = value["A over A, interleaved, worst"]
claims(
    claim(
        "The first call takes more than a hundred times the median",
        value["first call (us)"] > 100 * value["median of 30 (us)"],
    ),
    claim(
        "The mean is more than twice the median",
        value["mean of 30, first included (us)"]
        > 2 * value["median of 30 (us)"],
    ),
    say(
        "A function against itself: {drift:.3f} when timed apart, {level:.3f} "
        "when interleaved.",
        drift=drift,
        level=level,
    ),
    claim("Interleaved, it equals itself within 1 %", abs(level - 1) < 0.01),
    say("That is why a page here means 2 % by never slower, and not 0."),
)

# %%
# 4. Zeros, and the output that nobody wrote
# ------------------------------------------
#
# Zeros are the laziest input: multiplying them toggles few transistors, the
# chip draws less power, and holds a higher clock. And zeros are what an
# unwritten output often holds.
#
# Worse is memory that holds the *right* answer. PyTorch keeps freed blocks and
# hands them out again. Run the reference, free its result, and run a kernel
# that writes only half of its output: it finds the other half already there.
# The check passes, and the kernel takes half the time. The remedy is to leave
# NaN in the blocks that will be handed out: ``fusebook.inputs.poison``.


@triton.jit
def half_done(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x + x, mask=at < n)


def double(x, part=1):
    """Twice `x`, or the first `part` of it and nothing behind that."""
    y = torch.empty_like(x)
    n = x.numel() // part
    half_done[(triton.cdiv(n, 4096),)](y, x, n, BLOCK=4096)
    return y


def agrees(x, part, poisoned):
    """Compare with PyTorch as a careless test does, or on poisoned memory."""
    torch.cuda.empty_cache()
    want = (x + x).cpu()  # its block on the device is free again after this
    if poisoned:
        fusebook.inputs.poison([x])
    return "yes" if torch.equal(double(x, part).cpu(), want) else "no"


def zeros_and_unwritten():
    n = 8192
    rows = []
    operands = {
        "zeros": torch.zeros(n, n, device="cuda", dtype=torch.bfloat16),
        "random": torch.randn(n, n, device="cuda", dtype=torch.bfloat16),
    }
    out = torch.empty_like(operands["zeros"])
    for name, a in operands.items():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(100):  # long enough for the power to settle
            torch.mm(a, a, out=out)
        start.record()
        for _ in range(100):
            torch.mm(a, a, out=out)
        end.record()
        end.synchronize()
        us = start.elapsed_time(end) * 1e3 / 100
        rows.append((f"matrix product of {name}", us, "", ""))
    x = torch.randn(2**26, device="cuda")
    for name, part in (("the whole output", 1), ("half of it", 2)):
        us = timing.cold({"k": lambda part=part: double(x, part)})["k"].q50
        rows.append(
            (
                f"kernel that writes {name}",
                us * 1e6,
                agrees(x, part, poisoned=False),
                agrees(x, part, poisoned=True),
            )
        )
    columns = ["what", "us", "passes", "passes on poisoned memory"]
    return pd.DataFrame(rows, columns=columns)


lazy = measured("measuring_lazy", zeros_and_unwritten)
table(lazy, "Zeros and random numbers; a whole output and half of one")

# %%
us = lazy.set_index("what")["us"]
half = lazy.iloc[-1]
whole = lazy.iloc[-2]
claims(
    say(
        "Zeros are multiplied {ratio:.2f} times as fast as random numbers.",
        ratio=us["matrix product of random"] / us["matrix product of zeros"],
    ),
    claim(
        "Zeros are faster, by more than 5 %",
        us["matrix product of random"] > 1.05 * us["matrix product of zeros"],
        fatal=False,
    ),
    claim(
        "The kernel that writes half passes a careless test",
        half["passes"] == "yes",
    ),
    claim(
        "On poisoned memory it fails, and the honest one passes",
        half["passes on poisoned memory"] == "no"
        and whole["passes on poisoned memory"] == "yes",
    ),
)

# %%
# 5. The wrong ceiling, and the wrong clock
# -----------------------------------------
#
# A datasheet's bandwidth is the width of a bus times its clock. No program
# reaches it: refresh and the change between reading and writing take their
# part. A share of that number says how good the memory is, not how good the
# kernel is. Measure a copy, a fill and a read, and call those the roof.
#
# At the other end of the scale the ceiling is the launch. A small kernel in
# eager mode is timed as the host's work of launching it; in a CUDA graph the
# host is gone. Neither is a bandwidth: compare with an empty kernel.


def host_as_kernel():
    # 230400 floats: an image of 480 x 480, and the example of an old manual.
    x = torch.rand(230400, device="cuda")
    y = torch.empty_like(x)

    def small():
        torch.exp(x, out=y)

    def chain():
        for _ in range(10):
            torch.exp(x, out=y)

    kinds = timing.measure({"exp": small, "10 exp": chain})
    rows = []
    for name, times in kinds.items():
        times = {k: q.q50 * 1e6 for k, q in times.items() if q is not None}
        rows.append({"what": name, **{f"{k} us": v for k, v in times.items()}})
    frame = pd.DataFrame(rows)
    here = machine.here()
    floor = {
        "what": "empty kernel",
        "cold us": here.floor() * 1e6,
        "warm us": here.floor(kind="warm") * 1e6,
    }
    return pd.concat([frame, pd.DataFrame([floor])], ignore_index=True)


host = measured("measuring_host", host_as_kernel)
on = host.attrs["machine"]
table(host, "exp of 230400 floats, in microseconds")

# %%
small = host.set_index("what").loc["exp"]
claims(
    say(
        "Divide bytes by the call and exp runs at {slow:.0f} GB/s; by the "
        "warm time, at {fast:.0f} GB/s. It is the same kernel.",
        slow=2 * 4 * 230400 / small["call us"] / 1e3,
        fast=2 * 4 * 230400 / small["warm us"] / 1e3,
    ),
    claim(
        "A call takes more than three times the device's time",
        small["call us"] > 3 * small["warm us"],
    ),
    holds(
        "A copy reaches the 4.8 TB/s of the H200's datasheet (NVIDIA, 2024)",
        on.copy >= 4.8e12 if on.slug == "nvidia-h200" else None,
    ),
    say(
        "The best copy of 4 GiB moves {copy:.2f} TB/s on {name}.",
        copy=on.copy / 1e12,
        name=on.name,
    ),
)

# %%
# The ceilings of this machine
# ----------------------------
#
# Measured once, by the better of PyTorch's own call and a plain Triton kernel,
# and used as the roof on all pages. Bytes read and bytes written both count.

ceilings = pd.DataFrame(
    [
        ("copy, 4 GiB", on.copy / 1e9, "GB/s"),
        ("fill, 4 GiB", on.fill / 1e9, "GB/s"),
        ("read, 4 GiB", on.read / 1e9, "GB/s"),
        *(
            (f"matrix product, {name}", rate / 1e12, "TFLOP/s")
            for name, rate in on.rates.items()
        ),
        ("launch floor, cold", on.floor() * 1e6, "us"),
        ("launch floor, warm", on.floor(kind="warm") * 1e6, "us"),
        ("L2 cache", on.l2 / 1e6, "MB"),
        ("multiprocessors", float(on.sms), ""),
    ],
    columns=["ceiling", "value", "unit"],
)
table(ceilings, f"Ceilings of {on.name}", fold=False)

# %%
plots.copies(on)

# %%
# A second opinion
# ----------------
#
# A harness of one's own should agree with somebody else's where both apply.
# ``triton.testing.do_bench`` also flushes the cache and uses events; asked for
# its median it must give the same time for large work.


def second_opinion():
    rows = []
    for mib in (256, 1024, 4096):
        x = torch.randn(mib * 2**17 // 4096, 4096, device="cuda")
        y = torch.empty_like(x)
        ways = {
            "copy": lambda x=x, y=y: y.copy_(x),
            "fusebook.softmax": lambda x=x: fusebook.softmax(x),
        }
        ours = timing.cold(ways)
        for name, way in ways.items():
            theirs = triton.testing.do_bench(
                way, warmup=50, rep=200, quantiles=[0.5]
            )
            if isinstance(theirs, (list, tuple)):  # a list in some versions
                theirs = theirs[0]
            rows.append(
                {
                    "what": name,
                    "MiB read and written": mib,
                    "fusebook us": ours[name].q50 * 1e6,
                    "do_bench us": theirs * 1e3,
                }
            )
    return pd.DataFrame(rows)


second = measured("measuring_second", second_opinion)
apart = second.set_index(["what", "MiB read and written"])
apart["ratio"] = apart["fusebook us"] / apart["do_bench us"]
table(apart, "The same work by two harnesses, medians in microseconds")

# %%
claims(
    claim(
        "Both agree within 3 % from 256 MiB up",
        (apart["ratio"] - 1).abs() <= 0.03,
    )
)

# %%
# What to do, then
# ----------------
#
# - Synchronise, or use events. Say which clock.
# - Flush several times the L2 cache, or say that the work was warm.
# - Warm up; interleave; take medians; show the spread.
# - Fresh random input, poisoned output, and a check of what was timed.
# - Hold the time against what this machine was measured to do.

provenance(clock, cache, first, lazy, host, second)

# %%
downloads(second, "second_opinion")
