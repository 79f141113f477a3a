"""The library's launchers as operators of ONNX Runtime, in process: they write where ONNX Runtime tells them to."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor

from fusebook.kernels import scatter_nd as _scatter
from fusebook.kernels import softmax as _softmax
from fusebook.kernels._operator import FLOATING, gpu, launching
from fusebook.ort.custom import custom_op

__all__ = ["MASKED_SCATTER_ND", "NODES", "SCATTER_ND", "SOFTMAX"]


def _where(out: Tensor) -> Any:
    """Where kernels are launched: ONNX Runtime has made the device of its tensors the current one."""
    return _HERE if out.is_cuda else launching(out)


_HERE = contextlib.nullcontext()


def softmax_into(x: Tensor, out: Tensor, *, axis: int = -1) -> None:
    """`fusebook.softmax` into memory that is given.

    Parameters
    ----------
    x : torch.Tensor
    out : torch.Tensor
        Contiguous, of the shape and dtype of `x`.
    axis : int, default -1
    """
    dim = _softmax._checked("Softmax", x, axis)
    if x.numel() == 0:
        return
    x, plan, align, (inner, n, *strides) = _softmax._prepared("Softmax", out, x, dim, tensors=1)
    constants = {"ALIGN": align, **plan.constants, "num_warps": plan.warps}
    grid = (plan.programs,)
    with _where(out):
        if plan.kernel == "rows":
            _softmax._softmax_rows[grid](out, x, inner, n, *strides, **constants)
        elif plan.kernel == "pairs":
            _softmax._softmax_pairs[grid](out, x, n, strides[1], strides[4], **constants)
        elif plan.kernel == "twice":
            _softmax._softmax_online[grid](out, x, inner, n, *strides, **constants)
        else:
            parts = x.numel() // x.shape[dim], plan.constants["PARTS"]
            tops, totals = x.new_empty((2, *parts), dtype=_softmax._sums(x.dtype)).unbind()
            _softmax._softmax_parts[grid](tops, totals, x, inner, n, plan.span, *strides[3:], **constants)
            constants.pop("GROUP")
            _softmax._softmax_parts_divided[grid](out, tops, totals, x, inner, n, plan.span, *strides, **constants)


def scatter_into(indices: Tensor, updates: Tensor, out: Tensor, masked: int | None = None) -> None:
    """`fusebook.scatter_nd_of_shape` without its check of the indices, into memory that is given.

    Parameters
    ----------
    indices, updates : torch.Tensor
        Contiguous, of shapes that match `out`.
    out : torch.Tensor
        Contiguous; what it holds does not matter.
    masked : int, optional
        An update whose index has this component counts for nothing.
    """
    if out.numel() == 0:
        return
    shape, dtype, device = tuple(out.shape), out.dtype, out.device
    indices, sizes = _scatter._folded(shape, indices)
    R, D, n = sizes
    if n == 0:
        out.zero_()
        return
    updates = updates.reshape(n, D)
    plan = _scatter._plan(sizes, dtype, gpu(device)[0], strategy=None, deterministic=False)
    whole = torch.int32 if max(R, n) < 2**31 - 1 else torch.int64

    def empty(*size: int, dtype: torch.dtype = whole) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    with _where(out):
        if indices.shape[1] != 1 or plan.find == "sort":
            indices, masked = _scatter._keyed(shape, indices, masked, whole), -1
        if plan.strategy == "atomic":
            wide = _scatter._sums(dtype)
            sums = out if wide == dtype else torch.empty(shape, dtype=wide, device=device)
            _scatter._launch_atomic(out, sums, indices, updates, sizes, masked, plan)
            return
        if plan.find == "scan":
            _scatter._launch_scan(out, indices, updates, sizes, masked, plan)
            return
        pieces = 2 * (n // plan.chunk + 1)
        parts = empty(pieces, D, dtype=_scatter._sums(dtype))
        spans, (keys, order) = empty(2, R + 1), empty(2, n).unbind()
        if plan.find == "count":
            counters = empty(pieces * triton.cdiv(D, plan.block), dtype=torch.int32)
            _scatter._launch_segments(
                out, indices, updates, parts, counters, order, keys, spans, sizes, masked, plan
            )  # fmt: skip
            return
        _scatter._launch_lists(order, keys, spans, empty(n), indices, R, n, masked)
        _scatter._launch_owner(out, updates, parts, order, keys, spans, sizes, plan)


def _scatter_node(
    name: str, shape: Tensor, indices: Tensor, updates: Tensor, out: Tensor, masked: int | None, reduction: str
) -> None:  # fmt: skip
    key = name, out.shape, indices.shape, updates.shape, updates.dtype, indices.dtype, updates.device, masked, reduction
    at = out.data_ptr() | indices.data_ptr() | updates.data_ptr()
    if at % 16 == 0 and (ready := _ready.get(key)) is not None:
        launch, numbers = ready
        launch(out, indices, updates, *numbers)
        return
    if key not in _seen:
        _scatter._checked(name, tuple(out.shape), indices, updates, reduction, None)
        if len(_seen) > 4096:
            _seen.clear()
            _ready.clear()
        _seen.add(key)
    if (scan := _scanned(indices, updates, out, masked)) is None:
        scatter_into(indices, updates, out, masked)
    elif out.is_cuda and at % 16 == 0:
        _ready[key] = scan


#: What has been found valid: a node mostly sees the same shapes again, and to look at them takes as long as a launch.
_seen: set[Any] = set()
#: Of those with few updates, on a GPU: the compiled kernel with its grid, and what follows the tensors. Triton finds
#: out at every call for what a kernel must be compiled; the key and the addresses say that it is what it was.
_ready: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def _scanned(indices: Tensor, updates: Tensor, out: Tensor, masked: int | None) -> tuple[Any, tuple[Any, ...]] | None:
    """Launch a scatter of few updates to few rows as one kernel, and return how to launch it again.

    A callback is the host's time first of all, and one launch is the least of it.
    """
    if out.numel() == 0 or indices.shape[-1] != 1 or indices.numel() == 0:
        return None
    sizes = R, D, n = out.shape[0], out.numel() // out.shape[0], indices.numel()
    plan = _scatter._plan(sizes, out.dtype, gpu(out.device)[0], strategy="owner", deterministic=False)
    if plan.find != "scan":
        return None
    stride, align = _scatter._steps(updates.reshape(n, D), D)
    constants = {"MASKED": masked is not None, "ALIGN": align, "N": max(plan.together, triton.next_power_of_2(n))}
    constants |= {"BLOCK": plan.block, "GROUPS": plan.together}
    grid = (R * triton.cdiv(D, plan.block), 1, 1)
    numbers = R, D // align, n, stride // align, masked or 0
    kernel = _scatter._scatter_nd_scan
    with _where(out):
        compiled = kernel[grid](out, indices, updates, *numbers, **constants, num_warps=plan.warps)
    return compiled and compiled[grid], (*numbers, *(constants[name] for name in kernel.arg_names if name in constants))


def _of_shape(shape: Tensor, indices: Tensor, updates: Tensor, out: Tensor, *, reduction: str) -> None:
    _scatter_node("ScatterNDOfShape", shape, indices, updates, out, None, reduction)


def _masked(shape: Tensor, indices: Tensor, updates: Tensor, out: Tensor, *, reduction: str, maskedValue: int) -> None:
    _scatter_node("MaskedScatterNDOfShape", shape, indices, updates, out, maskedValue, reduction)


_SCATTERED: dict[str, Any] = {
    "inputs": {"shape": torch.int64, "indices": "I", "updates": "T"},
    "outputs": {"y": "T"},
    "shape": "shape",
    "types": {"T": FLOATING, "I": (torch.int64, torch.int32)},
    "host": ("shape",),
}

#: ``Softmax(x, axis=-1) -> y``.
SOFTMAX = custom_op(
    "Softmax", softmax_into, {"x": "T"}, {"y": "T"}, "x", types={"T": FLOATING}, attributes={"axis": -1}
)  # fmt: skip
#: ``ScatterNDOfShape(shape, indices, updates, reduction="add") -> y``.
SCATTER_ND = custom_op("ScatterNDOfShape", _of_shape, attributes={"reduction": "add"}, **_SCATTERED)
#: ``MaskedScatterNDOfShape(shape, indices, updates, reduction="add", maskedValue=-1) -> y``.
MASKED_SCATTER_ND = custom_op(
    "MaskedScatterNDOfShape", _masked, attributes={"reduction": "add", "maskedValue": -1}, **_SCATTERED
)  # fmt: skip

NODES = (SOFTMAX, SCATTER_ND, MASKED_SCATTER_ND)
