"""What the GPU's own counters say of kernels: Nsight Compute runs the page's file once more, up to its steps."""

from __future__ import annotations

import csv
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fusebook.lesson import _place
from fusebook.lesson._results import NoResults, measured

__all__ = ["able", "begin", "counters", "wait"]

Steps = Callable[[], Mapping[str, Callable[[], Any]]]

#: What is shown of each counter of Nsight Compute.
COUNTERS = {
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio": "sectors",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
}
#: A kernel of PyTorch's that nobody else launches stands between two steps.
MARK = "spin_kernel"
LONGEST = 60.0  # seconds
STUCK = 30  # seconds, of the steps alone

#: What waits for its turn, by what it counts: the folder of its log, and Nsight Compute.
_begun: dict[str, tuple[Any, subprocess.Popen[str]]] = {}


def begin(name: str, script: str = "") -> None:
    """Start the page once more under Nsight Compute: it imports its packages, opens the lesson and waits there.

    Parameters
    ----------
    name, script : str
        As of `counters`; the page that runs unless given.
    """
    folder = tempfile.TemporaryDirectory()
    # The clocks are left alone, as everywhere; the caches are flushed before each kernel.
    how = ["--csv", "--page", "raw", "--profile-from-start", "off", "--clock-control", "none"]
    log = ["--log-file", str(Path(folder.name) / "ncu.csv")]
    page = [sys.executable, script or getattr(sys.modules["__main__"], "__file__", "")]
    env = {k: v for k, v in os.environ.items() if k != "_FUSEBOOK_RECORD"} | {"_FUSEBOOK_COUNT": name}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    asked = ["ncu", *how, "--print-units", "base", "--metrics", ",".join(COUNTERS), *log]
    _begun[name] = folder, subprocess.Popen([*asked, *page], env=env, text=True, **pipes)


def wait() -> None:
    """Wait until the page that started this one needs the counters; where it has ended, end."""
    if not sys.stdin.readline():
        raise SystemExit(1)


def able() -> bool:
    """Whether this run can count: there is Nsight Compute, and this run takes the clocks of the GPU."""
    other = "_FUSEBOOK_COUNT" in os.environ or os.environ.get("_FUSEBOOK_CLOCKS") == "host"
    return shutil.which("ncu") is not None and _place.script() and not other


def counters(name: str, steps: Steps, script: str = "", code_of: Sequence[Any] = ()) -> pd.DataFrame:
    """What each step reads and writes by the counters of the GPU, where Nsight Compute is installed.

    It is called where nothing but definitions stands before it: the page is run again as far as here.

    Parameters
    ----------
    name : str
        Of the record, as of ``measured``.
    steps : callable
        Returns, by name, what is called without arguments.
    script : str, optional
        The file that is run again; the one in which `steps` is defined unless given.
    code_of : sequence
        As of ``measured``.

    Returns
    -------
    pandas.DataFrame
        A row a kernel: ``step``, ``kernel``, ``read`` and ``written`` in bytes of memory, ``sectors`` of 32 bytes that
        a load asks for, and ``occupancy``, the percent of the warps that a multiprocessor has room for. Empty where
        there is neither Nsight Compute nor a record. Where Nsight Compute fails, as on a machine that keeps its
        counters from users, a warning says why and the record answers: the rest of a page needs no counters.
    """
    if os.environ.get("_FUSEBOOK_COUNT") == name:
        signal.alarm(STUCK)  # a kernel that waits for ever would outlive Nsight Compute
        _run(steps())
        gc.freeze()  # the page waits, and to free all objects one by one takes seconds
        raise SystemExit(0)
    for live in (None, False) if able() else (False,):
        try:
            return measured(name, lambda: _counted(name, steps, script), live=live, by_device=True, code_of=code_of)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            warnings.warn(str(error), stacklevel=2)
        except NoResults:
            break
    nothing = pd.DataFrame(columns=["step", "kernel", *COUNTERS.values()])
    nothing.attrs["compared"] = 0
    return nothing


def _run(steps: Mapping[str, Callable[[], Any]]) -> None:
    for step in steps.values():  # what compiles compiles before
        step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for step in steps.values():
        torch.cuda._sleep(1)
        step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def _counted(name: str, steps: Steps, script: str = "") -> pd.DataFrame:
    if name not in _begun:
        begin(name, script or steps.__code__.co_filename)
    folder, process = _begun.pop(name)
    with folder, process:
        try:
            said = "".join(process.communicate("\n", timeout=LONGEST))
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        log = Path(folder.name) / "ncu.csv"
        text = log.read_text() if log.exists() else ""
    if '"ID"' not in text:
        raise RuntimeError(f"Nsight Compute counted nothing in {name}:\n{(text + said)[-2000:]}")
    return _read(text, list(steps()))


def _read(text: str, names: list[str]) -> pd.DataFrame:
    """The rows of Nsight Compute's table, whose second line holds units; a mark begins the next step."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    _, *found = csv.DictReader(lines[first:])
    rows, at = [], -1
    for kernel in found:
        if MARK in kernel["Kernel Name"]:
            at += 1
            continue
        short = re.split(r"[<(]", kernel["Kernel Name"].removeprefix("void "))[0]
        values = {to: kernel[counter].replace(",", "") or "nan" for counter, to in COUNTERS.items()}
        rows.append({"step": names[at], "kernel": short, **{to: float(value) for to, value in values.items()}})
    return pd.DataFrame(rows)
