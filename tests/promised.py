"""The tests that the table of promises in docs/method.rst names, and which of them a run has not tried."""

import collections
import re
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "docs" / "method.rst"


def named():
    """For each promise, its tests as pairs of file and function."""
    text = TABLE.read_text(encoding="utf-8")
    promises = text[text.index("What is promised") : text.index("How the library is tried")].split("   * - ")[2:]
    for promise in promises:
        _, *parts = re.split(r"``(test_\w+)``:", " ".join(promise.split("\n     - ")[2].split()))
        yield [
            (f"{file}.py", f"test_{words.replace(' ', '_')}")
            for file, said in zip(parts[::2], parts[1::2], strict=True)
            for words in said.strip(" .").split("; ")
        ]


class Outcomes:
    """What became of each test function in a run."""

    def __init__(self):
        self.passed, self.reasons = set(), collections.defaultdict(set)

    def add(self, report):
        """Note the report of one case."""
        path, _, function = report.nodeid.partition("::")
        test = Path(path).name, function.partition("[")[0]
        if report.when == "call" and report.passed:
            self.passed.add(test)
        elif report.skipped:
            self.reasons[test].add(str(report.longrepr[2]))

    def untried(self):
        """The promised tests of which no case passed, except those that all need a GPU."""
        for test in (test for promise in named() for test in promise):
            reasons = self.reasons[test]
            absent = bool(reasons) and all(re.search("CUDA|GPU", reason) for reason in reasons)
            if test not in self.passed and not absent:
                yield f"{test[0]}::{test[1]}: {'; '.join(sorted(reasons)) or 'not run'}"
