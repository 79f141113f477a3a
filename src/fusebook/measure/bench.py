"""Run a card: check every implementation, time the correct ones, and refuse impossible times.

At each point, implementations are checked first, on poisoned memory and with inputs that change in place. Then they
are timed, interleaved with a copy of the same bytes, and checked again. An incorrect, refused or impossible result
becomes a row with its reason and no times.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib.util
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusebook.extras import extra
from fusebook.measure import check, compiled, inputs, sources, timing
from fusebook.measure import machine as machines
from fusebook.measure.op import Cost, Dims, Op, Variant

with extra("book"):
    import pandas as pd
    from tqdm import tqdm

__all__ = [
    "COLUMNS", "DTYPES", "Origin", "WrongResult", "dtypes", "missing", "points", "run", "software", "staircase",
]  # fmt: skip

#: The dtypes that ``--dtype`` takes.
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

_TIMES = tuple(us + q for us in timing.COLUMN.values() for q in ("_20", "", "_80"))

#: The columns of a result after ``op, config, variant, dtype`` and the dims.
COLUMNS = (
    *("status", "note", "error", "tolerance", "deterministic", "alone"),
    *_TIMES,
    *("repeat", "first_call_s", "binaries"),
    *("read_bytes", "write_bytes", "flop", "moved_bytes", "roof_us"),
    *("copy_us", "copy_warm_us", "floor_us", "floor_warm_us", "zone", "peak_bytes"),
    *("sm_mhz", "memory_mhz", "power_w"),
    *("math", "code", "host", "versions", "date"),
)

# GPU times this far below the roof are refused. The rate of a copy is known better than that of a matmul, which depends
# on the power that the data draws.
_UNDER = {"memory": 0.03, "compute": 0.20}
# Reject a time of more than 20 times what the other clocks imply: it measured something else.
_APART = 20
_COPY = "copy of the same bytes"
# More bytes of GPU memory before a point than a flush takes: a collection of garbage is slow.
_KEPT = 2**30


def points(op: Op, config: str | Sequence[tuple[str, Dims]]) -> list[tuple[str, Dims]]:
    """The points of a sweep, each with the name of its config.

    Parameters
    ----------
    config : str or sequence of (str, Dims)
        A comma list of names of ``op.configs`` and of sizes: ``4096x781`` sets the integer dimensions in order, ``781``
        sets every one. Or what this returns.

    Raises
    ------
    ValueError
        Names what was given and what is accepted.
    """
    if not isinstance(config, str):
        return list(config)
    sizes = [k for k, v in next(iter(op.configs.values()))[0].items() if isinstance(v, int)]
    words = {k: v for k, v in next(iter(op.configs.values()))[0].items() if not isinstance(v, int)}
    found: list[tuple[str, Dims]] = []
    for item in config.split(","):
        item = item.strip()
        if item in op.configs:
            found += [(item, dims) for dims in op.configs[item]]
            continue
        parts = item.split("x")
        if not all(p.isdigit() and int(p) > 0 for p in parts) or len(parts) not in (1, len(sizes)):
            raise ValueError(
                f"{op.name}: config {item!r} is none of {', '.join(op.configs)}, a size such as 781, "
                f"or {'x'.join(sizes)} such as {'x'.join(['781'] * len(sizes))}"
            )
        numbers = [int(p) for p in parts]
        found.append((item, {**dict(zip(sizes, numbers * (len(sizes) // len(parts)), strict=True)), **words}))
    unique = {tuple(dims.items()): (label, dims) for label, dims in reversed(found)}
    return list(reversed(unique.values()))


def dtypes(text: str) -> list[str]:
    """The names in a comma list of dtypes.

    Raises
    ------
    ValueError
        Names what was given and what is accepted.
    """
    names = list(dict.fromkeys(t.strip().removeprefix("torch.") for t in text.split(",")))
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} is none of {', '.join(DTYPES)}")
    return names


def missing(variant: Variant) -> str:
    """The need of an implementation that this machine lacks, as a sentence; empty if there is none."""
    for need in variant.needs:
        if need == "cuda":
            if not torch.cuda.is_available():
                return "needs a CUDA device"
        elif not _importable(need):
            return f"needs the package {need}, which is not installed"
        elif need == "onnxruntime" and "cuda" in variant.needs and not _onnxruntime_on_cuda():
            return "needs an ONNX Runtime for CUDA; install onnxruntime-gpu"
    return ""


@functools.lru_cache(maxsize=None)
def _onnxruntime_on_cuda() -> bool:
    return "CUDAExecutionProvider" in importlib.import_module("onnxruntime").get_available_providers()


@functools.lru_cache(maxsize=None)
def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@dataclass(frozen=True)
class Origin:
    """Where results come from: what ``attrs["origin"]`` of a frame holds.

    Attributes
    ----------
    machine : Machine or None
        None where no GPU took part.
    measured : bool
        In this run; otherwise it was read from a record.
    stale : tuple of str
        Why rows are not what the code does today; empty where they are.
    path : pathlib.Path or None
        The record.
    page : str
        The name of what a page measured by itself.
    date, versions, commit : str
        Of the run, where rows do not say so themselves.
    code : str
        The hash of the function by which a page measured; see `fusebook.measure.sources`.
    """

    machine: machines.Machine | None
    measured: bool
    stale: tuple[str, ...] = ()
    path: pathlib.Path | None = None
    page: str = ""
    date: str = ""
    versions: str = ""
    commit: str = ""
    code: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        """Itself, since it cannot change: pandas copies the attrs of a frame deeply at every step."""
        return self


def software(variant: Variant | None = None) -> dict[str, str]:
    """Versions of what a variant runs on: torch and what it hands work to, Triton, and the packages that it needs."""
    needs = [name for name in (variant.needs if variant else ()) if name != "cuda"]
    found = machines.versions("torch", "triton", *needs) | machines.beside_torch()
    if "onnxruntime" in needs and _importable("onnxruntime"):
        providers = importlib.import_module("onnxruntime").get_available_providers()
        found["onnxruntime-provider"] = next((name for name in providers if "cuda" in name.lower()), providers[0])
    return found


def _tensors(values: Any) -> list[torch.Tensor]:
    return [v for v in check._tuple(values) if isinstance(v, torch.Tensor)]


@dataclass
class _Data:
    """Inputs that change in place: the tensors remain, and their values are exchanged."""

    inputs: tuple[Any, ...]
    values: list[list[torch.Tensor]]
    yards: list[check.Yardstick]

    @staticmethod
    def make(op: Op, dtype: torch.dtype, dims: Dims, device: str) -> _Data:
        sets = [op.make(inputs.generator(seed, device), dtype, **dims) for seed in (0, 1)]
        yards = [check.yardstick(op, values) for values in sets]
        seen = tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in sets[0])
        _in_order(_tensors(seen))
        return _Data(seen, [_tensors(values) for values in sets], yards)

    @property
    def device(self) -> torch.device:
        return next((t.device for t in _tensors(self.inputs)), torch.device("cpu"))

    def load(self, which: int) -> None:
        for seen, value in zip(_tensors(self.inputs), self.values[which], strict=True):
            seen.data.copy_(value)  # .data: a graph that saved the tensor does not notice, as it would not in a loop

    def spoil(self) -> None:
        for seen in _tensors(self.inputs):
            if seen.is_floating_point():
                seen.data.fill_(float("nan"))

    def intact(self, which: int) -> bool:
        pairs = zip(_tensors(self.inputs), self.values[which], strict=True)
        return all(torch.equal(check._bits(a), check._bits(b)) for a, b in pairs)


def _in_order(tensors: list[torch.Tensor]) -> None:
    """Order the addresses of tensors of the same kind, which is chance, and which kernels may need."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for t in tensors:
        alike.setdefault((t.shape, t.stride(), t.dtype), []).append(t)
    for group in alike.values():
        memory = sorted((t.data for t in group), key=lambda t: t.data_ptr())
        for t, place in zip(group, memory, strict=True):
            t.data = place  # values are loaded before each call


class WrongResult(Exception):
    """A result is incorrect; the message says how, and ``error`` is its error if that is a number."""

    def __init__(self, why: str, error: float = math.nan) -> None:
        super().__init__(why)
        self.error = error


def _attempt(variant: Variant, data: _Data, which: int) -> tuple[Any, Callable[[], Any]]:
    """One call that finds cheats, and its outputs as the current stream sees them.

    Inputs hold NaN until the GPU reaches the call, so work on a stream that does not wait for the current one reads
    NaN. Freed memory of the outputs' size holds NaN. The current stream copies the outputs without waiting, so work
    that it does not wait for is missing.
    """
    data.load(which)
    call = functools.partial(variant.run, *variant.given(*data.inputs))
    device = data.device
    inputs.poison(data.yards[which].outputs(torch.device("cpu") if variant.on_cpu else device))
    if variant.on_cpu:
        return _brought(call(), device), call
    if device.type == "cuda":
        # A host that is slower than the delay, because it compiles or allocates, calls after the inputs are loaded.
        # This shows nothing, so the delay is longer next time. A call that waits for the GPU is always late.
        for delay in (1e-3, 4e-3, 16e-3):
            if variant.in_place:  # the first call has changed what there was
                call = functools.partial(variant.run, *variant.given(*data.inputs))
            torch.cuda.synchronize()
            data.spoil()
            timing.flush(delay)
            data.load(which)
            loaded = torch.cuda.Event()
            loaded.record()
            out = call()
            early = not loaded.query()
            snapshot = _copied(out)
            torch.cuda.synchronize()
            if early:
                break
        return snapshot, call
    return _copied(call()), call


def _copied(outputs: Any) -> tuple[Any, ...]:
    return tuple(o.detach().clone() if isinstance(o, torch.Tensor) else o for o in check._tuple(outputs))


def _brought(outputs: Any, device: torch.device) -> tuple[Any, ...]:
    """What was computed in the host's memory, where it can be compared."""
    return tuple(o.detach().to(device) if isinstance(o, torch.Tensor) else o for o in check._tuple(outputs))


def _verify(
    variant: Variant, data: _Data, calls: Sequence[int] = (0, 1, 1)
) -> tuple[check.Verdict, bool, Callable[[], Any]]:
    """Score a variant on two sets of values, twice on the second; the last call's arguments are the ones to time."""
    worst = check.Verdict(0.0, math.inf)
    outputs: list[Any] = []
    for which in calls:
        out, call = _attempt(variant, data, which)
        verdict = _judged(variant, data, which, out)
        worst = max(worst, verdict, key=lambda v: v.error / v.tolerance)
        outputs.append(out)
    deterministic = all(
        torch.equal(check._bits(a), check._bits(b)) for a, b in zip(outputs[-2], outputs[-1], strict=True)
    )
    return worst, deterministic, call


def _judged(variant: Variant, data: _Data, which: int, out: Any, when: str = "") -> check.Verdict:
    if not data.intact(which):
        raise WrongResult(f"changed its inputs{when}", math.inf)
    return _within(data.yards[which], variant, out, when)


def _within(yard: check.Yardstick, variant: Variant, out: Any, when: str = "") -> check.Verdict:
    """The verdict of a right result; another one is raised."""
    verdict = yard.judge(out, variant.math)
    if not verdict.ok:
        text = f"error {verdict.error:.3g} exceeds the tolerance {verdict.tolerance:.3g}{when}; {yard.where(out)}"
        raise WrongResult(text, verdict.error)
    return verdict


# By operator and implementation, the hashes of the binaries that it has launched in this process.
_BINARIES: dict[tuple[str, str], set[str]] = {}


def _first_call(variant: Variant, data: _Data, known: set[str]) -> dict[str, float]:
    """Seconds of the very first call, compilation included, and how many binaries it launches that are not `known`."""
    data.load(0)
    args = variant.given(*data.inputs)
    with compiled.kernels() as found:
        start = time.perf_counter()
        variant.run(*args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    new = {kernel.hash for kernel in found} - known
    known |= new
    return {"first_call_s": seconds, "binaries": len(new)}


def _alone(op: Op, variant: Variant, data: _Data) -> str:
    """Whether a row depends on the number of rows; empty if another number takes long to set up."""
    if variant.recompiles or variant.on_cpu or "onnxruntime" in variant.needs:
        return ""
    data.load(1)
    try:
        found = check.alone(op, lambda *rows: variant.run(*variant.given(*rows)), data.inputs)
    except NotImplementedError:  # it takes all rows only
        return ""
    return "" if found is None else "yes" if found else "no"


def _peak(variant: Variant, call: Callable[[], Any]) -> float:
    """Bytes that a call allocates at its peak, outputs included; NaN where torch's allocator does not see them."""
    if not torch.cuda.is_available() or variant.on_cpu or "onnxruntime" in variant.needs:
        return math.nan
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del out
    return float(peak)


@contextlib.contextmanager
def _reasons(row: dict[str, Any]) -> Iterator[None]:
    """Turn what a variant raises into the status and the note of its row."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a library may raise anything; the sweep goes on and the row says why
        if isinstance(error, NotImplementedError):
            row.update(status="refused", note=_sentence(error))
        elif isinstance(error, torch.cuda.OutOfMemoryError):
            row.update(status="out of memory", note=_sentence(error))
        elif isinstance(error, WrongResult):
            row.update(status="wrong", note=str(error), error=error.error)
        else:
            row.update(status="failed", note=f"{type(error).__name__}: {_sentence(error)}")
        # Some libraries keep their errors, whose frames would keep all tensors of the point.
        at: BaseException | None = error
        while at is not None:
            at.__traceback__, at = None, at.__cause__ or at.__context__


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:500]  # the end says which process has the memory


def run(
    op: Op,
    *,
    config: str | Sequence[tuple[str, Dims]] = "small",
    dtype: str = "float32",
    variants: Sequence[str] | None = None,
    warmup: int = 5,
    repeat: int = 30,
    machine: machines.Machine | None = None,
    clocks: Sequence[str] = timing.KINDS,
) -> pd.DataFrame:
    """Check and time every implementation of an operator.

    Parameters
    ----------
    config : str or sequence of (str, Dims)
        See `points`.
    dtype : str
        A comma list of names, see `DTYPES`.
    variants : sequence of str, optional
        Only these; all that this machine can run by default. What it cannot run becomes a row ``absent``. Torch
        computes by ATen's kernels; where the one that is installed would take others, ``torch (as installed)`` is a row
        more.
    warmup, repeat : int
        See `fusebook.measure.timing`.
    machine : Machine, optional
        Whose roof to hold times against; this one by default.
    clocks : sequence of str
        Of `fusebook.measure.timing.KINDS`; all by default.

    Returns
    -------
    pandas.DataFrame
        A row for each point, dtype and variant; columns ``op, config, variant, dtype``, the dims and `COLUMNS`.
        Times in microseconds, sizes in bytes. ``attrs["origin"]`` is an `Origin`.

    Raises
    ------
    ValueError
        For a config, dtype or variant that does not exist.
    """
    chosen = dict(op.variants) if variants is None else {name: _variant(op, name) for name in variants}
    # Sizes that a table was read for are NumPy's, which torch.compile takes for tensors: it would time what is eager.
    asked = points(op, config)
    sweep = [(label, {k: getattr(v, "item", lambda v=v: v)() for k, v in dims.items()}) for label, dims in asked]
    names = dtypes(dtype)
    on = machine or (machines.here() if torch.cuda.is_available() else None)
    how = {"warmup": warmup, "repeat": repeat, "kinds": clocks}
    rows: list[dict[str, Any]] = []
    bar = tqdm(total=len(sweep) * len(names), desc=op.name, disable=None, leave=False)
    with bar:
        for name in names:
            for label, dims in sweep:
                head = {"op": op.name, "config": label, "dtype": name, **dims}
                with machines.aten():
                    rows += _point(op, head, DTYPES[name], dims, chosen, on, how)
                if again := _as_installed(op, chosen, DTYPES[name], dims):
                    rows += _point(op, head, DTYPES[name], dims, again, on, how)
                bar.update()
    frame = pd.DataFrame(rows)
    dims_seen = list(sweep[0][1]) if sweep else []
    frame = frame.reindex(columns=["op", "config", "variant", "dtype", *dims_seen, *COLUMNS])
    frame.attrs["origin"] = Origin(on, measured=True)
    return frame


#: The suffix of ``torch`` as the installed torch computes it, instead of by ATen alone.
AS_INSTALLED = " (as installed)"


def _as_installed(op: Op, variants: Mapping[str, Variant], dtype: torch.dtype, dims: Dims) -> dict[str, Variant]:
    """The implementation ``torch`` again, if it calls an operation that torch hands to kernels other than ATen's."""
    handed_over = {name.rpartition("::")[2] for name in (machines.overrides() or "none").split("+")}
    variant = variants.get("torch")
    if handed_over <= {"none", "unknown"} or variant is None or missing(variant):
        return {}
    called = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    made = op.make(inputs.generator(), dtype, **dims)
    with contextlib.suppress(NotImplementedError), Names():
        variant.run(*variant.given(*made))
    return {f"torch{AS_INSTALLED}": variant} if called & handed_over else {}


def _variant(op: Op, name: str) -> Variant:
    if name not in op.variants:
        raise ValueError(f"{op.name}: variant {name!r} is none of {', '.join(op.variants)}")
    return op.variants[name]


def staircase(
    steps: timing.Functions,
    right: Callable[[Any], bool],
    *,
    kind: str = "cold",
    repeat: int = 30,
    look: Callable[[Any], Mapping[str, Any]] | None = None,
) -> pd.DataFrame:
    """The gain of each step towards a kernel.

    Parameters
    ----------
    steps : mapping of str to callable
        Called without arguments; each returns its result.
    right : callable
        Whether such a result is right.
    kind : str
        The clock, of `fusebook.measure.timing.KINDS`.
    look : callable, optional
        From that kernel, compiled, to more columns.

    Returns
    -------
    pandas.DataFrame
        ``step``, ``us`` of a call, whether it is ``right``, and of the Triton kernel that takes most registers its
        ``registers`` a thread, how many more it has ``spilled`` to memory, and its ``warps``.
    """
    rows = []
    for name, step in steps.items():
        with compiled.kernels() as found:
            row: dict[str, Any] = {"step": name, "right": right(step())}
        kernel = max(found, key=lambda k: k.n_regs, default=None)
        if kernel is not None:
            row |= {"registers": kernel.n_regs, "spilled": kernel.n_spills, "warps": kernel.metadata.num_warps}
            row |= look(kernel) if look else {}
        rows.append(row)
    times = timing.measure(steps, repeat=repeat, kinds=(kind,))
    return pd.DataFrame(rows).assign(us=[q.q50 * 1e6 if (q := times[r["step"]][kind]) else math.nan for r in rows])


def _blank(op: Op, head: dict[str, Any], name: str, variant: Variant, dims: Dims) -> dict[str, Any]:
    itemsize = DTYPES[head["dtype"]].itemsize
    least = op.cost(itemsize, **dims)
    own = least if variant.cost is None else variant.cost(itemsize, **dims)
    code, host = sources.of_functions(variant.run, variant.prepare)
    return {
        **head,
        **dict.fromkeys(COLUMNS, math.nan),
        "variant": name,
        "status": "ok",
        "note": "",
        "deterministic": "",
        "alone": "",
        "read_bytes": least.read,
        "write_bytes": least.write,
        "flop": least.flop,
        "moved_bytes": own.read + own.write,
        "zone": "",
        "math": variant.math or "",
        "code": code,
        "host": host,
        "versions": "; ".join(f"{k} {v}" for k, v in software(variant).items()),
        "date": datetime.date.today().isoformat(),
    }


def _point(
    op: Op,
    head: dict[str, Any],
    dtype: torch.dtype,
    dims: Dims,
    variants: Mapping[str, Variant],
    on: machines.Machine | None,
    how: Mapping[str, Any],
) -> list[dict[str, Any]]:
    rows = {name: _blank(op, head, name, v, dims) for name, v in variants.items()}
    for name, v in variants.items():
        if why := missing(v):
            rows[name].update(status="absent", note=why)
    cuda = torch.cuda.is_available()
    if cuda:
        if torch.cuda.memory_allocated() > _KEPT:  # a failure keeps its tensors in a cycle of frames and errors
            gc.collect()
        torch.cuda.empty_cache()
    try:
        data = _Data.make(op, dtype, dims, "cuda" if cuda else "cpu")
    except torch.cuda.OutOfMemoryError as error:
        for row in rows.values():
            row.update(status="out of memory", note=f"inputs and reference: {_sentence(error)}")
        return list(rows.values())
    if any(v.recompiles for v in variants.values()):
        torch.compiler.reset()  # each shape compiled for itself, as by a program that has only that shape
    calls: dict[str, Callable[[], Any]] = {}
    for name, v in variants.items():
        row = rows[name]
        if row["status"] != "ok":
            continue
        with _reasons(row):
            row |= _first_call(v, data, _BINARIES.setdefault((op.name, name), set()))
            verdict, deterministic, call = _verify(v, data)
            row.update(error=verdict.error, tolerance=verdict.tolerance, deterministic="yes" if deterministic else "no")
            row["alone"] = _alone(op, v, data)
            row["peak_bytes"] = _peak(v, call)
            calls[name] = call
        if cuda and row["status"] == "failed":
            _usable(op, row)
    if calls:
        data.load(1)
        _time(rows, calls, variants, on, how)
        seen = machines.clocks_and_power() if cuda else {}  # the GPU has just been at work
        for name in calls:
            rows[name].update(seen)
    for name in calls:
        data.load(1)
        with _reasons(rows[name]):  # a result may be incorrect after it was timed
            if not variants[name].in_place:
                out = calls[name]()
                if variants[name].on_cpu:
                    out = _brought(out, data.device)
                _judged(variants[name], data, 1, out, " once it had been timed")
            out, _ = _attempt(variants[name], data, 0)
            _judged(variants[name], data, 0, out, " once it had been timed")
        if rows[name]["status"] != "ok":
            rows[name].update(dict.fromkeys(_TIMES, math.nan))
    return list(rows.values())


def _time(
    rows: dict[str, dict[str, Any]],
    calls: dict[str, Callable[[], Any]],
    variants: Mapping[str, Variant],
    on: machines.Machine | None,
    how: Mapping[str, Any],
) -> None:
    """Time correct implementations, and write times and ceilings into their rows; `how` is for `timing.measure`."""
    on_cpu = {name: function for name, function in calls.items() if variants[name].on_cpu}
    timed = {name: function for name, function in calls.items() if name not in on_cpu}
    if torch.cuda.is_available() and timed:
        for name in list(timed):
            with _reasons(rows[name]):
                if why := _escapes(calls[name]):
                    rows[name].update(status="wrong", note=why)
            if rows[name]["status"] != "ok":
                del timed[name]
        timed[_COPY] = _copy_like(rows[next(iter(calls))])
    times = _measured(rows, timed, how)
    if "call" in how["kinds"]:
        times |= timing.measure(on_cpu, **{**how, "kinds": ("call",)})
    for name in calls:
        if name not in times:
            continue
        row = rows[name]
        for kind in timing.KINDS:
            if (q := times[name][kind]) is not None:
                us = timing.COLUMN[kind]
                row.update({f"{us}_20": q.q20 * 1e6, us: q.q50 * 1e6, f"{us}_80": q.q80 * 1e6})
        row["repeat"] = max((q.n for q in times[name].values() if q is not None), default=0)
        _refuse_a_clock_apart(row)
        if on is None:
            continue
        least = Cost(row["read_bytes"], row["write_bytes"], row["flop"])
        rate = variants[name].math or (variants[name].rate if row["dtype"] == "float32" else None) or row["dtype"]
        row.update(roof_us=on.roof(least, rate) * 1e6, zone=on.zone(least, rate))
        row.update(floor_us=on.floor() * 1e6, floor_warm_us=on.floor(kind="warm") * 1e6)
        if _COPY in times:
            cold, warm = times[_COPY]["cold"], times[_COPY]["warm"]
            row["copy_us"] = cold.q50 * 1e6 if cold else math.nan
            row["copy_warm_us"] = warm.q50 * 1e6 if warm else math.nan
        _refuse_faster_than_roof(row, on, rate)


def _measured(
    rows: Mapping[str, dict[str, Any]], timed: Mapping[str, Callable[[], Any]], how: Mapping[str, Any]
) -> dict[str, dict[str, timing.Quantiles | None]]:
    """The times of all that can be timed: what raises only then fails in its own row."""
    try:
        return timing.measure(timed, **how)
    except Exception:  # timed alone, each shows whether it was the one
        alone = [name for name in timed if name in rows]
    for name in alone:
        with _reasons(rows[name]):
            timing.measure({name: timed[name]}, **how)
    return timing.measure({n: f for n, f in timed.items() if n not in rows or rows[n]["status"] == "ok"}, **how)


def _usable(op: Op, row: Mapping[str, Any]) -> None:
    """Name what has broken the GPU's context: whatever follows in this process would fail, too."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        at = ", ".join(f"{k}={v}" for k, v in row.items() if k not in COLUMNS and k not in ("op", "config", "variant"))
        raise RuntimeError(f"{op.name}: {row['variant']} left the GPU unusable at {at}: {row['note']}") from error


def _escapes(call: Callable[[], Any]) -> str:
    """Why events cannot time this call: it leaves work that the current stream does not wait for. Otherwise empty."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    left, seen = timing.hidden(call), start.elapsed_time(end) / 1e3
    if left > max(50e-6, 0.2 * seen):
        return f"the device works on for {left * 1e6:.0f} us after the current stream has finished the call"
    return ""


def _copy_like(row: dict[str, Any]) -> Callable[[], Any]:
    n = max(1, (row["read_bytes"] + row["write_bytes"]) // 8)
    x, y = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    return functools.partial(y.copy_, x)


def _refuse_a_clock_apart(row: dict[str, Any]) -> None:
    """Reject a time that the other clocks of the same work contradict: it measured something else.

    Latency is at most launch and GPU time and some waiting. A launch takes no longer than the whole call. A cold call
    reads from memory what a warm call finds in L2. A missing clock contradicts nothing.
    """
    bounds = {"call": ("host", "cold"), "host": ("call",), "cold": ("warm",), "warm": ("cold",)}
    for kind, others in bounds.items():
        time = row[timing.COLUMN[kind]]
        most = _APART * sum(row[timing.COLUMN[other]] for other in others)
        if time > most:
            note = f"{kind} of {time:.4g} us is more than {_APART} times {' and '.join(others)} of the same work"
            row.update(status="too slow", note=note, **dict.fromkeys(_TIMES, math.nan))
            return


def _refuse_faster_than_roof(row: dict[str, Any], on: machines.Machine, rate: str) -> None:
    """Reject a GPU time below the roof, a mistake of the clock or the kernel, unless the L2 cache served the traffic.

    The last writes stay in L2, which the flush left clean, so as many bytes as fit cost nothing. The roof of float32
    does not hold where tensor cores are more than three times as fast, since three TF32 matmuls are as exact.
    """
    allowed = _UNDER.get(row["zone"])
    if allowed is None:
        return
    kept = on.memory_seconds(Cost(0, int(min(row["write_bytes"], on.l2)), 0)) * 1e6 if row["zone"] == "memory" else 0.0
    bound = row["roof_us"] - kept
    if row["zone"] == "compute" and rate == "float32":
        bound *= min(1, 3 * on.rates["float32"] / on.rates["tf32"])
    if row["gpu_us"] < (1 - allowed) * bound:
        note = f"{row['gpu_us']:.4g} us is faster than the roof of {row['roof_us']:.4g} us"
        row.update(status="too fast", note=note, **dict.fromkeys(_TIMES, math.nan))
