"""What the long trials of the library came to when they were last run: a table that the documentation shows."""

import csv
import datetime
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

TABLE = ROOT / "docs" / "trials.csv"
HEAD = ["Trial", "What it came to", "Seconds", "Machine", "Commit", "Date"]


def machine():
    """The GPU, or the CPU where there is none, with the versions that decide."""
    import torch

    from fusebook.machine import _cpu, versions

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu()
    return ", ".join([where, *(f"{name} {version}" for name, version in versions("torch", "triton").items())])


def tell(came, seconds):
    """Put what trials came to, a dict, in the place of what they came to before; the others stay."""
    from fusebook.machine import _commit

    rows = {}
    if TABLE.exists():
        with TABLE.open(newline="") as file:
            rows = {row[0]: row for row in list(csv.reader(file))[1:]}
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    for trial, what in came.items():
        rows[trial] = [trial, what, f"{seconds:.0f}", machine(), _commit(), day]
        print(f"{trial}: {what}")
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEAD, *(rows[trial] for trial in sorted(rows))])
