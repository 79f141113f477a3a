"""Problems that nobody chose: ``python -m fusebook.measure.explore softmax --cases 100 --seed 100``.

An operator's card draws problems that people have (`Op.draw`), without regard to how Fusebook computes them. One after
another is drawn, checked and timed, and its rows are appended to ``records/<gpu>/explored/<op>.csv``. An incorrect
result of Fusebook ends the run with the line of Python that reproduces it.

A run that was interrupted continues with its file, and measures again what is of older code.

Seeds 0 to 99 are for tuning. Recorded seeds are 100 and above, which nothing was ever tuned on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import hashlib
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.measure import bench, check, inputs, record, sources, timing
from fusebook.measure import machine as machines
from fusebook.measure.op import Dims, Op, Variant

with extra("book"):
    import pandas as pd
    from tqdm import tqdm

__all__ = [
    "COLUMNS", "RECORDED_FROM", "Wrong", "explorable", "explore", "ours", "path", "problem", "problems", "quantiles",
    "read", "refusals", "several", "standing", "worst",
]  # fmt: skip

#: The seeds before this one are those that plans are tuned by; they are not recorded.
RECORDED_FROM = 100

_FRONT = ("case", "op", "variant", "dtype", "layout")
_TIMES = ("gpu_us", "launch_us", "latency_us")
_BACK = (
    *("status", "note", "error", "tolerance", *_TIMES, "first_call_s", "peak_bytes", "sm_mhz", "power_w"),
    *("math", "code", "host", "read_bytes", "write_bytes", "flop"),
)
#: The columns of what was explored; the dims are after ``layout``.
COLUMNS = (*_FRONT, *_BACK)
_TEXT = ["op", "variant", "dtype", "layout", "status", "note", "math", "code", "host"]

_ON_HOST = ("NumPy", "torch on the CPU")  # no choice where the data lies in the device's memory
_CALLS = 7  # that are timed
# The host's clock is started where queueing takes at least this part of the device's time: below, nobody waits for it.
_NOTICED = 0.25


class Wrong(Exception):
    """A result of ours is wrong; the message ends in the line of Python that shows it."""


# Problems -------------------------------------------------------------------------------------------------------------


def problems(op: Op, seed: int = 0, cases: int = 100) -> list[Dims]:
    """The problems of a seed, see `fusebook.measure.op.Op.problem`."""
    return [op.problem(seed, case) for case in range(cases)]


def _small(dims: Dims) -> Dims:
    """The same problem at a size that the interpreter computes: odd sizes stay odd, and few stay few."""
    return {k: v if isinstance(v, str) or v <= 16 else 16 + v % 32 for k, v in dims.items()}


def _line(op: Op, dims: Dims) -> str:
    """The line of Python that does it again."""
    given = "".join(f", {k}={v!r}" for k, v in dims.items())
    return f"from fusebook.measure import explore; explore.problem({op.name!r}{given})"


def _named(rows: pd.DataFrame, columns: Sequence[str]) -> list[dict[str, int | str]]:
    """Of each row what these columns say of its problem, as a draw says it."""
    given = rows[list(columns)].to_dict("records")
    return [{str(k): v if isinstance(v, str) else int(v) for k, v in row.items()} for row in given]


def explorable(op: Op) -> bool:
    """Whether an operator has a variant of ours to hold against the others."""
    return "fusebook" in op.variants or "fusebook (chosen)" in op.variants


def ours(op: Op, math: str = "") -> str:
    """The variant that a user of ours gets: it may choose a library's product.

    Parameters
    ----------
    math : str
        ``"tf32"`` for float32 that is multiplied so.

    Raises
    ------
    ValueError
        Where the card has none.
    """
    more = ", TF32" if math == "tf32" else ""
    found = [name for name in (f"fusebook (chosen){more}", f"fusebook{more}") if name in op.variants]
    if not found:
        raise ValueError(f"explore: expected an operator with the variant fusebook, got {op.name}; take another one")
    return found[0]


def _chosen(op: Op, without: Sequence[str]) -> dict[str, Variant]:
    """All variants that a user would pick, and that this machine can run."""
    return {
        name: v
        for name, v in op.variants.items()
        if not (v.on_cpu or name in _ON_HOST or bench.missing(v) or any(word in name for word in without))
    }


def _split(dims: Dims) -> tuple[torch.dtype, str, dict[str, Any]]:
    sizes = dict(dims)
    return bench.DTYPES[str(sizes.pop("dtype"))], str(sizes.pop("layout")), sizes


# One problem ----------------------------------------------------------------------------------------------------------


def problem(op: str | Op, /, **dims: Any) -> pd.DataFrame:
    """Check one problem, and time all that a user would pick for it; without a GPU no times are taken.

    Parameters
    ----------
    **dims
        Of the card, ``dtype`` and ``layout`` among them.

    Returns
    -------
    pandas.DataFrame
        A row a variant, with `COLUMNS` and the dims. Times in microseconds, sizes in bytes.

    Raises
    ------
    Wrong
        Where a result of ours is above the limit.
    """
    card = OPS[op] if isinstance(op, str) else op
    rows = _explored(card, dims, _chosen(card, ()), True)
    return _frame(card, [{"case": 0, **row} for row in rows])


def several(asked: Sequence[tuple[str, Dims]]) -> list[pd.DataFrame]:
    """As `problem`, of several, by the clock of the GPU alone.

    Parameters
    ----------
    asked : sequence of tuple
        The name of an operator, and the dims of a problem.

    Returns
    -------
    list of pandas.DataFrame
        Of each problem.

    Raises
    ------
    Wrong
    """
    found = []
    for name, dims in asked:
        rows = _explored(OPS[name], dims, _chosen(OPS[name], ()), False)
        found.append(_frame(OPS[name], [{"case": 0, **row} for row in rows]))
        _tidy()
    return found


def _frame(op: Op, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    dims = (k for k in problems(op, 0, 1)[0] if k not in ("dtype", "layout"))
    return pd.DataFrame(rows, columns=[*_FRONT, *dims, *_BACK])


def _explored(
    op: Op,
    dims: Dims,
    variants: Mapping[str, Variant],
    host: bool,
    check_only: bool = False,
) -> list[dict[str, Any]]:
    """The rows of a problem; with launch times if `host`."""
    kind, how, sizes = _split(dims)
    least = op.cost(kind.itemsize, **sizes)
    rows = {
        name: {
            "op": op.name,
            "variant": name,
            "dtype": str(kind)[6:],
            "layout": how,
            **sizes,
            **dict.fromkeys(_BACK, math.nan),
            "status": "ok",
            "note": "",
            "math": v.math or "",
            **dict(zip(("code", "host"), sources.of_variant(op, name), strict=True)),
            "read_bytes": least.read,
            "write_bytes": least.write,
            "flop": least.flop,
        }
        for name, v in variants.items()
        if v.math != "tf32" or kind == torch.float32
    }
    try:
        made = op.made(dims, "cuda" if torch.cuda.is_available() else "cpu")
        yard = check.yardstick(op, made)
    except torch.cuda.OutOfMemoryError as error:
        for row in rows.values():
            row.update(status="out of memory", note=f"inputs and reference: {bench._sentence(error)}")
        return list(rows.values())
    if any(v.recompiles for v in variants.values()):
        torch.compiler.reset()  # each shape compiled for itself, as by a program that has only that shape
    calls: dict[str, Callable[[], Any]] = {}
    for name in rows:
        with torch.no_grad(), bench._reasons(rows[name]):
            calls[name] = _right_call(op, variants[name], made, yard, rows[name])
        if rows[name]["status"] == "ok":
            continue
        calls.pop(name, None)
        if name.startswith("fusebook") and rows[name]["status"] in ("wrong", "failed"):
            raise Wrong(f"{op.name}: {name} is {rows[name]['status']}: {rows[name]['note']}\n{_line(op, dims)}")
    del yard
    if calls and _gpu() and not check_only:
        _time(calls, rows, host)
    return list(rows.values())


def _right_call(
    op: Op, variant: Variant, made: tuple[Any, ...], yard: check.Yardstick, row: dict[str, Any]
) -> Callable[[], Any]:
    """The call to time, once its result is right."""
    call = functools.partial(variant.run, *variant.given(*made))
    inputs.poison(yard.outputs(next(v for v in made if isinstance(v, torch.Tensor)).device))
    row.update(tolerance=yard.limit(variant.math))
    start = time.perf_counter()
    outputs = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    row.update(first_call_s=time.perf_counter() - start)
    row.update(error=bench._within(yard, variant, outputs).score)
    del outputs
    row.update(peak_bytes=bench._peak(variant, call))
    return call


def _time(calls: Mapping[str, Callable[[], Any]], rows: Mapping[str, dict[str, Any]], host: bool) -> None:
    """Cold for all; the host's clock where it may be noticed; the whole call of what waits for the device."""
    try:
        with torch.no_grad():
            cold = timing.cold(calls, warmup=2, repeat=_CALLS)
            waits = {name: call for name, call in calls.items() if cold[name] is None}
            noticed = {
                name: call
                for name, call in calls.items()
                if host and (q := cold[name]) is not None and timing._host_seconds(call) > _NOTICED * q.q50
            }
            queued = timing.host(noticed, warmup=0, repeat=_CALLS) if noticed else {}
            whole = timing.call(waits, warmup=1, repeat=_CALLS) if waits else {}
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        for name in calls:
            rows[name].update(status="out of memory", note=f"while timed: {bench._sentence(error)}")
        return
    seen = machines.clocks_and_power()
    for clock, times in (("gpu_us", cold), ("launch_us", queued), ("latency_us", whole)):
        for name, q in times.items():
            if q is not None:
                rows[name][clock] = q.q50 * 1e6
    for name in calls:
        rows[name].update({k: v for k, v in seen.items() if k in rows[name]})


# Many problems --------------------------------------------------------------------------------------------------------


def explore(
    *ops: Op,
    seed: int = 0,
    cases: int = 100,
    seconds: float = math.inf,
    host: bool = True,
    without: Sequence[str] = (),
    check_only: bool = False,
    root: pathlib.Path | None = None,
) -> Iterator[tuple[Op, pd.DataFrame | Wrong]]:
    """Check and time the problems of a seed, operator by operator.

    Parameters
    ----------
    seed, cases : int
        Which problems, see `problems`.
    seconds : float
        Of all together. The first problems of all operators come before the second ones.
    host : bool
        Take the host's clock, too; it is not to be trusted where other programs share the host.
    without : sequence of str
        Variants whose name contains one of these are left out.
    check_only : bool
        Take no times and write nothing. Without a GPU the problems are those of the seed at small sizes.
    root : pathlib.Path, optional
        The folder of records in which ``<gpu>/explored/<op>.csv`` grows; nothing is written where it is not given.

    Yields
    ------
    tuple
        The operator, and a row a problem and variant, with `COLUMNS` and the dims; ``attrs`` as those of `read`. Where
        a result of Fusebook is incorrect, `Wrong` is in the place of the frame.

    Raises
    ------
    RuntimeError
        Where there is no GPU, and times were asked for.
    ValueError
        Where an operator has no variant of ours, or `without` leaves it out, or the seed is one to tune by and the
        folder is the package's.
    """
    until = time.monotonic() + seconds
    for op in ops:
        if ours(op) not in _chosen(op, without):
            raise ValueError(
                f"explore: expected our own {ours(op)} among what is tried, got without {','.join(without)}"
            )
    if not check_only and not _gpu():
        raise RuntimeError(
            "fusebook.measure.explore: expected a CUDA device, got none; problems are timed on a GPU, and --check-only "
            "checks them at small sizes in Triton's interpreter"
        )
    if root == machines.RECORDS and seed < RECORDED_FROM and not check_only:
        raise ValueError(f"explore: expected a seed from {RECORDED_FROM} up to record, got {seed}; see --out")
    runs = [_Run(op, seed, cases, host, without, None if check_only else root) for op in ops]
    # The first problems of all operators come before the second ones, in case the time runs out.
    asked = [(run, case) for case in range(cases) for run in runs if case in run.todo]
    for run, case in tqdm(asked, "explore", disable=None, leave=False):
        if time.monotonic() >= until:
            break
        if run.wrong is None:
            try:
                run.take(case, _explored(run.op, run.asked[case], run.variants, host, check_only))
            except Wrong as wrong:
                run.wrong = wrong
            _tidy()
    for run in runs:
        yield run.op, run.wrong or run.frame()


def _gpu() -> bool:
    return torch.cuda.is_available()


class _Run:
    """The problems of one operator, and what is known of them, in a file if a folder is given.

    A file of another seed, of other problems, variants or versions is begun again. Any other is continued: its rows of
    today's code are kept.
    """

    def __init__(
        self, op: Op, seed: int, cases: int, host: bool, without: Sequence[str], root: pathlib.Path | None
    ) -> None:
        self.op = op
        self.variants = _chosen(op, without)
        self.asked = problems(op, seed, cases)
        if not _gpu():
            self.asked = [_small(dims) for dims in self.asked]
        versions = machines.versions("torch", "triton", "liger_kernel", "quack", "onnxruntime")
        versions |= machines.beside_torch()
        self.about = {
            "law": f"seeds 0 to {RECORDED_FROM - 1} are for tuning and recorded nowhere",
            "seed": str(seed),
            "without": ",".join(without),
            "clocks": "device and host" if host else "device",
            "problems": _problems_hash(op),
            "timing": str(timing.VERSION),
            "versions": "; ".join(f"{k} {v}" for k, v in versions.items() if v),
            "commit": machines._commit(),
            "date": datetime.date.today().isoformat(),
            "again": "0",  # how many problems were measured again, as they were of older code
        }
        self.file = path(machines.slug_of(torch.cuda.get_device_name()), op.name, root) if root else None
        self.rows: list[dict[str, Any]] = []
        self.wrong: Wrong | None = None
        if self.file and self.file.exists():
            with contextlib.suppress(record.RecordError):
                known, about = _load(self.file)
                same = ("seed", "without", "clocks", "problems", "timing", "versions")
                if all(about.get(part) == self.about[part] for part in same):
                    old = known["case"][_stale(op, known, about) != ""].unique()
                    kept = known[~known["case"].isin(old)]
                    self.rows = [{str(k): v for k, v in row.items()} for row in kept.to_dict("records")]
                    self.about["again"] = str(int(about.get("again", 0)) + len(old))
        self.todo = set(range(cases)) - {int(row["case"]) for row in self.rows}

    def take(self, case: int, found: list[dict[str, Any]]) -> None:
        """Append what was found at a problem."""
        self.rows += [{"case": case, **row} for row in found]
        if self.file:
            facts = {**self.about, "stamp": _stamp(self.about)}
            record._save(self.file, f"explored/{self.op.name}", _frame(self.op, self.rows), **facts)

    def frame(self) -> pd.DataFrame:
        """A row for each problem and variant."""
        frame = _frame(self.op, self.rows)
        origin = bench.Origin(None, measured=True, page=f"{self.op.name}-explored", date=self.about["date"])
        frame.attrs.update(self.about, origin=origin, stale=[])
        return frame


def _problems_hash(op: Op) -> str:
    """The hash of how an operator's problems are drawn and made."""
    return sources.hashes(op.draw, op.make)[0]


def _tidy() -> None:
    """Wait for the GPU, and give its memory back before it is in pieces."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# Files ----------------------------------------------------------------------------------------------------------------


def path(slug: str, op: str, root: pathlib.Path | None = None) -> pathlib.Path:
    """The file of the explored problems of an operator on a GPU."""
    return record.path(f"explored/{op}", slug, root)


def _stamp(about: Mapping[str, str]) -> str:
    """Twelve digits of the sha256 of the facts in the first line of a file, its seed among them."""
    return hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:12]


def _load(file: pathlib.Path) -> tuple[pd.DataFrame, dict[str, str]]:
    frame, about = record._load(file, f"explored/{file.stem}")
    form = about.pop("format")
    if about.pop("stamp", "") != _stamp(about):
        raise record.RecordError(f"{file}: its first line is not what was recorded; explore again, do not edit it")
    about["format"] = form
    if form != str(record._FORMAT):
        frame = frame.drop(columns="launches", errors="ignore")
    frame = frame.reindex(columns=[*(c for c in frame if c not in _BACK), *_BACK])
    frame[_TEXT] = frame[_TEXT].astype(object).fillna("")
    return frame, about


def read(op: Op, slug: str = "nvidia-h200", root: pathlib.Path | None = None) -> pd.DataFrame:
    """The explored problems of an operator.

    Parameters
    ----------
    slug : str
        The GPU's folder.
    root : pathlib.Path, optional
        The package's records by default.

    Returns
    -------
    pandas.DataFrame
        As of `explore`; ``attrs`` holds ``origin``, a `fusebook.measure.bench.Origin`, ``stale``, the cases that are of
        older code, ``again``, how many were measured again, and ``seed``, ``without``, ``clocks``, ``versions``
        and ``commit``.

    Raises
    ------
    fusebook.measure.record.RecordError
        Where the file is missing, or is not what was explored.
    """
    file = path(slug, op.name, root)
    if not file.exists():
        command = f"python -m fusebook.measure.explore {op.name} --seed {RECORDED_FROM}"
        raise record.RecordError(f"{file}: no such record; {command} makes it")
    frame, about = _load(file)
    beside = file.parent.parent / "machine.json"
    machine = machines.load(beside, recorded=True) if beside.exists() else None
    stale = _stale(op, frame, about)
    facts = {k: about.get(k, "") for k in ("date", "versions", "commit")}
    reasons = record._summed(frame.assign(stale=stale))
    origin = bench.Origin(machine, measured=False, stale=reasons, path=file, page=f"{op.name}-explored", **facts)
    frame.attrs.update(about, origin=origin, stale=sorted(set(frame["case"][stale != ""])))
    return frame


def _stale(op: Op, frame: pd.DataFrame, about: Mapping[str, str]) -> pd.Series[str]:
    """Why each row is not of today's code, empty if it is; `about` is the first line of the file."""
    if about["format"] == str(record._FORMAT) and about.get("problems") != _problems_hash(op):
        return pd.Series("has other problems than when it was measured", frame.index, dtype=object)
    return pd.Series(record._reasons(frame, op, about), frame.index, dtype=object)


# What was found -------------------------------------------------------------------------------------------------------


def _torchs(op: Op) -> set[str]:
    """The variants that need nothing but torch, torch.compile included."""
    return {name for name, v in op.variants.items() if set(v.needs) <= {"cuda"} and not name.startswith("fusebook")}


def standing(op: Op, frame: pd.DataFrame, kind: str = "cold") -> pd.DataFrame:
    """Ours against the best of the others, problem by problem.

    Parameters
    ----------
    frame : pandas.DataFrame
        Of `explore` or `read`.
    kind : str
        ``cold``, the device's time; or ``paid``, what a program of many calls pays for each: the larger of the device's
        and the host's. Where the host's clock was not taken, nothing is known of that.

    Returns
    -------
    pandas.DataFrame
        A row for each problem that ours computes, and its arithmetic: ``case``, ``math``, the dims, ``bytes`` moved,
        ``ours_us``, the best of what torch has and of all (``torch``, ``torch_us``, ``best``, ``best_us``), ours ``over
        torch`` and ``over all``, and ``line``, which does it again. Microseconds.
    """
    if kind not in ("cold", "paid"):
        raise ValueError(f"explore.standing: expected cold or paid, got {kind!r}")
    columns = list(_TIMES[: 1 if kind == "cold" else 3])
    right = frame[(frame["status"] == "ok") & (kind == "cold" or frame.attrs.get("clocks") != "device")]
    right = right.assign(time=right[columns].astype(float).max(axis=1), math=right["math"].fillna(""))
    right = right[right["time"].notna()]
    dims = [c for c in frame.columns if c not in (*_FRONT, *_BACK)]
    keys = ["case", "math"]
    by_us = right.sort_values([*keys, "time"], kind="stable")
    others = by_us[~by_us["variant"].str.startswith("fusebook")]
    least = [
        rows.drop_duplicates(keys).set_index(keys)[["variant", "time"]].set_axis([name, f"{name}_us"], axis=1)
        for name, rows in (("torch", others[others["variant"].isin(_torchs(op))]), ("best", others))
    ]
    mine = {way: ours(op, way) for way in right["math"].unique()}
    found = by_us[by_us["variant"] == by_us["math"].map(mine)].join(least[0], on=keys).join(least[1], on=keys)
    found = found[found["best_us"].notna()].fillna({"torch": ""}).rename(columns={"time": "ours_us"})
    found["bytes"] = found["read_bytes"] + found["write_bytes"]
    for company, name in (("over torch", "torch"), ("over all", "best")):
        found[company] = found["ours_us"] / found[f"{name}_us"]
    found["line"] = [_line(op, given) for given in _named(found, [*dims, "dtype", "layout"])]
    names = ["case", "math", "dtype", "layout", *dims, "bytes", "ours_us", "torch", "torch_us", "best", "best_us"]
    return found[[*names, "over torch", "over all", "line"]].reset_index(drop=True)


def quantiles(op: Op, frame: pd.DataFrame) -> pd.DataFrame:
    """How long ours takes, in times of the best of the others: the median, what 90 % stay under, and the worst.

    A row for each clock and company.
    """
    rows = {}
    for kind in ("cold", "paid"):
        found = standing(op, frame, kind)
        for company in ("over torch", "over all"):
            ratio = found[company].dropna()
            rows[kind, company] = {
                "problems": len(ratio),
                "median": ratio.median(),
                "90 %": ratio.quantile(0.9),
                "worst": ratio.max(),
                "at most 1.02": (ratio <= 1.02).mean() if len(ratio) else math.nan,
            }
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index = pd.MultiIndex.from_tuples(rows, names=["clock", "ours"])
    return table


def worst(op: Op, frame: pd.DataFrame) -> pd.DataFrame:
    """The ten problems at which ours is furthest behind the best of all, cold: rows of `standing`, the worst first."""
    return standing(op, frame).sort_values("over all", ascending=False).head(10).reset_index(drop=True)


def refusals(frame: pd.DataFrame) -> pd.DataFrame:
    """What was not timed, by variant and reason.

    A row for each variant and status: how many problems, and the first note.
    """
    left = frame[frame["status"] != "ok"]
    return left.groupby(["variant", "status"], sort=True).agg(problems=("case", "nunique"), note=("note", "first"))


# The command line -----------------------------------------------------------------------------------------------------


def _told(op: Op, frame: pd.DataFrame) -> str:
    """What is said of an operator when it is done."""
    cases = frame["case"].nunique()
    parts = [f"{op.name}: {cases} problems"]
    with pd.option_context("display.width", 200, "display.max_colwidth", 90, "display.float_format", "{:.3g}".format):
        if frame[["gpu_us", "latency_us"]].notna().to_numpy().any():
            parts.append(f"ours, in times of the best of torch and torch.compile, and of all\n{quantiles(op, frame)}")
            lines = [f"{row['over all']:.2f} of {row['best']}: {row['line']}" for _, row in worst(op, frame).iterrows()]
            parts.append("\n".join(["the worst, cold", *lines]))
        if len(left := refusals(frame)):
            parts.append(f"not timed\n{left}")
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    known = [name for name, op in OPS.items() if explorable(op)]
    parser = argparse.ArgumentParser(
        prog="python -m fusebook.measure.explore", description="Check and time problems that nobody chose."
    )
    parser.add_argument("ops", nargs="+", metavar="op", choices=[*known, "all"], help=f"all, or {', '.join(known)}")
    parser.add_argument("--cases", type=int, default=100, help="problems of each op (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help=f"below {RECORDED_FROM} to tune by (default: 0)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of all ops together, compiling included")
    parser.add_argument("--device-clock", action="store_true", help="leave the host's clock out: others share the host")
    parser.add_argument("--without", default="", metavar="WORDS", help="comma list: no variants that hold one of these")
    parser.add_argument("--check-only", action="store_true", help="no times; without a GPU at small sizes")
    parser.add_argument("--out", type=pathlib.Path, help="folder of records (default: the package's, or explored here)")
    args = parser.parse_args(argv)
    if args.cases < 1 or not args.seconds > 0 or args.seed < 0:
        parser.error("expected --cases and --seconds above 0, and --seed from 0 up")
    names = list(dict.fromkeys(known if "all" in args.ops else args.ops))
    here = pathlib.Path("explored", f"seed-{args.seed}")
    out = args.out or (machines.RECORDS if args.seed >= RECORDED_FROM else here)
    how = {k: getattr(args, k) for k in ("seed", "cases", "seconds", "check_only")}
    how["without"] = [word for word in args.without.split(",") if word]
    wrong = 0
    try:
        for op, found in explore(*(OPS[name] for name in names), host=not args.device_clock, root=out, **how):
            if isinstance(found, Wrong):
                wrong += 1
                print(found, file=sys.stderr, flush=True)
            else:
                print(_told(op, found), flush=True)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if wrong else 0


if __name__ == "__main__":
    from fusebook.measure import explore as itself  # whose functions other processes find by their names

    raise SystemExit(itself.main())
