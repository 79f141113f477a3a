"""Should one write a kernel? What records answer: how ours stands against torch, torch.compile and libraries.

Two clocks decide. ``cold`` is the device's. ``paid`` is the caller's: the larger of what the host and what the device
needs for one of many calls, see `fusebook.tables.paid`. Medians within 2 % are equal.
"""

import math
from dataclasses import dataclass

import pandas as pd

from fusebook import cards, tables
from fusebook.lesson._verdicts import GROUPS, compared, ours
from fusebook.measure.op import Op

__all__ = [
    "CLOCKS",
    "GAIN",
    "Memory",
    "Standing",
    "Verdict",
    "memory",
    "page_of",
    "shares",
    "verdict",
    "verdicts",
]

#: The clocks that a verdict is given by, in words.
CLOCKS = {"cold": "on the device", "paid": "for the caller", "call": "for one call that is waited for"}


#: A median gain below this one is small.
GAIN = 1.1


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
    def points(self):
        """At how many points both were timed."""
        return self.wins + self.ties + self.losses

    @property
    def range(self):
        """Our time over the other's, from the best point to the worst."""
        if not self.points:
            return "none measured"
        return f"{_factor(self.least)} to {_factor(self.most)}" if self.points > 1 else _factor(self.most)

    @property
    def middle(self):
        """The same in the median."""
        return _factor(self.median)

    @property
    def counts(self):
        """Wins, ties and losses in words."""
        return f"{self.wins} won, {self.ties} equal, {self.losses} lost" if self.points else ""


def _factor(value):
    return f"{value:.2f}" if value >= 0.095 else f"{value:.1g}"


def _standing(table):
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
    torch, libraries : dict of Standing
        By each of `CLOCKS`, against the best of torch and torch.compile, and against the best library.
    decides : str
        The clock that the word goes by: ``paid``, or ``cold`` where only the device's clock was recorded.
    start : str or None
        From which problem on it pays for the caller, against torch and torch.compile, see `fusebook.tables.pays_from`.
    word : str
        Whether to write the kernel: ``yes``, ``yes, from a size on``, ``yes, but not in float32``, ``yes at most
        sizes``, ``small gain``, ``no gain``, ``no``, ``it depends`` or ``not measured``. What the caller pays decides,
        against torch and torch.compile: yes means faster at more than half of the points and slower at none. A gain
        whose median is below `GAIN` is small. Of one point it ends in ``, one size``; by the device's clock it ends in
        ``, on the device``.
    library : str
        The library that beats ours for the caller at more points than it loses, if one does.
    named : tuple of str
        The libraries that gave a right result.
    """

    op: Op
    torch: dict
    libraries: dict
    decides: str
    start: str
    word: str
    library: str = ""
    named: tuple = ()

    @property
    def kind(self):
        """What it is marked by: ``yes``, ``small``, ``no``, ``equal``, ``it`` depends, or ``not`` measured."""
        return "equal" if self.word.startswith("no gain") else self.word.split(",")[0].split()[0]


def page_of(op):
    """The number of the page that tells of an operator."""
    return next(module.PAGE for module, family in cards.FAMILIES.items() if op.name in {card.name for card in family})


def verdict(op, frame):
    """What results, of a record or of a run, say about an operator."""
    plain, libraries = compared(op, frame, GROUPS[:2]), compared(op, frame, GROUPS[2:])
    behind = {kind: tables.behind(plain, kind=kind) for kind in CLOCKS}
    torch = {kind: _standing(table) for kind, table in behind.items()}
    start = tables.pays_from(plain, kind="paid")
    decides = "cold" if torch["cold"].points and not torch["paid"].points else "paid"
    word = _word(torch[decides], behind[decides], start)
    word = "small gain" if word.startswith("yes") and torch[decides].median * GAIN > 1 else word
    return Verdict(
        op,
        torch,
        {kind: _standing(tables.behind(libraries, kind=kind)) for kind in CLOCKS},
        decides,
        start,
        word + (", one size" if torch[decides].points == 1 else "") + (", on the device" if decides == "cold" else ""),
        _library(op, frame),
        tuple(libraries.loc[(libraries["group"] == "libraries") & (libraries["status"] == "ok"), "variant"].unique()),
    )


def _word(standing, behind, start):
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
        # A dtype that loses at one size of many is no dtype to warn of.
        if len(bad) == 1 and len(set(dtypes)) > 1 and 2 * lost.sum() >= dtypes.isin(bad).sum():
            return f"yes, but not in {bad.pop()}"
        return "yes at most sizes"
    if standing.losses * 2 >= standing.points:
        return "no"
    return "it depends" if standing.wins + standing.losses > standing.ties else "no gain"


def _library(op, frame):
    ways = compared(op, frame, GROUPS[2:])
    for name in dict.fromkeys(ways.loc[ways["group"] == "libraries", "variant"]):
        standing = _standing(tables.behind(ways[ways["variant"].isin(["fusebook", name])], kind="paid"))
        if standing.losses > standing.wins:
            return str(name)
    return ""


@dataclass(frozen=True)
class Memory:
    """Peak memory over all points: that of Fusebook over that of the fastest other, or None where these have none."""

    ratio: float | None
    text: str


def memory(op, frame, kind="paid"):
    """What Fusebook allocates at its peak, next to the faster of torch and torch.compile at each point."""
    plain = compared(op, frame, GROUPS[:2])
    peaks = plain.assign(label=tables.label(plain)).drop_duplicates(["label", "dtype", "variant"])
    peaks = peaks.set_index(["label", "dtype", "variant"])["peak_bytes"].to_dict()
    best = tables.behind(plain, kind=kind)["best other"]
    pairs = [(peaks.get((*at, "fusebook")), peaks.get((*at, other))) for at, other in best.items()]
    pairs = [pair for pair in pairs if all(peak is not None and peak == peak for peak in pair)]
    own, theirs = (sum(peaks) for peaks in zip(*pairs, strict=True)) if pairs else (0, 0)
    if theirs < _SOME * len(pairs) or not pairs:
        largest = max((pair[0] for pair in pairs), default=0)
        return Memory(None, f"at most {largest / 2**20:.3g} MiB" if largest >= 2**10 else "none")
    return Memory(own / theirs, f"{own / theirs:.2f}x" if abs(own / theirs - 1) > tables.WITHIN else "equal")


#: Bytes below which peaks are not compared.
_SOME = 2**20


def verdicts(found):
    """What records, by operator, say about every one that has a variant of our own, in reading order."""
    return [verdict(op, found[op.name]) for op in ours(found)]


def shares(op, frame, kind="cold"):
    """Which part of the roof ours and the best other way reach, where memory or arithmetic binds.

    Indexed by sizes and dtype, with ``ours``, ``other`` and ``best other``, the variant. What a launch or the L2 cache
    decides has no share of the roof worth the name. Where a library was timed at all, only the sizes at which one was.
    """
    ways = compared(op, frame)
    ways = ways[ways["zone"].isin(["memory", "compute"])]
    behind = tables.behind(ways, kind=kind)
    libraries = tables.behind(ways[ways["group"].isin(["ours", "libraries"])], kind=kind)
    if len(libraries):  # a size at which the fastest way may be one that nobody timed tells nothing
        behind = behind[behind.index.isin(libraries.index)]
    ours = tables.share(ways, "fusebook", "roof", kind).reindex(behind.index)
    return pd.DataFrame(
        {"ours": ours, "other": ours * behind["times as long"], "best other": behind["best other"]}, index=behind.index
    )
