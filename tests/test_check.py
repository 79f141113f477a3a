"""The check catches the mistakes that kernels make, in every dtype, and lets honest rounding pass."""

import dataclasses
import math

import pytest
import torch

from fusebook.cards import OPS
from fusebook.measure import check
from fusebook.measure.inputs import generator, poison, rough
from toy import toy

SOFTMAX = OPS["softmax"]
LOWER = {torch.float64: torch.float32, torch.float32: torch.bfloat16}


def _exp(x):
    return (x - x.amax(-1, keepdim=True)).exp()


def _up(x):
    return x.double() if x.dtype == torch.float64 else x.float()


def _last_column(x):
    y = torch.softmax(x, -1)
    y[..., -1] = 0
    return y


def _last_tile(x):
    """The mask of the last tile is off by one tile: the sum misses the last columns."""
    n = x.shape[-1]
    e = _exp(_up(x))
    return (e / e[..., : n - max(1, n // 8)].sum(-1, keepdim=True)).to(x.dtype)


def _one_row(x):
    y = torch.softmax(x, -1)
    y[-1] = y[0]
    return y


def _sum_one_type_lower(x):
    """Terms are added one by one in the type below, as a running sum in a half-precision register would."""
    e = _exp(_up(x))
    low = LOWER.get(x.dtype, x.dtype)
    total = torch.zeros_like(e[..., :1]).to(low)
    for column in e.to(low).unbind(-1):
        total = total + column[..., None]
    return (e / total.to(e.dtype)).to(x.dtype)


def _no_maximum(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


MISTAKES = {
    "zeros": torch.zeros_like,
    "one over N": lambda x: torch.full_like(x, 1 / x.shape[-1]),
    "last column": _last_column,
    "last tile": _last_tile,
    "one wrong row": _one_row,
    "no maximum": _no_maximum,
    "sum one type lower": _sum_one_type_lower,
    "input scaled by 32 eps": lambda x: torch.softmax(_up(x) * (1 + 32 * torch.finfo(x.dtype).eps), -1).to(x.dtype),
    "softmax of the wrong dim": lambda x: torch.softmax(x, 0),
    "unwritten": lambda x: torch.full_like(x, float("nan")),
    "not normalised": lambda x: _exp(_up(x)).to(x.dtype),
    "base 2": lambda x: torch.softmax(_up(x) * math.log(2), -1).to(x.dtype),
}

# 512 columns, so that a sum has the terms that lose its tail; 96 rows, so that each kind of row comes often.
POINTS = [dict(M=96, N=512), *({"M": d["M"], "N": d["N"]} for d in SOFTMAX.edges if d["M"] and d["N"] <= 8192)]


@pytest.fixture(scope="module")
def yards():
    """Inputs and yardsticks by dtype and point; made once, since every mistake needs them."""
    made = {}
    for dtype in SOFTMAX.dtypes:
        for i, dims in enumerate(POINTS):
            values = SOFTMAX.make(generator(i, "cpu"), dtype, **dims)
            made[dtype, i] = values, check.yardstick(SOFTMAX, values)
    return made


@pytest.mark.parametrize("dtype", SOFTMAX.dtypes, ids=str)
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_caught_on_some_edge(mistake, dtype, yards):
    verdicts = [y.judge(mistake(v[0].clone())) for (d, _), (v, y) in yards.items() if d == dtype]
    assert not all(v.ok for v in verdicts), [f"{v.error:.2g} <= {v.tolerance:.2g}" for v in verdicts]


@pytest.mark.parametrize("dtype", SOFTMAX.dtypes, ids=str)
def test_an_honest_softmax_passes_on_every_edge(dtype, yards):
    for (d, _), (values, yard) in yards.items():
        if d == dtype:
            assert yard.judge(torch.softmax(values[0], -1)).ok


@pytest.mark.parametrize("dtype", SOFTMAX.dtypes, ids=str)
def test_plain_rows_would_let_a_softmax_without_its_maximum_pass(dtype):
    """Why inputs are rough: on normal rows the mistake cannot be seen."""
    plain = (torch.randn(96, 512, dtype=dtype),)
    hostile = (rough(generator(0, "cpu"), (96, 512), dtype),)
    one, other = check.yardstick(SOFTMAX, plain), check.yardstick(SOFTMAX, hostile)
    without = lambda x: (_up(x).exp() / _up(x).exp().sum(-1, keepdim=True)).to(x.dtype)  # noqa: E731
    assert one.judge(without(plain[0])).ok
    assert not other.judge(without(hostile[0])).ok


def verdict(got, want):
    """The score of `got` where the reference gives `want`."""
    op = toy()
    half = want.double() / 2
    return check.yardstick(op, (half.to(want.dtype),)).error(got)


def test_zeros_score_a_half_at_least():
    for scale in (1e-30, 1.0, 1e30):
        want = torch.randn(4, 100) * scale
        assert verdict(torch.zeros_like(want), want) >= 0.5
        assert verdict(want.clone(), want) == 0


def test_shape_dtype_and_number_of_outputs_must_match():
    want = torch.ones(2, 3)
    assert verdict(want, want) == 0
    for wrong in (want[:1], want.double(), want.T, (want, want), (), None, [1.0], want.reshape(-1)):
        assert verdict(wrong, want) == math.inf


def test_nan_and_infinity_stand_where_the_reference_has_them():
    want = torch.tensor([[1.0, math.nan, math.inf, -math.inf]])
    assert verdict(want.clone(), want) == 0
    for column, wrong in ((0, math.nan), (0, math.inf), (1, 0.0), (2, -math.inf), (2, 1e30), (3, math.nan)):
        got = want.clone()
        got[0, column] = wrong
        assert verdict(got, want) == math.inf


def test_a_row_that_is_rightly_zero_must_be_zero():
    want = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert verdict(want.clone(), want) == 0
    assert verdict(torch.tensor([[1e-30, 0.0], [1.0, 1.0]]), want) == math.inf


def test_what_overflows_in_the_dtype_may_be_infinite():
    op = toy()
    yard = check.yardstick(op, (torch.tensor([[40000.0, 1.0]], dtype=torch.float16),))
    assert yard.error(torch.tensor([[math.inf, 2.0]], dtype=torch.float16)) == 0
    assert yard.error(torch.tensor([[60000.0, 2.0]], dtype=torch.float16)) == math.inf


@pytest.mark.parametrize("other", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_no_score_of_the_rest_of_its_row_smaller(other):
    """Neither where it is part of the reference, nor where it is what the dtype makes of it."""
    row = torch.tensor([[3.0, 0.0, 4.0, -5.0]])
    wrong = row + torch.tensor([[0.0, 1e-3, 0.0, 0.0]])
    score = verdict(wrong, row)
    beside = torch.full((1, 12), other)
    assert verdict(torch.cat([wrong, beside], 1), torch.cat([row, beside], 1)) == pytest.approx(score, rel=1e-6)
    if not math.isnan(other):
        overflown = torch.full((1, 12), math.copysign(1e300, other), dtype=torch.float64)
        got, want = torch.cat([wrong, beside], 1), torch.cat([row.double(), overflown], 1)
        assert check._distance(got, want) == pytest.approx(score, rel=1e-6)


def test_below_the_normal_range_one_step_of_the_dtype_is_right_and_two_are_not():
    """The gradient of a mean over a million rows lies there in float16; rounded as it should be, it was wrong."""
    step = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    want = torch.tensor([[0.499, 1.501, 2.2, 3.0]], dtype=torch.float64) * step
    yard = dataclasses.replace(check.yardstick(toy(), (want / 2,)), dtypes=(torch.float16,))
    assert yard.error(want.half()) == 0
    assert yard.error(torch.zeros(1, 4, dtype=torch.float16)) > 0.25
    assert yard.error(want.half() + 2 * step) > 0.25
    zero = dataclasses.replace(check.yardstick(toy(), (0 * want,)), dtypes=(torch.float16,))
    assert zero.error(torch.full((1, 4), step, dtype=torch.float16)) == math.inf


@pytest.mark.parametrize(("dtype", "right"), [(torch.float32, True), (torch.bfloat16, True), (torch.float64, False)])
def test_zero_is_right_below_the_normal_range_of_float32(dtype, right):
    """SiLU of -103 is there: 1 + exp(103) is infinite in float32."""
    want = torch.tensor([[-3.5e-43]], dtype=torch.float64)
    yard = dataclasses.replace(check.yardstick(toy(), (want / 2,)), dtypes=(dtype,))
    assert (yard.error(torch.zeros(1, 1, dtype=dtype)) == 0) is right
    assert yard.error(torch.full((1, 1), 1e-37, dtype=dtype)) > 0.25
    least = dataclasses.replace(check.yardstick(toy(), (want + 1.2e-38,)), dtypes=(dtype,))
    assert least.error(torch.zeros(1, 1, dtype=dtype)) > 0.25


def test_empty_scores_zero():
    assert verdict(torch.empty(0, 3), torch.empty(0, 3)) == 0
    assert verdict(torch.empty(3, 0), torch.empty(3, 0)) == 0


def test_the_score_does_not_depend_on_how_it_is_chunked(monkeypatch):
    want = torch.randn(37, 11)
    got = want + torch.randn(37, 11) * 1e-3
    whole = verdict(got, want)
    monkeypatch.setattr(check, "_CHUNK", 16)
    assert verdict(got, want) == whole > 0


def worst(got, want):
    """What is said of `got` where the reference gives `want`."""
    half = want.double() / 2
    return check.yardstick(toy(), (half.to(want.dtype),)).where(got)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ordinary_numbers_need_no_other_look_and_have_the_same_score(dtype, monkeypatch):
    """A row of zeros is ordinary; NaN, infinity, rows of tiny numbers and float16 are looked at once more."""
    rng = torch.Generator().manual_seed(0)
    want = torch.randn(8, 300, generator=rng, dtype=torch.float64)
    want[3] = 0
    got = (want * (1 + 1e-2 * torch.rand(want.shape, generator=rng))).to(dtype)
    looked = []
    monkeypatch.setattr(check, "_rows", lambda *given, rows=check._rows: looked.append(1) or rows(*given))
    assert check._distance(got, want) == pytest.approx(check._rows(got, want).max().item(), rel=1e-12)
    assert len(looked) == (2 if dtype == torch.float16 else 1)
    most = torch.finfo(dtype).max
    for there, wanted in [(math.nan, 1), (math.inf, 1), (1, math.nan), (1, math.inf), (1e-3, 0), (most, 1.01 * most)]:
        other, of = got.clone(), want.clone()
        other[3, 5], of[3, 5] = there, wanted
        assert check._distance(other, of) == math.inf
    tiny = torch.full_like(want, torch.finfo(dtype).smallest_normal / 2)
    assert (check._distance(torch.zeros_like(got), tiny) == 0) == (dtype in (torch.float32, torch.bfloat16))


@pytest.mark.parametrize("chunk", [2**26, 8])
def test_the_worst_element_is_named_with_its_position(chunk, monkeypatch):
    monkeypatch.setattr(check, "_CHUNK", chunk)
    want = torch.arange(1.0, 25.0).reshape(2, 3, 4)
    got = want.clone()
    assert worst(got, want) == ""
    got[0, 0, 1] += 0.5
    got[1, 2, 0] = -3
    assert worst(got, want) == "worst at [1, 2, 0]: got -3, expected 21"
    got[0, 1, 3] = math.nan
    assert worst(got, want) == "worst at [0, 1, 3]: got nan, expected 8"
    assert worst(torch.tensor(3.0), torch.tensor(2.0)) == "worst at []: got 3, expected 2"
    assert worst(torch.empty(0, 3), torch.empty(0, 3)) == ""
    counts = torch.tensor([1, 2])
    assert check.yardstick(toy(), (counts,)).where(counts * 3) == "worst at [0]: got 3, expected 2"


def test_the_worst_element_is_found_in_results_that_lie_across():
    want = torch.arange(1.0, 13.0).view(4, 3).T
    got = want.clone()
    got[1, 2] += 7
    assert worst(got, want) == "worst at [1, 2]: got 15, expected 8"


def test_what_is_wrong_in_kind_is_said():
    want = torch.ones(2, 3)
    assert worst((want, want), want) == "got 2 outputs, expected 1"
    assert worst(None, want) == "output 0: got NoneType, expected torch.float32 of shape (2, 3)"
    assert worst(want.T.double(), want) == (
        "output 0: got torch.float64 of shape (3, 2), expected torch.float32 of shape (2, 3)"
    )


def test_a_score_of_nan_is_not_ok():
    assert not check.Verdict(math.nan, 1.0).ok


def test_the_limit_is_made_of_eps_and_never_wide():
    op = toy()
    for dtype, allowed in ((torch.float16, 8), (torch.bfloat16, 8), (torch.float32, 64), (torch.float64, 64)):
        yard = check.yardstick(op, (torch.randn(4, 4, dtype=dtype),))
        assert yard.tolerance() == allowed * torch.finfo(dtype).eps
    single = check.yardstick(op, (torch.randn(4, 4),))
    assert single.tolerance("tf32") == 8 * 2**-10
    assert dataclasses.replace(single, rounded=0.05).tolerance() == 0.1
    assert dataclasses.replace(single, rounded=3.0).tolerance() == 0.25, "a limit that zeros pass"


def test_integers_are_right_or_wrong():
    op = dataclasses.replace(toy(), reference=lambda x: x.argmax(1))
    x = torch.eye(4)
    yard = check.yardstick(op, (x,))
    assert yard.judge(torch.arange(4)).error == 0
    assert yard.judge(torch.tensor([0, 1, 2, 0])).error == math.inf


def test_each_row_has_a_scale_of_its_own_and_the_reference_is_float64():
    x = torch.tensor([[1e-4, 2e-4], [1e4, 2e4]])
    yard = check.yardstick(toy(), (x,))
    assert yard.want[0].dtype == torch.float64
    wrong = 2 * x
    wrong[0] = 0
    assert yard.error(wrong) > 0.5


def test_poison_is_nan_or_the_largest_integer(monkeypatch):
    made, full_like = [], torch.full_like
    monkeypatch.setattr(torch, "full_like", lambda *a: made.append(full_like(*a)) or made[-1])
    poison([torch.zeros(3), torch.zeros(2, dtype=torch.int32)])
    assert made[0].isnan().all() and made[1].tolist() == [2**31 - 1] * 2


def test_rough_rows_are_of_three_kinds():
    x = rough(generator(0, "cpu"), (300, 64), torch.float32)
    assert x[0::3].abs().max() < 10 and x[1::3].abs().max() > 20 and x[2::3].mean() > 90
    assert ((x[1::3].abs() > 10).sum(1) <= 3).all()
    assert rough(generator(0, "cpu"), (0, 5), torch.float16).shape == (0, 5)


def test_poison_is_found_by_the_next_allocation():
    if not torch.cuda.is_available():
        pytest.skip("the CPU's allocator promises nothing about what it hands out")
    like = torch.empty(1000, 1000, device="cuda")
    poison([like])
    assert torch.empty_like(like).isnan().all()
