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
from fusebook import explore, plots
from fusebook.cards import OPS
from fusebook.cards.softmax import SOFTMAX
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
)

import pandas as pd

args = options(seed=100, cases=100, seconds=40, without="max-autotune")
Source(SOFTMAX.draw)

# %%
# A size is log-uniform: between 64 and 128 there are as many as between 8192
# and 16384. A third of all widths are those of models that people run, a
# third are odd, a third even. Rows are one and up to millions. Half of the
# problems are contiguous in memory; the others are cut from wider matrices,
# begin one element late, or are transposed (*across*). No problem moves more
# than 2 GiB.
#
# The first problems of this seed:

first = pd.DataFrame(explore.problems(SOFTMAX, args.seed, 8))
table(first, "Problems of a softmax")

# %%
# Each result is checked, and a wrong one of ours ends the run. Then all ways
# are timed in turn, on the device after a flush of its cache (*cold*), and on
# the host where nothing else runs there. *Paid* is what a program of many
# calls pays for each, the larger of both.

found = explored(
    seed=args.seed,
    cases=args.cases,
    seconds=args.seconds,
    without=[word for word in args.without.split(",") if word],
)
standing = {
    kind: {
        name: explore.standing(OPS[name], frame, kind)
        for name, frame in found.items()
    }
    for kind in ("cold", "paid")
}
seeds = sorted({str(f.attrs.get("seed", args.seed)) for f in found.values()})
claims(
    say(
        "{problems} problems of {ops} operators, of seed {seeds}. Seeds 0 to "
        "{last} are there to tune by, and none of them is shown.",
        problems=sum(frame["case"].nunique() for frame in found.values()),
        ops=len(found),
        seeds=", ".join(seeds),
        last=explore.RECORDED_FROM - 1,
    ),
    claim(
        "Ours computes every problem that is shown here within its limit.",
        pd.Series(
            {
                name: not (
                    frame["variant"].eq(explore.ours(OPS[name]))
                    & frame["status"].ne("ok")
                ).any()
                for name, frame in found.items()
            }
        ),
        fatal=False,
    ),
)

# %%
# A result of ours beyond its limit ends the run of its operator, and what is
# shown are the problems before it. One did so with seed 100 on an H200:
#
# .. code-block:: python
#
#    explore.problem(
#        "softmax_backward",
#        M=34, N=201088, dtype="float16", layout="contiguous",
#    )
#
# It has probabilities so small that float16 rounds them by a percent before
# the gradient begins: they are its input, while the reference takes those of
# float64. Where there are fewer than a hundred without that, time had ended.

counts = {name: frame["case"].nunique() for name, frame in found.items()}
table(pd.Series(counts, name="problems").to_frame(), "Problems explored")

# %%
# Ours against the best
# ---------------------
#
# How long ours takes, in times of the best of what torch has: the chain of
# operations, torch's own function, and torch.compile. Every dot is a problem,
# the bar is the median, and left of the line ours is faster.

plots.spread(
    {name: rows["over torch"] for name, rows in standing["cold"].items()},
    title="Ours over the best of torch and torch.compile, cold",
    xlabel="times as long",
)

# %%
# The same, Liger, quack and ONNX Runtime included where they take it:

plots.spread(
    {name: rows["over all"] for name, rows in standing["cold"].items()},
    title="Ours over the best of all, cold",
    xlabel="times as long",
)

# %%

quantiles = pd.concat(
    {
        name: explore.quantiles(OPS[name], frame)
        for name, frame in found.items()
    },
    names=["operator"],
)
table(
    quantiles.xs("cold", level="clock"),
    "Ours in times of the best of the others, cold",
    fold=False,
)

# %%
paid = quantiles.xs("paid", level="clock")
paid = paid[paid["problems"] > 0]
table(paid, "The same by what a program of many calls pays")

# %%

hosted = sum(len(rows) for rows in standing["paid"].values())
cold = sum(len(rows) for rows in standing["cold"].values())
claims(
    say(
        "What a program pays is known of {hosted} of these {cold} problems. "
        "Of the others the host's clock was left out: several GPUs of one "
        "host were explored at once, and their processes share it.",
        hosted=hosted,
        cold=cold,
    )
    if hosted < cold
    else say("The host's clock was taken for all {cold}.", cold=cold)
)

# %%
# What we want of a problem that nobody chose: against the best of torch and
# torch.compile, 0.95 in the median, 1.03 at nine of ten and 1.15 at the
# worst; against the best of all 1.00, 1.08 and 1.25; and 1.10 at nine of ten
# of what a program pays.


def wanted(clock, company, **most):
    """Whether each operator stays under what is wanted."""
    rows = quantiles.xs((clock, company), level=("clock", "ours"))
    rows = rows.rename(columns={"90 %": "p90"})
    good = (rows[list(most)] <= pd.Series(most)).all(axis=1)
    return good[rows["problems"] > 0]


behind = pd.concat([rows["over torch"] for rows in standing["cold"].values()])
behind = behind.dropna()
claims(
    claim(
        "At {share:.0%} of {count} problems that nobody chose ours takes at "
        "most 1.02 times as long as the best of torch and torch.compile, "
        "cold; at one of ten it takes more than {tail:.1f} times as long, at "
        "the worst {worst:.0f} times.",
        (behind <= 1.02).mean() > 0.5 if len(behind) else None,
        fatal=False,
        headline=True,
        share=(behind <= 1.02).mean(),
        count=len(behind),
        tail=behind.quantile(0.9),
        worst=behind.max(),
    ),
    claim(
        "Cold, over the best of torch and torch.compile, every operator takes "
        "at most 0.95 times as long in the median, 1.03 at nine of ten "
        "problems and 1.15 at the worst.",
        wanted("cold", "over torch", median=0.95, p90=1.03, worst=1.15),
        fatal=False,
    ),
    claim(
        "Cold, over the best of all, every operator takes at most 1.00 times "
        "as long in the median, 1.08 at nine of ten and 1.25 at the worst.",
        wanted("cold", "over all", median=1.00, p90=1.08, worst=1.25),
        fatal=False,
    ),
    claim(
        "As paid, over the best of torch and torch.compile, every operator "
        "takes at most 1.10 times as long at nine of ten problems.",
        wanted("paid", "over torch", p90=1.10),
        fatal=False,
    ),
)

# %%
# Who wins where
# --------------
#
# For each operator, at how many problems which way is the fastest cold; a tie
# within 2 % is ours.


def winner(row):
    return "fusebook" if row["over all"] <= 1.02 else row["best"]


wins = pd.DataFrame(
    {
        name: rows.apply(winner, axis=1).value_counts()
        for name, rows in standing["cold"].items()
        if len(rows)
    }
).T
wins = wins.reindex(wins.sum().sort_values(ascending=False).index, axis=1)
wins.index.name = "operator"
table(wins, "Problems at which a way is the fastest, cold", fold=False)

# %%
# Small problems are launches, those in the middle live in the cache, and the
# large ones are what memory and arithmetic make of them. Layouts are the
# other thing that nobody tunes for.

every = pd.concat(standing["cold"], names=["operator"]).reset_index(level=0)
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
    fold=False,
)

# %%
# The ten worst
# -------------
#
# Of each operator, the problems at which ours is furthest behind, what they
# have in common, and what was tried for them. After ``from fusebook import
# explore`` each line does one of them again, on your GPU.


told_of = set()


def ten(*names):
    """Where ours is not the fastest, cold: the ten worst of operators."""
    told_of.update(names)
    lost = []
    for name in names:
        if name in found:
            rows = explore.worst(OPS[name], found[name])
            lost.append(rows[rows["over all"] > 1.02])
    columns = ["over all", "best", "best_us", "ours_us", "line"]
    lost = pd.concat(lost)[columns] if lost else pd.DataFrame(columns=columns)
    lost["line"] = [str(line).partition("; ")[2] for line in lost["line"]]
    title = f"The ten worst of {' and '.join(names)}"
    return table(lost.set_index("line"), title)


# %%
# Element by element
# ~~~~~~~~~~~~~~~~~~
#
# Narrow rows are the worst, cut from a wider matrix (*sliced*) or beside a
# column: tiles of them are mostly empty. Kernels that are later than this
# record count elements along the result, and a group of neighbours finds its
# place by one division. What is transposed is read by square tiles, which are
# partly empty where it has few columns. The rest are launches: blocks of a
# quarter to twice the size are within a few percent of each other.

ten("multiply", "silu")

# %%
# Softmax and its gradient
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# Few and wide rows: one program or a handful holds a row, and the time is that
# of one chain of loads, sums and stores, not of memory. quack spreads such a
# row over a cluster, whose programs meet in shared memory; ours meet in
# memory, after a launch that clears their board. We tried clusters, which were
# slower for many rows, and parts of 1024 to 16384 numbers by 2 to 16 warps.
# Smaller parts are faster for tens of rows and slower for thousands, and the
# width alone decides, since a row's bits must not depend on how many come with
# it.
#
# Kernels that are later than this record share wide rows of float64, too,
# which one program used to read twice; each of few rows of a gradient has
# programs of its own, which come to the same bits as those that go from row to
# row; rows that lie across are laid side by side first, or read where they
# are, by a program each, if they are few; and numbers of half types that must
# be loaded one by one are held by more warps: 16 of them in each of 16 tiles
# were more than a thread's registers. Small problems are launches.

ten("softmax", "softmax_backward")

# %%
# Norms and losses
# ~~~~~~~~~~~~~~~~
#
# Rows that lie across are laid side by side first, two passes more; tiles that
# are turned in registers were tried, and were slower. One to a few wide rows
# wait for the launch that clears a board: one program of 32 warps and smaller
# parts are faster for them and slower for many, and the width alone decides.
# Rows that begin within a vector are read by whole ones in kernels that are
# later than this record, and weights of wide rows are asked for a tile ahead,
# as far as registers go. The small ones are a launch and one row's latency.
#
# Of losses, float64 of whole vocabularies is behind: its rows are read twice,
# since a word of the board has no room for it.

ten("rms_norm", "add_rms_norm", "layer_norm", "cross_entropy")

# %%
# Clusters
# ~~~~~~~~
#
# Millions of points of few coordinates and many centres were given to the
# product, whose costs had been learned from points of more coordinates: six of
# them fill sixteen columns of a tile, and to ask who is nearest is most of the
# work. They have a thread a point now, or, where those are few, tiles of pairs
# of a point and a centre.
#
# Some hundred or thousand points of many coordinates are tiles for a part of
# the multiprocessors only. Of seven tiles, from 32 x 32 to 128 x 64 in steps
# of 16 and 32 coordinates, the smallest is faster there, and slower everywhere
# else. What remains is what a product in float64 costs beside one in float32.
#
# A single point in doubt: the product finds all labels but one or two, whose
# two nearest centres it cannot tell apart. One program compares such a point
# with all centres, and with thousands of coordinates it takes longer than all
# others together did. To share out the centres of a short list was not done.
# Points that lie across, or begin off a word, are loaded a number at a time;
# for odd rows a copy pays, and is made, for these it would cost what it saves.
# The small ones are a launch or two.

ten("kmeans_assign")

# %%
# Rows that indices name
# ~~~~~~~~~~~~~~~~~~~~~~
#
# The compiled gradient of an embedding in half types adds into the table
# itself and rounds at every addition, which is right as long as a row is
# looked up a few times. Ours adds in float32 and rounds once: it sorts the
# lookups first, or rounds a table of float32 afterwards. Where the table is
# small that is a launch more; where it is narrow and large it is the whole
# difference. By Zipf's law a few rows have most of the lookups; they are cut
# in pieces that are added in one order, while atomic additions have no second
# pass, and no order either. A handful of lookups in a large table is zeros. We
# held each of the three strategies against the one that is chosen: it was the
# fastest at all but a few problems of half types, of which those with hundreds
# of lookups for each row are grouped since.

ten("masked_scatter_nd_of_shape", "embedding_backward")

# %%
# A step of logistic regression
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# X that lies by columns was copied to rows before the step, and the copy reads
# with large strides; of up to 2048 features it is read as it lies now, and
# once, where the compiled step reads it twice. Two passes of our own, with
# tiles that follow the columns, were slower at every one of nine problems.
# Wider ones are still copied. One to a few rows are a single launch since; of
# others the second launch is under way before the first has ended. Rows are
# padded to a power of two, so that of 512 lanes 278 may have work, where a
# library has no padding.

ten("logistic_step")

# %%
# Products side by side
# ~~~~~~~~~~~~~~~~~~~~~
#
# Most are lost to *packed*: weights that were put side by side before the
# clock started are one product to PyTorch, and ours finds them where they are.
# Up to 64 rows each weight is read once, and the time is that of memory. We
# tried tiles of 16 to 64 rows by 16 to 64 columns in steps of 32 to 128, sums
# in one to 16 parts, and descriptors; counters of parts become zero while the
# product is under way. One row and two are multiplied without tensor cores
# where columns lie side by side: number by number as they were loaded. Four
# rows that way, and weights that lie in rows, were slower. Rows of odd length
# are fetched number by number; to copy them first takes longer.
#
# From 65 to 512 rows the last round of tiles is not full. We tried tiles of 64
# x 32 to 128 x 256, each with its rounds counted. Triton's tiles are powers of
# two; a library also has 192 columns, and divides the last round's sums, which
# our tiles do not. So few tiles of a long K are PyTorch's: in float32 where
# they are fewer than the multiprocessors, in half types where they are half as
# many. In float32 we add three products in TF32, from small tiles; weights in
# rows become columns first, which pays from 512 rows on and large weights.
# Below, and where rows begin anywhere, the products are PyTorch's, each into
# its own columns, and one packed product is faster.
#
# Where widths are odd and K has few steps, as at 30164 x 222, threads stored
# number by number what the copy engine cannot, at three edges of a tile's
# columns. Copies of such weights lie side by side now, as one weight with one
# edge, and the copy engine stores the product where its rows are aligned.

ten("concat_gemm")

# %%
# SwiGLU
# ~~~~~~
#
# *Packed + compiled* is one product of a library, and one kernel of the
# compiler's behind it. It wins at few rows of odd length and in the middle,
# for the reasons above, and because ours holds sums of both weights, which
# leaves half as many tiles to choose from. We tried 64 x 32 to 128 x 128
# columns of both, transposed products of 16 to 256 rows, two and three
# programs a multiprocessor, and PyTorch's two products with one kernel behind
# them, which the plan takes where rounds are bad. One such choice depends on
# the dtype: at some sizes PyTorch's product takes much longer in float16 than
# in bfloat16, and no plan of ours knows where.
#
# Thousands of rows are lost to quack, whose groups of warps take turns at the
# tensor cores while the others finish a tile. Ours all do the same at once. We
# tried to fetch the next tile before the end of this one, stores by the copy
# engine, and tiles walked in groups of 8 and 16 rows. Small problems in
# float32 are lost to one packed product. A long K with few columns, a few
# tiles with a long sum each, is PyTorch's two products.

ten("swiglu")

# %%
# All others
# ~~~~~~~~~~
#
# Of these nothing was tried for what is lost here alone.

ten(*[name for name in found if name not in told_of])

# %%
# What others do not compute, refuse or get wrong:

refused = pd.concat(
    {name: explore.refusals(frame) for name, frame in found.items()},
    names=["operator"],
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
#    python -m fusebook.explore softmax swiglu --seed 7 --cases 100
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


def rows_of(M, N, dtype="float32", layout="contiguous"):
    return "softmax", {"M": M, "N": N, "dtype": dtype, "layout": layout}


def tokens(M, K, N):
    sizes = {"M": M, "K": K, "N": N}
    return "swiglu", {**sizes, "dtype": "bfloat16", "layout": "contiguous"}


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
    frames = explore.several(REPORTED)
    for (name, dims), frame in zip(REPORTED, frames, strict=True):
        rows = explore.standing(OPS[name], frame)
        words = [str(v) for v in dims.values() if v != "contiguous"]
        rows.insert(0, "problem", " ".join([name, *words]))
        shown.append(rows[rows["math"] == ""])
    columns = ["problem", "ours_us", "torch", "torch_us", "best", "best_us"]
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
    claim(
        "At each of these shapes ours takes at most 1.15 times as long as the "
        "best of torch and torch.compile.",
        over["over torch"] <= 1.15 if len(over) else None,
        fatal=False,
    ),
    claim(
        "At each of them it takes at most 1.25 times as long as the best of "
        "all.",
        over["over all"] <= 1.25 if len(over) else None,
        fatal=False,
    ),
)
