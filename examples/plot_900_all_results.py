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

The records of the library's operators on one GPU, in one table and under one
roofline. Nothing is measured here: a page of its own measures each operator,
and this one reads what is in the package. ``FUSEBOOK_GPU`` chooses another
GPU.

Read before: 002.
"""

# %%
# The table
# ---------
#
# All shapes and dtypes of an operator that memory or arithmetic binds,
# together: the median and the least share of the roof and of a copy, the worst
# error as a part of what is allowed, and what was refused.

# sphinx_gallery_tags = ["results", "roofline"]
import fusebook  # noqa: F401  before triton: it decides how kernels run
from fusebook import plots, tables
from fusebook.cards import OPS
from fusebook.page import (
    claim,
    claims,
    downloads,
    provenance,
    records,
    say,
    table,
)

import pandas as pd

found = records()
bound = ("memory", "compute", "")  # no zone: it was not timed
summary = pd.concat(
    {
        name: tables.shares(frame[frame["zone"].isin(bound)])
        for name, frame in found.items()
    },
    names=["operator"],
)
table(summary, "Every record, cold", fold=False)

# %%
# One roofline
# ------------
#
# Each point is one shape of one operator: its arithmetic per byte of the least
# traffic, and the arithmetic it did a second. The lines are what this machine
# was measured to do.

everything = pd.concat(found.values(), ignore_index=True)
on = next(iter(found.values())).attrs["origin"].machine
plots.roofline(everything, on)

# %%
right = everything[everything["status"] == "ok"]
claims(
    say(
        "{rows} results of {ops} operators, {right} of them right and timed.",
        rows=len(everything),
        ops=len(found),
        right=len(right),
    ),
    claim(
        "Every operator of the library has a record",
        pd.Series([name in found for name in OPS], index=list(OPS)),
        fatal=False,
    ),
    claim(
        "No kernel has changed since it was recorded",
        not any(frame.attrs["origin"].stale for frame in found.values()),
        fatal=False,
    ),
    claim(
        "Ours is wrong nowhere",
        not (
            everything["variant"].str.startswith("fusebook")
            & everything["status"].eq("wrong")
        ).any(),
        headline=True,
    ),
)

# %%
# Should I use it?
# ----------------
#
# For each operator, how it stands against the fastest other way of the same
# arithmetic, by each clock: at how many points it is faster, equal within 2 %,
# and slower. *Cold* and *warm* are the device's. *Paid* is what an eager
# program of many calls pays for each, the larger of the host's time and the
# device's. *Call* is one call that is waited for. Variants of ours are not
# counted as other ways.

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
# Where a kernel is slower by the caller's clock and not by the device's, what
# is slow is its launch. From some size on the device takes longer than that:
# there it pays.

pays = {
    name: {
        f"pays from, {kind}": tables.pays_from(frame, kind=kind)
        for kind in ("paid", "call")
    }
    for name, frame in alike.items()
}
pays = pd.DataFrame.from_dict(pays, orient="index").fillna("not measured")
table(
    pays.replace("", "at no point all the way up"),
    "What wins on the device pays for the caller from",
    fold=False,
)

# %%
points = standing["points"].groupby("clock", sort=False).sum()
slower = standing["slower"].groupby("clock", sort=False).sum()
claims(
    *(
        say(
            "By {clock}, {slower} of {points} points are lost.",
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


def lost(kind):
    losses = {
        name: tables.losses(frame, kind=kind) for name, frame in alike.items()
    }
    every = pd.concat(losses, names=["operator"])
    every.attrs["compared"] = standing.xs(kind, level="clock")["points"].sum()
    return every


table(lost("cold"), "Points lost cold, the worst of each operator first")

# %%
table(lost("warm"), "Points lost warm")

# %%
table(lost("paid"), "Points lost by an eager program of many calls")

# %%
table(lost("call"), "Points lost by one call that is waited for")

# %%
provenance(*found.values())

# %%
downloads(everything, "all_results")
