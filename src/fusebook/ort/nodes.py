"""The launchers as in-process operators of ONNX Runtime, which write into ONNX Runtime's outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusebook.kernels._call import FLOATING, OPERATORS
from fusebook.kernels.losses import cross_entropy
from fusebook.kernels.quantized import _matmul
from fusebook.kernels.scatter import _scatter
from fusebook.kernels.softmax import _softmax
from fusebook.ort.custom import custom_op

__all__ = ["LOSSES", "MASKED_SCATTER_ND", "NODES", "NORMS", "QUANTIZED_MATMUL", "SCATTER_ND", "SOFTMAX"]

_norm = OPERATORS["norm"]
_add_norm = OPERATORS["add_norm"]


def softmax_into(x: Tensor, out: Tensor, *, axis: int = -1) -> None:
    """`fusebook.softmax` along `axis` into memory that is given, of the shape and dtype of `x`."""
    _softmax.write(out, x, axis)


def _of_shape(shape: Tensor, indices: Tensor, updates: Tensor, out: Tensor, *, reduction: str) -> None:
    # Out of range is left out, not refused: to look for it would wait for the GPU.
    _scatter.write(out, "ScatterNDOfShape", out.shape, indices, updates, None, reduction, False, None)


def _masked(shape: Tensor, indices: Tensor, updates: Tensor, out: Tensor, *, reduction: str, maskedValue: int) -> None:
    _scatter.write(out, "MaskedScatterNDOfShape", out.shape, indices, updates, maskedValue, reduction, False, None)


def _last(axis: int, x: Tensor) -> None:
    if axis not in (-1, x.dim() - 1):
        raise ValueError(f"norms: expected the last axis of x of shape {tuple(x.shape)}, got {axis}; transpose x")


def _rms(x: Tensor, scale: Tensor, out: Tensor, *, axis: int, epsilon: float) -> None:
    _last(axis, x)
    _norm.write(out, x, scale, None, False, epsilon)


def _layer(x: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, *, axis: int, epsilon: float) -> None:
    _last(axis, x)
    _norm.write(out, x, scale, bias, True, epsilon)


def _skip(x: Tensor, skip: Tensor, gamma: Tensor, out: tuple[Tensor, Tensor], *, epsilon: float) -> None:
    _add_norm.write(tuple(out), x, skip, gamma, None, False, epsilon)


def _loss(scores: Tensor, labels: Tensor, weights: Tensor | None, *, reduction: str, ignore_index: int) -> Tensor:
    # ONNX has the classes on the second axis. Labels are not looked at: that would wait for the GPU.
    options: Any = {"reduction": reduction, "ignore_index": ignore_index, "check": False}
    return cross_entropy(scores.movedim(1, -1), labels, weights, **options).to(scores.dtype)


def _quantized(
    x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, out: Tensor, *,
    N: int, K: int, bits: int, group: int,
) -> None:  # fmt: skip
    _matmul.write(out, x, [words, scales] + ([] if zeros is None else [zeros]), [], bias, N, K, bits, group)


def _rows_of_products(x: Tensor, *_: Any, N: int, **__: Any) -> tuple[int, ...]:
    return (*x.shape[:-1], N)


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

#: ``QuantizedMatMul(x, words, scales, zeros, bias, N, K, bits, group) -> y``, of a `fusebook.PackedWeight`. `zeros` and
#: `bias` may be left out.
QUANTIZED_MATMUL = custom_op(
    "QuantizedMatMul", _quantized,
    {"x": "T", "words": torch.int32, "scales": "T", "zeros": torch.int8, "bias": "T"}, {"y": "T"},
    _rows_of_products,
    types={"T": (torch.float16, torch.bfloat16)}, attributes={"N": int, "K": int, "bits": int, "group": int},
    optional=("zeros", "bias"),
)  # fmt: skip

NODES = (SOFTMAX, SCATTER_ND, MASKED_SCATTER_ND, QUANTIZED_MATMUL)

_NORMED: dict[str, Any] = {"shape": "x", "types": {"T": FLOATING, "V": FLOATING}}
#: ``RMSNormalization(x, scale, axis=-1, epsilon=1e-5) -> y``, ``LayerNormalization(x, scale, bias, ...) -> y`` and
#: ``SkipSimplifiedLayerNormalization(x, skip, gamma, epsilon=1e-5) -> y, sum``, in process only.
NORMS = (
    custom_op(
        "RMSNormalization", _rms, {"x": "T", "scale": "V"}, {"y": "T"},
        attributes={"axis": -1, "epsilon": 1e-5}, **_NORMED,
    ),
    custom_op(
        "LayerNormalization", _layer, {"x": "T", "scale": "V", "bias": "V"}, {"y": "T"},
        attributes={"axis": -1, "epsilon": 1e-5}, optional=("bias",), **_NORMED,
    ),
    custom_op(
        "SkipSimplifiedLayerNormalization", _skip, {"x": "T", "skip": "T", "gamma": "V"}, {"y": "T", "sum": "T"},
        attributes={"epsilon": 1e-5}, **_NORMED,
    ),
)  # fmt: skip

#: ``SoftmaxCrossEntropyLoss(scores, labels, weights, ignore_index=-100, reduction="mean") -> loss``, in process only,
#: and without its optional output.
LOSSES = (
    custom_op(
        "SoftmaxCrossEntropyLoss", _loss, {"scores": "T", "labels": "I", "weights": "T"}, {"loss": "T"},
        types={"T": FLOATING, "I": (torch.int64, torch.int32)},
        attributes={"reduction": "mean", "ignore_index": -100}, optional=("weights",),
    ),
)  # fmt: skip
