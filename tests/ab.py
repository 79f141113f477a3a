"""Two commits on one GPU: how long each operator takes in the second, divided by its time in the first.

    python tests/ab.py c6c266a HEAD                         # all operators, for ten minutes at most
    python tests/ab.py c6c266a . -k softmax --seconds 300   # a folder with src in it, instead of a commit
    python tests/ab.py BASE NEW --seed 7 --cases 20         # random problems instead of the recorded sizes

Each commit works in a process of its own, with its own sources: BASE, NEW, and BASE once more as the noise. A process
asks its cards for the inputs and for the public call, and nothing else of its library. The clock is the one below, the
same for both. The order of a problem is base, new, again, again, new, base.
"""

import argparse
import contextlib
import csv
import functools
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("base", "new", "again")
FIELDS = ("op", "problem", "base_us", "new_us", "again_us", "ratio", "noise")
REPEAT = 9


# In a process of one commit -------------------------------------------------------------------------------------------


class Clock:
    """The GPU time of a call by CUDA events, after the L2 cache was flushed; without a GPU, its time on the host."""

    def __init__(self):
        import torch

        self.torch = torch
        self.gpu = torch.cuda.is_available()
        if self.gpu:
            l2 = torch.cuda.get_device_properties(0).L2_cache_size
            self.buffer = torch.empty(max(4 * l2, 2**26) // 2**16, 2**14, device="cuda")
            self.sums = torch.empty(len(self.buffer), device="cuda")

    def flush(self):
        """Write several times the cache and read it again, so that no line is left to be written back."""
        self.buffer.zero_()
        self.torch.sum(self.buffer, 1, out=self.sums)

    def host_seconds(self, call):
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        self.torch.cuda.synchronize()
        return seconds

    def microseconds(self, call):
        """The median of some calls."""
        if not self.gpu:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        torch = self.torch
        self.flush()
        ahead = max(self.host_seconds(call) for _ in range(3)) + 20e-6  # a late launch would count as work
        flushing = self.host_seconds(lambda: (self.flush(), torch.cuda.synchronize()))
        times = math.ceil(2 * ahead / flushing)  # the GPU is still busy when the call has been launched
        events = []
        for _ in range(REPEAT):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(times):
                self.flush()
            start.record()
            call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) * 1e3 for start, end in events)


def best(op):
    """The name of the implementation that a user of the library gets; None if a card has none."""
    return next((name for name in ("fusebook (chosen)", "fusebook") if name in op.variants), None)


def problems(words, seed, cases):
    """The recorded contiguous sizes of each operator, or random problems of a seed, by operator."""
    import fusebook
    from fusebook.cards import OPS

    records = Path(fusebook.__file__).parent / "records" / "nvidia-h100-80gb-hbm3"  # modules move, records do not
    found = {}
    for name, op in OPS.items():
        if best(op) is None or (words and not any(word in name for word in words)):
            continue
        if seed is not None:
            found[name] = [op.problem(seed, case) for case in range(cases)]
            continue
        file = records / f"{name}.csv"
        rows = csv.DictReader(io.StringIO(file.read_text().partition("\n")[2])) if file.exists() else ()
        points = {}
        for row in rows:
            if row["variant"] == best(op) and row["status"] == "ok":
                columns = list(row)
                dims = {c: row[c] for c in columns[columns.index("dtype") : columns.index("status")] if row[c]}
                dims = {c: int(v) if v.isdigit() else v for c, v in dims.items()}
                points[json.dumps(dims)] = {**dims, "layout": "contiguous"}
        found[name] = list(points.values())
    return found


def work():
    """Answer each line of JSON by another: get a problem ready, time it, list problems, or forget it."""
    import torch

    import fusebook  # noqa: F401  (before triton)
    from fusebook.cards import OPS

    clock, call = Clock(), None
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "list" in asked:
                answer = problems(*asked["list"])
            elif "ready" in asked:
                name, dims = asked["ready"]
                call = None
                if clock.gpu:
                    torch.cuda.empty_cache()
                op = OPS[name]
                variant = op.variants[best(op)]
                given = variant.given(*op.made(dims, "cuda" if clock.gpu else "cpu"))
                call = functools.partial(variant.run, *given)
                with torch.no_grad():
                    for _ in range(3):
                        call()
                    if clock.gpu:
                        torch.cuda.synchronize()
                answer = "ready"
            else:
                with torch.no_grad():
                    answer = clock.microseconds(call)
            answers.write(json.dumps({"answer": answer}) + "\n")
        except Exception as error:
            call = None
            answers.write(json.dumps({"error": f"{type(error).__name__}: {str(error)[:200]}"}) + "\n")


# The comparison -------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """A commit does not compute a problem."""


class Worker:
    """A process of one commit."""

    def __init__(self, folder):
        env = {**os.environ, "PYTHONPATH": str(Path(folder) / "src")}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        self.process = subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def send(self, **asked):
        self.process.stdin.write(json.dumps(asked) + "\n")

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"ab: a process ended with {self.process.wait()}; its error is above")
        found = json.loads(line)
        if "error" in found:
            raise Refused(found["error"])
        return found["answer"]

    def ask(self, **asked):
        self.send(**asked)
        return self.answer()


def compared(workers, asked, until, now=time.monotonic):
    """A row for each problem that all sides compute, operator by operator in turn, until the time is over.

    Parameters
    ----------
    workers : dict
        By `SIDES`, with ``send``, ``answer`` and ``ask`` as a `Worker` has them.
    asked : dict of str to list
        Problems by operator.
    """
    for case in range(max(map(len, asked.values()), default=0)):
        for name, found in asked.items():
            if case >= len(found) or now() >= until:
                continue
            for worker in workers.values():
                worker.send(ready=(name, found[case]))  # they compile at the same time
            refused = []
            for side, worker in workers.items():
                try:
                    worker.answer()
                except Refused as error:
                    refused.append(f"{side}: {error}")
            times = {side: [] for side in workers}
            with contextlib.suppress(Refused):
                for side in () if refused else (*SIDES, *reversed(SIDES)):
                    times[side].append(workers[side].ask(time=True))
            if refused or min(map(len, times.values())) < 2:
                print(f"{name} {json.dumps(found[case])}: left out, {'; '.join(refused) or 'it failed'}", flush=True)
                continue
            us = {side: sum(both) / 2 for side, both in times.items()}
            yield {
                "op": name, "problem": json.dumps(found[case]), **{f"{side}_us": us[side] for side in SIDES},
                "ratio": us["new"] / us["base"], "noise": us["again"] / us["base"],
            }  # fmt: skip


def quantile(values, q):
    """As NumPy has it: between the two nearest values."""
    values = sorted(values)
    at = q * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def summed(rows):
    """Lines of a table: of each operator the median, the 90 % point and the worst ratio, and the noise."""
    lines = [f"{'operator':28}{'problems':>9}{'median':>8}{'90 %':>7}{'worst':>7}{'noise':>7}  worst problem"]
    for name in dict.fromkeys(row["op"] for row in rows):
        own = [row for row in rows if row["op"] == name]
        ratios = [row["ratio"] for row in own]
        noise = quantile([abs(row["noise"] - 1) for row in own], 0.9)
        worst = max(own, key=lambda row: row["ratio"])
        lines.append(
            f"{name:28}{len(own):9}{quantile(ratios, 0.5):8.3f}{quantile(ratios, 0.9):7.3f}{worst['ratio']:7.3f}"
            f"{noise:7.3f}  {worst['problem']}"
        )
    return lines


def checkout(commit, build):
    """The folder of a commit's sources: itself if it is a folder, else what git has of it."""
    if (Path(commit) / "src" / "fusebook").is_dir():
        return Path(commit).resolve()
    folder = build / commit.replace("/", "-")
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "src"], capture_output=True)
    if archive.returncode:
        raise SystemExit(f"ab: {commit} is neither a folder with src/fusebook nor a commit: {archive.stderr.decode()}")
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base", help="a commit, or a folder with src in it")
    parser.add_argument("new")
    parser.add_argument("-k", dest="words", action="append", help="only operators whose names contain this")
    parser.add_argument("--seed", type=int, help="random problems of this seed instead of the recorded sizes")
    parser.add_argument("--cases", type=int, default=20, help="random problems of each operator")
    parser.add_argument("--problems", type=Path, help="a JSON file with lists of problems by operator, instead of both")
    parser.add_argument("--seconds", type=float, default=570.0, help="in all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "ab.csv")
    args = parser.parse_args(argv)
    until = time.monotonic() + args.seconds
    base, new = (checkout(commit, ROOT / "build" / "ab") for commit in (args.base, args.new))
    workers = {"base": Worker(base), "new": Worker(new), "again": Worker(base)}
    rows = []
    try:
        asked = json.loads(args.problems.read_text()) if args.problems else None
        asked = asked or workers["new"].ask(list=(args.words or [], args.seed, args.cases))
        if not asked:
            parser.error(f"no operator is named like {args.words}")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            for row in compared(workers, asked, until):
                rows.append(row)
                writer.writerow(row)
                file.flush()
    finally:
        for worker in workers.values():
            worker.process.kill()
    print("\n".join(summed(rows)))
    print(f"{len(rows)} of {sum(map(len, asked.values()))} problems were timed; {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(work() if sys.argv[1:] == ["--worker"] else main())
