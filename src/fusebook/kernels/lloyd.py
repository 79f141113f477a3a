"""K-means, the whole of it: centres drawn by k-means++, then Lloyd's iterations, for NumPy arrays and torch tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import kmeans_update  # noqa: F401  (it defines the step)
from ._call import OPERATORS, accumulated, check_stored, empty, integer, launch, launching, number, readable, shapes
from ._points import DTYPES, check_k, farthest, refuse_beyond, refuse_not_finite, tensors
from .kmeans import kmeans_assign

__all__ = ["KMeans", "kmeans"]


# The kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _kmeans_spread(
    squares_ptr, sums_ptr, points_ptr, centres_ptr, labels_ptr, n, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """How far BLOCK points are from the centres of their labels, squared and summed.

    Without labels: from one centre, or from one that was chosen earlier where that is nearer; each square is kept, to
    draw the next centre by.
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


# Launchers -----------------------------------------------------------------------------------------------------------


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
    sums = empty((triton.cdiv(n, _SPREAD),), accumulated(points.dtype), points.device)
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
    centres = empty((k, d), points.dtype, points.device)
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
    (points, given), arrays = tensors(name, points=points, init=given)
    n = shapes(name, points=(points, "[n > 0, d]", DTYPES), init=(given, "[k, d]?"))["n"]
    k = check_k(name, k)
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
    most = refuse_not_finite(name, "points", points, "leave such points out")
    # A power of two changes no digit, and keeps squares finite and above 0.
    bound = 400 if points.dtype == torch.float64 else 40
    exponent = math.frexp(most)[1]
    unit = 1.0 if abs(exponent) <= bound else 2.0 ** max(exponent - bound, -5 * bound // 2)
    points = points.contiguous() if unit == 1 else points.contiguous() / unit
    if given is not None:
        check_stored(name, "init", given)
        most = refuse_not_finite(name, "init", given, "give finite centres")
        refuse_beyond(name, "init", most, farthest(points.dtype, points.shape[1]) * unit)
        centres = given.contiguous() if unit == 1 else given.contiguous() / unit
    elif init == "random" or not points.shape[1]:  # points without coordinates are all at one place
        rows = random.Random(seed).sample(range(n), k)
        centres = points[torch.tensor(rows, device=points.device)]
    else:
        centres = _plus_plus(points, k, random.Random(seed))
    wide = points if points.dtype == torch.float64 else points.float()
    least = tol * float(wide.var(0, correction=0).mean()) if tol and points.numel() else 0.0
    narrow = torch.uint8 if k <= 256 else torch.int32  # labels on the way: nobody sees them
    for iterations in _shown(range(1, max_iter + 1), name):  # noqa: B007  (told at the end)
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
