"""Should one write a kernel? What records answer: how ours stands against torch, torch.compile and libraries.

Two clocks decide. ``cold`` is the device's. ``paid`` is the caller's: the larger of what the host and what the device
needs for one of many calls, see `fusebook.tables.paid`. Medians within 2 % are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from fusebook import bench, cards, tables
from fusebook.op import Op

__all__ = [
    "CLOCKS",
    "GROUPS",
    "Standing",
    "Verdict",
    "choices",
    "group",
    "page_of",
    "shares",
    "uses",
    "verdict",
    "verdicts",
]

#: What one would use instead, and what is meant by each.
GROUPS = ("torch", "torch.compile", "libraries")
#: The clocks that a verdict is given by, in words.
CLOCKS = {"cold": "on the device", "paid": "for the caller", "call": "for one call that is waited for"}


def group(op: Op, variant: str) -> str:
    """To which of the ways that a reader chooses from a variant belongs.

    Parameters
    ----------
    op : Op
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


def _ways(op: Op, frame: pd.DataFrame, groups: Sequence[str] = GROUPS) -> pd.DataFrame:
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


@dataclass(frozen=True)
class Standing:
    """How ours stands against the fastest of some ways, by one clock.

    Attributes
    ----------
    wins, ties, losses : int
        Points at which it is faster, equal within 2 % and slower.
    least, median, most : float
        Our time over that of the fastest other, over all points; NaN where there are none.
    """

    wins: int
    ties: int
    losses: int
    least: float = math.nan
    median: float = math.nan
    most: float = math.nan

    @property
    def points(self) -> int:
        """At how many points both were timed."""
        return self.wins + self.ties + self.losses

    @property
    def range(self) -> str:
        """Our time over the other's, from the best point to the worst."""
        if not self.points:
            return "none measured"
        return f"{_factor(self.least)} to {_factor(self.most)}" if self.points > 1 else _factor(self.most)

    @property
    def middle(self) -> str:
        """The same in the median."""
        return _factor(self.median)

    @property
    def counts(self) -> str:
        """Wins, ties and losses in words."""
        return f"{self.wins} won, {self.ties} equal, {self.losses} lost" if self.points else ""


def _factor(value: float) -> str:
    return f"{value:.2f}" if value >= 0.095 else f"{value:.1g}"


def _standing(table: pd.DataFrame) -> Standing:
    ratios = table["times as long"]
    if ratios.empty:
        return Standing(0, 0, 0)
    wins, losses = int((ratios < 1 - tables.WITHIN).sum()), int((ratios > 1 + tables.WITHIN).sum())
    spread = float(ratios.min()), float(ratios.median()), float(ratios.max())
    return Standing(wins, len(ratios) - wins - losses, losses, *spread)


@dataclass(frozen=True)
class Verdict:
    """What a record says about one operator.

    Attributes
    ----------
    op : Op
    torch, libraries : mapping of str to Standing
        By each of `CLOCKS`, against the best of torch and torch.compile, and against the best library.
    decides : str
        The clock that the word goes by: ``paid``, or ``cold`` where only the device's clock was recorded.
    start : str or None
        From which problem on it pays for the caller, against torch and torch.compile, see `fusebook.tables.pays_from`.
    word : str
        Whether to write the kernel: ``yes``, ``yes, from a size on``, ``yes, but not in float32``, ``yes at most
        sizes``, ``no gain``, ``no``, ``it depends`` or ``not measured``. What the caller pays decides, against torch
        and torch.compile: yes means faster at more than half of the points and slower at none. By the device's clock it
        ends in ``, on the device``.
    library : str
        The library that beats ours for the caller at more points than it loses, if one does.
    named : tuple of str
        The libraries that gave a right result.
    """

    op: Op
    torch: Mapping[str, Standing]
    libraries: Mapping[str, Standing]
    decides: str
    start: str | None
    word: str
    library: str = ""
    named: tuple[str, ...] = ()


def page_of(op: Op) -> int:
    """The number of the page that tells of an operator.

    Parameters
    ----------
    op : Op

    Returns
    -------
    int
        Of the module of its card.
    """
    return next(module.PAGE for module, family in cards.FAMILIES.items() if op.name in {card.name for card in family})


def verdict(op: Op, frame: pd.DataFrame) -> Verdict:
    """What results say about an operator.

    Parameters
    ----------
    op : Op
    frame : pandas.DataFrame
        Of `fusebook.record.read`, or of `fusebook.bench.run`.

    Returns
    -------
    Verdict
    """
    plain, libraries = _ways(op, frame, GROUPS[:2]), _ways(op, frame, GROUPS[2:])
    behind = {kind: tables.behind(plain, kind=kind) for kind in CLOCKS}
    torch = {kind: _standing(table) for kind, table in behind.items()}
    start = tables.pays_from(plain, kind="paid")
    decides = "cold" if torch["cold"].points and not torch["paid"].points else "paid"
    return Verdict(
        op,
        torch,
        {kind: _standing(tables.behind(libraries, kind=kind)) for kind in CLOCKS},
        decides,
        start,
        _word(torch[decides], behind[decides], start) + (", on the device" if decides == "cold" else ""),
        _library(op, frame),
        tuple(libraries.loc[(libraries["group"] == "libraries") & (libraries["status"] == "ok"), "variant"].unique()),
    )


def _word(standing: Standing, behind: pd.DataFrame, start: str | None) -> str:
    """The answer in a word or two, see `Verdict`."""
    if not standing.points:
        return "not measured"
    if standing.wins * 2 > standing.points:
        if not standing.losses:
            return "yes"
        lost = behind["times as long"] > 1 + tables.WITHIN
        # Where the losses are the smallest problems of all, a size tells them apart; where they are of one dtype, that.
        if start and lost.to_numpy().argmin() == lost.sum():
            return "yes, from a size on"
        dtypes = behind.index.get_level_values("dtype")
        bad = set(dtypes[lost])
        if len(bad) == 1 and len(set(dtypes)) > 1:
            return f"yes, but not in {bad.pop()}"
        return "yes at most sizes"
    if standing.losses * 2 >= standing.points:
        return "no"
    return "it depends" if standing.wins + standing.losses > standing.ties else "no gain"


def _library(op: Op, frame: pd.DataFrame) -> str:
    ways = _ways(op, frame, GROUPS[2:])
    for name in dict.fromkeys(ways.loc[ways["group"] == "libraries", "variant"]):
        standing = _standing(tables.behind(ways[ways["variant"].isin(["fusebook", name])], kind="paid"))
        if standing.losses > standing.wins:
            return str(name)
    return ""


def verdicts(found: Mapping[str, pd.DataFrame]) -> list[Verdict]:
    """What records say about every operator that has one and a variant of our own.

    Parameters
    ----------
    found : mapping of str to pandas.DataFrame
        Of `fusebook.record.read_all`.

    Returns
    -------
    list of Verdict
        In reading order.
    """
    return [verdict(op, found[op.name]) for op in _ours(found)]


def _ours(found: Mapping[str, pd.DataFrame]) -> list[Op]:
    """The operators that have a record and a variant of our own."""
    return [op for op in cards.OPS.values() if op.name in found and found[op.name]["variant"].eq("fusebook").any()]


def choices(op: Op, frame: pd.DataFrame, kind: str = "paid") -> pd.DataFrame:
    """Which way to take at each size: a row a point, the smallest first.

    Parameters
    ----------
    op : Op
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
    every, ways = _ways(op, frame), tables.timed(_ways(op, frame), kind)
    every, ways = (rows.assign(size=tables.label(rows)) for rows in (every, ways))
    keys, column = ["size", "dtype"], f"{kind}_us"
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
    wide["best"] = fastest.drop_duplicates(keys).set_index(keys)["variant"].reindex(order)
    wide["take"] = [
        ", ".join(
            names[at] if name == "libraries" else name
            for name in columns
            if wide.loc[at, name] <= (1 + tables.WITHIN) * least.loc[at]
        )
        for at in wide.index
    ]
    wide.columns.name = None
    return wide


def uses(table: pd.DataFrame) -> pd.DataFrame:
    """When to use what: how often each way is as fast as any, and where it alone is.

    Parameters
    ----------
    table : pandas.DataFrame
        Of `choices`.

    Returns
    -------
    pandas.DataFrame
        Indexed by `GROUPS` and ``ours``: at how many ``points`` it was timed, at how many it is ``best`` within 2 %, at
        how many it is so ``alone``, and the ``smallest`` and the ``largest`` of these, empty where there is none.
    """
    rows = {}
    columns = [*GROUPS, "ours"]
    within = table[columns].le((1 + tables.WITHIN) * table[columns].min(axis=1), axis=0)
    for name in columns:
        best = within[name]
        alone = [" ".join(at) for at in table.index[best & (within.sum(axis=1) == 1)]]
        ends = (alone[0], alone[-1]) if alone else ("", "")
        rows[name] = [int(table[name].notna().sum()), int(best.sum()), len(alone), *ends]
    return pd.DataFrame.from_dict(rows, orient="index", columns=["points", "best", "alone", "smallest", "largest"])


def shares(op: Op, frame: pd.DataFrame, kind: str = "cold") -> pd.DataFrame:
    """Which part of the roof ours and the best other way reach, where memory or arithmetic binds.

    Parameters
    ----------
    op : Op
    frame : pandas.DataFrame
        Results of `op`.
    kind : str
        ``cold`` or ``warm``.

    Returns
    -------
    pandas.DataFrame
        Indexed by sizes and dtype, with ``ours``, ``other`` and ``best other``, the variant. What a launch or the L2
        cache decides has no share of the roof worth the name.
    """
    ways = _ways(op, frame)
    behind = tables.behind(ways[ways["zone"].isin(["memory", "compute"])], kind=kind)
    ours = tables.share(ways, "fusebook", "roof", kind).reindex(behind.index)
    return pd.DataFrame(
        {"ours": ours, "other": ours * behind["times as long"], "best other": behind["best other"]}, index=behind.index
    )


def every(found: Mapping[str, pd.DataFrame]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every record of every operator, by every clock, and which of the times are the best of their point.

    Parameters
    ----------
    found : mapping of str to pandas.DataFrame
        Of `fusebook.record.read_all`.

    Returns
    -------
    pandas.DataFrame
        A row a record: ``operator``, ``way``, ``size``, ``dtype``, the microseconds by each clock, the share of the
        roof on the device in percent, cold and warm, the score as a part of its limit, and ``status`` where it is none
        of right and timed.
    pandas.DataFrame of bool
        Of the same rows, for the clocks: whether nothing of the same arithmetic is faster by more than 2 %.
    """
    tables_, marks = [], []
    for name, frame in found.items():
        times = pd.DataFrame({kind: tables.timed(frame, kind)[f"{kind}_us"] for kind in tables.KINDS}, frame.index)
        point = [frame["dtype"], tables.label(frame), frame["math"].fillna("")]
        least = times.groupby(point).transform("min")
        told = pd.DataFrame(
            {
                "operator": name,
                "way": frame["variant"],
                "size": tables.label(frame),
                "dtype": frame["dtype"],
                **{f"{kind}, us": times[kind] for kind in ("cold", "warm", "host", "paid", "call")},
                "% of roof, cold": 100 * frame["roof_us"] / times["cold"],
                "% of roof, warm": 100 * frame["roof_us"] / times["warm"],
                "error / limit": frame["score"] / frame["limit"],
                "status": frame["status"].where(frame["status"] != "ok", ""),
            }
        )
        tables_.append(told)
        marks.append((times <= (1 + tables.WITHIN) * least).rename(columns=lambda kind: f"{kind}, us"))
    return pd.concat(tables_, ignore_index=True), pd.concat(marks, ignore_index=True)


def winners(found: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Who wins where: a row a size of every operator that has a variant of our own.

    Parameters
    ----------
    found : mapping of str to pandas.DataFrame
        Of `fusebook.record.read_all`.

    Returns
    -------
    pandas.DataFrame
        ``operator``, ``size``, ``dtype``, the microseconds that a caller pays by the best way of each group, and what
        to take, for the caller and on the device, see `choices`.
    """
    parts = []
    for op in _ours(found):
        caller, device = (choices(op, found[op.name], kind) for kind in ("paid", "cold"))
        shown = caller[[*GROUPS, "ours", "take"]].join(device[["take"]].rename(columns={"take": "take, on the device"}))
        parts.append(shown.rename(columns={"take": "take, for the caller"}).reset_index())
        parts[-1].insert(0, "operator", op.name)
    return pd.concat(parts, ignore_index=True)
