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
ways that concatenate nothing, and ends in a map of who wins.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them.

For whom: those who multiply one matrix with several weights, and those who
want to write a matrix product.

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
# the products, the other the weights.

# sphinx_gallery_tags = ["matrix product", "Gemm", "persistent kernel"]

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots, tables
from fusebook.cards.concat_gemm import CONCAT_GEMM, _in_views
from fusebook.measure import bench, machine, timing
from fusebook.measure.check import yardstick
from fusebook.measure.inputs import generator, rough
from fusebook.measure.op import Cost
from fusebook.ort import Graph
from fusebook.page import (
    Folded,
    Kernels,
    Listing,
    Source,
    by_clock,
    by_step,
    claim,
    claims,
    counters,
    downloads,
    draw,
    every_clock,
    exercise,
    extra,
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


# site: fold
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


Folded(
    "The two graphs as text",
    Listing(
        "\n\n".join(
            onnx.printer.to_text(model(first))
            for first in ("products", "weights")
        )
    ),
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
wanted = fusebook.concat_gemm_eager(*feeds.values())
claims(
    claim(
        "In ONNX Runtime the two graphs give the same numbers, to 1e-5.",
        torch.allclose(by_products, by_weights, atol=1e-5),
    ),
    claim(
        "PyTorch gives the same numbers, to 1e-5.",
        torch.allclose(by_products, wanted, atol=1e-5),
    ),
)

# %%
# What eager costs
# ----------------
#
# In PyTorch the first graph is two products and a copy. The comments are its
# traffic.

Source(fusebook.concat_gemm_eager, doc=False)

# %%
# For n x n matrices the time of a product grows with the cube of n, the
# traffic of a Concat with the square: the :term:`arithmetic intensity` of a
# product grows with n. So the larger n, the less the question can matter. The
# smaller n, the less there is to copy, and the number of launches counts. Both
# can be put into numbers before anything is timed. The model has three terms,
# all from what this machine was measured to do:
#
# - the products at the rate of its matrix units;
# - the Concat at the rate of its memory, reading and writing what it joins;
# - for each launch beyond the first the time of an empty kernel.
#
# That should be the most that Concat and launches cost: small matrices stay in
# the :term:`L2 cache`, and a launch may hide behind the kernel ahead of it.

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
    "Predicted for n x n in bfloat16: parts in microseconds, then the time of "
    "each way over that of one product, at most",
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
    claim(
        "Up to n = 2048 Concat and launches can cost more than a fifth of the "
        "product, and from n = 4096 on they cannot.",
        slight == (slight.index >= 4096),
    ),
)

# %%
# Three more ways concatenate nothing:
#
# - :term:`packed`: the weights are put side by side once, when the model is
#   loaded. It is one product, and what the others are compared with; but the
#   weights must be ours to rearrange.
# - :term:`views`: two products, each written by PyTorch into its half of the
#   output. No kernel of ours is needed, and no copy is made:

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
# weight at each step, and adds their product to a sum in registers. The weight
# is only a pointer. So the tiles of both weights are numbered together, and a
# program chooses its pointer and its place in the output by its number.


@triton.jit
def side_by_side(
    y_ptr, x_ptr, w0_ptr, w1_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
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
        if WIDEN:  # the interpreter multiplies bfloat16 wrongly
            x, w = x.to(tl.float32), w.to(tl.float32)
        y = tl.dot(x, w, y, input_precision="ieee")
    y_mask = (m < M)[:, None] & (n < N)[None, :]
    y_ptrs = y_ptr + m[:, None] * (2 * N) + (start + n)[None, :]
    tl.store(y_ptrs, y, mask=y_mask)


def step_one(x, w0, w1, BM=64, BN=64, BK=64, warps=4):
    (M, K), N = x.shape, w0.shape[1]
    y = x.new_empty(M, 2 * N)
    tiles = triton.cdiv(M, BM) * 2 * triton.cdiv(N, BN)
    constants = {"BM": BM, "BN": BN, "BK": BK, "WIDEN": not x.is_cuda}
    side_by_side[(tiles,)](y, x, w0, w1, M, N, K, **constants, num_warps=warps)
    return y


# %%
# Nothing is concatenated, and both halves find the same tiles of x in the L2
# cache. But with loads by pointers the threads compute addresses, while the
# :term:`tensor cores <tensor core>` wait for numbers.
#
# Step two: tensor descriptors
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A tensor descriptor holds the base, the sizes and the strides of a tensor for
# the copy engine of a multiprocessor, the :term:`TMA`. One thread asks for a
# tile by its coordinates, and the engine fetches it while the others multiply.
# Rows must begin at multiples of 16 bytes, and a descriptor has one base, so
# that each weight has its own. To choose between descriptors while the kernel
# runs would mean to copy one. So the kernel has the loop over tiles once for
# each weight, as ``tl.static_range`` unrolls it.
#
# Step three: a persistent kernel
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A program that is launched for one tile has to wait for its first loads, and
# loads nothing at its end. A :term:`persistent kernel` has one program for
# each :term:`multiprocessor`, which walks over the tiles and fetches the first
# part of the next tile while it finishes this one. Tiles are walked in groups
# of rows, so that those that share a part of x or w find it in the L2 cache.
#
# Step four: programmatic dependent launch
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Between two kernels of one :term:`stream` the GPU is idle for as long as a
# launch takes. With :term:`programmatic dependent launch` the next kernel is
# launched while the one ahead still runs. Its programs take their places on
# free multiprocessors and wait until all that was written before them can be
# read. A chain of calls may gain by it; a single call has no kernel ahead. The
# kernel's constant ``LATE`` says that it touches memory only after that wait.

draw.lanes(
    "Two products in one stream, with programmatic dependent launch",
    {
        "first product": [(0, 4, "multiplies")],
        "second product": [(2.6, 4.05, "waits"), (4.05, 8, "multiplies")],
    },
    [("first product", 4, "second product", 4.05)],
)

# %%

Folded("The library's kernels", Kernels(fusebook.concat_gemm))

# %%
# Weights may have any widths, up to four in a launch. Those that no descriptor
# can describe are copied first, side by side, to where they are aligned. With
# few rows the copy does not pay, and PyTorch multiplies. In float32 this copy
# also turns large weights stored by rows into columns, since tensor cores take
# TF32 only where the numbers along K are adjacent.
#
# What does the order of tiles save? The counters of the GPU, as on
# :doc:`plot_101_elementwise`, say what came from memory, here at n = 8192,
# where no operand fits into the :term:`L2 cache`. Step one takes tiles row by
# row, and comes back to a tile of a weight when the cache has lost it. The
# sectors a load leave out what tensor descriptors fetch.


# site: fold
def to_count():
    x, *weights = torch.randn(3, 8192, 8192, device="cuda").bfloat16()
    return {
        "step one, 128 x 256": lambda: step_one(
            x, *weights, BM=128, BN=256, warps=8
        ),
        "PyTorch, in views": lambda: _in_views(x, *weights),
        "the library": lambda: fusebook.concat_gemm(
            x, weights, strategy="fused"
        ),
    }


seen = counters("gemm_counters", to_count)
traffic = by_step(seen, 3 * 2 * 8192**2, "in operands")
table(
    traffic,
    "n = 8192: one is the bytes of x and of both weights together",
    fold=False,
)

# %%
reads = traffic["read, in operands"]
claims(
    claim(
        "Step one in tiles of 128 x 256, row by row, reads its operands "
        "{rows:.3g} times from memory; the library's kernel, which takes such "
        "tiles in groups of rows, reads them fewer times, {ours:.3g}.",
        reads.filter(items=["the library"]).lt(
            reads.get("step one, 128 x 256")
        ),
        of=reads,
        fatal=False,
        rows=reads.get("step one, 128 x 256"),
        ours=reads.get("the library"),
    )
) if len(traffic) else None

# %%
# Is it right?
# ------------
#
# The reference is PyTorch's product in float64. The :doc:`score </method>` of
# a result is its largest error, relative to the element plus the root mean
# square of its row. Freed memory is filled with NaN before each call, so that
# an unwritten column shows.


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
table(found, "Scores, each within its limit", fold=True)

# %%
claims(
    claim("Step one and our kernel are within their limits.", found["right"]),
    claim(
        "Both halves may be the same weight: the two results are equal.",
        torch.equal(*ours(*[torch.eye(8, device=generator(0).device)] * 3)
                    .split(8, 1)),
    ),
)  # fmt: skip

# %%
# How fast?
# ---------
#
# First the two ONNX graphs in ONNX Runtime on CUDA, n x n in float32. ONNX
# Runtime multiplies float32 in :term:`TF32` unless it is told not to; PyTorch
# does so in matrix products only when it is asked. So both are shown, apart.

COMPILED = ["torch.compile", "max-autotune"]
single = asked.results(
    config="small,medium",
    dtype="float32",
    variants=[n for n in CONCAT_GEMM.variants if n not in COMPILED],
)


# site: fold
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
# The page that this one grew from, *Gemm Exploration with CUDA* of
# onnx-extended (2024, `its script
# <https://github.com/sdpython/onnx-extended/blob/main/
# _doc/examples/plot_op_gemm2_cuda.py>`__), had such a table of ratios for n of
# 256, 512 and 1024 in float32. It used the host's clock and waited for each
# run, which is *call* here; *cold* is the device's time.

THEIRS = pd.Series({256: 0.675043, 512: 1.128154, 1024: 0.914766})


def one_over_two(suffix, kind):
    """Time of a Concat and one Gemm over that of two Gemm and a Concat."""
    graphs = by_n(tables.times(single, kind))
    return (
        graphs["ORT Concat + one" + suffix]
        / graphs["ORT two + Concat" + suffix]
    )


ratios = pd.DataFrame(
    {
        "the source, call": THEIRS,
        **{
            f"here, {numbers}, {kind}": one_over_two(suffix, kind)
            for numbers, suffix in (("float32", ""), ("TF32", ", TF32"))
            for kind in ("call", "cold")
        },
    }
).sort_index()
ratios.index.name = "n"


def over_n(wide, **how):
    """Lines over the sizes, which are named at their axis."""
    ax = plots.lines(
        wide.rename_axis("size n, of n x n matrices"),
        source=single,
        clock="cold",
        **how,
    )
    ax.set_xticks(list(wide.index), [str(n) for n in wide.index])
    ax.minorticks_off()
    return ax


over_n(
    ratios[["here, float32, cold", "here, TF32, cold"]],
    title="Time of a Concat and one Gemm over that of two Gemm and a Concat "
    "(ONNX Runtime)",
    ylabel="ratio of times",
    marks={"equal": 1.0},
)

# %%
table(
    ratios,
    "Time of a Concat and one Gemm over that of two Gemm and a Concat: below "
    "one, concatenating weights is faster",
    fold=True,
)

# %%
one_gemm = ratios["here, float32, call"].dropna()
one_tf32 = ratios["here, TF32, call"].dropna()
claims(
    say(
        "By the clock of the call a Concat and one Gemm take {a:.2f} to "
        "{b:.2f} times the time of two Gemm and a Concat in float32, and "
        "{c:.2f} to {d:.2f} times in TF32.",
        a=one_gemm.min(),
        b=one_gemm.max(),
        c=one_tf32.min(),
        d=one_tf32.max(),
    ),
)

# %%
# TF32 is less exact. In float32 our kernel splits each number into its first
# eleven bits and the rest, and adds three products in TF32: first by first,
# first by rest, and rest by first. It is held to float32's limit. At the ends
# of the range it is less exact: numbers within a 4096th of the largest count
# as infinite, and those below 1e-34 lose digits.

scores = single[single["status"] == "ok"].assign(
    numbers=lambda d: d["math"].map({"tf32": "TF32"}).fillna("float32")
)
worst = scores.groupby("numbers")[["error", "tolerance"]].max()
claims(
    say(
        "The worst score of all ways is {fp32:.1e} in float32 and {tf32:.1e} "
        "in TF32, where {least:.1e} and {most:.1e} are allowed.",
        fp32=worst.loc["float32", "error"],
        tf32=worst.loc["TF32", "error"],
        least=worst.loc["float32", "tolerance"],
        most=worst.loc["TF32", "tolerance"],
    )
)

# %%
# Half precision
# ~~~~~~~~~~~~~~
#
# All ways, n x n, each
# cold (after a flush of the L2 cache) and warm (many calls in a
# :term:`CUDA graph`). The two ONNX graphs are in
# float16 only, and *refused* in bfloat16.

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
    fold=True,
)

# %%
# The packed product does the same arithmetic in one launch and copies nothing.
# What another way takes beyond it can be compared with the prediction.

one = half[half["dtype"] == half["dtype"].iloc[0]]
lines = by_n(tables.times(one[one["variant"].isin(WAYS + OURS[:1])]))
over_n(
    lines.drop(columns="packed").div(lines["packed"], axis=0),
    title="Time of each way over that of the packed product, cold, "
    + one["dtype"].iloc[0],
    ylabel="times the packed product",
    marks={"": 1.0},
)

# %%
counted = lines[["two + cat", "cat + one", "views"]].sub(
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
    [counted, allowed.reindex(counted.index)],
    axis=1,
    keys=["measured", "predicted, at most"],
)
both.columns = [f"{name}: {kind}" for kind, name in both.columns]
table(
    both,
    "What is spent beyond the packed product, cold, in microseconds",
    fold=True,
)

# %%
# Where shapes are awkward
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# At n = 781 rows do not begin at multiples of 16 bytes, so descriptors do not
# apply. At n = 3072 the last round of tiles is hardly more than a third full,
# as drawn above; at n = 3000 rows also begin in the middle of a line of the
# cache. Weights may be stored by columns, as `torch.nn.Linear` has them, or
# differ in width (*uneven*: the second weight has half the columns).

odd = asked.results(config="odd", dtype="bfloat16", variants=WAYS + OURS)
table(
    tables.times(odd, words=True),
    "Awkward shapes in bfloat16: cold time in microseconds",
    fold=True,
)

# %%
# Decode
# ~~~~~~
#
# A language model that writes one token at a time (*decode*) multiplies one
# row for each user: M is 1 to 64, and the weights are as large as ever. The
# work is to read them once, so the roof is the memory's bandwidth.

decode = asked.results(config="decode", dtype="bfloat16", variants=WAYS + OURS)
shares = decode.assign(
    cold=100 * decode["roof_us"] / decode["gpu_us"],
    warm=100 * decode["roof_us"] / decode["gpu_warm_us"],
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
    "The compiler's products in bfloat16: cold time in microseconds",
    fold=True,
)

# %%
claims(
    claim(
        "torch.compile takes as long as the views, within 6 %, cold.",
        abs(tables.ratio(compiled, "torch.compile", "views") - 1) <= 0.06,
        fatal=False,
    ),
    claim(
        "The search of max-autotune finds nothing faster than the default: "
        "its code takes {least:.2f} to {most:.2f} times as long, cold.",
        tables.ratio(compiled, "max-autotune", "torch.compile") > 0.98,
        fatal=False,
        least=tables.ratio(compiled, "max-autotune", "torch.compile").min(),
        most=tables.ratio(compiled, "max-autotune", "torch.compile").max(),
    ),
)

# %%
# The search chooses a kernel for each product by itself, without the Concat
# that follows, and gives up the views that the default writes into. (That is
# our reading of the times; we have not looked into its code.)

# %%
# A library's products
# ~~~~~~~~~~~~~~~~~~~~
#
# The library *quack* has matrix products of its own, which can be written into
# views as PyTorch's can. Beside them stand PyTorch's products and the kernel
# of this page, in the column *the library*. Cold:


# site: fold
def products_of_quack():
    from quack.gemm_interface import gemm

    def in_views(x, *weights):
        y = x.new_empty(x.shape[0], sum(w.shape[1] for w in weights))
        for part, w in zip(
            y.split([w.shape[1] for w in weights], 1), weights, strict=True
        ):
            gemm(x, w, out=part, tuned=False)
        return y

    packed = CONCAT_GEMM.variants["packed"]
    parts = []
    for n in (256, 1024, 4096, 8192):
        dims = {"M": n, "K": n, "N": n, "weights": "two"}
        given = CONCAT_GEMM.make(generator(0), torch.bfloat16, **dims)
        ready, yard = packed.prepare(*given), yardstick(CONCAT_GEMM, given)

        def step(function, given=given):
            return lambda: function(*given)

        ways = {
            "views": step(_in_views),
            "packed": step(packed.run, ready),
            "quack, in views": step(in_views),
            "the library": step(ours),
        }
        parts.append(
            bench.staircase(
                ways, lambda got, yard=yard: yard.judge(got).ok
            ).assign(n=n)
        )
    return pd.concat(parts, ignore_index=True)


theirs = measured("gemm_quack", products_of_quack, by_device=True)
their_us = theirs.pivot_table("us", "n", "step", sort=False)
table(
    their_us,
    "quack's products in bfloat16: cold time in microseconds",
    fold=True,
)

# %%
claims(
    claim("All of them are right.", theirs["right"]),
    say(
        "quack's two products in views take {least:.2f} to {most:.2f} times "
        "the time of our kernel.",
        least=(their_us["quack, in views"] / their_us["the library"]).min(),
        most=(their_us["quack, in views"] / their_us["the library"]).max(),
    ),
)

# %%
provenance(half, theirs)

# %%
downloads(half, "concat_gemm")

# %%
# What each step was worth
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# The table has step one as it was shown and in larger tiles, and the library's
# kernel as it is launched.
# *Cold* is one call alone; *warm* is a call among many, each of which has one
# ahead.


# site: fold
def gemm_steps():
    parts = []
    for n in (1024, 4096):
        dims = {"M": n, "K": n, "N": n, "weights": "two"}
        given = CONCAT_GEMM.make(generator(0), torch.bfloat16, **dims)
        yard = yardstick(CONCAT_GEMM, given)

        def step(function, given=given, **tiles):
            return lambda: function(*given, **tiles)

        steps = {
            "eager": step(fusebook.concat_gemm_eager),
            "step one, 64 x 64": step(step_one),
            "step one, 128 x 128": step(step_one, BM=128, BN=128, warps=8),
            "step one, 128 x 256": step(step_one, BM=128, BN=256, warps=8),
            "the library": step(ours),
        }
        frame = bench.staircase(
            steps, lambda got, yard=yard: yard.judge(got).ok
        )
        warm = timing.warm(steps)
        frame["warm us"] = [1e6 * warm[name].q50 for name in frame["step"]]
        parts.append(frame.assign(n=n))
    return pd.concat(parts, ignore_index=True)


stairs = measured("gemm_steps", gemm_steps, by_device=True)
# Older records have steps whose code this page no longer shows.
stairs = stairs[stairs["step"].str.match("eager|step one|the library")]
stair_us = stairs.pivot_table("us", "step", "n", sort=False)
stair_us.columns = [f"n = {n}, us" for n in stair_us.columns]
if "warm us" in stairs:
    for n, frame in stairs.set_index("step").groupby("n"):
        stair_us[f"n = {n}, warm"] = frame["warm us"]
by_lines = {
    "eager": lines_of(fusebook.concat_gemm_eager),
    "step one, 64 x 64": lines_of(side_by_side, step_one),
    "step one, 128 x 128": lines_of(side_by_side, step_one),
    "step one, 128 x 256": lines_of(side_by_side, step_one),
    "the library": lines_behind(fusebook.concat_gemm_eager),
}
least_us = {
    f"n = {n}, us": 1e6
    * on.roof(CONCAT_GEMM.cost(2, M=n, K=n, N=n, weights="two"), "bfloat16")
    for n in (1024, 4096)
}
table(
    tables.staircase(
        stair_us, stairs[stairs["n"] == 4096], roof=least_us, lines=by_lines
    ),
    "Each step in bfloat16, in microseconds: cold (us) and warm",
    fold=False,
)

# %%
large_us = stair_us["n = 4096, us"]
claims(
    claim("Every step is right.", stairs["right"]),
    say(
        "At n = 4096, cold, step one takes {first:.2f} times eager's time in "
        "tiles of 64 x 64 and {second:.2f} times in tiles of 128 x 256, and "
        "the library's kernel {last:.2f} times.",
        first=large_us["step one, 64 x 64"] / large_us["eager"],
        second=large_us["step one, 128 x 256"] / large_us["eager"],
        last=large_us["the library"] / large_us["eager"],
    ),
)

# %%
# The same kernel at the same size stands in three tables of this page. A
# table's ways are timed in turn, so they can be compared within it. Between
# tables the clock of the GPU may have moved: large products draw as much power
# as it may, and how far its clock falls depends on what ran before. Compare
# two ways of one column, and never two tables. (Warm, large products follow
# each other without a pause, and may take longer than cold.)

same = pd.DataFrame(
    {
        "half types": tables.where(
            half, variant="fusebook", dtype="bfloat16"
        ).set_index("N")["gpu_us"],
        "quack's": their_us["the library"],
        "each step": stairs[stairs["step"] == "the library"].set_index("n")[
            "us"
        ],
    }
).dropna(thresh=2)
same.index.name = "n"
apart = same.max(axis=1) / same.min(axis=1) - 1
table(
    same.assign(apart=100 * apart).rename(columns={"apart": "apart, percent"}),
    "The library's kernel in bfloat16 by table: cold time in microseconds",
    fold=True,
)

# %%
claims(
    say(
        "The tables differ by {small:.0%} at n = 1024, by {large:.0%} at n = "
        "4096, and by {most:.0%} at n = 8192.",
        small=apart[1024],
        large=apart[4096],
        most=apart[8192],
    ),
)

# %%
# How to tune
# ~~~~~~~~~~~
#
# Nobody knows beforehand which tiles are fast, so they are tried:
# :term:`autotuning`. Triton does it in the kernel's decorator. At the first
# call with new values of ``key`` it times each ``Config`` and keeps the best:

tuned = triton.autotune(
    configs=[
        triton.Config({"BM": bm, "BN": bn, "BK": 64}, num_warps=warps)
        for bm, bn, warps in [(64, 64, 4), (128, 128, 8), (128, 256, 8)]
    ],
    key=["M", "N", "K"],
)(side_by_side)

# %%
# These are the tiles that were timed above, so the table knows what is found.

timed = stair_us.filter(like="step one,", axis=0).filter(like="n = ")
best = timed.idxmin().str.removeprefix("step one, ")
claims(
    say(
        "The fastest tiles of step one are {small} at n = 1024 and {large} at "
        "n = 4096; the slowest take {worst:.2f} times as long there.",
        small=best.iloc[0],
        large=best.iloc[1],
        worst=timed.iloc[:, 1].max() / timed.iloc[:, 1].min(),
    ),
)

# %%
# Three things are missing: no candidate is checked, the choice is lost when
# the process ends, and the first call of each shape waits for the trials. The
# library has a table of at most eight rows instead, and takes the first row
# whose limits fit. ``python -m fusebook.measure.tune concat_gemm`` is this
# loop, run when the table is written. For a problem of each row, it checks
# each candidate against float64, times those within tolerance, and prints the
# fastest.

# %%
# How far from the roof?
# ----------------------
#
# The roof of a large product is the rate of the matrix units, as PyTorch's own
# product of the same dtype reached it when this machine was measured. That
# rate varies with the power that the data draws (:doc:`plot_002_measuring`),
# so values above 100 % are possible.

plots.dots(tables.where(one, variant=WAYS + OURS[:1]), of="roof")

# %%
# Lessons
# -------
#
# A map of who wins
# ~~~~~~~~~~~~~~~~~
#
# For each size and dtype the fastest of the ways that leave the weights where
# they are, cold, and our time over that of the best other one.

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
    colours = {name: plots.style(name)["color"] for name in FREE}
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
# What became of the targets
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Targets were set before the kernel was written, and were met or missed; the
# claims beside them were drawn from the results. What the launcher chooses may
# be PyTorch's views. It cannot choose the packed product, since nobody has
# packed the weights.

PEERS = [*WAYS, *ORT]
best = by_n(tables.times(half))
behind = best["fusebook (chosen)"] / best[PEERS].min(axis=1)
awkward = tables.times(odd)
awkward = awkward["fusebook (chosen)"] / awkward[WAYS].min(axis=1)
large = half[half["N"] >= 2048]
small = half[half["N"] <= 1024]
claims(
    claim(
        "In half precision, cold, our own kernel is faster than two Gemm and "
        "a Concat at every n from 256 to 8192.",
        tables.ratio(half, "fusebook", "two + cat") < 1,
    ),
    claim(
        "In half precision our own kernel is faster than two Gemm and a "
        "Concat at every n for an eager program, which also pays for the "
        "launch.",
        tables.ratio(half, "fusebook", "two + cat", "paid") < 1,
        fatal=False,
    ),
    target(
        "In half precision, cold, what the launcher chooses takes at most "
        "1.03 times the best other way's time, even that of the packed "
        "product: it takes {least:.2f} to {most:.2f} times.",
        behind <= 1.03,
        least=behind.min(),
        most=behind.max(),
    ),
    target(
        "At the awkward shapes, cold, what the launcher chooses is never "
        "slower than the best other way by more than 3 %: it takes "
        "{least:.2f} to {most:.2f} times its time.",
        awkward <= 1.03,
        least=awkward.min(),
        most=awkward.max(),
    ),
    target(
        "From n = 2048 our own kernel reaches 90 % of the packed product or "
        "more, cold.",
        1 / tables.ratio(large, "fusebook", "packed") >= 0.9,
        of=tables.ratio(half, "fusebook", "packed"),
    ),
    target(
        "Up to n = 1024 our own kernel takes at most 1.15 times the packed "
        "product, warm.",
        tables.ratio(small, "fusebook", "packed", "warm") <= 1.15,
        of=tables.ratio(half, "fusebook", "packed", "warm"),
    ),
    claim(
        "Beyond the packed product no way costs more than predicted, give or "
        "take 10 % of that product's time.",
        (counted - allowed.reindex(counted.index)).le(
            0.1 * lines["packed"], axis=0
        ).all(axis=1),
        fatal=False,
    ),
    say(
        "At n = 8192 two Gemm and a Concat cost {more:.0f} microseconds "
        "beyond the packed product, where at most {most:.0f} were predicted. "
        "These differ by {part:.1%} of that product's time.",
        more=counted.loc[8192, "two + cat"],
        most=allowed.loc[8192, "two + cat"],
        part=abs(counted - allowed).loc[8192, "two + cat"]
        / lines.loc[8192, "packed"],
    ) if 8192 in counted.index else say("n = 8192 was not asked for."),
)  # fmt: skip

# %%
# In float32 and TF32, and with packed weights:

full = tables.times(single)
slow = tables.ratio(single[single["N"] >= 2048], "fusebook", "views")
slow_tf32 = tables.ratio(
    single[single["N"] >= 1024], "fusebook, TF32", "views, TF32"
)
one_big = best["two + cat"] / best["packed"]
n_of = one_big.index.get_level_values("n")
claims(
    say(
        "In float32 from n = 2048 our kernel, which adds three products in "
        "TF32 of weights that it turns first, takes {least:.2f} to {most:.2f} "
        "times the time of PyTorch's views, cold.",
        least=slow.min(),
        most=slow.max(),
    )
    if slow.notna().any()
    else say(
        "In float32 from n = 2048 our kernel passed the roof of float32's own "
        "units, as three products in TF32 can, and its times were refused."
    ),
    say(
        "In TF32 from n = 1024 our kernel takes {few:.1f} to {many:.1f} times "
        "the time of PyTorch's views, cold.",
        few=slow_tf32.min(),
        many=slow_tf32.max(),
    ),
    claim(
        "In float32 and in TF32 what the launcher chooses takes as long as "
        "the better of our kernel and the views, within 5 %, cold.",
        pd.concat([
            full["fusebook (chosen)"]
            / full[["fusebook", "views"]].min(axis=1),
            full["fusebook (chosen), TF32"]
            / full[["fusebook, TF32", "views, TF32"]].min(axis=1),
        ]).dropna() <= 1.05,
        fatal=False,
    ),
    claim(
        "One big product of weights that were packed beforehand beats two "
        "products and a Concat at every size, in half precision, cold: it is "
        "{least:.1f} to {most:.1f} times as fast up to n = 1024, and "
        "{few:.2f} to {many:.2f} times from n = 2048 on.",
        one_big > 1,
        fatal=False,
        headline=True,
        least=one_big[n_of <= 1024].min(),
        most=one_big[n_of <= 1024].max(),
        few=one_big[n_of >= 2048].min(),
        many=one_big[n_of >= 2048].max(),
    ),
)  # fmt: skip

# %%
# What became of the statements
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The source, *Gemm Exploration with CUDA*, asks the question of the title,
# checks that the two graphs agree on 16 x 16 numbers, prints three ratios and
# closes with one sentence.

in_tf32 = ratios["here, TF32, cold"].dropna()
claims(
    holds(
        '"It seems the fused operator is 33% faster" (the source, 2024), at '
        "all sizes of its own table: there it takes 33 % less time at n = "
        "256, 13 % more at 512 and 9 % less at 1024.",
        THEIRS <= 0.675043,
    ),
    holds(
        '"33% faster" here, within 2 %, by the same clock in float32: at n = '
        "256, 512 and 1024, the sizes of the source, one Gemm takes {ratios} "
        "of the time.",
        one_gemm.loc[list(THEIRS.index)] <= 1.02 * 0.675043,
        of=one_gemm,
        ratios=", ".join(f"{r:.2f}" for r in one_gemm.loc[[256, 512, 1024]]),
    ),
    holds(
        '"diff=0.0" (the source, 2024, on a GPU): on this CPU, too, the two '
        "graphs give the same bits.",
        torch.equal(by_products, by_weights),
    ),
    holds(
        "One big Gemm is the better one (the source's question, 2024): in "
        "ONNX Runtime in float32, cold, it is never slower by more than 2 %, "
        "its Concat included: it takes {least:.2f} to {most:.2f} of the time.",
        ratios["here, float32, cold"].dropna() <= 1.02,
        least=ratios["here, float32, cold"].min(),
        most=ratios["here, float32, cold"].max(),
    ),
    say(
        "In TF32, which ONNX Runtime computes unless told otherwise, one big "
        "Gemm with its Concat takes {least:.2f} to {most:.2f} of the time, "
        "cold, and is slower by more than 2 % at {lost} of {all} sizes.",
        least=in_tf32.min(),
        most=in_tf32.max(),
        lost=int((in_tf32 > 1.02).sum()),
        all=len(in_tf32),
    ),
)

# %%
# Where it does not win
# ~~~~~~~~~~~~~~~~~~~~~

lost = pd.concat([half, odd, decode])
lost = lost[lost["variant"] != "fusebook (chosen)"]
table(
    tables.losses(lost),
    "Where another way is faster than our kernel in half precision, cold: the "
    "fastest, and how far behind we are",
    fold=True,
)

# %%
# Tensor cores take TF32 only where the numbers along K lie side by side in
# memory. Weights stored by rows have to be transposed on the way, in TF32 as
# in float32. In half precision n = 3000 has as many tiles as n = 3072, but a
# row of 6000 bytes seldom begins at a multiple of 128, so most pieces of a
# tile lie in two lines of the cache instead of one. At n = 1024 a cold call is
# short. *Fusebook* and *fusebook (chosen)* are one kernel there, so their
# difference is how much a time varies.

by_size = tables.times(odd)["fusebook"].groupby("N").first()
per_product = by_size / pd.Series(by_size.index, by_size.index) ** 3
short = best.loc[best.index.get_level_values("n") == 1024]
claims(
    say(
        "At n = 1024, cold, in each half type, our kernel takes {first} times "
        "the packed product's time in the column fusebook, and {second} times "
        "in the column fusebook (chosen).",
        first=" and ".join(
            f"{r:.3f}" for r in short["fusebook"] / short["packed"]
        ),
        second=" and ".join(
            f"{r:.3f}" for r in short["fusebook (chosen)"] / short["packed"]
        ),
    ),
    claim(
        "For the same work our kernel takes {times:.2f} times as long at n = "
        "3000 as at n = 3072, which is more than 1.1 times.",
        per_product[3000] / per_product[3072] > 1.1,
        fatal=False,
        times=per_product[3000] / per_product[3072],
    ),
    claim(
        "At n = 3000 and n = 3072 the launcher chooses PyTorch's views, and "
        "gains more than 2 % by it, cold.",
        tables.times(odd)["fusebook (chosen)"].groupby("N").first()[
            [3000, 3072]
        ] < 0.98 * by_size[[3000, 3072]],
        fatal=False,
    ),
)  # fmt: skip

# %%
# By the caller's clock
# ~~~~~~~~~~~~~~~~~~~~~
#
# The device works while the host queues what comes next. So an :term:`eager`
# program of many calls pays, for each, the larger of the host's time and the
# device's: *paid*. A kernel that is shorter than its launch takes as long as
# the launch.

callers = tables.alike(lost)
by_clock(callers)

# %%
every_clock(callers)

# %%
# What to take to the next kernel:
#
# - Before you concatenate, ask where the result could have been written in the
#   first place. Two products into views need no kernel at all.
# - Do not judge by one size: the cost of a product grows with the cube of n,
#   that of a Concat with the square, and that of a launch not at all.
# - Say how float32 is multiplied: in float32 or in TF32.
# - What is done to a finished tile before it is stored, the :term:`epilogue`,
#   costs no traffic: exercise 2 adds a bias there.
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
