"""Choose the constants of a kernel on this GPU: ``python -m fusebook.tune concat_gemm``.

`products` says which classes of problems have a plan of their own (``classes``), which plans are
worth a try (``candidates``), how a problem of a class looks (``problem``) and how it is launched by a plan
(``attempt``). Each plan is checked and timed, cold and warm, and the one with the least product of both times is kept
in ``kernels/tuned/<op>.csv``, a row a plan, under the GPU's compute capability; rows of others are left alone. The time
of torch's own way, in times of the plan's, is noted beside it; where torch's is shorter, the row says torch.

Times of a plan depend on the machine's other work: run it on a GPU that nothing else uses, and record again afterwards,
since the tuned constants are part of what a record is taken from.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import functools
import math
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusebook import check, kernels, timing
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.kernels._products import _WITHIN, Plan, Tuned, read
from fusebook.tune import costs, products

with extra("book"):
    from tqdm import tqdm

__all__ = ["TUNABLE", "main", "tune", "write"]

#: The operators that can be tuned.
TUNABLE = ("concat_gemm", "swiglu")


def _compile(name: str, key: tuple[str, str, str], plans: Sequence[Any]) -> None:
    """Fill Triton's cache, in a process of its own; what cannot be compiled shows when it is timed."""
    inputs = products.problem(*key, torch.device("cuda"))
    for plan in plans:
        try:
            products.attempt(name, key[0], inputs, plan)
            torch.cuda.synchronize()
        except Exception:  # asks for more shared memory than there is, for one
            continue


def _precompile(name: str, keys: Sequence[tuple[str, str, str]]) -> None:
    seen: set[tuple[str, str, Any]] = set()
    workers = min(16, os.cpu_count() or 1)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = []
        for key in sorted(keys, key=lambda k: len(k[2])):  # small problems first: kernels do not depend on the size
            new = [plan for plan in products.candidates(name, *key) if (key[0], key[1], plan) not in seen]
            seen.update((key[0], key[1], plan) for plan in new)
            waiting += [pool.submit(_compile, name, key, new[i : i + 4]) for i in range(0, len(new), 4)]
        for done in tqdm(concurrent.futures.as_completed(waiting), total=len(waiting), desc="compile", disable=None):
            done.result()


def _fastest(ways: Mapping[Any, Callable[[], Any]], repeat: int) -> dict[Any, float]:
    """The geometric mean of cold and warm time, in seconds."""
    functions = {str(way): call for way, call in ways.items()}
    cold, warm = timing.cold(functions, warmup=2, repeat=repeat), timing.warm(functions, repeat=repeat)
    times = {}
    for way in ways:
        a, b = cold[str(way)], warm[str(way)]
        if a is not None and b is not None:
            times[way] = math.sqrt(a.q50 * b.q50)
    return times


def tune(name: str, *, repeat: int = 30, only: Sequence[str] = ("",)) -> dict[tuple[str, str, str], Tuned]:
    """Time the candidates of every class of problems and keep the best of each.

    Parameters
    ----------
    name : str
        Of `TUNABLE`.
    repeat : int
        Calls timed of each plan and clock.
    only : sequence of str
        The classes whose name begins with one of these, such as ``"half row"`` or ``"tf32 row 2**23"``; all by default.

    Returns
    -------
    dict
        The plan of each class, by math, layout and shape.

    Raises
    ------
    ValueError
        Where no operator of that name has plans to choose, or no class begins so.
    RuntimeError
        Where there is no GPU, or no candidate of a class is right.
    """
    if name not in TUNABLE:
        raise ValueError(f"fusebook.tune: expected one of {', '.join(TUNABLE)}, got {name!r}")
    if not torch.cuda.is_available():
        raise RuntimeError("fusebook.tune: expected a CUDA device, got none; plans are chosen on a GPU")
    keys = [key for key in products.classes(name) if " ".join(key).startswith(tuple(only))]
    if not keys:
        labels = ", ".join(map(" ".join, products.classes(name)))
        raise ValueError(f"fusebook.tune: expected the beginning of one of {labels}, got {', '.join(only)}")
    _precompile(name, keys)
    found: dict[tuple[str, str, str], Tuned] = {}
    key: tuple[str, str, str]  # which a bar does not tell
    for key in tqdm(keys, desc=name, disable=None):
        label = " ".join(key)
        inputs = products.problem(*key, torch.device("cuda"))
        yard = check.yardstick(OPS[name], inputs)
        ways: dict[Any, Callable[[], Any]] = {}
        for plan in (None, *products.candidates(name, *key)):
            try:
                out = products.attempt(name, key[0], inputs, plan)
                torch.cuda.synchronize()
            except Exception as error:  # a plan that this GPU cannot launch is no candidate
                print(f"{label}: {plan}: {type(error).__name__}: {str(error)[:80]}", file=sys.stderr)
                continue
            if out is not None and yard.judge(out, key[0]).ok:
                ways[plan] = functools.partial(products.attempt, name, key[0], inputs, plan)
        times = _fastest(ways, repeat)
        plans = [plan for plan in times if plan is not None]
        if not plans:
            raise RuntimeError(f"fusebook.tune: expected a plan for {label}, got none that runs; add a candidate")
        best = min(plans, key=times.__getitem__)
        torchs = round(times[None] / times[best], 3) if None in times else None
        ratio = f", torch {torchs} times as long" if torchs else ""
        print(f"{label}: {times[best] * 1e6:.1f} us by {best}{ratio}", flush=True)
        shorter = torchs is not None and torchs < 1 - _WITHIN
        found[key] = Tuned(Plan("torch"), None) if shorter else Tuned(best, torchs)
    return found


def write(file: pathlib.Path, plans: Mapping[tuple[str, str, str, str], Tuned]) -> None:
    """Write what `fusebook.kernels._products.read` reads.

    Parameters
    ----------
    plans : mapping of tuple of str to Tuned
        By capability, math, layout and class of shape. In the rows of torch, constants are left out.
    """

    def order(key: tuple[str, str, str, str]) -> tuple[str, str, str, int, int]:
        capability, math, layout, shape = key
        return (
            capability,
            math,
            layout,
            not shape.startswith("rows"),
            int(shape.removeprefix("rows ").removeprefix("2**")),
        )

    with file.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["capability", "math", "layout", "shape", *Plan._fields, "torch"])
        for key in sorted(plans, key=order):
            plan, torchs = plans[key]
            constants = [""] * (len(plan) - 1) if plan.kernel == "torch" else [int(value) for value in plan[1:]]
            writer.writerow([*key, plan.kernel, *constants, "" if torchs is None else torchs])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fusebook.tune", description="Choose the constants of kernels.")
    parser.add_argument("ops", nargs="+", metavar="op", choices=TUNABLE, help=", ".join(TUNABLE))
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--only", default="", metavar="CLASSES", help='comma list: "half row,tf32" for what begins so')
    parser.add_argument("--costs", type=int, metavar="PROBLEMS", help="fit costs to so many drawn ones instead")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the plans; the package's")
    args = parser.parse_args(argv)
    if args.repeat < 1 or (args.costs is not None and args.costs < 1):
        parser.error("expected --repeat and --costs of 1 or more")
    try:
        for name in args.ops:
            folder = args.out or pathlib.Path(kernels.__path__[0]) / "tuned"
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{name}.csv"
            major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
            if args.costs and torch.cuda.is_available():
                sms = torch.cuda.get_device_properties(0).multi_processor_count
                fit = costs.fit(costs.points(name, args.costs), sms, 2 if name == "swiglu" else 1)
                costs.write(folder / f"{name}_costs.csv", f"{major}{minor}", fit)
                print(folder / f"{name}_costs.csv")
                continue
            found = tune(name, repeat=args.repeat, only=args.only.split(","))
            write(file, read(file) | {(f"{major}{minor}", *key): tuned for key, tuned in found.items()})
            print(file)
    except (RuntimeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
