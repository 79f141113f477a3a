"""Every kernel compiles for GPUs that are not there: on every edge and dtype, for three generations of hardware.

Not edited when a kernel is added: it reads the cards.
"""

import pytest

import compiling
from fusebook.cards import OPS

ARCHITECTURES = ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100"))]


@pytest.mark.timeout(1800)  # the first of them waits until its op is compiled
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", OPS)
def test_every_launcher_compiles_on_every_edge(op, arch, compiled):
    points = compiling.answer(compiled, f"{arch}/{op}")
    variants = [n for n, v in OPS[op].variants.items() if n.startswith("fusebook") and set(v.needs) <= {"cuda"}]
    assert len(points) == len(variants) * len(OPS[op].edges) * len(OPS[op].dtypes)
    errors = [f"{p['variant']} {p['dims']} {p['dtype']}: {p['error'][:500]}" for p in points if "error" in p]
    assert not errors, "\n".join(errors)
    # An edge that launches nothing has nothing to compute or is refused with its reason; otherwise nothing was tested.
    empty = [p for p in points if not p["launched"] and "refused" not in p]
    assert all(0 in p["dims"].values() for p in empty), empty
