"""
A TF32 filter with an error bound
=================================

Tensor cores are fastest where they are least precise. We use them for an exact
result: a matmul in TF32, which is float32 with fewer bits, decides most
points. It marks those that it cannot decide, and a second kernel computes only
these in float64.

You will learn

- how to find nearest centres by a matmul that is never written to memory,
- how to bound the error of a matmul in TF32,
- how to pass an undecided rest from one kernel to the next.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_303_kmeans`. No GPU is
needed: without one, kernels run in Triton's interpreter, and times come from a
record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["k-means", "kmeans", "TF32", "mixed precision"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_306_tf32_filter")
page.verdict()

# %%
# Distances by a matmul
# ---------------------
#
# Which of k centres is nearest to each of N points? With d coordinates there
# are N k differences of vectors, which do not fit into registers. But
#
# .. math:: |x - c|^2 = |x|^2 - 2\, x \cdot c + |c|^2
#
# contains a matmul, and :math:`|x|^2` is the same for all centres. So
# ``torch.cdist`` computes a matmul too, for more than 25 points or centres:


def nearest_cdist(points, centres, label_dtype=torch.int64):
    distance = torch.cdist(points, centres)  # read Nd, write Nk
    return distance.argmin(1).to(label_dtype)  # read Nk, write N


# %%
# The N k distances are written and read again. With d = 64 and k = 256, that
# makes nine times the bytes of one kernel, so **we predict** a gain of nine
# where memory is the limit.
#
# Far from the origin, the formula subtracts large numbers that are almost
# equal. Float32 loses most digits there, and the same code finds wrong
# centres:

points, centres, dtype = given = page.stress(150, 20, 70)
middle = centres.mean(0)
near = points - middle, centres - middle, dtype
far = points + 1000, centres + 1000, dtype
page.catches(nearest_cdist, near=near, far=far)

# %%
# .. _filter-float64:
#
# Step 1: a matmul in float64 {gain float64 at N=1000000}
# -------------------------------------------------------
#
# :term:`Tensor cores <tensor core>` of data centre GPUs multiply float64, too.
# A program keeps 64 points in registers. It multiplies them with one tile of
# centres after another, and keeps three numbers of each point: the nearest
# centre, its distance, and the second least distance. Only labels are written.


@triton.jit
def two_nearest(
    x_ptr, c_ptr, squares_ptr, i, live, K, D, FLOAT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The nearest centre, how much nearer than the second, and |x|^2."""
    HOW: tl.constexpr = "tf32" if FLOAT == tl.float32 else "ieee"
    j, a = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    here, inside = live[:, None] & (a < D)[None, :], (a < D)[:, None]
    x = tl.load(x_ptr + i[:, None] * D + a[None, :], mask=here, other=0.0)
    best = tl.full([BLOCK], float("inf"), FLOAT)
    second, label = best, tl.zeros([BLOCK], tl.int32)
    for start in range(0, K, BLOCK_K):
        known = start + j < K
        at = c_ptr + (start + j)[None, :] * D + a[:, None]
        c = tl.load(at, mask=known[None, :] & inside, other=0.0)
        square = tl.load(
            squares_ptr + start + j, mask=known, other=float("inf")
        )
        xc = tl.dot(
            x.to(FLOAT), c.to(FLOAT), input_precision=HOW, out_dtype=FLOAT
        )
        distance = square.to(FLOAT)[None, :] - 2 * xc  # less |x|^2
        least, place = tl.min(distance, 1), tl.argmin(distance, 1)
        others = tl.where(j[None, :] == place[:, None], float("inf"), distance)
        after = tl.minimum(tl.min(others, 1), tl.maximum(best, least))
        second = tl.minimum(second, after)
        label = tl.where(least < best, start + place, label)
        best = tl.minimum(best, least)
    return label, second - best, tl.sum(x * x, 1)


@triton.jit
def in_float64(
    l_ptr, list_ptr, count_ptr, x_ptr, c_ptr, squares_ptr, n, K, D,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    if list_ptr is not None:  # of undecided points, for step 2
        live = i < tl.load(count_ptr)
        i = tl.load(list_ptr + i, mask=live, other=0).to(tl.int64)
    if tl.max(live.to(tl.int32), 0) > 0:
        label, _, _ = two_nearest(
            x_ptr, c_ptr, squares_ptr, i, live, K, D, tl.float64,
            BLOCK, BLOCK_K, BLOCK_D,
        )  # fmt: skip
        tl.store(l_ptr + i, label.to(l_ptr.dtype.element_ty), mask=live)


def by_products(points, centres, label_dtype=torch.int64, count=None):
    (n, d), k = points.shape, len(centres)
    labels = points.new_empty(n, dtype=label_dtype)
    squares = centres.double().square().sum(1)
    given = points, centres, squares
    tiles = {"BLOCK": 64, "BLOCK_K": 64, "num_warps": 8}
    tiles["BLOCK_D"] = max(16, triton.next_power_of_2(d))
    grid, listed = (triton.cdiv(n, 64),), None
    if count is not None:  # step 2
        listed = points.new_empty(n, dtype=torch.int32)
        screened[grid](
            labels, listed, count, *given, squares.max(), n, k, d, **tiles
        )
    in_float64[grid](labels, listed, count, *given, n, k, d, **tiles)
    return labels


def nearest_float64(points, centres, label_dtype=torch.int64):
    return by_products(points, centres, label_dtype)


page.check(nearest_float64, *far)

# %%
# Float64 has enough digits, even far from the origin. Points are converted in
# registers, so the kernel reads no more than in float32. But the rate of
# float64 is the lowest that tensor cores have. So arithmetic is the limit now,
# and the gain is less than bytes predict.

# %%
# .. _filter-tf32:
#
# Step 2: TF32 decides most points {gain filtered at N=1000000}
# -------------------------------------------------------------
#
# :term:`TF32` keeps eleven bits of each factor. A factor that is cut there is
# wrong by one part in :math:`2^{10}` at most. With two such factors,
# :math:`2\, x \cdot c` is wrong by little more than :math:`4 \cdot 2^{-10} |x|
# |c|`. Suppose that the two least distances differ by more than the errors of
# both. Then exact distances have the same order, and **the label is certain**.
# TF32 multiplies several times faster than float64. But both steps search N k
# distances for the two least, and step 2 computes some points twice. So **we
# predict a gain** of less than the ratio of the rates.
#
# Undecided points are in a band between two centres:

plane, two, _ = page.stress(200, 2, 2, seed=3)
page.picture.band(plane.tolist(), two.tolist(), error=0.4)

# %%
# The kernel puts the numbers of undecided points on a list. A program adds how
# many it has to a counter in memory. What the counter was before is the
# program's place on the list:


@triton.jit
def screened(
    l_ptr, list_ptr, count_ptr, x_ptr, c_ptr, squares_ptr, far_ptr, n, K, D,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    label, apart, square = two_nearest(
        x_ptr, c_ptr, squares_ptr, i, i < n, K, D, tl.float32,
        BLOCK, BLOCK_K, BLOCK_D,
    )  # fmt: skip
    tl.store(l_ptr + i, label.to(l_ptr.dtype.element_ty), mask=i < n)
    far = tl.load(far_ptr).to(tl.float32)  # the largest |c|^2
    # What both may be wrong by, and a little for sums in float32.
    error = 1.05 * 2.0**-7 * tl.sqrt(square * far) + 2.0**-18 * far
    doubt = ((i < n) & (apart <= error)).to(tl.int32)
    many = tl.sum(doubt, 0).to(count_ptr.dtype.element_ty)
    place = tl.atomic_add(count_ptr, many).to(tl.int32)
    place += tl.cumsum(doubt, 0) - doubt
    listed = i.to(list_ptr.dtype.element_ty)
    tl.store(list_ptr + place, listed, mask=doubt != 0)


def nearest_filtered(points, centres, label_dtype=torch.int64, count=None):
    if count is None:
        count = points.new_zeros(1, dtype=torch.int32)
    return by_products(points, centres, label_dtype, count)


page.check(nearest_filtered, *near)

# %%
# Only the GPU knows how long the list is. So the second launch has a program
# for every 64 points, and most of them find no work and return.
#
# The library halves the error, as it rounds factors instead of cutting them.
# And it subtracts the mean of the centres from all points and centres, which
# changes no distance and makes :math:`|x|` and :math:`|c|` small:

page.source("kmeans_assign", fold=True)

# %%
# Is it correct?
# --------------
#
# Test a bound with the worst data. These points are halfway between two
# centres, and one bit decides. A guess of the error, such as a few times its
# mean, would pass on all other data:

halfway = torch.nextafter(centres[:-1] / 2 + centres[1:] / 2, centres[1:])
page.check(nearest_filtered, halfway, centres, dtype)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). The points have no clusters, so many of them are undecided. The
# row *compiled matmul* is the formula above in one line of PyTorch, by
# ``torch.compile``. The box calls it *torch.compile, product*. It writes N k
# distances and reads them again.

steps = {"float64": nearest_float64, "filtered": nearest_filtered}
page.steps(cdist=nearest_cdist, **steps)

# %%
page.findings()

# %%
# .. _filter-use:
#
# When to use it
# --------------
#
# Use it for many points, and for more coordinates than fit into registers. The
# library chooses among differences, a matmul in float64 and the filter, by a
# table of sizes. If all points are far from the mean of the centres, the
# filter decides few of them. Then it costs more time than it saves.

labels = fusebook.kmeans_assign(points, centres)

# %%
# - **Checks.** ``check=True``, the default, raises an error for points that
#   are not finite or too large to square. It reads them first and waits for
#   the GPU.
# - **Memory.** It allocates the labels and a list of undecided points, and no
#   distances.
# - **TF32.** ``torch.backends.cuda.matmul.allow_tf32`` changes nothing here.

page.use()

# %%
# Takeaways
# ---------
#
# - A fast, imprecise answer with a bound says which answers to compute again.
# - Derive the bound. What looks safe on random data fails on the worst.
# - A matmul that only feeds a minimum need not be written to memory.
# - Subtract what all data have in common before you multiply.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it names a wrong element of
# its result. Fix it and run the cell again. No GPU is needed.
#
# 1. Far from home
# ~~~~~~~~~~~~~~~~
#
# The usual formula is correct near the origin and incorrect a thousand away.
# One line fixes it.


def far_product(points, centres):
    return (centres.square().sum(1) - 2 * points @ centres.T).argmin(1)


def by_differences(points, centres):
    return (points - centres[:, None]).square().sum(2).argmin(0)


page.exercise(far_product, by_differences, [near[:2], far[:2]])

# %%
# 2. Rounded, not cut
# ~~~~~~~~~~~~~~~~~~~
#
# TF32 has 10 bits after the leading one, and float32 has 23. This function
# cuts the others. Round to the nearest instead, which halves the error.


def as_tf32(x):
    return (x.view(torch.int32) & -(2**13)).view(torch.float32)


def as_tf32_by_torch(x):
    exponent = torch.frexp(x)[1]
    unit = torch.ldexp(torch.ones_like(x), exponent - 11)
    return (x / unit).round() * unit


page.exercise(as_tf32, as_tf32_by_torch, [(points,), (centres,)])

# %%
# 3. Who is undecided?
# ~~~~~~~~~~~~~~~~~~~~
#
# Return for each point whether its two smallest squared distances differ by at
# most an error. This function compares the smallest with the error.


def undecided(points, centres, error):
    square = (points - centres[:, None]).square().sum(2)
    return (square.amin(0) <= error).float()


def undecided_by_sorting(points, centres, error):
    square = (points - centres[:, None]).square().sum(2).sort(0).values
    return (square[1] - square[0] <= error).to(points.dtype)


page.exercise(undecided, undecided_by_sorting, [(points, centres, 20.0)])

# %%
# Evidence
# --------

page.footer()
