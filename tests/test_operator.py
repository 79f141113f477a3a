"""An operator's plans: what a second call does is what a first one would do.

Plans exist only where Triton compiles. Without a GPU these tests run in a process of their own, on a driver that
compiles for a GPU that is not there and takes down what would be launched: which kernel, on which stream, with which
addresses and numbers.
"""

import contextlib
import os
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

import fusebook
import warm
from fusebook.compiled import AbsentGPU
from fusebook.kernels import _operator, _tape
from fusebook.kernels._operator import INTERPRETED, OPERATORS, plans_aside

ABSENT = "_FUSEBOOK_TEST_ABSENT"  # set in the process that the first test starts
absent = pytest.mark.skipif(ABSENT not in os.environ, reason="runs on a driver without a GPU, in a process of its own")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.skipif(not INTERPRETED, reason="runs the tests below where kernels are interpreted")
def test_plans_without_a_gpu():
    env = {**os.environ, "TRITON_INTERPRET": "0", ABSENT: "1"}
    chosen = ["-q", "-p", "no:cacheprovider", __file__, "-k", "not (without_a_gpu or torch_func or batch)"]
    done = warm.run("-m", "pytest", *chosen, env=env, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


class Recorder(AbsentGPU):
    """Takes down every launch: which compiled kernel, on which stream, with which arguments."""

    def __init__(self):
        super().__init__((9, 0))
        self.seen = []

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.seen.append((metadata.hash, arguments[3], arguments[9:]))


@pytest.fixture
def driver(monkeypatch):
    """CPU tensors stand for tensors of a GPU whose current stream is `driver.stream`."""
    made = Recorder()
    made.stream = 0
    triton.runtime.driver.set_active(made)
    monkeypatch.setattr(_operator, "_current", lambda: -1)
    monkeypatch.setattr(_tape, "_stream", lambda index: made.stream)
    monkeypatch.setattr(_tape, "fresh_memory", lambda n, s, dtype: torch.empty_strided(n, s, dtype=dtype))
    for operator in OPERATORS.values():
        for plans in (operator.plans, operator.checked, operator.written):
            plans.clear()
    return made


def addresses(arguments):
    """A kernel's arguments, with the addresses of tensors: Triton takes both."""

    def plain(a):
        if isinstance(a, TensorDescriptor):
            return a.base.data_ptr(), *a.shape, *map(int, a.strides)
        return tuple(map(plain, a)) if isinstance(a, tuple) else a.data_ptr() if isinstance(a, torch.Tensor) else a

    return [plain(a) for a in arguments]


@absent
def test_a_second_call_launches_the_same_kernel_with_other_addresses(driver):
    x, z = torch.randn(8, 100), torch.randn(8, 100)
    y = fusebook.softmax(x)
    w = fusebook.softmax(z)
    first, second = (addresses(arguments) for _, _, arguments in driver.seen)
    assert first[:2] == [y.data_ptr(), x.data_ptr()] and second[:2] == [w.data_ptr(), z.data_ptr()]
    assert first[2:] == second[2:] and driver.seen[0][0] == driver.seen[1][0]
    assert len(OPERATORS["softmax"].plans) == 1


@absent
def test_whatever_a_plan_depends_on_has_a_plan_of_its_own(driver):
    memory = torch.randn(64 * 100 + 1)
    x = memory[:6400].view(64, 100)
    others = {
        "shape": (x[:32], -1),
        "strides": (x.t().contiguous().t(), -1),
        "dtype": (x.half(), -1),
        "address": (memory[1:].view(64, 100), -1),
        "dim": (x, 0),
    }
    fusebook.softmax(x)
    for name, args in others.items():
        before = len(OPERATORS["softmax"].plans)
        fusebook.softmax(*args)
        with plans_aside():
            fusebook.softmax(*args)
        assert len(OPERATORS["softmax"].plans) == before + 1, name
        fusebook.softmax(*args)
        planned, launched = addresses(driver.seen[-1][2]), addresses(driver.seen[-2][2])
        assert planned[1:] == launched[1:], name  # but for the memory of the result


@absent
def test_zeros_without_memory_launch_on_no_plan_of_zeros_that_have_some(driver):
    fusebook.softmax(torch.zeros(8, 100))
    fusebook.softmax(torch._efficientzerotensor((8, 100)))
    assert len(driver.seen) == 2
    assert all(address != 0 for _, _, arguments in driver.seen for address in addresses(arguments)[:2])


@absent
def test_the_current_stream_is_asked_for_in_every_call(driver):
    x = torch.randn(8, 100)
    for stream in (0, 7, 0):
        driver.stream = stream
        fusebook.softmax(x)
        assert driver.seen[-1][1] == stream


@absent
def test_true_is_no_axis_even_where_there_is_a_plan_for_1(driver):
    x = torch.randn(8, 100)
    fusebook.softmax(x, 1)
    with pytest.raises(TypeError, match="dim to be an integer, got bool"):
        fusebook.softmax(x, True)


@absent
def test_a_view_that_negates_is_refused_where_there_is_a_plan_for_its_like(driver):
    x = torch.randn(8, 100, dtype=torch.complex64)
    fusebook.softmax(x.imag)
    with pytest.raises(ValueError, match="negates"):
        fusebook.softmax(x.conj().imag)


@absent
def test_a_tensor_given_twice_is_two_arguments(driver):
    x, y = torch.randn(8, 100), torch.randn(8, 100)
    fusebook.multiply(x, x)
    fusebook.multiply(x, y)
    assert driver.seen[-1][2][1] == (x.data_ptr(), y.data_ptr())  # by a plan, which knows addresses alone


@absent
def test_two_views_of_one_memory_are_not_taken_for_each_other(driver):
    buffer = torch.randn(160, 1)
    for _ in range(2):
        fusebook.multiply(buffer[:80].expand(80, 70), buffer[80:])
    assert addresses(driver.seen[-1][2])[1] == (buffer.data_ptr(), buffer[80:].data_ptr())
    # As they lay to each other, others need not.
    one, two = torch.randn(80, 1), torch.randn(80, 1)
    for a, b in ((one, two), (buffer[80:], buffer[:80])):
        fusebook.multiply(a.expand(80, 70), b)
        assert addresses(driver.seen[-1][2])[1] == (a.data_ptr(), b.data_ptr())


@absent
def test_weights_that_change_places_have_plans_of_their_own(driver):
    x, both = torch.randn(70, 64), torch.randn(4, 64, 48)
    for order in ((0, 1), (1, 0), (2, 3)):
        fusebook.swiglu(x, *(both[i] for i in order))
    assert len(OPERATORS["swiglu"].plans) == 2
    for order in ((0, 1, 2), (0, 2, 3), (1, 2, 3)):
        fusebook.concat_gemm(x, [both[i] for i in order])
    assert len(OPERATORS["concat_gemm"].plans) == 2


@absent
def test_distances_between_weights_are_those_of_each_call(driver):
    x, both = torch.randn(300, 256).bfloat16(), torch.randn(4, 512, 256).bfloat16().mT  # which lie as columns
    out, write = torch.empty(300, 512, dtype=x.dtype), OPERATORS["swiglu"].write
    for other in (1, 1, 1, 2, 3, 2):  # all else lies where it lay
        write(out, x, both[0], both[other], None, None, "fused")
        planned = addresses(driver.seen[-1][2])
        with plans_aside():
            write(out, x, both[0], both[other], None, None, "fused")
        assert planned == addresses(driver.seen[-1][2]), other
        assert any(isinstance(a, tuple) and other * 512 * 256 in a for a in planned), "one descriptor of both"
    assert len(OPERATORS["swiglu"].written) == 1


@absent
def test_a_plan_is_made_of_what_a_plan_can_do_again(driver, monkeypatch):
    x = torch.randn(8, 100)

    def planned(call):
        return _operator.record([x], call)[1] is not None

    monkeypatch.setattr(_tape, "_LONGEST", 2)
    softmax = OPERATORS["softmax"]._computed
    assert planned(lambda: [softmax(x, -1) for _ in range(2)])
    assert not planned(lambda: [softmax(x, -1) for _ in range(3)]), "a long one"
    assert planned(lambda: _operator.apply(torch.neg, x[1:]))
    assert not planned(lambda: _operator.apply(torch.neg, x.view(torch.int32))), "of other numbers in the same memory"
    assert not planned(lambda: torch.zeros(3)), "unheard"


@absent
def test_a_plan_returns_what_the_first_call_did(driver):
    x, dy = torch.randn(8, 100), torch.randn(8, 100)
    gradient = x, dy, None, None, None, False, 1e-6
    for op, args in ((OPERATORS["norm_backward"], gradient), (fusebook.add_sub, (x, dy))):
        assert len({(type(found), len(found)) for found in (op(*args) for _ in range(3))}) == 1


def test_addresses_of_which_descriptors_are_kept_are_few(monkeypatch):
    launcher = _tape._Launcher(types.SimpleNamespace(launch=len), (1, 1, 1), ())
    monkeypatch.setattr(launcher, "passed", lambda stream, arguments: (1, 1, 1, stream, *arguments), raising=False)
    for address in range(3 * launcher.MOST):
        assert launcher.encoded((address,), (address,)) == launcher.kept[(address,)] == (address,)
        assert len(launcher.kept) <= launcher.MOST


@pytest.mark.parametrize(("capability", "early"), [(None, False), ((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_kernels_start_early_where_the_gpu_can(monkeypatch, capability, early):
    monkeypatch.setattr(_operator, "gpu", lambda device: (capability, 108))
    assert _operator.overlapping("cuda") == ({"launch_pdl": True} if early else {})


@pytest.mark.skipif(ABSENT in os.environ, reason="no kernel runs there")
def test_memory_that_is_given_is_written_where_values_are_fine(device):
    out, indices, updates = torch.ones(5, 4, device=device), torch.tensor([[5]], device=device), torch.ones(1, 4)
    given = out.shape, indices, updates.to(device), None, "add"
    with pytest.raises(IndexError, match=r"indices\[0, 0\]"):
        OPERATORS["scatter_nd"].write(out, "scatter", *given, True, None)
    OPERATORS["scatter_nd"].write(out, "scatter", *given, False, None)
    assert not out.any()


@absent
def test_modes_are_asked_for_in_every_call(driver):
    index, dy = torch.randint(0, 50, (40,)), torch.randn(40, 16)
    kernels = []
    for deterministic in (False, True, False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            driver.seen.clear()
            fusebook.embedding_backward(dy, index, 50, check=False)
        finally:
            torch.use_deterministic_algorithms(False)
        kernels.append([kernel for kernel, *_ in driver.seen])
    assert kernels[0] == kernels[2] != kernels[1] == kernels[3]


@absent
def test_values_are_read_in_every_call(driver):
    for before in (1, 2):  # calls: one more has a plan, and the next is known again
        index, dy = torch.randint(0, 50, (40 + before,)), torch.randn(40 + before, 16)
        for _ in range(before):
            fusebook.embedding_backward(dy, index, 50)
        index[3] = 50
        with pytest.raises(IndexError, match=r"indices\[3, 0\]"):
            fusebook.embedding_backward(dy, index, 50)


@absent
def test_the_last_call_is_known_again_and_no_other_is_taken_for_it(driver):
    """Each of these comes behind two calls of `x`: it differs from them in one thing, or is refused."""
    memory = torch.randn(64 * 100 + 1)
    x = memory[:6400].view(64, 100)
    leaf = x.clone().requires_grad_()
    others = {
        "address": (x.clone(), -1),
        "shape": (x[:32], -1),
        "strides": (x.t().contiguous().t(), -1),
        "dtype": (x.half(), -1),
        "alignment": (memory[1:].view(64, 100), -1),
        "dim": (x, 0),
        "gradient": (leaf, -1),
        "parameter": (torch.nn.Parameter(x), -1),
        "equal dim": (x, 1),
    }
    for name, args in others.items():
        for _ in range(3):
            fusebook.softmax(x)
        assert OPERATORS["softmax"].plans.again(x, -1) is not _operator._OTHER
        y = fusebook.softmax(*args)
        kernel, _, planned = driver.seen[-1]
        planned = addresses(planned)
        with plans_aside():
            fusebook.softmax(*args)
        assert kernel == driver.seen[-1][0], name
        assert planned[0] == y.data_ptr() and planned[1:] == addresses(driver.seen[-1][2])[1:], name
        assert y.requires_grad == args[0].requires_grad, name
    for rows in (leaf, leaf[:8].detach().requires_grad_()):  # one was called before
        with torch.no_grad():
            for _ in range(3):
                assert not fusebook.softmax(rows).requires_grad
        for _ in range(3):
            assert fusebook.softmax(rows).requires_grad
        with torch.no_grad():
            assert not fusebook.softmax(rows).requires_grad
    weights = [torch.randn(100, 16), torch.randn(100, 16)]
    for _ in range(3):
        assert fusebook.concat_gemm(x, weights[:1]).shape == (64, 16)
    assert fusebook.concat_gemm(x, weights).shape == (64, 32)
    for _ in range(3):
        fusebook.softmax(x, 1)
    again = OPERATORS["softmax"].plans.again
    here = again.__globals__["current"]
    again.__globals__["current"] = lambda: "another device"
    assert again(x, 1) is _operator._OTHER
    again.__globals__["current"] = here
    with pytest.raises(TypeError, match="dim to be an integer, got bool"):
        fusebook.softmax(x, True)
    z = torch.randn(8, 100, dtype=torch.complex64)
    for _ in range(3):
        fusebook.softmax(z.imag)
    with pytest.raises(ValueError, match="negates"):
        fusebook.softmax(z.conj().imag)
    with pytest.raises(TypeError):
        fusebook.softmax([[1.0]])


@absent
def test_calls_by_turns_are_known_again_where_their_shapes_differ(driver, monkeypatch):
    x, y = torch.randn(8, 100), torch.randn(4, 100)
    into = torch.empty_like(x), torch.empty_like(y)
    softmax, exp = OPERATORS["softmax"], OPERATORS["exp"]

    def by_turns():
        for t, out in zip((x, y), into, strict=True):
            fusebook.softmax(t)
            softmax.write(out, t, -1)
            exp._compiled(t)

    for _ in range(3):
        by_turns()
    wanted = [(kernel, arguments[1:]) for kernel, _, arguments in driver.seen[-6:]]  # but for the fresh results
    with monkeypatch.context() as patched:
        patched.setattr(_operator, "_described", lambda *_: pytest.fail("a key was made"))
        by_turns()
    assert [(kernel, arguments[1:]) for kernel, _, arguments in driver.seen[-6:]] == wanted
    before = len(softmax.plans)
    fusebook.softmax(x.double())  # of the shapes, and no calls that were made
    fusebook.softmax(y.T.contiguous().T)
    assert len(softmax.plans) == before + 2


@absent
def test_what_is_asked_in_every_call_is_asked_of_the_last_call_again(driver):
    index, dy = torch.randint(0, 50, (40,)), torch.randn(40, 16)

    def kernels():
        driver.seen.clear()
        fusebook.embedding_backward(dy, index, 50, check=False)
        return [kernel for kernel, *_ in driver.seen]

    usual = [kernels() for _ in range(3)]
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels() != usual[0] == usual[1] == usual[2]
    finally:
        torch.use_deterministic_algorithms(False)
    for _ in range(3):
        fusebook.embedding_backward(dy, index, 50)
    index[3] = 50
    with pytest.raises(IndexError, match=r"indices\[3, 0\]"):
        fusebook.embedding_backward(dy, index, 50)
    x, both = torch.randn(70, 64).bfloat16(), torch.randn(4, 64, 48).bfloat16()
    out, write = torch.empty(70, 96, dtype=x.dtype), OPERATORS["concat_gemm"].write
    for order in ((0, 1), (1, 0), (0, 1)):
        weights = [both[i] for i in order]
        assert OPERATORS["concat_gemm"].written.again(out, x, weights, None, "fused") is _operator._OTHER
        for _ in range(3):
            fusebook.concat_gemm(x, weights)
            write(out, x, weights, None, "fused")
        planned = addresses(driver.seen[-1][2])
        with plans_aside():
            write(out, x, weights, None, "fused")
        assert planned == addresses(driver.seen[-1][2]), order
    assert fusebook.concat_gemm(x, list(both)).shape == (70, 192)  # more weights
    with pytest.raises(TypeError, match="sequence of tensors"):
        fusebook.concat_gemm(x, both[:2])  # as if it were two


@absent
def test_what_dispatches_tensors_may_change(driver):
    x = torch.randn(8, 100)
    op = OPERATORS["softmax"]
    for _ in range(3):
        fusebook.softmax(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op.plans.again(x, -1) is _operator._OTHER
        for _ in range(2):
            fusebook.softmax(x)
        assert op.plans.again(x, -1) is not _operator._OTHER and len(op.plans) == 1


@absent
def test_a_known_call_is_looked_at_again_where_torch_differentiates_forward_or_traces(driver):
    x, op = torch.randn(8, 100), OPERATORS["softmax"]
    for _ in range(3):
        fusebook.softmax(x)
    assert op.plans.again(x, -1) is not _operator._OTHER
    with forward.dual_level():
        assert op.plans.again(x, -1) is op.plans.before((x, -1)) is _operator._OTHER
        with pytest.raises(NotImplementedError, match="in reverse mode"):
            fusebook.softmax(forward.make_dual(x, x))
    driver.seen.clear()
    with warnings.catch_warnings(action="ignore"):
        traced = torch.jit.trace(fusebook.softmax, x, check_trace=False)
    assert "fusebook::softmax" in str(traced.inlined_graph)


@absent
def test_plans_pass_the_driver_what_the_launcher_of_triton_passes(monkeypatch):
    """Triton's own launcher, above a function that takes the driver's place; tensor descriptors as they are made."""
    from triton.backends.nvidia import driver as backend

    class Passed(AbsentGPU):
        """Takes down what reaches the function of C."""

        def __init__(self):
            super().__init__((9, 0))
            self.passed, self.filled = [], []

        def launch(self, *arguments):
            self.passed.append(arguments)

        def launcher_cls(self, source, metadata):
            return backend.CudaLauncher(source, metadata)

        def build_signature_metadata(self, signature):
            return b""

        def map_python_to_cpp_type(self, ty):
            return backend.ty_to_cpp(ty)

        def fill_tma_descriptor(self, address, *shape):
            self.filled.append(address)
            return "descriptor of", address, *map(str, shape)

        fill_tma_descriptor_tiled = fill_tma_descriptor

    made = Passed()
    triton.runtime.driver.set_active(made)
    monkeypatch.setattr(_operator, "_current", lambda: -1)
    monkeypatch.setattr(_tape, "_stream", lambda index: 0)
    monkeypatch.setattr(_tape, "fresh_memory", lambda n, s, dtype: torch.empty_strided(n, s, dtype=dtype))
    for name in ("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):
        monkeypatch.setattr(backend, name, name, raising=False)
    monkeypatch.setattr(
        backend, "PyKernelArg", lambda nested_tuple=None, type=None: (nested_tuple, type), raising=False
    )
    if hasattr(backend, "compile_module_from_src"):  # an older Triton writes a launcher in C for each signature
        monkeypatch.setattr(backend, "compile_module_from_src", lambda **_: types.SimpleNamespace(launch=made.launch))
        monkeypatch.setattr(backend, "library_dirs", list)

    def numbers(passed):
        """What a kernel is given; Triton's own words on the launch and its hooks, which are nobody's here, are None."""
        found = []
        for value in passed:
            if isinstance(value, (tuple, list)):
                found += numbers(value)
            elif hasattr(value, "data_ptr"):
                found.append(value.data_ptr())
            else:
                found.append(None if hasattr(value, "data") or hasattr(value, "calls") else value)
        return found

    for operator in OPERATORS.values():
        for plans in (operator.plans, operator.checked, operator.written):
            plans.clear()
    x, left, right = (torch.randn(256, 256, dtype=torch.bfloat16) for _ in range(3))
    columns = torch.randn(3, 256, 256, dtype=torch.bfloat16).mT
    arguments = {
        "softmax": [(x, -1), (left, -1)],
        "concat_gemm": [(x, [left, right], None, "fused"), (left, [x, right], None, "fused")],
        # The second weights lie at other distances from the first ones, and all else where it lay.
        "swiglu": [(x, columns[0], other, None, None, "fused") for other in columns[1:]],
    }
    for name, calls in arguments.items():
        shape = OPERATORS[name].outputs(*OPERATORS[name].check(*calls[0])).shape
        results = [torch.empty(shape, dtype=x.dtype)] * len(calls)
        for turn in range(4):
            for out, args in zip(results, calls, strict=True):
                made.passed.clear()
                before = len(made.filled)
                OPERATORS[name].write(out, *args)
                assert turn < 2 or len(made.filled) == before, "descriptors are made once for an address"
                planned = list(made.passed)
                made.passed.clear()
                with plans_aside():
                    OPERATORS[name].write(out, *args)
                assert planned and numbers(planned) == numbers(made.passed), name
    assert made.filled


@absent
def test_plans_are_put_aside_while_triton_has_hooks(driver):
    x = torch.randn(8, 100)
    for _ in range(3):
        fusebook.softmax(x)
    told = []
    hook = told.append
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        fusebook.softmax(x)
        assert driver.seen[-1][2] and isinstance(driver.seen[-1][2][0], torch.Tensor)  # by Triton's own way
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    fusebook.softmax(x)
    assert isinstance(driver.seen[-1][2][0], int)


@absent
def test_what_a_launcher_does_besides_spoils_its_plan(driver):
    def into(x, more):
        out = _operator.empty((5,), x.dtype, x.device)
        if more:
            out.zero_()  # neither launched nor applied
        _operator.launch(sys.modules["fusebook.kernels.elementwise"]._elementwise_flat, (1,), (out,), (x,), 5,
                         EXPRESSION=sys.modules["fusebook.kernels.elementwise"]._double, BLOCK=8, GROUP=4,
                         WIDE=False, ALIKE=1)  # fmt: skip

    x = torch.randn(5)
    assert [_operator.record([x], lambda more=more: into(x, more))[1] is None for more in (False, True)] == [
        False,
        True,
    ]


@absent
def test_plans_are_bounded(driver, monkeypatch):
    monkeypatch.setattr(_operator, "_PLANS", 4)
    for n in range(1, 12):
        fusebook.softmax(torch.randn(2, n))
    assert 0 < len(OPERATORS["softmax"].plans) <= 4


@absent
def test_threads_share_plans(driver):
    wrong = []

    def work(rows):
        for i in range(30):
            x = torch.randn(rows, 64 * (1 + i % 3))
            if fusebook.softmax(x).shape != x.shape:
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in range(4, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_launch_goes_to_the_device_of_its_tensor(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(seen.append(device)))
    with _operator.launching(types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))):
        assert seen == [torch.device("cuda:1")]


@absent
def test_a_gradient_is_recorded_only_where_it_is_wanted(driver):
    x = torch.randn(8, 100)
    for grad in (False, True, False, True):
        x.requires_grad_(grad)
        assert fusebook.softmax(x).requires_grad == grad
        with torch.no_grad():
            assert not fusebook.softmax(x).requires_grad


@absent
def test_the_path_of_a_planned_call_is_short(driver):
    """Relative to torch's own call, in this thread's time, so that it holds on any machine, however busy."""
    x = torch.randn(4, 16)

    def seconds(function, calls=300):
        start = time.thread_time()
        for _ in range(calls):
            function()
        return (time.thread_time() - start) / calls

    with plans_aside():
        slow = min(seconds(lambda: fusebook.softmax(x), 20) for _ in range(5))
    rounds = [(seconds(lambda: fusebook.softmax(x)), seconds(lambda: torch.softmax(x, -1))) for _ in range(15)]
    planned, torchs = (min(times) for times in zip(*rounds, strict=True))
    assert planned < 6 * torchs  # a call of torch's that computes 64 numbers
    assert planned < slow / 4


@gpu
def test_graphs_streams_and_reused_addresses():
    x = torch.randn(64, 1000, device="cuda")
    fusebook.softmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fusebook.softmax(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, torch.softmax(x, -1))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        x.normal_()
        z = fusebook.softmax(x)
    side.synchronize()
    torch.testing.assert_close(z, torch.softmax(x, -1))
    for _ in range(100):  # freed at once, and had again
        w = torch.randn(64, 1000, device="cuda")
        torch.testing.assert_close(fusebook.softmax(w), torch.softmax(w, -1))


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one():
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x = torch.randn(64, 1000, device=device)
        for _ in range(2):
            torch.testing.assert_close(fusebook.softmax(x), torch.softmax(x, -1))


# Transforms


PAIRS = {"softmax": lambda t: torch.softmax(t, -1), "exp": torch.exp}


@pytest.mark.parametrize("name", PAIRS)
def test_transforms_of_torch_func(name, device):
    ours, theirs = getattr(fusebook, name), PAIRS[name]
    x = torch.randn(4, 5, device=device)

    def loss(function):
        return lambda t: function(t).sin().sum()

    torch.testing.assert_close(torch.vmap(ours)(x), torch.vmap(theirs)(x))
    for transform in (torch.func.grad, torch.func.jacrev, lambda f: torch.vmap(torch.func.grad(f))):
        torch.testing.assert_close(transform(loss(ours))(x), transform(loss(theirs))(x), atol=1e-5, rtol=1e-4)
    twice = torch.func.jacrev(torch.func.jacrev(loss(ours)))(x[0])
    torch.testing.assert_close(twice, torch.func.hessian(loss(theirs))(x[0]), atol=1e-5, rtol=1e-4)
    back = torch.func.vjp(ours, x)[1]  # called when nothing is transformed any more
    torch.testing.assert_close(back(x)[0], torch.func.vjp(theirs, x)[1](x)[0])
    with pytest.raises(NotImplementedError, match="reverse mode"):
        torch.func.hessian(loss(ours))(x[0])


def test_a_batch_of_an_operator_without_a_rule(device):
    index = torch.tensor([0, 1, 1], device=device)
    dy = torch.randn(6, 3, 2, device=device)
    found = torch.vmap(lambda t: fusebook.embedding_backward(t, index, 4, check=False))(dy)
    for a, t in zip(found, dy, strict=True):
        torch.testing.assert_close(a, fusebook.embedding_backward(t, index, 4))


@absent
def test_compiled_code_finds_plans(driver, monkeypatch):
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(5, 7)
    compiled = torch.compile(lambda t: fusebook.exp(t), fullgraph=True)
    _, (code,) = run_and_get_code(compiled, x)
    assert "torch.ops.fusebook.exp.default.planned(" in code
    for _ in range(3):
        compiled(x)
    asked = []
    before = len(driver.seen)
    with monkeypatch.context() as patched:
        patched.setattr(_operator, "_flat", asked.append)  # of whatever is not known again
        for _ in range(3):
            compiled(x)
    assert len(driver.seen) == before + 3 and not asked
    op = OPERATORS["exp"]
    monkeypatch.setattr(op, "custom", lambda *args: asked.append(args))
    op._compiled(torch.complex(x, x).conj().imag)
    op._compiled(x.clone().requires_grad_())
    assert len(asked) == 2 and len(driver.seen) == before + 3  # torch resolves the one, and differentiates the other


def test_what_has_no_elements_lies_nowhere():
    """A part without elements lies at 0, its memory does not, and another call's memory lies elsewhere again."""
    x = torch.empty(8)
    tape = _tape.Tape([x])
    assert tape.address(x[4:]) == "a0.data_ptr() + 16"
    assert x[8:].data_ptr() == 0 and tape.address(x[8:]) == "0"
    tape.whole(x[8:])
    assert tape.lines == ["s0 = a0.as_strided((0,), (1,), a0.storage_offset() + 8)"] and not tape.spoiled


def test_a_view_is_written_down_by_where_it_begins():
    """Of an argument, whose own beginning another call tells."""
    x = torch.zeros(3, 8)[1:]
    tape = _tape.Tape([x])
    assert tape.address(x[1:, 2:]) == "a0.data_ptr() + 40"
    tape.whole(x[1:, 2:])
    assert tape.lines == ["s0 = a0.as_strided((1, 6), (8, 1), a0.storage_offset() + 10)"] and not tape.spoiled


def test_a_subclass_of_tensors_has_no_plan():
    class Named(torch.Tensor):
        pass

    assert _operator._described([torch.ones(2)], []) is not None
    assert _operator._described([torch.ones(2).as_subclass(Named)], []) is None


def test_whoever_forgets_plans_forgets_the_last_call():
    plans = _operator._Plans()
    plans.last([torch.ones(2)], lambda *args: "again")
    assert plans.again() == plans.before([torch.ones(2)]) == "again"
    plans.clear()
    assert plans.again() is plans.before([torch.ones(2)]) is _operator._OTHER
