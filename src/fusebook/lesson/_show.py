"""What a block ends in: objects that render themselves on the site and in notebooks, and print themselves elsewhere."""

from __future__ import annotations

import ast
import base64
import html
import inspect
import io
import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pandas as pd
import torch

from fusebook import tables
from fusebook.lesson import _place
from fusebook.measure import bench, machine
from fusebook.measure.bench import Origin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Folded", "Listing", "Source", "downloads", "environment", "lines_behind", "lines_of", "solution", "sortable",
    "table",
]  # fmt: skip


# Modules of kernels that are not of one kernel.
_LAUNCHING = ("_call",)


# What renders itself --------------------------------------------------------------------------------------------------


def rich(text: str) -> str:
    """Escaped HTML; what stands between backticks is code.

    Parameters
    ----------
    text : str
        A sentence as pages write it.

    Returns
    -------
    str
        HTML without an element around it.
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


class Shown:
    """What renders itself: as HTML in the gallery and in a notebook, as text in a terminal, and unasked in a script."""

    def __init__(self, html: str, text: str) -> None:
        self.html = html
        self.text = text

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text

    def _now(self) -> Self:
        if _place.script():
            print(repr(self), end="\n\n")
        return self


# Where results come from, and files -----------------------------------------------------------------------------------


class Gathered(NamedTuple):
    """Where results come from, see `gathered`."""

    machine: Any
    dates: list[str]
    versions: str
    commits: list[str]


def gathered(*frames: pd.DataFrame) -> Gathered:
    """Where results come from: their first GPU, and of all what they differ in, each once.

    Parameters
    ----------
    *frames : pandas.DataFrame
        What `results` and `measured` returned.
    """
    origins = [o for frame in frames if isinstance(o := frame.attrs.get("origin"), Origin) and o.machine]
    if not frames or len(origins) < len(frames):
        raise ValueError("gathered: expected what results() or measured() returned, whose attrs are kept")

    def seen(column: str, field: str) -> list[str]:
        values = {str(v) for f in frames if column in f for v in f[column].dropna()}
        return sorted(filter(None, values | {getattr(o, field) for o in origins}))

    on: Any = origins[0].machine
    return Gathered(
        on,
        dates=seen("date", "date") or [str(on.date)],
        versions=_once(seen("versions", "versions")),
        commits=sorted(
            {commit for text in seen("commit", "commit") or [str(on.commit)] for commit in text.split("; ")} - {""}
        ),
    )


def _once(texts: list[str]) -> str:
    """Each library and its versions, once."""
    seen: dict[str, dict[str, None]] = {}
    for part in "; ".join(texts).split(";"):
        name, _, version = part.strip().partition(" ")
        seen.setdefault(name, {})[version] = None
    return "; ".join(f"{name} {' and '.join(found)}{_newer(name, found)}" for name, found in seen.items() if name)


def _newer(name: str, found: Iterable[str]) -> str:
    """A note where all versions of a library are older than the newest that the package is tested with."""
    newest = machine.NEWEST.get(name)
    numbers = [tuple(map(int, re.findall(r"\d+", version)[:2])) for version in found]
    older = newest and all(number < tuple(map(int, newest.split("."))) for number in numbers)
    return f" (the newest is {newest})" if older else ""


def _harmless(frame: pd.DataFrame) -> pd.DataFrame:
    """The same rows, without text that a spreadsheet would compute."""
    safe = frame.rename(columns=tables.harmless)
    for position in range(safe.shape[1]):
        if not pd.api.types.is_numeric_dtype(safe.dtypes.iloc[position]):
            safe.isetitem(position, safe.iloc[:, position].map(tables.harmless).to_list())
    return safe


def _workbook(frame: pd.DataFrame, name: str) -> bytes:
    """A frame as XLSX. pandas would write each empty cell too, which takes most of the time."""
    import openpyxl

    book, written = openpyxl.Workbook(write_only=True), io.BytesIO()
    sheet = book.create_sheet(name)
    sheet.append(list(frame.columns))
    cells = frame.astype(object).replace({np.inf: "inf", -np.inf: "-inf"})  # which a spreadsheet has no number for
    for row in cells.where(frame.notna(), None).itertuples(index=False, name=None):
        sheet.append(row)
    book.save(written)
    return written.getvalue()


def downloads(df: pd.DataFrame, name: str, ax: Axes | None = None) -> Shown:
    """Offer a table as CSV and as a real XLSX; a script writes both, and its figure too.

    A notebook writes no file that nobody asked for: there the links hold the files.

    Parameters
    ----------
    name : str
        Of the files, without suffix or folder.
    ax : matplotlib.axes.Axes, optional
        A figure to keep as PNG where nothing else shows it: in a plain script.

    Raises
    ------
    ValueError
        For a name that leads into another folder.
    """
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ValueError(
            f"page.downloads: expected a name of letters, digits, ., +, - and _, got {name!r}; give no folder"
        )
    plain = _harmless(df if isinstance(df.index, pd.RangeIndex) else df.reset_index())
    files = {f"{name}.csv": plain.to_csv(index=False).encode()}
    missing = ""
    try:
        files[f"{name}.xlsx"] = _workbook(plain, name[:31])
    except ImportError:
        missing = "for an XLSX too, install openpyxl"
    if _place.notebook() and not os.environ.get("_FUSEBOOK_DOWNLOADS"):
        done = "Offered"
        links = {file: f"data:{_TYPES[file[-4:]]};base64,{base64.b64encode(b).decode()}" for file, b in files.items()}
    else:
        folder = _place.folder()
        done = f"Written into {folder}"
        for file, content in files.items():
            (folder / file).write_bytes(content)
        links = {file: _place.link(folder / file) for file in files}
        if ax is not None and _place.script():
            ax.figure.canvas.print_figure(folder / f"{name}.png", dpi=150, facecolor="white", bbox_inches="tight")
            links[f"{name}.png"] = _place.link(folder / f"{name}.png")
    anchors = " ".join(_file(rich(file), address, file) for file, address in links.items())
    return Shown(
        f'<p class="fb-downloads">These {len(plain)} rows as a file: {anchors} {rich(missing)}</p>',
        f"{done}: {', '.join(links)}" + (f" ({missing})" if missing else ""),
    )._now()


def _file(name: str, address: str, saved: str = "") -> str:
    """A link to a file to download, under the name that it has or is to be saved by."""
    by = f'="{html.escape(saved)}"' if saved else ""
    return f'<a class="fb-file" href="{html.escape(address)}" download{by}>{name}</a>'


_TYPES = {".csv": "text/csv", "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"}


def environment() -> Listing:
    """What a page ran on: versions of what it computes with, and the GPU."""
    facts = {"Python": platform.python_version(), "fusebook": sys.modules["fusebook"].__version__, **bench.software()}
    gpu = "no CUDA GPU: kernels were interpreted and times replayed"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        if not _place.supported():
            gpu += ", for which Triton does not compile"
    return Listing("\n".join([*(f"{name} {version}" for name, version in facts.items()), gpu]))


def table(df: pd.DataFrame, caption: str, fold: bool | None = None, box: bool = False) -> Table:
    """A table with a caption, in numbers that can be read; a long one is folded.

    Parameters
    ----------
    caption : str
        What the reader sees in it, with units. An empty table says that there is none of it, or, where its
        ``attrs["compared"]`` is 0, that it was not measured.
    fold : bool, optional
        Whether it is shown on demand only; from 20 rows up unless told.
    box : bool
        Whether the box under the page's title shows it too, all of it.
    """
    nothing = "not measured" if df.attrs.get("compared") == 0 else "none"
    fold = len(df) > 20 if fold is None else fold
    made = Table(tables.pretty(df), caption, fold, nothing, _numeric(df), _best(df))
    if box:
        _place.remember("tables", replace(made, fold=False))
    return made._now()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and value == value


def _numeric(df: pd.DataFrame) -> tuple[bool, ...]:
    """Of each part of the index and each column, whether it holds numbers: those stand on the right."""
    parts: list[Any] = [df.index.get_level_values(i) for i in range(df.index.nlevels)]
    parts += [df.iloc[:, i] for i in range(df.shape[1])]
    return tuple(any(_is_number(value) for value in part) for part in parts)


def _best(df: pd.DataFrame) -> frozenset[tuple[int, int]]:
    """The places of the best numbers, by what ``attrs["best"]`` says of a table.

    It is ``least in a row`` or ``most in a row``, or says of columns, by name, whether the least or the most is best
    among the ways of computing, which are the last part of the index.
    """
    told = df.attrs.get("best") or {}
    values, (rows, columns) = df.to_numpy(dtype=object), map(range, df.shape)
    if isinstance(told, str):
        groups = [(told, [(row, column) for column in columns]) for row in rows]
    else:
        points: dict[Any, list[int]] = {}
        for row, key in zip(rows, df.index, strict=True):
            points.setdefault(key[:-1] if isinstance(key, tuple) else (), []).append(row)
        judged = [(told[name], column) for column, name in enumerate(df.columns) if name in told]
        groups = [(how, [(row, column) for row in of]) for of in points.values() for how, column in judged]
    places: set[tuple[int, int]] = set()
    for how, group in groups:
        found = {place: float(values[place]) for place in group if _is_number(values[place])}
        if len(found) > 1:
            best = (max if how.startswith("most") else min)(found.values())
            places |= {place for place, value in found.items() if tables.number(value) == tables.number(best)}
    return frozenset(places)


@dataclass(frozen=True, repr=False)
class Table(Shown):
    """See `table`."""

    frame: pd.DataFrame
    caption: str
    fold: bool
    nothing: str = "none"
    numeric: tuple[bool, ...] = ()
    best: frozenset[tuple[int, int]] = frozenset()

    def _repr_html_(self) -> str:
        frame = self.frame
        if frame.empty:
            return f'<p class="fb-say">{rich(self.caption)}: {self.nothing}.</p>'
        keys = frame.index.to_frame(index=False).astype(object)
        levels = 0 if isinstance(frame.index, pd.RangeIndex) else frame.index.nlevels
        names = ["" if n is None else str(n) for n in frame.index.names][:levels]
        numeric = self.numeric[frame.index.nlevels - levels :] if self.numeric else ()
        kinds = ["" if number else ' class="fb-text"' for number in numeric] or [""] * (levels + frame.shape[1])
        # Cells with white space between them: who reads the text alone, as the search does, needs it.
        head = "\n".join(
            f'<th scope="col"{kind}>{rich(n)}</th>' if n else "<td></td>"
            for n, kind in zip([*names, *map(str, frame.columns)], kinds, strict=True)
        )
        body = []
        for i, values in enumerate(frame.itertuples(index=False)):
            own = keys.iloc[i].tolist()[:levels]
            row = [f'<th scope="row"{kind}>{rich(tables.number(k))}</th>' for k, kind in zip(own, kinds, strict=False)]
            for j, (value, kind) in enumerate(zip(values, kinds[levels:], strict=True)):
                text = rich(str(value))
                row.append(f"<td{kind}>{f'<strong>{text}</strong>' if (i, j) in self.best else text}</td>")
            body.append(f"<tr>{' '.join(row)}</tr>")
        caption = rich(self.caption)
        best = ' <span class="fb-detail">(the best in bold)</span>' if self.best else ""
        tall = " fb-tall" if len(frame) >= 30 else ""
        whole = (
            f'<div class="fb-scroll{tall}" role="region" tabindex="0" aria-label="{html.escape(self.caption)}">'
            f'<table class="fb-table"><caption>{caption}{best}</caption>\n<thead><tr>{head}</tr></thead>\n'
            "<tbody>" + "\n".join(body) + "</tbody></table></div>"
        )
        if not self.fold:
            return whole
        return f'<details class="fb-fold"><summary>{caption} ({len(frame)} rows)</summary>{whole}</details>'

    def __repr__(self) -> str:
        if self.frame.empty:
            return f"{self.caption}: {self.nothing}."
        return _printed(self.caption, self.frame)


def _printed(caption: str, frame: pd.DataFrame) -> str:
    with pd.option_context("display.width", 160, "display.max_columns", 30, "display.max_rows", 12):
        return f"{caption}\n{frame}"


def sortable(df: pd.DataFrame, caption: str, best: pd.DataFrame | None = None) -> Shown:
    """A table of many rows: on the site it sorts and filters by each column; without JavaScript it is a plain one.

    Parameters
    ----------
    df : pandas.DataFrame
        Its index is not shown.
    caption : str
        What the reader sees in it, with units.
    best : pandas.DataFrame of bool, optional
        Of some columns of `df` and all of its rows: what is to be set in bold.
    """
    frame = tables.pretty(df)
    bold = pd.DataFrame(False, df.index, df.columns)
    if best is not None:
        bold[list(best.columns)] = best
    head = "".join(f'<th scope="col">{rich(str(name))}</th>' for name in frame.columns)
    rows = zip(frame.to_numpy().tolist(), bold.to_numpy().tolist(), strict=True)
    body = "\n".join(
        f"<tr>{''.join(f'<td><b>{rich(v)}</b>' if b else f'<td>{rich(v)}' for v, b in zip(*row, strict=True))}"
        for row in rows
    )  # the end of a cell and of a row may be left out, and there are thousands
    made = (
        f'<div class="fb-scroll fb-sortable" role="region" tabindex="0" aria-label="{html.escape(caption)}">'
        f"<table><caption>{rich(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    return Shown(made, _printed(caption, frame))._now()


# Source and exercises -------------------------------------------------------------------------------------------------


class Source(Shown):
    """The source of functions, highlighted, read from the library at the time the page is built.

    Parameters
    ----------
    *functions : callable
        Functions, kernels under ``triton.jit``, and custom operators.
    doc : bool
        Whether docstrings are shown; the API shows them too.
    """

    def __init__(self, *functions: Any, doc: bool = True) -> None:
        shown, printed = [], []
        for function in functions:
            plain = _plain(function)
            lines, first = inspect.getsourcelines(plain)
            _place.note(inspect.getfile(plain))
            where = f"lines {first} to {first + len(lines) - 1}"
            path = f"{plain.__module__}.{plain.__qualname__}"
            text = textwrap.dedent("".join(lines)).rstrip()
            text = text if doc else _undocumented(text)
            shown.append(
                f'<div class="fb-source"><p class="fb-source-title"><code>{html.escape(path)}</code>, {where}</p>'
                f'<div class="highlight-python notranslate"><div class="highlight"><pre>{_coloured(text)}</pre>'
                "</div></div></div>"
            )
            printed.append(f"# {path}, {where}\n{text}")
        super().__init__("".join(shown), "\n\n".join(printed))


class Listing(Shown):
    """A text that keeps its lines: a model, a table of a tool.

    Parameters
    ----------
    text : str
    language : str, optional
        What it is highlighted as, by a name that Pygments knows, such as ``"cuda"``.
    """

    def __init__(self, text: str, language: str = "") -> None:
        text = textwrap.dedent(text).strip("\n")
        shown = _coloured(text, language) if language else html.escape(text)
        super().__init__(f'<div class="highlight notranslate"><pre tabindex="0">{shown}</pre></div>', text)
        self._now()


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


def lines_of(*parts: Any) -> int:
    """Lines of code of functions and kernels, without docstrings, comments and empty lines."""
    return sum(_lines(ast.parse(textwrap.dedent(inspect.getsource(_plain(part))))) for part in parts)


def lines_behind(*parts: Any) -> int:
    """Lines of code of the modules in which functions or kernels of the library stand, and of all that these import.

    What every launcher launches with is left out: it belongs to no kernel.
    """
    todo = [Path(inspect.getfile(_plain(part))) for part in parts]
    trees: dict[str, ast.Module] = {}
    while todo:
        file = todo.pop()
        if file.stem in trees or file.stem in _LAUNCHING:
            continue
        trees[file.stem] = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(trees[file.stem]):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                todo += [file.with_name(f"{name}.py") for name in names]
    return sum(map(_lines, trees.values()))


def _lines(tree: ast.Module) -> int:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return len(ast.unparse(tree).splitlines())


def _coloured(text: str, language: str = "python") -> str:
    try:
        from pygments import highlight  # type: ignore[import-untyped]
        from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
        from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
    except ImportError:
        return html.escape(text)
    return highlight(text, get_lexer_by_name(language), HtmlFormatter(nowrap=True))


def solution(path: str) -> Shown:
    """Offer the solution of exercises for download.

    Parameters
    ----------
    path : str
        The file, as seen from the folder of the page.
    """
    page = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "page.py")
    source = next((f for f in (Path(path), page.parent / path) if f.exists()), Path(path))
    _place.note(source)
    address = source.as_posix() if source.exists() else ""
    if os.environ.get("_FUSEBOOK_DOWNLOADS"):
        address = _place.link(source)
        if source.exists():
            shutil.copyfile(source, _place.folder() / source.name)
    elif repository := os.environ.get("FUSEBOOK_REPOSITORY"):
        address = f"{repository.rstrip('/')}/blob/main/examples/solutions/{source.name}"
    name, said = f"<code>{html.escape(source.name)}</code>", "Solutions to read after trying"
    link = _file(name, address) if address else name
    return Shown(f'<p class="fb-downloads">{said}: {link}</p>', f"{said}: {source.as_posix()}")._now()


class Folded(Shown):
    """Something long, shown on demand: the code that a compiler generated.

    Parameters
    ----------
    caption : str
        What the reader sees of it before.
    *parts : object
        What a block could end in: a `Listing`, a `Source`.
    """

    def __init__(self, caption: str, *parts: Any) -> None:
        shown = "".join(part._repr_html_() for part in parts)
        made = f'<details class="fb-fold"><summary>{rich(caption)}</summary>{shown}</details>'
        super().__init__(made, "\n".join([caption, *map(repr, parts)]))
