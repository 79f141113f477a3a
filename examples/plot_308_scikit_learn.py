"""
K-means against scikit-learn
============================

K-means alternates between two half-steps until its centres are at rest. We
write an iteration as two Triton kernels and run it to its end. Then we compare
whole runs with scikit-learn, from the same start to the same sum of squared
distances.

You will learn

- how to add in a fixed order, so that centres come to rest exactly,
- how to let the GPU run ahead instead of asking after each iteration,
- how to compare whole algorithms fairly.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_303_kmeans`. No GPU is
needed: without one, kernels run in Triton's interpreter, and times come from a
record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["k-means", "kmeans", "scikit-learn"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_308_scikit_learn")
page.verdict()

# %%
# The loop in eager PyTorch
# -------------------------
#
# An iteration labels each of N points with its nearest centre, and moves each
# centre to the mean of its points. A centre without points keeps its place.


def iterate_eager(points, centres):
    labels = (points - centres[:, None]).square().sum(2).argmin(0)
    sums = torch.zeros_like(centres).index_add_(0, labels, points)
    counts = torch.bincount(labels, minlength=len(centres))[:, None]
    return torch.where(counts > 0, sums / counts.clamp(min=1), centres)


def kmeans_eager(points, centres):
    while True:
        old, centres = centres, iterate_eager(points, centres)
        if (centres - old).square().sum() <= 1e-10:  # == 0 might never come
            return centres


# %%
# On a GPU ``index_add_`` adds with :term:`atomic operations <atomic
# operation>`, in any order. Operations on one address wait for each other
# (:doc:`plot_307_moving_centres`). So **we predict** a large gain for sums in
# registers. In another order, the same labels also give other last bits. The
# loop therefore needs a tolerance, and none is correct for all data.
#
# .. _kmeans-loop:
#
# Step 1: sums in a fixed order {gain loop at N=2000000}
# ------------------------------------------------------
#
# A program owns 1024 points. It labels them in registers, and adds up its own
# points of each centre: a *part* of x, y and a count. A second kernel adds the
# parts of all programs, always in one order. So the same labels give the same
# bits, and **centres at rest are exactly at rest.**


@triton.jit
def sum_by_label(
    l_ptr, parts_ptr, x_ptr, c_ptr, n, K: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(x_ptr + 2 * i, mask=inside, other=0.0)  # read N
    y = tl.load(x_ptr + 2 * i + 1, mask=inside, other=0.0)  # read N
    best = tl.full([BLOCK], float("inf"), tl.float32)
    label = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range(K):
        dx, dy = x - tl.load(c_ptr + 2 * j), y - tl.load(c_ptr + 2 * j + 1)
        distance = dx * dx + dy * dy
        label = tl.where(distance < best, j, label)
        best = tl.minimum(best, distance)
    tl.store(l_ptr + i, label.to(l_ptr.dtype.element_ty), mask=inside)
    for j in tl.static_range(K):
        mine = inside & (label == j)
        part_ptr = parts_ptr + (program * K + j) * 3
        tl.store(part_ptr, tl.sum(tl.where(mine, x, 0.0), 0))
        tl.store(part_ptr + 1, tl.sum(tl.where(mine, y, 0.0), 0))
        tl.store(part_ptr + 2, tl.sum(mine.to(tl.float32), 0))


@triton.jit
def move(new_ptr, parts_ptr, c_ptr, parts, K, BLOCK: tl.constexpr):
    j = tl.program_id(0)  # a program for each centre
    at = tl.arange(0, 4)  # x, y, the count, and a column of padding
    total = tl.zeros([BLOCK, 4], tl.float64)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        part_ptr = parts_ptr + (i[:, None] * K + j) * 3 + at[None, :]
        inside = (i < parts)[:, None] & (at < 3)[None, :]
        total += tl.load(part_ptr, mask=inside, other=0.0).to(tl.float64)
    sums = tl.sum(total, 0)
    count = tl.sum(tl.where(at == 2, sums, 0.0), 0)
    old = tl.load(c_ptr + 2 * j + at, mask=at < 2, other=0.0)
    new = tl.where(count > 0, sums / tl.maximum(count, 1.0), old)
    tl.store(new_ptr + 2 * j + at, new, mask=at < 2)


def iterate(points, centres, label_dtype=torch.uint8):
    n, k = len(points), len(centres)
    labels = points.new_empty(n, dtype=label_dtype)
    programs, new = triton.cdiv(n, 1024), torch.empty_like(centres)
    parts = points.new_empty(programs, k, 3)
    given = labels, parts, points, centres, n
    sum_by_label[(programs,)](*given, K=k, BLOCK=1024)
    move[(k,)](new, parts, centres, programs, k, BLOCK=256)
    return labels, new


def kmeans_loop(points, centres):
    while True:
        old, (_, centres) = centres, iterate(points, centres)
        if torch.equal(centres, old):  # waits for the GPU
            return centres


points, centres, dtype = page.stress(3000, 2, 3)
page.check(iterate, points, centres, dtype)

# %%
# A part is float32, since a sum of 1024 numbers loses few digits. The sums
# over all programs are float64.

# %%
# .. _kmeans-ahead:
#
# Step 2: run ahead {gain ahead at N=2000000}
# -------------------------------------------
#
# ``torch.equal`` waits for the GPU. The GPU then waits for Python, which
# launches the next two kernels only after the answer:

asking = {
    "CPU": [(0, 1, "launch"), (1, 3, "waits"), (3, 4, "launch")],
    "GPU": [(0, 1, "waits"), (1, 3, "iterates"), (3, 4, "waits")],
}
page.picture.lanes("Step 1: CPU and GPU take turns.", asking)

# %%
# But centres at rest stay at rest, so an iteration too many changes nothing.
# The loop can queue eight iterations and ask once. At most seven are wasted.


def kmeans_ahead(points, centres):
    while True:
        for _ in range(8):
            old, (_, centres) = centres, iterate(points, centres)
        if torch.equal(centres, old):
            return centres


found = fusebook.kmeans(points, 3, init=points[:3], tol=0)
torch.testing.assert_close(kmeans_ahead(points, points[:3]), found.centres)

# %%
# The library ends with the same centres. It asks after each iteration, as its
# callers may give a tolerance. Its kernel is that of :doc:`plot_303_kmeans`,
# with sums:

page.source("kmeans", fold=True)

# %%
# This is what it found. Each colour is a cluster:

page.clusters(points, found.labels, found.centres)

# %%
# Is it correct?
# --------------
#
# A run from good first centres hides what a bad start shows. This iteration
# forgets the centre that has lost all its points:


def careless(points, centres, label_dtype):
    labels, _ = iterate(points, centres, label_dtype)
    sums = torch.zeros_like(centres).index_add_(0, labels.long(), points)
    counts = torch.bincount(labels.long(), minlength=len(centres))
    return labels, sums / counts[:, None]


lost = torch.cat([centres[:2], centres[2:] + 1000])
page.catches(
    careless, blobs=(points, centres, dtype), lost=(points, lost, dtype)
)

# %%
# Labels can be compared with those of another program only while both take the
# same path. The last bit decides on a point halfway between two centres, and
# then the paths may part. What we compare is the *inertia*, the sum of all
# squared distances: here both agree to five digits.
#
# How fast is it?
# ---------------
#
# A fair comparison has the same data, the same start and the same end. Here
# these are float32, the first k points, and a tolerance of zero. The library
# scikit-learn runs on the CPU, with all of its cores:


def by_scikit_learn(points, first):
    from sklearn.cluster import KMeans

    made = KMeans(len(first), init=first, n_init=1, tol=0, algorithm="lloyd")
    return made.fit(points)


# %%
# *Latency* is the time until the result is there. *torch.compile in a graph*
# is the eager iteration, compiled, captured in a :term:`CUDA graph` and
# replayed as often as the library iterates.

page.findings()

# %%
# With 16 coordinates some of the first centres are in one cluster, and the
# paths part. So compare the time of an iteration as well as that of a run. In
# the table, the library also checks the points, and finds labels and inertia.
# It was timed in another process than the box.

loops = {"loop": kmeans_loop, "ahead": kmeans_ahead}
page.steps(eager=kmeans_eager, **loops)

# %%
# .. _kmeans-whole-use:
#
# When to use it
# --------------
#
# Use it for this algorithm, Lloyd's, on points of a GPU. NumPy's arrays are
# copied there, and the copies take longer than a few iterations in the plane.
# It is not for mini-batches, sample weights or sparse data. With many
# coordinates, compare it with a loop of torch.compile in a CUDA graph, as the
# table below does.

found = fusebook.kmeans(points, 3, init="k-means++", seed=0)
centres, labels = found.centres, found.labels

# %%
# - **Memory.** In the plane it allocates a label for each point, and the parts
#   of its programs. It holds no distances.
# - **Checks.** It reads the points once and raises an error if one is not
#   finite. Only whole calls are checked, not each iteration.
# - **Reproducible.** The same seed gives the same bits in each run.

page.use()

# %%
# Takeaways
# ---------
#
# - A fixed order of additions makes an iteration reproducible. Then its end is
#   exact, and needs no tolerance.
# - Where the end is a fixed point, the GPU may run ahead.
# - Compare whole algorithms by what they minimise, from one start. Report the
#   iterations with the time.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it names a wrong element of
# its result. Fix it and run the cell again. No GPU is needed.
#
# 1. Inertia
# ~~~~~~~~~~
#
# Return the sum of squared distances to the nearest centre. This sum grows
# with the number of centres.


def inertia(points, centres):
    return (points - centres[:, None]).square().sum()


def inertia_by_labels(points, centres):
    labels = (points - centres[:, None]).square().sum(2).argmin(0)
    return (points - centres[labels]).square().sum()


some = page.stress(200, 2, 3)[:2], page.stress(90, 2, 5, seed=1)[:2]
page.exercise(inertia, inertia_by_labels, some)

# %%
# 2. A better start
# ~~~~~~~~~~~~~~~~~
#
# *k-means++* draws the next centre among the points. The probability of a
# point is proportional to its squared distance from the nearest centre so far.
# These probabilities use the distance itself.


def chances(points, centres):
    distance = (points - centres[:, None]).norm(dim=2).amin(0)
    return distance / distance.sum()


def chances_by_squares(points, centres):
    square = (points - centres[:, None]).square().sum(2).amin(0)
    return square / square.sum()


page.exercise(chances, chances_by_squares, some)

# %%
# 3. Far from home
# ~~~~~~~~~~~~~~~~
#
# A tolerance must not depend on where the points are, nor on their unit.
# scikit-learn multiplies ``tol`` with the mean variance of a coordinate. This
# function takes the variance of all numbers together.


def threshold(points, tol):
    return tol * points.var(correction=0)


def threshold_by_coordinates(points, tol):
    return tol * points.var(0, correction=0).mean()


far = some[0][0] + torch.tensor([0.0, 100.0], device=points.device)
page.exercise(threshold, threshold_by_coordinates, [(far, 0.01)])

# %%
# Evidence
# --------

page.footer()
