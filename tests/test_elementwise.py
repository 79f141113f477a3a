"""What is special to expressions of neighbours: shapes that broadcast, strides, dtypes, several results, gradients."""

import itertools
import math

import pytest
import torch

import fusebook
from fusebook.cards.elementwise import ADD_SUB, EXP
from fusebook.kernels import elementwise
from fusebook.kernels._call import FLOATING
from fusebook.measure import bench, check
from fusebook.measure.inputs import generator, rough
from fusebook.measure.op import Variant
from toy import toy, variant

#: Each public function with what PyTorch says it is, and its number of operands.
MEANING = {
    "multiply": (lambda x, y: x * y, 2),
    "double": (lambda x: x + x, 1),
    "add_sub": (lambda x, y: (x + y, x - y), 2),
    "multiply_add": (lambda x, y, z: x * y + z, 3),
    "silu": (torch.nn.functional.silu, 1),
    "silu_mul": (lambda x, y: torch.nn.functional.silu(x) * y, 2),
    "add_add_multiply": (lambda x, y, z, w: (x + y + z) * w, 4),
    "exp": (torch.exp, 1),
}
SEVERAL = [name for name, (_, operands) in MEANING.items() if operands > 1]


def tuple_of(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def agree(name, operands, layout=True):
    """The results have the numbers, the shape, the dtype and, where operands lie alike, the layout of PyTorch's."""
    wanted = tuple_of(MEANING[name][0](*operands))
    got = tuple_of(getattr(fusebook, name)(*operands))
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if layout:
            assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, equal_nan=True)


def drawn(*shapes, device, dtype=torch.float32):
    rng = generator(0, device)
    return [torch.randn(shape, generator=rng, device=device, dtype=dtype) for shape in shapes]


# Shapes and strides ---------------------------------------------------------------------------------------------------

SHAPES = {
    "numbers": ((), ()),
    "a number and a matrix": ((), (7, 5)),
    "one element": ((1, 1), (1,)),
    "a row": ((6, 70), (70,)),
    "a column": ((6, 70), (6, 1)),
    "a row and a column": ((1, 70), (6, 1)),
    "channels": ((2, 3, 4, 5), (3, 1, 1)),
    "four axes that do not fold": ((2, 1, 3, 1), (5, 1, 7)),
    "five axes that do not fold": ((2, 1, 3, 1, 2), (4, 1, 5, 1)),
    "nothing": ((0, 5), (5,)),
    "nothing by broadcasting": ((3, 0), (1, 1)),
}


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_broadcast_as_in_pytorch(shapes, name, device):
    operands = drawn(*itertools.islice(itertools.cycle(shapes), MEANING[name][1]), device=device)
    agree(name, operands, layout=False)


def test_every_layout_of_two_operands(device):
    base = torch.randn(8, 12, 6, device=device)
    views = {
        "dense": base,
        "gaps": torch.randn(8, 12, 12, device=device)[..., ::2],
        "rows left out": torch.randn(16, 12, 6, device=device)[::2],
        "turned round": base.flip(0),
        "transposed": torch.randn(6, 12, 8, device=device).permute(2, 1, 0),
        "inner axes exchanged": torch.randn(8, 6, 12, device=device).mT,
        "outer axes exchanged": torch.randn(12, 8, 6, device=device).transpose(0, 1),
        "one row for all": base[:, :1].expand(8, 12, 6),
        "one number for all": base[:1, :1, :1].expand(8, 12, 6),
        "in the middle": torch.randn(10, 14, 9, device=device)[1:9, 1:13, 2:8],
        "overlapping itself": torch.randn(200, device=device).as_strided((8, 12, 6), (7, 2, 1)),
    }
    for one, other in itertools.product(views, ("dense", "transposed", "one row for all")):
        for a, b in zip(fusebook.add_sub(views[one], views[other]),
                        (views[one] + views[other], views[one] - views[other]), strict=True):  # fmt: skip
            assert torch.equal(a, b), (one, other)


def test_results_lie_as_operands_that_lie_alike(device):
    for x in (
        torch.randn(5, 7, device=device).mT,
        torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last),
        torch.randn(3, 8, device=device)[:, ::2],
        torch.randn(4, 1, 6, device=device).expand(4, 3, 6),
        torch.randn(3, 5, 7, 9, device=device)[:, :4, :6, :8].permute(2, 0, 3, 1),  # four axes that do not fold
    ):
        agree("double", [x])
        agree("add_sub", [x, x.clone(memory_format=torch.preserve_format)], layout=False)
    x = torch.randn(5, 7, device=device).mT
    assert fusebook.multiply(x, torch.ones(7, 5, device=device)).is_contiguous()


def test_what_lies_alike_folds_into_one_axis():
    alike = elementwise._fold((4, 5, 6), (30, 6, 1), [(30, 6, 1)] * 2)
    assert [axis.size for axis in alike] == [120]
    turned = elementwise._fold((4, 5, 6), (1, 4, 20), [(1, 4, 20)])  # dense, in another order
    assert [axis.size for axis in turned] == [120]
    row = elementwise._fold((4, 5, 6), (30, 6, 1), [(30, 6, 1), (0, 0, 1)])
    assert [(axis.size, *axis.ins) for axis in row] == [(20, 6, 0), (6, 1, 1)]
    assert elementwise._fold((1, 1), (1, 1), [(1, 1)]) == []


def test_neighbours_of_an_operand_share_a_tile_along_whatever_axis_they_lie():
    dense = (128 * 64, 64, 1)
    for other in ((1, 4096, 4096 * 128), (64, 4096 * 64, 1), (128, 1, 4096 * 128)):
        plan = elementwise._elementwise_plan((4096, 128, 64), dense, (dense, other), 4, (9, 0))
        R, C = plan.axes[-2:]
        assert C.out == 1 == C.ins[1] or (plan.tiled and R.ins[1] == 1), "neighbours lie in different programs"


def test_rows_are_whole_groups_and_a_column_asks_for_no_tiles():
    for n, group in ((4096, 8), (4092, 4), (4095, 1)):
        plan = elementwise._elementwise_plan((128, n), (n, 1), ((n, 1), (1, 0)), 2, (9, 0))
        assert not plan.tiled and plan.constants["GROUP"] == group
    turned = elementwise._elementwise_plan(
        (128, 64, 256), (2**14, 256, 1), ((2**14, 256, 1), (64, 1, 64 * 128)), 2, (9, 0)
    )
    assert turned.tiled


def test_few_steps_that_lie_far_apart_are_taken_by_a_tile():
    # [M, N] by a transposed [M, N]: whose columns of 16 a block of 1024 results would read 1 number of 8 of.
    plan = elementwise._elementwise_plan
    few, near = ((16, 50257), (50257, 1), ((50257, 1), (1, 16))), ((50257, 16), (16, 1), ((16, 1), (1, 50257)))
    assert plan(*few, 4, (9, 0)).tiled and plan(*few, 4, (9, 0)).constants["ROWS"] == 16
    assert not plan(*near, 4, (9, 0)).tiled, "a block has all rows of a line of memory"
    assert not plan(*few[:2], ((50257, 1), (1, 0)), 4, (9, 0)).tiled, "of a column nothing is left to read"
    assert plan(*few, 4, (9, 0)).constants["BLOCK"] == 256, "few rows make long ones"


def test_few_elements_that_lie_across_have_tiles_for_all_multiprocessors_or_none():
    for m, n in ((174, 250), (828, 107), (300, 3000), (5000, 5000)):
        plan = elementwise._elementwise_plan((m, n), (n, 1), ((n, 1), (1, m)), 4, (9, 0))
        assert plan.tiled == (m * n > 2**16)
        assert plan.programs >= min(80, m * n // 1024)


def test_few_elements_and_odd_rows_are_taken_one_by_one():
    plan = elementwise._elementwise_plan
    for given, single in (
        (((2, 326), (326, 1), ((326, 1),)), True),
        (((2000, 326), (326, 1), ((326, 1),)), False),
        (((652876, 5), (5, 1), ((69, 1),)), True),  # a view
        (((130577, 11), (11, 1), ((75, 1),)), True),
        (((130577, 10), (10, 1), ((75, 1),)), False),  # groups of two
        (((652876, 4), (4, 1), ((68, 1),)), False),  # a group a row
    ):
        found = plan(*given, 4, (9, 0))
        assert (found.constants["GROUP"] == 1) == single
        assert found.programs * found.constants["BLOCK"] >= torch.Size(given[0]).numel()


def test_operands_that_lie_across(device):
    """Tiles that are not full: of matrices, and of a batch along either axis."""
    x = torch.randn(3, 70, 45, device=device)
    for order in ((0, 2, 1), (2, 0, 1), (2, 1, 0)):
        across = x.permute(order).contiguous().permute([order.index(i) for i in range(3)])
        assert torch.equal(fusebook.multiply(x, across), x * across)
        assert torch.equal(fusebook.multiply(x[:, 2:40], across[:, 2:40]), (x * across)[:, 2:40])
        assert torch.equal(fusebook.multiply(x[1], across[2]), x[1] * across[2])


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=["float16", "float64"])
def test_rows_that_end_within_a_thread_s_elements(width, dtype, device):
    """Narrow slices, whose elements are counted along one axis, two or three: a thread passes the ends of rows."""
    x = torch.randn(3, 5, 11, width + 3, device=device).to(dtype)[..., :width]
    for view in (x[0], x[:, :4], x[:, :4, :10], x[:2, :, ::3].transpose(0, 1)):
        assert torch.equal(fusebook.double(view), 2 * view)
        assert torch.equal(fusebook.multiply(view, view[..., :1]), view * view[..., :1])


@pytest.mark.parametrize("name", MEANING)
def test_results_are_new_and_apart(name, device):
    operands = drawn(*[(9, 9)] * MEANING[name][1], device=device)
    got = tuple_of(getattr(fusebook, name)(*operands))
    places = [t.untyped_storage().data_ptr() for t in (*operands, *got)]
    assert len(set(places)) == len(places)
    before = [t.clone() for t in operands]
    for out in got:
        out.fill_(0)
    assert all(torch.equal(a, b) for a, b in zip(before, operands, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: 8 GiB and more")
def test_more_than_two_to_the_31_elements(room):
    room(24 * 2**30)
    x = torch.ones(2**31 + 5, device="cuda", dtype=torch.float16)
    assert (fusebook.double(x)[-5:] == 2).all()
    tall = torch.ones(2**16 + 1, 2**15 + 1, device="cuda", dtype=torch.float16)
    row = torch.full((2**15 + 1,), 3, device="cuda", dtype=torch.float16)
    assert (fusebook.multiply(tall, row)[-1] == 3).all()


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEANING)
def test_special_numbers(name, device):
    special = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1e-40, 3e38, -3e38, 88.7, 89.0, -87.3, -104.0, 300.0]
    values = torch.tensor(special, device=device)
    count = MEANING[name][1]
    operands = [values.view([-1 if i == j else 1 for j in range(min(count, 2))]) for i in range(min(count, 2))]
    operands += [values.flip(0)] * (count - len(operands))
    wanted = tuple_of(MEANING[name][0](*[x.double() for x in operands]))
    got = tuple_of(getattr(fusebook, name)(*operands))
    plain = tuple_of(MEANING[name][0](*operands))
    for a, b, c in zip(got, wanted, plain, strict=True):
        if name == "multiply_add" and device == "cuda":
            c = b.float()  # fma has no product in between that could overflow
        # Elsewhere infinite where PyTorch's float32 is, with what overflows on the way.
        assert torch.equal(a.isnan(), c.isnan())
        assert torch.equal(a.isinf(), c.isinf())
        fine = c.isfinite() & (b.abs() > 1e-37)
        if name == "silu_mul":  # its first factor is zero below that as well
            fine &= torch.nn.functional.silu(operands[0].double()).abs() > 1e-37
        # Where fma does not round once, as in the interpreter, exp cannot correct its argument.
        torch.testing.assert_close(a[fine], b[fine].float(), rtol=1e-6 if device == "cuda" else 1e-5, atol=0)


def test_exp_keeps_its_digits_far_from_zero(device):
    x = torch.linspace(-87, 88, 4001, device=device)
    right = torch.exp(x.double())
    error = ((fusebook.exp(x).double() - right).abs() / right).max().item()
    assert error < (4 if device == "cuda" else 100) * torch.finfo(torch.float32).eps


def test_every_number_of_bfloat16_is_kept(device):
    """Those that are too small to be normal, too; NaN stays NaN."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(torch.bfloat16)
    got = fusebook.multiply(x, torch.ones_like(x))
    kept = ~x.isnan()
    assert torch.equal(got[kept].view(torch.int16), x[kept].view(torch.int16))
    assert got[~kept].isnan().all()


@pytest.mark.parametrize("name", ["silu", "exp"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_every_number_of_half_types_gives_the_nearest_one_or_its_neighbour(dtype, name, device):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    got = getattr(fusebook, name)(x)
    meant = MEANING[name][0](x.double())
    want = meant.to(dtype)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    fine = want.isfinite() & (meant.abs() > 1e-36)  # below, powers of two may be zero or infinite
    if dtype == torch.float16:
        fine = want.isfinite()
    # Of one sign, the bits of neighbours are neighbours.
    apart = (got[fine].view(torch.int16).int() - want[fine].view(torch.int16).int()).abs()
    assert apart.max() <= 1
    if dtype == torch.float16 or device == "cuda":  # interpreted, bfloat16 is cut off
        assert (apart == 0).double().mean() > 0.99


def test_half_types_are_rounded_once(device):
    one, tiny = torch.ones(4, device=device, dtype=torch.float16), torch.full((4,), 2.0**-11, device=device).half()
    assert torch.equal(fusebook.add_add_multiply(one, tiny, tiny, one), torch.full_like(one, 1 + 2.0**-10))
    assert torch.equal((one + tiny + tiny) * one, one)  # what PyTorch's chain makes of it


@pytest.mark.parametrize(
    "dtypes",
    [p for p in itertools.product(FLOATING, FLOATING) if p[0] != p[1]],
    ids=lambda p: "-".join(str(d)[6:] for d in p),
)
def test_mixed_dtypes_widen_as_in_pytorch(dtypes, device):
    x, y = (rough(generator(0, device), (3, 40), d) for d in dtypes)
    agree("multiply", [x, y])
    assert fusebook.multiply(x, y[0, 0]).dtype == (x * y[0, 0]).dtype  # a number does not widen a tensor
    assert fusebook.multiply(x[0, 0], y[0, 0]).dtype == (x[0, 0] * y[0, 0]).dtype


# Refusals -------------------------------------------------------------------------------------------------------------

REFUSED = {
    "shapes": (ValueError, r"shapes that broadcast, got \(3, 4\) and \(4, 3\); sizes", lambda x: (x, x.mT)),
    "booleans": (TypeError, "y to be float16, .* got torch.bool; cast it first", lambda x: (x, x > 0)),
    "devices": (ValueError, "expected y on .* as x is, got meta; move one", lambda x: (x, x.to("meta"))),
}


@pytest.mark.parametrize(("error", "said", "make"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_in_one_sentence(error, said, make, device):
    with pytest.raises(error, match=said) as caught:
        fusebook.multiply(*make(torch.ones(3, 4, device=device)))
    text = str(caught.value)
    assert text.startswith("multiply: expected") and ";" in text and "\n" not in text


def test_a_tensor_that_no_kernel_can_reach_is_refused(monkeypatch):
    monkeypatch.setattr("fusebook.kernels._call.INTERPRETED", False)
    with pytest.raises(ValueError, match="add_sub: expected a CUDA tensor, got one on cpu"):
        fusebook.add_sub(torch.ones(2), torch.ones(2))


# Gradients, transformations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEANING)
def test_gradients(name, device):
    shapes = [(2, 3), (3,), (2, 1), (1, 1)][: MEANING[name][1]]
    operands = drawn(*shapes, device=device, dtype=torch.float64)
    operands = [x.requires_grad_() for x in operands]
    function = getattr(fusebook, name)
    assert torch.autograd.gradcheck(function, operands)
    if name in ("multiply", "silu", "silu_mul"):  # of the others the gradients are made of the same operations
        assert torch.autograd.gradgradcheck(function, operands)


@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype)[6:])
def test_the_gradients_of_a_gate_are_rounded_once_by_one_kernel(dtype, device, monkeypatch):
    """Of halves of one matrix too, as a layer of both has them, and of batches."""
    both, dy = drawn((6, 80), (6, 40), device=device, dtype=dtype)
    both[0] *= 100
    exact = [t.double().requires_grad_() for t in both.chunk(2, -1)]
    want = torch.nn.functional.silu(exact[0]) * exact[1]
    right = torch.autograd.grad(want, exact, dy.double())
    given = [t.detach().requires_grad_() for t in both.chunk(2, -1)]
    launched, launch = [], elementwise.launch
    monkeypatch.setattr(elementwise, "launch", lambda *args, **how: launched.append(args[0]) or launch(*args, **how))
    y = fusebook.silu_mul(*given)
    got = torch.autograd.grad(y, given, dy)
    assert len(launched) <= 2
    step = 2 if dtype == torch.bfloat16 else 1 if dtype == torch.float16 else 8  # interpreted, bfloat16 is cut off
    for a, b in zip((y, *got), (want, *right), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=step * torch.finfo(dtype).eps, atol=1e-7)
    grad = torch.func.grad(lambda gate, up, d: (fusebook.silu_mul(gate, up) * d).sum(), argnums=(0, 1))
    for a, b in zip(torch.func.vmap(grad)(*given, dy), got, strict=True):
        torch.testing.assert_close(a, b)


def test_the_gradient_of_one_of_two_results(device):
    x, y = (t.requires_grad_() for t in drawn((4,), (4,), device=device))
    fusebook.add_sub(x, y)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(y.grad, -torch.ones_like(y))


def test_gradients_keep_the_dtype_of_their_operand(device):
    x = torch.ones(3, device=device, dtype=torch.float16, requires_grad=True)
    y = torch.ones(2, 3, device=device, requires_grad=True)
    fusebook.multiply(x, y).sum().backward()
    assert x.grad.dtype == torch.float16 and x.grad.tolist() == [2, 2, 2] and y.grad.dtype == torch.float32


def test_results_of_operands_that_lie_otherwise_are_contiguous(device):
    x, y = drawn((4, 6), (6, 4), device=device)
    assert fusebook.multiply(x.mT, y).is_contiguous() and fusebook.multiply(y, x.mT).is_contiguous()


def test_layouts_are_foretold(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for x in (torch.ones(4, 6, device=device).mT, torch.ones(4, 6, device=device)[:, ::2]):
        real = fusebook.double(x)
        with FakeTensorMode() as mode:
            foretold = fusebook.double(mode.from_tensor(x))
        assert foretold.stride() == real.stride() and foretold.shape == real.shape


# Several results ------------------------------------------------------------------------------------------------------


def swapped(x, y):
    return x - y, x + y


def one_alone(x, y):
    return x + y


def second_forgotten(x, y):
    # Not empty: the allocator may hand out the memory of an earlier right result.
    return x + y, torch.full_like(x, 7.0)


def second_coarse(x, y):
    return x + y, (x.bfloat16() - y.bfloat16()).float()


@pytest.mark.parametrize("wrong", [swapped, one_alone, second_forgotten, second_coarse])
def test_each_of_several_results_is_judged(wrong, device):
    operands = ADD_SUB.make(generator(0, device), torch.float32, M=33, N=50, y="matrix")
    yard = check.yardstick(ADD_SUB, operands)
    outputs = wrong(*operands)
    assert not yard.judge(outputs).ok
    assert yard.judge(fusebook.add_sub(*operands)).ok
    assert "output" in yard.where(outputs)


@pytest.mark.alone
def test_several_results_are_benchmarked_and_recorded(tmp_path, device):
    """A wrong second result is refused with its place; right ones are timed, and the record keeps both rows."""
    import dataclasses

    import synthetic
    from fusebook import tables
    from fusebook.measure import record

    op = dataclasses.replace(
        ADD_SUB, variants={"eager": ADD_SUB.variants["eager"], "coarse": Variant(second_coarse, needs=())}
    )
    frame = bench.run(op, config="33x50", repeat=2, warmup=1)
    eager, coarse = (tables.where(frame, variant=name).iloc[0] for name in ("eager", "coarse"))
    assert eager["status"] == "ok" and eager["latency_us"] > 0
    assert coarse["status"] == "wrong" and "of output 1" in coarse["note"]
    made = synthetic.frame(ADD_SUB, "small,large")
    record.write(made, tmp_path)
    back = record.read("add_sub", made.attrs["origin"].machine.slug, tmp_path)
    assert tables.where(back, variant="fusebook", M=20)["write_bytes"].tolist() == [2 * 20 * 10 * 4]


def test_exp_is_drawn_within_float16(device):
    (x,) = EXP.make(generator(0, device), torch.float16, M=40, N=300)
    assert torch.exp(x).isfinite().all()


def test_the_toy_has_one_result():
    """What returns a tuple where one result is due is wrong, and not unpacked."""
    frame = bench.run(toy(two=variant(lambda x: (2 * x, 2 * x))), config="16", repeat=1, warmup=0)
    assert frame.set_index("variant").loc["two", "status"] == "wrong"


def test_a_batch_is_one_call_and_broadcasts_as_its_members_do(device, monkeypatch):
    x, y, z = torch.randn(4, 3, 5, device=device), torch.randn(5, 4, device=device), torch.randn(3, 1, device=device)
    half = torch.randn(4, device=device, dtype=torch.float16)  # members are single numbers, and widen nothing
    calls = [(x, 0, y, 1), (y, 1, x, 0), (x, 0, z, None), (x, 2, x, 2), (half, 0, x, 0), (x.half(), 0, y[0], 0)]
    for a, at, b, to in calls:
        want = torch.vmap(torch.mul, (at, to))(a, b)
        found = torch.vmap(fusebook.multiply, (at, to))(a, b)
        assert found.dtype == want.dtype
        torch.testing.assert_close(found, want)
    operator = elementwise._OPERATORS["add_sub"]
    monkeypatch.setattr(operator, "one_by_one", None)
    for found, want in zip(torch.vmap(fusebook.add_sub)(x, x * 2), (x * 3, -x), strict=True):
        torch.testing.assert_close(found, want)
