"""What is special to cross entropy: its terms, bad input, gradients in place, rows that several programs share."""

import functools
import json
import math
import os
import sys
import types

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl  # noqa: F401  (which the interpreter looks for)
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import fusebook
import warm
from fusebook.cards import OPS, losses
from fusebook.kernels import _rows
from fusebook.kernels import losses as kernels
from fusebook.kernels._call import launching, uncached
from fusebook.measure import check
from fusebook.measure.inputs import generator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=lambda t: str(t)[6:]
)
#: Interpreted, a kernel on rows takes the path of bfloat16 for float16.
PATHS = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16][: 4 if DEVICE == "cuda" else 3], ids=str
)
#: Several rows of a program; a row in chunks; a row shared by three programs, which torch computes in float64.
WIDTHS = pytest.mark.parametrize("N", ["rows", "chunks", "shared"], indirect=True)


@pytest.fixture
def force(monkeypatch):
    """Choose a kernel and its launch config, in the interpreter as well."""

    def forced(kind):
        if kind == "rows":
            return
        chunks = (_rows.Config(2**40, 256, 4),) if kind == "chunks" else ()
        monkeypatch.setattr(kernels, "INTERPRETED", False)
        monkeypatch.setattr(kernels, "_ROWS", dict.fromkeys((2, 4, 8), chunks))
        parts = (_rows.Parts(2**40, 1024, 4),) if kind == "shared" else ()
        monkeypatch.setattr(kernels, "_PARTS", {2: parts, 4: parts, 8: ()})
        monkeypatch.setattr(kernels, "_CHUNK", 256)
        if DEVICE == "cpu":  # programs run in turn: looking again finds nothing new
            monkeypatch.setattr(_rows, "TRIES", 0)

    with uncached():
        yield forced


@pytest.fixture
def N(request, force):
    """A width, and the kernel for it."""
    force(request.param)
    return {"rows": 37, "chunks": 1001, "shared": 3001}[request.param]


def drawn(M, N, dtype=torch.float32, seed=0):
    """Logits, some of them far from zero, and classes of which one is ignored."""
    rng = torch.Generator(DEVICE).manual_seed(seed)
    x = 3 * torch.randn(M, N, generator=rng, device=DEVICE).to(dtype)
    x[1::3] += 100
    target = torch.randint(0, N, (M,), generator=rng, device=DEVICE)
    target[M // 2] = -100
    return x, target, torch.rand(N, generator=rng, device=DEVICE) + 0.5


def wanted(x, target, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None):
    """Loss and gradient in float64, by PyTorch's own where it has them."""
    x = x.detach().double().requires_grad_()
    logits = x if softcap is None else softcap * torch.tanh(x / softcap)
    weight = None if weight is None else weight.double()
    counts = target != ignore_index
    weights = torch.ones_like(target, dtype=torch.float64) if weight is None else weight[target * counts]
    weights = torch.where(counts, weights, 0.0)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
    losses = F.cross_entropy(logits, target, weight, **options)
    if z_loss:
        losses = losses + z_loss * weights * logits.logsumexp(-1) ** 2
    loss = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / weights.sum()}[reduction]
    return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]


def assert_close(got, want, eps=64.0):
    """As a share of each number and of the largest of its row."""
    assert got.shape == want.shape
    scale = want.abs() + (want.abs().amax(-1, keepdim=True) if want.dim() else 0)
    assert ((got.double() - want).abs() <= eps * torch.finfo(got.dtype).eps * scale).all()


TERMS = {
    "plain": {},
    "sum, smoothed, z-loss, capped": {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 150.0},
    "a loss a row, weights, smoothed": {"reduction": "none", "label_smoothing": 0.2, "weight": True, "z_loss": 1e-3},
    "weights": {"weight": True, "ignore_index": 3},
}


@PATHS
@WIDTHS
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_every_term_is_that_of_torch_in_float64(terms, N, dtype):
    if N > 1001 and (dtype not in (torch.float64, torch.bfloat16) or "weight" not in terms):
        pytest.skip("the kernel is the same")
    x, target, weight = drawn(4, N, dtype)
    target[target < 0] = terms.get("ignore_index", -100)
    terms = terms | {"weight": weight if terms.get("weight") else None}
    loss, dx = wanted(x, target, **terms)
    got, got_dx = fusebook.cross_entropy_with_gradient(x, target, **terms)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and got_dx.dtype == dtype
    assert_close(got, loss)
    assert_close(got_dx, dx)
    assert not got_dx[2].any()  # it is ignored
    assert_close(fusebook.cross_entropy(x, target, **terms), loss)  # alone, by another kernel


@WIDTHS
def test_the_gradient_goes_where_the_logits_were_and_says_so(N):
    x, target, _ = drawn(3, N)
    _, dx = fusebook.cross_entropy_with_gradient(x, target)
    own = x.clone().requires_grad_()
    kept = own * 1
    later = kept.exp().sum()  # which exp has not kept, but the next has
    squared = (kept**2).sum()
    loss = fusebook.cross_entropy(kept, target, inplace=True)
    (got,) = torch.autograd.grad(loss, kept, retain_graph=True)
    assert got.data_ptr() == kept.data_ptr() and torch.equal(got, dx)
    with pytest.raises(RuntimeError, match="pass inplace=False"):
        torch.autograd.grad(loss, kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()
    assert later.isfinite() or later.isinf()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_pass_finds_the_gradient_anew(reduction):
    x, target, _ = drawn(5, 60)
    own = x.clone().requires_grad_()
    loss = fusebook.cross_entropy(own, target, reduction=reduction)
    g = torch.arange(1.0, 6.0, device=DEVICE) if reduction == "none" else torch.tensor(3.0, device=DEVICE)
    _, dx = wanted(x, target, reduction=reduction)
    dx = dx * (g[:, None] if reduction == "none" else g).double()
    for _ in range(2):
        (got,) = torch.autograd.grad(loss, own, g, retain_graph=True)
        assert_close(got, dx)
    for once in (loss, fusebook.cross_entropy(own, target, reduction=reduction)):
        (again,) = torch.autograd.grad(once, own, g, create_graph=True)
        assert_close(again.detach(), dx)
        with pytest.raises(NotImplementedError, match="cross_entropy: expected first derivatives to be asked for"):
            again.sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_scaled_loss_in_float16_has_the_gradients_that_are_nothing_before_they_are_scaled(inplace):
    """As torch.amp.GradScaler scales it: gradients of unlikely classes are less than the least number of float16."""
    x, target, _ = drawn(64, 300, torch.float16)
    scale = torch.tensor(2.0**16, device=DEVICE)
    _, dx = wanted(x, target)
    own = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(fusebook.cross_entropy(own * 1, target, inplace=inplace), own, scale)
    torch.testing.assert_close(got.double(), dx * scale, rtol=2**-9, atol=2**-24)
    h, head = torch.eye(64, device=DEVICE).half(), x.T.contiguous()
    own = [t.clone().requires_grad_() for t in (h, head)]
    _, got = torch.autograd.grad(fusebook.linear_cross_entropy(*own, target, rows=24), own, scale)
    torch.testing.assert_close(got.T.double(), dx * scale, rtol=2**-9, atol=2**-24)


def test_it_has_a_gradient_under_transforms_and_compiled():
    x, target, _ = drawn(5, 60)
    _, dx = wanted(x, target)
    assert_close(torch.func.grad(lambda x: fusebook.cross_entropy(x, target))(x), dx)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        return fusebook.cross_entropy(x * 1, target, inplace=True)

    own = x.clone().requires_grad_()
    step(own).backward()
    assert_close(own.grad, dx)


@WIDTHS
def test_a_row_does_not_depend_on_how_many_there_are(N):
    x, target, _ = drawn(4, N - N % 8)  # rows that begin within a vector are added up in another order
    losses, dx = fusebook.cross_entropy_with_gradient(x, target, reduction="none")
    for rows in (slice(0, 1), slice(1, 4)):
        some = fusebook.cross_entropy_with_gradient(x[rows].clone(), target[rows].clone(), reduction="none")
        assert torch.equal(some[0], losses[rows]) and torch.equal(some[1], dx[rows])


@triton.jit
def nothing(workspace_ptr, word):
    """Replaces `publish`, so that no program finds a word that another one has published."""


# Interpreted, float16 takes the path of bfloat16.
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16][: 3 if DEVICE == "cuda" else 2], ids=str
)
@pytest.mark.parametrize(("n", "parts"), [(2048, 2), (2047, 3)], ids=["aligned", "odd"])
@pytest.mark.parametrize("when", ["in turn"] if DEVICE == "cuda" else ["on time", "late"])
def test_a_shared_row_has_the_same_bits_whenever_words_arrive(when, n, parts, dtype, force, monkeypatch):
    """Also if its gradient overwrites the logits, from which no missing word can be computed any more."""
    force("shared")
    table = (_rows.Parts(2**40, 1088 if parts == 2 else 768, 4),)
    monkeypatch.setattr(kernels, "_PARTS", {2: table, 4: table})
    x, target, _ = drawn(3, n, dtype)
    x[0, : n // 3 * 2] = -math.inf  # a part, or two, without anything
    target[0] = n - 1
    config, options = kernels._launch_config(x, x), {"label_smoothing": 0.1, "softcap": 200.0}
    assert config.parts == parts
    for terms in ({}, {"reduction": "none"}, options):
        loss, dx = fusebook.cross_entropy_with_gradient(x, target, **terms)
        if terms is not options:  # with smoothing, -inf makes an infinite loss
            want, want_dx = wanted(x, target, **terms)
            assert_close(loss[..., None], want[..., None])
            assert_close(dx, want_dx)
        with monkeypatch.context() as patch:
            if when == "late":
                patch.setattr(kernels, "publish", nothing)
            elif when == "on time":  # the words of the launch before
                boards, made = [], kernels._prepare
                patch.setattr(kernels, "_prepare", lambda *a, made=made, to=boards: to.append(made(*a)) or to[-1])
                fusebook.cross_entropy_with_gradient(x, target, **terms)
                words = boards[0].words.view(3, parts)
                assert (words != 0).sum(1).tolist() == [parts, 0, parts]  # row 1 is ignored
                patch.setattr(kernels, "_prepare", lambda *a, to=boards: to[0])
                patch.setattr(kernels, "_part_word", None)  # nothing to compute again
            here = x.clone().requires_grad_()
            found = fusebook.cross_entropy(here * 1, target, inplace=dtype != torch.float16, **terms)
            (got,) = torch.autograd.grad(found.sum(), here)
        assert torch.equal(found, loss) and torch.equal(got, dx)


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_programs_of_short_rows_take_them_in_turn(programs, monkeypatch):
    x, target, _ = drawn(9, 37, torch.bfloat16)
    loss, dx = wanted(x, target)
    monkeypatch.setattr(kernels, "INTERPRETER", _rows.Config(2**40, 64, 1, 128))
    monkeypatch.setattr(kernels, "_ROWS", {2: (_rows.Config(2**40, 64, 1, 128),)})
    monkeypatch.setattr(kernels, "_MOST_PROGRAMS", programs)
    for here in (torch.full_like(x, math.nan), x):  # apart from the logits, and over them
        found, terms = torch.empty(1, device=DEVICE), kernels.Terms(None, "mean", -100, 0.0, 0.0, None)
        with launching(x):
            kernels._entropy_into(found, here, x, target, None, terms)
        assert_close(found[0], loss)
        assert_close(here, dx)


@pytest.mark.parametrize("few", [0, 1024])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_is_the_same_whether_a_kernel_sums_weights_before(few, weighted, monkeypatch):
    x, target, weight = drawn(600, 9)
    x.clamp_(-1, 1)  # a class that is nearly certain has no digits
    weight = weight if weighted else None
    loss, dx = wanted(x, target, weight)
    monkeypatch.setattr(kernels, "_FEW_TARGETS", few)
    monkeypatch.setattr(kernels, "_MORE_TARGETS", few)
    with uncached():
        got, got_dx = fusebook.cross_entropy_with_gradient(x, target, weight)
        assert_close(fusebook.cross_entropy(x, target, weight), loss)
    assert_close(got, loss)
    assert_close(got_dx, dx)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_rows_that_no_kernel_holds_are_computed_by_torch(terms, monkeypatch):
    monkeypatch.setattr(kernels, "WIDEST", 16)
    monkeypatch.setattr(kernels, "launch", refuse_rows(kernels.launch))
    for dtype in (torch.bfloat16, torch.float64):
        x, target, weight = drawn(5, 37, dtype)
        x[2], x[3, 4] = math.nan, -math.inf
        target[target < 0] = terms.get("ignore_index", -100)
        own = terms | {"weight": weight if terms.get("weight") else None}
        if terms.get("label_smoothing"):
            x[3, 4] = 1.0
        loss, dx = wanted(torch.where(x.isnan(), 0.0, x), target, **own)
        with uncached():
            got, got_dx = fusebook.cross_entropy_with_gradient(x, target, **own)
            alone = fusebook.cross_entropy(x, target, **own)
            here = x.clone().requires_grad_()
            over = fusebook.cross_entropy(here * 1, target, inplace=True, **own)
            g = torch.arange(1.0, 1 + over.numel(), device=DEVICE).view(over.shape).to(over.dtype)
            (over_dx,) = torch.autograd.grad(over, here, g)
            finite = torch.where(x.isfinite(), x, 0.0)
            h = torch.eye(5, dtype=dtype, device=DEVICE)
            linear = fusebook.linear_cross_entropy_with_gradients(h, finite.T, target, rows=2, **own)
        for found in (got, alone, over.detach()):
            assert_close(found, loss)
        assert_close(got_dx, dx)
        assert_close(over_dx, dx * g.reshape(-1, 1).double())
        loss, dx = wanted(finite, target, **own)
        assert_close(linear[0], loss)
        assert_close(linear[2].T, dx)
        target[1] = 37
        with uncached():
            own = {"reduction": "none", "check": False, "ignore_index": terms.get("ignore_index", -100)}
            got, got_dx = fusebook.cross_entropy_with_gradient(x, target, **own)
        assert got.isnan().tolist() == got_dx.isnan().any(1).tolist() == [False, True, False, False, False]


def refuse_rows(launch):
    def launched(kernel, *given, **how):
        assert kernel not in (kernels._cross_entropy_rows, kernels._cross_entropy_shared)
        return launch(kernel, *given, **how)

    return launched


# Bad input


@WIDTHS
def test_special_values_are_where_torch_has_them(N):
    x, target, _ = drawn(6, N)
    target.fill_(1)
    x[0, 3], x[1, 5], x[2], x[3, 1] = math.nan, math.inf, -math.inf, -math.inf
    x[4, 8:] = -math.inf  # but for the first numbers
    loss, dx = wanted(x, target, reduction="none")
    got, got_dx = fusebook.cross_entropy_with_gradient(x, target, reduction="none")
    assert torch.equal(got.isnan(), loss.isnan()) and torch.equal(got.isinf(), loss.isinf())
    assert torch.equal(got_dx.isnan(), dx.isnan())
    # A class that is masked stays masked under a cap; the others are near it.
    capped, capped_dx = fusebook.cross_entropy_with_gradient(x[3:], target[3:], reduction="none", softcap=1e6)
    assert torch.equal(capped.isinf(), got[3:].isinf()) and not capped_dx.isnan().any()


@PATHS
@WIDTHS
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.1, True), (0.9, False)])
def test_logits_may_be_the_least_and_the_largest_numbers(weighted, smoothing, N, dtype):
    """As they are where a mask shuns infinity: their sums, and their products with log2(e), would overflow."""
    if N > 1001 and weighted and dtype != torch.bfloat16:
        pytest.skip("the kernel is the same")
    x, target, weight = drawn(5, N, dtype)
    least = torch.finfo(dtype).min
    target[:] = torch.arange(5, device=DEVICE)
    x[0], x[1], x[3, 5:] = least, -least, least
    x[2, N // 2 :] = least
    terms = {"label_smoothing": smoothing, "weight": weight / 2 if weighted else None, "reduction": "none"}
    loss, dx = wanted(x, target, **terms)
    got, got_dx = fusebook.cross_entropy_with_gradient(x, target, **terms)
    rows = [0, 1, 4] if dtype == torch.float64 else [0, 1, 2, 3, 4]  # torch's own sums overflow in float64
    assert loss[rows].isfinite().all()
    assert_close(got[rows, None], loss[rows, None])
    assert_close(got_dx[rows], dx[rows])
    assert_close(fusebook.cross_entropy(x, target, **terms)[rows, None], loss[rows, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@WIDTHS
def test_logits_that_are_further_apart_than_the_largest_number_are_infinitely_so(N, dtype):
    """As in torch in float32; nothing becomes NaN."""
    x, target, _ = drawn(2, N, dtype)
    x[:], target[:] = torch.finfo(dtype).min, 7
    x[0, 3], x[1, 7] = -x[0, 3], -x[1, 7]
    want = F.cross_entropy(x.float(), target, label_smoothing=0.1, reduction="none")
    got, dx = fusebook.cross_entropy_with_gradient(x, target, label_smoothing=0.1, reduction="none")
    assert want.isinf().all() and torch.equal(got, want)
    assert_close(dx, wanted(x, target, label_smoothing=0.1, reduction="none")[1])


@pytest.mark.parametrize("N", [37, 5001])
def test_targets_that_are_no_class_are_named_or_give_nan(N):
    x, target, _ = drawn(4, N)
    for wrong in (N, -1, 2**40):
        target[3] = wrong
        for function in (fusebook.cross_entropy, fusebook.cross_entropy_with_gradient):
            with pytest.raises(IndexError, match=f"got {wrong} at target\\[3\\]"):
                function(x, target, check=True)
        losses, dx = fusebook.cross_entropy_with_gradient(x, target, reduction="none", check=False)
        assert losses.isnan().tolist() == [False, False, False, True]
        assert dx[3].isnan().all() and not dx[:3].isnan().any()
        assert fusebook.cross_entropy(x, target, check=False).isnan()
    target.clamp_(0, N - 1)[3] = N  # and nothing else is out of the way
    with pytest.raises(IndexError, match=f"got {N} at target\\[3\\]"):
        fusebook.cross_entropy(x, target, check=True)


def test_nothing_to_learn_is_nan_and_has_no_gradient():
    x, target, _ = drawn(3, 20)
    x[1] = math.nan
    loss, dx = fusebook.cross_entropy_with_gradient(x, target.fill_(-100))
    assert loss.isnan() and not dx.any()
    assert fusebook.cross_entropy(x, target, reduction="sum") == 0
    assert fusebook.cross_entropy(x[:0], target[:0]).isnan()
    assert fusebook.cross_entropy(x[:0], target[:0], reduction="none").shape == (0,)


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_ignored_row_has_no_gradient_whatever_the_gradient_of_its_loss(reduction, dtype):
    """A mask that divides by the number of rows that count, for one, has infinity there."""
    x, target, _ = drawn(4, 37, dtype)
    head = torch.ones(37, 37, device=DEVICE, dtype=dtype)
    for number in (math.nan, math.inf):
        for loss_of in (
            fusebook.cross_entropy,
            lambda h, *rest, **how: fusebook.linear_cross_entropy(h, head, *rest, **how),
        ):
            own = x.clone().requires_grad_()
            loss = loss_of(own, target, reduction=reduction)
            g = torch.full_like(loss, number)
            if reduction == "none":
                g = torch.where(target == -100, g, 1.0)
            (got,) = torch.autograd.grad(loss, own, g)
            assert not got[2].any() and (reduction == "mean" or got.isfinite().all())


X, TARGET = torch.zeros(3, 5, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
REFUSED = {
    "probabilities": (TypeError, "target to be int64 or int32", (X, X)),
    "integers": (TypeError, "logits to be float16", (X.int(), TARGET)),
    "a target a column": (
        ValueError,
        r"target of shape \[3\], \[...\] where logits is \[..., C > 0\], got \[2\]",
        (X, TARGET[:2]),
    ),
    "no axis": (ValueError, r"logits of shape \[..., C > 0\], got \[\]", (X[0, 0], TARGET[0])),
    "no class": (ValueError, r"\[..., C > 0\], got \[3, 0\]; give one at least", (X[:, :0], TARGET)),
    "weights of another length": (ValueError, r"weight of shape \[5\]", (X, TARGET, X[0, :4])),
    "weights that learn": (ValueError, "needs no gradient", (X, TARGET, X[0].clone().requires_grad_())),
    "another reduction": (ValueError, "reduction to be mean, sum or none", (X, TARGET), {"reduction": "batchmean"}),
    "too much smoothing": (ValueError, "from 0 to 1", (X, TARGET), {"label_smoothing": 1.5}),
    "a cap of nothing": (ValueError, "softcap above 0", (X, TARGET), {"softcap": 0.0}),
    "targets elsewhere": (ValueError, "move one", (X, TARGET.to("meta"))),
    "weights elsewhere": (ValueError, "move one", (X, TARGET, X[0].to("meta"))),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_refused_with_its_reason(case):
    error, message, args, *options = case
    with pytest.raises(error, match=message):
        fusebook.cross_entropy(*args, **(options[0] if options else {}))


def test_logits_that_cannot_be_overwritten_are_refused():
    x = torch.zeros(5, 3, device=DEVICE, requires_grad=True).T
    with pytest.raises(ValueError, match="pass inplace=False"):
        fusebook.cross_entropy(x, TARGET, inplace=True)


def test_what_is_read_does_not_lie_where_logits_are_overwritten():
    """Neither in the first call nor in one that has a plan."""
    memory = torch.rand(6, 4, device=DEVICE)
    x, target = memory[:5].clone().requires_grad_(), torch.tensor([0, 1, 2, 3, 1], device=DEVICE)
    for _ in range(3):
        fusebook.cross_entropy(x * 1, target, memory[5], inplace=True)
    for what, weight, at in (("weight", memory[4], target), ("target", None, memory[1:].view(torch.int32)[:, 0])):
        own = memory[:5].requires_grad_()
        with pytest.raises(ValueError, match=f"expected {what} apart from logits .* got it in their memory; clone it"):
            fusebook.cross_entropy(own, at, weight, inplace=True, check=False)
        memory = memory.detach()
    fusebook.cross_entropy(memory[:5].requires_grad_(), target, memory[5], inplace=True)  # beside them


def test_programs_weigh_each_target_and_each_class_once():
    """More of both than the two programs take at a time."""
    rng = torch.Generator(DEVICE).manual_seed(3)
    weight = torch.rand(9001, generator=rng, device=DEVICE)
    target = torch.randint(0, 9001, (9003,), generator=rng, device=DEVICE)
    sums = torch.empty(2, device=DEVICE)
    kernels._sum_targets[(2,)](
        sums, sums, target, weight, 0, len(target), len(weight), 7, COUNTS=2, BLOCK=1024, EARLY=False
    )
    torch.testing.assert_close(sums.sum(), weight[target[target != 7]].sum())


def test_a_loss_far_from_zero_has_its_digits():
    x = 4096 + torch.randint(-3, 4, (4, 9), device=DEVICE).float()
    target = torch.tensor([0, 3, 8, 2], device=DEVICE)
    for some in (x, torch.cat([x, torch.full((4, 33000), -1e4, device=DEVICE)], 1)):
        loss, _ = wanted(some, target, reduction="none")
        assert_close(fusebook.cross_entropy(some, target, reduction="none"), loss, 16)


@PATHS
@WIDTHS
@pytest.mark.parametrize("size", [0.03, 3.0, 300.0])  # below the cap, about it, above it
def test_a_cap_leaves_logits_their_digits(size, N, dtype):
    if N > 1001 and dtype == torch.float32:
        pytest.skip("the kernel is the same")
    numbers, other, _ = drawn(4, N, dtype)
    numbers = size / 3 * (numbers - 100 * (numbers > 50))
    # The likeliest class has no digits in the gradient of a row that is sure of it: p - 1 rounds to 0.
    target = torch.where(other < 0, other, (numbers.argmax(1) + 1 + other % (N - 1)) % N)
    # A logit is rounded when it is capped, by eps of its size: a probability loses as many eps as that is large.
    eps = max(16, size)
    for cap in (1e4 * size, size, 30.0):
        if size > 2 * cap:
            continue
        x = numbers.clamp(-1.5 * cap, 1.5 * cap) if cap <= size else numbers  # what is saturated has no digits either
        loss, dx = wanted(x, target, reduction="none", softcap=cap)
        got, got_dx = fusebook.cross_entropy_with_gradient(x, target, reduction="none", softcap=cap)
        assert_close(got, loss, 16)
        assert_close(got_dx, dx, 16 if got_dx.itemsize == 2 else eps)


def test_rows_of_logits_may_lie_2_to_the_31_numbers_apart():
    stride = 2**31 + 64  # whole vectors
    memory = torch.empty(stride + 64, dtype=torch.float16, device=DEVICE)  # of which pages are taken that are written
    x, target = memory.as_strided((2, 64), (stride, 1)), torch.tensor([1, 5], device=DEVICE)
    x.copy_(torch.arange(128).view(2, 64).sin())
    assert torch.equal(fusebook.cross_entropy(x, target), fusebook.cross_entropy(x.contiguous(), target))


def test_any_axes_and_strides():
    x = torch.randn(2, 3, 8, device=DEVICE).transpose(0, 1)
    target = torch.randint(0, 8, (3, 2), device=DEVICE)
    for given in (x, x[..., 1:7], x[..., ::2], x.expand(3, 2, 8)):
        classes = target % given.shape[-1]
        loss, dx = wanted(given.reshape(6, -1), classes.reshape(-1), reduction="none")
        got, got_dx = fusebook.cross_entropy_with_gradient(given, classes, reduction="none")
        assert_close(got, loss.view(3, 2))
        assert_close(got_dx, dx.view(given.shape))
    for dtype in (torch.float32, torch.bfloat16):  # of rows that begin elsewhere than those of their gradient
        given, classes, _ = drawn(3, 5002, dtype)
        given, classes = given[:, :5001], torch.where(classes < 0, classes, classes % 5001)
        loss, dx = wanted(given, classes)
        got, got_dx = fusebook.cross_entropy_with_gradient(given, classes)
        assert_close(got, loss)
        assert_close(got_dx, dx)
    assert_close(fusebook.cross_entropy(x[0, 0], target[0, 0]), wanted(x[0, :1], target[0, :1])[0])


# Of hidden states


def exact(M, K, N, dtype):
    """Hidden states and a head whose logits are rounded nowhere; and classes."""
    rng = torch.Generator(DEVICE).manual_seed(1)
    both = (torch.randint(-2, 3, (length, K), generator=rng, device=DEVICE).to(dtype) / 4 for length in (M, N))
    return *both, torch.randint(0, N, (M,), generator=rng, device=DEVICE)


@pytest.mark.parametrize("rows", [None, 4, 3])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_linear_cross_entropy_is_that_of_the_product(terms, rows):
    rng = torch.Generator(DEVICE).manual_seed(1)
    h, head = (torch.randn(*s, generator=rng, device=DEVICE, dtype=torch.float64) for s in ((2, 5, 6), (11, 6)))
    target = torch.randint(0, 11, (2, 5), generator=rng, device=DEVICE)
    target[1, 2] = terms.get("ignore_index", -100)
    weight = torch.rand(11, generator=rng, device=DEVICE, dtype=torch.float64) if terms.get("weight") else None
    terms = terms | {"weight": weight}
    loss, dx = wanted((h @ head.T).view(10, 11), target.view(-1), **terms)
    got = fusebook.linear_cross_entropy_with_gradients(h, head, target, rows=rows, **terms)
    own = [t.clone().requires_grad_() for t in (h, head)]
    by_autograd = fusebook.linear_cross_entropy(*own, target, rows=rows, **terms)
    g = torch.arange(2.0, 2 + by_autograd.numel(), device=DEVICE, dtype=torch.float64)
    scaled = dx * g[:, None]
    for _ in range(2):
        again = torch.autograd.grad(by_autograd, own, g.view(by_autograd.shape), retain_graph=True)
        assert_close(again[0], (scaled @ head).view(h.shape))
        assert_close(again[1], scaled.T @ h.view(10, 6))
    assert torch.equal(by_autograd, got[0])
    assert_close(got[0].view(-1) if loss.dim() else got[0], loss)
    assert_close(got[1], (dx @ head).view(h.shape))
    assert_close(got[2], dx.T @ h.view(10, 6))


def test_chunks_of_wide_rows_find_words_of_their_own():
    rng = torch.Generator(DEVICE).manual_seed(1)
    h, head = (torch.randn(*s, generator=rng, device=DEVICE) for s in ((3, 2), (33001, 2)))
    target = torch.tensor([5, 33000, 0], device=DEVICE)
    _, dx = wanted(h.double() @ head.double().T, target)
    _, dh, dhead = fusebook.linear_cross_entropy_with_gradients(h, head, target, rows=1)
    for got, a, b in ((dh, dx, head.double()), (dhead, dx.T, h.double())):  # some sums cancel, so beside their terms
        assert ((got - a @ b).abs() <= 128 * torch.finfo(got.dtype).eps * (a.abs() @ b.abs())).all()


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize(
    "case",
    [
        ("mean", 2.0**-6, 64, {}),  # one of 4200 classes has 2**-20
        ("mean", 8.0, 64, {"ignore_index": 5, "label_smoothing": 0.1}),
        ("mean", 2.0**-6, 64, {"weight": True, "z_loss": 1e-4}),
        ("sum", 2.0**-8, 64, {"label_smoothing": 0.1, "weight": True}),
        ("sum", 2.0**14, 1, {}),  # there is no room
        ("sum", 2.0**7, 1, {"z_loss": 0.25, "sure": 8}),  # of class 0, which has 16 times the gradient then
        ("none", [2.0**-8, 2.0**-3, 2.0**4, 2.0**9, 2.0**14, 0.0, -3.0], 1, {}),
    ],
    ids=str,
)
def test_gradients_of_many_logits_keep_their_digits_in_float16(case, rows):
    """They are no normal numbers; raised by what makes them some, those of a large loss would be infinite."""
    reduction, g, size, terms = case
    rng = torch.Generator(DEVICE).manual_seed(3)
    h = (size * torch.rand(7, 8, generator=rng, device=DEVICE)).half()
    head = (torch.randn(4200, 8, generator=rng, device=DEVICE) / (8 * size)).half()
    target = torch.randint(6, 4200, (7,), generator=rng, device=DEVICE)
    target[:4] = 5
    terms = dict(terms)
    head[0] += terms.pop("sure", 0)
    if terms.get("weight"):
        terms = terms | {"weight": torch.rand(4200, generator=rng, device=DEVICE) + 0.5}
    own = h.requires_grad_(), head.requires_grad_()
    loss = fusebook.linear_cross_entropy(*own, target, reduction=reduction, rows=rows, **terms)
    g = torch.tensor(g, device=DEVICE).expand(loss.shape)
    got = torch.autograd.grad(loss, own, g)
    h, head = h.detach(), head.detach()
    _, dx = wanted(h @ head.T, target, reduction=reduction, **terms)
    dx *= g.double()[:, None] if g.dim() else g.double()
    # A rounding of logits, one of gradients, and those of sums, each beside what it rounds; none is nearer than a step.
    # Those of hidden states are sums that are rounded once, those of the head once for each chunk and all before it.
    chunks = [slice(0, end + (rows or 7)) for end in range(0, 7, rows or 7)]
    for found, a, b, sums in (
        (got[0], dx, head.double(), [slice(None)]),
        (got[1], dx.T, h.double(), chunks),
    ):
        terms = 2 * (a.abs() @ b.abs()) + sum(a[:, at].abs() @ b[at].abs() for at in sums)
        assert ((found - a @ b).abs() <= 2.0**-11 * terms + (1 + len(sums)) * 2.0**-25).all()


@pytest.mark.parametrize("ignored", [-100, 5])
def test_large_hidden_states_that_are_ignored_spoil_no_gradient_in_float16(ignored):
    """What raises those of a large loss made them infinite."""
    rng = torch.Generator(DEVICE).manual_seed(4)
    h, head = (torch.randn(n, 8, generator=rng, device=DEVICE).half() for n in (5, 4200))
    target = torch.tensor([7, ignored, 9, ignored, 11], device=DEVICE)
    h[1], h[3] = 3000, 65504
    own = target != ignored
    found = []
    for rows in (slice(None), own):
        given = h[rows].requires_grad_(), head.clone().requires_grad_()
        loss = 1024 * fusebook.linear_cross_entropy(*given, target[rows], reduction="sum", ignore_index=ignored)
        found.append(torch.autograd.grad(loss, given))
    assert torch.equal(found[0][0][own], found[1][0]) and not found[0][0][~own].any()
    assert_close(found[0][1], found[1][1])


@pytest.mark.parametrize("M", [7, 1, 0])
def test_what_is_right_of_a_head_is_found_by_some_rows_at_a_time(M, monkeypatch):
    """All logits of a large vocabulary at once, in float64, were more than a GPU had left."""
    inputs = losses.LINEAR_CROSS_ENTROPY.make(generator(0), torch.float64, M=M, K=4, N=9)
    h, head, target, scale = inputs
    own = h.requires_grad_(), head.requires_grad_()
    loss = F.cross_entropy(h @ head.T, target)
    want = loss, *torch.autograd.grad(loss * scale, own)
    held = []
    find = losses._reference
    monkeypatch.setattr(losses, "_reference", lambda x, t: held.append(len(x)) or find(x, t))
    monkeypatch.setattr(losses, "_HELD", 27)
    with torch.no_grad():
        found = losses.LINEAR_CROSS_ENTROPY.reference(h, head, target, scale)
    assert held == {7: [3, 3, 1], 1: [1], 0: [0]}[M]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(7, 19, 21), (7, 6, 4203), (5, 12, 4208), (11, 9, 24), (1, 1, 17)], ids=str)
def test_rows_beside_whole_vectors_are_copied_into_whole_ones(size, dtype, rows, monkeypatch):
    M, K, N = size
    given = losses.LINEAR_CROSS_ENTROPY.make(generator(3, DEVICE), dtype, M=M, K=K, N=N)
    run, copies, copy = OPS["linear_cross_entropy"].variants["fusebook"].run, [], kernels._copy_into

    def copied(out, x, *ignored):
        if x is not None and out.shape != x.shape:
            copies.append(out)
        copy(out, x, *ignored)

    monkeypatch.setattr(kernels, "_copy_into", copied)
    monkeypatch.setattr(kernels, "_rows_of_chunk", lambda m, *_: min(m, rows or m))
    found = []
    for plan in ((math.inf, math.inf), (0, -1)):
        monkeypatch.setattr(kernels, "PADDED", plan)
        with uncached():
            found.append(run(*given))
        assert bool(copies) == (plan == (0, -1))
    h, head, target, scale = given
    _, dx = wanted(h @ head.T, target)
    assert_close(found[1][0], found[0][0].double(), 4.0)
    for which, a, b in ((1, dx, head.double()), (2, dx.T, h.double())):
        near = (5 if rows else 3) * torch.finfo(dtype).eps * scale * (a.abs() @ b.abs()) + 2.0**-24  # once a chunk
        for got in found:
            assert ((got[which] - scale * a @ b).abs() <= near).all()


def test_what_is_no_number_in_states_that_are_ignored_stays_out_of_copied_gradients(monkeypatch):
    monkeypatch.setattr(kernels, "PADDED", (0, -1))
    h, head, target, _ = losses.LINEAR_CROSS_ENTROPY.make(generator(3, DEVICE), torch.bfloat16, M=5, K=9, N=21)
    h[2], target[2] = math.inf, -100
    with uncached():
        _, dh, _ = fusebook.linear_cross_entropy_with_gradients(h, head, target)
    assert dh.isfinite().all() and not dh[2].any()


def test_few_gradients_of_unaligned_hidden_states_are_written_where_they_belong(monkeypatch):
    """A copy of them took longer than an aligned matmul saves."""
    monkeypatch.setattr(kernels, "PADDED", (0, -1))
    h, head, target, _ = losses.LINEAR_CROSS_ENTROPY.make(generator(3, DEVICE), torch.bfloat16, M=7, K=19, N=21)
    target[2] = -100
    copies, copy = [], kernels._copy_into
    monkeypatch.setattr(kernels, "_copy_into", lambda out, *rest: copies.append(out) or copy(out, *rest))
    found = []
    for direct_limit in (0, 64):
        monkeypatch.setattr(kernels, "DIRECT", direct_limit)
        copies.clear()
        with uncached():
            found.append(fusebook.linear_cross_entropy_with_gradients(h, head, target))
        assert len(copies) == (3 if direct_limit else 4)
    for direct, copied in zip(*found, strict=True):
        torch.testing.assert_close(direct, copied)


@pytest.mark.parametrize("place", [(20, 24, 0), (19, 20, 0), (20, 21, 0), (16, 24, 8), (18, 24, 1)])
def test_copies_are_whole_wherever_rows_begin_and_end(place):
    k, stride, first = place
    memory = torch.randn(first + 5 * stride, device=DEVICE).half()
    x, out = memory.as_strided((5, k), (stride, 1), first), torch.full((8, 24), math.nan, device=DEVICE).half()
    with launching(x):
        kernels._copy_into(out, x)
    assert torch.equal(out, F.pad(x, (0, 24 - k, 0, 3)))


@pytest.mark.parametrize("way", ["loss", "gradients", "kept"])
def test_plans_of_copies_know_how_many_products_and_copies_there_are(way, monkeypatch):
    """Of a loss, of one with its gradients, and of one whose logits are kept, with those of its backward pass."""
    h, head, target, _ = losses.LINEAR_CROSS_ENTROPY.make(generator(3, DEVICE), torch.float16, M=7, K=19, N=21)
    told, copies, products = [], [], []
    copy, apply = kernels._copy_into, kernels.apply
    matmuls = F.linear, torch.mm, torch.addmm, kernels._wide_matmul, kernels._add_across, kernels._add_lowered

    def applied(function, *given, **how):
        products.extend([function] * (function in matmuls))
        return apply(function, *given, **how)

    monkeypatch.setattr(kernels, "_pads", lambda *_, **how: told.append((how["products"], how["copies"])) or True)
    monkeypatch.setattr(kernels, "_copy_into", lambda *both: copies.append(both) or copy(*both))
    monkeypatch.setattr(kernels, "apply", applied)
    with uncached():
        if way == "loss":
            fusebook.linear_cross_entropy(h, head, target)
        elif way == "gradients":
            fusebook.linear_cross_entropy_with_gradients(h, head, target)
        else:
            fusebook.linear_cross_entropy(h.requires_grad_(), head.requires_grad_(), target).backward()
    assert set(told) == {(len(products), len(copies))} and len(told) == (2 if way == "kept" else 1)


def test_copies_are_worth_it():
    """Where both sides of the logits are long."""
    options = {"on_vectors": False, "products": 3, "copies": 4}
    assert kernels._pads(4096, 4095, 50257, 2, **options) and not kernels._pads(4096, 4095, 50257, 4, **options)
    assert kernels._pads(4096, 4096, 50257, 2, **options)
    assert not kernels._pads(4096, 4096, 50257, 2, **options | {"on_vectors": True})
    assert not kernels._pads(10**6, 4095, 2, 2, **options) and not kernels._pads(2, 4095, 10**6, 2, **options)
    assert not kernels._pads(64, 63, 64, 2, **options)
    assert kernels._pads(5000, 1025, 40, 2, **options) and not kernels._pads(5000, 1026, 40, 2, **options)


def test_a_longer_head_is_worth_its_copy():
    """Where many hidden states are multiplied by it."""
    options = {"products": 3, "copies": 2}
    assert kernels._fills(137005, 2560, 393, **options) and not kernels._fills(40, 2560, 393, **options)
    assert not kernels._fills(3, 1280, 100277, **options) and not kernels._fills(10**4, 8, 9, **options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("size", [(7, 19, 13), (3, 2000, 4203)], ids=str)
def test_logits_of_a_scaled_loss_are_kept_for_one_backward_pass(size, reduction, monkeypatch):
    M, K, N = size
    h, head, target, scale = losses.LINEAR_CROSS_ENTROPY.make(generator(3, DEVICE), torch.float16, M=M, K=K, N=N)
    own = h.requires_grad_(), head.requires_grad_()
    found = {}
    for kept in (False, True):
        monkeypatch.setattr(kernels, "KEPT", kept)
        with uncached():
            loss = fusebook.linear_cross_entropy(*own, target, reduction=reduction)
            g = scale * torch.arange(1, 1 + loss.numel(), device=DEVICE).view(loss.shape).float()
            assert ("Once" in type(loss.grad_fn).__name__) == kept
            found[kept] = [loss, *(torch.autograd.grad(loss, own, g, retain_graph=True) for _ in range(2))]
            if kept and reduction == "mean":
                loss = fusebook.linear_cross_entropy(*own, target)
                many = torch.autograd.grad(loss, own, torch.stack([g, 2 * g]), is_grads_batched=True)
                torch.testing.assert_close([dx[0] for dx in many], list(found[kept][1]))
    assert torch.equal(found[True][0], found[False][0])
    for first, again, other in zip(found[True][1], found[True][2], found[False][1], strict=True):
        assert torch.equal(first, other) and torch.equal(again, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changed", ["target", "weight"])
def test_a_gradient_that_is_not_found_yet_notices_what_was_changed(changed, dtype):
    """Of kept logits the first one, and of either loss the one of a second backward pass."""
    h, head, target, _ = losses.LINEAR_CROSS_ENTROPY.make(generator(3, DEVICE), dtype, M=7, K=19, N=13)
    given = {"target": target, "weight": torch.rand(13, device=DEVICE)}
    linear = fusebook.linear_cross_entropy(h.requires_grad_(), head.requires_grad_(), **given)
    whole = fusebook.cross_entropy((h @ head.T).detach().float().requires_grad_(), **given)
    whole.backward(retain_graph=True)
    if dtype != torch.float16:
        linear.backward(retain_graph=True)
    given[changed].zero_()
    for loss in (linear, whole):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_is_wrong_is_refused_where_a_gradient_is_recorded_too(dtype):
    x, target, weight = drawn(3, 20, dtype)
    head = torch.ones(20, 20, dtype=dtype, device=DEVICE, requires_grad=True)
    for loss in (fusebook.cross_entropy, lambda h, *rest: fusebook.linear_cross_entropy(h, head, *rest)):
        with pytest.raises(ValueError, match="needs no gradient"):
            loss(x.requires_grad_(), target, weight.requires_grad_())
    with pytest.raises(ValueError, match=r"head of shape \[C > 0, 20\].*got \[0, 20\]"):
        fusebook.linear_cross_entropy(x, head[:0], target)


@pytest.mark.skipif(DEVICE == "cuda", reason="on the CPU pages that nobody touches take no memory")
def test_rows_may_be_scaled_by_numbers_that_lie_2_to_the_30_apart(monkeypatch):
    monkeypatch.setattr(kernels, "FEW_CLASSES", 0)
    h, head, target, _ = losses.LINEAR_CROSS_ENTROPY.make(generator(3, DEVICE), torch.float16, M=3, K=19, N=21)
    own, g = (h.requires_grad_(), head.requires_grad_()), torch.empty_strided((3,), (2**30,))
    loss = fusebook.linear_cross_entropy(*own, target, reduction="none")
    near = g.copy_(torch.arange(1.0, 4.0)).contiguous()
    for got, want in zip(*(torch.autograd.grad(loss, own, k, retain_graph=True) for k in (g, near)), strict=True):
        torch.testing.assert_close(got, want)


def test_logits_are_kept_where_they_are_fewer_than_what_they_are_of():
    assert kernels._keeps(2214, 1024, 17, 2) and kernels._keeps(512, 1024, 32000, 2)
    assert not kernels._keeps(8192, 1024, 32000, 2) and not kernels._keeps(2**20, 2**13, 2**13, 2)
    for sizes, rows, kept in (
        (((2, 3, 19), 13), None, True),
        (((2, 3, 3), 13), None, False),
        (((6, 19), 13), 6, False),
    ):
        shape, classes = sizes
        h, head = (torch.ones(s, dtype=torch.float16, device=DEVICE) for s in (shape, (classes, shape[-1])))
        target = torch.zeros(shape[:-1], dtype=torch.int64, device=DEVICE)
        loss = fusebook.linear_cross_entropy(h.requires_grad_(), head, target, rows=rows)
        assert ("Once" in type(loss.grad_fn).__name__) == kept


@pytest.mark.parametrize(
    "given", [(torch.bfloat16, 37, 16, 100), (torch.float16, 3, 8, 8201), (torch.bfloat16, 200, 16, 13)], ids=str
)
def test_what_lies_between_rows_of_logits_reaches_no_result(given, monkeypatch):
    """Kernels and cuBLAS read whole vectors of memory that nobody has written."""
    dtype, M, K, N = given
    h, head, target, scale = losses.LINEAR_CROSS_ENTROPY.make(generator(0, DEVICE), dtype, M=M, K=K, N=N)
    shapes = []

    def poisoned(make, poison):
        def made(*args, **options):
            memory = make(*args, **options)
            shapes.append(memory.shape)
            return memory.fill_(poison) if memory.is_floating_point() else memory

        return made

    def found(poison):
        own = h.clone().requires_grad_(), head.clone().requires_grad_()
        with uncached(), monkeypatch.context() as patch:
            patch.setattr(torch, "empty", poisoned(torch.empty, poison))
            patch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty, poison))
            loss = scale * fusebook.linear_cross_entropy(*own, target)
            return loss.detach(), *torch.autograd.grad(loss, own)

    zeros = found(0.0)
    assert (M, N + 8 - N % 8) in shapes
    for poison in (math.nan, math.inf):
        assert all(map(torch.equal, found(poison), zeros))


def test_what_does_not_fit_a_head_is_refused():
    h, head, target = X, torch.zeros(7, 5, device=DEVICE), TARGET
    linear = fusebook.linear_cross_entropy
    with pytest.raises(ValueError, match=r"expected head of shape \[C > 0, "):
        linear(h, head.T, target)
    with pytest.raises(TypeError, match="head to be torch.float32"):
        linear(h, head.half(), target)
    with pytest.raises(ValueError, match="rows of 1 or more"):
        linear(h, head, target, rows=0)
    with pytest.raises(IndexError, match="from 0 to 6"):
        linear(h, head, target + 7, check=True)


def test_hidden_states_that_are_not_finite_or_count_for_nothing():
    """Their own loss and gradient are lost, and those of the head; other rows keep theirs."""
    rng = torch.Generator(DEVICE).manual_seed(2)
    h, head = (torch.randn(*s, generator=rng, device=DEVICE, dtype=torch.float64) for s in ((6, 8), (11, 8)))
    target = torch.arange(6, device=DEVICE)
    for number in (math.nan, math.inf, -math.inf):
        spoilt = h.index_put((torch.tensor(4, device=DEVICE), torch.tensor(3, device=DEVICE)), h.new_tensor(number))
        loss, dx = wanted(spoilt @ head.T, target, reduction="none")
        got = fusebook.linear_cross_entropy_with_gradients(spoilt, head, target, reduction="none", rows=4)
        assert got[0].isnan().tolist() == loss.isnan().tolist() == [False] * 4 + [True, False]
        assert torch.equal(got[1].isnan(), (dx @ head).isnan()) and torch.equal(got[2].isnan(), (dx.T @ spoilt).isnan())
        assert_close(got[1][:4], (dx @ head)[:4])
    nothing = fusebook.linear_cross_entropy_with_gradients(h, head, torch.full_like(target, -100))
    none = fusebook.linear_cross_entropy_with_gradients(h[:0], head, target[:0])
    for loss, dh, dhead in (nothing, none):
        assert loss.isnan() and not dh.any() and dhead.shape == head.shape and not dhead.any()


#: The dtype, the sizes, and what sends a call there: each implementation of the products.
PRODUCTS = {
    "as they are": (torch.float32, (7, 6, 11), {}),
    "in float64": (torch.float64, (7, 5, 300), {}),
    "of whole vectors": (torch.bfloat16, (7, 16, 24), {}),
    "copied": (torch.bfloat16, (7, 19, 21), {"PADDED": (0, -1)}),
    "raised": (torch.float16, (7, 16, 24), {"FEW_CLASSES": 0}),
    "raised and copied": (torch.float16, (7, 19, 21), {"FEW_CLASSES": 0, "PADDED": (0, -1)}),
    "with a longer head": (torch.bfloat16, (7, 16, 21), {"FILLED": (0, -1)}),
    "raised with a longer head": (torch.float16, (7, 16, 21), {"FEW_CLASSES": 0, "FILLED": (0, -1)}),
    "in two pieces": (torch.bfloat16, (7, 16, 21), {"APART": (1, 1)}),
    "raised in two pieces": (torch.float16, (7, 16, 21), {"APART": (1, 1), "FEW_CLASSES": 0}),
    "of few classes": (torch.bfloat16, (70, 19, 5), {}),
}
ROWS = pytest.mark.parametrize("rows", [None, 3], ids=["at once", "in chunks"])


def planned(case, monkeypatch):
    """Hidden states, a head and targets that an implementation is planned for."""
    dtype, (M, K, N), limits = case
    for name, limit in limits.items():
        monkeypatch.setattr(kernels, name, limit)
    return exact(M, K, N, dtype)


def by_product(options):
    """Each option with each implementation of the products; in the interpreter, one option with each."""
    return [
        pytest.param(case, value, id=f"{name}-{option}")
        for i, (name, case) in enumerate(PRODUCTS.items())
        for j, (option, value) in enumerate(options.items())
        if DEVICE == "cuda" or i % len(options) == j
    ]


@ROWS
@pytest.mark.parametrize(("case", "reduction"), by_product({name: name for name in ("mean", "sum", "none")}))
def test_ignored_rows_take_no_part_whatever_they_hold(case, reduction, rows, monkeypatch):
    h, head, target = planned(case, monkeypatch)
    target[[0, 4, 5]] = -100
    found = []
    for number in (0.0, math.nan, math.inf):
        h[0], h[4, 1], h[5] = number, number, torch.finfo(h.dtype).max if number else 0.0
        own = h.clone().requires_grad_(), head.clone().requires_grad_()
        with uncached():
            loss = fusebook.linear_cross_entropy(*own, target, reduction=reduction, rows=rows, label_smoothing=0.1)
            ways = [torch.autograd.grad(loss.sum(), own, retain_graph=True) for _ in range(2)]  # at once, and again
            apart = fusebook.linear_cross_entropy_with_gradients(h, head, target, reduction=reduction, rows=rows)
        found.append([loss.detach(), *ways[0], *ways[1], *apart])
        for i, both in enumerate(zip(found[-1], found[0], strict=True)):
            if i in (2, 4, 7):  # of the head: another kernel may have found it, and rounded otherwise
                torch.testing.assert_close(*both)
            else:
                assert torch.equal(*both), number
    assert not found[0][1][[0, 4, 5]].any() and found[0][2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(70, 72, 100), (7, 300, 5)], ids=str)
def test_hidden_states_are_not_copied_to_be_multiplied_at_once(size, dtype, monkeypatch):
    """Copies took longer than a matmul where classes are few. They kept NaN in ignored rows out of the gradients."""
    h, head, target = exact(*size, dtype)
    target[[0, 5]] = -100
    monkeypatch.setattr(kernels, "_copy_into", lambda *_: pytest.fail("copied"))
    left, reduce = [], kernels._reduce
    monkeypatch.setattr(
        kernels, "_reduce", lambda loss, sums, *rest: left.append(len(sums)) or reduce(loss, sums, *rest)
    )
    found = []
    for number in (0.0, math.nan):
        h[0, -1], h[5, 0] = number, -math.inf if number else 0.0
        with uncached():
            found.append(fusebook.linear_cross_entropy_with_gradients(h, head, target, check=False))
    for clean, got in zip(*found, strict=True):
        # The second time cuBLAS has another product to compute, and on a GPU it may add parts of a sum in bfloat16.
        split = 2 * torch.finfo(dtype).eps * clean.abs().max().item() if clean.is_cuda else 1e-5
        torch.testing.assert_close(got, clean, rtol=1.3e-6 if dtype == torch.float32 else 1.6e-2, atol=split)
    assert max(left) < len(h), "one program adds up the loss of each row"


@ROWS
@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_ignored_rows_have_no_gradient_beside_a_head_that_is_not_finite(case, rows, monkeypatch):
    h, head, target = planned(case, monkeypatch)
    target[[0, 4]], head[1] = -100, math.inf
    dh = fusebook.linear_cross_entropy_with_gradients(h, head, target, rows=rows)[1]
    assert not dh[[0, 4]].any() and dh[1].isnan().all()


@ROWS
@pytest.mark.parametrize(("case", "terms"), by_product(TERMS))
def test_a_head_may_have_a_bias(case, terms, rows, monkeypatch):
    h, head, target = planned(case, monkeypatch)
    target[1::5] = terms.get("ignore_index", -100)
    N, eps = len(head), torch.finfo(h.dtype).eps
    bias = (torch.arange(N, device=DEVICE) % 5 - 2).to(h.dtype) / 4
    bias[0] = -math.inf if terms.get("label_smoothing") is None else 2  # a class that is masked
    terms = terms | {"weight": torch.arange(1.0, 1 + N, device=DEVICE) if terms.get("weight") else None}
    target[target == 0] = 1
    loss, dx = wanted(h.double() @ head.double().T + bias.double(), target, **terms)
    own = [t.clone().requires_grad_() for t in (h, head, bias)]
    with uncached():
        got = fusebook.linear_cross_entropy(own[0], own[1], target, bias=own[2], rows=rows, **terms)
        g = 2.0 ** (4 + torch.arange(got.numel(), device=DEVICE) % 3).view(got.shape)
        found = [torch.autograd.grad(got, own, g, retain_graph=True) for _ in range(2)]
        apart = fusebook.linear_cross_entropy_with_gradients(h, head, target, bias=bias, rows=rows, **terms)
        alone = fusebook.linear_cross_entropy(h, head, target, bias=bias, rows=rows, **terms)
        bias_alone = fusebook.linear_cross_entropy(h, head, target, bias=own[2], rows=rows, **terms)
    for one in (got, apart[0], alone, bias_alone):
        assert_close(one.detach(), loss)
    assert all(map(torch.equal, *found))
    wide = dx * g.double().reshape(-1, 1)
    ones = torch.ones(len(h), 1, device=DEVICE, dtype=torch.float64)
    chunks = len(h) / (rows or len(h))
    (of_bias,) = torch.autograd.grad(bias_alone, own[2], g)
    for of_logits, (dh, dhead, dbias) in ((wide, found[0]), (dx, apart[1:]), (wide, (None, None, of_bias))):
        turned = of_logits.T
        for d, a, b in ((dh, of_logits, head.double()), (dhead, turned, h.double()), (dbias, turned, ones)):
            if d is not None:
                # Gradients of logits are rounded, and sums, once for each chunk; float16 has a least number.
                near = (64 if eps < 1e-5 else 2.1 + chunks) * eps * (a.abs() @ b.abs())
                near += (2 + chunks) * len(h) * torch.finfo(h.dtype).smallest_normal * eps
                assert ((d - (a @ b).view(d.shape)).abs() <= near.view(d.shape)).all()


def test_a_bias_has_a_gradient_under_transforms_and_compiled():
    h, head, target = exact(6, 5, 9, torch.float32)
    bias = torch.arange(9.0, device=DEVICE) / 8
    _, dx = wanted(h.double() @ head.double().T + bias.double(), target)
    linear = functools.partial(fusebook.linear_cross_entropy, h, head, target)
    assert_close(torch.func.grad(lambda bias: linear(bias=bias))(bias), dx.sum(0))
    many = torch.func.vmap(torch.func.grad(lambda bias: linear(bias=bias)))(torch.stack([bias, bias]))
    assert_close(many[1], dx.sum(0))
    torch.compiler.reset()
    own = bias.clone().requires_grad_()
    torch.compile(lambda bias: linear(bias=bias), fullgraph=True, backend="aot_eager")(own).backward()
    assert_close(own.grad, dx.sum(0))
    loss = linear(bias=own)
    with torch.no_grad():
        own.add_(1)
    loss.backward(retain_graph=True)  # its gradient was found before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_loss_of_a_head_compiles_whole_under_autocast():
    h, head, target = exact(6, 5, 9, torch.float32)
    own = head.clone().requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(fusebook.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss, want = compiled(h, own, target), fusebook.linear_cross_entropy(h, own, target)
    assert_close(loss, want)
    (got,), (expected,) = (torch.autograd.grad(one, own) for one in (loss, want))
    assert_close(got, expected)


@pytest.mark.parametrize("biased", [False, True])
def test_a_compiled_step_computes_the_logits_once(biased):
    h, head, target = exact(6, 5, 9, torch.float32)
    own = [h.clone().requires_grad_(), head.clone().requires_grad_()]
    bias = torch.arange(9.0, device=DEVICE).requires_grad_() if biased else None
    graphs = []

    def noted(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph)

    def step(h, head, bias):
        loss = fusebook.linear_cross_entropy(h.neg(), head, target, bias=bias, rows=4, z_loss=0.5)
        each = fusebook.linear_cross_entropy(h.neg(), head, target, bias=bias, reduction="none")
        return 2 * loss, each.detach()

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=noted, bw_compiler=noted)
    loss, _ = torch.compile(step, fullgraph=True, backend=backend)(*own, bias)
    leaves = own + [bias] * biased
    found = torch.autograd.grad(loss, leaves)
    forward, backward = ({t for t in graph if "fusebook" in str(t)} for graph in graphs)
    ops = torch.ops.fusebook
    assert forward == {ops.linear_cross_entropy_with_gradients.default, ops.linear_cross_entropy.default}
    assert not backward
    want = fusebook.linear_cross_entropy(own[0].neg(), own[1], target, bias=bias, rows=4, z_loss=0.5)
    for got, true in zip(found, torch.autograd.grad(2 * want, leaves), strict=True):
        assert_close(got, true.double())


def test_a_bias_that_does_not_fit_is_refused():
    linear, head = fusebook.linear_cross_entropy, torch.zeros(7, 5, device=DEVICE)
    with pytest.raises(ValueError, match=r"bias of shape \[7\], \[C\] where head is .*got \[5\]"):
        linear(X, head, TARGET, bias=X[0])
    with pytest.raises(TypeError, match="bias to be torch.float32"):
        linear(X, head, TARGET, bias=head[:, 0].half())
    with pytest.raises(TypeError, match="bias to be a torch.Tensor"):
        linear(X.clone().requires_grad_(), head, TARGET, bias=0.5)


@pytest.mark.skipif(DEVICE == "cpu", reason="without a GPU there is one device that holds numbers")
@pytest.mark.parametrize("which", range(3))
def test_tensors_of_two_devices_are_refused(which):
    given = [torch.zeros(3, 5, device=DEVICE), torch.zeros(7, 5, device=DEVICE), TARGET]
    given[which] = given[which].cpu()
    with pytest.raises(ValueError, match="move one|CUDA"):
        fusebook.linear_cross_entropy(*given)


def test_a_rival_that_cannot_be_imported_is_refused_and_not_wrong(monkeypatch, tmp_path):
    (tmp_path / "linear_cross_entropy.py").write_text("raise TypeError('epilogue fn depends on a ContextVar')")
    quack = types.ModuleType("quack")
    quack.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "quack", quack)
    monkeypatch.delitem(sys.modules, "quack.linear_cross_entropy", raising=False)
    h = torch.zeros(8, 5, device=DEVICE)
    with pytest.raises(NotImplementedError, match="quack cannot be imported beside this CuTe: epilogue fn depends"):
        OPS["linear_cross_entropy"].variants["quack"].run(h, h[:3], torch.zeros_like(h[:, 0]).long(), 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("N", [13, 4203])
def test_classes_beside_whole_vectors_are_multiplied_apart(N, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "APART", (1, 1))
    h, head, target, scale = losses.LINEAR_CROSS_ENTROPY.make(generator(3), dtype, M=7, K=16, N=N)
    own = h.requires_grad_(), head.requires_grad_()
    loss = scale * fusebook.linear_cross_entropy(*own, target % 4 + N - 4, rows=3)
    got = torch.autograd.grad(loss, own)
    h, head = h.detach(), head.detach()
    _, dx = wanted(h @ head.T, target % 4 + N - 4)
    for found, a, b in ((got[0], dx * scale, head.double()), (got[1], dx.T * scale, h.double())):
        assert ((found - a @ b).abs() <= 3 * torch.finfo(dtype).eps * (a.abs() @ b.abs()) + 2.0**-24).all()


def test_what_is_multiplied_apart_is_worth_it_and_reaches_every_class():
    assert kernels._pieces(8192, 768, 50257, 2, on_vectors=True) == (50264, (slice(0, 50256), slice(50256, 50257)))
    assert kernels._pieces(8, 768, 50257, 2, on_vectors=True)[1] == (slice(0, 50256), slice(50256, 50257))
    assert kernels._pieces(8, 64, 50257, 2, on_vectors=True) == (50264, (slice(0, 50257),))
    assert kernels._pieces(30000, 768, 50257, 2, on_vectors=True) == (50264, (slice(0, 50257),))
    assert kernels._pieces(8192, 770, 50257, 2, on_vectors=True) == (50264, (slice(0, 50257),))
    assert kernels._pieces(2**30, 8, 999, 2, on_vectors=True) == (1000, (slice(0, 999),))
    for given in ((99, 8, 50257, 2, False), (99, 8, 50257, 4, True), (99, 8, 50256, 2, True), (99, 8, 7, 2, True)):
        assert kernels._pieces(*given[:4], on_vectors=given[4]) == (given[2], (slice(0, given[2]),))


def test_a_chunk_is_as_many_rows_as_fit():
    rows_of = kernels._rows_of_chunk
    assert rows_of(100, 32000, 2) == 100 and rows_of(0, 5, 4) == 1 and rows_of(5, 2**40, 2) == 1
    for m in (8191, 8192, 8193, 100001):
        rows = rows_of(m, 128256, 2)
        assert rows % 128 == 0 and rows * 128256 * 2 <= kernels.CHUNK_BYTES
        assert rows * math.ceil(m / rows) - m < 128 * math.ceil(m / rows), "chunks are alike"


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("n", [1, 4096, 4097, 32768, 53249, 128256, 256000, 2**20])
@pytest.mark.parametrize("more", [0, 1, 16])
def test_every_element_of_a_row_belongs_to_one_program(n, size, more, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[size]
    x = torch.empty(7, n + more, dtype=dtype)[:, :n]
    for dx in (None, x, torch.empty(7, n, dtype=dtype)):
        config = kernels._launch_config(x, dx)
        if config is None:
            assert size == 8 and n > 4096
        elif not config.parts:
            assert config.programs * config.constants["ROWS"] >= 7
            assert config.constants["BLOCK"] * config.constants["CHUNKS"] >= n
        else:
            vec, block = config.constants["VEC"], config.constants["BLOCK"]
            span, reach = config.span * vec, n if (n + more) % vec == 0 else n + vec - 1
            assert config.programs == 7 * config.parts and span * config.parts >= reach
            assert block * config.constants["CHUNKS"] >= span
            last = n - (config.parts - 1) * span
            assert block * config.constants["INNER"] <= max(0, min(span, last)), "an inner chunk would need a mask"


def test_the_gradient_of_a_state_whose_class_is_certain_is_scored_beside_what_is_added_up(device):
    """There it is a difference of which float64 has few digits, in the reference, too; elsewhere it must be right."""
    op = OPS["linear_cross_entropy"]
    h, head, target, scale = op.make(generator(0, device), torch.float64, M=6, K=40, N=3)
    h[2] = 20 * head[target[2]]
    yard = check.yardstick(op, (h, head, target, scale))
    loss, dh, dhead = op.variants["fusebook"].run(h, head, target, scale)
    assert 0 < dh[2].abs().max() < 1e-3 * dh.abs().max()
    assert yard.judge((loss, dh, dhead)).ok
    for row in (0, 5):
        wrong = dh.clone()
        wrong[row] *= 1 + 1e-6
        assert not yard.judge((loss, wrong, dhead)).ok


COMPILED = """
import json
import fusebook, torch, triton
from fusebook.measure import compiled

triton.runtime.driver.set_active(compiled.AbsentGPU())
x, target = torch.empty(2, 50304, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
with compiled.kernels() as found:
    fusebook.cross_entropy_with_gradient(x, target, check=False)
print(json.dumps({kernel.metadata.name: kernel.asm["ttir"] for kernel in found}))
"""


@pytest.mark.slow
def test_a_wide_row_is_loaded_by_few_instructions(tmp_path):
    """The compiler takes a time that grows by the cube of operations. A part was unrolled three times."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    end = warm.run("-c", COMPILED, env=environment)
    assert end.returncode == 0, end.stderr[-2000:]
    source = json.loads(end.stdout.splitlines()[-1])["_cross_entropy_shared"]
    chunks = -(-50304 // 3 // kernels._CHUNK)
    assert source.count("tt.load") < 1.5 * chunks
    assert source.count("tt.split") < chunks / 2, "pairs are packed, not loaded"
