"""The inventories that intersphinx reads, made from lists of names when conf.py is read: the build needs no network.

Each line of ``docs/_inventories/<project>.txt`` is ``name role address``, where a final ``$`` in the address stands for
the name. The lists hold the names that pages and docstrings use, no more; add a line where ``-n`` reports a missing
reference.
"""

import zlib
from pathlib import Path

__all__ = ["ADDRESSES", "inventory", "write"]

FOLDER = Path(__file__).resolve().parents[1] / "_inventories"

#: Where the addresses in the lists begin.
ADDRESSES = {
    "matplotlib": "https://matplotlib.org/stable/",
    "numpy": "https://numpy.org/doc/stable/",
    "onnxruntime": "https://onnxruntime.ai/docs/api/python/",
    "pandas": "https://pandas.pydata.org/docs/",
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "triton": "https://triton-lang.org/main/",
}


def inventory(project: str, text: str) -> bytes:
    """A Sphinx inventory, version 2, of the names in `text`."""
    lines = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, role, address = line.split()
            lines.append(f"{name} {role} 1 {address} -\n")
    head = (
        f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# The remainder is compressed using zlib.\n"
    )
    return head.encode() + zlib.compress("".join(sorted(lines)).encode(), 9)


def write(folder: Path) -> dict[str, tuple[str, str]]:
    """Write the inventory of every project into `folder`; returns what intersphinx is told of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for project in ADDRESSES:
        text = (FOLDER / f"{project}.txt").read_text(encoding="utf-8")
        (folder / f"{project}.inv").write_bytes(inventory(project, text))
    return {project: (address, str(folder / f"{project}.inv")) for project, address in ADDRESSES.items()}
