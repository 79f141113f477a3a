"""What a page asks for: its arguments, and results, measured or replayed."""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
import torch

from fusebook import bench, explore, machine, record, tables
from fusebook.cards import OPS
from fusebook.op import Op
from fusebook.page import _place
from fusebook.page.show import _rich, _Shown

__all__ = ["NoResults", "arguments", "explored", "measured", "options", "records", "results"]


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
    given = parser.parse_args([] if _place.notebook() or _place.sphinx() or not _place.script() else None)
    if given.itype:
        given.dtype = onnx[given.itype]
    del given.itype
    return given


def options(**defaults: int | str) -> argparse.Namespace:
    """What a page without a card of its own was asked for on its command line.

    Parameters
    ----------
    **defaults
        By the name of its option; numbers are whole and not negative.

    Returns
    -------
    argparse.Namespace
        In a notebook and under Sphinx the defaults.

    Raises
    ------
    SystemExit
        With code 2, on nonsense.
    """

    def number(text: str) -> int:
        if not text.isdigit():
            raise argparse.ArgumentTypeError(f"expected a whole number from 0 up, got {text!r}")
        return int(text)

    about = (getattr(sys.modules.get("__main__"), "__doc__", None) or "A page").strip().splitlines()[0]
    parser = argparse.ArgumentParser(
        description=f"{about}: with a CUDA GPU this page measures, without one it replays recorded results."
    )
    for name, default in defaults.items():
        kind: Any = number if isinstance(default, int) else str
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"default: {default!r}")
    return parser.parse_args([] if _place.notebook() or _place.sphinx() or not _place.script() else None)


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
    if _place.live():
        folder = os.environ.get("FUSEBOOK_RECORD")
        asked = config if folder else live or config
        frame = bench.run(op, config=asked, dtype=dtype, variants=variants, warmup=warmup, repeat=repeat)
        if folder:
            record.write(frame, Path(folder))
        return frame
    slug = _place.slug()
    command = f"python -m fusebook.record {op.name} --config {config} --dtype {dtype}"
    if op.name not in OPS:  # a card of its own page: what records kernels does not know it
        command = "nox -s record"
    if not record.exists(op.name, slug):
        _nothing(f"{op.name} on {slug}", command)
    frame = _noted(_replayed(record.read(op, slug), op, config, dtype, command))
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


def _noted(frame: pd.DataFrame) -> pd.DataFrame:
    """What was read from a record, noted as something that the page is made from."""
    _place.note(frame.attrs["path"], machine.RECORDS / _place.slug() / "machine.json")
    return frame


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
    elif live is not False and _place.live():
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
        slug = _place.slug()
        if not record.page_exists(name, slug):
            _nothing(f"{name} on {slug}", "nox -s record")
        frame = _noted(record.read_page(name, slug))
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
    slug = _place.slug()
    _place.note(machine.RECORDS / slug)  # a record that is added belongs to them
    found = {name: _noted(record.read(name, slug)) for name in OPS if record.exists(name, slug)}
    if not found:
        _nothing(f"any operator on {slug}", "nox -s record")
    return found


def explored(
    *, seed: int = explore.RECORDED_FROM, cases: int = 100, seconds: float = 600.0, without: Sequence[str] = ()
) -> dict[str, pd.DataFrame]:
    """What was found at problems that nobody chose, see `fusebook.explore`, by operator.

    Parameters
    ----------
    seed, cases : int
        Which problems, and how many of each operator, where there is a GPU; a record has those that it has.
    seconds : float
        Where there is a GPU, of all together.
    without : sequence of str
        Variants whose name contains one of these are not timed.

    Returns
    -------
    dict of str to pandas.DataFrame
        Of `fusebook.explore.explore`; ``attrs`` as those of `results`.

    Raises
    ------
    NoResults
        Where there is neither a GPU nor a record.
    fusebook.explore.Wrong
        Where a result of ours is wrong.
    """
    ours = {name: op for name, op in OPS.items() if explore.explorable(op)}
    found: dict[str, pd.DataFrame] = {}
    if _place.live():
        folder = os.environ.get("FUSEBOOK_RECORD")
        root = Path(folder) if folder else None
        for op, frame in explore.explore(
            *ours.values(), seed=seed, cases=cases, seconds=seconds, without=without, root=root
        ):
            if isinstance(frame, explore.Wrong):
                raise frame
            frame.attrs.update(machine=machine.here(), date=dt.date.today().isoformat(), page=f"{op.name}-explored")
            found[op.name] = frame
    else:
        slug = _place.slug()
        for name, op in ours.items():
            if explore.path(slug, name).exists():
                found[name] = _noted(explore.read(op, slug))
                found[name].attrs["page"] = f"{name}-explored"
        if not found:
            _nothing(f"explored problems on {slug}", f"python -m fusebook.explore all --seed {seed}")
    return {name: frame for name, frame in found.items() if len(frame)}


def _digest(function: Callable[[], Any]) -> str:
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""
