"""What a lesson says in numbers: its verdict, its steps, the gains in its headings, and when to use the library."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch

import fusebook
from fusebook import tables
from fusebook.cards import OPS
from fusebook.lesson import _place, _show, _verdicts, picture
from fusebook.lesson._checks import plain
from fusebook.lesson._counters import counters
from fusebook.lesson._show import Shown
from fusebook.lesson.evidence import Frames, NotRecorded
from fusebook.measure import bench, check, inputs, timing
from fusebook.measure.bench import Origin
from fusebook.measure.op import Op

#: ``{gain rows at N=256}``, ``{gain rows over eager at N=256, bfloat16}``, or ``{gain rows at M=8, N=256}``.
MARKER = re.compile(
    r"\{gain (?P<step>\w+)(?: over (?P<over>\w+))? at (?:M=(?P<rows>\d+), )?N=(?P<width>\d+)(?:, (?P<dtype>\w+))?\}"
)
#: What a reader sees instead of the name of a variant.
_SAID = {
    "eager": "eager PyTorch",
    "loop": "the loop",
    "Liger (of a copy)": "Liger",
    "two + cat": "a concat of two matmuls",
    "cat + one": "a concat and one matmul",
    "packed": "one matmul of packed weights",
    "packed + compiled": "packed weights and torch.compile",
    "views": "two matmuls into views",
}


def microseconds(value: float) -> str:
    """A time as a reader wants it."""
    return f"{value / 1000:,.2f} ms" if value >= 1000 else f"{value:.3g} us"


def times(ratio: float) -> str:
    """A speedup in two or three digits."""
    return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x" if ratio < 99.95 else f"{ratio:.0f}x"


def origin(frame: pd.DataFrame) -> str:
    """On which GPU rows were measured, and when; the evidence names versions and commits."""
    found = frame.attrs.get("origin")
    if not isinstance(found, Origin) or found.machine is None:
        return ""
    if found.measured:
        return f"measured now on {found.machine.name}"
    where = _show.gathered(frame)
    return f"record of {where.machine.name}, {where.dates[-1]}"


# Gains in headings ----------------------------------------------------------------------------------------------------


def gain(
    frames: Frames,
    step: str,
    width: str,
    dtype: str | None = None,
    over: str | None = None,
    rows: str | None = None,
) -> str:
    """What a step gains over another, or the one before, e.g. ``(1.35x faster than step 1 at N = 256)``.

    With ``memory`` for the dtype, what it saves in the lesson's first dtype: ``(4.0x less memory than step 1 ...)``.
    With ``warm``, the gain of calls in a row.

    Raises
    ------
    ValueError
        Names the steps that there are.
    """
    order = frames.about.STEPS
    for named, known in ((step, order[1:]), (over or order[0], order)):
        if named not in known:
            raise ValueError(f"gain: expected a step of {', '.join(known)}, got {named!r}")
    before = over or order[order.index(step) - 1]
    label = labels(frames.about)[before]
    memory, special = dtype == "memory", {"memory": "peak_bytes", "warm": "gpu_warm_us"}
    at = f"at {f'M = {rows}, ' if rows else ''}N = {width}"
    at += f" in {dtype}" if dtype and dtype not in special else ", warm" if dtype == "warm" else ""
    first = frames.about.DTYPES[0]
    clock = tables.column(getattr(frames.about, "CLOCK", "cold"))
    dtype, column = (first, special[dtype]) if dtype in special else (dtype or first, clock)
    shape = rf"{rows}x(.*x)?{width}" if rows else f".*x{width}"
    try:
        found = tables.where(frames["steps"], dtype=dtype, shape=lambda s: s.str.fullmatch(shape))
    except NotRecorded:
        return f"(not measured {at})"
    if column not in found:
        return f"(not measured {at})"
    taken = found.drop_duplicates("step").set_index("step")[column].reindex([before, step])
    if taken.isna().any():
        return f"(not measured {at})"
    ratio = float(taken[before] / taken[step])
    if abs(ratio - 1) <= tables.WITHIN:
        return f"(as {'much memory' if memory else 'fast'} as {label} {at})"
    words = ("less memory", "more memory") if memory else ("faster", "slower")
    word, ratio = (words[0], ratio) if ratio > 1 else (words[1], 1 / ratio)
    return f"({times(ratio)} {word} than {label} {at})"


def filled(text: str, frames: Frames) -> str:
    """A text with every marker of a gain filled in."""
    return MARKER.sub(lambda found: gain(frames, **found.groupdict()), text)


# Steps ----------------------------------------------------------------------------------------------------------------


def labels(about: Any) -> dict[str, str]:
    """What a reader sees instead of the name of a step: a number, but for the first one of each operator."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for step in about.STEPS:
        operator = getattr(about, "OTHER_STEPS", {}).get(step, "")
        name = {"numpy": "NumPy", "nccl": "NCCL"}.get(step, step.replace("_", " "))
        found[step] = f"step {len(found) - len(seen) + 1}" if operator in seen else name
        seen.add(operator)
    return found


def by_operator(op: Op, about: Any, steps: Mapping[str, Any]) -> list[tuple[Op, str, dict[str, Any]]]:
    """Each operator of a lesson's steps, the name of the library's own step, and the operator's steps."""
    found: dict[str, dict[str, Any]] = {}
    for name, step in steps.items():
        found.setdefault(getattr(about, "OTHER_STEPS", {}).get(name, op.name), {})[name] = step
    return [(OPS[n], "fusebook" if n == op.name else f"fusebook.{n}", some) for n, some in found.items()]


def _is_correct(yard: check.Yardstick, got: Any) -> bool:
    return yard.judge(got).ok


def measured_steps(
    op: Op, about: Any, steps: Mapping[str, Callable[..., Any]], extra: Mapping[str, Callable[..., Any]]
) -> pd.DataFrame:
    """Check and time every step at each size of the lesson, with a copy of the same bytes."""
    parts = []
    for operator, own, some in by_operator(op, about, {**steps, **extra}):
        library, look = operator.variants["fusebook"], getattr(about, "LOOK", None)
        for dtype in about.DTYPES:
            for shape in about.SHAPES:
                dims, given = _inputs(operator, shape, dtype)
                yard = check.yardstick(operator, given)
                calls = {name: functools.partial(step, *given) for name, step in some.items()}
                calls[own] = functools.partial(library.run, *library.given(*given))
                cost = operator.cost(getattr(torch, dtype).itemsize, **dims)
                least = torch.empty((cost.read + cost.write) // 2, dtype=torch.int8, device=yard.want[0].device)
                calls["copy"] = functools.partial(torch.empty_like(least).copy_, least)
                frame = bench.staircase(calls, functools.partial(_is_correct, yard), repeat=15, look=look)
                frame = frame.rename(columns={"us": "gpu_us", "right": "correct"})
                if getattr(about, "WARM", False):
                    warm = timing.warm(calls)
                    frame["gpu_warm_us"] = [q.q50 * 1e6 if (q := warm[name]) else math.nan for name in frame["step"]]
                frame["peak_bytes"] = [bench._peak(library, calls[name]) for name in frame["step"]]
                copied = frame["step"] == "copy"
                frame = frame.assign(copy_us=frame.loc[copied, "gpu_us"].iloc[0])[~copied]
                parts.append(frame.assign(shape="x".join(map(str, shape)), dtype=dtype))
    return pd.concat(parts, ignore_index=True)


def _inputs(op: Op, shape: Sequence[int], dtype: str) -> tuple[dict[str, Any], tuple[Any, ...]]:
    names = [name for name, value in op.edges[0].items() if isinstance(value, int)]
    dims = {**op.edges[0], **dict(zip(names, shape, strict=True))}
    return dims, op.make(inputs.generator(0), getattr(torch, dtype), **dims)


def staircase(op: Op, about: Any, frame: pd.DataFrame, steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """Percent of copy speed by step and size, or what ``at`` says of it, and the lines of each step."""
    if "at" not in frame:
        frame = frame.assign(at=frame["shape"].str.rpartition("x")[2] + " " + frame["dtype"])
    wide = frame.assign(share=100 * frame["copy_us"] / frame["gpu_us"]).pivot_table("share", "step", "at", sort=False)
    groups, told = by_operator(op, about, steps), labels(about)
    lines, named = {}, {}
    for operator, own, some in groups:
        for name, step in some.items():
            lines[name] = _show.lines_of(*plain(step))
            named[name] = f"{told[name]}, {name}" if told[name].startswith("step ") else told[name]
        lines[own], named[own] = library_lines(operator), f"fusebook.{operator.name}"
    wide = wide.reindex([*lines]).assign(lines=pd.Series(lines)).rename(index=named)
    wide.index.name = wide.columns.name = None
    return wide


def library_lines(op: Op) -> int:
    """Lines of code behind a public function of the library, which serve all of its options."""
    return _show.lines_behind(getattr(fusebook, op.name))


def code_of(op: Op, about: Any, steps: Mapping[str, Callable[..., Any]]) -> list[Any]:
    """What decides the times of steps: each step, those of the evidence, the library's, the sizes and the dtypes."""
    libraries = [operator.variants["fusebook"].run for operator, _, _ in by_operator(op, about, steps)]
    timed = [about.timed] if hasattr(about, "timed") else []
    return [*steps.values(), *about.EXTRA_STEPS.values(), *libraries, *timed, about.SHAPES, about.DTYPES]


def counted(op: Op, about: Any, name: str, steps: Mapping[str, Callable[..., Any]], page: str) -> pd.DataFrame:
    """What the hardware counters say of the steps, for the evidence."""

    def to_count() -> dict[str, Callable[[], Any]]:
        calls: dict[str, Callable[[], Any]] = {}
        for operator, own, some in by_operator(op, about, steps):
            _, given = _inputs(operator, about.COUNTED, about.DTYPES[0])
            every = {**some, own: operator.variants["fusebook"].run}
            calls |= {name: functools.partial(step, *given) for name, step in every.items()}
        return calls

    return counters(name, to_count, page, [*code_of(op, about, steps), about.COUNTED])


# The verdict, and when to use the library -----------------------------------------------------------------------------


def _point(frame: pd.DataFrame, example: Mapping[str, Any], kind: str = "cold") -> pd.DataFrame:
    """The rows of the example; where it was not measured, of the largest size that most implementations have."""
    rows = tables.where(frame, **example)
    if rows["variant"].eq("fusebook").any():
        return rows
    timed = tables.timed(frame, kind)
    sizes = tables.label(timed) + timed["dtype"]
    many = sizes.map(sizes.value_counts())
    best = timed.assign(size=sizes)[many == many.max()].sort_values("roof_us")["size"].iloc[-1]
    return timed[sizes == best]


def _against(op: Op, frame: pd.DataFrame, *groups: str, kind: str = "cold") -> pd.Series:
    """The time of Fusebook over that of the fastest implementation of some groups, by size and dtype."""
    return tables.behind(_verdicts.compared(op, frame, groups), kind=kind)["times as long"]


def _libraries(op: Op, frame: pd.DataFrame, timed: bool = False) -> list[str]:
    """The libraries that ran, or those that have a GPU time, by the names that a reader sees."""
    found = _verdicts.compared(op, frame, ("libraries",))
    ran = found["gpu_us"].notna() if timed else found["status"] == "ok"
    return list(dict.fromkeys(found.loc[(found["group"] == "libraries") & ran, "variant"]))


def said(names: Sequence[str], word: str = "and") -> str:
    """Names of variants as a reader sees them: ``Liger and quack``."""
    *most, last = [_SAID.get(name, name) for name in names]
    return f"{', '.join(most)} {word} {last}" if most else last


def compared(ratios: Mapping[str, float]) -> str:
    """The times of others over that of Fusebook, as a sentence."""
    if not ratios:
        return ""
    (name, ratio), *rest = ratios.items()
    comma = ";" if any("," in name for name in ratios) else ","
    others = "".join(f"{comma} {name} {times(ratio)}" for name, ratio in rest)
    return f"For comparison, {name} takes {times(ratio)} as long{others}."


def _pace(ratios: pd.Series, sizes: str, other: str) -> str:
    """The median of times over those of another, at how many sizes they are longer, and at most by how much."""
    ratio, lost = float(ratios.median()), int((ratios > 1 + tables.WITHIN).sum())
    word = f"{times(1 / ratio)} faster than" if ratio < 1 else f"{times(ratio)} slower than"
    word = "as fast as" if abs(ratio - 1) <= tables.WITHIN else word
    worst = f"{lost} of them, {times(ratios.max())} at worst" if lost else "none"
    return f"In the median of {sizes}, Fusebook is {word} {other}. It is slower at {worst}."


def _many(frame: pd.DataFrame) -> str:
    """What points of a frame are called."""
    return "pairs of size and dtype" if frame["dtype"].ne(frame["dtype"].iloc[0]).any() else "sizes"


def legend(variants: Sequence[str], libraries: Sequence[str]) -> str:
    """What the names in a verdict mean."""
    meant = {
        "eager": "eager is one PyTorch operation after another",
        "torch": "torch is PyTorch's own function",
        "loop": "the loop has one PyTorch operation after another for each tensor",
        "foreach": "foreach and fused=True are options of torch.optim.AdamW",
        "eager in a graph": "a graph is a CUDA graph, captured before",
        "fusebook steps": "fusebook steps are two launches each",
        "sorted": "sorted is PyTorch's gradient of an embedding, which sorts first",
        "product": "product is a matmul with zeros and ones",
    }
    if "product" not in variants:
        meant["torch.compile, product"] = "implementations named product use a matmul"
    found = [text for name, text in meant.items() if name in variants]
    if libraries:
        kind = "libraries of kernels" if len(libraries) > 1 else "a library of kernels"
        found.append(f"{said(libraries)} {'are' if len(libraries) > 1 else 'is'} {kind}")
    text = "; ".join(found)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


#: What a clock is called in a verdict, and in the caption of its bars.
_CLOCKS = {
    "cold": ("GPU time", "GPU time of {at} (cold L2 cache)"),
    "paid": ("end-to-end time, the larger of CPU launch time and GPU time,", "End-to-end time of {at}"),
}


def verdict(
    op: Op, frame: pd.DataFrame, example: Mapping[str, Any], words: str = "", kind: str = "cold"
) -> tuple[list[str], Shown | None]:
    """Three sentences on time, on all sizes and on memory; and the times of one size, in `words`, as bars."""
    gpu, (clock, title) = tables.column(kind), _CLOCKS[kind]
    point = tables.timed(_point(frame, example, kind), kind).drop_duplicates("variant").set_index("variant")
    # Neither strategies nor checked calls.
    point = point[[bool(_verdicts.group(op, str(name))) for name in point.index]]
    if "fusebook" not in point.index:
        return ["Not measured."], None
    own: Any = point.loc["fusebook"]
    words = words or f"{' x '.join(f'{{{name}}}' for name in tables.dims(frame))} in {{dtype}}"
    at = words.format(**own)
    others = point.drop(index="fusebook")[gpu].sort_values()
    lines = [
        f"**Time.** `fusebook.{op.name}` takes **{microseconds(own[gpu])}** of {clock} at {at}. "
        f"{compared({said([str(name)]): us / own[gpu] for name, us in others.items()})}"
    ]
    torchs = _against(op, frame, "torch", "torch.compile", kind=kind)
    libraries = _against(op, frame, "libraries", kind=kind)
    many = _many(frame)
    compiles = any(way.recompiles for way in op.variants.values())
    graphs = any(name.endswith("in a graph") for name in op.variants)
    other = "the faster of torch and torch.compile" if compiles else "the fastest code of torch"
    other = "the fastest of torch and torch.compile, in a graph or not" if graphs else other
    pace = _pace(torchs, f"{len(torchs)} recorded {many}", other)
    text = f"**All sizes.** {pace}"
    if len(libraries):
        names = _libraries(op, frame, timed=True)
        same = len(libraries) == len(torchs)
        some = f"the same {many}" if same else f"the {len(libraries)} {many} that {said(names, 'or')} takes"
        fastest = f"{'' if len(names) < 2 else 'the faster of ' if len(names) == 2 else 'the fastest of '}{said(names)}"
        text += " " + _pace(libraries, some, fastest)
    lines.append(f"{text} Times within 2 % count as equal.")
    first = next(name for name in op.variants if frame["variant"].eq(name).any())
    lines.append(f"**Memory.** {_memory_of(op, frame, 'fusebook')} {_memory_of(op, frame, first)}")
    bars = {**others.sort_values(ascending=False), "Fusebook": own[gpu]}
    bars |= {"a copy": own["copy_us"]} if own["zone"] != "compute" and kind == "cold" else {}
    meant = legend([*others.index], _libraries(op, frame, timed=True))
    caption = f"{title.format(at=at)}. {meant}"
    return lines, picture.bars(caption, bars, {n: microseconds(us) for n, us in bars.items()}, ["Fusebook"])


def _extra(frame: pd.DataFrame, variant: str) -> float:
    """Memory that an implementation allocates at its peak, in outputs: 1 is the output alone."""
    rows = _large(frame, variant)
    return float((rows["peak_bytes"] / _output(rows)).median())


def _output(rows: pd.DataFrame) -> pd.Series:
    """Bytes of the output as PyTorch allocates them, in multiples of 512."""
    return (rows["write_bytes"] / 512).map(math.ceil) * 512


def _large(frame: pd.DataFrame, variant: str) -> pd.DataFrame:
    """The sizes that memory decides; where arithmetic decides all large ones, every size."""
    rows = tables.where(frame, variant=variant, status="ok")
    return tables.where(rows, zone="memory") if rows["zone"].eq("memory").any() else rows


def _held(op: Op, frame: pd.DataFrame, variant: str) -> float | None:
    """Bytes at most, at any size: of an operator in place, or whose outputs are small next to its workspace."""
    rows = tables.where(frame, variant=variant, status="ok")
    if op.variants["fusebook"].in_place:
        return float(rows["peak_bytes"].max())
    return float((rows["peak_bytes"] - rows["write_bytes"]).max()) if _extra(frame, "fusebook") > 10 else None


def _beyond(rows: pd.DataFrame) -> float:
    """Bytes that some size takes at its peak, besides its output: the most of all sizes."""
    return float((rows["peak_bytes"] - _output(rows)).max())


def _memory_of(op: Op, frame: pd.DataFrame, variant: str, name: str = "", output: str = "the output") -> str:
    rows = tables.where(frame, variant=variant, status="ok")
    ratio, beyond = _extra(frame, variant), _beyond(rows)
    name = name or ("Fusebook" if variant == "fusebook" else _SAID.get(variant, variant))
    name = name if name.startswith("torch.") else name[:1].upper() + name[1:]
    if ratio != ratio:
        return f"{name}: not measured."
    if (held := _held(op, frame, variant)) is not None:
        place = "its inputs" if op.variants["fusebook"].in_place else f"inputs and {output.removeprefix('the ')}"
        return f"{name} allocates {f'at most {_bytes(held)}' if held else 'nothing'} beyond {place}."
    if ratio < 1.02:
        return f"{name} allocates {output} and {f'at most {_bytes(beyond)} more' if beyond > 0 else 'nothing else'}."
    return f"{name} allocates {_span(rows)} times {output}."


def _span(rows: pd.DataFrame) -> str:
    """Memory in outputs: the median, or the least and the most where these differ much."""
    ratios = rows["peak_bytes"] / _output(rows)
    least, median, most = (
        f"{ratio:.{1 if ratio < 9.95 else 0}f}" for ratio in (ratios.min(), ratios.median(), ratios.max())
    )
    return f"{least} to {most}" if ratios.max() > 1.5 * ratios.min() else median


def _bytes(count: float) -> str:
    unit, power = next(((u, p) for u, p in (("GiB", 30), ("MiB", 20)) if count >= 2**p), ("KiB", 10))
    return f"{count / 2**power:.3g} {unit}"


def _most(op: Op, frame: pd.DataFrame, variants: Sequence[str]) -> str:
    """The peak memory of that of some implementations that takes most, and which it is: outputs, or bytes beyond."""
    found = [variant for variant in variants if _extra(frame, variant) == _extra(frame, variant)]
    held = [_held(op, frame, variant) for variant in found]
    if not found or None in held:
        if not found:
            return "not measured"
        name = max(found, key=functools.partial(_extra, frame))
        # Of all sizes, as the verdict says it.
        rows = tables.where(frame, variant=name, status="ok")
        beyond = _beyond(rows)
        more = f" + {_bytes(beyond)}" if beyond >= 2**24 else ""  # a small workspace is no cost
        span = f"1.0 x output{more}" if _extra(frame, name) < 1.02 else f"{_span(rows)} x output"
        return f"{span}{f' ({said([name])})' if len(found) > 1 else ''}"
    most, name = max(((value, name) for value, name in zip(held, found, strict=True) if value is not None))
    return f"{_bytes(most)}{f' ({said([name])})' if len(found) > 1 else ''}" if most else "nothing in a step"


def choices(op: Op, frame: pd.DataFrame, clock: str = "cold") -> pd.DataFrame:
    """Three choices with time and memory: Fusebook, the libraries, torch."""
    libraries = _libraries(op, frame)
    named = {
        f"fusebook.{op.name}": ["ours"],
        **({said(libraries, "or"): ["libraries"]} if libraries else {}),
        "torch or torch.compile": ["torch", "torch.compile"],
    }
    found = {kind: _verdicts.choices(op, frame, kind) for kind in ("cold", "paid")}
    found = {  # a time without another one is no comparison
        kind: table[table["ours"].notna() & table[[*_verdicts.GROUPS]].notna().any(axis=1)]
        for kind, table in found.items()
    }
    rows = {}
    for name, groups in named.items():
        row: dict[str, Any] = {}
        for kind, title in (("cold", "fastest in GPU time"), ("paid", "fastest end to end")):
            table = found[kind]
            own, least = table[groups].min(axis=1), table[[*_verdicts.GROUPS, "ours"]].min(axis=1)
            row[title] = f"{int((own <= (1 + tables.WITHIN) * least).sum())} of {own.notna().sum()}"
        table = found[clock]
        of = "GPU" if clock == "cold" else "end-to-end"
        row[f"median {of} time"] = times(1 / float((table["ours"] / table[groups].min(axis=1)).median()))
        variants = ["fusebook"] if groups == ["ours"] else libraries if groups == ["libraries"] else groups
        if variants is groups and "torch" not in op.variants:
            variants = [name for name in [*op.variants][1:] if _verdicts.group(op, name) in groups]
        row["peak memory"] = _most(op, frame, variants)
        rows[name] = row
    return pd.DataFrame.from_dict(rows, orient="index")


#: What a reader sees instead of a word among the sizes of a card.
_WORDS = {
    "zipf": "indices by Zipf's law",
    "equal": "equal indices",
    "uniform": "uniform indices",
    "columns": "stored by columns",
    "uneven": "of unequal widths",
}


def _in_words(about: Any, frame: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Each size and dtype as the verdict names its example; words follow where they are not those of the example."""
    words, told = getattr(about, "WORDS", ""), {}
    others = [name for name in tables.dims(frame) if f"{{{name}" not in words]
    rows: Any = frame.to_dict("records")
    for size, row in zip(tables.label(frame), rows, strict=True):
        at = f"{re.sub('(?<=[0-9])x(?=[0-9])', ' x ', size)} in {row['dtype']}"
        if words:
            more = [row[name] for name in others if row[name] != about.EXAMPLE.get(name, row[name])]
            at = ", ".join([words.format(**row), *(_WORDS.get(word, str(word)) for word in more)])
        told[size, row["dtype"]] = at
    return told


def limits(
    op: Op, frame: pd.DataFrame, gradient: pd.DataFrame | None, kind: str = "cold", about: Any = None
) -> list[str]:
    """When not to use the library: where another is faster, and where the launch decides; memory of its gradient."""
    everything = _against(op, frame, *_verdicts.GROUPS, kind=kind)
    lost = everything[everything > 1 + tables.WITHIN].sort_values(ascending=False)
    many, clock = _many(frame), " end to end" if kind == "paid" else ""
    told = f"No other implementation is more than 2 % faster{clock} at any of {len(everything)} recorded {many}."
    if len(lost):
        told = "**Do not use it** where another implementation is faster"
        told += f"{clock}: at {len(lost)} of {len(everything)} {many}."
    found = [told]
    if len(lost):
        rows = _verdicts.compared(op, frame, _verdicts.GROUPS)
        behind, told_of = tables.behind(rows, kind=kind), _in_words(about, rows)
        behind = behind.loc[lost.index[:2]]
        worst = [
            f"{told_of[at]} ({said([other])} is {times(ratio)} faster)"
            for at, other, ratio in zip(behind.index, behind["best other"], behind["times as long"], strict=True)
        ]
        found.append(f"It loses most at {' and '.join(worst)}.")
    launch = [tables.where(frame, variant=name, status="ok")["launch_us"].median() for name in ("fusebook", "torch")]
    if kind == "cold" and launch == [us for us in launch if us == us]:
        found.append(
            f"**Small inputs.** The CPU takes {launch[0]:.1f} us to launch a call (torch: {launch[1]:.1f} us). "
            "Where the launch takes longer than the kernel, a faster kernel does not make the call faster."
        )
    if gradient is not None:
        found.append(f"**Memory.** {_memory_of(op, gradient, 'fusebook', 'the backward pass', 'the gradient')}")
    return found


def install() -> list[str]:
    """How to install the library, and what it needs by the metadata of the installed package."""
    wheel = f"fusebook-{fusebook.__version__}-py3-none-any.whl"
    if url := os.environ.get("FUSEBOOK_URL", "").rstrip("/"):
        told = [f"**Install:** `pip install {url}/wheel/{wheel}`."]
    else:
        told = [f"**Install:** `pip install {wheel}`, the file in the zip under this page's title."]
        told.append("In a checkout, `pip install .` does the same.")
    needs = "Linux"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        about = importlib.metadata.metadata("fusebook")
        packages = [line for line in about.get_all("Requires-Dist") or () if "extra ==" not in line]
        needs += f", Python {about['Requires-Python']}, {', '.join(packages)}"
    told.append(f"It needs {needs}.")
    return [*told, "Compiled kernels need an NVIDIA GPU of compute capability 8.0 or later (Ampere)."]


def plainly(sentences: Sequence[str]) -> str:
    """Sentences as plain text, without marks of strong words and code."""
    return " ".join(sentences).replace("**", "").replace("`", "")


def site(document: str) -> str:
    """The address of a page of the site as seen from the lesson; empty where there is none."""
    if _place.sphinx():
        return f"../{document}.html"
    url = os.environ.get("FUSEBOOK_URL", "").rstrip("/")
    return f"{url}/{document}.html" if url else ""


def joined(sentences: Sequence[str]) -> str:
    """Sentences as one paragraph of HTML, with ``**strong**`` words."""
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", _show.rich(" ".join(sentences)))
