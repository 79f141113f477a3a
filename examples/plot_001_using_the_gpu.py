# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Using the GPU: old advice, measured again
=========================================

Between 2012 and 2014 the manual of Theano, an ancestor of today's frameworks,
had `a chapter on using the GPU <https://github.com/Theano/Theano/blob/
master/doc/tutorial/using_gpu.txt>`__: how to see that it is used, what to keep
there, what it is good at, and a list of tips. Much of that has become
folklore. This page asks the chapter's questions again, in its order, of one
GPU of today. Its result is a table, :ref:`old-advice`: each piece of advice,
what became of it, and the measurement that says so.

Two of its exercises have pages of their own: programming a GPU directly is
:doc:`plot_101_elementwise`, and the training step of a logistic regression is
:doc:`plot_301_logistic_step`. How to measure at all is
:doc:`plot_002_measuring`.

With a CUDA GPU everything is measured as the page runs. Without one, it is
replayed from the record of a GPU that is named at the end.

For whom: anyone who writes PyTorch or NumPy and asks when a GPU helps. The few
kernels here need not be understood.

Read before: nothing.
"""

# %%
# Am I using the GPU?
# -------------------
#
# The manual's first program computes the exponential of 10 * 30 * 768 numbers
# a thousand times and then searches its graph for operators of the CPU, since
# a compiler decided what ran where. Today the data decides: an operation runs
# where its operands are, and a tensor tells.

# sphinx_gallery_tags = ["using the GPU", "transfers", "CUDA graph"]
import contextlib
import json
import os
import re
import subprocess
import sys
import time

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots, tables
from fusebook.cards.elementwise import ADD_SUB
from fusebook.measure import timing
from fusebook.measure.inputs import generator
from fusebook.page import (
    claim,
    claims,
    downloads,
    holds,
    measured,
    provenance,
    results,
    say,
    table,
)

import numpy as np
import pandas as pd
import torch
import triton
import triton.language as tl
from torch.profiler import ProfilerActivity, profile, record_function

n = 10 * 30 * 768  # 10 numbers for each of 768 threads on each of 30 cores

x = torch.rand(n, generator=generator(22), device=generator(22).device)
y = torch.exp(x)
here = pd.Series(
    {"device": str(y.device), "dtype": str(y.dtype)}, name="on this machine"
)
table(here.to_frame(), "exp(x), asked where it is", fold=False)

# %%
# What the manual looked for can be looked for as well. The profiler names the
# kernels that ran, and a kernel of ours shows its machine code: somewhere in
# it must stand the instruction that the exponential is made of.


@triton.jit
def once(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, tl.exp(x.to(tl.float32)), mask=at < n)


# site: fold
def link():
    """The lanes between host and GPU, by NVML: generation, width, GB/s."""
    try:
        import pynvml  # the module of nvidia-ml-py

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)
        width = pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)
    except Exception:  # a container without NVML, or a GPU without PCIe
        return {"PCIe GB/s, each way": "nan"}
    # 8 GT/s in generation 3, doubled in each since. Data are 128 of 130 bits,
    # and from generation 6 on 242 of 256 bytes.
    data = 128 / 130 if generation < 6 else 242 / 256
    rate = 8 * 2 ** (generation - 3) * width * data / 8
    return {
        "PCIe generation": str(generation),
        "PCIe lanes": str(width),
        "PCIe GB/s, each way": f"{rate:.1f}",
    }


# site: fold
def refusal(function):
    """What an operation says when it raises."""
    try:
        function()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "nothing"


def ask():
    x = torch.rand(n, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        y = torch.exp(x)
        torch.cuda.synchronize()
    ran = [e.name for e in seen.events() if e.device_type.name == "CUDA"]
    out = torch.empty_like(x)
    built = once[(triton.cdiv(n, 1024),)](out, x, n, BLOCK=1024)
    lines = [line.split() for line in built.asm["ptx"].splitlines()]
    code = [w[0] for w in lines if w and w[0].startswith("ex2")]
    on_cpu = torch.exp(x.cpu())
    apart = ((y.cpu() - on_cpu).abs() / on_cpu).max().item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.exp(x, out=out)
    x.copy_(torch.rand(n))
    graph.replay()
    new = torch.equal(out, torch.exp(x))
    torch.cuda.set_sync_debug_mode("error")
    waits = refusal(lambda: x[0].item())
    torch.cuda.set_sync_debug_mode("default")
    tiny = torch.full((1,), 1e-40, device="cuda") * 1
    whole = torch.ones(1, dtype=torch.int32, device="cuda")
    wave = torch.exp(torch.full((1,), 1j, device="cuda"))
    answers = {
        "device": str(y.device),
        "dtype": str(y.dtype),
        "kernel": ran[0][:64] if ran else "none",
        "instruction": code[0] if code else "none",
        "CPU and GPU differ by, in eps": f"{apart / 2**-23:.2f}",
        "1e-40 times 1": f"{tiny.item():.0e}",
        "int32 times float32": str((whole * x[:1]).dtype),
        "mean of float32": str(x.mean().dtype),
        "exp of i": f"{wave.item():.3f}",
        "a tensor of the GPU plus one of the CPU": refusal(
            lambda: x + torch.rand(n)
        ),
        "item() where waiting is an error": waits,
        "a graph sees values copied in": "yes" if new else "no",
        "GPUs that this process sees": str(torch.cuda.device_count()),
        "name": torch.cuda.get_device_name(),
        "compute capability": "{}.{}".format(
            *torch.cuda.get_device_capability()
        ),
        **link(),
    }
    return pd.DataFrame(answers.items(), columns=["question", "answer"])


asked = measured("using_answers", ask)
answer = asked.set_index("question")["answer"].astype(str)
table(asked.set_index("question").iloc[:4], "Asked of the GPU", fold=False)

# %%
claims(
    claim("The result is on the GPU.", answer["device"].startswith("cuda")),
    claim(
        "The kernel that ran is an elementwise one, by its name.",
        "elementwise" in answer["kernel"],
    ),
    claim(
        "The exponential is one instruction, a power of two.",
        answer["instruction"].startswith("ex2"),
    ),
    holds(
        "The GPU will not always produce the exact same floating-point "
        "numbers as the CPU (Theano's manual, 2012)",
        float(answer["CPU and GPU differ by, in eps"]) > 0,
    ),
    say(
        "The largest difference is {eps} eps of float32.",
        eps=answer["CPU and GPU differ by, in eps"],
    ),
)

# %%
# A thousand exponentials
# -----------------------
#
# The same loop in seven ways: in NumPy; in PyTorch on the CPU; on the GPU,
# with each result brought back to the host; on the GPU, with results left
# there, in new memory each time or always in the same. Then two ways that the
# manual did not have: a :term:`CUDA graph`, which is the thousand launches
# recorded once and started by one call, and a single kernel that goes over the
# numbers a thousand times. All seven do the same thousand exponentials. (The
# single kernel, too, reads and writes all numbers in each round, in the
# :term:`L2 cache`.) On the host all results go into one array that is there
# already: a fresh one would pay for its memory, as :doc:`plot_002_measuring`
# shows.


@triton.jit
def many(y_ptr, x_ptr, n, TIMES, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(TIMES):
        # volatile: the compiler may not take the load out of the loop.
        x = tl.load(x_ptr + at, mask=at < n, volatile=True)
        tl.store(y_ptr + at, tl.exp(x.to(tl.float32)), mask=at < n)


def seven_ways(calls, mark=contextlib.nullcontext):
    """Ways to compute exp of n numbers `calls` times, each call marked."""
    host = np.random.default_rng(22).random(n, dtype=np.float32)
    on_cpu, x = torch.from_numpy(host), torch.from_numpy(host).cuda()
    result, out = torch.zeros(n), torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    torch.exp(x, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            torch.exp(x, out=out)
    grid = (triton.cdiv(n, 1024),)

    def loop(function, times=calls):
        def run():
            for _ in range(times):
                with mark():
                    function()

        return run

    return {
        "NumPy": loop(lambda: np.exp(host, out=result.numpy())),
        "PyTorch, CPU": loop(lambda: torch.exp(on_cpu, out=result)),
        "GPU, copied back": loop(lambda: result.copy_(torch.exp(x))),
        "GPU, left there": loop(lambda: torch.exp(x)),
        "the same, into one tensor": loop(lambda: torch.exp(x, out=out)),
        "CUDA graph": loop(graph.replay, 1),
        "one kernel": loop(
            lambda: many[grid](out, x, n, calls, BLOCK=1024), 1
        ),
    }


def thousand():
    rows = []
    for name, run in seven_ways(1000).items():
        run()
        took = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            called = time.perf_counter() - start
            torch.cuda.synchronize()
            took.append((time.perf_counter() - start, called))
        whole, called = sorted(took)[2]
        rows.append({"way": name, "us": whole * 1e3, "host us": called * 1e3})
    return pd.DataFrame(rows)


ways = measured("using_thousand", thousand)
us = ways.set_index("way")["us"]
shown = ways.set_index("way")
shown["times as fast as NumPy"] = us["NumPy"] / us
table(shown, "exp of 230400 numbers, microseconds a time", fold=False)

# %%
# Then and now: the manual's figures of 2012, on a GeForce GTX 580, beside
# those of the same four loops, in seconds for the thousand. (Its first loop
# also copied its operand each time.)

then_and_now = pd.DataFrame(
    {
        "2012, s": [46.0, 3.07, 0.639, 0.349],
        "now, s": 1e-3
        * us[["NumPy", "PyTorch, CPU", "GPU, copied back", "GPU, left there"]],
    }
)
then_and_now["times as fast"] = (
    then_and_now["2012, s"] / then_and_now["now, s"]
)
table(then_and_now, "A thousand exponentials, then and now", fold=False)

# %%
# Where does the time go? A picture of the first moments of each way, with
# forty calls in place of a thousand: what the host does above, kernels below
# it, and copies below these. (The profiler makes each call of the host
# longer.)


def trace():
    rows = []
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    marked = seven_ways(40, lambda: record_function("call"))
    del marked["the same, into one tensor"]  # it looks like the one before
    for name, run in marked.items():
        run()
        with profile(activities=kinds) as seen:
            for _ in range(2):  # the profiler's own first calls are slow
                run()
                torch.cuda.synchronize()
        found = [
            (e.name, e.device_type.name, e.time_range) for e in seen.events()
        ]
        calls = [t for k, on, t in found if k == "call" and on == "CPU"]
        calls = sorted(calls, key=lambda t: t.start)[len(calls) // 2 :]
        spans = [("host", t) for t in calls]
        for k, on, t in found:
            if on == "CUDA" and k != "call":
                spans.append(("copy" if "emcpy" in k else "kernel", t))
        for lane, t in spans:
            start = t.start - calls[0].start
            if 0 <= start < 1000:
                rows.append((name, lane, start, t.end - t.start))
    return pd.DataFrame(rows, columns=["way", "lane", "start us", "us"])


spans = measured("using_timeline", trace)
ax = plots.timeline(spans, until=400, title="exp of 230400 numbers")

# %%
# On the GPU the work itself is a thin line. A result that is brought back
# costs a copy and more: the host waits for it before it starts the next call.
# Where results are left on the GPU, the host is the slow one: each kernel ends
# before the next is launched. A graph takes the host out of the loop, and one
# kernel takes the launches out.

busy = spans.groupby(["way", "lane"])["us"].median()
claims(
    claim(
        "Results that are left on the GPU are {ratio:.0f} times as fast as "
        "results that are brought back.",
        us["GPU, copied back"] > 5 * us["GPU, left there"],
        headline=True,
        ratio=us["GPU, copied back"] / us["GPU, left there"],
    ),
    say(
        "The manual saved about half by it in 2012. Here each result goes "
        "back at {rate:.1f} GB/s, into memory that is not pinned; by NVML the "
        "link could carry {link} GB/s.",
        rate=4 * n / 1e3 / (us["GPU, copied back"] - us["GPU, left there"]),
        link=answer["PCIe GB/s, each way"],
    ),
    say(
        "With its results brought back the GPU is {ratio:.2f} times as fast "
        "as NumPy, and {other:.2f} times as fast as PyTorch on all cores of "
        "its own host.",
        ratio=us["NumPy"] / us["GPU, copied back"],
        other=us["PyTorch, CPU"] / us["GPU, copied back"],
    ),
    claim(
        "Where results are left on the GPU, it works for less than a quarter "
        "of the time that a call takes: for {share:.0%} of it.",
        busy["GPU, left there", "kernel"] < us["GPU, left there"] / 4,
        share=busy["GPU, left there", "kernel"] / us["GPU, left there"],
    ),
    claim(
        "A CUDA graph is {ratio:.1f} times as fast as a loop in Python, more "
        "than 3 times.",
        us["CUDA graph"] < us["GPU, left there"] / 3,
        ratio=us["GPU, left there"] / us["CUDA graph"],
    ),
    claim(
        "One kernel is {ratio:.1f} times as fast as the graph, more than "
        "twice.",
        us["one kernel"] < us["CUDA graph"] / 2,
        ratio=us["CUDA graph"] / us["one kernel"],
    ),
)

# %%
# What can be accelerated
# -----------------------
#
# The manual has a list, "to give a rough idea of what to expect". Here it is
# with numbers, on one GPU and on all cores of the CPU of the same machine. The
# third column also brings the operands from the host and the result back: a
# program that uses the GPU for only this operation pays that. Each call is
# waited for, so a small one takes longer here than among the thousand above.
# Results are written over those of the call before, everywhere. (The
# convolution takes no result to write to. It multiplies in float32 here; on
# the GPU PyTorch would take TF32 unless told otherwise.)


def seconds(function, repeat=5):
    """The median of a call, waited for."""
    times = timing.call({"it": function}, warmup=2, repeat=repeat)
    return times["it"].q50


def operations():
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    def into(out, x):
        """A copy into a result, or into a new one where there is none."""
        if out is None:
            out = torch.empty(x.shape, device=x.device)
        return out.copy_(x)

    square, image = normal(4096, 4096), normal(32, 64, 56, 56)
    wide, index = normal(8192, 8192), torch.randperm(8192, generator=rng)
    work = {
        "matrix product, 4096": (torch.mm, (square, square)),
        "convolution, 3 x 3": (
            lambda x, w, out: torch.conv2d(x, w),
            (image, normal(64, 64, 3, 3)),
        ),
        "exp of 67 million": (torch.exp, (wide,)),
        "exp of 230400": (torch.exp, (normal(n),)),
        "rows by index": (
            lambda x, i, out: torch.index_select(x, 0, i, out=out),
            (wide, index),
        ),
        "transposed, a view": (lambda x, out: x.T, (wide,)),
        "transposed, moved": (lambda x, out: into(out, x.T), (wide,)),
        "sum of each row": (
            lambda x, out: torch.sum(x, 1, out=out),
            (wide,),
        ),
        "sum of each column": (
            lambda x, out: torch.sum(x, 0, out=out),
            (wide,),
        ),
        "copy": (lambda x, out: into(out, x), (wide,)),
    }

    def timed(function, given):
        there = [v.cuda() for v in given]
        here, result = function(*given, out=None), function(*there, out=None)
        back = torch.zeros(here.shape)

        def both_ways():
            brought = [v.cuda() for v in given]
            back.copy_(function(*brought, out=result))

        times = {
            "CPU us": seconds(lambda: function(*given, out=here), 3),
            "GPU us": seconds(lambda: function(*there, out=result), 9),
            "there and back us": seconds(both_ways, 3),
        }
        return {what: 1e6 * t for what, t in times.items()}

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        rows = [{"what": name, **timed(*one)} for name, one in work.items()]
    frame = pd.DataFrame(rows)
    frame["threads"] = torch.get_num_threads()
    return frame


work = measured("using_operations", operations).set_index("what")
faster = pd.DataFrame(
    {
        "CPU us": work["CPU us"],
        "GPU us": work["GPU us"],
        "there and back us": work["there and back us"],
        "GPU, times as fast": work["CPU us"] / work["GPU us"],
        "there and back, times": work["CPU us"] / work["there and back us"],
    }
)
threads = int(work["threads"].iloc[0])
table(
    faster,
    f"One operation, a call: GPU against {threads} threads of the CPU",
    fold=False,
)

# %%
gains, paid = faster["GPU, times as fast"], faster["there and back, times"]
heavy = ["matrix product, 4096", "convolution, 3 x 3", "exp of 67 million"]
sums = ["sum of each row", "sum of each column"]
claims(
    holds(
        "Matrix products, convolutions and large elementwise operations are "
        "accelerated 5 to 50 times (2012): here {a:.0f}, {b:.0f} and {c:.0f} "
        "times.",
        gains[heavy].between(5, 50),
        a=gains[heavy[0]],
        b=gains[heavy[1]],
        c=gains[heavy[2]],
    ),
    claim(
        "Matrix products, convolutions and large elementwise operations are "
        "at least 5 times as fast.",
        gains[heavy] >= 5,
    ),
    holds(
        "Constant-time reshaping is equally fast on both (2012): a transposed "
        "view, which moves nothing.",
        0.5 < gains["transposed, a view"] < 2,
    ),
    holds(
        "Indexing and dimension-shuffling are equally fast on both (2012): "
        "here, where they move data, rows by index are {rows:.0f} and a "
        "transposition is {moved:.0f} times as fast on the GPU.",
        gains[["rows by index", "transposed, moved"]].between(0.5, 2),
        rows=gains["rows by index"],
        moved=gains["transposed, moved"],
    ),
    holds(
        "Summation over rows or columns can be a little slower on the GPU "
        "(2012): here rows are {rows:.0f} and columns {columns:.0f} times as "
        "fast.",
        bool((gains[sums] < 1).any()),
        rows=gains[sums[0]],
        columns=gains[sums[1]],
    ),
    holds(
        "Copying often cancels most of the advantage of one operation (2012): "
        "{lost} of {all} operations lose more than half of it.",
        bool((paid < gains / 2).sum() > len(paid) / 2),
        lost=int((paid < gains / 2).sum()),
        all=len(paid),
    ),
    say(
        "With the copies, {lost} of {all} operations are slower than on the "
        "CPU. (One of them is the view, which moves nothing on either side.)",
        lost=int((paid < 1).sum()),
        all=len(paid),
    ),
    claim(
        "Small work gains little: the exponential of 230400 numbers is "
        "{ratio:.1f} times as fast on the GPU, less than 5.",
        gains["exp of 230400"] < 5,
        ratio=gains["exp of 230400"],
    ),
)

# %%
# The convolution in a run of its own, in float32 and in :term:`TF32`, with its
# largest error relative to float64:


def in_tf32():
    rng = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(*shape, generator=rng).cuda()
        for shape in ((32, 64, 56, 56), (64, 64, 3, 3))
    )
    exact = torch.conv2d(x.double(), w.double())
    rows = []
    for name, allowed in (("float32", False), ("TF32", True)):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            us = 1e6 * seconds(lambda: torch.conv2d(x, w), 9)
            apart = (torch.conv2d(x, w) - exact).abs().max()
        rows.append((name, us, (apart / exact.abs().max()).item()))
    return pd.DataFrame(rows, columns=["convolution in", "us", "error"])


convolved = measured("using_tf32", in_tf32).set_index("convolution in")
table(convolved, "A convolution, 3 x 3, on the GPU, by one call", fold=False)

# %%
say(
    "In TF32, which PyTorch takes for convolutions unless told otherwise, it "
    "is {gain:.1f} times as fast, and its largest error {loss:.0f} times as "
    "large.",
    gain=convolved.loc["float32", "us"] / convolved.loc["TF32", "us"],
    loss=convolved.loc["TF32", "error"] / convolved.loc["float32", "error"],
)

# %%
# How many operations does it take until the copies pay? Here 16 million
# numbers go through tanh 1, 2, 5 and 10 times in a row. The GPU fetches the
# operand once, works, and brings the last result back, in pageable memory or
# in :term:`pinned memory`, which the next section explains.


def chains():
    host = torch.rand(2**24)
    other = torch.zeros(2**24)
    pinned, back = host.pin_memory(), torch.zeros(2**24).pin_memory()
    x, y = torch.empty(2**24, device="cuda"), torch.empty(2**24, device="cuda")

    def chain(x, y, times):
        for _ in range(times):
            x = torch.tanh(x, out=y)

    rows = []
    for times in (1, 2, 5, 10):

        def there_and_back(source, result, times=times):
            x.copy_(source)
            chain(x, y, times)
            result.copy_(y)

        ways = {
            "CPU": lambda times=times: chain(host, other, times),
            "GPU, pageable": lambda: there_and_back(host, other),
            "GPU, pinned": lambda: there_and_back(pinned, back),
            "GPU, left there": lambda times=times: chain(x, y, times),
        }
        row = {name: seconds(run, 9) * 1e3 for name, run in ways.items()}
        rows.append({"operations": times, **row})
    return pd.DataFrame(rows)


chained = measured("using_chains", chains).set_index("operations")
table(
    chained,
    "tanh of 16 million numbers, again and again, in milliseconds",
    fold=False,
)

# %%


def pays_from(way):
    """The shortest of the chains that is faster than on the CPU."""
    faster = chained.index[chained[way] < chained["CPU"]]
    return str(faster.min()) if len(faster) else "more than 10"


claims(
    say(
        "Through pageable memory the GPU pays from {pageable} operations on, "
        "through pinned memory from {pinned}, among chains of 1, 2, 5 and 10.",
        pageable=pays_from("GPU, pageable"),
        pinned=pays_from("GPU, pinned"),
    ),
    holds(
        "Copies cancel most of the advantage of one or two functions (2012): "
        "with pageable memory, chains of 1 and 2 lose more than half of it.",
        (chained["GPU, pageable"] > 2 * chained["GPU, left there"]).loc[
            [1, 2]
        ],
        of=chained,
    ),
)

# %%
# float32 only?
# ~~~~~~~~~~~~~
#
# In 2012 only float32 could be accelerated, and float64 was "still relatively
# slow". Elementwise operations should cost their bytes: twice as many in
# float64, half as many in the half types. Matrix products have units for each
# type, whose rates are beside them.


def types():
    rows = []
    x = 8 * torch.rand(2**27, device="cuda", dtype=torch.float64)
    right = torch.exp(x)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        given = x.to(dtype)
        out = torch.empty_like(given)
        way = {"exp": lambda given=given, out=out: torch.exp(given, out=out)}
        cold = timing.cold(way)["exp"].q50
        error = ((out.double() - right).abs() / right).max().item()
        rows.append((str(dtype)[6:], cold * 1e6, error))
    return pd.DataFrame(rows, columns=["dtype", "exp us", "exp, error"])


kinds = measured("using_types", types).rename(
    columns={"exp, error": "relative error, operand rounded too"}
)
on = kinds.attrs["origin"].machine
kind = kinds.set_index("dtype")
rates = pd.Series(on.rates) / 1e12
precision = kind.join(rates.rename("products, TFLOP/s"), how="outer")
order = ["float64", "float32", "tf32", "float16", "bfloat16"]
table(
    precision.reindex(order),
    f"{on.name}: exp of 134 million numbers, cold, and the rate of products",
    fold=False,
)

# %%
# That is one data-center GPU. float64 is a question of what was bought: some
# GPUs have few units for it. NVIDIA publishes how many results a
# multiprocessor gives in a clock (`CUDA Programming Guide
# <https://docs.nvidia.com/cuda/cuda-c-programming-guide/>`__, *Throughput of
# Native Arithmetic Instructions*). These are its figures, not measurements of
# ours, and they leave :term:`tensor cores <tensor core>` out.

published = pd.DataFrame(
    [
        ("8.0", "A100", 64, 32),
        ("8.6", "A10, GeForce RTX 30", 128, 2),
        ("8.9", "L4, L40, GeForce RTX 40", 128, 2),
        ("9.0", "H100, H200", 128, 64),
    ],
    columns=["capability", "GPUs", "float32", "float64"],
).set_index("capability")
published["float64 is"] = [
    f"1/{single // double}"
    for single, double in zip(
        published["float32"], published["float64"], strict=True
    )
]
table(published, "Additions or products a clock and multiprocessor, published",
      fold=False)  # fmt: skip

# %%
double, single = (kind.loc[name, "exp us"] for name in ("float64", "float32"))
claims(
    claim(
        "The exponential takes twice float32's time in float64 and half of it "
        "in float16 and bfloat16, within a tenth: the time is that of the "
        "bytes.",
        (
            kind["exp us"].drop("float32")
            / pd.Series({"float64": 2, "float16": 0.5, "bfloat16": 0.5})
            / single
            - 1
        ).abs()
        < 0.1,
    ),
    say(
        "In matrix products float64 reaches {double:.2f} times the rate of "
        "float32, TF32 {tf32:.1f} times and bfloat16 {half:.1f} times.",
        double=rates["float64"] / rates["float32"],
        tf32=rates["tf32"] / rates["float32"],
        half=rates["bfloat16"] / rates["float32"],
    ),
    holds(
        "Only computations with float32 can be accelerated (2012): on the "
        "GPU of this record float64 products run at {ratio:.2f} times the "
        "rate of float32.",
        rates["float64"] < 0.5 * rates["float32"],
        ratio=rates["float64"] / rates["float32"],
    ),
    holds(
        "float64 is still relatively slow (2012), taken as less than half of "
        "float32's rate, on GPUs of capability 8.6 and 8.9. Those of 8.0 and "
        "9.0, of data centers, have half of it (published ratios, above).",
        published["float64"].loc[["8.6", "8.9"]]
        < 0.5 * published["float32"].loc[["8.6", "8.9"]],
        of=published,
    ),
)

# %%
# Moving data
# -----------
#
# Host and GPU are connected by lanes of PCI Express; :term:`NVML` says how
# many and how fast. *Pageable* memory, which the operating system may move,
# has to be copied into pinned memory before the GPU can fetch it. *Pinned*
# memory is fetched directly, and with ``non_blocking=True`` while the host
# goes on.


def copies_of(size):
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned = torch.ones(size, dtype=torch.uint8).pin_memory()
    return {
        "pageable, to the GPU": lambda: there.copy_(pageable),
        "pinned, to the GPU": lambda: there.copy_(pinned),
        "pinned, non_blocking": lambda: there.copy_(pinned, non_blocking=True),
        "pageable, from the GPU": lambda: pageable.copy_(there),
        "pinned, from the GPU": lambda: pinned.copy_(there),
    }


def transfers():
    rows = []
    for mib in (1 / 16, 1, 4, 16, 64, 256):
        size = int(mib * 2**20)
        for way, copy in copies_of(size).items():
            took = seconds(copy, 9)
            returns = []
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                copy()
                returns.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            host = sorted(returns)[2] * 1e6
            rows.append((way, mib, size / took / 1e9, host))
    return pd.DataFrame(rows, columns=["way", "MiB", "GB/s", "host us"])


moved = measured("using_transfers", transfers)
wide = moved.pivot_table("GB/s", "MiB", "way", sort=False)
lanes = float(answer["PCIe GB/s, each way"])
drawn = wide.drop(columns="pinned, non_blocking")
ax = plots.lines(
    drawn,
    title="Between host and GPU",
    ylabel="GB/s",
    source=moved,
    clock="call",
    marks={"the link": lanes} if lanes > 0 else {},
)

# %%
link_facts = [name for name in answer.index if name.startswith("PCIe")]
table(answer[link_facts].to_frame("answer"), "The link, by NVML", fold=False)

# %%
waits = moved.pivot_table("host us", "MiB", "way", sort=False)
table(waits, "When the call returns: microseconds of the host", fold=False)

# %%
best, plain = wide["pinned, to the GPU"].max(), wide.loc[256]
pinned = pd.Series(
    {
        way: plain[f"pinned, {way}"] / plain[f"pageable, {way}"]
        for way in ("to the GPU", "from the GPU")
    }
)
claims(
    say(
        "Pinned, {best:.1f} GB/s is {share:.0%} of the link; pageable memory "
        "of 256 MiB goes to the GPU at {slow:.1f} GB/s.",
        best=best,
        share=best / lanes,
        slow=plain["pageable, to the GPU"],
    ),
    claim(
        "At 256 MiB, the largest size of the picture, copies of pinned memory "
        "are at least 3 times as fast: {to:.1f} times to the GPU and "
        "{back:.1f} times from it.",
        pinned > 3,
        to=pinned.iloc[0],
        back=pinned.iloc[1],
    ),
    claim(
        "Without blocking, the call that copies 256 MiB returns after "
        "{share:.1%} of the time of the copy, less than a tenth.",
        waits.loc[256, "pinned, non_blocking"]
        < waits.loc[256, "pinned, to the GPU"] / 10,
        share=waits.loc[256, "pinned, non_blocking"]
        / waits.loc[256, "pinned, to the GPU"],
    ),
    say(
        "The memory of this GPU copies within itself {ratio:.0f} times as "
        "fast as the link brings data.",
        ratio=on.copy / 2 / 1e9 / best,
    ),
)

# %%
# Overlap
# ~~~~~~~
#
# Copies can overlap with work: while one chunk is multiplied, the next one is
# copied on a second :term:`stream`, into the other of two buffers. Events keep
# the two streams in step.


def overlap():
    chunks, size = 16, 4096
    host = torch.rand(chunks, size, size).pin_memory()  # 64 MiB each
    weights = torch.rand(size, 1024, device="cuda")
    slot = torch.empty(2, size, size, device="cuda")
    y = torch.empty(2, size, 1024, device="cuda")
    compute = torch.cuda.current_stream()
    copier = torch.cuda.Stream()

    def bring(i):
        slot[i % 2].copy_(host[i], non_blocking=True)

    def use(i):
        torch.mm(slot[i % 2], weights, out=y[i % 2])

    def one_stream():
        for i in range(chunks):
            bring(i)
            use(i)

    def two_streams():
        free = [compute.record_event() for _ in range(2)]
        for i in range(chunks):
            copier.wait_event(free[i % 2])  # its last user is done
            with torch.cuda.stream(copier):
                bring(i)
            compute.wait_stream(copier)
            use(i)
            free[i % 2] = compute.record_event()

    ways = {
        "copies alone": lambda: [bring(i) for i in range(chunks)],
        "products alone": lambda: [use(i) for i in range(chunks)],
        "one stream": one_stream,
        "two streams": two_streams,
    }
    rows = [(way, seconds(run) * 1e3) for way, run in ways.items()]
    return pd.DataFrame(rows, columns=["way", "ms"])


streams = measured("using_overlap", overlap)
ms = streams.set_index("way")["ms"]
table(
    streams.set_index("way"),
    "16 chunks of 64 MiB, copied and multiplied, in milliseconds",
    fold=False,
)

# %%
claims(
    claim(
        "In one stream the times of copies and products add up, within a "
        "tenth: it takes {ratio:.2f} times their sum.",
        abs(ms["one stream"] / ms.iloc[:2].sum() - 1) < 0.1,
        ratio=ms["one stream"] / ms.iloc[:2].sum(),
    ),
    claim(
        "With two streams the whole takes as long as the longer of the two, "
        "within a tenth: {ratio:.2f} times.",
        ms["two streams"] < 1.1 * ms.iloc[:2].max(),
        ratio=ms["two streams"] / ms.iloc[:2].max(),
    ),
)

# %%
# Tips, then and now
# ------------------
#
# The manual's tips are about float32, about leaving data where it is, about
# profiling, and about switches of the compiler. The first two are above.
#
# A short profile
# ~~~~~~~~~~~~~~~
#
# "Is time being used sensibly?" was asked of ``profile=True``, which split the
# time into operators of the CPU, of the GPU and transfers. ``torch.profiler``
# does the same. The program is ten steps of a small network, with a batch that
# comes from the host and a number that is printed: both are the usual way to
# write it.


def short_profile():
    rng = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(8192, 1024, device="cuda", generator=rng)
    w = torch.randn(1024, 1024, device="cuda", generator=rng)
    pageable = torch.randn(10, 8192, 1024)
    pinned = pageable.pin_memory()

    def steps(batches):
        for batch in batches:
            x.copy_(batch, non_blocking=True)
            hidden = x @ w
            (hidden * torch.sigmoid(hidden)).mean().item()

    whole = {
        "wall us": seconds(lambda: steps(pageable)) * 1e6,
        "wall us, pinned": seconds(lambda: steps(pinned)) * 1e6,
    }
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]
    ) as seen:
        steps(pageable)
        torch.cuda.synchronize()
    rows = [
        {
            "operation": e.key,
            "calls": e.count,
            "host us": e.self_cpu_time_total,
            "GPU us": e.self_device_time_total,
        }
        for e in seen.key_averages()
        if e.device_type.name == "CPU" and e.self_device_time_total > 0
    ]
    frame = pd.DataFrame(rows).sort_values("GPU us", ascending=False)
    return frame.assign(**whole).reset_index(drop=True)


profiled = measured("using_profile", short_profile)
parts = profiled.set_index("operation")
parts = parts[parts.index.str.startswith("aten::")]  # not the profiler's own
wall, wall_pinned = parts["wall us"].iloc[0], parts["wall us, pinned"].iloc[0]
table(
    parts[["calls", "host us", "GPU us"]],
    "Ten steps by torch.profiler, in microseconds",
    fold=False,
)

# %%
is_copy = parts.index.str.contains("copy_|local_scalar")
carried = parts.loc[is_copy, "GPU us"].sum() / parts["GPU us"].sum()
claims(
    say(
        "Of the GPU's time, {share:.0%} are transfers. Pinning the batches "
        "makes the ten steps {gain:.1f} times as fast, and no kernel was "
        "touched.",
        share=carried,
        gain=wall / wall_pinned,
    ),
    claim(
        "More than half of the GPU's time in these ten steps is transfers.",
        carried > 0.5,
    ),
)

# %%
# Switches of the compiler
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# The tip has three switches and one for all of them: ``-ftz`` turns subnormal
# numbers into zero, ``-prec-div`` and ``-prec-sqrt`` allow approximate
# divisions and roots. A kernel that waits for memory cannot show what they are
# worth. So these kernels do 64 divisions, roots or exponentials for each
# number that they load, and every result is compared with float64.

SWITCHES = [
    "none",
    "--ftz=true",
    "--prec-div=false",
    "--prec-sqrt=false",
    "--use_fast_math",
]
RECURRENCE = """
extern "C" __global__ void again(float* y, const float* x, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float a = x[i];
    float v = a;
    for (int k = 0; k < 64; ++k) v = EXPRESSION;
    y[i] = v;
}
"""
WORK = {  # in C, and in PyTorch
    "divisions": ("1.0f + a / v", lambda a, v: 1 + a / v),
    "roots": ("sqrtf(a + v)", lambda a, v: (a + v).sqrt()),
    "exponentials": ("expf(-a * v)", lambda a, v: (-a * v).exp()),
    "subnormal sums": (
        "1e-39f * a + 0.0f * v",
        lambda a, v: 1e-39 * a + 0 * v,
    ),
}


def switches():
    n = 2**24
    x = 0.5 + torch.rand(n, device="cuda", generator=generator(7)) / 2
    y = torch.empty_like(x)

    def launcher(source, switch, name):
        # By another name each: compiled again under the same one, what came
        # back on this machine was the first, whatever the switch.
        kernel = torch.cuda._compile_kernel(
            source.replace("again", name),
            name,
            nvcc_options=[] if switch == "none" else [switch],
        )
        return lambda: kernel((n // 256, 1, 1), (256, 1, 1), (y, x, n))

    rows = []
    for work, (expression, meaning) in WORK.items():
        want = x.double()
        for _ in range(64):
            want = meaning(x.double(), want)
        source = RECURRENCE.replace("EXPRESSION", expression)
        for switch in SWITCHES:
            run = launcher(source, switch, f"again_{len(rows)}")
            us = timing.cold({"it": run}, repeat=9)["it"].q50 * 1e6
            error = ((y - want).abs() / want).max().item()
            rows.append((work, switch, us, error))
    return pd.DataFrame(rows, columns=["work", "switch", "us", "error"])


switched = measured("using_switches", switches, by_device=True)
# A record quotes what a spreadsheet would take for a formula.
switched["switch"] = switched["switch"].str.lstrip("'")
switched = switched.set_index(["work", "switch"])
columns = switched.index.unique("switch")
by_switch = switched.pivot_table("us", "work", "switch")[columns]
table(
    by_switch,
    "64 of each for each of 16 million numbers, cold, in microseconds",
    fold=False,
)

# %%
wrong = switched.pivot_table("error", "work", "switch")[columns]
table(wrong, "The largest error, relative to float64", fold=False)

# %%
faster_by = by_switch.rdiv(by_switch["none"], axis=0)
wrong_by = wrong.div(wrong["none"], axis=0)
gain, loss = (
    of.loc["divisions", "--use_fast_math"] for of in (faster_by, wrong_by)
)
claims(
    *(
        say(
            "With `{switch}` the {work} are {gain:.1f} times as fast as "
            "without any switch, and the largest error is {loss:.1f} times as "
            "large.",
            switch=switch,
            work=work,
            gain=faster_by.loc[work, switch],
            loss=wrong_by.loc[work, switch],
        )
        for switch, work in zip(
            columns[2:], ["divisions", "roots", "exponentials"], strict=True
        )
    ),
    claim(
        "With `{switch}` the exponentials take {times:.2f} times as long as "
        "without. `expf` has one instruction more then: a multiply-add that "
        "also clamps its result becomes a multiply-add and an addition that "
        "clamps, in the code that NVRTC 13.0 makes for compute capability "
        "9.0.",
        faster_by.loc["exponentials", columns[1]] < 1,
        fatal=False,
        switch=columns[1],
        times=1 / faster_by.loc["exponentials", columns[1]],
    ),
    claim(
        "With -ftz sums of subnormal numbers are lost altogether; without it "
        "their largest error is {error:.0e} of the sum.",
        wrong.loc["subnormal sums", columns[1]] == 1
        and wrong.loc["subnormal sums", "none"] < 1e-4,
        error=wrong.loc["subnormal sums", "none"],
    ),
    claim(
        "PyTorch's product keeps subnormal numbers: 1e-40 times 1 is not "
        "zero.",
        answer["1e-40 times 1"] == "1e-40",
    ),
)

# %%
# No operator on the CPU by accident
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# ``assert_no_cpu_op`` stopped a program that had left the GPU unasked, and
# ``tag.target`` kept an input on the CPU. In PyTorch operands stay where they
# are. It raises an error where they are on two devices, unless one of them is
# a zero-dimensional tensor of the CPU. It waits silently where the host asks
# for a value, as ``item()`` does; a mode makes that an error, too.

accidents = [
    "a tensor of the GPU plus one of the CPU",
    "item() where waiting is an error",
]
table(answer[accidents].to_frame("says"), "Refused", fold=False)

# %%


def meets_another_device(shape):
    """Whether a tensor of the CPU adds to one of a device without memory."""
    there = torch.ones(3, device="meta")
    return refusal(lambda: there + torch.ones(shape)) == "nothing"


claims(
    claim(
        "A zero-dimensional tensor of the CPU may be added to a tensor of "
        "another device, and one of three numbers may not.",
        meets_another_device(()) and not meets_another_device(3),
    ),
)

# %%
# Asynchrony
# ----------
#
# A call on the GPU returns when it has been queued. Two things follow, today
# as in 2012: a clock that does not wait shows too short a time, and an error
# is raised later than it occurs.


def clock():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    rows = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        returned = time.perf_counter() - start
        torch.cuda.synchronize()
        done = time.perf_counter() - start
        rows.append((returned * 1e6, done * 1e6))
    frame = pd.DataFrame(rows, columns=["returns us", "done us"])
    return frame.median().to_frame().T


clocks = measured("using_clock", clock)
table(clocks, "One matrix product of 8192 x 8192, in bfloat16", fold=False)

# %%
# For errors, a program of three lines: it takes an element that does not
# exist, computes something with it, and waits. After an error on the device
# its process cannot use the GPU any more, so the program runs in a process of
# its own; once as it is, and once with ``CUDA_LAUNCH_BLOCKING=1``, under which
# each launch is waited for.

PROGRAM = """
import json, os, time, torch

x = torch.rand(230400, device="cuda")
for times in (100, 1000):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        torch.exp(x)
    torch.cuda.synchronize()
    each = (time.perf_counter() - start) / times

wrong = torch.tensor([10**6], device="cuda")
torch.cuda.synchronize()
said = after = "nothing"
try:
    line = "y = x[wrong]"
    y = x[wrong]
    line = "z = torch.exp(y)"
    z = torch.exp(y)
    line = "torch.cuda.synchronize()"
    torch.cuda.synchronize()
except RuntimeError as error:
    said = str(error).splitlines()[0]
try:
    torch.zeros(1, device="cuda")
except RuntimeError as error:
    after = str(error).splitlines()[0]
os.write(1, json.dumps([line, said, after, each * 1e6]).encode())
os._exit(0)  # without the usual farewell to a device that no longer answers
"""


def late_errors():
    rows = []
    for blocking in ("0", "1"):
        environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": blocking}
        end = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        rows.append([blocking, *json.loads(end.stdout.splitlines()[-1])])
    columns = ["blocking", "raised at", "says", "the next call says", "us"]
    return pd.DataFrame(rows, columns=columns)


late = measured("using_errors", late_errors)
late["blocking"] = late["blocking"].astype(str)
error = late.set_index("blocking").rename(columns={"us": "exp, us a call"})
error.index.name = "CUDA_LAUNCH_BLOCKING"
table(error, "Where an error shows up", fold=False)

# %%
claims(
    claim(
        "A clock that does not wait sees {share:.0%} of the product, less "
        "than a tenth.",
        clocks["returns us"].iloc[0] < clocks["done us"].iloc[0] / 10,
        share=clocks["returns us"].iloc[0] / clocks["done us"].iloc[0],
    ),
    claim(
        "The error is raised after the line that makes it, at `{line}`.",
        error.loc["0", "raised at"] != "y = x[wrong]",
        line=error.loc["0", "raised at"],
    ),
    claim(
        "With CUDA_LAUNCH_BLOCKING=1 it is raised at the line itself.",
        error.loc["1", "raised at"] == "y = x[wrong]",
    ),
    claim(
        "Either way the process cannot use its GPU any more.",
        error["the next call says"] != "nothing",
    ),
    say(
        "Waiting for each launch, exp takes {ratio:.1f} times as long.",
        ratio=error.loc["1", "exp, us a call"]
        / error.loc["0", "exp, us a call"],
    ),
)

# %%
# Memory
# ------
#
# ``allow_gc=False`` told Theano to keep the memory of intermediate results,
# since giving it back makes the program wait. PyTorch's allocator keeps freed
# blocks and hands them out again. To see what that is worth, the second row
# gives them back after each call; the third always writes into one tensor.


def memory():
    def state(what):
        torch.cuda.synchronize()
        rows.append(
            {
                "what": what,
                "allocated MiB": torch.cuda.memory_allocated() / 2**20 - base,
                "reserved MiB": torch.cuda.memory_reserved() / 2**20 - held,
            }
        )

    def given_back():
        torch.exp(x)
        torch.cuda.empty_cache()

    rows = []
    x = torch.rand(n, device="cuda")
    out = torch.empty_like(x)
    torch.cuda.empty_cache()
    for what, run in {
        "a block that was kept": lambda: torch.exp(x),
        "a block that is given back": given_back,
        "one tensor, always": lambda: torch.exp(x, out=out),
    }.items():
        rows.append({"what": what, "us": seconds(run, 99) * 1e6})
    x = torch.rand(2**26, device="cuda")  # 256 MiB
    for what, run in {
        "two operations": fusebook.silu_eager,
        "one kernel": fusebook.silu,
    }.items():
        run(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(x)
        peak = torch.cuda.max_memory_allocated() - before
        rows.append({"what": what, "peak MiB": peak / 2**20})
    x = out = None
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated() / 2**20
    held = torch.cuda.memory_reserved() / 2**20
    blocks = [torch.empty(2**24, device="cuda") for _ in range(64)]
    state("64 blocks of 64 MiB")
    del blocks[::2]
    state("every second one freed")
    large = torch.empty(2**28, device="cuda")
    state("and 1 GiB asked for, in one piece")
    del large, blocks
    state("all freed")
    torch.cuda.empty_cache()
    state("empty_cache()")
    return pd.DataFrame(rows)


spent = measured("using_memory", memory).set_index("what")
table(
    spent[["us"]].dropna(),
    "exp of 230400 numbers into: microseconds a call, waited for",
    fold=False,
)

# %%
# The peak decides whether a model fits. A fused chain has no intermediate
# results, so it needs less: here ``x * sigmoid(x)`` of 256 MiB.

table(
    spent[["peak MiB"]].dropna(),
    "x * sigmoid(x): MiB beyond its operand",
    fold=False,
)

# %%
# Kept memory may be in pieces. *Allocated* is what tensors hold, *reserved*
# what PyTorch has taken from the GPU. When half of 64 blocks are freed there
# is room for 1 GiB, but not in one piece.

table(
    spent[["allocated MiB", "reserved MiB"]].dropna(),
    "Fragments",
    fold=False,
)

# %%
kept = spent["us"]
pieces = spent.loc["and 1 GiB asked for, in one piece"]
claims(
    say(
        "By the clock of one call that is waited for, giving the block back "
        "takes {ratio:.2f} times as long as keeping it, and always writing "
        "into one tensor {other:.2f} times.",
        ratio=kept["a block that is given back"]
        / kept["a block that was kept"],
        other=kept["one tensor, always"] / kept["a block that was kept"],
    ),
    claim(
        "One kernel needs half the memory of two operations.",
        spent.loc["one kernel", "peak MiB"]
        == spent.loc["two operations", "peak MiB"] / 2,
    ),
    claim(
        "The 1 GiB did not fit into what had been freed.",
        pieces["reserved MiB"] >= pieces["allocated MiB"] + 1024,
    ),
)

# %%
# Random numbers
# --------------
#
# A note of the manual says that the GPU has a generator of its own, which
# gives other numbers than the CPU's. Today a seed starts a generator on each
# device.


def random_numbers():
    n = 2**26
    rng = np.random.default_rng(0)
    mine = torch.Generator("cuda").manual_seed(0)
    host, there = torch.zeros(n), torch.zeros(n, device="cuda")
    ways = {
        "NumPy": lambda: rng.standard_normal(
            dtype=np.float32, out=host.numpy()
        ),
        "PyTorch, CPU": lambda: host.normal_(),
        "PyTorch, GPU": lambda: there.normal_(generator=mine),
    }
    rows = [
        {"way": way, "ms": 1e3 * seconds(run, 3)} for way, run in ways.items()
    ]

    def drawn(device):
        return torch.rand(1000, device=device, generator=seeded(device))

    def seeded(device):
        return torch.Generator(device).manual_seed(22)

    same = torch.equal(drawn("cuda"), drawn("cuda"))
    alike = torch.equal(drawn("cuda").cpu(), drawn("cpu"))
    return pd.DataFrame(rows).assign(again=same, **{"as the CPU": alike})


random = measured("using_random", random_numbers).set_index("way")
table(random[["ms"]], "67 million normal numbers, in milliseconds", fold=False)

# %%
claims(
    say(
        "The GPU draws them {ratio:.0f} times as fast as NumPy, which uses "
        "one core.",
        ratio=random.loc["NumPy", "ms"] / random.loc["PyTorch, GPU", "ms"],
    ),
    claim(
        "The same seed gives the same numbers again on the GPU.",
        random["again"].all(),
    ),
    holds(
        "The generator of the GPU gives other numbers than that of the CPU "
        "(2012), from the same seed.",
        not random["as the CPU"].any(),
    ),
)

# %%
# Changing values
# ---------------
#
# A *shared variable* was a tensor on the device with a name, and
# ``set_value`` put new numbers into it. Today every tensor is one:
# ``x.copy_(new)`` writes into its memory. A CUDA graph that is replayed needs
# that, since it knows addresses and not names.

claims(
    claim(
        "A graph sees what was copied into its operand.",
        answer["a graph sees values copied in"] == "yes",
    ),
)

# %%
# Which GPU, and how many
# -----------------------
#
# "There is a limit of one GPU per process", chosen by ``device=gpu1``. Today
# a process sees all that ``CUDA_VISIBLE_DEVICES`` leaves it, and each tensor
# says on which it is: ``torch.device("cuda", 1)``. That one process keeps two
# GPUs busy, and what a copy from one to the other costs, is measured by
# :doc:`plot_402_two_gpus`, on two. The table also has what an integer times a
# float32 gives, a mean, and a complex number: three things that the manual
# warns of.

facts = [
    "GPUs that this process sees",
    "name",
    "compute capability",
    "int32 times float32",
    "mean of float32",
    "exp of i",
]
table(answer[facts].to_frame("answer"), "This GPU", fold=False)

# %%
# Types that widen
# ~~~~~~~~~~~~~~~~
#
# The manual warns of types that widen to float64 by themselves: "circumvent
# the automatic cast of int32 with float32 to float64", by [u]int{8,16} or by a
# cast, and "prefer constructors like matrix [...] to dmatrix". NumPy still
# makes and widens to float64; PyTorch does not. What comes from NumPy brings
# its float64 along. No GPU is needed to see it:

mixed = {}
for name in ("int8", "uint8", "int16", "uint16", "int32", "int64"):
    numpys = np.ones(1, name) * np.ones(1, np.float32)
    torchs = torch.ones(1, dtype=getattr(torch, name)) * torch.ones(1)
    mixed[f"{name} times float32"] = (numpys.dtype.name, str(torchs.dtype)[6:])
normal = np.random.default_rng(0).standard_normal(3)
mixed["made by default"] = (
    normal.dtype.name,
    str(torch.randn(3).dtype)[6:],
)
mixed["from_numpy of NumPy's default"] = (
    normal.dtype.name,
    str(torch.from_numpy(normal).dtype)[6:],
)
widened = pd.DataFrame.from_dict(
    mixed, orient="index", columns=["NumPy", "PyTorch"]
)
table(widened, "What type comes out", fold=False)

# %%
claims(
    holds(
        "int32 with float32 gives float64 (2012): in NumPy.",
        widened.loc["int32 times float32", "NumPy"] == "float64",
    ),
    holds(
        "[u]int{8,16} avoid it (2012): in NumPy.",
        widened.filter(regex="int8|int16", axis=0)["NumPy"] == "float32",
    ),
    holds(
        "int32 with float32 gives float64 (2012): in PyTorch.",
        widened.loc["int32 times float32", "PyTorch"] == "float64",
    ),
    holds(
        "Prefer constructors that give float32 (2012): what NumPy makes by "
        "default is float64, and stays so in PyTorch.",
        widened.loc["from_numpy of NumPy's default", "PyTorch"] == "float64",
    ),
)

# %%
# Programming it directly
# -----------------------
#
# The manual lists CUDA, OpenCL, PyCUDA and PyOpenCL. What has changed is that
# one need not leave Python: kernels are written in Triton, or in CUDA C and
# compiled as the program runs, by CuPy or by NVIDIA's own `cuda.core`. Of the
# first examples of the manual, a product, a sum and a difference are kernels
# in Triton on :doc:`plot_101_elementwise`.
#
# Of `PyCUDA <https://github.com/inducer/pycuda>`__ the manual names five
# advantages: it is convenient, it binds all of the driver's interface, it
# turns errors into exceptions, its base layer is written in C++, and memory is
# freed with the object that holds it. PyCUDA is still maintained, and nothing
# here says that it has lost one of them. Three have become common: PyTorch and
# CuPy free memory with its tensor and raise an error as an exception, though
# late (*Asynchrony*, above), and both have convenient arrays. All of the
# driver's interface is bound by NVIDIA's `cuda-python
# <https://nvidia.github.io/cuda-python/>`__ too. A base layer in C++ is a
# matter of microseconds, which are counted below for CuPy's.
#
# `OpenCL <https://www.khronos.org/opencl/>`__ is still there for programs that
# have to run on GPUs of any maker, and so is PyOpenCL. AMD has `HIP
# <https://rocm.docs.amd.com/projects/HIP/>`__, which is CUDA C under other
# names, and Intel compiles `SYCL <https://www.khronos.org/sycl/>`__ for its
# own. Triton compiles for AMD's and Intel's GPUs as well, and PyTorch
# has backends for Intel's and Apple's. Nothing in this book was measured on
# them: ratios of bytes carry over, and times do not.
#
# A note of the manual can be tested at once: that fusion handles expressions
# of a single result only.

pair = results(
    ADD_SUB, config="8192x8192", variants=["eager", "torch.compile"]
)
few = results(
    ADD_SUB, config="20x10", variants=["eager", "CUDA C", "fusebook"]
)
queued = few.set_index("variant")["launch_us"]
two_results = tables.ratio(pair, "eager", "torch.compile").iloc[0]
by_way = pair.set_index("variant")
saved = 1e-6 * by_way["gpu_us"].sub(by_way.loc["torch.compile", "gpu_us"])
claims(
    say(
        "`torch.compile` makes x + y and x - y {ratio:.2f} times as fast as "
        "two operations. Reading the operands once predicts 1.5.",
        ratio=two_results,
    ),
    holds(
        "Fusion is only applicable to computations with a single output "
        "(2012).",
        two_results < 1.1,
    ),
    say(
        "To queue x + y and x - y of 20 x 10 numbers takes {cupy:.0f} us of "
        "the host's time as one kernel of CUDA C through CuPy, {ours:.0f} as "
        "one of ours, and {eager:.0f} as PyTorch's two operations.",
        cupy=queued.get("CUDA C"),
        ours=queued.get("fusebook"),
        eager=queued.get("eager"),
    ),
    say(
        "The manual's other advice on compilers is to choose between a short "
        "time to compile and a short time to run. The first call of "
        "`torch.compile` took {first:.1f} seconds here, in a process that had "
        "compiled before; at 8192 x 8192 it has paid for itself after "
        "{calls:.0f} calls.",
        first=by_way.loc["torch.compile", "first_call_s"],
        calls=by_way.loc["torch.compile", "first_call_s"] / saved["eager"],
    ),
)

# %%
# .. _old-advice:
#
# The old advice, line by line
# ----------------------------
#
# *Holds* is decided by the number beside it. Each line is one piece of advice;
# sentences of the manual that are quoted on the way here have verdicts of
# their own, which the box at the top counts apart.

lines = []


def line(advice, today, true, text, **numbers):
    """One piece of advice, with the measurement that decides on it."""
    lines.append(
        {
            "advice, 2012 to 2014": advice,
            "holds": "yes" if true else "no",
            "measured": text.format(**numbers),
            "today": today,
        }
    )


line(
    "Check that the GPU is used",
    "Ask a tensor for its device; profile",
    answer["device"].startswith("cuda"),
    "the result is on {device}",
    device=answer["device"],
)
line(
    "Leave results on the GPU",
    "The default; .cpu() only where it must be",
    us["GPU, copied back"] > 1.1 * us["GPU, left there"],
    "copied back, {r:.0f} times as long",
    r=us["GPU, copied back"] / us["GPU, left there"],
)
line(
    "Reuse the memory of results (borrow)",
    "out=, where the host is what is waited for",
    us["the same, into one tensor"] < 0.9 * us["GPU, left there"],
    "into one tensor, {r:.2f} times the time",
    r=us["the same, into one tensor"] / us["GPU, left there"],
)
line(
    "Only float32 is accelerated",
    "Every type is, on this GPU; most others are slow in float64",
    rates["float64"] < 0.5 * rates["float32"],
    "here products in float64 at {r:.2f} times the rate of float32",
    r=rates["float64"] / rates["float32"],
)
line(
    "Use float32 and not float64 wherever you can",
    "Yes; half types and TF32 in products are faster still",
    double > 1.1 * single,
    "exp in float64 takes {d:.1f} times float32's time, bfloat16 multiplies "
    "{r:.0f} times as fast",
    d=double / single,
    r=rates["bfloat16"] / rates["float32"],
)
line(
    "Prefer constructors of float32 (matrix, not dmatrix)",
    "PyTorch makes float32; what comes from NumPy is float64",
    widened.loc["from_numpy of NumPy's default", "PyTorch"] == "float64",
    "from_numpy(standard_normal(3)) is {t}",
    t=widened.loc["from_numpy of NumPy's default", "PyTorch"],
)
line(
    "Large products, convolutions and elementwise: 5 to 50 times",
    "As many, against all cores of a CPU",
    bool(gains[heavy].between(5, 50).all()),
    "{a:.0f}, {b:.0f} and {c:.0f} times",
    a=gains[heavy[0]],
    b=gains[heavy[1]],
    c=gains[heavy[2]],
)
line(
    "Arguments must be large enough",
    "Yes: small work gains little",
    gains["exp of 230400"] < gains["exp of 67 million"] / 2,
    "exp of 230400: {a:.1f} times; of 67 million: {b:.0f} times",
    a=gains["exp of 230400"],
    b=gains["exp of 67 million"],
)
line(
    "Reshaping and shuffling, as views: equally fast on both",
    "Views cost nothing on both",
    0.5 < gains["transposed, a view"] < 2,
    "a transposed view: {r:.2f} times as fast",
    r=gains["transposed, a view"],
)
line(
    "Indexing: equally fast on both",
    "It moves data, and the GPU moves more",
    0.5 < gains["rows by index"] < 2,
    "rows by index: {r:.0f} times as fast",
    r=gains["rows by index"],
)
line(
    "Row and column sums can be slower",
    "They are reads, at the bandwidth of memory",
    bool((gains[sums] < 1).any()),
    "rows {a:.0f}, columns {b:.0f} times as fast",
    a=gains[sums[0]],
    b=gains[sums[1]],
)
line(
    "Copies often cancel the advantage",
    "Keep data there; what must move: pinned, reused, overlapped",
    bool((paid < 1).sum() >= len(paid) / 2),
    "there and back, {k} of {m} operations lose to the CPU",
    k=int((paid < 1).sum()),
    m=len(paid),
)
line(
    "allow_gc=False: keep memory",
    "The caching allocator does",
    kept["a block that is given back"] > 1.02 * kept["a block that was kept"],
    "given back each time, {r:.2f} times the time",
    r=kept["a block that is given back"] / kept["a block that was kept"],
)
line(
    "Profile: is time used sensibly?",
    "torch.profiler",
    wall > 1.1 * wall_pinned,
    "it showed {share:.0%} of the GPU's time in transfers; with batches "
    "pinned the program is {gain:.1f} times as fast",
    share=carried,
    gain=wall / wall_pinned,
)
line(
    "nvcc --use_fast_math",
    "Where a kernel waits for divisions, not for memory",
    gain > 1.1,
    "64 divisions a number: {gain:.1f} times as fast, {loss:.1f} times the "
    "error",
    gain=gain,
    loss=loss,
)
line(
    "assert_no_cpu_op",
    "Tensors do not move; set_sync_debug_mode for waits",
    answer[accidents[0]] == "nothing",
    "GPU plus CPU tensor: refused",
)
line(
    "Times of single calls mislead: they are asynchronous",
    "Synchronise, or use events",
    clocks["returns us"].iloc[0] < clocks["done us"].iloc[0] / 2,
    "the call is back after {r:.1%} of the time",
    r=clocks["returns us"].iloc[0] / clocks["done us"].iloc[0],
)
line(
    "CUDA_LAUNCH_BLOCKING=1 to find errors",
    "The same",
    error.loc["1", "raised at"] == "y = x[wrong]",
    "raised at {a}; without, at {b}",
    a=error.loc["1", "raised at"],
    b=error.loc["0", "raised at"],
)
line(
    "set_value to change shared data",
    "x.copy_(new), and graphs see it",
    answer["a graph sees values copied in"] == "yes",
    "a replayed graph saw the new values",
)
line(
    "int32 with float32 gives float64: cast",
    "It gives float32",
    answer["int32 times float32"] == "torch.float64",
    "{t}",
    t=answer["int32 times float32"],
)
line(
    "Cast around the mean",
    "The mean of float32 is float32",
    answer["mean of float32"] == "torch.float64",
    "{t}",
    t=answer["mean of float32"],
)
line(
    "Complex numbers are broken",
    "They work",
    not re.fullmatch(r"\(?0\.540\+0\.841j\)?", answer["exp of i"]),
    "exp of i is {z}",
    z=answer["exp of i"],
)
line(
    "Results differ from the CPU's",
    "By roundings",
    float(answer["CPU and GPU differ by, in eps"]) > 0,
    "exp by up to {e} eps",
    e=answer["CPU and GPU differ by, in eps"],
)
line(
    "Fusion is for single outputs only",
    "Compilers fuse several",
    two_results < 1.1,
    "x + y and x - y compiled: {r:.2f} times as fast",
    r=two_results,
)

advice = pd.DataFrame(lines).set_index("advice, 2012 to 2014")
table(advice, "What became of it", box=True)

# %%
old = advice.index[advice["holds"] == "no"]
claims(
    claim(
        "Of {all} pieces of advice of 2012, {yes} still hold and {no} do not. "
        "The two on where to keep data hold: leave results on the GPU, and "
        "copies cancel the advantage.",
        advice.loc[
            ["Leave results on the GPU", "Copies often cancel the advantage"],
            "holds",
        ]
        == "yes",
        of=advice,
        headline=True,
        all=len(advice),
        yes=len(advice) - len(old),
        no=len(old),
    ),
)

# %%
# One piece of advice, "one GPU per process", needs a second GPU:
# :doc:`plot_402_two_gpus` measures it.

provenance(ways, spans, moved, work, switched, late)

# %%
downloads(advice, "old_advice")

# %%
# Where to learn more
# -------------------
#
# The manual had a list, most of whose links have died. This one is of November
# 2026. To begin with:
#
# - NVIDIA's `CUDA Programming Guide
#   <https://docs.nvidia.com/cuda/cuda-c-programming-guide/>`__ and `Best
#   Practices Guide
#   <https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/>`__.
# - Triton's `tutorials
#   <https://triton-lang.org/main/getting-started/tutorials>`__, and `puzzles
#   <https://github.com/srush/Triton-Puzzles>`__ that need no GPU.
# - PyTorch's `introduction to torch.compile
#   <https://docs.pytorch.org/tutorials/intermediate/
#   torch_compile_tutorial.html>`__.
# - The lectures of `GPU MODE <https://github.com/gpu-mode/lectures>`__, and
#   the book *Programming Massively Parallel Processors* that they follow.
#
# And then:
#
# - PyTorch's `custom operators
#   <https://pytorch.org/tutorials/advanced/custom_ops_landing_page.html>`__,
#   `torch.library <https://docs.pytorch.org/docs/stable/library.html>`__, `FAQ
#   of torch.compile
#   <https://docs.pytorch.org/docs/main/user_guide/torch_compiler/
#   torch.compiler_faq.html>`__
#   and `CUDA graphs
#   <https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/>`__.
# - CuPy's `kernels in CUDA C
#   <https://docs.cupy.dev/en/latest/user_guide/kernel.html>`__.
# - NVIDIA's `Nsight Compute
#   <https://docs.nvidia.com/nsight-compute/NsightCompute/index.html>`__.
# - The papers: `the roofline <https://doi.org/10.1145/1498765.1498785>`__,
#   `the online softmax <https://arxiv.org/abs/1805.02867>`__, `stream-K
#   <https://arxiv.org/abs/2301.03598>`__. The :doc:`/glossary` has more.
