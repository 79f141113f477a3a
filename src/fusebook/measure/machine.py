"""The machine of a measurement: a GPU, its software, and its measured ceilings.

Ceilings are measured, not read from a datasheet. No kernel reaches the 4.8 TB/s of an H200's datasheet, so a share of
that number says nothing about a kernel. A bandwidth is the better of torch's call and a plain Triton kernel, on 4 GiB.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from fusebook.measure import timing
from fusebook.measure.op import Cost

__all__ = [
    "NEWEST", "RECORDS", "SHIPPED", "Machine", "aten", "beside_torch", "cache_folder", "clocks_and_power",
    "current", "here", "overrides", "page_number", "places", "recorded", "seconds", "slug", "slug_of", "slugs",
    "versions",
]  # fmt: skip

#: Where the records of the package lie, a folder a GPU.
RECORDS = pathlib.Path(__file__).parents[1] / "records"

#: The GPU whose records are replayed unless another is asked for.
SHIPPED = "nvidia-h100-80gb-hbm3"

#: The newest releases that this version of the package is tested with.
NEWEST = {"torch": "2.13", "triton": "3.9"}

_GIB = 2**30
# Grids at which the launch floor is measured.
_GRIDS = (1, 132, 1024, 4096, 16384, 65536, 262144)


@dataclass(frozen=True)
class Machine:
    """A GPU, the software on it, and its measured ceilings.

    Attributes
    ----------
    name, slug : str
        As the driver names it, and as a folder name, e.g. ``nvidia-h100-80gb-hbm3``.
    sms : int
        Streaming multiprocessors.
    l2, memory : int
        Bytes.
    capability : tuple of int
        Compute capability.
    driver, cuda, python, torch, triton, onnxruntime : str
        Versions; empty where a thing is not installed.
    cpu : str
    cores : int
    clocks : dict
        MHz seen while the ceilings were measured: ``sm``, ``memory``.
    copy, fill, read : float
        Bytes per second; a copy counts bytes read plus bytes written.
    rates : dict
        Matrix products, flop per second, by ``float64``, ``float32``, ``tf32``, ``float16``, ``bfloat16``.
    floor_cold, floor_warm : dict
        Seconds that the smallest kernel takes, by the number of its programs (as text, as JSON has it).
    bandwidth : list of dict
        Copies by size: ``bytes`` moved, ``cold`` bytes per second.
    commit, date : str
    beside : dict
        See `beside_torch`.
    recorded : bool
        Whether this was read from a record.
    """

    name: str
    slug: str
    sms: int
    l2: int
    memory: int
    capability: tuple[int, int]
    driver: str
    cuda: str
    python: str
    torch: str
    triton: str
    onnxruntime: str
    cpu: str
    cores: int
    clocks: dict[str, int]
    copy: float
    fill: float
    read: float
    rates: dict[str, float]
    floor_cold: dict[str, float]
    floor_warm: dict[str, float]
    bandwidth: list[dict[str, float]]
    commit: str
    date: str
    beside: dict[str, str] = field(default_factory=dict)
    recorded: bool = field(default=False)

    def memory_seconds(self, cost: Cost) -> float:
        """Seconds of the traffic alone: what is both read and written at a copy's rate, the rest at its own."""
        both = min(cost.read, cost.write)
        rest = cost.read - cost.write
        return 2 * both / self.copy + abs(rest) / (self.read if rest > 0 else self.fill)

    def roof(self, cost: Cost, rate: str) -> float:
        """Seconds below which no kernel of this cost can run: the larger of its traffic's time and its arithmetic's.

        Parameters
        ----------
        rate : str
            A key of `rates`.
        """
        return max(self.memory_seconds(cost), cost.flop / self.rates[rate])

    def floor(self, programs: int = 1, kind: str = "cold") -> float:
        """Seconds that a kernel of so many programs takes when each loads and stores one element.

        Parameters
        ----------
        programs : int
            Interpolated between the grids that were measured, and extrapolated beyond them.
        kind : {"cold", "warm"}
        """
        table = {int(k): v for k, v in (self.floor_cold if kind == "cold" else self.floor_warm).items()}
        grids = sorted(table)
        i = min(max(bisect.bisect_left(grids, programs), 1), len(grids) - 1)
        a, b = grids[i - 1], grids[i]
        return max(table[grids[0]], table[a] + (table[b] - table[a]) * (programs - a) / (b - a))

    def zone(self, cost: Cost, rate: str) -> str:
        """What limits a kernel of this cost here.

        Parameters
        ----------
        rate : str
            A key of `rates`.

        Returns
        -------
        {"launch", "L2", "memory", "compute"}
            ``launch`` where the floor of a launch is longer than the roof; ``L2`` where the traffic is under four
            times the L2 cache, which then serves part of it; else the larger term of the roof.
        """
        if self.roof(cost, rate) < self.floor():
            return "launch"
        if cost.flop / self.rates[rate] > self.memory_seconds(cost):
            return "compute"
        return "L2" if cost.read + cost.write < 4 * self.l2 else "memory"


@triton.jit
def _copy_probe(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def _fill_probe(y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.full([BLOCK], 1.0, tl.float32), mask=at < n)


@triton.jit
def _read_probe(y_ptr, x_ptr, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    start = tl.program_id(0).to(tl.int64) * STEPS * BLOCK
    for step in range(STEPS):
        at = start + step * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def _floor_probe(y_ptr, x_ptr):
    program = tl.program_id(0)
    tl.store(y_ptr + program, tl.load(x_ptr + program))


def _median(functions: timing.Functions, repeat: int = 15) -> dict[str, float]:
    times = timing.cold(functions, warmup=3, repeat=repeat)
    return {name: q.q50 for name, q in times.items() if q is not None}


def _bandwidths() -> tuple[float, float, float]:
    free, _ = torch.cuda.mem_get_info()
    n = min(4 * _GIB, free // 3 // 2**20 * 2**20) // 4  # two such arrays, on a GPU of less memory than they ask for too
    x, y = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    grid, block = (triton.cdiv(n, 8192),), 8192
    partial = torch.empty(triton.cdiv(n, 4 * 4096), device="cuda")
    seconds = _median(
        {
            "copy torch": lambda: y.copy_(x),
            "copy triton": lambda: _copy_probe[grid](y, x, n, BLOCK=block, num_warps=8),
            "fill torch": lambda: y.zero_(),
            "fill triton": lambda: _fill_probe[grid](y, n, BLOCK=block, num_warps=8),
            "read torch": lambda: torch.sum(x),
            "read triton": lambda: _read_probe[(len(partial),)](partial, x, n, STEPS=4, BLOCK=4096, num_warps=8),
        }
    )
    best = {w: min(seconds[f"{w} torch"], seconds[f"{w} triton"]) for w in ("copy", "fill", "read")}
    return 8 * n / best["copy"], 4 * n / best["fill"], 4 * n / best["read"]


def _copies() -> list[dict[str, float]]:
    """The rate of copies by size, so that a plot can show where the L2 cache and the launch set in."""
    rows = []
    for mib in (1, 4, 16, 64, 256, 1024, 4096):
        n = mib * 2**20 // 8
        if 12 * n > torch.cuda.mem_get_info()[0]:
            break
        x, y = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
        seconds = _median({"copy": functools.partial(y.copy_, x)})["copy"]
        rows.append({"bytes": 8 * n, "cold": 8 * n / seconds})
    return rows


def _rates(n: int = 8192) -> dict[str, float]:
    rates = {}
    before = torch.get_float32_matmul_precision()
    names = {"float64": torch.float64, "float32": torch.float32, "tf32": torch.float32}
    names |= {"float16": torch.float16, "bfloat16": torch.bfloat16}
    try:
        for name, dtype in names.items():
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
            out = torch.empty(n, n, device="cuda", dtype=dtype)
            product = functools.partial(torch.mm, a, b, out=out)
            rates[name] = 2 * n**3 / _median({"mm": product}, repeat=7)["mm"]
    finally:
        torch.set_float32_matmul_precision(before)
    return rates


def _floors() -> tuple[dict[str, float], dict[str, float]]:
    x, y = torch.zeros(max(_GRIDS), device="cuda"), torch.zeros(max(_GRIDS), device="cuda")
    probes = {str(g): functools.partial(_floor_probe[(g,)], y, x, num_warps=4) for g in _GRIDS}
    warm = timing.warm(probes)
    return _median(probes, repeat=30), {g: q.q50 for g, q in warm.items() if q is not None}


def versions(*packages: str) -> dict[str, str]:
    """Installed versions by distribution name, of those that are installed.

    Parameters
    ----------
    *packages : str
        Names of distributions, or of the packages that are imported from them.
    """
    return {name: version for package in packages for name, version in _versions(package)}


@functools.lru_cache(maxsize=None)  # the list of all distributions is slow to read
def _versions(package: str) -> tuple[tuple[str, str], ...]:
    # Two distributions may own one import package, as onnxruntime and onnxruntime-gpu do: what was imported counts.
    if version := getattr(sys.modules.get(package.replace("-", "_")), "__version__", ""):
        return ((package, str(version)),)
    try:
        return ((package, importlib.metadata.version(package)),)
    except importlib.metadata.PackageNotFoundError:
        if not package.isidentifier():  # a distribution's name, and nothing that is imported
            return ()
        names = dict.fromkeys(importlib.metadata.packages_distributions().get(package, ()))
        return tuple((name, importlib.metadata.version(name)) for name in names)


def beside_torch() -> dict[str, str]:
    """The facts that decide which kernels torch and Triton run, besides their versions.

    From 2.13 on, torch hands operations to kernels in other languages, if it knows the installed versions of their
    packages. Triton contracts a product and a sum to one operation unless a variable forbids it.

    Versions of ``nvidia-cutlass-dsl`` and ``apache-tvm-ffi`` where they are installed, and of the ``ptxas`` that Triton
    calls; ``torch-overrides``, the operations that torch hands over; ``TRITON_DEFAULT_FP_FUSION`` where it is set.
    """
    found = versions("nvidia-cutlass-dsl", "apache-tvm-ffi") | _ptxas()
    if (names := overrides()) is not None:
        found["torch-overrides"] = names
    if (fusion := os.environ.get("TRITON_DEFAULT_FP_FUSION")) is not None:
        found["TRITON_DEFAULT_FP_FUSION"] = fusion
    return found


@functools.cache
def _ptxas() -> dict[str, str]:
    try:
        return {"ptxas": str(triton.knobs.nvidia.ptxas.version)}
    except Exception:  # another release of Triton, or one that finds no ptxas
        return {}


@functools.cache
def overrides() -> str | None:
    """The operations that torch hands to kernels that are not ATen's, joined by +.

    ``"none"``, ``"unknown"`` where torch does not tell, None for a torch that hands over nothing: before 2.13.
    """
    try:
        native = importlib.import_module("torch.backends.python_native")
    except ImportError:
        return None
    try:
        names = {name for dsl in native.available_dsls for name in native.get_dsl_operations(dsl)}
    except Exception:  # young, and not said to stay as it is
        return "unknown"
    return "+".join(sorted(names)) or "none"


@contextlib.contextmanager
def aten() -> Iterator[None]:
    """Inside, torch computes by ATen's kernels alone: what it would hand over, see `overrides`, it does itself."""
    names = overrides() or "none"
    if names in ("none", "unknown"):
        yield
        return
    native: Any = importlib.import_module("torch.backends.python_native")
    with native.operations_disabled(*names.split("+")):
        yield


def _cpu() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the sources: FUSEBOOK_COMMIT where they are no checkout, else the version that is installed."""
    if given := os.environ.get("FUSEBOOK_COMMIT"):
        return given
    source = pathlib.Path(__file__).parents[2]
    # Not the commit of another project, in whose folder this one is installed.
    if source.name == "src" and (source.parent / ".git").exists():
        with contextlib.suppress(OSError):
            git = ["git", "-C", str(source), "rev-parse", "--short=12", "HEAD"]
            return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return "".join(f"version {version}" for version in versions("fusebook").values())


def _driver() -> str:
    """The driver's version, by NVML; empty if it cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # not installed, or a container without NVML
        return ""


def clocks_and_power() -> dict[str, float]:
    """The clocks in MHz (``sm_mhz``, ``memory_mhz``) and the power in watts (``power_w``) of the GPU, by NVML.

    Empty if NVML cannot be asked.
    """
    try:
        import pynvml  # the module of nvidia-ml-py

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        return {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        }
    except Exception:  # not installed, or a container without NVML: times do not depend on it
        return {}


def _measure() -> Machine:
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    copy, fill, read = _bandwidths()
    bandwidth = _copies()
    torch.cuda.empty_cache()
    rates = _rates()
    seen = clocks_and_power()  # straight after the matrix products, while the clocks are up
    floor_cold, floor_warm = _floors()
    ort = versions("onnxruntime")
    return Machine(
        name=properties.name,
        slug=slug_of(properties.name),
        sms=properties.multi_processor_count,
        l2=properties.L2_cache_size,
        memory=properties.total_memory,
        capability=(properties.major, properties.minor),
        driver=_driver(),
        cuda=torch.version.cuda or "",
        python=platform.python_version(),
        torch=torch.__version__,
        triton=triton.__version__,
        onnxruntime=next(iter(ort.values()), ""),
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        clocks={kind: int(seen[f"{kind}_mhz"]) for kind in ("sm", "memory") if seen},
        copy=copy,
        fill=fill,
        read=read,
        rates=rates,
        floor_cold=floor_cold,
        floor_warm=floor_warm,
        bandwidth=bandwidth,
        commit=_commit(),
        date=datetime.date.today().isoformat(),
        beside=beside_torch(),
    )


def cache_folder() -> pathlib.Path:
    """The folder for ceilings and compiled libraries: ``FUSEBOOK_CACHE``, or ``fusebook`` in the user's cache.

    It is one that cannot be made if the user has no home, as in some containers.
    """
    try:
        root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError:
        root = os.devnull
    return pathlib.Path(os.environ.get("FUSEBOOK_CACHE") or pathlib.Path(root) / "fusebook").absolute()


def _cache() -> pathlib.Path:
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return cache_folder() / f"{uuid}-{torch.__version__}-{triton.__version__}.json"


def _text(key: str, value: Any) -> None:
    """Refuse anything but text that a terminal shows as it is."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{key}: expected printable text, got {str(value)[:60]!r}")


def _number(key: str, value: Any, kind: Any = (int, float)) -> None:
    """Refuse anything but a finite positive number."""
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= sys.float_info.max:
        what = "whole" if kind is int else "finite"
        raise ValueError(f"{key}: expected a {what} positive number, got {str(value)[:60]!r}")


def _numbers(key: str, value: Any, keys: str, least: int) -> None:
    """Refuse anything but at least so many positive numbers by keys that match a pattern."""
    if not isinstance(value, dict) or len(value) < least or not all(re.fullmatch(keys, k) for k in value):
        raise ValueError(f"{key}: expected {least} or more numbers by names like {keys}, got {str(value)[:60]!r}")
    for name, number in value.items():
        _number(f"{key} {name}", number)


_TEXTS = ("name", "slug", "driver", "cuda", "python", "torch", "triton", "onnxruntime", "cpu", "commit", "date")
_RATES = ("float64", "float32", "tf32", "float16", "bfloat16")


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """The same fields; ValueError names one that a machine does not have, or that does not have its kind of value."""
    known = {f.name: f.default_factory is dataclasses.MISSING for f in dataclasses.fields(Machine)}
    del known["recorded"]  # where a machine is from decides its reader
    if wrong := (set(values) - set(known)) | {name for name, needed in known.items() if needed} - set(values):
        raise ValueError(f"{'unknown' if min(wrong) in values else 'no'} field {min(wrong)[:60]!r}")
    for key in _TEXTS:
        _text(key, values[key])
    for key, text in values.get("beside", {}).items():
        _text("a name in beside", key)
        _text(f"beside {key}", text)
    checked_slug(values["slug"])
    for key in ("sms", "l2", "memory", "cores"):
        _number(key, values[key], int)
    for key in ("copy", "fill", "read"):
        _number(key, values[key])
    _numbers("clocks", values["clocks"], "sm|memory", 0)
    _numbers("rates", values["rates"], "|".join(_RATES), len(_RATES))
    for key in ("floor_cold", "floor_warm"):  # interpolated, so two at least
        _numbers(key, values[key], "[1-9][0-9]{0,8}", 2)
    for at, row in enumerate(values["bandwidth"]):
        _numbers(f"bandwidth {at}", row, "bytes|cold", 2)
    capability = values["capability"]
    if not (isinstance(capability, list) and len(capability) == 2 and all(n in range(100) for n in capability)):
        raise ValueError(f"capability: expected two numbers such as [9, 0], got {str(capability)[:60]!r}")
    return values | {"capability": tuple(capability)}


def load(file: pathlib.Path, **changes: Any) -> Machine:
    """Read a machine from JSON.

    Parameters
    ----------
    **changes
        Fields to replace.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where the file is no machine; it says what is wrong with it.
    """
    try:
        return Machine(**_checked(json.loads(file.read_text())) | changes)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: not a machine.json of this version ({error}); record it again") from error


def seconds(file: pathlib.Path) -> dict[str, float]:
    """How long each page took when its machine was recorded, by the page's name; empty where there is no such file.

    Parameters
    ----------
    file : path
        ``seconds.json`` of a GPU's records.

    Raises
    ------
    ValueError
        Where the file has anything else.
    """
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text())
        for page, number in found.items():
            _text("a page", page)
            _number(page, number or 1)  # rounded to 0 where a page is fast
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: not seconds by page ({error}); record it again") from error
    return {page: float(number) for page, number in found.items()}


def save(machine: Machine, file: pathlib.Path) -> None:
    """Write a machine as JSON; the file is whole or not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    values = dataclasses.asdict(machine)
    del values["recorded"]
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(json.dumps(values, indent=2) + "\n")
    part.replace(file)


def here(*, fresh: bool = False) -> Machine:
    """This machine, its ceilings measured once and then cached under ``~/.cache/fusebook``.

    Parameters
    ----------
    fresh : bool
        Measure again.

    Raises
    ------
    RuntimeError
        Without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("machine.here: no CUDA device; machine.recorded() answers for a recorded one")
    return _here(torch.cuda.current_device(), fresh)


_MACHINES: dict[int, Machine] = {}


def _here(device: int, fresh: bool) -> Machine:
    if fresh or device not in _MACHINES:
        cache = _cache()
        if not fresh and cache.exists():
            try:
                # Clocks, software and commit may have moved on; the ceilings have not.
                _MACHINES[device] = load(cache, commit=_commit())
                return _MACHINES[device]
            except ValueError:
                pass  # written by another version of this module
        _MACHINES[device] = _measure()
        with contextlib.suppress(OSError):  # where nothing can be kept, it is measured again
            save(_MACHINES[device], cache)
    return _MACHINES[device]


def slug_of(name: str) -> str:
    """The folder of the records of a GPU that has this name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def checked_slug(slug: str) -> str:
    """The same slug; refused where it is none, so that no name leads out of the folder of records.

    Raises
    ------
    ValueError
        Names what was given.
    """
    if not slug or slug_of(slug) != slug:
        raise ValueError(f"machine: expected the folder of a GPU such as {SHIPPED}, of a-z, 0-9 and -, got {slug!r}")
    return slug


def slugs() -> list[str]:
    """The GPUs that have a record in the package."""
    return sorted(f.parent.name for f in RECORDS.glob("*/machine.json"))


#: Variables of earlier versions, and what to do instead.
_REMOVED = {
    "FUSEBOOK_REPLAY": "set FUSEBOOK_GPU to the recorded GPU to replay, such as nvidia-h100-80gb-hbm3",
    "FUSEBOOK_PART": "nox -s record -- --gpus all records one page per GPU",
    "FUSEBOOK_DUE": "nox -s record -- --stale --list names the pages that are stale",
    "FUSEBOOK_TRITON": "records are not stamped again; nox -s record -- --stale records stale pages",
    "FUSEBOOK_RECORD": "nox -s record -- PAGE records a page",
}


def refuse_removed_variables() -> None:
    """Raise if the environment sets a variable that has no effect any more.

    Raises
    ------
    ValueError
        Names the variable and what replaces it.
    """
    for name, instead in _REMOVED.items():
        if name in os.environ:
            raise ValueError(f"{name} went with version 0.2.0: unset it; {instead}")


#: The page that runs in a notebook or on the site, where `__main__` has no file; the gallery and lessons set it.
running = ""


def page_number(name: str = "") -> str:
    """The number in a page's file name, of the page that runs by default; empty if there is none."""
    name = name or running or pathlib.Path(getattr(sys.modules.get("__main__"), "__file__", None) or "").name
    found = re.match(r"plot_(\d+)_", name)
    return found[1] if found else ""


def places() -> list[pathlib.Path]:
    """The folders of the recorded GPUs that are replayed; the first that has a record counts.

    First that of FUSEBOOK_RECORDS, a folder as ``python -m fusebook.measure.record --all`` writes, if it is set. Then,
    in the package, that of FUSEBOOK_GPU, or else of `SHIPPED`.

    Raises
    ------
    FileNotFoundError
        If FUSEBOOK_RECORDS names no folder with the records of one GPU.
    """
    refuse_removed_variables()
    wish = os.environ.get("FUSEBOOK_GPU", "")
    shipped = RECORDS / checked_slug(wish or SHIPPED)
    if not (given := os.environ.get("FUSEBOOK_RECORDS")):
        return [shipped]
    found = sorted(f.parent for f in pathlib.Path(given).resolve().glob("*/machine.json"))
    if len(found) > 1 and wish:
        found = [folder for folder in found if folder.name == wish]
    if len(found) != 1:
        there = ", ".join(folder.name for folder in found) or "none"
        raise FileNotFoundError(
            f"FUSEBOOK_RECORDS={given}: expected a folder with the records of one GPU, found those of {there}; "
            f"`python -m fusebook.measure.record --all --out {given}` makes one, FUSEBOOK_GPU chooses one of several"
        )
    return [*found, shipped]


def slug() -> str:
    """The name of the recorded GPU that is replayed, see `places`."""
    return places()[0].name


def recorded(name: str = "") -> Machine:
    """A machine from the package's records; it answers the same questions as a live one.

    Parameters
    ----------
    name : str
        One of `slugs`; that of `slug` by default.

    Raises
    ------
    FileNotFoundError
        Where there is no such record.
    """
    file = (RECORDS / checked_slug(name) if name else places()[0]) / "machine.json"
    name = file.parent.name
    if not file.exists():
        known = ", ".join(slugs()) or "none yet"
        raise FileNotFoundError(f"machine.recorded: no record of {name!r}; recorded are: {known}")
    return load(file, recorded=True)


def current() -> Machine:
    """This machine where it has a GPU, else the recorded one, see `slug`."""
    if torch.cuda.is_available():
        return here()
    return recorded()
