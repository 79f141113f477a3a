"""What the operators of k-means share: points of few coordinates in registers, and what points and centres must be.

Points are [n, D] and contiguous. Addresses are int64, because n D may be more than 2**31.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import accumulated, integer, launch

#: What points and centres may be, and labels.
DTYPES = (torch.float16, torch.float32, torch.float64)
LABELS = (torch.int64, torch.int32, torch.uint8)

# Few coordinates ------------------------------------------------------------------------------------------------------


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
        # Neighbours are loaded side by side, 16 bytes a thread, and told apart in registers.
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
            # Every D-th number: the L1 cache keeps the line for the other coordinates.
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

    FEW: that many centres, unrolled; 0 where they are in a loop.
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
    # All loads before the first store: a compiler that cannot know whether they overlap would keep them in turn.
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

    With centres, labels are found and stored; else they are loaded. With sums, the program leaves what its points of
    each centre add up to, coordinate by coordinate, and how many they are.
    """
    ASSIGN: tl.constexpr = centres_ptr is not None
    SUMS: tl.constexpr = sums_ptr is not None
    FLOAT: tl.constexpr = tl.float64 if points_ptr.dtype.element_ty == tl.float64 else tl.float32
    # Nothing is read twice, so points need not push out what the cache holds and has yet to write. That pays where
    # little is written, and costs a little where much is.
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


class Plan(NamedTuple):
    """How labels are found.

    ``few`` coordinates in registers, ``each`` of few centres in turn, ``some`` of the centres a program by differences,
    a ``product``, or a ``screen`` by a product in TF32 before it.
    """

    how: str
    block: int  # points a program
    block_k: int = 1  # centres a tile
    chunk: int = 1  # coordinates a tile
    few: int = 0  # centres unrolled, 0 for a loop
    steps: int = 1  # blocks of points, or tiles of centres, a program
    stages: int = 1
    warps: int = 4
    precision: str = ""  # of the product
    pad: int = 1  # what the number of coordinates is made a multiple of, by zeros behind them


def launch_few(
    labels: Tensor, parts: Tensor | None, points: Tensor, centres: Tensor | None, k: int, plan: Plan
) -> None:  # fmt: skip
    """Labels where there are centres, parts of sums, or both, in one pass."""
    n, d = points.shape
    launch(
        _kmeans_few, (triton.cdiv(n, plan.steps * plan.block),),
        labels, parts, points, centres, n, k,
        D=d, FEW=plan.few, STEPS=plan.steps, BLOCK=plan.block, num_warps=plan.warps,
    )  # fmt: skip


# Arguments ------------------------------------------------------------------------------------------------------------


def refuse_not_finite(name: str, what: str, x: Tensor, remedy: str) -> float:
    """Read all of `x` once and refuse NaN and infinities, naming the first; return the largest magnitude."""
    most = float(torch.stack(torch.aminmax(x.detach())).abs().max()) if x.numel() else 0.0  # waits for the GPU
    if math.isfinite(most):
        return most
    at = int(torch.isfinite(x.detach()).logical_not_().reshape(-1).to(torch.uint8).argmax())
    row, column = divmod(at, x.shape[1])
    raise ValueError(
        f"{name}: expected finite {what}, got {x[row, column].item()} at {what}[{row}, {column}]; {remedy}"
    )


def refuse_beyond(name: str, what: str, most: float, limit: float) -> None:
    """Refuse points whose squares or sums would be infinite; `most` is their largest magnitude."""
    if most > limit:
        raise ValueError(
            f"{name}: expected {what} of magnitudes up to {limit:.3g}, got {most:.3g}; scale all of them down, or cast "
            "them to torch.float64"
        )


def farthest(dtype: torch.dtype, d: int) -> float:
    """The magnitude up to which sums of 1024 squared distances of `d` coordinates are finite."""
    return math.sqrt(torch.finfo(accumulated(dtype)).max / (4096 * max(d, 1)))


def check_k(name: str, k: Any) -> int:
    """Refuse what is not a number of centres."""
    return integer(name, "k", k, "give the number of centres", "from 1 to 2**31 - 1", lambda k: 1 <= k < 2**31)


def tensors(name: str, **given: Any) -> tuple[list[Any], bool]:
    """NumPy arrays as tensors where the kernels run, and whether they were arrays: all of them or none."""
    numpy: Any = sys.modules.get("numpy")  # who passes an array has imported it, and nobody else needs it
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
