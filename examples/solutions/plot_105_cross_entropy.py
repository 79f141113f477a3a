"""Solutions to the exercises of the page on cross entropy, in one kernel.

They import from nothing but PyTorch and Triton once fusebook has decided
whether kernels are interpreted.
"""

import fusebook  # noqa: F401  before triton

import torch
import triton
import triton.language as tl

# 1. The class is loaded from where it is valid, and both results are chosen,
# not multiplied by zero: zero times NaN is NaN. The mean divides by the number
# of rows that count.
#
# 2. The square of l = log sum exp(x) has the derivative 2 l p, with p the
# softmax: the probabilities are multiplied by 1 + 2 z l. It costs no traffic.


@triton.jit
def _solved(
    loss_ptr,
    dx_ptr,
    x_ptr,
    target_ptr,
    N,
    scale,
    Z: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    x_ptr += row * N
    x = tl.load(x_ptr + columns, mask=columns < N, other=float("-inf"))
    x = x.to(tl.float32)
    top = tl.max(x, 0)
    e = tl.exp(x - top)
    total = tl.sum(e, 0)
    target = tl.load(target_ptr + row)
    counts = target >= 0
    x_t = tl.load(x_ptr + tl.where(counts, target, 0)).to(tl.float32)
    lse = top + tl.log(total)
    loss = tl.log(total) + (top - x_t) + Z * lse * lse
    tl.store(loss_ptr + row, tl.where(counts, loss * scale, 0.0))
    p = e / total * (1.0 + 2.0 * Z * lse)
    dx = p - tl.where(columns == target, 1.0, 0.0)
    dx = tl.where(counts, dx * scale, 0.0)
    tl.store(dx_ptr + row * N + columns, dx, mask=columns < N)


def _launch(x, target, z):
    M, N = x.shape
    loss, dx = x.new_empty(M, dtype=torch.float32), torch.empty_like(x)
    block, scale = triton.next_power_of_2(N), 1 / int((target >= 0).sum())
    _solved[(M,)](loss, dx, x, target, N, scale, Z=z, BLOCK=block)
    return loss.sum(), dx


def ignoring(x, target):
    return _launch(x, target, 0.0)


def with_z_loss(x, target):
    return _launch(x, target, 0.01)
