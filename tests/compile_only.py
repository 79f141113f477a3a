"""Compile, for a GPU that need not be there, every kernel that the library's launchers would launch on their edges.

Run by compiling.py as ``python compile_only.py FOLDER sm_90/softmax/float32 sm_80/softmax/float32``, with any number of
these tasks. A task is done by a process of its own, because Triton knows one driver; it is forked, because importing
takes longer than many a task. Its driver is that of a GPU that is not there. The answer is the file of the task's name:
one JSON object a line, what was launched, and what the compiled kernel takes: shared memory, and on sm_90 the bytes of
memory that a thread uses instead of registers.
"""

import functools
import inspect
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
from pathlib import Path

import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

import fusebook  # noqa: F401  (before triton, see fusebook/__init__.py)
from fusebook.cards import OPS
from fusebook.measure import inputs
from fusebook.measure.compiled import AbsentGPU, usage

# KiB a block. Where nothing is tuned, sm_80 here, plans promise 96 KiB, which every architecture since sm_86 has.
SHARED = {80: 96, 90: 227, 100: 227}

#: What kernels leave for others; where they leave nothing, their results.
LEAVES = re.compile(r"\b(atom|red)\.[\w.:]*global"), re.compile(r"\bst\.[\w.:]*global|\bcp\.[\w.:]*global\.shared")


def once(constants):
    """Compile once what differs only in what is known of integers and addresses: that one is 1, or 16 divides it.

    Without `constants`, what differs in constants and options too, but for kernels that multiply matrices: of others a
    generation changes how they are written, and no constant what a generation makes of them.
    """
    compile, made = JITFunction._do_compile, {}
    products = functools.cache(lambda fn: "tl.dot(" in inspect.getsource(sys.modules[fn.__module__]))

    def compiled(self, key, signature, device, constexprs, options, *rest):
        chosen = [(path, value) for path, value in constexprs.items() if self.params[path[0]].is_constexpr]
        given = [(name, kind) for name, kind in signature.items() if kind not in ("i1", "i32", "i64", "constexpr")]
        like = self.fn, repr(given), *((repr(chosen), options.hash()) if constants or products(self.fn) else ())
        if like not in made:
            made[like] = compile(self, key, signature, device, constexprs, options, *rest)
        return made[like]

    JITFunction._do_compile = compiled


def left_early(ptx):
    """Whether a kernel leaves something on some way from its begin that has not passed ``griddepcontrol.wait``.

    Blocks are followed as they run: they are written in another order. A branch past the wait is not taken: it is that
    of a program without rows, and grids have none.
    """
    lines = [line.strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    labels = {line[:-1].split(":")[0]: i for i, line in enumerate(lines) if re.match(r"\$\w+:", line)}
    kind = next(of for of in LEAVES if of.search(ptx))
    wait = next((i for i, line in enumerate(lines) if "griddepcontrol.wait" in line), -1)
    ways, been = [0], set()
    while ways:
        at = ways.pop()
        while at < len(lines) and at not in been and "griddepcontrol.wait" not in lines[at]:
            been.add(at)
            if kind.search(lines[at]):
                return True
            to = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", lines[at])
            if to and not (lines[at].startswith("@") and at < wait < labels[to[1]]):
                ways.append(labels[to[1]])
            if re.match(r"(bra|ret|exit)\b", lines[at]):
                break
            at += 1
    return False


def unspoiled():
    """Refuse addresses that LLVM has spoiled, as that of Triton 3.6 does: it widens a shift by 31 to a product.

    That has 64 bits, and its upper half what was to be lost, a thread's number: norms of odd widths were misaligned.
    And refuse a kernel that starts before the one ahead has ended, by which memory becomes zero, and leaves something
    there before it waits for that: a race that no GPU need show.
    """
    make = CUDABackend.make_ptx

    def checked(self, source, metadata, options, *rest):
        ptx = make(self, source, metadata, options, *rest)
        spoiled = re.search(r"mul\.wide\.u32[^;]*, 2147483648;", ptx)
        assert not spoiled, f"{metadata['name']}: spoiled addresses, {spoiled[0]}"
        assert not options.launch_pdl or not left_early(ptx), f"{metadata['name']}: leaves before it waits"
        return ptx

    CUDABackend.make_ptx = checked


def points(op, dtype, launched):
    """What each variant of ours launches, called from torch, on each edge."""
    variants = {name: v for name, v in op.variants.items() if name.startswith("fusebook") and set(v.needs) <= {"cuda"}}
    for dims in op.edges:
        made = op.make(inputs.generator(0, "cpu"), dtype, **dims)
        for name, variant in variants.items():
            launched.clear()
            point = {"variant": name, "dims": dict(dims)}
            try:
                variant.run(*(variant.prepare(*made) if variant.prepare else made))
            except NotImplementedError as refusal:
                point["refused"] = str(refusal)
            except Exception as error:
                point["error"] = f"{type(error).__name__}: {error}"
            yield point | {"launched": list(launched)}


class Counting(AbsentGPU):
    """Counts, of each kernel that it loads, the bytes that a thread spills."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.spilled = {}

    def load_binary(self, name, kernel, shared, device):
        if self.arch == 90:
            self.spilled[name] = max(usage(kernel)[1], self.spilled.get(name, 0))
        return super().load_binary(name, kernel, shared, device)


def answer(file):
    """Do the task whose answer is to be `file`."""
    launched = []

    def note(metadata):
        spilled = gpu.spilled.get(metadata.name, 0)
        taken = {"shared": metadata.shared, "warps": metadata.num_warps, "spilled": spilled}
        launched.append({"kernel": metadata.name, **taken})

    unspoiled()
    arch, op, dtype = file.parts[-3:]
    arch = int(arch.removeprefix("sm_"))
    first = next(name for name in ("bfloat16", "float32", "float64") if getattr(torch, name) in OPS[op].dtypes)
    if (arch, dtype) != (90, first):  # for which everything is compiled
        once(constants=arch == 90)
    gpu = Counting(divmod(arch, 10), shared=SHARED[arch] * 1024, launched=note)
    triton.runtime.driver.set_active(gpu)
    write(file, "\n".join(json.dumps(point) for point in points(OPS[op], getattr(torch, dtype), launched)))


def write(file, text):
    """Write `file` so that it appears when it is whole."""
    partly = file.with_suffix(".partly")
    partly.write_text(text)
    partly.rename(file)


def main(files, most):
    """Do the tasks, `most` at a time; where a compiler crashes, its task has an empty answer."""
    waiting, running = list(files), {}
    while waiting or running:
        if waiting and len(running) < most:
            file = waiting.pop(0)
            process = multiprocessing.get_context("fork").Process(target=answer, args=(file,))
            process.start()
            running[process.sentinel] = process, file
            continue
        for sentinel in multiprocessing.connection.wait(running):
            process, file = running.pop(sentinel)
            process.join()
            if process.exitcode:
                print(f"{'/'.join(file.parts[-3:])}: ended with {process.exitcode}", file=sys.stderr, flush=True)
                write(file, "")


if __name__ == "__main__":
    torch.set_num_threads(1)
    triton.runtime.cache.triton_key()  # reads all of Triton: once, and not in each process
    folder, *tasks = sys.argv[1:]
    main([Path(folder, task) for task in tasks], min(4, os.cpu_count() or 1))
