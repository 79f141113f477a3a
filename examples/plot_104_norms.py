"""
RMSNorm, its residual and its gradient
======================================

A transformer normalises its hidden state twice per layer. In eager PyTorch,
this moves nine times the bytes it has to. We write it as one Triton kernel,
add the residual to it, and then write its gradient.

You will learn

- how to reduce a row and use it again after a single read,
- how to fuse the operation before a kernel, here a residual,
- how to sum over all rows, which belong to different programs.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_102_softmax`. No GPU is
needed: without one, kernels run in Triton's interpreter, and times come from
a record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["norm", "reduction", "gradient", "training"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_104_norms")
page.verdict()

# %%
# Why RMSNorm is slow in eager PyTorch
# ------------------------------------
#
# RMSNorm divides a row :math:`x` by the root of the mean of its N squares, and
# multiplies it by a weight, which all M rows share.
#
# .. math::
#
#    y_i = \frac{x_i}{\sqrt{\frac{1}{N} \sum_j x_j^2 + \epsilon}}\, w_i
#
# *Eager* PyTorch runs each operation as a separate kernel, which reads and
# writes memory. A bfloat16 row is converted to float32 first, as a sum of
# bfloat16 numbers would lose small terms. A float32 element is twice as long,
# so the comments and the picture count it as two.


def norm_eager(x, weight):
    wide = x.float()  # read MN, write 2MN
    squares = wide * wide  # read 2MN, write 2MN
    mean = squares.mean(-1, keepdim=True)  # read 2MN, write 2M
    normed = wide * torch.rsqrt(mean + 1e-6)  # read 2MN, write 2MN
    return normed.to(x.dtype) * weight  # two kernels: read 3MN, write 2MN


page.traffic(eager=norm_eager, fused=2)

# %%
# A fused kernel reads each element once and writes each result once. It has
# only four operations per element, so memory decides the time, as in
# :doc:`softmax <plot_102_softmax>`: **we predict 9x.**

# %%
# .. _norm-one-row:
#
# Step 1: one program per row {gain one_row at N=8192}
# ----------------------------------------------------
#
# Triton starts many instances of a kernel, called programs. Program *i* owns
# row *i*. It loads the row into :term:`registers <register>`, sums its
# squares, and still has the row when the sum is known.


@triton.jit
def one_row(y_ptr, x_ptr, w_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int32 overflows past 2**31 elements
    columns = tl.arange(0, BLOCK)  # [BLOCK], a power of two
    inside = columns < N
    at = row * N + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # read N
    factor = 1 / tl.sqrt(tl.sum(x * x, 0) / N + 1e-6)  # padding adds zeros
    w = tl.load(w_ptr + columns, mask=inside)  # all rows share it, in L2
    tl.store(y_ptr + at, x * factor * w, mask=inside)  # write N


def norm_one_row(x, weight):
    M, N = x.shape
    y = torch.empty_like(x)
    one_row[(M,)](y, x, weight, N, BLOCK=triton.next_power_of_2(N))
    return y


x, weight = page.stress(1823, 781)
page.check(norm_one_row, x, weight)

# %%
# Errors are relative to the result in float64. Their unit *eps* is the
# distance from 1 to the next number.

# %%
# .. _norm-rows:
#
# Step 2: several rows per program {gain rows at N=256}
# -----------------------------------------------------
#
# A row of 256 bfloat16 elements is only 512 bytes: each of 128 threads loads
# two elements and then waits for memory. Here a program owns ROWS rows, as a
# 2-D tile. The lines with a comment differ from step 1.


@triton.jit
def some_rows(
    y_ptr, x_ptr, w_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    columns = tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < N)[None, :]  # [ROWS, BLOCK]
    at = rows[:, None] * N + columns[None, :]  # [ROWS, BLOCK]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(x * x, 1)[:, None] / N + 1e-6)  # [ROWS, 1]
    w = tl.load(w_ptr + columns, mask=columns < N)[None, :]  # [1, BLOCK]
    tl.store(y_ptr + at, x * factor * w, mask=inside)


def norm_rows(x, weight):
    M, N = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(N)
    R = max(1, 4096 // block)  # so that a tile has at least 4096 elements
    some_rows[(triton.cdiv(M, R),)](y, x, weight, M, N, ROWS=R, BLOCK=block)
    return y


page.check(norm_rows, x, weight)

# %%
# .. _norm-residual:
#
# Step 3: the residual in the same kernel {gain residual at N=8192}
# -----------------------------------------------------------------
#
# Before most norms, a transformer adds the output of a layer to a *residual*,
# and the next layer needs the sum, too. Two kernels move 5MN elements. One
# kernel does not read the sum back, and moves 4MN: **we predict 1.25 times the
# speed.** In the kernel, the load of ``r``, the sum and its store are new.


def two_kernels(x, residual, weight):
    total = x + residual  # read 2MN, write MN
    norm = torch.nn.functional.rms_norm
    return norm(total, weight.shape, weight, 1e-6), total  # read MN, write MN


@triton.jit
def add_and_norm(y_ptr, s_ptr, x_ptr, r_ptr, w_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    at = row * N + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    r = tl.load(r_ptr + at, mask=inside, other=0.0)  # read N
    total = (x.to(tl.float32) + r.to(tl.float32)).to(x_ptr.dtype.element_ty)
    tl.store(s_ptr + at, total, mask=inside)  # write N
    x = total.to(tl.float32)  # after rounding, as the next layer sees it
    factor = 1 / tl.sqrt(tl.sum(x * x, 0) / N + 1e-6)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0)
    tl.store(y_ptr + at, x * factor * w, mask=inside)


def add_norm(x, residual, weight):
    M, N = x.shape
    y, total = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(N)
    add_and_norm[(M,)](y, total, x, residual, weight, N, BLOCK=block)
    return y, total


summed = page.of("add_rms_norm")
summed.check(add_norm, *summed.stress(64, 781))

# %%
# .. _norm-atomic:
#
# Step 4: the gradient with atomics {gain atomic at N=8192}
# ---------------------------------------------------------
#
# The backward pass gets ``dy``, the gradient of the loss with respect to the
# result. Its eager code below has two kinds of sums. For ``dx`` it sums along
# each row, as before. For ``dw`` it sums over all rows, which different
# programs own. It moves 53MN: the comments count what is read and written. One
# kernel reads ``x`` and ``dy`` and writes ``dx``: 3MN, so **we predict** 53 /
# 3, or 18 times the speed. It computes ``factor`` again, which costs no
# traffic. Each program adds its row to ``dw`` with *atomic additions*, which
# other programs cannot interrupt.


def eager_gradient(x, dy, weight):
    wide, dy = x.float(), dy.float()  # 6MN
    factor = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)  # 6MN
    n, g = wide * factor, dy * weight  # 8MN
    dx = (g - n * (g * n).mean(-1, keepdim=True)) * factor  # 22MN
    return dx.to(x.dtype), (dy * n).sum(0).to(x.dtype)  # 11MN


@triton.jit
def dx_and_terms(x, dy, w, N):
    factor = 1 / tl.sqrt(tl.sum(x * x, 0) / N + 1e-6)
    n, g = x * factor, dy * w
    return (g - n * (tl.sum(g * n, 0) / N)) * factor, dy * n  # [BLOCK], both


@triton.jit
def gradient_row(dx_ptr, dw_ptr, x_ptr, dy_ptr, w_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    at = row * N + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # read N
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)  # read N
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dx, terms = dx_and_terms(x, dy, w, N)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.atomic_add(dw_ptr + columns, terms, mask=inside, sem="relaxed")


def gradient_atomic(x, dy, weight):
    M, N = x.shape
    dx, dw = torch.empty_like(x), weight.new_zeros(N, dtype=torch.float32)
    sizes = {"BLOCK": triton.next_power_of_2(N), "num_warps": 16}
    gradient_row[(M,)](dx, dw, x, dy, weight, N, **sizes)
    return dx, dw.to(weight.dtype)


gradient = page.of("rms_norm_backward")
x, dy, weight = gradient.stress(64, 781)
gradient.check(gradient_atomic, x, dy, weight)

# %%
# .. _norm-partial:
#
# Step 5: many rows per program {gain partial at N=8192}
# ------------------------------------------------------
#
# In step 4, all programs add to the same N elements. The L2 cache executes the
# additions to an element one by one, so programs wait, which the prediction
# left out. The order of additions
# changes from call to call, and with it the last bits of ``dw``. Here a few
# hundred programs share the rows: program *p* of *P* owns rows p, p + P, p +
# 2P and so on. It sums its part of ``dw`` in registers, and writes it once. A
# second kernel adds the P parts in a fixed order.

page.picture.partial_sums(rows=6, programs=3)

# %%


@triton.jit
def all_rows(dx_ptr, dw_ptr, x_ptr, dy_ptr, w_ptr, M, N, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    # With 3 stages, the loads of the next two turns start before this turn.
    for row in tl.range(program, M, tl.num_programs(0), num_stages=3):
        at = row * N + columns
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dx, terms = dx_and_terms(x, dy, w, N)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dw += terms
    tl.store(dw_ptr + program * N + columns, dw, mask=inside)


def gradient_partial(x, dy, weight):
    M, N = x.shape
    P = min(M, 264)  # two for each of 132 multiprocessors
    dx, parts = torch.empty_like(x), x.new_empty(P, N, dtype=torch.float32)
    sizes = {"BLOCK": triton.next_power_of_2(N), "num_warps": 16}
    all_rows[(P,)](dx, parts, x, dy, weight, M, N, **sizes)
    return dx, parts.sum(0).to(weight.dtype)


gradient.check(gradient_partial, x, dy, weight)

# %%
# Is it correct?
# --------------
#
# A check is worth what it catches. This norm divides by the width of its tile:


def by_block(x, weight):
    block = triton.next_power_of_2(x.shape[-1])
    mean = x.square().sum(-1, keepdim=True) / block
    return x * torch.rsqrt(mean + 1e-6) * weight


page.catches(by_block, N_1024=page.stress(9, 1024), N_781=page.stress(9, 781))

# %%
# Powers of two let the mistake pass. The next check has odd rows, too.

page.check_all(norm_one_row, norm_rows)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). The figure shows bandwidth: the bytes of 2MN elements over GPU
# time. *A copy* is PyTorch's copy of as many bytes. The *roofline* is the
# bandwidth of the largest copies.

page.plot("bandwidth", over="N")

# %%
# In the table, 100 % is PyTorch's copy of the bytes that a step has to move. A
# kernel can be faster.

steps = {"one_row": norm_one_row, "rows": norm_rows}
steps |= {"two_kernels": two_kernels, "residual": add_norm}
steps |= {"eager_gradient": eager_gradient, "atomic": gradient_atomic}
page.steps(eager=norm_eager, **steps, partial=gradient_partial)

# %%
# At 256 columns, steps 4 and 5 give each row to 512 threads, and half of them
# have no element. The library gives rows to single warps of 32 threads.

page.findings()

# %%
# .. _norm-use:
#
# When to use it
# --------------
#
# ``fusebook.rms_norm`` takes rows of any strides. Its gradient is fused, and
# it works with ``torch.compile``. No call waits for the GPU. With
# ``dtype=torch.float8_e4m3fn`` it rounds to eight bits in the same kernel, and
# also returns a scale for each row. ``fusebook.layer_norm`` can do the same.

x, residual, weight = summed.stress(64, 781)
y = fusebook.rms_norm(x, weight)
y, total = fusebook.add_rms_norm(x, residual, weight)
page.use()

# %%
# Takeaways
# ---------
#
# - To use a row again while it is in registers costs no traffic. So the
#   backward pass computes a row's sums again, and the forward pass does not
#   store them.
# - Fuse the operation before a kernel if the kernel reads its result anyway.
# - For a sum over rows, give each program many rows. It adds them in
#   registers.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it says where. Fix it and run
# the cell again. No GPU is needed.
#
# 1. Weights around one
# ~~~~~~~~~~~~~~~~~~~~~
#
# Some models store the weight less one: y = n (1 + w). An addition before the
# call is another launch, and rounds the weight. Write it into a kernel.


def around_one(x, weight):
    return norm_one_row(x, weight)


page.exercise(
    around_one,
    lambda x, weight: torch.nn.functional.rms_norm(
        x, weight.shape, 1 + weight, 1e-6
    ),
    [page.stress(9, 64, seed=4), page.stress(9, 781, seed=5)],
)

# %%
# 2. A mean that cancels
# ~~~~~~~~~~~~~~~~~~~~~~
#
# LayerNorm subtracts the mean of the row, too. This variance is incorrect for
# rows far from zero. Write a kernel that looks at its registers twice.


def centred(x):
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) / torch.sqrt(variance + 1e-5)


page.exercise(
    centred,
    lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    [(page.stress(9, n, seed=n)[0] + 500,) for n in (64, 781)],
)

# %%
# Evidence
# --------

page.footer()
