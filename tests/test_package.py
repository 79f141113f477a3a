"""The files that people install: the wheel imports what it requires and no more, the sdist builds and tests itself."""

import email
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the sdist of this tree."""
    place = tmp_path_factory.mktemp("dist")
    path = [os.environ.get("PYTHONPATH", "")]
    if not importlib.util.find_spec("hatchling"):  # an environment that was made without the group "tests"
        tools = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(place / "tools"), "hatchling>=1.27"]
        subprocess.run(tools, check=True)
        path.insert(0, str(place / "tools"))
    made = [sys.executable, "-m", "hatchling", "build", "-d", str(place)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    subprocess.run(made, check=True, cwd=ROOT, env=env, capture_output=True)
    return place


def required(metadata):
    """The names of the distributions that this metadata requires, without extras, and what those require in turn."""
    found, queue = set(), list(metadata.get_all("Requires-Dist") or ())
    while queue:
        requirement = Requirement(queue.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        queue += importlib.metadata.requires(name) or ()
    return found


#: Imports the wheel where the modules in sys.argv[2:] are not installed, and launches two kernels.
INSTALLED = """
import sys

class Absent:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.path.insert(0, sys.argv[1])
sys.meta_path.insert(0, Absent)
import fusebook, torch

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(3, 5, device=device)
torch.testing.assert_close(fusebook.softmax(x), torch.softmax(x, -1))
before, m, v = x.clone(), torch.zeros_like(x), torch.zeros_like(x)
fusebook.adamw_step([x], [torch.ones_like(x)], [m], [v], step=1)
assert not torch.equal(x, before)
print(fusebook.__file__)
"""


def test_the_wheel_imports_what_it_requires_and_no_more(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        there = required(email.message_from_bytes(archive.read(name)))
    owners = importlib.metadata.packages_distributions().items()
    absent = [module for module, names in owners if not {canonicalize_name(n) for n in names} & {*there, "fusebook"}]
    assert {"pandas", "matplotlib"} <= {*absent} and not {"torch", "triton"} & {*absent}
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED, str(tmp_path), *absent], capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert (tmp_path / "fusebook" / "py.typed").exists()


def test_the_sdist_has_every_file_of_the_repository(built):
    """``make docs``, ``make test`` and ``.ci/run`` read files of the root and of hidden folders."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no checkout")
    assert {*filter(None, tracked.stdout.split("\0"))} - names == set()
    assert {"CITATION.cff", "SECURITY.md", ".ci/run", ".github/workflows/cpu.yml", "PKG-INFO"} <= names
