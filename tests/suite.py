"""The suite as a trial: first what takes times, alone, then what shares a GPU, in many processes: ``nox -s gpu``.

Ends in a table of what passed, failed, and was skipped for which reason. Other arguments go to pytest: ``nox -s
versions`` and ``nox -s fuzz`` run parts of the suite so, as trials of other names.
"""

import argparse
import collections
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import trials

TESTS = trials.ROOT / "tests"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python tests/suite.py", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=min(15, os.cpu_count() or 1), help="of those that share")
    parser.add_argument("--seconds", type=float, default=1800, help="after which what is not done is cut off")
    parser.add_argument("--trial", default="The suite on a GPU", help="what the table of all trials calls it")
    parser.add_argument("--file", default="suite", help="and the log")
    parser.add_argument("--unit", default="cases", help="what tests count that try more than one thing")
    args, others = parser.parse_known_args(argv)
    # torch.compile would start as many processes in each of them.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment |= all_gpus()
    whole = not others
    others = [word for word in others if word != "--"]
    # Only the files of what runs alone: to collect all the others takes longer than those tests.
    timed = [str(file) for file in sorted(TESTS.glob("test_*.py")) if "mark.alone" in file.read_text()]
    together = ["-n", str(args.processes), "--dist", "worksteal", "-m", "not alone"]
    log = trials.Log.begin(args.trial, None, args.file, args.unit)
    start, broken = time.monotonic(), []
    for options in (["-m", "alone", *(timed if whole else ())], together):
        command = [sys.executable, "-m", "pytest", "-q", f"--told={log.path}", *options, *others]
        process = subprocess.Popen(command, env=environment, cwd=trials.ROOT, start_new_session=True)
        try:
            code = process.wait(max(1.0, args.seconds - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = "no time left"
        if code not in (0, 1, 5):  # neither passed nor failed nor without tests
            broken.append(f"pytest {' '.join(options[:2])} ended with {code}")
        print(f"after {time.monotonic() - start:.0f} s", flush=True)
    lines = trials.read(log.path)
    selected = [line["selected"] for line in lines if "selected" in line]
    log.say(planned=sum(selected) if len(selected) == 2 else None)
    for text in broken:
        log.say(note=text)
    failed = table([line for line in lines if "case" in line], broken)
    if whole or args.file != "suite":
        trials.tell([log.path])
    return failed


def all_gpus():
    """The GPUs by name, where there are several and nobody has chosen: workers then begin with different ones."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return {}
    import torch

    many = torch.cuda.device_count()
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(many)))} if many > 1 else {}


def table(reports, broken):
    """Print the table; returns the exit code."""
    became, reasons, slow = {}, collections.Counter(), collections.Counter()
    for report in reports:
        became[report["case"]] = report["outcome"]
        slow[report["case"]] += report["took"]
        if report["outcome"] == "skipped":
            reasons[report["why"]] += 1
        elif report["outcome"] == "failed":
            print(f"FAILED {report['case']}\n{report['why'][-1500:]}")
    count = collections.Counter(became.values())
    print("\nslowest: " + ", ".join(f"{Path(test).name} {s:.0f} s" for test, s in slow.most_common(10)))
    print(f"\n{'passed':>10} {count['passed']}\n{'failed':>10} {count['failed']}\n{'skipped':>10} {count['skipped']}")
    for reason, times in reasons.most_common():
        print(f"{times:>15} {reason}")
    print(*broken, sep="\n")
    return int(bool(count["failed"] or broken or not count["passed"]))


if __name__ == "__main__":
    raise SystemExit(main())
