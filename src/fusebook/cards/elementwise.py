"""Expressions of neighbouring elements: what they mean, what they must cost, and who else computes them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import card, matrices, onnx_session
from fusebook.kernels import elementwise as ours
from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = [
    "ADD_ADD_MULTIPLY", "ADD_SUB", "DOUBLE", "EXP", "MULTIPLY", "MULTIPLY_ADD", "PAGE", "SILU", "SILU_MUL",
    "cuda_source",
]  # fmt: skip

#: The page that tells of them.
PAGE = 101


def _twice(x: Tensor) -> Tensor:
    return x + x


def _operand(rng: torch.Generator, dtype: torch.dtype, M: int, N: int, how: str) -> Tensor:
    """A matrix, one that lies across, a row or a column."""
    if how == "transposed":
        return rough(rng, (N, M), dtype).mT
    return rough(rng, {"matrix": (M, N), "row": (1, N), "column": (M, 1)}[how], dtype)


def _make(
    rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int, y: str = "", others: int = 0
) -> tuple[Tensor, ...]:
    """A matrix, and so many other operands of the shape that `y` names."""
    return rough(rng, (M, N), dtype), *(_operand(rng, dtype, M, N, y) for _ in range(others))


def _make_exponents(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int) -> tuple[Tensor, ...]:
    # A 16th, so that float16 holds the results.
    return (rough(rng, (M, N), dtype) / 16,)


def _moving(read: int, write: int, flop: int, others: int = 0) -> Callable[..., Cost]:
    """So many matrices read and written; `others` operands beside them are of the shape that ``y`` names."""

    def cost(itemsize: int, *, M: int, N: int, y: str = "matrix") -> Cost:
        least = {"row": N, "column": M}.get(y, M * N)
        return Cost((read * M * N + others * least) * itemsize, write * M * N * itemsize, flop * M * N)

    return cost


#: The bodies of CUDA C kernels that say the same, for element i of n.
_CUDA_BODIES = {
    "multiply": "out[i] = x[i] * y[i];",
    "double": "out[i] = 2 * x[i];",
    "add_sub": "out[i] = x[i] + y[i]; also[i] = x[i] - y[i];",
    "multiply_add": "out[i] = x[i] * y[i] + z[i];",
    "exp": "out[i] = expf(x[i]);",
}


def cuda_source(name: str) -> str:
    """The expression in CUDA C, for float32: a thread for each element.

    Parameters
    ----------
    name : str
        ``multiply``, ``double``, ``add_sub``, ``multiply_add`` or ``exp``.
    """
    body = _CUDA_BODIES[name]
    outs = [p for p in ("out", "also") if f"{p}[" in body]
    ins = [p for p in ("x", "y", "z") if f"{p}[i]" in body]
    pointers = ", ".join([f"float* {p}" for p in outs] + [f"const float* {p}" for p in ins])
    statements = body.replace("; ", ";\n        ")
    return f"""\
extern "C" __global__
void {name}_kernel({pointers}, long long n)
{{
    long long i = (long long) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {{
        {statements}
    }}
}}
"""


@functools.cache
def _cuda_kernel(name: str, options: tuple[str, ...] = ()) -> Any:
    import cupy

    return cupy.RawKernel(cuda_source(name), f"{name}_kernel", options=options)


def _cuda_c(name: str, results: int = 1, options: tuple[str, ...] = ()) -> Variant:
    """CUDA C by way of CuPy, on torch's memory and torch's stream."""

    def run(*operands: Tensor) -> Any:
        import cupy
        import numpy as np

        x = operands[0]
        if x.dtype != torch.float32:
            raise NotImplementedError(f"written for float32, got {x.dtype}")
        if any(t.shape != x.shape or not t.is_contiguous() for t in operands):
            raise NotImplementedError("written for contiguous operands of one shape")
        outs = [torch.empty_like(x) for _ in range(results)]
        n = x.numel()
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            arguments = [np.uint64(t.data_ptr()) for t in (*outs, *operands)]
            _cuda_kernel(name, options)((triton.cdiv(n, 512),), (512,), (*arguments, np.int64(n)))
        return outs[0] if results == 1 else tuple(outs)

    return Variant(run, needs=("cuda", "cupy"))


def _onnx_model(chain: Sequence[tuple[str, str, str]], operands: str, dtype: torch.dtype) -> Any:
    """A chain of operators; each names its kind, its operands and its result. The last one's is ``out``."""
    from onnx import TensorProto, helper

    kinds = {
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.bfloat16: TensorProto.BFLOAT16,
        torch.float64: TensorProto.DOUBLE,
    }
    kind = kinds[dtype]
    nodes = [helper.make_node(op, names.split(), [result]) for op, names, result in chain]
    inputs = [helper.make_tensor_value_info(name, kind, [f"{name}M", f"{name}N"]) for name in operands.split()]
    output = helper.make_tensor_value_info("out", kind, ["M", "N"])
    graph = helper.make_graph(nodes, "chain", inputs, [output])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


_CHAINS = {
    "multiply_add": ("x y z", (("Mul", "x y", "product"), ("Add", "product z", "out"))),
    "silu": ("x", (("Sigmoid", "x", "gate"), ("Mul", "x gate", "out"))),
    "silu_mul": ("x y", (("Sigmoid", "x", "gate"), ("Mul", "x gate", "silu"), ("Mul", "silu y", "out"))),
    "add_add_multiply": ("x y z w", (("Add", "x y", "two"), ("Add", "two z", "three"), ("Mul", "three w", "out"))),
}


def _onnx(name: str, cost: Any) -> Variant:
    def prepare(*operands: Tensor) -> tuple[Any]:
        names, chain = _CHAINS[name]
        shape = torch.broadcast_shapes(*(t.shape for t in operands))
        if 0 in shape:
            raise NotImplementedError(f"an output without elements has no memory to bind, got shape {tuple(shape)}")
        if not all(t.is_contiguous() for t in operands):
            raise NotImplementedError("memory is bound as it lies, so operands must be contiguous")
        graph = onnx_session(_onnx_model(chain, names, operands[0].dtype), operands[0].device)
        out = operands[0].new_empty(shape)
        return (graph.bind(dict(zip(names.split(), operands, strict=True)), {"out": out}),)

    return Variant(
        lambda bound: bound()["out"], cost=cost, needs=("cuda", "onnxruntime", "onnx"), prepare=prepare
    )  # fmt: skip


def _liger_silu_mul(x: Tensor, y: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    if x.shape != y.shape or not x.numel():
        raise NotImplementedError(f"Liger takes two tensors of one shape, got {list(x.shape)} and {list(y.shape)}")
    if x.dtype == torch.float64:
        raise NotImplementedError("Liger computes in float32, got float64")
    return LigerSiLUMulFunction.apply(x, y)


def _with(M: int, N: int, y: str = "matrix") -> dict[str, int | str]:
    return {"M": M, "N": N, "y": y}


# Small are those of the manuals of 2012: matrices of 20 x 10, and 480 x 480 = 10 * 30 * 768 numbers. Of the large ones,
# float32 moves 256 MiB at least, for which the roof is that of memory.
_SMALL = ((20, 10), (480, 480))
_LARGE = ((2048, 8192), (4096, 8192), (8192, 8192))
_ONE = {"small": matrices(*_SMALL), "large": matrices(*_LARGE)}
_SEVERAL: dict[str, list[dict[str, int | str]]] = {
    "small": [_with(*s) for s in _SMALL],
    "large": [_with(*s) for s in _LARGE],
    "shapes": [_with(8192, 8192, how) for how in ("row", "column", "transposed")],
}


def _drawing(tensors: int) -> Callable[[random.Random], Dims]:
    """Half of the time the other operands are of the matrix's shape; else a row, a column, or a transposed matrix."""

    def draw(rng: random.Random) -> Dims:
        dims = dict(_draws.matrices(tensors, *_WIDTHS)(rng))
        y = "matrix" if rng.randrange(2) == 0 else rng.choice(["row", "column", "transposed"])
        return {"M": dims["M"], "N": dims["N"], "y": y, "dtype": dims["dtype"], "layout": dims["layout"]}

    return draw


_WIDTHS = 1, 2**18, _draws.VOCABULARIES, _draws.HIDDEN


def _card(name: str, eager: Any, flop: int, *, operands: int = 1, results: int = 1, **more: Any) -> Op:
    """An expression of so many operands, with so many results and operations for each element."""
    others = operands - 1
    several: dict[str, Any] = {"configs": _SEVERAL, "edges": _SEVERAL_EDGES, "draw": _drawing(operands + results)}
    one: dict[str, Any] = {"configs": _ONE, "edges": _ONE_EDGES, "draw": _draws.matrices(2, *_WIDTHS)}
    fields = (several if others else one) | {"reference": eager, "rows": tuple(range(operands))}
    fields |= {"make": functools.partial(_make, others=others), "cost": _moving(1, results, flop, others=others)}
    return card(name, eager, getattr(ours, name), **fields | more)


# All have the same kernels: three of them are tried in every type, the others in two.
_TWO_TYPES = (torch.float32, torch.bfloat16)
_ONE_EDGES = matrices((3, 781), (0, 5))
_SEVERAL_EDGES = (_with(3, 781), _with(0, 5), _with(37, 50, "row"), _with(70, 45, "transposed"))
MULTIPLY = _card(
    "multiply",
    torch.mul,
    1,
    operands=2,
    compile=lambda x, y: x * y,
    others={"CUDA C": _cuda_c("multiply")},
    edges=(*_SEVERAL_EDGES, _with(1, 1), _with(37, 50, "column")),
)
DOUBLE = _card(
    "double",
    lambda x: 2 * x,
    1,
    reference=_twice,
    others={"CUDA C": _cuda_c("double")},
    edges=(*_ONE_EDGES, *matrices((1, 1))),
    dtypes=_TWO_TYPES,
)
ADD_SUB = _card(
    "add_sub",
    ours.add_sub_eager,
    2,
    operands=2,
    results=2,
    cost_eager=_moving(2, 2, 2, others=2),
    others={"CUDA C": _cuda_c("add_sub", results=2)},
    dtypes=_TWO_TYPES,
)
MULTIPLY_ADD = _card(
    "multiply_add",
    ours.multiply_add_eager,
    2,
    operands=3,
    cost_eager=_moving(2, 2, 2, others=2),
    torch=Variant(lambda x, y, z: torch.addcmul(z, x, y), needs=()),
    others={
        "ONNX Runtime": _onnx("multiply_add", _moving(2, 2, 2, others=2)),
        "CUDA C": _cuda_c("multiply_add"),
    },
    dtypes=_TWO_TYPES,
)
SILU = _card(
    "silu",
    ours.silu_eager,
    4,
    cost_eager=_moving(3, 2, 4),
    torch=Variant(torch.nn.functional.silu, needs=()),
    others={"ONNX Runtime": _onnx("silu", None)},
)
SILU_MUL = _card(
    "silu_mul",
    ours.silu_mul_eager,
    5,
    operands=2,
    cost_eager=_moving(4, 3, 5, others=1),
    torch=Variant(lambda x, y: torch.nn.functional.silu(x) * y, cost=_moving(2, 2, 5, others=1), needs=()),
    others={
        "ONNX Runtime": _onnx("silu_mul", None),
        "Liger": Variant(_liger_silu_mul, needs=("cuda", "liger_kernel")),
    },
)
ADD_ADD_MULTIPLY = _card(
    "add_add_multiply",
    ours.add_add_multiply_eager,
    3,
    operands=4,
    cost_eager=_moving(3, 3, 3, others=3),
    others={"ONNX Runtime": _onnx("add_add_multiply", _moving(3, 3, 3, others=3))},
    dtypes=_TWO_TYPES,
)
EXP = _card(
    "exp",
    torch.exp,
    1,
    compile=lambda x: x.exp(),
    others={
        "CUDA C": _cuda_c("exp"),
        "CUDA C, fast math": _cuda_c("exp", options=("--use_fast_math",)),
    },
    make=_make_exponents,
)
