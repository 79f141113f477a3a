"""Plant known mistakes one at a time, and see which tests notice: ``nox -s mutants -- softmax``.

``tests/mistakes.toml`` lists at most a hundred mistakes: one for each promise of docs/method, and for each family of
kernels one of a mask, a bound, an order, a dtype and a race. Each names its file, its function, and a pattern (``old``)
that occurs once in that function. A pattern that occurs never or twice is an error. ``gpu = 1`` marks a mistake that
only a GPU shows. For all other mistakes, ``nox -s mutants -- --ast check.py`` runs cosmic-ray on one module.

    python tests/mutants.py                  # all mistakes that this machine can show
    python tests/mutants.py softmax          # those whose part, text or tests contain a word
    python tests/mutants.py --ast check.py --tests tests/test_check.py
"""

import argparse
import ast
import collections
import concurrent.futures
import csv
import functools
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path("src/fusebook")
SHOWN = ROOT / "docs" / "mutants.csv"
MOST = 100
SECONDS = 300
COPIED = (
    "src",
    "tests",
    "docs",
    "examples",
    "conf.py",
    "CITATION.cff",
    "LICENSE",
    "noxfile.py",
    "pyproject.toml",
    "README.md",
    "Makefile",
)


@dataclass(frozen=True)
class Mistake:
    part: str
    what: str
    file: str
    function: str
    old: str
    new: str
    tests: str
    gpu: int = 0

    def planted(self, text):
        """The text of the file with the mistake in it; LookupError if the pattern does not occur once."""
        first, last = span(text, self.function)
        lines = text.splitlines(keepends=True)
        body = "".join(lines[first:last])
        if body.count(self.old) != 1:
            raise LookupError(
                f"{self.what}: {body.count(self.old)} matches in {self.file} {self.function}: {self.old!r}"
            )
        return "".join([*lines[:first], body.replace(self.old, self.new), *lines[last:]])


#: A file is parsed once: it has many mistakes.
parsed = functools.cache(ast.parse)


def span(text, function):
    """First line, counted from 0, and end of a function or ``Class.method``; of the whole text if no name is given."""
    if not function:
        return 0, len(text.splitlines())
    node = parsed(text)
    for name in function.split("."):
        found = [
            n for n in ast.iter_child_nodes(node) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name
        ]
        if len(found) != 1:
            raise LookupError(f"{len(found)} definitions of {function}")
        (node,) = found
    return min(n.lineno for n in (node, *node.decorator_list)) - 1, node.end_lineno


def mistakes(file=ROOT / "tests" / "mistakes.toml"):
    """All mistakes in the order of the file."""
    found = [Mistake(**entry) for entry in tomllib.loads(file.read_text())["mistake"]]
    if len(found) > MOST:
        raise ValueError(f"{file.name}: expected at most {MOST} mistakes, got {len(found)}; leave the others to --ast")
    return found


def copied(folder):
    """Copy what tests need into a folder."""
    ignore = shutil.ignore_patterns("__pycache__", "auto_examples", "auto_downloads")
    for name in COPIED:
        at = ROOT / name
        shutil.copytree(at, folder / name, ignore=ignore) if at.is_dir() else shutil.copy(at, folder / name)


def pytest(copy, tests):
    """The exit code of pytest in a copy, 1 if it takes too long, and the end of its output."""
    path = os.pathsep.join(filter(None, [str(copy / "src"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line"]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GUARD": "1"}  # GUARD: see memcheck
    try:
        done = subprocess.run(
            [*command, *shlex.split(tests)], cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return 1, "timed out"
    return done.returncode, (done.stdout + done.stderr)[-1500:]


def outcome(mistake, copies):
    """Plant one mistake in a free copy, and return what became of it."""
    copy = copies.get()
    file = copy / LIBRARY / mistake.file
    text = file.read_text()
    try:
        file.write_text(mistake.planted(text))
        code, said = pytest(copy, mistake.tests)
    finally:
        file.write_text(text)
        copies.put(copy)
    if code == 0 and " passed" in said:
        return "lives", said
    return ("caught", "") if code == 1 or code < 0 else ("breaks", said)


def by_ast(file, tests):
    """Run cosmic-ray, a tool that mutates syntax trees, on one module of the library."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        copied(copy)
        command = shlex.join([sys.executable, "-m", "pytest", "-x", "-q", *shlex.split(tests)])
        config = copy / "cosmic.toml"
        config.write_text(
            f'[cosmic-ray]\nmodule-path = "{LIBRARY / file}"\ntimeout = {SECONDS}.0\ntest-command = "{command}"\n'
            '[cosmic-ray.distributor]\nname = "local"\n'
        )
        for step in (["init", "cosmic.toml", "found.sqlite"], ["exec", "cosmic.toml", "found.sqlite"]):
            subprocess.run([sys.executable, "-m", "cosmic_ray.cli", *step], cwd=copy, check=True)
        subprocess.run([Path(sys.executable).with_name("cr-report"), "found.sqlite"], cwd=copy, check=True)


def main(argv=None):
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mistakes whose part, text or tests contain one of these")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; one a core by default")
    parser.add_argument("--ast", metavar="FILE", help="mutate this file below src/fusebook by cosmic-ray instead")
    parser.add_argument("--tests", default="tests", help="with --ast: what pytest is called with")
    args = parser.parse_args(argv)
    if args.ast:
        by_ast(args.ast, args.tests)
        return 0
    import torch

    everything = mistakes()
    chosen = [m for m in everything if not args.words or any(w in f"{m.part} {m.what} {m.tests}" for w in args.words)]
    here = [m for m in chosen if m.gpu <= torch.cuda.device_count()]
    count = collections.defaultdict(collections.Counter)
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary, concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        copies = queue.Queue()
        for i in range(args.workers):
            copied(Path(temporary) / str(i))
            copies.put(Path(temporary) / str(i))
        for mistake, (found, said) in zip(here, pool.map(lambda m: outcome(m, copies), here), strict=True):
            print(f"{found:7} {mistake.part}: {mistake.what}\n{said}".rstrip(), flush=True)
            count[mistake.part][found] += 1
            wrong += found != "caught"
    for mistake in set(chosen) - set(here):
        count[mistake.part]["needs a GPU"] += 1
    if chosen == everything:
        with SHOWN.open("w", newline="") as out:
            rows = csv.writer(out, lineterminator="\n")
            rows.writerow(["Part", "Planted", "Caught", "Lives", "Needs a GPU"])
            total = sum(count.values(), collections.Counter())
            for part, of in [*sorted(count.items()), ("all", total)]:
                rows.writerow([part, of.total(), of["caught"], of["lives"] + of["breaks"], of["needs a GPU"]])
    print(f"{len(here)} of {len(chosen)} mistakes planted, {wrong} not caught")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
