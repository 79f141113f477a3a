"""
SwiGLU: two matmuls that are never written
==========================================

The feed-forward layer of a Llama multiplies its input by two weights. It
applies an activation to one result, and multiplies it by the other. In eager
PyTorch, these large results go to memory and back. We keep both in registers.

You will learn

- how to predict what fusing into a matmul can gain,
- how one kernel computes two matmuls and what follows them,
- how two tensors become one, so that tensor cores read less.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_201_gemm_concat`. No GPU
is needed: without one, kernels run in Triton's interpreter, and times come
from a record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["matmul", "SwiGLU", "epilogue"]
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

page = lesson.open("plot_202_swiglu")
page.verdict()

# %%
# What can fusion save?
# ---------------------
#
# x has M rows, one per *token*, and K columns. Both weights have K rows and N
# columns. :math:`\mathrm{silu}(z) = z / (1 + e^{-z})` is the activation:


def swiglu_eager(x, gate, up):
    g, u = x @ gate, x @ up  # write 2MN
    s = torch.nn.functional.silu(g)  # read MN, write MN
    return s * u  # read 2MN, write MN


matmuls = [("x @ gate", 0, 1), ("x @ up", 0, 1)]
eager = [*matmuls, ("silu", 1, 1), ("multiply", 2, 1)]
caption = "What moves besides x and the weights, in multiples of MN elements"
one = {"eager": eager, "fused": [("one kernel", 0, 1)]}
page.picture.segments(caption, one, "MN")

# %%
# The matmuls take their time in any case: 4MNK operations, and each weight is
# read once. Fusion saves 6MN elements. In Llama 2 7B, K is 4096 and N is
# 11008. With the data sheet of an H100, in bfloat16 (2 bytes):

rate, bandwidth = 989e12, 3.35e12  # operations and bytes per second
share, percent = {}, {}
for M in (1, 64, 4096):
    K, N = 4096, 11008
    matmul = max(4 * M * N * K / rate, 2 * 2 * K * N / bandwidth)
    part = 2 * 6 * M * N / bandwidth / matmul
    share[f"M = {M}"], percent[f"M = {M}"] = part, f"{part:.1%}"
page.picture.bars("Time of what fusion saves, over matmuls", share, percent)

# %%
# **We predict a gain of a fifth for thousands of tokens, and none for a few.**
# Then reading the weights is all that takes time.
#
# .. _swiglu-small:
#
# Step 1: two sums in registers {gain small at M=4096, N=11008}
# -------------------------------------------------------------
#
# A program owns a tile of the output. In each turn of its loop, it multiplies
# a tile of x by a tile of each weight, and adds the products to two sums in
# registers. After the loop, the activation needs nothing but these sums. What
# a matmul does to its sums before it stores them is its :term:`epilogue`.
# Fusion saves the traffic here, but matmuls in small tiles are slower than
# eager's: see the next steps.


@triton.jit
def two_sums(
    y_ptr, x_ptr, gate_ptr, up_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    g = tl.zeros([BM, BN], tl.float32)
    u = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x_mask = (m < M)[:, None] & (k < K)[None, :]
        w_mask = (k < K)[:, None] & (n < N)[None, :]
        at = n[None, :] * K + k[:, None]  # elements along K are neighbours
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=x_mask, other=0)
        gate = tl.load(gate_ptr + at, mask=w_mask, other=0)
        up = tl.load(up_ptr + at, mask=w_mask, other=0)
        if WIDEN:  # the interpreter multiplies bfloat16 incorrectly
            x, gate = x.to(tl.float32), gate.to(tl.float32)
            up = up.to(tl.float32)
        g = tl.dot(x, gate, g, input_precision="ieee")
        u = tl.dot(x, up, u, input_precision="ieee")
    y = g / (1 + tl.exp(-g)) * u  # the epilogue: no traffic
    y_ptrs = y_ptr + m[:, None] * N + n[None, :]
    tl.store(y_ptrs, y, mask=(m < M)[:, None] & (n < N)[None, :])


def with_two_sums(x, gate, up, BM, BN, warps):
    (M, K), N = x.shape, gate.shape[1]
    y = x.new_empty(M, N)
    grid = triton.cdiv(M, BM), triton.cdiv(N, BN)
    constants = {"BM": BM, "BN": BN, "BK": 64, "WIDEN": not x.is_cuda}
    two_sums[grid](y, x, gate, up, M, N, K, **constants, num_warps=warps)
    return y


def swiglu_small(x, gate, up):
    return with_two_sums(x, gate, up, BM=64, BN=64, warps=4)


page.picture.gated(rows=4, columns=6, program=9)

# %%

given = page.stress(65, 96, 72)  # M, K, N
page.check(swiglu_small, *given)

# %%
# The error is relative to float64, in *eps*, the distance from 1 to the next
# number. ``torch.nn.Linear`` stores its weight as N x K and multiplies by the
# transpose. So do the weights of this page: ``linear.weight.T``.

# %%
# .. _swiglu-large:
#
# Step 2: larger tiles {gain large at M=4096, N=11008}
# ----------------------------------------------------
#
# A turn of the loop loads BM x BK elements of x, and BK x BN of each weight.
# In tiles of 128 x 128, each loaded element is used in twice as many products
# as in 64 x 64: see page 201. Only the loads get fewer, and not the products,
# so we predict a gain of less than two. The kernel stays as it is. Two sums of
# 128 x 128 float32 numbers are 128 KiB of registers, half of what a
# :term:`multiprocessor` has. So these tiles cannot grow further.


def swiglu_large(x, gate, up):
    return with_two_sums(x, gate, up, BM=128, BN=128, warps=8)


page.check(swiglu_large, *given)

# %%
# .. _swiglu-stacked:
#
# Step 3: one sum of twice the width {gain stacked at M=4096, N=11008}
# --------------------------------------------------------------------
#
# The :term:`tensor cores <tensor core>` of an H100, a Hopper, read both
# operands from :term:`shared memory`, the fast memory of a multiprocessor. Two
# matmuls of 128 columns read the tile of x twice from there. One matmul of 256
# columns reads it once. So both tiles of weights should arrive as one tile.
#
# They do if both weights are one tensor of shape [2, N, K]. Any two tensors of
# one shape can be seen so. If gate is at address 1000 and up at 5000, the
# stride of the new axis is 4000 bytes. A *tensor descriptor* takes any
# strides, and Hopper's copy engine, the :term:`TMA`, loads the tiles that it
# describes. One request then loads a tile [2, BN, BK] from two places in
# memory. Comments mark what is new.


@triton.jit
def one_sum(
    y_ptr, x_tiles, pair_tiles, M, N, K, SWAPPED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    first_m, first_n = tl.program_id(0) * BM, tl.program_id(1) * BN
    both = tl.zeros([BM, 2 * BN], tl.float32)  # one sum
    for k in range(0, K, BK):
        x = x_tiles.load([first_m, k])  # what is outside arrives as zero
        w = pair_tiles.load([0, first_n, k])  # [2, BN, BK]
        w = w.reshape(2 * BN, BK)  # nothing moves
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        both = tl.dot(x, w.T, both, input_precision="ieee")
    # A thread has the same columns of both halves, so nothing is exchanged.
    g, u = both.reshape(BM, 2, BN).permute(0, 2, 1).split()
    if SWAPPED:  # the other weight has the lower address
        g, u = u, g
    y = g / (1 + tl.exp(-g)) * u
    m, n = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN)
    y_ptrs = y_ptr + m[:, None] * N + n[None, :]
    tl.store(y_ptrs, y, mask=(m < M)[:, None] & (n < N)[None, :])


def with_one_sum(x, gate, up, BM, BN, BK, **how):
    (M, K), N = x.shape, gate.shape[1]
    y = x.new_empty(M, N)
    low, high = sorted((gate, up), key=torch.Tensor.data_ptr)
    apart = (high.data_ptr() - low.data_ptr()) // x.element_size()
    x_tiles = TensorDescriptor(x, [M, K], [K, 1], [BM, BK])
    pair_tiles = TensorDescriptor(low, [2, N, K], [apart, K, 1], [2, BN, BK])
    how |= {"BM": BM, "BN": BN, "BK": BK, "WIDEN": not x.is_cuda}
    grid = triton.cdiv(M, BM), triton.cdiv(N, BN)
    one_sum[grid](y, x_tiles, pair_tiles, M, N, K, SWAPPED=low is up, **how)
    return y


def swiglu_stacked(x, gate, up):
    BK = 128 // x.element_size()  # so that float32 fits shared memory, too
    return with_one_sum(x, gate, up, BM=128, BN=128, BK=BK, num_warps=8)


page.check(swiglu_stacked, *given)

# %%
# Rows have to begin at multiples of 16 bytes. Programs of the library's kernel
# also take one tile after another, as page 204 explains:

page.source("swiglu", fold=True)

# %%
# .. _swiglu-few:
#
# Step 4: few tokens {gain few at M=1, N=11008}
# ---------------------------------------------
#
# With one token nearly all traffic is weights, so every multiprocessor should
# read all the time. Step 3 has 86 tiles of 128 columns there, fewer than the
# 132 multiprocessors of an H100. All but one row of these tiles are padding.
# There are 688 tiles of 16 x 16, about five for each multiprocessor. A
# multiprocessor runs three programs at once: while one computes or stores,
# others load. Each turn takes 256 elements along K, and with ``num_stages=4``
# loads start three turns early.


def swiglu_few(x, gate, up):
    return with_one_sum(
        x, gate, up, BM=16, BN=16, BK=256, num_warps=4, num_stages=4
    )


page.check(swiglu_few, *page.stress(3, 512, 40))

# %%
# Is it correct?
# --------------
#
# A check is worth what it catches. This silu is the same function on paper. It
# overflows where z is large, since infinity over infinity is NaN:


def overflowing(x, gate, up):
    z = x @ gate
    return z * z.exp() / (1 + z.exp()) * (x @ up)


x, gate, up = given
page.catches(overflowing, given=given, x_times_100=(100 * x, gate, up))

# %%
# The kernels compute :math:`z / (1 + e^{-z})`. If :math:`e^{-z}` overflows,
# the result is zero, as it should be. In half precision the kernels round
# once. Eager rounds both matmuls before the activation.

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). In the figure the weights are 4096 x 11008. For *packed*, the
# weights were put side by side once, when the model was loaded. One matmul
# takes both, and torch does the rest. quack is a library whose matmul ends in
# SwiGLU. On the H100 its version 0.6.5 raised an error at each size.

page.plot("fusebook", over="M")

# %%
# The prediction left out what the GPU needs between two kernels, and eager has
# four kernels. With few tokens this is most of the gain. In the table 100 % is
# the *roofline*: the rate of torch's matmuls for many tokens, and that of
# reading memory for few.

steps = {"small": swiglu_small, "large": swiglu_large}
steps |= {"stacked": swiglu_stacked, "few": swiglu_few}
page.steps(eager=swiglu_eager, **steps)

# %%
page.findings()

# %%
# .. _swiglu-use:
#
# When to use it
# --------------
#
# For inference, give the library both weights as they are. A whole layer is
# ``fusebook.nn.SwiGLU``.

y = fusebook.swiglu(x, gate, up)

# %%
# - **Layout.** ``linear.weight.T`` is taken without a copy. Weights that are
#   stored by rows go to torch's matmuls, or are copied.
# - **float32** follows torch's setting of TF32. float64 is torch's matmul.
# - **Training.** The backward pass needs both matmuls, so they are written.
#   ``recompute=True`` computes them again, and saves their memory.
# - **Checks.** There is no ``check=``, and no call waits for the GPU.

page.use()

# %%
# Takeaways
# ---------
#
# - What follows a matmul moves nothing while the sums are in registers.
# - Fusion saves traffic, and a large matmul has little of it. Predict the gain
#   before you write the kernel.
# - Two tensors of one shape are one tensor with one more axis.
# - With few rows, start many loads early. Arithmetic then costs nothing.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it names a wrong element of
# its result. Copy a kernel, change it and run the cell. No GPU is needed.
#
# 1. GeGLU
# ~~~~~~~~
#
# Other models use ``gelu(z) = z * (1 + erf(z / sqrt(2))) / 2``. Triton has
# ``tl.erf``.


def geglu(x, gate, up):
    return swiglu_small(x, gate, up)


def with_gelu(x, gate, up):
    return torch.nn.functional.gelu(x @ gate) * (x @ up)


few, more = page.stress(5, 64, 64, seed=4), page.stress(33, 40, 70, seed=3)
page.exercise(geglu, with_gelu, [few, more])

# %%
# 2. A clamp
# ~~~~~~~~~~
#
# Some models clamp both matmuls to [-7, 7], so that one large value does not
# drown the others. In which line does it go?


def clamped(x, gate, up):
    return swiglu_small(x, gate, up)


def with_clamp(x, gate, up):
    g, u = (x @ gate).clamp(-7, 7), (x @ up).clamp(-7, 7)
    return torch.nn.functional.silu(g) * u


large = [(20 * x, gate, up) for x, gate, up in (few, more)]
page.exercise(clamped, with_clamp, large)

# %%
# Evidence
# --------

page.footer()
