import itertools
import math

import matplotlib
import numpy as np
import pandas as pd
import pytest

import gallery_hooks
import synthetic
from fusebook import plots, tables
from fusebook.cards.softmax import SOFTMAX
from fusebook.measure.op import Cost, Variant
from toy import machine, toy, variant

matplotlib.use("agg")


@pytest.fixture(scope="module")
def df():
    return synthetic.frame(SOFTMAX, "large", "float32,bfloat16")


@pytest.fixture(scope="module")
def sweep():
    return synthetic.frame(SOFTMAX, "triton")


def test_dims_are_the_columns_between_dtype_and_status(df):
    assert tables.dims(df) == ["M", "N"]


def test_what_is_no_result_is_refused_with_what_is_accepted():
    with pytest.raises(ValueError, match=r"expected results with the columns dtype and status, got a; pass what"):
        tables.dims(pd.DataFrame({"a": [1]}))


def test_labels_name_sizes_and_put_words_behind(df):
    assert tables.label(df).iloc[0] == "65536x781"
    op = toy()
    words = pd.concat([synthetic.frame(op, "small")], ignore_index=True)
    words.insert(6, "law", "zipf")
    assert tables.label(words).iloc[0] == "16x16 zipf"


def test_times_keep_the_order_of_sweep_and_variants(df):
    table = tables.times(df)
    assert list(table.columns) == list(SOFTMAX.variants)
    assert table.index[0] == ("float32", 65536, 781)
    assert list(table.index.names) == ["dtype", "M", "N"]


def test_times_show_why_there_is_none(df):
    words = tables.times(df, words=True)
    assert words.loc[("float32", 65536, 781), "quack"] == "refused"
    assert isinstance(words.loc[("float32", 65536, 781), "fusebook"], float)
    assert math.isnan(tables.times(df).loc[("float32", 65536, 781), "quack"])


def test_ratio_compares_where_both_were_timed(df):
    ratio = tables.ratio(df, "fusebook", "quack")
    assert ("65536x781", "float32") not in ratio.index
    assert ratio.loc[("131072x1024", "bfloat16")] == pytest.approx(1.01 / 1.02)
    assert tables.ratio(df, "fusebook", "nobody").empty


def test_what_is_not_ok_is_not_timed_whatever_stands_there(df):
    spoilt = df.copy()
    spoilt.loc[spoilt.index[0], "status"] = "wrong"
    assert spoilt["gpu_us"].notna().iloc[0]
    assert list(tables.timed(spoilt, "cold").index) == list(tables.timed(df, "cold").index[1:])


def test_share_of_copy_and_roof(df):
    assert tables.share(df, "fusebook").to_numpy() == pytest.approx(1 / 1.01)
    assert (tables.share(df, "fusebook", of="roof") < 1 / 1.01).all()
    with pytest.raises(ValueError, match="expected a ceiling of roof, copy, got 'sky'"):
        tables.share(df, "fusebook", of="sky")


def test_losses_are_found_and_the_worst_comes_first(df):
    assert tables.losses(df).empty
    slow = df.copy()
    slow.loc[(slow["variant"] == "fusebook") & (slow["N"] == 16384), "gpu_us"] *= 1.5
    slow.loc[(slow["variant"] == "fusebook") & (slow["N"] == 4096), "gpu_us"] *= 1.2
    lost = tables.losses(slow)
    assert list(lost["faster"].unique()) == ["quack"]
    assert lost.index[0][0] == "32768x16384"
    assert len(lost) == 4
    assert lost["times as long"].iloc[0] == pytest.approx(1.5 * 1.01 / 1.02)


def test_a_kind_that_does_not_exist_is_refused(df):
    with pytest.raises(ValueError, match="expected a time of cold, warm, host, call, paid, got 'tepid'"):
        tables.times(df, "tepid")


def clock(**columns):
    """One point of softmax by made-up clocks: a list of (cold, host, call) a variant, for problems of growing size."""
    frames = []
    for i, points in enumerate(zip(*columns.values(), strict=True)):
        for name, (cold, host, call) in zip(columns, points, strict=True):
            row = {"op": "softmax", "config": "c", "variant": name, "dtype": "float32", "M": 2**i, "N": 8}
            row |= {"status": "ok", "math": "", "gpu_us": cold, "gpu_warm_us": cold}
            row |= {"launch_us": host, "latency_us": call}
            frames.append(row | {"roof_us": 10.0**i})
    return pd.DataFrame(frames)


def test_what_is_paid_is_the_larger_of_host_and_device():
    nan = math.nan
    points = [(5.0, 40.0, 60.0), (400.0, 40.0, 420.0), (nan, nan, 70.0), (5.0, nan, 60.0), (nan, nan, nan)]
    df = clock(fusebook=points)
    assert tables.paid(df).iloc[:3].tolist() == [40.0, 400.0, 70.0]
    assert tables.paid(df).iloc[3:].isna().all(), "the device's half of it is no answer"
    assert tables.paid(clock(fusebook=[(nan, 40.0, 90.0)])).iloc[0] == 40.0, "and the host's is the least"
    old = df.drop(columns="launch_us")
    assert tables.paid(old).iloc[2] == 70.0 and tables.paid(old).isna().sum() == 4
    assert tables.times(df, "paid")["fusebook"].iloc[1] == 400.0


def test_a_record_without_the_hosts_clock_is_empty_there_and_loses_nothing():
    df = clock(fusebook=[(5.0, 40.0, 60.0)], torch=[(6.0, 7.0, 20.0)]).drop(columns="launch_us")
    assert tables.times(df, "host").isna().all().all()
    assert tables.losses(df, kind="paid").empty and tables.behind(df, kind="host").empty
    assert tables.losses(df, kind="paid").attrs["compared"] == 0 and tables.losses(df).attrs["compared"] == 1
    assert tables.standing(df).loc["paid", "points"] == 0
    assert tables.pays_from(df) is None and tables.pays_from(df, kind="call") == ""


def test_a_kernel_pays_from_where_its_launch_is_hidden():
    ours = [(2.0, 40.0, 60.0), (20.0, 40.0, 60.0), (50.0, 40.0, 90.0), (500.0, 40.0, 540.0)]
    torchs = [(4.0, 7.0, 20.0), (30.0, 7.0, 45.0), (60.0, 7.0, 75.0), (600.0, 7.0, 620.0)]
    df = clock(fusebook=ours, torch=torchs)
    assert tables.pays_from(df) == "4x8 float32 (100 us at the least)"
    assert tables.pays_from(df, kind="call") == "8x8 float32 (1000 us at the least)"
    assert tables.pays_from(df, kind="cold") == "1x8 float32 (1.00 us at the least)"
    assert tables.pays_from(df.iloc[:4]) == "", "the largest is lost"
    slow = df.copy()
    slow.loc[(slow["variant"] == "fusebook") & (slow["M"] == 8), "gpu_us"] = 900.0
    assert tables.pays_from(slow) == "4x8 float32 (100 us at the least)", "what is lost on the device is not asked"


def test_standing_counts_by_each_clock():
    df = clock(fusebook=[(2.0, 40.0, 60.0), (50.0, 40.0, 90.0)], torch=[(4.0, 7.0, 20.0), (50.5, 7.0, 75.0)])
    found = tables.standing(df)
    assert found.loc["cold", ["points", "faster", "equal", "slower"]].tolist() == [2, 1, 1, 0]
    assert found.loc["paid", ["faster", "equal", "slower"]].tolist() == [0, 1, 1]
    assert found.loc["call", "slower"] == 2
    assert found.loc["call", "worst at"] == "1x8 float32, torch"
    assert found.loc["paid", "worst, times as long"] == pytest.approx(40 / 7)


def test_alike_leaves_out_our_other_ways_and_other_arithmetic():
    names = ["fusebook", "fusebook, checked", "fusebook (chosen)", "fusebook sorted", "torch", "packed, TF32"]
    df = clock(**{name: [(2.0, 40.0, 60.0)] for name in names})
    df.loc[df["variant"] == "packed, TF32", "math"] = "tf32"
    assert list(tables.alike(df)["variant"]) == ["fusebook", "torch"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.23456e-7, "1.2e-07"),
        (0.98765, "0.988"),
        (9.8765, "9.88"),
        (98.765, "98.8"),
        (987.65, "988"),
        (98765.4, "98,765"),
        (12672, "12672"),
        (781, "781"),
        (float("nan"), ""),
        (None, ""),
        (True, "yes"),
        (np.bool_(False), "no"),
        (np.float64(1.5), "1.50"),
        ("refused", "refused"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_the_digits_that_a_reader_can_use(value, text):
    assert tables.number(value) == text


def test_pretty_writes_whole_columns_without_a_point():
    frame = pd.DataFrame({"n": [1.0, math.nan, 20000.0], "t": [1.0, 2.5, math.nan]})
    assert tables.pretty(frame).to_numpy().tolist() == [["1", "1.00"], ["", "2.50"], ["20000", ""]]


# Plots


def test_bandwidth_is_over_the_size_that_varies(sweep):
    tall = sweep.assign(M=sweep["N"], N=64)
    assert [*plots.bandwidth(tall).lines[0].get_xdata()] == [*plots.bandwidth(sweep).lines[0].get_xdata()]


def test_bandwidth_divides_the_least_bytes_by_the_time(sweep):
    ours = sweep[(sweep["variant"] == "fusebook") & (sweep["status"] == "ok")].sort_values("N")
    lines = {line.get_label(): line.get_ydata() for line in plots.bandwidth(sweep).lines}
    moved = 2 * ours["M"] * ours["N"] * 4
    assert lines["fusebook"] == pytest.approx((moved / ours["gpu_us"] / 1e3).to_numpy())
    assert lines["roofline"] == pytest.approx(machine().copy / 1e9)


def test_bandwidth_plot_names_every_line_and_the_roof(sweep):
    ax = plots.bandwidth(sweep)
    names = {t.get_text().strip() for t in ax.texts}
    assert names >= {*SOFTMAX.variants, "roofline", "a copy", "memory", "partly L2"}
    assert "GB/s" in ax.get_ylabel()


def test_names_at_the_ends_of_lines_do_not_overlap(sweep):
    ax = plots.bandwidth(sweep)
    named = [t for t in ax.texts if t.get_text().strip() in {*SOFTMAX.variants, "roofline", "a copy"}]
    boxes = sorted((t.get_window_extent() for t in named), key=lambda b: b.y0)
    assert all(below.y1 <= above.y0 + 2 for below, above in itertools.pairwise(boxes))


def test_names_at_the_ends_of_lines_stand_above_the_numbers_of_the_axis():
    ends = pd.DataFrame({name: [1.0, 0.0] for name in "abcd"}, pd.Index([1, 10000], name="step"))
    ax = plots.lines(ends, title="", ylabel="")
    places = [text.get_window_extent() for text in ax.texts]
    assert len(places) == 4 and min(place.y0 for place in places) >= ax.bbox.y0 - 2


def test_points_of_lines_are_named_in_three_digits():
    size = pd.DataFrame({"a": [1.0, 2.0, 3.0]}, pd.Index([2.09715, 2147.48, 40_000_000], name="MB"))
    ax = plots.lines(size, title="", ylabel="")
    assert [text.get_text() for text in ax.get_xticklabels()] == ["2.1", "2147", "40,000,000"]


def test_a_bandwidth_plot_of_two_dtypes_is_refused(df):
    with pytest.raises(ValueError, match="expected one dtype, got float32, bfloat16; draw one figure each"):
        plots.bandwidth(df)


def test_plots_have_nothing_painted_behind_them(sweep, df):
    axes = [plots.bandwidth(sweep), plots.times(sweep), plots.dots(df)]
    for ax in axes:
        assert ax.figure.get_facecolor()[3] == 0
        assert ax.get_facecolor()[3] == 0
        assert ax.get_title(loc="left")


def test_dots_have_a_row_a_point(df):
    ax = plots.dots(df)
    assert len(ax.get_yticks()) == 16
    assert ax.get_xlabel() == "percent of a copy of the same bytes"
    many = pd.concat([df, *(df[df["variant"] == "eager"].assign(variant=f"way {i}") for i in range(6))])
    marks = {line.get_label(): line.get_marker() for line in plots.dots(many).lines if line.get_linestyle() == "None"}
    assert len(set(marks.values())) == len(marks) >= 10, "a reader tells them apart without colours"


def test_plots_do_without_a_machine_and_with_a_readers_own_variant():
    op = toy(mine=variant(lambda x: 2 * x), theirs=Variant(lambda x: x, cost=lambda i, M, N: Cost(1, 1, 1), needs=()))
    frame = synthetic.frame(op, "small")
    frame[["roof_us", "copy_us", "copy_warm_us", "floor_us"]] = math.nan
    assert "mine" in {t.get_text().strip() for t in plots.bandwidth(frame).texts}


def test_a_way_of_computing_looks_alike_in_every_figure(df):
    from fusebook.cards import OPS

    for op in OPS.values():
        names = list(op.variants)
        drawn = plots._styles(names)
        assert len({way["marker"] for way in drawn.values()}) == len(names), op.name
        assert all(plots._styles([name])[name]["color"] == drawn[name]["color"] for name in names), op.name
    frame = pd.DataFrame({"fusebook": [1.0, 2.0], "eager": [2.0, 3.0]}, index=pd.Index([1, 10], name="N"))
    ax = plots.lines(frame, title="t", ylabel="s", source=df, clock="cold")
    colours = {line.get_label(): line.get_color() for line in ax.lines}
    assert colours == {"fusebook": plots.style("fusebook")["color"], "eager": plots.style("eager")["color"]}
    assert f"{df.attrs['origin'].machine.name}, cold" in {t.get_text() for t in ax.texts}


def test_a_figure_names_its_gpu_its_clock_and_what_was_found(sweep, df):
    for ax in (plots.bandwidth(sweep), plots.dots(df), plots.times(sweep, kind="warm")):
        below = ax.texts[0].get_text()
        assert df.attrs["origin"].machine.name in below and ("cold" in below or "warm" in below)
        assert ax.get_title(loc="left").lower().startswith("fusebook")
    both = tables.together(df, df)
    assert len(both) == 2 * len(df) and both.attrs == {"gpu": df.attrs["origin"].machine.name}
    assert df.attrs["origin"].machine.name in plots.dots(both).texts[0].get_text()


def test_a_figure_is_described_by_its_data(sweep):
    text = gallery_hooks.described(plots.bandwidth(sweep, xlabel="columns").figure)
    ours = sweep[sweep["variant"] == "fusebook"].dropna(subset="gpu_us")
    rate = (ours["read_bytes"] + ours["write_bytes"]) / ours["gpu_us"] / 1e3
    assert f"fusebook: {tables.number(float(rate.min()))} to {tables.number(float(rate.max()))}" in text
    assert "x is columns" in text and "y is bandwidth" in text


def test_the_best_is_told_for_tables_of_ways(df):
    assert tables.times(df).attrs["best"] == "least in a row"


def test_a_staircase_ends_in_the_roof_with_the_most_registers_and_the_lines_of_each_step():
    steps = pd.DataFrame(
        {
            "step": ["eager", "ours"] * 2,
            "n": [1, 1, 2, 2],
            "us": [3.0, 2.0, 6.0, 4.0],
            "registers": [math.nan, 40, math.nan, 32],
        }
    )
    times = steps.pivot_table("us", "step", "n", sort=False)
    found = tables.staircase(times, steps, roof={1: 1.0, 2: 2.5}, lines={"eager": 1, "ours": 9})
    assert found.index.tolist() == ["eager", "ours", "the roof"]
    assert found[[1, 2]].to_numpy().tolist() == [[3, 6], [2, 4], [1, 2.5]]
    assert found["registers a thread"].fillna(0).tolist() == [0, 40, 0]
    assert found["lines of code"].fillna(0).tolist() == [1, 9, 0]
    assert times.index.tolist() == ["eager", "ours"], "what is given stays"
