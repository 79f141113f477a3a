"""The worth of a strategy: random problems with it, and without it.

    PYTHONPATH=src python tests/strategies.py softmax                # on a GPU; writes build/strategies.csv
    PYTHONPATH=src python tests/strategies.py softmax --list         # their names; needs no GPU
    PYTHONPATH=src python tests/strategies.py softmax --only _SOFTMAX.parts

A strategy is a row of a launch table, or a branch. Tables are found in the modules of `fusebook.kernels`: a table is a
tuple of rows that begin with a limit, under a name in capitals or within its value. The name of a row is the path to
its table and its limits, such as ``softmax._SOFTMAX.configs.4.8192``. A branch is a function that decides, or a
threshold, see `BRANCHES`.

200 random problems of three seeds are timed in the order with, without, without, with. A strategy stays if at least 3 %
of all problems are at least 5 % slower without it.
"""

import argparse
import contextlib
import csv
import functools
import importlib
import pathlib
import pkgutil
import time

import pandas as pd
import torch

from fusebook import kernels
from fusebook.cards import OPS
from fusebook.kernels import _call
from fusebook.measure import explore, sources, timing

#: At least this share of the problems must be this many times slower without a strategy.
SHARE, SLOWER = 0.03, 1.05
SEEDS = (71, 72, 73)
COLUMNS = ("operator", "strategy", "seed", "case", "taken", "us", "us_again", "without_us", "without_us_again")

#: A branch by the function that decides, and its result without the branch; or a threshold, and another value.
BRANCHES = {
    "kmeans._direct_pays": False,  # the points of a centre are found among all labels, without sorting
    "kmeans._ones_pay": False,  # few centres are a product of ones and points
    "kmeans._sums_fit": False,  # the sums of all centres in registers
    "logistic_step._taken_across": False,  # transposed matrices without a copy
    "scatter._scan_pays": False,  # each row reads all indices
}


def modules():
    """The modules of kernels by name."""
    names = [found.name for found in pkgutil.iter_modules(kernels.__path__)]
    return {name: importlib.import_module(f"{kernels.__name__}.{name}") for name in names}


def parts(value):
    """The items of a dict or a tuple by name."""
    return value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else ()


def is_table(value):
    """Whether a value is a launch table: rows that begin with a limit, of one kind; one named row, or several rows."""
    rows = value if type(value) is tuple else ()
    named = {hasattr(row, "_fields") for row in rows}
    limits = (isinstance(row, tuple) and row and type(row[0]) in (int, float) for row in rows)
    return len(named) == 1 and all(limits) and (len(rows) > 1 or named == {True})


def rows(value, path=()):
    """The path to each row of each table within a value: keys, and the index of the row."""
    if is_table(value):
        yield from ((*path, index) for index in range(len(value)))
    else:
        for key, part in parts(value):
            yield from rows(part, (*path, key))


def label(value, path):
    """The path to a row, with as many of its first numbers as tell it from other rows instead of its index."""
    names = []
    for key in path[:-1]:
        names.append(str(getattr(value, "_fields", {key: key})[key]))
        value = value[key]
    row = value[path[-1]]
    count = next((n for n in range(1, len(row)) if sum(other[:n] == row[:n] for other in value) == 1), len(row))
    return ".".join([*names, *map(str, row[:count])])


def without(value, path):
    """The same value without the row at a path."""
    key, *others = path
    if not others:
        return type(value)(row for index, row in enumerate(value) if index != key)
    if isinstance(value, dict):
        return value | {key: without(value[key], others)}
    items = [without(part, others) if index == key else part for index, part in enumerate(value)]
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def strategies():
    """By the name of each strategy: its module, the name there, and the value of that name without the strategy."""
    found = {}
    for name, module in modules().items():
        for attribute, value in vars(module).items():
            if attribute.strip("_").isupper():
                for path in rows(value):
                    found[f"{name}.{attribute}.{label(value, path)}"] = module, attribute, without(value, path)
    for branch, other in BRANCHES.items():
        name, attribute = branch.split(".")
        own = getattr(module := modules()[name], attribute)
        instead = functools.wraps(own)(lambda *_, other=other, **__: other) if callable(own) else other
        found[branch] = module, attribute, instead
    return found


def of(op):
    """The strategies of an operator: those in definitions that its implementation reaches."""
    reached = sources.reached(op.variants[explore.fusebooks(op)].run)
    return {name: found for name, found in strategies().items() if (found[0].__name__, found[1]) in reached}


@contextlib.contextmanager
def left_out(module, attribute, instead):
    """Inside, the library works without a strategy."""
    own = getattr(module, attribute)
    setattr(module, attribute, instead)
    forget()
    try:
        yield
    finally:
        setattr(module, attribute, own)
        forget()


def forget():
    """Clear the caches of functions that choose launch configs."""
    for module in modules().values():
        for value in vars(module).values():
            if callable(clear := getattr(value, "cache_clear", None)):
                clear()


@contextlib.contextmanager
def launched():
    """What the calls inside launch: kernels with their grids and constants, and operators of torch."""
    from triton.runtime import interpreter  # after fusebook, which chooses how kernels run
    from triton.runtime.jit import JITFunction

    log = []

    def noted(own):
        def getitem(self, grid):
            run = own(self, grid)

            def call(*args, **kwargs):
                plain = [v for v in args if isinstance(v, (bool, int, float, str))]
                log.append((getattr(self.fn, "__name__", ""), grid, plain, sorted(map(str, kwargs.items()))))
                return run(*args, **kwargs)

            return call

        return getitem

    kinds = (JITFunction, interpreter.InterpretedFunction)
    before = [kind.__getitem__ for kind in kinds]
    for kind, own in zip(kinds, before, strict=True):
        kind.__getitem__ = noted(own)
    try:
        with _call.uncached():
            yield log
    finally:
        for kind, own in zip(kinds, before, strict=True):
            kind.__getitem__ = own


def microseconds(call, repeat=9):
    """The GPU time of a call, cold; NaN if it waits for the GPU."""
    with torch.no_grad():
        found = timing.cold({"call": call}, warmup=2, repeat=repeat)["call"]
    return found.q50 * 1e6 if found else float("nan")


def measure(op, found, problems, clock=microseconds, until=float("inf")):
    """A row for each problem and strategy, with the times in the order with, without, without, with."""
    run = op.variants[explore.fusebooks(op)].run
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for seed, case, dims in problems:
        with contextlib.suppress(NotImplementedError, torch.cuda.OutOfMemoryError):
            made = op.made(dims, device)
            call = functools.partial(run, *made)
            with launched() as own:
                call()
            for name, strategy in found.items():
                if time.monotonic() >= until:
                    return
                times = [float("nan")] * 4
                with contextlib.suppress(StopIteration):  # no other row fits
                    with left_out(*strategy), launched() as other:
                        call()
                    if taken := own != other:
                        with _call.uncached():  # the cached call of a problem would repeat what was launched first
                            first = clock(call)
                            with left_out(*strategy):
                                second, third = clock(call), clock(call)
                            times = [first, clock(call), second, third]
                    yield [op.name, name, seed, case, taken, *times]


def drawn(op, count=200, seeds=SEEDS):
    """So many problems of several seeds, the first of each seed first."""
    each = -(-count // len(seeds))
    return [(seed, case, op.problem(seed, case)) for case in range(each) for seed in seeds][:count]


def tell(rows):
    """A row for each operator and strategy: how many problems take it, what it earns, and whether it stays."""
    with_, without = rows[["us", "us_again"]].mean(axis=1), rows[["without_us", "without_us_again"]].mean(axis=1)
    noise = (rows["us"] / rows["us_again"] - 1).abs()
    rows = rows.assign(ratio=without / with_, noise=noise)
    found = rows.groupby(["operator", "strategy"], sort=False).agg(
        problems=("case", "size"), taken=("taken", "sum"), least=("ratio", "min"), median=("ratio", "median"),
        most=("ratio", "max"), slower=("ratio", lambda r: (r >= SLOWER).sum()), noise=("noise", "median"),
    )  # fmt: skip
    found["stays"] = (found["slower"] >= SHARE * found["problems"]).map({True: "yes", False: "no"})
    return found.reset_index()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = [name for name, op in OPS.items() if explore.explorable(op)]
    parser.add_argument("ops", nargs="*", metavar="op", help=f"all if none is given; or {', '.join(known)}")
    parser.add_argument("--only", default="", metavar="TEXT", help="strategies whose name contains this")
    parser.add_argument("--list", action="store_true", help="only name the strategies of each operator")
    parser.add_argument("--problems", type=int, default=200, help="of each operator, in all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="in all")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build", "strategies.csv"))
    args = parser.parse_args()
    if unknown := set(args.ops) - set(known):
        parser.error(f"expected operators of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    asked = {op: {k: v for k, v in of(OPS[op]).items() if args.only in k} for op in args.ops or known}
    if args.list:
        print("\n".join(f"{op} {name}" for op, found in asked.items() for name in found))
        return
    if not torch.cuda.is_available():
        parser.error("strategies are timed on a GPU, and there is no CUDA device")
    until = time.monotonic() + args.seconds
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, found in asked.items():
            for row in measure(OPS[name], found, drawn(OPS[name], args.problems), until=until):
                writer.writerow(row)
                file.flush()
    print(tell(pd.read_csv(args.out)).to_string(index=False))


if __name__ == "__main__":
    main()
