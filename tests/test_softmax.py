"""What is special to softmax: axes, strides, NaN, gradients, tracing, bad input, and laws that any rows obey."""

import functools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusebook
from fusebook import check
from fusebook.cards._peers import quack_takes
from fusebook.cards.softmax import SOFTMAX_BACKWARD
from fusebook.inputs import generator
from fusebook.kernels import _call, _rows
from fusebook.kernels._call import OPERATORS
from fusebook.kernels.softmax_backward import softmax_backward

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
NEEDS_CUDA = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def assert_like_float64(got, want, eps=8.0):
    """Close to a float64 result, as a share of each element and of the largest; special values in the same places."""
    assert got.shape == want.shape
    rounded = want.to(got.dtype)
    special = ~rounded.isfinite()
    assert torch.equal(got[special].nan_to_num(7.0), rounded[special].nan_to_num(7.0))
    error = torch.where(special, 0, (got.double() - want).abs())
    scale = torch.where(special, 0, want.abs())
    scale = scale + (scale.max() if scale.numel() else 0)
    assert (error <= eps * torch.finfo(got.dtype).eps * scale).all()


def assert_softmax(x, dim):
    got = fusebook.softmax(x, dim)
    assert got.is_contiguous()
    assert got.dtype == x.dtype
    assert_like_float64(got, torch.softmax(x.double(), dim))


def assert_gradient(y, dy, dim):
    """Close to float64 as a share of the terms: where they cancel, nothing is left to be close to."""
    got = softmax_backward(y, dy, dim)
    assert got.is_contiguous()
    assert got.dtype == y.dtype
    assert_gradient_of(got, y, dy, dim)


def assert_gradient_of(got, y, dy, dim):
    y, dy = y.double(), dy.double()
    want = y * (dy - (y * dy).sum(dim, keepdim=True))
    terms = y * (dy.abs() + (y * dy).abs().sum(dim, keepdim=True))
    assert ((got.double() - want).abs() <= 8 * torch.finfo(got.dtype).eps * (terms + terms.max() / 16)).all()


def test_a_gradient_is_judged_by_the_rounded_y_that_every_way_is_given():
    made = SOFTMAX_BACKWARD.make(generator(0, DEVICE), torch.float16, M=2, N=201088)
    y, dy = (t.double() for t in SOFTMAX_BACKWARD.variants["fusebook"].prepare(*made))
    exact = y * (dy - (y * dy).sum(-1, keepdim=True))
    yard = check.yardstick(SOFTMAX_BACKWARD, made)
    assert yard.score((exact.half(),)) <= 1.01 * yard.rounded


# Axes and strides


@EVERY_DTYPE
@pytest.mark.parametrize("dim", range(-4, 4))
def test_any_axis(dim, dtype):
    assert_softmax(torch.randn(3, 4, 5, 6, device=DEVICE).to(dtype), dim)


@EVERY_DTYPE
def test_a_long_axis_before_the_last(dtype):
    assert_softmax(torch.randn(2, 700, 37, device=DEVICE).to(dtype), 1)


def test_an_axis_before_the_last_that_one_program_could_not_finish_in_time():
    assert_softmax(torch.randn(20000, 3, device=DEVICE), 0)


NARROW = {
    "an odd number of rows": lambda randn: randn(9, 10001 if CUDA else 1001).t(),
    "few neighbours": lambda randn: randn(5000 if CUDA else 500, 7, 2).permute(2, 0, 1),
    "four axes permuted": lambda randn: randn(50 if CUDA else 5, 17, 7, 30).permute(2, 0, 3, 1),
    "five axes, of which no two fold": lambda randn: randn(40 if CUDA else 4, 3, 12, 5, 8).permute(2, 0, 4, 3, 1)[
        :, :, :7
    ],
    "two numbers": lambda randn: randn(2, 33333 if CUDA else 333).t(),
}


@EVERY_DTYPE
@pytest.mark.parametrize("view", NARROW.values(), ids=NARROW.keys())
def test_narrow_rows_whose_numbers_lie_apart(view, dtype):
    x = view(functools.partial(torch.randn, device=DEVICE)).to(dtype)
    plan = _rows._prepared(torch.empty_like(x).contiguous(), x, x.dim() - 1, 1)[0]
    assert plan.kernel == ("rows" if dtype == torch.float64 else "narrow")
    assert_softmax(x, -1)
    y = torch.softmax(torch.randn(x.shape, device=DEVICE), -1).to(dtype)
    assert_gradient(y, x, x.dim() - 1)
    rows = x.movedim(-1, 0)
    assert_softmax(rows, 0)  # the result lies as the rows do
    x[0] = float("-inf")
    assert_softmax(x, -1)


VIEWS = {
    "transposed": lambda randn: randn(40, 70).t(),
    "columns cut off": lambda randn: randn(9, 70)[:, 3:60],
    "an odd width": lambda randn: randn(9, 71),
    "an odd width cut off": lambda randn: randn(9, 73)[:, :71],
    "rows left out": lambda randn: randn(19, 70)[::2],
    "columns left out": lambda randn: randn(9, 70)[:, ::3],
    "one row repeated": lambda randn: randn(1, 70).expand(9, 70),
    "one column repeated": lambda randn: randn(9, 1).expand(9, 70),
    "one element repeated": lambda randn: randn(1, 1).expand(9, 70),
    "axes swapped": lambda randn: randn(5, 6, 70).transpose(0, 1),
    "channels last": lambda randn: randn(2, 8, 5, 6).to(memory_format=torch.channels_last),
    "four axes permuted": lambda randn: randn(3, 4, 5, 6).permute(2, 0, 3, 1),
    "five axes, of which no two fold": lambda randn: randn(2, 2, 3, 2, 5).permute(2, 0, 4, 3, 1)[:, :, :4],
    "an offset that no vector load starts at": lambda randn: randn(9 * 64 + 1)[1:].view(9, 64),
    "an odd width at an odd offset": lambda randn: randn(9 * 71 + 1)[1:].view(9, 71),
    "an odd distance between the outer rows only": lambda randn: randn(3 * 257).as_strided((3, 4, 64), (257, 64, 1)),
}
TWO_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@TWO_DTYPES
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_any_strides(view, dtype):
    x = view(functools.partial(torch.randn, device=DEVICE, dtype=dtype))
    for dim in range(x.dim()):
        assert_softmax(x, dim)


@TWO_DTYPES
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_any_strides_of_a_gradient(view, dtype):
    dy = view(functools.partial(torch.randn, device=DEVICE, dtype=dtype))
    for dim in range(dy.dim()):
        assert_gradient(torch.softmax(torch.randn_like(dy), dim), dy, dim)


@EVERY_DTYPE
def test_wide_rows_that_lie_across_are_laid_side_by_side(dtype, monkeypatch):
    laid = []
    original = _rows.side_by_side
    monkeypatch.setattr(_rows, "side_by_side", lambda x: laid.append(x) or original(x))
    with _call.uncached():
        x = torch.randn(2100, 260, device=DEVICE).to(dtype).mT
        assert_softmax(x, 1)
        assert len(laid) == 1
        assert_softmax(x[:, :100], 1)  # these are held
        assert_softmax(x[:25], 1)  # and so few are read where they are
        assert len(laid) == 1
        assert_softmax(x.mT, 0)  # the result lies across as well
        assert len(laid) == 2


@EVERY_DTYPE
@pytest.mark.parametrize("tensors", [1, 2])
def test_few_rows_that_lie_across_have_a_program_each(dtype, tensors):
    def plan(rows, n):
        return _rows.softmax_plan((1, rows, n), dtype, (9, 0), last=False, tensors=tensors)

    for rows in (1, 2, 40, 100):
        few = plan(rows, 1100)
        assert few.kernel == "rows" and few.programs == rows and few.constants["ROWS"] == 1
    for rows, n in ((40, 300), (257, 1100)):  # narrow or many: neighbours share a fetch
        many = plan(rows, n)
        assert many.kernel == "turned" or many.programs < rows
    assert plan(200, 16384).kernel == "turned"


def test_numbers_that_are_loaded_one_by_one_fit_into_the_registers_of_a_thread():
    for n in range(8192, 32769, 997):
        plan = _rows.softmax_plan((1, 9, n), torch.float16, (9, 0), tensors=2, vector=1)
        assert plan.kernel == "rows"
        held = plan.constants["BLOCK"] * plan.constants["CHUNKS"]
        assert 2 * held <= 160 * 32 * plan.warps, "beyond 160 registers of 255 they were seen to spill"


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_no_view_is_copied(view, monkeypatch):
    monkeypatch.setattr(_call, "apply", None)
    x = view(functools.partial(torch.randn, device=DEVICE))
    y = torch.empty(x.shape, device=DEVICE)
    with _call.launching(x):
        for dim in range(x.dim()):
            OPERATORS["softmax"].into(y, x, dim)
            OPERATORS["softmax_backward"].into(torch.empty_like(y), y, x, dim)


@pytest.mark.parametrize("dim", [-1, 0])
def test_without_axes(dim):
    x = torch.tensor(3.0, device=DEVICE, requires_grad=True)
    y = fusebook.softmax(x, dim)
    assert y.shape == ()
    assert y.item() == 1
    y.backward()
    assert x.grad.item() == 0
    assert fusebook.softmax(torch.tensor(float("inf"), device=DEVICE)).isnan()


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)], ids=str)
def test_nothing_in_gives_nothing_out(shape):
    x = torch.empty(shape, device=DEVICE, requires_grad=True)
    for dim in range(len(shape)):
        y = fusebook.softmax(x, dim)
        assert y.shape == shape
        y.sum().backward()
        assert x.grad.shape == shape


@EVERY_DTYPE
@pytest.mark.parametrize("n", [1, 2, 31, 128, 129, 1000, 4104, 12672, 20001, 30000, 70001], ids="{}-columns".format)
def test_widths_on_both_sides_of_each_choice(n, dtype):
    x = torch.randn(3, n, device=DEVICE).to(dtype)
    assert_softmax(x, 1)
    y, dy = torch.softmax(x, 1), (1 + torch.randn(3, n, device=DEVICE)).to(dtype)
    assert_gradient(y, dy, 1)


@EVERY_DTYPE
def test_few_short_rows_have_many_warps_and_each_row_as_many_threads_as_ever(dtype):
    def plan(rows, n, tensors=1):
        return _rows.softmax_plan((1, rows, n), dtype, (9, 0), flat=True, tensors=tensors)

    def together(plan, n):
        """Neighbours that a thread takes at a time: what a load moves, if the tile has as many for each thread."""
        tile = plan.constants["ROWS"] * plan.constants["BLOCK"]
        return min(math.gcd(n, 16 // dtype.itemsize), tile // (32 * plan.warps))

    for n in (1, 3, 30, 50, 64, 76, 135, 188, 255, 370, 512):
        for tensors in (1, 2):
            many = plan(10**6, n, tensors)
            for rows in (1, 100, 5000, 10**5):
                few = plan(rows, n, tensors)
                assert few.constants["ROWS"] <= many.constants["ROWS"] and few.warps == many.warps
                assert few.constants["BLOCK"] == many.constants["BLOCK"] and together(few, n) == together(many, n) > 0
    assert plan(500, 48).programs > 60


def test_short_rows_that_are_no_whole_vectors_are_taken_by_tiles_of_few_columns():
    for n, tensors, kind in (
        (54, 1, True),
        (54, 2, True),
        (53, 1, True),
        (53, 2, False),
        (64, 1, False),
        (300, 1, False),
    ):
        plan = _rows.softmax_plan((1, 10**6, n), torch.float16, (9, 0), tensors=tensors)
        assert (plan.constants["BLOCK"] == 16) == kind
        assert plan.constants["BLOCK"] * plan.constants["CHUNKS"] < n + 16 or not kind


@EVERY_DTYPE
@pytest.mark.parametrize("n", [3, 43, 64, 370])
def test_a_short_row_is_the_same_whatever_rows_it_comes_with(n, dtype):
    x = torch.randn(20000 if CUDA else 40, n, device=DEVICE).to(dtype)
    assert torch.equal(fusebook.softmax(x)[:5], fusebook.softmax(x[:5]))


@EVERY_DTYPE
def test_more_wide_rows_than_processors(dtype):
    x = torch.randn(20 if DEVICE == "cpu" else 200, 66000, device=DEVICE).to(dtype)
    assert_softmax(x, 1)
    assert_gradient(torch.softmax(x, 1), x, 1)


def test_a_row_of_more_than_a_million():
    x = torch.randn(2, 2**20 + 3, device=DEVICE)
    x[1, -1] = 30  # nearly all the weight, on the last and ragged tile
    assert_softmax(x, 1)


def test_the_interpreter_reaches_every_kernel():
    kinds = {
        _rows.softmax_plan((1, m, n), dtype, None, processors=4, pairs=pairs, vector=8 if pairs else 1).kernel
        for m, n, dtype, pairs in (
            (3, 100, torch.float32, False),
            (3, 781, torch.float16, True),
            (3, 50257, torch.float16, True),
            (2, 66000, torch.float32, False),
            (20, 66000, torch.float64, False),
        )
    }
    assert kinds == {"rows", "pairs", "whole", "shared", "twice"}


# Rows beyond the registers of one program

WIDE = {
    "an odd width": lambda randn: randn(5, 50257),
    "an odd width at an odd offset": lambda randn: randn(3 * 40963 + 1)[1:].view(3, 40963),
    "columns cut off": lambda randn: randn(5, 33300)[:, 3:33100],
    "columns cut off at a whole vector": lambda randn: randn(5, 33312)[:, 16:33101],
    "two outer strides": lambda randn: randn(4, 3, 33000)[::2, :, 1:].transpose(0, 1),
    "three outer strides": lambda randn: randn(2, 3, 2, 33100)[..., 4:33004].permute(2, 0, 1, 3)[:, :, :2],
    "one row repeated": lambda randn: randn(1, 66001).expand(3, 66001),
    "a width that a row's beginning pushes into one more tile": lambda randn: randn(4, 12 * 4096 - 1),
}


@TWO_DTYPES
@pytest.mark.parametrize("view", WIDE.values(), ids=WIDE.keys())
def test_wide_rows_of_any_strides(view, dtype):
    x = view(functools.partial(torch.randn, device=DEVICE, dtype=dtype))
    if 0 not in x.stride():
        x[0, ..., -1], x[-1, ..., 0] = 10, 11  # what a row begins and ends with counts
    assert_softmax(x, -1)


@TWO_DTYPES
@pytest.mark.parametrize("view", WIDE.values(), ids=WIDE.keys())
def test_a_gradient_of_wide_rows_of_any_strides(view, dtype):
    dy = view(functools.partial(torch.randn, device=DEVICE, dtype=dtype))
    assert_gradient(torch.softmax(torch.randn_like(dy), -1), dy, -1)


@TWO_DTYPES
def test_nothing_of_a_neighbour_enters_a_gradient(dtype):
    y = torch.softmax(torch.randn(3, 50257, device=DEVICE, dtype=dtype), -1)
    dy = torch.randn_like(y)
    want = softmax_backward(y, dy, -1)[1]
    dy[0], dy[2] = float("nan"), float("inf")
    assert torch.equal(softmax_backward(y, dy, -1)[1], want)
    assert not softmax_backward(y[:, :1001].contiguous(), dy[:, :1001], -1)[1].isnan().any()


@TWO_DTYPES
@pytest.mark.parametrize("n", [1001, 20001, 66001])
def test_nothing_of_a_neighbour_enters_a_row(n, dtype):
    """A row that begins within a vector, between rows of numbers that are far larger."""
    x = torch.full((3, n), 1000.0, device=DEVICE, dtype=dtype)
    x[1] = torch.randn(n, device=DEVICE)
    torch.testing.assert_close(fusebook.softmax(x), torch.softmax(x.float(), 1).to(dtype))


@EVERY_DTYPE
@pytest.mark.parametrize("n", [50257, 66000])
def test_a_wide_row_is_the_same_whatever_rows_it_comes_with(n, dtype):
    x = torch.randn(100 if CUDA else 6, n, device=DEVICE, dtype=dtype)
    y, dy = fusebook.softmax(x), torch.randn_like(x)
    assert torch.equal(y[:2], fusebook.softmax(x[:2]))
    assert torch.equal(softmax_backward(y, dy, -1)[:2], softmax_backward(y[:2], dy[:2], -1))


@pytest.mark.parametrize("where", [0, 30000, 65999], ids="the largest at {}".format)
def test_parts_of_a_wide_float64_row_may_lie_far_apart(where):
    """Each part has its own maximum: one that is far below another counts for nothing, and for no NaN."""
    x = torch.full((3, 66000), -float("inf"), device=DEVICE, dtype=torch.float64)
    x[0] = torch.randn(66000, device=DEVICE) - 900
    x[0, where] = 900
    x[1, where] = -3
    want = torch.zeros_like(x)
    want[:2, where] = 1
    got = fusebook.softmax(x)
    assert torch.equal(got[:2], want[:2]) and got[2].isnan().all()
    low = x[:1] * 1e-3 - 2000  # all far below what lanes hold that have no part
    torch.testing.assert_close(fusebook.softmax(low), torch.softmax(low, 1), rtol=1e-13, atol=0)


def test_rows_that_programs_share_are_the_same_in_spoiled_memory():
    """The board on which they leave words for each other lies where others left theirs."""
    x = torch.randn(2, 66001, device=DEVICE)
    want = fusebook.softmax(x)
    gradient = softmax_backward(want, x, 1)
    torch.testing.assert_close(want, torch.softmax(x, 1))
    for _ in range(100 if CUDA else 1):
        spoiled = [torch.full((64,), -1, dtype=torch.int64, device=DEVICE) for _ in range(64)]
        del spoiled
        assert torch.equal(fusebook.softmax(x), want)
        assert torch.equal(softmax_backward(want, x, 1), gradient)


@NEEDS_CUDA  # interpreted, nobody can wait
@pytest.mark.parametrize("rows", [2, 100])  # programs of a gradient take one row, and go from row to row
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_what_other_programs_left_is_what_a_program_finds_out_for_itself(dtype, rows, monkeypatch):
    x = torch.randn(rows, 66001, device=DEVICE, dtype=dtype)
    want = fusebook.softmax(x)
    gradient = softmax_backward(want, x, 1)
    plan = _rows._shared_plan

    def impatient(*arguments):
        made = plan(*arguments)
        return made._replace(constants=made.constants | {"TRIES": 0})

    monkeypatch.setattr(_rows, "_shared_plan", impatient)
    _rows._plan.cache_clear()
    with _call.uncached():
        assert torch.equal(fusebook.softmax(x), want)
        assert torch.equal(softmax_backward(want, x, 1), gradient)
    _rows._plan.cache_clear()


@pytest.mark.parametrize("processors", [24, 132])
@EVERY_DTYPE
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("tensors", [1, 2])
def test_plans_of_wide_rows_hold_every_number_once(processors, dtype, aligned, tensors):
    rng = random.Random(0)
    vector = 16 // dtype.itemsize if aligned else 1
    seen = set()
    for n in [
        *(2**i + j for i in range(15, 24) for j in (-1, 0, 1)),
        *(rng.randrange(32768, 2**22) for _ in range(200)),
    ]:
        for capability in ((9, 0), (8, 0)):
            known = {
                "processors": processors,
                "tensors": tensors,
                "pairs": aligned and dtype.itemsize == 2,
                "vector": vector,
                "flat": True,
            }
            plan = _rows.softmax_plan((1, 7, n), dtype, capability, **known)
            seen.add(plan.kernel)
            # Where a row begins with the last number of a vector.
            reach = n if n % vector == 0 else n + vector - 1
            ctas = plan.constants.get("CTAS", 1)
            held = plan.constants["BLOCK"] * plan.constants.get("CHUNKS", 1) * ctas
            if plan.kernel == "shared":
                registers = plan.registers or 128
                if tensors == 1 or plan.constants["ONCE"]:
                    assert plan.programs == 7 * plan.parts
                else:  # programs go from row to row, and all of them run at once
                    assert plan.programs % plan.parts == 0 and plan.programs <= 7 * plan.parts
                    assert plan.programs <= processors * (65536 // (registers * 32 * plan.warps))
                assert (plan.parts - 1) * plan.span < reach <= plan.parts * plan.span
                assert plan.span <= held
                assert plan.span * dtype.itemsize % 128 == 0
                # A word a lane, no thread without one, and all programs of a row at once: of 65536 registers.
                words = plan.parts * (2 if tensors == 1 and dtype == torch.float64 else 1)
                assert max(words, 32 * plan.warps) <= plan.constants["LANES"]
                assert plan.parts <= processors * (65536 // (registers * 32 * plan.warps))
                # However many rows there are, they are cut alike, and so come to the same bits.
                many = _rows.softmax_plan((1, 70, n), dtype, capability, **known)
                assert (many.span, many.parts, many.warps) == (plan.span, plan.parts, plan.warps)
                assert many.constants == plan.constants | {k: v for k, v in many.constants.items() if k == "ONCE"}
            elif plan.kernel == "whole":
                assert reach <= held
                # All but two tiles are loaded without a mask.
                assert (plan.constants["CHUNKS"] - 2) * plan.constants["BLOCK"] * ctas <= n
                # Numbers a thread, two a register.
                assert tensors * held / ctas <= {16: 104}.get(plan.warps, 17 * 16) * 32 * plan.warps
                # As many programs as every GPU that has clusters starts together, however many rows there are.
                assert ctas == 1 or (capability >= (9, 0) and ctas <= 8)
                assert _rows.softmax_plan((1, 700, n), dtype, capability, **known).constants == plan.constants
    assert "shared" in seen


# Special values


@EVERY_DTYPE
@pytest.mark.parametrize("n", [5, 781, 33000], ids="{}-columns".format)
def test_special_values_stand_where_torch_has_them(n, dtype):
    inf, nan = float("inf"), float("nan")
    x = torch.randn(9, n, device=DEVICE).to(dtype)
    x[0] = -inf
    x[1, 0] = inf
    x[2, n - 1] = nan
    x[3, : n - 1] = -inf  # all the weight on one
    x[4, 1:] = -inf
    x[5] = nan
    x[6, 0], x[6, 1] = inf, -inf
    x[7] = torch.finfo(dtype).max
    x[8, 0], x[8, 1:] = torch.finfo(dtype).max, torch.finfo(dtype).min
    assert_softmax(x, 1)
    assert_softmax(x.t().contiguous(), 0)


def test_exponentials_do_not_overflow():
    assert_softmax(torch.tensor([[1000.0, 999.0, -1000.0], [-1000.0, -1001.0, -1002.0]], device=DEVICE), 1)


# Gradients


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_of_both_orders(dim):
    x = torch.randn(2, 3, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: fusebook.softmax(t, dim), x)
    assert torch.autograd.gradgradcheck(lambda t: fusebook.softmax(t, dim), x, fast_mode=True)


def test_gradient_of_a_wide_row():
    x = torch.randn(2, 9000, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(fusebook.softmax, x, fast_mode=True)


@EVERY_DTYPE
def test_gradient_is_torchs(dtype):
    x = torch.randn(7, 100, device=DEVICE).to(dtype)
    weight = torch.randn(7, 100, device=DEVICE).to(dtype)
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    (fusebook.softmax(a) * weight).sum().backward()
    (torch.softmax(b, -1) * weight.double()).sum().backward()
    assert a.grad.dtype == dtype
    assert (a.grad.double() - b.grad).abs().max() <= 8 * torch.finfo(dtype).eps * b.grad.abs().max()


def test_no_graph_is_kept_where_none_is_asked_for():
    x = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        assert not fusebook.softmax(x).requires_grad
    assert fusebook.softmax(x).requires_grad


# Tracing and transforms


def test_both_paths_to_the_kernel_agree():
    x = torch.randn(3, 100, device=DEVICE)
    assert torch.equal(fusebook.softmax(x, 0), torch.ops.fusebook.softmax(x, 0))


def test_fullgraph_under_torch_compile():
    torch.compiler.reset()

    def scores(t):
        return fusebook.softmax(2 * t, 0) + 1

    x = torch.randn(6, 10, device=DEVICE, requires_grad=True)
    compiled = torch.compile(scores, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    torch.testing.assert_close(compiled(x), scores(x))
    (got,) = torch.autograd.grad((compiled(x) ** 2).sum(), x)
    (want,) = torch.autograd.grad((scores(x) ** 2).sum(), x)
    torch.testing.assert_close(got, want)


def test_vmap_moves_the_axis():
    x = torch.randn(4, 3, 5, device=DEVICE)
    torch.testing.assert_close(torch.vmap(lambda t: fusebook.softmax(t, 0))(x), torch.softmax(x, 1))
    torch.testing.assert_close(
        torch.vmap(lambda t: fusebook.softmax(t, -1), in_dims=2)(x), x.permute(2, 0, 1).softmax(2)
    )
    torch.testing.assert_close(
        torch.vmap(fusebook.softmax)(torch.randn(4, device=DEVICE)), torch.ones(4, device=DEVICE)
    )


def test_stand_ins_without_memory():
    assert fusebook.softmax(torch.empty(3, 5, device="meta")).shape == (3, 5)
    with torch._subclasses.FakeTensorMode():
        assert fusebook.softmax(torch.empty(3, 5, device=DEVICE)).shape == (3, 5)


def test_a_parameter_and_a_subclass_are_tensors():
    class Named(torch.Tensor):
        pass

    x = torch.randn(3, 5, device=DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(fusebook.softmax(torch.nn.Parameter(x)), torch.softmax(x, -1))
    torch.testing.assert_close(torch.Tensor(fusebook.softmax(x.as_subclass(Named))), torch.softmax(x, -1))


# Bad input


def ones(*shape):
    return torch.ones(shape, device=DEVICE)


BAD = {
    "a list": (lambda: fusebook.softmax([1.0, 2.0]), TypeError, "torch.Tensor, got list"),
    "integers": (lambda: fusebook.softmax(torch.arange(3)), TypeError, "got torch.int64; cast it first"),
    "truth values": (lambda: fusebook.softmax(torch.ones(3, dtype=torch.bool)), TypeError, "got torch.bool"),
    "complex": (lambda: fusebook.softmax(torch.ones(3, dtype=torch.complex64)), TypeError, "got torch.complex64"),
    "sparse": (lambda: fusebook.softmax(torch.eye(3).to_sparse()), TypeError, "sparse_coo; call to_dense"),
    "dim too large": (lambda: fusebook.softmax(ones(3, 5), 2), IndexError, r"from -2 to 1 .*\(3, 5\), got 2"),
    "dim too small": (lambda: fusebook.softmax(ones(3, 5), -3), IndexError, "got -3"),
    "dim without axes": (lambda: fusebook.softmax(torch.tensor(1.0, device=DEVICE), 1), IndexError, "from -1 to 0"),
    "no dim": (lambda: fusebook.softmax(ones(3), None), TypeError, "dim to be an integer, got NoneType"),
    "two dims": (lambda: fusebook.softmax(ones(3, 5), (0, 1)), TypeError, "got tuple; give one axis"),
    "an option that does not exist": (lambda: fusebook.softmax(torch.ones(3), fast=True), TypeError, "fast"),
    "dy no tensor": (
        lambda: softmax_backward(ones(3), 1.0),
        TypeError,
        "expected dy to be a torch.Tensor",
    ),
    "dy of another shape": (
        lambda: softmax_backward(ones(3), ones(4)),
        ValueError,
        r"expected dy of shape \[3\], \[...\] where y is \[...\], got \[4\]",
    ),
    "dy of another dtype": (
        lambda: softmax_backward(ones(3), ones(3).half()),
        TypeError,
        "expected dy to be torch.float32 as y is, got torch.float16",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_says_what_was_given(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_quack_refuses_rows_that_its_vectors_do_not_fill():
    quack_takes(torch.ones(2, 1000, dtype=torch.float16))
    with pytest.raises(NotImplementedError, match="quack takes rows of whole 16-byte vectors, got 781 columns of"):
        quack_takes(torch.ones(2, 781, dtype=torch.float16))


def test_a_cpu_tensor_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(_call, "INTERPRETED", False)
    if CUDA:  # a real driver takes CUDA tensors only
        message = "expected a CUDA tensor, got one on cpu; .*TRITON_INTERPRET=1"
    else:
        message = "expected a CUDA tensor, got one on cpu; move it to a GPU"
    with pytest.raises(ValueError, match=message):
        fusebook.softmax(torch.randn(3, 5))


# Laws

ROWS = st.tuples(st.integers(1, 5), st.integers(1, 300), st.integers(0, 2**31))
LAW = settings(max_examples=15, deadline=None)


def drawn(size, scale=4.0):
    m, n, seed = size
    rng = torch.Generator(device=DEVICE).manual_seed(seed)
    return scale * torch.randn(m, n, generator=rng, device=DEVICE)


@LAW
@given(ROWS, st.sampled_from(list(DTYPES.values())))
def test_as_float64_has_it(size, dtype):
    assert_softmax(drawn(size).to(dtype), -1)


@LAW
@given(ROWS, st.sampled_from([0, 1]))
def test_rows_sum_to_one(size, dim):
    y = fusebook.softmax(drawn(size), dim)
    assert (y >= 0).all()
    torch.testing.assert_close(y.sum(dim), torch.ones_like(y.sum(dim)))


@LAW
@given(ROWS, st.integers(-64, 64))
def test_a_shift_changes_nothing(size, shift):
    x = (drawn(size) * 64).round() / 64  # so that adding a small integer is exact
    assert torch.equal(fusebook.softmax(x), fusebook.softmax(x + shift))


@LAW
@given(ROWS)
def test_permuted_columns_give_permuted_results(size):
    x = drawn(size)
    order = torch.randperm(x.shape[1], device=DEVICE)
    torch.testing.assert_close(fusebook.softmax(x[:, order]), fusebook.softmax(x)[:, order])


@LAW
@given(ROWS)
def test_gradients_of_a_row_sum_to_zero(size):
    y = fusebook.softmax(drawn(size, 1.0).double())
    dx = softmax_backward(y, drawn(size).double())
    torch.testing.assert_close(dx.sum(-1), torch.zeros_like(dx.sum(-1)), atol=1e-12, rtol=0)


# What only a GPU has


BEYOND = {
    "many rows": ((2**21 + 1, 1025), 1, (slice(-2, None),)),
    "two rows": ((2, 2**30 + 5), 1, (slice(-1, None),)),
    "an axis before the last": ((3, 1025, 2**20), 1, (slice(-1, None), slice(None), slice(-1000, None))),
}


@NEEDS_CUDA
@pytest.mark.parametrize(("shape", "dim", "end"), BEYOND.values(), ids=BEYOND.keys())
def test_more_than_2_to_the_31_elements(shape, dim, end, room):
    room(2**36)
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    y = fusebook.softmax(x, dim)
    # The last rows lie beyond what int32 can address; of their columns the last million is enough.
    assert_like_float64(y[end][..., -(2**20) :], torch.softmax(x[end].double(), dim)[..., -(2**20) :])
    dx = softmax_backward(y, x, dim)[end]
    dot = (y[end].double() * x[end]).sum(dim, keepdim=True)
    want = y[end][..., -(2**20) :].double() * (x[end][..., -(2**20) :].double() - dot[..., -(2**20) :])
    assert_like_float64(dx[..., -(2**20) :], want)


def test_a_second_gradient_in_half_precision_has_sums_in_float32():
    y = torch.full((2, 2000), 1 / 2000, dtype=torch.float16, device=DEVICE)
    dy = (200 + torch.randn(2, 2000, device=DEVICE)).half()
    g = torch.randn(2, 2000, device=DEVICE).half()
    own = [t.clone().requires_grad_() for t in (y, dy)]
    for_y, for_dy = torch.autograd.grad(softmax_backward(*own, -1), own, g)
    y, dy, g = y.double(), dy.double(), g.double()
    want = g * (dy - (y * dy).sum(1, keepdim=True)) - dy * (y * g).sum(1, keepdim=True)
    assert (for_y.double() - want).abs().max() < 2e-3 * want.abs().max()
    assert_gradient_of(for_dy, y, g, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_what_is_zero_is_found_on_the_board(dtype):
    """A part's sum or maximum of zero is a word like any other, not one that nobody has written."""
    y = torch.softmax(torch.randn(2, 66001, device=DEVICE, dtype=dtype), 1)
    assert torch.equal(softmax_backward(y, torch.zeros_like(y), 1), torch.zeros_like(y))
    zeros = torch.zeros_like(y)
    torch.testing.assert_close(fusebook.softmax(zeros), zeros + 1 / 66001)


def test_a_batch_of_numbers_is_as_long_as_it_was():
    x = torch.randn(5, device=DEVICE)
    assert torch.equal(torch.vmap(fusebook.softmax)(x[:, None])[:, 0], torch.ones_like(x))
    assert torch.vmap(lambda t: fusebook.softmax(t, 0))(x).tolist() == [1.0] * 5


def test_wide_rows_that_lie_badly_are_read_number_by_number(monkeypatch):
    """The plan is asked for vectors only where rows begin at multiples of 16 bytes; interpreted, nothing else tells."""
    asked, plan = [], _rows._plan
    monkeypatch.setattr(_rows, "_plan", lambda *a, **k: asked.append(k["vector"]) or plan(*a, **k))
    memory = torch.randn(2 * 33000 + 8, device=DEVICE).half()
    for start in (0, 1, 8):
        assert_softmax(memory[start : start + 66000].view(2, 33000), 1)
    assert asked[:2] == [8, 1] and set(asked[2:]) <= {8}  # a launch that is kept asks no more
