"""An ONNX graph as a function of torch tensors. On a machine with a GPU both providers are tried."""

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx.helper as oh  # noqa: E402

from fusebook.cards.scatter_nd import _onnx_model  # noqa: E402
from fusebook.ort import Graph  # noqa: E402
from fusebook.ort.graph import _place  # noqa: E402
from graphs import model  # noqa: E402


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
        assert Graph(given, device="cpu")({"a": a, "b": a})["c"].shape == (0, 0)
    # A CUDA provider takes no null pointer, which such a tensor's address is.
    graph = Graph(matmul(), device="cpu")
    assert a.data_ptr() == 0 and _place("a", a, graph, "tensor(float)")[-1] != 0


def test_wrong_calls_are_refused_in_one_sentence():
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
    ]
    for error, message, inputs, outputs in refused:
        with pytest.raises(error, match=message) as raised:
            graph(inputs, outputs)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="cpu or cuda"):
        Graph(matmul(), device="meta")


def test_without_onnx_runtime_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match="install onnxruntime-gpu"):
        Graph(matmul(), device="cpu")
