"""Make the parts of the README that follow from other files: ``python docs/_ext/readme.py``.

The figure is drawn from the records into docs/_static, once for a light page and once for a dark one; the table of
operators is the front page's in short, the table of pages is made from the pages and the cards. All stand between
markers.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "docs" / "_static"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs" / "_ext")]

import front  # noqa: E402
import pages as site  # noqa: E402

__all__ = ["between", "figure", "pages", "verdicts"]

#: What text and axes are drawn in on a light page and on a dark one: 7 to 1 on GitHub's backgrounds.
INKS = {"light": "#57606a", "dark": "#b3bac2"}


def figure():
    """The figure, in the theme of who reads it, and what stands below."""
    title, below = front.headline()
    return (
        "<picture>\n"
        '  <source media="(prefers-color-scheme: dark)" srcset="docs/_static/standings-dark.svg">\n'
        f'  <img alt="{title}" src="docs/_static/standings-light.svg">\n'
        f"</picture>\n\n{below}"
    )


#: Rows of the table of operators.
ROWS = 10


def verdicts():
    """The operators with the largest gains as a table, and the others in a few lines."""
    rows = [row for row in front.uses() if row.kind == "worth"]
    lines = ["| operator | gain | from, to | memory | slower at | call |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows[:ROWS]:
        page = front.page_of(row.verdict.op)
        name = f"[`{row.verdict.op.name}`](examples/{page.path.name})"
        lines.append(f"| {name} | {row.gain} | {row.spread} | {row.memory} | {row.slower} | `{row.call}` |")
    more = ", ".join(f"`{row.verdict.op.name}` ({row.gain})" for row in rows[ROWS:])
    kinds = [("Also worth calling", more)]
    kinds += [("Small gain, below 1.1x", front.of_kind("small")), ("Use torch or torch.compile", front.of_kind("no"))]
    lists = [f"- **{what}:** {names.replace('``', '`')}." for what, names in kinds if names]
    return "\n".join([*lines, "", *lists])


def pages():
    """The table of pages: the title of each, what to have read before, and its operators."""
    from fusebook import cards

    told = {}
    for module, family in cards.FAMILIES.items():
        told.setdefault(f"{module.PAGE:03}", []).extend(f"`{op.name}`" for op in family)
    rows = ["| page | to have read | operators |", "| --- | --- | --- |"]
    for number, page in site.pages().items():
        title = f"{number} [{page.title}](examples/{page.path.name})"
        names = ", ".join(told.get(number, ()))
        rows.append(f"| {title} | {', '.join(page.before)} | {names} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(rows)


def between(text, name, part):
    """The text with `part` between its markers of that name."""
    begin, end = f"<!-- {name}, made by docs/_ext/readme.py -->", "<!-- end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{part}\n\n{end}{after}"


def main(only=()):
    """Write the figure and the README; or `only` parts of the README, by their names."""
    if not only:
        import matplotlib as mpl

        mpl.use("svg")
        for theme, ink in INKS.items():
            front.draw(STATIC / f"standings-{theme}.svg", ink)
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for part in (figure, verdicts, pages):
        if not only or part.__name__ in only:
            text = between(text, part.__name__, part())
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
