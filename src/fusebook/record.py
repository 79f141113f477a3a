"""Records of real runs: what a page replays where there is no GPU.

``records/<gpu>/<op>.csv`` holds the rows of `fusebook.bench.run`, ``records/<gpu>/machine.json`` the machine and its
ceilings, ``records/<gpu>/pages/<name>.csv`` what a page measured that no card covers. The first line of a CSV states
what it is, how many rows follow and their sha256, so that a truncated or edited file is refused.

    python -m fusebook.record softmax --config triton,large,llama --out DIR
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import math
import os
import pathlib
import re
import sys
from collections.abc import Sequence

from fusebook import bench
from fusebook import machine as machines
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.op import Op

with extra("book"):
    import pandas as pd


__all__ = [
    "RecordError",
    "exists",
    "page_exists",
    "page_path",
    "path",
    "read",
    "read_page",
    "write",
    "write_page",
]

_FORMAT = 1
_HEAD = re.compile(r"# fusebook (record|page) (\d+) \| name=(\S+) \| rows=(\d+) \| sha256=([0-9a-f]{64})(.*)")
_KEYS = ("op", "config", "variant", "dtype")
_TEXT = {*_KEYS, "status", "note", "deterministic", "alone", "zone", "math", "source", "versions", "date"}
_STATUS = {"ok", "wrong", "refused", "out of memory", "failed", "too fast", "too slow"}
# Columns that records of before lack: they are read as not measured.
_LATER = ("alone", "host_us_20", "host_us", "host_us_80")


class RecordError(ValueError):
    """A record that cannot be trusted; the message names the file and, where there is one, the row."""


def path(slug: str, op: str, root: pathlib.Path | None = None) -> pathlib.Path:
    """Where the record of an op on a GPU lies."""
    return (root or machines.RECORDS) / slug / f"{op}.csv"


def page_path(slug: str, name: str, root: pathlib.Path | None = None) -> pathlib.Path:
    """Where a page's own measurement lies."""
    return (root or machines.RECORDS) / slug / "pages" / f"{name}.csv"


def exists(op: str, slug: str = "nvidia-h200") -> bool:
    """Whether the package has a record of an op."""
    return path(slug, op).exists()


def page_exists(name: str, slug: str = "nvidia-h200") -> bool:
    """Whether the package has a record of a page's measurement."""
    return page_path(slug, name).exists()


def _body(frame: pd.DataFrame) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(frame.columns)
    for row in frame.itertuples(index=False):
        writer.writerow(_cell(v) for v in row)
    return out.getvalue()


def _cell(value: object) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.6g}"
    return str(value)


def _save(file: pathlib.Path, kind: str, name: str, frame: pd.DataFrame, more: str = "") -> None:
    body = _body(frame)
    digest = hashlib.sha256(body.encode()).hexdigest()
    head = f"# fusebook {kind} {_FORMAT} | name={name} | rows={len(frame)} | sha256={digest}{more}\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_text(head + body)
        part.replace(file)  # atomic: a reader sees the old file or the new one
    finally:
        part.unlink(missing_ok=True)


def _load(file: pathlib.Path, kind: str, name: str) -> tuple[pd.DataFrame, dict[str, str]]:
    if not file.exists():
        raise RecordError(f"{file}: no such record")
    try:
        head, _, body = file.read_text().partition("\n")
    except UnicodeDecodeError as error:
        raise RecordError(f"{file}: not text ({error.reason}); record it again") from error
    match = _HEAD.fullmatch(head)
    if not match or match[1] != kind:
        raise RecordError(f"{file}: not a fusebook {kind}: its first line is {head[:60]!r}")
    if int(match[2]) != _FORMAT:
        raise RecordError(f"{file}: format {match[2]}, this version reads {_FORMAT}; record it again")
    if match[3] != name:
        raise RecordError(f"{file}: a record of {match[3]!r}, expected {name!r}")
    rows = list(csv.reader(io.StringIO(body)))
    columns, rows = (rows[0], rows[1:]) if rows else ([], [])
    for later in reversed(_LATER if kind == "record" else ()):
        following = bench.COLUMNS[bench.COLUMNS.index(later) + 1]
        if later not in columns and following in columns:
            at = columns.index(following)
            columns = [*columns[:at], later, *columns[at:]]
            rows = [[*row[:at], "", *row[at:]] for row in rows]
    for i, row in enumerate(rows, 1):
        if len(row) != len(columns):
            raise RecordError(f"{file}: row {i} has {len(row)} fields of {len(columns)}; record it again")
    if len(rows) != int(match[4]):
        raise RecordError(f"{file}: ends after row {len(rows)} of {match[4]}; record it again")
    if kind == "record":
        _sound(file, name, columns, rows)
    if hashlib.sha256(body.encode()).hexdigest() != match[5]:
        raise RecordError(f"{file}: its rows are not those that were recorded; record it again instead of editing it")
    more = dict(part.split("=", 1) for part in match[6].split(" | ") if "=" in part)
    frame = pd.DataFrame(rows, columns=columns)
    text = _TEXT if kind == "record" else set()
    for column in frame:
        frame[column] = _typed(frame[column], column in text)
    return frame, more


def _typed(column: pd.Series, text: bool) -> pd.Series:
    if text:
        return column.astype(object)
    try:
        return pd.to_numeric(column.replace("", None))
    except (ValueError, TypeError):
        return column.astype(object)


def _sound(file: pathlib.Path, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if tuple(columns[: len(_KEYS)]) != _KEYS or tuple(columns[-len(bench.COLUMNS) :]) != bench.COLUMNS:
        raise RecordError(f"{file}: its columns are not those of this version; record it again")
    numbers = [c for c in columns[len(_KEYS) :] if c in bench.COLUMNS and c not in _TEXT]
    for i, row in enumerate(rows, 1):
        values = dict(zip(columns, row, strict=True))
        if values["op"] != name:
            raise RecordError(f"{file}: row {i} is of {values['op']!r}, expected {name!r}")
        if values["status"] not in _STATUS:
            raise RecordError(f"{file}: row {i} has status {values['status']!r}, none of {', '.join(sorted(_STATUS))}")
        for column in numbers:
            try:
                float(values[column] or "nan")
            except ValueError:
                raise RecordError(f"{file}: row {i} has {column} = {values[column]!r}, not a number") from None


def read(op: str | Op, slug: str = "nvidia-h200", root: pathlib.Path | None = None) -> pd.DataFrame:
    """The recorded rows of an op.

    Parameters
    ----------
    op : str or Op
        The card itself where it is none of `fusebook.cards.OPS`: of a mere name that the library does not know, the
        source that may have changed is unknown.
    slug : str
        The GPU's folder.
    root : pathlib.Path, optional
        The package's records by default.

    Returns
    -------
    pandas.DataFrame
        As of `fusebook.bench.run`; ``attrs`` holds ``machine``, ``measured`` (False), ``stale`` (the ops whose kernel
        has changed since) and ``path``.

    Raises
    ------
    RecordError
        Where the file is missing, corrupt, truncated, edited, or of something else; it names the file and the row.
    """
    card = OPS.get(op) if isinstance(op, str) else op
    name = op if isinstance(op, str) else op.name
    file = path(slug, name, root)
    frame, more = _load(file, "record", name)
    frame.attrs.update(more)
    now = bench.source_hash(card) if card else ""
    stale = [name] if now and (frame["source"] != now).any() else []
    frame.attrs.update(machine=_machine_beside(file), measured=False, stale=stale, path=str(file))
    return frame


def _machine_beside(file: pathlib.Path) -> machines.Machine:
    beside = file.parent / "machine.json"
    try:
        return machines.load(beside, recorded=True)
    except FileNotFoundError as error:
        raise RecordError(f"{file}: no machine.json beside it, so its machine is unknown") from error
    except ValueError as error:
        raise RecordError(str(error)) from error


def write(frame: pd.DataFrame, root: pathlib.Path | str) -> pathlib.Path:
    """Write what was measured, over the rows of the same point, dtype and variant, and keep the others.

    Parameters
    ----------
    frame : pandas.DataFrame
        Of `fusebook.bench.run`, of one op, measured on a GPU.
    root : path
        Becomes ``root/<gpu>/<op>.csv`` beside ``root/<gpu>/machine.json``.

    Returns
    -------
    pathlib.Path
        The CSV.

    Raises
    ------
    RecordError
        Where there is nothing to record, or nothing that was measured on a GPU.
    """
    on = frame.attrs.get("machine")
    if on is None or not frame.attrs.get("measured"):
        raise RecordError("record.write: only what was measured on a GPU in this run is recorded")
    kept = frame[frame["status"] != "absent"]
    names = list(dict.fromkeys(kept["op"]))
    if len(names) != 1:
        raise RecordError(f"record.write: expected the rows of one op, got {names or 'none'}")
    file = path(on.slug, names[0], pathlib.Path(root))
    dims = [c for c in frame.columns if c not in _KEYS and c not in bench.COLUMNS]
    if file.exists():
        before, _ = _load(file, "record", names[0])
        if list(before.columns) == list(kept.columns):
            key = [*_KEYS, *dims]
            new = set(kept[key].astype(str).itertuples(index=False, name=None))
            old = before[[t not in new for t in before[key].astype(str).itertuples(index=False, name=None)]]
            kept = pd.concat([old.astype(object), kept.astype(object)], ignore_index=True)
    _save(file, "record", names[0], kept.sort_values(["dtype", "config"], kind="stable"), f" | commit={on.commit}")
    _introduce(on, file.parent)
    return file


def _introduce(on: machines.Machine, folder: pathlib.Path) -> None:
    """Leave the machine beside its records; one that is there keeps the ceilings that other records were taken under.

    Each row holds the roof of its own run.
    """
    if not (folder / "machine.json").exists():
        machines.save(on, folder / "machine.json")


def read_page(name: str, slug: str = "nvidia-h200", root: pathlib.Path | None = None) -> pd.DataFrame:
    """What a page measured with a function of its own; see `read` for attrs and errors.

    ``attrs`` also holds ``source``, ``versions`` and ``date`` of the run.
    """
    file = page_path(slug, name, root)
    frame, more = _load(file, "page", name)
    frame.attrs.update(more)
    beside = file.parent.parent / file.name  # machine.json lies beside the ops' records
    frame.attrs.update(machine=_machine_beside(beside), measured=False, stale=[], path=str(file))
    return frame


def write_page(
    name: str, frame: pd.DataFrame, root: pathlib.Path | str, on: machines.Machine, source: str = ""
) -> pathlib.Path:
    """Write what a page measured with a function of its own.

    Parameters
    ----------
    name : str
    frame : pandas.DataFrame
    root : path
    on : Machine
        Where it was measured.
    source : str
        Hash of the function, so that a replay can tell that it has changed.
    """
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise RecordError(f"record.write_page: expected a name of lower-case letters, digits and _, got {name!r}")
    if frame.empty:
        raise RecordError(f"record.write_page: {name} has no rows")
    installed = "; ".join(f"{k} {v}" for k, v in machines.versions("torch", "triton").items())
    more = f" | source={source} | versions={installed} | date={pd.Timestamp.now().date().isoformat()}"
    more += f" | commit={on.commit}"
    file = page_path(on.slug, name, pathlib.Path(root))
    _save(file, "page", name, frame, more)
    _introduce(on, file.parent.parent)
    return file


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fusebook.record", description="Measure ops and write records.")
    parser.add_argument("ops", nargs="*", metavar="op", help=f"any of {', '.join(OPS)}")
    parser.add_argument("--config", help="names of configs and sizes, by commas; all configs of an op if not given")
    parser.add_argument("--dtype", default="float32", help=f"by commas, of {', '.join(bench.DTYPES)}")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--machine", action="store_true", help="measure the ceilings anew and write machine.json")
    parser.add_argument("--out", type=pathlib.Path, default=machines.RECORDS, help="folder of records; the package's")
    args = parser.parse_args(argv)
    try:
        for op in args.ops:
            if op not in OPS:
                raise ValueError(f"op {op!r} is none of {', '.join(OPS)}")
            bench.points(OPS[op], args.config or ",".join(OPS[op].configs))
        bench.dtypes(args.dtype)
    except ValueError as error:
        parser.error(str(error))
    if not args.ops and not args.machine:
        parser.error("nothing to record: name an op, or pass --machine")
    if args.warmup < 0 or args.repeat < 1:
        parser.error(f"expected --warmup >= 0 and --repeat >= 1, got {args.warmup} and {args.repeat}")
    try:
        on = machines.here(fresh=args.machine)
    except RuntimeError:
        print("fusebook.record: no CUDA device here; records are taken on a GPU", file=sys.stderr)
        return 1
    if args.machine:
        machines.save(on, args.out / on.slug / "machine.json")
        print(args.out / on.slug / "machine.json")
    for op in args.ops:
        config = args.config or ",".join(OPS[op].configs)
        frame = bench.run(OPS[op], config=config, dtype=args.dtype, warmup=args.warmup, repeat=args.repeat)
        print(write(frame, args.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
