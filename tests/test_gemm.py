"""What is special to products: widths and layouts of weights, TF32, gradients, and plans that were tuned."""

import contextvars
import os
import types

import pytest
import torch

import fusebook
import warm
from fusebook import check, explore, tune
from fusebook.cards.concat_gemm import CONCAT_GEMM
from fusebook.cards.swiglu import SWIGLU
from fusebook.inputs import poison
from fusebook.kernels import _products
from fusebook.kernels import concat_gemm as concat
from fusebook.kernels import swiglu as gated
from fusebook.kernels._products import Cost, Plan, Tuned
from fusebook.kernels.concat_gemm import concat_gemm_eager
from fusebook.kernels.swiglu import swiglu_eager
from fusebook.tune import costs, products

RAGGED = (1, 7, 63, 65)
DEPTHS = (1, 65)  # of K: less than a step, and a step and one more


def drawn(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, device=device).to(dtype) / 4


def is_right(op, got, inputs, math=None):
    return check.yardstick(op, inputs).judge(got, math).ok


@pytest.fixture
def allow_tf32():
    """Set torch's own switch; it is put back."""
    before = torch.backends.cuda.matmul.allow_tf32

    def switch(on):
        torch.backends.cuda.matmul.allow_tf32 = on

    yield switch
    switch(before)


def stored(w, how):
    """The same weight, its columns or its rows side by side, or neither, or neither and with gaps."""
    if how == "columns":
        return w.T.contiguous().T
    if how == "slice":  # of a wider weight, one column in, so that nothing is aligned
        return torch.cat([w[:, :1], w, w[:, :1]], 1)[:, 1:-1]
    if how == "gaps":
        return w.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
    return w


@pytest.mark.parametrize("M", RAGGED)
@pytest.mark.parametrize("K", DEPTHS)
def test_ragged_shapes_are_right(M, K, device):
    # One dtype for each shape of x keeps the interpreter's time down; the cards try all of them on other shapes.
    dtype = (torch.float32, torch.float16, torch.bfloat16)[(M + K) % 3]
    x, *weights = drawn(M, K, dtype=dtype), *(drawn(K, N, dtype=dtype) for N in RAGGED)
    x, *weights = (t.to(device) for t in (x, *weights))
    poison([x.new_empty(M, sum(RAGGED))])
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, weights, strategy="fused"), (x, *weights))
    assert is_right(SWIGLU, fusebook.swiglu(x, weights[-1], weights[-1] + 1), (x, weights[-1], weights[-1] + 1))


def test_a_wide_and_a_long_product_are_right(device):
    x, w = drawn(2, 781, device=device), drawn(781, 781, device=device)
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, [w, w[:, :5]], strategy="fused"), (x, w, w[:, :5]))


@pytest.mark.parametrize("how", ["rows", "columns", "slice", "gaps"])
@pytest.mark.parametrize("strategy", _products.STRATEGIES)
def test_weights_of_any_layout_are_not_copied(how, strategy, device, monkeypatch):
    x, a, b = drawn(20, 64, device=device), *(stored(drawn(64, n, device=device), how) for n in (48, 48))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda *_: pytest.fail("copied"))
    got = fusebook.concat_gemm(x, [a, b], strategy=strategy)
    also = fusebook.swiglu(x, a, b)
    monkeypatch.undo()
    assert is_right(CONCAT_GEMM, got, (x, a, b))
    assert is_right(SWIGLU, also, (x, a, b))


@pytest.mark.parametrize("M", [70, 71])  # interpreted, tiles of an odd number of rows are stored in halves
@pytest.mark.parametrize("how", ["rows", "columns"])
def test_float16_is_right_by_descriptors_too(how, M, device):
    sizes = ((M, 72), (72, 48), (72, 48), (72, 64))
    x, a, b, whole = (drawn(*size, dtype=torch.float16, device=device) for size in sizes)
    a, b, whole = (stored(w, how) for w in (a, b, whole))
    for first in (a, whole):  # the copy engine stores where no tile of the first reaches into the second
        assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, [first, b], strategy="fused"), (x, first, b))
    assert is_right(SWIGLU, fusebook.swiglu(x, a, b), (x, a, b))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("how", ["rows", "columns"])
def test_the_weight_with_the_higher_address_may_come_first(how, swapped, device):
    both = drawn(2, 64, 48, device=device) if how == "rows" else drawn(2, 48, 64, device=device).mT
    a, b = (both[1], both[0]) if swapped else (both[0], both[1])
    assert _products._stack((a, b), "row" if how == "rows" else "column") == (64 * 48, int(swapped))
    x = drawn(70, 64, device=device)
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, [a, b], strategy="fused"), (x, a, b))
    assert is_right(SWIGLU, fusebook.swiglu(x, a, b), (x, a, b))


def test_weights_that_are_no_stack_are_told_from_those_that_are(device):
    both = drawn(4, 8, 16, device=device)
    assert _products._stack(list(both), "row") == (128, 0)
    assert _products._stack([both[0], both[0]], "row") is None, "a stride of zero is none"
    assert _products._stack([both[0], both[1], both[3]], "row") is None, "unequal distances"
    assert _products._stack([both[0], both[1, :, :8]], "row") is None, "unequal widths"


def test_views_that_overlap_are_read_as_they_are(device):
    whole = drawn(64, 80, device=device)
    x, a, b = drawn(9, 64, device=device), whole[:, :64], whole[:, 16:]
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, [a, b], strategy="fused"), (x, a, b))
    expanded = drawn(64, 1, device=device).expand(64, 24)
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, [expanded, a], strategy="fused"), (x, expanded, a))


@pytest.mark.parametrize("strategy", [*_products.STRATEGIES, None])
def test_one_weight_and_many(strategy, device):
    x = drawn(5, 16, device=device)
    weights = [drawn(16, n, device=device) for n in (8, 24, 16, 0, 8, 16, 8, 3)]  # four of different widths first
    weights[5] = stored(weights[5], "columns")
    for some in (weights[:1], weights[3:4], weights):
        got = fusebook.concat_gemm(x, some, strategy=strategy)
        assert got.is_contiguous()
        assert is_right(CONCAT_GEMM, got, (x, *some))


def test_an_allocator_that_the_caller_has_set_stays_theirs(device):
    """Triton keeps the allocator of what a kernel needs besides its arguments in the context of the caller."""
    x, w = drawn(5, 16, device=device), drawn(16, 8, device=device)
    before = dict(contextvars.copy_context())
    fusebook.concat_gemm(x, [w, drawn(16, 24, device=device)], strategy="fused")
    assert dict(contextvars.copy_context()) == before


def test_leading_axes_are_kept(device):
    x, a, b = drawn(2, 3, 16, device=device), drawn(16, 8, device=device), drawn(16, 8, device=device)
    assert torch.equal(fusebook.concat_gemm(x, [a, b])[1, 2], fusebook.concat_gemm(x[1, 2:], [a, b])[0])
    assert fusebook.concat_gemm(x[0, 0], [a, b]).shape == (16,)
    assert fusebook.swiglu(x, a, b).shape == (2, 3, 8)


@pytest.mark.parametrize(("M", "K", "N"), [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_empty_in_every_way(M, K, N, device):
    x, w = drawn(M, K, device=device), drawn(K, N, device=device)
    for strategy in (*_products.STRATEGIES, None):
        assert torch.equal(fusebook.concat_gemm(x, [w, w], strategy=strategy), concat_gemm_eager(x, w, w))
    assert torch.equal(fusebook.swiglu(x, w, w), swiglu_eager(x, w, w))


@pytest.mark.parametrize("strategy", _products.STRATEGIES)
@pytest.mark.parametrize("N", [33, 72])
def test_a_bias_is_added_before_silu(N, strategy, device):
    x, gate, up = drawn(20, 64, device=device), drawn(64, N, device=device), drawn(64, N, device=device)
    bias = drawn(N, 2, device=device).T
    got, want = fusebook.swiglu(x, gate, up, bias, strategy=strategy), swiglu_eager(x, gate, up, bias)
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_swiglu_of_torchs_products_is_right_in_every_dtype(dtype, device):
    x, gate, up = (drawn(*shape, dtype=dtype, device=device) for shape in ((70, 40), (40, 81), (40, 81)))
    poison([x.new_empty(70, 81)])
    assert is_right(SWIGLU, fusebook.swiglu(x, gate, up, strategy="views"), (x, gate, up))


def test_float64_is_multiplied_by_torch(device):
    x, a, b = (drawn(*shape, dtype=torch.float64, device=device) for shape in ((9, 40), (40, 24), (40, 24)))
    assert torch.equal(fusebook.concat_gemm(x, [a, b]), concat_gemm_eager(x, a, b))
    assert is_right(SWIGLU, fusebook.swiglu(x, a, b), (x, a, b))


def test_nan_and_infinity_go_where_they_belong(device):
    x, w = drawn(6, 16, device=device), drawn(16, 24, device=device)
    x[1, 3], x[2, 4] = torch.nan, torch.inf
    got = fusebook.concat_gemm(x, [w, w], strategy="fused")
    assert torch.equal(got.isfinite().all(1), torch.tensor([True, False, False, True, True, True], device=device))
    assert got[1].isnan().all()
    # A gate far below zero closes, and does not become NaN.
    far = torch.full((1, 16), 1e4, device=device)
    closed = fusebook.swiglu(far, -torch.ones(16, 8, device=device), torch.ones(16, 8, device=device))
    assert torch.equal(closed, torch.zeros_like(closed))


def test_gates_that_are_large_are_what_they_are_or_nothing(device):
    x, up = torch.ones(2, 8, device=device), torch.ones(8, 3, device=device)
    for gate, want in ((50.0, 400 * 8), (-50.0, 0), (-12.0, 0)):
        y = fusebook.swiglu(x, up * gate, up)
        assert y.tolist() == [[pytest.approx(want, abs=1e-6)] * 3] * 2


def test_sums_of_half_types_are_float32(device):
    # 4096 times one: in float16, sums end at 2048, where the next number is two further.
    x, w = (
        torch.ones(1, 4096, dtype=torch.float16, device=device),
        torch.ones(4096, 16, dtype=torch.float16, device=device),
    )
    assert (fusebook.concat_gemm(x, [w, w], strategy="fused") == 4096).all()


def test_tf32_follows_torch_unless_it_is_asked_for(device, monkeypatch, allow_tf32):
    w, seen = drawn(16, 16, device=device), []
    launch = concat._launch_concat
    monkeypatch.setattr(concat, "_launch_concat", lambda *a: seen.append(a[3]) or launch(*a))
    for setting in (False, True):
        allow_tf32(setting)
        for tf32 in (None, False, True):
            x = drawn(4 + len(seen), 16, device=device)  # no launch is kept for it
            fusebook.concat_gemm(x, [w], tf32=tf32, strategy="fused")
    assert seen == ["float32", "float32", "tf32", "tf32", "float32", "tf32"]
    fusebook.concat_gemm(x.half(), [w.half()], tf32=True, strategy="fused")
    assert seen[-1] == "half"


def test_a_kernel_that_is_launched_early_waits_for_what_it_reads(device):
    """Each product reads what the one ahead has just written: columns, turned by one place, again and again."""
    n, times = (256, 300) if torch.cuda.is_available() else (64, 2)
    x = drawn(n, n, dtype=torch.float16, device=device)
    turn = torch.eye(n, dtype=torch.float16, device=device).roll(1, 1)

    def turned():
        y = x
        for _ in range(times):
            y = fusebook.concat_gemm(y, [turn], strategy="fused")
        return y

    assert torch.equal(turned(), x.roll(times, 1))
    if device == "cuda":  # in a graph kernels follow one another sooner than a host launches them
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = turned()
        for _ in range(10):
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, x.roll(times, 1))


def test_torchs_setting_of_tf32_is_left_as_it_was(device, allow_tf32):
    x, w = drawn(4, 16, device=device), drawn(16, 16, device=device)
    for setting in (False, True):
        allow_tf32(setting)
        fusebook.concat_gemm(x, [w], tf32=not setting, strategy="views")
        assert torch.backends.cuda.matmul.allow_tf32 is setting


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 is not interpreted")
def test_tf32_has_its_own_error_and_its_own_limit(device):
    dims = {"M": 256, "K": 512, "N": 256, "weights": "two"}
    inputs = CONCAT_GEMM.make(fusebook.inputs.generator(0, device), torch.float32, **dims)
    yard = check.yardstick(CONCAT_GEMM, inputs)
    x, *weights = inputs
    exact = yard.judge(fusebook.concat_gemm(x, weights, tf32=False, strategy="fused"))
    fast = yard.judge(fusebook.concat_gemm(x, weights, tf32=True, strategy="fused"), "tf32")
    assert exact.ok and fast.ok
    assert fast.score > exact.limit, "TF32 would not pass for float32"


X = torch.zeros(4, 8)
W = torch.zeros(8, 6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, w: fusebook.concat_gemm(x, []), ValueError, "one weight at least, got none; pass a list"),
        (lambda x, w: fusebook.concat_gemm(x, w), TypeError, "weights to be a sequence of tensors, got Tensor"),
        (
            lambda x, w: fusebook.concat_gemm(x, [w, w[:7]]),
            ValueError,
            r"weights\[1\] of shape \[8, N1\], .* where x is \[..., K\], got \[7, 6\]",
        ),
        (lambda x, w: fusebook.concat_gemm(x, [w.half()]), TypeError, r"weights\[0\] to be torch.float32 as x is"),
        (lambda x, w: fusebook.concat_gemm(x, [w.to("meta")]), ValueError, r"weights\[0\] on .* as x is, got meta"),
        (lambda x, w: fusebook.concat_gemm(x.int(), [w]), TypeError, "x to be float16, bfloat16, float32 or float64"),
        (lambda x, w: fusebook.concat_gemm(x.cfloat(), [w]), TypeError, "got torch.complex64; cast it first"),
        (lambda x, w: fusebook.concat_gemm(x.double(), [w]), TypeError, r"weights\[0\] to be torch.float64 as x is"),
        (
            lambda x, w: fusebook.concat_gemm(x.double(), [w.double()], strategy="fused"),
            TypeError,
            "the strategy 'fused', got torch.float64; leave the strategy at None",
        ),
        (lambda x, w: fusebook.concat_gemm(x, [[1.0]]), TypeError, r"weights\[0\] to be a torch.Tensor, got list"),
        (lambda x, w: fusebook.concat_gemm(x, [w[0]]), ValueError, r"weights\[0\] of shape \[8, N0\]"),
        (lambda x, w: fusebook.concat_gemm(x[0, 0], [w]), ValueError, r"x of shape \[..., K\], got \[\]"),
        (lambda x, w: fusebook.concat_gemm(x.to_sparse(), [w]), TypeError, "x to be dense"),
        (lambda x, w: fusebook.concat_gemm(x, [w], strategy="fast"), ValueError, "None, fused or views, got 'fast'"),
        (lambda x, w: fusebook.concat_gemm(x, [w], tf32=1), TypeError, "tf32 to be True, False or None, got 1"),
        (
            lambda x, w: fusebook.swiglu(x, w, w[:, :5]),
            ValueError,
            r"up of shape \[8, 6\], .* gate is \[K, N\], got \[8, 5\]",
        ),
        (lambda x, w: fusebook.swiglu(x, w, w.T), ValueError, r"up of shape \[8, 6\]"),
        (lambda x, w: fusebook.swiglu(x, w, w, strategy="fast"), ValueError, "None, fused or views, got 'fast'"),
        (
            lambda x, w: fusebook.swiglu(x, w, w, w[0]),
            ValueError,
            r"bias of shape \[2, 6\], \[2, N\] where gate is \[K, N\]",
        ),
        (lambda x, w: fusebook.swiglu(x, w, w, w[:2].half()), TypeError, "bias to be torch.float32 as x is"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, error, message, device):
    with pytest.raises(error, match=message) as caught:
        call(X.to(device), W.to(device))
    assert "\n" not in str(caught.value)


def test_gradients_are_those_of_the_chain(device):
    inputs = [drawn(*shape, device=device).requires_grad_() for shape in ((6, 8), (8, 5), (8, 7), (2, 5))]
    x, a, b, bias = inputs

    def gradients(y, seed):
        torch.manual_seed(seed)
        return torch.autograd.grad((y * torch.randn_like(y)).sum(), inputs, allow_unused=True)

    pairs = [
        (fusebook.concat_gemm(x, [a, b]), concat_gemm_eager(x, a, b)),
        (fusebook.swiglu(x, a, b[:, :5], bias), swiglu_eager(x, a, b[:, :5], bias)),
    ]
    for mine, theirs in pairs:
        assert torch.allclose(mine, theirs, atol=1e-5)
        for got, want in zip(gradients(mine, 1), gradients(theirs, 1), strict=True):
            assert (got is None) == (want is None)
            assert got is None or torch.allclose(got, want, atol=1e-5)


def test_gradients_agree_with_differences(device):
    inputs = [drawn(*s, dtype=torch.float64, device=device).requires_grad_() for s in ((3, 4), (4, 5), (4, 5), (2, 5))]
    assert torch.autograd.gradcheck(lambda x, a, b: fusebook.concat_gemm(x, [a, b]), inputs[:3])
    assert torch.autograd.gradcheck(fusebook.swiglu, inputs)


def test_gradients_are_differentiable_once_more(device):
    x, a, b = (drawn(*shape, device=device).requires_grad_() for shape in ((3, 4), (4, 5), (4, 5)))

    def second(y):
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), a)[0]

    assert torch.allclose(second(fusebook.swiglu(x, a, b)), second(swiglu_eager(x, a, b)), atol=1e-4)
    mine, theirs = fusebook.concat_gemm(x, [a, b]), concat_gemm_eager(x, a, b)
    assert torch.allclose(second(mine), second(theirs), atol=1e-4)


def test_custom_operators_are_registered_whole(device):
    x, a, b = (drawn(*shape, device=device).requires_grad_() for shape in ((3, 4), (4, 5), (4, 6)))
    torch.library.opcheck(torch.ops.fusebook.concat_gemm, (x, [a, b], False, "fused"))
    bias = drawn(2, 5, device=device).requires_grad_()
    torch.library.opcheck(torch.ops.fusebook.swiglu, (x, a, b[:, :5].detach(), bias, False, ""))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 13 GB of a GPU")
def test_beyond_two_to_the_31_elements(device, room):
    room(16 * 2**30)
    M, K, N = 2**17, 16, 2**14
    x, w = drawn(M, K, dtype=torch.float16, device=device), drawn(K, N + 8, dtype=torch.float16, device=device)
    for wide in (w[:, :N], w[:, 1 : N + 1]):  # with descriptors, and without
        y = fusebook.concat_gemm(x, [wide, wide[:, :8]], strategy="fused")
        assert y.numel() > 2**31
        assert is_right(CONCAT_GEMM, y[-64:], (x[-64:], wide, wide[:, :8]))
        assert is_right(SWIGLU, fusebook.swiglu(x, wide, wide)[-64:], (x[-64:], wide, wide))
        del y


# Plans


@pytest.mark.parametrize("name", ["concat_gemm", "swiglu"])
def test_every_class_of_problems_has_a_plan_that_was_tuned(name):
    for math, layout, shape in products.classes(name):
        plan, torchs = _products._tuned(name)["90", f"{math} {layout}"][shape]
        if plan == Plan("torch"):
            assert torchs is None
            continue
        assert torchs is None if name == "swiglu" and math == "half" else torchs >= 1 - _products._WITHIN
        assert plan in products.candidates(name, math, layout, shape)


@pytest.mark.parametrize("name", ["concat_gemm", "swiglu"])
def test_plans_that_are_written_are_read_again(name, tmp_path):
    file = tmp_path / "plans.csv"
    plans = _products.read(_products.pathlib.Path(_products.__file__).parent / "tuned" / f"{name}.csv")
    assert any(plan.flat for plan, _ in plans.values()) and len(plans) == len(products.classes(name))
    tune.write(file, plans)
    assert _products.read(file) == plans


@pytest.mark.parametrize("name", ["concat_gemm", "swiglu"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), None])
def test_a_plan_is_made_for_every_size(name, capability):
    for math in ("half", "tf32", "float32", "float64"):
        for layout in ("row", "column", "any"):
            for M in (1, 17, 64, 65, 1000, 100_000):
                for strategy in _products.STRATEGIES:
                    plan = _products._gemm_plan(
                        name, (M, 777), math, layout, layout != "any", (capability, 132), strategy
                    )
                    torchs = strategy == "views" or math == "float64"
                    assert plan.kernel in (("torch",) if torchs else ("tiles", "strided"))
                    assert layout != "any" or plan.kernel != "tiles"


def test_a_gpu_that_nobody_tuned_gets_96_kib_at_most():
    for math, itemsize in (("half", 2), ("tf32", 4), ("float32", 4)):
        for M in (1, 32, 64, 1000, 100_000):
            for name in ("concat_gemm", "swiglu"):
                plan = _products._gemm_plan(name, (M, 4096), math, "row", True, ((8, 6), 84))
                weights = 2 if name == "swiglu" else 1
                assert plan.stages * plan.bk * (plan.bm + weights * plan.bn) * itemsize <= 96 * 1024


def noted(monkeypatch, shape, *known, smaller=()):
    """What is chosen where one class was tuned, and what is in `smaller`."""
    rows = {"2**15": Tuned(*smaller)} if smaller else {}
    monkeypatch.setattr(_products, "_tuned", lambda name: {("90", "half row"): rows | {shape: Tuned(*known)}})
    return lambda M, N, strategy=None: _products._gemm_plan(
        "concat_gemm", (M, N), "half", "row", True, ((9, 0), 132), strategy
    )


TILES = Plan("tiles", 128, 256, 64)


def test_the_launcher_takes_torchs_products_where_they_were_faster(monkeypatch):
    chosen = noted(monkeypatch, "2**23", Plan("torch"), None, smaller=(TILES, 2.0))
    assert chosen(2048, 4096) == Plan("torch")
    assert chosen(2048, 4096, "fused") == TILES, "of what is ours, the nearest"
    assert noted(monkeypatch, "2**23", Plan("torch"), None)(2048, 4096, "fused").kernel == "tiles"
    for torchs in (0.9, 1.1, None):
        assert noted(monkeypatch, "2**23", TILES._replace(waves=0), torchs)(2048, 4096).kernel == "tiles"


def test_the_launcher_takes_torchs_products_where_tiles_fill_their_rounds_badly(monkeypatch):
    chosen = noted(monkeypatch, "2**23", TILES, 1.05)
    assert chosen(2048, 4096) == TILES, "256 tiles over 132 multiprocessors: two rounds, nearly full"
    assert chosen(2048, 4352) == Plan("torch"), "272 tiles: a third round for eight of them"
    assert chosen(2048, 4352, "fused") == TILES
    assert chosen(2000, 4090) == TILES, "tiles hang over by little"
    several = TILES._replace(waves=0)
    assert noted(monkeypatch, "2**23", several, 1.05)(2048, 4352) == several, "programs share a multiprocessor"


@pytest.mark.parametrize(
    ("widths", "kernel"),
    [((3000, 3000), "torch"), ((3001, 3001), "tiles"), ((3000, 3001), "tiles"), ((3004, 3004), "tiles")],
)
def test_torchs_products_are_not_written_into_columns_that_begin_at_no_multiple_of_16_bytes(
    monkeypatch, widths, kernel
):
    def planned(name, sizes, math, layout, aligned, hardware, strategy):
        assert aligned and layout == "column short"
        plans.append(_products._gemm_plan(name, sizes, math, layout, aligned, ((9, 0), 132), strategy))
        return plans[-1]

    plans = []
    for name, replacement in {"_plan": planned, "_launch_concat": ignored, "_products_of": ignored}.items():
        monkeypatch.setattr(concat, name, replacement)
    x, weights = torch.empty(1000, 24).bfloat16(), [torch.empty(n, 24).bfloat16().T for n in widths]
    out = torch.empty(1000, sum(widths), dtype=torch.bfloat16)
    concat._into(out, x, weights, False, "")
    assert [plan.kernel for plan in plans] == [kernel]
    concat._into(out, x, weights, False, "views")
    assert plans[-1] == Plan("torch"), "what is asked for"


def test_what_descriptors_describe_begins_at_multiples_of_16_bytes():
    wide, odd = torch.zeros(8, 64, dtype=torch.float16), torch.zeros(8, 60, dtype=torch.float16)
    assert _products._describable(wide, "row") and _products._describable(wide[:, 8:], "row")
    assert not _products._describable(wide[:, 1:], "row") and not _products._describable(odd, "row")


def test_a_layout_is_one_of_rows_apart_and_knows_how_far():
    wide = torch.zeros(8, 64)
    assert _products.layout_of(wide[:, :48]) == "row" and _products._leading(wide[:, :48], "row") == 64
    assert _products.layout_of(wide[:, :48].T) == "column" and _products._leading(wide[:, :48].T, "column") == 64
    assert _products.layout_of(torch.zeros(200).as_strided((8, 16), (4, 1))) == "any", "rows that overlap"
    assert _products.layout_of(torch.zeros(200).as_strided((16, 8), (1, 4))) == "any"


def test_a_plan_s_rounds_are_of_all_programs_at_once():
    """272 tiles: three rounds over 132 programs, two over 264."""
    one, two = (_products._filled(2048, 4352, TILES._replace(waves=waves), 132) for waves in (1, 2))
    assert (one, two) == (pytest.approx(272 / 396), pytest.approx(272 / 528))


def ignored(*_):
    """Neither launched nor multiplied."""


def test_what_is_larger_than_all_that_was_tuned_takes_the_largest(monkeypatch):
    assert _products._nearest("2**27", {"2**15": 0, "2**19": 0, "rows 16": 0}) == "2**19"
    chosen = noted(monkeypatch, "2**23", Plan("torch"), None)
    assert chosen(2**15, 2**15) == Plan("torch")
    assert chosen(100, 100).kernel == "tiles", "what is smaller takes the plan of a GPU that nobody tuned"
    assert chosen(16, 4096).kernel == "strided", "and few rows as well"


def test_classes_of_shapes_meet_without_gaps():
    assert [_products.shape_class(M, 4096) for M in (1, 16, 17, 64)] == ["rows 16", "rows 16", "rows 32", "rows 64"]
    assert _products.shape_class(256, 512) == "2**17"
    assert _products.shape_class(511, 512) == "2**17"
    assert _products.shape_class(512, 512) == "2**19"
    assert _products.shape_class(65, 1) == "2**15"
    assert _products.shape_class(2**20, 2**20) == "2**27"


def test_swiglu_of_few_tiles_of_rows_counts_rounds():
    def plan(M, N, strategy=None, name="swiglu"):
        return _products._gemm_plan(name, (M, 2 * N), "half", "column", True, ((9, 0), 132), strategy)

    assert plan(72, 11008)[1:3] == (128, 128), "86 tiles in one round; 172 of half the size take two"
    assert plan(72, 4864)[1:3] == (128, 64), "one round of either: the smaller tile"
    assert plan(192, 11008)[1:3] == (64, 128)
    assert plan(256, 11008).kernel == "torch", "172 tiles of 128 x 128 are a round and a third"
    assert plan(256, 11008, "fused").kernel == "tiles"
    for M in (64, 513):
        assert plan(M, 11008).kernel == "tiles"
    assert plan(72, 11008, name="concat_gemm") != plan(72, 11008)


def test_products_of_few_tiles_of_rows_take_what_fills_a_round():
    def plan(M, K, widths, torch=True):
        return concat._of_few_tiles(M, K, widths, 132, torch)

    assert plan(153, 2370, (3555,))[1:3] == (64, 128), "84 tiles"
    assert plan(202, 1346, (6041,))[1:3] == (128, 128), "96 tiles, where 64 x 128 has two on a multiprocessor"
    assert plan(288, 4096, (768, 768))[1:3] == (64, 64)
    assert plan(203, 8192, (8192, 2048, 2048))[1:3] == (128, 256)
    assert plan(140, 1536, (8960, 8960)).kernel == "torch" and plan(140, 1536, (8960, 8960), False)[1:3] == (64, 128)


def test_tiles_are_twice_as_wide_where_that_saves_most_of_a_round():
    def tile(name, M, N):
        return _products._gemm_plan(name, (M, N), "half", "column", True, ((9, 0), 132), "fused")[1:3]

    assert tile("concat_gemm", 773, 3840) == (128, 256), "105 tiles for 210, which are two rounds"
    assert tile("concat_gemm", 1069, 3840) == (128, 128), "135 tiles are two rounds, and 270 three"
    assert tile("swiglu", 1624, 2 * 768) == (128, 128) and tile("swiglu", 1000, 2 * 768) == (128, 64)


# Costs

CAN = ((9, 0), 132)


def costing(monkeypatch, **fetches):
    """What is chosen where these are the costs, in microseconds: start, alone, each and finish of plans."""
    known = {("90", "tf32", fetch): tuple(Cost(*way) for way in ways) for fetch, ways in fetches.items()}
    monkeypatch.setattr(_products, "_costs", lambda name: known)
    _products._cheapest.cache_clear()

    def chosen(M, K, widths, layout="column", there=(True, True), strategy="", name="concat_gemm", whole=True):
        return _products._cheapest(name, (M, K), widths, "tf32", layout, there, CAN, strategy, whole)

    yield chosen
    _products._cheapest.cache_clear()


@pytest.fixture
def cheapest(monkeypatch):
    small, large = Plan("tiles", 64, 64, 64, waves=0), Plan("tiles", 128, 128, 64, waves=0)
    pointers = Plan("strided", 64, 64, 64)
    yield from costing(
        monkeypatch,
        descriptors=[(small, 4.0, 0.4, 0.2, 0.5), (large, 4.0, 0.8, 0.5, 0.5), (pointers, 4.0, 0.5, 0.3, 0.5)],
        pointers=[(pointers, 4.0, 0.9, 0.9, 0.5)],
        library=[(Plan("torch"), 6.0, 1.0, 3.6, 0.0)],
    )


def test_the_cheapest_way_fills_its_rounds_and_cuts_long_sums_of_few_tiles(cheapest):
    assert cheapest(128, 1024, (1024, 1024))[0][1:3] == (64, 64), "64 tiles, one for a multiprocessor"
    assert cheapest(2048, 1024, (2048,))[0][1:3] == (128, 128), "256 tiles, where 1024 small ones are eight each"
    plan, move = cheapest(100, 8192, (256, 256))
    assert plan.kernel == "strided" and plan.split >= 8 and not move
    assert cheapest(100, 8192, (256, 256), whole=False)[0].split == 1, "parts lie as the whole output does"
    assert cheapest(64, 1024, (1024,)) is None and cheapest(600, 64, (2**14,)) is None


def test_large_products_turn_rows_of_weights_that_no_descriptor_fetches_to_columns(cheapest):
    plan, move = cheapest(600, 64, (2**14,), "row", (True, False))
    assert (plan.bm, plan.bn) == (128, 128) and move, "for the largest tiles"
    assert cheapest(600, 64, (2**14,), "row", (True, True)) is None, "descriptors fetch rows as they lie"
    assert cheapest(2**17, 64, (127,), "row", (False, True)) is None, "the copy of x would be all the work"
    assert cheapest(600, 64, (2**14,), "row", (True, False), name="swiglu") is None


def test_the_cheapest_way_counts_what_is_copied_and_products_of_torchs(cheapest):
    odd = {"there": (False, False), "strategy": "fused"}
    assert cheapest(400, 4096, (1000, 1000), **odd)[1], "much is read of what is copied once"
    plan, move = cheapest(70, 200, (9, 9), **odd)
    assert plan.kernel == "strided" and not move, "copies would be two launches"
    assert cheapest(100, 8192, (256, 256), "row")[0].kernel == "strided", "pointers fetch rows as they lie"
    assert cheapest(100, 1024, (256, 256), "row") is None and cheapest(100, 1024, (256, 256), "row", (False, True))
    assert cheapest(2000, 512, (4000,), "row", **odd)[1], "tiles of weights in rows become columns"
    assert cheapest(400, 4096, (1000,), "any", (False, False))[1] is False, "nothing can be copied"
    assert cheapest(385, 2048, (20000,))[0] == Plan("torch"), "tiles of 128 rows hang over, and are one round more"
    assert cheapest(385, 2048, (20000,), strategy="fused")[0].bm
    _products._costs("").pop(("90", "tf32", "descriptors"))
    _products._cheapest.cache_clear()
    assert cheapest(4000, 300, (300, 2, 1), "row", (True, False))[0] == Plan("joined"), "one product for three"
    assert cheapest(4000, 300, (300, 2, 1), "any", (True, False))[0] != Plan("joined"), "of any strides"


def test_costs_that_are_written_are_read_again_and_those_of_other_gpus_stay(tmp_path):
    file, way = tmp_path / "costs.csv", Cost(Plan("tiles", 64, 64, 64, late=True), 4.0, 0.4, 0.2, 0.5)
    costs.write(file, "80", {("half", "pointers"): [way]})
    costs.write(
        file, "90", {("half", "descriptors"): [way, way], ("half", "library"): [way._replace(plan=Plan("torch"))]}
    )
    costs.write(file, "90", {("half", "descriptors"): [way]})
    assert _products.read_costs(file) == {("80", "half", "pointers"): (way,), ("90", "half", "descriptors"): (way,)}
    assert not _products.read_costs(tmp_path / "none.csv")


def test_what_a_way_costs_is_its_waits_its_work_its_parts_and_its_copies():
    M, K, N = 64, 512, 128
    parts = Cost(Plan("strided", 64, 64, 64, split=4), 4.0, 0.1, 0.2, 0.5)
    # Two tiles in four parts are eight programs, each of two steps: one on a multiprocessor, or two on each of four.
    written = 4 + 8 * 4 * M * N / 3e6
    assert _products.microseconds(parts, M, K, (N,), 4, 132) == pytest.approx(4 + (2 * 0.2 + 0.5) + written)
    assert _products.microseconds(parts, M, K, (N,), 4, 4) == pytest.approx(4 + 2 * (2 * 0.2 + 0.5) + written)
    torchs = Cost(Plan("torch"), 6.0, 1.0, 1000.0, 0.0)
    work = 1000 * M * K * N / 2**30
    assert _products.microseconds(torchs, M, K, (N,), 4, 132) == pytest.approx(6 + work + 0.5)
    gate = 1.5 + 3 * M * N * 4 / 3e6
    assert _products.microseconds(torchs, M, K, (N,), 4, 132, 2) == pytest.approx(2 * 6 + 2 * work + 2 * 0.5 + gate)
    of_x, of_weights = 1.5 + 2 * M * K * 4 / 3e6, 2 * 1.5 + 2 * K * 2 * N * 4 / 3e6
    copies = [_products.copying(M, K, (N, N), 4, *which) for which in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert copies == pytest.approx([0, of_x, of_weights, of_x + of_weights])


@pytest.mark.parametrize(("share", "kernel"), [(0.95, "tiles"), (0.88, "torch")])
def test_torchs_products_are_to_be_faster_by_a_tenth(monkeypatch, share, kernel):
    ours = Cost(Plan("tiles", 64, 64, 64, waves=0), 4.0, 0.4, 0.2, 0.5)
    time = _products.microseconds(ours, 128, 1024, (1024,), 4, CAN[1])
    torchs = Plan("torch"), share * time - 4 * 1024 * (128 + 1024 + 128) / 3.6e6, 0.0, 0.0, 0.0  # beside what it reads
    for chosen in costing(monkeypatch, descriptors=[ours], library=[torchs]):
        assert chosen(128, 1024, (1024,))[0].kernel == kernel


def test_costs_are_of_one_gpu_and_of_float32(cheapest):
    def chosen(math, capability):
        known = _products._costs("")
        known |= {(gpu, "half", fetch): way for (gpu, _, fetch), way in list(known.items())}
        sizes, found = ("concat_gemm", (128, 1024), (1024,)), []
        for there in ((True, True), (False, False)):  # by descriptors, or by pointers as well
            found.append(_products._cheapest(*sizes, math, "column", there, (capability, 132), ""))
        return all(found) if all(found) or any(found) else None

    assert chosen("tf32", (9, 0))
    assert chosen("tf32", (8, 0)) is chosen("tf32", (10, 0)) is chosen("tf32", None) is chosen("half", (9, 0)) is None


def test_costs_are_fitted_to_four_times_at_least_and_to_seeds_to_tune_by(monkeypatch):
    plan, seeds = Plan("strided", 64, 64, 64), []
    times = [costs.Point(plan, 64 * i, 512, (128,), 4, 0.0, 5.0 + i) for i in range(1, 5)]
    assert not costs.fit({("tf32", "pointers", plan): times[:3]}, 132)
    assert costs.fit({("tf32", "pointers", plan): times}, 132).keys() == {("tf32", "pointers")}

    def problem(seed, case):
        seeds.append(seed)
        return {"M": 1, "N": 1, "K": 1, "dtype": "float64"}

    monkeypatch.setattr(costs, "OPS", {"concat_gemm": types.SimpleNamespace(problem=problem)})
    assert list(costs.problems("concat_gemm", 1)) == [] and max(seeds) < explore.RECORDED_FROM


@pytest.mark.parametrize("name", ["concat_gemm", "swiglu"])
def test_costs_are_known_of_ways_that_are_tried(name):
    for (capability, math, fetch), ways in _products._costs(name).items():
        tried = costs.candidates(name, math) | {"library": (Plan("torch"),)}
        assert capability == "90" and ways and {way.plan for way in ways} <= set(tried[fetch])
        assert all(min(way[1:4]) > 0 and way.finish >= 0 for way in ways)


@pytest.mark.parametrize("both", [1, 2])
def test_a_fit_finds_costs_again(both):
    true = Cost(Plan("strided", 64, 64, 64), 5.0, 0.6, 0.2, 0.8)
    given = []
    for M, K, N, split in (
        (70, 4096, 300, 4),
        (512, 512, 512, 1),
        (300, 2048, 4096, 1),
        (500, 1000, 9000, 1),
        (90, 64, 64, 1),
    ):
        plan = true.plan._replace(split=split)
        taken = _products.microseconds(true._replace(plan=plan), M, K, (N,), 2, 132, both)
        given.append(costs.Point(plan, M, K, (N,), 2, 3.0, taken + 3.0))
    found = costs.fitted(given, 132, both)
    for p in given:
        time = 3.0 + _products.microseconds(found._replace(plan=p.plan), p.M, p.K, p.widths, 2, 132, both)
        assert time == pytest.approx(p.taken, rel=0.05)


@pytest.mark.parametrize("wanted", [
    (Plan("torch"), False), (Plan("joined"), False), (Plan("tiles", 64, 32, 32, warps=4, waves=0), True),
    (Plan("strided", 64, 32, 16, split=2, warps=4), False), (Plan("strided", 64, 32, 16, split=2, warps=4), True),
])  # fmt: skip
@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_way_that_costs_compare_is_right(wanted, column, dtype, device, monkeypatch):
    monkeypatch.setattr(_products, "_cheapest", lambda *_: wanted)
    given = {"dtype": dtype, "device": device}
    x, weights = drawn(70, 45, **given), [drawn(45, n, **given) for n in (33, 33)]
    weights = [stored(w, "columns") if column else w for w in weights]
    poison([x.new_empty(70, 66)])
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, weights), (x, *weights))
    if wanted[0].kernel != "joined":
        poison([x.new_empty(70, 33)])
        assert is_right(SWIGLU, fusebook.swiglu(x, *weights), (x, *weights))


# Tuning


def test_tuning_keeps_the_fastest_right_plan_and_the_plans_of_others(monkeypatch, tmp_path, capsys):
    fast, slow, wrong = (Plan("strided", 64, 64, bk) for bk in (64, 32, 16))
    seconds = {None: 3.0, fast: 1.0, slow: 2.0, wrong: 0.1}

    def attempt(name, math, inputs, plan):
        return concat_gemm_eager(*inputs) + (1 if plan == wrong else 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(tune, "_precompile", lambda *a: None)
    monkeypatch.setattr(tune, "_fastest", lambda ways, repeat: {way: seconds[way] for way in ways})
    monkeypatch.setattr(products, "classes", lambda name: (("half", "row", "2**15"),))
    monkeypatch.setattr(products, "candidates", lambda *key: (wrong, slow, fast))
    monkeypatch.setattr(products, "problem", lambda *key: (drawn(4, 8), drawn(8, 5), drawn(8, 5)))
    monkeypatch.setattr(products, "attempt", attempt)
    file = tmp_path / "concat_gemm.csv"
    others = {("70", "half", "row", "2**17"): Tuned(slow, 1.5), ("80", "half", "row", "2**15"): Tuned(slow, None)}
    tune.write(file, others | {("70", "half", "row", "2**15"): Tuned(slow, 2.0)})
    assert tune.main(["concat_gemm", "--out", str(tmp_path)]) == 0
    assert _products.read(file) == others | {("70", "half", "row", "2**15"): Tuned(fast, 3.0)}
    assert tune.main(["concat_gemm", "--out", str(tmp_path), "--only", "tf32,half column"]) == 1
    assert "expected the beginning of one of half row 2**15, got tf32, half column" in capsys.readouterr().err
    seconds[None] = 0.5
    assert tune.tune("concat_gemm", only=["half"])["half", "row", "2**15"] == Tuned(Plan("torch"), None)
    monkeypatch.setattr(products, "candidates", lambda *key: (wrong,))
    assert tune.main(["concat_gemm", "--out", str(tmp_path)]) == 1
    assert "expected a plan for half row 2**15, got none that runs" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_needs_a_gpu_and_a_known_operator(capsys):
    assert tune.main(["swiglu"]) == 1
    assert "expected a CUDA device, got none" in capsys.readouterr().err
    for argv in (["softmax"], ["swiglu", "--costs", "0"], ["swiglu", "--costs", "-1"], ["swiglu", "--repeat", "0"]):
        with pytest.raises(SystemExit):
            tune.main(argv)


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("widths", [(50, 50), (64, 3, 1)])
def test_what_no_descriptor_describes_is_copied_where_many_rows_need_it(column, widths, device, monkeypatch):
    """Rows of x and of weights begin anywhere, and beside them in memory lies NaN, which must not be read."""

    def beside(rows, columns):
        wide = torch.full((rows, columns + 4), torch.nan, dtype=torch.float16, device=device)
        return wide[:, :columns].copy_(drawn(rows, columns, dtype=torch.float16))

    moved, beside_each_other = [], []
    real, launched = _products._moved, concat._launch_concat
    monkeypatch.setattr(_products, "_moved", lambda m, *how: moved.append(len(m)) or real(m, *how))
    merged = _products._merged
    monkeypatch.setattr(_products, "_merged", lambda m: moved.append(len(m)) or merged(m))
    monkeypatch.setattr(
        concat,
        "_launch_concat",
        lambda out, x, ws, *plan: beside_each_other.append(len(ws)) or launched(out, x, ws, *plan),
    )
    monkeypatch.setattr(_products, "_worth_moving", lambda sizes, *_: sizes[0] > 8)
    x = beside(100, 45)
    weights = [beside(n, 45).T if column else beside(45, n) for n in widths]
    poison([x.new_empty(100, sum(widths))])
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, weights, strategy="fused"), (x, *weights))
    if len(widths) == 2:
        assert is_right(SWIGLU, fusebook.swiglu(x, *weights), (x, *weights))
    assert sum(moved) == (1 + len(widths)) * (2 if len(widths) == 2 else 1)
    assert set(beside_each_other) == {1}, "copies are one weight"
    moved.clear()
    fusebook.concat_gemm(x[:40], weights, strategy="fused")
    assert beside_each_other[-1:] == [1], "rows become columns where there are few of them"
    moved.clear()
    fusebook.concat_gemm(x[:7], weights, strategy="fused")
    fusebook.concat_gemm(x, weights, strategy="views")
    assert not moved, "few rows read each weight once, and torch's products take them as they are"


@pytest.mark.parametrize(
    ("sizes", "math", "weights", "worth"),
    [
        ((1, 4096, 14336), "half", False, True),
        ((8, 64, 64), "half", False, False),
        ((64, 4097, 11009), "half", True, False),
        ((65, 4097, 11009), "tf32", True, True),
        ((4096, 4097, 4097), "float32", True, True),
        ((1000, 1001, 1001), "float32", True, True),
        ((100, 1001, 1001), "float32", True, False),
        ((64, 4096, 2048), "float32", False, True),
        ((17, 4096, 2047), "float32", False, False),
        ((16, 4096, 2048), "float32", False, False),
        ((64, 4096, 2048), "float32", True, False),
        ((64, 4096, 8192), "tf32", False, True),
        ((64, 4096, 8191), "tf32", False, False),
        ((64, 4096, 8192), "tf32", True, False),
        ((76, 1143, 940), "half", True, False),
        ((179, 1143, 940), "half", True, False),
        ((217, 768, 3074), "half", True, True),
        ((4331, 1608, 76), "half", True, False),
        ((16, 2048, 1536), "half", False, False),
        ((17, 2048, 1536), "half", False, True),
        ((4096, 4097, 64), "half", False, False),
        ((200, 100, 100), "half", True, False),
    ],
)
def test_x_is_copied_for_large_weights_and_weights_for_many_rows(sizes, math, weights, worth):
    assert _products._worth_moving(sizes, math, weights, (9, 0)) is worth


@pytest.mark.parametrize(
    ("name", "M", "N", "sizes"),
    [
        ("concat_gemm", 1111, 6144, (64, 64, 64)),  # seven rounds of 64 x 64 are less than three of 128 x 64
        ("concat_gemm", 1500, 6144, (128, 64, 32)),
        ("swiglu", 109, 4096, (64, 32, 64)),  # 128 tiles
        ("swiglu", 1094, 16384, (64, 32, 32)),
    ],
)
def test_float32_of_many_rows_fills_its_rounds(name, M, N, sizes):
    plan = _products._gemm_plan(name, (M, N), "float32", "column", True, ((9, 0), 132))
    assert plan[:4] == ("tiles", *sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "M"), [(1, 1), (2, 2), (2, 1), (4, 7)])
@pytest.mark.parametrize("column", [True, False])
def test_few_rows_are_right_where_each_number_is_multiplied_where_it_was_loaded(rows, M, column, dtype, device):
    given = {"dtype": dtype, "device": device}
    x = drawn(M, 150, **given)
    weights = [drawn(n, 150, **given).T if column else drawn(150, n, **given) for n in (40, 40)]
    layout = "column" if column else "row"
    plan = Plan("strided", rows, 16, 32, split=2, warps=4)
    out = x.new_empty(M, 80)
    poison([out])
    concat._launch_concat(out, x, weights, _products._math(dtype, False), layout, plan)
    assert is_right(CONCAT_GEMM, out, (x, *weights))
    out = x.new_empty(M, 40)
    poison([out])
    gated._launch_swiglu(out, x, *weights, None, _products._math(dtype, False), layout, plan)
    assert is_right(SWIGLU, out, (x, *weights))


def test_one_row_or_two_take_no_tensor_cores_where_columns_lie_side_by_side():
    def rows(M, math, layout, aligned, name="concat_gemm"):
        return _products._gemm_plan(name, (M, 8192), math, layout, aligned, ((9, 0), 132)).bm

    for name in ("concat_gemm", "swiglu"):
        assert rows(1, "half", "column", True, name) == rows(1, "half", "column", False, name) == 1
        assert rows(2, "float32", "column", True, name) == rows(2, "half", "column", False, name) == 2
        assert rows(2, "half", "column", True, name) == rows(3, "float32", "column", True, name) == 16
        assert rows(1, "half", "row", True, name) == rows(1, "float32", "row", True, name) == 16
        assert rows(1, "half", "row", False, name) == 1 and rows(2, "half", "row", False, name) == 16


def test_a_long_sum_of_few_tiles_is_shared_out(monkeypatch):
    def shared(name, M, K, widths, aligned=True, math="half"):
        plan = _products._shared_out(name, M, K, widths, math, aligned, 132)
        return plan and (plan.bm, plan.bn, plan.split)

    assert shared("concat_gemm", 286, 4096, (256, 256)) == (64, 64, 4), "40 tiles"
    assert shared("swiglu", 21, 7168, (2048,)) == (32, 32, 4) and shared("swiglu", 4, 2048, (768,)) == (16, 32, 8)
    assert shared("concat_gemm", 64, 4096, (4096, 4096)) is None, "a tile for each multiprocessor"
    for given in (("concat_gemm", 286, 2047, (512,)), ("concat_gemm", 32, 4096, (512,)), ("swiglu", 65, 7168, (70,))):
        assert shared(*given) is None
    assert shared("concat_gemm", 286, 4096, (512,), False) is None and shared("swiglu", 2, 4096, (64,)) is None
    assert shared("concat_gemm", 286, 4096, (512,), math="float32") is None, "which has costs"
    launched = []
    for module in (concat, gated):
        launch = "_launch_concat" if module is concat else "_launch_swiglu"
        monkeypatch.setattr(module, launch, lambda *given: launched.append(given[-1]))
        monkeypatch.setattr(module, "gpu", lambda device: (None, 132))
    x, weights = torch.empty(40, 4096).half(), [torch.empty(64, 4096).half().T for _ in range(2)]
    concat._into(torch.empty(40, 128).half(), x, weights, False, "")
    gated._into(torch.empty(40, 64).half(), x, *weights, None, False, "")
    assert [plan.split for plan in launched] == [16, 16]


def test_copies_of_rows_lie_side_by_side(device):
    weights = [drawn(21, n, device=device)[:, 1:] for n in (34, 8, 2)]
    whole = _products._merged(weights)
    assert torch.equal(whole, torch.cat(weights, 1)) and whole.stride(0) * 4 % 128 == 0


def test_tiles_that_the_copy_engine_stores_in_halves_are_right(device):
    x, weights = drawn(70, 64, device=device), [drawn(64, n, device=device) for n in (128, 64, 20)]
    out = x.new_empty(70, 212)
    concat._launch_concat(out, x, weights, "float32", "row", Plan("tiles", 64, 64, 32, group=2, warps=4, bulk=2))
    assert is_right(CONCAT_GEMM, out, (x, *weights))


def test_float32_of_few_rows_and_weights_goes_by_pointers_whose_sums_can_be_cut():
    for name, N, kernel in (
        ("swiglu", 64 * 132, "tiles"),
        ("swiglu", 64 * 131, "strided"),
        ("concat_gemm", 64 * 132, "strided"),
    ):
        assert _products._gemm_plan(name, (52, N), "float32", "column", True, ((9, 0), 132)).kernel == kernel


@pytest.mark.parametrize("widths", [(48, 48), (40, 9, 1)])
def test_weights_in_rows_become_columns_where_float32_has_many_rows(widths, device, monkeypatch):
    assert _products._worth_turning((512, 2048, 2048), "float32", "row", (9, 0))
    for sizes, math, layout in (
        ((511, 2048, 4096), "float32", "row"),
        ((512, 2048, 2047), "float32", "row"),
        ((4096, 2048, 2048), "float32", "column"),
        ((4096, 2048, 2048), "half", "row"),
    ):
        assert not _products._worth_turning(sizes, math, layout, (9, 0))
    monkeypatch.setattr(_products, "_worth_turning", lambda *_: True)
    monkeypatch.setattr(_products, "_cheapest", lambda *_: None)  # as on a GPU of which no costs are known
    launched, real = [], concat._launch_concat
    monkeypatch.setattr(concat, "_launch_concat", lambda *given: launched.append(given[2:]) or real(*given))
    x, weights = drawn(70, 45, device=device), [drawn(45, n, device=device) for n in widths]
    poison([x.new_empty(70, sum(widths))])
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, weights), (x, *weights))
    ((given, _, layout, plan),) = launched
    assert len(given) == 1 and layout == "column" and plan.kernel == "tiles"
    assert is_right(SWIGLU, fusebook.swiglu(x, weights[0], weights[0] + 1), (x, weights[0], weights[0] + 1))
    fusebook.concat_gemm(x, weights, strategy="views")
    assert len(launched) == 1, "torch's products take them as they lie"


@pytest.mark.parametrize(
    ("M", "K", "widths", "math", "aligned", "tiles"),
    [
        (10, 6093, (256, 256), "half", False, (32, 128)),
        (5, 828, (2560, 2560), "half", False, (64, 64)),
        (8, 2177, (23820, 11911), "half", False, (64, 128)),
        (41, 9234, (7381, 7381), "half", False, (64, 64)),
        (126, 2048, (768, 385, 1), "half", False, (32, 128)),
        (175, 60, (2048, 2048), "half", False, (64, 64)),
        (4392, 500, (76, 76), "half", False, (64, 128)),
        (126, 2048, (768, 384), "half", True, (64, 128)),
        (63, 1000, (713, 713), "tf32", True, (32, 64)),
        (63, 1000, (7130, 7130), "tf32", True, (64, 128)),
        (65, 1000, (713, 713), "float32", True, (64, 128)),
    ],
)
def test_tiles_by_pointers_are_narrow_where_programs_are_few(M, K, widths, math, aligned, tiles):
    plan = Plan("strided", 16 if M <= 16 else 64, 64, 128)
    assert concat._narrowed(plan, M, K, widths, math, aligned, 132)[2:4] == tiles
    others = Plan("tiles", 64, 64, 128), Plan("strided", 2, 64, 128)
    assert all(concat._narrowed(other, M, K, widths, math, aligned, 132) == other for other in others)


def test_a_long_sum_of_few_tiles_is_not_copied_before_it_is_cut(monkeypatch):
    launched, moved = [], []
    for module in (_products, concat):
        monkeypatch.setattr(module, "gpu", lambda device: ((9, 0), 132))
    real = _products._moved
    monkeypatch.setattr(_products, "launch", lambda *_, **__: None)
    monkeypatch.setattr(_products, "_moved", lambda *given: moved.append(1) or real(*given))
    monkeypatch.setattr(concat, "_launch_concat", lambda *given: launched.append(given[-1]))

    def plan(M, K, *widths):
        x, *weights = (torch.empty(size, dtype=torch.float16) for size in ((M, K), *((K, n) for n in widths)))
        concat._into(x.new_empty(M, sum(widths)), x, weights, False, "")
        return launched.pop()

    assert plan(126, 2049, 768, 385).split == 4 and not moved
    assert plan(300, 2047, 768, 385).kernel == "tiles" and moved, "K is short"
    moved.clear()
    assert plan(126, 2049, 7681, 385).kernel == "tiles" and moved, "tiles are many"


@pytest.mark.parametrize(("columns", "wanted"), [(64, ""), (45, "fused")])
def test_what_was_copied_to_where_it_is_aligned_goes_to_our_kernel(monkeypatch, columns, wanted, device):
    asked = []

    def planned(name, sizes, math, layout, aligned, hardware, strategy):
        asked.append(strategy or "")
        return _products._gemm_plan(name, sizes, math, layout, aligned, hardware, strategy)

    monkeypatch.setattr(_products, "_worth_moving", lambda *_: True)
    for module in (concat, gated):
        monkeypatch.setattr(module, "_plan", planned)
    half = {"dtype": torch.float16, "device": device}
    x, weights = drawn(20, columns, **half), [drawn(48, columns, **half).T for _ in range(2)]
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, weights), (x, *weights))
    assert is_right(SWIGLU, fusebook.swiglu(x, *weights), (x, *weights))
    assert asked == [wanted, wanted]
    # What follows needs no copy itself, and finds x copied.
    fusebook.concat_gemm(x, [weights[0], drawn(columns, 48, **half)])
    assert asked[2:] == [wanted, wanted]


def test_a_product_s_kind_tells_how_its_rows_are_fetched():
    half = {"dtype": torch.float16}
    for columns, kind in ((64, ""), (96, " short"), (128, "")):  # 128, 192 and 256 bytes
        x, w = drawn(4, columns, **half), drawn(2, 8, columns, **half)
        assert _products._kind(x, [w[0].T, w[1].T], "column") == kind
    nothing = torch.empty(4, 64, **half)[:, :0], [torch.empty(0, 64, **half)]
    assert not _products._fetchable(*nothing, "row", "half", (9, 0), "")[2], "a descriptor has no empty axis"


@pytest.mark.parametrize(
    ("kernel", "M", "K", "widths", "split", "one_by_one", "float32"),
    [
        ("strided", 1, 11497, (569, 569), 8, 16, 16),
        ("strided", 7, 8418, (2048, 2048), 4, 16, 8),
        ("strided", 3, 14039, (14039, 1754, 1754), 1, 4, 1),
        ("strided", 2, 2000, (176, 176), 2, 4, 4),
        ("strided", 10, 285, (256, 256), 1, 1, 1),
        ("tiles", 1, 11497, (569, 569), 1, 1, 1),
        ("torch", 1, 11497, (569, 569), 1, 1, 1),
    ],
)
def test_few_programs_with_a_long_sum_each_share_it(kernel, M, K, widths, split, one_by_one, float32):
    plan = Plan(kernel, 16, 64, 128)
    for parts, math, aligned in ((split, "half", True), (one_by_one, "half", False), (float32, "float32", True)):
        assert _products._cut(plan, M, K, widths, math, aligned, 132).split == parts
    tuned = plan._replace(split=64)
    assert _products._cut(tuned, M, K, widths, "half", True, 132) == tuned, "what was tuned is not cut less"


@pytest.mark.parametrize(
    ("M", "K", "widths", "bn", "float32", "tf32"),
    [
        (31, 335, (627, 627), 64, 4, 1),  # steps of two are left at least, or of four
        (31, 362, (2048, 2048), 64, 4, 2),
        (17, 1071, (239, 239), 64, 16, 8),
        (28, 4213, (1024, 1024), 64, 8, 8),  # two programs a multiprocessor
        (64, 553, (8631,), 32, 1, 1),
        (40, 8631, (136,), 16, 32, 32),  # four of narrow tiles
    ],
)
def test_float32_that_is_loaded_one_by_one_has_parts_for_all_multiprocessors(M, K, widths, bn, float32, tf32):
    plan = Plan("strided", 32 if M <= 32 else 64, bn, 32)
    for math, parts in (("float32", float32), ("tf32", tf32)):
        assert _products._cut(plan, M, K, widths, math, False, 132).split == parts


def test_tiles_of_two_sums_are_narrow_where_float32_is_loaded_one_by_one():
    for name, M, N, aligned, bn in (
        ("swiglu", 17, 64 * 132, False, 16),
        ("swiglu", 17, 64 * 132 + 1, False, 32),
        ("swiglu", 16, 64, False, 32),
        ("swiglu", 17, 64, True, 32),
        ("concat_gemm", 17, 64, False, 64),
    ):
        assert _products._gemm_plan(name, (M, N), "float32", "column", aligned, ((9, 0), 132)).bn == bn


@pytest.mark.parametrize(("widths", "bulk"), [((64, 40), 2), ((40, 64), 0), ((64, 32, 8), 2)])
def test_the_copy_engine_stores_where_no_tile_reaches_into_the_next_weight(widths, bulk, device, monkeypatch):
    launched, given = [], {"dtype": torch.float16, "device": device}
    monkeypatch.setattr(concat, "launch", lambda *_, **constants: launched.append(constants["BULK"]))
    x, weights = torch.empty(128, 64, **given), [torch.empty(64, width, **given) for width in widths]
    plan = Plan("tiles", 64, 32, 64, bulk=2, warps=4)
    concat._launch_concat(torch.empty(128, sum(widths), **given), x, weights, "half", "row", plan)
    assert launched == [bulk]


@pytest.mark.parametrize(
    ("column", "K", "widths", "numbers"),
    [
        (True, 66, (40, 24), {"X_BY": 2, "W_BY": 2}),
        (True, 72, (41, 23), {"X_BY": 8, "W_BY": 8}),
        (False, 65, (40, 24), {"W_BY": 8}),
        (False, 68, (40, 4), {"X_BY": 4, "W_BY": 4}),
        (False, 68, (40, 5), {"X_BY": 4}),
        (False, 64, (32, 16), {}),  # the compiler sees by itself what 16 divides
    ],
)
def test_a_kernel_by_pointers_is_told_how_many_numbers_are_loaded_as_one(
    column, K, widths, numbers, device, monkeypatch
):
    given, told = {"dtype": torch.float16, "device": device}, []
    for module in (concat, gated):
        launch = module.launch
        monkeypatch.setattr(
            module, "launch", lambda kernel, *rest, launch=launch, **c: told.append(c) or launch(kernel, *rest, **c)
        )
    x, layout = drawn(20, K, **given), "column" if column else "row"
    weights = [drawn(n, K, **given).T if column else drawn(K, n, **given) for n in widths]
    plan, out = Plan("strided", 16, 32, 64, warps=4), x.new_empty(20, sum(widths))
    concat._launch_concat(out, x, weights, "half", layout, plan)
    assert is_right(CONCAT_GEMM, out, (x, *weights))
    alike = weights[1], weights[1] + 1 if not column else (weights[1].T + 1).T
    out = x.new_empty(20, widths[1])
    gated._launch_swiglu(out, x, *alike, None, "half", layout, plan)
    assert is_right(SWIGLU, out, (x, *alike))
    assert {k: v for k, v in told[0].items() if k.endswith("_BY")} == numbers
    anywhere = [torch.cat([w.new_empty(1), w.flatten()])[1:].view(w.shape) for w in weights]
    assert "W_BY" not in _products._by_words(x, anywhere, layout), "addresses are no multiples of 16 bytes"


COMPILED = """
import fusebook, torch, triton
from fusebook import compiled
from fusebook.kernels import _products, concat_gemm, swiglu

triton.runtime.driver.set_active(compiled.AbsentGPU())
x, w = torch.empty(16, 90, dtype=torch.float16), torch.empty(40, 90, dtype=torch.float16).T
plan = _products.Plan("strided", 16, 32, 64, warps=4)
with compiled.kernels() as found:
    concat_gemm._launch_concat(x.new_empty(16, 80), x, (w, w), "half", "column", plan)
    swiglu._launch_swiglu(x.new_empty(16, 40), x, w, w, None, "half", "column", plan)
print(*["cp.async.ca" in kernel.asm["ptx"] for kernel in found], *["ld.global.b16" in k.asm["ptx"] for k in found])
"""


@pytest.mark.slow
def test_pairs_of_halves_are_under_way_ahead(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    end = warm.run("-c", COMPILED, env=environment)
    assert end.stdout.splitlines()[-1:] == ["True True False False"], end.stderr[-2000:]


@pytest.mark.parametrize("split", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sum_in_many_parts_is_right(split, dtype, device, monkeypatch):
    for module in (concat, gated):
        monkeypatch.setattr(module, "_cut", lambda plan, *_: Plan("strided", 16, 32, 16, split=split, warps=4))
    given = {"dtype": dtype, "device": device}
    x, weights = drawn(20, 150, **given), [drawn(150, n, **given) for n in (40, 40)]
    poison([x.new_empty(20, 80)])
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, weights, strategy="fused"), (x, *weights))
    assert is_right(SWIGLU, fusebook.swiglu(x, *weights, strategy="fused"), (x, *weights))


@pytest.mark.parametrize(("M", "K", "together"), [(64, 30000, [1, 2]), (65, 30000, [3]), (64, 2100, [3])])
def test_large_weights_of_few_rows_are_fetched_by_descriptors_whatever_is_beside_them(monkeypatch, M, K, together):
    launched = []
    monkeypatch.setattr(_products, "_worth_moving", lambda *_: False)
    monkeypatch.setattr(concat, "_launch_concat", lambda out, x, weights, *_: launched.append(len(weights)))
    weights = [torch.empty(K, n, dtype=torch.float16) for n in (1504, 753, 1)]
    concat._into(torch.empty(M, 2258, dtype=torch.float16), torch.empty(M, K, dtype=torch.float16), weights, False, "")
    assert launched == together


@pytest.mark.parametrize(
    ("name", "M", "K", "N", "how", "torchs"),
    [
        ("swiglu", 16, 9000, 9000, (False, "row", True), False),
        ("swiglu", 17, 2100, 2100, (False, "column", False), True),
        ("swiglu", 64, 181, 12752, (False, "column", True), True),
        ("swiglu", 64, 181, 12752, (False, "column", False), False),
        ("swiglu", 32, 181, 12752, (False, "column", True), False),
        ("swiglu", 40, 8631, 272, (False, "column", True), False),
        ("concat_gemm", 32, 2100, 2100, (False, "column", True), False),
        ("concat_gemm", 33, 2100, 2100, (False, "column", True), True),
        ("concat_gemm", 32, 4200, 4200, (False, "column", True), True),
        ("concat_gemm", 65, 8, 8, (False, "row", True), True),
        ("concat_gemm", 65, 8, 8, (True, "row", False), False),
        ("concat_gemm", 1024, 1024, 1024, (True, "row", False), True),
        ("concat_gemm", 64, 4096, 4096, (True, "row", False), True),
        ("concat_gemm", 64, 4096, 4095, (True, "row", False), False),
        ("concat_gemm", 32, 4096, 4096, (True, "row", False), False),
        ("concat_gemm", 1024, 1024, 1024, (True, "column", False), False),
    ],
)
def test_float32_is_torchs_where_weights_lie_in_rows_or_much_is_loaded_by_pointers(name, M, K, N, how, torchs):
    assert _products._by_torch(name, M, K, N, "float32", *how) is torchs
    assert not _products._by_torch(name, M, K, N, "half", *how)


def test_float32_weights_in_rows_are_not_copied_for_torch(device):
    x, w = torch.empty(65, 4096, device=device), torch.empty(4096, 20001, device=device)[:, 1:]
    for dtype, math, copied in ((torch.float32, "float32", False), (torch.float32, "tf32", True)):
        assert _products._fetchable(x.to(dtype), [w], "row", math, (9, 0), "")[3] is copied


@pytest.mark.parametrize("column", [False, True])
def test_small_weights_are_joined_where_torch_multiplies(column, monkeypatch, device):
    monkeypatch.setattr(_products, "_cheapest", lambda *_: None)  # as on a GPU of which no costs are known
    monkeypatch.setattr(concat, "_plan", lambda *_: Plan("torch"))
    given = []
    real = concat._products_of
    monkeypatch.setattr(concat, "_products_of", lambda out, x, w, tf32: given.append(len(w)) or real(out, x, w, tf32))
    shapes = [(n, 20) if column else (20, n) for n in (7, 3)]
    x, weights = drawn(65, 20, device=device), [drawn(*shape, device=device) for shape in shapes]
    weights = [w.T if column else w for w in weights]
    for rows, strategy, count in ((65, None, 1), (64, None, 2), (65, "views", 2)):
        assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x[:rows], weights, strategy=strategy), (x[:rows], *weights))
        assert given.pop() == count
