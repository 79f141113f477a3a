"""How pages are read: folds, addresses, sections, and what the search finds first.

The code of exercises is folded. A claim, a table and a figure get an id made of their own words, so that it stays
when numbers change, and a link to it, as headings have. The gallery has a heading for each section, and each page is
called by its number. What a page is about, its tags, is in the index, where the search looks first. A word of the
field leads to the glossary where a page first uses it.
"""

import ast
import collections
import html
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform

import front
import lessons
import pages

__all__ = ["FoldCode", "Ids", "in_sections", "index_tags", "link_results", "link_words", "tags"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class fold(nodes.General, nodes.Element):
    """Something closed, under a line that says what is in it."""


def visit_fold(self, node):
    """Begin what is closed."""
    self.body.append(f'<details class="fb-code"><summary>{html.escape(node["summary"])}</summary>\n')


def depart_fold(self, node):
    """End what is closed."""
    self.body.append("</details>\n")


class FoldCode(SphinxPostTransform):
    """Fold the code of a page that is not what its reader came for."""

    default_priority = 1  # sphinx-gallery turns code into links at 5
    formats = ("html",)

    def run(self, **kwargs):
        """Put each block of code into parts."""
        if lessons.of_lesson_api(self.env.docname):
            lessons.tidy_code(self.document)


class Ids:
    """Ids of one page, each made of words and given once."""

    def __init__(self, taken=()):
        self.taken = set(taken)

    def __call__(self, kind, text):
        """An id that begins with `kind`.

        Parameters
        ----------
        kind : str
        text : str
            HTML. Numbers are left out: they change with every record.
        """
        words = re.findall(r"[^\W\d_]+", html.unescape(re.sub(r"<[^>]*>", " ", text)).lower())
        base = "-".join([kind, *words])[:70].rstrip("-")
        name, n = base, 1
        while name in self.taken:
            n += 1
            name = f"{base}-{n}"
        self.taken.add(name)
        return name


def _link(name, what):
    return f'<a class="headerlink" href="#{name}" title="Link to this {what}">#</a>'


def _linked(text, ids, regions):
    """The HTML of a result with ids and links."""

    def claim(match):
        words = re.sub(r'^.*class="fb-verdict">[^<]*</span>', "", match[2]).split('<span class="fb-detail"')[0]
        name = ids("claim", words)  # not of the verdict, nor of what is counted: both may change
        return f'<li id="{name}" class="{match[1]}">{match[2]} {_link(name, "claim")}</li>'

    def table(match):
        name = ids("table", match[2].split("<span")[0])
        return f'<table id="{name}"{match[1]}><caption>{match[2]} {_link(name, "table")}</caption>'

    def region(match):  # no two of one name on a page: who hears them could not tell them apart
        told = match[1] if regions[match[1]] == 0 else f"{match[1]} ({regions[match[1]] + 1})"
        regions[match[1]] += 1
        return f'role="region" tabindex="0" aria-label="{told}"'

    text = re.sub(r'role="region" tabindex="0" aria-label="([^"]*)"', region, text)
    text = re.sub(r'<li class="(fb-(?:claim|target|statement|exercise)\b[^"]*)">(.*?)</li>', claim, text, flags=re.S)
    return re.sub(r"<table( [^>]*)><caption>(.*?)</caption>", table, text, flags=re.S)


#: Sources of the library that are longer than this many lines are folded.
LONG = 60


def _folded(text):
    """The HTML of a page's results with long sources closed."""

    def source(match):
        first, last = int(match[3]), int(match[4])
        if last - first < LONG:
            return match[0]
        told = f"{match[2]}, its {last - first + 1} lines"
        return f'<details class="fb-fold"><summary>{told}</summary>{match[0]}</details>'

    return re.sub(
        r'<div class="fb-source">(<p class="fb-source-title">(<code>[^<]*</code>), lines (\d+) to (\d+)</p>.*?</pre>)'
        r"\s*</div>\s*</div>\s*</div>",
        source,
        text,
        flags=re.S,
    )


def link_results(app, doctree, docname):
    """Give claims, tables and figures an address."""
    if not docname.startswith("auto_examples/plot_"):
        return
    ids = Ids(doctree.ids)
    regions = collections.Counter()
    for node in list(doctree.findall(nodes.raw)):
        if node.get("format") == "html" and "fb-" in node.astext():
            text = _folded(_linked(node.astext(), ids, regions))
            node.children = [nodes.Text(text)]
            node.rawsource = text
    for picture in list(doctree.findall(lambda n: n.tagname == "imgsgnode")):
        name = ids("figure", (picture.get("alt") or "").split(":")[0] or "figure")
        link = nodes.raw("", _link(name, "figure"), format="html")
        picture.replace_self(nodes.container("", picture.deepcopy(), link, ids=[name], classes=["fb-figure"]))


#: Words of the glossary that mean the same wherever they stand. Others, such as "program", a page links itself.
WORDS = (
    *("all-reduce", "arithmetic intensity", "atomic operation", "autotuning", "barrier", "coalescing", "CUDA graph"),
    *("dispatcher", "eager", "elementwise", "epilogue", "fake tensor", "fusion", "graph break", "grid", "HBM"),
    *("Inductor", "JIT", "kernel", "L2 cache", "launch overhead", "LL protocol", "master weights", "multiprocessor"),
    *("NVML", "occupancy", "online softmax", "persistent kernel", "pinned memory", "pointer table"),
    *("programmatic dependent launch", "rank", "roof", "roofline", "sector", "shared memory", "split-K"),
    *("stochastic rounding", "stream-K", "symmetric memory", "tensor core", "TF32", "tile", "TMA", "warp"),
    *("wave quantization", "Liger", "quack"),
)
_LONGEST_FIRST = "|".join(sorted(map(re.escape, WORDS), key=len, reverse=True))
_WORD = re.compile(rf"(?<![\w-])({_LONGEST_FIRST})s?(?![\w-])", flags=re.IGNORECASE)


def link_words(doctree, docname):
    """Link words of the field to the glossary, which sets them in bold: each where a page first uses it, only there.

    The box under the title, which has names from the record, is left as it is.

    Parameters
    ----------
    doctree : docutils.nodes.document
        As it was read: links are still to be resolved.
    docname : str
    """
    known = {word.lower(): word for word in WORDS}
    seen = set()
    boxed = {p for box in doctree.findall(nodes.container) if "fb-box" in box["classes"] for p in box.findall()}
    for paragraph in [p for p in doctree.findall(nodes.paragraph) if p not in boxed]:
        for child in list(paragraph.children):
            if isinstance(child, addnodes.pending_xref) and child.get("reftype") == "term":
                if child["reftarget"].lower() in seen:
                    child.replace_self(nodes.Text(child.astext()))
                seen.add(child["reftarget"].lower())
            elif isinstance(child, nodes.Text):
                parts, done = [], 0
                for match in _WORD.finditer(child.astext().replace("\n", " ")):
                    if match[1].lower() not in seen:
                        seen.add(match[1].lower())
                        parts += [nodes.Text(child.astext()[done : match.start()]), _term(known, match, docname)]
                        done = match.end()
                if parts:
                    child.parent.replace(child, [*parts, nodes.Text(child.astext()[done:])])


def _term(known, match, docname):
    """A link to the glossary that is still to be resolved."""
    shown = nodes.inline("", match[0], classes=["xref", "std", "std-term"])
    about = {"refdomain": "std", "reftype": "term", "reftarget": known[match[1].lower()], "refdoc": docname}
    return addnodes.pending_xref("", shown, refexplicit=True, refwarn=True, **about)


# The gallery, and the index


def tags(page):
    """What a page is about, by its comment ``# sphinx_gallery_tags = [...]``.

    Parameters
    ----------
    page : str
        The text of the page.

    Returns
    -------
    list of str
    """
    found = re.search(r"^# sphinx_gallery_tags = (\[.*\])$", page, flags=re.MULTILINE)
    return ast.literal_eval(found[1]) if found else []


def index_tags(text, found):
    """The source of a page with index entries right below its title."""
    entries = ", ".join(f"! {tag}" for tag in found)
    return re.sub(r"^(={3,}\n)", rf"\1\n.. index:: {entries}\n", text, count=1, flags=re.MULTILINE)


def in_sections(text, sections, known):
    """The source of the gallery's index with a heading for each section, numbers of pages, and texts of pictures.

    Parameters
    ----------
    text : str
        As sphinx-gallery wrote it.
    sections : dict of str to str
        What a page's first digit means: a title, a colon, and more.
    known : dict of str to pages.Page
        By number.
    """
    text = re.sub(r"^The hundreds digit.*?(?=^\.\. raw)", "", text, flags=re.MULTILINE | re.DOTALL)
    opened, closed = (f".. thumbnail-parent-div-{word}\n" for word in ("open", "close"))
    head, rest = text.split(opened)
    head = head[: head.rindex(".. raw:: html")]
    thumbs, tail = rest.split(closed)
    tail = tail[tail.index("</div>") + len("</div>") :]
    parts = collections.defaultdict(list)
    for thumb in re.split(
        r'(?=^\.\. raw:: html\n\n    <div class="sphx-glr-thumbcontainer")', thumbs, flags=re.MULTILINE
    ):
        if found := re.search(r":doc:`/auto_examples/plot_(\d{3})_", thumb):  # the tooltip may name another page
            title = known[found[1]].title
            thumb = thumb.replace(":alt:", f":alt: A figure of the page {title}")
            thumb = thumb.replace('thumbnail-title">', f'thumbnail-title">{found[1]} ')
            parts[found[1][0]].append(thumb)
    middle = ""
    for digit, shown in sorted(parts.items()):
        title, _, about = sections[digit].partition(": ")
        about = f"{about[0].upper()}{about[1:]}.\n\n" if about else ""
        middle += f"{title}\n{'-' * len(title)}\n\n{about}"
        middle += '.. raw:: html\n\n    <div class="sphx-glr-thumbnails">\n\n'
        middle += "".join(shown) + "\n.. raw:: html\n\n    </div>\n\n"
    tail = re.sub(
        r"^   /auto_examples/(plot_(\d{3})_\w+)$",
        lambda m: f"   {m[2]} {known[m[2]].title} </auto_examples/{m[1]}>",
        tail,
        flags=re.MULTILINE,
    )
    return head + middle + tail


def prepare(app, docname, source):
    """Change what sphinx-gallery wrote, before it is read."""
    if docname == "auto_examples/index":
        if sections := pages.sections():
            source[0] = in_sections(source[0], sections, pages.pages())
    elif docname.startswith("auto_examples/plot_"):
        text = (EXAMPLES / f"{docname.removeprefix('auto_examples/')}.py").read_text(encoding="utf-8")
        found = tags(text) + [str(size) for size in front.sizes() if docname == front.LOOK_UP]
        if found:
            source[0] = index_tags(source[0], found)


def read(app, doctree):
    """Change a page that was read."""
    if app.env.docname.startswith("auto_examples/plot_"):
        link_words(doctree, app.env.docname)


def setup(app):
    """Connect the handlers."""
    app.add_node(fold, html=(visit_fold, depart_fold))
    app.add_post_transform(FoldCode)
    app.connect("source-read", prepare)
    app.connect("doctree-read", read)
    app.connect("doctree-resolved", link_results)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
