"""Fusebook's kernels as operators of ONNX Runtime's domain ``fusebook``: in process, or as a library of its own."""

from fusebook.ort.nodes import MASKED_SCATTER_ND, NODES, SCATTER_ND, SOFTMAX

__all__ = ["MASKED_SCATTER_ND", "NODES", "SCATTER_ND", "SOFTMAX"]
