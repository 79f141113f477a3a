"""Evidence of the lesson on squared ReLU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd
from torch import Tensor

from fusebook import tables
from fusebook.lesson.evidence import Claim, Frames, Measured, Recorded

OPERATORS = ("squared_relu",)
EXAMPLE = {"M": 32768, "N": 4096, "dtype": "float32"}
STEPS = ("eager", "one_pass")
SHAPES = ((32768, 4096), (32768, 4095))
DTYPES = ("float32",)
EXTRA_STEPS: Mapping[str, Callable[..., Callable[[Tensor], Tensor]]] = {}
KERNELS = {"squared_relu": ("_squared_relu_flat",)}
FRAMES = {"sweep": Recorded("squared_relu", "large"), "steps": Measured("squared_relu_steps")}


def _over_eager(frames: Frames) -> pd.Series:
    return tables.ratio(frames["sweep"], "eager", "fusebook")


def _of_copy(frames: Frames) -> pd.Series:
    return tables.share(frames["sweep"], "fusebook")


CLAIMS = (
    Claim(
        "gain-over-eager",
        "Predicted 2.0x faster than eager, measured {median:.1x} (median).",
        _over_eager,
        ">= 1.8",
        "large sizes, float32, cold L2",
        lesson=True,
    ),
    Claim(
        "copy-speed",
        "`fusebook.squared_relu` runs at {least:.0%} of copy speed or more.",
        _of_copy,
        ">= 0.9",
        "large sizes, float32, cold L2",
        lesson=True,
    ),
)

LOG = ()
