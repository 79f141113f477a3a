"""Several GPUs: a queue of pages, shares of them, and records that are joined. The GPUs are pretended."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import record_pages
import synthetic
from fusebook import bench, record, timing
from fusebook import machine as machines
from fusebook.cards.elementwise import EXP, SILU
from fusebook.page import changed, measured, results
from record_pages import GPU, Queue
from toy import machine

ROOT = Path(__file__).resolve().parents[1]
TWO = [GPU("0", "Test GPU"), GPU("1", "Test GPU")]

PAGE = """
import json, os, pathlib, shutil, sys, time
me = pathlib.Path(__file__)
said = {"page": me.stem, "start": time.monotonic(), "cores": sorted(os.sched_getaffinity(0))}
if (due := os.environ.get("FUSEBOOK_DUE")) and not "CRASH":
    lacks = me.with_suffix(".due")
    pathlib.Path(due).write_text(lacks.read_text() if lacks.exists() else "")
    sys.exit(0 if os.environ["FUSEBOOK_REPLAY"] == "1" and "FUSEBOOK_RECORD" not in os.environ else 1)
said |= {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "FUSEBOOK_PART")}
time.sleep(SECONDS)
if (made := me.with_suffix(".records")).exists():
    shutil.copytree(made, os.environ["FUSEBOOK_RECORD"])
with open(me.with_name("said"), "a") as file:
    file.write(json.dumps(said | {"end": time.monotonic()}) + "\\n")
if "CRASH":
    os.abort()
"""


@pytest.fixture
def pages(tmp_path):
    """Makes pages that take some seconds, some of which crash; ``said`` tells what they said when they ran."""
    folder = tmp_path / "examples"
    folder.mkdir()

    def make(crash=(), **seconds):
        for name, took in seconds.items():
            text = PAGE.replace("SECONDS", str(took)).replace('"CRASH"', str(name in crash))
            (folder / f"{name}.py").write_text(text)
        return [folder / f"{name}.py" for name in seconds]

    def said():
        return {one["page"]: one for one in map(json.loads, (folder / "said").read_text().splitlines())}

    make.said = said
    return make


def test_the_longest_page_is_first_and_each_gpu_takes_the_next_when_it_has_done_one(pages, tmp_path):
    known = {"a": 5.0, "b": 1.0, "c": 50.0, "e": 2.0}
    order = record_pages.longest_first(pages(a=0, b=0, c=0, d=0, e=0), known)
    assert [page.stem for page in order] == ["d", "c", "a", "e", "b"]  # d was never recorded: it may be the longest
    found = pages(long=4.0, first=0.2, second=0.2, third=0.2)
    took = Queue(TWO, tmp_path / "build").run(found)
    said = pages.said()
    assert list(took) == found and took[found[0]] >= 4.0
    assert sorted(said, key=lambda name: said[name]["end"]) == ["first", "second", "third", "long"]
    assert len({said[name]["CUDA_VISIBLE_DEVICES"] for name in ("first", "second", "third")}) == 1
    assert {one["CUDA_VISIBLE_DEVICES"] for one in said.values()} == {"0", "1"}


def test_each_gpu_has_a_triton_cache_and_cores_of_its_own(pages, tmp_path):
    before = os.sched_getaffinity(0)
    Queue(TWO, tmp_path / "build").run(pages(a=0.5, b=0.5), FUSEBOOK_PART="device")
    a, b = pages.said().values()
    assert a["TRITON_CACHE_DIR"] != b["TRITON_CACHE_DIR"] and a["FUSEBOOK_PART"] == b["FUSEBOOK_PART"] == "device"
    if len(before) > 1:
        assert a["cores"] and b["cores"] and not set(a["cores"]) & set(b["cores"])
    assert os.sched_getaffinity(0) == before


def rows(op, size, times=1.0, on=None):
    frame = synthetic.frame(op, size, on=on or machine())
    frame[[c for c in frame if re.match("(cold|warm|host|call)_us", c)]] *= times
    frame.attrs["origin"] = bench.Origin(on or machine(), measured=True)
    return frame


def test_a_page_that_crashes_costs_no_other_and_keeps_what_it_had_measured(pages, tmp_path, capsys):
    found = pages(crash=("bad",), bad=0.1, good=0.1, other=0.1)
    record.write(rows(EXP, "64x64"), found[0].with_suffix(".records"))
    record.write(rows(EXP, "64x128"), found[1].with_suffix(".records"))
    record.write(rows(SILU, "64x64"), found[2].with_suffix(".records"))
    out = tmp_path / "out"
    took = Queue(TWO, tmp_path / "build", lambda folder: record.join([folder], out)).run(found)
    assert [seconds is None for seconds in took.values()] == [True, False, False]
    assert re.search(r"^bad: failed with -6, see \S+/bad/log after", capsys.readouterr().out, re.MULTILINE)
    assert set(record.read("exp", "test-gpu", out)["N"]) == {64, 128}
    assert len(record.read("silu", "test-gpu", out)) == len(SILU.variants)


def test_shares_are_all_pages_once_and_of_about_the_same_length(pages):
    seconds = {f"p{i}": s for i, s in enumerate([283, 202, 144, 100, 81, 77, 66, 59, 49, 25, 24])}
    every = [Path(f"{name}.py") for name in seconds]
    parts = [record_pages.shard(every, seconds, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(page for part in parts for page in part) == sorted(every)
    lengths = [sum(seconds[page.stem] for page in part) for part in parts]
    assert max(lengths) <= 1.1 * sum(seconds.values()) / 3
    assert record_pages.shard(every[:1], seconds, "2/2") == []


@pytest.mark.parametrize("words", ["0/4", "5/4", "4", "a/b", "1/0", "", "-1/4"])
def test_an_unknown_share_is_refused(words):
    with pytest.raises(ValueError, match="--shard: expected i/n with i from 1 to n, such as 1/4, got"):
        record_pages.shard([], {}, words)


@pytest.mark.parametrize("words", ["0,1,2", "2", "0,0", "x", "", "-1"])
def test_gpus_that_are_not_there_are_refused(words):
    with pytest.raises(ValueError, match="--gpus: expected different numbers of the 2 GPUs here, from 0 up, got"):
        record_pages.chosen(words, TWO)


def test_gpus_of_two_kinds_are_refused():
    with pytest.raises(ValueError, match="expected GPUs of one kind, whose records are one, got Test GPU, Other"):
        record_pages.chosen("all", [TWO[0], GPU("1", "Other")])


LISTED = (
    "GPU 0: NVIDIA H200 (UUID: GPU-aa)\nGPU 1: NVIDIA H200 (UUID: GPU-bb)\n  MIG 1g.18gb Device 0: (UUID: MIG-cc)\n"
)


@pytest.mark.parametrize(
    ("wish", "ids"),
    [(None, ["0", "1"]), ("1", ["1"]), ("1,0", ["1", "0"]), ("GPU-bb", ["GPU-bb"]), ("", []), ("7", [])],
)
def test_gpus_are_those_that_cuda_shows(monkeypatch, wish, ids):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=LISTED))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if wish is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wish)
    assert [gpu.id for gpu in record_pages.visible()] == ids


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gpus", "0,1,2"], "--gpus: expected different numbers of the 2 GPUs here"),
        (["--shard", "3/2"], "--shard: expected i/n"),
        (["nonsense"], "no page is named like ['nonsense']"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_runs(monkeypatch, capsys, argv, words):
    monkeypatch.setattr(record_pages, "visible", lambda: TWO)
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(SystemExit) as stop:
        record_pages.main(argv)
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(record_pages, "visible", list)
    with pytest.raises(SystemExit):
        record_pages.main([])
    assert "nvidia-smi -L lists none: run it on the machine to be recorded" in capsys.readouterr().err


def test_a_whole_run_on_two_gpus_by_the_device_then_by_the_host_alone(pages, tmp_path, monkeypatch):
    """The ceilings, then all pages at once; one by one those that measure by themselves, lack clocks, or are new."""
    found = pages(plot_1_long=0.4, plot_2_short=0.1)
    more = pages(plot_3_lacks=0.1, plot_9_new=0.1)
    known = {"plot_1_long": 4, "plot_2_short": 2, "plot_3_lacks": 1}
    (tmp_path / "out" / "test-gpu").mkdir(parents=True)
    (tmp_path / "out" / "test-gpu" / "seconds.json").write_text(json.dumps(known))
    lacking = rows(SILU, "64x64")
    lacking.loc[0, "call_us"] = float("nan")
    record.write(lacking, more[0].with_suffix(".records"))
    found[1].write_text(found[1].read_text() + "# measured(\n")
    for page in found:
        record.write(rows(EXP, f"64x{64 * (1 + found.index(page))}"), page.with_suffix(".records"))
    ran, real = [], subprocess.run

    def run(command, **how):
        if command[0] != "nvidia-smi" and "fusebook.record" in command:
            ran.append(command)
            machines.save(machine(), Path(command[-1]) / "test-gpu" / "machine.json")
            return subprocess.CompletedProcess(command, 0)
        return real(command, **how)

    monkeypatch.setattr(record_pages, "ROOT", tmp_path)
    monkeypatch.setattr(record_pages, "BUILD", tmp_path / "build")
    monkeypatch.setattr(record_pages, "visible", lambda: TWO)
    monkeypatch.setattr(subprocess, "run", run)
    assert record_pages.main(["--gpus", "0,1", "--out", str(tmp_path / "out")]) == 0
    assert len(ran) == 1
    said = [json.loads(line) for line in (tmp_path / "examples" / "said").read_text().splitlines()]
    parts = [(one["page"], one["FUSEBOOK_PART"]) for one in sorted(said, key=lambda one: one["end"])]
    beside, alone = parts[:3], parts[3:]
    assert sorted(beside) == [(page, "device") for page in known]
    assert alone == [("plot_2_short", "host"), ("plot_3_lacks", "host"), ("plot_9_new", None)]
    assert set(record.read("exp", "test-gpu", tmp_path / "out")["N"]) == {64, 128}
    (tmp_path / "examples" / "said").unlink()
    found[1].with_suffix(".due").write_text("device\nhost\nhost\n")
    more[0].with_suffix(".due").write_text("host\n")
    assert record_pages.main(["--gpus", "0,1", "--due", "--out", str(tmp_path / "out")]) == 0
    said = [json.loads(line) for line in (tmp_path / "examples" / "said").read_text().splitlines()]
    parts = [(one["page"], one["FUSEBOOK_PART"]) for one in said]
    assert parts[0] == ("plot_2_short", "due device")
    assert sorted(parts[1:]) == [("plot_2_short", "due host"), ("plot_3_lacks", "due host")]
    took = json.loads((tmp_path / "out" / "test-gpu" / "seconds.json").read_text())
    assert took["plot_1_long"] >= 0.4 and set(took) == {*known, "plot_9_new"}


def test_what_is_due_is_listed_without_a_gpu_and_a_page_that_fails_is_due_whole(pages, tmp_path, monkeypatch, capsys):
    pages(crash=["plot_1"], plot_1=0, plot_2=0, plot_3=0)
    (tmp_path / "examples" / "plot_2.due").write_text("host\n")
    monkeypatch.setattr(record_pages, "ROOT", tmp_path)
    monkeypatch.setattr(record_pages, "BUILD", tmp_path / "build")
    monkeypatch.setattr(record_pages, "visible", list)
    assert record_pages.main(["--due", "--list"]) == 0
    assert "due: plot_1 by device and host, plot_2 by host\n" in capsys.readouterr().out


def test_a_page_of_two_gpus_is_last_has_both_and_is_left_where_there_is_one(tmp_path, pages, monkeypatch, capsys):
    found = pages(plot_1_both=0.1, plot_2_one=0.1, plot_3_one=0.1)
    found[0].write_text(found[0].read_text() + "# asked = options(gpus=2)\n# measured(\n")
    assert [record_pages.needs(page) for page in found] == [2, 1, 1]

    def run(command, **how):
        if command[0] != "nvidia-smi" and "fusebook.record" in command:
            machines.save(machine(), Path(command[-1]) / "test-gpu" / "machine.json")
            return subprocess.CompletedProcess(command, 0)
        return real(command, **how)

    real = subprocess.run
    monkeypatch.setattr(record_pages, "ROOT", tmp_path)
    monkeypatch.setattr(record_pages, "BUILD", tmp_path / "build")
    monkeypatch.setattr(record_pages, "visible", lambda: TWO)
    monkeypatch.setattr(subprocess, "run", run)
    assert record_pages.main(["--gpus", "1", "--out", str(tmp_path / "out")]) == 0
    assert set(pages.said()) == {"plot_2_one", "plot_3_one"}
    assert "plot_1_both: left as it is, since it needs 2 GPUs, and --gpus gives 1" in capsys.readouterr().out
    assert record_pages.main(["--gpus", "0,1", "--out", str(tmp_path / "out")]) == 0
    said = pages.said()
    assert said["plot_1_both"]["CUDA_VISIBLE_DEVICES"] == "0,1" and said["plot_1_both"]["FUSEBOOK_PART"] is None
    assert said["plot_1_both"]["start"] > max(said[name]["end"] for name in ("plot_2_one", "plot_3_one"))


# Joining


def test_shares_are_joined_and_one_that_comes_twice_changes_nothing(tmp_path, capsys):
    for share, (op, size) in enumerate([(EXP, "64x64"), (EXP, "64x128"), (SILU, "64x64")]):
        record.write(rows(op, size), tmp_path / f"shard-{share}")
        (tmp_path / f"shard-{share}" / "test-gpu" / "seconds.json").write_text(json.dumps({f"plot_{share}": share}))
    spans = rows(EXP, "64x64")[["variant", "cold_us"]]
    spans.attrs["origin"] = bench.Origin(
        machine(), measured=True, date="2026-01-02", versions="torch 1", function="abc"
    )
    record.write(spans, tmp_path / "shard-2", "pages/spans")
    shares = [str(tmp_path / f"shard-{share}") for share in range(3)]
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert record.main(["--join", *shares, "--out", str(once)]) == 0
    assert "3 records of 3 folders" in capsys.readouterr().out
    assert record.main(["--join", *shares, shares[1], shares[0], "--out", str(twice)]) == 0
    files = sorted(file.relative_to(once) for file in once.rglob("*.*"))
    assert [file.name for file in files] == ["exp.csv", "machine.json", "spans.csv", "seconds.json", "silu.csv"]
    assert all((once / file).read_bytes() == (twice / file).read_bytes() for file in files)
    assert json.loads((once / "test-gpu" / "seconds.json").read_text()) == {"plot_0": 0, "plot_1": 1, "plot_2": 2}
    assert record.read("pages/spans", "test-gpu", once).attrs["origin"].function == "abc"


def test_what_cannot_be_joined_is_refused(tmp_path, capsys):
    record.write(rows(EXP, "64x64"), tmp_path / "one")
    record.write(rows(EXP, "64x64", on=machine(sms=11)), tmp_path / "other")
    (tmp_path / "empty").mkdir()
    for folders, words in ((["one", "other"], "of 11 multiprocessors"), (["empty"], "nothing to join")):
        argv = ["--join", *(str(tmp_path / name) for name in folders), "--out", str(tmp_path / "out")]
        assert record.main(argv) == 1
        told = capsys.readouterr().err
        assert words in told and told.count("\n") == 1


def test_of_two_runs_the_later_machine_and_the_last_rows_and_seconds_stay(tmp_path):
    runs = {"late": machine(date="2026-03-03", commit="c" * 12), "early": machine(date="2026-02-02", commit="d" * 12)}
    for name, on in runs.items():
        record.write(rows(EXP, "64x64", on=on), tmp_path / name)
        (tmp_path / name / "test-gpu" / "seconds.json").write_text(json.dumps({"plot_1": name}))
        machines.save(dataclasses.replace(on, commit="e" * 12), tmp_path / name / "test-gpu" / "machine.json")
    for order in (("late", "early"), ("early", "late")):
        out = tmp_path / "-".join(order)
        record.join([tmp_path / name for name in order], out)
        assert machines.load(out / "test-gpu" / "machine.json").date == "2026-03-03"
        assert json.loads((out / "test-gpu" / "seconds.json").read_text()) == {"plot_1": order[-1]}
        assert record._load(out / "test-gpu" / "exp.csv", "exp")[1]["commit"] == runs[order[-1]].commit
    record.write(rows(EXP, "64x64", on=machine(l2=1)), tmp_path / "another")
    with pytest.raises(record.RecordError, match="join them into different folders"):
        record.join([tmp_path / "another"], tmp_path / "late")


def test_what_one_clock_measured_again_is_superseded_and_what_is_gone_is_not(tmp_path):
    gpu, before, then = tmp_path / "test-gpu", tmp_path / "before", machine(commit="c" * 12, date="2026-01-01")
    record.write(rows(EXP, "64x64,64x128,64x256", on=then), tmp_path)
    shutil.copytree(gpu, before)
    now, _ = record._load(gpu / "exp.csv", "exp")
    now.loc[now["N"].eq(64), "call_us"] *= 2
    now.loc[now["N"].eq(128), "cold_us"] *= 2
    record._save(gpu / "exp.csv", "exp", now[now["N"] < 256], commit="d" * 12)
    machines.save(machine(date="2026-02-02"), gpu / "machine.json")
    record.keep_superseded(before, gpu)
    kept, told = record._load(gpu / "previous" / "exp.csv", "exp")
    assert set(kept["N"]) == {64, 128} and len(kept) == 2 * len(EXP.variants) and told["commit"] == then.commit
    assert machines.load(gpu / "previous" / "machine.json").date == then.date


def test_what_is_measured_again_is_kept_as_it_was(tmp_path, monkeypatch):
    """Row by row: what another page measured long ago stays what that superseded."""
    root, before = tmp_path / "records", tmp_path / "before"
    gpu = root / "test-gpu"
    for times, sizes in ((4.0, "64x64,64x128"), (2.0, "64x64"), (1.0, "64x64")):
        if gpu.exists():
            shutil.rmtree(before, ignore_errors=True)
            shutil.copytree(gpu, before)
        record.write(rows(EXP, sizes, times), root)
        if before.exists():
            for _ in range(2):  # after each page of a run
                record.keep_superseded(before, gpu)
    kept, _ = record._load(gpu / "previous" / "exp.csv", "exp")
    now, _ = record._load(gpu / "exp.csv", "exp")
    assert len(kept) == len(EXP.variants) and set(kept["N"]) == {64}
    assert kept["cold_us"].to_numpy() == pytest.approx(2 * now.loc[now["N"] == 64, "cold_us"].to_numpy(), rel=1e-4)
    monkeypatch.setattr(machines, "RECORDS", root)
    monkeypatch.setenv("FUSEBOOK_GPU", "test-gpu")
    table = changed(["fusebook", "eager"])
    assert list(table.index) == [("exp", "fusebook"), ("exp", "eager")]
    assert table["times as long"].to_numpy() == pytest.approx([0.5, 0.5], rel=1e-4)
    assert list(table["verdict"]) == ["faster throughout"] * 2
    shutil.rmtree(gpu / "previous")
    assert changed().empty


# The caller's clocks


def beside_others(frame):
    frame[[c for c in frame if c.startswith(("host_us", "call_us"))]] = float("nan")
    return frame.assign(date="2000-02-02").pipe(lambda f: setattr(f, "attrs", frame.attrs) or f)


def test_a_row_keeps_the_callers_clocks_of_the_same_launches_and_no_others(tmp_path):
    before = rows(EXP, "64x64,64x128,64x512")
    before.loc[before["N"] == 128, "code"] = "other"
    before.loc[before["N"] == 512, "versions"] = "torch 0.0; triton 0.1"
    record.write(before, tmp_path)
    found = record.with_callers_clocks(beside_others(rows(EXP, "64x64,64x128,64x256,64x512", 2.0)), tmp_path)
    same = found["N"] == 64
    for clock in ("host_us", "call_us", "call_us_80"):
        kept = before.loc[before["N"] == 64, clock]
        assert found.loc[same, clock].tolist() == pytest.approx(kept.tolist(), rel=1e-5)
        assert found.loc[~same, clock].isna().all()
    assert found.loc[same, "cold_us"].tolist() == pytest.approx((2 * before.loc[before["N"] == 64, "cold_us"]).tolist())
    assert set(found.loc[same, "date"]) == {"2000-01-01"} and set(found.loc[~same, "date"]) == {"2000-02-02"}
    measured = record.with_callers_clocks(rows(EXP, "64x64", 3.0), tmp_path)
    assert measured["call_us"].tolist() == rows(EXP, "64x64", 3.0)["call_us"].tolist(), "what was measured stays"


@pytest.mark.alone
def test_clocks_that_are_not_asked_for_are_not_taken():
    from toy import toy

    every = bench.run(toy(), config="16", repeat=3, warmup=1, progress=False)
    device = bench.run(toy(), config="16", repeat=3, warmup=1, progress=False, clocks=("cold", "warm"))
    assert every["call_us"].notna().all() and device["call_us"].isna().all() and set(device["status"]) == {"ok"}


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A pretended GPU whose record is in the package, and what its clocks were asked for."""
    asked = []
    monkeypatch.setattr("fusebook.page._place.live", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(machines, "RECORDS", tmp_path / "package")
    monkeypatch.setattr(machines, "here", lambda: machine())
    monkeypatch.setattr(record, "_reasons", lambda frame, *_: [""] * len(frame))

    def run(op, config, clocks=timing.KINDS, variants=None, **_):
        asked.append(clocks)
        sizes = config if isinstance(config, str) else ",".join(f"{p['M']}x{p['N']}" for _, p in config)
        frame = rows(op, sizes)
        return frame if variants is None else frame[frame["variant"].isin(variants)]

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setenv("FUSEBOOK_RECORD", str(tmp_path / "new"))
    record.write(rows(EXP, "64x64"), machines.RECORDS)
    return asked


def test_cards_are_recorded_by_the_device_beside_others_and_replayed_when_the_host_is_alone(gpu, monkeypatch):
    results(EXP, config="64x64")
    assert set(gpu.pop()) == {"cold", "warm", "host", "call"}
    monkeypatch.setenv("FUSEBOOK_PART", "device")
    results(EXP, config="64x64")
    assert gpu.pop() == ("cold", "warm")
    monkeypatch.setenv("FUSEBOOK_PART", "host")
    assert results(EXP, config="64x64").attrs["origin"].measured is False and gpu == []
    assert results(EXP, config="64x128").attrs["origin"].measured and len(gpu) == 1  # it failed in the other part


def test_what_had_no_callers_clocks_to_keep_is_measured_again_when_the_host_is_alone(gpu, monkeypatch, tmp_path):
    lacking = rows(EXP, "64x64,64x128")
    eager = (lacking["variant"] == "eager") & (lacking["N"] == 64)
    lacking.loc[eager, "call_us"] = float("nan")
    record.write(lacking, machines.RECORDS)
    monkeypatch.setenv("FUSEBOOK_PART", "host")
    results(EXP, config="64x64,64x128")
    assert noted_as_due(monkeypatch, tmp_path, lambda: results(EXP, config="64x64,64x128")) == ["host"]
    found = record.read("exp", "test-gpu", tmp_path / "new")
    assert len(gpu) == 1 and list(zip(found["variant"], found["N"], strict=True)) == [("eager", 64)]
    assert found["call_us"].notna().all()


def noted_as_due(monkeypatch, tmp_path, ask):
    """What a page that replays says of its record: by which clocks it lacks times."""
    with monkeypatch.context() as replaying:
        replaying.setattr("fusebook.page._place.live", lambda: False)
        replaying.setenv("FUSEBOOK_GPU", "test-gpu")
        replaying.setenv("FUSEBOOK_DUE", str(tmp_path / "due"))
        (tmp_path / "due").write_text("")
        ask()
    return (tmp_path / "due").read_text().split()


@pytest.mark.parametrize(
    ("part", "clocks"), [("due", timing.KINDS), ("due host", timing.KINDS), ("due device", ("cold", "warm"))]
)
def test_a_point_with_a_stale_row_is_due_as_a_whole_and_others_are_not(part, clocks, gpu, monkeypatch, tmp_path):
    def reasons(frame, *_):
        return [
            "launches something else than when it was measured" if v == "fusebook" and n == 64 else ""
            for v, n in frame[["variant", "N"]].to_numpy()
        ]

    record.write(rows(EXP, "64x64,64x128"), machines.RECORDS)
    monkeypatch.setattr(record, "_reasons", reasons)
    monkeypatch.setenv("FUSEBOOK_PART", "host")
    results(EXP, config="64x64,64x128")
    assert gpu == []
    monkeypatch.setenv("FUSEBOOK_PART", part)
    results(EXP, config="64x64,64x128")
    assert noted_as_due(monkeypatch, tmp_path, lambda: results(EXP, config="64x64")) == ["device"]
    assert noted_as_due(monkeypatch, tmp_path, lambda: results(EXP, config="64x128")) == []
    found = record.read("exp", "test-gpu", tmp_path / "new")
    assert gpu == [clocks] and set(found["variant"]) == set(EXP.variants) and set(found["N"]) == {64}


@pytest.mark.parametrize(("status", "again"), [("failed", True), ("out of memory", True), ("refused", False)])
def test_a_row_that_failed_is_due_and_one_that_was_refused_is_not(status, again, gpu, monkeypatch, tmp_path):
    frame = rows(EXP, "64x64,64x128")
    frame.loc[(frame["variant"] == "fusebook") & (frame["N"] == 64), "status"] = status
    record.write(frame, machines.RECORDS)
    assert noted_as_due(monkeypatch, tmp_path, lambda: results(EXP, config="64x64,64x128")) == ["device"] * again
    monkeypatch.setenv("FUSEBOOK_PART", "due")
    results(EXP, config="64x64,64x128")
    assert len(gpu) == again
    if again:
        assert set(record.read("exp", "test-gpu", tmp_path / "new")["N"]) == {64}


@pytest.mark.parametrize("asked", [None, ("eager", "torch.compile")])
def test_a_way_that_came_after_the_record_is_due_at_every_point_with_the_ways_beside_it(
    asked, gpu, monkeypatch, tmp_path
):
    frame = rows(EXP, "64x64,64x128")
    (machines.RECORDS / "test-gpu" / "exp.csv").unlink()
    record.write(frame[frame["variant"] != "torch.compile"], machines.RECORDS)

    def ask():
        return results(EXP, config="64x64", variants=asked)

    assert noted_as_due(monkeypatch, tmp_path, ask) == ["device"]
    assert noted_as_due(monkeypatch, tmp_path, lambda: results(EXP, config="64x64", variants=("eager",))) == []
    monkeypatch.setenv("FUSEBOOK_PART", "due")
    ask()
    found = record.read("exp", "test-gpu", tmp_path / "new")
    assert len(gpu) == 1 and set(found["variant"]) == set(asked or EXP.variants) and set(found["N"]) == {64}
    record.join([tmp_path / "new"], machines.RECORDS)
    assert noted_as_due(monkeypatch, tmp_path, ask) == []


def spans():
    frame = rows(EXP, "64x64")[["variant", "cold_us"]]
    frame.attrs.clear()
    return frame


def test_what_a_page_measures_is_due_where_its_function_changed(gpu, monkeypatch, tmp_path):
    file = tmp_path / "new" / "test-gpu" / "pages" / "spans.csv"
    measured("spans", spans)
    record.join([tmp_path / "new"], machines.RECORDS)
    file.unlink()
    monkeypatch.setenv("FUSEBOOK_PART", "due host")
    assert not measured("spans", spans).attrs["origin"].measured
    assert not measured("spans", lambda: spans().head(2), by_device=True).attrs["origin"].measured  # of the other part
    assert measured("spans", lambda: spans().head(2)).attrs["origin"].measured and file.exists()
    assert noted_as_due(monkeypatch, tmp_path, lambda: measured("spans", spans)) == []
    assert noted_as_due(monkeypatch, tmp_path, lambda: measured("spans", lambda: spans().head(2))) == ["host"]
    lately = noted_as_due(monkeypatch, tmp_path, lambda: measured("spans", lambda: spans().head(3), by_device=True))
    assert lately == ["device"]


@pytest.mark.parametrize(("by_device", "records"), [(False, "host"), (True, "device")])
def test_what_a_page_measures_is_recorded_in_one_part(gpu, monkeypatch, tmp_path, by_device, records):
    file = tmp_path / "new" / "test-gpu" / "pages" / "spans.csv"
    other = {"host": "device", "device": "host"}[records]
    monkeypatch.setenv("FUSEBOOK_PART", other)
    assert measured("spans", spans, by_device=by_device).attrs["origin"].measured  # there is no record of it yet
    assert not file.exists()
    monkeypatch.setenv("FUSEBOOK_PART", records)
    measured("spans", spans, by_device=by_device)
    assert file.exists()
    record.join([tmp_path / "new"], machines.RECORDS)
    monkeypatch.setenv("FUSEBOOK_PART", other)
    assert not measured("spans", spans, by_device=by_device).attrs["origin"].measured


def test_the_job_files_ask_for_shares_and_join_them():
    workflow = (ROOT / ".github" / "workflows" / "record.yml").read_text()
    batch = (ROOT / "docs" / "slurm" / "record.sbatch").read_text()
    for text in (workflow, batch):
        assert "--shard" in text and "fusebook.record --join build/record/shard-*" in text
    assert subprocess.run(["bash", "-n", str(ROOT / "docs" / "slurm" / "record.sbatch")]).returncode == 0
    assert "#SBATCH --exclusive" in batch  # host and call are times of the host's
