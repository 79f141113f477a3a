"""The floor plan of the library, as pyproject.toml states it, holds; and would be seen to break."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = ROOT / "pyproject.toml"

LINT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from importlinter.cli import lint_imports_command as c; c()"


def lint(source, config=CONTRACTS):
    """Import-linter on the package in `source`; a process of its own, as it would otherwise see this one's modules."""
    return subprocess.run(
        [sys.executable, "-c", LINT, str(source), "--config", str(config), "--no-cache"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.fixture
def house(tmp_path):
    """A copy of the library in which a test may break the rules."""
    for path in (ROOT / "src" / "fusebook").rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT / "src")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def add(house, module, text):
    path = house / "fusebook" / module
    path.write_text((path.read_text(encoding="utf-8") if path.exists() else "") + text, encoding="utf-8")


def test_every_import_goes_down_a_floor():
    result = lint(ROOT / "src")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("timing.py", "from fusebook.op import Op\n"),
        ("machine.py", "from fusebook import bench\n"),
        ("tables.py", "from fusebook import plots\n"),
        ("kernels/other.py", "from fusebook.kernels import softmax\n"),
        ("kernels/other.py", "from fusebook.op import Op\n"),
        ("cards/other.py", "from fusebook import record\n"),
        ("attic.py", "import torch\n"),
    ],
    ids=["sideways", "up", "tables-plots", "kernel-to-kernel", "kernel-to-op", "card-to-record", "on-no-floor"],
)
def test_a_forbidden_import_is_seen(house, module, text):
    add(house, module, text)
    result = lint(house)
    assert result.returncode != 0, result.stdout + result.stderr


def test_kernels_may_share_code_and_what_is_planned_may_come(house):
    add(house, "kernels/_tl.py", "import triton\n")
    add(house, "kernels/other.py", "from fusebook.kernels import _operator, _tl\n")
    add(house, "launches.py", "from fusebook import kernels\n")
    add(house, "explore.py", "from fusebook import cards\n")
    result = lint(house)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_library_imports_no_page():
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("examples", "plot_")], f"{path}: {names}"
