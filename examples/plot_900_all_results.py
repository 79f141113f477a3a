# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
All results
===========

Every recorded time of the library's operators and of their rivals in one
table, and those of one GPU under rooflines. Nothing is measured here: this
page reads the package's records, which the page of each operator measures. The
first two tables have every recorded GPU to choose from; ``FUSEBOOK_GPU``
chooses that of the others. :doc:`/gpus` says what changes from GPU to GPU.

For whom: those who look for one number, or for the sizes at which ours loses.

Read before: 002.
"""

# %%
# Every record
# ------------
#
# One row per GPU, operator, way, size and dtype. *Cold* and *warm* are the
# device's time, *host* the host's. *Paid* is the larger of host and cold: what
# an eager program of many calls pays for each. *Call* is one call that is
# waited for.
# Bold: no way of the same arithmetic is faster by more than 2 %; TF32 in place
# of float32 is another arithmetic. Click a heading to sort, the funnel beside
# it to filter. Left out is a single step of PyTorch on all cores of the CPU,
# whose time depends on whether its threads sleep between the calls:
# :doc:`plot_301_logistic_step` times a loop of such steps.

# sphinx_gallery_tags = ["results", "roofline"]
import fusebook  # noqa: F401  before triton: it decides how kernels run
from fusebook import plots, tables
from fusebook.cards import FAMILIES, OPS
from fusebook.measure import machine
from fusebook.page import (
    claim,
    claims,
    downloads,
    provenance,
    records,
    say,
    sortable,
    table,
    target,
    verdicts,
)

import pandas as pd


def on_gpu(records):
    """The records of a GPU without the steps on the CPU."""
    return {
        name: frame[frame["variant"] != "torch on the CPU"]
        for name, frame in records.items()
    }


def of_each_gpu(tables):
    """A table of each GPU in one, with a column for the GPU's name."""
    for gpu, one in tables.items():
        one.insert(0, "GPU", gpu.removeprefix("NVIDIA "))
    return pd.concat(tables.values(), ignore_index=True)


found = on_gpu(records())
gpus = {
    machine.recorded(gpu).name: on_gpu(records(gpu)) for gpu in machine.slugs()
}
if machine.slug() not in machine.slugs():  # it is that of FUSEBOOK_RECORDS
    gpus[machine.recorded().name] = found
every, best = zip(*map(verdicts.every, gpus.values()), strict=True)
sortable(
    of_each_gpu(dict(zip(gpus, every, strict=True))),
    "Every record, in microseconds and percent",
    pd.concat(best, ignore_index=True),
)

# %%
everything = pd.concat(found.values(), ignore_index=True)
downloads(everything, "all_results")

# %%
# Who wins where
# --------------
#
# The microseconds that a caller pays with torch, with torch.compile, with the
# best library, and with ours. *Take* names all that is within 2 % of the
# fastest.

sortable(
    of_each_gpu({gpu: verdicts.winners(on) for gpu, on in gpus.items()}),
    "Which way for which size, the smallest first",
)

# %%
# The next table is over all sizes and dtypes at which memory or arithmetic
# decides. It has the median and the least share of the roof and of a copy, the
# worst error as a part of what is allowed, and what was refused.

bound = ("memory", "compute", "")  # no zone: it was not timed
summary = pd.concat(
    {
        name: tables.shares(frame[frame["zone"].isin(bound)])
        for name, frame in found.items()
    },
    names=["operator"],
)
table(summary, "Shares of roof and copy by operator and way, cold")

# %%
# Under the roofline
# ------------------
#
# One panel per family. Each point is one size. It stands by its arithmetic per
# byte of the least traffic, and as high as the arithmetic that was done in a
# second, by our kernel and by the best other way.

on = next(iter(found.values())).attrs["origin"].machine
families = {
    module.__name__.split(".")[-1].replace("_", " "): pd.concat(
        [found[op.name] for op in family if op.name in found],
        ignore_index=True,
    )
    for module, family in FAMILIES.items()
    if any(op.name in found for op in family)
}
panels = plots.roofline(families, on)

# %%
right = everything[everything["status"] == "ok"]
ours = everything[everything["variant"].str.startswith("fusebook")]
claims(
    say(
        "{rows} results of {ops} operators, {right} of them right and timed.",
        rows=len(everything),
        ops=len(found),
        right=len(right),
    ),
    claim(
        "Every operator of the library has a record.",
        pd.Series([name in found for name in OPS], index=list(OPS)),
        fatal=False,
    ),
    say(
        "{stale} of the results are of code that was changed after they were "
        "measured; the box at the end of this page names them.",
        stale=int(everything["stale"].ne("").sum()),
    ),
    claim(
        "None of our {n} recorded results is wrong. (Page 901 says it of "
        "problems that nobody chose.)",
        ours["status"].ne("wrong"),
        of=everything,
        headline=True,
        n=len(ours),
    ),
)

# %%
# Should I use it?
# ----------------
#
# For each operator, ours against the fastest other way of the same arithmetic,
# by each clock: at how many sizes it is faster, equal within 2 %, and slower.

alike = {
    name: tables.alike(frame)
    for name, frame in found.items()
    if frame["variant"].eq("fusebook").any()
}
standing = pd.concat(
    {name: tables.standing(frame) for name, frame in alike.items()},
    names=["operator"],
)
table(standing, "Ours against the fastest other way", fold=False)

# %%
# Where a kernel is slower by the caller's clock and not by the device's, its
# launch is slow. From some size on the device takes longer than the launch,
# and the caller no longer loses.

pays = {
    name: {
        f"no loss from, {kind}": tables.pays_from(frame, kind=kind)
        for kind in ("paid", "call")
    }
    for name, frame in alike.items()
}
pays = pd.DataFrame.from_dict(pays, orient="index").fillna("not measured")
table(
    pays.replace("", "never").replace(r" \(.* the least\)", "", regex=True),
    "From which size on the caller loses nowhere, of the sizes at which ours "
    "is not slower on the device",
    fold=False,
)

# %%
points = standing["points"].groupby("clock", sort=False).sum()
slower = standing["slower"].groupby("clock", sort=False).sum()
claims(
    *(
        say(
            "By the clock {clock} another way is faster by more than 2 % at "
            "{slower} of {points} sizes.",
            clock=clock,
            slower=slower[clock] if points[clock] else None,
            points=points[clock],
        )
        for clock in points.index
    ),
)

# %%
# Where another way of the same arithmetic is faster by more than 2 %, over all
# operators:


def lost(kind, how=tables.losses):
    losses = {name: how(frame, kind=kind) for name, frame in alike.items()}
    every = pd.concat(losses, names=["operator"])
    every.attrs["compared"] = standing.xs(kind, level="clock")["points"].sum()
    return every


table(
    lost("cold"),
    "Where another way is faster, cold, the worst of each operator first",
)

# %%
table(lost("warm"), "Where another way is faster, warm")

# %%
table(
    lost("paid"),
    "Where another way is faster for an eager program of many calls",
)

# %%
# The same by a single call, with the reason of each loss. *Prepared
# beforehand*: the faster way is given what took work outside the clock,
# weights packed into one matrix or a captured graph. A caller who can do that
# should; the target below leaves these ways out. *A kernel that is not chosen
# there*: the way of ours that loses runs only when the launcher is told to,
# and the way that it takes by itself does not lose. *The host after a wait*:
# neither the device's time nor the host's in a loop explains half of what is
# lost.


prepared = {
    name: [v for v, way in OPS[name].variants.items() if way.prepare]
    for name in alike
    if not OPS[name].variants["fusebook"].prepare
}
called = pd.concat(
    {
        name: tables.reasons(found[name], prepared.get(name, ()))
        for name in alike
    },
    names=["operator"],
)
called.attrs["compared"] = points["call"]
table(called, "Where another way is faster by a call, waited for, and why")

# %%
given = {
    name: frame[~frame["variant"].isin(prepared.get(name, []))]
    for name, frame in alike.items()
}
unprepared = sum(
    len(tables.losses(frame, kind="call")) for frame in given.values()
)
why = called["why"].value_counts()
claims(
    say(
        "By one call another way is faster at {lost} sizes. The cause is "
        "at {prepared} of them what was prepared beforehand, at {device} the "
        "device, at {host} the host, at {wait} the host after a wait, and at "
        "{other} a kernel of ours that is not chosen there.",
        lost=len(called),
        prepared=why.get("prepared beforehand", 0),
        device=why.get("the device", 0),
        host=why.get("the host", 0),
        other=why.get("a kernel that is not chosen there", 0),
        wait=why.get("the host after a wait", 0),
    ),
    target(
        "Without the ways that are given more than ours, another way is "
        "faster by one call at {lost} of {points} points; at most 30 was the "
        "target.",
        unprepared <= 30,
        points=points["call"],
        lost=unprepared,
    ),
)

# %%
versions = everything["versions"].str.extract(r"(torch [^;]+)")[0].dropna()
claims(
    say(
        "Recorded with {versions}, from {first} to {last}: {what}",
        versions=", ".join(sorted(set(versions))),
        first=everything["date"].dropna().min(),
        last=everything["date"].dropna().max(),
        what="times of one version."
        if len(set(versions)) == 1
        else "times of several versions stand side by side.",
    )
)

# %%
provenance(*found.values())
