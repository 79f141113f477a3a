"""Launch plans of losses, until these use the tables of `_rows`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Plan(NamedTuple):
    """How rows are launched: by which kernel, with which constants, by how many programs of how many warps."""

    kernel: str  # "rows", "narrow", "pairs", "whole", "shared" or "twice"; "turned": laid side by side first, and again
    constants: Mapping[str, int]
    programs: int
    warps: int
    span: int = 0  # columns of a part; 0 where a row belongs to one program
    parts: int = 1  # programs that share a row
    registers: int | None = None  # the most that a thread takes; None leaves it to the compiler
