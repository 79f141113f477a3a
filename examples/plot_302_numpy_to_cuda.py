"""
From NumPy to CUDA: torch.compile
=================================

One line of NumPy says which centre is nearest to each point. torch.compile
turns this line into C++ for a CPU and into Triton for a GPU. We count what it
can save, write the kernel that it should find, and look at what it generates.

You will learn

- how to count what a line of NumPy moves, and predict what fusion gains,
- how to run NumPy code on a GPU, and where its time goes then,
- how to see what a compiler did: generated code, and graphs it was cut into.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_101_elementwise`. No GPU
is needed: without one, kernels run in Triton's interpreter, and times come
from a record, as do those of its CPU.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["torch.compile", "NumPy"]
import numpy as np
import torch
import triton
import triton.language as tl

page = lesson.open("plot_302_numpy_to_cuda")
page.verdict()

# %%
# What NumPy moves
# ----------------
#
# There are N points of two coordinates, and two centres, or *means*:


def nearest(X, means):
    return np.argmin(np.linalg.norm(X - means[:, None], axis=2), axis=0)


# In multiples of N words of eight bytes: what is read, and what is written.
line = [("subtract", 2, 4), ("square", 4, 4), ("sum", 4, 2)]
line += [("square root", 2, 2), ("argmin", 2, 1)]
moved = {"NumPy": line, "fused": [("one loop", 2, 1)]}
page.picture.segments("Words of eight bytes, in float64", moved, "N")

# %%
# NumPy runs one operation after another, and each writes its whole result to
# memory. Points have to be read once, and labels written once. **We predict
# that fusion gains a factor of 9**, on the same CPU.
#
# The goal: one kernel
# --------------------
#
# This is the kernel, written by hand for a GPU. A program owns BLOCK points.
# Coordinates, differences and distances stay in registers, and only labels are
# written.


@triton.jit
def nearest_of_two(l_ptr, x_ptr, c_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(x_ptr + 2 * i, mask=inside)
    y = tl.load(x_ptr + 2 * i + 1, mask=inside)
    dx0, dy0 = x - tl.load(c_ptr), y - tl.load(c_ptr + 1)
    dx1, dy1 = x - tl.load(c_ptr + 2), y - tl.load(c_ptr + 3)
    label = dx1 * dx1 + dy1 * dy1 < dx0 * dx0 + dy0 * dy0
    tl.store(l_ptr + i, label.to(l_ptr.dtype.element_ty), mask=inside)


def by_hand(points, centres, label_dtype=torch.int64):
    labels = points.new_empty(len(points), dtype=label_dtype)
    grid = (triton.cdiv(len(points), 1024),)
    nearest_of_two[grid](labels, points, centres, len(points), BLOCK=1024)
    return labels


points, centres, dtype = page.stress(3000, 2, 2)
page.check(by_hand, points, centres, dtype)

# %%
# :doc:`plot_303_kmeans` explains this kernel and makes it faster. Here it is
# the yardstick for code that a compiler writes.

page.picture.blocks(20, 8)

# %%
# Compiled for the CPU
# --------------------
#
# ``torch.compile(nearest)`` is a function of NumPy arrays. *Dynamo* reads the
# Python code and makes a graph of its operations. *Inductor* fuses them and
# generates C++: one loop, several points at a time in vector registers, shared
# among threads. The environment variable ``TORCH_LOGS=output_code`` shows it.

page.threads()

# %%
# Two threads take half the time of one, so the memory that they share is not
# the limit yet. NumPy is slower than its traffic predicts: each operation
# writes to fresh memory, whose pages the system has to map first. Rows of the
# table below show what that costs: copies to fresh and to used memory.
#
# .. _numpy-arrays:
#
# Step 1: on the GPU, with arrays {gain arrays at N=20000000}
# -----------------------------------------------------------
#
# Within ``torch.device("cuda")`` the compiled function copies its arrays to
# the GPU, and the result back. Dynamo fails there at operators on arrays, such
# as ``-``, so step 1 writes them as functions. Step 2 does not need that.


def by_name(X, means):
    far = np.linalg.norm(np.subtract(X, means[:, None]), axis=2)
    return np.argmin(far, axis=0)


by_name_compiled = torch.compile(by_name, dynamic=False)


def arrays(X, means):
    with torch.device("cuda"):
        return by_name_compiled(X, means)


# %%
# .. _numpy-tensors:
#
# Step 2: tensors that stay on the GPU {gain tensors at N=20000000}
# -----------------------------------------------------------------
#
# Most of the time of step 1 is copies. With tensors in and out there are none.
# Between ``.numpy()`` and ``from_numpy`` it is still the line of NumPy, and
# the compiler removes both conversions:


@torch.compile(dynamic=False)
def tensors(points, centres):
    return torch.from_numpy(nearest(points.numpy(), centres.numpy()))


page.generated()

# %%
# The generated kernel does what the one by hand does. It also takes square
# roots and handles NaN.
#
# Is it correct?
# --------------
#
# The line is from `a post of PyTorch, 2023`__. Its example has centres at
# (5, 5) and (10, 10). If code exchanges x and y of the centres, no label
# changes there. So take centres off the diagonal. The check compares a point's
# distance to the centre of its label with its distance to the nearest centre.
#
# __ https://pytorch.org/blog/compiling-numpy-code/


def exchanged(points, centres, label_dtype=torch.int64):
    return by_hand(points, centres.flip(1).contiguous(), label_dtype)


def planted(*middle):
    means = torch.tensor(middle, device=points.device)
    return (points + means[:, None]).view(-1, 2), means, torch.int64


diagonal = planted([5.0, 5.0], [10.0, 10.0])
crooked = planted([5.0, 1.0], [0.0, 9.0])
page.catches(exchanged, diagonal=diagonal, crooked=crooked)

# %%
# How fast is it?
# ---------------
#
# *Latency* is the time of one call, from Python until the GPU has finished. A
# label takes eight bytes for points of either dtype.

page.steps(numpy=nearest, arrays=arrays, tensors=tensors, kernel=by_hand)

# %%

page.findings()

# %%
# The GPU time of the compiled line and of the library is about the same. The
# library's call starts sooner: torch.compile first checks in each call whether
# its code still fits the arguments.
#
# What breaks a graph
# -------------------
#
# Dynamo cannot follow an ``if`` on a value that is known at run time only. It
# cuts the graph there: a :term:`graph break`. Each part is compiled and
# launched alone. A function without branches is one graph:


def branching(X):
    if X.sum() > 0:
        X = X / X.max()
    else:
        X = X * 2
    return X + 1


def branchless(X):
    scale = np.where(X.sum() > 0, 1 / X.max(), 2)
    return X * scale + 1


ones = np.arange(1.0, 9.0)
page.graphs(branching, ones)

# %%

page.graphs(branchless, ones)

# %%
# A loop with a known number of iterations is unrolled. For one that ends when
# something has converged, compile its body. Creation functions such as
# ``np.zeros`` make float64, and so does each operation that takes their
# result. Set ``torch._dynamo.config.numpy_default_float = "float32"`` before
# anything is compiled.
#
# .. _numpy-use:
#
# When to use it
# --------------
#
# Use torch.compile for NumPy code that is a chain of elementwise operations
# and reductions, and for which no library has a function. Here there is one:

labels = fusebook.kmeans_assign(points, centres, check=False)

# %%
# - **Checks.** ``check=True``, the default, raises an error for NaN,
#   infinities, and points whose distances are out of range. It waits for the
#   GPU.
# - **Labels.** ``label_dtype=torch.uint8`` writes an eighth of the bytes.
# - **Related.** ``fusebook.kmeans`` finds the centres, too.

page.use()

# %%
# Takeaways
# ---------
#
# - Count what travels first. If arrays go to the GPU and back in each call,
#   copies are most of the time.
# - A compiler fuses a short chain into one loop. It does not know how wide a
#   label needs to be.
# - Look at the generated code, and count the graphs.
# - Test with data that has no symmetry which could hide a mistake.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it names a wrong element of
# its result. Copy the kernel, change it and run the cell. No GPU is needed.
#
# 1. Another distance
# ~~~~~~~~~~~~~~~~~~~
#
# The Manhattan distance is :math:`|\Delta x| + |\Delta y|`. Return the label
# of the nearest centre by it.


def manhattan(points, centres):
    return by_hand(points, centres).to(points.dtype)


def manhattan_in_torch(points, centres):
    far = (points[:, None] - centres).abs().sum(2)
    return far.argmin(1).to(points.dtype)


rng = torch.Generator().manual_seed(0)
spread = torch.randn(3000, 2, generator=rng).to(points.device)
page.exercise(manhattan, manhattan_in_torch, [(spread, spread[:2])])

# %%
# 2. The distance
# ~~~~~~~~~~~~~~~
#
# K-means ends when the sum of distances no longer falls. Return the distance
# to the nearest centre. It is in registers already.


def how_far(points, centres):
    return by_hand(points, centres).to(points.dtype)


def how_far_in_torch(points, centres):
    return (points[:, None] - centres).norm(dim=2).amin(1)


page.exercise(how_far, how_far_in_torch, [(spread, spread[:2])])

# %%
# Evidence
# --------

page.footer()
