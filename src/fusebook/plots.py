"""Figures of results: a DataFrame in, Axes out. One picture serves a light page and a dark one.

Nothing is painted behind the data, and text and axes are of a grey that is seen on both. A way of computing keeps its
colour, its dash and its mark on every page, and is named at the end of its line. The title says what was found, the
line below it on which GPU and by which clock. The roof is drawn wherever a rate is.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from fusebook import tables
from fusebook.extras import extra

with extra("book"):
    import numpy as np
    import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "axes", "bandwidth", "clusters", "dots", "legend_below", "lines", "spread", "style", "times",
]  # fmt: skip

#: Readable on white and on near-black, and told apart by readers who do not see red and green.
INK = "#6e6e6e"
#: A colour, a dash and a mark for each way of computing, by the first of these words with which its name begins. What
#: begins alike has one colour; marks and dashes tell its kinds apart.
_WAYS: dict[str, tuple[str, Any, str]] = {
    "fusebook": ("#0a84d6", "-", "D"),
    "eager": ("#7a7a7a", (0, (1, 1)), "x"),
    "torch.compile": ("#b563c4", (0, (3, 1, 1, 1)), "^"),
    "max-autotune": ("#8d5bd6", (0, (3, 1, 1, 1, 1, 1)), "1"),
    "reduce-overhead": ("#8d5bd6", (0, (3, 1, 1, 1, 1, 1)), "1"),
    "torch": ("#009e73", (0, (5, 1)), "s"),
    "packed": ("#2f9e44", (0, (5, 1)), "s"),
    "tinygemm": ("#a0803c", (0, (3, 2)), "X"),
    "Liger": ("#c98500", (0, (7, 2)), "v"),
    "quack": ("#e0562b", (0, (2, 1)), "o"),
    "ONNX Runtime": ("#c2607f", (0, (4, 1, 1, 1)), "p"),
    "ORT": ("#c2607f", (0, (4, 1, 1, 1)), "p"),
    "ScatterND": ("#c2607f", (0, (4, 1, 1, 1)), "p"),
    "CUDA C": ("#a0803c", (0, (6, 1, 1, 1)), "h"),
    "NumPy": ("#9c6644", (0, (1, 2)), "<"),
    "scikit-learn": ("#c2607f", (0, (4, 2)), ">"),
    "two + cat": ("#3f9d9d", (0, (2, 2)), "P"),
    "cat + one": ("#5f7fd0", (0, (4, 3)), "*"),
    "views": ("#8a8f2a", (0, (6, 2)), "d"),
}
_COLOURS = {name: colour for name, (colour, _, _) in _WAYS.items()}
_OTHERS = ("#5f7fd0", "#a0803c", "#3f9d9d", "#c2607f", "#8a8f2a", "#9c6644")
_MARKS = "*Pp<>hdo^vsX1234+"
_DASHES: tuple[Any, ...] = ("--", (0, (5, 2, 1, 2)), (0, (2, 2)), (0, (8, 2)), (0, (1, 3)))
_ZONES = {"launch": 0.16, "L2": 0.09, "memory": 0.0, "compute": 0.16}
_ZONE_NAMES = {"launch": "launch-bound", "L2": "partly L2", "memory": "memory", "compute": "compute"}


def style(name: str) -> dict[str, Any]:
    """How a way of computing is drawn, on every page: its colour, dash and mark.

    Parameters
    ----------
    name : str
        Of a variant. What follows the name of a known way, as in ``fusebook, checked``, changes its dash and its mark.

    Returns
    -------
    dict
        ``color``, ``linestyle`` and ``marker`` of Matplotlib. A name that nobody knows is given one of a few colours,
        always the same one.
    """
    known = next((way for way in sorted(_WAYS, key=len, reverse=True) if name.startswith(way)), "")
    number = zlib.crc32(name.encode())
    if not known:
        colour, dash, mark = _OTHERS[number % len(_OTHERS)], _DASHES[number % len(_DASHES)], _MARKS[number % 7]
    else:
        colour, dash, mark = _WAYS[known]
        if name != known:
            dash, mark = _DASHES[number % len(_DASHES)], _MARKS[number % len(_MARKS)]
    return {"color": colour, "linestyle": dash, "marker": mark}


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The style of each name in one figure: no two have the same mark, and strangers not the same colour."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(names, key=lambda name: (name not in _WAYS, not name.startswith(tuple(_WAYS)), name)):
        own = style(name)
        marks = {other["marker"] for other in found.values()}
        if own["marker"] in marks:
            own["marker"] = next((mark for mark in _MARKS if mark not in marks), own["marker"])
        colours = {other["color"] for other in found.values()}
        if own["color"] in colours and not name.startswith(tuple(_WAYS)):
            own["color"] = next((colour for colour in _OTHERS if colour not in colours), own["color"])
        # Ours is wide and lies below, so that what is equal to it is seen on top of it.
        ours = name == "fusebook"
        found[name] = {**own, "linewidth": 3.6 if ours else 1.4, "zorder": 2.5 if ours else 3}
    return {name: found[name] for name in names}


#: Where a line ends, and its colour.
_Ends = dict[str, tuple[float, float, str]]


def _line(ax: Axes, ends: _Ends, name: str, x: pd.Series, y: pd.Series, **style: Any) -> None:
    """Draw what has a name, and remember its end to write that there; sweeps have too many points for marks."""
    style["marker"] = "." if "marker" in style and len(x) < 40 else None
    ax.plot(x, y, label=name, **style)
    there = y.notna().to_numpy()
    ends[name] = (float(x[there].iloc[-1]), float(y[there].iloc[-1]), style["color"])


def _gpu(df: pd.DataFrame) -> str:
    """On what results were measured, where they say so."""
    machine = getattr(df.attrs.get("origin"), "machine", None)
    return str(df.attrs.get("gpu") or getattr(machine, "name", "") or "")


def _words(op: Any) -> str:
    return str(op).replace("_", " ")


def _found(df: pd.DataFrame, of: str) -> str:
    """The finding of a figure of shares, and over how many sizes; empty where Fusebook is not in it.

    Where memory decides at some points, these are the ones: elsewhere a share says little.
    """
    df = tables.alike(df)
    memory = df[df["zone"].eq("memory")]
    df, bound = (memory, "memory-bound ") if memory["variant"].eq("fusebook").any() else (df, "")
    shares = {name: tables.share(df, name, of).dropna() for name in dict.fromkeys(df["variant"])}
    points = pd.DataFrame({name: share.groupby(level=[0, 1]).max() for name, share in shares.items() if len(share)})
    if "fusebook" not in points:
        return ""
    points = points[points["fusebook"].notna()]
    # The best of few implementations says little of many: only points that all of them have are compared.
    points = points.dropna() if len(points.dropna()) else points
    own, best = points.pop("fusebook"), points.max(axis=1).dropna()
    text = f"Fusebook runs at {100 * own.median():.0f} % of {'copy speed' if of == 'copy' else 'the roofline'}"
    text += f"; the best other at {100 * best.median():.0f} %" if len(best) else ""
    return f"{text} ({f'medians of {len(own)} {bound}sizes' if len(own) > 1 else f'at one {bound}size'})"


def _fastest(df: pd.DataFrame, kind: str) -> str:
    """The finding of a figure of times, made from what it shows; empty where ours is not in it or nothing else is."""
    table = tables.behind(tables.alike(df), "fusebook", kind) if "fusebook" in set(df["variant"]) else pd.DataFrame()
    if table.empty:
        return ""
    first = (table["times as long"] <= 1 + tables.WITHIN).sum()
    return f"fusebook is the fastest, or within 2 % of it, at {first} of {len(table)}"


def _grid(*how: Any, **style: Any) -> Any:
    """A figure and its axes; matplotlib is imported when something is drawn, since it takes half a second."""
    with extra("book"):
        import matplotlib.pyplot as plt

    return plt.subplots(*how, layout="constrained", **style)


def axes(
    title: str,
    xlabel: str,
    ylabel: str,
    size: tuple[float, float] = (8.0, 4.6),
    below: Sequence[str] = (),
    ax: Axes | None = None,
    rows: bool = False,
) -> Axes:
    """Axes with a title, and below it in small what, where and by which clock; with a name at the left of each row."""
    ax = ax or _grid(figsize=size)[1]
    ax.figure.patch.set_alpha(0)
    ax.patch.set_alpha(0)
    told = ", ".join(filter(None, below))
    ax.set_title(title, color=INK, loc="left", fontsize=11, pad=20 if told else 6)
    if told:
        ax.annotate(told, (0, 1), (0, 5), "axes fraction", textcoords="offset points", color=INK, fontsize=9)
    ax.set_xlabel(xlabel, color=INK)
    ax.set_ylabel(ylabel, color=INK)
    ax.tick_params(colors=INK, which="both")
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    ax.grid(axis="both" if rows else "y", color=INK, alpha=0.25, linewidth=0.6)
    return ax


def _name_ends(ax: Axes, ends: _Ends) -> None:
    """Write each line's name behind its end, in its colour, moved apart where names would overlap."""
    if not ends:
        return
    ax.figure.canvas.draw()  # limits and sizes in pixels are known after a draw only
    height = 13 * ax.figure.dpi / 72
    pixels = {name: float(ax.transData.transform((x, y))[1]) for name, (x, y, _) in ends.items()}
    order = sorted(ends, key=pixels.__getitem__)
    places = [pixels[name] for name in order]
    for _ in range(200):  # neighbours push each other apart until none overlap
        for i in range(len(places) - 1):
            if (short := height - (places[i + 1] - places[i])) > 0:
                places[i] -= short / 2
                places[i + 1] += short / 2
    highest = float(ax.transAxes.transform((0, 1))[1]) - height / 2  # above is the title
    places = [min(place, highest - i * height) for i, place in zip(range(len(places))[::-1], places, strict=True)]
    lowest = float(ax.transAxes.transform((0, 0))[1]) + height / 2  # below stand the numbers of the x axis
    for i, place in enumerate(places):
        places[i] = max(place, lowest + i * height)
    right = max(x for x, _, _ in ends.values())
    for name, place in zip(order, places, strict=True):
        y = ax.transData.inverted().transform((0, place))[1]
        weight = "bold" if name == "fusebook" else "normal"
        ax.text(right, y, f"  {name}", color=ends[name][2], fontsize=9, va="center", fontweight=weight)


def legend_below(ax: Axes, down: float, ncols: int, fontsize: int, *order: Any) -> None:
    """A legend so many inches under the axes, in rows, so that many names do not push the axes aside."""
    figure: Any = ax.figure
    at = (0, -down / figure.get_figheight())
    how: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": at, "ncols": ncols, "fontsize": fontsize}
    ax.legend(*order, **how, frameon=False, labelcolor=INK)


def _shade(ax: Axes, xs: Sequence[float], zones: Sequence[str]) -> None:
    """Shade runs of equal zones and name each at its foot; a plot that lies in one zone only needs no shade."""
    runs: list[list[Any]] = []
    for x, zone in sorted(zip(xs, zones, strict=True)):
        if runs and runs[-1][0] == zone:
            runs[-1][2] = x
        else:
            runs.append([zone, x, x])
    for i, (zone, first, last) in enumerate(runs):
        left = first if i == 0 else (runs[i - 1][2] + first) / 2
        right = last if i == len(runs) - 1 else (last + runs[i + 1][1]) / 2
        if len(runs) > 1 and _ZONES.get(zone):
            ax.axvspan(left, right, color=INK, alpha=_ZONES[zone], linewidth=0, zorder=0)
        ax.text(
            left if i == 0 and len(runs) > 1 else (left + right) / 2,
            0.015,
            _ZONE_NAMES.get(zone, zone),
            transform=ax.get_xaxis_transform(),
            ha="left" if i == 0 and len(runs) > 1 else "center",
            va="bottom",
            fontsize=8,
            color=INK,
        )


def bandwidth(df: pd.DataFrame, *, xlabel: str = "", size: tuple[float, float] = (8.0, 4.6)) -> Axes:
    """Bandwidth over N, or the size that varies, cold: a line a variant with its 20 to 80 % band, the roof, the zones.

    Parameters
    ----------
    df : pandas.DataFrame
        Results of one operator in one dtype; the other sizes should not vary.
    xlabel : str, optional
        What N is, in words.
    size : tuple of float
        Inches.
    """
    dtypes = list(dict.fromkeys(df["dtype"]))
    if len(dtypes) > 1:
        raise ValueError(f"plots.bandwidth: expected one dtype, got {', '.join(dtypes)}; draw one figure each")
    first = df.iloc[0]
    over = next((n for n in ("N", *tables.dims(df)) if n in df and len(df[n].unique()) > 1), "N")
    others = [f"{n} = {first[n]}" for n in tables.dims(df) if n != over and len(df[n].unique()) == 1]
    what, found = ", ".join([_words(first["op"]), first["dtype"], *others]), _found(df, "copy")
    rate = "bandwidth of the least traffic (GB/s)"
    small = [what if found else "", _gpu(df), "GPU time, cold L2"]
    ax = axes(found or what, xlabel or f"size {over}", rate, size, small)

    def rate_of(rows: pd.DataFrame, column: str) -> pd.Series:
        return (rows["read_bytes"] + rows["write_bytes"]) / rows[column].astype(float) / 1e3

    ends: _Ends = {}
    for name, drawn in _styles(list(dict.fromkeys(df["variant"]))).items():
        rows = tables.timed(df[df["variant"] == name], "cold").sort_values(over)
        if rows.empty:
            continue
        _line(ax, ends, name, rows[over], rate_of(rows, "gpu_us"), **drawn)
        band = rate_of(rows, "gpu_us_80"), rate_of(rows, "gpu_us_20")
        ax.fill_between(rows[over].astype(float), *band, color=drawn["color"], alpha=0.18, linewidth=0)
    points = df.dropna(subset=["roof_us"]).drop_duplicates(over).sort_values(over)
    if len(points):
        for name, column, dash in (("roofline", "roof_us", "-"), ("a copy", "copy_us", (0, (1, 2)))):
            if points[column].notna().any():
                how = {"color": INK, "linewidth": 1.2, "linestyle": dash, "zorder": 2}
                _line(ax, ends, name, points[over], rate_of(points, column), **how)
        _shade(ax, points[over].astype(float).tolist(), points["zone"].astype(str).tolist())
    ax.set_ylim(bottom=0)
    ax.margins(x=0.01)
    _name_ends(ax, ends)
    return ax


def dots(df: pd.DataFrame, *, of: str = "copy", title: str = "") -> Axes:
    """What part of a ceiling each variant reaches, cold: a row a point, a mark a variant.

    Parameters
    ----------
    of : str
        ``copy`` or ``roof``.
    """
    df = tables.timed(df, "cold")
    several = len(df["dtype"].unique()) > 1
    df = df.assign(_row=tables.label(df) + ((" " + df["dtype"]) if several else ""))
    rows = list(dict.fromkeys(df["_row"]))
    place = {row: len(rows) - 1 - i for i, row in enumerate(rows)}
    ceiling = "a copy of the same bytes" if of == "copy" else "the measured roof"
    what = title or f"{_words(df['op'].iloc[0] if len(df) else '')}: share of {ceiling}"
    found = _found(df, of)
    size, below = (8.0, 1.8 + 0.3 * len(rows)), [what if found else "", _gpu(df), "GPU time, cold L2"]
    ax = axes(found or what, f"percent of {ceiling}", "", size, below, rows=True)
    for y in place.values():
        ax.axhline(y, color=INK, alpha=0.18, linewidth=0.6, zorder=0)
    names = list(dict.fromkeys(df["variant"]))
    for i, (variant, drawn) in enumerate(_styles(names).items()):
        part, ours = df[df["variant"] == variant], variant == "fusebook"
        # A little above or below the middle of the row, so that equal ones are both seen.
        aside = 0.5 * (i / (len(names) - 1) - 0.5) if len(names) > 1 else 0.0
        ax.plot(
            100 * part[f"{of}_us"] / part["gpu_us"],
            part["_row"].map(place).astype(float) - aside,
            markersize=7 if ours else 6,
            markerfacecolor=drawn["color"] if ours else "none",
            label=variant,
            **{**drawn, "linestyle": "none"},
        )
    ax.axvline(100, color=INK, linewidth=1.2)
    ax.set_yticks([place[r] for r in rows], rows, fontsize=8)
    ax.set_xlim(left=0)
    ax.set_ylim(-0.7, len(rows) - 0.3)
    if names:  # points that differ by a percent cannot be labelled one by one
        legend_below(ax, 0.95, min(len(names), 4), 8)
    return ax


def times(df: pd.DataFrame, x: str = "N", *, kind: str = "call", title: str = "", xlabel: str = "") -> Axes:
    """Time in microseconds over one size, on logarithmic axes, with the launch floor.

    Parameters
    ----------
    df : pandas.DataFrame
        Results of one operator in one dtype.
    x : str
        The size on the x axis.
    kind : str
        Of `fusebook.tables.KINDS`.
    title : str, optional
        What is shown; what was found is told by the results.
    xlabel : str, optional
        What `x` is, in words.
    """
    first = df.iloc[0]
    what = title or f"{_words(first['op'])}, {first['dtype']}"
    found = _fastest(df, kind)
    clock = {"paid": "end-to-end time", "call": "latency"}.get(kind, f"{kind} time")
    below = [what if found else "", _gpu(df), clock]
    ax = axes(found or what, xlabel or f"size {x}", f"{clock} (microseconds)", below=below)
    ax.set_yscale("log")
    ends: _Ends = {}
    for name, drawn in _styles(list(dict.fromkeys(df["variant"]))).items():
        rows = tables.timed(df[df["variant"] == name], kind).sort_values(x)
        if len(rows):
            _line(ax, ends, name, rows[x], rows[tables.column(kind)], **drawn)
    floor = {"cold": "floor_us", "warm": "floor_warm_us"}.get(kind)
    if floor and df[floor].notna().any():
        ax.axhline(df[floor].median(), color=INK, linewidth=1)
        ends["launch floor"] = (float(df[x].max()), float(df[floor].median()), INK)
    ticks: Any = ax.yaxis.get_major_locator()
    ticks.set_params(subs=(1, 2, 5))
    ax.yaxis.minorticks_off()
    ax.yaxis.set_major_formatter("{x:g}")
    ax.margins(x=0.01)
    _name_ends(ax, ends)
    return ax


def lines(
    df: pd.DataFrame,
    *,
    title: str,
    ylabel: str,
    marks: Mapping[str, float] | None = None,
    source: pd.DataFrame | None = None,
    clock: str = "",
    logy: bool = False,
) -> Axes:
    """Columns over the index, on a logarithmic x axis, each named at its end; a missing value leaves no gap.

    Parameters
    ----------
    df : pandas.DataFrame
        Its index has a name, with the unit.
    marks : mapping of str to float, optional
        Horizontal lines to hold the columns against.
    source : pandas.DataFrame, optional
        The results that `df` is made from, where it does not know the GPU itself.
    clock : str, optional
        By which it was measured.
    logy : bool
        Whether the y axis is logarithmic too; it begins at 0 otherwise.
    """
    ax = axes(title, str(df.index.name), ylabel, (8.0, 3.6), [_gpu(df if source is None else source), clock])
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    if len(df) <= 8:  # few points are named, and not powers of ten between them
        ax.set_xticks(df.index, [f"{x:,.0f}" if x >= 1e4 else f"{x:.{4 if x >= 1e3 else 3}g}" for x in df.index])
        ax.xaxis.minorticks_off()
    ends: _Ends = {}
    for name, drawn in _styles([str(name) for name in df.columns]).items():
        held = df[name].dropna()
        if held.empty:
            continue
        ax.plot(held.index, held, markersize=4, label=name, **drawn)
        ends[name] = (float(held.index[-1]), float(held.iloc[-1]), drawn["color"])
    for name, value in (marks or {}).items():
        ax.axhline(value, color=INK, linewidth=1.2)
        below: dict[str, Any] = {"xytext": (0, -3), "textcoords": "offset points", "va": "top"}
        ax.annotate(name, (df.index[0], value), color=INK, fontsize=9, **below)
    if logy:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
    else:
        ax.set_ylim(bottom=0)
    ax.margins(x=0.01)
    _name_ends(ax, ends)
    return ax


def spread(ratios: Mapping[str, pd.Series], *, title: str, xlabel: str) -> Axes:
    """How ratios are spread: a row a name, a dot a ratio, a bar at the median, and a line where both are equal.

    Parameters
    ----------
    ratios : mapping of str to pandas.Series
        By the name of its row; what is missing is left out.

    Returns
    -------
    matplotlib.axes.Axes
        The ratios are on a logarithmic axis.
    """
    gpu = next(filter(None, (_gpu(pd.DataFrame(r)) for r in ratios.values())), "")
    ax = axes(title, xlabel, "", (8.0, 1.6 + 0.32 * len(ratios)), [gpu], rows=True)
    names = list(ratios)[::-1]
    for y, name in enumerate(names):
        values = ratios[name].dropna().astype(float).sort_values().to_numpy()
        # Side by side within the row in the order of their size, so that equal ones are all seen.
        height = y + 0.5 * (np.arange(len(values)) % 5 / 4 - 0.5)
        ax.plot(values, height, linestyle="none", marker="o", markersize=3, color=style("fusebook")["color"], alpha=0.6)
        if len(values):
            ax.plot([np.median(values)] * 2, [y - 0.4, y + 0.4], color=INK, linewidth=2)
    ax.axvline(1, color=INK, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.minorticks_off()
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(-0.7, len(names) - 0.3)
    return ax


def clusters(points: Any, labels: Any, centres: Any, *, title: str) -> Axes:
    """Points in the plane, each cluster with a colour and a mark, which follow the place of its centre.

    Parameters
    ----------
    labels : array of int of shape (n,)
        The cluster of each point.
    """
    points, labels, centres = (np.asarray(values) for values in (points, labels, centres))
    ax = axes(title, "x", "y", (5.4, 3.6))
    ways = zip(
        cycle(_COLOURS[name] for name in ("torch", "quack", "torch.compile", "Liger")), cycle("o^sv"), strict=False
    )
    # From left to right, so that a cluster that was found looks like the one that was planted.
    for (colour, mark), j in zip(ways, np.lexsort(centres.T[::-1]), strict=False):
        own = points[labels == j]
        ax.plot(*own.T, mark, color=colour, markersize=2.5, alpha=0.6, label=f"{len(own)} points")
    ax.plot(*centres.T, "+", color=INK, markersize=14, markeredgewidth=2, label=f"{len(centres)} centres")
    return ax
