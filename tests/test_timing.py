"""The clocks: quantiles anywhere, events and graphs on a GPU."""

import contextlib
import gc
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusebook.measure import timing

pytestmark = pytest.mark.alone
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: streams and events")


def test_quantiles_are_of_the_samples():
    q = timing.Quantiles.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (q.q50, q.n) == (3.0, 5)
    assert q.q20 == pytest.approx(1.8) and q.q80 == pytest.approx(4.2)


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


class Clock:
    """A host's clock that only moves when a function says so, and a device that is waited for."""

    def __init__(self, patch, room=1000):
        self.now, self.queued, self.room = 0.0, 0, room
        patch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: self.now))
        patch.setattr(timing, "_wait", self.wait)

    def wait(self):
        self.queued = 0

    def launch(self, seconds=1e-5, device=0.0):
        self.now += seconds
        self.queued += 1
        if self.queued > self.room:  # the host waits until the device has taken one out
            self.now += device


@pytest.mark.parametrize("ended", [False, True], ids=["torch 2.11", "later"])
def test_a_capture_that_fails_leaves_stream_and_allocator_as_they_were(monkeypatch, ended):
    """Torch 2.11 does not: all that is recorded afterwards would find the GPU's memory taken."""
    streams, underway, held = ["before"], [], []
    cuda = types.SimpleNamespace(device_index=0)

    @contextlib.contextmanager
    def graph(made, pool, stream):
        streams.append(stream)
        underway.append(pool)
        held.append(pool)
        yield
        pytest.fail("the function raises")

    def fails():
        if underway and ended:
            underway.remove(held[-1])
        raise RuntimeError("operation not permitted when stream is capturing")

    def end(device, pool):
        if pool not in underway:
            raise RuntimeError("not currently recording")
        underway.remove(pool)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: held.remove(pool), raising=False)
    with pytest.raises(RuntimeError, match="capturing"):
        timing._captured(fails, 1, "side", cuda)
    assert streams == ["before", "side", cuda] and not underway and bool(held) == ended


def test_call_times_what_is_called(monkeypatch):
    clock = Clock(monkeypatch)
    found = timing.call({"slow": lambda: clock.launch(1e-2), "nothing": lambda: None}, warmup=1, repeat=5)
    assert found["slow"].q50 == pytest.approx(1e-2) and found["nothing"].q50 == 0
    assert found["slow"].n == found["nothing"].n == 5


def test_a_call_ends_with_its_work_and_begins_after_that_of_others(monkeypatch):
    clock = Clock(monkeypatch)

    def wait():
        clock.now += 1e-3 * clock.queued
        clock.queued = 0

    monkeypatch.setattr(timing, "_wait", wait)
    clock.queued = 1000  # by somebody else
    found = timing.call({"f": lambda: clock.launch(1e-5)}, warmup=0, repeat=1)["f"]
    assert found.q50 == pytest.approx(1.01e-3)


def test_host_times_a_call_and_collects_no_garbage(monkeypatch):
    clock = Clock(monkeypatch)
    collected = []

    def slow():
        clock.launch(2e-5)
        collected.append(gc.isenabled())

    found = timing.host({"slow": slow, "fast": lambda: clock.launch(1e-5)}, warmup=0, repeat=3)
    assert found["slow"].q50 == pytest.approx(2e-5) and found["fast"].q50 == pytest.approx(1e-5)
    assert found["slow"].n == found["fast"].n == 3
    assert not any(collected[-timing._FEW :]) and gc.isenabled()


def test_the_first_launch_to_an_idle_device_is_not_counted(monkeypatch):
    clock, idle = Clock(monkeypatch), []
    monkeypatch.setattr(timing, "_wait", lambda: idle.append(True))

    def launch():
        clock.launch(1e-3 if idle else 1e-5)
        idle.clear()

    assert timing._queued(launch, 5) == pytest.approx(1e-5)


def test_a_batch_ends_before_the_queue_is_full(monkeypatch):
    clock = Clock(monkeypatch, room=8)
    assert timing._calls_to_queue(lambda: clock.now) == timing._BATCH

    def launch():
        clock.launch(1e-5, device=1e-3)

    assert timing._calls_to_queue(launch) == timing._FEW < clock.room
    assert timing.host({"launch": launch}, repeat=3)["launch"].q80 == pytest.approx(1e-5)
    clock.room = 1000
    assert timing._calls_to_queue(launch) == timing._BATCH


def test_long_calls_are_repeated_less_and_some_times_at_least(monkeypatch):
    clock = Clock(monkeypatch)
    calls = []
    found = timing.call({"long": lambda: clock.launch(10.0) or calls.append(1)}, warmup=5, repeat=30)
    assert found["long"].n == timing._FEWEST > 1 and len(calls) == 1 + timing._FEWEST, "it is warm by one call"
    assert timing.call({"short": lambda: clock.launch(1e-5)}, repeat=30)["short"].n == 30
    assert timing.call({"long": lambda: clock.launch(10.0)}, repeat=2)["long"].n == 2
    both = {"long": lambda: clock.launch(10.0), "short": lambda: clock.launch(1e-5)}
    assert [q.n for q in timing.call(both, repeat=30).values()] == [timing._FEWEST, 30], "each by its own time"


def test_batches_of_long_calls_are_short(monkeypatch):
    clock = Clock(monkeypatch)
    assert timing._calls_to_queue(lambda: clock.launch(1e-2)) == 1
    assert timing._calls_to_queue(lambda: clock.launch(1e-3)) == timing._FEW
    assert timing._calls_to_queue(lambda: clock.launch(1.001e-4)) == int(timing._QUEUED / 1.001e-4)


@gpu
def test_a_copy_takes_the_time_that_do_bench_says():
    triton_testing = pytest.importorskip("triton.testing")
    x = torch.randn(2**28, device="cuda")
    y = torch.empty_like(x)
    ours = timing.cold({"copy": lambda: y.copy_(x)})["copy"].q50
    theirs = triton_testing.do_bench(lambda: y.copy_(x), quantiles=[0.5]) / 1e3
    assert ours == pytest.approx(theirs, rel=0.03)


@pytest.mark.parametrize(("waited", "waits"), [([True, False], False), ([False], False), ([True] * 3, True)])
def test_a_host_that_was_held_up_once_has_not_waited(monkeypatch, waited, waits):
    answers = iter(waited)
    monkeypatch.setattr(timing, "_flush", lambda: lambda at_least: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda: types.SimpleNamespace(record=lambda: None, query=lambda: next(answers))
    )
    assert timing.synchronises(lambda: None) is waits
    assert next(answers, None) is None


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
def test_what_cannot_be_captured_has_no_warm_time_and_leaves_nothing_behind():
    x = torch.randn(16, device="cuda")
    stream, held = torch.cuda.current_stream(), torch.cuda.memory_reserved()

    def waiting():
        return torch.ones(2**28, device="cuda")[0].item()

    assert timing.warm({"f": waiting}, repeat=3)["f"] is None
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held
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


def test_each_cold_call_follows_a_flush_and_lies_between_two_events(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            log.append("event")

        def elapsed_time(self, other):
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_flush", lambda: lambda at_least=0.0: log.append("flush"))
    monkeypatch.setattr(timing, "synchronises", lambda function: False)
    monkeypatch.setattr(timing, "_host_seconds", lambda function: 1e-6)
    found = timing.cold({"f": lambda: log.append("call")}, warmup=1, repeat=4)
    first = log.index("event") - 1
    assert log[first:] == ["flush", "event", "call", "event"] * ((len(log) - first) // 4) and len(log) - first >= 12
    assert found["f"].q50 == 1e-3


@pytest.mark.parametrize("late", [1, 2])
def test_a_call_whose_launches_were_late_is_timed_again(monkeypatch, late):
    ms = {"f": iter(([1.0] * 3 + [50.0] * 4) * late + [1.0] * 7), "g": iter([2.0] * 7)}
    log = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.call = log[-1] if log else ""

        def elapsed_time(self, end):
            return next(ms[end.call])

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_flush", lambda: lambda at_least=0.0: None)
    monkeypatch.setattr(timing, "synchronises", lambda function: False)
    monkeypatch.setattr(timing, "_host_seconds", lambda function: 1e-6)
    monkeypatch.setattr(timing, "_repeats", lambda seconds, repeat: 7)
    found = timing.cold({"f": lambda: log.append("f"), "g": lambda: log.append("g")}, warmup=0)
    assert found["f"].q50 == 1e-3 and found["g"].q50 == 2e-3
    assert next(ms["f"], None) is None and next(ms["g"], None) is None
