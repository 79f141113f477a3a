"""Pages that are recorded on several GPUs, each whole. The GPUs are pretended."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import record_pages
import synthetic
from fusebook.cards.elementwise import EXP, SILU
from fusebook.lesson._results import measured, results
from fusebook.measure import bench, record, timing
from fusebook.measure import machine as machines
from record_pages import GPU, Queue
from toy import machine

ROOT = Path(__file__).resolve().parents[1]
TWO = [GPU("0", "Test GPU"), GPU("1", "Test GPU")]

PAGE = """
import json, os, pathlib, shutil, sys, time
me = pathlib.Path(__file__)
said = {"page": me.stem, "start": time.monotonic(), "cores": sorted(os.sched_getaffinity(0))}
if (note := os.environ.get("_FUSEBOOK_STALE")) and not "CRASH":
    if me.with_suffix(".stale").exists():
        pathlib.Path(note).write_text("stale")
    sys.exit(0 if os.environ["FUSEBOOK_GPU"] and "_FUSEBOOK_RECORD" not in os.environ else 1)
said |= {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "_FUSEBOOK_CLOCKS")}
time.sleep(SECONDS)
if (made := me.with_suffix(".records")).exists():
    shutil.copytree(made, os.environ["_FUSEBOOK_RECORD"], dirs_exist_ok=True)
with open(me.with_name("said"), "a") as file:
    file.write(json.dumps(said | {"end": time.monotonic()}) + "\\n")
if "CRASH":
    os.abort()
"""


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Makes pages that take some seconds, some of which crash; ``said`` tells what they said when they ran."""
    monkeypatch.setattr(record_pages, "IMPORTS", ["this", "not_installed"])  # the first one says so in the log
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


def test_on_one_gpu_a_page_is_ready_before_its_turn_and_starts_only_then(pages, tmp_path):
    found = pages(crash=("bad",), first=1.5, bad=0, last=0)
    build = tmp_path / "build"

    def done(folder):
        ready[folder.parent.name] = [(build / page.stem / "log").exists() for page in found]

    ready = {}
    took = Queue(TWO[:1], build, done).run(found)
    first, bad, last = (pages.said()[page.stem] for page in found)
    assert first["end"] <= bad["start"] and bad["end"] <= last["start"]
    assert ready == {"first": [True, True, False], "last": [True] * 3}
    assert [took[page] is None for page in found] == [False, True, False] and took[found[0]] >= 1.5
    assert ["Zen of Python" in (build / page.stem / "log").read_text() for page in found] == [True] * 3
    assert last["TRITON_CACHE_DIR"] == str(build / "last" / "triton")


def test_each_page_has_a_triton_cache_and_each_gpu_cores_of_its_own(pages, tmp_path):
    before = os.sched_getaffinity(0)
    Queue(TWO, tmp_path / "build").run(pages(a=0.5, b=0.5), _FUSEBOOK_CLOCKS="gpu")
    a, b = pages.said().values()
    assert a["TRITON_CACHE_DIR"] != b["TRITON_CACHE_DIR"] and a["_FUSEBOOK_CLOCKS"] == b["_FUSEBOOK_CLOCKS"] == "gpu"
    if len(before) > 1:
        assert a["cores"] and b["cores"] and not set(a["cores"]) & set(b["cores"])
    assert os.sched_getaffinity(0) == before


def rows(op, size, times=1.0, on=None):
    frame = synthetic.frame(op, size, on=on or machine())
    frame[[c for c in frame if c.startswith(tuple(timing.COLUMN.values()))]] *= times
    frame.attrs["origin"] = bench.Origin(on or machine(), measured=True)
    return frame


def test_a_page_that_crashes_costs_no_other_and_leaves_its_old_record(pages, tmp_path, capsys):
    found = pages(crash=("bad",), bad=0.1, good=0.1)
    out = tmp_path / "out"
    record.write(rows(EXP, "64x64"), out)
    record.write(rows(EXP, "64x128"), found[0].with_suffix(".records"))
    record.write(rows(SILU, "64x64"), found[1].with_suffix(".records"))
    took = Queue(TWO, tmp_path / "build", lambda folder: record_pages.installed(folder, out)).run(found)
    assert [seconds is None for seconds in took.values()] == [True, False]
    shown = capsys.readouterr().out
    assert re.search(r"^bad: failed with -6, see \S+/bad/log after", shown, re.MULTILINE)
    assert set(record.read("exp", "test-gpu", out)["N"]) == {64}
    assert len(record.read("silu", "test-gpu", out)) == len(SILU.variants)


def test_a_page_replaces_its_files_whole_and_no_others(tmp_path):
    out = tmp_path / "out"
    for op, size in ((EXP, "64x64,64x128"), (SILU, "64x64")):
        record.write(rows(op, size), out)
    before = (out / "test-gpu" / "silu.csv").read_text()
    record.write(rows(EXP, "64x256", on=machine(date="2027-01-01")), tmp_path / "new")
    record_pages.installed(tmp_path / "new", out)
    assert set(record.read("exp", "test-gpu", out)["N"]) == {256}
    assert (out / "test-gpu" / "silu.csv").read_text() == before
    assert machines.load(out / "test-gpu" / "machine.json").date == machine().date, "ceilings stay"
    assert not list(out.rglob("*.part"))


def test_what_could_not_be_timed_is_named_at_the_end(pages, tmp_path, two_gpus, capsys):
    frame = rows(EXP, "64x64")
    frame.loc[frame["variant"] == "torch.compile", ["status", "note"]] = ["failed", "RuntimeError: no workspace"]
    frame.loc[frame["variant"] == "eager", ["status", "note"]] = ["refused", "wide rows"]
    (page,) = pages(plot_1=0)
    record.write(frame, page.with_suffix(".records"))
    assert record_pages.main(["--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "plot_1: no time of exp, torch.compile at float32 64 64: failed, RuntimeError: no workspace" in said
    assert "wide rows" not in said and len(record.read("exp", "test-gpu", tmp_path / "out")) == len(frame)


@pytest.mark.parametrize("gone", ["--shard", "--due"])
def test_options_that_went_say_what_to_do_instead(gone, capsys):
    with pytest.raises(SystemExit) as stop:
        record_pages.main([gone])
    assert stop.value.code == 2 and f"{gone} went with version 0.2.0" in capsys.readouterr().err


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
        (["--list"], "--list goes with --stale"),
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


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """A checkout in a folder of its own, with two GPUs whose ceilings are known."""

    def run(command, **how):
        if command[0] != "nvidia-smi" and "fusebook.measure.record" in command:
            machines.save(machine(), Path(command[-1]) / "test-gpu" / "machine.json")
            return subprocess.CompletedProcess(command, 0)
        return real(command, **how)

    real = subprocess.run
    monkeypatch.setattr(record_pages, "ROOT", tmp_path)
    monkeypatch.setattr(record_pages, "BUILD", tmp_path / "build")
    monkeypatch.setattr(record_pages, "visible", lambda: TWO)
    monkeypatch.setattr(subprocess, "run", run)


def test_two_gpus_record_a_page_each_and_then_the_host_has_one_at_a_time(pages, tmp_path, two_gpus):
    found = pages(plot_1_long=0.4, plot_2_short=0.1, plot_9_new=0.1)
    known = {"plot_1_long": 4, "plot_2_short": 2}
    (tmp_path / "out" / "test-gpu").mkdir(parents=True)
    (tmp_path / "out" / "test-gpu" / "seconds.json").write_text(json.dumps(known))
    record.write(rows(EXP, "64x64"), found[0].with_suffix(".records"))
    assert record_pages.main(["--gpus", "0,1", "--out", str(tmp_path / "out")]) == 0
    said = [json.loads(line) for line in (tmp_path / "examples" / "said").read_text().splitlines()]
    said.sort(key=lambda one: one["start"])
    assert [one["_FUSEBOOK_CLOCKS"] for one in said] == ["gpu"] * 3 + ["host"] * 3
    alone = said[3:]
    assert all(first["end"] <= second["start"] for first, second in itertools.pairwise(alone))
    assert {one["CUDA_VISIBLE_DEVICES"] for one in alone} == {"0"}
    assert set(record.read("exp", "test-gpu", tmp_path / "out")["N"]) == {64}
    took = json.loads((tmp_path / "out" / "test-gpu" / "seconds.json").read_text())
    assert took["plot_1_long"] >= 0.8 and set(took) == {*known, "plot_9_new"}


def test_one_gpu_records_a_page_in_one_run(pages, tmp_path, two_gpus):
    pages(plot_1=0, plot_2=0)
    assert record_pages.main(["plot_2", "--out", str(tmp_path / "out")]) == 0
    assert {name: one["_FUSEBOOK_CLOCKS"] for name, one in pages.said().items()} == {"plot_2": None}


def test_stale_pages_are_listed_without_a_gpu_and_one_that_fails_is_among_them(pages, tmp_path, monkeypatch, capsys):
    pages(crash=["plot_1"], plot_1=0, plot_2=0, plot_3=0)
    (tmp_path / "examples" / "plot_2.stale").touch()
    monkeypatch.setattr(record_pages, "ROOT", tmp_path)
    monkeypatch.setattr(record_pages, "BUILD", tmp_path / "build")
    monkeypatch.setattr(record_pages, "visible", list)
    monkeypatch.setattr(record_pages, "RECORDS", tmp_path / "kept")
    for gpu, seconds in ((machines.SHIPPED, {"plot_1": 300, "plot_2": 60}), ("nvidia-l4", {"plot_1": 400})):
        (tmp_path / "kept" / gpu).mkdir(parents=True)
        (tmp_path / "kept" / gpu / "seconds.json").write_text(json.dumps(seconds))
    for gpu, told in (
        (None, ["plot_1 plot_2  # about 360 s"]),
        ("nvidia-l4", ["plot_1  # about 400 s", "plot_2  # about 60 s"]),
    ):
        monkeypatch.setenv("FUSEBOOK_GPU", gpu or "")
        assert record_pages.main(["--stale", "--list"]) == 0
        out = capsys.readouterr().out
        assert "stale: plot_1, plot_2\n" in out and f"{gpu or machines.SHIPPED}: about" in out
        assert [line for line in out.splitlines() if "about" in line][:-1] == [f"nox -s record -- {t}" for t in told]


def test_the_command_of_stale_random_problems_is_named(tmp_path, monkeypatch):
    problems = {"exp": [3], "silu": [], "softmax": [0]}
    for name in problems:
        record._save(record.path(f"explored/{name}", "test-gpu", tmp_path), f"explored/{name}", rows(EXP, "64x64"))
    read = lambda op, slug, root: SimpleNamespace(attrs={"stale": problems[op.name], "seed": "2611"})  # noqa: E731
    monkeypatch.setattr("fusebook.measure.explore.read", read)
    assert record_pages.problems("test-gpu", tmp_path).endswith("explore exp softmax --seed 2611")
    problems |= {"exp": [], "softmax": []}
    assert record_pages.problems("test-gpu", tmp_path) == ""


def test_a_page_of_two_gpus_is_last_has_both_and_is_left_where_there_is_one(tmp_path, pages, two_gpus, capsys):
    found = pages(plot_1_both=0.1, plot_2_one=0.1, plot_3_one=0.1)
    found[0].write_text(found[0].read_text() + "# page = lesson.open('plot_1_both', gpus=2)\n# measured(\n")
    assert [record_pages.needs(page) for page in found] == [2, 1, 1]
    assert record_pages.main(["--gpus", "1", "--out", str(tmp_path / "out")]) == 0
    assert set(pages.said()) == {"plot_2_one", "plot_3_one"}
    assert "plot_1_both: left as it is, since it needs 2 GPUs, and --gpus gives 1" in capsys.readouterr().out
    assert record_pages.main(["--gpus", "0,1", "--out", str(tmp_path / "out")]) == 0
    said = pages.said()
    assert said["plot_1_both"]["CUDA_VISIBLE_DEVICES"] == "0,1" and said["plot_1_both"]["_FUSEBOOK_CLOCKS"] is None
    assert said["plot_1_both"]["start"] > max(said[name]["end"] for name in ("plot_2_one", "plot_3_one"))


# The clocks of a page


@pytest.mark.alone
def test_clocks_that_are_not_asked_for_are_not_taken():
    from toy import toy

    every = bench.run(toy(), config="16", repeat=3, warmup=1)
    device = bench.run(toy(), config="16", repeat=3, warmup=1, clocks=("cold", "warm"))
    assert every["latency_us"].notna().all() and device["latency_us"].isna().all() and set(device["status"]) == {"ok"}


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A pretended GPU whose record is in the package, and what its clocks were asked for."""
    asked = []
    monkeypatch.setattr("fusebook.lesson._place.live", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(machines, "RECORDS", tmp_path / "package")
    monkeypatch.setattr(machines, "here", lambda: machine())

    def run(op, config, clocks=timing.KINDS, variants=None, **_):
        asked.append(clocks)
        sizes = config if isinstance(config, str) else ",".join(f"{p['M']}x{p['N']}" for _, p in config)
        frame = rows(op, sizes)
        return frame if variants is None else frame[frame["variant"].isin(variants)]

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setenv("_FUSEBOOK_RECORD", str(tmp_path / "new"))
    record.write(rows(EXP, "64x64"), machines.RECORDS)
    return asked


def test_a_card_is_recorded_by_the_clocks_that_a_run_is_for(gpu, monkeypatch):
    for clocks, asked in (("", set(timing.KINDS)), ("gpu", {"cold", "warm"}), ("host", {"host", "call"})):
        monkeypatch.setenv("_FUSEBOOK_CLOCKS", clocks)
        assert results(EXP, config="64x64").attrs["origin"].measured and set(gpu.pop()) == asked


def test_a_card_is_recorded_on_the_page_of_its_family_alone(gpu, monkeypatch, tmp_path):
    file = tmp_path / "new" / "test-gpu" / "exp.csv"
    for page, there in (("plot_102_softmax.py", False), ("plot_101_elementwise.py", True)):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / page), raising=False)
        assert results(EXP, config="64x64").attrs["origin"].measured
        assert file.exists() == there


def is_stale(monkeypatch, tmp_path, ask):
    """Whether a page that replays says that its record is stale."""
    note = tmp_path / "stale"
    note.unlink(missing_ok=True)
    with monkeypatch.context() as replaying:
        replaying.setattr("fusebook.lesson._place.live", lambda: False)
        replaying.setenv("FUSEBOOK_GPU", "test-gpu")
        replaying.setenv("_FUSEBOOK_STALE", str(note))
        ask()
    return note.exists()


@pytest.mark.parametrize(
    ("change", "old"),
    [
        ({}, False),
        ({"code": "another"}, True),
        ({"host": "another"}, True),
        ({"status": "failed"}, True),
        ({"status": "out of memory"}, True),
        ({"status": "refused"}, False),
    ],
)
def test_a_page_is_stale_when_a_row_is(change, old, gpu, monkeypatch, tmp_path):
    frame = rows(EXP, "64x64,64x128")
    for column, value in change.items():
        frame.loc[(frame["variant"] == "fusebook") & (frame["N"] == 64), column] = value
    record.write(frame, machines.RECORDS)
    assert is_stale(monkeypatch, tmp_path, lambda: results(EXP, config="64x64,64x128")) == old
    assert not is_stale(monkeypatch, tmp_path, lambda: results(EXP, config="64x128"))


@pytest.mark.parametrize(("asked", "old"), [(None, True), (("eager", "torch.compile"), True), (("eager",), False)])
def test_a_page_is_stale_when_an_implementation_has_no_row(asked, old, gpu, monkeypatch, tmp_path):
    frame = rows(EXP, "64x64")
    (machines.RECORDS / "test-gpu" / "exp.csv").unlink()
    record.write(frame[frame["variant"] != "torch.compile"], machines.RECORDS)
    assert is_stale(monkeypatch, tmp_path, lambda: results(EXP, config="64x64", variants=asked)) == old


def spans():
    frame = rows(EXP, "64x64")[["variant", "gpu_us"]]
    frame.attrs.clear()
    return frame


def test_what_a_page_measures_is_stale_when_its_function_changed(gpu, monkeypatch, tmp_path):
    measured("spans", spans)
    record_pages.installed(tmp_path / "new", machines.RECORDS)
    assert not is_stale(monkeypatch, tmp_path, lambda: measured("spans", spans))
    assert is_stale(monkeypatch, tmp_path, lambda: measured("spans", lambda: spans().head(2)))


@pytest.mark.parametrize("by_device", [False, True])
def test_what_a_page_measures_is_recorded_in_one_run(gpu, monkeypatch, tmp_path, by_device):
    file = tmp_path / "new" / "test-gpu" / "pages" / "spans.csv"
    for clocks in ("gpu", "host"):
        monkeypatch.setenv("_FUSEBOOK_CLOCKS", clocks)
        found = measured("spans", spans, by_device=by_device)
        assert file.exists() == (clocks == "host" or by_device)
        assert found.attrs["origin"].measured == (clocks == "gpu" or not by_device)


def test_the_job_files_record_pages_whole():
    workflow = (ROOT / ".github" / "workflows" / "record.yml").read_text()
    batch = (ROOT / "docs" / "slurm" / "record.sbatch").read_text()
    for text in (workflow, batch):
        assert "--shard" not in text and "--join" not in text
    assert 'nox -s record -- "$PAGE"' in workflow and 'record_pages.py "$page"' in batch
    assert subprocess.run(["bash", "-n", str(ROOT / "docs" / "slurm" / "record.sbatch")]).returncode == 0
    assert "#SBATCH --exclusive" in batch  # launch times and latency are times of the host
