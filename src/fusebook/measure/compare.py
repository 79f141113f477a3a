"""Two GPUs by their records: ``python -m fusebook.measure.compare my-gpu``.

A record is a folder that ``python -m fusebook.measure.record --all --out my-gpu`` wrote, or the name of a GPU that the
package has. Two points differ if their medians are more than 2 % apart and their ranges, from the 20 to the 80 %
quantile, do not overlap; otherwise they are alike.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.measure import _removed, record, timing
from fusebook.measure import machine as machines

with extra("book"):
    import pandas as pd

__all__ = ["folder", "points", "verdicts"]


def folder(given: str) -> pathlib.Path:
    """The folder of one GPU's records.

    Parameters
    ----------
    given : str
        That folder, one that holds no other, or the name of a GPU that the package has.

    Raises
    ------
    ValueError
        Says what was found there instead.
    """
    shipped = machines.RECORDS / given
    if given in machines.slugs():
        return shipped
    place = pathlib.Path(given)
    found = [place] if (place / "machine.json").exists() else sorted(f.parent for f in place.glob("*/machine.json"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{given} holds {', '.join(f.name for f in found)}: name one of them, such as {found[0]}")
    raise ValueError(
        f"{given} is neither a folder with a machine.json, as `python -m fusebook.measure.record --all --out {given}` "
        f"writes, nor a GPU that the package has: {', '.join(machines.slugs()) or 'none'}"
    )


def points(mine: pd.DataFrame, theirs: pd.DataFrame, *, variant: str = "fusebook", clock: str = "cold") -> pd.DataFrame:
    """The points of an operator that two GPUs have of an implementation.

    Parameters
    ----------
    mine, theirs : pandas.DataFrame
        Of `fusebook.measure.record.read`.
    clock : str
        Of `fusebook.measure.timing.KINDS`.

    Returns
    -------
    pandas.DataFrame
        By sizes and dtype: the ``ratio`` of the first GPU's time to the second's; ``verdict``, faster, slower or alike;
        and ``mine, of roof`` and ``theirs, of roof``, the shares of the roofs.
    """
    sides = []
    for frame in (mine, theirs):
        frame = tables.timed(frame, clock)
        frame = frame[frame["variant"] == variant]
        sides.append(frame.assign(label=tables.label(frame)).set_index(["label", "dtype"]))
    both = sides[0].merge(sides[1], left_index=True, right_index=True, suffixes=(" mine", " theirs"))
    us, low, high = (tables.column(clock) + quantile for quantile in ("", "_20", "_80"))
    ratio = both[f"{us} mine"] / both[f"{us} theirs"]
    overlap = (both[f"{low} mine"] <= both[f"{high} theirs"]) & (both[f"{low} theirs"] <= both[f"{high} mine"])
    alike = overlap | ((ratio - 1).abs() <= tables.WITHIN)
    verdict = (ratio < 1).map({True: "faster", False: "slower"}).mask(alike, "alike")
    shares = {f"{who}, of roof": both[f"roof_us {who}"] / both[f"{us} {who}"] for who in ("mine", "theirs")}
    return pd.DataFrame({"ratio": ratio, "verdict": verdict, **shares})


def _fastest(frame: pd.DataFrame, variant: str, clock: str) -> str:
    """At how many points an implementation is no slower than the fastest other one, as ``12 of 14``."""
    found = tables.behind(tables.alike(frame, variant), variant, clock)["times as long"]
    return f"{(found <= 1 + tables.WITHIN).sum()} of {len(found)}" if len(found) else ""


def verdicts(
    mine: pathlib.Path, theirs: pathlib.Path, *, variant: str = "fusebook", clock: str = "cold"
) -> pd.DataFrame:
    """The first GPU against the second, a row for each operator.

    Parameters
    ----------
    mine, theirs : path
        Of `folder`.
    variant, clock : str
        As `points` takes them.

    Returns
    -------
    pandas.DataFrame
        By operator: the points in both; the median, least and greatest ratio of times; the verdict; the median share
        of the roof on each GPU; and at how many points the implementation is the fastest on each.

    Raises
    ------
    ValueError
        If the two have no point in common.
    """
    rows = {}
    for name in OPS:
        files = [place / f"{name}.csv" for place in (mine, theirs)]
        if not all(file.exists() for file in files):
            continue
        frames = [record._load(file, name)[0] for file in files]
        found = points(*frames, variant=variant, clock=clock)
        if found.empty:
            continue
        counts = found["verdict"].value_counts()
        said = ", ".join(f"{word} at {number}" for word, number in counts.items())
        rows[name] = {
            "points": len(found),
            "times as long": found["ratio"].median(),
            "least": found["ratio"].min(),
            "most": found["ratio"].max(),
            "verdict": f"{counts.index[0]} throughout" if len(counts) == 1 else said,
            "% of roof": 100 * found["mine, of roof"].median(),
            "theirs": 100 * found["theirs, of roof"].median(),
            "fastest": _fastest(frames[0], variant, clock),
            "theirs ": _fastest(frames[1], variant, clock),
        }
    if not rows:
        raise ValueError(
            f"{mine} and {theirs} have no point in common that {variant!r} was timed at by the {clock} clock: record "
            "the same operators and sizes on both, or choose another --variant or --clock"
        )
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("operator")


def _ceilings(on: Sequence[machines.Machine]) -> pd.DataFrame:
    """The measured ceilings of two GPUs, and their ratio."""
    columns = [
        {"copy, GB/s": m.copy / 1e9, "read, GB/s": m.read / 1e9}
        | {f"{name}, TFLOP/s": rate / 1e12 for name, rate in m.rates.items()}
        | {"launch, us": m.floor() * 1e6}
        for m in on
    ]
    table = pd.DataFrame(columns, index=["mine", "theirs"]).T
    return table.assign(ratio=table["mine"] / table["theirs"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fusebook.measure.compare", description="Compare two GPUs.")
    parser.add_argument("mine", help="a folder of records, or a GPU that the package has")
    parser.add_argument("theirs", nargs="?", default=machines.SHIPPED, help="the same (default: %(default)s)")
    parser.add_argument("--variant", default="fusebook", help="the implementation (default: %(default)s)")
    parser.add_argument("--clock", default="cold", choices=timing.KINDS, help="the clock (default: %(default)s)")
    _removed(parser, {"--out": "no figures are written; FUSEBOOK_RECORDS shows both GPUs on the pages"})
    args = parser.parse_args(argv)
    try:
        places = [folder(args.mine), folder(args.theirs)]
        on = [machines.load(place / "machine.json", recorded=True) for place in places]
        table = verdicts(*places, variant=args.variant, clock=args.clock)
    except (ValueError, OSError) as error:  # a RecordError among them
        print(f"fusebook.measure.compare: {error}", file=sys.stderr)
        return 1
    for who, m in zip(("mine:  ", "theirs:"), on, strict=True):
        print(f"{who} {m.name}, driver {m.driver}, torch {m.torch}, Triton {m.triton}, {m.date}, {m.commit}")
    print(f"\nCeilings\n{tables.pretty(_ceilings(on)).to_string()}")
    print(f"\n{args.variant}, {args.clock}\n{tables.pretty(table).to_string()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
