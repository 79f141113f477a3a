"""
The chunked head: a loss that never stores all its logits
=========================================================

The last layer of a language model, its *head*, turns hidden states into one
score per word of the vocabulary. These scores often take more memory than the
layer itself. We compute loss and gradients from a few rows of them at a time.

You will learn

- what a training step holds in memory, and when,
- how to turn scores into their gradient without new memory,
- how to trade time for memory with the number of rows in a chunk.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_105_cross_entropy`.
Without a GPU, kernels run in Triton's interpreter; times are recorded ones.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["cross entropy", "memory", "training"]
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

page = lesson.open("plot_108_chunked_head")
page.verdict()

# %%
# Where the memory goes
# ---------------------
#
# M hidden states of K elements times a head of N rows give M x N scores, the
# *logits*. The loss is their cross entropy with the correct classes. In eager
# PyTorch, which runs one operation after another, a training step is this:


def head_torch(h, head, target, scale=1.0):
    h, head = h.detach().requires_grad_(), head.detach().requires_grad_()
    loss = F.cross_entropy(h @ head.T, target)
    grads = torch.autograd.grad(loss, (h, head), loss.new_tensor(scale))
    return loss.detach().float(), *grads


page.memory(torch=head_torch)

# %%
# ``scale`` is the gradient of the loss. It is 1, unless a factor on the loss
# keeps small gradients above zero in float16. The picture counts the bytes of
# all tensors after each operation. At its peak, a step holds three matrices of
# M x N, 1.96 GiB each: the logarithms of the probabilities, and two more in
# the backward pass. At the end it holds only the gradients that it returns,
# 1.04 GiB. Every implementation returns these, so the box above subtracts 1.04
# GiB from every peak.

# %%
# .. _head-in-place:
#
# Step 1: logits become their gradient {gain in_place at N=128256, memory}
# ------------------------------------------------------------------------
#
# The gradients of the hidden states and of the head are matmuls with the
# gradient of the logits. :doc:`plot_105_cross_entropy` computes that together
# with the loss. Program *i* owns row *i* and reads it twice, in chunks of
# BLOCK columns.

page.picture.passes(chunks=4)

# %%
# No other program reads the row, so the second pass may write the gradient
# over the logits. One matrix is left of three, and the returned gradients
# exist at the same time: **we predict 3.0 GiB** instead of 5.9.


@triton.jit
def over_logits(loss_ptr, x_ptr, target_ptr, N, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int32 overflows past 2**31 elements
    columns = tl.arange(0, BLOCK)
    x_ptr += row * N
    t = tl.load(target_ptr + row)
    x_t = tl.load(x_ptr + t).to(tl.float32)  # before its gradient replaces it
    top = -3.4028234663852886e38  # the lowest float32: -inf less -inf is NaN
    total = 0.0
    for start in range(0, N, BLOCK):
        at = start + columns
        x = tl.load(x_ptr + at, mask=at < N, other=float("-inf"))
        x = x.to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total *= tl.exp(top - higher)  # the sum so far, for the new maximum
        total += tl.sum(tl.exp(x - higher), 0)
        top = higher
    tl.store(loss_ptr + row, tl.log(total) + (top - x_t))
    for start in range(0, N, BLOCK):
        at = start + columns
        p = tl.exp(tl.load(x_ptr + at, mask=at < N).to(tl.float32) - top)
        dx = tl.where(at == t, p / total - 1, p / total)
        tl.store(x_ptr + at, dx * scale, mask=at < N)


def loss_over(logits, target, scale):
    """The loss of each row; `logits` hold their gradient afterwards."""
    M, N = logits.shape
    loss = logits.new_empty(M, dtype=torch.float32)
    block = min(8192, triton.next_power_of_2(N))
    over_logits[(M,)](loss, logits, target, N, scale, BLOCK=block, num_warps=8)
    return loss


def head_in_place(h, head, target, scale=1.0):
    logits = h @ head.T
    losses = loss_over(logits, target, scale / len(h))  # a mean over rows
    return losses.mean(), logits @ head, logits.T @ h


given = page.stress(37, 16, 10000)  # M, K, N
page.check(head_in_place, *given)

# %%
# ``page.stress`` makes hidden states, a head and classes. A row of 10000
# logits takes two chunks of columns. The error is relative to the result in
# float64, and its unit *eps* is the distance from 1 to the next number of the
# dtype.

# %%
# .. _head-chunks:
#
# Step 2: some rows at a time {gain chunks at N=128256, memory}
# -------------------------------------------------------------
#
# Two results are sums over rows: the loss, and the gradient of the head. All
# else belongs to single rows. So a loop can take a chunk of rows, use its
# logits, and give their memory to the next chunk. With 1024 of 8192 rows,
# logits take an eighth of 1.96 GiB: **we predict 1.3 GiB**, gradients
# included. The matmuls are those of PyTorch.


def head_in_chunks(h, head, target, scale=1.0, rows=1024):
    M = len(h)
    buffer = h.new_empty(min(rows, M), len(head))  # the only logits
    losses = h.new_empty(M, dtype=torch.float32)
    dh, dhead = torch.empty_like(h), torch.zeros_like(head)
    for start in range(0, M, rows):
        part = slice(start, start + rows)
        logits = buffer[: len(h[part])]  # fewer rows in the last chunk
        torch.mm(h[part], head.T, out=logits)
        losses[part] = loss_over(logits, target[part], scale / M)
        torch.mm(logits, head, out=dh[part])
        dhead.addmm_(logits.T, h[part])  # the sum over chunks
    return losses.mean(), dh, dhead


def sixteen_rows(h, head, target, scale=1.0):
    return head_in_chunks(h, head, target, scale, rows=16)


page.check(sixteen_rows, *given)  # three chunks, of 16, 16 and 5 rows

# %%
# ``out=`` matters. In ``logits = h[part] @ head.T`` Python frees the old
# logits only after the new ones exist, so two chunks would be in memory.

page.memory(torch=head_torch, in_place=head_in_place, chunks=head_in_chunks)

# %%
# In chunks, memory starts with the buffer for 1024 rows of logits and both
# gradients, and hardly grows.

# %%
# How many rows?
# --------------
#
# All versions do the same three matmuls, 6MKN operations, for which an H100's
# data sheet promises 989 TFLOP/s. **We predict the same time for all**, as
# long as chunks have enough rows.
#
# How many are enough? With R rows, the first two matmuls do 2RKN operations
# each and read the head, 2KN bytes in bfloat16: R operations per byte. The
# third matmul reads and writes the head's gradient, 4KN bytes: R / 2
# operations per byte. By its data sheet, an H100 does about 300 operations
# while it reads a byte. **We predict** that 1024 rows cost little, and that at
# 512 rows the third matmul begins to wait for memory. The library's ``rows=``
# shows the trade:

page.trade()

# %%
# By default the library takes as many rows as fit into 1 GiB of logits.
#
# A chunk costs accuracy, too. The head's gradient is a sum over chunks in the
# dtype of the head, so it is rounded once per chunk. In bfloat16 few rows per
# chunk show it:


def four_rows(h, head, target, scale=1.0):
    return head_in_chunks(h, head, target, scale, rows=4)


half = page.stress(256, 16, 97, dtype=torch.bfloat16)
page.check(head_in_chunks, *half)  # one chunk

# %%

page.check(four_rows, *half)  # 64 chunks

# %%
# .. _head-recompute:
#
# Why not one kernel?
# -------------------
#
# A kernel could multiply and keep each logit in registers. But the gradient
# needs the sum over the whole row first, so every logit would be computed
# twice: four matmuls instead of three. Matmuls take most of the time here, and
# reading a chunk of logits again costs far less.

# %%
# Is it correct?
# --------------
#
# A check is worth what it catches. This loop skips the rows of a last chunk
# that is not full:


def full_chunks(h, head, target, scale=1.0, rows=16):
    whole = len(h) // rows * rows
    part = h[:whole], head, target[:whole], scale
    loss, dh, dhead = head_in_chunks(*part, rows=rows)
    return loss, F.pad(dh, (0, 0, 0, len(h) - whole)), dhead


page.catches(full_chunks, even=page.stress(32, 16, 97), odd=given)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after its L2 cache was
# flushed. ``head_torch`` has none: its ``new_tensor`` copies a number to the
# GPU and waits, and GPU time would include the wait. *torch* in the box is the
# same step without that copy. Memory is the peak of a call beyond its inputs,
# as PyTorch's allocator sees it. Lines of code count kernels with their
# launchers; the library's serve all shapes, dtypes and options.

steps = {"in_place": head_in_place, "chunks": head_in_chunks}
page.steps(torch=head_torch, **steps)

# %%
page.findings()

# %%
# .. _head-use:
#
# When to use it
# --------------
#
# Give the library the hidden states and the head's weight, and never compute
# logits. It takes a ``bias`` and all options of ``fusebook.cross_entropy`` but
# ``inplace``, and works under ``torch.compile``.

h, head, target, _ = given
h, head = h.requires_grad_(), head.requires_grad_()
loss = fusebook.linear_cross_entropy(h, head, target)
loss.backward()  # hands out the gradients that the forward pass computed

# With less memory, and more time: 1024 rows of logits at a time.
loss = fusebook.linear_cross_entropy(h, head, target, rows=1024)

# %%
# - **Memory.** The gradients of the hidden states and of the head, which every
#   implementation returns, and at most 1 GiB of logits, or those of ``rows``.
#   The forward pass already allocates the gradients.
# - **Options.** ``check=True`` raises an error for a class that does not
#   exist, and waits for the GPU. By default such a class gives NaN on a GPU,
#   and an error on the CPU.
# - **float16.** There the gradients wait for the backward pass, which knows
#   the scale of the loss. It computes the logits again, unless they are few:
#   one more matmul. Times on this page are of bfloat16.
# - **Do not use it** when something else needs the logits. Where all logits
#   fit into 1 GiB, the default takes one chunk and saves nothing over
#   ``torch.compile`` of ``head_torch``. Pass ``rows=`` there.
#
# From 2.13 on, PyTorch has a function of this kind, too,
# ``F.linear_cross_entropy``. In the table it is *torch, in chunks*, and has a
# row if torch was 2.13 or later.

page.use()

# %%
# Takeaways
# ---------
#
# - Draw memory over time before you save any: the peak is what counts.
# - Only sums over rows, here the loss and the head's gradient, need all
#   chunks. The rest can go with its chunk.
# - Write over what is not needed any more, and reuse one buffer in a loop.
# - A chunk needs enough rows to keep the matmul busy. More rows gain little
#   time and take much memory.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it names a wrong element of
# its result. Fix it and run the cell again. No GPU is needed.
#
# 1. A bias
# ~~~~~~~~~
#
# Many heads add a bias to the logits of each class. Add it, and return its
# gradient as a fourth result. It needs no logits of another chunk.


def with_bias(h, head, bias, target):
    loss, dh, dhead = head_in_chunks(h, head, target, rows=8)
    return loss, dh, dhead, torch.zeros_like(bias)


def by_autograd(h, head, bias, target):
    """The same by PyTorch, from all logits."""
    with torch.enable_grad():
        given = [t.detach().requires_grad_() for t in (h, head, bias)]
        loss = F.cross_entropy(given[0] @ given[1].T + given[2], target)
        loss_dtype = torch.promote_types(h.dtype, torch.float32)
        return loss.to(loss_dtype), *torch.autograd.grad(loss, given)


h, head, target, scale = page.stress(20, 8, 50, seed=1)
bias = torch.linspace(-1, 1, 50, device=h.device)
page.exercise(with_bias, by_autograd, [(h, head, bias, target)])

# %%
# 2. Fewer roundings
# ~~~~~~~~~~~~~~~~~~
#
# With one row per chunk, the head's gradient in bfloat16 is rounded once per
# row. Add the chunks up in float32, and round once at the end.


def rounded_once(h, head, target):
    return head_in_chunks(h, head, target, rows=1)


def exact(h, head, target):
    return by_autograd(h, head, torch.zeros_like(head[:, 0]), target)[:3]


h, head, target, scale = page.stress(512, 16, 97, dtype=torch.bfloat16)
page.exercise(rounded_once, exact, [(h, head, target)])

# %%
# Evidence
# --------

page.footer()
