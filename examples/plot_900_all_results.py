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
roofline; the nodes of ONNX Runtime are on their own page. Nothing is measured
here: a page of its own measures each operator, and this one reads what is in
the package. ``FUSEBOOK_GPU`` chooses another GPU.
"""

# %%
# The table
# ---------
#
# All shapes and dtypes of an operator that memory or arithmetic binds,
# together: the median and the least share of the roof and of a copy, the worst
# error as a part of what is allowed, and what was refused.

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
on = next(iter(found.values())).attrs["machine"]
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
        not any(frame.attrs["stale"] for frame in found.values()),
        fatal=False,
    ),
    claim(
        "Ours is wrong nowhere",
        not (
            everything["variant"].str.startswith("fusebook")
            & everything["status"].eq("wrong")
        ).any(),
    ),
)

# %%
# Where another way of the same arithmetic is faster by more than 2 %, over all
# operators. Variants of ours are not counted as other ways.


def alike(frame):
    own = frame["variant"].str.match(r"fusebook[ ,(]")
    return frame[~own & frame["math"].eq("")]


def lost(kind):
    losses = {
        name: tables.losses(alike(frame), kind=kind)
        for name, frame in found.items()
    }
    return pd.concat(losses, names=["operator"])


table(lost("cold"), "Points lost cold, the worst of each operator first")

# %%

table(lost("warm"), "Points lost warm")

# %%
provenance(*found.values())

# %%
downloads(everything, "all_results")
