"""K-means: where k centres should be, given n labelled points; and labels and centres in one pass.

For points ``x [n, d]``,

    centre[j] = mean of x[i] over all i with label[i] == j

The least is to read nd and n labels, and to write kd. Few centres of few coordinates: every program adds up its own
points in registers, in the pass that finds their labels if that is wanted. Otherwise points are sorted by label, and
what stands side by side is added up.

Sums are float32 at least (float64 in float64) and always added in the same order: the same bits in every run. Limits:
points and centres that are not contiguous are copied first.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import Operator, accumulated, apply, capturing, contiguous, empty, launch, shapes
from ._points import DTYPES, LABELS, Plan, check_k, launch_few, refuse_beyond, refuse_not_finite, tensors
from .kmeans import assign_into, assign_outputs, check_assign

__all__ = ["kmeans_update", "kmeans_update_eager"]

# The unfused chain ----------------------------------------------------------------------------------------------------


def kmeans_update_eager(points: Tensor, labels: Tensor, k: int) -> Tensor:
    """The mean of the points of each label, by atomic additions: what their order costs.

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


# Kernels --------------------------------------------------------------------------------------------------------------


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
def _kmeans_means(out_ptr, sums_ptr, old_ptr, PARTS, K, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """A centre: the parts of its sum, and of its number, added in float64 in a fixed order, and divided.

    One without points is the old one, where there are old ones.
    """
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
    many = tl.sum(count, 0)
    mean = tl.sum(total, 0) / many  # [BLOCK_D]; NaN where nothing was added: the mean of nothing
    if old_ptr is not None:
        old = tl.load(old_ptr + j * D + columns, mask=columns < D, other=0.0).to(tl.float64)
        mean = tl.where(many > 0, mean, old)
    tl.store(out_ptr + j * D + columns, mean.to(out_ptr.dtype.element_ty), mask=columns < D)


@triton.jit
def _kmeans_keys(keys_ptr, labels_ptr, n, K, BLOCK: tl.constexpr):
    """Labels in a narrow dtype that holds K, which stands for all that are out of range."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + i, mask=i < n, other=0).to(tl.int64)  # read n labels; compared before it is narrowed
    key = tl.where((label >= 0) & (label < K), label, K)
    tl.store(keys_ptr + i, key.to(keys_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def _kmeans_chunks(
    parts_ptr, points_ptr, keys_ptr, order_ptr, bounds_ptr, D, K, CHUNK, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """CHUNK neighbours of `order`: the sum of the points of each label among them.

    Of label j in chunk c it is part c + j, which is no other label's and no other chunk's: along `order` labels and
    chunks only rise.
    """
    FLOAT: tl.constexpr = parts_ptr.dtype.element_ty
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.arange(0, BLOCK)
    low = chunk * CHUNK
    # Keys of K come last and belong to nobody.
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
    """What the points of a label add up to, its parts in float64 in the order of the chunks; and how many they are."""
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


# Plans ----------------------------------------------------------------------------------------------------------------


#: Programs that share the addition of many parts.
_GROUPS = 64
#: Points that a program adds up, at most.
_MOST = 8192


def _sums_fit(d: int, k: int) -> bool:
    """Whether a program can hold the sums of all centres in registers."""
    return d <= 8 and k * (d + 1) <= 24


def _sums_plan(d: int, k: int, assign: bool) -> Plan:
    """How a pass leaves sums in registers, where labels are given, or with `assign` found in the same pass."""
    # Loads enough on their way, and registers enough for them.
    return Plan("few", block=512 if assign else 256, few=k, steps=max(1, (8 if assign else 16) // d))


class Sums(NamedTuple):
    """How many rows are added up, of so many columns each."""

    parts: int  # programs, or groups of parts, that share what is added
    block: int  # rows that are added at a time
    wide: int  # columns a program


def _narrowest(most: int) -> torch.dtype:
    """The narrowest dtype that counts to a number: narrow keys are sorted in fewer passes."""
    return next(dtype for dtype in (torch.uint8, torch.int16, torch.int32) if most <= torch.iinfo(dtype).max)


class Chunks(NamedTuple):
    """How points that are sorted by label are added up."""

    size: int  # neighbours that one program adds up, whoever they belong to: no label is left to a few programs
    block: int  # of them at a time
    together: int  # parts of a label that are added at a time
    wide: int  # columns a program


def _chunks_plan(n: int, d: int, k: int) -> Chunks:
    wide = min(triton.next_power_of_2(d), 128)
    # Programs enough to fill a GPU, and parts of a label few enough for one program to add up.
    size = max(64, min(_MOST, triton.next_power_of_2(triton.cdiv(n, 4096))))
    # As many points at once as labels have neighbours where all have as many.
    each = triton.next_power_of_2(triton.cdiv(n, k))
    return Chunks(size, max(1, min(size, each, 2048 // wide)), max(1, min(64, 4096 // wide)), wide)


def _groups_plan(parts: int, d: int, k: int) -> Sums | None:
    """How parts of sums are added up in groups; None where they are few, or wide."""
    if parts <= 8 * _GROUPS or k * (d + 1) > 64:
        return None
    # k programs alone would take longer to add thousands of parts than all others took to leave them.
    return Sums(_GROUPS, 64, triton.next_power_of_2(k * (d + 1)))


def _means_plan(parts: int, d: int) -> Sums:
    """How the last parts of sums become centres."""
    wide = min(triton.next_power_of_2(d), 128)
    return Sums(parts, min(max(1, 2048 // wide), triton.next_power_of_2(parts)), wide)


# Launchers ------------------------------------------------------------------------------------------------------------


def _programs(n: int, plan: Plan) -> int:
    return triton.cdiv(n, plan.steps * plan.block)


def _parts(points: Tensor, k: int, plan: Plan) -> Tensor:
    """Memory for the sums of a pass, one part a program."""
    n, d = points.shape
    return empty((_programs(n, plan), k * (d + 1)), accumulated(points.dtype), points.device)


def _grouped(parts: Tensor, d: int, k: int, groups: Tensor | None = None) -> Tensor:
    """Parts ``[PARTS, k (d + 1)]`` of sums, added up in groups where they are many: into `groups` if they are given."""
    many, width = parts.shape
    together = _groups_plan(many, d, k)
    if together is None:
        return parts
    if groups is None:
        groups = empty((together.parts, width), torch.float64, parts.device)
    launch(
        _kmeans_groups, (together.parts,),
        groups, parts, many, width, triton.cdiv(many, together.parts), BLOCK=together.block, BLOCK_W=together.wide,
    )  # fmt: skip
    return groups


def _launch_means(out: Tensor, parts: Tensor, old: Tensor | None) -> None:
    """Centres from parts ``[PARTS, k (d + 1)]`` of their sums."""
    k, d = out.shape
    parts = _grouped(parts, d, k)
    plan = _means_plan(len(parts), d)
    launch(
        _kmeans_means, (k, triton.cdiv(d, plan.wide)),
        out, parts, old, len(parts), k, d, BLOCK=plan.block, BLOCK_D=plan.wide,
    )  # fmt: skip


def _launch_chunks(points: Tensor, labels: Tensor, k: int, sums: Tensor | None = None) -> Tensor:
    """Sort by label, add up what stands side by side; returns sums ``[1, k (d + 1)]``, `sums` where they are given."""
    (n, d), device = points.shape, points.device
    # k stands for what is out of range: it comes last and belongs to nobody.
    keys = empty((n,), _narrowest(k), device)
    launch(_kmeans_keys, (triton.cdiv(n, 1024),), keys, labels, n, k, BLOCK=1024)
    keys, order = apply(torch.sort, keys, stable=True)
    numbers = apply(torch.arange, k + 1, dtype=torch.int32, device=device)
    bounds = apply(torch.searchsorted, apply(Tensor.to, keys, torch.int32), numbers)
    plan = _chunks_plan(n, d, k)
    chunks, tiles = triton.cdiv(n, plan.size), triton.cdiv(d, plan.wide)
    parts = empty((chunks + k, d), accumulated(points.dtype), device)
    launch(
        _kmeans_chunks, (chunks, tiles),
        parts, points, keys, order, bounds, d, k, plan.size, BLOCK=plan.block, BLOCK_D=plan.wide,
    )  # fmt: skip
    if sums is None:
        sums = empty((1, k * (d + 1)), torch.float64, device)
    launch(
        _kmeans_sums, (k, tiles),
        sums, parts, bounds, d, plan.size, BLOCK=plan.together, BLOCK_D=plan.wide,
    )  # fmt: skip
    return sums


def _update_outputs(points: Tensor, labels: Tensor, k: int, old: Tensor | None) -> Tensor:
    return empty((k, points.shape[1]), points.dtype, points.device)


def _update_into(out: Tensor, points: Tensor, labels: Tensor, k: int, old: Tensor | None) -> None:
    n, d = points.shape
    if n == 0:
        apply(Tensor.fill_, out, math.nan) if old is None else apply(Tensor.copy_, out, old)
        return
    points, labels = contiguous(points), contiguous(labels)
    if _sums_fit(d, k):
        plan = _sums_plan(d, k, assign=False)
        parts = _parts(points, k, plan)
        launch_few(labels, parts, points, None, k, plan)
    else:
        parts = _launch_chunks(points, labels, k)
    _launch_means(out, parts, None if old is None else contiguous(old))


def _step_outputs(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return assign_outputs(points, centres, label_dtype), empty(centres.shape, centres.dtype, centres.device)


def _labelled(
    labels: Tensor, points: Tensor, centres: Tensor, label_dtype: torch.dtype, sums: Tensor | None = None
) -> Tensor:
    """Labels, and parts of sums: in one pass where these fit in registers. `sums` where they are as many."""
    n, k = len(points), len(centres)
    if not _sums_fit(points.shape[1], k):
        assign_into(labels, points, centres, label_dtype)
        return _launch_chunks(points, labels, k, sums)
    plan = _sums_plan(points.shape[1], k, assign=True)
    parts = sums if sums is not None and len(sums) == _programs(n, plan) else _parts(points, k, plan)
    launch_few(labels, parts, points, centres, k, plan)
    return parts


def _step_into(
    outs: tuple[Tensor, Tensor], points: Tensor, centres: Tensor, label_dtype: torch.dtype
) -> None:  # fmt: skip
    (labels, new), (n, d) = outs, points.shape
    points, centres = contiguous(points), contiguous(centres)
    if n and d:
        _launch_means(new, _labelled(labels, points, centres, label_dtype), centres)
    elif n:  # points without coordinates are all the first centre's
        apply(Tensor.zero_, labels)
    elif d:
        apply(Tensor.copy_, new, centres)


def _sums_outputs(points: Tensor, centres: Tensor, label_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (n, d), k = points.shape, len(centres)
    parts, dtype = 1, torch.float64
    if n and d and _sums_fit(d, k):
        parts, dtype = _programs(n, _sums_plan(d, k, assign=True)), accumulated(points.dtype)
        if together := _groups_plan(parts, d, k):
            parts, dtype = together.parts, torch.float64
    return assign_outputs(points, centres, label_dtype), empty((parts, k, d + 1), dtype, points.device)


def _sums_into(
    outs: tuple[Tensor, Tensor], points: Tensor, centres: Tensor, label_dtype: torch.dtype
) -> None:  # fmt: skip
    """As `_step_into`, up to where parts of sums become centres."""
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


def _means_into(out: Tensor, sums: Tensor, old: Tensor) -> None:
    _launch_means(out, sums.flatten(1), contiguous(old))


# Arguments ------------------------------------------------------------------------------------------------------------


def _check_update(points: Any, labels: Any, k: Any, centres: Any, check: bool) -> tuple[Any, ...]:
    name = "kmeans_update"
    shapes(
        name, points=(points, "[n, d]", DTYPES), labels=(labels, "[n]", LABELS), centres=(centres, "[k, d]?")
    )  # fmt: skip
    k = check_k(name, k)
    if centres is not None and centres.shape[0] != k:
        raise ValueError(f"{name}: expected k = {k} centres, got {centres.shape[0]}; give one for each label")
    return points, labels, k, centres


def _read_update(points: Tensor, labels: Tensor, k: int, centres: Tensor | None, check: bool) -> None:
    name = "kmeans_update"
    if not check or capturing(points):
        return
    most = refuse_not_finite(name, "points", points, "fix it, or pass check=False, which lets it spoil its centre")
    refuse_beyond(name, "points", most, torch.finfo(accumulated(points.dtype)).max / _MOST)
    if labels.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(labels)).tolist()
    if low < 0 or high >= k:
        wide = labels.long()  # k need not fit into the dtype of labels
        at = int(((wide < 0) | (wide >= k)).to(torch.uint8).argmax())
        raise IndexError(
            f"{name}: expected labels from 0 to {k - 1}, got {int(labels[at])} at labels[{at}]; mend it, or "
            "pass check=False to leave such points out"
        )


_update = Operator(
    "kmeans_update",
    "(Tensor points, Tensor labels, SymInt k, Tensor? centres) -> Tensor",
    check=_check_update,
    outputs=_update_outputs,
    into=_update_into,
    read=_read_update,
)


#: Labels and new centres, an iteration of k-means: ``OPERATORS["kmeans_step"](points, centres, label_dtype)``.
_step = Operator(
    "kmeans_step",
    "(Tensor points, Tensor centres, ScalarType label_dtype) -> (Tensor, Tensor)",
    check=functools.partial(check_assign, name="kmeans_step"),
    outputs=_step_outputs,
    into=_step_into,
    modes=torch.are_deterministic_algorithms_enabled,
)

#: Labels, and parts ``[parts, k, d + 1]`` of what the points of each centre add up to and of how many they are: an
#: iteration up to where those of other points are added, ``OPERATORS["kmeans_sums"](points, centres, label_dtype)``.
_sums = Operator(
    "kmeans_sums",
    "(Tensor points, Tensor centres, ScalarType label_dtype) -> (Tensor, Tensor)",
    check=functools.partial(check_assign, name="kmeans_sums"),
    outputs=_sums_outputs,
    into=_sums_into,
    modes=torch.are_deterministic_algorithms_enabled,
)


def _check_means(sums: Any, old: Any) -> tuple[Any, ...]:
    name = "kmeans_means"
    # Of each centre its sums and its number of points.
    wide = torch.float32, torch.float64
    shapes(name, old=(old, "[k, d]", DTYPES), sums=(sums, "[parts > 0, k, d + 1]", wide))
    return sums.contiguous(), old


#: The rest of that iteration: ``OPERATORS["kmeans_means"](sums, old)`` adds the parts of all sums in float64, in their
#: order, and divides; a centre without points stays what it was.
_means = Operator(
    "kmeans_means",
    "(Tensor sums, Tensor old) -> Tensor",
    check=_check_means,
    outputs=lambda sums, old: empty(old.shape, old.dtype, old.device),
    into=_means_into,
)


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
    order of the programs. Where the sums of all centres do not fit in a program's registers, points are sorted by label
    first, with torch.sort, which is stable.

    Centres have no gradient: asking for one, of points that require it, raises NotImplementedError.
    """
    (points, labels, centres), arrays = tensors("kmeans_update", points=points, labels=labels, centres=centres)
    new = _update(points, labels, k, centres, check)
    return new.cpu().numpy() if arrays else new
