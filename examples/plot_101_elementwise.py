"""
Elementwise kernels: one pass over memory
=========================================

A sum and a difference are two passes over memory in PyTorch, and one pass in a
kernel. We write the smallest kernels there are, and learn what every kernel
needs: which elements a program owns, and where they are in memory. Do not
write these kernels in production, as ``torch.compile`` makes them as fast.

You will learn

- how a Triton program finds its elements, and what a mask is for,
- why a kernel needs the strides of its tensors,
- how to predict the gain of fusing by counting passes over memory.

Prerequisites: :doc:`plot_002_measuring`. No GPU is needed: without one,
kernels run in Triton's interpreter, and times come from a record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["elementwise", "strides", "broadcasting"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_101_elementwise")
page.verdict()

# %%
# Why two operations are two passes
# ---------------------------------
#
# In an :term:`elementwise` expression, element *i* of the result depends on
# element *i* of each operand, and on no other. *Eager* PyTorch runs each
# operation as a separate kernel, a function that runs on the GPU. Each kernel
# reads its operands from memory and writes its result. M and N are the sizes
# of a matrix.


def add_sub_eager(x, y):
    total = x + y  # read 2MN, write MN
    return total, x - y  # read 2MN, write MN


page.traffic(eager=add_sub_eager, fused=4)

# %%
# A *fused* kernel reads both operands once for both results: 4MN instead of
# 6MN. A GPU does many additions while it fetches one element, so memory
# decides the time: **we predict 1.5 times the speed.**

# %%
# .. _elementwise-grid:
#
# Step 1: a grid and a mask {gain grid at N=8192}
# -----------------------------------------------
#
# We begin with a single operation, ``x * y``. Its baseline, *torch multiply*,
# is PyTorch's own. In CUDA C, a kernel is what one thread does with one
# element. In Triton it is what one *program* does with a block of elements. A
# launch starts many programs, each a CUDA thread block. By default it has 128
# threads, to which the compiler assigns the elements. From its number,
# ``tl.program_id(0)``, a program computes which elements it owns.

page.picture.blocks(size=20, block=8)

# %%
# The last block may pass the end of the tensor. ``mask`` keeps its loads and
# stores inside. Without it the kernel would overwrite memory after ``out``.


@triton.jit
def multiply_grid(out_ptr, x_ptr, y_ptr, SIZE, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK  # may exceed 2**31
    i = first + tl.arange(0, BLOCK)  # [BLOCK]: the elements of this program
    inside = i < SIZE
    x = tl.load(x_ptr + i, mask=inside)  # read BLOCK
    y = tl.load(y_ptr + i, mask=inside)  # read BLOCK
    tl.store(out_ptr + i, x * y, mask=inside)  # write BLOCK


def grid(x, y):
    out, SIZE = torch.empty_like(x), x.numel()
    multiply_grid[(triton.cdiv(SIZE, 512),)](out, x, y, SIZE, BLOCK=512)
    return out


product = page.of("multiply")
x, y = product.stress(33, 781)
product.check(grid, x, y)

# %%
# The unit *eps* of an error is the distance from 1 to the next number of the
# dtype. ``multiply_grid[(n,)](...)`` launches n programs, enough for all
# elements. A ``tl.constexpr`` is a constant of the compiled kernel. Each of
# 128 threads owns 4 of the 512 elements of a block. They are adjacent, so it
# loads these 16 bytes by one instruction. In CUDA C you write that by hand.
# With one element per thread, a load asks for 4 bytes. So fewer bytes are in
# flight at a time, and memory is not kept busy. One operation alone has
# nothing to fuse, so this step gains nothing.

# %%
# .. _elementwise-strides:
#
# Step 2: strides {gain strided at N=8192}
# ----------------------------------------
#
# Step 1 reads the elements in the order in which they are in memory. A
# transposed matrix is a *view*: the same memory with other *strides*, the
# distances from a row to the next and from a column to the next. If one
# operand is transposed, step 1 multiplies the wrong elements. Here program *i*
# owns row *i*, and finds its elements by the strides. A row that is broadcast
# to all rows has a stride of zero. Strides gain no time: they make the kernel
# correct for views.


@triton.jit
def multiply_strided(
    out_ptr, x_ptr, y_ptr, N, x_row, x_col, y_row, y_col, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK], N or more
    inside = col < N
    x = tl.load(x_ptr + row * x_row + col * x_col, mask=inside)
    y = tl.load(y_ptr + row * y_row + col * y_col, mask=inside)
    product = x.to(tl.float32) * y  # a shorter dtype is rounded once, below
    tl.store(out_ptr + row * N + col, product, mask=inside)


def strided(x, y):
    x, y = torch.broadcast_tensors(x, y)  # views, with strides of zero
    M, N = x.shape
    out, block = x.new_empty(M, N), triton.next_power_of_2(N)
    multiply_strided[(M,)](out, x, y, N, *x.stride(), *y.stride(), BLOCK=block)
    return out


product.check(strided, x[:33, :33], y[:33, :33].T)

# %%
# Here adjacent threads read elements of ``y`` that are a row apart. Memory is
# fetched in *sectors* of 32 bytes, and a load uses 4 bytes of each. When
# adjacent threads read adjacent elements, all bytes are used: that is
# *coalescing*.

# %%
# .. _elementwise-both:
#
# Step 3: two results in one pass {gain both at N=8192}
# -----------------------------------------------------
#
# This kernel reads both operands once. The line with a comment is new.


@triton.jit
def add_and_subtract(s_ptr, d_ptr, x_ptr, y_ptr, SIZE, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    x = tl.load(x_ptr + i, mask=inside)
    y = tl.load(y_ptr + i, mask=inside)
    tl.store(s_ptr + i, x + y, mask=inside)
    tl.store(d_ptr + i, x - y, mask=inside)  # x and y are still in registers


def both(x, y):
    total, difference = torch.empty_like(x), torch.empty_like(x)
    SIZE = x.numel()
    launch = add_and_subtract[(triton.cdiv(SIZE, 512),)]
    launch(total, difference, x, y, SIZE, BLOCK=512)
    return total, difference


page.check(both, x, y)

# %%
# Is it correct?
# --------------
#
# A check is worth what it catches. This function computes its second result in
# float16. Small whole numbers do not show that, since float16 holds them
# exactly:


def half_difference(x, y):
    return x + y, (x.half() - y.half()).float()


whole = torch.arange(40.0).view(5, 8)
page.catches(half_difference, whole=(whole, whole), stress=(x, y))

# %%
# The next check has other shapes and strides: a row for all rows, a column for
# all columns, and a transposed matrix.

product.check_all(strided)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). The figure shows bandwidth: the bytes of 4MN elements over GPU
# time. *A copy* is PyTorch's copy of as many bytes. The *roofline* is the
# bandwidth of the largest copies.

page.plot("bandwidth", over="M")

# %%
# In the table, 100 % is PyTorch's copy of the bytes that a step has to move. A
# kernel can be faster than that copy.


def torch_multiply(x, y):
    return x * y


steps = {"torch_multiply": torch_multiply, "grid": grid, "strided": strided}
page.steps(**steps, eager=add_sub_eager, both=both)

# %%
page.findings()

# %%
# .. _elementwise-use:
#
# When to use it
# --------------
#
# Let ``torch.compile`` fuse elementwise operations: it is as fast. Write such
# expressions inside kernels that it cannot write, as the next pages do. The
# library's function takes any strides and shapes that broadcast.

both_results = fusebook.add_sub(x, y)
page.use()

# %%
# Takeaways
# ---------
#
# - Count reads and writes first. The count predicts the gain of fusing.
# - Let each thread load 16 adjacent bytes by one instruction.
# - Strides are arguments. A kernel without them is correct until a tensor is
#   transposed.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it says where. Fix it and run
# the cell again. No GPU is needed.
#
# 1. Any shape
# ~~~~~~~~~~~~
#
# This product is correct for the first row of a matrix only. Fix it for
# matrices of any shape.


def multiply_matrix(x, y):
    out = torch.zeros_like(x)
    multiply_grid[(1,)](out, x, y, x.shape[-1], BLOCK=512)
    return out


page.exercise(
    multiply_matrix,
    torch.mul,
    [page.stress(20, 10, seed=1), page.stress(33, 70, seed=2)],
)

# %%
# 2. Strides
# ~~~~~~~~~~
#
# This product takes memory in its order, so a transposed matrix is multiplied
# in the wrong order. Fix it without a copy.


def multiply_as_it_lies(x, y):
    out, SIZE = torch.empty(x.shape, device=x.device), x.numel()
    multiply_grid[(triton.cdiv(SIZE, 512),)](out, x, y, SIZE, BLOCK=512)
    return out


page.exercise(
    multiply_as_it_lies,
    torch.mul,
    [
        (page.stress(20, 10, seed=3)[0], page.stress(10, 20, seed=4)[0].T),
        (page.stress(33, 60, seed=5)[0], page.stress(60, 33, seed=6)[0].T),
    ],
)

# %%
# Evidence
# --------

page.footer()
