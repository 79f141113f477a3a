# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Shapes that nobody chose
========================

A benchmark shows the shapes that its author tried, and a kernel is good where
it was tuned. You bring another shape. Here problems are drawn by a rule that
knows nothing of how our kernels are made, with a seed that nothing was tuned
on, and every way to compute them is timed: this is what you may expect, and
where you had better take something else.

With a CUDA GPU, ``python plot_901_shapes_nobody_chose.py --seed 7`` draws
problems of your own, for as many ``--seconds`` as you give it. Without one,
the record of a named GPU is replayed.

For whom: those whose shapes stand in no benchmark.

Read before: 900.
"""

# %%
# How the draw is made
# --------------------
#
# Each operator has a function that draws a problem somebody has. It stands on
# the operator's card, beside what the operator means, and away from the plans
# of its kernels.

# sphinx_gallery_tags = ["results"]
import fusebook  # noqa: F401  before triton: it decides how kernels run
from fusebook import plots
from fusebook.cards import OPS
from fusebook.cards.softmax import SOFTMAX
from fusebook.measure import explore
from fusebook.page import (
    NoResults,
    Source,
    claim,
    claims,
    downloads,
    explored,
    measured,
    options,
    provenance,
    say,
    table,
    target,
)

import pandas as pd

args = options(seed=100, cases=100, seconds=40)
Source(SOFTMAX.draw)

# %%
# A size is log-uniform: between 64 and 128 there are as many as between 8192
# and 16384. Of all widths 65 % are those of models that people run, 25 % are
# other multiples of 8, and 10 % are odd. Rows are one and up to millions. Of
# the problems 80 % are contiguous in memory. The others are cut from wider
# matrices, begin one element late, or are transposed (*across*). No problem
# moves more than 2 GiB.
#
# The first problems of this seed:

first = pd.DataFrame([SOFTMAX.problem(args.seed, case) for case in range(8)])
table(first, "Problems of a softmax")

# %%
# Each result is checked. Then all implementations are timed in turn, on the
# GPU with a cold L2 cache.

found = explored(seed=args.seed, cases=args.cases, seconds=args.seconds)
ratios = {
    name: explore.ratios(OPS[name], frame) for name, frame in found.items()
}
seeds = sorted({str(f.attrs.get("seed", args.seed)) for f in found.values()})
claims(
    say(
        "{problems} problems of {ops} operators, of {seeds}, were drawn. "
        "Seeds 0 to {last} are there to tune by, and none of them is shown.",
        problems=sum(frame["case"].nunique() for frame in found.values()),
        ops=len(found),
        seeds=f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}",
        last=explore.RECORDED_FROM - 1,
    ),
    say(
        "{stale} of them have the times of earlier code: the tables of the "
        "worst say which.",
        stale=sum(len(f.attrs.get("stale", ())) for f in found.values()),
    ),
    claim(
        "Ours is within its limit at every problem that is shown here, where "
        "the memory sufficed.",
        pd.Series(
            {
                name: not (
                    frame["variant"].eq(explore.fusebooks(OPS[name]))
                    & frame["status"].isin(["wrong", "failed"])
                ).any()
                for name, frame in found.items()
            }
        ),
        fatal=False,
    ),
)

# %%
# A result of ours beyond its limit ends the run of its operator, and what is
# shown are the problems before it. Where there are fewer than were asked for
# without that, the time had ended.
#
# Ours against the best
# ---------------------
#
# Our time, divided by that of the best of what torch has: the chain of
# operations, torch's own function, and torch.compile. Every dot is a problem,
# the bar is the median, and left of the line ours is faster.

plots.spread(
    {name: rows["over torch"] for name, rows in ratios.items()},
    title="Ours over the best of torch and torch.compile, cold",
    xlabel="times as long",
)

# %%
# The same, Liger, quack and ONNX Runtime included where they take it:

plots.spread(
    {name: rows["over all"] for name, rows in ratios.items()},
    title="Ours over the best of all, cold",
    xlabel="times as long",
)

# %%

summary = pd.concat(
    {name: explore.summary(OPS[name], frame) for name, frame in found.items()},
    names=["operator", "against"],
)
table(
    summary,
    "The GPU time of Fusebook over that of the best others, and its target",
    fold=False,
)

# %%
# A target is the median and the 90 % point of the time over the best of torch
# and torch.compile.

behind = pd.concat([rows["over torch"] for rows in ratios.values()])
behind = behind.dropna()
claims(
    claim(
        "At problems that nobody chose, ours takes at most 1.02 times as long "
        "as the best of torch and torch.compile, cold, in more than half of "
        "{count} comparisons: in {share:.0%}. In one of ten it takes more "
        "than {tail:.1f} times as long, at the worst {worst:.1f} times. (A "
        "problem in float32 counts again where TF32 is compared with TF32.)",
        (behind <= 1.02).mean() > 0.5 if len(behind) else None,
        fatal=False,
        headline=True,
        share=(behind <= 1.02).mean(),
        count=len(behind),
        tail=behind.quantile(0.9),
        worst=behind.max(),
    ),
    target(
        "Every operator that has a target meets it.",
        summary["target"]
        .xs("over torch", level="against")
        .map({"met": True, "missed": False})
        .dropna()
        .astype(bool),
    ),
)

# %%
# Who wins where
# --------------
#
# For each operator, at how many problems whose way is the fastest cold; a tie
# within 2 % is ours. *torch* is all that PyTorch does without its compiler,
# weights packed beforehand included.


# site: fold
def winner(row):
    if row["over all"] <= 1.02:
        return "fusebook"
    if row["best"].startswith(("Liger", "quack", "ONNX Runtime")):
        return "a library"
    compiled = "compile", "reduce-overhead", "max-autotune"
    by_compiler = any(word in row["best"] for word in compiled)
    return "torch.compile" if by_compiler else "torch"


wins = pd.DataFrame(
    {
        name: rows.apply(winner, axis=1).value_counts()
        for name, rows in ratios.items()
        if len(rows)
    }
).T
wins = wins.reindex(wins.sum().sort_values(ascending=False).index, axis=1)
wins.index.name = "operator"
table(wins, "Problems at which each is the fastest, cold", fold=False)

# %%
# By how much is moved: is it behind at small problems, which are launches, at
# those that the cache holds, or at large ones? And by layout, the other thing
# that nobody tunes for.

every = pd.concat(ratios, names=["operator"]).reset_index(level=0)
sizes = pd.cut(
    every["bytes"],
    [0, 2**20, 2**24, 2**28, 2**32],
    labels=["under 1 MiB", "to 16 MiB", "to 256 MiB", "above"],
)
table(
    every.pivot_table(
        index="operator",
        columns=sizes,
        values="over all",
        aggfunc="median",
        observed=True,
        sort=False,
    ).sort_index(axis=1),
    "Ours over the best of all in the median, by the bytes that are moved",
    fold=False,
)

# %%
table(
    every.pivot_table(
        index="operator",
        columns="layout",
        values="over all",
        aggfunc="median",
        sort=False,
    ),
    "The same by how the data lies in memory",
    fold=True,
)

# %%
# The ten worst
# -------------
#
# Each part says of some operators why ours is behind where it is, as far as we
# know, what was tried, what was mended, and what the lost problems have in
# common. The ten worst are folded, each as a line of Python that does it again
# on your GPU, by ``fusebook.measure.explore``. A time that is *stale*
# is of the code before the last fix.


told_of = set()


def common(*names):
    """What the problems of operators have in common that ours loses, cold."""
    rows = [ratios[name] for name in names if name in found]
    rows = pd.concat(rows) if rows else every.head(0)
    lost = rows[rows["over all"] > 1.02]
    to = lost["best"].value_counts()
    if lost.empty:
        return say(
            "Another way is faster at none of {all} problems.", all=len(rows)
        )
    return say(
        "Another way is faster by more than 2 % at {lost} of {all} problems, "
        "and by more than 25 % at {far}. Of the {lost}, {small} move less "
        "than 1 MiB, and {odd} are not contiguous in memory. Most often "
        "{best} is the fastest way: at {times} of them.",
        all=len(rows),
        lost=len(lost),
        far=(lost["over all"] > 1.25).sum(),
        small=(lost["bytes"] < 2**20).sum(),
        odd=(lost["layout"] != "contiguous").sum(),
        times=to.iloc[0],
        best=to.index[0],
    )


def ten(*names):
    """Where ours is not the fastest, cold: the ten worst of operators."""
    told_of.update(names)
    lost = []
    for name in names:
        if name in found:
            rows = ratios[name].nlargest(10, "over all")
            old = rows["case"].isin(found[name].attrs.get("stale", ()))
            rows["stale"] = old.map({True: "yes", False: ""})
            lost.append(rows[rows["over all"] > 1.02])
    columns = ["over all", "best", "best_us", "fusebook_us", "stale", "line"]
    lost = pd.concat(lost)[columns] if lost else pd.DataFrame(columns=columns)
    lost["line"] = [str(line).partition("; ")[2] for line in lost["line"]]
    title = f"The ten worst of {' and '.join(names)}"
    return table(lost.set_index("line"), title, fold=len(lost) > 0)


# %%
# Element by element
# ~~~~~~~~~~~~~~~~~~
#
# *Why.* Narrow rows, cut from a wider matrix (*sliced*) or beside a column,
# leave tiles mostly empty. So the kernel counts elements along the result, and
# each group of adjacent elements finds its place by one division. A transposed
# operand is read by tiles, which are long where it has few columns. The other
# problems are small and take little longer than a launch: up to 65536 elements
# are taken one by one, since that needs fewer instructions, and so are rows of
# an odd number of elements.
#
# *Tried.* For more elements, blocks of a quarter to twice the size: they are
# within a few percent of each other.

common("multiply", "silu")

# %%
ten("multiply", "silu")

# %%
# Softmax and its gradient
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# *Why.* With few wide rows, only a handful of programs run. The time is then
# one chain of loads, sums and stores, not the time that memory needs. The
# library quack spreads such a row over a :term:`cluster`, whose programs meet
# in shared memory. In Fusebook the programs of a wide row exchange their sums
# through a small buffer in memory, which the launch clears first. Narrow rows
# of a permuted tensor may be adjacent in memory and far apart in the result. A
# small problem takes little longer than its launch.
#
# *Tried.* Clusters of 2 to 8 programs of 4 to 16 warps. All were faster for a
# few rows, and most were slower for thousands. The number of rows cannot
# choose between them, because the bits of a row must not depend on it.
#
# *Changed since.* A table of a few lines chooses the launch config by the
# width alone. Transposed rows (*across*) are read in tiles of several rows.
# Rows across that do not fit into registers are copied first. Wide rows of
# float64 are computed by PyTorch.

common("softmax", "softmax_backward")

# %%
ten("softmax", "softmax_backward")

# %%
# Norms and losses
# ~~~~~~~~~~~~~~~~
#
# *Why.* Transposed rows of norms (*across*) are read where they are up to 1024
# numbers. Wider ones are read twice where a residual comes with them, or where
# they are many in float32; all others are copied first, which is two passes
# more. One to a few wide rows wait for the launch that clears a board. A small
# problem is a launch and one row's latency. In float64 a loss reads rows of a
# whole vocabulary twice: a word of the board has no room for a maximum and a
# sum of float64.
#
# *Tried.* One program of 32 warps, and smaller parts of a row: both are faster
# for a few rows and slower for many, and a plan may look at the width alone.
#
# *Mended.* Rows that begin within a vector of 16 bytes are read by whole
# vectors. Weights of wide rows are asked for a tile ahead, as far as registers
# go.

common("rms_norm", "add_rms_norm", "layer_norm", "cross_entropy")

# %%
ten("rms_norm", "add_rms_norm", "layer_norm", "cross_entropy")

# %%
# Gradients of norms
# ~~~~~~~~~~~~~~~~~~
#
# *Why.* Transposed rows (*across*) of more than 1024 numbers, and of more than
# half a million in all, were copied first, x and its gradient alike: four
# passes more. A single row is one launch, whose loop is made for many rows.
#
# *Tried.* A loop that has one tile under way, for a single row: it is shorter,
# but its threads hold other numbers of the row, and the bits of a row must not
# depend on how many there are. Two to eight warps for narrow rows: faster at
# the two problems where they were tried.
#
# *Mended.* Each program leaves a partial row of the weight's gradient. These
# are added up 512 at a time, by a kernel that starts while they are made; of
# few rows one program writes the sum itself. In half types a thread has 16
# numbers of a row, since 32 did not fit into its registers. Transposed rows
# are read where they are, by tiles of a few neighbouring rows: short ones
# once, wide ones twice.

common("rms_norm_backward", "layer_norm_backward")

# %%
ten("rms_norm_backward", "layer_norm_backward")

# %%
# A loss without logits
# ~~~~~~~~~~~~~~~~~~~~~
#
# *Why.* PyTorch's products are slow where rows of hidden states or of the head
# begin within a vector of 16 bytes, and small problems are about ten launches.
# In float16 the logits were computed twice, for the loss and for the gradient.
#
# *Tried.* Copies of hidden states or of the head alone to where they are
# aligned: slower at most problems.
#
# *Mended.* A number of classes that is no multiple of eight, as 50257, leaves
# a few beside whole vectors. These are multiplied apart. In float16 the
# gradients of logits are raised by a power of two until they are multiplied:
# of 256000 classes they were no normal numbers, and the head's gradient was
# wrong. A problem of a tuning seed had shown it. The last two things: in
# float16 logits that take no more memory than what they are made from are kept
# for the gradient; and half types whose rows are no whole vectors are copied
# into rows that are, both factors and both results, where the products are
# large enough to pay for that.

common("linear_cross_entropy")

# %%
ten("linear_cross_entropy")

# %%
# A step of AdamW
# ~~~~~~~~~~~~~~~
#
# *Why.* Lists of few numbers are one launch, which first reads from a table
# where its tensors lie. A compiled step has the addresses as arguments. Two
# lists were timed while something that is not known disturbed the GPU: that of
# 348 numbers, and that of 240 tensors, where PyTorch's own fused step took
# several times its time, too. Timed again by themselves, in a trial, ours took
# less time than any way has in the record.
#
# *Tried.* Chunks of 256 to 1024 numbers, with one to four blocks of each. Of
# three million numbers and more all are within a few percent.
#
# *Mended.* Few numbers of half types are stepped by short chunks, whose
# programs all run at once.

common("adamw_step")

# %%
ten("adamw_step")

# %%
# The nearest of some centres
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# *Few coordinates.* Each of millions of points has a thread, which compares it
# with every centre. Where points are few, a tile has pairs of a point and a
# centre. A product was tried and was slower: six coordinates are padded to
# sixteen, and finding the nearest centre is most of the work.
#
# *Many coordinates.* Some hundred or thousand points make tiles for only a
# part of the multiprocessors. Seven tiles were tried, from 32 x 32 to 128 x 64
# in steps of 16 and 32 coordinates: the smallest is faster there, and slower
# everywhere else. What remains is what a product in float64 costs beside one
# in float32.
#
# *Points in doubt.* The product leaves a point or two without a label, where
# it cannot tell the two nearest centres apart. A program compares such a point
# with all centres, which takes long with thousands of coordinates.
#
# *Layouts.* Transposed points, and points that begin within a word, are loaded
# a number at a time. For rows of odd length a copy pays, and is made; for
# these it would cost what it saves. Small problems are a launch or two.

common("kmeans_assign")

# %%
ten("kmeans_assign")

# %%
# Rows that indices name
# ~~~~~~~~~~~~~~~~~~~~~~
#
# *Why.* In half types the compiled gradient of an embedding adds into the
# table itself and rounds at every addition, which is right as long as a row is
# looked up a few times. Ours adds in float32 and rounds once: it sorts the
# lookups first, or rounds a table of float32 afterwards. Where the table is
# small that is a launch more; where it is narrow and large, a pass more. By
# Zipf's law a few rows have most of the lookups. Ours cuts these rows in
# pieces and adds them in one order; atomic additions have no second pass, and
# no order either. With a handful of lookups in a large table most of the time
# goes into writing zeros.
#
# *Tried.* Each of the three strategies beside the one that is chosen. That was
# the fastest at all but a few problems of half types; those with hundreds of
# lookups for each row are no longer grouped.

common("masked_scatter_nd_of_shape", "embedding_backward")

# %%
ten("masked_scatter_nd_of_shape", "embedding_backward")

# %%
# A step of logistic regression
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# *Why.* A transposed X with up to 2048 features is read as it lies, once; the
# compiled step reads it twice. With more features X is copied to rows before
# the step, and the copy reads with large strides. One to a few rows are a
# single launch, and so is all that one tile holds; otherwise the second launch
# is under way before the first has ended. Rows are padded to a power of two:
# of 512 lanes 278 may have work, where a library has no padding. With more
# than 16384 features X is read twice.
#
# *Tried.* Two passes with tiles that follow the columns, in place of the copy:
# slower at each of nine problems.
#
# *Mended.* Rows that begin within a vector of 16 bytes come in tiles of half
# the size. With more than 16384 features a program takes one row for the
# margins, and the programs of the columns share out the rows, where launches
# had fewer programs than the GPU has room for.

common("logistic_step")

# %%
ten("logistic_step")

# %%
# Products side by side
# ~~~~~~~~~~~~~~~~~~~~~
#
# *Packed* is given more: its weights were put side by side before the clock
# started, and are one product to PyTorch. Fusebook takes both as they are.
#
# *Up to 64 rows* each weight is read once, and the time is that of memory.
# Tiles are narrow there, and long sums along K are cut into parts. Weights
# that no descriptor describes go to PyTorch, or are copied first. Tried: tiles
# of 16 to 64 rows by 16 to 128 columns in steps of 32 to 128, and sums in one
# to 64 parts. Hints to keep the weights in L2 changed nothing.
#
# *From 65 to 512 rows* the last round of tiles is not full. Triton's tiles are
# powers of two; a library also has 192 columns, and divides the sums of the
# last round. Tried: tiles of 64 x 32 to 128 x 256, each with its rounds
# counted.
#
# *In float32* Fusebook adds three products in TF32. Large weights in rows are
# turned into columns first.
#
# *Changed since.* A table gives the tiles for each size, and says where
# PyTorch's product was faster. Formulas used to predict both. Products without
# tensor cores for one and two rows are gone.
#
# *Odd widths with few steps along K*, as 30164 x 222: threads have to store
# element by element what the copy engine cannot. Such weights are copied side
# by side first, as one weight with one edge.

common("concat_gemm")

# %%
ten("concat_gemm")

# %%
# SwiGLU
# ~~~~~~
#
# *Few to some hundred rows.* *Packed + compiled* is one product of a library,
# and one kernel of the compiler's behind it. That product is faster for the
# reasons given above for products. A tile of Fusebook's kernel also holds sums
# of both weights, which leaves half as many tiles to choose from. Tried: 64 x
# 32 to 128 x 128 columns of both, transposed products of 16 to 256 rows, and
# two and three programs a multiprocessor. Where the table says so, PyTorch
# computes both products, and one kernel does the rest. At some sizes PyTorch's
# product takes much longer in float16 than in bfloat16, and the table does not
# tell the two apart.
#
# At *thousands of rows* quack is faster. Its groups of warps take turns: some
# use the tensor cores while others finish a tile. In Fusebook all warps do the
# same at once. Tried: to fetch the next tile before the end of this one,
# stores by the copy engine, and tiles walked in groups of 8 and 16 rows.
#
# *In float32*, at small problems and at those of a long K with few columns,
# one packed product is faster, because it divides its sums faster.

common("swiglu")

# %%
ten("swiglu")

# %%
# Operators that no part above names, for which nothing was tried:

rest = [name for name in found if name not in told_of]
common(*rest) if rest else say("None.")

# %%
ten(*rest) if rest else None

# %%
# What others do not compute, refuse or get wrong:

refused = pd.concat(found.values(), ignore_index=True)
refused = refused[refused["status"] != "ok"]
refused = refused.groupby(["op", "variant", "status"], sort=False).agg(
    problems=("case", "nunique"), note=("note", "first")
)
table(refused, "Not timed, by variant and reason", fold=True)

# %%
provenance(*found.values())

# %%
# A seed of your own
# ------------------
#
# On your GPU, ``--seed`` and ``--cases`` draw other problems into this page.
# The command line does the same without a page, for the operators that you
# name, and writes a table. Problems of seeds below 100 are for tuning.
#
# .. code-block:: sh
#
#    python -m fusebook.measure.explore softmax swiglu --seed 7 --cases 100
#
# Is there something that you compute and the rule does not draw? Then the rule
# is wrong. Say so, and it will be among the reported ones.

downloads(every, "shapes_nobody_chose")

# %%
# Reported by users
# -----------------
#
# Shapes that were brought to us from outside, at which ours was slow when
# they came: vocabularies as they are and not as they are padded, few rows of
# many columns, few tokens, the largest of layers, narrow rows of large
# tables, few centres of many coordinates. They are measured anew with every
# record.


# site: fold
def rows_of(M, N, dtype="float32", layout="contiguous"):
    return "softmax", {"M": M, "N": N, "dtype": dtype, "layout": layout}


# site: fold
def tokens(M, K, N):
    sizes = {"M": M, "K": K, "N": N}
    return "swiglu", {**sizes, "dtype": "bfloat16", "layout": "contiguous"}


# site: fold
def points(n, d, k):
    sizes = {"n": n, "d": d, "k": k, "labels": "int64", "law": "blobs"}
    return "kmeans_assign", {
        **sizes,
        "dtype": "float32",
        "layout": "contiguous",
    }


REPORTED = [
    *(rows_of(4096, 50257, dtype) for dtype in ("float32", "bfloat16")),
    rows_of(2048, 100003),
    *(rows_of(4096, 50304, dtype) for dtype in ("float32", "bfloat16")),
    rows_of(1024, 262144),
    rows_of(64, 151936),
    rows_of(8, 151936),
    rows_of(262144, 128, layout="permuted"),
    tokens(1, 4096, 14336),
    tokens(8, 4096, 14336),
    tokens(32, 5120, 13824),
    tokens(4096, 8192, 28672),
    tokens(1024, 4096, 11008),
    (
        "embedding_backward",
        {
            "R": 1048576,
            "D": 64,
            "n": 65536,
            "law": "zipf",
            "dtype": "float32",
            "layout": "contiguous",
        },
    ),
    points(20000, 3000, 50),
    points(100000, 784, 10),
]


def reported():
    """Every shape, checked and timed as the drawn ones are."""
    shown = []
    for name, dims in REPORTED:
        rows = explore.ratios(OPS[name], explore.problem(name, **dims))
        words = [str(v) for v in dims.values() if v != "contiguous"]
        rows.insert(0, "problem", " ".join([name, *words]))
        shown.append(rows[rows["math"] == ""])
    columns = ["problem", "fusebook_us", "torch", "torch_us"]
    columns += ["best", "best_us"]
    return pd.concat(shown)[[*columns, "over torch", "over all"]]


try:
    users = measured("explored_reported", reported).set_index("problem")
    told = table(
        users, "Reported by users: cold time in microseconds", fold=False
    )
except NoResults:
    users = None
    told = claims(
        say(
            "They have not been measured on this GPU yet: `nox -s record` "
            "does it."
        )
    )
told

# %%
over = {} if users is None else users
claims(
    target(
        "At each of these shapes ours takes at most 1.15 times as long as the "
        "best of torch and torch.compile.",
        over["over torch"] <= 1.15 if len(over) else None,
    ),
    target(
        "At each of them it takes at most 1.25 times as long as the best of "
        "all.",
        over["over all"] <= 1.25 if len(over) else None,
    ),
)
