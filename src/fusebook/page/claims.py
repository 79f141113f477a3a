"""Prose that cannot go stale: sentences that take their numbers from results, conclusions with their conditions."""

from __future__ import annotations

import string
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import pandas as pd
import torch

from fusebook.measure import check
from fusebook.measure.op import Cost, Op
from fusebook.page import _place
from fusebook.page.show import Shown, rich

__all__ = ["Claims", "claim", "claims", "exercise", "holds", "say", "target"]


# Prose ----------------------------------------------------------------------------------------------------------------


class _Numbers(string.Formatter):
    """Formats what was measured, and says so where it was not."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or value is pd.NA or (isinstance(value, float) and value != value):
            return "(not measured)"
        return super().format_field(value, format_spec)


def _fill(text: str, numbers: dict[str, Any]) -> str:
    return _Numbers().format(text, **numbers) if numbers else text


def say(text: str, **numbers: Any) -> Shown:
    """A sentence that takes its numbers from results.

    Parameters
    ----------
    text : str
        With fields as those of `str.format`; what stands between backticks is code.
    **numbers
        Values of the fields; a missing one is written as not measured.
    """
    said = _fill(text, numbers)
    return Shown(f'<p class="fb-say">{rich(said)}</p>', said)


#: What is said of each kind: in words where it is true and where not, the signs of both, and what many are called.
_KINDS = {
    "claim": (("true", "false"), "✓✗", "Claims"),
    "target": (("met", "missed"), "●○", "Targets"),
    "statement": (("holds", "does not hold"), "=≠", "Statements of others"),
    "exercise": (("done", "to do"), "☑☐", "Exercises"),
}


@dataclass(frozen=True, repr=False)
class Claim(Shown):
    """See `claim`, `target`, `holds` and `exercise`, which are the four kinds."""

    text: str
    true: bool | None
    fatal: bool
    kind: str = "claim"
    detail: str = ""
    headline: bool = False

    @property
    def mark(self) -> str:
        """A sign that needs no colour."""
        return "–" if self.true is None else _KINDS[self.kind][1][0 if self.true else 1]

    @property
    def verdict(self) -> str:
        """The same in words."""
        return "not measured" if self.true is None else _KINDS[self.kind][0][0 if self.true else 1]

    def _item(self) -> str:
        came = "fb-open" if self.true is None else "fb-true" if self.true else "fb-false"
        detail = f' <span class="fb-detail">({rich(self.detail)})</span>' if self.detail else ""
        return (
            f'<li class="fb-{self.kind} {came}"><span class="fb-mark" role="img" aria-label="{self.verdict}">'
            f'{self.mark}</span> <span><span class="fb-verdict">{self.verdict}:</span> {rich(self.text)}{detail}'
            "</span></li>"
        )

    def _repr_html_(self) -> str:
        return f'<ul class="fb-claims">{self._item()}</ul>'

    def __repr__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.mark} {self.verdict}: {self.text}{detail}"


def _decide(condition: Any, of: Any = None) -> tuple[bool | None, str]:
    """What a condition comes to, at how many rows, and where it fails. No values decide nothing: all() of nothing is
    true.
    """
    if not isinstance(condition, pd.Series):
        return (None if condition is None or condition is pd.NA else bool(condition)), ""
    if condition.empty:
        return None, ""
    good = condition.astype(bool)
    total = len(good) if of is None else of if isinstance(of, int) else len(of)
    if total < len(good):
        raise ValueError(f"claim: expected the rows of the whole table, at least {len(good)}, got {total}")
    both = len(good) == total == 2
    seen = f"{len(good)} of {total}" if len(good) < total else "both" if both else f"all {total}"
    rows = f"checked on {seen} rows" if total > 1 else ""
    if good.all():
        return True, rows
    if not good.any() and rows:
        return False, f"{rows}, fails at {'both' if both else 'all of them'}"
    failed = list(dict.fromkeys(map(_named, good[~good].index)))  # a size may be judged by two clocks
    more = f" and {len(failed) - 8} more" if len(failed) > 8 else ""
    where = f"fails at {(~good).sum()}: {', '.join(failed[:8])}{more}" if rows else f"fails at {failed[0]}"
    return False, f"{rows}, {where}" if rows else where


def _named(key: Any) -> str:
    """The name of a row: its sizes as ``4096x781``, and its words behind."""
    parts = key if isinstance(key, tuple) else (key,)
    sizes = "x".join(str(part) for part in parts if isinstance(part, Integral))
    return " ".join([*filter(None, [sizes]), *(str(part) for part in parts if not isinstance(part, Integral))])


def claim(
    text: str, condition: Any, fatal: bool = True, of: Any = None, headline: bool = False, **numbers: Any
) -> Claim:
    """A conclusion of ours with the condition under which it is true.

    Parameters
    ----------
    text : str
        A whole sentence, with fields as those of `say`. Where `condition` looks at some rows of a table only, it names
        those that it leaves out, and why.
    condition : bool, pandas.Series of bool or None
        A series is true where all of it is, and tells at how many rows it looked and at which it fails; an empty one,
        and None, are undecided.
    fatal : bool
        Whether `claims` raises under FUSEBOOK_STRICT=1 where it is false.
    of : int or sized, optional
        The rows of the table that the claim stands under, or how many there are; those of `condition` unless given.
    headline : bool
        Whether the box under the page's title shows it too, with its verdict.
    **numbers
        Values of the fields.

    Raises
    ------
    ValueError
        Where `of` is less than the rows that were checked.
    """
    true, detail = _decide(condition, of)
    return Claim(_fill(text, numbers), true, fatal, detail=detail, headline=headline)


def target(text: str, condition: Any, of: Any = None, headline: bool = False, **numbers: Any) -> Claim:
    """What was wanted before the kernel was written: it is met or missed, is never fatal, and is counted apart.

    The arguments are those of `claim`; the text has what was wanted and what came of it.
    """
    return replace(claim(text, condition, False, of, headline, **numbers), kind="target")


def holds(text: str, condition: Any, of: Any = None, **numbers: Any) -> Claim:
    """A statement of others: it holds or does not, is never fatal, and is not counted among our claims.

    The arguments are those of `claim`; the text has its source and date.
    """
    return replace(claim(text, condition, False, of, **numbers), kind="statement")


def _many(n: int, verdict: Hashable) -> str:
    """A verdict with how many have it, in the plural where that is not one."""
    return f"{n} {verdict}" if n == 1 else f"{n} {str(verdict).replace('does', 'do').replace('holds', 'hold')}"


class Claims(Shown):
    """See `claims`."""

    def __init__(self, items: Sequence[Claim | Shown]) -> None:
        self.items = tuple(items)

    @property
    def count(self) -> str:
        """How many of each kind came out how; empty where one look tells, for a list of three or fewer."""
        told = []
        judged = [item for item in self.items if isinstance(item, Claim)]
        for kind, (_, _, many) in _KINDS.items() if len(judged) > 3 else ():
            verdicts = pd.Series([item.verdict for item in judged if item.kind == kind], dtype=object).value_counts()
            if len(verdicts):
                told.append(f"{many}: " + ", ".join(_many(n, verdict) for verdict, n in verdicts.items()))
        return ". ".join(told) + "." if told else ""

    def _repr_html_(self) -> str:
        lines = "".join(
            item._item() if isinstance(item, Claim) else f'<li class="fb-say">{rich(item.text)}</li>'
            for item in self.items
        )
        count = f'<li class="fb-count">{self.count}</li>' if self.count else ""
        return f'<ul class="fb-claims">{lines}{count}</ul>'

    def __repr__(self) -> str:
        lines = [repr(item) if isinstance(item, Claim) else f"- {item!r}" for item in self.items]
        return "\n".join(lines + ([self.count] if self.count else []))


def claims(*items: Claim | Shown) -> Claims:
    """Conclusions, each with its verdict.

    Raises
    ------
    AssertionError
        Under FUSEBOOK_STRICT=1, with every false claim that is fatal.
    """
    shown = Claims(items)._now()
    _place.remember("claims", *(item for item in items if isinstance(item, Claim)))
    wrong = [item for item in items if isinstance(item, Claim) and item.fatal and item.true is False]
    if wrong and _place.flag("FUSEBOOK_STRICT"):
        lines = "\n".join(f"  {item!r}" for item in wrong)
        raise AssertionError(f"{len(wrong)} of {len(items)} claims are false:\n{lines}")
    return shown


_CLOCKS = {
    "cold": "On the device, cold",
    "paid": "In an eager program of many calls, each of which takes the longer of the host's time and the device's",
    "call": "By the clock of one call that is waited for",
}


def exercise(
    text: str, attempt: Callable[..., Any], reference: Callable[..., Any], cases: Sequence[tuple[Any, ...]]
) -> Claims:
    """Check a reader's attempt by the rule that the library is checked by; never fatal.

    Parameters
    ----------
    text : str
        What the attempt must do.
    attempt : callable
        The reader's function.
    reference : callable
        The meaning in plain PyTorch, run in float64.
    cases : sequence of tuple
        Inputs to try, each the arguments of both.

    Returns
    -------
    Claims
        Done, or to do with the first reason.
    """
    op = Op("exercise", reference, lambda *_: (), lambda *_: Cost(0, 0, 0), {}, {}, lambda _: {}, ())
    reason = ""
    for inputs in cases:
        shapes = ", ".join(
            f"{'x'.join(map(str, v.shape))} {str(v.dtype)[6:]}" if isinstance(v, torch.Tensor) else repr(v)
            for v in inputs
        )
        try:
            got, yard = attempt(*inputs), check.yardstick(op, inputs)
            verdict = yard.judge(got)
        except Exception as error:  # a reader's function may fail in any way: that is an answer too
            reason = f"{type(error).__name__} on {shapes}: {(str(error).splitlines() or [''])[0]}"
        else:
            if not verdict.ok:
                where = yard.where(got)
                reason = f"on {shapes}: error {verdict.error:.2g}, tolerance {verdict.tolerance:.2g}; {where}"
        if reason:
            break
    return Claims((Claim(text, not reason, False, "exercise", reason),))._now()
