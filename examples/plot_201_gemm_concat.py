"""
Matmuls and concat: write each result into its place
====================================================

A layer often multiplies one input by several weights, such as those of
queries and keys. Concatenating the results copies all of them. We avoid the
copy without a kernel first. Then our own matmul shows how tiles work.

You will learn

- when a copy next to a matmul costs much, and when it costs little,
- how a matmul is divided into tiles, and how large they should be,
- why the order of tiles decides how often memory is read.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_102_softmax`. No GPU is
needed: without one, kernels run in Triton's interpreter, and times come from
a record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["matmul", "concat", "L2 cache"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_201_gemm_concat")
page.verdict()

# %%
# What does concat cost?
# ----------------------
#
# x has M rows and K columns, and each weight K rows and N columns. *Eager*
# PyTorch, which runs one operation after another, concatenates like this:


def two_and_cat(x, w0, w1):
    left, right = x @ w0, x @ w1  # 4MNK operations, write 2MN
    return torch.cat([left, right], 1)  # read 2MN, write 2MN


# Let M, N and K be n, in bfloat16 (2 bytes), on an H100 by its data sheet.
rate, bandwidth = 989e12, 3.35e12  # operations and bytes per second
share, percent = {}, {}
for n in (512, 1024, 2048, 4096, 8192):
    part = (2 * 4 * n**2 / bandwidth) / (4 * n**3 / rate)
    share[f"n = {n}"], percent[f"n = {n}"] = part, f"{part:.0%}"
caption = "Predicted at most: time of the concat, in percent of both matmuls"
page.picture.bars(caption, share, percent)

# %%
# A matmul's work grows with the cube of n, and the copy with the square. So
# the copy's share of the time falls as n grows. For the traffic alone these
# are upper bounds: a copy reads small matrices faster, from the GPU's
# :term:`L2 cache`.
#
# No kernel yet: write into views
# -------------------------------
#
# The halves of the output are *views*: tensors that share its memory. A matmul
# can write into one, and then nothing is left to copy.


def in_views(x, w0, w1):
    y = x.new_empty(x.shape[0], 2 * w0.shape[1])
    left, right = y.chunk(2, 1)
    torch.mm(x, w0, out=left)
    torch.mm(x, w1, out=right)
    return y


# %%
# .. _concat-small:
#
# Step 1: one program per tile {gain small at N=4096}
# ---------------------------------------------------
#
# Views still take two launches of cuBLAS, NVIDIA's library of tuned matmuls.
# One kernel can compute both: the tiles of both weights are numbered together,
# and a program picks its weight by its number.


@triton.jit
def side_by_side(
    y_ptr, x_ptr, w0_ptr, w1_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BN)  # of tiles, of each weight
    r = tl.program_id(0) // (2 * columns)
    c = tl.program_id(0) % (2 * columns)
    w_ptr = tl.where(c < columns, w0_ptr, w1_ptr)
    start = tl.where(c < columns, 0, N)  # of this weight, in the output
    m = r * BM + tl.arange(0, BM)
    n = c % columns * BN + tl.arange(0, BN)
    y = tl.zeros([BM, BN], tl.float32)  # a sum in bfloat16 loses small terms
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x_mask = (m < M)[:, None] & (k < K)[None, :]
        w_mask = (k < K)[:, None] & (n < N)[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=x_mask, other=0)
        w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=w_mask, other=0)
        if WIDEN:  # the interpreter multiplies bfloat16 incorrectly
            x, w = x.to(tl.float32), w.to(tl.float32)
        y = tl.dot(x, w, y, input_precision="ieee")
    y_mask = (m < M)[:, None] & (n < N)[None, :]
    y_ptrs = y_ptr + m[:, None] * (2 * N) + (start + n)[None, :]
    tl.store(y_ptrs, y, mask=y_mask)


def launched(kernel, x, w0, w1, BM, BN, warps):
    (M, K), N = x.shape, w0.shape[1]
    y = x.new_empty(M, 2 * N)
    tiles = triton.cdiv(M, BM) * 2 * triton.cdiv(N, BN)
    constants = {"BM": BM, "BN": BN, "BK": 64, "WIDEN": not x.is_cuda}
    kernel[(tiles,)](y, x, w0, w1, M, N, K, **constants, num_warps=warps)
    return y


def small_tiles(x, w0, w1):
    return launched(side_by_side, x, w0, w1, BM=64, BN=64, warps=4)


page.picture.product(rows=4, columns=4, program=13)

# %%
# A program walks along K. Each turn of its loop loads a tile of x and a tile
# of the weight, and ``tl.dot`` adds their product to the sum. In bfloat16 it
# runs on the :term:`tensor cores <tensor core>`, units that multiply small
# matrices. With ``"ieee"`` float32 keeps all its bits: tensor cores would
# round it to :term:`TF32`. Offsets are int32, so a matrix of 2**31 elements or
# more needs ``.to(tl.int64)``.

given = page.stress(70, 96, 72)  # M, K, N
page.check(in_views, *given)

# %%

page.check(small_tiles, *given)

# %%
# ``page.stress`` makes rows of x with large values, and rows far from zero.
# The error is relative to float64, in *eps*, the distance from 1 to the next
# number.

# %%
# .. _concat-large:
#
# Step 2: larger tiles {gain large at N=4096}
# -------------------------------------------
#
# A turn of the loop loads BM x BK elements of x and BK x BN of the weight, for
# BM x BN x BK products. So each loaded element is used in BM x BN / (BM + BN)
# products: 32 in tiles of 64 x 64, and 85 in tiles of 128 x 256. If loads are
# what limits step 1, **we predict a gain of 85 / 32 at most**. Step 1 is
# slower than eager, since cuBLAS has such large tiles, too. The kernel stays
# as it is:


def large_tiles(x, w0, w1):
    return launched(side_by_side, x, w0, w1, BM=128, BN=256, warps=8)


page.check(large_tiles, *given)

# %%
# A tile's sum has to fit into registers: 128 x 256 numbers of float32 are 128
# KiB, half of what a :term:`multiprocessor` has. And there should be a tile
# for each multiprocessor. At n = 1024 the output has 64 such tiles, so half of
# a GPU with 132 multiprocessors has nothing to do. Good tiles are found by
# trying them: ``triton.autotune`` times a list of sizes at the first call of
# each shape. The library has a table instead.

# %%
# .. _concat-grouped:
#
# Step 3: another order of tiles {gain grouped at N=4096}
# -------------------------------------------------------
#
# Programs start in the order of their ids, as many at once as fit. Programs
# that run together and need the same tiles read them from memory once, if the
# L2 cache holds them long enough. Row by row, the running programs need one
# row of tiles of x and every column of the weights. In groups of some rows,
# they need fewer of these strips:

page.picture.walk(rows=4, columns=12, running=12, group=4)

# %%
# At n = 8192 the output has 64 rows and 64 columns of tiles. Row by row, the
# 132 running programs of an H100 have about two rows. Both weights are then
# read about 32 times, since L2 cannot hold them so long. In groups of eight
# rows they are read 8 times, and x is read once in both orders. The weights
# are two thirds of the data. On average, **we predict** 2/3 x 32 + 1/3 = **22
# reads row by row**, and 2/3 x 8 + 1/3 = **6 in groups**. At n = 4096 the data
# is about twice as large as L2, so the order matters less.


@triton.jit
def place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile: column by column within GROUP rows."""
    first = tile // (GROUP * columns) * GROUP  # the first row of the group
    height = tl.minimum(rows - first, GROUP)  # the last group may have fewer
    inside = tile % (GROUP * columns)
    return first + inside % height, inside // height


@triton.jit
def grouped(
    y_ptr, x_ptr, w0_ptr, w1_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BN)
    r, c = place(tl.program_id(0), tl.cdiv(M, BM), 2 * columns, 8)  # new
    w_ptr = tl.where(c < columns, w0_ptr, w1_ptr)
    start = tl.where(c < columns, 0, N)
    m = r * BM + tl.arange(0, BM)
    n = c % columns * BN + tl.arange(0, BN)
    y = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x_mask = (m < M)[:, None] & (k < K)[None, :]
        w_mask = (k < K)[:, None] & (n < N)[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=x_mask, other=0)
        w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=w_mask, other=0)
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        y = tl.dot(x, w, y, input_precision="ieee")
    y_mask = (m < M)[:, None] & (n < N)[None, :]
    y_ptrs = y_ptr + m[:, None] * (2 * N) + (start + n)[None, :]
    tl.store(y_ptrs, y, mask=y_mask)


def in_groups(x, w0, w1):
    return launched(grouped, x, w0, w1, BM=128, BN=256, warps=8)


x, w0, w1 = given
page.check(in_groups, x.repeat(17, 1), w0, w1)  # rows of tiles in two groups

# %%
# Is it correct?
# --------------
#
# A check is worth what it catches. This matmul forgets the last turn of the
# loop where K is no multiple of 64:


def whole_steps(x, w0, w1):
    K = x.shape[1] // 64 * 64
    return in_views(x[:, :K], w0[:K], w1[:K])


page.catches(whole_steps, even=page.stress(70, 128, 72), odd=given)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). The figure compares implementations with one large matmul of
# weights that were *packed*: put side by side once, when the model is loaded.
# *two + cat* is the eager code above, and *cat + one* puts the weights
# together in each call.

page.plot("packed", over="N")

# %%
# The prediction left out what the GPU needs between two kernels: *two + cat*
# has three kernels, *views* two, and *packed* one.
#
# The table has the rate of the steps in TFLOP/s, or 10 to the 12 operations
# per second. *Warm* is a call among many in a row. At n = 4096 these draw all
# the power that an H100 may use, so it lowers its clock.

steps = {"small": small_tiles, "large": large_tiles, "grouped": in_groups}
page.steps(eager=two_and_cat, **steps)

# %%
page.findings()

# %%
# .. _concat-use:
#
# When to use it
# --------------
#
# **Pack the weights if you can**, by ``torch.cat([w0, w1], 1)`` when the model
# is loaded. If they must stay apart, as with adapters, give all of them to the
# library. It takes up to four in a launch, of any widths:

x, w0, w1 = given
y = fusebook.concat_gemm(x, [w0, w1])

# %%
# A table decides by the sizes: the library launches its own kernel, or lets
# torch's matmuls write into views. ``strategy="fused"`` or
# ``strategy="views"`` overrides the table.
#
# - **Layout.** ``linear.weight.T`` of torch.nn.Linear is taken without a copy.
#   Float32 weights that are stored by rows may be copied, and so may weights
#   whose rows do not begin at multiples of 16 bytes.
# - **float32** follows torch's setting of TF32. float64 and the backward pass
#   are torch's matmuls.
# - **Checks.** No call waits for the GPU.
# - **Do not use it** for packed weights, or for one weight. In the table,
#   *torch* includes packed weights, and also a concat of the weights in each
#   call, for one row thousands of outputs.

page.use()

# %%
# Takeaways
# ---------
#
# - Before you concatenate, ask where each result could have been written.
# - Larger tiles use each loaded element more often.
# - Programs that run together should share what they read.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it says where. Fix it and run
# its cell again. No GPU is needed.
#
# 1. Unequal widths
# ~~~~~~~~~~~~~~~~~
#
# The kernel of step 1 takes two weights of one width. Teach it a second width:
# queries are often wider than keys.


def two_widths(x, w0, w1):
    return small_tiles(x, w0, w0)[:, : w0.shape[1] + w1.shape[1]]


x, w0, w1 = page.stress(33, 40, 70, seed=3)
widths = [(x, w0, w1[:, :50].contiguous()), (x[:5], w0, w1)]
page.exercise(two_widths, two_and_cat, widths)

# %%
# 2. A bias at no cost
# ~~~~~~~~~~~~~~~~~~~~
#
# A bias for each column of the output can be added to the sum before it is
# stored. This *epilogue* costs no traffic but its own.


def with_bias(x, w0, w1, bias):
    return small_tiles(x, w0, w1)


def biased(x, w0, w1, bias):
    return torch.cat([x @ w0, x @ w1], 1) + bias


bias = torch.linspace(-1, 1, 140, device=x.device)
page.exercise(with_bias, biased, [(x, w0, w1, bias)])

# %%
# Evidence
# --------

page.footer()
