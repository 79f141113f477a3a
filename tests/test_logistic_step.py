"""What is special to logistic regression: margins of any size, steps that diverge, targets, and data on the chip."""

import math
import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import fusebook
import warm
from fusebook.cards.logistic_step import LOGISTIC_FIT, LOGISTIC_STEP
from fusebook.kernels import logistic_step as module
from fusebook.kernels.logistic_step import logistic_fit, logistic_step, logistic_step_eager
from fusebook.measure import check
from fusebook.measure.inputs import generator, poison

ON_CHIP = [True, False]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def made(device, N=13, D=7, dtype=torch.float32, seed=0):
    return LOGISTIC_STEP.make(generator(seed, device), dtype, N=N, D=D)


def made_fit(device, N=13, D=7, steps=4, dtype=torch.float32, seed=0):
    return LOGISTIC_FIT.make(generator(seed, device), dtype, N=N, D=D, steps=steps)


def fit(X, y, w, b, lr, l2, steps, **options):
    return logistic_fit(X, y, w, b, lr, l2, steps=steps, **options)


def right(op, inputs, got):
    return check.yardstick(op, inputs).judge(got).ok


def alike(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# The meaning ----------------------------------------------------------------------------------------------------------


def test_a_step_goes_down_the_gradient_of_torch(device):
    X, y, w, b, lr, l2 = made(device, N=40, D=9, dtype=torch.float64)
    v, c = w.clone().requires_grad_(), b.clone().requires_grad_()
    loss = F.binary_cross_entropy_with_logits(X @ v + c, y) + l2 * (v * v).sum()
    loss.backward()
    got = logistic_step(X, y, w, b, lr, l2)
    for a, want in zip(got, (v - lr * v.grad, c - lr * c.grad, loss), strict=True):
        torch.testing.assert_close(a, want.detach(), rtol=1e-13, atol=1e-13)


def test_the_last_features_of_wide_rows_decide(device):
    X, y, w, *rest = made(device, N=3, D=16_500)
    X[:, :-100], w[-100:] = 0, 1
    assert right(LOGISTIC_STEP, (X, y, w, *rest), logistic_step(X, y, w, *rest))


def test_no_steps_give_a_copy(device):
    inputs = made(device)
    w, b, losses = fit(*inputs, 0)
    assert torch.equal(w, inputs[2]) and w.data_ptr() != inputs[2].data_ptr()
    assert torch.equal(b, inputs[3]) and b.data_ptr() != inputs[3].data_ptr()
    assert losses.shape == (0,) and losses.dtype == w.dtype


@pytest.mark.parametrize("on_chip", ON_CHIP)
def test_a_fit_is_a_loop_of_steps(on_chip, device):
    X, y, w, b, lr, l2, steps = inputs = made_fit(device, N=30, D=20, steps=6)
    assert right(LOGISTIC_FIT, inputs, fit(*inputs, on_chip=on_chip))
    losses = []
    for _ in range(steps):
        w, b, loss = logistic_step(X, y, w, b, lr, l2)
        losses.append(loss)
    assert right(LOGISTIC_FIT, inputs, (w, b, torch.stack(losses)))


@pytest.mark.parametrize("together", [1, 4])
def test_a_fit_of_several_launches_is_the_same_to_the_bit(together, device, monkeypatch):
    inputs = made_fit(device, N=40, steps=11)
    whole = fit(*inputs, on_chip=True)
    monkeypatch.setattr(module, "_TOGETHER", together)
    assert alike(fit(*inputs, on_chip=True), whole)


@pytest.mark.parametrize("across", [False, True])
def test_single_steps_are_taken_as_many_at_once_as_a_plan_holds(across, device, monkeypatch):
    X, *rest, _ = made_fit(device)
    X = X.T.contiguous().T if across else X
    whole = fit(X, *rest, 8, on_chip=False)
    taken, real = [], module._fit
    monkeypatch.setattr(module, "_PLANNED", 3)
    note = lambda X, *given: taken.append((X.is_contiguous(), *given[5:])) or real(X, *given)  # noqa: E731
    monkeypatch.setattr(module, "_fit", note)
    assert alike(fit(X, *rest, 8, on_chip=False), whole)
    assert taken == [(True, True, 3, False), (True, False, 3, False), (True, False, 2, False)]
    fit(X, *rest, 8, on_chip=True)
    assert taken[3:] == [(not across, True, 8, True)]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_bias_keeps_its_shape(shape, device):
    X, y, w, b, lr, l2 = made(device)
    b = b.reshape(shape)
    assert logistic_step(X, y, w, b, lr, l2)[1].shape == shape
    assert fit(X, y, w, b, lr, l2, 2)[1].shape == fit(X, y, w, b, lr, l2, 0)[1].shape == shape


def test_a_learning_rate_is_not_rounded_in_float64(device):
    X, y, w, b, _, _ = made(device, dtype=torch.float64)
    got, want = logistic_step(X, y, w, b, 0.1, 0.3), logistic_step_eager(X, y, w, b, 0.1, 0.3)
    for a, c in zip(got, want, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_data_has_sums_in_float32(dtype, device):
    """The limit for half types is wide; the data alone is rounded, so that of float32 must do."""
    X, y, w, b, lr, l2 = made(device, N=60, D=50, dtype=dtype)
    single = X.float(), y.float(), w, b, lr, l2
    assert right(LOGISTIC_STEP, single, logistic_step(X, y, w, b, lr, l2))
    X, y, *rest = made_fit(device, N=60, D=50, dtype=dtype)
    assert right(LOGISTIC_FIT, (X.float(), y.float(), *rest), fit(X, y, *rest))


# Margins --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_is_right_at_any_margin(dtype, device):
    """Each margin by itself, so that no other row hides it, and relative to a loss that may be as small as 1e-30."""
    for margin in (0.0, 1e-6, 0.3, 3.0, 17.0, 40.0, 70.0, 95.0, 200.0, 3e5):
        for sign in (-1, 1):
            for target in (0.0, 1.0):
                X = torch.full((1, 1), sign * margin, dtype=dtype, device=device)
                y = torch.full((1,), target, dtype=dtype, device=device)
                one = torch.ones(1, dtype=dtype, device=device)
                _, b, loss = logistic_step(X, y, one, one[0] * 0, 1.0, 0.0)
                z = sign * X[0, 0].double().abs() * (-1 if target else 1)
                want = z.clamp(min=0) + z.abs().neg().exp().log1p()
                # A GPU's exponential is right to some eps of its argument.
                rtol = max(1e-6, margin * torch.finfo(torch.float32).eps)
                torch.testing.assert_close(loss.double(), want, rtol=rtol, atol=1e-37)
                slope = torch.sigmoid(z) * (-1 if target else 1)  # sigmoid(z) - 1 is -sigmoid(-z)
                torch.testing.assert_close(b.double(), -slope, rtol=rtol, atol=1e-37)


def test_the_naive_loss_is_caught(device):
    def naive(X, y, w, b, lr, l2):
        p = torch.sigmoid(X @ w + b)
        loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean() + l2 * (w * w).sum()
        return (*logistic_step(X, y, w, b, lr, l2)[:2], loss)

    inputs = made(device, N=300, D=20)
    assert right(LOGISTIC_STEP, inputs, logistic_step(*inputs))
    assert not right(LOGISTIC_STEP, inputs, naive(*inputs))


def test_usual_mistakes_are_caught(device):
    X, y, w, b, lr, l2 = inputs = made(device, N=300, D=20)
    new, c, loss = logistic_step(*inputs)
    after = logistic_step(X, y, new, c, lr, l2)[2]
    wrong = {
        "no step": (w, b, loss),
        "the loss after the step": (new, c, after),
        "no l2 in the loss": (new, c, logistic_step(X, y, w, b, lr, 0.0)[2]),
        "no l2 in the step": (*logistic_step(X, y, w, b, lr, 0.0)[:2], loss),
        "half of the l2": (*logistic_step(X, y, w, b, lr, l2 / 2)[:2], loss),
        "the sum, not the mean": (*logistic_step(X, y, w, b, lr * 300, l2 / 300)[:2], loss),
        "a row left out": logistic_step(X[1:], y[1:], w, b, lr, l2),
    }
    assert right(LOGISTIC_STEP, inputs, (new, c, loss))
    for name, got in wrong.items():
        assert not right(LOGISTIC_STEP, inputs, got), name


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_chip", ON_CHIP)
@pytest.mark.parametrize("lr", [1e30, 1e38, -1e38])
def test_a_step_that_diverges_is_as_torch_is(on_chip, lr, device):
    # One feature, so that torch and we add up the same numbers, whatever the order.
    X = torch.tensor([[1.0], [2.0], [3.0]], device=device)
    y, w, b = torch.tensor([0.0, 1.0, 0.0], device=device), torch.ones(1, device=device), torch.zeros((), device=device)
    got = fit(X, y, w, b, lr, 0.5, 5, on_chip=on_chip)
    losses = []
    for _ in range(5):
        w, b, loss = logistic_step_eager(X, y, w, b, lr, 0.5)
        losses.append(loss)
    want = w, b, torch.stack(losses)
    assert any(not v.isfinite().all() for v in want)
    for a, c in zip(got, want, strict=True):
        torch.testing.assert_close(a, c, equal_nan=True, rtol=1e-5, atol=0)


def test_targets_other_than_0_and_1_are_named(device):
    X, y, *rest = made(device)
    for bad in (0.5, -1.0, 2.0, math.nan):
        y[9] = bad
        for call in (logistic_step, lambda *a, **k: fit(*a, 2, **k)):
            with pytest.raises(ValueError, match=rf"got {bad:g} at y\[9\]") as raised:
                call(X, y, *rest)
            assert "\n" not in str(raised.value)
    y[9] = 0.5  # unchecked, a target is a probability
    assert right(LOGISTIC_STEP, (X, y, *rest), logistic_step(X, y, *rest, check=False))
    assert right(LOGISTIC_FIT, (X, y, *rest, 2), fit(X, y, *rest, 2, check=False))


REFUSED = {
    "X of one axis": (ValueError, r"shape \[N > 0, D\]", dict(X=torch.ones(4))),
    "no rows": (ValueError, r"X of shape \[N > 0, D\], got \[0, 3\]", dict(X=torch.ones(0, 3), y=torch.ones(0))),
    "y of bools": (TypeError, "bool", dict(y=torch.ones(4, dtype=torch.bool))),
    "y of another dtype": (TypeError, "torch.float32 as X is", dict(y=torch.ones(4, dtype=torch.float64))),
    "y is a column": (ValueError, r"y of shape \[4\]", dict(y=torch.ones(4, 1))),
    "y too short": (ValueError, r"y of shape \[4\]", dict(y=torch.ones(3))),
    "w of half precision": (TypeError, "w to be float32, got", dict(w=torch.ones(3, dtype=torch.float16))),
    "w of float64": (TypeError, "w to be float32, got", dict(w=torch.ones(3, dtype=torch.float64))),
    "w is a column": (ValueError, r"w of shape \[3\]", dict(w=torch.ones(3, 1))),
    "b for each feature": (ValueError, "b to be a single number", dict(b=torch.ones(3))),
    "lr is infinite": (ValueError, "lr to be finite, got inf", dict(lr=math.inf)),
    "lr is a tensor": (TypeError, "lr to be a number", dict(lr=torch.tensor(0.1))),
    "steps below zero": (ValueError, "steps from 0", dict(steps=-1)),
    "float64 on the chip": (
        NotImplementedError,
        "fit on the chip",
        dict(
            X=torch.ones(4, 3, dtype=torch.float64),
            y=torch.ones(4, dtype=torch.float64),
            w=torch.ones(3, dtype=torch.float64),
            b=torch.zeros((), dtype=torch.float64),
            on_chip=True,
        ),
    ),
}


@pytest.mark.parametrize(("error", "message", "changed"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_in_one_sentence(error, message, changed, device):
    given = {"X": torch.ones(4, 3), "y": torch.ones(4), "w": torch.ones(3), "b": torch.zeros(()), "lr": 0.1, "l2": 0.0}
    given |= changed
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            given[name] = value.to(device)
    only_fit = {"steps", "on_chip"} & set(given)
    for call in (logistic_fit,) if only_fit else (logistic_step, logistic_fit):
        options = {"steps": 2} if call is logistic_fit else {}
        with pytest.raises(error, match=message) as raised:
            call(**(options | given))
        assert "\n" not in str(raised.value)


def test_what_does_not_fit_on_the_chip_is_refused_or_taken_in_steps(device, monkeypatch):
    inputs = made_fit(device)
    monkeypatch.setattr(module, "_fit_plan", lambda *sizes: None)
    with pytest.raises(NotImplementedError, match="leave on_chip to be chosen"):
        fit(*inputs, on_chip=True)
    assert right(LOGISTIC_FIT, inputs, fit(*inputs))


# Plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [1, 100, 400, 1000, 4000, 5000, 10**6])
@pytest.mark.parametrize("D", [0, 1, 64, 784, 4096, 30000])
def test_a_plan_covers_the_data_and_fits_the_chip(N, D):
    step = module._logistic_step_plan(N, D, 4, (9, 0), 132)
    assert step.block >= D or not step.kept
    assert step.rows * step.block <= 2**15
    plan = module._logistic_fit_plan(N, D, 4, (9, 0), 132)
    if plan is not None:
        assert plan.programs <= 132, "they wait for each other, so all must have a place"
        assert plan.rows * plan.programs >= N and plan.block >= D and plan.slice * plan.programs >= D
        assert plan.rows * plan.block * 4 <= 2**17
        assert min(plan.words, plan.parts * plan.slice, plan.block) >= 32 * plan.warps, "a word for each thread"
        assert min(plan.words, plan.parts) >= plan.programs and plan.parts * plan.slice <= 2**14
    assert plan is not None or N * max(D, 256) > 10**6 or D > 10**4


def test_rows_too_wide_to_be_kept_are_shared_out(device):
    """Among programs of the same columns, until there are some for all multiprocessors."""
    for N, D in ((6000, 18000), (700, 30000), (40, 20000)):
        plan = module._logistic_step_plan(N, D, 4, (9, 0), 132)
        assert not plan.kept and plan.programs == N
        assert plan.parts * D // plan.update > 132 and plan.parts <= max(1, N // 16)
    inputs = made(device, N=100, D=600 if device == "cpu" else 16500)
    X = inputs[0]
    plan = module._step_plan(*X.shape, 4, *module.gpu(X.device), 4, False)
    assert plan.parts > 1 and not plan.kept
    assert right(LOGISTIC_STEP, inputs, logistic_step(*inputs))


@pytest.mark.parametrize(("N", "D"), [(37034, 73), (33258, 129), (300_000, 33)])
def test_a_tile_of_rows_that_begin_anywhere_is_one_warp_s(N, D, device):
    """Of more warps each would compute the loss of every row; and rows are added up as they are by any other plan."""
    one, several = (module._logistic_step_plan(N, D, 4, (9, 0), 132, align) for align in (1, 8))
    assert (one.warps, several.warps) == (1, 4) and one.rows * one.block <= 2048
    X, y, w, b, lr, l2 = made(device, N=2 * one.rows + 1, D=D)
    plan = one._replace(programs=2)
    outs = module._step_outputs(X, y, w, b)
    module._launch_step(X, y, w, b, lr, l2, outs, module._workspace(X, plan), plan)
    assert right(LOGISTIC_STEP, (X, y, w, b, lr, l2), outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("N", "D"), [(1, 1), (5, 40), (30, 7), (200, 1)])
def test_a_small_step_is_one_launch(N, D, dtype, device, monkeypatch):
    launched, real = [], module.launch
    monkeypatch.setattr(
        module, "launch", lambda kernel, *given, **k: launched.append(kernel) or real(kernel, *given, **k)
    )
    inputs = LOGISTIC_STEP.make(generator(3, device), dtype, N=N, D=D)
    poison([inputs[2], inputs[2][:1]])
    assert right(LOGISTIC_STEP, inputs, logistic_step(*inputs))
    assert launched == [module._logistic_step_alone]
    assert not module._logistic_step_plan(20_000, D, 4, (9, 0), 132).alone
    assert not module._logistic_step_plan(72, 109, 4, (9, 0), 132).alone, "a second tile takes as long as a launch"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_number_of_a_small_step_is_held_by_two_warps(size):
    """Or both would write it to shared memory: racecheck found that of 13 rows of 7 numbers."""
    plans = [module._logistic_step_plan(N, D, size, (9, 0), 132) for N in range(1, 40) for D in range(1, 70)]
    assert all(plan.warps == 1 or 32 * plan.warps <= plan.rows * plan.block for plan in plans)
    assert {plan.warps for plan in plans} == {1, 2, 4, 8}


@pytest.mark.parametrize(("N", "D"), [(6, 5), (70, 33), (300, 100)])
def test_rows_across_memory_are_not_copied(N, D, device, monkeypatch):
    X, y, w, b, lr, l2 = made(device, N=N, D=D)
    X = X.T.contiguous().T
    given, real = [], module._launch_step
    monkeypatch.setattr(module, "_launch_step", lambda X, *rest: given.append(X) or real(X, *rest))
    assert right(LOGISTIC_STEP, (X, y, w, b, lr, l2), logistic_step(X, y, w, b, lr, l2))
    assert given[0].data_ptr() == X.data_ptr()


def test_rows_across_memory_are_copied_where_few_neighbours_are_read_at_once(device):
    def taken(N, D):
        return module._taken_across(torch.empty(D, N, device="meta").T)

    assert taken(10**6, 2000 if device == "cuda" else 200) and not taken(10**6, 20_000)
    assert not module._taken_across(torch.empty(4, 6, device="meta")[:, ::2])


#: Compiles what fits of several numbers of steps launch, for a GPU that need not be there.
COMPILE = """
import torch, triton
import fusebook
from fusebook.measure.compiled import AbsentGPU
launched = []
triton.runtime.driver.set_active(AbsentGPU(launched=launched.append))
from test_logistic_step import fit, made_fit
*inputs, _ = made_fit("cpu", N=40, D=16)
for steps in (3, 1, 16, 50):
    fit(*inputs, steps, on_chip=True, check=False)
print(len(launched))
"""


def test_another_number_of_steps_compiles_nothing(tmp_path):
    """Triton compiles anew for an integer that is 1 or that 16 divides, unless it is told not to."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "src")])
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    end = warm.run("-c", COMPILE, env=os.environ | settings)
    assert end.stdout == "8\n", end.stderr[-2000:]  # rows and losses, four times
    assert len(list(tmp_path.glob("*/*.cubin"))) == 2


# Runs -----------------------------------------------------------------------------------------------------------------


LARGE = [(4000, 784), (400, 4096), (130, 1000), (2100, 500), (1, 5000), (8000, 3)]
SMALL = [(400, 64), (400, 1), (13, 7), (2, 1000), (129, 3), (520, 100), (400, 0)]


@needs_cuda
@pytest.mark.parametrize("sizes", LARGE + SMALL)
def test_fits_of_any_size_on_the_chip_are_right_in_every_run(sizes):
    inputs = made_fit("cuda", *sizes, steps=60)
    first = fit(*inputs, on_chip=True)
    assert right(LOGISTIC_FIT, inputs, first)
    for run in range(50):
        assert alike(fit(*inputs, on_chip=True), first), f"run {run}"


@needs_cuda
def test_two_fits_at_once_do_not_wait_for_each_other():
    pairs = [made_fit("cuda", 400, 784, steps=300, seed=seed) for seed in (0, 1)]
    want = [fit(*inputs, on_chip=True) for inputs in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    got = []
    for _ in range(10):
        for stream, inputs in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                got.append(fit(*inputs, on_chip=True, check=False))
    torch.cuda.synchronize()
    assert all(alike(outputs, want[i % 2]) for i, outputs in enumerate(got))


@needs_cuda
def test_beyond_two_to_the_31_elements(room):
    room(40 * 2**30)
    # The gradient of rows beyond 2**31 elements, and of features beyond them, against that of the same rows by itself.
    for N, D in ((2**21 + 3, 1030), (5, 2**29 + 1)):
        X = torch.zeros(N, D, device="cuda", dtype=torch.float16)
        X[-1] = 1 / 64
        y, w = torch.zeros(N, device="cuda", dtype=torch.float16), torch.full((D,), 1e-9, device="cuda")
        new, _, loss = logistic_step(X, y, w, torch.zeros((), device="cuda"), float(N), 0.0)
        want = 1e-9 - torch.sigmoid(torch.tensor(D * 1e-9 / 64)).item() / 64
        assert (new - want).abs().max() < 1e-3 * abs(want)
        assert abs(loss.item() - math.log(2)) < 1e-2
        del X, new


# Transformations ------------------------------------------------------------------------------------------------------


def test_under_compile_the_check_is_left_out(device):
    X, y, w, b, lr, l2 = made(device)
    y[3] = 0.25
    torch.compiler.reset()
    compiled = torch.compile(lambda *a: logistic_step(*a)[0] * 2, fullgraph=True, backend="aot_eager")
    want = logistic_step(X, y, w, b, lr, l2, check=False)[0] * 2
    torch.testing.assert_close(compiled(X, y, w, b, lr, l2), want)


def test_the_card_draws_states_that_a_step_changes(device):
    X, y, w, b, lr, l2 = made(device, N=400, D=100)
    new, c, _ = logistic_step(X, y, w, b, lr, l2)
    assert (new - w).square().mean() > 0.1 * w.square().mean() and (c - b).abs() > 0.01
    assert (X @ w + b).abs().max() > 88, "margins whose exponential overflows"
    X, y, w, b, lr, l2, steps = made_fit(device, N=40, D=100, steps=30)
    losses = fit(X, y, w, b, lr, l2, steps)[2]
    assert losses[-1] < 0.5 * losses[0] and (losses.diff() < 0).all()
    assert fusebook.logistic_fit is logistic_fit and fusebook.logistic_step is logistic_step
