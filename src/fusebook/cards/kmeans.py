"""K-means, assignment, update and both: their meaning, costs and rivals."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import compiled, compiling
from fusebook.kernels import kmeans as _kernels
from fusebook.kernels.kmeans import (
    DTYPES,
    LABELS,
    kmeans_assign,
    kmeans_assign_eager,
    kmeans_update,
    kmeans_update_eager,
)
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["KMEANS_ASSIGN", "KMEANS_STEP", "KMEANS_UPDATE", "PAGE"]

#: The page that tells of them.
PAGE = 303
_WORDS = {str(dtype).removeprefix("torch."): dtype for dtype in LABELS}


def _draw(rng: torch.Generator, dtype: torch.dtype, n: int, d: int, k: int, law: str) -> tuple[Tensor, Tensor]:
    """Points and centres by the law that the card names."""

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, d, generator=rng, dtype=dtype, device=rng.device)

    if law == "rough":
        return rough(rng, (n, d), dtype), rough(rng, (k, d), dtype)
    if law in ("near", "far"):  # no clusters, so that candidates are many; far: products cancel
        away = 100 if law == "far" else 0
        return normal(n) + away, normal(k) + away
    if law in ("blobs", "skewed", "empty"):
        centres = 3 * normal(k) + 10
        return normal(n) + centres[_planted(rng, n, k, law)], centres
    raise ValueError(f"kmeans: law {law!r} is none of near, far, rough, blobs, skewed, empty")


def _planted(rng: torch.Generator, n: int, k: int, law: str) -> Tensor:
    """Which cluster each point belongs to: all alike, nine of ten to the first, or none to the last."""
    label = torch.randint(max(1, k - 1) if law == "empty" else k, (n,), generator=rng, device=rng.device)
    if law == "skewed":
        label = torch.where(torch.rand(n, generator=rng, device=rng.device) < 0.9, 0, label)
    return label


def _make_assign(
    rng: torch.Generator, dtype: torch.dtype, *, n: int, d: int, k: int, labels: str, law: str
) -> tuple[Any, ...]:
    return *_draw(rng, dtype, n, d, k, law), _WORDS[labels]


def _reference_assign(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> Tensor:
    # A centre at a time: all nkd differences of a benchmark do not fit in memory in float64.
    best = torch.full_like(points[:, 0], math.inf)
    labels = torch.zeros_like(best, dtype=torch.int64)
    for j in range(len(centres)):
        distance = (points - centres[j]).square().sum(1)
        closer = distance < best
        best = torch.where(closer, distance, best)
        labels = torch.where(closer, j, labels)
    return labels.to(label_dtype)


def _distances(points: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
    """From each point to the centre of its label; infinite where there is no such centre."""
    at = labels.long()
    real = (at >= 0) & (at < len(centres))
    distance = (points - centres[torch.where(real, at, 0)]).norm(dim=1)
    return torch.where(real, distance, math.inf)


def _meaning_assign(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensor:
    points, centres, _ = inputs
    return _distances(points, centres, outputs[0])


def _cost_assign(itemsize: int, *, n: int, d: int, k: int, labels: str, law: str) -> Cost:
    # A difference, a square and a sum for each coordinate: as a product, a multiplication and a sum.
    return Cost(read=(n + k) * d * itemsize, write=n * _WORDS[labels].itemsize, flop=2 * n * k * d)


def _cost_assign_eager(itemsize: int, *, n: int, d: int, k: int, labels: str, law: str) -> Cost:
    # argmin writes int64; narrower labels are a pass of their own.
    size = _WORDS[labels].itemsize
    again = n * 8 if size < 8 else 0
    return Cost(
        read=(n + k) * d * itemsize + n * k * d * itemsize + n * k * itemsize + again,
        write=n * k * d * itemsize + n * k * itemsize + again + n * size,
        flop=3 * n * k * d,
    )


def _cost_assign_product(itemsize: int, *, n: int, d: int, k: int, labels: str, law: str) -> Cost:
    least = _cost_assign(itemsize, n=n, d=d, k=k, labels=labels, law=law)
    return Cost(read=least.read + n * k * itemsize, write=least.write + n * k * itemsize, flop=least.flop)


#: Bytes of differences beyond which the eager chain is not tried.
_TOO_MUCH = 32e9


def _fits(points: Tensor, centres: Tensor) -> None:
    size = points.numel() * len(centres) * points.element_size()
    if size > _TOO_MUCH:
        raise NotImplementedError(f"the differences of all points and centres would take {size / 1e9:.0f} GB")


def _eager_assign(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> Tensor:
    _fits(points, centres)
    return kmeans_assign_eager(points, centres, label_dtype)


def _cdist_assign(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> Tensor:
    if points.dtype == torch.float16:
        raise NotImplementedError("torch.cdist does not take float16")
    return torch.cdist(points, centres).argmin(1).to(label_dtype)


def _product_assign(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> Tensor:
    """As scikit-learn does: the square of the point is the same for all centres, and left out."""
    return (centres.square().sum(1) - 2 * (points @ centres.T)).argmin(1).to(label_dtype)


def _compiled_product(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> Tensor:
    if points.dtype == torch.float16:
        raise NotImplementedError("a product that is rounded to float16 cannot tell centres apart")
    return compiled(_product_assign)(points, centres, label_dtype)


def _fusebook_assign(check: bool = False) -> Any:
    return lambda points, centres, label_dtype: kmeans_assign(points, centres, label_dtype=label_dtype, check=check)


def _make_update(
    rng: torch.Generator, dtype: torch.dtype, *, n: int, d: int, k: int, labels: str, law: str
) -> tuple[Any, ...]:
    points, _ = _draw(rng, dtype, n, d, k, "rough" if law == "blobs" else "blobs")
    return points, _planted(rng, n, k, law).to(_WORDS[labels]), k


def _cost_update(itemsize: int, *, n: int, d: int, k: int, labels: str, law: str) -> Cost:
    return Cost(read=n * d * itemsize + n * _WORDS[labels].itemsize, write=k * d * itemsize, flop=n * d)


def _cost_update_product(itemsize: int, *, n: int, d: int, k: int, labels: str, law: str) -> Cost:
    # A matrix of ones and zeros is written, and read by the product and by the sums of its columns.
    least = _cost_update(itemsize, n=n, d=d, k=k, labels=labels, law=law)
    ones = n * k * max(itemsize, 4)
    return Cost(read=least.read + 2 * ones, write=least.write + ones, flop=2 * n * k * d)


def _sorted_update(points: Tensor, labels: Tensor, k: int) -> Tensor:
    """As torch adds up the gradient of an embedding, whose rows it sorts by their labels."""
    wide = points if points.dtype == torch.float64 else points.float()
    of_rows = labels.int()
    sums = torch.ops.aten.embedding_dense_backward(wide, of_rows, k, -1, False)
    return (sums / torch.histc(of_rows.float(), k, 0, k)[:, None]).to(points.dtype)


def _product_update(points: Tensor, labels: Tensor, k: int) -> Tensor:
    """As a matrix product, with a one in each row of a matrix [n, k]; where that is small, few centres' cheapest."""
    size = len(points) * k * 4
    if size > _TOO_MUCH:
        raise NotImplementedError(f"a matrix with a one for each point would take {size / 1e9:.0f} GB")
    wide = points if points.dtype == torch.float64 else points.float()
    ones = (labels[:, None] == torch.arange(k, device=labels.device)).to(wide.dtype)
    return (ones.T @ wide / ones.sum(0)[:, None]).to(points.dtype)


def _fusebook_update(points: Tensor, labels: Tensor, k: int) -> Tensor:
    return kmeans_update(points, labels, k, check=False)


def _reference_step(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    labels = _reference_assign(points, centres, label_dtype)
    return labels, _moved(points, labels, centres)


def _moved(points: Tensor, labels: Tensor, centres: Tensor) -> Tensor:
    """The means of the clusters; a centre without points keeps its place."""
    new = kmeans_update_eager(points, labels, len(centres))
    empty = torch.ones_like(centres[:, 0], dtype=torch.bool).index_fill(0, labels.long(), False)
    return torch.where(empty[:, None], centres, new)


def _meaning_step(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    points, centres, _ = inputs
    return _distances(points, centres, outputs[0]), outputs[1]


def _cost_step(itemsize: int, *, n: int, d: int, k: int, labels: str, law: str) -> Cost:
    least = _cost_assign(itemsize, n=n, d=d, k=k, labels=labels, law=law)
    return Cost(read=least.read, write=least.write + k * d * itemsize, flop=least.flop + n * d)


def _cost_step_apart(itemsize: int, *, n: int, d: int, k: int, labels: str, law: str) -> Cost:
    # Points are read twice, and labels are read again.
    least = _cost_step(itemsize, n=n, d=d, k=k, labels=labels, law=law)
    more = n * d * itemsize + n * _WORDS[labels].itemsize
    return Cost(read=least.read + more, write=least.write, flop=least.flop)


def _chain_step(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    labels = kmeans_assign_eager(points, centres, label_dtype)
    return labels, _moved(points, labels, centres)


def _eager_step(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _fits(points, centres)
    return _chain_step(points, centres, label_dtype)


def _fusebook_step(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _kernels._step(points, centres, label_dtype)


def _two_calls(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    labels = kmeans_assign(points, centres, label_dtype=label_dtype, check=False)
    return labels, kmeans_update(points, labels, len(centres), centres=centres, check=False)


def _point(n: int, d: int, k: int, labels: str = "int64", law: str = "blobs") -> dict[str, int | str]:
    return {"n": n, "d": d, "k": k, "labels": labels, "law": law}


#: Coordinates of a point: of the plane and of space, of pixels and of embeddings.
_COORDINATES = (2, 3, 4, 8, 16, 28, 32, 64, 96, 128, 256, 300, 384, 512, 768, 784, 1024, 1536, 3072)


def _draw_problem(rng: random.Random, laws: tuple[str, ...]) -> Dims:
    """Points of the plane and up to embeddings, a few and up to millions; two centres and up to thousands.

    A gibibyte of points and 2**36 products of a point's and a centre's coordinate at most, which the reference computes
    one after another. Labels are as wide as they come, or as narrow as the centres allow.
    """
    dtype = _draws.dtype(rng, DTYPES)
    d = _draws.size(rng, 1, 4096, _COORDINATES)
    k = _draws.log_uniform(rng, 2, 4096)
    n = _draws.count(rng, min(2**24, 2**30 // (d * _draws.itemsize(dtype)), 2**36 // (d * k)))
    labels = rng.choice(["int64", "int64", "int32", "uint8" if k <= 256 else "int32"])
    layout = _draws.layout(rng, ("sliced", "offset", "across"))
    return {"n": n, "d": d, "k": k, "labels": labels, "law": rng.choice(laws), "dtype": dtype, "layout": layout}


def _draw_assign(rng: random.Random) -> Dims:
    """Points in clusters or in none, near the origin or far from it, and of all sizes."""
    return _draw_problem(rng, ("blobs", "skewed", "near", "far", "rough"))


def _draw_update(rng: random.Random) -> Dims:
    """Labels that are alike, of which nine of ten are the same, or of which one does not occur."""
    return _draw_problem(rng, ("blobs", "skewed", "empty"))


def _draw_step(rng: random.Random) -> Dims:
    """Points in clusters, which stay where they are for another step."""
    return _draw_problem(rng, ("blobs", "skewed"))


_MILLION = 1_000_000

# Few coordinates: pairs, one, three and four of them, unrolled and in a loop, more than a program, ragged; sums that
# fit in registers. Many: one tile and several of points, of centres and of coordinates, all points in doubt; none. More
# centres than a tile holds.
_EDGES = (
    _point(2, 2, 2),
    _point(1100, 2, 2),
    _point(70, 1, 3, "int32", "rough"),
    _point(40, 3, 5, "uint8", "rough"),
    _point(33, 4, 20, "int64", "rough"),
    _point(70, 20, 40, "int32", "rough"),
    _point(90, 17, 20, "int64", "near"),
    _point(20, 140, 3, "uint8", "near"),
    _point(30, 20, 140, "uint8", "near"),
    _point(0, 2, 2),
)
KMEANS_ASSIGN = Op(
    name="kmeans_assign",
    reference=_reference_assign,
    make=_make_assign,
    cost=_cost_assign,
    variants={
        "eager": Variant(_eager_assign, cost=_cost_assign_eager, needs=()),
        "torch.cdist": Variant(_cdist_assign, cost=_cost_assign_product, needs=()),
        "torch.compile": compiling(kmeans_assign_eager),
        "torch.compile, product": Variant(_compiled_product, cost=_cost_assign_product, needs=(), recompiles=True),
        "fusebook": Variant(_fusebook_assign(), needs=(), rate="tf32"),
        "fusebook, checked": Variant(_fusebook_assign(check=True), needs=(), rate="tf32"),
    },
    configs={
        # The plane, by the width of a label.
        "plane": tuple(_point(20 * _MILLION, 2, 2, labels) for labels in ("int64", "int32", "uint8")),
        # Few coordinates and few centres.
        "few": tuple(_point(5 * _MILLION, d, k) for d in (2, 3, 4, 8) for k in (2, 16)),
        # Distances as a matrix product.
        "wide": (
            _point(_MILLION, 16, 16, law="near"),
            _point(_MILLION, 64, 256, law="near"),
            _point(65536, 128, 1024, law="near"),
        ),
        # The same, clustered; far from the origin; and where every point is in doubt.
        "laws": tuple(_point(_MILLION, 64, 256, law=law) for law in ("blobs", "far", "rough")),
    },
    draw=_draw_assign,
    edges=_EDGES,
    dtypes=DTYPES,
    meaning=_meaning_assign,
    rows=(0,),
)
KMEANS_UPDATE = Op(
    name="kmeans_update",
    reference=kmeans_update_eager,
    make=_make_update,
    cost=_cost_update,
    variants={
        "eager": Variant(kmeans_update_eager, needs=()),
        "torch.compile": compiling(kmeans_update_eager),
        "sorted": Variant(_sorted_update, needs=()),
        "product": Variant(_product_update, cost=_cost_update_product, needs=()),
        "torch.compile, product": compiling(_product_update, cost=_cost_update_product),
        "fusebook": Variant(_fusebook_update, needs=()),
    },
    configs={
        "plane": tuple(_point(20 * _MILLION, 2, 2, labels) for labels in ("int64", "uint8")),
        "wide": (_point(_MILLION, 64, 256), _point(65536, 128, 1024), _point(_MILLION, 64, 256, law="skewed")),
    },
    draw=_draw_update,
    edges=(
        _point(2100, 2, 2, "uint8"),
        _point(5, 1, 1),
        _point(60, 3, 3, "int32", "empty"),
        _point(150, 20, 6, "int64", "skewed"),
        _point(40, 150, 3, "uint8", "empty"),
        _point(0, 2, 2),
    ),
    dtypes=DTYPES,
)
KMEANS_STEP = Op(
    name="kmeans_step",
    reference=_reference_step,
    make=_make_assign,
    cost=_cost_step,
    variants={
        "eager": Variant(_eager_step, cost=_cost_step_apart, needs=()),
        "torch.compile": compiling(_chain_step, cost=_cost_step_apart),
        "fusebook": Variant(_fusebook_step, needs=(), rate="tf32"),
        "fusebook, two calls": Variant(_two_calls, cost=_cost_step_apart, needs=(), rate="tf32"),
    },
    configs={
        "plane": (_point(20 * _MILLION, 2, 2), _point(20 * _MILLION, 2, 2, "uint8")),
        "wide": (_point(_MILLION, 64, 256),),
    },
    draw=_draw_step,
    edges=(_point(2100, 2, 2), _point(50, 3, 3, "uint8"), _point(64, 16, 5, "int32")),
    dtypes=DTYPES,
    meaning=_meaning_step,
)
