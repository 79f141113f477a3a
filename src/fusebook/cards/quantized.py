"""Matmuls with weights of four and eight bits: what they mean, what they must cost, and who else computes them."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import ORT, onnx_run
from fusebook.kernels.quantized import PackedWeight, quantized_matmul
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["GROUP", "PAGE", "QUANTIZED_MATMUL"]

#: The page that explains them.
PAGE = 203

#: Columns of a weight that share a scale.
GROUP = 128
_BITS = {"int4": 4, "int8": 8}


def _make(rng: torch.Generator, dtype: torch.dtype, *, M: int, K: int, N: int, weights: str) -> tuple[Any, ...]:
    """Rows, codes ``[N, K]``, a scale for each 128 columns, and the bits of a code."""
    bits = _BITS[weights]
    codes = torch.randint(2**bits, (N, K), dtype=torch.uint8, generator=rng, device=rng.device)
    scales = torch.rand((N, -(-K // GROUP)), generator=rng, device=rng.device) + 0.5
    # Small, so that rows of x that are far from zero stay within float16; a power of two changes no digit.
    return rough(rng, (M, K), dtype), codes, (scales / 2 ** (bits + 3)).to(dtype), bits


def quantized_matmul_eager(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """``x @ weight.T`` with the values of the codes: ``(code - 2**(bits - 1)) * scale``."""
    return x @ _values(codes, scales, bits).T


def _values(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    wide = scales.repeat_interleave(GROUP, 1)[:, : codes.shape[1]]
    return (codes.to(scales.dtype) - 2 ** (bits - 1)) * wide


def _cost(itemsize: int, *, M: int, K: int, N: int, weights: str) -> Cost:
    weight = -(-N * K * _BITS[weights] // 8) + N * -(-K // GROUP) * itemsize
    return Cost(read=weight + M * K * itemsize, write=M * N * itemsize, flop=2 * M * K * N)


def _cost_eager(itemsize: int, *, M: int, K: int, N: int, weights: str) -> Cost:
    # Codes of a byte become elements, then differences, and scales are repeated; values are multiplied at the end.
    scales = N * -(-K // GROUP)
    read = N * K + (4 * N * K + scales + M * K) * itemsize
    return Cost(read=read, write=(4 * N * K + M * N) * itemsize, flop=2 * M * K * N)


def _cost_dense(itemsize: int, *, M: int, K: int, N: int, weights: str) -> Cost:
    return Cost(read=(N * K + M * K) * itemsize, write=M * N * itemsize, flop=2 * M * K * N)


def _dense(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    return x, _values(codes, scales, bits)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


def _packed(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, PackedWeight]:
    if scales.dtype == torch.float64:  # which the matmul refuses
        scales = scales.float()
    return x, PackedWeight.from_codes(codes, scales, bits=bits, group=GROUP)


def _for_tinygemm(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> tuple[Any, ...]:
    if x.dtype != torch.bfloat16 or bits != 4:
        raise NotImplementedError(f"torch's kernel takes bfloat16 and four bits, got {str(x.dtype)[6:]} and {bits}")
    if codes.shape[1] % GROUP or codes.shape[0] % 8 or 0 in (*x.shape, *codes.shape):
        raise NotImplementedError("torch's kernel takes columns in whole groups, rows in eights, and nothing empty")
    two = codes[:, ::2] << 4 | codes[:, 1::2]
    pairs = torch.stack([scales.T, torch.zeros_like(scales.T)], -1).contiguous()
    return x.contiguous(), torch.ops.aten._convert_weight_to_int4pack(two, 8), GROUP, pairs


def _tinygemm(x: Tensor, words: Tensor, group: int, pairs: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten._weight_int4pack_mm(x, words, group, pairs)
    return found


@functools.cache
def _graph(dtype: torch.dtype, bits: int, K: int, N: int, device: torch.device) -> Any:
    """ONNX Runtime's operator, with the weight as an input, so that a session serves any values of it."""
    from onnx import TensorProto, helper

    from fusebook.ort import Graph

    kind = {torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}[dtype]
    sizes: dict[str, Any] = {"K": K, "N": N, "bits": bits, "block_size": GROUP}
    node = helper.make_node("MatMulNBits", ["x", "codes", "scales"], ["y"], domain="com.microsoft", **sizes)
    groups = -(-K // GROUP)
    inputs = [
        helper.make_tensor_value_info("x", kind, [None, K]),
        helper.make_tensor_value_info("codes", TensorProto.UINT8, [N, groups, GROUP * bits // 8]),
        helper.make_tensor_value_info("scales", kind, [N, groups]),
    ]
    graph = helper.make_graph([node], "nbits", inputs, [helper.make_tensor_value_info("y", kind, [None, N])])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, ir_version=10, opset_imports=opsets)
    try:
        return Graph(model, device=device)
    except Exception as error:  # ONNX Runtime has its own classes
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        raise NotImplementedError(f"ONNX Runtime has no such kernel: {error}") from error


def _onnx(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> tuple[Any]:
    if 0 in (*x.shape, *codes.shape):
        raise NotImplementedError("ONNX Runtime's operator takes nothing empty")
    N, K = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -K % GROUP), value=2 ** (bits - 1))
    blob = padded if bits == 8 else padded[:, ::2] | padded[:, 1::2] << 4
    inputs = {"x": x.contiguous(), "codes": blob.view(N, scales.shape[1], -1), "scales": scales.contiguous()}
    graph = _graph(x.dtype, bits, K, N, x.device)
    return (graph.bind(inputs, {"y": x.new_empty(x.shape[0], N)}),)


def _sizes(*rows: int, of: tuple[tuple[int, int], ...], weights: str = "int4") -> tuple[dict[str, int | str], ...]:
    return tuple({"M": M, "K": K, "N": N, "weights": weights} for K, N in of for M in rows)


#: Columns and rows of weights, from 8.7 to 450 MB in four bits. Those of feed-forward layers of Llama 3 8B to 405B.
_WEIGHTS = ((4096, 4096), (8192, 8192), (28672, 8192), (8192, 28672), (53248, 16384))


def _draw(rng: random.Random) -> Dims:
    """The layers of models and others, with as many tokens as a server decodes at once: from 1 to 64."""
    dtype = _draws.dtype(rng, (torch.float16, torch.bfloat16))
    K, N = _draws.layer(rng, dtype)
    M = _draws.log_uniform(rng, 1, 64)
    weights = rng.choice(["int4", "int4", "int4", "int8"])
    return {"M": M, "K": K, "N": N, "weights": weights, "dtype": dtype, "layout": _draws.layout(rng, _draws.ROWS)}


QUANTIZED_MATMUL = Op(
    name="quantized_matmul",
    reference=quantized_matmul_eager,
    make=_make,
    cost=_cost,
    variants={
        "eager": Variant(quantized_matmul_eager, cost=_cost_eager, needs=()),
        "torch in 16 bits": Variant(_linear, cost=_cost_dense, needs=(), prepare=_dense),
        "tinygemm": Variant(_tinygemm, prepare=_for_tinygemm),
        "fusebook": Variant(quantized_matmul, needs=(), prepare=_packed),
        "ONNX Runtime": Variant(onnx_run, needs=ORT, prepare=_onnx),
    },
    configs={
        "one": _sizes(1, of=_WEIGHTS),
        "decode": _sizes(1, 4, 8, 16, of=_WEIGHTS),
        "int8": _sizes(1, of=_WEIGHTS, weights="int8"),
        # Up to rows of a prompt, where a matmul of the tensor cores is faster.
        "rows": _sizes(1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, of=((8192, 8192),)),
    },
    draw=_draw,
    # One of everything; a last group that is not full; two tiles of x; odd columns; rows that cuBLAS multiplies; no
    # rows; nothing to add.
    edges=(
        {"M": 1, "K": 1, "N": 1, "weights": "int4"},
        {"M": 3, "K": 300, "N": 33, "weights": "int4"},
        {"M": 9, "K": 256, "N": 16, "weights": "int8"},
        {"M": 17, "K": 129, "N": 8, "weights": "int4"},
        {"M": 97, "K": 40, "N": 20, "weights": "int4"},
        {"M": 0, "K": 8, "N": 4, "weights": "int8"},
        {"M": 2, "K": 0, "N": 4, "weights": "int4"},
    ),
    rows=(0,),
    dtypes=(torch.float16, torch.bfloat16),
)
