"""Make the parts of the README that follow from other files: ``python docs/_ext/readme.py``.

The figure is drawn from the record of softmax into docs/_static/softmax.svg; its caption, in softmax.txt, says where
the numbers come from. The table of pages is made from the pages and the cards. Both stand between markers.
"""

import ast
import sys
from pathlib import Path

__all__ = ["between", "caption", "pages"]

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "docs" / "_static"
sys.path.insert(0, str(ROOT / "src"))


def caption():
    """Draw bandwidth over width, under the measured roof; returns what stands below the figure."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same record gives the same file.
    mpl.rcParams.update({"svg.hashsalt": "fusebook", "savefig.transparent": True})
    from fusebook import plots, record
    from fusebook.cards.softmax import SOFTMAX

    df = record.select(record.read("softmax"), SOFTMAX, "triton")
    axes = plots.bandwidth(df)
    axes.figure.savefig(STATIC / "softmax.svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    machine = df.attrs["origin"].machine
    return (
        f"Softmax of 4096 rows in float32 on one {machine.name}, cold, by the width of a row: bandwidth of the least "
        f"traffic, under the measured roof. {df['versions'].iloc[0]}; {df['date'].iloc[0]}."
    )


def pages():
    """The table of pages: the title of each, and the operators whose cards say that it tells of them."""
    from fusebook import cards

    told = {}
    for module in cards.MODULES:
        told.setdefault(module.PAGE, []).extend(f"`{op.name}`" for op in module.OPS)
    rows = ["| page | operators |", "| --- | --- |"]
    for page in sorted((ROOT / "examples").glob("plot_*.py")):
        title = ast.get_docstring(ast.parse(page.read_text(encoding="utf-8"))).splitlines()[0]
        names = ", ".join(told.get(int(page.stem.split("_")[1]), ()))
        rows.append(f"| [{title}](examples/{page.name}) | {names} |".replace("|  |", "| |"))
    return "\n".join(rows)


def between(text, name, part):
    """The text with `part` between its markers of that name."""
    begin, end = f"<!-- {name}, made by docs/_ext/readme.py -->", "<!-- end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{part}\n\n{end}{after}"


def main():
    """Write the figure, its caption, and the README."""
    readme = ROOT / "README.md"
    said = caption()
    (STATIC / "softmax.txt").write_text(said + "\n", encoding="utf-8")
    text = between(readme.read_text(encoding="utf-8"), "figure", f"![{said}](docs/_static/softmax.svg)\n\n{said}")
    readme.write_text(between(text, "pages", pages()), encoding="utf-8")


if __name__ == "__main__":
    main()
