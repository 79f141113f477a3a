# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Fused softmax
=============

A softmax written as five operations moves four times as much memory as it
has to. This page counts that traffic, predicts what fusing it will give,
writes the kernel in three steps, proves it right on rows that are made to
break it, and only then takes the time, against PyTorch, ``torch.compile``,
Liger and quack, under the measured roof of the machine.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them.

For whom: those who can write a kernel for single elements and want to fuse a
reduction into it.

Read before: 002, 101.
"""

# %%
# The problem
# -----------
#
# Every row :math:`x` of a matrix with M rows of N columns becomes
#
# .. math::
#
#    y_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}, \qquad m = \max_j x_j
#
# The maximum is there for one reason: in float32 the exponential overflows
# from 89 on, and one large value in a row would turn all of it into NaN.
# Shifting a row changes nothing in the result, so we shift it by the value
# that makes every exponent negative.
#
# There are about five floating-point operations an element, and the rates
# below say how many a GPU could do while it fetches one. So the time of a
# softmax should be the time of its traffic: its :term:`arithmetic intensity`
# is low. The least traffic is to read each element once and to write each
# result once, 2MN elements. In bfloat16 there are half as many bytes and just
# as many operations, so arithmetic matters more.

import functools
import warnings

# sphinx_gallery_tags = ["softmax", "reduction"]
import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import bench, machine, plots, tables, timing
from fusebook.cards.elementwise import EXP
from fusebook.cards.softmax import SOFTMAX, SOFTMAX_BACKWARD
from fusebook.check import yardstick
from fusebook.inputs import generator, rough
from fusebook.kernels.softmax import softmax_eager
from fusebook.page import (
    Source,
    by_clock,
    claim,
    claims,
    counters,
    downloads,
    draw,
    every_clock,
    exercise,
    holds,
    lines_behind,
    lines_of,
    measured,
    provenance,
    results,
    say,
    solution,
    study,
    table,
    target,
)

import numpy as np
import pandas as pd
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

asked = study(SOFTMAX, config="triton", dtype="float32")
on = machine.current()
say(
    "While {name} reads one float32 from memory, it can do {count:.0f} "
    "operations in float32.",
    name=on.name,
    count=4 * on.rates["float32"] / on.read,
)

# %%
# What eager costs
# ----------------
#
# This is the chain as one would write it, an operation a line. In
# :term:`eager` PyTorch each line is a :term:`kernel` of its own: it reads its
# inputs from memory and writes its output back, and the next line reads that
# again.

Source(softmax_eager, doc=False)

# %%
# Comments can be wrong, so let PyTorch count: a dispatch mode sees every
# operation on its way to the device. Shapes are enough for that, so the tensor
# lies on the ``meta`` device, which has no memory.


# site: fold
class Traffic(TorchDispatchMode):
    """Note how many elements each operation reads and writes."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        read = sum(a.numel() for a in args if isinstance(a, torch.Tensor))
        self.rows.append((function.overloadpacket.__name__, read, out.numel()))
        return out


M, N = 4096, 8192
shape_only = torch.empty(M, N, device="meta")
with Traffic() as traffic:
    softmax_eager(shape_only)

chain = pd.DataFrame(traffic.rows, columns=["operation", "read", "written"])
parts = pd.DataFrame(
    {
        "reads MN": chain["read"] // (M * N),
        "reads M": chain["read"] % (M * N) // M,
        "writes MN": chain["written"] // (M * N),
        "writes M": chain["written"] % (M * N) // M,
    }
).set_axis(chain["operation"])
parts.loc["all five"] = parts.sum()
table(
    parts,
    "Traffic of the chain, in multiples of MN and of M elements",
    fold=True,
)

# %%
# The prediction, made before anything is timed: if every kernel of the chain
# ran as fast as the memory lets it, :term:`fusion` would make the softmax
# (8MN + 4M) / 2MN times as fast.

total = int(chain["read"].sum() + chain["written"].sum())
predicted = total / (2 * M * N)
eager_cost = SOFTMAX.variants["eager"].cost(4, M=M, N=N)
draw.traffic(
    "Softmax of 4096 x 8192 in float32: bytes read, then bytes written",
    {"five kernels": eager_cost, "one kernel": SOFTMAX.cost(4, M=M, N=N)},
)

# %%
claims(
    say(
        "Predicted: fused, the softmax is {predicted:.2f} times as fast.",
        predicted=predicted,
    ),
    claim(
        "The chain reads 5MN + 2M elements and writes 3MN + 2M.",
        parts.loc["all five"].tolist() == [5, 2, 3, 2],
    ),
    claim(
        "The library counts the same bytes for the operator's baseline.",
        eager_cost.read + eager_cost.write == 4 * total,
    ),
)

# %%
# The kernel
# ----------
#
# Step one: one row a program
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Triton runs the same :term:`program` many times; here program *i* owns row
# *i*. It loads the row into :term:`registers <register>`, reduces it there,
# and stores the result: one read, one write. The number of columns in a
# :term:`tile` must be a power of two, so the rest of the tile is masked and
# filled with minus infinity, which is neutral for the maximum and, after the
# exponential, for the sum.


@triton.jit
def one_row(y_ptr, x_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # past 2**31 elements int32 wraps
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < N
    at = row * N + columns
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))  # read N
    x = x.to(tl.float32)  # bfloat16 sums lose their tail after 256 terms
    e = tl.exp(x - tl.max(x, 0))  # [BLOCK]
    tl.store(y_ptr + at, e / tl.sum(e, 0), mask=inside)  # write N


def softmax_one_row(x, warps=4):
    M, N = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(N)
    one_row[(M,)](y, x, N, BLOCK=block, num_warps=warps)
    return y


# %%
# How many :term:`warps <warp>` share a row? The launch above leaves it at
# Triton's default of four, 128 threads, whatever the width: at 12672 columns
# each thread then holds 128 numbers. The tutorial that this page grew from
# gives rows of 2048 numbers or more 8 warps, and rows of 4096 or more 16. The
# library has a table of its own. (How to let the machine choose is on
# :doc:`plot_201_gemm_concat`: :term:`autotuning`.)


# site: fold
def by_the_rule(x):
    """Step one with the warps of the tutorial's first kernel."""
    N = triton.next_power_of_2(x.shape[1])
    return softmax_one_row(x, 4 + 4 * (N >= 2048) + 8 * (N >= 4096))


# %%
# Step two: rows in tiles
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# A row of 256 float32 numbers is 1 KiB, and a program that moves only 1 KiB
# has few loads in flight. Here a program takes several rows, as a
# two-dimensional tile. Reductions then run along axis 1, and rows past the end
# need a mask as columns do.


@triton.jit
def some_rows(y_ptr, x_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    live = (rows < M)[:, None]  # [ROWS, 1]
    inside = live & (columns < N)[None, :]  # [ROWS, BLOCK]
    at = rows[:, None] * N + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))  # read MN
    # Rows past the end are all -inf, and -inf - -inf is NaN: make them 0.
    x = tl.where(live, x.to(tl.float32), 0.0)
    e = tl.exp(x - tl.max(x, 1)[:, None])
    tl.store(y_ptr + at, e / tl.sum(e, 1)[:, None], mask=inside)  # write MN


# site: fold
def softmax_some_rows(x, elements=2**15):
    M, N = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(N)
    # A tile of 4096 elements keeps a GPU busy. The interpreter pays by the
    # program, whatever its size, so it is given larger ones.
    rows = max(1, (4096 if x.is_cuda else elements) // block)
    some_rows[(triton.cdiv(M, rows),)](y, x, M, N, ROWS=rows, BLOCK=block)
    return y


# %%
# Step three: chunks in registers
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A wide row in one tile is padded to a power of two: 12672 columns become
# 16384, and almost a quarter of the tile is masked. A row can also be held as
# several equal chunks, a tuple of tiles that ``tl.static_range`` unrolls at
# compile time. Only the last chunk is padded, and threads reduce once a row,
# not once a chunk. Masked lanes move no bytes, so this need not be faster:
# width, dtype and warps are timed below. The hardware has an instruction for
# powers of two and none for those of e: exponents are multiplied by log2(e).


@triton.jit
def in_chunks(y_ptr, x_ptr, N, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    chunks = ()
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(CHUNKS):
        inside = i * BLOCK + columns < N
        at = row * N + i * BLOCK + columns
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))  # read N
        chunks += (x.to(tl.float32),)
        tops = tl.maximum(tops, chunks[i])
    top = tl.max(tops, 0)
    exps = ()  # kept, so that each is computed once
    sums = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        exps += (tl.exp2((chunks[i] - top) * 1.4426950408889634),)  # log2(e)
        sums += exps[i]
    scale = 1 / tl.sum(sums, 0)  # one division a row
    for i in tl.static_range(CHUNKS):
        inside = i * BLOCK + columns < N
        at = row * N + i * BLOCK + columns
        tl.store(y_ptr + at, exps[i] * scale, mask=inside)  # write N


def softmax_in_chunks(x, block=1024):
    M, N = x.shape
    y = torch.empty_like(x)
    chunks = triton.cdiv(N, block)
    in_chunks[(M,)](y, x, N, BLOCK=block, CHUNKS=chunks)
    return y


# %%
# Triton's tutorial of today has a fourth way: a :term:`persistent kernel`. It
# launches as many programs as run at the same time. Each takes row after row,
# as many apart as there are programs, and loads the next one while it works on
# this one (``num_stages``). Written as the kernels of this page:


# site: fold
@triton.jit
def rows_in_turn(
    y_ptr, x_ptr, M, N, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    start, programs = tl.program_id(0), tl.num_programs(0)
    for row in tl.range(start, M, programs, num_stages=STAGES):
        at = row * tl.cast(N, tl.int64) + columns
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))  # read N
        x = x.to(tl.float32)
        e = tl.exp(x - tl.max(x, 0))
        tl.store(y_ptr + at, e / tl.sum(e, 0), mask=inside)  # write N


# site: fold
@functools.cache
def programs_that_fit(dtype, N, constants):
    """As many as registers and shared memory have room for."""
    gpu = torch.cuda.get_device_properties()
    row = torch.empty(N, dtype=dtype, device="cuda")
    built = rows_in_turn[(1,)](row, row, 0, N, **dict(constants))
    warps = built.metadata.num_warps
    registers = max(built.n_regs, 16) * 32 * warps
    shared = built.metadata.shared + 1024
    fit = min(
        gpu.regs_per_multiprocessor // registers,
        gpu.shared_memory_per_multiprocessor // shared,
        64 // warps,
    )
    return gpu.multi_processor_count * max(fit, 1)


# site: fold
def softmax_in_turn(x):
    M, N = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(N)
    constants = {"BLOCK": block, "STAGES": 4, "num_warps": 8}
    programs = 4
    if x.is_cuda:
        programs = programs_that_fit(x.dtype, N, tuple(constants.items()))
    rows_in_turn[(min(programs, M),)](y, x, M, N, **constants)
    return y


# %%
# The finished kernel
# ~~~~~~~~~~~~~~~~~~~
#
# A program of the finished kernel holds several rows, each in several chunks.
# It takes any axis of any tensor with any strides, and float64. What it does
# with a row is step three.
#
# A row wider than 128 KiB is too much for the registers of one program, so
# several programs share it. Each holds a part of the row. It writes the
# maximum and the sum of its part to a table in memory that all of them see,
# the :term:`board`, waits for those of the others, and joins them as in an
# :term:`online softmax`: a sum is rescaled when a larger maximum turns up.
# Waiting is safe only if all these programs run at the same time, which an
# ordinary launch does not promise. So a program that has waited long computes
# by itself what is missing.

# %%
# What the hardware counts
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# Is the traffic what was counted on paper? A GPU has counters, and NVIDIA's
# Nsight Compute reads them: the bytes that a kernel moves from and to memory,
# the sectors of 32 bytes that a :term:`warp` asks for by one load, and the
# :term:`occupancy`, which is how many warps a multiprocessor holds of those
# that it could. Below are 3168 rows of 12672 numbers. What a kernel writes
# last stays in the :term:`L2 cache`, so less is written to memory than stored.
# Sectors are the mean of a kernel's loads: 16 where a thread takes 16 bytes, 4
# where it takes 4, and 1 where all threads take one number, as two kernels of
# the chain do with the row's maximum or sum, beside its numbers.

COUNTED = 3168, 12672


# site: fold
def to_count():
    x = torch.randn(*COUNTED, device="cuda", generator=generator(0))
    return {
        "the chain": lambda: softmax_eager(x),
        "step one, 4 warps": lambda: softmax_one_row(x),
        "step one, the tutorial's warps": lambda: by_the_rule(x),
        "step three": lambda: softmax_in_chunks(x),
        "the library": lambda: fusebook.softmax(x),
    }


seen = counters("softmax_counters", to_count)
MN = 4 * COUNTED[0] * COUNTED[1]  # bytes
by_kernel = pd.DataFrame(
    {
        "read, MN": seen["read"] / MN,
        "written, MN": seen["written"] / MN,
        "sectors a load": seen["sectors"],
        "occupancy, %": seen["occupancy"],
    }
).set_index([seen["step"], seen["kernel"]])
by_kernel.attrs.update(seen.attrs)
table(by_kernel, "By the counters of the GPU: one row per kernel", fold=False)

# %%
read = by_kernel["read, MN"].groupby("step", sort=False).sum()
held = by_kernel["occupancy, %"].groupby("step").min()
claims(
    claim(
        "By the counters the chain reads its 5MN, to 2 %.",
        (read.filter(items=["the chain"]) / 5 - 1).abs() < 0.02,
        of=read,
    ),
    claim(
        "By the counters each fused kernel reads the rows once, to 2 %: "
        "masked lanes fetch nothing.",
        (read.drop("the chain", errors="ignore") - 1).abs() < 0.02,
        of=read,
    ),
    say(
        "With 4 warps step one keeps {four:.0f} % of the warps that a "
        "multiprocessor has room for, with the tutorial's 16 it keeps "
        "{rule:.0f} %, and the library's kernel {ours:.0f} %.",
        four=held.get("step one, 4 warps"),
        rule=held.get("step one, the tutorial's warps"),
        ours=held.get("the library"),
    ),
)

# %%
# Is it right?
# ------------
#
# The reference is the same formula in float64. The :doc:`score </method>` of a
# result is the largest error of an element, relative to its own size plus the
# root mean square of its row. The limit is 64 eps in float32 and 8 eps in the
# half types.
#
# 1823 x 781 is the shape of the Triton tutorial that this page grew from:
# neither number is a multiple of anything useful. And the rows are rough: a
# third are plain normal numbers, a third hold three values twenty times too
# large, a third are shifted by 100.


def judged(x, **ways):
    """The score of each way to compute a softmax of `x`."""
    yard = yardstick(SOFTMAX, (x,))
    verdicts = {name: yard.judge(way(x)) for name, way in ways.items()}
    rows = [(v.score, v.limit, v.ok) for v in verdicts.values()]
    names = pd.Index(verdicts, name="way")
    columns = ["error", "tolerance", "right"]
    return pd.DataFrame(rows, index=names, columns=columns)


rng = generator(seed=0)
x = rough(rng, (1823, 781), torch.float32)
odd = judged(
    x,
    eager=softmax_eager,
    step_two=softmax_some_rows,
    fusebook=fusebook.softmax,
)
table(odd, "1823 x 781, float32, rough rows", fold=True)

# %%
# Hostile rows: nothing but minus infinity (NaN, as in PyTorch), one finite
# value among them, a NaN, a plus infinity, and the largest numbers there are.

inf, nan = float("inf"), float("nan")
hostile = rough(rng, (8, 1000), torch.float32)
hostile[0] = -inf
hostile[1] = -inf
hostile[1, 7] = 3.0
hostile[2, 500] = nan
hostile[3, 999] = inf
hostile[4, ::2] = -inf
hostile[5, 0] = torch.finfo(torch.float32).max
hostile[6] = torch.finfo(torch.float32).min
with np.errstate(invalid="ignore"):  # the interpreter is NumPy: NaN warns
    evil = judged(
        hostile,
        step_one=softmax_one_row,
        step_two=softmax_some_rows,
        step_three=softmax_in_chunks,
        in_turn=softmax_in_turn,
        fusebook=fusebook.softmax,
    )
table(evil, "Eight hostile rows of 1000", fold=True)

# %%
# A check is worth what it catches. Here is a mistake, a softmax without its
# maximum, on plain normal rows and on rough ones.


def forgetful(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


plain = torch.randn(64, 781, generator=rng, device=rng.device)
tame = judged(plain, no_maximum=forgetful)
caught = judged(x[:64].contiguous(), no_maximum=forgetful)
halves = pd.concat(
    judged(rough(rng, (48, 1000), dtype), ours=fusebook.softmax)["right"]
    for dtype in (torch.float16, torch.bfloat16)
)
claims(
    claim(
        "All steps, the tutorial's kernel and the library are right on the "
        "hostile rows.",
        evil["right"],
    ),
    claim(
        "Eager, step two and the library are right on 1823 x 781. (All steps "
        "are checked where they are timed, at 65536 x 781 among others.)",
        odd["right"],
    ),
    claim(
        "A softmax without its maximum passes on plain rows.",
        tame["right"].all(),
    ),
    claim(
        "A softmax without its maximum is caught on rough rows.",
        not caught["right"].any(),
    ),
    claim(
        "The library is right in float16 and in bfloat16.",
        halves,
    ),
)

# %%
# How fast?
# ---------
#
# The sweep of the tutorial: 4096 rows of 256 to 12544 columns, every second
# width of it. Every way is checked before it is timed. Times are *cold*: CUDA
# events around one call, after a flush of the :term:`L2 cache`. Ways that
# compile anew for each width are measured at every eighth of these widths.

sweep = asked.results()
one = sweep[sweep["dtype"] == sweep["dtype"].iloc[0]]
figure = plots.bandwidth(one, xlabel="columns of a row, N")
figure

# %%
# Bandwidth is the least traffic, 2MN elements, over the time, whatever a way
# moved. The grey line is the :term:`roof`, made of copies that were measured
# on the same machine. Where the shade says *partly L2* the cache absorbs a
# part of the traffic: points may lie above the roof there and say little about
# memory. *Copy* is ``y.copy_(x)`` of as many bytes, in the same run. The bands
# reach from the 20 % to the 80 % quantile.

downloads(sweep, "softmax", figure)

# %%
table(
    tables.times(one, words=True),
    "Cold time by width, in microseconds; empty: not measured at this width",
)

# %%
# The prediction was made for memory that serves every kernel at its full
# rate. So it is compared where memory decides.

memory = tables.where(one, zone="memory")
gain = tables.ratio(memory, "eager", "fusebook")


def own_rate(variant):
    """The rate at which a way moves its own bytes, over that of a copy."""
    rows = tables.where(memory, variant=variant, status="ok")
    least = rows["read_bytes"] + rows["write_bytes"]
    moved = rows["moved_bytes"].fillna(least)
    return (moved / least * rows["copy_us"] / rows["gpu_us"]).median()


claims(
    say(
        "Predicted: fused, {predicted:.2f} times as fast as eager. Measured: "
        "{least:.2f} to {most:.2f} times, {middle:.2f} in the median.",
        predicted=predicted,
        least=gain.min(),
        most=gain.max(),
        middle=gain.median(),
    ),
    claim(
        "The prediction is too low: at the widths where memory decides, "
        "fusing gives more. Narrower rows are partly served by L2, which the "
        "prediction leaves out.",
        gain >= predicted,
        of=tables.ratio(one, "eager", "fusebook"),
    ),
    say(
        "The five kernels of the chain move their own bytes at {chain:.0%} of "
        "the rate of a copy, in the median; the fused kernel moves its own at "
        "{ours:.0%}, and the prediction took both for equally fast.",
        chain=own_rate("eager"),
        ours=own_rate("fusebook"),
    ),
)

# %%
# Small work is another question
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# To launch a small kernel from Python may take the host longer than the kernel
# lasts: the :term:`launch overhead`. Three more clocks tell the parts apart.
# *Warm* is the device's time of a call among many in a :term:`CUDA graph`;
# *host* is the time that Python takes to queue a call; *call* is how long
# Python waits for one. The last two shapes have fewer rows than the GPU has
# :term:`multiprocessors <multiprocessor>`. The :doc:`launch floor </method>`
# is what a kernel takes that moves one element a program.

small = asked.results(
    config="4096x256,4096x1024,64x8192,16x131072", dtype="float32"
)
clocks = pd.concat(
    {kind: tables.times(small, kind) for kind in timing.KINDS},
    names=["clock"],
)
table(clocks, "Four clocks, in microseconds", fold=True)

# %%
warm = tables.times(small, "warm")
fused = tables.where(small, variant="fusebook").set_index(["M", "N"])
bound = fused["floor_warm_us"] + fused["roof_us"]
peers = [name for name in warm if name not in ("eager", "fusebook")]


claims(
    claim(
        "Warm, no other way is faster by more than 2 % at these four shapes.",
        warm["fusebook"] <= 1.02 * warm[peers].min(axis=1),
        fatal=False,
    ),
    claim(
        "Warm, our kernel takes at most 1.3 times the launch floor plus the "
        "roof: {least:.2f} to {most:.2f} times.",
        fused["gpu_warm_us"] <= 1.3 * bound,
        fatal=False,
        least=(fused["gpu_warm_us"] / bound).min(),
        most=(fused["gpu_warm_us"] / bound).max(),
    ),
    say(
        "At 4096 x 256 the host takes {host:.1f} microseconds to queue our "
        "call and {theirs:.1f} to queue PyTorch's; our kernel takes "
        "{warm:.1f} of the device, warm. A CUDA graph saves the host's part.",
        host=fused.loc[(4096, 256), "launch_us"],
        theirs=tables.times(small, "host").loc[(4096, 256), "torch"],
        warm=fused.loc[(4096, 256), "gpu_warm_us"],
    ),
)

# %%
# What each step was worth
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# The kernels of this page as they were shown, cold, as a share of a copy.
# (A thread has at most 255 :term:`registers <register>`; what does not fit is
# spilled to memory.) The chain stands there twice: as PyTorch runs it, and as
# TorchScript does, which may fuse what lies between two reductions.


# site: fold
@functools.cache
def scripted():
    """The chain under `torch.jit.script`, which PyTorch calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(softmax_eager)


# site: fold
def softmax_steps():
    parts = []
    shapes = (262144, 256), (65536, 781), (32768, 4096), (16384, 12672)
    for dtype in (torch.float32, torch.bfloat16):
        for M, N in shapes:
            x = rough(generator(0), (M, N), dtype)
            y, yard = torch.empty_like(x), yardstick(SOFTMAX, (x,))
            frame = bench.staircase(
                {
                    "the chain": lambda x=x: softmax_eager(x),
                    "TorchScript": lambda x=x: scripted()(x),
                    "step one, 4 warps": lambda x=x: softmax_one_row(x),
                    "step one, the tutorial's warps": lambda x=x: by_the_rule(
                        x
                    ),
                    "step two": lambda x=x: softmax_some_rows(x),
                    "step three": lambda x=x: softmax_in_chunks(x),
                    "the tutorial of today": lambda x=x: softmax_in_turn(x),
                    "the library": lambda x=x: fusebook.softmax(x),
                },
                lambda got, yard=yard: yard.judge(got).ok,
                repeat=15,
            )
            copy = timing.cold({"copy": lambda x=x, y=y: y.copy_(x)})["copy"]
            frame["copy us"] = copy.q50 * 1e6
            parts.append(frame.assign(shape=f"{M}x{N}", dtype=str(dtype)[6:]))
    return pd.concat(parts, ignore_index=True)


stairs = measured("softmax_steps", softmax_steps)
CODE = {
    "the chain": (softmax_eager,),
    "TorchScript": (softmax_eager,),
    "step one, 4 warps": (one_row, softmax_one_row),
    "step one, the tutorial's warps": (one_row, softmax_one_row, by_the_rule),
    "step two": (some_rows, softmax_some_rows),
    "step three": (in_chunks, softmax_in_chunks),
    "the tutorial of today": (
        rows_in_turn,
        programs_that_fit,
        softmax_in_turn,
    ),
}
stairs["at"] = stairs["shape"] + ", " + stairs["dtype"]
stairs["of a copy"] = stairs["copy us"] / stairs["us"]
reached = stairs.pivot_table("of a copy", "step", "at", sort=False)
by_lines = pd.Series({step: lines_of(*of) for step, of in CODE.items()})
of_library = lines_behind(softmax_eager)
by_lines["the library"] = of_library
shown = 100 * reached
shown.loc["the roof"] = {
    row["at"]: 1e-4
    * row["copy us"]
    / on.memory_seconds(
        SOFTMAX.cost(
            getattr(torch, row["dtype"]).itemsize,
            **dict(zip("MN", map(int, row["shape"].split("x")), strict=True)),
        )
    )
    for _, row in stairs.drop_duplicates("at").iterrows()
}
narrow_names = {"x": " x ", "bfloat16": "bf16", "float32": "f32"}
for long, short in narrow_names.items():
    shown.columns = shown.columns.str.replace(long, short)
table(
    shown.assign(**{"lines of code": by_lines}),
    "Percent of a copy, cold; bf16 is bfloat16, f32 float32. The library's "
    "lines are those of its modules, for all shapes and the gradient",
    fold=False,
)

# %%
taken = stairs.set_index(["at", "step"])[["registers", "spilled", "warps"]]
table(taken.dropna(), "Registers of a thread, warps of a program", fold=True)

# %%
gained = (
    reached.loc["step two"]
    / reached.loc[
        ["step one, 4 warps", "step one, the tutorial's warps"]
    ].max()
)
narrow = gained.filter(like="x256,")
wide_row, wide_half = (
    reached["16384x12672, float32"],
    reached["16384x12672, bfloat16"],
)
claims(
    claim(
        "Every step is right on rough rows at all of these sizes.",
        stairs["right"],
    ),
    say(
        "At 16384 x 12672 in float32 step one reaches {four:.0%} of a copy "
        "with 4 warps and {rule:.0%} with the tutorial's 16; in chunks, with "
        "4 warps and no more padding, it is {chunks:.0%}.",
        four=wide_row["step one, 4 warps"],
        rule=wide_row["step one, the tutorial's warps"],
        chunks=wide_row["step three"],
    ),
    claim(
        "At 12672 columns in float32 more warps gain what chunks gain, within "
        "3 %, though by the counters above they keep {many:.0f} % of a "
        "multiprocessor's warps, and chunks {few:.0f} %.",
        abs(
            wide_row["step one, the tutorial's warps"] / wide_row["step three"]
            - 1
        )
        <= 0.03,
        fatal=False,
        many=held.get("step one, the tutorial's warps"),
        few=held.get("step three"),
    ),
    claim(
        "At 12672 columns in bfloat16 chunks are worth more than warps: "
        "chunks reach {chunks:.0%} of a copy, more warps {rule:.0%}.",
        wide_half["step three"]
        > 1.05 * wide_half["step one, the tutorial's warps"],
        fatal=False,
        chunks=wide_half["step three"],
        rule=wide_half["step one, the tutorial's warps"],
    ),
    claim(
        "With 781 columns step two, four rows a program, gains nothing over "
        "step one's better choice of warps; with 256, sixteen rows, it takes "
        "{float32:.2f} times step one's time in float32 and {bfloat16:.2f} "
        "times in bfloat16. (From 4096 columns on a program has one row.)",
        gained.filter(like="x781,") <= 1.02,
        fatal=False,
        of=gained,
        float32=1 / narrow.get("262144x256, float32", np.nan),
        bfloat16=1 / narrow.get("262144x256, bfloat16", np.nan),
    ),
    claim(
        "The library's kernel is within 2 % of the best step everywhere.",
        reached.loc["the library"] >= 0.98 * reached.max(),
        fatal=False,
    ),
    say(
        "The tutorial of today, the persistent kernel, reaches {least:.0%} to "
        "{most:.0%} of a copy.",
        least=reached.loc["the tutorial of today"].min(),
        most=reached.loc["the tutorial of today"].max(),
    ),
)

# %%
# How far from the roof?
# ----------------------
#
# Over the sweep, for each way: its share of the roof and of a copy, its error
# as a part of the limit, whether two runs give the same bits, and a row alone
# the same as among others (*rows alone*), the memory that it takes beyond its
# input, and the seconds of the first call, which compiles.

table(tables.shares(one), "Each way over the sweep, cold", fold=True)

# %%
# Our time over that of each other way, where both were measured:


def against(other):
    """Our cold time over that of another way, over the sweep."""
    return tables.ratio(one, "fusebook", other)


claims(
    *(
        claim(
            "Over the sweep our kernel takes {least:.2f} to {most:.2f} times "
            "the time of {other}, cold, where that was measured, and is never "
            "slower by more than 2 %.",
            against(other) <= 1.02,
            of=against("eager"),
            fatal=False,
            other=other,
            least=against(other).min(),
            most=against(other).max(),
        )
        for other in ("eager", "torch", "torch.compile", "Liger", "quack")
    )
)

# %%
# Larger shapes, each of at least four times the L2 cache in traffic so that
# memory decides, with rows of 2 KiB to 1 MiB:

large = asked.results(
    config="large",
    live="65536x781,65536x1000,32768x4096,16384x12672,32768x16384,8192x65536",
    dtype="float32,bfloat16",
)
plots.dots(large)

# %%
table(tables.shares(large), "Each way over the large shapes, cold", fold=True)

# %%
# Vocabularies of language models. A row of 32000 fits into the registers of
# one program. A row of 128256 does not, so several programs share it.

vocabulary = asked.results(config="llama", dtype="float32,bfloat16")
table(
    tables.times(vocabulary, words=True),
    "Vocabularies: cold time in microseconds",
    fold=True,
)

# %%
# The gradient
# ~~~~~~~~~~~~
#
# The gradient is a kernel of the same shape: with y kept from the forward
# pass, dx = y (dy - sum(y dy)) reads 2MN elements and writes MN.

backward = asked.results(
    SOFTMAX_BACKWARD,
    config="large",
    live="65536x781,32768x4096,16384x12672,32768x16384",
    dtype="float32,bfloat16",
    variants=("eager", "torch", "fusebook"),
)
table(
    tables.shares(backward),
    "The gradient over the large shapes, cold",
    fold=True,
)

# %%
provenance(sweep, small, stairs, large, vocabulary, backward)

# %%
# Lessons
# -------
#
# Targets were set before the kernel was written, and are met or missed. Claims
# are conclusions of now, and are true or false.


# site: fold
def medium_rows(df):
    """What the targets speak of: rows of 4 to 64 KiB, bound by memory."""
    kib = (
        df["N"] * df["dtype"].map(lambda t: getattr(torch, t).itemsize) / 1024
    )
    return df[(kib >= 4) & (kib <= 64) & (df["zone"] == "memory")]


wide = pd.concat([large, vocabulary])
rows = medium_rows(wide)
power = rows["N"] & (rows["N"] - 1) == 0
ragged = (rows["N"] > 8192) & ~power
odd = tables.where(large, N=[781, 1000], zone="memory")
ours = tables.where(wide, variant="fusebook", status="ok")
claims(
    target(
        "Rows of 4 to 64 KiB that are bound by memory run at 97 % of the "
        "speed of a copy or more, and at 93 % where their number of columns "
        "is above 8192 and no power of two; the other rows are in the tables.",
        pd.concat(
            [
                tables.share(rows[~ragged], "fusebook") >= 0.97,
                tables.share(rows[ragged], "fusebook") >= 0.93,
            ]
        ),
        of=ours,
        headline=True,
    ),
    target(
        "On rows of 4 to 64 KiB that are bound by memory our kernel is never "
        "slower than Liger by more than 2 %; the other rows are in the "
        "tables.",
        tables.ratio(rows, "fusebook", "Liger") <= 1.02,
        of=tables.ratio(wide, "fusebook", "Liger"),
    ),
    target(
        "On rows of 4 to 64 KiB that are bound by memory our kernel is never "
        "slower than quack by more than 2 %; the other rows are in the "
        "tables.",
        tables.ratio(rows, "fusebook", "quack") <= 1.02,
        of=tables.ratio(wide, "fusebook", "quack"),
    ),
    target(
        "Rows of 781 and 1000 numbers, bound by memory, run at 97 % of a copy "
        "or more.",
        tables.share(odd, "fusebook") >= 0.97,
        of=ours,
    ),
    target(
        "Rows of 781 and 1000 numbers, bound by memory, are never slower than "
        "torch.compile's by more than 2 %.",
        tables.ratio(odd, "fusebook", "torch.compile") <= 1.02,
        of=tables.ratio(wide, "fusebook", "torch.compile"),
    ),
    target(
        "The gradient reaches 95 % of its roof or more on rows of 4 to 64 KiB "
        "that are bound by memory. It was timed beside eager and PyTorch's "
        "own only; the table above has the other widths.",
        tables.share(medium_rows(backward), "fusebook", of="roof") >= 0.95,
        of=tables.share(backward, "fusebook", of="roof"),
    ),
    claim(
        "At large shapes and vocabularies the kernel takes no memory beyond "
        "its output, to the next 2 MiB.",
        ours.eval("peak_bytes <= write_bytes + 2 * 2**20"),
    ),
    claim(
        "Two runs give the same bits at every large shape and vocabulary.",
        ours["deterministic"] == "yes",
    ),
)

# %%
# Then and now
# ~~~~~~~~~~~~
#
# The page grew from the tutorial *Fused Softmax* of Triton 1.1.2 (2022).
# `Today's <https://triton-lang.org/main/getting-started/
# tutorials/02-fused-softmax.html>`__ has another kernel and most of the old
# sentences. These are the statements in their order, with today's numbers.
# Only those that can be tested as they stand have a verdict. TorchScript, the
# rival of then, is deprecated (:term:`JIT`): it is among the steps above, and
# `torch.compile` takes its place elsewhere.


small_x = x[:64].contiguous()
turned = rough(rng, (20, 7, 30), torch.float32).transpose(0, 2)
general = yardstick(SOFTMAX, (turned,)).judge(fusebook.softmax(turned))
worst = tables.where(sweep, status="ok").groupby("variant")["error"].max()
in_cuda_c = results(
    EXP,
    config="8192x8192",
    dtype="float32",
    variants=["CUDA C", "CUDA C, fast math"],
).set_index("variant")["error"]
scripted_over = (
    reached.loc["step one, the tutorial's warps"] / reached.loc["TorchScript"]
).filter(like="float32")
full = pd.concat([large, vocabulary])
beyond = full[full["N"] >= 65536]
claims(
    holds(
        "\"Significantly faster than PyTorch's native op for a particular "
        "class of matrices: those whose rows can fit in the GPU's SRAM\": "
        "over the sweep our kernel takes {least:.2f} to {most:.2f} times its "
        "time, cold. (Rows of 65536 and more, which several programs share, "
        "take {few:.2f} to {many:.2f} times.)",
        against("torch") < 0.98,
        least=against("torch").min(),
        most=against("torch").max(),
        few=tables.ratio(beyond, "fusebook", "torch").min(),
        many=tables.ratio(beyond, "fusebook", "torch").max(),
    ),
    holds(
        '"Use more threads per row by increasing the number of warps": with '
        "the tutorial's warps step one is faster than with four by more than "
        "2 % at 4096 and 12672 columns. (Narrower rows get four.)",
        reached.loc["step one, the tutorial's warps"].filter(regex="4096|12")
        > 1.02 * reached.loc["step one, 4 warps"].filter(regex="4096|12"),
        of=reached.columns,
    ),
    holds(
        '"A theoretical speed-up of ~4x (i.e., (8MN + 4M) / 2MN)": counted '
        "above, {predicted:.2f}.",
        abs(predicted - 4) < 0.1,
        predicted=predicted,
    ),
    holds(
        '"Triton is 4x faster than the Torch JIT", which is "still far from '
        "ideal\": step one, with the tutorial's warps in float32, is "
        "{least:.1f} to {most:.1f} times as fast as TorchScript.",
        scripted_over >= 4,
        of=reached.columns,
        least=scripted_over.min(),
        most=scripted_over.max(),
    ),
    say(
        'Then: the JIT "does not do any fusion here". Now: it takes '
        "{fewest:.2f} to {longest:.2f} times as long as the chain that it was "
        "given. Our kernel is {least:.1f} to {most:.1f} times as fast as the "
        "chain where memory decides, and torch.compile, which does fuse, "
        "{few:.1f} to {many:.1f} times.",
        fewest=(reached.loc["the chain"] / reached.loc["TorchScript"]).min(),
        longest=(reached.loc["the chain"] / reached.loc["TorchScript"]).max(),
        least=gain.min(),
        most=gain.max(),
        few=tables.ratio(memory, "eager", "torch.compile").min(),
        many=tables.ratio(memory, "eager", "torch.compile").max(),
    ),
    holds(
        '"Exponentials in Triton are fast but approximate (i.e., think __expf '
        'in CUDA)": over 67 million numbers the fast math of CUDA C, a power '
        "of two by the instruction that Triton takes, scores {fast:.1f} eps, "
        "and its expf {plain:.1f}. In softmax the worst of the sweep is "
        "{ours:.1f} eps for our kernel and {torch:.1f} for torch.softmax, "
        "where 64 are allowed.",
        in_cuda_c["CUDA C, fast math"] > 1.02 * in_cuda_c["CUDA C"],
        fast=in_cuda_c["CUDA C, fast math"] / 2**-23,
        plain=in_cuda_c["CUDA C"] / 2**-23,
        ours=worst["fusebook"] / 2**-23,
        torch=worst["torch"] / 2**-23,
    ),
    holds(
        '"As expected, the results are identical", by allclose: step one and '
        "torch.softmax, on this machine.",
        torch.allclose(softmax_one_row(small_x), torch.softmax(small_x, -1)),
    ),
    say(
        'Then: "easier to read, understand and maintain". Now: step one has '
        "{one} lines of code with its launcher. The modules of the library, "
        "with all shapes, dtypes and the gradient, have {all}.",
        one=lines_of(one_row, softmax_one_row),
        all=of_library,
    ),
    say(
        "Then: PyTorch's \"is more general and will work on tensors of any "
        "shape\". Now: on three strided axes the library's is right too, with "
        "{score:.1f} eps.",
        score=general.score / 2**-23,
    ),
)

# %%
# Where it does not win
# ~~~~~~~~~~~~~~~~~~~~~
#
# The points of all sweeps at which another way is faster by more than 2 %,
# cold, the worst first:

everything = pd.concat([sweep, large, vocabulary, small])
everything = everything.drop_duplicates(["M", "N", "dtype", "variant"])
lost = tables.losses(everything)
table(lost, "Where another way is faster: the fastest, and by how much")

# %%
# By the caller's clock
# ~~~~~~~~~~~~~~~~~~~~~
#
# The device works while the host queues what comes next. So an eager program
# of many calls pays, for each, the larger of the host's time and the device's:
# *paid*. A kernel that is shorter than its launch takes as long as the launch.

callers = tables.alike(everything)
by_clock(callers)

# %%
every_clock(callers)

# %%
# A kernel that reads each row twice moves 3MN elements instead of 2MN. It
# cannot exceed two thirds of the roof unless L2 still holds the row. Rows that
# several programs share are read once, but all of these programs wait for the
# slowest.

kib = everything["N"] / 1024
kib *= everything["dtype"].map(lambda t: getattr(torch, t).itemsize)
beyond = (kib > 128) & (everything["zone"] == "memory")
shared = tables.share(everything[beyond], "fusebook", of="roof")
inside = tables.losses(medium_rows(everything))
claims(
    say(
        "Cold, another way is faster by more than 2 % at {lost} of {all} "
        "points, and at {inside} of those with rows of 4 to 64 KiB that are "
        "bound by memory.",
        lost=len(lost),
        all=len(tables.share(everything, "fusebook")),
        inside=len(inside),
    ),
    claim(
        "Rows of more than 128 KiB, bound by memory, reach {least:.0%} of the "
        "roof or more: a kernel that reads them twice cannot exceed two "
        "thirds. (Narrower rows have one program each; for few wide rows see "
        "the four clocks.)",
        shared > 2 / 3,
        fatal=False,
        of=tables.share(everything, "fusebook", of="roof"),
        least=shared.min(),
    ),
)

# %%
# What to take to the next kernel:
#
# - Count the traffic before you write anything: it is the prediction.
# - Compare with a copy of the same bytes in the same run. A kernel at the
#   speed of a copy is finished, whatever its share of a datasheet.
# - One row a program is the simplest kernel. Several rows a program are for
#   narrow rows, several chunks a row for wide ones. Time each step.
# - Rough inputs find what plain ones let pass.
#
# Exercises
# ---------
#
# Each has a function that is wrong, and a check that says so. Mend it, and run
# the page or the notebook again. No GPU is needed.
#
# 1. The logarithm
# ~~~~~~~~~~~~~~~~
#
# A loss needs log(softmax(x)). Taking the logarithm afterwards gives minus
# infinity where the exponential has underflowed. Write it as one kernel that
# never does.


def log_softmax(x):
    return torch.log(softmax_some_rows(x))


exercise(
    "log_softmax is right where softmax underflows",
    log_softmax,
    lambda x: torch.log_softmax(x, -1),
    [(rough(generator(s), (30, 200), torch.float32) * 4,) for s in (1, 2)],
)

# %%
# 2. Temperature
# ~~~~~~~~~~~~~~
#
# Compute softmax(x / T) for a T that is given at run time, without a pass over
# memory for the division, and without overflow for a T of 1/1000.


def with_temperature(x, T):
    return softmax_some_rows(x)


exercise(
    "with_temperature divides by T, and survives a small one",
    with_temperature,
    lambda x, T: torch.softmax(x / T, -1),
    [
        (rough(generator(3), (30, 200), torch.float32), T)
        for T in (1.0, 0.5, 8.0, 0.001)
    ],
)

# %%
# 3. Attention's mask
# ~~~~~~~~~~~~~~~~~~~
#
# Row i may see the columns up to i. Setting the rest to zero afterwards leaves
# rows that do not sum to one. Mask inside, and load nothing that is masked: it
# halves the traffic.


def causal_softmax(x):
    return torch.tril(softmax_some_rows(x))


exercise(
    "causal_softmax gives rows that sum to one below the diagonal",
    causal_softmax,
    lambda x: torch.softmax(
        x.masked_fill(torch.ones_like(x).triu(1).bool(), -inf), -1
    ),
    [(rough(generator(4), (n, n), torch.float32),) for n in (1, 37, 130)],
)

# %%
# 4. Find the fault
# ~~~~~~~~~~~~~~~~~
#
# This launcher is right on every shape that divides evenly, and writes over
# its neighbour's memory on all others. The check puts sevens behind the output
# and looks whether they are still there.


@triton.jit
def rows_unguarded(y_ptr, x_ptr, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (columns < N)[None, :]
    at = rows[:, None] * N + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 1)[:, None])
    tl.store(y_ptr + at, e / tl.sum(e, 1)[:, None], mask=inside)


def into(y, x):
    """Write the softmax of `x` into `y`."""
    M, N = x.shape
    block = triton.next_power_of_2(N)
    rows_unguarded[(triton.cdiv(M, 8),)](y, x, N, ROWS=8, BLOCK=block)


# site: fold
def between_sevens(x):
    """What `into` does to the memory behind its output."""
    M, N = x.shape
    wide = torch.cat([x, x.new_zeros(8, N)])
    out = torch.full_like(wide, 7.0)
    into(out[:M], wide[:M])
    return out


exercise(
    "into stays within its output",
    between_sevens,
    lambda x: torch.cat(
        [torch.softmax(x, -1), x.new_full((8, x.shape[1]), 7)]
    ),
    [
        (rough(generator(5), shape, torch.float32),)
        for shape in [(8, 64), (13, 50)]
    ],
)

# %%
solution("solutions/plot_102_softmax.py")
