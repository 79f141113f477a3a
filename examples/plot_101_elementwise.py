# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Programming a GPU directly: element by element
==============================================

The kernels of this page are no faster than what `torch.compile` makes of the
same chains: do not write them in production. They are the smallest there are:
a product, a double, a sum and a difference. They teach what every kernel has
to say, which element is mine and where it is, and why the gain of fusing is
counted in passes over memory.

Four small exercises of an old manual, Theano's of 2012, stand at the end, and
one in CUDA C, each with a check.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them.

For whom: those who have never written a kernel, and those who know CUDA and
are new to Triton.

Read before: 002.
"""

# %%
# The problem
# -----------
#
# An :term:`elementwise` expression: result i depends on element i of each
# operand and on no other element.
#
# .. math::
#
#    (x y)_i = x_i y_i \qquad (x \pm y)_i = x_i \pm y_i \qquad
#    \mathrm{silu}(x)_i = \frac{x_i}{1 + e^{-x_i}}
#
# There is little arithmetic, and each operand and result is 4 bytes of a
# float32 (:doc:`plot_102_softmax` says how many operations a GPU could do
# while these are on their way). A kernel that takes as long as its bytes take
# must move fewer of them to be faster. The least is to read each operand once
# and to write each result once.

# sphinx_gallery_tags = ["elementwise", "strides", "broadcasting"]
import ctypes
import os
import shutil
import subprocess
import tempfile

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots, tables
from fusebook.cards.elementwise import (
    ADD_ADD_MULTIPLY,
    ADD_SUB,
    DOUBLE,
    EXP,
    MULTIPLY,
    MULTIPLY_ADD,
    SILU,
    _cuda_c,
    cuda_source,
)
from fusebook.measure import bench
from fusebook.measure.check import yardstick
from fusebook.measure.inputs import generator, rough
from fusebook.page import (
    Folded,
    Kernels,
    Listing,
    Source,
    Tabs,
    by_clock,
    by_step,
    claim,
    claims,
    counters,
    downloads,
    every_clock,
    exercise,
    lines_behind,
    lines_of,
    measured,
    provenance,
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
from torch.profiler import ProfilerActivity, profile

asked = study(MULTIPLY_ADD, config="large", dtype="float32")

# %%
# What eager costs
# ----------------
#
# PyTorch runs one operation after another. Each is a launch of its own and a
# pass of its own over memory; what one of them has computed the next one reads
# back.

CHAIN = (
    fusebook.add_sub_eager,
    fusebook.multiply_add_eager,
    fusebook.silu_eager,
    fusebook.add_add_multiply_eager,
)
Source(CHAIN[0], doc=False)

# %%

Folded("The other three chains", Source(*CHAIN[1:], doc=False))

# %%
# For each chain: how many operations PyTorch runs (its profiler counts them
# here and now), how many times SIZE elements are read and written, and how
# many times they would have to be. The ratio is the prediction: if every
# kernel moved its bytes equally fast, the fused chain would be that many times
# as fast.

device = generator(0).device
CHAINS = {
    "add_sub": (ADD_SUB, fusebook.add_sub_eager),
    "multiply_add": (MULTIPLY_ADD, fusebook.multiply_add_eager),
    "silu": (SILU, fusebook.silu_eager),
    "add_add_multiply": (ADD_ADD_MULTIPLY, fusebook.add_add_multiply_eager),
}


def launches(function, operands):
    """Operations that the profiler sees in a call."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function(*operands)
    return sum(
        e.count for e in seen.key_averages() if e.key.startswith("aten::")
    )


counted = {}
for name, (op, eager) in CHAINS.items():
    dims = op.configs["large"][0]
    SIZE = dims["M"] * dims["N"]
    least = op.cost(1, **dims)
    chain = op.variants["eager"].cost(1, **dims)
    small = op.make(generator(0), torch.float32, **op.configs["small"][0])
    counted[name] = {
        "launches, eager": launches(eager, small),
        "reads": chain.read / SIZE,
        "writes": chain.write / SIZE,
        "least reads": least.read / SIZE,
        "least writes": least.write / SIZE,
        "times as fast, predicted": (chain.read + chain.write)
        / (least.read + least.write),
    }
passes = pd.DataFrame.from_dict(counted, orient="index")
predicted = passes["times as fast, predicted"]
table(passes, "Passes over memory, in tensors of SIZE elements", fold=False)

# %%
# The kernel
# ----------
#
# Step one: who am I?
# ~~~~~~~~~~~~~~~~~~~
#
# A GPU runs one function many times, and each run asks for its number. In CUDA
# C such a run is a thread, which has one element; threads come in blocks. In
# Triton it is a :term:`program`, which has a whole vector of elements; the
# compiler deals them to threads. Below is the same product in both, for a
# single block: an old manual's first example, which had 400 numbers.


# site: fold
@triton.jit
def multiply_block(y_ptr, a_ptr, b_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)  # [BLOCK]: every element of this program
    a = tl.load(a_ptr + i)
    b = tl.load(b_ptr + i)
    tl.store(y_ptr + i, a * b)


# site: fold
MULTIPLY_BLOCK = """
extern "C" __global__
void multiply_block(float* y, const float* a, const float* b)
{
    const int i = threadIdx.x;  // this thread's element, one of 512
    y[i] = a[i] * b[i];
}
"""
Tabs(
    {
        "Triton": Source(multiply_block),
        "CUDA C": Listing(MULTIPLY_BLOCK, "cuda"),
    }
)

# %%


# site: fold
def in_cuda_c(source, call, blocks, n, out, x, y):
    """Make a call of CUDA C in every thread of some blocks of 512.

    On a GPU CuPy compiles it. Without one a C++ compiler does, and one thread
    runs after another.
    """
    pointers = [v.data_ptr() for v in (out, x, y)]
    name, arguments = call.split("(")
    if x.is_cuda:
        import cupy

        given = (*map(np.uint64, pointers), np.int64(n))
        stream = torch.cuda.current_stream().cuda_stream
        with cupy.cuda.ExternalStream(stream):
            kernel = cupy.RawKernel(source, name)
            kernel((blocks,), (512,), given[: arguments.count(",") + 1])
        return
    if not (compiler := shutil.which(os.environ.get("CXX") or "g++")):
        raise NotImplementedError("no GPU and no C++ compiler")
    every_thread = """
    #define __global__
    static struct { long long x; } blockIdx, blockDim, threadIdx;
    KERNEL
    extern "C" void every(long long blocks, float* out, const float* x,
                          const float* y, long long n)
    {
        blockDim.x = 512;
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < 512; ++threadIdx.x)
                CALL;
    }
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-xc++", "-", "-o", "every.so"],
            input=every_thread.replace("KERNEL", source).replace("CALL", call),
            text=True,
            cwd=folder,
            check=True,
        )
        every = ctypes.CDLL(os.path.join(folder, "every.so")).every
        every(*map(ctypes.c_longlong, (blocks, *pointers, n)))


# site: fold
def agree(a, b):
    """Whether both kernels give PyTorch's product of one block."""
    y, y_in_c = torch.zeros_like(a), torch.zeros_like(a)
    multiply_block[(1,)](y, a, b, BLOCK=512)
    try:
        call = "multiply_block(out, x, y)"
        in_cuda_c(MULTIPLY_BLOCK, call, 1, len(a), y_in_c, a, b)
    except (ImportError, NotImplementedError):
        return None  # nothing here compiles CUDA C
    return torch.equal(y, a * b) and torch.equal(y_in_c, a * b)


claims(
    claim(
        "Both kernels, in Triton and in CUDA C, give PyTorch's product of two "
        "vectors of 512 numbers.",
        agree(*torch.rand(2, 512, generator=generator(4), device=device)),
    )
)

# %%
# It is right for a vector as long as the block, and silently wrong for any
# other. With a shorter vector it reads and writes beyond the end. With a
# longer one it leaves the rest unwritten. The output below is filled with NaN
# first, so that unwritten elements show.


def step_one(a, b):
    y = torch.full_like(a, float("nan"))
    multiply_block[(1,)](y, a, b, BLOCK=512)
    return y


def written(step, sizes):
    """The share of elements that a step writes."""
    share = {}
    for size in sizes:
        a = torch.ones(size, device=device)
        share[size] = step(a, a).isfinite().float().mean().item()
    return pd.Series(share)


shares = pd.DataFrame({"one program": written(step_one, (512, 1000, 4096))})
shares.index.name = "elements"
table(100 * shares, "Written, in percent", fold=False)

# %%
# Step two: a grid, and a mask
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Now there are as many programs as needed, each with its own stretch of the
# vector, and a :term:`mask` tells the last one where the vector ends. Three
# habits are in these lines. The number of an element has 64 bits, because
# tensors may have more than 2**31 elements. The mask is on the load and on the
# store. And the block of 512 is a power of two, so that each of 128 threads
# takes 16 bytes of float32 in one instruction.


# site: fold
@triton.jit
def multiply_grid(y_ptr, a_ptr, b_ptr, SIZE, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    a = tl.load(a_ptr + i, mask=inside)
    b = tl.load(b_ptr + i, mask=inside)
    tl.store(y_ptr + i, a * b, mask=inside)


def step_two(a, b):
    y = torch.full_like(a, float("nan"))
    SIZE = a.numel()
    multiply_grid[(triton.cdiv(SIZE, 512),)](y, a, b, SIZE, BLOCK=512)
    return y


Tabs(
    {
        "Triton": Source(multiply_grid),
        "CUDA C": Listing(cuda_source("multiply"), "cuda"),
    }
)

# %%

shares["a grid"] = written(step_two, (512, 1000, 4096))
table(100 * shares, "Written, in percent", fold=False)

# %%
# Step three: two results
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# A manual of 2012 asks for x + y and x - y, and notes that the fusion of its
# time could not do it: it knew expressions of one result only. By hand it is
# simple, and the operands are read once for both results.


# site: fold
@triton.jit
def add_and_subtract(s_ptr, d_ptr, a_ptr, b_ptr, SIZE, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    a = tl.load(a_ptr + i, mask=inside)  # read SIZE
    b = tl.load(b_ptr + i, mask=inside)  # read SIZE
    tl.store(s_ptr + i, a + b, mask=inside)  # write SIZE
    tl.store(d_ptr + i, a - b, mask=inside)  # write SIZE


# site: fold
def step_three(a, b):
    both = torch.full_like(a, float("nan")), torch.full_like(b, float("nan"))
    grid = (triton.cdiv(a.numel(), 512),)
    add_and_subtract[grid](*both, a, b, a.numel(), BLOCK=512)
    return both


Tabs(
    {
        "Triton": Source(add_and_subtract),
        "CUDA C": Listing(cuda_source("add_sub"), "cuda"),
    }
)

# %%

pair = torch.rand(2, 1000, generator=generator(5), device=device)
claims(
    claim(
        "Step three gives PyTorch's sum and difference of 1000 numbers.",
        all(
            map(torch.equal, step_three(*pair), fusebook.add_sub_eager(*pair))
        ),
    )
)

# %%
# Step four: strides
# ~~~~~~~~~~~~~~~~~~
#
# So far element i of each tensor lay at address i. A transposed matrix, every
# second column, one row that stands for all rows: these are views, the same
# memory with other strides. A kernel that ignores the strides reads the right
# numbers in the wrong order. So pass them, and let the kernel compute
# addresses from a row and a column. Broadcasting is a stride of zero.


@triton.jit
def multiply_strided(
    y_ptr, a_ptr, b_ptr, M, N, a_row, a_col, b_row, b_col, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK], N or more
    inside = col < N
    a = tl.load(a_ptr + row * a_row + col * a_col, mask=inside)
    b = tl.load(b_ptr + row * b_row + col * b_col, mask=inside)
    tl.store(y_ptr + row * N + col, a * b, mask=inside)


def step_four(a, b):
    a, b = torch.broadcast_tensors(a, b)
    M, N = a.shape
    y = a.new_empty(M, N)
    block = triton.next_power_of_2(N)
    multiply_strided[(M,)](
        y, a, b, M, N, *a.stride(), *b.stride(), BLOCK=block
    )
    return y


base = torch.randn(40, 40, device=device, generator=generator(1))
views = {
    "transposed": (base[:20, :10], base[:10, :20].T),
    "every second column of another": (
        base[:20, :20:2],
        base[::2, 20::2][:, :10],
    ),
    "a row for all rows": (base[:20, :10], base[3:4, :10]),
    "a column for all columns": (base[:20, :10], base[:20, 5:6]),
}
claims(
    *(
        claim(
            f"Step four is right for an operand that is {name}.",
            torch.equal(step_four(a, b), a * b),
        )
        for name, (a, b) in views.items()
    )
)

# %%
# The finished kernels
# ~~~~~~~~~~~~~~~~~~~~
#
# The library has one kernel that goes through the results in order, and one
# for transposed operands. The expression is an argument of the kernel: a
# small function of the operands' values that returns the results. Triton
# compiles the kernel anew for each expression, so this costs nothing at run
# time.

Folded("The library's kernels", Kernels(fusebook.add_sub))

# %%
# A thread takes groups of 16 bytes, and the mask is of whole groups. A mask
# that may end within a group keeps the compiler from wide loads, since four
# adjacent elements need not be all inside or all outside. The last block takes
# what is left, element by element.
#
# Where operands have different strides, a thread finds the place of its group
# by one division for each axis. No group passes the end of a row. Groups are
# therefore smaller where a row is not a whole number of them, down to single
# elements. Before all that, adjacent axes are merged where one stride serves
# for both, such as height and width of a batch of images. An operand that is
# transposed, so that adjacent elements of the result are in different rows of
# it, goes through :term:`tiles <tile>`.
#
# The exponential has a trap that no timing shows. The hardware has powers of
# two, so :math:`e^x` is computed as :math:`2^{x \log_2 e}`. The product is
# rounded, and the error of the result grows with x. A few more operations
# correct it.
#
# CUDA C from Python
# ~~~~~~~~~~~~~~~~~~
#
# CUDA C from Python needs a compiler at run time and a launcher. CuPy has
# both: it compiles the source by NVRTC at the first call, and takes addresses
# of PyTorch's tensors and PyTorch's stream. It checks nothing: with a wrong
# number of arguments, too short a grid or other strides it runs, and the
# result is wrong.

Folded("The launcher of CUDA C", Source(_cuda_c, doc=False))

# %%
# With an element for each thread, a thread asks memory for 4 bytes at a time.
# Triton's compiler makes loads of 16 adjacent bytes; in CUDA C they are
# written by hand: a ``float4`` is four numbers that begin at a multiple of 16
# bytes. The last one to three numbers are left for the first threads.

# site: fold
MULTIPLY_BY_FOUR = """
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


# site: fold
def multiply_by_four(a, b):
    """The product by 16 bytes a thread, of float32 on a GPU."""
    import cupy

    out, n = torch.empty_like(a), a.numel()
    kernel = cupy.RawKernel(MULTIPLY_BY_FOUR, "multiply_by_four")
    stream = torch.cuda.current_stream().cuda_stream
    with cupy.cuda.ExternalStream(stream):
        given = [np.uint64(t.data_ptr()) for t in (out, a, b)]
        blocks = triton.cdiv(triton.cdiv(n, 4), 256)
        kernel((max(blocks, 1),), (256,), (*given, np.int64(n)))
    return out


Listing(MULTIPLY_BY_FOUR, "cuda")

# %%
# What the hardware counts
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# Nsight Compute reads the counters of the GPU. Memory is fetched in
# :term:`sectors <sector>` of 32 bytes. The 32 threads of a :term:`warp` that
# take 4 adjacent bytes each ask for 4 sectors, and for 16 where they take 16
# bytes each: every byte is used. That is :term:`coalescing`. Where the second
# operand is transposed, the threads of step four are a row apart, and a load
# of it asks for 32 sectors to use 4 bytes of each; the L2 cache keeps the rest
# for other loads. Tiles mend it. The table has the mean of all loads. The
# :term:`occupancy` is how many warps a multiprocessor holds, of those that it
# could. All matrices are 4096 x 4096.


# site: fold
def to_count():
    a, b = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    return {
        "CUDA C": lambda: MULTIPLY.variants["CUDA C"].run(a, b),
        "step two": lambda: step_two(a, b),
        "step four": lambda: step_four(a, b),
        "step four, transposed": lambda: step_four(a, b.T),
        "the library": lambda: fusebook.multiply(a, b),
        "the library, transposed": lambda: fusebook.multiply(a, b.T),
    }


seen = counters("elementwise_counters", to_count)
ours = seen[~seen["kernel"].str.startswith("native")]
both = 2 * 4 * 4096**2  # bytes of both operands
traffic = by_step(ours, both, "of the operands' bytes")
traffic = traffic.drop(columns=["kernels", "written, of the operands' bytes"])
table(traffic, "A product, by the counters of the GPU", fold=False)

# %%
sectors, held = traffic["sectors a load"], traffic["occupancy, %"]
fetched = traffic["read, of the operands' bytes"]
claims(
    claim(
        "Each kernel reads both operands from memory once, to 2 %.",
        (fetched - 1).abs() < 0.02,
        fatal=False,
    ),
    claim(
        "In CUDA C, with one element per thread, a load asks for 4 sectors; "
        "in the library's kernel it asks for 16.",
        pd.concat(
            [
                sectors.filter(items=["CUDA C"]).eq(4),
                sectors.filter(items=["the library"]).eq(16),
            ]
        ),
        of=sectors,
        fatal=False,
    ),
    claim(
        "With a transposed operand the loads of step four ask for more "
        "sectors than those of the library's tiles.",
        sectors.filter(items=["step four, transposed"]).gt(
            sectors.get("the library, transposed")
        ),
        of=sectors,
        fatal=False,
    ),
)

# %%
# Is it right?
# ------------
#
# Every expression against the same in float64, at a width that no block
# divides. A third of the rows are plain normal numbers, a third have a few
# large values, a third are far from zero.

OPS = (MULTIPLY, DOUBLE, ADD_SUB, MULTIPLY_ADD, SILU, ADD_ADD_MULTIPLY, EXP)
rows = []
for op in OPS:
    dims = {"M": 24, "N": 781}
    dims |= {"y": "row"} if "y" in op.edges[0] else {}
    for dtype in (torch.float32, torch.bfloat16):
        inputs = op.make(generator(0), dtype, **dims)
        got = op.variants["fusebook"].run(*inputs)
        verdict = yardstick(op, inputs).judge(got)
        rows.append(
            (op.name, str(dtype)[6:], verdict.error, verdict.tolerance)
        )
scores = pd.DataFrame(rows, columns=["op", "dtype", "error", "tolerance"])
scores = scores.set_index(["op", "dtype"])
table(scores, "Scores, and what is allowed", fold=True)

# %%
# A test of the first result alone would pass the following three mistakes. The
# check that all pages use scores each result, and the worst counts.

x, y = ADD_SUB.make(generator(2), torch.float32, M=33, N=50, y="matrix")
yard = yardstick(ADD_SUB, (x, y))
nothing = torch.full_like(x, float("nan"))  # what poisoned memory holds
mistakes = {
    "a second result that was forgotten": (x + y, nothing),
    "a second result that is negated": (x + y, y - x),
    "a second result in half precision": (
        x + y,
        (x.half() - y.half()).float(),
    ),
}
claims(
    claim(
        "Every score is within its limit.",
        scores["error"] <= scores["tolerance"],
    ),
    *(
        claim(f"The check catches {name}.", not yard.judge(pair).ok)
        for name, pair in mistakes.items()
    ),
)

# %%
# How fast?
# ---------
#
# The chains
# ~~~~~~~~~~
#
# Beside eager and ours stand PyTorch's own fused operator where it has one,
# ``torch.compile``, the graph in ONNX Runtime, and CUDA C with a thread for
# each element. All are checked before they are timed. A float32 tensor of 8192
# x 8192 has 256 MiB.

chains = {
    op.name: asked.results(op)
    for op in (ADD_SUB, MULTIPLY_ADD, SILU, ADD_ADD_MULTIPLY)
}


def together(frames):
    """Frames of several operators as one, with the operator among the dims."""
    parts = []
    for frame in frames:
        part = frame.copy()
        at = list(part.columns).index("dtype") + 1
        part.insert(at, "of", part["op"].str.replace("_", " "))
        parts.append(part)
    whole = pd.concat(parts, ignore_index=True)
    whole.attrs.update(frames[0].attrs)
    if "y" in whole:  # a matrix everywhere: nothing to tell apart
        whole.loc[whole["y"].eq("matrix"), "y"] = None
    return whole


def times(frame, kind="cold"):
    """Microseconds: a row an operator and size, a column a variant."""
    frame = frame.assign(point=tables.label(frame))
    us = frame[tables.column(kind)]
    shown = frame["status"].where(frame["status"] != "ok", us)
    wide = frame.assign(shown=shown).pivot_table(
        "shown", "point", "variant", aggfunc="first", sort=False
    )
    order = list(dict.fromkeys(frame["variant"]))
    return wide.reindex(columns=[v for v in order if v in wide])


every = together(list(chains.values()))
table(times(every), "Chains: cold time in microseconds", fold=False)

# %%
# What was predicted from the passes, and what came of it:

gain = pd.DataFrame(
    {
        "predicted": predicted,
        **{
            label: {
                name: tables.ratio(frame, "eager", "fusebook").iloc[at]
                for name, frame in chains.items()
            }
            for label, at in (("smallest", 0), ("largest", -1))
        },
    }
)
table(gain, "Eager's time over ours", fold=False)

# %%
# Single operations
# ~~~~~~~~~~~~~~~~~
#
# There is nothing to fuse in a product, a double or an exponential. They show
# what a kernel of one operation takes in PyTorch, by torch.compile, in CUDA C,
# and in ours. *Fast math* is CUDA C compiled with ``--use_fast_math``.

alone = [asked.results(op, config="large") for op in (MULTIPLY, DOUBLE, EXP)]
singles = together(alone)
table(times(singles), "Single operations: cold, microseconds", fold=False)

# %%
# What each step was worth
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# The product by the kernels of this page as they were shown, and two results
# by step three, 8192 x 8192 in float32, cold. The roof is that of the product.


# site: fold
def product_steps():
    rng = generator(0)
    a, b = (
        torch.randn(8192, 8192, device=rng.device, generator=rng)
        for _ in range(2)
    )
    want = a * b
    wanted = fusebook.add_sub_eager(a, b)

    def right(got):
        if isinstance(got, torch.Tensor):
            return torch.equal(got, want)
        return all(map(torch.equal, got, wanted))

    def pair():
        both = torch.empty_like(a), torch.empty_like(b)
        programs = (triton.cdiv(a.numel(), 512),)
        add_and_subtract[programs](*both, a, b, a.numel(), BLOCK=512)
        return both

    def grid(block):
        out, SIZE = torch.empty_like(a), a.numel()
        multiply_grid[(triton.cdiv(SIZE, block),)](
            out, a, b, SIZE, BLOCK=block
        )
        return out

    return bench.staircase(
        {
            "PyTorch": lambda: torch.mul(a, b),
            "CUDA C": lambda: MULTIPLY.variants["CUDA C"].run(a, b),
            "CUDA C, 16 bytes a thread": lambda: multiply_by_four(a, b),
            "step two, 512 a program": lambda: grid(512),
            "step two, 4096 a program": lambda: grid(4096),
            "step four, a row a program": lambda: step_four(a, b),
            "the library": lambda: fusebook.multiply(a, b),
            "x + y and x - y: PyTorch": lambda: fusebook.add_sub_eager(a, b),
            "x + y and x - y: step three": pair,
            "x + y and x - y: the library": lambda: ADD_SUB.variants[
                "fusebook"
            ].run(a, b),
        },
        right,
    )


stairs = measured("elementwise_steps", product_steps, by_device=True)
on = stairs.attrs["origin"].machine
least = MULTIPLY.cost(4, M=8192, N=8192, y="matrix")
stairs = stairs.set_index("step")
stairs["lines of code"] = pd.Series(
    {
        "CUDA C": len(cuda_source("multiply").splitlines()),
        "CUDA C, 16 bytes a thread": len(
            MULTIPLY_BY_FOUR.strip().splitlines()
        ),
        "step two, 512 a program": lines_of(multiply_grid, step_two),
        "step two, 4096 a program": lines_of(multiply_grid, step_two),
        "step four, a row a program": lines_of(multiply_strided, step_four),
        "the library": lines_behind(fusebook.silu_eager),
        "x + y and x - y: step three": lines_of(add_and_subtract, step_three),
    }
)
roof = pd.DataFrame({"us": {"the roof": 1e6 * on.roof(least, "float32")}})
table(
    pd.concat([stairs, roof])[["us", "registers", "warps", "lines of code"]],
    "Each step, in microseconds",
    fold=False,
)

# %%
many, few = (held.get(step, np.nan) for step in ("CUDA C", "step four"))
longer = stairs["us"]["CUDA C"] / stairs["us"]["step four, a row a program"]
claims(
    claim("Every step gives PyTorch's numbers.", stairs["right"]),
    say(
        "Step two takes {short:.2f} times the library's time with 512 numbers "
        "per program, {long:.2f} times with 4096; one row per program, by "
        "strides, takes {strided:.2f} times.",
        short=stairs.loc["step two, 512 a program", "us"]
        / stairs.loc["the library", "us"],
        long=stairs.loc["step two, 4096 a program", "us"]
        / stairs.loc["the library", "us"],
        strided=stairs.loc["step four, a row a program", "us"]
        / stairs.loc["the library", "us"],
    ),
    claim(
        "More warps are not more speed: CUDA C with 4 bytes a thread takes "
        "{times:.2f} times as long as step four. By the counters of 4096 x "
        "4096 it has {many:.0f} % of the warps, and step four {few:.0f} %.",
        many > few and longer > 1,
        fatal=False,
        times=longer,
        many=many,
        few=few,
    ),
)

# %%
# Small tensors
# ~~~~~~~~~~~~~
#
# Small tensors are compared with a launch. The sizes are the old manual's: a
# matrix of 20 x 10, and 480 x 480 = 10 * 30 * 768 numbers. *Warm* is the time
# of a call among many in a :term:`CUDA graph`, without the host. Beside it
# stands the least that any kernel takes, the :doc:`launch floor
# </method>` plus the roof.

little = together([asked.results(op, config="small") for op in OPS])
warm = times(little, "warm")
floor = little.assign(point=tables.label(little)).groupby("point", sort=False)
warm["launch floor + roof"] = (
    floor["floor_warm_us"].first() + floor["roof_us"].first()
)
Folded(
    "Small tensors: warm, the host's time of a call, and a call waited for",
    table(warm, "Small: warm time in microseconds", fold=False),
    table(
        times(little, "host"), "The host's time to queue a call", fold=False
    ),
    table(times(little, "call"), "A call, waited for", fold=False),
)

# %%
# Shapes
# ~~~~~~
#
# The second operand is one row for all rows, one column for all columns, or a
# transposed matrix. A row is read from memory once and then stays in the
# cache. A transposed matrix needs tiles: reading along the rows of one operand
# makes the other one strided, so that a load asks for 32 bytes to use 4.

shapes = together(
    [asked.results(op, config="shapes") for op in (MULTIPLY, MULTIPLY_ADD)]
)
table(times(shapes), "Shapes: cold time in microseconds", fold=True)

# %%
products = tables.where(shapes, op="multiply")
across = tables.ratio(products, "fusebook", "eager")
compiled = tables.ratio(products, "fusebook", "torch.compile")
claims(
    say(
        "The product of a matrix with a row, a column or a transposed matrix "
        "takes {least:.2f} to {most:.2f} times the time of PyTorch's own, and "
        "{low:.2f} to {high:.2f} times that of torch.compile.",
        least=across.min(),
        most=across.max(),
        low=compiled.min(),
        high=compiled.max(),
    )
)

# %%
# Half the bytes
# ~~~~~~~~~~~~~~
#
# The same chains in bfloat16, 8192 x 8192. *Wrong* are ways that round the
# result of every operation to bfloat16: where a sum cancels, their error
# exceeds the limit. A fused chain rounds once. The CUDA C of this page takes
# float32 only.

half = together(
    [asked.results(op, config="8192x8192", dtype="bfloat16") for op in OPS]
)
table(times(half), "bfloat16: cold time in microseconds", fold=True)

# %%
provenance(*chains.values(), *alone)

# %%
downloads(pd.concat([every, singles, little, shapes, half]), "elementwise")

# %%
# How far from the roof?
# ----------------------
#
# The :term:`roof` is the time of the least bytes at the bandwidths that were
# measured on this machine, with tensors of 4 GiB: the rate of a copy for as
# much as is both read and written, the rate of a sum for what is read beyond.

largest = tables.where(tables.together(every, singles), M=8192)
ax = plots.dots(largest, of="roof", title="8192 x 8192, float32")

# %%
# A kernel starts and ends with multiprocessors that wait, and so does a copy
# of as many bytes. The less there is to move, the larger a part of the time
# that may be:

ours = tables.where(pd.concat([every, singles]), variant="fusebook")
moved = (ours["read_bytes"] + ours["write_bytes"]) / 2**20
by_size = pd.DataFrame(
    {
        "MiB in all": moved,
        "% of roof": 100 * ours["roof_us"] / ours["gpu_us"],
        "% of copy": 100 * ours["copy_us"] / ours["gpu_us"],
        "% of launch floor + roof": 100
        * (ours["floor_us"] + ours["roof_us"])
        / ours["gpu_us"],
    }
).set_axis(tables.label(ours), axis=0)
by_size = by_size.sort_values("MiB in all", kind="stable")
table(by_size, "Ours, by what is moved", fold=True)

# %%
# Lessons
# -------
#
# Targets were set before these kernels were written, and are met or missed.
# Claims are conclusions of now, and are true or false.

share = by_size["% of roof"] / 100
chain = ~by_size.index.str.contains("multiply$|double|exp") | (
    by_size.index.str.contains("add multiply")
)
memory = by_size["MiB in all"] >= 256
tiny = tables.where(little, of="exp", M=480).set_index("variant")
tiny = tiny["gpu_warm_us"] / (tiny["floor_warm_us"] + tiny["roof_us"])
fused = pd.concat(
    [
        tables.ratio(frame, "fusebook", "torch.compile")
        for frame in chains.values()
    ]
)
claims(
    target(
        "Chains of tensors of 256 MiB reach at least 95 % of the roof; "
        "smaller ones and single operations are in the claim on the roof.",
        share[chain & by_size.index.str.startswith("8192x8192")] >= 0.95,
        of=share,
    ),
    target(
        "Where 256 MiB and more are moved, our kernels reach at least 95 % of "
        "a copy: the L2 cache serves a part of what moves less.",
        by_size.loc[memory, "% of copy"] >= 95,
        of=by_size,
    ),
    target(
        "exp of 230400 numbers takes {times:.2f} times the launch floor plus "
        "the roof, warm, and eager {eager:.2f} times; the target was 1.1.",
        tiny["fusebook"] <= 1.1,
        times=tiny["fusebook"],
        eager=tiny["eager"],
    ),
    claim(
        "At 8192 x 8192 each chain becomes as many times as fast as was "
        "predicted, within a tenth.",
        (gain["largest"] / gain["predicted"] - 1).abs() <= 0.1,
    ),
    claim(
        "Our kernels are right at every point of this page.",
        tables.where(
            pd.concat([every, singles, little, shapes, half]),
            variant="fusebook",
        )["status"]
        == "ok",
    ),
)

# %%
own = tables.ratio(little, "fusebook", "eager", "call")
claims(
    claim(
        "Let torch.compile fuse chains of elementwise operations: in float32, "
        "contiguous, from 2048 x 8192 on our kernels take {least:.3f} to "
        "{most:.3f} times its time, which is no reason to write them.",
        fused >= 0.95,
        fatal=False,
        headline=True,
        least=fused.min(),
        most=fused.max(),
    ),
    claim(
        "At these sizes our kernels are never slower than torch.compile by "
        "more than 2 %.",
        fused <= 1.02,
        fatal=False,
    ),
    claim(
        "Wherever 256 MiB and more are moved, which no cache serves, our "
        "kernels reach at least 95 % of the roof; the least is {least:.2%}.",
        share[memory] >= 0.95,
        fatal=False,
        of=share,
        least=share[memory].min(),
    ),
    claim(
        "A small call, waited for, takes no longer than PyTorch's own chain, "
        "to 2 %: {least:.2f} to {most:.2f} times its time.",
        own <= 1.02,
        fatal=False,
        least=own.min(),
        most=own.max(),
    ),
)

# %%
# What the others teach
# ~~~~~~~~~~~~~~~~~~~~~
#
# The CUDA C that is timed beside ours gives each thread one element, as the
# first examples of manuals do. It is there to be compared with, and no rival:
# a thread asks memory for 4 bytes at a time where ours asks for 16, so fewer
# bytes are under way. What 16 bytes a thread are worth in CUDA C is among the
# steps above. ONNX Runtime fuses chains that it knows by name, and no others.

single = pd.concat([every, singles])
narrow = tables.ratio(single, "CUDA C", "fusebook")
four = stairs["us"].filter(items=["CUDA C, 16 bytes a thread"])
onnx = {
    name: tables.ratio(chains[name], "ONNX Runtime", "eager").iloc[-1]
    for name in ("silu", "multiply_add", "add_add_multiply")
}
claims(
    claim(
        "From 2048 x 8192 on, in float32, one element a thread takes at least "
        "a tenth longer than 16 bytes a thread: {least:.2f} to {most:.2f} "
        "times as long.",
        narrow >= 1.1,
        least=narrow.min(),
        most=narrow.max(),
        fatal=False,
    ),
    claim(
        "A product in CUDA C with 16 bytes a thread is as fast as the "
        "library's, within 2 %.",
        (four / stairs.loc["the library", "us"] - 1).abs() <= 0.02,
        fatal=False,
    ),
    say(
        "At 8192 x 8192 the chains in ONNX Runtime take {silu:.2f} (silu), "
        "{multiply_add:.2f} (multiply_add) and {add_add_multiply:.2f} "
        "(add_add_multiply) times the time of PyTorch's separate operations.",
        **onnx,
    ),
)

# %%
# Where it does not win
# ~~~~~~~~~~~~~~~~~~~~~
#
# The sizes of this page at which another way is faster on the device by more
# than 2 %, the worst first, small ones too.

compared = tables.alike(pd.concat([every, singles, little, shapes, half]))
table(
    tables.losses(compared),
    "Where another way is faster, cold: the fastest, and how far behind",
    fold=False,
)

# %%
# By the caller's clock
# ~~~~~~~~~~~~~~~~~~~~~
#
# The device works while the host queues what comes next. So an eager program
# of many calls pays, for each, the larger of the host's time and the device's:
# *paid*. A kernel that is shorter than its launch takes as long as the launch.

by_clock(compared)

# %%
every_clock(compared)

# %%
# What to take to the next kernel:
#
# - Count reads and writes before anything else. The count is the prediction,
#   and for elementwise expressions it comes true.
# - Let each thread load 16 bytes of each operand in one instruction: that is
#   what :term:`coalescing` is at its best.
# - Keep the mask away from all blocks but the last.
# - Strides are arguments. A kernel without them is right until somebody
#   transposes.
# - Do not write these kernels: let the compiler fuse them. Write the ones that
#   it cannot, and put expressions like these inside.
#
# Exercises
# ---------
#
# Four of the old manual and one in CUDA C, each with a function that runs and
# is wrong, and a check that says so. Mend it, and run the page or the notebook
# again. No GPU is needed.
#
# 1. A matrix of shape (20, 10)
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# This product is right for vectors of up to 512 numbers. Of a matrix it
# multiplies the first row only. Make it right for matrices of any shape.


def multiply_matrix(x, y):
    out = torch.zeros_like(x)
    multiply_grid[(1,)](out, x, y, x.shape[-1], BLOCK=512)
    return out


def matrices(seed, *shape, transposed=False):
    """Two matrices, transposed in memory if asked."""
    rng = generator(seed)
    pair = [rough(rng, shape, torch.float32) for _ in range(2)]
    return tuple(v.T.contiguous().T if transposed else v for v in pair)


exercise(
    "multiply_matrix multiplies matrices of any shape",
    multiply_matrix,
    torch.mul,
    [matrices(3, 20, 10), matrices(4, 33, 70)],
)

# %%
# 2. Two matrices
# ~~~~~~~~~~~~~~~
#
# The old operator doubled its input. Make it take two, and multiply them.


@triton.jit
def twice(y_ptr, a_ptr, SIZE, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < SIZE)
    tl.store(y_ptr + i, a * 2, mask=i < SIZE)


def product(x, y):
    out = torch.empty_like(x)
    SIZE = x.numel()
    twice[(triton.cdiv(SIZE, 512),)](out, x, SIZE, BLOCK=512)
    return out


exercise(
    "product returns x * y",
    product,
    torch.mul,
    [matrices(5, 4, 5), matrices(6, 40, 50)],
)

# %%
# 3. Two outputs
# ~~~~~~~~~~~~~~
#
# Return x + y and x - y, from one kernel that reads x and y once.


def sum_and_difference(x, y):
    return x + y, x + y


exercise(
    "sum_and_difference returns x + y and x - y",
    sum_and_difference,
    lambda x, y: (x + y, x - y),
    [matrices(7, 4, 5), matrices(8, 40, 50)],
)

# %%
# 4. Strides
# ~~~~~~~~~~
#
# This one takes memory as it comes, and so multiplies a transposed matrix in
# the wrong order. Mend it without a copy.


def multiply_as_it_lies(x, y):
    out = torch.empty(x.shape, device=x.device)
    SIZE = x.numel()
    multiply_grid[(triton.cdiv(SIZE, 512),)](out, x, y, SIZE, BLOCK=512)
    return out


x, y = matrices(9, 20, 10)
across, _ = matrices(10, 20, 10, transposed=True)
exercise(
    "multiply_as_it_lies is right for operands of any strides",
    multiply_as_it_lies,
    torch.mul,
    [(x, y), (across, y), matrices(11, 33, 70, transposed=True)],
)

# %%
# 5. In CUDA C
# ~~~~~~~~~~~~
#
# The same in CUDA C: this kernel doubles its first operand. Make it return the
# product of both, and mind that the grid has whole blocks of 512 threads: the
# check looks behind the end of the output. On a GPU CuPy compiles it. Without
# one a C++ compiler does, and calls it for one thread after the other; a
# machine that has neither says so.


def product_in_c():
    return """
    extern "C" __global__
    void product(float* out, const float* x, const float* y, long long n)
    {
        long long i = (long long) blockIdx.x * blockDim.x + threadIdx.x;
        out[i] = 2 * x[i];
    }
    """


# site: fold
def between_sevens(x, y):
    """The product by `product_in_c`, and 512 sevens behind it."""
    n = x.numel()
    room = [v.new_full((n + 512,), 7.0) for v in (x, x, y)]
    room[1][:n], room[2][:n] = x.flatten(), y.flatten()
    blocks = triton.cdiv(n, 512)
    in_cuda_c(product_in_c(), "product(out, x, y, n)", blocks, n, *room)
    return room[0]


# site: fold
def sevens_behind(x, y):
    return torch.cat([(x * y).flatten(), x.new_full((512,), 7)])


exercise(
    "product_in_c returns x * y and stays within its output",
    between_sevens,
    sevens_behind,
    [matrices(12, 20, 10), matrices(13, 33, 70)],
)

# %%
solution("solutions/plot_101_elementwise.py")
