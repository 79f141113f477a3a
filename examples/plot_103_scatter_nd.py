"""
Masked ScatterND: add rows to a table
=====================================

The gradient of an embedding is a large table of zeros, to which a few thousand
rows are added. Some of them meet in one row, and some are masked. We write
three kernels for it, and find out why a published kernel was 7x to 50x faster
than ONNX Runtime.

You will learn

- what atomic additions cost, and what they do not cost,
- how to turn a scatter into a gather, which needs no atomics,
- how to test a kernel whose programs may meet.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_101_elementwise`. No GPU
is needed: without one, kernels run in Triton's interpreter, and times come
from a record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["scatter", "ScatterND", "atomics", "embedding"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_103_scatter_nd")
page.verdict()

# %%
# What can fusion save?
# ---------------------
#
# The output has M rows of D elements. There are N *updates*, rows of D
# elements, and an index k says to which row each is added. An index of -1 is
# *masked*: padding in a batch of text has no gradient.

caption = "Step 1 has a program for each update, and step 2 one for each row."
page.picture.owners(caption, [3, 1, -1, 1, 3, -1, 3, 1], rows=5)

# %%
# PyTorch has no operator for that. In eager code it is a chain of kernels:


def scatter_eager(shape, indices, updates):
    y = updates.new_zeros(shape)  # write MD
    masked = indices == -1
    kept = torch.where(masked, 0, updates)  # read ND, write ND
    k = indices[:, 0].clamp(min=0)
    return y.index_add_(0, k, kept)  # read 2ND, write ND


# With N = 2M updates, in multiples of MD elements:
chain = [("zeros", 0, 1), ("where", 2, 2), ("index_add_", 4, 2)]
moved = {"eager": chain, "fused": [("one kernel", 2, 1)]}
page.picture.segments("With N = 2M updates", moved, "MD")

# %%
# With twice as many updates as rows, **we predict that fusion gains a factor
# of 3.7**, or 11 over 3. A Llama's embedding has M = 32000 rows, and 2 x 1024
# tokens are N = 2048 updates. Then most of the traffic is zeros, which every
# implementation has to write, and **we predict a gain of about a quarter**: (M
# + 5N) / (M + N).

# %%
# .. _scatter-atomic:
#
# Step 1: atomic additions {gain atomic at M=32000, N=2048}
# ---------------------------------------------------------
#
# A program owns an update. It finds its row and adds. As several programs may
# add to one row, each addition is an :term:`atomic operation`, which the L2
# cache carries out without interruption. A kernel must not trust a number that
# it uses as an address, so an index out of range counts as masked.


@triton.jit
def add_rows(y_ptr, k_ptr, u_ptr, M, D, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(k_ptr + i).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    width = tl.where((row >= 0) & (row < M), D, 0)  # -1 is masked
    inside = columns < width
    u = tl.load(u_ptr + i * D + columns, mask=inside, other=0.0)  # read D
    tl.atomic_add(y_ptr + row * D + columns, u, mask=inside, sem="relaxed")


def scatter_atomic(shape, indices, updates):
    y = updates.new_zeros(shape)  # write MD
    N, D = updates.shape
    block = triton.next_power_of_2(D)
    add_rows[(N,)](y, indices, updates, shape[0], D, BLOCK=block)
    return y


shape, indices, updates = page.stress(37, 100, 60)  # M, D, N
page.check(scatter_atomic, shape, indices, updates)

# %%
# The error is relative to float64, in *eps*, the distance from 1 to the next
# number. The kernel has two costs. It reads and writes rows to which zeros
# have just been written. And the GPU chooses the order of the additions, so
# the last bits change from run to run.

# %%
# .. _scatter-owner:
#
# Step 2: the owner of a row {gain owner at M=32000, N=2048}
# ----------------------------------------------------------
#
# Now a program owns a *row of the output*. It looks for updates of this row,
# adds them in registers, and writes the row once, zeros included. So the
# scatter is a *gather*: a program reads what it needs, and no two programs
# write to one place. Sums are float32, in the order of the updates.


@triton.jit
def own_row(y_ptr, k_ptr, u_ptr, D, N, ALL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ALL)  # each program reads all indices
    mine = tl.load(k_ptr + i, mask=i < N, other=-1) == row
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    at = tl.min(tl.where(mine, i, ALL), 0)  # the first of mine, or ALL
    while at < ALL:
        u_row = u_ptr + at.to(tl.int64) * D + columns
        total += tl.load(u_row, mask=columns < D, other=0.0).to(tl.float32)
        at = tl.min(tl.where(mine & (i > at), i, ALL), 0)  # the next
    tl.store(y_ptr + row * D + columns, total, mask=columns < D)


def scatter_owner(shape, indices, updates):
    y = updates.new_empty(shape)
    N, D = updates.shape
    block, every = triton.next_power_of_2(D), triton.next_power_of_2(N)
    own_row[shape[:1]](y, indices, updates, D, N, ALL=every, BLOCK=block)
    return y


page.check(scatter_owner, shape, indices, updates)

# %%
# Nothing is written twice. But M programs read N indices each: for the Llama's
# embedding these are half a gigabyte, as much as the table. They come from L2,
# and still take time.

# %%
# .. _scatter-sorted:
#
# Step 3: sort the updates first {gain sorted at M=32000, N=2048}
# ---------------------------------------------------------------
#
# If the updates are in the order of their rows, an owner finds its own by
# *bisection*: 11 indices are enough to find one of 2048. A kernel sorts them
# by counting. An update's place is the number of those that go before it.
# These have a smaller index, or the same index and come earlier. So each
# update is compared with every other one: N x N comparisons. This step gains
# where they take less time than M programs that read all indices. At no size
# of the table below is that so: the step has one kernel more, and is slower.

sorted_updates = [-1, -1, 1, 1, 1, 3, 3, 3]
caption = "Sorted: the owner of row 1 or row 3 reads three neighbours."
page.picture.owners(caption, sorted_updates, rows=5)

# %%


@triton.jit
def sort_by_counting(
    keys_ptr, order_ptr, k_ptr, N, OWN: tl.constexpr, OTHERS: tl.constexpr
):
    i = tl.program_id(0) * OWN + tl.arange(0, OWN)
    k = tl.load(k_ptr + i, mask=i < N, other=0)
    place = tl.zeros([OWN], tl.int32)
    for start in range(0, N, OTHERS):
        j = start + tl.arange(0, OTHERS)
        other = tl.load(k_ptr + j, mask=j < N, other=0)
        before = (other[None, :] == k[:, None]) & (j[None, :] < i[:, None])
        before = (before | (other[None, :] < k[:, None])) & (j < N)[None, :]
        place += tl.sum(before.to(tl.int32), 1)
    tl.store(keys_ptr + place, k, mask=i < N)
    tl.store(order_ptr + place, i, mask=i < N)


@triton.jit
def own_sorted(y_ptr, keys_ptr, order_ptr, u_ptr, D, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    low, high = row * 0, row * 0 + N  # int64, both
    while low < high:  # bisection: the first place whose key is not smaller
        middle = (low + high) // 2
        smaller = tl.load(keys_ptr + middle) < row
        low = tl.where(smaller, middle + 1, low)
        high = tl.where(smaller, high, middle)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    mine = tl.load(keys_ptr + low, mask=low < N, other=-1) == row
    while mine:
        at = tl.load(order_ptr + low)
        u = tl.load(u_ptr + at * D + columns, mask=columns < D, other=0.0)
        total += u.to(tl.float32)
        low += 1
        mine = tl.load(keys_ptr + low, mask=low < N, other=-1) == row
    tl.store(y_ptr + row * D + columns, total, mask=columns < D)


def scatter_sorted(shape, indices, updates):
    y = updates.new_empty(shape)
    N, D = updates.shape
    keys, order = torch.empty_like(indices), torch.empty_like(indices)
    sizes = {"OWN": 16, "OTHERS": 256}  # 16 updates for each program
    sort_by_counting[(triton.cdiv(N, 16),)](keys, order, indices, N, **sizes)
    block = triton.next_power_of_2(D)
    own_sorted[shape[:1]](y, keys, order, updates, D, N, BLOCK=block)
    return y


page.check(scatter_sorted, shape, indices, updates)

# %%
# The second kernel waits for the first, which has few programs: a program for
# 16 updates. So it leaves most of the GPU idle. In the library, other programs
# of the first launch write zeros meanwhile. If one row gets many updates, it
# is cut into pieces for several programs:

page.source("masked_scatter_nd_of_shape", fold=True)

# %%
# Is it correct?
# --------------
#
# The source of this page is *Optimizing Masked ScatterND operator on CUDA* of
# onnx-extended (2024). In its kernel each thread owns a column. 128 threads
# load an index each, and then each thread adds 128 updates to its column. For
# update i it should take index i. It takes the index that it loaded itself
# each time:


def index_of_the_thread(shape, indices, updates):
    y, (N, D) = updates.new_zeros(shape), updates.shape
    k, column = indices[:, 0], torch.arange(D, device=updates.device)
    whole = N // 128 * 128
    for begin in range(0, whole, 128):
        row = k[begin + column % 128]  # one index per column: the mistake
        live = row != -1
        total = updates[begin : begin + 128].sum(0)
        y[row[live], column[live]] += total[live]
    return y + scatter_eager(shape, indices[whole:], updates[whole:])


shape, indices, updates = page.stress(37, 256, 128, seed=1)
equal = shape, torch.full_like(indices, 5), updates
tests = {"twenty_updates": page.stress(5, 7, 20), "equal_indices": equal}
tests["any_indices"] = shape, indices, updates
page.catches(index_of_the_thread, **tests)

# %%
# The example of the source has 20 updates, for which its kernel has another
# loop, without the mistake. Equal indices hide this mistake, too. But they
# *show* others: races, and sums that round. Step 1 adds 2500 ones to one row
# here. In float16 it stops at 2048, since 2049 is rounded to 2048. Owners add
# in registers, in float32.

ones = torch.ones(2500, 4, device=updates.device)
halves = (1, 4), indices.new_zeros(2500, 1), ones.half()
page.catches(scatter_atomic, float32=(*halves[:2], ones), float16=halves)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). The figure has the shapes of the source: M rows of 2M columns,
# and 2M updates. It goes on to sizes beyond those of the source. *ONNX
# Runtime* is what the source compared with: a chain as above, with its own
# ScatterND.

page.plot("bandwidth", over="R")

# %%
# In the table a copy that moves as many bytes is 100 %.

steps = {"atomic": scatter_atomic, "owner": scatter_owner}
page.steps(eager=scatter_eager, **steps, sorted=scatter_sorted)

# %%
page.findings()

# %%
# So most of the published gain was not fusion. In ONNX Runtime's kernel a
# thread adds a whole row, and the threads of a :term:`warp` are a row apart.
# That is the opposite of :term:`coalescing`: a load of 32 threads fetches 32
# pieces of memory. Torch's chain moves its bytes more slowly than a copy does,
# so the gain over it can exceed the prediction. On small tables no kernel
# reaches the speed of a copy, so it can fall short, too.
#
# .. _scatter-use:
#
# When to use it
# --------------
#
# The library chooses between atomic additions, owners and sorted updates by
# the sizes. ``strategy="sorted"`` gives the same bits in each run, as does
# ``torch.use_deterministic_algorithms(True)``.

y = fusebook.masked_scatter_nd_of_shape((37, 256), indices, updates)

# %%
# - **Checks.** ``check=True``, the default, names an index that is out of
#   range. It waits for the GPU, which takes longer than a small kernel. With
#   ``check=False`` such updates are left out. All times here are without it.
# - **Training.** The gradient of the updates is a gather.
# - **Related.** ``fusebook.embedding_backward`` is the gradient of an
#   embedding, and ``fusebook.scatter_nd_of_shape`` has no mask.

page.use()

# %%
# Takeaways
# ---------
#
# - Before you fuse, time each operator alone. A slow one looks like a missed
#   fusion.
# - Turn a scatter into a gather where you can. The owner of an output needs no
#   atomics, adds in float32, and writes once.
# - Test with indices that are all equal, and with more than one block of them.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it names a wrong element of
# its result. Copy a kernel, change it and run the cell. No GPU is needed.
#
# 1. The mean
# ~~~~~~~~~~~
#
# Some losses need the mean of a row's updates, and zero where there are none.
# The owner knows how many it has added.


def scatter_mean(shape, indices, updates):
    return scatter_owner(shape, indices, updates)


def mean_of_rows(shape, indices, updates):
    zeros, k = updates.new_zeros(shape), indices.expand_as(updates)
    return zeros.scatter_reduce_(0, k, updates, "mean", include_self=False)


shape, indices, updates = page.stress(10, 33, 60, seed=4)
given = [(shape, indices.clamp(min=0), updates)]  # without masks
page.exercise(scatter_mean, mean_of_rows, given)

# %%
# 2. The maximum
# ~~~~~~~~~~~~~~
#
# ONNX's ScatterND has a reduction ``max``: a row becomes the largest of what
# it was, here zero, and its updates.


def scatter_max(shape, indices, updates):
    return scatter_owner(shape, indices, updates)


def max_of_rows(shape, indices, updates):
    zeros, k = updates.new_zeros(shape), indices.expand_as(updates)
    return zeros.scatter_reduce_(0, k, updates, "amax")


page.exercise(scatter_max, max_of_rows, given)

# %%
# Evidence
# --------

page.footer()
