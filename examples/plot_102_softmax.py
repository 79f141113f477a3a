"""
Fused softmax: read once, write once
====================================

Softmax in eager PyTorch moves four times the bytes it has to. We write it as
one Triton kernel in three versions, and compare each with a copy of its bytes.

You will learn

- how to predict a speedup by counting bytes,
- how to reduce along a row in Triton, with masks and padding,
- how to choose rows and chunks per program for narrow and wide rows.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_101_elementwise`. Without
a GPU, kernels run in Triton's interpreter, and times are recorded ones.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["softmax", "reduction"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_102_softmax")
page.verdict()

# %%
# Why softmax is slow in eager PyTorch
# ------------------------------------
#
# Softmax turns every row :math:`x` of a matrix with M rows and N columns into
#
# .. math::
#
#    y_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}, \qquad m = \max_j x_j
#
# The maximum is subtracted so that no exponential overflows: exp(89) does in
# float32. *Eager* PyTorch runs each operation when it is called. Each line
# below is one kernel, a function that runs on the GPU: it reads its inputs
# from memory and writes its output back. The comments count elements.


def softmax_eager(x):
    top = x.amax(-1, keepdim=True)  # read MN, write M
    shifted = x - top  # read MN + M, write MN
    e = shifted.exp()  # read MN, write MN
    total = e.sum(-1, keepdim=True)  # read MN, write M
    return e / total  # read MN + M, write MN


page.traffic(eager=softmax_eager, fused=2)

# %%
# A *fused* kernel reads the input once, keeps intermediate values in
# :term:`registers <register>`, and writes the result once. By data sheets, an
# H200 can execute about 55 instructions while memory reads and writes one
# float32 element, and an H100 about 80. Softmax needs five operations, so
# memory decides: **we predict 4x.**

# %%
# .. _softmax-one-row:
#
# Step 1: one program per row {gain one_row at N=781}
# ---------------------------------------------------
#
# Triton launches many instances of a kernel, called
# :term:`programs <program>`. Here program *i* owns row *i*. It loads the row
# into registers, reduces it there, and stores the result: one read, one write.
#
# A program works on a tile, an array whose size is a power of two. A row of
# 781 columns needs a tile of 1024, and the rest is padding. ``mask`` keeps
# loads and stores away from the padding. ``other`` is what a load puts there:
# minus infinity changes no maximum, and its exponential, 0, changes no sum.

page.picture.rows(rows=2, columns=12, block=16)

# %%


@triton.jit
def one_row(y_ptr, x_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int32 overflows past 2**31 elements
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < N
    at = row * N + columns
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))  # read N
    x = x.to(tl.float32)  # a bfloat16 sum loses small terms
    e = tl.exp(x - tl.max(x, 0))  # [BLOCK]
    tl.store(y_ptr + at, e / tl.sum(e, 0), mask=inside)  # write N


def softmax_one_row(x, num_warps=4):
    M, N = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(N)
    one_row[(M,)](y, x, N, BLOCK=block, num_warps=num_warps)
    return y


# %%
# ``one_row[(M,)](...)`` launches M programs. A ``tl.constexpr`` is a constant:
# a kernel is compiled once for each value. We check it on difficult rows, made
# by ``page.stress``. One in three is ``randn``, one has three values that are
# 20 times larger, and one is shifted by 100. The error is relative to the
# result in float64. Its unit *eps* is the distance from 1 to the next number
# of the dtype.

x = page.stress(1823, 781)
page.check(softmax_one_row, x)

# %%
# ``num_warps=4`` gives each program 4 warps of 32 threads. A row of 12672
# columns is padded to 16384, so each thread has 128 values, one in each
# register, and needs more registers for intermediate values. The 65536
# registers of a :term:`multiprocessor` hold at most three such programs, where
# 16 small ones could run. In bfloat16 three are too few for some to load while
# others compute.

# %%
# .. _softmax-rows:
#
# Step 2: several rows per program {gain rows at N=256, bfloat16}
# ---------------------------------------------------------------
#
# With 256 columns, each of a program's 128 threads has two elements. The
# threads find the maximum in 7 steps, as 2**7 is 128: in each, a thread gets a
# value of another one. The sum takes 7 more. With the rest of the kernel,
# these make some fifty instructions per element. An H100 has time for about 80
# in float32, and for 40 in bfloat16, which has half the bytes. Here a program
# owns several rows and a thread 32 elements, which halves the instructions per
# element. Comments mark changes.

page.picture.tile(rows=3, columns=12, block=16, per=2)

# %%


@triton.jit
def some_rows(y_ptr, x_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    columns = tl.arange(0, BLOCK)
    live = (rows < M)[:, None]  # [ROWS, 1], past the last row it is false
    inside = live & (columns < N)[None, :]  # [ROWS, BLOCK]
    at = rows[:, None] * N + columns[None, :]  # [ROWS, BLOCK]
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    e = tl.exp(x - tl.max(x, 1)[:, None])  # a maximum per row, along axis 1
    total = tl.sum(e, 1)[:, None]  # [ROWS, 1]
    tl.store(y_ptr + at, e / total, mask=inside)  # [ROWS, BLOCK]


def softmax_rows(x):
    M, N = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(N)
    rows = max(1, 4096 // block)  # so that a tile has at least 4096 elements
    some_rows[(triton.cdiv(M, rows),)](y, x, M, N, ROWS=rows, BLOCK=block)
    return y


page.check(softmax_rows, x)

# %%
# .. _softmax-chunks:
#
# Step 3: chunks of a row {gain chunks over one_row at N=12672, bfloat16}
# -----------------------------------------------------------------------
#
# For wide rows this kernel changes step 1 in three places. It holds a tuple of
# equal chunks instead of one tile:

page.picture.chunks(columns=12672, block=16384, chunk=1024)

# %%
# - *Chunks* have less padding: a thread holds 104 values instead of 128. The
#   compiler unrolls ``tl.static_range``, so all chunks stay in registers.
# - *One division* per row, whose result multiplies each element. A division
#   takes several instructions.
# - ``tl.exp2`` is one instruction. ``tl.exp`` uses it too, but adds more for
#   results below 1e-38, which ``tl.exp2`` makes zero.
#
# Each alone saves a seventh to a fifth of step 1's instructions (not timed),
# and all three save half.


@triton.jit
def in_chunks(y_ptr, x_ptr, N, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    chunks = ()
    tops = tl.full([BLOCK], float("-inf"), tl.float32)  # per place of a chunk
    for i in tl.static_range(CHUNKS):
        inside = i * BLOCK + columns < N
        at = row * N + i * BLOCK + columns
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))  # read N
        chunks += (x.to(tl.float32),)
        tops = tl.maximum(tops, chunks[i])
    top = tl.max(tops, 0)  # threads exchange values once per row, as in step 1
    exps = ()  # kept, so that each is computed once
    sums = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        exps += (tl.exp2((chunks[i] - top) * 1.4426950408889634),)  # log2(e)
        sums += exps[i]
    scale = 1 / tl.sum(sums, 0)  # one division per row
    for i in tl.static_range(CHUNKS):
        inside = i * BLOCK + columns < N
        at = row * N + i * BLOCK + columns
        tl.store(y_ptr + at, exps[i] * scale, mask=inside)  # write N


def softmax_chunks(x, block=1024):
    M, N = x.shape
    y = torch.empty_like(x)
    in_chunks[(M,)](y, x, N, BLOCK=block, CHUNKS=triton.cdiv(N, block))
    return y


page.check(softmax_chunks, page.stress(64, 12672))

# %%
# .. _softmax-shared-row:
#
# Rows wider than one program
# ---------------------------
#
# A row above 128 KiB does not fit the registers of one program, so several
# programs share it. Each reduces its part to a pair: the maximum, and the sum
# of the exponentials. It publishes the pair in a workspace, a small buffer in
# global memory. Then it waits for the other pairs and merges them as in an
# :term:`online softmax`: a sum is rescaled when a larger maximum turns up.

page.picture.shared_row(programs=4)

# %%
# A launch does not promise that all programs of a row run at the same time. So
# a program that has waited too long computes the missing pairs itself.

page.source("softmax", fold=True)

# %%
# Is it correct?
# --------------
#
# A check is worth what it catches. This softmax forgets the maximum:


def forgetful(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


page.catches(forgetful, randn=torch.randn(64, 781), stress=x)

# %%
# The next check adds small, odd and wide rows, other dtypes and special
# values.

page.check_all(softmax_one_row, softmax_rows, softmax_chunks, special=True)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). The figure divides the least traffic, 2MN elements, by the GPU
# time. The *roofline* is the bandwidth of the largest copies. *A copy* is
# ``y.copy_(x)`` of the same matrix.

page.plot("bandwidth", over="N")

# %%
# The table has the steps, with a copy as 100 %. Its matrices have 16384 rows
# or more, those of the figure 4096. The box at the top is of another run.

steps = {"one_row": softmax_one_row, "rows": softmax_rows}
page.steps(eager=softmax_eager, **steps, chunks=softmax_chunks)

# %%
# - At 256 columns, three quarters of step 3's chunk are padding.
# - At 781 columns, rows do not begin at multiples of 16 bytes, so each load
#   fetches one element. In bfloat16 half the bytes take as many instructions
#   as in float32, which decide the time. The library gives such rows to single
#   warps, which exchange values in fewer steps.
# - From 4096 columns on, step 2 also has one row per program. At 12672 columns
#   in bfloat16 it is faster than step 1, with as many registers. We do not
#   know why.
# - Eager moves 4x the bytes, so its limit is 25 %. Its kernels that subtract
#   and divide load single elements.

page.findings()

# %%
# .. _softmax-use:
#
# When to use it
# --------------
#
# Call the library for any axis, any strides, and float16 to float64. Its
# backward pass is one kernel too, and it works under ``torch.compile``. It
# passes rows of more than ``2**20`` elements to torch. In the table, *end to
# end* is the larger of a call's GPU time and the CPU's time to launch it.

y = fusebook.softmax(x, dim=-1)
page.use()

# %%
# Takeaways
# ---------
#
# - Count the traffic before you write a kernel: the count is your prediction.
# - Compare with a copy of as many bytes. At its speed a kernel is finished.
# - Group narrow rows; give wide rows more warps, or chunks. Time each step.
# - Test on stress inputs: they find mistakes that ``randn`` lets pass.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below its check says where. Fix it
# and run the cell again.
#
# 1. The logarithm
# ~~~~~~~~~~~~~~~~
#
# A loss needs log(softmax(x)). The logarithm of a softmax is minus infinity
# where the exponential underflows. Write one kernel that never does that.


def log_softmax(x):
    return torch.log(softmax_rows(x))


page.exercise(
    log_softmax,
    lambda x: torch.log_softmax(x, -1),
    [(page.stress(30, 200, seed=seed) * 4,) for seed in (1, 2)],
)

# %%
# 2. Temperature
# ~~~~~~~~~~~~~~
#
# Compute softmax(x / T), where T is an argument of the kernel. Add no pass
# over memory for the division, and do not overflow for T = 1/1000.


def with_temperature(x, T):
    return softmax_rows(x)


page.exercise(
    with_temperature,
    lambda x, T: torch.softmax(x / T, -1),
    [(page.stress(30, 200, seed=3), T) for T in (1.0, 0.5, 8.0, 0.001)],
)

# %%
# 3. Attention's mask
# ~~~~~~~~~~~~~~~~~~~
#
# Row i may use columns 0 to i. If you set the others to zero afterwards, rows
# do not sum to one. Mask inside the kernel, and load nothing that is masked:
# that halves the reads.


def causal_softmax(x):
    return torch.tril(softmax_rows(x))


page.exercise(
    causal_softmax,
    lambda x: torch.softmax(
        x.masked_fill(torch.ones_like(x).triu(1).bool(), -torch.inf), -1
    ),
    [(page.stress(n, n, seed=4),) for n in (1, 37, 64)],
)

# %%
# 4. Find the mistake
# ~~~~~~~~~~~~~~~~~~~
#
# This kernel is correct where 8 divides M. Otherwise it writes past the end of
# its output. The check puts sevens behind the output and looks for changes.


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


def between_sevens(x):
    """What `into` does to the memory behind its output."""
    M, N = x.shape
    padded = torch.cat([x, x.new_zeros(8, N)])
    out = torch.full_like(padded, 7.0)
    into(out[:M], padded[:M])
    return out


page.exercise(
    between_sevens,
    lambda x: torch.cat(
        [torch.softmax(x, -1), x.new_full((8, x.shape[1]), 7.0)]
    ),
    [(page.stress(M, N, seed=5),) for M, N in ((8, 64), (13, 50))],
)

# %%
# Evidence
# --------

page.footer()
