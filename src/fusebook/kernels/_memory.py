"""Memory for what a call needs and nobody keeps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ._call import empty

#: Bytes that each tensor begins at a multiple of, as memory of its own would.
_LINE = 256


def side_by_side(device: torch.device, *wanted: tuple[Sequence[int], torch.dtype]) -> list[Tensor]:
    """Tensors of given shapes and dtypes in one piece of memory: an allocation is host time, whatever its size."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
    starts = [0, *itertools.accumulate(triton.cdiv(size, _LINE) * _LINE for size in sizes)]
    memory = empty(starts[-1:], torch.uint8, device)
    cut = zip(wanted, sizes, starts, strict=False)
    return [memory[start : start + size].view(dtype).view(shape) for (shape, dtype), size, start in cut]
