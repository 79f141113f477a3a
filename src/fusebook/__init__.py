"""Fused GPU kernels in Triton, and the means to show that they are right and how fast they are."""

import importlib
import importlib.util
import os
import pkgutil
import sys
from typing import TYPE_CHECKING, Any

# Triton decides when it is imported whether `@triton.jit` compiles or interprets; afterwards is too late. Without a
# CUDA device only the interpreter can run a kernel, so it is chosen here, before anything below imports triton.
if "TRITON_INTERPRET" not in os.environ and "triton" not in sys.modules and importlib.util.find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

from fusebook import kernels

__version__ = "0.1.0"

# What a module of kernels names in its `__all__` is public: `fusebook.softmax` and its like. Plans are for the kernels.
__all__: list[str] = []
for _found in pkgutil.iter_modules(kernels.__path__):
    if not (_found.name.startswith("_") or _found.name.endswith("_plan")):
        _module = importlib.import_module(f"{kernels.__name__}.{_found.name}")
        globals().update({name: getattr(_module, name) for name in _module.__all__})
        __all__ += _module.__all__

if TYPE_CHECKING:  # a type checker runs no loops: it takes such a name for anything

    def __getattr__(name: str) -> Any: ...
