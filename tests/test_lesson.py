"""Lessons: their claims, the gains in their headings, their checks, and that they measure where there is a GPU."""

import csv
import dataclasses
import functools
import hashlib
import io
import itertools
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

import fusebook
import fusebook.lesson as lesson
import style
import synthetic
from fusebook import tables
from fusebook.cards import OPS
from fusebook.lesson import _checks, _decode, _memory, _numbers, _place, _products, _weights, evidence, picture
from fusebook.lesson.evidence import Claim, Frames, NotRecorded, history
from fusebook.measure import bench, sources, timing
from fusebook.measure import machine as machines
from toy import machine

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
VERDICTS = ROOT / "tests" / "verdicts.csv"
LESSONS = evidence.lessons()
#: Pages that also run in the mode that measures: one on memory, and one on matmuls.
SEVERAL = ["plot_108_chunked_head", "plot_204_descriptors"]
#: What pages 101, 103 and 104 time.
ELEMENTWISE = ["add_sub", "multiply", "multiply_add", "silu", "add_add_multiply", "double", "exp"]
SCATTERS = ["masked_scatter_nd_of_shape", "scatter_nd_of_shape", "embedding_backward"]
NORMS = ["rms_norm", "add_rms_norm", "rms_norm_fp8", "layer_norm", "rms_norm_backward", "layer_norm_backward"]
#: Claims that a record has no numbers for, by lesson: the evidence says so, until the page is recorded again.
WAITING = {"plot_202_swiglu": {"over-quack"}}  # quack 0.6.5 raises a TypeError there


@pytest.fixture
def replayed(monkeypatch, tmp_path):
    """Nothing but the shipped record: no GPU, and no variable that asks for another one."""
    for name in ("FUSEBOOK_GPU", "_FUSEBOOK_RECORD", "FUSEBOOK_RECORDS", "FUSEBOOK_STRICT", "_FUSEBOOK_DEPS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_place, "live", lambda: False)
    monkeypatch.chdir(tmp_path)
    yield
    plt.close("all")


@pytest.fixture
def page(replayed):
    return lesson.open("plot_102_softmax")


# Evidence -------------------------------------------------------------------------------------------------------------


def recorded(frames, what):
    """Whether there is a record of a frame, or of what a claim reads."""
    try:
        what.values(frames) if isinstance(what, Claim) else frames[what]
    except NotRecorded:
        return False
    return True


@functools.cache
def evaluated(name):
    """What the record says of each claim of a lesson: two tests ask."""
    about = evidence.load(name)
    frames = Frames(about)
    return [evidence.evaluate(claim, frames) for claim in about.CLAIMS]


@pytest.mark.parametrize("name", LESSONS)
def test_every_claim_is_evaluated_on_the_record(name, replayed):
    about = evidence.load(name)
    frames = Frames(about)
    try:
        frames["steps"] if hasattr(about, "on_ranks") else frames.of(about.OPERATORS[0])
    except NotRecorded as missing:
        pytest.skip(str(missing))
    assert len({claim.id for claim in about.CLAIMS}) == len(about.CLAIMS)
    assert sum(claim.lesson for claim in about.CLAIMS) <= 4
    assert all(recorded(frames, frame) for frame in frames if not getattr(about, "UNRECORDED", False))
    for claim, found in zip(about.CLAIMS, evaluated(name), strict=True):
        assert re.fullmatch(r"[a-z0-9-]+", claim.id) and claim.scope and claim.kind in ("claim", "target", "statement")
        if claim.id in WAITING.get(name, ()):
            assert "not measured" in found.text + found.detail, f"{claim.id} was recorded: it waits no longer"
            continue
        assert "not measured" not in found.text, claim.id
        assert (found.holds is None) == (not claim.condition), f"{claim.id}: nothing was measured"
        assert bool(found.worst) == bool(claim.condition)


def test_a_claim_on_rows_of_another_gpu_than_its_lessons_says_so(replayed, monkeypatch):
    about = evidence.load("plot_402_two_gpus")
    claim = next(c for c in about.CLAIMS if c.id == "two-jobs-large")
    monkeypatch.setattr(machines, "places", lambda: [machines.RECORDS / machines.SHIPPED])
    own = evidence.evaluate(claim, Frames(about)).text
    assert "Measured on" not in own
    monkeypatch.setattr(machines, "places", lambda: [machines.RECORDS / s for s in ("another", machines.SHIPPED)])
    assert evidence.evaluate(claim, Frames(about)).text == own + " Measured on NVIDIA H100 80GB HBM3."


@pytest.mark.parametrize("name", LESSONS)
def test_sentences_of_the_evidence_are_plain(name, replayed):
    about = evidence.load(name)
    texts = [found.text for found in evaluated(name)]
    texts += [f"{claim.scope}." for claim in about.CLAIMS] + list(about.LOG)
    assert [fault for text in texts for fault in style.faults(text)] == []


def test_the_lint_finds_what_it_is_for():
    for bad, what in (
        ("A row stands alone.", "stands"),
        ("It is told.", "told"),
        (f"{'word ' * 29}.", "29 words"),
        ("The other way is slow.", "way"),
        (f"It ({'x' * 61}) is.", "bracket"),
        ("What it takes, then, is more.", "inversion"),
    ):
        assert any(what in fault for fault in style.faults(bad)), bad
    assert style.faults('He said "it stands" and `it.stands`. This is good.') == []


def test_a_claim_holds_fails_or_was_not_measured():
    frames = {"a": pd.Series([1.0, 0.9], index=["first", "second"])}

    def outcome(condition, values=lambda frames: frames["a"], text="{least:.1f} to {most:.1f} at {good} of {count}"):
        return evidence.evaluate(Claim("id", text, values, condition, "both"), frames)

    assert outcome(">= 0.9").holds is True and outcome(">= 0.9").text == "0.9 to 1.0 at 2 of 2"
    failed = outcome(">= 0.95")
    assert (failed.holds, failed.worst) == (False, "second: 0.900")
    assert failed.detail == "holds at 1 of 2 points; worst second: 0.900; condition >= 0.95"
    assert outcome("").holds is None and outcome("").detail == ""

    def missing(frames):
        raise NotRecorded("nothing")

    gone = outcome(">= 0.9", missing, "{least:.1f}")
    assert (gone.holds, gone.text, gone.detail) == (None, "(not measured)", "not measured")
    part = evidence.evaluate(Claim("id", "{median} {a}", lambda _: frames["a"], ">= 0", "both", numbers=dict), {})
    assert (part.holds, part.detail) == (None, "not measured"), "a sentence without a number is not true"
    with pytest.raises(ValueError, match="expected a condition such as '>= 0.97', got 'about 1'"):
        outcome("about 1")


def test_what_was_measured_is_not_mixed_with_a_record():
    frames = Frames(evidence.load("plot_102_softmax"), replay=False)
    with pytest.raises(NotRecorded, match="steps was not measured in this run"):
        frames["steps"]
    assert [evidence.evaluate(claim, frames).holds for claim in frames.about.CLAIMS if claim.condition].count(None) > 30


def test_evidence_shows_first_calls_and_compiled_kernels():
    pages, softmax = pytest.importorskip("evidence_pages"), OPS["softmax"]
    frame = synthetic.frame(softmax, "3x5,4x8")
    frame["binaries"] = frame["variant"].map({"fusebook": 3})
    shown = pages.first_calls(softmax, frame)
    assert shown.frame.loc["fusebook"].tolist() == ["2", "0.500", "0.500", "1", "6"]
    assert shown.frame.loc["eager", "kernels"] == ""


def test_an_unknown_lesson_is_refused():
    with pytest.raises(ValueError, match=r"expected one of .*plot_102_softmax.*, got 'plot_000'"):
        lesson.open("plot_000")


# What became of the verdicts of the old pages -------------------------------------------------------------------------


def test_every_old_verdict_has_a_claim_or_a_reason():
    rows = list(csv.DictReader(VERDICTS.read_text(encoding="utf-8").splitlines()))
    frozen = "\n".join(f"{row['page']}\t{row['text']}" for row in rows)
    assert len(rows) == 419
    assert hashlib.sha256(frozen.encode()).hexdigest()[:16] == "1dc1837a67f1aacc", "pages and texts are not edited"
    claims = {name: {claim.id for claim in evidence.load(name).CLAIMS} for name in LESSONS}
    every = set().union(*claims.values(), (claim.id for claim in history.CLAIMS))
    for row in rows:
        if "import fusebook.lesson" not in (EXAMPLES / f"{row['page']}.py").read_text(encoding="utf-8"):
            assert not row["id"] and not row["reason"], f"{row['page']} has no evidence yet"
            continue
        assert row["id"] or row["reason"], row["text"]
        assert not row["id"] or row["id"] in every, row["id"]
        assert "merged" not in row["reason"] or row["id"], "merged with what?"


# Gains in headings ----------------------------------------------------------------------------------------------------


class Steps(dict):
    about = SimpleNamespace(STEPS=("eager", "one", "two"), DTYPES=("float32",))


def steps(**us):
    rows = [{"step": step, "shape": "8x256", "dtype": "float32", "gpu_us": time} for step, time in us.items()]
    return Steps(steps=pd.DataFrame(rows))


def test_a_marker_says_what_a_step_gains_over_the_one_before():
    found = steps(eager=550.0, one=100.0, two=74.0)
    text = "Step 1 {gain one at N=256}, then {gain two at N=256}, {gain two at N=999}, {gain two at N=256, bfloat16}"
    assert _numbers.filled(text, found) == (
        "Step 1 (5.5x faster than eager at N = 256), then (1.35x faster than step 1 at N = 256), "
        "(not measured at N = 999), (not measured at N = 256 in bfloat16)"
    )
    assert _numbers.filled("{gain two at N=256}", steps(one=100.0, two=101.0)) == "(as fast as step 1 at N = 256)"
    assert (
        _numbers.filled("{gain two at N=256}", steps(one=100.0, two=110.0)) == "(1.10x slower than step 1 at N = 256)"
    )
    assert _numbers.filled("{gain two over eager at N=256}", found) == "(7.4x faster than eager at N = 256)"
    with pytest.raises(ValueError, match="expected a step of one, two, got 'three'"):
        _numbers.filled("{gain three at N=256}", found)
    with pytest.raises(ValueError, match="expected a step of eager, one, two, got 'zero'"):
        _numbers.filled("{gain two over zero at N=256}", found)


def test_a_marker_names_the_rows_where_the_width_is_not_enough():
    found = steps(eager=3.0, one=2.0, two=1.0)
    more = found["steps"].assign(shape="1x9x256", gpu_us=[3.0, 2.0, 4.0])
    found["steps"] = pd.concat([found["steps"].assign(shape="11x9x256"), more])
    text = "{gain two at M=11, N=256}, {gain two at M=1, N=256}, {gain two at M=2, N=256}"
    assert _numbers.filled(text, found) == (
        "(2.0x faster than step 1 at M = 11, N = 256), (2.0x slower than step 1 at M = 1, N = 256), "
        "(not measured at M = 2, N = 256)"
    )


def test_a_marker_names_the_rows_of_a_matrix_and_takes_the_clock_of_the_lesson():
    rows = [("one", "16x784", 3.0), ("two", "16x784", 2.0), ("one", "400x784", 8.0), ("two", "400x784", 2.0)]
    frame = pd.DataFrame(rows, columns=["step", "shape", "end_to_end_us"]).assign(dtype="float32")
    about = SimpleNamespace(STEPS=("one", "two"), DTYPES=("float32",), CLOCK="paid")
    frames = type("", (dict,), {"about": about})(steps=frame)
    assert _numbers.gain(frames, "two", "784", rows="400") == "(4.0x faster than one at M = 400, N = 784)"


def test_the_first_step_of_each_operator_is_a_baseline():
    about = evidence.load("plot_104_norms")
    assert list(_numbers.labels(about).values()) == [
        *("eager", "step 1", "step 2", "two kernels", "step 3", "eager gradient", "step 4", "step 5"),
    ]
    groups = _numbers.by_operator(OPS["rms_norm"], about, dict.fromkeys(about.STEPS))
    assert [(op.name, own, len(some)) for op, own, some in groups] == [
        ("rms_norm", "fusebook", 3),
        ("add_rms_norm", "fusebook.add_rms_norm", 2),
        ("rms_norm_backward", "fusebook.rms_norm_backward", 3),
    ]


def test_a_ratio_that_is_missing_has_no_sign():
    claim = Claim("id", "It is {a:.1x} and {b:.2x} faster.", lambda frames: pd.Series([1.0]), "", "", numbers=dict)
    assert evidence.evaluate(claim, {"a": 2.0, "b": None}).text == "It is 2.0x and (not measured) faster."


def test_a_marker_says_what_a_step_saves():
    found = steps(eager=1.0, one=1.0, two=1.0)
    found["steps"]["peak_bytes"] = [400, 100, 300]
    found["steps"]["gpu_warm_us"] = [1.0, 1.0, 0.5]
    warm = "{gain two at N=256, warm}"
    assert _numbers.filled(warm, found) == "(2.0x faster than step 1 at N = 256, warm)"
    assert _numbers.filled(warm, steps(one=1.0, two=1.0)) == "(not measured at N = 256, warm)"
    text = "{gain one at N=256, memory}, {gain two at N=256, memory}, {gain two at N=9, memory}"
    assert _numbers.filled(text, found) == (
        "(4.0x less memory than eager at N = 256), (3.0x more memory than step 1 at N = 256), (not measured at N = 9)"
    )


# Checks ---------------------------------------------------------------------------------------------------------------


def forgetful(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def test_a_check_says_how_wrong_a_result_is(page, monkeypatch):
    x = page.stress(9, 20)
    right = page.check(lambda x: torch.softmax(x, -1), x)
    assert right.good and re.search(r"is correct on 9 x 20, float32: error [\d.]+ eps, tolerance 64 eps", right.text)
    wrong = page.check(forgetful, x)
    assert not wrong.good and "`forgetful` is incorrect" in wrong._repr_html_().replace("<code>", "`").replace(
        "</code>", "`"
    )
    assert "worst at [2, " in wrong.text
    monkeypatch.setenv("FUSEBOOK_STRICT", "1")
    with pytest.raises(AssertionError, match="forgetful is incorrect"):
        page.check(forgetful, x)


def test_the_library_is_checked_under_its_own_name(page):
    assert "fusebook.softmax is correct" in page.check(fusebook.softmax, page.stress(3, 5)).text


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter takes fewer rows")
def test_the_interpreter_takes_67_rows_and_says_so(page):
    x = page.stress(1823, 20)
    assert len(x) == 67
    assert "on 67 (with a GPU: 1823) x 20, float32" in page.check(lambda x: torch.softmax(x, -1), x).text


def test_a_mistake_has_to_be_caught(page, monkeypatch):
    x = page.stress(9, 20)
    caught = page.catches(forgetful, plain=torch.randn(9, 20), stress=x)
    assert caught.good and "passes on plain, and fails on stress (worst at [2, " in caught.text
    monkeypatch.setenv("FUSEBOOK_STRICT", "1")
    with pytest.raises(AssertionError, match="passes on plain"):
        page.catches(forgetful, plain=torch.randn(9, 20))


def test_all_checks_stop_at_the_first_wrong_function(page):
    def plain(x):
        return torch.softmax(x.float(), -1).to(x.dtype)

    right = page.check_all(plain, special=True)
    assert right.good and "with rows of -inf, NaN, inf" in right.text
    assert "forgetful is incorrect" in page.check_all(plain, forgetful).text
    clipped = page.check_all(lambda x: torch.softmax(x.float().clamp(-1e4, 1e4), -1).to(x.dtype), special=True)
    assert not clipped.good, "special values must be looked at"


def test_traffic_is_counted_and_held_against_the_card(page):
    from fusebook.kernels.softmax import softmax_eager

    shown = page.traffic(eager=softmax_eager, fused=2)
    assert "8MN + 4M elements. 5 kernels move MN or more; a fused one moves 2MN." in shown.text
    with pytest.raises(ValueError, match=r"expected fused=2, got 3"):
        page.traffic(eager=softmax_eager, fused=3)
    with pytest.raises(ValueError, match="the card states"):
        page.traffic(eager=lambda x: x.exp(), fused=2)


@pytest.fixture
def losses(replayed):
    return lesson.open("plot_105_cross_entropy")


def test_views_and_gathers_are_no_traffic_of_a_matrix(losses):
    def eager(x, target):
        at = target[:, None]
        e = (x - x.amax(-1, keepdim=True)).exp()
        p = e / e.sum(-1, keepdim=True)
        p.scatter_(1, at, p.gather(1, at) - 1)
        return p / len(x)

    shown = losses.traffic(eager=eager, fused=2).text
    assert shown.startswith("Counted: 10MN + ")
    assert " elements. 6 kernels move MN or more; a fused one moves 2MN. Predicted: 5.0x." in shown
    assert "gather" not in shown and "unsqueeze" not in shown


def test_traffic_counts_a_longer_dtype_as_several_elements(replayed):
    norms = lesson.open("plot_104_norms")

    def eager(x, weight):
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        return normed.to(x.dtype) * weight

    assert norms.traffic(eager=eager, fused=2).text.startswith("Counted: 18MN + ")


def test_a_lesson_takes_inputs_and_checks_of_its_other_operators(replayed):
    summed = lesson.open("plot_104_norms").of("add_rms_norm")
    x, residual, weight = summed.stress(5, 20)
    assert summed.check(fusebook.add_rms_norm, x, residual, weight).good
    assert not summed.check(lambda x, r, w: (fusebook.rms_norm(x, w), x + r), x, residual, weight).good


def test_a_mistake_may_take_more_than_one_input(losses):
    def doubled(x, target):
        loss, dx = losses.op.reference(x, target)
        return loss, dx + 0 * x.exp()

    x, target = losses.stress(9, 20)
    shown = losses.catches(doubled, randn=(torch.randn(9, 20), target), stress=(x, target)).text
    assert "passes on randn, and fails on stress" in shown


def test_steps_without_a_record_say_so(losses, monkeypatch, tmp_path):
    monkeypatch.setattr(machines, "places", lambda: [tmp_path])
    assert "no record of cross_entropy_steps" in losses.steps(**dict.fromkeys(losses.about.STEPS, forgetful)).text


@pytest.mark.parametrize("name", ["plot_402_two_gpus", "plot_501_onnxruntime"])
def test_a_box_without_a_record_names_what_it_lacks_and_the_command(name, replayed, monkeypatch):
    about, empty = evidence.load(name), evidence.Measured("nothing")
    frames = {k: empty if isinstance(spec, evidence.Measured) else spec for k, spec in about.FRAMES.items()}
    monkeypatch.setattr(about, "FRAMES", frames)
    assert "no record of nothing: run `nox -s record` on" in repr(lesson.open(name).verdict())


def test_a_lesson_that_is_not_recorded_says_so_under_its_title(losses, monkeypatch, tmp_path):
    monkeypatch.setattr(machines, "places", lambda: [tmp_path])
    monkeypatch.setattr(losses.about, "UNRECORDED", True, raising=False)
    monkeypatch.setenv("FUSEBOOK_STRICT", "1")
    box = losses.verdict()
    assert "No GPU has measured this lesson yet" in box.text and "nox -s record -- plot_105" in box.text
    assert 'class="fb-box' in box.html and 'class="fb-verdict-line"' in box.html
    assert losses.use().text == "Not measured yet."


# Weights of few bits --------------------------------------------------------------------------------------------------

CODE = """
.L_x_0:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   FFMA R0, R4, R5, R0 ;
        /*0020*/              @P0  BRA `(.L_x_1) ;
        /*0030*/              @!P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   BRA `(.L_x_2);
"""


def test_the_loop_of_a_kernel_is_what_is_branched_back_to():
    assert [line.split()[0] for line in _weights.loop_of(CODE)] == ["LDG.E.128", "FFMA", "@P0", "@!P1"]


@pytest.mark.parametrize(("products", "weights"), [(0, 32), (4, 32), (2, 16)])
def test_instructions_are_counted_for_each_weight(products, weights, monkeypatch):
    code = CODE.replace("FFMA", "HMMA.16816.F32", 1).replace("/*0010*/", "/*0010*/", 1) if products else CODE
    line = next(line for line in code.splitlines() if "HMMA" in line or "FFMA" in line)
    code = code.replace(line, "\n".join([line] * max(products, 1)))
    monkeypatch.setattr(_weights, "subprocess", SimpleNamespace(check_output=lambda *_, **__: code))
    counted = _weights.look(SimpleNamespace(asm={"cubin": b""}))
    assert counted == {"instructions": (3 + max(products, 1)) / weights}


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is timed there is recorded")
def test_a_decode_loop_is_the_same_by_each_matmul():
    frame = _decode.tokens(layers=1, hidden=128, inner=256, heads=4, shared=2, past=5, sequences=2, device="cpu")
    assert frame["implementation"].tolist() == ["bfloat16", "fusebook"]
    assert frame["off"].max() < 0.01 and frame["tokens per second"].isna().all()
    renamed = evidence.load("plot_203_four_bits").FRAMES["tokens"].renamed(frame)
    assert renamed["step"].tolist() == ["bfloat16", "fusebook"]


def test_rounding_a_weight_costs_more_with_fewer_bits_and_larger_groups(replayed):
    page = lesson.open("plot_203_four_bits")
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(8, 512, generator=rng), torch.randn(32, 512, generator=rng)
    text = page.rounding(x, weight, bits=(8, 4), groups=(32, 0)).text
    found = [float(value) for value in re.findall(r"([\d.]+)%", text)]
    assert len(found) == 4 and 0.1 < found[0] < found[1] < 2 < found[2] < found[3] < 25


def test_every_step_of_four_bits_is_correct_for_more_rows_than_a_tile(replayed):
    names = runpy.run_path(str(ROOT / "examples" / "plot_203_four_bits.py"), run_name="lesson")
    given = names["page"].stress(11, 384, 32, dtype=torch.float16, seed=3)
    for step in ("shift", "pairs", "tensor"):
        assert names["page"].check(names[f"matmul_{step}"], *given).good
    known = [{"step": "pairs", "shape": "1x8x8", "instructions": 2.94}]
    names["page"].frames.known["steps"] = pd.DataFrame(known)
    shown = names["page"].check(names["matmul_pairs"], *given)
    assert "is correct on 11 x 384" in shown.html and shown.html.endswith("eps. SASS per weight: 2.9.</p>")


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matmuls"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::...>", "AdamW"),
        ("_cross_entropy_shared", "loss"),
        ("_norm_backward_rows", "norms"),
        ("_rope_heads", "rope"),
        ("_elementwise_flat", "MLP's product"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "other kernels"),
    ],
)
def test_kernels_of_a_step_are_sorted_by_their_names(kernel, kind):
    assert evidence.load("plot_305_training").kind_of(kernel).startswith(kind)


ROW = """
import json, sys, time
sys.stdin.readline()
begun = time.time()
print("a warning\\nbegun", flush=True)
sys.stdin.readline()
print(json.dumps([{"begun": begun, "turn": time.time()}]))
time.sleep(0.3)
"""


def test_processes_make_their_first_steps_together_and_measure_in_turn():
    about, pipes = evidence.load("plot_305_training"), dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    processes = {name: subprocess.Popen([sys.executable, "-c", ROW], text=True, **pipes) for name in "abc"}
    for name in "ab":
        print(file=processes[name].stdin, flush=True)
    said = {name: about._begun(processes[name]) for name in "ab"}
    assert said == {name: ["a warning\n"] for name in "ab"}
    lines = {"a": "\n", "b": "\n", "c": "\n\n"}
    (first,), (second,), (third,) = (about._ended(n, processes[n], lines[n], said.get(n, ())) for n in "abc")
    assert max(first["begun"], second["begun"]) < first["turn"] < second["turn"] - 0.2
    assert third["begun"] > second["turn"] + 0.2
    gone = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"], text=True, **pipes)
    with pytest.raises(RuntimeError, match="the process of a ended with 3"):
        about._ended("a", gone, "\n", ())


def test_one_replacement_is_put_in_alone_and_a_page_trains_as_before(replayed, monkeypatch):
    pytest.importorskip("transformers")
    about = evidence.load("plot_305_training")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 128}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    operators = ["rms_norm", "rope", "silu_mul", "linear_cross_entropy"]
    for operator, count in zip(operators, (3, 1, 1, 2), strict=True):
        model, _ = about._alone(operator, about._build("Llama", **small))
        assert len(fusebook.unpatch(model)) == count, operator
    names = runpy.run_path(str(ROOT / "examples" / "plot_305_training.py"), run_name="lesson")
    ids = torch.arange(24, device=about._device()).view(2, 12) % 128
    model, other = (about._build("Llama", torch.float32, **small) for _ in range(2))
    run, optimizer = about._eager(model)
    other_optimizer = names["patched"](other)
    for _ in range(2):
        wanted = about._step(run, optimizer, ids)
        torch.testing.assert_close(names["train"](other, other_optimizer, ids), wanted, rtol=1e-5, atol=0)


# Matmuls --------------------------------------------------------------------------------------------------------------


def test_the_rates_of_matmuls_are_in_teraflops():
    found = _products.rates(pd.DataFrame({"step": ["eager", "small"], "gpu_us": [2.0, 4.0], "shape": "1000x1000x1000"}))
    assert found.columns.tolist() == ["n = 1000"] and found["n = 1000"].to_dict() == {"eager": 2000.0, "small": 1000.0}


def test_a_lesson_on_matmuls_shows_what_a_caller_gets(replayed):
    page = lesson.open("plot_201_gemm_concat")
    time, sizes, memory, *_ = page.verdict().text.splitlines()
    assert "1024 x 1024 with two weights of 1024 x 1024 in bfloat16" in time and "chosen" not in time
    assert "ORT" not in sizes and "Fusebook allocates the output" in memory and "2.0 times" in memory
    assert "a library" not in page.use().text


def test_a_lesson_on_tokens_has_shares_of_the_roofline_and_memory_of_torch(replayed):
    page = lesson.open("plot_202_swiglu")
    frame = page.frames["steps"]
    wide, _ = page._staircase(frame, dict.fromkeys(page.about.STEPS, forgetful))
    assert wide.columns.tolist() == ["4096 tokens", "1 token", "lines"]
    assert 50 < wide.loc["step 1, small", "4096 tokens"] < wide.loc["fusebook.swiglu", "4096 tokens"] < 105
    memory = _numbers.choices(page.op, page._everything()).loc["torch or torch.compile", "peak memory"]
    assert " x output (" in memory, "no variant is named torch: the one that holds most, by its name"


def test_the_table_has_the_memory_of_the_verdict_and_says_whose_it_is(replayed):
    page = lesson.open("plot_306_tf32_filter")
    memory = page.verdict().text.splitlines()[2]
    own, other = _numbers.choices(page.op, page._everything())["peak memory"]
    assert f"Fusebook allocates {own.replace(' x', ' times the')}." in memory
    span = other.removesuffix(" x output (torch.cdist)")
    assert f"torch.cdist allocates {span} times the output." in memory


def test_a_verdict_leaves_out_strategies_and_checked_calls(replayed):
    page = lesson.open("plot_103_scatter_nd")
    time = page.verdict().text.splitlines()[0]
    assert "ONNX Runtime" in time and "sorted" not in time and "checked" not in time
    checked = page.check(fusebook.masked_scatter_nd_of_shape, *page.stress(5, 7, 20)).text
    assert "is correct on 20 x 7, float32" in checked, "of updates, not of indices"


def test_when_to_use_it_compares_only_what_was_timed_and_names_sizes_as_the_verdict_does(replayed):
    page = lesson.open("plot_103_scatter_nd")
    frame = page._everything()
    counts = _numbers.choices(page.op, frame)["fastest in GPU time"].str.partition(" of ")[2]
    assert len(set(counts)) == 1, "the library was timed at more sizes than the others"
    at = tables.where(frame, n=2048, law="zipf", dtype="float16")
    told = set(_numbers._in_words(page.about, at).values())
    assert told == {"2048 updates of 4096 elements to a table of 32000 rows in float16, indices by Zipf's law"}


def test_memory_counts_what_pytorch_allocates_at_every_size(replayed):
    small = lesson.open("plot_003_launching")
    assert small.verdict().text.count("allocates the output and nothing else.") == 2, "800 bytes are a block of 1024"
    few = lesson.open("plot_203_four_bits")
    assert "above 96 rows 2NK bytes more" in few.verdict().text.splitlines()[2]
    rows = tables.where(few._everything(), variant="fusebook", dtype="float16", status="ok")
    beyond = rows["peak_bytes"] - 2 * rows["M"] * rows["N"]
    assert (beyond == 2 * rows["N"] * rows["K"] * (rows["M"] > 96)).all(), "many rows take a weight of 16 bits"
    memory = lesson.open("plot_307_moving_centres").verdict().text.splitlines()[2]
    assert "Eager PyTorch allocates at most 153 MiB" in memory, "labels of 8 bits are converted"


def test_the_walk_in_groups_reads_fewer_strips():
    text = picture.walk(rows=4, columns=12, running=12, group=4).text
    assert "1 of 4 rows of x and 12 of 12 columns of w" in text and "4 of 4 rows of x and 3 of 12 columns of w" in text
    assert "a column of tiles of w1" in picture.product(rows=4, columns=4, program=13).text


# NumPy code -----------------------------------------------------------------------------------------------------------


def branching(X):
    return X / X.max() + 1 if X.sum() > 0 else X * 2 + 1


def branchless(X):
    return X * np.where(X.sum() > 0, 1 / X.max(), 2) + 1


def clipped_in_place(X):
    X = X.copy()
    X[X < 3] = 3
    return X + 1


def clipped(X):
    return np.where(X < 3, 3, X) + 1


def smoothed(X, turns):
    for _ in range(turns):
        X = (X + np.roll(X, 1)) / 2
    return X


def until_flat(X, step):
    turns = 0
    while X.max() - X.min() > 1e-3:
        X, turns = step(X), turns + 1
    return X, turns


def zeros(X):
    return X + np.zeros(3)


def test_what_dynamo_makes_of_numpy_code(replayed):
    graphs, ones = evidence.load("plot_302_numpy_to_cuda").graphs, np.arange(1.0, 9.0)
    assert len(graphs(branching, ones)) > 1 and len(graphs(branchless, ones)) == 1
    np.testing.assert_allclose(branching(ones), branchless(ones))
    in_place, chosen = graphs(clipped_in_place, ones), graphs(clipped, ones)
    assert len(in_place) > 1 or sum(in_place) > sum(chosen), "a write through a mask costs more"
    few, many = (graphs(smoothed, ones, turns) for turns in (4, 16))
    assert sum(many) > 3 * sum(few), "a loop is unrolled"
    assert len(graphs(lambda X: until_flat(X, lambda Y: smoothed(Y, 1))[0], ones)) > 1

    def compiled(function):
        torch.compiler.reset()
        return torch.compile(function, backend="eager")

    np.testing.assert_array_equal(compiled(clipped_in_place)(ones), clipped(ones))
    assert compiled(zeros)(np.ones(3, np.float32)).dtype == zeros(np.ones(3, np.float32)).dtype == np.float64
    wanted, turns = until_flat(ones, lambda X: smoothed(X, 1))
    np.testing.assert_allclose(until_flat(ones, compiled(lambda X: smoothed(X, 1)))[0], wanted)
    by_fours, calls = until_flat(ones, compiled(lambda X: smoothed(X, 4)))
    assert calls < turns and np.ptp(by_fours) <= 1e-3


def test_a_lesson_on_numpy_code_has_times_of_the_cpu_and_of_the_gpu(replayed):
    page = lesson.open("plot_302_numpy_to_cuda")
    time, cpu, memory, *_ = page.verdict().text.splitlines()
    assert re.search(r"in [\d.]+ s\. .* with arrays, and \d+ us if the points", time) and "threads of the CPU" in cpu
    assert "eager PyTorch allocates" in memory
    assert "compiled, 1 thread:" in page.threads().text and "#pragma omp" in page.threads().html
    assert "triton_poi" in page.generated().html
    assert page.graphs(branchless, np.arange(1.0, 9.0)).text.startswith("1 graph, of ")
    with pytest.raises(ValueError, match="expected numpy, arrays, tensors, kernel, got numpy"):
        page.steps(numpy=forgetful)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is timed there is recorded")
def test_numpy_and_what_replaces_it_are_checked_and_timed(monkeypatch):
    about = evidence.load("plot_302_numpy_to_cuda")
    monkeypatch.setattr(about, "SHAPES", ((2000, 2, 2),))
    monkeypatch.setattr(about, "_seconds", lambda function, tries=5: float(tries))
    monkeypatch.setattr(about.fusebook, "kmeans_assign", lambda X, means, check: about._adapted(X, means) * 0)
    frame = about.timed({name: about._adapted if "e" in name else about._line for name in about.STEPS})
    found = frame.groupby("step")["correct"].all()
    assert found.drop("fusebook").all() and not found["fusebook"]
    assert len(frame) == 14 and frame["seconds"].notna().all()


# Sessions -------------------------------------------------------------------------------------------------------------


def test_a_lesson_on_sessions_has_latencies_and_each_call(replayed):
    pytest.importorskip("onnx")
    page = lesson.open("plot_501_onnxruntime")
    time, sizes, calls, *_ = page.verdict().text.splitlines()
    assert "chain of nodes" in time and "compiled ahead of time" in time and " pairs of size and dtype" in sizes
    assert re.match(r"Calls. An empty run, which copies its input, takes the CPU \d+ us. A run that launches a", calls)
    drawn = page.calls()
    assert re.search(
        r"callback: Python, [\d.]+ microseconds to ONNX Runtime, [\d.]+ microseconds to launcher", drawn.text
    )
    assert drawn.html.count("<polygon") == 9, "an arrow for each call"
    assert "ONNX Runtime and one file" in page.use().html
    with pytest.raises(ValueError, match="expected chain, callback, library, built, captured, got chain"):
        page.steps(chain=forgetful)


def test_a_session_on_memory_that_holds_nan_has_to_write_all_of_it(replayed):
    pytest.importorskip("onnxruntime")
    page = lesson.open("plot_501_onnxruntime")
    about, ints = page.about, {"shape": torch.int64, "indices": torch.int64}

    def all_but_a_row(shape, indices, updates, out, **_):
        out[1:] = 0

    def forgetful_node(**options):
        named, one = about.MODELS[2], {"attributes": {"reduction": "add", "maskedValue": -1}, "host": ["shape"]}
        kinds = {**ints, "updates": torch.float32}, {"y": torch.float32}
        op = about.custom_op(named, all_but_a_row, *kinds, "shape", **one)
        return about.Graph(about.model(named), ops=[op], **options)

    given = page.stress(5, 7, 20)
    assert not page.check_graph(forgetful_node, *given).good


# Memory ---------------------------------------------------------------------------------------------------------------

SIZES = {"M": 64, "K": 8, "N": 100}


def test_a_lesson_on_launches_shows_end_to_end_times_and_bytes(replayed):
    steps, fits = lesson.open("plot_304_adamw"), lesson.open("plot_301_logistic_step")
    text = steps.verdict().text
    assert "of end-to-end time, the larger of CPU launch time and GPU time, at 10,000,000 elements in 1000" in text
    assert "Fusebook allocates nothing beyond its inputs. The loop allocates at most 38.1 MiB" in text
    assert "Between steps, Fusebook keeps tables on the GPU" in text
    assert "MiB beyond inputs and output" in fits.verdict().text
    steps.frames.known["steps"] = pd.DataFrame({"step": ["loop", "kept"]})
    assert "Not measured yet: step 1, step 2.)" in steps.verdict().text
    assert "median end-to-end time" in fits.use().html and "x output" not in fits.use().html


def test_a_step_in_place_is_checked_on_copies_and_one_without_a_loss_is_completed(replayed):
    steps, fits = lesson.open("plot_304_adamw"), lesson.open("plot_301_logistic_step").of("logistic_step")
    given = steps.stress(300, 2)
    before = [v.clone() for v in given[:4]]

    def one(ps, gs, ms, vs, t, lr):
        fusebook.adamw_step(ps, gs, ms, vs, step=t, lr=lr, weight_decay=0.1)
        return *ps, *ms, *vs

    assert "is correct on 300, float32" in steps.check(one, *given).text
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=False))
    shown = fits.check(lambda *given: fusebook.logistic_step(*given)[:2], *fits.stress(20, 7))
    assert "is correct on 20 x 7" in shown.text


def test_a_read_and_a_write_of_one_kernel_are_those_of_the_card(replayed):
    def loop(ps, gs, ms, vs, t, lr):
        for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
            fusebook.adamw_step_eager([p], [g], [m], [v], t, lr, 0.9, 0.999, 1e-8, 0.1)

    shown = lesson.open("plot_304_adamw").traffic(loop=loop, fused=7).text
    assert shown.startswith("Counted: 20M elements. 8 kernels move M or more; a fused one moves 7M. Predicted: 2.9x.")
    assert "fused, one kernel: reads 4 M and writes 3 M" in shown


def test_memory_is_counted_after_each_operation():
    op = OPS["linear_cross_entropy"]

    def chunks(h, head, target, scale, buffer):
        logits = torch.empty(16, len(head), dtype=h.dtype, device=h.device) if buffer else None
        for start in range(0, len(h), 16):
            rows = h[start : start + 16]
            logits = torch.mm(rows, head.T, out=logits) if buffer else rows @ head.T
        return logits

    logits = 4 * 16 * SIZES["N"]
    for buffer, held in ((True, logits), (False, 2 * logits)):
        seen = _memory.counted(op, functools.partial(chunks, buffer=buffer), SIZES, torch.float32)
        assert max(seen) == held, "without a buffer the last chunk is still there"
    assert max(_memory.counted(op, lambda h, head, *_: h @ head.T, SIZES, torch.bfloat16)) == 2 * 64 * 100


def test_kernels_are_not_launched_to_count_memory():
    names = runpy.run_path(str(ROOT / "examples" / "plot_108_chunked_head.py"), run_name="lesson")
    seen = _memory.counted(OPS["linear_cross_entropy"], names["head_in_place"], SIZES, torch.float32)
    assert max(seen) == 4 * (64 * 100 + 64 * 8 + 100 * 8 + 64 + 1), "logits, both gradients, losses and their mean"


def test_a_lesson_on_memory_begins_with_memory(replayed):
    page = lesson.open("plot_108_chunked_head")
    memory, time, sizes, *_ = page.verdict().text.splitlines()
    assert re.match(r"Memory\. With 8192 hidden states .* peak of a call is \d\.\d\d GiB above .* torch \d", memory)
    assert re.match(r"Time\. It takes [\d.]+ ms of GPU time\. Others: .* torch \d", time) and sizes.startswith(
        "Sizes. "
    )
    text = page.use().text
    assert "pip install" in text and "eager" not in text
    assert "1024 rows: " in page.trade().text


def test_a_size_without_a_time_has_no_bar():
    frame = pd.DataFrame({"GiB": [0.1, 0.2], "time in ms": [float("nan"), 1.0]}, index=["4 rows", "8 rows"])
    shown = _memory.pairs("rows", frame)
    assert "4 rows: 0.10 GiB, not measured; 8 rows: 0.20 GiB, 1.0 ms" in shown.text
    assert "nan" not in shown._repr_html_()


@pytest.mark.parametrize(
    "shown",
    [
        picture.blocks(20, 8),
        picture.passes(4),
        picture.partial_sums(6, 3),
        picture.operand(5),
        picture.coordinates(4),
        picture.band([(0.0, 0.0), (1.0, 1.1), (2.0, 0.0)], [(0.0, 1.0), (2.0, 1.0)], 0.5),
        picture.product(4, 4, 13),
        picture.gated(4, 6, 9),
        picture.owners("updates", [1, -1, 0, 1], 3),
        picture.walk(4, 12, 12, 4),
        _memory.over_time("held", {"a": [0.0, 2.0, 1.0], "b": [1.0]}),
        _memory.pairs("rows", pd.DataFrame({"GiB": [0.1, 0.2], "ms": [2.0, 1.0]}, index=["4 rows", "8 rows"])),
        picture.rows(2, 3, 4),
        picture.tile(3, 3, 4, 2),
        picture.chunks(100, 128, 16),
        picture.shared_row(4),
        picture.bars("times", {"a": 2.0, "b": 1.0}, {"a": "2 us", "b": "1 us"}),
    ],
)
def test_pictures_are_drawn_and_described(shown):
    from xml.etree import ElementTree

    ElementTree.fromstring(shown._repr_html_())
    assert len(shown.text.split()) > 5


def test_points_in_the_band_are_those_that_an_error_could_turn_over():
    points = [(0.0, 9.0), (0.9, 0.0), (1.2, 5.0), (3.0, 0.0)]  # squared distances differ by 4 x - 4
    assert "Of 4 points, 2 are in the band" in picture.band(points, [(0.0, 0.0), (2.0, 0.0)], 1.0).text


def test_padding_is_told_from_data():
    assert picture.blocks(20, 8).text.endswith("program 2 owns elements 16 to 19; the last 4 of 8 are masked.")
    assert "program 1 owns row 1" in picture.rows(2, 3, 4).text and "masks 1 of 4" in picture.rows(2, 3, 4).text
    assert "program 1 owns row 2; 1 row of the last tile past the end: masked" in picture.tile(3, 3, 4, 2).text
    assert picture.routes("", [("a call", "a name", "a kernel")]).text == "\na call: a name, a kernel."
    assert "one tile of 128 has 28 elements of padding; 7 chunks of 16 have 12" in picture.chunks(100, 128, 16).text


# Three modes ----------------------------------------------------------------------------------------------------------


def test_without_a_gpu_a_lesson_names_its_record(page):
    shown = page.verdict()._repr_html_()
    assert re.search(r"Record of NVIDIA H\d00\b.*?, 20\d\d-.*Liger and quack are libraries", shown)
    with pytest.raises(ValueError, match=r"expected eager, one_row, rows, chunks, got one_row"):
        page.steps(one_row=forgetful)
    shown = page.steps(**dict.fromkeys(page.about.STEPS, forgetful))
    assert "record of NVIDIA" in repr(shown)
    assert len(page.findings().items) <= 4
    text = page.use().text
    assert "pip install" in text and "pip install fusebook\n" not in text
    text = page.footer().text
    assert re.search(r"Evidence: \d+ checks behind this page, \d+ hold\. \d+ do not hold:\n- claim: ", text)


def test_the_wheel_of_a_published_site_is_installed(page, monkeypatch):
    monkeypatch.setenv("FUSEBOOK_URL", "https://example.org/book")
    wheel = f"fusebook-{fusebook.__version__}-py3-none-any.whl"
    assert _numbers.install()[0] == f"**Install:** `pip install https://example.org/book/wheel/{wheel}`."


@pytest.fixture
def a_gpu(monkeypatch, replayed):
    """A GPU with a clock that says what it likes, and notes what it times."""
    from triton.runtime.interpreter import GridExecutor

    launched, call = [], GridExecutor.__call__

    def noted(self, *given, **how):
        launched.append(self.fn.__name__)
        return call(self, *given, **how)

    def measure(functions, *, repeat=30, kinds=timing.KINDS, **_):
        found = {}
        for i, (name, function) in enumerate(functions.items()):
            before = len(launched)
            function()
            seen[name] = launched[before:]
            found[name] = {kind: timing.Quantiles(*3 * [(9 - i) * 1e-6], repeat) for kind in kinds}
        return found

    seen = {}
    on = machine(slug="test-gpu", name="Test GPU")
    monkeypatch.setattr(GridExecutor, "__call__", noted)
    monkeypatch.setattr(_place, "live", lambda: True)
    monkeypatch.setattr(machines, "here", lambda **_: on)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "warm", lambda f: {n: found["warm"] for n, found in measure(f).items()})
    monkeypatch.setattr(timing, "cold", lambda f, **how: {n: found["cold"] for n, found in measure(f).items()})

    def run(op, *, config, dtype, **_):
        frame = synthetic.frame(op, config, dtype, on)
        frame["peak_bytes"] *= 2
        return frame

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(evidence.load("plot_102_softmax"), "SHAPES", ((6, 256), (5, 781), (4, 2048), (3, 3000)))
    monkeypatch.setattr(evidence.load("plot_101_elementwise"), "SHAPES", ((9, 100),))
    monkeypatch.setattr(evidence.load("plot_104_norms"), "SHAPES", ((9, 256), (3, 8192)))
    monkeypatch.setattr(evidence.load("plot_105_cross_entropy"), "SHAPES", ((5, 1000), (3, 32000)))
    monkeypatch.setattr(evidence.load("plot_203_four_bits"), "SHAPES", ((1, 256, 32), (8, 256, 32), (16, 256, 32)))
    loop = pd.DataFrame({"implementation": ["bfloat16", "tinygemm", "fusebook"], "tokens per second": [1.0, 2.0, 3.0]})
    frames = evidence.load("plot_203_four_bits").FRAMES
    monkeypatch.setitem(frames, "tokens", dataclasses.replace(frames["tokens"], function=lambda: loop))
    training = evidence.load("plot_305_training")
    monkeypatch.setattr(training, "SHAPES", ((2, 3, 2, 8, 0, 37),))
    kinds = {f"{kind}, ms": 0.1 for kind in [*training.KINDS, training.OTHER]}
    trained = pd.DataFrame({"implementation": [*training.IMPLEMENTATIONS], "model": "Llama", "tokens": 2048, **kinds})
    trained = trained.assign(ms=1.0, first_s=2.0, peak_bytes=2.0**30)
    few = {"training": trained, "losses": trained.rename(columns={"implementation": "run"}), "gradients": trained}
    for name, frame in {**few, "gradient": trained}.items():
        spec = dataclasses.replace(training.FRAMES[name], function=lambda frame=frame: frame)
        monkeypatch.setitem(training.FRAMES, name, spec)
    for name in ("plot_201_gemm_concat", "plot_204_descriptors"):
        monkeypatch.setattr(evidence.load(name), "SHAPES", ((64, 64, 64), (128, 128, 128)))
    monkeypatch.setattr(evidence.load("plot_304_adamw"), "SHAPES", ((3000, 1), (300, 7)))
    frames = evidence.load("plot_304_adamw").FRAMES
    for name in ("host", "walk", "billion"):
        small = pd.DataFrame({"step": ["fusebook"], "us": 1.0})
        monkeypatch.setitem(frames, name, dataclasses.replace(frames[name], function=lambda rows=small: rows))
    fit = evidence.load("plot_301_logistic_step")
    monkeypatch.setattr(fit, "SHAPES", ((4, 30), (6, 30)))
    monkeypatch.setattr(fit, "_STEPS", 2)
    small = pd.DataFrame({"step": ["fusebook"], "seconds": 1.0})
    monkeypatch.setitem(fit.FRAMES, "seconds", dataclasses.replace(fit.FRAMES["seconds"], function=lambda: small))
    monkeypatch.setattr(evidence.load("plot_202_swiglu"), "SHAPES", ((66, 64, 64), (1, 64, 64)))
    monkeypatch.setattr(evidence.load("plot_103_scatter_nd"), "SHAPES", ((16, 32, 32), (40, 32, 20)))
    monkeypatch.setattr(evidence.load("plot_303_kmeans"), "SHAPES", ((300, 2, 2),))
    moving = evidence.load("plot_307_moving_centres")
    monkeypatch.setattr(moving, "SHAPES", ((300, 2, 2),))
    apart = pd.DataFrame({"n": [9], "d": 2, "k": 3, "assign": 1.0, "one iteration": 1.0, "same of 100": 100})
    apart["both, two calls"] = 2.0
    spec = dataclasses.replace(moving.FRAMES["interleaved"], function=lambda: apart)
    monkeypatch.setitem(moving.FRAMES, "interleaved", spec)
    filtered = evidence.load("plot_306_tf32_filter")
    monkeypatch.setattr(filtered, "SHAPES", ((70, 20, 30),))
    alone = pd.DataFrame({"n": [9], "d": 2, "k": 3, "fusebook": 1.0, "bare product": 1.0})
    monkeypatch.setitem(
        filtered.FRAMES, "product", dataclasses.replace(filtered.FRAMES["product"], function=lambda: alone)
    )
    whole = evidence.load("plot_308_scikit_learn")
    monkeypatch.setattr(whole, "SHAPES", ((300, 2, 3),))
    runs = pd.DataFrame({"points": ["plane", "wide"], "n": [9, 8], "d": 2, "k": 3, "fusebook, s": 1.0})
    runs = runs.assign(
        **{f"{what}, {who}": 1 for what in ("inertia", "iterations") for who in ("fusebook", "scikit-learn")}
    )
    monkeypatch.setitem(whole.FRAMES, "ends", dataclasses.replace(whole.FRAMES["ends"], function=lambda: runs))
    head = evidence.load("plot_108_chunked_head")
    monkeypatch.setattr(head, "SHAPES", ((37, 16, 1000),))
    rows = pd.DataFrame({"rows": [256, 1024, 8192], "gpu_us": 2.0, "peak_bytes": 2.0, "beyond": 1.0})
    monkeypatch.setitem(head.FRAMES, "rows", dataclasses.replace(head.FRAMES["rows"], function=lambda: rows))
    return seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is there needs no other one")
def test_on_a_gpu_a_lesson_times_each_of_its_steps(a_gpu):
    names = runpy.run_path(str(ROOT / "examples" / "plot_102_softmax.py"), run_name="lesson")
    page = names["page"]
    assert {*page.about.STEPS, "fusebook", "copy"} <= set(a_gpu)
    assert a_gpu["one_row"] == ["one_row"] and a_gpu["rows"] == ["some_rows"] and a_gpu["chunks"] == ["in_chunks"]
    assert a_gpu["fusebook"], "the library's kernel is timed too"
    frame = page.frames["steps"]
    assert set(frame["step"]) == {*page.about.STEPS, "fusebook"}
    assert frame["correct"].all() and frame["gpu_us"].notna().all()
    assert set(page.frames.known) == {"sweep", "steps"}, "nothing is replayed"
    assert "measured now on Test GPU" in _numbers.origin(page._sweep())
    assert _numbers.gain(page.frames, "one_row", "781") == "(1.12x faster than eager at N = 781)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is there needs no other one")
def test_sessions_are_checked_and_timed_with_and_without_a_graph(a_gpu, monkeypatch):
    pytest.importorskip("onnxruntime")
    about = evidence.load("plot_501_onnxruntime")
    monkeypatch.setattr(about, "SHAPES", ((12, 33, 40),))
    made = []

    def session(**options):
        made.append(options)
        return about.Graph(about.model("ScatterND"), **options)

    frame = about.timed(dict.fromkeys(about.STEPS, session))
    assert frame["correct"].all() and frame["latency_us"].notna().all()
    assert {*about.STEPS, "chain, arrays", "library, captured", "from torch"} <= {*frame["step"]}
    assert sum(bool(options) for options in made) == 3, "steps without a graph are captured, too"
    assert frame.set_index("step")["gpu_us"].isna()[["chain, arrays", "chain"]].tolist() == [True, False]
    assert about.staircase(frame).index[1] == "step 1, callback"


STEP = """
import triton
import triton.language as tl

@triton.jit
def kernel(y_ptr, x_ptr, N):
    tl.store(y_ptr, tl.load(x_ptr))  # read N

def one(x):
    kernel[(1,)](x, x, 1)
"""


def test_a_record_is_stale_when_the_kernel_of_a_step_changed(page, tmp_path):
    def code(old="", new=""):
        file = tmp_path / f"page_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(STEP.replace(old, new))
        steps = {"one": runpy.run_path(str(file))["one"]}
        return sources.hashes(*_numbers.code_of(page.op, page.about, steps))[0]

    assert code("tl.load(x_ptr)", "tl.load(x_ptr + 1)") != code() == code("  # read N", "  # read MN")
    assert code("x, x, 1)", "x, x, 2)") != code()


def test_sizes_and_steps_of_the_evidence_make_a_record_stale(page, monkeypatch):
    def code():
        return sources.hashes(*_numbers.code_of(page.op, page.about, {}))[0]

    before = code()
    monkeypatch.setattr(page.about, "SHAPES", ((1, 2),))
    assert code() != before
    monkeypatch.undo()
    monkeypatch.setattr(page.about, "EXTRA_STEPS", {})
    assert code() != before


@pytest.mark.parametrize("name", LESSONS)
def test_a_page_records_all_rows_once_and_those_of_a_point_together(name, monkeypatch):
    about = evidence.load(name)
    page = object.__new__(lesson.Page)
    page.about = about
    calls = []
    monkeypatch.setattr(sys.modules["fusebook.lesson._page"], "results", lambda op, **how: calls.append((op.name, how)))
    lesson.Page._record_rows(page)

    def rows(name, config, dtype, variants):
        points = [tuple(dims.items()) for _, dims in bench.points(OPS[name], config)]
        return [*itertools.product([name], bench.dtypes(dtype), points, variants or OPS[name].variants)]

    given = [row for operator, how in calls for row in rows(operator, **how)]
    assert len(given) == len(set(given)) and all(how["config"] and how["variants"] for _, how in calls)
    at = [key for operator, how in calls for key in {row[:3] for row in rows(operator, **how)}]
    assert len(at) == len(set(at))
    specs = [s for s in about.FRAMES.values() if isinstance(s, evidence.Recorded) and not s.borrowed]
    assert set(given) == set().union(*(rows(s.op, s.config, s.dtype, s.variants) for s in specs))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is there needs no other one")
def test_a_page_that_is_run_for_its_counters_launches_its_steps_alone(a_gpu, monkeypatch):
    monkeypatch.setenv("_FUSEBOOK_COUNT", "softmax_counters")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)
    monkeypatch.setattr(sys.modules["fusebook.lesson._counters"], "_run", lambda steps: counted.extend(steps))
    monkeypatch.setattr(bench, "run", None)
    counted = []
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "plot_102_softmax.py"), run_name="lesson")
    assert ended.value.code == 0 and not a_gpu, "nothing is timed"
    assert counted == [
        "eager",
        "one_row",
        "rows",
        "chunks",
        "TorchScript",
        "one_row, more warps",
        "persistent",
        "fusebook",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is there needs no other one")
@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("plot_101_elementwise", {*ELEMENTWISE, "pages/elementwise_steps"}),
        ("plot_103_scatter_nd", {*SCATTERS, "pages/scatter_nd_source"}),
        ("plot_104_norms", {*NORMS, "pages/norms_steps"}),
        ("plot_105_cross_entropy", {"cross_entropy", "pages/cross_entropy_steps", "pages/cross_entropy_in_place"}),
        (
            "plot_108_chunked_head",
            {"linear_cross_entropy", "pages/linear_cross_entropy_steps", "pages/linear_cross_entropy_chunks"},
        ),
        ("plot_203_four_bits", {"quantized_matmul", "pages/quantized_matmul_steps", "pages/quantized_matmul_tokens"}),
        ("plot_201_gemm_concat", {"concat_gemm", "pages/gemm_steps", "pages/gemm_quack"}),
        ("plot_202_swiglu", {"swiglu", "pages/swiglu_compiled", "pages/swiglu_in_turn"}),
        ("plot_204_descriptors", {"pages/gemm_persistent_steps"}),
        (
            "plot_305_training",
            {
                "rope",
                *(f"pages/{name}" for name in ("rope_steps", "rope_gradient", "training")),
                "pages/training_losses",
                "pages/training_gradients",
            },
        ),
        (
            "plot_301_logistic_step",
            {"logistic_fit", "logistic_step", "pages/logistic_steps", "pages/logistic_seconds"},
        ),
        ("plot_303_kmeans", {"kmeans_assign", "kmeans_update", "kmeans_step", "pages/kmeans_teaching"}),
        ("plot_307_moving_centres", {"pages/kmeans_update_steps", "pages/kmeans_iteration"}),
        ("plot_306_tf32_filter", {"pages/kmeans_screen_steps", "pages/kmeans_product"}),
        ("plot_308_scikit_learn", {"pages/kmeans_end", "pages/kmeans_loops"}),
        ("plot_304_adamw", {"adamw_step", *(f"pages/adamw_{name}" for name in ("steps", "host", "walk", "billion"))}),
    ],
)
def test_what_no_step_of_a_lesson_shows_is_recorded_too(name, files, a_gpu, tmp_path, monkeypatch):
    in_place = pd.DataFrame({"variant": ["fusebook", "torch"], "peak_bytes": 2.0, "gpu_us": 1.0})
    losses = evidence.load("plot_105_cross_entropy")
    function = dataclasses.replace(losses.FRAMES["in place"], function=lambda: in_place)
    monkeypatch.setitem(losses.FRAMES, "in place", function)
    products = evidence.load("plot_201_gemm_concat")
    quack = pd.DataFrame({"step": ["fusebook"], "gpu_us": 1.0, "n": 256})
    function = dataclasses.replace(products.FRAMES["quack"], function=lambda: quack)
    monkeypatch.setitem(products.FRAMES, "quack", function)
    gated = evidence.load("plot_202_swiglu")
    monkeypatch.setattr(gated, "EXTRA_STEPS", {})
    function = dataclasses.replace(gated.FRAMES["turns"], function=lambda: quack)
    monkeypatch.setitem(gated.FRAMES, "turns", function)
    monkeypatch.setenv("_FUSEBOOK_RECORD", str(tmp_path / "records"))
    page = runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="lesson")["page"]
    steps = page.frames["steps"]
    assert {*page.about.STEPS, "fusebook"} <= set(steps["step"]) & set(a_gpu)
    clock = next(name for name in ("gpu_us", "gpu_warm_us", "latency_us") if name in steps)
    assert steps["correct"].all() and steps[clock].notna().all()
    folder = tmp_path / "records" / "test-gpu"
    assert {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.csv")} == files


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is there needs no other one")
def test_an_operator_is_timed_in_each_use(a_gpu, monkeypatch):
    about = evidence.load("plot_401_operator")
    monkeypatch.setattr(about, "SHAPES", ((4, 8), (6, 9)))
    monkeypatch.setattr(timing, "host", lambda calls, **_: dict.fromkeys(calls))  # each takes too long for it
    frame = about.timed(dict.fromkeys(about.STEPS, fusebook.silu)).set_index(["shape", "step"])
    small, large = frame.loc["4x8"], frame.loc["6x9"]
    assert {*about.STEPS, "no batch rule", "torch", "fusebook"} == {*small.index} == {*large.index}
    assert frame["correct"].all() and frame["end_to_end_us"].notna().all()
    assert small.loc[["operator", "torch", "fusebook"], ["gradient_us", "vmap_us"]].notna().all(axis=None)
    assert small.loc["no batch rule", "vmap_us"] > 0
    assert large[["gradient_us", "vmap_us"]].isna().all(axis=None) and small.isna().loc["function", "vmap_us"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is there needs no other one")
def test_launches_are_timed_with_a_gradient_too(a_gpu, monkeypatch):
    about = evidence.load("plot_003_launching")
    monkeypatch.setattr(about, "SHAPES", ((4, 8),))
    frame = about.timed(dict.fromkeys(about.STEPS, torch.exp)).set_index("step")
    assert [*about.STEPS, "fusebook"] == [*frame.index] and frame["correct"].all()
    assert frame[["launch_us", "gpu_warm_us", "end_to_end_us"]].notna().all(axis=None)
    assert frame["gradient_us"].notna().tolist() == [True, False, False, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is there needs no other one")
@pytest.mark.parametrize("name", SEVERAL)
def test_on_a_gpu_a_lesson_with_several_inputs_times_its_steps(name, a_gpu):
    page = runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="lesson")["page"]
    frame = page.frames["steps"]
    assert set(frame["step"]) == {*page.about.STEPS, "fusebook"} <= set(a_gpu)
    assert frame["correct"].all() and frame["gpu_us"].notna().all() and "peak_bytes" in frame
    assert {"sweep", "steps"} <= set(page.frames.known) <= {"sweep", "steps", "rows"}, "nothing is replayed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is there needs no other one")
def test_a_run_that_records_takes_all_that_the_evidence_reads(a_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("_FUSEBOOK_RECORD", str(tmp_path / "records"))
    monkeypatch.setattr(_checks, "_judged", lambda *_: pytest.fail("no record has checks"))
    runpy.run_path(str(ROOT / "examples" / "plot_102_softmax.py"), run_name="lesson")
    assert {"TorchScript", "one_row, more warps", "persistent"} <= set(a_gpu)
    written = {path.relative_to(tmp_path / "records" / "test-gpu").as_posix() for path in tmp_path.rglob("*.csv")}
    assert written == {"softmax.csv", "softmax_backward.csv", "pages/softmax_steps.csv"}, "what is borrowed stays"
    frames = Frames(evidence.load("plot_102_softmax"))
    monkeypatch.setattr(machines, "places", lambda: [tmp_path / "records" / "test-gpu"])
    assert set(frames["steps"]["step"]) > {"eager", "TorchScript", "fusebook"}
    assert len(frames["large"]) and len(frames["gradient"])
