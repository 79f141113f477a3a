"""Records: whole or not there, and refused by name and row when they are not what was recorded."""

import dataclasses
import json
import os
import threading

import pandas as pd
import pytest

from fusebook import bench, record
from fusebook import machine as machines
from toy import machine, toy


@pytest.fixture
def frame():
    found = bench.run(toy(), config="small", repeat=3, warmup=1, progress=False, extra={"wrong": lambda x: 3 * x})
    found.attrs.update(machine=machine(), measured=True)
    return found


@pytest.fixture
def file(frame, tmp_path):
    return record.write(frame, tmp_path)


def test_what_was_written_is_read(frame, file, tmp_path):
    again = record.read("toy", "test-gpu", tmp_path)
    assert list(again.columns) == list(frame.columns)
    assert list(again["status"]) == ["ok", "wrong"] * 2
    assert again.attrs["measured"] is False and again.attrs["machine"] == machine(recorded=True)
    for column in ("M", "call_us", "score", "read_bytes", "cold_us"):
        pd.testing.assert_series_equal(again[column], frame[column], rtol=1e-5, check_dtype=False)
    assert again["note"].iloc[1] == frame["note"].iloc[1]


def test_writing_again_replaces_the_same_points_and_keeps_the_others(frame, file, tmp_path):
    frame.loc[:, "call_us"] = 12345.0
    record.write(frame[frame["N"] == 16].copy(), tmp_path)
    again = record.read("toy", "test-gpu", tmp_path)
    assert len(again) == 4
    assert (again[again["N"] == 16]["call_us"] == 12345).all()
    assert (again[again["N"] == 64]["call_us"] != 12345).all()


def test_a_record_that_was_taken_before_there_was_a_clock_is_read_without_it(frame, tmp_path):
    later = [c for c in frame if c.startswith("host_us")]
    file = record.path("test-gpu", "toy", tmp_path)
    record._save(file, "record", "toy", frame.drop(columns=later), " | commit=x")
    machines.save(machine(), file.parent / "machine.json")
    again = record.read("toy", "test-gpu", tmp_path)
    assert len(later) == 3 and list(again.columns) == list(frame.columns)
    assert again[later].isna().all().all() and (again["call_us"] > 0).any()
    frame.loc[:, "host_us"] = 7.0
    record.write(frame[frame["N"] == 16].copy(), tmp_path)
    assert list(record.read("toy", "test-gpu", tmp_path)["host_us"].isna()) == [True, True, False, False]


def damage(file, what):
    lines = file.read_text().splitlines(keepends=True)
    fields = lines[2].split(",")
    column = lines[1].split(",").index("call_us")
    match what:
        case "truncated at a row":
            lines = lines[:-1]
        case "truncated in a row":
            lines[-1] = lines[-1][:40]
        case "edited":
            fields[column] = "1"
            lines[2] = ",".join(fields)
        case "not a number":
            fields[column] = "fast"
            lines[2] = ",".join(fields)
        case "foreign":
            lines = ["a,b\n", "1,2\n"]
        case "another op":
            lines[0] = lines[0].replace("name=toy", "name=other")
        case "newer format":
            lines[0] = lines[0].replace("record 1", "record 9")
        case "unknown status":
            lines[2] = lines[2].replace(",ok,", ",great,")
        case "empty":
            lines = []
        case "binary":
            file.write_bytes(b"\xff\xfe\x00\x80")
            return
    file.write_text("".join(lines))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("truncated at a row", "ends after row 3 of 4"),
        ("truncated in a row", "row 4 has"),
        ("edited", "instead of editing"),
        ("not a number", "row 1 has call_us = 'fast'"),
        ("foreign", "first line is 'a,b'"),
        ("another op", "a record of 'other'"),
        ("newer format", "format 9"),
        ("unknown status", "row 1 has status 'great'"),
        ("empty", "first line is ''"),
        ("binary", "not text"),
    ],
)
def test_a_damaged_record_is_refused_by_name_and_row(file, tmp_path, what, words):
    damage(file, what)
    with pytest.raises(record.RecordError) as error:
        record.read("toy", "test-gpu", tmp_path)
    assert str(file) in str(error.value) and words in str(error.value)


def test_a_record_without_its_machine_is_refused(file, tmp_path):
    (file.parent / "machine.json").unlink()
    with pytest.raises(record.RecordError, match="machine.json"):
        record.read("toy", "test-gpu", tmp_path)
    (file.parent / "machine.json").write_text("{}")
    with pytest.raises(record.RecordError, match="not a machine.json"):
        record.read("toy", "test-gpu", tmp_path)


def test_a_record_that_is_missing_is_named(tmp_path):
    with pytest.raises(record.RecordError, match="no such record"):
        record.read("toy", "test-gpu", tmp_path)


def test_only_what_was_measured_on_a_gpu_is_recorded(frame, tmp_path):
    frame.attrs["measured"] = False
    with pytest.raises(record.RecordError, match="only what was measured"):
        record.write(frame, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_record(file, tmp_path, frame, monkeypatch):
    before = file.read_text()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="disk full"):
        record._save(file, "record", "toy", frame)
    monkeypatch.undo()
    assert file.read_text() == before
    assert sorted(p.name for p in file.parent.iterdir()) == ["machine.json", "toy.csv"]


def test_readers_never_see_half_a_record(file, tmp_path, frame):
    stop = threading.Event()
    failures = []

    def reads():
        while not stop.is_set():
            try:
                record.read("toy", "test-gpu", tmp_path)
            except record.RecordError as error:
                failures.append(error)

    reader = threading.Thread(target=reads)
    reader.start()
    for _ in range(10):
        record.write(frame, tmp_path)
    stop.set()
    reader.join()
    assert not failures


def test_a_page_is_written_and_read(tmp_path):
    rows = pd.DataFrame({"what": ["a", "b"], "seconds": [1.5, None]})
    file = record.write_page("transfers", rows, tmp_path, machine(), source="abc")
    again = record.read_page("transfers", "test-gpu", tmp_path)
    assert list(again["what"]) == ["a", "b"] and again["seconds"].iloc[0] == 1.5 and pd.isna(again["seconds"].iloc[1])
    assert again.attrs["source"] == "abc" and again.attrs["date"] and again.attrs["machine"].name == "Test GPU"
    file.write_text(file.read_text().replace("1.5", "0.5"))
    with pytest.raises(record.RecordError, match="instead of editing"):
        record.read_page("transfers", "test-gpu", tmp_path)
    with pytest.raises(record.RecordError, match="lower-case"):
        record.write_page("../up", rows, tmp_path, machine())
    with pytest.raises(record.RecordError, match="no rows"):
        record.write_page("none", rows[:0], tmp_path, machine())


def test_the_records_of_the_package_can_be_read():
    files = [f for f in machines.RECORDS.glob("*/*.csv")]
    for file in files:
        frame = record.read(file.stem, file.parent.name)
        assert len(frame) and frame.attrs["machine"].recorded
    for file in machines.RECORDS.glob("*/pages/*.csv"):
        assert len(record.read_page(file.stem, file.parent.parent.name))
    assert files or not machines.slugs()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["no_such_op"], "no_such_op"),
        (["softmax", "--config", "enormous"], "enormous"),
        (["softmax", "--dtype", "int8"], "int8"),
        (["softmax", "--repeat", "0"], "--repeat"),
        ([], "nothing to record"),
    ],
)
def test_nonsense_on_the_command_line_exits_with_2_and_the_choices(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        record.main(argv)
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_without_a_gpu_the_command_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert record.main(["--machine"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("given", "config"), [([], "small,large,long"), (["--config", "8"], "8")])
def test_the_command_line_records_the_configs_of_the_card(given, config, frame, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(record, "OPS", {"toy": toy()})
    monkeypatch.setattr(machines, "here", lambda fresh: machine())
    monkeypatch.setattr(bench, "run", lambda op, config, **_: ran.append(config) or frame)
    assert record.main(["toy", *given, "--out", str(tmp_path)]) == 0
    assert ran == [config]


def test_a_machine_survives_json(tmp_path):
    machines.save(machine(), tmp_path / "m.json")
    assert machines.load(tmp_path / "m.json") == machine()
    values = json.loads((tmp_path / "m.json").read_text())
    assert set(values) == {f.name for f in dataclasses.fields(machines.Machine)} - {"recorded"}


def test_an_unknown_machine_is_named():
    with pytest.raises(FileNotFoundError, match="recorded are"):
        machines.recorded("no-such-gpu")


def test_the_roof_is_the_larger_of_traffic_and_arithmetic():
    from fusebook.op import Cost

    m = machine()
    assert m.roof(Cost(10**9, 10**9, 0), "float32") == pytest.approx(2e9 / m.copy)
    assert m.roof(Cost(3 * 10**9, 10**9, 0), "float32") == pytest.approx(2e9 / m.copy + 2e9 / m.read)
    assert m.roof(Cost(10**9, 3 * 10**9, 0), "float32") == pytest.approx(2e9 / m.copy + 2e9 / m.fill)
    assert m.roof(Cost(1, 1, 10**15), "float32") == pytest.approx(1e15 / 5e13)
    assert m.zone(Cost(10**3, 10**3, 0), "float32") == "launch"
    assert m.zone(Cost(5 * 10**7, 5 * 10**7, 0), "float32") == "L2"
    assert m.zone(Cost(10**9, 10**9, 0), "float32") == "memory"
    assert m.zone(Cost(10**9, 10**9, 10**15), "float32") == "compute"


def test_the_floor_is_interpolated_between_grids():
    m = machine()
    assert m.floor() == 3e-6 and m.floor(1024) == pytest.approx(4e-6)
    assert 3e-6 < m.floor(500) < 4e-6 < m.floor(10_000) < 4e-5 < m.floor(100_000)
    assert m.floor(kind="warm") == 1e-6


def test_no_part_files_are_left(file):
    assert not [p for p in file.parent.iterdir() if p.name.endswith(".part")]
    assert os.listdir(file.parent)
