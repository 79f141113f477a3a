"""The page of evidence behind each lesson, made from its claims and records: one template, and no prose by hand.

It is written as reStructuredText into docs/evidence before Sphinx reads its sources, and again only when something that
it is made from has changed.
"""

import hashlib
from pathlib import Path

from sphinx.util import logging

import pages

__all__ = ["page", "setup", "stamp", "write"]

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"claim": "Claims", "target": "Targets", "statement": "Published claims"}
VERDICTS = {"claim": ("true", "false"), "target": ("met", "missed"), "statement": ("holds", "does not hold")}


def raw(shown):
    """HTML as reStructuredText."""
    text = shown if isinstance(shown, str) else shown._repr_html_()
    return ".. raw:: html\n\n" + "".join(f"   {line}\n" for line in text.splitlines()) + "\n"


def heading(label, text):
    """A heading of a section, with its fixed label."""
    return f".. _{label}:\n\n{text}\n{'-' * len(text)}\n\n"


def outcome_block(found):
    """A claim with its verdict, condition, scope, worst point, address and rows."""
    import pandas as pd

    from fusebook.lesson._show import rich, table

    claim = found.claim
    state = "fb-open" if found.holds is None else "fb-true" if found.holds else "fb-false"
    word = "" if found.holds is None else VERDICTS[claim.kind][not found.holds] + ": "
    if claim.condition and found.holds is None:
        word = "not measured: "
    said = [f"Scope: {claim.scope}."]
    if claim.condition:
        said.insert(0, f"Condition: {claim.condition} at each point.")
    if found.worst:
        said.append(f"Fulfilled at {found.good.sum()} of {len(found.good)}; worst {found.worst}.")
    rows = ""
    if len(found.numbers) > 1:
        frame = pd.DataFrame({"value": found.numbers})
        if len(found.good):
            frame["fulfilled"] = found.good
        rows = table(frame.rename_axis([name or "" for name in frame.index.names]), "Rows", fold=True)._repr_html_()
    return (
        f'<div class="fb-evidence-claim" id="{claim.id}"><ul class="fb-claims"><li class="fb-{claim.kind} {state}">'
        f'<span class="fb-verdict">{word}</span>{rich(found.text)} '
        f'<a class="headerlink" href="#{claim.id}" title="Link to this claim">#</a></li></ul>'
        f'<p class="fb-detail">{rich(" ".join(said))}</p>{rows}</div>'
    )


def outcomes(about, frames, kind):
    """The blocks of all claims of a kind."""
    from fusebook.lesson import evidence

    found = [evidence.evaluate(claim, frames) for claim in about.CLAIMS if claim.kind == kind]
    judged = [one for one in found if one.claim.condition]
    good, bad = (sum(one.holds is value for one in judged) for value in (True, False))
    count = f"<p>{len(judged)} with a condition: {good} {VERDICTS[kind][0]}, {bad} {VERDICTS[kind][1]}.</p>"
    return count + "\n".join(map(outcome_block, found))


def by_size(op, frame):
    """Which implementation to take at each size, by two clocks."""
    from fusebook import tables
    from fusebook.lesson import _show, _verdicts

    if "fusebook" not in op.variants:  # whole graphs are compared, of which several have kernels of Fusebook
        clocks = {"cold": "GPU time", "call": "latency"}
        shown = (_show.table(tables.times(frame, k), f"Microseconds of {c}", fold=False) for k, c in clocks.items())
        return "\n".join(table._repr_html_() for table in shown)
    parts = []
    for kind, clock in (("cold", "GPU time"), ("paid", "end-to-end time")):
        table = _verdicts.choices(op, frame, kind).reset_index().rename(columns={"ours": "Fusebook"})
        table["take"] = table["take"].str.replace("ours", "Fusebook")
        text = "the fastest is best, and what is within 2 % of it can be taken"
        parts.append(_show.sortable(table, f"{op.name}: microseconds of {clock} by size; {text}")._repr_html_())
    return "\n".join(parts)


def implementations(op, frame):
    """Every implementation at every size: all clocks, memory and error."""
    import pandas as pd

    from fusebook import tables
    from fusebook.lesson import _show

    status = frame["status"].where(frame["status"] != "ok", "")
    told = pd.DataFrame(
        {
            "implementation": frame["variant"],
            "size": tables.label(frame),
            "dtype": frame["dtype"],
            "GPU time, cold L2": frame["gpu_us"],
            "GPU time, warm L2": frame["gpu_warm_us"],
            "launch": frame["launch_us"],
            "end-to-end": tables.paid(frame),
            "latency": frame["latency_us"],
            "peak memory, MB": frame["peak_bytes"] / 1e6,
            "error / tolerance": frame["error"] / frame["tolerance"],
            "status": status,
        }
    )
    return _show.sortable(told, f"{op.name}: times in microseconds, medians")


def first_calls(op, frame):
    """By implementation, how long first calls take, and how many Triton kernels are compiled for all sizes."""
    from fusebook.lesson import _show

    timed = frame[frame["first_call_s"].notna()].groupby("variant", sort=False)
    told = timed["first_call_s"].agg(sizes="size", median="median", longest="max", together="sum")
    told = told.assign(kernels=timed["binaries"].sum(min_count=1)).rename(
        columns={name: f"{name}, s" for name in ("median", "longest", "together")}
    )
    return _show.table(told, f"{op.name}: first calls, compilation included, and compiled Triton kernels", fold=False)


def elsewhere(op, frame):
    """Where another implementation is faster, by three clocks."""
    from fusebook import tables
    from fusebook.lesson import _show

    if "fusebook" not in op.variants:
        return "<p>See the times by size: several implementations are Fusebook's.</p>"
    alike, parts = tables.alike(frame), []
    for kind, clock in (("cold", "GPU time"), ("paid", "end-to-end time"), ("call", "latency")):
        lost = tables.losses(alike, kind=kind)
        lost = lost.rename(columns={"faster": "fastest other", "times as long": "Fusebook over it"})
        parts.append(_show.table(lost, f"{op.name}, by {clock}", fold=False))
    return "\n".join(part._repr_html_() for part in parts)


def hardware(about, frames):
    """Registers, warps and lines of the steps, and what the hardware counters saw."""
    from fusebook.lesson import _show
    from fusebook.lesson.evidence import NotRecorded

    parts = []
    for name, caption in (
        ("steps", "Steps"),
        ("counters", "Hardware counters: bytes, sectors per load, occupancy in %"),
    ):
        try:
            frame = frames[name]
        except (NotRecorded, KeyError):
            continue
        keys = [key for key in ("step", "kernel", "shape", "dtype") if key in frame]
        parts.append(_show.table(frame.set_index(keys), caption, fold=True)._repr_html_())
    return "\n".join(parts) or "<p>Not recorded.</p>"


def random_problems(op):
    """The problems of an operator that were drawn at random, and whether its target is met."""
    from fusebook.lesson import _place, _show
    from fusebook.measure import explore, machine

    for place in machine.places():
        if (file := explore.path(place.name, op.name, place.parent)).exists():
            _place.note(file)
            frame = explore.read(op, place.name, place.parent)
            drawn = explore.ratios(op, frame).drop(columns=["case", "math", "line", "bytes"])
            names = {"fusebook_us": "Fusebook, us", "torch_us": "torch, us", "best_us": "best, us"}
            drawn = drawn.rename(
                columns=names | {"over torch": "Fusebook over torch", "over all": "Fusebook over best"}
            )
            found = _show.table(explore.summary(op, frame).rename_axis("Fusebook"), f"{op.name}, GPU time", fold=False)
            caption = f"{op.name}: {len(drawn)} problems drawn at random"
            return found._repr_html_() + _show.sortable(drawn, caption)._repr_html_()
    return f"<p><code>{op.name}</code>: none recorded.</p>"


def origin(frames, about):
    """Where every frame comes from."""
    import pandas as pd

    from fusebook.lesson import _show
    from fusebook.lesson.evidence import NotRecorded

    rows = {}
    for name in about.FRAMES:
        try:
            found = _show.gathered(frames[name])
        except (NotRecorded, ValueError):
            continue
        rows[name] = {
            "GPU": found.machine.name,
            "driver": found.machine.driver,
            "versions": found.versions,
            "dates": " to ".join(dict.fromkeys((found.dates[0], found.dates[-1]))),
            "commit": ", ".join(commit[:12] for commit in found.commits),
        }
    files = [_show.downloads(frames.of(op), f"evidence_{op}")._repr_html_() for op in operators(about)]
    files = "".join(files).replace('href="downloads/', 'href="../auto_examples/downloads/')
    made = _show.table(pd.DataFrame.from_dict(rows, orient="index"), "Where the rows come from", fold=False)
    return made._repr_html_() + files


def operators(about):
    """The operators of a lesson that it has rows of: a lesson on several GPUs has what its ranks measure."""
    recorded = {getattr(spec, "op", "") for spec in about.FRAMES.values()}
    return [op for op in about.OPERATORS if op in recorded]


def measurements(about, frames):
    """Every frame that a lesson measures by itself."""
    from fusebook.lesson import _show

    return "\n".join(_show.sortable(frames[name], name)._repr_html_() for name in about.FRAMES)


def page(name):
    """The page of evidence of a lesson, as reStructuredText."""
    from fusebook.cards import OPS
    from fusebook.lesson import evidence
    from fusebook.lesson._show import rich

    about = evidence.load(name)
    frames = evidence.Frames(about)
    title = f"Evidence: {next(p for p in pages.pages().values() if p.path.stem == name).title}"
    try:
        ops = {op: frames.of(op) for op in operators(about)}
        measured = "" if ops else raw(measurements(about, frames))
    except evidence.NotRecorded as missing:
        return f":orphan:\n\n{title}\n{'=' * len(title)}\n\nNothing is recorded yet: {missing}.\n"
    every = [(OPS[op], frame) for op, frame in ops.items()]

    def each(function):
        return "\n".join(raw(function(op, frame)) for op, frame in every)

    label = f"evidence-{name}"
    parts = [
        f":orphan:\n\n{title}\n{'=' * len(title)}\n",
        f"What is behind :doc:`/auto_examples/{name}`: every claim with its condition, and every recorded number.\n",
    ]
    log = "\n".join(f"<p>{rich(text)}</p>" for text in about.LOG)
    sections = [
        ("sizes", "Verdict by size", each(by_size)),
        *((kind, what, raw(outcomes(about, frames, kind))) for kind, what in KINDS.items()),
        ("measurements", "All measurements", measured),
        ("implementations", "All implementations", each(implementations)),
        ("first", "First calls and compiled kernels", each(first_calls)),
        ("losses", "Where another implementation is faster", each(elsewhere)),
        ("hardware", "Registers and hardware counters", raw(hardware(about, frames)) if ops else ""),
        ("random", "Random problems", "\n".join(raw(random_problems(op)) for op, _ in every)),
        ("provenance", "Provenance", raw(origin(frames, about))),
        ("log", "Log", raw(log)),
    ]
    for number, (short, what, text) in enumerate([section for section in sections if section[2]], 1):
        parts += [heading(f"{label}-{short}", f"{number}. {what}"), text]
    return "\n".join(parts)


def stamp(name):
    """A hash of what a page of evidence is made from: this file, the library without its kernels, and the records."""
    from fusebook.measure import machine

    source = ROOT / "src" / "fusebook"
    made_from = [Path(__file__), ROOT / "examples" / f"{name}.py", *source.glob("*.py"), *source.glob("measure/*.py")]
    made_from += [*source.glob("lesson/**/*.py"), *source.glob("cards/*.py")]
    digest = hashlib.sha256()
    for path in sorted(made_from):
        digest.update(path.read_bytes())
    for place in machine.places():
        for path in sorted(place.rglob("*.csv")):
            digest.update(f"{path} {path.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()


def write(app):
    """Write the pages of evidence that are not there or made from something else now."""
    from fusebook.lesson import evidence

    folder = Path(app.srcdir) / "evidence"
    folder.mkdir(exist_ok=True)
    names = [name for name in evidence.lessons() if (folder.parents[1] / "examples" / f"{name}.py").exists()]
    for old in folder.glob("*.rst"):
        if old.stem not in names:
            old.unlink()
    for name in names:
        file, now = folder / f"{name}.rst", f".. {stamp(name)}\n\n"
        if file.exists() and file.read_text(encoding="utf-8").startswith(now):
            continue
        logger.info("writing the evidence of %s", name)
        file.write_text(now + page(name), encoding="utf-8")


def setup(app):
    """Connect the handler."""
    app.connect("builder-inited", write, priority=950)  # after the gallery
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
