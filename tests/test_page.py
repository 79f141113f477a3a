import ast
import inspect
import io
import os
import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import triton

import synthetic
import warm
from fusebook import plots, tables
from fusebook.cards.softmax import SOFTMAX
from fusebook.kernels.adamw import _chunk, adamw_step_eager
from fusebook.kernels.softmax import softmax, softmax_eager
from fusebook.lesson import _claims, _counters, _place, _results, _show
from fusebook.lesson._counters import COUNTERS, _counted
from fusebook.lesson.evidence import Measured, NotRecorded
from fusebook.measure import bench, record
from fusebook.measure import machine as machines
from toy import machine, toy, variant

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = [name for name in os.environ if name.startswith(("FUSEBOOK_", "_FUSEBOOK_"))]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No GPU, no records but those of the test, nothing from the caller's environment."""
    for name in VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setattr(_place, "live", lambda: False)
    for other in ("sphinx", "notebook"):  # another test of this process may have loaded the gallery
        monkeypatch.setattr(_place, other, lambda: False)
    monkeypatch.setattr(machines, "RECORDS", tmp_path / "records")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recorded():
    """A record of a made-up machine that has the name of the default GPU."""
    on = machine(slug=machines.SHIPPED, name="Made-up GPU")
    frame = synthetic.frame(SOFTMAX, "small,large,triton", "float32,bfloat16", on)
    record.write(frame, machines.RECORDS)
    return frame


# Arguments


def parse(monkeypatch, *argv):
    monkeypatch.delitem(sys.modules, "pytest")  # a script is what no test runs
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "plot_x.py", raising=False)  # and what is a file
    monkeypatch.setattr(sys, "argv", ["plot_x.py", *argv])
    return _results.study(SOFTMAX, config="triton", dtype="float32")


def test_arguments_have_defaults(monkeypatch):
    args = parse(monkeypatch)
    assert vars(args) == {"op": SOFTMAX, "config": "triton", "dtype": "float32", "warmup": 5, "repeat": 30}


def test_arguments_are_read(monkeypatch):
    args = parse(monkeypatch, "--config", "small,4096x781", "--dtype", "bfloat16", "--warmup", "1", "--repeat", "2")
    assert (args.config, args.dtype, args.warmup, args.repeat) == ("small,4096x781", "bfloat16", 1, 2)


@pytest.mark.parametrize(("number", "name"), [("1", "float32"), ("10", "float16")])
def test_itype_is_onnx_number_of_a_dtype(monkeypatch, number, name):
    assert parse(monkeypatch, "--itype", number).dtype == name


@pytest.mark.parametrize(
    ("argv", "choices"),
    [
        (["--config", "enormous"], "small, medium, large, llama, triton"),
        (["--dtype", "int8"], "float16, bfloat16, float32, float64"),
        (["--itype", "2"], "10"),
        (["--repeat", "0"], "from 1 up"),
        (["--warmup", "few"], "from 0 up"),
        (["--fast"], "unrecognized"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_nonsense_ends_with_code_2_and_the_choices(monkeypatch, capsys, argv, choices):
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, *argv)
    assert end.value.code == 2
    assert choices in capsys.readouterr().err


@pytest.mark.parametrize("place", ["notebook", "sphinx"])
def test_the_command_line_of_somebody_else_is_not_read(monkeypatch, place):
    monkeypatch.setattr(_place, place, lambda: True)
    assert parse(monkeypatch, "-f", "kernel-1.json").config == "triton"


# Results


def test_results_are_replayed_for_the_config_and_dtype_asked_for(recorded):
    frame = _results.results(SOFTMAX, config="large", dtype="bfloat16")
    assert set(frame["config"]) == {"large"}
    assert set(frame["dtype"]) == {"bfloat16"}
    assert frame.attrs["origin"].measured is False
    assert frame.attrs["origin"].machine.name == "Made-up GPU"
    points = frame[["M", "N"]].drop_duplicates().to_dict("records")
    assert points == list(SOFTMAX.configs["large"])


def test_a_size_is_replayed_from_whatever_config_has_it(recorded):
    frame = _results.results(SOFTMAX, config="65536x781,4096x1280")
    assert list(frame["N"].drop_duplicates()) == [781, 1280]


def test_results_may_be_of_fewer_variants(recorded):
    frame = _results.results(SOFTMAX, config="large", variants=("eager", "fusebook"))
    assert set(frame["variant"]) == {"eager", "fusebook"}


def test_without_gpu_and_record_one_sentence_names_the_command():
    with pytest.raises(_results.NoResults) as stop:
        _results.results(SOFTMAX, config="large", dtype="float16")
    assert str(stop.value) == (
        f"There is no CUDA GPU here and no record of softmax on {machines.SHIPPED} to replay: run "
        "`python -m fusebook.measure.record softmax --config large --dtype float16` on a machine with a GPU."
    )
    assert "<code>python -m fusebook.measure.record" in stop.value.banner._repr_html_()


def test_the_record_of_a_card_that_only_a_page_knows_is_made_with_the_pages():
    with pytest.raises(_results.NoResults, match=f"no record of toy on {machines.SHIPPED} to replay: run `nox -s"):
        _results.results(toy(), config="small")


def test_a_config_that_was_not_recorded_is_missed(recorded):
    with pytest.raises(_results.NoResults, match=f"no record of softmax for llama in float32 on {machines.SHIPPED}"):
        _results.results(SOFTMAX, config="large,llama")


def test_a_script_without_results_exits_with_code_1_and_no_traceback(tmp_path):
    script = tmp_path / "plot_1.py"
    script.write_text(
        "from fusebook.lesson._results import results\n"
        "from fusebook.cards.softmax import SOFTMAX\n"
        "results(SOFTMAX, config='3x5')\n"
    )
    env = {**os.environ, "FUSEBOOK_GPU": "no-such-gpu", "PYTHONPATH": str(ROOT / "src")}
    end = warm.run(str(script), env=env)
    assert end.returncode == 1
    assert len(end.stderr.strip().splitlines()) == 1
    assert "python -m fusebook.measure.record softmax --config 3x5" in end.stderr


def test_where_there_is_a_gpu_results_are_measured_and_recorded_on_request(monkeypatch, tmp_path):
    frame = synthetic.frame(SOFTMAX, "small")
    asked = {}
    monkeypatch.setattr(_place, "live", lambda: True)
    monkeypatch.setattr(bench, "run", lambda op, **given: asked.update(given) or frame)
    assert _results.results(SOFTMAX, config="large", live="small", repeat=7) is frame
    assert asked["config"] == "small"
    assert asked["repeat"] == 7
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("_FUSEBOOK_RECORD", str(tmp_path / "out"))
    _results.results(SOFTMAX, config="large", live="small")
    assert asked["config"] == "large"
    assert (tmp_path / "out" / "test-gpu" / "softmax.csv").exists()


def test_replay_is_forced_by_the_environment(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.delenv("FUSEBOOK_GPU", raising=False)
    assert _place.live()
    monkeypatch.setenv("FUSEBOOK_GPU", machines.SHIPPED)
    assert not _place.live()


def test_on_a_gpu_that_triton_no_longer_supports_results_are_replayed(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("FUSEBOOK_GPU", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert not _place.live()


def test_a_changed_wrapper_makes_its_results_stale():
    op = toy()
    record.write(synthetic.frame(op, "small", on=machine(slug=machines.SHIPPED)), machines.RECORDS)
    assert _results.results(op, config="small").attrs["origin"].stale == ()
    frame = _results.results(toy(honest=variant(lambda x: 2 * x)), config="small")
    assert frame.attrs["origin"].stale == ("toy was measured before the code changed (at commit 0123456789ab)",)


def test_records_are_all_of_a_gpu(recorded):
    assert list(_results.records()) == ["softmax"]


def test_without_any_record_there_are_no_results():
    with pytest.raises(_results.NoResults, match="nox -s record"):
        _results.records()


# measured


def drift():
    return pd.DataFrame({"what": ["a", "b"], "us": [1.5, np.nan]})


def other():
    return pd.DataFrame({"what": ["a", "b"], "us": [1.5, np.nan], "more": [1, 2]})


def test_what_a_page_measures_is_recorded_and_replayed(monkeypatch, tmp_path):
    on = machine(slug=machines.SHIPPED, name="Made-up GPU")
    monkeypatch.setattr(_place, "live", lambda: True)
    monkeypatch.setattr(machines, "here", lambda: on)
    monkeypatch.setenv("_FUSEBOOK_RECORD", str(machines.RECORDS))
    live = _results.measured("drift", drift)
    assert live.attrs["origin"].measured is True
    monkeypatch.setattr(_place, "live", lambda: False)
    replayed = _results.measured("drift", drift)
    pd.testing.assert_frame_equal(live, replayed, check_dtype=False)
    assert replayed.attrs["origin"].measured is False
    assert replayed.attrs["origin"].stale == ()
    assert replayed.attrs["origin"].machine.name == "Made-up GPU"
    why = "drift was measured before the code changed (at commit 0123456789ab)"
    assert _results.measured("drift", other).attrs["origin"].stale == (why,)


def test_what_an_older_lesson_measured_is_read_by_the_name_of_its_gpu_alone():
    rows = drift()
    rows.attrs["origin"] = bench.Origin(machine(slug=machines.SHIPPED), measured=True)
    record.write(rows, machines.RECORDS, "pages/drift")
    with pytest.raises(_results.NoResults, match="no record of drift"):
        _results.measured("drift", drift)
    with pytest.raises(NotRecorded, match="no record of drift"):
        Measured("drift").read()
    assert len(Measured("drift").read(machines.SHIPPED)) == len(rows)


def test_what_needs_no_gpu_is_measured_where_it_can_be(monkeypatch):
    monkeypatch.setattr(_place, "live", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _results.measured("drift", drift, live=True).attrs["origin"].measured is True
    for gpu in (False, True):  # what cannot be run here is replayed, whatever GPU there is
        monkeypatch.setattr(_place, "live", lambda gpu=gpu: gpu)
        with pytest.raises(_results.NoResults, match="no record of drift"):
            _results.measured("drift", drift, live=False)


def test_what_is_long_is_shown_on_demand():
    shown = _show.Folded("What was <generated>", _show.Listing("x = 1\ny = 2"))
    assert "<summary>What was &lt;generated&gt;</summary>" in shown._repr_html_()
    assert "x = 1" in shown._repr_html_() and repr(shown) == "What was <generated>\nx = 1\ny = 2"


def test_what_a_page_measures_is_missed_by_name():
    with pytest.raises(_results.NoResults, match=f"no record of drift on {machines.SHIPPED}"):
        _results.measured("drift", drift)


# Downloads


def test_downloads_are_a_csv_and_a_real_spreadsheet(recorded, tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    frame = _results.results(SOFTMAX, config="small")
    shown = _show.downloads(frame, "softmax")
    assert zipfile.is_zipfile("build/downloads/softmax.xlsx")
    sheet = openpyxl.load_workbook("build/downloads/softmax.xlsx").active
    assert sheet.max_row == len(frame) + 1
    assert [cell.value for cell in sheet[1]][:6] == ["op", "config", "variant", "dtype", "M", "N"]
    assert len(pd.read_csv("build/downloads/softmax.csv")) == len(frame)
    assert 'href="build/downloads/softmax.xlsx"' in shown._repr_html_()


def test_a_script_keeps_its_figure(monkeypatch):
    frame = pd.DataFrame({"t": [1.0, 2.0]}, index=pd.Index([1, 2], name="N"))
    ax = plots.lines(frame, title="t", ylabel="s")
    _show.downloads(frame, "figure", ax)
    assert not Path("build/downloads/figure.png").exists()
    monkeypatch.setattr(_place, "script", lambda: True)
    _show.downloads(frame, "figure", ax)
    assert Path("build/downloads/figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_of_a_checkout_writes_into_its_build_folder(tmp_path):
    """Whatever the current folder is, nothing is written next to the page."""
    (tmp_path / "examples").mkdir()
    for name in ("GALLERY_HEADER.rst", "plot_1.py"):
        (tmp_path / "examples" / name).write_text(
            "import fusebook\nimport pandas as pd\nfrom fusebook.lesson import _show\n"
            "_show.downloads(pd.DataFrame({'t': [1.0]}), 't')\n"
        )
    path = os.pathsep.join([str(Path(_place.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if k != "_FUSEBOOK_DOWNLOADS"} | {"PYTHONPATH": path}
    for script in ("plot_1.py", str(tmp_path / "examples" / "plot_1.py")):
        done = warm.run(script, cwd=tmp_path / "examples", env=env)
        assert done.returncode == 0, done.stderr
        written = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("t.*")}
        assert written == {"build/downloads/t.csv", "build/downloads/t.xlsx"}
        assert f"Written into {tmp_path / 'build' / 'downloads'}: t.csv, t.xlsx" in done.stdout


def test_downloads_keep_what_the_index_says():
    _show.downloads(pd.DataFrame({"t": [1.0]}, index=pd.Index([781], name="N")), "t")
    assert Path("build/downloads/t.csv").read_text() == "N,t\n781,1.0\n"


# What is shown


def test_what_is_shown_is_escaped_and_backticks_are_code():
    assert _show.rich("a < b: `x & y`") == "a &lt; b: <code>x &amp; y</code>"
    shown = _show.table(pd.DataFrame({"<n>": ["<b>"]}), "<caption>")._repr_html_()
    assert "<b>" not in shown
    assert "<n>" not in shown
    assert "<caption>" in shown.replace("&lt;caption&gt;", "")


def test_a_long_table_is_folded_and_a_short_one_is_not():
    long = pd.DataFrame({"a": range(50)})
    assert _show.table(long, "c")._repr_html_().startswith("<details")
    assert "<details" not in _show.table(long, "c", fold=False)._repr_html_()
    assert "<details" not in _show.table(long[:5], "c")._repr_html_()


def test_a_table_without_rows_says_so():
    nothing = pd.DataFrame({"a": []})
    assert repr(_show.table(nothing, "Points lost")) == "Points lost: none."
    assert "Points lost: none." in _show.table(nothing, "Points lost")._repr_html_()


def test_a_table_of_losses_that_nobody_measured_does_not_say_none():
    df = synthetic.frame(toy(fusebook=variant(lambda x: x + x)), "small")
    assert repr(_show.table(tables.losses(df), "Lost")) == "Lost: none."
    old = _show.table(tables.losses(df.drop(columns="launch_us"), kind="paid"), "Lost")
    assert repr(old) == "Lost: not measured." and "Lost: not measured." in old._repr_html_()


def test_a_table_can_be_reached_and_read_without_a_mouse():
    frame = pd.DataFrame({"t": [1.0]}, index=pd.Index([781], name="N"))
    text = _show.table(frame, "times")._repr_html_()
    for part in ('tabindex="0"', 'aria-label="times"', '<th scope="row">781</th>', '<th scope="col">t</th>'):
        assert part in text


# Claims


def test_a_claim_tells_its_verdict_without_colour():
    made = [_claims.Claim("a", True), _claims.Claim("b", False, detail="at c"), _claims.Claim("d", None)]
    shown = _claims.Claims(made)
    assert repr(shown) == "✓ true: a\n✗ false: b (at c)\n– not measured: d"
    assert 'aria-label="false">✗</span>' in shown._repr_html_()


def test_statements_of_others_targets_and_exercises_are_counted_apart():
    kinds = ["claim", "claim", "claim", "statement", "target"]
    shown = _claims.Claims([_claims.Claim(str(n), n < 2, kind) for n, kind in enumerate(kinds)])
    counted = "Claims: 2 true, 1 false. Targets: 1 missed. Statements of others: 1 does not hold."
    assert repr(shown).splitlines()[-1] == counted
    text = shown._repr_html_()
    assert text.count('class="fb-claim fb-true"') == 2 and text.count('class="fb-statement fb-false"') == 1
    assert "Claims:" not in repr(_claims.Claims(shown.items[:2]))
    right = _claims.exercise("f", lambda x: softmax(x), lambda x: torch.softmax(x, -1), CASES)
    assert 'class="fb-exercise fb-true"' in right._repr_html_()


def test_in_a_script_what_a_block_ends_in_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(_place, "script", lambda: True)
    _claims.Claims([_claims.Claim("a", True)])._now()
    assert capsys.readouterr().out == "✓ true: a\n\n"


# Source and exercises


@triton.jit
def kernel(y_ptr, BLOCK: triton.language.constexpr):
    pass


def test_a_page_notes_what_it_reads(monkeypatch, recorded, tmp_path):
    notes = tmp_path / "notes"
    monkeypatch.setenv("_FUSEBOOK_DEPS", str(notes))

    def noted():
        lines = {Path(line).name for line in notes.read_text().splitlines()}
        notes.unlink()
        return lines

    _results.results(SOFTMAX, config="large")
    assert noted() == {"softmax.csv", "machine.json"}
    _results.records()
    assert noted() == {machines.SHIPPED, "softmax.csv", "machine.json"}
    with pytest.raises(_results.NoResults):
        _results.measured("not_yet", lambda: None, live=False)
    assert noted() == {"not_yet.csv"}
    _show.Source(softmax_eager)
    assert noted() == {"softmax.py"}
    _show.solution("solutions/plot_1.py")
    assert noted() == {"plot_1.py"}
    rows = drift()
    rows.attrs["origin"] = bench.Origin(machine(slug=machines.SHIPPED), measured=True, code="0")
    record.write(rows, machines.RECORDS, "pages/drift")
    _results.measured("drift", drift)
    assert noted() == {"drift.csv", "machine.json"}


def test_source_shows_functions_kernels_and_operators():
    text = repr(_show.Source(softmax_eager, kernel))
    assert "top = x.amax(-1, keepdim=True)  # read MN, write M" in text
    assert "@triton.jit\ndef kernel(y_ptr" in text
    operator = torch.library.custom_op("fusebook_tests::twice", mutates_args=())(twice)
    assert "return 2 * x" in repr(_show.Source(operator))


def twice(x: torch.Tensor) -> torch.Tensor:
    """Two of them."""
    return 2 * x


def test_source_leaves_docstrings_out_on_request():
    assert '"""' in repr(_show.Source(twice))
    assert repr(_show.Source(twice, doc=False)).splitlines()[1:] == [
        "def twice(x: torch.Tensor) -> torch.Tensor:",
        "    return 2 * x",
    ]


def test_source_is_highlighted_and_escaped():
    text = _show.Source(twice)._repr_html_()
    assert 'class="highlight-python notranslate"' in text
    assert '<span class="k">def</span>' in text
    assert "-&gt;" in text


def test_a_listing_keeps_its_lines_and_is_highlighted_on_request():
    text = "if (i < n)\n    y[i] = 2;"
    assert "if (i &lt; n)\n" in _show.Listing(text)._repr_html_()
    coloured = _show.Listing(text, "cuda")._repr_html_()
    assert '<span class="k">if</span>' in coloured and "i &lt; n" not in coloured
    assert repr(_show.Listing(text, "cuda")) == text


def test_source_refuses_what_has_none():
    with pytest.raises(TypeError, match="expected a function, a Triton kernel or a custom operator, got 3"):
        _show.Source(3)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(torch.tensor([[1.0, second, 3.0]], device=DEVICE),) for second in (2.0, 200.0)]


def test_an_exercise_is_answered_by_the_check_of_the_library():
    assert (
        repr(_claims.exercise("right", lambda x: softmax(x), lambda x: torch.softmax(x, -1), CASES)) == "☑ done: right"
    )
    shown = _claims.exercise("no maximum", lambda x: x.exp() / x.exp().sum(-1), lambda x: torch.softmax(x, -1), CASES)
    assert repr(shown).startswith("☐ to do: no maximum (on 1x3 float32: error inf")


def test_an_exercise_that_raises_is_answered_too(monkeypatch):
    monkeypatch.setenv("FUSEBOOK_STRICT", "1")

    def broken(x):
        raise NotImplementedError("yours to write")

    shown = _claims.exercise("broken", broken, lambda x: torch.softmax(x, -1), CASES)
    assert repr(shown) == "☐ to do: broken (NotImplementedError on 1x3 float32: yours to write)"


def test_a_solution_is_offered_for_download(monkeypatch, tmp_path):
    source = tmp_path / "solutions" / "plot_1.py"
    source.parent.mkdir()
    source.write_text("pass\n")
    monkeypatch.setenv("_FUSEBOOK_DOWNLOADS", str(tmp_path / "downloads"))
    shown = _show.solution("solutions/plot_1.py")
    assert 'href="downloads/plot_1.py"' in shown._repr_html_()
    assert (tmp_path / "downloads" / "plot_1.py").read_text() == "pass\n"


def test_results_of_a_card_that_this_library_does_not_have_are_missed():
    with pytest.raises(_results.NoResults, match="no record of toy"):
        _results.results(toy(), config="small")


def test_a_table_puts_numbers_right_and_text_left_and_the_best_in_bold(recorded):
    frame = pd.DataFrame(
        {"torch": [2.0, 1.0], "ours": [1.0, 3.0], "note": ["a", "b"]}, index=pd.Index([1, 2], name="N")
    )
    frame.attrs["best"] = "least in a row"
    shown = _show.table(frame, "t")._repr_html_()
    assert '<tr><th scope="row">1</th> <td>2</td> <td><strong>1</strong></td> <td class="fb-text">a</td></tr>' in shown
    assert '<td><strong>1</strong></td> <td>3</td> <td class="fb-text">b</td>' in shown
    assert '<th scope="col">torch</th>' in shown and '<th scope="col" class="fb-text">note</th>' in shown
    words = re.sub("<[^>]*>", "", shown)
    assert "2 1 a" in words and "torch\nours\nnote" in words, "who reads the text alone tells cells apart"
    assert "<strong>" not in _show.table(frame.assign(ours=frame["torch"]).iloc[:, :1], "one way")._repr_html_()
    frame.attrs["best"] = {"torch": "least"}
    shown = _show.table(frame, "s")._repr_html_()
    assert shown.count("<strong>") == 1 and "the best in bold" in shown


def test_a_head_without_a_name_is_no_head():
    shown = _show.table(pd.DataFrame({"a": [1]}, index=["x"]), "t")._repr_html_()
    assert "<thead><tr><td></td>" in shown and "></th>" not in shown


def test_a_notebook_leaves_no_files(monkeypatch):
    pytest.importorskip("openpyxl")
    monkeypatch.setattr(_place, "notebook", lambda: True)
    shown = _show.downloads(pd.DataFrame({"t": [1.0]}), "t")
    assert not list(Path().rglob("t.*"))
    assert 'href="data:text/csv;base64,dAoxLjAK"' in shown._repr_html_() and "t.xlsx" in repr(shown)


def test_a_page_ends_with_what_it_ran_on():
    told = repr(_show.environment())
    assert f"torch {torch.__version__}" in told and "fusebook" in told and "Python" in told


def test_lines_of_code_are_counted_without_what_says_nothing_to_the_machine():
    def documented(x):
        """Says something.

        In several lines.
        """
        # and more

        return x + 1

    assert _show.lines_of(documented) == 2
    assert _show.lines_of(documented, documented) == 4


def test_the_lines_behind_a_kernel_are_those_of_its_own_modules():
    def lines(name):
        return _show._lines(ast.parse(inspect.getsource(sys.modules[f"fusebook.kernels.{name}"])))

    one = _show.lines_behind(adamw_step_eager)  # its module imports nothing but what launches
    assert one == _show.lines_behind(_chunk) == lines("adamw") > 100  # interpreted, a kernel is an object of Triton's
    family = ("softmax", "_rows")
    assert _show.lines_behind(softmax_eager, softmax_eager) == sum(map(lines, family))


NCU = """==PROF== Connected to process 1
"ID","Kernel Name","{}","{}","{}","{}"
"","","byte","byte","sector","%"
"0","spin_kernel(long)","0","0","","1"
"1","void at::native::reduce_kernel<512, 1>(T1)","134,217,728","64","4","80.5"
"2","two(float *)","1","2","","3"
"3","spin_kernel(long)","0","0","","1"
"4","one_row","100","64","16","12.5"
""".format(*COUNTERS)


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Makes an Nsight Compute that answers once it is the turn of its page."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(_place, "script", lambda: True)

    def make(text="", said="", seconds=0):
        code = f"import sys, time; sys.stdin.readline() or sys.exit(1); time.sleep({seconds}); print({said!r})"
        file = tmp_path / "bin" / "ncu"
        file.write_text(
            f"#!{sys.executable}\n{code}\nopen(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({text!r})\n"
        )
        file.chmod(0o755)

    return make


@pytest.mark.parametrize("ahead", [False, True])
def test_counters_are_those_of_the_step_that_launched_the_kernel(ncu, ahead):
    ncu(NCU)
    if ahead:
        _counters.begin("name", "page.py")
        assert "name" in _counters._begun
    seen = _counted("name", lambda: {"chain": print, "ours": print})
    assert "name" not in _counters._begun
    assert seen["step"].tolist() == ["chain", "chain", "ours"]
    assert seen["kernel"].tolist() == ["at::native::reduce_kernel", "two", "one_row"]
    assert seen.loc[0, ["read", "written", "sectors", "occupancy"]].tolist() == [134217728, 64, 4, 80.5]
    assert seen["sectors"].isna().tolist() == [False, True, False]


def test_where_nsight_compute_counts_nothing_its_words_are_told(ncu):
    ncu(said="==ERROR== no permission")
    with pytest.raises(RuntimeError, match="counted nothing in name:\\n==ERROR== no permission"):
        _counted("name", lambda: {"no step": print})


def test_where_nsight_compute_fails_the_page_goes_on_without(ncu, monkeypatch):
    tried = []

    def refused(name, measure, live, by_device, code_of):
        tried.append(live)
        return measure() if live is None else pd.DataFrame({"step": ["recorded"]})

    ncu(seconds=60)
    monkeypatch.setattr(_counters, "LONGEST", 0.1)
    monkeypatch.setattr(_counters, "measured", refused)
    with pytest.warns(UserWarning, match="timed out after 0.1"):
        seen = _counters.counters("name", lambda: {"no step": print})
    assert tried == [None, False] and seen["step"].tolist() == ["recorded"]


def test_a_page_that_counts_waits_for_its_turn_and_ends_without_one(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    _counters.wait()
    with pytest.raises(SystemExit):
        _counters.wait()


@pytest.mark.parametrize(("variable", "value"), [("_FUSEBOOK_COUNT", "name"), ("_FUSEBOOK_CLOCKS", "host")])
def test_nothing_counts_within_counters_nor_for_clocks_of_the_host(ncu, monkeypatch, variable, value):
    ncu()
    assert _counters.able()
    monkeypatch.setenv(variable, value)
    assert not _counters.able()


def test_without_counters_and_a_record_the_table_says_so():
    seen = _counters.counters("nobody_counted_this", dict)
    assert repr(_show.table(seen.set_index("step"), "Counters")) == "Counters: not measured."
