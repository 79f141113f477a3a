"""What the long trials of the library came to when they were last run: a table that the documentation shows.

A trial writes a line into a file of ``build/trials`` as each of its cases ends, and its last when all have: one that
was cut off is told as that, whatever it had found until then.

    python tests/trials.py              # the table, anew for the trials that build/trials holds
    python tests/trials.py FOLDER ...   # the same for what was run elsewhere; parts of a trial are put together
"""

import collections
import contextlib
import csv
import datetime
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

LOGS = ROOT / "build" / "trials"
TABLE = ROOT / "docs" / "trials.csv"
HEAD = ["Trial", "What it came to", "Seconds", "Machine", "Commit", "Date"]
#: What a case may come to that is well; all else is told wherever it occurs.
WELL = {"passed", "skipped", "clean", "same", "dies", "lives, and why is known"}
#: Of all else so many cases are named.
NAMED = 4


class Log:
    """The file of a trial; planned is how many cases it has, or None where that is not known yet."""

    def __init__(self, path):
        self.start = time.monotonic()
        self.path = path

    @classmethod
    def begin(cls, trial, planned, file, unit="cases"):
        """A new file in the place of the last one."""
        from fusebook.measure.machine import _commit

        LOGS.mkdir(parents=True, exist_ok=True)
        log = cls(LOGS / f"{file}.jsonl")
        log.path.unlink(missing_ok=True)
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        log._write(trial=trial, planned=planned, unit=unit, machine=machine(), commit=_commit(), date=day)
        return log

    def _write(self, **line):
        with self.path.open("a") as file:
            file.write(json.dumps(line | {"seconds": round(time.monotonic() - self.start, 1)}) + "\n")

    def came(self, case, outcome, **more):
        """A case came to something; of one that is told twice the later counts."""
        self._write(case=case, outcome=outcome, **more)

    def say(self, **more):
        """What else is to be told: a sentence (``note``), or how many cases there are (``planned``)."""
        self._write(**more)


def machine():
    """The GPU, or the CPU where there is none, with the versions that decide."""
    import torch

    from fusebook.measure.machine import _cpu, versions

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu()
    return ", ".join([where, *(f"{name} {version}" for name, version in versions("torch", "triton").items())])


def read(path):
    """The lines of a log, but for one that was cut off while it was written."""
    lines = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def put_together(files):
    """Trials by name, each the newest of its logs with the parts of the same commit and machine."""
    trials = {}
    for file in files:
        lines = read(file)
        if not lines:  # cut off before its first line
            continue
        head = lines[0]
        known = trials.get(head["trial"])
        if known and (known["commit"], known["machine"]) != (head["commit"], head["machine"]):
            known = None
        known = known or head | {"cases": {}, "notes": {}, "seconds": 0, "parts": []}
        if head["planned"] is None:  # each part has cases of its own, and says how many when it ends
            known["parts"].append(next((line["planned"] for line in lines[1:] if "planned" in line), None))
            known["planned"] = None if None in known["parts"] else sum(known["parts"])
        for line in lines[1:]:
            if "case" in line:
                known["cases"][line["case"]] = line
            if "note" in line:
                known["notes"][line["note"]] = None
        known["seconds"] += max(line["seconds"] for line in lines)
        trials[head["trial"]] = known
    return trials


def sentence(trial):
    """What a trial came to; of one that did not end, how far it came and what was wrong until then."""
    count = collections.Counter(case["outcome"] for case in trial["cases"].values())
    whole = len(trial["cases"]) >= (trial["planned"] or float("inf"))
    told = [
        f"{n} {outcome}{'' if outcome in WELL else named(trial, outcome)}"
        for outcome, n in count.most_common()
        if whole or outcome not in WELL
    ]
    if trial["unit"] != "cases":
        told.insert(0, f"{sum(case.get('n', 0) for case in trial['cases'].values())} {trial['unit']}")
    planned = f"of {trial['planned']} " if trial["planned"] else ""
    ran = f"{len(trial['cases'])} {planned}cases ran"
    start = f"{trial['planned']} cases" if whole else f"did not end: {ran}"
    return "; ".join([": ".join(filter(None, [start, ", ".join(told)])), *trial["notes"]])


def named(trial, outcome):
    """Which cases came to this, in brackets; a test without the file that it stands in."""
    names = [name.rpartition("::")[2] for name, case in trial["cases"].items() if case["outcome"] == outcome]
    more = [f"{len(names) - NAMED} more"] * (len(names) > NAMED)
    return f" ({'; '.join([*names[:NAMED], *more])})"


def tell(files):
    """Put what trials came to in the place of what they came to before; the others stay."""
    rows = {}
    if TABLE.exists():
        with TABLE.open(newline="") as file:
            rows = {row[0]: row for row in list(csv.reader(file))[1:]}
    for name, trial in put_together(files).items():
        where = [trial[name] for name in ("machine", "commit", "date")]
        rows[name] = [name, sentence(trial), f"{trial['seconds']:.0f}", *where]
        print(f"{name}: {rows[name][1]} ({rows[name][2]} s)")
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEAD, *(rows[name] for name in sorted(rows))])


def main(folders):
    found = {folder: sorted(Path(folder).glob("*.jsonl")) for folder in folders or [LOGS]}
    if none := [str(folder) for folder, files in found.items() if not files]:
        raise SystemExit(f"trials: no logs in {', '.join(none)}; the table is as it was")
    tell([file for files in found.values() for file in files])


if __name__ == "__main__":
    main(sys.argv[1:])
