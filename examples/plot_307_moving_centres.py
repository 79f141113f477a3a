"""
Moving the centres
==================

The second half of k-means moves each centre to the mean of its points. In
PyTorch, millions of additions meet in a few numbers and wait for each other.
We add in registers, in a fixed order, and in the pass that finds the labels.

You will learn

- what atomic additions cost when they meet,
- how to reduce a long list to a few sums, with the same bits in each run,
- how to put two passes over the same data into one.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_303_kmeans`. No GPU is
needed: without one, kernels run in Triton's interpreter, and times come from a
record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["k-means", "kmeans", "atomics", "reduction"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_307_moving_centres")
page.verdict()

# %%
# Why additions wait
# ------------------
#
# Each of N points has a label, the number of its centre. The mean of a label's
# points takes two sums: that of the points, and that of ones, their count.


def means_eager(points, labels, k):
    sums = points.new_zeros(k, 2).index_add_(0, labels.long(), points)
    ones = points.new_ones(len(points))  # in the box: a single 1, expanded
    counts = points.new_zeros(k).index_add_(0, labels.long(), ones)
    return sums / counts[:, None]  # NaN for a label without points


# %%
# The sums are 3k numbers. With k = 2 and 20 million points, ten million
# additions go to each. On a GPU these are :term:`atomic operations <atomic
# operation>`, and those that meet in one number are done one after another.

labels_of_eight = [0, 1, 1, 0, 1, 0, 0, 1]
caption = "An update is a point, and a row is a centre: four additions meet."
page.picture.owners(caption, labels_of_eight, rows=2)

# %%
# .. _centres-registers:
#
# Step 1: add in registers first {gain registers at N=20000000}
# -------------------------------------------------------------
#
# A program owns 1024 points. For each centre it adds up its own points in
# registers, and then adds the result to memory. With two centres these are six
# atomic additions for 1024 points, instead of three for each point. **We
# predict** a gain of hundreds, as there are 512 times fewer. ``tl.where``
# leaves out the points of other centres, and *relaxed* additions do not wait
# for other reads and writes.


@triton.jit
def add_up(sums_ptr, l_ptr, x_ptr, n, K: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    label = tl.load(l_ptr + i, mask=inside, other=0).to(tl.int32)  # read N
    x = tl.load(x_ptr + 2 * i, mask=inside, other=0.0)  # read N
    y = tl.load(x_ptr + 2 * i + 1, mask=inside, other=0.0)  # read N
    for j in tl.static_range(K):
        mine = inside & (label == j)
        sum_x = tl.sum(tl.where(mine, x, 0.0), 0).to(tl.float64)
        sum_y = tl.sum(tl.where(mine, y, 0.0), 0).to(tl.float64)
        count = tl.sum(mine.to(tl.float32), 0).to(tl.float64)
        tl.atomic_add(sums_ptr + 3 * j, sum_x, sem="relaxed")
        tl.atomic_add(sums_ptr + 3 * j + 1, sum_y, sem="relaxed")
        tl.atomic_add(sums_ptr + 3 * j + 2, count, sem="relaxed")


def means_registers(points, labels, k):
    n, sums = len(points), points.new_zeros(k, 3, dtype=torch.float64)
    add_up[(triton.cdiv(n, 1024),)](sums, labels, points, n, K=k, BLOCK=1024)
    return (sums[:, :2] / sums[:, 2:]).to(points.dtype)


points, labels, k = page.stress(3000, 2, 2)
page.check(means_registers, points, labels, k)

# %%
# Numbers in float32 have 24 bits, so a count stops at 16 million: adding one
# changes nothing any more. Over 1024 points float32 is enough, and sums of all
# programs are float64. The gain is below 512, since labels and points still
# have to be read, and some additions still meet.

# %%
# .. _centres-parts:
#
# Step 2: parts in a fixed order {gain parts at N=20000000}
# ---------------------------------------------------------
#
# Which program adds first differs from run to run, and so do the last bits.
# Now each program writes its sums, its *part*, to a place that no other
# program writes. A second kernel adds all parts of a centre, always in the
# same order. So **the same labels give the same bits.**

page.picture.partial_sums(3, 3, row="block", result="sums")

# %%


@triton.jit
def write_part(
    parts_ptr, l_ptr, x_ptr, n, K: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    label = tl.load(l_ptr + i, mask=inside, other=0).to(tl.int32)  # read N
    x = tl.load(x_ptr + 2 * i, mask=inside, other=0.0)  # read N
    y = tl.load(x_ptr + 2 * i + 1, mask=inside, other=0.0)  # read N
    for j in tl.static_range(K):
        mine = inside & (label == j)
        part_ptr = parts_ptr + (program * K + j) * 3
        tl.store(part_ptr, tl.sum(tl.where(mine, x, 0.0), 0))
        tl.store(part_ptr + 1, tl.sum(tl.where(mine, y, 0.0), 0))
        tl.store(part_ptr + 2, tl.sum(mine.to(tl.float32), 0))


@triton.jit
def add_parts(sums_ptr, parts_ptr, parts, K, BLOCK: tl.constexpr):
    j, at = tl.program_id(0), tl.program_id(1)  # centre; x, y or count
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        part_ptr = parts_ptr + (i * K + j) * 3 + at
        total += tl.load(part_ptr, mask=i < parts, other=0.0).to(tl.float64)
    tl.store(sums_ptr + 3 * j + at, tl.sum(total, 0))


def added(parts):
    """The sums of x, y and ones over all parts, [k, 3] in float64."""
    count, k, _ = parts.shape
    sums = parts.new_empty(k, 3, dtype=torch.float64)
    add_parts[(k, 3)](sums, parts, count, k, BLOCK=1024)
    return sums


def means_parts(points, labels, k):
    n = len(points)
    parts = points.new_empty(triton.cdiv(n, 1024), k, 3)
    write_part[(len(parts),)](parts, labels, points, n, K=k, BLOCK=1024)
    sums = added(parts)
    return (sums[:, :2] / sums[:, 2:]).to(points.dtype)


page.check(means_parts, points, labels, k)

# %%
# For many centres or coordinates, sums do not fit into registers. There the
# library sorts points by their labels first, unless points or centres are few.
# Each program then adds the same number of adjacent points, so a large cluster
# is the work of many programs.

page.source("kmeans_update", fold=True)

# %%
# .. _centres-one-pass:
#
# Step 3: in the same pass {gain one_pass at N=20000000}
# ------------------------------------------------------
#
# An iteration finds labels and then reads points and labels again. But the
# kernel of :doc:`plot_303_kmeans` has both in registers already. With a few
# more lines it writes its part as well. The baseline is two calls:


def iterate_two_calls(points, centres, label_dtype=torch.int64):
    labels = fusebook.kmeans_assign(points, centres, check=False)
    new = fusebook.kmeans_update(
        points, labels, len(centres), centres=centres, check=False
    )
    return labels.to(label_dtype), new


@triton.jit
def label_and_part(
    l_ptr, parts_ptr, x_ptr, c_ptr, n, K: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(x_ptr + 2 * i, mask=inside, other=0.0)  # read N
    y = tl.load(x_ptr + 2 * i + 1, mask=inside, other=0.0)  # read N
    best = tl.full([BLOCK], float("inf"), tl.float32)
    label = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range(K):  # as in the assignment
        dx, dy = x - tl.load(c_ptr + 2 * j), y - tl.load(c_ptr + 2 * j + 1)
        label = tl.where(dx * dx + dy * dy < best, j, label)
        best = tl.minimum(best, dx * dx + dy * dy)
    tl.store(l_ptr + i, label.to(l_ptr.dtype.element_ty), mask=inside)
    for j in tl.static_range(K):  # as in step 2
        mine = inside & (label == j)
        part_ptr = parts_ptr + (program * K + j) * 3
        tl.store(part_ptr, tl.sum(tl.where(mine, x, 0.0), 0))
        tl.store(part_ptr + 1, tl.sum(tl.where(mine, y, 0.0), 0))
        tl.store(part_ptr + 2, tl.sum(mine.to(tl.float32), 0))


def iterate_one_pass(points, centres, label_dtype=torch.int64):
    n, k = len(points), len(centres)
    labels = points.new_empty(n, dtype=label_dtype)
    parts = points.new_empty(triton.cdiv(n, 1024), k, 3)
    given = labels, parts, points, centres, n
    label_and_part[(len(parts),)](*given, K=k, BLOCK=1024)
    sums = added(parts)
    means = (sums[:, :2] / sums[:, 2:].clamp(min=1)).to(points.dtype)
    return labels, torch.where(sums[:, 2:] > 0, means, centres)


both = page.of("kmeans_step")
both.check(iterate_one_pass, *both.stress(3000, 2, 3))

# %%
# Is it correct?
# --------------
#
# Sums need a wider dtype than points. This code adds in the dtype of the
# points. In float16 a count stops at 2048, and a sum above 65504 is infinite:


def in_their_dtype(points, labels, k):
    return means_eager(points, labels, k)


few = page.stress(200, 2, 2, dtype=torch.float16)
many = page.stress(6000, 2, 2, dtype=torch.float16)
page.catches(in_their_dtype, few=few, many=many)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). The implementation *sorted* adds as PyTorch's gradient of an
# embedding does: it sorts first. The one named *product* is a matmul with a k
# x N matrix of zeros and ones. In *blobs*, all clusters have about the same
# number of points. In *skewed*, nine of ten points are in one cluster.

page.plot("roof", over="sizes and labels")

# %%
# The table shows microseconds for 20 million points, two centres and int64
# labels. Two calls, step 3 and ``fusebook.kmeans_step`` also find the labels.

steps = {"registers": means_registers, "parts": means_parts}
iterations = {"two_calls": iterate_two_calls, "one_pass": iterate_one_pass}
page.steps(eager=means_eager, **steps, **iterations)

# %%
page.findings()

# %%
# .. _centres-use:
#
# When to use it
# --------------
#
# Use it for millions of points. With few points and very many centres,
# additions hardly meet, and ``index_add_`` is faster, but has another order in
# each run. ``fusebook.kmeans`` iterates with step 3 by itself.

centres = fusebook.kmeans_update(points, labels, 2)

# %%
# - **Checks.** ``check=True``, the default, raises an error for a label that
#   is out of range. It waits for the GPU. With ``check=False`` such points are
#   left out.
# - **Memory.** It allocates a part for each program. Where it sorts, it also
#   allocates the labels and an order of all points.
# - **Empty clusters.** With ``centres=`` they keep their centre. Without it,
#   their mean is NaN.

page.use()

# %%
# Takeaways
# ---------
#
# - Atomic additions are cheap until they meet. Add in registers first.
# - Parts in a fixed order give the same bits, and take one more small kernel.
# - Sums need a wider dtype than what is added.
# - If two kernels read the same data, let the first one do both.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it names a wrong element of
# its result. Fix it and run the cell again. No GPU is needed.
#
# 1. No points
# ~~~~~~~~~~~~
#
# This update divides by zero where a cluster has lost all its points. Let such
# a centre keep its place.


def moved(points, labels, centres):
    return means_parts(points, labels, len(centres))


def moved_or_kept(points, labels, centres):
    found = [points[labels == j].mean(0) for j in range(len(centres))]
    pairs = zip(found, centres, strict=True)
    return torch.stack([c if m.isnan().any() else m for m, c in pairs])


some, own, _ = page.stress(50, 2, 4, seed=8)
page.exercise(
    moved, moved_or_kept, [(some, own, some[:4]), (some, own % 2, some[:4])]
)

# %%
# 2. Two halves
# ~~~~~~~~~~~~~
#
# Two GPUs have a half of the points each, with means and counts of their own.
# The mean of two means is not the mean of all points.


def merged(means, counts, others, other_counts):
    return (means + others) / 2


def merged_by_sums(means, counts, others, other_counts):
    sums = means * counts[:, None] + others * other_counts[:, None]
    return sums / (counts + other_counts)[:, None]


one, two = torch.tensor([3.0, 900.0]), torch.tensor([5.0, 100.0])
given = some[:2].cpu(), one, some[2:4].cpu(), two
page.exercise(merged, merged_by_sums, [given])

# %%
# 3. Weights
# ~~~~~~~~~~
#
# A point may count more than once. Write the weighted mean: copy
# ``write_part`` with one more pointer, or weigh in PyTorch before and after.


def weighted(points, labels, weights, k):
    return means_parts(points * weights[:, None], labels, k)


def weighted_by_loop(points, labels, weights, k):
    found = []
    for j in range(k):
        w = weights * (labels == j)
        found.append((points * w[:, None]).sum(0) / w.sum())
    return torch.stack(found)


weights = torch.linspace(0.5, 3.0, 50, device=some.device)
page.exercise(weighted, weighted_by_loop, [(some, own % 2, weights, 2)])

# %%
# Evidence
# --------

page.footer()
