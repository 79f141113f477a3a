# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Using the GPU
=============

Draft.
"""

# %%
# Am I using the GPU?
# -------------------

import contextlib
import json
import os
import subprocess
import sys
import time

import fusebook  # before triton: it decides whether kernels are interpreted
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import triton
import triton.language as tl
from fusebook import plots, tables, timing
from fusebook.gallery import (
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
from fusebook.kernels.elementwise import EXP, silu_eager
from torch.profiler import ProfilerActivity, profile, record_function

n = 10 * 30 * 768  # 10 numbers for each of 768 threads on each of 30 cores


def link():
    """The lanes between host and GPU, by NVML: generation, width, GB/s."""
    try:
        import pynvml  # the module of nvidia-ml-py

        pynvml.nvmlInit()
        here = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(here)
        width = pynvml.nvmlDeviceGetMaxPcieLinkWidth(here)
    except Exception as error:  # no NVML in a container, or no PCIe
        return "", "", float("nan"), type(error).__name__
    # 8 GT/s in generation 3, doubled in each since; 128 of 130 bits are data.
    rate = 8 * 2 ** (generation - 3) * width * 128 / 130 / 8
    return str(generation), str(width), rate, ""


def answers():
    x = torch.rand(n, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        y = torch.exp(x)
        torch.cuda.synchronize()
    kernels = [e.name for e in seen.events() if e.device_type.name == "CUDA"]
    out = torch.empty_like(x)
    built = once[(triton.cdiv(n, 1024),)](out, x, n, BLOCK=1024)
    lines = [s.strip() for s in built.asm["ptx"].splitlines()]
    code = [s for s in lines if s.startswith("ex2.")]
    cpu = torch.exp(x.cpu())
    eps = torch.finfo(torch.float32).eps
    apart = ((y.cpu() - cpu).abs() / cpu).max().item() / eps
    tiny = torch.full((4,), 1e-40, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.exp(x, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.exp(x, out=out)
    x.copy_(torch.rand(n))
    graph.replay()
    torch.cuda.synchronize()
    sees = torch.equal(out, torch.exp(x))
    torch.cuda.set_sync_debug_mode("error")
    try:
        x.sum().item()
        refused = "nothing"
    except RuntimeError as error:
        refused = str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    try:
        x + torch.rand(n)
        mixed = "nothing"
    except RuntimeError as error:
        mixed = str(error).splitlines()[0]
    generation, width, rate, _ = link()
    rows = [
        ("device of the result", str(y.device)),
        ("dtype of the result", str(y.dtype)),
        ("kernel that ran", kernels[0][:72] if kernels else "none"),
        ("exp in the generated code", code[0].split()[0] if code else "none"),
        ("GPUs in this process", str(torch.cuda.device_count())),
        ("name", torch.cuda.get_device_name()),
        ("compute capability", ".".join(map(str, torch.cuda.get_device_capability()))),
        ("PCIe generation", generation),
        ("PCIe lanes", width),
        ("PCIe GB/s, each way", f"{rate:.1f}"),
        ("CPU and GPU apart, in eps", f"{apart:.2f}"),
        ("1e-40 times 1 on the GPU", f"{(tiny * 1)[0].item():.3g}"),
        ("int32 times float32", str((torch.ones(1, dtype=torch.int32, device="cuda") * x[:1]).dtype)),
        ("mean of int64 needs", "a cast"),
        ("a graph sees new values", "yes" if sees else "no"),
        ("item() under set_sync_debug_mode", refused),
        ("GPU plus CPU tensor", mixed),
    ]
    return pd.DataFrame(rows, columns=["question", "answer"])


@triton.jit
def once(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, tl.exp(x), mask=at < n)


@triton.jit
def many(y_ptr, x_ptr, n, TIMES, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(TIMES):
        # volatile: the compiler may not take the load out of the loop.
        x = tl.load(x_ptr + at, mask=at < n, volatile=True)
        tl.store(y_ptr + at, tl.exp(x), mask=at < n)


asked = measured("using_answers", answers)
table(asked, "Questions and answers", fold=False)

# %%


def ways(calls):
    """Six ways to compute exp of n numbers `calls` times."""
    host = np.random.default_rng(22).random(n, dtype=np.float32)
    on_cpu, x = torch.from_numpy(host), torch.from_numpy(host).cuda()
    out = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    torch.exp(x, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            torch.exp(x, out=out)
    many[(triton.cdiv(n, 1024),)](out, x, n, 1, BLOCK=1024)

    def loop(function):
        def run():
            for _ in range(calls):
                with record_function("call") if tracing else quiet:
                    function()

        return run

    def whole(function):
        def run():
            with record_function("call") if tracing else quiet:
                function()

        return run

    return {
        "NumPy": loop(lambda: np.exp(host)),
        "torch, CPU": loop(lambda: torch.exp(on_cpu)),
        "GPU, copied back": loop(lambda: torch.exp(x).cpu()),
        "GPU, kept there": loop(lambda: torch.exp(x)),
        "CUDA graph": whole(graph.replay),
        "one kernel": whole(
            lambda: many[(triton.cdiv(n, 1024),)](out, x, n, calls, BLOCK=1024)
        ),
    }


quiet, tracing = contextlib.nullcontext(), False


def six_ways():
    rows = []
    for name, run in ways(1000).items():
        run()
        torch.cuda.synchronize()
        best = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            queued = time.perf_counter()
            torch.cuda.synchronize()
            best.append((time.perf_counter() - start, queued - start))
        total, queued = sorted(best)[1]
        rows.append(
            {"way": name, "ms": total * 1e3, "host ms": queued * 1e3}
        )
    return pd.DataFrame(rows)


six = measured("using_six_ways", six_ways)
table(six, "1000 times exp of 230400 numbers, in milliseconds", fold=False)

# %%


def timeline():
    global tracing
    rows = []
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    for name, run in ways(40).items():
        run()
        torch.cuda.synchronize()
        tracing = True
        with profile(activities=kinds) as seen:
            for _ in range(2):  # the profiler's own first calls are slow
                run()
                torch.cuda.synchronize()
        tracing = False
        found = [(e.name, e.device_type.name, e.time_range) for e in seen.events()]
        calls = [t for k, on, t in found if k == "call" and on == "CPU"]
        calls = sorted(calls, key=lambda t: t.start)[len(calls) // 2 :]
        begin = calls[0].start
        spans = [("host", t) for t in calls]
        for k, on, t in found:
            if on == "CUDA" and k != "call":
                spans.append(("copy" if "emcpy" in k else "kernel", t))
        for lane, t in spans:
            rows.append({"way": name, "lane": lane, "start us": t.start - begin, "us": t.end - t.start})
    frame = pd.DataFrame(rows)
    return frame[frame["start us"].between(0, 1000)].reset_index(drop=True)


spans = measured("using_timeline", timeline)
table(spans, "Spans", fold=True)

# %%


def dtypes_of_exp():
    rows = []
    x = 8 * torch.rand(2**27, device="cuda", dtype=torch.float64)
    right = torch.exp(x)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        given = x.to(dtype)
        out = torch.empty_like(given)
        function = {"exp": lambda given=given, out=out: torch.exp(given, out=out)}
        us = timing.cold(function)["exp"].q50 * 1e6
        error = ((out.double() - right).abs() / right).max().item()
        name = str(dtype)[6:]
        rows.append({"dtype": name, "exp us": us, "largest error": error})
    return pd.DataFrame(rows)


kinds = measured("using_dtypes", dtypes_of_exp)
table(kinds, "exp of 2**27 numbers", fold=False)

# %%


def seconds(function, repeat=5):
    """The median of a call, waited for."""
    return timing.call({"it": function}, warmup=2, repeat=repeat)["it"].q50


def transfers():
    rows = []
    for mib in (1 / 16, 1, 16, 256):
        size = int(mib * 2**20)
        on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
        pageable = torch.empty(size, dtype=torch.uint8).fill_(1)
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        other = torch.empty_like(on_gpu)
        ways = {
            "to the GPU": lambda a: on_gpu.copy_(a),
            "to the GPU, non_blocking": lambda a: on_gpu.copy_(a, non_blocking=True),
            "from the GPU": lambda a: a.copy_(on_gpu),
        }
        for way, copy in ways.items():
            row = {"way": way, "MiB": mib}
            for kind, memory in (("pageable", pageable), ("pinned", pinned)):
                took = seconds(lambda copy=copy, memory=memory: copy(memory), 9)
                row[f"{kind} GB/s"] = size / took / 1e9
                torch.cuda.synchronize()
                start = time.perf_counter()
                copy(memory)
                row[f"{kind} host us"] = (time.perf_counter() - start) * 1e6
                torch.cuda.synchronize()
            rows.append(row)
        took = seconds(lambda: other.copy_(on_gpu), 9)
        rows.append({"way": "within the GPU", "MiB": mib, "pinned GB/s": size / took / 1e9})
    return pd.DataFrame(rows)


moved = measured("using_transfers", transfers)
table(moved, "Transfers", fold=False)

# %%


def overlap():
    chunks, size = 16, 4096
    host = torch.rand(chunks, size, size).pin_memory()
    weights = torch.rand(size, 1024, device="cuda")
    slots = torch.empty(2, size, size, device="cuda")
    results_ = torch.empty(2, size, 1024, device="cuda")
    compute = torch.cuda.current_stream()
    copier = torch.cuda.Stream()

    def copies():
        for i in range(chunks):
            slots[i % 2].copy_(host[i], non_blocking=True)

    def products():
        for i in range(chunks):
            torch.mm(slots[i % 2], weights, out=results_[i % 2])

    def serial():
        for i in range(chunks):
            slots[i % 2].copy_(host[i], non_blocking=True)
            torch.mm(slots[i % 2], weights, out=results_[i % 2])

    def overlapped():
        free = [torch.cuda.Event() for _ in range(2)]
        for event in free:
            event.record(compute)
        for i in range(chunks):
            slot = i % 2
            copier.wait_event(free[slot])  # its last user is done
            with torch.cuda.stream(copier):
                slots[slot].copy_(host[i], non_blocking=True)
            compute.wait_stream(copier)
            torch.mm(slots[slot], weights, out=results_[slot])
            free[slot] = torch.cuda.Event()
            free[slot].record(compute)

    ways = {
        "copies alone": copies,
        "products alone": products,
        "one stream": serial,
        "two streams": overlapped,
    }
    rows = [{"way": w, "ms": seconds(f) * 1e3} for w, f in ways.items()]
    return pd.DataFrame(rows)


streams = measured("using_overlap", overlap)
table(streams, "16 chunks of 64 MiB, in milliseconds", fold=False)

# %%

CHILD = """
import json, time, torch

def per_call():
    for _ in range(100):
        torch.exp(x)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(1000):
        torch.exp(x)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3  # us each

x = torch.rand(230400, device="cuda")
us = per_call()
wrong = torch.tensor([10**6], device="cuda")
at, said = "nowhere", ""
try:
    at = "y = x[wrong]"
    y = x[wrong]
    at = "z = y.exp()"
    z = y.exp()
    at = "torch.cuda.synchronize()"
    torch.cuda.synchronize()
    at = "nowhere"
except Exception as error:
    said = str(error).splitlines()[0]
try:
    torch.zeros(1, device="cuda")
    after = "works"
except Exception as error:
    after = "fails: " + str(error).splitlines()[0]
print(json.dumps({"us a call": us, "raised at": at, "says": said, "the next call": after}))
import os; os._exit(0)
"""


def in_a_child(**environment):
    """Run the program in a process of its own; its last line is JSON."""
    end = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return json.loads(end.stdout.strip().splitlines()[-1])


def late_errors():
    rows = []
    for blocking in ("0", "1"):
        row = {"CUDA_LAUNCH_BLOCKING": blocking}
        rows.append({**row, **in_a_child(CUDA_LAUNCH_BLOCKING=blocking)})
    return pd.DataFrame(rows)


late = measured("using_errors", late_errors)
table(late, "Errors", fold=False)

# %%


def clock():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, a, out=out)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.mm(a, a, out=out)
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    done = time.perf_counter() - start
    rows = [("the call returns", queued * 1e6), ("the product is there", done * 1e6)]
    return pd.DataFrame(rows, columns=["when", "us"])


product = measured("using_clock", clock)
table(product, "Clock", fold=False)

# %%


def memory():
    def used():
        return torch.cuda.memory_allocated() / 2**20

    def held():
        return torch.cuda.memory_reserved() / 2**20

    x = torch.rand(n, device="cuda")
    out = torch.empty_like(x)

    def given_back():
        torch.exp(x)
        torch.cuda.empty_cache()

    rows = []
    for what, run in {
        "exp into a cached block": lambda: torch.exp(x),
        "exp into a given tensor": lambda: torch.exp(x, out=out),
        "exp, and its block given back": given_back,
    }.items():
        rows.append({"what": what, "us": seconds(run, 15) * 1e6})
    x = torch.rand(2**26, device="cuda")  # 256 MiB
    for what, run in {
        "silu in two operations": lambda: silu_eager(x),
        "silu in one kernel": lambda: fusebook.silu(x),
    }.items():
        torch.cuda.reset_peak_memory_stats()
        before = used()
        run()
        peak = torch.cuda.max_memory_allocated() / 2**20 - before
        rows.append({"what": what, "peak MiB": peak})
    del out
    torch.cuda.empty_cache()
    blocks = [torch.empty(2**24, device="cuda") for _ in range(64)]
    rows.append({"what": "64 blocks of 64 MiB", "allocated MiB": used(), "reserved MiB": held()})
    del blocks[::2]
    rows.append({"what": "every second one freed", "allocated MiB": used(), "reserved MiB": held()})
    large = torch.empty(2**28, device="cuda")
    rows.append({"what": "1 GiB more, in one piece", "allocated MiB": used(), "reserved MiB": held()})
    del large, blocks
    rows.append({"what": "all freed", "allocated MiB": used(), "reserved MiB": held()})
    torch.cuda.empty_cache()
    rows.append({"what": "empty_cache()", "allocated MiB": used(), "reserved MiB": held()})
    return pd.DataFrame(rows)


cache = measured("using_memory", memory)
table(cache, "Memory", fold=False)

# %%


def accelerated():
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    a, b = normal(4096, 4096), normal(4096, 4096)
    image, filters = normal(32, 64, 56, 56), normal(64, 64, 3, 3)
    big, small, wide = normal(2**26), normal(n), normal(8192, 8192)
    rows_of = torch.randint(8192, (8192,), generator=rng)
    work = {
        "matrix product, 4096 x 4096": (torch.mm, (a, b)),
        "convolution, 32 x 64 x 56 x 56": (torch.conv2d, (image, filters)),
        "exp of 2**26": (torch.exp, (big,)),
        f"exp of {n}": (torch.exp, (small,)),
        "8192 rows by index": (lambda x, i: x[i], (wide, rows_of)),
        "transposed, a view": (lambda x: x.T, (wide,)),
        "transposed, in memory": (lambda x: x.T.contiguous(), (wide,)),
        "sum of each row": (lambda x: x.sum(1), (wide,)),
        "sum of each column": (lambda x: x.sum(0), (wide,)),
        "a copy, 256 MiB": (torch.clone, (wide,)),
    }
    rows = []
    for name, (function, given) in work.items():
        there = [v.cuda() for v in given]

        def whole(function=function, given=given):
            return function(*(v.cuda() for v in given)).cpu()

        times = {
            "CPU": seconds(lambda: function(*given), 3),
            "GPU": seconds(lambda: function(*there), 9),
            "both ways": seconds(whole, 3),
        }
        rows.append({"what": name, **{f"{k} us": v * 1e6 for k, v in times.items()}})
    frame = pd.DataFrame(rows)
    frame["threads"] = torch.get_num_threads()
    return frame


fast = measured("using_operations", accelerated)
table(fast, "GPU against CPU", fold=False)

# %%


def short_profile():
    rng = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(8192, 1024, device="cuda", generator=rng)
    w = torch.randn(1024, 1024, device="cuda", generator=rng)
    batches = torch.randn(10, 8192, 1024)

    def step(batch):
        x.copy_(batch)
        y = torch.sigmoid(x @ w) * x
        return y.mean().item()

    step(batches[0])
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for batch in batches:
        step(batch)
    torch.cuda.synchronize()
    plain = (time.perf_counter() - start) * 1e6
    with profile(activities=kinds) as seen:
        for batch in batches:
            step(batch)
        torch.cuda.synchronize()
    rows = []
    for e in seen.key_averages():
        if e.device_type.name == "CUDA":
            rows.append({"what": e.key[:60], "calls": e.count, "GPU us": e.self_device_time_total})
    frame = pd.DataFrame(rows).sort_values("GPU us", ascending=False)
    frame["wall us"] = plain
    return frame.reset_index(drop=True)


prof = measured("using_profile", short_profile)
table(prof, "Profile", fold=False)
