"""What every launcher promises: however its tensors lie, whoever calls it, wherever it runs.

Not edited when a kernel is added: it reads the cards.
"""

import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils._pytree as pytree
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from fusebook.cards import OPS
from fusebook.measure import bench, check
from fusebook.measure.inputs import generator

OURS = [
    pytest.param(op, variant, id=f"{op.name}-{name}")
    for op in OPS.values()
    for name, variant in op.variants.items()
    if name.startswith("fusebook") and set(variant.needs) <= {"cuda"}  # called from torch
]
each_of_ours = pytest.mark.parametrize(("op", "variant"), OURS)
#: What the interpreter hardly breaks: it keeps no plans, its numbers lie anywhere, int32 ends beyond its memory.
seldom_interpreted = pytest.mark.slow_interpreted
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _what_is_here(request):
    if "variant" in request.fixturenames:
        variant = request.getfixturevalue("variant")
        if why := bench.missing(variant):
            pytest.skip(why)
        if variant.math and not torch.cuda.is_available():
            pytest.skip("TF32 is not interpreted: its variants are the others")


def once_an_operator(function):
    """Found once for an operator, whose name stands for it: all of its variants ask, in many tests."""
    found = functools.cache(lambda name, *more: function(OPS[name], *more))
    return lambda op, *more: found(op.name, *more)


@once_an_operator
def usual(op):
    """The smallest edge at which nothing is empty, no axis is broadcast, and the result has no NaN."""
    return min(filter(functools.partial(plain, op), op.edges), key=volume)


def plain(op, dims):
    if any(v < 2 for v in sizes(dims).values()):
        return False
    found = op.reference(*op.make(generator(0, "cpu"), torch.float32, **dims))
    return all(torch.isfinite(t.double()).all() for t in flat(found))


@once_an_operator
def others(op, count):
    """`count` sizes, each a little larger than those of `usual`, in all or in one, whose inputs are built alike."""
    dims, found = usual(op), []
    for more in range(1, 5):
        for larger in (sizes(dims), *([k] for k in sizes(dims))):
            near = dims | {k: dims[k] + more for k in larger}
            if built(op, near) == built(op, dims) and plain(op, near):
                found.append(near)
    assert len(found) >= count
    return found[:count]


def built(op, dims):
    """What inputs have in common that differ in size alone."""
    made = op.make(generator(0, "cpu"), op.dtypes[0], **dims)
    return [(t.dim(), t.is_contiguous(), 1 in t.shape) for t in flat(made)], pytree.tree_structure(made)


def sizes(dims):
    return {k: v for k, v in dims.items() if isinstance(v, int)}


def volume(dims):
    return math.prod(sizes(dims).values())


def problem(op, variant, dims, device, seed=0, dtype=None, numbers=None):
    """Inputs by the card, their single numbers those of `numbers` if given, and what the variant takes of them."""
    made = op.make(generator(seed, device), dtype or op.dtypes[0], **dims)
    if numbers is not None:
        made = tuple(b if isinstance(b, float) else a for a, b in zip(made, numbers, strict=True))
    return made, variant.prepare(*made) if variant.prepare else made


def assert_right(op, variant, made, out):
    yard = check.yardstick(op, made)
    assert yard.judge(out, variant.math).ok, yard.where(out)


def flat(value):
    """The tensors in arguments or results."""
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in flat(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def changed(value, change):
    """The same arguments with `change` applied to their tensors."""
    if isinstance(value, (tuple, list)):
        return type(value)(changed(v, change) for v in value)
    return change(value) if isinstance(value, torch.Tensor) else value


# PyTorch


class _Operators(TorchDispatchMode):
    """Takes down the calls of operators of ours."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fusebook":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@each_of_ours
def test_its_operators_are_registered_whole(op, variant, device):
    """Schema, autograd, fake tensors, and AOTAutograd, as PyTorch checks them."""
    _, arguments = problem(op, variant, usual(op), device)
    with torch.no_grad(), _Operators() as seen:
        variant.run(*arguments)
    assert seen.calls, "torch.compile would look inside of what is no operator"
    once = {func: (args, kwargs) for func, args, kwargs in seen.calls}
    gradients = differentiable(variant, arguments)
    for func, (args, kwargs) in once.items():
        if gradients:  # which then are checked too
            args = changed(args, lambda t: t.detach().requires_grad_() if t.is_floating_point() else t)
        torch.library.opcheck(func, args, kwargs)


@each_of_ours
def test_it_is_one_graph_under_torch_compile_and_stays_it_at_other_sizes(op, variant, device):
    torch.compiler.reset()
    counter, graphs = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager"), []
    compiled = torch.compile(variant.run, fullgraph=True, dynamic=True, backend=counter)
    numbers, _ = problem(op, variant, usual(op), device)  # another number is another graph, as PyTorch has it
    for dims in (usual(op), *others(op, 2)):
        made, arguments = problem(op, variant, dims, device, numbers=numbers)
        with torch.fx.experimental._config.patch(use_duck_shape=False):  # what is equal here need not be so in others
            out = compiled(*arguments)
        assert_right(op, variant, made, out)
        graphs.append(counter.frame_count)
    assert graphs[0] and graphs == [graphs[0]] * 3, "compiled anew for another size"


# Gradients


def floats(arguments):
    return [t for t in flat(arguments) if t.is_floating_point()]


def differentiable(variant, arguments):
    """Whether a result keeps how it came about, where an argument requires a gradient."""
    own = changed(arguments, lambda t: t.detach().requires_grad_() if t.is_floating_point() else t)
    try:
        out = [t for t in flat(variant.run(*own)) if t.requires_grad]
        return bool(out and torch.autograd.grad(out[0].sum(), floats(own), allow_unused=True))
    except (NotImplementedError, RuntimeError):
        return False


@each_of_ours
def test_gradients_agree_with_differences_or_are_refused(op, variant, device):
    if variant.math:
        pytest.skip("there is no TF32 in float64")
    _, arguments = problem(op, variant, usual(op), device, dtype=torch.float64)
    own = changed(arguments, lambda t: t.detach().requires_grad_() if t.is_floating_point() else t)
    try:
        out = variant.run(*own)
    except (NotImplementedError, TypeError) as refusal:
        pytest.skip(f"refused: {refusal}")
    try:
        if all(not t.is_floating_point() for t in flat(out)):
            return  # labels have no gradient, and PyTorch says so
        assert any(t.requires_grad for t in flat(out)), "a gradient is lost without a word"
        torch.autograd.grad(sum(t.double().sum() for t in flat(out) if t.requires_grad), floats(own), allow_unused=True)
    except (NotImplementedError, RuntimeError, ValueError) as refusal:
        if "gradient" not in str(refusal):
            raise
        return
    at = [i for i, v in enumerate(own) if floats([v])]

    def function(*given):
        whole = list(own)
        for i, v in zip(at, pytree.tree_unflatten(list(given), spec), strict=True):
            whole[i] = v
        return tuple(t for t in flat(variant.run(*whole)) if t.requires_grad)

    given, spec = pytree.tree_flatten([own[i] for i in at])
    assert torch.autograd.gradcheck(function, given, fast_mode=True, nondet_tol=1e-9)


# Memory


def gaps(x):
    """The same numbers, every second one of memory; what lies between them is NaN, or 0 for integers."""
    between = math.nan if x.is_floating_point() else 0
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), between, dtype=x.dtype, device=x.device)
    view = wide[..., 1::2]
    view.copy_(x)
    return view


def transposed(x):
    """The same numbers, with the first axis side by side in memory."""
    return x.mT.contiguous().mT if x.dim() > 1 else x


def negated(x):
    """The same numbers, of the other sign in memory: a view that negates, as the imaginary part of a conjugate is."""
    return torch._neg_view(-x)


def shifted(x):
    """The same numbers, one element further in memory than an allocation begins."""
    memory = torch.full((x.numel() + 1,), math.nan if x.is_floating_point() else 0, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


#: Views whose numbers lie in a row: which kernel is launched does not hang on them, but for how it reads.
ELSEWHERE = (negated, shifted)


@pytest.mark.parametrize(
    "least", [0, pytest.param(2**13, marks=pytest.mark.slow)], ids=["small", "large"]
)  # the interpreter gathers numbers one after another
@pytest.mark.parametrize(
    "change",
    [gaps, *(pytest.param(change, marks=seldom_interpreted) for change in (transposed, *ELSEWHERE))],
    ids=lambda change: change.__name__,
)
@each_of_ours
def test_a_view_is_right_or_refused(op, variant, change, least, device):
    """All arguments that way, and then each alone."""
    if least and device == "cpu" and change in ELSEWHERE:
        pytest.skip("the interpreter reads numbers one after another, wherever they lie")
    fitting = []
    for dims in op.edges:
        made, arguments = problem(op, variant, dims, device)
        numbers = sum(t.numel() for t in flat(made))
        if least < numbers <= (least or 2**10) * 8 and all(t.numel() for t in flat(made)):
            fitting.append((dims, made, arguments))
    assert fitting or least
    if device == "cpu" and change in ELSEWHERE:
        fitting = fitting[:: max(1, len(fitting) - 1)]  # the first and the last
    for edge, (dims, made, arguments) in enumerate(fitting):
        yard = check.yardstick(op, made)
        at = [i for i, v in enumerate(arguments) if any(t.dim() for t in flat(v))]
        alone = [[i] for i in at if len(at) > 1]
        if device == "cpu":  # interpreted, each on one edge
            alone = alone[edge :: len(fitting)]
        for chosen in [at, *alone]:
            given = [
                changed(v, lambda t: change(t.clone())) if i in chosen else changed(v, torch.clone)
                for i, v in enumerate(arguments)
            ]
            try:
                out = variant.run(*given)
            except (NotImplementedError, ValueError) as refusal:
                fine, said = bool(str(refusal)), "refused without a message"
            else:
                fine, said = yard.judge(out, variant.math).ok, yard.where(out)
            assert fine, f"{dims}: {said}"


@each_of_ours
def test_a_batch_is_each_of_its_members_or_refused(op, variant, device, recwarn):
    """Every tensor has a batch of three; of the first one it is the last axis. Nothing is said of a slow way."""
    members = [pytree.tree_flatten(problem(op, variant, usual(op), device, seed)[1]) for seed in range(3)]
    columns, spec = list(zip(*(leaves for leaves, _ in members), strict=True)), members[0][1]
    tensors = [isinstance(column[0], torch.Tensor) for column in columns]

    def run(*given):
        given = iter(given)
        leaves = [next(given) if is_tensor else column[0] for is_tensor, column in zip(tensors, columns, strict=True)]
        return tuple(flat(variant.run(*pytree.tree_unflatten(leaves, spec))))

    batches = [torch.stack(column) for column, is_tensor in zip(columns, tensors, strict=True) if is_tensor]
    batches[0] = batches[0].movedim(0, -1).contiguous()
    places = (-1, *[0] * (len(batches) - 1))
    if op.name == "adamw_step":  # in place, of a list
        with pytest.raises(NotImplementedError, match="expected tensors, got batches of torch.vmap"):
            torch.vmap(run, places)(*batches)
        return
    got = torch.vmap(run, places)(*batches)
    assert not [w for w in recwarn if "batching rule" in str(w.message)]
    for i in range(3):
        want = run(*(batch.select(at, i) for batch, at in zip(batches, places, strict=True)))
        for found, right in zip(got, want, strict=True):
            if variant.math:
                assert_right(op, variant, pytree.tree_unflatten(members[i][0], spec), tuple(g[i] for g in got))
                break
            torch.testing.assert_close(found[i], right, equal_nan=True)


@seldom_interpreted
@each_of_ours
def test_a_view_that_overlaps_itself_is_right_or_refused(op, variant, device):
    """Each argument in turn: its first row, over and over, of one row of memory."""
    _, arguments = problem(op, variant, usual(op), device)
    at = [i for i, v in enumerate(arguments) if isinstance(v, torch.Tensor) and v.dim() and len(v) > 1]
    for i in at:
        view = arguments[i][:1].expand_as(arguments[i])
        assert view.stride(0) == 0
        apart, overlapping = list(arguments), list(arguments)
        apart[i], overlapping[i] = view.contiguous(), view
        try:
            got = variant.run(*overlapping)
        except (NotImplementedError, ValueError) as refusal:
            fine = bool(str(refusal))
            assert fine, "refused without a message"
        else:
            if variant.math:  # of fewer digits, which another order of sums shows
                assert_right(op, variant, apart, got)
            else:
                torch.testing.assert_close(got, variant.run(*apart), equal_nan=True)


@seldom_interpreted
@each_of_ours
def test_a_call_is_right_whatever_the_calls_before_it_were(op, variant, device):
    """Whatever is remembered of a call holds for other numbers at other addresses, and for no other shape or dtype."""
    first, second, third = usual(op), *others(op, 2)
    calls = [(dims, change) for dims in (first, second, first) for change in (torch.clone, shifted, torch.clone)]
    calls += [(third, shifted), (third, torch.clone)]  # the first call with these sizes is the one that lies badly
    if device == "cpu":  # interpreted, little is remembered
        calls = calls[:4]
    kept = []  # so that no memory is used twice
    for seed, (dims, change) in enumerate(calls):
        for dtype in op.dtypes[:2]:
            made, arguments = problem(op, variant, dims, device, seed, dtype)
            kept.append(changed(arguments, change))
            try:
                out = variant.run(*kept[-1])
            except NotImplementedError:  # of this dtype, say
                continue
            assert_right(op, variant, made, out)


@each_of_ours
def test_the_same_tensor_may_be_given_twice(op, variant, device):
    """Arguments of one shape and dtype, in each of which the first is given; then apart again."""
    _, arguments = problem(op, variant, usual(op), device)
    at = [i for i, v in enumerate(arguments) if isinstance(v, torch.Tensor)]
    for i in at:
        for j in at:
            a, b = arguments[i], arguments[j]
            if i < j and (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()):
                same, equal = list(arguments), list(arguments)
                same[j], equal[j] = a, a.clone()
                torch.testing.assert_close(variant.run(*same), variant.run(*equal), rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(variant.run(*same), variant.run(*equal), rtol=0, atol=0, equal_nan=True)


@each_of_ours
def test_integers_in_the_place_of_floats_are_refused_by_name(op, variant, device):
    _, arguments = problem(op, variant, usual(op), device)
    at = [i for i, v in enumerate(arguments) if floats([v])]
    for chosen in [at] + [[i] for i in at if len(at) > 1]:
        given = [changed(v, lambda t: t.to(torch.int32)) if i in chosen else v for i, v in enumerate(arguments)]
        with pytest.raises((TypeError, ValueError), match="int32"):
            variant.run(*given)


@seldom_interpreted
@each_of_ours
def test_more_elements_than_int32_can_number(op, variant, device, room):
    """The first size grows until all tensors together have them; interpreted, to a few, which tries the test itself."""
    # Two bytes, and the range of float32: a mean over so many rows is nothing in float16.
    dtype = torch.bfloat16 if torch.bfloat16 in op.dtypes else op.dtypes[0]
    dims = usual(op)
    first = next(iter(sizes(dims)))
    limit = 2**31 if device == "cuda" else 2**11
    while max(op.cost(1, **dims).read, op.cost(1, **dims).write) < limit:
        dims = dims | {first: 2 * dims[first] + 1}
    cost = op.cost(8, **dims)
    if device == "cuda":
        room(6 * (cost.read + cost.write))  # the reference is computed in float64, one operation after another
    made, arguments = problem(op, variant, dims, device, dtype=dtype)
    assert_right(op, variant, made, variant.run(*arguments))


# A GPU


@on_a_gpu
@each_of_ours
def test_it_can_be_captured_in_a_graph(op, variant):
    made, arguments = problem(op, variant, usual(op), "cuda")
    variant.run(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = variant.run(*arguments)
    made, others = problem(op, variant, usual(op), "cuda", seed=1)
    for t in flat(out):  # before the arguments, which they are where an operator works in place
        t.zero_()
    for mine, other in zip(flat(arguments), flat(others), strict=True):
        mine.copy_(other)
    graph.replay()
    assert_right(op, variant, made, out)


@on_a_gpu
@each_of_ours
def test_it_runs_on_the_stream_of_its_caller(op, variant):
    made, arguments = problem(op, variant, usual(op), "cuda")
    variant.run(*changed(arguments, torch.clone))  # compiled
    late = changed(arguments, torch.zeros_like)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # cycles, about 50 ms: work on another stream would overtake this
        for mine, other in zip(flat(late), flat(arguments), strict=True):
            mine.copy_(other)
        out = variant.run(*late)
    torch.cuda.synchronize()
    assert_right(op, variant, made, out)


on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@on_two_gpus
@each_of_ours
def test_it_runs_on_the_device_of_its_tensors_whichever_is_current(op, variant):
    """By a first call and by its plan, of which each device has its own."""
    devices = "cuda:0", "cuda:1"
    problems = {device: problem(op, variant, usual(op), device) for device in devices}
    for current, device in [(0, 1), (1, 1), (0, 1), (0, 0), (1, 0), (1, 1)]:
        made, arguments = problems[devices[device]]
        for _ in range(2):
            given = changed(arguments, torch.clone) if variant.in_place else arguments
            with torch.cuda.device(current):
                out = variant.run(*given)
                assert torch.cuda.current_device() == current
            assert {t.device for t in flat(out)} == {torch.device(devices[device])}
            assert_right(op, variant, made, out)


@on_two_gpus
@each_of_ours
def test_a_graph_of_another_device_than_the_current_one(op, variant):
    made, arguments = problem(op, variant, usual(op), "cuda:1")
    with torch.cuda.device("cuda:1"):  # a plan is made on the current device alone, and the graph is to be of a plan
        variant.run(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream("cuda:1")):
        out = variant.run(*arguments)
    made, others = problem(op, variant, usual(op), "cuda:1", seed=1)
    for t in flat(out):  # before the arguments, which they are where an operator works in place
        t.zero_()
    for mine, other in zip(flat(arguments), flat(others), strict=True):
        mine.copy_(other)
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    graph.replay()
    torch.cuda.synchronize(1)
    assert_right(op, variant, made, out)


@on_a_gpu
@each_of_ours
def test_threads_do_not_disturb_each_other(op, variant):
    """Each with a stream and sizes of its own, from their first call on."""
    problems = [problem(op, variant, dims, "cuda") for dims in (usual(op), *others(op, 3))]
    outs, together = [[] for _ in problems], threading.Barrier(len(problems))

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            together.wait()
            for _ in range(20):
                outs[i].append(variant.run(*changed(problems[i][1], torch.clone)))

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(problems)) as pool:
        list(pool.map(work, range(len(problems))))
    torch.cuda.synchronize()
    for (made, _), found in zip(problems, outs, strict=True):
        assert len(found) == 20
        for out in found:
            assert_right(op, variant, made, out)
