"""Records of real runs: what a page replays where there is no GPU.

``records/<gpu>/<op>.csv`` holds the rows of `fusebook.bench.run`, ``records/<gpu>/machine.json`` the machine and its
ceilings, ``records/<gpu>/pages/<name>.csv`` what a page measured that no card covers, and ``records/<gpu>/previous``
the rows that ``nox -s record`` superseded. The first line of a CSV states what it is, how many rows follow and their
sha256, so that a truncated or edited file is refused.

    python -m fusebook.record softmax --config triton,large,llama --out DIR
    python -m fusebook.record --all --out my-gpu   # ceilings and all points that the package has of another GPU
    python -m fusebook.record --join shard-*       # records of several runs into the package's
    python -m fusebook.record --check       # which rows are of what the code does today
    python -m fusebook.record --restamp     # rows that are written otherwise now, but compile to the same
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton

from fusebook import bench, launches, tables
from fusebook import machine as machines
from fusebook.bench import Origin
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.op import Dims, Op

with extra("book"):
    import pandas as pd
    from tqdm.auto import tqdm

__all__ = [
    "Missing", "RecordError", "everything", "exists", "join", "keep_superseded", "path", "read", "read_all", "restamp",
    "select", "today", "with_callers_clocks", "write",
]  # fmt: skip

_FORMAT = 2
_HEAD = re.compile(r"# fusebook (?:record|page) (\d{1,9}) \| name=(\S+) \| rows=(\d{1,9}) \| sha256=([0-9a-f]{64})(.*)")
_KEYS = ("op", "variant", "dtype")
_TEXT = (*_KEYS, "status", "note", "deterministic", "alone", "zone", "math", "launches", "code", "versions", "date")
# What decides what is launched, beside kernels and cards.
_DECIDE = ("inputs.py", "op.py", "digests.py", "launches.py")
_OLDER = "stamped by an older rule"
_OTHERWISE = "launches something else than when it was measured"
_CALLED = "is called by other code than when it was measured"


class RecordError(ValueError):
    """A record that cannot be trusted; the message names the file."""


class Missing(LookupError):
    """A record has no row of what was asked for; the message names that."""


def path(name: str, gpu: str | None = None, root: pathlib.Path | None = None) -> pathlib.Path:
    """Where a record lies: ``softmax`` of an operator, ``pages/transfers`` of what a page measured by itself."""
    if not re.fullmatch(r"\w+(/\w+)?", name):
        raise RecordError(f"record: expected a name like softmax or pages/transfers, got {name!r}; no path leads here")
    if root is None and gpu is None:
        return machines.places()[0] / f"{name}.csv"
    return (root or machines.RECORDS) / machines.checked_slug(gpu or machines.slug()) / f"{name}.csv"


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
    told = {"name": name, "rows": len(frame), "sha256": hashlib.sha256(body.encode()).hexdigest(), **more}
    head = " | ".join([f"# fusebook record {_FORMAT}", *(f"{k}={v}" for k, v in told.items())])
    _replace(file, f"{head}\n{body}")


def _replace(file: pathlib.Path, text: str) -> None:
    """Write a file as a whole: who reads it meanwhile sees the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _load(file: pathlib.Path, name: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """The rows of a file, and what its first line says beside them."""
    if not file.exists():
        raise RecordError(f"{file}: no such record")
    try:
        head, _, body = file.read_text().partition("\n")
    except UnicodeDecodeError as error:
        raise RecordError(f"{file}: not text ({error.reason}); record it again") from error
    except OSError as error:
        raise RecordError(f"{file}: cannot be read: {error.strerror}") from error
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
    more = dict(part.split("=", 1) for part in match[5].split(" | ") if "=" in part)
    if "/" in name:
        return frame, more
    dims = [c for c in frame if c not in (*_KEYS, *bench.COLUMNS, "config", "source")]
    # A record of today has all columns. An older one names a query, which may have asked for a point twice, knows
    # neither `launches` nor `code`, and not every clock.
    if "config" in frame:
        frame = frame.sort_values("date", kind="stable").drop_duplicates([*_KEYS, *dims], keep="last").sort_index()
    frame = frame.reindex(columns=[*_KEYS, *dims, *bench.COLUMNS]).reset_index(drop=True)
    frame[list(_TEXT)] = frame[list(_TEXT)].astype(object).fillna("")
    return frame, more


def _rows(file: pathlib.Path, body: str, needed: Sequence[str]) -> pd.DataFrame:
    """What stands below the first line, which whoever made a file by hand can have made fit."""
    text = dict.fromkeys(_TEXT, str)
    try:
        if re.search(tables.CONTROLS, body):
            raise ValueError("control characters")
        frame = pd.read_csv(io.StringIO(body), dtype=text, keep_default_na=False, na_values=[""])  # type: ignore[arg-type]
        if lacking := [column for column in needed if column not in frame]:
            raise ValueError(f"no column {lacking[0]}")
        for column in set(frame) & set(bench.COLUMNS) - set(_TEXT) if needed else ():
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
        Of an operator, or ``pages/transfers``; the card itself where it is none of `fusebook.cards.OPS`: of a mere name
        that the library does not know, it is not known what has changed.
    gpu : str, optional
        The GPU's folder; see `fusebook.machine.slug`.
    root : pathlib.Path, optional
        The package's records by default.

    Returns
    -------
    pandas.DataFrame
        ``attrs["origin"]`` is an `Origin`. Rows of an operator are as of `fusebook.bench.run`, but for the column
        ``config``, and with a column ``stale``: why the row is not what the code does today, empty where it is.

    Raises
    ------
    RecordError
        Where the file is missing, corrupt, truncated, edited, or of something else; it names the file.
    """
    card = OPS.get(name) if isinstance(name, str) else name
    name = name if isinstance(name, str) else name.name
    file = path(name, gpu, root)
    frame, more = _load(file, name)
    on = _machine_beside(file if "/" not in name else file.parent)
    if "/" not in name:
        frame["stale"] = _reasons(frame, card, on) if card else ""
    told = {k: more[k] for k in ("versions", "date", "commit", "function") if k in more}
    frame.attrs["origin"] = Origin(on, measured=False, path=file, stale=_summed(frame), **told)
    return frame


def _machine_beside(file: pathlib.Path) -> machines.Machine:
    try:
        return machines.load(file.parent / "machine.json", recorded=True)
    except FileNotFoundError as error:
        raise RecordError(f"{file}: no machine.json beside it, so its machine is unknown") from error
    except ValueError as error:
        raise RecordError(str(error)) from error


def select(
    frame: pd.DataFrame, op: Op, config: str, dtype: str = "float32", variants: Sequence[str] | None = None
) -> pd.DataFrame:
    """The rows of a record that are asked for, in the order asked, with the name of their config.

    Parameters
    ----------
    frame : pandas.DataFrame
        Of `read`.
    config, dtype, variants
        As `fusebook.bench.run` takes them: comma lists, and fewer ways than the record has.

    Returns
    -------
    pandas.DataFrame
        As of `fusebook.bench.run`, with the column ``stale``; ``attrs["origin"]`` tells what is stale of these rows.

    Raises
    ------
    Missing
        Where there is no row of a whole config in a dtype.
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
    found = found[["op", "config", "variant", "dtype", *dims, *bench.COLUMNS, "stale"]]
    found = found if variants is None else tables.where(found, variant=list(variants))
    found.attrs["origin"] = dataclasses.replace(frame.attrs["origin"], stale=_summed(found))
    return found


def write(frame: pd.DataFrame, root: pathlib.Path | str, name: str = "") -> pathlib.Path:
    """Write what was measured, over the rows of the same point, dtype and variant, and keep the others.

    Parameters
    ----------
    frame : pandas.DataFrame
        Of `fusebook.bench.run`, of one operator; or what a page measured by itself. Measured on a GPU.
    root : path
        Becomes ``root/<gpu>/<name>.csv`` beside ``root/<gpu>/machine.json``.
    name : str
        ``pages/transfers``, where this is no operator's; it replaces all that was there.

    Returns
    -------
    pathlib.Path
        The CSV.

    Raises
    ------
    RecordError
        Where there is nothing to record, or nothing that was measured on a GPU.
    """
    origin: Origin | None = frame.attrs.get("origin")
    if origin is None or origin.machine is None or not origin.measured:
        raise RecordError("record.write: only what was measured on a GPU in this run is recorded")
    on = origin.machine
    root = pathlib.Path(root)
    if name:
        if not re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+", name):
            raise RecordError(f"record.write: expected a name like pages/transfers, of a-z, 0-9 and _, got {name!r}")
        if frame.empty:
            raise RecordError(f"record.write: {name} has no rows")
        told = {"function": origin.function, "versions": origin.versions, "date": origin.date, "commit": on.commit}
        file = path(name, on.slug, root)
        _save(file, name, frame, **told)
    else:
        kept = frame[frame["status"] != "absent"].drop(columns=["config", "stale"], errors="ignore")
        names = list(dict.fromkeys(kept["op"]))
        if len(names) != 1:
            raise RecordError(f"record.write: expected the rows of one op, got {names or 'none'}")
        file = path(names[0], on.slug, root)
        key = [c for c in kept if c not in bench.COLUMNS]
        if file.exists():
            before, _ = _load(file, names[0])
            if list(before.columns) == list(kept.columns):
                kept = pd.concat([before.astype(object), kept.astype(object)], ignore_index=True)
        kept = kept.drop_duplicates(key, keep="last").sort_values(["dtype", *map(str, key[3:])], kind="stable")
        _save(file, names[0], kept, commit=on.commit)
    # Each row holds the roof of its own run: a machine that is there keeps the ceilings that other records were under.
    if not (beside := root / on.slug / "machine.json").exists():
        machines.save(on, beside)
    return file


def with_callers_clocks(frame: pd.DataFrame, root: pathlib.Path | None = None) -> pd.DataFrame:
    """What was timed by the device's clocks alone, with the caller's clocks that a record has of the same.

    Parameters
    ----------
    frame : pandas.DataFrame
        Of `fusebook.bench.run`, of one operator, without the clocks ``host`` and ``call``.
    root : pathlib.Path, optional
        The package's records by default.

    Returns
    -------
    pandas.DataFrame
        Rows keep what the record has of the same launches, code and versions, and then the older date.
    """
    name, on = frame["op"].iloc[0], frame.attrs["origin"].machine
    if not (file := path(name, on.slug, root or machines.RECORDS)).exists():
        return frame
    before, _ = _load(file, name)
    keys = [c for c in frame if c not in (*bench.COLUMNS, "config", "stale")]
    same = [*keys, "status", "launches", "code", "versions"]
    if not set(same) <= set(before):
        return frame
    clocks = [c for c in bench.COLUMNS if c.startswith(("host_us", "call_us")) and c in before]
    kept = before[before["status"] == "ok"].astype({c: str for c in same}).drop_duplicates(same).set_index(same)
    kept = kept.reindex(pd.MultiIndex.from_frame(frame[same].astype(str))).set_index(frame.index)
    there = kept["call_us"].notna() & frame["call_us"].isna()
    frame.loc[there, clocks] = kept.loc[there, clocks].astype(float)
    frame.loc[there, "date"] = [min(dates) for dates in zip(kept["date"][there], frame["date"][there], strict=True)]
    return frame


def join(folders: Sequence[pathlib.Path], root: pathlib.Path) -> list[pathlib.Path]:
    """Write what several runs have recorded into one folder of records; where two have the same, the last counts.

    Parameters
    ----------
    folders : sequence of path
        Of records, each with a folder a GPU.

    Returns
    -------
    list of pathlib.Path
        What was written.

    Raises
    ------
    RecordError
        Where a folder has no records, or those of another GPU of the same name; before anything is written from it.
    """
    written = []
    for folder in folders:
        gpus = [machine.parent for machine in sorted(pathlib.Path(folder).glob("*/machine.json"))]
        if not gpus:
            raise RecordError(f"{folder}: no folder of a GPU with a machine.json in it, so there is nothing to join")
        for gpu in gpus:
            on, beside = _machine_beside(gpu / "machine.json"), root / gpu.name / "machine.json"
            if beside.exists():
                there = machines.load(beside)
                if (on.sms, on.l2, on.capability) != (there.sms, there.l2, there.capability):
                    raise RecordError(
                        f"{gpu}: a {on.name} of {on.sms} multiprocessors, and {beside.parent} is of one of "
                        f"{there.sms}: join them into different folders"
                    )
            if not beside.exists() or on.date > machines.load(beside).date:
                machines.save(on, beside)
            for file in sorted([*gpu.glob("*.csv"), *gpu.glob("pages/*.csv")]):
                name = "" if file.parent == gpu else f"pages/{file.stem}"
                frame, more = _load(file, name or file.stem)
                told: dict[str, Any] = {k: more[k] for k in ("function", "versions", "date") if k in more}
                frame.attrs["origin"] = Origin(dataclasses.replace(on, commit=more["commit"]), measured=True, **told)
                written.append(write(frame, root, name))
            if (seconds := gpu / "seconds.json").exists():
                target = beside.with_name("seconds.json")
                known = json.loads(target.read_text()) if target.exists() else {}
                known |= json.loads(seconds.read_text())
                target.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")
    return written


def keep_superseded(before: pathlib.Path, gpu: pathlib.Path) -> None:
    """Keep, in the folder ``previous`` of a GPU's records, the rows that were measured again since.

    Parameters
    ----------
    before : path
        A copy of the GPU's folder from before.
    gpu : path
        The folder as it is now. What it has kept of other rows stays; what was kept of these was older still.
    """
    for file in sorted(before.glob("*.csv")):
        if file.read_bytes() == (gpu / file.name).read_bytes():
            continue
        old, more = _load(file, file.stem)
        now, _ = _load(gpu / file.name, file.stem)
        key = [c for c in old if c not in bench.COLUMNS]
        if key != [c for c in now if c not in bench.COLUMNS]:
            continue
        beside = old[key].merge(now[[*key, "cold_us", "call_us"]], on=key, how="left")
        again = beside["cold_us"].notna() & (
            beside["cold_us"].ne(old["cold_us"]) | beside["call_us"].ne(old["call_us"])
        )
        if not again.any():
            continue
        kept, target = old[again.to_numpy()], gpu / "previous" / file.name
        if target.exists():
            older, _ = _load(target, file.stem)
            kept = pd.concat([older.astype(object), kept.astype(object)], ignore_index=True)
            kept = kept.drop_duplicates(key, keep="last")
        _save(target, file.stem, kept, **{k: v for k, v in more.items() if k == "commit"})
        machines.save(_machine_beside(file), target.with_name("machine.json"))


# Whether a record is of what the code does today ----------------------------------------------------------------------


def _summed(frame: pd.DataFrame) -> tuple[str, ...]:
    """The reasons of all rows, each once, with the variants and, of drawn problems, how many it is about."""
    if "stale" not in frame:
        return ()
    old = frame[frame["stale"] != ""]
    found = []
    for (op, why), rows in old.groupby(["op", "stale"], sort=False):
        whole, names = frame[frame["op"] == op], dict.fromkeys(rows["variant"])
        whose = "" if set(names) == set(whole["variant"]) else f" ({', '.join(names)})"
        where = ""
        if "case" in frame and (cases := rows["case"].nunique()) < (drawn := whole["case"].nunique()):
            where = f" at {cases} of {drawn} problems"
        found.append(f"{op}{whose}{where} {why}")
    return tuple(found)


def _reasons(frame: pd.DataFrame, op: Op, on: machines.Machine) -> list[str]:
    """Why each row is not what the code does today; empty where it is."""
    asked = _launching(frame, op)
    reasons = []
    for i, row in enumerate(frame.to_dict("records")):
        name = row["variant"]
        variant = op.variants.get(name.removesuffix(bench.AS_INSTALLED))
        if variant is None:
            reasons.append("is no variant of its card any more")
        elif not row["launches"]:
            reasons.append("" if row["status"] in ("failed", "out of memory") else _OLDER)
        elif i in asked:
            reasons.append("")
        else:
            changed = row["launches"] != _of_wrapper(variant)
            reasons.append(_CALLED if changed else _other_version(row, variant))
    if asked:
        try:
            found = today(op.name, list(asked.values()), on.capability, on.sms)
        except launches.Unknown as error:
            found = [(f"failed: {error}", "")] * len(asked)
        for i, (now, _) in zip(asked, found, strict=True):
            if now.startswith("failed"):
                reasons[i] = f"may be stale, which could not be found out here ({now.removeprefix('failed: ')})"
            elif now != frame["launches"].iloc[i]:
                reasons[i] = _OTHERWISE
    return reasons


def _launching(frame: pd.DataFrame, op: Op) -> dict[int, tuple[str, str, Dims]]:
    """The points of the rows of which it is known what they launched, and can be found out what they would launch."""
    ours = {name for name, variant in op.variants.items() if launches.launching(name, variant)}
    rows = frame.to_dict("records")
    return {i: _point(row) for i, row in enumerate(rows) if row["launches"] and row["variant"] in ours}


#: Wrappers do not change while a process runs, and pages that share a process read the same records.
_of_wrapper = functools.lru_cache(maxsize=None)(launches.of_wrapper)


def _point(row: Mapping[Any, Any]) -> tuple[str, str, Dims]:
    beside = {*_KEYS, *bench.COLUMNS, "config", "stale"}
    return row["variant"], row["dtype"], {k: v for k, v in row.items() if k not in beside}


def _other_version(row: Mapping[Any, Any], variant: Any) -> str:
    """Whether a peer was recorded in another version than would be measured here, if it can be."""
    if bench.missing(variant):
        return ""
    then = dict(part.split(" ", 1) for part in row["versions"].split("; ") if " " in part)
    for package, version in bench.software(variant).items():
        if package not in ("torch", "triton") and then.get(package, version) != version:
            return f"was recorded with {package} {then[package]}, installed is {version}"
    return ""


@functools.lru_cache(maxsize=None)
def _library() -> str:
    """The sha256 of all that decides what launchers launch."""
    here = pathlib.Path(__file__).parent
    found = hashlib.sha256(repr((sys.version, torch.__version__, triton.__version__)).encode())
    files = [*here.glob("kernels/**/*"), *here.glob("cards/**/*"), *map(here.joinpath, _DECIDE)]
    for file in sorted(f for f in files if f.suffix in (".py", ".csv", ".json")):
        found.update(str(file.relative_to(here)).encode() + file.read_bytes())
    return found.hexdigest()


def _kept(op: str, points: Sequence[Any], capability: tuple[int, int], sms: int) -> pathlib.Path:
    """Where it is remembered what the code of today launches."""
    text = json.dumps([_library(), points, capability, sms])
    return machines.cache_folder_if_any() / "launches" / f"{op}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def today(
    op: str, points: Sequence[tuple[str, str, Dims]], capability: tuple[int, int], sms: int
) -> list[Sequence[str]]:
    """What an operator launches today, see `fusebook.launches.elsewhere`; remembered until the library is another.

    Raises
    ------
    fusebook.launches.Unknown
    """
    file = _kept(op, points, capability, sms)
    try:
        return json.loads(file.read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        found: list[Any] = launches.elsewhere({op: points}, capability, sms)[op]
        _remember(file, found)
        return found


def _remember(file: pathlib.Path, found: Any) -> None:
    with contextlib.suppress(OSError):  # where nothing can be remembered, it is found out again
        _replace(file, json.dumps(found))


def read_all() -> dict[str, pd.DataFrame]:
    """The records of all operators; two processes share the work of finding out whether they are stale.

    Returns
    -------
    dict of str to pandas.DataFrame
        As of `read`, by operator. What was found out is remembered until the code changes.
    """
    names = [name for name in OPS if exists(name)]
    asked: dict[str, list[Any]] = {}
    for name in names:
        frame, _ = _load(path(name), name)
        on = _machine_beside(path(name))
        ours = list(_launching(frame, OPS[name]).values())
        if ours and not _kept(name, ours, on.capability, on.sms).exists():
            asked[name] = ours
    halves: list[dict[str, list[Any]]] = [{}, {}]
    for name in sorted(asked, key=lambda name: -len(asked[name])):
        min(halves, key=lambda half: sum(map(len, half.values())))[name] = asked[name]

    def find(half: dict[str, list[Any]]) -> None:
        with contextlib.suppress(launches.Unknown):  # which the rows will say
            for name, found in launches.elsewhere(half, on.capability, on.sms).items():
                _remember(_kept(name, half[name], on.capability, on.sms), found)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(find, [half for half in halves if half]))
    return {name: read(name) for name in names}


def restamp(gpu: str | None = None, root: pathlib.Path | None = None) -> dict[str, tuple[int, int]]:
    """Stamp rows anew whose launches are written otherwise now, but compile to the code that was recorded.

    Parameters
    ----------
    gpu : str, optional
        See `fusebook.machine.slug`.
    root : pathlib.Path, optional
        The package's records by default.

    Returns
    -------
    dict of str to (int, int)
        By operator, rows that were stamped anew, and rows that the GPU would run otherwise and that stay stale.

    Raises
    ------
    fusebook.launches.Unknown
        Where the Triton that compiled them is not here; it says how to get it.
    """
    counts = {}
    for name in [name for name in OPS if path(name, gpu, root).exists()]:
        file = path(name, gpu, root)
        frame, more = _load(file, name)
        on = _machine_beside(file)
        reasons = _reasons(frame, OPS[name], on)
        rows = [i for i, why in enumerate(reasons) if why == _OTHERWISE and frame["code"].iloc[i]]
        if not rows:
            continue
        done = 0
        with_triton = frame["versions"].str.extract(r"triton ([^;]+)")[0].iloc[rows]
        for version, group in pd.Series(rows).groupby(with_triton.to_numpy()):
            points = [_point(frame.iloc[i].to_dict()) for i in group]
            found = launches.elsewhere({name: points}, on.capability, on.sms, compile=True, triton=str(version))[name]
            for i, (now, code) in zip(group, found, strict=True):
                if code == frame["code"].iloc[i]:
                    frame.loc[i, "launches"] = now
                    done += 1
        if done:
            _save(file, name, frame, **more)
        counts[name] = done, len(rows) - done
    return counts


# A whole GPU ----------------------------------------------------------------------------------------------------------


def everything(op: Op) -> list[tuple[str, str, Dims]]:
    """What ``--all`` measures of an operator: what the package has of a GPU, and the rest of the card's configs.

    Dtype, name of the config and dims of each point. Points of a config that the package has no record of are in
    float32.
    """
    labels = {tuple(dims.items()): label for label, dims in bench.points(op, ",".join(op.configs))}
    recompiled: dict[Any, bool] = {}  # by dtype and dims, whether the record has a variant that sweeps may leave out
    if (file := machines.RECORDS / machines.SHIPPED / f"{op.name}.csv").exists():
        for row in _load(file, op.name)[0].to_dict("records"):
            name, dtype, dims = _point(row)
            key = dtype, tuple(dims.items())
            recompiles = name in op.variants and op.variants[name].recompiles
            recompiled[key] = recompiles or recompiled.get(key, False)
    there = {dims for _, dims in recompiled}
    recompiled |= {("float32", dims): False for dims in labels if dims not in there}
    return [(dtype, "" if all_ else labels.get(dims, ""), dict(dims)) for (dtype, dims), all_ in recompiled.items()]


def _left(op: Op, file: pathlib.Path) -> list[tuple[str, str, Dims]]:
    """The points of `everything` that a record does not have by the torch and the Triton that are here."""
    done = set()
    if file.exists():
        here = "; ".join(f"{name} {version}" for name, version in machines.versions("torch", "triton").items())
        for row in _load(file, op.name)[0].to_dict("records"):
            if row["versions"].startswith(here):
                _, dtype, dims = _point(row)
                done.add((dtype, tuple(dims.items())))
    return [point for point in everything(op) if (point[0], tuple(point[2].items())) not in done]


def _record_all(op: Op, root: pathlib.Path, on: machines.Machine) -> Iterator[str]:
    """Measure and write what a record lacks, point by point, so that what was cut off goes on; say what was done."""
    if whys := {why for variant in op.variants.values() if (why := bench.missing(variant))}:
        if all(map(bench.missing, op.variants.values())):
            yield f"{op.name}: left out, as every way of computing it {' or '.join(sorted(whys))}"
            return
    points, left = everything(op), _left(op, path(op.name, on.slug, root))
    for dtype, label, dims in tqdm(left, desc=op.name, disable=None, leave=False):
        write(bench.run(op, config=[(label, dims)], dtype=dtype, progress=False), root)
    yield f"{op.name}: {len(left)} points measured, {len(points) - len(left)} were there"


def _record_each(out: pathlib.Path, on: machines.Machine, argv: Sequence[str]) -> int:
    """Record every operator in a process of its own, so that one that fails costs no other; the exit code."""
    failed = [name for name in OPS if subprocess.run([sys.executable, "-m", __spec__.name, name, *argv]).returncode]
    if failed:
        print(
            f"fusebook.record: {', '.join(failed)} failed; the same command goes on with what is missing",
            file=sys.stderr,
        )
        return 1
    print(f"{out / on.slug} is whole; next: python -m fusebook.compare {out} {machines.SHIPPED}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fusebook.record", description="Measure ops and write records.")
    parser.add_argument("ops", nargs="*", metavar="op", help=f"any of {', '.join(OPS)}")
    parser.add_argument("--config", help="names of configs and sizes, by commas; all configs of an op if not given")
    parser.add_argument("--dtype", default="float32", help=f"by commas, of {', '.join(bench.DTYPES)}")
    parser.add_argument("--machine", action="store_true", help="measure the ceilings anew and write machine.json")
    parser.add_argument(
        "--all",
        action="store_true",
        help="the ceilings, and all that the package has of a GPU; needs --out, and goes on where it was cut off",
    )
    parser.add_argument("--check", action="store_true", help="say which rows are stale and why; needs no GPU")
    parser.add_argument(
        "--join",
        nargs="+",
        type=pathlib.Path,
        metavar="DIR",
        help="write the records of these folders into --out; needs no GPU",
    )
    parser.add_argument("--restamp", action="store_true", help="stamp rows anew that compile to what was recorded")
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
        if args.join:
            print(f"{len(set(join(args.join, args.out)))} records of {len(args.join)} folders written to {args.out}")
        if args.restamp:
            if not any(args.out.glob("*/*.csv")):
                raise RecordError(f"no records in {args.out}")
            for name, (done, left) in restamp(root=args.out).items():
                print(f"{name}: {done} rows stamped anew, {left} stay stale")
    except (ValueError, OSError, launches.Unknown) as error:  # of RecordError, a machine.json that is none
        print(f"fusebook.record: {error}", file=sys.stderr)
        return 1
    if args.check or args.join or args.restamp:
        return 0
    if not (args.ops or args.machine or args.all):
        parser.error("nothing to record: name an op, or pass --machine or --all")
    if args.all and args.out == machines.RECORDS:
        parser.error("--all needs --out DIR, a folder of your own: the package's records stay as they are")
    try:
        on = machines.here(fresh=args.machine)
    except RuntimeError:
        print("fusebook.record: no CUDA device here; records are taken on a GPU", file=sys.stderr)
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
