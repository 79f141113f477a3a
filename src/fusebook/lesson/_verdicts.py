"""What records say of all operators: to which way of computing a reader may turn, and which is best where.

Two clocks decide. ``cold`` is the device's. ``paid`` is the caller's: the larger of what the host and what the device
needs for one of many calls, see `fusebook.tables.paid`. Medians within 2 % are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pandas as pd

from fusebook import cards, tables
from fusebook.measure import bench
from fusebook.measure.op import Op

__all__ = ["GROUPS", "choices", "compared", "group", "ours"]

#: What one would use instead, and what is meant by each.
GROUPS = ("torch", "torch.compile", "libraries")


def group(op: Op, variant: str) -> str:
    """To which of the ways that a reader chooses from a variant belongs.

    Parameters
    ----------
    variant : str
        A name of its card, or of a record of it.

    Returns
    -------
    str
        ``ours``; one of `GROUPS`; empty for other variants of ours, for what computes on the CPU, for a kernel that a
        page wrote in CUDA C, and for what its card no longer has. What needs another package than torch is a library;
        what torch compiles anew for every shape is torch.compile, in whatever mode.
    """
    if variant.startswith("fusebook"):
        return "ours" if variant == "fusebook" else ""
    way = op.variants.get(variant.removesuffix(bench.AS_INSTALLED))
    if way is None or way.on_cpu or "cupy" in way.needs:
        return ""
    if set(way.needs) - {"cuda"}:
        return "libraries"
    return "torch.compile" if way.recompiles else "torch"


def compared(op: Op, frame: pd.DataFrame, groups: Sequence[str] = GROUPS) -> pd.DataFrame:
    """Ours and the ways of some groups that compute by the same arithmetic."""
    alike = tables.alike(_called(frame))
    groups_of = alike["variant"].map(lambda name: group(op, name))
    return alike[groups_of.isin(["ours", *groups])].assign(group=groups_of)


def _called(frame: pd.DataFrame) -> pd.DataFrame:
    """Results in which ours is what a caller gets: a launcher may choose a library's product over the kernel."""
    chosen = frame["variant"].eq("fusebook (chosen)") & frame["status"].eq("ok")
    at = pd.MultiIndex.from_frame(frame[["dtype", *tables.dims(frame)]].astype(str))
    bare = frame["variant"].eq("fusebook") & at.isin(at[chosen])
    return frame[~bare].replace({"variant": {"fusebook (chosen)": "fusebook"}}) if chosen.any() else frame


def ours(found: Mapping[str, pd.DataFrame]) -> list[Op]:
    """The operators that have a record and a variant of our own."""
    return [op for op in cards.OPS.values() if op.name in found and found[op.name]["variant"].eq("fusebook").any()]


def choices(op: Op, frame: pd.DataFrame, kind: str = "paid") -> pd.DataFrame:
    """Which way to take at each size: a row a point, the smallest first.

    Parameters
    ----------
    frame : pandas.DataFrame
        Results of `op`.
    kind : str
        Of `fusebook.tables.KINDS`.

    Returns
    -------
    pandas.DataFrame
        Indexed by sizes and dtype: the least time of each of `GROUPS` and of ``ours`` in microseconds, ``best``, the
        variant that takes the least, and ``take``, what is within 2 % of it: torch, torch.compile, the fastest library
        by its name, and ours, in this order.
    """
    every = compared(op, frame)
    every = every.assign(size=tables.label(every))
    ways = tables.timed(every, kind)
    keys, column = ["size", "dtype"], tables.column(kind)
    # Where ours is right and has no time by this clock, the others were timed on another day: nobody wins unopposed.
    right, timed = (
        pd.MultiIndex.from_frame(rows.loc[rows["group"].eq("ours") & rows["status"].eq("ok"), keys])
        for rows in (every, ways)
    )
    ways = ways[~pd.MultiIndex.from_frame(ways[keys]).isin(right.difference(timed))]
    columns = [*GROUPS, "ours"]
    order = ways.sort_values("roof_us", kind="stable").drop_duplicates(keys).set_index(keys).index
    fastest = ways.sort_values(column, kind="stable")
    wide = fastest.pivot_table(column, keys, "group", aggfunc="min").reindex(index=order, columns=columns)
    least = wide.min(axis=1)
    of_libraries = fastest[fastest["group"] == "libraries"].drop_duplicates(keys).set_index(keys)["variant"]
    names = of_libraries.reindex(order)
    within = wide.le((1 + tables.WITHIN) * least, axis=0)
    wide["best"] = fastest.drop_duplicates(keys).set_index(keys)["variant"].reindex(order)
    wide["take"] = [
        ", ".join([library if name == "libraries" else name for name in itertools.compress(columns, row)])
        for library, row in zip(names, within.to_numpy(), strict=True)
    ]
    wide.columns.name = None
    return wide
