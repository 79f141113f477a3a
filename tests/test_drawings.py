"""Drawings: well-formed, true to their data, and told in words."""

from xml.etree import ElementTree

import pytest

from fusebook.lesson import _draw

SVG = "{http://www.w3.org/2000/svg}"


def told(drawing):
    """The words for who cannot see a drawing, below its caption."""
    return repr(drawing).partition("\n")[2]


def parts(drawing, tag):
    """Elements of a drawing, which must be XML."""
    figure = ElementTree.fromstring(drawing._repr_html_())
    (svg,) = figure.iter(f"{SVG}svg")
    assert svg.get("aria-label") == told(drawing)
    return list(svg.iter(SVG + tag))


def test_every_update_reaches_its_row_or_none():
    drawing = _draw.owners("Owners", [3, -1, 3, 1], 5)
    assert len(parts(drawing, "line")) == 3
    assert "row 3 is u0 + u2" in told(drawing) and "row 0 is zeros" in told(drawing)
    assert told(drawing).endswith("masked, and nowhere: update 1.")


def test_lanes_are_told_in_their_order_and_waiting_is_drawn_empty():
    spans = {"one": [(0, 4, "works"), (4, 5, "waits")], "two": [(2, 6, "adds <up>")]}
    drawing = _draw.lanes("Lanes", spans, [("one", 4, "two", 5)])
    assert told(drawing) == "one: works, then waits; two: adds <up>; an arrow from one to two."
    assert [box.get("fill") == "none" for box in parts(drawing, "rect")] == [False, True, False]
    assert repr(drawing).startswith("Lanes\n")
    with pytest.raises(KeyError, match="three"):
        _draw.lanes("Lanes", spans, [("one", 4, "three", 5)])


def test_no_word_leaves_its_drawing():
    spans = {"second product": [(0, 4, "multiplies"), (4, 5, "waits")]}
    made = (
        _draw.lanes("", spans),
        _draw.owners("", [0, 1, 2, 0, 0], 3),
    )
    for drawing in made:  # a wide sans serif of 12 pixels
        right = float(ElementTree.fromstring(drawing._repr_html_())[0].get("viewBox").split()[2])
        for text in parts(drawing, "text"):
            x, wide = float(text.get("x")), 7.3 * len(text.text)
            shift = {"start": 0, "middle": wide / 2, "end": wide}[text.get("text-anchor")]
            assert 0 <= x - shift and x - shift + wide <= right, text.text
