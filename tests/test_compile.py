"""Every kernel compiles for GPUs that are not there: on every edge, for three generations of hardware.

Not edited when a kernel is added: it reads the cards.
"""

import pytest
import torch

import compiling
from fusebook.cards import OPS

#: The dtypes for which a generation compiles: each dtype is compiled by one, and each generation compiles a half type,
#: in which it differs most from the others.
DTYPES = {"sm_90": ("bfloat16", "float32", "float64"), "sm_80": ("bfloat16",), "sm_100": ("float16",)}

#: Kernels of default launch configs that spill registers on sm_90, and why.
SPILLS = {
    "_concat_gemm": "float32 of 17 to 32 rows, whose tiles of two warps were fastest all the same",
    "_swiglu": "float32 of 17 to 32 rows, whose tiles of two warps were fastest all the same",
    "_softmax_shared": "with a limit of registers more programs run at once, faster than no limit and no spills",
    "_softmax_backward_shared": "the same",
    "_norm_backward_shared": "parts of x and dy and the sums for the weights fill the registers",
    "_norm_rows_quantised": "rows of more than 64 KiB: each is held by one program, of 64 registers a thread",
    "_norm_backward_rows": "float64: a few bytes besides the sums for the weights",
    "_kmeans_direct": "Triton 3.6: a few bytes besides the sums",
    "_scatter_nd_scan": "the scan over all indices, which one program does",
    "_scatter_nd_sort": "a few bytes besides the keys that are sorted",
}

#: Rows of so many columns and more are computed by torch.
TORCHS = {"softmax/float64": 16385, "softmax_backward/float64": 8193}
TORCHS |= {f"{name}/float64": 16385 for name in ("rms_norm", "add_rms_norm", "layer_norm")}
TORCHS |= {f"{name}_norm_backward/float64": 4097 for name in ("rms", "layer")}
TORCHS |= {f"rms_norm_fp8/{dtype}": 65537 for dtype in ("bfloat16", "float16", "float32")}


def _cases():
    """All are slow but the first dtype of each operator on sm_90, where there is no GPU: on one, kernels run."""
    for arch, known in DTYPES.items():
        for name, op in OPS.items():
            has = [str(dtype).removeprefix("torch.") for dtype in op.dtypes]
            dtypes = [dtype for dtype in known if dtype in has] or has[:1]
            for dtype in dtypes:
                told = (arch, dtype) == ("sm_90", dtypes[0]) and not torch.cuda.is_available()
                marks = [] if told else [pytest.mark.slow]
                yield pytest.param(f"{arch}/{name}/{dtype}", id=f"{name}-{arch}-{dtype}", marks=marks)


@pytest.mark.timeout(1800)  # the first of them waits until its op is compiled
@pytest.mark.parametrize("task", list(_cases()))
def test_every_launcher_compiles_on_every_edge(task, compiled):
    points = compiling.answer(compiled, task)
    op = OPS[task.split("/")[1]]
    variants = [n for n, v in op.variants.items() if n.startswith("fusebook") and set(v.needs) <= {"cuda"}]
    assert len(points) == len(variants) * len(op.edges)
    errors = [f"{p['variant']} {p['dims']}: {p['error'][:500]}" for p in points if "error" in p]
    assert not errors, "\n".join(errors)
    spilled = {found["kernel"]: found["spilled"] for p in points for found in p["launched"] if found["spilled"]}
    assert spilled.keys() <= SPILLS.keys(), f"bytes that a thread spills: {spilled}; choose another launch config"
    # An edge that launches nothing has nothing to compute, is refused with its reason, or is left to a library by the
    # launcher, and compiled under another variant; otherwise nothing was tested.
    empty = [p for p in points if not p["launched"] and "refused" not in p and "(chosen)" not in p["variant"]]
    wide = TORCHS.get(task.partition("/")[2], float("inf"))
    assert all(0 in p["dims"].values() or p["dims"].get("N", 0) >= wide for p in empty), empty
