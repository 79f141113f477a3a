# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/products.py. It needs torch, Triton, NumPy and _call.py.
"""Matrix products that share their left side: side by side in one output, or combined to SwiGLU.

For x ``[M, K]`` and weights ``[K, N_i]``,

    concat_gemm:  y = [x @ w_0, x @ w_1, ...]             [M, N_0 + N_1 + ...]
    swiglu:       y = silu(x @ gate) * (x @ up)           [M, N], with silu(z) = z / (1 + exp(-z))

`concat_gemm` writes each product into its own columns of one output. Two products and a concatenation write 2MN each
and read 2MN to copy it. `swiglu` writes neither product. The unfused chain writes 4MN more than MN and reads as much.

All weights go through one launch. Programs take tiles of the output, and tensor descriptors (TMA) fetch tiles of x and
of the weights: rows, or columns, must be dense and begin at multiples of 16 bytes. Sums are float32. Float32 is
multiplied in TF32 where that is asked for, else by three products in TF32, with errors as those of float32. A table
gives the tiles for each size. Where torch's matmul was faster when the table was measured, it says so. Programs that
would be too few for the GPU divide long sums.

Weights that are narrow next to the rows of x are copied side by side, so that x is read once. Unusual layouts (of other
strides or addresses, more than four weights, rows of weights for swiglu) are copied first or passed to torch. Results
are correct there; speed has no target.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter
from triton.tools.tensor_descriptor import TensorDescriptor

from ._call import (
    AMD,
    INTERPRETED,
    Distance,
    Operator,
    _guards,
    apply,
    as_it_is,
    contiguous,
    flag,
    gpu,
    launch,
    lower,
    one_of,
    overlapping,
    recorder,
    shapes,
    watched,
)

__all__ = ["concat_gemm", "concat_gemm_eager", "swiglu", "swiglu_eager"]

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
# COLUMN: the columns of a weight are dense (the transposed weight of torch.nn.Linear), else its rows. WIDE converts
# tiles to float32 first, for the interpreter, whose products of bfloat16 are wrong. BULK: the copy engine stores a tile
# in so many parts; 0: threads store it. LATE: the kernel is launched before the previous one has ended.


@triton.jit
def _place(tile, ROWS, COLUMNS):
    """Row and column of a tile. Eight rows are walked together, column by column: what they share stays in L2."""
    GROUP: tl.constexpr = 8
    span = GROUP * COLUMNS
    first = tile // span * GROUP
    height = tl.minimum(ROWS - first, GROUP)
    inside = tile % span
    return first + inside % height, inside // height


@triton.jit
def _take_over(LATE: tl.constexpr):
    """Wait for the previous kernel before any access of memory, and let the next one be launched."""
    if LATE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _steps(K, BK: tl.constexpr, SPLIT: tl.constexpr):
    """The first of a program's steps along K, and the one behind the last: all of them, or one of SPLIT parts."""
    steps = tl.cdiv(K, BK)
    if SPLIT == 1:
        return 0, steps
    share = tl.cdiv(steps, SPLIT)
    first = tl.program_id(1) * share
    return first, tl.minimum(steps, first + share)


@triton.jit
def _store(out_ptr, y, m, n, M, N, LD):
    """Store a tile of the output; m and n are its rows and columns, LD is the width of the output."""
    at = m.to(tl.int64)[:, None] * LD + n[None, :]  # [BM, BN]; int64: an output may have more than 2**31 elements
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M", "PROGRAMS"])
def _concat_gemm(
    out_ptr, y_tiles, x_tiles, w0_tiles, w1_tiles, w2_tiles, w3_tiles, M, K, widths, LD, PROGRAMS,
    COUNT: tl.constexpr, COLUMN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FLAT: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr = 1,
    LATE: tl.constexpr = False,
):  # fmt: skip
    """Every PROGRAMS-th tile of the output; those of one weight come before those of the next."""
    _take_over(LATE)
    w_tiles = (w0_tiles, w1_tiles, w2_tiles, w3_tiles)
    rows = tl.cdiv(M, BM)
    k_first, k_last = _steps(K, BK, SPLIT)
    if SPLIT > 1:
        out_ptr += tl.program_id(1).to(tl.int64) * M * LD
    ahead = 0  # tiles of the weights before this one
    start = 0  # where its columns begin in the output
    for i in tl.static_range(COUNT):
        N = widths[i]
        columns = tl.cdiv(N, BN)
        # The program that would be next takes the first tile, so that all have as many.
        first = (tl.program_id(0) + PROGRAMS - ahead % PROGRAMS) % PROGRAMS
        # FLAT: the first steps of the next tile are fetched while this one is finished.
        for tile in tl.range(first, rows * columns, PROGRAMS, flatten=FLAT):
            r, c = _place(tile, rows, columns)
            n = c * BN
            y = tl.zeros([BM, BN], tl.float32)
            for k in range(k_first, k_last):
                x = x_tiles.load([r * BM, k * BK])  # [BM, BK]; read MK for each column of tiles, from L2 but once
                if COLUMN:
                    w = w_tiles[i].load([n, k * BK]).T  # [BK, BN]; read KN for each row of tiles, likewise
                else:
                    w = w_tiles[i].load([k * BK, n])  # [BK, BN]
                if WIDE:
                    x = x.to(tl.float32)
                    w = w.to(tl.float32)
                y = tl.dot(x, w, y, input_precision=PRECISION)
            # In two halves, a tile needs half the shared memory to be stored, which leaves room for one more stage.
            if BULK == 2:
                left, right = y.to(y_tiles.dtype).reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
                y_tiles.store([r * BM, start + n], left)  # write MN, with the next line
                y_tiles.store([r * BM, start + n + BN // 2], right)
            elif BULK == 1:
                y_tiles.store([r * BM, start + n], y.to(y_tiles.dtype))  # write MN
            else:
                _store(out_ptr + start, y, r * BM + tl.arange(0, BM), n + tl.arange(0, BN), M, N, LD)  # write MN
        ahead += rows * columns
        start += N


@triton.jit(do_not_specialize=["M", "LAST", "PROGRAMS"])
def _swiglu(
    out_ptr, y_tiles, x_tiles, w_tiles, bias_ptr, M, K, N, LAST, PROGRAMS, BIAS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, FLAT: tl.constexpr, BULK: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr = 1, LATE: tl.constexpr = False,
):  # fmt: skip
    """Every PROGRAMS-th tile of the output. One descriptor has both weights: a step fetches BN columns of each."""
    _take_over(LATE)
    rows = tl.cdiv(M, BM)
    columns = tl.cdiv(N, BN)
    k_first, k_last = _steps(K, BK, SPLIT)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=FLAT):
        r, c = _place(tile, rows, columns)
        n = c * BN
        both = tl.zeros([BM, 2 * BN], tl.float32)
        for k in range(k_first, k_last):
            x = x_tiles.load([r * BM, k * BK])  # [BM, BK]; read MK for each column of tiles, from L2 but once
            w = w_tiles.load([0, n, k * BK]).reshape(2 * BN, BK)  # [2 BN, BK]; read 2KN for each row of tiles
            if WIDE:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            both = tl.dot(x, w.T, both, input_precision=PRECISION)
        # A thread has the same columns of both halves, so nothing is exchanged here.
        first, second = both.reshape(BM, 2, BN).permute(0, 2, 1).split()
        g = tl.where(LAST == 0, first, second)  # the weight with the lower address comes first
        u = tl.where(LAST == 0, second, first)
        m = r * BM + tl.arange(0, BM)  # [BM]
        at = n + tl.arange(0, BN)  # [BN]
        if SPLIT > 1:
            part = 2 * tl.program_id(1).to(tl.int64) * M * N
            _store(out_ptr + part, g, m, at, M, N, N)
            _store(out_ptr + part + tl.cast(M, tl.int64) * N, u, m, at, M, N, N)
        else:
            if BIAS:
                g += tl.load(bias_ptr + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
                u += tl.load(bias_ptr + N + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
            y = g / (1 + tl.exp(-g)) * u  # no traffic: neither product leaves the registers
            if BULK:  # the copy engine leaves out what is out of range
                y_tiles.store([r * BM, n], y.to(y_tiles.dtype))  # write MN
            else:
                _store(out_ptr, y, m, at, M, N, N)  # write MN


@triton.jit
def _sum(parts_ptr, at, mask, APART, SPLIT: tl.constexpr):
    """Elements of SPLIT parts of a sum, always added in the same order."""
    y = tl.load(parts_ptr + at, mask=mask)
    for i in tl.static_range(1, SPLIT):
        y += tl.load(parts_ptr + at + i * tl.cast(APART, tl.int64), mask=mask)
    return y


@triton.jit
def _pair(g_ptr, u_ptr, bias_ptr, at, mask, SIZE, N, BIAS: tl.constexpr, SPLIT: tl.constexpr):
    """Elements of both products, with their biases; parts of a sum are a pair apart."""
    apart = 2 * tl.cast(SIZE, tl.int64)
    g = _sum(g_ptr, at, mask, apart, SPLIT)  # read MN
    u = _sum(u_ptr, at, mask, apart, SPLIT)  # read MN
    if g.dtype != tl.float64:
        g = g.to(tl.float32)
        u = u.to(tl.float32)
    if BIAS:
        g += tl.load(bias_ptr + at % N, mask=mask).to(g.dtype)
        u += tl.load(bias_ptr + N + at % N, mask=mask).to(g.dtype)
    return g, u


@triton.jit
def _join(
    out_ptr, parts_ptr, bias_ptr, SIZE, N, BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    LATE: tl.constexpr = False,
):  # fmt: skip
    """Products from the parts of their sums; what concerns a bias is for the other passes."""
    _take_over(LATE)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    y = _sum(parts_ptr, at, at < SIZE, SIZE, SPLIT)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=at < SIZE)


@triton.jit
def _gate(
    out_ptr, g_ptr, u_ptr, bias_ptr, SIZE, N, BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    LATE: tl.constexpr = False,
):  # fmt: skip
    """SwiGLU from both products, in a pass that may overwrite one of them."""
    _take_over(LATE)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = at < SIZE
    g, u = _pair(g_ptr, u_ptr, bias_ptr, at, mask, SIZE, N, BIAS, SPLIT)
    tl.store(out_ptr + at, (g / (1 + tl.exp(-g)) * u).to(out_ptr.dtype.element_ty), mask=mask)  # write MN


@triton.jit
def _gate_backward(
    out_ptr, dy_ptr, g_ptr, u_ptr, bias_ptr, SIZE, N, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The gradients of both products, side by side in one output, in a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    at, mask = row * N + n, n < N
    g, u = _pair(g_ptr, u_ptr, bias_ptr, at, mask, SIZE, N, BIAS, 1)
    dy = tl.load(dy_ptr + at, mask=mask).to(g.dtype)  # read MN
    s = 1 / (1 + tl.exp(-g))
    du = dy * g * s
    dg = dy * u * s * (1 + g * (1 - s))
    out_ptr += 2 * row * N
    tl.store(out_ptr + n, dg.to(out_ptr.dtype.element_ty), mask=mask)  # write MN
    tl.store(out_ptr + N + n, du.to(out_ptr.dtype.element_ty), mask=mask)  # write MN


@triton.jit
def _copy(out_ptr, in_ptr, ROWS, COLUMNS, PITCH, STEP, STRIDE, BR: tl.constexpr, BC: tl.constexpr):
    """A tile of a matrix of any strides, into rows that begin PITCH apart, with zeros behind them.

    So stores are whole vectors: a mask that ends anywhere would make them single elements.
    """
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)  # [BR]
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)  # [BC]
    row = (r < ROWS)[:, None]
    x = tl.load(in_ptr + r[:, None] * STEP + c[None, :] * STRIDE, mask=row & (c < COLUMNS)[None, :], other=0.0)
    tl.store(out_ptr + r[:, None] * PITCH + c[None, :], x, mask=row & (c < PITCH)[None, :])


# Launch configs ------------------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """A row of a table: a launch config, and the problems that take it."""

    rows: float  # M is at most this
    size: float  # and M * N at most this; of concat_gemm, N has the columns of all weights
    bm: int  # the tile of the output
    bn: int
    bk: int  # the step along K
    stages: int  # steps that are in flight together
    warps: int
    bulk: int = 0  # parts in which the copy engine stores a tile, where a program a multiprocessor walks over tiles
    split: int = 1  # parts that a sum is cut into, at least; a second kernel adds them
    instead: str = ""  # "torch": its matmul was faster. "columns": copying rows of weights into columns was


ANY = math.inf
STRATEGIES = ("fused", "views")
_HALF = (
    Config(16, ANY, 16, 32, 256, 3, 4),
    Config(32, ANY, 32, 32, 256, 3, 4),
    Config(64, 2**18, 64, 32, 128, 6, 4),
    Config(ANY, 2**19, 64, 64, 64, 6, 4),
    Config(64, ANY, 64, 128, 64, 4, 4),
    Config(ANY, 2**21, 64, 128, 64, 4, 4),
    Config(ANY, 2**22, 128, 256, 64, 4, 8, bulk=2),
    Config(ANY, ANY, 128, 256, 64, 4, 8, bulk=2, instead="torch"),
)
#: For an operator, and math and layout of the weights: the first row whose limits fit. Measured on Hopper GPUs.
TABLES: dict[str, dict[str, tuple[Config, ...]]] = {
    "concat_gemm": {
        "half row": _HALF,
        "half column": _HALF,
        "tf32 row": (
            Config(16, ANY, 16, 64, 64, 3, 4, split=4),
            Config(32, ANY, 32, 32, 64, 3, 2, split=4),
            Config(64, ANY, 64, 32, 64, 4, 4),
            Config(ANY, 2**20, 64, 32, 128, 2, 4),
            Config(ANY, ANY, 128, 128, 32, 4, 8, instead="torch"),
        ),
        "tf32 column": (
            Config(64, ANY, 64, 64, 32, 4, 4),
            Config(ANY, 2**20, 64, 64, 64, 3, 4),
            Config(ANY, 2**22, 128, 128, 32, 4, 4),
            Config(ANY, 2**24, 128, 256, 32, 4, 8),
            Config(ANY, ANY, 128, 256, 32, 4, 8, instead="torch"),
        ),
        "float32 row": (
            Config(16, ANY, 16, 64, 64, 3, 4, split=4),
            Config(32, ANY, 32, 32, 64, 3, 2, split=4),
            Config(64, 2**20, 64, 32, 64, 4, 4, split=4),
            Config(ANY, 2**18, 64, 32, 64, 3, 4),
            Config(ANY, 2**19, 64, 64, 64, 3, 4),
            Config(255, ANY, 64, 32, 64, 3, 4, instead="torch"),
            Config(ANY, ANY, 128, 64, 32, 3, 4, instead="columns"),
        ),
        "float32 column": (
            Config(16, ANY, 16, 64, 64, 3, 4, split=4),
            Config(32, ANY, 32, 32, 64, 3, 2, split=4),
            Config(64, 2**18, 64, 32, 64, 4, 4, split=4),
            Config(64, ANY, 64, 64, 32, 4, 4, split=4),
            Config(ANY, 2**19, 64, 32, 64, 3, 4),
            Config(ANY, 3 * 2**21, 64, 64, 64, 3, 4),
            Config(ANY, ANY, 128, 64, 32, 3, 4),
        ),
    },
    "swiglu": {
        "half column": (
            Config(16, ANY, 16, 16, 256, 4, 4),
            Config(32, ANY, 32, 16, 256, 3, 4),
            Config(64, ANY, 64, 32, 128, 6, 4),
            Config(ANY, 2**18, 64, 32, 64, 6, 4),
            Config(ANY, 2**20, 64, 64, 64, 4, 4),
            Config(128, ANY, 128, 128, 64, 4, 8, bulk=1),
            Config(192, ANY, 64, 128, 64, 4, 4, bulk=1),
            Config(ANY, ANY, 128, 128, 64, 4, 8, bulk=1),
        ),
        "tf32 column": (
            Config(ANY, 2**19, 64, 32, 64, 3, 4),
            Config(ANY, 2**21, 128, 64, 32, 4, 4),
            Config(ANY, ANY, 128, 128, 32, 3, 8, bulk=1),
        ),
        "float32 column": (
            Config(16, ANY, 16, 32, 64, 3, 4, split=4),
            Config(32, ANY, 32, 32, 64, 3, 2, split=4),
            Config(64, 2**18, 64, 16, 64, 4, 4, split=4),
            Config(ANY, 2**19 - 1, 64, 16, 64, 3, 4),
            Config(ANY, ANY, 64, 32, 32, 3, 4),
        ),
    },
}
#: On other GPUs, for fp16 and bf16, at most 96 KiB of shared memory: `bk` is halved for float32, `bn` for swiglu.
OTHERS = (
    Config(16, ANY, 16, 64, 64, 3, 4),
    Config(ANY, 2**21, 64, 64, 64, 3, 4),
    Config(ANY, ANY, 128, 128, 64, 2, 8),
)
#: Interpreted, time is programs times operations: several tiles and steps in small tests, and each form of store.
INTERPRETER = (
    Config(16, ANY, 16, 64, 64, 3, 4, split=2),
    Config(ANY, 2**13, 64, 64, 64, 3, 4, bulk=1),
    Config(ANY, ANY, 64, 64, 64, 3, 4, bulk=2),
)


def config(name: str, M: int, N: int, kind: str, capability: tuple[int, int] | None) -> Config:
    """The first row that fits.

    Parameters
    ----------
    name : str
        A key of `TABLES`.
    M, N : int
        Rows, and columns of the output.
    kind : str
        Math and layout of the weights, such as ``"half row"``.
    capability : tuple of int or None
        Of the GPU; None in the interpreter.
    """
    table = TABLES[name][kind] if capability == (9, 0) else OTHERS if capability else INTERPRETER
    found = next(row for row in table if M <= row.rows and M * N <= row.size)
    if capability != (9, 0):
        if capability and not kind.startswith("half"):
            found = found._replace(bk=found.bk // 2)
        if name == "swiglu":
            found = found._replace(bn=found.bn // 2, bulk=min(1, found.bulk))
    return found


_FEW = 64  # rows of x that one tile has: each weight is fetched once, so that a copy of weights would not pay
_MOST = 4  # weights of one launch
_CACHED = 2**25  # bytes of weights that the L2 cache keeps: copying them takes little time, however few rows there are
_LONG = 6144  # bytes of a row of x from which its sums are divided; from twice as many, among two programs a processor
_SHARED = 227 * 2**10  # bytes of shared memory of a multiprocessor
_PARTS = 16  # parts of a sum, at most
_PART = 1024  # bytes of a row of x in a part of a sum, at least
_THIN = 16  # rows of x for each column of all weights from which a copy of weights side by side takes no time
_SHORT = 2**22  # elements of an output from which tiles are slower where rows begin inside a line of the cache
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _math(dtype: torch.dtype, tf32: bool) -> str:
    return "half" if dtype.itemsize == 2 else "float64" if dtype == torch.float64 else "tf32" if tf32 else "float32"


# Layouts -------------------------------------------------------------------------------------------------------------


def layout_of(w: Tensor) -> str:
    """Which axis of a weight is dense: "row", "column" or "any"; an axis of length one may count as either."""
    K, N = w.shape
    rows, columns = w.stride()
    if (columns == 1 or N == 1) and (rows >= N or K == 1):
        return "row"
    if (rows == 1 or K == 1) and (columns >= K or N == 1):
        return "column"
    return "any"


def _leading(w: Tensor, layout: str) -> int:
    """The stride of the other axis; of a single row, any that is aligned."""
    (rows, columns), (row, column) = w.shape, w.stride()
    if layout != "row":
        rows, columns, row = columns, rows, column
    return row if rows > 1 else triton.cdiv(columns, 64) * 64


def _describable(x: Tensor, layout: str) -> bool:
    """Whether a tensor descriptor of this layout can be made: rows that begin at multiples of 16 bytes."""
    if layout == "any" or x.data_ptr() % 16 or _leading(x, layout) * x.element_size() % 16:
        return False
    return layout_of(x) == layout


def _tiles_of(x: Tensor, layout: str, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of a matrix, or of its transpose where it is stored by columns: the last axis is dense."""
    sizes, tile = (x.shape, [rows, columns]) if layout == "row" else (x.shape[::-1], [columns, rows])
    return TensorDescriptor(x, list(sizes), [_leading(x, layout), 1], tile)


def _stack(gate: Tensor, up: Tensor) -> tuple[int, int] | None:
    """The distance between two weights in columns, in elements, and whether the first has the higher address.

    Two weights of one shape are one tensor of three axes, wherever they are. Descriptors take strides from 16 bytes up
    to 2**40.
    """
    distance = up.data_ptr() - gate.data_ptr()
    if _leading(gate, "column") != _leading(up, "column") or not 16 <= abs(distance) < 2**40:
        return None
    return (Distance(up, gate), 1) if distance < 0 else (Distance(gate, up), 0)


def _aligned(matrices: Sequence[Tensor]) -> Tensor:
    """Matrices side by side in one, copied so that its columns are dense and begin at whole lines of the cache."""
    K, widths = len(matrices[0]), [m.shape[1] for m in matrices]
    line = 128 // matrices[0].element_size()
    pitch = triton.cdiv(K, line) * line
    memory = matrices[0].new_empty((sum(widths), pitch))
    wide = min(256, triton.next_power_of_2(pitch))
    tall = (2**16 if INTERPRETED else 8192) // wide
    for m, place in zip(matrices, memory.split(widths), strict=True):
        launch(
            _copy, (triton.cdiv(m.shape[1], tall), triton.cdiv(pitch, wide)),
            place, m, m.shape[1], K, pitch, m.stride(1), m.stride(0), BR=tall, BC=wide, num_warps=8,
        )  # fmt: skip
    return memory[:, :K].mT


def _matrix(x: Tensor) -> Tensor:
    """All axes but the last as one."""
    if x.dim() == 2:
        return x
    shape = x.shape[:-1].numel(), x.shape[-1]
    try:
        return x.view(shape)
    except RuntimeError:  # axes that no stride can fold
        return apply(Tensor.reshape, x, shape)


# Torch's matmul ------------------------------------------------------------------------------------------------------


def _tf32_allowed() -> bool:
    """Whether torch multiplies float32 in TF32 by itself."""
    matmul = torch.backends.cuda.matmul
    if torch.compiler.is_compiling():  # a compiler traces this one only
        return matmul.allow_tf32
    return matmul.fp32_precision == "tf32"  # the other one raises where a program has set this one


@contextlib.contextmanager
def torch_in_tf32(on: bool) -> Iterator[None]:
    """Torch's own products of float32 in TF32, or not."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if on == (before == "tf32"):
        yield
        return
    try:
        matmul.fp32_precision = "tf32" if on else "ieee"
        yield
    finally:
        matmul.fp32_precision = before


def _mm(x: Tensor, w: Tensor, out: Tensor, tf32: bool) -> None:
    if tf32 == (torch.backends.cuda.matmul.fp32_precision == "tf32"):  # entering a context takes half as long as this
        torch.mm(x, w, out=out)
        return
    with torch_in_tf32(tf32):
        torch.mm(x, w, out=out)


def _torch(x: Tensor, w: Tensor, out: Tensor, tf32: bool) -> None:
    """Torch's product, written into its place."""
    if x.dtype == torch.float32:
        apply(_mm, x, w, out, tf32)
    else:
        apply(torch.mm, x, w, out=out)


# Launchers -----------------------------------------------------------------------------------------------------------


def _constants(c: Config, x: Tensor, math: str) -> dict[str, Any]:
    """The constants and options that both kernels share."""
    capability, _ = gpu(x.device)
    return {
        "BM": c.bm,
        "BN": c.bn,
        "BK": c.bk,
        "FLAT": c.bulk > 0,
        "SPLIT": c.split,
        "PRECISION": "tf32" if math != "float32" else "ieee" if capability == AMD else "tf32x3",
        "WIDE": INTERPRETED and x.dtype == torch.bfloat16,
        "num_warps": c.warps,
        "num_stages": c.stages,
    } | _late(x.device)


def _late(device: torch.device) -> dict[str, Any]:
    """Launch before the previous kernel has ended, where the GPU can."""
    options = overlapping(device)
    return {"LATE": True, **options} if options else {}


def _fitted(c: Config, M: int, K: int, widths: Sequence[int], together: int, x: Tensor) -> Config:
    """The config for this K: no step is much longer than K, and programs that are too few divide the sum.

    `together`: weights of which a program has a tile each.
    """
    itemsize = x.element_size()
    while c.bk > 64 and c.bk // 2 >= K:
        c = c._replace(bk=c.bk // 2, bn=2 * c.bn)
    tiles = triton.cdiv(M, c.bm) * sum(triton.cdiv(N, c.bn) for N in widths)
    fit = _SHARED // (c.stages * (c.bm + together * c.bn) * c.bk * itemsize)
    room = gpu(x.device)[1] * min(2, fit, K * itemsize // _LONG)
    steps = triton.cdiv(K, c.bk)
    split = min(_PARTS, max(c.split, min(room // max(1, tiles), K * itemsize // _PART)), steps)
    if split <= 1:
        return c._replace(split=1)
    return c._replace(split=triton.cdiv(steps, triton.cdiv(steps, split)), bulk=0)  # no part is empty


def _programs(c: Config, tiles: int, device: torch.device) -> int:
    return min(tiles, gpu(device)[1]) if c.bulk else tiles


def _launch_concat(out: Tensor, x: Tensor, weights: Sequence[Tensor], math: str, layout: str, c: Config) -> None:
    """Up to four weights of one layout, which descriptors describe, as x."""
    (M, K), LD = x.shape, out.stride(0)
    c = _fitted(c, M, K, [w.shape[1] for w in weights], 1, x)
    all_of = (*weights, *[weights[0]] * (_MOST - len(weights)))
    widths = tuple(w.shape[1] for w in all_of)
    tiles = triton.cdiv(M, c.bm) * sum(triton.cdiv(w.shape[1], c.bn) for w in weights)
    # The copy engine would write beyond a weight's columns, into its neighbour's.
    whole = all(width % c.bn == 0 for width in widths[: len(weights) - 1])
    bulk = c.bulk if whole and LD * out.element_size() % 16 == 0 else 0
    y = TensorDescriptor(out, list(out.shape), [LD, 1], [c.bm, c.bn // bulk]) if bulk else None
    programs = _programs(c, tiles, x.device)
    parts = out if c.split == 1 else out.new_empty((c.split, *out.shape), dtype=torch.float32)
    launch(
        _concat_gemm, (programs, c.split),
        parts, y, _tiles_of(x, "row", c.bm, c.bk), *[_tiles_of(w, layout, c.bk, c.bn) for w in all_of],
        M, K, widths, LD, programs, COUNT=len(weights), COLUMN=layout == "column", BULK=bulk,
        **_constants(c, x, math),
    )  # fmt: skip
    if c.split > 1:
        _elementwise(_join, [out], [parts], None, c.split)


def _launch_swiglu(
    out: Tensor, x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, math: str, c: Config
) -> None:  # fmt: skip
    """Two weights in columns, whose distance `_stack` knows."""
    (M, K), N = x.shape, gate.shape[1]
    c = _fitted(c, M, K, [N], 2, x)
    distance, last = _stack(gate, up) or (0, 0)
    lower = up if last else gate
    w = TensorDescriptor(lower, [2, N, K], [distance, _leading(lower, "column"), 1], [2, c.bn, c.bk])
    bulk = c.bulk > 0 and N * out.element_size() % 16 == 0
    programs = _programs(c, triton.cdiv(M, c.bm) * triton.cdiv(N, c.bn), x.device)
    parts = out if c.split == 1 else out.new_empty((c.split, 2, M, N), dtype=torch.float32)
    launch(
        _swiglu, (programs, c.split),
        parts, _tiles_of(out, "row", c.bm, c.bn) if bulk else None, _tiles_of(x, "row", c.bm, c.bk), w,
        x if bias is None else contiguous(bias), M, K, N, last, programs,  # without a bias, x is not read for it
        BIAS=bias is not None, BULK=bulk, **_constants(c, x, math),
    )  # fmt: skip
    if c.split > 1:
        _elementwise(_gate, [out], [parts[0, 0], parts[0, 1]], bias, c.split)


def _elementwise(
    kernel: Any, out: Sequence[Tensor], inputs: Sequence[Tensor], bias: Tensor | None, split: int = 1
) -> None:  # fmt: skip
    """One of the passes over products, or over parts of them."""
    size, itemsize = out[0].numel(), out[0].element_size()
    # The interpreter's cost is the number of programs.
    block, warps = (2**16, 1) if INTERPRETED else (4096 // itemsize, 8 if itemsize >= 4 else 4)
    launch(
        kernel, (triton.cdiv(size, block),),
        *out, *inputs, out[0] if bias is None else contiguous(bias), size, out[0].shape[-1],
        BIAS=bias is not None, SPLIT=split, BLOCK=block, num_warps=warps, **_late(out[0].device),
    )  # fmt: skip


# Operators -----------------------------------------------------------------------------------------------------------


def _takes_tf32(name: str, x: Any, tf32: Any, strategy: Any, **others: Any) -> bool:
    """Validate what both operators take; return whether float32 is multiplied in TF32. See `shapes` for the others."""
    one_of(name, "strategy", strategy, (None, *STRATEGIES), "None chooses")
    shapes(name, x=(x, "[..., K]", _DTYPES), **others)
    if tf32 is not None and not isinstance(tf32, bool):
        raise TypeError(f"{name}: expected tf32 to be True, False or None, got {tf32!r}; None follows torch's setting")
    if x.dtype == torch.float64 and strategy == "fused":
        raise TypeError(
            f"{name}: expected float16, bfloat16 or float32 for the strategy 'fused', got torch.float64; leave the "
            "strategy at None, which multiplies float64 by torch's matmul"
        )
    if x.dtype != torch.float32:
        return False
    return _tf32_allowed() if tf32 is None else tf32


def _asked(x: Tensor, weights: Any, tf32: bool | None, strategy: Any) -> bool:
    """Torch's choice of TF32, where a call depends on it."""
    return tf32 is None and x.dtype is torch.float32 and _tf32_allowed()


def _concat_into(out: Tensor, x: Tensor, weights: Sequence[Tensor], tf32: bool, strategy: str) -> None:
    """An empty `strategy` leaves the choice to the table."""
    if x.shape[-1] == 0:
        apply(Tensor.zero_, out)
        return
    x = _matrix(x)
    M, N, math, capability = len(x), out.shape[-1], _math(x.dtype, tf32), gpu(x.device)[0]
    out = out if out.dim() == 2 else out.view(M, N)
    weights = [w for w in weights if w.shape[1]]
    if not strategy and len(weights) > 1 and M > _FEW and M >= _THIN * N:
        weights = [_aligned(weights)]  # x is read once
    layouts = {layout_of(w) for w in weights}
    layout = layouts.pop() if len(layouts) == 1 else "any"
    if strategy != "views" and math != "float64":
        usable = len(weights) <= _MOST and all(_describable(w, layout) for w in weights)
        c = config("concat_gemm", M, N, f"{math} {layout if usable else 'column'}", capability)
        if strategy or not _torchs(c, x, weights, layout, usable):
            if not usable or (c.instead == "columns" and not strategy):
                weights, layout = [_aligned(weights)], "column"
                c = config("concat_gemm", M, N, f"{math} column", capability)
            x = x if _describable(x, "row") else _aligned([x.mT]).mT
            _launch_concat(out, x, weights, math, layout, c)
            return
    parts = (out,) if len(weights) == 1 else out.split([w.shape[1] for w in weights], 1)
    for w, columns in zip(weights, parts, strict=True):
        _torch(x, w, columns, tf32)


def _torchs(c: Config, x: Tensor, weights: Sequence[Tensor], layout: str, usable: bool) -> bool:
    """Whether torch multiplies, by the table and by alignment.

    Its matmul is slow for addresses, of its output too, that are no multiples of 16 bytes. Ours is for rows that begin
    inside a line of the cache, from `_SHORT` elements on; and few rows are not worth copies of large weights.
    """
    if not usable:
        return not _copied(x, sum(w.shape[1] for w in weights))
    if len(x) <= _FEW:
        return c.instead == "torch"
    itemsize = x.element_size()
    if not _describable(x, "row") or any(w.shape[1] * itemsize % 16 for w in weights):
        return False
    size = len(x) * sum(w.shape[1] for w in weights)
    short = itemsize == 2 and size >= _SHORT and any(_leading(w, layout) * itemsize % 128 for w in weights)
    return c.instead == "torch" or short


def _copied(x: Tensor, columns: int) -> bool:
    """Whether weights of so many columns that no descriptor describes are copied, instead of multiplied by torch."""
    return len(x) > 2 * _FEW or x.shape[1] * columns * x.element_size() <= _CACHED


def _concat_keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, *_ = inputs
    ctx.save_for_backward(x, *weights)


def _flat(x: Tensor) -> Tensor:
    """All axes but the last as one, in the backward pass; with -1 for them, reshape refuses what is empty."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _wanted(x: Tensor) -> bool:
    """Whether a gradient is asked for. Under torch.func, a tensor that is saved does not say it."""
    return x.requires_grad or torch.is_grad_enabled()


def _sum_of_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Torch's products of some pairs, added up: each one adds to those before it."""
    (a, b), *others = pairs
    y = torch.mm(a, b)
    for a, b in others:
        # In place where that is not differentiated: addmm copies what it adds to.
        y = torch.addmm(y, a, b) if torch.is_grad_enabled() else y.addmm_(a, b)
    return y


def _concat_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Two of torch's products for each weight."""
    x, *weights = ctx.saved_tensors
    flat, parts = _flat(x), _flat(dy).split([w.shape[1] for w in weights], -1)
    dx = None
    if _wanted(x):
        dx = _sum_of_products([(d, w.mT) for d, w in zip(parts, weights, strict=True)])
        dx = dx if flat is x else dx.view(x.shape)
    columns = flat.mT
    return dx, [torch.mm(columns, d) if _wanted(w) else None for d, w in zip(parts, weights, strict=True)], None, None


def _concat_check(x: Any, weights: Any, tf32: Any, strategy: Any) -> tuple[Tensor, list[Tensor], bool, str]:
    name = "concat_gemm"
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence):
        raise TypeError(
            f"{name}: expected weights to be a sequence of tensors, got {type(weights).__name__}; pass a list"
        )
    if not weights:
        raise ValueError(f"{name}: expected one weight at least, got none; pass a list of matrices [K, N]")
    fast = _takes_tf32(name, x, tf32, strategy, **{f"weights[{i}]": (w, f"[K, N{i}]") for i, w in enumerate(weights)})
    return x, list(weights), fast, strategy or ""


def _outputs(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, tf32: bool, strategy: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], gate.shape[1]))


def _into(
    out: Tensor, x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, tf32: bool, strategy: str
) -> None:  # fmt: skip
    """An empty `strategy` leaves the choice to the table."""
    flat = _matrix(x)
    (M, K), N, math = flat.shape, gate.shape[1], _math(x.dtype, tf32)
    out = out.view(M, N)
    if strategy != "views" and math != "float64" and K:
        c = config("swiglu", M, N, f"{math} column", gpu(x.device)[0])
        usable = all(_describable(w, "column") for w in (gate, up)) and _stack(gate, up) is not None
        rows = all(_describable(w, "row") for w in (gate, up))
        if strategy or usable or (not rows and _copied(flat, 2 * N)):
            if not usable:
                gate, up = _aligned([gate, up]).split(N, 1)
            flat = flat if _describable(flat, "row") else _aligned([flat.mT]).mT
            _launch_swiglu(out, flat, gate, up, bias, math, c)
            return
    other = out.new_empty(out.shape)
    _torch(flat, gate, out, tf32)
    _torch(flat, up, other, tf32)
    _elementwise(_gate, [out], [out, other], bias)


def _kept_outputs(*inputs: Any) -> list[Tensor]:
    return [_outputs(*inputs) for _ in range(3)]


def _kept_into(
    outs: list[Tensor], x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, tf32: bool, strategy: str
) -> None:  # fmt: skip
    flat = _matrix(x)
    y, g, u = (out.view(len(flat), -1) if out.numel() else out for out in outs)
    _torch(flat, gate, g, tf32)
    _torch(flat, up, u, tf32)
    _elementwise(_gate, [y], [g, u], bias)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, gate, up, bias, *_ = inputs
    products = output[1:] if isinstance(output, (list, tuple)) else ()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, gate, up, bias, *products)


def _through_gate(dy: Tensor, g: Tensor, u: Tensor, bias: Tensor | None) -> Tensor:
    """The gradients of both products, side by side: by one kernel, or by operations of torch to differentiate again."""
    if not torch.is_grad_enabled():
        try:
            return _gradient_of_gate.call(dy, g, u, bias)  # type: ignore[no-any-return]
        except NotImplementedError:  # a batch of gradients, as of is_grads_batched
            pass
    if bias is not None:
        g, u = g + bias[0], u + bias[1]
    s = torch.sigmoid(g)
    return torch.cat([dy * u * s * (1 + g * (1 - s)), dy * g * s], -1)


def _through_gate_into(out: Tensor, dy: Tensor, g: Tensor, u: Tensor, bias: Tensor | None) -> None:
    rows, columns = g.shape
    block = min(triton.next_power_of_2(columns), 2**16 if INTERPRETED else 2048 // g.element_size())
    launch(
        _gate_backward, (rows, triton.cdiv(columns, block)),
        out, *map(contiguous, (dy, g, u)), out if bias is None else contiguous(bias), g.numel(), columns,
        BIAS=bias is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _of_weights(x: Tensor, both: Tensor, gate: Tensor, up: Tensor) -> list[Tensor | None]:
    """The gradients of both weights, each with its strides; otherwise autograd would copy it.

    Where the columns of both weights are dense, one product makes both, for the host time of one.
    """
    if gate.stride(0) == 1 and up.stride(0) == 1 and _wanted(gate) and _wanted(up):
        return [d.mT for d in torch.mm(both.mT, x).tensor_split(2)]
    return [
        None if not _wanted(w) else torch.mm(d.mT, x).mT if w.stride(0) == 1 else torch.mm(x.mT, d)
        for d, w in zip(both.tensor_split(2, 1), (gate, up), strict=True)
    ]


def _backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
    """Both products again unless they were kept; one pass for their gradients; the rest are torch's products."""
    x, gate, up, bias, *products = ctx.saved_tensors
    dy = dy[0] if isinstance(dy, (list, tuple)) else dy
    if dy is None:  # undefined, which counts as zero
        return (None,) * 6
    # Products that were kept are no functions of x and the weights, so that a second derivative needs new ones.
    if not products or torch.is_grad_enabled():
        products = [x @ gate, x @ up]
    given, rows = x, (x, dy, *products)
    x, dy, g, u = rows if x.dim() == 2 else map(_flat, rows)
    del products, rows
    both = _through_gate(dy, g, u, bias)
    del g, u  # their memory is free for what follows
    dx = None
    if _wanted(given):
        dg, du = both.tensor_split(2, 1)
        dx = _sum_of_products([(dg, gate.mT), (du, up.mT)])
        dx = dx if given is x else dx.view(given.shape)
    return (
        dx,
        *_of_weights(x, both, gate, up),
        both.sum(0).view(2, -1) if bias is not None and _wanted(bias) else None,
        None,
        None,
    )


def _check(
    x: Any, gate: Any, up: Any, bias: Any, tf32: Any, strategy: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, str]:
    name = "swiglu"
    fast = _takes_tf32(
        name, x, tf32, strategy, gate=(gate, "[K, N]"), up=(up, "[K, N]"), bias=(bias, "[2, N]?")
    )  # fmt: skip
    return x, gate, up, bias, fast, strategy or ""


def _places(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, tf32: bool | None, strategy: Any) -> Hashable:
    """What `_stack` depends on; a replay computes the distance itself."""
    distance = up.data_ptr() - gate.data_ptr()
    return distance > 0 if 16 <= abs(distance) < 2**40 else None, _asked(x, (gate, up), tf32, strategy)


def _kept_places(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, tf32: bool | None, strategy: Any) -> bool:
    return _asked(x, (gate, up), tf32, strategy)


_operator_concat = Operator(
    "concat_gemm",
    "(Tensor x, Tensor[] weights, bool tf32, str strategy) -> Tensor",
    check=_concat_check,
    outputs=lambda x, weights, *_: x.new_empty((*x.shape[:-1], sum(w.shape[1] for w in weights))),
    into=_concat_into,
    places=_asked,
    gradient=(_concat_backward, _concat_keep),
    autocast=lower,
)
_swiglu_schema = "(Tensor x, Tensor gate, Tensor up, Tensor? bias, bool tf32, str strategy) -> Tensor"
_operator_swiglu, _operator_kept = (
    Operator(
        name,
        schema,
        check=_check,
        outputs=outputs,
        into=into,
        places=places,
        gradient=(_backward, _keep),
        autocast=lower,
    )
    for name, schema, outputs, into, places in (
        ("swiglu", _swiglu_schema, _outputs, _into, _places),
        ("swiglu_kept", f"{_swiglu_schema}[]", _kept_outputs, _kept_into, _kept_places),
    )
)
_gated = Operator(
    "swiglu_gate",
    "(Tensor g, Tensor u) -> Tensor",
    check=lambda *given: given,
    outputs=lambda g, u: g.new_empty(g.shape),
    into=lambda y, g, u: _elementwise(_gate, [y], [*map(contiguous, (g, u))], None),
)
_gradient_of_gate = Operator(
    "swiglu_gate_backward",
    "(Tensor dy, Tensor g, Tensor u, Tensor? bias) -> Tensor",
    check=lambda *given: given,
    outputs=lambda dy, g, u, bias: g.new_empty((g.shape[0], 2 * g.shape[1])),
    into=_through_gate_into,
)


class _Kept(torch.autograd.Function):
    """What `swiglu_kept` does and saves, in less host time: the products are no results, which autograd would track."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        products = torch.matmul(x, gate), torch.matmul(x, up)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, gate, up, None, *products)
        return _gated.call(*products)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:  # type: ignore[override]
        return _backward(ctx, as_it_is(dy))[:3]


_kept = recorder(_Kept)
#: What tells whether arguments are as others that were checked, and whether a mode, a transform or autocast is at work.
_checked: list[Any] = []


def _with_gradient(x: Any, gate: Any, up: Any) -> Tensor:
    """SwiGLU of three tensors: those of kinds that were checked need no other check."""
    for check in _checked:
        if check(x, gate, up):
            return _kept(x, gate, up)  # type: ignore[no-any-return]
    y = _operator_kept.call(x, gate, up, None, None, None)[0]
    plain = all([type(t) in (Tensor, Parameter) and t.dtype is y.dtype for t in (x, gate, up)])
    if plain and _guards is not None:
        made = _guards(x, gate, up, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        _checked[:] = [made.check, *_checked[:3]]
    return y  # type: ignore[no-any-return]


def concat_gemm(
    x: Tensor, weights: Sequence[Tensor], *, tf32: bool | None = None, strategy: str | None = None
) -> Tensor:
    """Products of one matrix with several, side by side in one output; nothing is concatenated.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., K]``, float16, bfloat16, float32 or float64, on a CUDA device (or on the CPU where Triton interprets).
    weights : sequence of torch.Tensor
        ``[K, N_i]`` each, of any widths and strides, of the dtype and on the device of `x`. Dense rows or columns that
        begin at multiples of 16 bytes are not copied: ``linear.weight.T`` is one.
    tf32 : bool, optional
        Whether float32 is multiplied in TF32, with ten bits of mantissa. ``torch.backends.cuda.matmul.allow_tf32``
        where None. Other dtypes ignore it.
    strategy : str, optional
        ``"fused"``: one launch of Fusebook's kernel, which float64 does not have. ``"views"``: torch's matmul for each
        weight, each into its own columns of the output. Where None, the faster one, as a measured table says.

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
    Up to four weights of one layout share a launch. Other layouts and addresses, and more weights, are copied first or
    passed to torch: results are correct there, and speed has no target. Works under `torch.compile`. Differentiable:
    gradients are torch's matmuls, which follow ``torch.backends.cuda.matmul.allow_tf32`` whatever `tf32` was.

    In the fused kernel, float32 is three products in TF32, added up: as exact as float32 except at the ends of its
    range. Elements within a 4096th of the largest number count as infinite, and those below 1e-34 lose digits.
    ``"views"`` has neither limit.

    Examples
    --------
    >>> import fusebook, torch
    >>> x, w = torch.randn(8, 64, device="cuda"), torch.randn(64, 96, device="cuda")  # doctest: +SKIP
    >>> fusebook.concat_gemm(x, [w, w[:, :32]]).shape  # doctest: +SKIP
    torch.Size([8, 128])
    """
    return _operator_concat.call(x, weights, tf32, strategy)


def swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    bias: Tensor | None = None,
    *,
    tf32: bool | None = None,
    strategy: str | None = None,
    recompute: bool = False,
) -> Tensor:
    """SwiGLU of two products, ``silu(x @ gate) * (x @ up)``; without a gradient, neither product is written.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., K]``, float16, bfloat16, float32 or float64, on a CUDA device (or on the CPU where Triton interprets).
    gate, up : torch.Tensor
        ``[K, N]``, of any strides, of the dtype and on the device of `x`. Dense columns that begin at multiples of 16
        bytes are fastest: ``linear.weight.T`` has them.
    bias : torch.Tensor, optional
        ``[2, N]``: what is added to the gate's product, and to the other one.
    tf32 : bool, optional
        As in `concat_gemm`.
    strategy : str, optional
        ``"fused"``: one launch of Fusebook's kernel, which float64 does not have. ``"views"``: torch's two matmuls, and
        one kernel that reads their results. Where None, the faster one, as a measured table says.
    recompute : bool
        Where a gradient is recorded, whether to save memory or time. False keeps both products, ``[..., N]`` each, for
        the backward pass: the forward pass is torch's two matmuls and one kernel. True keeps `x` and the weights only:
        the forward pass is that of `strategy`, and the backward pass computes both products again, two of six matmuls.
        The strategy ``"fused"`` implies it. Without a gradient it changes nothing.

    Returns
    -------
    torch.Tensor
        ``[..., N]``, contiguous, of the dtype of `x`. Biases, silu and the last product are float32 for all dtypes but
        float64. The fused kernel's sums are float32 as well, and all is rounded once; torch's matmuls round theirs.

    Raises
    ------
    TypeError
        For arguments that are no dense tensors, other dtypes, dtypes that differ, float64 where the fused kernel is
        asked for, and a `recompute` that is neither True nor False.
    ValueError
        For shapes that do not match, tensors on different devices, an unknown strategy.

    Notes
    -----
    Other layouts and addresses are copied first or passed to torch: results are correct there, and speed has no target.
    Float32 has the same limits at the ends of its range as in `concat_gemm`. Works under `torch.compile`.
    Differentiable: gradients are torch's matmuls and one kernel between them. The matmuls follow
    ``torch.backends.cuda.matmul.allow_tf32`` whatever `tf32` was. Gradients of `gate` and `up` are two parts of one
    tensor where the columns of both are dense, as those of ``linear.weight.T``.

    Examples
    --------
    >>> import fusebook, torch
    >>> layer = torch.nn.Linear(64, 2 * 96, device="cuda")  # doctest: +SKIP
    >>> gate, up = layer.weight.T.chunk(2, 1)  # doctest: +SKIP
    >>> fusebook.swiglu(torch.randn(8, 64, device="cuda"), gate, up).shape  # doctest: +SKIP
    torch.Size([8, 96])
    """
    if recompute is not False:
        flag("swiglu", "recompute", recompute)
    elif torch.is_grad_enabled() and not (isinstance(strategy, str) and strategy == "fused"):
        for t in (x, gate, up, bias):
            if isinstance(t, Tensor) and t.requires_grad:
                if bias is tf32 is strategy is None and not watched():
                    return _with_gradient(x, gate, up)
                return _operator_kept.call(x, gate, up, bias, tf32, strategy)[0]  # type: ignore[no-any-return]
    return _operator_swiglu.call(x, gate, up, bias, tf32, strategy)
