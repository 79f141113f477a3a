"""What a page needs: its arguments, its results, and prose that cannot go stale.

A page asks for results and never whether there is a GPU. With one, they are measured; without, they are read from the
records of a named GPU and say so. What a block ends in is an object that renders itself in the gallery and in a
notebook, and prints itself when the page runs as a script.

Environment
-----------
FUSEBOOK_STRICT
    ``1``: a false claim and a page without results are errors.
FUSEBOOK_REPLAY
    ``1``: replay the record on a machine that could measure.
FUSEBOOK_GPU
    The recorded machine to replay, ``nvidia-h200`` unless set.
FUSEBOOK_RECORD
    A folder of records: what is measured is written there too.
FUSEBOOK_DOWNLOADS
    Where downloads go; the current folder unless set.
FUSEBOOK_REPOSITORY
    The address of the repository, for links to it.
"""

from __future__ import annotations

import argparse
import ast
import datetime as dt
import hashlib
import html
import inspect
import os
import re
import shutil
import string
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
import torch
from matplotlib.axes import Axes

from fusebook import bench, check, machine, record, tables
from fusebook.kernels import OPS
from fusebook.op import Cost, Op

__all__ = [
    "Claims",
    "Folded",
    "Listing",
    "NoResults",
    "Source",
    "Tabs",
    "arguments",
    "claim",
    "claims",
    "downloads",
    "exercise",
    "holds",
    "measured",
    "provenance",
    "records",
    "results",
    "say",
    "solution",
    "table",
]


# Where a page runs ----------------------------------------------------------------------------------------------------


def _sphinx() -> bool:
    return "sphinx_gallery.gen_rst" in sys.modules


def _notebook() -> bool:
    return "ipykernel" in sys.modules and not _sphinx()


def _script() -> bool:
    """A plain ``python page.py``, where an expression at the end of a block shows nothing by itself."""
    if _sphinx() or _notebook() or hasattr(sys, "ps1"):
        return False
    return bool(getattr(sys.modules.get("__main__"), "__file__", "")) and "pytest" not in sys.modules


def _flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def _live() -> bool:
    return torch.cuda.is_available() and not _flag("FUSEBOOK_REPLAY")


def _slug() -> str:
    return os.environ.get("FUSEBOOK_GPU") or "nvidia-h200"


def _folder() -> Path:
    folder = Path(os.environ.get("FUSEBOOK_DOWNLOADS") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _link(file: Path) -> str:
    """The address of a download as seen from the page."""
    return f"downloads/{file.name}" if os.environ.get("FUSEBOOK_DOWNLOADS") else file.name


def _rich(text: str) -> str:
    """Escaped HTML; what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


class _Shown:
    """What renders itself: in the gallery, in a notebook, in a terminal, and by itself in a script."""

    def _repr_html_(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        raise NotImplementedError

    def _now(self) -> Any:
        if _script():
            print(repr(self), end="\n\n")
        return self


# Arguments and results ------------------------------------------------------------------------------------------------


def arguments(
    op: Op, *, config: str = "triton", dtype: str = "float32", warmup: int = 5, repeat: int = 30
) -> argparse.Namespace:
    """What a page was asked for on its command line.

    Parameters
    ----------
    op : Op
        The card whose configs are the choices of ``--config``.
    config, dtype : str
        Defaults: comma lists.
    warmup, repeat : int
        Defaults.

    Returns
    -------
    argparse.Namespace
        With ``config``, ``dtype``, ``warmup`` and ``repeat``. In a notebook and under Sphinx the defaults: that
        command line belongs to somebody else.

    Raises
    ------
    SystemExit
        With code 2 and the choices, on nonsense.
    """

    def checked(read: Callable[[str], Any]) -> Callable[[str], str]:
        def type_(text: str) -> str:
            try:
                read(text)
            except (ValueError, TypeError) as error:
                raise argparse.ArgumentTypeError(str(error)) from None
            return text

        return type_

    def count(least: int) -> Callable[[str], int]:
        def type_(text: str) -> int:
            if not text.isdigit() or int(text) < least:
                raise argparse.ArgumentTypeError(f"expected a whole number from {least} up, got {text!r}")
            return int(text)

        return type_

    onnx = {"1": "float32", "10": "float16"}
    about = (getattr(sys.modules.get("__main__"), "__doc__", None) or op.name).strip().splitlines()[0]
    parser = argparse.ArgumentParser(
        description=f"{about}: with a CUDA GPU this page measures, without one it replays recorded results."
    )
    parser.add_argument(
        "--config",
        type=checked(lambda text: bench.points(op, text)),
        default=config,
        metavar="NAME|SIZES,...",
        help=f"a comma list of {', '.join(op.configs)} and of sizes such as 781 or 4096x781 (default: {config})",
    )
    parser.add_argument(
        "--dtype",
        type=checked(bench.dtypes),
        default=dtype,
        metavar="NAME,...",
        help=f"a comma list of float32, bfloat16, float16, float64 (default: {dtype})",
    )
    parser.add_argument(
        "--itype", choices=tuple(onnx), help="ONNX's number of a dtype instead: 1 is float32, 10 is float16"
    )
    parser.add_argument("--warmup", type=count(0), default=warmup, help=f"calls before the clock (default: {warmup})")
    parser.add_argument("--repeat", type=count(1), default=repeat, help=f"calls timed (default: {repeat})")
    given = parser.parse_args([] if _notebook() or _sphinx() or not _script() else None)
    if given.itype:
        given.dtype = onnx[given.itype]
    del given.itype
    return given


class NoResults(SystemExit):
    """There is neither a GPU nor a record: one sentence that says how to get one, and exit code 1.

    Parameters
    ----------
    sentence : str
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence

    @property
    def banner(self) -> _Banner:
        """The sentence as something that renders itself on a page."""
        return _Banner(self.sentence)


@dataclass(frozen=True, repr=False)
class _Banner(_Shown):
    sentence: str

    def _repr_html_(self) -> str:
        return f'<div class="fb-banner" role="note"><p>{_rich(self.sentence)}</p></div>'

    def __repr__(self) -> str:
        return self.sentence


def results(
    op: Op,
    *,
    config: str,
    dtype: str = "float32",
    warmup: int = 5,
    repeat: int = 30,
    variants: Sequence[str] | None = None,
    live: str | None = None,
) -> pd.DataFrame:
    """Results of a card: measured where there is a GPU, replayed from a record where there is none.

    Parameters
    ----------
    op : Op
    config : str
        A comma list of the card's configs and of sizes.
    dtype : str
        A comma list of dtypes.
    warmup, repeat : int
        Calls before the clock and calls timed, where they are measured.
    variants : sequence of str, optional
        Fewer than the card has.
    live : str, optional
        The config to measure where there is a GPU, when `config` would take too long for a page: a record answers for
        all of it at no cost. A run that records measures all of it.

    Returns
    -------
    pandas.DataFrame
        The columns of `fusebook.bench.run`. ``attrs`` says on which machine, whether just now, and what is stale.

    Raises
    ------
    NoResults
        Where there is neither a GPU nor a record.
    """
    if _live():
        folder = os.environ.get("FUSEBOOK_RECORD")
        asked = config if folder else live or config
        frame = bench.run(op, config=asked, dtype=dtype, variants=variants, warmup=warmup, repeat=repeat)
        if folder:
            record.write(frame, Path(folder))
        return frame
    slug = _slug()
    command = f"python -m fusebook.record {op.name} --config {config} --dtype {dtype}"
    if op.name not in OPS:  # a card of its own page: what records kernels does not know it
        command = "nox -s record"
    if not record.exists(op.name, slug):
        _nothing(f"{op.name} on {slug}", command)
    frame = _replayed(record.read(op, slug), op, config, dtype, command)
    return frame if variants is None else tables.where(frame, variant=list(variants))


def _nothing(what: str, command: str) -> NoReturn:
    raise NoResults(
        f"There is no CUDA GPU here and no record of {what} to replay: run `{command}` on a machine with a GPU."
    )


def _replayed(frame: pd.DataFrame, op: Op, config: str, dtype: str, command: str) -> pd.DataFrame:
    """The rows of a record that were asked for, in the order asked; refuses where a whole config is missing.

    A point counts wherever it was measured: under the config that was asked for if it is there, else under another.
    """
    sizes = list(bench.points(op, config)[0][1])
    frame = frame.copy()
    frame["_sizes"] = pd.Series(list(zip(*(frame[k].astype(str) for k in sizes), strict=True)), dtype=object)
    asked: dict[str, list[tuple[str, ...]]] = {}
    for name, dims in bench.points(op, config):
        asked.setdefault(name, []).append(tuple(str(v) for v in dims.values()))
    parts = []
    for name in bench.dtypes(dtype):
        for label, points in asked.items():
            part = frame[frame["_sizes"].isin(points) & (frame["dtype"] == name)]
            if part.empty:
                _nothing(f"{op.name} for {label} in {name} on {frame.attrs['machine'].slug}", command)
            order = part["_sizes"].map(points.index)
            part = part.assign(_order=order, _other=part["config"] != label).sort_values(
                ["_order", "_other"], kind="stable"
            )
            parts.append(part.drop_duplicates(["_sizes", "variant"]))
    found = pd.concat(parts).drop(columns=["_sizes", "_order", "_other"]).reset_index(drop=True)
    found.attrs.update(frame.attrs)
    return found


def measured(name: str, function: Callable[[], pd.DataFrame], live: bool | None = None) -> pd.DataFrame:
    """What no card measures: runs a function where there is a GPU, replays its record where there is none.

    Parameters
    ----------
    name : str
        Of the record, ``records/<gpu>/pages/<name>.csv``.
    function : callable
        Measures and returns a DataFrame.
    live : bool, optional
        Whether this machine can run the function, where that is not a matter of a GPU: what needs a compiler, say. It
        is replayed where this is false, and recorded where there is a GPU too.

    Returns
    -------
    pandas.DataFrame
        ``attrs`` as those of `results`, and ``page``, the record's name.

    Raises
    ------
    NoResults
        Where there is neither a GPU nor a record.
    """
    digest = _digest(function)
    if live and not torch.cuda.is_available():
        frame = function()
        frame.attrs.update(measured=True, stale=[], date=dt.date.today().isoformat())
    elif live is not False and _live():
        frame = function()
        installed = machine.versions("torch", "triton")
        frame.attrs.update(
            machine=machine.here(),
            measured=True,
            stale=[],
            versions="; ".join(f"{k} {v}" for k, v in installed.items()),
            date=dt.date.today().isoformat(),
        )
        if folder := os.environ.get("FUSEBOOK_RECORD"):
            record.write_page(name, frame, Path(folder), frame.attrs["machine"], digest)
    else:
        slug = _slug()
        if not record.page_exists(name, slug):
            _nothing(f"{name} on {slug}", "nox -s record")
        frame = record.read_page(name, slug)
        if digest and frame.attrs.get("source") != digest:
            frame.attrs["stale"] = [name]
    frame.attrs["page"] = name
    return frame


def records() -> dict[str, pd.DataFrame]:
    """Every record of the named GPU, by operator; nothing is measured.

    Returns
    -------
    dict of str to pandas.DataFrame
        ``attrs`` as those of `results`.

    Raises
    ------
    NoResults
        Where there is none.
    """
    slug = _slug()
    found = {name: record.read(name, slug) for name in OPS if record.exists(name, slug)}
    if not found:
        _nothing(f"any operator on {slug}", "nox -s record")
    return found


def _digest(function: Callable[[], Any]) -> str:
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


# Where results come from, and files -----------------------------------------------------------------------------------


def provenance(*frames: pd.DataFrame) -> Provenance:
    """Where results come from: the GPU, versions, date, commit, method, and the raw record.

    Parameters
    ----------
    *frames : pandas.DataFrame
        What `results` and `measured` returned.

    Returns
    -------
    Provenance
    """
    if not frames or not all("machine" in frame.attrs for frame in frames):
        raise ValueError("gallery.provenance: expected what results() or measured() returned, whose attrs are kept")
    raw = [_raw(frame) for frame in frames]

    def seen(name: str) -> list[str]:
        values = {str(v) for f in frames if name in f for v in f[name].dropna()}
        return sorted(values | {str(f.attrs[name]) for f in frames if name in f.attrs})

    first = frames[0].attrs["machine"]
    return Provenance(
        machine=first,
        measured=all(f.attrs.get("measured") for f in frames),
        dates=seen("date") or [str(first.date)],
        versions=seen("versions"),
        commits=seen("commit") or [str(first.commit)],
        stale=sorted({str(s) for f in frames for s in f.attrs.get("stale", ())}),
        raw=list(dict.fromkeys(raw)),
    )._now()


def _raw(frame: pd.DataFrame) -> tuple[str, str]:
    """The name of the raw record and its address; no address where nothing is offered for download."""
    name = frame.attrs.get("page") or "-".join(dict.fromkeys(frame["op"]))
    source = frame.attrs.get("path")
    if not os.environ.get("FUSEBOOK_DOWNLOADS"):
        return (Path(source).name if source else f"{name}, not recorded"), ""
    if not source and "config" in frame:  # a page measures several configs, each a file of its own
        name += f"-{frame['config'].iloc[0]}"
    target = _folder() / f"{frame.attrs['machine'].slug}-{name}.csv"
    if source:
        shutil.copyfile(source, target)
    else:
        frame.to_csv(target, index=False)
    return target.name, _link(target)


@dataclass(frozen=True, repr=False)
class Provenance(_Shown):
    """See `provenance`."""

    machine: Any
    measured: bool
    dates: list[str]
    versions: list[str]
    commits: list[str]
    stale: list[str]
    raw: list[tuple[str, str]]

    def _facts(self) -> list[tuple[str, str]]:
        m = self.machine
        versions = self._versions() or f"torch {m.torch}; triton {m.triton}"
        facts = [
            ("GPU", f"{m.name}, driver {m.driver}, CUDA {m.cuda}"),
            ("Versions", f"Python {m.python}; {versions}"),
            ("Date", self.dates[0] if len(self.dates) == 1 else f"{self.dates[0]} to {self.dates[-1]}"),
        ]
        commits = ", ".join(commit[:12] for commit in self.commits if commit)
        return facts + ([("Commit", commits)] if commits else [])

    def _versions(self) -> str:
        """Each library and its versions, once."""
        seen: dict[str, list[str]] = {}
        for text in self.versions:
            for part in text.split(";"):
                name, _, version = part.strip().partition(" ")
                if name and version not in seen.setdefault(name, []):
                    seen[name].append(version)
        return "; ".join(f"{name} {' and '.join(found)}" for name, found in seen.items())

    def _headline(self) -> str:
        how = "Measured while this page was built" if _sphinx() else "Measured just now"
        return f"{how} on" if self.measured else "Replayed from the record of"

    def _repr_html_(self) -> str:
        facts = "".join(f"<dt>{_rich(k)}</dt><dd>{_rich(v)}</dd>" for k, v in self._facts())
        files = ", ".join(
            f'<a href="{html.escape(url)}">{_rich(name)}</a>' if url else _rich(name) for name, url in self.raw
        )
        method = '<a href="../method.html">how we time</a>' if _sphinx() else "cold: events after an L2 flush, medians"
        stale = ""
        if self.stale:
            stale = (
                f'<p class="fb-stale">Stale: the source of {_rich(", ".join(self.stale))} has changed since these '
                "results were recorded.</p>"
            )
        return (
            f'<div class="fb-provenance{" fb-stale-box" if self.stale else ""}">'
            f'<p class="fb-headline">{self._headline()} {_rich(str(self.machine.name))}</p>{stale}'
            f"<dl>{facts}<dt>Method</dt><dd>{method}</dd><dt>Raw</dt><dd>{files}</dd></dl></div>"
        )

    def __repr__(self) -> str:
        lines = [f"{self._headline()} {self.machine.name}"]
        if self.stale:
            lines.append(f"  STALE: the source of {', '.join(self.stale)} has changed since")
        return "\n".join(lines + [f"  {k}: {v}" for k, v in self._facts()])


def downloads(df: pd.DataFrame, name: str, ax: Axes | None = None) -> Downloads:
    """Write a table as CSV and as a real XLSX and offer both; a script keeps its figure too.

    Parameters
    ----------
    df : pandas.DataFrame
    name : str
        Of the files, without suffix.
    ax : matplotlib.axes.Axes, optional
        A figure to keep as PNG where nothing else shows it: in a plain script.

    Returns
    -------
    Downloads
    """
    folder = _folder()
    plain = df if isinstance(df.index, pd.RangeIndex) else df.reset_index()
    files = [folder / f"{name}.csv"]
    plain.to_csv(files[0], index=False)
    missing = ""
    try:
        plain.to_excel(folder / f"{name}.xlsx", index=False, sheet_name=name[:31])
        files.append(folder / f"{name}.xlsx")
    except ImportError:
        missing = "for an XLSX too, install openpyxl"
    if ax is not None and _script():
        files.append(folder / f"{name}.png")
        ax.figure.canvas.print_figure(files[-1], dpi=150, facecolor="white", bbox_inches="tight")
    return Downloads(files, len(plain), missing)._now()


@dataclass(frozen=True, repr=False)
class Downloads(_Shown):
    """See `downloads`."""

    files: list[Path]
    rows: int
    missing: str = ""

    def _repr_html_(self) -> str:
        links = " ".join(
            f'<a class="fb-file" href="{html.escape(_link(f))}" download>{_rich(f.name)}</a>' for f in self.files
        )
        return f'<p class="fb-downloads">These {self.rows} rows as a file: {links} {_rich(self.missing)}</p>'

    def __repr__(self) -> str:
        return "Written: " + ", ".join(str(f) for f in self.files) + (f" ({self.missing})" if self.missing else "")


def table(df: pd.DataFrame, caption: str, fold: bool | None = None) -> Table:
    """A table with a caption, in numbers that can be read; a long one is folded.

    Parameters
    ----------
    df : pandas.DataFrame
    caption : str
        What the reader sees in it, with units.
    fold : bool, optional
        Whether it is shown on demand only; from 20 rows up unless told.

    Returns
    -------
    Table
    """
    return Table(tables.pretty(df), caption, len(df) > 20 if fold is None else fold)._now()


@dataclass(frozen=True, repr=False)
class Table(_Shown):
    """See `table`."""

    frame: pd.DataFrame
    caption: str
    fold: bool

    def _repr_html_(self) -> str:
        frame = self.frame
        if frame.empty:
            return f'<p class="fb-say">{_rich(self.caption)}: none.</p>'
        keys = frame.index.to_frame(index=False).astype(object)
        plain = isinstance(frame.index, pd.RangeIndex)
        names = [] if plain else ["" if n is None else str(n) for n in frame.index.names]
        head = "".join(f'<th scope="col">{_rich(n)}</th>' for n in [*names, *map(str, frame.columns)])
        body = []
        for i, values in enumerate(frame.itertuples(index=False)):
            left = (
                ""
                if plain
                else "".join(f'<th scope="row">{_rich(tables.number(k))}</th>' for k in keys.iloc[i].tolist())
            )
            body.append(f"<tr>{left}{''.join(f'<td>{_rich(str(v))}</td>' for v in values)}</tr>")
        caption = _rich(self.caption)
        whole = (
            f'<div class="fb-scroll" role="region" tabindex="0" aria-label="{html.escape(self.caption)}">'
            f'<table class="fb-table"><caption>{caption}</caption><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )
        if not self.fold:
            return whole
        return f'<details class="fb-fold"><summary>{caption} ({len(frame)} rows)</summary>{whole}</details>'

    def __repr__(self) -> str:
        if self.frame.empty:
            return f"{self.caption}: none."
        with pd.option_context("display.width", 160, "display.max_columns", 30, "display.max_rows", 12):
            return f"{self.caption}\n{self.frame}"


# Prose ----------------------------------------------------------------------------------------------------------------


class _Numbers(string.Formatter):
    """Formats what was measured, and says so where it was not."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or value is pd.NA or (isinstance(value, float) and value != value):
            return "(not measured)"
        return super().format_field(value, format_spec)


def _fill(text: str, numbers: dict[str, Any]) -> str:
    return _Numbers().format(text, **numbers) if numbers else text


@dataclass(frozen=True, repr=False)
class Say(_Shown):
    """See `say`."""

    text: str

    def _repr_html_(self) -> str:
        return f'<p class="fb-say">{_rich(self.text)}</p>'

    def __repr__(self) -> str:
        return self.text


def say(text: str, **numbers: Any) -> Say:
    """A sentence that takes its numbers from results.

    Parameters
    ----------
    text : str
        With fields as those of `str.format`; what stands between backticks is code.
    **numbers
        Values of the fields; a missing one is written as not measured.

    Returns
    -------
    Say
    """
    return Say(_fill(text, numbers))


@dataclass(frozen=True, repr=False)
class Claim(_Shown):
    """See `claim` and `holds`."""

    text: str
    true: bool | None
    fatal: bool
    words: tuple[str, str] = ("true", "false")
    detail: str = ""

    @property
    def mark(self) -> str:
        """A sign that needs no colour."""
        return "–" if self.true is None else "✓" if self.true else "✗"

    @property
    def verdict(self) -> str:
        """The same in words."""
        return "not measured" if self.true is None else self.words[0 if self.true else 1]

    def _item(self) -> str:
        kind = "fb-open" if self.true is None else "fb-true" if self.true else "fb-false"
        detail = f' <span class="fb-detail">({_rich(self.detail)})</span>' if self.detail else ""
        return (
            f'<li class="{kind}"><span class="fb-mark" role="img" aria-label="{self.verdict}">{self.mark}</span> '
            f'<span><span class="fb-verdict">{self.verdict}:</span> {_rich(self.text)}{detail}</span></li>'
        )

    def _repr_html_(self) -> str:
        return f'<ul class="fb-claims">{self._item()}</ul>'

    def __repr__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.mark} {self.verdict}: {self.text}{detail}"


def _decide(condition: Any) -> tuple[bool | None, str]:
    """What a condition comes to, and where it fails. No values decide nothing: all() of nothing is true."""
    if isinstance(condition, pd.Series):
        if condition.empty:
            return None, ""
        good = condition.astype(bool)
        if good.all():
            return True, f"all {len(good)}" if len(good) > 1 else ""
        failed = [" ".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in good[~good].index]
        more = f" and {len(failed) - 8} more" if len(failed) > 8 else ""
        return False, f"{len(failed)} of {len(good)} fail: {', '.join(failed[:8])}{more}"
    if condition is None or condition is pd.NA:
        return None, ""
    return bool(condition), ""


def claim(text: str, condition: Any, fatal: bool = True, **numbers: Any) -> Claim:
    """A conclusion with the condition under which it is true.

    Parameters
    ----------
    text : str
        With fields as those of `say`.
    condition : bool, pandas.Series of bool or None
        A series is true where all of it is, and tells where not; an empty one, and None, are undecided.
    fatal : bool
        Whether `claims` raises under FUSEBOOK_STRICT=1 where it is false.
    **numbers
        Values of the fields.

    Returns
    -------
    Claim
    """
    true, detail = _decide(condition)
    return Claim(_fill(text, numbers), true, fatal, detail=detail)


def holds(text: str, condition: Any, **numbers: Any) -> Claim:
    """A statement of others, answered yes or no and never fatal.

    Parameters
    ----------
    text : str
        With its source and date.
    condition : bool, pandas.Series of bool or None
        As in `claim`.
    **numbers
        Values of the fields.

    Returns
    -------
    Claim
    """
    true, detail = _decide(condition)
    return Claim(_fill(text, numbers), true, False, ("yes", "no"), detail)


class Claims(_Shown):
    """See `claims`.

    Parameters
    ----------
    items : sequence of Claim or Say
    """

    def __init__(self, items: Sequence[Claim | Say]) -> None:
        self.items = tuple(items)

    def _repr_html_(self) -> str:
        lines = "".join(
            item._item() if isinstance(item, Claim) else f'<li class="fb-say">{_rich(item.text)}</li>'
            for item in self.items
        )
        return f'<ul class="fb-claims">{lines}</ul>'

    def __repr__(self) -> str:
        return "\n".join(f"- {item!r}" if isinstance(item, Say) else repr(item) for item in self.items)


def claims(*items: Claim | Say) -> Claims:
    """Conclusions, each with its verdict.

    Parameters
    ----------
    *items : Claim or Say

    Returns
    -------
    Claims

    Raises
    ------
    AssertionError
        Under FUSEBOOK_STRICT=1, with every false claim that is fatal.
    """
    shown = Claims(items)._now()
    wrong = [item for item in items if isinstance(item, Claim) and item.fatal and item.true is False]
    if wrong and _flag("FUSEBOOK_STRICT"):
        lines = "\n".join(f"  {item!r}" for item in wrong)
        raise AssertionError(f"{len(wrong)} of {len(items)} claims are false:\n{lines}")
    return shown


# Source and exercises -------------------------------------------------------------------------------------------------


class Source(_Shown):
    """The source of functions, highlighted, read from the library at the time the page is built.

    Parameters
    ----------
    *functions : callable
        Functions, kernels under ``triton.jit``, and custom operators.
    doc : bool
        Whether docstrings are shown; the API shows them too.
    """

    def __init__(self, *functions: Any, doc: bool = True) -> None:
        self.parts = []
        for function in functions:
            plain = _plain(function)
            lines, first = inspect.getsourcelines(plain)
            path = f"{plain.__module__}.{plain.__qualname__}"
            text = textwrap.dedent("".join(lines)).rstrip()
            self.parts.append((path, first, first + len(lines) - 1, text if doc else _undocumented(text)))

    def _repr_html_(self) -> str:
        return "".join(
            f'<div class="fb-source"><p class="fb-source-title"><code>{html.escape(path)}</code>, lines {first} to '
            f'{last}</p><div class="highlight-python notranslate"><div class="highlight"><pre>{_coloured(text)}</pre>'
            "</div></div></div>"
            for path, first, last, text in self.parts
        )

    def __repr__(self) -> str:
        return "\n\n".join(f"# {path}, lines {first} to {last}\n{text}" for path, first, last, text in self.parts)


class Listing(_Shown):
    """A text that keeps its lines: a model, a table of a tool.

    Parameters
    ----------
    text : str
    language : str, optional
        What it is highlighted as, by a name that Pygments knows, such as ``"cuda"``.
    """

    def __init__(self, text: str, language: str = "") -> None:
        self.text = textwrap.dedent(text).strip("\n")
        self.language = language
        self._now()

    def _repr_html_(self) -> str:
        text = _coloured(self.text, self.language) if self.language else html.escape(self.text)
        return f'<div class="highlight notranslate"><pre tabindex="0">{text}</pre></div>'

    def __repr__(self) -> str:
        return self.text


class Tabs(_Shown):
    """The same thing said in several ways, side by side: tabs on the site, one under the other elsewhere.

    Parameters
    ----------
    parts : mapping of str to object
        By the name of its tab, what a block could end in: a `Source`, a `Listing`.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)

    def _repr_html_(self) -> str:
        shown = {name: part._repr_html_() for name, part in self.parts.items()}
        if not _sphinx():
            return "".join(f"<p><strong>{_rich(name)}</strong></p>{part}" for name, part in shown.items())
        group = "fb-tab-" + hashlib.sha256(repr(shown).encode()).hexdigest()[:8]
        tabs = "".join(
            f'<input type="radio" name="{group}" id="{group}-{i}"{"" if i else " checked"}>'
            f'<label for="{group}-{i}">{_rich(name)}</label><div class="fb-tab">{part}</div>'
            for i, (name, part) in enumerate(shown.items())
        )
        return f'<div class="fb-tabs">{tabs}</div>'

    def __repr__(self) -> str:
        return "\n\n".join(f"# {name}\n{part!r}" for name, part in self.parts.items())


def _plain(function: Any) -> Any:
    """The Python function inside a kernel or an operator."""
    while not inspect.isfunction(function) and not inspect.isclass(function):
        for name in ("fn", "_init_fn", "__wrapped__", "__func__"):
            if hasattr(function, name):
                function = getattr(function, name)
                break
        else:
            raise TypeError(f"Source: expected a function, a Triton kernel or a custom operator, got {function!r}")
    return inspect.unwrap(function) if inspect.isfunction(function) else function


def _undocumented(text: str) -> str:
    """The source of a function without its docstring."""
    body = ast.parse(text).body[0].body  # type: ignore[attr-defined]
    lines = text.splitlines()
    if len(body) > 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del lines[body[0].lineno - 1 : body[0].end_lineno]
    return "\n".join(lines)


def _coloured(text: str, language: str = "python") -> str:
    try:
        from pygments import highlight  # type: ignore[import-untyped]
        from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
        from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
    except ImportError:
        return html.escape(text)
    return highlight(text, get_lexer_by_name(language), HtmlFormatter(nowrap=True))


def exercise(
    text: str,
    attempt: Callable[..., Any],
    reference: Callable[..., Any],
    cases: Sequence[tuple[Any, ...]],
) -> Exercise:
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
    Exercise
        Yes, or not yet with the first reason.
    """
    op = Op("exercise", reference, lambda *_: (), lambda *_: Cost(0, 0, 0), {}, {}, ())
    reason = ""
    for inputs in cases:
        shapes = ", ".join(
            f"{'x'.join(map(str, v.shape))} {str(v.dtype)[6:]}" if isinstance(v, torch.Tensor) else repr(v)
            for v in inputs
        )
        try:
            got, yard = attempt(*inputs), check.yardstick(op, inputs)
            verdict = check.judge(op, got, yard)
        except Exception as error:  # a reader's function may fail in any way: that is an answer too
            reason = f"{type(error).__name__} on {shapes}: {(str(error).splitlines() or [''])[0]}"
        else:
            if not verdict.ok:
                where = check.worst(op, got, yard)
                reason = f"on {shapes} the score is {verdict.score:.2g}, the limit {verdict.limit:.2g}; {where}"
        if reason:
            break
    return Exercise((Claim(text, not reason, False, ("yes", "not yet"), reason),))._now()


class Exercise(Claims):
    """The answer to an attempt, see `exercise`."""


def solution(path: str) -> Solution:
    """Offer the solution of exercises for download.

    Parameters
    ----------
    path : str
        The file, as seen from the folder of the page.

    Returns
    -------
    Solution
    """
    page = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "page.py")
    source = next((f for f in (Path(path), page.parent / path) if f.exists()), Path(path))
    if source.exists() and os.environ.get("FUSEBOOK_DOWNLOADS"):
        shutil.copyfile(source, _folder() / source.name)
    return Solution(source)._now()


@dataclass(frozen=True, repr=False)
class Solution(_Shown):
    """See `solution`."""

    file: Path

    def _address(self) -> str:
        if os.environ.get("FUSEBOOK_DOWNLOADS"):
            return _link(self.file)
        if repository := os.environ.get("FUSEBOOK_REPOSITORY"):
            return f"{repository.rstrip('/')}/blob/main/examples/solutions/{self.file.name}"
        return self.file.as_posix() if self.file.exists() else ""

    def _repr_html_(self) -> str:
        address, name = self._address(), f"<code>{html.escape(self.file.name)}</code>"
        link = f'<a class="fb-file" href="{html.escape(address)}" download>{name}</a>' if address else name
        return f'<p class="fb-downloads">Solutions to read after trying: {link}</p>'

    def __repr__(self) -> str:
        return f"Solutions to read after trying: {self.file.as_posix()}"


class Folded(_Shown):
    """Something long, shown on demand: the code that a compiler generated.

    Parameters
    ----------
    caption : str
        What the reader sees of it before.
    part : object
        What a block could end in: a `Listing`, a `Source`.
    """

    def __init__(self, caption: str, part: Any) -> None:
        self.caption = caption
        self.part = part

    def _repr_html_(self) -> str:
        return f'<details class="fb-fold"><summary>{_rich(self.caption)}</summary>{self.part._repr_html_()}</details>'

    def __repr__(self) -> str:
        return f"{self.caption}\n{self.part!r}"
