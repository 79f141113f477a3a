"""The whole suite on a GPU: first what takes times, alone, then what shares it, in many processes: ``nox -s gpu``.

Ends in a table of what passed, failed, and was skipped for which reason. Other arguments go to pytest.
"""

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import trials

TESTS = trials.ROOT / "tests"
TOLD = trials.ROOT / "build" / "gpu.jsonl"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python tests/gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=min(15, os.cpu_count() or 1), help="of those that share")
    parser.add_argument("--seconds", type=float, default=1800, help="after which what is not done is cut off")
    args, others = parser.parse_known_args(argv)
    TOLD.parent.mkdir(exist_ok=True)
    TOLD.write_text("")
    # torch.compile would start as many processes in each of them.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # Only the files of what runs alone: to collect all the others takes longer than those tests.
    timed = [str(file) for file in sorted(TESTS.glob("test_*.py")) if "mark.alone" in file.read_text()]
    together = ["-n", str(args.processes), "--dist", "worksteal", "-m", "not alone"]
    log = None if others else trials.Log("The suite on a GPU", 0, "suite")
    start, broken = time.monotonic(), []
    for options in (["-m", "alone", *(() if others else timed)], together):
        command = [sys.executable, "-m", "pytest", "-q", f"--told={TOLD}", *options, *others]
        process = subprocess.Popen(command, env=environment, cwd=trials.ROOT, start_new_session=True)
        try:
            code = process.wait(max(1.0, args.seconds - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = "no time left"
        if code not in (0, 1, 5):  # neither passed nor failed nor without tests
            broken.append(f"pytest {' '.join(options)} ended with {code}")
        print(f"after {time.monotonic() - start:.0f} s", flush=True)
    return table([json.loads(line) for line in TOLD.read_text().splitlines()], broken, log)


def table(lines, broken, log):
    """Print the table; returns the exit code."""
    became, reasons, slow = {}, collections.Counter(), collections.Counter()
    for report in (line for line in lines if "test" in line):
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
    print(*broken, sep="\n")
    if log:
        for test, outcome in became.items():
            log.came(test, outcome)
        planned = [line["planned"] for line in lines if "planned" in line]
        log.say(planned=sum(planned) if len(planned) == 2 else None)
        for text in broken:
            log.say(note=text)
        trials.tell([log.path])
    return int(bool(count["failed"] or broken or not count["passed"]))


if __name__ == "__main__":
    raise SystemExit(main())
