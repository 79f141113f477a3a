"""
Training a Llama with the book's kernels
========================================

Matmuls take most of a training step, and PyTorch's are fast. The rest is many
small operations that wait for memory. We write one of them, the rotary
embedding, as a kernel with its gradient. Then we let a whole model compute
with kernels of this book.

You will learn

- which part of a training step kernels can save, and how to see it,
- how to write a kernel whose gradient is the same kernel,
- how to replace parts of a model, and check that it still learns the same.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_108_chunked_head`.
Without a GPU, kernels run in Triton's interpreter; times are recorded ones.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["training", "rotary embedding", "transformers"]
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

page = lesson.open("plot_305_training")
page.verdict()

# %%
# The rotary embedding
# --------------------
#
# Attention compares *queries* with *keys*: a vector of 2R elements each, for
# each token and head. The vectors carry the token's position n by rotation.
# Elements i and R + i are a pair (a, b), which turns by the angle
# n / 10000^(i/R). Two tables [N, R] hold the cosines and sines. ``q`` is
# [B, H, N, 2R]: B sequences of N tokens, with H heads.


def rope_eager(q, k, cos, sin, style="neox"):
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def swapped(x):
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)  # read 1.5, write 1.5

    # read 4, write 3
    return tuple(x * cos + swapped(x) * sin for x in (q, k))


# %%
# The comments count q and k together as 1. Eager reads 5.5 and writes 4.5. A
# kernel has to read 1 and write 1, so **we predict 5x**.
#
# .. _rope-one:
#
# Step 1: one kernel {gain one at N=2048}
# ---------------------------------------
#
# A linear layer writes the heads of a token side by side: in memory, ``q`` is
# [B, N, H, 2R]. Program *t* owns token *t* with all its heads, a tile of
# HEADS x BLOCK pairs. It loads its row of cosines and sines once.


@triton.jit
def turn(
    y_ptr, x_ptr, cos, sin, t, H, R, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate all heads of token t."""
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < H) & (pair < R)
    at = (t * H + head) * 2 * R + pair  # of a; b is R elements further
    a = tl.load(x_ptr + at, mask=inside).to(tl.float32)
    b = tl.load(x_ptr + at + R, mask=inside).to(tl.float32)
    tl.store(y_ptr + at, a * cos - b * sin, mask=inside)
    tl.store(y_ptr + at + R, b * cos + a * sin, mask=inside)


@triton.jit
def angles(cos_ptr, sin_ptr, t, N, R, BLOCK: tl.constexpr):
    pair = tl.arange(0, BLOCK)[None, :]
    at, inside = t % N * R + pair, pair < R  # sequences share the tables
    cos = tl.load(cos_ptr + at, mask=inside).to(tl.float32)
    return cos, tl.load(sin_ptr + at, mask=inside).to(tl.float32)


@triton.jit
def rotate_one(
    y_ptr, x_ptr, cos_ptr, sin_ptr, N, H, R,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)  # int32 overflows past 2**31 elements
    cos, sin = angles(cos_ptr, sin_ptr, t, N, R, BLOCK)
    turn(y_ptr, x_ptr, cos, sin, t, H, R, HEADS, BLOCK)


def by_token(x):
    """[B, N, H, 2R]: as a linear layer wrote x, so nothing is copied."""
    return x.transpose(1, 2).contiguous()


def rope_one(q, k, cos, sin, style="neox"):
    found, (N, R) = [], cos.shape
    for x in map(by_token, (q, k)):
        y, (B, _, H, _) = torch.empty_like(x), x.shape
        tile = triton.next_power_of_2(H), triton.next_power_of_2(R)
        rotate_one[(B * N,)](y, x, cos, sin, N, H, R, *tile)
        found.append(y.transpose(1, 2))
    return tuple(found)


given = page.stress(2, 5, 3, 24, 0, 37)  # B, H, heads of k, R, 0, N
page.check(rope_one, *given)

# %%
# The error is relative to the rotation in float64, and its unit *eps* is the
# distance from 1 to the next number of the dtype.

# %%
# .. _rope-both:
#
# Step 2: queries and keys in one launch {gain both at N=2048}
# ------------------------------------------------------------
#
# Keys turn by the same angles as queries. So a program may rotate the heads of
# both, and load its angles once. ``BACK`` is for step 3.


@triton.jit
def rotate_both(
    q_out, q_ptr, k_out, k_ptr, cos_ptr, sin_ptr, N, H, K, R,
    HEADS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    cos, sin = angles(cos_ptr, sin_ptr, t, N, R, BLOCK)
    if BACK:
        sin = -sin
    turn(q_out, q_ptr, cos, sin, t, H, R, HEADS, BLOCK)
    turn(k_out, k_ptr, cos, sin, t, K, R, KEYS, BLOCK)


def rotated(q, k, cos, sin, back):
    q, k, (N, R) = by_token(q), by_token(k), cos.shape
    new_q, new_k = torch.empty_like(q), torch.empty_like(k)
    (B, _, H, _), K = q.shape, k.shape[2]
    tile = [triton.next_power_of_2(n) for n in (H, K, R)]
    data = new_q, q, new_k, k, cos, sin
    rotate_both[(B * N,)](*data, N, H, K, R, *tile, BACK=back)
    return new_q.transpose(1, 2), new_k.transpose(1, 2)


def rope_both(q, k, cos, sin, style="neox"):
    return rotated(q, k, cos, sin, back=False)


page.check(rope_both, *given)

# %%
# Step 3: the gradient is the same kernel
# ---------------------------------------
#
# A rotation is a linear map, y = Tx. So the gradient of x is that of y,
# multiplied by the transposed matrix of T. A transposed rotation turns back,
# by the opposite angle: the cosine stays, and the sine changes its sign. So
# the backward pass launches the same kernel, and needs neither q nor k.


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotated(q, k, cos, sin, back=False)

    @staticmethod
    def backward(ctx, dq, dk):
        return *rotated(dq, dk, *ctx.saved_tensors, back=True), None, None


# %%
# ``page.check`` expects a rotation forward, but ``backward`` negates sin. So
# we pass -sin: the two signs cancel.


def by_gradient(q, k, cos, sin, style="neox"):
    x = [torch.zeros_like(t).requires_grad_() for t in (q, k)]
    return torch.autograd.grad(Rope.apply(*x, cos, -sin), x, (q, k))


page.check(by_gradient, *given)

# %%
# The check catches a backward pass without ``back=True``, which would return:


def forgetful(q, k, cos, sin, style="neox"):
    return rope_both(q, k, cos, -sin)


first = page.stress(2, 5, 3, 24, 0, 1)  # a token at position 0 does not turn
page.catches(forgetful, first=first, all=given)

# %%
# How fast is the rotation?
# -------------------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was
# flushed. In the table, 100 % is a copy of q and k: 32 heads of queries and 8
# of keys, with 2R = 128. Lines of code count kernels and launchers.

page.steps(eager=rope_eager, one=rope_one, both=rope_both)

# %%
# Eager runs below copy speed, as q and k are not contiguous. So the gain
# exceeds the predicted 5x. The library's kernel takes any strides, and several
# tokens per program where heads are few.

page.source("rope", fold=True)

# %%
# What a training step is made of
# -------------------------------
#
# The profiler of PyTorch lists all kernels of a step, and we sort them by
# their names. The model is a Llama of Hugging Face's transformers in bfloat16,
# with 8 layers of 2048 elements and a vocabulary of 128256. The row *no
# kernel* is time in which the GPU waits.

page.profile()

# %%
# *Fusebook* is the same model with kernels of this book. Matmuls and attention
# are PyTorch's in both. They may take longer in one of the two, as the clock
# of a busy GPU varies with its power. Kernels can save the rest: the loss,
# AdamW, and the elementwise kernels of norms, rotary embedding and MLPs.


def patched(model, lr=1e-4):
    print(fusebook.patch(model))  # what it replaced, and what it left and why
    return fusebook.optim.AdamW(model.parameters(), lr=lr)


def train(model, optimizer, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# %%
# ``fusebook.patch`` gives modules another ``forward``. It compares each kind
# of module with its replacement at a small size first, and leaves alone what
# computes something else. Parameters and their names stay, so checkpoints
# load as before, and ``fusebook.unpatch`` undoes it.

# %%
# What each replacement gives
# ---------------------------
#
# - **Norms:** :doc:`plot_104_norms`, one pass instead of six operations.
# - **rope:** the kernel of this page.
# - **MLP's product:** silu(a) * b in one pass, :doc:`plot_101_elementwise`.
# - **Loss:** chunk by chunk, together with the last matmul
#   (:doc:`plot_108_chunked_head`).
# - **AdamW:** :doc:`plot_304_adamw`, one launch for all parameters.
#
# **We predict** that the loss saves the most memory: logits take
# 8192 x 128256 x 2 bytes = 2 GiB, and eager holds several such matrices.

page.replacements()

# %%
# Does it learn the same?
# -----------------------
#
# Fused kernels round less often, so results differ in the last bits, and in
# 100 steps these differences grow. But two eager runs that round differently
# grow apart, too. So we train a small Llama three times by eager PyTorch. The
# second run has the sequences of a batch in another order, and the third one
# computes attention by other operations. Then we measure how far the losses of
# patched runs leave the range of these three.
#
# Gradients are compared layer by layer with those in float64, before the first
# step and after 100. Errors of patched gradients may exceed eager's by 5 %.

page.findings()

# %%
# .. _training-use:
#
# When to use it
# --------------
#
# For a model of transformers of a known family (Llama, Mistral, Qwen2, Qwen3,
# Gemma), call ``patched`` above. For a model of your own, call operators, such
# as this one, or use the modules of ``fusebook.nn``.

q, k, cos, sin, style = given
rotation = fusebook.rope(q, cos, sin, k)  # a new q and a new k

# %%
# - **Options.** ``fusebook.rope`` also rotates neighbours (``interleaved``),
#   the first elements of a head (``rotary_dim``), by ``positions``, and in
#   place.
# - **Logits.** In a step with labels, a patched model computes no logits.
#   ``fusebook.patch(model, loss=False)`` keeps them.
# - **Memory.** ``fusebook.patch(model, recompute=True)`` computes activations
#   again in the backward pass: less memory, and more time.
# - **Inside torch.compile** the compiler fuses most of these operations, too,
#   and transformers adds a mask that slows attention. Patch before you
#   compile, and measure your model compiled and not compiled.
# - **Do not patch** a model whose profile is nearly all matmuls and attention.

page.use()

# %%
# Takeaways
# ---------
#
# - Look at a profile first: what is not in it cannot be saved.
# - A gradient may be the forward kernel with other arguments.
# - What shares its inputs belongs in one launch.
# - Compare a run with the spread of runs that may differ by rounding alone.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it names a wrong element of
# its result. Fix it and run the cell again. No GPU is needed.
#
# 1. Neighbours
# ~~~~~~~~~~~~~
#
# Some models rotate neighbours: elements 2i and 2i + 1 are a pair. Reorder the
# elements before and after ``rope_both``, and change no kernel.


def neighbours(q, k, cos, sin):
    return rope_both(q, k, cos, sin)


def by_pairs(q, k, cos, sin):
    found = []
    for x in (q, k):
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        y = torch.stack((a * cos - b * sin, b * cos + a * sin), -1)
        found.append(y.flatten(-2))
    return tuple(found)


page.exercise(neighbours, by_pairs, [page.stress(1, 2, 1, 4, 0, 3)[:4]])

# %%
# 2. Gradients of two halves
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A batch that does not fit into memory is trained in parts, whose gradients
# add up. The mean of two means is not the mean of all tokens when one part has
# more labels: -100 marks a token without one. Fix it with ``reduction="sum"``.


def in_halves(h, head, target):
    total = 0.0
    for x, t in zip(h.chunk(2), target.chunk(2), strict=True):
        total += fusebook.linear_cross_entropy(x, head, t) / 2
    return total


def at_once(h, head, target):
    return F.cross_entropy(h @ head.T, target)


rng = torch.Generator().manual_seed(0)
h, head = torch.randn(8, 4, generator=rng), torch.randn(9, 4, generator=rng)
target = torch.tensor([3, -100, -100, 1, 8, 0, 5, 2])
inputs = [t.to(q.device) for t in (h, head, target)]
page.exercise(in_halves, at_once, [tuple(inputs)])

# %%
# Evidence
# --------

page.footer()
