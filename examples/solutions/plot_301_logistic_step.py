"""Solutions to the exercises of the page on a training step in one kernel.

They import only PyTorch and Triton once fusebook has decided whether kernels
are interpreted.
"""

import fusebook  # noqa: F401  before triton

import torch
import triton
import triton.language as tl

# 1. log(1 + exp(-|z|)) never overflows. The rest of the loss is z, or zero.


def cross_entropy(z, y):
    return z.clamp(min=0) - z * y + torch.log1p(torch.exp(-z.abs()))


# 2. Two more values stay in registers for all steps.


@triton.jit
def _fit_rolling(
    w_ptr,
    b_ptr,
    x_ptr,
    y_ptr,
    N,
    D,
    steps,
    lr,
    l2,
    mu,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)
    inside = (i < N)[:, None] & (j < D)[None, :]
    at = i[:, None] * D + j[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + j, mask=j < D, other=0.0).to(tl.float32)
    b = tl.load(b_ptr).to(tl.float32)
    v = tl.zeros([BLOCK], tl.float32)
    u = b * 0
    for _ in range(steps):
        z = tl.sum(x * w[None, :], 1) + b
        e = tl.exp(-tl.abs(z))
        p = tl.where(z >= 0, 1.0, e) / (1.0 + e)
        r = tl.where(i < N, (p - y) / N, 0.0)
        v = mu * v - lr * (tl.sum(x * r[:, None], 0) + 2 * l2 * w)
        u = mu * u - lr * tl.sum(r, 0)
        w += v
        b += u
    tl.store(w_ptr + j, w, mask=j < D)
    tl.store(b_ptr, b)


def fit_with_momentum(X, y, w, b, lr, l2, mu, steps):
    (N, D), (w, b) = X.shape, (w.clone(), b.clone())
    rows, block = triton.next_power_of_2(N), triton.next_power_of_2(D)
    _fit_rolling[(1,)](
        w, b, X, y, N, D, steps, lr, l2, mu, ROWS=rows, BLOCK=block
    )
    return w, b


# 3. The weight of a row is loaded together with its target.


@triton.jit
def _step_weighted(
    g_ptr,
    x_ptr,
    y_ptr,
    s_ptr,
    w_ptr,
    b_ptr,
    N,
    D,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)
    inside = (i < N)[:, None] & (j < D)[None, :]
    at = i[:, None] * D + j[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    w = tl.load(w_ptr + j, mask=j < D, other=0.0)
    y = tl.load(y_ptr + i, mask=i < N, other=0.0)
    s = tl.load(s_ptr + i, mask=i < N, other=0.0)
    z = tl.sum(x * w[None, :], 1) + tl.load(b_ptr)
    e = tl.exp(-tl.abs(z.to(tl.float32)))
    p = tl.where(z >= 0, 1.0, e) / (1.0 + e)
    r = tl.where(i < N, s * (p - y) / N, 0.0)
    g = tl.sum(x * r[:, None], 0)
    tl.atomic_add(g_ptr + j, g.to(g_ptr.dtype.element_ty), mask=j < D)
    tl.atomic_add(g_ptr + D, tl.sum(r, 0).to(g_ptr.dtype.element_ty))


def weighted_step(X, y, s, w, b, lr, l2):
    (N, D), rows = X.shape, 16
    g = X.new_zeros(D + 1)
    block = triton.next_power_of_2(D)
    _step_weighted[(triton.cdiv(N, rows),)](
        g, X, y, s, w, b, N, D, ROWS=rows, BLOCK=block
    )
    return w - lr * (g[:D] + 2 * l2 * w), b - lr * g[D]
