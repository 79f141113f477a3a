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
    # An interpreted kernel disables torch.compile, which the first run of a node would import. A signal handler that
    # runs a node could then deadlock with a thread that imports torch.compile and waits for the interrupted code.
    import torch._dynamo  # noqa: F401
