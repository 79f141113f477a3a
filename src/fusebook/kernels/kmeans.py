"""K-means: which of k centres is nearest to each of n points.

For points ``x [n, d]`` and centres ``c [k, d]``,

    label[i] = the j with the least |x[i] - c[j]|, the lowest such j where several are equally near

Fused: differences, squares, their sums over d, and the search for the least over k; the update, see `kmeans_update`,
may share the pass. The chain of separate operations writes nkd differences and reads them again, then nk distances. The
least is to read nd and to write n labels.

Few coordinates: a point lives in registers, and its distances are sums of squared differences. Few centres: each has
sums of its own in registers, while the coordinates of a point pass by. Few points, or few of them for so many centres:
programs share out the centres, too, and a second kernel compares what they found. More of all: the distances are a
matrix product, since ``|x - c|**2 = |x|**2 - 2 x.c + |c|**2``, which is fast on tensor cores and loses digits twice: in
what they round, and where large terms cancel. So the product only *screens*: a point whose best two candidates are
closer to each other than the product's error can tell apart is put on a list, and the points of that list are compared
again by differences. Labels are those of differences in either way. Up to 128 centres are one tile of the product: a
point is read once, and who is in doubt is compared with the candidates alone. Where tensor cores multiply float64, and
neither points nor centres are few, the product is torch's in float64, which leaves hardly anybody in doubt.

Limits: points and centres that are not contiguous are copied first.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._operator import (
    Operator,
    accumulated,
    apply,
    capturing,
    check_device,
    contiguous,
    empty,
    gpu,
    launch,
    overlapping,
)
from ._points import LABELS, Plan, check_centres, check_points, launch_few, refuse_not_finite, tensors

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
def _kmeans_shift(shift_ptr, counts_ptr, centres_ptr, K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mean of the centres, zero behind D; and two zeros for the next kernels to count with."""
    columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for first in range(0, K, BLOCK_K):
        live = (first + rows < K)[:, None] & (columns < D)[None, :]
        at = (first + rows).to(tl.int64)[:, None] * D + columns[None, :]
        total += tl.load(centres_ptr + at, mask=live, other=0.0).to(tl.float32)  # read kD
    tl.store(shift_ptr + columns, tl.sum(total, 0) / K)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr, 0)
        tl.store(counts_ptr + 1, 0)


@triton.jit
def _tf32(x):
    """Rounded to what TF32 keeps, half of what cutting loses; infinities and NaN stay what they are."""
    bits = x.to(tl.int32, bitcast=True)
    near = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 3.0e38, near, x)


@triton.jit
def _kmeans_centred(
    moved_ptr, short_ptr, norms_ptr, turned_ptr, shift_ptr, centres_ptr, K, D, K_PAD, D_PAD, D_TURNED,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Centres made ready: turned [D_TURNED, K_PAD], zeros where there are none.

    With a shift: also less that [K_PAD, D_PAD], the same in TF32, and their squared norms [K_PAD].
    """
    FLOAT: tl.constexpr = turned_ptr.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    columns = tl.arange(0, BLOCK_D)
    norm = tl.zeros([BLOCK_K], FLOAT)
    for first in range(0, D_PAD, BLOCK_D):
        at = first + columns
        live = (rows < K)[:, None] & (at < D)[None, :]
        c = tl.load(centres_ptr + rows.to(tl.int64)[:, None] * D + at[None, :], mask=live, other=0.0).to(FLOAT)
        where = at.to(tl.int64)[None, :] * K_PAD + rows[:, None]
        tl.store(turned_ptr + where, c, mask=(at < D_TURNED)[None, :] & (rows < K_PAD)[:, None])
        if shift_ptr is not None:
            shift = tl.load(shift_ptr + at, mask=at < D, other=0.0)
            c = tl.where(live, c - shift[None, :], 0.0)
            place = rows.to(tl.int64)[:, None] * D_PAD + at[None, :]
            inside = (at < D_PAD)[None, :] & (rows < K_PAD)[:, None]
            tl.store(moved_ptr + place, c, mask=inside)
            tl.store(short_ptr + place, _tf32(c), mask=inside)
            norm += tl.sum(c * c, 1)
    if shift_ptr is not None:
        # What pads is never the nearest.
        tl.store(norms_ptr + rows, tl.where(rows < K, norm, float("inf")), mask=rows < K_PAD)


@triton.jit
def _doubt(square, farthest, low, loose, BLOCK_K: tl.constexpr):
    """How much farther than `low`, the least, a squared distance must look to be farther indeed.

    Both may be wrong by twice the product's error, |x| |c| times `loose`, by the rounding of the norms and of their
    sum, and by the bits that carry a number.
    """
    LOST: tl.constexpr = BLOCK_K * 2.0**-22
    return 4.0 * loose * tl.sqrt(square * farthest) + 2.0**-18 * (square + farthest) + LOST * low


@triton.jit
def _screened(
    labels_ptr, doubtful_ptr, count_ptr, points_ptr, shift_ptr, moved_ptr, norms_ptr, i, live, D, K_PAD, loose,
    D_PAD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Points `i` [BLOCK]: their labels by a product, and the list of those for which it cannot tell."""
    HIGHEST: tl.constexpr = 0x7FFFFFFF
    ONCE: tl.constexpr = D_PAD == CHUNK  # a point's coordinates are loaded once
    columns = tl.arange(0, CHUNK)
    number = tl.arange(0, BLOCK_K)
    x_ptr = points_ptr + i[:, None] * D  # [BLOCK, 1]
    square = tl.zeros([BLOCK], tl.float32)
    x = tl.zeros([BLOCK, CHUNK], tl.float32)
    for at in range(0, D_PAD, CHUNK):
        inside = at + columns < D
        x = tl.load(x_ptr + (at + columns)[None, :], mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        shift = tl.load(shift_ptr + at + columns)
        x = tl.where(inside[None, :], x - shift[None, :], 0.0)  # [BLOCK, CHUNK]; read nD
        square += tl.sum(x * x, 1)
    if ONCE and PRECISION == "tf32":
        x = _tf32(x)

    best = tl.full([BLOCK], HIGHEST, tl.int32)
    second = tl.full([BLOCK], HIGHEST, tl.int32)
    label = tl.zeros([BLOCK], tl.int32)
    reach = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, K_PAD, BLOCK_K, num_stages=STAGES):
        c_ptr = moved_ptr + (start + number).to(tl.int64)[None, :] * D_PAD  # [1, BLOCK_K]
        if ONCE:
            c = tl.load(c_ptr + columns[:, None])  # [CHUNK, BLOCK_K]
            product = tl.dot(x, c, input_precision=PRECISION)  # [BLOCK, BLOCK_K]
        else:
            product = tl.zeros([BLOCK, BLOCK_K], tl.float32)
            for at in range(0, D_PAD, CHUNK):
                inside = at + columns < D
                x = tl.load(x_ptr + (at + columns)[None, :], mask=live[:, None] & inside[None, :], other=0.0)
                shift = tl.load(shift_ptr + at + columns)
                x = tl.where(inside[None, :], x.to(tl.float32) - shift[None, :], 0.0)
                if PRECISION == "tf32":
                    x = _tf32(x)
                c = tl.load(c_ptr + (at + columns)[:, None])
                product = tl.dot(x, c, product, input_precision=PRECISION)
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
    error = _doubt(square, tl.max(reach, 0), low, loose, BLOCK_K)
    sure = high - low > error  # NaN is never sure
    tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty), mask=live)  # write n labels
    unsure = (live & (sure == 0)).to(tl.int32)
    many = tl.sum(unsure, 0)
    if many > 0:
        # The list is in the order in which programs come by; what becomes of a point does not depend on its place.
        place = tl.atomic_add(count_ptr, many.to(count_ptr.dtype.element_ty), sem="relaxed")
        place += tl.cumsum(unsure, 0) - unsure
        tl.store(doubtful_ptr + place, i.to(doubtful_ptr.dtype.element_ty), mask=unsure != 0)


@triton.jit
def _kmeans_screen(
    labels_ptr, doubtful_ptr, count_ptr, points_ptr, shift_ptr, moved_ptr, norms_ptr, list_ptr, length_ptr, n, D, K_PAD,
    loose,
    D_PAD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The nearest centre by a matrix product, of all points or of those on a list, whose length only the GPU knows.

    `loose` is the largest relative error of a term of the product.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if list_ptr is not None:
        total = tl.load(length_ptr).to(tl.int64)
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        while first < total:
            slot = first + tl.arange(0, BLOCK)
            i = tl.load(list_ptr + slot, mask=slot < total, other=0).to(tl.int64)
            _screened(
                labels_ptr, doubtful_ptr, count_ptr, points_ptr, shift_ptr, moved_ptr, norms_ptr, i, slot < total, D,
                K_PAD, loose, D_PAD, CHUNK, PRECISION, BLOCK, BLOCK_K, STAGES,
            )  # fmt: skip
            first += step
    else:
        i = first + tl.arange(0, BLOCK)
        _screened(
            labels_ptr, doubtful_ptr, count_ptr, points_ptr, shift_ptr, moved_ptr, norms_ptr, i, i < n, D,
            K_PAD, loose, D_PAD, CHUNK, PRECISION, BLOCK, BLOCK_K, STAGES,
        )  # fmt: skip


# Where all centres are one tile, a point is read once, for its norm and for the product. For points in doubt, the tile
# also tells which centres they cannot tell apart: their candidates, a bit each.


@triton.jit
def _kmeans_tile_centres(
    moved_ptr, shift_ptr, norms_ptr, count_ptr, centres_ptr, K, D, D_PAD,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_D coordinates of all centres: their mean, the centres less that, and what they add to the squared norms.

    Zeros where there are no centres, and no coordinates; and a zero for the next kernel to count with.
    """
    part = tl.program_id(0)
    number = tl.arange(0, BLOCK_K)
    columns = part * BLOCK_D + tl.arange(0, BLOCK_D)
    live = (number < K)[:, None] & (columns < D)[None, :]
    c = tl.load(centres_ptr + number[:, None] * D + columns[None, :], mask=live, other=0.0).to(tl.float32)  # read kD
    shift = tl.sum(c, 0) / K
    tl.store(shift_ptr + columns, shift)
    c = tl.where(live, c - shift[None, :], 0.0)
    tl.store(norms_ptr + part * BLOCK_K + number, tl.sum(c * c, 1))
    if PRECISION == "tf32":
        c = _tf32(c)
    tl.store(moved_ptr + number[:, None] * D_PAD + columns[None, :], c)
    if part == 0:
        tl.store(count_ptr, 0)


@triton.jit
def _kmeans_tile(
    labels_ptr, list_ptr, candidates_ptr, count_ptr, points_ptr, shift_ptr, moved_ptr, norms_ptr,
    n, K, D, D_PAD, PARTS, loose,
    ALIGN: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The nearest of few centres by a matrix product, and a list of the points for which it cannot tell.

    D is counted in units of ALIGN, so that Triton sees how rows are aligned. `loose` is the largest relative error of a
    term of the product.
    """
    HIGHEST: tl.constexpr = 0x7FFFFFFF
    D = D * ALIGN
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = i < n
    columns = tl.arange(0, CHUNK)
    number = tl.arange(0, BLOCK_K)
    x_ptr = points_ptr + (i * D)[:, None]  # [BLOCK, 1]
    c_ptr = moved_ptr + (number * D_PAD)[None, :]  # [1, BLOCK_K]
    squares = tl.zeros([BLOCK, CHUNK], tl.float32)
    product = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for first in tl.range(0, D, CHUNK, num_stages=STAGES):
        at = first + columns
        x = tl.load(x_ptr + at[None, :], mask=live[:, None] & (at < D)[None, :], other=0.0)  # [BLOCK, CHUNK]; read nD
        x = x.to(tl.float32) - tl.load(shift_ptr + at)[None, :]  # the shift is zero behind D
        squares += x * x
        if PRECISION == "tf32":
            x = _tf32(x)
        product = tl.dot(x, tl.load(c_ptr + at[:, None]), product, input_precision=PRECISION)
    part = tl.arange(0, BLOCK_P)
    norms = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
    for first in range(0, PARTS, BLOCK_P):
        at = (first + part)[:, None] * BLOCK_K + number[None, :]
        norms += tl.load(norms_ptr + at, mask=(first + part < PARTS)[:, None], other=0.0)
    norm = tl.sum(norms, 0)  # [BLOCK_K]
    square = tl.sum(squares, 1)  # [BLOCK]
    # Squared distances as integers, which order positive floats; their last bits carry the number of the centre.
    distance = tl.maximum(square[:, None] + norm[None, :] - 2.0 * product, 0.0)
    key = (distance.to(tl.int32, bitcast=True) & (-BLOCK_K)) | number[None, :]  # [BLOCK, BLOCK_K]
    key = tl.where((number < K)[None, :], key, HIGHEST)
    best = tl.min(key, 1)  # [BLOCK]
    low = (best & (-BLOCK_K)).to(tl.float32, bitcast=True)
    error = _doubt(square, tl.max(norm, 0), low, loose, BLOCK_K)
    # A candidate is not farther; what is NaN is not farther than anything, and padding never is a candidate.
    farther = (key & (-BLOCK_K)).to(tl.float32, bitcast=True) - low[:, None] > error[:, None]
    near = ((farther == 0) & (number < K)[None, :]).to(tl.int32)  # [BLOCK, BLOCK_K]
    tl.store(labels_ptr + i, (best & (BLOCK_K - 1)).to(labels_ptr.dtype.element_ty), mask=live)  # write n labels
    unsure = (live & (tl.sum(near, 1) > 1)).to(tl.int32)
    many = tl.sum(unsure, 0)
    if many > 0:
        # The list is in the order in which programs come by; what becomes of a point does not depend on its place.
        place = tl.atomic_add(count_ptr, many.to(count_ptr.dtype.element_ty), sem="relaxed")
        place = place.to(tl.int64) + tl.cumsum(unsure, 0) - unsure
        tl.store(list_ptr + place, i.to(list_ptr.dtype.element_ty), mask=unsure != 0)
        WORDS: tl.constexpr = (BLOCK_K + 31) // 32
        bits = tl.reshape(near << (number % 32)[None, :], [BLOCK, WORDS, BLOCK_K // WORDS])
        at = place[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        tl.store(candidates_ptr + at, tl.sum(bits, 2), mask=unsure[:, None] != 0)


@triton.jit
def _kmeans_candidates(
    labels_ptr, points_ptr, centres_ptr, list_ptr, candidates_ptr, count_ptr, D, WORDS,
    ALIGN: tl.constexpr, BLOCK_W: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, ONCE: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """The nearest candidate by differences, of each point on a list: right wherever the points are.

    GROUP neighbouring centres are looked at together, those that are candidates; where none is, nothing is read. D is
    counted in units of ALIGN. ONCE: a point's coordinates are loaded once.
    """
    D = D * ALIGN
    columns = tl.arange(0, BLOCK_D)
    member = tl.arange(0, GROUP)
    words = tl.arange(0, BLOCK_W)
    total = tl.load(count_ptr).to(tl.int64)
    slot = tl.program_id(0).to(tl.int64)
    while slot < total:
        i = tl.load(list_ptr + slot).to(tl.int64)
        x_ptr = points_ptr + i * D
        x = tl.load(x_ptr + columns, mask=columns < D, other=0.0).to(FLOAT)  # [BLOCK_D]
        best = tl.full([], float("inf"), FLOAT)
        label = tl.zeros([], tl.int32)
        left = tl.load(candidates_ptr + slot * WORDS + words, mask=words < WORDS, other=0)  # [BLOCK_W]
        for _ in range(tl.sum((left != 0).to(tl.int32), 0)):
            word = tl.min(tl.where(left != 0, words, BLOCK_W), 0)
            bits = tl.sum(tl.where(words == word, left, 0), 0)
            left = tl.where(words == word, 0, left)
            while bits != 0:
                # The lowest bit is a power of two, and a float32 says which: by its exponent.
                power = (bits & -bits).to(tl.float32).to(tl.int32, bitcast=True)
                first = (((power >> 23) & 255) - 127) // GROUP * GROUP
                wanted = (bits >> (first + member)) & 1  # [GROUP]
                bits = bits & ~(tl.full([], 2**GROUP - 1, tl.int32) << first)
                number = word * 32 + first + member
                squares = tl.zeros([GROUP, BLOCK_D], FLOAT)
                for start in range(0, D, BLOCK_D):
                    at = start + columns
                    if not ONCE:
                        x = tl.load(x_ptr + at, mask=at < D, other=0.0).to(FLOAT)
                    live = (wanted != 0)[:, None] & (at < D)[None, :]
                    c_ptr = centres_ptr + number.to(tl.int64)[:, None] * D + at[None, :]
                    difference = tl.where(live, x[None, :] - tl.load(c_ptr, mask=live, other=0.0).to(FLOAT), 0.0)
                    squares += difference * difference
                distance = tl.sum(squares, 1)  # [GROUP]
                distance = tl.where(
                    (wanted != 0) & (distance < float("inf")), distance, float("inf")
                )  # NaN is infinite
                least = tl.min(distance, 0)
                at = tl.min(tl.where(distance == least, number, 0x7FFFFFFF), 0)  # the lowest of equals
                label = tl.where(least < best, at, label)
                best = tl.minimum(best, least)
        tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty))
        slot += tl.num_programs(0)


# A library's product of all points and all centres, in float64 and in memory. What is left is to find the least of each
# row. Where a GPU's tensor cores multiply float64 this takes about as long as float32 does without them, and in doubt
# are only points that are equally near to two centres.


@triton.jit
def _kmeans_widened(
    wide_ptr, squares_ptr, count_ptr, rows_ptr, n, D, stride_n, stride_d, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Rows of any strides in float64, side by side, and the squares of their lengths; a zero for others to count with.

    Without `wide_ptr` they are so already.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]  # [BLOCK, 1]
    columns = tl.arange(0, BLOCK_D)[None, :]
    squares = tl.zeros([BLOCK, BLOCK_D], tl.float64)
    for first in range(0, D, BLOCK_D):
        at = first + columns
        inside = (i < n) & (at < D)
        x = tl.load(rows_ptr + i * stride_n + at.to(tl.int64) * stride_d, mask=inside, other=0.0).to(tl.float64)
        if wide_ptr is not None:
            tl.store(wide_ptr + i * D + at, x, mask=inside)
        squares += x * x
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(squares_ptr + i, tl.sum(squares, 1), mask=i < n)
    if count_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(count_ptr, 0)


@triton.jit
def _kmeans_pick(
    labels_ptr, list_ptr, candidates_ptr, count_ptr, products_ptr, squares_ptr, norms_ptr, n, K, WORDS, loose,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The nearest centre by its product, and a list of the points for which that cannot tell, with their candidates.

    `loose` is the largest relative error of a term of a product, of a sum of squares, and of what is made of them.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = i < n
    number = tl.arange(0, BLOCK_K)
    best = tl.full([BLOCK], float("inf"), tl.float64)
    second = tl.full([BLOCK], float("inf"), tl.float64)
    label = tl.zeros([BLOCK], tl.int32)
    strange = tl.zeros([BLOCK], tl.int32)
    reach = tl.zeros([BLOCK_K], tl.float64)
    for start in range(0, K, BLOCK_K):
        at = start + number
        norm = tl.load(norms_ptr + at, mask=at < K, other=float("inf"))
        reach = tl.maximum(reach, tl.where(at < K, norm, 0.0))
        inside = live[:, None] & (at < K)[None, :]
        product = tl.load(products_ptr + (i * K)[:, None] + at[None, :], mask=inside, other=0.0)  # read nK
        distance = norm[None, :] - 2.0 * product  # squared, and less what all centres have alike
        strange |= tl.max((distance != distance).to(tl.int32), 1)
        least = tl.min(distance, 1)
        place = tl.min(tl.where(distance == least[:, None], number[None, :], BLOCK_K), 1)
        after = tl.min(tl.where(number[None, :] == place[:, None], float("inf"), distance), 1)
        closer = least < best
        second = tl.where(closer, tl.minimum(best, after), tl.minimum(second, least))
        label = tl.where(closer, start + place, label)
        best = tl.where(closer, least, best)
    far = tl.sqrt(tl.max(reach, 0))
    error = 4.0 * loose * far * (tl.sqrt(tl.load(squares_ptr + i, mask=live, other=0.0)) + far)
    sure = (second - best > error) & (strange == 0)  # NaN is never sure
    tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty), mask=live)  # write n labels
    unsure = (live & (sure == 0)).to(tl.int32)
    many = tl.sum(unsure, 0)
    if many > 0:
        # The list is in the order in which programs come by; what becomes of a point does not depend on its place.
        slot = tl.atomic_add(count_ptr, many.to(count_ptr.dtype.element_ty), sem="relaxed")
        slot = slot.to(tl.int64) + tl.cumsum(unsure, 0) - unsure
        tl.store(list_ptr + slot, i.to(list_ptr.dtype.element_ty), mask=unsure != 0)
        for start in range(0, K, BLOCK_K):
            at = start + number
            inside = (unsure != 0)[:, None] & (at < K)[None, :]
            product = tl.load(products_ptr + (i * K)[:, None] + at[None, :], mask=inside, other=0.0)
            distance = tl.load(norms_ptr + at, mask=at < K, other=0.0)[None, :] - 2.0 * product
            farther = distance - best[:, None] > error[:, None]  # NaN is not farther than anything
            near = (inside & (farther == 0)).to(tl.int32)
            bits = tl.sum(tl.reshape(near << (number % 32)[None, :], [BLOCK, BLOCK_K // 32, 32]), 2)
            word = start // 32 + tl.arange(0, BLOCK_K // 32)
            tl.store(
                candidates_ptr + (slot * WORDS)[:, None] + word[None, :], bits,
                mask=(unsure != 0)[:, None] & (word < WORDS)[None, :],
            )  # fmt: skip


@triton.jit
def _kmeans_differences(
    labels_ptr, points_ptr, turned_ptr, list_ptr, count_ptr, n, D, K, K_PAD, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The nearest centre by differences, of every point or of those on a list: right wherever the points are."""
    FLOAT: tl.constexpr = turned_ptr.dtype.element_ty
    number = tl.arange(0, BLOCK_K)
    total = tl.zeros((), tl.int64) + n  # a number that is 1 is no tensor
    if list_ptr is not None:
        total = tl.load(count_ptr).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < total:
        slot = first + tl.arange(0, BLOCK)
        live = slot < total
        i = slot
        if list_ptr is not None:
            i = tl.load(list_ptr + slot, mask=live, other=0).to(tl.int64)
        best = tl.full([BLOCK], float("inf"), FLOAT)
        label = tl.zeros([BLOCK], tl.int32)
        for start in range(0, K_PAD, BLOCK_K):
            distance = tl.zeros([BLOCK, BLOCK_K], FLOAT)
            x_ptr = points_ptr + i * D  # [BLOCK]
            c_ptr = turned_ptr + start + number  # [BLOCK_K]
            for a in range(0, D, 8):
                for u in tl.static_range(8):  # so many loads on their way at once: a short list is all waiting
                    # A bound and not `live & (a + u < D)`, a mask of one element, which Triton 3.9 cannot interpret.
                    x = tl.load(x_ptr + u, mask=slot < tl.where(a + u < D, total, 0), other=0.0).to(FLOAT)
                    difference = x[:, None] - tl.load(c_ptr)[None, :]
                    distance += difference * difference
                    c_ptr += K_PAD
                x_ptr += 8
            distance = tl.where((start + number < K)[None, :], distance, float("inf"))
            least = tl.min(distance, 1)  # [BLOCK]
            at = tl.min(tl.where(distance == least[:, None], number[None, :], BLOCK_K), 1)  # the lowest of equals
            closer = least < best
            label = tl.where(closer, start + at, label)
            best = tl.where(closer, least, best)
        tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty), mask=live)
        first += step


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


# Few points, or few of them for so many centres: each program looks through some of the centres only.


@triton.jit
def _kmeans_some(
    labels_ptr, least_ptr, points_ptr, centres_ptr, n, D, K, SPAN, PARTS,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, FLOAT: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """The nearest of SPAN centres to each of BLOCK points by differences, and its squared distance [n, PARTS].

    Without `least_ptr` it is the nearest of all. D is counted in units of ALIGN.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    D = D * ALIGN
    part = tl.program_id(0) % PARTS
    i = (tl.program_id(0) // PARTS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = i < n
    columns = tl.arange(0, BLOCK_D)
    number = tl.arange(0, BLOCK_K)
    best = tl.full([BLOCK], float("inf"), FLOAT)
    label = tl.zeros([BLOCK], tl.int32)
    end = tl.minimum(K, (part + 1) * SPAN)
    for start in range(part * SPAN, end, BLOCK_K):
        c_ptr = centres_ptr + (start + number).to(tl.int64)[:, None] * D
        known = start + number < end
        squares = tl.zeros([BLOCK, BLOCK_K, BLOCK_D], FLOAT)
        for first in range(0, D, BLOCK_D):
            at = first + columns
            x = tl.load(points_ptr + (i * D)[:, None] + at[None, :], mask=live[:, None] & (at < D)[None, :], other=0.0)
            c = tl.load(c_ptr + at[None, :], mask=known[:, None] & (at < D)[None, :], other=0.0)
            difference = x.to(FLOAT)[:, None, :] - c.to(FLOAT)[None, :, :]  # [BLOCK, BLOCK_K, BLOCK_D]
            squares += difference * difference
        distance = tl.sum(squares, 2)  # [BLOCK, BLOCK_K]
        distance = tl.where(known[None, :] & (distance < float("inf")), distance, float("inf"))  # NaN is infinite
        least = tl.min(distance, 1)
        place = tl.min(tl.where(distance == least[:, None], number[None, :], BLOCK_K), 1)  # the lowest of equals
        label = tl.where(least < best, start + place, label)
        best = tl.minimum(best, least)
    if least_ptr is not None:
        tl.store(least_ptr + i * PARTS + part, best, mask=live)
        labels_ptr += part
        i *= PARTS
    tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty), mask=live)


@triton.jit
def _kmeans_least(
    labels_ptr, found_ptr, least_ptr, n, PARTS, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, LATE: tl.constexpr = False
):  # fmt: skip
    """Of the nearest of each part of the centres the nearest: the first of equals, whose number is the lowest."""
    if LATE:
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    part = tl.arange(0, BLOCK_P)
    live = (i < n)[:, None]
    best = tl.full([BLOCK], float("inf"), least_ptr.dtype.element_ty)
    label = tl.zeros([BLOCK], tl.int32)
    for first in range(0, PARTS, BLOCK_P):
        at = (i * PARTS)[:, None] + first + part[None, :]
        inside = live & (first + part < PARTS)[None, :]
        distance = tl.load(least_ptr + at, mask=inside, other=float("inf"))  # [BLOCK, BLOCK_P]
        number = tl.load(found_ptr + at, mask=inside, other=0)
        least = tl.min(distance, 1)
        lowest = tl.min(tl.where(distance == least[:, None], number, 0x7FFFFFFF), 1)
        label = tl.where(least < best, lowest, label)
        best = tl.minimum(best, least)
    tl.store(labels_ptr + i, label.to(labels_ptr.dtype.element_ty), mask=i < n)  # write n labels


# Plans ---------------------------------------------------------------------------------------------------------------


#: Centres that one tile holds; and those few of which each has sums of its own in registers.
_TILE = 128
_EACH = 16

#: What is added up in.
_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


def _loose(precision: str, d: int) -> float:
    """The largest relative error of a product's term: what both factors lose, and what the sum of d terms does.

    Rounded to TF32, a factor is off by 2**-11 at most. Three products of what TF32 keeps and of what it cuts off, which
    is cut itself, are off by 2**-20 three times. Tensor cores cut sums, too: 2**-23 for every eight terms.
    """
    sums = triton.cdiv(d, 8) * 2.0**-23
    return 2.0**-10 + 2.0**-22 + sums if precision == "tf32" else 3 * 2.0**-20 + 3 * sums


#: Bytes of float64 that points and their products take at a time.
_ROOM = 2**31

#: GPUs whose tensor cores multiply float64 about as fast as others multiply float32.
_DOUBLES = ((8, 0), (9, 0), (10, 0))


def _some_plan(n: int, d: int, k: int) -> tuple[float, Plan]:
    """How few points, or few for so many centres, are compared by differences, and about how long that takes.

    A program loads a tile of centres after the other, which is a latency each; all of them compare pairs of coordinates
    at some rate, the faster the more points share a centre, and add up what threads have of a pair of a point and a
    centre.
    """
    found = []
    for block, chunk, rate in ((1, 512, 0.9e6), (4, 256, 1.5e6), (16, 64, 2.3e6)):
        block, chunk = min(block, triton.next_power_of_2(n)), min(chunk, triton.next_power_of_2(d))
        block_k = max(1, min(triton.next_power_of_2(k), 4096 // (block * chunk)))
        tiles = triton.cdiv(k, block_k)
        steps = triton.cdiv(tiles, min(tiles, triton.cdiv(600, triton.cdiv(n, block))))
        pieces = triton.cdiv(d, chunk)
        work = n * k * (pieces * chunk / rate + (7e-6 if chunk <= 8 else 25e-6))
        found.append((6 + max(0.7 * steps * pieces, work), Plan("some", block, block_k, chunk, steps=steps)))
    return min(found, key=lambda choice: choice[0])


def _library_plan(n: int, d: int, k: int, size: int) -> tuple[float, Plan]:
    """How torch's product is searched, and about how long both take."""
    block_k = max(32, min(1024, triton.next_power_of_2(k)))
    moved = n * d * (8 + size) + 16 * n * k
    us = 30 + 0.003 * n + moved / 3.5e6 + max(0.03 * d, n * d * k / 20e6)
    return us, Plan("library", max(1, min(64, 4096 // block_k)), block_k)


def _microseconds(how: str, n: int, d: int, k: int, size: int) -> float:
    """About how long the other plans take on an H200: in all of them a program goes through all centres."""
    align = math.gcd(16 // size, d)  # coordinates that are loaded at once
    whole = align * size == 16
    if how == "few":
        return 5 + max(0 if k * d <= 32 else k * (0.005 + 0.027 * d), n * d * k / 5.5e6)
    if how == "each":
        return 5 + 0.15 * k + max(0.4 * d / (32 * align), n * d * size / (2.5e6 if whole else 0.8e6))
    if how == "tile":
        return 20 + n * d * size / 2e6 + n * d * k / 20e6
    if how == "product" and d <= 128:
        return 1.7 * (25 + 0.035 * k + n * d * k / 60e6)
    if how == "product":
        return 1.5 * (30 + k * d / 1600 * max(1, n / 17000) * (1 if whole else 6))
    return 15 + k * d / 800 + n * d * k / 1.7e6


def _kmeans_plan(
    n: int | None,
    d: int,
    k: int,
    dtype: torch.dtype,
    label_size: int,
    capability: tuple[int, int] | None,
    how: str | None = None,
    again: bool = False,
) -> Plan:
    """Choose how labels of so many bytes are found; `capability` is None in the interpreter, where programs cost.

    Without `n` the choice is the same for any number of points, and a point's label does not depend on who else is
    there. `again` is for the points that the first screen could not tell: the second screen, and the differences after
    it.
    """
    align = math.gcd(16 // dtype.itemsize, d)  # coordinates that are loaded at once
    if how is None:
        # float64 has no tensor core that is worth its while on most GPUs, and no screen would be finer than it.
        # Single loads of half a word leave fewer centres worth a pass without tensor cores.
        each = k <= (_EACH if align * dtype.itemsize >= 4 else _EACH // 4)
        how = "few" if d <= 8 else "each" if each else "differences" if dtype == torch.float64 else ""
        how = how or ("tile" if k <= _TILE else "product")
        if n is not None and capability is not None:
            found = [(_microseconds(how, n, d, k, dtype.itemsize), None), _some_plan(n, d, k)]
            if capability in _DOUBLES:
                found.append(_library_plan(n, d, k, dtype.itemsize))
            _, plan = min(found, key=lambda choice: choice[0])
            if plan is not None:
                return plan
    if how == "few":
        few = k if k * d <= 32 else 0  # unrolled, centres stay in registers; beyond, the code would only grow
        # Small programs: they come and go, and loads of the next are on their way while the last ones store. Labels of
        # int64 fill 16 bytes with two points, so that half as many keep a thread as busy.
        return Plan(how, block=256 if few and capability and label_size == 8 else 512, few=few)
    if how == "each":
        # A warp loads a piece of a point, 16 bytes a thread, or several points that are shorter. It takes as many
        # points at once as there are registers for sums. Over many pieces, the next ones are fetched ahead.
        chunk = min(32 * align, triton.next_power_of_2(d))
        block = (8 if align > 1 or k > 8 else 16) * (32 * align // chunk)
        stages, warps = (1, 4) if d <= chunk else (3, 4) if d <= 3 * chunk else (3, 2)
        return Plan(how, block, chunk=chunk, stages=stages, warps=warps)
    if how == "differences":
        if capability is None:
            return Plan(how, block=32, block_k=32)
        if k <= 32 and not again:  # a program's centres fit beside many points
            return Plan(how, block=64, block_k=32)
        # Many centres, few points a program: a short list is shared among all processors. The more centres, the longer
        # it waits for the last of its points, and the fewer points, by more threads, a program should take.
        block_k = max(64, min(256, triton.next_power_of_2(k)))
        return Plan(how, block=4, block_k=block_k, warps=8) if again and k > 512 else Plan(how, 8, block_k)
    if how == "tile":
        # Narrow, the points are all that costs, and three products leave next to none in doubt. Wide, a single product
        # costs less than reading the doubtful points again.
        chunk = max(16, min(32, triton.next_power_of_2(d)))
        stages = 4 if capability and capability[0] in (9, 10) else 2
        return Plan(
            how,
            64,
            max(16, triton.next_power_of_2(k)),
            chunk,
            stages=stages,
            precision="tf32x3" if d <= 128 else "tf32",
        )
    chunk = max(16, min(128, triton.next_power_of_2(d)))
    if capability is None:
        return Plan(how, block=64, block_k=32, chunk=chunk)
    roomy = capability[0] in (9, 10) and d <= 128  # with 227 KiB of shared memory a point's coordinates stay there
    if again:
        # Three products need three times the shared memory; their points are few.
        return Plan(how, block=64, block_k=64, chunk=chunk if roomy else min(chunk, 32), stages=2)
    if chunk < 128:
        return Plan(how, block=128, block_k=64, chunk=chunk, stages=3)
    if roomy:
        return Plan(how, block=128, block_k=128, chunk=chunk, stages=2, warps=8)
    return Plan(how, block=64, block_k=64, chunk=32, stages=2)


# Launchers -----------------------------------------------------------------------------------------------------------

_plan = functools.lru_cache(maxsize=4096)(_kmeans_plan)


def _memory(device: torch.device, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """Memory for tensors of given shapes and dtypes, side by side: one allocation takes the time of one."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
    starts = [0, *itertools.accumulate(_padded(size, 256) for size in sizes)]
    memory = empty(starts[-1:], torch.uint8, device)
    cut = zip(wanted, sizes, starts, strict=False)
    return [memory[start : start + size].view(dtype).view(shape) for (shape, dtype), size, start in cut]


def _launch_tile(labels: Tensor, points: Tensor, centres: Tensor, plan: Plan) -> None:
    """Screen by a product, then compare by differences what it could not tell apart."""
    (n, d), k = points.shape, len(centres)
    device, single = points.device, torch.float32
    slab = min(128, max(plan.chunk, triton.next_power_of_2(d)))  # coordinates that a program makes ready
    parts = triton.cdiv(d, slab)
    whole = torch.int32 if n < 2**31 else torch.int64
    words = triton.cdiv(plan.block_k, 32)
    doubtful, count, candidates, moved, shift, norms = _memory(
        device, ((n,), whole), ((1,), whole), ((n, words), torch.int32), ((plan.block_k, parts * slab), single),
        ((parts * slab,), single), ((parts, plan.block_k), single),
    )  # fmt: skip
    launch(
        _kmeans_tile_centres, (parts,),
        moved, shift, norms, count, centres, k, d, parts * slab,
        PRECISION=plan.precision, BLOCK_K=plan.block_k, BLOCK_D=slab, num_warps=8,
    )  # fmt: skip
    align = math.gcd(16 // points.element_size(), d)
    launch(
        _kmeans_tile, (triton.cdiv(n, plan.block),),
        labels, doubtful, candidates, count, points, shift, moved, norms,
        n, k, d // align, parts * slab, parts, _loose(plan.precision, d),
        ALIGN=align, CHUNK=plan.chunk, PRECISION=plan.precision, BLOCK=plan.block, BLOCK_K=plan.block_k,
        BLOCK_P=min(32, triton.next_power_of_2(parts)), STAGES=plan.stages, num_warps=plan.warps,
    )  # fmt: skip
    _launch_candidates(labels, points, centres, doubtful, candidates, count)


def _launch_candidates(
    labels: Tensor, points: Tensor, centres: Tensor, doubtful: Tensor, candidates: Tensor, count: Tensor
) -> None:
    """Compare the doubtful points with their candidates by differences."""
    n, d = points.shape
    words = candidates.shape[1]
    align = math.gcd(16 // points.element_size(), d)
    wide = min(4096, triton.next_power_of_2(d))
    launch(
        _kmeans_candidates, (min(n, _turns(*gpu(points.device))),),
        labels, points, centres, doubtful, candidates, count, d // align, words,
        ALIGN=align, BLOCK_W=triton.next_power_of_2(words), GROUP=min(8, 4096 // wide), BLOCK_D=wide, ONCE=d <= wide,
        FLOAT=_WIDE[accumulated(points.dtype)], num_warps=1 if d <= 128 else 4,
    )  # fmt: skip


def _launch_library(labels: Tensor, points: Tensor, centres: Tensor, plan: Plan) -> None:
    """The nearest by a product of torch's in float64; by differences where it cannot tell."""
    (n, d), k = points.shape, len(centres)
    most = max(1, _ROOM // (8 * (d + k)))
    if n > most:
        for first in range(0, n, most):
            _launch_library(labels[first : first + most], points[first : first + most], centres, plan)
        return
    device, double = points.device, torch.float64
    whole = torch.int32 if n < 2**31 else torch.int64
    doubtful, count, candidates, squares, norms = _memory(
        device, ((n,), whole), ((1,), whole), ((n, triton.cdiv(k, 32)), torch.int32), ((n,), double), ((k,), double)
    )  # fmt: skip
    wide = []
    for rows, lengths, zero in ((centres, norms, count), (points, squares, None)):
        same = rows.dtype == double and rows.is_contiguous()
        wide.append(rows if same else empty(rows.shape, double, device))
        block_d = max(8, min(128, triton.next_power_of_2(d)))
        launch(
            _kmeans_widened, (triton.cdiv(len(rows), 2048 // block_d),),
            None if same else wide[-1], lengths, zero, rows, len(rows), d, *rows.stride(),
            BLOCK=2048 // block_d, BLOCK_D=block_d,
        )  # fmt: skip
    products = empty((n, k), double, device)
    apply(torch.mm, wide[1], wide[0].t(), out=products)
    launch(
        _kmeans_pick, (triton.cdiv(n, plan.block),),
        labels, doubtful, candidates, count, products, squares, norms, n, k, candidates.shape[1], (d + 16) * 2.0**-53,
        BLOCK=plan.block, BLOCK_K=plan.block_k, num_warps=plan.warps,
    )  # fmt: skip
    _launch_candidates(labels, wide[1], wide[0], doubtful, candidates, count)


def _launch_some(labels: Tensor, points: Tensor, centres: Tensor, plan: Plan) -> None:
    """Each program looks through `plan.steps` tiles of centres; where these are not all, a second kernel compares."""
    (n, d), k = points.shape, len(centres)
    wide = accumulated(points.dtype)
    span = plan.steps * plan.block_k
    parts = triton.cdiv(k, span)
    align = math.gcd(16 // points.element_size(), d)
    early = overlapping(points.device) if parts > 1 else {}
    found, least = labels, None
    if parts > 1:
        least, found = _memory(points.device, ((n, parts), wide), ((n, parts), torch.int32))
    launch(
        _kmeans_some, (triton.cdiv(n, plan.block) * parts,),
        found, least, points, centres, n, d // align, k, span, parts,
        ALIGN=align, BLOCK=plan.block, BLOCK_K=plan.block_k, BLOCK_D=plan.chunk, FLOAT=_WIDE[wide],
        EARLY=bool(early), num_warps=plan.warps,
    )  # fmt: skip
    if parts > 1:
        columns = min(1024, triton.next_power_of_2(parts))
        rows = max(1, min(64, 1024 // columns, triton.next_power_of_2(n)))
        launch(
            _kmeans_least, (triton.cdiv(n, rows),),
            labels, found, least, n, parts, BLOCK=rows, BLOCK_P=columns, LATE=bool(early), **early,
        )  # fmt: skip


def _launch_product(labels: Tensor, points: Tensor, centres: Tensor, plan: Plan) -> None:
    """Screen by products, a fast one and a finer one, then compare by differences what they could not tell apart."""
    (n, d), k = points.shape, len(centres)
    device, single = points.device, torch.float32
    capability, processors = gpu(device)
    size = labels.element_size()
    finer = _kmeans_plan(n, d, k, points.dtype, size, capability, "product", again=True)
    exact = _kmeans_plan(n, d, k, points.dtype, size, capability, "differences", again=True)
    d_pad = triton.cdiv(d, plan.chunk) * plan.chunk  # the finer plan's chunks divide it
    k_pad = _padded(k, max(plan.block_k, exact.block_k))
    whole = torch.int32 if n < 2**31 else torch.int64
    lists, counts, shift, norms, short, moved, turned = _memory(
        device, ((2, n), whole), ((2,), whole), ((d_pad,), single), ((k_pad,), single), ((k_pad, d_pad), single),
        ((k_pad, d_pad), single), ((_padded(d, 8), k_pad), single),
    )  # fmt: skip
    launch(_kmeans_shift, (triton.cdiv(d_pad, 16),), shift, counts, centres, k, d, BLOCK_K=64, BLOCK_D=16)
    launch(
        _kmeans_centred, (triton.cdiv(k_pad, 32),),
        moved, short, norms, turned, shift, centres, k, d, k_pad, d_pad, len(turned), BLOCK_K=32, BLOCK_D=16,
    )  # fmt: skip
    for turn, (here, precision) in enumerate(((plan, "tf32"), (finer, "tf32x3"))):
        programs = triton.cdiv(n, here.block)
        listed, length = (lists[0], counts) if turn else (None, None)
        launch(
            _kmeans_screen, (min(programs, _turns(capability, processors)) if turn else programs,),
            labels, lists[turn], counts[turn:], points, shift, moved if turn else short, norms, listed, length,
            n, d, k_pad, _loose(precision, d), D_PAD=d_pad, CHUNK=here.chunk, PRECISION=precision, BLOCK=here.block,
            BLOCK_K=here.block_k, STAGES=here.stages, num_warps=here.warps,
        )  # fmt: skip
    _launch_differences(labels, points, turned, k, exact, lists[1], counts[1:])


def _padded(size: int, tile: int) -> int:
    return triton.cdiv(size, tile) * tile


def _turns(capability: tuple[int, int] | None, processors: int) -> int:
    """Programs that take turns at a list, whose length is known to the GPU only."""
    return processors * (1 if capability is None else 8)


def _launch_differences(
    labels: Tensor, points: Tensor, turned: Tensor, k: int, plan: Plan, doubtful: Tensor | None, count: Tensor | None
) -> None:
    """Compare all points, or the doubtful ones, by differences."""
    n, d = points.shape
    capability, processors = gpu(points.device)
    programs = triton.cdiv(n, plan.block)
    if doubtful is not None:
        programs = min(programs, _turns(capability, processors))
    launch(
        _kmeans_differences, (programs,),
        labels, points, turned, doubtful, count, n, d, k, turned.shape[1],
        BLOCK=plan.block, BLOCK_K=plan.block_k, num_warps=plan.warps,
    )  # fmt: skip


def assign_outputs(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> Tensor:
    return empty(points.shape[:1], label_dtype, points.device)


def assign_into(labels: Tensor, points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> None:
    d, k = points.shape[1], len(centres)
    if d == 0 or k == 1:
        apply(Tensor.zero_, labels)
        return
    n = None if torch.are_deterministic_algorithms_enabled() else len(points)
    plan = _plan(n, d, k, points.dtype, labels.element_size(), gpu(points.device)[0])
    if plan.how != "library":  # which takes any strides
        points, centres = contiguous(points), contiguous(centres)
        if plan.how in ("each", "tile", "product") and points.data_ptr() % 16:  # to load single numbers takes longer
            points = apply(Tensor.clone, points)
    _launched(labels, points, centres, plan)


def _launched(labels: Tensor, points: Tensor, centres: Tensor, plan: Plan) -> None:
    d, k = points.shape[1], len(centres)
    if plan.how == "few":
        launch_few(labels, None, points, centres, k, plan)
    elif plan.how == "tile":
        _launch_tile(labels, points, centres, plan)
    elif plan.how == "some":
        _launch_some(labels, points, centres, plan)
    elif plan.how == "library":
        _launch_library(labels, points, centres, plan)
    elif plan.how == "product":
        _launch_product(labels, points, centres, plan)
    elif plan.how == "each":
        align = math.gcd(16 // points.element_size(), d)
        launch(
            _kmeans_each, (triton.cdiv(len(points), plan.block),),
            labels, points, centres, len(points), d // align,
            K=k, ALIGN=align, BLOCK=plan.block, BLOCK_D=plan.chunk, STAGES=plan.stages,
            FLOAT=_WIDE[accumulated(points.dtype)], num_warps=plan.warps,
        )  # fmt: skip
    else:
        k_pad = _padded(k, plan.block_k)
        turned = empty((_padded(d, 8), k_pad), accumulated(points.dtype), points.device)
        launch(
            _kmeans_centred, (triton.cdiv(k_pad, 32),),
            None, None, None, turned, None, centres, k, d, k_pad, _padded(d, 16), len(turned), BLOCK_K=32, BLOCK_D=16,
        )  # fmt: skip
        _launch_differences(labels, points, turned, k, plan, None, None)


# Arguments -----------------------------------------------------------------------------------------------------------


def check_assign(
    points: Any, centres: Any, label_dtype: Any, check: bool = False, name: str = "kmeans_assign"
) -> tuple[Any, ...]:  # fmt: skip
    check_points(name, points)
    check_centres(name, points, centres)
    k = centres.shape[0]
    if k == 0:
        raise ValueError(f"{name}: expected one centre at least, got none; give [k, d] centres")
    if label_dtype not in LABELS:
        raise TypeError(
            f"{name}: expected label_dtype to be torch.int64, int32 or uint8, got {label_dtype}; choose one"
        )
    if k - 1 > torch.iinfo(label_dtype).max:
        raise ValueError(
            f"{name}: expected a label_dtype that counts to {k - 1}, got {label_dtype} for {k} centres; "
            "use torch.int32 or torch.int64"
        )
    check_device(name, points)
    return points, centres, label_dtype


def _read_assign(points: Tensor, centres: Tensor, label_dtype: torch.dtype, check: bool) -> None:
    name = "kmeans_assign"
    if not check or capturing(points):
        return
    refuse_not_finite(name, "points", points, "mend it, or pass check=False, which gives such a point label 0")
    refuse_not_finite(name, "centres", centres, "mend it, or pass check=False, which chooses such a centre for none")


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
        Read the points and the centres first and refuse NaN and infinities, which waits for the GPU. Skipped under
        torch.compile and graph capture.

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
        infinities; names the first.

    Notes
    -----
    Where there are few coordinates, centres or points, distances are sums of squared differences. With more, a matrix
    product sorts out the points whose nearest centre is beyond doubt; the others are compared by differences, and where
    centres are at most 128 or the product is float64, only with those that it could not tell apart. So the labels do
    not depend on how far from the origin the points lie, but the time may: where clusters are much farther from each
    other than they are wide, a product in TF32 leaves more points in doubt.

    Which of these is taken depends on all sizes, and so may the label of a point that is as far from two centres but
    for rounding. Under torch.use_deterministic_algorithms(True) it does not depend on the number of points.

    Points and centres that are not contiguous are copied first. Labels have no gradient.

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
