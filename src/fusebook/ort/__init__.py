"""Fusebook's kernels as operators of ONNX Runtime's domain ``fusebook``.

In process, the nodes of `NODES` call the library's launchers. `build` compiles the kernels into a library that any
ONNX Runtime loads, without Python, torch or Triton. `translations` and `fuse` bring models to these nodes.
"""

from fusebook.ort.aot import build
from fusebook.ort.export import fuse, translations
from fusebook.ort.nodes import MASKED_SCATTER_ND, NODES, SCATTER_ND, SOFTMAX

__all__ = ["MASKED_SCATTER_ND", "NODES", "SCATTER_ND", "SOFTMAX", "build", "fuse", "translations"]
