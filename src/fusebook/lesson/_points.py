"""Lessons on k-means: a figure with a row for each problem, and calls that take more than sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusebook import plots, tables
from fusebook.lesson import _numbers
from fusebook.lesson._launches import LaunchesPage
from fusebook.lesson._page import _or_banner
from fusebook.page import _place
from fusebook.page.show import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PointsPage"]


class PointsPage(LaunchesPage):
    """The page of a lesson whose problems differ in more than one size; its evidence has ``ROWS``, a format of each."""

    @_or_banner
    def plot(self, kind: str, over: str) -> Axes | Shown:
        """The sweep: the share of a ceiling that each implementation reaches.

        Parameters
        ----------
        kind : str
            The ceiling, ``roof`` or ``copy``.
        over : str
            In what the problems differ, for readers of the script.
        """
        sweep = self._sweep()
        ax = plots.dots(sweep, of=kind)
        rows: list[Any] = sweep.to_dict("records")
        named = dict(zip(tables.label(sweep), (self.about.ROWS.format(**row) for row in rows), strict=True))
        ax.set_yticks(ax.get_yticks(), [named[label.get_text()] for label in ax.get_yticklabels()], fontsize=8)
        if _place.script():
            return Shown("", f"Figure, by {over}: {ax.get_title(loc='left')} ({_numbers.origin(sweep)})")._now()
        return ax
