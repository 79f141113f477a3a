"""
Does fusing communication pay?
==============================

A transformer layer that is split over GPUs leaves a part of its result on
each. NCCL, NVIDIA's library for communication, adds the parts (*all-reduce*),
and a kernel normalises the sum. We write one kernel that reads the parts of
the other GPUs itself, and ask at which sizes it pays.

You will learn

- what an all-reduce costs for few tokens and for many,
- how programs on different GPUs wait for each other,
- how two buffers save a barrier, and which test notices that it is missing.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_402_two_gpus`. No GPU is
needed: without one, kernels run in Triton's interpreter, and times come from
a record.
"""

import functools

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["all-reduce", "RMSNorm", "several GPUs", "NVLink"]
import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl

page = lesson.open("plot_403_allreduce_norm", gpus=2)
page.verdict()

# %%
# What the layer needs
# --------------------
#
# In *tensor parallelism*, each of G GPUs multiplies with a piece of the
# weights. The result is a sum of G parts x. The layer adds it to a residual r,
# and normalises each row:
#
# .. math::
#
#    h = r + \sum_g x_g, \qquad
#    y = \frac{h}{\sqrt{\operatorname{mean}(h^2) + \epsilon}} \, w
#
# Each of M rows is a token with N elements. Every GPU needs all of h and y.


def reduce_eager(x, residual, weight, eps=1e-6):
    dist.all_reduce(x)  # over NVLink, their link; write MN
    h = residual + x  # read 2MN, write MN
    y = F.rms_norm(h, weight.shape, weight, eps)  # read MN, write MN
    return y, h


# %%
# NCCL's all-reduce leaves the sum in x on every GPU. For few tokens, latency
# is the limit: three launches, and messages that go over and come back. One
# kernel needs one launch, one message, and one read. For many tokens the link
# is the limit, and each of two GPUs must get all that the other has. So **we
# predict** a gain for few tokens, and a tie for many.

# %%
# .. _allreduce-norm:
#
# Step 1: one norm {gain norm at M=64, N=4096}
# --------------------------------------------
#
# First we fuse what follows the all-reduce, as in :doc:`plot_104_norms`. A
# program takes rows in turn. It reads any number of parts, here one, the sum
# of NCCL, and writes h and y.


@triton.jit
def norm_row(
    y_ptr, h_ptr, parts, residual_ptr, weight, row, N, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside, i = at < N, row * N + at
    h = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(len(parts)):  # a part may be on another GPU
        h += tl.load(parts[r] + i, mask=inside, other=0.0).to(tl.float32)
    h += tl.load(residual_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(h_ptr + i, h.to(h_ptr.dtype.element_ty), mask=inside)
    y = h * tl.rsqrt(tl.sum(h * h, 0) / N + eps) * weight
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_rows(
    y_ptr, h_ptr, parts, residual_ptr, weight_ptr, M, N, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    while row < M:
        norm_row(y_ptr, h_ptr, parts, residual_ptr, weight, row, N, eps, BLOCK)
        row += tl.num_programs(0)


def programs():
    return 132  # the multiprocessors of an H100 or H200


def add_norm(x, residual, weight, eps=1e-6):
    y, h, (M, N) = torch.empty_like(x), torch.empty_like(x), x.shape
    norm_rows[(min(M, programs()),)](
        y, h, (x,), residual, weight, M, N, eps,
        BLOCK=triton.next_power_of_2(N), num_warps=8,
    )  # fmt: skip
    return y, h


def reduce_norm(x, residual, weight, eps=1e-6):
    dist.all_reduce(x)
    return add_norm(x, residual, weight, eps)


given = page.stress(37, 300)  # x, residual, weight
page.check(add_norm, *given)

# %%
# .. _allreduce-twice:
#
# Step 2: all in one kernel, on 2 GPUs {gain twice at M=64, N=4096}
# -----------------------------------------------------------------
#
# Now x is *symmetric memory*, which all GPUs of a machine map. ``parts[r]`` is
# the part of GPU r, and a load from it goes over NVLink. But it may be read
# only when it is complete, and overwritten only when all have read it. So
# program p meets program p of all other GPUs, before it reads and after. On
# four GPUs this step is slower than step 1, see the table.

page.picture.meeting()

# %%
# To meet, a program writes a number to its flag in the memory of each other
# GPU. *Release* means that all its earlier writes arrive before the flag. Then
# it reads its own flags, with *acquire*, until the other GPUs have come as
# often.


@triton.jit
def acquired(flag_ptr):  # adding 0 is a load that acquires
    return tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")


@triton.jit
def meet(flags, times, SLOTS, ME: tl.constexpr, WAIT: tl.constexpr):
    p = tl.program_id(0)
    tl.debug_barrier()  # all threads have read and written
    for r in tl.static_range(len(flags)):
        if r != ME:
            flag = flags[r] + ME * SLOTS + p
            tl.atomic_xchg(flag, times, sem="release", scope="sys")
    if WAIT:
        for r in tl.static_range(len(flags)):
            if r != ME:
                while acquired(flags[ME] + r * SLOTS + p) < times:
                    pass


@triton.jit
def reduce_rows(
    y_ptr, h_ptr, parts, residual_ptr, weight_ptr, turns_ptr, flags,
    M, N, eps, SLOTS,
    ME: tl.constexpr, TWICE: tl.constexpr, WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    p, at = tl.program_id(0), tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    times = tl.load(turns_ptr + p) + 1
    meet(flags, times, SLOTS, ME, WAIT)  # all parts are complete
    row = p.to(tl.int64)
    while row < M:
        norm_row(y_ptr, h_ptr, parts, residual_ptr, weight, row, N, eps, BLOCK)
        row += tl.num_programs(0)
    if TWICE:
        times += 1
        meet(flags, times, SLOTS, ME, WAIT)  # all have read this part
    tl.debug_barrier()
    tl.store(turns_ptr + p, times)


# %%
# All GPUs add the parts in the same order, so all get the same bits. Each
# computes all rows: to compute a row is cheaper than to send it.


def launch(parts, flags, turns, me, residual, weight, eps, twice, wait=True):
    y, h = torch.empty_like(residual), torch.empty_like(residual)
    M, N = residual.shape
    reduce_rows[(min(M, programs()),)](
        y, h, parts, residual, weight, turns, flags, M, N, eps, programs(),
        ME=me, TWICE=twice, WAIT=wait, BLOCK=triton.next_power_of_2(N),
        num_warps=8,
    )  # fmt: skip
    return y, h


# %%
# To check it without several GPUs, one GPU does their work in turn. All raise
# their flags before one of them waits.


def in_turn(x, residual, weight, twice, ranks=3):
    owner = torch.arange(x.shape[1], device=x.device) % ranks
    parts = tuple(torch.where(owner == r, x, 0) for r in range(ranks))
    at = {"dtype": torch.int32, "device": x.device}
    flags = tuple(torch.zeros(ranks, programs(), **at) for _ in parts)
    for wait in (False, True):
        for r in range(ranks):
            turns = torch.zeros(programs(), **at)
            given = parts, flags, turns, r, residual, weight, 1e-6
            found = launch(*given, twice, wait)
    return found


def reduce_twice(x, residual, weight):
    return in_turn(x, residual, weight, twice=True)


page.check(reduce_twice, *given)

# %%
# .. _allreduce-once:
#
# Step 3: two buffers in turn, on 2 GPUs {gain once at M=64, N=4096}
# ------------------------------------------------------------------
#
# The second meeting protects a part that others may still read. If the next
# part is written to other memory, there is nothing to protect. When all GPUs
# meet in the next call, each has finished this call. So this buffer is free
# for the one after.


class Reduce:
    """Parts of the largest size in symmetric memory, and flags."""

    def __init__(self, M, N, twice):
        import torch.distributed._symmetric_memory as symmetric

        def shared(shape, dtype):
            own = symmetric.empty(shape, dtype=dtype, device=gpu).zero_()
            handle = symmetric.rendezvous(own, dist.group.WORLD)
            return tuple(
                own if r == self.me else handle.get_buffer(r, shape, dtype)
                for r in range(world)
            )

        gpu = torch.device("cuda", torch.cuda.current_device())
        self.me, world = dist.get_rank(), dist.get_world_size()
        self.twice, self.turn = twice, 0
        buffers = 1 if twice else 2
        self.parts = [shared((M, N), torch.bfloat16) for _ in range(buffers)]
        self.flags = shared((world, programs()), torch.int32)
        self.turns = torch.zeros(programs(), dtype=torch.int32, device=gpu)
        torch.cuda.synchronize()
        dist.barrier()  # all flags are zero before one is raised

    def part(self, rows):
        return self.parts[self.turn][self.me][:rows]

    def __call__(self, residual, weight, eps=1e-6):
        parts = tuple(part[: len(residual)] for part in self.parts[self.turn])
        self.turn = (self.turn + 1) % len(self.parts)
        given = self.flags, self.turns, self.me, residual, weight, eps
        return launch(parts, *given, self.twice)


def reduce_once(x, residual, weight):
    return in_turn(x, residual, weight, twice=False)


page.check(reduce_once, *given)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is that of a call among many in a CUDA graph, and the slowest GPU
# counts. All steps have 132 programs at most, one per multiprocessor. Those of
# steps 2 and 3 wait for each other and must run at once. With many tokens, 132
# are too few for step 1, so it is slower than eager.

page.steps(
    eager=reduce_eager,
    norm=reduce_norm,
    twice=functools.partial(Reduce, twice=True),
    once=functools.partial(Reduce, twice=False),
)

# %%
# The figure compares with NCCL and the fastest norm at each size. *Two-shot*
# is PyTorch's all-reduce on symmetric memory, with the library's norm: each
# GPU adds a share of the rows, and fetches the other shares. In *one-shot*,
# each GPU reads all parts.

page.plot("lines", over="M")

# %%
page.findings()

# %%
# Two GPUs must exchange all parts in any case, and a kernel can only hide the
# rest. Per row it moves one row over the link, and four in its own memory,
# which is several times as fast. These overlap with other rows, except at the
# end. In the chain, the norm starts only when the exchange is over. So on two
# GPUs fusing gains more than predicted for many tokens.

# %%
# Is it correct?
# --------------
#
# This implementation does not wait. Each GPU writes its part and reads all
# others at once. It passes where the parts are those of the call before, as
# in a benchmark that repeats its inputs:

memory = {}


def careless(x, residual, weight, ranks=3):
    owner = torch.arange(x.shape[1], device=x.device) % ranks
    for r in range(ranks):
        memory[r] = torch.where(owner == r, x, 0)
        old = [memory.get(k, torch.zeros_like(x)) for k in range(ranks)]
        if r == 0:  # the first GPU does not wait for the others
            found = add_norm(sum(old), residual, weight)
    return found


careless(*given)
page.catches(careless, repeated=given, new=page.stress(37, 300, seed=1))

# %%
# So each of a thousand repeats on the GPUs has new parts, and one rank, drawn
# by lot, sleeps before it writes its part. Sums are compared bit by bit.

# %%
# .. _allreduce-use:
#
# When to use it
# --------------
#
# The matmul of a layer writes its part to the memory of the next sum:
#
# .. code-block:: python
#
#    reduce = fusebook.AllReduceNorm(4096, 8192)  # of the largest part
#    torch.mm(a, b, out=reduce.part(rows))
#    y, h = reduce(residual, weight)
#
# All ranks make and call it together. It holds two parts of the largest size
# on each GPU. A single GPU needs no exchange: call ``fusebook.add_rms_norm``.

y, h = fusebook.add_rms_norm(*given)
page.use()

# %%
# Takeaways
# ---------
#
# - Count what goes over the link before you fuse. A kernel can only hide the
#   rest behind it.
# - Fusing saves launches, messages, and passes over memory.
# - Compute everywhere what is cheaper to compute than to send.
# - Do not end with a barrier where the next call begins with one.
# - Take the wait out once, and see the check fail.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it says where. Fix it and run
# the cell again. No GPU is needed.
#
# 1. Two-shot
# ~~~~~~~~~~~
#
# Each of G ranks adds a share of the rows, and all fetch the other shares.
# ``two_shot`` gets the parts [G, M, N] and returns what each rank has in the
# end. This attempt leaves out the second step.


def two_shot(parts):
    out = torch.zeros_like(parts)
    for r, rows in enumerate(torch.arange(parts.shape[1]).chunk(len(parts))):
        out[r, rows] = parts[:, rows].sum(0)
    return out


def all_reduced(parts):
    return parts.sum(0, keepdim=True).expand_as(parts)


rng = torch.Generator().manual_seed(0)
parts = torch.randn(4, 8, 5, generator=rng)
page.exercise(two_shot, all_reduced, [(parts,), (parts[:2],)])

# %%
# 2. How often to meet
# ~~~~~~~~~~~~~~~~~~~~
#
# A log has what happens to one buffer, in the order of time: ``w`` where its
# owner writes, ``r`` where the other GPU reads. The k-th read must see the
# k-th write. Count those that do not. This attempt only finds early reads.


def spoiled(log):
    wrong = sum(a == "r" and "w" not in log[:i] for i, a in enumerate(log))
    return torch.tensor([wrong])


def spoiled_by_numbers(log):
    counted = [(log[:i].count("w"), log[:i].count("r")) for i in range(9)]
    reads = [pair for pair, a in zip(counted, log, strict=False) if a == "r"]
    return torch.tensor([sum(w != r + 1 for w, r in reads)])


page.exercise(spoiled, spoiled_by_numbers, [("wrwrwr",), ("rwwrr",)])

# %%
# Evidence
# --------

page.footer()
