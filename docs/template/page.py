"""
Squared ReLU
============

Squared ReLU in eager PyTorch moves twice the memory it has to. We write it as
one Triton kernel that touches each element once.

You will learn

- how to predict a speedup by counting bytes,
- how one kernel replaces two operations.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_101_elementwise`.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

import torch
import triton
import triton.language as tl

page = lesson.open("plot_109_squared_relu")
page.verdict()

# %%
# Why it is slow in eager PyTorch
# -------------------------------
#
# :math:`y = \max(x, 0)^2` for each element of a matrix with M rows and N
# columns. *Eager* PyTorch runs each operation when it is called. Each line
# below is a kernel, which reads its inputs from memory and writes its output.


def eager(x):
    top = x.clamp(min=0)  # read MN, write MN
    return top.square()  # read MN, write MN


page.traffic(eager=eager, fused=2)

# %%
# Each element takes two operations, and a GPU does many more while it fetches
# one. So memory decides the time: **we predict 2x.**

# %%
# .. _squared_relu-one-pass:
#
# Step 1: one pass {gain one_pass at N=4096}
# ------------------------------------------
#
# Program *i* owns row *i*. It works on a tile, an array whose size is a power
# of two. ``mask`` keeps loads and stores away from the padding.

page.picture.rows(rows=3, columns=12, block=16)

# %%


@triton.jit
def one_row(y_ptr, x_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int32 overflows past 2**31 elements
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    at = row * N + columns
    x = tl.load(x_ptr + at, mask=columns < N, other=0.0)  # read N
    x = x.to(tl.float32)
    top = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptr + at, top * top, mask=columns < N)  # write N


def one_pass(x):
    M, N = x.shape
    y = torch.empty_like(x)
    one_row[(M,)](y, x, N, BLOCK=triton.next_power_of_2(N))
    return y


x = page.stress(64, 781)
page.check(one_pass, x)

# %%
# The library's kernel takes any shape:

page.source("squared_relu", fold=True)

# %%
# Is it correct?
# --------------
#
# A check is worth what it catches. This attempt forgets the sign:


def signless(x):
    return x * x


page.catches(signless, positive=torch.rand(64, 781), stress=x)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, whose L2 cache holds none of
# the data before (*cold L2*). A copy of the same matrix is 100 %.

page.steps(eager=eager, one_pass=one_pass)

# %%
page.findings()

# %%
# When to use it
# --------------

y = fusebook.squared_relu(x)
page.check(fusebook.squared_relu, x)

# %%
# *End to end*, a call takes the larger of its GPU time and the time in which
# the CPU launches it.

page.use()

# %%
# Takeaways
# ---------
#
# - Count the traffic before you write a kernel: the count is your prediction.
#
# Exercises
# ---------
#
# The function is incorrect, and the line below its check says where. Fix it
# and run the cell again. No GPU is needed.
#
# 1. Without clamp
# ~~~~~~~~~~~~~~~~
#
# Write it without ``clamp``. This attempt forgets the sign.


def without_clamp(x):
    return x * x


page.exercise(without_clamp, eager, [(x,)])

# %%
# Evidence
# --------

page.footer()
