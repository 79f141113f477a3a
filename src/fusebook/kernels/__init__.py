"""One module per family of kernels; each ends in its cards, ``OPS``."""

from fusebook.kernels import elementwise, gemm, kmeans, logistic_step, scatter_nd, softmax
from fusebook.op import Op

__all__ = ["OPS"]

_MODULES = (elementwise, softmax, scatter_nd, gemm, logistic_step, kmeans)

#: Every card of the library by its name, in reading order. A new kernel adds one import and one name here.
OPS: dict[str, Op] = {op.name: op for module in _MODULES for op in module.OPS}
