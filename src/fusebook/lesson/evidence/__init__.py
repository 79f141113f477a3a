"""The claims behind a lesson: what was recorded, what is claimed of it, under which condition, and whether it holds.

A module per lesson, of the lesson's name, defines:

OPERATORS
    Names of its operators; the first one is the lesson's subject.
FRAMES
    What its claims read, by name: a `Recorded` or a `Measured`. ``sweep`` is the lesson's figure, ``steps`` its table.
EXAMPLE
    The size and dtype that the verdict quotes.
STEPS, SHAPES, DTYPES
    The steps of the lesson in their order, the sizes at which they are timed, and in which dtypes.
CALLED
    Optional: the function of the library that the lesson calls, where it is none of its operators.
OTHER_STEPS
    Optional: steps that compute another operator than the lesson's subject, and the name of that operator. The first
    step of each operator is a baseline, and all others are numbered.
PAGE
    The class of its page, where that is not `fusebook.lesson.Page`.
LOOK
    What is noted of the compiled kernel of a step, where that is more than `fusebook.measure.bench.staircase` does.
CLOCK
    Optional: the clock of the verdict, of its figure and of the gains: ``cold``, or ``paid``, end-to-end time.
WARM
    Whether calls of the steps in a row are timed, too.
UNIT
    Optional: the sizes whose product is the unit of counted elements, and a letter for each, for the page's reader.
EXTRA_STEPS
    Steps that only the evidence shows: functions from the lesson's steps to one more, or to None where it cannot run.
COUNT_EXTRA
    Whether Nsight Compute counts these, too; by default it does.
BY, XLABEL
    Optional: by which sizes the table of the steps is, and what the x axis of the figure shows.
STRESS
    Optional: which inputs of the card ``page.stress`` makes, where these are not those of its first edge.
INTERPRETED
    Optional: rows at most of inputs in Triton's interpreter, where a program has many of them.
KERNELS
    Kernels of the library that the lesson shows, by operator.
IMPORTS
    Optional: modules of other packages that take seconds to import; a process that records does it before its turn.
taking, missing, timed, to_count, TABLE
    Optional: how steps are called and timed, where that needs more than the card's inputs; see
    `fusebook.lesson._launches`.
GPU
    Optional: the recorded GPU that all of it is about, where that is not the replayed one.
CLAIMS, LOG
    Every `Claim`; and paragraphs on what was tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import operator
import pathlib
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.lesson import _place
from fusebook.measure import machine, record

with extra("book"):
    import pandas as pd

__all__ = [
    "Claim", "Frames", "Measured", "NotRecorded", "Outcome", "Recorded", "deterministic", "evaluate", "lessons", "load",
    "steps_correct", "within_tolerance",
]  # fmt: skip

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}


class NotRecorded(LookupError):
    """Neither this run nor a record has what a claim reads."""


def _places(gpu: str) -> list[pathlib.Path]:
    """The folders in which rows are looked for: of the GPU of that name, or of the replayed ones."""
    return [machine.RECORDS / gpu] if gpu else machine.places()


@dataclass(frozen=True)
class Recorded:
    """Rows of an operator's record, as a lesson asks for them.

    Attributes
    ----------
    op, config, dtype : str
    variants : tuple of str, optional
    borrowed : bool
        Another page records these rows.
    """

    op: str
    config: str
    dtype: str = "float32"
    variants: tuple[str, ...] | None = None
    borrowed: bool = False

    def read(self, gpu: str = "") -> pd.DataFrame:
        """The rows of a recorded GPU, by default of the one that is replayed."""
        op = OPS[self.op]
        for place in _places(gpu):
            if (place / f"{self.op}.csv").exists():
                _place.note(place / f"{self.op}.csv")
                try:
                    frame = record.read(op, place.name, place.parent)
                    return record.select(frame, op, self.config, self.dtype, self.variants)
                except record.Missing:
                    continue
        raise NotRecorded(f"no record of {self.op} has {self.config} in {self.dtype}")


@dataclass(frozen=True)
class Measured:
    """What a lesson measures by itself.

    Attributes
    ----------
    name : str
        The record, ``records/<gpu>/pages/<name>.csv``.
    names : mapping of str to str
        What claims call some columns of the record.
    function : callable, optional
        Measures it on a GPU, where the lesson shows none of it.
    """

    name: str
    names: Mapping[str, str] = field(default_factory=dict)
    function: Callable[[], pd.DataFrame] | None = None

    def read(self, gpu: str = "") -> pd.DataFrame:
        """The rows of a recorded GPU, by default of the one that is replayed, as claims read them."""
        for place in _places(gpu):
            if (place / "pages" / f"{self.name}.csv").exists():
                _place.note(place / "pages" / f"{self.name}.csv")
                frame = record.read(f"pages/{self.name}", place.name, place.parent)
                if not (gpu or frame.attrs["origin"].code):  # of an older lesson, with other names
                    continue
                frame.attrs["origin"] = dataclasses.replace(frame.attrs["origin"], page=self.name)
                return self.renamed(frame)
        raise NotRecorded(f"no record of {self.name}")

    def renamed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The same rows, with the columns that claims read."""
        return frame.rename(columns=dict(self.names))


class Frames(Mapping[str, Any]):
    """What the claims of a lesson read: rows that this run measured, else those of the replayed GPU.

    Parameters
    ----------
    about : module
        The lesson's evidence.
    replay : bool
        Whether records answer for what this run has not measured. A frame has the rows of one GPU.
    """

    def __init__(self, about: ModuleType, replay: bool = True) -> None:
        self.about, self.replay = about, replay
        self.known: dict[str, pd.DataFrame] = {}
        self.elsewhere: set[str] = set()  # other GPUs than the lesson's, of frames read since this was emptied
        self.gpu = getattr(about, "GPU", "")

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self.known:
            if not self.replay:
                raise NotRecorded(f"{name} was not measured in this run")
            self.known[name] = self.about.FRAMES[name].read(self.gpu)
        found = getattr(self.known[name].attrs.get("origin"), "machine", None)
        if self.replay and found and found.slug != (self.gpu or machine.slug()):
            self.elsewhere.add(found.name)
        return self.known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.about.FRAMES)

    def __len__(self) -> int:
        return len(self.about.FRAMES)

    def of(self, op: str) -> pd.DataFrame:
        """All rows of an operator, each point once."""
        found = []
        for name, spec in self.about.FRAMES.items():
            if isinstance(spec, Recorded) and spec.op == op and (self.replay or name in self.known):
                with contextlib.suppress(NotRecorded):
                    found.append(self[name])
        if not found:
            raise NotRecorded(f"no rows of {op}")
        frame = pd.concat(found, ignore_index=True)
        frame = frame.drop_duplicates(["variant", "dtype", *tables.dims(frame)], keep="last", ignore_index=True)
        frame.attrs.update(found[0].attrs)
        return frame


@dataclass(frozen=True)
class Claim:
    """A sentence about recorded numbers, and the condition under which it is true.

    Attributes
    ----------
    id : str
        Its permanent address on the evidence page.
    text : str
        A sentence. Its fields are ``least``, ``most``, ``median``, ``count``, ``good`` and what `numbers` returns. The
        format ``{median:.1x}`` writes a ratio as 5.4x.
    values : callable
        From `Frames` to a Series with a value per point.
    condition : str
        ``>= 0.97``: what each value must fulfil. Empty where a number is reported without a verdict.
    scope : str
        Which points, in words.
    kind : str
        ``claim``, ``target`` (set before the kernel was written) or ``statement`` (published by others).
    lesson : bool
        Whether the lesson shows it; at most four are.
    numbers : callable, optional
        From `Frames` to more fields of `text`.
    """

    id: str
    text: str
    values: Callable[[Frames], pd.Series]
    condition: str
    scope: str
    kind: str = "claim"
    lesson: bool = False
    numbers: Callable[[Frames], Mapping[str, Any]] | None = None


def steps_correct(
    scope: str,
    text: str = "Every step is correct at the sizes at which it was timed.",
    keys: Sequence[str] = ("step", "shape"),
) -> Claim:
    """The claim that every step of a lesson gave a correct result when it was timed.

    Parameters
    ----------
    scope, text : str
        As of `Claim`.
    keys : sequence of str
        Columns of the lesson's steps that name a result.
    """
    return Claim("steps-correct", text, lambda frames: frames["steps"].set_index([*keys])["correct"], "== 1", scope)


def within_tolerance(rows: Callable[[Frames], pd.DataFrame], scope: str, text: str) -> Claim:
    """The claim that results of an operator's record are within tolerance.

    Parameters
    ----------
    rows : callable
        From `Frames` to the rows of the record.
    scope, text : str
        As of `Claim`.
    """
    return Claim(
        "within-tolerance", text, lambda frames: (some := rows(frames))["error"] / some["tolerance"], "<= 1", scope
    )


def deterministic(rows: Callable[[Frames], pd.DataFrame], scope: str, text: str) -> Claim:
    """The claim that two runs gave the same bits at each row of an operator's record.

    Parameters
    ----------
    rows : callable
        From `Frames` to the rows of the record.
    scope, text : str
        As of `Claim`.
    """
    return Claim("deterministic", text, lambda frames: rows(frames)["deterministic"].eq("yes"), "== 1", scope)


@dataclass(frozen=True)
class Outcome:
    """What became of a claim: ``holds`` is None where nothing was measured, or nothing is asked."""

    claim: Claim
    text: str
    numbers: pd.Series
    good: pd.Series
    worst: str

    @property
    def holds(self) -> bool | None:
        """Whether the condition is fulfilled at every point."""
        return bool(self.good.all()) if len(self.good) else None

    @property
    def shown(self) -> str:
        """What a lesson shows of it: nothing but the sentence where it holds, or where it is of others."""
        return self.detail if self.holds is False and self.claim.kind != "statement" else ""

    @property
    def detail(self) -> str:
        """The condition, at how many points it is fulfilled, and the worst one."""
        if not len(self.good):
            return "not measured" if self.claim.condition else ""
        if len(self.good) == 1:
            return f"{self.worst}; condition {self.claim.condition}"
        held, many = self.good.sum(), len(self.good)
        fails = f"holds at {held} of {many} points" if held < many else f"at all {many} points"
        return f"{fails}; worst {self.worst}; condition {self.claim.condition}"


class _Fields(string.Formatter):
    """Fills in what was measured, and says so where nothing was."""

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        return kwargs.get(key)

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or (isinstance(value, float) and value != value):
            return "(not measured)"
        if format_spec.endswith("x"):  # a ratio: the sign goes with it where it is missing
            return f"{super().format_field(value, format_spec[:-1] + 'f')}x"
        return str(super().format_field(value, format_spec)).replace("%", " %")


def evaluate(claim: Claim, frames: Frames) -> Outcome:
    """Evaluate a claim on what was recorded.

    Raises
    ------
    ValueError
        For a condition that is not a comparison with a number.
    """
    elsewhere: set[str] = getattr(frames, "elsewhere", set())  # any mapping has rows, and may not know their GPU
    elsewhere.clear()
    try:
        values = claim.values(frames).dropna().astype(float)
        more = dict(claim.numbers(frames)) if claim.numbers else {}
    except NotRecorded:
        values, more = pd.Series(dtype=float), {}
    good, worst = pd.Series(dtype=bool), ""
    if claim.condition and len(values):
        found = re.fullmatch(r"(>=|<=|==|>|<) (-?[\d.]+)", claim.condition)
        if not found:
            raise ValueError(f"claim {claim.id}: expected a condition such as '>= 0.97', got {claim.condition!r}")
        limit = float(found[2])
        good = _COMPARE[found[1]](values, limit)
        off = limit - values if found[1] in (">=", ">") else values - limit
        at = int((off.abs() if found[1] == "==" else off).to_numpy().argmax())
        name = _named(values.index[at])
        worst = f"{name}: {tables.number(float(values.iloc[at]))}" if name else tables.number(float(values.iloc[at]))
    if len(values):
        more = {"least": values.min(), "most": values.max(), "median": values.median(), **more}
    text = _Fields().format(claim.text, count=len(values), good=int(good.sum()), **more)
    if "(not measured)" in text:  # a sentence that lacks a number is neither true nor false
        good, worst = pd.Series(dtype=bool), ""
    elif elsewhere:
        text += f" Measured on {' and '.join(sorted(elsewhere))}."
    return Outcome(claim, text, values, good, worst)


def _named(key: Any) -> str:
    return ", ".join(str(part) for part in (key if isinstance(key, tuple) else (key,)) if part != "")


def lessons() -> list[str]:
    """The names of all lessons that have evidence."""
    import pkgutil

    return sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name.startswith("plot_"))


def load(name: str) -> ModuleType:
    """The evidence of a lesson.

    Raises
    ------
    ValueError
        Names the lessons that there are.
    """
    if name not in lessons():
        raise ValueError(f"lesson.open: expected one of {', '.join(lessons())}, got {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
