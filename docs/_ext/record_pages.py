"""Record this machine's GPUs by all pages: ``nox -s record``, or by some of them ``nox -s record -- softmax kmeans``.

    nox -s record -- --gpus 0,1        # a queue of pages, longest first, one process a GPU
    nox -s record -- --shard 1/4       # a quarter of the pages, into a folder of its own, for a job array
    nox -s record -- --due             # what is missing or stale, and nothing else
    nox -s record -- --due --list      # which pages have any of it; needs no GPU
    python -m fusebook.record --join build/record/shard-*

With one GPU a page has the host to itself, and every clock is recorded. With several, what the cards measure is
recorded by the device's clocks alone, at the same time. Rows keep the caller's clocks, host and call, that they had,
where the same was launched by the same versions. Then, one page at a time, come rows that had none, what pages measure
by themselves, and pages that were never recorded. Last are pages that ask for several GPUs, by ``options(gpus=2)``: as
many are each page's own, and where there are fewer it is left as it is.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
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

__all__ = ["GPU", "Queue", "chosen", "longest_first", "needs", "shard", "visible"]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "record"
RECORDS = ROOT / "src" / "fusebook" / "records"
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


def shard(pages, seconds, words):
    """The i-th of n parts of about the same length, from ``i/n``: each page goes where the least is waiting.

    Raises
    ------
    ValueError
        Says what was asked for and what is accepted.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", words)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--shard: expected i/n with i from 1 to n, such as 1/4, got {words!r}")
    parts = [[0.0, []] for _ in range(int(match[2]))]
    for page in longest_first(pages, seconds):
        least = min(parts, key=lambda part: (part[0], len(part[1])))
        least[0] += seconds.get(page.stem, 60.0)
        least[1].append(page)
    return parts[int(match[1]) - 1][1]


class Queue:
    """Pages on GPUs: each takes the next page when it has done one. A page that fails costs no other.

    Parameters
    ----------
    gpus : list of GPU
    build : path
        Where each page leaves its log and its records, and each GPU its Triton cache.
    done : callable
        Called with a page's folder of records when it has ended, however it has; one at a time.
    """

    def __init__(self, gpus, build, done=lambda folder: None):
        self.gpus = gpus
        self.build = Path(build)
        self.done = done
        self.lock = threading.Lock()

    def run(self, pages, **env):
        """Run pages in this order, and return the seconds of each, None where it failed.

        Parameters
        ----------
        pages : list of path
        **env
            More of the environment; None takes a variable out.
        """
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

    def _one(self, page, gpu, env):
        folder = self.build / page.stem
        shutil.rmtree(folder / "records", ignore_errors=True)  # of an earlier run, and joined then
        folder.mkdir(parents=True, exist_ok=True)
        cache = self.build / f"cache-{gpu.id}"
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
            "CUDA_VISIBLE_DEVICES": gpu.id,
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "MPLBACKEND": "agg",
            "FUSEBOOK_STRICT": "0",
            "FUSEBOOK_RECORD": str(folder / "records"),
            **env,
        }
        env = {name: value for name, value in env.items() if value is not None}
        start = time.monotonic()
        with open(folder / "log", "a") as log:  # pages offer their tables in the current folder; here nobody wants them
            code = subprocess.run([sys.executable, str(page)], cwd=folder, env=env, stdout=log, stderr=log).returncode
        seconds = time.monotonic() - start
        with self.lock:
            self.done(folder / "records")
            how = f"failed with {code}, see {folder / 'log'}" if code else "done"
            print(f"{page.stem}: {how} after {seconds:.0f} s on GPU {gpu.id}", flush=True)
        return None if code else seconds


def replayed(pages, gpu, **env):
    """Run pages that measure nothing, several at once; returns the seconds of each, None where it failed."""
    many = Queue([gpu] * min(8, len(os.sched_getaffinity(0))), BUILD)
    return many.run(pages, FUSEBOOK_RECORD=None, FUSEBOOK_REPLAY="1", **env)


def due(pages, gpu):
    """What the record of each page lacks: nothing, or what is taken by ``device``, by ``host``, or both.

    Only a page knows what it asks for, so they are replayed. One that fails is due whole.
    """
    found = {page: BUILD / page.stem / "due" for page in pages}
    for noted in found.values():
        noted.unlink(missing_ok=True)
    took = replayed(pages, gpu, FUSEBOOK_DUE="due")
    noted = {page: file.read_text().split() if file.exists() else [] for page, file in found.items()}
    return {page: {"device", "host"} if took[page] is None else set(noted[page]) for page in pages}


def _has_more(page):
    """Whether a page that was recorded by the device's clocks has rows that lack those of the caller."""
    from fusebook import record

    made = (record._load(file, file.stem)[0] for file in (BUILD / page.stem / "records").glob("*/*.csv"))
    return any((frame["status"].eq("ok") & frame["call_us"].isna()).any() for frame in made)


def needs(page):
    """How many GPUs a page asks for."""
    found = re.search(r"\boptions\(gpus=(\d+)", page.read_text(encoding="utf-8"))
    return int(found[1]) if found else 1


def _stamp(page):
    """What the results of a page are made from: its text and the library."""
    files = [page, *sorted(f for f in (ROOT / "src").rglob("*") if f.suffix in (".py", ".cu", ".c", ".csv"))]
    files = [f for f in files if RECORDS not in f.parents]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _seconds(folder):
    file = folder / "seconds.json"
    return json.loads(file.read_text()) if file.exists() else {}


def main(argv):
    """The command line; returns the exit code."""
    from fusebook import machine, record

    parser = argparse.ArgumentParser(prog="nox -s record --", description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="parts of the names of pages; all of them if none is given")
    parser.add_argument("--gpus", default="0", help="numbers of GPUs by commas, or all; 0 if not given")
    parser.add_argument("--shard", help="i/n: the i-th of n parts, into build/record/shard-i-of-n")
    parser.add_argument("--out", type=Path, help="a folder of records; the package's if not given")
    parser.add_argument("--due", action="store_true", help="only rows and measurements that are missing or stale")
    parser.add_argument("--list", action="store_true", help="with --due: only say which pages have any; needs no GPU")
    parser.add_argument("--changed", action="store_true", help="only pages that changed since they were recorded there")
    args = parser.parse_args(argv)
    if args.list and not args.due:
        parser.error("--list goes with --due")
    there = visible() or ([GPU("", machine.SHIPPED)] if args.list else [])
    if not there:
        parser.error("record needs an NVIDIA GPU, and nvidia-smi -L lists none: run it on the machine to be recorded")
    every = sorted((ROOT / "examples").glob("plot_*.py"))
    pages = [page for page in every if not args.pages or any(word in page.stem for word in args.pages)]
    if not pages:
        parser.error(f"no page is named like {args.pages}; there are {[page.stem for page in every]}")
    try:
        gpus = chosen(args.gpus, there)
        slug = machine.slug_of(gpus[0].name)
        known = _seconds(RECORDS / slug) or _seconds(RECORDS / machine.SHIPPED)
        if args.shard:
            pages = shard(pages, known, args.shard)
    except ValueError as error:
        parser.error(str(error))
    out = args.out or RECORDS
    if args.shard and not args.out:
        out = BUILD / f"shard-{args.shard.replace('/', '-of-')}"
    if args.changed:
        pages = [page for page in pages if _seconds(out / "stamps").get(page.stem) != _stamp(page)]
        if not (RECORDS / slug).exists():  # nothing is known of the caller's clocks, which need the host alone
            gpus = gpus[:1]
    for page in [page for page in pages if needs(page) > len(gpus)]:
        pages.remove(page)
        print(f"{page.stem}: left as it is, since it needs {needs(page)} GPUs, and --gpus gives {len(gpus)}")
    pages = longest_first(pages, known)
    # Of a whole record the host's part is what pages measure by themselves.
    lacking = {page: {"device", "host"} if "measured(" in page.read_text() else {"device"} for page in pages}
    if args.due:
        lacking = due(pages, gpus[0])
        pages = [page for page in pages if lacking[page]]
        print("due:", ", ".join(f"{page.stem} by {' and '.join(sorted(lacking[page]))}" for page in pages) or "nothing")
    if args.list:
        return 0
    if not pages:
        print("no page to record")
        return 0
    one = {"CUDA_VISIBLE_DEVICES": gpus[0].id, "PYTHONPATH": str(ROOT / "src")}
    ceilings = [sys.executable, "-m", "fusebook.record", "--machine", "--out", str(out)]
    if subprocess.run(ceilings, env={**os.environ, **one}).returncode:
        return 1
    before = BUILD / "before"
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(out / slug, before)

    def joined(folder):
        """What a page has measured is recorded, and what it measured again is kept as it was."""
        if folder.exists():
            record.join([folder], out)
            record.keep_superseded(before, out / slug)

    pending, single = Queue(gpus, BUILD, joined), [page for page in pages if needs(page) == 1]

    def part(*words):
        return " ".join([*(["due"] if args.due else []), *words]) or None

    if len(gpus) == 1:
        took = pending.run(single, FUSEBOOK_PART=part())
    else:
        known = _seconds(out / slug)
        old, one = [page for page in single if page.stem in known], Queue(gpus[:1], BUILD, joined)
        took = pending.run([page for page in old if "device" in lacking[page]], FUSEBOOK_PART=part("device"))
        alone = [page for page in old if "host" in lacking[page] or (page in took and _has_more(page))]
        for page, more in one.run(alone, FUSEBOOK_PART=part("host")).items():
            took[page] = None if more is None or took.get(page, 0.0) is None else took.get(page, 0.0) + more
        took |= one.run([page for page in single if page not in took], FUSEBOOK_PART=part())
    for page in [page for page in pages if page not in took]:
        those = GPU(",".join(gpu.id for gpu in gpus[: needs(page)]), gpus[0].name)
        took |= Queue([those], BUILD, joined).run([page], FUSEBOOK_PART=part())
    failed = [page.stem for page, seconds in took.items() if seconds is None]
    kept = out / slug / "seconds.json"
    now = {page.stem: round(s, 1) for page, s in took.items() if s is not None}
    seconds = now | _seconds(kept.parent) if args.due else _seconds(kept.parent) | now
    kept.write_text(json.dumps(dict(sorted(seconds.items())), indent=2) + "\n")
    if args.changed:
        (out / "stamps").mkdir(exist_ok=True)
        stamps = _seconds(out / "stamps") | {p.stem: _stamp(p) for p in pages if p.stem not in failed}
        (out / "stamps" / "seconds.json").write_text(json.dumps(stamps))
    false = []
    if out == RECORDS:
        # A false claim must not cost the results after it, so pages are judged once all is recorded: strictly.
        judged = replayed(pages, gpus[0], FUSEBOOK_STRICT="1")
        false = [page.stem for page, s in judged.items() if s is None and page.stem not in failed]
        subprocess.run([sys.executable, str(ROOT / "docs" / "_ext" / "readme.py")], check=True)
    if failed:
        print(f"record: these pages failed, and what they had measured is kept: {', '.join(failed)}", file=sys.stderr)
    if false:
        print(f"record: these pages make claims that the records deny: {', '.join(false)}", file=sys.stderr)
    return 1 if failed or false else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
