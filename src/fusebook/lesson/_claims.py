"""Conclusions with their verdicts, and exercises."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from fusebook.lesson._show import Shown, rich
from fusebook.measure import check
from fusebook.measure.op import Cost, Op

__all__ = ["Claim", "Claims", "exercise"]


# Prose ----------------------------------------------------------------------------------------------------------------


#: What is said of each kind: in words where it is true and where not, the signs of both, and what many are called.
_KINDS = {
    "claim": (("true", "false"), "✓✗", "Claims"),
    "target": (("met", "missed"), "●○", "Targets"),
    "statement": (("holds", "does not hold"), "=≠", "Statements of others"),
    "exercise": (("done", "to do"), "☑☐", "Exercises"),
}


@dataclass(frozen=True, repr=False)
class Claim(Shown):
    """A conclusion and whether it is true; its kind is one of `_KINDS`."""

    text: str
    true: bool | None
    kind: str = "claim"
    detail: str = ""

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


def _many(n: int, verdict: Hashable) -> str:
    """A verdict with how many have it, in the plural where that is not one."""
    return f"{n} {verdict}" if n == 1 else f"{n} {str(verdict).replace('does', 'do').replace('holds', 'hold')}"


class Claims(Shown):
    """Conclusions, each with its verdict."""

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


def exercise(
    text: str, attempt: Callable[..., Any], reference: Callable[..., Any], cases: Sequence[tuple[Any, ...]]
) -> Claims:
    """Check a reader's attempt by the rule that the library is checked by.

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
    return Claims((Claim(text, not reason, "exercise", reason),))._now()
