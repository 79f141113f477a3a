"""
Measuring: five mistakes with a stopwatch
=========================================

A GPU works while Python goes on, keeps what it has touched in a cache, and
compiles at the first call. So the obvious stopwatch shows a wrong time. We
write one that is right, in four steps, and see what each step changes. The
fifth mistake is a fast kernel that is incorrect.

You will learn

- how to time a kernel with events, a warm-up and a flush of the cache,
- which of five times answers your question,
- how to test a kernel so that old results in memory cannot pass.

Prerequisites: Python and some PyTorch. No GPU is needed: without one, kernels
run in Triton's interpreter, and times come from a record.
"""

import statistics
import time

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["measuring", "L2", "clocks"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_002_measuring")
page.verdict()

# %%
# Each lesson of this book begins with such a box. At the end of this page you
# know how the times in it were taken.
#
# First, is it correct?
# ---------------------
#
# A *kernel* is a function that runs on the GPU. This one is written in Triton.
# Many *programs* run it at once, and each doubles a block of elements.
# :doc:`plot_101_elementwise` explains each line.


@triton.jit
def double_block(y_ptr, x_ptr, SIZE, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < SIZE)
    tl.store(y_ptr + i, x + x, mask=i < SIZE)


def double_into(y, x, part=1):
    SIZE = x.numel() // part  # part=2: only the first half
    double_block[(triton.cdiv(SIZE, 1024),)](y, x, SIZE, BLOCK=1024)
    return y


def double(x):
    return double_into(torch.empty_like(x), x)


x = page.stress(64, 33)
page.check(double, x)

# %%
# A kernel that writes half of its output takes half of the time. It can pass a
# test, too. PyTorch keeps memory that was freed, and hands it out again. If a
# test computes the expected result first and frees it, the kernel's output may
# get this memory, with all correct elements in it. So tests *poison* it: they
# leave NaN there.

used = x + x  # memory that holds the expected result
assert torch.equal(double_into(used, x, part=2), x + x)  # careless: passes

poisoned = torch.full_like(x, torch.nan)
assert double_into(poisoned, x, part=2).isnan().any()  # caught

# %%
# The first stopwatch
# -------------------
#
# From here on, we time a copy, ``y.copy_(x)`` of N x N elements in float32.
# Everyone's first stopwatch reads the clock before and after the call:


def naive(call):
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)  # microseconds


spans = {"CPU": [(0, 1, "start"), (1, 3, "queue"), (3, 4, "stop")]}
spans["GPU"] = [(0, 3, "waits"), (3, 12, "copy")]
caption = "The CPU reads the clock when the copy has just begun."
page.picture.lanes(caption, spans, [("CPU", 3, "GPU", 3)])

# %%
# .. _measuring-wait:
#
# Step 1: wait for the GPU {gain wait at N=32768}
# -----------------------------------------------
#
# ``torch.cuda.synchronize`` waits until the GPU has nothing left to do. We
# wait before the first reading as well, so that older work is not counted. The
# number in each heading compares what this stopwatch shows with what the one
# before it shows. Both time the same copy, so *slower* means a longer reading.


def wait(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start)


# %%
# .. _measuring-repeat:
#
# Step 2: warm up, repeat, take the median {gain repeat at N=512}
# ---------------------------------------------------------------
#
# The first call of a Triton kernel compiles it, which takes much longer than
# the call. Other first calls allocate memory or load code. So we leave out a
# few calls. Of the others we take the median. One slow call moves a mean, and
# not a median.


def repeat(call):
    for _ in range(5):
        call()
    return statistics.median(map(wait, [call] * 30))


# %%
# .. _measuring-events:
#
# Step 3: let the GPU read the clock {gain events at N=512}
# ---------------------------------------------------------
#
# The time of a small call is mostly that of Python and of the wait. An *event*
# is a mark in the GPU's queue. The GPU writes the time when it reaches it. But
# an idle GPU reaches the first mark at once, and then waits for Python to
# queue the call. So events alone do not leave out the launch of a small call.


def events(call, before=lambda: None):
    pairs = []
    for _ in range(35):
        start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        before()
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(1e3 * a.elapsed_time(b) for a, b in pairs[5:])


# %%
# .. _measuring-flushed:
#
# Step 4: flush the cache {gain flushed at N=512}
# -----------------------------------------------
#
# The :term:`L2 cache` keeps what was touched last. A loop over the same small
# tensors never reads memory again, and shows a bandwidth that memory does not
# have. In a program, other kernels have run since. So we *flush*: we write a
# buffer that is several times larger than the cache.
#
# After a flush that ends in writes, the cache holds data that memory does not
# have yet (*dirty lines*). The timed kernel then has to write it back.
# Therefore we read the buffer at the end.
#
# The flush has a second use: Python queues the call while the flush runs. So
# the GPU does not wait for Python between the two events. So the reading of a
# small copy loses the launch, and gains the time to memory. The launch was
# longer, so the reading gets shorter.


def flushed(call):
    buffer = torch.empty(4096, 2**14, device="cuda")  # 256 MiB

    def flush():
        buffer.zero_()
        buffer.sum(1)  # ends in reads

    return events(call, before=flush)


spans = {"CPU": [(0, 2, "flush"), (2, 3, "a"), (3, 5, "copy"), (5, 6, "b")]}
spans["GPU"] = [(0, 2, "waits"), (2, 7, "flush"), (7, 8, "a"), (8, 12, "copy")]
spans["GPU"] += [(12, 13, "b")]
caption = "Events a and b are marks in the GPU's queue, right around the copy."
page.picture.lanes(caption, spans, [("CPU", 2, "GPU", 2)])

# %%
# This is the clock of most numbers in this book, *GPU time with a cold L2
# cache*. ``fusebook.measure.timing`` takes it with more care: it calls several
# functions in turn, and repeats the flush for as long as Python needs to queue
# the call.
#
# How fast is it?
# ---------------
#
# Each stopwatch times the same copies. *naive* and *wait* time single calls,
# so their readings differ most from run to run.

steps = {"wait": wait, "repeat": repeat, "events": events}
page.steps(naive=naive, **steps, flushed=flushed)

# %%
page.findings()

# %%
# More mistakes are on the evidence page, each with its measurement. Zeros are
# multiplied faster than random elements, as they need less power. On the CPU,
# the first write to new memory takes longer. A datasheet has the bandwidth of
# a bus, not of a copy. So the :term:`roofline` of this book is the bandwidth
# of a measured copy. Bytes over this bandwidth are the least time.
#
# .. _measuring-use:
#
# When to use it
# --------------
#
# There are five kinds of time, each for another question. Compare only times
# of one kind.
#
# - **GPU time, cold L2**: how long does the kernel take in a program?
# - **GPU time, warm**: how long, if its data is still in the L2 cache?
# - **CPU launch time**: how long does Python take to queue it?
# - **End-to-end time**: how long does each of many calls in a row take? It is
#   the larger of CPU launch time and GPU time.
# - **Latency**: how long does a caller wait who needs the result at once?
#
# ``timing.measure`` takes all of them, and ``timing.call`` the latency, which
# does not need a GPU. Their result has quantiles: ``q50`` is the median.

y = fusebook.double(x)
functions = {"double": lambda: fusebook.double(x)}
latency = fusebook.measure.timing.call(functions, repeat=3)["double"].q50
page.use()

# %%
# Takeaways
# ---------
#
# - Check the result on poisoned memory before you time anything.
# - Wait, warm up, repeat, and take the median.
# - Use events for GPU time. Flush the cache, and end the flush in reads.
# - Say which time it is, on which GPU, for which shape and dtype.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it says where. Fix it and run
# the cell again. No GPU is needed.
#
# 1. Bandwidth
# ~~~~~~~~~~~~
#
# A copy of ``elements`` float32 elements took ``us`` microseconds. Return the
# bandwidth in GB/s. Bytes that are read and bytes that are written both count.


def bandwidth(elements, us):
    return 4 * elements / us / 1000


def bandwidth_of_a_copy(elements, us):
    return 8 * elements / us / 1000


sizes, taken = torch.tensor([2.0**18, 2.0**30]), torch.tensor([5.0, 2000.0])
page.exercise(bandwidth, bandwidth_of_a_copy, [(sizes, taken)])

# %%
# 2. Samples
# ~~~~~~~~~~
#
# Return the time to report for one kernel, from all samples in the order in
# which they were taken. The first five are the warm-up.


def reported(samples):
    return samples.mean()


def reported_by_median(samples):
    return samples[5:].quantile(0.5)


some = torch.tensor([900.0, 30, 20, 20, 20, 10, 11, 12, 13, 500])
page.exercise(reported, reported_by_median, [(some,), (some[:-1],)])

# %%
# 3. End to end
# ~~~~~~~~~~~~~
#
# A program calls a sequence of kernels many times. For each kernel we know the
# CPU launch time and the GPU time. The CPU queues ahead, so it does not wait
# for the GPU. Return the end-to-end time of one sequence.


def end_to_end(launch, gpu):
    return launch.sum() + gpu.sum()


def larger_sum(launch, gpu):
    return torch.maximum(launch.sum(), gpu.sum())


short, long = torch.tensor([5.0, 6.0, 7.0]), torch.tensor([2.0, 1.0, 90.0])
page.exercise(end_to_end, larger_sum, [(short, long), (short, long[:2])])

# %%
# Evidence
# --------

page.footer()
