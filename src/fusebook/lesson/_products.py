"""A lesson on matmuls: what a caller gets, rates instead of shares of a copy, and times over the packed matmul."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from fusebook import plots, tables
from fusebook.lesson import _numbers
from fusebook.lesson._page import Page, _or_banner
from fusebook.page import _place, show, verdicts
from fusebook.page.show import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ProductsPage", "rates"]


def rates(frame: pd.DataFrame, column: str = "gpu_us") -> pd.DataFrame:
    """TFLOP/s of two matmuls by step, a column for each size n, where M = N = K = n."""
    n = frame["shape"].str.rpartition("x")[2].astype(int)
    wide = frame.assign(n=n, rate=4e-6 * n**3 / frame[column]).pivot_table("rate", "step", "n", sort=False)
    return wide.rename(columns=lambda n: f"n = {n}")


class ProductsPage(Page):
    """The page of a lesson whose subject is a matmul."""

    def _everything(self) -> pd.DataFrame:
        """All rows, in which Fusebook is what a caller gets: its kernel, or torch's matmuls where a table says so."""
        frame = super()._everything()
        called = verdicts._called(frame[~frame["variant"].str.match("max-autotune|ORT")])  # the evidence has them
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
        title = f"GPU time over that of the {kind} matmul, {dtype}"
        drawn.index.name = "n, of matrices of n x n"
        ax = plots.lines(drawn, title=title, ylabel=f"times {kind}", marks={"": 1.0}, source=sweep, clock="cold L2")
        if _place.script():
            return Shown("", f"Figure: {title} ({_numbers.origin(sweep)})")._now()
        return ax

    def _staircase(self, frame: pd.DataFrame, steps: Mapping[str, Callable[..., Any]]) -> tuple[pd.DataFrame, str]:
        wide = rates(frame).reindex([*steps, "fusebook"])
        if "gpu_warm_us" in frame:
            wide = wide.join(rates(frame, "gpu_warm_us").add_suffix(", warm"))
        lines = {name: show.lines_of(*_numbers.plain(step)) for name, step in steps.items()}
        lines["fusebook"] = show.lines_behind(self.op.variants["fusebook"].run)
        numbered = {name: f"step {i}, {name}" if i else name for i, name in enumerate(steps)}
        wide = wide.assign(lines=pd.Series(lines)).rename(index={**numbered, "fusebook": f"fusebook.{self.op.name}"})
        wide.index.name = wide.columns.name = None
        return wide, f"TFLOP/s in {self.about.DTYPES[0]} with n x n matrices, cold L2 unless it says warm"
