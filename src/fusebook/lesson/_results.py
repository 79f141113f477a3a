"""What a page asks for: its arguments, and results, measured or replayed."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
import torch

from fusebook.cards import OPS
from fusebook.lesson import _place
from fusebook.lesson._show import Shown, rich
from fusebook.measure import bench, check, explore, inputs, machine, record, sources
from fusebook.measure.bench import Origin
from fusebook.measure.op import Dims, Op

__all__ = [
    "NoResults", "Study", "explored", "measured", "options", "records", "results", "study",
]  # fmt: skip


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
    parser = _parser("A page")
    for name, default in defaults.items():
        kind: Any = _whole(0) if isinstance(default, int) else str
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"default: {default!r}")
    return _given(parser)


def _parser(name: str) -> argparse.ArgumentParser:
    about = (getattr(sys.modules.get("__main__"), "__doc__", None) or name).strip().splitlines()[0]
    return argparse.ArgumentParser(
        description=f"{about}: with a CUDA GPU this page measures, without one it replays recorded results."
    )


def _given(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the command line says, where it is the page's own."""
    return parser.parse_args(None if _place.script() else [])


def _whole(least: int) -> Callable[[str], int]:
    def type_(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} up, got {text!r}")
        return int(text)

    return type_


@dataclass(frozen=True)
class Study:
    """What a page was asked for, remembered by all of its results. See `study`.

    Attributes
    ----------
    op : Op
    config, dtype : str
        Comma lists.
    warmup, repeat : int
        Calls before the clock and calls timed.
    """

    op: Op
    config: str
    dtype: str
    warmup: int
    repeat: int

    def results(self, op: Op | None = None, **other: Any) -> pd.DataFrame:
        """Results as the page was asked for them, see ``results``.

        Parameters
        ----------
        op : Op, optional
            Another operator than the page's.
        **other
            Arguments of ``results`` to be given otherwise: ``config``, ``dtype``, ``variants``, ``live``.
        """
        asked = {"config": self.config, "dtype": self.dtype, "warmup": self.warmup, "repeat": self.repeat}
        return results(op or self.op, **{**asked, **other})

    def judged(self, dims: Dims, dtype: torch.dtype, **ways: Callable[..., Any]) -> pd.DataFrame:
        """The score of ways to compute the operator, on inputs that its card makes and memory that holds NaN.

        Parameters
        ----------
        **ways : callable
            Take the inputs.

        Returns
        -------
        pandas.DataFrame
            A row a way: the dims, ``dtype``, ``way``, ``score``, ``limit``, and ``right``, whether it is within it.
        """
        made = self.op.make(inputs.generator(2), dtype, **dims)
        yard = check.yardstick(self.op, made)
        device = next(t.device for t in made if isinstance(t, torch.Tensor))
        rows = []
        for name, way in ways.items():
            inputs.poison(yard.outputs(device))
            verdict = yard.judge(way(*made))
            found = {"error": verdict.error, "tolerance": verdict.tolerance, "right": verdict.ok}
            rows.append({**dims, "dtype": str(dtype).removeprefix("torch."), "way": name, **found})
        return pd.DataFrame(rows)


def study(op: Op, *, config: str, dtype: str = "float32", repeat: int = 30) -> Study:
    """What a page studies: an operator, as its command line asks for it. Asked once, and remembered.

    Parameters
    ----------
    op : Op
        The card whose configs are the choices of ``--config``.
    config, dtype : str
        Defaults: comma lists.
    repeat : int
        A default.

    Returns
    -------
    Study
        In a notebook and under Sphinx of the defaults: that command line belongs to somebody else.

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

    onnx = {"1": "float32", "10": "float16"}
    parser = _parser(op.name)
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
    parser.add_argument("--warmup", type=_whole(0), default=5, help="calls before the clock (default: 5)")
    parser.add_argument("--repeat", type=_whole(1), default=repeat, help=f"calls timed (default: {repeat})")
    given = _given(parser)
    return Study(op, given.config, onnx.get(given.itype, given.dtype), given.warmup, given.repeat)


class NoResults(SystemExit):
    """There is neither a GPU nor a record: one sentence that says how to get one, and exit code 1.

    Parameters
    ----------
    sentence : str
    excused : bool, default False
        Whether a site may be built so even where what is missing ends the build: nothing is there yet, and that is no
        mistake.
    """

    def __init__(self, sentence: str, *, excused: bool = False) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.excused = excused

    @property
    def banner(self) -> Shown:
        """The sentence as something that renders itself on a page."""
        return Shown(f'<div class="fb-banner" role="note"><p>{rich(self.sentence)}</p></div>', self.sentence)


def results(
    op: Op,
    *,
    config: str | Sequence[tuple[str, Dims]],
    dtype: str = "float32",
    warmup: int = 5,
    repeat: int = 30,
    variants: Sequence[str] | None = None,
    live: str | None = None,
) -> pd.DataFrame:
    """Results of a card: measured where there is a GPU, replayed from a record where there is none.

    Parameters
    ----------
    config, dtype, warmup, repeat, variants
        As `fusebook.measure.bench.run` takes them: comma lists, calls before the clock and timed, fewer implementations
        than the card has.
    live : str, optional
        The config to measure where there is a GPU, when `config` would take too long for a page: a record answers for
        all of it at no cost. A run that records measures all of it.

    Returns
    -------
    pandas.DataFrame
        The columns of `fusebook.measure.bench.run`. ``attrs["origin"]``, a `fusebook.measure.bench.Origin`, says on
        which machine, whether just now, and what is stale; a replayed frame says so of each row in the columns
        ``stale`` and ``stale_host``.

    Raises
    ------
    NoResults
        Where there is neither a GPU nor a record.
    """

    if _place.live():
        folder = _recording(op)
        how: dict[str, Any] = {"warmup": warmup, "repeat": repeat, **_clocks()}
        frame = bench.run(op, config=config if folder else live or config, dtype=dtype, variants=variants, **how)
        if folder:
            record.write(frame, folder)
        return frame
    command = f"python -m fusebook.measure.record {op.name} --config {config} --dtype {dtype}"
    if op.name not in OPS:  # a card of its own page: what records kernels does not know it
        command = "nox -s record"
    what: object = op.name
    for place in _recorded(op.name):
        try:
            frame = record.select(_noted(record.read(op, place.name, place.parent)), op, config, dtype, variants)
            lacking = set(variants or op.variants) - set(frame["variant"])
            old = frame["status"].isin(("failed", "out of memory"))  # for a reason that may be gone
            old |= (frame["stale"] != "") | (frame["stale_host"] != "")
            _place.stale(bool(lacking or old.any()))
            return frame
        except record.Missing as missing:
            what = missing
    return _nothing(f"{what} on {machine.slug()}", command)


def _recording(op: Op | None = None) -> Path | None:
    """The folder that this run records into, if it does; of a card only on the page that owns its file."""
    folder = os.environ.get("_FUSEBOOK_RECORD")
    page, owner = machine.page_number(), record.owner(op.name) if op else ""
    return Path(folder) if folder and (not owner or not page or page == owner) else None


def _clocks() -> dict[str, Any]:
    """The clocks of a run that records one page per GPU: first those of the GPUs, then those of the host alone."""
    given = {"gpu": ("cold", "warm"), "host": ("host", "call")}
    clocks = os.environ.get("_FUSEBOOK_CLOCKS", "") if os.environ.get("_FUSEBOOK_RECORD") else ""
    return {"clocks": given[clocks]} if clocks else {}


def _nothing(what: str, command: str, *, excused: bool = False) -> NoReturn:
    _place.stale(True)
    raise NoResults(
        f"There is no CUDA GPU here and no record of {what} to replay: run `{command}` on a machine with a GPU.",
        excused=excused,
    )


def _noted(frame: pd.DataFrame) -> pd.DataFrame:
    """What was read from a record, noted as something that the page is made from."""
    file = frame.attrs["origin"].path
    _place.note(file, *(folder / "machine.json" for folder in file.parents[:2]))
    return frame


def _recorded(name: str) -> list[Path]:
    """The folders that have a record of this name, in the order in which they are asked."""
    places = machine.places()
    # What is added to one that is asked first belongs to the page, and so does a record that is not there yet.
    _place.note(*places[:-1], places[-1] / f"{name}.csv")
    return [folder for folder in places if _has(folder, name)]


def _has(folder: Path, name: str) -> bool:
    return (folder / f"{name}.csv").exists()


def measured(
    name: str,
    function: Callable[[], pd.DataFrame],
    live: bool | None = None,
    *,
    by_device: bool = False,
    code_of: Sequence[Any] = (),
) -> pd.DataFrame:
    """What no card measures: runs a function where there is a GPU, replays its record where there is none.

    Parameters
    ----------
    name : str
        Of the record, ``records/<gpu>/pages/<name>.csv``.
    function : callable
        Measures and returns a DataFrame.
    live : bool, optional
        Whether this machine can run the function, if that needs something else than a GPU, such as a compiler. If
        false, the record is replayed; if true, it is recorded where there is a GPU too.
    by_device : bool
        Whether it uses no clock of the host, so that it can be recorded while other GPUs of the host work.
    code_of : sequence
        Functions and values that decide what is measured: a record is stale if one of them has changed. Unless given,
        it is `function` alone.

    Returns
    -------
    pandas.DataFrame
        ``attrs["origin"]`` as of `results`.

    Raises
    ------
    NoResults
        If there is neither a GPU nor a record.
    """
    record_name = f"pages/{name}"
    code, _ = sources.hashes(*(code_of or (function,)))
    folder = _recording()
    host_pass = folder is not None and _clocks().get("clocks") == ("host", "call")
    known = folder / machine.here().slug if host_pass and by_device and folder else None
    on_gpu = live is not False and _place.live() and not (known and _has(known, record_name))
    if on_gpu or (live and not torch.cuda.is_available()):
        frame = function()
        versions = "; ".join(f"{k} {v}" for k, v in bench.software().items())
        facts: dict[str, Any] = {"page": name, "date": dt.date.today().isoformat(), "versions": versions, "code": code}
        frame.attrs["origin"] = Origin(machine.here() if on_gpu else None, measured=True, **facts)
        if on_gpu and folder and (by_device or "clocks" not in _clocks() or host_pass):
            record.write(frame, folder, record_name)
    else:
        at = [known] if known else _recorded(record_name)
        found = [
            frame for place in at if (frame := record.read(record_name, place.name, place.parent)).attrs["origin"].code
        ]
        if not found:  # one without a code is of an older lesson, with other names
            _nothing(f"{name} on {machine.slug()}", "nox -s record")
        frame = _noted(found[0])
        was = frame.attrs["origin"]
        _place.stale(was.code != code)
        stale = () if was.code == code else (f"{name} was measured before the code changed (at commit {was.commit})",)
        frame.attrs["origin"] = dataclasses.replace(was, stale=stale, page=name)
    return frame


def records(gpu: str | None = None) -> dict[str, pd.DataFrame]:
    """Every record of a GPU, by operator; nothing is measured.

    As of `fusebook.measure.record.read`.

    Parameters
    ----------
    gpu : str, optional
        Of `fusebook.measure.machine.slugs`; by default, for each operator, the GPU that its page replays.

    Raises
    ------
    NoResults
        Where there is none.
    """
    _place.note(machine.RECORDS / gpu if gpu else machine.places()[0])  # a record that is added belongs to them
    found = {name: _noted(frame) for name, frame in record.read_all(gpu).items()}
    if not found:
        _nothing(f"any operator on {gpu or machine.slug()}", "nox -s record")
    return found


def explored(*, seed: int = explore.RECORDED_FROM, cases: int = 100, seconds: float = 600.0) -> dict[str, pd.DataFrame]:
    """Results of random problems, see `fusebook.measure.explore`, by operator.

    Parameters
    ----------
    seed, cases : int
        Which problems, and how many of each operator, where there is a GPU; a record has those that it has.
    seconds : float
        Where there is a GPU, of all together.

    Returns
    -------
    dict of str to pandas.DataFrame
        Of `fusebook.measure.explore.explore`; ``attrs["origin"]`` as of `results`.

    Raises
    ------
    NoResults
        Where there is neither a GPU nor a record; excused, since kernels are recorded before anybody explores.
    fusebook.measure.explore.Incorrect
    """
    ours = {name: op for name, op in OPS.items() if explore.explorable(op)}
    found: dict[str, pd.DataFrame] = {}
    places = machine.places()
    there = {at: [name for name in ours if explore.path(at.name, name, at.parent).exists()] for at in places}
    place = next((at for at, names in there.items() if names), places[-1])  # of one GPU, not of several
    recorded = {name: ours[name] for name in there[place]}
    if _place.live() and not _recording():  # the command records them, which has more time than a page
        for name, op in ours.items():
            frame = explore.explore(op, seed=seed, cases=cases, seconds=seconds / len(ours))
            frame.attrs["origin"] = dataclasses.replace(frame.attrs["origin"], machine=machine.here())
            found[name] = frame
    else:
        for name, op in recorded.items():
            found[name] = _noted(explore.read(op, place.name, place.parent))
        if not found:
            _nothing(
                f"explored problems on {place.name}",
                f"python -m fusebook.measure.explore all --seed {seed}",
                excused=True,
            )
    return {name: frame for name, frame in found.items() if len(frame)}
