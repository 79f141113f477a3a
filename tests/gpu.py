"""The whole suite on a GPU: first what takes times, alone, then what shares it, in many processes: ``nox -s gpu``.

Ends in a table of what passed, failed, and was skipped for which reason, and writes it where the documentation shows
it. Other arguments go to pytest.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import trials

TOLD = trials.ROOT / "build" / "gpu.jsonl"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python tests/gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=min(15, os.cpu_count() or 1), help="of those that share")
    args, others = parser.parse_known_args(argv)
    TOLD.parent.mkdir(exist_ok=True)
    TOLD.unlink(missing_ok=True)
    # torch.compile would start as many processes in each of them.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    start, broken = time.monotonic(), []
    together = ["-n", str(args.processes), "--dist", "worksteal", "-m", "not alone"]
    for options in (["-m", "alone"], together):
        command = [sys.executable, "-m", "pytest", "-q", f"--told={TOLD}", *options, *others]
        code = subprocess.run(command, env=environment, cwd=trials.ROOT, check=False).returncode
        if code not in (0, 1, 5):  # neither passed nor failed nor without tests
            broken.append(f"pytest {' '.join(options)} ended with {code}")
    seconds = time.monotonic() - start
    return table(map(json.loads, TOLD.read_text().splitlines()), seconds, args.processes, broken, whole=not others)


def table(reports, seconds, processes, broken, whole):
    """Print the table; returns the exit code."""
    became, reasons, slow = {}, collections.Counter(), collections.Counter()
    for report in reports:
        if became.get(report["test"]) != "failed":
            became[report["test"]] = report["outcome"]
        slow[report["test"]] += report["seconds"]
        if report["outcome"] == "skipped":
            reasons[report["why"]] += 1
        elif report["outcome"] == "failed":
            print(f"FAILED {report['test']}\n{report['why'][-1500:]}")
    count = collections.Counter(became.values())
    print("\nslowest: " + ", ".join(f"{Path(test).name} {s:.0f} s" for test, s in slow.most_common(10)))
    print(f"\n{'passed':>10} {count['passed']}\n{'failed':>10} {count['failed']}\n{'skipped':>10} {count['skipped']}")
    for reason, times in reasons.most_common():
        print(f"{times:>15} {reason}")
    print(*broken, f"{seconds:.0f} s", sep="\n")
    if whole:
        told = ", ".join(f"{count[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        trials.tell({f"The suite on a GPU, {processes} processes": told}, seconds)
    return int(bool(count["failed"] or broken or not count["passed"]))


if __name__ == "__main__":
    raise SystemExit(main())
