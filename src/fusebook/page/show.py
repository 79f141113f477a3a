"""What a block ends in: objects that render themselves on the site and in notebooks, and print themselves elsewhere."""

from __future__ import annotations

import ast
import hashlib
import html
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from fusebook import tables
from fusebook.bench import Origin
from fusebook.page import _place

__all__ = ["Folded", "Listing", "Source", "Tabs", "downloads", "provenance", "solution", "table"]


# What renders itself --------------------------------------------------------------------------------------------------


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
        if _place.script():
            print(repr(self), end="\n\n")
        return self


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
    origins = [o for frame in frames if isinstance(o := frame.attrs.get("origin"), Origin) and o.machine]
    if not frames or len(origins) < len(frames):
        raise ValueError("page.provenance: expected what results() or measured() returned, whose attrs are kept")

    def seen(column: str, field: str) -> list[str]:
        values = {str(v) for f in frames if column in f for v in f[column].dropna()}
        return sorted(filter(None, values | {getattr(o, field) for o in origins}))

    first: Any = origins[0].machine
    return Provenance(
        machine=first,
        measured=all(o.measured for o in origins),
        dates=seen("date", "date") or [str(first.date)],
        versions=seen("versions", "versions"),
        commits=seen("commit", "commit") or [str(first.commit)],
        stale=sorted({why for o in origins for why in o.stale}),
        raw=list(dict.fromkeys(_raw(frame) for frame in frames)),
    )._now()


def _raw(frame: pd.DataFrame) -> tuple[str, str]:
    """The name of the raw record and its address; no address where nothing is offered for download."""
    origin: Origin = frame.attrs["origin"]
    name = origin.page or "-".join(dict.fromkeys(frame["op"]))
    if not os.environ.get("FUSEBOOK_DOWNLOADS"):
        return (origin.path.name if origin.path else f"{name}, not recorded"), ""
    if not origin.path and "config" in frame:  # a page measures several configs, each a file of its own
        name += f"-{frame['config'].iloc[0]}"
    name = re.sub(r"[^\w.,+-]+", "-", name)  # of a record, which may say anything: no path, and no folder
    target = _place.folder() / f"{origin.machine.slug if origin.machine else 'cpu'}-{name}.csv"
    if origin.path:
        shutil.copyfile(origin.path, target)
    else:
        _harmless(frame).to_csv(target, index=False)
    return target.name, _place.link(target)


def _harmless(frame: pd.DataFrame) -> pd.DataFrame:
    """The same rows, without text that a spreadsheet would compute."""
    safe = frame.rename(columns=tables.harmless)
    for position in range(safe.shape[1]):
        if not pd.api.types.is_numeric_dtype(safe.dtypes.iloc[position]):
            safe.isetitem(position, safe.iloc[:, position].map(tables.harmless))
    return safe


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
        how = "Measured while this page was built" if _place.sphinx() else "Measured just now"
        return f"{how} on" if self.measured else "Replayed from the record of"

    def _repr_html_(self) -> str:
        facts = "".join(f"<dt>{_rich(k)}</dt><dd>{_rich(v)}</dd>" for k, v in self._facts())
        files = ", ".join(
            f'<a href="{html.escape(url)}">{_rich(name)}</a>' if url else _rich(name) for name, url in self.raw
        )
        method = (
            '<a href="../method.html">how we time</a>' if _place.sphinx() else "cold: events after an L2 flush, medians"
        )
        stale = ""
        if self.stale:
            stale = (
                '<p class="fb-stale">The code has changed since these results were recorded: '
                f"{_rich('; '.join(self.stale))}.</p>"
            )
        return (
            f'<div class="fb-provenance{" fb-stale-box" if self.stale else ""}">'
            f'<p class="fb-headline">{self._headline()} {_rich(str(self.machine.name))}</p>{stale}'
            f"<dl>{facts}<dt>Method</dt><dd>{method}</dd><dt>Raw</dt><dd>{files}</dd></dl></div>"
        )

    def __repr__(self) -> str:
        lines = [f"{self._headline()} {self.machine.name}"]
        if self.stale:
            lines.append(f"  STALE: {'; '.join(self.stale)}")
        return "\n".join(lines + [f"  {k}: {v}" for k, v in self._facts()])


def downloads(df: pd.DataFrame, name: str, ax: Axes | None = None) -> Downloads:
    """Write a table as CSV and as a real XLSX and offer both; a script keeps its figure too.

    Parameters
    ----------
    df : pandas.DataFrame
    name : str
        Of the files, without suffix or folder.
    ax : matplotlib.axes.Axes, optional
        A figure to keep as PNG where nothing else shows it: in a plain script.

    Returns
    -------
    Downloads

    Raises
    ------
    ValueError
        For a name that leads into another folder.
    """
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ValueError(
            f"page.downloads: expected a name of letters, digits, ., +, - and _, got {name!r}; give no folder"
        )
    folder = _place.folder()
    plain = _harmless(df if isinstance(df.index, pd.RangeIndex) else df.reset_index())
    files = [folder / f"{name}.csv"]
    plain.to_csv(files[0], index=False)
    missing = ""
    try:
        plain.to_excel(folder / f"{name}.xlsx", index=False, sheet_name=name[:31])
        files.append(folder / f"{name}.xlsx")
    except ImportError:
        missing = "for an XLSX too, install openpyxl"
    if ax is not None and _place.script():
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
            f'<a class="fb-file" href="{html.escape(_place.link(f))}" download>{_rich(f.name)}</a>' for f in self.files
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
        What the reader sees in it, with units. An empty table says that there is none of it, or, where its
        ``attrs["compared"]`` is 0, that it was not measured.
    fold : bool, optional
        Whether it is shown on demand only; from 20 rows up unless told.

    Returns
    -------
    Table
    """
    nothing = "not measured" if df.attrs.get("compared") == 0 else "none"
    return Table(tables.pretty(df), caption, len(df) > 20 if fold is None else fold, nothing)._now()


@dataclass(frozen=True, repr=False)
class Table(_Shown):
    """See `table`."""

    frame: pd.DataFrame
    caption: str
    fold: bool
    nothing: str = "none"

    def _repr_html_(self) -> str:
        frame = self.frame
        if frame.empty:
            return f'<p class="fb-say">{_rich(self.caption)}: {self.nothing}.</p>'
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
            return f"{self.caption}: {self.nothing}."
        with pd.option_context("display.width", 160, "display.max_columns", 30, "display.max_rows", 12):
            return f"{self.caption}\n{self.frame}"


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
            _place.note(inspect.getfile(plain))
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
        if not _place.sphinx():
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
    _place.note(source)
    if source.exists() and os.environ.get("FUSEBOOK_DOWNLOADS"):
        shutil.copyfile(source, _place.folder() / source.name)
    return Solution(source)._now()


@dataclass(frozen=True, repr=False)
class Solution(_Shown):
    """See `solution`."""

    file: Path

    def _address(self) -> str:
        if os.environ.get("FUSEBOOK_DOWNLOADS"):
            return _place.link(self.file)
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
