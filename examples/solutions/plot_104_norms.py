"""Solutions to the exercises of the page on norms, each one kernel.

They import from nothing but PyTorch and Triton once fusebook has decided
whether kernels are interpreted.
"""

import fusebook  # noqa: F401  before triton

import torch
import triton
import triton.language as tl

# The weight is made one larger in float32, where it is used: a bfloat16 near
# one has only seven bits behind it.


@triton.jit
def _around_one(y_ptr, x_ptr, w_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(x_ptr + row * N + columns, mask=inside, other=0.0)
    x = x.to(tl.float32)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(x * x, 0) / N + 1e-6)
    tl.store(y_ptr + row * N + columns, x * factor * (1 + w), mask=inside)


def around_one(x, weight):
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _around_one[(len(x),)](y, x, weight, x.shape[1], BLOCK=block)
    return y


# The row is in registers: its squares are summed around the mean in a second
# look at them. What is masked must not count: zero less the mean is not zero.


@triton.jit
def _centred(y_ptr, x_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(x_ptr + row * N + columns, mask=inside, other=0.0)
    x = tl.where(inside, x - tl.sum(x, 0) / N, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / N + 1e-5)
    tl.store(y_ptr + row * N + columns, y, mask=inside)


def centred(x):
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _centred[(len(x),)](y, x, x.shape[1], BLOCK=block)
    return y


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.arange(12.0, device=device).view(3, 4)
    print(around_one(x, torch.zeros(4, device=device)))
    print(centred(x))
