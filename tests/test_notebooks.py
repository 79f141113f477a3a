"""The notebooks of the built site run as they are downloaded: nothing beside them, nothing on their command line."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "build" / "html" / "_downloads"
NOTEBOOKS = sorted(FOLDER.glob("*/plot_*.ipynb"))


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.exists(), reason="needs a built site: nox -s docs")]


def test_there_are_notebooks():
    assert NOTEBOOKS, f"no notebook in {FOLDER}: build the site first, with nox -s docs"


@pytest.fixture(scope="module")
def kernel():
    """A kernel for all notebooks: starting one, and importing in it, takes longer than many a notebook."""
    manager = pytest.importorskip("jupyter_client").KernelManager(kernel_name="python3")
    manager.start_kernel()
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("path", NOTEBOOKS or [Path("none")], ids=lambda path: path.stem)
def test_a_notebook_runs_as_downloaded(path, tmp_path, kernel):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    afresh = nbformat.v4.new_code_cell(f"%reset -f\nimport os\nos.chdir({str(tmp_path)!r})\ndel os")
    notebook.cells.insert(0, afresh)
    client = nbclient.NotebookClient(notebook, km=kernel, timeout=1200)
    client.execute()
    client.kc.stop_channels()
    cells = [cell for cell in notebook.cells[1:] if cell.cell_type == "code"]
    assert len(cells) > 1
    assert all(cell.execution_count for cell in cells if cell.source.strip())
    shown = [
        output for cell in cells for output in cell.outputs if output.output_type in ("display_data", "execute_result")
    ]
    assert shown, "no cell shows anything"
