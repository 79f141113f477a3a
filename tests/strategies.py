"""What the strategies of plans earn: drawn problems as they are computed, and as they would be without one of them.

    PYTHONPATH=src python tests/strategies.py softmax --cases 100    # on a GPU, adds to strategies.csv here

A strategy is left out by an edit of the plan that chooses it, and the time of the problems that are then computed
otherwise is told in times of what it was. The table of docs/method.rst is of these. Seeds below 100 only.
"""

import argparse
import contextlib
import csv
import dataclasses
import importlib
import inspect
import pathlib

import pandas as pd

from fusebook import explore, launches
from fusebook.cards import OPS

NORMS = ("rms_norm", "add_rms_norm", "layer_norm")
SCATTERS = ("embedding_backward", "masked_scatter_nd_of_shape")
#: By plan and where it is called: operators, what a strategy is called, and what is written in place of what.
EDITS = {
    ("_rows softmax_plan", "_rows _plan"): (
        (("softmax",), "half types by whole vectors", "elif vector > 1 and size == 2 and tensors == 1", "elif 0"),
        (("softmax",), "half types by pairs", "outer, inner, n = sizes", "outer, inner, n, pairs = *sizes, False"),
        (("softmax_backward",), "odd half types by whole vectors", "elif size == 2 and tensors == 2", "elif 0"),
    ),
    ("scatter_nd _scatter_nd_plan", "scatter_nd _plan"): (
        (SCATTERS, "some dozen updates look for each other", 'first = "first" if n <= few else', "first ="),
        (SCATTERS, "each row looks through all indices", "small = R <= 512", "small = False"),
    ),
    ("_norms norm_plan", "_norms _plan"): (
        (NORMS, "weights asked for ahead", "ahead = few and", "ahead = 0 and"),
        (NORMS, "wide rows by several programs", "if quantised or parts > 1024", "if 1"),
    ),
    ("_entropy entropy_plan", "_entropy entropy_plan"): (
        (("cross_entropy",), "several short rows at once", "if n <= 4096:", "if n <= 256:"),
        (("cross_entropy",), "numbers held, not read twice", "held = held and", "held = 0 and"),
        (("cross_entropy",), "wide rows by several programs", "parts = 1 if size == 8", "held, parts = 0, 1 if size"),
    ),
    ("logistic_step _logistic_step_plan", "logistic_step _step_plan"): (
        (("logistic_step",), "one program for all", "if D and N * D", "if 0 and N * D"),
        (("logistic_step",), "one warp a tile", "if not interpreted and 32 * align", "if 0 and 32 * align"),
    ),
    ("kmeans_plan kmeans_plan", "kmeans _plan"): (
        (("kmeans_assign",), "pairs of few coordinates", "*([_pairs_plan(n, d, k)] if d <= 8 else ())", "*()"),
        (("kmeans_assign",), "sums for each of few centres", '["each"] if k', '["each"] if k < 0 and k'),
        (("kmeans_assign",), "a screen by TF32", "if k > 64 and d > 8 and roomy", "if 0"),
    ),
}  # fmt: skip
#: The same by what a function returns.
VALUES = (
    (NORMS, "odd half types by whole vectors", "_norms _window", 1),
    (("logistic_step",), "matrices that lie across as they are", "logistic_step _taken_across", False),
    (("kmeans_update", "kmeans_step"), "sums of all centres in registers", "kmeans_update _sums_fit", False),
)
OPERATORS = (*NORMS, *SCATTERS, "softmax", "softmax_backward", "cross_entropy", "logistic_step", "kmeans_assign",
             "kmeans_update", "kmeans_step")  # fmt: skip
#: Why one stays that is not 5 % better at a twentieth of the problems.
WHY = {
    "half types by pairs": "the record of page 102 has widths that lose without them, one a common vocabulary",
    "sums of all centres in registers": "page 303 is about them",
    "odd half types by whole vectors": "users asked for such widths",
    "each row looks through all indices": "comes close",
    "sums for each of few centres": "too few were timed",
}
FILE = pathlib.Path("strategies.csv")
TABLE = pathlib.Path(__file__).parent.parent / "docs" / "strategies.csv"


def _place(name):
    """The module and the attribute of a name such as "_rows _plan"."""
    module, attribute = name.split()
    return importlib.import_module(f"fusebook.kernels.{module}"), attribute


def edited(plan, old, new):
    """A plan whose source has something else in one place."""
    module, name = _place(plan)
    function = inspect.unwrap(getattr(module, name))
    source = inspect.getsource(function)
    source = source[source.index("def ") :]
    if source.count(old) != 1:
        raise ValueError(f"strategies: expected {old!r} once in {plan}, got {source.count(old)}; mend the table")
    space = {}
    exec(compile(source.replace(old, new), f"<{plan}>", "exec"), module.__dict__, space)
    return space[name]


def table():
    """Of each strategy its operators, its name, where it is called, and what is called in its place."""
    for (plan, at), edits in EDITS.items():
        yield from ((ops, name, at, edited(plan, old, new)) for ops, name, old, new in edits)
    yield from ((ops, name, at, lambda *_, value=value, **__: value) for ops, name, at, value in VALUES)


@contextlib.contextmanager
def without(at, other):
    """Inside, a strategy is left out."""
    module, attribute = _place(at)
    own = getattr(module, attribute)
    setattr(module, attribute, other)
    try:
        yield
    finally:
        setattr(module, attribute, own)


def left_out(base, at, other):
    """The variant `base` without a strategy; refused where that launches the same."""

    def prepare(*made):
        with launches.observed() as now:
            base.run(*made)
        with launches.observed() as then, without(at, other):
            base.run(*made)
        if now.launches == then.launches:
            raise NotImplementedError("it launches the same")
        return made

    def run(*made):
        with without(at, other):
            return base.run(*made)

    return dataclasses.replace(base, run=run, prepare=prepare)


def measure(name, seed, cases):
    """The rows of an operator: a problem and a strategy each, with the times with and without it."""
    op = OPS[name]
    base = explore.ours(op)
    others = {what: left_out(op.variants[base], at, other) for ops, what, at, other in table() if name in ops}
    card = dataclasses.replace(op, variants={base: op.variants[base], **others})
    jobs = [(card, dims, (base, *others)) for dims in explore.problems(op, seed, cases)]
    for case, rows in explore._each(jobs, False, float("inf")):
        if isinstance(rows, explore.Wrong):
            raise rows
        for row in rows[1:]:
            same = row["note"] == "it launches the same"
            yield name, row["variant"], case, same, rows[0]["cold_us"], row["cold_us"]


COLUMNS = ("operator", "strategy", "case", "same", "us", "without_us")


def tell(rows):
    """What strategies earn: of how many problems they are taken for, and what it costs to leave them out."""
    rows = rows.assign(ratio=rows["without_us"] / rows["us"], taken=~rows["same"])
    found = rows.groupby(["operator", "strategy"], sort=False).agg(
        Problems=("case", "size"), Taken=("taken", "sum"), Timed=("ratio", "count"), Least=("ratio", "min"),
        Median=("ratio", "median"), Most=("ratio", "max"), Slower=("ratio", lambda r: (r > 1.05).sum()),
        Faster=("ratio", lambda r: (r < 0.95).sum()),
    )  # fmt: skip
    names = {"operator": "Operator", "strategy": "Without"}
    found = found[found["Timed"] > 0].round({"Least": 2, "Median": 2, "Most": 2}).reset_index().rename(columns=names)
    asked = found[["Without", "Problems", "Taken", "Timed", "Slower"]].itertuples(index=False)
    return found.assign(Stays=[stays(*row) for row in asked])


def stays(strategy, problems, taken, timed, slower):
    """Why a strategy is there: it is better where enough problems take it, or has a reason; else it is to go."""
    return "as it is better" if 20 * taken * slower >= timed * problems else WHY.get(strategy, "no: it is to go")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*", choices=OPERATORS)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=77, choices=range(explore.RECORDED_FROM), metavar="BELOW 100")
    args = parser.parse_args()
    new = not FILE.exists()
    with FILE.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        for name in args.ops:
            for row in measure(name, args.seed, args.cases):
                writer.writerow(row)
                file.flush()
    tell(pd.read_csv(FILE)).to_csv(TABLE, index=False)


if __name__ == "__main__":
    main()
