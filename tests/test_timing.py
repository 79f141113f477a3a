"""The clocks: quantiles anywhere, events and graphs on a GPU."""

import time

import pytest
import torch

from fusebook import timing

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: streams and events")


def test_quantiles_are_of_the_samples():
    q = timing.Quantiles.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (q.q50, q.n) == (3.0, 5)
    assert q.q20 == pytest.approx(1.8) and q.q80 == pytest.approx(4.2)


def test_call_times_a_sleep():
    found = timing.call({"sleep": lambda: time.sleep(0.01), "nothing": lambda: None}, warmup=1, repeat=5)
    assert 0.01 <= found["sleep"].q50 < 0.05 and found["nothing"].q50 < 0.005


def test_kinds_and_counts_are_checked():
    with pytest.raises(ValueError, match="cold, warm, call"):
        timing.measure({"f": lambda: None}, kinds=("hot",))
    with pytest.raises(ValueError, match="repeat=0"):
        timing.measure({"f": lambda: None}, repeat=0)


def test_without_a_gpu_only_call_is_measured():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    times = timing.measure({"f": lambda: None}, repeat=3)["f"]
    assert times["cold"] is None and times["warm"] is None and times["call"].n == 3


@gpu
def test_a_copy_takes_the_time_that_do_bench_says():
    triton_testing = pytest.importorskip("triton.testing")
    x = torch.randn(2**28, device="cuda")
    y = torch.empty_like(x)
    ours = timing.cold({"copy": lambda: y.copy_(x)})["copy"].q50
    theirs = triton_testing.do_bench(lambda: y.copy_(x), quantiles=[0.5]) / 1e3
    assert ours == pytest.approx(theirs, rel=0.03)


@gpu
def test_waiting_is_noticed():
    x = torch.randn(64, device="cuda")
    assert timing.synchronises(lambda: x.sum().item())
    assert not timing.synchronises(lambda: x.sum())


@gpu
def test_work_that_outlives_the_stream_is_noticed():
    x = torch.empty(2**28, device="cuda")
    side = torch.cuda.Stream()

    def elsewhere():
        with torch.cuda.stream(side):
            x.fill_(1.0)

    assert timing.hidden(elsewhere) > 100e-6
    assert timing.hidden(lambda: x.fill_(1.0)) < 100e-6


@gpu
def test_warm_leaves_out_the_launch():
    x = torch.randn(16, device="cuda")
    times = timing.measure({"f": lambda: x + 1})["f"]
    assert times["warm"].q50 < times["cold"].q50 < times["call"].q50


@gpu
def test_what_cannot_be_captured_has_no_warm_time():
    x = torch.randn(16, device="cuda")
    assert timing.warm({"f": lambda: x.sum().item()}, repeat=3)["f"] is None
    assert timing.warm({"f": lambda: x + 1}, repeat=3)["f"] is not None
