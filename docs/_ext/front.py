"""The front page: what records say about each operator, one picture of all, the pages as cards, and how to begin.

Everything is made from the records of the GPU that is replayed, and from the pages; nothing is typed that data could
decide. The README shows the same in short.
"""

import functools
import html
import inspect
import os
import shutil
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import pages

__all__ = [
    "Begin",
    "Cards",
    "Path_",
    "Picture",
    "RecordSize",
    "Should",
    "SourceLine",
    "caption",
    "draw",
    "found",
    "headline",
    "setup",
    "table",
]

ROOT = Path(__file__).resolve().parents[2]

HEAD = "Operator", "Write it?", "On the device", "For the caller", "torch, torch.compile", "a library"
PAYS = "Launch pays from"


# What records say -----------------------------------------------------------------------------------------------------


@functools.cache
def found():
    """The records of the GPU that is replayed, by operator; none where it has none."""
    from fusebook.measure import record

    return record.read_all()


@functools.cache
def record_of(op):
    """The record of one operator alone, or None: pages run in processes of their own, and no page needs all."""
    from fusebook.measure import record

    return record.read(op) if record.exists(op) else None


@functools.cache
def verdicts():
    """What they say about every operator."""
    import answers

    return answers.verdicts(found())


def origins(frames):
    """On what the results were measured: the GPU, the dates, the versions of torch and Triton."""
    names = dict.fromkeys(frame.attrs["origin"].machine.name for frame in frames)
    dates = sorted({str(date) for frame in frames for date in frame["date"].dropna()})
    told = {part for frame in frames for row in frame["versions"].dropna().unique() for part in row.split("; ")}
    versions = sorted(part for part in told if part.split()[0] in ("torch", "triton"))
    return " or ".join(names), " to ".join(dict.fromkeys((dates[0], dates[-1]))), ", ".join(versions)


def caption():
    """What stands over the table of verdicts."""
    name, dates, versions = origins(list(found().values()))
    return (
        f"Each cell is our time divided by the other's, from our best size to our worst, on one {name}: below 1 "
        f"Fusebook is faster, and within 2 % counts as equal. {versions}; {dates}."
    )


def page_of(op):
    """The page that tells of an operator."""
    import answers

    return pages.pages()[f"{answers.page_of(op):03}"]


def cells(verdict):
    """By clock and by what ours is held against: the range, wins, ties and losses, and the libraries' names."""
    return [
        (against[kind].range, against[kind].counts, whose if against[kind].points else "")
        for kind in ("cold", "paid")
        for against, whose in ((verdict.torch, ""), (verdict.libraries, ", ".join(verdict.named)))
    ]


def pays(verdict):
    """From which problem on the caller gains."""
    if verdict.start and not verdict.torch["paid"].wins:
        return "at no size"
    return {None: "not measured", "": "at no size"}.get(verdict.start, verdict.start).partition(" (")[0]


def problem(verdict):
    """The same as bytes that are moved, which tell a small problem from a large one; empty where no size is named."""
    from fusebook import tables

    frame = found()[verdict.op.name]
    moved = frame["read_bytes"] + frame["write_bytes"]
    named = moved[(tables.label(frame) + " " + frame["dtype"]) == pays(verdict)]
    if named.empty:
        return ""
    all_of_them = not verdict.torch["paid"].losses or named.min() <= moved.min()
    return "every size" if all_of_them else f"{tables.number(named.min() / 1e6)} MB"


@functools.cache
def drawn(name):
    """How long ours takes at problems that nobody chose: the median and the worst; empty where none were drawn."""
    from fusebook.cards import OPS
    from fusebook.measure import explore, machine

    if not explore.explorable(OPS[name]) or not explore.path(machine.slug(), name).exists():
        return ""
    told = explore.summary(OPS[name], explore.read(OPS[name], machine.slug())).loc["over torch"]
    return f"drawn: {told['median']:.2f}, worst {told['worst']:.2f}" if told["problems"] else ""


def unchecked():
    """The operators that look at values unless they are told not to, which they are while they are timed."""
    import fusebook

    names = [verdict.op.name for verdict in verdicts()]
    return [name for name in names if "check" in inspect.signature(getattr(fusebook, name, len)).parameters]


def compiled(name):
    """Whether torch.compile was timed beside an operator of ours, at any size."""
    from fusebook.cards import OPS
    from fusebook.page.verdicts import compared

    ways = compared(OPS[name], found()[name], ("torch.compile",))
    return bool((ways["group"].eq("torch.compile") & ways["status"].eq("ok")).any())


def word(verdict):
    """Whether to write it, and the library that is faster where one is."""
    return verdict.word + (f"; {verdict.library} is faster" if verdict.library else "")


def short():
    """The table in a few lines: which operators are worth a kernel, and what to take for the others."""
    told = {
        "Write it, or call it from here": [],
        "A library is as fast at most sizes": [],
        "torch or torch.compile is as fast": [],
        "Look at the size first": [],
    }
    mine, taken, plain, size = told.values()
    for verdict in verdicts():
        when = verdict.word.removeprefix("yes").strip(", ") if verdict.kind == "yes" else ""
        name = f"``{verdict.op.name}``" + (f" ({when})" if when else "")
        by_library = verdict.libraries[verdict.decides]
        if verdict.word.startswith("yes") and 2 * by_library.wins < by_library.points:
            taken.append(f"``{verdict.op.name}`` ({', '.join(verdict.named)})")
        else:
            {"yes": mine, "it": size}.get(verdict.kind, plain).append(name)
    return "\n".join(f"- **{what}:** {', '.join(names)}." for what, names in told.items() if names)


def left_out():
    """A sentence on records that the table cannot show, and one on those of earlier code; empty where there is none."""
    from fusebook import tables

    told = {verdict.op.name for verdict in verdicts()}
    missing = [name for name in found() if name not in told]
    stale = {name: int(frame["stale"].ne("").sum()) for name, frame in found().items()}
    sentences = []
    if names := unchecked():
        sentences.append(
            f"Timed with ``check=False``: {', '.join(names)}. By default they look at indices, labels or numbers "
            "first, and wait for the GPU to do so: :doc:`page 003 <auto_examples/plot_003_launching>` has what that "
            "costs."
        )
    alone = [name for name in found() if name in told and not compiled(name)]
    if alone:
        sentences.append(f"Compared with torch only, as torch.compile was not measured: {', '.join(alone)}.")
    if missing:
        sentences.append(f"Not in the table, since a page compares whole graphs of them: {', '.join(missing)}.")
    if any(stale.values()):
        names = [f"{name} ({n})" for name, n in stale.items() if n]
        sentences.append(
            f"Of {sum(map(len, found().values()))} results {sum(stale.values())} are of code that was changed after "
            f"they were measured; pages name them: {', '.join(names)}."
        )
    # As page 900 counts them: our kernel against every other way of the same arithmetic, libraries among them.
    frames = [tables.alike(frame) for frame in found().values() if frame["variant"].eq("fusebook").any()]
    call = [tables.losses(frame, kind="call") for frame in frames]
    lost, points = sum(map(len, call)), sum(table.attrs["compared"] for table in call)
    if points:
        sentences.append(
            f"By the clock of one call that is waited for, another way is faster than ours at {lost} of {points} "
            "sizes; :doc:`all results <auto_examples/plot_900_all_results>` lists them, with the reason of each."
        )
    return " ".join(sentences)


def table(link=lambda op: f"{page_of(op).document}.html"):
    """The table of verdicts as HTML; `link` makes an operator's address."""
    escape = html.escape
    rows = []
    for verdict in verdicts():
        name = escape(verdict.op.name)
        measured = "".join(
            f"<td><span>{escape(range_)}</span>{f'<small>{escape(counts)}</small>' if counts else ''}"
            f"{f'<small>{more}</small>' if more else ''}"
            f"{f'<small class=fb-names>{escape(names)}</small>' if names else ''}</td>"
            for (range_, counts, names), more in zip(cells(verdict), (drawn(verdict.op.name), "", "", ""), strict=True)
        )
        size, at = problem(verdict), escape(pays(verdict))
        start = f"<span>{size}</span><small>{at}</small>" if size else at
        rows.append(
            f'<tr><th scope="row"><a href="{link(verdict.op)}"><code>{name.replace("_", "_<wbr>")}</code></a></th>'
            f'<td class="fb-word fb-word-{verdict.kind}">{escape(word(verdict))}</td>{measured}<td>{start}</td></tr>'
        )
    op, write, device, caller, plain, every = HEAD
    return (
        '<div class="fb-scroll fb-should-scroll" role="region" tabindex="0" aria-label="Should I write a kernel?">'
        f'<table class="fb-should"><caption>{escape(caption())}</caption><thead>'
        f'<tr><th scope="col" rowspan="2">{op}</th><th scope="col" rowspan="2">{write}</th>'
        f'<th scope="colgroup" colspan="2">{device}, over</th><th scope="colgroup" colspan="2">{caller}, over</th>'
        f'<th scope="col" rowspan="2">{PAYS}</th></tr>'
        f"<tr>{''.join(f'<th scope=col>{name}</th>' for _ in range(2) for name in (plain, every))}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


# The picture ----------------------------------------------------------------------------------------------------------


@functools.cache
def reached():
    """By operator, the shares of the roof that ours and the best other way reach; operators that have any."""
    import answers

    parts = {verdict.op.name: answers.shares(verdict.op, found()[verdict.op.name]) for verdict in verdicts()}
    return {name: part for name, part in parts.items() if len(part)}


def headline():
    """The finding of the picture, in a sentence, and what the marks are."""
    parts = reached()
    name, dates, versions = origins(list(found().values()))
    more = sum(part["ours"].median() > 1.02 * part["other"].median() for part in parts.values())
    less = sum(part["ours"].median() < 0.98 * part["other"].median() for part in parts.values())
    return (
        f"Share of the roof: above the best other way at {more} of {len(parts)} operators, below at {less}",
        f"The roof is the fastest possible time, by what was measured of one {name}. Medians, cold, over the sizes at "
        f"which memory or arithmetic decides, with bars from the worst size to the best. {versions}; {dates}.",
    )


def standings(parts, title, xlabel):
    """How far each operator is from its roof, a row each: medians, with bars from the worst point to the best."""
    from fusebook import plots

    ax = plots.axes(title, xlabel, "", (8.0, 1.5 + 0.36 * len(parts)), rows=True)
    names = list(parts)[::-1]
    ways = ("other", "the best other way", "quack", "o", -0.16), ("ours", "ours", "fusebook", "D", 0.16)
    for column, label, way, marker, up in ways:
        colour = plots.style(way)["color"]
        for y, name in enumerate(names):
            values = 100 * parts[name][column].astype(float)
            ax.plot([values.min(), values.max()], [y + up] * 2, color=colour, linewidth=2, alpha=0.45)
            ax.plot(
                values.median(),
                y + up,
                linestyle="none",
                marker=marker,
                markersize=7,
                color=colour,
                markerfacecolor=colour if column == "ours" else "none",
                label=label if y == 0 else None,
            )
    ax.axvline(100, color=plots.INK, linewidth=1.2)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.set_xlim(left=0)
    ax.set_ylim(-0.6, len(names) - 0.4)
    handles, labels = ax.get_legend_handles_labels()
    plots.legend_below(ax, 0.5, 2, 9, handles[::-1], labels[::-1])  # under the label of the x axis
    return ax.figure


def draw(target, ink=None):
    """Draw the picture into a file; the same records give the same file."""
    import matplotlib as mpl

    from fusebook import plots

    title, _ = headline()
    settings = {"svg.hashsalt": "fusebook", "savefig.transparent": True, "svg.fonttype": "path"}
    with mpl.rc_context(settings):
        figure = standings(reached(), title, f"% of the roof, cold, on one {origins(list(found().values()))[0]}")
        figure.savefig(target, bbox_inches="tight", metadata={"Date": None, "Creator": None})
        mpl.pyplot.close(figure)
    if ink:
        text = target.read_text(encoding="utf-8")
        target.write_text(text.replace(plots.INK, ink), encoding="utf-8")


# Directives -----------------------------------------------------------------------------------------------------------


class _FromRecords(SphinxDirective):
    """What is made from records: read again when one of them, or what they are of, has changed."""

    def watch(self):
        """Name the files to Sphinx."""
        from fusebook.measure import machine

        library = ROOT / "src" / "fusebook"
        for folder, pattern in (
            (machine.RECORDS / machine.slug(), "**/*.csv"),
            (library / "kernels", "*.py"),
            (library / "cards", "*.py"),
            (library / "page", "verdicts.py"),
            (ROOT / "examples", "*.py"),
            (ROOT / "docs" / "_ext", "*.py"),
        ):
            for file in folder.glob(pattern):
                self.env.note_dependency(str(file))


class Should(_FromRecords):
    """The table: should one write a kernel?"""

    def run(self):
        """Ask the records."""
        self.watch()
        if not found():
            return self.parse_text_to_nodes("No GPU is recorded yet.")
        notes = left_out()
        return [
            *self.parse_text_to_nodes(short()),
            nodes.raw("", table(), format="html"),
            *(self.parse_text_to_nodes(notes) if notes else []),
        ]


class Picture(_FromRecords):
    """The picture of all operators."""

    def run(self):
        """Draw it beside what the gallery generates."""
        self.watch()
        if not found() or not reached():
            return []
        folder = Path(self.env.srcdir) / "auto_examples" / "images"
        folder.mkdir(parents=True, exist_ok=True)
        draw(folder / "standings.svg")
        title, below = headline()
        return self.parse_text_to_nodes(
            f".. image:: /auto_examples/images/standings.svg\n   :alt: {title}. {below}\n"
            f"   :class: sphx-glr-single-img\n\n{below}\n"
        )


def verdict_line(page):
    """What the records say about the operators of a page, in a line; empty where it has none."""
    mine = [verdict for verdict in verdicts() if page_of(verdict.op) == page]
    return "; ".join(f"``{verdict.op.name}``: {verdict.word}" for verdict in mine)


class Cards(_FromRecords):
    """The pages, a card each, by section."""

    def run(self):
        """Ask the pages."""
        self.watch()
        lines = []
        thumbs = Path(self.env.srcdir) / "auto_examples" / "images" / "thumb"
        sections = pages.sections()
        sections |= {page.number[0]: "More" for page in pages.pages().values() if page.number[0] not in sections}
        for digit, section in sections.items():
            lines += [f".. rubric:: {section}", "   :class: fb-section", "", ".. grid:: 1 2 3 3", "   :gutter: 3", ""]
            for page in pages.pages().values():
                if page.number[0] != digit:
                    continue
                lines += [f"   .. grid-item-card:: {page.number} · {page.title}", f"      :link: /{page.document}"]
                lines += ["      :link-type: doc", "      :class-card: fb-card"]
                thumb = f"sphx_glr_{page.path.stem}_thumb"
                if file := next(thumbs.glob(f"{thumb}.*"), None):
                    lines += [
                        f"      :img-top: /auto_examples/images/thumb/{file.name}",
                        f"      :img-alt: {page.title}",
                    ]
                told = verdict_line(page)
                lines += ["", f"      {page.purpose.split('. ')[0].rstrip('.').replace(':doc:', '')}.", ""]
                lines += [f"      {told}", ""] if told else []
                lines += ["      .. rst-class:: fb-minutes", "", f"      {page.minutes} minutes", ""]
        return self.parse_text_to_nodes("\n".join(lines))


class Path_(SphinxDirective):
    """The reading path: every page with its readers, its minutes and what to have read before."""

    def run(self):
        """Ask the pages."""
        lines = [".. list-table::", "   :header-rows: 1", "   :class: fb-path", ""]
        lines += ["   * - Page", "     - For", "     - Minutes", "     - To have read"]
        every = pages.pages()
        for page in every.values():
            self.env.note_dependency(str(page.path))
            before = ", ".join(f":doc:`{number} <{every[number].document}>`" for number in page.before)
            lines += [
                f"   * - {page.number} :doc:`/{page.document}`",
                f"     - {page.whom or page.purpose}",
                f"     - {page.minutes}",
            ]
            lines += [f"     - {before.replace('<auto', '</auto') or 'nothing'}"]
        return self.parse_text_to_nodes("\n".join(lines) + "\n")


class RecordSize(SphinxDirective):
    """How many results a record of the package holds, and what it took: what somebody who makes one may expect."""

    def run(self):
        """Ask the records."""
        from fusebook.measure import machine

        for file in (machine.RECORDS / machine.slug()).glob("*.csv"):
            self.env.note_dependency(str(file))
        if not found():
            return []
        frames = list(found().values())
        name = origins(frames)[0]
        right = sum(int(frame["status"].eq("ok").sum()) for frame in frames)
        first = sum(frame["first_call_s"].sum() for frame in frames) / 60
        largest = max((f["read_bytes"] + f["write_bytes"] + f["peak_bytes"].fillna(0)).max() for f in frames) / 1e9
        folder = frames[0].attrs["origin"].path.parent
        size = sum(file.stat().st_size for file in folder.rglob("*.csv")) / 1e6
        text = (
            f"The record of the {name} has {sum(map(len, frames)):,} results of {len(frames)} operators, {right:,} of "
            f"them right and timed, and {size:.1f} MB. Its first calls, which compile, took {first:.0f} minutes "
            f"together; its largest problem needs {largest:.0f} GB of the GPU's memory with inputs and results."
        )
        if took := machine.seconds(folder / "seconds.json"):
            pages_took = sum(took.values()) / 60
            text += f" All pages that measure, which time the same and more, took {pages_took:.0f} minutes there."
        return self.parse_text_to_nodes(text + "\n")


#: Where the source of a site lies that knows no address of its repository.
ARCHIVE = "source/fusebook.zip"


def under_git():
    """Whether the source is a checkout, of which git can make an archive."""
    return (ROOT / ".git").exists() and shutil.which("git") is not None


class SourceLine(SphinxDirective):
    """How to get the source, where its address is known, and to run a page."""

    def run(self):
        """Write the lines."""
        repository = self.config.fusebook_repository
        archived = not repository and under_git()
        lines = [f"git clone {repository} fusebook && cd fusebook"] if repository else []
        lines += ["unzip fusebook.zip && cd fusebook"] if archived else []
        lines += ["python examples/plot_102_softmax.py"]
        text = ".. code-block:: bash\n\n" + "".join(f"   {line}\n" for line in lines)
        if archived:
            text += (
                "\nThis copy of the book does not know the public address of its source, and brings it: "
                f"`fusebook.zip <{ARCHIVE}>`__, all of it as of the commit that these pages were built from.\n"
            )
        elif not repository:
            text += (
                "\nThis copy of the book does not know the public address of its source, so no link stands here: the "
                "source lies where you got the book.\n"
            )
        return self.parse_text_to_nodes(text)


class Begin(SphinxDirective):
    """How to install the library: from the repository where its address is known, from a checkout elsewhere."""

    def run(self):
        """Write the line."""
        return self.parse_text_to_nodes(f".. code-block:: bash\n\n   {install(self.config.fusebook_repository)}\n")


def install(repository=None):
    """The line that installs the library with what its pages need."""
    repository = os.environ.get("FUSEBOOK_REPOSITORY", "").rstrip("/") if repository is None else repository
    return (
        f'pip install "fusebook[book] @ git+{repository}"' if repository else 'pip install ".[book]"  # in a checkout'
    )


def setup(app):
    """Add the directives."""
    for name, directive in {
        "should-i-write": Should,
        "picture-of-all": Picture,
        "page-cards": Cards,
        "reading-path": Path_,
        "install-line": Begin,
        "source-line": SourceLine,
        "record-size": RecordSize,
    }.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
