"""Random problems: ``python -m fusebook.measure.explore softmax --seed 100``.

The card of an operator draws problems that people have (`Op.draw`), without regard to how Fusebook computes them. Each
problem is checked, timed on the GPU with a cold L2 cache, and appended to ``records/<gpu>/explored/<op>.csv``. The same
command continues an interrupted run, and measures problems again whose code has changed.

Seeds 0 to 99 are for tuning. Seeds from 100 on are recorded, and nothing is tuned by them.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.measure import _removed, bench, check, inputs, record, sources, timing
from fusebook.measure import machine as machines
from fusebook.measure.op import Dims, Op, Variant

with extra("book"):
    import pandas as pd
    from tqdm import tqdm

__all__ = [
    "COLUMNS", "RECORDED_FROM", "TARGETS", "Incorrect", "explorable", "explore", "fusebooks", "path", "problem",
    "ratios", "read", "summary",
]  # fmt: skip

#: The first seed that is recorded; launch configs are tuned by the seeds before it.
RECORDED_FROM = 100

#: By median and 90 % point: the operators whose GPU time, over that of torch's best, should be at most these.
TARGETS = {
    (0.95, 1.05): (
        *("softmax", "softmax_backward", "rms_norm", "add_rms_norm", "layer_norm", "rms_norm_backward"),
        *("layer_norm_backward", "concat_gemm"),
    ),
    (0.5, 0.9): ("cross_entropy", "linear_cross_entropy"),
    (1.0, 1.1): ("swiglu",),
    (0.9, 1.05): (
        *("masked_scatter_nd_of_shape", "scatter_nd_of_shape", "embedding_backward"),
        *("kmeans_assign", "kmeans_update", "kmeans_step"),
    ),
}

_FRONT = ("case", "op", "variant", "dtype", "layout")
_BACK = ("status", "note", "error", "tolerance", "gpu_us", "math", "code", "read_bytes", "write_bytes", "flop")
#: The columns of explored problems; the dims are after ``layout``.
COLUMNS = (*_FRONT, *_BACK)
_TEXT = ["op", "variant", "dtype", "layout", "status", "note", "math", "code"]
# Not baselines: the data is in GPU memory, and tuning takes half a minute for each problem.
_LEFT_OUT = ("NumPy", "torch on the CPU", "max-autotune")


class Incorrect(Exception):
    """A result of Fusebook exceeds its tolerance, or fails; the message ends in the line of Python that shows it."""


# Problems -------------------------------------------------------------------------------------------------------------


def explorable(op: Op) -> bool:
    """Whether a card has an implementation of Fusebook to compare."""
    return "fusebook" in op.variants or "fusebook (chosen)" in op.variants


def fusebooks(op: Op, math: str = "") -> str:
    """The implementation that a call of Fusebook runs; ``math="tf32"`` for float32 multiplied in TF32."""
    more = ", TF32" if math == "tf32" else ""
    return next(name for name in (f"fusebook (chosen){more}", f"fusebook{more}") if name in op.variants)


def _torchs(op: Op) -> set[str]:
    """The implementations that need torch only, torch.compile among them."""
    return {name for name, v in op.variants.items() if set(v.needs) <= {"cuda"} and not name.startswith("fusebook")}


def _compared(op: Op) -> dict[str, Variant]:
    """Fusebook's implementation, and all others that this machine can run."""
    own = [fusebooks(op, math) for math in {v.math or "" for n, v in op.variants.items() if n.startswith("fusebook")}]
    return {
        name: v
        for name, v in op.variants.items()
        if (name in own or not name.startswith("fusebook")) and not (v.on_cpu or name in _LEFT_OUT or bench.missing(v))
    }


def _small(dims: Dims) -> Dims:
    """The same problem at a size for the interpreter: odd sizes remain odd, and small sizes remain."""
    return {k: v if isinstance(v, str) or v <= 16 else 16 + v % 32 for k, v in dims.items()}


def _line(op: Op, dims: Mapping[str, Any]) -> str:
    """The line of Python that repeats a problem."""
    given = "".join(f", {k}={v!r}" for k, v in dims.items())
    return f"from fusebook.measure import explore; explore.problem({op.name!r}{given})"


def problem(op: str | Op, /, check_only: bool = False, **dims: Any) -> pd.DataFrame:
    """Check one problem, and time all implementations; without a GPU, no times are taken.

    Parameters
    ----------
    check_only : bool
        Take no times.
    **dims
        Of the card, ``dtype`` and ``layout`` among them.

    Returns
    -------
    pandas.DataFrame
        A row for each implementation, with `COLUMNS` and the dims. Times in microseconds, sizes in bytes.

    Raises
    ------
    Incorrect
    """
    card = OPS[op] if isinstance(op, str) else op
    sizes = {k: v for k, v in dims.items() if k not in ("dtype", "layout")}
    head = {"case": 0, "op": card.name, "dtype": dims["dtype"], "layout": dims["layout"], **sizes}
    half = dims["dtype"] != "float32"
    variants = {n: v for n, v in _compared(card).items() if not (half and v.math == "tf32")}
    rows = {name: bench._blank(card, head, name, v, sizes) for name, v in variants.items()}
    try:
        _measure(card, dims, variants, rows, _gpu() and not check_only)
    except torch.cuda.OutOfMemoryError as error:
        for row in rows.values():
            row.update(status="out of memory", note=bench._sentence(error), gpu_us=math.nan)
    return pd.DataFrame(list(rows.values()), columns=[*_FRONT, *sizes, *_BACK])


def _measure(op: Op, dims: Dims, variants: Mapping[str, Variant], rows: dict[str, dict[str, Any]], timed: bool) -> None:
    """Write errors, tolerances and times into the rows of a problem."""
    made = op.made(dims, "cuda" if torch.cuda.is_available() else "cpu")
    yard = check.yardstick(op, made)
    if any(v.recompiles for v in variants.values()):
        torch.compiler.reset()  # each shape is compiled for itself, as in a program that has no other
    calls: dict[str, Callable[[], Any]] = {}
    for name, row in rows.items():
        with torch.no_grad(), bench._reasons(row):
            call = functools.partial(variants[name].run, *variants[name].given(*made))
            inputs.poison(yard.outputs(next(v for v in made if isinstance(v, torch.Tensor)).device))
            verdict = bench._within(yard, variants[name], call())
            row.update(error=verdict.error, tolerance=verdict.tolerance)
            calls[name] = call
        if name.startswith("fusebook") and row["status"] in ("wrong", "failed"):
            raise Incorrect(f"{op.name}: {name} is {row['status']}: {row['note']}\n{_line(op, dims)}")
    del yard
    if timed:
        with torch.no_grad():
            times = timing.cold(calls, warmup=2, repeat=7)
        for name, q in times.items():
            rows[name]["gpu_us"] = q.q50 * 1e6 if q else math.nan


def _gpu() -> bool:
    return torch.cuda.is_available()


# Many problems --------------------------------------------------------------------------------------------------------


def explore(
    op: Op,
    *,
    seed: int = RECORDED_FROM,
    cases: int = 100,
    seconds: float = math.inf,
    check_only: bool = False,
    root: pathlib.Path | None = None,
) -> pd.DataFrame:
    """Check and time the problems of a seed.

    Parameters
    ----------
    seconds : float
        No problem is begun after these.
    check_only : bool
        Take no times and write nothing. Without a GPU, the problems are small.
    root : pathlib.Path, optional
        The folder of records in which ``<gpu>/explored/<op>.csv`` grows. Its problems of the same seed, software and
        code are kept.

    Returns
    -------
    pandas.DataFrame
        The rows of `problem` for each ``case``; ``attrs`` as those of `read`.

    Raises
    ------
    Incorrect
    RuntimeError
        If there is no GPU, and times were asked for.
    ValueError
        If the seed is one for tuning and the folder is the package's.
    """
    if not check_only and not _gpu():
        raise RuntimeError(
            "fusebook.measure.explore: expected a CUDA device, got none; problems are timed on a GPU, and --check-only "
            "checks them at small sizes in Triton's interpreter"
        )
    if root == machines.RECORDS and seed < RECORDED_FROM and not check_only:
        raise ValueError(f"explore: expected a seed from {RECORDED_FROM} up to record, got {seed}; see --out")
    versions = machines.versions("torch", "triton", "liger_kernel", "quack", "onnxruntime") | machines.beside_torch()
    about = {
        "seed": str(seed),
        "problems": _problems_hash(op),
        "timing": str(timing.VERSION),
        "versions": "; ".join(f"{k} {v}" for k, v in versions.items() if v),
        "commit": machines._commit(),
        "date": datetime.date.today().isoformat(),
    }
    file = path(machines.slug_of(torch.cuda.get_device_name()), op.name, root) if root and not check_only else None
    parts = [_kept(op, file, about)] if file and file.exists() else []
    until = time.monotonic() + seconds
    for case in tqdm(range(cases), op.name, disable=None, leave=False):
        if time.monotonic() >= until:
            break
        if not any(case in set(part["case"]) for part in parts):
            dims = op.problem(seed, case)
            parts.append(problem(op, check_only, **(dims if _gpu() else _small(dims))).assign(case=case))
            if file:
                record._save(file, f"explored/{op.name}", pd.concat(parts), **about)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(COLUMNS))
    origin = bench.Origin(None, measured=True, page=f"{op.name}-explored", date=about["date"])
    frame.attrs.update(about, origin=origin, stale=[])
    return frame


def _kept(op: Op, file: pathlib.Path, about: Mapping[str, str]) -> pd.DataFrame:
    """The rows of a file that a run continues: of the same seed, problems and software, and of today's code."""
    known, facts = _load(file)
    same = all(facts.get(name) == about[name] for name in ("seed", "problems", "timing", "versions"))
    return known[~known["case"].isin(known["case"][_stale(op, known, facts) != ""])] if same else known.head(0)


def _problems_hash(op: Op) -> str:
    """The hash of how an operator's problems are drawn and made."""
    return sources.hashes(op.draw, op.make)[0]


# Files ----------------------------------------------------------------------------------------------------------------


def path(slug: str, op: str, root: pathlib.Path | None = None) -> pathlib.Path:
    """The file of the explored problems of an operator on a GPU."""
    return record.path(f"explored/{op}", slug, root)


def _load(file: pathlib.Path) -> tuple[pd.DataFrame, dict[str, str]]:
    frame, about = record._load(file, f"explored/{file.stem}")
    older = ("launch_us", "latency_us", "first_call_s", "peak_bytes", "sm_mhz", "power_w", "host", "launches")
    frame = frame.reindex(columns=[*(c for c in frame if c not in (*_BACK, *older)), *_BACK])
    frame[_TEXT] = frame[_TEXT].astype(object).fillna("")
    return frame, about


def read(op: Op, slug: str = machines.SHIPPED, root: pathlib.Path | None = None) -> pd.DataFrame:
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
        older code, and ``seed``, ``versions`` and ``commit``.

    Raises
    ------
    fusebook.measure.record.RecordError
        If the file is missing, or is not what was explored.
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


# Results --------------------------------------------------------------------------------------------------------------


def ratios(op: Op, frame: pd.DataFrame) -> pd.DataFrame:
    """The GPU time of Fusebook over that of the best others, problem by problem.

    Parameters
    ----------
    frame : pandas.DataFrame
        Of `explore` or `read`.

    Returns
    -------
    pandas.DataFrame
        A row for each problem, and its arithmetic: ``case``, ``math``, the dims, ``bytes`` moved, ``fusebook_us``, the
        best of torch and of all (``torch``, ``torch_us``, ``best``, ``best_us``), the ratios ``over torch`` and ``over
        all``, and ``line``, which repeats the problem.
    """
    dims = [c for c in frame.columns if c not in COLUMNS]
    keys = ["case", "math"]
    timed = frame[frame["status"].eq("ok") & frame["gpu_us"].notna()]
    timed = timed.assign(math=timed["math"].fillna("")).sort_values([*keys, "gpu_us"], kind="stable")
    others = timed[~timed["variant"].str.startswith("fusebook")]
    own = {kind: fusebooks(op, kind) for kind in timed["math"].unique()}
    found = timed[timed["variant"] == timed["math"].map(own)].rename(columns={"gpu_us": "fusebook_us"})
    for name, rows in (("torch", others[others["variant"].isin(_torchs(op))]), ("best", others)):
        best = rows.drop_duplicates(keys).set_index(keys)[["variant", "gpu_us"]]
        found = found.join(best.set_axis([name, f"{name}_us"], axis=1), on=keys)
    found = found[found["best_us"].notna()].fillna({"torch": ""})
    found["bytes"] = found["read_bytes"] + found["write_bytes"]
    found["over torch"] = found["fusebook_us"] / found["torch_us"]
    found["over all"] = found["fusebook_us"] / found["best_us"]
    given = found[[*dims, "dtype", "layout"]].to_dict("records")
    found["line"] = [_line(op, {str(k): v if isinstance(v, str) else int(v) for k, v in row.items()}) for row in given]
    names = [*keys, "dtype", "layout", *dims, "bytes", "fusebook_us", "torch", "torch_us", "best", "best_us"]
    return found[[*names, "over torch", "over all", "line"]].reset_index(drop=True)


def summary(op: Op, frame: pd.DataFrame) -> pd.DataFrame:
    """The ratios of an operator in two rows, ``over torch`` and ``over all``.

    The columns are the number of ``problems``, the ``median``, the ``90 %`` point, the ``worst``, and ``target``: met
    or missed, by `TARGETS`, for an operator that has one.
    """
    found = ratios(op, frame)[["over torch", "over all"]]
    table = pd.DataFrame(
        {"problems": found.count(), "median": found.median(), "90 %": found.quantile(0.9), "worst": found.max()}
    )
    median, most = next((limits for limits, names in TARGETS.items() if op.name in names), (math.nan, math.nan))
    met = (table["median"] <= median) & (table["90 %"] <= most)
    verdict = met.map({True: "met", False: "missed"}).where((table["problems"] > 0) & (median == median), "")
    return table.assign(target=[verdict["over torch"], ""])


# The command line -----------------------------------------------------------------------------------------------------


def _text(op: Op, frame: pd.DataFrame) -> str:
    """The results of an operator as text."""
    parts = [f"{op.name}: {frame['case'].nunique()} problems"]
    with pd.option_context("display.width", 200, "display.max_colwidth", 90, "display.float_format", "{:.3g}".format):
        if frame["gpu_us"].notna().any():
            parts.append(f"GPU time of Fusebook over that of the best of torch, and of all\n{summary(op, frame)}")
            worst = ratios(op, frame).sort_values("over all", ascending=False).head(10)
            lines = [f"{row['over all']:.2f} of {row['best']}: {row['line']}" for _, row in worst.iterrows()]
            parts.append("\n".join(["the ten worst", *lines]))
        left = frame[frame["status"] != "ok"]
        if len(left):
            parts.append(f"not timed\n{left.groupby(['variant', 'status', 'note'])['case'].nunique()}")
    return "\n\n".join(parts)


#: Options of earlier versions, and what to do instead.
_GONE = {
    "--device-clock": "leave it out, only GPU time is taken",
    "--without": "leave it out, max-autotune is not compared",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    known = [name for name, op in OPS.items() if explorable(op)]
    parser = argparse.ArgumentParser(prog="python -m fusebook.measure.explore", description="Random problems.")
    parser.add_argument("ops", nargs="+", metavar="op", choices=[*known, "all"], help=f"all, or {', '.join(known)}")
    parser.add_argument("--cases", type=int, default=100, help="problems of each op (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help=f"below {RECORDED_FROM} to tune by (default: 0)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for each op, compiling included")
    parser.add_argument("--check-only", action="store_true", help="no times; without a GPU at small sizes")
    parser.add_argument("--out", type=pathlib.Path, help="folder of records (default: the package's, or explored here)")
    _removed(parser, _GONE)
    args = parser.parse_args(argv)
    if args.cases < 1 or not args.seconds > 0 or args.seed < 0:
        parser.error("expected --cases and --seconds above 0, and --seed from 0 up")
    here = pathlib.Path("explored", f"seed-{args.seed}")
    out = args.out or (machines.RECORDS if args.seed >= RECORDED_FROM else here)
    how = {k: getattr(args, k) for k in ("seed", "cases", "seconds", "check_only")}
    code = 0
    for name in dict.fromkeys(known if "all" in args.ops else args.ops):
        try:
            print(_text(OPS[name], explore(OPS[name], root=out, **how)), flush=True)
        except (Incorrect, RuntimeError, ValueError) as error:
            print(error, file=sys.stderr, flush=True)
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
