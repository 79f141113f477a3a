"""The notebooks of the built site run as they are downloaded: nothing beside them, nothing on their command line.

Exercises are checked in the same run, as the page has them and once more with their solutions.
"""

import json
import re
from pathlib import Path

import pytest

import interpreting

SOLUTIONS = Path(__file__).resolve().parents[1] / "examples" / "solutions"
FOLDER = Path(__file__).resolve().parents[1] / "build" / "html" / "_downloads"
NOTEBOOKS = sorted(FOLDER.glob("*/plot_*.ipynb"))


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.exists(), reason="needs a built site: nox -s docs")]


def test_there_are_notebooks():
    assert NOTEBOOKS, f"no notebook in {FOLDER}: build the site first, with nox -s docs"


#: What the kernel does before the first of them, as a page does that is built.
HASTENED = f"""
import sys
sys.path.append({str(Path(interpreting.__file__).parent)!r})
import fusebook, interpreting
interpreting.hasten()
sys.path.pop()
import gc, matplotlib.pyplot, pandas
gc.collect()
gc.freeze()  # %reset collects garbage before each notebook
"""


@pytest.fixture(scope="module")
def kernel():
    """A kernel for all notebooks: starting one, and importing in it, takes longer than many a notebook."""
    manager = pytest.importorskip("jupyter_client").KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.execute_interactive(HASTENED)
    client.stop_channels()
    yield manager
    manager.shutdown_kernel(now=True)


#: A cell after that of an exercise: what became of it, and what becomes of it with the functions of its solution.
SOLVED = """
import ast, json, runpy
here = dict(globals())
solved = runpy.run_path({solutions!r})
globals().update((name, value) for name, value in solved.items() if name[0] != "_" and callable(value))
again = eval(compile(ast.Expression(ast.parse({source!r}).body[-1].value), "again", "eval"))
found = [[[bool(item.true), item.detail] for item in one.items] for one in (here["Out"][max(here["Out"])], again)]
print(json.dumps(found))
globals().update(here)
"""


@pytest.mark.parametrize("path", NOTEBOOKS or [Path("none")], ids=lambda path: path.stem)
def test_a_notebook_runs_as_downloaded(path, tmp_path, kernel):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    afresh = nbformat.v4.new_code_cell(f"%reset -f\nimport os\nos.chdir({str(tmp_path)!r})\ndel os")
    notebook.cells.insert(0, afresh)
    found = [
        i for i, cell in enumerate(notebook.cells) if re.search(r"^(page\.)?exercise\(", cell.source, re.MULTILINE)
    ]
    assert bool(found) == (SOLUTIONS / f"{path.stem}.py").exists()
    for i in reversed(found):
        text = SOLVED.format(solutions=str(SOLUTIONS / f"{path.stem}.py"), source=notebook.cells[i].source)
        notebook.cells.insert(i + 1, nbformat.v4.new_code_cell(text))
    client = nbclient.NotebookClient(notebook, km=kernel, timeout=1200)
    client.execute()
    client.kc.stop_channels()
    for i in found:
        own, solved = json.loads(next(o.text for o in notebook.cells.pop(i + 1).outputs if o.get("name") == "stdout"))
        assert own, "an exercise that asks nothing"
        assert [true for true, _ in own] == [False] * len(own), own
        assert not any("Error" in detail for _, detail in own), "wrong, and not broken, is what a reader starts from"
        assert [true for true, _ in solved] == [True] * len(own), solved
    cells = [cell for cell in notebook.cells[1:] if cell.cell_type == "code"]
    assert len(cells) > 1
    assert all(cell.execution_count for cell in cells if cell.source.strip())
    shown = [
        output for cell in cells for output in cell.outputs if output.output_type in ("display_data", "execute_result")
    ]
    assert shown, "no cell shows anything"
