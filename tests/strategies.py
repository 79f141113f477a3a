"""What a strategy earns: random problems with it, and without it.

    PYTHONPATH=src python tests/strategies.py kmeans_update      # on a GPU; writes build/strategies.csv

A strategy is a row of a table of launch configs or a branch, and has a name: that of the table and the first value of
the row, or that of the function that decides for the branch. Without it, 200 random problems of three seeds are timed
in the order with, without, without, with. It stays if at least 3 % of all problems are at least 5 % slower without it.
"""

import argparse
import contextlib
import csv
import dataclasses
import functools
import importlib
import pathlib
import time

import pandas as pd
import torch
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from fusebook.cards import OPS
from fusebook.kernels import _call
from fusebook.measure import explore, timing

#: At least this share of the problems must be this many times slower without a strategy.
SHARE, SLOWER = 0.03, 1.05
SEEDS = (71, 72, 73)
COLUMNS = ("operator", "strategy", "seed", "case", "taken", "us", "us_again", "without_us", "without_us_again")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A row of a table, or a branch.

    Attributes
    ----------
    name : str
    ops : tuple of str
        The operators that use it.
    at : str
        The table or the function that decides, such as ``"_norms._window"`` of `fusebook.kernels`.
    value : object
        The first value of the row; or what the function returns without the branch.
    """

    name: str
    ops: tuple[str, ...]
    at: str
    value: object

    @contextlib.contextmanager
    def left_out(self):
        """Inside, the library works without the strategy."""
        path, _, attribute = self.at.rpartition(".")
        module = importlib.import_module(f"fusebook.kernels.{path}")
        own = getattr(module, attribute)
        if callable(own):
            other = functools.wraps(own)(lambda *_, **__: self.value)
        else:
            other = type(own)(row for row in own if row[0] != self.value)
            if len(other) != len(own) - 1:
                raise ValueError(f"{self.name}: expected one row of {self.at} that begins with {self.value!r}")
        setattr(module, attribute, other)
        try:
            yield
        finally:
            setattr(module, attribute, own)


NORMS = ("rms_norm", "add_rms_norm", "layer_norm")
SCATTERS = ("embedding_backward", "masked_scatter_nd_of_shape")
STRATEGIES = (
    Strategy("odd half types by whole vectors", NORMS, "_norms._window", 1),
    Strategy("matrices that lie across as they are", ("logistic_step",), "logistic_step._taken_across", False),
    Strategy("each row looks through all indices", SCATTERS, "scatter._scan_pays", False),
    Strategy("sums of all centres in registers", ("kmeans_update", "kmeans_step"), "kmeans._sums_fit", False),
)


@contextlib.contextmanager
def launched():
    """What the calls inside launch: kernels with their grids and constants, and operators of torch."""
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


def measure(op, strategy, problems, clock=microseconds, until=float("inf")):
    """A row for each problem, with the times in the order with, without, without, with."""
    run = op.variants[explore.ours(op)].run
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def without(*made):
        with strategy.left_out():
            return run(*made)

    for seed, case, dims in problems:
        if time.monotonic() >= until:
            return
        try:
            made = op.made(dims, device)
            with launched() as log:
                run(*made)
                own = list(log)
                log.clear()
                without(*made)
            row = [op.name, strategy.name, seed, case, taken := own != log]
            if taken:
                with _call.uncached():  # a plan of a call would repeat what was launched first
                    first, *others, last = (clock(functools.partial(f, *made)) for f in (run, without, without, run))
                yield [*row, first, last, *others]
            else:
                yield [*row, *[float("nan")] * 4]
        except (NotImplementedError, torch.cuda.OutOfMemoryError):
            continue


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
    parser.add_argument("ops", nargs="*", choices=sorted({op for s in STRATEGIES for op in s.ops}), metavar="op")
    parser.add_argument("--problems", type=int, default=200, help="of each operator, in all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="in all")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build", "strategies.csv"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("strategies are timed on a GPU, and there is no CUDA device")
    until = time.monotonic() + args.seconds
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for strategy in STRATEGIES:
            for name in [op for op in strategy.ops if not args.ops or op in args.ops]:
                for row in measure(OPS[name], strategy, drawn(OPS[name], args.problems), until=until):
                    writer.writerow(row)
                    file.flush()
    print(tell(pd.read_csv(args.out)).to_string(index=False))


if __name__ == "__main__":
    main()
