# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/kmeans.py. It needs torch, Triton, NumPy and _call.py.
"""K-means: the nearest of k centres for each of n points, the mean of the points of each centre, and Lloyd's iteration.

For points ``x [n, d]`` and centres ``c [k, d]``,

    label[i] = the j with the least |x[i] - c[j]|, the lowest such j if several are equally near
    centre[j] = mean of x[i] over all i with label[i] == j

Assignment fuses differences, squares, their sums over d, and the minimum over k. The unfused chain writes nkd
differences and reads them again, then nk distances. The least traffic is to read nd and to write n labels.

- *few*: points of at most 8 coordinates are in registers, and distances are sums of squared differences.
- *each*: there are at most 16 centres. Each has sums in registers while the kernel streams the coordinates of a point.
- *some*, *pairs*: with few points, programs share the centres, and a second kernel compares their results.
- *product*: distances are a matrix product, since ``|x - c|**2 = |x|**2 - 2 x.c + |c|**2``, whose large terms cancel.
  Tensor cores of data centre GPUs multiply float64 about as fast as other units multiply float32. In float64 only exact
  near-ties remain undecided. Other GPUs take three products in TF32, which lose more. Undecided points are put on a
  list and compared with all centres by differences, so that all labels are those of differences.
- *screen*: with few coordinates and many centres, a product in TF32 goes first. It is twice as fast. The kernel knows a
  bound of its error, and leaves points to the product in float64 if their two best candidates are too close.

The update adds up few centres of few coordinates in registers, in the pass that finds the labels if these are wanted,
too. Few centres of many points are a matrix product, of a one for each point with its coordinates. In other small
problems each program has some centres, compares their numbers with all labels and loads only their points: one launch,
or two if programs share the points. Otherwise the update sorts the points by label and adds up neighbours. Its least
traffic is to read nd and n labels, and to write kd. Sums are float32 at least (float64 in float64) and always added in
the same order: the same bits in every run.

Centres that are not contiguous are copied first. So are points, except for *some*, *pairs*, *product* and an
update without sorting. Points are [n, D] in the kernels. Offsets are int64, because n D may be more than 2**31.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import (
    AMD,
    OPERATORS,
    Operator,
    accumulated,
    apply,
    capturing,
    check_stored,
    contiguous,
    gpu,
    integer,
    launch,
    launching,
    number,
    overlapping,
    readable,
    shapes,
    side_by_side,
)

__all__ = ["KMeans", "kmeans", "kmeans_assign", "kmeans_assign_eager", "kmeans_update", "kmeans_update_eager"]

#: Dtypes of points and centres, and of labels.
DTYPES = (torch.float16, torch.float32, torch.float64)
LABELS = (torch.int64, torch.int32, torch.uint8)
# The unfused chains --------------------------------------------------------------------------------------------------


def kmeans_assign_eager(points: Tensor, centres: Tensor, label_dtype: torch.dtype = torch.int64) -> Tensor:
    """The nearest centre of each point as separate torch operations, to show what fusion saves.

    Parameters
    ----------
    points : torch.Tensor
        ``[n, d]``.
    centres : torch.Tensor
        ``[k, d]``.
    label_dtype : torch.dtype

    Returns
    -------
    torch.Tensor
        ``[n]``, of `label_dtype`.
    """
    difference = points - centres[:, None]  # read nd, write nkd
    distance = torch.linalg.vector_norm(difference, dim=2)  # read nkd, write nk
    return distance.argmin(0).to(label_dtype)  # read nk, write n labels


def kmeans_update_eager(points: Tensor, labels: Tensor, k: int) -> Tensor:
    """The mean of the points of each label by atomic additions, to show what a fixed order costs.

    Parameters
    ----------
    points : torch.Tensor
        ``[n, d]``.
    labels : torch.Tensor
        ``[n]``.
    k : int

    Returns
    -------
    torch.Tensor
        ``[k, d]``, of the dtype of `points`; NaN where a label has no points.
    """
    wide = points if points.dtype == torch.float64 else points.float()
    sums = wide.new_zeros(k, points.shape[1]).index_add_(0, labels.long(), wide)  # read nd and n labels
    counts = wide.new_zeros(k).index_add_(0, labels.long(), wide.new_ones(()).expand(len(labels)))  # read n labels
    return (sums / counts[:, None]).to(points.dtype)


# Few coordinates: points in registers --------------------------------------------------------------------------------


@triton.jit
def _coordinates(
    points_ptr, first, n, D: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, EVICT: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """The D coordinates of BLOCK points from `first` on, as D tensors [BLOCK]. WHOLE: all of them are there."""
    points_ptr += first * D
    left = n - first
    i = tl.arange(0, BLOCK)
    if D == 2 or D == 4 or D == 8:
        # A thread loads 16 adjacent bytes, and coordinates are separated in registers.
        at = tl.arange(0, BLOCK * D)  # [BLOCK * D]
        if WHOLE:
            x = tl.load(points_ptr + at, eviction_policy=EVICT)  # read nD
        else:
            x = tl.load(points_ptr + at, mask=at < left * D, other=0.0)
        x = x.to(FLOAT)
        if D == 2:
            a, b = tl.split(tl.reshape(x, [BLOCK, 2]))
            xs = (a, b)
        elif D == 4:
            even, odd = tl.split(tl.reshape(x, [BLOCK, 2, 2]))
            a, c = tl.split(even)
            b, d = tl.split(odd)
            xs = (a, b, c, d)  # type: ignore[assignment]
        else:
            even, odd = tl.split(tl.reshape(x, [BLOCK, 2, 2, 2]))
            even, other = tl.split(even)  # 0 and 4, 2 and 6
            a, e = tl.split(even)
            c, g = tl.split(other)
            odd, other = tl.split(odd)
            b, f = tl.split(odd)
            d, h = tl.split(other)
            xs = (a, b, c, d, e, f, g, h)  # type: ignore[assignment]
    else:
        xs = ()  # type: ignore[assignment]
        for a in tl.static_range(D):
            # Every D-th element: the L1 cache keeps the line for the other coordinates.
            if WHOLE:
                x = tl.load(points_ptr + i * D + a)  # [BLOCK]; read nD
            else:
                x = tl.load(points_ptr + i * D + a, mask=i < left, other=0.0)
            xs += (x.to(FLOAT),)  # type: ignore[assignment]
    return xs


@triton.jit
def _nearest(
    xs, FIRST: tl.constexpr, centres_ptr, K, D: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """The nearest centre [BLOCK] of the points whose coordinates are xs[FIRST] and the next ones.

    FEW centres are unrolled; with 0, there is a loop.
    """
    best = tl.full([BLOCK], float("inf"), FLOAT)
    label = tl.zeros([BLOCK], tl.int32)
    if FEW > 0:
        for j in tl.static_range(FEW):
            distance = tl.zeros([BLOCK], FLOAT)
            for a in tl.static_range(D):
                difference = xs[FIRST + a] - tl.load(centres_ptr + j * D + a).to(FLOAT)
                distance += difference * difference
            closer = distance < best  # NaN is not closer, so a point with NaN keeps label 0
            best = tl.where(closer, distance, best)
            label = tl.where(closer, j, label)
    else:
        for j in range(K):
            distance = tl.zeros([BLOCK], FLOAT)
            for a in tl.static_range(D):
                difference = xs[FIRST + a] - tl.load(centres_ptr + j * D + a).to(FLOAT)
                distance += difference * difference
            closer = distance < best
            best = tl.where(closer, distance, best)
            label = tl.where(closer, j, label)
    return label


@triton.jit
def _few_steps(
    labels_ptr, sums_ptr, points_ptr, centres_ptr, start, n, K,
    D: tl.constexpr, FEW: tl.constexpr, ASSIGN: tl.constexpr, SUMS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, EVICT: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """STEPS times BLOCK points from `start` on; WHOLE: all of them are there."""
    i = tl.arange(0, BLOCK)
    # All loads precede the first store: a compiler cannot know whether they overlap, and would not reorder them.
    xs = ()
    labels = ()
    for step in tl.static_range(STEPS):
        first = start + step * BLOCK
        xs += _coordinates(points_ptr, first, n, D, BLOCK, WHOLE, EVICT, FLOAT)
        if not ASSIGN:
            if WHOLE:
                label = tl.load(labels_ptr + first + i)  # read n labels
            else:
                label = tl.load(labels_ptr + first + i, mask=i < n - first, other=0)
            labels += (label,)  # type: ignore[assignment]
    sums = ()
    if SUMS:
        for _ in tl.static_range(FEW * (D + 1)):
            sums += (tl.zeros([BLOCK], FLOAT),)  # type: ignore[assignment]
    for step in tl.static_range(STEPS):
        first = start + step * BLOCK
        if ASSIGN:
            label = _nearest(xs, step * D, centres_ptr, K, D, FEW, BLOCK, FLOAT)
            if WHOLE:
                tl.store(labels_ptr + first + i, label.to(labels_ptr.dtype.element_ty))  # write n labels
            else:
                tl.store(labels_ptr + first + i, label.to(labels_ptr.dtype.element_ty), mask=i < n - first)
        else:
            label = labels[step]
        if SUMS:
            more = ()
            for j in tl.static_range(FEW):
                mine = label == j
                if not WHOLE:
                    mine = mine & (i < n - first)
                for a in tl.static_range(D):
                    more += (sums[j * (D + 1) + a] + tl.where(mine, xs[step * D + a], 0.0),)  # type: ignore[assignment]
                more += (sums[j * (D + 1) + D] + mine.to(FLOAT),)  # type: ignore[assignment]
            sums = more
    if SUMS:
        for s in tl.static_range(FEW * (D + 1)):
            tl.store(sums_ptr + s, tl.sum(sums[s], 0))


@triton.jit
def _kmeans_few(
    labels_ptr, sums_ptr, points_ptr, centres_ptr, n, K,
    D: tl.constexpr, FEW: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Few coordinates: STEPS times BLOCK points a program, in registers.

    With centres, the kernel finds and stores labels; else it loads them. With sums, the program stores the sum of its
    points for each centre, coordinate by coordinate, and their number.
    """
    ASSIGN: tl.constexpr = centres_ptr is not None
    SUMS: tl.constexpr = sums_ptr is not None
    FLOAT: tl.constexpr = tl.float64 if points_ptr.dtype.element_ty == tl.float64 else tl.float32
    # Points are read once, so they need not evict data that L2 has yet to write. That pays if labels are narrow, and
    # costs a little otherwise.
    EVICT: tl.constexpr = "evict_first" if labels_ptr.dtype.element_ty == tl.uint8 else ""
    start = tl.program_id(0).to(tl.int64) * (STEPS * BLOCK)
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0).to(tl.int64) * (FEW * (D + 1))
    if start + STEPS * BLOCK <= n:  # without masks, so that loads and stores are 16 bytes wide whatever n is
        _few_steps(
            labels_ptr, sums_ptr, points_ptr, centres_ptr, start, n, K,
            D, FEW, ASSIGN, SUMS, STEPS, BLOCK, True, EVICT, FLOAT,
        )  # fmt: skip
    else:
        _few_steps(
            labels_ptr, sums_ptr, points_ptr, centres_ptr, start, n, K,
            D, FEW, ASSIGN, SUMS, STEPS, BLOCK, False, EVICT, FLOAT,
        )  # fmt: skip


# Differences: few centres, or few points -----------------------------------------------------------------------------


@triton.jit
def _kmeans_each(
    labels_ptr, points_ptr, centres_ptr, n, D,
    K: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """The nearest of K centres by differences to each in turn. BLOCK points are read once.

    D is counted in units of ALIGN coordinates, which one thread loads. The squares of a unit are added at once, so that
    there is one sum for each unit of a piece and each centre.
    """
    D = D * ALIGN
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = i < n
    columns = tl.arange(0, BLOCK_D)
    x_ptr = points_ptr + (i * D)[:, None]  # [BLOCK, 1]
    sums = ()
    for _ in tl.static_range(K):
        sums += (tl.zeros([BLOCK, BLOCK_D // ALIGN], FLOAT),)  # type: ignore[assignment]
    for first in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        at = first + columns
        inside = at < D
        x = tl.load(x_ptr + at[None, :], mask=live[:, None] & inside[None, :], other=0.0).to(FLOAT)  # read nD
        more = ()
        for j in tl.static_range(K):
            c = tl.load(centres_ptr + j * D + at, mask=inside, other=0.0).to(FLOAT)  # [BLOCK_D]; from a cache
            difference = x - c[None, :]
            squares = tl.reshape(difference * difference, [BLOCK, BLOCK_D // ALIGN, ALIGN])
            more += (sums[j] + tl.sum(squares, 2),)  # type: ignore[assignment]
        sums = more
    best = tl.full([BLOCK], float("inf"), FLOAT)
    label = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range(K):
        distance = tl.sum(sums[j], 1)  # [BLOCK]
        closer = distance < best  # NaN is not closer
        best = tl.where(closer, distance, best)
        label = tl.where(closer, j, label)
    tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty), mask=live)  # write n labels


@triton.jit
def _kmeans_pairs(
    labels_ptr, least_ptr, points_ptr, centres_ptr, n, K, stride_n, stride_d, SPAN, PARTS,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, FLOAT: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """The nearest of SPAN centres to each of BLOCK points, coordinate by coordinate; with `least_ptr`, its distance.

    Each pair of a point and a column of the tile keeps its best distance. The minimum over columns is taken at the end.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0) % PARTS
    i = (tl.program_id(0) // PARTS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = i < n
    xs = ()
    for a in tl.static_range(D):
        x_ptr = points_ptr + i * stride_n + tl.cast(stride_d, tl.int64) * a  # cast: an argument of 1 is a constant
        x = tl.load(x_ptr, mask=live, other=0.0)  # read nD
        xs += (x.to(FLOAT)[:, None],)  # type: ignore[assignment]
    number = tl.arange(0, BLOCK_K)
    best = tl.full([BLOCK, BLOCK_K], float("inf"), FLOAT)
    tile = tl.zeros([BLOCK, BLOCK_K], tl.int32)
    for start in range(part * SPAN, tl.minimum(K, (part + 1) * SPAN), BLOCK_K):
        distance = tl.zeros([BLOCK, BLOCK_K], FLOAT)
        for a in tl.static_range(D):
            c_ptr = centres_ptr + (start + number).to(tl.int64) * D + a
            c = tl.load(c_ptr, mask=start + number < K, other=float("inf")).to(FLOAT)
            difference = xs[a] - c[None, :]
            distance += difference * difference
        closer = distance < best  # never by NaN
        best = tl.where(closer, distance, best)
        tile = tl.where(closer, start, tile)
    least = tl.min(best, 1)
    label = tl.min(tl.where(best == least[:, None], tile + number[None, :], 0x7FFFFFFF), 1)  # the lowest of equals
    if least_ptr is not None:
        tl.store(least_ptr + i * PARTS + part, least, mask=live)
    tl.store(labels_ptr + i * PARTS + part, label.to(labels_ptr.dtype.element_ty), mask=live)  # write n labels


@triton.jit
def _kmeans_some(
    labels_ptr, least_ptr, points_ptr, centres_ptr, list_ptr, length_ptr, n, D, K, stride_n, stride_d, SPAN, PARTS,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, FLOAT: tl.constexpr,
    EARLY: tl.constexpr = False, LATE: tl.constexpr = False,
):  # fmt: skip
    """The nearest of SPAN centres to each of BLOCK points by differences, and its squared distance [n, PARTS].

    Without `least_ptr`, SPAN is all centres. With `list_ptr`, the points are those on that list, whose length only the
    GPU knows. D and the strides are counted in units of ALIGN.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if LATE:
        tl.extra.cuda.gdc_wait()
    D = D * ALIGN
    part = tl.program_id(0) % PARTS
    columns = tl.arange(0, BLOCK_D)
    number = tl.arange(0, BLOCK_K)
    end = tl.minimum(K, (part + 1) * SPAN)
    total = tl.zeros((), tl.int64) + n  # an argument of 1 is a constant
    if list_ptr is not None:
        total = tl.load(length_ptr).to(tl.int64)
    head = (tl.program_id(0) // PARTS).to(tl.int64) * BLOCK
    while head < total:
        slot = head + tl.arange(0, BLOCK)  # [BLOCK]
        live = slot < total
        i = slot
        if list_ptr is not None:
            i = tl.load(list_ptr + slot, mask=live, other=0).to(tl.int64)
        x_ptr = points_ptr + (i * stride_n * ALIGN)[:, None]
        best = tl.full([BLOCK], float("inf"), FLOAT)
        label = tl.zeros([BLOCK], tl.int32)
        for start in range(part * SPAN, end, BLOCK_K):
            c_ptr = centres_ptr + (start + number).to(tl.int64)[:, None] * D
            known = start + number < end
            squares = tl.zeros([BLOCK, BLOCK_K, BLOCK_D], FLOAT)
            for first in range(0, D, BLOCK_D):
                at = first + columns
                inside = at < D
                here = live[:, None] & inside[None, :]
                x = tl.load(x_ptr + at.to(tl.int64)[None, :] * stride_d, mask=here, other=0.0)  # read nD
                c = tl.load(c_ptr + at[None, :], mask=known[:, None] & inside[None, :], other=0.0)
                difference = x.to(FLOAT)[:, None, :] - c.to(FLOAT)[None, :, :]  # [BLOCK, BLOCK_K, BLOCK_D]
                squares += difference * difference
            # NaN counts as infinite. The comparison also prevents an FMA of a square and another lane's sum, so that
            # all lanes have the same bits.
            squares = tl.where(squares < float("inf"), squares, float("inf"))
            distance = tl.where(known[None, :], tl.sum(squares, 2), float("inf"))  # [BLOCK, BLOCK_K]
            least = tl.min(distance, 1)
            place = tl.min(tl.where(distance == least[:, None], number[None, :], BLOCK_K), 1)  # the lowest of equals
            label = tl.where(least < best, start + place, label)
            best = tl.minimum(best, least)
        if least_ptr is not None:
            tl.store(least_ptr + i * PARTS + part, best, mask=live)
            tl.store(labels_ptr + i * PARTS + part, label.to(labels_ptr.dtype.element_ty), mask=live)
        else:
            tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty), mask=live)
        head += (tl.num_programs(0) // PARTS).to(tl.int64) * BLOCK


@triton.jit
def _kmeans_least(
    labels_ptr, found_ptr, least_ptr, errors_ptr, doubtful_ptr, count_ptr, n, PARTS,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, LATE: tl.constexpr = False,
):  # fmt: skip
    """Compare the nearest centres of all parts: the nearest, and the lowest number among equals.

    With `errors_ptr`, and at most BLOCK_P parts: a point is listed if two parts are too close, or one was undecided.
    """
    if LATE:
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    part = tl.arange(0, BLOCK_P)
    live = (i < n)[:, None]
    best = tl.full([BLOCK], float("inf"), least_ptr.dtype.element_ty)
    label = tl.zeros([BLOCK], tl.int32)
    doubt = tl.zeros([BLOCK], tl.int32)
    for first in range(0, PARTS, BLOCK_P):
        at = (i * PARTS)[:, None] + first + part[None, :]
        inside = live & (first + part < PARTS)[None, :]
        distance = tl.load(least_ptr + at, mask=inside, other=float("inf"))  # [BLOCK, BLOCK_P]
        number = tl.load(found_ptr + at, mask=inside, other=0)
        least = tl.min(distance, 1)
        lowest = tl.min(tl.where(distance == least[:, None], number, 0x7FFFFFFF), 1)
        if errors_ptr is not None:
            error = tl.max(tl.load(errors_ptr + at, mask=inside, other=0.0), 1)
            near = inside & ((distance > (least + error)[:, None]) == 0)  # NaN is never sure
            many = tl.sum(near.to(tl.int32), 1) > 1
            doubt |= (many | (tl.min(tl.where(near, number, 0), 1) < 0)).to(tl.int32)
        label = tl.where(least < best, lowest, label)
        best = tl.minimum(best, least)
    tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty), mask=i < n)  # write n labels
    if errors_ptr is not None:
        _listed(doubtful_ptr, count_ptr, i, doubt & (i < n).to(tl.int32))


# Products, and the points that they leave undecided ------------------------------------------------------------------


@triton.jit
def _listed(doubtful_ptr, count_ptr, i, unsure):
    """Append those points of `i` [BLOCK] that are `unsure` to a list, in no fixed order."""
    many = tl.sum(unsure, 0)
    if many > 0:
        place = tl.atomic_add(count_ptr, many.to(count_ptr.dtype.element_ty), sem="relaxed")
        place = place.to(tl.int64) + tl.cumsum(unsure, 0) - unsure
        tl.store(doubtful_ptr + place, i.to(doubtful_ptr.dtype.element_ty), mask=unsure != 0)


@triton.jit
def _kmeans_lengths(
    squares_ptr, counts_ptr, centres_ptr, K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """The squared lengths [K] of centres, and two counters, which are zero."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    FLOAT: tl.constexpr = squares_ptr.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    squares = tl.zeros([BLOCK_K, BLOCK_D], FLOAT)
    for first in range(0, D, BLOCK_D):
        at = first + tl.arange(0, BLOCK_D)
        live = (rows < K)[:, None] & (at < D)[None, :]
        c = tl.load(centres_ptr + rows.to(tl.int64)[:, None] * D + at[None, :], mask=live, other=0.0).to(FLOAT)
        squares += c * c
    tl.store(squares_ptr + rows, tl.sum(squares, 1), mask=rows < K)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr, 0)
        tl.store(counts_ptr + 1, 0)


@triton.jit
def _multiplied(
    labels_ptr, least_ptr, errors_ptr, doubtful_ptr, count_ptr, points_ptr, centres_ptr, squares_ptr,
    i, live, part, D, K, stride_n, stride_d, SPAN, PARTS, bound,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    SIGNAL: tl.constexpr,
):  # fmt: skip
    """The nearest of the SPAN centres of a part to the points `i` [BLOCK]."""
    FLOAT: tl.constexpr = squares_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK_D)
    number = tl.arange(0, BLOCK_K)
    end = tl.minimum(K, (part + 1) * SPAN)
    x_ptr = points_ptr + (i * stride_n)[:, None]  # [BLOCK, 1]
    best = tl.full([BLOCK], float("inf"), FLOAT)
    second = tl.full([BLOCK], float("inf"), FLOAT)
    label = tl.zeros([BLOCK], tl.int32)
    reach = tl.zeros([BLOCK_K], FLOAT)
    for start in range(part * SPAN, end, BLOCK_K):
        known = start + number < end
        c_ptr = centres_ptr + (start + number).to(tl.int64)[None, :] * D  # [1, BLOCK_K]
        product = tl.zeros([BLOCK, BLOCK_K], FLOAT)
        for first in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            at = first + columns
            here = live[:, None] & (at < D)[None, :]
            x = tl.load(x_ptr + at.to(tl.int64)[None, :] * stride_d, mask=here, other=0.0)  # read nD
            c = tl.load(c_ptr + at[:, None], mask=known[None, :] & (at < D)[:, None], other=0.0)
            # x is used by nothing else: it goes from shared memory to the tensor cores, converted on the way.
            product = tl.dot(x.to(FLOAT), c.to(FLOAT), product, input_precision=PRECISION, out_dtype=FLOAT)
        norm = tl.load(squares_ptr + start + number, mask=known, other=float("inf"))  # [BLOCK_K]
        reach = tl.maximum(reach, tl.where(known & (norm == norm), norm, 0.0))
        distance = norm[None, :] - 2.0 * product  # squared, without |x|**2, which is the same for all
        distance = tl.where(distance < float("inf"), distance, float("inf"))  # NaN counts as infinite
        least = tl.min(distance, 1)
        place = tl.min(tl.where(distance == least[:, None], number[None, :], BLOCK_K), 1)  # the lowest of equals
        after = tl.min(tl.where(distance > least[:, None], distance, float("inf")), 1)
        # The second is farther than the best: between equals the lowest number decides.
        farther = tl.where(least == best, float("inf"), tl.maximum(least, best))
        second = tl.minimum(tl.minimum(second, after), farther)
        label = tl.where(least < best, start + place, label)
        best = tl.minimum(least, best)
    if SIGNAL:
        tl.extra.cuda.gdc_launch_dependents()
    error = bound * tl.max(reach, 0)
    sure = (second - best > error) & (best > -float("inf"))  # NaN is never sure
    if least_ptr is not None:
        at = i * PARTS + part
        tl.store(least_ptr + at, best, mask=live)
        tl.store(errors_ptr + at, tl.zeros([BLOCK], FLOAT) + error, mask=live)
        tl.store(labels_ptr + at, tl.where(sure, label, -1 - label), mask=live)
    else:
        tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty), mask=live)  # write n labels
        _listed(doubtful_ptr, count_ptr, i, (live & (sure == 0)).to(tl.int32))


@triton.jit
def _kmeans_product(
    labels_ptr, least_ptr, errors_ptr, doubtful_ptr, count_ptr, points_ptr, centres_ptr, squares_ptr,
    list_ptr, length_ptr, n, D, K, stride_n, stride_d, SPAN, PARTS, bound,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, LATE: tl.constexpr = False,
):  # fmt: skip
    """The nearest of SPAN centres by a matrix product, for all points or a list of points; undecided points are listed.

    `bound` times the largest squared length of a centre is the largest error of a difference of two squared distances.
    With `least_ptr`, another kernel compares the parts; an undecided point has a negative label. D and `stride_n` are
    counted in units of ALIGN, so that Triton sees how rows are aligned.
    """
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the lengths
    part = tl.program_id(0) % PARTS
    first = (tl.program_id(0) // PARTS).to(tl.int64) * BLOCK
    if list_ptr is not None:
        total = tl.load(length_ptr).to(tl.int64)
        while first < total:
            slot = first + tl.arange(0, BLOCK)
            i = tl.load(list_ptr + slot, mask=slot < total, other=0).to(tl.int64)
            _multiplied(
                labels_ptr, least_ptr, errors_ptr, doubtful_ptr, count_ptr, points_ptr, centres_ptr, squares_ptr,
                i, slot < total, part, D * ALIGN, K, stride_n * ALIGN, stride_d, SPAN, PARTS, bound,
                BLOCK, BLOCK_K, BLOCK_D, STAGES, PRECISION, False,
            )  # fmt: skip
            first += (tl.num_programs(0) // PARTS).to(tl.int64) * BLOCK
    else:
        i = first + tl.arange(0, BLOCK)  # [BLOCK]
        _multiplied(
            labels_ptr, least_ptr, errors_ptr, doubtful_ptr, count_ptr, points_ptr, centres_ptr, squares_ptr,
            i, i < n, part, D * ALIGN, K, stride_n * ALIGN, stride_d, SPAN, PARTS, bound,
            BLOCK, BLOCK_K, BLOCK_D, STAGES, PRECISION, LATE,
        )  # fmt: skip


# The screen in TF32 --------------------------------------------------------------------------------------------------


@triton.jit
def _kmeans_shift(shift_ptr, centres_ptr, K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mean of the centres, padded with zeros."""
    columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for first in range(0, K, BLOCK_K):
        live = (first + rows < K)[:, None] & (columns < D)[None, :]
        at = (first + rows).to(tl.int64)[:, None] * D + columns[None, :]
        total += tl.load(centres_ptr + at, mask=live, other=0.0).to(tl.float32)  # read kD
    tl.store(shift_ptr + columns, tl.sum(total, 0) / K)


@triton.jit
def _tf32(x):
    """Round to TF32, with half of the error of truncation; infinities and NaN are kept."""
    bits = x.to(tl.int32, bitcast=True)
    near = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 3.0e38, near, x)


@triton.jit
def _kmeans_centred(
    short_ptr, norms_ptr, shift_ptr, centres_ptr, K, D, K_PAD, D_PAD, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Centres less the shift, in TF32 [K_PAD, D_PAD], and their squared norms [K_PAD]; zeros for padding."""
    rows = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    columns = tl.arange(0, BLOCK_D)
    norm = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, D_PAD, BLOCK_D):
        at = first + columns
        live = (rows < K)[:, None] & (at < D)[None, :]
        c = tl.load(centres_ptr + rows.to(tl.int64)[:, None] * D + at[None, :], mask=live, other=0.0).to(tl.float32)
        shift = tl.load(shift_ptr + at, mask=at < D, other=0.0)
        c = tl.where(live, c - shift[None, :], 0.0)
        place = rows.to(tl.int64)[:, None] * D_PAD + at[None, :]
        tl.store(short_ptr + place, _tf32(c), mask=(at < D_PAD)[None, :] & (rows < K_PAD)[:, None])
        norm += tl.sum(c * c, 1)
    # Padding is never the nearest.
    tl.store(norms_ptr + rows, tl.where(rows < K, norm, float("inf")), mask=rows < K_PAD)


@triton.jit
def _kmeans_screen(
    labels_ptr, doubtful_ptr, count_ptr, points_ptr, shift_ptr, short_ptr, norms_ptr, n, D, K_PAD, loose,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The nearest centre by a product in TF32, and a list of the points that it leaves undecided.

    The coordinates of a point, CHUNK at most, are kept while the kernel streams the centres. `loose` is the largest
    relative error of a term of the product.
    """
    HIGHEST: tl.constexpr = 0x7FFFFFFF
    LOST: tl.constexpr = BLOCK_K * 2.0**-22
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = i < n
    columns = tl.arange(0, CHUNK)
    number = tl.arange(0, BLOCK_K)
    inside = columns < D
    x = tl.load(points_ptr + i[:, None] * D + columns[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    x = tl.where(inside[None, :], x.to(tl.float32) - tl.load(shift_ptr + columns)[None, :], 0.0)  # [BLOCK, CHUNK]
    square = tl.sum(x * x, 1)
    x = _tf32(x)
    best = tl.full([BLOCK], HIGHEST, tl.int32)
    second = tl.full([BLOCK], HIGHEST, tl.int32)
    label = tl.zeros([BLOCK], tl.int32)
    reach = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, K_PAD, BLOCK_K, num_stages=STAGES):
        c = tl.load(short_ptr + (start + number).to(tl.int64)[None, :] * CHUNK + columns[:, None])  # [CHUNK, BLOCK_K]
        product = tl.dot(x, c, input_precision="tf32")  # [BLOCK, BLOCK_K]
        norm = tl.load(norms_ptr + start + number)  # [BLOCK_K]
        reach = tl.maximum(reach, tl.where(norm < float("inf"), norm, 0.0))
        # Squared distances as integers, which sort as positive floats do. Their last bits carry the number in the tile.
        distance = tl.maximum(square[:, None] + norm[None, :] - 2.0 * product, 0.0)
        key = (distance.to(tl.int32, bitcast=True) & (-BLOCK_K)) | number[None, :]  # [BLOCK, BLOCK_K]
        least = tl.min(key, 1)  # [BLOCK]
        after = tl.min(tl.where(key == least[:, None], HIGHEST, key), 1)
        closer = least < best
        second = tl.where(closer, tl.minimum(best, after), tl.minimum(second, least))
        label = tl.where(closer, start + (least & (BLOCK_K - 1)), label)
        best = tl.where(closer, least, best)
    low = (best & (-BLOCK_K)).to(tl.float32, bitcast=True)
    high = (second & (-BLOCK_K)).to(tl.float32, bitcast=True)
    # The error of each: twice that of the product, |x| |c| times `loose`; the rounding of the norms and of their sum;
    # and the bits that carry a number.
    farthest = tl.max(reach, 0)
    error = 4.0 * loose * tl.sqrt(square * farthest) + 2.0**-18 * (square + farthest) + LOST * low
    sure = high - low > error  # NaN is never sure
    tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty), mask=live)  # write n labels
    _listed(doubtful_ptr, count_ptr, i, (live & (sure == 0)).to(tl.int32))


def _loose(precision: str, d: int) -> float:
    """The largest relative error of a term of a product: of both factors, and of the sum of d terms.

    A factor rounded to TF32 has an error of 2**-11 at most. Three products, of the part that TF32 keeps and of the
    truncated rest, have three errors of 2**-20. Tensor cores truncate sums, too: 2**-23 for every eight terms.
    """
    if precision == "ieee":  # float64: factors and squares are exact
        return (d + 16) * 2.0**-53
    sums = triton.cdiv(d, 8) * 2.0**-23
    return 2.0**-10 + 2.0**-22 + sums if precision == "tf32" else 3 * 2.0**-20 + 3 * sums


def _bound(precision: str, d: int) -> float:
    """The largest error of a difference of two squared distances by a product, in units of the largest |c|**2.

    The error of each distance is twice that of the product, |x| |c| times the relative error, and as much for |c|**2.
    It is assumed that |x| is at most 4 or 40 times the largest |c|. Points beyond are far from all centres: relative to
    such distances, the error is less than the rounding of differences.
    """
    return 4 * _loose(precision, d) * (1 + (4 if precision == "ieee" else 40))


# The update ----------------------------------------------------------------------------------------------------------


@triton.jit
def _kmeans_groups(groups_ptr, sums_ptr, PARTS, WIDTH, EACH, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr):
    """EACH neighbouring parts of sums [PARTS, WIDTH] added in float64, in a fixed order."""
    begin = tl.program_id(0) * EACH
    end = tl.minimum(begin + EACH, PARTS)
    columns = tl.arange(0, BLOCK_W)
    total = tl.zeros([BLOCK, BLOCK_W], tl.float64)
    for first in range(begin, end, BLOCK):
        part = first + tl.arange(0, BLOCK)
        live = (part < end)[:, None] & (columns < WIDTH)[None, :]
        at = part.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        total += tl.load(sums_ptr + at, mask=live, other=0.0).to(tl.float64)
    tl.store(groups_ptr + tl.program_id(0) * WIDTH + columns, tl.sum(total, 0), mask=columns < WIDTH)


@triton.jit
def _mean(out_ptr, old_ptr, total, many, at, inside):
    """Store centres at `at`; one without points stays the old one, if old ones are given."""
    mean = total / many  # NaN where nothing was added: the mean of nothing
    if old_ptr is not None:
        old = tl.load(old_ptr + at, mask=inside, other=0.0).to(tl.float64)
        mean = tl.where(many > 0, mean, old)
    tl.store(out_ptr + at, mean.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _kmeans_means(
    out_ptr, sums_ptr, old_ptr, PARTS, K, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, LATE: tl.constexpr = False
):  # fmt: skip
    """A centre: the parts of its sum and of its count, added in float64 in a fixed order, and divided."""
    if LATE:
        tl.extra.cuda.gdc_wait()
    j = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    part = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK_D], tl.float64)
    count = tl.zeros([BLOCK], tl.float64)
    for first in range(0, PARTS, BLOCK):
        live = first + part < PARTS
        at = ((first + part).to(tl.int64) * K + j) * (D + 1)  # [BLOCK]
        inside = live[:, None] & (columns < D)[None, :]
        total += tl.load(sums_ptr + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float64)
        count += tl.load(sums_ptr + at + D, mask=live, other=0.0).to(tl.float64)
    _mean(out_ptr, old_ptr, tl.sum(total, 0), tl.sum(count, 0), j * D + columns, columns < D)


@triton.jit
def _kmeans_direct(
    out_ptr, parts_ptr, found_ptr, points_ptr, labels_ptr, old_ptr, n, K, D, stride_n, stride_d, EACH,
    LOOK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, FLOAT: tl.constexpr,
    LATE: tl.constexpr = False,
):  # fmt: skip
    """The points of BLOCK_K centres at once among EACH points: of LOOK labels, those are listed, and then loaded.

    With `parts_ptr` the sum and the count of each centre are stored, a part; else its mean.
    """
    if LATE:
        tl.extra.cuda.gdc_wait()
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    x_ptr = points_ptr + columns.to(tl.int64) * stride_d
    rows = tl.arange(0, BLOCK_K * BLOCK)  # BLOCK entries of the list for each centre
    part = tl.program_id(2)
    found_ptr += ((part * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)) * LOOK
    end = tl.minimum((part + 1) * EACH, n)
    for j in range(tl.program_id(0) * BLOCK_K, K, tl.num_programs(0) * BLOCK_K):
        total = tl.zeros([BLOCK_K * BLOCK, BLOCK_D], FLOAT)
        many = tl.zeros([BLOCK_K * BLOCK], tl.int32)
        for first in range(part * EACH, end, LOOK):
            i = tl.arange(0, LOOK)
            label = tl.load(labels_ptr + first + i, mask=i < end - first, other=0).to(tl.int64)  # a cache's for later j
            mine = ((label >= j) & (label < tl.minimum(j + BLOCK_K, K)) & (i < end - first)).to(tl.int32)
            found = tl.sum(mine, 0)
            if found > 0:
                tl.debug_barrier()  # other threads have read the list before
                entries = i * BLOCK_K + (label - j).to(tl.int32)  # which point, and which centre
                tl.store(found_ptr + tl.cumsum(mine, 0) - 1, entries, mask=mine > 0)
                tl.debug_barrier()
                for start in range(0, found, BLOCK):
                    at = start + rows % BLOCK
                    entry = tl.load(found_ptr + at, mask=at < found, other=0)
                    row = (first + entry // BLOCK_K).to(tl.int64) * stride_n
                    own = (at < found) & (entry % BLOCK_K == rows // BLOCK)
                    many += own.to(tl.int32)
                    inside = own[:, None] & (columns < D)[None, :]
                    total += tl.load(x_ptr[None, :] + row[:, None], mask=inside, other=0.0).to(FLOAT)  # read nD
        sums = tl.sum(tl.reshape(total, [BLOCK_K, BLOCK, BLOCK_D]), 1).to(tl.float64)
        count = tl.sum(tl.reshape(many, [BLOCK_K, BLOCK]), 1)[:, None]
        centre = (j + tl.arange(0, BLOCK_K)).to(tl.int64)[:, None]
        known = (centre < K) & (columns < D)[None, :]
        if parts_ptr is None:
            _mean(out_ptr, old_ptr, sums, count.to(tl.float64), centre * D + columns[None, :], known)
        else:
            part_ptr = parts_ptr + (tl.cast(part, tl.int64) * K + centre) * (D + 1)
            tl.store(part_ptr + columns[None, :], sums.to(FLOAT), mask=known)
            if tl.program_id(1) == 0:
                tl.store(part_ptr + D, count.to(FLOAT), mask=centre < K)


@triton.jit
def _kmeans_ones(
    parts_ptr, points_ptr, labels_ptr, n, K, D, stride_n, stride_d, EACH,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, FLOAT: tl.constexpr, SPLIT: tl.constexpr,
    LATE: tl.constexpr = False,
):  # fmt: skip
    """The sums and counts of all centres among EACH points, in their order: a matrix of ones and zeros times points.

    SPLIT: products are exact, of float32 as three bfloat16. What is not finite spoils all sums: then centres are added
    up one after another.
    """
    if LATE:
        tl.extra.cuda.gdc_wait()
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = (columns < D)[None, :]
    x_ptr = points_ptr + (columns.to(tl.int64) * stride_d)[None, :]
    number = tl.arange(0, BLOCK_K)
    begin = tl.program_id(0) * EACH
    end = tl.minimum(begin + EACH, n)
    total = tl.zeros([BLOCK_K, BLOCK_D], FLOAT)
    many = tl.zeros([BLOCK_K, BLOCK], tl.int32)
    for first in tl.range(begin, end, BLOCK, num_stages=3):
        i = first + tl.arange(0, BLOCK)
        live = i < end
        label = tl.load(labels_ptr + i, mask=live, other=0)  # read n labels
        x = tl.load(x_ptr + (i.to(tl.int64) * stride_n)[:, None], mask=live[:, None] & inside, other=0.0)  # read nD
        own = (label[None, :] == number[:, None]) & live[None, :]
        many += own.to(tl.int32)
        if SPLIT:
            ones = own.to(tl.bfloat16)
            high = x.to(tl.bfloat16)
            x -= high.to(tl.float32)
            middle = x.to(tl.bfloat16)
            low = (x - middle.to(tl.float32)).to(tl.bfloat16)
            total += tl.dot(ones, high, tl.dot(ones, middle, tl.dot(ones, low)))
        else:
            total += tl.dot(own.to(x.dtype), x, input_precision="ieee", out_dtype=FLOAT)
    if tl.sum(tl.sum((tl.abs(total) < float("inf")).to(tl.int32), 1), 0) < BLOCK_K * BLOCK_D:
        for j in range(K):
            one = tl.zeros([BLOCK_D], FLOAT)
            for first in range(begin, end, BLOCK):
                i = first + tl.arange(0, BLOCK)
                mine = (tl.load(labels_ptr + i, mask=i < end, other=0) == j) & (i < end)
                x = tl.load(x_ptr + (i.to(tl.int64) * stride_n)[:, None], mask=mine[:, None] & inside, other=0.0)
                one += tl.sum(x.to(FLOAT), 0)
            total = tl.where((number == j)[:, None], one[None, :], total)
    parts_ptr += (tl.program_id(0).to(tl.int64) * K + number)[:, None] * (D + 1)
    tl.store(parts_ptr + columns[None, :], total, mask=(number < K)[:, None] & inside)
    if tl.program_id(1) == 0:
        tl.store(parts_ptr + D, tl.sum(many, 1)[:, None].to(FLOAT), mask=(number < K)[:, None])


@triton.jit
def _kmeans_keys(keys_ptr, labels_ptr, n, K, BLOCK: tl.constexpr):
    """Labels in a narrow dtype. A label out of range becomes K."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + i, mask=i < n, other=0).to(tl.int64)  # read n labels; compared before it is narrowed
    key = tl.where((label >= 0) & (label < K), label, K)
    tl.store(keys_ptr + i, key.to(keys_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def _kmeans_chunks(
    parts_ptr, points_ptr, keys_ptr, order_ptr, bounds_ptr, D, K, CHUNK, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """CHUNK neighbours of `order`: the sum of the points of each label among them.

    The sum of label j in chunk c is part c + j. No other pair has that part: along `order`, labels and chunks rise.
    """
    FLOAT: tl.constexpr = parts_ptr.dtype.element_ty
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.arange(0, BLOCK)
    low = chunk * CHUNK
    # Keys of K are last, and are not added up.
    high = tl.minimum(low + CHUNK, tl.load(bounds_ptr + K).to(tl.int64))
    while low < high:
        j = tl.load(keys_ptr + low).to(tl.int64)
        end = tl.minimum(high, tl.load(bounds_ptr + j + 1).to(tl.int64))
        total = tl.zeros([BLOCK, BLOCK_D], FLOAT)
        while low < end:
            live = low + rows < end
            i = tl.load(order_ptr + low + rows, mask=live, other=0).to(tl.int64)  # [BLOCK]
            inside = live[:, None] & (columns < D)[None, :]
            # read nD
            total += tl.load(points_ptr + i[:, None] * D + columns[None, :], mask=inside, other=0.0).to(FLOAT)
            low += BLOCK
        tl.store(parts_ptr + (chunk + j) * D + columns, tl.sum(total, 0), mask=columns < D)
        low = end


@triton.jit
def _kmeans_sums(sums_ptr, parts_ptr, bounds_ptr, D, CHUNK, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sum of the points of a label, parts added in float64 in the order of the chunks; and their number."""
    j = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    begin = tl.load(bounds_ptr + j).to(tl.int64)
    end = tl.load(bounds_ptr + j + 1).to(tl.int64)
    last = tl.where(begin < end, (end - 1) // CHUNK, -1)
    total = tl.zeros([BLOCK, BLOCK_D], tl.float64)
    for first in range(begin // CHUNK, last + 1, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        inside = (chunk <= last)[:, None] & (columns < D)[None, :]
        total += tl.load(parts_ptr + (chunk + j)[:, None] * D + columns[None, :], mask=inside, other=0.0).to(tl.float64)
    sums_ptr += j * (D + 1)
    tl.store(sums_ptr + columns, tl.sum(total, 0), mask=columns < D)
    if tl.program_id(1) == 0:
        tl.store(sums_ptr + D, (end - begin).to(tl.float64))


@triton.jit
def _kmeans_spread(
    squares_ptr, sums_ptr, points_ptr, centres_ptr, labels_ptr, n, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The sum of squared distances of BLOCK points to the centres of their labels.

    Without labels, it is the distance to one centre, or to a nearer one that was chosen earlier. Each square is stored,
    as a weight to draw the next centre.
    """
    FLOAT: tl.constexpr = sums_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    live = i < n - first
    c_ptr = centres_ptr
    at = tl.zeros([BLOCK], tl.int64)
    if labels_ptr is not None:
        at = tl.load(labels_ptr + first + i, mask=live, other=0).to(tl.int64) * D
    square = tl.zeros([BLOCK], FLOAT)
    for start in range(0, D, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        inside = live[:, None] & (columns < D)[None, :]
        x = tl.load(points_ptr + (first + i)[:, None] * D + columns[None, :], mask=inside, other=0.0).to(FLOAT)
        c = tl.load(c_ptr + at[:, None] + columns[None, :], mask=inside, other=0.0).to(FLOAT)
        square += tl.sum((x - c) * (x - c), 1)
    if squares_ptr is not None:
        square = tl.minimum(square, tl.load(squares_ptr + first + i, mask=live, other=0.0))
        tl.store(squares_ptr + first + i, square, mask=live)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(square, 0))


# Launch configs -------------------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """How labels are found."""

    how: str  # "few", "each", "some", "pairs", "product" or "screen"
    block: int  # points of a program
    block_k: int = 1  # centres of a tile
    chunk: int = 1  # coordinates of a tile
    few: int = 0  # centres unrolled, 0 for a loop
    steps: int = 1  # blocks of points, or tiles of centres, of a program
    stages: int = 1
    warps: int = 4
    precision: str = ""  # of the product
    pad: int = 1  # zeros make the number of coordinates a multiple of it


#: GPUs whose tensor cores multiply float64 about as fast as other units multiply float32.
_DOUBLES = ((8, 0), (9, 0), (10, 0), AMD)

_ANY = 2**63
# Tuned on an H200. Lines of all tables begin with a limit, and the first line whose limit fits holds.
# Of n * k, the number of distances: points of a program, coordinates of a tile.
_SOME = ((2**8, 1, 4096), (2**11, 1, 512), (2**14, 4, 256), (2**15, 8, 64), (_ANY, 16, 64))
# Of d: points of a program, centres and coordinates of a tile, stages, warps.
_SCREEN = ((16, 128, 64, 16, 3, 4), (32, 128, 64, 32, 3, 4), (64, 128, 64, 64, 3, 4), (128, 128, 128, 128, 2, 8),
           (256, 64, 64, 256, 2, 4))  # fmt: skip


def _way(n: int, d: int, k: int, size: int, align: int, dense: bool, roomy: bool) -> str:
    """How labels are found soonest on an H200: measured at some sizes, estimated between them.

    Points that are not `dense` are copied first, except for "some", "pairs" and "product".
    """
    if d <= 8:
        if (k * d <= 32 or n >= 100_000) and (dense or (k > 4 and n * d * size >= 2**20)):
            return "few"
        return "pairs"
    each = dense and n >= 512 and n * d * size >= 100_000 and k <= (16 if align * size >= 4 else 4)
    # From so many bytes on, the product is faster: soon if loads are narrow, later if points are long.
    narrow = align * size < 16 and k > 4 and d > 64
    most = 2 * 10**7 if narrow else 10**8 if size > 2 and d >= 256 else _ANY
    if each and (n * d * size < most or n * k < 60_000):
        return "each"
    if roomy and k > 64 and size == 4 and n >= 20_000 and n * d * k >= 10**8:
        return "screen"
    if n * k >= 60_000 and n * d * k >= 10**7:
        return "product"
    return "pairs" if d <= 32 and k <= 256 and 2**10 <= n < 2**13 else "some"


def _first(table: tuple[tuple[int, ...], ...], size: int) -> tuple[int, ...]:
    return next(row[1:] for row in table if size <= row[0])


def kmeans_config(
    n: int | None, d: int, k: int, dtype: torch.dtype, label_size: int, capability: tuple[int, int] | None,
    dense: bool = True, how: str | None = None,
) -> Config:  # fmt: skip
    """How labels of `label_size` bytes are found; `capability` is None in the interpreter.

    Without `n` the result is the same for any number of points, so that a label does not depend on other points.
    """
    size = dtype.itemsize
    align = math.gcd(16 // size, d)  # coordinates of one load
    wide = triton.next_power_of_2(d)
    roomy = d <= 64 or (d <= 256 and capability is not None and capability[0] in (9, 10))  # shared memory for a screen
    if how is None and (n is None or capability is None):
        screens = k > 64 and roomy and dtype == torch.float32
        each = k <= (16 if align * size >= 4 else 4)
        how = "few" if d <= 8 else "each" if each else "screen" if screens else "product"
    elif how is None:
        how = _way(n or 0, d, k, size, align, dense, roomy)
    if how == "few":
        few = k if k * d <= 32 else 0  # unrolled, centres stay in registers; more code would only be slower to load
        # Small programs: the loads of the next one run while the last one stores. Two labels of int64 fill a store of
        # 16 bytes, so half as many points keep a thread as busy.
        return Config(how, block=256 if few and capability and label_size == 8 else 512, few=few)
    if how == "each":
        if align * size == 16:
            # Pieces are short, since the sums of a point are added across its threads. Four points to a thread.
            chunk = min((4 if k > 12 else 8) * align, wide)
            return Config(how, 512 * align // chunk, chunk=chunk, stages=1 if d <= chunk else 3)
        # A warp loads a piece of a point, or several shorter points. It takes as many points at once as there are
        # registers for sums. Long points are prefetched. Pieces are longer if there are few sums.
        chunk = min(32 * align, wide)
        block = (8 if align > 1 or k > 8 else 16) * (32 * align // chunk)
        if k <= 4 and align * size < 16 and d > 32:
            chunk = min(256, wide)
            block = 16 if chunk < 256 else 8
        stages, warps = (1, 4) if d <= chunk else (3, 4) if d <= 3 * chunk else (3, 2)
        return Config(how, block, chunk=chunk, stages=stages, warps=warps)
    if how == "screen":
        if capability is None:
            return Config(how, block=64, block_k=32, chunk=max(16, wide))
        block, block_k, chunk, stages, warps = _first(_SCREEN, d)
        return Config(how, block, block_k, chunk, stages=stages, warps=warps)
    if how == "product":
        doubles = capability in (None, *_DOUBLES) or dtype == torch.float64
        # Rows of odd length are loaded an element at a time. A copy pays if the product takes long.
        pad = 1
        if n is not None and capability is not None and dtype == torch.float32 and align == 1:
            pad = 16 if n * d * k >= 2 * 10**9 else 1
        return _product_config(n, d, k, doubles, pad)
    n = n or 1
    if how == "pairs":
        # A thread has eight pairs of a point and a centre, or 32 if programs are few: it then waits less often.
        block = max(1, min(triton.next_power_of_2(n) // 512, 128, max(32, 2048 // triton.next_power_of_2(k))))
        pairs = 4096 if block >= 16 and n < 288 * block else 1024
        block_k = min(triton.next_power_of_2(k), max(1, pairs // block))
        return Config(how, block, block_k, steps=triton.cdiv(k, block_k), warps=8 if block_k == 1024 else 4)
    block, chunk = _first(_SOME, n * k)
    block, chunk = min(block, triton.next_power_of_2(n)), min(chunk, wide)
    block_k = max(1, min(triton.next_power_of_2(k), 4096 // (block * chunk)))
    tiles = triton.cdiv(k, block_k)
    return Config(how, block, block_k, chunk, steps=_shared(tiles, n, block, 1200))


def _shared(tiles: int, n: int, block: int, programs: int) -> int:
    """Tiles of centres for each program, if at least so many programs share them."""
    return triton.cdiv(tiles, min(tiles, triton.cdiv(programs, triton.cdiv(n, block))))


def _product_config(n: int | None, d: int, k: int, doubles: bool, pad: int) -> Config:
    """The product's tiles; if programs are too few to keep the GPU busy, they share the centres."""
    wide = triton.next_power_of_2(d)
    block_k = min(64, max(16, triton.next_power_of_2(k)))
    chunk = max(16, min(32 if block_k <= 32 else 16, wide))
    tiles = triton.cdiv(k, block_k)
    steps, block = tiles, 64
    if n is not None and 32 < k <= 64 and d > 512 and triton.cdiv(n, 64) < 528:
        block, chunk = 32, 32  # one tile of centres cannot be shared, so the points are
    elif n is not None and k > 64 and triton.cdiv(n, 64) * tiles < 132:  # less than a tile for each multiprocessor
        block, block_k, chunk, steps = 32, 32, max(chunk, min(32, wide)), 1
    elif n is not None and triton.cdiv(n, 64) < 900:
        steps = _shared(tiles, n, block, 1056)
    if pad > 1 and n is not None:
        steps = triton.cdiv(steps, 2 if triton.cdiv(n, block) < 900 else 1)
    precision = "ieee" if doubles else "tf32x3"
    return Config("product", block, block_k, chunk, steps=steps, stages=3, precision=precision, pad=pad)


#: Dtypes of sums.
_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}

_config = functools.lru_cache(maxsize=4096)(kmeans_config)
#: Programs that share the addition of many parts.
_GROUPS = 64
#: Points that a program adds up, at most.
_MOST = 8192
#: Labels that a program compares at once.
_LOOK = 1024
#: Comparisons of a label for each multiprocessor, up to which labels are not sorted.
_DIRECT = 3 * 2**15


def _sums_fit(d: int, k: int) -> bool:
    """Whether a program can hold the sums of all centres in registers."""
    return d <= 8 and k * (d + 1) <= 24


def _direct_pays(n: int, d: int, k: int, processors: int) -> bool:
    """Whether it is sooner that programs look for the points of their centres among all labels than to sort them."""
    if _sums_fit(d, k):
        return n <= 2 * _LOOK
    return n * k * triton.cdiv(d, 512) <= _DIRECT * processors


def _ones_pay(n: int, d: int, k: int, dtype: torch.dtype) -> bool:
    """Whether it is sooner to multiply points by ones: a pass over the points, whatever their labels."""
    return d > 8 and k <= 64 and 2**25 <= n * d * k and n < 2**30 and dtype != torch.float64


def _sums_config(d: int, k: int, assign: bool) -> Config:
    """For a pass that leaves sums: as many loads in flight as there are registers for."""
    return Config("few", block=512 if assign else 256, few=k, steps=max(1, (8 if assign else 16) // d))


def _narrowest(most: int) -> torch.dtype:
    """The narrowest dtype that counts to a number: narrow keys are sorted in fewer passes."""
    return next(dtype for dtype in (torch.uint8, torch.int16, torch.int32) if most <= torch.iinfo(dtype).max)


def _grouping(parts: int, d: int, k: int) -> bool:
    """Whether parts of sums are added in groups first: k programs alone would take long to add thousands of parts."""
    return parts > 8 * _GROUPS and k * (d + 1) <= 64


# Launchers of the assignment -----------------------------------------------------------------------------------------


def _launch_few(
    labels: Tensor, parts: Tensor | None, points: Tensor, centres: Tensor | None, k: int, config: Config
) -> None:  # fmt: skip
    """Labels where there are centres, parts of sums, or both, in one pass."""
    n, d = points.shape
    launch(
        _kmeans_few, (triton.cdiv(n, config.steps * config.block),),
        labels, parts, points, centres, n, k,
        D=d, FEW=config.few, STEPS=config.steps, BLOCK=config.block, num_warps=config.warps,
    )  # fmt: skip


def _rows(points: Tensor) -> tuple[int, int, int, int]:
    """Coordinates, strides of points and of coordinates, and the unit in which the first two are counted."""
    d, (stride_n, stride_d) = points.shape[1], points.stride()
    align = math.gcd(16 // points.element_size(), d, stride_n if stride_d == 1 else 1)
    return d // align, stride_n // align, stride_d, align


def _turns(points: Tensor) -> int:
    """The programs that share a list whose length only the GPU knows."""
    capability, processors = gpu(points.device)
    return processors * (1 if capability is None else 8)


def _launch_some(
    labels: Tensor, points: Tensor, centres: Tensor, config: Config, listed: tuple[Tensor, Tensor] | None = None,
    **late: bool,
) -> None:  # fmt: skip
    """Each program compares `config.steps` tiles of centres; if these are not all, a second kernel joins the results.

    For points on a list, a program compares all centres.
    """
    n, k = len(points), len(centres)
    wide = accumulated(points.dtype)
    span = config.steps * config.block_k
    parts = triton.cdiv(k, span)
    d, stride_n, stride_d, align = _rows(points)
    early = overlapping(points.device) if parts > 1 else {}
    found, least = labels, None
    if parts > 1:
        least, found = side_by_side(points.device, ((n, parts), wide), ((n, parts), torch.int32))
    programs = triton.cdiv(n, config.block) * parts
    if config.how == "pairs":
        launch(
            _kmeans_pairs, (programs,),
            found, least, points, centres, n, k, *points.stride(), span, parts,
            D=d * align, BLOCK=config.block, BLOCK_K=config.block_k, FLOAT=_WIDE[wide], EARLY=bool(early),
            num_warps=config.warps,
        )  # fmt: skip
    else:
        launch(
            _kmeans_some, (min(programs, _turns(points)) if listed else programs,),
            found, least, points, centres, *(listed or (None, None)), n, d, k, stride_n, stride_d, span, parts,
            ALIGN=align, BLOCK=config.block, BLOCK_K=config.block_k, BLOCK_D=config.chunk, FLOAT=_WIDE[wide],
            EARLY=bool(early), LATE=bool(late), num_warps=config.warps, **late,
        )  # fmt: skip
    if parts > 1:
        _launch_least(labels, found, least, None, None, None, early)


def _launch_least(
    labels: Tensor, found: Tensor, least: Tensor | None, errors: Tensor | None, doubtful: Tensor | None,
    count: Tensor | None, late: dict[str, bool],
) -> None:  # fmt: skip
    """Compare what was found in parts of the centres."""
    n, parts = found.shape
    columns = triton.next_power_of_2(parts) if errors is not None else min(1024, triton.next_power_of_2(parts))
    rows = max(1, min(64, 1024 // columns, triton.next_power_of_2(n)))
    launch(
        _kmeans_least, (triton.cdiv(n, rows),),
        labels, found, least, errors, doubtful, count, n, parts,
        BLOCK=rows, BLOCK_P=columns, LATE=bool(late), **late,
    )  # fmt: skip


def _launch_screen(labels: Tensor, points: Tensor, centres: Tensor, config: Config) -> None:
    """Screen by a product in TF32, then a finer product for the undecided points."""
    (n, d), k = points.shape, len(centres)
    single = torch.float32
    k_pad = triton.cdiv(k, config.block_k) * config.block_k
    finer = kmeans_config(None, d, k, points.dtype, labels.element_size(), gpu(points.device)[0], how="product")
    doubtful, shift, norms, short = side_by_side(
        points.device, ((n,), torch.int32 if n < 2**31 else torch.int64), ((config.chunk,), single), ((k_pad,), single),
        ((k_pad, config.chunk), single),
    )  # fmt: skip
    made = _launch_lengths(centres, finer)
    launch(_kmeans_shift, (triton.cdiv(config.chunk, 16),), shift, centres, k, d, BLOCK_K=64, BLOCK_D=16)
    launch(
        _kmeans_centred, (triton.cdiv(k_pad, 32),),
        short, norms, shift, centres, k, d, k_pad, config.chunk, BLOCK_K=32, BLOCK_D=16,
    )  # fmt: skip
    launch(
        _kmeans_screen, (triton.cdiv(n, config.block),),
        labels, doubtful, made[1], points, shift, short, norms, n, d, k_pad, _loose("tf32", d),
        CHUNK=config.chunk, BLOCK=config.block, BLOCK_K=config.block_k, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    _launch_product(labels, points, centres, finer, made, doubtful)


def _launch_lengths(centres: Tensor, config: Config, **early: bool) -> tuple[Tensor, Tensor]:
    """The squared lengths of the centres, and two zeros to count undecided points."""
    k, d = centres.shape
    wide = torch.float64 if config.precision == "ieee" else torch.float32
    squares, counts = side_by_side(centres.device, ((k,), wide), ((2,), torch.int64))
    block_d = max(8, min(256, triton.next_power_of_2(d)))
    launch(
        _kmeans_lengths, (triton.cdiv(k, 1024 // block_d),),
        squares, counts, centres, k, d, BLOCK_K=1024 // block_d, BLOCK_D=block_d, EARLY=bool(early),
    )  # fmt: skip
    return squares, counts


def _launch_product(
    labels: Tensor, points: Tensor, centres: Tensor, config: Config, made: tuple[Tensor, Tensor] | None = None,
    listed: Tensor | None = None,
) -> None:  # fmt: skip
    """The nearest by a product, for all points or those listed; by differences for undecided points."""
    (n, d), k, device = points.shape, len(centres), points.device
    if d % config.pad:
        points, centres = (apply(torch.constant_pad_nd, x, (0, -d % config.pad)) for x in (points, centres))
    late = overlapping(device) if made is None else {}
    squares, counts = made or _launch_lengths(centres, config, **late)
    if points.dtype == torch.float16:  # Triton cannot convert such operands to float64
        points, centres = apply(Tensor.float, points), apply(Tensor.float, centres)
    span = config.steps * config.block_k
    parts = triton.cdiv(k, span)
    d, stride_n, stride_d, align = _rows(points)
    whole = torch.int32 if n < 2**31 else torch.int64
    wanted: list[tuple[tuple[int, ...], torch.dtype]] = [((n,), whole)]
    if parts > 1:
        wanted += [((n, parts), squares.dtype), ((n, parts), squares.dtype), ((n, parts), torch.int32)]
    doubtful, *shared = side_by_side(device, *wanted)
    least, errors, found = shared or (None, None, labels)
    programs = triton.cdiv(n, config.block) * parts
    launch(
        _kmeans_product, (programs if listed is None else min(programs, _turns(points)),),
        found, least, errors, doubtful, counts[1:], points, centres, squares, listed,
        None if listed is None else counts, n, d, k, stride_n, stride_d, span, parts,
        _bound(config.precision, d * align),
        ALIGN=align, BLOCK=config.block, BLOCK_K=config.block_k, BLOCK_D=config.chunk, STAGES=config.stages,
        PRECISION=config.precision, LATE=bool(late), num_warps=config.warps, **late,
    )  # fmt: skip
    if parts > 1:
        _launch_least(labels, found, least, errors, doubtful, counts[1:], late)
    chunk = min(512, triton.next_power_of_2(points.shape[1]))
    block_k = min(triton.next_power_of_2(k), 4096 // chunk)
    exact = Config("some", 1, block_k, chunk, steps=triton.cdiv(k, block_k))
    _launch_some(labels, points, centres, exact, (doubtful, counts[1:]), **late)


def _assign_outputs(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> Tensor:
    return points.new_empty(points.shape[:1], dtype=label_dtype)


def _assign_into(labels: Tensor, points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> None:
    d, k = points.shape[1], len(centres)
    if d == 0 or k == 1:
        apply(Tensor.zero_, labels)
        return
    n = None if torch.are_deterministic_algorithms_enabled() else len(points)
    anywhere = d <= 8 and points.numel() < 2**16  # few points of few coordinates need no alignment
    dense = points.is_contiguous() and (anywhere or points.data_ptr() % 16 == 0)
    config = _config(n, d, k, points.dtype, labels.element_size(), gpu(points.device)[0], dense)
    _launched(labels, points, contiguous(centres), config)


def _launched(labels: Tensor, points: Tensor, centres: Tensor, config: Config) -> None:
    if config.how == "product":
        _launch_product(labels, points, centres, config)
        return
    if config.how in ("some", "pairs"):
        _launch_some(labels, points, centres, config)
        return
    points = contiguous(points)
    d, k = points.shape[1], len(centres)
    if config.how == "few":
        _launch_few(labels, None, points, centres, k, config)
        return
    if points.data_ptr() % 16:  # narrow loads take longer than a copy
        points = apply(Tensor.clone, points)
    if config.how == "screen":
        _launch_screen(labels, points, centres, config)
        return
    align = math.gcd(16 // points.element_size(), d)
    launch(
        _kmeans_each, (triton.cdiv(len(points), config.block),),
        labels, points, centres, len(points), d // align,
        K=k, ALIGN=align, BLOCK=config.block, BLOCK_D=config.chunk, STAGES=config.stages,
        FLOAT=_WIDE[accumulated(points.dtype)], num_warps=config.warps,
    )  # fmt: skip


# Launchers of the update ---------------------------------------------------------------------------------------------


def _programs(n: int, config: Config) -> int:
    return triton.cdiv(n, config.steps * config.block)


def _parts(points: Tensor, k: int, config: Config) -> Tensor:
    """Memory for the sums of a pass, one part a program."""
    n, d = points.shape
    return points.new_empty((_programs(n, config), k * (d + 1)), dtype=accumulated(points.dtype))


def _grouped(parts: Tensor, d: int, k: int, groups: Tensor | None = None) -> Tensor:
    """Parts ``[PARTS, k (d + 1)]`` of sums, added in groups if they are many; into `groups` if given."""
    many, width = parts.shape
    if not _grouping(many, d, k):
        return parts
    if groups is None:
        groups = parts.new_empty((_GROUPS, width), dtype=torch.float64)
    launch(
        _kmeans_groups, (_GROUPS,),
        groups, parts, many, width, triton.cdiv(many, _GROUPS), BLOCK=64, BLOCK_W=triton.next_power_of_2(width),
    )  # fmt: skip
    return groups


def _launch_means(out: Tensor, parts: Tensor, old: Tensor | None, **late: bool) -> None:
    """Centres from parts ``[PARTS, k (d + 1)]`` of their sums."""
    k, d = out.shape
    parts = _grouped(parts, d, k)
    wide = min(triton.next_power_of_2(d), 128 if k * d >= 2**17 else 32)
    block = min(max(1, 2048 // wide), triton.next_power_of_2(len(parts)))
    launch(
        _kmeans_means, (k, triton.cdiv(d, wide)),
        out, parts, old, len(parts), k, d, BLOCK=block, BLOCK_D=wide, LATE=bool(late), **late,
    )  # fmt: skip


def _launch_direct(out: Tensor, points: Tensor, labels: Tensor, old: Tensor | None, **late: bool) -> None:
    """Centres from the points of their labels, without sorting these."""
    (n, d), k, device = points.shape, len(out), points.device
    processors, wider = gpu(device)[1], accumulated(points.dtype)
    most = 8 * processors
    # Long pieces of points where programs are enough; one program may have most of the points to load.
    wide = min(triton.next_power_of_2(d), max(32, min(256, triton.next_power_of_2(k * d // most))))
    tiles, look = triton.cdiv(d, wide), min(_LOOK, triton.next_power_of_2(n))
    # Programs that are enough look at all labels of a small problem, which takes less than another launch.
    each = n if n <= 4 * look and k * tiles >= most // 2 else triton.cdiv(n, most * look) * look
    splits = triton.cdiv(n, each)
    # A program takes several centres at once if a tile of points holds theirs, and programs stay enough.
    tile, together = 16384 // (wide * wider.itemsize), 1
    while 2 * together * processors <= k * tiles * splits and 4 * together**2 * min(n, look) <= min(k, n) * tile:
        together *= 2
    programs = min(triton.cdiv(k, together), max(1, most // (tiles * splits)))
    found = torch.empty((programs * tiles * splits, look), dtype=torch.int32, device=device)
    parts = torch.empty((splits, k * (d + 1)), dtype=wider, device=device) if splits > 1 else None
    launch(
        _kmeans_direct, (programs, tiles, splits),
        out, parts, found, points, labels, old, n, k, d, *points.stride(), each,
        LOOK=look, BLOCK=min(look, tile // together), BLOCK_K=together, BLOCK_D=wide, FLOAT=_WIDE[wider],
        LATE=bool(late), **late,
    )  # fmt: skip
    if parts is not None:
        _launch_means(out, parts, old, **overlapping(device))


def _launch_ones(out: Tensor, points: Tensor, labels: Tensor, old: Tensor | None, **late: bool) -> None:
    """Centres from products of ones and points."""
    (n, d), k, (capability, processors) = points.shape, len(out), gpu(points.device)
    wide = min(max(16, triton.next_power_of_2(d)), 128)
    block, tiles = max(16, min(128, 16384 // (wide * points.element_size()))), triton.cdiv(d, wide)
    each = triton.cdiv(n, max(1, 4 * processors // tiles) * block) * block
    parts = points.new_empty((triton.cdiv(n, each), k * (d + 1)), dtype=accumulated(points.dtype))
    launch(
        _kmeans_ones, (len(parts), tiles),
        parts, points, labels, n, k, d, *points.stride(), each,
        BLOCK=block, BLOCK_K=max(16, triton.next_power_of_2(k)), BLOCK_D=wide, FLOAT=_WIDE[parts.dtype],
        SPLIT=capability is not None and points.dtype == torch.float32, LATE=bool(late), **late,
    )  # fmt: skip
    _launch_means(out, parts, old, **overlapping(points.device))


def _launch_chunks(points: Tensor, labels: Tensor, k: int, sums: Tensor | None = None) -> Tensor:
    """Sort by label and add up neighbours; returns sums ``[1, k (d + 1)]``, in `sums` if given."""
    (n, d), device = points.shape, points.device
    # Labels out of range become k: they are last, and are not added up.
    keys = torch.empty((n,), dtype=_narrowest(k), device=device)
    launch(_kmeans_keys, (triton.cdiv(n, 1024),), keys, labels, n, k, BLOCK=1024)
    keys, order = apply(torch.sort, keys, stable=True)
    numbers = apply(torch.arange, k + 1, dtype=torch.int32, device=device)
    bounds = apply(torch.searchsorted, apply(Tensor.to, keys, torch.int32), numbers)
    wide = min(triton.next_power_of_2(d), 128)
    # Neighbours that one program adds up: programs enough to fill a GPU, and few enough parts of a label.
    size = max(64, min(_MOST, triton.next_power_of_2(triton.cdiv(n, 4096))))
    # As many points at once as a label has if all have as many.
    block = max(1, min(size, triton.next_power_of_2(triton.cdiv(n, k)), 2048 // wide))
    chunks, tiles = triton.cdiv(n, size), triton.cdiv(d, wide)
    parts = torch.empty((chunks + k, d), dtype=accumulated(points.dtype), device=device)
    launch(
        _kmeans_chunks, (chunks, tiles),
        parts, points, keys, order, bounds, d, k, size, BLOCK=block, BLOCK_D=wide,
    )  # fmt: skip
    if sums is None:
        sums = torch.empty((1, k * (d + 1)), dtype=torch.float64, device=device)
    together = max(1, min(64, 4096 // wide))
    launch(_kmeans_sums, (k, tiles), sums, parts, bounds, d, size, BLOCK=together, BLOCK_D=wide)
    return sums


def _update_into(
    out: Tensor, points: Tensor, labels: Tensor, k: int, old: Tensor | None, **late: bool
) -> None:  # fmt: skip
    n, d = points.shape
    if n == 0:
        apply(Tensor.fill_, out, math.nan) if old is None else apply(Tensor.copy_, out, old)
        return
    old = None if old is None else contiguous(old)
    labels = contiguous(labels)
    if _ones_pay(n, d, k, points.dtype):
        _launch_ones(out, points, labels, old, **late)
        return
    if _direct_pays(n, d, k, gpu(points.device)[1]):
        _launch_direct(out, points, labels, old, **late)
        return
    points = contiguous(points)
    if _sums_fit(d, k):
        config = _sums_config(d, k, assign=False)
        parts = _parts(points, k, config)
        _launch_few(labels, parts, points, None, k, config)
    else:
        parts = _launch_chunks(points, labels, k)
    _launch_means(out, parts, old)


def _labelled(
    labels: Tensor, points: Tensor, centres: Tensor, label_dtype: torch.dtype, sums: Tensor | None = None
) -> Tensor:
    """Labels, and parts of sums: in one pass if these fit in registers. The parts are `sums` if it has their number."""
    n, k = len(points), len(centres)
    if not _sums_fit(points.shape[1], k):
        _assign_into(labels, points, centres, label_dtype)
        return _launch_chunks(points, labels, k, sums)
    config = _sums_config(points.shape[1], k, assign=True)
    parts = sums if sums is not None and len(sums) == _programs(n, config) else _parts(points, k, config)
    _launch_few(labels, parts, points, centres, k, config)
    return parts


def _step_into(
    outs: tuple[Tensor, Tensor], points: Tensor, centres: Tensor, label_dtype: torch.dtype
) -> None:  # fmt: skip
    (labels, new), (n, d) = outs, points.shape
    points, centres = contiguous(points), contiguous(centres)
    if n and d and _sums_fit(d, len(centres)):
        _launch_means(new, _labelled(labels, points, centres, label_dtype), centres)
    elif n and d:
        _assign_into(labels, points, centres, label_dtype)
        _update_into(new, points, labels, len(centres), centres, **overlapping(points.device))
    elif n:  # without coordinates, the first centre is the nearest
        apply(Tensor.zero_, labels)
    elif d:
        apply(Tensor.copy_, new, centres)


def _sums_outputs(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (n, d), k = points.shape, len(centres)
    parts, dtype = 1, torch.float64
    if n and d and _sums_fit(d, k):
        parts, dtype = _programs(n, _sums_config(d, k, assign=True)), accumulated(points.dtype)
        if _grouping(parts, d, k):
            parts, dtype = _GROUPS, torch.float64
    return _assign_outputs(points, centres, label_dtype), points.new_empty((parts, k, d + 1), dtype=dtype)


def _sums_into(
    outs: tuple[Tensor, Tensor], points: Tensor, centres: Tensor, label_dtype: torch.dtype
) -> None:  # fmt: skip
    """`_step_into` without the last kernel, which turns parts of sums into centres."""
    (labels, sums), (n, d), k = outs, points.shape, len(centres)
    points, centres = contiguous(points), contiguous(centres)
    if not n or not d:  # nothing is added up
        apply(Tensor.zero_, sums)
        if n:
            apply(Tensor.zero_, labels)
            apply(Tensor.fill_, sums[:, 0], n)
    else:
        memory = sums.flatten(1)
        _grouped(_labelled(labels, points, centres, label_dtype, memory), d, k, memory)


# Arguments -----------------------------------------------------------------------------------------------------------


def _refuse_not_finite(name: str, what: str, x: Tensor, remedy: str) -> float:
    """Read all of `x` once and refuse NaN and infinities, naming the first; return the largest magnitude."""
    most = float(torch.stack(torch.aminmax(x.detach())).abs().max()) if x.numel() else 0.0  # waits for the GPU
    if math.isfinite(most):
        return most
    at = int(torch.isfinite(x.detach()).logical_not_().reshape(-1).to(torch.uint8).argmax())
    row, column = divmod(at, x.shape[1])
    raise ValueError(
        f"{name}: expected finite {what}, got {x[row, column].item()} at {what}[{row}, {column}]; {remedy}"
    )


def _refuse_beyond(name: str, what: str, most: float, limit: float) -> None:
    """Refuse points whose squares or sums would be infinite; `most` is their largest magnitude."""
    if most > limit:
        raise ValueError(
            f"{name}: expected {what} of magnitudes up to {limit:.3g}, got {most:.3g}; scale all of them down, or cast "
            "them to torch.float64"
        )


def _farthest(dtype: torch.dtype, d: int) -> float:
    """The magnitude up to which sums of 1024 squared distances of `d` coordinates are finite."""
    return math.sqrt(torch.finfo(accumulated(dtype)).max / (4096 * max(d, 1)))


def _check_k(name: str, k: Any) -> int:
    """Check the number of centres."""
    return integer(name, "k", k, "give the number of centres", "from 1 to 2**31 - 1", lambda k: 1 <= k < 2**31)


def _tensors(name: str, **given: Any) -> tuple[list[Any], bool]:
    """NumPy arrays as tensors where the kernels run, and whether they were arrays: all of them or none."""
    numpy: Any = sys.modules.get("numpy")  # imported if an array was passed
    arrays = {what: v for what, v in given.items() if numpy is not None and isinstance(v, numpy.ndarray)}
    if not arrays:
        return list(given.values()), False
    for what, value in given.items():
        if value is not None and what not in arrays:
            raise TypeError(
                f"{name}: expected {what} to be a NumPy array as {next(iter(arrays))} is, got {type(value).__name__}; "
                "give arrays only, or tensors only"
            )
    found: list[Any] = []
    for what, value in given.items():
        if value is None:
            found.append(None)
            continue
        if numpy.ma.is_masked(value):
            raise TypeError(
                f"{name}: expected {what} without masked values, got a masked array; leave out the rows that hold "
                "them, or fill them in with filled()"
            )
        native = value.dtype.newbyteorder("=")
        try:
            if torch.cuda.is_available():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # it may be read-only: nothing writes to it
                    found.append(torch.from_numpy(numpy.ascontiguousarray(value, native)).cuda())
            else:  # the interpreter wants memory of its own, which the points and the first centres may share
                found.append(torch.from_numpy(numpy.array(value, native, order="C")))
        except TypeError:
            raise TypeError(
                f"{name}: expected {what} to be an array of numbers that torch has, got {value.dtype}; use "
                "astype(numpy.float64)"
            ) from None
    return found, True


def _check_assign(
    points: Any, centres: Any, label_dtype: Any, check: bool = False, name: str = "kmeans_assign"
) -> tuple[Any, ...]:  # fmt: skip
    k = shapes(name, points=(points, "[n, d]", DTYPES), centres=(centres, "[k > 0, d]"))["k"]
    if not any(label_dtype is of for of in LABELS):
        raise TypeError(
            f"{name}: expected label_dtype to be torch.int64, int32 or uint8, got {label_dtype}; choose one"
        )
    if k - 1 > torch.iinfo(label_dtype).max:
        raise ValueError(
            f"{name}: expected a label_dtype that counts to {k - 1}, got {label_dtype} for {k} centres; "
            "use torch.int32 or torch.int64"
        )
    return points, centres, label_dtype


def _read_assign(points: Tensor, centres: Tensor, label_dtype: torch.dtype, check: bool) -> None:
    name = "kmeans_assign"
    if not check or capturing(points):
        return
    most = {
        "points": _refuse_not_finite(
            name, "points", points, "fix it, or pass check=False, which gives such a point label 0"
        ),
        "centres": _refuse_not_finite(
            name, "centres", centres, "fix it, or pass check=False, which chooses such a centre for none"
        ),
    }
    if len(centres) == 1:
        return
    for what, size in most.items():
        _refuse_beyond(name, what, size, _farthest(points.dtype, points.shape[1]))
    least = 1024 * math.sqrt(torch.finfo(accumulated(points.dtype)).tiny)
    if points.numel() and 0 < max(most.values()) < least:
        raise ValueError(
            f"{name}: expected points or centres of magnitudes from {least:.3g} up, whose squares are not 0, got "
            f"{max(most.values()):.3g}; scale all of them up"
        )


def _check_update(points: Any, labels: Any, k: Any, centres: Any, check: bool) -> tuple[Any, ...]:
    name = "kmeans_update"
    shapes(
        name, points=(points, "[n, d]", DTYPES), labels=(labels, "[n]", LABELS), centres=(centres, "[k, d]?")
    )  # fmt: skip
    k = _check_k(name, k)
    if centres is not None and centres.shape[0] != k:
        raise ValueError(f"{name}: expected k = {k} centres, got {centres.shape[0]}; give one for each label")
    return points, labels, k, centres


def _read_update(points: Tensor, labels: Tensor, k: int, centres: Tensor | None, check: bool) -> None:
    name = "kmeans_update"
    if not check or capturing(points):
        return
    most = _refuse_not_finite(name, "points", points, "fix it, or pass check=False, which lets it spoil its centre")
    _refuse_beyond(name, "points", most, torch.finfo(accumulated(points.dtype)).max / _MOST)
    if labels.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(labels)).tolist()
    if low < 0 or high >= k:
        wide = labels.long()  # k need not fit into the dtype of labels
        at = int(((wide < 0) | (wide >= k)).to(torch.uint8).argmax())
        raise IndexError(
            f"{name}: expected labels from 0 to {k - 1}, got {int(labels[at])} at labels[{at}]; fix it, or "
            "pass check=False to leave such points out"
        )


def _check_means(sums: Any, old: Any) -> tuple[Any, ...]:
    name = "kmeans_means"
    # For each centre its sums and its number of points.
    wide = torch.float32, torch.float64
    shapes(name, old=(old, "[k, d]", DTYPES), sums=(sums, "[parts > 0, k, d + 1]", wide))
    return sums.contiguous(), old


# Operators -----------------------------------------------------------------------------------------------------------

_assign = Operator(
    "kmeans_assign",
    "(Tensor points, Tensor centres, ScalarType label_dtype) -> Tensor",
    check=_check_assign,
    outputs=_assign_outputs,
    into=_assign_into,
    modes=torch.are_deterministic_algorithms_enabled,
    read=_read_assign,
)

_update = Operator(
    "kmeans_update",
    "(Tensor points, Tensor labels, SymInt k, Tensor? centres) -> Tensor",
    check=_check_update,
    outputs=lambda points, labels, k, old: points.new_empty((k, points.shape[1])),
    into=_update_into,
    read=_read_update,
)

#: Labels and new centres, an iteration of k-means: ``OPERATORS["kmeans_step"](points, centres, label_dtype)``.
_step = Operator(
    "kmeans_step",
    "(Tensor points, Tensor centres, ScalarType label_dtype) -> (Tensor, Tensor)",
    check=functools.partial(_check_assign, name="kmeans_step"),
    outputs=lambda points, centres, dtype: (_assign_outputs(points, centres, dtype), centres.new_empty(centres.shape)),
    into=_step_into,
    modes=torch.are_deterministic_algorithms_enabled,
)

#: Labels, and parts ``[parts, k, d + 1]`` of what the points of each centre add up to and of how many they are: an
#: iteration up to where those of other points are added, ``OPERATORS["kmeans_sums"](points, centres, label_dtype)``.
_sums = Operator(
    "kmeans_sums",
    "(Tensor points, Tensor centres, ScalarType label_dtype) -> (Tensor, Tensor)",
    check=functools.partial(_check_assign, name="kmeans_sums"),
    outputs=_sums_outputs,
    into=_sums_into,
    modes=torch.are_deterministic_algorithms_enabled,
)

#: The rest of that iteration: ``OPERATORS["kmeans_means"](sums, old)`` adds the parts of all sums in float64, in their
#: order, and divides; a centre without points stays what it was.
_means = Operator(
    "kmeans_means",
    "(Tensor sums, Tensor old) -> Tensor",
    check=_check_means,
    outputs=lambda sums, old: old.new_empty(old.shape),
    into=lambda out, sums, old: _launch_means(out, sums.flatten(1), contiguous(old)),
)


def kmeans_assign(
    points: Any, centres: Any, *, label_dtype: torch.dtype = torch.int64, check: bool = True
) -> Any:  # fmt: skip
    """The nearest centre for each point, in one pass over the points.

    Parameters
    ----------
    points : torch.Tensor or numpy.ndarray
        ``[n, d]``, float16, float32 or float64; on a GPU, or on the CPU if Triton's interpreter is on. Arrays
        are copied to the GPU, and the labels back from it.
    centres : torch.Tensor or numpy.ndarray
        ``[k, d]``, of the dtype and on the device of `points`.
    label_dtype : torch.dtype, default torch.int64
        int64, int32 or uint8. Labels are all that is written, and for few coordinates their width decides the time.
    check : bool, default True
        Read the points and the centres first and refuse values whose distances a kernel cannot compute, which waits for
        the GPU: NaN, infinities, and all that is below or beyond the range under Notes. Skipped under torch.compile and
        graph capture.

    Returns
    -------
    torch.Tensor or numpy.ndarray
        ``[n]``, of `label_dtype`: the lowest number among equally near centres, as ``argmin`` gives. Without `check`, a
        point whose distances are all NaN or infinite gets 0, and a centre with NaN is nearest to none.

    Raises
    ------
    TypeError
        For what is neither a tensor nor an array, another dtype, centres of another dtype than the points.
    ValueError
        For other shapes or devices, no centres, a `label_dtype` that cannot count to k, and, with `check`, NaN or
        infinities; names the first. With `check` also for values out of the range below.

    Notes
    -----
    Distances are squared in float32, or in float64 for float64. So magnitudes are at most 2.8e17 / sqrt(d) in float32
    and 2.0e152 / sqrt(d) in float64. The largest is 0, or at least 1.2e-16 and 1.6e-151. `fusebook.kmeans` scales its
    points and has no such range.

    Where there are few coordinates, centres or points, distances are sums of squared differences. With more, they are
    a matrix product, in float64 where tensor cores multiply that; points that it cannot tell, wherever they lie, are
    compared by differences. Torch's switches of TF32 change nothing: where a product in TF32 goes before, it only sorts
    out points that are beyond doubt.

    Which of these is taken depends on all sizes, and so may the label of a point that is as far from two centres but
    for rounding. Under torch.use_deterministic_algorithms(True) it does not depend on the number of points.

    Labels have no gradient.

    Examples
    --------
    >>> import fusebook, torch
    >>> points = torch.tensor([[0.0, 1.0], [5.0, 5.0], [0.0, 0.0]], device="cuda")  # doctest: +SKIP
    >>> fusebook.kmeans_assign(points, points[:2])  # doctest: +SKIP
    tensor([0, 1, 0], device='cuda:0')
    """
    (points, centres), arrays = _tensors("kmeans_assign", points=points, centres=centres)
    labels = _assign(points, centres, label_dtype, check)
    return labels.cpu().numpy() if arrays else labels


def kmeans_update(points: Any, labels: Any, k: int, *, centres: Any = None, check: bool = True) -> Any:
    """The mean of the points of each label, the same bits in every run.

    Parameters
    ----------
    points : torch.Tensor or numpy.ndarray
        ``[n, d]``, float16, float32 or float64.
    labels : torch.Tensor or numpy.ndarray
        ``[n]``, int64, int32 or uint8, from 0 to k - 1.
    k : int
        The number of centres.
    centres : torch.Tensor or numpy.ndarray, optional
        ``[k, d]``, the centres so far: one without points keeps its place. Where they are not given, the mean of
        nothing is NaN.
    check : bool, default True
        Read the labels and the points first and refuse labels out of range and points that are not finite, which waits
        for the GPU. Without it, and under torch.compile and graph capture, a point whose label is out of range is left
        out.

    Returns
    -------
    torch.Tensor or numpy.ndarray
        ``[k, d]``, of the dtype of `points`.

    Raises
    ------
    TypeError
        For what is neither a tensor nor an array, other dtypes, a `k` that is no integer.
    ValueError
        For shapes or devices that do not match, and, with `check`, NaN or infinities in points; names the first. With
        `check` also for magnitudes beyond 4.1e34 in float32 and 2.1e304 in float64, whose sums may be infinite.
    IndexError
        With `check`, for a label out of range; names its position.

    Notes
    -----
    Each program adds up its own points in float32 (float64 in float64), and these parts are added in float64, in the
    order of the programs. In large problems of more than 64 centres, and of float64, points are sorted by label first,
    with torch.sort, which is stable, unless the sums of all centres fit in a program's registers.

    Centres have no gradient: asking for one, of points that require it, raises NotImplementedError.
    """
    (points, labels, centres), arrays = _tensors("kmeans_update", points=points, labels=labels, centres=centres)
    new = _update(points, labels, k, centres, check)
    return new.cpu().numpy() if arrays else new


# Lloyd's iteration ---------------------------------------------------------------------------------------------------


class KMeans(NamedTuple):
    """What `kmeans` found.

    Attributes
    ----------
    centres : torch.Tensor or numpy.ndarray
        ``[k, d]``.
    labels : torch.Tensor or numpy.ndarray
        ``[n]``, int64: the nearest of `centres`.
    inertia : float
        The sum of squared distances to them.
    iterations : int
        How many times centres were moved.
    """

    centres: Any
    labels: Any
    inertia: float
    iterations: int


#: Points a program of the spread kernel.
_SPREAD = 1024


def _spread(points: Tensor, centres: Tensor, labels: Tensor | None, squares: Tensor | None) -> Tensor:
    """Squared distances to the centres of `labels`, or to one centre where it is nearer than `squares`: their sums."""
    n, d = points.shape
    sums = points.new_empty((triton.cdiv(n, _SPREAD),), dtype=accumulated(points.dtype))
    with launching(points):
        launch(
            _kmeans_spread, (len(sums),),
            squares, sums, points, centres, labels, n, d,
            BLOCK=_SPREAD, BLOCK_D=min(16, triton.next_power_of_2(d)), num_warps=8,
        )  # fmt: skip
    return sums


def _plus_plus(points: Tensor, k: int, draw: random.Random) -> Tensor:
    """k-means++: each centre is a point, drawn with a weight of its squared distance to the nearest centre so far."""
    n, d = points.shape
    centres = points.new_empty((k, d))
    centres[0] = points[draw.randrange(n)]
    squares = torch.full((n,), math.inf, dtype=accumulated(points.dtype), device=points.device)
    for j in range(1, k):
        # The sums of whole blocks choose the block, on the host, where running sums are always added in one order.
        blocks = _spread(points, centres[j - 1], None, squares).double().cpu().cumsum(0)
        at = draw.random() * float(blocks[-1])
        block = min(int(torch.searchsorted(blocks, at, right=True)), len(blocks) - 1)
        within = squares[block * _SPREAD : (block + 1) * _SPREAD].double().cpu().cumsum(0)
        rest = at - (float(blocks[block - 1]) if block else 0.0)
        i = block * _SPREAD + min(int(torch.searchsorted(within, rest, right=True)), len(within) - 1)
        centres[j] = points[i]
    return centres


def _shown(iterations: range, name: str) -> Iterable[int]:
    """The iterations, with a bar where there is a terminal and tqdm is installed."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return iterations
    return tqdm(iterations, desc=name, unit="iteration", disable=None, leave=False)


def kmeans(
    points: Any, k: int, *, init: Any = "k-means++", max_iter: int = 300, tol: float = 1e-4, seed: int = 0
) -> KMeans:  # fmt: skip
    """Cluster points around k centres by Lloyd's iteration.

    Parameters
    ----------
    points : torch.Tensor or numpy.ndarray
        ``[n, d]``, float16, float32 or float64, all finite, of any magnitude. An array may have any byte order and no
        masked values. It is copied to the GPU once, and what is found is copied back; a tensor stays where it is.
    k : int
        The number of centres, at most n.
    init : {"k-means++", "random"} or torch.Tensor or numpy.ndarray
        How the first centres are chosen, in scikit-learn's words: points drawn far from each other, points drawn at
        random, or ``[k, d]`` centres that are given.
    max_iter : int, default 300
        The most iterations.
    tol : float, default 1e-4
        Stop when the squared length of all centres' movement is at most `tol` times the mean variance of a coordinate.
        0: until they stand still, which they do exactly, since the same labels give the same bits.
    seed : int, default 0
        Of the choice of the first centres. The same seed gives the same bits.

    Returns
    -------
    KMeans
        ``centres``, ``labels``, ``inertia``, ``iterations``; arrays where `points` is one.

    Raises
    ------
    TypeError, ValueError
        As `kmeans_assign` and `kmeans_update`; also for no points, for more centres than points, and for an unknown
        `init`, or one that is much farther away than all points.
    NotImplementedError
        For points or an `init` that require a gradient, which centres do not have.

    Notes
    -----
    An empty cluster keeps its centre (scikit-learn moves it to the point that is farthest from its own). k-means++
    draws one candidate a centre, scikit-learn the best of several. A bar shows the iterations where there is a
    terminal and tqdm is installed.
    """
    name = "kmeans"
    given = init if not isinstance(init, str) else None
    (points, given), arrays = _tensors(name, points=points, init=given)
    n = shapes(name, points=(points, "[n > 0, d]", DTYPES), init=(given, "[k, d]?"))["n"]
    k = _check_k(name, k)
    if k > n:
        raise ValueError(f"{name}: expected k to be at most the number of points, {n}, got {k}; ask for fewer centres")
    if given is not None:
        if given.shape[0] != k:
            raise ValueError(f"{name}: expected k = {k} centres in init, got {given.shape[0]}; give k of them")
    elif init not in ("k-means++", "random"):
        raise ValueError(f"{name}: expected init to be 'k-means++', 'random' or centres, got {init!r}; choose one")
    max_iter = integer(name, "max_iter", max_iter, "give the most iterations", "of 1 or more", lambda most: most >= 1)
    seed = integer(name, "seed", seed, "give any")
    number(name, "tol", tol, "0 iterates until the centres stand still", "to be 0 or more", lambda tol: tol >= 0)
    if not readable(points):
        what = "a tensor on meta" if points.is_meta else "one that torch traces or transforms"
        raise ValueError(f"{name}: expected points whose values can be read, got {what}; give one that holds numbers")
    if torch.is_grad_enabled() and (points.requires_grad or (given is not None and given.requires_grad)):
        raise NotImplementedError(
            f"{name}: expected points and init that require no gradient, since what is found has none; detach them, "
            "or call it under torch.no_grad()"
        )
    check_stored(name, "points", points)
    most = _refuse_not_finite(name, "points", points, "leave such points out")
    # Scaling by a power of two is exact, and keeps squares finite and above 0.
    bound = 400 if points.dtype == torch.float64 else 40
    exponent = math.frexp(most)[1]
    unit = 1.0 if abs(exponent) <= bound else 2.0 ** max(exponent - bound, -5 * bound // 2)
    points = points.contiguous() if unit == 1 else points.contiguous() / unit
    if given is not None:
        check_stored(name, "init", given)
        most = _refuse_not_finite(name, "init", given, "give finite centres")
        _refuse_beyond(name, "init", most, _farthest(points.dtype, points.shape[1]) * unit)
        centres = given.contiguous() if unit == 1 else given.contiguous() / unit
    elif init == "random" or not points.shape[1]:  # points without coordinates are all at one place
        rows = random.Random(seed).sample(range(n), k)
        centres = points[torch.tensor(rows, device=points.device)]
    else:
        centres = _plus_plus(points, k, random.Random(seed))
    wide = points if points.dtype == torch.float64 else points.float()
    least = tol * float(wide.var(0, correction=0).mean()) if tol and points.numel() else 0.0
    narrow = torch.uint8 if k <= 256 else torch.int32  # labels of the iterations are not returned
    for iterations in _shown(range(1, max_iter + 1), name):  # noqa: B007  (returned at the end)
        _, new = OPERATORS["kmeans_step"](points, centres, narrow)
        moved = float((new.double() - centres.double()).square().sum())  # waits
        centres = new
        if moved <= least:
            break
    labels = kmeans_assign(points, centres, check=False)
    inertia = float(_spread(points, centres, labels, None).double().sum()) if points.numel() else 0.0
    if unit != 1:
        centres, inertia = centres * unit, inertia * unit * unit
    if arrays:
        return KMeans(centres.cpu().numpy(), labels.cpu().numpy(), inertia, iterations)
    return KMeans(centres, labels, inertia, iterations)
