"""Every kernel compiles for GPUs that are not there: on every edge and dtype, for three generations of hardware.

Not edited when a kernel is added: it reads the cards.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fusebook
from fusebook.kernels import OPS

ARCHITECTURES = (80, 90, 100)


@pytest.fixture(scope="module")
def running(request, tmp_path_factory):
    """One process for each architecture, side by side: a driver is for good, and compiling takes one core.

    Each compiles all ops that this run has selected, one after the other. Of several workers the first to come starts
    them, for all.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    processes = []
    try:
        shared.mkdir()
    except FileExistsError:  # another worker's
        yield shared
        return
    here = [item.callspec.params for item in request.session.items if item.path == Path(__file__)]
    for arch in dict.fromkeys(params["arch"] for params in here):
        folder = shared / f"sm_{arch}"
        folder.mkdir()
        environment = os.environ | {
            "TRITON_INTERPRET": "0",  # this process may interpret; that one compiles
            "TRITON_CACHE_DIR": str(folder / "cache"),  # a cached kernel would be no test
            "PYTHONPATH": os.pathsep.join([str(Path(fusebook.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        ops = dict.fromkeys(params["op"] for params in here if params["arch"] == arch)
        command = [sys.executable, str(Path(__file__).with_name("compile_only.py")), str(arch), *ops]
        # Its exit code in a file, for workers whose child it is not, and by a move, so that nobody reads half of it.
        script = ["sh", "-c", '"$@" > out 2> err; echo $? > ending; mv ending end', "sh"]
        processes.append(subprocess.Popen([*script, *command], env=environment, cwd=folder))
    yield shared
    for process in processes:  # others may still be waiting for what this worker has not asked for
        process.wait()


def ended(folder, limit=1700):
    """The exit code of a process that compiles, waited for."""
    until = time.monotonic() + limit
    while not (folder / "end").exists():
        assert time.monotonic() < until, f"{folder.name}: not compiled after {limit} s"
        time.sleep(0.2)
    return int((folder / "end").read_text())


@pytest.mark.timeout(1800)  # the first of them waits until everything is compiled
@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("op", OPS)
def test_every_launcher_compiles_on_every_edge(op, arch, running):
    folder = running / f"sm_{arch}"
    assert ended(folder) == 0, (folder / "err").read_text()[-4000:]
    # One record for each variant, edge and dtype.
    points = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    points = [p for p in points if p["op"] == op]
    variants = [name for name in OPS[op].variants if name.startswith("fusebook")]
    assert len(points) == len(variants) * len(OPS[op].edges) * len(OPS[op].dtypes)
    errors = [f"{p['variant']} {p['dims']} {p['dtype']}: {p['error'][:500]}" for p in points if "error" in p]
    assert not errors, "\n".join(errors)
    # An edge that launches nothing has nothing to compute or is refused with its reason; otherwise nothing was tested.
    empty = [p for p in points if not p["launched"] and "refused" not in p]
    assert all(0 in p["dims"].values() for p in empty), empty
