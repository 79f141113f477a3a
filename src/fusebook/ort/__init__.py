"""ONNX Runtime: a graph as a function of torch tensors, and Fusebook's kernels as operators of its domain ``fusebook``.

`Graph` is the function; `custom_op` makes an operator of a Python function. In process, the nodes of `NODES`,
`NORMS` and `LOSSES` call the library's launchers. `build` compiles the kernels into a library that any ONNX Runtime
loads, without Python, torch or Triton. `translations` and `fuse` bring models to these nodes.
"""

from fusebook.kernels._call import INTERPRETED
from fusebook.ort.aot import build
from fusebook.ort.custom import CustomOp, custom_op, register
from fusebook.ort.export import fuse, translations
from fusebook.ort.graph import Bound, Graph
from fusebook.ort.nodes import LOSSES, MASKED_SCATTER_ND, NODES, NORMS, QUANTIZED_MATMUL, SCATTER_ND, SOFTMAX

__all__ = [
    "LOSSES", "MASKED_SCATTER_ND", "NODES", "NORMS", "QUANTIZED_MATMUL", "SCATTER_ND", "SOFTMAX", "Bound", "CustomOp",
    "Graph", "build", "custom_op", "fuse", "register", "translations",
]  # fmt: skip

if INTERPRETED:
    # Where a kernel is interpreted, a node keeps torch.compile out, and would import it in its first run. In a signal
    # handler that may wait for ever: for a thread that imports it, too, and waits for what the handler interrupted.
    import torch._dynamo  # noqa: F401
