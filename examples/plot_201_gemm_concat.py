# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book,ort]", "onnxruntime"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
One big Gemm or two smaller ones
================================

A layer often multiplies one matrix with several: the queries, keys and values
of attention, the two halves of a gated layer. One can multiply twice and put
the results side by side, or put the weights side by side and multiply once.
Which is faster? This page predicts how much the question can matter, adds
two answers that move nothing at all, and draws a map of who wins.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them.

Read before: 002.
"""

# %%
# The problem
# -----------
#
# Given x of shape M x K and two weights of shape K x N, we want the M x 2N
# matrix
#
# .. math::
#
#    y = [\, x\,w_0, \;\; x\,w_1 \,]
#
# As ONNX writes it, there are two graphs that mean the same. One concatenates
# what comes out, the other what goes in.

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import machine, plots, tables
from fusebook.cards.concat_gemm import CONCAT_GEMM, _in_views
from fusebook.inputs import generator, rough
from fusebook.kernels._products import _filled, _gemm_plan, _stack, _take_over
from fusebook.kernels.concat_gemm import (
    _concat_gemm_stacked,
    concat_gemm_eager,
)
from fusebook.op import Cost
from fusebook.ort import Graph
from fusebook.page import (
    Listing,
    Source,
    by_clock,
    claim,
    claims,
    downloads,
    exercise,
    extra,
    holds,
    provenance,
    say,
    solution,
    study,
    table,
)

import matplotlib.pyplot as plt
import pandas as pd
import torch
import triton
import triton.language as tl

with extra("ort"):
    import onnx
    import onnx.helper as oh

asked = study(
    CONCAT_GEMM,
    config="small,medium,large",
    dtype="bfloat16,float16",
    repeat=20,
)

FLOAT = onnx.TensorProto.FLOAT


def model(first):
    """Concatenate the products, or the weights."""
    nodes = {
        "products": [
            oh.make_node("Gemm", ["X", "Y"], ["XY"]),
            oh.make_node("Gemm", ["X", "Z"], ["XZ"]),
            oh.make_node("Concat", ["XY", "XZ"], ["XYZ"], axis=1),
        ],
        "weights": [
            oh.make_node("Concat", ["Y", "Z"], ["YZ"], axis=1),
            oh.make_node("Gemm", ["X", "YZ"], ["XYZ"]),
        ],
    }
    shapes = {"X": "MK", "Y": "KN", "Z": "KP", "XYZ": "MQ"}
    values = {
        name: oh.make_tensor_value_info(name, FLOAT, list(axes))
        for name, axes in shapes.items()
    }
    result = values.pop("XYZ")
    graph = oh.make_graph(
        nodes[first], "concat_" + first, list(values.values()), [result]
    )
    opset = [oh.make_opsetid("", 18)]
    return oh.make_model(graph, ir_version=10, opset_imports=opset)


Listing(
    "\n\n".join(
        onnx.printer.to_text(model(first)) for first in ("products", "weights")
    )
)

# %%
# They agree to the last digits: the same sums, perhaps in another order.

rng = generator(0, "cpu")
feeds = {
    name: torch.randn(size, generator=rng)
    for name, size in {"X": (16, 32), "Y": (32, 24), "Z": (32, 8)}.items()
}
by_products, by_weights = (
    Graph(model(first), device="cpu")(feeds)["XYZ"]
    for first in ("products", "weights")
)
wanted = concat_gemm_eager(*feeds.values())
claims(
    claim(
        "In ONNX Runtime the two graphs give the same numbers",
        torch.allclose(by_products, by_weights, atol=1e-5),
    ),
    claim(
        "and PyTorch gives them as well",
        torch.allclose(by_products, wanted, atol=1e-5),
    ),
)

# %%
# What eager costs
# ----------------
#
# In PyTorch the first graph is two products and a copy. The comments are its
# traffic.

Source(concat_gemm_eager)

# %%
# A product of large matrices does 2MKN operations on MK + KN + MN numbers: its
# time grows with the cube of n, the traffic of a Concat with the square. So
# the larger n, the less the question can matter; and the smaller n, the less
# there is to copy, and what counts is the number of launches. Both can be put
# into numbers before anything is timed. The model has three terms, all taken
# from what this machine was measured to do:
#
# - the products at the rate of its matrix units;
# - the Concat at the rate of its memory, reading and writing what it joins;
# - for each launch beyond the first the time of an empty kernel.
#
# That is about the most that Concat and launches can cost: small matrices do
# not go to memory but to the L2 cache, and a launch may hide behind its
# predecessor. For large n it will be hard to see: a product's own time moves
# by more than what is predicted.

SIZES = (256, 512, 1024, 2048, 4096, 8192)
on = machine.current()
rows = {}
for n in SIZES:
    dims = {"M": n, "K": n, "N": n, "weights": "two"}
    product = max(on.roof(CONCAT_GEMM.cost(2, **dims), "bfloat16"), on.floor())
    joined = 2 * n * n * 2  # bytes of the products, and of the weights
    copied = on.memory_seconds(Cost(joined, joined, 0))
    rows[n] = {
        "one product": 1e6 * product,
        "a Concat": 1e6 * copied,
        "a launch": 1e6 * on.floor(),
        "two + cat": (product + copied + 2 * on.floor()) / product,
        "cat + one": (product + copied + on.floor()) / product,
        "two in views": (product + on.floor()) / product,
    }
predicted = pd.DataFrame.from_dict(rows, orient="index")
predicted.index.name = "n"
table(
    predicted,
    "Predicted for n x n in bfloat16: parts in microseconds, then each way "
    "in times of one product, at most",
    fold=False,
)

# %%
slight = predicted["two + cat"] < 1.2
claims(
    say(
        "Predicted: Concat and launches cost at most {small:.1f} times the "
        "product at n = 256, and {large:.0%} of it at n = 8192.",
        small=predicted["two + cat"].iloc[0] - 1,
        large=predicted["two + cat"].iloc[-1] - 1,
    ),
    claim("They can matter most where matrices are small", not slight.iloc[0]),
    claim("and hardly where they are large", slight.iloc[-1]),
)

# %%
# Neither graph is the least. Three ways concatenate nothing:
#
# - *packed*: the weights are put side by side once, when the model is loaded.
#   It is one product, and the mark to aim at; but the weights must be ours to
#   rearrange.
# - *views*: PyTorch multiplies into memory that it is given, and memory may be
#   a part of something larger. Two products, each into its half of the output.
#   No kernel of ours is needed, and no copy is made:

Source(_in_views, doc=False)

# %%
# - *fused*: one kernel whose tiles come from either weight. That is the
#   kernel of this page.
#
# The kernel
# ----------
#
# Step one: a program picks its weight
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A matrix product on a GPU is cut into tiles of the output, and a program
# computes one of them: it walks along K, takes a tile of x and a tile of the
# weight at each step, and adds their product to a sum in registers. Which
# weight is nothing but an address. So the tiles of both weights are numbered
# together, and a program chooses its pointer and its place in the output by
# its number.


@triton.jit
def side_by_side(
    y_ptr,
    x_ptr,
    w0_ptr,
    w1_ptr,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    columns = tl.cdiv(N, BN)  # of tiles, of each weight
    r = tl.program_id(0) // (2 * columns)
    c = tl.program_id(0) % (2 * columns)
    w_ptr = tl.where(c < columns, w0_ptr, w1_ptr)
    start = tl.where(c < columns, 0, N)  # of this weight, in the output
    m = r * BM + tl.arange(0, BM)
    n = c % columns * BN + tl.arange(0, BN)
    y = tl.zeros([BM, BN], tl.float32)  # half types lose their tail
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x_mask = (m < M)[:, None] & (k < K)[None, :]
        w_mask = (k < K)[:, None] & (n < N)[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=x_mask, other=0)
        w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=w_mask, other=0)
        # float32: the interpreter multiplies bfloat16 wrongly
        x, w = x.to(tl.float32), w.to(tl.float32)
        y = tl.dot(x, w, y, input_precision="ieee")
    y_mask = (m < M)[:, None] & (n < N)[None, :]
    y_ptrs = y_ptr + m[:, None] * (2 * N) + (start + n)[None, :]
    tl.store(y_ptrs, y, mask=y_mask)


def step_one(x, w0, w1):
    (M, K), N = x.shape, w0.shape[1]
    y = x.new_empty(M, 2 * N)
    tiles = triton.cdiv(M, 64) * 2 * triton.cdiv(N, 64)
    side_by_side[(tiles,)](y, x, w0, w1, M, N, K, BM=64, BN=64, BK=64)
    return y


# %%
# Nothing is concatenated, and both halves meet the same tiles of x in the L2
# cache. But loads by pointers keep threads busy with addresses, and Hopper's
# matrix units are so fast that feeding them is all the art.
#
# Step two: tensor descriptors
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A descriptor tells the copy engine of a multiprocessor the base, the sizes
# and the strides of a tensor. One thread asks for a tile by its coordinates,
# and the engine fetches it while others multiply, cuts off what is out of
# range, and stores what they give it. Its price: rows must begin at multiples
# of 16 bytes, and a descriptor has one base. We have two weights, in two
# places.
#
# Unless they are one tensor. Two weights of one shape always are: the distance
# between their addresses is the stride of a third axis, which has two entries.

Source(_stack, doc=False)

# %%
# Step three: stay
# ~~~~~~~~~~~~~~~~
#
# Launching a program for each tile means to fill and to drain its queue of
# loads each time. Instead there is a program for each multiprocessor, which
# walks over tiles, and fetches the first steps of the next one while it
# finishes the last. Tiles are walked in groups of rows, so that what
# neighbours share stays in L2.
#
# Step four: come early
# ~~~~~~~~~~~~~~~~~~~~~
#
# Between two kernels of one stream the GPU idles for as long as it takes to
# launch, which is a large part of a small product. Hopper can launch a kernel
# while the one ahead still runs: its programs take their places, and wait
# there until all that was written ahead of them can be read. A single call
# gains nothing by it, a chain of them does. The constant is called ``LATE``,
# after what the kernel must be: late to touch memory.

Source(_take_over)

# %%

Source(_concat_gemm_stacked)

# %%
# Weights of unequal widths, or more than two anywhere in memory, take a
# sibling that makes a descriptor for each tile, on the device; what cannot be
# described at all takes pointers, as in step one. Neither copies a weight.
# How large tiles are depends on how many there are: the constants were chosen
# on the GPU, once for each class of shapes (``python -m fusebook.tune``).
#
# Ours or PyTorch's?
# ~~~~~~~~~~~~~~~~~~
#
# A class of shapes has one size of tiles here. Of 128 x 256 numbers they serve
# large products best, but 288 of them on 132 multiprocessors take three
# rounds, of which the last is a fifth full. PyTorch has tiles of many sizes.
# So beside the plan of each class stands how long PyTorch's views took, in
# times of ours, on a product whose rounds were full. For another one of that
# class the launcher corrects the number by how full the rounds are, and takes
# the views where they should be faster.

Source(_filled, doc=False)

# %%

Source(_gemm_plan, doc=False)

# %%
# Is it right?
# ------------
#
# The reference is PyTorch's own in float64. The score of a result is its
# largest error, relative to the element plus the root mean square of its row.
# Freed memory is filled with NaN before each call, so that a column that
# nobody wrote shows.


def ours(x, *weights):
    return fusebook.concat_gemm(x, weights, tf32=False, strategy="fused")


HALF = (torch.bfloat16, torch.float16)
found = pd.concat(
    [
        asked.judged(
            {"M": 70, "K": 96, "N": 72, "weights": "two"},
            dtype,
            step_one=step_one,
            fusebook=ours,
        )
        for dtype in (torch.float32, *HALF)
    ]
    + [
        asked.judged(
            {"M": 65, "K": 63, "N": 81, "weights": kind},
            torch.float32,
            fusebook=ours,
        )
        for kind in ("columns", "uneven", "ragged")
    ],
    ignore_index=True,
)
table(found, "Scores, each within its limit", fold=False)

# %%
claims(
    claim("Every way is within its limit", found["right"]),
    claim(
        "Both halves may be the same weight",
        torch.equal(*ours(*[torch.eye(8, device=generator(0).device)] * 3)
                    .split(8, 1)),
    ),
)  # fmt: skip

# %%
# How fast?
# ---------
#
# First the question of the title where it was first asked: the two ONNX graphs
# in ONNX Runtime on CUDA, n x n in float32. ONNX Runtime multiplies float32
# in TF32 unless it is told not to: ten bits of mantissa instead of 23, on
# matrix units that are many times as fast. PyTorch does so only when it is
# asked. A comparison that leaves this unsaid compares two kinds of numbers.

COMPILED = ["torch.compile", "max-autotune"]
single = asked.results(
    config="small,medium",
    dtype="float32",
    variants=[n for n in CONCAT_GEMM.variants if n not in COMPILED],
)


def by_n(wide):
    """The size alone, and the dtype where there are several."""
    return wide.reset_index(["M", "K", "weights"], drop=True).rename_axis(
        index={"N": "n"}
    )


graphs = by_n(tables.times(single[single["variant"].str.startswith("ORT")]))
table(
    graphs,
    "Two Gemm and a Concat, or a Concat and one Gemm: ONNX Runtime on CUDA, "
    "float32 and TF32, cold time in microseconds",
    fold=False,
)

# %%
# The page this one grew from, ``plot_op_gemm2_cuda`` in the gallery of
# onnx-extended, had a table like that (n of 256, 512 and 1024, float32),
# drew it under the title *Fused/Unfused element wise multiplication*, and
# closed with a sentence: "It seems the fused operator is 33% faster." Here is
# what its own table said, and what ours says. Theirs are times of the host, of
# runs that are waited for; ours are the device's, cold.

THEIRS = pd.Series({256: 0.675043, 512: 1.128154, 1024: 0.914766})


def one_over_two(suffix):
    """Time of a Concat and one Gemm over that of two Gemm and a Concat."""
    both = (
        graphs["ORT Concat + one" + suffix],
        graphs["ORT two + Concat" + suffix],
    )
    return both[0] / both[1]


ratios = pd.DataFrame(
    {
        "theirs": THEIRS,
        "here, float32": one_over_two(""),
        "here, TF32": one_over_two(", TF32"),
    }
).sort_index()
ratios.index.name = "n"


def over_n(wide, **how):
    """Lines over the sizes, which are named at their axis."""
    ax = plots.lines(wide, **how)
    ax.set_xticks(list(wide.index), [str(n) for n in wide.index])
    ax.minorticks_off()
    return ax


over_n(
    ratios[["here, float32", "here, TF32"]],
    title="A Concat and one Gemm, in times of two Gemm and a Concat "
    "(ONNX Runtime)",
    ylabel="ratio of times",
    marks={"equal": 1.0},
)

# %%
table(
    ratios,
    "A Concat and one Gemm, in times of two Gemm and a Concat: below one, "
    "concatenating weights is faster",
    fold=False,
)

# %%
claims(
    holds(
        "Theirs: 33% faster at every size that their table has",
        THEIRS <= 1 / 1.33,
    ),
    holds(
        "Here, in float32: one Gemm is the faster graph at every n",
        ratios["here, float32"].dropna() < 0.98,
    ),
    holds(
        "Here, in TF32: one Gemm is the faster graph at every n",
        ratios["here, TF32"].dropna() < 0.98,
    ),
)

# %%
# What the two kinds of numbers are worth is no opinion either: this is the
# worst error of each in the sweep, relative to the element plus the root mean
# square of its row. TF32 is not hidden behind a tolerance; it has its own.

scores = single[single["status"] == "ok"].assign(
    numbers=lambda d: d["math"].map({"tf32": "TF32"}).fillna("float32")
)
table(
    scores.groupby("numbers")[["score", "limit"]].max(),
    "float32 and TF32: the worst score of all ways, and the limit",
    fold=False,
)

# %%
# Half precision
# ~~~~~~~~~~~~~~
#
# Half precision is where the question is asked today. All ways, n x n, each
# cold and warm: after a flush of the L2 cache, and again and again in a CUDA
# graph, where launches cost least. The two ONNX graphs are compared in float16
# only, beside the float32 in which they were asked about: the others of their
# cells say *refused*.

WAYS = ["two + cat", "cat + one", "packed", "views"]
OURS = ["fusebook", "fusebook (chosen)"]
ORT = ["ORT two + Concat", "ORT Concat + one"]
half = asked.results(variants=WAYS + OURS + ORT)
table(
    by_n(tables.times(half, words=True)),
    "Cold time in microseconds",
    fold=False,
)

# %%
table(
    by_n(tables.times(half, "warm", words=True)),
    "Warm time in microseconds: many calls in a CUDA graph",
    fold=False,
)

# %%
# Against the packed product, which nobody can beat by much, the cost of each
# way can be read off, and held against the prediction.

one = half[half["dtype"] == half["dtype"].iloc[0]]
lines = by_n(tables.times(one[one["variant"].isin(WAYS + OURS[:1])]))
over_n(
    lines.drop(columns="packed").div(lines["packed"], axis=0),
    title="Each way in times of the packed product, cold, "
    + one["dtype"].iloc[0],
    ylabel="times the packed product",
    marks={"": 1.0},
)

# %%
measured = lines[["two + cat", "cat + one", "views"]].sub(
    lines["packed"], axis=0
)
allowed = pd.DataFrame(
    {
        "two + cat": predicted["a Concat"] + 2 * predicted["a launch"],
        "cat + one": predicted["a Concat"] + predicted["a launch"],
        "views": predicted["a launch"],
    }
)
both = pd.concat(
    [measured, allowed.reindex(measured.index)],
    axis=1,
    keys=["measured", "predicted, at most"],
)
both.columns = [f"{name}: {kind}" for kind, name in both.columns]
table(
    both,
    "What is spent beyond the packed product, cold, in microseconds",
    fold=False,
)

# %%
# Where shapes are awkward
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# Rows that begin anywhere, so that descriptors do not apply (781); tiles that
# leave the last round nearly empty (3072), and rows that begin amid a line of
# the cache as well (3000); weights stored by columns, as `torch.nn.Linear` has
# them; and widths that differ (*uneven*: the second weight has half the
# columns).

odd = asked.results(config="odd", dtype="bfloat16", variants=WAYS + OURS)
table(
    tables.times(odd, words=True),
    "Awkward shapes in bfloat16: cold time in microseconds",
    fold=False,
)

# %%
# Decode
# ~~~~~~
#
# A language model that writes one token at a time multiplies one row for each
# reader: M is 1 to 64, and the weights are as large as ever. All the work is
# to read them once, so the roof is the memory's bandwidth, and there is
# nothing to gain from a clever product. But two launches, or one that leaves
# multiprocessors idle, still cost.

decode = asked.results(config="decode", dtype="bfloat16", variants=WAYS + OURS)
shares = decode.assign(
    cold=100 * decode["roof_us"] / decode["cold_us"],
    warm=100 * decode["roof_us"] / decode["warm_us"],
)
reading = shares.pivot_table(["cold", "warm"], "M", "variant", sort=False)
reading.columns = [f"{name}, {kind}" for kind, name in reading.columns]
table(
    reading[[f"{n}, {k}" for n in ("packed", "views", "fusebook")
             for k in ("cold", "warm")]],
    "A few rows against 4096 x 22016: percent of the roof of reading the "
    "weights",
    fold=False,
)  # fmt: skip

# %%
# torch.compile
# ~~~~~~~~~~~~~
#
# At three sizes: the default, and a search over templates and libraries
# (``max-autotune``). The default finds the views by itself: it lets both
# products write into their halves of one output.

compiled = asked.results(
    config="compiled",
    dtype="bfloat16",
    variants=[*WAYS, *COMPILED, "fusebook"],
)
table(
    by_n(tables.times(compiled, words=True)),
    "bfloat16: cold time in microseconds",
    fold=False,
)

# %%
claims(
    claim(
        "torch.compile takes as long as views, within 6 %",
        abs(tables.ratio(compiled, "torch.compile", "views") - 1) <= 0.06,
        fatal=False,
    ),
    claim(
        "and its search finds nothing better",
        tables.ratio(compiled, "max-autotune", "torch.compile") > 0.98,
        fatal=False,
    ),
)

# %%
provenance(half)

# %%
downloads(half, "concat_gemm")

# %%
# How far from the roof?
# ----------------------
#
# The roof of a large product is the rate of the matrix units, as PyTorch's own
# product of the same dtype reached it when this machine was measured. That
# rate moves by many percent with the power that the data draws, so a mark to
# the right of 100 is no miracle. Small sizes are launches.

plots.dots(tables.where(one, variant=WAYS + OURS[:1]), of="roof")

# %%
# Lessons
# -------
#
# A map of who wins
# ~~~~~~~~~~~~~~~~~
#
# For each size and dtype the fastest way among those that leave the weights
# where they are, and how many times as long each of the others takes.

FREE = ["two + cat", "cat + one", "views", "fusebook"]
everything = pd.concat(
    [
        half,
        single[single["math"] != "tf32"],
        single[single["math"] == "tf32"].assign(
            dtype="tf32",
            variant=lambda d: d["variant"].str.removesuffix(", TF32"),
        ),
    ]
)
free = everything[everything["variant"].isin(FREE)]
cold = by_n(tables.times(free))[FREE]


def draw(cold):
    """A cell for each size and dtype: who wins, and our time over theirs."""
    kinds = list(dict.fromkeys(cold.index.get_level_values("dtype")))
    sizes = sorted(set(cold.index.get_level_values("n")))
    colours = dict(
        zip(FREE, ["#c2607f", "#a0803c", "#009e73", "#0a84d6"], strict=True)
    )
    _, ax = plt.subplots(
        figsize=(8, 0.7 * len(kinds) + 1), layout="constrained"
    )
    ax.figure.patch.set_alpha(0)
    ax.patch.set_alpha(0)
    for (kind, n), times in cold.iterrows():
        if times.isna().all():
            continue
        winner = times.idxmin()
        at = sizes.index(n), kinds.index(kind)
        ax.add_patch(
            plt.Rectangle(
                (at[0] - 0.48, at[1] - 0.46), 0.96, 0.92, color=colours[winner]
            )
        )
        ratio = times["fusebook"] / times.drop("fusebook").min()
        ax.text(
            *at,
            f"{winner}\n{ratio:.2f}",
            ha="center",
            va="center",
            color="white",
            fontsize=9,
        )
    ax.set_xlim(-0.5, len(sizes) - 0.5)
    ax.set_ylim(len(kinds) - 0.5, -0.5)
    ax.set_xticks(range(len(sizes)), sizes)
    ax.set_yticks(range(len(kinds)), kinds)
    ax.tick_params(colors=plots.INK, length=0)
    ax.set_xlabel("n", color=plots.INK)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title(
        "Who wins on the device, cold, and our time over the best other's",
        color=plots.INK,
        loc="left",
        fontsize=11,
    )
    return ax


draw(cold)

# %%
table(
    cold.div(cold.min(axis=1), axis=0),
    "The same in numbers: each way in times of the fastest, cold",
    fold=False,
)

# %%
# The targets were set before the kernel was written. Medians within 2 % count
# as equal, and the launcher may choose PyTorch's views where they should be
# faster: that is the row *chosen*, and no merit of our kernel. It cannot
# choose the packed product, since nobody has packed the weights.

PEERS = [*WAYS, *ORT]
best = by_n(tables.times(half))
behind = best["fusebook (chosen)"] / best[PEERS].min(axis=1)
awkward = tables.times(odd)
awkward = awkward["fusebook (chosen)"] / awkward[WAYS].min(axis=1)
large = half[half["N"] >= 2048]
small = half[half["N"] <= 1024]
claims(
    claim(
        "Cold, our own kernel is faster than two Gemm and a Concat at every n",
        tables.ratio(half, "fusebook", "two + cat") < 1,
    ),
    claim(
        "and for an eager program, which pays for the launch as well",
        tables.ratio(half, "fusebook", "two + cat", "paid") < 1,
        fatal=False,
    ),
    claim(
        "Never slower than the best other way by more than 3 %, the packed "
        "product included",
        behind <= 1.03,
        fatal=False,
    ),
    claim(
        "nor at the awkward shapes",
        awkward <= 1.03,
        fatal=False,
    ),
    claim(
        "From n = 2048: our own kernel at 90 % of the packed product or more",
        1 / tables.ratio(large, "fusebook", "packed") >= 0.9,
    ),
    claim(
        "Up to n = 1024, warm: at most 1.15 times the packed product",
        tables.ratio(small, "fusebook", "packed", "warm") <= 1.15,
        fatal=False,
    ),
    claim(
        "Up to n = 2048, Concat and launches cost no more than predicted, "
        "with 10 % of the product for its own spread",
        (measured - allowed.reindex(measured.index)).le(
            0.1 * lines["packed"], axis=0
        ).all(axis=1).loc[:2048],
        fatal=False,
    ),
    claim(
        "and beyond it, too, though the prediction is smaller than the spread",
        (measured - allowed.reindex(measured.index)).le(
            0.1 * lines["packed"], axis=0
        ).all(axis=1).loc[2049:],
        fatal=False,
    ),
)  # fmt: skip

# %%
# And where ours does not win:

full = tables.times(single)
claims(
    claim(
        "In float32 from n = 2048, PyTorch's views win: without tensor cores "
        "our kernel is no match",
        tables.ratio(
            single[single["N"] >= 2048], "fusebook", "views"
        ) > 1,
        fatal=False,
    ),
    claim(
        "In TF32 from n = 1024 they win as well",
        tables.ratio(
            single[single["N"] >= 1024], "fusebook, TF32", "views, TF32"
        ) > 1,
        fatal=False,
    ),
    claim(
        "What the launcher chooses takes, in float32 and in TF32, as long as "
        "the better of our kernel and the views, within 5 %",
        pd.concat([
            full["fusebook (chosen)"]
            / full[["fusebook", "views"]].min(axis=1),
            full["fusebook (chosen), TF32"]
            / full[["fusebook, TF32", "views, TF32"]].min(axis=1),
        ]) <= 1.05,
        fatal=False,
    ),
    claim(
        "The answer to the title: at n = 4096 and beyond, in half precision, "
        "what you do with the Concat changes the time by less than 15 %",
        (best["two + cat"] / best["packed"])[
            best.index.get_level_values("n") >= 4096
        ] < 1.15,
        fatal=False,
    ),
    say(
        "At n = {n}, two products and a Concat take {times:.1f} times the "
        "packed product.",
        n=lines.index[0],
        times=lines["two + cat"].iloc[0] / lines["packed"].iloc[0],
    ),
)  # fmt: skip

# %%
lost = pd.concat([half, odd, decode])
lost = lost[lost["variant"] != "fusebook (chosen)"]
table(
    tables.losses(lost),
    "Points lost by our kernel in half precision, cold: the fastest other "
    "way, and how far behind we are",
    fold=False,
)

# %%

table(tables.losses(lost, kind="warm"), "The same, warm", fold=False)

# %%
# By the caller's clock
# ~~~~~~~~~~~~~~~~~~~~~
#
# The device works while the host queues what comes next. So an eager program
# of many calls pays the larger of the two times for each, *paid*, and a short
# kernel is as fast as its launch.

callers = tables.alike(lost)
by_clock(callers)

# %%
table(tables.clocks(callers), "Every way by every clock, in microseconds")

# %%
table(tables.losses(callers, kind="paid"), "Points lost by an eager program")

# %%
table(tables.losses(callers, kind="call"), "Points lost by a call, waited for")

# %%
# TF32 is lost because the matrix units take it only with K side by side in
# memory: weights by rows must be turned over on the way. And the worst points
# in half precision are a matter of arithmetic. At n = 3072 and n = 3000 there
# are as many tiles, and the last of their rounds is the same part of the
# whole. But at n = 3000 a row of 6000 bytes begins at no multiple of 128, so
# that each piece of a tile lies in two lines of the cache instead of one.
#
# At n = 1024 a cold call is short, and a good part of it is the same for every
# kernel: the launch, and the first fetch from memory. Tiles of 64 to 128 rows
# and 64 to 256 columns were tried there, stored by threads and by the copy
# engine, launched late and not: warm, the best are level with the packed
# product, and cold they all are a little behind it. How far, changes from run
# to run: the rows *fusebook* and *chosen* are one kernel there.

by_size = tables.times(odd)["fusebook"].groupby("N").first()
per_product = by_size / pd.Series(by_size.index, by_size.index) ** 3
short = best.loc[best.index.get_level_values("n") == 1024]
claims(
    say(
        "n = 1024, cold: {first} times the packed product for the row "
        "fusebook, {second} for the row chosen.",
        first=" and ".join(
            f"{r:.3f}" for r in short["fusebook"] / short["packed"]
        ),
        second=" and ".join(
            f"{r:.3f}" for r in short["fusebook (chosen)"] / short["packed"]
        ),
    ),
    claim(
        "For its size, n = 3000 takes our kernel more than 1.1 times as long "
        "as n = 3072",
        per_product[3000] / per_product[3072] > 1.1,
        fatal=False,
    ),
    claim(
        "and at both the launcher rightly chooses PyTorch's views",
        tables.times(odd)["fusebook (chosen)"].groupby("N").first()[
            [3000, 3072]
        ] < 0.98 * by_size[[3000, 3072]],
        fatal=False,
    ),
)  # fmt: skip

# %%
# What to take to the next kernel:
#
# - Before you concatenate, ask where the result could have been written in
#   the first place. Two products into views need no kernel at all.
# - A verdict on one size is not a verdict: the cost of a Concat grows with
#   the square of n, that of a product with the cube, that of a launch not.
# - Say in which numbers float32 is multiplied.
#
# Exercises
# ---------
#
# 1. Unequal widths
# ~~~~~~~~~~~~~~~~~
#
# The kernel of step one takes two weights of one width. Teach it a second
# width: queries are often wider than keys.


def two_widths(x, w0, w1):
    return step_one(x, w0, w0)[:, : w0.shape[1] + w1.shape[1]]


def matrices(seed, M, K, *widths):
    """Inputs of two or more weights."""
    rng = generator(seed)
    weights = [rough(rng, (K, N), torch.float32) / 64 for N in widths]
    return rough(rng, (M, K), torch.float32), *weights


exercise(
    "two_widths takes weights of unequal widths",
    two_widths,
    lambda x, w0, w1: torch.cat([x @ w0, x @ w1], 1),
    [matrices(3, 33, 40, 70, 50), matrices(4, 5, 64, 96, 96)],
)

# %%
# 2. A bias for nothing
# ~~~~~~~~~~~~~~~~~~~~~
#
# What is added to every row of the output can be added before it is stored,
# without any traffic but its own. This attempt forgets it.


def with_bias(x, w0, w1, bias):
    return step_one(x, w0, w1)


def biased(seed, M, K, N):
    """Inputs, and a bias for all columns of the output."""
    x, *weights = matrices(seed, M, K, N, N)
    rng = generator(seed + 1)
    bias = torch.randn(2 * N, generator=rng, device=rng.device)
    return x, *weights, bias


exercise(
    "with_bias adds to each column what is its own",
    with_bias,
    lambda x, w0, w1, bias: torch.cat([x @ w0, x @ w1], 1) + bias,
    [biased(5, 33, 40, 70), biased(7, 5, 64, 64)],
)

# %%
solution("solutions/plot_201_gemm_concat.py")
# sphinx_gallery_thumbnail_number = 4
