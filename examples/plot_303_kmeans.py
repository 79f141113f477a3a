"""
K-means assignment: the nearest centre
======================================

K-means asks one question again and again: which centre is nearest to each
point? Eager PyTorch needs three kernels and a large intermediate. We write one
Triton kernel, in two steps, and see what a load and a label cost.

You will learn

- how to predict a speedup by counting bytes,
- how to load points whose coordinates are adjacent, 16 bytes for each thread,
- why the dtype of a result may cost more than its arithmetic.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_101_elementwise`. No GPU
is needed: without one, kernels run in Triton's interpreter, and times come
from a record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["k-means", "kmeans", "argmin"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_303_kmeans")
page.verdict()

# %%
# Why three kernels are slow
# --------------------------
#
# There are N points :math:`x_i` and k centres :math:`c_j`. The *label* of a
# point is the number of its nearest centre:
#
# .. math:: \ell_i = \arg\min_j |x_i - c_j|
#
# On this page points have two coordinates in float32, and there are two
# centres. Comments count words of four bytes:


def nearest_eager(points, centres, label_dtype=torch.int64):
    difference = points - centres[:, None]  # read 2N, write 4N
    distance = torch.linalg.vector_norm(difference, dim=2)  # read 4N, write 2N
    return distance.argmin(0).to(label_dtype)  # read 2N, write 2N


chain = [("subtract", 2, 4), ("norm", 4, 2), ("argmin", 2, 2)]
moved = {"eager": chain, "fused": [("one kernel", 2, 2)]}
page.picture.segments("Words of four bytes, labels in int64", moved, "N")

# %%
# One kernel reads each point once and writes a label. **We predict that it is
# four times as fast.** A label in int64 takes as many bytes as a point.

# %%
# .. _kmeans-one-pass:
#
# Step 1: one pass over the points {gain one_pass at N=20000000}
# --------------------------------------------------------------
#
# A program owns BLOCK points and keeps them in registers, with both distances.
# Nothing but labels is written. The nearer centre has the smaller *squared*
# distance, so the kernel takes no square roots.


@triton.jit
def nearest_of_two(l_ptr, x_ptr, c_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(x_ptr + 2 * i, mask=inside)  # read N: every second word
    y = tl.load(x_ptr + 2 * i + 1, mask=inside)  # read N: the other words
    dx0, dy0 = x - tl.load(c_ptr), y - tl.load(c_ptr + 1)
    dx1, dy1 = x - tl.load(c_ptr + 2), y - tl.load(c_ptr + 3)
    label = dx1 * dx1 + dy1 * dy1 < dx0 * dx0 + dy0 * dy0
    tl.store(l_ptr + i, label.to(l_ptr.dtype.element_ty), mask=inside)


def nearest_one_pass(points, centres, label_dtype=torch.int64):
    labels = points.new_empty(len(points), dtype=label_dtype)
    grid = (triton.cdiv(len(points), 1024),)
    nearest_of_two[grid](labels, points, centres, len(points), BLOCK=1024)
    return labels


given = page.stress(3000, 2, 2)  # points, centres and the dtype of labels
page.check(nearest_one_pass, *given)

# %%
# Where two centres are equally near, both labels are correct. So the check
# compares distances: that to the centre of the label, and the smallest one.
# With ``<`` the kernel takes the lower number then, as ``argmin`` does.

# %%
# .. _kmeans-pairs:
#
# Step 2: both coordinates in one load {gain pairs at N=20000000, uint8}
# ----------------------------------------------------------------------
#
# In memory, the two coordinates of a point are adjacent. Step 1 loads every
# second word, twice, so a load of a :term:`warp` fetches twice the bytes that
# it uses. But a thread can load 16 bytes at once, two whole points:

page.picture.coordinates(points=4)

# %%
# ``tl.split`` then separates x from y in registers. The mask matters as well.
# If a mask may end anywhere, the compiler loads one word at a time. So only
# the last program has a mask.


@triton.jit
def pairs_of_two(l_ptr, x_ptr, c_ptr, n, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    at = tl.arange(0, 2 * BLOCK)
    if first + BLOCK <= n:
        pairs = tl.load(x_ptr + 2 * first + at)  # read 2N
    else:
        pairs = tl.load(x_ptr + 2 * first + at, mask=at < 2 * (n - first))
    x, y = tl.split(tl.reshape(pairs, [BLOCK, 2]))
    dx0, dy0 = x - tl.load(c_ptr), y - tl.load(c_ptr + 1)
    dx1, dy1 = x - tl.load(c_ptr + 2), y - tl.load(c_ptr + 3)
    label = (dx1 * dx1 + dy1 * dy1 < dx0 * dx0 + dy0 * dy0).to(
        l_ptr.dtype.element_ty
    )
    if first + BLOCK <= n:
        tl.store(l_ptr + first + i, label)
    else:
        tl.store(l_ptr + first + i, label, mask=i < n - first)


def nearest_pairs(points, centres, label_dtype=torch.int64):
    labels = points.new_empty(len(points), dtype=label_dtype)
    grid = (triton.cdiv(len(points), 256),)
    pairs_of_two[grid](labels, points, centres, len(points), BLOCK=256)
    return labels


page.check(nearest_pairs, *given)

# %%
# The gain above is with labels of one byte, ``uint8``, which is enough for 256
# centres. With wider labels, memory is busy in step 1 already, as the table
# below shows. **The narrow label itself saves most**: a point and its label
# have 9 bytes instead of 16.
#
# With ``uint8``, the compiled code of step 1 gives each thread eight adjacent
# points, and with ``int32`` four. So neighbouring threads load from places 64
# bytes apart instead of 32, and step 1 is slower.
#
# The library's kernel takes up to eight coordinates and any number of centres.
# It has one load for 2, 4 or 8 coordinates:

page.source("kmeans_assign", fold=True)

# %%
# Many coordinates do not fit into registers, and distances become a matmul.
# Its rounding may decide between two centres that are almost equally near. For
# such points, the library computes the distances to all centres again, from
# differences.
#
# Is it correct?
# --------------
#
# Test with data that has no symmetry, since a symmetry can hide a mistake.
# This code exchanges x and y of the points, as a wrong ``tl.split`` would. If
# all centres have x = y, no label changes:


def exchanged(points, centres, label_dtype):
    return nearest_eager(points.flip(1), centres, label_dtype)


points, centres, dtype = given
diagonal = points, centres[:, :1].expand(2, 2).contiguous(), dtype
page.catches(exchanged, diagonal=diagonal, any_centres=given)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). The *roofline* is the time that memory needs for the bytes of
# one pass, at the bandwidth of measured copies and reads. A kernel can be
# slightly faster than these. All problems have 20 million points, and the rows
# differ in the dtype of the labels. ``torch.cdist`` writes all distances.

page.plot("roof", over="labels")

# %%
# The table shows microseconds by the dtype of the labels.

steps = {"one_pass": nearest_one_pass, "pairs": nearest_pairs}
page.steps(eager=nearest_eager, **steps)

# %%
page.findings()

# %%
# The gain exceeds the prediction because eager kernels do not reach the
# bandwidth of memory. PyTorch's reductions are made for long rows, and here
# they reduce two elements. Narrow labels also gain more than predicted: what
# is left is mostly reads, and memory reads faster than it copies.
# ``torch.compile`` writes step 1 by itself. It cannot know how narrow a label
# may be.
#
# .. _kmeans-use:
#
# When to use it
# --------------
#
# Use it where points stay on the GPU, and for many centres or coordinates
# (:doc:`plot_306_tf32_filter`). For two coordinates and int64 labels,
# ``torch.compile`` is as fast or almost.

labels = fusebook.kmeans_assign(points, centres, label_dtype=torch.uint8)

# %%
# - **Checks.** ``check=True``, the default, raises an error for points that
#   are not finite. It reads them first and waits for the GPU. Times are
#   without it.
# - **Memory.** It allocates the labels. For many coordinates it also allocates
#   a list of those points whose distances are computed twice.
# - **Gradients.** Labels have none.

page.use()

# %%
# Takeaways
# ---------
#
# - Count the bytes of the result, too. A narrow dtype may halve the time.
# - Load adjacent data with one instruction and separate it in registers.
# - A compiler fuses a short chain. It does not choose the dtype of a result.
# - Test with data that has no symmetry.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it names a wrong element of
# its result. Copy a kernel, change it and run the cell. No GPU is needed.
#
# 1. City blocks
# ~~~~~~~~~~~~~~
#
# In a city one walks along the streets. The distance is the sum of the
# absolute differences. Change the kernel of step 2.


def city(points, centres):
    return nearest_pairs(points, centres)


def in_the_city(points, centres):
    return (points - centres[:, None]).abs().sum(2).argmin(0)


def drawn(seed, n, k):
    points, centres, _ = page.stress(n, 2, k, seed=seed)
    return points, centres


page.exercise(city, in_the_city, [drawn(4, 300, 2), drawn(5, 517, 2)])

# %%
# 2. Any number of centres
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# Both steps compare two centres. Loop over k of them, and keep the smallest
# distance so far and its label.


def nearest_of_many(points, centres):
    return nearest_one_pass(points, centres)


def by_differences(points, centres):
    return (points - centres[:, None]).square().sum(2).argmin(0)


page.exercise(nearest_of_many, by_differences, [drawn(6, 300, 5)])

# %%
# 3. How far?
# ~~~~~~~~~~~
#
# The *inertia* is the sum of all squared distances. Return the squared
# distance of each point to its nearest centre, with one pass.


def squared(points, centres):
    return (points - centres[nearest_pairs(points, centres)]).sum(1)


def squared_distance(points, centres):
    return (points - centres[:, None]).square().sum(2).amin(0)


page.exercise(squared, squared_distance, [drawn(7, 300, 2)])

# %%
# Evidence
# --------

page.footer()
