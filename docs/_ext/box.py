"""The box under each page's title: for whom it is, when to use what, the figure, on which GPU, and its files.

When a page has run, what it claimed and showed is kept beside what is generated from it; when Sphinx reads the page,
the box is made from that. Where a page measured, its own results decide; where it replayed, the whole record of its
operators does, as on the front page. What a page has to say of itself stands in its docstring, see `pages`.
"""

import html
import json
import re
from pathlib import Path

import front
import lessons
import pages

__all__ = ["insert", "keep", "rst"]

NAMES = {"torch": "torch", "torch.compile": "torch.compile", "libraries": "a library", "ours": "this"}

#: What is counted: whose it is, and the words of what came out well and badly, each of many and of one.
COUNTED = {
    "claim": ("Of our claims here", ("are true", "is true"), ("false", "false")),
    "target": ("Of our targets", ("are met", "is met"), ("missed", "missed")),
    "statement": ("Of sentences quoted from others", ("hold", "holds"), ("do not", "does not")),
}


# When a page has run --------------------------------------------------------------------------------------------------


def keep(file, name, shown):
    """Write down what a page has shown: `shown` is ``fusebook.page._place.shown``."""
    from fusebook.page.show import gathered

    claims, frames = shown.get("claims", []), shown.get("frames", [])
    facts = {
        "headlines": [[c.verdict, c.mark, c.text, c.detail] for c in claims if c.headline],
        "tables": [table._repr_html_() for table in shown.get("tables", [])],
        "counts": {kind: count([claim for claim in claims if claim.kind == kind]) for kind in COUNTED},
        "false": [[c.text, c.detail] for c in claims if c.kind in ("claim", "target") and c.true is False],
    }
    if every := frames + shown.get("asked", []):
        told = gathered(*every)
        facts |= {"gpu": told.machine.name, "measured": told.measured, "stale": told.stale, "raw": told.raw}
        facts["dates"] = " to ".join(dict.fromkeys((told.dates[0], told.dates[-1])))
        facts["versions"] = told.versions
    if frames_ := shown.get("gains"):
        facts["gains"] = lessons.gains(name, frames_[-1])
    facts["ops"] = [of(op, frame) for op, frame in decisive(name, frames)]
    file.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def count(claims):
    """How many are true, false and undecided."""
    return [sum(claim.true is value for claim in claims) for value in (True, False, None)]


def decisive(name, frames):
    """The operators that a page tells of, and the results that decide about them."""
    import pandas as pd

    import answers
    from fusebook import cards

    number = int(name.split("_")[1])
    live = any(frame.attrs["origin"].measured for frame in frames)  # then no record of another GPU is put beside
    for op in cards.OPS.values():
        if answers.page_of(op) != number:
            continue
        own = [f for f in frames if "op" in f and "variant" in f and set(f["op"]) == {op.name}]
        if live and own:
            yield op, pd.concat(own, ignore_index=True)
        elif not live and (found := front.record_of(op.name)) is not None:
            yield op, found


def of(op, frame):
    """What results say about one operator, as plain values; by the device's clock where the caller was not timed."""
    import answers
    from fusebook import tables
    from fusebook.page.verdicts import choices

    if not frame["variant"].eq("fusebook").any():
        return {"op": op.name}
    verdict = answers.verdict(op, frame)
    tables_ = {kind: choices(op, frame, kind) for kind in ("cold", "paid")}
    used = {kind: answers.uses(table).to_dict("index") for kind, table in tables_.items()}
    paid, cold = tables_["paid"], tables_["cold"]
    every = paid.reindex(cold.index.append(paid.index.difference(cold.index))).assign(**{"take cold": cold["take"]})
    takes = ["take", "take cold"]
    shown = tables.pretty(every.assign(**every[takes].fillna("not measured"))[[*NAMES, *takes]])
    decides = verdict.torch[verdict.decides]
    return {
        "op": op.name,
        "word": front.word(verdict),
        "kind": verdict.kind,
        "range": decides.range + (f", median {decides.middle}" if decides.points > 1 else ""),
        "libraries": list(verdict.named),
        "uses": used,
        "sizes": [[*index, *row] for index, row in zip(shown.index, shown.to_numpy().tolist(), strict=True)],
    }


# When Sphinx reads the page -------------------------------------------------------------------------------------------


def insert(app, docname, source):
    """Put the box under the title of a page, and take from its text what the box says."""
    if not docname.startswith("auto_examples/plot_") or lessons.of_lesson_api(docname):
        return
    name = docname.removeprefix("auto_examples/")
    file = Path(app.srcdir) / "auto_examples" / f"{name}.box.json"
    about = pages.pages().get(name.split("_")[1])
    if about is None or about.path.stem != name:
        return
    for watched in (file, Path(__file__)):
        app.env.note_dependency(str(watched), docname=docname)
    facts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    text = pages.WHOM.sub("", pages.BEFORE.sub("", source[0], count=1), count=1)
    title = re.escape(about.title)
    box = rst(about, facts, app.config.fusebook_repository)
    source[0] = re.sub(rf"^({title}\n=+\n)", lambda found: f"{found[1]}\n{box}\n", text, count=1, flags=re.MULTILINE)


def rst(about, facts, repository=""):
    """The box of a page as reStructuredText."""
    every = pages.pages()
    rows = []
    if "gpu" in facts:
        how = "measured as this page was built" if facts["measured"] else "replayed from its record"
        rows += [("GPU", f"{facts['gpu']}, {how}; {facts['dates']}"), ("Versions", facts["versions"])]
        if facts["stale"]:
            shown, more = facts["stale"][:3], len(facts["stale"]) - 3
            rows.append(("Changed since", "; ".join(shown) + (f"; and {more} more, named below" if more > 0 else "")))
    else:
        rows.append(("GPU", "no results here: see the note on the page"))
    stem = about.path.stem
    files = [f":download:`notebook <{stem}.ipynb>`", f":download:`script <{stem}.py>`"]
    if address := pages.colab(stem, repository):
        files.append(f"`Colab <{address}>`__")
    rows.append(("Files", ", ".join(files + records(facts.get("raw", [])))))
    shown = told(facts).splitlines()
    lines = [".. container:: fb-box", "", f"   {reader(about, every)}", "", "   .. raw:: html", ""]
    lines += [f"      {line}" for line in shown] + [""]
    lines += [f"   :{name}: {value}" for name, value in rows]
    return "\n".join(lines) + "\n"


def reader(about, every):
    """For whom the page is, what to have read, and how many minutes it takes."""
    before = ", ".join(f":doc:`{n} {every[n].title} </{every[n].document}>`" for n in about.before) or "nothing"
    whom = f"**For** {about.whom.rstrip('.')}. " if about.whom else ""
    return f"{whom}**To have read:** {before}. **Minutes:** {about.minutes}."


def records(raw):
    """The records, as links where they have an address: the first few."""
    linked = [f"`{name} <{url}>`__" if url else name for name, url in raw]
    return linked[:3] + ([f"and {more} more record{'s' * (more > 1)} below"] if (more := len(linked) - 3) > 0 else [])


def told(facts):
    """The verdicts as HTML."""
    parts = []
    for verdict, mark, text, detail in facts.get("headlines", []):
        parts.append(
            f'<p class="fb-box-headline"><span class="fb-mark" aria-hidden="true">{mark}</span> '
            f"<strong>{verdict}:</strong> {detailed(text, detail)}</p>"
        )
    parts += facts.get("tables", [])
    ops = [op for op in facts.get("ops", []) if "word" in op]
    if ops:
        parts += [table(ops), sizes(ops)]
    if sentence := counted(facts.get("counts", {})):
        false = "".join(f"<li>{detailed(*claim)}</li>" for claim in facts.get("false", []))
        parts.append(
            f'<details class="fb-fold"><summary class="fb-box-claims">{sentence} Which are {bad(facts["counts"])}?'
            f"</summary><ul>{false}</ul></details>"
            if false
            else f'<p class="fb-box-claims">{sentence}</p>'
        )
    return "\n".join(parts) or "<p>No results.</p>"


def detailed(text, detail):
    """A claim, and at how many rows of its table it was checked."""
    from fusebook.page.show import rich

    return rich(text) + (f" <small>({rich(detail)})</small>" if detail else "")


def counted(counts):
    """How many claims came out how."""
    told = []
    for kind, (whose, yes, no) in COUNTED.items():
        true, false, open_ = counts.get(kind, (0, 0, 0))
        if true or false or open_:
            missing = f", {open_} not measured" if open_ else ""
            told.append(f"{whose} {true} {yes[true == 1]}, {false} {no[false == 1]}{missing}.")
    return " ".join(told)


def bad(counts):
    """What is asked of those that came out badly: false, missed or both."""
    return " or ".join(COUNTED[kind][2][0] for kind in ("claim", "target") if counts.get(kind, (0, 0))[1])


def table(ops):
    """When to use what: a row an operator, a column a way."""
    head = "".join(f'<th scope="col">Use {name}</th>' for name in NAMES.values())
    rows = []
    for op in ops:
        cells = "".join(f"<td>{use(op, way)}</td>" for way in NAMES)
        rows.append(
            f'<tr><th scope="row"><code>{op["op"].replace("_", "_<wbr>")}</code></th>'
            f'<td class="fb-word fb-word-{op["kind"]}">{html.escape(op["word"])}<small>{op["range"]}</small></td>'
            f"{cells}</tr>"
        )
    return (
        '<div class="fb-scroll fb-should-scroll" role="region" tabindex="0" aria-label="When to use what">'
        '<table class="fb-should"><caption>At how many sizes each way is the fastest, for the caller and on the '
        "device; within 2 % counts as fastest too. Under the verdict: our time over that of the faster of torch and "
        'torch.compile</caption><thead><tr><th scope="col">Operator</th>'
        f'<th scope="col">Write it?</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def use(op, way):
    """When to use one way of an operator."""
    caller, device = op["uses"]["paid"][way], op["uses"]["cold"][way]
    if not caller["points"] and not device["points"]:
        return "<span>not compared</span>"
    parts = []
    if caller["points"]:
        alone = f"<small>the only one at {caller['alone']}</small>" if caller["alone"] else ""
        parts.append(f"<span>{caller['best']} of {caller['points']}</span>{alone}")
    if device["points"]:
        parts.append(f"<small>device: {device['best']} of {device['points']}</small>")
    if way == "libraries":
        parts.append(f'<small class="fb-names">{html.escape(", ".join(op["libraries"]))}</small>')
    return "".join(parts)


def sizes(ops):
    """Which way to take at each size, on demand."""
    head = "".join(f'<th scope="col">{h}</th>' for h in ("Size", "Dtype", *NAMES.values(), "Take", "On the device"))
    tables = []
    for op in ops:
        name = html.escape(op["op"])
        rows = "".join(
            f'<tr><th scope="row">{html.escape(row[0])}</th>'
            f"{''.join(f'<td>{html.escape(str(value))}</td>' for value in row[1:])}</tr>"
            for row in op["sizes"]
        )
        tables.append(
            f'<div class="fb-scroll" role="region" tabindex="0" aria-label="Which way for which size of {name}">'
            f'<table class="fb-should"><caption><code>{name}</code>: microseconds that a caller pays, the smallest '
            f"problem first. Take: what is within 2 % of the fastest</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )
    many = sum(len(op["sizes"]) for op in ops)
    return (
        f'<details class="fb-fold"><summary>Which way for which size: all {many}</summary>{"".join(tables)}</details>'
    )
