"""Solutions to the exercises of the page on Gemm and Concat, each one kernel.

They import from nothing but PyTorch and Triton once fusebook has decided
whether kernels are interpreted.
"""

import fusebook  # noqa: F401  before triton

import torch
import triton
import triton.language as tl

# Both in one: the tiles of both weights are numbered together, whatever their
# widths, and each program looks up its weight, its width and its place. The
# bias is loaded once a tile, and added to the sum in registers.


@triton.jit
def _beside(
    y_ptr,
    x_ptr,
    w0_ptr,
    w1_ptr,
    bias_ptr,
    M,
    N0,
    N1,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    first = tl.cdiv(N0, BN)  # tiles of the first weight
    columns = first + tl.cdiv(N1, BN)
    r = tl.program_id(0) // columns
    c = tl.program_id(0) % columns
    w_ptr = tl.where(c < first, w0_ptr, w1_ptr)
    N = tl.where(c < first, N0, N1)
    start = tl.where(c < first, 0, N0)
    m = r * BM + tl.arange(0, BM)
    n = tl.where(c < first, c, c - first) * BN + tl.arange(0, BN)
    bias = tl.load(bias_ptr + start + n, mask=n < N, other=0).to(tl.float32)
    y = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x_mask = (m < M)[:, None] & (k < K)[None, :]
        w_mask = (k < K)[:, None] & (n < N)[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=x_mask, other=0)
        w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=w_mask, other=0)
        x, w = x.to(tl.float32), w.to(tl.float32)
        y = tl.dot(x, w, y, input_precision="ieee")
    y_mask = (m < M)[:, None] & (n < N)[None, :]
    y_ptrs = y_ptr + m[:, None] * (N0 + N1) + (start + n)[None, :]
    tl.store(y_ptrs, y + bias[None, :], mask=y_mask)


def _launch(x, w0, w1, bias):
    (M, K), N0, N1 = x.shape, w0.shape[1], w1.shape[1]
    y = x.new_empty(M, N0 + N1)
    tiles = triton.cdiv(M, 64) * (triton.cdiv(N0, 64) + triton.cdiv(N1, 64))
    sizes = {"BM": 64, "BN": 64, "BK": 64}
    _beside[(tiles,)](y, x, w0, w1, bias, M, N0, N1, K, **sizes)
    return y


def two_widths(x, w0, w1):
    return _launch(x, w0, w1, x.new_zeros(w0.shape[1] + w1.shape[1]))


def with_bias(x, w0, w1, bias):
    return _launch(x, w0, w1, bias)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = torch.eye(4, device=device), torch.ones(4, 3, device=device)
    print(two_widths(x, w, w[:, :2].contiguous()))
    print(with_bias(x, w, w, torch.arange(6.0, device=device)))
