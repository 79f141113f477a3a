# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Norms, with a residual and in eight bits
========================================

A transformer normalises its hidden state twice a layer. Before a norm a
residual is added; after it the result is often rounded to eight bits; and the
backward pass has a gradient, whose part for the weights is a sum over all
rows. Each of these, as an operation of its own, is a pass over memory. This
page fuses them with the norm, and compares every kernel with its roof.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them.

For whom: those who train or serve transformers and want each norm to be one
pass over memory.

Read before: 002, 102.
"""

# %%
# The problem
# -----------
#
# A row :math:`x` of N numbers becomes
#
# .. math::
#
#    y_i = \frac{x_i}{\sqrt{\frac{1}{N} \sum_j x_j^2 + \epsilon}}\, w_i
#
# in RMSNorm. LayerNorm subtracts the row's mean first, and adds a bias. Either
# way the whole row has to be seen before its first number can be written, and
# every number is needed twice. As with a :doc:`softmax <plot_102_softmax>`,
# the least traffic is to read each number once and to write each result once.

# sphinx_gallery_tags = ["norm", "reduction", "gradient", "fp8"]

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots, tables
from fusebook.cards.norms import (
    ADD_RMS_NORM,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    RMS_NORM_FP8,
    _backward,
)
from fusebook.measure import bench, machine, timing
from fusebook.measure.check import yardstick
from fusebook.measure.inputs import generator
from fusebook.page import (
    Folded,
    Kernels,
    NoResults,
    Source,
    by_clock,
    by_step,
    claim,
    claims,
    counters,
    downloads,
    draw,
    exercise,
    holds,
    lines_behind,
    lines_of,
    measured,
    provenance,
    say,
    solution,
    study,
    table,
    target,
)

import pandas as pd
import torch
import triton
import triton.language as tl

asked = study(RMS_NORM, config="large", dtype="bfloat16", repeat=20)
on = machine.current()

# %%
# What eager costs
# ----------------
#
# Half types are converted first: a sum of squares in bfloat16 would stop
# growing after 256 terms. So the chain moves float32 where the data is half as
# long.

Source(fusebook.rms_norm_eager, doc=False)

# %%
M, N = 32768, 8192
WORK = {
    "norm": RMS_NORM,
    "sum and norm": ADD_RMS_NORM,
    "norm to fp8": RMS_NORM_FP8,
    "gradient": RMS_NORM_BACKWARD,
}
chain = RMS_NORM.variants["eager"].cost(2, M=M, N=N)
least = RMS_NORM.cost(2, M=M, N=N)
draw.traffic(
    "RMSNorm of 32768 x 8192 in bfloat16: bytes read, then bytes written",
    {"one operation a line": chain, "one kernel": least},
)

# %%
# The table has what each of four tasks has to move, and the time of that on
# this machine, the roof. A sum with a residual reads two matrices and writes
# two, since the next layer needs the sum. A result in eight bits is half as
# long to write. The gradient reads x and dy and writes dx.

roofs = pd.DataFrame(
    {
        name: {
            "reads MB": op.cost(2, M=M, N=N).read / 1e6,
            "writes MB": op.cost(2, M=M, N=N).write / 1e6,
            "roof us": 1e6 * on.memory_seconds(op.cost(2, M=M, N=N)),
        }
        for name, op in WORK.items()
    }
).T
table(roofs, "32768 x 8192 in bfloat16: the least there is to do", fold=False)

# %%
predicted = (chain.read + chain.write) / (least.read + least.write)
then = RMS_NORM_FP8.variants["norm, then quantise"].cost(2, M=M, N=N)
straight = RMS_NORM_FP8.cost(2, M=M, N=N)
halved = on.memory_seconds(then) / on.memory_seconds(straight)
claims(
    say(
        "Predicted: fused, the norm is {gain:.1f} times as fast as its chain.",
        gain=predicted,
    ),
    say(
        "Predicted: straight to fp8 it is {gain:.2f} times as fast as a fused "
        "norm and then a fused quantisation.",
        gain=halved,
    ),
)

# %%
# The kernel
# ----------
#
# Step one: one row a program
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A program holds its row in :term:`registers <register>` from its only load to
# its only store, with the residual added on the way. The sum is rounded before
# it is normalised: so the gradient, which will see the rounded sum, belongs to
# what was computed.


@triton.jit
def one_row(
    y_ptr, total_ptr, x_ptr, r_ptr, w_ptr, N, EPS, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < N
    at = row * N + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0)  # read N
    r = tl.load(r_ptr + at, mask=inside, other=0.0)  # read N
    total = (x.to(tl.float32) + r.to(tl.float32)).to(x_ptr.dtype.element_ty)
    tl.store(total_ptr + at, total, mask=inside)  # write N
    x = total.to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(x * x, 0) / N + EPS)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0)  # from a cache
    tl.store(y_ptr + at, x * factor * w, mask=inside)  # write N


def step_one(x, residual, weight, warps=4):
    M, N = x.shape
    y, total = torch.empty_like(x), torch.empty_like(x)
    sizes = {"BLOCK": triton.next_power_of_2(N), "num_warps": warps}
    one_row[(M,)](y, total, x, residual, weight, N, 1e-6, **sizes)
    return y, total


# %%
# The finished kernel
# ~~~~~~~~~~~~~~~~~~~
#
# The library's kernel takes several rows where they are short, and several
# tiles of a row where they are long, as that of softmax does. ``CENTRED`` is
# LayerNorm: its squares are summed around the mean in a second look at the
# registers, which costs no traffic. With a ``LIMIT`` the result goes to eight
# bits: the row's largest magnitude is one more look. A missing weight, bias or
# residual is None, and its code is not compiled. With few rows no other
# program works while one waits: so weights are asked for together with the
# rows (``AHEAD``), and not after their sums. In a transposed matrix adjacent
# rows lie side by side in memory, and the numbers of a row apart: another
# kernel reads such tiles across rows and writes them along rows.
#
# Rows of 781 half-precision numbers begin anywhere within 16 bytes. Loaded
# number by number they would take eight times as many loads. So a row is read
# by whole vectors of 16 bytes, eight numbers (``VEC``). Its first vector may
# begin with numbers of the row before, its last one end with numbers of the
# row behind. Those count as zeros. The other vectors are the row's alone and
# are written whole; of these two only the row's own numbers are written, one
# by one.

draw.vectors(
    "The second of several rows of 781 numbers, by vectors of eight",
    row=1,
    length=781,
    vector=8,
)

# %%
# Rows that no program can hold are cut into parts, and the programs of a row
# tell each other what they found, as on the page of softmax. Each holds its
# part in registers meanwhile, so that rows are read once. With a residual the
# kernel asks for all of both tensors before it stores the first number of
# their sum: the compiler moves no load ahead of a store, since both might be
# of the same address.
#
# All loads ask the L2 cache to keep what they read (``evict_last``), although
# no row is read again. The hint is meant for what is written: where the cache
# keeps what was read, it has to let go of what was written, and memory is
# written while later rows are read. Without the hint more would be left to
# write when all is read. (No counter of this page shows that.) torch.compile
# gives the same hint for another reason: it reads a row twice.

draw.lanes(
    "What the hint is meant to do, not to scale",
    {
        "x": [(0, 8, "is read")],
        "y, no hint": [(0, 5, "waits in L2"), (5, 12, "is written")],
        "y, evict_last": [(0, 2, "waits"), (2, 9, "is written")],
    },
)

# %%
# The gradient
# ~~~~~~~~~~~~
#
# With :math:`n` for the normalised row and :math:`g = w \cdot dy`,
#
# .. math::
#
#    dx_i = \frac{g_i - n_i \overline{g n}}{\sqrt{\overline{x^2} + \epsilon}},
#    \qquad dw_i = \sum_\mathrm{rows} dy_i n_i .
#
# Two things can make it slow. One is what a forward pass keeps for it,
# statistics or a copy of an input. Here nothing is kept: the row is in
# registers anyway, and the sum of its squares costs no traffic. The other is
# dw, a sum over rows, across which programs run: atomic additions would come
# in another order each time, and a matrix of all terms would be another pass.
#
# The gradient's step one keeps nothing and adds atomically. A program has one
# row, as in the forward pass.


@triton.jit
def dx_and_terms(x, dy, w, N, EPS):
    """Of one row: dx, and what it adds to dw."""
    factor = 1 / tl.sqrt(tl.sum(x * x, 0) / N + EPS)
    n, g = x * factor, dy * w
    return (g - n * (tl.sum(g * n, 0) / N)) * factor, dy * n


@triton.jit
def gradient_of_row(
    dx_ptr, dw_ptr, x_ptr, dy_ptr, w_ptr, N, EPS, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < N
    at = row * N + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # read N
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)  # read N
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dx, terms = dx_and_terms(x, dy, w, N, EPS)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.atomic_add(dw_ptr + columns, terms, mask=inside, sem="relaxed")


def gradient_one(x, dy, weight):
    M, N = x.shape
    dx, dw = torch.empty_like(x), weight.new_zeros(N, dtype=torch.float32)
    sizes = {"BLOCK": triton.next_power_of_2(N), "num_warps": 16}
    gradient_of_row[(M,)](dx, dw, x, dy, weight, N, 1e-6, **sizes)
    return dx, dw.to(weight.dtype)


# %%
# In step two a program takes **many rows and the same columns of each**, and
# adds up its part of dw in registers. At the end there is one partial row a
# program, a few hundred in all, and torch adds these up. With ``STAGES`` the
# loop asks for the next rows, into shared memory, while it works on one.


@triton.jit
def gradient_of_rows(
    dx_ptr, parts_ptr, x_ptr, dy_ptr, w_ptr, M, N, EPS,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(program, M, tl.num_programs(0), num_stages=STAGES):
        at = row * N + columns
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dx, terms = dx_and_terms(x, dy, w, N, EPS)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dw += terms
    tl.store(parts_ptr + program * N + columns, dw, mask=inside)


def gradient_two(x, dy, weight, stages=1, programs=264):
    M, N = x.shape
    dx = torch.empty_like(x)
    # Two programs for each multiprocessor of an H200.
    parts = x.new_empty(programs, N, dtype=torch.float32)
    sizes = {"BLOCK": triton.next_power_of_2(N), "num_warps": 16}
    gradient_of_rows[(programs,)](
        dx, parts, x, dy, weight, M, N, 1e-6, STAGES=stages, **sizes
    )
    return dx, parts.sum(0).to(weight.dtype)


def gradient_ahead(*given):
    return gradient_two(*given, stages=3)


# %%
# The library's kernel does the same. It takes several rows at a time where
# they are short. Rows of more than 16 KiB are shared by several programs, as
# in the forward pass. But here the kernel is
# :term:`persistent <persistent kernel>`: its programs stay for many rows, and
# each leaves what it found in the next row, two numbers in a word, before it
# looks for what the others found in this one, so that nobody waits for long.
#
# A second kernel adds up the partial rows, always in the same order. Of small
# tensors it is launched while the first still works, and waits for that. Where
# one program takes all rows, there is no second kernel.

Folded(
    "The library's kernels",
    Kernels(fusebook.rms_norm, fusebook.rms_norm_backward),
)

# %%
# What the hardware counts
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# Does the gradient read x and dy once, 2MN numbers? The counters of the GPU,
# as on :doc:`plot_101_elementwise`, say what came from memory, by all kernels
# of a way. Of what is written some stays in the :term:`L2 cache`. Sectors and
# :term:`occupancy` are those of the kernel that reads most.


# site: fold
def to_count():
    def given(M, N):
        dims = {"M": M, "N": N}
        return RMS_NORM_BACKWARD.make(generator(0), torch.bfloat16, **dims)

    rows, wide = given(8192, 8192), given(1024, 65536)
    way = RMS_NORM_BACKWARD.variants["torch"]
    kept = way.given(*rows)
    return {
        "an operation a line": lambda: RMS_NORM_BACKWARD.variants["eager"].run(
            *rows
        ),
        "torch": lambda: way.run(*kept),
        "the library": lambda: fusebook.rms_norm_backward(*rows),
        "the library, rows of 65536": lambda: fusebook.rms_norm_backward(
            *wide
        ),
    }


MN_BYTES = 2 * 8192 * 8192
traffic = by_step(counters("norms_counters", to_count), MN_BYTES, "MN")
table(traffic, "The gradient of 8192 x 8192 in bfloat16", fold=False)

# %%
reads = traffic["read, MN"]
held = traffic["occupancy, %"]
claims(
    claim(
        "The library's gradient reads 2MN, to 5 %, rows that several programs "
        "share too.",
        (reads.filter(like="the library") / 2 - 1).abs() < 0.05,
        of=reads,
        fatal=False,
    ),
    say(
        "An operation a line reads {chain:.0f}MN, torch's own operator "
        "{torch:.1f}MN.",
        chain=reads.get("an operation a line"),
        torch=reads.get("torch"),
    ),
) if len(traffic) else None

# %%
# Is it right?
# ------------
#
# A third of the rows hold values that are twenty times too large, a third are
# far from zero, freed memory is filled with NaN before each call.

FEW = torch.float32, torch.bfloat16
CASES = [
    ({"M": 37, "N": 100}, t) for t in (*FEW, torch.float16, torch.float64)
]
CASES += [({"M": 3, "N": 781}, dtype) for dtype in FEW]
found = pd.DataFrame(
    {
        "operator": op.name,
        **dims,
        "dtype": str(dtype).removeprefix("torch."),
        "way": way,
        "error": verdict.error,
        "tolerance": verdict.tolerance,
        "right": verdict.ok,
    }
    for op in (
        RMS_NORM,
        ADD_RMS_NORM,
        LAYER_NORM,
        RMS_NORM_FP8,
        RMS_NORM_BACKWARD,
        LAYER_NORM_BACKWARD,
    )
    for dims, dtype in CASES
    if dtype in op.dtypes
    for way in ("eager", "fusebook")
    for inputs in [op.make(generator(2), dtype, **dims)]
    for verdict in [yardstick(op, inputs).judge(op.variants[way].run(*inputs))]
)
table(found, "Scores, each within its limit")

# %%
# Two promises are about bits. A row's result shall not depend on how many rows
# there are, or a model answers otherwise when others ask at the same time. And
# dw shall be the same each time.

x, dy, w = RMS_NORM_BACKWARD.make(generator(3), torch.float32, M=37, N=781)
whole = fusebook.rms_norm(x, w)
again = [fusebook.rms_norm_backward(x, dy, w) for _ in range(3)]
yard = yardstick(RMS_NORM_BACKWARD, (x, dy, w))
GRADIENTS = gradient_one, gradient_two, gradient_ahead
claims(
    claim(
        "The steps to the gradient are within the limit, too.",
        all(yard.judge(step(x, dy, w)).ok for step in GRADIENTS),
    ),
    claim(
        "Ours and eager are within the limit at every operator, size and "
        "dtype.",
        found["right"],
    ),
    claim(
        "A row alone, seven rows and all 37 give the same bits.",
        all(
            torch.equal(fusebook.rms_norm(x[:n], w), whole[:n]) for n in (1, 7)
        ),
    ),
    claim(
        "Three runs of the gradient give the same dx and the same dw.",
        all(
            torch.equal(a, b)
            for one in again[1:]
            for a, b in zip(again[0], one, strict=True)
        ),
    ),
)

# %%
# How fast?
# ---------
#
# *quack* has kernels in CuTe, *Liger* in Triton. What failed, or is not
# installed, has no times and is kept with its message.

large = asked.results()
table(
    tables.times(large, words=True),
    "RMSNorm: cold time in microseconds",
    fold=False,
)

# %%
summed = asked.results(ADD_RMS_NORM, config="target")
table(
    tables.times(summed, words=True),
    "A residual added before: cold time in microseconds",
    fold=False,
)

# %%
eight = asked.results(RMS_NORM_FP8, config="target")
table(
    tables.times(eight, words=True),
    "Straight to fp8: cold time in microseconds",
    fold=False,
)

# %%
# *torch* is told the statistics that its forward pass kept, as are Liger and
# quack; torch.compile is given the formula.

backward = asked.results(RMS_NORM_BACKWARD, config="wide")
table(
    tables.times(backward, words=True),
    "The gradient of RMSNorm, dw included: cold time in microseconds",
    fold=False,
)

# %%
layers = asked.results(LAYER_NORM, config="target")
layers_backward = asked.results(LAYER_NORM_BACKWARD, config="target")
table(
    pd.concat(
        {
            "forward": tables.times(layers, words=True),
            "gradient": tables.times(layers_backward, words=True),
        }
    ),
    "LayerNorm: cold time in microseconds",
    fold=False,
)

# %%
few = asked.results(config="llama")
table(
    pd.concat(
        {kind: tables.times(few, kind) for kind in ("cold", "warm", "call")},
        names=["clock"],
    ),
    "A few rows of 4096, by three clocks, in microseconds",
)

# %%
# What each step was worth
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# The sum with its norm, as this page came to it, cold, from the chain to a
# copy of the same bytes. Step one is launched with the four warps that Triton
# takes unless it is told otherwise, and with sixteen.


# site: fold
def norms_steps():
    parts = []
    for M, N in ((32768, 4096), (32768, 8192)):
        given = ADD_RMS_NORM.make(generator(0), torch.bfloat16, M=M, N=N)
        yard = yardstick(ADD_RMS_NORM, given)
        steps = {
            "the chain": ADD_RMS_NORM.variants["eager"].run,
            "a sum, then torch's norm": ADD_RMS_NORM.variants["torch"].run,
            "step one, 4 warps": step_one,
            "step one, 16 warps": step_one_16,
            "the library": fusebook.add_rms_norm,
        }
        frame = bench.staircase(
            {k: lambda f=f, g=given: f(*g) for k, f in steps.items()},
            lambda got, yard=yard: yard.judge(got).ok,
            repeat=15,
        )
        x = torch.cat(given[:2])
        y = torch.empty_like(x)
        copy = timing.cold({"copy": lambda x=x, y=y: y.copy_(x)})["copy"]
        frame["copy us"] = copy.q50 * 1e6
        parts.append(frame.assign(at=f"{M} x {N}"))
    return pd.concat(parts, ignore_index=True)


def step_one_16(*given):
    return step_one(*given, warps=16)


stairs = measured("norms_steps", norms_steps, by_device=True)
stairs["of a copy"] = stairs["copy us"] / stairs["us"]
CODE = {
    "the chain": (fusebook.rms_norm_eager,),
    "step one, 4 warps": (one_row, step_one),
    "step one, 16 warps": (one_row, step_one),
}
reached = stairs.pivot_table("of a copy", "step", "at", sort=False)
by_lines = pd.Series({at: lines_of(*of) for at, of in CODE.items()})
by_lines["the library"] = lines_behind(fusebook.rms_norm_eager)
of_roof = {
    f"32768 x {N}": 1e-4
    * stairs.set_index("at")["copy us"][f"32768 x {N}"].iloc[0]
    / on.memory_seconds(ADD_RMS_NORM.cost(2, M=32768, N=N))
    for N in (4096, 8192)
}
table(
    tables.staircase(
        100 * reached, stairs, roof=of_roof, lines=by_lines
    ).rename_axis("step"),
    "Percent of a copy, cold; all norms and gradients in the library's lines",
    fold=False,
)

# %%
# Step one moves the same bytes as the library's kernel; what differs is how
# a row is spread over threads.

at_once = stairs.pivot_table("us", "at", "step")
first_steps = at_once[["step one, 4 warps", "step one, 16 warps"]].min(axis=1)
claims(
    claim(
        "The library's kernel takes at most 1.01 times as long as step one "
        "with the better number of warps: {least:.2f} to {most:.2f} times.",
        at_once["the library"] <= 1.01 * first_steps,
        least=(at_once["the library"] / first_steps).min(),
        most=(at_once["the library"] / first_steps).max(),
        fatal=False,
    )
)

# %%
# And the gradient of RMSNorm, from its chain to the roof of reading 2MN
# numbers and writing MN. *dw differs* counts the columns of dw, as it is
# returned in bfloat16, whose bits differ between two calls.


# site: fold
def norms_gradient_steps():
    parts = []
    ways = RMS_NORM_BACKWARD.variants
    for M, N in ((32768, 4096), (32768, 8192)):
        given = RMS_NORM_BACKWARD.make(generator(0), torch.bfloat16, M=M, N=N)
        yard = yardstick(RMS_NORM_BACKWARD, given)
        torch.compiler.reset()
        steps = {
            "an operation a line": ways["eager"].run,
            "torch.compile": ways["torch.compile"].run,
            "step one, atomic additions": gradient_one,
            "step two, a partial row a program": gradient_two,
            "step two, next rows asked for": gradient_ahead,
            "the library": fusebook.rms_norm_backward,
        }
        frame = bench.staircase(
            {k: lambda f=f, g=given: f(*g) for k, f in steps.items()},
            lambda got, yard=yard: yard.judge(got).ok,
            repeat=15,
        )
        frame["dw differs"] = [
            int((step(*given)[1] != step(*given)[1]).sum())
            for step in steps.values()
        ]
        parts.append(frame.assign(at=f"{M} x {N}"))
    return pd.concat(parts, ignore_index=True)


try:
    climb = measured(
        "norms_gradient_steps", norms_gradient_steps, by_device=True
    )
except NoResults:
    climb = None
OF_GRADIENT = {
    "an operation a line": (_backward,),
    "step one, atomic additions": (
        *(dx_and_terms, gradient_of_row, gradient_one),
    ),
    "step two, a partial row a program": (
        *(dx_and_terms, gradient_of_rows, gradient_two),
    ),
    "step two, next rows asked for": (
        *(dx_and_terms, gradient_of_rows, gradient_two),
    ),
}
by_lines = pd.Series({at: lines_of(*of) for at, of in OF_GRADIENT.items()})
by_lines["the library"] = lines_behind(fusebook.rms_norm_backward)
roofs = {
    f"32768 x {N}": 1e6
    * on.memory_seconds(RMS_NORM_BACKWARD.cost(2, M=32768, N=N))
    for N in (4096, 8192)
}
table(
    tables.staircase(
        climb.pivot_table("us", "step", "at", sort=False).assign(
            **{"dw differs": climb.groupby("step")["dw differs"].max()}
        ),
        climb,
        roof=roofs,
        lines=by_lines,
    ),
    "The gradient of RMSNorm, each step, bfloat16: cold, microseconds",
    fold=False,
) if climb is not None else claims(
    say("The steps to the gradient are not recorded yet.")
)

# %%
if climb is None:
    climb_us, same = pd.DataFrame(), None
else:
    climb_us = climb.pivot_table("us", "at", "step", sort=False)
    same = climb[~climb["step"].str.contains("atomic")]["dw differs"] == 0
claims(
    claim(
        "Every step to the gradient is right.",
        None if climb is None else climb["right"],
        fatal=False,
    ),
    claim(
        "Two calls of a step give the same dw. (Step one is left out, since "
        "it adds atomically.)",
        same,
        of=climb,
        fatal=False,
    ),
    *(
        say(
            "In step one two calls differ in {most} columns of dw: it adds in "
            "float32, in whatever order, and the sum is rounded to bfloat16.",
            most=climb[climb["step"].str.contains("atomic")][
                "dw differs"
            ].max(),
        )
        for _ in climb_us.index[:1]
    ),
    *(
        say(
            "At {at} step two takes {parts:.2f} times as long as atomic "
            "additions, and {ahead:.2f} times with the next rows asked for; "
            "the library takes {ours:.2f} times as long as the best of these.",
            at=at,
            parts=us["step two, a partial row a program"]
            / us["step one, atomic additions"],
            ahead=us["step two, next rows asked for"]
            / us["step one, atomic additions"],
            ours=us["the library"] / us.filter(like="step ").min(),
        )
        for at, us in climb_us.iterrows()
    ),
)

# %%
every = {
    "norm": pd.concat([large, few]),
    "sum and norm": summed,
    "norm to fp8": eight,
    "gradient": backward,
    "LayerNorm": layers,
    "its gradient": layers_backward,
}
provenance(
    *(large, few, summed, eight, backward, layers, layers_backward, stairs),
    *(() if climb is None else (climb,)),
)

# %%
downloads(large, "rms_norm")

# %%
# How far from the roof?
# ----------------------

plots.dots(large)

# %%
plots.dots(backward, of="roof", title="rms_norm_backward: share of the roof")

# %%
# The column *rows alone* says whether a row has the same bits whatever number
# of rows it comes with. It is empty for ways that compile for a shape, and for
# gradients, whose dw is a sum over rows.

table(
    pd.concat({name: tables.shares(frame) for name, frame in every.items()}),
    "Each way, cold",
)

# %%
# Lessons
# -------
#
# The targets were set before the kernels were written; each is met or missed.


def beaten(frame, *others):
    """Our time over that of the fastest other way, where both have one."""
    times = tables.times(frame)
    known = [name for name in others if name in times]
    return (times["fusebook"] / times[known].min(axis=1)).dropna()


LIBRARIES = ("quack", "torch.compile", "Liger")
forward = pd.concat([large, summed])
gradients = pd.concat([backward, layers_backward])
of_roof = tables.share(gradients, "fusebook", of="roof")
others_of_roof = pd.concat(
    [
        tables.share(gradients, way, of="roof")
        for way in ("torch", *LIBRARIES)
        if way in set(gradients["variant"])
    ]
)
ours_alone = pd.concat(
    [tables.where(frame, variant="fusebook") for frame in every.values()]
)["alone"]
of_copy = tables.share(forward, "fusebook")
of_shared = tables.share(tables.where(large, N=[65536, 262144]), "fusebook")
gain = tables.ratio(large, "eager", "fusebook")
quick = tables.times(eight)
claims(
    target(
        "Rows of 781 to 8192 numbers run at 96 % of a copy of the same bytes "
        "or more, the odd ones too. Rows that several programs share, and "
        "those with a residual, have targets of their own.",
        tables.share(
            tables.where(large, N=[781, 2880, 4096, 8192]), "fusebook"
        )
        >= 0.96,
        of=of_copy,
        headline=True,
    ),
    target(
        "Rows that several programs share run at 96 % of a copy or more: at "
        "{least:.1%} to {most:.1%}.",
        of_shared >= 0.96,
        of=of_copy,
        least=of_shared.min(),
        most=of_shared.max(),
    ),
    target(
        "With a residual added rows run at 96 % of a copy or more: at "
        "{share:.1%}.",
        tables.share(summed, "fusebook") >= 0.96,
        share=tables.share(summed, "fusebook").min(),
    ),
    say(
        "RMSNorm is {least:.1f} to {most:.1f} times as fast as its chain; "
        "{predicted:.1f} times were predicted, of kernels that all move their "
        "bytes equally fast. Those of the chain reach {rate:.0%} of the rate "
        "of a copy, in the median.",
        least=gain.min(),
        most=gain.max(),
        predicted=predicted,
        rate=predicted * tables.share(large, "eager").median(),
    ),
    target(
        "RMSNorm is never slower than quack, torch.compile and Liger by more "
        "than 2 %: it takes {least:.2f} to {most:.2f} times the time of the "
        "fastest of them.",
        beaten(large, *LIBRARIES) <= 1.02,
        least=beaten(large, *LIBRARIES).min(),
        most=beaten(large, *LIBRARIES).max(),
    ),
    target(
        "With a residual added RMSNorm is never slower than those three by "
        "more than 2 %: it takes {most:.2f} times the time of the fastest.",
        beaten(summed, *LIBRARIES) <= 1.02,
        most=beaten(summed, *LIBRARIES).max(),
    ),
    target(
        "The gradients, those of weight and bias among them, reach 90 % of "
        "the roof or more.",
        of_roof >= 0.9,
        headline=True,
    ),
    say(
        "Our gradients reach {least:.0%} to {most:.0%} of the roof; the best "
        "other way at any of these sizes reaches {other:.0%}. Few warps are "
        "enough for that: by the counters above our gradient of RMSNorm keeps "
        "{few:.0f} % of those that a multiprocessor has room for, and torch's "
        "{many:.0f} %.",
        few=held.get("the library"),
        many=held.get("torch"),
        least=of_roof.min(),
        most=of_roof.max(),
        other=others_of_roof.max(),
    ),
    target(
        "The gradient of RMSNorm is never slower than quack, torch.compile "
        "and Liger by more than 2 %: it takes {least:.2f} to {most:.2f} times "
        "the time of the fastest of them.",
        beaten(backward, *LIBRARIES) <= 1.02,
        least=beaten(backward, *LIBRARIES).min(),
        most=beaten(backward, *LIBRARIES).max(),
    ),
    claim(
        "Every row that we normalise has the same bits alone and among "
        "others, at every size here. (Gradients are left out: their dw is a "
        "sum over rows.)",
        ours_alone[ours_alone.ne("")] == "yes",
        of=ours_alone,
    ),
    target(
        "Straight to fp8 is at least twice as fast as a fused norm and then a "
        "fused quantisation.",
        quick["norm, then quantise"] / quick["fusebook"] >= 2,
    ),
    say(
        "Straight to fp8 is {gain:.2f} times as fast; {predicted:.2f} times "
        "were predicted.",
        gain=(quick["norm, then quantise"] / quick["fusebook"]).median(),
        predicted=halved,
    ),
)

# %%
# What became of others' statements
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# quack's authors wrote about their kernels in 2025 (W. Guo, T. Zadouri and
# T. Dao, *Getting Memory-bound Kernels to Speed-of-Light*, on an H100), and
# PyTorch's about what torch.compile makes of norms since (*SOTA Normalization
# Performance with torch.compile*, on H100 and B200). Both speak of
# bandwidth as the datasheet has it: 4.8 TB/s for an H200. *Taken as* says how
# a sentence without a number of its own was tested.

DATASHEET = 4.8e12
theirs = tables.where(large, variant="quack", status="ok").set_index(
    ["M", "N"]
)
their_rate = (theirs["read_bytes"] + theirs["write_bytes"]) / (
    theirs["gpu_us"] * 1e-6
)
their_shares = theirs["copy_us"] / theirs["gpu_us"]
their_share = their_shares.loc[lambda s: s.index.isin(range(4096, 2**20), 1)]
far = tables.where(large, N=[65536, 262144])
narrow = tables.where(large, N=[2880, 4096, 8192])
compiled_over_quack = tables.ratio(narrow, "torch.compile", "quack")
BEHIND = ("torch.compile", "Liger")
claims(
    holds(
        "About 90 % of peak bandwidth from 4096 columns on (quack, 2025, of "
        "an H100): here quack reaches {least:.0%} to {most:.0%} of a copy and "
        "{low:.0%} to {high:.0%} of the datasheet's, which no copy reaches "
        "either. Taken as 90 % of a copy.",
        their_share >= 0.9,
        of=their_shares,
        least=their_share.min(),
        most=their_share.max(),
        low=(their_rate / DATASHEET).min(),
        high=(their_rate / DATASHEET).max(),
    ),
    holds(
        "Clearly ahead of torch.compile and Liger from 65536 columns on "
        "(quack, 2025), taken as 10 % or more: torch.compile takes "
        "{least:.2f} to {most:.2f} times quack's time there, and Liger, where "
        "it has a time, {liger}.",
        pd.concat([tables.ratio(far, way, "quack") for way in BEHIND]) >= 1.1,
        least=tables.ratio(far, "torch.compile", "quack").min(),
        most=tables.ratio(far, "torch.compile", "quack").max(),
        liger=" and ".join(
            f"{r:.2f}" for r in tables.ratio(far, "Liger", "quack")
        ),
    ),
    holds(
        "Rows that no multiprocessor can hold need its clusters, or are read "
        "again (quack, 2025): ours, without clusters, takes {least:.2f} to "
        "{most:.2f} times quack's time there, and would take 1.5 times if it "
        "read twice; taken as more than 1.1 times.",
        tables.ratio(far, "fusebook", "quack") > 1.1,
        least=tables.ratio(far, "fusebook", "quack").min(),
        most=tables.ratio(far, "fusebook", "quack").max(),
    ),
    holds(
        "torch.compile is on a par with quack, larger widths aside (PyTorch), "
        "taken as within 10 % up to 8192 columns: it takes {least:.2f} to "
        "{most:.2f} times quack's time.",
        compiled_over_quack <= 1.1,
        of=tables.ratio(large, "torch.compile", "quack"),
        least=compiled_over_quack.min(),
        most=compiled_over_quack.max(),
    ),
)

# %%
# Where it does not win
# ~~~~~~~~~~~~~~~~~~~~~
#
# Every point of the tables above at which some other way is faster by more
# than 2 %, cold, the worst of each operator first:

table(
    pd.concat({name: tables.losses(frame) for name, frame in every.items()}),
    "Where another way is faster, cold: the fastest, and how far behind",
)

# %%
# By the caller's clock
# ~~~~~~~~~~~~~~~~~~~~~
#
# The device works while the host queues what comes next. So an eager program
# of many calls pays the larger of the two times for each, *paid*, and a short
# kernel is as fast as its launch.

callers = pd.concat([large, few])
by_clock(callers)

# %%
table(tables.clocks(callers), "Every way by every clock, in microseconds")

# %%
# What to take to the next kernel:
#
# - What is in registers can be looked at again for nothing: a mean, a maximum,
#   the statistics that others keep for the backward pass.
# - A sum across programs wants persistent programs: let each take many rows,
#   ask for the next while it works on one, and keep its part to the end.
# - Rounding is part of an operator's meaning: round where the next reader
#   will see it, once.
#
# Exercises
# ---------
#
# 1. Weights around one
# ~~~~~~~~~~~~~~~~~~~~~
#
# Some models store the weight less one, so that a weight of zeros changes
# nothing: y = n (1 + w). Adding one beforehand rounds the weight to its dtype
# and is another launch. Write it into a kernel.


def around_one(x, weight):
    return step_one(x, torch.zeros_like(x), weight)[0]


GIVEN = [
    RMS_NORM.make(generator(seed), torch.float32, M=9, N=n)
    for seed, n in ((4, 64), (5, 781))
]
exercise(
    "around_one adds one to the weight",
    around_one,
    lambda x, weight: torch.nn.functional.rms_norm(
        x, weight.shape, 1 + weight, 1e-6
    ),
    GIVEN,
)

# %%
# 2. A mean that cancels
# ~~~~~~~~~~~~~~~~~~~~~~
#
# This LayerNorm looks at its row once: the variance is the mean of the squares
# less the square of the mean. It is right on rows around zero. Mend it.


@triton.jit
def look_once(y_ptr, x_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(x_ptr + row * N + columns, mask=inside, other=0.0)
    mean = tl.sum(x, 0) / N
    variance = tl.sum(x * x, 0) / N - mean * mean
    y = (x - mean) / tl.sqrt(variance + 1e-5)
    tl.store(y_ptr + row * N + columns, y, mask=inside)


def centred(x):
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    look_once[(len(x),)](y, x, x.shape[1], BLOCK=block)
    return y


exercise(
    "centred is right far from zero",
    centred,
    lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    [(x + 500,) for x, _ in GIVEN],
)

# %%
solution("solutions/plot_104_norms.py")
