"""Solutions to the exercises of the page on launching.

They import only PyTorch and Triton once fusebook has decided whether kernels
are interpreted.
"""

import fusebook  # noqa: F401  before triton

import torch
import triton
import triton.language as tl

# 1. Strides are not part of the shape.


def forgets_strides(first, second):
    kept = {}

    def call(x):
        key = (x.shape, x.stride(), x.dtype)
        if key not in kept:
            kept[key] = x.stride()
        values = torch.exp(torch.as_strided(x, (x.numel(),), (1,)))
        return torch.as_strided(values, x.shape, kept[key])

    call(first)
    return call(second)


# 2. Each address counts: four plans for one shape if each is a multiple of 16
# or not, and more if the key has other remainders.


@triton.jit
def _sum(z_ptr, x_ptr, y_ptr, SIZE, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < SIZE)
    y = tl.load(y_ptr + i, mask=i < SIZE)
    tl.store(z_ptr + i, x + y, mask=i < SIZE)


def _one(x):
    place = x.get_device(), x.data_ptr() % 16
    return (x.shape, x.stride(), x.dtype, *place)


def _plan(x, y):
    SIZE, grid = x.numel(), (triton.cdiv(x.numel(), 1024), 1, 1)

    def by_brackets(z, x, y):
        return _sum[grid](z, x, y, SIZE, BLOCK=1024)

    if not x.is_cuda:
        return by_brackets
    compiled = by_brackets(torch.empty_like(x), x, y)
    known = compiled.function, compiled.packed_metadata, None, None, None
    run, device = compiled.run, x.get_device()

    def launch(z, x, y):
        stream = torch.cuda.current_stream(device).cuda_stream
        run(*grid, stream, *known, z, x, y, SIZE, 1024)

    return launch


_plans = {}


def planned_sum(x, y):
    x, y = x.contiguous(), y.contiguous()
    key = _one(x), _one(y)
    if key not in _plans:
        _plans[key] = _plan(x, y)
    z = torch.empty_like(x)
    _plans[key](z, x, y)
    return z
