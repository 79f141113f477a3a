"""Solutions to the exercises of the softmax page, each one kernel.

They import from nothing but PyTorch and Triton once fusebook has decided
whether kernels are interpreted.
"""

import fusebook  # noqa: F401  before triton

import torch
import triton
import triton.language as tl

# In the interpreter a program costs what it costs, however small: few, then.
ROWS = 8


# 1. log(e / total) is x - top - log(total): no exponential is ever inverted.


@triton.jit
def _log_softmax(y_ptr, x_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    live = (rows < M)[:, None]
    inside = live & (columns < N)[None, :]
    at = rows[:, None] * N + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))
    x = tl.where(live, x.to(tl.float32), 0.0)
    shifted = x - tl.max(x, 1)[:, None]
    total = tl.sum(tl.exp(shifted), 1)[:, None]
    tl.store(y_ptr + at, shifted - tl.log(total), mask=inside)


def log_softmax(x):
    M, N = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(N)
    _log_softmax[(triton.cdiv(M, ROWS),)](y, x, M, N, ROWS=ROWS, BLOCK=block)
    return y


# 2. Divide after the maximum has been taken off: the exponent is then never
# positive, and whatever 1/T makes of it underflows to zero, which is right.


@triton.jit
def _with_temperature(
    y_ptr, x_ptr, M, N, T, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    live = (rows < M)[:, None]
    inside = live & (columns < N)[None, :]
    at = rows[:, None] * N + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))
    x = tl.where(live, x.to(tl.float32), 0.0)
    e = tl.exp((x - tl.max(x, 1)[:, None]) / T)
    tl.store(y_ptr + at, e / tl.sum(e, 1)[:, None], mask=inside)


def with_temperature(x, T):
    M, N = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(N)
    grid = (triton.cdiv(M, ROWS),)
    _with_temperature[grid](y, x, M, N, T, ROWS=ROWS, BLOCK=block)
    return y


# 3. A column past the diagonal is masked in the load, so it is never fetched;
# it reads as minus infinity. The store needs the wider mask: the zeros above
# the diagonal must be written, as nobody else does.


@triton.jit
def _causal(y_ptr, x_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    live = (rows < M)[:, None]
    inside = live & (columns < N)
    seen = inside & (columns <= rows[:, None])
    at = rows[:, None] * N + columns
    x = tl.load(x_ptr + at, mask=seen, other=float("-inf"))
    x = tl.where(live, x.to(tl.float32), 0.0)
    e = tl.exp(x - tl.max(x, 1)[:, None])
    tl.store(y_ptr + at, e / tl.sum(e, 1)[:, None], mask=inside)


def causal_softmax(x):
    M, N = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(N)
    _causal[(triton.cdiv(M, ROWS),)](y, x, M, N, ROWS=ROWS, BLOCK=block)
    return y


# 4. The last tile has rows past the end, and nothing told it so: the kernel
# was not even given M.


@triton.jit
def _guarded(y_ptr, x_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    live = (rows < M)[:, None]
    inside = live & (columns < N)[None, :]
    at = rows[:, None] * N + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))
    x = tl.where(live, x, 0.0)
    e = tl.exp(x - tl.max(x, 1)[:, None])
    tl.store(y_ptr + at, e / tl.sum(e, 1)[:, None], mask=inside)


def into(y, x):
    M, N = x.shape
    block = triton.next_power_of_2(N)
    _guarded[(triton.cdiv(M, 8),)](y, x, M, N, ROWS=8, BLOCK=block)
