"""Operators of ONNX Runtime whose kernels are Python functions. On a machine with a GPU both providers are tried."""

import contextlib
import copy
import functools
import gc
import importlib
import os
import pathlib
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

import onnx.helper as oh  # noqa: E402

from fusebook.ort import LOSSES, NODES, NORMS, Graph, custom, custom_op, register  # noqa: E402
from graphs import KINDS, model, one_node, registered_by_an_old_onnx_runtime  # noqa: E402

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CUDA = torch.cuda.is_available() and "CUDAExecutionProvider" in ort.get_available_providers()


@pytest.fixture(scope="session")
def device(device):
    if device == "cuda" and not CUDA:
        pytest.skip("needs onnxruntime-gpu")
    return device


def into(function):
    """A launcher that writes what `function` returns."""
    return lambda *inputs, out, **attributes: out.copy_(function(*inputs, **attributes))


def unary(function=lambda x: x * 2, **more):
    given = {"launcher": into(function), "inputs": {"x": "T"}, "outputs": {"y": "T"}, "shape": "x"}
    return custom_op("Unary", **given | {"types": {"T": FLOATS}} | more)


def graph(op, device="cpu", inputs=None, outputs=None, **attributes):
    f = torch.float32
    return Graph(one_node(op.name, inputs or {"x": f}, outputs or {"y": f}, **attributes), device=device, ops=[op])


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d)[6:])
def test_a_function_is_a_node_for_each_of_its_types(dtype, device):
    op = unary()
    x = torch.arange(6, device=device).view(2, 3).to(dtype)
    y = graph(op, device, {"x": dtype}, {"y": dtype})({"x": x})["y"]
    assert y.dtype == dtype and y.device.type == device and torch.equal(y, x * 2)


@pytest.mark.parametrize("dtype", [d for d in KINDS if d not in FLOATS], ids=lambda d: str(d)[6:])
def test_whole_numbers_and_booleans_pass(dtype, device):
    op = custom_op("Flip", into(lambda x: x.flip(0)), {"x": dtype}, {"y": dtype}, "x")
    x = torch.tensor([0, 1, 1], device=device).to(dtype)
    assert torch.equal(graph(op, device, {"x": dtype}, {"y": dtype})({"x": x})["y"], x.flip(0))


@pytest.mark.parametrize("wrap", [torch.func.grad, torch.func.functionalize], ids=lambda w: w.__name__)
def test_a_graph_of_plain_tensors_runs_inside_a_transform(wrap, device):
    op = custom_op("Twice", lambda x: x * 2, {"x": torch.float32}, {"y": torch.float32})
    both = one_node("Twice", op.inputs, op.outputs)
    both.graph.output.append(both.graph.input[0])  # which is copied into the memory for it
    x = torch.arange(6.0, device=device).view(2, 3).T
    bound, memory, found = x.contiguous(), torch.empty(3, 2, device=device), []

    def of(a):
        made = Graph(both, device=device, ops=[op])
        found.extend([made({"x": x}), made.bind({"x": bound}, {"x": memory})()])
        return a.sum()

    wrap(of)(torch.ones(2, device=device))
    assert all(torch.equal(f["y"], x * 2) and torch.equal(f["x"], x) for f in found) and found[1]["x"] is memory


def test_bound_graphs_run_each_other_in_two_threads():
    meet, inside, bound, found = threading.Barrier(2), threading.local(), {}, {}

    def launcher(other):
        def launch(x):
            if getattr(inside, "a_run", False):
                return x * 2
            inside.a_run = True
            meet.wait(20)  # now both are in a run
            return bound[other]()["y"] + 1

        return launch

    for name, other in ("AB", "BA"):
        op = custom_op(name, launcher(other), {"x": torch.float32}, {"y": torch.float32})
        bound[name] = graph(op).bind({"x": torch.tensor([float(ord(name))])})

    def run(name):
        found[name] = bound[name]()["y"].item()

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in "AB"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {"A": 2 * ord("B") + 1, "B": 2 * ord("A") + 1}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("given", [False, True], ids=["fresh", "given"])
def test_a_fork_during_a_run_leaves_a_bound_graph_usable(given):
    running, go = threading.Event(), threading.Event()

    def launch(x):
        if threading.current_thread() is not threading.main_thread():
            running.set()
            go.wait(20)
        return x * 2

    op = custom_op("Waits", launch, {"x": torch.float32}, {"y": torch.float32})
    bound = graph(op).bind({"x": torch.ones(3)}, {"y": torch.empty(3)} if given else {})
    thread = threading.Thread(target=bound, daemon=True)
    thread.start()
    assert running.wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if bound()["y"].tolist() == [2, 2, 2] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bound()["y"].tolist() == [2, 2, 2]  # nor does this process wait for it
    go.set()
    thread.join(20)
    assert not thread.is_alive()


def test_a_refused_run_leaves_nothing_that_a_later_one_reads():
    within, found, x = [], [], torch.ones(1000)

    def launch(x):
        y = x * 2
        if within:
            within.pop()()
        return y

    def elsewhere():
        mine, x.data = x.data, torch.full((1000,), 9.0)
        with pytest.raises(RuntimeError, match="expected x to stay where it was bound"):
            bound()
        x.data = mine

    bound = graph(custom_op("Op", launch, {"x": torch.float32}, {"y": torch.float32})).bind({"x": x})
    for inner in (elsewhere, lambda: found.append(bound()["y"])):
        within.append(inner)
        found.append(bound()["y"])
    assert len(found) == 3 and all(torch.equal(y, torch.full((1000,), 2.0)) for y in found)


def test_no_run_has_to_import_what_it_needs():
    # A signal handler may run a graph, and must not wait for an import of another thread.
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import sys, fusebook.ort; assert 'torch._dynamo' in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)


def test_nothing_is_copied(device):
    seen = []
    op = unary(launcher=lambda x, out: seen.extend([x.data_ptr(), out.data_ptr()]) or out.copy_(x))
    x, y = torch.randn(2, 64, device=device).unbind()
    bound = graph(op, device).bind({"x": x}, {"y": y})
    bound()
    assert seen == [x.data_ptr(), y.data_ptr()] and torch.equal(x, y)


def test_a_result_that_is_returned_is_copied_and_needs_no_shape(device):
    op = custom_op("Halves", lambda x: x.chunk(2), {"x": "T"}, {"a": "T", "b": "T"}, types={"T": FLOATS})
    f = torch.float32
    x = torch.randn(6, 3, device=device)
    out = graph(op, device, {"x": f}, {"a": f, "b": f})({"x": x})
    assert torch.equal(torch.cat([out["a"], out["b"]]), x)


def test_several_outputs_of_several_types_and_shapes(device):
    def launcher(x, out, *, axis):
        out[0].copy_(x.amax(axis))
        out[1].copy_(x.argmax(axis))

    def shape(x, *, axis):
        rest = [size for i, size in enumerate(x.shape) if i != axis]
        return rest, rest

    op = custom_op(
        "Top", launcher, {"x": "T"}, {"top": "T", "at": torch.int64}, shape, types={"T": FLOATS},
        attributes={"axis": 0},
    )  # fmt: skip
    f = torch.float32
    for axis in (0, 1):
        g = graph(op, device, {"x": f}, {"top": f, "at": torch.int64}, axis=axis)
        x = torch.randn(4, 5, device=device)
        out = g({"x": x})
        assert torch.equal(out["top"], x.amax(axis)) and torch.equal(out["at"], x.argmax(axis))


def test_attributes_have_defaults_or_must_be_there(device):
    def launcher(x, out, **attributes):
        seen.update(attributes)
        out.copy_(x)

    seen = {}
    given = {"a": 1, "b": 0.5, "c": "word", "d": (1, 2), "e": (0.5, 1.5), "f": int}
    op = unary(launcher=launcher, attributes=given)
    x = torch.ones(2, device=device)
    graph(op, device, f=7)({"x": x})
    assert seen == given | {"f": 7}
    graph(op, device, a=-(2**40), b=2.25, c="é\0è", d=[3, 4, 5], e=[2.5], f=0)({"x": x})
    assert seen == {"a": -(2**40), "b": 2.25, "c": "é\0è", "d": (3, 4, 5), "e": (2.5,), "f": 0}
    with pytest.raises(Exception, match="expected the attribute f, got a node without it"):
        graph(op, device)


def test_an_attribute_that_is_empty_or_of_another_kind_is_not_its_default(device):
    def launcher(x, out, **attributes):
        seen.update(attributes)
        out.copy_(x)

    def node(default, **attribute):
        made = one_node("Unary", {"x": torch.float32}, {"y": torch.float32})
        made.graph.node[0].attribute.append(onnx.AttributeProto(name="a", **attribute))
        op = unary(launcher=launcher, attributes={"a": default})
        return Graph(made, device=device, ops=[op])

    seen, kind = {}, onnx.AttributeProto
    for default in ((1, 2), (0.5,), tuple):
        for type_ in (kind.INTS, kind.FLOATS):
            node(default, type=type_)({"x": torch.ones(2, device=device)})
            assert seen.pop("a") == ()
    for default in (1, 0.5, "word"):
        for attribute in ({"type": kind.STRINGS, "strings": [b"a"]}, {"type": kind.INTS}, {"type": kind.FLOATS}):
            with pytest.raises(Exception, match="expected the attribute a to be .*, got another kind"):
                node(default, **attribute)


def test_an_input_on_the_host_gives_the_shape(device):
    def launcher(shape, x, out):
        assert shape.device.type == "cpu" and x.device.type == device
        out.copy_(x.expand(out.shape))

    op = custom_op(
        "Expanded", launcher, {"shape": torch.int64, "x": torch.float32}, {"y": torch.float32}, "shape", host=["shape"]
    )
    g = graph(op, device, {"shape": torch.int64, "x": torch.float32})
    x = torch.randn(1, 3, device=device)
    for rows in (4, 1, 0):  # dynamic, and empty
        y = g({"shape": torch.tensor([rows, 3]), "x": x})["y"]
        assert torch.equal(y, x.expand(rows, 3))
    kinds = {"s": torch.int64}, {"y": torch.float32, "z": torch.float32}
    op = custom_op("Two", lambda s, out: [y.fill_(2) for y in out] and None, *kinds, "s", host=["s"])
    both = graph(op, device, *kinds)({"s": torch.tensor([1, 2])})
    assert [y.tolist() for y in both.values()] == [[[2, 2]]] * 2


def test_an_optional_input_may_be_left_out(device):
    op = custom_op(
        "Plus", into(lambda x, b: x if b is None else x + b), {"x": torch.float32, "b": torch.float32},
        {"y": torch.float32}, "x", optional=["b"],
    )  # fmt: skip
    x = torch.ones(3, device=device)
    f = torch.float32
    assert graph(op, device, {"x": f, "b": f})({"x": x, "b": x})["y"].tolist() == [2, 2, 2]
    for given in (["x"], ["x", ""]):
        node = oh.make_node("Plus", given, ["y"], domain="fusebook")
        g = Graph(model([node], {"x": f}, {"y": f}), device=device, ops=[op])
        assert g({"x": x})["y"].tolist() == [1, 1, 1]


def test_empty_and_scalar_tensors(device):
    g = graph(unary(), device)
    for shape in ((0,), (3, 0), (), (2, 1, 1, 1, 1, 1)):
        x = torch.ones(shape, device=device)
        y = g({"x": x})["y"]
        assert y.shape == x.shape and bool((y == 2).all())


def test_nodes_follow_one_another_and_standard_ones(device):
    op = unary()
    nodes = [
        oh.make_node("Unary", ["x"], ["a"], domain="fusebook"),
        oh.make_node("Neg", ["a"], ["b"]),
        oh.make_node("Unary", ["b"], ["y"], domain="fusebook"),
    ]
    f = torch.float32
    g = Graph(model(nodes, {"x": f}, {"y": f}), device=device, ops=[op])
    x = torch.randn(1000, device=device)
    assert torch.equal(g({"x": x})["y"], x * -4)


def refused(message, call, *arguments):
    """`call` fails with an error of ONNX Runtime that says `message`, in one line."""
    with pytest.raises(Exception, match=message) as raised:
        call(*arguments)
    assert type(raised.value).__module__.startswith("onnxruntime") or isinstance(raised.value, RuntimeError)
    assert "\n" not in str(raised.value).strip() and "\ufffd" not in str(raised.value)


def test_what_a_launcher_raises_is_an_error_of_onnx_runtime(device):
    x = torch.ones(3, device=device)

    def fails(x, out):
        raise ValueError("an é that is lost\nand more")

    refused("Unary: ValueError: an é that is lost", graph(unary(launcher=fails), device), {"x": x})
    g = graph(unary(launcher=lambda x, out: 1 // 0), device)
    for _ in range(3):
        refused("Unary: ZeroDivisionError", g, {"x": x})

    def interrupted(x, out):
        raise KeyboardInterrupt

    refused("Unary: KeyboardInterrupt", graph(unary(launcher=interrupted), device), {"x": x})
    # What is too long is cut, and no letter of two bytes in half: one of the two begins at an odd place.
    for begin in ("", "x"):
        long = unary(lambda x, b=begin: exec("raise ValueError(b + 'é' * 9999)", {"b": b}))
        refused(f"Unary: ValueError: {begin}é{{300}}", graph(long, device), {"x": x})

    class Mute(Exception):
        def __str__(self):
            raise ValueError

    # What cannot be written as it is, and what cannot be written.
    for error, said in ((OSError("\udcff is lost"), r"OSError: .udcff is lost"), (Mute(), "Mute")):
        refused(f"Unary: {said}", graph(unary(lambda x, e=error: exec("raise e", {"e": e})), device), {"x": x})


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("when", ["before", "within"])
def test_autograd_sees_what_a_launcher_wrote(when, fails, device):
    x, c, w = torch.ones(3, device=device), torch.ones(3, device=device), torch.ones(3, device=device).requires_grad_()
    losses = [(w * c).sum()] if when == "before" else []  # which keep c for the gradient of w

    def launcher(x, out):
        with torch.enable_grad():
            losses.append((w * c).sum())
        out.fill_(7)
        if fails:
            raise ValueError("too late")

    with pytest.raises(Exception, match="too late") if fails else contextlib.nullcontext():
        graph(unary(launcher=launcher), device)({"x": x}, {"y": c})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device and onnxruntime-gpu")
def test_a_run_that_fails_is_waited_for_too():
    """Else its first node would write into what the next tensor has of the memory."""
    f, failing = torch.float32, unary(launcher=lambda x, out: 1 // 0, types={"T": (torch.float32,)})
    first = custom_op("First", into(lambda x: x * 2), {"x": f}, {"y": f}, "x")
    nodes = [oh.make_node("First", ["x"], ["y"], domain="fusebook")]
    nodes += [oh.make_node("Unary", ["y"], ["z"], domain="fusebook")]
    g = Graph(model(nodes, {"x": f}, {"y": f, "z": f}), device="cuda", ops=[first, failing])
    x, wrong = torch.ones(1 << 20, device="cuda"), 0
    for _ in range(20):
        y = torch.empty_like(x)
        torch.cuda._sleep(20_000_000)  # the run waits for it
        with pytest.raises(Exception, match="ZeroDivisionError"):
            g({"x": x}, {"y": y})
        del y
        wrong += int((torch.full_like(x, 7) != 7).any())
    assert not wrong


@pytest.mark.skipif(not CUDA or torch.cuda.device_count() < 2, reason="needs two CUDA devices and onnxruntime-gpu")
def test_an_operator_whose_inputs_are_on_the_host_runs_on_the_device_of_its_graph():
    seen, kinds = [], ({"n": torch.int64}, {"y": torch.float32})

    def launcher(n, out):
        seen.append((torch.cuda.current_device(), out.device.index, torch.cuda.current_stream().cuda_stream))
        out.fill_(int(n))

    op = custom_op("FromHost", launcher, *kinds, lambda n: (3,), host=["n"])
    g = graph(op, "cuda:1", *kinds)
    assert g({"n": torch.tensor([5])})["y"].tolist() == [5.0] * 3
    assert seen == [(1, 1, g.stream.cuda_stream)]


def test_a_callback_that_fails_where_nothing_is_caught_is_an_error(device, monkeypatch):
    """As by Ctrl-C outside of the function's own code."""
    g = graph(unary(launcher=lambda x, out: 1 // 0), device)
    monkeypatch.setattr(custom, "_say", lambda *_: 1 // 0)
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    refused("the Python function behind Unary could not be called", g, {"x": torch.ones(3, device=device)})


def test_what_a_launcher_must_return(device):
    x = torch.ones(3, device=device)
    f = torch.float32
    two = {"inputs": {"x": f}, "outputs": {"a": f, "b": f}, "types": {}}
    wanted = ({"x": f}, {"a": f, "b": f})
    op = custom_op("Pair", lambda x: x, **two)
    refused(r"expected 2 outputs \(a, b\) from the launcher, got 1", graph(op, device, *wanted), {"x": x})
    op = custom_op("Pair", lambda x: (x, None), **two)
    message = "expected the launcher to return a tensor with memory for b, got a NoneType"
    refused(message, graph(op, device, *wanted), {"x": x})
    op = custom_op("Pair", lambda x, out: None, shape=lambda x: x.shape, **two)
    refused("expected 2 shapes, got 1", graph(op, device, *wanted), {"x": x})
    op = unary(launcher=lambda x, out: x * 2)
    refused("expected the launcher to write y into the memory given as out", graph(op, device), {"x": x})
    for write in (lambda x, out: out.resize_(2).fill_(1), lambda x, out: setattr(out, "data", x * 2)):
        refused("expected the launcher to write y into the memory", graph(unary(launcher=write), device), {"x": x})
    for view in (torch.t, torch._neg_view, lambda y: y.view(torch.int32)):  # of the memory's address and shape
        op = unary(launcher=lambda x, out, v=view: v(torch.mul(x, 2, out=out)))
        refused("expected the launcher to write y into the memory", graph(op, device), {"x": x.expand(3, 3)})
    for axes in (17, 65):
        op = unary(launcher=lambda x, n=axes: x.view([1] * n), shape=None)
        refused(f"expected outputs of at most 16 axes, got {axes}", graph(op, device), {"x": x[:1].clone()})
    for shape in (3, None, (1.5,), "ab", [3, (2,)]):
        op = unary(shape=lambda x, s=shape: s)
        refused("expected a tuple of sizes from shape, or one an output, got", graph(op, device), {"x": x})
    op = unary(shape=lambda x: (np.int64(3),))
    assert graph(op, device)({"x": x})["y"].tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError):
        graph(unary(launcher=lambda x: torch.complex(x, x), shape=None), device)({"x": x})
    whole = custom_op("Whole", lambda x: x / 2, {"x": f}, {"y": torch.int64})
    message = "expected the launcher to return y as torch.int64, got torch.float32"
    refused(message, graph(whole, device, {"x": f}, {"y": torch.int64}), {"x": x})
    op = unary(shape=lambda x: (2**64,), launcher=lambda x, out: None)
    refused("expected sizes from 0 up in a shape, got .18446744073709551616", graph(op, device), {"x": x})
    op = unary(shape=lambda x: (-1,))
    refused("expected sizes from 0 up in a shape, got", graph(op, device), {"x": x})
    op = unary(shape=lambda x: (2**60,), launcher=lambda x, out: None)
    with pytest.raises(RuntimeError):  # ONNX Runtime's own words: it cannot allocate that
        graph(op, device)({"x": x})


def without_memory(device):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    x = torch.ones(3, device=device)
    given_back = x.clone()
    given_back.untyped_storage().resize_(8)
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x)
    nested = torch.nested.nested_tensor([x, x[1:]])
    return fake, given_back, torch._to_functional_tensor(x), TwoTensor(x, x), x.to_sparse(), nested


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_result_without_memory_is_refused(device):
    for result in without_memory(device):
        message = f"expected the launcher to return a tensor with memory for y, got a {type(result).__name__}"
        g = graph(unary(launcher=lambda x, r=result: r, shape=None), device)
        refused(f"{message} without", g, {"x": torch.ones(3, device=device)})


@pytest.mark.parametrize("shape", ["x", None])
def test_a_launcher_runs_outside_of_dispatch_modes(shape):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    given = {"x": np.arange(4, dtype=np.float32)}
    options = ort.SessionOptions()
    register(options, unary() if shape else unary(launcher=lambda x: x * 2, shape=None))
    f = {"x": torch.float32}, {"y": torch.float32}
    session = ort.InferenceSession(one_node("Unary", *f).SerializeToString(), options)
    for real in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=real):
            assert session.run(None, given)[0].tolist() == [0, 2, 4, 6]
    traced = make_fx(lambda v: v + float(session.run(None, given)[0].sum()))(torch.ones(2))
    assert "copy" not in traced.code and traced(torch.ones(2)).tolist() == [13, 13]


def test_sizes_that_torch_cannot_count_are_refused(device):
    """Torch refuses them too, and frees twice what it was handed."""
    sizes, x = (0, 2**62, 4), torch.ones(3, device=device)
    message = "expected sizes whose product is below 2..63"
    written = unary(shape=lambda x: sizes, launcher=lambda x, out: None)
    returned = unary(launcher=lambda x: torch.empty_strided(sizes, (1, 1, 1), device=device), shape=None)
    for op in (written, returned):
        refused(message, graph(op, device), {"x": x})
    nodes = [oh.make_node("ConstantOfShape", ["s"], ["x"]), oh.make_node("Unary", ["x"], ["y"], domain="fusebook")]
    given = Graph(model(nodes, {"s": torch.int64}, {"y": torch.float32}), device=device, ops=[unary()])
    refused(message, given, {"s": torch.tensor(sizes)})


def test_nodes_that_do_not_fit_are_refused(device):
    op = unary(attributes={"axis": -1}, launcher=lambda x, out, *, axis: out.copy_(x))
    f = torch.float32
    with pytest.raises(Exception, match="Unary"):
        graph(op, device, {"x": f, "z": f})
    two = custom_op("Two", into(torch.add), {"a": f, "b": f}, {"y": f}, "a")
    with pytest.raises(Exception, match="Two"):
        graph(two, device, {"a": f})
    with pytest.raises(Exception, match=r"tensor\(int64\)"):
        graph(op, device, {"x": torch.int64})
    for wrong, word in ((2.5, "float"), ("a", "string"), ([1, 2], "ints"), ([0.5], "floats")):
        refused(f"expected the attribute axis to be int, got {word}", lambda w=wrong: graph(op, device, axis=w))
    several = unary(attributes={"axes": (1, 2)}, launcher=lambda x, out, *, axes: out.copy_(x))
    refused("expected the attribute axes to be ints, got floats", lambda: graph(several, device, axes=[0.5]))
    with pytest.raises(Exception, match="Unary"):
        Graph(one_node("Unary", {"x": f}, {"y": f}), device=device, ops=[two])


def test_descriptions_that_contradict_themselves_are_refused():
    f = torch.float32
    one = {"inputs": {"x": f}, "outputs": {"y": f}, "launcher": lambda x, out: None, "shape": "x"}
    wrong = [
        (ValueError, "a name such as", {"name": "no name"}),
        *(
            (ValueError, f"optimizer does not know, got {name}, .* call it My{name}", {"name": name})
            for name in ("Identity", "Clip", "If", "MatMulInteger", "QuantizeLinear", "Shape", "Size", "Squeeze")
        ),
        (TypeError, "launcher to be a function, got int", {"launcher": 3}),
        (ValueError, "at least one output", {"outputs": {}}),
        (ValueError, r"the type of x to be a torch dtype \(float32, .*\) or one of types", {"inputs": {"x": "T"}}),
        (
            ValueError,
            r"the type of x to be a torch dtype .*, got torch.uint16; choose",
            {"inputs": {"x": torch.uint16}},
        ),
        (TypeError, "inputs to map names to types, got list; pass a dict", {"inputs": ["x"]}),
        (TypeError, "outputs to map names to types, got NoneType", {"outputs": None}),
        (TypeError, "types to map names to types, got list", {"types": [("T", FLOATS)]}),
        (TypeError, r"inputs to map names to types, got \[1\]", {"inputs": {1: torch.float32}}),
        (TypeError, "attributes to map names to types, got ", {"attributes": {"a\0b": 1}}),
        (TypeError, "domain to be a str that can be printed, got ", {"domain": "a\0b"}),
        (TypeError, "host to list names of inputs, got 'x'", {"host": "x"}),
        (TypeError, r"a tuple of numbers, got \('a',\)", {"attributes": {"a": ("a",)}}),
        (TypeError, "an int of 64 bits, .* got 9223372036854775808", {"attributes": {"a": 2**63}}),
        (ValueError, "attributes without out", {"attributes": {"out": 1}}),
        (ValueError, r"types\['T'\] to list torch dtypes, got \(5,\)", {"types": {"T": 5}}),
        (ValueError, r"type of x to be a torch dtype .* got \[\]", {"inputs": {"x": []}}),
        (TypeError, "domain to be a str that can be printed, got 3", {"domain": 3}),
        (ValueError, "expected a domain of your own, got '', ", {"domain": ""}),
        (ValueError, "expected a domain of your own, got 'com.microsoft', ", {"domain": "com.microsoft"}),
        (ValueError, "list torch dtypes", {"types": {"T": (torch.complex64,)}}),
        (ValueError, "each type of an output to be that of an input", {"outputs": {"y": "T"}, "types": {"T": (f,)}}),
        (ValueError, "host to name inputs", {"host": ["s"]}),
        (ValueError, "optional to name inputs", {"optional": ["s"]}),
        (ValueError, "shape to name an input", {"shape": "s"}),
        (ValueError, r"shape to name an input .* got \(2, 3\)", {"shape": (2, 3)}),
        (ValueError, "take out=", {"launcher": lambda x: x}),
        (TypeError, "attribute a to be an int", {"attributes": {"a": None}}),
        (ValueError, "at most 32", {"inputs": {f"x{i}": f for i in range(33)}, "shape": "x0"}),
    ]
    for error, message, given in wrong:
        with pytest.raises(error, match=message) as raised:
            custom_op(**{"name": "Some", **one, **given})
        assert "\n" not in str(raised.value)
    op = unary(types={"T": f})  # one type is a list of one
    with pytest.raises(TypeError, match="ops to be a list of operators, got one operator"):
        Graph(one_node("Unary", {"x": f}, {"y": f}), device="cpu", ops=op)
    with pytest.raises(TypeError, match="operators from onnx.custom_op, got str"):
        register(ort.SessionOptions(), "Unary")
    with pytest.raises(ValueError, match="names that differ"):
        register(ort.SessionOptions(), op, unary())


def test_operators_of_one_name_in_different_sessions_and_several_domains_in_one():
    x = torch.ones(2)
    twice, thrice = unary(), unary(lambda x: x * 3)
    assert [graph(op)({"x": x})["y"][0].item() for op in (twice, thrice, twice)] == [2, 3, 2]
    f = torch.float32
    there = custom_op("Unary", into(lambda x: x + 1), {"x": f}, {"y": f}, "x", domain="elsewhere")
    nodes = [
        oh.make_node("Unary", ["x"], ["a"], domain="fusebook"),
        oh.make_node("Unary", ["a"], ["y"], domain="elsewhere"),
    ]
    proto = model(nodes, {"x": f}, {"y": f})
    proto.opset_import.append(oh.make_opsetid("elsewhere", 1))
    assert Graph(proto, device="cpu", ops=[twice, there])({"x": x})["y"][0].item() == 3


def test_a_pickled_operator_takes_nothing_of_its_process_along():
    x = torch.ones(2)
    op = custom_op("Unary", torch.neg, {"x": "T"}, {"y": "T"}, types={"T": FLOATS})
    assert graph(op)({"x": x})["y"][0].item() == -1
    assert [repr(o) for o in pickle.loads(pickle.dumps(NODES + NORMS + LOSSES))] == [*map(repr, NODES + NORMS + LOSSES)]
    for copied in (pickle.loads(pickle.dumps(op)), copy.deepcopy(op)):
        assert copied.number != op.number and not copied._overloads
        assert graph(copied)({"x": x})["y"][0].item() == -1 and repr(copied) == repr(op)


def test_a_reload_is_refused_and_changes_nothing(monkeypatch):
    made = graph(unary())
    with pytest.raises(ImportError, match="expected one import in a process, got a reload; start the process again"):
        importlib.reload(custom)
    for module in (custom.__name__, "fusebook.kernels._call"):
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError, match="expected one import in a process, got a reload; start the process again"):
        importlib.import_module(custom.__name__)
    assert made({"x": torch.ones(2)})["y"].tolist() == [2, 2]


def test_a_domain_comes_once_to_a_session():
    options = ort.SessionOptions()
    with pytest.raises(TypeError, match="expected options to be onnxruntime.SessionOptions, got NoneType"):
        register(None, unary())
    register(options, unary())
    register(options, unary())
    proto = one_node("Unary", {"x": torch.float32}, {"y": torch.float32}).SerializeToString()
    with pytest.raises(Exception, match="Domain already set"):
        ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def test_sessions_and_runs_leave_nothing_behind(device):
    seen = []

    def launcher(x, out):
        seen.append(weakref.ref(x))
        out.copy_(x)

    def fails(x, out):
        seen.append(weakref.ref(out))
        raise ValueError

    good, bad = unary(launcher=launcher), unary(launcher=fails)
    x = torch.ones(1000, device=device)
    gc.collect()  # sessions of other tests
    before = len(custom._KERNELS)
    for _ in range(5):
        g, b = graph(good, device), graph(bad, device)
        assert len(custom._KERNELS) == before + 2
        g({"x": x})
        with pytest.raises(RuntimeError):
            b({"x": x})
        del g, b
        gc.collect()
        assert len(custom._KERNELS) == before
    assert len(seen) == 10 and [ref() for ref in seen] == [None] * 10
    bound = graph(unary(lambda x: x), device).bind({"x": x})
    for _ in range(500):
        bound()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20_000):  # a struct of some 200 bytes for each tensor
        bound()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 4096  # KiB


def test_an_operator_lives_as_long_as_options_and_sessions_with_it():
    op, f = unary(), torch.float32
    kept, options = weakref.ref(op), ort.SessionOptions()
    register(options, op)
    proto = one_node("Unary", {"x": f}, {"y": f})
    del op
    gc.collect()
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    del options
    gc.collect()
    session.set_providers(["CPUExecutionProvider"])  # makes the session once more
    assert session.run(None, {"x": np.ones(2, np.float32)})[0].tolist() == [2, 2]
    del session
    gc.collect()
    assert kept() is None


def test_a_tensor_that_is_kept_crashes_nothing():
    kept = []
    g = graph(unary(launcher=lambda x, out: kept.extend([x, out]) or out.copy_(x)))
    for _ in range(3):
        g({"x": torch.ones(10)})
    del g
    gc.collect()
    assert [t.shape for t in kept] == [(10,)] * 6
    kept.clear()


def test_threads_that_come_first_load_the_library_once(device, monkeypatch):
    """Or each would have a lock of its own, and register what another has chosen."""
    load, loaded, found = custom._Shim, [], {}

    def slowly():
        loaded.append(None)
        time.sleep(0.05)
        return load()

    def make(i):
        found[i] = graph(unary(lambda x: x + i), device)({"x": torch.zeros(3, device=device)})["y"].tolist()

    monkeypatch.setattr(custom, "_Shim", slowly)
    monkeypatch.setattr(custom, "_shim", functools.cache(custom._shim.__wrapped__))
    threads = [threading.Thread(target=make, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 1 and found == {i: [i] * 3 for i in range(8)}


def test_torch_compile_does_not_follow_into_a_kernel(device, monkeypatch):
    from torch._dynamo.symbolic_convert import InstructionTranslator

    traced, begin = [], InstructionTranslator.__init__

    def recorded(self, *given, **more):
        begin(self, *given, **more)
        traced.append(self.f_code.co_name)

    monkeypatch.setattr(InstructionTranslator, "__init__", recorded)
    torch._dynamo.reset()
    made = Graph(one_node("Softmax", {"x": torch.float32}, {"y": torch.float32}), device=device, ops=NODES)
    x = torch.randn(2, 3, device=device)
    compiled = torch.compile(lambda x: made({"x": x * 1})["y"] + 1, backend="eager")
    torch.testing.assert_close(compiled(x), torch.softmax(x, -1) + 1)
    assert traced and "_compute" not in traced


def test_threads_share_a_session(device):
    g = graph(unary(), device)
    wrong = []

    def work(value):
        # A session on a GPU has one stream, and a binding one set of tensors: each thread brings its own session.
        mine = g if device == "cpu" else graph(unary(), device)
        x = torch.full((256,), float(value), device=device)
        bound = mine.bind({"x": x})
        for _ in range(50):
            if not torch.equal(bound()["y"], x * 2):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device and onnxruntime-gpu")
def test_a_launcher_runs_on_the_stream_of_onnx_runtime_and_beside_others():
    streams = []
    op = unary(launcher=lambda x, out: streams.append(torch.cuda.current_stream()) or torch.mul(x, 2, out=out))
    x = torch.ones(1000, device="cuda")
    g = graph(op, "cuda")
    bound = g.bind({"x": x})
    bound()
    assert streams[0].cuda_stream == g.stream.cuda_stream
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    other = torch.cuda.Stream()
    big = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(5):
            big @ big
        busy = torch.cuda.Event()
        busy.record()
    bound()
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device and onnxruntime-gpu")
def test_ctrl_c_leaves_the_current_stream(monkeypatch):
    g, real, before = graph(unary(), "cuda"), custom._set_stream, torch.cuda.current_stream()

    def interrupted(*stream):
        real(*stream)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(custom, "_set_stream", interrupted)
        refused("KeyboardInterrupt", g, {"x": torch.ones(3, device="cuda")})
    assert torch.cuda.current_stream() == before


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device and onnxruntime-gpu")
def test_what_a_launcher_allocates_stays_while_its_graph_can_be_replayed():
    op = unary(lambda x: (x * 3) - x)
    x, y = torch.randn(2, 2**20, device="cuda").unbind()
    proto = one_node("Unary", {"x": torch.float32}, {"y": torch.float32})
    graph = Graph(proto, ops=[op], options={"enable_cuda_graph": "1"})
    bound = graph.bind({"x": x}, {"y": y})
    for _ in range(3):
        bound()
    with torch.cuda.stream(graph.stream):  # memory that is free goes to its own stream first
        junk = [torch.full_like(x, 7.0) for _ in range(8)]
    x.normal_()
    bound()
    torch.testing.assert_close(y, x * 2)
    assert all(bool((j == 7).all()) for j in junk)


# The library ---------------------------------------------------------------------------------------------------------


def test_without_a_compiler_there_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEBOOK_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="found no C compiler .*; install gcc"):
        custom._library_path()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="found no C compiler \\(no-such-compiler\\)"):
        custom._library_path()


def test_a_compiler_that_fails_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEBOOK_CACHE", str(tmp_path))
    source = tmp_path / "wrong.c"
    source.write_text("int f(void) { return }\n")
    with pytest.raises(RuntimeError, match="failed: .*error: .*; set CC"):
        custom.compile_c([source], tmp_path / "made.so")
    assert [f.name for f in tmp_path.iterdir()] == ["wrong.c"]
    compiler = tmp_path / "compiler"
    compiler.touch(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(RuntimeError, match="cannot run .*compiler .Exec format error.; set CC"):
        custom.compile_c([source], tmp_path / "made.so")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", "./compiler")
    for says, message in (
        ("printf 'no room: \\377' >&2; exit 1", "no room: "), ("exit 3", "it returned 3; set CC"),
        ("echo; echo one >&2; echo two >&2; exit 1", "one; set CC"), ("exit 0", "it returned 0 and wrote nothing;"),
    ):  # fmt: skip
        compiler.write_text(f"#!/bin/sh\n{says}\n")
        with pytest.raises(RuntimeError, match=f"compiler failed: {message}"):
            custom.compile_c([source], tmp_path / "made.so", folder=pathlib.Path("/"))


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEBOOK_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.raises(RuntimeError, match="cannot write .*folder.* .*; set FUSEBOOK_CACHE to a folder that can be"):
        custom._library_path()
    monkeypatch.setenv("FUSEBOOK_CACHE", "x" * 300)
    with pytest.raises(RuntimeError, match="cannot write .*xxx.* .*too long.; set FUSEBOOK_CACHE"):
        custom._library_path()


def test_a_cache_may_be_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEBOOK_CACHE", ".")
    monkeypatch.chdir(tmp_path)
    path = custom._library_path()  # of a name alone, the system looks in its own folders
    assert path.is_absolute() and path.exists() and path.parent.samefile(tmp_path)


def test_the_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEBOOK_CACHE", str(tmp_path))
    first = custom._library_path()
    at = first.stat().st_mtime_ns
    assert custom._library_path() == first and first.stat().st_mtime_ns == at
    assert [f.name for f in tmp_path.iterdir()] == [first.name]


def test_an_onnx_runtime_that_is_too_old_is_told_so():
    (message,) = registered_by_an_old_onnx_runtime(custom._library_path())
    assert message == "fusebook: needs ONNX Runtime 1.16 or later, got 1.10.0; install a later one"


def test_the_shim_is_not_registered_by_hand():
    unary()._defined()
    with pytest.raises(Exception, match="registered by fusebook.ort.register"):
        ort.SessionOptions().register_custom_ops_library(str(custom._library_path()))


def test_a_library_may_lie_in_the_working_directory_and_in_a_folder_of_any_name(monkeypatch, tmp_path):
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    library = pathlib.Path(shutil.copy(custom._library_path(), odd / "made.so"))
    monkeypatch.chdir(odd)
    for path in (library, os.fsencode(library), "made.so"):
        with pytest.raises(Exception, match="registered by fusebook.ort.register"):
            Graph(b"", device="cpu", library=path)


def test_a_session_may_outlive_the_interpreter(tmp_path):
    code = """
import atexit, builtins, torch
from test_onnx_custom import graph, unary
builtins.kept = graph(unary())
builtins.kept({"x": torch.ones(3)})
atexit._run_exitfuncs()
try:
    builtins.kept({"x": torch.ones(3)})
except Exception as error:
    print(error)
"""
    here = pathlib.Path(__file__).parent
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "src")])}
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=path, check=False)
    assert end.returncode == 0, end.stderr[-2000:]
    assert "Python has ended, and its functions with it" in end.stdout
