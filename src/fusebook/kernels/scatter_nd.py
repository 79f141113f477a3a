"""ScatterND into zeros, masked: rows of updates are added to the rows of a new tensor that their indices name.

For indices ``[n, k]`` into an output whose first k axes hold R rows of D elements each, and updates ``[n, D]``,

    out[r, :] = sum of updates[i, :] over all i whose index names row r and is not masked

Rows that nothing names are zero. A negative index counts from the end, the masked value excepted.

Fused: making the zeros, comparing with the masked value, replacing masked updates and adding. The chain of separate
operations writes RD zeros, reads and writes the nD updates to mask them, and reads them again to add them to nD
elements of the output, which it reads and writes. The least is to read nD and to write RD.

Sums are float32 at least (float64 in float64), and rounded once: a sum kept in float16 loses its tail after some
hundred terms. Limits: the output is contiguous; reductions other than ``add`` are refused.

Three strategies. *Atomic*: zeros, then atomic additions, in the order that the hardware takes. *Sorted*: the updates
are put in the order of their rows, and each stretch of one row is added up in the order of their numbers: the same bits
in every run. Up to some thousand updates the sort is hidden behind the zeros; some dozen updates each look for the
others of their row. *Owner*: updates are grouped by row with integer atomics (or, where they are few, each row looks
through all indices), and one kernel writes each row of the output exactly once, zeros included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import (
    FLOATING,
    INTEGERS,
    INTERPRETED,
    Operator,
    accumulated,
    apply,
    capturing,
    contiguous,
    empty,
    gpu,
    integer,
    launch,
    one_of,
    overlapping,
    shapes,
)
from ._grouped import Plan, launch_lists, launch_owner, launch_segments, row_of, scatter_nd_fill, steps_of
from ._memory import side_by_side

__all__ = ["embedding_backward", "masked_scatter_nd_eager", "masked_scatter_nd_of_shape", "scatter_nd_of_shape"]

# The unfused chain ---------------------------------------------------------------------------------------------------


def masked_scatter_nd_eager(shape: Sequence[int], indices: Tensor, updates: Tensor) -> Tensor:
    """Masked ScatterND, one operation after another: what fusing saves.

    Parameters
    ----------
    shape : sequence of int
        R, D.
    indices : torch.Tensor
        ``[n, 1]``, from -1 to R - 1; -1 is masked.
    updates : torch.Tensor
        ``[n, D]``.

    Returns
    -------
    torch.Tensor
        ``[R, D]``, of the dtype of `updates`.
    """
    data = updates.new_zeros(shape)  # write RD
    masked = indices == -1  # read n indices, write n
    kept = torch.where(masked, 0, updates)  # read nD, write nD
    rows = indices[:, 0].clamp(min=0)  # read n indices, write n indices
    return data.index_add_(0, rows, kept)  # read 2nD, write nD: in all read 3nD, write RD + 2nD


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _scatter_nd_keys(
    keys_ptr, indices_ptr, n, K, S0, S1, S2, S3, masked,
    MASKED: tl.constexpr, AXES: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Up to four components of each index into one row number; further components by further launches."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = i < n
    if FIRST:
        key = tl.zeros([BLOCK], tl.int64)
    else:
        key = tl.load(keys_ptr + i, mask=inside, other=-1).to(tl.int64)
    for a in tl.static_range(AXES):
        size = S0 if a == 0 else S1 if a == 1 else S2 if a == 2 else S3
        at = row_of(tl.load(indices_ptr + i * K + a, mask=inside, other=0), size, masked, MASKED)
        key = tl.where((key < 0) | (at < 0), -1, key * size + at)
    tl.store(keys_ptr + i, key, mask=inside)


@triton.jit
def _scatter_nd_round(out_ptr, sums_ptr, SIZE, BLOCK: tl.constexpr, LATE: tl.constexpr = False):
    """Sums into the output's dtype."""
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the sums
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    sums = tl.load(sums_ptr + at, mask=at < SIZE, other=0.0)  # read RD
    tl.store(out_ptr + at, sums, mask=at < SIZE)  # write RD


@triton.jit
def _scatter_nd_atomic(
    sums_ptr, indices_ptr, updates_ptr, R, D, n, stride, masked,
    MASKED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LATE: tl.constexpr = False,
):  # fmt: skip
    """Add ROWS updates to zeros; hardware orders the additions to one element, and not always alike."""
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    i = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    columns = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = row_of(tl.load(indices_ptr + i, mask=i < n, other=0), R, masked, MASKED)  # [ROWS]
    live = ((row >= 0) & (i < n))[:, None] & (columns < D)[None, :]  # [ROWS, BLOCK]
    at = (i * stride * ALIGN)[:, None] + columns[None, :]
    values = tl.load(updates_ptr + at, mask=live, other=0.0).to(sums_ptr.dtype.element_ty)  # read nD
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros; the updates are on their way already
    # relaxed: additions need no order among each other, and whoever reads them is another kernel.
    tl.atomic_add(sums_ptr + (row * D)[:, None] + columns[None, :], values, mask=live, sem="relaxed")  # read, write nD


@triton.jit
def _scatter_nd_scan(
    out_ptr, indices_ptr, updates_ptr, R, D, n, stride, masked,
    MASKED: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    FIRST: tl.constexpr, LATE: tl.constexpr = False,
):  # fmt: skip
    """Few updates: each program reads all indices, and adds up the updates of its row.

    That is a row of the output, zeros where nothing names it; or with FIRST the row that an update names before any
    other does, where the output is zeros already.
    """
    FLOAT: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    i = tl.arange(0, N)  # [N]
    named = row_of(tl.load(indices_ptr + i, mask=i < n, other=0), R, masked, MASKED)  # read n indices
    named = tl.where(i < n, named, -1)
    reach = D
    if FIRST:
        own = tl.max(tl.where(i == row, named, -1), 0)
        earlier = tl.max(((named == own) & (i < row)).to(tl.int32), 0)
        reach = tl.where((own >= 0) & (earlier == 0), D, 0)
        row = own
    mine = named == row
    count = tl.where(reach > 0, tl.sum(mine.to(tl.int32), 0), 0)
    acc = tl.zeros([1, BLOCK], FLOAT)
    if count <= 8:
        # Few: take out their numbers one after another, each the least above the one before; the loads follow together.
        last = tl.full([], -1, tl.int32)
        for _ in range(0, count, 4):
            for _u in tl.static_range(4):
                last = tl.min(tl.where(mine & (i > last), i, N), 0)
                at = last.to(tl.int64) * stride * ALIGN + columns
                # A bound, not a mask of one element: Triton 3.9 interprets no load under a mask that is made of one.
                within = tl.where(last < N, D, 0)
                acc += tl.load(updates_ptr + at, mask=columns < within, other=0.0).to(FLOAT)  # read nD
    else:
        # Many: all updates are gone through, and those of this row are loaded.
        sums = tl.zeros([GROUP, BLOCK], FLOAT)
        for first in range(0, n, 4 * GROUP):
            for u in tl.static_range(4):
                j = first + u * GROUP + tl.arange(0, GROUP)[:, None]  # [GROUP, 1]
                theirs = row_of(tl.load(indices_ptr + j, mask=j < n, other=0), R, masked, MASKED)
                live = (theirs == row) & (j < n) & (columns < D)
                sums += tl.load(updates_ptr + j.to(tl.int64) * stride * ALIGN + columns, mask=live, other=0.0).to(FLOAT)
        acc = tl.sum(sums, 0)[None, :]
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros
    tl.store(out_ptr + row * D + columns, acc, mask=columns < reach)  # write RD, or up to nD


@triton.jit
def _gather_nd_rows(
    out_ptr, indices_ptr, source_ptr, R, D, n, masked,
    MASKED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient: the row that each index names, zeros where it names none."""
    D = D * ALIGN
    tiles = tl.cdiv(D, BLOCK)
    i = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    columns = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    row = row_of(tl.load(indices_ptr + i, mask=i < n, other=0), R, masked, MASKED)  # [ROWS]
    live = ((i < n) & (row >= 0))[:, None] & (columns < D)
    values = tl.load(source_ptr + (row * D)[:, None] + columns, mask=live, other=0.0)  # read nD
    tl.store(out_ptr + (i * D)[:, None] + columns, values, mask=(i < n)[:, None] & (columns < D))  # write nD


# Plans ---------------------------------------------------------------------------------------------------------------

STRATEGIES = ("atomic", "sorted", "owner")

# What grouping costs, on an H200, in bytes of float32 updates that are added meanwhile: for each update, and for all.
_GROUPING = 576
_GROUPED = {"sorted": 14 * 2**20, "owner": 48 * 2**20}


def _scatter_nd_plan(
    sizes: tuple[int, int, int], dtype: torch.dtype, capability: tuple[int, int] | None, *, strategy: str | None = None,
    deterministic: bool = False,
) -> Plan:  # fmt: skip
    """Choose the strategy and its constants.

    `sizes` are R, D and n; `capability` is None in the interpreter. With `deterministic`, the same bits are asked for
    in every run, and sorted is chosen.
    """
    R, D, n = sizes
    size = dtype.itemsize
    # The interpreter's cost is programs times operations, whatever their size: it takes larger tiles, and comes to
    # every kernel with fewer updates, so that tests need not have many.
    interpreted = capability is None
    few, many = (16, 256) if interpreted else (64, 4096)
    # One launch for small work, where launches are the cost: each program reads all indices itself.
    small = R <= 512 and R * D <= (2**20 if n <= few else 2**17) and n <= max(few, min(512, 2 * R))
    # Launches and L2 are what counts below this, memory above. Half types are added up in float32.
    cached = R * D * max(size, 4) <= 2**24
    if strategy is None:
        if deterministic:
            strategy = "sorted"
        elif small and (size < 4 or n <= 16 or n > few):
            strategy = "owner"
        else:
            # Few updates are sorted by comparing each with each, and that is done beside the zeros.
            # Of half types also where most rows have some.
            named = R // 4 if size >= 4 else 3 * R // 2
            strategy = "sorted" if n <= many and (cached or n <= max(few, named)) else "owner"
            # Additions move some bytes a nanosecond less than loads do. What is to be saved by grouping must first be
            # earned: its launches, and about as much for each update as half a kilobyte of additions takes. In a small
            # output, which stays in L2 between its zeros and its additions, it takes many updates until grouping pays.
            if cached:
                # Of half types, which are rounded afterwards, fewer; thousands of each row wait for one another.
                alike = size >= 4 or (few < n <= 4096 * R and R * D <= (2**20 if n <= 2048 else 2**22))
                atomic = alike and n * D <= (2**26 if size >= 4 else 2**25)
            else:
                # Of narrow rows it is cheaper to round sums than to ask each row for its updates.
                alike = size >= 4 or (D <= 24 and n > many)
                atomic = alike and n > few and n * (D * size - _GROUPING) <= _GROUPED[strategy]
            strategy = "atomic" if atomic else strategy
    first = "first" if n <= few else "count" if n <= many else "sort"
    find = {"atomic": "", "sorted": first, "owner": "scan" if small else "lists"}[strategy]
    # Tuned on an H200: bytes of a row that a program takes, updates whose loads are under way together, updates of one
    # row that one program adds up, tiles of rows, warps; bytes of zeros that a program writes. Few programs start
    # quickly; where memory counts, small ones in the order of addresses fill faster.
    zeros = 16384 if R * D * size <= 2**26 else 4096
    wide = D * size >= 8192
    narrow = D <= 128 and size < 4 and not cached
    large = wide and size >= 4 and not cached
    if find in ("scan", "first"):
        width, together, chunk, steps, warps = (2048, 16, 0, 1, 4)
    elif find == "":
        width, together, chunk, steps, warps = (2048 if cached else 8192, 1, 0, 1, 4)
    elif find == "count":
        width, together, chunk, steps, warps = (4096, 8, 32, 1, 8) if large else (2048, 8, 16, 1, 4)
        if narrow:
            chunk = 32
    else:
        width, together, steps, warps, zeros = (4096, 4, 4, 4, 16384)
        # Balances the pieces: updates of one, sums of all, of which those of wide rows take longer.
        chunk = 2 ** max(4, math.isqrt(n).bit_length() - (2 if wide else 3))
        if n >= 256 * R:  # many of each row: owners are few, so their tiles are small
            width, together, chunk, steps = 512 * size, 8, 64, 1
    if interpreted:
        width, together, chunk, steps, warps, zeros = (65536, 2, 8 if n <= 64 else 32, 2, 1, 2**18)
    block = min(triton.next_power_of_2(D), width // size)
    # Narrow rows share a tile.
    tall = triton.next_power_of_2(max(1, R if find in ("sort", "lists") else n))
    tile = 16384 if interpreted else 512 if find == "" and cached else 256 if find == "count" and narrow else 1024
    rows = 1 if find in ("scan", "first") else max(1, min(tile // block, tall))
    return Plan(strategy, find, steps, rows, block, together, chunk, zeros // size, warps)


# Launchers -----------------------------------------------------------------------------------------------------------

_REDUCTIONS = ("none", "add", "mul", "max", "min")
_plan = functools.lru_cache(maxsize=4096)(_scatter_nd_plan)


def _launch_zeros(out: Tensor, size: int, plan: Plan) -> dict[str, bool]:
    """Zeros; returns how the next kernel is launched, which waits for them where it needs them."""
    programs = triton.cdiv(size, plan.fill)
    # Each program signals; where there are many, that costs more than it saves.
    early = overlapping(out.device) if programs <= 4096 else {}
    warps = 8 if plan.fill >= 4096 else 4
    launch(scatter_nd_fill, (programs,), out, size, BLOCK=plan.fill, EARLY=bool(early), num_warps=warps)
    return early


def _launch_atomic(
    out: Tensor, sums: Tensor, indices: Tensor, updates: Tensor, sizes: tuple[int, int, int], masked: int | None,
    plan: Plan,
) -> None:  # fmt: skip
    """Zeros and atomic additions; `sums` is `out` itself, or float32 memory of its size for half types."""
    R, D, n = sizes
    stride, align = steps_of(updates, D)
    early = _launch_zeros(sums, R * D, plan)
    launch(
        _scatter_nd_atomic, (triton.cdiv(n, plan.rows) * triton.cdiv(D, plan.block),),
        sums, indices, updates, R, D // align, n, stride // align, masked or 0,
        MASKED=masked is not None, ALIGN=align, ROWS=plan.rows, BLOCK=plan.block, LATE=bool(early),
        num_warps=plan.warps, **early,
    )  # fmt: skip
    if sums is not out:
        late = overlapping(out.device)
        programs = triton.cdiv(R * D, plan.fill)
        launch(_scatter_nd_round, (programs,), out, sums, R * D, BLOCK=plan.fill, LATE=bool(late), **late)


def _launch_scan(
    out: Tensor, indices: Tensor, updates: Tensor, sizes: tuple[int, int, int], masked: int | None, plan: Plan
) -> None:  # fmt: skip
    """The owner in one launch; or zeros, and the rows that updates name."""
    R, D, n = sizes
    stride, align = steps_of(updates, D)
    first = plan.find == "first"
    early = _launch_zeros(out, R * D, plan) if first else {}
    launch(
        _scatter_nd_scan, ((n if first else R) * triton.cdiv(D, plan.block),),
        out, indices, updates, R, D // align, n, stride // align, masked or 0,
        MASKED=masked is not None, ALIGN=align, N=triton.next_power_of_2(n), BLOCK=plan.block, GROUP=plan.together,
        FIRST=first, LATE=bool(early), num_warps=plan.warps, **early,
    )  # fmt: skip


def _keyed(shape: Sequence[int], indices: Tensor, masked: int | None, dtype: torch.dtype) -> Tensor:
    """The row of each index ``[n, k]`` as one number, -1 where it is masked or out of range."""
    n, k = indices.shape
    if k == 0:  # every index names the whole output
        return apply(torch.zeros, n, dtype=dtype, device=indices.device)
    keys = empty((n,), dtype, indices.device)
    block = 4096 if INTERPRETED else 256
    for axis in range(0, k, 4):
        sizes = tuple(shape[axis : min(axis + 4, k)])
        # Components after `axis`; the kernel steps over K of them from one index to the next.
        launch(
            _scatter_nd_keys, (triton.cdiv(n, block),),
            keys, indices.select(1, axis) if axis else indices, n, k, *sizes, *(1,) * (4 - len(sizes)), masked or 0,
            MASKED=masked is not None, AXES=len(sizes), FIRST=axis == 0, BLOCK=block,
        )  # fmt: skip
    return keys


def _folded(shape: Sequence[int], indices: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Indices as ``[n, k]`` without gaps, and R, D and n."""
    k = indices.shape[-1]
    n = math.prod(indices.shape[:-1])
    return contiguous(indices).view(n, k), (math.prod(shape[:k]), math.prod(shape[k:]), n)


def _rows(updates: Tensor, n: int, D: int) -> Tensor:
    """Updates as ``[n, D]`` whose rows have no gaps."""
    try:
        rows = updates.view(n, D)
    except RuntimeError:  # axes that no stride can fold
        return apply(Tensor.contiguous, updates).view(n, D)
    return apply(Tensor.contiguous, rows) if D > 1 and rows.stride(1) != 1 else rows


def _scatter_outputs(
    shape: Sequence[int], indices: Tensor, updates: Tensor, masked: int | None, strategy: str
) -> Tensor:
    try:
        return empty(shape, updates.dtype, updates.device)
    except RuntimeError as error:  # of which running out of memory is a kind
        size = math.prod(shape) * updates.element_size()
        raise torch.OutOfMemoryError(
            f"scatter_nd: expected an output that memory on {updates.device} can hold, got shape {tuple(shape)} of "
            f"{updates.dtype}, {size} bytes; give a smaller shape, or free memory first"
        ) from error


def _scatter_into(
    out: Tensor, shape: Sequence[int], indices: Tensor, updates: Tensor, masked: int | None, strategy: str
) -> None:
    """An empty `strategy` leaves the choice to the plan."""
    dtype, device = updates.dtype, updates.device
    indices, sizes = _folded(shape, indices)
    R, D, n = sizes
    if n == 0:
        apply(Tensor.zero_, out)
        return
    updates = _rows(updates, n, D)
    plan = _plan(
        sizes, dtype, gpu(device)[0], strategy=strategy or None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    # Numbers of rows and of updates: int32 halves what is read of them.
    whole = torch.int32 if max(R, n) < 2**31 - 1 else torch.int64
    if indices.shape[1] != 1 or plan.find == "sort":
        keys = _keyed(shape, indices, masked, whole)
        indices, masked = keys, -1  # what names no row is -1 now
    if plan.strategy == "atomic":
        sums = out if accumulated(dtype) == dtype else empty(shape, torch.float32, device)
        _launch_atomic(out, sums, indices, updates, sizes, masked, plan)
        return
    if plan.find in ("scan", "first"):
        _launch_scan(out, indices, updates, sizes, masked, plan)
        return
    pieces = 2 * (n // plan.chunk + 1)
    room = [((pieces, D), accumulated(dtype)), ((2, R + 1), whole)]
    if plan.find == "sort":
        parts, spans = side_by_side(device, *room)
        launch(scatter_nd_fill, (triton.cdiv(2 * (R + 1), 4096),), spans, 2 * (R + 1), BLOCK=4096)
        keys, order = apply(torch.sort, indices, stable=True)
    elif plan.find == "count":
        counted = (pieces * triton.cdiv(D, plan.block),), torch.int32
        parts, spans, keys, order, counters = side_by_side(device, *room, ((n,), whole), ((n,), whole), counted)
        launch_segments(out, indices, updates, parts, counters, order, keys, spans, sizes, masked, plan)
        return
    else:
        parts, spans, keys, order, slots = side_by_side(device, *room, *[((n,), whole)] * 3)
        launch_lists(order, keys, spans, slots, indices, R, n, masked)
    launch_owner(out, updates, parts, order, keys, spans, sizes, plan)


def _gather_outputs(source: Tensor, indices: Tensor, masked: int | None) -> Tensor:
    return empty((*indices.shape[:-1], *source.shape[indices.shape[-1] :]), source.dtype, source.device)


def _gather_into(out: Tensor, source: Tensor, indices: Tensor, masked: int | None) -> None:
    """The rows of `source` that indices ``[..., k]`` name, zeros where they name none."""
    k = indices.shape[-1]
    source = contiguous(source)
    indices, (R, D, n) = _folded(source.shape, indices)
    if R == 0:
        apply(Tensor.zero_, out)
        return
    align = math.gcd(max(1, 16 // source.element_size()), D)
    block = min(triton.next_power_of_2(D), 2048)
    rows = max(1, min((65536 if INTERPRETED else 1024) // block, triton.next_power_of_2(n)))
    if k != 1:
        indices, masked = _keyed(source.shape, indices, masked, torch.int64), -1
    launch(
        _gather_nd_rows, (triton.cdiv(n, rows) * triton.cdiv(D, block),),
        out, indices, source, R, D // align, n, masked or 0,
        MASKED=masked is not None, ALIGN=align, ROWS=rows, BLOCK=block,
    )  # fmt: skip


def _keep_for_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, indices, _, ctx.masked, ctx.strategy = inputs
    ctx.save_for_backward(indices)


def _gradient_of_updates(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor, None, None]:
    (indices,) = ctx.saved_tensors
    return None, None, _gather(dy, indices, ctx.masked), None, None


def _keep_for_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    source, indices, ctx.masked = inputs
    ctx.shape = source.shape
    ctx.save_for_backward(indices)


def _gradient_of_source(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    (indices,) = ctx.saved_tensors
    return _scatter("scatter_nd_of_shape", ctx.shape, indices, dy, ctx.masked, "add", False, None), None, None


def _shape_of(name: str, shape: Any) -> tuple[int, ...]:
    """The shape as a tuple of integers."""
    if isinstance(shape, Tensor):
        if shape.is_cuda:
            raise TypeError(
                f"{name}: expected shape on the host, got a tensor on {shape.device}, and reading it would wait for "
                "the GPU; pass shape.tolist() once"
            )
        if shape.dim() != 1 or shape.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"{name}: expected a shape tensor with one axis of int32 or int64, got {shape.dim()} axes of "
                f"{shape.dtype}; pass a tuple of integers"
            )
        shape = shape.tolist()
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence):
        raise TypeError(
            f"{name}: expected shape to be a sequence of integers, got {type(shape).__name__}; pass a tuple"
        )
    sizes = tuple(integer(name, "each size in shape", size, "convert it first") for size in shape)
    if any(not isinstance(size, torch.SymInt) and size < 0 for size in sizes):
        raise ValueError(f"{name}: expected sizes from 0 up in shape, got {sizes}; give each axis its length")
    return sizes


def _checked_shape(name: str, shape: Any, indices: Any, updates: Any, reduction: Any, strategy: Any) -> tuple[int, ...]:
    """Validate what can be seen without reading values; return the shape."""
    shape = _shape_of(name, shape)
    given = {"indices": (indices, "[..., k]", INTEGERS)}
    k = shapes(name, **given)["k"]
    if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
        raise ValueError(
            f"{name}: expected reduction to be 'add', got {reduction!r}; ONNX knows {', '.join(_REDUCTIONS)}"
        )
    if reduction != "add":
        raise NotImplementedError(
            f"{name}: expected reduction to be 'add', got {reduction!r}, which is not implemented; use torch's "
            "index_reduce_ or index_put_ on a tensor of zeros"
        )
    one_of(name, "strategy", strategy, (None, *STRATEGIES), "None chooses")
    if k > len(shape):
        raise ValueError(
            f"{name}: expected indices of at most {len(shape)} components, since shape {shape} has {len(shape)} axes, "
            f"got {k}; the last axis of indices holds the components"
        )
    what = "dy" if name == "embedding_backward" else "updates"
    shapes(name, **given, **{what: (updates, (*indices.shape[:-1], *shape[k:]), FLOATING)})
    known = not torch.compiler.is_compiling() and all(isinstance(size, int) for size in shape)
    if known and math.prod(shape) * updates.element_size() >= 2**63:
        raise ValueError(
            f"{name}: expected an output of less than 2**63 bytes, got shape {shape} of {updates.dtype}; give a shape "
            "that memory can hold"
        )
    return shape


def _refuse_out_of_range(name: str, shape: tuple[int, ...], indices: Tensor, masked: int | None) -> None:
    """Read the indices and raise IndexError for the first that is out of range. Waits for the GPU."""
    if indices.numel() == 0 or capturing(indices):
        return
    k = indices.shape[-1]
    flat = indices.reshape(-1, k)
    least, most = torch.stack(torch.aminmax(flat, dim=0)).tolist()  # one transfer: the usual case ends here
    if all(-size <= low and high < size for size, low, high in zip(shape, least, most, strict=False)):
        return
    sizes = torch.tensor(shape[:k], device=flat.device)
    wrong = (flat < -sizes) | (flat >= sizes)
    if masked is not None:
        wrong &= ~(flat == masked).any(1, keepdim=True)  # what is masked need not be anywhere
    positions = wrong.nonzero()
    if not len(positions):
        return
    i, axis = positions[0].tolist()
    place: list[int] = []
    for size in reversed(indices.shape[:-1]):
        i, at = divmod(i, size)
        place.insert(0, at)
    position = (*place, axis)
    size, got = shape[axis], int(indices[position])
    raise IndexError(
        f"{name}: expected indices from {-size} to {size - 1} in component {axis} for shape {shape}, got {got} at "
        f"indices[{', '.join(map(str, position))}]"
        + ("" if masked is None else f", and only {masked} is masked")
        + "; mend it, or pass check=False to leave such updates out"
    )


def _check(
    name: str, shape: Any, indices: Any, updates: Any, masked: int | None, reduction: str, check: bool, strategy: Any
) -> tuple[Any, ...]:  # fmt: skip
    return _checked_shape(name, shape, indices, updates, reduction, strategy), indices, updates, masked, strategy or ""


def _read(
    name: str, shape: Any, indices: Tensor, updates: Tensor, masked: int | None, reduction: str, check: bool, *_: Any
) -> None:  # fmt: skip
    if check:
        _refuse_out_of_range(name, _shape_of(name, shape), indices, masked)


_scatter = Operator(
    "scatter_nd",
    "(SymInt[] shape, Tensor indices, Tensor updates, int? masked, str strategy) -> Tensor",
    check=_check,
    outputs=_scatter_outputs,
    into=_scatter_into,
    modes=torch.are_deterministic_algorithms_enabled,
    read=_read,
    gradient=(_gradient_of_updates, _keep_for_gather),
)
_gather = Operator(
    "gather_nd",
    "(Tensor source, Tensor indices, int? masked) -> Tensor",
    check=lambda *valid: valid,
    outputs=_gather_outputs,
    into=_gather_into,
    gradient=(_gradient_of_source, _keep_for_scatter),
)


def scatter_nd_of_shape(
    shape: Sequence[int] | Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "add", check: bool = True,
    strategy: str | None = None,
) -> Tensor:  # fmt: skip
    """ONNX's ScatterND with reduction ``add`` into zeros of a shape, each element of the output written once.

    Parameters
    ----------
    shape : sequence of int, or torch.Tensor of int64 on the host
        Of the output.
    indices : torch.Tensor
        ``[..., k]``, int64 or int32: each names ``out[index[0], ..., index[k - 1]]``. Negative components count from
        the end of their axis.
    updates : torch.Tensor
        ``indices.shape[:-1] + shape[k:]``, float16, bfloat16, float32 or float64, of any strides, on the device of
        `indices`: CUDA, or the CPU where Triton interprets.
    reduction : str, default "add"
        ONNX's name; the others are refused.
    check : bool, default True
        Read the indices first and refuse those out of range, which waits for the GPU. Without it, and under
        torch.compile and graph capture, an update whose index is out of range is left out; nothing is ever written
        outside the output.
    strategy : str, optional
        ``"atomic"``, ``"sorted"`` or ``"owner"``, see Notes; chosen by size unless given.

    Returns
    -------
    torch.Tensor
        Of `shape`, contiguous, of the dtype of `updates`. Sums are float32 (float64 in float64), rounded once.

    Raises
    ------
    TypeError
        For arguments that are no tensors, dtypes other than those above, a shape on a GPU.
    ValueError
        For shapes that do not match, tensors on different devices, an unknown reduction or strategy.
    NotImplementedError
        For a reduction other than ``add``.
    IndexError
        With `check`, for an index out of range; names its position.

    Notes
    -----
    *atomic* writes zeros and adds to them, in the order that the hardware takes. *sorted* gives the same bits in every
    run, and is what torch.use_deterministic_algorithms(True) chooses. *owner* groups the updates by row without
    sorting them, or, where they are few, lets every row look through all indices; it writes each row of the output
    exactly once, zeros included. Unless one is asked for, an output that stays in the L2 cache is atomic (owner or
    sorted where there are few updates), one of which few rows have updates is sorted, and others are owner.

    Differentiable in `updates`, any number of times; works under torch.compile and in CUDA graphs.

    Examples
    --------
    >>> import fusebook, torch
    >>> indices = torch.tensor([[1], [3], [1]], device="cuda")  # doctest: +SKIP
    >>> fusebook.scatter_nd_of_shape((4, 2), indices, torch.ones(3, 2, device="cuda"))[:, 0]  # doctest: +SKIP
    tensor([0., 2., 0., 1.], device='cuda:0')
    """
    return _scatter("scatter_nd_of_shape", shape, indices, updates, None, reduction, check, strategy)


def masked_scatter_nd_of_shape(
    shape: Sequence[int] | Tensor, indices: Tensor, updates: Tensor, *, masked_value: int = -1, reduction: str = "add",
    check: bool = True, strategy: str | None = None,
) -> Tensor:  # fmt: skip
    """As `scatter_nd_of_shape`, with updates left out whose index is the masked value.

    Parameters
    ----------
    shape, indices, updates, reduction, check, strategy
        As those of `scatter_nd_of_shape`.
    masked_value : int, default -1
        An update counts for nothing where a component of its index equals this value, in or out of range. Other
        negative components count from the end.

    Returns
    -------
    torch.Tensor
        As from `scatter_nd_of_shape`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, IndexError
        As `scatter_nd_of_shape`; TypeError for a masked value that is no integer, ValueError for one of
        more than 64 bits.
    """
    name = "masked_scatter_nd_of_shape"
    masked_value = integer(name, "masked_value", masked_value, "give a whole number of 64 bits")
    return _scatter(name, shape, indices, updates, masked_value, reduction, check, strategy)


def embedding_backward(
    dy: Tensor, indices: Tensor, rows: int, *, padding_idx: int | None = None, check: bool = True,
    strategy: str | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of an embedding table: what each row was looked up for, added up.

    Parameters
    ----------
    dy : torch.Tensor
        ``[..., D]``, the gradient of what was looked up.
    indices : torch.Tensor
        ``[...]``, int64 or int32: the rows that were looked up.
    rows : int
        Of the table.
    padding_idx : int, optional
        A row that gets no gradient. A negative one counts from the end, as in ``torch.nn.functional.embedding``.
    check, strategy
        As those of `scatter_nd_of_shape`.

    Returns
    -------
    torch.Tensor
        ``[rows, D]``, of the dtype of `dy`.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `scatter_nd_of_shape`.
    """
    name = "embedding_backward"
    try:
        shape, indices = (rows, dy.shape[-1]), indices.unsqueeze(-1)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        shapes(name, dy=(dy, "[..., D]"), indices=(indices, "[...]", INTEGERS))
        raise
    if padding_idx is not None:
        rows = integer(name, "rows", rows, "give the number of rows of the table")
        padding_idx = integer(name, "padding_idx", padding_idx, "give a row of the table")
        if not -rows <= padding_idx < rows:  # a text of `rows` would make a symbolic size a number
            raise ValueError(
                f"{name}: expected padding_idx from {-rows} to {rows - 1}, got {padding_idx}; give a row of the table"
            )
        padding_idx = padding_idx + rows if padding_idx < 0 else padding_idx
        shapes(name, indices=(indices, "", INTEGERS))
        # A lookup may name the row from the end, too.
        indices = indices.masked_fill(indices == padding_idx - rows, padding_idx)
    return _scatter(name, shape, indices, dy, padding_idx, "add", check, strategy)
