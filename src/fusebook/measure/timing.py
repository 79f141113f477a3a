"""Four clocks for calls on a GPU, each with its spread.

* **cold**: GPU time with a cold L2 cache, by CUDA events around one call. This is the cost of a kernel in a program
  that does other things between two calls.
* **warm**: GPU time with a warm L2 cache, by many calls in a CUDA graph, per call.
* **host**: CPU launch time, by the host's clock around many calls without synchronisation, per call.
* **call**: latency, by the host's clock around one call, synchronised before and after.

The GPU works while the host launches more, so end-to-end time is the larger of *host* and *cold*. Functions are
interleaved, forward then reversed, because clocks and temperature drift.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "COLUMN", "KINDS", "VERSION", "Functions", "Quantiles", "call", "cold", "flush", "hidden", "host", "measure",
    "synchronises", "warm",
]  # fmt: skip

#: The clocks, from the device's to the caller's.
KINDS = ("cold", "warm", "host", "call")

#: The column of results that holds the median of a clock, in microseconds.
COLUMN = {"cold": "gpu_us", "warm": "gpu_warm_us", "host": "launch_us", "call": "latency_us"}

#: Raised by hand whenever a clock changes what it measures: older records then say so.
VERSION = 1

Functions = Mapping[str, Callable[[], Any]]

# Seconds of the timed calls of a function: long calls are timed less often than asked, but `_FEWEST` times at least.
_SECONDS = 0.3
_FEWEST = 7
# GPU time hardly varies: with a median so many times the 20 % quantile, the host was late with many launches. Such a
# call is timed up to so often.
_LATE = 1.5
_ATTEMPTS = 3
# A call of more seconds is warm after one call, and fills no queue.
_LONG = 5e-3
# Seconds in which the host learns that the device has nothing to do.
_ASKING = 2e-5
# Seconds of work that a call is queued behind to see whether it waits for the device.
_BUSY = 5e-3
# The address of an output decides how far it is from its slices of L2, and so the time of a small kernel. Short calls
# are therefore timed warm with outputs at several addresses.
_PLACEMENTS = 3
_SMALL = 50e-6
# Calls in the graph that estimates; about how many seconds one that is timed lasts, and the most calls in it.
_PILOT = 5
_REPLAY = 1e-3
_MOST = 500
# The most calls whose queueing is timed together, and the least. The device's queue holds about a thousand launches:
# when it is full the host waits. So calls of more than some twenty launches are queued few at a time.
_BATCH = 50
_FEW = 4
# Seconds of GPU work in a batch, and of all batches of a function. This work is not timed.
_QUEUED = 2e-3
_BATCHES = 0.05
# Floats in a row of the buffer that flushes, 64 KiB: one block sums it.
_ROW = 2**14


@dataclass(frozen=True)
class Quantiles:
    """The 20, 50 and 80 % quantiles of a time in seconds, and how many samples they come from."""

    q20: float
    q50: float
    q80: float
    n: int

    @staticmethod
    def of(samples: Sequence[float]) -> Quantiles:
        """Quantiles of samples in seconds."""
        q = torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
        q20, q50, q80 = q.tolist()
        return Quantiles(q20, q50, q80, len(samples))


def _rounds(repeats: dict[str, int]) -> list[str]:
    """Names in the order to run them, each so often: forward, reversed, forward, ..."""
    rounds = range(max(repeats.values(), default=0))
    return [name for i in rounds for name in (repeats if i % 2 == 0 else reversed(repeats)) if i < repeats[name]]


@functools.lru_cache(maxsize=None)
def _flush_of(device: int) -> _Flush:
    return _Flush()


def flush(at_least: float = 0.0) -> None:
    """Evict the L2 cache on the current stream, for at least so many seconds, without synchronising.

    It ends in reads, so that no dirty line is written back while the next kernel is timed.
    """
    _flush()(at_least)


def _flush() -> _Flush:
    return _flush_of(torch.cuda.current_device())


class _Flush:
    """Evict the L2 cache on the current stream: write several times its size, then read that, without synchronising.

    The reads leave no dirty line, which the next kernel would have to write back.
    """

    def __init__(self) -> None:
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        # Summed by rows, since a sum of everything borrows memory: it might be that of a poisoned output.
        self.buffer = torch.empty(max(4 * l2, 2**26) // (4 * _ROW), _ROW, device="cuda")
        self.sums = torch.empty(len(self.buffer), device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._once()
        start.record()
        for _ in range(10):
            self._once()
        end.record()
        end.synchronize()
        self.seconds = start.elapsed_time(end) / 1e3 / 10

    def _once(self) -> None:
        self.buffer.zero_()
        torch.sum(self.buffer, 1, out=self.sums)

    def __call__(self, at_least: float = 0.0) -> None:
        for _ in range(max(1, math.ceil(at_least / self.seconds))):
            self._once()


def _host_seconds(function: Callable[[], Any]) -> float:
    """Launch time of a call: the least of five, or of fewer long ones."""
    best, begin = math.inf, time.perf_counter()
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
        torch.cuda.synchronize()
        if time.perf_counter() - begin > 5 * _LONG:
            break
    return best


def _warmed(function: Callable[[], Any], warmup: int) -> float:
    """Seconds of the last of some calls, which are fewer if they are long; 0 without a call."""
    last = 0.0
    for _ in range(warmup):
        start = time.perf_counter()
        function()
        _wait()
        if (last := time.perf_counter() - start) > _LONG:
            break
    return last


def synchronises(function: Callable[[], Any]) -> bool:
    """Whether a call waits for the device: such a call cannot be timed by events.

    The device is kept busy for some milliseconds; a call that returns only after that work has ended has waited. The
    host may also be held up by something else for so long. So a call is tried up to three times: one that waits does
    so each time.
    """
    flush = _flush()
    busy = torch.cuda.Event()
    for _ in range(3):
        torch.cuda.synchronize()
        with _no_collection():
            flush(_BUSY)
            busy.record()
            function()
            waited = busy.query()
        torch.cuda.synchronize()
        if not waited:
            return False
    return True


def hidden(function: Callable[[], Any]) -> float:
    """Seconds for which the device still works after the current stream has finished a call: the least of up to five.

    Work on a stream that the current one does not wait for escapes CUDA events. A few microseconds are the cost of
    asking.
    """
    rest = math.inf
    end = torch.cuda.Event()
    for _ in range(5):
        torch.cuda.synchronize()
        function()
        end.record()
        end.synchronize()
        start = time.perf_counter()
        torch.cuda.synchronize()
        rest = min(rest, time.perf_counter() - start)
        if rest < _ASKING:
            break
    return rest


def _repeats(seconds: float, repeat: int, within: float = _SECONDS) -> int:
    return max(min(repeat, math.ceil(within / max(seconds, 1e-9))), min(repeat, _FEWEST))


def cold(functions: Functions, *, warmup: int = 5, repeat: int = 30) -> dict[str, Quantiles | None]:
    """Device time of one call after a flush of the L2 cache, by CUDA events.

    The flush is repeated until it takes longer than the launch. Otherwise the GPU would idle between the start event
    and the kernel, and the launch would be timed. A call is timed again if the host was late all the same.

    Parameters
    ----------
    warmup, repeat : int
        Calls before and calls timed; calls of many milliseconds are repeated less.

    Returns
    -------
    dict of str to Quantiles or None
        None where the call waits for the device, so that events cannot time it.
    """
    flush = _flush()
    outlast: dict[str, float] = {}
    repeats: dict[str, int] = {}
    for name, function in functions.items():
        _warmed(function, warmup)
        if not synchronises(function):
            outlast[name] = 2 * _host_seconds(function) + 20e-6
            repeats[name] = _repeats(_warmed(function, 1), repeat)
    found: dict[str, Quantiles | None] = dict.fromkeys(functions)
    late = repeats
    for _ in range(_ATTEMPTS):
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in late}
        for name in _rounds(late):
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush(outlast[name])
            start_event.record()
            functions[name]()
            end_event.record()
            events[name].append((start_event, end_event))
        torch.cuda.synchronize()
        times = {name: Quantiles.of([s.elapsed_time(e) / 1e3 for s, e in pairs]) for name, pairs in events.items()}
        found |= times
        late = {name: repeats[name] for name, q in times.items() if q.q50 > _LATE * q.q20}
    return found


def warm(functions: Functions, *, repeat: int = 30) -> dict[str, Quantiles | None]:
    """Device time per call of many calls in a CUDA graph, without launch overhead.

    Short calls are captured several times, with outputs at several addresses, which L2 serves at different speeds.

    Parameters
    ----------
    repeat : int
        Replays timed, per function.

    Returns
    -------
    dict of str to Quantiles or None
        None where capture fails.
    """
    samples: dict[str, list[float]] = {}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    kept = []  # alive, so that each capture allocates other addresses
    for _ in range(_PLACEMENTS):
        graphs = {name: captured for name, f in functions.items() if (captured := _capture(f)) is not None}
        kept.append(graphs)
        for graph, _, _ in graphs.values():
            graph.replay()
        fewer = max(_FEWEST, repeat // _PLACEMENTS)
        for name in _rounds({name: _repeats(seconds, fewer) for name, (_, _, seconds) in graphs.items()}):
            graph, calls, _ = graphs[name]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.setdefault(name, []).append(start.elapsed_time(end) / 1e3 / calls)
        if any(times[-1] > _SMALL for times in samples.values()):
            break
    return {name: Quantiles.of(samples[name]) if name in samples else None for name in functions}


def _capture(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, int, float] | None:
    """A graph of calls, their number, and about how many seconds a replay lasts; None where capture fails."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side, before = torch.cuda.Stream(), torch.cuda.current_stream()
    try:
        side.wait_stream(before)
        with torch.cuda.stream(side):  # libraries set themselves up on the stream that captures
            seconds = _warmed(function, 1)
        # The calls of a replay share its cost. Their number follows from the GPU time in a graph. By launch time,
        # functions with a slow launcher would bear more of that cost.
        few = 1 if seconds > _LONG else _PILOT
        pilot = _captured(function, few, side, before)
        pilot.replay()
        start.record()
        pilot.replay()
        end.record()
        end.synchronize()
        each = start.elapsed_time(end) / 1e3 / few
        calls = max(1, min(_MOST, math.ceil(_REPLAY / max(each, 1e-7))))
        return (pilot if calls == few else _captured(function, calls, side, before)), calls, calls * each
    except Exception:  # a library may raise anything when it is captured
        torch.cuda.synchronize()
        return None


def _captured(
    function: Callable[[], Any], calls: int, side: torch.cuda.Stream, before: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """So many calls as a graph, captured on one stream while another is the current one."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=side):
            for _ in range(calls):
                function()
    except Exception:
        # After a failed capture, torch before 2.12 stays on its stream, and its allocator assumes that the capture goes
        # on: it would never free memory again.
        torch.cuda.set_stream(before)
        with contextlib.suppress(RuntimeError):  # torch has seen to it
            torch._C._cuda_endAllocateToPool(before.device_index, pool)
            torch._C._cuda_releasePool(before.device_index, pool)
        raise
    return graph


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, no garbage is collected: one call would pay for that of many."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _queued(function: Callable[[], Any], calls: int) -> float:
    """Host seconds of a call among so many, queued one behind the other to a device that has nothing else to do."""
    _wait()
    function()  # the first launch to an idle device takes longer
    with _no_collection():
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls


def _calls_to_queue(function: Callable[[], Any]) -> int:
    """The number of calls in a batch: their work is short, and the GPU's queue does not fill.

    With a full queue, each of many calls takes longer than each of few.
    """
    _wait()
    if (seconds := _warmed(function, 1)) > _LONG:
        return 1
    calls = max(_FEW, min(_BATCH, int(_QUEUED / max(seconds, 1e-9))))
    if calls > _FEW:
        many, few = (min(_queued(function, n) for _ in range(3)) for n in (calls, _FEW))
        if many > 1.5 * few:
            return _FEW
    return calls


def host(functions: Functions, *, warmup: int = 5, repeat: int = 30) -> dict[str, Quantiles | None]:
    """CPU launch time of a call among many, without synchronisation.

    A sample is the mean of a batch of 4 to 50 calls, or one long call. The GPU ends its work between batches, outside
    the clock. A batch never fills the GPU's queue, since the host would wait then. No garbage is collected in a batch.

    Parameters
    ----------
    warmup, repeat : int
        Calls before and batches timed; batches of many milliseconds are repeated less.

    Returns
    -------
    dict of str to Quantiles or None
        None if the call waits for the GPU: its launch time is then its latency.
    """
    calls: dict[str, int] = {}
    repeats: dict[str, int] = {}
    samples: dict[str, list[float]] = {}
    for name, function in functions.items():
        _warmed(function, warmup)
        if torch.cuda.is_available() and synchronises(function):
            continue
        calls[name] = _calls_to_queue(function)
        start = time.perf_counter()
        _queued(function, calls[name])
        _wait()
        repeats[name] = _repeats(time.perf_counter() - start, repeat, _BATCHES)
    for name in _rounds(repeats):
        samples.setdefault(name, []).append(_queued(functions[name], calls[name]))
    _wait()
    return {name: Quantiles.of(samples[name]) if name in samples else None for name in functions}


def call(functions: Functions, *, warmup: int = 5, repeat: int = 30) -> dict[str, Quantiles]:
    """Latency: host time of one call, synchronised before and after; the only clock of a function on the CPU."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for name in _rounds({name: _repeats(_warmed(f, warmup), repeat) for name, f in functions.items()}):
        _wait()
        start = time.perf_counter()
        functions[name]()
        _wait()
        samples[name].append(time.perf_counter() - start)
    return {name: Quantiles.of(times) for name, times in samples.items()}


def measure(
    functions: Functions, *, warmup: int = 5, repeat: int = 30, kinds: Sequence[str] = KINDS
) -> dict[str, dict[str, Quantiles | None]]:
    """All four times of each function.

    Parameters
    ----------
    functions : mapping of str to callable
        Called without arguments; interleaved.
    kinds : sequence of str
        Of `KINDS`. Without a CUDA device only ``call`` is measured.

    Returns
    -------
    dict
        ``result[name][kind]`` is a `Quantiles` in seconds, or None where it cannot be measured.
    """
    known: dict[str, Callable[[], Mapping[str, Quantiles | None]]] = {
        "cold": lambda: cold(functions, warmup=warmup, repeat=repeat),
        "warm": lambda: warm(functions, repeat=repeat),
        "host": lambda: host(functions, warmup=warmup, repeat=repeat),
        "call": lambda: call(functions, warmup=warmup, repeat=repeat),
    }
    if unknown := set(kinds) - set(known):
        raise ValueError(f"timing: expected kinds of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if warmup < 0 or repeat < 1:
        raise ValueError(f"timing: expected warmup >= 0 and repeat >= 1, got warmup={warmup}, repeat={repeat}")
    device = torch.cuda.is_available()
    times = {k: time_all() for k, time_all in known.items() if k in kinds and (device or k == "call")}
    return {name: {kind: times[kind].get(name) if kind in times else None for kind in known} for name in functions}
