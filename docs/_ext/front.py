"""The front page: what records say about each operator, one picture of all, the pages as cards, and how to begin.

Everything is made from the records of the GPU that is replayed, and from the pages; nothing is typed that data could
decide. The README shows the same in short.
"""

import functools
import html
import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import pages

__all__ = [
    *("ABOVE", "Begin", "Cards", "Doors", "Picture", "RecordSize", "SourceLine", "Traffic", "Use", "Worth", "above"),
    *("draw", "form", "found", "headline", "install", "of_kind", "setup", "sizes", "table", "uses"),
]

ROOT = Path(__file__).resolve().parents[2]

#: The page on which a reader looks up one result.
LOOK_UP = "auto_examples/plot_900_all_results"
#: Minutes of the path that *Learn* names.
HOUR = 60
#: Up to which share of memory an operator is worth a call that is no faster.
MEMORY = 0.8
#: Why an operator can be above its roofline by more than 2 %.
ABOVE = {
    "concat_gemm": "in float32 it adds three products in TF32, and its roofline is the rate of torch's float32 matmul",
    "swiglu": "in float32 it adds three products in TF32, and its roofline is the rate of torch's float32 matmul",
    "softmax": "at one size quack copies slightly faster than the code that measured the rate",
    "kmeans_assign": "with two coordinates it reads twice the bytes that it writes, slightly faster than the code that "
    "measured the rate; so does torch.compile in float64",
}


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


def page_of(op):
    """The page that tells of an operator."""
    import answers

    return pages.pages()[f"{answers.page_of(op):03}"]


@dataclass(frozen=True)
class Use:
    """What a reader sees of an operator: see `uses`."""

    verdict: object
    gain: str
    spread: str
    gpu: str
    memory: str
    slower: str
    library: str
    kind: str

    @property
    def call(self):
        """How Fusebook is called."""
        from fusebook.cards._calls import call

        return call(self.verdict.op, "fusebook").partition("; ")[0]


def times(ratio):
    """Another's time over that of Fusebook as a factor: 1.35x."""
    return "" if ratio != ratio else f"{1 / ratio:.2f}x" if 1 / ratio < 10 else f"{1 / ratio:.0f}x"


@functools.cache
def uses():
    """A row for each operator, the largest gain first; its kind is ``worth``, ``small`` or ``no``."""
    import answers

    rows = []
    for verdict in verdicts():
        standing, library = verdict.torch[verdict.decides], verdict.libraries[verdict.decides]
        if not standing.points:
            continue
        memory = answers.memory(verdict.op, found()[verdict.op.name], verdict.decides)
        saves = memory.ratio is not None and memory.ratio <= MEMORY and verdict.kind == "equal"
        kind = "worth" if verdict.kind == "yes" or saves else "small" if verdict.kind == "small" else "no"
        named = ", ".join(name.partition(" (")[0] for name in verdict.named)
        faster = f"{times(library.median)} ({named})" if library.points else ""
        rows.append(
            Use(
                verdict,
                times(standing.median) + (", for its memory" if saves else ""),
                "one size" if standing.points == 1 else f"{times(standing.most)} to {times(standing.least)}",
                times(verdict.torch["cold"].median),
                memory.text,
                f"{standing.losses} of {standing.points}" if standing.points > 1 else "one size only",
                faster,
                kind,
            )
        )
    return sorted(rows, key=lambda row: row.verdict.torch[row.verdict.decides].median)


def of_kind(kind):
    """The operators of a kind, with their gains, as a list in a sentence."""
    return ", ".join(f"``{row.verdict.op.name}`` ({row.gain})" for row in uses() if row.kind == kind)


HEAD = "Operator", "Gain", "GPU time alone", "Memory", "Slower at", "Gain over libraries"


def table(link=lambda op: f"{page_of(op).document}.html"):
    """The operators that are worth a call, as HTML; `link` makes an operator's address."""
    escape = html.escape
    rows = [
        f'<tr><th scope="row"><a href="{link(row.verdict.op)}"><code>'
        f"{escape(row.verdict.op.name).replace('_', '_<wbr>')}</code></a>"
        f"<small><code>{escape(row.call)}</code></small></th>"
        f'<td class="fb-word fb-word-yes">{escape(row.gain)}<small>{escape(row.spread)}</small></td>'
        f"<td>{row.gpu}</td><td>{escape(row.memory)}</td><td>{escape(row.slower)}</td>"
        f"<td>{escape(row.library)}</td></tr>"
        for row in uses()
        if row.kind == "worth"
    ]
    name, dates, versions = origins(list(found().values()))
    caption = f"Largest gain first. {name}; {versions}; {dates}"
    heads = "".join(f'<th scope="col">{head}</th>' for head in HEAD)
    return (
        '<div class="fb-scroll fb-should-scroll" role="region" tabindex="0" aria-label="Operators worth calling">'
        f'<table class="fb-should fb-use"><caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def sizes():
    """The numbers of at least four digits that are sizes of a recorded problem: what a reader may search for."""
    from fusebook import tables

    every = (frame[tables.dims(frame)].select_dtypes("number") for frame in found().values())
    return sorted({int(v) for sizes in every for v in sizes.to_numpy().ravel() if v == v and v >= 1000})


# The picture ----------------------------------------------------------------------------------------------------------


@functools.cache
def reached():
    """By operator, the shares of the roofline that Fusebook and the best other reach; operators that have any."""
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
        f"Share of the roofline: above the best other implementation at {more} of {len(parts)} operators, below at "
        f"{less}",
        f"The roofline is the shortest time that the measured bandwidth and matmul rate of one {name} allow. Marks are "
        "medians of GPU time with a cold L2, at the sizes at which memory or arithmetic decides. Bars go from the "
        f"worst size to the best. {versions}; {dates}.",
    )


def above():
    """Why bars reach more than 100 % of the roofline, in a sentence for each operator."""
    most = {name: float(part[["ours", "other"]].max(axis=None)) for name, part in reached().items()}
    said = [
        f"``{name}`` reaches {100 * share:.0f} %: {ABOVE.get(name, 'we have not found out why')}."
        for name, share in most.items()
        if share > 1.02
    ]
    return " ".join(["**Above 100 %:** the measured ceilings vary by up to 2 %.", *said])


def standings(parts, title, xlabel):
    """How far each operator is from its roofline, a row each: medians, with bars from the worst point to the best."""
    from fusebook import plots

    ax = plots.axes(title, xlabel, "", (8.0, 1.5 + 0.36 * len(parts)), rows=True)
    names = list(parts)[::-1]
    ways = ("other", "the best other", "quack", "o", -0.16), ("ours", "Fusebook", "fusebook", "D", 0.16)
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
        figure = standings(reached(), title, f"% of the roofline, on one {origins(list(found().values()))[0]}")
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


class Worth(_FromRecords):
    """The operators that are worth a call, and what to do about the others."""

    def run(self):
        """Ask the records."""
        self.watch()
        if not found():
            return self.parse_text_to_nodes("No GPU is recorded yet.")
        lists = [("Small gain, below 1.1x", of_kind("small")), ("Use torch or torch.compile", of_kind("no"))]
        below = "\n".join(f"- **{what}:** {names}." for what, names in lists if names)
        return [nodes.raw("", table(), format="html"), *self.parse_text_to_nodes(below)]


class Doors(_FromRecords):
    """Three doors: a path of one hour, the operators worth calling, and a form that looks one up."""

    def run(self):
        """Ask the pages and the records."""
        self.watch()
        steps, minutes = [], 0
        for page in pages.pages().values():
            if minutes + page.minutes > HOUR:
                break
            minutes += page.minutes
            steps.append(
                f'<a href="{page.document}.html">{page.number} {html.escape(page.title.partition(":")[0])}</a>'
            )
        rows = [row for row in uses() if row.kind == "worth"] if found() else []
        best = "".join(
            f'<li><a href="{page_of(row.verdict.op).document}.html"><code>{row.verdict.op.name}</code></a> '
            f"{row.gain}</li>"
            for row in rows[:4]
        )
        text = (
            '<div class="fb-doors">'
            f"<section><h2>Learn</h2><p>New to GPU kernels? A path of {minutes} minutes:</p>"
            f"<p>{' → '.join(steps)}</p></section>"
            f'<section><h2>Use</h2><p><a href="#use">{len(rows)} operators worth calling</a>, largest gain first:</p>'
            f"<ul>{best}</ul></section>"
            f"<section><h2>Look up</h2><p>Time, memory and call of each implementation:</p>{form()}</section></div>"
        )
        return [nodes.raw("", text, format="html")]


def form():
    """A form that searches the table of *Look up*."""
    from fusebook.measure import machine

    def choice(label, names):
        options = "".join(f"<option>{html.escape(name)}</option>" for name in names)
        return f'<label>{label} <select name="q"><option value="">any</option>{options}</select></label>'

    gpus = [machine.recorded(slug).name.removeprefix("NVIDIA ").partition(" ")[0] for slug in machine.slugs()]
    return (
        f'<form action="{LOOK_UP}.html" method="get">{choice("operator", sorted(found()))}'
        '<label>size <input name="q" placeholder="128256" size="7"></label>'
        f"{choice('dtype', ('float32', 'bfloat16', 'float16', 'float64'))}{choice('GPU', gpus)}"
        '<button>Look up</button></form><p class="fb-other"><a href="gpus.html">Another GPU?</a></p>'
    )


class Traffic(_FromRecords):
    """What eager code and one kernel move: the picture of the softmax lesson, and the gain that was measured."""

    def run(self):
        """Count what eager code moves."""
        import torch

        import fusebook
        from fusebook import tables
        from fusebook.cards.softmax import SOFTMAX
        from fusebook.lesson import _checks, picture

        self.watch()
        gain, steps, _ = _checks.predicted(SOFTMAX, fusebook.softmax_eager, 2, torch.float32)
        caption = f"Softmax of an M x N matrix, in elements. The traffic predicts that fusion gains {gain:.1f}x"
        if (frame := record_of("softmax")) is not None:
            rows = tables.where(frame, zone="memory")
            caption += f"; measured: {tables.ratio(rows, 'eager', 'fusebook').median():.1f}x, the median of large sizes"
        shown = picture.segments(f"{caption}.", {"eager": steps[:-1], "fused": steps[-1:]}, "MN")
        return [nodes.raw("", shown._repr_html_(), format="html")]


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
            f"   :class: sphx-glr-single-img\n\n{below}\n\n{above()}\n"
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
                lines += ["", f"      {re.split(r'(?<=[.?]) ', page.purpose)[0].replace(':doc:', '')}", ""]
                lines += [f"      {told}", ""] if told else []
                lines += ["      .. rst-class:: fb-minutes", "", f"      {page.minutes} minutes", ""]
        return self.parse_text_to_nodes("\n".join(lines))


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
    """How to install the library, and to call it."""

    def run(self):
        """Write the lines."""
        lines = [install(), "", "import fusebook", "y = fusebook.softmax(x, dim=-1)"]
        text = ".. code-block:: python\n\n" + "".join(f"   {line}\n" for line in lines)
        if not os.environ.get("FUSEBOOK_URL") and importlib.util.find_spec("hatchling"):
            text += f"\nDownload `the wheel <wheel/{wheel()}>`__ first.\n"
        return self.parse_text_to_nodes(f"{text}\n{NEEDS}\n")


#: Below the lines that install and call.
NEEDS = """It needs Linux, PyTorch, Triton and, for compiled kernels, an NVIDIA GPU of compute capability 8.0 or later
(Ampere). :doc:`api` has every function."""


def wheel():
    """The file name of the library's wheel."""
    import fusebook

    return f"fusebook-{fusebook.__version__}-py3-none-any.whl"


def install():
    """The line that installs the library: the wheel of the site, by its address where that is known."""
    url = os.environ.get("FUSEBOOK_URL", "").rstrip("/")
    return f"pip install {url}/wheel/{wheel()}" if url else f"pip install ./{wheel()}"


def setup(app):
    """Add the directives."""
    for name, directive in {
        "doors": Doors,
        "worth-calling": Worth,
        "traffic": Traffic,
        "picture-of-all": Picture,
        "page-cards": Cards,
        "install-and-call": Begin,
        "source-line": SourceLine,
        "record-size": RecordSize,
    }.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
