"""What launchers share on the host's side: what they say of their arguments, and where and how a kernel is launched.

Of the tensors that they are given they say one sentence each, the same words for every operator.

A launcher that asks here, and not ``x.is_cuda``, also takes tensors on the CPU: in Triton's interpreter, and where a
test puts a driver in the GPU's place to compile without one.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence

import torch
import triton
from torch import Tensor

__all__ = ["FLOATING", "INTERPRETED", "check_alike", "check_device", "check_tensor", "gpu", "launching", "runs_on"]


#: The dtypes that floating-point kernels take.
FLOATING: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, what: str, value: object, dtypes: Sequence[torch.dtype] = FLOATING) -> None:
    """Refuse what is not a dense tensor of one of `dtypes`, whose numbers stand in memory as they are.

    Parameters
    ----------
    name : str
        The function that was called, for the message.
    what : str
        The argument, for the message.
    value : object
    dtypes : sequence of torch.dtype

    Raises
    ------
    TypeError
        Where `value` is no tensor, of another dtype, or not dense.
    ValueError
        Where `value` is a view that negates what it shows, as the imaginary part of a conjugate is: a kernel would read
        the numbers with their old sign.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name}: expected {what} to be a torch.Tensor, got {type(value).__name__}; use torch.as_tensor"
        )
    if value.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        accepted = f"{', '.join(others)} or {last}" if others else last
        raise TypeError(f"{name}: expected {what} to be {accepted}, got {value.dtype}; cast it first")
    if value.layout is not torch.strided:
        raise TypeError(f"{name}: expected {what} to be dense, got {value.layout}; call to_dense() first")
    # Compiled code passes torch's dispatcher, which negates; there this cannot be asked.
    if not torch.compiler.is_compiling() and value.is_neg():
        raise ValueError(
            f"{name}: expected {what} to stand in memory as it is, got a view that negates; call resolve_neg() first"
        )


def check_alike(name: str, what: str, value: Tensor, model: str, other: Tensor, *, dtype: bool = True) -> None:
    """Refuse a tensor whose device, or dtype, is not that of another argument.

    Parameters
    ----------
    name : str
        The function that was called, for the message.
    what : str
        The argument, for the message.
    value : torch.Tensor
    model : str
        The argument that it must resemble, for the message.
    other : torch.Tensor
    dtype : bool
        Whether the dtypes must be equal too.

    Raises
    ------
    TypeError
        Where the dtypes differ.
    ValueError
        Where the devices differ.
    """
    if dtype and value.dtype != other.dtype:
        raise TypeError(
            f"{name}: expected {what} to be {other.dtype} as {model} is, got {value.dtype}; cast one of them"
        )
    if value.device != other.device:
        raise ValueError(
            f"{name}: expected {what} on {other.device} as {model} is, got {value.device}; move one of them"
        )


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
