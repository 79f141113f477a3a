"""Every kernel compiles for GPUs that are not there: on every edge, for three generations of hardware.

In every dtype for the one in the middle; for the others the edges take turns with the dtypes.

Not edited when a kernel is added: it reads the cards.
"""

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
def running(request, tmp_path_factory):
    """One process for each architecture, side by side: a driver is for good, and compiling takes one core.

    Each compiles all ops that this run has selected, one after the other.
    """
    here = [item.callspec.params for item in request.session.items if item.path == Path(__file__)]
    processes = {}
    for arch in dict.fromkeys(params["arch"] for params in here):
        folder = tmp_path_factory.mktemp(f"sm_{arch}")
        environment = os.environ | {
            "TRITON_INTERPRET": "0",  # this process may interpret; that one compiles
            "TRITON_CACHE_DIR": str(folder / "cache"),  # a cached kernel would be no test
            "PYTHONPATH": os.pathsep.join([str(Path(fusebook.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        ops = dict.fromkeys(params["op"] for params in here if params["arch"] == arch)
        command = [sys.executable, str(Path(__file__).with_name("compile_only.py")), str(arch), *ops]
        # Files, not pipes: a full pipe would stop a process that nobody reads yet.
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            processes[arch] = subprocess.Popen(command, env=environment, stdout=out, stderr=err), folder
    yield processes
    for process, _ in processes.values():
        process.kill()
        process.wait()


@pytest.mark.timeout(1800)  # the first of them waits until everything is compiled
@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("op", OPS)
def test_every_launcher_compiles_on_every_edge(op, arch, running):
    process, folder = running[arch]
    assert process.wait(timeout=1700) == 0, (folder / "err").read_text()[-4000:]
    # One record for each variant, edge and dtype that is asked for.
    points = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    points = [p for p in points if p["op"] == op]
    variants = [name for name in OPS[op].variants if name.startswith("fusebook")]
    dtypes = len(OPS[op].dtypes) if arch == 90 else 1
    assert len(points) == len(variants) * len(OPS[op].edges) * dtypes
    errors = [f"{p['variant']} {p['dims']} {p['dtype']}: {p['error'][:500]}" for p in points if "error" in p]
    assert not errors, "\n".join(errors)
    # An edge that launches nothing has nothing to compute or is refused with its reason; otherwise nothing was tested.
    empty = [p for p in points if not p["launched"] and "refused" not in p]
    assert all(0 in p["dims"].values() for p in empty), empty
