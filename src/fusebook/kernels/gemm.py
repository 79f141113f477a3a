"""Matrix products that share their left side: side by side in one output, or as the two halves of SwiGLU.

For x ``[M, K]`` and weights ``w_i`` ``[K, N_i]``, or gate and up ``[K, N]``,

    concat_gemm: y = [x @ w_0, x @ w_1, ...]        [M, N_0 + N_1 + ...]
    swiglu:      y = silu(x @ gate) * (x @ up)      [M, N], with silu(z) = z / (1 + exp(-z))

Fused: every product writes into its own columns of one output, so that nothing is concatenated; of SwiGLU neither
product is written at all. Two products and a concatenation write 2MN each and read 2MN to copy it; SwiGLU one operation
after another writes 4MN more than MN and reads as much. All weights go through one launch, whose programs meet the same
tiles of x in the L2 cache.

Sums are float32. Float32 is multiplied as such, or in TF32 where that is asked for. Where torch's products were faster
when a kind of GPU was tuned, the launchers take them, as they do for float64: each writes into its own columns of one
matrix, and of SwiGLU one kernel does the rest. Limits: the output is contiguous; more than four weights, and weights
whose layouts differ, take several launches into the same output.

Two kernels each. *Tiles*: a fixed number of programs walks over the tiles of the output; tensor descriptors fetch the
tiles of x and of the weights, whose addresses must be multiples of 16 bytes. *Strided*: any strides, by pointers and
masks; a program may take a part of K only, which is what a few rows need, where reading the weights is all the work.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusebook.inputs import rough
from fusebook.kernels._arguments import check_alike, check_tensor
from fusebook.kernels._launch import INTERPRETED, check_device, gpu, launching
from fusebook.op import Cost, Op, Variant

__all__ = ["CONCAT_GEMM", "OPS", "SWIGLU", "concat_gemm", "concat_gemm_eager", "swiglu", "swiglu_eager"]

# The unfused chains --------------------------------------------------------------------------------------------------


def concat_gemm_eager(x: Tensor, *weights: Tensor) -> Tensor:
    """Products side by side, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        ``[M, K]``.
    *weights : torch.Tensor
        ``[K, N_i]``; N is the sum of their widths.

    Returns
    -------
    torch.Tensor
        ``[M, N]``.
    """
    products = [x @ w for w in weights]  # read MK for each weight, read KN, write MN
    return torch.cat(products, 1)  # read MN, write MN


def swiglu_eager(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
    """SwiGLU, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        ``[M, K]``.
    gate, up : torch.Tensor
        ``[K, N]``.
    bias : torch.Tensor, optional
        ``[2, N]``, of the gate and of the other product.

    Returns
    -------
    torch.Tensor
        ``[M, N]``.
    """
    g = x @ gate  # read MK + KN, write MN
    u = x @ up  # read MK + KN, write MN
    if bias is not None:
        g, u = g + bias[0], u + bias[1]  # read 2MN, write 2MN
    s = torch.nn.functional.silu(g)  # read MN, write MN
    return s * u  # read 2MN, write MN


# Kernels -------------------------------------------------------------------------------------------------------------
#
# Up to four weights, w0 to w3, of which COUNT are there; LD is the width of the output. A layout is "row" where the
# columns of a weight lie side by side in memory, "column" where its rows do (the transposed weight of torch.nn.Linear),
# and "any" otherwise. WIDE converts tiles to float32 before they are multiplied, for the interpreter, whose products of
# bfloat16 are wrong. What changes from call to call and aligns nothing is not specialised.


@triton.jit
def _place(tile, ROWS, COLUMNS, GROUP: tl.constexpr):
    """Row and column of a tile. GROUP rows are walked together, column by column: what they share stays in L2."""
    span = GROUP * COLUMNS
    first = tile // span * GROUP
    height = tl.minimum(ROWS - first, GROUP)
    inside = tile % span
    return first + inside % height, inside // height


@triton.jit
def _pick(c, C0, C1, C2, a0, a1, a2, a3, COUNT: tl.constexpr):
    """Of one value for each weight, the one of the weight to which column tile c belongs."""
    a = a0
    if COUNT > 1:
        a = tl.where(c < C0, a, a1)
    if COUNT > 2:
        a = tl.where(c < C1, a, a2)
    if COUNT > 3:
        a = tl.where(c < C2, a, a3)
    return a


@triton.jit
def _ends(N0, N1, N2, N3, BN: tl.constexpr, COUNT: tl.constexpr):
    """The column tiles of the weights, added up."""
    C0 = tl.cdiv(N0, BN)
    C1 = C0
    if COUNT > 1:
        C1 = C0 + tl.cdiv(N1, BN)
    C2 = C1
    if COUNT > 2:
        C2 = C1 + tl.cdiv(N2, BN)
    C3 = C2
    if COUNT > 3:
        C3 = C2 + tl.cdiv(N3, BN)
    return C0, C1, C2, C3


@triton.jit
def _take_over(LATE: tl.constexpr):
    """LATE: this kernel was launched before the one ahead had ended, and touches no memory until it has.

    Then it lets the next kernel be launched as early, which thus finds its place before this one is over.
    """
    if LATE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _store(out_ptr, y, m, n, M, N, LD):
    """A tile of the output; m and n are its rows and columns."""
    at = m.to(tl.int64)[:, None] * LD + n[None, :]  # [BM, BN]; int64: an output may have more than 2**31 elements
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M", "PROGRAMS"])
def _concat_gemm_tiles(
    out_ptr, x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, M, K, N0, N1, N2, N3, XS, S0, S1, S2, S3, LD, PROGRAMS,
    COUNT: tl.constexpr, COLUMN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th tile of the output, from whichever weight it comes."""
    C0, C1, C2, C3 = _ends(N0, N1, N2, N3, BN, COUNT)
    rows = tl.cdiv(M, BM)
    steps = tl.cdiv(K, BK)
    x_tiles = tl.make_tensor_descriptor(x_ptr, [M, K], [XS, 1], [BM, BK])
    # FLAT: the first steps of the next tile are fetched while this one is finished.
    for tile in tl.range(tl.program_id(0), rows * C3, PROGRAMS, flatten=FLAT):
        r, c = _place(tile, rows, C3, GROUP)
        w_ptr = _pick(c, C0, C1, C2, w0_ptr, w1_ptr, w2_ptr, w3_ptr, COUNT)
        N = _pick(c, C0, C1, C2, N0, N1, N2, N3, COUNT)
        S = _pick(c, C0, C1, C2, S0, S1, S2, S3, COUNT)
        n = (c - _pick(c, C0, C1, C2, 0, C0, C1, C2, COUNT)) * BN  # within its weight
        start = _pick(c, C0, C1, C2, 0, N0, N0 + N1, N0 + N1 + N2, COUNT)  # of its weight, in the output
        if COLUMN:
            w_tiles = tl.make_tensor_descriptor(w_ptr, [N, K], [S, 1], [BN, BK])
        else:
            w_tiles = tl.make_tensor_descriptor(w_ptr, [K, N], [S, 1], [BK, BN])
        y = tl.zeros([BM, BN], tl.float32)
        for k in range(steps):
            x = x_tiles.load([r * BM, k * BK])  # [BM, BK]; read MK for each column of tiles, from L2 after the first
            if COLUMN:
                w = w_tiles.load([n, k * BK]).T  # [BK, BN]; read KN for each row of tiles, likewise
            else:
                w = w_tiles.load([k * BK, n])  # [BK, BN]
            if WIDE:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            y = tl.dot(x, w, y, input_precision=PRECISION)
        _store(out_ptr + start, y, r * BM + tl.arange(0, BM), n + tl.arange(0, BN), M, N, LD)  # write MN


@triton.jit(do_not_specialize=["M", "LAST", "PROGRAMS"])
def _concat_gemm_stacked(
    out_ptr, y_tiles, x_tiles, w_tiles, M, K, N, LD, LAST, PROGRAMS, COUNT: tl.constexpr, COLUMN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr,
    BULK: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, LATE: tl.constexpr = False,
):  # fmt: skip
    """As `_concat_gemm_tiles`, of weights that one descriptor describes: its first axis goes from weight to weight."""
    _take_over(LATE)
    rows = tl.cdiv(M, BM)
    columns = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), rows * columns * COUNT, PROGRAMS, flatten=FLAT):
        r, c = _place(tile, rows, columns * COUNT, GROUP)
        which = c // columns
        place = tl.abs(LAST - which)  # LAST is 0, or COUNT - 1 where the last weight has the lowest address
        n = c % columns * BN
        y = tl.zeros([BM, BN], tl.float32)
        for k in range(steps):
            x = x_tiles.load([r * BM, k * BK])  # [BM, BK]; read MK for each column of tiles, from L2 after the first
            if COLUMN:
                w = w_tiles.load([place, n, k * BK]).reshape(BN, BK).T  # [BK, BN]; read KN for each row of tiles
            else:
                w = w_tiles.load([place, k * BK, n]).reshape(BK, BN)  # [BK, BN]
            if WIDE:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            y = tl.dot(x, w, y, input_precision=PRECISION)
        # BULK: the copy engine stores, and cuts off what is out of range; in two halves, a tile needs half the shared
        # memory for it, which leaves room for one more step under way.
        if BULK == 2:
            left, right = y.to(y_tiles.dtype).reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
            y_tiles.store([r * BM, which, n], left.reshape(BM, 1, BN // 2))  # write MN, with the next line
            y_tiles.store([r * BM, which, n + BN // 2], right.reshape(BM, 1, BN // 2))
        elif BULK == 1:
            y_tiles.store([r * BM, which, n], y.to(y_tiles.dtype).reshape(BM, 1, BN))  # write MN
        else:
            start = which.to(tl.int64) * N
            _store(out_ptr + start, y, r * BM + tl.arange(0, BM), n + tl.arange(0, BN), M, N, LD)  # write MN


@triton.jit(do_not_specialize=["M"])
def _concat_gemm_strided(
    out_ptr, parts_ptr, counts_ptr, x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, M, K, N0, N1, N2, N3, LD, XM, XK,
    K0, K1, K2, K3, S0, S1, S2, S3, COUNT: tl.constexpr, LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of the output, or one of SPLIT parts of its sum; the last program to finish adds the parts."""
    C0, C1, C2, C3 = _ends(N0, N1, N2, N3, BN, COUNT)
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    r, c = _place(tile, tl.cdiv(M, BM), C3, GROUP)
    w_ptr = _pick(c, C0, C1, C2, w0_ptr, w1_ptr, w2_ptr, w3_ptr, COUNT)
    N = _pick(c, C0, C1, C2, N0, N1, N2, N3, COUNT)
    start = _pick(c, C0, C1, C2, 0, N0, N0 + N1, N0 + N1 + N2, COUNT)
    m = r * BM + tl.arange(0, BM)  # [BM]
    n = (c - _pick(c, C0, C1, C2, 0, C0, C1, C2, COUNT)) * BN + tl.arange(0, BN)  # [BN]
    k = tl.arange(0, BK)  # [BK]
    # Strides from row to row of a weight and from column to column; one of them is 1 unless the layout is "any".
    if LAYOUT == "row":
        WK = tl.cast(_pick(c, C0, C1, C2, K0, K1, K2, K3, COUNT), tl.int64)
        w_ptrs = w_ptr + k[:, None] * WK + n[None, :]  # [BK, BN]
    elif LAYOUT == "column":
        WK = 1
        WN = tl.cast(_pick(c, C0, C1, C2, S0, S1, S2, S3, COUNT), tl.int64)
        w_ptrs = w_ptr + n[None, :] * WN + k[:, None]
    else:
        WK = tl.cast(_pick(c, C0, C1, C2, K0, K1, K2, K3, COUNT), tl.int64)
        WN = tl.cast(_pick(c, C0, C1, C2, S0, S1, S2, S3, COUNT), tl.int64)
        w_ptrs = w_ptr + n[None, :] * WN + k[:, None] * WK
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * XM + k[None, :] * XK  # [BM, BK]
    share = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    first = part * share
    x_ptrs += first.to(tl.int64) * XK
    w_ptrs += first.to(tl.int64) * WK
    y = tl.zeros([BM, BN], tl.float32)
    for k0 in range(first, tl.minimum(K, first + share), BK):
        there = k < K - k0
        x = tl.load(x_ptrs, mask=(m < M)[:, None] & there[None, :], other=0.0)  # [BM, BK]; read MK, from L2 mostly
        w = tl.load(w_ptrs, mask=there[:, None] & (n < N)[None, :], other=0.0)  # [BK, BN]; read KN, M / BM times
        if WIDE:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        y = tl.dot(x, w, y, input_precision=PRECISION)
        x_ptrs += BK * XK
        w_ptrs += BK * WK
    if SPLIT > 1:
        _store(parts_ptr + part.to(tl.int64) * M * LD + start, y, m, n, M, N, LD)
        tl.debug_barrier()  # all threads have stored before the counter says so
        if tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            y = _sum_of_parts(parts_ptr + start, m, n, M, N, LD, BM, BN, SPLIT)
            _store(out_ptr + start, y, m, n, M, N, LD)
    else:
        _store(out_ptr + start, y, m, n, M, N, LD)  # write MN


@triton.jit
def _sum_of_parts(parts_ptr, m, n, M, N, LD, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """The parts of a tile in the order of K, whoever came last: the same bits in every run."""
    at = m.to(tl.int64)[:, None] * LD + n[None, :]  # [BM, BN]
    mask = (m < M)[:, None] & (n < N)[None, :]
    y = tl.zeros([BM, BN], tl.float32)
    for _ in range(SPLIT):
        # .cg: from L2, where the other programs' parts are; this multiprocessor's L1 may not know of them.
        y += tl.load(parts_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
        at += tl.cast(M, tl.int64) * LD
    return y


@triton.jit
def _gated(g, u, bias_ptr, n, N, BIAS: tl.constexpr):
    """The products of a tile become its output, in registers and in the dtype of the products."""
    if BIAS:
        g += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(g.dtype)[None, :]
        u += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(g.dtype)[None, :]
    return g / (1 + tl.exp(-g)) * u


@triton.jit
def _swiglu_gate(out_ptr, both_ptr, bias_ptr, M, N, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """A tile of the output of SwiGLU, from both products side by side in memory."""
    columns = tl.cdiv(N, BN)
    m = tl.program_id(0) // columns * BM + tl.arange(0, BM)  # [BM]
    n = tl.program_id(0) % columns * BN + tl.arange(0, BN)  # [BN]
    at = both_ptr + m.to(tl.int64)[:, None] * (2 * N) + n[None, :]  # [BM, BN]
    mask = (m < M)[:, None] & (n < N)[None, :]
    g = tl.load(at, mask=mask, other=0.0)  # read MN
    u = tl.load(at + N, mask=mask, other=0.0)  # read MN
    if g.dtype != tl.float64:
        g = g.to(tl.float32)
        u = u.to(tl.float32)
    _store(out_ptr, _gated(g, u, bias_ptr, n, N, BIAS), m, n, M, N, N)  # write MN


@triton.jit(do_not_specialize=["M", "PROGRAMS"])
def _swiglu_tiles(
    out_ptr, y_tiles, x_tiles, gate_tiles, up_tiles, bias_ptr, M, K, N, PROGRAMS, COLUMN: tl.constexpr,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLAT: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th tile of the output: two sums in registers, which share each tile of x."""
    rows = tl.cdiv(M, BM)
    columns = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=FLAT):
        r, c = _place(tile, rows, columns, GROUP)
        n = c * BN
        g = tl.zeros([BM, BN], tl.float32)
        u = tl.zeros([BM, BN], tl.float32)
        for k in range(steps):
            x = x_tiles.load([r * BM, k * BK])  # [BM, BK]
            if COLUMN:
                gate = gate_tiles.load([n, k * BK]).T  # [BK, BN]
                up = up_tiles.load([n, k * BK]).T
            else:
                gate = gate_tiles.load([k * BK, n])
                up = up_tiles.load([k * BK, n])
            if WIDE:
                x = x.to(tl.float32)
                gate = gate.to(tl.float32)
                up = up.to(tl.float32)
            g = tl.dot(x, gate, g, input_precision=PRECISION)
            u = tl.dot(x, up, u, input_precision=PRECISION)
        y = _gated(g, u, bias_ptr, n + tl.arange(0, BN), N, BIAS)  # no traffic: neither product leaves the registers
        if BULK:  # the copy engine stores, and cuts off what is out of range
            y_tiles.store([r * BM, n], y.to(y_tiles.dtype))  # write MN
        else:
            _store(out_ptr, y, r * BM + tl.arange(0, BM), n + tl.arange(0, BN), M, N, N)  # write MN


@triton.jit(do_not_specialize=["M", "LAST", "PROGRAMS"])
def _swiglu_stacked(
    out_ptr, y_tiles, x_tiles, w_tiles, bias_ptr, M, K, N, LAST, PROGRAMS, BIAS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr, BULK: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, SWAP: tl.constexpr = False, LATE: tl.constexpr = False,
):  # fmt: skip
    """As `_swiglu_tiles`, of weights in one descriptor: a tile has columns of both, so one sum suffices.

    SWAP multiplies the transposes, for few rows: Hopper's matrix units take 64 rows at least, but as few as 8 columns.
    There the next kernel is let in at the end only: its programs would take places unevenly, and bandwidth is all.
    """
    if not SWAP:
        _take_over(LATE)
    elif LATE:
        tl.extra.cuda.gdc_wait()
    rows = tl.cdiv(M, BM)
    columns = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=FLAT):
        r, c = _place(tile, rows, columns, GROUP)
        n = c * BN
        if SWAP:
            both = tl.zeros([2 * BN, BM], tl.float32)
        else:
            both = tl.zeros([BM, 2 * BN], tl.float32)
        for k in range(steps):
            x = x_tiles.load([r * BM, k * BK])  # [BM, BK]
            w = w_tiles.load([0, n, k * BK]).reshape(2 * BN, BK)  # [2 BN, BK]
            if WIDE:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            if SWAP:
                both = tl.dot(w, x.T, both, input_precision=PRECISION)
            else:
                both = tl.dot(x, w.T, both, input_precision=PRECISION)
        if SWAP:
            both = both.T
            if LATE:
                tl.extra.cuda.gdc_launch_dependents()
        # A thread holds the same columns of either half, so that nothing is exchanged here.
        first, second = both.reshape(BM, 2, BN).permute(0, 2, 1).split()
        g = tl.where(LAST == 0, first, second)  # the weight with the lower address comes first
        u = tl.where(LAST == 0, second, first)
        y = _gated(g, u, bias_ptr, n + tl.arange(0, BN), N, BIAS)  # no traffic: neither product leaves the registers
        if BULK:  # the copy engine stores, and cuts off what is out of range
            y_tiles.store([r * BM, n], y.to(y_tiles.dtype))  # write MN
        else:
            _store(out_ptr, y, r * BM + tl.arange(0, BM), n + tl.arange(0, BN), M, N, N)  # write MN


@triton.jit(do_not_specialize=["M"])
def _swiglu_strided(
    out_ptr, parts_ptr, counts_ptr, x_ptr, gate_ptr, up_ptr, bias_ptr, M, K, N, XM, XK, GK, GN, UK, UN,
    LAYOUT: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of the output, or one of SPLIT parts of its two sums; the last program to finish adds the parts."""
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    r, c = _place(tile, tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m = r * BM + tl.arange(0, BM)  # [BM]
    n = c * BN + tl.arange(0, BN)  # [BN]
    k = tl.arange(0, BK)  # [BK]
    if LAYOUT == "row":
        GN = 1
        UN = 1
    elif LAYOUT == "column":
        GK = 1
        UK = 1
    wide_k = k.to(tl.int64)[:, None]
    wide_n = n.to(tl.int64)[None, :]
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * XM + k[None, :] * XK  # [BM, BK]
    gate_ptrs = gate_ptr + wide_k * GK + wide_n * GN  # [BK, BN]
    up_ptrs = up_ptr + wide_k * UK + wide_n * UN
    share = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    first = part * share
    x_ptrs += first.to(tl.int64) * XK
    gate_ptrs += first.to(tl.int64) * GK
    up_ptrs += first.to(tl.int64) * UK
    g = tl.zeros([BM, BN], tl.float32)
    u = tl.zeros([BM, BN], tl.float32)
    for k0 in range(first, tl.minimum(K, first + share), BK):
        there = k < K - k0
        mask = there[:, None] & (n < N)[None, :]
        x = tl.load(x_ptrs, mask=(m < M)[:, None] & there[None, :], other=0.0)  # [BM, BK]; read MK, from L2 mostly
        gate = tl.load(gate_ptrs, mask=mask, other=0.0)  # [BK, BN]; read KN, M / BM times
        up = tl.load(up_ptrs, mask=mask, other=0.0)  # [BK, BN]; read KN, M / BM times
        x_ptrs += BK * XK
        gate_ptrs += BK * tl.cast(GK, tl.int64)
        up_ptrs += BK * tl.cast(UK, tl.int64)
        if WIDE:
            x = x.to(tl.float32)
            gate = gate.to(tl.float32)
            up = up.to(tl.float32)
        g = tl.dot(x, gate, g, input_precision=PRECISION)
        u = tl.dot(x, up, u, input_precision=PRECISION)
    if SPLIT > 1:
        _store(parts_ptr + part.to(tl.int64) * M * N, g, m, n, M, N, N)
        _store(parts_ptr + (SPLIT + part.to(tl.int64)) * M * N, u, m, n, M, N, N)
        tl.debug_barrier()  # all threads have stored before the counter says so
        if tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            g = _sum_of_parts(parts_ptr, m, n, M, N, N, BM, BN, SPLIT)
            u = _sum_of_parts(parts_ptr + tl.cast(SPLIT, tl.int64) * M * N, m, n, M, N, N, BM, BN, SPLIT)
            _store(out_ptr, _gated(g, u, bias_ptr, n, N, BIAS), m, n, M, N, N)
    else:
        _store(out_ptr, _gated(g, u, bias_ptr, n, N, BIAS), m, n, M, N, N)  # write MN


# Plans ---------------------------------------------------------------------------------------------------------------

STRATEGIES = ("fused", "views")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST = 4  # weights of one launch
_WITHIN = 0.01  # times that are closer count as equal, and then the kernel is ours


class Plan(NamedTuple):
    """How a product is launched.

    Attributes
    ----------
    kernel : str
        ``"tiles"``, ``"strided"``, or ``"views"``: torch's own products, each into its columns of one matrix.
    bm, bn, bk : int
        The tile of the output, and the step along K.
    group : int
        Rows of tiles that are walked together.
    split : int
        Parts that a sum is cut into; 1 for tiles.
    stages : int
        Steps whose tiles are under way at once.
    warps : int
    flat : bool
        Fetch for the next tile while this one is finished.
    bulk : int
        In how many parts the copy engine stores a tile; 0 where threads store it.
    waves : int
        Programs on each multiprocessor that walk over tiles; 0 for a program a tile.
    swap, late : bool
        Multiply transposes; be launched before the kernel ahead has ended. Of weights in one descriptor only.
    """

    kernel: str
    bm: int
    bn: int
    bk: int
    group: int = 8
    split: int = 1
    stages: int = 3
    warps: int = 8
    flat: bool = False
    bulk: int = 0
    waves: int = 1
    swap: bool = False
    late: bool = False


@functools.cache
def _tuned(name: str) -> dict[str, Any]:
    """What ``python -m fusebook.tune`` found: by capability, by math and layout, by class of shape."""
    file = pathlib.Path(__file__).parent / "tuned" / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def shape_class(M: int, N: int) -> str:
    """The class of an output's shape, whose members share a plan.

    Parameters
    ----------
    M, N : int
        Rows, and the columns of all weights together.

    Returns
    -------
    str
        ``"rows 16"``, ``"rows 32"`` or ``"rows 64"`` up to so many rows. Above, ``"2**k"`` with an odd k for sizes
        M * N from ``2**(k - 1)`` to below ``2**(k + 1)``; the first class, k = 15, takes what is smaller and the last,
        k = 27, what is larger.
    """
    for rows in (16, 32, 64):
        if M <= rows:
            return f"rows {rows}"
    return f"2**{min(27, max(15, (M * N).bit_length() - 1 | 1))}"


def _square_of(shape: str) -> int:
    """The side n of the problem in the middle of a class: n x n, with two weights of n x n."""
    return 2 ** ((int(shape.removeprefix("2**")) - 1) // 2)


def _nearest(shape: str, known: Mapping[str, Any]) -> str | None:
    """The class itself or, of what is larger than all that was tuned, the largest."""
    if shape in known or shape.startswith("rows"):
        return shape if shape in known else None
    smaller = [k for k in known if k.startswith("2**") and _square_of(k) < _square_of(shape)]
    return max(smaller, key=_square_of, default=None)


def _filled(M: int, N: int, plan: Plan, multiprocessors: int) -> float:
    """The share of its rounds over the multiprocessors that a plan spends on the output.

    The rest is lost where tiles hang over the edges, and in the last round, which is seldom full.
    """
    programs = plan.waves * multiprocessors
    rounds = triton.cdiv(triton.cdiv(M, plan.bm) * triton.cdiv(N, plan.bn), programs)
    return M * N / (rounds * programs * plan.bm * plan.bn)


def _math(dtype: torch.dtype, tf32: bool) -> str:
    return "half" if dtype.itemsize == 2 else "float64" if dtype == torch.float64 else "tf32" if tf32 else "float32"


def _gemm_plan(
    name: str,
    sizes: tuple[int, int],
    math: str,
    layout: str,
    aligned: bool,
    hardware: tuple[tuple[int, int] | None, int],
    strategy: str | None = "fused",
) -> Plan:
    """Choose the kernel and its constants.

    Parameters
    ----------
    name : str
        ``"concat_gemm"`` or ``"swiglu"``: the latter keeps two sums, so its tiles are half as wide.
    sizes : tuple of int
        M, and the columns of all weights together.
    math : str
        ``"half"``, ``"tf32"``, ``"float32"`` or ``"float64"``, for which there is no kernel of ours.
    layout : str
        Of the weights: ``"row"``, ``"column"`` or ``"any"``, and behind the former ``" apart"`` or ``" short"`` where
        `_kind` says so.
    aligned : bool
        Whether tensor descriptors can be made.
    hardware : tuple
        The GPU's capability, None for the interpreter, and its multiprocessors.
    strategy : str, optional
        One of `STRATEGIES`; the faster one where None.

    Returns
    -------
    Plan
    """
    if strategy == "views" or math == "float64":
        return Plan("views", 0, 0, 0)
    M, N = sizes
    capability, multiprocessors = hardware
    halves = 2 if name == "swiglu" else 1
    if capability is None:
        # The interpreter's cost is programs times operations. Several tiles and steps even where tests are small, and
        # now one way to store, now the other.
        if aligned:
            swap = name == "swiglu" and M <= 16
            return Plan("tiles", 16 if swap else 64, 64 // halves, 64, group=2, bulk=2 if M % 2 else 1, swap=swap)
        return Plan("strided", 16 if M <= 16 else 64, 256 // halves, 64, group=2, split=2 if M <= 16 else 1)
    found = _tuned(name).get(f"{capability[0]}{capability[1]}", {})
    layout, _, kind = layout.partition(" ") if aligned else ("any", "", "")
    shapes = found.get(f"{math} {layout}", {}) | found.get(f"{math} {layout} {kind}", {})
    if (shape := _nearest(shape_class(M, N), shapes)) is not None:
        constants = dict(shapes[shape])
        views, plan = constants.pop("views"), Plan(**constants)
        if strategy is None and views is not None:
            if plan.kernel == "tiles" and plan.waves and shape.startswith("2**"):
                # Torch has tiles of many sizes, so that its time is taken to follow the work; ours follows the rounds.
                n = _square_of(shape)
                noted = _filled(n, 2 * n // halves, plan, multiprocessors)
                views *= _filled(M, N // halves, plan, multiprocessors) / noted
            if views < 1 - _WITHIN:
                return Plan("views", 0, 0, 0)
        return plan
    if strategy is None and M * N >= 2**21 and (math == "float32" or (math, layout) == ("tf32", "any")):
        return Plan("views", 0, 0, 0)  # without tensor cores, or fed by pointers, ours is no match for torch's
    # Not tuned: at most 96 KiB of shared memory. A step of K that is 128 bytes wide fills whole lines of the cache.
    bk = 64 if math == "half" else 32
    if M <= 64:
        # A tensor core multiplies 16 rows at least; few rows leave room for many weights under way.
        bm = 16 if M <= 16 else 32 if M <= 32 else 64
        return Plan("strided", bm, 64 // halves, bk, split=4, stages=3, warps=4)
    if math == "float32":  # without tensor cores
        return Plan("strided", 64, 64 // halves, 16, stages=2, warps=8)
    kernel = "tiles" if aligned else "strided"
    if M * N < 2**21:  # few tiles: smaller ones, so that every multiprocessor has one
        return Plan(kernel, 64, 64 // halves, bk, stages=3, warps=4)
    return Plan(kernel, 128, 128 // halves, bk, stages=2, warps=8)


# Launchers -----------------------------------------------------------------------------------------------------------

_plan = functools.lru_cache(maxsize=4096)(_gemm_plan)


def _layout(w: Tensor) -> str:
    """Which axis of a weight lies side by side in memory; an axis of length one may count as either."""
    K, N = w.shape
    rows, columns = w.stride()
    if (columns == 1 or N == 1) and (rows >= N or K == 1):
        return "row"
    if (rows == 1 or K == 1) and (columns >= K or N == 1):
        return "column"
    return "any"


def _leading(w: Tensor, layout: str) -> int:
    """The stride of the other axis."""
    K, N = w.shape
    if layout == "row":
        return w.stride(0) if K > 1 else N
    return w.stride(1) if N > 1 else K


def _describable(x: Tensor, layout: str) -> bool:
    """Whether a tensor descriptor can be made: rows that begin at multiples of 16 bytes."""
    if layout == "any":
        return False
    return x.data_ptr() % 16 == 0 and _leading(x, layout) * x.element_size() % 16 == 0


def _with_workspace(device: torch.device, launch: Callable[[], None]) -> None:
    """Launch a kernel that makes descriptors: Triton asks for some memory to keep them in, and torch gives it."""

    def run() -> None:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
        launch()

    contextvars.copy_context().run(run)  # an allocator that the caller has set stays theirs


def _options(plan: Plan, dtype: torch.dtype, math: str) -> dict[str, Any]:
    """The constants that all kernels share."""
    return {
        "BM": plan.bm,
        "BN": plan.bn,
        "BK": plan.bk,
        "GROUP": plan.group,
        "PRECISION": "ieee" if math == "float32" else "tf32",
        "WIDE": INTERPRETED and dtype == torch.bfloat16,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }


def _late(plan: Plan, x: Tensor) -> dict[str, bool]:
    """How a kernel is launched that waits by itself for the one ahead, where the GPU can: Hopper and later."""
    capability, _ = gpu(x.device)
    late = plan.late and capability is not None and capability >= (9, 0)
    return {"LATE": True, "launch_pdl": True} if late else {}


def _programs(plan: Plan, tiles: int, device: torch.device) -> int:
    return min(tiles, plan.waves * gpu(device)[1]) if plan.waves else tiles


def _tiles_of(x: Tensor, layout: str, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of a matrix, or of its transpose where it is stored by columns: the last axis is dense."""
    sizes, tile = (x.shape, [rows, columns]) if layout == "row" else (x.shape[::-1], [columns, rows])
    return TensorDescriptor(x, list(sizes), [_leading(x, layout), 1], tile)


def _stack(weights: Sequence[Tensor], layout: str) -> tuple[int, int] | None:
    """The distance between weights, in elements, where it is always the same, and whether it leads backwards.

    Two weights of one shape are one tensor with three axes, wherever in memory they are.
    """
    first = weights[0]
    if any(w.shape != first.shape or _leading(w, layout) != _leading(first, layout) for w in weights):
        return None
    places = [w.data_ptr() for w in weights]
    distances = {b - a for a, b in itertools.pairwise(places)} or {16}
    distance = distances.pop()
    # Descriptors take strides from 16 bytes up to 2**40.
    if distances or not 16 <= abs(distance) < 2**40:
        return None
    return abs(distance) // first.element_size(), len(weights) - 1 if distance < 0 else 0


def _kind(x: Tensor, weights: Sequence[Tensor], layout: str) -> str:
    """What makes an aligned product slower than others of its size, as a word behind the layout.

    " short": rows that do not begin at multiples of 128 bytes, so that a fetch touches two lines of the cache instead
    of one. " apart": weights that one descriptor does not describe, so that programs make a descriptor for each tile.
    """
    pitches = [_leading(x, "row"), *(_leading(w, layout) for w in weights)]
    if any(pitch * x.element_size() % 128 for pitch in pitches):
        return " short"
    return "" if _stack(weights, layout) else " apart"


def _workspace(plan: Plan, tiles: int, sums: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the parts of sums, and a counter for each tile, at zero."""
    if plan.split == 1:
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        return nothing, nothing
    parts = torch.empty(plan.split * sums, dtype=torch.float32, device=device)
    return parts, torch.zeros(tiles, dtype=torch.int32, device=device)


def _launch_concat(out: Tensor, x: Tensor, weights: Sequence[Tensor], math: str, layout: str, plan: Plan) -> None:
    """Up to four weights of one layout into neighbouring columns: `out`, a part of an output of LD columns."""
    (M, K), LD, N = x.shape, out.stride(0), weights[0].shape[1]
    all_of = [*weights, *[weights[0]] * (_MOST - len(weights))]
    widths = [w.shape[1] for w in all_of]
    tiles = triton.cdiv(M, plan.bm) * sum(triton.cdiv(w.shape[1], plan.bn) for w in weights)
    options = {"COUNT": len(weights), **_options(plan, x.dtype, math)}
    if plan.kernel == "tiles":
        column = layout == "column"
        programs = _programs(plan, tiles, x.device)
        if (stack := _stack(weights, layout)) is None:
            strides = [_leading(w, layout) for w in all_of]
            _with_workspace(
                x.device,
                lambda: _concat_gemm_tiles[(programs,)](
                    out, x, *all_of, M, K, *widths, _leading(x, "row"), *strides, LD, programs,
                    COLUMN=column, FLAT=plan.flat, **options,
                ),
            )  # fmt: skip
            return
        distance, last = stack
        bulk = plan.bulk if out.data_ptr() % 16 == 0 and all(n * out.element_size() % 16 == 0 for n in (LD, N)) else 0
        sizes, tile = ([N, K], [plan.bn, plan.bk]) if column else ([K, N], [plan.bk, plan.bn])
        w = TensorDescriptor(
            weights[last], [len(weights), *sizes], [distance, _leading(weights[0], layout), 1], [1, *tile]
        )
        y = TensorDescriptor(out, [M, len(weights), N], [LD, N, 1], [plan.bm, 1, plan.bn // bulk]) if bulk else None
        _concat_gemm_stacked[(programs,)](
            out, y, _tiles_of(x, "row", plan.bm, plan.bk), w, M, K, N, LD, last, programs,
            COLUMN=column, FLAT=plan.flat, BULK=bulk, **options, **_late(plan, x),
        )  # fmt: skip
        return
    # The parts are laid out as the columns of `out` are, but without its other columns.
    width = sum(w.shape[1] for w in weights)
    if plan.split > 1 and width != LD:
        plan = plan._replace(split=1)
    parts, counts = _workspace(plan, tiles, M * width, x.device)
    steps = [w.stride(i) for i in (0, 1) for w in all_of]
    _concat_gemm_strided[(tiles * plan.split,)](
        out, parts, counts, x, *all_of, M, K, *widths, LD, *x.stride(), *steps,
        LAYOUT=layout, SPLIT=plan.split, **options,
    )  # fmt: skip


def _launch_swiglu(
    out: Tensor, x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, math: str, layout: str, plan: Plan
) -> None:  # fmt: skip
    """One launch."""
    (M, K), N = x.shape, gate.shape[1]
    tiles = triton.cdiv(M, plan.bm) * triton.cdiv(N, plan.bn)
    options = {"BIAS": bias is not None, **_options(plan, x.dtype, math)}
    biases = x if bias is None else bias.contiguous()
    if plan.kernel == "tiles":
        programs = _programs(plan, tiles, x.device)
        bulk = plan.bulk > 0 and N * out.element_size() % 16 == 0
        options |= {"FLAT": plan.flat, "BULK": bulk}
        y = _tiles_of(out, "row", plan.bm, plan.bn) if bulk else None
        x_tiles = _tiles_of(x, "row", plan.bm, plan.bk)
        stack = _stack((gate, up), layout)
        if layout == "column" and stack is not None:
            distance, last = stack
            lower = up if last else gate
            strides = [distance, _leading(lower, layout), 1]
            w = TensorDescriptor(lower, [2, N, K], strides, [2, plan.bn, plan.bk])
            _swiglu_stacked[(programs,)](
                out, y, x_tiles, w, biases, M, K, N, last, programs, SWAP=plan.swap, **options, **_late(plan, x)
            )
            return
        _swiglu_tiles[(programs,)](
            out, y, x_tiles, _tiles_of(gate, layout, plan.bk, plan.bn), _tiles_of(up, layout, plan.bk, plan.bn),
            biases, M, K, N, programs, COLUMN=layout == "column", **options,
        )  # fmt: skip
        return
    parts, counts = _workspace(plan, tiles, 2 * M * N, x.device)
    _swiglu_strided[(tiles * plan.split,)](
        out, parts, counts, x, gate, up, biases, M, K, N, *x.stride(), *gate.stride(), *up.stride(),
        LAYOUT=layout, SPLIT=plan.split, **options,
    )  # fmt: skip


@contextlib.contextmanager
def _torch_in_tf32(on: bool) -> Iterator[None]:
    """Torch's own products of float32 in TF32, or not."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        if before != on:
            matmul.allow_tf32 = on
        yield
    finally:
        if before != on:
            matmul.allow_tf32 = before


def _views(out: Tensor, x: Tensor, weights: Sequence[Tensor], tf32: bool) -> Tensor:
    """Torch's products, each into its own columns: nothing is concatenated, and no kernel of ours is needed."""
    with _torch_in_tf32(tf32):
        for w, columns in zip(weights, out.split([w.shape[1] for w in weights], 1), strict=True):
            torch.mm(x, w, out=columns)
    return out


def _gate_views(out: Tensor, x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, tf32: bool) -> Tensor:
    """SwiGLU where torch's products are faster by more than it costs to write and read them: one kernel more."""
    M, N = out.shape
    both = _views(out.new_empty(M, 2 * N), x, (gate, up), tf32)
    bm, bn = (64, 64) if INTERPRETED else (1, 1024)  # the interpreter's cost is the number of programs
    grid = triton.cdiv(M, bm) * triton.cdiv(N, bn)
    biases = out if bias is None else bias.contiguous()
    _swiglu_gate[(grid,)](out, both, biases, M, N, BIAS=bias is not None, BM=bm, BN=bn)
    return out


def _concat(x: Tensor, weights: Sequence[Tensor], tf32: bool, strategy: str) -> Tensor:
    """Allocate and launch; arguments are valid. An empty `strategy` leaves the choice to the plan."""
    M, K = x.shape
    N = sum(w.shape[1] for w in weights)
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if K == 0:
        return out.zero_()
    math, hardware = _math(x.dtype, tf32), gpu(x.device)
    weights = [w for w in weights if w.shape[1]]
    layouts = [_layout(w) for w in weights]
    fetchable = _layout(x) == "row" and _describable(x, "row")
    start = at = 0
    with launching(x):
        while at < len(weights):
            # The weights that follow and have the same layout, as many as one launch takes.
            end = at + 1
            while end < min(at + _MOST, len(weights)) and layouts[end] == layouts[at]:
                end += 1
            group, layout = weights[at:end], layouts[at]
            aligned = fetchable and all(_describable(w, layout) for w in group)
            kind = _kind(x, group, layout) if aligned else ""
            plan = _plan("concat_gemm", (M, N), math, layout + kind, aligned, hardware, strategy or None)
            width = sum(w.shape[1] for w in group)
            columns = out.narrow(1, start, width)
            if plan.kernel == "views":
                _views(columns, x, group, tf32)
            else:
                _launch_concat(columns, x, group, math, layout, plan)
            start, at = start + width, end
    return out


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, tf32: bool, strategy: str) -> Tensor:
    """Allocate and launch; arguments are valid. An empty `strategy` leaves the choice to the plan."""
    (M, K), N = x.shape, gate.shape[1]
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    math = _math(x.dtype, tf32)
    layout = _layout(gate) if _layout(gate) == _layout(up) else "any"
    aligned = _layout(x) == "row" and all(_describable(t, s) for t, s in ((x, "row"), (gate, layout), (up, layout)))
    aligned = aligned and K > 0  # a descriptor has no empty axis
    plan = _plan("swiglu", (M, 2 * N), math, layout, aligned, gpu(x.device), strategy or None)
    with launching(x):
        if plan.kernel == "views":
            _gate_views(out, x, gate, up, bias, tf32)
        else:
            _launch_swiglu(out, x, gate, up, bias, math, layout, plan)
    return out


_concat_op = torch.library.custom_op(
    "fusebook::concat_gemm",
    _concat,
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, bool tf32, str strategy) -> Tensor",
)
_swiglu_op = torch.library.custom_op(
    "fusebook::swiglu",
    _swiglu,
    mutates_args=(),
    schema="(Tensor x, Tensor gate, Tensor up, Tensor? bias, bool tf32, str strategy) -> Tensor",
)


@_concat_op.register_fake
def _(x: Tensor, weights: Sequence[Tensor], tf32: bool, strategy: str) -> Tensor:
    return x.new_empty(x.shape[0], sum(w.shape[1] for w in weights))


@_swiglu_op.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, tf32: bool, strategy: str) -> Tensor:
    return x.new_empty(x.shape[0], gate.shape[1])


def _keep_for_concat(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, *_ = inputs
    ctx.save_for_backward(x, *weights)


def _gradients_of_concat(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Two products of torch's for each weight."""
    x, *weights = ctx.saved_tensors
    parts = dy.split([w.shape[1] for w in weights], 1)
    for_x = sum(part @ w.mT for part, w in zip(parts, weights, strict=True)) if ctx.needs_input_grad[0] else None
    return for_x, [x.mT @ part for part in parts], None, None


def _keep_for_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gate, up, bias, *_ = inputs
    ctx.save_for_backward(x, gate, up, bias)


def _gradients_of_swiglu(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """The two products once more, since neither was kept; then torch's products of their gradients."""
    x, gate, up, bias = ctx.saved_tensors
    g, u = x @ gate, x @ up
    if bias is not None:
        g, u = g + bias[0], u + bias[1]
    s = torch.sigmoid(g)
    for_u = dy * g * s
    for_g = dy * u * s * (1 + g * (1 - s))
    for_bias = None if bias is None else torch.stack([for_g.sum(0), for_u.sum(0)])
    return for_g @ gate.mT + for_u @ up.mT, x.mT @ for_g, x.mT @ for_u, for_bias, None, None


_concat_op.register_autograd(_gradients_of_concat, setup_context=_keep_for_concat)
_swiglu_op.register_autograd(_gradients_of_swiglu, setup_context=_keep_for_swiglu)


def _direct(*tensors: Tensor) -> bool:
    """Whether the kernels can be launched at once, which saves a small call the time of torch's dispatcher.

    Not where a gradient is recorded, the call is traced or transformed, or a tensor is a stand-in without memory.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or any(type(t) not in (Tensor, torch.nn.Parameter) or t.device.type not in ("cpu", "cuda") for t in tensors)
        or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )


def _checked(name: str, x: Any, weights: Sequence[Any], words: Sequence[str], tf32: Any, strategy: Any) -> bool:
    """Validate what both operators take; return whether float32 is multiplied in TF32."""
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(
            f"{name}: expected strategy to be None or one of {', '.join(STRATEGIES)}, got {strategy!r}; None chooses"
        )
    check_tensor(name, "x", x, _DTYPES)
    if x.dim() == 0:
        raise ValueError(f"{name}: expected x of shape [..., K], got a single number; give it an axis")
    K = x.shape[-1]
    for what, w in zip(words, weights, strict=True):
        check_tensor(name, what, w, _DTYPES)
        check_alike(name, what, w, "x", x)
        if w.dim() != 2 or w.shape[0] != K:
            raise ValueError(
                f"{name}: expected {what} of shape [{K}, N], since x has {K} columns, got {tuple(w.shape)}; transpose "
                "or slice it"
            )
    if tf32 is not None and not isinstance(tf32, bool):
        raise TypeError(f"{name}: expected tf32 to be True, False or None, got {tf32!r}; None follows torch's setting")
    if x.dtype == torch.float64 and strategy == "fused":
        raise TypeError(
            f"{name}: expected float16, bfloat16 or float32 for the strategy 'fused', got torch.float64; leave the "
            "strategy at None, which multiplies float64 by torch's products"
        )
    if x.device.type in ("cpu", "cuda"):  # a stand-in on another device is only asked for its shape
        check_device(name, x)
    if x.dtype != torch.float32:
        return False
    return bool(torch.backends.cuda.matmul.allow_tf32 if tf32 is None else tf32)


def _flat(x: Tensor) -> Tensor:
    """All axes but the last as one."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def concat_gemm(
    x: Tensor, weights: Sequence[Tensor], *, tf32: bool | None = None, strategy: str | None = None
) -> Tensor:
    """Products of one matrix with several, side by side in one output; nothing is concatenated.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., K]``, float16, bfloat16, float32 or float64, on a CUDA device (or on the CPU where Triton interprets).
    weights : sequence of torch.Tensor
        ``[K, N_i]`` each, of any widths and strides, of the dtype and on the device of `x`. Neither rows nor columns
        that lie side by side in memory are copied, so ``linear.weight.T`` is taken as it is.
    tf32 : bool, optional
        Whether float32 is multiplied in TF32, with ten bits of mantissa. ``torch.backends.cuda.matmul.allow_tf32``
        where None. Other dtypes do not ask.
    strategy : str, optional
        ``"fused"``: one launch of Fusebook's kernel, which float64 does not have. ``"views"``: a product of torch's for
        each weight, each into its own columns of the output. Where None, the one that was faster for such sizes when
        this kind of GPU was tuned.

    Returns
    -------
    torch.Tensor
        ``[..., N_0 + N_1 + ...]``, contiguous, of the dtype of `x`. The fused kernel's sums are float32, rounded once.

    Raises
    ------
    TypeError
        For arguments that are no dense tensors, other dtypes, dtypes that differ, and float64 where the fused kernel is
        asked for.
    ValueError
        For no weights, shapes that do not match, tensors on different devices, an unknown strategy.

    Notes
    -----
    Up to four neighbouring weights of one layout share a launch; more take further launches into the same output.
    Tensor descriptors need addresses and strides that are multiples of 16 bytes; where they are not, a slower kernel
    takes over. Works under `torch.compile`. Differentiable: gradients are torch's products, which follow
    ``torch.backends.cuda.matmul.allow_tf32`` whatever `tf32` was.

    Examples
    --------
    >>> import fusebook, torch
    >>> x, w = torch.randn(8, 64, device="cuda"), torch.randn(64, 96, device="cuda")  # doctest: +SKIP
    >>> fusebook.concat_gemm(x, [w, w[:, :32]]).shape  # doctest: +SKIP
    torch.Size([8, 128])
    """
    name = "concat_gemm"
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence):
        raise TypeError(
            f"{name}: expected weights to be a sequence of tensors, got {type(weights).__name__}; pass a list"
        )
    if not weights:
        raise ValueError(f"{name}: expected one weight at least, got none; pass a list of matrices [K, N]")
    fast = _checked(name, x, weights, [f"weights[{i}]" for i in range(len(weights))], tf32, strategy)
    call = _concat if _direct(x, *weights) else _concat_op
    out = call(_flat(x), list(weights), fast, strategy or "")
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])


def swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    bias: Tensor | None = None,
    *,
    tf32: bool | None = None,
    strategy: str | None = None,
) -> Tensor:
    """SwiGLU of two products, ``silu(x @ gate) * (x @ up)``, of which neither is ever written to memory.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., K]``, float16, bfloat16, float32 or float64, on a CUDA device (or on the CPU where Triton interprets).
    gate, up : torch.Tensor
        ``[K, N]``, of any strides, of the dtype and on the device of `x`.
    bias : torch.Tensor, optional
        ``[2, N]``: what is added to the gate's product, and to the other one.
    tf32 : bool, optional
        As in `concat_gemm`.
    strategy : str, optional
        ``"fused"``: one launch of Fusebook's kernel, which float64 does not have. ``"views"``: torch's two products,
        written side by side after all, and one kernel that reads them. Where None, half types are fused, so that
        products are never rounded; float32, in TF32 or not, takes the one that was faster for such sizes when this kind
        of GPU was tuned.

    Returns
    -------
    torch.Tensor
        ``[..., N]``, contiguous, of the dtype of `x`. Biases, silu and the last product are float32 for all dtypes but
        float64; fused, the sums are float32 as well, and all is rounded once.

    Raises
    ------
    TypeError
        For arguments that are no dense tensors, other dtypes, dtypes that differ, and float64 where the fused kernel is
        asked for.
    ValueError
        For shapes that do not match, tensors on different devices, an unknown strategy.

    Notes
    -----
    Weights that differ in layout, or that no tensor descriptor describes, take a slower kernel, as in `concat_gemm`.
    Works under `torch.compile`. Differentiable: the backward pass computes the two products again instead of keeping
    them, and all its products are torch's, which follow ``torch.backends.cuda.matmul.allow_tf32`` whatever `tf32` was.

    Examples
    --------
    >>> import fusebook, torch
    >>> layer = torch.nn.Linear(64, 2 * 96, device="cuda")  # doctest: +SKIP
    >>> gate, up = layer.weight.T.chunk(2, 1)  # doctest: +SKIP
    >>> fusebook.swiglu(torch.randn(8, 64, device="cuda"), gate, up).shape  # doctest: +SKIP
    torch.Size([8, 96])
    """
    name = "swiglu"
    fast = _checked(name, x, (gate, up), ("gate", "up"), tf32, strategy)
    if up.shape != gate.shape:
        raise ValueError(
            f"{name}: expected up of shape {tuple(gate.shape)} as gate has, got {tuple(up.shape)}; slice one of them"
        )
    if bias is not None:
        check_tensor(name, "bias", bias, _DTYPES)
        check_alike(name, "bias", bias, "x", x)
        if bias.shape != (2, gate.shape[1]):
            raise ValueError(
                f"{name}: expected bias of shape (2, {gate.shape[1]}), a row for gate and one for up, got "
                f"{tuple(bias.shape)}; stack the two"
            )
    tensors = (x, gate, up) if bias is None else (x, gate, up, bias)
    call = _swiglu if _direct(*tensors) else _swiglu_op
    out = call(_flat(x), gate, up, bias, fast, strategy or "")
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])


# Tuning --------------------------------------------------------------------------------------------------------------


def classes(name: str) -> tuple[tuple[str, str, str], ...]:
    """The classes of problems that have a plan of their own: math, layout of the weights and shape.

    Parameters
    ----------
    name : str
        ``"concat_gemm"`` or ``"swiglu"``.

    Returns
    -------
    tuple of tuple of str
        The layout ``"any"`` stands for what no descriptor describes; `_kind` says what a second word means.
    """
    rows = tuple(f"rows {n}" for n in (16, 32, 64))
    sizes = tuple(f"2**{n}" for n in range(15, 29, 2))
    found = [("half", layout, shape) for layout in ("row", "column") for shape in rows + sizes]
    found += [("half", "any", shape) for shape in (*rows, *sizes[:5])]
    if name == "concat_gemm":  # in half types SwiGLU has nothing to choose
        kinds = ("row apart", "row short", "column apart", "column short")
        found += [("half", layout, shape) for layout in kinds for shape in sizes[3:]]
    found += [("tf32", layout, shape) for layout in ("row", "column") for shape in sizes[1:6]]
    found += [("float32", layout, shape) for layout in ("row", "column") for shape in sizes[1:5]]
    return tuple(found)


def candidates(name: str, math: str, layout: str, shape: str) -> tuple[Plan, ...]:
    """The plans that tuning tries for a class of problems.

    Parameters
    ----------
    name : str
        ``"concat_gemm"`` or ``"swiglu"``.
    math, layout, shape : str
        Of `classes`.

    Returns
    -------
    tuple of Plan
    """

    def tiles(bm: int, bn: int, bk: int, stages: int, warps: int, **more: Any) -> Plan:
        return Plan("tiles", bm, bn, bk, stages=stages, warps=warps, **more)

    def strided(bm: int, bn: int, bk: int, stages: int, warps: int, split: int = 1) -> Plan:
        return Plan("strided", bm, bn, bk, stages=stages, warps=warps, split=split)

    plans: list[Plan]
    order, _, kind = layout.partition(" ")
    if shape.startswith("rows"):
        bm = int(shape.split()[1])
        steps = ((32, 128, 3), (32, 128, 4), (32, 64, 6), (64, 128, 3), (64, 64, 4))
        plans = [strided(bm, bn, bk, stages, 4, split) for bn, bk, stages in steps for split in (1, 2)]
        if bm == 64 and order != "any":
            plans += [tiles(64, 64, 64, 4, 4, waves=0), tiles(64, 32, 128, 4, 4, waves=0)]
        if name == "swiglu" and order == "column":
            turned = ((64, 128, 3), (64, 128, 2), (64, 256, 2), (32, 256, 2), (32, 128, 3), (128, 128, 3), (128, 64, 4))
            plans += [tiles(bm, bn, bk, stages, 4, waves=0, swap=True, late=True) for bn, bk, stages in turned]
    elif math == "float32":  # no tensor cores
        plans = [strided(128, 64, 16, 3, 8), strided(64, 64, 16, 2, 4), strided(128, 128, 16, 3, 8),
                 strided(32, 64, 32, 3, 4)]  # fmt: skip
    elif order == "any":
        plans = [strided(128, 256, 64, 3, 8), strided(128, 128, 64, 3, 8), strided(64, 128, 64, 3, 4),
                 strided(64, 64, 64, 4, 4), strided(64, 64, 128, 3, 4)]  # fmt: skip
    elif int(shape.removeprefix("2**")) <= 21:  # few tiles: a program each, and small ones
        few = ((64, 32, 256, 2, 4), (64, 32, 128, 3, 4), (64, 64, 128, 3, 4), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4),
               (64, 256, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 4, 4), (128, 128, 64, 4, 8))  # fmt: skip
        plans = [tiles(*sizes, waves=0, late=True) for sizes in few]
        plans += [tiles(64, 64, 128, 3, 4, waves=0, late=True, bulk=1)]
        plans += [tiles(128, 128, 64, 4, 8, waves=0, late=True, bulk=bulk) for bulk in (1, 2)]
        plans += [strided(64, 32, 64, 5, 4)]
    else:
        plans = [tiles(128, 256, 64, 4, 8, group=group, flat=True, bulk=2, late=True) for group in (8, 16)]
        plans += [tiles(128, 256, 64, 3, 8, group=group, flat=True, bulk=1, late=True) for group in (8, 16)]
        plans += [tiles(128, 256, 64, 4, 8, group=16, flat=flat, late=True) for flat in (False, True)]
        plans += [tiles(128, 128, 64, 4, 8, waves=0, late=True)]
    if math == "tf32":  # elements of twice the size
        plans = [plan._replace(bk=plan.bk // 2) for plan in plans]
    if name == "swiglu":  # two sums, and one store
        plans = [plan._replace(bn=plan.bn // 2, bulk=min(plan.bulk, 1)) for plan in plans]
    if kind == "apart" or (name == "swiglu" and order == "row"):  # no kernel of these is launched late
        plans = [plan._replace(bulk=0 if kind else plan.bulk, late=False) for plan in plans]
    return tuple(dict.fromkeys(plans))


def problem(math: str, layout: str, shape: str, device: torch.device) -> tuple[Tensor, ...]:
    """Inputs in the middle of a class, to tune on.

    Parameters
    ----------
    math, layout, shape : str
        Of `classes`.
    device : torch.device

    Returns
    -------
    tuple of torch.Tensor
        x and two weights.
    """
    dtype = torch.bfloat16 if math == "half" else torch.float32
    if shape.startswith("rows"):
        M, K, N = int(shape.split()[1]), 4096, 11008
    else:
        M = K = N = _square_of(shape)
    order, _, kind = layout.partition(" ")
    if order == "any":
        K, N = K - 3, N - 3
    elif kind == "short":
        K, N = K - 8, N - 8
    widths = (N + N // 4, N - N // 4) if kind == "apart" else (N, N)
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    weights = [draw(width, K).T if order == "column" else draw(K, width) for width in widths]
    return draw(M, K), *weights


def attempt(name: str, math: str, inputs: Sequence[Tensor], plan: Plan | None) -> Tensor | None:
    """One call by a plan, or by torch's products where None.

    Parameters
    ----------
    name : str
        ``"concat_gemm"`` or ``"swiglu"``.
    math : str
        Of `classes`.
    inputs : sequence of torch.Tensor
        Of `problem`.
    plan : Plan, optional

    Returns
    -------
    torch.Tensor or None
        None where torch's way is no choice: SwiGLU in half types, whose products it would round.
    """
    x, *weights = inputs
    layout = _layout(weights[0])
    if name == "swiglu":
        if plan is None and math == "half":
            return None
        out = x.new_empty(len(x), weights[0].shape[1])
        gate, up = weights
        if plan is None:
            return _gate_views(out, x, gate, up, None, math == "tf32")
        _launch_swiglu(out, x, gate, up, None, math, layout, plan)
        return out
    out = x.new_empty(len(x), sum(w.shape[1] for w in weights))
    if plan is None:
        return _views(out, x, weights, math == "tf32")
    _launch_concat(out, x, weights, math, layout, plan)
    return out


# The cards -----------------------------------------------------------------------------------------------------------


def _weight(rng: torch.Generator, K: int, N: int, dtype: torch.dtype, scale: float, columns: bool) -> Tensor:
    shape = (N, K) if columns else (K, N)
    w = torch.randn(shape, generator=rng, dtype=dtype, device=rng.device) * scale
    return w.T if columns else w


def _make_concat(rng: torch.Generator, dtype: torch.dtype, *, M: int, K: int, N: int, weights: str) -> tuple[Any, ...]:
    widths = {"two": (N, N), "columns": (N, N), "uneven": (N, N // 16 * 8), "ragged": (N, N // 2 + 1, 1)}[weights]
    # A 16th: a power of two changes no digit, and rows of x that lie far from zero stay within float16.
    made = [_weight(rng, K, width, dtype, 1 / 16, weights == "columns") for width in widths]
    return rough(rng, (M, K), dtype), *made


def _width(N: int, weights: str) -> int:
    return {"two": 2 * N, "columns": 2 * N, "uneven": N + N // 16 * 8, "ragged": N + N // 2 + 2}[weights]


def _cost_concat(itemsize: int, *, M: int, K: int, N: int, weights: str) -> Cost:
    W = _width(N, weights)
    return Cost(read=(M * K + K * W) * itemsize, write=M * W * itemsize, flop=2 * M * K * W)


def _cost_two(itemsize: int, *, M: int, K: int, N: int, weights: str) -> Cost:
    # x for each weight; the products once more on their way into the concatenation.
    W, count = _width(N, weights), 3 if weights == "ragged" else 2
    return Cost(
        read=(count * M * K + K * W + M * W) * itemsize, write=2 * M * W * itemsize, flop=2 * M * K * W
    )  # fmt: skip


def _cost_cat(itemsize: int, *, M: int, K: int, N: int, weights: str) -> Cost:
    # The weights are read, written side by side, and read again.
    W = _width(N, weights)
    return Cost(read=(M * K + 2 * K * W) * itemsize, write=(M * W + K * W) * itemsize, flop=2 * M * K * W)


def _cost_views(itemsize: int, *, M: int, K: int, N: int, weights: str) -> Cost:
    W, count = _width(N, weights), 3 if weights == "ragged" else 2
    return Cost(read=(count * M * K + K * W) * itemsize, write=M * W * itemsize, flop=2 * M * K * W)


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """One weight of several, in the layout that they have."""
    if all(_layout(w) == "column" for w in weights):
        return torch.cat([w.T for w in weights]).T
    return torch.cat(list(weights), 1)


def _cat_one(x: Tensor, *weights: Tensor) -> Tensor:
    return x @ _side_by_side(weights)


def _pack(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    return x, _side_by_side(weights)


def _packed(x: Tensor, packed: Tensor) -> Tensor:
    return x @ packed


def _in_views(x: Tensor, *weights: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], sum(w.shape[1] for w in weights))
    for w, columns in zip(weights, out.split([w.shape[1] for w in weights], 1), strict=True):
        torch.mm(x, w, out=columns)
    return out


def _in_tf32(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same with float32 in TF32, as torch multiplies where its setting allows it."""

    @functools.wraps(function)
    def run(x: Tensor, *rest: Any) -> Any:
        _needs_float32(x)
        with _torch_in_tf32(True):
            return function(x, *rest)

    return run


def _needs_float32(x: Tensor) -> None:
    if x.dtype in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"TF32 is a way to multiply float32, got {str(x.dtype)[6:]}")


@functools.cache
def _compiled(function: Any, mode: str | None = None) -> Any:
    # For one shape at a time: what a reader gets from the decorator, at its best.
    return torch.compile(function, dynamic=False, mode=mode)


def _torch_compile(x: Tensor, *weights: Tensor) -> Tensor:
    return _compiled(concat_gemm_eager)(x, *weights)


def _max_autotune(x: Tensor, *weights: Tensor) -> Tensor:
    # Its CUDA graphs are left out: they copy inputs and outputs, and every way here can be captured in one.
    return _compiled(concat_gemm_eager, "max-autotune-no-cudagraphs")(x, *weights)


def _fusebook(strategy: str | None, tf32: bool = False) -> Callable[..., Tensor]:
    def run(x: Tensor, *weights: Tensor) -> Tensor:
        if tf32:
            _needs_float32(x)
        return concat_gemm(x, weights, tf32=tf32, strategy=strategy)

    return run


def _onnx_graph(dtype: torch.dtype, nodes: Sequence[Any], names: Sequence[str]) -> Any:
    """A graph of matrices: inputs by name, and the output y."""
    from onnx import TensorProto, helper

    kinds = {
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.bfloat16: TensorProto.BFLOAT16,
    }
    shaped = [helper.make_tensor_value_info(name, kinds[dtype], [None, None]) for name in (*names, "y")]
    graph = helper.make_graph(nodes, "gemm", shaped[:-1], shaped[-1:])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


def _onnx_concat(one: bool, tf32: bool) -> Callable[..., tuple[Any]]:
    """The two graphs of the question: two Gemm and a Concat, or a Concat and one Gemm."""

    def prepare(x: Tensor, *weights: Tensor) -> tuple[Any]:
        from onnx import helper

        from fusebook.onnx import Graph

        if tf32:
            _needs_float32(x)
        if x.dtype == torch.bfloat16:
            raise NotImplementedError("the graphs are compared in float32 and float16, as where they come from")
        if len(weights) != 2 or any(not w.is_contiguous() for w in weights) or 0 in (*x.shape, *weights[0].shape):
            raise NotImplementedError("these graphs take two contiguous weights, and nothing empty")
        if one:
            nodes = [
                helper.make_node("Concat", ["w0", "w1"], ["w"], axis=1),
                helper.make_node("Gemm", ["x", "w"], ["y"]),
            ]
        else:
            nodes = [
                helper.make_node("Gemm", ["x", "w0"], ["y0"]),
                helper.make_node("Gemm", ["x", "w1"], ["y1"]),
                helper.make_node("Concat", ["y0", "y1"], ["y"], axis=1),
            ]
        inputs = {"x": x, "w0": weights[0], "w1": weights[1]}
        graph = Graph(_onnx_graph(x.dtype, nodes, list(inputs)), device=x.device, tf32=tf32)
        out = x.new_empty(x.shape[0], sum(w.shape[1] for w in weights))
        return (graph.bind(inputs, {"y": out}),)

    return prepare


def _onnx_run(bound: Any) -> Tensor:
    return bound()["y"]


_ORT = ("cuda", "onnxruntime", "onnx")


def _square(n: int, weights: str = "two") -> dict[str, int | str]:
    return {"M": n, "K": n, "N": n, "weights": weights}


CONCAT_GEMM = Op(
    name="concat_gemm",
    reference=concat_gemm_eager,
    make=_make_concat,
    cost=_cost_concat,
    variants={
        "two + cat": Variant(concat_gemm_eager, cost=_cost_two, needs=()),
        "cat + one": Variant(_cat_one, cost=_cost_cat, needs=()),
        "packed": Variant(_packed, needs=(), prepare=_pack),
        "views": Variant(_in_views, cost=_cost_views, needs=()),
        "torch.compile": Variant(_torch_compile, needs=(), recompiles=True),
        "max-autotune": Variant(_max_autotune, recompiles=True),
        "fusebook": Variant(_fusebook("fused"), needs=()),
        "fusebook (chosen)": Variant(_fusebook(None), needs=()),
        "ORT two + Concat": Variant(_onnx_run, cost=_cost_two, needs=_ORT, prepare=_onnx_concat(False, False)),
        "ORT Concat + one": Variant(_onnx_run, cost=_cost_cat, needs=_ORT, prepare=_onnx_concat(True, False)),
        "two + cat, TF32": Variant(_in_tf32(concat_gemm_eager), cost=_cost_two, math="tf32"),
        "packed, TF32": Variant(_in_tf32(_packed), prepare=_pack, math="tf32"),
        "views, TF32": Variant(_in_tf32(_in_views), cost=_cost_views, math="tf32"),
        "fusebook, TF32": Variant(_fusebook("fused", True), needs=(), math="tf32"),
        "fusebook (chosen), TF32": Variant(_fusebook(None, True), needs=(), math="tf32"),
        "ORT two + Concat, TF32": Variant(
            _onnx_run, cost=_cost_two, needs=_ORT, prepare=_onnx_concat(False, True), math="tf32"
        ),
        "ORT Concat + one, TF32": Variant(
            _onnx_run, cost=_cost_cat, needs=_ORT, prepare=_onnx_concat(True, True), math="tf32"
        ),
    },
    configs={
        "small": tuple(_square(n) for n in (256, 512, 1024)),
        "medium": tuple(_square(n) for n in (2048, 4096)),
        "large": (_square(8192),),
        # The feed-forward layers of Llama 2 7B and Llama 3 8B, by columns as torch.nn.Linear keeps them.
        "llama": (
            {"M": 4096, "K": 4096, "N": 11008, "weights": "columns"},
            {"M": 8192, "K": 4096, "N": 14336, "weights": "columns"},
        ),
        # Rows that begin anywhere; tiles that fill their rounds badly, with rows that begin amid a line of the cache
        # and with others; the weights of torch.nn.Linear; widths that differ.
        "odd": (_square(781), _square(3000), _square(3072), _square(2048, "columns"), _square(4096, "uneven")),
        # What takes seconds to compile, where it is compared.
        "compiled": tuple(_square(n) for n in (256, 1024, 4096)),
        "decode": tuple({"M": M, "K": 4096, "N": 11008, "weights": "columns"} for M in (1, 16, 64)),
    },
    # One of everything; few rows, nothing aligned, widths that differ, and a sum that is cut in parts; descriptors with
    # several tiles and steps, of rows and of columns; widths that differ but are aligned; no rows; nothing to add.
    edges=(
        {"M": 1, "K": 1, "N": 1, "weights": "two"},
        {"M": 7, "K": 150, "N": 65, "weights": "ragged"},
        {"M": 100, "K": 96, "N": 72, "weights": "two"},
        {"M": 65, "K": 40, "N": 72, "weights": "columns"},
        {"M": 70, "K": 64, "N": 80, "weights": "uneven"},
        {"M": 0, "K": 4, "N": 4, "weights": "two"},
        {"M": 4, "K": 0, "N": 4, "weights": "two"},
    ),
    dtypes=(torch.float32, torch.bfloat16),  # each kernel compiles for seconds; float16 has tests of its own
)


def _make_swiglu(rng: torch.Generator, dtype: torch.dtype, *, M: int, K: int, N: int) -> tuple[Tensor, ...]:
    # Products of a few units, where silu bends. Weights as torch.nn.Linear keeps them.
    scale = 2.0 ** -round(math.log2(max(1, K)) / 2)
    return rough(rng, (M, K), dtype) / 64, *(_weight(rng, K, N, dtype, scale, True) for _ in range(2))


def _reference_swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    g = x @ gate
    return g * torch.sigmoid(g) * (x @ up)


def _cost_swiglu(itemsize: int, *, M: int, K: int, N: int) -> Cost:
    # Beside the products, an element of the output costs an exponential, an addition, a division and a product.
    return Cost(read=(M * K + 2 * K * N) * itemsize, write=M * N * itemsize, flop=4 * M * K * N + 4 * M * N)


def _cost_swiglu_eager(itemsize: int, *, M: int, K: int, N: int) -> Cost:
    least = _cost_swiglu(itemsize, M=M, K=K, N=N)
    return Cost(least.read + (M * K + 3 * M * N) * itemsize, least.write + 3 * M * N * itemsize, least.flop)


def _cost_swiglu_written(itemsize: int, *, M: int, K: int, N: int) -> Cost:
    # One product of twice the columns, written and read again by one kernel that does the rest.
    least = _cost_swiglu(itemsize, M=M, K=K, N=N)
    return Cost(least.read + 2 * M * N * itemsize, least.write + 2 * M * N * itemsize, least.flop)


def _cost_swiglu_packed(itemsize: int, *, M: int, K: int, N: int) -> Cost:
    # As eager, but x is read by one product.
    own = _cost_swiglu_eager(itemsize, M=M, K=K, N=N)
    return Cost(own.read - M * K * itemsize, own.write, own.flop)


def _cost_swiglu_two(itemsize: int, *, M: int, K: int, N: int) -> Cost:
    # Both products written and read again by one kernel; x is read by either.
    own = _cost_swiglu_written(itemsize, M=M, K=K, N=N)
    return Cost(own.read + M * K * itemsize, own.write, own.flop)


def _swiglu_packed(x: Tensor, packed: Tensor) -> Tensor:
    g, u = (x @ packed).chunk(2, 1)
    return torch.nn.functional.silu(g) * u


def _swiglu_compiled(x: Tensor, packed: Tensor) -> Tensor:
    return _compiled(_swiglu_packed)(x, packed)


def _liger(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    if x.shape[0] == 0:
        raise NotImplementedError("Liger launches an empty grid on an empty tensor")
    # Two products, as in its own layer: the halves of a packed one are not dense, and it would copy them.
    return LigerSiLUMulFunction.apply(x @ gate, x @ up)


def _interleave(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of gate and up in turn, as quack's epilogue wants them."""
    return x, torch.stack([gate.T, up.T], 1).flatten(0, 1).T


def _quack(x: Tensor, interleaved: Tensor) -> Tensor:
    from quack.gemm_interface import gemm_gated

    if x.dtype == torch.float32:
        raise NotImplementedError("quack takes float16 and bfloat16 on Hopper, got float32")
    if any(size % 8 for size in (x.shape[1], interleaved.shape[1] // 2)) or x.numel() == 0:
        raise NotImplementedError(f"quack takes rows of whole 16-byte vectors, got {tuple(interleaved.shape)}")
    # Its own choice of a configuration, not the search over all of them: that takes minutes a shape.
    return gemm_gated(x, interleaved, activation="swiglu", store_preact=False, tuned=False)[1]


def _fusebook_swiglu(strategy: str | None, tf32: bool = False) -> Callable[..., Tensor]:
    def run(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        if tf32:
            _needs_float32(x)
        return swiglu(x, gate, up, tf32=tf32, strategy=strategy)

    return run


def _onnx_swiglu(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Any]:
    from onnx import helper

    from fusebook.onnx import Graph

    if 0 in (*x.shape, *gate.shape):
        raise NotImplementedError("this graph takes nothing empty")
    nodes = [
        helper.make_node("Gemm", ["x", "gate"], ["g"], transB=1),
        helper.make_node("Gemm", ["x", "up"], ["u"], transB=1),
        helper.make_node("Sigmoid", ["g"], ["s"]),
        helper.make_node("Mul", ["g", "s"], ["silu"]),
        helper.make_node("Mul", ["silu", "u"], ["y"]),
    ]
    inputs = {"x": x, "gate": gate.T.contiguous(), "up": up.T.contiguous()}
    graph = Graph(_onnx_graph(x.dtype, nodes, list(inputs)), device=x.device)
    return (graph.bind(inputs, {"y": x.new_empty(x.shape[0], gate.shape[1])}),)


def _layer(M: int, K: int, N: int) -> dict[str, int]:
    return {"M": M, "K": K, "N": N}


SWIGLU = Op(
    name="swiglu",
    reference=_reference_swiglu,
    make=_make_swiglu,
    cost=_cost_swiglu,
    variants={
        "eager": Variant(swiglu_eager, cost=_cost_swiglu_eager, needs=()),
        "packed": Variant(_swiglu_packed, cost=_cost_swiglu_packed, needs=(), prepare=_pack),
        "packed + compiled": Variant(
            _swiglu_compiled, cost=_cost_swiglu_written, needs=(), prepare=_pack, recompiles=True
        ),
        "fusebook": Variant(_fusebook_swiglu("fused"), needs=()),
        "fusebook (chosen)": Variant(_fusebook_swiglu(None), cost=_cost_swiglu_two, needs=()),
        "Liger": Variant(_liger, cost=_cost_swiglu_two, needs=("cuda", "liger_kernel"), recompiles=True),
        "quack": Variant(_quack, needs=("cuda", "quack"), prepare=_interleave, recompiles=True),
        "ONNX Runtime": Variant(_onnx_run, cost=_cost_swiglu_eager, needs=_ORT, prepare=_onnx_swiglu),
        "packed, TF32": Variant(_in_tf32(_swiglu_packed), cost=_cost_swiglu_packed, prepare=_pack, math="tf32"),
        "fusebook, TF32": Variant(_fusebook_swiglu("fused", True), needs=(), math="tf32"),
        "fusebook (chosen), TF32": Variant(_fusebook_swiglu(None, True), cost=_cost_swiglu_two, needs=(), math="tf32"),
    },
    configs={
        "small": (_layer(256, 1024, 2816), _layer(1024, 4096, 11008)),
        # The feed-forward layers of Llama 2 7B and Llama 3 8B, on as many tokens.
        "llama": (_layer(4096, 4096, 11008), _layer(8192, 4096, 14336)),
        # A few tokens; the last is Llama 3 70B, whose weights are many times the L2 cache.
        "decode": (_layer(1, 4096, 11008), _layer(16, 4096, 11008), _layer(64, 4096, 11008), _layer(16, 8192, 28672)),
    },
    # One of everything; few rows, nothing aligned, and sums that are cut in parts; descriptors, with several tiles and
    # steps; no rows; nothing to add.
    edges=(_layer(1, 1, 1), _layer(7, 150, 65), _layer(100, 96, 72), _layer(0, 4, 4), _layer(4, 0, 4)),
    dtypes=(torch.float32, torch.bfloat16),
)

OPS = (CONCAT_GEMM, SWIGLU)
