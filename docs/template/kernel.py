# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/squared_relu.py. It needs torch, Triton, NumPy and _call.py.
"""Squared ReLU, element by element: everything is read once and written once.

    y[i, j] = max(x[i, j], 0) ** 2

Fused: the maximum and the product. Two separate operations read 2MN elements and write 2MN; the fused kernel reads MN
and writes MN.

Limits: the output is contiguous; an input that is not is copied first.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ._call import Operator, apply, gpu, launch, shapes

__all__ = ["squared_relu", "squared_relu_eager"]


# Separate operations


def squared_relu_eager(x: torch.Tensor) -> torch.Tensor:
    """Squared ReLU by separate operations: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor

    Returns
    -------
    torch.Tensor
        Of the shape and dtype of `x`.
    """
    top = x.clamp(min=0)  # read MN, write MN
    return top * top  # read MN, write MN


# Kernels


@triton.jit
def _squared_relu_flat(y_ptr, x_ptr, SIZE, BLOCK: tl.constexpr):
    """BLOCK neighbouring elements."""
    # int64: an index may be larger than 2**31.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = at < SIZE
    x = tl.load(x_ptr + at, mask=inside, other=0.0)  # read MN
    x = x.to(tl.float32) if x.dtype != tl.float64 else x  # bfloat16 products are wrong in Triton's interpreter
    # The plain maximum of NaN and 0 is 0 here, and NaN in torch.
    top = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptr + at, top * top, mask=inside)  # write MN


# Launch config


def _squared_relu_config(size: int, dtype: torch.dtype, capability: tuple[int, int] | None) -> dict[str, int]:
    """The constants of a launch; `capability` is None in the interpreter, whose cost is the number of programs."""
    block = 65536 if capability is None else 16384 // dtype.itemsize  # 16 KiB a program keep enough loads in flight
    return {"BLOCK": min(block, triton.next_power_of_2(size)), "num_warps": 4}


# Launchers


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Squared ReLU of every element, in one pass.

    Parameters
    ----------
    x : torch.Tensor
        float16, bfloat16, float32 or float64, of any shape.

    Returns
    -------
    torch.Tensor
        Of the shape and dtype of `x`, contiguous.

    Raises
    ------
    TypeError
        If `x` is not a dense tensor, or has another dtype.
    ValueError
        If `x` is a view that negates, or on the CPU and Triton compiles.
    """
    return _squared_relu(x)


def _check(x: Any) -> tuple[torch.Tensor]:
    shapes("squared_relu", x=(x, ""))
    return (x,)


def _output(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _squared_relu_into(y: torch.Tensor, x: torch.Tensor) -> None:
    if not x.is_contiguous():
        x = apply(torch.Tensor.contiguous, x)
    capability, _ = gpu(x.device)  # and the number of multiprocessors
    config = _squared_relu_config(x.numel(), x.dtype, capability)
    launch(_squared_relu_flat, (triton.cdiv(x.numel(), config["BLOCK"]),), y, x, x.numel(), **config)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx, dy: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return 2 * x.clamp(min=0) * dy


_squared_relu = Operator(
    "squared_relu",
    "(Tensor x) -> Tensor",
    check=_check,
    outputs=_output,
    into=_squared_relu_into,
    gradient=(_gradient, _keep),
)
