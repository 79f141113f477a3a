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
    if tool == "synccheck" and i == 0:
        print("========= Barrier error detected", flush=True)
print("========= ERROR SUMMARY: 0 errors")
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "LOGS", tmp_path)
    monkeypatch.setattr(trials, "TABLE", tmp_path / "trials.csv")

    def read():
        lines = (tmp_path / "trials.csv").read_text().splitlines()
        return {line.split(",")[1].strip(' "'): line for line in lines}

    return read


def test_what_the_sanitizer_finds_or_does_not_get_to_is_told(tmp_path, monkeypatch, table, capfd):
    names = [f"case {i}" for i in range(6)]
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(SANITIZER.replace("CASES", repr(names)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "cases", lambda words: (names[:4], names[4:]))
    assert sanitize.main(["--processes", "8", "--seconds", "4"]) == 1
    told = table()
    # The case that a launch failed in is a finding, and another process goes on behind it.
    assert "6 cases: 5 clean, 1 with findings; the planted store behind the end is found" in told["memcheck"]
    assert "did not end: 5 of 6 cases ran; the planted race" in told["racecheck"] and "clean" not in told["racecheck"]
    assert "6 cases: 5 clean, 1 with findings" in told["synccheck"]
    assert "6 cases: 6 clean; the planted load of what nobody wrote is missed" in told["initcheck"]
    said = capfd.readouterr().out
    assert "memcheck: case 1: Invalid __global__ read" in said and "a launch failed" in said


def test_parts_of_a_trial_are_put_together_where_the_library_was_the_same(tmp_path, table, monkeypatch):
    for part, commit, cases in (("1", "a", {"x": "same"}), ("2", "a", {"y": "differs"}), ("3", "b", {"y": "same"})):
        monkeypatch.setenv("FUSEBOOK_COMMIT", commit)
        log = trials.Log("Stress", 2, part, unit="calls")
        for case, outcome in cases.items():
            log.came(case, outcome, n=100)
    files = [tmp_path / f"{part}.jsonl" for part in "123"]
    assert trials.sentence(trials.put_together(files[:2])["Stress"]) == "2 cases: 200 calls, 1 same, 1 differs"
    assert trials.sentence(trials.put_together(files)["Stress"]) == "did not end: 1 of 2 cases ran: 100 calls"
    assert trials.sentence(trials.put_together(files[1:2])["Stress"]).endswith("1 of 2 cases ran: 100 calls, 1 differs")
    with files[0].open("a") as file:
        file.write(json.dumps({"case": "z", "outcome": "differs"})[:-5])  # cut off while it was written
    trials.tell(files[:1])
    assert trials.TABLE.read_text().splitlines()[1].startswith("Stress,did not end: 1 of 2 cases ran: 100 calls")
