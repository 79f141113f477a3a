"""Lessons on k-means: a figure with a row for each problem, and k-means from its start to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from fusebook import plots, tables
from fusebook.lesson import _numbers, _place, _show, picture
from fusebook.lesson._launches import LaunchesPage
from fusebook.lesson._page import _or_banner
from fusebook.lesson._results import measured
from fusebook.lesson._show import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EndsPage", "PointsPage"]


class PointsPage(LaunchesPage):
    """The page of a lesson whose problems differ in more than one size; its evidence has ``ROWS``, a format of each.

    It may have ``ONLY``: the sizes of which the verdict and the choices are.
    """

    def _everything(self) -> pd.DataFrame:
        rows = super()._everything()
        return tables.where(rows, **getattr(self.about, "ONLY", {}))

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


class EndsPage(LaunchesPage):
    """The page of a lesson on whole runs, which its evidence measures as the frame ``ends``."""

    def _ends(self) -> pd.DataFrame:
        if "ends" not in self.frames.known:  # the box and the table at the end show one measurement
            spec = self.about.FRAMES["ends"]
            self.frames.known["ends"] = measured(spec.name, spec.function)
        return self.frames["ends"]

    @_or_banner
    def verdict(self) -> Shown:
        """The box: seconds of a run by implementation, and how many iterations it took."""
        ends = self._ends()
        origin = ends.attrs["origin"].machine
        cpu = f"{origin.cpu}, {origin.cores} cores" if origin else "the CPU"
        lines: list[str] = []
        bars: dict[str, float] = {}
        rows: list[Any] = ends.to_dict("records")
        for name, row in zip(("Time", "More coordinates"), rows, strict=True):
            seconds = {n.removesuffix(", s"): s for n, s in row.items() if n.endswith(", s") and s == s}
            own = seconds.pop("fusebook")
            ratios = {n: s / own for n, s in sorted(seconds.items(), key=lambda item: item[1])}
            lines.append(
                f"**{name}.** {row['n']:,} points of {row['d']} coordinates, {row['k']} centres, float32: "
                f"`fusebook.kmeans` ends after **{_numbers.microseconds(1e6 * own)}**. "
                f"{_numbers.compared(ratios)}"
            )
            bars = bars or {**dict(sorted(seconds.items(), key=lambda item: -item[1])), "Fusebook": own}
        caption = "Latency of the first one. With arrays, points are copied to the GPU and the result back. "
        caption += f"scikit-learn runs on a CPU ({cpu})."
        shown = picture.bars(caption, bars, {n: _numbers.microseconds(1e6 * s) for n, s in bars.items()}, ["Fusebook"])
        return self._box(lines, shown, _numbers.origin(ends))

    def clusters(self, points: Any, labels: Any, centres: Any) -> Axes | Shown:
        """What k-means found in the plane, as a figure.

        Parameters
        ----------
        points, labels, centres : torch.Tensor
        """
        ax = plots.clusters(*(t.cpu() for t in (points, labels, centres)), title="What k-means found")
        ax.figure.set_size_inches(5.4, 2.8)  # type: ignore[union-attr]
        return Shown("", f"Figure: {len(centres)} clusters of {len(points)} points")._now() if _place.script() else ax

    @_or_banner
    def use(self) -> Shown:
        """When to use the library: seconds and iterations of every implementation, and how to install it."""
        ends = self._ends()
        wide = ends.drop(columns=["points", "n", "d", "k"]).astype(object)
        wide.columns = wide.columns.str.replace(r", s$", ", seconds", regex=True)
        wide.index = pd.Index([f"{row.n:,} x {row.d}, k = {row.k}" for row in ends.itertuples()])
        made = _show.table(wide.T, f"K-means until its centres are at rest; {_numbers.origin(ends)}", fold=False)
        install = _numbers.install()
        return Shown(f"{made._repr_html_()}<p>{_numbers.joined(install)}</p>", _numbers.plainly(install))._now()
