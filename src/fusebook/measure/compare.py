"""Two GPUs by their records: what each reaches, and whether the difference is more than noise.

    python -m fusebook.measure.compare my-gpu nvidia-h200        # a table, and two figures in the current folder

A record is a folder that ``python -m fusebook.measure.record --all --out my-gpu`` wrote, or the name of a GPU that the
package has. Two points differ where their medians are more than 2 % apart and their ranges, from the 20 to the 80 %
quantile, do not meet; else they are alike.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from fusebook import plots, tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.measure import machine as machines
from fusebook.measure import record, timing

with extra("book"):
    import pandas as pd

__all__ = ["ceilings", "folder", "points", "summed", "verdicts"]


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


def _rows(file: pathlib.Path) -> pd.DataFrame:
    """The rows of a record, which several questions in a row are asked."""
    return _read(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=128)
def _read(file: pathlib.Path, changed: int) -> pd.DataFrame:
    return record._load(file, file.stem)[0]


def points(name: str, mine: pathlib.Path, theirs: pathlib.Path, *, variant: str, clock: str = "cold") -> pd.DataFrame:
    """The points of an operator that two GPUs have of a variant, in the order of what the roof of the first leaves.

    Parameters
    ----------
    name : str
        Of `fusebook.cards.OPS`.
    clock : str
        Of `fusebook.measure.timing.KINDS`.

    Returns
    -------
    pandas.DataFrame
        By sizes and dtype: ``times as long`` the first takes; ``verdict``, faster, slower or alike; and ``mine, of
        roof`` and ``theirs, of roof``, the shares that each reaches of its own.
    """
    sides = []
    for place in (mine, theirs):
        frame = tables.timed(_rows(place / f"{name}.csv"), clock)
        frame = frame[frame["variant"] == variant]
        sides.append(frame.assign(label=tables.label(frame)).set_index(["label", "dtype"]))
    both = sides[0].merge(sides[1], left_index=True, right_index=True, suffixes=(" mine", " theirs"))
    both = both.sort_values("roof_us mine", kind="stable")
    us, low, high = (tables.column(clock) + quantile for quantile in ("", "_20", "_80"))
    ratio = both[f"{us} mine"] / both[f"{us} theirs"]
    meet = (both[f"{low} mine"] <= both[f"{high} theirs"]) & (both[f"{low} theirs"] <= both[f"{high} mine"])
    alike = meet | ((ratio - 1).abs() <= tables.WITHIN)
    verdict = (ratio < 1).map({True: "faster", False: "slower"}).mask(alike, "alike")
    shares = {f"{who}, of roof": both[f"roof_us {who}"] / both[f"{us} {who}"] for who in ("mine", "theirs")}
    return pd.DataFrame({"times as long": ratio, "verdict": verdict, **shares})


def _ahead(place: pathlib.Path, name: str, variant: str, clock: str) -> str:
    """At how many points a variant is no slower than the fastest other way on a GPU, as ``12 of 14``."""
    frame = tables.alike(_rows(place / f"{name}.csv"), variant)
    found = tables.behind(frame, variant, clock)["times as long"]
    return f"{(found <= 1 + tables.WITHIN).sum()} of {len(found)}" if len(found) else ""


def summed(found: pd.DataFrame) -> dict[str, Any]:
    """What `points` come to: how many, how many times as long, and the verdict, one word where they agree.

    Parameters
    ----------
    found : pandas.DataFrame
        Of `points`, not empty.

    Returns
    -------
    dict of str to object
        ``points``, ``times as long`` in the median, the ``least``, the ``most``, and the ``verdict``.
    """
    ratio, counts = found["times as long"], found["verdict"].value_counts()
    said = ", ".join(f"{word} at {number}" for word, number in counts.items())
    return {
        "points": len(found),
        "times as long": ratio.median(),
        "least": ratio.min(),
        "most": ratio.max(),
        "verdict": f"{counts.index[0]} throughout" if len(counts) == 1 else said,
    }


def verdicts(
    mine: pathlib.Path, theirs: pathlib.Path, *, variant: str = "fusebook", clock: str = "cold"
) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """A row an operator: how the first GPU stands against the second.

    Parameters
    ----------
    variant, clock : str
        As `points` takes them.

    Returns
    -------
    table : pandas.DataFrame
        By operator: points in both; how many times as long the first takes, in the median, at the least and at the
        most; the verdict; the median share of roof of each; and at how many of its points the variant is the fastest
        way on each.
    by_point : dict of str to pandas.DataFrame
        The points of each operator.

    Raises
    ------
    ValueError
        Where the two have no point in common.
    """
    rows, by_point = {}, {}
    for name in OPS:
        if not all((place / f"{name}.csv").exists() for place in (mine, theirs)):
            continue
        found = points(name, mine, theirs, variant=variant, clock=clock)
        if found.empty:
            continue
        by_point[name] = found
        rows[name] = summed(found) | {
            "% of roof": 100 * found["mine, of roof"].median(),
            "theirs": 100 * found["theirs, of roof"].median(),
            "fastest way": _ahead(mine, name, variant, clock),
            "theirs ": _ahead(theirs, name, variant, clock),
        }
    if not rows:
        raise ValueError(
            f"{mine} and {theirs} have no point in common that {variant!r} was timed at by the {clock} clock: record "
            "the same operators and sizes on both, or choose another --variant or --clock"
        )
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index.name = "operator"
    return table, by_point


def ceilings(*on: machines.Machine) -> pd.DataFrame:
    """What GPUs were measured to be able to do, a column a GPU; of two also the first in times of the second."""
    columns = [
        {
            "copy, GB/s": m.copy / 1e9,
            "read, GB/s": m.read / 1e9,
            **{f"{name}, TFLOP/s": rate / 1e12 for name, rate in m.rates.items()},
            "launch, us": m.floor() * 1e6,
        }
        for m in on
    ]
    table = pd.DataFrame(columns).T
    table.columns = ["mine", "theirs"][: len(on)] if len(on) == 2 else [m.name for m in on]
    return table.assign(ratio=table["mine"] / table["theirs"]) if len(on) == 2 else table


def _figures(by_point: dict[str, pd.DataFrame], title: str, clock: str, out: pathlib.Path) -> list[pathlib.Path]:
    import matplotlib as mpl

    mpl.use("agg")
    of_roof = {name: found["mine, of roof"] / found["theirs, of roof"] for name, found in by_point.items()}
    took = {name: found["times as long"] for name, found in by_point.items()}
    files = []
    for name, ratios, what in (("times", took, "time"), ("roof", of_roof, "share of the own roof")):
        axes = plots.spread(ratios, title=f"{title}: {what}, {clock}", xlabel="the first's over the second's")
        files.append(out / f"compare_{name}.png")
        axes.figure.canvas.print_figure(files[-1], dpi=150, facecolor="white", bbox_inches="tight")
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fusebook.measure.compare", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("mine", help="a folder of records, or a GPU that the package has")
    parser.add_argument(
        "theirs", nargs="?", default=machines.SHIPPED, help=f"the same; {machines.SHIPPED} if not given"
    )
    parser.add_argument("--variant", default="fusebook", help="which way of computing; fusebook if not given")
    parser.add_argument("--clock", default="cold", choices=timing.KINDS, help="cold if not given")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(), help="where the figures go; here")
    args = parser.parse_args(argv)
    try:
        places = [folder(args.mine), folder(args.theirs)]
        on = [machines.load(place / "machine.json", recorded=True) for place in places]
        table, by_point = verdicts(*places, variant=args.variant, clock=args.clock)
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:  # a RecordError among them
        print(f"fusebook.measure.compare: {error}", file=sys.stderr)
        return 1
    for who, m in zip(("mine:  ", "theirs:"), on, strict=True):
        print(f"{who} {m.name}, driver {m.driver}, torch {m.torch}, Triton {m.triton}, {m.date}, {m.commit}")
    print(f"\nCeilings\n{tables.pretty(ceilings(*on)).to_string()}")
    print(f"\n{args.variant}, {args.clock}\n{tables.pretty(table).to_string()}\n")
    try:
        for file in _figures(by_point, f"{on[0].name} against {on[1].name}", args.clock, args.out):
            print(file)
    except OSError as error:
        print(
            f"fusebook.measure.compare: no figures in {args.out}: {error}; choose another folder by --out",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
