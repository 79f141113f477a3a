"""Solutions to the exercises of the page on an optimizer step in one launch.

They import only PyTorch and Triton once fusebook has decided whether kernels
are interpreted.
"""

import fusebook  # noqa: F401  before triton

import torch
import triton
import triton.language as tl

# 1. The decay shrinks the parameter, and the averages do not contain it.


def decoupled(p, g, m, v, t, lr, decay):
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    root = (v / (1 - 0.999**t)).sqrt() + 1e-8
    p = (1 - lr * decay) * p
    return p - lr / (1 - 0.9**t) * m / root, m, v


# 2. The number of chunks is rounded up: none where there is no element.


def pairs(sizes, block):
    counts = [-(-n // block) for n in sizes]
    rows = [(i, c) for i, count in enumerate(counts) for c in range(count)]
    return torch.tensor(rows).view(-1, 2)


# 3. One more element to load, the same for all programs.


@triton.jit
def _clipped(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    norm_ptr,
    limit,
    N,
    keep,
    size,
    root,
    eps,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    factor = limit / tl.load(norm_ptr)
    g = tl.load(g_ptr + i, mask=inside)
    g *= tl.where(factor < 1, factor, 1.0)
    m = 0.9 * tl.load(m_ptr + i, mask=inside) + 0.1 * g
    v = 0.999 * tl.load(v_ptr + i, mask=inside) + 0.001 * g * g
    p = keep * tl.load(p_ptr + i, mask=inside)
    p -= size * m / (tl.sqrt(v) / root + eps)
    tl.store(p_ptr + i, p, mask=inside)


def clipped(p, g, m, v, norm, limit, t, lr):
    p, N = p.clone(), p.numel()
    shared = 1 - lr * 0.1, lr / (1 - 0.9**t), (1 - 0.999**t) ** 0.5, 1e-8
    grid = (triton.cdiv(N, 1024),)
    _clipped[grid](p, g, m, v, norm, limit, N, *shared, BLOCK=1024)
    return p
