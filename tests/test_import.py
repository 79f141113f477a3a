"""What importing the library loads and needs: torch, Triton and NumPy; all else comes with an extra, which is named."""

import ast
import builtins
import importlib
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import fusebook
import warm

ROOT = Path(__file__).resolve().parents[1]

#: What comes with an extra.
EXTRAS = (
    *("matplotlib", "openpyxl", "pandas", "pynvml", "tqdm"),
    *("cupy", "liger_kernel", "onnx", "onnxruntime", "onnxscript", "quack", "sklearn"),
)

#: Makes modules look as if they were not installed.
HIDE = """
import sys

class Hidden:
    names = ()

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in Hidden.names else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hidden, sys.meta_path)
"""


def python(code, *arguments):
    """What a process prints that has loaded torch and Triton; here everything is loaded already."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = warm.run("-c", code, *map(str, arguments), env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_loads_torch_and_triton_and_takes_half_a_second_more():
    """Of the processor's time, which a busy machine does not lengthen."""
    code = (
        "import sys, time, torch, triton; before = set(sys.modules); begin = time.process_time(); import fusebook;"
        "print(time.process_time() - begin, *{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    best = 1e9
    for _ in range(3):
        seconds, *loaded = python(code).split()
        assert "fusebook" in loaded
        assert not {*loaded} & {*EXTRAS}
        best = min(best, float(seconds))
        if best <= 0.5:
            break
    assert best <= 0.5


def test_kernels_run_and_cards_are_read_where_no_extra_is_installed():
    code = HIDE + (
        f"Hidden.names = {EXTRAS}\n"
        "import fusebook, torch\n"
        "x = torch.randn(3, 5, device='cuda' if torch.cuda.is_available() else 'cpu')\n"
        "torch.testing.assert_close(fusebook.softmax(x), torch.softmax(x, -1))\n"
        "assert fusebook.kmeans(x, 2).labels.shape == (3,)\n"
        "from fusebook.cards import OPS\n"
        "print(*OPS)"
    )
    assert "softmax" in python(code).split()


#: A module or page, what is not installed, and the extra that is to be named.
MISSING = [
    ("fusebook.measure.bench", "pandas", "book"),
    ("fusebook.measure.bench", "tqdm", "book"),
    ("fusebook.tables", "pandas", "book"),
    ("fusebook.plots", "matplotlib", "book"),
    ("fusebook.measure.record", "pandas", "book"),
    ("fusebook.lesson", "pandas", "book"),
    ("plot_102_softmax.py", "pandas", "book"),
    ("plot_501_onnxruntime.py", "onnx", "ort"),
]


def test_a_missing_extra_is_named():
    code = HIDE + (
        "import importlib, json, runpy, fusebook\n"
        "kept = ('fusebook.kernels', 'fusebook.extras', 'fusebook.ort.custom')\n"  # which are imported once
        "said = []\n"
        "for name, *Hidden.names, extra in json.loads(sys.argv[2]):\n"
        "    for loaded in [*sys.modules]:\n"
        "        ours = loaded.startswith('fusebook.') and not loaded.startswith(kept)\n"
        "        if ours or loaded.split('.')[0] in Hidden.names:\n"
        "            del sys.modules[loaded]\n"
        "    try:\n"
        "        if name.endswith('.py'):\n"
        "            runpy.run_path(f'{sys.argv[1]}/{name}')\n"
        "        else:\n"
        "            found = importlib.import_module(name)\n"
        "            getattr(found, '_grid', dict)()\n"  # what draws is imported when something is drawn
        "    except ModuleNotFoundError as error:\n"
        "        said.append(str(error))\n"
        "print(json.dumps(said))"
    )
    said = json.loads(python(code, ROOT / "examples", json.dumps(MISSING)))
    assert said == [
        f"the module {hidden} is not installed; it comes with Fusebook's extra {extra!r}: "
        f"pip install 'PATH[{extra}]', where PATH is a checkout of its source"
        for _, hidden, extra in MISSING
    ]


def test_a_module_that_moved_is_named(monkeypatch, tmp_path):
    (tmp_path / "page" / "__pycache__").mkdir(parents=True)  # as version control leaves it behind
    monkeypatch.setattr(fusebook, "__path__", [*fusebook.__path__, str(tmp_path)])
    for name in ("bench", "record"):
        with pytest.raises(ModuleNotFoundError, match=rf"fusebook\.{name} moved: use fusebook\.measure\.{name}"):
            importlib.import_module(f"fusebook.{name}")
    with pytest.raises(ModuleNotFoundError, match=r"use fusebook\.lesson$"):
        importlib.import_module("fusebook.page")
    with pytest.raises(ModuleNotFoundError, match=r"use fusebook\.measure\.sources"):
        from fusebook import digests  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from fusebook import nothing  # noqa: F401
    ran = subprocess.run([sys.executable, "-m", "fusebook.record", "--check"], capture_output=True, text=True)
    assert ran.returncode == 1 and "use fusebook.measure.record" in ran.stderr and "Traceback" not in ran.stderr


def test_public_names_are_those_of_the_kernels_as_a_type_checker_sees_them():
    """In imports that are written out; a star imports no name that NumPy, math or Python itself has."""
    public = {}
    for found in pkgutil.iter_modules(fusebook.kernels.__path__):
        if not (found.name.startswith("_") or found.name.endswith("_plan")):
            module = importlib.import_module(f"fusebook.kernels.{found.name}")
            public |= {name: getattr(module, name) for name in module.__all__}
    statements = ast.parse(Path(fusebook.__file__).read_text(encoding="utf-8")).body
    kernels = [
        s for s in statements if isinstance(s, ast.ImportFrom) and (s.module or "").startswith("fusebook.kernels")
    ]
    assert sorted(name.name for s in kernels for name in s.names) == sorted(public)
    assert {name: getattr(fusebook, name) for name in public} == public
    elsewhere = {*dir(builtins), *dir(math), *dir(numpy)}
    beside = {"Patched", "patch", "unpatch"}  # of whole models
    assert sorted(fusebook.__all__) == sorted(beside | public.keys() - elsewhere)
    # A name that no star imports is re-exported by "import exp as exp".
    again = {name.asname for s in kernels for name in s.names}
    assert {"double", "exp"} <= public.keys() & elsewhere == again - {None}


@pytest.mark.parametrize(("order", "warned"), [("triton, fusebook", True), ("fusebook, triton", False)])
def test_triton_before_the_library_is_named_where_no_kernel_can_run(order, warned):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    code = f"import {order}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert ("import fusebook first, or set TRITON_INTERPRET=1" in done.stderr) == warned


#: The commands that the library's argument parsers name.
COMMANDS = sorted(
    name
    for file in (ROOT / "src").rglob("*.py")
    for name in re.findall(r'prog="python -m ([\w.]+)"', file.read_text(encoding="utf-8"))
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_its_extra_ends_in_a_sentence(command):
    code = f"{HIDE}\nHidden.names = {EXTRAS}\nimport runpy\nsys.argv = ['', '--help']\n"
    code += f"sys.orig_argv = ['python', '-m', {command!r}, '--help']\n"
    code += f"try:\n    runpy.run_module({command!r}, run_name='__main__', alter_sys=True)\n"
    code += "except ModuleNotFoundError:\n    sys.excepthook(*sys.exc_info())\n    sys.exit(1)"
    done = warm.run("-c", code, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    if done.returncode:
        (said,) = done.stderr.splitlines()
        assert said.startswith("fusebook: the module ") and "pip install 'PATH[book]'" in said
    else:
        assert "usage:" in done.stdout and not done.stderr
