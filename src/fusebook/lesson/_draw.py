"""Drawings where words fail, made from data: SVG in the colour of the text around it, which serves both themes."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from fusebook.lesson._show import Shown, rich

__all__ = ["lanes", "owners"]

#: So narrow that words are read on a telephone, too, where all of it is shrunk to the width of the text.
_WIDTH = 440
_BLUE, _AMBER = "#0a84d6", "#c98500"  # told apart without red and green, and seen on white and on near-black


def _drawing(caption: str, told: Sequence[str], height: float, parts: Sequence[str], width: float = _WIDTH) -> Shown:
    """An SVG with its caption, and with words for who cannot see it, in reading order."""
    alt = f"{'; '.join(told)}."
    made = (
        f'<figure class="fb-drawing"><svg viewBox="0 0 {width:g} {height:g}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg" aria-label="{html.escape(alt)}" font-size="12" '
        f'style="max-width: {1.25 * width:g}px; width: 100%; color: inherit">{"".join(parts)}</svg>'
        f"<figcaption>{rich(caption)}</figcaption></figure>"
    )
    return Shown(made, f"{caption}\n{alt}")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{html.escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str, filled: bool = True) -> str:
    """A box whose frame is solid and whose inside is pale, so that text is read on it in either theme."""
    inside = f'fill="{colour}" fill-opacity="0.25"' if filled else 'fill="none" stroke-dasharray="3 3"'
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" {inside} stroke="{colour}"/>'
    )


def _arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    """A line with a head of its own: a marker would need an id that no other drawing of the page has."""
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    left = f"{x1 - 8 * dx + 4 * dy:.1f},{y1 - 8 * dy - 4 * dx:.1f}"
    right = f"{x1 - 8 * dx - 4 * dy:.1f},{y1 - 8 * dy + 4 * dx:.1f}"
    return (
        f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="currentColor"/>'
        f'<polygon points="{x1:.1f},{y1:.1f} {left} {right}" fill="currentColor"/>'
    )


def lanes(
    caption: str,
    spans: Mapping[str, Sequence[tuple[float, float, str]]],
    arrows: Sequence[tuple[str, float, str, float]] = (),
) -> Shown:
    """Who does what when: a lane for each actor, time from left to right, arrows from one lane to another.

    Parameters
    ----------
    spans : mapping of str to sequence of (float, float, str)
        For each actor the begin, the end and the name of what it does, in any unit of time. Where it waits, by the
        first word of that name, the span is drawn empty.
    arrows : sequence of (str, float, str, float)
        From an actor at a time to an actor at a time.

    Raises
    ------
    KeyError
        Where an arrow names an actor that has no lane.
    """
    left, top, step, bar = 122.0, 8.0, 42.0, 26.0
    last = max(end for row in spans.values() for _, end, _ in row)
    scale = (_WIDTH - left - 8) / last
    at = {name: top + step * i for i, name in enumerate(spans)}
    parts, told = [], []
    for name, row in spans.items():
        parts.append(_text(left - 10, at[name] + 18, name, "end"))
        for begin, end, what in row:
            idle = what.startswith("waits")
            x, width = left + scale * begin, scale * (end - begin)
            parts.append(_box(x, at[name], width, bar, _AMBER if idle else _BLUE, not idle))
            parts.append(_text(x + width / 2, at[name] + 18, what, "middle"))
        told.append(f"{name}: " + ", then ".join(what for _, _, what in row))
    for source, begin, target, end in arrows:
        down = at[target] > at[source]
        y0 = at[source] + (bar if down else 0)
        y1 = at[target] + (0 if down else bar)
        parts.append(_arrow(left + scale * begin, y0, left + scale * end, y1))
        told.append(f"an arrow from {source} to {target}")
    height = top + step * len(spans) + 12
    parts.append(_arrow(left, height - 14, _WIDTH - 8, height - 14))
    parts.append(_text(left - 10, height - 9, "time", "end"))
    return _drawing(caption, told, height, parts)


def owners(caption: str, keys: Sequence[int], rows: int) -> Shown:
    """Which update goes to which row of the output, and which rows are zeros.

    Parameters
    ----------
    keys : sequence of int
        The row of each update; -1 where it is masked and goes nowhere.
    rows : int
        Rows of the output.
    """
    step, bar, left, right, width = 25.0, 20.0, 56.0, 236.0, 66.0
    height = step * max(len(keys), rows) + 12
    shift = (height - 12 - step * rows) / 2  # the rows stand in the middle beside the updates
    parts, told = [], []
    for i, key in enumerate(keys):
        y = 4 + step * i
        gone = key == -1
        parts.append(_box(left, y, width, bar, _BLUE, not gone))
        parts.append(_text(left + width / 2, y + 15, f"update {i}", "middle"))
        parts.append(_text(left - 10, y + 15, f"k = {key}", "end"))
        if not gone:
            parts.append(_arrow(left + width, y + bar / 2, right - 3, 4 + shift + step * key + bar / 2))
    for r in range(rows):
        y = 4 + shift + step * r
        mine = [i for i, key in enumerate(keys) if key == r]
        parts.append(_box(right, y, width, bar, _AMBER, bool(mine)))
        parts.append(_text(right + width / 2, y + 15, f"row {r}", "middle"))
        sums = " + ".join(f"u{i}" for i in mine) or "zeros"
        parts.append(_text(right + width + 10, y + 15, sums))
        told.append(f"row {r} is {sums}")
    lost = [str(i) for i, key in enumerate(keys) if key == -1]
    if lost:
        told.append(f"masked, and nowhere: update {', '.join(lost)}")
    return _drawing(caption, told, height, parts)
