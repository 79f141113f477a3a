"""
K-means over several GPUs
=========================

Each GPU has a share of the points, and all have the same centres. In each
iteration they exchange a few bytes and wait for each other. We write the
exchange as one Triton kernel that stores to the memory of other GPUs.

You will learn

- what several GPUs have to exchange, and what it costs,
- how a kernel reads and writes another GPU's memory,
- how to send data and the news of its arrival in one word.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_303_kmeans`. No GPU is
needed: without one, kernels run in Triton's interpreter, and times come from
a record.
"""

import functools

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["k-means", "several GPUs", "NCCL", "NVLink"]
import torch
import torch.distributed as dist
import triton
import triton.language as tl

page = lesson.open("plot_402_two_gpus", gpus=2)
page.verdict()

# %%
# What has to travel
# ------------------
#
# An iteration labels each point with its nearest centre, and moves each centre
# to the mean of its points. A GPU can label its points alone. A mean needs the
# points of all: for each of K centres a sum of D coordinates, and a count.
# These are K (D + 1) numbers, however many points there are.
#
# ``torchrun`` starts one process per GPU. Each process is a *rank*, a number
# from 0, and runs this program. NCCL, NVIDIA's library for communication, adds
# the sums of all ranks:


def by_nccl(points, centres):
    labels, parts = torch.ops.fusebook.kmeans_sums(
        points, centres, torch.uint8
    )
    total = parts.sum(0, dtype=torch.float64, keepdim=True)
    dist.all_reduce(total)  # K (D + 1) numbers travel
    return labels, torch.ops.fusebook.kmeans_means(total, centres)


# %%
# ``parts`` [P, K, D + 1] are sums of groups of points, so three launches
# follow: one adds the parts, one adds the ranks, and one divides. For a few
# bytes, latency is all that counts. One kernel can do the three, so **we
# predict** that it saves most of what NCCL adds to an iteration.

# %%
# .. _gpus-flag:
#
# Step 1: store, then raise a flag {gain flag at N=4}
# ---------------------------------------------------
#
# N GPUs of one machine can map each other's memory. To a kernel, ``memory[r]``
# is a pointer like any other; a store to it goes over NVLink, their link. This
# *symmetric memory* has the same shape on every GPU. Here it has two places
# for the sums of each sender: for odd and for even iterations. A program owns
# four centres: it adds their parts, sends the sums, and writes the means.


@triton.jit
def tile(K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sums of BLOCK_K centres: D of coordinates, and a count."""
    j = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    a = tl.arange(0, BLOCK_D)[None, :]
    return j, a, (j < K) & (a <= D)


@triton.jit
def add_parts(parts_ptr, PARTS, SIZE, at, inside, GROUP: tl.constexpr):
    own = tl.zeros(at.shape, tl.float64)
    for first in range(0, PARTS, GROUP):
        part = first + tl.arange(0, GROUP)[:, None, None]
        live = (part < PARTS) & inside[None]
        x = tl.load(parts_ptr + part * SIZE + at[None], mask=live, other=0.0)
        own += tl.sum(x.to(tl.float64), 0)
    return own


@triton.jit
def divide(out_ptr, old_ptr, total, j, a, inside, D):
    """Means; a centre without points stays where it is."""
    count = tl.sum(tl.where(a == D, total, 0.0), 1)[:, None]
    at, inside = j * D + a, inside & (a < D)
    old = tl.load(old_ptr + at, mask=inside, other=0.0).to(tl.float64)
    mean = tl.where(count > 0, total / count, old)
    tl.store(out_ptr + at, mean.to(out_ptr.dtype.element_ty), mask=inside)


# %%
# A rank stores its sums to all others, and then raises a flag there: the
# number of the iteration. *Release* means that the flag arrives after all
# stores before it. A rank that has read its flags with *acquire* also sees
# what was stored before them. ``memory[r]`` is [sender, turn, K, D + 1, 2]: a
# place for a flag follows each sum. Step 1 uses one per program, the first.


@triton.jit
def acquired(flag_ptr):  # adding 0 is a load that acquires
    return tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")


@triton.jit
def means_by_flag(
    out_ptr, memory, parts_ptr, old_ptr, turns_ptr, PARTS, K, D,
    ME: tl.constexpr, WAIT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    p, SIZE = tl.program_id(0), K * (D + 1)
    j, a, inside = tile(K, D, BLOCK_K, BLOCK_D)
    at = j * (D + 1) + a
    own = add_parts(parts_ptr, PARTS, SIZE, at, inside, GROUP)
    times = tl.load(turns_ptr + p).to(tl.int64) + 1
    place, flag = 2 * (times % 2) * SIZE, 2 * p * BLOCK_K * (D + 1) + 1
    for r in tl.static_range(len(memory)):
        if r != ME:
            to = memory[r] + 4 * ME * SIZE + place
            tl.store(to + 2 * at, own.to(tl.int64, bitcast=True), mask=inside)
    tl.debug_barrier()  # all threads have stored
    for r in tl.static_range(len(memory)):
        if r != ME:
            to = memory[r] + 4 * ME * SIZE + place
            tl.atomic_xchg(to + flag, times, sem="release", scope="sys")
    if WAIT:
        total = tl.zeros(own.shape, tl.float64)
        for r in tl.static_range(len(memory)):
            if r == ME:
                total += own
            else:
                come = memory[ME] + 4 * r * SIZE + place
                while acquired(come + flag) < times:
                    pass
                bits = tl.load(come + 2 * at, mask=inside, other=0)
                total += bits.to(tl.float64, bitcast=True)
        divide(out_ptr, old_ptr, total, j, a, inside, D)
        tl.debug_barrier()  # all threads have read the number
        tl.store(turns_ptr + p, times.to(tl.int32))


# %%
# All ranks add in the order of ranks, so all get the same bits. The kernel
# counts its iterations itself, so it runs in a CUDA graph too. Two turns are
# enough: a fast sender may write sums of t + 1 while a GPU reads those of t.
# For t + 2 it needs that GPU's sums of t + 1, which are sent after reading t.


def launch(kernel, memory, turns, rank, parts, centres, wait=True):
    (K, D), out = centres.shape, torch.empty_like(centres)
    block = triton.next_power_of_2(D + 1)
    many = min(triton.next_power_of_2(len(parts)), max(1, 512 // block))
    kernel[(triton.cdiv(K, 4),)](
        out, memory, parts, centres, turns, len(parts), K, D, ME=rank,
        WAIT=wait, GROUP=many, BLOCK_K=4, BLOCK_D=block, num_warps=1,
    )  # fmt: skip
    return out


# %%
# To check the kernel without several GPUs, one GPU does their work in turn.
# All ranks send before one of them waits.


def sums(points, centres):
    labels = torch.cdist(points.double(), centres.double()).argmin(1)
    ones = torch.cat((points, torch.ones_like(points[:, :1])), 1).double()
    total = ones.new_zeros(len(centres), ones.shape[1])
    return labels, total.index_add_(0, labels, ones)[None]


def in_turn(kernel, points, centres, label_dtype, ranks=3):
    K, D = centres.shape
    own = [sums(share, centres) for share in points.chunk(ranks)]
    at = {"device": points.device}
    place = ranks, 2, K, D + 1, 2
    memory = [torch.zeros(place, dtype=torch.int64, **at) for _ in own]
    turns = torch.zeros(ranks, K, dtype=torch.int32, **at)
    for wait in (False, True):
        for r, (_, parts) in enumerate(own):
            out = launch(
                kernel, tuple(memory), turns[r], r, parts, centres, wait
            )
    return torch.cat([labels for labels, _ in own]).to(label_dtype), out


def kmeans_flag(points, centres, label_dtype):
    return in_turn(means_by_flag, points, centres, label_dtype)


given = page.stress(2100, 2, 2)  # points, coordinates, centres
page.check(kmeans_flag, *given)

# %%
# .. _gpus-words:
#
# Step 2: a flag in every word {gain words at N=4}
# ------------------------------------------------
#
# A flag waits until all stores have arrived. That is a trip over NVLink and
# back, before the flag itself travels. But a word of 64 bits arrives as a
# whole. So each word carries half of a sum and the number of the iteration:

page.picture.words()

# %%
# A rank that finds the number in a word has that half of the sum, and needs no
# flag. NCCL calls this its *low-latency* protocol. It doubles the few bytes.


@triton.jit
def means_by_words(
    out_ptr, memory, parts_ptr, old_ptr, turns_ptr, PARTS, K, D,
    ME: tl.constexpr, WAIT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    LOW: tl.constexpr = 0xFFFFFFFF
    p, SIZE = tl.program_id(0), K * (D + 1)
    j, a, inside = tile(K, D, BLOCK_K, BLOCK_D)
    at = j * (D + 1) + a
    own = add_parts(parts_ptr, PARTS, SIZE, at, inside, GROUP)
    times = tl.load(turns_ptr + p).to(tl.int64) + 1
    place = 2 * (times % 2) * SIZE + 2 * at
    bits = own.to(tl.int64, bitcast=True)
    high, low = (bits & ~LOW) | times, (bits << 32) | times
    for r in tl.static_range(len(memory)):
        if r != ME:
            to = memory[r] + 4 * ME * SIZE + place
            # An exchange is a store of whole words, in no order.
            tl.atomic_xchg(to, high, inside, sem="relaxed", scope="sys")
            tl.atomic_xchg(to + 1, low, inside, sem="relaxed", scope="sys")
    if WAIT:
        total = tl.zeros(own.shape, tl.float64)
        for r in tl.static_range(len(memory)):
            if r == ME:
                total += own
            else:
                come = memory[ME] + 4 * r * SIZE + place
                late = 1
                while late != 0:  # until every word has this number
                    high = tl.load(come, inside, times, volatile=True)
                    low = tl.load(come + 1, inside, times, volatile=True)
                    off = ((high ^ times) | (low ^ times)) & LOW
                    late = tl.max(tl.max((off != 0).to(tl.int32), 1), 0)
                bits = (high & ~LOW) | ((low >> 32) & LOW)
                total += bits.to(tl.float64, bitcast=True)
        divide(out_ptr, old_ptr, total, j, a, inside, D)
        tl.debug_barrier()
        tl.store(turns_ptr + p, times.to(tl.int32))


def kmeans_words(points, centres, label_dtype):
    return in_turn(means_by_words, points, centres, label_dtype)


page.check(kmeans_words, *given)

# %%
# On several GPUs
# ---------------
#
# All ranks make their memory together. ``rendezvous`` maps the memory of each
# GPU into all processes.


class SharedMeans:
    def __init__(self, kernel, k, d):
        import torch.distributed._symmetric_memory as symmetric

        world, me = range(dist.get_world_size()), dist.get_rank()
        at = {"device": torch.device("cuda", torch.cuda.current_device())}
        place, dtype = (len(world), 2, k, d + 1, 2), torch.int64
        own = symmetric.empty(place, dtype=dtype, **at).zero_()
        handle = symmetric.rendezvous(own, dist.group.WORLD)
        self.memory = tuple(
            own if r == me else handle.get_buffer(r, place, dtype)
            for r in world
        )
        self.turns = torch.zeros(k, dtype=torch.int32, **at)
        self.kernel = kernel
        torch.cuda.synchronize()
        dist.barrier()  # all are zero before one is written

    def __call__(self, points, centres):
        labels, parts = torch.ops.fusebook.kmeans_sums(
            points, centres, torch.uint8
        )
        given = self.memory, self.turns, dist.get_rank(), parts, centres
        return labels, launch(self.kernel, *given)


# %%
# In *weak scaling* each of N GPUs has as many points as a single GPU, so the
# ideal is the same time. In *strong scaling* all share the points of a single
# one, so the ideal is its time over N. The table has the share of the ideal.
# Iterations are in a CUDA graph, and the slowest rank counts. Strong scaling
# shortens the labelling, not the exchange, so step 2 gains most there.

page.steps(
    nccl=by_nccl,
    flag=functools.partial(SharedMeans, means_by_flag),
    words=functools.partial(SharedMeans, means_by_words),
)

# %%
# To start the same ranks by hand, on one machine or on two:
#
# .. code-block:: bash
#
#    torchrun --nproc-per-node 2 plot_402_two_gpus.py
#    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 \
#        --master-addr first.machine --master-port 29500 plot_402_two_gpus.py
#
# The second machine takes ``--node-rank 1``. Ranks on different machines, or
# on GPUs that cannot map each other's memory, add by NCCL.

# %%
# Is it correct?
# --------------
#
# A check is worth what it catches. This implementation averages the centres
# of all ranks, as training averages gradients. It passes where all ranks have
# the same number of points in each cluster:


def averaged(points, centres, label_dtype):
    own = [kmeans_words(p, centres, label_dtype) for p in points.chunk(3)]
    labels, means = zip(*own, strict=True)
    return torch.cat(labels), torch.stack(means).mean(0)


alike = (torch.cat([given[0][:300]] * 3), *given[1:])
page.catches(averaged, alike=alike, given=given)

# %%
# On GPUs, checks split points between ranks where a Triton program ends or
# anywhere, or give one rank all. Centres of ten iterations are compared bit by
# bit, with other ranks and one GPU. In a thousand more, each rank is delayed
# in turn. For the last finding, one process runs k-means on two GPUs, each
# alone.

page.findings()

# %%
# .. _gpus-use:
#
# When to use it
# --------------
#
# Each rank chooses its GPU by ``torch.cuda.set_device``, and joins the others
# by ``dist.init_process_group("nccl")``. It makes the step once, with all
# others, and calls it with its own points. Below, ``rank`` is
# ``dist.get_rank()`` and ``world`` is ``dist.get_world_size()``.
#
# .. code-block:: python
#
#    step = fusebook.SharedKMeans(k, d)
#    mine = fusebook.kmeans_share(len(points), rank, world)
#    for _ in range(iterations):
#        labels, centres = step(points[mine], centres)

mine = fusebook.kmeans_share(len(given[0]), rank=1, world=3)
page.use()

# %%
# Takeaways
# ---------
#
# - Look for what has to travel. K (D + 1) numbers do, and no point.
# - A kernel that has to run anyway can also send and receive.
# - A word that carries its own flag needs no second message.
# - Add in the order of ranks, and all ranks have the same bits.
# - With one process for several GPUs, the CPU may be the limit. Start one
#   process for each GPU, or replay graphs.
#
# Exercises
# ---------
#
# Each function is incorrect. Fix it and run the cell again. No GPU is needed.
#
# 1. Words
# ~~~~~~~~
#
# ``received`` takes a float64 number apart and puts it together again. Numbers
# in int64 are signed, so a shift to the right fills with the sign. Fix it.

LOW = 0xFFFFFFFF


def received(x, times):
    bits = x.view(torch.int64)
    high, low = (bits & ~LOW) | times, (bits << 32) | times
    return ((high & ~LOW) | (low >> 32)).view(torch.float64)


def received_whole(x, times):
    return x.clone()


rng = torch.Generator().manual_seed(0)
x = torch.randn(50, generator=rng, dtype=torch.float64)
page.exercise(received, received_whole, [(x, 1), (-x, 7)])

# %%
# 2. Weights
# ~~~~~~~~~~
#
# Each point has a weight, and a centre is the weighted mean. What does a rank
# send? This attempt divides by the number of points.


def weighted(points, weights, labels, K):
    total = points.new_zeros(K, points.shape[1] + 1)
    for p, w, at in zip(
        points.chunk(3), weights.chunk(3), labels.chunk(3), strict=True
    ):
        own = torch.cat((p * w[:, None], torch.ones_like(p[:, :1])), 1)
        total.index_add_(0, at, own)  # what all ranks add
    return total[:, :-1] / total[:, -1:]


def weighted_at_once(points, weights, labels, K):
    member = torch.nn.functional.one_hot(labels, K).to(points)
    member *= weights[:, None]
    return member.T @ points / member.sum(0)[:, None]


labels, weights = torch.arange(12) % 2, torch.arange(1.0, 13.0)
at = {"device": given[0].device}
few = given[0][:12], weights.to(**at), labels.to(**at), 2
page.exercise(weighted, weighted_at_once, [few])

# %%
# Evidence
# --------

page.footer()
