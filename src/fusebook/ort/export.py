"""From a model to nodes of the domain ``fusebook``: exported from torch, or found in a graph and replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusebook.extras import extra
from fusebook.ort.custom import CustomOp
from fusebook.ort.graph import _NAMES
from fusebook.ort.nodes import NODES

__all__ = ["fuse", "translations"]


def _onnxscript() -> Any:
    with extra("ort"):
        import onnxscript
    return onnxscript


def _symbol(onnxscript: Any, op: CustomOp) -> Any:
    """An operator as onnxscript calls it: with a schema, which it learns what the arguments are from."""
    from onnx.defs import OpSchema

    def formal(names: Mapping[str, torch.dtype | str]) -> list[Any]:
        return [OpSchema.FormalParameter(n, k if isinstance(k, str) else _NAMES[k]) for n, k in names.items()]

    schema = OpSchema(
        op.name,
        op.domain,
        1,
        inputs=formal(op.inputs),
        outputs=formal(op.outputs),
        type_constraints=[(name, [_NAMES[k] for k in of], "") for name, of in op.types.items()],
        attributes=[
            OpSchema.Attribute(name, OpSchema.AttrType.INT if isinstance(value, int) else OpSchema.AttrType.STRING, "")
            for name, value in op.attributes.items()
        ],
    )
    return onnxscript.values.Op(onnxscript.values.Opset(op.domain, 1), op.name, schema)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What Fusebook's torch operators become in ONNX.

    For ``custom_translation_table`` of ``torch.onnx.export(..., dynamo=True)``.

    Raises
    ------
    ModuleNotFoundError
        Where onnxscript is not installed.

    Examples
    --------
    >>> torch.onnx.export(module, (x,), dynamo=True, custom_translation_table=translations())  # doctest: +SKIP
    """
    onnxscript = _onnxscript()
    standard = onnxscript.opset18
    softmax_node, scatter_node, masked_node = (_symbol(onnxscript, op) for op in NODES)

    def softmax(x, dim: int):  # type: ignore[no-untyped-def]
        return softmax_node(x, axis=dim)

    def scatter_nd(shape, indices, updates, masked: int | None = None, strategy: str = ""):  # type: ignore[no-untyped-def]
        if isinstance(shape, (list, tuple)):  # sizes, some of them known only when the graph runs
            sizes = [
                standard.Constant(value_ints=[s]) if isinstance(s, int) else standard.Reshape(s, one(standard))
                for s in shape
            ]
            shape = standard.Concat(*sizes, axis=0)
        if masked is None:
            return scatter_node(shape, indices, updates, reduction="add")
        return masked_node(shape, indices, updates, reduction="add", maskedValue=masked)

    def one(op: Any) -> Any:
        return op.Constant(value_ints=[1])

    return {torch.ops.fusebook.softmax.default: softmax, torch.ops.fusebook.scatter_nd.default: scatter_nd}


def _number(value: Any) -> Any:
    """The one number that a value is known to be, else None; what a caller of the graph may replace is not known."""
    tensor = value.const_value if value is not None and not value.is_graph_input() else None
    numbers = _numbers(tensor) if tensor is not None and math.prod(tensor.shape) == 1 else None
    return None if numbers is None else numbers.reshape(()).item()


def _numbers(tensor: Any) -> Any:
    """The numbers of a constant, else None.

    Those in another file are not read: it is named by whoever wrote the model, and may be any.
    """
    import onnx_ir

    if isinstance(tensor, onnx_ir.ExternalTensor):
        return None
    try:
        return tensor.numpy()
    except Exception:  # whatever is raised for fewer bytes than numbers, or for a dtype that is none
        return None


def _is_zero(attribute: Any) -> bool:
    """Whether ConstantOfShape makes zeros that our nodes can add to: those of float32, unless it is told otherwise."""
    if attribute is None:
        return True
    try:
        made = attribute.as_tensor()
    except Exception:  # it is something else, or of a dtype that is none
        return False
    floating = made.dtype.name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")
    numbers = _numbers(made) if floating else None
    return numbers is not None and not numbers.any()


def fuse(model: Any) -> Any:
    """Replace chains of standard operators by Fusebook's.

    ``ScatterND(ConstantOfShape(shape), indices, Where(Equal(indices, masked), 0, updates), reduction="add")`` becomes
    MaskedScatterNDOfShape; without Equal and Where it becomes ScatterNDOfShape. A model is data: nothing in it is run,
    and no other file that it names is read.

    Parameters
    ----------
    model : onnx.ModelProto or onnx_ir.Model
        It stays as it is.

    Returns
    -------
    onnx.ModelProto or onnx_ir.Model
        A model of the kind that was given. A chain that means something else (other constants, those that a caller may
        replace or that are in another file, integers, indices of several components under a mask, updates that Where
        broadcasts, zeros that another node reads), or of which that is not known, stays as it is. Sizes are known to be
        equal where they are the same number or have the same name.

    Raises
    ------
    ModuleNotFoundError
        Where onnxscript is not installed.
    TypeError
        For what is no model.
    """
    _onnxscript()
    import onnx
    import onnx_ir
    from onnxscript.rewriter import pattern, rewrite

    if not isinstance(model, (onnx.ModelProto, onnx_ir.Model)):
        raise TypeError(
            f"fuse: expected an onnx.ModelProto or onnx_ir.Model, got {type(model).__name__}; load it first"
        )

    def masked(op, shape, indices, masked, nothing, updates):  # type: ignore[no-untyped-def]
        zeros = op.ConstantOfShape(shape, _allow_other_attributes=True, _outputs=["zeros"])
        kept = op.Where(op.Equal(indices, masked), nothing, updates)
        return op.ScatterND(zeros, indices, kept, reduction="add")

    def masked_fits(_, shape, indices, masked, nothing, updates, zeros):  # type: ignore[no-untyped-def]
        whole = _number(masked)
        # A mask of several components, or of updates that Where broadcasts, means something else than a node's.
        known = indices.shape is not None and updates.shape is not None
        rows = [getattr(size, "value", size) for size in list(indices.shape)[:-1]] if known else [None]
        alike = None not in rows and rows == [getattr(size, "value", size) for size in list(updates.shape)[:-1]]
        one = alike and list(indices.shape)[-1:] == [1]
        made = zeros.producer().attributes.get("value")
        return one and isinstance(whole, int) and _number(nothing) == 0 and _is_zero(made)

    def masked_fused(op, shape, indices, masked, nothing, updates, zeros):  # type: ignore[no-untyped-def]
        return op.MaskedScatterNDOfShape(
            shape, indices, updates, reduction="add", maskedValue=_number(masked), _domain="fusebook", _version=1
        )

    def plain(op, shape, indices, updates):  # type: ignore[no-untyped-def]
        zeros = op.ConstantOfShape(shape, _allow_other_attributes=True, _outputs=["zeros"])
        return op.ScatterND(zeros, indices, updates, reduction="add")

    def plain_fits(_, shape, indices, updates, zeros):  # type: ignore[no-untyped-def]
        return _is_zero(zeros.producer().attributes.get("value"))

    def plain_fused(op, shape, indices, updates, zeros):  # type: ignore[no-untyped-def]
        return op.ScatterNDOfShape(shape, indices, updates, reduction="add", _domain="fusebook", _version=1)

    rules = pattern.RewriteRuleSet(
        [
            pattern.RewriteRule(masked, masked_fused, masked_fits, name="MaskedScatterNDOfShape"),
            pattern.RewriteRule(plain, plain_fused, plain_fits, name="ScatterNDOfShape"),
        ],
        commute=True,
    )
    # What is no ModelProto would be rewritten where it is.
    return rewrite(model.clone() if isinstance(model, onnx_ir.Model) else model, pattern_rewrite_rules=rules)
