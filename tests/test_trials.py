"""A trial that was cut off says so, and what a sanitizer finds, or does not get to, is told."""

import json
import os
import sys

import pytest

import sanitize
import trials

#: Takes cases as what runs under the sanitizer does, and does with some of them what it may do.
SANITIZER = f"""#!{sys.executable}
import os, sys, time
tool, arguments = sys.argv[2], sys.argv[sys.argv.index({sanitize.__file__!r}) + 1 :]
if arguments[0] == "--plant":
    print("========= ERROR SUMMARY: %d errors" % (tool != "initcheck"))
    sys.exit()
for i in range(len(CASES)):
    try:
        os.close(os.open(f"{{arguments[2]}}/{{i}}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        continue
    print("{sanitize.BEGUN}" + CASES[i], flush=True)
    if tool == "memcheck" and i == 1:
        print("========= Invalid __global__ read of size 4 bytes\\n========= \\n=========     Host Frame: main")
        sys.exit("a launch failed")
    if tool == "racecheck" and i == 2:
        time.sleep(60)
    print("{sanitize.DONE}", flush=True)
    if tool == "initcheck" and i == 4:
        print("========= Uninitialized __global__ memory read of size 4 bytes", flush=True)
    if tool == "synccheck" and i == 0:
        print("========= Barrier error detected", flush=True)
print("========= ERROR SUMMARY: 0 errors")
"""


@pytest.fixture
def told_of(tmp_path, monkeypatch):
    """A folder for logs, and a function that says what one of them comes to."""
    monkeypatch.setattr(trials, "LOGS", tmp_path)
    monkeypatch.setattr(trials, "TABLE", tmp_path / "trials.csv")

    def say(*names):
        (trial,) = trials.put_together([tmp_path / f"{name}.jsonl" for name in names]).values()
        return trials.sentence(trial)

    return say


def test_what_the_sanitizer_finds_or_does_not_get_to_is_told(tmp_path, monkeypatch, told_of, capfd):
    names = [f"case {i}" for i in range(6)]
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(SANITIZER.replace("CASES", repr(names)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "cases", lambda words: (names[:4], names[4:]))
    tools = ["memcheck", "synccheck", "initcheck"]
    assert sanitize.main([*tools, "--processes", "4"]) == 1
    assert sanitize.main(["racecheck", "--processes", "1", "--seconds", "3"]) == 1
    told = {tool: told_of(f"sanitize_{tool}") for tool in [*tools, "racecheck"]}
    # The case that a launch failed in is a finding, and another process goes on behind it.
    assert told["memcheck"] == "6 cases: 5 clean, 1 with findings (case 1); the planted store behind the end is found"
    assert told["synccheck"].startswith("6 cases: 5 clean, 1 with findings (case 0); ")
    missed = "the planted load of what nobody wrote is missed"
    assert told["initcheck"] == f"6 cases: 5 clean, 1 with findings (case 4); {missed}"
    assert told["racecheck"].startswith("did not end: ") and "clean" not in told["racecheck"]
    said = capfd.readouterr().out
    assert "memcheck: case 1: Invalid __global__ read" in said and "a launch failed" in said
    assert "initcheck: the planted load of what nobody wrote is missed" in said
    assert "initcheck: case 4: Uninitialized __global__ memory read" in said
    assert "cases were not begun" in said


def test_parts_of_a_trial_are_put_together_where_the_library_was_the_same(tmp_path, told_of, monkeypatch):
    for part, commit, cases in (("1", "a", {"x": "same"}), ("2", "a", {"y": "differs"}), ("3", "b", {"y": "same"})):
        monkeypatch.setenv("FUSEBOOK_COMMIT", commit)
        log = trials.Log.begin("Stress", 2, part, unit="calls")
        for case, outcome in cases.items():
            log.came(case, outcome, n=100)
    assert told_of("1", "2") == "2 cases: 200 calls, 1 same, 1 differs (y)"
    assert told_of("1", "2", "3") == "did not end: 1 of 2 cases ran: 100 calls"
    assert told_of("2") == "did not end: 1 of 2 cases ran: 100 calls, 1 differs (y)"
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write(json.dumps({"case": "z", "outcome": "differs"})[:-5])  # cut off while it was written
    trials.tell([tmp_path / "1.jsonl"])
    assert trials.TABLE.read_text().splitlines()[1].startswith("Stress,did not end: 1 of 2 cases ran: 100 calls,")


def test_parts_with_cases_of_their_own_are_a_whole_when_each_has_ended(told_of):
    for part, cases in (("1", "xy"), ("2", "z")):
        log = trials.Log.begin("Tests", None, part)
        for case in cases:
            log.came(case, "passed")
        if part == "1":
            log.say(planned=2)
    assert told_of("1") == "2 cases: 2 passed"
    assert told_of("1", "2") == "did not end: 3 cases ran"
    log.say(planned=1)
    assert told_of("1", "2") == "3 cases: 3 passed"


def test_a_folder_without_logs_and_a_log_without_a_line_change_nothing(tmp_path, told_of):
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit, match=r"trials: no logs in .*none; the table is as it was"):
        trials.main([tmp_path / "none"])
    assert not trials.TABLE.exists()
    (tmp_path / "0.jsonl").write_text('{"trial": "Te')
    trials.Log.begin("Tests", 1, "1").came("x", "passed")
    trials.main([tmp_path])
    _, *rows = trials.TABLE.read_text().splitlines()
    assert [row.split(",")[:2] for row in rows] == [["Tests", "1 cases: 1 passed"]]


def test_what_did_not_go_well_is_named(told_of):
    log = trials.Log.begin("Tests", 7, "1")
    for i in range(6):
        log.came(f"tests/test_a.py::test_b[{i}]", "failed")
    log.came("tests/test_a.py::test_c", "passed")
    first = "; ".join(f"test_b[{i}]" for i in range(4))
    assert told_of("1") == f"7 cases: 6 failed ({first}; 2 more), 1 passed"
