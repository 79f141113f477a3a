"""Record this machine's GPU by all pages, ``nox -s record``, or by some of them, ``nox -s record -- plot_102_softmax``.

    nox -s record -- --gpus all        # one page per GPU, longest first
    nox -s record -- --stale           # the pages whose records are missing or of older code
    nox -s record -- --stale --list    # only name them, and the commands that record them; needs no GPU

Without a GPU, FUSEBOOK_GPU says which GPU's records are meant. Seconds are those of the last recording, there or on
another GPU.

A page is recorded whole: its process writes into a folder of its own, and when it has ended well its files replace
those of the record. Each card's file belongs to one page, that of its family.

With one GPU a page has the host to itself, and all clocks are recorded in one run. With several GPUs the first run
records the clocks of the GPUs, one page per GPU. A second run, one page at a time, records the clocks of the host.
Pages that ask for several GPUs, by ``lesson.open(..., gpus=2)``, are recorded last, if ``--gpus`` gives as many: with
four, on 1, 2 and 4 of them.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import hashlib
import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

__all__ = ["GPU", "Queue", "chosen", "commands", "failures", "installed", "longest_first", "needs", "visible"]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "record"
RECORDS = ROOT / "src" / "fusebook" / "records"
LINES = 20  # of a log, where a page has failed
#: What a page imports before its turn, where it is installed. Otherwise first calls would bear the seconds of imports.
#: The evidence of a lesson may name more.
IMPORTS = ["fusebook.lesson", "torch._inductor.compile_fx", "fusebook.lesson.evidence.PAGE"]
#: A page that waits for its turn, a line on stdin, with these imports done. Then it runs as Python runs a file.
AHEAD = """
import contextlib, gc, importlib, os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
names = {imports}
for name in names:
    with contextlib.suppress(ImportError):
        names += getattr(importlib.import_module(name), "IMPORTS", ())
with contextlib.suppress(KeyError, AttributeError):  # processes that compile for torch.compile import torch, too
    sys.modules["torch._inductor.async_compile"].maybe_warm_pool()
if sys.stdin.readline():
    runpy.run_path(sys.argv[0], run_name="__main__")
gc.freeze()  # the next page waits, and to free all objects one by one takes seconds
"""
sys.path.insert(0, str(ROOT / "src"))


@dataclasses.dataclass(frozen=True)
class GPU:
    """One GPU: what CUDA_VISIBLE_DEVICES calls it, and its name."""

    id: str
    name: str


def visible():
    """The GPUs that this process may use, in CUDA's order."""
    try:
        told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = re.findall(r"^GPU (\d+): (.+?) \(UUID: (\S+)\)", told, re.MULTILINE)
    wish = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = [index for index, _, _ in found] if wish is None else [word.strip() for word in wish.split(",")]
    return [GPU(word, name) for word in ids for index, name, uuid in found if word and word in (index, uuid)]


def chosen(words, there):
    """The GPUs of a comma list of numbers, or all of them.

    Raises
    ------
    ValueError
        Says what was asked for and what there is.
    """
    numbers = list(range(len(there))) if words == "all" else [int(w) if w.isdigit() else -1 for w in words.split(",")]
    if not numbers or len(set(numbers)) < len(numbers) or not all(0 <= number < len(there) for number in numbers):
        raise ValueError(f"--gpus: expected different numbers of the {len(there)} GPUs here, from 0 up, got {words!r}")
    gpus = [there[number] for number in numbers]
    if len({gpu.name for gpu in gpus}) > 1:
        names = ", ".join(gpu.name for gpu in gpus)
        raise ValueError(f"--gpus: expected GPUs of one kind, whose records are one, got {names}")
    return gpus


def longest_first(pages, seconds):
    """Pages in the order of their last recorded seconds; one that was never recorded may be the longest."""
    return sorted(pages, key=lambda page: -seconds.get(page.stem, float("inf")))


#: Seconds that a command which `commands` writes may take.
LONGEST = 450
#: Seconds of a page that was never recorded.
UNKNOWN = 150


def commands(pages, seconds):
    """Commands that record pages, each within `LONGEST` if its pages are, with the seconds that they take."""
    packed = []
    for page in longest_first(pages, seconds):
        took = seconds.get(page.stem, UNKNOWN)
        at = next((one for one in packed if one[1] == needs(page) and one[2] + took <= LONGEST), None)
        if at is None:
            packed.append(at := [[], needs(page), 0])
        at[0].append(page.stem)
        at[2] += took
    return [
        (f"nox -s record -- {'--gpus all ' if gpus > 1 else ''}{' '.join(names)}", total)
        for names, gpus, total in packed
    ]


class Queue:
    """Pages on GPUs: each takes the next page when it has done one. A page that fails costs no other.

    On one GPU, the process of the next page starts when a page begins, and imports the packages meanwhile. It does not
    touch the GPU before its turn.

    Parameters
    ----------
    gpus : list of GPU
    build : path
        Where each page leaves its log, its records and its Triton cache.
    done : callable
        Called with a page's folder of records if the page has ended well; one at a time.
    """

    def __init__(self, gpus, build, done=lambda folder: None):
        self.gpus = gpus
        self.build = Path(build)
        self.done = done
        self.lock = threading.Lock()
        self.after = {}  # by a page, the one that starts meanwhile
        self.ahead = {}  # by a page, its process that waits for its turn

    def run(self, pages, **env):
        """Run pages in this order, and return the seconds of each, None where it failed.

        Parameters
        ----------
        pages : list of path
        **env
            More of the environment; None takes a variable out.
        """
        self.after = dict(itertools.pairwise(pages)) if len(self.gpus) == 1 else {}
        free = queue.SimpleQueue()
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // len(self.gpus))
        here = threading.local()

        def begin():
            """A thread has a GPU and its share of the cores, which the processes that it starts inherit."""
            here.gpu, own = free.get()
            os.sched_setaffinity(0, own or cores)

        for i, gpu in enumerate(self.gpus):
            free.put((gpu, cores[i * each : (i + 1) * each]))
        with concurrent.futures.ThreadPoolExecutor(len(self.gpus), initializer=begin) as pool:
            return dict(zip(pages, pool.map(lambda page: self._one(page, here.gpu, env), pages), strict=True))

    def _started(self, page, gpu, env):
        """The process of a page, which waits for its turn if it records."""
        folder = self.build / page.stem
        if env.get("_FUSEBOOK_CLOCKS") != "host":  # which adds to the records of the first run
            for name in ("records", "triton"):  # first calls compile, and their seconds are recorded
                shutil.rmtree(folder / name, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
            "CUDA_VISIBLE_DEVICES": gpu.id,
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "MPLBACKEND": "agg",
            "FUSEBOOK_STRICT": "0",
            "FUSEBOOK_GPU": None,  # a GPU that is named is replayed, and not measured
            "FUSEBOOK_RECORDS": None,
            "_FUSEBOOK_RECORD": str(folder / "records"),
            **env,
        }
        env = {name: value for name, value in env.items() if value is not None}
        many = gpu.id.count(",") + 1
        command = [str(page), *(["--gpus", str(many)] if many > 1 else [])]
        if "_FUSEBOOK_RECORD" in env:
            command = ["-c", AHEAD.format(imports=[name.replace("PAGE", page.stem) for name in IMPORTS]), *command]
        with open(folder / "log", "a") as log:  # pages offer their tables in the current folder
            how = {"cwd": folder, "env": env, "stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            return subprocess.Popen([sys.executable, *command], **how)

    def _one(self, page, gpu, env):
        folder = self.build / page.stem
        start = time.monotonic()
        process = self.ahead.pop(page, None) or self._started(page, gpu, env)
        if following := self.after.get(page):
            self.ahead[following] = self._started(following, gpu, env)
        process.communicate(b"\n")
        seconds, code = time.monotonic() - start, process.returncode
        with self.lock:
            if not code:
                self.done(folder / "records")
            how = f"failed with {code}, see {folder / 'log'}" if code else "done"
            print(f"{page.stem}: {how} after {seconds:.0f} s on GPU {gpu.id}", flush=True)
            if code:
                print(*(folder / "log").read_text(errors="replace").splitlines()[-LINES:], sep="\n", flush=True)
        return None if code else seconds


def replayed(pages, gpu, **env):
    """Run pages that measure nothing, several at once; returns the seconds of each, None where it failed."""
    many = Queue([gpu] * min(8, len(os.sched_getaffinity(0))), BUILD)
    return many.run(pages, _FUSEBOOK_RECORD=None, **env)


def stale(pages, gpu, **env):
    """The pages whose records are missing or of older code; one that fails is among them.

    Only a page knows what it asks for, so they are replayed.
    """
    notes = {page: BUILD / page.stem / "stale" for page in pages}
    for note in notes.values():
        note.unlink(missing_ok=True)
    took = replayed(pages, gpu, _FUSEBOOK_STALE="stale", **env)
    return [page for page in pages if took[page] is None or notes[page].exists()]


def problems(slug, out):
    """The command that explores random problems again which are of older code; empty if all are of today's.

    Page 901 shows them, and no page records them.
    """
    from fusebook.cards import OPS
    from fusebook.measure import explore

    there = [op for op in OPS.values() if explore.path(slug, op.name, out).exists()]
    old = {op.name: about["seed"] for op in there if (about := explore.read(op, slug, out).attrs)["stale"]}
    return f"python -m fusebook.measure.explore {' '.join(old)} --seed {max(old.values())}" if old else ""


def installed(folder, out):
    """Put the files that a page has recorded in the place of those that are there."""
    for file in sorted(folder.glob("*/**/*.*")):
        target = out / file.relative_to(folder)
        if file.name != "machine.json" or not target.exists():  # ceilings that other records were under stay
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}.part")
            shutil.copyfile(file, part)
            part.replace(target)


def failures(folder):
    """The rows that have no time although their implementation does not refuse them, as sentences."""
    found = []
    for file in sorted(folder.glob("*/*.csv")):
        with open(file, encoding="utf-8") as lines:
            next(lines)  # it says what the file is
            rows = csv.DictReader(lines)
            names = list(rows.fieldnames)
            sizes = names[names.index("dtype") : names.index("status")]
            for row in rows:
                if row["status"] not in ("ok", "refused"):
                    at = " ".join(filter(None, (row[size] for size in sizes)))
                    found.append(f"{row['op']}, {row['variant']} at {at}: {row['status']}, {row['note']}")
    return found


def needs(page):
    """How many GPUs a page asks for."""
    found = re.search(r"\blesson\.open\(.*\bgpus=(\d+)", page.read_text(encoding="utf-8"))
    return int(found[1]) if found else 1


def _stamp(page):
    """What the results of a page are made from: its text and the library."""
    files = [page, *sorted(f for f in (ROOT / "src").rglob("*") if f.suffix in (".py", ".cu", ".c", ".csv"))]
    files = [f for f in files if RECORDS not in f.parents]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


#: Options of earlier versions, and what to do instead.
GONE = {
    "--shard": "name the pages that this machine is to record",
    "--due": "--stale records pages whose records are missing or of older code",
}


def _seconds(folder):
    file = folder / "seconds.json"
    return json.loads(file.read_text()) if file.exists() else {}


def main(argv):
    """The command line; returns the exit code."""
    from fusebook.measure import _removed, machine

    parser = argparse.ArgumentParser(prog="nox -s record --", description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="parts of the names of pages; all of them if none is given")
    parser.add_argument("--gpus", default="0", help="numbers of GPUs by commas, or all; 0 if not given")
    parser.add_argument("--out", type=Path, help="a folder of records; the package's if not given")
    parser.add_argument("--stale", action="store_true", help="only pages whose records are missing or of older code")
    parser.add_argument("--list", action="store_true", help="with --stale: only name the pages; needs no GPU")
    parser.add_argument("--changed", action="store_true", help="only pages that changed since they were recorded there")
    _removed(parser, GONE)
    args = parser.parse_args(argv)
    if args.list and not args.stale:
        parser.error("--list goes with --stale")
    there = visible() or ([GPU("", os.environ.get("FUSEBOOK_GPU") or machine.SHIPPED)] if args.list else [])
    if not there:
        parser.error("record needs an NVIDIA GPU, and nvidia-smi -L lists none: run it on the machine to be recorded")
    every = sorted((ROOT / "examples").glob("plot_*.py"))
    pages = [page for page in every if not args.pages or any(word in page.stem for word in args.pages)]
    if not pages:
        parser.error(f"no page is named like {args.pages}; there are {[page.stem for page in every]}")
    try:
        gpus = chosen(args.gpus, there)
    except ValueError as error:
        parser.error(str(error))
    slug = machine.slug_of(gpus[0].name)
    known = _seconds(RECORDS / machine.SHIPPED) | _seconds(RECORDS / slug)
    out = args.out or RECORDS
    recorded = {"FUSEBOOK_GPU": slug, "FUSEBOOK_RECORDS": str(args.out) if args.out and args.out.exists() else None}
    if args.stale:
        pages = stale(pages, gpus[0], **recorded)
        print("stale:", ", ".join(page.stem for page in pages) or "nothing")
        if command := problems(slug, out):
            print(f"random problems are stale: {command}")
    if args.list:
        todo = commands(pages, known)
        for command, took in todo:
            print(f"{command}  # about {took:.0f} s")
        print(f"{slug}: about {sum(took for _, took in todo) / 60:.0f} minutes in all")
        return 0
    if args.changed:
        pages = [page for page in pages if _seconds(out / "stamps").get(page.stem) != _stamp(page)]
    for page in [page for page in pages if needs(page) > len(gpus)]:
        pages.remove(page)
        print(f"{page.stem}: left as it is, since it needs {needs(page)} GPUs, and --gpus gives {len(gpus)}")
    if not pages:
        print("no page to record")
        return 0
    pages = longest_first(pages, known)
    one = {"CUDA_VISIBLE_DEVICES": gpus[0].id, "PYTHONPATH": str(ROOT / "src")}
    ceilings = [sys.executable, "-m", "fusebook.measure.record", "--machine", "--out", str(out)]
    if subprocess.run(ceilings, env={**os.environ, **one}).returncode:
        return 1

    def done(folder):
        installed(folder, out)

    single = [page for page in pages if needs(page) == 1]
    if len(gpus) == 1:
        took = Queue(gpus, BUILD, done).run(single)
    else:
        took = Queue(gpus, BUILD).run(single, _FUSEBOOK_CLOCKS="gpu")
        well = [page for page in single if took[page] is not None]
        for page, more in Queue(gpus[:1], BUILD, done).run(well, _FUSEBOOK_CLOCKS="host").items():
            took[page] = None if more is None else took[page] + more
    for page in [page for page in pages if page not in took]:
        those = GPU(",".join(gpu.id for gpu in gpus), gpus[0].name)
        took |= Queue([those], BUILD, done).run([page])
    failed = [page.stem for page, seconds in took.items() if seconds is None]
    kept = out / slug / "seconds.json"
    seconds = _seconds(kept.parent) | {page.stem: round(s, 1) for page, s in took.items() if s is not None}
    kept.write_text(json.dumps(dict(sorted(seconds.items())), indent=2) + "\n")
    if args.changed:
        (out / "stamps").mkdir(exist_ok=True)
        stamps = _seconds(out / "stamps") | {p.stem: _stamp(p) for p in pages if p.stem not in failed}
        (out / "stamps" / "seconds.json").write_text(json.dumps(stamps))
    false = []
    if out == RECORDS:
        # A false claim must not cost the results after it, so pages are judged once all is recorded: strictly.
        judged = replayed(pages, gpus[0], **recorded, FUSEBOOK_STRICT="1")
        false = [page.stem for page, s in judged.items() if s is None and page.stem not in failed]
        subprocess.run([sys.executable, str(ROOT / "docs" / "_ext" / "readme.py")], check=True)
    for page in [page for page in pages if page.stem not in failed]:
        for failure in failures(BUILD / page.stem / "records"):
            print(f"{page.stem}: no time of {failure}")
    if failed:
        print(f"record: these pages failed, and their old records are kept: {', '.join(failed)}", file=sys.stderr)
    if false:
        print(f"record: these pages make claims that the records deny: {', '.join(false)}", file=sys.stderr)
    return 1 if failed or false else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
