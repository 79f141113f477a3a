"""Pages in the form of a lesson: their limits, their language, and their notebooks.

The list of such pages is that of `fusebook.lesson.evidence`; it grows as pages are rewritten.
"""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import fusebook.lesson as lesson
import style
import warm
from fusebook.cards import OPS
from fusebook.lesson import Page, evidence
from fusebook.measure import check, inputs

pytest.importorskip("sphinx_gallery")

from sphinx_gallery.gen_gallery import DEFAULT_GALLERY_CONF
from sphinx_gallery.notebook import jupyter_notebook
from sphinx_gallery.py_source_parser import remove_config_comments, split_code_and_text_blocks

import fusebook_site
import lessons

ROOT = Path(__file__).resolve().parents[1]
LESSONS = [ROOT / "examples" / f"{name}.py" for name in evidence.lessons()]
#: The lesson that needs no other one.
FIRST = ROOT / "examples" / "plot_002_measuring.py"
each = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)

#: Sizes at which kernels of a notebook run alone, in float32, where a lesson's kernels take no others.
SMALL = {
    **dict.fromkeys(("plot_302_numpy_to_cuda", "plot_303_kmeans"), (300, 2, 2)),
    "plot_306_tf32_filter": (150, 20, 70),
    "plot_307_moving_centres": (300, 2, 3),
    "plot_308_scikit_learn": (300, 2, 3),
    "plot_402_two_gpus": (50, 3, 5),
}

#: Limits of a page; see docs/contributing.rst.
LINES, FIRST_KERNEL, CALLS, NAMES, VERDICTS, TABLES, SCREENS = 450, 90, 30, 3, 8, 2, 8


def blocks(path, kind):
    return [block.content for block in split_code_and_text_blocks(str(path))[1] if block.type == kind]


def called(text):
    """The methods of the page that a text calls."""
    return [
        node.attr if node.value.id == "page" else node.value.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "page"
    ]


# Limits ---------------------------------------------------------------------------------------------------------------


@each
def test_a_lesson_is_short_and_its_kernel_comes_early(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LINES
    assert lines.index("@triton.jit") < FIRST_KERNEL
    assert sum("page." in line for line in lines) <= CALLS
    assert max(map(len, lines)) <= 79


@each
def test_a_lesson_imports_two_names_of_the_library(path):
    text = path.read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if re.match(r"(import|from) fusebook", line)]
    assert [line.partition("  #")[0] for line in imports] == ["import fusebook", "import fusebook.lesson as lesson"]
    assert text.index("import fusebook") < text.index("import triton")
    assert "fusebook.kernels" not in text and "# ///" not in text and "# site:" not in text


@each
def test_a_lesson_calls_few_names_a_cell_and_none_that_is_private(path):
    for text in blocks(path, "code"):
        names = called(text)
        assert len(set(names)) <= NAMES, names
        kind = getattr(evidence.load(path.stem), "PAGE", Page)
        assert all(hasattr(kind, name) or name == "picture" for name in names), names
    whole = path.read_text(encoding="utf-8")
    tables = len(re.findall(r"^page\.(steps|table|use)\(", whole, re.MULTILINE))
    shown = sum(claim.lesson for claim in evidence.load(path.stem).CLAIMS)
    assert tables <= TABLES
    assert len(re.findall(r"^page\.verdict\(", whole, re.MULTILINE)) == 1
    assert 3 + shown <= VERDICTS, "the box has three lines"


@each
def test_a_lesson_has_its_parts_and_calls_the_library(path):
    text = path.read_text(encoding="utf-8")
    about = evidence.load(path.stem)
    assert not re.search(r"^#.*\\\\[a-z]", text, re.MULTILINE), "of two backslashes, a formula shows the second"
    function = re.escape(getattr(about, "CALLED", about.OPERATORS[0]))
    headings = re.findall(r"^# (\S.*)\n# -{4,}$", text, re.MULTILINE)
    assert [h for h in headings if h in ("When to use it", "Takeaways", "Exercises", "Evidence")] == [
        *("When to use it", "Takeaways", "Exercises", "Evidence"),
    ]
    assert "You will learn" in text and ("Prerequisites: :doc:" in text) == (path != FIRST)
    together = "#    " if hasattr(about, "on_ranks") else ""  # what all ranks call together is in a block of text
    assert re.search(rf"^{together}(\w+ = )?fusebook\.{function}\(", text, re.MULTILINE)
    for heading in headings:
        marked = re.search(r"\{gain ", heading)
        label = re.search(rf"^# \.\. _[\w-]+:\n#\n# {re.escape(heading)}$", text, re.MULTILINE)
        assert not marked or label, f"{heading}: a heading with a number has a label above it"
    first_two = "".join(blocks(path, "code")[:2])
    assert "page.verdict()" in first_two, "a figure by screen 2"


@each
def test_markers_name_steps_that_there_are(path):
    found = lessons.gains(path.stem)
    assert found and all(text.startswith("(") and text.endswith(")") for text in found.values())
    filled = lessons.fill(path.read_text(encoding="utf-8"), found)
    assert lessons.left(filled) == []
    for heading, line in re.findall(r"^# (\S.*)\n# (-{4,})$", filled, re.MULTILINE):
        assert len(line) >= len(heading)


# Language -------------------------------------------------------------------------------------------------------------


@each
def test_prose_and_comments_of_a_lesson_are_plain(path):
    texts = blocks(path, "text")
    for code in blocks(path, "code"):
        texts += re.findall(r"# (.+)$", code, re.MULTILINE)
    found = [fault for text in texts for fault in style.faults(re.sub(r"^\.\. _.*$", "", text, flags=re.MULTILINE))]
    assert found == []


@each
def test_no_number_of_a_record_is_typed(path):
    for text in blocks(path, "text"):
        assert not re.search(r"\d(\.\d+)? ?(us|ms|GB/s|TB/s)\b|\b\d+\.\d+x|\d ?% of", text), text


# Notebooks ------------------------------------------------------------------------------------------------------------


def notebook(path):
    """The notebook of a lesson, as the site makes it."""
    conf = {**DEFAULT_GALLERY_CONF, "src_dir": str(ROOT), "pypandoc": False}
    script = [
        block._replace(content=remove_config_comments(block.content)) if block.type == "code" else block
        for block in split_code_and_text_blocks(str(path))[1]
    ]
    return lessons.notebook(jupyter_notebook, script, conf, str(ROOT))


def cells(path, kind="code"):
    return ["".join(cell["source"]) for cell in notebook(path)["cells"] if cell["cell_type"] == kind]


@each
def test_a_notebook_is_text_and_code_of_the_lesson(path, monkeypatch):
    monkeypatch.delenv("FUSEBOOK_URL", raising=False)
    text = "\n".join(cells(path, "markdown"))
    assert not re.search(r":[a-z]+:`|\{gain|^\.\. |# site:", text, re.MULTILINE), text
    assert "Measuring: five mistakes with a stopwatch" in text, "a link is at least its title"
    code = cells(path)
    assert "# site:" not in "\n".join(code) and "sphinx_gallery" not in "\n".join(code)
    assert any("@triton.jit" in cell for cell in code[:5])
    monkeypatch.setenv("FUSEBOOK_URL", "https://example.org/book/")
    linked = "\n".join(cells(path, "markdown"))
    assert path == FIRST or "(https://example.org/book/auto_examples/plot_002_measuring.html)" in linked


def test_the_first_cell_installs_the_wheel_and_never_a_name():
    here, there = lessons.first_cell(), lessons.first_cell("https://example.org/book")
    assert f"{lessons.wheel()}" in here and 'site, wheel = ""' in here
    assert 'site, wheel = "https://example.org/book/wheel/"' in there
    for cell in (here, there):
        assert not re.search(r"install (--\S+ )*[\"']?fusebook(\[\w+\])?[\"']?\s*$", cell, re.MULTILINE)
        assert "compute capability 8.0" in cell.splitlines()[0]


#: Runs launchers of a notebook where the library cannot be imported: kernels and launchers as text, inputs in a file.
ALONE = """
import json, os, sys
if len(sys.argv) > 3:
    os.environ["TRITON_INTERPRET"] = "1"

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fusebook":
            raise ImportError("fusebook cannot be imported here")

for name in [n for n in sys.modules if n.split(".")[0] == "fusebook"]:
    del sys.modules[name]
sys.meta_path.insert(0, Hidden())
import importlib.util, torch
spec = importlib.util.spec_from_file_location("kernels_of_a_notebook", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
given = torch.load(sys.argv[2])
torch.save({name: getattr(module, name)(*inputs) for name, inputs in given.items()}, sys.argv[2])
"""


def extracted(path):
    """Kernels, launchers and classes of a notebook, with imports of torch and Triton, and each launcher's operator."""
    tree = ast.parse("\n".join(re.sub(r"(?m)^\s*%.*$", "", cell) for cell in cells(path)[1:]))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    pages = {"page": evidence.load(path.stem).OPERATORS[0]}  # and what `page.of` returns
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("page.of("):
            pages[node.targets[0].id] = node.value.args[0].value
    checks = {f"{name}.check": op for name, op in pages.items()}
    checked = {
        c.args[0].id: checks[ast.unparse(c.func)]
        for c in calls
        if ast.unparse(c.func) in checks and isinstance(c.args[0], ast.Name)
    }
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    wanted, named = set(checked), {f.name: {n.id for n in ast.walk(f) if isinstance(n, ast.Name)} for f in functions}
    while more := {name for f in wanted for name in named[f]} & named.keys() - wanted:
        wanted |= more
    kept = [f for f in functions if f.name in wanted]
    head = "import functools\nimport torch\nimport torch.nn.functional as F\n"
    head += "import triton\nimport triton.language as tl\n"
    head += "from triton.tools.tensor_descriptor import TensorDescriptor\n\n\n"
    return head + "\n\n\n".join(map(ast.unparse, kept)) + "\n", checked


@each
def test_kernels_of_a_notebook_run_without_the_library(path, tmp_path):
    (text, checked), page = extracted(path), lesson.open(path.stem)
    assert checked and "fusebook" not in text and "page." not in text
    file, data = tmp_path / "kernels.py", tmp_path / "data.pt"
    file.write_text(text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {}
    for op in map(OPS.get, dict.fromkeys(checked.values())):
        sizes = [name for name, value in op.edges[0].items() if isinstance(value, int)]
        few = SMALL.get(path.stem) or {2: (5, 300), 3: (5, 128, 304), 6: (2, 3, 1, 5, 0, 7)}[len(sizes)]
        small = dict(zip(sizes, few, strict=True))
        small |= {"steps": 4} if "steps" in small else {}
        dtype = torch.float32 if path.stem in SMALL else op.dtypes[0]
        given[op.name] = op.make(inputs.generator(0, device), dtype, **{**op.edges[0], **small})
    torch.save({name: page.of(op)._taking(*given[op]) for name, op in checked.items()}, data)
    done = warm.run(
        "-c", ALONE, str(file), str(data), *([] if device == "cuda" else ["interpret"]), env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, got in torch.load(data).items():
        op = OPS[checked[name]]
        got = page.of(op.name)._outputs(got, *given[op.name])
        assert check.yardstick(op, given[op.name]).judge(got).ok, name
        eps = torch.finfo(op.dtypes[0]).eps
        want = op.reference(*given[op.name])
        if isinstance(want, torch.Tensor) and not want.is_floating_point():
            continue  # the card has judged labels by their distances
        got = got if isinstance(want, torch.Tensor) else tuple(got)
        if isinstance(want, torch.Tensor):  # the sums of a matmul are as exact as their row is large
            size = want.square().mean(-1, keepdim=True).sqrt().clamp(min=1)
            got, want = got / size, want / size
        torch.testing.assert_close(got, want, atol=10 * eps, rtol=100 * eps)


#: Runs the first cells of a notebook as IPython does, magics included, and says where the library came from.
FIRST_CELLS = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1])):
    done = shell.run_cell(cell)
    done.raise_error()
print("LIBRARY", sys.modules["fusebook"].__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling")
    return fusebook_site.build_wheel(tmp_path_factory.mktemp("built") / "wheel")


@pytest.fixture
def downloaded(wheel, tmp_path, monkeypatch):
    """A function that makes the zip of a lesson as the site publishes it, and unpacks it into an empty folder."""
    monkeypatch.delenv("FUSEBOOK_URL", raising=False)
    folder, empty = tmp_path / "downloads", tmp_path / "empty"
    folder.mkdir()

    def unpacked(path):
        made = folder / f"{path.stem}.zip"
        with zipfile.ZipFile(made, "w") as archive:
            archive.write(path, path.name)
            archive.writestr(f"{path.stem}.ipynb", json.dumps(notebook(path)))
        fusebook_site.publish_scripts(folder, tmp_path, wheel)
        with zipfile.ZipFile(made) as archive:
            assert {*archive.namelist()} == {path.name, f"{path.stem}.ipynb", lessons.wheel()}
            archive.extractall(empty)
        return empty

    return unpacked


def first_cells(folder, path):
    """The code of the first six cells of a notebook that was downloaded."""
    written = json.loads((folder / f"{path.stem}.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in written["cells"] if cell["cell_type"] == "code"][:6]


@pytest.mark.slow
@each
def test_a_zip_has_the_lesson_its_notebook_and_the_wheel(path, downloaded):
    folder = downloaded(path)
    assert lessons.left((folder / path.name).read_text(encoding="utf-8")) == []
    cells = first_cells(folder, path)
    assert any("@triton.jit" in cell for cell in cells[:5]), "the first kernel is within five cells"
    assert cells[0] == lessons.first_cell().rstrip(), "what installs the wheel is the same on every page"


@pytest.mark.slow
def test_a_zip_runs_in_an_empty_folder_without_an_index(downloaded, tmp_path):
    """A fresh environment that has what the library needs, and not the library; pip has no index."""
    path = LESSONS[0]
    empty = downloaded(path)
    # What is installed here, but for the library: links, as a copy of torch takes a gigabyte.
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not re.match(r"(?i)(__editable__.*|_editable_impl_)?fusebook|.*\.pth$|.*fusebook", entry.name):
            (packages / entry.name).symlink_to(entry)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    (tmp_path / "cells.json").write_text(json.dumps(first_cells(empty, path)))
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("FUSEBOOK_", "_FUSEBOOK_", "PYTHON"))
    }
    done = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "python"), "-c", FIRST_CELLS, str(tmp_path / "cells.json")],
        cwd=empty,
        env={**kept, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert str(tmp_path / "venv") in done.stdout.partition("LIBRARY")[2], done.stdout[-500:]
    assert "is correct on" in done.stdout
