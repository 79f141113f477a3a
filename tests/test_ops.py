"""Every op, variant, edge and dtype against the float64 reference: interpreted here, compiled on a GPU.

Not edited when a kernel is added: it reads the cards.
"""

import math

import pytest
import torch

from fusebook.cards import OPS
from fusebook.measure import bench
from fusebook.measure.inputs import generator
from toy import verify

#: The edges on which dtypes are interpreted that take the ways of another one: small, and not of one number.
TWINS = (1, 2)
#: More elements than that are interpreted in one dtype where slow tests are left out.
LARGE = 2**14


def _cases():
    for op in OPS.values():
        told = torch.bfloat16 if torch.bfloat16 in op.dtypes else op.dtypes[0]
        for name, variant in op.variants.items():
            # What compiles anew for every shape takes seconds a case: one edge per dtype is enough to see it work.
            edges = op.edges[:1] if variant.recompiles else op.edges
            for edge, dims in enumerate(edges):
                for dtype in op.dtypes:
                    sizes = "-".join(str(v) for v in dims.values())
                    # Interpreted, float16 takes the ways of bfloat16; and how others compile is no news of ours.
                    twin = dtype == torch.float16 and torch.bfloat16 in op.dtypes
                    if twin and not torch.cuda.is_available() and edge not in TWINS:
                        continue
                    cost = op.cost(1, **dims)
                    again = cost.read + cost.write > LARGE and dtype != told
                    marks = [pytest.mark.slow_interpreted] if twin or again or variant.recompiles else []
                    yield pytest.param(
                        op, name, dims, dtype, id=f"{op.name}-{name}-{sizes}-{str(dtype)[6:]}", marks=marks
                    )


@pytest.mark.parametrize(("op", "name", "dims", "dtype"), list(_cases()))
def test_a_variant_stays_within_the_limit(op, name, dims, dtype, device):
    if why := bench.missing(op.variants[name]):
        pytest.skip(f"{name} {why}")
    if device == "cpu" and math.prod(v for v in dims.values() if isinstance(v, int)) > 2**22:
        pytest.skip("an edge that only a GPU's number of multiprocessors makes one")
    if device == "cuda" and (op.name, name, dtype) == ("adamw_step", "torch.compile", torch.float64):
        pytest.skip("torch.compile counts steps on the device in float32")
    torch.compiler.reset()
    try:
        verdict = verify(op, name, dtype, dims)
    except NotImplementedError as why:
        pytest.skip(f"{name} refuses: {why}")
    assert verdict.ok


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_card_is_whole(op):
    assert op.configs and op.edges and len(op.variants) >= 2
    names = {tuple(dims) for config in op.configs.values() for dims in config} | {tuple(d) for d in op.edges}
    assert len(names) == 1, f"configs and edges of {op.name} name different dims: {names}"
    for config in op.configs.values():
        for dims in config:
            cost = op.cost(4, **dims)
            assert cost.read >= 0 and cost.write >= 0 and cost.flop >= 0
            for variant in op.variants.values():
                if variant.cost is not None:
                    own = variant.cost(4, **dims)
                    assert own.read >= cost.read and own.write >= cost.write, "the op's cost is the least there is"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_inputs_are_the_same_for_the_same_seed(op, device):
    def made():
        return op.make(generator(7, device), op.dtypes[0], **op.edges[0])

    for a, b in zip(made(), made(), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
