"""How the nearest of k centres is found: which of the ways, by about how long each takes, and how it is cut.

What is weighed are the sizes alone. Microseconds are those of an H200.
"""

from __future__ import annotations

import math

import torch
import triton

from ._points import Plan

__all__ = ["bound", "kmeans_plan", "loose"]

#: Few centres, of which each has sums of its own in registers.
_EACH = 16

#: GPUs whose tensor cores multiply float64 about as fast as others multiply float32.
_DOUBLES = ((8, 0), (9, 0), (10, 0))


def loose(precision: str, d: int) -> float:
    """The largest relative error of a product's term: what both factors lose, and what the sum of d terms does.

    Rounded to TF32, a factor is off by 2**-11 at most. Three products of what TF32 keeps and of what it cuts off, which
    is cut itself, are off by 2**-20 three times. Tensor cores cut sums, too: 2**-23 for every eight terms.
    """
    if precision == "ieee":  # of float64, whose factors lose nothing, and neither do the squares beside it
        return (d + 16) * 2.0**-53
    sums = triton.cdiv(d, 8) * 2.0**-23
    return 2.0**-10 + 2.0**-22 + sums if precision == "tf32" else 3 * 2.0**-20 + 3 * sums


def bound(precision: str, d: int) -> float:
    """What a difference of two squared distances by a product may be wrong by, in units of the largest |c|**2.

    Both may be wrong by twice the product's error, |x| |c| times `loose`, and |c|**2 as much, with |x| at most so many
    times the largest |c|. Points that are farther from the origin than that are far from all centres, and relative to
    these distances the error is less than differences round.
    """
    return 4 * loose(precision, d) * (1 + (4 if precision == "ieee" else 40))


def _pairs_plan(n: int, d: int, k: int) -> tuple[float, Plan]:
    """How points of few coordinates are compared with many centres, and about how long that takes.

    A thread has eight pairs of a point and a centre. All of a program's points share what is loaded of a centre, so it
    has as many of them as leave programs enough for a GPU; where these are few all the same, a thread has 32 pairs, and
    a program waits less often for centres.
    """
    wide = triton.next_power_of_2(k)
    block = max(1, min(triton.next_power_of_2(n) // 512, 128, max(32, 2048 // wide)))
    block_k = min(wide, max(1, (4096 if block >= 16 and n < 288 * block else 1024) // block))
    tiles = triton.cdiv(k, block_k)
    plan = Plan("pairs", block, block_k, steps=tiles, warps=8 if block_k == 1024 else 4)
    return 6 + 0.35 * tiles + n * tiles * block_k * (2 * d + 5) / 20e6 + n * (d + 12) / 1e6, plan


def _some_plan(n: int, d: int, k: int) -> tuple[float, Plan]:
    """How few points, or few for so many centres, are compared by differences, and about how long that takes.

    A program loads a tile of centres after the other, which is a latency each; all of them compare pairs of coordinates
    at some rate, the faster the more points share a centre, and add up what threads have of a pair of a point and a
    centre.
    """
    found = []
    for block, chunk, warps, rate in (
        (1, 512, 4, 0.9e6), (2, 1024, 4, 0.9e6), (4, 256, 4, 1.5e6), (16, 64, 4, 2.3e6),
        *([(1, 4096, 16, 0.9e6)] if n * k <= 4 else ()),
    ):  # fmt: skip
        block, chunk = min(block, triton.next_power_of_2(n)), min(chunk, triton.next_power_of_2(d))
        block_k = max(1, min(triton.next_power_of_2(k), 1024 * warps // (block * chunk)))
        rate /= 2 if k <= 4 else 1
        tiles = triton.cdiv(k, block_k)
        steps = triton.cdiv(tiles, min(tiles, triton.cdiv(600, triton.cdiv(n, block))))
        pieces = triton.cdiv(d, chunk)
        work = n * k * (pieces * chunk / rate + (7e-6 if chunk <= 8 else 25e-6))
        plan = Plan("some", block, block_k, chunk, steps=steps, warps=warps)
        found.append((6 + max(0.7 * steps * pieces, work), plan))
    return min(found, key=lambda choice: choice[0])


def _product_plan(n: int | None, d: int, k: int, doubles: bool) -> Plan:
    """The product's tiles; where programs would be too few to keep the GPU busy, they share out the centres."""
    block_k = min(64, max(16, triton.next_power_of_2(k)))
    chunk = max(16, min(32 if block_k <= 32 else 16, triton.next_power_of_2(d)))
    tiles = triton.cdiv(k, block_k)
    steps = tiles
    block = 64
    if n is not None and 32 < k <= 64 and d > 512 and triton.cdiv(n, 64) < 528:
        block, chunk = 32, 32  # no centres to share out, so points are
    elif n is not None and k > 64 and triton.cdiv(n, 64) * tiles < 132:  # tiles for less than all multiprocessors
        block, block_k, chunk, steps = 32, 32, max(chunk, min(32, triton.next_power_of_2(d))), 1
    elif n is not None and triton.cdiv(n, 64) < 900:
        steps = triton.cdiv(tiles, min(tiles, triton.cdiv(1056, triton.cdiv(n, block))))
    return Plan("product", block, block_k, chunk, steps=steps, stages=3, precision="ieee" if doubles else "tf32x3")


def _rowwise(d: int, k: int, align: int, size: int) -> bool:
    """Whether pieces of a point are long: they are loaded by less than 16 bytes a thread, and there are few sums."""
    return k <= 4 and align * size < 16 and d > 32


def _microseconds(how: str, n: int, d: int, k: int, size: int) -> float:
    """About how long the other plans take on an H200: in all of them a program goes through all centres."""
    align = math.gcd(16 // size, d)  # coordinates that are loaded at once
    if how == "few":
        return 5 + max(0 if k * d <= 32 else k * (0.005 + 0.027 * d), n * k * (2 * d + 5) / 22e6)
    if how == "each":
        whole = align * size == 16 or _rowwise(d, k, align, size)
        return 5 + 0.15 * k + max(0.4 * d / (32 * align), n * d * size / (2.5e6 if whole else 0.8e6))
    if how == "screen":
        return 1.5 * (25 + 0.035 * k + n * d * k / 60e6)
    programs, block_k = triton.cdiv(n, 64), min(64, max(16, triton.next_power_of_2(k)))
    tiles = programs * triton.cdiv(k, block_k)
    widened = n * d * 6 / 3e6 if size == 2 else 0
    # Of few coordinates, to ask who is nearest is most of it; they are multiplied in sixteens.
    work = tiles * 64 * block_k * max(d / 19e6 + 0.4e-6, triton.cdiv(d, 16) * 16 / 26e6 + 2.9e-6)
    return 15 + widened + 0.004 * programs + max(0.03 * d, n * d * size / 3.6e6, work)


def kmeans_plan(
    n: int | None, d: int, k: int, dtype: torch.dtype, label_size: int, capability: tuple[int, int] | None,
    dense: bool = True, how: str | None = None,
) -> Plan:  # fmt: skip
    """Choose how labels of so many bytes are found; `capability` is None in the interpreter, where programs cost.

    Without `n` the choice is the same for any number of points, and a point's label does not depend on who else is
    there. Points that are not `dense`, or not aligned, are copied first except for a product and where they are few.
    """
    size = dtype.itemsize
    align = math.gcd(16 // size, d)  # coordinates that are loaded at once
    product = _product_plan(n, d, k, capability in (None, *_DOUBLES) or dtype == torch.float64)
    if how is None:
        roomy = d <= 64 or (d <= 256 and capability is not None and capability[0] in (9, 10))
        ways = ["few"] if d <= 8 else ["each"] if k <= (_EACH if align * size >= 4 else _EACH // 4) else []
        if k > 64 and d > 8 and roomy and dtype == torch.float32:
            ways.append("screen")
        if n is None or capability is None:
            how = [*ways, "product"][0]
        else:
            copied = 0 if dense else 2.5 + n * d * size / 0.8e6  # a launch, and what it moves
            found = [(_microseconds(way, n, d, k, size) + copied, way) for way in ways]
            found.append((_microseconds("product", n, d, k, size), "product"))
            us, how = min(found)
            others = [_some_plan(n, d, k), *([_pairs_plan(n, d, k)] if d <= 8 else ())]
            if (other := min(others, key=lambda choice: choice[0]))[0] < us:
                return other[1]
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
        if _rowwise(d, k, align, size):
            chunk = min(256, triton.next_power_of_2(d))
            block = 16 if chunk < 256 else 8
        stages, warps = (1, 4) if d <= chunk else (3, 4) if d <= 3 * chunk else (3, 2)
        return Plan(how, block, chunk=chunk, stages=stages, warps=warps)
    if how == "product":
        # Of odd rows a number at a time is loaded. Where the product takes long, a tenth of it pays for a copy.
        if (
            n is not None and capability is not None and dtype == torch.float32 and align == 1
            and _microseconds(how, n, d, k, size) > 50 + n * d / 4e4
        ):  # fmt: skip
            steps = triton.cdiv(product.steps, 2 if triton.cdiv(n, product.block) < 900 else 1)
            return product._replace(steps=steps, pad=16)
        return product
    chunk = max(16, triton.next_power_of_2(d))
    if capability is None:
        return Plan(how, block=64, block_k=32, chunk=chunk)
    if chunk < 128:
        return Plan(how, block=128, block_k=64, chunk=chunk, stages=3)
    if chunk == 128:
        return Plan(how, block=128, block_k=128, chunk=chunk, stages=2, warps=8)
    return Plan(how, block=64, block_k=64, chunk=chunk, stages=2)  # all that shared memory holds
