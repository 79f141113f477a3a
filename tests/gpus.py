"""Compile what the launchers choose on GPUs that are not there, and write what came of it into docs/gpus.csv.

    PYTHONPATH=src python tests/gpus.py                  # what is missing or of older code
    PYTHONPATH=src python tests/gpus.py --gpu L4 softmax # one GPU, one operator
    PYTHONPATH=src python tests/gpus.py --list           # only say what is missing or of older code

A row is an operator on a GPU: every edge of its card and `LARGER` problems, in up to two dtypes. It has the launches,
the kernels, the most shared memory of a block, what the machine code uses, and the hash of the source. GPUs of one
capability, number of multiprocessors and shared memory are compiled for once. On Hopper, each operator is compiled a
second time without fused multiply-adds, the default of Triton 3.10; the row names the kernels that then differ.
"""

import argparse
import csv
import dataclasses
import hashlib
import multiprocessing
import os
import re
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from compile_only import once, points
from compiling import environment
from fusebook.cards import OPS
from fusebook.measure import sources
from fusebook.measure.compiled import AbsentGPU

FILE = Path(__file__).resolve().parents[1] / "docs" / "gpus.csv"
COLUMNS = ("gpu", "operator", "launches", "kernels", "shared", "features", "status", "unfused", "code", "triton")


class Kind(NamedTuple):
    """What decides what launchers choose; of several names the first is that of the rows."""

    names: tuple[str, ...]
    target: GPUTarget
    multiprocessors: int
    shared: int  # bytes that a block may use


KINDS = (
    Kind(("L4",), GPUTarget("cuda", 89, 32), 58, 99 * 1024),
    Kind(("A100",), GPUTarget("cuda", 80, 32), 108, 163 * 1024),
    Kind(("RTX 4090",), GPUTarget("cuda", 89, 32), 128, 99 * 1024),
    Kind(("H100", "H200"), GPUTarget("cuda", 90, 32), 132, 227 * 1024),
    Kind(("B200",), GPUTarget("cuda", 100, 32), 148, 227 * 1024),
    Kind(("MI300X",), GPUTarget("hip", "gfx942", 64), 304, 64 * 1024),
)

#: What machine code uses, by a pattern of its text: PTX, or AMD's assembly.
FEATURES = {
    "tensor descriptors": r"\bcp\.async\.bulk\.tensor",
    "dependent launch": r"\bgriddepcontrol\.",
    "clusters": r"\bbarrier\.cluster|\bmapa\.|cluster_ctaid",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma": r"\bmma\.sync[\w.]*\.(f16|bf16|tf32|f32)\b",
    "float64 matrix units": r"\bmma\.sync[\w.]*\.f64\b|\bv_mfma_f64",
    "mfma": r"\bv_mfma_f(32|16)|\bv_mfma_\w*bf16",
    "fp8": r"e4m3x2|\bv_cvt_(sr|pk)_fp8",
    "asynchronous copies": r"\bcp\.async\.c[ag]\b",
    "bf16 atomics": r"\b(atom|red)\.[\w.]*bf16|global_atomic_pk_add_bf16",
}


#: Problems that are larger than edges, for launch configs of few rows, of many, and of wide ones. They are small in
#: what decides no config, since tensors are on the CPU.
ROWS = tuple({"M": 3, "N": n} for n in (4096, 8192, 16384, 32768, 131072))
TILES = tuple({"M": m, "K": 64, "N": n} for m, n in ((16, 64), (32, 64), (64, 8192), (256, 1024), (1024, 8192)))
POINTS = tuple(
    {"n": 20_000, "d": d, "k": k, "labels": "int64", "law": "blobs"}
    for d, k in ((16, 256), (64, 256), (128, 256), (256, 128), (300, 100), (64, 32))
)
LARGER = {
    "concat_gemm": tuple(at | {"weights": "columns"} for at in TILES),
    "swiglu": TILES,
    "kmeans_assign": POINTS,
    "kmeans_step": POINTS,
    "kmeans_update": ({"n": 200_000, "d": 64, "k": 256, "labels": "int64", "law": "blobs"},),  # sorts
}


def problems(op):
    """What is compiled of an operator."""
    rows = ROWS if set(op.edges[0]) == {"M", "N"} else ()
    return (*op.edges, *LARGER.get(op.name, rows))


def dtypes(op):
    """Those that are compiled: bf16 and float32, where the operator has them."""
    return [dtype for dtype in (torch.bfloat16, torch.float32) if dtype in op.dtypes] or list(op.dtypes)[:1]


def instructions(binary):
    """The machine code in an ELF file, without what else a compiler notes there."""
    (start,), (size, many, _) = struct.unpack_from("<Q", binary, 0x28), struct.unpack_from("<HHH", binary, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", binary, start + i * size) for i in range(many)]
    return b"".join(binary[at : at + length] for _, kind, flags, _, at, length in heads if kind == 1 and flags & 4)


def compiled(kind, op):
    """The row of an operator, and hashes of each kernel's code; in a separate process, as Triton has one driver."""
    launched, found, digests = [], set(), {}

    def note(metadata):
        launched.append((metadata.name, metadata.shared))

    class Reading(AbsentGPU):
        def load_binary(self, name, kernel, shared, device):
            found.update(feature for feature, pattern in FEATURES.items() if re.search(pattern, texts[-1]))
            digests.setdefault(name, set()).add(hashlib.sha256(instructions(kernel)).hexdigest())
            return super().load_binary(name, kernel, shared, device)

    texts = [""]
    make = triton.compiler.compiler.CompiledKernel.__init__

    def init(self, *given, **named):
        make(self, *given, **named)
        texts.append(self.asm.get("ptx") or self.asm.get("amdgcn") or "")

    triton.compiler.compiler.CompiledKernel.__init__ = init
    once(constants=True)
    gpu = Reading(multiprocessors=kind.multiprocessors, shared=kind.shared, launched=note, target=kind.target)
    triton.runtime.driver.set_active(gpu)
    kernels, shared, launches, errors, refused = set(), 0, 0, [], 0
    larger = dataclasses.replace(op, edges=problems(op))
    for dtype in dtypes(op):
        for point in points(larger, dtype, launched):
            launches += len(point["launched"])
            kernels |= {name for name, _ in point["launched"]}
            shared = max([shared, *(bytes_ for _, bytes_ in point["launched"])])
            refused += "refused" in point
            if "error" in point:
                errors.append(f"{point['variant']} {dtype} {point['dims']}: {point['error']}".replace("torch.", "", 1))
    status = errors[0].splitlines()[0][:300] if errors else "refused" if refused and not launches else "compiled"
    return {
        "gpu": kind.names[0],
        "operator": op.name,
        "launches": launches,
        "kernels": len(kernels),
        "shared": shared,
        "features": "; ".join(name for name in FEATURES if name in found),
        "status": status,
        "unfused": "",
        "code": sources.of_variant(op, "fusebook")[0],
        "triton": triton.__version__,
    }, digests


def rows():
    """What is written, by GPU and operator."""
    if not FILE.exists():
        return {}
    with open(FILE, encoding="utf-8", newline="") as file:
        return {(row["gpu"], row["operator"]): row for row in csv.DictReader(file)}


def write(found):
    """Write the rows, in the order of GPUs and cards."""
    order = [(kind.names[0], name) for kind in KINDS for name in OPS]
    part = FILE.with_suffix(".part")
    with open(part, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found[key] for key in order if key in found)
    part.replace(FILE)


def due(kinds, names, found):
    """The rows that are missing or of older code."""
    return [
        (kind, OPS[name])
        for kind in kinds
        for name in names
        if "fusebook" in OPS[name].variants
        and found.get((kind.names[0], name), {}).get("code") != sources.of_variant(OPS[name], "fusebook")[0]
    ]


def _answer(kind, op, fused, to):
    os.environ["TRITON_DEFAULT_FP_FUSION"] = str(int(fused))
    to.send(compiled(kind, op))


def answer(kind, op, fused=True):
    """`compiled` in another process; None if the compiler ends it."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(kind, op, fused, there))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        return None
    finally:
        process.join()


def main(argv):
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", help="all of them if none is given")
    parser.add_argument("--gpu", action="append", help="one of " + ", ".join(n for k in KINDS for n in k.names))
    parser.add_argument("--list", action="store_true", help="only say what is missing or of older code")
    args = parser.parse_args(argv)
    if unknown := set(args.operators) - set(OPS):
        parser.error(f"expected operators of {', '.join(OPS)}, got {', '.join(unknown)}")
    kinds = [kind for kind in KINDS if not args.gpu or set(kind.names) & set(args.gpu)]
    wanted = due(kinds, args.operators or list(OPS), rows())
    for kind, op in wanted:
        if args.list:
            print(f"{kind.names[0]}: {op.name}")
            continue
        if (found := answer(kind, op)) is None:
            print(f"{kind.names[0]}, {op.name}: the compiler ended the process", flush=True)
            continue
        row, digests = found
        if kind.target.arch == 90 and (found := answer(kind, op, fused=False)):
            row["unfused"] = "; ".join(sorted(name for name in digests if digests[name] != found[1].get(name)))
        write(rows() | {(row["gpu"], row["operator"]): row})
        print(f"{row['gpu']}, {row['operator']}: {row['launches']} launches, {row['status']}", flush=True)
    return 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "0":  # Triton reads it as it is imported, and the cache's place too
        env = environment() | {"TRITON_STORE_BINARY_ONLY": "0"}
        env["TRITON_CACHE_DIR"] += "-gpus"
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
