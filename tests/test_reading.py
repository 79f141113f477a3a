"""How the site presents pages: what is folded, what has an address, what is published for download."""

import re
from pathlib import Path

import docutils.core
from docutils import nodes
from sphinx import addnodes

import pages
import reading
import reference

ROOT = Path(__file__).resolve().parents[1]


def test_a_word_of_the_field_leads_to_the_glossary_where_it_is_first_used_and_only_there():
    page = docutils.core.publish_doctree(
        "Warp\n====\n\n*warp* Two warps, an L2\ncache, ``TMA``, roofs.\n\nA warp, a roof.\n"
    )
    paragraph = list(page.findall(nodes.paragraph))[1]
    given = addnodes.pending_xref("", nodes.inline("", "tiles"), reftype="term", reftarget="tile")
    again = addnodes.pending_xref("", nodes.inline("", "the warp"), reftype="term", reftarget="warp")
    paragraph += [given, again]
    page.insert(0, nodes.container("", nodes.paragraph("", "an L2 cache"), classes=["fb-box"]))
    reading.link_words(page, "auto_examples/plot_101_elementwise")
    assert paragraph.children[1:] and not list(page[0].findall(addnodes.pending_xref))
    links = list(page.findall(addnodes.pending_xref))
    assert [link["reftarget"] for link in links] == ["warp", "L2 cache", "roof", "tile"]
    assert links[0].astext() == "warps" and page.astext().endswith("A warp, a roof.tilesthe warp")


def test_words_that_lead_to_the_glossary_stand_in_it():
    glossary = (ROOT / "docs" / "glossary.rst").read_text(encoding="utf-8")
    assert [word for word in reading.WORDS if f"\n   {word}\n" not in glossary] == []


CLAIM = (
    '<li class="fb-claim {came}"><span class="fb-mark" role="img" aria-label="t">✓</span> <span>'
    '<span class="fb-verdict">{came}:</span> Ours takes {number} us <span class="fb-detail">(all 3)</span></span></li>'
)
TABLE = '<div class="fb-scroll" role="region" tabindex="0" aria-label="T"><table class="fb-table"><caption>T</caption>'


def linked(*texts):
    document = docutils.core.publish_doctree("")
    for text in texts:
        document += nodes.raw("", text, format="html")
    reading.link_results(None, document, "auto_examples/plot_102_softmax")
    return document.astext()


def test_claims_and_tables_have_addresses_that_outlive_their_numbers():
    first = linked(CLAIM.format(came="fb-true", number="3.1"), TABLE)
    assert 'id="claim-ours-takes-us"' in first and 'href="#claim-ours-takes-us"' in first
    assert '<table id="table-t" class="fb-table">' in first and 'href="#table-t"' in first
    assert 'id="claim-ours-takes-us"' in linked(CLAIM.format(came="fb-false", number="4"))


def test_no_two_results_of_a_page_have_one_address_or_one_name():
    shown = linked(TABLE, TABLE)
    assert 'id="table-t"' in shown and 'id="table-t-2"' in shown
    assert 'aria-label="T"' in shown and 'aria-label="T (2)"' in shown


SOURCE = (
    '<div class="fb-source"><p class="fb-source-title"><code>a.b</code>, lines 1 to {last}</p>'
    '<div class="highlight-python notranslate"><div class="highlight"><pre>x</pre></div></div></div>'
)


def test_long_sources_are_folded_and_short_ones_are_not():
    short, long = SOURCE.format(last=40), SOURCE.format(last=105)
    assert linked(short) == short
    both = linked(short + long)
    assert both == f'{short}<details class="fb-fold"><summary><code>a.b</code>, its 105 lines</summary>{long}</details>'


def test_every_page_has_tags_and_the_index_holds_them():
    for page in pages.pages().values():
        assert reading.tags(page.path.read_text(encoding="utf-8")), page.path.name
    shown = reading.index_tags("Title\n=====\n\nText\n", ["L2", "clocks"])
    assert shown.startswith("Title\n=====\n\n.. index:: ! L2, ! clocks\n\nText")


def test_each_kernel_has_its_page_and_the_harness_has_none(tmp_path):
    assert reference.pages_of("fusebook.softmax", tmp_path) == ["102"]
    assert reference.pages_of("fusebook.exp", tmp_path) == ["101"]
    assert reference.pages_of("fusebook.embedding_backward", tmp_path) == ["103"]
    assert reference.pages_of("fusebook.lesson.Page", tmp_path) == []


def test_the_gallery_has_a_heading_for_each_section():
    tooltip = 'class="sphx-glr-thumbcontainer" tooltip="After plot_001_using_the_gpu."'
    thumb = f".. raw:: html\n\n    <div {tooltip}>\n\n.. image:: x\n    :alt:\n\n"
    known = list(pages.pages().values())
    text = "Pages\n=====\n\nThe hundreds digit: a table\n\n.. raw:: html\n\n  <div id='sg-tag-list'></div>\n\n"
    text += '.. raw:: html\n\n    <div class="sphx-glr-thumbnails">\n\n.. thumbnail-parent-div-open\n\n'
    text += "".join(
        f'{thumb}  :doc:`/{p.document}`\n\n      <div class="sphx-glr-thumbnail-title">{p.title}</div>\n\n'
        for p in known
    )
    text += ".. thumbnail-parent-div-close\n\n.. raw:: html\n\n    </div>\n\n.. toctree::\n\n"
    text += "".join(f"   /{p.document}\n" for p in known)
    shown = reading.in_sections(text, pages.sections(), pages.pages())
    heads = [
        about.partition(":")[0] for digit, about in pages.sections().items() if any(p.number[0] == digit for p in known)
    ]
    places = [shown.index(f"{head}\n{'-' * len(head)}\n") for head in heads]
    assert places == sorted(places) and "hundreds digit" not in shown
    for page in known:
        assert f'thumbnail-title">{page.number} {page.title}' in shown
        assert f":alt: A figure of the page {page.title}" in shown
        assert f"   {page.number} {page.title} </{page.document}>" in shown


def test_the_book_has_an_order_and_new_pages_come_last(tmp_path):
    (tmp_path / "order.txt").write_text("102 softmax\n305\n002 measuring\n")
    for name in ("plot_002_a", "plot_101_b", "plot_102_c"):
        (tmp_path / f"{name}.py").write_text('"""A page"""\n')
    assert [path.stem for path in pages.scripts(tmp_path)] == ["plot_102_c", "plot_002_a", "plot_101_b"]
    order = pages.BookOrder(str(tmp_path))
    assert sorted(["plot_101_b.py", "plot_102_c.py"], key=order) == ["plot_102_c.py", "plot_101_b.py"]
    listed = re.findall(r"^\d{3}", (pages.EXAMPLES / "order.txt").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)) and set(pages.pages()) <= set(listed)
