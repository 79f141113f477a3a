"""How pages are read: code that nobody came for is folded, and all that one may want to show to others has an address.

A claim, a table and a figure get an id made of their own words, so that it stays when numbers change, and a link to it,
as headings have.
"""

import collections
import html
import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

import folding

__all__ = ["FoldCode", "Ids", "fold_code", "link_results"]


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
        if self.env.current_document.docname.startswith("auto_examples/plot_"):
            fold_code(self.document)


def fold_code(doctree):
    """Fold blocks of code, of those that sphinx-gallery wrote: their language has a capital letter."""
    page = folding.Page()
    for block in [b for b in doctree.findall(nodes.literal_block) if b.get("language") == "Python"]:
        parts = []
        for part in page.parts(block.astext()):
            shown = block.copy()
            shown.rawsource = part.text
            shown += nodes.Text(part.text)
            parts.append(fold("", shown, summary=part.summary) if part.summary else shown)
        block.replace_self(parts)


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
    text = re.sub(r'<li class="(fb-(?:claim|statement|exercise)\b[^"]*)">(.*?)</li>', claim, text, flags=re.S)
    return re.sub(r"<table( [^>]*)><caption>(.*?)</caption>", table, text, flags=re.S)


def link_results(app, doctree, docname):
    """Give claims, tables and figures an address."""
    if not docname.startswith("auto_examples/plot_"):
        return
    ids = Ids(doctree.ids)
    regions = collections.Counter()
    for node in list(doctree.findall(nodes.raw)):
        if node.get("format") == "html" and "fb-" in node.astext():
            text = _linked(node.astext(), ids, regions)
            node.children = [nodes.Text(text)]
            node.rawsource = text
    for picture in list(doctree.findall(lambda n: n.tagname == "imgsgnode")):
        name = ids("figure", (picture.get("alt") or "").split(":")[0] or "figure")
        link = nodes.raw("", _link(name, "figure"), format="html")
        picture.replace_self(nodes.container("", picture.deepcopy(), link, ids=[name], classes=["fb-figure"]))


def setup(app):
    """Connect the handlers."""
    app.add_node(fold, html=(visit_fold, depart_fold))
    app.add_post_transform(FoldCode)
    app.connect("doctree-resolved", link_results)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
