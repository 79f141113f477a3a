"""
Cross entropy with its gradient
===============================

In eager PyTorch, the loss of a language model and its gradient move five times
the bytes they have to. We write both as one Triton kernel, for rows of any
width.

You will learn

- why a loss should compute its gradient in the forward pass,
- how to reduce a row that is wider than the registers of a program,
- when a kernel may overwrite its input, and what that saves.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_102_softmax`. Without a
GPU, kernels run in Triton's interpreter, and times are recorded ones.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["cross entropy", "reduction", "memory", "training"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_105_cross_entropy")
page.verdict()

# %%
# Why the loss is slow in eager PyTorch
# -------------------------------------
#
# A model gives each token a row :math:`x` of N scores, the *logits*, one per
# class. With the correct class *t*, the loss of the row and its gradient are
#
# .. math::
#
#    \ell = \log \sum_j e^{x_j - m} + m - x_t, \qquad
#    \frac{\partial \ell}{\partial x_j} = \frac{e^{x_j - m}}
#    {\sum_k e^{x_k - m}} - [j = t], \qquad m = \max_j x_j
#
# The gradient is the softmax of the row, less one at the class. *Eager*
# PyTorch runs each line below as one or more kernels, and every kernel reads
# and writes memory. The loss is the mean over the M rows. The comments leave
# out what has one element per row.


def loss_eager(x, target):
    top = x.amax(-1, keepdim=True)  # read MN
    shifted = x - top  # read MN, write MN
    e = shifted.exp()  # read MN, write MN
    total = e.sum(-1, keepdim=True)  # read MN
    at = target[:, None]
    losses = total.log() - shifted.gather(1, at)  # one element per row
    p = e / total  # read MN, write MN
    p.scatter_(1, at, p.gather(1, at) - 1)  # one element per row
    return losses.mean().float(), p / len(x)  # read MN, write MN


page.traffic(eager=loss_eager, fused=2)

# %%
# 21M is 21 values per row, which is nothing next to N. The least is to read
# each logit once and to write each gradient once. If memory decides the time,
# **we predict 5x.** PyTorch's own ``F.cross_entropy``, *torch* in the box, has
# fewer kernels than this.

# %%
# .. _loss-two-kernels:
#
# Step 1: two kernels {gain two at N=32000, bfloat16}
# ---------------------------------------------------
#
# Triton starts many instances of a kernel, called :term:`programs <program>`.
# Program *i* owns row *i*. The forward kernel loads the row into
# :term:`registers <register>` and reduces it to its maximum and its sum. It
# writes the loss, and both numbers for later. The backward kernel needs only
# these two and the logits. The two move 3MN elements instead of 10MN, so **we
# predict 10 / 3 times the speed.**


@triton.jit
def forward(
    loss_ptr, top_ptr, sum_ptr, x_ptr, target_ptr, N, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # int32 overflows past 2**31 elements
    columns = tl.arange(0, BLOCK)  # [BLOCK], a power of two
    at = row * N + columns
    x = tl.load(x_ptr + at, mask=columns < N, other=float("-inf"))  # read N
    x = x.to(tl.float32)  # a bfloat16 sum loses small terms
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - top), 0)
    x_t = tl.load(x_ptr + row * N + tl.load(target_ptr + row)).to(tl.float32)
    tl.store(loss_ptr + row, tl.log(total) + (top - x_t))
    tl.store(top_ptr + row, top)
    tl.store(sum_ptr + row, total)


@triton.jit
def backward(
    dx_ptr, top_ptr, sum_ptr, x_ptr, target_ptr, N, scale, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    at = row * N + columns
    x = tl.load(x_ptr + at, mask=columns < N).to(tl.float32)  # read N again
    p = tl.exp(x - tl.load(top_ptr + row)) / tl.load(sum_ptr + row)
    dx = tl.where(columns == tl.load(target_ptr + row), p - 1, p)
    tl.store(dx_ptr + at, dx * scale, mask=columns < N)  # write N


def sizes(N):  # a tile for a row; up to 65536 columns, 64 elements a thread
    block = triton.next_power_of_2(N)
    return {"BLOCK": block, "num_warps": min(32, max(4, block // 2048))}


def loss_two(x, target):
    M, N = x.shape
    loss, top, total = x.new_empty(3, M, dtype=torch.float32)
    dx = torch.empty_like(x)
    forward[(M,)](loss, top, total, x, target, N, **sizes(N))
    backward[(M,)](dx, top, total, x, target, N, 1 / M, **sizes(N))
    return loss.mean(), dx


x, target = page.stress(64, 1000)
page.check(loss_two, x, target)

# %%
# ``scale`` is 1/M, since the loss is a mean. ``page.stress`` makes the
# difficult rows of page 102, and errors are relative to the result in float64.
# Their unit *eps* is the distance from 1 to the next number. A warp is 32
# threads, and ``num_warps`` is how many a program has.

# %%
# .. _loss-one-kernel:
#
# Step 2: both in one kernel {gain one at N=32000, bfloat16}
# ----------------------------------------------------------
#
# The forward kernel already holds what the gradient needs. If it writes the
# gradient as well, nothing is read twice: 2MN instead of 3MN. **We predict
# 3 / 2 times the speed.** Lines with a comment replace the backward kernel.


@triton.jit
def both(loss_ptr, dx_ptr, x_ptr, target_ptr, N, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    at = row * N + columns
    x = tl.load(x_ptr + at, mask=columns < N, other=float("-inf"))
    x = x.to(tl.float32)
    top = tl.max(x, 0)
    e = tl.exp(x - top)
    total = tl.sum(e, 0)
    t = tl.load(target_ptr + row)
    x_t = tl.load(x_ptr + row * N + t).to(tl.float32)
    tl.store(loss_ptr + row, tl.log(total) + (top - x_t))
    p = e / total  # both are still in registers
    dx = tl.where(columns == t, p - 1, p)  # [BLOCK]
    tl.store(dx_ptr + at, dx * scale, mask=columns < N)  # write N


def loss_one(x, target):
    M, N = x.shape
    loss, dx = x.new_empty(M, dtype=torch.float32), torch.empty_like(x)
    both[(M,)](loss, dx, x, target, N, 1 / M, **sizes(N))
    return loss.mean(), dx


page.check(loss_one, x, target)

# %%
# .. _loss-chunks:
#
# Step 3: a loop over chunks {gain chunks over two at N=128256, bfloat16}
# -----------------------------------------------------------------------
#
# A vocabulary of 128256 needs a tile of 131072 float32 elements, 512 KiB. A
# multiprocessor, which runs the program, has 256 KiB of registers. The
# compiler then *spills*: it moves the rest to memory and back. Step 2 spills
# more than step 1, as it needs the row once more, for the gradient.
#
# Instead, a loop holds one chunk at a time. The maximum is known only at the
# end, so the sum is rescaled whenever a larger one turns up. This is the
# online softmax. A second loop reads the chunks again for the gradient. For a
# row that fits the registers, that second read is wasted.

page.picture.passes(chunks=4)

# %%


@triton.jit
def in_chunks(
    loss_ptr, dx_ptr, x_ptr, target_ptr, N, scale, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x_ptr += row * N
    dx_ptr += row * N
    t = tl.load(target_ptr + row)
    x_t = tl.load(x_ptr + t).to(tl.float32)  # first: in place, dx replaces it
    top = -3.4028234663852886e38  # the lowest float32: -inf less -inf is NaN
    total = 0.0
    for start in range(0, N, BLOCK):
        at = start + columns
        x = tl.load(x_ptr + at, mask=at < N, other=float("-inf"))  # read N
        x = x.to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total *= tl.exp(top - higher)  # the sum so far, rescaled
        total += tl.sum(tl.exp(x - higher), 0)
        top = higher
    tl.store(loss_ptr + row, tl.log(total) + (top - x_t))
    for start in range(0, N, BLOCK):
        at = start + columns
        x = tl.load(x_ptr + at, mask=at < N)  # read N again
        p = tl.exp(x.to(tl.float32) - top) / total
        dx = tl.where(at == t, p - 1, p)
        tl.store(dx_ptr + at, dx * scale, mask=at < N)  # write N


def loss_chunks(x, target, inplace=False):
    M, N = x.shape
    loss = x.new_empty(M, dtype=torch.float32)
    dx = x if inplace else torch.empty_like(x)
    block = min(8192, triton.next_power_of_2(N))
    in_chunks[(M,)](loss, dx, x, target, N, 1 / M, BLOCK=block, num_warps=8)
    return loss.mean(), dx


page.check(loss_chunks, *page.stress(4, 128256))

# %%
# .. _loss-in-place:
#
# In place: no memory for the gradient
# ------------------------------------
#
# If nothing else reads the logits after the loss, the gradient may take their
# memory. This is safe here: only program *i* reads row *i*. It loads each
# chunk before it overwrites it, and the class's logit before both.


def in_place(x, target):
    return loss_chunks(x.clone(), target, inplace=True)  # keeps our own x


page.check(in_place, x, target)

# %%
# .. _loss-shared-row:
#
# Rows shared by several programs
# -------------------------------
#
# The library reads every row once, up to ``2**20`` classes: several programs
# hold its parts in their registers. Each publishes the maximum and the sum of
# its part in a *workspace*, a small buffer in global memory. Then it waits for
# those of the others and merges them.
#
# A launch does not promise that all programs run at the same time, so a
# program that has waited too long computes a missing pair itself. In place
# this needs care. Suppose that program A computes the pair of a slow program
# B. B publishes its pair before it overwrites anything. A may still be
# reading, and compute the pair from data half overwritten. So the first pair
# to be published has to win: a compare-and-swap is an atomic operation that
# writes only where no pair is yet. The pair of A comes too late and is
# dropped.

# %%
# Is it correct?
# --------------
#
# A check is worth what it catches. This loss leaves the maximum out:


def as_written(x, target):
    x = x.detach().requires_grad_()
    losses = x.exp().sum(-1).log() - x.gather(1, target[:, None])[:, 0]
    return losses.mean().detach(), torch.autograd.grad(losses.mean(), x)[0]


page.catches(
    as_written, randn=(torch.randn_like(x), target), stress=(x, target)
)

# %%
# The next check adds odd and wide rows, and logits of masked classes: -inf.

page.check_all(loss_two, loss_one, loss_chunks, special=True)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). The figure shows bandwidth: the bytes of 2MN elements, the least
# traffic, over GPU time. *A copy* is PyTorch's copy of as many bytes. The
# *roofline* is the bandwidth of the largest copies. The library Liger has no
# line: its calls wait for the GPU, so their GPU time cannot be measured alone.

page.plot("bandwidth", over="N")

# %%
# The table compares the steps, with a copy of the least traffic as 100 %. So
# step 1, which moves 3MN elements, cannot exceed 67 %, and eager 20 %. Step 3
# reads each row twice, too.

steps = {"two": loss_two, "one": loss_one, "chunks": loss_chunks}
page.steps(eager=loss_eager, **steps)

# %%
# - Eager's subtraction and division broadcast a value per row. PyTorch's
#   kernel for that loads single elements of 2 bytes, where others load 16.
# - At 32000 classes, a multiprocessor holds one program of steps 1 and 2, so
#   memory often waits.

page.findings()

# %%
# .. _loss-use:
#
# When to use it
# --------------
#
# ``fusebook.cross_entropy`` replaces ``F.cross_entropy`` in a training step.
# It has the same ``weight``, ``ignore_index``, ``reduction`` and
# ``label_smoothing``, and works under ``torch.compile``. It also has a z-loss,
# see exercise 2, and a soft cap, which keeps logits between two bounds.

logits = x.clone().requires_grad_()
loss = fusebook.cross_entropy(logits, target, inplace=True)
# It is computed already; (2 * loss).backward() would read and write it again.
loss.backward()

# %%
# - **Memory.** A call allocates the gradient, which is as large as the logits.
#   In the table it counts as the *output*. With ``inplace=True`` the gradient
#   overwrites the logits instead.
# - **Options.** A class that does not exist gives NaN on a GPU. ``check=True``
#   waits and raises an error.
# - **Rows** of more than ``2**20`` classes (4096 in float64) go to torch.
# - **Launch times** below include the gradient. torch computes it by autograd,
#   which launches more kernels.
# - **Logits from a linear layer**, as in a language model, need not be stored:
#   see :doc:`fusebook.linear_cross_entropy <plot_108_chunked_head>`.
# - **Do not use** ``inplace`` when something else reads the logits.

page.use()

# %%
# Takeaways
# ---------
#
# - Compute a gradient where its inputs are in registers: in the forward pass.
# - Overwrite an input only if no other program can still read it.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it says where. Fix it and run
# the cell again. No GPU is needed.
#
# 1. Ignored rows
# ~~~~~~~~~~~~~~~
#
# The tokens of a prompt do not count: their class is -100. Their loss and
# gradient are zero, even if a logit is NaN. The mean is over the others.


def ignoring(x, target):
    return loss_one(x, target.clamp(min=0))


def ignored(x, target):
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        keep = target != -100
        loss = torch.nn.functional.cross_entropy(x[keep], target[keep])
        dx = torch.autograd.grad(loss, x)[0]
    return loss.detach(), dx


some = target[:30].clone()
some[::3] = -100
broken = x[:30].clone()
broken[0, 7] = float("nan")
page.exercise(ignoring, ignored, [(x[:30], some), (broken, some)])

# %%
# 2. A z-loss
# ~~~~~~~~~~~
#
# Large models add a term that keeps the sum of exponentials near one: 0.01
# times the square of its logarithm. Add it in the same pass. What is its
# gradient?


def with_z_loss(x, target):
    return loss_one(x, target)


def z_loss(x, target):
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        loss = torch.nn.functional.cross_entropy(x, target)
        loss = loss + 0.01 * (x.logsumexp(-1) ** 2).mean()
        dx = torch.autograd.grad(loss, x)[0]
    return loss.detach(), dx


page.exercise(with_z_loss, z_loss, [page.stress(30, 200, seed=3)])

# %%
# Evidence
# --------

page.footer()
