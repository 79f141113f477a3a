"""
An optimizer step in one launch
===============================

A model has hundreds of parameters. AdamW steps each of them with a few small
operations, so Python queues thousands of kernels while the GPU waits. We write
the step as one Triton kernel that finds all parameters in a table.

You will learn

- how to give any number of tensors to one kernel,
- how to tell whether the CPU or the GPU limits a training step,
- why a bfloat16 parameter may never move, and what helps.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_101_elementwise`. No GPU
is needed: without one, kernels run in Triton's interpreter, and times come
from a record.
"""

import functools

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["training step", "optimizer", "pointer table"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_304_adamw")
page.verdict()

# %%
# Why AdamW is slow one operation at a time
# -----------------------------------------
#
# AdamW keeps two running averages of each gradient :math:`g`: one of itself,
# :math:`m`, and one of its square, :math:`v`. In step :math:`t`:
#
# .. math::
#
#    m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad
#    v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
#    p &\leftarrow (1 - \eta \lambda) p - \frac{\eta}{1 - \beta_1^t} \,
#        \frac{m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}
#
# On this page :math:`\beta_1` is 0.9, :math:`\beta_2` is 0.999 and the decay
# :math:`\lambda` is 0.1. The list has M elements in N tensors.


def adamw_loop(ps, gs, ms, vs, t, lr):
    for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
        p.mul_(1 - lr * 0.1)
        m.lerp_(g, 0.1)
        v.mul_(0.999)
        v.addcmul_(g, g, value=0.001)
        root = v.sqrt()
        root /= (1 - 0.999**t) ** 0.5
        root += 1e-8
        p.addcdiv_(m, root, value=-lr / (1 - 0.9**t))
    return *ps, *ms, *vs  # what has changed, for the check


page.traffic(loop=adamw_loop, fused=7)

# %%
# One kernel reads and writes each list once. Where memory is the limit, **we
# predict almost three times the speed.** But the loop is also 8N launches, and
# the CPU needs microseconds for each. Times on this page are *end to end*: the
# CPU launch time or the GPU time of a step, whichever is larger. In training,
# the two overlap.

# %%
# .. _adamw-per-tensor:
#
# Step 1: one launch per tensor {gain per_tensor at N=1000}
# ---------------------------------------------------------
#
# One launch replaces eight for each tensor. A launch from Triton takes the CPU
# longer than an operation of PyTorch, so **we predict less than eight times
# the speed** for small tensors. Each element is stepped by itself, in
# registers. The CPU computes the factors that all elements share. A program
# owns a *chunk* of 1024 elements.


@triton.jit
def step_chunk(p_ptr, g_ptr, m_ptr, v_ptr, i, inside, keep, size, root, eps):
    g = tl.load(g_ptr + i, mask=inside)  # read M
    m = 0.9 * tl.load(m_ptr + i, mask=inside) + 0.1 * g  # read M
    v = 0.999 * tl.load(v_ptr + i, mask=inside) + 0.001 * g * g  # read M
    p = keep * tl.load(p_ptr + i, mask=inside)  # read M
    tl.store(m_ptr + i, m, mask=inside)  # write M
    tl.store(v_ptr + i, v, mask=inside)  # write M
    p -= size * m / (tl.sqrt(v) / root + eps)
    tl.store(p_ptr + i, p, mask=inside)  # write M


@triton.jit
def one_tensor(
    p_ptr, g_ptr, m_ptr, v_ptr, end, keep, size, root, eps, BLOCK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * BLOCK  # may exceed 2**31
    i = first + tl.arange(0, BLOCK)
    step_chunk(p_ptr, g_ptr, m_ptr, v_ptr, i, i < end, keep, size, root, eps)


def shared(t, lr):
    """What all elements share: keep, size, root and eps."""
    return 1 - lr * 0.1, lr / (1 - 0.9**t), (1 - 0.999**t) ** 0.5, 1e-8


def adamw_per_tensor(ps, gs, ms, vs, t, lr):
    for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
        launch = one_tensor[(triton.cdiv(p.numel(), 1024),)]
        launch(p, g, m, v, p.numel(), *shared(t, lr), BLOCK=1024)
    return *ps, *ms, *vs


given = page.stress(3000, 2)  # elements and tensors: p, g, m, v and more
page.check(adamw_per_tensor, *given)

# %%
# Errors are relative to the same step in float64. Their unit *eps* is the
# distance from 1 to the next number.

# %%
# .. _adamw-table:
#
# Step 2: a table of addresses {gain table at N=1000}
# ---------------------------------------------------
#
# A kernel has a fixed number of arguments, and a list may have any number of
# tensors. But an address is a number, and a kernel can read numbers from
# memory. The :term:`pointer table` has the size and four addresses of each
# tensor. A list of chunks says which part of which tensor a program owns.

page.picture.table(sizes=(9, 3, 6), block=4)

# %%
# ``.to(tl.pointer_type(tl.float32))`` turns a number into a pointer.


@triton.jit
def all_tensors(
    table_ptr, chunks_ptr, N, keep, size, root, eps, BLOCK: tl.constexpr
):
    chunk = tl.load(chunks_ptr + tl.program_id(0))
    tensor, first = chunk >> 32, (chunk & 0xFFFFFFFF) * BLOCK
    FLOATS: tl.constexpr = tl.pointer_type(tl.float32)
    row = table_ptr + tensor
    end = tl.load(row)  # the tensor has so many elements
    p_ptr = tl.load(row + N).to(FLOATS)
    g_ptr = tl.load(row + 2 * N).to(FLOATS)
    m_ptr = tl.load(row + 3 * N).to(FLOATS)
    v_ptr = tl.load(row + 4 * N).to(FLOATS)
    i = first + tl.arange(0, BLOCK)
    step_chunk(p_ptr, g_ptr, m_ptr, v_ptr, i, i < end, keep, size, root, eps)


def chunks_of(sizes, block):
    """Tensor and chunk in one number, for each chunk of each tensor."""
    return [
        (tensor << 32) + chunk
        for tensor, size in enumerate(sizes)
        for chunk in range(triton.cdiv(size, block))
    ]


def places(*lists):
    sizes = tuple(p.numel() for p in lists[0])
    return sizes, tuple(x.data_ptr() for xs in lists for x in xs)


def tables_of(sizes, addresses, device):
    table = torch.tensor([*sizes, *addresses], device=device)  # [5 * N]
    return table, torch.tensor(chunks_of(sizes, 1024), device=device)


def launch_all(table, chunks, N, t, lr):
    all_tensors[(len(chunks),)](table, chunks, N, *shared(t, lr), BLOCK=1024)


def adamw_table(ps, gs, ms, vs, t, lr):
    tables = tables_of(*places(ps, gs, ms, vs), ps[0].device)
    launch_all(*tables, len(ps), t, lr)
    return *ps, *ms, *vs


page.check(adamw_table, *given)

# %%
# .. _adamw-kept:
#
# Step 3: keep the table {gain kept at N=1000}
# --------------------------------------------
#
# Now there is one launch, but Python builds the table in each step. It only
# changes when a tensor gets other memory, so we keep it, and look it up by all
# sizes and addresses. That look-up is what is left of the CPU's time. Without
# it, a step may write to memory that belongs to another tensor by now.


@functools.lru_cache(maxsize=4)
def tables_kept(sizes, addresses, device):
    return tables_of(sizes, addresses, device)


def adamw_kept(ps, gs, ms, vs, t, lr):
    tables = tables_kept(*places(ps, gs, ms, vs), ps[0].device)
    launch_all(*tables, len(ps), t, lr)
    return *ps, *ms, *vs


page.check(adamw_kept, *given)

# %%
# The library keeps its table too, and also compares shapes, strides and
# dtypes. That takes more of the CPU's time than step 3. Only addresses of
# gradients that moved are copied to the GPU again. A thread of its kernel
# loads 16 bytes at once where the addresses of a tensor allow it.

page.source("adamw_step", fold=True)

# %%
# Small steps need more digits
# ----------------------------
#
# A bfloat16 number has eight bits of mantissa. A step that is smaller than
# half of the last bit is rounded away, each time. There are two remedies. With
# :term:`master weights`, a step changes a float32 copy of each parameter. With
# :term:`stochastic rounding`, the probability to round up is the fraction that
# is lost, so the mean over many steps is exact. Here forty steps of 0.0005
# lead down from 1:


def by_chance(x):
    """float32 as one of the two bfloat16 around it."""
    bits = torch.randint(0, 2**16, x.shape, dtype=torch.int32)
    return ((x.view(torch.int32) + bits) & -(2**16)).view(torch.float32)


torch.manual_seed(0)
master = torch.ones(1000)
nearest, chance = master.bfloat16(), master.bfloat16()
for _ in range(40):
    nearest = (nearest.float() - 0.0005).bfloat16()
    chance = by_chance(chance.float() - 0.0005).bfloat16()
    master = master - 0.0005

ends = {"nearest": nearest, "by chance": chance, "master": master.bfloat16()}
far = {name: 1 - p.double().mean().item() for name, p in ends.items()}
texts = {name: f"{distance:.4f}" for name, distance in far.items()}
page.picture.bars("Mean distance from the start; 0.02 is exact", far, texts)

# %%
# The master moves by 0.02. Its bar shows the bfloat16 copy, which is the
# nearest number that bfloat16 has. ``fusebook.adamw_step`` does both in its
# kernel, with ``masters=`` and with ``seed=``. Its random bits come from a
# counter, so nothing is stored.

# %%
# Is it correct?
# --------------
#
# A check is worth what it catches. This step has no bias corrections. They
# are 1 after many steps, so a check late in training would let it pass:


def uncorrected(ps, gs, ms, vs, t, lr):
    return adamw_loop(ps, gs, ms, vs, 10**9, lr)


late = (*given[:-2], 10**6, given[-1])  # the last two: step, learning rate
page.catches(uncorrected, step_1000000=late, step_7=given)

# %%
# How fast is it?
# ---------------
#
# All lists have ten million elements. ``foreach`` and ``fused=True`` are
# PyTorch's own functions for lists. torch.compile has no time for 1000
# tensors: above 100, compiling takes minutes.

page.plot("times", over="tensors")

# %%
# *CPU launch* is the time that Python needs to queue a step, and *GPU* the
# time of its kernels. Both are empty where a step makes Python wait for the
# GPU: by a copy, or by more launches than the GPU's queue holds. Step 2 is
# slow even for one tensor, since Python lists its 9766 chunks. CPU time
# differs from process to process, so compare within the table, and not with
# the box.

steps = {"per_tensor": adamw_per_tensor, "table": adamw_table}
page.steps(loop=adamw_loop, **steps, kept=adamw_kept)

# %%
page.findings()

# %%
# .. _adamw-use:
#
# When to use it
# --------------
#
# ``fusebook.optim.AdamW`` replaces ``torch.optim.AdamW``, and each loads the
# state of the other. It calls ``fusebook.adamw_step``, which takes lists, as
# this page does. Use either for a model with many parameters. A single large
# tensor gains little over ``fused=True``, and for a single small one PyTorch's
# class takes less of the CPU's time. With ``capturable=True``, a CUDA graph
# can capture a step.

model = torch.nn.Linear(300, 40, device=given[0].device)
optimizer = fusebook.optim.AdamW(model.parameters(), lr=0.001)
model(torch.ones(8, 300, device=given[0].device)).square().mean().backward()
optimizer.step()

ps, gs = list(model.parameters()), [p.grad for p in model.parameters()]
ms, vs = [torch.zeros_like(p) for p in ps], [torch.zeros_like(p) for p in ps]
fusebook.adamw_step(ps, gs, ms, vs, step=1, lr=0.001)  # in place
page.use()

# %%
# Takeaways
# ---------
#
# - Count launches as well as bytes. For many small tensors, launches decide.
# - A list is no reason for a loop. Addresses are numbers that a kernel reads.
# - Compute once what rarely changes, and compare in each step whether it did.
# - Small steps need digits: keep a float32 master, or round by chance.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it says where. Fix it and run
# the cell again. No GPU is needed.
#
# 1. Decoupled
# ~~~~~~~~~~~~
#
# This step adds the decay to the gradient, as Adam did before AdamW. Then the
# averages contain it. Decouple it.


def decoupled(p, g, m, v, t, lr, decay):
    g = g + decay * p
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    root = (v / (1 - 0.999**t)).sqrt() + 1e-8
    return p - lr / (1 - 0.9**t) * m / root, m, v


def decoupled_by_torch(p, g, m, v, t, lr, decay):
    p, m, v = p * (1 - lr * decay) / (1 - lr * 0.1), m.clone(), v.clone()
    return adamw_loop([p], [g], [m], [v], t, lr)


some, few = page.stress(50, 1)[:4], page.stress(9, 1, seed=1)[:4]
page.exercise(
    decoupled,
    decoupled_by_torch,
    [(*some, 3, 0.1, 0.3), (*few, 1, 0.01, 0.5)],
)

# %%
# 2. A list with gaps
# ~~~~~~~~~~~~~~~~~~~
#
# Which chunks does a list have? The last one of a tensor may be shorter, and a
# tensor may have none. Return pairs of tensor and chunk, as rows.


def pairs(sizes, block):
    rows = [(i, c) for i, n in enumerate(sizes) for c in range(n // block)]
    return torch.tensor(rows).view(-1, 2)


def pairs_by_number(sizes, block):
    chunks = torch.tensor(chunks_of(sizes, block))
    return torch.stack([chunks >> 32, chunks & 0xFFFFFFFF], 1)


page.exercise(
    pairs, pairs_by_number, [([5, 0, 8, 1], 4), ([16], 4), ([3, 3], 8)]
)

# %%
# 3. Clipping
# ~~~~~~~~~~~
#
# Gradients whose norm exceeds a limit are multiplied by limit / norm. Another
# kernel left the norm on the GPU, and reading it would make Python wait. Load
# it in ``one_tensor`` instead. This attempt ignores the norm.


def clipped(p, g, m, v, norm, limit, t, lr):
    own = [x.clone() for x in (p, g, m, v)]
    return adamw_per_tensor(*([x] for x in own), t, lr)[0]


def clipped_by_torch(p, g, m, v, norm, limit, t, lr):
    p, g = p.clone(), g * (limit / norm).clamp(max=1)
    return adamw_loop([p], [g], [m.clone()], [v.clone()], t, lr)[0]


norms = [torch.full((1,), norm, device=some[0].device) for norm in (4.0, 0.5)]
page.exercise(
    clipped,
    clipped_by_torch,
    [(*some, norms[0], 1.0, 3, 0.1), (*few, norms[1], 1.0, 3, 0.1)],
)

# %%
# Evidence
# --------

page.footer()
