"""A lesson on several GPUs: it starts torchrun on its own file, whose processes are ranks and show nothing."""

from __future__ import annotations

import datetime as dt
import faulthandler
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from fusebook.cards import OPS
from fusebook.lesson import _numbers, _place, _show
from fusebook.lesson._page import Page, _or_banner, _Pictures
from fusebook.lesson._results import measured, options
from fusebook.lesson._show import Shown
from fusebook.lesson.evidence import Frames

__all__ = ["RanksPage", "counts", "enough", "join", "ranks", "timed", "work"]

#: Seconds after which a rank gives up waiting for the others: one that died does not come.
PATIENCE = 25
#: Seconds that all ranks together may take.
LONGEST = 90


def enough(worker: Callable[[], Any], gpus: int) -> bool:
    """Whether this process may start so many ranks, each with a GPU of its own, on the file that `worker` is of.

    Parameters
    ----------
    worker : callable
        Of a page; in a notebook it has no file.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return 0 < gpus <= there and dist.is_nccl_available() and _file(worker).exists()


def _file(worker: Callable[[], Any]) -> Path:
    return Path(worker.__code__.co_filename)


def counts(most: int) -> list[int]:
    """Powers of two up to a number of GPUs, and that number."""
    return sorted({2**i for i in range(most.bit_length())} | {most})


def ranks(worker: Callable[[], pd.DataFrame], count: int, *, seconds: float = LONGEST) -> pd.DataFrame:
    """Run a page's worker in so many processes, and return what that of rank 0 returns.

    Parameters
    ----------
    worker : callable
        A function of a page whose file calls `work` with it, or with another function of its name.
    count : int
        How many processes.
    seconds : float
        After which they are ended.

    Raises
    ------
    RuntimeError
        Where a rank fails, which ends the others, or none of them ends in time; with what it said last.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.csv"
        env = {
            **os.environ,
            "_FUSEBOOK_RANKS": f"{worker.__name__}={file}",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count)),
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        how = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen([*torchrun, str(_file(worker))], **how) as process:  # type: ignore[call-overload]
            try:
                said, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its processes
                said, _ = process.communicate()
                said += f"\nnone ended within {seconds:g} s"
        if process.returncode or not file.exists():
            raise RuntimeError(f"{worker.__name__} failed on {count} ranks:\n{said[-3000:]}")
        return pd.read_csv(file)


def work(*workers: Callable[[], pd.DataFrame]) -> None:
    """Where torchrun started this file: be a rank, and exit. Elsewhere: nothing.

    Parameters
    ----------
    *workers : callable
        What ranks do, each of them with all others; `ranks` names one. Started by hand they run in turn, and rank 0
        prints what they return.

    Raises
    ------
    SystemExit
        In a rank, at its end.
    """
    if not (_place.ranked() and _place.script()):
        return
    record(_work)(*workers)  # torchrun tells what it was that ended a rank
    raise SystemExit(0)


def _work(*workers: Callable[[], pd.DataFrame]) -> None:
    name, _, file = os.environ.get("_FUSEBOOK_RANKS", "").partition("=")
    faulthandler.register(signal.SIGTERM, chain=True)  # a rank that is ended while it waits says where
    join()
    for worker in workers:
        if name in ("", worker.__name__):
            frame = worker()
            if dist.get_rank() == 0:
                frame.to_csv(file, index=False) if file else print(frame.to_string(index=False), flush=True)
    dist.destroy_process_group()


def join() -> tuple[int, int]:
    """Join the other ranks: by NCCL, each with a GPU; by gloo where there is no GPU.

    Raises
    ------
    RuntimeError
        Where there is no GPU for this rank, or PyTorch is without NCCL.
    """
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    patience = dt.timedelta(seconds=PATIENCE)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=patience)
    elif here > torch.cuda.device_count():
        raise RuntimeError(
            f"expected a GPU for each of {here} ranks of this machine, got {torch.cuda.device_count()}; ask for fewer, "
            "or show more by CUDA_VISIBLE_DEVICES"
        )
    elif not dist.is_nccl_available():
        raise RuntimeError("expected a PyTorch with NCCL, got one without; install a build for CUDA on Linux")
    else:
        torch.cuda.set_device(local)  # before anything is made: what asks for a GPU gets this one
        dist.init_process_group("nccl", timeout=patience, device_id=torch.device("cuda", local))
    return dist.get_rank(), dist.get_world_size()


def timed(
    functions: Mapping[str, Callable[[], Any]],
    *,
    calls: int = 20,
    repeat: int = 12,
    before: Callable[[], Any] = lambda: None,
    graph: bool = True,
) -> dict[str, float]:
    """Microseconds of a call among many that all ranks make together, the slowest rank's; the same on all of them.

    Parameters
    ----------
    functions : mapping of str to callable
        The same on all ranks, in the same order; interleaved.
    calls : int
        Made one behind the other.
    repeat : int
        Medians are of so many times that.
    before : callable
        Called before each of these, outside the clock.
    graph : bool
        The device's time, of calls that are captured in a graph; else what an eager program pays, by the host's clock,
        and so where there is no GPU.

    Returns
    -------
    dict of str to float
    """
    names, gpu = list(functions), torch.cuda.is_available()
    graph = graph and gpu
    calls, repeat = (calls, repeat) if gpu else (1, 1)
    runs = {name: (_graph if graph else _loop)(function, calls) for name, function in functions.items()}
    token = torch.zeros(1, device="cuda" if gpu else "cpu")
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    for i in range(repeat):
        for name in names if i % 2 else reversed(names):
            before()
            dist.all_reduce(token)  # all begin together
            start = _now(graph)
            runs[name]()
            marks[name].append((start, _now(graph)))
    if gpu:
        torch.cuda.synchronize()
    mine = {name: [_between(*mark) / calls for mark in marks[name]] for name in names}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    rounds = {name: [max(times) for times in zip(*(one[name] for one in every), strict=True)] for name in names}
    return {name: sorted(times)[len(times) // 2] for name, times in rounds.items()}


def _graph(function: Callable[[], Any], calls: int) -> Callable[[], None]:
    """So many calls in a graph; what libraries set up, they set up before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread asks for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            function()
    return graph.replay


def _loop(function: Callable[[], Any], calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            function()

    return run


def _now(on_device: bool) -> Any:
    """A moment: of the device's, or of the host's when the device has ended what it had."""
    if not on_device:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return (end - start) * 1e6 if isinstance(start, float) else start.elapsed_time(end) * 1e3


# The page -------------------------------------------------------------------------------------------------------------


class RanksPage(Page):
    """The page of a lesson on several GPUs.

    Its evidence has no sweep. It defines ``on_ranks``, from the steps to all frames that ranks measure together, which
    the column ``frame`` tells apart by their names in ``FRAMES``. From the page's frames, ``verdict`` returns three
    sentences and bars; ``table``, the table of the steps and its caption; and ``use``, a table, its caption and
    sentences. A frame with a function is measured by the page's own process.
    """

    def __new__(cls, *_: Any, **__: Any) -> RanksPage:
        """A rank shows nothing."""
        return super().__new__(_Rank if _place.ranked() and _place.script() else cls)

    def __init__(self, about: ModuleType, gpus: int = 2) -> None:
        self.name = about.__name__.rpartition(".")[2]
        self.about = about
        self.op = OPS[about.OPERATORS[0]]
        self.gpus = options(gpus=gpus).gpus
        self.frames = Frames(about)
        self.picture = _Pictures()
        self._whole: dict[tuple[int, ...], int] = {}

    @_or_banner
    def verdict(self) -> Shown:
        """The box: three sentences and bars, from the evidence."""
        lines, bars = self.about.verdict(self.frames)
        return self._box(lines, bars, _numbers.origin(self.frames["steps"]))

    @_or_banner
    def steps(self, **steps: Callable[..., Any]) -> Shown:
        """Start ranks on 1, 2, 4 GPUs and so on that measure every step, or replay their record.

        Parameters
        ----------
        **steps : callable
            The steps in their order, as the evidence names them. The first one is a function of the page.
        """
        if tuple(steps) != self.about.STEPS:
            raise ValueError(f"page.steps: expected {', '.join(self.about.STEPS)}, got {', '.join(steps)}")
        first = next(iter(steps.values()))
        live = None if enough(first, self.gpus) else False

        @functools.cache
        def everything() -> pd.DataFrame:
            return pd.concat([ranks(first, n).assign(GPUs=n) for n in counts(self.gpus)], ignore_index=True)

        code_of = [*steps.values(), self.about.on_ranks]
        for name, spec in self.about.FRAMES.items():
            if spec.function:
                self.frames.known[name] = measured(spec.name, spec.function, live)
                continue

            def rows(name: str = name) -> pd.DataFrame:
                found = everything()
                found = found[found["frame"] == name].dropna(axis=1, how="all").drop(columns="frame")
                floats = found.select_dtypes("float")  # sizes became floats next to rows that have none
                whole = [column for column in floats if (floats[column] % 1 == 0).all()]
                return found.astype(dict.fromkeys(whole, int)).reset_index(drop=True)

            frame = measured(spec.name, rows, live, code_of=code_of)
            renamed = spec.renamed(frame)
            renamed.attrs.update(frame.attrs)
            self.frames.known[name] = renamed
        _place.remember("gains", self.frames)
        made, caption = self.about.table(self.frames, steps)
        return _show.table(made, f"{caption}; {_numbers.origin(self.frames['steps'])}", fold=False)

    @_or_banner
    def plot(self, kind: str, over: str) -> Any:
        """The figure of the evidence.

        Parameters
        ----------
        kind : str
            A function of `fusebook.plots`.
        over : str
            The size on the x axis.
        """
        ax = self.about.figure(self.frames, kind, over)
        ax.figure.set_size_inches(8.0, 2.8)
        if _place.script():
            return Shown("", f"Figure: {ax.get_title(loc='left')} ({_numbers.origin(self.frames['steps'])})")._now()
        return ax

    @_or_banner
    def use(self) -> Shown:
        """When to use the library: a table and sentences of the evidence, and how to install it."""
        made, caption, sentences = self.about.use(self.frames)
        return self._used(_show.table(made, caption, fold=False), sentences)

    def _record(self) -> None:
        """Nothing: the steps have measured every frame."""


class _Rank(RanksPage):
    """A process that torchrun started: it measures the steps with the others, and ends there."""

    def __init__(self, about: ModuleType, gpus: int = 2) -> None:
        super().__init__(about, gpus)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before anything is made
        self.picture = self

    def _nothing(self, *given: Any, **named: Any) -> Any:
        return Shown("", "")

    verdict = check = catches = source = words = meeting = _nothing

    def steps(self, **steps: Callable[..., Any]) -> Shown:
        """Measure, and end the process."""

        def worker() -> pd.DataFrame:
            return self.about.on_ranks(steps)

        worker.__name__ = next(iter(steps.values())).__name__
        work(worker)
        raise AssertionError("a rank ends in work()")
