"""Solutions to the exercises of the page on NumPy code, each one kernel."""

import fusebook  # noqa: F401  before triton

import torch
import triton
import triton.language as tl

# 1. Absolute values instead of squares.


@triton.jit
def _manhattan(l_ptr, x_ptr, c_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + 2 * i, mask=i < n)
    y = tl.load(x_ptr + 2 * i + 1, mask=i < n)
    far0 = tl.abs(x - tl.load(c_ptr)) + tl.abs(y - tl.load(c_ptr + 1))
    far1 = tl.abs(x - tl.load(c_ptr + 2)) + tl.abs(y - tl.load(c_ptr + 3))
    tl.store(l_ptr + i, (far1 < far0).to(l_ptr.dtype.element_ty), mask=i < n)


# 2. The root of the smaller square.


@triton.jit
def _how_far(l_ptr, x_ptr, c_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + 2 * i, mask=i < n).to(tl.float32)
    y = tl.load(x_ptr + 2 * i + 1, mask=i < n).to(tl.float32)
    dx0, dy0 = x - tl.load(c_ptr), y - tl.load(c_ptr + 1)
    dx1, dy1 = x - tl.load(c_ptr + 2), y - tl.load(c_ptr + 3)
    least = tl.minimum(dx0 * dx0 + dy0 * dy0, dx1 * dx1 + dy1 * dy1)
    tl.store(l_ptr + i, tl.sqrt(least), mask=i < n)


def _run(kernel, points, centres):
    found = points.new_empty(len(points))
    grid = (triton.cdiv(len(points), 1024),)
    kernel[grid](found, points, centres, len(points), BLOCK=1024)
    return found


def manhattan(points, centres):
    return _run(_manhattan, points, centres)


def how_far(points, centres):
    return _run(_how_far, points, centres)


if __name__ == "__main__":
    points = torch.tensor([[3.0, 4.0], [9.0, 9.0]])
    points = points.cuda() if torch.cuda.is_available() else points
    centres = points.new_tensor([[0.0, 0.0], [9.0, 8.0]])
    print(manhattan(points, centres), how_far(points, centres))
