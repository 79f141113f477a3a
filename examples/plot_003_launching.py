"""
Launching: where the microseconds go
====================================

A small kernel is over before Python has launched the next one, so the GPU
waits for the CPU. We measure what a launch does, part by part. Then we write
what the library launches with: a *plan*, which keeps what the first launch has
found out. A CUDA graph leaves nothing to launch at all.

You will learn

- how to tell that the CPU limits a program, and not the GPU,
- what a launch depends on, and how to keep it without a stale result,
- when a CUDA graph is worth its limits.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_101_elementwise`. No GPU
is needed: without one, kernels run in Triton's interpreter, and times come
from a record.
"""

import functools
import time

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["launching", "CPU launch time", "CUDA graph"]
import pandas as pd
import torch
import triton
import triton.language as tl

page = lesson.open("plot_003_launching")
page.verdict()

# %%
# Why small kernels wait for Python
# ---------------------------------
#
# A launch is asynchronous: the CPU queues a kernel and goes on. If kernels are
# long, the queue is never empty, and it hides how long a launch takes. If they
# are short, each kernel has to wait for its launch.

launches = [(4 * i, 4 * i + 4, f"launch {i + 1}") for i in range(3)]
kernels = [(4 * i + 4, 4 * i + 5.5, f"{i + 1}") for i in range(3)]
waits = [(0, 4, "waits"), (5.5, 8, "waits"), (9.5, 12, "waits")]
arrows = [("CPU", 4 * i + 4, "GPU", 4 * i + 4) for i in range(3)]
caption = "Three short kernels: each is over before the next one is launched."
spans = {"CPU": launches, "GPU": sorted([*kernels, *waits])}
page.picture.lanes(caption, spans, arrows)

# %%
# On this page the work is always the same: the exponential of 64 x 64
# elements. These are 32 KiB to move, so **we predict** that launches decide
# the time, and not the kernel. The baseline is torch's own operator, which is
# written in C++.


def eager(x):
    return torch.exp(x)


# %%
# .. _launching-brackets:
#
# Step 1: brackets {gain brackets at N=64}
# ----------------------------------------
#
# Tutorials launch a kernel like this, and so do most pages of this book. A
# program owns 1024 adjacent elements. It reads them from x and writes y.


@triton.jit
def exponential(y_ptr, x_ptr, SIZE, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK  # may exceed 2**31
    i = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < SIZE).to(tl.float32)
    tl.store(y_ptr + i, tl.exp(x), mask=i < SIZE)


def brackets(x):
    y, SIZE = torch.empty_like(x), x.numel()
    exponential[(triton.cdiv(SIZE, 1024),)](y, x, SIZE, BLOCK=1024)
    return y


x = page.stress(64, 64)
page.check(brackets, x)

# %%
# ``kernel[grid](...)`` has to find the compiled kernel first. Triton compiles
# one variant for each dtype, and others where 16 divides a size or an address.
# So each call looks at each argument in Python.

# %%
# .. _launching-plan:
#
# Step 2: keep a plan {gain planned at N=64}
# ------------------------------------------
#
# Two calls with the same size, dtype, device and alignment launch the same
# kernel on the same grid. Only the addresses, the result's memory and the
# :term:`stream` can differ. A *plan* is a function with all the rest filled
# in. A cache keeps it under a key: all that the rest depends on.

page.picture.routes(
    "What each call looks up, and what it finds there.",
    [
        ("size and dtype", "plan", "kernel and grid"),
        ("device, alignment", "plan", "compiled variant"),
        ("two addresses", "each call", "where data is"),
        ("the stream", "each call", "where to queue"),
    ],
)

# %%
# ``functools.lru_cache`` is such a cache: the arguments of ``plan_of`` are the
# key. The first call with a key compiles the kernel, by a launch on memory of
# the same alignment.


@functools.lru_cache(maxsize=1000)  # bounded: a size may never come again
def plan_of(SIZE, dtype, device, offset):
    grid = (triton.cdiv(SIZE, 1024), 1, 1)
    if device.type != "cuda":  # the interpreter compiles nothing
        return lambda y, x: exponential[grid](y, x, SIZE, BLOCK=1024)
    memory = torch.empty(SIZE + 16, dtype=dtype, device=device)
    x = memory[offset // memory.itemsize :]
    compiled = exponential[grid](torch.empty_like(x), x, SIZE, BLOCK=1024)
    run, kernel, index = compiled.run, compiled.function, device.index
    # What Triton's launcher also takes: shared memory and the like, no hooks.
    known = kernel, compiled.packed_metadata, None, None, None
    # The address alone: torch.cuda.current_stream() also makes an object.
    current_stream = torch._C._cuda_getCurrentRawStream

    def launch(y, x):
        stream, at = current_stream(index), (y.data_ptr(), x.data_ptr())
        run(*grid, stream, *known, *at, SIZE, 1024)  # constants, too

    return launch


def planned(x):
    if x.is_neg() or not x.is_contiguous():  # a view: the kernel needs a copy
        x = x.resolve_neg().contiguous()
    y = torch.empty_like(x)
    plan_of(x.numel(), x.dtype, x.device, x.data_ptr() % 16)(y, x)
    return y


page.check(planned, x)

# %%
# The three ``None`` are arguments that profilers use.
#
# Where does the time go now? We time each part of a planned call alone. The
# part *launch* includes addresses and stream.


def parts_of_a_call():
    x = torch.randn(4096, device="cuda")
    y, key = planned(x), (4096, x.dtype, x.device, 0)
    launch = plan_of(*key)
    parts = {
        "nothing": lambda: None,
        "look-up of the plan": lambda: plan_of(*key),
        "memory of y": lambda: torch.empty_like(x),
        "addresses": lambda: (y.data_ptr(), x.data_ptr()),
        "stream": lambda: torch._C._cuda_getCurrentRawStream(0),
        "launch": lambda: launch(y, x),
        "whole call": lambda: planned(x),
    }
    us = {name: best_of(part) for name, part in parts.items()}
    return pd.DataFrame({"step": us.keys(), "us": us.values()})


def best_of(part, loops=9, calls=200):
    taken = []
    for _ in range(loops):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            part()
        taken.append((time.perf_counter() - start) / calls)
    return 1e6 * min(taken)


parts = page.measure(parts_of_a_call, "launching_parts")
us = parts.set_index("step")["us"].to_dict()
texts = {name: f"{value:.2g} us" for name, value in us.items()}
page.picture.bars("CPU time of the parts of a planned call", us, texts)

# %%
# Triton's launcher and the driver take most of it, and then the allocator of
# torch. Triton's launcher is a Python object around a function in C. The
# library's plans call this function directly. On the other hand, a call of the
# library checks its arguments. The table below has step 2 and the library.
#
# Graphs: nothing to launch
# -------------------------
#
# A :term:`CUDA graph` records launches once. A replay is one call for all of
# them, whatever their number. In return, each address and each size is fixed.
# An input has to be copied into the memory that the graph knows.


def captured(f, x, calls):
    f(x)  # compile before: a capture must not wait for the GPU
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [f(x) for _ in range(calls)]
    return graph.replay, results


kernels = [(4 + 1.5 * i, 5.5 + 1.5 * i, f"{i + 1}") for i in range(3)]
spans = {"CPU": [(0, 4, "replay"), (4, 12, "is free")]}
spans["GPU"] = [(0, 4, "waits"), *kernels]
page.picture.lanes("The same three kernels in a graph.", spans, arrows[:1])

# %%
# ``torch.compile`` has another cost. Before each call, generated code checks
# that the arguments are like those it was compiled for. So a compiled program
# of one small kernel is slower to launch than torch's operator.
#
# Is it correct?
# --------------
#
# A cache is correct until something changes that is not in its key. This
# function looks at no strides. For every second column of a matrix it launches
# the plan of a whole one:


def forgetful(x):
    y = torch.empty_like(x)
    plan_of(x.numel(), x.dtype, x.device, x.data_ptr() % 16)(y, x)
    return y


page.catches(forgetful, packed=x, strided=x[:, ::2])

# %%
# Step 2 must notice other data in the same memory, another address, alignment,
# shape or dtype, and other strides. The last view is negated: PyTorch changes
# the sign when it reads the memory.

memory = torch.randn(33 * 33 + 1, device=x.device)
square = memory[:-1].view(33, 33)
planned(square)
square.copy_(square.flip(0))
changed = [square, square.clone(), memory[1:].view(33, 33), square[:5]]
changed += [square.double(), square.mT, square[:, ::2]]
changed += [torch.complex(square, square).conj().imag]
for t in changed:
    torch.testing.assert_close(planned(t), torch.exp(t), rtol=1e-5, atol=0.0)

# %%
# How fast is it?
# ---------------
#
# *CPU launch* is the time to queue one call of many. In the second column, the
# call also records a gradient. *GPU, warm* is the time of the kernel, from a
# CUDA graph: its data is in the L2 cache. CPU times differ from run to run,
# and even their ratios do. The box, at another size, and the parts above are
# other runs: compare within one.

page.steps(eager=eager, brackets=brackets, planned=planned)

# %%
page.findings()

# %%
# .. _launching-use:
#
# When to use it
# --------------
#
# Each function of the library launches by plans. Under ``torch.compile``,
# ``vmap`` and the like, a call takes torch's general path for operators, the
# dispatcher, which needs more CPU time (:doc:`plot_401_operator`). Write your
# own plan if a profile shows that the GPU waits, and if sizes change too often
# for a graph. Some functions look at their input first, for indices out of
# range and the like. That is ``check=True``. It makes the CPU wait for the
# GPU, so pass ``check=False`` in a loop whose input is known to be good.

y = fusebook.exp(x)
page.use()

# %%
# Takeaways
# ---------
#
# - Compare CPU launch time with GPU time before you tune a kernel. In a small
#   call, the launch takes most of the time.
# - A cache is as good as its key. List what may change, and test each change.
# - What may change from call to call stays out of the plan: addresses, memory
#   and the stream.
# - Where shapes repeat, capture a graph. Its replay costs one launch.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it says where. Fix it and run
# the cell again. No GPU is needed.
#
# 1. A key that forgets
# ~~~~~~~~~~~~~~~~~~~~~
#
# The key of this cache is shape and dtype. The result is incorrect for a
# tensor of other strides. Fix the key.


def forgets_strides(first, second):
    """The exponential of `second`, after one of `first`."""
    kept = {}

    def call(x):
        key = (x.shape, x.dtype)
        if key not in kept:
            kept[key] = x.stride()
        values = torch.exp(torch.as_strided(x, (x.numel(),), (1,)))
        return torch.as_strided(values, x.shape, kept[key])

    call(first)
    return call(second)


def second_alone(first, second):
    return torch.exp(second)


a = torch.arange(12.0).view(4, 3)
given = [(a, a + 1), (a, (a + 1).view(3, 4).mT)]
page.exercise(forgets_strides, second_alone, given)

# %%
# 2. Two operands
# ~~~~~~~~~~~~~~~
#
# Write a planned sum of two tensors of one shape. Each address may be a
# multiple of 16 or not. How many plans can one shape have?


def planned_sum(x, y):
    return planned(x)


flat = a.flatten()
given = [(a, a + 1), (a + 1, a), (flat[1:], flat[:-1])]
page.exercise(planned_sum, torch.add, given)

# %%
# Evidence
# --------

page.footer()
