"""An ONNX graph as a function of torch tensors. On a machine with a GPU both providers are tried."""

import copy
import gc
import os
import pathlib
import pickle
import shutil
import threading
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx.helper as oh  # noqa: E402

from fusebook.cards.scatter import _onnx_model  # noqa: E402
from fusebook.ort import Graph, export  # noqa: E402
from fusebook.ort import graph as graphs_of_torch  # noqa: E402
from graphs import KINDS, OLD, model, one_node  # noqa: E402


def matmul():
    f = torch.float32
    nodes = [oh.make_node("MatMul", ["a", "b"], ["c"]), oh.make_node("Greater", ["c", "a"], ["d"])]
    return model(nodes, {"a": f, "b": f}, {"c": f, "d": torch.bool}, ["n", "n"])


def usable(device):
    try:
        return Graph(matmul(), device=device)
    except RuntimeError as why:
        pytest.skip(str(why))


def test_a_graph_is_a_function(device):
    graph = usable(device)
    a, b = torch.randn(5, 5, device=device), torch.randn(5, 5, device=device)
    out = graph({"a": a, "b": b.T})
    torch.testing.assert_close(out["c"], a @ b.T)
    assert torch.equal(out["d"], out["c"] > a)
    assert out["c"].device.type == device and out["d"].dtype == torch.bool


def test_bound_memory_is_read_anew_and_written_in_place(device):
    graph = usable(device)
    a, b, c = (torch.randn(4, 4, device=device) for _ in range(3))
    d = torch.zeros(4, 4, dtype=torch.bool, device=device)
    run = graph.bind({"a": a, "b": b}, {"c": c, "d": d})
    for _ in range(3):
        a.normal_()
        out = run()
        assert out["c"] is c
        torch.testing.assert_close(c, a @ b)
        assert torch.equal(d, c > a)


def negation():
    return one_node("Neg", {"x": torch.float32}, {"y": torch.float32}, domain="")


def test_bound_memory_of_the_cpu_is_read_anew(device):
    usable(device)
    x = torch.ones(4)
    bound = Graph(negation(), device=device).bind({"x": x})
    assert bound()["y"].tolist() == [-1.0] * 4
    x.fill_(5)
    assert bound()["y"].tolist() == [-5.0] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", ["called", "bound", "captured"])
def test_pinned_memory_may_be_written_after_it_is_read(how):
    usable("cuda")
    graph, x = Graph(negation(), options={"enable_cuda_graph": str(int(how == "captured"))}), torch.empty(1 << 20)
    x = x.pin_memory()
    for i in range(1 if how == "captured" else 5):
        x.fill_(i)
        torch.cuda._sleep(100_000_000)  # the copy waits for it
        run = graph.bind({"x": x}) if how != "called" else lambda: graph({"x": x})
        if how == "captured":
            x.fill_(-1)
        out = run()["y"]
        x.fill_(-1)
        assert torch.equal(out, torch.full_like(out, -i))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_holds_an_output_when_the_run_returns():
    usable("cuda")
    graph, x = Graph(negation()), torch.ones(1 << 20, device="cuda")
    y = torch.zeros(1 << 20).pin_memory()
    for run in (lambda: graph({"x": x}, {"y": y}), graph.bind({"x": x}, {"y": y})):
        y.fill_(0)
        torch.cuda._sleep(100_000_000)  # the run waits for it
        run()
        assert y[-1] == -1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_inputs_on_the_cpu_wait_for_readers_of_dropped_results():
    """ONNX Runtime copies them on its own stream, to memory that it had for results."""
    usable("cuda")
    graph, x = Graph(negation()), torch.ones(1 << 20)
    for _ in range(3):
        found = [graph({"x": x})["y"] for _ in range(4)]
        torch.cuda._sleep(100_000_000)
        seen = [y * 1 for y in found]
        del found
        held = [graph.bind({"x": torch.full_like(x, 7)}) for _ in range(4)]
        torch.cuda.synchronize()
        del held
        assert [int((y != -1).any()) for y in seen] == [0] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bound", [False, True], ids=["called", "bound"])
def test_what_a_node_reads_on_the_cpu_may_be_on_the_gpu(bound):
    """ONNX Runtime copies it when it is bound."""
    usable("cuda")
    proto = model(
        [oh.make_node("Slice", ["x", "a", "b"], ["y"])],
        {"x": torch.float32, "a": torch.int64, "b": torch.int64},
        {"y": torch.float32},
    )
    x, a, b = torch.arange(4.0, device="cuda"), *torch.tensor([[0], [1]], device="cuda").unbind()
    graph, given = Graph(proto), {"x": x, "a": a, "b": b}
    run = graph.bind(given) if bound else lambda: graph(given)
    for i in range(4):
        torch.cuda._sleep(20_000_000)
        a.fill_(i)
        b.fill_(i + 1)
        assert run()["y"].tolist() == [float(i)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_runs_once_and_reads_the_cpu_when_it_is_bound():
    usable("cuda")
    f = torch.float32
    proto = model([oh.make_node("Add", ["x", "b"], ["y"])], {"x": f, "b": f}, {"y": f, "b": f})
    x, b = torch.zeros(4, device="cuda"), torch.ones(4)
    run = Graph(proto, options={"enable_cuda_graph": "1"}).bind({"x": x, "b": b}, {"y": x})
    b.fill_(7)
    for i in range(1, 4):
        assert run()["b"].tolist() == [1.0] * 4
        assert x.tolist() == [float(i)] * 4  # a state that each run updates
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert x.tolist() == [4.0] * 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_current_device_stays():
    usable("cuda")
    graph, x = Graph(negation(), device="cuda:1"), torch.ones(3, device="cuda:1")
    assert torch.cuda.current_device() == 0
    for given in (x, x.cpu()):
        run = graph.bind({"x": given})
        assert torch.cuda.current_device() == 0
        for y in (run()["y"], graph({"x": given})["y"]):
            assert torch.cuda.current_device() == 0
            assert torch.equal(y, -x)


def test_some_outputs_may_be_given(device):
    graph = usable(device)
    a, c = torch.eye(3, device=device), torch.zeros(3, 3, device=device)
    out = graph({"a": a, "b": a}, {"c": c})
    assert out["c"] is c and torch.equal(c, a) and not out["d"].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_work_is_ordered_with_the_current_stream():
    graph = usable("cuda")
    a, b = torch.randn(2, 2048, 2048, device="cuda").unbind()
    run = graph.bind({"a": a, "b": b})
    other = torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    for stream in (torch.cuda.current_stream(), other):
        with torch.cuda.stream(stream):
            for _ in range(5):
                busy @ busy  # takes longer than the host needs to launch the graph
                a.normal_()
                c = run()["c"].clone()
                a.mul_(2)  # must not overtake the graph
                torch.testing.assert_close(c, (a / 2) @ b, atol=1e-2, rtol=1e-3)
    torch.cuda.synchronize()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tf32_is_off_unless_asked_for():
    usable("cuda")
    a, b = torch.randn(2, 512, 512, device="cuda").unbind()
    want = a.double() @ b.double()
    error = {
        tf32: (Graph(matmul(), tf32=tf32)({"a": a, "b": b})["c"] - want).abs().max().item() for tf32 in (False, True)
    }
    assert error[False] < 1e-3 < error[True]


def test_the_standard_chain_means_masked_scatter_nd(device):
    usable(device)
    graph = Graph(_onnx_model(torch.float32), device=device)
    k = torch.tensor([[3], [-1], [0], [3]], device=device)
    u = torch.arange(8.0, device=device).view(4, 2)
    y = graph({"shape": torch.tensor([5, 2]), "indices": k, "updates": u})["out"]
    assert y.tolist() == [[4.0, 5.0], [0.0, 0.0], [0.0, 0.0], [6.0, 8.0], [0.0, 0.0]]


def test_a_cpu_session_has_one_thread():
    graph = Graph(matmul(), device="cpu")
    assert graph.session.get_session_options().intra_op_num_threads == 1
    assert Graph(matmul(), device="cpu", threads=3).session.get_session_options().intra_op_num_threads == 3


def test_empty_tensors_and_bytes_and_files(tmp_path):
    file = tmp_path / "g.onnx"
    onnx.save(matmul(), file)
    a = torch.zeros(0, 0)
    for given in (matmul().SerializeToString(), file, str(file)):
        c = Graph(given, device="cpu")({"a": a, "b": a})["c"]
        assert c.shape == (0, 0) and c.stride() == a.stride()
    # A CUDA provider takes no null pointer, which such a tensor's address is.
    graph = Graph(matmul(), device="cpu")
    assert a.data_ptr() == 0 and graphs_of_torch._place(a, graph)[-1] != 0


def test_wrong_calls_are_refused_in_one_sentence(tmp_path):
    graph = Graph(matmul(), device="cpu")
    a = torch.zeros(2, 2)
    refused = [
        (ValueError, "inputs of a, b, got no b", {"a": a}, None),
        (ValueError, "unknown x", {"a": a, "b": a, "x": a}, None),
        (ValueError, "unknown y", {"a": a, "b": a}, {"y": a}),
        (TypeError, r"a to be tensor\(float\), got torch.float64", {"a": a.double(), "b": a}, None),
        (TypeError, "torch.Tensor, got ndarray", {"a": np.zeros((2, 2)), "b": a}, None),
        (ValueError, "contiguous", {"a": a, "b": a}, {"c": torch.zeros(2, 4)[:, ::2]}),
        (ValueError, "on cpu or the CPU, got meta", {"a": a.to("meta"), "b": a}, None),
        (TypeError, "inputs to map names to tensors, got list; pass a dict", [a, a], None),
        (TypeError, "outputs to map names to tensors, got Tensor", {"a": a, "b": a}, a),
        (ValueError, "memory for c without a gradient", {"a": a, "b": a}, {"c": a.clone().requires_grad_()}),
    ]
    for error, message, inputs, outputs in refused:
        with pytest.raises(error, match=message) as raised:
            graph(inputs, outputs)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="cpu or cuda"):
        Graph(matmul(), device="meta")
    for threads, error in ((-1, ValueError), (10**6, ValueError), ("2", TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="ort.Graph: expected threads .*; give 1, or 0 for one a core"):
            Graph(matmul(), device="cpu", threads=threads)
    for given in ({"options": [1]}, {"ops": None}, {"tf32": "no"}):
        with pytest.raises(TypeError, match=f"ort.Graph: expected {next(iter(given))} to (map|be)"):
            Graph(matmul(), device="cpu", **given)
    (tmp_path / "\udcff.onnx").touch()  # a byte that is no UTF-8
    for path in ("", tmp_path, tmp_path / "absent.onnx", tmp_path / "\udcff.onnx"):
        with pytest.raises(FileNotFoundError, match="ort.Graph: expected the path of a file, whose name is UTF-8, got"):
            Graph(path, device="cpu")
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        for session in (graph, graph.bind({"a": a, "b": a})):
            with pytest.raises(TypeError, match="ort.Graph: expected a session to stay where it is"):
                call(session)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_cuda_is_refused_in_one_sentence():
    with pytest.raises(RuntimeError, match="ort.Graph: expected a CUDA device, and torch finds none"):
        Graph(matmul(), device="cuda")


@pytest.mark.parametrize("kind", ["MatMul", "Add"])  # Add is folded, and MatMul packs its weights
def test_weights_in_another_file_are_found_beside_the_path(tmp_path, monkeypatch, kind):
    ir = pytest.importorskip("onnx_ir")
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    proto = one_node(kind, {"x": torch.float32, "w": torch.float32}, {"y": torch.float32}, domain="")
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    path = tmp_path / "g.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    x = torch.eye(2) if kind == "MatMul" else torch.zeros(2, 3)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    pathlib.Path("w.bin").write_bytes((w + 1).tobytes())  # of another model
    program = type("Own", (torch.onnx.ONNXProgram,), {})(ir.load(path), None)
    kept = program.model.graph.initializers["w"].const_value.numpy()
    for given in (path, onnx.load(path), ir.load(path), export.fuse(ir.load(path)), program):
        assert Graph(given, device="cpu")({"x": x})["y"].tolist() == w.tolist()
    assert kept.tolist() == w.tolist()  # the model is unchanged
    loaded = ir.load(path)
    Graph(loaded, device="cpu")
    assert loaded.graph.initializers["w"].const_value.raw is None  # the file is closed

    class Decoded(ir.ExternalTensor):
        def numpy(self):
            return w + 1

    value, of = loaded.graph.initializers["w"], loaded.graph.initializers["w"].const_value
    value.const_value = Decoded(
        of.location, of.offset, of.length, of.dtype, shape=of.shape, name="w", base_dir=of.base_dir
    )
    assert Graph(loaded, device="cpu")({"x": x})["y"].tolist() == (w + 1).tolist()
    (tmp_path / "short.onnx").write_bytes(path.read_bytes().replace(b"w.bin", b"s.bin"))
    (tmp_path / "s.bin").write_bytes(b"short")
    pathlib.Path("w.bin").unlink()
    (tmp_path / "w.bin").unlink()
    for given in (onnx.load(path, load_external_data=False), ir.load(path), tmp_path / "short.onnx"):
        with pytest.raises(ValueError, match="ort.Graph: expected weights within the model.*; pass the path, or load"):
            Graph(given, device="cpu")
    loaded = ir.load(path)
    os.mkfifo(tmp_path / "w.bin")
    with pytest.raises(ValueError, match="expected weights within the model.*w.bin, which is no file; pass the path"):
        Graph(loaded, device="cpu")  # which does not wait for someone to write


def test_weights_whose_file_was_written_again_are_refused(tmp_path):
    """The tensors still have their offsets in the old file, so onnx_ir does not read them."""
    ir = pytest.importorskip("onnx_ir")
    proto = one_node("Add", {"x": torch.float32, "w": torch.float32}, {"y": torch.float32}, domain="")
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(300, np.float32), "w"))
    path = tmp_path / "g.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    loaded = ir.load(path)
    ir.save(loaded, path, external_data="w.bin")
    with pytest.raises(ValueError, match="expected weights within the model"):
        Graph(loaded, device="cpu")


def test_an_error_that_is_its_own_cause_is_said_in_a_sentence():
    ir = pytest.importorskip("onnx_ir")

    def load():
        try:
            raise OSError("no such shard")
        except OSError as error:
            raise error from error  # a ring

    proto = one_node("Add", {"x": torch.float32, "w": torch.float32}, {"y": torch.float32}, domain="")
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "w"))
    lazy = ir.from_proto(proto)
    lazy.graph.initializers["w"].const_value = ir.LazyTensor(load, dtype=ir.DataType.FLOAT, shape=ir.Shape([3]))
    with pytest.raises(ValueError, match="expected a model that onnx_ir can take, .*: no such shard; see"):
        Graph(lazy, device="cpu")


@pytest.mark.parametrize("place", ["graph", "branch"])
def test_constants_in_another_file_are_those_of_the_model(tmp_path, monkeypatch, place):
    ir = pytest.importorskip("onnx_ir")
    f, w = oh.make_tensor_value_info("y", 1, [300]), onnx.numpy_helper.from_array(np.ones(300, np.float32), "w")
    nodes = [oh.make_node("Constant", [], ["y"], value=w)]
    if place == "branch":
        other = oh.make_node("Constant", [], ["y"], value=onnx.numpy_helper.from_array(np.zeros(300, np.float32)))
        branches = {f"{n}_branch": oh.make_graph(of, n, [], [f]) for n, of in (("then", nodes), ("else", [other]))}
        nodes = [oh.make_node("If", ["x"], ["y"], **branches)]
    proto = model(nodes, {"x": torch.bool}, {"y": torch.float32})
    path = tmp_path / "g.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0, convert_attribute=True)
    assert (tmp_path / "w.bin").stat().st_size >= 1200
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    pathlib.Path("w.bin").write_bytes(bytes((tmp_path / "w.bin").stat().st_size))
    loaded = ir.load(path)
    for given in (loaded, export.fuse(loaded)):
        assert Graph(given, device="cpu")({"x": torch.tensor(True)})["y"].tolist() == [1.0] * 300
    if place == "graph":
        shutil.copy(path, "g.onnx")
        other = ir.load("g.onnx").graph
        other.remove(node := other[0])
        function = ir.Function("own", "F", graph=ir.Graph([], [], nodes=[node], opset_imports={"": 18}), attributes=())
        loaded.functions[function.identifier()] = function
        with pytest.raises(
            ValueError, match="expected weights within the model.*of functions in files.*; pass the path"
        ):
            Graph(loaded, device="cpu")


def hands_on(given=()):
    """A decoder's step, whose cache is an input and an output."""
    f = torch.float32
    proto = model([oh.make_node("Add", ["x", "x"], ["y"])], {"x": f, "past": f}, {"y": f, "past": f})
    proto.graph.initializer.extend(given)
    return proto


def test_an_output_that_is_an_input_is_a_copy(device):
    usable(device)
    graph = Graph(hands_on(), device=device)
    x, past = torch.ones(64, device=device), torch.full((64, 2), 3.0, device=device)
    for given in (past[:, 0], past[:, 0].contiguous(), torch.full((64,), 3.0)):
        out = graph({"x": x, "past": given})
        gc.collect()
        junk = [torch.full((64,), 7.0, device=device) for _ in range(50)]
        assert out["past"].device.type == device and bool((out["past"] == 3).all()) and len(junk) == 50
        out["past"].zero_()
        assert bool((given == 3).all())
    bound = graph.bind({"x": x, "past": given})
    first = bound()["past"]
    given.fill_(4.0)
    assert bound()["past"][0] == 4 and first[0] == 3


def test_an_output_that_is_an_input_is_written_where_it_was_asked_for(device):
    usable(device)
    graph = Graph(hands_on(), device=device)
    x, past, memory = torch.ones(4, device=device), torch.full((4,), 3.0, device=device), torch.zeros(4, device=device)
    assert graph({"x": x, "past": past}, {"past": memory})["past"] is memory and memory.tolist() == [3.0] * 4
    out = graph({"x": x, "past": past}, {"past": past})
    assert out["past"] is past and past.tolist() == [3.0] * 4
    out = graph({"x": x, "past": past}, {"y": past})  # read before it is written over
    assert out["past"].tolist() == [3.0] * 4 and past.tolist() == [2.0] * 4
    with pytest.raises(ValueError, match=r"past of shape \[4\], as the input that it is, got \[3, 4\]"):
        graph({"x": x, "past": past}, {"past": torch.zeros(3, 4, device=device)})
    alone = Graph(model([], {"x": torch.float32}, {"x": torch.float32}), device=device)
    assert alone({"x": x})["x"].tolist() == [1.0] * 4


def test_an_initializer_that_is_an_input_may_be_given(device):
    usable(device)
    weights = [onnx.numpy_helper.from_array(np.full(4, 5, np.float32), "past")]
    graph = Graph(hands_on(weights), device=device)
    assert list(graph.inputs) == ["x"] and graph.defaults == {"past": "tensor(float)"}
    x = torch.ones(4, device=device)
    out = graph({"x": x})
    out["past"].zero_()
    assert graph({"x": x})["past"].tolist() == [5.0] * 4
    given = x * 7
    out = graph({"x": x, "past": given})["past"]
    assert out.tolist() == [7.0] * 4 and out.data_ptr() != given.data_ptr()
    with pytest.raises(ValueError, match="inputs of x, past, got unknown w"):
        graph({"x": x, "w": x})


def test_each_run_of_a_binding_has_outputs_of_its_own(device):
    usable(device)
    graph = Graph(one_node("NonZero", {"x": torch.float32}, {"y": torch.int64}, domain=""), device=device)
    x = torch.tensor([1.0, 0.0, 1.0, 1.0], device=device)
    bound = graph.bind({"x": x})
    first = bound()["y"]
    x[0] = 0
    assert bound()["y"].tolist() == [[2, 3]] and first.tolist() == [[0, 2, 3]]


@pytest.mark.parametrize("name", ["device_id", "user_compute_stream", "has_user_compute_stream"])
def test_options_of_the_device_and_stream_are_refused(name):
    with pytest.raises(ValueError, match=f"expected options without {name}, .*; leave it out"):
        Graph(matmul(), options={name: "1"})


def test_an_option_of_cuda_changes_nothing_on_the_cpu():
    proto = negation()
    graph = Graph(proto, device="cpu", options={"enable_cuda_graph": "1"})
    x = torch.ones(2)
    bound = graph.bind({"x": x})
    first = bound()["y"]
    x.fill_(2)
    assert bound()["y"].tolist() == [-2, -2] and first.tolist() == [-1, -1]


class AnyName(Mapping):
    """It lists one name, and has a tensor for every other, too."""

    def __getitem__(self, name):
        return torch.ones(2)

    def __iter__(self):
        return iter(["x"])

    def __len__(self):
        return 1


def test_the_names_of_a_mapping_are_those_that_it_lists():
    graph = Graph(negation(), device="cpu")
    assert graph(AnyName())["y"].tolist() == [-1, -1]


def test_a_call_that_is_traced_is_refused_and_one_that_is_compiled_is_made():
    graph, a = Graph(matmul(), device="cpu"), torch.eye(2)

    def call(x):
        return graph({"a": x * 1, "b": x})["c"] + 1

    with FakeTensorMode(), pytest.raises(NotImplementedError, match="ort.Graph: expected a call that is made, got"):
        graph({"a": a, "b": a})
    traces = [lambda ahead=ahead: make_fx(call, pre_dispatch=ahead)(a) for ahead in (False, True)]
    for trace in (lambda: torch.jit.trace(call, a), *traces):
        with pytest.raises(NotImplementedError, match="ort.Graph: expected a call that is made, got one under"):
            trace()
    for dynamic in (None, True):
        assert torch.equal(torch.compile(call, backend="eager", dynamic=dynamic)(a), a + 1)


def test_threads_share_a_binding():
    graph = Graph(negation(), device="cpu")
    bound, found = graph.bind({"x": torch.ones(10_000)}), []
    threads = [threading.Thread(target=lambda: found.extend(bound()["y"] for _ in range(200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({y.data_ptr() for y in found}) == 800 and all(bool((y == -1).all()) for y in found)


def without_memory():
    from torch.testing._internal.two_tensor import TwoTensor

    with FakeTensorMode():
        yield "fake", torch.ones(2, 2)
        yield "fake and empty", torch.ones(0, 2)
    yield "functional", torch._to_functional_tensor(torch.ones(2, 2))
    yield "wrapper", TwoTensor(torch.ones(2, 2), torch.ones(2, 2))
    yield "zero", torch._efficientzerotensor(2, 2)
    yield "sparse", torch.eye(2).to_sparse()
    yield "nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(2)])
    yield "jagged", torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    yield "mkldnn", torch.eye(2).to_mkldnn()
    yield "uninitialized", torch.nn.UninitializedParameter()
    for size in (0, 8):
        x = torch.ones(2, 2)
        x.untyped_storage().resize_(size)
        yield f"of {size} bytes", x


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_memory_is_refused_in_one_sentence():
    graph = Graph(matmul(), device="cpu")
    a = torch.eye(2)
    for name, x in without_memory():
        for call in (graph, graph.bind):
            for inputs, outputs in (({"a": a, "b": x}, {}), ({"a": a, "b": a}, {"c": x})):
                refused = pytest.raises(
                    (TypeError, NotImplementedError), match="[bc] to have memory of its own|got one under .* FakeTensor"
                )
                with refused as raised:
                    call(inputs, outputs)
                assert "\n" not in str(raised.value), name
    for wrap in (torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum()), torch.func.functionalize):
        with pytest.raises(TypeError, match="b to have memory of its own"):
            wrap(lambda x: graph({"a": a, "b": x})["c"])(torch.ones(3, 2, 2))


class Liar(torch.Tensor):
    """A tensor that says it is contiguous, and at another address."""

    def is_contiguous(self, *_, **__):
        return True

    def data_ptr(self):
        return torch.Tensor.data_ptr(self) + 4


def test_a_subclass_is_read_where_its_memory_is():
    graph = Graph(matmul(), device="cpu")
    a, want = torch.eye(2), torch.arange(4.0).view(2, 2)
    given, turned = want.clone().as_subclass(Liar), want.T.contiguous().T.as_subclass(Liar)
    memory = torch.zeros(2, 2)
    assert torch.equal(graph({"a": a, "b": given})["c"], want)
    assert torch.equal(graph({"a": a, "b": turned})["c"], want)
    graph.bind({"a": a, "b": given}, {"c": memory.as_subclass(Liar)})()
    assert torch.equal(memory, want)
    with pytest.raises(ValueError, match="expected b to be contiguous"):
        graph.bind({"a": a, "b": turned})
    bound = graph.bind({"a": a, "b": given})
    given.data = want.T.contiguous()
    with pytest.raises(RuntimeError, match="expected b to stay where it was bound"):
        bound()


def test_given_memory_without_a_history_may_have_none_later_either():
    graph, a = Graph(matmul(), device="cpu"), torch.eye(2)
    memory, weight = torch.zeros(2, 2), torch.ones(2, 2, requires_grad=True)
    bound = graph.bind({"a": a, "b": a}, {"c": memory})
    bound()
    memory.add_(weight)
    with pytest.raises(ValueError, match="expected memory for c without a gradient"):
        bound()
    with torch.no_grad():
        assert torch.equal(bound()["c"], a)


def test_calls_that_are_captured_and_other_bound_graphs_are_refused(monkeypatch):
    """A CPU graph replaces the CUDA graph here."""
    graph, a = Graph(matmul(), device="cpu"), torch.eye(2)
    bound, other = graph.bind({"a": a, "b": a}), graph.bind({"a": a, "b": a})
    monkeypatch.setattr(graph, "_fixed", True)
    with pytest.raises(RuntimeError, match="Non-zero status"):  # nothing is captured
        graph.bind({"a": torch.ones(2, 3), "b": a})()

    def run(*binding):  # another thread begins a run while the first one is captured
        with pytest.raises(ValueError, match="expected the bound graph that ran first"):
            other()
        return graphs_of_torch.Bound._run(bound, *binding)

    with monkeypatch.context() as during:
        during.setattr(bound, "_run", run)
        bound()
    with pytest.raises(ValueError, match="expected the bound graph that ran first"):
        other()
    bound()
    monkeypatch.setattr(graph, "stream", object())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (bound, lambda: graph.bind({"a": a, "b": a})):
        with pytest.raises(NotImplementedError, match="got one while a CUDA graph is captured"):
            call()


@pytest.mark.parametrize("real", [False, True])
def test_a_graph_made_under_a_fake_mode_runs_behind_it(real):
    with FakeTensorMode(allow_non_fake_inputs=real):
        graph = Graph(matmul(), device="cpu")
        with pytest.raises(NotImplementedError, match="call it outside of them"):
            graph({})
    a = torch.ones(0, 0)
    assert graph({"a": a, "b": a}, {"c": a.clone()})["c"].shape == (0, 0), "it has an address for no elements"


def test_views_parameters_and_subclasses_are_read_as_they_are():
    graph = Graph(matmul(), device="cpu")
    a = torch.eye(2)
    z = torch.complex(torch.ones(2, 2), torch.arange(4.0).view(2, 2))
    negated = z.conj().imag
    few = torch.arange(4.0)
    found = {
        "negated": (negated, -z.imag),
        "expanded": (torch.ones(1, 2).expand(2, 2), torch.ones(2, 2)),
        "parameter": (torch.nn.Parameter(few.view(2, 2)), few.view(2, 2)),
        "subclass": (few.view(2, 2).as_subclass(type("Some", (torch.Tensor,), {})), few.view(2, 2)),
        "lazy": (torch._lazy_clone(few.view(2, 2)), few.view(2, 2)),
    }
    for name, (x, want) in found.items():
        out = graph({"a": a, "b": x})["c"]
        assert torch.equal(out, want) and not out.requires_grad, name
    negated = torch.ones(1, 1, dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match="resolve_neg"):
        graph.bind({"a": negated, "b": negated})


CHANGES = {
    "memory": lambda x: setattr(x, "data", torch.zeros(2, 2)),
    "dtype": lambda x: setattr(x, "data", x.data.view(torch.int32)),
    "shape": lambda x: x.resize_(1, 2),
    "strides": torch.Tensor.t_,
    "sign": lambda x: setattr(x, "data", torch._neg_view(x.data)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tensor_that_changes_after_it_was_bound_is_not_read(change):
    graph = Graph(matmul(), device="cpu")
    for moved in ("a", "c"):
        given = {name: torch.eye(2) for name in "abc"}
        bound = graph.bind({"a": given["a"], "b": given["b"]}, {"c": given["c"]})
        bound()
        change(given[moved])
        with pytest.raises(RuntimeError, match=f"expected {moved} to stay where it was bound"):
            bound()


def test_memory_that_shrinks_is_not_read_at_its_old_address():
    graph = Graph(matmul(), device="cpu")
    for _ in range(50):
        a, b = torch.eye(8), torch.eye(8)
        bound, address, memory = graph.bind({"a": a, "b": b}), a.data_ptr(), a.untyped_storage()
        for size in (128, 64, 32, 16):  # the allocator gives an address again that it has got back
            memory.resize_(size)
            if memory.data_ptr() == address:
                break
        with pytest.raises(RuntimeError, match="expected a to stay where it was bound"):
            bound()


def test_outputs_do_not_overlap():
    f = torch.float32
    nodes = [oh.make_node("Neg", ["x"], ["a"]), oh.make_node("Abs", ["x"], ["b"])]
    graph = Graph(model(nodes, {"x": f}, {"a": f, "b": f}), device="cpu")
    x, memory = torch.ones(4), torch.zeros(12)
    for start in range(9):
        given = {"b": memory[4:8], "a": memory[start : start + 4]}
        if start in (0, 8):
            assert graph({"x": x}, given)["a"].tolist() == [-1.0] * 4
            continue
        with pytest.raises(ValueError, match="memory for a that holds nothing else, got some of b's"):
            graph({"x": x}, given)
        if start != 4:
            with pytest.raises(ValueError, match="memory for a that holds nothing else, got some of x's"):
                graph({"x": memory[4:8]}, {"a": memory[start : start + 4]})
    assert graph({"x": x}, {"a": x})["a"] is x and x.tolist() == [-1.0] * 4


def test_autograd_sees_that_an_output_was_written():
    graph = Graph(matmul(), device="cpu")
    a, c = torch.eye(2), torch.ones(2, 2)
    y = (torch.ones(2, 2, requires_grad=True) * c).sum()
    graph({"a": a, "b": a}, {"c": c})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        c = torch.ones(2, 2)
    assert torch.equal(graph({"a": a, "b": a}, {"c": c})["c"], a)


@pytest.mark.parametrize("bound", [False, True])
def test_autograd_sees_a_write_within_a_compiled_function(bound):
    graph, x, y = Graph(negation(), device="cpu"), torch.ones(3), torch.full((3,), 2.0)
    run = graph.bind({"x": x}, {"y": y}) if bound else lambda: graph({"x": x}, {"y": y})
    loss = (torch.ones(3, requires_grad=True) * y).sum()
    torch.compile(run, backend="aot_eager")()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_knows_of_a_write_before_it_is_made(monkeypatch):
    """Ctrl-C may come as soon as the memory is written."""
    run, x, y, seen = graphs_of_torch.Bound._run, torch.ones(3), torch.zeros(3), []
    monkeypatch.setattr(graphs_of_torch.Bound, "_run", lambda *args: seen.append(y._version) or run(*args))
    bound, before = Graph(negation(), device="cpu").bind({"x": x}, {"y": y}), y._version
    bound()
    assert seen == [before + 1]


@pytest.mark.parametrize("dtype", graphs_of_torch._NAMES, ids=lambda d: str(d)[6:])
def test_inputs_and_outputs_of_each_dtype(dtype):
    number = graphs_of_torch._NUMBERS[dtype]
    assert KINDS.get(dtype, number) == number
    infos = [oh.make_tensor_value_info(name, number, ["n"]) for name in "xy"]
    graph = oh.make_graph([oh.make_node("Identity", ["x"], ["y"])], "g", infos[:1], infos[1:])
    proto = oh.make_model(graph, ir_version=10, opset_imports=[oh.make_opsetid("", 19)])
    x = torch.tensor([0, 1, 1]).to(dtype)
    for given in ({}, {"y": torch.zeros(3).to(dtype)}):
        if not given and "float8" in str(dtype) and OLD:
            with pytest.raises(NotImplementedError, match="ort.Graph: expected memory for an output of float8"):
                Graph(proto, device="cpu")({"x": x})
            continue
        y = Graph(proto, device="cpu")({"x": x}, given)["y"]
        assert y.dtype == dtype and y.float().tolist() == [0, 1, 1]


def test_inputs_and_outputs_that_no_tensor_can_be_are_refused():
    def made(nodes, inputs, outputs):
        graph = oh.make_graph(nodes, "g", inputs, outputs)
        return oh.make_model(graph, ir_version=10, opset_imports=[oh.make_opsetid("", 21)])

    number = onnx.TensorProto
    x, name = oh.make_tensor_value_info("x", number.FLOAT, ["n"]), oh.make_node("Identity", ["x"], ["y"])
    several = oh.make_tensor_sequence_value_info("y", number.FLOAT, ["n"])
    maybe = oh.make_value_info("x", oh.make_optional_type_proto(x.type))
    for nodes, inputs, outputs, word in (
        ([oh.make_node("Cast", ["x"], ["y"], to=number.STRING)], [x], number.STRING, r"outputs .* y, tensor\(string\)"),
        ([oh.make_node("Cast", ["x"], ["y"], to=number.INT4)], [x], number.INT4, r"outputs .* y, tensor\(int4\)"),
        ([oh.make_node("SequenceConstruct", ["x", "x"], ["y"])], [x], several, r"outputs .* y, seq\(tensor\(float"),
        ([name], [oh.make_tensor_value_info("x", number.STRING, [])], number.STRING, r"inputs .* x, tensor\(string"),
        ([oh.make_node("OptionalGetElement", ["x"], ["y"])], [maybe], number.FLOAT, r"inputs .* x, optional\("),
    ):
        outputs = oh.make_tensor_value_info("y", outputs, None) if isinstance(outputs, int) else outputs
        with pytest.raises(TypeError, match="ort.Graph: expected " + word) as raised:
            Graph(made(nodes, inputs, [outputs]), device="cpu")
        assert "\n" not in str(raised.value)


def test_models_of_several_kinds_and_what_is_none():
    ir = pytest.importorskip("onnx_ir")
    pytest.importorskip("networkx")  # torch's export needs it
    a = torch.eye(2)
    assert torch.equal(Graph(ir.from_proto(matmul()), device="cpu")({"a": a, "b": a})["c"], a)
    program = torch.onnx.export(torch.nn.ReLU(), (a,), dynamo=True, verbose=False)
    graph = Graph(program, device="cpu")
    assert torch.equal(graph({next(iter(graph.inputs)): -a})[next(iter(graph.outputs))], torch.zeros(2, 2))
    for wrong in (None, 3, matmul().graph, ir.from_proto(matmul()).graph, torch.nn.ReLU()):
        with pytest.raises(TypeError, match="expected a model .*, got .*; load or export it first"):
            Graph(wrong, device="cpu")


def test_without_onnx_runtime_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match="install onnxruntime-gpu"):
        Graph(matmul(), device="cpu")
