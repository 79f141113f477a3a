"""Tables of results: a DataFrame in, a DataFrame out. `fusebook.measure.bench` says what their columns mean.

`df` is a frame of results, as `fusebook.measure.bench.run` and a lesson return it, wherever it has no
words.

A kind of time is one of the clocks of `fusebook.measure.timing`, or ``paid``: what an eager program of many calls pays
for each, the larger of the host's time and the device's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from fusebook.extras import extra
from fusebook.measure import timing

with extra("book"):
    import pandas as pd


__all__ = [
    "CONTROLS", "KINDS", "WITHIN", "alike", "behind", "column", "dims", "harmless", "label", "losses",
    "number", "paid", "pays_from", "pretty", "ratio", "share", "staircase", "standing", "timed", "times",
    "together", "where",
]  # fmt: skip

#: The kinds of time that a table can show.
KINDS = (*timing.KINDS, "paid")
#: A pattern of characters that change how a terminal shows those around them.
CONTROLS = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
#: Medians this close are equal.
WITHIN = 0.02


def column(kind: str) -> str:
    """The column that holds a kind of time, e.g. ``gpu_us`` for ``cold``.

    Raises
    ------
    ValueError
        If `kind` is none of `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"tables: expected a time of {', '.join(KINDS)}, got {kind!r}")
    return timing.COLUMN.get(kind, "end_to_end_us")


def paid(df: pd.DataFrame) -> pd.Series:
    """What an eager program of many calls pays for each: the larger of what the host and what the device needs, cold.

    Microseconds, with the index of `df`. What waits for the device, and so has neither of the two times, pays its whole
    call. What fills the device's queue has no time of the device: it pays what the host needs, at the least. Missing
    where nothing was timed, and in records that were taken without the host's clock.
    """
    device = df["gpu_us"].astype(float)
    host = df["launch_us"].astype(float) if "launch_us" in df else device * math.nan
    larger = device.where((device >= host) | host.isna(), host).where(host.notna())
    return larger.where(device.notna() | host.notna(), df["latency_us"].astype(float))


def timed(df: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows that have a time of a kind, in its `column`.

    None of the rows where the record lacks the clock.
    """
    df = _with(df, kind)
    return df[(df["status"] == "ok") & df[column(kind)].notna()]


def _with(df: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The same rows with a column of the kind's times, whether the record has it or not."""
    name = column(kind)
    if kind == "paid":
        return df.assign(**{name: paid(df)})
    return df if name in df else df.assign(**{name: math.nan})


def dims(df: pd.DataFrame) -> list[str]:
    """The columns that name a problem's sizes.

    The columns between ``dtype`` and ``status``, without those that this operator does not have.
    """
    columns = list(df.columns)
    try:
        found = columns[columns.index("dtype") + 1 : columns.index("status")]
    except ValueError:
        raise ValueError(
            f"tables: expected results with the columns dtype and status, got {', '.join(map(str, columns))}; "
            "pass what fusebook.measure.bench.run or fusebook.measure.record.read returned"
        ) from None
    return [name for name in found if not df[name].isna().all()]


def label(df: pd.DataFrame) -> pd.Series:
    """A short name of each row's sizes, e.g. ``32768x4096``; words are put behind.

    Of str, with the index of `df`; empty where that is.
    """
    names = dims(df) if len(df) else []
    labels = []
    for values in zip(*(df[name].tolist() for name in names), strict=True) if names else [()] * len(df):
        words = [v for v in values if isinstance(v, str)]
        sizes = "x".join([str(int(v)) for v in values if not (v is None or v != v or isinstance(v, str))])
        labels.append(" ".join([sizes, *words]).strip())
    return pd.Series(labels, index=df.index, dtype=object)


def where(df: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Rows whose columns have the wanted values.

    Parameters
    ----------
    **wanted
        A value, a list of values or a function from the column to booleans, by column.
    """
    keep = pd.Series(True, index=df.index)
    for name, value in wanted.items():
        if callable(value):
            keep &= value(df[name])
        else:
            keep &= df[name].isin(list(value) if isinstance(value, (list, tuple, set)) else [value])
    return df[keep]


def together(*frames: pd.DataFrame) -> pd.DataFrame:
    """Results one below the other, which still know on which GPU they were measured.

    ``attrs["gpu"]`` is the name of the GPU where it is the same for all. Where each comes from, which
    a page asks for, only the frames themselves know.
    """
    result = pd.concat(frames)
    machines = [getattr(frame.attrs.get("origin"), "machine", None) for frame in frames]
    names = {str(frame.attrs.get("gpu") or getattr(m, "name", "")) for frame, m in zip(frames, machines, strict=True)}
    result.attrs = {"gpu": names.pop()} if len(names) == 1 else {}
    return result


def _copy(kind: str) -> str:
    """The column of the copy that a time of a kind is compared with."""
    return "copy_warm_us" if kind == "warm" else "copy_us"


def _keys(df: pd.DataFrame) -> list[str]:
    """What tells one measured point from another: operator, dtype and sizes where there are several of them."""
    return [c for c in ("op", "dtype") if len(df[c].unique()) > 1] + dims(df)


def _points(df: pd.DataFrame) -> pd.DataFrame:
    """One row a point and variant: a point that two configs share was measured twice, the later one counts."""
    return df.drop_duplicates([*_keys(df), "variant"], keep="last")


def times(df: pd.DataFrame, kind: str = "cold", words: bool = False) -> pd.DataFrame:
    """Median times in microseconds: a row a point, a column a variant.

    Parameters
    ----------
    words : bool
        Put the status where there is no time: ``refused``, ``wrong``.

    Returns
    -------
    pandas.DataFrame
        Indexed by sizes; variants in the order in which they stand in `df`.
    """
    df = _with(_points(df), kind)
    keys = _keys(df)
    order = list(dict.fromkeys(df["variant"]))
    rows = df.drop_duplicates(keys).set_index(keys).index  # a pivot sorts; a sweep has an order of its own

    def pivot(values: str) -> pd.DataFrame:
        wide = df.pivot_table(values, keys, "variant", aggfunc="first", sort=False)
        return wide.reindex(index=rows, columns=order)

    table = pivot(column(kind))
    if words:
        status = pivot("status")
        table = table.astype(object).where(table.notna() | status.isin(["ok"]) | status.isna(), status)
    table.columns.name = None
    table.attrs["best"] = "least in a row"
    return table


def _labelled(df: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The points that have a time of a kind, with a label of their sizes: few columns, as many are slow to sort."""
    df = timed(_points(df), kind)
    kept = [name for name in ("op", "dtype", "variant", column(kind), "roof_us") if name in df]
    return df[kept].assign(label=label(df))


def ratio(df: pd.DataFrame, variant: str, over: str, kind: str = "cold") -> pd.Series:
    """How long a variant takes, in times of another, at each point where both were timed.

    Parameters
    ----------
    variant, over : str
        Below 1, `variant` is the faster one.
    kind : str
        Of `KINDS`. Only like is compared.

    Returns
    -------
    pandas.Series
        Indexed by the sizes' label and the dtype; empty where the two never met.
    """
    df = _labelled(df, kind)
    sides = [df[df["variant"] == name].set_index(["op", "label", "dtype"])[column(kind)] for name in (variant, over)]
    both = pd.concat(sides, axis=1, join="inner", keys=["mine", "theirs"])
    result = both["mine"] / both["theirs"]
    return result.droplevel("op") if len(df["op"].unique()) <= 1 else result


def share(df: pd.DataFrame, variant: str, of: str = "copy", kind: str = "cold") -> pd.Series:
    """Which part of a ceiling a variant reaches at each point: 1 is the ceiling.

    Parameters
    ----------
    of : str
        ``copy``, of the same bytes in the same run, or ``roof``, made of the machine's ceilings.
    kind : str
        ``cold`` or ``warm``.

    Returns
    -------
    pandas.Series
        Indexed by the sizes' label and the dtype.
    """
    df = timed(where(_points(df), variant=variant), kind)
    df = df.assign(label=label(df))
    ceilings = {"roof": "roof_us", "copy": _copy(kind)}
    if of not in ceilings:
        raise ValueError(f"tables.share: expected a ceiling of {', '.join(ceilings)}, got {of!r}")
    result = df.set_index(["label", "dtype"])
    return result[ceilings[of]] / result[column(kind)]


def losses(df: pd.DataFrame, variant: str = "fusebook", kind: str = "cold") -> pd.DataFrame:
    """The points at which another variant is faster: what a page that shows only wins would hide.

    Indexed by sizes and dtype: the fastest other variant, and how many times as long `variant` takes, if by more than
    `WITHIN`. The worst loss comes first. ``attrs["compared"]`` is how many points were timed both ways: 0 tells
    nothing.
    """
    table = behind(df, variant, kind)
    result = table[table["times as long"] > 1 + WITHIN].sort_values("times as long", ascending=False)
    result = result.rename(columns={"best other": "faster"})[["faster", "times as long"]]
    result.attrs["compared"] = len(table)
    return result


def alike(df: pd.DataFrame, variant: str = "fusebook") -> pd.DataFrame:
    """A variant and what it can be compared with: other ways of the same arithmetic, and not others of our own.

    Parameters
    ----------
    variant : str
        Rows of variants whose name goes on behind this one, as ``fusebook, checked`` does, are left out.
    """
    own = df["variant"].str.startswith(tuple(variant + mark for mark in " ,("))
    return df[~own & df["math"].fillna("").eq("")]


def behind(df: pd.DataFrame, variant: str = "fusebook", kind: str = "cold") -> pd.DataFrame:
    """How a variant stands against the fastest other one at each point, the smallest problem first.

    Indexed by sizes and dtype: ``best other``, ``times as long`` (below 1 the variant is the faster one), and ``least
    us``, the time that the roof leaves to any way of computing it, by which points are ordered. Only points at which
    both were timed by this clock.
    """
    df = _labelled(df, kind)
    keys = ["op", "label", "dtype"]
    mine: dict[Any, Any] = {}
    best: dict[Any, Any] = {}
    points = zip(*(df[name] for name in keys), strict=True)  # a frame for each of the two takes ten times as long
    for at, name, us, least in zip(points, df["variant"], df[column(kind)], df["roof_us"], strict=True):
        if name == variant:
            mine[at] = us, least
        elif at not in best or us < best[at][1]:
            best[at] = name, us
    rows = {at: (best[at][0], us / best[at][1], least) for at, (us, least) in mine.items() if at in best}
    index = pd.MultiIndex.from_tuples(rows, names=keys) if rows else pd.MultiIndex.from_arrays([[]] * 3, names=keys)
    result = pd.DataFrame(list(rows.values()), index, ["best other", "times as long", "least us"])
    result = result.sort_values("least us", kind="stable")
    return result.droplevel("op") if len(df["op"].unique()) <= 1 else result


def pays_from(df: pd.DataFrame, kind: str = "paid") -> str | None:
    """The problem from which on what ours does on the device pays by another clock as well.

    Points at which it is slower on the device, cold, are not asked: no clock of the caller's can mend those.

    Parameters
    ----------
    df : pandas.DataFrame
        Results, of one operator.
    kind : str
        ``paid`` or ``call``.

    Returns
    -------
    str or None
        Sizes, dtype and least time of the smallest point from which on none is lost, in the order of the time that the
        roof leaves. Empty where the largest of the points is lost. None where there is nothing to compare: the record
        may lack the clock.
    """
    cold, table = behind(df), behind(df, kind=kind)
    table = table[table.index.isin(cold.index[cold["times as long"] <= 1 + WITHIN])]
    if table.empty:
        return None
    lost = (table["times as long"] > 1 + WITHIN).to_numpy()
    first = len(lost) - int(lost[::-1].argmax()) if lost.any() else 0
    if first == len(lost):
        return ""
    *op, size, dtype = table.index[first]
    words = [*op, size] if op and op[0].replace("_", " ") not in size else [size]
    return f"{' '.join(words)} {dtype} ({number(float(table['least us'].iloc[first]))} us at the least)"


def standing(df: pd.DataFrame) -> pd.DataFrame:
    """By each clock, at how many points ours wins and loses against the fastest other way.

    A row for ``cold``, ``warm``, ``paid`` and ``call``: points compared, those at which it is faster, equal and slower,
    how many times as long it takes in the median and at worst, and where that is. Clocks that the record lacks compare
    no points.
    """
    rows = {}
    for kind in ("cold", "warm", "paid", "call"):
        table = behind(df, kind=kind)
        ratios = table["times as long"]
        slower, faster = (ratios > 1 + WITHIN).sum(), (ratios < 1 - WITHIN).sum()
        at = int(ratios.to_numpy().argmax()) if len(table) else 0
        rows[kind] = {
            "points": len(table),
            "faster": faster,
            "equal": len(table) - faster - slower,
            "slower": slower,
            "median, times as long": ratios.median(),
            "worst, times as long": ratios.max(),
            "worst at": ", ".join((" ".join(table.index[at]), table["best other"].iloc[at])) if len(table) else "",
        }
    result = pd.DataFrame.from_dict(rows, orient="index")
    result.index.name = "clock"
    return result


def staircase(
    times: pd.DataFrame, steps: pd.DataFrame, *, roof: Mapping[str, float], lines: Mapping[str, int]
) -> pd.DataFrame:
    """The steps on the way to a kernel, down to the roof, with what each takes of registers and of a reader.

    Parameters
    ----------
    times : pandas.DataFrame
        What is shown of each step, a row a step and a column a size.
    steps : pandas.DataFrame
        Of `fusebook.measure.bench.staircase`, of one size or more: the most registers of all count.
    roof : mapping of str to float
        By column, what stands in the last row.
    lines : mapping of str to int
        By step, its lines of code.

    Returns
    -------
    pandas.DataFrame
        `times` with the row ``the roof``, and with the columns ``registers a thread`` and ``lines of code``.
    """
    beside = {"registers a thread": steps.groupby("step")["registers"].max(), "lines of code": pd.Series(lines)}
    return pd.concat([times, pd.DataFrame({"the roof": roof}).T]).assign(**beside)


def harmless(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula, with an apostrophe before it; anything else as it is.

    Colours of a terminal and other control characters, which a spreadsheet refuses, are left out.
    """
    if not isinstance(value, str):
        return value
    value = re.sub(rf"\x1b\[[0-9;]*m|{CONTROLS}", "", value)
    return f"'{value}" if value[:1] in tuple("=+-@\t\r") else value


def number(value: Any) -> str:
    """A number as a reader wants it: three digits that count, empty for what is missing."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        return "yes" if value else "no"
    if hasattr(value, "item"):
        value = value.item()
        return number(value)
    if isinstance(value, int):
        return str(value)  # mostly sizes, which are typed as they are read
    if isinstance(value, float):
        size = abs(value)
        if size == 0:
            return "0"
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        if size < 1e-3:
            return f"{value:.1e}"
        digits = max(0, 2 - math.floor(math.log10(size)))
        return f"{value:,.{digits}f}" if size >= 10_000 else f"{value:.{digits}f}"
    return str(value)


def pretty(df: pd.DataFrame) -> pd.DataFrame:
    """The same table in strings, no digit more than a reader can use.

    Of str. Columns that are whole numbers throughout are written without a point.
    """
    out = pd.DataFrame(index=df.index)
    for position, name in enumerate(df.columns):
        column = df.iloc[:, position]
        values: list[Any] = column.tolist()
        given = [v for v in values if isinstance(v, float) and not math.isnan(v)]
        if column.dtype.kind == "f" and given and all(v.is_integer() and abs(v) < 2**53 for v in given):
            values = [None if math.isnan(v) else int(v) for v in values]
        out[name] = [number(v) for v in values]
    return out
