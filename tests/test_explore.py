"""Problems that nobody chose: the law they are drawn by, and that a wrong result, a cut and an edit do not pass."""

import dataclasses
import math
import random
import sys
import types
from collections import Counter
from typing import NamedTuple

import pandas as pd
import pytest
import torch

import strategies
from fusebook import plots
from fusebook.cards import OPS, _draws
from fusebook.lesson import _place
from fusebook.lesson._results import NoResults, options
from fusebook.lesson._results import explored as explored_by_a_page
from fusebook.measure import bench, check, explore, inputs, record, timing
from fusebook.measure import machine as machines
from fusebook.measure.op import Variant
from toy import machine, toy, variant

MANY = 1500


def drawn(op, count=MANY, seed=0):
    rng = random.Random(seed)
    return [op.draw(rng) for _ in range(count)]


# The law


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_draw_is_a_problem_of_its_card(op):
    asked = {*next(iter(op.configs.values()))[0], "dtype", "layout"}
    for dims in drawn(op, 300):
        assert set(dims) == asked
        # Of a head, P elements may be left as they are: none or some.
        assert all(isinstance(v, str) or (isinstance(v, int) and v >= (key != "P")) for key, v in dims.items())
        assert dims["dtype"] in bench.DTYPES and dims["layout"] in inputs.LAYOUTS
    assert drawn(op, 20) == drawn(op, 20) != drawn(op, 20, seed=1)


#: Operators whose rows are the tokens of one step of decoding, at most 64.
DECODE = {"quantized_matmul"}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_no_draw_moves_more_than_is_allowed(op):
    most = 0
    for dims in drawn(op):
        sizes = {k: v for k, v in dims.items() if k not in ("dtype", "layout")}
        cost = op.cost(_draws.itemsize(dims["dtype"]), **sizes)
        most = max(most, cost.read + cost.write)
    assert _draws.BYTES / (16 if op.name in DECODE else 8) < most <= _draws.BYTES


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_draws_are_of_all_kinds(op):
    found = drawn(op)
    layouts = Counter(dims["layout"] for dims in found)
    assert 0.77 < layouts["contiguous"] / MANY < 0.90, "80 %, or 80 of 92 without rows that lie apart"
    assert {"sliced", "offset"} < set(layouts)
    assert len({dims["dtype"] for dims in found}) >= 2
    first = next(k for k, v in found[0].items() if isinstance(v, int))
    few = sum(dims[first] <= 64 for dims in found) / MANY
    assert few > 0.05 and (op.name in DECODE or any(dims[first] > 10_000 for dims in found))


# Where widths from models are drawn, and how the card calls them.
WIDTHS = {
    "softmax": "N",
    "softmax_backward": "N",
    "rms_norm": "N",
    "silu": "N",
    "add_add_multiply": "N",
    "swiglu": "K",
    "concat_gemm": "K",
    "embedding_backward": "D",
    "scatter_nd_of_shape": "D",
}


@pytest.mark.parametrize(("name", "width"), WIDTHS.items())
def test_most_widths_are_of_models_and_few_are_odd(name, width):
    widths = [dims[width] for dims in drawn(OPS[name])]
    odd = sum(w % 2 and w not in _draws.VOCABULARIES for w in widths) / MANY
    real = sum(w in _draws.HIDDEN + _draws.VOCABULARIES for w in widths) / MANY
    assert abs(odd - 0.10) < 0.05 and 0.60 < real < 0.75


def test_dtypes_and_layouts_are_drawn_by_their_shares():
    rng = random.Random(0)
    dtypes = Counter(_draws.dtype(rng) for _ in range(100 * MANY))
    shares = {"bfloat16": 60, "float32": 25, "float16": 13, "float64": 2}
    assert {name: round(n / MANY) for name, n in dtypes.items()} == shares
    two = Counter(_draws.dtype(rng, (torch.float32, torch.bfloat16)) for _ in range(85 * MANY))
    assert {name: round(n / MANY) for name, n in two.items()} == {"bfloat16": 60, "float32": 25}
    layouts = Counter(_draws.layout(rng) for _ in range(100 * MANY))
    apart = layouts["across"] + layouts["permuted"]
    found = [round(n / MANY) for n in (layouts["contiguous"], layouts["sliced"] + layouts["offset"], apart)]
    assert found == [80, 12, 8]
    assert set(_draws.layout(rng, _draws.ROWS) for _ in range(MANY)) == {"contiguous", *_draws.ROWS}


def test_sizes_are_log_uniform():
    rng = random.Random(0)
    octaves = Counter(_draws.log_uniform(rng, 1, 2**12 - 1).bit_length() for _ in range(12 * MANY))
    assert set(octaves) == set(range(1, 13))
    assert all(abs(n / MANY - 1) < 0.15 for n in octaves.values())
    assert {_draws.log_uniform(rng, 3, 4) for _ in range(50)} == {3, 4}
    assert _draws.count(rng, 0) == 1 and _draws.size(rng, 5, 5, ()) == 5


# The layouts


@pytest.mark.parametrize("how", inputs.LAYOUTS)
@pytest.mark.parametrize("across", [False, True])
def test_a_layout_changes_no_value(how, across):
    x = torch.arange(6.0 * 10).view(6, 10)
    x = x.mT.contiguous().mT if across else x
    y = inputs.laid(x, how)
    assert torch.equal(y.reshape(6, 10), x)
    if how in ("sliced", "offset"):
        assert y.mT.is_contiguous() is (across and how == "offset")
        assert (y.stride(0) == 1) is across, "what lies across stays so"


def test_layouts_are_what_they_are_called():
    x = torch.arange(6.0 * 10).view(6, 10)
    assert inputs.laid(x, "contiguous") is x
    assert inputs.laid(x, "across").stride() == (1, 6)
    permuted = inputs.laid(x, "permuted")
    assert permuted.shape == (2, 3, 10) and permuted.stride() == (1, 20, 2)
    sliced = inputs.laid(x, "sliced")
    assert sliced.stride() == (74, 1) and sliced.as_strided((6, 74), (74, 1))[:, 10:].isnan().all()
    offset = inputs.laid(x, "offset")
    assert offset.is_contiguous() and offset.storage_offset() == 1
    flat, none = torch.ones(3), torch.ones(0, 3)
    assert inputs.laid(flat, "across") is flat and inputs.laid(none, "sliced") is none
    with pytest.raises(ValueError, match="contiguous, across, permuted, sliced, offset, got 'round'"):
        inputs.laid(x, "round")


def test_a_problem_lays_its_matrices_out_and_nothing_else():
    dims = {"M": 6, "N": 8, "y": "row", "dtype": "float32", "layout": "permuted"}
    x, y = OPS["multiply"].made(dims, "cpu")
    assert x.shape == (2, 3, 8) and y.shape == (1, 8)
    x, gate, up = OPS["swiglu"].made({"M": 3, "K": 8, "N": 16, "dtype": "bfloat16", "layout": "offset"}, "cpu")
    assert x.storage_offset() == 1 and gate.storage_offset() == up.storage_offset() == 0
    assert x.dtype == torch.bfloat16


# Exploring


@pytest.fixture
def op():
    return toy(fusebook=variant(lambda x: x + x), slow=variant(lambda x: 2 * x))


@pytest.fixture
def gpu(monkeypatch):
    """Times of a device that is not there: the variant's name tells how long it takes."""
    took = {"fusebook": 10e-6, "honest": 8e-6, "slow": 30e-6}

    def cold(functions, **_):
        return {name: timing.Quantiles(*[took[name]] * 3, 1) for name in functions}

    monkeypatch.setattr(explore, "_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "Test GPU")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: types.SimpleNamespace(multi_processor_count=3))
    monkeypatch.setattr(timing, "cold", cold)


def explored(op, **options):
    return explore.explore(op, **{"cases": 3, **options})


def test_problems_are_checked_and_timed(op, gpu):
    frame = explored(op)
    assert len(frame) == 9 and (frame["status"] == "ok").all()
    assert list(frame.columns) == [*explore.COLUMNS[:5], "M", "N", *explore.COLUMNS[5:]]
    found = explore.ratios(op, frame)
    assert list(found["over all"]) == [1.25] * 3 and set(found["best"]) == {"honest"}
    assert explore.problem(op, **op.problem(100, 0))["gpu_us"].tolist() == frame["gpu_us"].tolist()[:3]


def test_fusebook_is_compared_with_what_a_user_would_call_instead(gpu):
    half = {"M": 3, "N": 4, "dtype": "float16", "layout": "contiguous"}
    ways = {
        "fusebook, slowly": variant(lambda x: x + x),
        "TF32": variant(lambda x: x + x, math="tf32"),
        "C": variant(lambda x: x + x, on_cpu=True),
        "NumPy": variant(lambda x: x + x),
        "max-autotune": variant(lambda x: x + x),
    }
    op = dataclasses.replace(toy(fusebook=variant(lambda x: x + x), **ways), draw=lambda rng: half)
    assert set(explore._compared(op)) == {"honest", "fusebook", "TF32"}
    frame = explored(op, check_only=True, cases=1)
    assert set(frame["variant"]) == {"honest", "fusebook"}, "halves are not multiplied in TF32"
    found = explore.ratios(op, frame.assign(gpu_us=frame["variant"].map({"honest": 8.0, "fusebook": 10.0})))
    assert list(found["best"]) == ["honest"] and list(found["over all"]) == [1.25]
    assert explore.ratios(op, frame.assign(gpu_us=frame["variant"].map({"fusebook": 10.0}))).empty


@pytest.mark.parametrize(("name", "target"), [("toy", ""), ("softmax", "missed"), ("swiglu", "missed")])
def test_a_summary_is_of_all_problems_and_knows_the_target(op, gpu, name, target):
    op = dataclasses.replace(op, name=name)
    frame = explored(op, cases=11)
    own = frame["variant"] == "fusebook"
    frame.loc[own, "gpu_us"] = [8 * (1 + case / 10) for case in range(11)]
    told = explore.summary(op, frame).loc["over torch"]
    assert told.tolist()[:4] == pytest.approx([11, 1.5, 1.9, 2.0]) and told["target"] == target
    frame.loc[own, "gpu_us"] = [7.0] * 10 + [9.0]
    assert explore.summary(op, frame).loc["over torch", "target"] == ("met" if target else "")
    assert explore.summary(op, frame.head(0)).loc["over torch", ["problems", "target"]].tolist() == [0, ""]


def test_targets_are_of_operators():
    names = [name for group in explore.TARGETS.values() for name in group]
    assert len(set(names)) == len(names) and set(names) < set(OPS)


def test_the_best_of_torch_needs_nothing_but_torch(op, gpu, monkeypatch):
    monkeypatch.setattr(bench, "missing", lambda _: "")
    op = toy(fusebook=variant(lambda x: x + x), slow=Variant(lambda x: 2 * x, needs=("cuda", "a_library")))
    monkeypatch.setattr(timing, "cold", lambda fs, **_: {n: timing.Quantiles(*[len(n) * 1e-6] * 3, 1) for n in fs})
    found = explore.ratios(op, explored(op))
    assert set(found["torch"]) == {"honest"} and set(found["best"]) == {"slow"}
    assert list(found["over torch"]) == [8 / 6] * 3 and list(found["over all"]) == [2.0] * 3


def test_an_incorrect_result_ends_it_with_the_line_that_shows_it(op, monkeypatch):
    incorrect = toy(fusebook=variant(lambda x: x * (3 if x.shape[0] > 4 else 2)))
    with pytest.raises(explore.Incorrect, match="error") as error:
        explored(incorrect, cases=20, check_only=True)
    line = str(error.value).splitlines()[-1]
    monkeypatch.setattr(explore, "OPS", {"toy": incorrect})
    with pytest.raises(explore.Incorrect):
        exec(line)
    monkeypatch.setattr(explore, "OPS", {"toy": op})
    exec(line)


def test_a_failure_of_fusebook_ends_it_too():
    def fails(x):
        raise RuntimeError("no such thing")

    with pytest.raises(explore.Incorrect, match="fusebook is failed: RuntimeError: no such thing"):
        explored(toy(fusebook=variant(fails)), check_only=True)


def test_memory_for_a_result_is_spoiled_before_each_call(monkeypatch):
    log = []
    monkeypatch.setattr(inputs, "poison", lambda outputs: log.append([tuple(o.shape) for o in outputs]))
    frame = explored(toy(fusebook=variant(lambda x: log.append("call") or x + x)), cases=1, check_only=True)
    shape = tuple(frame[["M", "N"]].iloc[0])
    assert log[log.index("call") - 1] == [shape]


def test_what_others_do_wrong_is_noted_and_not_timed(gpu):
    def refuses(x):
        raise NotImplementedError("takes nothing")

    op = toy(fusebook=variant(lambda x: x + x), bad=variant(torch.zeros_like), refusing=variant(refuses))
    frame = explored(op)
    bad = frame[frame["variant"] == "bad"]
    assert set(bad["status"]) == {"wrong"} and bad["gpu_us"].isna().all() and (bad["error"] >= 0.5).all()
    refused = frame[frame["variant"] == "refusing"]
    assert set(refused["status"]) == {"refused"} and set(refused["note"]) == {"takes nothing"}


def test_what_waits_for_the_device_has_no_time(op, gpu, monkeypatch):
    cold = timing.cold
    monkeypatch.setattr(timing, "cold", lambda fs, **_: cold(fs) | {"slow": None})
    frame = explored(op)
    assert frame[frame["variant"] == "slow"]["gpu_us"].isna().all() and len(explore.ratios(op, frame)) == 3


def test_memory_that_does_not_suffice_is_noted(op, gpu, monkeypatch):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("no memory\nmore lines")

    monkeypatch.setattr(timing, "cold", full)
    frame = explored(op, cases=1)
    assert set(frame["status"]) == {"out of memory"} and set(frame["note"]) == {"no memory"}
    assert explore.ratios(op, frame).empty


def test_seconds_end_it(op, gpu, tmp_path):
    frame = explored(op, seconds=1e-9, root=tmp_path)
    assert frame.empty and list(frame.columns)[:2] == ["case", "op"]


def test_a_run_that_was_cut_off_continues(op, gpu, tmp_path, monkeypatch):
    explored(op, root=tmp_path)
    file = explore.path("test-gpu", "toy", tmp_path)
    before, about = explore._load(file)
    about.pop("format")
    record._save(file, "explored/toy", before[before["case"] < 2], **about)  # it ended before the last problem
    called = []
    monkeypatch.setattr(inputs, "poison", called.append)
    frame = explored(op, root=tmp_path, cases=4)
    assert len(called) == 2 * 3, "the problem that was cut off, and the fourth, by three implementations"
    assert list(frame["case"]) == sorted([0, 1, 2, 3] * 3)
    again = explore.read(op, "test-gpu", tmp_path)
    pd.testing.assert_frame_equal(again, frame, check_dtype=False, rtol=1e-5)
    assert again.attrs["seed"] == "100" and again.attrs["origin"].stale == ()


def test_another_seed_begins_again(op, gpu, tmp_path):
    explored(op, root=tmp_path)
    frame = explored(op, root=tmp_path, seed=101, cases=2)
    assert set(frame["case"]) == {0, 1} and len(explore.read(op, "test-gpu", tmp_path)) == 6


@pytest.mark.parametrize("what", ["a number", "a row gone", "two rows"])
def test_an_edited_file_is_refused(op, gpu, tmp_path, what):
    explored(op, root=tmp_path)
    file = explore.path("test-gpu", "toy", tmp_path)
    lines = file.read_text().splitlines(keepends=True)
    match what:
        case "a number":
            lines[3] = lines[3].replace(",10,", ",9,")
        case "a row gone":
            del lines[4]
        case "two rows":
            lines[3], lines[4] = lines[4], lines[3]
    file.write_text("".join(lines))
    with pytest.raises(record.RecordError, match="toy.csv"):
        explore.read(op, "test-gpu", tmp_path)


def test_a_missing_file_names_the_command(op, tmp_path):
    with pytest.raises(record.RecordError, match=r"python -m fusebook.measure.explore toy --seed 100"):
        explore.read(op, "test-gpu", tmp_path)


def test_seeds_to_tune_by_are_not_recorded(op, gpu):
    with pytest.raises(ValueError, match="from 100 up"):
        explored(op, seed=99, root=machines.RECORDS)


def test_small_problems_keep_what_makes_them_hard():
    small = explore._small({"M": 1, "N": 50257, "K": 8192, "D": 100, "law": "zipf"})
    assert small == {"M": 1, "N": 16 + 50257 % 32, "K": 16, "D": 20, "law": "zipf"} and small["N"] % 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_problems_are_only_checked(capsys):
    assert explore.main(["double"]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "--check-only" in told
    assert explore.main(["double", "--check-only", "--cases", "2"]) == 0
    assert capsys.readouterr().out.strip() == "double: 2 problems"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_wrong_result_is_a_failure_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr(explore, "OPS", {"toy": toy(fusebook=variant(lambda x: 3 * x))})
    assert explore.main(["toy", "--check-only", "--cases", "2"]) == 1
    assert "explore.problem('toy'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        *(["no_such_op"], ["double", "--cases", "0"], ["double", "--seed", "-1"], []),
        *(["double", "--seconds", "0"], ["double", "--seconds", "nan"], ["double", "--without", "quack"]),
    ],
)
def test_nonsense_on_the_command_line_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        explore.main(argv)
    assert stop.value.code == 2 and capsys.readouterr().err


def test_every_operator_of_fusebook_can_be_explored():
    for op in OPS.values():
        if explore.explorable(op):
            assert explore.fusebooks(op) in explore._compared(op) or not torch.cuda.is_available()
            assert explore._torchs(op)
    assert [op.name for op in OPS.values() if not explore.explorable(op)] == ["onnxruntime_nodes"]


# Pages


@pytest.fixture
def recorded(op, gpu, tmp_path, monkeypatch):
    """Three problems of the toy on a made-up GPU, as a page finds them."""
    monkeypatch.setattr(machines, "RECORDS", tmp_path)
    monkeypatch.setattr(sys.modules["fusebook.lesson._results"], "OPS", {"toy": op})
    monkeypatch.setenv("FUSEBOOK_GPU", "test-gpu")
    monkeypatch.setattr(_place, "live", lambda: False)
    machines.save(machine(), tmp_path / "test-gpu" / "machine.json")
    explored(op, root=tmp_path)
    return tmp_path


def test_a_page_replays_what_was_explored(recorded):
    found = explored_by_a_page(seed=7)
    assert list(found) == ["toy"] and len(found["toy"]) == 9
    attrs = found["toy"].attrs
    origin = attrs["origin"]
    assert attrs["seed"] == "100" and origin.machine.name == "Test GPU" and origin.page == "toy-explored"
    assert not origin.measured and origin.stale == () and origin.date and origin.path.name == "toy.csv"


def test_a_page_without_a_record_names_the_command(recorded, monkeypatch):
    monkeypatch.setenv("FUSEBOOK_GPU", "another-gpu")
    with pytest.raises(NoResults, match="python -m fusebook.measure.explore all --seed 100"):
        explored_by_a_page()


def test_a_page_explores_where_there_is_a_gpu_and_leaves_the_record_to_the_command(recorded, monkeypatch, tmp_path):
    monkeypatch.setattr(_place, "live", lambda: True)
    monkeypatch.setattr(machines, "here", machine)
    found = explored_by_a_page(seed=105, cases=2)
    assert set(found["toy"]["case"]) == {0, 1} and found["toy"].attrs["origin"].machine == machine()
    monkeypatch.setenv("_FUSEBOOK_RECORD", str(tmp_path / "new"))
    assert not explored_by_a_page(seed=105, cases=2)["toy"].attrs["origin"].measured
    assert not (tmp_path / "new").exists(), "forty seconds of a page would replace twenty minutes"


def test_options_of_a_page(monkeypatch, capsys):
    assert vars(options(seed=100, words="")) == {"seed": 100, "words": ""}
    monkeypatch.setattr(_place, "script", lambda: True)
    monkeypatch.setattr("sys.argv", ["page", "--seed", "7", "--words", "a,b"])
    assert vars(options(seed=100, words="")) == {"seed": 7, "words": "a,b"}
    monkeypatch.setattr("sys.argv", ["page", "--seed", "-7"])
    with pytest.raises(SystemExit):
        options(seed=100)
    assert "expected a whole number from 0 up, got '-7'" in capsys.readouterr().err


def test_a_spread_shows_each_ratio_once():
    ax = plots.spread({"a": pd.Series([0.5, 2.0, None]), "b": pd.Series([], dtype=float)}, title="t", xlabel="x")
    dots = [x for line in ax.lines if line.get_marker() == "o" for x in line.get_xdata()]
    assert dots == [0.5, 2.0] and ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["b", "a"]
    medians = [line.get_xdata()[0] for line in ax.lines if line.get_linewidth() == 2 and line.get_marker() != "o"]
    assert medians == [1.25]


# Rows alone


def by_count(x):
    """Right, and a little different where rows are few: as what sums in parts is."""
    return 2 * x * (1 + 2**-23) if len(x) < 4 else 2 * x


def test_rows_that_depend_on_their_number_are_found():
    op = toy()
    for rows in (5, 40):
        x = inputs.rough(inputs.generator(0, "cpu"), (rows, 7), torch.float32)
        assert check.alone(op, by_count, (x,)) is False
        assert check.alone(op, lambda x: 2 * x, (x,)) is True
        assert check.alone(op, lambda x: (2 * x, 2 * x + (len(x) > 20)), (x,)) is (rows < 20)
        assert check.alone(op, lambda x: torch.cat([2 * x[:-1], -2 * x[-1:]]), (x,)) is False
    assert check.alone(op, by_count, (x[:1],)) is None
    assert check.alone(OPS["kmeans_update"], by_count, (x,)) is None


def test_what_is_broadcast_belongs_to_every_row():
    op = OPS["multiply"]
    for y in ("matrix", "row", "column"):
        made = op.make(inputs.generator(0, "cpu"), torch.float32, M=9, N=4, y=y)
        assert check.alone(op, torch.mul, made) is True
        assert check.alone(op, lambda x, y: x * y + (len(x) < 3), made) is False


@pytest.mark.alone
def test_results_say_whether_rows_are_alone():
    prepared = variant(lambda y: by_count(y) / 2, prepare=lambda x: (2 * x,))
    refuses = []

    def only_all(x):
        if refuses and len(x) < 16:
            raise NotImplementedError("takes sixteen rows")
        refuses.append(0)
        return 2 * x

    op = toy(parts=prepared, slow=variant(lambda x: x + x, recompiles=True), all=variant(only_all))
    frame = bench.run(op, config="16", repeat=1, warmup=0)
    assert dict(zip(frame["variant"], frame["alone"], strict=True)) == {
        "honest": "yes",
        "parts": "no",
        "slow": "",
        "all": "",
    }
    assert (frame["status"] == "ok").all() and math.isfinite(frame["latency_us"].max())


# What a file was stamped with


def test_what_changed_is_stale_by_its_name(recorded, op):
    def stale(**variants):
        now = dataclasses.replace(op, variants=op.variants | variants)
        return explore.read(now, "test-gpu", recorded).attrs["origin"].stale

    assert stale() == ()
    why = f"was measured before the code changed (at commit {machines._commit()})"
    assert stale(fusebook=variant(lambda x: 2.0 * x)) == (f"toy (fusebook) {why}",)
    other = dataclasses.replace(op, draw=lambda rng: {**op.draw(rng), "N": 3})
    (found,) = explore.read(other, "test-gpu", recorded).attrs["origin"].stale
    assert found == "toy has other problems than when it was measured"


def test_a_file_of_an_earlier_form_is_read_and_stale(recorded, op):
    file = explore.path("test-gpu", "toy", recorded)
    rows, about = explore._load(file)
    form = about.pop("format")
    old = rows.rename(columns={"gpu_us": "cold_us", "error": "score", "tolerance": "limit"})
    record._save(file, "explored/toy", old.assign(launches="x"), **about)
    file.write_text(file.read_text().replace(f"record {form}", "record 2"))
    found = explore.read(op, "test-gpu", recorded)
    assert list(found.columns) == list(rows.columns) and found["gpu_us"].tolist() == rows["gpu_us"].tolist()
    (why,) = found.attrs["origin"].stale
    assert why.startswith("toy was measured before the code changed")


def test_only_problems_of_older_code_are_measured_again(recorded, op, monkeypatch):
    file = explore.path("test-gpu", "toy", recorded)
    rows, about = explore._load(file)
    about.pop("format")
    rows.loc[(rows["case"] == 1) & (rows["variant"] == "fusebook"), "code"] = "older"
    record._save(file, "explored/toy", rows, **about)
    assert explore.read(op, "test-gpu", recorded).attrs["stale"] == [1]
    called = []
    monkeypatch.setattr(inputs, "poison", called.append)
    frame = explored(op, root=recorded)
    assert len(called) == 3 and sorted(frame["case"]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert explore.read(op, "test-gpu", recorded).attrs["stale"] == []


def test_a_branch_is_left_out_by_its_name():
    common = {"labels": "int64", "law": "blobs", "dtype": "float32", "layout": "contiguous"}
    problems = [(71, 0, {"n": 2100, "d": 3, "k": 4} | common), (72, 0, {"n": 41, "d": 30, "k": 4} | common)]
    op = OPS["kmeans_update"]
    found = {"kmeans._sums_fit": strategies.of(op)["kmeans._sums_fit"]}
    clock = iter([10.0, 12.0, 12.2, 10.2])  # with, without, without, with
    rows = list(strategies.measure(op, found, problems, clock=lambda call: (call(), next(clock))[1]))
    frame = pd.DataFrame(rows, columns=strategies.COLUMNS)
    assert frame["taken"].tolist() == [True, False]
    assert frame.iloc[0, 5:].tolist() == [10.0, 10.2, 12.0, 12.2]
    (told,) = strategies.tell(frame).to_dict("records")
    assert (told["problems"], told["taken"], told["slower"], told["stays"]) == (2, 1, 1, "yes")
    assert told["median"] == pytest.approx(24.2 / 20.2)


class Row(NamedTuple):
    limit: int
    warps: int


class Family(NamedTuple):
    kernel: str
    configs: dict
    limit: int


TABLES = {
    "plain": (((64, 8), (128, 16)), {"64": ((128, 16),), "128": ((64, 8),)}),
    "one": ({2: (Row(64, 8),), 4: ()}, {"2.64": {2: (), 4: ()}}),
    "same limit": (((64, 8), (64, 16)), {"64.8": ((64, 16),), "64.16": ((64, 8),)}),
    "within": (Family("k", {2: (Row(64, 8),)}, 3), {"configs.2.64": Family("k", {2: ()}, 3)}),
    "none": ({2: 72, 4: (80, 96)}, {}),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_row_of_a_table_is_left_out_by_its_name(monkeypatch, case):
    value, rest = TABLES[case]
    module = sys.modules["fusebook.kernels.kmeans"]
    monkeypatch.setattr(module, "_TABLE", value, raising=False)
    found = {name: s for name, s in strategies.strategies().items() if name.startswith("kmeans._TABLE.")}
    assert set(found) == {f"kmeans._TABLE.{name}" for name in rest}
    for name, other in rest.items():
        with strategies.left_out(*found[f"kmeans._TABLE.{name}"]):
            assert module._TABLE == other
    assert module._TABLE == value


def test_strategies_are_of_the_operators_that_reach_them():
    names = {op: [*strategies.of(OPS[op])] for op in ("softmax", "swiglu", "kmeans_step")}
    configs = sys.modules["fusebook.kernels.softmax"]._SOFTMAX.configs
    rows = [name for name in names["softmax"] if name.startswith("softmax._SOFTMAX.configs.")]
    assert len(rows) == sum(map(len, configs.values()))
    assert all(name.startswith("products.") for name in names["swiglu"]) and names["swiglu"]
    assert "kmeans._sums_fit" in names["kmeans_step"] and "scatter._scan_pays" not in names["kmeans_step"]


def test_a_strategy_stays_by_three_percent_of_the_problems():
    for slower, stays in ((6, "yes"), (5, "no")):
        us = [1.06] * slower + [1.04] * (200 - slower)
        rows = pd.DataFrame({"operator": "a", "strategy": "b", "case": range(200), "taken": True, "us": 1.0})
        rows = rows.assign(us_again=1.0, without_us=us, without_us_again=us)
        assert strategies.tell(rows)["stays"].tolist() == [stays]
    assert len({(seed, case) for seed, case, _ in strategies.drawn(OPS["silu"])}) == 200
