"""What is special to products: widths and layouts of weights, TF32, gradients, and launch configs."""

import contextvars
import functools
import itertools
import math

import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses import FakeTensorMode

import fusebook
from fusebook.cards.concat_gemm import CONCAT_GEMM
from fusebook.cards.swiglu import SWIGLU
from fusebook.kernels import products
from fusebook.kernels.products import ANY, TABLES, Config, concat_gemm_eager, swiglu_eager
from fusebook.measure import check, tune
from fusebook.measure.inputs import poison

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
@pytest.mark.parametrize("strategy", products.STRATEGIES)
def test_weights_of_any_layout_are_right(how, strategy, device):
    x, a, b = drawn(20, 64, device=device), *(stored(drawn(64, n, device=device), how) for n in (48, 48))
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, [a, b], strategy=strategy), (x, a, b))
    assert is_right(SWIGLU, fusebook.swiglu(x, a, b, strategy=strategy), (x, a, b))


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
def test_the_weight_with_the_higher_address_may_come_first(swapped, device):
    both = drawn(2, 48, 64, device=device).mT
    a, b = (both[1], both[0]) if swapped else (both[0], both[1])
    assert products._stack(a, b) == (64 * 48, int(swapped))
    x = drawn(70, 64, device=device)
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, [a, b], strategy="fused"), (x, a, b))
    assert is_right(SWIGLU, fusebook.swiglu(x, a, b, strategy="fused"), (x, a, b))


def test_weights_that_are_no_stack_are_recognised(device):
    w, wide = drawn(16, 8, device=device).T, drawn(16, 12, device=device)[:, :8].T
    assert products._stack(w, w) is None, "a stride of zero"
    assert products._stack(w, wide) is None, "columns that begin at other distances"
    x = drawn(70, 8, device=device)
    for pair in ((w, w), (w, wide)):
        assert is_right(SWIGLU, fusebook.swiglu(x, *pair, strategy="fused"), (x, *pair))


@pytest.mark.parametrize("strategy", [*products.STRATEGIES, None])
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


@pytest.mark.parametrize("strategy", products.STRATEGIES)
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


def test_gates_that_are_large_are_what_they_are_or_nothing(device):
    x, up = torch.ones(2, 8, device=device), torch.ones(8, 3, device=device)
    for gate, want in ((50.0, 400 * 8), (-50.0, 0), (-12.0, 0), (-2e4, 0)):
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
    launch = products._launch_concat
    monkeypatch.setattr(products, "_launch_concat", lambda *a: seen.append(a[3]) or launch(*a))
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
    inputs = CONCAT_GEMM.make(fusebook.measure.inputs.generator(0, device), torch.float32, **dims)
    yard = check.yardstick(CONCAT_GEMM, inputs)
    x, *weights = inputs
    exact = yard.judge(fusebook.concat_gemm(x, weights, tf32=False, strategy="fused"))
    fast = yard.judge(fusebook.concat_gemm(x, weights, tf32=True, strategy="fused"), "tf32")
    assert exact.ok and fast.ok
    assert fast.error > exact.tolerance, "TF32 would not pass for float32"


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
        (lambda x, w: fusebook.concat_gemm(x.double(), [w]), TypeError, r"weights\[0\] to be torch.float64 as x is"),
        (
            lambda x, w: fusebook.concat_gemm(x.double(), [w.double()], strategy="fused"),
            TypeError,
            "the strategy 'fused', got torch.float64; leave the strategy at None",
        ),
        (lambda x, w: fusebook.concat_gemm(x, [[1.0]]), TypeError, r"weights\[0\] to be a torch.Tensor, got list"),
        (lambda x, w: fusebook.concat_gemm(x, [w[0]]), ValueError, r"weights\[0\] of shape \[8, N0\]"),
        (lambda x, w: fusebook.concat_gemm(x[0, 0], [w]), ValueError, r"x of shape \[..., K\], got \[\]"),
        (
            lambda x, w: fusebook.swiglu(x, w, w[:, :5]),
            ValueError,
            r"up of shape \[8, 6\], .* gate is \[K, N\], got \[8, 5\]",
        ),
        (lambda x, w: fusebook.swiglu(x, w, w.T), ValueError, r"up of shape \[8, 6\]"),
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


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_chain(recompute, device):
    inputs = [drawn(*shape, device=device).requires_grad_() for shape in ((3, 2, 8), (8, 5), (8, 7), (2, 5))]
    x, a, b, bias = inputs

    def gradients(y, seed):
        torch.manual_seed(seed)
        return torch.autograd.grad((y * torch.randn_like(y)).sum(), inputs, allow_unused=True)

    flat = x.flatten(0, 1)
    pairs = [
        (fusebook.concat_gemm(x, [a, b]), concat_gemm_eager(flat, a, b).unflatten(0, (3, 2))),
        (
            fusebook.swiglu(x, a, b[:, :5], bias, recompute=recompute),
            swiglu_eager(flat, a, b[:, :5], bias).unflatten(0, (3, 2)),
        ),
    ]
    for mine, theirs in pairs:
        assert torch.allclose(mine, theirs, atol=1e-5)
        for got, want in zip(gradients(mine, 1), gradients(theirs, 1), strict=True):
            assert (got is None) == (want is None)
            assert got is None or torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_only_gradients_that_are_asked_for_are_computed(recompute, device, monkeypatch):
    x, a, b = (drawn(*shape, device=device) for shape in ((6, 8), (8, 5), (8, 5)))
    given, real = [], products._sum_of_products
    monkeypatch.setattr(products, "_sum_of_products", lambda pairs: given.append(pairs) or real(pairs))
    y = fusebook.swiglu(x, a, b.requires_grad_(), recompute=recompute)
    assert torch.autograd.grad(y.sum(), b)[0].shape == (8, 5)
    assert torch.autograd.grad(fusebook.concat_gemm(x, [a, b])[:, 5:].sum(), b)[0].shape == (8, 5)
    assert not given


def test_gradients_have_the_strides_of_weights(device):
    """Or autograd would copy them."""
    x, gate, up = drawn(6, 8, device=device), drawn(5, 8, device=device).requires_grad_(), drawn(8, 5, device=device)
    found = torch.autograd.grad(fusebook.swiglu(x, gate.T, up.requires_grad_()).sum(), [gate, up])
    want = torch.autograd.grad(swiglu_eager(x, gate.T, up).sum(), [gate, up])
    assert [t.stride() for t in found] == [(8, 1), (5, 1)]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (8,), (0, 8)], ids=str)
def test_a_second_call_of_the_same_kinds_has_the_same_gradients(shape, device):
    """It has less to check."""
    x, gate, up = (drawn(*s, device=device).requires_grad_() for s in (shape, (5, 8), (8, 5)))
    found = []
    for _ in range(2):
        y = fusebook.swiglu(x, gate.T, up)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        second = torch.autograd.grad(first.sum(), [gate, up], retain_graph=True)
        found.append([y, first, *second, *torch.autograd.grad(y.sum(), [x, gate, up])])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))
    assert y.grad_fn.name() == "_KeptBackward"


def test_a_call_that_is_like_one_before_is_checked_again_where_it_differs(device):
    x, gate, up = (drawn(*s, device=device).requires_grad_() for s in ((6, 8), (8, 5), (8, 5)))
    fusebook.swiglu(x, gate, up)
    assert fusebook.swiglu(x, gate, up).grad_fn.name() == "_KeptBackward"
    for other in (up.detach().half(), up.detach().to_sparse(), up.detach()[None], up.detach()[:, :4], 3.0):
        with pytest.raises((TypeError, ValueError), match="swiglu: expected up "):
            fusebook.swiglu(x, gate, other)
    with torch.autocast(device, torch.bfloat16):
        y = fusebook.swiglu(x, gate, up)
    assert y.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.sum(), [x, gate, up]))
    rows = torch.vmap(lambda x: fusebook.swiglu(x, gate, up))(x[:, None])
    assert torch.allclose(rows[:, 0], fusebook.swiglu(x, gate, up), atol=1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert fusebook.swiglu(*map(mode.from_tensor, (x, gate, up))).shape == (6, 5)


def test_a_checkpoint_of_a_first_call_saves_what_later_calls_do(device, monkeypatch):
    monkeypatch.setattr(products, "_checked", [])
    x, gate, up = (drawn(*s, device=device).requires_grad_() for s in ((6, 8), (8, 5), (8, 5)))
    y = torch.utils.checkpoint.checkpoint(fusebook.swiglu, x, gate, up, use_reentrant=False)
    found = torch.autograd.grad(y.sum(), [x, gate, up])
    want = torch.autograd.grad(swiglu_eager(x, gate, up).sum(), [x, gate, up])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, want, strict=True))


def test_one_product_makes_the_gradients_of_two_weights_of_linear_layers(device):
    x, gate, up = (drawn(*shape, device=device).requires_grad_() for shape in ((6, 8), (5, 8), (5, 8)))
    found = torch.autograd.grad(fusebook.swiglu(x, gate.T, up.T).sum(), [gate, up])
    want = torch.autograd.grad(swiglu_eager(x, gate.T, up.T).sum(), [gate, up])
    assert [t.stride() for t in found] == [(8, 1), (8, 1)]
    assert len({t.untyped_storage().data_ptr() for t in found}) == 1
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_each_sample_are_those_of_the_chain(recompute, device):
    x, a, b = (drawn(*shape, device=device) for shape in ((6, 2, 8), (8, 5), (8, 5)))
    pairs = (
        (lambda x, a, b: fusebook.swiglu(x, a, b, recompute=recompute), swiglu_eager),
        (lambda x, a, b: fusebook.concat_gemm(x, [a, b]), concat_gemm_eager),
    )
    for pair in pairs:
        found = [
            torch.vmap(torch.func.grad(lambda a, x, b, f=f: f(x, a, b).square().sum()), (None, 0, None))(a, x, b)
            for f in pair
        ]
        assert torch.allclose(*found, atol=1e-4)


@pytest.mark.parametrize(("options", "products_kept"), [({}, 2), ({"recompute": True}, 0), ({"strategy": "fused"}, 0)])
def test_recompute_chooses_whether_both_products_are_kept(options, products_kept, device):
    kept = []
    x, gate, up = (drawn(*shape, device=device) for shape in ((6, 8), (8, 5), (8, 5)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        fusebook.swiglu(x, gate, up.requires_grad_(), **options)
    assert kept.count((6, 5)) == products_kept
    kept.clear()
    with torch.no_grad():
        assert fusebook.swiglu(x, gate, up).grad_fn is None


def test_gradients_with_a_bias_agree_with_differences(device):
    inputs = [drawn(*s, dtype=torch.float64, device=device).requires_grad_() for s in ((3, 4), (4, 5), (4, 5), (2, 5))]
    for recompute in (False, True):
        function = functools.partial(fusebook.swiglu, recompute=recompute)
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_differentiable_once_more(recompute, device):
    x, a, b = (drawn(*shape, device=device).requires_grad_() for shape in ((3, 4), (4, 5), (4, 5)))

    def second(y):
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), a)[0]

    mine, theirs = fusebook.swiglu(x, a, b, recompute=recompute), swiglu_eager(x, a, b)
    assert torch.allclose(second(mine), second(theirs), atol=1e-4)
    mine, theirs = fusebook.concat_gemm(x, [a, b]), concat_gemm_eager(x, a, b)
    assert torch.allclose(second(mine), second(theirs), atol=1e-4)


def test_the_operator_that_keeps_its_products_is_registered_whole(device):
    x, a, b, bias = (drawn(*shape, device=device) for shape in ((3, 4), (4, 5), (4, 5), (2, 5)))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = x.requires_grad_(), a.requires_grad_(), b, bias, False, ""
    torch.library.opcheck(torch.ops.fusebook.swiglu_kept, given, test_utils=tests)


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


# Launch configs

KINDS = [(name, kind) for name, tables in TABLES.items() for kind in tables]


@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), None])
def test_every_size_has_a_launch_config(name, kind, capability):
    for M in (1, 16, 17, 64, 65, 1000, 100_000):
        found = products.config(name, M, 777, kind, capability)
        assert M <= found.rows and M * 777 <= found.size


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_table_is_short_and_its_limits_rise(name, kind):
    table = TABLES[name][kind]
    assert len(table) <= 8 and table[-1].rows == table[-1].size == ANY
    limits = [(row.rows, row.size) for row in table]
    assert all(any(a > b for a, b in zip(limit, before, strict=True)) for before, limit in itertools.pairwise(limits))
    assert {row.instead for row in table} <= {"", "torch", "columns"}


def shared(c, name, kind):
    weights = 2 if name == "swiglu" else 1
    store = c.bm * c.bn // c.bulk if c.bulk else 0
    return (c.stages * c.bk * (c.bm + weights * c.bn) + store) * (2 if kind.startswith("half") else 4)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_launch_configs_fit_into_shared_memory(name, kind):
    assert all(shared(c, name, kind) <= 227 * 1024 for c in TABLES[name][kind])
    for M in (1, 64, 1000, 100_000):
        assert shared(products.config(name, M, 4096, kind, (8, 6)), name, kind) <= 96 * 1024, "an untuned GPU"


@pytest.fixture
def launched(monkeypatch):
    """On a Hopper GPU whose kernels compute nothing: config, layout and count of weights of each launch, or "torch"."""
    found = []
    monkeypatch.setattr(products, "gpu", lambda device: ((9, 0), 132))
    monkeypatch.setattr(products, "launch", lambda *_, **__: None)
    monkeypatch.setattr(
        products, "_launch_concat", lambda out, x, ws, math, layout, c: found.append((c, layout, len(ws)))
    )
    monkeypatch.setattr(products, "_launch_swiglu", lambda out, x, gate, up, bias, math, c: found.append((c, "", 2)))
    monkeypatch.setattr(products, "_torch", lambda *_: found.append("torch"))
    return found


def multiply(M, K, *widths, column=False, dtype=torch.float16, strategy=""):
    weights = [torch.empty(n, K, dtype=dtype).T if column else torch.empty(K, n, dtype=dtype) for n in widths]
    out = torch.empty(M, sum(widths), dtype=dtype)
    products._concat_into(out, torch.empty(M, K, dtype=dtype), weights, False, strategy)


def test_torch_multiplies_where_the_table_says_so(launched, monkeypatch):
    tiles = Config(ANY, ANY, 64, 64, 64, 3, 4)
    for instead in ("torch", ""):
        c = tiles._replace(instead=instead)
        monkeypatch.setitem(TABLES["concat_gemm"], "half row", (c,))
        multiply(128, 64, 64, 64)
        assert launched == (["torch"] * 2 if instead else [(c, "row", 2)])
        launched.clear()
        multiply(128, 64, 64, 64, strategy="fused")
        assert launched == [(c, "row", 2)]
        launched.clear()
    multiply(128, 64, 64, 64, strategy="views")
    assert launched == ["torch"] * 2


def test_torch_writes_no_columns_that_begin_at_no_multiple_of_16_bytes(launched):
    """Its kernels for such addresses are several times slower."""
    for widths, count in (((4096, 4096), 2), ((4096, 4104), 2), ((4100, 4096), 0)):
        multiply(1024, 64, *widths, column=True)
        assert launched.count("torch") == count
        launched.clear()


def test_rows_that_begin_inside_a_line_of_the_cache_are_for_torch_where_they_are_many(launched, monkeypatch):
    monkeypatch.setitem(TABLES["concat_gemm"], "half column", (Config(ANY, ANY, 64, 64, 64, 3, 4),))
    for M, K, torchs in ((2048, 72, 2), (2048, 64, 0), (128, 72, 0)):
        multiply(M, K, 1024, 1024, column=True)
        assert launched.count("torch") == torchs
        launched.clear()


def test_large_rows_of_float32_weights_become_columns(launched):
    multiply(512, 64, 1024, 1024, dtype=torch.float32)
    multiply(256, 64, 128, 128, dtype=torch.float32)
    assert [how[1:] for how in launched] == [("column", 1), ("row", 2)]


def test_what_descriptors_describe_begins_at_multiples_of_16_bytes():
    wide, odd = torch.zeros(8, 64, dtype=torch.float16), torch.zeros(8, 60, dtype=torch.float16)
    assert products._describable(wide, "row") and products._describable(wide[:, 8:], "row")
    assert not products._describable(wide[:, 1:], "row") and not products._describable(odd, "row")
    assert not products._describable(wide.T, "row") and products._describable(wide.T, "column")


def test_a_layout_is_one_of_rows_apart_and_knows_how_far():
    wide = torch.zeros(8, 64)
    assert products.layout_of(wide[:, :48]) == "row" and products._leading(wide[:, :48], "row") == 64
    assert products.layout_of(wide[:, :48].T) == "column" and products._leading(wide[:, :48].T, "column") == 64
    assert products.layout_of(torch.zeros(200).as_strided((8, 16), (4, 1))) == "any", "rows that overlap"
    assert products.layout_of(torch.zeros(200).as_strided((16, 8), (1, 4))) == "any"


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("widths", [(50, 50), (64, 3, 1)])
def test_what_no_descriptor_describes_is_copied_where_many_rows_need_it(column, widths, device, monkeypatch):
    """Rows of x and of weights begin anywhere, and next to them in memory is NaN, which must not be read."""

    def among_nan(rows, columns):
        wide = torch.full((rows, columns + 4), torch.nan, dtype=torch.float16, device=device)
        return wide[:, :columns].copy_(drawn(rows, columns, dtype=torch.float16))

    copied, real = [], products._aligned
    monkeypatch.setattr(products, "_aligned", lambda m: copied.append(len(m)) or real(m))
    x = among_nan(100, 45)
    weights = [among_nan(n, 45).T if column else among_nan(45, n) for n in widths]
    poison([x.new_empty(100, sum(widths))])
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, weights), (x, *weights))
    assert copied == [len(widths), 1], "the weights, and x"
    if len(widths) == 2:
        assert is_right(SWIGLU, fusebook.swiglu(x, *weights), (x, *weights))
    copied.clear()
    fusebook.concat_gemm(x, weights, strategy="views")  # torch takes them as they are
    monkeypatch.setattr(products, "_CACHED", 0)  # few rows read each of some large weights once
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, weights), (x, *weights))
    assert is_right(SWIGLU, fusebook.swiglu(x, weights[0], weights[0]), (x, weights[0], weights[0]))
    assert not copied


def test_copies_begin_at_whole_lines_of_the_cache(device):
    weights = [drawn(21, n, device=device)[:, 1:] for n in (34, 8, 2)]
    whole = products._aligned(weights)
    assert torch.equal(whole, torch.cat(weights, 1)) and whole.stride() == (1, 32)


@pytest.mark.parametrize(("widths", "bulk"), [((64, 40), 2), ((40, 64), 0), ((64, 32, 8), 2)])
def test_the_copy_engine_stores_where_no_tile_reaches_into_the_next_weight(widths, bulk, device, monkeypatch):
    launches, given = [], {"dtype": torch.float16, "device": device}
    monkeypatch.setattr(products, "launch", lambda *_, **constants: launches.append(constants["BULK"]))
    x, weights = torch.empty(128, 64, **given), [torch.empty(64, width, **given) for width in widths]
    c = Config(ANY, ANY, 64, 32, 64, 3, 4, bulk=2)
    products._launch_concat(torch.empty(128, sum(widths), **given), x, weights, "half", "row", c)
    assert launches == [bulk]


def test_tiles_that_the_copy_engine_stores_in_halves_are_right(device):
    x, weights = drawn(70, 64, device=device), [drawn(64, n, device=device) for n in (128, 64, 20)]
    out = x.new_empty(70, 212)
    products._launch_concat(out, x, weights, "float32", "row", Config(ANY, ANY, 64, 64, 32, 3, 4, bulk=2))
    assert is_right(CONCAT_GEMM, out, (x, *weights))


@pytest.mark.parametrize(
    ("M", "K", "widths", "split"),
    [
        (8, 7168, (2048, 2048), 2),  # 128 tiles of 28 steps, for 264 programs
        (8, 7168, (2048, 2048, 1024), 1),
        (8, 14096, (40,), 14),  # 56 steps for 16 parts would leave one without any
        (8, 3072, (1024, 1024), 2),  # shorter sums, for 132 programs
        (8, 4096, (3072, 1024), 1),
        (8, 3071, (40,), 1),
    ],
)
def test_programs_that_are_too_few_divide_the_sum(M, K, widths, split, monkeypatch):
    monkeypatch.setattr(products, "gpu", lambda device: ((9, 0), 132))
    x = torch.empty(M, K, dtype=torch.float16, device="meta")
    c = products._fitted(Config(ANY, ANY, 16, 32, 256, 3, 4, bulk=1), M, K, widths, 1, x)
    assert (c.split, c.bulk) == (split, int(split == 1)) and (c.bn, c.bk) == (32, 256)


def test_no_step_is_longer_than_the_sum_and_no_part_is_empty(monkeypatch):
    monkeypatch.setattr(products, "gpu", lambda device: ((9, 0), 132))
    long = Config(ANY, ANY, 16, 32, 256, 3, 4, split=4)
    for K, bn, bk, split in ((48, 128, 64, 1), (100, 64, 128, 1), (200, 32, 256, 1), (600, 32, 256, 3)):
        c = products._fitted(long, 16, K, [4096], 1, torch.empty(16, K, device="meta"))
        assert (c.bn, c.bk, c.split) == (bn, bk, split)


def test_a_tall_matrix_is_read_once(launched, device):
    """Weights that are small next to x are copied side by side, for one product."""
    for M, widths, strategy, launches in (
        (4096, (128, 128), "", [("column", 1)]),
        (4096, (128, 256), "", [("row", 2)]),
        (4096, (128, 128), "fused", [("row", 2)]),
    ):
        multiply(M, 64, *widths, strategy=strategy)
        assert [how[1:] for how in launched] == launches
        launched.clear()
    multiply(2**17, 64, 128, 128)
    assert launched == ["torch"]


@pytest.mark.parametrize("column", [False, True])
def test_a_product_of_a_tall_matrix_is_right(column, device):
    x = drawn(300, 40, device=device)
    weights = [drawn(n, 40, device=device).T if column else drawn(40, n, device=device) for n in (9, 4, 1)]
    poison([x.new_empty(300, 14)])
    assert is_right(CONCAT_GEMM, fusebook.concat_gemm(x, weights), (x, *weights))


@pytest.mark.parametrize("split", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sum_in_parts_is_right(split, dtype, device):
    """K has ten steps, so that some parts of eight have none."""
    given, c = {"dtype": dtype, "device": device}, Config(ANY, ANY, 16, 32, 16, 3, 4, split=split)
    x, weights = drawn(20, 152, **given), [drawn(40, 152, **given).T for _ in range(2)]
    kind, bias, out = products._math(dtype, False), drawn(2, 40, **given), x.new_empty(20, 80)
    poison([out])
    products._launch_concat(out, x, weights, kind, "column", c)
    assert is_right(CONCAT_GEMM, out, (x, *weights))
    out = x.new_empty(20, 40)
    poison([out])
    products._launch_swiglu(out, x, *weights, bias, kind, c)
    want = swiglu_eager(*(t.double() for t in (x, *weights, bias)))
    assert torch.allclose(out.double(), want, atol=4 * torch.finfo(dtype).eps)
    again = torch.empty_like(out)
    products._launch_swiglu(again, x, *weights, bias, kind, c)
    assert torch.equal(out, again), "parts are added in one order"


# Tuning


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_each_row_of_a_table_has_a_problem_to_tune_by(name, kind):
    table = TABLES[name][kind]
    for row in table:
        M, _, N = tune.problem(name, table, row)
        N *= 2 if name == "concat_gemm" else 1
        assert next(r for r in table if M <= r.rows and M * N <= r.size) == row


def test_tuning_prints_the_fastest_config_with_the_limits_of_its_row():
    slow, fast = Config(ANY, ANY, 64, 64, 64, 3, 4), Config(ANY, ANY, 128, 64, 64, 3, 4)
    line = tune._line(Config(64, 2**18, 16, 16, 16, 2, 4), {"torch": 1e-5, fast: 2e-5, slow: 3e-5})
    found, _, rest = line.partition(",  # ")
    assert eval(found, {"Config": Config, "inf": math.inf}) == fast._replace(rows=64, size=2**18)
    assert rest == "20.0 us, torch 10.0 us"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_needs_a_gpu_and_a_known_operator(capsys):
    assert tune.main(["swiglu"]) == 1
    assert "expected a CUDA device, got none" in capsys.readouterr().err
    for argv in (["softmax"], ["swiglu", "half row"], *(["swiglu", gone] for gone in tune.REMOVED)):
        with pytest.raises(SystemExit):
            tune.main(argv)
        assert ("went with version 0.2.0" in capsys.readouterr().err) is (argv[-1] in tune.REMOVED)
