"""The notebooks of the built site run as they are downloaded: nothing beside them, nothing on their command line."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "build" / "html" / "_downloads"
NOTEBOOKS = sorted(FOLDER.glob("*/plot_*.ipynb"))


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.exists(), reason="needs a built site: nox -s docs")]


def test_there_are_notebooks():
    assert NOTEBOOKS, f"no notebook in {FOLDER}: build the site first, with nox -s docs"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", NOTEBOOKS or [Path("none")], ids=lambda path: path.stem)
def test_a_notebook_runs_as_downloaded(path, tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) > 1
    assert all(cell.execution_count for cell in cells if cell.source.strip())
    shown = [
        output for cell in cells for output in cell.outputs if output.output_type in ("display_data", "execute_result")
    ]
    assert shown, "no cell shows anything"
