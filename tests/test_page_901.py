"""The page of problems that nobody chose replays, with made-up times of all operators."""

import random
import shutil

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from fusebook import page
from fusebook.cards import OPS
from fusebook.measure import bench, explore, record
from fusebook.measure import machine as machines
from fusebook.page import _place
from test_pages import EXAMPLES, run_page
from toy import machine

PAGE = EXAMPLES / "plot_901_shapes_nobody_chose.py"


def rows(op, case, dims, rng):
    """Every variant of a card at a problem; quack refuses, and others take what chance says."""
    sizes = {k: v for k, v in dims.items() if k not in ("dtype", "layout")}
    for name, v in explore._chosen(op, ()).items():
        row = dict.fromkeys(explore.COLUMNS, float("nan")) | sizes
        row |= {"case": case, "op": op.name, "variant": name, "dtype": dims["dtype"], "layout": dims["layout"]}
        row |= {"status": "ok", "note": "", "error": 1e-7, "tolerance": 1e-5, "math": v.math or ""}
        row |= {"gpu_us": 10 * rng.uniform(0.5, 2), "launch_us": 8.0, "read_bytes": 2**20, "write_bytes": 2**20}
        if name == "quack" and case % 2:
            row |= {"status": "refused", "note": "made up", "gpu_us": float("nan"), "launch_us": float("nan")}
        if v.math and dims["dtype"] != "float32":
            row |= {"status": "refused", "note": "made up", "gpu_us": float("nan"), "launch_us": float("nan")}
        yield row


@pytest.fixture
def recorded(request, tmp_path, monkeypatch):
    """Records of all operators, or of those that are named, with the host's clock or without."""
    names, host = getattr(request, "param", (OPS, True))
    monkeypatch.setattr(machines, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(_place, "live", lambda: False)
    monkeypatch.setattr(bench, "missing", lambda v: None)  # the same rows, with a GPU and without
    monkeypatch.chdir(tmp_path)
    on = machine(slug="nvidia-h200", name="Made-up GPU")
    for op in map(OPS.get, names):
        if explore.explorable(op):
            run = explore._Run(op, 100, 4, host, (), None)
            run.file = explore.path(on.slug, op.name)
            for case, dims in enumerate(explore.problems(op, 100, 4)):
                run.take(case, list(rows(op, case, dims, random.Random(case))))
    columns = ["problem", "ours_us", "torch", "torch_us", "best", "best_us", "over torch", "over all"]
    users = pd.DataFrame([["softmax 8 9", 2.0, "eager", 1.0, "quack", 1.0, 2.0, 2.0]], columns=columns)
    users.attrs["origin"] = bench.Origin(on, measured=True, page="explored_reported")
    record.write(users, machines.RECORDS, "pages/explored_reported")
    yield
    plt.close("all")


def test_the_page_replays(recorded):
    shown = run_page(PAGE)
    told = "\n".join(map(repr, shown))
    worst = pd.concat(part.frame for part in shown if "ten worst" in getattr(part, "caption", ""))
    count = sum(explore.explorable(op) for op in OPS.values())
    assert f"{4 * count} problems of {count} operators, of seed 100, were drawn" in told
    lines = worst.index.to_series()
    assert lines.str.startswith("explore.problem(").all()
    # A product in float32 and in TF32 stands there twice, each beside the best of its own arithmetic.
    assert not worst.reset_index().duplicated(["line", "best"]).any()
    assert set(lines.str.split("'").str[1]) == {name for name, op in OPS.items() if explore.explorable(op)}
    assert "missed: At each of these shapes ours takes at most 1.15 times" in told
    assert f"known of {4 * count} of {4 * count} problems" in told and "as paid" in told
    assert all(name in told for name in ("to 16 MiB", "permuted", "Replayed from the record of Made-up GPU"))


@pytest.mark.parametrize("recorded", [(("softmax", "concat_gemm"), False)], indirect=True)
def test_the_page_says_which_operators_lack_the_hosts_clock_and_bears_that_others_are_missing(recorded):
    told = "\n".join(map(repr, run_page(PAGE)))
    assert "8 problems of 2 operators" in told
    assert "known of 0 of these 8 problems. Without the host's clock: " in told
    assert "not measured: As paid" in told and "Another way is faster at none of 0 problems." in told


def test_records_of_ones_own_are_shown_before_the_packages(recorded, tmp_path, monkeypatch):
    own = tmp_path / "own" / "nvidia-toy"
    shutil.copytree(machines.RECORDS / "nvidia-h200", own)
    for file in (own / "explored").iterdir():
        if file.stem != "softmax":
            file.unlink()
    monkeypatch.setenv("FUSEBOOK_RECORDS", str(own.parent))
    assert set(page.explored()) == {"softmax"}
    shutil.rmtree(own / "explored")
    assert len(page.explored()) > 1
