"""Compile, for a GPU that need not be there, every kernel that the library's launchers would launch on their edges.

Run by compiling.py as ``python compile_only.py FOLDER sm_90/softmax sm_80/softmax``, with any number of these tasks. A
task is done by a process of its own, because Triton knows one driver; it is forked, because importing takes longer than
many a task. The driver here names an architecture and a limit of shared memory, takes tensors on the CPU, and launches
nothing. The answer to a task is the file of its name: one JSON object a line, what was launched, and the shared memory
that the compiled kernel asks for.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

import fusebook  # noqa: F401  (before triton, see fusebook/__init__.py)
from fusebook import inputs
from fusebook.cards import OPS

# KiB a block. Where nothing is tuned, sm_80 here, plans promise 96 KiB, which every architecture since sm_86 has.
SHARED = {80: 96, 90: 227, 100: 227}


class CompileOnly(DriverBase):
    """A driver for an architecture without a device: kernels are compiled to machine code, loaded by nobody."""

    def __init__(self, arch, launched):
        self.arch = arch
        self.launched = launched
        self.utils = self  # Triton looks for get_device_properties and load_binary there

    @staticmethod
    def is_active():
        return True

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError("nothing is launched, so no launcher is generated")

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError("nothing is launched, so there is nothing to time")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED[self.arch] * 1024, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name, kernel, shared, device):
        return None, None, 0, 0, 1024  # module, function, registers, spills, most threads a block

    def launcher_cls(self, source, metadata):
        """What Triton calls to launch: takes note."""

        def launch(*arguments):
            self.launched.append({"kernel": metadata.name, "shared": metadata.shared, "warps": metadata.num_warps})

        return launch


def points(op, launched):
    """What each variant of ours launches, called from torch, on each edge and dtype."""
    variants = {name: v for name, v in op.variants.items() if name.startswith("fusebook") and set(v.needs) <= {"cuda"}}
    for dims in op.edges:
        for dtype in op.dtypes:
            made = op.make(inputs.generator(0, "cpu"), dtype, **dims)
            for name, variant in variants.items():
                launched.clear()
                point = {"variant": name, "dims": dict(dims), "dtype": str(dtype)}
                try:
                    variant.run(*(variant.prepare(*made) if variant.prepare else made))
                except NotImplementedError as refusal:
                    point["refused"] = str(refusal)
                except Exception as error:
                    point["error"] = f"{type(error).__name__}: {error}"
                yield point | {"launched": list(launched)}


def answer(file):
    """Do the task whose answer is to be `file`."""
    launched = []
    triton.runtime.driver.set_active(CompileOnly(int(file.parent.name.removeprefix("sm_")), launched))
    write(file, "\n".join(json.dumps(point) for point in points(OPS[file.name], launched)))


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
                print(f"{file.parent.name}/{file.name}: ended with {process.exitcode}", file=sys.stderr, flush=True)
                write(file, "")


if __name__ == "__main__":
    torch.set_num_threads(1)
    triton.runtime.cache.triton_key()  # reads all of Triton: once, and not in each process
    folder, *tasks = sys.argv[1:]
    main([Path(folder, task) for task in tasks], min(4, os.cpu_count() or 1))
