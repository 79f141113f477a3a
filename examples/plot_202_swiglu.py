# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
SwiGLU: two products that are never written
===========================================

The feed-forward layer of a Llama multiplies its input with two weights,
applies an activation to one product and multiplies it with the other. The
products are large, and nobody needs them in memory. This page keeps both in
registers, and measures what that is worth with thousands of tokens and with a
few.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them.

For whom: those who train or serve models like Llama, and those who want to
fuse into a matrix product.

Read before: 201.
"""

# %%
# The problem
# -----------
#
# For x of shape M x K and two weights of shape K x N,
#
# .. math::
#
#    y = \mathrm{silu}(x\,w_\mathrm{gate}) \cdot (x\,w_\mathrm{up}),
#    \qquad \mathrm{silu}(z) = \frac{z}{1 + e^{-z}}
#
# element by element. In Llama 2 7B K is 4096 and N is 11008, in Llama 3 8B
# 14336; M is the number of tokens. `torch.nn.Linear` keeps its weight as
# N x K and multiplies with the transpose: seen as K x N, its columns lie side
# by side in memory. That is how the weights of this page lie.

# sphinx_gallery_tags = ["matrix product", "SwiGLU", "epilogue"]
from functools import partial

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots, tables
from fusebook.cards.swiglu import SWIGLU
from fusebook.measure import bench, machine
from fusebook.measure.check import yardstick
from fusebook.measure.inputs import generator
from fusebook.measure.timing import measure
from fusebook.page import (
    Folded,
    Kernels,
    Source,
    by_clock,
    by_step,
    claim,
    claims,
    counters,
    downloads,
    every_clock,
    exercise,
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

asked = study(SWIGLU, config="llama,small", dtype="bfloat16", repeat=20)

# %%
# What eager costs
# ----------------

Source(fusebook.swiglu_eager, doc=False)

# %%
# The products take their time in any case. What can be saved is the traffic
# around them: eager writes both products, reads one for its silu, writes that,
# and reads two to multiply them. The least is to write y. What the difference
# is worth at most follows from what this machine was measured to do: the rate
# of its matrix units for the products, the rate of its memory for the rest.
#
# :term:`Packed <packed>` weights, side by side in one, make one product of
# two. That saves one reading of x and no other traffic. A compiler can do all
# that comes after the product in one kernel, but the product must be written
# for it.

on = machine.current()
LAYERS = {
    "Llama 2 7B, 4096 tokens": {"M": 4096, "K": 4096, "N": 11008},
    "Llama 3 8B, 8192 tokens": {"M": 8192, "K": 4096, "N": 14336},
    "Llama 2 7B, 16 tokens": {"M": 16, "K": 4096, "N": 11008},
}
rows = {}
for name, dims in LAYERS.items():
    least = SWIGLU.cost(2, **dims)
    needed = on.roof(least, "bfloat16")
    row = {"products alone": 1e6 * needed}
    for way in ("eager", "packed + compiled"):
        own = SWIGLU.variants[way].cost(2, **dims)
        more = on.memory_seconds(own) - on.memory_seconds(least)
        row[way] = (needed + more) / needed
    rows[name] = row
predicted = pd.DataFrame.from_dict(rows, orient="index")
table(
    predicted,
    "Predicted in bfloat16, without launches: microseconds of the products, "
    "then each way's time over that",
    fold=False,
)

# %%
gain = predicted["packed + compiled"].iloc[0]
claims(
    say(
        "Predicted: for 4096 tokens eager takes {eager:.2f} times the "
        "products, packed and compiled {compiled:.2f} times.",
        eager=predicted["eager"].iloc[0],
        compiled=gain,
    ),
    claim(
        "With 16 tokens eager is predicted to take {ratio:.2f} times the "
        "products, less than 1.05: {share:.1%} of the least traffic is "
        "weights, and nothing saves those.",
        predicted["eager"].iloc[2] < 1.05,
        ratio=predicted["eager"].iloc[2],
        share=2 * 2 * 4096 * 11008 / (least.read + least.write),
    ),
)

# %%
# The kernel
# ----------
#
# Step one: two sums
# ~~~~~~~~~~~~~~~~~~
#
# A program owns a tile of the output. It walks along K and multiplies each
# tile of x with a tile of either weight: two sums in registers, one reading of
# x. At the end it computes silu and the last product from the sums, in
# registers. That is the :term:`epilogue` of the product.


@triton.jit
def two_sums(
    y_ptr, x_ptr, gate_ptr, up_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    g = tl.zeros([BM, BN], tl.float32)
    u = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x_mask = (m < M)[:, None] & (k < K)[None, :]
        w_mask = (k < K)[:, None] & (n < N)[None, :]
        at = n[None, :] * K + k[:, None]  # columns side by side
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=x_mask, other=0)
        gate = tl.load(gate_ptr + at, mask=w_mask, other=0)
        up = tl.load(up_ptr + at, mask=w_mask, other=0)
        if WIDEN:  # the interpreter multiplies bfloat16 wrongly
            x, gate = x.to(tl.float32), gate.to(tl.float32)
            up = up.to(tl.float32)
        g = tl.dot(x, gate, g, input_precision="ieee")
        u = tl.dot(x, up, u, input_precision="ieee")
    y = g / (1 + tl.exp(-g)) * u
    y_ptrs = y_ptr + m[:, None] * N + n[None, :]
    tl.store(y_ptrs, y, mask=(m < M)[:, None] & (n < N)[None, :])


def step_one(x, gate, up, BM=64, BN=64, warps=4):
    (M, K), N = x.shape, gate.shape[1]
    y = x.new_empty(M, N)
    grid = triton.cdiv(M, BM), triton.cdiv(N, BN)
    tiles = {"BM": BM, "BN": BN, "BK": 64, "WIDEN": not x.is_cuda}
    two_sums[grid](y, x, gate, up, M, N, K, **tiles, num_warps=warps)
    return y


# %%
# Step two: one sum of twice the width
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Hopper's :term:`tensor cores <tensor core>` read the tile of x from
# :term:`shared memory`, again for each product. One product of 256 columns
# reads it half as often as two of 128. So the tiles of both weights should be
# one tile.
#
# They are one tile if the weights are one tensor. Two weights of one shape
# can always be seen as one: the distance between their addresses is the stride
# of a third axis. A descriptor of three axes then fetches 2 x 128 columns at
# once, from two places in memory, and they arrive as 256. Each thread then
# holds the gate and the up value of the same column. ``LATE`` is the
# :term:`programmatic dependent launch` of :doc:`plot_204_descriptors`. Where
# float32 has a few rows only, ``SPLIT`` programs share the sum over K of a
# tile, and a second kernel adds their parts.

Folded("The library's kernels", Kernels(fusebook.swiglu))

# %%
# All our kernels of this page have the same end, in float32. (Eager has
# rounded both products to half precision by then.)
#
# A few rows
# ~~~~~~~~~~
#
# A few rows are another problem. The time is that of reading the weights from
# memory, so every multiprocessor should read all the time. Tiles have 16, 32
# or 64 rows there and few columns, and long steps along K are in flight.
# Several programs share a multiprocessor: while one waits for its last loads,
# others read.
#
# What the hardware counts
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# What comes from memory and goes there, by the counters of the GPU (see
# :doc:`plot_101_elementwise`), for the 4096 tokens of Llama 2 7B. Operands
# that leave the :term:`L2 cache` between two tiles are read again. Sectors (of
# threads' loads, not of descriptors) and occupancy are of the kernel that
# reads most.


# site: fold
def to_count():
    dims = LAYERS["Llama 2 7B, 4096 tokens"]
    given = SWIGLU.make(generator(0), torch.bfloat16, **dims)
    return {
        "eager": lambda: fusebook.swiglu_eager(*given),
        "step one": lambda: step_one(*given),
        "the library": lambda: fusebook.swiglu(*given),
    }


Y = 2 * 4096 * 11008  # bytes of the result
traffic = by_step(counters("swiglu_counters", to_count), Y, "in results")
table(traffic, "In bytes of the result", fold=False)

# %%
both = traffic[["read, in results", "written, in results"]].sum(axis=1)
least = SWIGLU.cost(2, **LAYERS["Llama 2 7B, 4096 tokens"])
claims(
    claim(
        "The library's kernel moves fewer bytes than eager: {ours:.1f} "
        "results, read and written, against {eager:.1f}; its card counts "
        "{least:.1f}.",
        both.filter(items=["the library"]).lt(both.get("eager")),
        of=both,
        fatal=False,
        ours=both.get("the library"),
        eager=both.get("eager"),
        least=(least.read + least.write) / Y,
    )
) if len(traffic) else None

# %%
# Is it right?
# ------------
#
# The products of these inputs are of the size at which silu is curved; some
# rows have large values, some are far from zero. Freed memory is filled with
# NaN before each call.


def ours(x, gate, up):
    return fusebook.swiglu(x, gate, up, tf32=False)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
found = pd.concat(
    [
        asked.judged(
            {"M": 70, "K": 96, "N": 72},
            dtype,
            eager=fusebook.swiglu_eager,
            step_one=step_one,
            fusebook=ours,
        )
        for dtype in DTYPES
    ]
    + [
        asked.judged({"M": M, "K": K, "N": N}, torch.bfloat16, fusebook=ours)
        for M, K, N in ((65, 63, 81), (1, 200, 65))
    ],
    ignore_index=True,
)
table(found, "Scores, each within its limit", fold=False)

# %%
error = found[found["M"] == 70].pivot_table("error", "dtype", "way")
claims(
    claim("Every way is within its limit.", found["right"]),
    claim(
        "In half types our kernel, which rounds once, is no less exact than "
        "eager, which rounds each product.",
        (error["fusebook"] <= error["eager"]).drop("float32"),
        of=error,
    ),
)

# %%
# How fast?
# ---------
#
# *Packed* is one product with both weights side by side, then one operation
# after another; *packed + compiled* leaves these to the compiler. *Liger* has
# one kernel for them, after two products. *quack* has a product that ends in
# SwiGLU, as ours does, for weights whose columns were interleaved beforehand.
# A way that is not installed, or that failed, has no times; its message stands
# below.

HERE = ["TF32", "chosen"]  # of float32, further down
layers = asked.results(
    variants=[
        name
        for name in SWIGLU.variants
        if not any(word in name for word in HERE)
    ]
)
table(
    tables.times(layers, words=True),
    "SwiGLU: cold time in microseconds",
    fold=False,
)

# %%

missing = layers[layers["status"] != "ok"].drop_duplicates("variant")
table(missing.set_index("variant")[["status", "note"]], "Not timed, and why")

# %%
# All ways are compared with *the product alone*: one product with both weights
# packed, without silu and the last product. It computes less than SwiGLU, but
# writes two products where we write one result, so ours may take less time.
# Here it is timed in turn with the others, so that drift is the same for all.

BARE = "the product alone"
SIZES = ["M", "K", "N"]


def in_turn():
    """Cold and warm times of every way and of the bare product."""
    rows = []
    for dims in list(LAYERS.values())[:2]:
        inputs = SWIGLU.make(generator(0), torch.bfloat16, **dims)
        x, packed = SWIGLU.variants["packed"].prepare(*inputs)
        calls = {BARE: partial(torch.mm, x, packed)}
        for name, dtype in layers[layers["status"] == "ok"][
            ["variant", "dtype"]
        ].itertuples(index=False):
            if dtype == "bfloat16" and name not in calls:
                way = SWIGLU.variants[name]
                given = way.prepare(*inputs) if way.prepare else inputs
                calls[name] = partial(way.run, *given)
        times = measure(calls, repeat=asked.repeat, kinds=("cold", "warm"))
        for name, kinds in times.items():
            medians = {
                tables.column(kind): 1e6 * q.q50
                for kind, q in kinds.items()
                if q is not None
            }
            rows.append({**dims, "variant": name, **medians})
    return pd.DataFrame(rows)


turns = measured("swiglu_in_turn", in_turn)


def beside(kind):
    """The time of each way over that of the product alone."""
    wide = turns.pivot_table(tables.column(kind), SIZES, "variant", sort=False)
    return wide.div(wide[BARE], axis=0).drop(columns=BARE)


table(
    beside("cold"),
    "Time over that of the packed product alone, cold, bfloat16",
    fold=False,
)

# %%
# A few tokens
# ~~~~~~~~~~~~
#
# The weights are read once, so the :term:`roof` is the rate at which this
# machine reads. The last layer is that of Llama 3 70B, whose weights are many
# times the cache.

decode = asked.results(
    config="decode",
    dtype="bfloat16",
    variants=["eager", "packed", "quack", "fusebook"],
)
table(
    tables.times(decode, words=True),
    "A few tokens: cold time in microseconds",
    fold=False,
)

# %%
shares = decode.assign(
    cold=100 * decode["roof_us"] / decode["gpu_us"],
    warm=100 * decode["roof_us"] / decode["gpu_warm_us"],
)
table(
    shares.set_index([*SIZES, "variant"])[["warm", "cold"]].dropna(how="all"),
    "A few tokens: percent of the roof of reading the weights",
    fold=False,
)

# %%
provenance(layers)

# %%
downloads(layers, "swiglu")

# %%
# What each step was worth, and the compiler on two products
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# `torch.compile` can be given the eager chain as it stands, with two weights.
# With ``max-autotune`` it also times kernels of its own for each product
# (:term:`autotuning`) and may put the silu into the second one's
# :term:`epilogue`. Beside them step one as it was shown, and in larger tiles:
# what each step was worth.


# site: fold
def compiled_products():
    parts = []
    for dims in (
        LAYERS["Llama 2 7B, 4096 tokens"],
        {"M": 1, "K": 4096, "N": 11008},
    ):
        given = SWIGLU.make(generator(0), torch.bfloat16, **dims)
        yard = yardstick(SWIGLU, given)
        packed = SWIGLU.variants["packed"].prepare(*given)
        torch.compiler.reset()
        default = torch.compile(fusebook.swiglu_eager, dynamic=False)
        tuned = torch.compile(
            fusebook.swiglu_eager,
            dynamic=False,
            mode="max-autotune-no-cudagraphs",
        )

        def way(function, given=given, **more):
            return lambda: function(*given, **more)

        frame = bench.staircase(
            {
                "eager": way(fusebook.swiglu_eager),
                "packed + compiled": way(
                    SWIGLU.variants["packed + compiled"].run, packed
                ),
                "torch.compile": way(default),
                "torch.compile, max-autotune": way(tuned),
                "step one, 64 x 64": way(step_one),
                "step one, 128 x 128": way(step_one, BM=128, BN=128, warps=8),
                "the library": way(ours),
            },
            lambda got, yard=yard: yard.judge(got).ok,
        )
        parts.append(frame.assign(**dims))
    return pd.concat(parts, ignore_index=True)


apart = measured("swiglu_compiled", compiled_products, by_device=True)
apart_us = apart.pivot_table("us", "step", "M", sort=False)
apart_us.columns = [f"{M} token{'s' * (M > 1)}, us" for M in apart_us.columns]
by_lines = {
    "eager": lines_of(fusebook.swiglu_eager),
    "step one, 64 x 64": lines_of(two_sums, step_one),
    "step one, 128 x 128": lines_of(two_sums, step_one),
    "the library": lines_behind(fusebook.swiglu_eager),
}
least_us = {
    f"{M} token{'s' * (M > 1)}, us": 1e6
    * on.roof(SWIGLU.cost(2, M=M, K=4096, N=11008), "bfloat16")
    for M in apart["M"].unique().tolist()
}
table(
    tables.staircase(apart_us, apart, roof=least_us, lines=by_lines),
    "4096 x 11008 in bfloat16, cold",
    fold=False,
)

# %%
token, tokens = apart_us["1 token, us"], apart_us["4096 tokens, us"]
tuned, plain = "torch.compile, max-autotune", "torch.compile"
claims(
    claim("All of them are right.", apart["right"]),
    say(
        "With 4096 tokens torch.compile takes {plain:.2f} times the time of "
        "our kernel, and with max-autotune {tuned:.2f} times; with one token "
        "{one:.2f} and {few:.2f} times. Step one takes {step:.2f} times our "
        "kernel's time with 4096 tokens, in tiles of 128 x 128.",
        step=tokens["step one, 128 x 128"] / tokens["the library"],
        plain=tokens[plain] / tokens["the library"],
        tuned=tokens[tuned] / tokens["the library"],
        one=token[plain] / token["the library"],
        few=token[tuned] / token["the library"],
    ),
    claim(
        "With 4096 tokens our kernel is faster than what max-autotune finds: "
        "it takes {ratio:.2f} times its time.",
        tokens["the library"] < tokens[tuned],
        fatal=False,
        ratio=tokens["the library"] / tokens[tuned],
    ),
    claim(
        "With one token our kernel is faster than what max-autotune finds: it "
        "takes {ratio:.2f} times its time.",
        token["the library"] < token[tuned],
        fatal=False,
        ratio=token["the library"] / token[tuned],
    ),
)

# %%
# How far from the roof?
# ----------------------
#
# For many tokens the roof is the rate of the tensor cores, as PyTorch's own
# product reached it when this machine was measured. It varies with the power
# that the data draws.

plots.dots(
    tables.where(layers, variant=lambda c: ~c.str.contains("TF32")), of="roof"
)

# %%
plots.dots(
    tables.where(decode, variant=lambda c: ~c.str.contains("TF32")),
    of="roof",
    title="swiglu: share of reading the weights, cold",
)

# %%
table(tables.shares(pd.concat([layers, decode])), "Each way, cold")

# %%
# Float32 and float16
# ~~~~~~~~~~~~~~~~~~~
#
# The small layers in other dtypes. Tensor cores have no float32, so our kernel
# adds three products in TF32, which they have. The column *fusebook (chosen)*
# is the default: for these weights, the fused kernel. Weights stored by rows,
# and float64, take PyTorch's two matmuls and one kernel for the rest.

others = asked.results(
    config="small",
    dtype="float16,float32",
    variants=[
        "eager",
        "packed",
        "fusebook",
        "fusebook (chosen)",
        "packed, TF32",
        "fusebook, TF32",
        "fusebook (chosen), TF32",
    ],
)
table(
    tables.times(others, words=True),
    "Other dtypes: cold time in microseconds",
    fold=False,
)

# %%
claims(
    say(
        "A time that is less than the roof is not kept, and the table says "
        "too fast. Here the roof is what PyTorch's own product of float32 "
        "reaches, and three products in TF32 can take less."
    )
) if (others["status"] == "too fast").any() else None

# %%
single = others[others["dtype"] == "float32"]
chosen = tables.times(single)
claims(
    claim(
        "In float32 our kernel, which adds three products in TF32, is faster "
        "than eager where it has a time: it takes {ratios} times eager's.",
        tables.ratio(single, "fusebook", "eager") < 1,
        of=chosen,
        fatal=False,
        ratios=" and ".join(
            f"{ratio:.2f}"
            for ratio in tables.ratio(single, "fusebook", "eager")
        ),
    ),
    claim(
        "What the launcher chooses in float32 is not slower than eager by "
        "more than 3 %, where it has a time.",
        (chosen["fusebook (chosen)"] / chosen["eager"]).dropna() <= 1.03,
        of=chosen,
        fatal=False,
    ),
    claim(
        "What the launcher chooses in float32 is not slower than packed "
        "weights by more than 3 %, where it has a time.",
        (chosen["fusebook (chosen)"] / chosen["packed"]).dropna() <= 1.03,
        of=chosen,
        fatal=False,
    ),
    claim(
        "In TF32 what the launcher chooses is not slower than packed by more "
        "than 3 %.",
        chosen["fusebook (chosen), TF32"] <= 1.03 * chosen["packed, TF32"],
        fatal=False,
    ),
)

# %%
# Lessons
# -------
#
# Targets were set before the kernel was written, and are met or missed.

against = beside("cold")
over_torch = tables.times(layers)
over_torch = over_torch["fusebook"] / over_torch[
    ["eager", "packed", "packed + compiled"]
].min(axis=1)
many = over_torch.index.get_level_values("M") >= 4096
few = decode[(decode["M"] == 16) & (decode["variant"] == "fusebook")]
few = few.set_index(SIZES)


def over(way):
    """Our time over that of a library at the two large layers."""
    ratio = tables.ratio(layers[layers["M"] >= 4096], "fusebook", way)
    return " and ".join(f"{r:.2f}" for r in ratio)


claims(
    target(
        "With 4096 and 8192 tokens our kernel takes at most 1.08 times the "
        "packed product alone, cold.",
        against["fusebook"] <= 1.08,
    ),
    claim(
        "For Llama's layers in bfloat16, 4096 and 8192 tokens, our kernel is "
        "faster than every way of PyTorch's, cold: it takes {least:.2f} to "
        "{most:.2f} times the time of the fastest of them. With fewer tokens "
        "it takes {few}.",
        over_torch[many] < 1,
        fatal=False,
        headline=True,
        of=over_torch,
        least=over_torch[many].min(),
        most=over_torch[many].max(),
        few=" and ".join(
            f"{ratio:.2f} times that time with {M}"
            for (M, *_), ratio in over_torch[~many].items()
        ),
    ),
    say(
        "With 4096 and 8192 tokens our kernel takes {ratios}. Not timed: "
        "{untimed}.",
        ratios=", ".join(
            f"{ratio} times the time of {way}"
            for way in ("Liger", "quack")
            if (ratio := over(way))
        ),
        untimed=", ".join(missing["variant"]) or "none",
    ),
    target(
        "With 16 tokens our kernel reaches at least 90 % of the roof of "
        "reading the weights, warm: it reaches {least:.0%} or more.",
        few["roof_us"] / few["gpu_warm_us"] >= 0.9,
        least=(few["roof_us"] / few["gpu_warm_us"]).min(),
    ),
    target(
        "With 16 tokens our kernel reaches at least 90 % of the roof of "
        "reading the weights, cold: it reaches {least:.0%} or more.",
        few["roof_us"] / few["gpu_us"] >= 0.9,
        least=(few["roof_us"] / few["gpu_us"]).min(),
    ),
    claim(
        "With 4096 tokens packed and compiled takes what was predicted, "
        "within 10 %: {found:.2f} times the bare product, and {gain:.2f} were "
        "predicted.",
        abs(against["packed + compiled"].iloc[0] / gain - 1) <= 0.1,
        fatal=False,
        found=against["packed + compiled"].iloc[0],
        gain=gain,
    ),
    say(
        "For 4096 tokens SwiGLU takes {ours:.2f} times the bare product here, "
        "{compiled:.2f} packed and compiled, {eager:.2f} eager.",
        ours=against["fusebook"].iloc[0],
        compiled=against["packed + compiled"].iloc[0],
        eager=against["eager"].iloc[0],
    ),
    *[
        say(
            "With 16 tokens our kernel reaches {warm:.1%} of the roof at {K} "
            "x {N} warm, {cold:.1%} cold.",
            K=K,
            N=N,
            warm=row["roof_us"] / row["gpu_warm_us"],
            cold=row["roof_us"] / row["gpu_us"],
        )
        for (_, K, N), row in few.iterrows()
    ],
)

# %%
# Where it does not win
# ~~~~~~~~~~~~~~~~~~~~~
#
# Every point at which some other way is faster by more than 2 %, the worst
# first:

every = pd.concat([layers, decode, others])
alike = every[every["math"] != "tf32"]  # only like is compared
alike = alike[alike["variant"] != "fusebook (chosen)"]
table(
    tables.losses(alike),
    "Where another way is faster, cold: the fastest, and how far behind",
    fold=False,
)

# %%
# By the caller's clock
# ~~~~~~~~~~~~~~~~~~~~~
#
# The device works while the host queues what comes next. So an :term:`eager`
# program of many calls pays, for each, the larger of the host's time and the
# device's: *paid*. A kernel that is shorter than its launch takes as long as
# the launch.

by_clock(alike)

# %%
every_clock(alike)

# %%
# What to take to the next kernel:
#
# - What comes after a product moves nothing while the product is in registers.
# - Fusing saves traffic, and a large product has little of it: predict what
#   there is to win before you start.
# - Two tensors of one shape are one tensor with one more axis.
#
# Exercises
# ---------
#
# 1. GeGLU
# ~~~~~~~~
#
# Other models have another activation: ``gelu(z) = z * (1 + erf(z /
# sqrt(2))) / 2``. Triton has ``tl.math.erf``, or ``tl.erf``.


def geglu(x, gate, up):
    return step_one(x, gate, up)


def drawn(seed, M, K, N):
    """Inputs as the card draws them."""
    return SWIGLU.make(generator(seed), torch.float32, M=M, K=K, N=N)


exercise(
    "geglu applies gelu, by the error function",
    geglu,
    lambda x, gate, up: torch.nn.functional.gelu(x @ gate) * (x @ up),
    [drawn(3, 33, 40, 70), drawn(4, 5, 64, 64)],
)

# %%
# 2. A clamp
# ~~~~~~~~~~
#
# Some models clamp both products to [-7, 7] before they use them, so that one
# large value does not drown the others. In which line does it go? (It costs
# two operations in registers, and no traffic.)


def clamped(x, gate, up):
    return step_one(x, gate, up)


exercise(
    "clamped bounds both products",
    clamped,
    lambda x, gate, up: torch.nn.functional.silu(
        (x @ gate).clamp(-7, 7)
    ) * (x @ up).clamp(-7, 7),
    [
        (20 * x, gate, up)
        for x, gate, up in (drawn(5, 33, 40, 70), drawn(6, 5, 64, 64))
    ],
)  # fmt: skip

# %%
solution("solutions/plot_202_swiglu.py")
