"""The page of problems that nobody chose replays, with made-up times of all operators."""

import random

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from fusebook import bench, explore, record
from fusebook import machine as machines
from fusebook.cards import OPS
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
        row |= {"status": "ok", "note": "", "score": 1e-7, "limit": 1e-5, "math": v.math or ""}
        row |= {"cold_us": 10 * rng.uniform(0.5, 2), "host_us": 8.0, "read_bytes": 2**20, "write_bytes": 2**20}
        if name == "quack" and case % 2:
            row |= {"status": "refused", "note": "made up", "cold_us": float("nan"), "host_us": float("nan")}
        yield row


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(_place, "live", lambda: False)
    monkeypatch.chdir(tmp_path)
    on = machine(slug="nvidia-h200", name="Made-up GPU")
    for op in OPS.values():
        if explore.explorable(op):
            run = explore._Run(op, 100, 4, True, (), None)
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
    assert f"{4 * count} problems of {count} operators, of seed 100" in told
    lines = worst.index.to_series()
    assert lines.str.startswith("explore.problem(").all() and not lines.duplicated().any()
    assert set(lines.str.split("'").str[1]) == {name for name, op in OPS.items() if explore.explorable(op)}
    assert "false: At each of these shapes ours takes at most 1.15 times" in told
    assert all(name in told for name in ("to 16 MiB", "permuted", "Replayed from the record of Made-up GPU"))
