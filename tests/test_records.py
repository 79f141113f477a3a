"""Records: whole or not there, and refused by name and row when they are not what was recorded."""

import csv
import dataclasses
import hashlib
import io
import json
import math
import os
import pathlib
import re
import threading

import pandas as pd
import pytest

from fusebook import tables
from fusebook.measure import bench, record, sources, timing
from fusebook.measure import machine as machines
from fusebook.measure.bench import Origin
from toy import machine, toy, variant


@pytest.fixture
def frame(monkeypatch):
    monkeypatch.setattr(bench, "_refuse_a_clock_apart", lambda row: None)  # others may use the GPU meanwhile
    found = bench.run(toy(wrong=variant(lambda x: 3 * x)), config="small", repeat=3, warmup=1)
    found.attrs["origin"] = Origin(machine(), measured=True)
    return found


@pytest.fixture
def file(frame, tmp_path):
    return record.write(frame, tmp_path)


def test_what_was_written_is_read(frame, file, tmp_path):
    again = record.read("toy", "test-gpu", tmp_path)
    assert list(again.columns) == [c for c in frame if c != "config"] + ["stale", "stale_host"]
    assert list(again["status"]) == ["ok", "wrong"] * 2
    assert again.attrs["origin"].measured is False and again.attrs["origin"].machine == machine(recorded=True)
    for column in ("M", "latency_us", "error", "read_bytes", "gpu_us"):
        pd.testing.assert_series_equal(again[column], frame[column], rtol=1e-5, check_dtype=False)
    assert again["note"].iloc[1] == frame["note"].iloc[1]


def test_numbers_are_written_in_six_digits_but_for_counts_that_are_exact(frame, tmp_path):
    """A count beyond 2**53 is none: float64 does not tell it from its neighbours."""
    written = {2.0**53 - 1: "9007199254740991", 2.0**53: "9.0072e+15", -(2.0**60): "-1.15292e+18", 1e300: "1e+300"}
    written |= {0.1 + 0.2: "0.3", 1234567.25: "1.23457e+06", 3e9: "3000000000", -4.0: "-4"}
    values = list(written)
    rows = frame.iloc[[0] * len(values)].assign(N=range(len(values)), moved_bytes=values)
    rows.attrs.update(frame.attrs)
    with open(record.write(rows, tmp_path), newline="") as lines:
        next(lines)  # what the file says of itself
        assert [row["moved_bytes"] for row in csv.DictReader(lines)] == list(written.values())


def test_writing_again_replaces_the_same_points_and_keeps_the_others(frame, file, tmp_path):
    frame.loc[:, "latency_us"] = 12345.0
    record.write(frame[frame["N"] == 16].copy(), tmp_path)
    again = record.read("toy", "test-gpu", tmp_path)
    assert len(again) == 4
    assert (again[again["N"] == 16]["latency_us"] == 12345).all()
    assert (again[again["N"] == 64]["latency_us"] != 12345).all()
    assert list(again["N"]) == [16, 16, 64, 64], "in the order of sizes, whatever was written last"


#: How columns were called before they got their names for good.
OLD = {
    "error": "score", "tolerance": "limit", "gpu_us": "cold_us", "gpu_warm_us": "warm_us", "launch_us": "host_us",
    "latency_us": "call_us",
}  # fmt: skip


def of_before(frame, tmp_path, form=2, lacking=(), **more):
    """A record in the form of an earlier version."""
    named = {c: OLD[stem] + c.removeprefix(stem) for c in frame for stem in OLD if re.fullmatch(f"{stem}(_20|_80)?", c)}
    later = ("config", "host", "sm_mhz", "memory_mhz", "power_w", *lacking)
    body = frame.drop(columns=[c for c in later if c in frame])
    body = body.rename(columns=named).assign(launches="b" * 12, code="a" * 12, **more)
    file = record.path("toy", "test-gpu", tmp_path)
    record._save(file, "toy", body, commit="c6c266a")
    file.write_text(file.read_text().replace("record 3", f"record {form}"))
    machines.save(machine(), file.parent / "machine.json")
    return file


def test_a_record_of_earlier_names_is_read_by_todays(frame, tmp_path):
    of_before(frame, tmp_path)
    again = record.read(toy(wrong=variant(lambda x: x)), "test-gpu", tmp_path)
    assert list(again.columns) == [c for c in frame if c != "config"] + ["stale", "stale_host"]
    for column in ("latency_us", "latency_us_80", "error", "tolerance"):
        pd.testing.assert_series_equal(again[column], frame[column], rtol=1e-5, check_dtype=False)
    assert set(again["stale"]) == {"was measured before the code changed (at commit c6c266a)"}
    assert again.attrs["origin"].stale == ("toy was measured before the code changed (at commit c6c266a)",)
    assert set(again["versions"]) == set(frame["versions"]) and set(again["code"]) == {""}


def test_a_record_that_was_taken_before_there_was_a_clock_is_read_without_it(frame, tmp_path):
    later = [c for c in frame if c.startswith("launch_us")]
    of_before(frame, tmp_path, lacking=later)
    again = record.read("toy", "test-gpu", tmp_path)
    assert len(later) == 3 and again[later].isna().all().all() and (again["latency_us"] > 0).any()


def test_the_oldest_form_may_have_a_point_twice(frame, tmp_path):
    """It named the query of each row."""
    old = frame.assign(source="0" * 12, date="2026-01-01", config="small")
    again = old[old["N"] == 16].assign(config="16", date="2026-01-02", latency_us=5.0)
    file = of_before(pd.concat([again, old]).rename(columns={"config": "query"}), tmp_path, form=1)
    head, _, body = file.read_text().partition("\n")
    made = body.replace("query", "config", 1)
    file.write_text(head.replace(*(hashlib.sha256(text.encode()).hexdigest() for text in (body, made))) + "\n" + made)
    read = record.read(toy(), "test-gpu", tmp_path)
    assert len(read) == 4 and (read[read["N"] == 16]["latency_us"] == 5).all()


def test_rows_of_other_versions_do_not_go_into_a_file(frame, file, tmp_path):
    before = file.read_text()
    other = frame.assign(versions="torch 0.0.1")
    other.attrs["origin"] = frame.attrs["origin"]
    with pytest.raises(record.RecordError, match="torch .* and not 0.0.1.*record its page whole"):
        record.write(other, tmp_path)
    of_before(frame, tmp_path)
    with pytest.raises(record.RecordError, match="an older form of records"):
        record.write(frame, tmp_path)
    of_before(frame, tmp_path).write_text(before)


def test_times_of_the_host_are_added_to_the_row_of_the_same_code(frame, tmp_path):
    gpu = frame.assign(gpu_us=7.0, gpu_warm_us=6.0, launch_us=math.nan, latency_us=math.nan)
    host = frame.assign(gpu_us=math.nan, gpu_warm_us=math.nan, launch_us=3.0, latency_us=9.0, host="now")
    for part in (gpu, host):
        part.attrs["origin"] = frame.attrs["origin"]
        record.write(part, tmp_path)
    rows = record.read(toy(wrong=variant(lambda x: 3 * x)), "test-gpu", tmp_path)
    fine = rows[rows["status"] == "ok"]
    assert fine[["gpu_us", "gpu_warm_us", "launch_us", "latency_us"]].to_numpy().tolist() == [[7, 6, 3, 9]] * 2
    host.loc[:, "code"] = "another"
    record.write(host, tmp_path)
    rows = record.read("toy", "test-gpu", tmp_path)
    assert rows.loc[rows["status"] == "ok", "gpu_us"].isna().all()


def test_a_peer_that_is_not_here_is_not_called_stale(frame, tmp_path, monkeypatch):
    record.write(frame[frame["variant"] == "honest"].assign(versions="torch 2; peer 0.6.5"), tmp_path)
    monkeypatch.setattr(bench, "software", lambda of=None: {"peer": ""})
    monkeypatch.setattr(bench, "missing", lambda of: "needs peer")
    assert record.read(toy(), "test-gpu", tmp_path).attrs["origin"].stale == ()


def test_an_implementation_that_changed_makes_its_rows_stale_and_a_peer_of_another_version(
    frame, tmp_path, monkeypatch
):
    record.write(frame[frame["variant"] == "honest"].assign(versions="torch 2; peer 0.6.5"), tmp_path)
    assert record.read(toy(), "test-gpu", tmp_path).attrs["origin"].stale == ()
    other = record.read(toy(honest=variant(lambda x: 2 * x)), "test-gpu", tmp_path)
    assert other.attrs["origin"].stale == ("toy was measured before the code changed (at commit 0123456789ab)",)
    monkeypatch.setattr(bench, "software", lambda of=None: {"torch": "9", "peer": "0.6.5"})
    assert record.read(toy(), "test-gpu", tmp_path).attrs["origin"].stale == ()
    monkeypatch.setattr(bench, "software", lambda of=None: {"torch": "9", "peer": "0.7"})
    stale = record.read(toy(), "test-gpu", tmp_path).attrs["origin"].stale
    assert stale == ("toy was recorded with peer 0.6.5, installed is 0.7",)


def test_another_call_path_makes_launch_times_stale_and_nothing_else(frame, tmp_path, monkeypatch):
    record.write(frame[frame["variant"] == "honest"].copy(), tmp_path)
    code, _ = sources.of_variant(toy(), "honest")
    monkeypatch.setattr(sources, "of_variant", lambda op, name: (frame["code"].iloc[0], "another"))
    rows = record.read(toy(), "test-gpu", tmp_path)
    assert set(rows["stale"]) == {""} and rows["stale_host"].ne("").all() and code
    (why,) = rows.attrs["origin"].stale
    assert why == "toy launch time measured at commit 0123456789ab, before the call path changed"


def test_another_version_of_the_clocks_makes_rows_stale(frame, tmp_path, monkeypatch):
    record.write(frame[frame["variant"] == "honest"].copy(), tmp_path)
    monkeypatch.setattr(timing, "VERSION", timing.VERSION + 1)
    (why,) = record.read(toy(), "test-gpu", tmp_path).attrs["origin"].stale
    assert why == "toy was timed before the clocks changed (at commit 0123456789ab)"


def test_rows_of_some_variants_may_be_stale_and_those_of_a_variant_that_is_gone_are(frame, tmp_path):
    record.write(frame, tmp_path)
    (why,) = record.read(toy(), "test-gpu", tmp_path).attrs["origin"].stale
    assert why == "toy (wrong) is not an implementation of its card any more"


def test_a_page_is_not_told_that_ways_which_it_leaves_out_are_stale(frame, tmp_path):
    record.write(frame, tmp_path)
    rows = record.read(toy(), "test-gpu", tmp_path)
    assert record.select(rows, toy(), "64").attrs["origin"].stale
    chosen = record.select(rows, toy(), "64", variants=["honest"])
    assert chosen.attrs["origin"].stale == () and set(chosen["variant"]) == {"honest"}


def test_what_was_absent_is_not_recorded(frame, tmp_path):
    frame.loc[frame["variant"] == "wrong", "status"] = "absent"
    record.write(frame, tmp_path)
    assert set(record.read("toy", "test-gpu", tmp_path)["variant"]) == {"honest"}


def test_a_machine_that_is_there_keeps_its_ceilings(frame, file, tmp_path):
    frame.attrs["origin"] = Origin(machine(copy=1e12), measured=True)
    record.write(frame, tmp_path)
    assert record.read("toy", "test-gpu", tmp_path).attrs["origin"].machine.copy == machine().copy


def test_rows_are_in_the_order_of_their_dtypes_whenever_they_were_taken(frame, tmp_path):
    record.write(frame, tmp_path)
    half = frame.assign(dtype="float16")
    half.attrs["origin"] = frame.attrs["origin"]
    record.write(half, tmp_path)
    rows = record.read("toy", "test-gpu", tmp_path)
    assert list(rows["dtype"]) == sorted(rows["dtype"]) and len(rows) == 2 * len(frame)


def test_a_file_that_cannot_take_its_place_leaves_nothing(frame, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        record.write(frame, tmp_path)
    assert not [f for f in tmp_path.rglob("*") if f.is_file()]


def test_rows_are_selected_by_a_query_in_its_order(frame, file, tmp_path):
    rows = record.read(toy(), "test-gpu", tmp_path)
    found = record.select(rows, toy(), "64,16x16")
    assert list(found["config"]) == ["64", "64", "16x16", "16x16"] and list(found["N"]) == [64, 64, 16, 16]
    assert list(found.columns) == [*frame.columns, "stale", "stale_host"]
    with pytest.raises(record.Missing, match="toy for large in float32"):
        record.select(rows, toy(), "large")


def damage(file, what):
    lines = file.read_text().splitlines(keepends=True)
    fields = lines[2].split(",")
    column = lines[1].split(",").index("latency_us")
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
            lines[0] = lines[0].replace("record 3", "record 9")
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
        ("truncated in a row", "ends after row 3 of 4"),
        ("edited", "instead of editing"),
        ("not a number", "instead of editing"),
        ("foreign", "first line is 'a,b'"),
        ("another op", "a record of 'other'"),
        ("newer format", "format 9"),
        ("unknown status", "instead of editing"),
        ("empty", "first line is ''"),
        ("binary", "not text"),
    ],
)
def test_a_damaged_record_is_refused_by_name_and_row(file, tmp_path, what, words):
    damage(file, what)
    with pytest.raises(record.RecordError) as error:
        record.read("toy", "test-gpu", tmp_path)
    assert str(file) in str(error.value) and words in str(error.value)


def with_cell(body, column, value):
    """The rows with another value in the last one."""
    rows, made = list(csv.reader(body.splitlines())), io.StringIO()
    rows[-1][rows[0].index(column)] = value
    csv.writer(made, lineterminator="\n").writerows(rows)
    return made.getvalue()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.replace(",ok,", ",\x1b[2Jok,", 1), "control characters"),
        (lambda body: f'{body}"toy\n', "EOF inside string"),
        (lambda body: body.replace("variant", "name", 1), "no column variant"),
        (lambda body: "a,b\n1,2\n", "no column op"),
        (lambda body: re.sub(r"(?m),ok,([^,]*),[^,]*,", r",ok,\1,fast,", body), "Unable to parse string"),
        (lambda body: with_cell(body, "gpu_us", "-5"), "gpu_us of -5"),
        (lambda body: with_cell(body, "latency_us_80", "0"), "latency_us_80 of 0"),
        (lambda body: with_cell(body, "roof_us", "inf"), "roof_us of inf"),
        (lambda body: with_cell(body, "op", "softmax"), "rows of 'softmax'"),
        (lambda body: with_cell(body, "op", ""), "rows of ''"),
    ],
)
def test_rows_that_somebody_made_by_hand_are_refused_though_their_sum_fits(file, tmp_path, change, words):
    head, _, body = file.read_text().partition("\n")
    made = change(body)
    assert made != body
    sums = (hashlib.sha256(text.encode()).hexdigest() for text in (body, made))
    head = re.sub(r"rows=\d+", f"rows={made.count(chr(10)) - 1}", head).replace(*sums)
    file.write_text(f"{head}\n{made}")
    with pytest.raises(record.RecordError, match="not the rows of a record") as error:
        record.read("toy", "test-gpu", tmp_path)
    assert str(file) in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("gone", ["--join", "--restamp"])
def test_options_that_went_say_what_to_do_instead(gone, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        record.main([gone, str(tmp_path)])
    assert stop.value.code == 2 and "0.2.0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["FUSEBOOK_REPLAY", "FUSEBOOK_PART", "FUSEBOOK_TRITON"])
def test_variables_that_went_say_what_to_do_instead(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"{name} went with version 0.2.0"):
        machines.places()


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
    frame.attrs["origin"] = Origin(machine(), measured=False)
    with pytest.raises(record.RecordError, match="only what was measured"):
        record.write(frame, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_record(file, tmp_path, frame, monkeypatch):
    before = file.read_text()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="disk full"):
        record._save(file, "toy", frame)
    monkeypatch.undo()
    assert file.read_text() == before
    assert sorted(p.name for p in file.parent.iterdir()) == ["machine.json", "toy.csv"]


def test_readers_never_see_half_a_record(file, tmp_path, frame):
    stop = threading.Event()
    seen, failures = [], []

    def reads():
        while not stop.is_set():
            try:
                seen.append(len(record.read("toy", "test-gpu", tmp_path)))
            except record.RecordError as error:
                failures.append(error)

    reader = threading.Thread(target=reads)
    reader.start()
    written = 0
    while written < 10 or not (len(seen) >= 10 or failures):
        record.write(frame, tmp_path)
        written += 1
    stop.set()
    reader.join()
    assert not failures and set(seen) == {len(frame)}


def test_a_page_is_written_and_read(tmp_path):
    rows = pd.DataFrame({"what": ["a", "b"], "seconds": [1.5, None]})
    rows.attrs["origin"] = Origin(machine(), measured=True, date="2026-01-02", versions="torch 1", code="abc")
    file = record.write(rows, tmp_path, "pages/transfers")
    again = record.read("pages/transfers", "test-gpu", tmp_path)
    assert list(again["what"]) == ["a", "b"] and again["seconds"].iloc[0] == 1.5 and pd.isna(again["seconds"].iloc[1])
    origin = again.attrs["origin"]
    assert (origin.code, origin.date, origin.versions) == ("abc", "2026-01-02", "torch 1")
    assert origin.machine.name == "Test GPU" and not origin.measured
    file.write_text(file.read_text().replace("1.5", "0.5"))
    with pytest.raises(record.RecordError, match="instead of editing"):
        record.read("pages/transfers", "test-gpu", tmp_path)
    with pytest.raises(record.RecordError, match="pages/transfers"):
        record.write(rows, tmp_path, "../up")
    with pytest.raises(record.RecordError, match="no rows"):
        record.write(rows[:0], tmp_path, "pages/none")


def test_the_records_of_the_package_can_be_read():
    files = [f for f in machines.RECORDS.glob("*/*.csv")]
    for file in files:
        frame, more = record._load(file, file.stem)
        assert len(frame) and more["commit"] and not frame.duplicated(["variant", "dtype", *tables.dims(frame)]).any()
    for file in machines.RECORDS.glob("*/pages/*.csv"):
        assert len(record.read(f"pages/{file.stem}", file.parent.parent.name))
    assert files or not machines.slugs()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["no_such_op"], "no_such_op"),
        (["softmax", "--config", "enormous"], "enormous"),
        (["softmax", "--dtype", "int8"], "int8"),
        ([], "nothing to record"),
    ],
)
def test_nonsense_on_the_command_line_exits_with_2_and_the_choices(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        record.main(argv)
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FUSEBOOK_GPU", "nobody", "no records in "),
        ("FUSEBOOK_GPU", "../elsewhere", "expected the folder of a GPU"),
        ("FUSEBOOK_RECORDS", os.devnull, "expected a folder with the records of one GPU"),
    ],
)
def test_a_check_of_records_that_are_not_there_says_so(name, value, words, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert record.main(["--check"]) == 1 and words in capsys.readouterr().err


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


@pytest.mark.parametrize("why", ["no home", "no folder"])
def test_a_machine_that_keeps_nothing_is_one(why, tmp_path, monkeypatch):
    """A user without a home, as in some containers, and a cache that cannot be made."""

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    for name in ("FUSEBOOK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if why == "no home":
        monkeypatch.setattr(pathlib.Path, "home", nobody)
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("FUSEBOOK_CACHE", str(tmp_path / "file" / "below"))
    folder = machines.cache_folder()
    monkeypatch.setattr(machines, "_cache", lambda: folder / "gpu.json")
    monkeypatch.setattr(machines, "_measure", machine)
    monkeypatch.setattr(machines, "_MACHINES", {})
    assert machines._here(0, False) == machine() and not folder.exists()


def test_records_of_the_named_gpu_are_replayed_and_else_of_the_shipped_one(monkeypatch):
    for name in ("FUSEBOOK_GPU", "FUSEBOOK_RECORDS"):
        monkeypatch.delenv(name, raising=False)
    assert [place.name for place in machines.places()] == [machines.SHIPPED] and machines.SHIPPED in machines.slugs()
    monkeypatch.setenv("FUSEBOOK_GPU", "nvidia-h200")
    assert machines.places() == [machines.RECORDS / "nvidia-h200"]
    assert record.path("softmax").parent.name == machines.slug() == "nvidia-h200"


def test_an_unknown_machine_is_named():
    with pytest.raises(FileNotFoundError, match="recorded are"):
        machines.recorded("no-such-gpu")


def test_the_roof_is_the_larger_of_traffic_and_arithmetic():
    from fusebook.measure.op import Cost

    m = machine()
    assert m.roof(Cost(10**9, 10**9, 0), "float32") == pytest.approx(2e9 / m.copy)
    assert m.roof(Cost(3 * 10**9, 10**9, 0), "float32") == pytest.approx(2e9 / m.copy + 2e9 / m.read)
    assert m.roof(Cost(10**9, 3 * 10**9, 0), "float32") == pytest.approx(2e9 / m.copy + 2e9 / m.fill)
    assert m.roof(Cost(1, 1, 10**15), "float32") == pytest.approx(1e15 / 5e13)
    assert m.roof(Cost(10**9, 10**9, 2 * 10**10), "float32") == pytest.approx(2e9 / m.copy), "the larger, not the sum"
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
