"""Kernels compiled beside the tests, for GPUs that are not there. What was compiled is kept from run to run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment():
    """What a process that compiles needs: the library, Triton as a compiler, and where it keeps what it compiled.

    Triton finds a kernel there by its source, its constants, the options and the compiler's version, so what has
    changed is compiled again. It stays in the repository's ``build``, or in ``FUSEBOOK_CACHE`` where that is set.
    """
    kept = Path(os.environ.get("FUSEBOOK_CACHE") or ROOT / "build") / "compiled"
    return os.environ | {
        "TRITON_INTERPRET": "0",  # the tests' process may interpret
        "TRITON_CACHE_DIR": str(kept),
        "TRITON_STORE_BINARY_ONLY": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }


def start(folder, tasks):
    """Start a process that does `tasks`, such as ``sm_90/softmax/float32``, and writes what it finds into `folder`."""
    for task in tasks:
        (folder / task).parent.mkdir(parents=True, exist_ok=True)
    # That it has ended as a file, for workers whose child it is not. Beside workers it takes what they leave of the
    # cores: a worker waits for other processes too, and computes meanwhile nothing.
    script = ["sh", "-c", '"$@" 2> err; touch end', "sh"]
    script = ["nice", "-n", "9", *script] if "PYTEST_XDIST_WORKER" in os.environ else script
    command = [sys.executable, str(Path(__file__).with_name("compile_only.py")), str(folder), *tasks]
    return subprocess.Popen([*script, *command], env=environment(), cwd=folder)


def answer(folder, task, limit=1700):
    """What a task found, waited for: one record for each variant and edge."""
    until = time.monotonic() + limit
    while not (folder / task).exists() and not (folder / "end").exists():
        assert time.monotonic() < until, f"{task}: not compiled after {limit} s"
        time.sleep(0.1)
    lines = (folder / task).read_text().splitlines() if (folder / task).exists() else []
    assert lines, f"{task}: not compiled\n{(folder / 'err').read_text()[-4000:]}"
    return [json.loads(line) for line in lines]
