"""Masked ScatterND as a graph of ONNX Runtime: three models that mean the same."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fusebook.cards.scatter import MASKED_SCATTER_ND
from fusebook.kernels.scatter import masked_scatter_nd_of_shape
from fusebook.measure.op import Cost, Op, Variant
from fusebook.ort import Bound, Graph
from fusebook.ort.aot import cached
from fusebook.ort.custom import _ELEMENTS
from fusebook.ort.nodes import NODES

__all__ = ["MODELS", "NODES_OF_ONNX_RUNTIME", "PAGE", "model"]

#: The page that tells of them.
PAGE = 501

#: From the standard chain to one node.
MODELS = ("ScatterND", "ScatterNDOfShape", "MaskedScatterNDOfShape")


@functools.cache
def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A graph that adds masked updates to zeros.

    Parameters
    ----------
    name : str
        One of `MODELS`, the node that adds; or ``"Identity"``, a graph that does nothing.
    dtype : torch.dtype
        Of the updates.

    Returns
    -------
    onnx.ModelProto
        Inputs ``shape``, ``indices [n, 1]`` and ``updates [n, D]``, output ``y``; of Identity, ``updates`` and ``y``.
    """
    from onnx import TensorProto, helper, numpy_helper

    kind = _ELEMENTS[dtype]
    zero = helper.make_tensor("zero", kind, [1], [0.0])
    mask = [
        helper.make_node("Equal", ["indices", "masked"], ["is_masked"]),
        helper.make_node("Where", ["is_masked", "nothing", "updates"], ["kept"]),
    ]
    ours: dict[str, Any] = {"domain": "fusebook", "reduction": "add"}
    chains = {
        "ScatterND": [
            helper.make_node("ConstantOfShape", ["shape"], ["zeros"], value=zero),
            *mask,
            helper.make_node("ScatterND", ["zeros", "indices", "kept"], ["y"], reduction="add"),
        ],
        "ScatterNDOfShape": [*mask, helper.make_node("ScatterNDOfShape", ["shape", "indices", "kept"], ["y"], **ours)],
        "MaskedScatterNDOfShape": [
            helper.make_node(
                "MaskedScatterNDOfShape", ["shape", "indices", "updates"], ["y"], maskedValue=-1, **ours
            )
        ],
        "Identity": [helper.make_node("Identity", ["updates"], ["y"])],
    }  # fmt: skip
    constants = [
        numpy_helper.from_array(torch.tensor([-1]).numpy(), "masked"),
        helper.make_tensor("nothing", kind, [1], [0.0]),
    ]
    taken = [
        helper.make_tensor_value_info("shape", TensorProto.INT64, ["axes"]),
        helper.make_tensor_value_info("indices", TensorProto.INT64, ["n", 1]),
        helper.make_tensor_value_info("updates", kind, ["n", "D"]),
    ]
    graph = helper.make_graph(
        chains[name],
        name,
        taken[2:] if name == "Identity" else taken,
        [helper.make_tensor_value_info("y", kind, ["R", "D"])],
        constants if len(chains[name]) > 1 else [],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("fusebook", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def _session(name: str, dtype: torch.dtype, device: torch.device, how: str) -> Graph:
    if how == "ahead of time":
        major, minor = torch.cuda.get_device_capability(device)
        library = cached((10 * major + minor,), (str(dtype).removeprefix("torch."),))
        return Graph(model(name, dtype), device=device, library=library)
    return Graph(model(name, dtype), device=device, ops=NODES if how == "callback" else ())


_kept_session = functools.cache(_session)  # to make one takes longer than all that is asked of it here


def _bound(graph: Graph, shape: tuple[int, ...], indices: Tensor, updates: Tensor) -> Bound:
    y = torch.empty(shape, dtype=updates.dtype, device=updates.device)
    return graph.bind({"shape": torch.tensor(shape), "indices": indices, "updates": updates}, {"y": y})


def _prepared(name: str, how: str) -> Any:
    def prepare(shape: tuple[int, int], indices: Tensor, updates: Tensor) -> tuple[Bound]:
        if updates.dtype == torch.bfloat16 and name != MODELS[2]:
            raise NotImplementedError("ONNX Runtime's own nodes of this graph do not take bfloat16")
        return (_bound(_kept_session(name, updates.dtype, updates.device, how), shape, indices, updates),)

    return prepare


def _run(bound: Bound) -> Tensor:
    return bound()["y"]


def _of_shape_cost(itemsize: int, *, R: int, D: int, n: int, law: str) -> Cost:
    # Masking in nodes of their own reads the updates and writes them; adding reads them again.
    return Cost(read=2 * n * D * itemsize + 16 * n, write=(R * D + n * D) * itemsize + n, flop=n * D)


def _in_torch(shape: tuple[int, int], indices: Tensor, updates: Tensor) -> Tensor:
    return masked_scatter_nd_of_shape(shape, indices, updates, check=False)


_NEEDS = ("cuda", "onnxruntime", "onnx")
_card = MASKED_SCATTER_ND

NODES_OF_ONNX_RUNTIME = Op(
    name="onnxruntime_nodes",
    reference=_card.reference,
    make=_card.make,
    cost=_card.cost,
    variants={
        "ScatterND": Variant(_run, _card.variants["eager"].cost, _NEEDS, _prepared("ScatterND", "")),
        "fusebook OfShape, callback": Variant(_run, _of_shape_cost, _NEEDS, _prepared(MODELS[1], "callback")),
        "fusebook OfShape, ahead of time": Variant(_run, _of_shape_cost, _NEEDS, _prepared(MODELS[1], "ahead of time")),
        "fusebook Masked, callback": Variant(_run, None, _NEEDS, _prepared(MODELS[2], "callback")),
        "fusebook Masked, ahead of time": Variant(_run, None, _NEEDS, _prepared(MODELS[2], "ahead of time")),
        "fusebook from torch": Variant(_in_torch),
    },
    configs=_card.configs,
    draw=_card.draw,
    edges=_card.edges,
)
