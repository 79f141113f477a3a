"""Problems that nobody chose, drawn by hypothesis: sizes of the cards' own draws, layouts, dtypes, gradients, batches.

Each is held to the card's reference in float64. FUZZ is the seconds of CPU that each test may take; ``nox -s fuzz``
takes twenty minutes. On a GPU, where compiling takes most of the time, the suite draws a fixed number,
and the next run tries the same. What was found once stands as an example.
"""

import dataclasses
import functools
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fusebook
import memcheck
from fusebook.cards import OPS
from fusebook.measure import bench, check, explore
from fusebook.measure.inputs import poison

#: Seconds of CPU a test.
FUZZ = float(os.environ.get("FUZZ") or 5)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Whether as many are drawn as there is time for.
TIMED = DEVICE == "cpu" or bool(os.environ.get("FUZZ"))
LAW = settings(
    # What is drawn after time is up passes, and costs a millisecond.
    max_examples=int(100 * FUZZ) if os.environ.get("FUZZ") else 24 if not TIMED else 120,
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
#: For a GPU other processes compile.
CLOCK = time.monotonic if DEVICE == "cuda" else time.process_time
seeds = st.integers(0, 2**20)
LOSSES = ("cross_entropy", "linear_cross_entropy")


@dataclasses.dataclass
class Spent:
    """When a test began, the problems that it has drawn, and whether one was found wrong."""

    node: pytest.Item
    start: float = dataclasses.field(default_factory=lambda: CLOCK())
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
        if TIMED and not spent.wrong and CLOCK() - spent.start >= FUZZ:
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


def numel(made):
    return sum(t.numel() for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor))


def is_right(yard, inputs, got, math=None):
    """Whether a result is within the limit, or within twice what rounding costs the reference in problems near by.

    Of these there are some for losses and softmax, in whose gradients small differences of probabilities cancel, and
    whose rounded gradient may be near the exact one by luck: so it is the most of several, each another problem in its
    dtype. And in float64, where nothing is more exact that would tell what rounding costs: in float32 it costs as many
    eps, once more for the reference, which is rounded as well, and what that itself gets wrong tells nothing.
    """
    verdict = yard.judge(got, math)
    double, count = yard.dtype == torch.float64, 16 if yard.op.name in (*LOSSES, "softmax") else 1
    if verdict.ok or (not double and count == 1):
        return verdict.ok
    single = [t.float() if isinstance(t, torch.Tensor) and t.dtype == torch.float64 else t for t in inputs]
    step = max(2**-14, torch.finfo(single[0].dtype).eps)
    near = ([single[0] * (1 + i * step), *single[1:]] for i in range(count))
    rounded = max(check.yardstick(yard.op, problem).rounded for problem in near)
    share = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if double else 1
    return (double and rounded > 0.25) or verdict.error <= (3 if double else 2) * rounded * share


@LAW
@given(st.sampled_from(sorted(OURS)), seeds, st.integers(0, 8**3 - 1), st.sampled_from([1, 8]))
@example("scatter_nd_of_shape fusebook sorted", 3, 3, 1)  # updates whose rows are one number further apart
@example("softmax fusebook", 5, 5, 1)
@example("linear_cross_entropy fusebook", 0, 48, 8)  # classes that are all the same
@example("linear_cross_entropy fusebook", 272, 0, 1)  # a row in float64 that is nearly sure of its class
@example("linear_cross_entropy fusebook", 534372, 0, 1)  # another: PyTorch's is further from the exact one
@example("cross_entropy fusebook", 287, 7, 1)  # a row in bfloat16 that is, and PyTorch ten times as far off
@in_time
def test_any_problem_in_any_layout_is_right_or_refused(spent, name, seed, how, spare):
    op, variant = OURS[name]
    if bench.missing(variant) and DEVICE == "cuda":
        return
    dims = explore._small(op.draw(random.Random(seed)))
    made = laid(op.made(dims, DEVICE), how, spare)
    if numel(made) > 2**18:
        return
    yard = check.yardstick(op, made)
    if yard.rounded > 0.25:  # what float32 itself gets wrong, as a gradient that is rightly zero, tells nothing
        return
    poison(yard.outputs(torch.device(DEVICE)))
    try:
        out = variant.run(*(made if variant.prepare is None else variant.prepare(*made)))
    except (NotImplementedError, ValueError, TypeError) as refusal:
        if ": expected " not in str(refusal):
            raise  # refused without a sentence
        return
    assert is_right(yard, made, out, variant.math), f"{explore._line(op, dims)}, layout {how}: {yard.where(out)}"


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
@example(2322, (2,), torch.float32, 0, 0)  # whose gradients nearly cancel
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
    # A difference is as exact as its terms are large.
    terms = want.detach() * dy.double().abs()
    terms += want.detach() * (terms.sum(dim, keepdim=True) if terms.dim() else terms)
    assert_near(got, right, dtype, 64, of=terms)


@LAW
@given(seeds, st.sampled_from(sorted(ELEMENTWISE)), shapes, dtypes, st.integers(0, 8**3 - 1), st.integers(0, 15))
@example(11821, "silu", (), torch.float64, 0, 0)  # near the point where its slope is zero
@example(9646, "multiply_add", (), torch.float32, 0, 0)  # x y is nearly -z
@example(244, "multiply", (1, 5, 1, 8), torch.float32, 0, 10)  # forty products, nearly none when they are added up
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
    rights = torch.autograd.grad(want, exact, dy.double())
    sums = rights
    if count > 1:  # the gradient of what is broadcast is a sum, which may cancel
        wide = [x.detach().abs().requires_grad_() for x in exact]
        sums = torch.autograd.grad(reference(*wide), wide, dy.double().abs())
    elif name == "silu":  # whose slope crosses zero: a sum of two terms
        x, share = exact[0].detach(), exact[0].detach().sigmoid()
        sums = [dy.double().abs() * (share + (x * share * (1 - share)).abs())]
    for got, right, of in zip(torch.autograd.grad(y, mine, dy), rights, sums, strict=True):
        assert_near(got, right, dtype, 256, of=of)


# Gradients of norms and losses, whose sizes are the cards'


def smooth(loss):
    """A loss of ours, or the same in plain PyTorch, as a function of the card's inputs and of options."""

    def run(x, target, weight=None, softcap=None, z_loss=0.0, **options):
        if loss is not None:
            return loss(x, target, weight, softcap=softcap, z_loss=z_loss, **options)
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        ignored = options.get("ignore_index", -100)
        each = torch.ones_like(x[0]) if weight is None else weight.to(x.dtype)
        each = torch.where(target == ignored, 0, each[target.clamp(min=0)])
        z = z_loss * (each * torch.where(target == ignored, 0, x.logsumexp(1)).square()).sum()
        z = z if options.get("reduction") == "sum" else z / each.sum()
        return F.cross_entropy(x, target, None if weight is None else weight.to(x.dtype), **options) + z

    return run


def of_hidden(loss):
    """The same of hidden states, of which ours makes logits itself."""
    if loss is None:
        return lambda h, head, target, scale, **options: smooth(None)(h @ head.T, target, **options)
    return lambda h, head, target, scale, softcap=None, **options: loss(h, head, target, softcap=softcap, **options)


#: A call of ours, and what it means.
DIFFERENTIATED = {
    "softmax": (lambda x: fusebook.softmax(x, -1), lambda x: torch.softmax(x, -1)),
    "rms_norm": (fusebook.rms_norm, OPS["rms_norm"].reference),
    "add_rms_norm": (fusebook.add_rms_norm, OPS["add_rms_norm"].reference),
    "layer_norm": (functools.partial(fusebook.layer_norm, eps=1e-6), OPS["layer_norm"].reference),
    "cross_entropy": (smooth(fusebook.cross_entropy), smooth(None)),
    "linear_cross_entropy": (of_hidden(fusebook.linear_cross_entropy), of_hidden(None)),
}
#: Of losses.
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"label_smoothing": 0.1},
    {"z_loss": 0.1},
    {"softcap": 50.0},  # near a smaller one all digits cancel
    {"softcap": 1e4},
    {"ignore_index": 3, "label_smoothing": 0.2, "softcap": 70.0},
]


def with_gradients(function, count, options):
    """A function of inputs, and behind them of gradients of results: the results, and the gradients of the inputs."""

    @torch.enable_grad()
    def run(*given):
        own = [t.detach().requires_grad_() if is_float(t) else t for t in given[:count]]
        found = function(*own, **options)
        found = found if isinstance(found, tuple) else (found,)
        floats = [t for t in own if is_float(t)]
        grads = torch.autograd.grad(found, floats, [g.to(y.dtype) for y, g in zip(found, given[count:], strict=True)])
        return (*(y.detach().to(floats[0].dtype) for y in found), *grads)

    return run


def is_float(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def drawn(name, seed, how=0, spare=1):
    """A problem of a card, small and laid so, and the gradients of its results; None where it is too large."""
    op = OPS[name]
    dims = explore._small(op.draw(random.Random(seed)))
    if name == "linear_cross_entropy" and dims["dtype"] in ("bfloat16", "float16"):
        dims["dtype"] = "float32"  # half types have no digits for what cancels in the gradient of a head
    made = op.made(dims, DEVICE)
    if name == "softmax":
        made = (made[0] / 16,)  # numbers that saturate no row, whose gradient would cancel
    made = laid(made, how, spare)
    if numel(made) > 2**16:
        return None
    results = pytree.tree_leaves(DIFFERENTIATED[name][1](*(t.double() if is_float(t) else t for t in made)))
    dtype = getattr(torch, dims["dtype"])
    return made, [numbers(seed + i, tuple(y.shape), dtype) if y.dim() else y.new_full((), 2.0, dtype=dtype)
                  for i, y in enumerate(results)]  # fmt: skip


def assert_gradients(name, function, made, dys, options):
    if name == "softmax" and made[0].itemsize == 2:
        assert_from_the_rounded(function, *made, *dys)
        return
    given, count = (*made, *dys), len(made)
    meant = with_gradients(DIFFERENTIATED[name][1], count, options)
    yard = check.yardstick(dataclasses.replace(OPS[name], reference=meant, meaning=None), given)
    if yard.rounded > 0.25:
        return
    got = with_gradients(function, count, options)(*given)
    assert is_right(yard, given, got), f"{name}, {options}: {yard.where(got)}"


def assert_from_the_rounded(softmax, x, dy):
    """The gradient is made of the result, which a half type has rounded: it is that of the rounded one, as on its card.

    Held to the gradient of the exact one it would be wrong wherever nearly equal terms cancel, and torch's as well.
    """
    own = x.detach().requires_grad_()
    y = softmax(own)
    (dx,) = torch.autograd.grad(y, own, dy)
    for name, inputs, got in (("softmax", (x,), y.detach()), ("softmax_backward", (y.detach(), dy), dx)):
        yard = check.yardstick(OPS[name], inputs)
        assert yard.judge(got).ok, f"{name}: {yard.where(got)}"


@LAW
@given(
    st.sampled_from(sorted(DIFFERENTIATED)),
    seeds,
    st.integers(0, 8**3 - 1),
    st.sampled_from([1, 8]),
    st.sampled_from(OPTIONS),
)
@example("linear_cross_entropy", 52, 48, 8, {"label_smoothing": 0.1})  # classes that are all the same, in float64
@example("cross_entropy", 191, 0, 1, {"softcap": 1e4})  # far above the logits
@example("linear_cross_entropy", 103, 0, 1, {})  # torch's own in float64 is further from what is right
@example("softmax", 230, 7, 1, {})  # rounded by luck to within less than problems near by
@example("cross_entropy", 95, 7, 1, {"ignore_index": 3, "label_smoothing": 0.2, "softcap": 70.0})  # logits above it
@in_time
def test_a_gradient_of_any_problem_in_any_layout(spent, name, seed, how, spare, options):
    problem = drawn(name, seed, how, spare)
    if problem:
        assert_gradients(name, DIFFERENTIATED[name][0], *problem, options if "entropy" in name else {})


# Batches, sizes of one compiled function, steps of lists, threads


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


@LAW
@given(st.sampled_from(sorted(DIFFERENTIATED)), seeds, st.integers(1, 3), st.integers(0, 3**3 - 1))
@in_time
def test_a_batch_of_norms_or_losses_is_each_of_its_members(spent, name, seed, size, along):
    """Each tensor has members along one of its axes, or is the same for all."""
    problem = drawn(name, seed)
    if not problem:
        return
    function, made = DIFFERENTIATED[name][0], problem[0]
    made = [t for t in made if isinstance(t, torch.Tensor)]
    more = [1.0] if name == "linear_cross_entropy" else []
    places = [along // 3**i % 3 - 1 if i else along % 2 for i in range(len(made))]
    places = [None if at < 0 else min(at, t.dim()) for at, t in zip(places, made, strict=True)]
    batches = [t if at is None else torch.stack([t.roll(i, 0) for i in range(size)], at)
               for t, at in zip(made, places, strict=True)]  # fmt: skip
    options = {"check": False} if "entropy" in name else {}
    got = torch.vmap(lambda *given: function(*given, *more, **options), tuple(places))(*batches)
    for i in range(size):
        member = [t if at is None else t.select(at, i) for t, at in zip(batches, places, strict=True)]
        want = function(*member, *more, **options)
        for found, right in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            assert_near(found[i], right.double(), made[0].dtype, 64)


@pytest.mark.slow
@LAW
@given(st.sampled_from(sorted(DIFFERENTIATED)), st.lists(seeds, min_size=2, max_size=4, unique=True))
@in_time
def test_one_compiled_function_takes_all_sizes(spent, name, drawings):
    torch.compiler.reset()
    options = {"check": False} if "entropy" in name else {}
    run = functools.partial(DIFFERENTIATED[name][0], **options)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in drawings:
        problem = drawn(name, seed)
        if problem:
            assert_gradients(name, compiled, *problem, {})


def gaps(t):
    """Whether other numbers lie between those of a tensor, none of which lies where another does."""
    return t.numel() and sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) >= t.numel()


LISTED = st.lists(
    st.tuples(
        st.sampled_from([(), (0,), (1,), (5,), (3, 7), (2, 1, 4), (2, 0, 3), (1031,)]),
        st.sampled_from([torch.clone, transposed, one_off, deep, stepped, odd_rows]),
    ),
    min_size=1,
    max_size=4,
)


@LAW
@given(seeds, LISTED, st.sampled_from(["float64", "float32", "bfloat16", "float16"]), st.integers(0, 2**6 - 1))
@in_time
def test_steps_of_any_list_are_those_of_torch(spent, seed, listed, kind, bits):
    """Of any shapes without gaps; what has gaps is refused, and left as it was."""
    single, amsgrad, masters, maximize, on_device, clipped = ((bits >> i) & 1 for i in range(6))
    dtype, half = getattr(torch, kind), kind in ("bfloat16", "float16")
    wide = torch.float32 if half and single else dtype
    masters = masters and half and single
    ps, gs, ms, vs = (
        [how(numbers(seed + 9 * i + j, shape, dtype).abs().add(0.5).to(dtype if i == 0 else wide)) if shape
         else numbers(seed + 9 * i + j, shape, dtype if i == 0 else wide).abs().add(0.5)
         for j, (shape, how) in enumerate(listed)]
        for i in range(4)
    )  # fmt: skip
    exact = [p.float() for p in ps] if masters else []
    tops = [v.clone(memory_format=torch.preserve_format) for v in vs] if amsgrad else []
    *own, largest = [[t.to(torch.float64, copy=True) for t in of] for of in (exact or ps, ms, vs, tops)]
    before = [t.clone() for t in (*ps, *ms, *vs)]
    norm = torch.tensor(3.0, device=DEVICE) if clipped else None
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for step in (1, 2):
        factor = (-1 if maximize else 1) * (1 / (3 + 1e-6) if clipped else 1)
        torch.optim._functional.adamw(
            own[0], [factor * g.double() for g in gs], own[1], own[2], largest,
            [torch.tensor(step - 1.0) for _ in ps], foreach=False, capturable=False, differentiable=False, fused=False,
            grad_scale=None, found_inf=None, has_complex=False, amsgrad=bool(amsgrad), beta1=0.9, beta2=0.999, lr=0.01,
            weight_decay=0.01, eps=1e-8, maximize=False,
        )  # fmt: skip
        options = {"step": count if on_device else step, "lr": 0.01, "norm": norm, "maximize": bool(maximize)}
        if any(gaps(p) for p in ps):
            with pytest.raises(ValueError, match="adamw_step: expected .* without gaps, got .*; call contiguous"):
                fusebook.adamw_step(ps, gs, ms, vs, tops, exact, **options)
            assert all(torch.equal(now, then) for now, then in zip((*ps, *ms, *vs), before, strict=True))
            return
        fusebook.adamw_step(ps, gs, ms, vs, tops, exact, **options)
    for got, want in zip((exact or ps, ms, vs, tops), (*own, largest), strict=True):
        for found, right in zip(got, want, strict=True):
            assert_near(found, right, found.dtype, 16)
    for p, x in zip(ps, exact, strict=False):
        assert_near(p, x.double(), dtype, 1)  # the interpreter cuts digits off, a GPU rounds


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@LAW
@given(st.lists(st.tuples(st.sampled_from(sorted(OURS)), seeds), min_size=2, max_size=4))
@in_time
def test_threads_with_problems_of_their_own(spent, chosen):
    """Each with a stream of its own, three times, from the first call on."""
    problems = []
    for name, seed in chosen:
        op, variant = OURS[name]
        made = op.made(explore._small(op.draw(random.Random(seed))), DEVICE)
        if numel(made) <= 2**18 and not variant.in_place:
            problems.append((variant, made, check.yardstick(op, made)))
    together, outs = threading.Barrier(max(1, len(problems))), [[] for _ in problems]

    def work(i):
        variant, made, _ = problems[i]
        with torch.cuda.stream(torch.cuda.Stream()):
            given = made if variant.prepare is None else variant.prepare(*made)
            together.wait()
            try:
                outs[i] += [variant.run(*given) for _ in range(3)]
            except (NotImplementedError, ValueError, TypeError):
                pass

    torch.cuda.synchronize()
    with ThreadPoolExecutor(max(1, len(problems))) as pool:
        list(pool.map(work, range(len(problems))))
    torch.cuda.synchronize()
    for (variant, _, yard), found in zip(problems, outs, strict=True):
        for out in found:
            assert yard.rounded > 0.25 or yard.judge(out, variant.math).ok, yard.where(out)
