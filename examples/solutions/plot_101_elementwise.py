"""Solutions to the exercises of the elementwise page.

They import from nothing but PyTorch and Triton once fusebook has decided
whether kernels are interpreted.
"""

import fusebook  # noqa: F401  before triton

import torch
import triton
import triton.language as tl

# 1. Memory has no rows: a matrix without gaps is a vector of all its elements.
# What has to grow is the grid.


@triton.jit
def _multiply(y_ptr, a_ptr, b_ptr, SIZE, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < SIZE)
    b = tl.load(b_ptr + i, mask=i < SIZE)
    tl.store(y_ptr + i, a * b, mask=i < SIZE)


def multiply_matrix(x, y):
    out = torch.empty_like(x)
    SIZE = x.numel()
    _multiply[(triton.cdiv(SIZE, 512),)](out, x, y, SIZE, BLOCK=512)
    return out


# 2. The output is a vector; row and column of an element follow from its
# number, and its address in each operand from its row and column. Divisions
# are slow, and reading across is slower: the library's kernel has tiles.


@triton.jit
def _strided(
    y_ptr,
    a_ptr,
    b_ptr,
    SIZE,
    N,
    a_row,
    a_column,
    b_row,
    b_column,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // N, i % N
    inside = i < SIZE
    a = tl.load(a_ptr + row * a_row + column * a_column, mask=inside)
    b = tl.load(b_ptr + row * b_row + column * b_column, mask=inside)
    tl.store(y_ptr + i, a * b, mask=inside)


def multiply_as_it_lies(x, y):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    SIZE, N = x.numel(), x.shape[1]
    _strided[(triton.cdiv(SIZE, 512),)](
        out, x, y, SIZE, N, *x.stride(), *y.stride(), BLOCK=512
    )
    return out


if __name__ == "__main__":
    x = torch.arange(6.0).view(2, 3)
    x = x.cuda() if torch.cuda.is_available() else x
    print(multiply_matrix(x, x), multiply_as_it_lies(x.T, x.T))
