"""What changes from GPU to GPU: verdicts side by side, which path kernels take, and what bandwidth predicts.

Verdicts are made of the records of each GPU. Paths are made of docs/gpus.csv, which ``python tests/gpus.py`` writes.
"""

import csv
import functools
import re
from pathlib import Path

import pandas as pd
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

__all__ = ["FALLBACKS", "GPUS", "cause", "differing", "exceeding", "flips", "operators", "paths", "setup", "verdicts"]

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "gpus.csv"

#: The GPUs of the tables: the row of docs/gpus.csv, and the bandwidth in GB/s that its maker names.
GPUS = {
    "A100": ("A100", 2039),
    "L4": ("L4", 300),
    "RTX 4090": ("RTX 4090", 1008),
    "H100": ("H100", 3350),
    "H200": ("H100", 4800),
    "B200": ("B200", 8000),
    "MI300X": ("MI300X", 5300),
}

#: What machine code may use, and what it does where that is missing; empty where another row of the table is instead.
FALLBACKS = {
    "tensor descriptors": "each thread loads",
    "dependent launch": "kernels one after the other",
    "clusters": "",
    "wgmma": "",
    "tcgen05": "",
    "mma": "",
    "mfma": "",
    "float64 matrix units": "three products of TF32",
    "fp8": "refused; int8 runs",
    "asynchronous copies": "",
    "bf16 atomics": "compare and swap",
}


# Records --------------------------------------------------------------------------------------------------------------


@functools.cache
def frames():
    """The records of operators by GPU; a GPU is recorded if it has a machine.json."""
    from fusebook.cards import OPS
    from fusebook.measure import machine, record

    return {slug: {op: record.read(op, slug) for op in OPS if record.exists(op, slug)} for slug in machine.slugs()}


@functools.cache
def machines():
    """The recorded GPUs by their folder."""
    from fusebook.measure import machine

    return {slug: machine.recorded(slug) for slug in machine.slugs()}


def short(name):
    """A name of `GPUS` in the name that a driver gives; else that without its maker."""
    found = [gpu for gpu in GPUS if re.search(rf"\b{gpu}\b", name)]
    return found[0] if found else name.removeprefix("NVIDIA ")


def column(slug):
    """The heading of a recorded GPU."""
    return short(machines()[slug].name)


def verdicts(found):
    """By operator and GPU the word, and Fusebook's time over the best of torch; `found` as of `frames`."""
    import answers

    rows = {}
    for slug, records in found.items():
        for verdict in answers.verdicts(records):
            cold = verdict.torch["cold"]
            row = rows.setdefault(verdict.op.name, {})
            row[column(slug)] = verdict.word
            row[f"{column(slug)}, GPU time"] = cold.range if cold.points else ""
    names = [f"{column(slug)}{more}" for slug in found for more in ("", ", GPU time")]
    return pd.DataFrame.from_dict(rows, orient="index").reindex(columns=names).fillna("")


def differing(found):
    """The operators whose verdicts differ between two GPUs, with the words on the problems that both have."""
    import answers
    from fusebook.cards import OPS

    rows, slugs = {}, list(found)
    for a, b in [(a, b) for i, a in enumerate(slugs) for b in slugs[i + 1 :]]:
        for name in [name for name in found[a] if name in found[b]]:
            frames = [found[slug][name] for slug in (a, b)]
            words = [answers.verdict(OPS[name], frame).word for frame in frames]
            if len(set(words)) > 1:
                known = [_problems(frame) for frame in frames]
                shared = [frame[at.isin(known[1 - i])] for i, (frame, at) in enumerate(zip(frames, known, strict=True))]
                alike = [answers.verdict(OPS[name], frame).word for frame in shared]
                rows[name] = {column(slug): word for slug, word in zip((a, b), words, strict=True)} | {
                    "problems": " and ".join(str(at.nunique()) for at in known),
                    "on those of both": alike[0] if len(set(alike)) == 1 else " and ".join(alike),
                }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("operator").fillna("")


def _problems(frame):
    """Sizes and dtype of each row as text."""
    from fusebook import tables

    return tables.label(frame) + " " + frame["dtype"]


def flips(found):
    """The problems that two GPUs judge differently, by end-to-end time as verdicts do, and why.

    They are won on one and lost on the other, or the verdicts of their operator differ and so do they.
    """
    import answers
    from fusebook import tables
    from fusebook.cards import OPS
    from fusebook.lesson._verdicts import compared

    rows, slugs = [], list(found)
    for a, b in [(a, b) for i, a in enumerate(slugs) for b in slugs[i + 1 :]]:
        on = [machines()[slug] for slug in (a, b)]
        for name in [name for name in found[a] if name in found[b]]:
            words = {answers.verdict(OPS[name], found[slug][name]).word for slug in (a, b)}
            sides = [compared(OPS[name], found[slug][name], answers.GROUPS[:2]) for slug in (a, b)]
            ratios = [tables.behind(side, kind="paid") for side in sides]
            for at in ratios[0].index.intersection(ratios[1].index):
                times = [float(ratio.loc[at, "times as long"]) for ratio in ratios]
                sides_of = {(t > 1 + tables.WITHIN) - (t < 1 - tables.WITHIN) for t in times}
                if len(sides_of) > 1 and (len(words) > 1 or 0 not in sides_of):
                    others = [ratio.loc[at, "best other"] for ratio in ratios]
                    points = [_point(side, at, other) for side, other in zip(sides, others, strict=True)]
                    told = [f"{column(slug)}: {ratio:.2f}" for slug, ratio in zip((a, b), times, strict=True)]
                    rows.append([name, " ".join(at), ", ".join(told), cause(points, on, times)])
    return pd.DataFrame(rows, columns=["operator", "problem", "end-to-end time over torch's", "cause"])


def _point(frame, at, other):
    """The row of Fusebook, and that of the fastest other implementation."""
    rows = frame[(_problems(frame) == " ".join(at)) & frame["status"].eq("ok")]
    return [rows[rows["variant"].eq(name)].iloc[0] for name in ("fusebook", other)]


#: How far a ratio of times may be from that of what explains it; the other implementation's has to be twice as far.
NEAR = 0.1
#: Microseconds by which two implementations may differ where a launch takes most of the time.
SMALL = 1.0
#: Change of a ratio that is as small as what counts as equal.
CLOSE = 0.03
#: Ratio of the 80 % to the 20 % quantile from which on something else ran meanwhile.
DISTURBED = 1.5


def cause(points, on, times):
    """Why a verdict differs: what scales between two GPUs as one of the two implementations does.

    Parameters
    ----------
    points : list of two pairs
        Of each GPU the rows of Fusebook and of the fastest other.
    on : list of Machine
    times : list of two floats
        Of each GPU the end-to-end time of Fusebook over that of the other.
    """
    (ours, other), (ours_too, other_too) = points
    for pair, machine in zip(points, on, strict=True):
        for row in pair:
            if row["gpu_us_80"] > DISTURBED * row["gpu_us_20"]:
                spread = f"from {row['gpu_us_20']:.1f} to {row['gpu_us_80']:.1f} us on {short(machine.name)}"
                return f"disturbed: samples of {row['variant']} are {spread}"
    if abs(times[0] / times[1] - 1) <= CLOSE:
        return f"a change of {100 * abs(times[0] / times[1] - 1):.0f} %, around the 2 % that count as equal"
    if any(row["launch_us"] > row["gpu_us"] for row in (ours, ours_too)):
        took = [f"{row['launch_us']:.0f} and {than['launch_us']:.0f} us" for row, than in points]
        changed = ours["host"] and ours_too["host"] and ours["host"] != ours_too["host"]
        return (
            f"CPU launch time, of Fusebook and of {other['variant']}: {took[0]} on {short(on[0].name)}, {took[1]} on "
            f"{short(on[1].name)}" + ("; Fusebook's call path has changed in between" if changed else "")
        )
    if ours["code"] and ours_too["code"] and ours["code"] != ours_too["code"]:
        return "the code: the two GPUs were recorded with different kernels"
    installed = [dict(part.split(" ", 1) for part in row["versions"].split("; ")) for row in (other, other_too)]
    apart = [name for name in installed[0] if installed[1].get(name, installed[0][name]) != installed[0][name]]
    if other["variant"] == other_too["variant"] and apart:  # a package that one record does not name decides nothing
        return "the versions: " + "; ".join(f"{name} {installed[0][name]} and {installed[1][name]}" for name in apart)
    zone = ours["zone"]
    most = max(abs(ours["gpu_us"] - other["gpu_us"]), abs(ours_too["gpu_us"] - other_too["gpu_us"]))
    if zone == "launch" and most < SMALL:
        return f"a launch takes most of the time, and they differ by {most:.1f} us or less"
    bandwidth = ("bandwidth", on[1].copy / on[0].copy)
    limits = {
        "memory": [bandwidth, ("the rate of a copy of that size", ours["copy_us"] / ours_too["copy_us"])],
        "L2": [bandwidth, ("the L2 cache", ours["copy_us"] / ours_too["copy_us"])],
        "compute": [("the matrix rate, by multiprocessors, clock and power", _rate(on[1], ours) / _rate(on[0], ours))],
        "launch": [("the time of a launch", ours["floor_us"] / ours_too["floor_us"])],
    }.get(zone, [])
    moved = {
        "Fusebook": ours["gpu_us"] / ours_too["gpu_us"],
        str(other["variant"]): other["gpu_us"] / other_too["gpu_us"],
    }
    for of, ratio in limits:
        (near, name), (far, away) = sorted((abs(times / ratio - 1), name) for name, times in moved.items())
        if near <= NEAR and far >= 2 * near:
            return (
                f"{of} (x {ratio:.2f}): {name} follows it (x {moved[name]:.2f}), {away} does not (x {moved[away]:.2f})"
            )
    return "not explained by bandwidth, L2, rate or launch"


def _rate(on, row):
    return on.rates["tf32" if row["math"] == "tf32" else row["dtype"]]


def exceeding(found):
    """A sentence for each recorded GPU: the problems that do not fit into its memory, or that all do."""
    said = []
    for slug, records in found.items():
        lost = [(op, rows[rows["status"].eq("out of memory")]) for op, rows in records.items()]
        named = [f"``{op}`` at {at}" for op, rows in lost if len(rows) for at in dict.fromkeys(_problems(rows))]
        memory = f"{machines()[slug].memory / 2**30:.0f} GiB of {column(slug)}"
        said.append(
            f"These do not fit into the {memory}: {', '.join(named)}."
            if named
            else f"All recorded problems fit into the {memory}."
        )
    return said


def ceilings():
    """What was measured of each recorded GPU."""
    return pd.DataFrame(
        {
            column(slug): {
                "copy, GB/s": on.copy / 1e9,
                "L2 cache, MB": on.l2 / 1e6,
                "multiprocessors": on.sms,
                "bf16 matmul, TFLOP/s": on.rates["bfloat16"] / 1e12,
                "float64 matmul, TFLOP/s": on.rates["float64"] / 1e12,
                "SM clock, MHz": on.clocks.get("sm", 0),
                "smallest kernel, us": on.floor() * 1e6,
            }
            for slug, on in machines().items()
        }
    )


# Compiled -------------------------------------------------------------------------------------------------------------


@functools.cache
def compiled():
    """The rows of docs/gpus.csv, by GPU and operator."""
    if not FILE.exists():
        return {}
    with open(FILE, encoding="utf-8", newline="") as file:
        return {(row["gpu"], row["operator"]): row for row in csv.DictReader(file)}


def stale():
    """The operators with a row of docs/gpus.csv whose code has changed since."""
    from fusebook.cards import OPS
    from fusebook.measure import sources

    code = {name: sources.of_variant(OPS[name], "fusebook")[0] for _, name in compiled() if name in OPS}
    return sorted({row["operator"] for row in compiled().values() if row["code"] != code.get(row["operator"])})


def ran(gpu, op):
    """Whether a GPU of this name has a correct result of an operator."""
    return any(
        op in records and (records[op]["variant"].str.startswith("fusebook") & records[op]["status"].eq("ok")).any()
        for slug, records in frames().items()
        if column(slug) == gpu
    )


def word(gpu, op):
    """In a word what is known of an operator on a GPU."""
    row = compiled().get((GPUS[gpu][0], op))
    if ran(gpu, op):
        return "ran"
    if row is None:
        return "predicted"
    return row["status"] if row["status"] in ("compiled", "refused") else "fails"


def families():
    """The operators of each family that have kernels."""
    from fusebook.cards import FAMILIES

    every = {module.__name__.split(".")[-1]: [op.name for op in ops if "fusebook" in op.variants] for module, ops in
             FAMILIES.items()}  # fmt: skip
    return {family: ops for family, ops in every.items() if ops}


def operators():
    """By operator and GPU: ran, compiled or predicted."""
    return pd.DataFrame({gpu: {op: word(gpu, op) for ops in families().values() for op in ops} for gpu in GPUS})


def features(gpu, op):
    """What the machine code of an operator uses on a GPU."""
    row = compiled().get((GPUS[gpu][0], op))
    return set(filter(None, row["features"].split("; "))) if row else set()


def paths():
    """By family and path: on which GPUs its kernels take it, by the word of an operator that does."""
    order = ("ran", "compiled", "refused", "predicted", "fails")
    rows = {}
    for family, ops in families().items():
        for feature, instead in FALLBACKS.items():
            users = [op for op in ops if any(feature in features(gpu, op) for gpu in GPUS)]
            for path, has in ((feature, True), (f"instead: {instead}" if instead else "", False)):
                cells = {
                    gpu: min(
                        (word(gpu, op) for op in users if (feature in features(gpu, op)) == has),
                        key=order.index,
                        default="",
                    )
                    for gpu in GPUS
                }
                if path and any(cells.values()):
                    rows[family, path] = cells
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index=["family", "path"])


def failures():
    """Sentences on what does not compile, one for each message."""
    found = {}
    for (gpu, op), row in compiled().items():
        if row["status"] not in ("compiled", "refused"):
            found.setdefault((gpu, row["status"]), []).append(op)
    return [f"{gpu}, {', '.join(ops)}: ``{status}``" for (gpu, status), ops in found.items()]


def predicted():
    """Of each GPU the time of a kernel that memory limits, over its time on an H100, by the makers' bandwidths."""
    on = {column(slug): m for slug, m in machines().items()}
    base = GPUS["H100"][1]
    rows = {gpu: {"maker's GB/s": rate, "predicted": base / rate} for gpu, (_, rate) in GPUS.items()}
    for gpu in rows.keys() & on.keys() if "H100" in on else ():
        rows[gpu]["measured, by a copy"] = on["H100"].copy / on[gpu].copy
    return pd.DataFrame.from_dict(rows, orient="index").reindex(
        columns=["maker's GB/s", "predicted", "measured, by a copy"]
    )


def recorded_versions():
    """A sentence for each recorded GPU: with which Triton, and which is the newest that was tested."""
    from fusebook.measure import machine

    newest = machine.NEWEST["triton"]
    return [
        f"{column(slug)}: recorded with torch {on.torch.partition('+')[0]} and Triton {on.triton}; "
        f"the newest Triton is {newest}."
        for slug, on in machines().items()
    ]


def unfused():
    """By operator the kernels whose code changes without fused multiply-adds, on Hopper."""
    rows = {op: row["unfused"] for (gpu, op), row in compiled().items() if gpu == "H100"}
    return pd.DataFrame({"kernels that change": rows}).rename_axis("operator").replace("", "none")


# Directives -----------------------------------------------------------------------------------------------------------


class _Generated(SphinxDirective):
    """What is read again when a record, a card or the table of compiled kernels has changed."""

    def shown(self, df, caption):
        """Name the files to Sphinx; the table as HTML."""
        from fusebook.lesson import _show
        from fusebook.measure import machine

        library = ROOT / "src" / "fusebook"
        for folder, pattern in (
            (machine.RECORDS, "*/*.csv"),
            (machine.RECORDS, "*/machine.json"),
            (library / "kernels", "*.py"),
            (library / "cards", "*.py"),
            (FILE.parent, FILE.name),
            (ROOT / "docs" / "_ext", "*.py"),
        ):
            for file in folder.glob(pattern):
                self.env.note_dependency(str(file))
        return nodes.raw("", _show.table(df, caption, fold=False)._repr_html_(), format="html")


class Verdicts(_Generated):
    """Verdicts of each recorded GPU, and its ceilings."""

    def run(self):
        """Ask the records."""
        return [
            self.shown(ceilings(), "Measured ceilings of the recorded GPUs"),
            self.shown(verdicts(frames()), "Verdicts by GPU, and GPU time over the best of torch and torch.compile"),
            *self.parse_text_to_nodes(" ".join(exceeding(frames()))),
        ]


class Flips(_Generated):
    """The points at which GPUs disagree, or that there are none."""

    def run(self):
        """Ask the records."""
        common = {op for a in frames() for b in frames() if a < b for op in frames()[a].keys() & frames()[b].keys()}
        says = f"Recorded on more than one GPU: {', '.join(f'``{op}``' for op in sorted(common)) or 'nothing yet'}."
        unnamed = {column(slug) for slug, ops in frames().items() for rows in ops.values() if rows["code"].eq("").any()}
        if unnamed:
            says += f" Older records of {' and '.join(sorted(unnamed))} do not name the code that they measured. For "
            says += "these records, a change of the kernel or of the call path can be a cause too."
        return [
            *self.parse_text_to_nodes(says),
            self.shown(differing(frames()), "Operators whose verdict differs between two GPUs"),
            self.shown(flips(frames()), "Problems whose result differs between two GPUs, by end-to-end time"),
        ]


class Paths(_Generated):
    """What kernels use on each GPU, and what does not compile."""

    def run(self):
        """Read docs/gpus.csv."""
        unused = set(FALLBACKS) - {feature for gpu in GPUS for ops in families().values() for op in ops
                                   for feature in features(gpu, op)}  # fmt: skip
        versions = ", ".join(sorted({row["triton"] for row in compiled().values()}))
        says = [f"Compiled with Triton {versions}." if versions else "Nothing is compiled yet."]
        says += [f"No kernel uses {', '.join(sorted(unused))}."] if unused else []
        says += [f"Compiled before their code changed: {', '.join(stale())}."] if stale() else []
        failed = "".join(f"- {line}\n" for line in failures())
        return [
            self.shown(operators(), "What is known of each operator on each GPU"),
            self.shown(paths(), "Which path the kernels of a family take"),
            *self.parse_text_to_nodes(" ".join(says)),
            *(self.parse_text_to_nodes(f"The compiler or a limit of the GPU refuses:\n\n{failed}") if failed else []),
        ]


class Predicted(_Generated):
    """Times by bandwidth."""

    def run(self):
        """Divide."""
        return [self.shown(predicted(), "Predicted time of a memory-bound kernel over that on an H100")]


class Versions(_Generated):
    """With what each GPU was recorded."""

    def run(self):
        """Ask the records."""
        return self.parse_text_to_nodes("".join(f"- {line}\n" for line in recorded_versions()))


class Fusion(_Generated):
    """What changes without fused multiply-adds."""

    def run(self):
        """Read docs/gpus.csv."""
        df = unfused()
        kernels = {name for cell in df["kernels that change"] for name in cell.split("; ")} - {"none"}
        says = f"For Hopper, the code of {len(kernels)} kernels then changes."
        shown = self.shown(df, "Kernels whose code changes without fused multiply-adds, on Hopper")
        return [*self.parse_text_to_nodes(says), shown]


def setup(app):
    """Add the directives."""
    for name, directive in {
        "gpu-verdicts": Verdicts,
        "gpu-flips": Flips,
        "gpu-paths": Paths,
        "gpu-predicted": Predicted,
        "recorded-versions": Versions,
        "fp-fusion": Fusion,
    }.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
