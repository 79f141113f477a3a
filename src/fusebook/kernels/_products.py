"""What the operators that are made of matrix products share: how products are cut, planned and launched.

A product has x ``[M, K]`` on its left side and one or more weights ``[K, N_i]`` on its right. All weights go through
one launch, whose programs meet the same tiles of x in the L2 cache. Sums are float32. Float32 is multiplied in TF32
where that is asked for; else by three products in TF32, of what its first eleven bits leave as well, with errors as
those of float32. Where torch's products were faster when a kind of GPU was tuned, the launchers take them, as they do
for float64: each writes into its own columns of one matrix.

Each operator has two kernels. *Tiles*: a fixed number of programs walks over the tiles of the output; tensor
descriptors fetch the tiles of x and of the weights, whose addresses must be multiples of 16 bytes. *Strided*: any
strides, by pointers and masks; a program may take a part of K only, which is what a few rows need, where reading the
weights is all the work. One row or two are multiplied there without tensor cores.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import pathlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._call import INTERPRETED, Distance, apply, empty, gpu, launch, one_of, overlapping, shapes
from ._memory import side_by_side
from ._rows import fill

# Kernels -------------------------------------------------------------------------------------------------------------
#
# COUNT weights, with the first one again in the places behind them; LD is the width of the output. A layout is "row"
# where the columns of a weight lie side by side in memory, "column" where its rows do (the transposed weight of
# torch.nn.Linear), and "any" otherwise. WIDE converts tiles to float32 before they are multiplied, for the interpreter,
# whose products of bfloat16 are wrong. What changes from call to call and aligns nothing is not specialised.


@triton.jit
def _place(tile, ROWS, COLUMNS, GROUP: tl.constexpr):
    """Row and column of a tile. GROUP rows are walked together, column by column: what they share stays in L2."""
    span = GROUP * COLUMNS
    first = tile // span * GROUP
    height = tl.minimum(ROWS - first, GROUP)
    inside = tile % span
    return first + inside % height, inside // height


@triton.jit
def _pick(c, ends, values, COUNT: tl.constexpr):
    """Of one value for each weight, the one of the weight to which column tile c belongs."""
    picked = values[0]
    for i in tl.static_range(1, COUNT):
        picked = tl.where(c < ends[i - 1], picked, values[i])
    return picked


@triton.jit
def _ends(widths, BN: tl.constexpr, COUNT: tl.constexpr):
    """The column tiles of the weights, added up."""
    end = tl.cdiv(widths[0], BN)
    ends = (end,)
    for i in tl.static_range(1, COUNT):
        end += tl.cdiv(widths[i], BN)
        ends += (end,)  # type: ignore[assignment]
    return ends


@triton.jit
def _starts(zero, lengths, COUNT: tl.constexpr):
    """Where each begins that stands behind the others: zero, and their lengths added up."""
    starts = (zero,)
    for i in tl.static_range(1, COUNT):
        zero += lengths[i - 1]
        starts += (zero,)  # type: ignore[assignment]
    return starts


@triton.jit
def _whole(length, BY: tl.constexpr):
    """A length that BY divides, so that the compiler knows it: by itself it asks for 16 only."""
    if BY > 1:
        length = length // BY * BY
    return length


@triton.jit
def _take_over(LATE: tl.constexpr):
    """LATE: this kernel was launched before the one ahead had ended, and touches no memory until it has.

    Then it lets the next kernel be launched as early, which thus finds its place before this one is over.
    """
    if LATE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _store(out_ptr, y, m, n, M, N, LD):
    """A tile of the output; m and n are its rows and columns."""
    at = m.to(tl.int64)[:, None] * LD + n[None, :]  # [BM, BN]; int64: an output may have more than 2**31 elements
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _sum_of_parts(parts_ptr, m, n, M, N, LD, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """The parts of a tile in the order of K, whoever came last: the same bits in every run."""
    at = m.to(tl.int64)[:, None] * LD + n[None, :]  # [BM, BN]
    mask = (m < M)[:, None] & (n < N)[None, :]
    y = tl.zeros([BM, BN], tl.float32)
    for _ in tl.range(SPLIT, loop_unroll_factor=4):  # several under way at once
        # .cg: from L2, where the other programs' parts are; this multiprocessor's L1 may not know of them.
        y += tl.load(parts_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
        at += tl.cast(M, tl.int64) * LD
    return y


@triton.jit
def _summed(sums, BM: tl.constexpr, BN: tl.constexpr):
    """The sums [BK, BN] of each of few rows, added up over K: rows of one tile [BM, BN]."""
    row = tl.arange(0, BM)[:, None]
    y = tl.zeros([BM, BN], tl.float32)
    for i in tl.static_range(BM):
        y = tl.where(row == i, tl.sum(sums[i], 0)[None, :], y)
    return y


@triton.jit
def _rows_moved(out_ptr, in_ptr, ROWS, COLUMNS, REACH, PITCH, STEP, STRIDE, BR: tl.constexpr, BC: tl.constexpr):
    """A tile of a matrix of any strides, to where its rows begin PITCH apart; what lies up to REACH becomes zero.

    So stores are whole vectors: a mask that ends anywhere would make them single numbers.
    """
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)  # [BR]
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)  # [BC]
    row = (r < ROWS)[:, None]
    at = r[:, None] * STEP + c[None, :] * STRIDE
    x = tl.load(in_ptr + at, mask=row & (c < COLUMNS)[None, :], other=0.0)  # [BR, BC]
    tl.store(out_ptr + r[:, None] * PITCH + c[None, :], x, mask=row & (c < REACH)[None, :])


# Plans ---------------------------------------------------------------------------------------------------------------

STRATEGIES = ("fused", "views")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST = 4  # weights of one launch
_FEW = 64  # rows of x that one tile holds: then each weight is fetched once, however it lies
_MIDDLE = 512  # rows up to which rounds are counted, and costs are compared however many columns there are
_WITHIN = 0.01  # times that are closer count as equal, and then the kernel is ours


class Plan(NamedTuple):
    """How a product is launched."""

    kernel: str  # "tiles", "strided", or "torch": torch's own products, and then no more is said
    bm: int = 0  # the tile of the output
    bn: int = 0
    bk: int = 0  # the step along K
    group: int = 8  # rows of tiles that are walked together
    split: int = 1  # parts that a sum is cut into; 1 for tiles
    stages: int = 3  # steps whose tiles are under way at once
    warps: int = 8
    flat: bool = False  # fetch for the next tile while this one is finished
    bulk: int = 0  # in how many parts the copy engine stores a tile; 0 where threads store it
    waves: int = 1  # programs on each multiprocessor that walk over tiles; 0 for a program a tile
    swap: bool = False  # multiply transposes; of weights in one descriptor only, and so is the next
    late: bool = False  # be launched before the kernel ahead has ended


class Tuned(NamedTuple):
    """A plan that was tuned, and the time of torch's products in times of its own, where that was a choice."""

    plan: Plan
    torch: float | None


@contextlib.contextmanager
def _naming(file: pathlib.Path) -> Iterator[None]:
    """Inside, an error of a table that somebody edited or cut off names its file."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        what = f"no column {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{file}: not a table of `python -m fusebook.tune` ({what}); tune again") from error


def read(file: pathlib.Path) -> dict[tuple[str, str, str, str], Tuned]:
    """What ``python -m fusebook.tune`` has written, a row a plan, by capability, math, layout and class of shape.

    Empty where there is no such file.
    """
    if not file.exists():
        return {}
    found = {}
    with _naming(file), file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            key = row["capability"], row["math"], row["layout"], row["shape"]
            given: dict[str, Any] = {k: int(row[k]) for k in Plan._fields[1:] if row[k]}
            switches = {k: bool(given[k]) for k in ("flat", "swap", "late") if k in given}
            found[key] = Tuned(Plan(row["kernel"], **given | switches), float(row["torch"]) if row["torch"] else None)
    return found


@functools.cache
def _tuned(name: str) -> dict[tuple[str, str], dict[str, Tuned]]:
    """By capability and math, layout behind it; then by class of shape."""
    kinds: dict[tuple[str, str], dict[str, Tuned]] = {}
    rows = read(pathlib.Path(__file__).parent / "tuned" / f"{name}.csv")
    for (capability, math, layout, shape), tuned in rows.items():
        kinds.setdefault((capability, f"{math} {layout}"), {})[shape] = tuned
    return kinds


def shape_class(M: int, N: int) -> str:
    """The class of an output's shape, whose members share a plan; N are the columns of all weights together.

    ``"rows 16"``, ``"rows 32"`` or ``"rows 64"`` up to so many rows. Above, ``"2**k"`` with an odd k for sizes M * N
    from ``2**(k - 1)`` to below ``2**(k + 1)``; the first class, k = 15, takes what is smaller and the last, k = 27,
    what is larger. In float32 what is smaller than k = 23 is planned by costs.
    """
    for rows in (16, 32, 64):
        if M <= rows:
            return f"rows {rows}"
    return f"2**{min(27, max(15, (M * N).bit_length() - 1 | 1))}"


def _square_of(shape: str) -> int:
    """The side n of the problem in the middle of a class: n x n, with two weights of n x n."""
    return 2 ** ((int(shape.removeprefix("2**")) - 1) // 2)


def _nearest(shape: str, known: Mapping[str, Any]) -> str | None:
    """The class itself or, of what is larger than all that was tuned, the largest."""
    if shape in known or shape.startswith("rows"):
        return shape if shape in known else None
    smaller = [k for k in known if k.startswith("2**") and _square_of(k) < _square_of(shape)]
    return max(smaller, key=_square_of, default=None)


def _filled(M: int, N: int, plan: Plan, multiprocessors: int) -> float:
    """The share of its rounds over the multiprocessors that a plan spends on the output.

    The rest is lost where tiles hang over the edges, and in the last round, which is seldom full.
    """
    programs = plan.waves * multiprocessors
    rounds = triton.cdiv(triton.cdiv(M, plan.bm) * triton.cdiv(N, plan.bn), programs)
    return M * N / (rounds * programs * plan.bm * plan.bn)


def _of_rounds(M: int, N: int, plans: Sequence[Plan], multiprocessors: int, torch: bool) -> Plan:
    """Of some plans the one whose rounds over the multiprocessors cost least; with `torch`, or torch's two products.

    For few tiles of rows, where a round more is a large part of all. Costs are in quarters of a round of 128 x 128
    outputs, of which a smaller tile saves its products and not what surrounds them; torch's products fill their rounds
    and write what is read again. Fitted to layers of models of 72 to 512 rows on an H200.
    """

    def cost(plan: Plan) -> float:
        rounds = triton.cdiv(triton.cdiv(M, plan.bm) * triton.cdiv(N, plan.bn), multiprocessors)
        return rounds * (1 + 3 * plan.bm * plan.bn / 2**14)

    best = min(plans, key=cost)
    torchs = 1.8 + 4.3 * 64 * triton.cdiv(M, 64) * N / (multiprocessors * 2**14)
    return Plan("torch") if torch and torchs < cost(best) else best


# Tiles of products side by side for few tiles of rows, and what they cost: the numbers of a `Cost`.
_FEW_TILES = {
    Plan("tiles", 64, 64, 128, stages=3, warps=4, waves=0, late=True): (6.7, 0.17, 0.325, 0.93),
    Plan("tiles", 64, 128, 64, stages=4, warps=4, waves=0, late=True): (6.9, 0.117, 0.224, 1.56),
    Plan("tiles", 128, 128, 64, stages=4, warps=8, waves=0, late=True): (4.9, 0.014, 0.317, 3.9),
    Plan("tiles", 128, 256, 64, group=16, stages=4, warps=8, flat=True, bulk=2, late=True): (7.3, 0.06, 0.56, 3.9),
}


def _wider(name: str, M: int, N: int, plan: Plan, multiprocessors: int) -> Plan:
    """Tiles twice as wide than those of a plan, where that saves rounds enough: one takes as long as 1.8 others."""
    halves = 2 if name == "swiglu" else 1
    wide = list(_FEW_TILES)[-1]
    wide = wide._replace(bn=wide.bn // halves, bulk=wide.bulk // halves)
    if M <= _MIDDLE or (plan.bm, 2 * plan.bn) != (wide.bm, wide.bn):
        return plan
    rounds, fewer = (
        triton.cdiv(triton.cdiv(M, p.bm) * triton.cdiv(N // halves, p.bn), multiprocessors) for p in (plan, wide)
    )
    return wide if 1.8 * fewer < rounds else plan


class Cost(NamedTuple):
    """What a way to multiply costs, in microseconds; fitted by `fusebook.tune` to problems that were drawn."""

    plan: Plan
    start: float  # of a launch; of each product where they are torch's
    alone: float  # of a step along K of a multiprocessor's only program; of 1024 numbers of K where they are torch's
    each: float  # of a step of each program where it has several; of 2**30 products of numbers where they are torch's
    finish: float = 0.0  # of a program when its sum is there


#: Bytes in a microsecond: of what a product reads and writes, and of copies, which read and write. Microseconds of one
#: launch more beside others, and of sums in parts: counters, and programs that wait for each other's parts.
_READ, _COPIED, _BESIDE, _PARTS = 3.6e6, 3e6, 1.5, 4.0


def read_costs(file: pathlib.Path) -> dict[tuple[str, str, str], tuple[Cost, ...]]:
    """The costs of ways, a row each, by capability, math and how tiles are fetched; empty where there is no such file.

    "descriptors", or "pointers" of what no descriptor describes; "" are torch's products.
    """
    if not file.exists():
        return {}
    found: dict[tuple[str, str, str], list[Cost]] = {}
    with _naming(file), file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            given: dict[str, Any] = {k: int(row[k]) for k in Plan._fields[1:] if row[k]}
            plan = Plan(row["kernel"], **given | {k: bool(given[k]) for k in ("flat", "swap", "late") if k in given})
            key = row["capability"], row["math"], row["fetch"]
            found.setdefault(key, []).append(Cost(plan, *(float(row[k]) for k in Cost._fields[1:])))
    return {key: tuple(costs) for key, costs in found.items()}


@functools.cache
def _costs(name: str) -> dict[tuple[str, str, str], tuple[Cost, ...]]:
    return read_costs(pathlib.Path(__file__).parent / "tuned" / f"{name}_costs.csv")


def microseconds(
    cost: Cost, M: int, K: int, widths: Sequence[int], itemsize: int, multiprocessors: int, both: int = 1
) -> float:
    """What products of M rows and K take by one way, whose plan says in how many parts sums are cut.

    Programs beside each other on a multiprocessor hide what each waits for, up to where they share its units. `both` is
    2 for SwiGLU, which has two weights of each width and one output.
    """
    plan, N = cost.plan, sum(widths)
    reading = (M * K + both * K * N + M * N) * itemsize / _READ
    if not plan.bm:  # torch's products
        work = both * 64 * triton.cdiv(M, 64) * K * 64 * triton.cdiv(N, 64) / 2**30
        gate = _BESIDE + 3 * M * N * itemsize / _COPIED if both == 2 else 0.0
        count = both * len(widths)
        return cost.start * count + max(reading, cost.each * work) + cost.alone * K / 1024 * count + gate
    tiles = triton.cdiv(M, plan.bm) * sum(triton.cdiv(n, plan.bn) for n in widths)
    programs = triton.cdiv(tiles * plan.split, multiprocessors)
    steps = triton.cdiv(triton.cdiv(K, plan.bk), plan.split)
    walking = steps * max(cost.alone, cost.each * programs) + cost.finish * programs
    parts = _PARTS + 8 * both * plan.split * M * N / _COPIED if plan.split > 1 else 0.0
    return cost.start + max(walking, reading) + parts


def copying(M: int, K: int, widths: Sequence[int], itemsize: int, x: bool, weights: bool) -> float:
    """Microseconds of the copies of x, and of weights: of each a launch, which reads and writes it."""
    time = _BESIDE + 2 * M * K * itemsize / _COPIED if x else 0.0
    return time + (_BESIDE * len(widths) + 2 * K * sum(widths) * itemsize / _COPIED if weights else 0.0)


@functools.lru_cache(maxsize=4096)
def _cheapest(
    name: str, sizes: tuple[int, int], widths: tuple[int, ...], math: str, layout: str, there: tuple[bool, bool],
    hardware: tuple[tuple[int, int] | None, int], strategy: str, whole: bool = True,
) -> tuple[Plan, bool] | None:  # fmt: skip
    """Of the ways whose costs are known the plan of the cheapest, and whether it wants copies.

    None where none are known: few rows, and so many tiles that classes of shapes tell enough. Of these, rows of weights
    in TF32 that descriptors cannot fetch are turned to columns, for the largest tiles. `sizes` are M and K,
    `widths` the columns of each weight, of one where there are two alike for SwiGLU. `there`: whether descriptors
    describe x, and the weights. `whole`: these weights are all, so that sums can be cut.
    """
    (M, K), N, (capability, multiprocessors) = sizes, sum(widths), hardware
    if math not in ("float32", "tf32") or capability is None or M <= _FEW:
        return None
    costs, here = _costs(name), f"{capability[0]}{capability[1]}"
    if M > _MIDDLE and M * N >= 2**23:
        turned = (name, math, layout) == ("concat_gemm", "tf32", "row") and not all(there) and N >= 128
        known = [cost.plan for cost in costs.get((here, math, "descriptors"), ()) if turned]
        return (max(known, key=lambda plan: plan.bm * plan.bn), True) if known else None
    if layout == "row" and all(there) and K < 2048:  # descriptors fetch rows without copies, which was not timed
        return None
    itemsize, both = 4, 2 if name == "swiglu" else 1
    sizes_of_copies = M, K, both * widths, itemsize
    for_x, for_weights = copying(*sizes_of_copies, not there[0], False), copying(*sizes_of_copies, False, True)
    merged = (N,) if both == 1 and (layout == "column" or M > K) else widths
    ways: list[tuple[Cost, tuple[int, ...], float, bool]] = []  # with the columns, and the time, of what is copied
    for cost in costs.get((here, math, "descriptors"), ()) if layout != "any" else ():
        tiles = cost.plan.kernel == "tiles"
        # Tensor cores take TF32 along K only. Who reads by pointers needs no copies.
        if tiles and (layout == "row" or not there[1]):
            ways.append((cost, merged, for_x + for_weights, True))
        elif tiles or all(there):
            ways.append((cost, widths, for_x, not there[0]))
    if layout == "any" or not all(there):
        ways += [(cost, widths, 0.0, False) for cost in costs.get((here, math, "pointers"), ())]
    if ways and not strategy:
        for cost in costs.get((here, math, "library"), ()):
            # Queueing them takes the host longer than ours: they are to be faster by a tenth.
            cost = cost._replace(**{k: 1.1 * getattr(cost, k) for k in ("start", "alone", "each")})
            ways.append((cost, widths, 0.0, False))
            if both == 1 and layout != "any" and len(widths) > 1:  # weights side by side, and one product of them
                ways.append((cost._replace(plan=Plan("joined")), (N,), _PARTS + for_weights, False))
    best, found = float("inf"), None
    for cost, columns, before, move in ways:
        for split in (1, 2, 4, 8, 16, 32, 64):
            if split > 1 and (cost.plan.kernel != "strided" or not whole or 2 * split * cost.plan.bk > K):
                break
            cut = cost._replace(plan=cost.plan._replace(split=split))
            time = before + microseconds(cut, M, K, columns, itemsize, multiprocessors, both)
            if time < best:
                best, found = time, (cut.plan, move)
    return found


def _wanted(
    name: str, x: Tensor, weights: Sequence[Tensor], math: str, layout: str,
    hardware: tuple[tuple[int, int] | None, int], strategy: str, whole: bool = True,
) -> tuple[Plan, bool] | None:  # fmt: skip
    """What `_cheapest` finds for x and weights of one layout."""
    if strategy == "views" or math == "float64" or not x.shape[1]:  # a descriptor has no empty axis
        return None
    layout = layout if layout_of(x) == "row" else "any"
    there = _describable(x, "row"), all(_describable(w, layout) for w in weights)
    widths = tuple(w.shape[1] for w in (weights[:1] if name == "swiglu" else weights))
    return _cheapest(name, tuple(x.shape), widths, math, layout, there, hardware, strategy, whole)


def _by_vectors(M: int, math: str, layout: str, aligned: bool) -> bool:
    """Whether one or two rows are multiplied number by number.

    Reading the weights is all the work, and tensor cores take them by way of shared memory: columns that lie side by
    side, and what is loaded one by one.
    """
    if layout.startswith("column"):
        return M == 1 or (M == 2 and not (math == "half" and aligned))
    return M == 1 and layout.startswith("row") and not aligned


def _of_vectors(M: int, math: str, aligned: bool, halves: int) -> Plan:
    """Tiles of a weight that a thread has 16 numbers of, or 64 of half types that are loaded as vectors."""
    if math == "half" and aligned:
        return Plan("strided", M, max(8, 64 // (M * halves)), 128, warps=4)
    return Plan("strided", M, 16 if math == "half" and M == 1 else 16 // halves, 128, warps=4)


def _of_float32(name: str, M: int, N: int, kernel: str, multiprocessors: int) -> Plan:
    """Small tiles, several on a multiprocessor: one converts its numbers while another multiplies.

    Long steps where two programs a multiprocessor are all that there are; else what fills its rounds.
    """

    def rounds(bm: int, bn: int, beside: int) -> int:
        return triton.cdiv(triton.cdiv(M, bm) * triton.cdiv(N, bn), beside * multiprocessors)

    sizes = (64, 64, 64) if rounds(64, 64, 2) < 2.4 * rounds(128, 64, 3) else (128, 64, 32)
    if name == "swiglu":
        sizes = (64, 32, 64 if rounds(64, 64, 2) == 1 else 32)  # of either weight
    return Plan(kernel, *sizes, stages=3, warps=4, waves=0, late=kernel == "tiles")


def _worth_turning(sizes: tuple[int, int, int], math: str, layout: str, capability: tuple[int, int] | None) -> bool:
    """Whether weights in rows become columns first: tensor cores take TF32 along K only."""
    M, K, N = sizes
    return (math, layout) == ("float32", "row") and M >= 512 and M * K * N >= 2**31 and capability is not None


def _worth_moving(sizes: tuple[int, int, int], math: str, weights: bool, capability: tuple[int, int] | None) -> bool:
    """Whether what no descriptor describes is copied first: x, and with `weights` those, of a product of M, K and N.

    A copy moves a number twice, once for all products that it is a part of, and each of these waits less for it. x is
    small beside the weights, or what is fetched for each of its rows is much. Weights are worth it where more than one
    tile of rows fetches them. Either is one more launch, which small products are over before.
    """
    M, K, N = sizes
    if math not in ("half", "tf32"):  # float32 is torch's otherwise, which takes it as it lies
        few = M <= _FEW and not weights and M > 16 and K * N >= 2**23
        return math == "float32" and (few or (M > _FEW and M * K * N >= 2**27)) and capability is not None
    if capability is None:
        return M > 8  # so that small products show both ways
    if math == "tf32" and M <= _FEW:
        return not weights and K * N >= 2**25
    if M > 256 and N < 128 and (math == "half" or not weights):  # then reading x is all the work
        return False
    least = 2**28 if math == "half" else 2**29
    if weights:
        return M > _FEW and M * K * N >= least
    return K * N >= (2**23 if M <= 16 else 2**21) or M * K * N >= 2**29


def _math(dtype: torch.dtype, tf32: bool) -> str:
    return "half" if dtype.itemsize == 2 else "float64" if dtype == torch.float64 else "tf32" if tf32 else "float32"


def _gemm_plan(
    name: str,
    sizes: tuple[int, int],
    math: str,
    layout: str,
    aligned: bool,
    hardware: tuple[tuple[int, int] | None, int],
    strategy: str | None = "fused",
) -> Plan:
    """Choose the kernel and its constants.

    `name` is ``"concat_gemm"`` or ``"swiglu"``, which keeps two sums, so that its tiles are half as wide. `sizes` are
    M, and the columns of all weights together. `math` is ``"half"``, ``"tf32"``, ``"float32"`` or ``"float64"``, for
    which there is no kernel of ours. `layout` is that of the weights, ``"row"``, ``"column"`` or ``"any"``, and behind
    the former ``" short"`` where `_kind` says so. `aligned`: tensor descriptors can be made. `hardware`
    is the GPU's capability, None for the interpreter, and its multiprocessors. `strategy` is one of `STRATEGIES`; the
    faster where None.
    """
    if strategy == "views" or math == "float64":
        return Plan("torch")
    M, N = sizes
    capability, multiprocessors = hardware
    halves = 2 if name == "swiglu" else 1
    if capability is None:
        # The interpreter's cost is programs times operations. Several tiles and steps even where tests are small, and
        # now one way to store, now the other.
        if aligned:
            if 0 < M <= 2 and layout.startswith("column"):
                return Plan("strided", M, 16, 64, group=2, split=2)
            swap = name == "swiglu" and M <= 16
            return Plan("tiles", 16 if swap else 64, 64 // halves, 64, group=2, bulk=2 if M % 2 else 1, swap=swap)
        return Plan("strided", 16 if M <= 16 else 64, 256 // halves, 64, group=2, split=2 if M <= 16 else 1)
    if _by_vectors(M, math, layout, aligned):
        return _of_vectors(M, math, aligned, halves)
    tuned, here = _tuned(name), f"{capability[0]}{capability[1]}"
    layout, _, kind = layout.partition(" ") if aligned else ("any", "", "")
    shapes = tuned.get((here, f"{math} {layout}"), {}) | tuned.get((here, f"{math} {layout} {kind}"), {})
    if strategy is not None:
        shapes = {shape: row for shape, row in shapes.items() if row.plan.kernel != "torch"}
    if (name, math, layout) == ("swiglu", "half", "column") and _FEW < M <= _MIDDLE and shapes:
        plans = [shapes[shape].plan for shape in ("2**21", "2**23", "2**19")]
        plans.append(Plan("tiles", 64, 128, 64, stages=4))
        return _of_rounds(M, N // 2, plans, multiprocessors, strategy is None)
    if (shape := _nearest(shape_class(M, N), shapes)) is not None:
        plan, torchs = shapes[shape]
        if strategy is None and torchs is not None and plan.kernel == "tiles" and plan.waves and shape[0] == "2":
            # Torch has tiles of many sizes, so that its time is taken to follow the work; ours follows the rounds.
            n = _square_of(shape)
            noted = _filled(n, 2 * n // halves, plan, multiprocessors)
            if torchs * _filled(M, N // halves, plan, multiprocessors) / noted < 1 - _WITHIN:
                return Plan("torch")
        return _wider(name, M, N, plan, multiprocessors) if (math, aligned) == ("half", True) else plan
    if strategy is None and M * N >= 2**21 and (math, layout) == ("tf32", "any"):
        return Plan("torch")  # fed by pointers, ours is no match for torch's
    # Not tuned: at most 96 KiB of shared memory. A step of K that is 128 bytes wide fills whole lines of the cache.
    bk = 64 if math == "half" else 32
    many = name == "swiglu" and math == "float32" and aligned and N >= 64 * multiprocessors
    if M <= 16 or (M <= 64 and not many):
        # A tensor core multiplies 16 rows at least; few rows leave room for many weights under way.
        bm = 16 if M <= 16 else 32 if M <= 32 else 64
        if math == "float32" and aligned and (M <= 16 if name == "swiglu" else M > 16 or layout == "row"):
            bk = 64
        # Two sums of three products each, of numbers that come one by one, fill a thread's registers.
        narrow = name == "swiglu" and math == "float32" and not aligned and M > 16 and N <= 64 * multiprocessors
        return Plan("strided", bm, 16 if narrow else 64 // halves, bk, stages=3, warps=4)
    kernel = "tiles" if aligned else "strided"
    if math == "float32":
        return _of_float32(name, M, N, kernel, multiprocessors)
    if M * N < 2**21:  # few tiles: smaller ones, so that every multiprocessor has one
        return Plan(kernel, 64, 64 // halves, bk, stages=3, warps=4, waves=0)
    return Plan(kernel, 128, 128 // halves, bk, stages=2, warps=8, waves=0)


# Launchers -----------------------------------------------------------------------------------------------------------

_plan = functools.lru_cache(maxsize=4096)(_gemm_plan)


def layout_of(w: Tensor) -> str:
    """Which axis of a weight lies side by side in memory; an axis of length one may count as either."""
    K, N = w.shape
    rows, columns = w.stride()
    if (columns == 1 or N == 1) and (rows >= N or K == 1):
        return "row"
    if (rows == 1 or K == 1) and (columns >= K or N == 1):
        return "column"
    return "any"


def _leading(w: Tensor, layout: str) -> int:
    """The stride of the other axis. Of one row nobody steps to the next: what is aligned will do."""
    (rows, columns), (row, column) = w.shape, w.stride()
    if layout != "row":
        rows, columns, row = columns, rows, column
    return row if rows > 1 else triton.cdiv(columns, 64) * 64


def _describable(x: Tensor, layout: str) -> bool:
    """Whether a tensor descriptor can be made: rows that begin at multiples of 16 bytes."""
    if layout == "any":
        return False
    return x.data_ptr() % 16 == 0 and _leading(x, layout) * x.element_size() % 16 == 0


def _fetchable(
    x: Tensor, weights: Sequence[Tensor], layout: str, math: str, capability: tuple[int, int] | None, strategy: str,
    merge: bool = False, wanted: tuple[Plan, bool] | None = None,
) -> tuple[Tensor, Sequence[Tensor], bool, bool]:  # fmt: skip
    """x and weights for tensor descriptors, copied to where their rows are aligned if that pays, or to columns.

    Besides, whether they are aligned, and whether any was copied. `wanted`: a plan, and whether it wants copies.
    `merge`: what is copied becomes one weight; of rows, whose copies then begin anywhere, where the product is much
    larger than they are. It has whole tiles and is stored by the copy engine, where three kinds of edges took up to
    four times as long.
    """
    if layout == "any" or layout_of(x) != "row" or not x.shape[1]:  # a descriptor has no empty axis
        return x, weights, False, False
    (M, K), N = x.shape, sum(w.shape[1] for w in weights)
    if wanted is not None:
        turn = wanted[1] and wanted[0].kernel == "tiles" and layout == "row"
    else:
        turn = strategy != "views" and _worth_turning((M, K, N), math, layout, capability)
    move_x, move_weights = not _describable(x, "row"), turn or not all(_describable(w, layout) for w in weights)
    if not (move_x or move_weights):
        return x, weights, True, False
    layout = "column" if turn else layout
    in_rows = math == "float32" and layout == "row"  # others are torch's, which takes them as they lie
    if wanted is not None:
        move = wanted[1]
    else:
        worth = turn or _worth_moving((M, K, N), math, move_weights, capability)
        worth = worth and not (merge and _long(M, K, [w.shape[1] for w in weights], math, gpu(x.device)[1]))
        move = worth and strategy != "views" and not in_rows
    if not move:
        return x, weights, False, False
    if move_x:
        (x,) = _moved([x], "row")
    if move_weights:
        if merge and (layout, math) == ("row", "half") and len(weights) > 1 and M <= K:
            layout = "column"  # one weight, whose columns begin where descriptors can fetch them
        if merge and layout == "row" and len(weights) > 1 and M > K:
            weights = [_merged(weights)]
        elif merge and layout == "column":
            whole = _moved(weights, layout)
            weights = [whole[0].as_strided((K, N), whole[0].stride())]
        else:
            alike = all(w.shape == weights[0].shape for w in weights)  # and then one descriptor describes them
            weights = _moved(weights, layout) if alike else [_moved([w], layout)[0] for w in weights]
    return x, weights, True, True


def _long(M: int, K: int, widths: Sequence[int], math: str, multiprocessors: int) -> bool:
    """Whether half types have so few tiles with so long a K that sums are cut and no copy is waited for."""
    tiles = triton.cdiv(M, 64) * sum(triton.cdiv(n, 64) for n in widths)
    return math == "half" and _FEW < M <= _MIDDLE and K >= 2048 and 2 * tiles <= multiprocessors


def _cut(
    plan: Plan, M: int, K: int, widths: Sequence[int], math: str, aligned: bool, multiprocessors: int
) -> Plan:  # fmt: skip
    """The plan with its sums in parts, where few programs would walk a long K by pointers, each alone.

    Two programs for each multiprocessor, of four steps at least. Float32 waits longer for its numbers, and what is
    fetched one by one longest: more programs, and up to eight parts of two steps, or any number of them where one tile
    of 32 or 64 rows holds x. The parts cost about as much as six steps: counters, and what is written and read again.
    One or two rows have more of either.
    """
    if plan.kernel != "strided":
        return plan
    one_by_one = math == "half" and not aligned and M > 16
    tiles, steps = triton.cdiv(M, plan.bm) * sum(triton.cdiv(N, plan.bn) for N in widths), K // plan.bk
    if plan.bm < 16 or one_by_one:
        beside = 8 if not (math == "half" and aligned) else 4
        if plan.bm >= 16:
            beside = 2 if plan.bn > 32 else 3 if M > _FEW else 4
        most = min(beside * multiprocessors // max(1, tiles), steps // 2)
        return plan._replace(split=max(plan.split, 1 << max(0, most.bit_length() - 1)))
    beside, parts = 2, K // max(256, 4 * plan.bk)
    if math != "half" and not aligned and 16 < M <= _FEW:
        beside, parts = 4 if plan.bn < 32 else 2, K // (64 if math == "float32" else 128)
    elif not aligned or math == "float32":
        beside, parts = 4 if aligned else 16 if math == "half" else 8, max(parts, min(8, K // max(128, 2 * plan.bk)))
    most = min(beside * multiprocessors // max(1, tiles), parts)
    split = 1 << max(0, most.bit_length() - 1)
    return plan if split <= plan.split or steps - steps // split < 6 else plan._replace(split=split)


def _shared_out(name: str, M: int, K: int, widths: Sequence[int], math: str, aligned: bool, sms: int) -> Plan | None:
    """A plan by pointers, whose sums are cut, where so few tiles walk a long K that half of the GPU would have none.

    Of half types that descriptors could fetch. SwiGLU has few such tiles only where rows are few: its tiles have the
    columns of two weights. One row or two are multiplied without tensor cores.
    """
    few = 2 < M <= _FEW if name == "swiglu" else M > 32
    if math != "half" or not aligned or K < 2048 or not few:
        return None
    bm, bn = 16 if M <= 16 else 32 if M <= 32 else 64, 32 if name == "swiglu" else 64
    tiles = triton.cdiv(M, bm) * sum(triton.cdiv(n, bn) for n in widths)
    if 2 * tiles > sms:
        return None
    split = 1 << (min(2 * sms // tiles, K // 256).bit_length() - 1)
    return Plan("strided", bm, bn, 64, split=split, stages=4, warps=4)


def _by_torch(
    name: str, M: int, K: int, N: int, math: str, aligned: bool, layout: str, one_by_one: bool
) -> bool:  # fmt: skip
    """Whether torch multiplies float32 for many rows: by pointers ours is slow, and so it is where weights lie in rows.

    Tensor cores take TF32 along K only, so that rows of weights would go through registers, once for each product; they
    are not worth turning here, see `_worth_turning`. `one_by_one`: numbers of weights cannot be loaded as vectors.
    """
    if aligned and layout == "row" and math in ("float32", "tf32") and 32 < M <= _FEW and K * N >= 2**24:
        return True
    if math != "float32":
        return False
    if aligned:
        return layout == "row" and M > _FEW and M * K * N >= 2**30
    most = 2**22
    if M > 32 and N >= 2048 and name == "swiglu" and one_by_one:
        most = 2**21
    elif M <= 32 and name == "concat_gemm":  # one tile of 32 rows
        most = 2**24
    return M > _FEW or (M > 16 and K * N >= most)


def _moved(matrices: Sequence[Tensor], layout: str) -> list[Tensor]:
    """Copies whose rows, or columns, begin at whole lines of the cache, below each other in one memory.

    Their rows, or columns, are of one length.
    """
    turned = [m if layout == "row" else m.mT for m in matrices]
    lengths, columns = [len(t) for t in turned], turned[0].shape[1]
    line = 128 // matrices[0].element_size()
    pitch = triton.cdiv(columns, line) * line
    memory = empty((sum(lengths), pitch), matrices[0].dtype, matrices[0].device)
    wide = min(256, triton.next_power_of_2(columns))
    tall = (2**16 if INTERPRETED else 8192) // wide
    for place, t in zip(memory.split(lengths), turned, strict=True):
        launch(
            _rows_moved, (triton.cdiv(len(t), tall), triton.cdiv(columns, wide)),
            place, t, len(t), columns, pitch, pitch, *t.stride(), BR=tall, BC=wide, num_warps=8,
        )  # fmt: skip
    copies = memory[:, :columns].split(lengths)
    return [copy if layout == "row" else copy.mT for copy in copies]


def _merged(weights: Sequence[Tensor]) -> Tensor:
    """A copy of weights side by side in one, whose rows begin at whole lines of the cache."""
    K, N = len(weights[0]), sum(w.shape[1] for w in weights)
    line = 128 // weights[0].element_size()
    pitch = triton.cdiv(N, line) * line
    memory = empty((K, pitch), weights[0].dtype, weights[0].device)
    start = 0
    for i, w in enumerate(weights):
        columns = w.shape[1]
        reach = columns if i + 1 < len(weights) else pitch - start
        wide = min(256, triton.next_power_of_2(reach))
        tall = (2**16 if INTERPRETED else 8192) // wide
        launch(
            _rows_moved, (triton.cdiv(K, tall), triton.cdiv(reach, wide)),
            memory[:, start:], w, K, columns, reach, pitch, *w.stride(), BR=tall, BC=wide, num_warps=8,
        )  # fmt: skip
        start += columns
    return memory[:, :N]


def _options(plan: Plan, dtype: torch.dtype, math: str) -> dict[str, Any]:
    """The constants that all kernels share."""
    return {
        "BM": plan.bm,
        "BN": plan.bn,
        "BK": plan.bk,
        "GROUP": plan.group,
        "PRECISION": "tf32x3" if math == "float32" else "tf32",
        "WIDE": INTERPRETED and dtype == torch.bfloat16,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }


def _together(matrices: Sequence[Tensor], layout: str) -> int:
    """How many numbers, side by side in memory, are loaded as one, beyond what the compiler sees by itself."""
    if layout == "any" or any(m.data_ptr() % 16 for m in matrices):
        return 1
    lengths = [length for m in matrices for length in (m.shape[layout == "row"], _leading(m, layout))]
    if all(length % 16 == 0 for length in lengths):
        return 1
    most = 16 // matrices[0].element_size()
    return min(length & -length if length else most for length in (*lengths, most))


def _one_by_one(weights: Sequence[Tensor], layout: str) -> bool:
    """Whether numbers of weights cannot be loaded as vectors."""
    return _together(weights, layout) == 1 and not _describable(weights[0], layout)


def _by_words(x: Tensor, weights: Sequence[Tensor], layout: str) -> dict[str, int]:
    """How a kernel by pointers is told how many numbers of x and of the weights it may load as one.

    Numbers of two bytes that are loaded one by one cannot be under way ahead: copies to shared memory have four.
    """
    by = {"X_BY": _together([x], layout_of(x) if layout_of(x) == "row" else "any"), "W_BY": _together(weights, layout)}
    return {name: numbers for name, numbers in by.items() if numbers > 1}


def _late(plan: Plan, x: Tensor) -> dict[str, bool]:
    """How a kernel is launched that waits by itself for the one ahead, where the GPU can: Hopper and later."""
    capability, _ = gpu(x.device)
    late = plan.late and capability is not None and capability >= (9, 0)
    return {"LATE": True, "launch_pdl": True} if late else {}


def _programs(plan: Plan, tiles: int, device: torch.device) -> int:
    return min(tiles, plan.waves * gpu(device)[1]) if plan.waves else tiles


def _tiles_of(x: Tensor, layout: str, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of a matrix, or of its transpose where it is stored by columns: the last axis is dense."""
    sizes, tile = (x.shape, [rows, columns]) if layout == "row" else (x.shape[::-1], [columns, rows])
    return TensorDescriptor(x, list(sizes), [_leading(x, layout), 1], tile)


def _stack(weights: Sequence[Tensor], layout: str) -> tuple[int, int] | None:
    """The distance between weights, in elements, where it is always the same, and whether it leads backwards.

    Two weights of one shape are one tensor with three axes, wherever in memory they are.
    """
    first = weights[0]
    if any(w.shape != first.shape or _leading(w, layout) != _leading(first, layout) for w in weights):
        return None
    if len(weights) == 1:
        return 16 // first.element_size(), 0
    distances = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(weights)}
    distance = distances.pop()
    # Descriptors take strides from 16 bytes up to 2**40.
    if distances or not 16 <= abs(distance) < 2**40:
        return None
    return (Distance(weights[1], first), len(weights) - 1) if distance < 0 else (Distance(first, weights[1]), 0)


def _places(weights: Sequence[Tensor]) -> Hashable:
    """How weights lie to each other, as far as `_stack` asks: plans compute the distance itself."""
    starts = [w.data_ptr() for w in weights if w.numel()]
    distances = [b - a for a, b in itertools.pairwise(starts)]
    directions = [d > 0 if 16 <= abs(d) < 2**40 else None for d in distances]
    return (*directions, *[a == b for a, b in itertools.pairwise(distances)])


def _kind(x: Tensor, weights: Sequence[Tensor], layout: str) -> str:
    """What makes an aligned product slower than others of its size, as a word behind the layout.

    " short": rows that do not begin at multiples of 128 bytes, so that a fetch touches two lines of the cache instead
    of one.
    """
    pitches = [_leading(x, "row"), *(_leading(w, layout) for w in weights)]
    return " short" if any(pitch * x.element_size() % 128 for pitch in pitches) else ""


def _workspace(plan: Plan, tiles: int, sums: int, out: Tensor) -> tuple[Tensor, Tensor, dict[str, bool]]:
    """Memory for the parts of sums, and a counter for each tile, at zero; `out` where sums have no parts.

    Besides, how the kernel is launched that takes them: where the GPU can, it multiplies while the zeros are written.
    """
    if plan.split == 1:
        return out, out, {}
    parts, counts = side_by_side(out.device, ((plan.split * sums,), torch.float32), ((tiles,), torch.int32))
    early = overlapping(out.device)
    launch(fill, (triton.cdiv(tiles, 1024),), counts, tiles, BLOCK=1024, EARLY=bool(early))
    return parts, counts, {"LATE": True, **early} if early else {}


def _tf32_allowed() -> bool:
    """Whether torch multiplies float32 in TF32 by itself."""
    matmul = torch.backends.cuda.matmul
    if torch.compiler.is_compiling():  # what is traced can ask for this one only
        return matmul.allow_tf32
    return matmul.fp32_precision == "tf32"  # the other one cannot be asked where somebody has set this one


def _asked(x: Tensor, weights: Sequence[Tensor], tf32: bool | None) -> Hashable:
    """What a plan depends on besides what is seen of each argument: where weights lie, and torch's choice of TF32."""
    return _places(weights), tf32 is None and x.dtype is torch.float32 and _tf32_allowed()


@contextlib.contextmanager
def torch_in_tf32(on: bool) -> Iterator[None]:
    """Torch's own products of float32 in TF32, or not."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if on == (before == "tf32"):
        yield
        return
    try:
        matmul.fp32_precision = "tf32" if on else "ieee"
        yield
    finally:
        matmul.fp32_precision = before


def _mm(x: Tensor, w: Tensor, out: Tensor, tf32: bool) -> None:
    if tf32 == (torch.backends.cuda.matmul.fp32_precision == "tf32"):  # to enter a context takes as long as half of it
        torch.mm(x, w, out=out)
        return
    with torch_in_tf32(tf32):
        torch.mm(x, w, out=out)


def _product(x: Tensor, w: Tensor, out: Tensor, tf32: bool) -> None:
    """Torch's product, written where it is wanted."""
    if x.dtype == torch.float32:
        apply(_mm, x, w, out, tf32)
    else:
        apply(torch.mm, x, w, out=out)


def _takes_tf32(name: str, x: Any, tf32: Any, strategy: Any, **others: Any) -> bool:
    """Validate what both operators take; return whether float32 is multiplied in TF32. See `shapes` for the others."""
    one_of(name, "strategy", strategy, (None, *STRATEGIES), "None chooses")
    shapes(name, x=(x, "[..., K]", _DTYPES), **others)
    if tf32 is not None and not isinstance(tf32, bool):
        raise TypeError(f"{name}: expected tf32 to be True, False or None, got {tf32!r}; None follows torch's setting")
    if x.dtype == torch.float64 and strategy == "fused":
        raise TypeError(
            f"{name}: expected float16, bfloat16 or float32 for the strategy 'fused', got torch.float64; leave the "
            "strategy at None, which multiplies float64 by torch's products"
        )
    if x.dtype != torch.float32:
        return False
    return _tf32_allowed() if tf32 is None else tf32


def _matrix(x: Tensor) -> Tensor:
    """All axes but the last as one."""
    if x.dim() == 2:
        return x
    shape = x.shape[:-1].numel(), x.shape[-1]
    try:
        return x.view(shape)
    except RuntimeError:  # axes that no stride can fold
        return apply(Tensor.reshape, x, shape)
