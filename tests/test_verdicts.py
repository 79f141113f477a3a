"""Whether to write a kernel is decided by records alone: made-up ones here, whose answer is known."""

import re

import pandas as pd
import pytest

import answers
import front
import lessons
import pages
import sorting
import synthetic
from fusebook import tables
from fusebook.cards import OPS
from fusebook.cards.logistic_step import LOGISTIC_STEP
from fusebook.cards.softmax import SOFTMAX
from fusebook.lesson import _verdicts
from fusebook.lesson._show import sortable


@pytest.fixture(scope="module")
def df():
    return synthetic.frame(SOFTMAX, "small,medium,large", "float32,bfloat16")


def scaled(df, variant, factor, where=None):
    """The same results, but a variant takes so many times as long by every clock."""
    rows = df["variant"].eq(variant) & (True if where is None else where)
    changed = df.copy()
    for kind in ("cold", "warm", "host", "call"):
        changed.loc[rows, tables.column(kind)] *= factor
    return changed


def test_variants_belong_to_what_a_reader_chooses_from():
    told = {name: _verdicts.group(SOFTMAX, name) for name in SOFTMAX.variants}
    assert told == {
        "eager": "torch",
        "torch": "torch",
        "torch.compile": "torch.compile",
        "fusebook": "ours",
        "Liger": "libraries",
        "quack": "libraries",
    }
    assert _verdicts.group(SOFTMAX, "torch (as installed)") == "torch"
    assert _verdicts.group(SOFTMAX, "fusebook, checked") == ""
    assert _verdicts.group(SOFTMAX, "gone") == ""
    assert _verdicts.group(LOGISTIC_STEP, "NumPy") == ""  # on the CPU
    assert _verdicts.group(OPS["exp"], "CUDA C") == ""  # a kernel that a page wrote
    assert _verdicts.group(LOGISTIC_STEP, "reduce-overhead") == "torch.compile"


def test_every_variant_of_every_card_belongs_somewhere():
    for op in OPS.values():
        for name, way in op.variants.items():
            elsewhere = name.startswith("fusebook") or way.on_cpu or "cupy" in way.needs
            assert _verdicts.group(op, name) or elsewhere, (op.name, name)


def test_the_device_and_the_caller_are_asked_apart(df):
    found = answers.verdict(SOFTMAX, df)
    device, caller = found.torch["cold"], found.torch["paid"]
    points = len(df.drop_duplicates(["dtype", "M", "N"]))
    assert (device.wins, device.ties, device.losses) == (points, 0, 0)  # 1.01 against 1.2 of a copy
    assert device.most == pytest.approx(1.01 / 1.2)
    assert caller.points == points
    assert caller.losses > 0  # it queues in 20 us, torch in 8
    assert caller.most > 1.02 > device.most
    assert found.word == "yes, from a size on"


def test_libraries_count_among_all_and_not_beside_torch(df):
    slow = scaled(df, "fusebook", 1.1)
    found = answers.verdict(SOFTMAX, slow)
    assert found.torch["cold"].losses == 0
    assert found.libraries["cold"].losses > 0
    assert found.libraries["cold"].most == pytest.approx(1.1 * 1.01 / 1.02)  # quack
    assert found.library == "Liger"  # the first that is faster
    assert answers.verdict(SOFTMAX, df).library == ""


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_ours_is_what_a_caller_gets_where_a_launcher_chooses(df, factor):
    """And not the faster of the kernel and of what is chosen."""
    chosen = scaled(df[(df["variant"] == "fusebook") & (df["N"] > 4096)], "fusebook", factor)
    both = pd.concat([chosen.assign(variant="fusebook (chosen)"), df], ignore_index=True)
    found = answers.verdict(SOFTMAX, both).torch["cold"]
    points = df.drop_duplicates(["dtype", "M", "N"])
    assert found.points == len(points)
    least, most = sorted([factor * 1.01 / 1.2, 1.01 / 1.2])
    assert found.least == pytest.approx(least) and found.most == pytest.approx(most)
    failed = pd.concat([chosen.assign(variant="fusebook (chosen)", status="wrong"), df], ignore_index=True)
    found = answers.verdict(SOFTMAX, failed).torch["cold"]
    assert found.points == len(points) and found.least == pytest.approx(found.most)


def test_a_library_is_faster_where_it_wins_more_often_than_it_loses(df):
    half = df["dtype"].eq("float32")
    even = scaled(scaled(scaled(df, "quack", 100), "Liger", 100), "Liger", 1e-4, half)
    assert answers.verdict(SOFTMAX, even).library == ""
    assert answers.verdict(SOFTMAX, scaled(even, "Liger", 1e-4, even["N"].eq(even["N"].max()))).library == "Liger"


def test_the_device_answers_where_the_caller_was_not_timed(df):
    callers = [column for column in df if column.startswith(("launch_us", "latency_us"))]
    assert answers.verdict(SOFTMAX, df.assign(**dict.fromkeys(callers, float("nan")))).word == "yes, on the device"
    assert not answers.verdict(SOFTMAX, df).word.endswith("device")


def test_two_percent_are_a_tie(df):
    even = answers.verdict(SOFTMAX, scaled(df, "fusebook", 1.2 / 1.01 * 1.015)).torch["cold"]
    assert (even.wins, even.losses) == (0, 0)
    worse = answers.verdict(SOFTMAX, scaled(df, "fusebook", 1.2 / 1.01 * 1.025)).torch["cold"]
    assert worse.losses == worse.points


def test_the_word_follows_the_caller(df):
    def word(frame):
        return answers.verdict(SOFTMAX, frame).word

    large = df[df["config"] == "large"]
    assert word(large) == "yes"
    assert word(scaled(large, "fusebook", 3)) == "no"
    assert word(scaled(large, "fusebook", 1.2 / 1.01)) == "no gain"
    assert word(scaled(large, "fusebook", 3, large["dtype"] == "float32")) == "no"  # half of the points
    assert (
        word(scaled(large, "fusebook", 3, (large["dtype"] == "float32") & (large["N"] > 1024)))
        == "yes, but not in float32"
    )
    few = (large["dtype"] == "float32") & (large["N"] < 4096)  # of float32 too, most are won
    assert word(scaled(large, "fusebook", 3, few)) == "yes at most sizes"
    assert word(scaled(large, "fusebook", 3, large["N"] == 32768)) == "yes at most sizes"
    assert word(large[large["variant"] == "fusebook"]) == "not measured"
    some = scaled(large, "fusebook", 3, large["N"] < 2048)
    assert word(scaled(some, "fusebook", 1.2 / 1.01, some["N"].between(2048, 20000))) == "it depends"


def test_other_arithmetic_is_no_rival(df):
    cheat = df[df["variant"] == "torch"].assign(variant="eager", math="tf32", gpu_us=1e-3, launch_us=1e-3)
    both = pd.concat([df[df["variant"] != "eager"], cheat], ignore_index=True)
    assert answers.verdict(SOFTMAX, both).torch["cold"].losses == 0


def test_choices_name_every_way_within_two_percent(df):
    large = df[df["config"] == "large"]
    table = _verdicts.choices(SOFTMAX, large)
    assert set(table["best"]) == {"fusebook"}
    assert table.loc[("131072x1024", "float32"), "take"] == "quack, ours"  # 1.02 against 1.01
    assert table.loc[("65536x781", "float32"), "take"] == "ours"  # which quack refuses
    even = _verdicts.choices(SOFTMAX, scaled(large, "torch", 1.01 / 1.3))
    assert even.loc[("65536x781", "float32"), "take"] == "torch, ours"
    small = _verdicts.choices(SOFTMAX, df[df["config"] == "small"])
    assert set(small["take"]) == {"torch"}  # whose host is the quickest


def test_nobody_wins_unopposed_by_a_clock_that_ours_has_no_time_of(df):
    unclocked = df.copy()
    unclocked.loc[df["variant"].eq("fusebook"), "launch_us"] = float("nan")
    assert _verdicts.choices(SOFTMAX, unclocked).empty and len(_verdicts.choices(SOFTMAX, unclocked, "cold"))


def test_shares_of_the_roof_leave_out_what_memory_does_not_bind(df):
    part = answers.shares(SOFTMAX, df)
    bound = df[df["zone"].isin(["memory", "compute"])].drop_duplicates(["dtype", "M", "N"])
    assert 0 < len(part) == len(bound) < len(df.drop_duplicates(["dtype", "M", "N"]))
    assert (part["ours"] / part["other"]).median() == pytest.approx(1.02 / 1.01)


# The pages


def test_each_page_says_what_to_have_read_and_only_earlier_pages():
    every = pages.pages()
    order = re.findall(r"^\d{3}", (pages.EXAMPLES / "order.txt").read_text(), re.MULTILINE)
    assert len(every) >= 12
    for number, page in every.items():
        assert set(page.before) < set(every)
        assert all(order.index(before) < order.index(number) for before in page.before), number
        assert page.minutes > 0
        if not lessons.of_lesson_api(page.document):  # a lesson says what you will learn
            assert page.whom.startswith(("those who", "anyone who", "those whose")), number
        assert page.number[0] in pages.sections()


def test_a_page_that_says_nothing_needs_nothing(tmp_path):
    path = tmp_path / "plot_104_x.py"
    path.write_text('"""\nX\n=\n\nAn X.\nOf two lines.\n"""\n')
    assert pages.page(path) == pages.Page(path, "X", "An X. Of two lines.", "", (), 1)
    path.write_text('"""\nX\n=\n\nRead before: 101, 002.\n"""\n')
    assert pages.page(path) == pages.Page(path, "X", "", "", ("101", "002"), 1)


def test_the_line_that_installs_invents_no_address(monkeypatch):
    monkeypatch.delenv("FUSEBOOK_URL", raising=False)
    assert re.fullmatch(r"pip install ./fusebook-[\d.]+-py3-none-any.whl", front.install())
    monkeypatch.setenv("FUSEBOOK_URL", "https://x.org/book/")
    assert re.fullmatch(r"pip install https://x.org/book/wheel/fusebook-[\d.]+-py3-none-any.whl", front.install())


@pytest.fixture
def front_of(monkeypatch):
    """Let the front page find a made-up record of softmax."""

    def given(frame):
        front.uses.cache_clear()
        monkeypatch.setattr(front, "found", lambda: {"softmax": frame})
        monkeypatch.setattr(front, "verdicts", lambda: answers.verdicts({"softmax": frame}))
        return front.uses()

    yield given
    front.uses.cache_clear()


def test_the_front_page_has_gain_memory_and_call_of_what_is_worth_it(front_of, df):
    (row,) = front_of(scaled(df, "fusebook", 0.5))
    assert (row.kind, row.memory, row.call) == ("worth", "equal", "fusebook.softmax(x, dim=-1)")
    shown = front.table()
    standing = answers.verdict(SOFTMAX, scaled(df, "fusebook", 0.5)).torch["paid"]
    assert (
        f">{1 / standing.median:.2f}x<small>" in shown and f"<td>{standing.losses} of {standing.points}</td>" in shown
    )
    assert 'href="auto_examples/plot_102_softmax.html"><code>softmax</code>' in shown and "Test GPU" in shown
    assert front.of_kind("small") == front.of_kind("no") == ""


def test_a_gain_below_a_tenth_is_small_and_one_size_is_said(front_of, df):
    large = tables.where(df, M=65536, N=781)
    (row,) = front_of(scaled(large, "fusebook", 1.0))
    assert row.kind == "worth" and row.verdict.word == "yes" and row.slower.startswith("0 of")
    (row,) = front_of(scaled(large, "fusebook", 1.12))
    assert row.kind == "small" and front.of_kind("small").startswith("``softmax`` (1.0")
    assert "softmax" not in front.table()
    (row,) = front_of(tables.where(large, dtype="float32"))
    assert row.verdict.word == "yes, one size" and (row.slower, row.spread) == ("one size only", "one size")


def test_memory_makes_an_operator_worth_a_call(front_of, df):
    equal = scaled(tables.where(df, M=65536, N=781), "fusebook", 1.2 / 1.01)
    (row,) = front_of(equal)
    assert row.kind == "no"
    equal.loc[equal["variant"] == "fusebook", "peak_bytes"] *= 0.5
    (row,) = front_of(equal)
    assert row.kind == "worth" and row.gain.endswith("x, for its memory") and row.memory == "0.50x"
    equal["peak_bytes"] = 1000.0
    assert front_of(equal)[0].memory == "none"


def test_every_bar_above_the_roofline_is_explained(monkeypatch):
    monkeypatch.delenv("FUSEBOOK_GPU", raising=False)
    front.reached.cache_clear()
    assert "not found out" not in front.above()
    assert "``concat_gemm`` reaches " in front.above()


def test_the_form_of_the_front_page_searches_the_table(front_of, df):
    front_of(df)
    shown = front.form()
    assert f'action="{front.LOOK_UP}.html"' in shown and "<option>softmax</option>" in shown
    assert shown.count('name="q"') == 4
    assert 65536 in front.sizes()


def test_a_sortable_table_is_a_plain_one_with_its_best_in_bold():
    shown = sortable(pd.DataFrame({"a": [1.5, 2.0], "b": ["x<", "y"]}), "Two", pd.DataFrame({"a": [True, False]}))
    text = shown._repr_html_()
    assert "<tr><td><b>1.50</b><td>x&lt;" in text
    assert "<tr><td>2.00<td>y" in text
    assert text.count("<b>") == 1
    assert "<caption>Two</caption>" in text


def test_a_module_becomes_a_script_and_one_that_exports_otherwise_is_refused():
    script = sorting.plain("var a=1,b=2;export{a as Other,b as default};\n")
    assert "export" not in script
    assert "window.DataTable = b;" in script
    with pytest.raises(ValueError, match="expected one list of exports with a default"):
        sorting.plain("var a=1;export{a as Other};")


def test_the_bundle_of_itables_is_still_what_is_made_a_script_of(tmp_path):
    pytest.importorskip("itables")
    script = (sorting.write(tmp_path) / "datatables.js").read_text(encoding="utf-8")
    assert "window.DataTable = " in script
    assert "ColumnControl" in script
    assert (tmp_path / "datatables.css").stat().st_size > 10_000
