# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/_norms_across.py. It needs torch, Triton, NumPy, _call.py, _layouts.py and
# _norms.py.
"""Gradients of norms whose rows lie across: the numbers of a row apart in memory, those of neighbouring rows together.

A tile of neighbouring rows is read across them and written along them. Where rows are short, a program holds all of a
tile's numbers. Wider rows are cut into parts, and read twice: once for what a part adds to its row's statistics, which
is left in memory, and once by those of all parts. To lay two tensors side by side first would read and write both.
"""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment,var-annotated"

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ._call import accumulated, empty, gpu, launch
from ._layouts import layout_of
from ._norms import anchor_of, loaded, since, sum_both

#: Up to this, the smallest normal number of float32, what is added to a row of zeros may be nothing, or less.
LEAST_EPS = tl.constexpr(2.0**-126)

# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _sums_of_rows(a, b, TOGETHER: tl.constexpr):
    """Of two tiles the sums of their rows [ROWS, 1]."""
    first, second = sum_both(a, b, 1, TOGETHER)
    return first[:, None], second[:, None]


@triton.jit
def _folded(tile, SIDE: tl.constexpr):
    """Sums of SIDE neighbouring rows, which a thread holds."""
    if SIDE == 1:
        return tile
    else:
        return tl.sum(tile.reshape(tile.shape[0] // SIDE, SIDE, tile.shape[1]), 1)


@triton.jit
def _weight(ws, i: tl.constexpr, w_ptr, columns, N, KEEP: tl.constexpr):
    if KEEP:
        return ws[i]
    else:
        return loaded(w_ptr, columns, columns < N, 1.0)


@triton.jit
def _norm_backward_across(
    dx_ptr, sums_ptr, stats_ptr, x_ptr, dy_ptr, dtotal_ptr, w_ptr, OUTER, INNER, N, GROUPS, PARTS,
    dx_strides, x_strides, dy_strides, dtotal_strides,
    SIDE: tl.constexpr, ALIGN: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, DW: tl.constexpr,
    DB: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    SPAN: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr, TOGETHER: tl.constexpr, NEAR: tl.constexpr,
    KEEP: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS neighbours along INNER, in CHUNKS of BLOCK columns; of each part GROUPS programs take all rows.

    INNER, and of x, dy and dtotal the strides of OUTER and N, are counted in units of SIDE rows, which lie side by
    side; N, and of dx the strides of OUTER and INNER, in units of ALIGN numbers. NEAR: within a tile 32 bits tell where
    numbers are. KEEP: weights are held in registers. ALIKE: x and dy have the same strides.
    STEP 0: all of a row; 1: what a part of SPAN columns adds to its statistics; 2: the rest by these.
    """
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    FAR: tl.constexpr = CENTRED and x_ptr.dtype.element_ty.primitive_bitwidth > 16
    N = N * ALIGN
    INNER = INNER * SIDE
    tiles = tl.cdiv(INNER, ROWS)
    # Programs of neighbouring tiles, which share lines of memory, run at the same time.
    group = tl.program_id(0) % GROUPS
    part = tl.program_id(0) // GROUPS
    begin = part * (CHUNKS * BLOCK)
    columns = begin + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    lane = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    INT: tl.constexpr = tl.int32 if NEAR else tl.int64
    wide = tl.arange(0, BLOCK)[None, :].to(INT) * SIDE
    from_x = lane.to(INT) * x_strides[1] + wide * x_strides[2]  # [ROWS, BLOCK]
    from_dy = from_x if ALIKE else lane.to(INT) * dy_strides[1] + wide * dy_strides[2]
    from_dx = lane.to(INT) * dx_strides[1] * ALIGN + tl.arange(0, BLOCK)[None, :]
    step = tl.full([], BLOCK, tl.int64) * SIDE
    x_ptr += begin.to(tl.int64) * x_strides[2] * SIDE
    dy_ptr += begin.to(tl.int64) * dy_strides[2] * SIDE
    dws = ()
    dbs = ()
    ws = ()
    if KEEP:
        for i in tl.static_range(CHUNKS):
            ws += (loaded(w_ptr, columns + i * BLOCK, columns + i * BLOCK < N, 1.0),)
    if STEP != 1:
        for _ in tl.static_range(CHUNKS):
            if DW:
                dws += (tl.zeros([ROWS // SIDE, BLOCK], FLOAT),)
            if DB:
                dbs += (tl.zeros([ROWS // SIDE, BLOCK], FLOAT),)
    for turn in tl.range(group, OUTER * tiles, GROUPS, num_stages=STAGES):
        # From the end back: what was read last is likeliest to be in a cache still.
        tile = OUTER * tiles - 1 - turn if STEP == 2 else turn
        outer = (tile // tiles).to(tl.int64)
        inner = tile % tiles * ROWS + lane  # [ROWS, 1]
        live = inner < INNER
        to = inner.to(tl.int64)
        first = (tile % tiles * ROWS).to(tl.int64)
        x_tile = x_ptr + (outer * x_strides[0] * SIDE + first * x_strides[1])
        dy_tile = dy_ptr + (outer * dy_strides[0] * SIDE + first * dy_strides[1])
        step_x = tl.cast(x_strides[2], tl.int64) * SIDE
        at_x = lane.to(tl.int64) * x_strides[1] - begin.to(tl.int64) * step_x
        anchor = anchor_of(x_tile, None, at_x, at_x, step_x, step_x, N, live, FAR, STEP > 0)  # [ROWS, 1]
        xs = ()
        dys = ()
        for i in tl.static_range(CHUNKS):  # all of them before the first is stored
            inside = live & (columns + i * BLOCK < N)
            xs += (tl.load(x_tile + i * step * x_strides[2] + from_x, mask=inside, other=0.0),)  # read MN
            dys += (tl.load(dy_tile + i * step * dy_strides[2] + from_dy, mask=inside, other=0.0),)  # read MN
        mean = tl.zeros([ROWS, 1], FLOAT)
        totals = tl.zeros([ROWS, BLOCK], FLOAT)
        gs = totals
        if STEP < 2:
            if CENTRED:
                for i in tl.static_range(CHUNKS):
                    w = _weight(ws, i, w_ptr, columns + i * BLOCK, N, KEEP).to(FLOAT)
                    x = since(xs[i], anchor, FLOAT, FAR)
                    totals += tl.where(columns + i * BLOCK < N, x, 0.0) if FAR else x
                    gs += dys[i].to(FLOAT) * w
                total, g = _sums_of_rows(totals, gs, TOGETHER)
                mean = total / tl.minimum(N - begin, SPAN)
            squares = tl.zeros([ROWS, BLOCK], FLOAT)
            products = squares
            for i in tl.static_range(CHUNKS):
                w = _weight(ws, i, w_ptr, columns + i * BLOCK, N, KEEP).to(FLOAT)
                x = since(xs[i], anchor, FLOAT, FAR)
                if CENTRED:
                    x = tl.where(columns + i * BLOCK < N, x - mean, 0.0)
                squares += x * x
                products += x * (dys[i].to(FLOAT) * w)
            square, product = _sums_of_rows(squares, products, TOGETHER)
        row = outer * INNER + to
        rows = (tl.zeros([], tl.int64) + OUTER) * INNER
        if STEP == 1:
            tl.store(stats_ptr + part * rows + row, square, mask=live)
            tl.store(stats_ptr + (PARTS + part) * rows + row, product, mask=live)
            if CENTRED:
                tl.store(stats_ptr + (2 * PARTS + part) * rows + row, total, mask=live)
                tl.store(stats_ptr + (3 * PARTS + part) * rows + row, g, mask=live)
        else:
            if STEP == 2:
                lanes = tl.arange(0, LANES)[None, :]  # [1, LANES]
                found = live & (lanes < PARTS)
                squares = tl.load(stats_ptr + lanes * rows + row, mask=found, other=0.0)  # [ROWS, LANES]
                products = tl.load(stats_ptr + (PARTS + lanes) * rows + row, mask=found, other=0.0)
                if CENTRED:
                    sums = tl.load(stats_ptr + (2 * PARTS + lanes) * rows + row, mask=found, other=0.0)
                    its_gs = tl.load(stats_ptr + (3 * PARTS + lanes) * rows + row, mask=found, other=0.0)
                    total, g = _sums_of_rows(sums, its_gs, TOGETHER)
                    mean = total / N
                    counts = tl.maximum(tl.minimum(N - lanes * SPAN, SPAN), 0).to(FLOAT)
                    away = sums / tl.maximum(counts, 1.0) - mean
                    squares += counts * away * away
                    products += its_gs * away
                square, product = _sums_of_rows(squares, products, TOGETHER)
            factor = 1 / tl.sqrt(square / N + EPS)  # [ROWS, 1]
            if not EPS > LEAST_EPS:  # of rows beyond the last it is infinite, or NaN
                factor = tl.where(live, factor, 0.0)
            mean_product = product * factor / N
            mean_g = tl.zeros([ROWS, 1], FLOAT)
            if CENTRED:
                mean_g = g / N
            dx_tile = dx_ptr + (outer * dx_strides[0] * ALIGN + first * dx_strides[1] * ALIGN + begin)
            more_dws = ()
            more_dbs = ()
            for i in tl.static_range(CHUNKS):
                inside = live & (columns + i * BLOCK < N)
                w = _weight(ws, i, w_ptr, columns + i * BLOCK, N, KEEP).to(FLOAT)
                x = since(xs[i], anchor, FLOAT, FAR)
                dy = dys[i].to(FLOAT)
                n = (x - mean if CENTRED else x) * factor
                if DW:
                    more_dws += (dws[i] + _folded(dy * n, SIDE),)
                if DB:
                    more_dbs += (dbs[i] + _folded(dy, SIDE),)
                dx = dy * w - n * mean_product
                if CENTRED:
                    dx -= mean_g
                dx *= factor
                if dtotal_ptr is not None:
                    at = outer * dtotal_strides[0] * SIDE + to * dtotal_strides[1]
                    at += (columns + i * BLOCK).to(tl.int64) * dtotal_strides[2] * SIDE
                    dx += tl.load(dtotal_ptr + at, mask=inside, other=0.0).to(FLOAT)
                tl.store(dx_tile + from_dx + i * BLOCK, dx.to(dx_ptr.dtype.element_ty), mask=inside)  # write MN
            dws = more_dws
            dbs = more_dbs
    if STEP != 1:
        if DW or DB:
            sums_ptr += group.to(tl.int64) * N
        for i in tl.static_range(CHUNKS):
            at = columns + i * BLOCK
            if DW:
                tl.store(sums_ptr + at, tl.sum(dws[i], 0)[None, :], mask=at < N)
            if DB:
                behind = (tl.zeros([], tl.int64) + GROUPS) * N if DW else tl.zeros([], tl.int64)
                tl.store(sums_ptr + behind + at, tl.sum(dbs[i], 0)[None, :], mask=at < N)


# Plans ---------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a gradient across rows is launched; of wide rows `first` are the constants of the first reading."""

    constants: Mapping[str, Any]
    groups: int  # of programs; each takes its share of all rows
    parts: int  # of a row
    warps: int
    registers: int | None
    first: tuple[Mapping[str, Any], int, int] | None = None  # constants, groups, warps


#: Tiles for rows of up to so many numbers, by the bytes of a number: ROWS and BLOCK, warps, how many programs a
#: multiprocessor has, and the most registers. Wider rows are read twice, by the tiles of `_TWICE`.
_TILES = {
    2: (
        *((64, (64, 16, 8, 2, 128)), (160, (16, 32, 8, 2, 128))),
        *((640, (16, 128, 16, 1, 128)), (1280, (8, 128, 16, 1, 128))),
    ),
    4: (
        *((64, (32, 16, 8, 3, 80)), (320, (16, 64, 8, 2, 128))),
        *((768, (8, 128, 8, 2, 128)), (1152, (8, 128, 16, 1, 128))),
    ),
    8: ((64, (16, 16, 8, 3, 80)), (128, (8, 64, 8, 2, 128)), (512, (4, 128, 16, 1, 128))),
}
#: Of fewer than 4096 rows side by side, and of more: there columns lie far apart, and tiles have more of them.
_TWICE = {
    2: ((16, 64, 8, 3, 80), (16, 128, 8, 2, 128)),
    4: ((16, 64, 8, 4, 128), (8, 128, 8, 3, 80)),
    8: ((4, 64, 8, 2, 128), (4, 64, 8, 2, 128)),
}


def across_backward_plan(
    outer: int, inner: int, n: int, size: int, capability: tuple[int, int] | None, processors: int
) -> Plan:
    """Choose the constants for `outer` times `inner` rows, of `n` numbers of `size` bytes."""
    tiles = _TILES[size]
    rows, block, warps, programs, registers = next(
        (tile for most, tile in tiles if n <= most), _TWICE[size][inner >= 4096]
    )
    at_once = n <= tiles[-1][0]
    if capability is None:  # the interpreter's cost is programs times operations, whatever their size
        rows, block = 64, min(512, triton.next_power_of_2(n))
    count = outer * triton.cdiv(inner, rows)
    # A thread holds 4 numbers of each tensor of a wide row while it finds statistics, and 2 while it uses them.
    chunks = triton.cdiv(n, block) if at_once else 4
    constants = {"ROWS": rows, "BLOCK": block, "CHUNKS": chunks, "SPAN": chunks * block, "STAGES": 1, "KEEP": True}
    if at_once:
        constants["LANES"] = 1
        groups = triton.cdiv(count, triton.cdiv(count, programs * processors))  # of which all have as much to do
        return Plan(constants, groups, 1, warps, registers)
    parts = triton.cdiv(n, chunks * block)
    constants["LANES"] = max(2, triton.next_power_of_2(parts))
    groups = max(1, programs * processors // triton.cdiv(n, 2 * block))
    groups = triton.cdiv(count, triton.cdiv(count, min(count, groups)))
    return Plan({**constants, "CHUNKS": 2}, groups, parts, warps, registers, (constants, count, warps))


_plan = functools.lru_cache(maxsize=4096)(across_backward_plan)

# Launching -----------------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where rows lie: how many along OUTER and INNER, and of dx, x, dy and dtotal three strides."""

    outer: int
    inner: int
    strides: list[tuple[int, int, int] | None]


def places_of(dx: Tensor, x: Tensor, dy: Tensor, dtotal: Tensor | None) -> Places | None:
    """Where rows lie, if they are read across: where there are enough neighbours, and more than one read of them."""
    n = dx.shape[-1]
    given = [dx, x, dy] if dtotal is None else [dx, x, dy, dtotal]
    if n <= 1 or not dx.numel() or any(t.stride(-1) == 1 for t in given[1:]):
        return None
    (outer, inner, _), outers, strides = layout_of(dx.dim() - 1, *given)
    # Tiles end where INNER does, and so many shall be full; they are counted in 32 bits.
    if len(outers) > 1 or inner < 64 or outer * inner >= 2**30:
        return None
    if any(step >= apart for _, step, apart in strides[1:]):  # along a row they lie nearer
        return None
    found: list[tuple[int, int, int] | None] = [(along[0], step, apart) for along, step, apart in strides]
    if strides[0][1] != n:  # a tile's rows of dx would lie apart
        return None
    return Places(outer, inner, [*found, None] if dtotal is None else found)


def planned(places: Places, x: Tensor) -> Plan:
    """How these rows are launched."""
    capability, processors = gpu(x.device)
    return _plan(places.outer, places.inner, x.shape[-1], x.element_size(), capability, processors)


def across_into(
    plan: Plan,
    places: Places,
    dx: Tensor,
    sums: Tensor | None,
    x: Tensor,
    dy: Tensor,
    dtotal: Tensor | None,
    weight: Tensor | None,
    given: Mapping[str, Any],
) -> None:
    """Gradients of rows that lie across; of weights, if asked for, partial rows in `sums`."""
    outer, inner, n = places.outer, places.inner, x.shape[-1]
    of_dx, *others = places.strides
    assert of_dx is not None
    whole = 16 // x.element_size()
    # Vectors of so many rows, where all read tensors have them, and of so many numbers of a row of dx.
    side = math.gcd(whole, inner, *(v for s in others if s is not None for v in (s[0], s[2])))
    if any(s is not None and s[1] != 1 for s in others):
        side = 1
    align = math.gcd(whole, n, *of_dx[:2])
    units = [None if s is None else (s[0] // side, s[1], s[2] // side) for s in others]
    strides = ((of_dx[0] // align, of_dx[1] // align), *units)
    constants = {"SIDE": side, "ALIGN": align, "TOGETHER": gpu(x.device)[0] is not None, **given}
    stats = None

    rows, columns = plan.constants["ROWS"], plan.constants["BLOCK"]
    near = all(s is None or rows * s[1] + columns * s[2] < 2**31 for s in places.strides)
    constants |= {"NEAR": near, "ALIKE": units[0] == units[1]}

    def step(which: int, chosen: Mapping[str, Any], groups: int, parts: int, warps: int, most: int | None) -> None:
        options = {} if most is None else {"maxnreg": most}
        launch(
            _norm_backward_across, (groups * parts,), dx, sums, stats, x, dy, dtotal, weight, outer, inner // side,
            n // align, groups, plan.parts, *strides, STEP=which, num_warps=warps, **options, **chosen, **constants,
        )  # fmt: skip

    if plan.first is not None:
        chosen, groups, warps = plan.first
        words = (4 if given["CENTRED"] else 2) * plan.parts * outer * inner
        stats = empty((words,), accumulated(x.dtype), x.device)
        step(1, chosen, groups, plan.parts, warps, None)
    less = plan.constants["BLOCK"] * plan.constants["CHUNKS"]
    step(0 if plan.first is None else 2, plan.constants, plan.groups, triton.cdiv(n, less), plan.warps, plan.registers)
