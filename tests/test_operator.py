"""An operator's plans: what a second call does is what a first one would do.

Plans exist only where Triton compiles. Without a GPU these tests run in a process of their own, on a driver that
compiles for a GPU that is not there and takes down what would be launched: which kernel, on which stream, with which
addresses and numbers.
"""

import contextlib
import gc
import importlib
import math
import os
import re
import sys
import threading
import traceback
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

import fusebook
import warm
from fusebook.cards import OPS
from fusebook.kernels import _call
from fusebook.kernels._call import INTERPRETED, OPERATORS, uncached
from fusebook.measure.compiled import AbsentGPU
from fusebook.measure.inputs import generator
from fusebook.measure.sources import UNTIMED

ABSENT = "_FUSEBOOK_TEST_ABSENT"  # set in the process that the first test starts
absent = pytest.mark.skipif(ABSENT not in os.environ, reason="runs on a driver without a GPU, in a process of its own")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
        self.seen, self.failing = [], None
        self.launched_by_triton = 0

    def get_current_stream(self, *device):  # asked for by Triton alone
        self.launched_by_triton += 1
        return 0

    def launcher_cls(self, source, metadata):
        def launch(*arguments):
            if self.failing is not None:
                self.failing(*arguments)
            self.seen.append((metadata.hash, arguments[3], arguments[9:]))

        return launch


@pytest.fixture
def driver(monkeypatch):
    """CPU tensors stand for tensors of a GPU whose current stream is `driver.stream`."""
    made = Recorder()
    stand_in(monkeypatch, made)
    return made


def stand_in(monkeypatch, driver, call=_call):
    """Have a driver take the place of a GPU's, for the package or a copy of it."""
    triton.runtime.driver.set_active(driver)
    monkeypatch.setattr(call, "_current", lambda: -1)
    monkeypatch.setattr(call, "_stream", lambda index: getattr(driver, "stream", 0))
    monkeypatch.setattr(call, "_memory", lambda n, s, dtype: torch.empty_strided(n, s, dtype=dtype))
    gc.unfreeze()  # what is frozen is not listed
    for operator in [thing for thing in gc.get_objects() if type(thing) is call.Operator]:
        operator.calls.clear()
        operator.recent.clear()


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
    assert len(OPERATORS["softmax"].calls) == 1


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
        before = len(OPERATORS["softmax"].calls)
        fusebook.softmax(*args)
        with uncached():
            fusebook.softmax(*args)
        assert len(OPERATORS["softmax"].calls) == before + 1, name
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
    assert len(OPERATORS["swiglu"].calls) == 2


@absent
def test_a_plan_returns_what_the_first_call_did(driver):
    x, dy = torch.randn(8, 100), torch.randn(8, 100)
    gradient = x, dy, None, None, None, False, 1e-6
    for op, args in ((OPERATORS["norm_backward"], gradient), (fusebook.add_sub, (x, dy))):
        assert len({(type(found), len(found)) for found in (op(*args) for _ in range(3))}) == 1


def numbered(seen):
    """Launches with addresses as numbers, in the order of their appearance: fresh memory is elsewhere each time."""
    order = {}

    def plain(value):
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return order.setdefault(value, f"address {len(order)}") if type(value) is int and value >= 2**32 else value

    return [(kernel, stream, [plain(a) for a in addresses(arguments)]) for kernel, stream, arguments in seen]


def reached():
    """Our implementations that are called from torch, each with small inputs: ``name, function, arguments``."""
    for op in OPS.values():
        for name, variant in op.variants.items():
            dims = min(op.edges, key=lambda dims: abs(math.prod(v for v in dims.values() if type(v) is int) - 4096))
            made = op.make(generator(0, "cpu"), op.dtypes[0], **dims)
            if name.startswith("fusebook") and set(variant.needs) <= {"cuda"}:
                yield f"{op.name} {name}", variant.run, variant.prepare(*made) if variant.prepare else made


@absent
def test_a_replay_launches_what_the_launcher_does(driver):
    replayed = []
    for name, run, arguments in reached():
        run(*arguments)
        driver.seen.clear()
        before = driver.launched_by_triton
        run(*arguments)
        known, driver.seen = driver.seen, []
        if driver.launched_by_triton == before:
            replayed.append(name)
        with uncached():
            run(*arguments)
        assert numbered(known) == numbered(driver.seen), name
    assert len(replayed) > 20


def nodes():
    """ONNX Runtime's nodes, each as a function of the memory that it writes and its inputs, which it makes."""
    from fusebook.ort import nodes as ort

    x, w, b = torch.randn(8, 64), torch.randn(64), torch.randn(64)
    at, shape = torch.arange(8)[:, None], torch.tensor([16, 64])
    packed = fusebook.quantize(torch.randn(32, 64, dtype=torch.float16), group=32)
    codes = dict(N=32, K=64, bits=4, group=32)
    yield lambda y: ort.softmax_into(x.clone(), y), x
    yield lambda y: ort._of_shape(shape, at.clone(), x.clone(), y, reduction="add"), torch.empty(16, 64)
    yield lambda y: ort._masked(shape, at.clone(), x.clone(), y, reduction="add", maskedValue=3), torch.empty(16, 64)
    yield lambda y: ort._rms(x.clone(), w.clone(), y, axis=-1, epsilon=1e-5), x
    yield lambda y: ort._layer(x.clone(), w.clone(), b, y, axis=1, epsilon=1e-5), x
    yield lambda y: ort._skip(x.clone(), x.clone(), w, (y, y.clone()), epsilon=1e-5), x
    half = torch.randn(2, 64, dtype=torch.float16)
    words, scales = packed.words, packed.scales
    yield lambda y: ort._quantized(half.clone(), words.clone(), scales, None, None, y, **codes), half[:, :32]


@absent
def test_a_node_of_onnx_runtime_is_replayed_with_other_addresses(driver):
    from fusebook.ort import nodes as ort

    writers = [op.write for op in (ort._softmax, ort._scatter, ort._norm, ort._add_norm, ort._matmul)]
    for count, (run, like) in enumerate(nodes(), 1):
        run(torch.empty_like(like))
        assert sum(len(op.calls) for op in writers) == count
        driver.seen.clear()
        before, memory = driver.launched_by_triton, torch.empty_like(like)
        run(memory)
        assert driver.launched_by_triton == before
        known, driver.seen = driver.seen, []
        with uncached():
            run(memory)
        assert numbered(known) == numbered(driver.seen)
        assert memory.data_ptr() in addresses(known[-1][2])


#: Functions that a second call enters beyond six: what it checks in every call, of values or of positions in memory.
#: And what passes tensors to torch's matmul, in TF32 or not as torch is set.
ASKED = {"_read", "_read_assign", "_read_update", "_read_target", "capturing"}
ASKED |= {"_asked", "_places", "_shape_of", "_mm"}
#: Operators with a call path of their own.
APART = ("adamw_step", "kmeans_step fusebook, two calls")


@absent
def test_a_second_call_enters_six_functions_at_most(driver):
    for name, run, arguments in reached():
        first, second, third = (functions(run, arguments) for _ in range(3))
        assert not (first | second | third) & UNTIMED, "the hash of launch times leaves these out"
        if name.startswith(APART) or "checked" in name:
            continue
        assert len(second - ASKED) <= 6, (name, second)
        assert third <= second, (name, third)
        assert len(first) <= 60, (name, first)


#: Of these the functions that a call enters at most: the first one, the second one, and a step back after that.
TRAINED = {
    "softmax": (lambda x, w: fusebook.softmax(x), 32, 6, 5),
    "rms_norm": (lambda x, w: fusebook.rms_norm(x, w), 36, 6, 5),
    "silu": (lambda x, w: fusebook.silu(x), 30, 6, 4),
    "cross_entropy": (lambda x, w: fusebook.cross_entropy(x, torch.arange(8)), 49, 5, 4),
    "linear_cross_entropy": (lambda x, w: fusebook.linear_cross_entropy(x, x.clone(), torch.arange(8)), 62, 7, 4),
}


@absent
@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_enters_few_functions(driver, name):
    call, *most = TRAINED[name]
    x, w = torch.randn(8, 128, requires_grad=True), torch.randn(128, requires_grad=True)
    first, second = (functions(call, (x, w)) for _ in range(2))
    for _ in range(2):
        y = call(x, w)
        back = functions(torch.autograd.grad, (y, x, torch.ones_like(y)))
    found = [first, second - ASKED, back]
    counts = [len(f) for f in found]
    assert all(n <= m for n, m in zip(counts, most, strict=True)), (counts, found)
    assert not set().union(*found) & UNTIMED, "the hash of launch times leaves these out"


def functions(run, arguments):
    """The names of the package's functions that a call enters."""
    entered = []

    def enter(frame, event, _):
        code = frame.f_code
        if event == "call" and "fusebook/kernels" in code.co_filename and not code.co_name.startswith("<"):
            entered.append(code.co_name)

    sys.setprofile(enter)
    try:
        run(*arguments)
    finally:
        sys.setprofile(None)
    return set(entered)


@pytest.mark.parametrize(("capability", "early"), [(None, False), ((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_kernels_start_early_where_the_gpu_can(monkeypatch, capability, early):
    monkeypatch.setattr(_call, "gpu", lambda device: (capability, 108))
    assert _call.overlapping("cuda") == ({"launch_pdl": True} if early else {})


@pytest.mark.skipif(ABSENT in os.environ, reason="no kernel runs there")
def test_memory_that_is_given_is_written_where_values_are_fine(device):
    out, indices, updates = torch.ones(5, 4, device=device), torch.tensor([[5]], device=device), torch.ones(1, 4)
    given = out.shape, indices, updates.to(device), None, "add"
    with pytest.raises(IndexError, match=r"indices\[0, 0\]"):
        OPERATORS["scatter_nd"].write(out, "scatter", *given, True, None)
    given[2].requires_grad_()
    assert OPERATORS["scatter_nd"].write(out, "scatter", *given, False, None) is out, "no gradient is recorded"
    assert not out.any()


def _rotate(x):
    fusebook.rope(x, torch.full((3, 2), 0.6, device=x.device), torch.full((3, 2), 0.8, device=x.device), inplace=True)


#: Functions that write a tensor, by the operator that they call.
WRITE = {
    "adamw_step": lambda x: fusebook.adamw_step([x], *([torch.ones_like(x)] for _ in range(3)), step=1),
    "rope_over": _rotate,
}


@pytest.mark.skipif(ABSENT in os.environ, reason="no kernel runs there")
@pytest.mark.parametrize("way", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", WRITE)
def test_autograd_notices_what_is_written(name, way, device):
    w, x = torch.ones(2, 3, 4, device=device, requires_grad=True), torch.ones(2, 3, 4, device=device)

    def loss(w, x):
        y = (w * x).sum()  # keeps x for the gradient of w
        WRITE[name](x)
        return y

    torch._dynamo.reset()
    call = loss if way == "eager" else torch.compile(loss, backend=way, fullgraph=True)
    refused = pytest.raises(RuntimeError, match="modified by an inplace operation")
    with refused, torch.compiler.config.patch(force_disable_caches=True):
        call(w, x).backward()


@pytest.mark.skipif(ABSENT in os.environ, reason="no kernel runs there")
@pytest.mark.parametrize("name", WRITE)
def test_torch_func_notices_what_is_written(name, device):
    x, w = torch.ones(2, 3, 4, device=device), torch.ones(2, 3, 4, device=device)

    def loss(w):
        t = x * 1
        y = (w * t).sum()  # keeps t for the gradient of w
        WRITE[name](t)
        return y

    for gradient in (torch.func.grad(loss), lambda w: torch.func.vjp(loss, w)[1](torch.ones((), device=device))):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(w)
    with pytest.raises(NotImplementedError, match="in one list|the whole batch"):
        torch.vmap(WRITE[name])(x[None])
    assert torch.equal(x, torch.ones_like(x)), "nothing was written"


@pytest.mark.skipif(ABSENT in os.environ, reason="no kernel runs there")
def test_what_a_compiled_transform_differentiates_is_not_written(device):
    """Dynamo says of it that it requires no gradient."""
    x = torch.ones(2, 3, 4, device=device)
    gradient = torch.func.grad(lambda x: (_rotate(x), x.sum())[1])
    for call in (gradient, torch.compile(gradient, backend="aot_eager")):
        with pytest.raises(Exception, match="expected no gradient"):
            call(x)


def test_all_operators_that_write_raise_versions():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in [*OPERATORS, "adamw_step"]:
        assert has(f"fusebook::{name}", "ADInplaceOrView") == (
            "!" in str(getattr(torch.ops.fusebook, name).default._schema)
        )


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
    x, target = torch.randn(40, 16), torch.zeros(40, dtype=torch.int64)
    for wrong in (0, 0, 16):  # without a list among the arguments: torch's guards recognise the call
        target[3] = wrong
        with pytest.raises(IndexError, match=r"target\[3\]") if wrong else contextlib.nullcontext():
            fusebook.cross_entropy(x, target, check=True)


class Seen(TorchDispatchMode):
    """The operators that torch's dispatcher is asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@absent
@pytest.mark.parametrize("guarded", [True, False])
def test_a_known_call_notices_what_torch_is_doing(driver, monkeypatch, guarded):
    if not guarded:
        monkeypatch.setattr(_call, "_guards", None)
    x, gate, up = (torch.randn(64, 64) for _ in range(3))
    for _ in range(3):
        fusebook.softmax(x)
        fusebook.swiglu(x, gate, up)
    assert bool(OPERATORS["softmax"].recent) == guarded
    with Seen() as seen:
        fusebook.softmax(x)
    assert "fusebook::softmax" in seen.names
    with torch.autocast("cpu", torch.bfloat16):
        assert fusebook.swiglu(x, gate, up).dtype == torch.bfloat16
    with FakeTensorMode() as mode:
        assert type(fusebook.softmax(mode.from_tensor(x))) is not torch.Tensor
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="reverse mode"):
        fusebook.softmax(forward_ad.make_dual(x, x))
    assert "fusebook::softmax" in str(torch.jit.trace(fusebook.softmax, (x,), check_trace=False).graph)
    assert torch.vmap(fusebook.softmax)(torch.randn(2, 64, 64)).shape == (2, 64, 64)
    launched, by_triton = len(driver.seen), driver.launched_by_triton
    fusebook.softmax(x)
    assert (len(driver.seen), driver.launched_by_triton) == (launched + 1, by_triton), "a replay"
    x.untyped_storage().resize_(0)  # as FSDP does: no address that a replay could pass
    fusebook.softmax(x)
    assert driver.launched_by_triton == by_triton + 1


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
    with _call.launching(types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))):
        assert seen == [torch.device("cuda:1")]


@absent
def test_a_gradient_is_recorded_only_where_it_is_wanted(driver):
    x = torch.randn(8, 100)
    for grad in (False, True, False, True):
        x.requires_grad_(grad)
        assert fusebook.softmax(x).requires_grad == grad
        with torch.no_grad():
            assert not fusebook.softmax(x).requires_grad
    y = torch.randn(8, 60, requires_grad=True)
    for grad in (False, True, False, True):
        with torch.set_grad_enabled(grad):
            assert fusebook.softmax(y).requires_grad == grad


@absent
def test_what_cannot_be_replayed_is_not_remembered(driver, monkeypatch):
    x = torch.randn(8, 100)

    def complete(call):
        return _call.record([x], call)[1] is not None

    monkeypatch.setattr(_call, "_MOST_LAUNCHES", 2)
    softmax = OPERATORS["softmax"]._computed
    assert complete(lambda: [softmax((x, -1)) for _ in range(2)])
    assert not complete(lambda: [softmax((x, -1)) for _ in range(3)]), "too long"
    assert complete(lambda: _call.apply(torch.neg, x[1:]))
    assert not complete(lambda: _call.apply(torch.neg, x.view(torch.int32))), "another dtype in the same memory"
    assert not complete(lambda: torch.zeros(3)), "neither launched nor applied"


@absent
def test_a_replay_applies_operations_of_torch_to_the_tensors_of_its_call(driver):
    x, y = torch.randn(4, 8)[1:], torch.randn(3, 8)

    def call():
        out = x.new_empty(3, 4)
        both = _call.apply(torch.cat, [x[:, :4], x[:, 4:]], 1)
        _call.apply(torch.mul, both[:, 1:5], 2, out=out)
        return out, both

    replay = _call.record([x], call)[1]
    for t in (x, y):
        out, both = replay.run([t], [t.data_ptr()])
        assert torch.equal(both, t) and torch.equal(out, 2 * t[:, 1:5])


@absent
def test_distances_between_weights_are_those_of_each_call(driver):
    x, both = torch.randn(300, 256).bfloat16(), torch.randn(4, 512, 256).bfloat16().mT  # side by side, as columns
    for other in (1, 1, 1, 2, 3, 2):
        driver.seen.clear()
        fusebook.swiglu(x, both[0], both[other], strategy="fused")
        known, driver.seen = driver.seen, []
        with uncached():
            fusebook.swiglu(x, both[0], both[other], strategy="fused")
        assert numbered(known) == numbered(driver.seen), other
        assert any(isinstance(a, tuple) and other * 512 * 256 in a for a in addresses(known[-1][2])), "one descriptor"
    assert len(OPERATORS["swiglu"].calls) == 1


@absent
def test_replays_pass_the_driver_what_the_launcher_of_triton_passes(monkeypatch):
    """Triton's own launcher, above a function in place of the driver's; tensor descriptors as they are made."""
    from triton.backends.nvidia import driver as backend

    class Passed(AbsentGPU):
        """Keeps what reaches the function in C."""

        def __init__(self):
            super().__init__((9, 0))
            self.passed = []

        def launch(self, *arguments):
            self.passed.append(arguments)

        def launcher_cls(self, source, metadata):
            return backend.CudaLauncher(source, metadata)

        def build_signature_metadata(self, signature):
            return b""

        def map_python_to_cpp_type(self, ty):
            return backend.ty_to_cpp(ty)

        def fill_tma_descriptor(self, address, *shape):
            return "descriptor of", address, *map(str, shape)

        fill_tma_descriptor_tiled = fill_tma_descriptor

    made = Passed()
    stand_in(monkeypatch, made)
    for name in ("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):
        monkeypatch.setattr(backend, name, name, raising=False)
    monkeypatch.setattr(
        backend, "PyKernelArg", lambda nested_tuple=None, type=None: (nested_tuple, type), raising=False
    )
    if hasattr(backend, "compile_module_from_src"):  # an older Triton writes a launcher in C for each signature
        monkeypatch.setattr(backend, "compile_module_from_src", lambda **_: types.SimpleNamespace(launch=made.launch))
        monkeypatch.setattr(backend, "library_dirs", list)

    def values(passed):
        """What a kernel is given; what Triton keeps of the launch and its hooks, of which there are none, is None."""
        if isinstance(passed, (tuple, list)):
            return tuple(map(values, passed))
        if hasattr(passed, "data_ptr"):
            return passed.data_ptr()
        return None if hasattr(passed, "data") or hasattr(passed, "calls") else passed

    x, left, right = (torch.randn(256, 256, dtype=torch.bfloat16) for _ in range(3))
    columns = torch.randn(3, 256, 256, dtype=torch.bfloat16).mT
    for call, calls in {
        fusebook.softmax: [(x,), (left,)],
        fusebook.concat_gemm: [(x, [left, right]), (left, [x, right])],
        # The second weights are at other distances from the first ones.
        fusebook.swiglu: [(x, columns[0], other) for other in columns[1:]],
    }.items():
        options = {} if call is fusebook.softmax else {"strategy": "fused"}
        for _ in range(3):
            for args in calls:
                made.passed.clear()
                call(*args, **options)
                known = [("", 0, values(p)) for p in made.passed]
                made.passed.clear()
                with uncached():
                    call(*args, **options)
                assert known and numbered(known) == numbered([("", 0, values(p)) for p in made.passed]), call


@absent
def test_nothing_is_replayed_while_triton_has_hooks(driver):
    x = torch.randn(8, 100)
    for _ in range(3):
        fusebook.softmax(x)
    called = []
    triton.knobs.runtime.launch_enter_hook.add(called.append)
    try:
        before = driver.launched_by_triton
        fusebook.softmax(x)
        assert driver.launched_by_triton == before + 1
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(called.append)
    fusebook.softmax(x)
    assert driver.launched_by_triton == before + 1


@absent
def test_calls_are_bounded(driver, monkeypatch):
    monkeypatch.setattr(_call, "_MOST_CALLS", 4)
    for n in range(1, 12):
        fusebook.softmax(torch.randn(2, n))
    assert 0 < len(OPERATORS["softmax"].calls) <= 4
    assert 0 < len(OPERATORS["softmax"].recent) <= 4


@absent
def test_a_gradient_is_replayed_too(driver):
    x = torch.randn(8, 100, requires_grad=True)
    for _ in range(3):
        before = driver.launched_by_triton
        fusebook.softmax(x).sum().backward()
    assert driver.launched_by_triton == before


@absent
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_step_of_a_loss_is_replayed(driver, dtype, biased, monkeypatch):
    """Whose gradients are found with it: beside the logits, in their memory, or from kept logits."""
    kept, run = [], _call._Replay.run  # memory that is used again would have one number for two tensors
    monkeypatch.setattr(_call._Replay, "run", lambda self, slots, at: kept.append(slots) or run(self, slots, at))
    h, head, bias, x = (torch.randn(n, dtype=dtype, requires_grad=True) for n in ((8, 64), (16, 64), (16,), (8, 16)))
    target, own = torch.arange(8), (h, head, bias) if biased else (h, head)
    linear = {"bias": bias if biased else None, "check": False}
    for call, given in (
        (lambda: fusebook.linear_cross_entropy(h, head, target, **linear), own),
        (lambda: fusebook.cross_entropy(x, target, check=False), (x,)),
        (lambda: fusebook.cross_entropy(x, target, check=False, inplace=True), (x,)),
    ):

        def step(call=call, given=given):
            loss = call()
            loss.backward(torch.ones_like(loss))
            return [t.grad.shape for t in given] == [t.shape for t in given]

        assert step() and step()
        driver.seen.clear()
        before = driver.launched_by_triton
        assert step() and driver.launched_by_triton == before
        known, driver.seen = driver.seen, []
        with uncached():
            assert step() and numbered(known) == numbered(driver.seen)


@pytest.mark.parametrize("name", ["softmax", "silu", "add_sub"])
def test_a_result_does_not_keep_itself(name, request):
    seen = request.getfixturevalue("driver").seen if ABSENT in os.environ else []
    fusebook.exp(torch.ones(3, device=DEVICE))  # what torch imports with the first mode keeps frames
    x = torch.randn(4, 8, requires_grad=True, device=DEVICE)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            found = getattr(fusebook, name)(*[x] * (2 if name == "add_sub" else 1))
            kept = [weakref.ref(t) for t in (found if isinstance(found, tuple) else (found,))]
            del found
            seen.clear()
            assert not any(one() is not None for one in kept)
    finally:
        gc.enable()


@absent
def test_a_call_is_named_in_the_profiler(driver):
    x = torch.randn(8, 100)
    for _ in range(3):
        fusebook.softmax(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fusebook.softmax(x)
    assert "fusebook::softmax" in {event.key for event in profile.key_averages()}


@absent
def test_a_launch_that_fails_shows_lines_of_files(driver):
    x = torch.randn(8, 100)
    for known in (False, True):

        def fail(*arguments):
            raise RuntimeError("no such launch")

        driver.failing = fail
        try:
            fusebook.softmax(x)
            raise AssertionError("it did not fail")
        except RuntimeError as error:
            frames = traceback.extract_tb(error.__traceback__)
        assert all(Path(frame.filename).is_file() for frame in frames)
        assert any(frame.filename.endswith("_call.py") and frame.line for frame in frames)
        driver.failing = None
        if not known:
            fusebook.softmax(x)


def privates():
    """What `_call` takes from torch under private names, as written there."""
    source = Path(_call.__file__).read_text()
    return [*re.findall(r'_private\(\s*"([^"]+)"', source), "_current_level", "_is_profiler_enabled", "_backward_cls"]


@pytest.mark.parametrize("name", privates())
def test_without_a_private_name_it_is_as_correct(name, tmp_path, monkeypatch, request):
    """A copy in a folder of its own, which works next to the package, as a package of its own."""
    package = f"copy_{privates().index(name)}"
    folder = tmp_path / package
    folder.mkdir()
    for file in ("__init__", "_call", "_rows", "elementwise", "softmax"):
        source = Path(_call.__file__).with_name(f"{file}.py").read_text()
        renamed = source.replace(f'"{name}"', '"torch:_C.no_such_name"' if ":" in name else '"no_such_name"')
        assert file != "_call" or source != renamed
        (folder / f"{file}.py").write_text(renamed)
    monkeypatch.syspath_prepend(tmp_path)
    call, elementwise, softmax = (
        importlib.import_module(f"{package}.{file}") for file in ("_call", "elementwise", "softmax")
    )
    assert f"torch.ops.{package}" in str(getattr(torch.ops, package)) and call.OPERATORS is not OPERATORS
    x = torch.randn(4, 6, requires_grad=True)
    if ABSENT in os.environ:
        driver = request.getfixturevalue("driver")
        stand_in(monkeypatch, driver, call)
        for _ in range(3):
            softmax.softmax(x).sum().backward()
        assert len(driver.seen) == 6
        return
    x = x.detach().to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_()
    for _ in range(3):
        x.grad = None
        y = softmax.softmax(elementwise.silu(x))
        y.square().sum().backward()
        given = x.grad, x.detach().requires_grad_()
        right = torch.softmax(torch.nn.functional.silu(given[1]), -1)
        right.square().sum().backward()
        torch.testing.assert_close((y, given[0]), (right, given[1].grad))
    torch.testing.assert_close(torch.vmap(softmax.softmax)(x), torch.softmax(x, -1))


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
    with pytest.raises(NotImplementedError, match="reverse mode"):
        torch.func.hessian(loss(ours))(x[0])


def test_a_batch_of_an_operator_without_a_rule(device):
    index = torch.tensor([0, 1, 1], device=device)
    dy = torch.randn(6, 3, 2, device=device)
    found = torch.vmap(lambda t: fusebook.embedding_backward(t, index, 4, check=False))(dy)
    for a, t in zip(found, dy, strict=True):
        torch.testing.assert_close(a, fusebook.embedding_backward(t, index, 4))


# Numbers


@triton.jit
def _copied(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@pytest.mark.skipif(ABSENT in os.environ, reason="no kernel runs there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_become_the_nearest_bfloat16_and_stay_what_they_are_in_more_bits(dtype, device):
    """The interpreter's own casts cut bits off, and mistake numbers below the normal range."""
    every = torch.arange(2**16, dtype=torch.int32, device=device)
    narrow = every.to(torch.int16).view(torch.bfloat16)
    # Of each bfloat16 numbers near it, half a step away from it, and next to that.
    wide = ((every << 16)[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], device=device)).flatten()
    wide = wide.to(torch.int32).view(torch.float32)
    for given in (narrow, wide.to(dtype)):
        to = dtype if given is narrow else torch.bfloat16
        found = torch.empty(given.shape, dtype=to, device=device)
        with np.errstate(all="ignore"):
            _copied[(len(given) // 2**13,)](given, found, 2**13)
        torch.testing.assert_close(found, given.to(to), atol=0, rtol=0, equal_nan=True)


# Autocast

#: What Fusebook computes under torch.autocast, and the same by torch.
CHAINS = {
    "softmax": (lambda x, w: fusebook.softmax(x), lambda x, w: torch.softmax(x, -1)),
    "rms_norm": (lambda x, w: fusebook.rms_norm(x), lambda x, w: torch.nn.functional.rms_norm(x, (8,), None, 1e-6)),
    "layer_norm": (lambda x, w: fusebook.layer_norm(x), lambda x, w: torch.nn.functional.layer_norm(x, (8,))),
    "add_layer_norm": (
        lambda x, w: fusebook.add_layer_norm(x, x),
        lambda x, w: (torch.nn.functional.layer_norm(x + x, (8,)), x + x),
    ),
    "cross_entropy": (
        lambda x, w: fusebook.cross_entropy(x, torch.arange(4, device=x.device), check=False),
        lambda x, w: torch.nn.functional.cross_entropy(x, torch.arange(4, device=x.device)),
    ),
    "linear_cross_entropy": (
        lambda x, w: fusebook.linear_cross_entropy(x, w, torch.arange(4, device=x.device), check=False),
        lambda x, w: torch.nn.functional.cross_entropy(x @ w.T, torch.arange(4, device=x.device)),
    ),
    "concat_gemm": (lambda x, w: fusebook.concat_gemm(x, [w.T]), lambda x, w: x @ w.T),
    "swiglu": (
        lambda x, w: fusebook.swiglu(x, w.T, w.T),
        lambda x, w: torch.nn.functional.silu(x @ w.T) * (x @ w.T),
    ),
    "silu_mul": (
        lambda x, w: (fusebook.silu_mul(x, w.narrow(0, 0, 1)), fusebook.silu_mul(w.narrow(0, 0, 1), x)),
        lambda x, w: (torch.nn.functional.silu(x) * w.narrow(0, 0, 1), torch.nn.functional.silu(w.narrow(0, 0, 1)) * x),
    ),
    "silu": (lambda x, w: fusebook.silu(x), lambda x, w: torch.nn.functional.silu(x)),
    "exp": (lambda x, w: fusebook.exp(x), lambda x, w: torch.exp(x)),
    "multiply": (lambda x, w: fusebook.multiply(x, w.narrow(0, 0, 1)), lambda x, w: x * w.narrow(0, 0, 1)),
    "double": (lambda x, w: fusebook.double(x), lambda x, w: 2 * x),
    "add_sub": (
        lambda x, w: fusebook.add_sub(x, w.narrow(0, 0, 1)),
        lambda x, w: (x + w.narrow(0, 0, 1), x - w.narrow(0, 0, 1)),
    ),
    "multiply_add": (
        lambda x, w: fusebook.multiply_add(x, w.narrow(0, 0, 1), x),
        lambda x, w: x * w.narrow(0, 0, 1) + x,
    ),
    "add_add_multiply": (
        lambda x, w: fusebook.add_add_multiply(x, w.narrow(0, 0, 1), x, x),
        lambda x, w: (x + w.narrow(0, 0, 1) + x) * x,
    ),
}


def dtypes(value):
    return [t.dtype for t in (value if isinstance(value, tuple) else (value,))]


@contextlib.contextmanager
def autocast(device, dtype):
    """As torch.autocast, which is silent where there is no GPU."""
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, before)


@pytest.mark.skipif(ABSENT in os.environ, reason="no kernel runs there")
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_autocast_has_the_rules_of_torch(name, where):
    """Without a GPU, the rules for one are read from tensors that are fake."""
    fused, chain = CHAINS[name]
    fake = where == "cuda" and not torch.cuda.is_available()
    if where == "cpu" and not INTERPRETED:
        pytest.skip("nothing runs on the CPU")
    for given in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        other = given if given == torch.float64 else torch.float32
        for low in (torch.bfloat16, torch.float16):
            with FakeTensorMode() if fake else contextlib.nullcontext(), autocast(where, low):
                x = torch.randn(4, 8, dtype=given, device=where)
                w = torch.randn(6, 8, dtype=other, device=where)
                found, right = fused(x, w), chain(x, w)
                assert dtypes(found) == dtypes(right), (given, low)
                if not fake:
                    torch.testing.assert_close(found, right, atol=0.06, rtol=0.06)


@pytest.mark.parametrize("name", CHAINS)
def test_meta_tensors_have_shapes_under_autocast_of_the_cpu(name):
    """Autocast knows no meta device, and changes nothing of tensors there."""
    fused, chain = CHAINS[name]
    with torch.autocast("cpu", torch.bfloat16):
        x, w = torch.empty(4, 8, device="meta"), torch.empty(6, 8, device="meta")
        found, right = fused(x, w), chain(x, w)
    for f, r in zip(*(v if isinstance(v, tuple) else (v,) for v in (found, right)), strict=True):
        assert (f.device.type, f.shape, f.dtype) == ("meta", r.shape, r.dtype)


@pytest.mark.skipif(ABSENT in os.environ, reason="no kernel runs there")
def test_gradients_under_autocast_have_the_dtypes_of_their_tensors(device):
    found = []
    for fused in (True, False):
        torch.manual_seed(1)
        x, w = (torch.randn(n, 8, device=device, requires_grad=True) for n in (4, 6))
        with torch.autocast(device, dtype=torch.bfloat16):
            h = CHAINS["swiglu"][not fused](x, w)
            loss = CHAINS["linear_cross_entropy"][not fused](h @ w, w)
        loss.backward()
        found.append((loss.detach(), x.grad, w.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=0.05 * b.abs().max().item(), rtol=0)
