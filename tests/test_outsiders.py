"""What a call meets in torch that the library did not ask for: tangents, traces, batches of gradients, threads.

Each gives torch's answer, or a sentence.
"""

import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.autograd.forward_ad as forward
import torch.nn.functional as F

import fusebook
from fusebook.kernels._call import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AT = torch.tensor([0, 2, 1], device=DEVICE)


def drawn(*shape, seed=0):
    rng = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=rng, dtype=torch.float64, device=DEVICE)


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def scattered(updates):
    return torch.zeros(5, 4, dtype=updates.dtype, device=DEVICE).index_add(0, AT, updates)


#: Ours, the same in plain PyTorch, and arguments.
PAIRS = {
    "exp": (fusebook.exp, torch.exp, [drawn(3, 4)]),
    "multiply": (fusebook.multiply, torch.multiply, [drawn(3, 4), drawn(4, seed=1)]),
    "softmax": (fusebook.softmax, lambda x: torch.softmax(x, -1), [drawn(3, 4)]),
    "rms_norm": (fusebook.rms_norm, rms, [drawn(3, 4), drawn(4, seed=1)]),
    "add_layer_norm": (
        lambda x, y: fusebook.add_layer_norm(x, y)[0],
        lambda x, y: F.layer_norm(x + y, (4,)),
        [drawn(3, 4), drawn(3, 4, seed=1)],
    ),
    "cross_entropy": (lambda x: fusebook.cross_entropy(x, AT), lambda x: F.cross_entropy(x, AT), [drawn(3, 4)]),
    "a loss a row": (
        lambda x: fusebook.cross_entropy(x, AT, reduction="none"),
        lambda x: F.cross_entropy(x, AT, reduction="none"),
        [drawn(3, 4)],
    ),
    "linear_cross_entropy": (
        lambda h, head: fusebook.linear_cross_entropy(h, head, AT),
        lambda h, head: F.cross_entropy(h @ head.T, AT),
        [drawn(3, 5), drawn(4, 5, seed=1)],
    ),
    "concat_gemm": (
        lambda x, a, b: fusebook.concat_gemm(x, [a, b]),
        lambda x, a, b: torch.cat([x @ a, x @ b], -1),
        [drawn(3, 4), drawn(4, 2, seed=1), drawn(4, 3, seed=2)],
    ),
    "swiglu": (
        fusebook.swiglu,
        lambda x, gate, up: F.silu(x @ gate) * (x @ up),
        [drawn(3, 4), drawn(4, 2, seed=1), drawn(4, 2, seed=2)],
    ),
    "scatter_nd": (lambda u: fusebook.scatter_nd_of_shape((5, 4), AT[:, None], u), scattered, [drawn(3, 4)]),
    "embedding": (lambda u: fusebook.embedding_backward(u, AT, 5), scattered, [drawn(3, 4)]),
}
each_pair = pytest.mark.parametrize(("ours", "theirs", "given"), PAIRS.values(), ids=PAIRS)


def own(given):
    return [t.clone().requires_grad_() for t in given]


@each_pair
def test_a_tangent_is_not_dropped(ours, theirs, given):
    for _ in range(3):  # plans are known by then
        ours(*given)
    with forward.dual_level():
        plain = ours(*given)  # none of them has one
        torch.testing.assert_close(plain, theirs(*given))
        for i, t in enumerate(given):
            dual = forward.make_dual(t, torch.ones_like(t))
            with pytest.raises(NotImplementedError, match="in reverse mode, got forward mode"):
                ours(*given[:i], dual, *given[i + 1 :])
    torch.testing.assert_close(ours(*given), theirs(*given))


@each_pair
def test_a_gradient_that_negates_is_read_with_its_sign(ours, theirs, given):
    found = []
    for function in (ours, theirs):
        tensors = own(given)
        y = function(*tensors)
        g = torch.arange(1.0, y.numel() + 1, dtype=y.dtype, device=DEVICE).view(y.shape)
        found.append(torch.autograd.grad(y, tensors, torch._neg_view(g)))
    torch.testing.assert_close(*found)


@each_pair
def test_zeros_without_memory_are_zeros(ours, theirs, given):
    """Torch keeps such zeros as arguments and as gradients; their address is 0."""
    for _ in range(3):  # plans are known by then
        ours(*given)
    for i, t in enumerate(given):
        none = torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)
        others = [*given[:i], torch.zeros_like(t), *given[i + 1 :]]
        torch.testing.assert_close(ours(*given[:i], none, *given[i + 1 :]), theirs(*others))
    found = []
    for function in (ours, theirs):
        tensors = own(given)
        y = function(*tensors)
        none = torch._efficientzerotensor(y.shape, dtype=y.dtype, device=y.device)
        found.append(torch.autograd.grad(y, tensors, none if function is ours else torch.zeros_like(y)))
    torch.testing.assert_close(*found)


@each_pair
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_batch_of_gradients_is_each_of_them_or_refused(ours, theirs, given):
    tensors = own(given)
    y, right = ours(*tensors), theirs(*tensors)
    dys = drawn(3, *y.shape, seed=7)
    wanted = torch.autograd.grad(right, tensors, dys, is_grads_batched=True)
    if ours in (PAIRS["rms_norm"][0], PAIRS["add_layer_norm"][0]):
        with pytest.raises(NotImplementedError, match=r"expected a gradient at a time, .* use torch\.func\.vmap"):
            torch.autograd.grad(y, tensors, dys, is_grads_batched=True)
        found = torch.func.vmap(torch.func.vjp(ours, *given)[1])(dys)  # as it says
    else:
        found = torch.autograd.grad(y, tensors, dys, is_grads_batched=True)
    torch.testing.assert_close(found, wanted)


@each_pair
def test_a_gradient_may_be_asked_for_when_the_transform_has_ended(ours, theirs, given):
    y, found = torch.func.vjp(ours, *given)
    dy = drawn(*y.shape, seed=7)
    torch.testing.assert_close(found(dy), torch.func.vjp(theirs, *given)[1](dy))


@each_pair
def test_a_batch_of_nobody_has_the_shape_of_its_results(ours, theirs, given):
    places = (0, *[None] * (len(given) - 1))
    nobody, one = given[0].new_zeros(0, *given[0].shape), theirs(*given)
    found = torch.vmap(ours, places)(nobody, *given[1:])
    assert (found.shape, found.dtype) == ((0, *one.shape), one.dtype)
    assert torch.func.grad(lambda x: torch.vmap(ours, places)(x, *given[1:]).sum())(nobody).shape == nobody.shape


@each_pair
def test_torch_func_functionalizes_it(ours, theirs, given):
    torch.testing.assert_close(torch.func.functionalize(ours)(*given), theirs(*given))


@each_pair
@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace_takes_down_the_operator_and_not_what_it_found(ours, theirs, given):
    for _ in range(3):
        ours(*given)
    if ours is PAIRS["embedding"][0]:  # its size is a tensor there
        with pytest.raises(TypeError, match="expected each size in shape to be an integer, got Tensor; convert it"):
            torch.jit.trace(ours, tuple(given), check_trace=False)
        return
    traced = torch.jit.trace(ours, tuple(given), check_trace=False)
    others = [t + 1 for t in given]
    torch.testing.assert_close(traced(*others), theirs(*others))


def test_what_cannot_be_traced_says_so():
    x, lists = drawn(6, 3), [[drawn(4)] for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="kmeans: expected points whose values can be read, got one that torch"):
            torch.jit.trace(lambda x: fusebook.kmeans(x, 2).centres, x)
        with pytest.raises(NotImplementedError, match="adamw_step: expected a step that is made, got one that"):
            torch.jit.trace(lambda p: fusebook.adamw_step([p], *lists[1:], step=1), lists[0][0])
    with pytest.raises(ValueError, match="kmeans: expected points whose values can be read"):
        torch.vmap(lambda x: fusebook.kmeans(x, 2).centres)(x[None])
    with pytest.raises(ValueError, match="kmeans: .* got a tensor on meta"):
        fusebook.kmeans(x.to("meta"), 2)


@pytest.mark.skipif(not INTERPRETED, reason="test_cards has threads on a GPU")
def test_threads_take_turns_in_the_interpreter():
    """It puts itself in the place of Triton's language while a kernel runs."""

    def work(seed):
        x = drawn(16, 64, seed=seed)
        return [(fusebook.softmax(x), torch.softmax(x, -1)) for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(4)):
            for got, want in found:
                torch.testing.assert_close(got, want)


@pytest.mark.skipif(not INTERPRETED, reason="a forked process cannot use a GPU")
def test_a_process_forked_while_threads_launch_launches_too():
    x, ended = drawn(16, 64, seed=0), threading.Event()

    def work():
        while not ended.is_set():
            fusebook.softmax(x)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            if not (child := os.fork()):
                signal.alarm(20)
                fusebook.softmax(x)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ended.set()
        thread.join()
