"""What kernels of several families share on the device's side."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fill"]


@triton.jit
def fill(out_ptr, SIZE, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """Zeros, BLOCK neighbours a program. EARLY: the next kernel may start now, and wait where it needs them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(out_ptr + at, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=at < SIZE)  # write SIZE
