"""Every op, variant, edge and dtype against the float64 reference: interpreted here, compiled on a GPU.

Not edited when a kernel is added: it reads the cards.
"""

import math

import pytest
import torch

from fusebook import bench, check
from fusebook.cards import OPS
from fusebook.inputs import generator


def _cases():
    for op in OPS.values():
        for name, variant in op.variants.items():
            # What compiles anew for every shape takes seconds a case: one edge per dtype is enough to see it work.
            edges = op.edges[:1] if variant.recompiles else op.edges
            for dims in edges:
                for dtype in op.dtypes:
                    sizes = "-".join(str(v) for v in dims.values())
                    yield pytest.param(op, name, dims, dtype, id=f"{op.name}-{name}-{sizes}-{str(dtype)[6:]}")


@pytest.mark.parametrize(("op", "name", "dims", "dtype"), list(_cases()))
def test_a_variant_stays_within_the_limit(op, name, dims, dtype, device):
    if why := bench.missing(op.variants[name]):
        pytest.skip(f"{name} {why}")
    if device == "cpu" and math.prod(v for v in dims.values() if isinstance(v, int)) > 2**22:
        pytest.skip("an edge that only a GPU's number of multiprocessors makes one")
    torch.compiler.reset()
    try:
        verdict = bench.verify(op, name, dtype, dims)
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


# What every launcher promises

OURS = [
    pytest.param(op, variant, id=f"{op.name}-{name}")
    for op in OPS.values()
    for name, variant in op.variants.items()
    if name.startswith("fusebook")
]


def _with_gaps(x):
    """The same numbers, every second one of memory; what lies between them is NaN, or 0 for integers."""
    gaps = math.nan if x.is_floating_point() else 0
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), gaps, dtype=x.dtype, device=x.device)
    view = wide[..., 1::2]
    view.copy_(x)
    return view


def _transposed(x):
    """The same numbers, with the first axis side by side in memory."""
    return x.mT.contiguous().mT if x.dim() > 1 else x


def _negated(x):
    """The same numbers, of the other sign in memory: a view that negates, as the imaginary part of a conjugate is."""
    return torch._neg_view(-x)


def _changed(arguments, change, which):
    """`arguments` with the tensors among them changed: all that `which` accepts, and then each of these alone."""
    at = [i for i, v in enumerate(arguments) if isinstance(v, torch.Tensor) and v.dim() and which(v)]
    for chosen in [at] + [[i] for i in at if len(at) > 1]:
        yield [change(v) if i in chosen else v for i, v in enumerate(arguments)]


def _arguments(op, variant, dims, device):
    made = op.make(generator(0, device), op.dtypes[0], **dims)
    return made, variant.prepare(*made) if variant.prepare else made


@pytest.mark.parametrize("change", [_with_gaps, _transposed, _negated])
@pytest.mark.parametrize(("op", "variant"), OURS)
def test_a_view_is_right_or_refused(op, variant, change, device):
    tried = 0
    for dims in op.edges:
        if why := bench.missing(variant):
            pytest.skip(why)
        made, arguments = _arguments(op, variant, dims, device)
        sizes = [v.numel() for v in made if isinstance(v, torch.Tensor)]
        if not all(sizes) or sum(sizes) > 2**16:  # the interpreter gathers them one after another
            continue
        yard = check.yardstick(op, made)
        for given in _changed(arguments, change, lambda v: True):
            tried += 1
            try:
                out = variant.run(*given)
            except (NotImplementedError, ValueError) as refusal:
                fine, said = bool(str(refusal)), "refused without a message"
            else:
                fine, said = check.judge(op, out, yard, variant.math).ok, check.worst(op, out, yard)
            assert fine, f"{dims}: {said}"
    assert tried


@pytest.mark.parametrize(("op", "variant"), OURS)
def test_integers_in_the_place_of_floats_are_refused_by_name(op, variant, device):
    if why := bench.missing(variant):
        pytest.skip(why)
    dims = next(dims for dims in op.edges if 0 not in dims.values())
    _, arguments = _arguments(op, variant, dims, device)
    for given in _changed(arguments, lambda v: v.to(torch.int32), torch.is_floating_point):
        with pytest.raises((TypeError, ValueError), match="int32"):
            variant.run(*given)
