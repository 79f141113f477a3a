"""Problems that nobody chose, drawn by hypothesis: sizes of the cards' own draws, layouts, dtypes, gradients, batches.

Each is held to the card's reference in float64. FUZZ is the seconds of CPU that each test may take, and CI takes more;
``nox -s fuzz`` takes twenty minutes. What was found once stands as an example.
"""

import dataclasses
import functools
import os
import random
import time

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fusebook
import memcheck
from fusebook import bench, check, explore
from fusebook.cards import OPS
from fusebook.inputs import poison

CI = bool(os.environ.get("CI"))
#: Seconds of CPU a test.
FUZZ = float(os.environ.get("FUZZ") or (12 if CI else 5))
LAW = settings(
    # What is drawn after time is up passes, and costs a millisecond.
    max_examples=int(100 * FUZZ) if os.environ.get("FUZZ") else 400 if CI else 120,
    deadline=None,
    derandomize=not os.environ.get("FUZZ"),  # the same problems in every run, so that no run fails by chance
    database=None,
    suppress_health_check=list(HealthCheck),
)
OURS = {
    f"{op.name} {name}": (op, variant)
    for op in OPS.values()
    for name, variant in op.variants.items()
    if name.startswith("fusebook") and set(variant.needs) <= {"cuda"} and not variant.math and explore.explorable(op)
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
seeds = st.integers(0, 2**20)


@dataclasses.dataclass
class Spent:
    """The seconds of CPU that a test has had, the problems that it has drawn, and whether one was found wrong."""

    node: pytest.Item
    start: float = dataclasses.field(default_factory=time.process_time)
    problems: int = 0
    wrong: bool = False


@pytest.fixture
def spent(request):
    """Meanwhile, what kernels read and write is checked."""
    with memcheck.guarded():
        yield Spent(request.node)


def in_time(test):
    """A test of which problems that are drawn when its time is up pass unseen, unless it looks for the smallest one."""

    @functools.wraps(test)
    def run(spent, **drawn):
        if not spent.wrong and time.process_time() - spent.start >= FUZZ:
            return
        spent.problems += 1
        spent.node.user_properties[:] = [("n", spent.problems)]  # see conftest
        try:
            test(spent, **drawn)
        except BaseException:
            spent.wrong = True
            raise

    return run


# Layouts: the same numbers, or numbers at all, lying in memory as users' tensors may


def stepped(x):
    """Every third number of memory, along every axis."""
    memory = torch.full([3 * n + 1 for n in x.shape], filler(x), dtype=x.dtype, device=x.device)
    return memory[tuple(slice(1, 3 * n + 1, 3) for n in x.shape)].copy_(x)


def filler(x):
    return float("nan") if x.is_floating_point() else 0


def transposed(x):
    return x.mT.contiguous().mT if x.dim() > 1 else x


def one_off(x):
    memory = torch.full((x.numel() + 1,), filler(x), dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


def deep(x):
    """Far behind the beginning of its storage."""
    memory = torch.full((x.numel() + 4096,), filler(x), dtype=x.dtype, device=x.device)
    return memory[4096:].view(x.shape).copy_(x)


def odd_rows(x):
    """Rows that begin one number further apart than they are long."""
    if x.dim() < 2:
        return x
    memory = torch.full((*x.shape[:-1], x.shape[-1] + 1), filler(x), dtype=x.dtype, device=x.device)
    return memory[..., :-1].copy_(x)


def expanded(x):
    """Its first row over and over: other numbers, in one row of memory."""
    return x[:1].expand_as(x) if x.dim() and len(x) and x.is_floating_point() else x


def overlapping(x):
    """Rows that begin one number behind each other."""
    if x.dim() != 2 or not x.numel() or not x.is_floating_point():
        return x
    return x.reshape(-1)[: x.shape[0] + x.shape[1] - 1].as_strided(x.shape, (1, 1)) if min(x.shape) > 1 else x


LAYOUTS = [torch.clone, stepped, transposed, one_off, deep, odd_rows, expanded, overlapping]


def laid(made, how, spare):
    """Arguments of which each float lies in one of the ways, chosen by the digits of a number."""
    out = []
    for value in made:
        if isinstance(value, torch.Tensor) and value.dim() and value.dtype != torch.bool:
            value = LAYOUTS[how % len(LAYOUTS)](value)
            how //= spare
        out.append(value)
    return tuple(out)


@LAW
@given(st.sampled_from(sorted(OURS)), seeds, st.integers(0, 8**3 - 1), st.sampled_from([1, 8]))
@example("scatter_nd_of_shape fusebook sorted", 3, 3, 1)  # updates whose rows are one number further apart
@example("softmax fusebook", 5, 5, 1)
@example("linear_cross_entropy fusebook", 0, 48, 8)  # classes that are all the same
@in_time
def test_any_problem_in_any_layout_is_right_or_refused(spent, name, seed, how, spare):
    op, variant = OURS[name]
    if bench.missing(variant) and DEVICE == "cuda":
        return
    dims = explore._small(op.draw(random.Random(seed)))
    made = laid(explore._made(op, dims, DEVICE), how, spare)
    if sum(t.numel() for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)) > 2**18:
        return
    yard = check.yardstick(op, made)
    if yard.rounded > 0.25:  # what float32 itself gets wrong, as a gradient that is rightly zero, tells nothing
        return
    poison(yard.outputs(torch.device(DEVICE)))
    try:
        out = variant.run(*(made if variant.prepare is None else variant.prepare(*made)))
    except (NotImplementedError, ValueError, TypeError) as refusal:
        if "expected" not in str(refusal) and "not" not in str(refusal):
            raise  # refused without a sentence
        return
    assert yard.judge(out, variant.math).ok, f"{explore._line(op, dims)}, layout {how}: {yard.where(out)}"


# Shapes: without axes, empty, odd, of huge aspect

shapes = st.one_of(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13]), max_size=4).map(tuple),
    st.sampled_from([(1, 515), (515, 1), (2, 1, 2053), (1, 1, 1, 1), (33000,), (3, 0, 7)]),
)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])
ELEMENTWISE = {
    "multiply": (torch.mul, 2),
    "multiply_add": (lambda x, y, z: x * y + z, 3),
    "silu": (torch.nn.functional.silu, 1),
    "exp": (torch.exp, 1),
    "double": (lambda x: 2 * x, 1),
}


def numbers(seed, shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_near(got, want, dtype, factor=16, of=None):
    """Equal but for some roundings, as a share of the largest number of the result, or of another tensor."""
    assert got.shape == want.shape
    if want.numel():
        error = (got.double() - want).abs().max() / (want if of is None else of).abs().max().clamp(min=1e-30)
        assert error <= factor * torch.finfo(dtype).eps


@LAW
@given(seeds, shapes, dtypes, st.integers(0, len(LAYOUTS) - 3), st.integers(-4, 3))
@in_time
def test_a_softmax_of_any_shape_and_its_gradient(spent, seed, shape, dtype, how, dim):
    if not -max(1, len(shape)) <= dim < max(1, len(shape)):
        return
    x = numbers(seed, shape, dtype)
    x = LAYOUTS[how](x) if x.dim() else x
    own, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    y, want = fusebook.softmax(own, dim), torch.softmax(exact, dim)
    assert_near(y.detach(), want.detach(), dtype)
    dy = numbers(seed + 1, shape, dtype)
    (got,), (right,) = torch.autograd.grad(y, own, dy), torch.autograd.grad(want, exact, dy.double())
    assert_near(got, right, dtype, 64)


@LAW
@given(seeds, st.sampled_from(sorted(ELEMENTWISE)), shapes, dtypes, st.integers(0, 8**3 - 1), st.integers(0, 15))
@example(9646, "multiply_add", (), torch.float32, 0, 0)  # x y is nearly -z
@in_time
def test_elementwise_of_any_shapes_and_its_gradients(spent, seed, name, shape, dtype, how, cut):
    """Operands of which some axes are one, or missing, are broadcast."""
    reference, count = ELEMENTWISE[name]
    operands = []
    for i in range(count):
        own = tuple(1 if i and (cut >> axis) & 1 and n > 1 else n for axis, n in enumerate(shape))[
            (cut & 3 if i else 0) :
        ]
        x = numbers(seed + i, own, dtype)
        operands.append(LAYOUTS[how // 8**i % (len(LAYOUTS) - 2)](x) if x.dim() else x)
    mine = [x.detach().requires_grad_() for x in operands]
    exact = [x.detach().double().requires_grad_() for x in operands]
    y, want = getattr(fusebook, name)(*mine), reference(*exact)
    assert y.dtype == dtype
    # A sum is as exact as its terms are large.
    terms = reference(*(x.detach().abs() for x in exact)) if name == "multiply_add" else want.detach()
    assert_near(y.detach(), want.detach(), dtype, of=terms)
    dy = numbers(seed + 9, tuple(want.shape), dtype)
    for got, right in zip(torch.autograd.grad(y, mine, dy), torch.autograd.grad(want, exact, dy.double()), strict=True):
        assert_near(got, right, dtype, 256)


@LAW
@given(seeds, st.sampled_from(["softmax", "exp", "silu"]), st.integers(1, 4), st.integers(0, 2), dtypes)
@in_time
def test_a_batch_is_each_of_its_members(spent, seed, name, size, along, dtype):
    shape = [3, 7]
    shape.insert(along, size)
    x, function = numbers(seed, tuple(shape), dtype), getattr(fusebook, name)
    got = torch.vmap(function, in_dims=along)(x)
    alone = torch.stack([function(t) for t in x.unbind(along)])
    if name == "softmax":  # rows that lie otherwise may be added up in another order
        assert_near(got, torch.softmax(x.movedim(along, 0).double(), -1), dtype, 64)
    assert_near(got, alone.double(), dtype, 64 if name == "softmax" else 0)


@pytest.mark.slow
@LAW
@given(seeds, st.lists(st.integers(2, 40), min_size=2, max_size=4, unique=True), dtypes)
@in_time
def test_one_compiled_function_takes_all_sizes(spent, seed, sizes, dtype):
    torch.compiler.reset()
    compiled = torch.compile(fusebook.softmax, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in sizes:
        x = numbers(seed, (n, n + 3), dtype)
        assert_near(compiled(x), torch.softmax(x.double(), -1), dtype)
