"""What launchers say of the tensors that they are given: one sentence each, the same words for every operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["FLOATING", "check_alike", "check_tensor"]

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
