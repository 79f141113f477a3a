"""Records of measurements: what a page replays where there is no GPU.

``records/<gpu>/<op>.csv`` holds the rows of `fusebook.measure.bench.run`, ``records/<gpu>/machine.json`` the machine
and its ceilings, ``records/<gpu>/pages/<name>.csv`` what a page measured that no card covers. The first line of a CSV
says what it is, how many rows follow and their sha256, so that a truncated or edited file is refused. It also names the
versions of the software, the date and the commit, which all rows of a file share.

    python -m fusebook.measure.record softmax --config triton,large,llama --out DIR
    python -m fusebook.measure.record --all --out my-gpu   # ceilings and all points that the package has of another GPU
    python -m fusebook.measure.record --check              # which rows were measured before the code changed
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import io
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusebook import tables
from fusebook.cards import FAMILIES, OPS
from fusebook.extras import extra
from fusebook.measure import _removed, bench, sources, timing
from fusebook.measure import machine as machines
from fusebook.measure.bench import Origin
from fusebook.measure.op import Dims, Op

with extra("book"):
    import pandas as pd
    from tqdm.auto import tqdm

__all__ = ["Missing", "RecordError", "everything", "exists", "owner", "path", "read", "read_all", "select", "write"]

_FORMAT = 3
_HEAD = re.compile(r"# fusebook (?:record|page) (\d{1,9}) \| name=(\S+) \| rows=(\d{1,9}) \| sha256=([0-9a-f]{64})(.*)")
_KEYS = ("op", "variant", "dtype")
_TEXT = (*_KEYS, "status", "note", "deterministic", "alone", "zone", "math", "code", "host", "versions", "date")
# What the first line of a file says for all of its rows.
_SHARED = ("versions", "date")
#: How columns were called before format 3; see `_renamed`.
_NAMES = {"score": "error", "limit": "tolerance"} | {
    f"{clock}_us{q}": timing.COLUMN[clock] + q for clock in timing.KINDS for q in ("", "_20", "_80")
}


class RecordError(ValueError):
    """A damaged record; the message names the file."""


class Missing(LookupError):
    """A record has no row of what was asked for; the message names that."""


def path(name: str, gpu: str | None = None, root: pathlib.Path | None = None) -> pathlib.Path:
    """The file of a record: ``softmax`` of an operator, ``pages/transfers`` of what a page measured by itself."""
    if not re.fullmatch(r"\w+(/\w+)?", name):
        raise RecordError(f"record: expected a name like softmax or pages/transfers, got {name!r}; no path leads here")
    if root is None and gpu is None:
        return machines.places()[0] / f"{name}.csv"
    return (root or machines.RECORDS) / machines.checked_slug(gpu or machines.slug()) / f"{name}.csv"


def owner(name: str) -> str:
    """The number of the page that owns the file of a card; empty for other names."""
    return next((str(family.PAGE) for family, ops in FAMILIES.items() if name in {op.name for op in ops}), "")


def exists(name: str, gpu: str | None = None) -> bool:
    """Whether the package has a record of this name."""
    return path(name, gpu).exists()


# Files ----------------------------------------------------------------------------------------------------------------


def _cell(value: object) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.6g}"
    return str(tables.harmless(str(value)))


def _save(file: pathlib.Path, name: str, frame: pd.DataFrame, **more: str) -> None:
    body = frame.rename(columns=tables.harmless).map(_cell).to_csv(index=False, lineterminator="\n")
    facts = {"name": name, "rows": len(frame), "sha256": hashlib.sha256(body.encode()).hexdigest(), **more}
    head = " | ".join([f"# fusebook record {_FORMAT}", *(f"{k}={v}" for k, v in facts.items())])
    _replace(file, f"{head}\n{body}")


def _replace(file: pathlib.Path, text: str) -> None:
    """Write a file in one step: a reader sees the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _load(file: pathlib.Path, name: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """The rows of a file, and what its first line says besides."""
    if not file.exists():
        raise RecordError(f"{file}: no such record")
    try:
        text = file.read_text()
    except UnicodeDecodeError as error:
        raise RecordError(f"{file}: not text ({error.reason}); record it again") from error
    except OSError as error:
        raise RecordError(f"{file}: cannot be read: {error.strerror}") from error
    frame, more = _of_text(file, name, text)
    return frame.copy(), more.copy()


@functools.lru_cache(maxsize=128)
def _of_text(file: pathlib.Path, name: str, text: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """The same of a file's text, parsed once: a page asks for a record once for each of its frames and claims."""
    head, _, body = text.partition("\n")
    match = _HEAD.fullmatch(head)
    if not match or not head.isprintable():
        raise RecordError(f"{file}: not a fusebook record: its first line is {head[:60]!r}")
    if int(match[1]) > _FORMAT:
        raise RecordError(f"{file}: format {match[1]}, this version reads {_FORMAT}; record it again")
    if match[2].split("/")[-1] != name.split("/")[-1]:
        raise RecordError(f"{file}: a record of {match[2]!r}, expected {name!r}")
    if (rows := body.count("\n") - 1) < int(match[3]):
        raise RecordError(f"{file}: ends after row {max(rows, 0)} of {match[3]}; record it again")
    if hashlib.sha256(body.encode()).hexdigest() != match[4]:
        raise RecordError(f"{file}: its rows are not those that were recorded; record it again instead of editing it")
    frame = _rows(file, body, _KEYS if "/" not in name else ())
    more = dict(part.split("=", 1) for part in match[5].split(" | ") if "=" in part) | {"format": match[1]}
    if old := int(match[1]) < _FORMAT:
        frame = _renamed(frame)
    if "/" in name:
        return frame, more
    dims = [c for c in frame if c not in (*_KEYS, *bench.COLUMNS, "config", "source", "launches")]
    if old:
        # It has another `code`. The oldest also name a query, which may have asked for a point twice.
        frame = frame.drop(columns="code", errors="ignore")
        if "config" in frame:
            frame = frame.sort_values("date", kind="stable").drop_duplicates([*_KEYS, *dims], keep="last").sort_index()
    else:
        frame = frame.assign(**{column: more.get(column, "") for column in _SHARED})
    frame = frame.reindex(columns=[*_KEYS, *dims, *bench.COLUMNS]).reset_index(drop=True)
    frame[list(_TEXT)] = frame[list(_TEXT)].astype(object).fillna("")
    return frame, more


def _renamed(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a record of an older format, by today's names."""
    return frame.rename(columns={old: new for old, new in _NAMES.items() if new not in frame})


def _rows(file: pathlib.Path, body: str, needed: Sequence[str]) -> pd.DataFrame:
    """The rows below the first line, which can be damaged although their sum fits: someone may have written both."""
    text = dict.fromkeys(_TEXT, str)
    try:
        if re.search(tables.CONTROLS, body):
            raise ValueError("control characters")
        frame = pd.read_csv(io.StringIO(body), dtype=text, keep_default_na=False, na_values=[""])  # type: ignore[arg-type]
        if lacking := [column for column in needed if column not in frame]:
            raise ValueError(f"no column {lacking[0]}")
        for column in set(frame) & ({*bench.COLUMNS, *_NAMES} - {*_TEXT}) if needed else ():
            numbers = pd.to_numeric(frame[column])
            if "_us" in str(column) and len(wrong := numbers[numbers.le(0) | numbers.eq(math.inf)]):
                raise ValueError(f"{column} of {wrong.iloc[0]:g}")
        if needed and (other := set(frame["op"].fillna("").astype(str)) - {file.stem}):
            raise ValueError(f"rows of {min(other)!r}")
    except ValueError as error:
        raise RecordError(f"{file}: not the rows of a record ({error}); record it again") from error
    return frame


def read(name: str | Op, gpu: str | None = None, root: pathlib.Path | None = None) -> pd.DataFrame:
    """The recorded rows of an operator, or of what a page measured by itself.

    Parameters
    ----------
    name : str or Op
        Of an operator, or ``pages/transfers``. Pass the card itself if it is none of `fusebook.cards.OPS`: what changed
        is known of cards only.
    gpu : str, optional
        The GPU's folder; see `fusebook.measure.machine.slug`.
    root : pathlib.Path, optional
        The package's records by default.

    Returns
    -------
    pandas.DataFrame
        ``attrs["origin"]`` is an `Origin`. Rows of an operator are those of `fusebook.measure.bench.run` without the
        column ``config``, and with two more: ``stale`` says why GPU times and memory are not those of today's code, and
        ``stale_host`` the same of launch times. Both are empty for a row that is up to date.

    Raises
    ------
    RecordError
        If the file is missing, damaged, edited, or of something else; the message names it.
    """
    card = OPS.get(name) if isinstance(name, str) else name
    name = name if isinstance(name, str) else name.name
    file = path(name, gpu, root)
    frame, more = _load(file, name)
    on = _machine_beside(file if "/" not in name else file.parent)
    if "/" not in name:
        frame["stale"] = _reasons(frame, card, more) if card else ""
        frame["stale_host"] = _host_reasons(frame, card, more) if card else ""
    facts = {k: more[k] for k in ("versions", "date", "commit") if k in more}
    code = more.get("code", "") if _timed_as_today(more) else ""
    frame.attrs["origin"] = Origin(on, measured=False, path=file, stale=_summed(frame), code=code, **facts)
    return frame


def _timed_as_today(more: Mapping[str, str]) -> bool:
    return more.get("timing") == str(timing.VERSION)


def _machine_beside(file: pathlib.Path) -> machines.Machine:
    try:
        return machines.load(file.parent / "machine.json", recorded=True)
    except FileNotFoundError as error:
        raise RecordError(f"{file}: no machine.json beside it, so its machine is unknown") from error
    except ValueError as error:
        raise RecordError(str(error)) from error


def select(
    frame: pd.DataFrame,
    op: Op,
    config: str | Sequence[tuple[str, Dims]],
    dtype: str = "float32",
    variants: Sequence[str] | None = None,
) -> pd.DataFrame:
    """The rows of a record that are asked for, in that order, with the name of their config.

    Parameters
    ----------
    frame : pandas.DataFrame
        Of `read`.
    config, dtype, variants
        As `fusebook.measure.bench.run` takes them: comma lists, and fewer implementations than the record has.

    Returns
    -------
    pandas.DataFrame
        As of `fusebook.measure.bench.run`, with the columns of `read`; ``attrs["origin"]`` says what is stale of them.

    Raises
    ------
    Missing
        If there is no row of a whole config in a dtype.
    """
    points = bench.points(op, config)
    dims = list(points[0][1])
    asked = pd.DataFrame([{"config": label, **point} for label, point in points])
    parts = []
    for name in bench.dtypes(dtype):
        part = asked.merge(frame[frame["dtype"] == name], on=dims)
        for label in dict.fromkeys(asked["config"]):
            if label not in set(part["config"]):
                raise Missing(f"{op.name} for {label} in {name}")
        parts.append(part)
    found = pd.concat(parts, ignore_index=True)
    found = found[["op", "config", "variant", "dtype", *dims, *bench.COLUMNS, "stale", "stale_host"]]
    found = found if variants is None else tables.where(found, variant=list(variants))
    found.attrs["origin"] = dataclasses.replace(frame.attrs["origin"], stale=_summed(found))
    return found


def write(frame: pd.DataFrame, root: pathlib.Path | str, name: str = "") -> pathlib.Path:
    """Write what was measured, over the rows of the same point, dtype and variant, and keep the others.

    Parameters
    ----------
    frame : pandas.DataFrame
        Of `fusebook.measure.bench.run`, of one operator; or what a page measured by itself. Measured on a GPU.
    root : path
        Becomes ``root/<gpu>/<name>.csv`` next to ``root/<gpu>/machine.json``.
    name : str
        ``pages/transfers``, if this is not of an operator; it replaces the whole file.

    Returns
    -------
    pathlib.Path
        The CSV.

    Raises
    ------
    RecordError
        If there is nothing to record, nothing that was measured on a GPU, or a file there of other versions.

    Notes
    -----
    A row that was timed by the clocks of the host alone adds these times to the row of the same code that is there.
    """
    origin: Origin | None = frame.attrs.get("origin")
    if origin is None or origin.machine is None or not origin.measured:
        raise RecordError("record.write: only what was measured on a GPU in this run is recorded")
    on = origin.machine
    root = pathlib.Path(root)
    facts = {"commit": on.commit, "timing": str(timing.VERSION)}
    if name:
        if not re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+", name):
            raise RecordError(f"record.write: expected a name like pages/transfers, of a-z, 0-9 and _, got {name!r}")
        if frame.empty:
            raise RecordError(f"record.write: {name} has no rows")
        file = path(name, on.slug, root)
        _save(file, name, frame, code=origin.code, versions=origin.versions, date=origin.date, **facts)
    else:
        kept = frame[frame["status"] != "absent"].drop(columns=["config", "stale", "stale_host"], errors="ignore")
        names = list(dict.fromkeys(kept["op"]))
        if len(names) != 1:
            raise RecordError(f"record.write: expected the rows of one op, got {names or 'none'}")
        file = path(names[0], on.slug, root)
        key = [c for c in kept if c not in bench.COLUMNS]
        facts |= {"versions": _versions(kept), "date": str(kept["date"].max())}
        if file.exists():
            before, more = _load(file, names[0])
            _refuse_another_software(file, more, facts)
            if list(before.columns) == list(kept.columns):
                kept = _with_host_times(kept, before, key)
                kept = pd.concat([before.astype(object), kept.astype(object)], ignore_index=True)
                facts["versions"] = _versions(kept)
        kept = kept.drop_duplicates(key, keep="last").sort_values(["dtype", *map(str, key[3:])], kind="stable")
        _save(file, names[0], kept.drop(columns=list(_SHARED)), **facts)
    # Each row has the roof of its run, so an existing machine.json keeps the ceilings of other records.
    if not (beside := root / on.slug / "machine.json").exists():
        machines.save(on, beside)
    return file


def _versions(frame: pd.DataFrame) -> str:
    """Each version once, torch and Triton first."""
    return "; ".join(dict.fromkeys(part for row in frame["versions"].unique() for part in str(row).split("; ") if part))


def _parsed(versions: str) -> dict[str, str]:
    return dict(part.split(" ", 1) for part in versions.split("; ") if " " in part)


def _refuse_another_software(file: pathlib.Path, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """A file has one set of versions, so rows of another do not go into it."""
    before, today = _parsed(then.get("versions", "")), _parsed(now["versions"])
    other = [f"{k} {before[k]} and not {today[k]}" for k in before.keys() & today.keys() if before[k] != today[k]]
    if then["format"] != str(_FORMAT) or not _timed_as_today(then):
        other.append("an older form of records")
    if other:
        raise RecordError(
            f"{file}: is of {', '.join(sorted(other))}; record its page whole with nox -s record, or pass another --out"
        )


def _with_host_times(frame: pd.DataFrame, before: pd.DataFrame, key: Sequence[Any]) -> pd.DataFrame:
    """Rows that were timed by the clocks of the host alone, with the other columns of the same code's row."""
    same = [*key, "code"]
    there = before[before["status"] == "ok"].drop_duplicates(same).set_index(same)
    there = there.reindex(pd.MultiIndex.from_frame(frame[same])).set_index(frame.index)
    fill = frame["status"].eq("ok") & frame[["gpu_us", "gpu_warm_us"]].isna().all(axis=1) & there["gpu_us"].notna()
    kept = [c for c in bench.COLUMNS if not c.startswith(("launch_us", "latency_us", "host")) and c not in same]
    if not fill.any():
        return frame
    frame = frame.astype(object)
    frame.loc[fill, kept] = there.loc[fill, kept].astype(object)
    return frame


# Whether a record is of today's code ----------------------------------------------------------------------------------


def _summed(frame: pd.DataFrame) -> tuple[str, ...]:
    """The reasons of all rows, each once, with the variants and, of drawn problems, how many it concerns."""
    found = []
    frame = frame[[name for name in ("op", "variant", "case", "stale", "stale_host") if name in frame]]
    for column in [name for name in ("stale", "stale_host") if name in frame]:
        for (op, why), rows in frame[frame[column] != ""].groupby(["op", column], sort=False):
            whole, names = frame[frame["op"] == op], dict.fromkeys(rows["variant"])
            whose = "" if set(names) == set(whole["variant"]) else f" ({', '.join(names)})"
            where = ""
            if "case" in frame and (cases := rows["case"].nunique()) < (drawn := whole["case"].nunique()):
                where = f" at {cases} of {drawn} problems"
            found.append(f"{op}{whose}{where} {why}")
    return tuple(found)


def _reasons(frame: pd.DataFrame, op: Op, more: Mapping[str, str]) -> list[str]:
    """Why each row is not of today's code; empty if it is."""
    then = _parsed(more.get("versions", ""))
    commit = more.get("commit", "unknown")
    found = []
    for name, code in zip(frame["variant"], frame["code"], strict=True):
        name = name.removesuffix(bench.AS_INSTALLED)
        if name not in op.variants:
            found.append("is not an implementation of its card any more")
        elif more["format"] != str(_FORMAT) or code != sources.of_variant(op, name)[0]:
            found.append(f"was measured before the code changed (at commit {commit})")
        elif not _timed_as_today(more):
            found.append(f"was timed before the clocks changed (at commit {commit})")
        else:
            found.append(_other_version(op.variants[name], then))
    return found


def _host_reasons(frame: pd.DataFrame, op: Op, more: Mapping[str, str]) -> list[str]:
    """Of rows that are otherwise up to date, whether launch times are of today's call path."""
    why = f"launch time measured at commit {more.get('commit', 'unknown')}, before the call path changed"
    return [
        why if not stale and host != sources.of_variant(op, name.removesuffix(bench.AS_INSTALLED))[1] else ""
        for name, host, stale in zip(frame["variant"], frame["host"], frame["stale"], strict=True)
    ]


def _other_version(variant: Any, then: Mapping[str, str]) -> str:
    """Whether a baseline was recorded in another version than would be measured here, if it can be."""
    if bench.missing(variant):
        return ""
    for package, version in bench.software(variant).items():
        if package not in ("torch", "triton", "ptxas") and then.get(package, version) != version:
            return f"was recorded with {package} {then[package]}, installed is {version}"
    return ""


def read_all(gpu: str | None = None) -> dict[str, pd.DataFrame]:
    """The records of all operators that have one, as of `read`; of one GPU if it is named."""
    return {name: read(name, gpu) for name in OPS if exists(name, gpu)}


# A whole GPU ----------------------------------------------------------------------------------------------------------


def _point(row: Mapping[Any, Any]) -> tuple[str, str, Dims]:
    beside = {*_KEYS, *bench.COLUMNS, "config", "stale", "stale_host"}
    return row["variant"], row["dtype"], {k: v for k, v in row.items() if k not in beside}


def everything(op: Op) -> list[tuple[str, str, Dims]]:
    """What ``--all`` measures of an operator: what the package has of a GPU, and the rest of the card's configs.

    Dtype, name of the config and dims of each point. Points of a config that the package has no record of are in
    float32.
    """
    labels = {tuple(dims.items()): label for label, dims in bench.points(op, ",".join(op.configs))}
    found: dict[Any, None] = {}
    if (file := machines.RECORDS / machines.SHIPPED / f"{op.name}.csv").exists():
        for row in _load(file, op.name)[0].to_dict("records"):
            _, dtype, dims = _point(row)
            found[dtype, tuple(dims.items())] = None
    there = {dims for _, dims in found}
    found |= {("float32", dims): None for dims in labels if dims not in there}
    return [(dtype, labels.get(dims, ""), dict(dims)) for dtype, dims in found]


def _left(op: Op, file: pathlib.Path) -> list[tuple[str, str, Dims]]:
    """The points of `everything` that a record of this torch and this Triton lacks."""
    done = set()
    if file.exists():
        here = "; ".join(f"{name} {version}" for name, version in machines.versions("torch", "triton").items())
        for row in _load(file, op.name)[0].to_dict("records"):
            if row["versions"].startswith(here):
                _, dtype, dims = _point(row)
                done.add((dtype, tuple(dims.items())))
    return [point for point in everything(op) if (point[0], tuple(point[2].items())) not in done]


def _record_all(op: Op, root: pathlib.Path, on: machines.Machine) -> Iterator[str]:
    """Measure and write what a record lacks, point by point, so that an interrupted run continues."""
    if whys := {why for variant in op.variants.values() if (why := bench.missing(variant))}:
        if all(map(bench.missing, op.variants.values())):
            yield f"{op.name}: left out, as every implementation {' or '.join(sorted(whys))}"
            return
    points, left = everything(op), _left(op, path(op.name, on.slug, root))
    for dtype, label, dims in tqdm(left, desc=op.name, disable=None, leave=False):
        write(bench.run(op, config=[(label, dims)], dtype=dtype), root)
    yield f"{op.name}: {len(left)} points measured, {len(points) - len(left)} were there"


def _record_each(out: pathlib.Path, on: machines.Machine, argv: Sequence[str]) -> int:
    """Record every operator in a separate process, so that a failure stops no other; the exit code."""
    failed = [name for name in OPS if subprocess.run([sys.executable, "-m", __spec__.name, name, *argv]).returncode]
    if failed:
        print(
            f"fusebook.measure.record: {', '.join(failed)} failed; the same command goes on with what is missing",
            file=sys.stderr,
        )
        return 1
    print(f"{out / on.slug} is whole; next: python -m fusebook.measure.compare {out} {machines.SHIPPED}")
    return 0


#: Options of earlier versions, and what to do instead.
_GONE = {
    "--join": "each page is recorded whole, into its own files, by nox -s record -- PAGE",
    "--restamp": "a row is stale when its source changes; nox -s record -- --stale records it again",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fusebook.measure.record", description="Measure ops and write records."
    )
    parser.add_argument("ops", nargs="*", metavar="op", help=f"any of {', '.join(OPS)}")
    parser.add_argument("--config", help="names of configs and sizes, by commas; all configs of an op if not given")
    parser.add_argument("--dtype", default="float32", help=f"by commas, of {', '.join(bench.DTYPES)}")
    parser.add_argument("--machine", action="store_true", help="measure the ceilings again and write machine.json")
    parser.add_argument(
        "--all",
        action="store_true",
        help="the ceilings, and all that the package has of a GPU; needs --out, and continues an interrupted run",
    )
    parser.add_argument("--check", action="store_true", help="list stale rows and the reasons; needs no GPU")
    _removed(parser, _GONE)
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
    try:
        if args.check:
            if not (found := read_all()):
                raise RecordError(f"no records in {machines.places()[0]}")
            for name, frame in found.items():
                print(f"{name}: {'; '.join(map('stale: {}'.format, frame.attrs['origin'].stale)) or 'fresh'}")
    except (ValueError, OSError) as error:  # of RecordError, a machine.json that is none
        print(f"fusebook.measure.record: {error}", file=sys.stderr)
        return 1
    if args.check:
        return 0
    if not (args.ops or args.machine or args.all):
        parser.error("nothing to record: name an op, or pass --machine or --all")
    if args.all and args.out == machines.RECORDS:
        parser.error("--all needs --out DIR, a folder of your own: the package's records stay as they are")
    try:
        on = machines.here(fresh=args.machine)
    except RuntimeError:
        print("fusebook.measure.record: no CUDA device here; records are taken on a GPU", file=sys.stderr)
        return 1
    beside = args.out / on.slug / "machine.json"
    if args.machine or (args.all and not beside.exists()):
        machines.save(on, beside)
        print(beside)
    if args.all and not args.ops:
        return _record_each(args.out, on, list(sys.argv[1:] if argv is None else argv))
    for op in args.ops:
        if args.all:
            for line in _record_all(OPS[op], args.out, on):
                print(line, flush=True)
            continue
        config = args.config or ",".join(OPS[op].configs)
        print(write(bench.run(OPS[op], config=config, dtype=args.dtype), args.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
