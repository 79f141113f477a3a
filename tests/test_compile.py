"""Every kernel compiles for GPUs that are not there: on every edge and dtype, for three generations of hardware."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fusebook
from fusebook.kernels import OPS

ARCHITECTURES = (80, 90, 100)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """One process for each architecture, side by side: a driver is for good, and compiling takes one core."""
    processes = {}
    for arch in ARCHITECTURES:
        folder = tmp_path_factory.mktemp(f"sm_{arch}")
        environment = os.environ | {
            "TRITON_INTERPRET": "0",  # this process may interpret; that one compiles
            "TRITON_CACHE_DIR": str(folder / "cache"),  # a cached kernel would be no test
            "PYTHONPATH": os.pathsep.join([str(Path(fusebook.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, str(Path(__file__).with_name("compile_only.py")), str(arch)]
        # Files, not pipes: a full pipe would stop a process that nobody reads yet.
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            processes[arch] = subprocess.Popen(command, env=environment, stdout=out, stderr=err), folder
    yield processes
    for process, _ in processes.values():
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
def points(request, running):
    """What compile_only.py printed: one record for each op, variant, edge and dtype."""
    process, folder = running[request.param]
    assert process.wait(timeout=600) == 0, (folder / "err").read_text()[-4000:]
    return [json.loads(line) for line in (folder / "out").read_text().splitlines()]


def test_every_launcher_compiles_on_every_edge(points):
    errors = [f"{p['op']} {p['variant']} {p['dims']} {p['dtype']}: {p['error'][:500]}" for p in points if "error" in p]
    assert not errors, "\n".join(errors)
    assert {p["op"] for p in points} == set(OPS)


def test_no_edge_is_passed_over(points):
    # An edge that launches nothing has nothing to compute or is refused with its reason; otherwise nothing was tested.
    empty = [p for p in points if not p["launched"] and "error" not in p and "refused" not in p]
    assert all(0 in p["dims"].values() for p in empty), empty
