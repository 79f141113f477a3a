"""Kernels compiled ahead of time into one library that ONNX Runtime loads: no Python, torch or Triton where it runs.

Triton compiles a kernel to machine code without a GPU, in a process that does not interpret. `specs` lists the
variants: each kernel for each dtype, for rows that begin at multiples of 16 bytes and for others, and for a few sizes
of tile. ``library.c`` chooses among them at run time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fusebook.kernels._call import flag, integer
from fusebook.kernels.quantized import MANY_BLOCKS, MANY_TILES, launch_config
from fusebook.measure.machine import cache_folder
from fusebook.ort.custom import C, beside, compile_c

__all__ = ["ARCHITECTURES", "TYPES", "build"]

_HERE = pathlib.Path(__file__).parent

#: Ampere, Hopper and Blackwell in data centres.
ARCHITECTURES = (80, 90, 100)
#: Triton's names and bytes of the dtypes, in the order of library.c.
TYPES = {"float32": ("fp32", 4), "float16": ("fp16", 2), "bfloat16": ("bf16", 2), "float64": ("fp64", 8)}

# What library.c must know of the kernels, under these names.
_CONSTANTS = {
    "SCAN_MOST": 512,
    "SORT_MOST": 4096,
    "SORT_MINE": 4,
    "CHUNK": 32,
    "KEYS_BLOCK": 256,
    "MANY_TILES": MANY_TILES,
    "MANY_BLOCKS": MANY_BLOCKS,
}
# Softmax by rows: the width of a tile, its rows, its warps.
_ROWS = (
    (128, 4, 1), (512, 1, 1), (1024, 1, 2), (2048, 1, 4), (4096, 1, 8), (8192, 1, 16), (16384, 1, 32), (32768, 1, 32)
)  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """A kernel to compile.

    `late` and `early` name constants that are true from sm_90 on, where kernels may overlap. With `late`, a kernel
    starts before the preceding one ends, and waits in its code. With `early`, it lets the next kernel start so.
    """

    kind: str  # its name in library.c
    type: int  # place of its dtype in `TYPES`
    aligned: bool  # whether rows begin at multiples of 16 bytes
    limit: int  # the largest size that it takes at once
    rows: int  # how much of the other axis a program takes
    module: str
    function: str
    signature: dict[str, Any]  # Triton's types of the arguments
    constants: dict[str, int | bool | None]
    warps: int
    late: str = ""
    early: str = ""
    sixteens: tuple[str, ...] = ()  # arguments that are multiples of 16
    stages: int = 3


def specs(types: Sequence[str]) -> Iterator[Spec]:
    """What is compiled for dtypes, by their names in `TYPES`."""
    scatter, softmax = "fusebook.kernels.scatter", "fusebook.kernels.softmax"
    sizes: dict[str, Any] = {"sizes": ("i32",), "D": "i32", "n": "i32", "stride": "i32", "masked": "i64"}
    for axes in (1, 2, 3, 4):
        yield Spec(
            "KEYS", 0, False, axes, 0, scatter, "_scatter_nd_keys",
            {"keys_ptr": "*i64", "indices_ptr": "*i64", "n": "i32", "masked": "i64", "sizes": ("i32",) * axes},
            {"MASKED": True, "BLOCK": _CONSTANTS["KEYS_BLOCK"]}, 4,
        )  # fmt: skip
    for type_, name in enumerate(TYPES):
        triton_type, size = TYPES[name]
        # float32 sums of half types begin as float32 zeros.
        if name in types or (type_ == 0 and {"float16", "bfloat16"} & set(types)):
            # Small outputs stay in the cache: there fewer programs start quicker, and the next kernel may start early.
            for cached, early in ((0, ""), (1, "EARLY")):
                block = (16384 if cached else 4096) // size
                yield Spec(
                    "FILL", type_, False, cached, block, scatter, "_scatter_nd_fill",
                    {"out_ptr": f"*{triton_type}", "SIZE": "i64"}, {"BLOCK": block}, 8 if block >= 4096 else 4,
                    early=early,
                )  # fmt: skip
        if name not in types:
            continue
        pointer, sums = f"*{triton_type}", "*fp64" if size == 8 else "*fp32"
        if size == 2:
            yield Spec(
                "ROUND", type_, False, 0, 2048, scatter, "_scatter_nd_round",
                {"out_ptr": pointer, "sums_ptr": "*fp32", "SIZE": "i64"}, {"BLOCK": 2048}, 4,
            )  # fmt: skip
        for wide in (False, True):
            yield Spec(
                "SORT", type_, False, int(wide), 4096 // size, scatter, "_scatter_nd_sort",
                {"out_ptr": pointer, "counters_ptr": "*i32", "indices_ptr": "*i64", "SIZE": "i64", "COUNTERS": "i32"}
                | {f"{x}_ptr": "*i32" for x in ("order", "keys", "starts", "ends")} | sizes,
                {"MASKED": True, "WIDE": wide, "MINE": _CONSTANTS["SORT_MINE"], "THEIRS": 256, "BLOCK": 4096 // size},
                4, early="EARLY",
            )  # fmt: skip
        for aligned in (True, False):
            align = 16 // size if aligned else 1
            for n in (64, _CONSTANTS["SCAN_MOST"]):
                yield Spec(
                    "SCAN", type_, aligned, n, 2048 // size, scatter, "_scatter_nd_scan",
                    {"out_ptr": pointer, "indices_ptr": "*i64", "updates_ptr": pointer} | sizes,
                    {"MASKED": True, "ALIGN": align, "N": n, "BLOCK": 2048 // size, "GROUP": 16}, 4,
                )  # fmt: skip
            # Narrow rows share a tile; wide ones are cut into tiles.
            for block, rows in ((128, 4), (2048 // size, 1), (8192 // size, 1)):
                yield Spec(
                    "ATOMIC", type_, aligned, block, rows, scatter, "_scatter_nd_atomic",
                    {"sums_ptr": sums, "indices_ptr": "*i64", "updates_ptr": pointer} | sizes,
                    {"MASKED": True, "ALIGN": align, "ROWS": rows, "BLOCK": block}, 4, late="LATE",
                )  # fmt: skip
            for block, rows in ((128, 8), (4096 // size, 1)):
                yield Spec(
                    "SEGMENTS", type_, aligned, block, rows, scatter, "_scatter_nd_segments",
                    {"out_ptr": pointer, "updates_ptr": pointer, "parts_ptr": sums, "counters_ptr": "*i32"}
                    | {f"{x}_ptr": "*i32" for x in ("order", "keys", "starts", "ends")} | sizes,
                    {"ALIGN": align, "CHUNK": _CONSTANTS["CHUNK"], "ROWS": rows, "BLOCK": block, "TOGETHER": 8}, 8,
                    late="LATE",
                )  # fmt: skip
            strides = {"INNER": "i32", "N": "i32", "y_strides": ("i32",) * 3, "x_strides": ("i32",) * 3}
            tensors = {"y_ptr": pointer, "x_ptr": pointer}
            # Rows in registers, a tile for each: lanes to spare cost no traffic. Beyond 64 KiB two passes.
            for width, rows, warps in _ROWS:
                if width * size <= 65536:
                    yield Spec(
                        "SOFTMAX_ROWS", type_, aligned, width, rows, softmax, "_softmax_rows", tensors | strides,
                        {"ALIGN": align, "ROWS": rows, "BLOCK": width, "CHUNKS": 1, "FLAT": True},
                        warps,
                    )  # fmt: skip
            block = 32768 // size
            yield Spec(
                "SOFTMAX_WIDE", type_, aligned, 0, 1, "fusebook.ort.two_pass", "softmax_two_pass", tensors | strides,
                {"ALIGN": align, "ROWS": 1, "BLOCK": block, "GROUP": 16 // size}, 16,
            )  # fmt: skip
            if not aligned:
                yield Spec(
                    "SOFTMAX_AXIS", type_, False, 0, 32, "fusebook.ort.two_pass", "softmax_two_pass", tensors | strides,
                    {"ALIGN": 1, "ROWS": 32, "BLOCK": 256 // size, "GROUP": 1}, 4,
                )  # fmt: skip

    for type_, name in enumerate(TYPES):
        if name in types and TYPES[name][1] == 2:
            yield from _quantized(type_, f"*{TYPES[name][0]}")


def _quantized(type_: int, pointer: str) -> Iterator[Spec]:
    """Matmuls with weights of few bits in 4 or 8 slices, for up to 8 rows of x, and for 16 at a time."""
    formats = [(bits, group, zeros) for bits in (4, 8) for group in (32, 64, 128) for zeros in (False, True)]
    sizes = dict.fromkeys(("M", "N", "K", "blocks", "groups"), "i32")
    for number, (slices, (bits, group, zeros)) in enumerate(itertools.product((4, 8), formats)):
        given = {"y_ptr": pointer, "x_ptr": pointer, "w_ptr": "*i32", "s_ptr": pointer, "bias_ptr": pointer}
        given |= {"z_ptr": "*i8"} if zeros else {}
        absent: dict[str, int | bool | None] = dict.fromkeys(
            ("gate_w_ptr", "gate_s_ptr", "gate_z_ptr", *(() if zeros else ("z_ptr",)))
        )
        for rows in (8, 16):
            how = launch_config(rows, slices)
            constants = {"BITS": bits, "GROUP": group, "PARTS": max(1, 512 // bits // group), "PLAIN": False}
            yield Spec(
                f"QUANTIZED + {number}", type_, True, rows, how["ROWS"] * how["ABREAST"], "fusebook.kernels.quantized",
                "_quantized", given | sizes, {**absent, **how, **constants}, slices * how["ABREAST"],
                sixteens=("K",), stages=1,
            )  # fmt: skip


# Compiling ---------------------------------------------------------------------------------------------------------


def compile_one(spec: Spec, arch: int, folder: pathlib.Path) -> dict[str, object]:
    """Compile a kernel; in a process in which Triton does not interpret. Returns its row of the table."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(spec.module), spec.function)
    names = list(kernel.arg_names)
    # What the kernel has a default for may be left out, as in a launch.
    left_out = {p.name: p.default for p in kernel.params if p.has_default and p.name not in spec.signature}
    chosen = left_out | spec.constants
    overlaps = arch >= 90
    chosen |= {name: True for name in (spec.late, spec.early) if name and overlaps}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in spec.signature.items()}  # a tuple came as JSON
    signature = {name: "constexpr" if name in chosen else given[name] for name in names}
    constants = {(names.index(name),): value for name, value in chosen.items()}
    # Only what is aligned is promised to be.
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in spec.signature and ((spec.aligned and name.endswith("_ptr")) or name in spec.sixteens)
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": spec.warps,
        "num_stages": spec.stages,
        **({"launch_pdl": True} if spec.late and overlaps else {}),
    }
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", made.asm["ptx"])
    assert entry is not None
    code = made.asm["cubin"]
    file = folder / f"{hashlib.sha256(code).hexdigest()}.cubin"
    file.write_bytes(code)
    arguments = sum(len(v) if isinstance(v, tuple) else v != "constexpr" for v in signature.values())
    parameters = entry[1].count(".param")
    if made.metadata.global_scratch_size or parameters < arguments:
        raise RuntimeError(f"fusebook.ort: Triton {triton.__version__} compiled {spec.function} to another interface")
    return {
        "arch": arch,
        "kind": spec.kind,
        "type": spec.type,
        "aligned": int(spec.aligned),
        "limit": spec.limit,
        "rows": spec.rows,
        "file": file.name,
        "size": len(code),
        "shared": made.metadata.shared,
        "threads": spec.warps * 32,
        "late": int(bool(spec.late) and overlaps),
        "parameters": parameters,
        "name": made.metadata.name,
    }


def _worker(job: pathlib.Path) -> None:
    """Compile a share of the kernels: what each process that `build` starts does."""
    rows = []
    for number, arch, spec in json.loads(job.read_text()):
        print(f"{number}: sm_{arch} {spec['function']} {list(TYPES)[spec['type']]}", flush=True)
        rows.append(compile_one(Spec(**spec), arch, job.parent))
    job.with_suffix(".rows").write_text(json.dumps(rows))


def _compiled(
    wanted: list[tuple[int, Spec]], folder: pathlib.Path, workers: int, progress: bool
) -> list[dict[str, object]]:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    source = str(_HERE.parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH", "")]))
    running = []
    jobs = [(f"{i} of {len(wanted)}", arch, asdict(spec)) for i, (arch, spec) in enumerate(wanted, 1)]
    for i in range(min(workers, len(wanted))):
        job = folder / f"{i}.json"
        job.write_text(json.dumps(jobs[i::workers]))
        code = "import pathlib, sys; from fusebook.ort import aot; aot._worker(pathlib.Path(sys.argv[1]))"
        with job.with_suffix(".err").open("w") as errors:
            command = [sys.executable, "-P", "-c", code, str(job)]  # -P: nothing of the working directory
            # The command's own output is the library's path.
            said = 2 if progress else subprocess.DEVNULL
            process = subprocess.Popen(command, env=environment, stdout=said, stderr=errors)
        running.append((job, process))
    try:
        failed = [job for job, process in running if process.wait()]
    finally:
        for _, process in running:
            process.kill()
    if failed:
        lines = failed[0].with_suffix(".err").read_text().strip().splitlines()
        unknown = next((line for line in lines if re.match(r"ptxas.* fatal .*'sm_", line)), "")
        last = unknown or (lines[-1] if lines else "a process died")
        # Python's errors of files begin so: "OSError: [Errno 28] No space left on device".
        full = "[Errno " in last
        advice = "set TRITON_CACHE_DIR and TMPDIR to folders that can be written" if full else "use Triton 3.6 to 3.9"
        if unknown:
            advice = "leave that architecture out"
        raise RuntimeError(f"fusebook.ort: the kernels do not compile: {last}; {advice}")
    return [row for job, _ in running for row in json.loads(job.with_suffix(".rows").read_text())]


def _table(rows: list[dict[str, object]], kernels: pathlib.Path, types: Sequence[str]) -> str:
    """table.h, and the kernels one behind the other."""
    lines, data, places = [], bytearray(), {}
    for row in rows:
        name = str(row["file"])
        if name not in places:
            data += b"\0" * (-len(data) % 64)
            places[name] = len(data)
            data += (kernels.parent / name).read_bytes()
        keys = ("arch", "kind", "type", "aligned", "limit", "rows")
        after = ("size", "shared", "threads", "late", "parameters")
        values = [*(str(row[k]) for k in keys), str(places[name]), *(str(row[k]) for k in after)]
        lines.append(f'  {{{", ".join(values)}, "{row["name"]}"}},')
    kernels.write_bytes(data)
    architectures = sorted({int(str(row["arch"])) for row in rows})
    return "\n".join(
        [
            f"static const Entry ENTRIES[] = {{\n{chr(10).join(lines)}\n}};",
            f"static const int ARCHITECTURES[] = {{{', '.join(map(str, architectures))}}};",
            f'#define ARCHITECTURE_NAMES "{", ".join(f"sm_{a}" for a in architectures)}"',
            f"enum {{ TYPES = {len(TYPES)} }};",
            f"static const int BUILT[] = {{{', '.join(str(int(name in types)) for name in TYPES)}}};",
            f"enum {{ {', '.join(f'{k} = {v}' for k, v in _CONSTANTS.items())} }};",
            f'#define KERNELS "{kernels.name}"',  # no path, which may have characters that C or the locale has not
            "",
        ]
    )


def build(
    out: str | os.PathLike[str],
    *,
    arch: Sequence[int] = ARCHITECTURES,
    dtype: Sequence[str] = tuple(TYPES),
    workers: int | None = None,
    progress: bool = False,
) -> pathlib.Path:
    """Make the library. It needs Triton and a C compiler, and no GPU.

    Parameters
    ----------
    out : path
        The file to write, e.g. ``libfusebook_ort.so``. A process that has run the library on a GPU keeps it until it
        ends. For such a process give another name, and replace no file in place.
    arch : sequence of int
        Compute capabilities times ten: 90 is sm_90.
    dtype : sequence of str
        Names of `TYPES`.
    workers : int, optional
        Processes that compile side by side; one a core by default.
    progress : bool, default False
        Name each kernel on stderr before it is compiled.

    Returns
    -------
    pathlib.Path
        `out`.

    Raises
    ------
    TypeError, ValueError
        For an architecture or a dtype that is not known, and for workers that are no positive number.
    RuntimeError
        Where there is no C compiler, a kernel does not compile, or `out` cannot be written.
    """
    if any(isinstance(some, (str, bytes)) or not isinstance(some, Iterable) for some in (arch, dtype)):
        raise TypeError(f"fusebook.ort: expected lists, such as [90] and ['float32'], got {arch!r} and {dtype!r}")
    flag("fusebook.ort", "progress", progress)
    if workers is not None:
        workers = integer("fusebook.ort", "workers", workers, "leave it out", "from 1 up", lambda n: n > 0)
    arch, dtype = [*arch], [*dtype]  # iterators too, which can be read once
    for number in arch:
        if not hasattr(number, "__index__") or not 80 <= number < 200:
            raise ValueError(f"fusebook.ort: expected architectures from 80 on, such as 90 for sm_90, got {number!r}")
    for name in dtype:
        if name not in [*TYPES]:
            raise ValueError(f"fusebook.ort: expected dtypes of {', '.join(TYPES)}, got {name!r}")
    if not arch or not dtype:
        raise ValueError("fusebook.ort: expected an architecture and a dtype at least, got none; see --help")
    wanted = [(int(number), spec) for number in dict.fromkeys(arch) for spec in specs(dtype)]
    remedy = "give another file as out (--out) in a folder"
    beside(pathlib.Path(out), remedy).unlink()  # compiling takes minutes: look first
    with _scratch() as folder:
        rows = _compiled(wanted, folder, workers or os.cpu_count() or 1, progress)
        # Variants of one kernel from the smallest up: library.c takes the first that is large enough.
        rows.sort(key=lambda r: tuple(r[k] for k in ("arch", "kind", "type", "aligned", "limit")))  # type: ignore[return-value]
        (folder / "table.h").write_text(_table(rows, folder / "kernels.bin", dtype))
        options = [f"-I{folder}", "-ldl", "-lpthread"]
        return compile_c([C / "library.c"], pathlib.Path(out), *options, remedy=remedy, folder=folder)


@contextlib.contextmanager
def _scratch() -> Iterator[pathlib.Path]:
    """A folder for as long as it is needed; RuntimeError where it cannot be made, or takes no more files."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield pathlib.Path(folder)
    except OSError as error:
        raise RuntimeError(
            f"fusebook.ort: cannot write temporary files ({error}); set TMPDIR to a folder that can be written"
        ) from error


def cached(arch: Sequence[int], dtype: Sequence[str]) -> pathlib.Path:
    """A library that was built before from the same sources, or one that is built now; arguments as of `build`."""
    from importlib.metadata import version

    files = [C / "library.c", C / "ort_api.h", _HERE / "aot.py", _HERE / "two_pass.py"]
    files += sorted((_HERE.parent / "kernels").glob("*.py"))
    text = b"".join(f.read_bytes() for f in files) + repr((tuple(arch), tuple(dtype), version("triton"))).encode()
    out = cache_folder() / f"fusebook-ort-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not os.path.exists(out):
        beside(out, "set FUSEBOOK_CACHE to a folder").unlink()
        build(out, arch=arch, dtype=dtype)
    return out
