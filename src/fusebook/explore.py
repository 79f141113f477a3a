"""Problems that nobody chose: ``python -m fusebook.explore softmax --cases 100 --seed 100``.

An operator's card draws problems that people have (`Op.draw`), without a thought of how ours are computed. Each is
checked, and a wrong result of ours ends the run with the line of Python that shows it again. Then all that a user would
pick is timed, in turn: on the device after a flush of the cache, and on the host. As many processes as there are cores
compile and check a problem each, as many at once as the device has memory for; then they are timed one after another.
A problem for which there was not enough memory beside others comes once more at the end, alone.

``records/<gpu>/explored/<op>.csv`` is a record that grows with every problem; a run that was cut off goes on with it.
So does one of later code: only what launches something else than when it was measured, or is called by other code, is
measured again.

Seeds 0 to 99 are there to tune by. What is recorded has a seed from 100 up, which nothing was ever tuned on.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import datetime
import functools
import hashlib
import math
import multiprocessing
import os
import pathlib
import signal
import sys
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fusebook import bench, check, inputs, launches, record, timing, ways
from fusebook import machine as machines
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.op import Dims, Op, Variant

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
_TIMES = ("cold_us", "host_us", "call_us")
_BACK = ("status", "note", "score", "limit", *_TIMES, "math", "launches", "read_bytes", "write_bytes", "flop")
#: The columns of what was explored; the dims stand after ``layout``.
COLUMNS = (*_FRONT, *_BACK)
_TEXT = ["op", "variant", "dtype", "layout", "status", "note", "math", "launches"]

_ON_HOST = ("NumPy", "torch on the CPU")  # no choice where the data lies in the device's memory
_CALLS = 7  # that are timed
# The host's clock is started where queueing takes at least this part of the device's time: below, nobody waits for it.
_NOTICED = 0.25
# Seconds after which a process that is timing is not awaited, and in which the device does what was asked of it.
_AT_MOST, _DRAINED = 60, 0.05
# Bytes that a small problem takes, and those beside for each number that is read or written; the part of the device's
# memory that a process takes for itself.
_LEAST, _HELD, _CONTEXT = 2**30, 24, 0.006


class Wrong(Exception):
    """A result of ours is wrong; the message ends in the line of Python that shows it."""


# Problems -------------------------------------------------------------------------------------------------------------


def problems(op: Op, seed: int = 0, cases: int = 100) -> list[Dims]:
    """The problems of a seed, see `fusebook.op.Op.problem`."""
    return [op.problem(seed, case) for case in range(cases)]


def _small(dims: Dims) -> Dims:
    """The same problem at a size that the interpreter computes: odd sizes stay odd, and few stay few."""
    return {k: v if isinstance(v, str) or v <= 16 else 16 + v % 32 for k, v in dims.items()}


def _line(op: Op, dims: Dims) -> str:
    """The line of Python that does it again."""
    given = "".join(f", {k}={v!r}" for k, v in dims.items())
    return f"from fusebook import explore; explore.problem({op.name!r}{given})"


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
    """As `problem`, of several, by as many processes as there are cores and by the device's clock alone.

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
    jobs = [(OPS[name], dims, tuple(_chosen(OPS[name], ()))) for name, dims in asked]
    found: dict[int, list[dict[str, Any]]] = {}
    for i, rows in _each(jobs, False, math.inf):
        if isinstance(rows, Wrong):
            raise rows
        found[i] = rows
    return [_frame(op, [{"case": 0, **row} for row in found.get(i, ())]) for i, (op, _, _) in enumerate(jobs)]


def _frame(op: Op, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    dims = (k for k in problems(op, 0, 1)[0] if k not in ("dtype", "layout"))
    return pd.DataFrame(rows, columns=[*_FRONT, *dims, *_BACK])


def _explored(
    op: Op,
    dims: Dims,
    variants: Mapping[str, Variant],
    host: bool,
    check_only: bool = False,
    turn: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """The rows of a problem, `host` times among them; `turn` waits until nobody else is at work on the device."""
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
            "launches": "",
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
        if rows[name]["status"] == "refused" and launches.launching(name, variants[name]):
            rows[name]["launches"] = launches.REFUSED
        if name.startswith("fusebook") and rows[name]["status"] in ("wrong", "failed"):
            raise Wrong(f"{op.name}: {name} is {rows[name]['status']}: {rows[name]['note']}\n{_line(op, dims)}")
    del yard
    if calls and _gpu() and not check_only:
        turn()
        _time(calls, rows, host)
    return list(rows.values())


def _right_call(
    op: Op, variant: Variant, made: tuple[Any, ...], yard: check.Yardstick, row: dict[str, Any]
) -> Callable[[], Any]:
    """The call to time, once its result is right."""
    call = functools.partial(variant.run, *variant.given(*made))
    inputs.poison(yard.outputs(next(v for v in made if isinstance(v, torch.Tensor)).device))
    row.update(limit=yard.limit(variant.math))
    row.update(score=bench._within(yard, variant, call()).score)
    if torch.cuda.is_available() and launches.launching(row["variant"], variant):
        row["launches"] = bench.launched(variant, call.args).get("launches", "")
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
    for clock, times in (("cold_us", cold), ("host_us", queued), ("call_us", whole)):
        for name, q in times.items():
            if q is not None:
                rows[name][clock] = q.q50 * 1e6


# Many problems --------------------------------------------------------------------------------------------------------


_Job = tuple[Op, Dims, tuple[str, ...]]  # with the names of its variants


def _each(
    jobs: Sequence[_Job], host: bool, until: float, check_only: bool = False
) -> Iterator[tuple[int, list[dict[str, Any]] | Wrong]]:
    """What is found at each problem, by its number: by processes that know operators by their names, or by this one."""
    if _gpu() and not check_only and all(OPS.get(op.name) is op for op, _, _ in jobs):
        yield from _in_turn(jobs, os.cpu_count() or 1, host, until)
        return
    wrong = set()
    for i, (op, dims, variants) in enumerate(jobs):
        if op.name not in wrong and time.monotonic() < until:
            try:
                yield i, _explored(op, dims, {v: op.variants[v] for v in variants}, host, check_only)
            except Wrong as found:
                wrong.add(op.name)
                yield i, found
            _tidy()


def _work(pipe: Connection) -> None:
    """Take problems from a pipe: compile and check one, say so, wait for a turn, time it, and send what was found."""
    torch.set_num_threads(1)
    import torch._inductor.config as settings

    settings.compile_threads = 1  # there are as many of these processes as cores; torch would add as many to each
    while True:
        name, dims, variants, host, share = pipe.recv()
        found: list[dict[str, Any]] | Wrong | RuntimeError
        ready: list[None] = []

        def turn(ready: list[None] = ready) -> None:
            _tidy()
            ready.append(pipe.send(None))  # type: ignore[func-returns-value]
            pipe.recv()

        try:
            if _gpu():
                torch.cuda.set_per_process_memory_fraction(share)
            op = OPS[name]
            found = _explored(op, dims, {v: op.variants[v] for v in variants}, host, turn=turn)
        except Wrong as wrong:
            found = wrong
        except Exception as error:
            found = RuntimeError(f"{type(error).__name__}: {bench._sentence(error)}")
        if not ready:
            pipe.send(None)
            pipe.recv()
        pipe.send(found)
        _tidy()  # ends this process where the device has failed, for good


class _Worker:
    """A process that does one problem after another."""

    def __init__(self) -> None:
        # Forked from a process that has imported everything: as many as there are cores import slowly at once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fusebook._forked"])
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a look for a GPU that can still be forked
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other,), daemon=True)
        with _no_main():
            self.process.start()
        other.close()

    def asks(self, job: _Job, host: bool, share: float) -> None:
        """Give it a problem, and that share of the device's memory."""
        op, dims, variants = job
        self.pipe.send((op.name, dims, variants, host, share))

    def told(self) -> Any:
        """What it sends; RuntimeError where it does not, or has ended."""
        try:
            if self.pipe.poll(_AT_MOST):
                return self.pipe.recv()
        except (EOFError, OSError):
            return RuntimeError("a process has ended")
        self.process.kill()
        return RuntimeError("a process took too long")


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """A process that starts here does not run the program again that started it: a page has no guard against that."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _share(job: _Job) -> float:
    """Which part of the device's memory checking a problem may take: the reference holds it in float64 a few times."""
    if not _gpu():
        return 0.0
    op, dims, _ = job
    kind, _, sizes = _split(dims)
    cost = op.cost(kind.itemsize, **sizes)
    needed = _LEAST + _HELD * (cost.read + cost.write) / kind.itemsize
    return min(1.0, needed / torch.cuda.get_device_properties(0).total_memory)


def _short(found: Any) -> bool:
    """Whether there was not enough memory for a problem, or for a way to compute it."""
    if isinstance(found, RuntimeError):
        return "out of memory" in str(found)
    return isinstance(found, list) and any(row["status"] == "out of memory" for row in found)


def _in_turn(
    jobs: Sequence[_Job], workers: int, host: bool, until: float
) -> Iterator[tuple[int, list[dict[str, Any]] | Wrong]]:
    """What is found at each problem, by its number.

    Processes compile and check, a problem each at the same time, in the order of the problems and as memory allows. One
    that is ready is timed at once, while the others are stopped, so that nothing else is on the device.
    """
    shares = [_share(job) for job in jobs]
    waiting, alone = collections.deque(range(len(jobs))), collections.deque[int]()
    idle = [_Worker() for _ in range(min(workers, len(jobs)))]
    team: dict[int, _Worker] = {}  # by the number of its problem
    try:
        while (team or waiting or alone) and time.monotonic() < until:
            while idle and waiting and sum(shares[i] for i in team) + shares[waiting[0]] <= 1 - _CONTEXT * workers:
                team[i := waiting.popleft()] = idle.pop()
                team[i].asks(jobs[i], host, shares[i])
            if not team:  # what is left takes all that there is
                i = (waiting or alone).popleft()
                shares[i] = 1.0
                team[i] = idle.pop()
                team[i].asks(jobs[i], host, shares[i])
            pipes = {worker.pipe: i for i, worker in team.items()}
            for pipe in wait(list(pipes), max(0.0, min(until - time.monotonic(), 1.0))):
                i = pipes[pipe]  # type: ignore[index]
                worker = team.pop(i)
                if (found := worker.told()) is None:
                    with _stopped([*team.values(), *idle]):
                        worker.pipe.send(None)
                        found = worker.told()
                failed = isinstance(found, RuntimeError)
                if shares[i] < 1 and _short(found):
                    alone.append(i)
                elif failed:
                    print(f"{found}\n{_line(jobs[i][0], jobs[i][1])}", file=sys.stderr, flush=True)
                else:
                    yield i, found
                if failed:
                    worker.process.join(1)
                if failed and not worker.process.is_alive():
                    worker = _Worker()
                idle.append(worker)
    finally:
        for worker in [*team.values(), *idle]:
            worker.process.kill()


@contextlib.contextmanager
def _stopped(workers: Collection[_Worker]) -> Iterator[None]:
    """Inside, these processes do nothing, and the device has had time to do what they had asked for."""

    def tell(what: signal.Signals) -> None:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(worker.process.pid, what)  # type: ignore[arg-type]

    tell(signal.SIGSTOP)
    try:
        time.sleep(_DRAINED)
        yield
    finally:
        tell(signal.SIGCONT)


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
        a result of ours is wrong, what was found until then is in the file alone, and `Wrong` stands in its place.

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
            "fusebook.explore: expected a CUDA device, got none; problems are timed on a GPU, and --check-only checks "
            "them at small sizes in Triton's interpreter"
        )
    if root == machines.RECORDS and seed < RECORDED_FROM and not check_only:
        raise ValueError(f"explore: expected a seed from {RECORDED_FROM} up to record, got {seed}; see --out")
    with concurrent.futures.ThreadPoolExecutor() as pool:  # what is stale is found out by processes
        runs = list(pool.map(lambda op: _Run(op, seed, cases, host, without, None if check_only else root), ops))
    # The first problems of all come before the second ones, in case there is no time for the last.
    asked = [(run, case) for case in range(cases) for run in runs if case in run.todo]
    jobs = [(run.op, run.asked[case], tuple(run.variants)) for run, case in asked]
    each = _each(jobs, host, until, check_only)
    for i, found in tqdm(each, "explore", total=len(jobs), disable=None, leave=False):
        run, case = asked[i]
        run.take(case, found)
    for run in runs:
        yield run.op, run.wrong or run.frame()


def _gpu() -> bool:
    return torch.cuda.is_available()


class _Run:
    """The problems of one operator, and what is known of them, in a file where a folder is given.

    A file of another seed, of other variants, of another torch or Triton begins anew. Any other goes on: what is still
    fresh of it stays, and its first line names the commits and versions of all runs.
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
        self.about = {
            "law": f"seeds 0 to {RECORDED_FROM - 1} are for tuning and recorded nowhere",
            "seed": str(seed),
            "without": ",".join(without),
            "clocks": "device and host" if host else "device",
            "ways": ways.told(op, torch.cuda.get_device_capability() if _gpu() else None, self.variants),
            "commit": machines._commit(),
            "versions": "; ".join(f"{k} {v}" for k, v in versions.items() if v),
            "date": datetime.date.today().isoformat(),
            "again": "0",  # how many problems were stale and are measured again
        }
        self.file = path(machines.slug_of(torch.cuda.get_device_name()), op.name, root) if root else None
        self.rows: list[dict[str, Any]] = []
        self.due: set[int] = set()
        if self.file and self.file.exists():
            with contextlib.suppress(record.RecordError):
                known, about = _load(self.file)
                if all(_continued(part, about.get(part, ""), text) for part, text in self.about.items()):
                    stale = _stale(op, known, about, *_this_gpu())
                    self.due = set(known["case"][stale != ""])
                    self.rows = [{str(k): v for k, v in row.items()} for row in known.to_dict("records")]
                    for part in ("commit", "versions"):
                        parts = dict.fromkeys([*about[part].split("; "), *self.about[part].split("; ")])
                        self.about[part] = "; ".join(parts)
                    # The day that it began; what is stale stays until it is measured again.
                    self.about |= {part: about[part] for part in ("date", "again") if part in about}
        self.wrong: Wrong | None = None
        self.todo = sorted(set(range(cases)) - {int(row["case"]) for row in self.rows} | self.due & set(range(cases)))

    def take(self, case: int, found: list[dict[str, Any]] | Wrong) -> None:
        """Keep what was found at a problem; of an operator that was wrong nothing more."""
        if isinstance(found, Wrong):
            self.wrong = self.wrong or found
        elif not self.wrong:
            if case in self.due:
                self.due.remove(case)
                self.about["again"] = str(int(self.about["again"]) + 1)
            self.rows = [row for row in self.rows if row["case"] != case]
            self.rows += [{"case": case, **row} for row in found]
            if self.file:
                about = self._told()
                told = {**about, "stamp": _stamp(about)}
                record._save(self.file, f"explored/{self.op.name}", _frame(self.op, self.rows), **told)

    def _told(self) -> dict[str, str]:
        """What the file says of itself: also, which problems are still to be measured again."""
        return {**self.about, "due": " ".join(map(str, sorted(self.due)))}

    def frame(self) -> pd.DataFrame:
        """A row a problem and variant."""
        frame = _frame(self.op, self.rows)
        about = self._told()
        stale = record._summed(frame.assign(stale=_due(frame, about)))
        origin = bench.Origin(
            None, measured=True, stale=stale, page=f"{self.op.name}-explored", date=self.about["date"]
        )
        frame.attrs.update(about, origin=origin, stale=sorted(self.due))
        return frame


def _continued(part: str, then: str, now: str) -> bool:
    """Whether a file of which `part` was said so can go on as one of which it is said otherwise."""
    if part == "ways":  # of the same variants
        before, after = ([way.rpartition(" ")[0] for way in text.split("; ")] for text in (then, now))
        return before == after
    if part == "versions":
        ours = (version for version in now.split("; ") if version.startswith(("torch ", "triton ")))
        return all(version in then.split("; ") for version in ours)
    return part in ("commit", "date", "again") or then == now


def _this_gpu() -> tuple[tuple[int, int], int]:
    """Its capability and how many multiprocessors it has."""
    return torch.cuda.get_device_capability(), torch.cuda.get_device_properties(0).multi_processor_count


def _tidy() -> None:
    """Give memory back, to others and before it is in pieces; wait until the device has nothing to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# Files ----------------------------------------------------------------------------------------------------------------


def path(slug: str, op: str, root: pathlib.Path | None = None) -> pathlib.Path:
    """Where the explored problems of an op on a GPU lie."""
    return record.path(f"explored/{op}", slug, root)


def _stamp(about: Mapping[str, str]) -> str:
    """Twelve digits of the sha256 of what is said of a file, its seed among it: its rows have one of their own."""
    return hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:12]


def _load(file: pathlib.Path) -> tuple[pd.DataFrame, dict[str, str]]:
    frame, about = record._load(file, f"explored/{file.stem}")
    if about.pop("stamp", "") != _stamp(about):
        raise record.RecordError(f"{file}: its first line is not what was recorded; explore again, do not edit it")
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
        As of `explore`; ``attrs`` holds ``origin``, a `fusebook.bench.Origin`, ``stale``, the cases that are not what
        the code does today, ``again``, how many were measured again, and ``seed``, ``without``, ``clocks``,
        ``versions`` and ``commit``.

    Raises
    ------
    fusebook.record.RecordError
        Where the file is missing, or is not what was explored.
    """
    file = path(slug, op.name, root)
    if not file.exists():
        command = f"python -m fusebook.explore {op.name} --seed {RECORDED_FROM}"
        raise record.RecordError(f"{file}: no such record; {command} makes it")
    frame, about = _load(file)
    beside = file.parent.parent / "machine.json"
    machine = machines.load(beside, recorded=True) if beside.exists() else None
    gpu = (machine.capability, machine.sms) if machine else (None, 0)
    stale = _stale(op, frame, about, *gpu)
    told = {k: about.get(k, "") for k in ("date", "versions", "commit")}
    reasons = record._summed(frame.assign(stale=stale))
    origin = bench.Origin(machine, measured=False, stale=reasons, path=file, page=f"{op.name}-explored", **told)
    frame.attrs.update(about, origin=origin, stale=sorted(set(frame["case"][stale != ""])))
    return frame


def _due(frame: pd.DataFrame, about: Mapping[str, str]) -> pd.Series[str]:
    """Why rows of what a run was cut off before are not of its code; empty for the others."""
    due = frame["case"].isin([int(case) for case in about.get("due", "").split()])
    return due.map({True: "is of earlier code, and due", False: ""}).astype(object)


def _stale(
    op: Op, frame: pd.DataFrame, about: Mapping[str, str], capability: tuple[int, int] | None, sms: int
) -> pd.Series[str]:
    """Why each row is not what the code does today, empty where it is; `about` is what the file says of itself."""
    reasons, then = _due(frame, about), about.get("ways", "")
    due = reasons != ""
    other = ways.changed(op, capability, then) if then else set()
    if not then or ways.PROBLEMS in other:
        reasons[:] = "has other problems than when it was measured" if then else f"was {record._OLDER}"
        return reasons
    by_name = frame["variant"].map(lambda name: name if name in other else "")
    reasons[(by_name != "") & ~due] = record._CALLED
    ours = by_name.str.startswith("fusebook") & ~due
    reasons[ours] = "does something else than when it was measured"
    if capability is None or OPS.get(op.name) is not op:
        return reasons
    asked = frame[ours & (frame["launches"] != "")]
    if len(asked):
        dims = [c for c in frame.columns if c not in (*_FRONT, *_BACK)]
        points = list(zip(asked["variant"], asked["dtype"], _named(asked, [*dims, "layout"]), strict=True))
        with contextlib.suppress(launches.Unknown):
            now = [found for found, _ in record.today(op.name, points, capability, sms)]
            same = asked["launches"] == now
            reasons[asked.index] = same.map({True: "", False: record._OTHERWISE})
    return reasons


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
        if frame[["cold_us", "call_us"]].notna().to_numpy().any():
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
        prog="python -m fusebook.explore", description="Check and time problems that nobody chose."
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
    from fusebook import explore as itself  # whose functions other processes find by their names

    raise SystemExit(itself.main())
