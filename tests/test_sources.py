"""Hashes of source code: what changes them, and what does not."""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fusebook.cards import OPS
from fusebook.kernels import _call
from fusebook.measure import sources

FILES = {
    "shop_rows": """
        '''Device functions.'''
        TABLE, LIMITS = [(64, 8), (128, 16)], (3, 4)

        @jit
        def load(x_ptr, BLOCK: 'tl.constexpr'):
            return x_ptr + BLOCK

        def apart(x):
            return x - 1
        """,
    "shop_softmax": """
        from shop_call import Operator
        from shop_rows import TABLE, load

        @jit
        def kernel(y_ptr, x_ptr):
            '''Softmax.'''
            return load(x_ptr)  # read MN

        def _into(y, x):
            for limit, warps in TABLE:
                kernel(y, x)

        _softmax = Operator("softmax", into=_into)

        def softmax(x: int) -> int:
            return _softmax.call(x)
        """,
    "shop_norms": """
        from shop_rows import apart

        def norm(x):
            return apart(x)
        """,
    "shop_call": """
        class Operator:
            def __init__(self, name, into):
                self.into = into

            def call(self, x):
                if x is None:
                    raise ValueError("expected a tensor")
                return launch(self.into, x)

            def one_by_one(self, x):
                return [launch(self.into, t) for t in x]

        def launch(into, x):
            return into(x, x)

        def unused(x):
            return x
        """,
}


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """Gives the hashes of softmax with one text of the files replaced by another."""
    monkeypatch.setattr(sources, "CALL_PATH", ("shop_call",))
    made = []

    def hashed(old="", new="", name="shop_softmax", function="softmax"):
        folder = tmp_path / str(len(made))
        made.append(folder)
        folder.mkdir()
        assert sum(old in text for text in FILES.values()) >= 1
        for module, text in FILES.items():
            lines = [line.removeprefix("        ") for line in text.replace(old, new).splitlines()]
            (folder / f"{module}.py").write_text("\n".join(["jit = lambda f: f", *lines]))
            sys.modules.pop(module, None)
        monkeypatch.syspath_prepend(folder)
        importlib.invalidate_caches()
        sources._file.cache_clear()
        return sources.hashes(getattr(importlib.import_module(name), function))

    yield hashed
    for module in FILES:
        sys.modules.pop(module, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("'''Softmax.'''", "'''Another text.'''"),
        ("  # read MN", "  # read M * N"),
        ("def softmax(x: int) -> int:", "def softmax(x: float) -> float:"),
        ("return x - 1", "return x - 2"),  # a helper of another family
        ("return apart(x)", "return apart(x) + 1"),
        ("def unused(x):\n            return x", "def unused(x):\n            return 2 * x"),
        ('ValueError("expected a tensor")', 'TypeError("expected a tensor, got None")'),  # a refusal
        ("for t in x]", "for t in [*x]]"),  # of no call that is timed
    ],
)
def test_what_does_not_concern_a_kernel_leaves_its_hashes(hashed, old, new):
    assert hashed(old, new) == hashed()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x_ptr + BLOCK", "return x_ptr - BLOCK"),  # a helper that the kernel calls
        ("(128, 16)", "(128, 32)"),  # a constant of the table
        ("return load(x_ptr)", "return load(x_ptr + 1)"),
        ("kernel(y, x)", "kernel(x, y)"),  # the launcher
        ("BLOCK: 'tl.constexpr'", "BLOCK"),
    ],
)
def test_what_a_kernel_reaches_changes_its_code_and_not_its_host_time(hashed, old, new):
    code, host = hashed(old, new)
    assert code != hashed()[0] and host == hashed()[1]


@pytest.mark.parametrize(("old", "new"), [("return into(x, x)", "return into(x, x + 0)"), ("x is None", "x is not x")])
def test_the_call_path_changes_the_host_hash_alone(hashed, old, new):
    code, host = hashed(old, new)
    assert host and code == hashed()[0] and host != hashed()[1]
    assert hashed(name="shop_norms", function="norm")[1] == "", "no launcher is reached"


def test_versions_of_python_agree(hashed):
    assert hashed() == ("bd1ab2e17df9", "243491fc856c")


def test_packages_of_others_are_neither_read_nor_imported(tmp_path, monkeypatch):
    """On PYTHONPATH a package is in no folder that is named site-packages."""
    package = tmp_path / "peer"
    package.mkdir()
    (package / "__init__.py").write_text("from peer.rows import rows\nraise RuntimeError('imported')\n")
    (package / "rows.py").write_text("def rows(x):\n    return x\n")
    (tmp_path / "baseline.py").write_text("def run(x):\n    from peer.rows import rows\n    return rows(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    sources._file.cache_clear()
    before = sources.hashes(importlib.import_module("baseline").run)
    (package / "rows.py").write_text("def rows(x):\n    return -x\n")
    sources._module.cache_clear()
    assert sources.hashes(sys.modules.pop("baseline").run) == before
    assert "peer" not in sys.modules


def test_values_that_a_function_closes_over_count():
    def made(n):
        return lambda x: x + n

    assert sources.hashes(made(1)) != sources.hashes(made(2))
    assert sources.hashes(made(1)) == sources.hashes(made(1))


@pytest.mark.parametrize("register", [torch.library.custom_op, torch.library.triton_op])
def test_an_operator_of_torch_is_the_function_that_it_registers(register):
    def one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    registered = register("test_sources::one", one, mutates_args=())
    assert sources.hashes(registered) == sources.hashes(one) != sources.hashes(len)


def test_every_implementation_of_fusebook_reaches_a_kernel():
    """A walk that stops early would call a record fresh whose kernel has changed."""
    for op in OPS.values():
        for name, variant in op.variants.items():
            if name.startswith("fusebook"):
                found = sources.reached(variant.run, variant.prepare)
                objects = (getattr(importlib.import_module(module), name, None) for module, name in found)
                assert any(hasattr(thing, "fn") for thing in objects), (op.name, name)


def test_what_runs_a_baseline_of_onnx_runtime_is_not_read():
    found = sources.reached(OPS["silu"].variants["ONNX Runtime"].prepare)
    assert "fusebook.cards.elementwise" in dict(found)
    assert "fusebook.ort.graph" not in dict(found)


def test_every_implementation_of_a_card_has_a_hash_of_its_own():
    for op in OPS.values():
        found = {name: sources.of_variant(op, name) for name in op.variants}
        assert len({code for code, _ in found.values()}) == len(found), op.name
        assert all(host for name, (_, host) in found.items() if name == "fusebook"), op.name


def test_a_package_in_any_folder_is_not_read(tmp_path, monkeypatch):
    """Its modules may import a name from each other in a circle."""
    (tmp_path / "circle").mkdir()
    (tmp_path / "circle/__init__.py").write_text("from circle import softmax\n")
    (tmp_path / "page.py").write_text("from circle import softmax\n\ndef run(x):\n    return softmax(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = type(sys)("circle")
    package.softmax, package.__spec__ = abs, importlib.util.find_spec("circle")
    monkeypatch.setitem(sys.modules, "circle", package)
    page = importlib.import_module("page")
    monkeypatch.delitem(sys.modules, "page")
    assert sources.hashes(page.run)[0]


def test_what_is_left_out_of_the_call_path_is_in_it():
    tree = ast.parse(Path(_call.__file__).read_text())
    assert {getattr(node, "name", "") for node in ast.walk(tree)} >= sources.UNTIMED
