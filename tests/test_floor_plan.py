"""The floor plan of the library, as pyproject.toml states it, holds; and would be seen to break."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = ROOT / "pyproject.toml"

LINT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from importlinter.cli import lint_imports_command as c; c()"


def lint(source, config=CONTRACTS):
    """Import-linter on the package in `source`; a process of its own, as it would otherwise see this one's modules."""
    pytest.importorskip("importlinter")
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


#: By module, an import that it may not have.
FORBIDDEN = {
    "measure.timing": "fusebook.measure.op",  # sideways
    "measure.machine": "fusebook.measure.bench",  # up
    "tables": "fusebook.plots",  # the one way across is the other
    "kernels.other": "fusebook.kernels.softmax",  # kernels know each other not
    "kernels.another": "fusebook.measure.op",  # nor anything of the library
    "cards.other": "fusebook.measure.record",
}


def test_every_import_goes_down_a_floor():
    result = lint(ROOT / "src")
    assert result.returncode == 0, result.stdout + result.stderr


def test_forbidden_imports_are_seen(house):
    for module, imported in FORBIDDEN.items():
        with open(house / "fusebook" / f"{module.replace('.', '/')}.py", "a", encoding="utf-8") as file:
            file.write(f"import {imported}\n")
    result = lint(house)
    assert result.returncode != 0
    for module, imported in FORBIDDEN.items():
        assert f"fusebook.{module} -> {imported}" in result.stdout, result.stdout


def test_a_module_on_no_floor_is_seen(house):
    for folder in ("fusebook", "fusebook/measure"):
        attic = house / folder / "attic.py"
        attic.write_text("import torch\n")
        result = lint(house)
        assert result.returncode != 0 and "attic" in result.stdout + result.stderr
        attic.unlink()


def pages_imported(text):
    """The pages among the modules that a source imports."""
    found = []
    for node in ast.walk(ast.parse(text)):
        found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return [name for name in found if re.match(r"examples\b|(.*\.)?plot_\d", name)]


def test_the_library_imports_no_page():
    assert pages_imported(
        "import plot_102_softmax\nfrom examples.plot_102_softmax import x\nfrom fusebook import plots"
    )
    for path in (ROOT / "src").rglob("*.py"):
        assert not pages_imported(path.read_text(encoding="utf-8")), path
