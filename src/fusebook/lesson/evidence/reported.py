"""Sizes that users reported as slow: they are measured with page 901, next to those drawn at random."""

from __future__ import annotations

from typing import Any

from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.measure import explore

with extra("book"):
    import pandas as pd

__all__ = ["REPORTED", "times"]


def _rows(M: int, N: int, dtype: str = "float32", layout: str = "contiguous") -> tuple[str, dict[str, Any]]:
    return "softmax", {"M": M, "N": N, "dtype": dtype, "layout": layout}


def _tokens(M: int, K: int, N: int) -> tuple[str, dict[str, Any]]:
    return "swiglu", {"M": M, "K": K, "N": N, "dtype": "bfloat16", "layout": "contiguous"}


def _points(n: int, d: int, k: int) -> tuple[str, dict[str, Any]]:
    words = {"labels": "int64", "law": "blobs", "dtype": "float32", "layout": "contiguous"}
    return "kmeans_assign", {"n": n, "d": d, "k": k, **words}


_TABLE = {"R": 1048576, "D": 64, "n": 65536, "law": "zipf", "dtype": "float32", "layout": "contiguous"}
#: Vocabularies without padding, few rows of many columns, few tokens, large layers, narrow rows, many coordinates.
REPORTED = [
    *(_rows(4096, N, dtype) for N in (50257, 50304) for dtype in ("float32", "bfloat16")),
    *(_rows(*sizes) for sizes in ((2048, 100003), (1024, 262144), (64, 151936), (8, 151936))),
    _rows(262144, 128, layout="permuted"),
    *(_tokens(M, 4096, 14336) for M in (1, 8)),
    *(_tokens(*sizes) for sizes in ((32, 5120, 13824), (4096, 8192, 28672), (1024, 4096, 11008))),
    ("embedding_backward", _TABLE),
    *(_points(*sizes) for sizes in ((20000, 3000, 50), (100000, 784, 10))),
]


def times() -> pd.DataFrame:
    """Check and time every reported size, as `fusebook.measure.explore` does a random one."""
    shown = []
    for name, dims in REPORTED:
        rows = explore.ratios(OPS[name], explore.problem(name, **dims))
        words = [str(v) for v in dims.values() if v != "contiguous"]
        rows.insert(0, "problem", " ".join([name, *words]))
        shown.append(rows[rows["math"] == ""])
    columns = ["problem", "fusebook_us", "torch", "torch_us", "best", "best_us", "over torch", "over all"]
    return pd.concat(shown)[columns]
