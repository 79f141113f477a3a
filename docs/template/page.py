# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Squared ReLU
============

One comparison and one product, for which eager PyTorch goes to memory twice.

For whom: those who want a kernel that touches each element once.

Read before: 002, 101.
"""

# %%
# The problem
# -----------
#
# :math:`y = \max(x, 0)^2`, for every element by itself. Each element is used
# once, so the least traffic is to read it once and to write its result once.

import fusebook
from fusebook import plots, tables
from fusebook.cards.squared_relu import SQUARED_RELU
from fusebook.measure.check import yardstick
from fusebook.measure.inputs import generator
from fusebook.page import (
    Kernels,
    Source,
    claim,
    claims,
    downloads,
    exercise,
    provenance,
    say,
    solution,
    study,
    table,
)

import torch

asked = study(SQUARED_RELU, config="large", dtype="float32")

# %%
# What eager costs
# ----------------

Source(fusebook.squared_relu_eager)

# %%

eager = SQUARED_RELU.variants["eager"].cost(4, M=1024, N=1024)
least = SQUARED_RELU.cost(4, M=1024, N=1024)
predicted = (eager.read + eager.write) / (least.read + least.write)
say("Predicted from traffic: {gain:.1f} times as fast.", gain=predicted)

# %%
# The kernel
# ----------

Kernels(fusebook.squared_relu)

# %%
# Is it right?
# ------------

x = SQUARED_RELU.make(generator(0), torch.float32, M=64, N=781)[0]
verdict = yardstick(SQUARED_RELU, (x,)).judge(fusebook.squared_relu(x))
claims(
    claim(
        "The score {score:.1e} is within the limit {limit:.1e}",
        verdict.ok,
        score=verdict.score,
        limit=verdict.limit,
    ),
)

# %%
# How fast?
# ---------

df = asked.results()
table(tables.times(df, words=True), "Cold time, in microseconds")

# %%
provenance(df)

# %%
downloads(df, "squared_relu")

# %%
# How far from the roof?
# ----------------------

plots.dots(df)

# %%
# Lessons
# -------

gain = tables.ratio(df, "eager", "fusebook")
share = tables.share(df, "fusebook", of="copy")
claims(
    say("Measured: {gain:.1f} times as fast.", gain=gain.median()),
    claim("At least 90 % of a copy of the same bytes", share >= 0.9),
)

# %%
# Exercises
# ---------
#
# Write it without ``clamp``. This attempt forgets the sign.


def without_clamp(x):
    return x * x


exercise(
    "Right without clamp", without_clamp, fusebook.squared_relu_eager, [(x,)]
)

# %%

solution("solutions/plot_109_squared_relu.py")
