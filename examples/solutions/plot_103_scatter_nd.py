"""Solutions to the exercises of the ScatterND page, each one kernel.

They import from nothing but PyTorch and Triton once fusebook has decided
whether kernels are interpreted.
"""

import fusebook  # noqa: F401  before triton

import torch
import triton
import triton.language as tl

# 1. The owner counts as it adds, and divides in registers: the output is still
# written once. One update or none: divide by one.


@triton.jit
def _mean(y_ptr, k_ptr, u_ptr, D, n, N: tl.constexpr, BLOCK: tl.constexpr):
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
    count = tl.maximum(tl.sum(mine.to(tl.int32), 0), 1)
    tl.store(y_ptr + r * D + columns, total / count, mask=columns < D)


# 2. The same walk; the running value starts at zero, as the row did.


@triton.jit
def _max(y_ptr, k_ptr, u_ptr, D, n, N: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    mine = tl.load(k_ptr + i, mask=i < n, other=-1) == r
    columns = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    at = tl.min(tl.where(mine, i, N), 0)
    while at < N:
        u_row = u_ptr + at.to(tl.int64) * D + columns
        u = tl.load(u_row, mask=columns < D, other=0.0)
        top = tl.maximum(top, u)
        at = tl.min(tl.where(mine & (i > at), i, N), 0)
    tl.store(y_ptr + r * D + columns, top, mask=columns < D)


def _owned(kernel, shape, indices, updates):
    y = updates.new_empty(shape)
    n, D = updates.shape
    block, N = triton.next_power_of_2(D), triton.next_power_of_2(n)
    kernel[shape[:1]](y, indices, updates, D, n, N=N, BLOCK=block)
    return y


def scatter_mean(shape, indices, updates):
    return _owned(_mean, shape, indices, updates)


def scatter_max(shape, indices, updates):
    return _owned(_max, shape, indices, updates)


if __name__ == "__main__":
    k = torch.tensor([[1], [3], [1]])
    k = k.cuda() if torch.cuda.is_available() else k
    ones = torch.ones(3, 2, device=k.device)
    print(scatter_mean((4, 2), k, 6 * ones), scatter_max((4, 2), k, ones))
