"""From a model to nodes of the domain ``fusebook``: exported from torch, or found in a graph and replaced."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusebook.extras import extra
from fusebook.kernels._call import INTERPRETED, OPERATORS, Operator
from fusebook.kernels.quantized import PackedWeight
from fusebook.ort.custom import CustomOp
from fusebook.ort.graph import _NAMES, _NUMBERS, understood
from fusebook.ort.nodes import NODES

__all__ = ["fuse", "translations"]

_DTYPES = {number: dtype for dtype, number in _NUMBERS.items()}


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

    For ``custom_translation_table`` of ``torch.onnx.export(..., dynamo=True)``. Each becomes

    - a node of `NODES`, for which `Graph` needs ``ops`` or ``library``: ``softmax``, ``scatter_nd_of_shape``,
      ``masked_scatter_nd_of_shape`` and ``embedding_backward``;
    - standard nodes, which any runtime has: ``rms_norm``, ``layer_norm``, ``add_rms_norm``, ``add_layer_norm`` (all of
      them without quantisation), ``cross_entropy`` and ``linear_cross_entropy`` (without label smoothing, z-loss and
      softcap), ``swiglu``, ``concat_gemm``, ``multiply``, ``double``, ``add_sub``, ``multiply_add``, ``silu``,
      ``silu_mul``, ``add_add_multiply`` and ``exp``.

    The export of any other of Fusebook's operators ends with a sentence that names it.
    ONNX Runtime computes float16 in float32 on the CPU, and leaves out casts between nodes. A value between two nodes
    that is beyond float16 is finite there, and infinite in PyTorch.
    Its Sigmoid is 0 there below -18 in float32 and below -37 in float64, so that ``silu`` and what contains it are 0.
    Before 1.32 it computes part of a norm of float64 in float32.

    By default, torch's exporter folds casts of fp16 and bf16 weights into copies with other names.
    ``ONNXProgram.apply_weights`` does not update these copies. Export with ``optimize=False`` to use it.

    Raises
    ------
    ModuleNotFoundError
        Where onnxscript is not installed.

    Examples
    --------
    >>> torch.onnx.export(module, (x,), dynamo=True, custom_translation_table=translations())  # doctest: +SKIP
    """
    onnxscript = _onnxscript()
    import onnx_ir

    op = onnxscript.opset18
    softmax_node, scatter_node, masked_node = (_symbol(onnxscript, node) for node in NODES[:3])

    def softmax(x, dim: int):  # type: ignore[no-untyped-def]
        return softmax_node(x, axis=dim)

    def scatter_nd(shape, indices, updates, masked: int | None = None, strategy: str = ""):  # type: ignore[no-untyped-def]
        if isinstance(shape, (list, tuple)):  # sizes, some of them known only when the graph runs
            one = op.Constant(value_ints=[1])
            sizes = [op.Constant(value_ints=[s]) if isinstance(s, int) else op.Reshape(s, one) for s in shape]
            none = onnx_ir.tensor([], onnx_ir.DataType.INT64)
            shape = op.Concat(*sizes, axis=0) if sizes else op.Constant(value=none)
        if masked is None:
            return scatter_node(shape, indices, updates, reduction="add")
        return masked_node(shape, indices, updates, reduction="add", maskedValue=masked)

    # Standard nodes compute in float32, or in float64 where an operand is; results are rounded once, as Fusebook's are.

    def kind_of(*operands: Any) -> int:
        return 11 if any(x.dtype == 11 for x in operands) else 1

    def cast(kind: int, *operands: Any) -> list[Any]:  # a node that casts nothing would take the names of weights
        return [x if x is None or x.dtype == kind else op.Cast(x, to=kind) for x in operands]

    def wide(*operands: Any) -> list[Any]:
        return cast(kind_of(*operands), *operands)

    def normed(h: Any, x: Any, weight: Any, bias: Any, centred: bool, eps: float) -> Any:
        # A node has eps in float32. ONNX Runtime fuses what has Pow; of LayerNorm with casts it makes an invalid graph.
        # With bfloat16 it fuses casts too, into a node of two dtypes, for which it has no kernel on a GPU.
        kind, fusible = kind_of(x), not (centred or any(v is not None and v.dtype == 16 for v in (x, weight)))
        weight, bias = cast(kind, weight, bias)
        if centred and weight is not None and kind != 11:
            given = [v for v in (weight, bias) if v is not None]
            return op.LayerNormalization(h, *given, axis=-1, epsilon=eps)[0]
        two, least = (op.Constant(value=onnx_ir.tensor(v, onnx_ir.DataType(kind))) for v in (2.0, eps))
        last = op.Constant(value_ints=[-1])
        for _ in range(2 * centred):  # a mean is rounded, which leaves one in rows of large elements
            h = op.Sub(h, op.ReduceMean(h, last))
        square = op.ReduceMean(op.Pow(h, two) if fusible else op.Mul(h, h), last)
        # The exporter takes less than 1e-8 for 0, and leaves out its Add.
        y = op.Div(h, op.Sqrt((op.Add if eps > 1e-7 else op.Sum)(square, least)))
        y = y if weight is None else op.Mul(y, weight)
        return y if bias is None else op.Add(y, bias)

    def norm(x, weight, bias, centred: bool, eps: float):  # type: ignore[no-untyped-def]
        return op.CastLike(normed(wide(x)[0], x, weight, bias, centred, eps), x)

    def add_norm(x, residual, weight, bias, centred: bool, eps: float):  # type: ignore[no-untyped-def]
        total = op.CastLike(op.Add(*wide(x, residual)), x)
        h = op.CastLike(total, wide(x)[0])
        return op.CastLike(normed(h, x, weight, bias, centred, eps), x), total

    def cross_entropy(  # type: ignore[no-untyped-def]
        x, target, weight, reduction: str, ignore_index: int, smoothing: float, z: float, cap: float | None
    ):  # fmt: skip
        if smoothing or z or cap is not None:
            raise NotImplementedError(
                "fusebook.ort.translations: expected a loss without label_smoothing, z_loss and softcap, which ONNX's "
                f"SoftmaxCrossEntropyLoss has not, got {smoothing}, {z} and {cap}; leave them out, or export the logits"
            )
        x, weight = cast(kind_of(x), x, weight)
        rest = op.Constant(value_ints=[-1])
        scores = op.Reshape(x, op.Concat(rest, op.Shape(x, start=-1), axis=0))  # Flatten of one x twice does not export
        given = op.Reshape(target, rest), weight
        if x.dtype == 11:  # there ONNX Runtime's SoftmaxCrossEntropyLoss, and its LogSoftmax, lose NaN
            h = op.Sub(scores, op.ReduceMax(scores, rest))
            scores = op.Sub(h, op.Log(op.ReduceSum(op.Exp(h), rest)))
            loss = op.NegativeLogLikelihoodLoss(scores, *given, reduction=reduction, ignore_index=ignore_index)
        else:
            loss, _ = op.SoftmaxCrossEntropyLoss(scores, *given, reduction=reduction, ignore_index=ignore_index)
        return op.Reshape(loss, op.Shape(target)) if reduction == "none" else loss

    def linear_cross_entropy(  # type: ignore[no-untyped-def]
        h, head, bias, target, weight, reduction: str, ignore_index: int, smoothing: float, z: float,
        cap: float | None, rows: int | None,
    ):  # fmt: skip
        logits = op.MatMul(h, op.Transpose(head, perm=[1, 0]))
        if bias is not None:
            logits = op.Add(logits, bias)
        logits.dtype = h.dtype
        return cross_entropy(logits, target, weight, reduction, ignore_index, smoothing, z, cap)

    def swiglu_kept(x, gate, up, bias, tf32: bool, strategy: str):  # type: ignore[no-untyped-def]
        products = op.MatMul(x, gate), op.MatMul(x, up)
        g, u = products
        if x.dtype not in (1, 11):
            g, u = op.Cast(g, to=1), op.Cast(u, to=1)
        if bias is not None:
            both = [op.Gather(bias, op.Constant(value_int=i), axis=0) for i in (0, 1)]
            g, u = (op.Add(y, op.CastLike(b, y)) for y, b in zip((g, u), both, strict=True))
        return op.CastLike(op.Mul(op.Mul(g, op.Sigmoid(g)), u), x), *products

    def swiglu(x, gate, up, bias, tf32: bool, strategy: str):  # type: ignore[no-untyped-def]
        return swiglu_kept(x, gate, up, bias, tf32, strategy)[0]

    def concat_gemm(x, weights, tf32: bool, strategy: str):  # type: ignore[no-untyped-def]
        return op.Concat(*[op.MatMul(x, w) for w in weights], axis=-1)

    def elementwise(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*operands: Any) -> Any:
            # As in PyTorch, an operand without axes does not widen others.
            counting = [x for x in operands if len(x.shape)] or operands
            dtype = functools.reduce(torch.promote_types, (_DTYPES[x.dtype] for x in counting))
            found = compute(*wide(*operands))
            several = isinstance(found, tuple)
            results = tuple(op.Cast(y, to=_NUMBERS[dtype]) for y in (found if several else (found,)))
            return results if several else results[0]

        return _like(inspect.signature(compute), computed)

    known: dict[str, Callable[..., Any]] = {
        "softmax": softmax,
        "scatter_nd": scatter_nd,
        "norm": norm,
        "add_norm": add_norm,
        "cross_entropy": cross_entropy,
        "linear_cross_entropy": linear_cross_entropy,
        "swiglu": swiglu,
        "swiglu_kept": swiglu_kept,  # what torch.export sees where a weight is a parameter
        "concat_gemm": concat_gemm,
        "multiply": elementwise(lambda x, y: op.Mul(x, y)),
        "double": elementwise(lambda x: op.Add(x, x)),
        "add_sub": elementwise(lambda x, y: (op.Add(x, y), op.Sub(x, y))),
        "multiply_add": elementwise(lambda x, y, z: op.Add(op.Mul(x, y), z)),
        "silu": elementwise(lambda x: op.Mul(x, op.Sigmoid(x))),
        "silu_mul": elementwise(lambda x, y: op.Mul(op.Mul(x, op.Sigmoid(x)), y)),
        "add_add_multiply": elementwise(lambda x, y, z, w: op.Mul(op.Add(op.Add(x, y), z), w)),
        "exp": elementwise(lambda x: op.Exp(x)),
    }

    return {o.custom: known[name] if name in known else _refusing(o) for name, o in OPERATORS.items()}


def _like(signature: inspect.Signature, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a signature, which the exporter reads."""
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _refusing(operator: Operator) -> Callable[..., Any]:
    def refused(*_: Any) -> Any:
        raise NotImplementedError(
            f"fusebook.ort.translations: expected an operator that it lists, got fusebook::{operator.name}, which has "
            "no node in ONNX; leave it out of the module that is exported"
        )

    names = [a.name for a in operator.custom._schema.arguments]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return _like(inspect.Signature([inspect.Parameter(name, kind) for name in names]), refused)


def _number(value: Any, axes: float = math.inf) -> Any:
    """The one number that a value of at most so many axes is known to be, else None.

    What a caller of the graph may replace is not known.
    """
    tensor = value.const_value if value is not None and not value.is_graph_input() else None
    one = tensor is not None and math.prod(tensor.shape) == 1 and len(tensor.shape) <= axes
    numbers = _numbers(tensor) if one else None
    return None if numbers is None else numbers.reshape(()).item()


def _numbers(tensor: Any) -> Any:
    """The numbers of a constant, else None.

    Those in another file are not read: the author of the model names it, and it may be any.
    """
    import onnx_ir

    if isinstance(tensor, onnx_ir.ExternalTensor):
        return None
    try:
        return tensor.numpy()
    except Exception:  # whatever is raised for fewer bytes than numbers, or for a dtype that is none
        return None


def _is_zero(attribute: Any) -> bool:
    """Whether ConstantOfShape makes zeros that Fusebook's nodes can add to; its default is float32."""
    if attribute is None:
        return True
    try:
        made = attribute.as_tensor()
    except Exception:  # it is something else, or of a dtype that is none
        return False
    floating = made.dtype.name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")
    numbers = _numbers(made) if floating else None
    return numbers is not None and not any(numbers.tobytes())  # -0.0 stays where nothing is added


def _torch(value: Any) -> torch.Tensor | None:
    """The numbers of an initializer that no caller may replace, else None."""
    tensor = value.const_value if value is not None and not value.is_graph_input() else None
    numbers = None if tensor is None else _numbers(tensor)
    if tensor is None or numbers is None or tensor.dtype.name not in ("UINT8", "FLOAT16", "BFLOAT16"):
        return None
    if tensor.dtype.name == "BFLOAT16":  # which numpy has not
        return torch.from_numpy(numbers.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(numbers.copy())


def _packed(node: Any) -> PackedWeight | None:
    """The weight of a MatMulNBits, repacked; None where Fusebook's kernel does not take it."""
    values = dict(zip(("A", "B", "scales", "zero_points", "g_idx", "bias"), node.inputs, strict=False))
    if values.get("g_idx") is not None:
        warnings.warn(
            f"fuse: expected MatMulNBits without g_idx, whose groups are neighbouring columns, got {node.name!r} with "
            "it; the node stays as it is",
            stacklevel=2,
        )
        return None
    known = {"N": 0, "K": 0, "bits": 4, "block_size": 0, "accuracy_level": 0, "weight_prepacked": 0}
    sizes = known | {name: attribute.value for name, attribute in node.attributes.items()}
    # Packed for another kernel, of another kind, or what is not known here.
    if sizes.keys() != known.keys() or {*map(type, sizes.values())} != {int} or sizes["weight_prepacked"]:
        return None
    N, K, bits, group, *_ = sizes.values()
    blob, scales, zeros = (_torch(values.get(name)) for name in ("B", "scales", "zero_points"))
    if bits not in (4, 8) or group not in (32, 64, 128) or K % 16 or blob is None or scales is None or not blob.numel():
        return None
    if values.get("zero_points") is not None and (zeros is None or zeros.dtype != torch.uint8):
        return None  # those in float
    groups = -(-K // group)
    fits = blob.shape == (N, groups, group * bits // 8) and scales.numel() == N * groups
    if not fits or scales.dtype == torch.uint8 or (zeros is not None and zeros.numel() != N * -(-groups * bits // 8)):
        return None
    if not scales.isfinite().all():
        return None
    if not INTERPRETED:  # packing takes tensors of a GPU, and a model holds those of the CPU
        if not torch.cuda.is_available():
            warnings.warn(
                f"fuse: expected a GPU, on which weights are packed, for {node.name!r}, got none; it stays as it is",
                stacklevel=2,
            )
            return None
        blob, scales, zeros = blob.cuda(), scales.cuda(), None if zeros is None else zeros.cuda()
    return PackedWeight.from_onnx(blob, scales, zeros, K=K, bits=bits, group=group).to("cpu")


def _sparse(nodes: Any, initializers: Any = ()) -> bool:
    """Whether there are sparse tensors in a graph, or in one within it."""
    attributes = [a for node in nodes for a in node.attribute]
    graphs = [g for a in attributes for g in (a.g, *a.graphs)]
    return bool(
        initializers
        or any(a.HasField("sparse_tensor") or a.sparse_tensors for a in attributes)
        or any(_sparse(g.node, g.sparse_initializer) for g in graphs)
    )


def _ambiguous(graph: Any) -> bool:
    """Whether two initializers have one name in a graph, or in one within it."""
    names = [tensor.name for tensor in graph.initializer]
    attributes = [a for node in graph.node for a in node.attribute]
    return len(set(names)) < len(names) or any(_ambiguous(g) for a in attributes for g in (a.g, *a.graphs))


def fuse(model: Any) -> Any:
    """Replace chains of standard operators, and matmuls with weights of few bits, by Fusebook's.

    ``ScatterND(ConstantOfShape(shape), indices, Where(Equal(indices, masked), 0, updates), reduction="add")`` becomes
    MaskedScatterNDOfShape; without Equal and Where it becomes ScatterNDOfShape. ONNX Runtime's MatMulNBits becomes
    QuantizedMatMul, whose weight is packed for Fusebook's kernel: of four or eight bits in blocks of 32, 64 or 128,
    with float16 or bfloat16 scales and a K that is a multiple of 16. It takes infinities and the largest numbers of
    bfloat16 as `fusebook.quantized_matmul` does, which may be NaN. A model is data: nothing in it is run, and no
    other file that it names is read.

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
        equal where they are the same number or have the same name. A MatMulNBits with ``g_idx`` stays too, with a
        warning, and so does each one without a GPU, on which weights are packed; so do the model's functions. ONNX
        Runtime infers no shapes from Fusebook's nodes: what a Loop without iterations collects of them has one axis,
        unless its body declares a shape. A Scan does not run unless its body declares the number of axes of what it
        computes from them. Indices out of range, with which ONNX Runtime's ScatterND ends in an error, are left out.
        Nodes whose outputs nothing reads are left out, those of custom operators too, and so are initializers that no
        node reads, such as those which only ``quantization_annotation`` names.

    Raises
    ------
    ModuleNotFoundError
        Where onnxscript is not installed.
    TypeError
        For what is no model.
    ValueError
        For what would be lost: sparse tensors, inputs and outputs of opaque types, and training_info. Where the domain
        ``fusebook`` is another: with nodes of a version that is not 1, or with functions of the model. And for a model
        that onnx_ir does not take, such as one with maps, or that has two initializers of one name.
    """
    _onnxscript()
    import onnx
    import onnx_ir
    from onnxscript.rewriter import pattern, rewrite

    if not isinstance(model, (onnx.ModelProto, onnx_ir.Model)):
        raise TypeError(
            f"fuse: expected an onnx.ModelProto or onnx_ir.Model, got {type(model).__name__}; load it first"
        )
    proto = isinstance(model, onnx.ModelProto)
    given: Any = model
    if proto and (
        given.training_info
        or _sparse(given.graph.node, given.graph.sparse_initializer)
        or any(_sparse(function.node) for function in given.functions)
        or any(v.type.HasField("opaque_type") for v in (*given.graph.input, *given.graph.output))
    ):
        raise ValueError(
            "fuse: expected a model without sparse tensors, opaque types and training_info, which onnx_ir loses, got "
            "one with them; make the tensors dense, or clear training_info"
        )
    if proto and _ambiguous(given.graph):
        raise ValueError("fuse: expected initializers of different names, got two of one; rename or delete one of them")

    def masked(op, shape, indices, masked, nothing, updates):  # type: ignore[no-untyped-def]
        zeros = op.ConstantOfShape(shape, _allow_other_attributes=True, _outputs=["zeros"])
        kept = op.Where(op.Equal(indices, masked), nothing, updates)
        return op.ScatterND(zeros, indices, kept, reduction="add")

    def masked_fits(_, shape, indices, masked, nothing, updates, zeros):  # type: ignore[no-untyped-def]
        # A mask of several components, or of updates that Where broadcasts, means something else than a node's.
        known = indices.shape is not None and updates.shape is not None
        rows = [getattr(size, "value", size) for size in list(indices.shape)[:-1]] if known else [None]
        alike = {None, ""}.isdisjoint(rows) and rows == [
            getattr(size, "value", size) for size in list(updates.shape)[:-1]
        ]
        one = alike and list(indices.shape)[-1:] == [1]
        made = zeros.producer().attributes.get("value")
        if not (one and _is_zero(made)):
            return False
        axes = len(indices.shape)  # of a constant with more, Where has more than updates
        return isinstance(_number(masked, axes), int) and _number(nothing, axes) == 0

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

    found: dict[Any, PackedWeight] = {}
    # Of the model itself, onnx_ir would rename initializers.
    with understood("fuse"):
        whole = onnx_ir.from_proto(copy.deepcopy(given)) if proto else given.clone()
    parts = whole.graph, *whole.functions.values()
    other = any(part.opset_imports.get("fusebook", 1) != 1 for part in parts)
    if (other and any(node.domain == "fusebook" for part in parts for node in part.all_nodes())) or any(
        function.domain == "fusebook" for function in whole.functions.values()
    ):
        raise ValueError(
            "fuse: expected the domain fusebook in version 1 and without functions of the model, got another; rename "
            "that domain"
        )
    for part in parts if other else ():  # that no node is of: ONNX Runtime saves models with all domains that it knows
        part.opset_imports.pop("fusebook", None)
    taken = {v.name for node in whole.graph.all_nodes() for v in (*node.inputs, *node.outputs) if v is not None}
    taken |= {v.name for graph in (whole.graph, *whole.graph.subgraphs()) for v in (*graph.inputs, *graph.outputs)}

    def nbits(op, x, codes, scales):  # type: ignore[no-untyped-def]
        return op.MatMulNBits(
            x, codes, scales, _domain="com.microsoft", _allow_other_inputs=True, _allow_other_attributes=True,
            _outputs=["y"],
        )  # fmt: skip

    def nbits_fits(_, x, codes, scales, y):  # type: ignore[no-untyped-def]
        packed = _packed(y.producer())
        if packed is not None:
            found[y] = packed
        return packed is not None

    def nbits_fused(op, x, codes, scales, y):  # type: ignore[no-untyped-def]
        packed, inputs = found.pop(y), y.producer().inputs

        def kept(name: str, value: torch.Tensor) -> Any:
            array = value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
            kind = onnx_ir.DataType(_NUMBERS[value.dtype])
            full = f"{y.name}/{name}"
            while full in taken:
                full += "_"
            taken.add(full)
            return op.initializer(onnx_ir.Tensor(array.view(kind.numpy()), name=full), name=full)

        bias = inputs[5] if len(inputs) > 5 else None
        if bias is None:  # kernels that are compiled ahead of time add one
            bias = kept("bias", packed.scales.new_zeros(packed.shape[0]))
        return op.QuantizedMatMul(
            x, kept("words", packed.words), kept("scales", packed.scales),
            None if packed.zeros is None else kept("zeros", packed.zeros), bias,
            N=packed.shape[0], K=packed.shape[1], bits=packed.bits, group=packed.group,
            _domain="fusebook", _version=1,
        )  # fmt: skip

    rules = pattern.RewriteRuleSet(
        [
            pattern.RewriteRule(nbits, nbits_fused, nbits_fits, name="QuantizedMatMul"),
            pattern.RewriteRule(masked, masked_fused, masked_fits, name="MaskedScatterNDOfShape"),
            pattern.RewriteRule(plain, plain_fused, plain_fits, name="ScatterNDOfShape"),
        ],
        commute=True,
    )
    with understood("fuse"):
        # ONNX Runtime infers no type from a node of a custom operator within a function.
        kept_functions, kept_imports = {**whole.functions}, {**whole.opset_imports}
        whole.functions.clear()
        fused = rewrite(whole, pattern_rewrite_rules=rules)
        fused.functions.update(kept_functions)
        fused.opset_imports.update(kept_imports)  # those too that only functions need
        return onnx_ir.to_proto(fused) if proto else fused
