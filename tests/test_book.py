"""Pages about all operators: *Look up*, *Random problems* and *History*."""

import random
import re
import shutil

import matplotlib.pyplot as plt
import pandas as pd
import pytest

import fusebook
import style
import synthetic
from fusebook.cards import OPS, _calls
from fusebook.cards.softmax import SOFTMAX
from fusebook.lesson import _book, _place, _results, _verdicts, evidence
from fusebook.lesson.evidence import history
from fusebook.measure import bench, explore, record
from fusebook.measure import machine as machines
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
    on = machine(slug=machines.SHIPPED, name="Made-up GPU")
    with monkeypatch.context() as patch:
        patch.setattr(explore, "_gpu", lambda: True)
        patch.setattr(explore, "problem", problem)
        patch.setattr("torch.cuda.get_device_name", lambda *_: machines.SHIPPED)
        for op in map(OPS.get, names):
            if explore.explorable(op):
                explore.explore(op, cases=4, root=machines.RECORDS)
    columns = ["problem", "fusebook_us", "torch", "torch_us", "best", "best_us", "over torch", "over all"]
    users = pd.DataFrame([["softmax 8 9", 2.0, "eager", 1.0, "quack", 1.0, 2.0, 2.0]], columns=columns)
    users.attrs["origin"] = bench.Origin(on, measured=True, page="explored_reported", code="0")
    record.write(users, machines.RECORDS, "pages/explored_reported")
    yield
    plt.close("all")


def test_random_problems_replay_in_five_sentences_and_a_figure(recorded):
    shown = run_page(PAGE)
    said = repr(shown[0])
    count = sum(explore.explorable(op) for op in OPS.values())
    assert said.startswith(f"{4 * count} problems of {count} operators were drawn at random, record of Made-up GPU")
    assert "Fusebook is correct at all of them." in said and len(said.splitlines()) == 5
    assert "Sizes that users reported. 0 of 1 take at most 1.02 times as long, and the worst 2.00 times." in said
    assert "operators meet theirs. These do not: " in said
    assert len(shown[1].get_yticklabels()) == count
    assert style.faults(said) == []


@pytest.mark.parametrize("recorded", [("softmax", "concat_gemm")], indirect=True)
def test_random_problems_replay_records_of_some_operators(recorded):
    assert "8 problems of 2 operators" in repr(run_page(PAGE)[0])


def test_records_of_ones_own_are_shown_before_the_packages(recorded, tmp_path, monkeypatch):
    own = tmp_path / "own" / "nvidia-toy"
    shutil.copytree(machines.RECORDS / machines.SHIPPED, own)
    for file in (own / "explored").iterdir():
        if file.stem != "softmax":
            file.unlink()
    monkeypatch.setenv("FUSEBOOK_RECORDS", str(own.parent))
    assert set(_results.explored()) == {"softmax"}
    shutil.rmtree(own / "explored")
    assert len(_results.explored()) > 1


# Look up


@pytest.fixture
def found(monkeypatch):
    """A page that finds a made-up record of softmax on one GPU."""
    frame = synthetic.frame(SOFTMAX, "small,medium,large", "float32,bfloat16").assign(stale="")
    made = _book.Book()
    made._gpus = {"Made-up": {"softmax": frame}}
    return made, frame


def test_every_result_is_in_the_table_with_memory_and_call(found):
    _, df = found
    table, best = _book._every("softmax", df)
    assert len(table) == len(best) == len(df)
    large = (table["dtype"] == "float32") & (table["size"] == "M=65536 N=781")
    at = table[large].set_index("implementation")
    assert at.loc["quack", "call"] == "(does not take it)"
    assert (
        at.loc["torch", "call"] == "torch.softmax(x, -1)" and at.loc["eager", "call"] == "fusebook.softmax_eager(...)"
    )
    own = df[large & (df["variant"] == "fusebook")].iloc[0]
    assert tuple(at.loc["Fusebook", ["GPU time, us", "memory, MB"]]) == (own["gpu_us"], own["peak_bytes"] / 1e6)
    assert table["implementation"][large & best["GPU time, us"]].tolist() == ["Fusebook"]
    other = df.assign(math=df["variant"].map({"eager": "tf32"}).fillna(""))  # alone of its arithmetic
    table, best = _book._every("softmax", other)
    assert set(table["implementation"][large & best["GPU time, us"]]) == {"eager", "Fusebook"}


def test_look_up_counts_results_and_says_what_to_take(found):
    made, df = found
    shown = made.look_up()
    assert f"{len(df):,} results of 1 operators on Made-up. Of Fusebook's results none is incorrect." in repr(shown)
    assert shown._repr_html_().count("<tr>") == len(df) + 1
    assert "quack, Fusebook" in made.take()._repr_html_()
    counts = made.counts().frame
    assert list(counts.index) == ["Made-up, GPU time", "Made-up, end to end", "Made-up, latency"]
    assert counts["sizes and dtypes"].tolist() == [f"{len(df.drop_duplicates(['dtype', 'M', 'N']))}"] * 3


def test_every_implementation_that_a_reader_chooses_from_has_a_call():
    for operator, calls in _calls._CALLS.items():
        for name in OPS[operator].variants:
            assert _calls.call(OPS[operator], name) or not _verdicts.group(OPS[operator], name), (operator, name)
        for name in re.findall(r"fusebook\.(\w+)", " ".join(calls.values())):
            assert hasattr(fusebook, name), name


# History


def test_advice_of_2012_is_judged_by_records_alone(monkeypatch):
    monkeypatch.delenv("FUSEBOOK_GPU", raising=False)
    frames = evidence.Frames(history)
    assert len({claim.id for claim in history.CLAIMS}) == len(history.CLAIMS)
    for one in history.ADVICE:
        outcome = evidence.evaluate(one.claim, frames)
        assert outcome.holds is not None and "not measured" not in outcome.text, one.claim.id
        assert style.faults(one.now) == [] and style.faults(outcome.text) == [], one.claim.id


def test_history_has_a_section_for_each_source_and_its_statements(monkeypatch):
    monkeypatch.delenv("FUSEBOOK_GPU", raising=False)
    text = (EXAMPLES / "plot_001_using_the_gpu.py").read_text(encoding="utf-8")
    assert len(re.findall(r"^# (20\d\d): .*\n# -+$", text, re.MULTILINE)) == len(history.SOURCES)
    assert all(f'book.statements("{lesson}")' in text for about in history.SOURCES.values() for lesson in about)
    book = _book.Book()
    assert "Theano, 2012. " in repr(book.history())
    assert "4x faster than the Torch JIT" in book.statements("plot_102_softmax")._repr_html_()
    assert repr(book.statements("plot_without_evidence")) == ""
