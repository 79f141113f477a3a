"""Norms: what the cards do not say. Residuals, results in eight bits, weights that are missing or of another dtype."""

import json
import math
import os

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl  # noqa: F401  (a device function looks for it in its module)

import fusebook
import memcheck
import warm
from fusebook.kernels import _call, _rows, norms
from fusebook.kernels._rows import with_adjacent_elements
from fusebook.measure import inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = {"rtol": 2e-2, "atol": 2e-2}
OURS = {False: fusebook.rms_norm, True: fusebook.layer_norm}
SUMS = {False: fusebook.add_rms_norm, True: fusebook.add_layer_norm}
centred = pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])


def made(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=rng, device=DEVICE, dtype=dtype)


def plain(x, weight=None, bias=None, *, centred, eps=1e-5):
    """The meaning, in the precision of x."""
    x = x - x.mean(-1, keepdim=True) if centred else x
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@pytest.fixture
def tables(monkeypatch):
    """The launch configs of a GPU in the interpreter, too."""
    monkeypatch.setattr(norms, "INTERPRETED", False)
    with _call.uncached():
        yield


@pytest.fixture
def force_parts(tables, monkeypatch):
    """Rows of any width are shared, in parts of up to `block` columns, in the interpreter as well."""

    def force(block):
        parts = {size: (_rows.Parts(2**40, block, 1),) for size in (2, 4)} | {8: ()}
        none = {2: (), 4: (), 8: norms._ROWS[8]}
        for name in ("_ROWS", "_ODD_ROWS", "_ROWS_OF_SUMS", "_BACKWARD_ROWS"):
            monkeypatch.setattr(norms, name, none)
        for name in ("_PARTS", "_BACKWARD_PARTS"):
            monkeypatch.setattr(norms, name, parts)
        monkeypatch.setattr(norms, "_CHUNK", 64)  # so that parts have several chunks
        if DEVICE == "cpu":  # programs run in turn: looking again finds nothing new
            monkeypatch.setattr(_rows, "TRIES", 0)

    return force


@centred
@pytest.mark.parametrize("weight", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [None, torch.float64], ids=str)
def test_weights_and_biases_may_be_missing_or_of_another_dtype(centred, weight, bias):
    x, dy = made(9, 70, dtype=torch.bfloat16), made(9, 70, dtype=torch.bfloat16, seed=1)
    vectors = [None if kind is None else made(70, dtype=kind, seed=2).requires_grad_() for kind in (weight, bias)]
    x.requires_grad_()
    y = OURS[centred](x, *vectors, eps=1e-5)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, *vectors)]
    want = plain(*exact, centred=centred)
    torch.testing.assert_close(y.double(), want, **HALF)
    assert y.dtype == torch.bfloat16
    given, told = ([t for t in ts if t is not None] for ts in ((x, *vectors), exact))
    for got, right in zip(torch.autograd.grad(y, given, dy), torch.autograd.grad(want, told, dy.double()), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=2e-2, atol=5e-2)
    assert [g.dtype for g in torch.autograd.grad(OURS[centred](x, *vectors), given, dy)] == [t.dtype for t in given]


@centred
@pytest.mark.parametrize("size", [(2000, 300), (2, 33000)], ids=["many rows", "shared rows"])
def test_a_weight_that_is_missing_is_one_where_it_is_not_asked_for_first(centred, size):
    x = made(*size)
    torch.testing.assert_close(OURS[centred](x, eps=1e-5), plain(x.double(), centred=centred).float())


@centred
@pytest.mark.parametrize("used", ["y", "total", "both"])
def test_a_residual_takes_the_gradients_of_norm_and_sum(centred, used):
    x, residual, weight, dy = made(5, 37), made(5, 37, seed=1), made(37, seed=2), made(5, 37, seed=3)
    own = [t.clone().requires_grad_() for t in (x, residual, weight)]
    told = [t.double().requires_grad_() for t in (x, residual, weight)]
    y, total = SUMS[centred](*own, eps=1e-5)
    right = told[0] + told[1]
    wanted = plain(right, told[2], centred=centred)
    assert torch.equal(total, x + residual)
    out, want = {"y": (y, wanted), "total": (total, right), "both": (y + 2 * total, wanted + 2 * right)}[used]
    found = torch.autograd.grad(out, own, dy, allow_unused=True)
    for got, exact in zip(found, torch.autograd.grad(want, told, dy.double(), allow_unused=True), strict=True):
        assert (got is None) == (exact is None)
        if got is not None:
            torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [100, 5000, 33000])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_eight_bits_lie_within_half_a_step_and_use_them_all(n, dtype):
    if DEVICE == "cuda" and dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no such numbers")
    x, residual, weight = made(3, n), made(3, n, seed=1), made(n, seed=2)
    y = fusebook.rms_norm(x, weight)
    quantised, scale = fusebook.rms_norm(x, weight, dtype=dtype)
    most = {torch.int8: 127, torch.float8_e4m3fn: 448}[dtype]
    assert quantised.dtype == dtype and scale.shape == (3, 1)
    torch.testing.assert_close(scale, y.abs().amax(-1, keepdim=True) / most)
    assert (quantised.float().abs().amax(-1) == most).all()
    step = scale if dtype == torch.int8 else torch.maximum(y.abs() / 8, scale / 512)
    assert ((quantised.float() * scale - y).abs() <= 0.501 * step).all()
    again, same, total = fusebook.add_rms_norm(x - residual, residual, weight, dtype=dtype)
    assert torch.equal(total, x - residual + residual)
    expected = fusebook.rms_norm(total, weight, dtype=dtype)
    assert torch.equal(again.float(), expected[0].float()) and torch.equal(same, expected[1])


@pytest.mark.parametrize("n", [100, 33000])
def test_eight_bits_of_a_row_are_of_its_own_mean_and_squares(n):
    """Which no lane of a wide row has alone; and what is behind the row would be its largest number."""
    x = made(2, n) + 40
    quantised, scale = fusebook.layer_norm(x, dtype=torch.int8)
    want = F.layer_norm(x.double(), (n,))
    torch.testing.assert_close(scale.double(), want.abs().amax(-1, keepdim=True) / 127, rtol=1e-4, atol=0)
    assert ((quantised.double() * scale - want).abs() <= 0.51 * scale).all()


@centred
@pytest.mark.parametrize("n", [40, 5000, 33000])
def test_rows_of_each_tensor_may_begin_at_a_distance_of_its_own(centred, n):
    x, residual, dy, dtotal = (made(3, n + more, seed=more)[:, :n] for more in range(1, 5))
    back, weight = fusebook.layer_norm_backward if centred else fusebook.rms_norm_backward, made(n)
    calls = (OURS[centred], x), (SUMS[centred], x, residual), (back, x, dy, weight, None, dtotal)
    for function, *given in calls[: 2 if n == 33000 else 3]:  # gradients of 5000 are shared, and wider ones take longer
        dense = [None if t is None else t.contiguous() for t in given]
        torch.testing.assert_close(function(*given), function(*dense))


def test_strides_of_more_than_32_bits_are_given_as_such():
    for stride, align in ((2**31 - 64, 8), (2**31, 1), (2**32 + 64, 1)):
        x = torch.empty_strided((2, 64), (stride, 1), dtype=torch.float16, device="meta")
        assert _rows.aligned(64, made(2, 64, dtype=torch.float16), x, None) == align


def test_numbers_that_begin_in_the_middle_of_a_word_are_no_pairs():
    for function, n in ((fusebook.rms_norm, 33000), (fusebook.rms_norm_backward, 9000)):
        memory = [made(2 * n + 1, dtype=torch.bfloat16, seed=i) for i in range(2)]
        given = [numbers[1:].view(2, n) for numbers in memory[: 2 if n == 9000 else 1]]
        with memcheck.guarded():
            got = function(*given, memory[0][1 : n + 1])
        want = function(*(t.clone() for t in given), memory[0][1 : n + 1].clone())
        torch.testing.assert_close(got, want, **HALF)


def test_a_row_of_zeros_has_the_scale_one_and_nan_shows_in_it():
    x = made(3, 70)
    x[0], x[1, 5] = 0, math.nan
    quantised, scale = fusebook.rms_norm(x, dtype=torch.int8)
    assert scale[0] == 1 and not quantised[0].any()
    assert scale[1].isnan() and scale[2].isfinite()


@centred
@pytest.mark.parametrize("n", [70, 33000])
def test_nan_and_infinity_stand_where_torch_has_them(centred, n):
    x = made(4, n)
    x[0, 1], x[1, 2], x[2] = math.nan, math.inf, 0
    torch.testing.assert_close(
        OURS[centred](x, eps=1e-5), plain(x, centred=centred), rtol=1e-4, atol=1e-4, equal_nan=True
    )
    dx = (fusebook.layer_norm_backward if centred else fusebook.rms_norm_backward)(x, torch.ones_like(x))[0]
    assert dx[0].isnan().all() and dx[1].isnan().any() and dx[2:].isfinite().all()


@centred
def test_eps_is_added_to_the_mean_of_squares(centred):
    x = 1e-3 * made(3, 70)
    torch.testing.assert_close(OURS[centred](x, eps=1e-5), plain(x, centred=centred, eps=1e-5))


@centred
def test_a_norm_is_that_of_the_sum_as_it_is_stored(centred):
    y, total = SUMS[centred](made(5, 37, dtype=torch.bfloat16), made(5, 37, dtype=torch.bfloat16, seed=1))
    assert torch.equal(y, OURS[centred](total))


def test_a_layer_norm_far_from_zero_does_not_cancel():
    x = made(3, 33000) + 1000
    torch.testing.assert_close(
        fusebook.layer_norm(x[:, :700]).double(), F.layer_norm(x[:, :700].double(), (700,)), rtol=0, atol=1e-3
    )
    torch.testing.assert_close(fusebook.layer_norm(x).double(), F.layer_norm(x.double(), (33000,)), rtol=0, atol=1e-3)


def far_from_zero(*shape, dtype, seed=0):
    """Whole numbers from 0 to 3, exactly; and, for each row, their sums with one of three large numbers."""
    rng = torch.Generator(DEVICE).manual_seed(seed)
    near = torch.randint(0, 4, shape, generator=rng, device=DEVICE).double()
    near[..., 0, :] = 2.0  # a row that does not vary is zero exactly
    far = torch.tensor([1, -1.5, 1.5], device=DEVICE).double().repeat(shape[-2])[: shape[-2], None]
    return near, (near + far / torch.finfo(dtype).eps).to(dtype)


def assert_score(got, want):
    """Within the limit that cards have."""
    eps = (8 if got.element_size() == 2 else 64) * torch.finfo(got.dtype).eps
    error = (got.double() - want).abs()
    assert (error <= eps * (want.abs() + want.square().mean(-1, keepdim=True).sqrt())).all()


def layouts(n):
    """Of rows of n numbers: side by side, and, where they are read across, neighbours of other rows side by side."""
    yield lambda *tensors: tensors
    if n < 5000:
        yield lambda *tensors: [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, 2, 16, 70, 700, 1500, 9000, 33000])
def test_a_layer_norm_of_the_least_differences_far_from_zero_is_that_of_the_differences(n, dtype):
    rows = 130 if n < 5000 else 3
    near, x = far_from_zero(rows, n, dtype=dtype)
    w, b, dy = (made(*size, seed=seed).to(dtype) for seed, size in enumerate([(n,), (n,), (rows, n)]))
    exact = [t.double().requires_grad_() for t in (near, w, b)]
    want = plain(*exact, centred=True)
    right = torch.autograd.grad(want, exact, dy.double())
    want = want.detach()
    for laid in layouts(n):
        given, ones = laid(x, torch.ones_like(x))
        got = fusebook.layer_norm(given, w, b, eps=1e-5)
        assert_score(got, want)
        got, total = fusebook.add_layer_norm(given - 1, ones, w, b, eps=1e-5)
        if torch.equal(total, x):  # where one less is a number, too
            assert_score(got, want)
        quantised, scale = fusebook.layer_norm(given, w, b, eps=1e-5, dtype=torch.int8)
        assert ((quantised.double() * scale.double() - want).abs() <= 0.52 * scale.double()).all()
        dx, dw, db = fusebook.layer_norm_backward(*laid(x, dy), w, b, eps=1e-5)
        if dtype.itemsize > 2 and n != 2:  # of two numbers the gradient is what is left of a difference
            for found, exactly in ((dx, right[0]), (dw, right[1]), (db, right[2])):
                assert_score(found, exactly)
    y = fusebook.layer_norm(x, eps=1e-5)
    assert not y[0].any()


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_a_layer_norm_take_each_row_relative_to_its_own_elements(shared, tables, force_parts):
    if shared:
        force_parts(128)
    near, x = far_from_zero(9, 300, dtype=torch.float32)
    w, dy = made(300), made(9, 300, seed=1)
    exact = [t.double().requires_grad_() for t in (near, w)]
    right = torch.autograd.grad(plain(*exact, centred=True), exact, dy.double())
    for got, want in zip(fusebook.layer_norm_backward(x, dy, w, eps=1e-5), right, strict=True):
        assert_score(got, want)


@pytest.mark.parametrize("n", [9000, 33000, 70000])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_large_number_costs_others_no_digits_in_a_layer_norm(place, n):
    x = made(3, n)
    x[:, {"first": 0, "middle": n // 2, "last": n - 1}[place]] = 1e6
    assert_score(fusebook.layer_norm(x, eps=1e-5), plain(x.double(), centred=True))
    exact = x.double().requires_grad_()
    dy = made(3, n, seed=1)
    (right,) = torch.autograd.grad(plain(exact, centred=True), exact, dy.double())
    assert_score(fusebook.layer_norm_backward(x, dy, eps=1e-5)[0], right)


def test_leading_axes_may_be_any_and_there_may_be_nothing():
    x, w = made(2, 3, 4, 50), made(50, seed=1)
    for view in (x, x.transpose(0, 2), x[:, ::2], x.expand(5, 2, 3, 4, 50), x[0, 0, 0]):
        torch.testing.assert_close(fusebook.rms_norm(view, w), F.rms_norm(view, (50,), w, 1e-6))
    for shape in ((0, 50), (3, 0), (0, 0)):
        assert fusebook.layer_norm(made(*shape)).shape == shape
    dx, dw = fusebook.rms_norm_backward(made(0, 50), made(0, 50), w)
    assert dx.shape == (0, 50) and torch.equal(dw, torch.zeros_like(w))


@centred
def test_rows_do_not_depend_on_each_other(centred):
    # Of one tile, of five, of several programs; of such as begin within vectors.
    for n, dtype in ((70, torch.float32), (9000, torch.float32), (33000, torch.float32), (781, torch.float16)):
        x, w = made(7, n, dtype=dtype), made(n, seed=1)
        whole = OURS[centred](x, w)
        assert all(torch.equal(OURS[centred](x[:rows], w), whole[:rows]) for rows in (1, 3))


@centred
@pytest.mark.parametrize("n", [301, 781, 1021, 2881, 33001])  # of 1021 the last tile but one is ragged
@pytest.mark.parametrize("more", [0, 8, 3])  # numbers between rows: with 3 of them, y begins elsewhere than x
def test_rows_that_begin_within_vectors_take_nothing_from_their_neighbours(centred, n, more):
    x, residual = (made(9, n + more, dtype=torch.float16, seed=seed) for seed in (0, 1))
    x[::2], x[:, n:] = math.nan, math.inf
    weight, bias = made(n, seed=2), made(n, seed=3)
    y = OURS[centred](x[:, :n], weight, bias)
    sums, total = SUMS[centred](x[:, :n], residual[:, :n], weight, bias)
    assert torch.equal(total[1::2], (x + residual)[1::2, :n])
    for got, of in ((y, x[:, :n]), (sums, total)):
        assert got[::2].isnan().all()
        torch.testing.assert_close(got[1::2].double(), plain(of[1::2].double(), weight, bias, centred=centred), **HALF)
    if n < 1000:
        quantised, scale = OURS[centred](x[1::2, :n], weight, bias, dtype=torch.int8)
        assert ((quantised.double() * scale - y[1::2].double()).abs() <= 0.6 * scale).all()


@centred
@pytest.mark.parametrize(
    ("n", "dtype", "parts"), [(300, torch.float16, 2), (301, torch.float16, 3), (301, torch.float32, 2)], ids=str
)
@pytest.mark.parametrize("when", ["in turn", "on time"] if DEVICE == "cuda" else ["on time", "late"])
def test_a_shared_row_has_the_same_bits_whenever_words_arrive(when, centred, n, dtype, parts, force_parts, monkeypatch):
    """In the interpreter programs run in turn: the first recomputes all words, the others find them.

    On time: a launch finds the words of the one before. Late: words are never seen, so every program recomputes all,
    for which `publish` is replaced: not possible in compiled code.
    """
    force_parts(256 if parts == 2 else 128)
    x, residual, dy = (made(5, n, dtype=dtype, seed=seed) for seed in range(3))
    w, b = made(n, seed=3).to(dtype), made(n, seed=4).to(dtype)
    total = x + 3
    backward = fusebook.layer_norm_backward if centred else fusebook.rms_norm_backward

    def all_of_them():
        y, *rest = SUMS[centred](x, residual, w, b, eps=1e-5)
        return [OURS[centred](total, w, b, eps=1e-5), y, *rest, *backward(total, dy, w, b, residual, eps=1e-5)]

    found = all_of_them()
    exact = [t.double().requires_grad_() for t in (total, w, b)]
    want = plain(*exact, centred=centred)
    right, *others = torch.autograd.grad(want, exact, dy.double())
    summed = (x + residual).double()
    expected = [
        want,
        plain(summed, w.double(), b.double(), centred=centred),
        summed,
        right + residual.double(),
        *others,
    ]
    near = 1e-2 if dtype == torch.float16 else 1e-4
    for got, exactly in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), exactly, rtol=near, atol=near)
    workspaces, made_one = [], norms.workspace
    if when == "late":
        monkeypatch.setattr(norms, "publish", nothing)
    if when == "on time":
        monkeypatch.setattr(norms, "workspace", lambda *a: workspaces.append(made_one(*a)) or workspaces[-1])
        all_of_them()
        groups = len(workspaces[2][0]) // (parts * (2 if centred else 1)) - 5
        assert [len(words) for words, _ in workspaces[:2]] == [5 * parts] * 2 and groups >= 1
        assert all((words != 0).all() for words, _ in workspaces)
        kept = iter(workspaces[:3])
        monkeypatch.setattr(norms, "workspace", lambda *_: next(kept))
        if DEVICE == "cpu" and not centred:
            monkeypatch.setattr(norms, "first_missing", None)  # nothing to recompute
    assert all(torch.equal(a, b) for a, b in zip(all_of_them(), found, strict=True))


@triton.jit
def nothing(workspace_ptr, word):
    """Replaces `publish`, so that no program ever sees a word of another."""


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU words come when they come")
def test_a_part_of_a_gradient_is_there_when_both_of_its_words_are(force_parts, monkeypatch):
    force_parts(128)
    x, dy, workspaces, made_one = made(1, 300) + 3, made(1, 300, seed=1), [], norms.workspace
    monkeypatch.setattr(norms, "workspace", lambda *given: workspaces.append(made_one(*given)) or workspaces[-1])
    want = fusebook.layer_norm_backward(x, dy)[0]
    left, late = workspaces[0]
    left = left.clone()
    left[3:6] = 0  # of each part the squares, and not the sum yet
    monkeypatch.setattr(norms, "workspace", lambda *_: (left, late))
    assert torch.equal(fusebook.layer_norm_backward(x, dy)[0], want)


@centred
@pytest.mark.parametrize(("rows", "n"), [(1, 453), (2, 34), (0, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_few_rows_have_gradients_of_the_weights(centred, rows, n, kind, dtype):
    x, dy = made(rows, n, dtype=dtype), made(rows, n, dtype=dtype, seed=1)
    for given in ((kind, kind), (None, kind), (kind, None)):
        vectors = [None if v is None else made(n, dtype=v, seed=2) for v in given]
        backward = fusebook.layer_norm_backward if centred else fusebook.rms_norm_backward
        dx, *rest = backward(x, dy, *vectors, eps=1e-5)
        exact = [None if t is None else t.double().requires_grad_() for t in (x, *vectors)]
        told = [t for t in exact if t is not None]
        right = torch.autograd.grad(plain(*exact, centred=centred), told, dy.double())
        for got, want, like in zip((dx, *rest), right, (x, *[v for v in vectors if v is not None]), strict=True):
            assert got.dtype == like.dtype
            close = HALF if got.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(got.double(), want, **close)


@pytest.mark.parametrize("n", [5, 100])  # few columns and many
@pytest.mark.parametrize("processors", [1, 2, 3])  # 16, 32 and 33 groups
def test_partial_rows_of_all_groups_are_added_up(processors, n, tables, monkeypatch):
    monkeypatch.setattr(norms, "gpu", lambda device: (None, processors))
    monkeypatch.setattr(norms, "_BACKWARD_ROWS", {4: (_rows.Config(2**20, 128, 1),)})
    x, dy, w = made(33, n), made(33, n, seed=1), made(n, seed=2)
    _, dw, db = fusebook.layer_norm_backward(x, dy, w, w)
    torch.testing.assert_close(dw.double(), (dy * plain(x.double(), centred=True)).sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(db.double(), dy.double().sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "dtype", "added", "weighted"),
    [
        (65536, torch.bfloat16, False, True),
        (65528, torch.float16, True, False),
        (32000, torch.bfloat16, False, False),
        (32768, torch.bfloat16, True, True),
    ],
    ids=str,
)
def test_gradients_of_wide_rows_are_those_of_the_norm_whatever_comes_with_a_row(n, dtype, added, weighted):
    x, dy, residual = (made(19, n + 8, dtype=dtype, seed=seed)[:, :n] for seed in range(3))
    w = made(n, seed=3) if weighted else None  # of another dtype
    told = [x.double().requires_grad_(), *([w.double().requires_grad_()] if weighted else [])]
    right = torch.autograd.grad(plain(*told, centred=False), told, dy.double())
    given = (x, dy, w, None, residual if added else None)
    dx, *dw = fusebook.rms_norm_backward(*given, eps=1e-5)
    torch.testing.assert_close(dx.double(), right[0] + residual.double() if added else right[0], **HALF)
    for got, want in zip(dw, right[1:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)
    again = fusebook.rms_norm_backward(*given, eps=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(again, (dx, *dw), strict=True))
    for rows in (slice(1), slice(5, 12)):
        few = (t if t is None or t.dim() < 2 else t[rows] for t in given)
        assert torch.equal(fusebook.rms_norm_backward(*few, eps=1e-5)[0], dx[rows])


@centred
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_beyond_those_of_the_kernels_are_normalised_by_torch(centred, dtype):
    n = 2**20 + 1
    near, x = far_from_zero(3, n, dtype=dtype)
    if not centred:
        x = made(n, 3, dtype=dtype).T
        near = x.double()
    weight, bias, residual = made(n, seed=1), made(n, seed=2), made(3, n, dtype=dtype, seed=3)
    want = plain(near, weight.double(), bias.double(), centred=centred)
    y = OURS[centred](x, weight, bias, eps=1e-5)
    assert_score(y, want)
    quantised, scale = OURS[centred](x, weight, bias, eps=1e-5, dtype=torch.int8)
    torch.testing.assert_close(scale.double(), want.abs().amax(-1, keepdim=True) / 127, rtol=1e-4, atol=0)
    assert ((quantised.double() * scale - want).abs() <= 0.51 * scale).all()
    x.requires_grad_()
    for of in (SUMS[centred](x, residual), SUMS[centred](x, residual, dtype=torch.int8)):
        assert torch.equal(of[-1], x + residual)
    assert_score(SUMS[centred](x, residual)[0], OURS[centred](x + residual))


@pytest.mark.parametrize(
    "view",
    [
        lambda: made(1100, 130).T,  # [130, 1100]: several tiles along both axes
        lambda: made(130, 1, 3).permute(2, 1, 0),
        lambda: made(3, 70, 130).mT,
        lambda: made(70, 3, 130).permute(2, 1, 0),
        lambda: made(5, 70, 3, 9).permute(3, 0, 2, 1),
        lambda: made(9, 70)[:, ::2],
        lambda: made(9, 1).expand(9, 70),
        lambda: made(1, 70).T,
        lambda: made(70, 0).T,
        lambda: made(131, 75, dtype=torch.float64)[1:, 3:].T,
        lambda: made(70, 130, dtype=torch.bfloat16).T,
    ],
)
def test_rows_that_lie_apart_are_copied_as_they_are(view):
    x = view()
    y = with_adjacent_elements(x)
    assert y.is_contiguous() and torch.equal(y, x)
    assert with_adjacent_elements(y) is y


def with_gaps(x):
    """Rows along two axes, the second first in memory; between places along the first one number is nobody's."""
    outer = next(n for n in (2, 3, 5) if len(x) % n == 0)
    rows = x.unflatten(0, (outer, -1))
    memory = x.new_full((outer, rows[0].numel() + 1), math.nan)
    return memory[:, :-1].view(outer, x.shape[1], -1).mT.copy_(rows)


@centred
@pytest.mark.parametrize("shape", [(3, 2), (33, 70), (96, 256), (35, 2100)], ids=str)
@pytest.mark.parametrize("how", ["across", "permuted", "both", "with gaps"])
@pytest.mark.parametrize("added", [False, True])
def test_rows_that_lie_apart_are_read_where_they_are(centred, shape, how, added, monkeypatch):
    if shape[-1] <= 1024:  # wider rows are copied
        monkeypatch.setattr(norms, "with_adjacent_elements", None)
    x, residual = (made(*shape, seed=seed) + 3 * seed for seed in (1, 2))
    x[:, : shape[1] // 2] += 50  # parts of a row have other means
    if how == "with gaps":
        x, residual = with_gaps(x), with_gaps(residual)
    else:
        x, residual = (inputs.laid(t, "across" if how == "both" else how) for t in (x, residual))
    if how == "both":  # each its own way
        residual = residual.contiguous()
    weight, bias = made(shape[1], seed=2), made(shape[1], seed=3)
    want = x.double() + residual.double() if added else x.double()
    given = (x, residual, weight, bias) if added else (x, weight, bias)
    y = (SUMS if added else OURS)[centred](*given, eps=1e-5)
    if added:
        y, total = y
        assert torch.equal(total, x + residual)
    torch.testing.assert_close(y.double(), plain(want, weight, bias, centred=centred), rtol=1e-4, atol=1e-4)


@centred
@pytest.mark.parametrize("shape", [(3, 2), (33, 70), (96, 256)], ids=str)
@pytest.mark.parametrize("how", ["across", "permuted", "both", "with gaps"])
@pytest.mark.parametrize("added", [False, True])
def test_gradients_of_few_rows_that_lie_apart_are_of_rows_where_they_are(centred, shape, how, added, monkeypatch):
    if shape[-1] <= 1024:  # wider rows are copied
        monkeypatch.setattr(norms, "with_adjacent_elements", None)
    x, dy, dtotal = (made(*shape, seed=seed) + seed for seed in range(3))
    if how == "with gaps":
        x, dy, dtotal = map(with_gaps, (x, dy, dtotal))
    else:
        x, dy, dtotal = (inputs.laid(t, "across" if how == "both" else how) for t in (x, dy, dtotal))
    if how == "both":  # each its own way
        dy = dy.contiguous()
    weight = made(shape[1], seed=3)
    backward = fusebook.layer_norm_backward if centred else fusebook.rms_norm_backward
    dx, dw, db = backward(x, dy, weight, weight, dtotal if added else None, eps=1e-5)
    exact = [t.double().requires_grad_() for t in (x, weight, weight)]
    right, *vectors = torch.autograd.grad(plain(*exact, centred=centred), exact, dy.double())
    assert dx.is_contiguous()
    torch.testing.assert_close(dx.double(), right + dtotal.double() if added else right, rtol=1e-4, atol=1e-4)
    for got, want in zip((dw, db), vectors, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)


@centred
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 2), (100, 34), (2, 70, 300), (67, 2100)], ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_gradients_of_many_rows_that_lie_across_are_of_rows_where_they_are(centred, dtype, shape, added, monkeypatch):
    if shape[-1] <= 1024:  # wider rows are copied
        monkeypatch.setattr(norms, "with_adjacent_elements", None)
    given = [made(*shape, seed=seed) + seed for seed in range(3)]
    given[0][..., : shape[-1] // 2] += 5  # parts of a row have other means
    x, dy, dtotal = (t.to(dtype).mT.contiguous().mT for t in given)
    weight = made(shape[-1], seed=3).to(dtype)
    backward = fusebook.layer_norm_backward if centred else fusebook.rms_norm_backward
    found = backward(x, dy, weight, weight, dtotal if added else None, eps=1e-5)
    exact = [t.double().clone().requires_grad_() for t in (x, weight, weight)]
    right, *vectors = torch.autograd.grad(plain(*exact, centred=centred), exact, dy.double())
    near = HALF if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 2e-4}
    assert found[0].is_contiguous()
    for got, want in zip(found, (right + dtotal.double() if added else right, *vectors), strict=True):
        torch.testing.assert_close(got.double(), want, **near)
    again = backward(x, dy, weight, weight, dtotal if added else None, eps=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("n", [34, 2100])
def test_gradients_of_rows_that_lie_across_keep_nan_and_rows_beyond_the_last_to_themselves(n):
    x, dy, w = made(67, n).mT.contiguous().mT, made(67, n, seed=1).mT.contiguous().mT, made(n, seed=2)
    dx, dw, db = fusebook.rms_norm_backward(x, dy, w, w, eps=0.0)
    assert dx.isfinite().all() and dw.isfinite().all() and db.isfinite().all()
    assert fusebook.rms_norm_backward(x, dy, eps=0.0)[0].isfinite().all()
    x[5, 3] = math.nan
    bad, bad_dw = fusebook.rms_norm_backward(x, dy, w, eps=0.0)
    assert bad[5].isnan().all() and bad_dw.isnan().all()
    rest = torch.arange(67, device=DEVICE) != 5
    assert torch.equal(bad[rest], dx[rest])


@pytest.mark.skipif(DEVICE == "cuda", reason="on the CPU pages that nobody touches take no memory")
def test_gradients_of_rows_whose_numbers_lie_2_to_the_31_apart(monkeypatch):
    monkeypatch.setattr(norms, "with_adjacent_elements", None)
    x, dy = (torch.empty_strided((64, 3), (1, 2**31 + 64), dtype=torch.float16) for _ in range(2))
    x.copy_(made(64, 3)), dy.copy_(made(64, 3, seed=1))
    w = made(3, seed=2)
    got, want = (fusebook.layer_norm_backward(*given, w) for given in ((x, dy), (x.contiguous(), dy.contiguous())))
    torch.testing.assert_close(got, want)


@pytest.fixture
def launches(monkeypatch):
    """What would be launched on a GPU that is absent, for rows that have no memory."""

    def of(operator, rows, n, dtype, *, centred=False, added=False, capability=(9, 0)):
        found = []
        monkeypatch.setattr(norms, "gpu", lambda device: (capability, 132))
        monkeypatch.setattr(norms, "overlapping", lambda device: {})
        monkeypatch.setattr(norms, "INTERPRETED", False)
        monkeypatch.setattr(norms, "workspace", lambda *_: (None, {}))
        monkeypatch.setattr(norms, "apply", lambda *_: None)
        monkeypatch.setattr(
            norms, "launch", lambda kernel, grid, *args, **constants: found.append((kernel, grid, args, constants))
        )
        x, w = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((rows, n), n))
        if operator == "norm":
            norms._norm_into(x, x if added else None, None, x, x if added else None, w, None, centred, 1e-6)
        else:
            norms._backward_into([x, w, w], x, x, x if added else None, w, w, centred, 1e-6)
        return found[0] if found else None

    return of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("capability", "memory"), [((9, 0), 227), ((8, 9), 100)])
def test_all_programs_of_a_wide_gradient_have_room_at_once(dtype, centred, added, capability, memory, launches):
    """A program waits for those without a place. With more words to a thread, it has no registers for them."""
    size = dtype.itemsize
    for n in (20001, 32768, 50257, 65536, 131072, 262144, 2**20):
        for rows in (1, 7, 8192):
            found = launches("gradient", rows, n, dtype, centred=centred, added=added, capability=capability)
            if found is None:
                assert size == 8 or (centred and n == 2**20)
                continue
            _, (programs,), _, constants = found
            each, warps, lanes = math.ceil(programs / 132), constants["num_warps"], constants["LANES"]
            shared = (constants["STAGES"] - 1) * (2 + added) * constants["BLOCK"] * size
            assert each * 32 * warps * constants["maxnreg"] <= 65536
            assert each * (shared + 2048) <= memory * 1024
            assert lanes >= 32 * warps
            assert n * size > 2**20 or lanes <= 4 * 32 * warps


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_width_alone_decides_how_a_row_is_added_up(dtype, added, centred, launches):
    for n in (1, 64, 75, 96, 131, 150, 274, 520, 781, 1602, 4096, 8191, 8192, 16384, 32768, 50257, 262144):
        for operator in ("norm", "gradient"):
            cuts = set()
            for rows in (1, 7, 4096, 10**6):
                found = launches(operator, rows, n, dtype, added=added, centred=centred)
                if found is not None:
                    kernel, _, _, constants = found
                    # Weights may be loaded ahead where there are few. In the gradient a tile may have fewer rows, too.
                    free = {"AHEAD", "FLAT", "EARLY"} | ({"ROWS"} if operator == "gradient" else set())
                    left = {k: v for k, v in constants.items() if k not in free}
                    cuts.add((kernel.__name__, str(left)))
            assert len(cuts) == 1 or not cuts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_launch_config_holds_every_element_of_a_row_once_and_a_word_of_every_part(dtype, launches):
    for n in (1, 130, 513, 1024, 4095, 4097, 8193, 16385, 30001, *range(32769, 2**18, 2111), 2**19 + 1, 2**20):
        for operator in ("norm", "gradient"):
            found = launches(operator, 8, n, dtype)
            if found is None:
                assert dtype == torch.float64 and n > (16384 if operator == "norm" else 4096)
                continue
            kernel, (programs,), args, constants = found
            held = constants["BLOCK"] * constants.get("CHUNKS", 1)
            if kernel is norms._norm_shared:
                *_, span, parts = args
                vec = constants["VEC"]
                span *= constants["ALIGN"] * vec
                assert programs == 8 * parts
            elif kernel is norms._norm_backward_shared:
                *_, groups, span, parts, _ = args
                vec = 1
                assert programs == groups * parts
            else:
                assert held >= n
                continue
            assert (parts - 1) * span < n + vec - 1 <= parts * span and span <= held
            assert span * dtype.itemsize % 128 == 0 and constants["LANES"] >= parts


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter adds as many at once as take the least time")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "begin"), [(75, 0), (131, 0), (246, 0), (512, 1), (638, 0)])
def test_a_row_comes_to_the_same_bits_among_few_and_among_many(dtype, n, begin):
    x = made(20000 * n + 1, dtype=dtype)[begin:][: 20000 * n].view(20000, n)
    weight = made(n, dtype=dtype, seed=1)
    for norm in OURS.values():
        assert torch.equal(norm(x[:500], weight), norm(x, weight)[:500])


def test_no_weights_are_held_for_which_a_thread_has_no_register(launches):
    """They would go through memory."""
    dtypes = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    ahead = {
        (n, size, centred): launches("norm", 8, n, dtypes[size], centred=centred)[3]["AHEAD"]
        for n, size in ((4096, 4), (18432, 4), (28672, 4), (32768, 4), (8192, 8), (16384, 8), (28672, 2))
        for centred in (False, True)
    }
    behind = {(28672, 4, True), (32768, 4, False), (32768, 4, True), (16384, 8, False), (16384, 8, True)}
    assert {case for case, early in ahead.items() if not early} == behind
    assert not launches("norm", 10**6, 4096, torch.bfloat16)[3]["AHEAD"]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda x: fusebook.rms_norm(x[0, 0]), ValueError, r"expected x of shape \[..., D\], got \[\]"),
        (lambda x: fusebook.rms_norm(x, x[0, :3]), ValueError, r"weight of shape \[5\], \[D\] where x is.*got \[3\];"),
        (lambda x: fusebook.layer_norm(x, x[0], x), ValueError, r"layer_norm: expected bias of shape \[5\]"),
        (lambda x: fusebook.add_rms_norm(x, x[:1]), ValueError, "add_rms_norm: expected residual of shape"),
        (lambda x: fusebook.add_rms_norm(x, None), TypeError, "expected residual to be a torch.Tensor"),
        (lambda x: fusebook.add_layer_norm(x, x.half()), TypeError, "expected residual to be torch.float32"),
        (lambda x: fusebook.rms_norm(x, eps="1"), TypeError, "expected eps to be a number, got str"),
        (lambda x: fusebook.rms_norm(x, dtype=torch.float16), TypeError, "expected dtype to be float8_e4m3fn or int8"),
        (lambda x: fusebook.rms_norm_backward(x, x[:1]), ValueError, "expected dy of shape"),
        (lambda x: fusebook.rms_norm(x.requires_grad_(), dtype=torch.int8)[1].sum().backward(), NotImplementedError,
         "quantised_norm: expected no gradient"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(call, error, said):
    with pytest.raises(error, match=said):
        call(made(2, 5))


COMPILED = """
import json
import fusebook, torch, triton
from fusebook.measure import compiled

triton.runtime.driver.set_active(compiled.AbsentGPU())
x, w = torch.empty(264, 65536, dtype=torch.bfloat16), torch.empty(65536, dtype=torch.bfloat16)
with compiled.kernels() as found:
    fusebook.rms_norm_backward(x, x, w)
print(json.dumps({kernel.metadata.name: kernel.asm["ttgir"] for kernel in found}))
"""


@pytest.mark.slow
def test_programs_leave_their_words_before_they_wait_for_others(tmp_path):
    """The compiler moves what a loop does between its turns. Waiting first, programs would wait for each other."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    end = warm.run("-c", COMPILED, env=environment)
    assert end.returncode == 0, end.stderr[-2000:]
    source = json.loads(end.stdout.splitlines()[-1])["_norm_backward_shared"]
    first, waiting = source.split("scf.for", 1)[1].split("isVolatile = true", 1)
    assert first.count("tt.atomic_rmw exch") == 1
    assert "ttg.async_copy_global_to_local" in waiting, "nothing is loaded ahead"


SUMMED = """
import json
import fusebook, torch, triton
from fusebook.measure import compiled

triton.runtime.driver.set_active(compiled.AbsentGPU())
x, w = torch.empty(300, 512, dtype=torch.bfloat16), torch.empty(512, dtype=torch.bfloat16)
with compiled.kernels() as found:
    fusebook.rms_norm_backward(x, x, w)
print(json.dumps({kernel.metadata.name: kernel.asm["ptx"] for kernel in found}))
"""


@pytest.mark.slow
def test_partial_rows_are_read_behind_the_wait_for_them(tmp_path):
    """Who adds them up starts while they are made."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    end = warm.run("-c", SUMMED, env=environment)
    assert end.returncode == 0, end.stderr[-2000:]
    found = json.loads(end.stdout.splitlines()[-1])
    assert "griddepcontrol.launch_dependents" in found["_norm_backward_rows"]
    before, behind = found["_column_sums"].split("griddepcontrol.wait")
    assert "ld.global" not in before and "ld.global" in behind


@centred
@pytest.mark.parametrize("eps", [0.0, 1e-46, -1e-6])
@pytest.mark.parametrize("across", [False, True])
def test_rows_beyond_the_last_add_nothing_to_weights_without_eps(centred, eps, across):
    x, dy, w = made(67, 70), made(67, 70, seed=1), made(70, seed=2)
    x, dy = (t.mT.contiguous().mT if across else t for t in (x, dy))
    backward = fusebook.layer_norm_backward if centred else fusebook.rms_norm_backward
    for dx, dw in (backward(x, dy, w, eps=eps), backward(x[:2], dy[:2], w, eps=eps)):
        assert dx.isfinite().all() and dw.isfinite().all()
