"""The page of a lesson: see `Page`."""

from __future__ import annotations

import copy
import functools
import html
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

import fusebook
from fusebook import plots
from fusebook.cards import OPS
from fusebook.lesson import _checks, _counters, _numbers, _place, _show, evidence
from fusebook.lesson import picture as pictures
from fusebook.lesson._claims import Claim, Claims, exercise
from fusebook.lesson._counters import counters
from fusebook.lesson._results import NoResults, measured, results, study
from fusebook.lesson._show import Shown
from fusebook.lesson.evidence import Frames, Measured, NotRecorded, Recorded
from fusebook.measure import bench, inputs, machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Page", "open"]

#: Rows at most of inputs in Triton's interpreter, which takes a program at a time; no group of rows divides it.
_INTERPRETED = 67


def open(name: str, **asked: int) -> Page:
    """Open the page of a lesson: its operators, record, GPU, command line and evidence.

    Parameters
    ----------
    name : str
        Of the script, without ``.py``.
    **asked
        ``gpus=2`` of a lesson on several GPUs: how many it starts ranks on, unless its command line says more.

    Raises
    ------
    ValueError
        Names the lessons that there are.
    """
    about = evidence.load(name)
    machine.running = name
    counted = about.FRAMES.get("counters")
    kind = getattr(about, "PAGE", Page)
    if counted and os.environ.get("_FUSEBOOK_COUNT") == counted.name:
        _counters.wait()
        kind = _Counted
    elif counted and _recording() and _counters.able():
        _counters.begin(counted.name)
    made: Page = kind(about, **asked)
    if kind is _Counted or _recording():
        vars(made).update(dict.fromkeys(_SHOWN, _nothing))
    if _recording():
        made._record_rows()  # before the page calls the library, since first calls compile
    return made


#: What a run that records leaves out, as no record has it. Kernels of the page are checked where their steps are timed,
#: and by the replay that judges the claims.
_SHOWN = "verdict traffic check catches check_all check_graph graphs clusters plot findings use source exercise".split()


def _nothing(*given: Any, **named: Any) -> Shown:
    return Shown("", "")


class _Pictures:
    """The pictures of `fusebook.lesson.picture`, each printed at once in a script."""

    def __getattr__(self, name: str) -> Callable[..., Shown]:
        draw = getattr(pictures, name)
        return lambda *given, **named: draw(*given, **named)._now()


def _or_banner(show: Callable[..., Any]) -> Callable[..., Any]:
    """A method that shows how to record what it lacks, so that a new lesson can be read before it is recorded.

    A lesson whose evidence has ``UNRECORDED = True`` says in the box under its title that no GPU has measured it, and
    elsewhere in a line; a strict build accepts that.
    """

    @functools.wraps(show)
    def shown(page: Page, *given: Any, **named: Any) -> Any:
        try:
            return show(page, *given, **named)
        except (NoResults, NotRecorded) as error:
            if getattr(page.about, "UNRECORDED", False):
                return page._unrecorded() if show.__name__ == "verdict" else Shown(_NOT_YET, "Not measured yet.")._now()
            command = "run `nox -s record` on a machine with a GPU."
            missing = error if isinstance(error, NoResults) else NoResults(f"There is {error}: {command}")
            if _place.flag("FUSEBOOK_STRICT"):
                raise missing from None
            return missing.banner._now()

    return shown


#: What a lesson shows where figures will be.
_NOT_YET = '<p class="fb-check">Not measured yet.</p>'


class _Findings(Claims):
    """Claims without a line that counts them: the footer has one."""

    count = ""  # type: ignore[assignment]


class Page:
    """What a lesson calls. Each method shows one result; see `open`."""

    def __init__(self, about: ModuleType) -> None:
        self.name = about.__name__.rpartition(".")[2]
        self.about = about
        self.op = OPS[about.OPERATORS[0]]
        sweep = about.FRAMES["sweep"]
        self.asked = study(self.op, config=sweep.config, dtype=sweep.dtype)
        self.frames = Frames(about, replay=not _place.live())
        self.picture: Any = _Pictures()
        self._whole: dict[tuple[int, ...], int] = {}

    def of(self, operator: str) -> Page:
        """The same lesson with another one of its operators, whose inputs and checks these are then.

        Parameters
        ----------
        operator : str
            Its name.
        """
        other = copy.copy(self)
        other.op = OPS[operator]
        return other

    # What is measured or replayed

    def _sweep(self) -> pd.DataFrame:
        known = self.frames.known
        if "sweep" not in known:
            known["sweep"] = self.asked.results(variants=self.about.FRAMES["sweep"].variants)
        return self.frames["sweep"]

    def _everything(self) -> pd.DataFrame:
        """All rows of the operator that there are: those of the sweep, where this run measures."""
        self._sweep()
        return self.frames.of(self.op.name)

    def measure(self, function: Callable[[], pd.DataFrame], name: str) -> pd.DataFrame:
        """What a function of the page measures on a GPU, or its record; for claims as well, if a frame is of that name.

        Parameters
        ----------
        function : callable
            Returns a frame.
        name : str
            Of the record.
        """
        frame = measured(name, function)
        for key, spec in self.about.FRAMES.items():
            if isinstance(spec, Measured) and spec.name == name:
                self.frames.known[key] = spec.renamed(frame)
                return self.frames.known[key]
        return frame

    # What is shown

    @_or_banner
    def verdict(self) -> Shown:
        """The box: time at one size, over all sizes, and memory."""
        words, kind = getattr(self.about, "WORDS", ""), getattr(self.about, "CLOCK", "cold")
        lines, bars = _numbers.verdict(self.op, self._everything(), self.about.EXAMPLE, words, kind)
        if kept := getattr(self.about, "KEPT", ""):  # what stays allocated, which no peak of a call shows
            lines[-1] += f" {kept}"
        if memory := getattr(self.about, "MEMORY", ""):  # a formula says more than the most of some sizes
            lines[-1] = f"**Memory.** {memory}"
        return self._box(lines, bars, _numbers.origin(self._everything()))

    def _box(self, lines: Sequence[str], bars: Shown | None, label: str) -> Shown:
        """Sentences next to their picture, and under them where the numbers are from."""
        links = [
            (f"fusebook.{getattr(self.about, 'CALLED', self.op.name)}", "api"),
            ("evidence", f"evidence/{self.name}"),
            ("how GPU time is measured", "method"),
        ]
        linked = " · ".join(
            f'<a href="{html.escape(address)}">{_show.rich(text)}</a>'
            for text, document in links
            if (address := _numbers.site(document))
        )
        made = "".join(f'<p class="fb-verdict-line">{_numbers.joined([line])}</p>' for line in lines)
        label = f"{label[:1].upper()}{label[1:]}.{self._lacking()}"
        return Shown(
            f'<div class="fb-box fb-verdict-box"><div>{made}<p class="fb-box-claims">{_show.rich(label)} {linked}</p>'
            f"</div>{bars._repr_html_() if bars else ''}</div>",
            "\n".join([*(_numbers.plainly([line]) for line in lines), f"({label})"]),
        )._now()

    def _lacking(self) -> str:
        """Which steps the record lacks; empty where it has all, or none."""
        try:
            known = set(self.frames["steps"]["step"])
        except NotRecorded:
            return ""
        told = [label for name, label in _numbers.labels(self.about).items() if name not in known]
        return f" Not measured yet: {', '.join(told)}." if told else ""

    def _unrecorded(self) -> Shown:
        """The box of a lesson that no GPU has measured."""
        said = [
            "**Not measured.** No GPU has measured this lesson yet, so it shows no times. Its code runs on the CPU, in "
            "Triton's interpreter, and is checked there.",
            f"On a machine with a GPU, `nox -s record -- {self.name}` measures it.",
        ]
        return Shown(
            f'<div class="fb-box fb-verdict-box"><p class="fb-verdict-line">{_numbers.joined(said)}</p></div>',
            "\n".join(said).replace("**", ""),
        )._now()

    def traffic(self, *, fused: float, **eager: Callable[..., Any]) -> Shown:
        """Count what eager code moves, on the meta device, and draw it above what a fused kernel has to move.

        Parameters
        ----------
        fused : float
            Elements that a fused kernel moves, in multiples of the matrix; the card must agree.
        **eager : callable
            The code, by its name.
        """
        ((name, function),) = eager.items()
        sizes, dtype = getattr(self.about, "UNIT", None), getattr(torch, self.about.DTYPES[0])
        gain, steps, total = _checks.predicted(self.op, function, fused, dtype, sizes, self._taking)
        unit = "".join(_checks.units(self.op, sizes).values())
        return pictures.segments(
            f"Counted: {total} elements. {len(steps) - 1} kernels move {unit} or more; "
            f"a fused one moves {fused:g}{unit}. Predicted: {gain:.1f}x.",
            {name: steps[:-1], "fused": steps[-1:]},
            unit,
        )._now()

    def stress(self, *sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
        """Inputs that do not forgive, of the operator's card; at most 67 rows in Triton's interpreter.

        Parameters
        ----------
        *sizes : int
            Of the problem, in the card's order.
        dtype : torch.dtype
        seed : int
        """
        names = [key for key, value in self.op.edges[0].items() if isinstance(value, int)]
        taken = list(sizes)
        if self.op.rows and not torch.cuda.is_available():
            taken[0] = min(taken[0], getattr(self.about, "INTERPRETED", _INTERPRETED))
            self._whole[tuple(taken)] = sizes[0]
        words = {**self.op.edges[0], **getattr(self.about, "STRESS", {})}
        made = self.op.make(inputs.generator(seed), dtype, **{**words, **dict(zip(names, taken, strict=True))})
        return made[0] if len(made) == 1 else made

    def _taking(self, *given: Any) -> Sequence[Any]:
        """The arguments of a step, from the card's inputs."""
        return given

    def _outputs(self, got: Any, *given: Any) -> Any:
        """The card's outputs, from the result of a step and from the card's inputs."""
        return got

    def check(self, function: Callable[..., Any], *given: Any) -> Shown:
        """Whether a function is correct: its error against float64, and the tolerance.

        Parameters
        ----------
        function : callable
        *given
            Its inputs.
        """
        shape = next((tuple(v.shape) for v in given if isinstance(v, torch.Tensor)), ())
        whole = self._whole.get(shape, 0)
        of = f"{shape[0]} (with a GPU: {whole})" if shape and whole > shape[0] else ""
        return _checks.checked(self.op, function, given, of, self._heading() if _place.script() else "")

    def _heading(self) -> str:
        """The heading above the line that runs in a script, with its gain; empty where it has none."""
        frame: Any = sys._getframe(1)
        while Path(frame.f_code.co_filename).parent == Path(__file__).parent:
            frame = frame.f_back
        try:
            lines = Path(frame.f_code.co_filename).read_text(encoding="utf-8").splitlines()[: frame.f_lineno]
        except OSError:
            return ""
        found = next((line for line in reversed(lines) if re.match(r"# \S.*\{gain ", line)), "")
        below = lines[lines.index(found) + 1 :] if found else []
        if not found or sum(bool(re.match(r"# ([-~])\1{3,}", line)) for line in below) > 1:
            return ""
        return _numbers.filled(found[2:], self.frames)

    def catches(self, function: Callable[..., Any], **given: Any) -> Shown:
        """Show on which inputs a mistake passes; on the last ones it has to fail.

        Parameters
        ----------
        function : callable
            The mistake.
        **given : torch.Tensor or tuple
            Inputs, by a name.
        """
        return _checks.caught(self.op, function, given)

    def check_all(self, *functions: Callable[..., Any], special: bool = False) -> Shown:
        """Check functions on many inputs: small sizes, widths of the lesson, three dtypes.

        Parameters
        ----------
        *functions : callable
        special : bool
            Whether also on rows of -inf, NaN, inf and the largest finite values.
        """
        return _checks.all_checked(self.op, functions, self.about.SHAPES, special)

    @_or_banner
    def plot(self, kind: str, over: str) -> Axes | Shown:
        """The sweep of the lesson as a figure.

        Parameters
        ----------
        kind : str
            A function of `fusebook.plots`: ``bandwidth``.
        over : str
            The size on the x axis.
        """
        sweep = self._sweep()
        frame = sweep[sweep["dtype"] == sweep["dtype"].iloc[0]]
        frame.attrs.update(sweep.attrs)
        label = getattr(self.about, "XLABEL", f"columns of a row, {over}" if over == "N" else over)
        ax = getattr(plots, kind)(frame, xlabel=label, size=(8.0, 2.6))
        if frame[over].max() > 100 * frame[over].min():
            ax.set_xscale("log", base=2)
        if _place.script():
            return Shown("", f"Figure: {ax.get_title(loc='left')} ({_numbers.origin(sweep)})")._now()
        return ax

    @_or_banner
    def steps(self, **steps: Callable[..., Any]) -> Shown:
        """Time every step of the lesson, or replay its record: percent of copy speed, and lines of code.

        Parameters
        ----------
        **steps : callable
            The steps in their order, as the evidence names them.

        Raises
        ------
        ValueError
            For other steps than the evidence names.
        """
        if tuple(steps) != self.about.STEPS:
            raise ValueError(f"page.steps: expected {', '.join(self.about.STEPS)}, got {', '.join(steps)}")
        spec = self.about.FRAMES["steps"]
        extra = self._extra(steps) if _recording() else {}

        def measured_steps() -> pd.DataFrame:
            return self._measured(steps, extra)

        code_of = _numbers.code_of(self.op, self.about, steps)
        frame = measured(spec.name, measured_steps, by_device=True, code_of=code_of)
        renamed = spec.renamed(frame)
        renamed.attrs.update(frame.attrs)
        self.frames.known["steps"] = renamed
        _place.remember("gains", self.frames)
        if _recording() and "counters" in self.about.FRAMES:
            self.frames.known["counters"] = self._count(steps)
        wide, caption = self._staircase(renamed, steps)
        caption += "; empty: not measured" if wide.drop(columns="lines", errors="ignore").isna().any(axis=None) else ""
        return _show.table(wide, f"{caption}; {_numbers.origin(frame)}", fold=False)

    def _measured(
        self, steps: Mapping[str, Callable[..., Any]], extra: Mapping[str, Callable[..., Any]]
    ) -> pd.DataFrame:
        """What this run measures of the steps."""
        return _numbers.measured_steps(self.op, self.about, steps, extra)

    def _staircase(self, frame: pd.DataFrame, steps: Mapping[str, Callable[..., Any]]) -> tuple[pd.DataFrame, str]:
        """The table of the steps, and what it shows."""
        wide = _numbers.staircase(self.op, self.about, frame, steps)
        return wide, f"Percent of copy speed in GPU time, {getattr(self.about, 'BY', 'by N and dtype')}"

    def _extra(self, steps: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        found = {name: made(steps) for name, made in self.about.EXTRA_STEPS.items()}
        return {name: step for name, step in found.items() if step}

    def _count(self, steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
        script = getattr(sys.modules["__main__"], "__file__", "") or ""
        name = self.about.FRAMES["counters"].name
        if hasattr(self.about, "to_count"):
            to_count = functools.partial(self.about.to_count, steps)
            return counters(name, to_count, script, _numbers.code_of(self.op, self.about, steps))
        extra = self._extra(steps) if getattr(self.about, "COUNT_EXTRA", True) else {}
        return _numbers.counted(self.op, self.about, name, {**steps, **extra}, script)

    def table(self, frame: pd.DataFrame, caption: str) -> Shown:
        """A table with a caption.

        Parameters
        ----------
        frame : pandas.DataFrame
        caption : str
            What a reader sees in it, with units.
        """
        return _show.table(frame, caption, fold=False)

    def findings(self) -> Shown:
        """The claims that the lesson shows: at most four. Before it is recorded, those that have numbers."""
        found = [evidence.evaluate(claim, self.frames) for claim in self.about.CLAIMS if claim.lesson]
        if getattr(self.about, "UNRECORDED", False):
            found = [o for o in found if len(o.numbers)] or found
        return _Findings([Claim(o.text, o.holds, kind=o.claim.kind, detail=o.shown) for o in found])._now()

    @_or_banner
    def use(self) -> Shown:
        """When to use the library: a table of three choices, where it loses, and how to install it."""
        frame = self._everything()
        made = _show.table(
            _numbers.choices(self.op, frame, getattr(self.about, "CLOCK", "cold")),
            "Sizes at which each is within 2 % of the fastest; median time relative to Fusebook; peak memory",
            fold=False,
        )
        gradient = f"{self.op.name}_backward"
        sentences = _numbers.limits(
            self.op,
            frame,
            self.frames.of(gradient) if gradient in self.about.OPERATORS and self.frames.replay else None,
            getattr(self.about, "CLOCK", "cold"),
            self.about,
        )
        return self._used(made, sentences)

    def _used(self, made: Shown, sentences: Sequence[str]) -> Shown:
        """A table and sentences on when to use the library, and how to install it."""
        install = _numbers.install()
        return Shown(
            f"{made._repr_html_()}<p>{_numbers.joined(sentences)}</p><p>{_numbers.joined(install)}</p>",
            "\n".join([*(_numbers.plainly([line]) for line in sentences), _numbers.plainly(install)]),
        )._now()

    def exercise(
        self, attempt: Callable[..., Any], reference: Callable[..., Any], given: Sequence[tuple[Any, ...]]
    ) -> Shown:
        """Check a reader's function against a reference in float64.

        Parameters
        ----------
        attempt : callable
        reference : callable
            The meaning in plain PyTorch.
        given : sequence of tuple
            Inputs to try, each the arguments of both.
        """
        with np.errstate(all="ignore"):  # the interpreter is NumPy, which warns of NaN
            return exercise(f"`{attempt.__name__}` is correct", attempt, reference, given)

    def source(self, name: str, fold: bool = False) -> Shown:
        """The kernel of a function of the library, as it is installed.

        Parameters
        ----------
        name : str
            Of the function.
        fold : bool
            Whether it is shown on demand only.
        """
        module = sys.modules[getattr(fusebook, name).__module__]  # a card may wrap it
        kernels = [getattr(module, kernel) for kernel in self.about.KERNELS[name]]
        source, helpers = _show.Source(*kernels, doc=False), _helpers(kernels)
        shown = _show.Folded(f"The kernel of `fusebook.{name}`", helpers, source) if fold else source
        return Shown(shown.html, f"The kernel of fusebook.{name}: {module.__file__}")._now()

    def footer(self) -> Shown:
        """Solutions, the evidence in one line, and what the page ran on."""
        if _recording():
            self._record()
            return Shown("", "")
        found = [evidence.evaluate(claim, Frames(self.about)) for claim in self.about.CLAIMS if claim.condition]
        held = sum(o.holds is True for o in found)
        text = f"Evidence: {len(found)} checks behind this page, {held} hold."
        if missing := sum(o.holds is None for o in found):
            text += f" {missing} {'was' if missing == 1 else 'were'} not measured."
        address = html.escape(_numbers.site(f"evidence/{self.name}"))
        failed, items = [], []
        for o in (o for o in found if o.holds is False):
            what = {"claim": "claim", "target": "target", "statement": "statement of others"}[o.claim.kind]
            failed.append(f"{what}: {o.text} ({o.detail})".replace("`", ""))
            named = f'<a href="{address}#{o.claim.id}">{what}</a>' if address else what
            items.append(f"<li>{named}: {_show.rich(o.text)} ({_show.rich(o.detail)})</li>")
        link = f' <a href="{address}">All claims, sizes, clocks and counters</a>.' if address else ""
        solutions = _show.solution(f"solutions/{self.name}.py")
        ran, fails = _show.environment(), f"{len(items)} {'does' if len(items) == 1 else 'do'} not hold"
        listed = f'<details class="fb-fold"><summary>{fails}</summary><ul>{"".join(items)}</ul></details>'
        return Shown(
            f'{solutions._repr_html_()}<p class="fb-evidence"><strong>{text}</strong>{link}</p>'
            f"{listed if items else ''}"
            f'<details class="fb-fold"><summary>What this page ran on</summary>{ran._repr_html_()}</details>',
            "\n- ".join([f"{text} {fails}:" if items else text, *failed]),
        )._now()

    def _record_rows(self) -> None:
        """Record what the evidence reads of operators: no row twice, and all rows of a point together.

        Frames may share points, whose inputs and references take a while.
        """
        asked: dict[Any, dict[str, None]] = {}
        for spec in self.about.FRAMES.values():
            if isinstance(spec, Recorded) and not spec.borrowed:
                op = OPS[spec.op]
                points = [tuple(dims.items()) for _, dims in bench.points(op, spec.config)]
                for key in itertools.product([spec.op], bench.dtypes(spec.dtype), points):
                    asked.setdefault(key, {}).update(dict.fromkeys(spec.variants or op.variants))
        together: dict[Any, list[Any]] = {}
        for (operator, dtype, dims), variants in asked.items():
            together.setdefault((operator, dtype, tuple(variants)), []).append(("", dict(dims)))
        for (operator, dtype, some), at in together.items():
            results(OPS[operator], config=at, dtype=dtype, variants=some)

    def _record(self) -> None:
        """Record what the evidence reads and the lesson does not show."""
        for name, spec in self.about.FRAMES.items():
            if isinstance(spec, Measured) and spec.function and name not in self.frames.known:
                measured(spec.name, spec.function)


def _helpers(kernels: Sequence[Any]) -> Shown:
    """The device functions that kernels of the library call: their names, and what each does."""
    found = {}
    for kernel in kernels:
        for name in kernel.fn.__code__.co_names:
            called = getattr(kernel.fn.__globals__.get(name), "fn", None)
            if callable(called) and (doc := inspect.getdoc(called)):
                found[name] = " ".join(doc.partition("\n\n")[0].split())
    items = "".join(f"<li><code>{name}</code>: {_show.rich(text)}</li>" for name, text in found.items())
    return Shown(f"<p>It calls these device functions:</p><ul>{items}</ul>", ", ".join(found))


class _Counted(Page):
    """A page that Nsight Compute runs once more for its counters: it shows and measures nothing up to its steps."""

    def steps(self, **steps: Callable[..., Any]) -> Shown:
        """Launch every step between the counters' marks; the process ends."""
        self._count(steps)
        return Shown("", "")


def _recording() -> bool:
    return _place.live() and bool(os.environ.get("_FUSEBOOK_RECORD"))
