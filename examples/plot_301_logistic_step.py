"""
A training step in one kernel
=============================

Logistic regression on four hundred pictures of 784 pixels takes ten thousand
tiny steps of gradient descent. In eager PyTorch, each of them is many small
kernels, and the GPU is idle most of the time. We write a step that reads the
data once, and then a kernel that reads the data once in all steps.

You will learn

- how to use data twice and read it once,
- how to keep data in registers over many steps,
- how programs of one launch wait for each other.

Prerequisites: :doc:`plot_003_launching`, :doc:`plot_102_softmax`. No GPU is
needed: without one, kernels run in Triton's interpreter, and times come from a
record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["training step", "grid barrier", "CUDA graph"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_301_logistic_step")
page.verdict()

# %%
# Why a small step is slow in eager PyTorch
# -----------------------------------------
#
# Logistic regression has M rows :math:`x_i` of N features, and targets
# :math:`y_i` of 0 or 1. It predicts :math:`p_i = \sigma(x_i w + b)`. A step
# moves the weights down the gradient of the cross entropy, to which
# :math:`\lambda \sum_j w_j^2` is added as a penalty:
#
# .. math::
#
#    w &\leftarrow w - \eta \left( \frac{1}{M} X^T (p - y) + 2 \lambda w
#    \right) \\
#    b &\leftarrow b - \eta \, \frac{1}{M} \sum_i (p_i - y_i)


def eager(X, y, w, b, lr, l2):
    z = X @ w + b  # read MN
    loss = torch.nn.functional.binary_cross_entropy_with_logits(z, y)
    r = (torch.sigmoid(z) - y) / len(y)
    new = w - lr * (X.T @ r + 2 * l2 * w)  # read MN
    return new, b - lr * r.sum(), loss + l2 * (w * w).sum()


step = page.of("logistic_step")  # one step; the page itself is about many
step.traffic(eager=eager, fused=1)

# %%
# X is used twice: by rows for the predictions, and by columns for the
# gradient. A kernel that reads it once moves half of the bytes: **we predict
# twice the speed for a large X.** A small X stays in the L2 cache, and a step
# costs its launches. By a profiler an eager step has 24, some of them for the
# loss. Step 1 leaves the loss out and has 8: one kernel and seven operations
# of PyTorch. **So we predict three times the speed for a small X.**

# %%
# .. _logistic-rows:
#
# Step 1: keep the rows {gain rows at M=400, N=784, warm}
# -------------------------------------------------------
#
# A program loads some rows into :term:`registers <register>` and predicts
# them. The rows are still there for the gradient. That is a sum over all rows,
# to which each program adds its part by *atomic additions*, which other
# programs cannot interrupt.


@triton.jit
def step_rows(
    g_ptr, x_ptr, y_ptr, w_ptr, b_ptr, M, N,  # M rows of N features
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    j = tl.arange(0, BLOCK)  # [BLOCK]
    inside = (i < M)[:, None] & (j < N)[None, :]
    at = i[:, None] * N + j[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)  # [ROWS, BLOCK]; read MN
    w = tl.load(w_ptr + j, mask=j < N, other=0.0)
    y = tl.load(y_ptr + i, mask=i < M, other=0.0)
    z = tl.sum(x * w[None, :], 1) + tl.load(b_ptr)  # [ROWS]
    e = tl.exp(-tl.abs(z.to(tl.float32)))  # between 0 and 1: no overflow
    p = tl.where(z >= 0, 1.0, e) / (1.0 + e)
    r = tl.where(i < M, (p - y) / M, 0.0)
    g = tl.sum(x * r[:, None], 0)  # [BLOCK]; x again, from registers
    tl.atomic_add(g_ptr + j, g.to(g_ptr.dtype.element_ty), mask=j < N)
    total = tl.sum(r, 0).to(g_ptr.dtype.element_ty)
    tl.atomic_add(g_ptr + N, total)  # the gradient of the bias


def rows(X, y, w, b, lr, l2):
    (M, N), ROWS = X.shape, 16
    g, block = X.new_zeros(N + 1), triton.next_power_of_2(N)
    launch = step_rows[(triton.cdiv(M, ROWS),)]
    launch(g, X, y, w, b, M, N, ROWS=ROWS, BLOCK=block)
    return w - lr * (g[:N] + 2 * l2 * w), b - lr * g[N]


given = step.stress(100, 60)  # X, y, w, b, lr, l2
step.check(rows, *given)

# %%
# The steps of this page compute no loss, so the check compares weights and
# bias only. The library avoids atomic additions, whose order changes from
# run to run: each program writes its part, and a second launch adds all parts
# in order. In the heading, *warm* means in a :term:`CUDA graph`, with X in L2.

# %%
# .. _logistic-alone:
#
# Step 2: all steps in one launch {gain alone at M=16, N=784, warm}
# -----------------------------------------------------------------
#
# The next step reads the same X, which left the registers only because the
# launch has ended. Here one program holds all rows and does all steps.


@triton.jit
def fit_alone(
    w_ptr, b_ptr, x_ptr, y_ptr, M, N, steps, lr, l2,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)
    inside = (i < M)[:, None] & (j < N)[None, :]
    at = i[:, None] * N + j[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + i, mask=i < M, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + j, mask=j < N, other=0.0).to(tl.float32)
    b = tl.load(b_ptr).to(tl.float32)
    for _ in range(steps):  # no memory is touched in here
        z = tl.sum(x * w[None, :], 1) + b
        e = tl.exp(-tl.abs(z))
        p = tl.where(z >= 0, 1.0, e) / (1.0 + e)
        r = tl.where(i < M, (p - y) / M, 0.0)
        w -= lr * (tl.sum(x * r[:, None], 0) + 2 * l2 * w)
        b -= lr * tl.sum(r, 0)
    tl.store(w_ptr + j, w, mask=j < N)
    tl.store(b_ptr, b)


def alone(X, y, w, b, lr, l2, steps):
    (M, N), (w, b) = X.shape, (w.clone(), b.clone())
    ROWS, block = triton.next_power_of_2(M), triton.next_power_of_2(N)
    fit_alone[(1,)](w, b, X, y, M, N, steps, lr, l2, ROWS=ROWS, BLOCK=block)
    return w, b


many = page.stress(50, 30, 40)  # with 40 steps
page.check(alone, *many)

# %%
# That is all of training, for data that fits into the registers of one
# multiprocessor, 256 KB. The pictures need five times as much.

# %%
# .. _logistic-barriers:
#
# Step 3: barriers {gain barriers over rows at M=400, N=784, warm}
# ----------------------------------------------------------------
#
# All multiprocessors together have room for the pictures. Now each program
# owns a few rows *and* a slice of the weights. In each step it writes the
# gradient of its rows, waits for all others, adds up the gradients of its
# slice, writes new weights, and waits again.

three = [f"program {i}" for i in range(3)]
does = [(0, 2.2, "its rows"), (2.2, 3, "waits"), (3, 4.8, "its slice")]
does += [(4.8, 5.6, "waits"), (5.6, 7.8, "its rows")]
page.picture.lanes(
    "A step of three programs (only what program 0 writes is drawn)",
    dict.fromkeys(three, does),
    [("program 0", at, to, at + 0.8) for at in (2.2, 4.8) for to in three[1:]],
)

# %%
# Programs can wait for each other only if all run at the same time, which a
# *cooperative* launch promises. A :term:`barrier` is a counter in memory: each
# program adds one, and waits until all have. It is never reset.


@triton.jit
def wait_for_all(counter_ptr, target):
    counter = counter_ptr.to(tl.pointer_type(tl.int32))
    tl.debug_barrier()  # all threads of this program have stored
    tl.atomic_add(counter, 1, sem="release")  # shows what they stored
    while tl.load(counter, volatile=True) < target:
        pass
    tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def fit_barriers(
    w_ptr, b_ptr, parts_ptr, counter_ptr, x_ptr, y_ptr, M, N, steps, lr, l2,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    P, me = tl.num_programs(0), tl.program_id(0)
    i = me * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)
    inside = (i < M)[:, None] & (j < N)[None, :]
    at = i[:, None] * N + j[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)  # my rows, for all steps
    y = tl.load(y_ptr + i, mask=i < M, other=0.0)
    w = tl.load(w_ptr + j, mask=j < N, other=0.0).to(tl.float32)
    b = tl.load(b_ptr).to(tl.float32)
    mine = me * SLICE + tl.arange(0, SLICE)  # the weights of this program
    q = tl.arange(0, PARTS)
    theirs = q[:, None] * (N + 1) + mine[None, :]  # [PARTS, SLICE]
    wanted = (q < P)[:, None] & (mine < N)[None, :]
    for t in range(steps):
        z = tl.sum(x * w[None, :], 1) + b
        e = tl.exp(-tl.abs(z.to(tl.float32)))
        p = tl.where(z >= 0, 1.0, e) / (1.0 + e)
        r = tl.where(i < M, (p - y) / M, 0.0)
        part = parts_ptr + me * (N + 1)
        tl.store(part + j, tl.sum(x * r[:, None], 0), mask=j < N)
        tl.store(part + N, tl.sum(r, 0))
        wait_for_all(counter_ptr, (2 * t + 1) * P)  # all parts are written
        # .cg reads from L2: L1 may still hold values of the last step
        g = tl.load(
            parts_ptr + theirs, mask=wanted, other=0.0, cache_modifier=".cg"
        )
        own = tl.load(
            w_ptr + mine, mask=mine < N, other=0.0, cache_modifier=".cg"
        )
        own = own - lr * (tl.sum(g, 0) + 2 * l2 * own)
        tl.store(w_ptr + mine, own, mask=mine < N)
        slopes = parts_ptr + q * (N + 1) + N
        b -= lr * tl.sum(
            tl.load(slopes, mask=q < P, other=0.0, cache_modifier=".cg"), 0
        )
        wait_for_all(counter_ptr, (2 * t + 2) * P)  # all weights are new
        w = tl.load(w_ptr + j, mask=j < N, other=0.0, cache_modifier=".cg").to(
            tl.float32
        )
    if me == 0:
        tl.store(b_ptr, b)


def barriers(X, y, w, b, lr, l2, steps):
    (M, N), (w, b) = X.shape, (w.clone(), b.clone())
    # Interpreted, programs run one after the other: one holds all rows.
    ROWS = 4 if X.is_cuda else triton.next_power_of_2(M)
    programs = triton.cdiv(M, ROWS)
    sizes = (ROWS, N, triton.cdiv(N, programs), programs)
    names = ("ROWS", "BLOCK", "SLICE", "PARTS")
    constants = zip(names, map(triton.next_power_of_2, sizes), strict=True)
    # The counter is read as int32: zeros have the same four bytes in float32.
    parts, counter = X.new_empty(programs, N + 1), X.new_zeros(1)
    fit_barriers[(programs,)](
        w, b, parts, counter, X, y, M, N, steps, lr, l2,
        **dict(constants), launch_cooperative_grid=True,
    )  # fmt: skip
    return w, b


page.check(barriers, *many)

# %%
# The library's kernel needs no barriers. A word of 64 bits is written and read
# as a whole: half of it is a float32, and half the number of the step. A
# program reads a word again until it has the number of the current step. Flag
# and value come in one trip to the L2 cache, where a barrier needs two. NCCL,
# NVIDIA's library for communication, has a :term:`low-latency protocol <LL
# protocol>` of this kind.

page.source("logistic_fit", fold=True)

# %%
# Is it correct?
# --------------
#
# This step takes the loss from the textbook. At :math:`x_i w + b = 20` the
# nearest float32 to p is 1, and the logarithm of 1 - p is infinite. Every
# tenth row of the stress inputs is that far out.


def textbook(X, y, w, b, lr, l2):
    p = torch.sigmoid(X @ w + b)
    loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
    return *rows(X, y, w, b, lr, l2), loss + l2 * (w * w).sum()


tame = (given[0].clamp(-3, 3), *given[1:])
step.catches(textbook, tame=tame, stress=given)

# %%
# How fast is it?
# ---------------
#
# Fifty steps, *end to end*: the CPU launch time or the GPU time, whichever is
# larger (see :doc:`plot_002_measuring`). The line *fusebook steps* shows fifty
# calls of ``logistic_step``, with two launches each. ``logistic_fit`` is a
# loop of such steps where X does not fit into the registers of all
# multiprocessors.

page.plot("times", over="N")

# %%
# The table shows the time of a step, as the mean of a hundred in a CUDA graph.
# One program alone has no room for 400 rows. With 16 rows it is the fastest,
# since it waits for no other. The library takes longer there: its programs
# exchange messages, and they keep the loss of each step.

page.steps(eager=eager, rows=rows, alone=alone, barriers=barriers)

# %%
page.findings()

# %%
# .. _logistic-use:
#
# When to use it
# --------------
#
# Use ``logistic_fit`` for many steps on data that stays the same, and
# ``logistic_step`` for data that changes. Both return the loss, and two runs
# give the same bits. By default, a call checks that targets are 0 or 1, which
# waits for the GPU; ``check=False`` does not. For any other model, capture
# PyTorch's step in a CUDA graph, which saves most of the CPU's time.

fitted = fusebook.logistic_fit(*many[:-1], steps=many[-1])  # w, b and losses
stepped = fusebook.logistic_step(*given, check=False)  # w, b and loss
page.use()

# %%
# Takeaways
# ---------
#
# - Count launches before bytes. A small problem costs its launches.
# - Read data once that is used twice: keep the tile in registers.
# - A launch is a barrier. Programs that run at the same time can wait for each
#   other in less time.
# - Let a message carry the number of its step, and no other signal is needed.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it says where. Fix it and run
# the cell again. No GPU is needed.
#
# 1. The logarithm that overflows
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Compute the cross entropy of z = xw + b without ever computing 1 - p.


def cross_entropy(z, y):
    p = torch.sigmoid(z)
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p))


margins = torch.linspace(-100, 100, 201)
page.exercise(
    cross_entropy,
    lambda z, y: torch.nn.functional.binary_cross_entropy_with_logits(
        z, y, reduction="none"
    ),
    [(margins, (margins > 0).float()), (margins, (margins < 9).float())],
)

# %%
# 2. Momentum
# ~~~~~~~~~~~
#
# A ball that rolls: :math:`v \leftarrow \mu v - \eta g` and then :math:`w
# \leftarrow w + v`, for the weights and the bias. Velocities start at zero and
# stay in registers. Write momentum into ``fit_alone``; this attempt has none.


def fit_with_momentum(X, y, w, b, lr, l2, mu, steps):
    return alone(X, y, w, b, lr, l2, steps)


def rolled(X, y, w, b, lr, l2, mu, steps):
    v, u = torch.zeros_like(w), torch.zeros_like(b)
    for _ in range(steps):
        r = (torch.sigmoid(X @ w + b) - y) / len(y)
        v = mu * v - lr * (X.T @ r + 2 * l2 * w)
        u = mu * u - lr * r.sum()
        w, b = w + v, b + u
    return w, b


few, some = page.stress(30, 12, 1)[:4], page.stress(9, 3, 1)[:4]
page.exercise(
    fit_with_momentum,
    rolled,
    [(*few, 0.1, 0.01, 0.9, 8), (*some, 0.2, 0, 0.5, 8)],
)

# %%
# 3. Rows that count more
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# Give each row a weight :math:`s_i`, by which its part of the gradient is
# multiplied. The mean is still over M rows. Load it in ``step_rows``.


def weighted_step(X, y, s, w, b, lr, l2):
    return rows(X, y, w, b, lr, l2)


def weighted(X, y, s, w, b, lr, l2):
    r = s * (torch.sigmoid(X @ w + b) - y) / len(y)
    return w - lr * (X.T @ r + 2 * l2 * w), b - lr * r.sum()


page.exercise(
    weighted_step,
    weighted,
    [(*d[:2], 5 - 4 * d[1], *d[2:], 0.5, 0.01) for d in (few, some)],
)

# %%
# Evidence
# --------

page.footer()
