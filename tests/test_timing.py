"""The clocks: quantiles anywhere, events and graphs on a GPU."""

import gc
import math
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
    with pytest.raises(ValueError, match="cold, warm, host, call"):
        timing.measure({"f": lambda: None}, kinds=("hot",))
    with pytest.raises(ValueError, match="repeat=0"):
        timing.measure({"f": lambda: None}, repeat=0)


def test_without_a_gpu_only_call_is_measured():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    times = timing.measure({"f": lambda: None}, repeat=3)["f"]
    assert times["cold"] is None and times["warm"] is None and times["call"].n == 3


def test_a_flush_ends_in_reads_and_lasts_as_long_as_it_must():
    done = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            done.append((func.overloadpacket.__name__, args[0].numel()))
            return func(*args, **(kwargs or {}))

    flush = object.__new__(timing._Flush)  # without the device that its making asks
    flush.buffer, flush.sums, flush.seconds = torch.ones(8, 16), torch.empty(8), 1e-4
    for at_least, times in ((0.0, 1), (0.9e-4, 1), (1.1e-4, 2), (1e-3, 10)):
        done.clear()
        with Log():
            flush(at_least)
        assert done == [("zero_", 128), ("sum", 128)] * times


def test_host_times_a_call_and_collects_no_garbage():
    collected = []

    def nap():
        time.sleep(0.002)
        collected.append(gc.isenabled())

    found = timing.host({"nap": nap, "nothing": lambda: None}, warmup=0, repeat=3)
    assert 0.002 <= found["nap"].q50 < 0.01 and found["nothing"].q50 < 1e-4
    assert found["nap"].n == found["nothing"].n == 3
    assert not all(collected) and not any(collected[-timing._FEW :]) and gc.isenabled()


def test_a_batch_ends_before_the_queue_is_full():
    """A queue of so many launches, after which the host waits for a device that needs much longer than it."""
    room = 8
    state = {"queued": 0}

    def launch():
        state["queued"] += 1
        if state["queued"] > room:
            time.sleep(0.0005)  # the device takes one out

    def device_ends_its_work():
        state["queued"] = 0

    patch = pytest.MonkeyPatch()
    patch.setattr(timing, "_wait", device_ends_its_work)
    assert timing._calls_to_queue(lambda: None) == timing._BATCH
    assert timing._calls_to_queue(launch) == timing._FEW < room
    assert timing.host({"launch": launch}, repeat=3)["launch"].q80 < 1e-4
    patch.undo()


def test_batches_of_long_calls_are_short():
    assert timing._calls_to_queue(lambda: time.sleep(0.01)) == timing._FEW
    assert timing._FEW < timing._calls_to_queue(lambda: time.sleep(1e-4)) <= math.ceil(timing._QUEUED / 1e-4)


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


@gpu
def test_host_is_the_time_to_queue_and_not_that_of_the_work():
    x = torch.randn(2**28, device="cuda")
    y = torch.empty_like(x)
    times = timing.measure({"f": lambda: y.copy_(x)})["f"]
    assert times["host"].q50 < times["cold"].q50 / 10 < times["call"].q50
    small = torch.randn(64, 64, device="cuda")
    times = timing.measure({"f": lambda: torch.softmax(small, 1)})["f"]
    assert times["cold"].q20 < times["host"].q50 < times["call"].q50
    assert timing.host({"f": lambda: x.sum().item()}, repeat=3)["f"] is None


@gpu
def test_a_flush_leaves_nothing_to_be_written():
    """What only reads is not charged for what the flush left in the cache."""
    x = torch.randn(2**25, device="cuda")
    total = torch.empty(2**11, device="cuda")
    flush = timing._flush()

    def read():
        torch.sum(x.view(2**11, -1), 1, out=total)

    def seconds(before):
        found = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            start.record()
            read()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
        return sorted(found)[10]

    def dirty():
        flush()
        flush.buffer.zero_()

    assert seconds(flush) < 0.95 * seconds(dirty)
