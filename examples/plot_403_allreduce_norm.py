# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Does fusing communication pay?
==============================

A transformer layer that is split over GPUs leaves each of them with a part of
its result. The parts are added, the sum is added to a residual, and the rows
are normalised, twice a layer. NCCL and a kernel do it; PyTorch's kernels on
symmetric memory and a kernel do it; and one kernel can do it all, which reads
the other GPUs' memory itself. This page measures at which sizes that pays, how
near it comes to what the link can do, and whether a check would notice a
missing wait.

With as many GPUs as it asks for, the page starts one process for each and
measures. With fewer, everything is replayed from the record of a pair that is
named at the end.

For whom: those who split a transformer over several GPUs (tensor
parallelism).

Read before: 102, 402.
"""

# %%
# The problem
# -----------
#
# In *tensor parallelism* the weights of a layer are cut, each of G GPUs
# multiplies with its piece, and what comes out is a part of the sum:
#
# .. math::
#
#    h = r + \sum_g x_g, \qquad
#    y = \frac{h}{\sqrt{\operatorname{mean}(h^2) + \epsilon}} \, w
#
# with one row for each token, 4096 or 8192 columns, in bfloat16. Every GPU
# needs all of h, which is the next residual r, and all of y. The first sum is
# an :term:`all-reduce`, the rest is an RMSNorm. There are few tokens at a time
# when text is generated, and thousands when a prompt is read.

# sphinx_gallery_tags = ["all-reduce", "RMSNorm", "several GPUs", "NVLink"]
import os

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots
from fusebook.measure.inputs import generator
from fusebook.measure.op import Cost
from fusebook.page import (
    Folded,
    Kernels,
    claim,
    claims,
    downloads,
    draw,
    enough,
    holds,
    measured,
    options,
    provenance,
    ranks,
    say,
    table,
    timed,
    work,
)

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F

asked = options(gpus=2)
EPS = 1e-6

# %%
# What the chain costs
# --------------------


def allreduce_norm_eager(x, residual, weight, eps=EPS):
    dist.all_reduce(x)  # over NVLink; write MN
    h = residual + x  # read 2MN, write MN
    y = F.rms_norm(h, weight.shape, weight, eps)  # read MN, write MN
    return y, h


# %%
# The all-reduce moves x over the link, and through memory twice; the norm
# reads it again. For 4096 tokens of 8192 numbers this is the traffic of memory
# on each GPU:

mn = 2 * 4096 * 8192
draw.traffic(
    "Bytes of each GPU's memory, 4096 x 8192 in bfloat16: read, then written",
    {
        "eager": Cost(read=5 * mn, write=3 * mn, flop=0),
        "all-reduce, one norm": Cost(read=4 * mn, write=3 * mn, flop=0),
        "one kernel": Cost(read=3 * mn, write=2 * mn, flop=0),
    },
)

# %%
# The link is slower than memory: the last table has its rate. So with many
# tokens the link should be the roof for every way: each of two GPUs has to get
# all that the other has. With few tokens latency decides: of launches, of a
# flag that goes over, and of the first byte that comes back. One kernel has
# one launch, one flag, one read. The prediction: fusing pays for few tokens,
# and for many it is a tie at best.
#
# The kernel
# ----------
#
# There is a program for each row, or for several in turn. First it loads what
# is there already: the row of the residual, its own part, the weights. Then it
# meets the programs of the same row on the other GPUs; after that their parts
# are complete. It reads them from the other GPUs' memory and adds them in the
# order of the GPUs, so that all get the same bits. The rest is a norm, in
# registers.
#
# On :doc:`plot_402_two_gpus` each word carries a flag, which doubles the
# bytes. Here there are many bytes, so one flag stands for a whole row. A
# program raises it in the memory of each other GPU, after all that it wrote
# before can be read there (*release*). Then it reads its own flags until the
# others have raised theirs (*acquire*). The flag is the number of the meeting.

Folded("The library's kernels", Kernels(fusebook.AllReduceNorm))

# %%
# No program waits at the end. A GPU may still be reading a part when the owner
# of that part is done. So the next part is written to other memory, and at the
# next meeting everyone has read the first. Two buffers in turn save a second
# flag.
#
# The sizes and the number of GPUs decide which way a call takes, so all GPUs
# decide alike. On two GPUs it is always this kernel.
#
# The program of a rank
# ---------------------


def layer(rows, columns):
    """A place to reduce in, and a part, a residual and weights."""
    reduce = fusebook.AllReduceNorm(rows, columns)
    rng = generator(1)
    at = {"generator": rng, "device": rng.device}
    residual = torch.randn(rows, columns, **at).bfloat16()
    weight = torch.randn(columns, **at).bfloat16()
    every = [
        torch.randn(rows, columns, **at).bfloat16()
        for _ in range(dist.get_world_size())
    ]
    return reduce, every, residual, weight


def on_gpus(cases, few):
    """The cases, or few where kernels are interpreted."""
    return cases if generator(0).device.type == "cuda" else few


# %%
# Is it right? The reference is computed in float64, from all parts. Then the
# same under bad conditions: in each of a thousand repeats every rank has a new
# part, and one rank, drawn at random, sleeps before it writes its part. The
# sums h are known to the bit, so no tolerance is needed.
#
# A test that cannot fail shows nothing. So we repeat it with code that reads
# the parts of the other GPUs without waiting for them.


def careless(reduce, residual, weight):
    """The same sums and norm, without waiting for the other GPUs."""
    rows = len(residual)
    parts = tuple(part[:rows] for part in reduce.parts[reduce.turn])
    reduce.turn = 1 - reduce.turn
    # This may read what another GPU has yet to write.
    h = sum(part.float() for part in parts) + residual.float()
    y = F.rms_norm(h, weight.shape, weight.float(), EPS).to(residual.dtype)
    return y, h.to(residual.dtype)


def disturbed(way, rows, columns, repeats):
    """At how many repeats some rank had wrong sums, though one came late."""
    reduce, every, residual, weight = layer(rows, columns)
    rank, world = dist.get_rank(), dist.get_world_size()
    lot = torch.Generator().manual_seed(2)
    wrong = torch.zeros((), device=residual.device)
    for _ in range(repeats):
        drawn = torch.randint(100_000, (3,), generator=lot)
        who, cycles, shift = drawn.tolist()
        if who % (world + 1) == rank and residual.is_cuda:
            torch.cuda._sleep(cycles)
        now = [part.roll(shift + 7 * r, 1) for r, part in enumerate(every)]
        reduce.part(rows).copy_(now[rank])
        want = sum(part.float() for part in now) + residual.float()
        if way == "careless":
            _, h = careless(reduce, residual, weight)
        else:
            _, h = reduce(residual, weight, EPS, way=way)
        wrong += (h != want.bfloat16()).any()
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    return int(wrong)


def scored(way, rows, columns):
    """The error of y and h in units of bfloat16, and whether ranks agree."""
    reduce, every, residual, weight = layer(rows, columns)
    reduce.part(rows).copy_(every[dist.get_rank()])
    y, h = reduce(residual, weight, EPS, way=way)
    wide = sum(part.double() for part in every) + residual.double()
    mean = wide.square().mean(1, keepdim=True)
    normed = wide * torch.rsqrt(mean + EPS) * weight.double()
    errors = [
        ((got.double() - want).abs() / (want.abs() + 1)).max().item() * 2**8
        for got, want in ((h, wide), (y, normed))
    ]
    all_of_them = [torch.empty_like(y) for _ in every]
    dist.all_gather(all_of_them, y)
    alike = all(torch.equal(other, y) for other in all_of_them)
    return max(errors), alike


def checked():
    rows = []
    linked = fusebook.AllReduceNorm(1, 64).peers is not None
    ways = ("group", *(("one-shot", "two-shot", "fused") if linked else ()))
    for tokens in on_gpus((1, 33, 1000), (3,)):
        for way in ways:
            columns = on_gpus(4096, 64)
            error, alike = scored(way, tokens, columns)
            rows.append((tokens, way, "error", error, alike))
        for way, many in (("fused", 1000), ("careless", 100)):
            if linked:
                wrong = disturbed(way, tokens, columns, many)
                rows.append((tokens, way, f"wrong of {many}", wrong, True))
    return pd.DataFrame(
        rows, columns=["tokens", "way", "what", "value", "alike"]
    )


# %%
# And how fast? A way other than the fused kernel has two names, of its
# all-reduce and of its norm. The all-reduce is NCCL's or one of two of
# PyTorch's on symmetric memory: *one-shot*, where each GPU reads and adds all
# parts, or *two-shot*, where each adds a share of them and fetches the rest.
# The norm is the library's (*one norm*, in one kernel), PyTorch's (*eager*) or
# *torch.compile*'s, which is timed at a few sizes. *Fused* is this page's
# kernel, and *fusebook* what the library chooses. The calls are in CUDA
# graphs, and the slowest rank counts. The parts of a way are timed by
# themselves as well: a copy of the other's part, a flag that goes and comes,
# an all-reduce.

TOKENS = (1, 8, 32, 64, 128, 256, 1024, 4096)
COLUMNS = (4096, 8192)
COMPILED = ((64, 4096), (4096, 4096))
PAID = ((1, 4096), (64, 4096), (1024, 4096), (4096, 4096))
PARTS = ("copy", "flag", "NCCL", "NCCL, parts")  # of ways


def pieces(rows, columns):
    """Ways and what they are made of; and what sets a part back to its start.

    Parts are added up in place, so that they grow from call to call.
    """
    reduce, every, residual, weight = layer(rows, columns)
    mine, here = every[dist.get_rank()], torch.empty_like(residual)
    x = torch.empty_like(residual)
    other = reduce.parts[0][(reduce.rank + 1) % reduce.world]

    def again():
        x.copy_(mine)
        for turn in reduce.parts:
            turn[reduce.rank].copy_(mine)

    def by(way):
        return lambda: reduce(residual, weight, EPS, way=way)

    def nccl_parts():
        dist.all_reduce(reduce.parts[reduce.turn][reduce.rank])
        reduce.turn = 1 - reduce.turn

    def rest(x):
        h = residual + x
        return torch.nn.functional.rms_norm(h, (columns,), weight, EPS), h

    def nccl_compiled():
        dist.all_reduce(x)
        return compiled(x)

    again()
    found = {
        "NCCL": lambda: dist.all_reduce(x),
        "NCCL, parts": nccl_parts,
        "NCCL, eager": lambda: allreduce_norm_eager(x, residual, weight, EPS),
        "NCCL, one norm": by("group"),
        "chosen": by(None),
    }
    if reduce.peers:
        found |= {
            "copy": lambda: here.copy_(other),
            "flag": reduce.peers.barrier,
            "one-shot, one norm": by("one-shot"),
            "two-shot, one norm": by("two-shot"),
            "fused": by("fused"),
        }
    if (rows, columns) in COMPILED:
        compiled = torch.compile(rest, dynamic=False)
        compiled(x)
        found["NCCL, torch.compile"] = nccl_compiled
    return found, again


def speed():
    """By the device; of some also what an eager program pays, by the host."""
    rows = []
    for tokens in TOKENS:
        for columns in COLUMNS:
            found, again = pieces(tokens, columns)
            calls = 20 if tokens <= 256 else 6
            taken = {"device": timed(found, calls=calls, before=again)}
            if (tokens, columns) in PAID:
                ways = {way: found[way] for way in found if way not in PARTS}
                taken["host"] = timed(
                    ways, calls=30, repeat=5, before=again, graph=False
                )
            rows += [
                (tokens, columns, clock, way, us)
                for clock, times in taken.items()
                for way, us in times.items()
            ]
    columns = ["tokens", "columns", "clock", "way", "us"]
    return pd.DataFrame(rows, columns=columns).assign(
        GPUs=dist.get_world_size(),
        NVLS=os.environ.get("NCCL_NVLS_ENABLE", "as NCCL decides"),
    )


# %%
# A rank does not run anything below this line.

work(checked, speed)

# %%
# Is it right?
# ------------


def counts(most):
    """Powers of two from 2 up to the most, and the most itself."""
    return sorted({2**i for i in range(1, most.bit_length())} | {most})


def rightness():
    return pd.concat(
        [ranks(checked, n).assign(GPUs=n) for n in counts(asked.gpus)]
    )


def speeds():
    return pd.concat([ranks(speed, n) for n in counts(asked.gpus)])


# None: measure where the page would measure anyway. False: replay.
here = None if asked.gpus > 1 and enough(speed, asked.gpus) else False
found = measured("allreduce_norm_checks", rightness, live=here)
found = found.assign(GPUs=found["GPUs"] if "GPUs" in found else 2)
errors = found[found["what"] == "error"].replace({"way": {"group": "NCCL"}})
sizes = ["GPUs", "tokens"]
score = errors.pivot_table("value", sizes, "way", sort=False)
table(
    score.assign(alike=errors.groupby(sizes)["alike"].all()).rename(
        columns={"alike": "all GPUs have the same bits"}
    ),
    "The largest error of each way, in roundings of bfloat16 (1/256)",
    fold=False,
)

# %%

late = found[found["what"] != "error"]
table(
    late.assign(way=late["way"] + ": " + late["what"]).pivot_table(
        "value", sizes, "way", sort=False
    ),
    "Repeats that were wrong, where one rank comes late",
    fold=False,
)

# %%
wrong = late.set_index([*sizes, "way"])["value"]
claims(
    claim(
        "Each way is within the limit of this library for bfloat16.",
        errors["value"] <= 16,
    ),
    claim(
        "The fused kernel has the smallest error: it rounds the sum once, the "
        "others once more between the all-reduce and the norm.",
        score.idxmin(axis=1) == "fused",
    ),
    claim("All GPUs have the same bits.", errors["alike"]),
    claim(
        "With a rank that comes late none of a thousand repeats of the fused "
        "kernel is wrong.",
        wrong.xs("fused", level="way") == 0,
    ),
    claim(
        "Without the meeting some repeats are wrong, and the check says so.",
        wrong.xs("careless", level="way") > 0,
    ),
)

# %%
# How fast?
# ---------

times = measured("allreduce_norm_times", speeds, live=here)
nvls = str(times["NVLS"].iloc[0])
world = times["GPUs"].min()
say(
    "The page asks for {gpus} GPUs, and this process may use {there}. What "
    "follows was measured on {worlds}; tables that name no number are of "
    "{world}. NCCL may let the switch between the GPUs add, by multicast, "
    "which it calls NVLS; here that is {nvls}.",
    gpus=asked.gpus,
    there=torch.cuda.device_count(),
    worlds=", ".join(map(str, sorted(times["GPUs"].unique()))),
    world=world,
    nvls={"0": "off", "1": "on"}.get(nvls, nvls),
)

# %%
every, host = (times[times["clock"] == name] for name in ("device", "host"))
host = host[host["GPUs"] == world]
by_world = {
    gpus: part.pivot_table("us", ["columns", "tokens"], "way", sort=False)
    for gpus, part in every.groupby("GPUs")
}
wide = by_world[world]
chains = ["NCCL, one norm", "one-shot, one norm", "two-shot, one norm"]
others = ["NCCL, eager", "NCCL, torch.compile"]
table(
    wide[[*others, *chains, "fused", "chosen"]].rename(
        columns={"chosen": "fusebook"}
    ),
    "On the device, in microseconds",
    fold=False,
)

# %%
curve = wide.loc[4096][[*chains, "fused"]]
curve = curve.div(curve[chains].min(axis=1), axis=0)
plots.lines(
    curve,
    title="Over the best unfused chain, 4096 columns",
    ylabel="times as long",
    source=times,
    clock="in a graph",
    marks={"the best unfused chain": 1},
)

# %%


def best_of(wide):
    """The time of the best unfused chain."""
    return wide[[way for way in [*others, *chains] if way in wide]].min(axis=1)


table(
    pd.DataFrame(
        {
            f"{gpus} GPUs": on["chosen"] / best_of(on)
            for gpus, on in by_world.items()
        }
    ),
    "What the library chooses over the best unfused chain, in a CUDA graph",
    fold=False,
)

# %%
best = best_of(wide)
ratio = wide["fused"] / best
chosen = wide["chosen"] / best
pays = ratio[ratio < 0.98]
many = ratio.xs(wide.index.levels[1].max(), level="tokens", drop_level=False)
claims(
    claim(
        "Fusing the all-reduce with the norm pays at every size here: what "
        "the library chooses takes {low:.2f} to {high:.2f} times the time of "
        "the best unfused chain, in a CUDA graph.",
        chosen < 0.98,
        fatal=False,
        headline=True,
        low=chosen.min(),
        high=chosen.max(),
    ),
    say(
        "The fused kernel takes {low:.2f} to {high:.2f} times as long as the "
        "best unfused chain: it is faster by more than 2 % at {pays} of {all} "
        "sizes, and slower at {loses}.",
        low=ratio.min(),
        high=ratio.max(),
        pays=len(pays),
        all=len(ratio),
        loses=int((ratio > 1.02).sum()),
    ),
    holds(
        "At 128 tokens of 8192 columns a fused all-reduce and norm does not "
        "pay: it is 0.55 times as fast as the two apart (FlashInfer's "
        "one-shot kernel on two H100, in vLLM's pull request 22086, August "
        "2025). Here ours is {times:.2f} times as fast as the best chain.",
        ratio.loc[8192, 128] > 1,
        times=1 / ratio.loc[8192, 128],
    ),
    say(
        "For many tokens a tie at best was predicted. With {most} tokens the "
        "fused kernel is {least:.2f} to {times:.2f} times as fast as the best "
        "chain.",
        most=many.index.get_level_values("tokens")[0],
        least=1 / many.max(),
        times=1 / many.min(),
    )
    if (many < 0.98).all()
    else say(
        "For many tokens a tie at best was predicted, and came true: the "
        "fused kernel is {least:.2f} to {times:.2f} times as fast.",
        least=1 / many.max(),
        times=1 / many.min(),
    ),
)

# %%
# Without a graph the host has to queue each launch, and a call takes the
# longer of the host's time and the device's. One launch may take the host as
# long as several: a call of ours passes an operator in Python, which looks up
# its plan and the memory of the other GPUs.

eager = host.pivot_table("us", "tokens", "way", sort=False)
rivals = [way for way in [*others, *chains] if way in eager]
table(
    eager[[*rivals, "fused"]],
    "What an eager program pays, 4096 columns, in microseconds",
    fold=False,
)

# %%
over = eager["fused"] / eager[rivals].min(axis=1)
claims(
    claim(
        "Without a graph fusing pays too: a call of the fused kernel takes "
        "{low:.2f} to {high:.2f} times as long as the best of the others.",
        over < 1,
        fatal=False,
        headline=True,
        low=over.min(),
        high=over.max(),
    )
)

# %%
# How far from the roof?
# ----------------------
#
# There are two roofs. With many tokens it is the link: each GPU has to get the
# parts of all others. With few tokens it is latency: a flag has to arrive, and
# then a read has to go there and come back. Both are measured here: *copy* is
# a copy of the other's part by PyTorch, *flag* a meeting of one program, each
# with its launch. The fused kernel has one launch for both. *NCCL* is an
# all-reduce by itself, of the same memory again and again, and *NCCL, parts*
# one of the memory that the chains use, in turn. A copy moves only what comes
# over the link. The fused kernel also reads its own part and the residual, and
# writes two results: the traffic of its GPU's own memory.

wide["copy + flag"] = wide["copy"] + wide["flag"]
bytes_ = pd.Series({at: 2 * at[0] * at[1] for at in wide.index}, name="bytes")
wide["GB/s, fused"] = bytes_ / wide["fused"] / 1e3
wide["GB/s, copy"] = bytes_ / wide["copy"] / 1e3
table(
    wide[
        [
            "flag", "copy", "copy + flag", "fused", "NCCL",
            "GB/s, fused", "GB/s, copy",
        ]
    ],
    "Parts of the ways, in microseconds, and the rates over the link",
    fold=False,
)  # fmt: skip

# %%
near = wide["fused"] / wide["copy + flag"]
few = near[near.index.get_level_values("tokens") <= 64]
many = near[near.index.get_level_values("tokens") == 4096]
on = times.attrs["origin"].machine
own = pd.Series(
    {
        at: on.memory_seconds(Cost(2 * size, 2 * size, 0)) * 1e6
        for at, size in bytes_.items()
    }
)
odd = wide["NCCL"] > wide["NCCL, one norm"]
claims(
    claim(
        "Up to 64 tokens the fused kernel takes at most 1.1 times a copy and "
        "a flag: {low:.2f} to {high:.2f} times.",
        few <= 1.1,
        fatal=False,
        low=few.min(),
        high=few.max(),
    ),
    claim(
        "The fused kernel never takes longer than a copy, a flag and the "
        "traffic of its GPU's own memory one after the other. At 4096 tokens "
        "it takes {least:.2f} to {most:.2f} times a copy and a flag.",
        wide["fused"] <= wide["copy + flag"] + own,
        fatal=False,
        least=many.min(),
        most=many.max(),
    ),
    say(
        "At {odd} of {all} sizes NCCL's all-reduce by itself takes longer "
        "than with a norm behind it.{same}",
        odd=int(odd.sum()),
        all=len(odd),
        same=" It adds up ordinary memory there, and the chain adds up "
        "symmetric memory. Of symmetric memory it takes longer at "
        f"{int((wide['NCCL, parts'] > wide['NCCL, one norm']).sum())} sizes."
        if "NCCL, parts" in wide
        else " We have not found why. It adds up ordinary memory there, and "
        "the chain adds up symmetric memory.",
    ),
)

# %%
provenance(found, times)

# %%
downloads(times, "allreduce_norm")

# %%
# Lessons
# -------
#
# - Count what goes over the link before you fuse. Each of two GPUs needs all
#   of the other's part in any case; a kernel can only hide the rest behind
#   that.
# - Fusing saves launches, flags and passes over memory.
# - Compute everywhere what is cheaper to compute than to send. All GPUs
#   normalise all rows, and none sends a result.
# - Do not end with a barrier where the next call begins with one: two buffers
#   in turn do the same.
# - Take the wait out once, and see the check fail.
