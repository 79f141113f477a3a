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


def problem(op, check_only, **dims):
    """A problem without computing it: quack refuses some, and others take what chance says."""
    rng = random.Random(repr(dims))
    sizes = {k: v for k, v in dims.items() if k not in ("dtype", "layout")}
    columns = [*explore.COLUMNS[:5], *sizes, *explore.COLUMNS[5:]]
    return pd.DataFrame(list(rows(op, dims, sizes, rng)), columns=columns)


def rows(op, dims, sizes, rng):
    for name, v in explore._compared(op).items():
        row = dict.fromkeys(explore.COLUMNS, float("nan")) | sizes
        row |= {"case": 0, "op": op.name, "variant": name, "dtype": dims["dtype"], "layout": dims["layout"]}
        row |= {"status": "ok", "note": "", "error": 1e-7, "tolerance": 1e-5, "math": v.math or ""}
        row |= {"gpu_us": 10 * rng.uniform(0.5, 2), "read_bytes": 2**20, "write_bytes": 2**20}
        if (name == "quack" and rng.random() < 0.5) or (v.math and dims["dtype"] != "float32"):
            row |= {"status": "refused", "note": "made up", "gpu_us": float("nan")}
        yield row


@pytest.fixture
def recorded(request, tmp_path, monkeypatch):
    """Records of all operators, or of those that are named."""
    names = getattr(request, "param", OPS)
    monkeypatch.setattr(machines, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(_place, "live", lambda: False)
    monkeypatch.setattr(bench, "missing", lambda v: None)  # the same rows, with a GPU and without
    monkeypatch.chdir(tmp_path)
    on = machine(slug="nvidia-h200", name="Made-up GPU")
    with monkeypatch.context() as patch:
        patch.setattr(explore, "_gpu", lambda: True)
        patch.setattr(explore, "problem", problem)
        patch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA H200")
        for op in map(OPS.get, names):
            if explore.explorable(op):
                explore.explore(op, cases=4, root=machines.RECORDS)
    columns = ["problem", "fusebook_us", "torch", "torch_us", "best", "best_us", "over torch", "over all"]
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
    assert "Every operator that has a target meets it." in told
    assert all(name in told for name in ("to 16 MiB", "permuted", "Replayed from the record of Made-up GPU"))


@pytest.mark.parametrize("recorded", [("softmax", "concat_gemm")], indirect=True)
def test_the_page_replays_records_of_some_operators(recorded):
    told = "\n".join(map(repr, run_page(PAGE)))
    assert "8 problems of 2 operators" in told and "Another way is faster at none of 0 problems." in told


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
