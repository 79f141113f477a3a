"""The comparison of two commits, by a clock that is a stub."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ab

ROOT = Path(__file__).resolve().parents[1]


class Stub:
    """A side whose operators take this long; what it is asked goes into a log."""

    def __init__(self, side, log, times, refuses=()):
        self.side, self.log, self.times, self.refuses = side, log, times, refuses

    def send(self, ready):
        self.name, self.dims = ready

    def answer(self):
        if self.dims in self.refuses:
            raise ab.Refused("NotImplementedError: too small")

    def ask(self, time):
        self.log.append(self.side)
        return self.times[self.name] + self.log.count(self.side) % 2


def sides(**more):
    log = []
    times = {"base": {"a": 10, "b": 20}, "new": {"a": 12, "b": 18}, "again": {"a": 10, "b": 21}}
    return log, {side: Stub(side, log, times[side], **more) for side in ab.SIDES}


def test_a_problem_is_timed_there_and_back(capsys):
    log, workers = sides(refuses=[{"N": 2}])
    rows = list(ab.compared(workers, {"a": [{"N": 1}, {"N": 2}], "b": [{"N": 3}]}, until=1, now=lambda: 0))
    assert log[:6] == ["base", "new", "again", "again", "new", "base"] and len(log) == 12
    assert [(row["op"], row["problem"]) for row in rows] == [("a", '{"N": 1}'), ("b", '{"N": 3}')]
    assert [row["ratio"] for row in rows] == pytest.approx([12.5 / 10.5, 18.5 / 20.5])
    assert [row["noise"] for row in rows] == pytest.approx([1.0, 21.5 / 20.5])
    assert 'a {"N": 2}: left out, base: NotImplementedError: too small' in capsys.readouterr().out


def test_it_ends_when_the_time_is_over():
    _, workers = sides()
    clock = iter(range(100))
    rows = list(ab.compared(workers, {"a": [{"N": n} for n in range(9)]}, until=3, now=lambda: next(clock)))
    assert len(rows) == 3


def test_the_table_has_the_median_the_ninety_percent_point_the_worst_and_the_noise():
    rows = [{"op": "a", "ratio": 1 + i / 10, "noise": 1 - i / 100, "problem": json.dumps({"N": i})} for i in range(11)]
    head, line = ab.summed(rows)
    assert line.split() == ["a", "11", "1.500", "1.900", "2.000", "0.090", '{"N":', "10}"]
    assert head.split()[:6] == ["operator", "problems", "median", "90", "%", "worst"]


def test_a_commit_that_is_none_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="neither a folder with src/fusebook nor a commit"):
        ab.checkout("no-such-commit", tmp_path)


@pytest.mark.slow_interpreted
def test_two_folders_are_compared_whole(tmp_path):
    out = tmp_path / "ab.csv"
    problem = {"M": 3, "N": 5, "dtype": "float32", "layout": "contiguous"}
    (tmp_path / "problems.json").write_text(json.dumps({"double": [problem], "exp": [problem | {"K": 2}]}))
    words = ["--problems", str(tmp_path / "problems.json"), "--out", str(out)]
    command = [sys.executable, str(ROOT / "tests" / "ab.py"), str(ROOT), str(ROOT), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 of 2 problems were timed" in done.stdout and "exp" in done.stdout.splitlines()[0]
    (row,) = csv.DictReader(out.read_text().splitlines())
    assert row["op"] == "double" and json.loads(row["problem"]) == problem and float(row["ratio"]) > 0
