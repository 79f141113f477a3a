"""Lessons on matmuls: what a caller gets, rates instead of shares of a copy, and times over those of a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from fusebook import plots, tables
from fusebook.lesson import _numbers, _place, _show, _verdicts
from fusebook.lesson._page import Page, _or_banner
from fusebook.lesson._show import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ProductsPage", "TokensPage", "rates"]


def rates(frame: pd.DataFrame, column: str = "gpu_us") -> pd.DataFrame:
    """TFLOP/s of two matmuls by step, a column for each size n, where M = N = K = n."""
    n = frame["shape"].str.rpartition("x")[2].astype(int)
    wide = frame.assign(n=n, rate=4e-6 * n**3 / frame[column]).pivot_table("rate", "step", "n", sort=False)
    return wide.rename(columns=lambda n: f"n = {n}")


class ProductsPage(Page):
    """The page of a lesson whose subject is a matmul."""

    #: Above the figure, and under its x axis.
    titles = ("GPU time over that of the {kind} matmul, {dtype}", "n, of matrices of n x n")

    def _everything(self) -> pd.DataFrame:
        """All rows, in which Fusebook is what a caller gets: its kernel, or torch's matmuls where a table says so."""
        frame = super()._everything()
        called = _verdicts._called(frame[~frame["variant"].str.match("max-autotune|ORT")])  # the evidence has them
        called.attrs.update(frame.attrs)
        return called

    @_or_banner
    def plot(self, kind: str, over: str) -> Axes | Shown:
        """The sweep over n: the time of each implementation over that of a baseline.

        Parameters
        ----------
        kind : str
            A variant, the baseline.
        over : str
            The size on the x axis.
        """
        sweep = self._sweep()
        dtype = sweep["dtype"].iloc[0]
        rows = tables.timed(tables.where(sweep, dtype=dtype), "cold")
        wide = rows.pivot_table("gpu_us", over, "variant", sort=False)
        drawn = wide.drop(columns=[kind, "fusebook (chosen)", "max-autotune"], errors="ignore").div(wide[kind], axis=0)
        title = self.titles[0].format(kind=kind, dtype=dtype)
        drawn.index.name = self.titles[1]
        ax = plots.lines(drawn, title=title, ylabel=f"times {kind}", marks={"": 1.0}, source=sweep, clock="cold L2")
        if _place.script():
            return Shown("", f"Figure: {title} ({_numbers.origin(sweep)})")._now()
        return ax

    def _staircase(self, frame: pd.DataFrame, steps: Mapping[str, Callable[..., Any]]) -> tuple[pd.DataFrame, str]:
        wide = rates(frame).reindex([*steps, "fusebook"])
        if "gpu_warm_us" in frame:
            wide = wide.join(rates(frame, "gpu_warm_us").add_suffix(", warm"))
        lines = {name: _show.lines_of(*_numbers.plain(step)) for name, step in steps.items()}
        lines["fusebook"] = _show.lines_behind(self.op.variants["fusebook"].run)
        numbered = {name: f"step {i}, {name}" if i else name for i, name in enumerate(steps)}
        wide = wide.assign(lines=pd.Series(lines)).rename(index={**numbered, "fusebook": f"fusebook.{self.op.name}"})
        wide.index.name = wide.columns.name = None
        return wide, f"TFLOP/s in {self.about.DTYPES[0]} with n x n matrices, cold L2 unless it says warm"


class TokensPage(ProductsPage):
    """The page of a lesson on a matmul of many rows and of few, whose weight keeps its size."""

    titles = ("GPU time over that of {kind}, {dtype}", "tokens, rows of x")

    def plot(self, kind: str, over: str) -> Axes | Shown:
        """The sweep over tokens, in a low figure."""
        ax = super().plot(kind, over)
        if not isinstance(ax, Shown):
            ax.figure.set_size_inches(8.0, 2.6)  # type: ignore[union-attr]
        return ax

    def _staircase(self, frame: pd.DataFrame, steps: Mapping[str, Callable[..., Any]]) -> tuple[pd.DataFrame, str]:
        origin = frame.attrs.get("origin")
        on = origin.machine if origin else None
        names = [name for name, value in self.op.edges[0].items() if isinstance(value, int)]

        def roof(shape: str, dtype: str) -> float:
            dims = dict(zip(names, map(int, shape.split("x")), strict=True))
            return 1e6 * on.roof(self.op.cost(getattr(torch, dtype).itemsize, **dims), dtype) if on else math.nan

        rows = frame["shape"].str.partition("x")[0]
        words = rows + rows.map(lambda count: " token" if count == "1" else " tokens")
        roofs = [roof(*point) for point in zip(frame["shape"], frame["dtype"], strict=True)]
        wide = _numbers.staircase(self.op, self.about, frame.assign(at=words, copy_us=roofs), steps)
        return wide, f"Percent of the roofline in GPU time, {self.about.DTYPES[0]}"
