"""What every operator promises, on every edge of its card: accuracy, special values, bits, gradients, layouts, calls.

Not edited when a kernel is added: it reads the cards. The file of an operator has what is special to it.
"""

import dataclasses
import functools
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils._pytree as pytree
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from fusebook import PackedWeight
from fusebook.cards import OPS
from fusebook.measure import bench, check
from fusebook.measure.inputs import generator, poison
from toy import verify

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
#: The edges on which dtypes are interpreted that take the path of another one: small, and not of one element.
TWINS = (1, 2)
#: More elements than that are interpreted in one dtype where slow tests are left out.
LARGE = 2**14
#: Operators of which each row is computed alone, with their gradients.
ROWS = ("softmax", "rms_norm", "add_rms_norm", "layer_norm")


@pytest.fixture(autouse=True)
def _what_is_here(request):
    if "variant" in request.fixturenames:
        variant = request.getfixturevalue("variant")
        if why := bench.missing(variant):
            pytest.skip(why)
        if variant.math and not torch.cuda.is_available():
            pytest.skip("TF32 is not interpreted: its variants are the others")


def once_an_operator(function):
    """Computed once for each operator, by its name: all its variants ask, in many tests."""
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


@once_an_operator
def numbers_at_edges(op):
    """How many numbers the inputs have at each edge: none where one of them is empty."""
    made = ([t.numel() for t in flat(op.make(generator(0, "cpu"), op.dtypes[0], **dims))] for dims in op.edges)
    return [sum(counts) * all(counts) for counts in made]


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


def assert_right_or_refused(yard, variant, given, what, words=""):
    """Within the limit, or refused by a message with these words in it."""
    try:
        out = variant.run(*given)
    except (NotImplementedError, ValueError) as refusal:
        fine, said = bool(str(refusal)) and words in str(refusal), f"refused: {refusal}"
    else:
        fine, said = yard.judge(out, variant.math).ok, yard.where(out)
    assert fine, f"{what}: {said}"


def flat(value):
    """The tensors in arguments or results."""
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in flat(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def opened(arguments):
    """Arguments with the fields of those that are dataclasses, such as a packed weight."""
    return [[*vars(v).values()] if dataclasses.is_dataclass(v) else v for v in arguments]


def changed(value, change):
    """The same arguments with `change` applied to their tensors."""
    if isinstance(value, (tuple, list)):
        return type(value)(changed(v, change) for v in value)
    return change(value) if isinstance(value, torch.Tensor) else value


def edges(op, least=0, most=None):
    """The edges of a card whose sizes are `least` or more; interpreted, those of `most` elements or fewer."""
    most = most if most and not torch.cuda.is_available() else math.inf
    return [dims for dims in op.edges if min(sizes(dims).values()) >= least and moved(op, dims) <= most]


def moved(op, dims):
    """How many elements a problem reads and writes."""
    cost = op.cost(1, **dims)
    return cost.read + cost.write


def problems(op, variant, dims, device):
    """The problem in each dtype that the variant takes: the dtype, the inputs, and what the variant gets.

    Interpreted, float16 takes the path of bfloat16, and TF32 takes float32 alone.
    """
    for dtype in op.dtypes:
        twin = device == "cpu" and dtype == torch.float16 and torch.bfloat16 in op.dtypes
        if not twin and (not variant.math or dtype == torch.float32):
            yield dtype, *problem(op, variant, dims, device, dtype=dtype)


# Results


def _cases():
    for op in OPS.values():
        told = torch.bfloat16 if torch.bfloat16 in op.dtypes else op.dtypes[0]
        for name, variant in op.variants.items():
            # What compiles again for every shape takes seconds a case: one edge is enough, and on a CPU one dtype.
            # One case says what is missing here.
            absent = bool(bench.missing(variant))
            dtypes = [told] if absent or (variant.recompiles and not torch.cuda.is_available()) else op.dtypes
            for edge, dims in enumerate(op.edges[:1] if absent or variant.recompiles else op.edges):
                for dtype in dtypes:
                    # Interpreted, float16 takes the path of bfloat16.
                    twin = dtype == torch.float16 and torch.bfloat16 in op.dtypes
                    if twin and not torch.cuda.is_available() and edge not in TWINS:
                        continue
                    again = moved(op, dims) > LARGE and dtype != told
                    marks = [seldom_interpreted] if twin or again or variant.recompiles else []
                    case = "-".join([op.name, name, *map(str, dims.values()), str(dtype)[6:]])
                    yield pytest.param(op, name, dims, dtype, id=case, marks=marks)


@pytest.mark.parametrize(("op", "name", "dims", "dtype"), list(_cases()))
def test_a_variant_stays_within_the_limit(op, name, dims, dtype, device):
    if why := bench.missing(op.variants[name]):
        pytest.skip(f"{name} {why}")
    if device == "cpu" and volume(dims) > 2**22:
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
    for dims in itertools.chain(*op.configs.values()):
        cost = op.cost(4, **dims)
        assert cost.read >= 0 and cost.write >= 0 and cost.flop >= 0
        for variant in op.variants.values():
            own = variant.cost(4, **dims) if variant.cost else cost
            assert own.read >= cost.read and own.write >= cost.write, "the op's cost is the least there is"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_inputs_are_the_same_for_the_same_seed(op, device):
    made, again = (op.make(generator(7, device), op.dtypes[0], **op.edges[0]) for _ in range(2))
    for a, b in zip(made, again, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def spoilt(x):
    """A copy whose first rows hold NaN, an infinity of either sign, and nothing but -infinity."""
    x = x.clone()
    values = (0, math.nan), (-1, math.inf), (x.shape[-1] // 2, -math.inf), (..., -math.inf)
    for row, (place, value) in zip(x if x.dim() > 1 else x[None], values, strict=False):
        row[..., place] = value
    return x


@each_of_ours
def test_special_values_are_where_float64_has_them(op, variant, device):
    """In each floating-point argument in turn; a variant that checks its arguments names the first one."""
    for dims in edges(op, 2, 2**13):
        for dtype, made, _ in problems(op, variant, dims, device):
            for i, value in enumerate(made):
                if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.dim():
                    continue
                given = (*made[:i], spoilt(value), *made[i + 1 :])
                yard = check.yardstick(op, given)
                what = f"argument {i}, {dims}, {dtype}"
                try:
                    arguments = variant.given(*given)
                except ValueError:  # a scale that is packed
                    with pytest.raises(ValueError, match="expected finite scales"):
                        variant.given(*given)
                    continue
                assert_right_or_refused(yard, variant, arguments, what, "got nan at")


@each_of_ours
def test_every_run_gives_the_same_bits(op, variant, device, request):
    """Whatever memory held before. ScatterND's strategies other than sorted add in no fixed order on a GPU."""
    name = request.node.callspec.id
    if device == "cuda" and any(part in name for part in ("scatter", "embedding", "onnx")) and "sorted" not in name:
        pytest.skip("adds in no fixed order")
    for dims in edges(op, 0, 2**13):
        for dtype, made, given in problems(op, variant, dims, device):
            yard = check.yardstick(op, made)
            found = []
            for _ in range(20 if device == "cuda" else 2):
                poison(yard.outputs(torch.device(device)))
                given = variant.given(*made)
                found.append([t.clone() for t in flat(variant.run(*given))])
            for again in found[1:]:
                torch.testing.assert_close(again, found[0], rtol=0, atol=0, equal_nan=True, msg=f"{dims}, {dtype}")


#: Each row is computed alone, and its width alone decides how it is added up.
ALONE = [op for op in OPS.values() if op.name.removesuffix("_backward").removesuffix("_fp8") in ROWS]


@pytest.mark.parametrize("op", ALONE, ids=lambda op: op.name)
def test_a_row_is_the_same_whatever_rows_it_comes_with(op, device):
    """Few of them or many; rows of NaN and of infinity before and behind it."""
    variant = op.variants["fusebook"]
    for dims in edges(op, 2, 2**17):
        rows = 8 if device == "cpu" else 20000 if dims["N"] < 1000 else 300
        for dtype, made, _ in problems(op, variant, dims | {"M": rows}, device):
            at = [i for i, t in enumerate(made) if t.dim() > 1]
            few, beside = list(made), list(made)
            for i in at:
                few[i], beside[i] = made[i][:2].clone(), made[i].clone()
                beside[i][::2] = math.nan
                beside[i][2::4] = math.inf
            found = (flat(variant.run(*given)) for given in (made, few, beside))
            bits = ([t.view(torch.uint8) if t.itemsize == 1 else t for t in of if t.dim() > 1] for of in found)
            whole, few, beside = bits
            for a, b, c in zip(whole, few, beside, strict=True):
                assert torch.equal(a[:2], b) and torch.equal(a[1::2], c[1::2]), f"{dims}, {dtype}"


@each_of_ours
def test_each_size_may_be_zero_or_is_refused(op, variant, device):
    for name in sizes(usual(op)):
        dims = usual(op) | {name: 0}
        try:
            made, given = problem(op, variant, dims, device)
            yard = check.yardstick(op, made)
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError):  # no inputs of that size
            continue
        assert_right_or_refused(yard, variant, given, dims, ": expected ")


# PyTorch


class _Operators(TorchDispatchMode):
    """Notes the calls of Fusebook's operators."""

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
    packed = []
    for dims in (usual(op), *others(op, 2)):
        made, arguments = problem(op, variant, dims, device, numbers=numbers)
        shapes = [v.shape for v in arguments if isinstance(v, PackedWeight)]
        if shapes != packed and graphs:  # so is a packed weight of another shape
            continue
        packed = shapes
        with torch.fx.experimental._config.patch(use_duck_shape=False):  # what is equal here need not be so in others
            out = compiled(*arguments)
        assert_right(op, variant, made, out)
        graphs.append(counter.frame_count)
    assert len(graphs) > 1 and graphs[0] and set(graphs) == {graphs[0]}, "compiled anew for another size"


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
def test_gradients_in_every_dtype_are_those_of_float64(op, variant, device):
    """Inputs are within one of zero, because the gradient of a saturated softmax cancels."""
    if variant.math:
        pytest.skip("the gradients are those without TF32")
    if any(isinstance(v, PackedWeight) for v in problem(op, variant, usual(op), device)[1]):
        pytest.skip("has no gradient of a packed weight; test_quantized.py has that of x")
    if not differentiable(variant, problem(op, variant, usual(op), device)[1]):
        pytest.skip("has no gradient, and says so")
    for dims in edges(op, 2, 2**13):
        for dtype, made, _ in problems(op, variant, dims, device):
            made = changed(made, lambda t: t.clamp(-1, 1) if t.is_floating_point() else t)
            rng = generator(1, device)
            of = [torch.randn(t.shape, generator=rng, device=device).to(t.dtype) for t in flat(variant.run(*made))]
            meaning = functools.partial(gradients, op.reference, len(made))
            meant = dataclasses.replace(op, reference=meaning, meaning=None)
            got, yard = gradients(variant.run, len(made), *made, *of), check.yardstick(meant, (*made, *of))
            assert yard.judge(got).ok, f"{dims}, {dtype}: {yard.where(got)}"


def gradients(run, count, *given):
    """The gradients of what `run` makes of so many arguments, for those of its results, which come after these."""
    own = changed(given[:count], lambda t: t.detach().requires_grad_() if t.is_floating_point() else t)
    with torch.enable_grad():
        return torch.autograd.grad(flat(run(*own)), floats(own), given[count:])


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
    """The same numbers, in every second element of memory; the others are NaN, or 0 for integers."""
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
    """All arguments together, and then each alone."""
    if least and device == "cpu" and change in ELSEWHERE:
        pytest.skip("the interpreter reads numbers one after another, wherever they lie")
    fitting = [
        dims
        for dims, numbers in zip(op.edges, numbers_at_edges(op), strict=True)
        if least < numbers <= (least or 2**10) * 8
    ]
    assert fitting or least
    if device == "cpu" and change in ELSEWHERE:
        fitting = fitting[:: max(1, len(fitting) - 1)]  # the first and the last
    for edge, dims in enumerate(fitting):
        made, arguments = problem(op, variant, dims, device)
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
            assert_right_or_refused(yard, variant, given, dims)


@each_of_ours
def test_a_batch_is_each_of_its_members_or_refused(op, variant, device, recwarn):
    """Every tensor has a batch of three; of the first one it is the last axis. No warning of a slow path appears."""
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
    for mine, other in zip(flat(opened(arguments)), flat(opened(others)), strict=True):
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
    """Each thread has its own stream and sizes, from its first call on."""
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
