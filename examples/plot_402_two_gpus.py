# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
K-means over several GPUs
=========================

When the points no longer fit one GPU, or one GPU is no longer fast enough:
each GPU has a share of the points, and all have the same centres. This page
writes the iteration for any number of GPUs, asks whether the result is the
same to the bit, and measures how much of a second GPU is left when the two
have to agree after each iteration. Its last part measures what a manual of
2013 says about one user and several GPUs.

With as many GPUs as it asks for, the page starts one process for each and
measures. With fewer, everything is replayed from the record of a pair that is
named at the end.

For whom: those who have two GPUs or more, and data that can be split by rows.

Read before: 003, 303.
"""

# %%
# The problem
# -----------
#
# An iteration of k-means labels each point with its nearest centre and moves
# each centre to the mean of its points. The first half knows nothing of other
# points. The second needs, of all points, k sums of d coordinates and k
# counts: k (d + 1) numbers, however many points there are. So the points may
# lie anywhere. Each GPU labels its own and adds them up, the sums of all GPUs
# are added, and every GPU divides. Only these few bytes travel.

# sphinx_gallery_tags = ["k-means", "several GPUs", "NCCL", "NVLink"]
import time

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots
from fusebook.cards.kmeans import KMEANS_STEP
from fusebook.measure.inputs import generator
from fusebook.page import (
    Folded,
    Kernels,
    claim,
    claims,
    downloads,
    enough,
    holds,
    measured,
    options,
    provenance,
    ranks,
    say,
    table,
    target,
    timed,
    work,
)

import pandas as pd
import torch
import torch.distributed as dist

asked = options(gpus=2)

# %%
# The program
# -----------
#
# One process a GPU
# ~~~~~~~~~~~~~~~~~
#
# The processes run the same lines. Each is a :term:`rank`, a number from 0,
# and there are *world* of them. What differs from rank to rank is which points
# it has. ``torchrun`` starts them, tells each its rank by environment
# variables, and ends the others when one fails. All the rest is
# `torch.distributed`: the processes find each other, and from then on a sum
# over all of them is a call.
#
# The step on one GPU ends in parts of sums, one of each group of programs, and
# a small kernel that adds the parts and divides. Between the two the other
# GPUs come in:


def by_nccl(points, centres):
    """An iteration; the sums of all GPUs are added by NCCL."""
    labels, parts = torch.ops.fusebook.kmeans_sums(
        points, centres, torch.uint8
    )
    total = parts.sum(0, dtype=torch.float64, keepdim=True)
    dist.all_reduce(total)
    return labels, torch.ops.fusebook.kmeans_means(total, centres)


# %%
# Without a library between
# ~~~~~~~~~~~~~~~~~~~~~~~~~
#
# For two centres in the plane there are six numbers to add, by NCCL in three
# launches where one would do. GPUs of one machine can read and write each
# other's memory, over NVLink here. PyTorch maps that memory into each process
# (:term:`symmetric memory`), and a kernel stores to it as to its own. So the
# kernel that adds the parts can do all of it: add its own, send the sums to
# the others, wait for theirs, divide.
#
# How does it know that a sum has come? A flag that is written after the sum
# would do. But it may be sent only when the sum is known to have come, which
# takes a trip there and back. So the flag travels with the data, in each word.
# A word of 64 bits arrives whole. Half of it is half of a sum, the other half
# is the number of the iteration; whoever reads that number in it has the sum.
# NCCL calls this its low-latency protocol, :term:`LL protocol`. It doubles the
# bytes, and of these there are few.
#
# The kernel counts iterations itself, so that a CUDA graph of it can be
# replayed; and nobody has to reset a flag.

Folded("The library's kernels", Kernels(fusebook.SharedKMeans))

# %%
# Two buffers for the sums take turns. A rank that sends its sums for iteration
# t + 1 has received the others' sums for t. They sent these after they had
# read the buffer of t - 1, which is the one that t + 1 overwrites.
#
# Shares
# ~~~~~~
#
# Points are drawn where they are needed: a rank draws its own. A share is cut
# where a program's points end, for a reason that comes below.


def drawn(n, d, k, seed):
    """n points around k middles, and centres not far from these."""
    rng = generator(0)
    at = {"generator": rng, "device": rng.device}
    middle = 3 * torch.randn(k, d, **at)
    start = middle + 0.3 * torch.randn(k, d, **at)
    rng.manual_seed(seed)
    points = torch.empty(n, d, device=rng.device)
    for some in points.split(10_000_000):
        label = torch.randint(k, (len(some),), **at)
        some.copy_(torch.randn(len(some), d, **at) + middle[label])
    return points, start


def on_gpus(cases, handful=((9000, 2, 2), (40, 20, 5))):
    """The cases, or a handful of points where kernels are interpreted."""
    return cases if generator(0).device.type == "cuda" else handful


# %%
# How the ranks measure
# ~~~~~~~~~~~~~~~~~~~~~
#
# *Weak scaling*: each GPU has as many points as one alone had. *Strong
# scaling*: all together have as many as one alone had. One GPU alone runs
# ``kmeans_step``, which knows of no others. Iterations stand in a CUDA graph,
# so that only the device's time is measured, and the slowest rank counts.
# Points are more than the L2 cache holds: nothing is flushed. *NCCL* is the
# function above, *halves* the one below, and *fusebook* the library's
# ``SharedKMeans``, which sends words where GPUs reach each other's memory.

CASES = ((20_000_000, 2, 2), (100_000_000, 2, 2), (2_000_000, 64, 256))


def in_halves(points, centres):
    """The sums of one half are added while the other half is labelled."""
    halves = points.chunk(2)
    labels, parts = torch.ops.fusebook.kmeans_sums(
        halves[0], centres, torch.uint8
    )
    first = parts.sum(0, dtype=torch.float64, keepdim=True)
    sent = dist.all_reduce(first, async_op=True)
    others, parts = torch.ops.fusebook.kmeans_sums(
        halves[1], centres, torch.uint8
    )
    second = parts.sum(0, dtype=torch.float64, keepdim=True)
    dist.all_reduce(second)
    sent.wait()
    total = torch.cat([first, second])
    return (labels, others), torch.ops.fusebook.kmeans_means(total, centres)


def iterations(n, d, k):
    """An iteration in each way, by the scaling and the way."""
    points, centres = drawn(n, d, k, 100 + dist.get_rank())
    step = fusebook.SharedKMeans(k, d)

    def chosen(share):
        return step(share, centres, label_dtype=torch.uint8)

    def alone():
        return torch.ops.fusebook.kmeans_step(points, centres, torch.uint8)

    share = points[: n // dist.get_world_size()]
    return {
        ("one GPU", "alone"): alone,
        ("weak", "NCCL"): lambda: by_nccl(points, centres),
        ("weak", "halves"): lambda: in_halves(points, centres),
        ("weak", "chosen"): lambda: chosen(points),
        ("strong", "NCCL"): lambda: by_nccl(share, centres),
        ("strong", "halves"): lambda: in_halves(share, centres),
        ("strong", "chosen"): lambda: chosen(share),
    }


def scaling():
    rows, world = [], dist.get_world_size()
    for n, d, k in on_gpus(CASES):
        calls = max(2, 200_000_000 // (n * d))
        found = timed(iterations(n, d, k), calls=calls, repeat=11)
        for (kind, way), us in found.items():
            many = n * world if kind == "weak" else n
            rows.append((n, d, k, kind, way, world, many, us))
    columns = ["n", "d", "k", "scaling", "way", "GPUs", "points", "us"]
    return pd.DataFrame(rows, columns=columns)


# %%
# And how they check
# ~~~~~~~~~~~~~~~~~~
#
# The whole of the points on one GPU, and shares of them on all, iteration
# after iteration from the same start, compared bit by bit. With shares that
# are cut where a program's points end, with shares that are cut anywhere and
# of very different size, with shares of which all but one are empty; and with
# ranks that come late: one, drawn by lot, sleeps before each of a thousand
# iterations.

CHECKED = ((8_000_000, 2, 2), (500_000, 64, 256))
TIMES = 10
LATE = 1000


def alike(centres):
    """Whether all ranks have the same bits."""
    every = [torch.empty_like(centres) for _ in range(dist.get_world_size())]
    dist.all_gather(every, centres)
    return all(torch.equal(other, centres) for other in every)


def cuts(n):
    """What this rank has of n points, by how they are shared."""
    rank, world = dist.get_rank(), dist.get_world_size()
    last = rank == world - 1
    return {
        "where a program ends": fusebook.kmeans_share(n, rank, world),
        "anywhere": slice(min(n, 999 * rank), n if last else 999 * (rank + 1)),
        "all to the last": slice(0, n if last else 0),
    }


def late(moved, points, centres):
    """At how many of many calls nothing is wrong, though ranks come late."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lot = torch.Generator().manual_seed(1)
    want, wrong = moved(points, centres), torch.zeros((), device=points.device)
    calls = LATE if points.is_cuda else 3
    for _ in range(calls):
        who, cycles = torch.randint(200_000, (2,), generator=lot).tolist()
        if who % world == rank and points.is_cuda:
            torch.cuda._sleep(cycles)
        wrong += (moved(points, centres) != want).any()
    return calls - int(wrong)


def agreement():
    rows, world = [], dist.get_world_size()
    for n, d, k in on_gpus(CHECKED):
        points, start = drawn(n, d, k, 7)
        step = fusebook.SharedKMeans(k, d)
        ways = {
            "NCCL": lambda x, c: by_nccl(x, c)[1],
            "chosen": lambda x, c, step=step: step(x, c)[1],
        }
        for cut, mine in cuts(len(points)).items():
            for way, moved in ways.items():
                alone, ours, same = start, start, 0
                for _ in range(TIMES):
                    _, alone = torch.ops.fusebook.kmeans_step(
                        points, alone, torch.uint8
                    )
                    ours = moved(points[mine], ours)
                    same += torch.equal(ours, alone)
                off = ((ours - alone).abs() / (alone.abs() + 1)).max().item()
                rows.append((d, k, cut, way, world, same, off, alike(ours)))
        right = late(ways["chosen"], points[mine][:100_000], start)
        rows.append((d, k, "late", "chosen", world, right, 0.0, True))
    columns = ["d", "k", "cut", "way", "GPUs", "same", "off", "alike"]
    return pd.DataFrame(rows, columns=columns)


# %%
# The page itself is the script that ``torchrun`` starts. A rank runs what
# stands above this line, and ends here. By hand, on one machine or on two:
#
# .. code-block:: bash
#
#    torchrun --nproc-per-node 2 plot_402_two_gpus.py
#    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 \
#        --master-addr first.machine --master-port 29500 plot_402_two_gpus.py
#
# The second line is for the first machine; the second machine says
# ``--node-rank 1``. Both must reach the port. Ranks of different machines add
# by NCCL: :term:`symmetric memory` ends at the machine. Two such commands on
# one machine of four GPUs, with ``--master-addr 127.0.0.1``, with
# ``--nproc-per-node 2`` and each with two GPUs in ``CUDA_VISIBLE_DEVICES``,
# try the same without a second machine.

work(scaling, agreement)

# %%
# What came of it
# ---------------
#
# The page starts the ranks, and asks rank 0 for what they found: on 1, 2, 4
# GPUs and so on, up to as many as it asks for.


def counts(most):
    """Powers of two up to the most, and the most itself."""
    return sorted({2**i for i in range(most.bit_length())} | {most})


def scaled():
    return pd.concat([ranks(scaling, n) for n in counts(asked.gpus)])


def agreed():
    return pd.concat(
        [ranks(agreement, n) for n in counts(asked.gpus) if n > 1]
    )


# None: measure where the page would measure anyway. False: replay.
here = None if enough(scaling, asked.gpus) else False
same = measured("gpus_agreement", agreed, live=here)
times = measured("gpus_scaling", scaled, live=here)
say(
    "The page asks for {gpus} GPUs, and this process may use {there}. What "
    "follows was measured on {worlds}.",
    gpus=asked.gpus,
    there=torch.cuda.device_count(),
    worlds=", ".join(map(str, sorted(times["GPUs"].unique()))),
)

# %%
# Is it right?
# ~~~~~~~~~~~~
#
# What one GPU makes of all points is held to float64 by
# :doc:`plot_303_kmeans`. So it is enough to compare with that.

NAMED = {"chosen": "fusebook"}
cut = same[same["cut"] != "late"].replace({"way": NAMED})
cut = cut.set_index(["GPUs", "d", "k", "cut", "way"])
table(
    cut[["same", "off", "alike"]].rename(
        columns={
            "same": f"same bits, of {TIMES}",
            "off": "farthest from one GPU's",
            "alike": "all ranks alike",
        }
    ),
    "Centres of several GPUs beside those of one",
    fold=False,
)

# %%
# Where the sums of a program are kept in registers, in the plane, they are
# added up in float64, and float64 has so many bits to spare that adding some
# thousand float32 sums of about the same size is *exact*: in any order, on any
# number of GPUs, it comes to the same. What can still differ is the float32
# sum of a program's own points, so shares are cut where a program's points
# end. (Another cut need not change a bit, as the table shows.)
#
# Many centres of many coordinates are sorted first, and each cluster is cut
# into parts by its length. On two GPUs a cluster's share is shorter than on
# one, so it is cut elsewhere, and the float32 sums round otherwise. There the
# last bits depend on the number of GPUs. They do not depend on the run, and
# all GPUs have the same ones.

ends = cut.xs("where a program ends", level="cut")["same"]
exact = ends == TIMES
waited = same[same["cut"] == "late"].set_index(["GPUs", "d", "k"])["same"]
claims(
    claim(
        "All ranks have the same centres to the bit, however points are "
        "shared.",
        cut["alike"],
    ),
    claim(
        "In the plane several GPUs give the bits of one, where shares are cut "
        "where a program's points end. With 64 coordinates they give them in "
        "{wide} of {all} runs: there the last bits may depend on the number "
        "of GPUs.",
        exact.xs(2, level="d"),
        of=exact,
        wide=int(ends.xs(64, level="d").sum()),
        all=TIMES * len(ends.xs(64, level="d")),
    ),
    claim(
        "However shares are cut, the centres are within 1e-5 of those of one "
        "GPU.",
        cut["off"] < 1e-5,
    ),
    claim(
        "Ranks that come late spoil none of a thousand iterations.",
        waited == LATE,
    ),
)

# %%
# How fast?
# ~~~~~~~~~
#
# In weak scaling the time would ideally stay that of one GPU; in strong
# scaling it would be divided by the number of GPUs.


def ideal(row):
    """What one GPU's time comes to, were there nothing to agree on."""
    alone = one.loc[(row["GPUs"], row["n"], row["d"], row["k"])]
    return alone if row["scaling"] == "weak" else alone / row["GPUs"]


one = times[times["way"] == "alone"].set_index(["GPUs", "n", "d", "k"])["us"]
several = times[times["way"] != "alone"].replace({"way": NAMED})
several["%"] = 100 * several.apply(ideal, axis=1) / several["us"]
on = times.attrs["origin"].machine


def roof(row):
    """The roof of one GPU, divided by their number, in microseconds."""
    n, d, k = (int(row[name]) for name in ("points", "d", "k"))
    cost = KMEANS_STEP.cost(4, n=n, d=d, k=k, labels="uint8", law="blobs")
    return on.roof(cost, "tf32") * 1e6 / row["GPUs"]


several["% of roof"] = 100 * several.apply(roof, axis=1) / several["us"]
several["case"] = [
    f"{row.points:,} x {row.d}, k = {row.k}" for row in several.itertuples()
]
shown = several.set_index(["GPUs", "scaling", "case", "way"])
table(
    shown[["us", "%", "% of roof"]].rename(
        columns={"us": "microseconds", "%": "efficiency, %"}
    ),
    "An iteration on all GPUs, and what part of the ideal it reaches",
    fold=False,
)

# %%

most = several[several["GPUs"] == several["GPUs"].max()]
curves = most[most["k"] == 2].pivot_table("%", "points", ["scaling", "way"])
curves.columns = [" ".join(name) for name in curves.columns]
curves.index.name = "points on all GPUs"
plots.lines(
    curves,
    title=f"Efficiency in the plane, {most['GPUs'].iloc[0]} GPUs",
    ylabel="% of the ideal",
    source=times,
    clock="in a graph",
    marks={"the ideal": 100},
)

# %%
# The step needs a message of a few bytes and a pass over the points, and the
# two cannot overlap: no point can be labelled before the centres are known.
# What can overlap is half of it. The sums of the first half of the points may
# travel while the second half is labelled; but those of the second half have
# to follow, so a message is waited for all the same, and one pass became two.


efficiency = several.set_index(["scaling", "GPUs", "n", "k", "way"])["%"]
weak = efficiency.xs("weak").xs("fusebook", level="way")
together = several[several["GPUs"] > 1]
plain, halved, best = (
    together[together["way"] == way].set_index(["GPUs", "scaling", "case"])[
        "us"
    ]
    for way in ("NCCL", "halves", "fusebook")
)
GOALS = (
    (2, 20_000_000, 2, 95),
    (2, 2_000_000, 256, 97),
    (4, 20_000_000, 2, 93),
)
claims(
    *(
        target(
            "On {gpus} GPUs with {n} points and {k} centres each, an "
            "iteration keeps {found:.1f} % of one GPU's speed; the target "
            "was {goal}.",
            weak[gpus, n, k] >= goal,
            headline=True,
            gpus=gpus,
            n=f"{n:,}",
            k=k,
            found=weak[gpus, n, k],
            goal=goal,
        )
        for gpus, n, k, goal in GOALS
        if (gpus, n, k) in weak.index
    ),
    claim(
        "Sending the sums in words is never slower than NCCL by more than 2 "
        "%: it takes {least:.2f} to {most:.2f} times the time.",
        best <= 1.02 * plain,
        fatal=False,
        least=(best / plain).min(),
        most=(best / plain).max(),
    ),
    claim(
        "Adding the sums of one half while the other is labelled pays at none "
        "of these sizes: it takes {least:.2f} to {most:.2f} times the time of "
        "NCCL in one go.",
        halved >= 0.98 * plain,
        fatal=False,
        least=(halved / plain).min(),
        most=(halved / plain).max(),
    ),
)

# %%
# What a scheduler would add
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Ray, Dask and joblib hand tasks to processes, move what a task needs, start
# it again where it was lost, and know what to do when the tasks are unlike or
# more than the machine holds. An iteration here has one task a GPU, all alike,
# whose data never moves, and the next one cannot begin before it ends: there
# is nothing to schedule. (What they would add to an iteration is not measured
# here.) They help around it: with many data sets, with many values of k, and
# when a machine goes away.
#
# When a rank dies
# ~~~~~~~~~~~~~~~~
#
# The others wait for it, in a sum that never comes. On its own machine
# ``torchrun`` notices, ends them, and shows what the dead one said. On another
# machine nobody notices, so the group has a time limit of its own, far shorter
# than PyTorch's ten minutes: a rank that waits longer ends with an error.
#
# One user, several GPUs
# ----------------------
#
# The manual of 2013 that :doc:`plot_001_using_the_gpu` measures anew says: one
# process uses one GPU, chosen when it starts by a flag; for two GPUs start two
# processes. What is true of it? In one process, copies from GPU to GPU:


def copies():
    rows = []
    for mib in (1, 16, 256):
        from_, to = (
            torch.ones(mib * 2**18, device=f"cuda:{i}") for i in (0, 1)
        )
        pinned = torch.empty(mib * 2**18, pin_memory=True)

        def by_host(from_=from_, to=to, pinned=pinned):
            to.copy_(pinned.copy_(from_))

        ways = {
            "from GPU to GPU": lambda from_=from_, to=to: to.copy_(from_),
            "by way of the host": by_host,
            "within one GPU": lambda from_=from_: from_.clone(),
        }
        for way, copy in ways.items():
            took = clocked(copy, 10) / 10
            rows.append((way, mib, mib * 2**20 / took / 1e9))
    return pd.DataFrame(rows, columns=["way", "MiB", "GB/s"])


def clocked(function, times):
    """Seconds of so many calls, waited for on every GPU; the best of five."""
    best = float("inf")
    for _ in range(5):
        everywhere()
        start = time.perf_counter()
        for _ in range(times):
            function()
        everywhere()
        best = min(best, time.perf_counter() - start)
    return best


def everywhere():
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)


pair = None if torch.cuda.device_count() > 1 else False
moved = measured("gpus_copies", copies, live=pair)
table(
    moved.pivot_table("GB/s", "MiB", "way", sort=False),
    "What is copied, in GB/s",
    fold=False,
)

# %%
# And two jobs that have nothing to do with each other, a hundred iterations of
# k-means each: on one GPU, one after the other, and on two, called by one
# process in turn. A call returns before the work is done, so one process keeps
# both GPUs busy, as long as it queues faster than they work. Small jobs are
# done before the next call is queued: the time is the host's, and that is the
# sum over both jobs, on one GPU or on two. On two, each call also has to make
# another GPU the current one.


def jobs():
    rows = []
    for n in (100_000, 20_000_000):
        made = []
        for gpu in range(2):
            with torch.cuda.device(gpu):
                rng = torch.Generator(f"cuda:{gpu}").manual_seed(gpu)
                at = {"generator": rng, "device": rng.device}
                made.append((torch.randn(n, 2, **at), torch.randn(2, 2, **at)))

        def steps(*jobs):
            for points, centres in jobs:
                with torch.cuda.device(points.device):
                    torch.ops.fusebook.kmeans_step(
                        points, centres, torch.uint8
                    )

        for way, todo in (
            ("one job", made[:1]),
            ("two jobs, one GPU", [made[0], made[0]]),
            ("two jobs, two GPUs", made),
        ):
            took = clocked(lambda todo=todo: steps(*todo), 100)
            rows.append((n, way, took * 1e3))
    return pd.DataFrame(rows, columns=["points", "way", "ms"])


both = measured("gpus_jobs", jobs, live=pair)
took = both.pivot_table("ms", "points", "way", sort=False)
table(took, "A hundred iterations of each job, in milliseconds", fold=False)

# %%

rates = moved.pivot_table("GB/s", "MiB", "way", sort=False).loc[256]
large = took.loc[20_000_000]
claims(
    holds(
        '"There is a limit of one GPU per process" (Theano\'s manual, 2012): '
        "taken as two jobs on two GPUs, called by one process, being no "
        "faster than on one.",
        large["two jobs, two GPUs"] > 0.9 * large["two jobs, one GPU"],
    ),
    say(
        "Two jobs on two GPUs, called by one process, take {ratio:.2f} times "
        "as long as one job on one GPU. Two small jobs, of {points:,} points "
        "each, take {small:.2f} times as long on two GPUs as on one.",
        ratio=large["two jobs, two GPUs"] / large["one job"],
        points=took.index[0],
        small=took["two jobs, two GPUs"].iloc[0]
        / took["two jobs, one GPU"].iloc[0],
    ),
    say(
        "From one GPU to the other 256 MiB go at {direct:.0f} GB/s, by way of "
        "the host at {host:.0f}.",
        direct=rates["from GPU to GPU"],
        host=rates["by way of the host"],
    ),
)

# %%
# What has remained of the advice: with a process for each GPU, each has a host
# thread of its own to queue its work. And the GPU can still be chosen before a
# process starts: with ``CUDA_VISIBLE_DEVICES=1 python job.py`` the program
# sees only the second GPU, as ``cuda:0``. Two users, or two jobs of one user,
# need no more than that.

provenance(same, times, moved, both)

# %%
downloads(several.drop(columns="case"), "kmeans_gpus")

# %%
# Lessons
# -------
#
# - Look for what has to travel. Here a GPU sends k (d + 1) numbers an
#   iteration, however many points it has.
# - A word that brings its own flag needs no second message, and a kernel that
#   has to run anyway can send it.
# - Ask of a sum whether its bits depend on the order. A float64 sum of float32
#   parts often does not; then the number of GPUs cannot change it either.
# - Let a kernel count how often it has run: a graph of it can be replayed,
#   and no flag has to be reset.
# - The threads of a program do not run in step. Put a barrier before one of
#   them writes what all of them read: a warp that comes late would read the
#   next number, and wait for ever. That happens once in many runs.
