"""Your own GPU: recorded whole, compared with another one, and shown beside it. It is made up here."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import side_by_side
import synthetic
import warm
from fusebook.cards import OPS
from fusebook.cards.elementwise import EXP
from fusebook.lesson._results import NoResults, results
from fusebook.measure import bench, compare, record, timing
from fusebook.measure import machine as machines
from toy import machine

ROOT = Path(__file__).resolve().parents[1]


def made_up(config="64x64,64x128", dtype="float32", times=1.0, op=EXP, **fields):
    """Rows of a GPU that is not there, on which all takes so many times as long."""
    on = machine(**{"slug": "made-up", "name": "Made-up GPU", **fields})
    frame = synthetic.frame(op, config, dtype, on)
    clocks = [c for c in frame if c.startswith(tuple(timing.COLUMN.values()))]
    frame[clocks] *= times
    return frame


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package's records, made up too."""
    for name in [n for n in os.environ if n.startswith(("FUSEBOOK_", "_FUSEBOOK_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(machines, "RECORDS", tmp_path / "package")
    monkeypatch.setenv("FUSEBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    record.write(made_up(slug=machines.SHIPPED, name="Shipped GPU"), machines.RECORDS)
    return tmp_path


# Recording


@pytest.fixture
def gpu(package, monkeypatch):
    """A machine that measures exp by formula; the points that it was asked for."""
    asked = []

    def run(op, *, config, dtype, **_):
        asked.append((dtype, *config[0][1].values()))
        if len(asked) == 3:
            raise KeyboardInterrupt
        here = "; ".join(f"{name} {version}" for name, version in machines.versions("torch", "triton").items())
        size = "x".join(map(str, config[0][1].values()))
        return made_up(size, dtype).assign(config=config[0][0], versions=here).pipe(kept)

    def kept(frame):
        frame.attrs["origin"] = bench.Origin(machine(slug="made-up"), measured=True)
        return frame

    monkeypatch.setattr(record, "OPS", {"exp": EXP})
    monkeypatch.setattr(machines, "here", lambda fresh=False: machine(slug="made-up"))
    monkeypatch.setattr(bench, "run", run)
    return asked


def test_all_of_a_gpu_is_what_the_package_has_and_what_the_card_adds():
    def found(op):
        return {(dtype, *dims.values()) for dtype, _, dims in record.everything(op)}

    shipped, _ = record._load(machines.RECORDS / machines.SHIPPED / "softmax.csv", "softmax")
    assert {(r["dtype"], r["M"], r["N"]) for r in shipped.to_dict("records")} <= found(OPS["softmax"])
    for op in OPS.values():
        points = {tuple(dims.values()) for _, dims in bench.points(op, ",".join(op.configs))}
        assert points <= {point[1:] for point in found(op)}


def test_a_gpu_is_recorded_whole_and_goes_on_where_it_was_cut_off(gpu, capsys):
    argv = ["exp", "--all", "--out", "mine"]
    whole = len(record.everything(EXP))
    with pytest.raises(KeyboardInterrupt):
        record.main(argv)
    assert len(gpu) == 3 and len(record.read("exp", "made-up", Path("mine"))) == 2 * len(EXP.variants)
    assert record.main(argv) == 0
    assert f"exp: {whole - 2} points measured, 2 were there" in capsys.readouterr().out
    assert len(gpu) == whole + 1 and gpu.count(gpu[2]) == 2
    assert record.main(argv) == 0 and len(gpu) == whole + 1
    frame = record.read("exp", "made-up", Path("mine"))
    assert set(zip(frame["dtype"], frame["M"], frame["N"], strict=True)) == set(gpu)
    assert Path("mine/made-up/machine.json").exists()


def test_points_of_another_torch_are_measured_again(gpu, monkeypatch):
    gpu += ["", "", ""]
    record.main(["exp", "--all", "--out", "mine"])
    monkeypatch.setattr(machines, "versions", lambda *_: {"torch": "99", "triton": "99"})
    assert len(record._left(EXP, Path("mine/made-up/exp.csv"))) == len(record.everything(EXP))


def test_an_operator_that_fails_costs_no_other(gpu, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(record, "OPS", {"exp": EXP, "silu": OPS["silu"], "double": OPS["double"]})

    def run(command, **_):
        ran.append(command[3])
        return subprocess.CompletedProcess(command, -11 if command[3] == "silu" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert record.main(["--all", "--out", "mine"]) == 1
    assert ran == ["exp", "silu", "double"]
    assert "silu failed; the same command goes on with what is missing" in capsys.readouterr().err


def test_all_never_goes_into_the_package(gpu, capsys):
    with pytest.raises(SystemExit):
        record.main(["--all"])
    assert "--all needs --out DIR" in capsys.readouterr().err


def test_it_works_where_it_is_installed_inside_another_project(tmp_path):
    """No checkout: no commit of its own, and none of the project around it."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "src" / "fusebook", site / "fusebook", ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "other"]):
        subprocess.run([*git, *words], check=True)
    script = (
        "from fusebook.measure import machine as m, record as r; print(m.__file__); print('commit', m._commit());"
        "raise SystemExit(r.main(['--all', '--out', 'mine']))"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FUSEBOOK_", "_FUSEBOOK_"))}
    env |= {"PYTHONPATH": os.pathsep.join([str(site), env.get("PYTHONPATH", "")]), "CUDA_VISIBLE_DEVICES": ""}
    ran = warm.run("-c", script, cwd=tmp_path, env=env)
    assert str(site) in ran.stdout and not re.search(r"commit [0-9a-f]{12}$", ran.stdout, re.MULTILINE)
    assert (
        ran.returncode == 1
        and ran.stderr.strip() == "fusebook.measure.record: no CUDA device here; records are taken on a GPU"
    )


# Comparing


def compared(mine, theirs, *argv):
    record.write(mine, "mine")
    record.write(theirs, machines.RECORDS)
    return compare.main(["mine", machines.SHIPPED, *argv])


def test_two_gpus_are_compared_point_by_point(package, capsys):
    silu = made_up(times=3.0, op=OPS["silu"], copy=2e12)
    record.write(silu, "mine")
    record.write(made_up(op=OPS["silu"], slug=machines.SHIPPED), machines.RECORDS)
    assert compared(made_up(times=0.5, copy=2e12), made_up(slug=machines.SHIPPED)) == 0
    told = capsys.readouterr().out
    assert "mine:   Made-up GPU" in told and re.search(r"copy, GB/s +2000 +4000 +0\.500", told)
    assert re.search(r"exp +2 +0\.50. +0\.50. +0\.50. +faster throughout", told)
    assert re.search(r"silu +2 +3\.0. +3\.0. +3\.0. +slower throughout", told)


@pytest.mark.parametrize(
    ("times", "spread", "verdict"),
    [(1.015, 0.0, "alike"), (1.03, 0.0, "slower"), (1.03, 0.05, "alike"), (0.9, 0.05, "faster"), (0.97, 0.05, "alike")],
)
def test_a_verdict_knows_the_noise(package, times, spread, verdict):
    frames = [made_up("64x64", times=t, slug=slug) for t, slug in ((times, "made-up"), (1.0, machines.SHIPPED))]
    for frame in frames:
        frame["gpu_us_20"], frame["gpu_us_80"] = frame["gpu_us"] * (1 - spread), frame["gpu_us"] * (1 + spread)
    found = compare.points(*frames)
    assert list(found["verdict"]) == [verdict] and found["ratio"].iloc[0] == pytest.approx(times, rel=1e-4)


def test_each_gpu_has_a_roof_of_its_own_and_what_is_as_fast_as_another_way_is_ahead(package):
    mine, theirs = made_up("64x64", copy=2e12), made_up("64x64", slug=machines.SHIPPED)
    for frame in (mine, theirs):
        ours, others = frame["variant"].eq("fusebook"), ~frame["variant"].isin(["fusebook", "eager"])
        frame.loc[ours, "gpu_us"] = 1.01 * frame.loc[frame["variant"].eq("eager"), "gpu_us"].item()
        frame.loc[others, "gpu_us"] *= 10
    found = compare.points(mine, theirs)
    for who, frame in (("mine", mine), ("theirs", theirs)):
        ours = frame[frame["variant"] == "fusebook"]
        share = (ours["roof_us"] / ours["gpu_us"]).item()
        assert found[f"{who}, of roof"].item() == pytest.approx(share, rel=1e-4)
    assert [compare._fastest(frame, "fusebook", "cold") for frame in (mine, theirs)] == ["1 of 1"] * 2


def edited(folder):
    file = folder / "made-up" / "exp.csv"
    file.write_text(file.read_text().replace(",ok,", ",no,", 1))


def two_gpus(folder):
    record.write(made_up(slug="another"), folder)


def no_machine(folder):
    (folder / "made-up" / "machine.json").unlink()


def another_version(folder):
    (folder / "made-up" / "machine.json").write_text(json.dumps({"name": "x"}))


@pytest.mark.parametrize(
    ("spoil", "argv", "words"),
    [
        (edited, ["mine"], "not those that were recorded"),
        (two_gpus, ["mine"], "mine holds another, made-up: name one of them, such as mine/another"),
        (no_machine, ["mine"], "mine is neither a folder with a machine.json"),
        (another_version, ["mine"], "not a machine.json of this version"),
        (None, ["no-such"], f"nor a GPU that the package has: {machines.SHIPPED}"),
        (None, ["mine", "--variant", "nobody"], "no point in common that 'nobody' was timed at"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_a_sentence(package, capsys, spoil, argv, words):
    record.write(made_up(), "mine")
    if spoil:
        spoil(Path("mine"))
    assert compare.main(argv) == 1
    told = capsys.readouterr()
    assert words in told.err and told.err.count("\n") == 1 and not told.out


def test_other_sizes_are_no_comparison(package, capsys):
    assert compared(made_up("8x8"), made_up(slug=machines.SHIPPED)) == 1
    assert "have no point in common" in capsys.readouterr().err


# Showing


def test_your_records_are_replayed_first_and_the_packages_where_you_have_none(package, monkeypatch):
    record.write(made_up("64x64", slug="mine"), "mine")
    assert results(EXP, config="64x64").attrs["origin"].machine.name == "Shipped GPU"
    monkeypatch.setenv("FUSEBOOK_RECORDS", "mine")
    assert results(EXP, config="64x64").attrs["origin"].machine.name == "Made-up GPU"
    assert results(EXP, config="64x128").attrs["origin"].machine.name == "Shipped GPU"
    assert machines.slug() == "mine" and machines.recorded().name == "Made-up GPU"
    with pytest.raises(NoResults, match="exp for 9x9"):
        results(EXP, config="9x9")


def test_your_records_of_the_same_gpu_are_not_taken_for_the_packages(package, monkeypatch):
    record.write(made_up("64x64", slug=machines.SHIPPED, name="Yours"), "mine")
    monkeypatch.setenv("FUSEBOOK_RECORDS", "mine")
    assert results(EXP, config="64x64").attrs["origin"].machine.name == "Yours"


def test_a_folder_without_the_records_of_one_gpu_is_refused(package, monkeypatch):
    monkeypatch.setenv("FUSEBOOK_RECORDS", "nothing")
    with pytest.raises(
        FileNotFoundError, match="FUSEBOOK_RECORDS=nothing: .* found those of none; .*--all --out nothing"
    ):
        machines.slug()
    record.write(made_up(), "nothing")
    record.write(made_up(slug="other"), "nothing")
    with pytest.raises(FileNotFoundError, match="found those of made-up, other"):
        machines.slug()
    monkeypatch.setenv("FUSEBOOK_GPU", "other")
    assert machines.slug() == "other"


def test_a_page_that_fails_for_your_gpu_goes_on_for_the_other(package, monkeypatch):
    record.write(made_up(), "mine")
    twins, module = side_by_side.Twins("mine"), type(sys)("__main__")

    def run(code):
        return twins.run(module, lambda: exec(code, vars(module)))

    run("import os; mine = 'FUSEBOOK_RECORDS' in os.environ\ndef twice(): return 2 * mine")
    run("x = twice()")
    assert (twins.names["x"], module.x, twins.stopped) == (2, 0, "")
    run("y = 1 / (x - 2)")
    assert module.y == -0.5 and "ZeroDivisionError" in twins.stopped
    run("z = x + y")
    assert module.z == -0.5


PAGE = '''
"""
Two GPUs
========

A page of two GPUs.
"""

# %%
# Differs.

from fusebook import plots, tables
from fusebook.cards.elementwise import EXP
from fusebook.lesson._show import downloads, table
from fusebook.lesson._results import results

df = results(EXP, config="large")
table(tables.times(df), "Cold")

# %%
# Differs in a picture.

plots.dots(df)

# %%
# Is the same.

table(df[:0], "Said once")

# %%
# A file for each.

downloads(df, "both")
'''


@pytest.mark.slow
def test_the_site_shows_both_side_by_side_in_tabs_that_follow_each_other(tmp_path):
    pytest.importorskip("sphinx_gallery")
    for name in ("conf.py", "CITATION.cff", "docs", "src"):
        ignore = shutil.ignore_patterns("auto_examples", "auto_downloads", "__pycache__", "*.rst")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "docs" / "index.rst").write_text("Toy\n===\n\n.. toctree::\n\n   auto_examples/index\n")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "GALLERY_HEADER.rst").write_text("Pages\n=====\n\n")
    (tmp_path / "examples" / "plot_100_two.py").write_text(PAGE.lstrip())
    record.write(made_up("large", times=7.0), tmp_path / "my-gpu")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FUSEBOOK_", "_FUSEBOOK_"))}
    env |= {"FUSEBOOK_RECORDS": "my-gpu"}
    path = os.pathsep.join([str(tmp_path / "src"), env.get("PYTHONPATH", "")])
    words = ["-m", "sphinx", "-W", "-n", "-c", ".", "docs", "build/html"]
    core = min(os.sched_getaffinity(0))
    built = warm.run(*words, cwd=tmp_path, env=env | {"PYTHONPATH": path}, core=core)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "build/html/auto_examples/plot_100_two.html").read_text()
    labels = re.findall(r'<label [^>]*data-sync-group="gpu" data-sync-id="(\w+)"[^>]*>\s*([^<]+)<', page)
    assert [(key, label.strip()) for key, label in labels] == [
        ("yours", "Yours: Made-up GPU"),
        ("shipped", "NVIDIA H100 80GB HBM3, shipped"),
    ] * 3  # the table, the picture, and the file
    times = [re.findall(r"<td>([\d,.]+)</td>", part) for part in page.split("sd-tab-content")]
    assert times[1] and times[2] and times[1] != times[2]
    assert len(re.findall(r"<img[^>]*sphx-glr-single-img", page)) == 2
    assert page.count("Said once: none.") == 1  # in no tabs
    offered = tmp_path / "build/html/auto_examples/downloads"
    files = [offered / "yours" / "both.csv", offered / "both.csv"]
    assert files[0].read_text() != files[1].read_text()
    assert all(f'href="downloads/{file.relative_to(offered)}"' in page for file in files)
