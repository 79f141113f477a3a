"""Mistakes planted one at a time, and the tests that should see each: ``nox -s mutants``.

A file of ``tests/mistakes`` holds the mistakes of one part of the library: what is wrong (``what``), the text that
stands in the library (``old``), wherever in it that is today or in one ``file``, what takes its place (``new``), and
what pytest is called with (``tests``). A mistake that no test sees has its reason beside it: ``gpu`` where it takes a
GPU to be seen, which a machine that has one then looks for, else ``lives``. Text that stands nowhere any more, or
twice, is an error, so the list follows the library or is noticed. ``gpu = 2`` takes two GPUs.

    python tests/mutants.py             # all, but for what was found out before and has not changed
    python tests/mutants.py softmax     # those whose part, text or tests contain a word
    CUDA_VISIBLE_DEVICES= python tests/mutants.py    # where there is a GPU: those that need none

Every test is first run on the library as it is, unless that is trusted. Each process works in a copy of its own in a
temporary folder, and tests are run by forks of a process that has imported torch already. What was found is kept in
``build/mutants.json`` and told in ``build/mutants.csv``; a run of all also writes what the documentation shows.
"""

import argparse
import collections
import csv
import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MISTAKES = ROOT / "tests" / "mistakes"
KEPT = ROOT / "build" / "mutants.json"
TABLE = ROOT / "build" / "mutants.csv"
SHOWN = ROOT / "docs" / "mutants.csv"
SECONDS = 150  # tests that take longer hang, which is seen
NONE_RAN = 5  # pytest's own code
#: Behind what came of a mistake: its file, or that of its tests, is another one now.
BEFORE = ", before a change"
COPIED = (
    "src",
    "tests",
    "docs",
    "examples",
    "conf.py",
    "CITATION.cff",
    "noxfile.py",
    "pyproject.toml",
    "README.md",
    "Makefile",
)


@dataclass(frozen=True)
class Mistake:
    """A text of the library, what takes its place, and the tests that should see it."""

    part: str
    what: str
    old: str
    new: str
    tests: str
    file: str = ""
    gpu: int = 0
    lives: str = ""

    @property
    def key(self):
        return hashlib.sha256(repr((self.old, self.new, self.tests)).encode()).hexdigest()[:16]


def mistakes():
    """All of them, by part and in the order of their files."""
    found = []
    for file in sorted(MISTAKES.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["mistake"]:
            found.append(Mistake(part=file.stem, **entry))
    return found


def sources(root):
    """The texts of the library, and of what builds its pages, in which mistakes are planted."""
    files = [*sorted((root / "src" / "fusebook").rglob("*")), *sorted((root / "docs" / "_ext").glob("*.py"))]
    return {f: f.read_text() for f in files if f.suffix in (".py", ".c", ".h")}


def place(mistake, texts):
    """The one file that holds the text of a mistake; an error where none does, or where it stands twice."""
    named = {file: text for file, text in texts.items() if mistake.file in ("", file.name)}
    found = [(file, text.count(mistake.old)) for file, text in named.items() if mistake.old in text]
    if sum(count for _, count in found) != 1:
        where = ", ".join(f"{count} in {file.name}" for file, count in found) or "nowhere"
        raise LookupError(f"{mistake.part}: {mistake.what}: the text stands {where}: {mistake.old!r}")
    return found[0][0]


def digest(mistake, texts, file, root):
    """Of all that decides what becomes of a mistake, nearly: its file, and those of the tests."""
    names = [word.split("::")[0] for word in shlex.split(mistake.tests) if word.startswith("tests/")]
    parts = [mistake.key, texts[file], *((root / name).read_text() for name in names)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


# Running --------------------------------------------------------------------------------------------------------------


def preload():
    """Import what tests do that is none of ours, once for all forks; returns how many GPUs there are."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has begun to use a GPU cannot be forked
    import hypothesis
    import matplotlib.pyplot
    import numpy
    import pandas
    import pytest
    import torch
    import torch.utils._pytree

    os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
    torch.set_num_threads(1)
    import torch._dynamo.testing
    import triton
    import triton.language

    assert all((hypothesis, matplotlib, numpy, pandas, pytest, triton))
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def tested(copy, tests, log):
    """The exit code of pytest in a fork, in a copy; ``None`` where it took too long."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()  # so that what it starts ends with it
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(out, stream)
            os.chdir(copy)
            ours = tuple(str(ROOT / name) for name in ("src", "tests", "docs"))  # and not .nox, where others lie
            sys.path[:] = [p for p in sys.path if p != str(ROOT) and not p.startswith(ours)]
            paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and not p.startswith(ours)]
            os.environ["PYTHONPATH"] = os.pathsep.join([str(copy / "src"), *paths])
            os.environ["GUARD"] = "1"  # see memcheck
            import pytest

            options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line"]
            code = int(pytest.main([*options, *shlex.split(tests)]))
        except BaseException:
            traceback.print_exc()
            code = 70
        sys.stdout.flush()
        os._exit(code)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def worker(jobs, into, folder):
    """Do every job that no other worker has taken; a job is a mistake or, on the library as it is, only its tests."""
    copy = folder / f"copy-{os.getpid()}"
    copy.mkdir()
    for name in COPIED:
        at = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", "auto_examples", "auto_downloads")
        shutil.copytree(at, copy / name, ignore=ignore) if at.is_dir() else shutil.copy(at, copy / name)
    # Tests that compile find what is compiled already.
    (copy / "build").mkdir()
    (ROOT / "build" / "compiled").mkdir(parents=True, exist_ok=True)
    (copy / "build" / "compiled").symlink_to(ROOT / "build" / "compiled")
    texts = sources(copy)
    for name, mistake, tests in jobs:
        try:
            os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        start = time.monotonic()
        log = folder / f"{name}.log"
        if mistake is None:
            code = tested(copy, tests, log)
        else:
            file = place(mistake, texts)
            file.write_text(texts[file].replace(mistake.old, mistake.new))
            code = tested(copy, tests, log)
            file.write_text(texts[file])
        # Of a fatal error the last line lists all modules, and what it was stands above.
        lines = log.read_text(errors="replace").splitlines()
        said = "\n".join(line for line in lines if not line.startswith("Extension modules:"))[-3000:]
        if code == 0 and " passed" not in said:
            code = NONE_RAN  # what is skipped says nothing
        line = json.dumps({"name": name, "code": code, "seconds": round(time.monotonic() - start, 1), "said": said})
        with into.open("a") as out:
            out.write(line + "\n")


def outcome(code):
    """What a mistake came to by the exit code of its tests, in a word."""
    return {0: "lives", 1: "dies", None: "dies"}.get(code, "dies" if code is not None and code < 0 else "breaks")


def run_all(chosen, root=ROOT, workers=None, sure=True, plant=True, also=()):
    """Plant the chosen mistakes; returns what became of each, and sentences about what is wrong with the list.

    Without `plant` only what is known is told; `also` are files of what was found elsewhere.
    """
    texts = sources(root)
    wrong, places = [], {}
    for mistake in chosen:
        try:
            places[mistake] = place(mistake, texts)
        except LookupError as error:
            wrong.append(str(error))
    known = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for file in also:
        known |= json.loads(Path(file).read_text())
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(known, indent=1))
    gpus = preload() if plant else 0
    digests = {m: digest(m, texts, file, root) for m, file in places.items()}
    jobs, asked = [], {}
    for mistake in sorted(places, key=lambda m: m.key in known) if plant else ():  # what was never planted comes first
        here = mistake.gpu <= gpus if mistake.gpu else not gpus
        if known.get(mistake.key, {}).get("digest") != digests[mistake] and here:
            plain = hashlib.sha256(mistake.tests.encode()).hexdigest()[:16]
            if plain not in asked and sure:
                asked[plain] = mistake.tests
                jobs.append((plain, None, mistake.tests))
            jobs.append((mistake.key, mistake, mistake.tests))
    by_key, failing = {m.key: m for m in places}, set()
    if jobs:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            into = folder / "found"
            into.touch()
            children = []
            for _ in range(workers or os.cpu_count() or 1):
                child = os.fork()
                if child == 0:
                    try:
                        worker(jobs, into, folder)
                    except BaseException:
                        traceback.print_exc()
                        os._exit(1)
                    os._exit(0)
                children.append(child)
            seen = 0
            while children or seen < len(into.read_text().splitlines()):
                lines = into.read_text().splitlines()
                for line in lines[seen:]:
                    found = json.loads(line)
                    mistake = by_key.get(found["name"])
                    if mistake and mistake.tests not in failing:
                        known[mistake.key] = {
                            "digest": digests[mistake], "outcome": outcome(found["code"]),
                            "seconds": found["seconds"], "said": found["said"][-600:],
                        }  # fmt: skip
                        print(f"{outcome(found['code']):7}{found['seconds']:6.1f} s  {mistake.part}: {mistake.what}")
                        KEPT.parent.mkdir(exist_ok=True)
                        KEPT.write_text(json.dumps(known, indent=1))
                    elif not mistake and found["code"] != 0:
                        failing.add(asked[found["name"]])
                        wrong.append(f"these tests fail on the library as it is: {asked[found['name']]}")
                        print(wrong[-1], found["said"][-1500:], sep="\n")
                        for mistake in by_key.values():  # what they say of a mistake means nothing
                            if mistake.tests in failing:
                                known.pop(mistake.key, None)
                    sys.stdout.flush()
                seen = len(lines)
                children = [c for c in children if os.waitpid(c, os.WNOHANG)[0] == 0]
                time.sleep(0.1)
        KEPT.write_text(json.dumps(known, indent=1))
    become = {m: known.get(m.key, {}) for m in places}
    return {m: became(found, digests[m], m.gpu > gpus) for m, found in become.items()}, wrong


def became(found, digest, waits):
    """What a mistake came to when it was last planted, and whether what decides that has changed since."""
    if "outcome" not in found:
        return "needs a GPU" if waits else "not run"
    return found["outcome"] + ("" if found["digest"] == digest else BEFORE)


# Telling --------------------------------------------------------------------------------------------------------------


def tell(found, whole):
    """Write the tables, and return what must not be: mistakes that live or break without a word of why."""
    TABLE.parent.mkdir(exist_ok=True)
    with TABLE.open("w", newline="") as out:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(["part", "mistake", "outcome", "reason", "tests"])
        rows.writerows([m.part, m.what, became, m.lives, m.tests] for m, became in found.items())
    if whole:
        parts = collections.defaultdict(collections.Counter)
        for mistake, became in found.items():
            parts[mistake.part][became] += 1
        total = sum(parts.values(), collections.Counter())
        with SHOWN.open("w", newline="") as out:
            rows = csv.writer(out, lineterminator="\n")
            told = ["dies", f"dies{BEFORE}", "lives", "needs a GPU", "not run"]
            head = ["Caught", "Caught, before a change of its file", "Lives", "Waits for a GPU", "Not planted yet"]
            rows.writerow(["Part", "Planted", *head])
            for part, count in [*sorted(parts.items()), ("all", total)]:
                count["lives"] += count[f"lives{BEFORE}"]
                rows.writerow([part, sum(count.values()) - count[f"lives{BEFORE}"], *(count[word] for word in told)])
    wrong = [f"{m.part}: {m.what}: it {became}" for m, became in found.items() if became in ("breaks", "not run")]
    wrong += [f"{m.part}: {m.what}: no test sees it" for m, b in found.items() if b.startswith("lives") and not m.lives]
    wrong += [
        f"{m.part}: {m.what}: it dies, and has a reason to live" for m, b in found.items() if b == "dies" and m.lives
    ]
    return wrong


def main(argv=None):
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/mutants.py", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mistakes whose part, text or tests contain one of these")
    parser.add_argument("--trusting", action="store_true", help="do not run the tests on the library as it is first")
    parser.add_argument("--workers", type=int, help="processes; one a core by default")
    parser.add_argument("--known", action="store_true", help="plant nothing, tell what is known")
    parser.add_argument("--also", nargs="+", default=[], help="files build/mutants.json of other machines, to be kept")
    args = parser.parse_args(argv)
    everything = mistakes()
    chosen = [m for m in everything if not args.words or any(w in f"{m.part} {m.what} {m.tests}" for w in args.words)]
    if twice := [m.what for m, n in collections.Counter(everything).items() if n > 1]:
        raise SystemExit(f"twice in the list: {', '.join(twice)}")
    found, wrong = run_all(chosen, workers=args.workers, sure=not args.trusting, plant=not args.known, also=args.also)
    wrong += tell(found, whole=len(chosen) == len(everything))
    count = collections.Counter(found.values())
    seen = count["dies"] + count["lives"]
    print(
        f"{len(found)} mistakes: {count['dies']} of {seen} that could be seen here die"
        f" ({count['dies'] / max(seen, 1):.1%}), {count['lives']} live, {count['needs a GPU']} need a GPU; see {TABLE}"
    )
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    return int(bool(wrong) or count["dies"] < 0.95 * seen)


if __name__ == "__main__":
    raise SystemExit(main())
