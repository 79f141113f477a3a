"""Fused GPU kernels in Triton, and the means to show that they are right and how fast they are."""

import importlib.util
import os
import sys
import warnings

# Triton decides when it is imported whether `@triton.jit` compiles or interprets; afterwards is too late. Without a
# CUDA device only the interpreter can run a kernel, so it is chosen here, before anything below imports triton.
if "TRITON_INTERPRET" not in os.environ and importlib.util.find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        if "triton" in sys.modules:
            warnings.warn(
                "Triton was imported before fusebook on a machine without a GPU, so no kernel can run: import fusebook "
                "first, or set TRITON_INTERPRET=1",
                stacklevel=2,
            )
        else:
            os.environ["TRITON_INTERPRET"] = "1"

from fusebook import nn as nn
from fusebook import optim as optim
from fusebook.kernels.adamw import adamw_step, adamw_step_eager
from fusebook.kernels.distributed import AllReduceNorm, SharedKMeans, kmeans_share
from fusebook.kernels.elementwise import (
    add_add_multiply,
    add_add_multiply_eager,
    add_sub,
    add_sub_eager,
    multiply_add,
    multiply_add_eager,
    silu,
    silu_eager,
    silu_mul,
    silu_mul_eager,
)
from fusebook.kernels.elementwise import double as double
from fusebook.kernels.elementwise import exp as exp
from fusebook.kernels.elementwise import multiply as multiply
from fusebook.kernels.kmeans import (
    KMeans,
    kmeans,
    kmeans_assign,
    kmeans_assign_eager,
    kmeans_update,
    kmeans_update_eager,
)
from fusebook.kernels.logistic_step import logistic_fit, logistic_step, logistic_step_eager
from fusebook.kernels.losses import (
    cross_entropy,
    cross_entropy_eager,
    cross_entropy_with_gradient,
    linear_cross_entropy,
    linear_cross_entropy_eager,
    linear_cross_entropy_with_gradients,
)
from fusebook.kernels.norms import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_backward,
    layer_norm_eager,
    rms_norm,
    rms_norm_backward,
    rms_norm_eager,
)
from fusebook.kernels.products import concat_gemm, concat_gemm_eager, swiglu, swiglu_eager
from fusebook.kernels.quantized import PackedWeight, quantize, quantized_matmul, quantized_swiglu
from fusebook.kernels.rope import rope, rope_eager
from fusebook.kernels.scatter import (
    embedding_backward,
    masked_scatter_nd_eager,
    masked_scatter_nd_of_shape,
    scatter_nd_of_shape,
)
from fusebook.kernels.softmax import softmax, softmax_backward, softmax_backward_eager, softmax_eager
from fusebook.patching import Patched, patch, unpatch

__version__ = "0.1.0"

# Modules of 0.1.0, and what to use now. An import or `python -m` raises an error.
_MOVED = {n: f"measure.{n}" for n in "bench check compare explore inputs machine op record timing tune".split()}
_MOVED |= {"digests": "measure.sources", "launches": "measure.compiled", "ways": "measure.sources", "page": "lesson"}


class _Moved:
    """The first finder of modules: finds none, and names the new address of a module that moved.

    It comes before the finder of folders, which takes a `__pycache__` that was left behind for a package.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, module = name.rpartition(".")
        if package == __name__ and module in _MOVED:
            raise ModuleNotFoundError(f"{name} moved: use fusebook.{_MOVED[module]}")


sys.meta_path.insert(0, _Moved)

# Names that NumPy or torch has too are missing: `from fusebook import *` must not replace `exp` or `nn`.
__all__ = [
    "AllReduceNorm",
    "KMeans",
    "PackedWeight",
    "Patched",
    "SharedKMeans",
    "adamw_step",
    "adamw_step_eager",
    "add_add_multiply",
    "add_add_multiply_eager",
    "add_layer_norm",
    "add_rms_norm",
    "add_sub",
    "add_sub_eager",
    "concat_gemm",
    "concat_gemm_eager",
    "cross_entropy",
    "cross_entropy_eager",
    "cross_entropy_with_gradient",
    "embedding_backward",
    "kmeans",
    "kmeans_assign",
    "kmeans_assign_eager",
    "kmeans_share",
    "kmeans_update",
    "kmeans_update_eager",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_eager",
    "linear_cross_entropy",
    "linear_cross_entropy_eager",
    "linear_cross_entropy_with_gradients",
    "logistic_fit",
    "logistic_step",
    "logistic_step_eager",
    "masked_scatter_nd_eager",
    "masked_scatter_nd_of_shape",
    "multiply_add",
    "multiply_add_eager",
    "patch",
    "quantize",
    "quantized_matmul",
    "quantized_swiglu",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_eager",
    "rope",
    "rope_eager",
    "scatter_nd_of_shape",
    "silu",
    "silu_eager",
    "silu_mul",
    "silu_mul_eager",
    "softmax",
    "softmax_backward",
    "softmax_backward_eager",
    "softmax_eager",
    "swiglu",
    "swiglu_eager",
    "unpatch",
]
