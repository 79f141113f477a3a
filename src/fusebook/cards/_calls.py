"""How each implementation of a card is called, for tables that a reader copies from.

Implementations that a card adds to compare strategies are not in the table.
"""

from fusebook.measure.op import Op

__all__ = ["call"]

#: By operator and implementation; `call` has what is the same for many operators.
_CALLS = {
    "multiply": {"eager": "x * y", "fusebook": "fusebook.multiply(x, y)"},
    "double": {"eager": "2 * x", "fusebook": "fusebook.double(x)"},
    "add_sub": {"eager": "x + y, x - y", "fusebook": "fusebook.add_sub(x, y)"},
    "multiply_add": {
        "eager": "x * y + z",
        "torch": "torch.addcmul(z, x, y)",
        "fusebook": "fusebook.multiply_add(x, y, z)",
    },
    "silu": {"eager": "x * torch.sigmoid(x)", "torch": "F.silu(x)", "fusebook": "fusebook.silu(x)"},
    "silu_mul": {
        "eager": "x * torch.sigmoid(x) * y",
        "torch": "F.silu(x) * y",
        "Liger": "LigerSiLUMulFunction.apply(x, y)",
        "fusebook": "fusebook.silu_mul(x, y)",
    },
    "add_add_multiply": {"eager": "(x + y + z) * w", "fusebook": "fusebook.add_add_multiply(x, y, z, w)"},
    "exp": {"eager": "torch.exp(x)", "fusebook": "fusebook.exp(x)"},
    "softmax": {
        "torch": "torch.softmax(x, -1)",
        "Liger": "LigerSoftmaxFunction.apply(x)",
        "quack": "quack.softmax.softmax_fwd(x)",
        "fusebook": "fusebook.softmax(x, dim=-1)",
    },
    "softmax_backward": {
        "torch": "torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)",
        "Liger": "liger_kernel.ops.softmax._softmax_backward(dy, y, ...)",
        "quack": "quack.softmax.softmax_bwd(dy, y)",
        "fusebook": "fusebook.softmax_backward(y, dy); backward() of fusebook.softmax",
    },
    "masked_scatter_nd_of_shape": {
        "eager": "fusebook.masked_scatter_nd_eager(shape, indices, updates)",
        "fusebook": "fusebook.masked_scatter_nd_of_shape(shape, indices, updates, check=False)",
    },
    "scatter_nd_of_shape": {
        "eager": "y.index_put_(indices.unbind(-1), updates, accumulate=True)",
        "fusebook": "fusebook.scatter_nd_of_shape(shape, indices, updates, check=False)",
    },
    "embedding_backward": {
        "torch": "torch.ops.aten.embedding_dense_backward(dy, indices, R, -1, False)",
        "fusebook": "fusebook.embedding_backward(dy, indices, R, check=False)",
    },
    "rms_norm": {
        "torch": "F.rms_norm(x, weight.shape, weight, eps)",
        "Liger": "LigerRMSNormFunction.apply(x, weight, eps, 0.0, 'llama', False)",
        "quack": "quack.rmsnorm.rmsnorm_fwd(x, weight)",
        "fusebook": "fusebook.rms_norm(x, weight)",
    },
    "add_rms_norm": {
        "eager": "t = x + residual; fusebook.rms_norm_eager(t, weight), t",
        "torch": "t = x + residual; F.rms_norm(t, weight.shape, weight, eps), t",
        "Liger": "LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, ...)",
        "quack": "quack.rmsnorm.rmsnorm_fwd(x, weight, residual=residual)",
        "fusebook": "fusebook.add_rms_norm(x, residual, weight)",
    },
    "layer_norm": {
        "torch": "F.layer_norm(x, weight.shape, weight, bias, eps)",
        "Liger": "LigerLayerNormFunction.apply(x, weight, bias, eps)",
        "fusebook": "fusebook.layer_norm(x, weight, bias)",
    },
    "rms_norm_fp8": {
        "eager": "fusebook.rms_norm_eager(x, weight), then a scale for each row",
        "norm, then quantise": "fusebook.rms_norm(x, weight), then a compiled scale for each row",
        "fusebook": "fusebook.rms_norm(x, weight, dtype=torch.float8_e4m3fn)",
    },
    "rms_norm_backward": {
        "eager": "backward() of fusebook.rms_norm_eager",
        "torch": "backward() of F.rms_norm",
        "Liger": "backward() of LigerRMSNormFunction",
        "quack": "quack.rmsnorm.rmsnorm_bwd(x, weight, dy, factor)",
        "fusebook": "fusebook.rms_norm_backward(x, dy, weight); backward() of fusebook.rms_norm",
    },
    "layer_norm_backward": {
        "eager": "backward() of fusebook.layer_norm_eager",
        "torch": "backward() of F.layer_norm",
        "fusebook": "fusebook.layer_norm_backward(x, dy, weight, bias); backward() of fusebook.layer_norm",
    },
    "cross_entropy": {
        "torch": "F.cross_entropy(x, target).backward()",
        "torch.compile": "torch.compile(F.cross_entropy)(x, target).backward()",
        "Liger (of a copy)": "LigerCrossEntropyLoss()(x.clone(), target).backward()",
        "quack": "quack.cross_entropy.cross_entropy(x, target).backward()",
        "fusebook": "fusebook.cross_entropy(x, target, check=False).backward()",
    },
    "linear_cross_entropy": {
        "torch": "F.cross_entropy(F.linear(h, head), target).backward()",
        "torch.compile": "the call of torch, compiled",
        "torch, in chunks": "F.linear_cross_entropy(h, head, target).backward()",
        "Liger": "LigerFusedLinearCrossEntropyLoss()(head, h, target).backward()",
        "quack": "quack.linear_cross_entropy.chunked_linear_cross_entropy(h, head, target).backward()",
        "fusebook": "fusebook.linear_cross_entropy(h, head, target, check=False).backward()",
    },
    "concat_gemm": {
        "two + cat": "torch.cat([x @ w for w in weights], 1)",
        "cat + one": "x @ torch.cat(weights, 1)",
        "packed": "x @ packed, with weights that were concatenated before",
        "views": "torch.mm(x, w, out=part), for each weight and its part of the output",
        "max-autotune": "torch.compile(f, mode='max-autotune')(x, weights)",
        "ORT two + Concat": "an onnxruntime.InferenceSession: two Gemm and a Concat",
        "ORT Concat + one": "an onnxruntime.InferenceSession: a Concat and one Gemm",
        "fusebook": "fusebook.concat_gemm(x, weights)",
    },
    "swiglu": {
        "packed": "g, u = (x @ packed).chunk(2, 1); F.silu(g) * u",
        "packed + compiled": "the same, compiled",
        "Liger": "LigerSiLUMulFunction.apply(x @ gate, x @ up)",
        "quack": "quack.gemm_interface.gemm_gated(x, interleaved, activation='swiglu')",
        "fusebook": "fusebook.swiglu(x, gate, up)",
    },
    "quantized_matmul": {
        "eager": "x @ dequantized.T, with the weight dequantized in each call",
        "torch in 16 bits": "F.linear(x, weight)",
        "tinygemm": "torch.ops.aten._weight_int4pack_mm(x, packed, group, scales)",
        "ONNX Runtime": "an onnxruntime.InferenceSession: MatMulNBits",
        "fusebook": "fusebook.quantized_matmul(x, packed)",
    },
    "logistic_step": {
        "reduce-overhead": "torch.compile(f, mode='reduce-overhead')(X, y, w, b, lr, l2)",
        "eager in a graph": "a torch.cuda.CUDAGraph of the eager step, replayed",
        "fusebook": "fusebook.logistic_step(X, y, w, b, lr, l2, check=False)",
    },
    "logistic_fit": {
        "eager": "for _ in range(steps): fusebook.logistic_step_eager(X, y, w, b, lr, l2)",
        "torch.compile": "the same, with a compiled step",
        "reduce-overhead": "the same, with a step compiled by mode='reduce-overhead'",
        "eager in a graph": "a torch.cuda.CUDAGraph of the eager loop, replayed",
        "torch.compile in a graph": "a torch.cuda.CUDAGraph of the compiled loop, replayed",
        "fusebook": "fusebook.logistic_fit(X, y, w, b, lr, l2, steps=steps, check=False)",
    },
    "kmeans_assign": {
        "torch.cdist": "torch.cdist(points, centres).argmin(1)",
        "torch.compile, product": "squares and a matmul, compiled",
        "fusebook": "fusebook.kmeans_assign(points, centres, check=False)",
    },
    "kmeans_update": {
        "sorted": "sort by label, then sums of segments",
        "product": "ones.T @ points / ones.sum(0)[:, None], with ones = F.one_hot(labels)",
        "torch.compile, product": "the same, compiled",
        "fusebook": "fusebook.kmeans_update(points, labels, k, check=False)",
    },
    "kmeans_step": {
        "eager": "fusebook.kmeans_assign_eager, then fusebook.kmeans_update_eager",
        "fusebook": "one step of fusebook.kmeans(points, k)",
    },
    "adamw_step": {
        "loop": "torch.optim.AdamW(parameters, foreach=False).step()",
        "foreach": "torch.optim.AdamW(parameters, foreach=True).step()",
        "fused=True": "torch.optim.AdamW(parameters, fused=True).step()",
        "torch.compile": "torch.compile(optimizer.step)()",
        "fusebook": "fusebook.optim.AdamW(parameters).step()",
    },
    "rope": {
        "Liger": "LigerRopeFunction.apply(q, k, cos, sin)",
        "fusebook": "fusebook.rope(q, cos, sin, k)",
    },
}

#: What is called alike for every operator.
_ALIKE = {
    "eager": "fusebook.{op}_eager(...)",
    "fusebook": "fusebook.{op}(...)",
    "torch.compile": "torch.compile(f)(...), of the eager code",
    "ONNX Runtime": "an onnxruntime.InferenceSession, inputs bound on the GPU",
}


def call(op: Op, variant: str) -> str:
    """How an implementation is called; empty where the table does not have it.

    Parameters
    ----------
    op : Op
    variant : str
        A name of its card, or of a record of it.
    """
    name = variant.removesuffix(" (as installed)").removesuffix(", TF32").replace("fusebook (chosen)", "fusebook")
    found = _CALLS.get(op.name, {}).get(name) or _ALIKE.get(name, "").format(op=op.name)
    way = op.variants.get(variant)
    if not found or way is None or way.math is None:
        return found
    return (
        found.replace("weights)", "weights, tf32=True)").replace("up)", "up, tf32=True)")
        if name == "fusebook"
        else (f"{found}, in TF32")
    )
