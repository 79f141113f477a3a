# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/quantized.py. It needs torch, Triton, NumPy and _call.py.
"""Products with weights of four or eight bits: packing, and the matmul for one token or many.

A weight ``[N, K]`` is stored as codes of 4 or 8 bits. The value of a code is ``(code - zero) * scale``, with a scale,
and perhaps a zero point, for each group of columns in a row. Without zero points, zero is half of the codes' range.

The codes are packed in the order in which tensor cores want them. A *block* is 16 rows by 128 columns (64 for eight
bits), which is 256 words of 32 bits: 1 KiB. Each thread of a warp loads eight of those words. They hold just its part
of the operands of ``mma.m16n8k16``, so that no value passes through shared memory. Codes of the same place in two
neighbouring columns are in the two halves of a word, as an mma wants pairs.
"""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import AMD, INTERPRETED, Operator, apply, contiguous, flag, gpu, launch, one_of, shapes

__all__ = ["PackedWeight", "quantize", "quantized_matmul", "quantized_swiglu"]

#: What packed data must say it is; another layout of the words has another number.
VERSION = 2
#: More rows than these are multiplied by cuBLAS, after the weight was converted once.
FEW_ROWS = 96
#: A weight of fewer tiles, or of so many blocks in a tile, is cut into 8 slices, others into 4. It does not depend on
#: the rows of x, so that the bits of a row do not either.
MANY_TILES, MANY_BLOCKS = 1024, 128

# Codes to numbers ----------------------------------------------------------------------------------------------------
#
# Two words become pairs of 16-bit numbers, a pair for each position in the halves of both. A code is placed into the
# mantissa of 1024 (float16) or 128 (bfloat16), where one step of the last bit is 1. Subtracting the same power of two,
# and the middle of the codes, is exact. The second code of a byte is 16 times as large in float16, which the
# multiplication by 1/16 undoes. bfloat16 has too few bits for that trick: its codes are shifted first.

_HALF_4 = tl.constexpr("""{
.reg .b32 t, m, one, two, add;
mov.b32 m, 0x64006400; mov.b32 one, 0x64086408; mov.b32 two, 0x2C002C00; mov.b32 add, 0xD480D480;
lop3.b32 $0, $8, 0x000f000f, m, 0xea;
lop3.b32 $1, $8, 0x00f000f0, m, 0xea;
shr.u32 t, $8, 8;
lop3.b32 $2, t, 0x000f000f, m, 0xea;
lop3.b32 $3, t, 0x00f000f0, m, 0xea;
lop3.b32 $4, $9, 0x000f000f, m, 0xea;
lop3.b32 $5, $9, 0x00f000f0, m, 0xea;
shr.u32 t, $9, 8;
lop3.b32 $6, t, 0x000f000f, m, 0xea;
lop3.b32 $7, t, 0x00f000f0, m, 0xea;
sub.rn.f16x2 $0, $0, one;
fma.rn.f16x2 $1, $1, two, add;
sub.rn.f16x2 $2, $2, one;
fma.rn.f16x2 $3, $3, two, add;
sub.rn.f16x2 $4, $4, one;
fma.rn.f16x2 $5, $5, two, add;
sub.rn.f16x2 $6, $6, one;
fma.rn.f16x2 $7, $7, two, add;
}""")


def _shifted(first: str, word: str) -> str:
    """The four codes in each half of a word, one after another, in bfloat16."""
    lines = [f"mov.b32 t, {word};"]
    for j in range(4):
        at = f"${int(first) + j}"
        lines.append(f"lop3.b32 {at}, t, 0x000f000f, m, 0xea;\nfma.rn.bf16x2 {at}, {at}, one, add;\nshr.u32 t, t, 4;")
    return "\n".join(lines)


_BFLOAT_4 = tl.constexpr(
    "{\n.reg .b32 t, m, one, add;\nmov.b32 m, 0x43004300; mov.b32 one, 0x3F803F80; mov.b32 add, 0xC308C308;\n"
    + _shifted("0", "$8")
    + "\n"
    + _shifted("4", "$9")
    + "\n}"
)


def _bytes(lines: str, rest: str) -> str:
    """The four pairs of bytes in two words: ``t`` has one at the lower ends of its halves."""
    starts = "mov.b32 t, $4;\n", "shr.u32 t, $4, 8;\n", "mov.b32 t, $5;\n", "shr.u32 t, $5, 8;\n"
    body = "".join(start + rest.replace("$$", f"${j}") for j, start in enumerate(starts))
    return "{\n.reg .b32 t, u, m, one, add;\n" + lines + body + "}"


_HALF_8 = tl.constexpr(
    _bytes(
        "mov.b32 m, 0x64006400; mov.b32 add, 0x64806480;\n",
        "lop3.b32 $$, t, 0x00ff00ff, m, 0xea;\nsub.rn.f16x2 $$, $$, add;\n",
    )
)
# A byte is one bit too wide for the mantissa of bfloat16. Its highest bit chooses what is subtracted: 256, or 128.
_BFLOAT_8 = tl.constexpr(
    _bytes(
        "mov.b32 m, 0x43004300; mov.b32 one, 0x3F803F80; mov.b32 add, 0xC380C380;\n",
        "lop3.b32 u, t, 0x00800080, add, 0x6a;\nlop3.b32 t, t, 0x007f007f, m, 0xea;\nfma.rn.bf16x2 $$, t, one, u;\n",
    )
)


@triton.jit
def _numbers(words, HALF: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """The numbers ``code - middle`` at each position in the words: a tuple of 8 tiles, or of 4."""
    if PLAIN:
        a, b = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 2, 2]))
        a, b = (a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & -0x10000)
        words = tl.reshape(tl.join(a, b), words.shape)
        found = ()
        for j in tl.static_range(32 // BITS):
            code = (words >> (BITS * j)) & ((1 << BITS) - 1)
            found += ((code - (1 << (BITS - 1))).to(tl.float32),)
        return found
    elif BITS == 4:
        if HALF:
            return tl.inline_asm_elementwise(
                _HALF_4, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words], (tl.float16,) * 8, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                _BFLOAT_4, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words], (tl.bfloat16,) * 8, is_pure=True, pack=2
            )
    else:
        if HALF:
            return tl.inline_asm_elementwise(
                _HALF_8, "=&r,=&r,=&r,=&r,r,r", [words], (tl.float16,) * 4, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                _BFLOAT_8, "=&r,=&r,=&r,=&r,r,r", [words], (tl.bfloat16,) * 4, is_pure=True, pack=2
            )


# Matmul --------------------------------------------------------------------------------------------------------------
#
# A program owns ABREAST times ROWS tiles of the weight, of 16 rows each, and 8 * TILES rows of x. A warp takes every
# SLICES-th block of columns of a tile, or of ROWS tiles, and adds up products in registers. Its next DEPTH blocks are
# on their way meanwhile, with their columns of x, each in registers of its own. At the end the sums of SLICES warps are
# added, so the bits of a result depend on SLICES alone. The reshapes below name the bits of a lane: `row` 8 and `pair`
# 4 make 32 lanes. They move nothing: the loads already have the layout that an mma asks for.


@triton.jit
def _weights(tile, BATCH: tl.constexpr):
    """Numbers as loaded, as the first operand of products of 16 columns: ``[BATCH, 16, 16]``."""
    tile = tl.reshape(tile, [2, BATCH, 8, 4, 2, 2])  # half of the columns, slice, row, pair, half of the rows, in pair
    return tl.reshape(tl.permute(tile, [1, 4, 2, 0, 3, 5]), [BATCH, 16, 16])


@triton.jit
def _load_words(w_ptr, tile, last, block, blocks, SLICES: tl.constexpr, ABREAST: tl.constexpr):
    a = tl.arange(0, 2 * SLICES * ABREAST)[:, None]
    here = block + a // ABREAST % SLICES
    row = tl.minimum(tile + a % ABREAST, last).to(tl.int64)
    # Volatile: the compiler would move the load to its use, a turn of the loop later, and wait there for memory.
    return tl.load(
        w_ptr + row * blocks * 256 + a // (SLICES * ABREAST) * 128 + tl.arange(0, 128)[None, :] + here * 256,
        mask=here < blocks, other=0, volatile=True,
    )  # fmt: skip


@triton.jit
def _load_groups(
    ptr, tile, last, block, groups,
    SLICES: tl.constexpr, ABREAST: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Scales, or zero points, of a block's rows: a tuple with a tile for each group in the block, empty without any."""
    a = tl.arange(0, SLICES * ABREAST)[:, None]
    c = tl.arange(0, 64)[None, :]
    found = ()
    if ptr is not None:
        row = tl.minimum(tile + a % ABREAST, last).to(tl.int64)
        for n in tl.static_range(PARTS):
            group = ((block + a // ABREAST) * COLUMNS + n * GROUP) // GROUP
            at = ptr + row * groups * 16 + c // 8 * 2 + c % 2 + group * 16
            found += (tl.load(at, mask=group < groups, other=0, volatile=True),)
    return found


@triton.jit
def _per_row(value, BATCH: tl.constexpr):
    """Loaded scales in the layout of the sums."""
    value = tl.reshape(value.to(tl.float32), [BATCH, 8, 4, 2, 1, 1])  # slice and tile, row, pair, half of the rows
    return tl.permute(value, [0, 3, 1, 4, 2, 5])


@triton.jit
def _pairs(x):
    """Neighbours as one word. The compiler would carry numbers of 16 bits from turn to turn in a register each."""
    low, high = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    low, high = low.to(tl.uint16, bitcast=True).to(tl.uint32), high.to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high << 16)


@triton.jit
def _of_pairs(x, HALF: tl.constexpr):
    """What `_pairs` packed. No tl.join: it makes Triton choose another layout for the operands of tl.dot."""
    x = tl.reshape(x, [x.shape[0], x.shape[1], 1]) >> (16 * tl.arange(0, 2))[None, None, :]
    return x.to(tl.uint16).to(tl.float16 if HALF else tl.bfloat16, bitcast=True)


@triton.jit
def _load_x(
    x_ptr, first, block, M, K,
    SLICES: tl.constexpr, ABREAST: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The columns of x that a block of the weight is multiplied with: a tuple with a tile for each 32 of them."""
    a = tl.arange(0, TILES * SLICES * ABREAST)[:, None]
    i = tl.arange(0, 256)[None, :]
    m = first + a // (SLICES * ABREAST) * 8 + i // 32
    found = ()
    for q in tl.static_range(COLUMNS // 32):
        k = (block + a // ABREAST % SLICES) * COLUMNS + q * 32 + i % 32
        x = tl.load(x_ptr + m * K + k, mask=(m < M) & (k < K), other=0.0)
        found += (x if PLAIN else _pairs(x),)
    return found


@triton.jit
def _two_of_x(x, BATCH: tl.constexpr, TILES: tl.constexpr, HALF: tl.constexpr, PLAIN: tl.constexpr):
    """32 columns of x as the second operands of two products: ``[BATCH, 16, 8 * TILES]`` each."""
    # The interpreter's products of bfloat16 are wrong.
    x = x.to(tl.float32) if PLAIN else _of_pairs(x, HALF)
    x = tl.reshape(x, [TILES, BATCH, 8, 4, 2, 2, 2])  # tile, batch, row, pair, product, half of the columns, in pair
    return tl.split(tl.reshape(tl.permute(x, [1, 5, 3, 6, 0, 2, 4]), [BATCH, 16, 8 * TILES, 2]))


@triton.jit
def _added(
    total, words, scales, zeros, xs,
    BATCH: tl.constexpr, TILES: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr, ZEROS: tl.constexpr,
    HALF: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The sums, and a block's products: those of each group are scaled together."""
    columns: tl.constexpr = 512 // BITS
    numbers = _numbers(words, HALF, BITS, PLAIN)
    part = tl.zeros([BATCH, 16, 8 * TILES], tl.float32)
    ones = tl.full([BATCH, 16, 16], 1.0, tl.float32 if PLAIN else tl.float16 if HALF else tl.bfloat16)
    of_x = part
    for q in tl.static_range(columns // 32):
        x, y = _two_of_x(xs[q], BATCH, TILES, HALF, PLAIN)
        part = tl.dot(_weights(numbers[2 * q], BATCH), x, part)
        part = tl.dot(_weights(numbers[2 * q + 1], BATCH), y, part)
        if ZEROS:
            of_x = tl.dot(ones, y, tl.dot(ones, x, of_x))
        if (q + 1) * PARTS % (columns // 32) == 0:  # the end of a group
            here = tl.reshape(part, [BATCH, 2, 8, TILES, 4, 2])
            if ZEROS:
                here -= _per_row(zeros[q * PARTS // (columns // 32)], BATCH) * tl.reshape(
                    of_x, [BATCH, 2, 8, TILES, 4, 2]
                )
                of_x = tl.zeros_like(of_x)
            total += here * _per_row(scales[q * PARTS // (columns // 32)], BATCH)
            part = tl.zeros_like(part)
    return total


@triton.jit
def _load_blocks(
    w_ptr, s_ptr, z_ptr, tile, last, block, blocks, groups,
    SLICES: tl.constexpr, ABREAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Words, scales and zero points of a block of each tile; the last tile may be read twice."""
    found = ()
    for r in tl.static_range(ROWS):
        at = tile + r * ABREAST
        found += ((
            _load_words(w_ptr, at, last, block, blocks, SLICES, ABREAST),
            _load_groups(s_ptr, at, last, block, groups, SLICES, ABREAST, COLUMNS, GROUP, PARTS),
            _load_groups(z_ptr, at, last, block, groups, SLICES, ABREAST, COLUMNS, GROUP, PARTS),
        ),)  # fmt: skip
    return found


@triton.jit
def _added_blocks(
    totals, w, xs,
    BATCH: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, BITS: tl.constexpr,
    PARTS: tl.constexpr, ZEROS: tl.constexpr, HALF: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    found = ()
    for r in tl.static_range(ROWS):
        b = w[r]
        found += (_added(totals[r], b[0], b[1], b[2], xs, BATCH, TILES, BITS, PARTS, ZEROS, HALF, PLAIN),)
    return found


@triton.jit
def _quantized(
    y_ptr, x_ptr, w_ptr, s_ptr, z_ptr, gate_w_ptr, gate_s_ptr, gate_z_ptr, bias_ptr, M, N, K, blocks, groups,
    SLICES: tl.constexpr, ABREAST: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, PLAIN: tl.constexpr, ALIGN: tl.constexpr = 1,
):  # fmt: skip
    """``y[M, N] = x[M, K] @ w[N, K].T``, and a bias; with a gate, ``silu(x @ gate.T) * y``.

    K is counted in units of ALIGN columns, so that Triton sees where rows of x begin at multiples of 16 bytes.
    """
    K = K * ALIGN
    C: tl.constexpr = 512 // BITS
    BATCH: tl.constexpr = SLICES * ABREAST
    half: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    zeros: tl.constexpr = z_ptr is not None
    gated: tl.constexpr = gate_w_ptr is not None
    tile, last = tl.program_id(0) * (ROWS * ABREAST), tl.cdiv(N, 16) - 1
    first = tl.program_id(1) * 8 * TILES
    totals, w, g, xs = (), (), (), ()  # type: Any, Any, Any, Any
    for _ in tl.static_range(ROWS):
        totals += (tl.zeros([BATCH, 2, 8, TILES, 4, 2], tl.float32),)
    gates = totals
    for d in tl.static_range(DEPTH):
        w += (_load_blocks(
            w_ptr, s_ptr, z_ptr, tile, last, d * SLICES, blocks, groups, SLICES, ABREAST, ROWS, C, GROUP, PARTS
        ),)  # fmt: skip
        if gated:
            g += (_load_blocks(
                gate_w_ptr, gate_s_ptr, gate_z_ptr, tile, last, d * SLICES, blocks, groups,
                SLICES, ABREAST, ROWS, C, GROUP, PARTS,
            ),)  # fmt: skip
        xs += (_load_x(x_ptr, first, d * SLICES, M, K, SLICES, ABREAST, TILES, C, PLAIN),)
    for start in range(0, blocks, DEPTH * SLICES):
        # Work on the oldest block, and ask for another one in its registers. No register is copied: a copy would wait.
        next_w, next_g, next_xs = (), (), ()  # type: Any, Any, Any
        for d in tl.static_range(DEPTH):
            ahead = start + (DEPTH + d) * SLICES
            totals = _added_blocks(totals, w[d], xs[d], BATCH, ROWS, TILES, BITS, PARTS, zeros, half, PLAIN)
            next_w += (_load_blocks(
                w_ptr, s_ptr, z_ptr, tile, last, ahead, blocks, groups, SLICES, ABREAST, ROWS, C, GROUP, PARTS
            ),)  # fmt: skip
            if gated:
                gates = _added_blocks(gates, g[d], xs[d], BATCH, ROWS, TILES, BITS, PARTS, zeros, half, PLAIN)
                next_g += (_load_blocks(
                    gate_w_ptr, gate_s_ptr, gate_z_ptr, tile, last, ahead, blocks, groups,
                    SLICES, ABREAST, ROWS, C, GROUP, PARTS,
                ),)  # fmt: skip
            next_xs += (_load_x(x_ptr, first, ahead, M, K, SLICES, ABREAST, TILES, C, PLAIN),)
        w, g, xs = next_w, next_g, next_xs
    m = first + tl.arange(0, 8 * TILES)[None, :]
    for r in tl.static_range(ROWS):
        n = (tile + r * ABREAST) * 16 + tl.arange(0, 16 * ABREAST)[:, None]
        y = tl.sum(tl.reshape(totals[r], [SLICES, 16 * ABREAST, 8 * TILES]), 0)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if gated:
            z = tl.sum(tl.reshape(gates[r], [SLICES, 16 * ABREAST, 8 * TILES]), 0)
            y *= z / (1 + tl.exp(-z))
        tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def _dequantize(
    out_ptr, w_ptr, s_ptr, z_ptr, N, K, blocks, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, SLICES: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The values ``[N, K]`` of a weight: 16 rows by SLICES blocks in a program."""
    columns: tl.constexpr = 512 // BITS
    rows, block = tl.program_id(0), tl.program_id(1) * SLICES
    words = _load_words(w_ptr, rows, rows, block, blocks, SLICES, 1)
    t = _numbers(words, out_ptr.dtype.element_ty == tl.float16, BITS, PLAIN)
    if BITS == 4:
        value = tl.join(
            tl.join(tl.join(t[0], t[1]), tl.join(t[2], t[3])), tl.join(tl.join(t[4], t[5]), tl.join(t[6], t[7]))
        )  # fmt: skip
    else:
        value = tl.join(tl.join(t[0], t[1]), tl.join(t[2], t[3]))
    # Half of the columns, slice, row, pair, half of the rows, in pair; then product and 32 columns of x.
    value = tl.reshape(value, [2, SLICES, 8, 4, 2, 2, 2, columns // 64, 2])
    value = tl.reshape(tl.permute(value, [4, 2, 1, 8, 7, 3, 6, 0, 5]), [16, SLICES * columns])
    row = tl.arange(0, 16)[:, None]
    k = block * columns + tl.arange(0, SLICES * columns)[None, :]
    n = rows * 16 + row
    mask = (n < N) & (k < K)
    at = (rows.to(tl.int64) * groups + k // GROUP) * 16 + row % 8 * 2 + row // 8
    value = value.to(tl.float32)
    if z_ptr is not None:
        value -= tl.load(z_ptr + at, mask=mask, other=0).to(tl.float32)
    value *= tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + n.to(tl.int64) * K + k, value.to(out_ptr.dtype.element_ty), mask=mask)


# Packing -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight ``[N, K]`` in codes of four or eight bits: what `quantize` returns, and `quantized_matmul` takes.

    Two are equal if they are on one device and have the same codes, scales, zero points and format.

    Attributes
    ----------
    words : torch.Tensor
        int32: the codes, in the order of the kernel.
    scales : torch.Tensor
        float16, bfloat16 or float32, in the order of the kernel.
    zeros : torch.Tensor or None
        int8: zero points, less half of the codes' range. None: all are half of the range.
    shape : tuple of int
        N and K.
    bits : int
        4 or 8.
    group : int
        Columns that share a scale; 0 for whole rows.
    version : int
        Of the layout of the words.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    shape: tuple[int, int]
    bits: int
    group: int
    version: int = VERSION

    def _format(self) -> tuple[Any, ...]:
        return self.shape, self.bits, self.group, self.version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedWeight):
            return NotImplemented
        pairs = zip(*((p.words, p.scales, p.zeros) for p in (self, other)), strict=True)
        return self._format() == other._format() and all(a is b or _same(a, b) for a, b in pairs)

    def __hash__(self) -> int:
        return hash(self._format())

    @classmethod
    def from_codes(
        cls, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int = 4, group: int = 128
    ) -> PackedWeight:
        """Pack codes that something else computed.

        Parameters
        ----------
        codes : torch.Tensor
            ``[N, K]``, uint8, below ``2**bits``.
        scales : torch.Tensor
            ``[N, G]``, float16, bfloat16 or float32, finite; G is K divided by `group`, rounded up.
        zeros : torch.Tensor, optional
            ``[N, G]``, of integers, from 0 to ``2**bits - 1``. Without them, each is ``2**(bits - 1)``.
        bits, group : int
            As in `quantize`.

        Raises
        ------
        TypeError, ValueError
            For other dtypes, shapes and ranges.
        """
        name = "PackedWeight.from_codes"
        _check_format(name, bits, group)
        shapes(name, codes=(codes, "[N, K]", (torch.uint8,)))
        N, K = codes.shape
        G = -(-K // group) if group else min(K, 1)
        shapes(name, scales=(scales, (N, G), _SCALES))
        if codes.numel() and int(codes.max()) >= 2**bits:
            raise ValueError(
                f"{name}: expected codes below {2**bits}, got {int(codes.max())}; give bits=8, or mask them"
            )
        if not scales.isfinite().all():
            raise ValueError(f"{name}: expected finite scales, got infinities or NaN; quantize a finite weight")
        middle, columns = 2 ** (bits - 1), 512 // bits
        tiles, blocks = -(-N // 16), -(-K // columns)
        padded = torch.full((tiles * 16, blocks * columns), middle, dtype=torch.uint8, device=codes.device)
        padded[:N, :K] = codes
        # Half of the rows, row; 32 columns, pair, product, half of the columns, in pair.
        parts = padded.view(tiles, 2, 8, blocks, columns // 32, 4, 2, 2, 2).permute(0, 3, 7, 2, 5, 1, 8, 4, 6)
        parts = parts.reshape(tiles, blocks, 2, 128, 32 // bits)
        words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=codes.device)
        for j in range(32 // bits):
            words |= parts[..., j].to(torch.int32) << bits * j
        words = _halves(words)
        if zeros is not None:
            shapes(name, zeros=(zeros, (N, G), (torch.uint8, torch.int8, torch.int32, torch.int64)))
            if zeros.numel() and not 0 <= int(zeros.min()) <= int(zeros.max()) < 2**bits:
                raise ValueError(
                    f"{name}: expected zero points from 0 to {2**bits - 1}, got {int(zeros.min())} to "
                    f"{int(zeros.max())}; subtract what the format adds to them"
                )
            zeros = _by_tile((zeros.to(torch.int16) - middle).to(torch.int8), tiles)
        return cls(words, _by_tile(scales, tiles), zeros, (N, K), bits, group)

    @classmethod
    def of_zeros(
        cls, N: int, K: int, bits: int = 4, group: int = 128, symmetric: bool = True, *,
        dtype: torch.dtype = torch.float16, device: torch.device | str | None = None,
    ) -> PackedWeight:  # fmt: skip
        """Return a weight of zeros, e.g. to load one into: its scales are zero.

        Parameters
        ----------
        N, K : int
            Rows and columns.
        bits, group, symmetric
            As in `quantize`.
        dtype : torch.dtype
            Of the scales.
        device : torch.device
        """
        name = "PackedWeight.of_zeros"
        _check_format(name, bits, group)
        one_of(name, "dtype", dtype, _SCALES)
        tiles, G = -(-N // 16), -(-K // group) if group else min(K, 1)
        words = torch.zeros(tiles, -(-K // (512 // bits)), 2, 128, dtype=torch.int32, device=device)
        scales = torch.zeros(tiles, G, 8, 2, dtype=dtype, device=device)
        zeros = None if symmetric else scales.to(torch.int8)
        return cls(words, scales, zeros, (N, K), bits, group)

    @classmethod
    def from_gptq(
        cls, qweight: Tensor, scales: Tensor, qzeros: Tensor | None = None, *, bits: int = 4, group: int = 128,
        zero_offset: int = 1,
    ) -> PackedWeight:  # fmt: skip
        """Repack a weight of GPTQ, whose words hold neighbouring rows of ``[K, N]``.

        Parameters
        ----------
        qweight : torch.Tensor
            ``[K * bits / 32, N]``, int32.
        scales : torch.Tensor
            ``[G, N]``.
        qzeros : torch.Tensor, optional
            ``[G, N * bits / 32]``, int32.
        bits, group : int
            As in `quantize`.
        zero_offset : int
            What the format subtracts from zero points before it stores them: 1 in the first version, 0 in the second.
        """
        codes = _fields(qweight.T, bits)  # [N, K]
        zeros = None if qzeros is None else (_fields(qzeros, bits).T.to(torch.int32) + zero_offset) % 2**bits
        return cls.from_codes(codes, scales.T, zeros, bits=bits, group=group)

    @classmethod
    def from_awq(cls, qweight: Tensor, scales: Tensor, qzeros: Tensor, *, group: int = 128) -> PackedWeight:
        """Repack a four-bit weight of AWQ, whose words hold eight columns of ``[K, N]``, the even ones first.

        Parameters
        ----------
        qweight : torch.Tensor
            ``[K, N / 8]``, int32.
        scales : torch.Tensor
            ``[G, N]``.
        qzeros : torch.Tensor
            ``[G, N / 8]``, int32.
        group : int
            As in `quantize`.
        """
        order = [0, 4, 1, 5, 2, 6, 3, 7]
        codes, zeros = (_fields(q, 4).view(len(q), -1, 8)[..., order].reshape(len(q), -1).T for q in (qweight, qzeros))
        return cls.from_codes(codes, scales.T, zeros, bits=4, group=group)

    @classmethod
    def from_onnx(
        cls, blob: Tensor, scales: Tensor, zeros: Tensor | None = None, *, K: int, bits: int = 4, group: int = 128
    ) -> PackedWeight:
        """Repack a weight of ONNX Runtime's operator MatMulNBits.

        Parameters
        ----------
        blob : torch.Tensor
            ``[N, G, group * bits / 8]``, uint8, the lower code of a byte first.
        scales : torch.Tensor
            ``[N, G]``, or as many in one axis.
        zeros : torch.Tensor, optional
            ``[N, ceil(G * bits / 8)]``, or as many in one axis, uint8, packed as the codes.
        K : int
            Columns of the weight, of which the last group may have fewer than `group`.
        bits, group : int
            As in `quantize`; the operator's ``block_size``.
        """
        N, G = blob.shape[:2]
        codes = _fields(blob.view(N, -1), bits)[:, :K]
        if zeros is not None:
            zeros = _fields(zeros.view(N, -1), bits)[:, :G]
        return cls.from_codes(codes, scales.view(N, G), zeros, bits=bits, group=group)

    def codes(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes, scales and zero points as `from_codes` takes them."""
        (N, K), columns = self.shape, 512 // self.bits
        words = _halves(_tensors("PackedWeight.codes", self)[0])
        parts = torch.stack([(words >> self.bits * j) & 2**self.bits - 1 for j in range(32 // self.bits)], -1)
        tiles, blocks = parts.shape[:2]
        parts = parts.to(torch.uint8).view(tiles, blocks, 2, 8, 4, 2, 2, columns // 32, 2)
        codes = parts.permute(0, 5, 3, 1, 7, 4, 8, 2, 6).reshape(tiles * 16, blocks * columns)[:N, :K].contiguous()
        zeros = None
        if self.zeros is not None:
            zeros = (_by_row(self.zeros, N).to(torch.int16) + 2 ** (self.bits - 1)).to(torch.uint8)
        return codes, _by_row(self.scales, N), zeros

    def to(self, device: torch.device | str) -> PackedWeight:
        """Return it with its tensors on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return dataclasses.replace(self, words=self.words.to(device), scales=self.scales.to(device), zeros=zeros)

    def dequantize(self, dtype: torch.dtype = torch.float16) -> Tensor:
        """Return the values ``[N, K]``, computed in float32 and rounded to float16 or bfloat16."""
        one_of("dequantize", "dtype", dtype, _INPUTS)
        return _values.call(_tensors("dequantize", self), self.shape[0], self.shape[1], self.bits, self.group, dtype)


_INPUTS = (torch.float16, torch.bfloat16)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_GROUPS = (0, 32, 64, 128, 256, 512, 1024)


def _check_format(name: str, bits: Any, group: Any) -> None:
    one_of(name, "bits", bits, (4, 8))
    one_of(name, "group", group, _GROUPS, "0 is for whole rows")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or (a.dtype, a.device) != (b.dtype, b.device):
        return False
    return torch.equal(a, b)


def _halves(words: Tensor) -> Tensor:
    """Lower halves of two neighbouring words in the first one, and upper halves in the second; or back again."""
    a, b = words.unflatten(-1, (64, 2)).unbind(-1)
    return torch.stack([(a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & -0x10000)], -1).flatten(-2)


def _by_tile(value: Tensor, tiles: int) -> Tensor:
    """``[N, G]`` in the order in which the kernel reads it: ``[tiles, G, 8, 2]``."""
    padded = value.new_zeros(tiles * 16, value.shape[1])
    padded[: len(value)] = value
    return padded.view(tiles, 2, 8, value.shape[1]).permute(0, 3, 2, 1).contiguous()


def _by_row(value: Tensor, N: int) -> Tensor:
    return value.permute(0, 3, 2, 1).flatten(0, 2)[:N].contiguous()


def _fields(words: Tensor, bits: int) -> Tensor:
    """The codes in the last axis of words of 8 or 32 bits, lowest bits first, as uint8."""
    each = 8 * words.element_size() // bits
    parts = torch.stack([(words >> bits * j) & 2**bits - 1 for j in range(each)], -1)
    return parts.to(torch.uint8).reshape(*words.shape[:-1], -1)


def _scales(span: Tensor, codes: int, dtype: torch.dtype) -> Tensor:
    """Scales for so many codes, in a dtype; one that was rounded up must not carry its largest number beyond it."""
    scales = (span / codes).to(dtype)
    over = (scales.to(span.dtype) * codes).to(dtype).isinf() & span.to(dtype).isfinite()
    return torch.where(over, scales * (1 - torch.finfo(dtype).eps), scales)


def quantize(weight: Tensor, bits: int = 4, group: int = 128, symmetric: bool = True) -> PackedWeight:
    """Round a weight to four or eight bits, with a scale for each group of columns in a row.

    Parameters
    ----------
    weight : torch.Tensor
        ``[N, K]``, as `torch.nn.Linear` has it: float16, bfloat16, float32 or float64, finite.
    bits : int
        4 or 8.
    group : int
        Columns that share a scale: 32, 64, 128, 256, 512, 1024, or 0 for whole rows. The last group may have fewer.
    symmetric : bool
        True: codes are around half of their range, and the scale is the largest magnitude divided by ``2**(bits-1)-1``.
        False: a zero point for each group, so that the codes cover just what lies between its least and its largest
        value, and zero.

    Returns
    -------
    PackedWeight
        On the device of `weight`. Scales have its dtype, where that is float16 or bfloat16, and are float32 otherwise.
        Each code is the nearest one to the value, given the rounded scale.

    Raises
    ------
    TypeError, ValueError
        For no tensor, another number of axes, other bits and groups, and values that are not finite.

    Examples
    --------
    >>> import fusebook, torch
    >>> layer = torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.float16)  # doctest: +SKIP
    >>> packed = fusebook.quantize(layer.weight)  # doctest: +SKIP
    >>> fusebook.quantized_matmul(torch.randn(1, 4096).cuda().half(), packed).shape  # doctest: +SKIP
    torch.Size([1, 4096])
    """
    name = "quantize"
    _check_format(name, bits, group)
    flag(name, "symmetric", symmetric)
    shapes(name, weight=(weight, "[N, K]"))
    if weight.is_meta:
        raise ValueError(f"{name}: expected a weight whose values can be read, got one on meta; see of_zeros")
    N, K = weight.shape
    weight = weight.detach()
    if not weight.isfinite().all():
        raise ValueError(f"{name}: expected a finite weight, got infinities or NaN; replace them first")
    size = group or max(K, 1)
    values = torch.nn.functional.pad(
        weight.double() if weight.dtype == torch.float64 else weight.float(), (0, -K % size)
    )
    values = values.view(N, values.shape[1] // size, size)
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    dtype = weight.dtype if weight.dtype in _INPUTS else torch.float32
    if symmetric:
        scales = _scales(values.abs().amax(-1), middle - 1, dtype)
        offset: Any = middle
    else:
        low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
        scales = _scales(high - low, most, dtype)
    step = scales.to(values.dtype)[..., None]
    step = torch.where(step > 0, step, torch.ones_like(step))
    zeros = None
    if not symmetric:
        zeros = (-low[..., None] / step).round().clamp(0, most)
        offset = zeros
        zeros = zeros[..., 0].to(torch.uint8)
    codes = ((values / step).round() + offset).clamp(0, most)
    made = (codes - offset) * step
    codes = codes - torch.where(made.to(dtype).isinf(), made.sign(), 0)  # the largest numbers, rounded away from 0
    codes = codes.to(torch.uint8).flatten(1)[:, :K]
    return PackedWeight.from_codes(codes, scales, zeros, bits=bits, group=group)


# Operators -----------------------------------------------------------------------------------------------------------


def _tensors(name: str, packed: Any) -> list[Tensor]:
    """The tensors of packed data of this version."""
    if not isinstance(packed, PackedWeight):
        raise TypeError(f"{name}: expected a PackedWeight, got {type(packed).__name__}; call fusebook.quantize first")
    if packed.version != VERSION:
        raise ValueError(
            f"{name}: expected a PackedWeight of version {VERSION}, got version {packed.version}; pack its codes "
            "again, which PackedWeight.codes of the Fusebook that wrote it returns"
        )
    return [packed.words, packed.scales] + ([] if packed.zeros is None else [packed.zeros])


def _plain(device: torch.device) -> bool:
    """Whether codes become numbers without PTX: in the interpreter, and on other GPUs than NVIDIA's."""
    return INTERPRETED or gpu(device)[0] == AMD


def _constants(bits: int, group: int, device: torch.device) -> dict[str, Any]:
    return {"BITS": bits, "GROUP": group or 2**30, "PLAIN": _plain(device)}


def _three(packed: list[Tensor]) -> list[Tensor | None]:
    return [*packed, *[None] * (3 - len(packed))]


def _values_into(out: Tensor, packed: list[Tensor], N: int, K: int, bits: int, group: int, dtype: torch.dtype) -> None:
    words, scales, zeros = _three(packed)
    assert words is not None and scales is not None
    grid = words.shape[0], -(-words.shape[1] // 4)
    sizes = N, K, words.shape[1], scales.shape[1]
    launch(_dequantize, grid, out, words, scales, zeros, *sizes, SLICES=4, **_constants(bits, group, out.device))


def slices_of(tiles: int, blocks: int) -> int:
    """Warps that share the columns of a tile."""
    return 4 if tiles >= MANY_TILES and blocks < MANY_BLOCKS else 8


def launch_config(M: int, slices: int) -> dict[str, Any]:
    """Constants of `_quantized` for so many rows of x: four or eight warps in a program, eight for more than 8 rows."""
    if M <= 8:
        return {"SLICES": slices, "ABREAST": 1, "DEPTH": 8 // slices, "ROWS": 1, "TILES": 1}
    # Two tiles of the weight share x in registers, and two more in the L1 cache.
    return {"SLICES": slices, "ABREAST": 8 // slices, "DEPTH": 1, "ROWS": 2, "TILES": 2}


def _into(
    out: Tensor, x: Tensor, packed: list[Tensor], gate: list[Tensor], bias: Tensor | None,
    N: int, K: int, bits: int, group: int,
) -> None:  # fmt: skip
    flat, out = contiguous(x).view(out.numel() // N, K), out.view(-1, N)
    M = len(flat)
    if M > FEW_ROWS and not gate and K:
        weight = x.new_empty((N, K))
        _values_into(weight, packed, N, K, bits, group, x.dtype)
        product = (torch.mm,) if bias is None else (torch.addmm, bias)
        apply(*product, flat, weight.T, out=out)
        return
    words, scales, zeros = _three(packed)
    assert words is not None and scales is not None
    tiles, blocks = words.shape[:2]
    how = launch_config(M, slices_of(tiles, blocks))
    if gate:
        how |= {"DEPTH": 1, "ROWS": 1}  # a gate fills the registers of a second block
    grid = -(-tiles // (how["ROWS"] * how["ABREAST"])), -(-M // (8 * how["TILES"]))
    align = math.gcd(K, 8)
    sizes = M, N, K // align, blocks, scales.shape[1]
    launch(
        _quantized, grid, out, flat, words, scales, zeros, *_three(gate), bias, *sizes, **how, ALIGN=align,
        PARTS=max(1, 512 // bits // (group or 2**30)), num_warps=how["SLICES"] * how["ABREAST"], num_stages=1,
        **_constants(bits, group, x.device),
    )  # fmt: skip


def _outputs(
    x: Tensor, packed: list[Tensor], gate: list[Tensor], bias: Tensor | None, N: int, K: int, bits: int, group: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], N))


def _sizes(name: str, of: str, packed: list[Tensor], N: int, K: int, bits: int, group: int) -> dict[str, Any]:
    """What `shapes` refuses packed data by, beyond which the kernel would read."""
    _check_format(name, bits, group)
    tiles, G = -(-N // 16), -(-K // group) if group else min(K, 1)
    scales = tiles, G, 8, 2
    sizes = ((tiles, -(-K // (512 // bits)), 2, 128), (torch.int32,)), (scales, _SCALES), (scales, (torch.int8,))
    named = dict(zip((f"{of}words", f"{of}scales", f"{of}zeros"), packed, strict=False))
    for what, t in named.items():
        if isinstance(t, Tensor) and not t.is_contiguous():
            raise ValueError(f"{name}: expected {what} without gaps, got strides {t.stride()}; call contiguous()")
    return {what: (t, *size) for (what, t), size in zip(named.items(), sizes, strict=False)}


def _check(x: Any, packed: Any, gate: Any, bias: Any, N: int, K: int, bits: int, group: int) -> tuple[Any, ...]:
    name = "quantized_swiglu" if gate else "quantized_matmul"
    named: dict[str, Any] = {"x": (x, ("...", K), _INPUTS)} | ({} if bias is None else {"bias": (bias, (N,))})
    for of, tensors in (("", packed), ("gate_", gate)):
        named |= _sizes(name, of, tensors, N, K, bits, group)
    shapes(name, **named)
    return x, packed, gate, bias, N, K, bits, group


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, packed, _, bias, *ctx.format = inputs
    ctx.save_for_backward(bias, *packed)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """The gradients of x and of the bias; packed weights have none."""
    bias, *packed = ctx.saved_tensors
    weight = _values.call(packed, *ctx.format, dy.dtype)
    wanted = bias is not None and (bias.requires_grad or torch.is_grad_enabled())
    flat = dy.reshape(dy.shape[:-1].numel(), dy.shape[-1])  # with -1 for rows, reshape refuses what is empty
    return (
        (flat @ weight).view(*dy.shape[:-1], weight.shape[1]), [None] * len(packed), [],
        flat.sum(0) if wanted else None, None, None, None, None,
    )  # fmt: skip


def _lower(device: str, call: Any, x: Any, packed: Any, gate: Any, bias: Any, *rest: Any) -> Any:
    """Autocast's rule for products, which leaves scales as they are."""
    dtype = torch.get_autocast_dtype(device)
    return call(x.to(dtype), packed, gate, None if bias is None else bias.to(dtype), *rest)


def _check_values(packed: Any, N: int, K: int, bits: int, group: int, dtype: torch.dtype) -> tuple[Any, ...]:
    shapes("dequantize", **_sizes("dequantize", "", packed, N, K, bits, group))
    return packed, N, K, bits, group, dtype


_values = Operator(
    "dequantize",
    "(Tensor[] packed, int N, int K, int bits, int group, ScalarType dtype) -> Tensor",
    check=_check_values,
    outputs=lambda packed, N, K, bits, group, dtype: packed[0].new_empty((N, K), dtype=dtype),
    into=_values_into,
)
_matmul = Operator(
    "quantized_matmul",
    "(Tensor x, Tensor[] packed, Tensor[] gate, Tensor? bias, int N, int K, int bits, int group) -> Tensor",
    check=_check,
    outputs=_outputs,
    into=_into,
    gradient=(_backward, _keep),
    autocast=_lower,
)


def quantized_matmul(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` with a weight of four or eight bits.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., K]``, float16 or bfloat16, on a CUDA device (or on the CPU where Triton interprets).
    packed : PackedWeight
        Of a weight ``[N, K]``, from `quantize`, on the device of `x`.
    bias : torch.Tensor, optional
        ``[N]``, of the dtype of `x`.

    Returns
    -------
    torch.Tensor
        ``[..., N]``, contiguous, of the dtype of `x`.

    Raises
    ------
    TypeError
        For another dtype, no dense tensor, and a weight that is not packed.
    ValueError
        For shapes that do not match, tensors on different devices, and packed data of another version.

    Notes
    -----
    Up to 96 rows, one kernel reads each code once for 16 rows of `x`. Codes enter the tensor cores as exact integers;
    sums are float32, and each group's sum is multiplied by its scale. More rows are a matmul of torch, with values that
    were rounded to the dtype of `x`, which takes ``N * K`` elements of memory meanwhile.

    Results are the same in each run. Up to 96 rows, a row's result does not depend on the other rows. There, an
    infinite element of `x` makes its row NaN where the weight has zero points, and bfloat16 elements overflow where
    their product with a code exceeds float32: beyond 2.6e36 with eight bits, and 4e37 with four.

    Differentiable in `x` and `bias`; the gradient is torch's matmul with the values. Under `torch.autocast` both are
    cast, as for torch's products. `x` with gaps is copied first, and columns that are no multiple of 16 are read one by
    one: correct, without a target for speed. Works under `torch.compile` and in CUDA graphs.

    Examples
    --------
    >>> import fusebook, torch
    >>> packed = fusebook.quantize(torch.randn(4096, 4096, device="cuda").half())  # doctest: +SKIP
    >>> fusebook.quantized_matmul(torch.randn(1, 4096, device="cuda").half(), packed).shape  # doctest: +SKIP
    torch.Size([1, 4096])
    """
    name = "quantized_matmul"
    return _matmul.call(x, _tensors(name, packed), [], bias, *packed.shape, packed.bits, packed.group)


def quantized_swiglu(x: Tensor, gate: PackedWeight, up: PackedWeight) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` with weights of four or eight bits: up to 96 rows in one launch.

    Parameters
    ----------
    x : torch.Tensor
        As for `quantized_matmul`.
    gate, up : PackedWeight
        Of weights ``[N, K]`` each, quantized alike.

    Returns
    -------
    torch.Tensor
        ``[..., N]``, contiguous, of the dtype of `x`.

    Raises
    ------
    TypeError, ValueError
        As `quantized_matmul`, and ValueError for weights that differ in shape, bits, group, or in having zero points.

    Notes
    -----
    For more rows, and where a gradient is recorded, it is two calls of `quantized_matmul`, torch's silu and a product.
    """
    name = "quantized_swiglu"
    both = [_tensors(name, gate), _tensors(name, up)]
    formats = [(p.shape, p.bits, p.group, p.zeros is not None) for p in (gate, up)]
    if formats[0] != formats[1]:
        texts = [f"{shape}, {bits} bits, group {group}, zero points {zeros}" for shape, bits, group, zeros in formats]
        raise ValueError(f"{name}: expected weights quantized alike, got {' and '.join(texts)}; quantize both alike")
    dense = isinstance(x, Tensor) and x.dim() > 0
    rows = x.numel() // max(1, x.shape[-1]) if dense else 0
    if rows > FEW_ROWS or (dense and torch.is_grad_enabled() and x.requires_grad):
        return torch.nn.functional.silu(quantized_matmul(x, gate)) * quantized_matmul(x, up)
    return _matmul.call(x, both[1], both[0], None, *up.shape, up.bits, up.group)
