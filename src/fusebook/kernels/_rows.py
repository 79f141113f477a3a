"""What softmax and its gradient share: how the rows of a tensor of any strides are found, cut, planned and launched.

Every kernel sees its tensors as ``[OUTER, INNER, N]`` and takes three strides of each. The output is contiguous. A
program takes a tile of ROWS neighbours along INNER: several where rows are short, and 32 where the normalised axis is
not the last one, since then it is INNER whose elements lie side by side in memory.

N, outer and inner strides are counted in units of ALIGN elements. Triton knows of an integer only whether 16 divides
it; in units of ALIGN it can see that rows of 1000 half-precision numbers begin at multiples of 16 bytes, and moves them
by 16 bytes instead of 2. Addresses are int64, because tensors may have more than 2**31 elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import Operator, apply, contiguous, empty, gpu, integer, launch, overlapping, shapes
from ._tl import fill

# Rows on the device --------------------------------------------------------------------------------------------------


@triton.jit
def rows_of(program, INNER, ROWS: tl.constexpr, FLAT: tl.constexpr = False):
    """Of a program, its place along OUTER and its rows along INNER; with FLAT, OUTER is 1 and rows lie side by side."""
    tiles = 1 if FLAT else tl.cdiv(INNER, ROWS)
    # Two integer divisions are a visible part of a program that only loads, reduces and stores a kilobyte.
    outer = tl.zeros([], tl.int64) if FLAT else (program // tiles).to(tl.int64)
    tile = program if FLAT else program % tiles
    rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    return outer, rows


@triton.jit
def narrow_rows_of(program, M, INNER, ROWS: tl.constexpr, FLAT: tl.constexpr):
    """Of a program, the places [ROWS, 1] of its rows along OUTER and INNER, and which there are; FLAT: OUTER is 1."""
    row = (program * ROWS + tl.arange(0, ROWS))[:, None]
    outer = tl.zeros([ROWS, 1], tl.int64) if FLAT else (row // INNER).to(tl.int64)
    inner = row.to(tl.int64) if FLAT else (row % INNER).to(tl.int64)
    return outer, inner, row < M


@triton.jit
def place_of(row, INNER):
    """Where a row is along OUTER, and where along INNER."""
    return (row // INNER).to(tl.int64), (row % INNER).to(tl.int64)


@triton.jit
def begin_of(outer, inner, OUTERS, strides):
    """Where rows begin: at places along OUTER and INNER, of a tensor whose strides are those of OUTER, INNER and N.

    OUTER may be several axes: `OUTERS` are their sizes but that of the slowest, and its stride is a tuple.
    """
    if OUTERS is None:
        at = outer * strides[0]
    else:
        at = tl.zeros([], tl.int64)
        for i in tl.static_range(len(OUTERS)):
            at += (outer % OUTERS[i]) * strides[0][i]
            outer = outer // OUTERS[i]
        at += outer * strides[0][len(OUTERS)]
    return at + inner * strides[1]


# Rows beyond the registers of one program are taken by whole vectors of VEC numbers, 16 bytes. The first and the last
# vector of a row may hold numbers of its neighbours: these are read and passed over, and written by whoever owns them.
# Both tensors' rows must begin at the same place within a vector; where they do not, VEC is 1.


@triton.jit
def window(begin, N, first, SIZE, VEC: tl.constexpr):
    """SIZE numbers of a row that begins at `begin`, the first of them `first` behind the row's first vector.

    Returns where they stand, and from which on and below which they are the row's own.
    """
    head = (begin % VEC).to(tl.int32)
    return (begin // VEC) * VEC + first, head - first, tl.minimum(SIZE, head + N - first)


@triton.jit
def put(y_ptr, y, inner, low, high, VEC: tl.constexpr):
    """Store the row's own numbers of a window: whole vectors, and at the row's ends single numbers."""
    y = y.to(y_ptr.dtype.element_ty)
    if VEC == 1:
        tl.store(y_ptr + inner, y, mask=inner < high)
    else:
        begin = (tl.maximum(low, 0) + VEC - 1) // VEC * VEC
        end = high // VEC * VEC
        tl.store(y_ptr + inner, y, mask=(inner >= begin) & (inner < end))
        if (low > 0) | (high % VEC != 0):
            own = (inner >= low) & (inner < high)
            tl.store(y_ptr + inner, y, mask=own & ((inner < begin) | (inner >= end)))


@triton.jit
def zero_of(N, number):
    """Always zero, since N is not negative; but the compiler cannot know, and waits for the float32 `number`."""
    return (tl.minimum(N, 0) & number.to(tl.int32, bitcast=True)).to(tl.int16)


@triton.jit
def again(x, zero, ANEW: tl.constexpr):
    """Numbers in float32 at least. ANEW, of half types: converted again, not held meanwhile in twice the registers.

    `zero` is of `zero_of`. Without it, the compiler would see that these are the numbers of before, and keep them.
    """
    if ANEW:
        x = (x.to(tl.int16, bitcast=True) ^ zero).to(x.dtype, bitcast=True)
    return x if x.dtype == tl.float64 else x.to(tl.float32)


# Several programs share a row: each takes a part of it, and leaves what it found there on a board, a word or two, for
# the others to read. A word is zero until it is written, and never zero afterwards, so that nobody reads half of one.
#
# All programs of a row run at once, or nearly so, and the words of the others come soon. Of a gradient as many programs
# as the GPU runs at once go from row to row, and leave the word of the next row before they finish one. But nothing
# promises that: a GPU may start programs in any order, and be busy with something else. So nobody waits for ever. A
# program that has looked TRIES times finds out for itself what is missing, by the very steps of the program that did
# not come, and so to the same bits. Whatever the order of the programs, each of them ends, and each comes to the same
# result. (Interpreted programs run one after another: there the first of each row does this.)


@triton.jit
def words_of(board_ptr, lanes, PARTS, NOTHING: tl.constexpr, TRIES: tl.constexpr):
    """The words of a row [LANES], as soon as all are there or after so many tries; and the first that is not, or LANES.

    There are as many lanes as threads or more: each word is loaded by one thread, and the number that is returned has
    gone through memory that all threads share. So all of them take the same way from here.
    """
    # volatile: from where other multiprocessors' words arrive, each time anew.
    words = tl.load(board_ptr + lanes, mask=lanes < PARTS, other=NOTHING, volatile=True)
    missing = missing_of(words, lanes)
    tries = 0
    while (missing < lanes.shape[0]) & (tries < TRIES):
        words = tl.load(board_ptr + lanes, mask=lanes < PARTS, other=NOTHING, volatile=True)
        missing = missing_of(words, lanes)
        tries += 1
    return words, missing


@triton.jit
def word_of(number):
    """A number as a word that is not zero: -0.0 stands for 0.0."""
    if number.dtype == tl.float64:
        word = number.to(tl.int64, bitcast=True)
        return tl.where(word == 0, -9223372036854775808, word)
    else:
        word = number.to(tl.int32, bitcast=True)
        return tl.where(word == 0, -2147483648, word)


@triton.jit
def missing_of(words, lanes):
    """The first word that is zero, or their number."""
    return tl.min(tl.where(words == 0, lanes, lanes.shape[0]), 0)


@triton.jit
def leave(board_ptr, word):
    """Leave a word, whole and at once. No order is asked for: it is all that there is to see."""
    tl.atomic_xchg(board_ptr, word, sem="relaxed")


# Or the programs are a cluster, which a GPU starts together: each writes its word into the shared memory of all, and
# nobody looks for it. A tile has an axis of as many as there are programs, along which Triton gives one to each.


@triton.jit
def begun(CTAS: tl.constexpr):
    """Say that this program of a cluster has begun, so that others may write to its memory."""
    if CTAS > 1:
        tl.inline_asm_elementwise(
            "barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def told(word, CTAS: tl.constexpr):
    """Tell all programs of a cluster the word [CTAS] of this one; returns those of all, in their order."""
    if CTAS == 1:
        return (word,)
    else:
        board = tl.inline_asm_elementwise(
            """{
            .shared .align 8 .b64 board[16];
            .reg .b32 own, theirs, rank, thread, programs;
            .reg .pred one;
            mov.u32 own, board;
            mov.u32 rank, %cluster_ctarank;
            mov.u32 programs, %cluster_nctarank;
            mov.u32 thread, %tid.x;
            setp.lt.u32 one, thread, programs;
            barrier.cluster.wait.acquire.aligned;
            mad.lo.u32 theirs, rank, 8, own;
            @one mapa.shared::cluster.u32 theirs, theirs, thread;
            @one st.shared::cluster.b64 [theirs], $1;
            barrier.cluster.arrive.release.aligned;
            barrier.cluster.wait.acquire.aligned;
            mov.u32 $0, own;
            }""",
            "=r,l", [word], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        words = ()
        for k in tl.static_range(CTAS):
            theirs = tl.inline_asm_elementwise(
                "ld.shared.b64 $0, [$1];", "=l,r", [board + 8 * k], dtype=tl.int64, is_pure=False, pack=1
            )
            words += (theirs,)  # type: ignore[assignment]
        return words


@triton.jit
def _turned(y_ptr, x_ptr, INNER, N, y_strides, x_strides, ROWS: tl.constexpr, BLOCK: tl.constexpr, OUTERS=None):
    """A copy by tiles, read along one axis and written along another: so the numbers of x and of y lie together."""
    across = tl.cdiv(N, BLOCK)
    tiles = tl.cdiv(INNER, ROWS)
    program = tl.program_id(0) // across
    outer = (program // tiles).to(tl.int64)
    row = program % tiles * ROWS
    column = tl.program_id(0) % across * BLOCK
    x_ptr += begin_of(outer, row.to(tl.int64), OUTERS, x_strides) + column.to(tl.int64) * x_strides[2]
    y_ptr += begin_of(outer, row.to(tl.int64), OUTERS, y_strides) + column.to(tl.int64) * y_strides[2]
    rows = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (rows < INNER - row) & (columns < N - column)
    tile = tl.load(x_ptr + (rows * x_strides[1] + columns * x_strides[2]), mask=inside)  # read MN
    tl.store(y_ptr + (rows * y_strides[1] + columns * y_strides[2]), tile, mask=inside)  # write MN


# Plans ---------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How rows are launched: by which kernel, with which constants, by how many programs of how many warps."""

    kernel: str  # "rows", "narrow", "pairs", "whole", "shared" or "twice"; "turned": laid side by side first, and again
    constants: Mapping[str, int]
    programs: int
    warps: int
    span: int = 0  # columns of a part; 0 where a row belongs to one program
    parts: int = 1  # programs that share a row
    registers: int | None = None  # the most that a thread takes; None leaves it to the compiler


#: Rows whose numbers lie apart are narrow up to so many.
NARROW = 32


def softmax_plan(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    *,
    processors: int = 132,
    last: bool = True,
    pairs: bool = False,
    vector: int = 1,
    flat: bool = False,
    tensors: int = 1,
) -> Plan:
    """Choose the kernel and its constants.

    `sizes` are OUTER, INNER and N; `capability` is None in the interpreter. `last`: the elements of a row lie side by
    side; otherwise those along INNER do. `pairs`: rows can be read as 32-bit pairs of half-precision numbers. `vector`:
    numbers in 16 bytes, where each row begins at the same place within 16 bytes in every tensor; otherwise 1. `flat`:
    OUTER is 1 and rows lie side by side in every tensor. `tensors`: how many a row keeps in registers, 1 for softmax, 2
    for its gradient.
    """
    outer, inner, n = sizes
    size = dtype.itemsize
    kernel, rows, held_twice = "rows", 1, False
    # Pairs of half types are slow where wide rows lie across 16-byte vectors, and where rows are so wide that one at a
    # time fits on a multiprocessor.
    least = (512 if n % 2 else 12800 if n % vector else 24576) if not pairs else 12800 if n % vector else 32767
    clusters = capability is not None and capability >= (9, 0)
    narrow = n <= NARROW and size < 8 and (33 if capability is None else 8192) <= outer * inner < 2**30
    if not last and narrow and (outer == 1 or inner < 32):
        # Many narrow rows. A warp has 32 at least, so that a thread takes a whole row, and adds it up in one order; of
        # a gradient it takes one. With more neighbours, and others beyond, results would lie further apart than lines.
        block = triton.next_power_of_2(n)
        most = (65536 if capability is None else min(8192 // size, 512 // tensors**2 * block)) // block
        rows = max(32, min(most, 1 << (outer * inner // (4 * processors)).bit_length()))
        constants = {"ROWS": rows, "BLOCK": block, "FLAT": outer == 1}
        return Plan("narrow", constants, triton.cdiv(outer * inner, rows), max(1, min(4, rows // 32)))
    if not last:
        # 32 neighbours along INNER, so that a warp reads 64 bytes and more in one piece. Eight elements a thread and a
        # tile, 64 in all: more would spill.
        rows = min(32, triton.next_power_of_2(inner))
        whole = triton.next_power_of_2(n) * tensors * max(1, size // 4)
        if n >= 1024 and outer * inner <= 256 and outer * inner * n * size <= 2**20 and whole <= 32768:
            # So little that L2 serves it: a program a row, which fetches its neighbours' numbers as well, takes less
            # time than few programs with many rows, or than a copy and its launch.
            rows = 1
        numbers = rows * whole
        if rows == 32 and 32768 < numbers <= 65536 and outer * inner * n * size <= 2**24:
            rows, numbers = 16, numbers // 2
        if numbers > 32768:
            return Plan("turned", {}, 0, 0)
        warps = 4 if numbers <= 8192 else 16
        block = min(max(1, (1024 if warps == 4 else 2048) // rows), triton.next_power_of_2(n))
    elif vector > 1 and size == 2 and tensors == 1 and least < n <= 13 * 4096:
        # Rows that lie across 16-byte vectors, odd ones most of all, and wide ones. 13 tiles are 52 registers of each
        # of 512 threads; more would spill. Where these are of four programs, few rows take less time, and of the widest
        # rows many take no longer.
        if clusters and n > 40960:
            return _whole_plan(sizes, vector, 4, 1024, 4)
        return _whole_plan(sizes, vector, 1, *((4096, 16) if n > 12800 else tile_of(n, size, tensors)))
    elif pairs and tensors == 1 and ((n % 2 and n > 512) or n == 4096 or n > 12800) and n <= 65536:
        kernel = "pairs"
        if n < 2048:
            block, warps = 64, 1
        elif n < 8192:
            block, warps = 256, 4
        elif n <= 16384:
            block, warps = 2048, 16
        elif n <= 20480:
            block, warps = 2048, 8
        elif n <= 40960:
            block, warps = (4096, 32) if 24576 < n < 32768 else (2048, 16)
        else:
            block, warps = 8192, 32
        # Up to 80 numbers a thread the exponentials are kept; with more there would be one row at a time on a
        # multiprocessor, which waits for its loads and then for its stores.
        # Where one row more fits on a multiprocessor if only the pairs are held, that is faster for fewer numbers too.
        held_twice = n == 4096 or 12800 < n <= 16384 or n > 24576
    elif clusters and vector > 1 and size == 2 and tensors == 2 and (24576 < n <= 2**16 or 98304 < n <= 2**17):
        # Some 32 to 64 numbers a thread of each tensor: of fewer, many rows take longer than where programs go from row
        # to row.
        ctas, warps = (4, 4) if n <= 32768 else (4, 8) if n <= 2**16 else (8, 8)
        return _whole_plan(sizes, vector, ctas, 256 * warps, warps)
    elif size == 2 and tensors == 2 and vector > 1 and n % 2 and 512 < n <= 32768:
        # Odd widths, whose rows lie across vectors.
        return _whole_plan(sizes, vector, 1, *tile_of(n, size, tensors))
    elif n <= {2: 32768, 4: 32768 if tensors == 1 else 24576, 8: 16384 // tensors}[size]:
        # float32 rows of 128 KiB still fit: they leave room for one program of 32 warps, which is enough.
        block, warps = tile_of(n, size, tensors)
        if size == 2 and tensors == 2 and vector == 1 and n > 20480:
            warps = 16  # numbers that are loaded one by one take a register each: those of 8 warps spill
        # A warp takes short rows of 512 to 2048 bytes in all, of few rows so many that there is work for all warps. Not
        # less: a thread has 16 bytes at least, so that as many threads take a row, and come to the same bits, whatever
        # the number of rows. Odd rows of half types are moved by 2 bytes, and a warp takes half of that.
        width = size * triton.next_power_of_2(n) * (2 if size == 2 and n % 2 else 1)
        each = max(1, outer * inner // (8 * processors))
        rows = max(1, 512 // width, min(2048 // width, 1 << each.bit_length() - 1))
        if 16 < n <= 256 and n % (16 // size) and (size < 8 if tensors == 1 else size == 2 and n % 2 == 0):
            # Short rows that are no whole vectors: tiles of 16 columns. A row is 16 threads' or fewer, and they add up
            # by themselves most of what 32 would have to tell one another.
            block, warps = 16, 4
            most = 1 << (2048 // (triton.cdiv(n, block) * block)).bit_length() - 1
            # As above; of no fewer rows a thread has as many neighbours.
            rows = max(min(most, 8 * math.gcd(n, 16 // size)), min(most, 1 << (each * 4).bit_length() - 1))
    elif plan := _shared_plan(sizes, size, capability, processors, vector, tensors):
        return plan
    else:
        # The second pass finds in L2 what is left there of the first: the larger the tile, the fewer rows at once.
        kernel, warps = "twice", 32
        block = 32768 if size == 4 and tensors == 1 else 16384 if size < 8 else 8192
    columns = n // 2 if kernel == "pairs" else n
    chunks = max(1, triton.cdiv(columns, block))
    if kernel == "pairs":
        return Plan(kernel, {"BLOCK": block, "CHUNKS": chunks, "TWICE": held_twice}, outer * inner, warps)
    if capability is None:
        # The interpreter's cost is programs times operations, whatever their size.
        tile = block * chunks if kernel == "rows" else block
        most = 1 << max(1, 65536 // tile).bit_length() - 1
        rows = max(rows, min(triton.next_power_of_2(inner), most))
    tiles = outer * triton.cdiv(inner, rows)
    if kernel == "rows":
        return Plan(kernel, {"ROWS": rows, "BLOCK": block, "CHUNKS": chunks, "FLAT": flat}, tiles, warps)
    group = {"GROUP": 16 // size} if tensors == 1 else {}
    return Plan(kernel, {"ROWS": rows, "BLOCK": block, **group}, tiles, warps)


def _whole_plan(sizes: tuple[int, int, int], vector: int, ctas: int, block: int, warps: int) -> Plan:
    """Rows held by a program each, or by a cluster of `ctas`, as tiles of `block` columns a program."""
    outer, inner, n = sizes
    chunks = triton.cdiv(n if n % vector == 0 else n + vector - 1, ctas * block)  # a row may lie across one vector more
    return Plan("whole", {"VEC": vector, "CTAS": ctas, "BLOCK": block, "CHUNKS": chunks}, outer * inner, warps)


def _shared_plan(
    sizes: tuple[int, int, int],
    size: int,
    capability: tuple[int, int] | None,
    processors: int,
    vector: int,
    tensors: int,
) -> Plan | None:
    """Rows whose parts are held by several programs; None where the GPU has no room for all parts of a row at once.

    The width alone decides how a row is cut: so a row's result is the same, bit for bit, however many rows there are.
    """
    outer, inner, n = sizes
    # A third to half of a thread's registers hold numbers. Left to itself, the compiler takes more, and fewer parts at
    # once are under way. Small parts start and end quickly, large ones are few: both count where all parts of a row
    # meet.
    if size == 8:
        block, warps, registers = (2048, 4, 96) if tensors == 1 else (1024, 4, 128)
    elif tensors == 1 and size == 2:
        block, warps, registers = (4096, 4, 48) if n <= 2**17 else (8192, 4, 96)
    elif tensors == 1:
        block, warps, registers = (4096, 4, 64) if n <= 2**18 else (8192, 8, 64)
    else:
        block, warps, registers = (2048, 2, 168) if size == 2 else (2048, 4, 128)
    resident = processors * (65536 // (32 * warps * registers))
    if capability is None:
        # The interpreter's cost is programs times operations: few large parts, and of few rows only, which take turns.
        if outer * inner > 8:
            return None
        block, resident = 16384, 2 * processors
    # Parts are whole lines of 128 bytes, and a row may lie across one vector more than it fills.
    line = 128 // size
    reach = n if n % vector == 0 else n + vector - 1
    span = triton.cdiv(triton.cdiv(reach, triton.cdiv(reach, block)), line) * line
    parts = triton.cdiv(reach, span)
    if parts > (2 * processors if tensors == 1 else resident):
        return None
    words = parts * (2 if size == 8 and tensors == 1 else 1)
    constants = {
        "VEC": vector,
        "BLOCK": block,
        "LANES": max(32 * warps, triton.next_power_of_2(words)),
        "TRIES": 0 if capability is None else 4096,  # some milliseconds
    }
    rows = outer * inner
    if tensors == 1:
        return Plan("shared", constants, rows * parts, warps, span, parts, registers)
    # Programs that go from row to row take longer to begin and to end than such as take one row each.
    once = rows * parts <= 2 * resident
    rows = rows if once else min(rows, resident // parts)
    return Plan("shared", constants | {"ONCE": once}, rows * parts, warps, span, parts, None if once else registers)


def tile_of(n: int, size: int, tensors: int) -> tuple[int, int]:
    """BLOCK and warps for a row of `n` elements of `size` bytes that stays in registers.

    A tile of a power of two wastes up to half its lanes, so a row is cut into tiles of 16 bytes a thread, and only the
    last has lanes to spare. 16 to 64 numbers a thread keep enough loads in flight while several rows share a processor.
    """
    whole = triton.next_power_of_2(n)
    if size == 2:
        if n <= 1024:
            return min(whole, 256 if n > 512 else 512), 1
        if n <= 3072:
            return 512, 2
        if n in (4096, 8192):
            return 4096, 8
        if n <= 6144:
            return 1024, 4
        if tensors == 2 and 12800 < n <= 16384:
            return 16384, 16
        return 2048, 8
    # float64 takes two registers a number: half the tile for the same bytes a thread.
    wide = max(1, size // 4)
    if n <= 2048:
        if 512 < n <= 3 * whole // 4:
            return whole // 4, 2
        return whole, 1 if n * wide <= 512 else 2 if n == 1024 else 4
    if n < 4096:
        return 1024 // wide, 8
    if n < 8192:
        return 2048 // wide, 16
    if n <= 20480:
        return 2048 // wide, 8 * wide
    return 4096 // wide, 32


# Launching -----------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Tensors of one shape seen as [OUTER, INNER, N]."""

    sizes: tuple[int, int, int]  # OUTER, INNER and N
    outers: tuple[int, ...]  # OUTER's axes, the fastest first, where it is more than one that no strides fold
    strides: list[tuple[tuple[int, ...], int, int]]  # of each tensor: those of OUTER's axes, that of INNER, that of N


def layout_of(dim: int, *tensors: Tensor) -> Layout:
    """See tensors of one shape as [OUTER, INNER, N], where N is the axis `dim`."""
    shape = tensors[0].shape
    if not shape:
        return Layout((1, 1, 1), (1,), [((1,), 1, 1) for _ in tensors])
    strides = [t.stride() for t in tensors]
    folded: list[tuple[int, list[int]]] = []  # sizes and strides of the axes beside `dim`, after folding neighbours
    for i, size in enumerate(shape):
        if i == dim or size == 1:
            continue
        here = [s[i] for s in strides]
        if folded and all(before == now * size for before, now in zip(folded[-1][1], here, strict=True)):
            folded[-1] = (folded[-1][0] * size, here)
        else:
            folded.append((size, here))
    folded = [(1, [0] * len(tensors))] * (2 - len(folded)) + folded
    steps = [s[dim] for s in strides]
    # Where the numbers of a row lie apart, those of INNER shall lie together.
    apart = [i for i, step in enumerate(steps) if step != 1]
    axes = [k for k, (size, _) in enumerate(folded) if size > 1]
    nearest = (
        min(reversed(axes), key=lambda k: min(folded[k][1][i] or math.inf for i in apart)) if apart and axes else -1
    )
    inner, inners = folded.pop(nearest)
    outers = tuple(size for size, _ in reversed(folded))
    along = [tuple(axis[i] for _, axis in reversed(folded)) for i in range(len(tensors))]
    return Layout((math.prod(outers), inner, shape[dim]), outers, list(zip(along, inners, steps, strict=True)))


_plan = functools.lru_cache(maxsize=4096)(softmax_plan)


def _prepared(
    dense: Tensor, free: Tensor, dim: int, tensors: int
) -> tuple[Plan, tuple[int, int], list[tuple[Any, int, int]], dict[str, Any]]:
    """The plan; INNER and N, and the strides of both tensors, as kernels take them; ALIGN and OUTER's axes.

    `dense` is contiguous; `free` has its shape and any strides.
    """
    (outer, inner, n), outers, strides = layout_of(dim, dense, free)
    last = n == 1 or all(step == 1 for _, _, step in strides)
    starts = [(*along, step) for along, step, _ in strides]
    whole = 16 // dense.element_size()
    align = math.gcd(whole, n, *(v for s in starts for v in s)) if last else 1
    # Rows that begin in the middle of a pair can be read as pairs if both tensors' rows do.
    alike = align > 1 or starts[0] == starts[1]
    pairs = dense.element_size() == 2 and last and outer == 1 and alike and free.data_ptr() % 4 == 0
    alike = all((a - b) % whole == 0 for a, b in zip(*starts, strict=True))
    vector = whole if alike and dense.data_ptr() % 16 == free.data_ptr() % 16 == 0 else 1
    capability, processors = gpu(dense.device)
    flat = outer == 1 and last and (inner == 1 or all(along == n for _, along, _ in strides))
    known = {"processors": processors, "last": last, "pairs": pairs, "vector": vector, "flat": flat, "tensors": tensors}
    plan = _plan((outer, inner, n), dense.dtype, capability, **known)
    windowed = plan.kernel in ("narrow", "whole", "shared")  # these find out where a row begins
    align = 1 if windowed else align
    given = []
    for along, b, step in strides:
        a = tuple(v // align for v in along)
        given.append((a if len(a) > 1 else a[0], b // align, step if n > 1 else 1))
    if plan.kernel == "shared" and tensors == 1 and outer == 1:  # along OUTER, a row is found without a division
        inner, given = 1, [(b, 0, step) for _, b, step in given]
    layout = {} if windowed else {"ALIGN": align}
    return plan, (inner, n // align), given, layout | ({"OUTERS": outers[:-1]} if len(outers) > 1 else {})


def launch_rows(
    kernels: Mapping[str, Any], out: Tensor, ins: tuple[Tensor, ...], dim: int, word: torch.dtype, words: int = 1
) -> None:
    """Launch what the plan says; all tensors are contiguous, but for the last of `ins`, which may have any strides.

    `kernels` are by `Plan.kernel`; a program of ``"shared"`` leaves `words` numbers of the dtype `word` for the others.
    """
    plan, sizes, strides, layout = _prepared(out, ins[-1], dim, len(ins))
    if plan.kernel == "turned":  # which is less work than wide tiles that are read or written across
        ins = tuple(t if t.stride(-1) == 1 else side_by_side(t) for t in (t.movedim(dim, -1) for t in ins))
        turned = out.movedim(dim, -1)
        found_in = turned if turned.stride(-1) == 1 else empty(turned.shape, out.dtype, out.device)
        launch_rows(kernels, found_in, ins, turned.dim() - 1, word, words)
        if found_in is not turned:
            lay(turned, found_in)
        return
    kernel, grid = kernels[plan.kernel], (plan.programs,)
    constants = {**layout, **plan.constants, "num_warps": plan.warps}
    if plan.constants.get("CTAS", 1) > 1:
        constants["num_ctas"] = plan.constants["CTAS"]
    if plan.kernel == "pairs":
        launch(kernel, grid, out, *ins, sizes[1], *(s[1] for s in strides), **constants)
    elif plan.kernel == "narrow":
        launch(kernel, grid, out, *ins, out.numel() // sizes[1], *sizes, *strides, **constants)
    elif plan.kernel == "shared":
        # A word of zeros for each part of a row; the first rows are read while the zeros are written.
        rows, early = out.numel() // out.shape[dim], overlapping(out.device)
        all_words = rows * plan.parts * words
        board = empty((all_words,), word, out.device)
        block = 16384 // word.itemsize
        launch(fill, (triton.cdiv(all_words, block),), board, all_words, BLOCK=block, EARLY=bool(early), num_warps=8)
        turns = (rows,) if len(ins) == 2 else ()  # programs of a gradient go from row to row
        launch(
            kernel, grid, out, *ins, board, *turns, *sizes, *strides, plan.span // plan.constants["VEC"], plan.parts,
            LATE=bool(early), maxnreg=plan.registers, **constants, **early,
        )  # fmt: skip
    else:
        launch(kernel, grid, out, *ins, *sizes, *strides, **constants)


def side_by_side(x: Tensor) -> Tensor:
    """Rows without gaps, copied where they are not; by tiles where it is neighbouring rows that lie side by side."""
    if x.is_contiguous() or x.stride(-1) == 1 or not x.numel():
        return contiguous(x)
    y = empty(x.shape, x.dtype, x.device)
    lay(y, x)
    return y


def lay(y: Tensor, x: Tensor) -> None:
    """Copy numbers to where they lie otherwise: in one of `x` and `y`, those of neighbouring rows lie together."""
    (outer, inner, n), outers, strides = layout_of(x.dim() - 1, y, x)
    # Large tiles, where there are enough of them; the interpreter's cost is programs times operations.
    numbers, warps = (8192, 8) if x.numel() >= 2**24 and x.element_size() < 8 else (4096, 4)
    numbers = numbers if gpu(x.device)[0] is not None else 2**16
    rows = min(64, triton.next_power_of_2(inner))
    block = min(numbers // rows, triton.next_power_of_2(n))
    if any(rows * b + block * step >= 2**31 for _, b, step in strides):  # within a tile, places are of 32 bits
        apply(Tensor.copy_, y, x)
        return
    grid = (outer * triton.cdiv(inner, rows) * triton.cdiv(n, block),)
    given = [(along if len(along) > 1 else along[0], b, step) for along, b, step in strides]
    layout = {"OUTERS": outers[:-1]} if len(outers) > 1 else {}
    launch(_turned, grid, y, x, inner, n, *given, ROWS=rows, BLOCK=block, **layout, num_warps=warps)


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


def in_rows(x: Tensor) -> Tensor | None:
    """A tensor as a matrix of its rows; None where their numbers do not lie side by side, at equal distances."""
    n = x.shape[-1]
    if n > 1 and x.stride(-1) != 1:
        return None
    try:
        return x.view(-1, n)
    except RuntimeError:  # rows at no equal distances
        return None


def rows_in(x: Tensor) -> Tensor:
    """A tensor as a matrix of its rows, whose numbers lie side by side; copied where they do not."""
    matrix = in_rows(x)
    return side_by_side(x).view(-1, x.shape[-1]) if matrix is None else matrix


def aligned(n: int, *tensors: Tensor | None) -> int:
    """Of how many numbers, up to those of 16 bytes, widths and strides of matrices are multiples."""
    steps = [t.stride(0) for t in tensors if t is not None]
    if max(steps) >= 2**31:  # a quotient of 32 bits, multiplied by this again, would be a product of 32 bits
        return 1
    return math.gcd(n, *steps, *(16 // t.element_size() for t in tensors if t is not None))


def alike(x: Tensor, *_: Any) -> Tensor:
    return empty(x.shape, x.dtype, x.device)


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
