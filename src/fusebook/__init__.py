"""Fused GPU kernels in Triton, and the means to show that they are right and how fast they are."""

import importlib.util
import os
import sys

# Triton decides when it is imported whether `@triton.jit` compiles or interprets; afterwards is too late. Without a
# CUDA device only the interpreter can run a kernel, so it is chosen here, before anything below imports triton.
if "TRITON_INTERPRET" not in os.environ and "triton" not in sys.modules and importlib.util.find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

from fusebook.kernels.elementwise import add_add_multiply, add_sub, double, exp, multiply, multiply_add, silu
from fusebook.kernels.gemm import concat_gemm, swiglu
from fusebook.kernels.kmeans import kmeans, kmeans_assign, kmeans_update
from fusebook.kernels.logistic_step import logistic_fit, logistic_step
from fusebook.kernels.scatter_nd import embedding_backward, masked_scatter_nd_of_shape, scatter_nd_of_shape
from fusebook.kernels.softmax import softmax

__version__ = "0.1.0"

__all__ = [
    "add_add_multiply",
    "add_sub",
    "concat_gemm",
    "double",
    "embedding_backward",
    "exp",
    "kmeans",
    "kmeans_assign",
    "kmeans_update",
    "logistic_fit",
    "logistic_step",
    "masked_scatter_nd_of_shape",
    "multiply",
    "multiply_add",
    "scatter_nd_of_shape",
    "silu",
    "softmax",
    "swiglu",
]
