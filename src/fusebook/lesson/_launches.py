"""A lesson on launches: end-to-end times, and steps whose calls are not those of the operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

import fusebook
from fusebook import plots, tables
from fusebook.lesson import _checks, _numbers, _place, _show
from fusebook.lesson._page import Page, _or_banner
from fusebook.lesson._show import Shown
from fusebook.measure import bench, check, timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LaunchesPage", "clocked"]


class LaunchesPage(Page):
    """The page of a lesson whose subject is launches.

    Its evidence may define ``taking``, from the card's inputs to the arguments of a step; ``missing``, the outputs that
    a step does not compute, from the card's inputs; ``timed``, from the steps to their frame; ``to_count``, from the
    steps to what is counted; ``TABLE``, a column and a shape of that frame for each column of the lesson's table; and
    ``LINES``, whether that table counts lines of code.
    """

    def _taking(self, *given: Any) -> Sequence[Any]:
        taking: Callable[..., Sequence[Any]] | None = getattr(self.about, "taking", None)
        return taking(*given) if taking else given

    def _outputs(self, got: Any, *given: Any) -> Any:
        lacks = hasattr(self.about, "missing") and len(got) < len(self.op.reference(*given))
        return (*got, *self.about.missing(*given)) if lacks else got

    def _whole_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A step as a function from the card's inputs to its outputs."""

        @functools.wraps(function)
        def run(*given: Any) -> Any:
            return self._outputs(function(*self._taking(*given)), *given)

        return run

    def check(self, function: Callable[..., Any], *given: Any) -> Shown:
        """Whether a function is correct: its error against float64, and the tolerance."""
        return super().check(self._whole_of(function), *given)

    def catches(self, function: Callable[..., Any], **given: Any) -> Shown:
        """Show on which inputs a mistake passes; on the last ones it has to fail."""
        return _checks.caught(self.op, self._whole_of(function), given)

    @_or_banner
    def plot(self, kind: str, over: str) -> Axes | Shown:
        """The sweep over a size: end-to-end time by implementation."""
        sweep = self._sweep()
        rows = tables.where(sweep, **getattr(self.about, "SHOWN", {}))
        rows.attrs.update(sweep.attrs)
        ax: Axes = getattr(plots, kind)(rows, over, kind="paid", xlabel=self.about.OVER)
        ax.figure.set_size_inches(8.0, 2.8)  # type: ignore[union-attr]
        ax.set_xscale("log")
        sizes = sorted(rows[over].unique())
        ax.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
        ax.xaxis.minorticks_off()
        if _place.script():
            return Shown("", f"Figure: {ax.get_title(loc='left')} ({_numbers.origin(sweep)})")._now()
        return ax

    def _measured(
        self, steps: Mapping[str, Callable[..., Any]], extra: Mapping[str, Callable[..., Any]]
    ) -> pd.DataFrame:
        return self.about.timed(steps)  # type: ignore[no-any-return]

    def _staircase(self, frame: pd.DataFrame, steps: Mapping[str, Callable[..., Any]]) -> tuple[pd.DataFrame, str]:
        wide = pd.DataFrame(index=[*steps, *(name for name in dict.fromkeys(frame["step"]) if name not in steps)])
        for title, (column, shape) in self.about.TABLE.items():
            rows = tables.where(frame, shape=shape)
            if column in rows and rows[column].notna().any():
                wide[title] = rows.drop_duplicates("step").set_index("step")[column]
        called = getattr(self.about, "CALLED", self.op.name)
        told, named = _numbers.labels(self.about), {"fusebook": f"fusebook.{called}"}
        named |= {n: f"{told[n]}, {n}" if told[n].startswith("step ") else told[n] for n in steps}
        if getattr(self.about, "LINES", True):
            lines = {name: _show.lines_of(*_checks.plain(step)) for name, step in steps.items()}
            lines["fusebook"] = _show.lines_behind(getattr(fusebook, called))
            wide["lines"] = pd.Series(lines)
        return wide.rename(index=named), self.about.CAPTION


def clocked(
    calls: Mapping[str, Callable[[], Any]], yard: check.Yardstick, whole: Callable[[Any], Any] = lambda got: got
) -> pd.DataFrame:
    """Check and time calls by all clocks that an end-to-end time needs.

    Parameters
    ----------
    calls : mapping of str to callable
    yard : Yardstick
    whole : callable
        From what a call returns to the operator's outputs.
    """
    frame = bench.staircase(calls, lambda got: yard.judge(whole(got)).ok, repeat=10)
    times = timing.measure(calls, warmup=2, repeat=10, kinds=("host", "call"))
    frame = frame.rename(columns={"us": "gpu_us", "right": "correct"})
    for kind in ("host", "call"):
        frame[timing.COLUMN[kind]] = [1e6 * q.q50 if (q := times[n][kind]) else float("nan") for n in frame["step"]]
    return frame.assign(end_to_end_us=tables.paid(frame))
