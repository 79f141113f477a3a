"""Pages about all operators: see `Book`."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import pandas as pd

from fusebook import plots, tables
from fusebook.cards import OPS
from fusebook.cards._calls import call
from fusebook.lesson import _numbers, _show, _verdicts, evidence
from fusebook.lesson._results import NoResults, explored, measured, options, records
from fusebook.lesson._show import Shown
from fusebook.lesson.evidence import history, reported
from fusebook.measure import explore, machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Book", "book"]

#: The names of clocks in tables, and their columns.
_CLOCKS = {"GPU time, us": "cold", "end to end, us": "paid", "latency, us": "call"}
#: What stands for the call of a result that was not timed, by what a record says of it.
_STATUS = {"ok": "", "wrong": "(incorrect result)", "refused": "(does not take it)"}


def book(name: str) -> Book:
    """Open a page that is about all operators.

    Parameters
    ----------
    name : str
        Of the script, without ``.py``.
    """
    machine.running = name
    return Book()


class Book:
    """What a page about all operators calls. Each method shows one result."""

    def __init__(self) -> None:
        self._gpus: dict[str, dict[str, pd.DataFrame]] = {}
        self._drawn: dict[str, pd.DataFrame] = {}

    # Look up

    def _recorded(self) -> dict[str, dict[str, pd.DataFrame]]:
        """The records of each GPU, by its name and by operator, without steps on the CPU."""
        if not self._gpus:
            given = {machine.recorded(slug).name: records(slug) for slug in machine.slugs()}
            if machine.slug() not in machine.slugs():  # it is that of FUSEBOOK_RECORDS
                given[machine.recorded().name] = records()
            for gpu, found in given.items():
                self._gpus[gpu.removeprefix("NVIDIA ").partition(" ")[0]] = {
                    name: frame[[not OPS[name].variants[v].on_cpu if v in OPS[name].variants else True
                                 for v in frame["variant"]]]
                    for name, frame in found.items()
                }  # fmt: skip
        return self._gpus

    def look_up(self) -> Shown:
        """Each recorded result: time by three clocks, memory, and the call; above it, how many there are."""
        found = self._recorded()
        parts, best = zip(*(_every(name, f) for one in found.values() for name, f in one.items()), strict=True)
        table = pd.concat(parts, ignore_index=True)
        table.insert(0, "GPU", [gpu for gpu, one in found.items() for f in one.values() for _ in range(len(f))])
        every = pd.concat([f for one in found.values() for f in one.values()], ignore_index=True)
        wrong = int((every["variant"].str.startswith("fusebook") & every["status"].eq("wrong")).sum())
        text = (
            f"**{len(every):,} results** of {every['op'].nunique()} operators on {_joined(list(found))}. Of Fusebook's "
            f"results {wrong or 'none'} {'is' if wrong < 2 else 'are'} incorrect."
        )
        if stale := int(every["stale"].ne("").sum()):
            text += f" The code behind {stale:,} results has changed since; new times may differ."
        caption = "Bold: no implementation of the same arithmetic is more than 2 % faster"
        return _box([text], _show.sortable(table, caption, pd.concat(best, ignore_index=True)))

    def take(self) -> Shown:
        """Which implementation to take at each size, by end-to-end time and by GPU time."""
        parts = []
        for gpu, found in self._recorded().items():
            for op in _verdicts.ours(found):
                paid, cold = (_verdicts.choices(op, found[op.name], kind) for kind in ("paid", "cold"))
                rows = paid[[*_verdicts.GROUPS, "ours", "take"]].join(cold["take"].rename("take, by GPU time"))
                rows = rows.reset_index().rename(columns={"ours": "Fusebook"})
                rows = rows.replace(
                    {"take": {"ours": "Fusebook"}, "take, by GPU time": {"ours": "Fusebook"}}, regex=True
                )
                rows.insert(0, "operator", op.name)
                rows.insert(0, "GPU", gpu)
                parts.append(rows)
        text = "End-to-end time in microseconds; take: what is within 2 % of the fastest"
        return _show.sortable(pd.concat(parts, ignore_index=True), text)

    def counts(self) -> Shown:
        """By clock, at how many sizes Fusebook is faster, equal and slower than the fastest other implementation."""
        rows = {}
        for gpu, found in self._recorded().items():
            alike = [tables.alike(f) for f in found.values() if f["variant"].eq("fusebook").any()]
            standing = pd.concat([tables.standing(frame) for frame in alike])
            for clock, name in (("cold", "GPU time"), ("paid", "end to end"), ("call", "latency")):
                one = standing[standing.index == clock][["points", "faster", "equal", "slower"]].sum()
                if one["points"]:
                    rows[f"{gpu}, {name}"] = one.astype(int)
        frame = pd.DataFrame.from_dict(rows, orient="index").rename(columns={"points": "sizes and dtypes"})
        return _show.table(frame, "Fusebook against the fastest other implementation", fold=False)

    def downloads(self) -> Shown:
        """Every recorded result as CSV and XLSX."""
        found = [frame.assign(gpu=gpu) for gpu, one in self._recorded().items() for frame in one.values()]
        return _show.downloads(pd.concat(found, ignore_index=True), "all_results")

    # Random problems

    def problems(self, *, seed: int, cases: int, seconds: int) -> Shown:
        """Draw random problems and time them, or replay them; the box says what came out.

        Parameters
        ----------
        seed, cases, seconds : int
            Defaults of the command line: which problems, how many of each operator, and for how long.
        """
        args = options(seed=seed, cases=cases, seconds=seconds)
        self._drawn = explored(seed=args.seed, cases=args.cases, seconds=args.seconds)
        over = pd.concat([*self._ratios().values()]).dropna()
        targets = {name: explore.summary(OPS[name], f)["target"]["over torch"] for name, f in self._drawn.items()}
        missed = _joined([f"`{name}`" for name, target in targets.items() if target == "missed"])
        met, asked = (sum(target in words for target in targets.values()) for words in (["met"], ["met", "missed"]))
        wrong = [
            name
            for name, f in self._drawn.items()
            if (f["variant"].eq(explore.fusebooks(OPS[name])) & f["status"].isin(["wrong", "failed"])).any()
        ]
        many = sum(f["case"].nunique() for f in self._drawn.values())
        slower, origin = 100 * (over > 1 + tables.WITHIN).mean(), _numbers.origin(next(iter(self._drawn.values())))
        lines = [
            f"**{many} problems** of {len(self._drawn)} operators were drawn at random, {origin}. Fusebook is "
            f"{f'incorrect at some of {_joined(wrong)}' if wrong else 'correct at all of them'}.",
            f"**Median.** The best of torch and torch.compile takes {1 / over.median():.2f}x the GPU time of Fusebook.",
            f"**Losses.** Fusebook is more than 2 % slower in {slower:.0f} % of {len(over)} comparisons. At worst it "
            f"takes {over.max():.1f}x the time of the best.",
            f"**Targets.** {met} of {asked} operators meet theirs. These do not: {missed}.",
            self._of_users(),
        ]
        return _box(lines)

    def spread(self) -> Axes:
        """The time of Fusebook over that of the best of torch, a dot for each problem."""
        return plots.spread(
            self._ratios(),
            title="GPU time of Fusebook over that of the best of torch and torch.compile",
            xlabel="times as long; the bar is the median",
        )

    def _ratios(self) -> dict[str, pd.Series]:
        return {name: explore.ratios(OPS[name], frame)["over torch"] for name, frame in self._drawn.items()}

    def _of_users(self) -> str:
        """A sentence on the sizes that users reported."""
        try:
            over = measured("explored_reported", reported.times)["over torch"]
        except NoResults as missing:
            return f"**Sizes that users reported.** {missing.sentence}"
        good = (over <= 1 + tables.WITHIN).sum()
        return (
            f"**Sizes that users reported.** {good} of {len(over)} take at most 1.02 times as long, and the worst "
            f"{over.max():.2f} times."
        )

    # History

    def history(self) -> Shown:
        """The box: how many statements of each source hold, and on which GPU."""
        lines = []
        for source, about in history.SOURCES.items():
            found, on = zip(*(_statements(lesson) for lesson in about or [""]), strict=True)
            held = [o.holds for outcomes in found for o in outcomes if o.holds is not None]
            what = "statements" if about else "pieces of advice"
            if held:
                lines.append(f"**{source}.** {sum(held)} of {len(held)} {what} hold on {_joined(sorted(set(on)))}.")
        return _box(lines)

    def advice(self) -> Shown:
        """What became of the advice of a manual of 2012, line by line."""
        frames = evidence.Frames(history)
        rows = {}
        for one in history.ADVICE:
            found = evidence.evaluate(one.claim, frames)
            holds = {True: "yes", False: "no", None: "not measured"}[found.holds]
            rows[one.then] = {"holds": holds, "measured": found.text, "now": one.now}
        frame = pd.DataFrame.from_dict(rows, orient="index").rename_axis("advice of 2012 to 2014")
        held = int(frame["holds"].eq("yes").sum())
        where = _show.gathered(*frames.known.values())
        commits = [commit[:12] for commit in where.commits if " " not in commit]  # others name a version
        made = f"record of {where.machine.name}, {where.dates[-1]}, commits {_joined(commits)}"
        return _show.table(frame, f"{held} of {len(frame)} pieces of advice hold; {made}", fold=False)

    def statements(self, lesson: str) -> Shown:
        """Published statements behind a lesson, and whether they hold here.

        Parameters
        ----------
        lesson : str
            Its name.
        """
        found, on = _statements(lesson)
        if not found:
            return Shown("", "")
        holds = {True: "yes", False: "no", None: ""}
        frame = pd.DataFrame({"statement": [o.text for o in found], "holds": [holds[o.holds] for o in found]})
        judged = [o for o in found if o.holds is not None]
        held = sum(o.holds is True for o in judged)
        address = html.escape(_numbers.site(f"evidence/{lesson}"))
        shown = _show.table(
            frame.set_index("statement"), f"{held} of {len(judged)} statements hold on {on}", fold=False
        )
        link = f'<p><a href="{address}">The condition and the rows of each</a>.</p>' if address else ""
        return Shown(shown._repr_html_() + link, repr(shown))


def _statements(lesson: str) -> tuple[list[evidence.Outcome], str]:
    """What became of the published statements behind a lesson, and the GPU; without a name, of the advice of 2012."""
    about = history if not lesson else evidence.load(lesson) if lesson in evidence.lessons() else None
    if about is None:
        return [], ""
    frames = evidence.Frames(about)
    found = [evidence.evaluate(one, frames) for one in about.CLAIMS if one.kind == "statement"]
    return found, machine.recorded(frames.gpu).name


def _every(name: str, frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every result of an operator, the fastest of each size first, and which times are the best of their arithmetic."""
    op = OPS[name]
    point = frame.groupby([frame["dtype"], tables.label(frame)], sort=False).ngroup()
    frame = frame.assign(point=point).sort_values(["point", "gpu_us"], kind="stable").drop(columns="point")
    frame = frame.reset_index(drop=True)
    times = pd.DataFrame(
        {title: tables.timed(frame, kind)[tables.column(kind)] for title, kind in _CLOCKS.items()}, frame.index
    )
    least = times.groupby([frame["dtype"], tables.label(frame), frame["math"].fillna("")]).transform("min")
    status = frame["status"].map(lambda text: _STATUS.get(text, f"({text})"))
    sizes = [" ".join(f"{n}={_size(v)}" for n, v in zip(tables.dims(frame), row, strict=True) if v == v)
             for row in frame[tables.dims(frame)].itertuples(index=False)]  # fmt: skip
    told = pd.DataFrame(
        {
            "operator": name,
            "implementation": frame["variant"].replace({"fusebook": "Fusebook"}),
            "size": sizes,
            "dtype": frame["dtype"],
            **times,
            "memory, MB": frame["peak_bytes"] / 1e6,
            "call": status.where(status != "", [call(op, variant) for variant in frame["variant"]]),
        }
    )
    return told, times <= (1 + tables.WITHIN) * least


def _size(value: Any) -> str:
    return value if isinstance(value, str) else str(int(value))


def _box(lines: list[str], below: Shown | None = None) -> Shown:
    """Sentences in the box under a title, and what is below."""
    made = "".join(f'<p class="fb-verdict-line">{_numbers.joined([line])}</p>' for line in lines)
    text = "\n".join(_numbers.plainly([line]) for line in lines)
    after = below._repr_html_() if below else ""
    return Shown(f'<div class="fb-box fb-verdict-box"><div>{made}</div></div>{after}', text)._now()


def _joined(names: list[str]) -> str:
    """Names as a list in a sentence."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else "none"
