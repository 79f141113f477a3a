"""What launchers share on the host's side: where a kernel can run, on which hardware, and how it is launched there.

A launcher that asks here, and not ``x.is_cuda``, also takes tensors on the CPU: in Triton's interpreter, and where a
test puts a driver in the GPU's place to compile without one.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

__all__ = ["INTERPRETED", "check_device", "gpu", "launching", "runs_on"]

#: Whether Triton interprets; decided when it is imported.
INTERPRETED: bool = triton.knobs.runtime.interpret


@functools.cache
def gpu(device: torch.device) -> tuple[tuple[int, int] | None, int]:
    """Capability and multiprocessors of a device; in the interpreter None, and few enough for small tests to share."""
    if INTERPRETED:
        return None, 4
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return (properties.major, properties.minor), properties.multi_processor_count
    return divmod(triton.runtime.driver.active.get_current_target().arch, 10), 132


def runs_on(device: torch.device) -> bool:
    """Whether Triton can launch a kernel on a tensor of this device."""
    if device.type == "cuda":
        return True
    if INTERPRETED:
        return device.type == "cpu"
    try:
        return triton.runtime.driver.active.get_active_torch_device().type == device.type
    except RuntimeError:  # no GPU, so no driver
        return False


def check_device(name: str, tensor: Tensor) -> None:
    """Refuse a tensor on a device where Triton cannot launch a kernel.

    Parameters
    ----------
    name : str
        The function that was called, for the message.
    tensor : torch.Tensor

    Raises
    ------
    ValueError
        Where `tensor` is on the CPU and Triton does not interpret, or on a device that Triton does not know.
    """
    if not runs_on(tensor.device):
        raise ValueError(
            f"{name}: expected a CUDA tensor, got one on {tensor.device.type}; move it to a GPU, or set "
            "TRITON_INTERPRET=1 before Triton is imported, which runs the kernel in Triton's interpreter on the CPU"
        )


@contextlib.contextmanager
def launching(tensor: Tensor) -> Iterator[None]:
    """Launch on the tensor's device. In the interpreter NaN shall raise no warning, as it raises none on a GPU."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            yield
    else:
        import numpy

        with numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
