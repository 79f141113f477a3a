"""One module per family of kernels; each ends in its cards, ``OPS``."""

from fusebook.kernels import kmeans, scatter_nd, softmax
from fusebook.op import Op

__all__ = ["OPS"]

#: Every card of the library by its name, in reading order. A new kernel adds one import and one name here.
OPS: dict[str, Op] = {op.name: op for module in (softmax, scatter_nd, kmeans) for op in module.OPS}
