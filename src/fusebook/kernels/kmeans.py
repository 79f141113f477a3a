"""K-means: which of k centres is nearest to each of n points.

For points ``x [n, d]`` and centres ``c [k, d]``,

    label[i] = the j with the least |x[i] - c[j]|, the lowest such j where several are equally near

Fused: differences, squares, their sums over d, and the search for the least over k; the update, see `kmeans_update`,
may share the pass. The chain of separate operations writes nkd differences and reads them again, then nk distances. The
least is to read nd and to write n labels.

Few coordinates: a point lives in registers, and its distances are sums of squared differences. Few centres: each has
sums of its own in registers, while the coordinates of a point pass by. Few points, or few of them for so many centres:
programs share out the centres, too, and a second kernel compares what they found.

More of all: the distances are a matrix product, since ``|x - c|**2 = |x|**2 - 2 x.c + |c|**2``, where large terms
cancel. Tensor cores of data centre GPUs multiply float64, about as fast as other units multiply float32, and in float64
nothing is lost that matters: in doubt are next to nobody but points that are as far from two centres as they are far
from each other's digits. On other GPUs it is three products of TF32, which lose more. Who is in doubt is put on a list
and compared with all centres by differences, so that labels are those of differences in either way. Where coordinates
are few and centres many, a product in TF32 goes before it and only *screens*: it is twice as fast, and a point whose
two best candidates it cannot tell apart goes on to the other product.

Limits: centres that are not contiguous are copied first; so are points, but where they are few and for a product, which
copies those with an odd number of coordinates where it takes long enough.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import Operator, accumulated, apply, capturing, contiguous, empty, gpu, launch, overlapping, shapes
from ._memory import side_by_side
from ._points import DTYPES, LABELS, Plan, farthest, launch_few, refuse_beyond, refuse_not_finite, tensors
from .kmeans_plan import bound, kmeans_plan, loose

__all__ = ["kmeans_assign", "kmeans_assign_eager"]

# The unfused chain ---------------------------------------------------------------------------------------------------


def kmeans_assign_eager(points: Tensor, centres: Tensor, label_dtype: torch.dtype = torch.int64) -> Tensor:
    """The nearest centre of each point, one operation after another: what fusing saves.

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


# Kernels -------------------------------------------------------------------------------------------------------------
#
# Points are [n, D] and contiguous. Addresses are int64, because n D may be more than 2**31.


@triton.jit
def _kmeans_shift(shift_ptr, centres_ptr, K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mean of the centres, zero behind D."""
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
    """Rounded to what TF32 keeps, half of what cutting loses; infinities and NaN stay what they are."""
    bits = x.to(tl.int32, bitcast=True)
    near = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 3.0e38, near, x)


@triton.jit
def _kmeans_centred(
    short_ptr, norms_ptr, shift_ptr, centres_ptr, K, D, K_PAD, D_PAD, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Centres less the shift, in TF32 [K_PAD, D_PAD], and their squared norms [K_PAD]; zeros where there are none."""
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
    # What pads is never the nearest.
    tl.store(norms_ptr + rows, tl.where(rows < K, norm, float("inf")), mask=rows < K_PAD)


@triton.jit
def _listed(doubtful_ptr, count_ptr, i, unsure):
    """Put those points of `i` [BLOCK] on a list that are `unsure`, in the order in which programs come by."""
    many = tl.sum(unsure, 0)
    if many > 0:
        place = tl.atomic_add(count_ptr, many.to(count_ptr.dtype.element_ty), sem="relaxed")
        place = place.to(tl.int64) + tl.cumsum(unsure, 0) - unsure
        tl.store(doubtful_ptr + place, i.to(doubtful_ptr.dtype.element_ty), mask=unsure != 0)


@triton.jit
def _kmeans_screen(
    labels_ptr, doubtful_ptr, count_ptr, points_ptr, shift_ptr, short_ptr, norms_ptr, n, D, K_PAD, loose,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The nearest centre by a product in TF32, and the list of the points for which it cannot tell.

    A point's coordinates, CHUNK at most, stay where they are while the centres pass by. `loose` is the largest relative
    error of a term of the product.
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
        # Squared distances as integers, which order positive floats; their last bits carry the number in the tile.
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
    # Both may be wrong by twice the product's error, |x| |c| times `loose`, by the rounding of the norms and of their
    # sum, and by the bits that carry a number.
    farthest = tl.max(reach, 0)
    error = 4.0 * loose * tl.sqrt(square * farthest) + 2.0**-18 * (square + farthest) + LOST * low
    sure = high - low > error  # NaN is never sure
    tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty), mask=live)  # write n labels
    _listed(doubtful_ptr, count_ptr, i, (live & (sure == 0)).to(tl.int32))


# Distances by a matrix product: of float64 where tensor cores multiply it, which leaves next to nobody in doubt; else
# by three of TF32. Points may have any strides.


@triton.jit
def _kmeans_lengths(
    squares_ptr, counts_ptr, centres_ptr, K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """The squared lengths [K] of centres, and two zeros that others count with."""
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
            # Nothing else is done with x: it goes from shared memory to the tensor cores, and is widened on the way.
            product = tl.dot(x.to(FLOAT), c.to(FLOAT), product, input_precision=PRECISION, out_dtype=FLOAT)
        norm = tl.load(squares_ptr + start + number, mask=known, other=float("inf"))  # [BLOCK_K]
        reach = tl.maximum(reach, tl.where(known & (norm == norm), norm, 0.0))
        distance = norm[None, :] - 2.0 * product  # squared, and less what all centres have alike
        distance = tl.where(distance < float("inf"), distance, float("inf"))  # NaN is infinite
        least = tl.min(distance, 1)
        place = tl.min(tl.where(distance == least[:, None], number[None, :], BLOCK_K), 1)  # the lowest of equals
        after = tl.min(tl.where(distance > least[:, None], distance, float("inf")), 1)
        # Second is who is farther than the best, not who is as far: of equals there is no doubt.
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
    """The nearest of SPAN centres by a matrix product, to all points or to those on a list, and who is in doubt.

    `bound` times the largest squared length of a centre is what a difference of two squared distances may be wrong by.
    With `least_ptr` the parts are compared by another kernel; who is in doubt already has a negative label. D and
    `stride_n` are counted in units of ALIGN, so that Triton sees how rows are aligned.
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


@triton.jit
def _kmeans_each(
    labels_ptr, points_ptr, centres_ptr, n, D,
    K: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """The nearest of few centres by differences to each in turn: BLOCK points are read once, for all K of them.

    D is counted in units of ALIGN. So many neighbouring coordinates, which one thread loads, are added up at once:
    there is a sum for each of them, and for each centre.
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


# Few coordinates of a point and many centres: a tile of pairs, each thread with some points and some centres of it.


@triton.jit
def _kmeans_pairs(
    labels_ptr, least_ptr, points_ptr, centres_ptr, n, K, stride_n, stride_d, SPAN, PARTS,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, FLOAT: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """The nearest of SPAN centres to each of BLOCK points, coordinate by coordinate; with `least_ptr` how near it is.

    A pair of a point and a column of the tile keeps the best that came by; who is best of a row is asked at the end.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0) % PARTS
    i = (tl.program_id(0) // PARTS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = i < n
    xs = ()
    for a in tl.static_range(D):
        x_ptr = points_ptr + i * stride_n + tl.cast(stride_d, tl.int64) * a  # a stride of 1 is no tensor
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


# Few points, or few of them for so many centres: each program looks through some of the centres only.


@triton.jit
def _kmeans_some(
    labels_ptr, least_ptr, points_ptr, centres_ptr, list_ptr, length_ptr, n, D, K, stride_n, stride_d, SPAN, PARTS,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, FLOAT: tl.constexpr,
    EARLY: tl.constexpr = False, LATE: tl.constexpr = False,
):  # fmt: skip
    """The nearest of SPAN centres to each of BLOCK points by differences, and its squared distance [n, PARTS].

    Without `least_ptr` it is the nearest of all; with `list_ptr` of the points on that list, whose length only the GPU
    knows. D and the strides are counted in units of ALIGN.
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
    total = tl.zeros((), tl.int64) + n  # a number that is 1 is no tensor
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
            # NaN is infinite. To ask also keeps a square from being fused with what another lane adds to it, so that
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
    """Of the nearest of each part of the centres the nearest: the first of equals, whose number is the lowest.

    With `errors_ptr`, and at most BLOCK_P parts: whoever cannot tell two parts, or was in doubt within one, is listed.
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


# Launchers -----------------------------------------------------------------------------------------------------------

#: What is added up in.
_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}

_plan = functools.lru_cache(maxsize=4096)(kmeans_plan)


def _padded(size: int, tile: int) -> int:
    return triton.cdiv(size, tile) * tile


def _rows(points: Tensor) -> tuple[int, int, int, int]:
    """Coordinates, strides of points and of coordinates, and the unit in which the first two are counted."""
    d, (stride_n, stride_d) = points.shape[1], points.stride()
    align = math.gcd(16 // points.element_size(), d, stride_n if stride_d == 1 else 1)
    return d // align, stride_n // align, stride_d, align


def _turns(points: Tensor) -> int:
    """Programs that take turns at a list, whose length is known to the GPU only."""
    capability, processors = gpu(points.device)
    return processors * (1 if capability is None else 8)


def _launch_some(
    labels: Tensor, points: Tensor, centres: Tensor, plan: Plan, listed: tuple[Tensor, Tensor] | None = None,
    **late: bool,
) -> None:  # fmt: skip
    """Each program looks through `plan.steps` tiles of centres; where these are not all, a second kernel compares.

    Of points on a list a program looks through all centres.
    """
    n, k = len(points), len(centres)
    wide = accumulated(points.dtype)
    span = plan.steps * plan.block_k
    parts = triton.cdiv(k, span)
    d, stride_n, stride_d, align = _rows(points)
    early = overlapping(points.device) if parts > 1 else {}
    found, least = labels, None
    if parts > 1:
        least, found = side_by_side(points.device, ((n, parts), wide), ((n, parts), torch.int32))
    programs = triton.cdiv(n, plan.block) * parts
    if plan.how == "pairs":
        launch(
            _kmeans_pairs, (programs,),
            found, least, points, centres, n, k, *points.stride(), span, parts,
            D=d * align, BLOCK=plan.block, BLOCK_K=plan.block_k, FLOAT=_WIDE[wide], EARLY=bool(early),
            num_warps=plan.warps,
        )  # fmt: skip
    else:
        launch(
            _kmeans_some, (min(programs, _turns(points)) if listed else programs,),
            found, least, points, centres, *(listed or (None, None)), n, d, k, stride_n, stride_d, span, parts,
            ALIGN=align, BLOCK=plan.block, BLOCK_K=plan.block_k, BLOCK_D=plan.chunk, FLOAT=_WIDE[wide],
            EARLY=bool(early), LATE=bool(late), num_warps=plan.warps, **late,
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


def _launch_screen(labels: Tensor, points: Tensor, centres: Tensor, plan: Plan) -> None:
    """Screen by a product in TF32; a finer one for the points that it could not tell."""
    (n, d), k = points.shape, len(centres)
    single = torch.float32
    k_pad = _padded(k, plan.block_k)
    finer = kmeans_plan(None, d, k, points.dtype, labels.element_size(), gpu(points.device)[0], how="product")
    doubtful, shift, norms, short = side_by_side(
        points.device, ((n,), torch.int32 if n < 2**31 else torch.int64), ((plan.chunk,), single), ((k_pad,), single),
        ((k_pad, plan.chunk), single),
    )  # fmt: skip
    made = _launch_lengths(centres, finer)
    launch(_kmeans_shift, (triton.cdiv(plan.chunk, 16),), shift, centres, k, d, BLOCK_K=64, BLOCK_D=16)
    launch(
        _kmeans_centred, (triton.cdiv(k_pad, 32),),
        short, norms, shift, centres, k, d, k_pad, plan.chunk, BLOCK_K=32, BLOCK_D=16,
    )  # fmt: skip
    launch(
        _kmeans_screen, (triton.cdiv(n, plan.block),),
        labels, doubtful, made[1], points, shift, short, norms, n, d, k_pad, loose("tf32", d),
        CHUNK=plan.chunk, BLOCK=plan.block, BLOCK_K=plan.block_k, STAGES=plan.stages, num_warps=plan.warps,
    )  # fmt: skip
    _launch_product(labels, points, centres, finer, made, doubtful)


def _launch_lengths(centres: Tensor, plan: Plan, **early: bool) -> tuple[Tensor, Tensor]:
    """The centres' squared lengths, and two zeros to count points in doubt with."""
    k, d = centres.shape
    wide = torch.float64 if plan.precision == "ieee" else torch.float32
    squares, counts = side_by_side(centres.device, ((k,), wide), ((2,), torch.int64))
    block_d = max(8, min(256, triton.next_power_of_2(d)))
    launch(
        _kmeans_lengths, (triton.cdiv(k, 1024 // block_d),),
        squares, counts, centres, k, d, BLOCK_K=1024 // block_d, BLOCK_D=block_d, EARLY=bool(early),
    )  # fmt: skip
    return squares, counts


def _launch_product(
    labels: Tensor, points: Tensor, centres: Tensor, plan: Plan, made: tuple[Tensor, Tensor] | None = None,
    listed: Tensor | None = None,
) -> None:  # fmt: skip
    """The nearest by a product, of all points or of those listed; by differences where it cannot tell."""
    (n, d), k, device = points.shape, len(centres), points.device
    if d % plan.pad:
        points, centres = (apply(torch.constant_pad_nd, x, (0, -d % plan.pad)) for x in (points, centres))
    late = overlapping(device) if made is None else {}
    squares, counts = made or _launch_lengths(centres, plan, **late)
    if points.dtype == torch.float16:  # of which Triton makes no operands in float64
        points, centres = apply(Tensor.float, points), apply(Tensor.float, centres)
    span = plan.steps * plan.block_k
    parts = triton.cdiv(k, span)
    d, stride_n, stride_d, align = _rows(points)
    whole = torch.int32 if n < 2**31 else torch.int64
    wanted: list[tuple[tuple[int, ...], torch.dtype]] = [((n,), whole)]
    if parts > 1:
        wanted += [((n, parts), squares.dtype), ((n, parts), squares.dtype), ((n, parts), torch.int32)]
    doubtful, *shared = side_by_side(device, *wanted)
    least, errors, found = shared or (None, None, labels)
    programs = triton.cdiv(n, plan.block) * parts
    launch(
        _kmeans_product, (programs if listed is None else min(programs, _turns(points)),),
        found, least, errors, doubtful, counts[1:], points, centres, squares, listed,
        None if listed is None else counts, n, d, k, stride_n, stride_d, span, parts,
        bound(plan.precision, d * align),
        ALIGN=align, BLOCK=plan.block, BLOCK_K=plan.block_k, BLOCK_D=plan.chunk, STAGES=plan.stages,
        PRECISION=plan.precision, LATE=bool(late), num_warps=plan.warps, **late,
    )  # fmt: skip
    if parts > 1:
        _launch_least(labels, found, least, errors, doubtful, counts[1:], late)
    chunk = min(512, triton.next_power_of_2(points.shape[1]))
    block_k = min(triton.next_power_of_2(k), 4096 // chunk)
    exact = Plan("some", 1, block_k, chunk, steps=triton.cdiv(k, block_k))
    _launch_some(labels, points, centres, exact, (doubtful, counts[1:]), **late)


def assign_outputs(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> Tensor:
    return empty(points.shape[:1], label_dtype, points.device)


def assign_into(labels: Tensor, points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> None:
    d, k = points.shape[1], len(centres)
    if d == 0 or k == 1:
        apply(Tensor.zero_, labels)
        return
    n = None if torch.are_deterministic_algorithms_enabled() else len(points)
    anywhere = d <= 8 and points.numel() < 2**16  # few of few coordinates may begin there: they are not copied
    dense = points.is_contiguous() and (anywhere or points.data_ptr() % 16 == 0)
    plan = _plan(n, d, k, points.dtype, labels.element_size(), gpu(points.device)[0], dense)
    _launched(labels, points, contiguous(centres), plan)


def _launched(labels: Tensor, points: Tensor, centres: Tensor, plan: Plan) -> None:
    if plan.how == "product":
        _launch_product(labels, points, centres, plan)
        return
    if plan.how in ("some", "pairs"):
        _launch_some(labels, points, centres, plan)
        return
    points = contiguous(points)
    d, k = points.shape[1], len(centres)
    if plan.how == "few":
        launch_few(labels, None, points, centres, k, plan)
        return
    if points.data_ptr() % 16:  # to load single numbers takes longer
        points = apply(Tensor.clone, points)
    if plan.how == "screen":
        _launch_screen(labels, points, centres, plan)
        return
    align = math.gcd(16 // points.element_size(), d)
    launch(
        _kmeans_each, (triton.cdiv(len(points), plan.block),),
        labels, points, centres, len(points), d // align,
        K=k, ALIGN=align, BLOCK=plan.block, BLOCK_D=plan.chunk, STAGES=plan.stages,
        FLOAT=_WIDE[accumulated(points.dtype)], num_warps=plan.warps,
    )  # fmt: skip


# Arguments -----------------------------------------------------------------------------------------------------------


def check_assign(
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
        "points": refuse_not_finite(
            name, "points", points, "fix it, or pass check=False, which gives such a point label 0"
        ),
        "centres": refuse_not_finite(
            name, "centres", centres, "fix it, or pass check=False, which chooses such a centre for none"
        ),
    }
    if len(centres) == 1:
        return
    for what, size in most.items():
        refuse_beyond(name, what, size, farthest(points.dtype, points.shape[1]))
    least = 1024 * math.sqrt(torch.finfo(accumulated(points.dtype)).tiny)
    if points.numel() and 0 < max(most.values()) < least:
        raise ValueError(
            f"{name}: expected points or centres of magnitudes from {least:.3g} up, whose squares are not 0, got "
            f"{max(most.values()):.3g}; scale all of them up"
        )


_assign = Operator(
    "kmeans_assign",
    "(Tensor points, Tensor centres, ScalarType label_dtype) -> Tensor",
    check=check_assign,
    outputs=assign_outputs,
    into=assign_into,
    modes=torch.are_deterministic_algorithms_enabled,
    read=_read_assign,
)


def kmeans_assign(
    points: Any, centres: Any, *, label_dtype: torch.dtype = torch.int64, check: bool = True
) -> Any:  # fmt: skip
    """Which centre is nearest to each point, in one pass over the points.

    Parameters
    ----------
    points : torch.Tensor or numpy.ndarray
        ``[n, d]``, float16, float32 or float64; on a GPU, or on the CPU where Triton interprets. Arrays are copied to
        the GPU, and the labels back from it.
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
    (points, centres), arrays = tensors("kmeans_assign", points=points, centres=centres)
    labels = _assign(points, centres, label_dtype, check)
    return labels.cpu().numpy() if arrays else labels
