# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book,ort]", "onnxruntime"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Masked ScatterND
================

The gradient of an embedding table is mostly zeros: a few thousand rows of
updates, added up in a table of tens of thousands of rows. This page writes
it in three ways, proves each right where indices meet, where they are masked
and where they are wrong, and asks how much of a published speed-up of 7 to 50
times was fusion.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them.

Read before: 002, 101.
"""

# %%
# The problem
# -----------
#
# An output of R rows of D numbers starts as zeros. There are n updates, rows
# of D numbers each, and n indices that say where they go:
#
# .. math::
#
#    y_r = \sum_{i:\; k_i = r} u_i, \qquad k_i \neq -1
#
# Several updates may go to one row, and then they add up. An index of -1 masks
# its update: padding in a batch of text has no gradient. In a Llama the table
# is 32000 x 4096, and a batch of 2 x 1024 tokens gives 2048 updates.
#
# ONNX has no operator for that. Its ScatterND adds to a tensor that must be
# given, so the standard way is a chain: make zeros, compare, replace, add. Two
# operators of our own take parts of the chain into themselves: one makes its
# zeros, the other masks as well.

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots, tables
from fusebook.cards.scatter_nd import (
    EMBEDDING_BACKWARD,
    MASKED_SCATTER_ND,
    SCATTER_ND_OF_SHAPE,
)
from fusebook.inputs import generator, rough
from fusebook.kernels.scatter_nd import (
    _scatter_nd_owner,
    _scatter_nd_plan,
    _scatter_nd_segments,
    _scatter_nd_sort,
    _scatter_nd_zeros,
    masked_scatter_nd_eager,
)
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

import numpy as np
import pandas as pd
import torch
import triton
import triton.language as tl

with extra("ort"):
    import onnx
    import onnx.helper as oh
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

asked = study(MASKED_SCATTER_ND, config="small,medium,large", dtype="float32")

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def model(fused):
    """One of three graphs that mean the same."""
    zero = oh.make_tensor("zero", FLOAT, [1], [0.0])
    minus_one = oh.make_tensor("minus_one", INT64, [1], [-1])
    mask = [
        oh.make_node("Constant", [], ["masked"], value=minus_one),
        oh.make_node("Constant", [], ["nothing"], value=zero),
        oh.make_node("Equal", ["indices", "masked"], ["is_masked"]),
        oh.make_node("Where", ["is_masked", "nothing", "updates"], ["kept"]),
    ]
    zeros = oh.make_node("ConstantOfShape", ["shape"], ["zeros"], value=zero)
    add = {"reduction": "add"}
    nodes = {
        "ScatterND": [
            zeros,
            *mask,
            oh.make_node(
                "ScatterND", ["zeros", "indices", "kept"], ["y"], **add
            ),
        ],
        "ScatterNDOfShape": [
            *mask,
            oh.make_node(
                "ScatterNDOfShape",
                ["shape", "indices", "kept"],
                ["y"],
                domain="fusebook",
                **add,
            ),
        ],
        "MaskedScatterNDOfShape": [
            oh.make_node(
                "MaskedScatterNDOfShape",
                ["shape", "indices", "updates"],
                ["y"],
                domain="fusebook",
                maskedValue=-1,
                **add,
            ),
        ],
    }
    graph = oh.make_graph(
        nodes[fused],
        fused,
        [
            oh.make_tensor_value_info("shape", INT64, ["axes"]),
            oh.make_tensor_value_info("indices", INT64, ["i", "j", 1]),
            oh.make_tensor_value_info("updates", FLOAT, ["i", "j", "D"]),
        ],
        [oh.make_tensor_value_info("y", FLOAT, ["R", "D"])],
    )
    opsets = [oh.make_opsetid("", 18), oh.make_opsetid("fusebook", 1)]
    return oh.make_model(graph, ir_version=10, opset_imports=opsets)


MODELS = ("ScatterND", "ScatterNDOfShape", "MaskedScatterNDOfShape")
Listing("\n\n".join(onnx.printer.to_text(model(name)) for name in MODELS))

# %%
# What they mean is decided by ONNX's reference evaluator, which is told of the
# two new operators in a few lines of NumPy. ``np.add.at`` adds every update,
# where ``y[rows] += updates`` would keep only the last of each row.


def scattered(shape, indices, updates):
    y = np.zeros(tuple(shape), updates.dtype)
    np.add.at(y, tuple(np.moveaxis(indices, -1, 0)), updates)
    return y


class ScatterNDOfShape(OpRun):
    op_domain = "fusebook"

    def _run(self, shape, indices, updates, reduction=None):
        return (scattered(shape, indices, updates),)


class MaskedScatterNDOfShape(OpRun):
    op_domain = "fusebook"

    def _run(self, shape, indices, updates, maskedValue=None, reduction=None):
        kept = np.where(indices == maskedValue, 0, updates)
        return (scattered(shape, indices, kept.astype(updates.dtype)),)


indices = np.ones((2, 10, 1), np.int64)
indices[0, ::2] = 3
indices[:, 1::4] = -1
feeds = {
    "shape": np.array([5, 7]),
    "indices": indices,
    "updates": np.ones((2, 10, 7), np.float32),
}
new = [ScatterNDOfShape, MaskedScatterNDOfShape]
meant = {
    name: ReferenceEvaluator(model(name), new_ops=new).run(None, feeds)[0]
    for name in MODELS
}
device = generator(0).device
ours = fusebook.masked_scatter_nd_of_shape(
    (5, 7),
    torch.from_numpy(indices).to(device),
    torch.from_numpy(feeds["updates"]).to(device),
)
claims(
    claim(
        "The three graphs mean the same",
        all(np.array_equal(meant["ScatterND"], y) for y in meant.values()),
    ),
    claim(
        "and so does our kernel",
        np.array_equal(meant["ScatterND"], ours.cpu().numpy()),
    ),
)

# %%
# ONNX Runtime runs the first of them. ``Graph`` binds the memory of torch's
# tensors, so that nothing is copied. On a CPU there is a trap: its ScatterND
# shares the updates out among threads that add without asking each other, and
# where two of them meet in a row, one addition is lost. Here is how often, on
# this machine, just now.

R, n, runs = 512, 1024, 30
rng = generator(seed=1, device="cpu")
few_rows = torch.randint(-1, 16, (1, n, 1), generator=rng)
whole = torch.randint(1, 9, (1, n, R), generator=rng).float()
feeds = {"shape": torch.tensor([R, R]), "indices": few_rows, "updates": whole}
(right,) = ReferenceEvaluator(model("ScatterND")).run(
    None, {name: value.numpy() for name, value in feeds.items()}
)
lost = {}
for threads in (1, 2, 4):
    graph = Graph(model("ScatterND"), device="cpu", threads=threads)
    # Whole numbers: their sums are exact in any order.
    lost[threads] = sum(
        not np.array_equal(right, graph(feeds)["y"].numpy())
        for _ in range(runs)
    )
threads = pd.DataFrame({"runs": runs, "wrong": pd.Series(lost)})
threads.index.name = "threads"
table(threads, "ONNX Runtime on this CPU: runs that lost updates", fold=False)

# %%
# A race is right most of the time, on another day or another machine perhaps
# always. One thread is right by construction, so that is what `Graph` gives a
# CPU unless it is asked for more.

claims(
    claim("With one thread every run is right", lost[1] == 0),
    holds("With more, every run was right this time", lost[2] + lost[4] == 0),
)

# %%
# What eager costs
# ----------------
#
# In PyTorch the chain is four operations, and the comments are its traffic.

Source(masked_scatter_nd_eager)

# %%
# The least is to write the output once and to read each update once. What
# fusion can give at most is the ratio of the two, and it hangs on how much of
# the work is zeros: where there are twice as many updates as rows, most of the
# chain's traffic is passing updates on; in the Llama's table it is zeros, and
# zeros must be written by anybody.

shapes = {"square, n = 2R": (1024, 2048, 2048), "Llama": (32000, 4096, 2048)}
bytes_moved = {}
for name, (R, D, n) in shapes.items():
    dims = {"R": R, "D": D, "n": n, "law": "uniform"}
    chain = MASKED_SCATTER_ND.variants["eager"].cost(4, **dims)
    least = MASKED_SCATTER_ND.cost(4, **dims)
    bytes_moved[name] = {
        "chain, MB": (chain.read + chain.write) / 1e6,
        "least, MB": (least.read + least.write) / 1e6,
    }
traffic = pd.DataFrame.from_dict(bytes_moved, orient="index")
traffic["fusion gives at most"] = traffic["chain, MB"] / traffic["least, MB"]
predicted = traffic["fusion gives at most"]
table(traffic, "Traffic in float32, and the prediction", fold=False)

# %%
claims(
    say(
        "Predicted, before anything is timed, for a chain and a kernel that "
        "move their bytes equally fast: fused, the square is at most "
        "{square:.1f} times as fast, and the Llama's table {llama:.2f} times.",
        square=predicted.iloc[0],
        llama=predicted.iloc[1],
    ),
    claim("Neither is 7, let alone 50", predicted < 7),
)

# %%
# The kernel
# ----------
#
# Step one: atomic
# ~~~~~~~~~~~~~~~~
#
# A program for each update: find its row, add. Several programs may add to one
# row, so the additions are atomic, and the zeros must be there before. Masking
# costs a comparison in registers. An index that is out of range is masked as
# well: a kernel never trusts a number that it uses as an address.


@triton.jit
def add_rows(y_ptr, k_ptr, u_ptr, R, D, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(k_ptr + i).to(tl.int64)  # read one index of 8 bytes
    masked = row == -1
    row = tl.where(row < 0, row + R, row)  # from the end, as in ONNX
    row = tl.where(masked, R, row)  # out of range, so that one test is enough
    reach = tl.where((row >= 0) & (row < R), D, 0)  # no column where masked
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < reach
    u = tl.load(u_ptr + i * D + columns, mask=inside, other=0.0)  # read D
    tl.atomic_add(y_ptr + row * D + columns, u, mask=inside, sem="relaxed")


def step_one(shape, indices, updates):
    y = updates.new_zeros(shape)  # write RD
    n, D = updates.shape
    block = triton.next_power_of_2(D)
    add_rows[(n,)](y, indices, updates, shape[0], D, BLOCK=block)
    return y


# %%
# Two things are wrong with it. The rows with updates are written as zeros,
# then read and written again by the additions. And the hardware chooses the
# order of the additions: two runs differ in the last bits. In float16 it would
# be worse: each addition rounds, and a sum of a thousand numbers has lost its
# tail.
#
# Step two: the output owner
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Turn it round: a program for each row of the output, which looks for its
# updates and writes its row once, zeros included. It adds in registers, in
# float32, in the order of the updates.


@triton.jit
def own_row(y_ptr, k_ptr, u_ptr, D, n, N: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)  # [N]; every program reads all indices
    k = tl.load(k_ptr + i, mask=i < n, other=-1)
    mine = (k == r) | ((k == r - tl.num_programs(0)) & (k != -1))
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    total = tl.zeros([BLOCK], tl.float32)
    at = tl.min(tl.where(mine, i, N), 0)  # the first of mine, N if none
    while at < N:
        u_row = u_ptr + at.to(tl.int64) * D + columns
        total += tl.load(u_row, mask=columns < D, other=0.0).to(tl.float32)
        at = tl.min(tl.where(mine & (i > at), i, N), 0)  # the next
    tl.store(y_ptr + r * D + columns, total, mask=columns < D)


def step_two(shape, indices, updates):
    y = updates.new_empty(shape)
    n, D = updates.shape
    block, N = triton.next_power_of_2(D), triton.next_power_of_2(n)
    own_row[shape[:1]](y, indices, updates, D, n, N=N, BLOCK=block)
    return y


# %%
# Nothing is written twice, and there is one launch. But every row reads every
# index, and where all updates go to one row, one program does all the work. So
# the library looks through all indices only where there are few. Where there
# are more, updates are first brought into the order of their rows.
#
# Step three: sorted segments
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Sort the updates by row, keeping the order of those of one row, and each
# stretch of equal keys is one row's sum. For some thousand updates the
# quickest sort is the most wasteful one: the place of an update is the number
# of updates that go before it, and a GPU compares each with every other in
# microseconds. Other programs of the same launch write the first zeros
# meanwhile.

Source(_scatter_nd_sort)

# %%
# Then the rows that have updates are added up. A stretch that crosses a
# multiple of a chunk is cut there into pieces, which different programs add
# up. The program that finishes last adds the pieces, always in the same order,
# so the bits are the same in every run whichever program that was.

Source(_scatter_nd_segments)

# %%
# The other rows get their zeros at the same time, so that memory has something
# to write while updates are read. Which rows are the others? To clear a table
# of marks would be one more launch. But a row that has updates knows where its
# keys start, and the key at that place names the row. What memory happened to
# hold for any other row fails that test.

Source(_scatter_nd_zeros)

# %%
# These are three kernels with hardly a gap between them. On Hopper and later
# GPUs a kernel may start while the one ahead of it still runs, and says itself
# where it has to wait (``gdc_wait``). The rows wait for the sort. The zeros
# start when all programs of the rows have waited, and their last program waits
# for the rows, so that whatever comes next finds the output whole.
#
# Where most rows have updates there are few others to fill, and where there
# are many updates, comparing all with all takes too long. There the
# updates are grouped by row with integer atomics (how many are in my row? what
# is my number in it?), and the owner writes every row once. Integers add up to
# the same whatever the order; only the order *within* a row is the hardware's.

Source(_scatter_nd_owner)

# %%
# Which of them is launched is decided by sizes, since to look at the indices
# would mean to wait for the GPU. Under
# ``torch.use_deterministic_algorithms(True)`` it is always sorted segments.

Source(_scatter_nd_plan)

# %%
# Is it right?
# ------------
#
# The reference is `index_add_` in float64. The score of a result is its
# largest error, relative to the element plus the root mean square of its row;
# a row that is rightly zero must be exactly zero. Before each call, freed
# memory of the output's size is filled with NaN, so that a row that nobody
# wrote shows. The indices are of four kinds: uniform, Zipf's law, all equal,
# all masked.


def by(strategy):
    """The library's function by one strategy."""
    return lambda *a: fusebook.masked_scatter_nd_of_shape(
        *a, strategy=strategy
    )


LAWS = ("uniform", "zipf", "equal", "masked")
sizes = {"R": 37, "D": 100, "n": 150}
steps = pd.concat(
    asked.judged(
        {**sizes, "law": law},
        torch.float32,
        eager=masked_scatter_nd_eager,
        step_one=step_one,
        step_two=step_two,
        atomic=by("atomic"),
        sorted=by("sorted"),
        owner=by("owner"),
    )
    for law in LAWS
)
halves = pd.concat(
    asked.judged(
        {**sizes, "law": law},
        dtype,
        atomic=by("atomic"),
        sorted=by("sorted"),
        owner=by("owner"),
    )
    for law in LAWS
    for dtype in (torch.float16, torch.bfloat16)
)
scores = pd.concat([steps, halves]).set_index(["law", "dtype", "way"])
table(scores[["score", "limit", "right"]], "Scores")

# %%
# A check is worth what it catches. The page that this one grew from read its
# indices into shared memory in blocks of 128 and then, in its fast masked
# kernel, took the wrong one of them from the second block on. It never
# compared what the GPU had computed, so it timed a kernel that may have been
# wrong. This is the mistake, and two more that are easily made.


def wrong_shared_index(shape, indices, updates):
    i = torch.arange(len(indices), device=indices.device)
    return masked_scatter_nd_eager(shape, indices[i % 128], updates)


def last_update_wins(shape, indices, updates):
    y = updates.new_zeros(shape)
    live = indices[:, 0] != -1
    y[indices[live, 0]] = updates[live]
    return y


def mask_counts_from_the_end(shape, indices, updates):
    return fusebook.scatter_nd_of_shape(shape, indices, updates)


def most(*ways, law="uniform", **changed):
    """Whether each of the ways is right at the sizes above."""
    named = {way.__name__: way for way in ways}
    dims = {**sizes, "law": law, **changed}
    return asked.judged(dims, torch.float32, **named)["right"].all()


claims(
    claim("All steps and strategies are right, by every law", steps["right"]),
    claim("In half types too, whose sums are float32", halves["right"]),
    claim(
        "The old page's wrong index passes with 128 updates",
        most(wrong_shared_index, n=128),
    ),
    claim("and is caught with 150", not most(wrong_shared_index)),
    claim(
        "The last update in place of the sum is caught",
        not most(last_update_wins),
    ),
    claim(
        "A mask that is taken for the last row is caught",
        not most(mask_counts_from_the_end, law="masked"),
    ),
)

# %%
# Wrong indices
# ~~~~~~~~~~~~~
#
# ``check=True``, the default, reads the indices first and names the first that
# is out of range. That costs a wait for the GPU; without the check, such
# updates are left out, and nothing is written elsewhere.

x = rough(generator(3), (3, 4), torch.float32)
bad = torch.tensor([[0], [5], [-2]], device=x.device)
try:
    fusebook.masked_scatter_nd_of_shape((5, 4), bad, x)
    refusal = ""
except IndexError as error:
    refusal = str(error)
unchecked = fusebook.masked_scatter_nd_of_shape((5, 4), bad, x, check=False)
claims(
    say("The error: {refusal}", refusal=refusal),
    claim("It names the position", "indices[1, 0]" in refusal),
    claim(
        "Unchecked, the other two updates arrive, one counted from the end",
        torch.equal(unchecked[[0, 3]], x[[0, 2]])
        and not unchecked[[1, 2, 4]].any(),
    ),
)

# %%
# The gradient
# ~~~~~~~~~~~~
#
# The gradient of the updates is a gather: each update gets the gradient of the
# row that it went to, and masked ones get zeros.

u = x.double().requires_grad_()
k = torch.tensor([[1], [-1], [1]], device=x.device)
y = fusebook.masked_scatter_nd_of_shape((5, 4), k, u)
(y * torch.arange(5.0, device=x.device)[:, None]).sum().backward()
claims(
    claim(
        "Masked updates have no gradient, others that of their row",
        u.grad[:, 0].tolist() == [1.0, 0.0, 1.0],
    ),
    claim(
        "and torch's gradcheck agrees",
        torch.autograd.gradcheck(
            lambda u: fusebook.masked_scatter_nd_of_shape((5, 4), k, u), u
        ),
    ),
)

# %%
# How fast?
# ---------
#
# First the table of the page that this one grew from: squares of twice as many
# columns as rows, and twice as many updates. Its times were those of the call
# in ONNX Runtime; ours are *cold*, CUDA events around one call after a flush
# of the L2 cache. Every row has been compared with float64 before it was
# timed.

sweep = asked.results()
one = sweep[sweep["dtype"] == sweep["dtype"].iloc[0]]
ways = ["ONNX Runtime", "eager", "torch.compile", "fusebook"]
squares = tables.where(one, variant=ways)
times = tables.times(squares, words=True)
table(times, "Cold time in microseconds", fold=False)

# %%
table(
    tables.speedup(squares, over="ONNX Runtime"),
    "Times as fast as the standard graph in ONNX Runtime",
    fold=False,
)

# %%
plots.bandwidth(tables.where(one, variant=ways), x="R", logx=True)

# %%
provenance(sweep)

# %%
downloads(sweep, "masked_scatter_nd")

# %%
# The Llama's table
# ~~~~~~~~~~~~~~~~~
#
# In float32 and in float16, with larger batches and a larger vocabulary.

llama = asked.results(config="llama", dtype="float32,float16")
forced = [f"fusebook {name}" for name in ("atomic", "sorted", "owner")]
table(
    tables.times(tables.where(llama, variant=[*ways, *forced]), words=True),
    "The gradient of an embedding: cold time in microseconds",
    fold=False,
)

# %%
# Without a mask
# ~~~~~~~~~~~~~~
#
# Without a mask it is the other operator, `scatter_nd_of_shape`, and here with
# indices of one, two and three components, which name the same kind of rows:
# an axis of 32000, or 8000 by 4, or 4000 by 4 by 2. Where there is more than
# one, a launch of its own folds them into one number.

unmasked = asked.results(
    SCATTER_ND_OF_SHAPE, config="components", dtype="float32"
)
table(
    tables.times(unmasked, words=True),
    "Without a mask, K components: cold time in microseconds",
    fold=False,
)

# %%
# How far from the roof?
# ----------------------
#
# The roof is the time to read n updates and to write R rows, at rates that
# were measured on the same machine. Small sizes are launches, not memory:
# there the floor counts.

shown = [*ways, "fusebook sorted"]
plots.dots(tables.where(pd.concat([one, llama]), variant=shown), of="roof")

# %%
table(tables.shares(llama), "Each way over the Llama's tables, cold")

# %%
# Contention
# ~~~~~~~~~~
#
# The same number of updates, but they meet: by Zipf's law, as tokens do, or
# all in one row. One row for all is the worst for atomics, which stand in
# line, and for an owner, which works alone while others watch. That is what
# the pieces are for.

contention = asked.results(config="contention", dtype="float32,float16")
table(
    tables.times(
        tables.where(contention, variant=[*ways, *forced]), words=True
    ),
    "Indices that meet: cold time in microseconds",
    fold=False,
)

# %%
# Where it says *wrong*, the score is above the limit: these sums were kept in
# float16, and a thousand additions have lost what they added. The time of a
# wrong answer is nobody's business, so it is not shown.

table(
    contention[contention["status"] == "wrong"][
        ["R", "variant", "dtype", "law", "note"]
    ].set_index(["R", "law", "dtype", "variant"]),
    "Refused for their error",
    fold=False,
)

# %%
# The gradient of an embedding
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The gradient of an embedding without masking is PyTorch's own business:
# `embedding_dense_backward` sorts, too.

embedding = asked.results(EMBEDDING_BACKWARD, config="llama", dtype="float32")
table(
    tables.times(embedding, words=True),
    "The gradient of an embedding, in PyTorch and here: cold, microseconds",
    fold=False,
)

# %%
# What the check costs
# ~~~~~~~~~~~~~~~~~~~~
#
# What the check costs is in the time of the call, since it waits: the device's
# own time hardly changes.

checked = tables.ratio(one, "fusebook, checked", "fusebook", kind="call")
claims(
    say(
        "With check=True a call takes {least:.1f} to {most:.1f} times as long "
        "as without.",
        least=checked.min(),
        most=checked.max(),
    ),
)

# %%
# Lessons
# -------
#
# What follows was decided by the numbers above, not by us. First the targets.


POINT = ["R", "D", "n", "law", "dtype"]


def at(df, kind="cold", **wanted):
    """Time over roof of one variant at one point."""
    rows = tables.where(df, status="ok", **wanted).set_index(POINT)
    return rows[f"{kind}_us"] / rows["roof_us"]


LLAMA = {"R": 32000, "D": 4096, "n": 2048, "law": "uniform"}
BIG = {"R": 8192, "D": 16384, "n": 16384, "law": "uniform"}
targets = asked.results(
    config="32000x4096x2048,8192x16384x16384,256x512x512,1024x2048x2048",
    dtype="float32,float16",
)
single = tables.where(targets, dtype="float32")
tiny = tables.where(single, R=[256, 1024])
launched = tables.where(tiny, variant="fusebook").set_index(POINT)
alike = tables.where(contention, dtype="float32", law=["equal", "zipf"])
fixed = tables.where(
    contention, dtype="float32", variant="fusebook sorted", R=32000
).set_index("law")["cold_us"]
both_clocks = pd.concat(
    [
        tables.ratio(tiny, "fusebook", "eager"),
        tables.ratio(tiny, "fusebook", "eager", "warm"),
    ]
)
deterministic = tables.where(
    pd.concat([sweep, llama, contention]),
    variant="fusebook sorted",
    status="ok",
)["deterministic"]
claims(
    claim(
        "8192 x 16384 and 16384 updates: at most 1.25 times the roof",
        at(single, variant="fusebook", **BIG) <= 1.25,
    ),
    claim(
        "256 x 512 and 1024 x 2048: below eager, cold and warm",
        both_clocks < 1,
    ),
    claim(
        "Never slower than PyTorch's own gradient of an embedding",
        tables.ratio(embedding, "fusebook", "torch") <= 1.02,
    ),
    claim(
        "Sorted, indices that meet cost at most twice their uniform time",
        fixed <= 2 * fixed["uniform"],
    ),
    claim(
        "Sorted, two runs give the same bits, at every point",
        deterministic == "yes",
    ),
    claim(
        "Never wrong, where sums in float16 are",
        tables.where(contention, variant="fusebook")["status"] == "ok",
    ),
)

# %%
# These were hoped for, too, and are shown as they came out:

claims(
    claim(
        "Llama, float32: at most 1.10 times the roof",
        at(single, variant="fusebook", **LLAMA) <= 1.10,
        fatal=False,
    ),
    claim(
        "the same bits in every run: at most 1.25 times",
        at(single, variant="fusebook sorted", **LLAMA) <= 1.25,
        fatal=False,
    ),
    claim(
        "Llama, float16: at most 1.15 times the roof",
        at(targets, variant="fusebook", dtype="float16", **LLAMA) <= 1.15,
        fatal=False,
    ),
    claim(
        "256 x 512 and 1024 x 2048: below torch.compile, cold",
        tables.ratio(tiny, "fusebook", "torch.compile") < 1,
        fatal=False,
    ),
    claim(
        "and warm",
        tables.ratio(tiny, "fusebook", "torch.compile", "warm") < 1,
        fatal=False,
    ),
    claim(
        "Warm, within 1.5 times the launch floor plus the roof",
        launched["warm_us"]
        <= 1.5 * (launched["floor_warm_us"] + launched["roof_us"]),
        fatal=False,
    ),
    claim(
        "Where indices meet, never slower than torch.compile",
        tables.ratio(alike, "fusebook", "torch.compile") <= 1.02,
        fatal=False,
    ),
    say(
        "On the Llama's table in float32 it takes {times:.2f} times the roof, "
        "which knows neither of launches nor of a sort, and in float16 "
        "{half:.2f} times: there is half as much to write, and the rest does "
        "not halve.",
        times=at(single, variant="fusebook", **LLAMA).iloc[0],
        half=at(targets, variant="fusebook", dtype="float16", **LLAMA).iloc[0],
    ),
)

# %%
# What the 7 to 50 times really measured
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Take the whole way from the standard graph in ONNX Runtime to our kernel
# apart. One part is leaving its ScatterND for PyTorch's chain, which has not
# fused anything. The other part, from the chain to one kernel, is fusion.

parts = pd.DataFrame(
    {
        "leaving ONNX Runtime's ScatterND": tables.ratio(
            one, "ONNX Runtime", "eager"
        ),
        "fusion": tables.ratio(one, "eager", "fusebook"),
        "both": tables.ratio(one, "ONNX Runtime", "fusebook"),
    }
)
table(parts, "Times as fast, by what was changed", fold=False)

# %%
whole_way = tables.ratio(llama, "ONNX Runtime", "fusebook").iloc[0]
left = tables.ratio(llama, "ONNX Runtime", "eager").iloc[0]
fused = tables.ratio(llama, "eager", "fusebook").iloc[0]
claims(
    say(
        "On the Llama's table our kernel is {both:.0f} times as fast as the "
        "standard graph. {left:.1f} of that come from leaving one "
        "implementation of ScatterND, without fusing anything, and "
        "{fused:.2f} from fusion. Traffic explains {predicted:.2f} of these; "
        "the other {rest:.2f} times are operators of the chain that move "
        "their bytes more slowly than ours does.",
        both=whole_way,
        left=left,
        fused=fused,
        predicted=predicted.iloc[1],
        rest=fused / predicted.iloc[1],
    ),
    claim(
        "Most of the way was a slow operator, not a missed fusion",
        left > fused,
    ),
)

# %%
# Where it does not win
# ~~~~~~~~~~~~~~~~~~~~~
#
# Every point at which some other way is faster by more than 2 %, cold, the
# worst first. In half precision ``torch.compile`` adds in float16, which is
# *wrong* in the table above where many indices meet; a kernel of ours never
# does.

everything = pd.concat([sweep, llama, contention, targets])
others = everything[~everything["variant"].str.startswith("fusebook ")]
table(
    tables.losses(others),
    "Points lost: the fastest other way, and how far behind we are",
    fold=False,
)

# %%
# By the caller's clock
# ~~~~~~~~~~~~~~~~~~~~~
#
# The device works while the host queues what comes next. So an eager program
# of many calls pays the larger of the two times for each, *paid*, and a short
# kernel is as fast as its launch.

callers = tables.alike(everything)
by_clock(callers)

# %%
table(tables.clocks(callers), "Every way by every clock, in microseconds")

# %%
table(tables.losses(callers, kind="paid"), "Points lost by an eager program")

# %%
table(tables.losses(callers, kind="call"), "Points lost by a call, waited for")

# %%
# What to take to the next kernel:
#
# - Before you fuse, ask what the unfused operators cost each by itself. A slow
#   one looks just like a missed fusion.
# - Turn a scatter into a gather where you can: who owns an output needs no
#   atomics, adds in the precision it likes, and writes once.
# - Test with indices that all agree. Uniform ones hide every race and every
#   queue.
# - A sum in half precision is wrong long before it looks wrong.
# - All programs of a kernel get the registers of its greediest branch. While
#   the sort compared in large tiles, fewer programs fitted on a
#   multiprocessor, and it was the zeros that were slow.
#
# Exercises
# ---------
#
# Each has a function that is wrong, and a check that says so. Mend it; run the
# page, or the notebook, again. The checks are those of the library, and need
# no GPU.
#
# 1. The mean
# ~~~~~~~~~~~
#
# Some losses want the mean of a row's updates in place of their sum, and zero
# where there are none. Do it in one kernel, without a second pass over memory:
# the owner knows how many it has added.


def scatter_mean(shape, indices, updates):
    return step_two(shape, indices, updates)


def mean_of_rows(shape, indices, updates):
    k = indices[:, 0]
    total = updates.new_zeros(shape).index_add_(0, k, updates)
    count = torch.bincount(k, minlength=shape[0]).clamp(min=1)
    return total / count[:, None].to(total.dtype)


def drawn(seed, R, D, n):
    """Indices without masks, and updates."""
    rng = generator(seed)
    k = torch.randint(R, (n, 1), generator=rng, device=rng.device)
    return (R, D), k, rough(rng, (n, D), torch.float32)


exercise(
    "scatter_mean divides by the number of updates of each row",
    scatter_mean,
    mean_of_rows,
    [drawn(4, 10, 33, 20), drawn(5, 3, 8, 60)],
)

# %%
# 2. The maximum
# ~~~~~~~~~~~~~~
#
# ONNX's ScatterND has a reduction ``max``: each row becomes the larger of what
# it was, here zero, and its updates.


def scatter_max(shape, indices, updates):
    return step_two(shape, indices, updates)


exercise(
    "scatter_max keeps the largest, and zero where all are below",
    scatter_max,
    lambda shape, indices, updates: updates.new_zeros(shape).scatter_reduce_(
        0, indices.expand_as(updates), updates, "amax"
    ),
    [drawn(6, 10, 33, 20), drawn(7, 5, 8, 4)],
)

# %%
# 3. Find the fault
# ~~~~~~~~~~~~~~~~~
#
# This owner is right on every index that counts from the front. ONNX lets them
# count from the end as well.


@triton.jit
def own_front(y_ptr, k_ptr, u_ptr, D, n, N: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    mine = tl.load(k_ptr + i, mask=i < n, other=-1) == r
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    at = tl.min(tl.where(mine, i, N), 0)
    while at < N:
        u_row = u_ptr + at.to(tl.int64) * D + columns
        total += tl.load(u_row, mask=columns < D, other=0.0)
        at = tl.min(tl.where(mine & (i > at), i, N), 0)
    tl.store(y_ptr + r * D + columns, total, mask=columns < D)


def from_both_ends(shape, indices, updates):
    y = updates.new_empty(shape)
    n, D = updates.shape
    block, N = triton.next_power_of_2(D), triton.next_power_of_2(n)
    own_front[shape[:1]](y, indices, updates, D, n, N=N, BLOCK=block)
    return y


def counted(seed, R, D, n):
    """Every other index counts from the end."""
    shape, k, u = drawn(seed, R, D, n)
    k[::2] -= R
    return shape, k, u


exercise(
    "from_both_ends finds rows by either of their names",
    from_both_ends,
    lambda shape, indices, updates: updates.new_zeros(shape).index_add_(
        0, indices[:, 0] % shape[0], updates
    ),
    [counted(8, 10, 33, 20), counted(9, 3, 8, 60)],
)

# %%
solution("solutions/plot_103_scatter_nd.py")
