# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/_rows.py. It needs torch, Triton, NumPy and _call.py.
"""Rows on a GPU: how they are found, loaded, held in registers, shared by several programs, and copied.

A tensor is seen as ``[OUTER, INNER, N]``, whatever its shape: N is the axis along which an operator works, and a row is
its N elements. Two layouts have kernels. *Along*: the elements of each row are adjacent. *Across*: neighbouring rows
are adjacent, along INNER. Every other tensor is copied first.

A row of up to some 128 KiB is held in the registers of one program, as CHUNKS tiles of BLOCK columns. A wider row is
shared by several programs. Each loads a part, publishes what it found there, and waits for the others.
"""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import Operator, apply, contiguous, gpu, integer, launch, overlapping, shapes

# Arithmetic ----------------------------------------------------------------------------------------------------------


@triton.jit
def accumulated(x):
    """The elements in the type in which they are added up: float64 stays, every other type becomes float32."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)  # bf16 keeps 8 bits: a sum of 256 terms loses the next


@triton.jit
def fast_exp(x):
    """Compute exp by exp2, which the hardware has. Results below 1e-38 may become zero, unlike with tl.exp."""
    if x.dtype == tl.float64:  # no exp2 in hardware; the product would be fused with what follows, in some rows only
        return tl.exp(x)
    else:
        return tl.exp2(x * 1.4426950408889634)  # log2(e)


@triton.jit
def finite_or_zero(top):
    """A maximum as something to subtract: -inf becomes 0, because -inf - -inf is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def opaque_zero(N, value):
    """Zero, as N is not negative, which the compiler cannot know. It is computed after the float32 `value`."""
    return (tl.minimum(N, 0) & value.to(tl.int32, bitcast=True)).to(tl.int16)


@triton.jit
def reconvert(x, zero):
    """The elements in float32, as `accumulated`, but converted from fp16 and bf16 a second time.

    Meanwhile they are held two to a register, and not as float32 values, one to a register. `zero` is an `opaque_zero`:
    without it the compiler sees the conversion before, and keeps its result.
    """
    if x.dtype.primitive_bitwidth == 16:
        x = (x.to(tl.int16, bitcast=True) ^ zero).to(x.dtype, bitcast=True)
    return accumulated(x)


# Rows in registers ---------------------------------------------------------------------------------------------------

# N and the strides of a kernel are in units of ALIGN elements. Triton only knows whether 16 divides an integer. In
# units of ALIGN it sees that rows of 1000 bf16 elements begin at multiples of 16 bytes, and loads 16 bytes at a time.
# Offsets are int64: a tensor may have more than 2**31 elements.


@triton.jit
def rows_of_tile(tile, INNER, ROWS: tl.constexpr, FLAT: tl.constexpr):
    """The rows of a tile: OUTER index, INNER indices [ROWS, 1], and which of these exist. FLAT: OUTER is 1."""
    tiles = 1 if FLAT else tl.cdiv(INNER, ROWS)
    outer = tl.zeros([], tl.int64) if FLAT else (tile // tiles).to(tl.int64)
    tile = tile if FLAT else tile % tiles
    inner = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    return outer, inner, inner < INNER


@triton.jit
def rows_of_program(INNER, ROWS: tl.constexpr, FLAT: tl.constexpr):
    """Which rows a program owns, and which of them exist, where each program has one tile."""
    return rows_of_tile(tl.program_id(0), INNER, ROWS, FLAT)


@triton.jit
def row_offset(outer, inner, strides, ALIGN: tl.constexpr = 1):
    """Where rows begin, in elements."""
    return (outer * strides[0] + inner * strides[1]) * ALIGN


@triton.jit
def _inside(i, N, live, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Which elements of chunk `i` exist. Only the last chunk can be partly empty."""
    return live if i < CHUNKS - 1 else live & (i * BLOCK + tl.arange(0, BLOCK)[None, :] < N)


@triton.jit
def load_chunk(
    x_ptr, i, step, N, live, OTHER: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, KEEP: tl.constexpr = False
):  # fmt: skip
    """Chunk `i` of the rows at `x_ptr` [ROWS, 1] as a tile [ROWS, BLOCK], in their own type. KEEP: evicted last."""
    at = (i * BLOCK + tl.arange(0, BLOCK)[None, :]).to(tl.int64) * step
    inside = _inside(i, N, live, BLOCK, CHUNKS)
    return tl.load(x_ptr + at, mask=inside, other=OTHER, eviction_policy="evict_last" if KEEP else "")


@triton.jit
def load_row(x_ptr, step, N, live, OTHER: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """The rows at `x_ptr` [ROWS, 1] as a tuple of CHUNKS tiles."""
    chunks = ()
    for i in tl.static_range(CHUNKS):
        chunks += (load_chunk(x_ptr, i, step, N, live, OTHER, BLOCK, CHUNKS),)
    return chunks


@triton.jit
def store_chunk(y_ptr, y, i, step, N, live, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Store chunk `i` of the rows at `y_ptr` [ROWS, 1]."""
    at = (i * BLOCK + tl.arange(0, BLOCK)[None, :]).to(tl.int64) * step
    tl.store(y_ptr + at, y, mask=_inside(i, N, live, BLOCK, CHUNKS))


@triton.jit
def row_max(chunks, CHUNKS: tl.constexpr):
    """The maximum of each row [ROWS, 1]. Chunks are combined first, so that threads are reduced across once."""
    tops = accumulated(chunks[0])
    for i in tl.static_range(1, CHUNKS):
        tops = tl.maximum(tops, accumulated(chunks[i]))
    return tl.max(tops, 1)[:, None]


# A part of a row -----------------------------------------------------------------------------------------------------

# A part is loaded as whole vectors of VEC elements, 16 bytes. The first and last vector of a row may hold elements of
# its neighbours. These are loaded and ignored, and stored by their own program. The rows of all tensors must begin at
# the same place within a vector; otherwise VEC is 1.


@triton.jit
def row_vectors(begin, N, first, SIZE, VEC: tl.constexpr):
    """Where a window of SIZE elements is, `first` elements after the start of the first vector of the row.

    Returns its offset, and from which to below which of its elements belong to the row.
    """
    head = (begin % VEC).to(tl.int32)
    return (begin // VEC) * VEC + first, head - first, tl.minimum(SIZE, head + N - first)


@triton.jit
def load_row_part(
    x_ptr, low, high, OTHER: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr = False
):  # fmt: skip
    """The window at `x_ptr` as a tile [BLOCK], with OTHER for elements outside the row. KEEP: evicted last."""
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < (high + VEC - 1) // VEC * VEC
    x = tl.load(x_ptr + columns, mask=inside, other=OTHER, eviction_policy="evict_last" if KEEP else "")
    if VEC > 1:
        if (low > 0) | (high % VEC != 0):
            x = tl.where((columns >= low) & (columns < high), x, OTHER).to(x.dtype)
    return x


@triton.jit
def store_row_part(y_ptr, y, columns, low, high, VEC: tl.constexpr):
    """Store the elements of a window that belong to the row: whole vectors, and single elements at the row's ends."""
    y = y.to(y_ptr.dtype.element_ty)
    if VEC == 1:
        tl.store(y_ptr + columns, y, mask=columns < high)
    else:
        begin = (tl.maximum(low, 0) + VEC - 1) // VEC * VEC
        end = high // VEC * VEC
        tl.store(y_ptr + columns, y, mask=(columns >= begin) & (columns < end))
        if (low > 0) | (high % VEC != 0):
            own = (columns >= low) & (columns < high)
            tl.store(y_ptr + columns, y, mask=own & ((columns < begin) | (columns >= end)))


# A row shared by several programs ------------------------------------------------------------------------------------

# A program writes what it found in its part as one word to the workspace: one or two float32 values in 64 bits. A word
# is zero until it is published and not zero afterwards, and it is written at once, so no order of writes matters.
#
# The programs of a row usually run at the same time, so that words arrive soon. Nothing promises this: a GPU may start
# programs in any order. Therefore a program looks TRIES times, then recomputes each missing word from the row, with the
# arithmetic of the part's own program. Results have the same bits either way. In the interpreter, where programs run
# one after another, the first program of each row recomputes all other words.


@triton.jit
def pack(a, b):
    """Two float32 values as a word that is not zero. -0.0 replaces 0.0 in the upper half where both are zero."""
    word = a.to(tl.int32, bitcast=True).to(tl.int64) << 32
    word = word | (b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    return tl.where(word == 0, -9223372036854775808, word)


@triton.jit
def unpack(words):
    """The two float32 values of each word."""
    a = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return a, words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def publish(workspace_ptr, word):
    """Write a word, 64 bits that hold a pair, so that the other programs of the row can see it."""
    tl.atomic_xchg(workspace_ptr, word, sem="relaxed")


@triton.jit
def first_missing(words, lanes):
    """The first word that is zero, or the number of words."""
    return tl.min(tl.where(words == 0, lanes, lanes.shape[0]), 0)


@triton.jit
def wait_for(workspace_ptr, lanes, PARTS, NEUTRAL: tl.constexpr, TRIES: tl.constexpr):
    """Wait for the words of all programs of a row. Return these, and the first that is missing, or LANES if none is.

    The words [LANES] are NEUTRAL from PARTS on. After TRIES loads it waits no longer.

    LANES is at least the number of threads, so that one thread loads each word. The first missing one has passed
    through shared memory: all threads have the same, and branch alike.
    """
    # volatile: another multiprocessor wrote it, so each load must go to L2.
    words = tl.load(workspace_ptr + lanes, mask=lanes < PARTS, other=NEUTRAL, volatile=True)
    missing = first_missing(words, lanes)
    tries = 0
    while (missing < lanes.shape[0]) & (tries < TRIES):
        words = tl.load(workspace_ptr + lanes, mask=lanes < PARTS, other=NEUTRAL, volatile=True)
        missing = first_missing(words, lanes)
        tries += 1
    return words, missing


@triton.jit
def wait_for_both(workspace_ptr, lanes, PARTS, NEUTRAL: tl.constexpr, TRIES: tl.constexpr):
    """The same where a part has two words, the second PARTS behind the first. A part is missing until it has both."""
    inside = lanes < PARTS
    words = tl.load(workspace_ptr + lanes, mask=inside, other=NEUTRAL, volatile=True)
    more = tl.load(workspace_ptr + PARTS + lanes, mask=inside, other=NEUTRAL, volatile=True)
    missing = first_missing(tl.where(more == 0, more, words), lanes)
    tries = 0
    while (missing < lanes.shape[0]) & (tries < TRIES):
        words = tl.load(workspace_ptr + lanes, mask=inside, other=NEUTRAL, volatile=True)
        more = tl.load(workspace_ptr + PARTS + lanes, mask=inside, other=NEUTRAL, volatile=True)
        missing = first_missing(tl.where(more == 0, more, words), lanes)
        tries += 1
    return words, more, missing


#: Words that change no result of a merge: (-inf, 0) and (-0.0, 0).
NEUTRAL_MAX_SUM = tl.constexpr(-36028797018963968)
NEUTRAL_SUM = tl.constexpr(-9223372036854775808)


@triton.jit
def merge_max_sum(words):
    """From (maximum, sum of exp(x - maximum)) of each part, the same of the whole row."""
    tops, totals = unpack(words)
    top = tl.max(tops, 0)
    return top, tl.sum(totals * fast_exp(tops - finite_or_zero(top)), 0)


@triton.jit
def merge_sum(words):
    """From the sum of each part, the sum of the whole row."""
    sums, _ = unpack(words)
    return tl.sum(sums, 0)


@triton.jit
def fill(out_ptr, SIZE, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """Zeros, BLOCK neighbours a program. EARLY: the next kernel may start now, and wait where it needs them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(out_ptr + at, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=at < SIZE)  # write SIZE


# The tiled copy ------------------------------------------------------------------------------------------------------


@triton.jit
def _copy_tiles(y_ptr, x_ptr, INNER, N, y_strides, x_strides, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A copy by tiles: loads are coalesced along one axis, stores along the other."""
    across = tl.cdiv(N, BLOCK)
    tiles = tl.cdiv(INNER, ROWS)
    program = tl.program_id(0) // across
    outer = (program // tiles).to(tl.int64)
    row = program % tiles * ROWS
    column = tl.program_id(0) % across * BLOCK
    x_ptr += row_offset(outer, row.to(tl.int64), x_strides) + column.to(tl.int64) * x_strides[2]
    y_ptr += row_offset(outer, row.to(tl.int64), y_strides) + column.to(tl.int64) * y_strides[2]
    rows = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (rows < INNER - row) & (columns < N - column)
    tile = tl.load(x_ptr + (rows * x_strides[1] + columns * x_strides[2]), mask=inside)  # read MN
    tl.store(y_ptr + (rows * y_strides[1] + columns * y_strides[2]), tile, mask=inside)  # write MN


# Layouts -------------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Tensors of one shape, seen as [OUTER, INNER, N]."""

    sizes: tuple[int, int, int]
    strides: list[tuple[int, int, int]]  # of each tensor

    @property
    def along(self) -> bool:
        """Whether the elements of a row are adjacent in every tensor."""
        return all(step == 1 for *_, step in self.strides)


def layout_of(dim: int, *tensors: Tensor) -> Layout | None:
    """See tensors of one shape as [OUTER, INNER, N], where N is the axis `dim`.

    None if that needs more than two axes for the rows, or if neither the elements of a row nor neighbouring rows are
    adjacent: then the tensor must be copied.
    """
    shape = tensors[0].shape
    strides = [t.stride() for t in tensors]
    n = shape[dim] if shape else 1
    steps = [s[dim] if n > 1 else 1 for s in strides]
    merged: list[tuple[int, list[int]]] = []  # sizes and strides of the other axes, neighbours merged where possible
    for i, size in enumerate(shape):
        if i == dim or size == 1:
            continue
        here = [s[i] for s in strides]
        if merged and all(outer == inner * size for outer, inner in zip(merged[-1][1], here, strict=True)):
            merged[-1] = (merged[-1][0] * size, here)
        else:
            merged.append((size, here))
    if len(merged) > 2:
        return None
    if len(merged) == 2:  # INNER is the axis along which neighbours are adjacent
        apart = [i for i, step in enumerate(steps) if step != 1]
        if any(merged[0][1][i] == 1 for i in apart):
            merged.reverse()
    (outer, outers), (inner, inners) = [(1, [0] * len(tensors))] * (2 - len(merged)) + merged
    if any(step != 1 and other != 1 for step, other in zip(steps, inners, strict=True)):
        return None
    return Layout((outer, inner, n), list(zip(outers, inners, steps, strict=True)))


def alignment(layout: Layout, *tensors: Tensor) -> int:
    """By how many elements, up to those of 16 bytes, N, the strides of rows and all addresses are divisible."""
    size = tensors[0].element_size()
    steps = [abs(v) for *strides, _ in layout.strides for v in strides]
    # A quotient of 32 bits, multiplied by ALIGN again, would be a product of 32 bits.
    if not layout.along or max(steps) >= 2**31:
        return 1
    return math.gcd(16 // size, layout.sizes[2], *steps, *(t.data_ptr() // size for t in tensors))


def vector_width(layout: Layout, *tensors: Tensor) -> int:
    """Elements of 16 bytes if the rows of all tensors begin at the same place within 16 bytes, otherwise 1."""
    vec = 16 // tensors[0].element_size()
    first, *others = layout.strides
    alike = all((a - b) % vec == 0 for other in others for a, b in zip(first, other, strict=True))
    return vec if alike and all(t.data_ptr() % 16 == 0 for t in tensors) else 1


def as_rows(x: Tensor) -> Tensor | None:
    """A view of a tensor as a matrix of its rows; None if their elements or the rows are not at equal distances."""
    n = x.shape[-1]
    if n > 1 and x.stride(-1) != 1:
        return None
    try:
        return x.view(-1, n)
    except RuntimeError:
        return None


def contiguous_rows(x: Tensor) -> Tensor:
    """A tensor as a matrix whose rows have adjacent elements, copied if it has none."""
    matrix = as_rows(x)
    return with_adjacent_elements(x).view(-1, x.shape[-1]) if matrix is None else matrix


def with_adjacent_elements(x: Tensor) -> Tensor:
    """A contiguous tensor, copied by tiles where neighbouring rows are adjacent."""
    if x.is_contiguous() or x.stride(-1) == 1 or not x.numel():
        return contiguous(x)
    y = x.new_empty(x.shape)
    copy_strided(y, x)
    return y


def copy_strided(y: Tensor, x: Tensor) -> None:
    """Copy a tensor to one of another layout: by tiles where rows are adjacent in one of them, otherwise by torch."""
    layout = layout_of(x.dim() - 1, y, x)
    if layout is not None:
        (outer, inner, n), strides = layout
        # Larger tiles where there are many of them; in the interpreter a program costs more than its elements.
        elements, warps = (8192, 8) if x.numel() >= 2**24 and x.element_size() < 8 else (4096, 4)
        elements = elements if gpu(x.device)[0] is not None else 2**20
        rows = min(64 if elements < 2**20 else 1024, triton.next_power_of_2(inner))
        block = min(elements // rows, triton.next_power_of_2(n))
        if all(rows * b + block * step < 2**31 for _, b, step in strides):  # offsets within a tile are int32
            grid = (outer * triton.cdiv(inner, rows) * triton.cdiv(n, block),)
            launch(_copy_tiles, grid, y, x, inner, n, *strides, ROWS=rows, BLOCK=block, num_warps=warps)
            return
    apply(Tensor.copy_, y, x)


# Launch configs ------------------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """A line of a table: rows of up to `limit` bytes are held as chunks of up to `block` columns by `warps` warps.

    A program takes as many rows as make `elements` in all, one at least.
    """

    limit: int
    block: int
    warps: int
    elements: int = 0
    registers: int | None = None  # the most that a thread takes; None leaves it to the compiler


class Parts(NamedTuple):
    """A line of a table: rows of up to `limit` bytes are shared, in parts of up to `block` columns."""

    limit: int
    block: int
    warps: int
    registers: int | None = None  # the most that a thread takes; None leaves it to the compiler


def first_that_fits(table: Mapping[int, Sequence[Any]], n: int, itemsize: int) -> Any:
    """The first line of a table whose limit holds a row of `n` elements, or None."""
    return next((line for line in table[itemsize] if n * itemsize <= line.limit), None)


#: The widest row that a kernel takes: one block of Triton has at most 2**20 elements.
WIDEST = 2**20


#: The only config in the interpreter, where a program costs more than its elements: one block of up to 2**20.
INTERPRETER = Config(limit=2**63, block=WIDEST, warps=4, elements=WIDEST)


def row_constants(config: Config, n: int, inner: int) -> dict[str, Any]:
    """ROWS, BLOCK, CHUNKS and warps by a line of a table."""
    block = min(config.block, triton.next_power_of_2(n))
    chunks = triton.cdiv(n, block)
    rows = max(1, min(config.elements // (block * chunks), triton.next_power_of_2(inner)))
    rows = 1 << rows.bit_length() - 1
    limit = {"maxnreg": config.registers} if config.registers else {}
    return {"ROWS": rows, "BLOCK": block, "CHUNKS": chunks, "num_warps": config.warps, **limit}


def across_constants(layout: Layout, size: int, interpret: bool) -> dict[str, Any] | None:
    """The same for rows whose neighbours are adjacent; None if a tile of 32 rows does not fit into registers.

    `size` counts the bytes that a row keeps in registers for each of its elements.
    """
    _, inner, n = layout.sizes
    if interpret:
        return row_constants(INTERPRETER, n, inner)
    whole = triton.next_power_of_2(n)
    rows = min(32, triton.next_power_of_2(inner))  # a warp loads 64 bytes or more in one piece
    elements = rows * whole * max(4, size) // 4
    if elements > 32768:  # 64 registers a thread; more would spill
        return None
    warps = 4 if elements <= 8192 else 16
    block = min(max(1, (1024 if warps == 4 else 2048) // rows), whole)
    return {"ROWS": rows, "BLOCK": block, "CHUNKS": triton.cdiv(n, block), "num_warps": warps}


class Sharing(NamedTuple):
    """How the programs of a row share it."""

    parts: int
    span: int  # columns of a part, in vectors
    constants: dict[str, Any]


#: How often a program looks for the words of others before it recomputes them: some milliseconds.
TRIES = 4096


def shared(parts: Parts, n: int, itemsize: int, vec: int) -> Sharing:
    """Cut a row of `n` elements. The width alone decides, so a row has the same bits however many rows there are."""
    # Parts are whole lines of 128 bytes, and an unaligned row touches one vector more than it fills.
    line = 128 // itemsize
    reach = n if n % vec == 0 else n + vec - 1
    span = triton.cdiv(triton.cdiv(reach, triton.cdiv(reach, parts.block)), line) * line
    count = triton.cdiv(reach, span)
    lanes = max(32 * parts.warps, triton.next_power_of_2(count))
    constants = {"VEC": vec, "BLOCK": parts.block, "LANES": lanes, "TRIES": TRIES, "num_warps": parts.warps}
    return Sharing(count, span // vec, constants | ({"maxnreg": parts.registers} if parts.registers else {}))


def workspace(words: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Zeros for so many words, and how a kernel is launched that loads its part while they are written."""
    early = overlapping(device)
    zeros = torch.empty((words,), dtype=torch.int64, device=device)
    launch(fill, (triton.cdiv(words, 2048),), zeros, words, BLOCK=2048, EARLY=bool(early), num_warps=8)
    return zeros, {"LATE": bool(early), **early}


# Arguments, results, batches -----------------------------------------------------------------------------------------


def checked_axis(name: str, what: str, x: Any, dim: Any) -> tuple[Tensor, int]:
    """A tensor and one of its axes, counted from the front."""
    shapes(name, **{what: (x, "")})
    dim = integer(name, "dim", dim, "give one axis")
    axes = max(1, x.dim())  # a tensor without axes counts as one with a single axis, as in torch
    if not -axes <= dim < axes:
        raise IndexError(
            f"{name}: expected dim from {-axes} to {axes - 1} for {what} of shape {tuple(x.shape)}, got {dim}; "
            "give an axis that the tensor has"
        )
    return x, dim % axes


def aligned(n: int, *tensors: Tensor | None) -> int:
    """By how many elements, up to those of 16 bytes, widths and strides of matrices can be divided."""
    steps = [t.stride(0) for t in tensors if t is not None]
    if max(steps) >= 2**31:  # a quotient of 32 bits, multiplied by this again, would be a product of 32 bits
        return 1
    return math.gcd(n, *steps, *(16 // t.element_size() for t in tensors if t is not None))


def batched(op: Operator, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    """The rule under torch.vmap: the batch becomes the first axis, and `dim` moves by one."""
    *tensors, dim = arguments
    moved = [
        t.expand(info.batch_size, *t.shape) if at is None else t.movedim(at, 0)
        for t, at in zip(tensors, in_dims, strict=False)
    ]
    if moved[0].dim() == 1:  # a batch of tensors without axes
        return op.dispatched(*(t[:, None] for t in moved), 1)[:, 0], 0
    return op.dispatched(*moved, dim + 1), 0
