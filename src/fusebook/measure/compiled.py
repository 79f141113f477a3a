"""Kernels compiled without a GPU: for which architecture, with how many registers, and whether they spill."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from fusebook.kernels import _call

__all__ = ["AbsentGPU", "Unknown", "kernels", "registers", "usage"]


class Unknown(RuntimeError):
    """A kernel does not compile here; the message is the compiler's."""


class AbsentGPU(DriverBase):
    """A Triton driver for a GPU that is not there: it names an architecture, takes CPU tensors and runs nothing.

    Parameters
    ----------
    capability : tuple of int
        (9, 0) is Hopper.
    multiprocessors : int
    shared : int
        Bytes of shared memory that a block may use.
    launched : callable, optional
        Called with the metadata of each kernel that would be launched.
    target : GPUTarget, optional
        What to compile for, where it is no GPU of NVIDIA's; by default that of `capability`.
    """

    def __init__(
        self,
        capability: tuple[int, int] = (9, 0),
        multiprocessors: int = 132,
        shared: int = 227 * 1024,
        launched: Callable[[Any], None] = lambda metadata: None,
        target: GPUTarget | None = None,
    ) -> None:
        self.arch = 10 * capability[0] + capability[1]
        self.target = target or GPUTarget("cuda", self.arch, 32)
        warp = self.target.warp_size
        self.properties = {"max_shared_mem": shared, "multiprocessor_count": multiprocessors, "warpSize": warp}
        self.launched = launched
        self.utils = self  # Triton looks for get_device_properties and load_binary there

    is_active = staticmethod(lambda: True)
    get_current_device = get_current_stream = staticmethod(lambda *device: 0)

    def _unasked(self, *given: Any) -> Any:
        """Refuse what Triton asks a driver for only before a launch."""
        raise NotImplementedError("nothing is launched, so there is no launcher to generate and nothing to time")

    map_python_to_cpp_type = get_benchmarker = _unasked

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self.properties

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, None, 0, 0, 1024  # module, function, registers, spills, most threads a block

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: self.launched(metadata)


@contextlib.contextmanager
def kernels() -> Iterator[list[Any]]:
    """Collect the compiled kernels that the calls in this block launch, in their order."""
    found: list[Any] = []
    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            compiled = run(self, *args, grid=grid, warmup=warmup, **kwargs)
            if not warmup:
                found.append(compiled)
        return compiled

    JITFunction.run = launch
    try:
        with _call.uncached():
            yield found
    finally:
        JITFunction.run = run


def usage(cubin: bytes) -> tuple[int, int]:
    """The registers of a thread of a compiled kernel, and the bytes that it spills to memory, by Triton's cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], text=True)
    if found := re.search(r"REG:(\d+) STACK:(\d+)", said):
        return int(found[1]), int(found[2])
    raise Unknown(f"compiled.usage: cuobjdump says nothing of registers: {said.strip()[:200]}")


_REGISTERS = """
import json, sys, fusebook, triton
from fusebook.measure import compiled
triton.runtime.driver.set_active(compiled.AbsentGPU())
names = {}
exec(sys.stdin.read(), names)
with compiled.kernels() as found:
    names[sys.argv[1]](*json.loads(sys.argv[2]))
print(triton.__version__, *(compiled.usage(kernel.asm["cubin"])[0] for kernel in found), sep="\\n")
"""


def registers(launch: Callable[..., Any], *given: Any) -> tuple[str, list[int]]:
    """The registers of a thread of each kernel that a function launches, compiled here for Hopper.

    The source of `launch` is complete: it imports what it uses. Its arguments are such as JSON can hold.

    Returns
    -------
    str, list of int
        The version of Triton, and the registers of each launch in their order.

    Raises
    ------
    Unknown
    """
    paths = os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _REGISTERS, launch.__name__, json.dumps(given)]
    source = textwrap.dedent(inspect.getsource(launch))
    process = subprocess.run(command, input=source, capture_output=True, text=True, env=env)
    if process.returncode:
        raise Unknown((process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    version, *said = process.stdout.split()
    return version, [int(line) for line in said]
