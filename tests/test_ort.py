"""Fusebook's nodes in ONNX Runtime: in process, compiled ahead of time, exported and rewritten.

The library is compiled once for one architecture and dtype; where there is a GPU, for that GPU and for all dtypes.
"""

import ctypes
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

import onnx.helper as oh  # noqa: E402

import fusebook  # noqa: E402
import warm  # noqa: E402
from fusebook.cards import OPS  # noqa: E402
from fusebook.cards import onnxruntime as card  # noqa: E402
from fusebook.cards.scatter import _onnx_model  # noqa: E402
from fusebook.kernels._call import OPERATORS  # noqa: E402
from fusebook.measure import check, inputs  # noqa: E402
from fusebook.ort import LOSSES, NODES, NORMS, Graph, aot, build, export  # noqa: E402
from fusebook.ort.alone import alone  # noqa: E402
from graphs import OLD, one_node, registered_by_an_old_onnx_runtime  # noqa: E402

#: For tests of nodes on the CPU, which kernels compute in the interpreter.
INTERPRETED_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels compile for it")
CUDA = torch.cuda.is_available() and "CUDAExecutionProvider" in onnxruntime.get_available_providers()
NAMES = {
    "softmax": "Softmax",
    "scatter_nd_of_shape": "ScatterNDOfShape",
    "masked_scatter_nd_of_shape": "MaskedScatterNDOfShape",
}


@pytest.fixture(scope="session")
def device(device):
    if device == "cuda" and not CUDA:
        pytest.skip("needs onnxruntime-gpu")
    return device


def node(name, feeds, dtype, **attributes):
    """A graph of one node of ours."""
    return one_node(name, {key: value.dtype for key, value in feeds.items()}, {"y": dtype}, **attributes)


def run(name, made, dtype, device, **given):
    """A node on the inputs of a card, into memory that holds NaN."""
    feeds = {"x": made[0]} if name == "Softmax" else dict(zip(("shape", "indices", "updates"), made, strict=True))
    y = torch.full(made[0].shape if name == "Softmax" else made[0], torch.nan, dtype=dtype, device=device)
    if "shape" in feeds:
        feeds["shape"] = torch.tensor(feeds["shape"])
    attributes = {"axis": made[1]} if name == "Softmax" and len(made) > 1 else {}
    return Graph(node(name, feeds, dtype, **attributes), device=device, **given)(feeds, {"y": y})["y"]


def assert_right(op, got, made):
    yard = check.yardstick(op, made)
    verdict = yard.judge(got)
    assert verdict.ok, yard.where(got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda d: str(d)[6:])
def test_norms_are_nodes_too(dtype, device):
    rng = inputs.generator(0)
    x, skip, w, b = (
        torch.randn(s, generator=rng, device=device, dtype=dtype) for s in ((3, 40), (3, 40), (40,), (40,))
    )
    wanted = {
        "RMSNormalization": ({"x": x, "scale": w}, (fusebook.rms_norm(x, w, eps=0.25),)),
        "LayerNormalization": ({"x": x, "scale": w, "bias": b}, (fusebook.layer_norm(x, w, b, eps=0.25),)),
        "SkipSimplifiedLayerNormalization": (
            {"x": x, "skip": skip, "gamma": w}, fusebook.add_rms_norm(x, skip, w, eps=0.25)
        ),
    }  # fmt: skip
    assert set(wanted) == {op.name for op in NORMS}
    for name, (feeds, results) in wanted.items():
        outputs = dict(zip(("y", "sum"), [dtype] * len(results), strict=False))
        graph = one_node(name, {key: value.dtype for key, value in feeds.items()}, outputs, epsilon=0.25)
        found = Graph(graph, device=device, ops=NORMS)(feeds)
        assert all(torch.equal(found[key], right) for key, right in zip(outputs, results, strict=True))
    graph = one_node("RMSNormalization", {"x": dtype, "scale": dtype}, {"y": dtype}, axis=0)
    with pytest.raises(RuntimeError, match="expected the last axis of x"):
        Graph(graph, device=device, ops=NORMS)({"x": x, "scale": w})


@pytest.mark.parametrize(
    ("shape", "dtype", "weighted", "attributes"),
    [
        ((6, 40), torch.float32, False, {}),
        ((2, 40, 3), torch.float32, True, {"ignore_index": 7}),
        ((6, 40), torch.float16, False, {"reduction": "none"}),
        ((6, 5000), torch.float32, True, {"reduction": "sum", "ignore_index": 0}),
    ],
)
def test_the_loss_is_the_node_of_the_standard(shape, dtype, weighted, attributes, device):
    rng = inputs.generator(0)
    scores = torch.randn(shape, generator=rng, device=device, dtype=dtype)
    labels = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=rng, device=device)
    labels[0], labels[1] = 7, 0
    feeds = {"scores": scores, "labels": labels}
    if weighted:
        feeds["weights"] = torch.rand(shape[1], generator=rng, device=device, dtype=dtype) + 0.5
    kinds = {key: value.dtype for key, value in feeds.items()}
    got = Graph(one_node("SoftmaxCrossEntropyLoss", kinds, {"loss": dtype}, **attributes), device=device, ops=LOSSES)
    standard = one_node("SoftmaxCrossEntropyLoss", kinds, {"loss": dtype}, domain="", **attributes)
    want = Graph(standard, device="cpu")({key: value.cpu() for key, value in feeds.items()})["loss"]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got(feeds)["loss"].cpu(), want, rtol=8 * eps, atol=8 * eps)


def small(dims):
    """Whether the interpreter is done with this in no time."""
    return CUDA or sum(v for v in dims.values() if isinstance(v, int)) < 500


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", NAMES)
def test_a_node_computes_what_its_card_says(name, dtype, device):
    op = OPS[name]
    for dims in filter(small, op.edges):
        made = op.make(inputs.generator(0), dtype, **dims)
        assert_right(op, run(NAMES[name], made, dtype, device, ops=NODES), made)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_softmax_along_any_axis(axis, device):
    x = torch.randn(3, 5, 7, device=device)
    y = Graph(node("Softmax", {"x": x}, x.dtype, axis=axis), device=device, ops=NODES)({"x": x})["y"]
    torch.testing.assert_close(y, torch.softmax(x, axis))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_each_node_masks_by_its_own_value(kind, device):
    indices = torch.tensor([[0], [3], [-1], [7]], dtype=kind, device=device)
    updates = torch.ones(4, 2, device=device)
    feeds = {"shape": torch.tensor([5, 2]), "indices": indices, "updates": updates}
    want = {-1: [1, 0, 0, 1, 0], 3: [1, 0, 0, 0, 1], None: [1, 0, 0, 1, 1]}  # -1 is the last row, 7 is out of range
    graphs = {
        value: Graph(node("MaskedScatterNDOfShape", feeds, updates.dtype, maskedValue=value), device=device, ops=NODES)
        for value in (-1, 3)
    }
    graphs[None] = Graph(node("ScatterNDOfShape", feeds, updates.dtype), device=device, ops=NODES)
    for _ in range(3):  # what is found out in the first run is kept for the next
        for value, graph in graphs.items():
            assert graph(feeds)["y"][:, 0].tolist() == want[value]


def test_a_launch_that_is_kept_is_for_rows_at_the_same_addresses(device):
    D = 1024  # so that a thread loads 16 bytes at once
    updates = torch.randn(4 * D + 1, device=device)
    feeds = {"shape": torch.tensor([5, D]), "indices": torch.tensor([[0], [3], [-1], [4]], device=device)}
    proto = node("MaskedScatterNDOfShape", feeds | {"updates": updates.view(-1, 1)}, updates.dtype)
    graph = Graph(proto, device=device, ops=NODES)
    for start in (0, 1, 0, 1):  # the rows of the second begin at no multiple of 16 bytes
        given = updates[start : start + 4 * D].view(4, D)
        y = graph(feeds | {"updates": given})["y"]
        assert torch.equal(y[[0, 3, 4]], given[[0, 1, 3]]) and not y[1:3].any()


def test_what_a_node_refuses_is_said_in_one_sentence(device):
    k, u = torch.zeros(4, 1, dtype=torch.int64, device=device), torch.ones(4, 2, device=device)
    feeds = {"shape": torch.tensor([5, 2]), "indices": k, "updates": u}
    proto = node("MaskedScatterNDOfShape", feeds, u.dtype)
    Graph(proto, device=device, ops=NODES)(feeds)  # what is found valid is not looked at again
    Graph(node("ScatterNDOfShape", feeds, u.dtype), device=device, ops=NODES)(feeds)
    wrong = [
        (proto, {"updates": torch.ones(4, 3, device=device)}, r"expected updates of shape \[4, 2\]"),
        (proto, {"shape": torch.tensor([5, -2])}, "expected sizes from 0 up"),
        (proto, {"shape": torch.tensor([[5, 2]])}, "expected shape to have one axis"),
        (node("MaskedScatterNDOfShape", feeds, u.dtype, reduction="max"), {}, "expected reduction to be 'add'"),
        (node("ScatterNDOfShape", feeds, u.dtype, reduction="sum"), {}, "expected reduction to be 'add', got 'sum'"),
    ]
    for model, given, message in wrong:
        changed = feeds | given
        with pytest.raises(RuntimeError, match=message) as raised:
            Graph(model, device=device, ops=NODES)(changed)
        assert "\n" not in str(raised.value).strip()
    with pytest.raises(Exception, match="expected dim from -2 to 1"):
        Graph(node("Softmax", {"x": u}, u.dtype, axis=2), device=device, ops=NODES)({"x": u})


def test_the_three_models_mean_the_same(device):
    made = OPS["masked_scatter_nd_of_shape"].make(inputs.generator(0), torch.float32, R=9, D=5, n=20, law="uniform")
    for name in card.MODELS:
        y = card._bound(card._session(name, torch.float32, torch.device(device), "callback"), *made)()["y"]
        assert_right(card.NODES_OF_ONNX_RUNTIME, y, made)


# Ahead of time --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    out = tmp_path_factory.mktemp("library") / "libfusebook_ort.so"
    major, minor = torch.cuda.get_device_capability() if CUDA else (9, 0)
    types = ",".join(aot.TYPES) if CUDA else "float32"
    words = ["--arch", f"{major}{minor}", "--dtype", types, "--out", str(out)]
    built = warm.run("-m", "fusebook.ort", "build", *words)
    assert built.returncode == 0, built.stderr[-2000:]
    return out


@pytest.mark.slow_interpreted
def test_the_library_needs_neither_python_nor_cuda_to_be_loaded(library):
    needed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout
    assert not re.search("python|cuda|torch|triton", needed)
    ctypes.CDLL(str(library))
    made = ctypes.CDLL(str(library))
    assert made.RegisterCustomOps and not hasattr(made, "fusebook_define")


@pytest.mark.slow_interpreted
@pytest.mark.skipif(CUDA, reason="needs a machine without a CUDA device")
def test_without_a_gpu_the_library_says_so_to_a_process_without_torch(library):
    with pytest.raises(RuntimeError, match="compiled for GPUs, and the session has none") as raised:
        alone(card.model(card.MODELS[2]), library, "CPUExecutionProvider")
    assert "\n" not in str(raised.value)


@pytest.mark.slow_interpreted
def test_the_library_checks_its_attributes_and_types(library):
    u = torch.ones(4, 2)
    feeds = {"shape": torch.tensor([5, 2]), "indices": torch.zeros(4, 1, dtype=torch.int32), "updates": u}
    with pytest.raises(Exception, match=r"tensor\(int32\)"):  # it takes ONNX's type of indices alone
        Graph(node("ScatterNDOfShape", feeds, u.dtype), device="cpu", library=library)
    with pytest.raises(Exception, match="Softmax"):
        Graph(node("Softmax", {"x": u, "z": u}, u.dtype), device="cpu", library=library)
    feeds["indices"] = feeds["indices"].long()
    for attributes, message in (
        ({"maskedValue": [1]}, "the attribute maskedValue to be an int"),
        ({"maskedValue": ["a"]}, "the attribute maskedValue to be an int"),
        ({"reduction": 1}, "expected reduction to be add"),
        ({"reduction": "a" * 99}, "expected reduction to be add"),
    ):
        with pytest.raises(Exception, match=message):
            Graph(node("MaskedScatterNDOfShape", feeds, u.dtype, **attributes), device="cpu", library=library)


@pytest.mark.slow_interpreted
def test_the_library_tells_an_onnx_runtime_that_is_too_old(library):
    (message,) = registered_by_an_old_onnx_runtime(library)
    assert message == "fusebook: needs ONNX Runtime 1.16 or later, got 1.10.0; install a later one"


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_the_library_alone_computes_the_right_thing(library):
    row = alone(card.model(card.MODELS[2]), library)
    assert row["provider"] == "CUDAExecutionProvider" and row["wrong"] == 0 and row["modules"] == "none"


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_the_library_stays_loaded_with_what_it_has_on_the_gpu(library, tmp_path):
    x = torch.ones(3, 5)
    (tmp_path / "g.onnx").write_bytes(node("Softmax", {"x": x}, x.dtype).SerializeToString())
    text = (
        "import gc, sys, torch; from fusebook.ort import Graph; graph = Graph(sys.argv[1], library=sys.argv[2]); "
        "graph({'x': torch.ones(3, 5, device='cuda')}); torch.cuda.synchronize(); del graph; gc.collect(); "
        "assert sys.argv[2] in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", text, str(tmp_path / "g.onnx"), str(library)], check=True)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_node_computes_what_its_card_says(name, dtype, library):
    op = OPS[name]
    more = {
        "softmax": [{"M": 3, "N": n} for n in (1, 129, 512, 1025, 8192, 16385, 40001)],
        "scatter_nd_of_shape": [{"R": 4000, "D": 60, "n": 900, "K": 3, "law": "uniform"}],
        "masked_scatter_nd_of_shape": [
            {"R": R, "D": D, "n": n, "law": law}
            for R, D, n in ((300, 703, 600), (9000, 64, 2000), (20000, 2051, 4000), (3000, 4096, 9000))
            for law in ("uniform", "zipf", "equal")
        ],
    }
    for dims in [*op.edges, *more[name]]:
        made = op.make(inputs.generator(0), dtype, **dims)
        assert_right(op, run(NAMES[name], made, dtype, "cuda", library=library), made)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_another_architecture_is_named(tmp_path):
    major, _ = torch.cuda.get_device_capability()
    other = 80 if major != 8 else 90
    x = torch.ones(2, 2, device="cuda")
    graph = Graph(node("Softmax", {"x": x}, x.dtype), library=build(tmp_path / "l.so", arch=[other], dtype=["float32"]))
    with pytest.raises(RuntimeError, match=f"holds machine code for the architectures sm_{other}, and device 0 is"):
        graph({"x": x})


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_compiled_nodes_refuse_in_one_sentence(library):
    k, u = torch.zeros(4, 1, dtype=torch.int64, device="cuda"), torch.ones(4, 2, device="cuda")
    feeds = {"shape": torch.tensor([5, 2]), "indices": k, "updates": u}
    for given, attributes, message in (
        ({"updates": torch.ones(4, 3, device="cuda")}, {}, "expected updates of shape"),
        ({"shape": torch.tensor([5, -2])}, {}, "expected sizes from 0 up"),
        ({}, {"reduction": "max"}, "expected reduction to be add"),
        ({}, {"maskedValue": "a"}, "expected the attribute maskedValue to be an int"),
    ):
        proto = node("MaskedScatterNDOfShape", feeds, u.dtype, **attributes)
        with pytest.raises(Exception, match=message) as raised:
            Graph(proto, library=library)(feeds | given)
        assert "\n" not in str(raised.value).strip()


def test_what_cannot_be_built_is_refused(tmp_path, monkeypatch):
    for given, message in (({"arch": [70]}, "architectures from 80"), ({"dtype": ["int8"]}, "dtypes of float32"),
                           ({"arch": []}, "an architecture and a dtype at least"),
                           ({"arch": [90.0]}, "architectures from 80"),
                           ({"arch": ["90"]}, "such as 90 for sm_90, got '90'"),
                           ({"arch": "90"}, "expected lists, such as"),
                           ({"arch": 90}, "expected lists, such as"), ({"dtype": "float32"}, "expected lists, such as"),
                           ({"arch": b"Z"}, "expected lists, such as"), ({"dtype": None}, "expected lists, such as"),
                           ({"dtype": [["float32"]]}, "dtypes of float32"), ({"progress": "no"}, "True or False"),
                           ({"workers": -1}, "workers from 1 up, got -1"), ({"workers": 0}, "workers from 1 up, got 0"),
                           ({"workers": "2"}, "workers to be an integer, got str")):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            build(tmp_path / "x.so", **given)
    end = warm.run("-m", "fusebook.ort", "build", "--out", str(tmp_path / "x.so"), "--arch", "hopper")
    assert end.returncode == 2 and "expected numbers by commas such as 80,90, got 'hopper'" in end.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "_compiled", None)
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    special = "it is a folder or a special file"
    for out, why in ((tmp_path, special), (tmp_path / "pipe", special), (tmp_path / "x\0", "embedded null byte"),
                     (tmp_path / "file" / "x.so", "Not a directory|File exists")):  # fmt: skip
        with pytest.raises(RuntimeError, match=rf"cannot write {out} \(({why})\); give another file as out \(--out\)"):
            build(out)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["file", "pipe"] and (tmp_path / "pipe").is_fifo()


def test_a_build_names_its_kernels_and_what_it_cannot_write(tmp_path, monkeypatch, capfd):
    two = [spec for spec in aot.specs(["float32"]) if spec.function == "_scatter_nd_keys"][:2]
    monkeypatch.setattr(aot, "specs", lambda types: two)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    out = tmp_path / "x.so"
    assert build(out, arch=[90], dtype=["float32"], workers=1, progress=True) == out and out.exists()
    said = capfd.readouterr()
    assert said.err == "".join(f"{i} of 2: sm_90 _scatter_nd_keys float32\n" for i in (1, 2)) and not said.out
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(RuntimeError, match="do not compile: .*file.*; set TRITON_CACHE_DIR and TMPDIR to folders"):
        build(out, arch=[90], dtype=["float32"], workers=1)
    assert not capfd.readouterr().err

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="do not compile: ptxas.*sm_199.*; leave that architecture out"):
        build(out, arch=[199], dtype=["float32"], workers=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(aot, "_compiled", full)
    with pytest.raises(RuntimeError, match="temporary files .*No space left.*; set TMPDIR to a folder"):
        build(out)


def test_no_process_imports_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="missing.so"):
        alone(card.model(card.MODELS[2]), "missing.so", "CPUExecutionProvider")
    said = tmp_path / "python"
    said.write_text('#!/bin/sh\necho "$1" >&2; exit 1\n')
    said.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(said))
    with pytest.raises(RuntimeError, match="the kernels do not compile: -P"):
        aot._compiled([(90, next(aot.specs(["float32"])))], tmp_path, 1, False)


def test_temporary_files_may_lie_in_a_folder_of_any_name(tmp_path, monkeypatch):
    keys = ("arch", "type", "aligned", "limit", "rows", "size", "shared", "threads", "late", "parameters")

    def compiled(wanted, folder, *_):
        (folder / "code").write_bytes(b"code")
        return [dict.fromkeys(keys, 1) | {"kind": "FILL", "name": "fill", "file": "code"}]

    odd = tmp_path / 'a "b\\n,ü'
    odd.mkdir()
    monkeypatch.setattr(aot, "_compiled", compiled)
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    monkeypatch.chdir(tmp_path)
    assert build("x.so", arch=[90], dtype=["float32"]) == Path("x.so")
    assert hasattr(ctypes.CDLL(str(tmp_path / "x.so")), "RegisterCustomOps") and not list(odd.iterdir())


def test_the_library_is_told_of_the_smallest_variant_first(tmp_path, monkeypatch):
    """It takes the first that is large enough."""
    key = dict(arch=90, kind="FILL", type=0, aligned=1)
    found = [key | {"limit": limit} for limit in (1024, 64, 4096, 256)]
    monkeypatch.setattr(aot, "_compiled", lambda wanted, *_: found if wanted else [])
    monkeypatch.setattr(aot, "_table", lambda rows, *_: " ".join(str(row["limit"]) for row in rows))
    monkeypatch.setattr(
        aot, "compile_c", lambda files, path, include, *_, **__: Path(include[2:], "table.h").read_text()
    )
    for arch, dtype in (([90], ["float32"]), (map(int, ["90"]), iter(["float32"]))):  # or what can be read once
        assert build(tmp_path / "x.so", arch=arch, dtype=dtype) == "64 256 1024 4096"


def test_kernels_stand_where_the_table_says(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(100 * name.encode())
    row = dict.fromkeys(("arch", "kind", "type", "aligned", "limit", "rows", "size", "shared", "threads", "late"), 90)
    rows = [row | {"parameters": 1, "name": name, "file": name} for name in "aba"]
    text = aot._table(rows, tmp_path / "kernels", ["float32"])
    places = [int(line.split(", ")[6]) for line in text.splitlines() if line.startswith("  {")]
    data = (tmp_path / "kernels").read_bytes()
    assert [data[at : at + 100] for at in places] == [100 * name.encode() for name in "aba"]
    assert all(at % 64 == 0 for at in places)


def test_the_sources_in_c_compile_without_warnings(tmp_path):
    """Of some warnings, newer compilers make errors: GCC 14 of pointers of incompatible types."""
    (tmp_path / "a").write_bytes(b"code")
    row = dict.fromkeys(("arch", "kind", "type", "aligned", "limit", "rows", "size", "shared", "threads", "late"), 90)
    table = aot._table([row | {"parameters": 1, "name": "a", "file": "a"}], tmp_path / "kernels", ["float32"])
    (tmp_path / "table.h").write_text(table)
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{aot.C}", f"-I{tmp_path}"]
    done = subprocess.run(["cc", *flags, *aot.C.glob("*.c")], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_a_library_is_kept_until_one_of_its_changed_sources(tmp_path, monkeypatch):
    copy = tmp_path / "fusebook"
    shutil.copytree(Path(fusebook.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "records"))
    monkeypatch.setattr(aot, "_HERE", copy / "ort")
    monkeypatch.setattr(aot, "C", copy / "ort" / "c")
    monkeypatch.setattr(aot, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(aot, "build", lambda out, **_: out)
    found = [aot.cached([90], ["float32"])]
    assert aot.cached([90], ["float32"]) == found[0] != aot.cached([80], ["float32"])
    for source in ("ort/aot.py", "ort/c/library.c", "kernels/softmax.py", "kernels/_rows.py", "kernels/_call.py"):
        with (copy / source).open("a") as file:
            file.write("\n")
        found.append(aot.cached([90], ["float32"]))
    assert len(set(found)) == 6


def test_every_kernel_of_the_library_has_a_variant_for_every_size():
    for name in aot.TYPES:
        specs = [spec for spec in aot.specs([name])]
        kinds = {spec.kind for spec in specs}
        assert {"KEYS", "SCAN", "FILL", "ATOMIC", "SORT", "SEGMENTS", "SOFTMAX_ROWS", "SOFTMAX_WIDE"} <= kinds
        assert ("QUANTIZED + 23" in kinds) == (name in ("float16", "bfloat16"))
        assert ("ROUND" in kinds) == (name in ("float16", "bfloat16"))
        by = [(s.kind, s.type, s.aligned, s.limit) for s in specs]
        assert len(set(by)) == len(by)


# From a model ---------------------------------------------------------------------------------------------------------


class Module(torch.nn.Module):
    """Two of our operators; the number of columns is known only when it runs."""

    def forward(self, indices, updates):
        y = fusebook.masked_scatter_nd_of_shape((7, updates.shape[1]), indices, updates, check=False)
        return fusebook.softmax(fusebook.softmax(y, dim=0), dim=1)


def test_a_module_exports_to_our_nodes(device):
    made = OPS["masked_scatter_nd_of_shape"].make(inputs.generator(0), torch.float32, R=7, D=6, n=9, law="zipf")
    sizes = ({0: "n"}, {0: "n", 1: "D"})
    program = exported(Module(), made[1:], dynamic_shapes=sizes, opset_version=18)
    proto = program.model_proto
    ours = [n.op_type for n in proto.graph.node if n.domain == "fusebook"]
    assert ours == ["MaskedScatterNDOfShape", "Softmax", "Softmax"]
    proto.ir_version = min(10, proto.ir_version)
    graph = Graph(proto, device=device, ops=NODES)
    for n, D in ((9, 6), (4, 11)):
        indices, updates = made[1][:n], torch.randn(n, D, device=device)
        (y,) = graph(dict(zip(graph.inputs, (indices, updates), strict=True))).values()
        torch.testing.assert_close(y, Module()(indices, updates))


class Everything(torch.nn.Module):
    """All operators that become standard nodes, with and without what they may leave out."""

    def forward(self, x, r, w, b, labels, weights, gate, up, biases, head, scalar):
        f = fusebook
        terms = {"check": False, "ignore_index": 3}
        return {
            "rms_norm": f.rms_norm(x, w, eps=0.1), "rms_norm, none": f.rms_norm(x),
            "rms_norm, eps": f.rms_norm(x * 2**-20, w, eps=1e-12),
            "layer_norm, eps": f.layer_norm(x * 2**-20, eps=1e-12),
            "rms_norm, bias": f.rms_norm(x, w, b), "rms_norm, float32": f.rms_norm(x, weights),
            "layer_norm": f.layer_norm(x, w, b), "layer_norm, none": f.layer_norm(x),
            "layer_norm, weight": f.layer_norm(x, w), "layer_norm, bias": f.layer_norm(x, None, b),
            "add_rms_norm": f.add_rms_norm(x, r, w), "add_layer_norm": f.add_layer_norm(x, r, w, b),
            "cross_entropy": f.cross_entropy(x, labels, **terms),
            "cross_entropy, none": f.cross_entropy(x, labels, reduction="none", **terms),
            "cross_entropy, weights": f.cross_entropy(x, labels, w.abs(), reduction="sum", **terms),
            "cross_entropy, one": f.cross_entropy(x[0, 0], labels[0, 0], reduction="none", **terms),
            "cross_entropy, ignored": f.cross_entropy(x, torch.full_like(labels, 3), **terms),
            "linear_cross_entropy": f.linear_cross_entropy(x, head, labels, **terms),
            "linear_cross_entropy, bias": f.linear_cross_entropy(x, head, labels, bias=head[:, 0], **terms),
            "swiglu": f.swiglu(x, gate, up), "swiglu, bias": f.swiglu(x, gate, up, biases),
            "concat_gemm": f.concat_gemm(x, [gate, up, gate]), "multiply": f.multiply(x, w),
            "multiply, mixed": f.multiply(x, weights), "multiply, 0": f.multiply(x, scalar), "double": f.double(x),
            "add_sub": f.add_sub(x, w), "multiply_add": f.multiply_add(x, w, b), "silu": f.silu(x),
            "silu_mul": f.silu_mul(x, r), "silu_mul, mixed": f.silu_mul(x, weights),
            "add_add_multiply": f.add_add_multiply(x, w, b, r), "exp": f.exp(x),
        }  # fmt: skip


def exported(module, given, **more):
    pytest.importorskip("onnxscript")
    pytest.importorskip("networkx")  # torch's export needs it
    return torch.onnx.export(
        module.eval(), given, dynamo=True, custom_translation_table=export.translations(), verbose=False, **more
    )


def test_weights_keep_their_names_in_an_export(device):
    """Else `ONNXProgram.apply_weights` does not find them."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift, self.weight = (torch.nn.Parameter(torch.rand(8, device=device)) for _ in range(3))

        def forward(self, x, target):
            y = fusebook.layer_norm(fusebook.rms_norm(x, self.scale), self.scale, self.shift)
            return fusebook.cross_entropy(y, target, self.weight, check=False)

    module, given = (
        Module().requires_grad_(False),
        (torch.randn(3, 8, device=device), torch.tensor([1, 2, 0], device=device)),
    )
    program = exported(module, given)
    assert {"scale", "shift", "weight"} <= program.model.graph.initializers.keys()
    new = {name: torch.rand(8, device=device) for name in module.state_dict()}
    program.apply_weights(new)
    module.load_state_dict(new)
    got = Graph(program, device=device)({"x": given[0], "target": given[1]})
    torch.testing.assert_close(next(iter(got.values())), module(*given).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "opset", "learned"),
    [(torch.float32, 18, False), (torch.float16, 23, True), (torch.float64, 18, True)],
    ids=str,
)
def test_operators_become_standard_nodes(dtype, opset, learned, device):
    if dtype == torch.float64 and OLD:
        pytest.skip("this ONNX Runtime computes part of a norm of float64 in float32")
    rng = inputs.generator(0)

    def made(batch):
        sizes = ((batch, 5, 16), (batch, 5, 16), 16, 16, None, 16, (16, 6), (16, 6), (2, 6), (20, 16), ())
        found = [s if s is None else torch.randn(s, generator=rng, device=device) for s in sizes]
        found[6:8] = found[6] / 4, found[7] / 4  # so that products are as large as x
        found[4] = torch.randint(0, 16, (batch, 5), generator=rng, device=device)
        return tuple(t if i in (4, 5) else t.to(torch.float64 if i == 10 else dtype) for i, t in enumerate(found))

    dynamic = ({0: torch.export.Dim("batch")},) * 2 + ({},) * 2 + ({0: torch.export.Dim("batch")},) + ({},) * 6
    given = made(3)
    given[0].requires_grad_(learned)  # then all of them record a gradient, as with parameters
    program = exported(Everything(), given, opset_version=opset, dynamic_shapes=dynamic)
    assert {node.domain for node in program.model_proto.graph.node} == {""}
    graph = Graph(program, device=device)
    eps = torch.finfo(dtype).eps
    for batch in (3, 2):
        given = made(batch)
        want = Everything()(*given)
        flat = [(key, y) for key, value in want.items() for y in (value if isinstance(value, tuple) else (value,))]
        got = graph(dict(zip(graph.inputs, given, strict=True))).values()
        for (key, right), y in zip(flat, got, strict=True):
            torch.testing.assert_close(
                y, right, rtol=8 * eps, atol=32 * eps, equal_nan=True, msg=lambda m, key=key: f"{key}: {m}"
            )


@INTERPRETED_ONLY
def test_an_exported_loss_of_float64_keeps_nan():
    class Loss(torch.nn.Module):
        def forward(self, x, target):
            return fusebook.cross_entropy(x, target, reduction="none", ignore_index=3, check=False)

    x, target = torch.randn(6, 7, dtype=torch.float64), torch.arange(6)
    x[[0, 1, 3], [5, 1, 0]], x[2, 4], x[4] = math.nan, math.inf, -math.inf
    graph = Graph(exported(Loss(), (x, target)), device="cpu")
    (got,) = graph(dict(zip(graph.inputs, (x, target), strict=True))).values()
    torch.testing.assert_close(got, Loss()(x, target), equal_nan=True)
    assert got.isnan().tolist() == [True, True, True, False, True, False]


@INTERPRETED_ONLY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_exported_norm_of_equal_elements_is_zero(dtype):
    class Norm(torch.nn.Module):
        def forward(self, x):
            return fusebook.layer_norm(x)

    x = torch.tensor([[3.3], [12345.6]], dtype=dtype).expand(2, 1000)
    graph = Graph(exported(Norm(), (x,)), device="cpu")
    (got,) = graph(dict(zip(graph.inputs, (x,), strict=True))).values()
    torch.testing.assert_close(got, torch.zeros_like(x), rtol=0, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, t: fusebook.cross_entropy(x, t, label_smoothing=0.1, check=False),
            "without label_smoothing, z_loss",
        ),
        (
            lambda x, t: fusebook.rms_norm(x, dtype=torch.int8),
            "got fusebook::quantised_norm, which has no node in ONNX",
        ),
    ],
)
def test_what_has_no_node_is_named(call, message, device):
    class Called(torch.nn.Module):
        def forward(self, x, t):
            return call(x, t)

    with pytest.raises(torch.onnx.OnnxExporterError, match=f"fusebook.ort.translations: expected .*{message}"):
        exported(Called(), (torch.ones(3, 4, device=device), torch.ones(3, dtype=torch.int64, device=device)))


def test_an_export_of_a_call_within_a_transform_is_refused(device):
    class Batched(torch.nn.Module):
        def forward(self, x):
            return torch.vmap(fusebook.softmax)(x)

    with pytest.raises(NotImplementedError, match="softmax: expected no torch.vmap or torch.func under torch.export"):
        torch.export.export(Batched(), (torch.ones(2, 3, device=device),), strict=False)


def test_translations_has_each_operator_and_names_those_that_become_nodes():
    pytest.importorskip("onnxscript")
    table = export.translations()
    assert set(table) == {operator.custom for operator in OPERATORS.values()}
    known = {key for key, function in table.items() if function.__name__ != "refused"}
    assert known == {
        getattr(torch.ops.fusebook, name).default
        for name in ("softmax", "scatter_nd", "norm", "add_norm", "cross_entropy", "linear_cross_entropy", "swiglu",
                     "swiglu_kept", "concat_gemm", "multiply", "double", "add_sub", "multiply_add", "silu", "silu_mul",
                     "add_add_multiply", "exp")
    }  # fmt: skip
    named = re.findall("``([a-z_]+)``", export.translations.__doc__.partition("The export of")[0])
    assert all(hasattr(fusebook, name) for name in set(named) - {"custom_translation_table", "ops", "library"})


SCATTERS = {
    "scatter_nd": lambda r, i, u: fusebook.scatter_nd_of_shape((r.shape[0], *u.shape[1:]), i, u),
    "masked": lambda r, i, u: fusebook.masked_scatter_nd_of_shape((r.shape[0], *u.shape[1:]), i, u, masked_value=1),
    "two components": lambda r, i, u: fusebook.scatter_nd_of_shape((r.shape[0], 3, *u.shape[1:]), i.expand(-1, 2), u),
    "fixed": lambda r, i, u: fusebook.scatter_nd_of_shape((5, 8), i, u),
    "embedding": lambda r, i, u: fusebook.embedding_backward(u, i[:, 0], r.shape[0], padding_idx=0),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_export_with_symbolic_sizes(name, strict, device):
    class Scatter(torch.nn.Module):
        def forward(self, *args):
            return SCATTERS[name](*args)

    def inputs_of(R, D, n):
        return tuple(x.to(device) for x in (torch.ones(R, 1), torch.arange(n)[:, None] % 3, torch.randn(n, D)))

    sizes = [torch.export.Dim(letter) for letter in "RDn"]
    dynamic = ({0: sizes[0]}, {0: sizes[2]}, {0: sizes[2]} if name == "fixed" else {0: sizes[2], 1: sizes[1]})
    program = torch.export.export(Scatter(), inputs_of(7, 8, 4), dynamic_shapes={"args": dynamic}, strict=strict)
    for R, D, n in ((7, 8, 4), (4, 8, 6), (5, 8, 9)) if name == "fixed" else ((7, 8, 4), (4, 6, 9), (9, 1, 2)):
        given = inputs_of(R, D, n)
        torch.testing.assert_close(program.module()(*given), SCATTERS[name](*given))


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("weights", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_exported_norms_load_on_a_gpu(dtype, weights, optimize, device):
    """ONNX Runtime's fusions are others there than on the CPU."""

    class Norms(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(64, device=device).to(weights or dtype))

        def forward(self, x):
            norms = fusebook.rms_norm(x, self.weight), fusebook.layer_norm(x, self.weight, self.weight)
            return *norms, *fusebook.add_rms_norm(x, x, self.weight)

    module, x = Norms(), torch.randn(3, 64, device=device).to(dtype)
    with torch.no_grad():
        program = exported(module, (x,), optimize=optimize)
        found = Graph(program, device=device)({"x": x})
        for got, want in zip(found.values(), module(x), strict=True):
            torch.testing.assert_close(got, want, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)
    # What ONNX Runtime fuses has Pow.
    assert ("Pow" in {node.op_type for node in program.model_proto.graph.node}) == (dtype != torch.bfloat16)


def test_a_scatter_into_a_single_number_exports(device):
    class Sum(torch.nn.Module):
        def forward(self, indices, updates):
            return fusebook.scatter_nd_of_shape((), indices, updates)

    given = torch.zeros(3, 0, dtype=torch.int64, device=device), torch.ones(3, device=device)
    graph = Graph(exported(Sum(), given), device=device, ops=NODES)
    found = graph({"indices": given[0], "updates": given[1]})
    assert [y.item() for y in found.values()] == [Sum()(*given).item()] == [3]


def changed(change):
    """The standard chain, with a change that makes it mean something else."""
    proto = onnx.ModelProto.FromString(_onnx_model(torch.float32).SerializeToString())
    change(proto.graph)
    return proto


def domains(proto):
    return [(node.domain, node.op_type) for node in proto.graph.node]


def test_the_standard_chain_is_rewritten_to_one_node(device):
    pytest.importorskip("onnxscript")
    fused = export.fuse(_onnx_model(torch.float32))
    assert domains(fused) == [("fusebook", "MaskedScatterNDOfShape")]
    made = OPS["masked_scatter_nd_of_shape"].make(inputs.generator(0), torch.float32, R=7, D=6, n=9, law="zipf")
    feeds = {"shape": torch.tensor(made[0]), "indices": made[1], "updates": made[2]}
    want = Graph(_onnx_model(torch.float32), device=device)(feeds)["out"]
    torch.testing.assert_close(Graph(fused, device=device, ops=NODES)(feeds)["out"], want)
    onnx.checker.check_model(fused)


def test_a_chain_with_another_mask_keeps_it():
    pytest.importorskip("onnxscript")

    def masks_by_two(graph):
        (masked,) = (value for value in graph.initializer if value.name == graph.node[1].input[1])
        masked.CopyFrom(onnx.numpy_helper.from_array(torch.tensor([2]).numpy(), masked.name))

    (fused,) = export.fuse(changed(masks_by_two)).graph.node
    assert {a.name: a.i for a in fused.attribute}["maskedValue"] == 2


def test_a_chain_without_a_mask_loses_its_zeros():
    pytest.importorskip("onnxscript")

    def unmasked(graph):
        del graph.node[1:3]
        graph.node[1].input[2] = "updates"

    assert domains(export.fuse(changed(unmasked))) == [("fusebook", "ScatterNDOfShape")]


def test_a_chain_within_a_function_stays():
    pytest.importorskip("onnxscript")
    body = [
        oh.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        oh.make_node("ScatterND", ["zeros", "indices", "updates"], ["sums"], reduction="add"),
    ]
    given = ["shape", "indices", "updates"]
    standard, own = oh.make_opsetid("", 18), oh.make_opsetid("own", 1)
    function = oh.make_function("own", "Sum", given, ["sums"], body, [standard])
    nodes = [oh.make_node("Sum", given, ["sums"], domain="own"), oh.make_node("Neg", ["sums"], ["y"])]
    kinds = [(7, [2]), (7, [3, 1]), (1, [3, 2])]
    inputs = [oh.make_tensor_value_info(name, *kind) for name, kind in zip(given, kinds, strict=True)]
    graph = oh.make_graph(nodes, "g", inputs, [oh.make_tensor_value_info("y", 1, [None, None])])
    proto = oh.make_model(graph, opset_imports=[standard, own], functions=[function], ir_version=10)
    x = torch.tensor([4, 2]), torch.tensor([[0], [3], [0]]), torch.ones(3, 2)
    for fused in (export.fuse(proto), proto):  # ONNX Runtime infers no type of a custom operator in a function
        y = Graph(fused, device="cpu", ops=NODES)(dict(zip(given, x, strict=True)))["y"]
        assert y.tolist() == [[-2, -2], [0, 0], [0, 0], [-1, -1]]


@INTERPRETED_ONLY
def test_a_scan_with_a_chain_runs_where_its_body_declares_axes():
    pytest.importorskip("onnxscript")
    chain = [
        oh.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        oh.make_node("ScatterND", ["zeros", "indices", "updates"], ["y"], reduction="add"),
        oh.make_node("Identity", ["a"], ["b"]),
    ]
    x = {"shape": torch.tensor([3, 2]), "indices": torch.tensor([[2]]), "updates": torch.ones(1, 2)}
    given = [oh.make_tensor_value_info(k, 1 if k == "updates" else 7, v.shape) for k, v in x.items()]
    rows, made = oh.make_tensor_value_info("rows", 1, [2, 1]), oh.make_tensor_value_info("all", 1, None)
    ends = [oh.make_tensor_value_info(*end) for end in (("a", 1, [1]), ("b", 1, [1]), ("y", 1, [None, None]))]
    body = oh.make_graph(chain, "body", ends[:1], ends[1:])
    scan = oh.make_node("Scan", ["rows"], ["", "all"], body=body, num_scan_inputs=1)
    graph = oh.make_graph([scan], "g", [*given, rows], [made])
    proto = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 18)], ir_version=10)
    fused = Graph(export.fuse(proto), device="cpu", ops=NODES)
    assert fused({**x, "rows": torch.zeros(2, 1)})["all"].tolist() == [[[0, 0], [0, 0], [1, 1]]] * 2


def test_a_domain_that_only_functions_use_stays():
    pytest.importorskip("onnxscript")
    standard, a, b = (oh.make_opsetid(domain, version) for domain, version in (("", 18), ("a", 1), ("b", 1)))
    inner = oh.make_function("b", "Inner", ["x"], ["y"], [oh.make_node("Neg", ["x"], ["y"])], [standard])
    call = oh.make_node("Inner", ["x"], ["y"], domain="b")
    outer = oh.make_function("a", "Outer", ["x"], ["y"], [call], [standard, b])
    ends = (oh.make_tensor_value_info(name, 1, [3]) for name in "xy")
    graph = oh.make_graph([oh.make_node("Outer", ["x"], ["y"], domain="a")], "g", *([end] for end in ends))
    proto = oh.make_model(graph, opset_imports=[standard, a, b], functions=[outer, inner], ir_version=10)
    x = torch.ones(3)
    assert torch.equal(Graph(export.fuse(proto), device="cpu")({"x": x})["y"], -x)


def _ones(graph):
    graph.node[0].attribute[0].t.float_data[:] = [1.0]


def _negative_zeros(graph):
    graph.node[0].attribute[0].t.float_data[:] = [-0.0]


def _kept_elsewhere(graph):
    graph.output.append(oh.make_tensor_value_info("data", 1, None))


def _maximum(graph):
    graph.node[3].attribute[0].s = b"max"


@pytest.mark.parametrize("change", [_ones, _negative_zeros, _kept_elsewhere, _maximum], ids=lambda f: f.__name__[1:])
def test_a_chain_that_means_something_else_stays(change):
    pytest.importorskip("onnxscript")
    assert ("fusebook", "MaskedScatterNDOfShape") not in domains(export.fuse(changed(change)))
    assert ("", "ScatterND") in domains(export.fuse(changed(change)))


def _other_filling(graph):
    graph.initializer[1].float_data[:] = [2.0]


def _two_components(graph):
    graph.input[1].type.tensor_type.shape.dim[1].dim_value = 2


@pytest.mark.parametrize("change", [_other_filling, _two_components], ids=lambda f: f.__name__[1:])
def test_a_mask_that_means_something_else_stays(change):
    pytest.importorskip("onnxscript")
    found = domains(export.fuse(changed(change)))
    assert ("", "Where") in found and ("fusebook", "ScatterNDOfShape") in found


@pytest.mark.parametrize(
    ("indices", "updates", "fused"),
    [
        (["n", 1], ["n", "D"], True),
        ([4, 1], [4, "D"], True),
        (["n", 1], [1, "D"], False),
        (["n", 1], ["m", "D"], False),
        ([None, 1], [None, "D"], False),
        (["", 1], ["", "D"], False),
        (["a", "b", 1], ["a", "b", "D"], True),
        (["a", "b", 1], ["a", 1, "D"], False),
        (["a", "b", 1], ["b", "D"], False),
        (["n", "k"], ["n", "D"], False),
    ],
)
def test_updates_that_where_broadcasts_stay_as_they_are(indices, updates, fused, device):
    pytest.importorskip("onnxscript")

    def declared(graph):
        for value, shape in ((graph.input[1], indices), (graph.input[2], updates)):
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(oh.make_tensor_value_info(value.name, kind, shape))

    proto = changed(declared)
    after = export.fuse(proto)
    assert (("fusebook", "MaskedScatterNDOfShape") in domains(after)) == fused
    sizes = {"n": 4, "m": 1, "a": 2, "b": 3, None: 4, "": 4, "k": 1, "D": 2}
    index = torch.tensor([0, -1, 2, 0, 1, -1], device=device)[: 6 if "a" in indices else 4]
    values = torch.arange(1.0, 13.0, device=device)
    shape = [sizes.get(size, size) for size in updates]
    if updates[0] in (None, ""):
        shape[0] = 1  # it is not known to be that of the indices
    feeds = {
        "shape": torch.tensor([3, 2]),
        "indices": index.view([sizes.get(size, size) for size in indices]),
        "updates": values[: torch.Size(shape).numel()].view(shape),
    }
    want, got = Graph(proto, device="cpu"), Graph(after, device=device, ops=NODES)
    assert torch.equal(got(feeds)["out"].cpu(), want({key: value.cpu() for key, value in feeds.items()})["out"])


def test_constants_of_more_axes_than_updates_stay_as_they_are(device):
    pytest.importorskip("onnxscript")
    for which in (0, 1):

        def declared(graph, which=which):
            graph.input[1].CopyFrom(oh.make_tensor_value_info("indices", 7, [1, 1]))
            graph.input[2].CopyFrom(oh.make_tensor_value_info("updates", 1, [1, 2]))
            graph.initializer[which].dims[:] = [1, 1, 1]

        proto = changed(declared)
        after = export.fuse(proto)
        feeds = {"shape": torch.tensor([3, 1, 2]), "indices": torch.tensor([[2]]), "updates": torch.tensor([[1.0, 2]])}
        want = Graph(proto, device="cpu")(feeds)["out"]
        given = {name: value.to(device) if name != "shape" else value for name, value in feeds.items()}
        assert torch.equal(Graph(after, device=device, ops=NODES)(given)["out"].cpu(), want)


def _sparse():
    one, zero = oh.make_tensor("s", 1, [1], [1.0]), oh.make_tensor("i", 7, [1], [0])
    return oh.make_sparse_tensor(one, zero, [4])


def _with_a_sparse_initializer(model):
    model.graph.sparse_initializer.append(_sparse())


def _with_a_sparse_constant(model):
    branch = oh.make_graph([oh.make_node("Constant", [], ["c"], sparse_value=_sparse())], "b", [], [])
    model.graph.node.append(oh.make_node("If", ["k"], ["z"], then_branch=branch, else_branch=branch))


def _with_an_opaque_input(model):
    model.graph.input.add(name="opaque").type.opaque_type.name = "Handle"


def _with_a_map(model):
    kind = model.graph.input.add(name="map").type.map_type
    kind.key_type, kind.value_type.tensor_type.elem_type = 7, 1


def _without_an_output(model):
    del model.graph.node[-1].output[:]


def _with_a_name_twice(model):
    model.graph.initializer.extend(model.graph.initializer[:1])


def _with_training(model):
    model.training_info.add()


def _with_another_version(model):
    model.opset_import.append(oh.make_opsetid("fusebook", 7))
    model.graph.node.append(oh.make_node("Own", ["updates"], ["own"], domain="fusebook"))


def _with_a_function(model):
    relu, opset = oh.make_node("Relu", ["a"], ["b"]), oh.make_opsetid("", 18)
    model.functions.append(oh.make_function("fusebook", "ScatterNDOfShape", ["a"], ["b"], [relu], [opset]))


def test_a_domain_that_no_node_is_of_is_no_obstacle():
    pytest.importorskip("onnxscript")
    model = _onnx_model(torch.float32)
    want = export.fuse(model)
    model.opset_import.append(oh.make_opsetid("fusebook", 1000))  # as ONNX Runtime does, if it knows the domain
    assert export.fuse(model).SerializeToString(deterministic=True) == want.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_a_sparse_initializer, "sparse tensors"),
        (_with_a_sparse_constant, "sparse tensors"),
        (_with_training, "training_info"),
        (_with_a_name_twice, "initializers of different names"),
        (_with_an_opaque_input, "opaque types"),
        (_with_a_map, "onnx_ir can take, got one with which it fails: Map types are not supported"),
        (_without_an_output, "onnx_ir can take, got one with which it fails: The number of values"),
        (_with_another_version, "the domain fusebook in version 1"),
        (_with_a_function, "without functions of the model"),
    ],
)
def test_models_that_would_lose_or_mistake_something_are_refused(change, message):
    pytest.importorskip("onnxscript")
    ir = pytest.importorskip("onnx_ir")
    model = _onnx_model(torch.float32)
    change(model)
    with pytest.raises(ValueError, match=message):
        export.fuse(model)
    if "fusebook" in message or "functions" in message:
        with pytest.raises(ValueError, match=message):
            export.fuse(ir.from_proto(model))


@INTERPRETED_ONLY
def test_a_model_whose_branches_have_names_of_the_outer_graph_stays_as_it_is():
    numbers = {"s": torch.tensor([3, 2]), "i": torch.tensor([[1]]), "c": torch.full((1, 2), 5.0)}
    outer, inner = ([onnx.numpy_helper.from_array(v.numpy() * k, name) for name, v in numbers.items()] for k in (20, 1))

    def branch(y):
        chain = [oh.make_node("ConstantOfShape", ["s"], [f"{y}0"])]
        chain += [oh.make_node("ScatterND", [f"{y}0", "i", "c"], [y], reduction="add")]
        return oh.make_graph(chain, y, [], [oh.make_tensor_value_info(y, 1, [3, 2])], inner)

    nodes = [oh.make_node("If", ["p"], ["o"], then_branch=branch("a"), else_branch=branch("b"))]
    nodes += [oh.make_node("Add", ["o", "c"], ["y"])]
    given, made = oh.make_tensor_value_info("p", 9, []), oh.make_tensor_value_info("y", 1, [3, 2])
    proto = oh.make_model(
        oh.make_graph(nodes, "g", [given], [made], outer[2:]), ir_version=10, opset_imports=[oh.make_opsetid("", 18)]
    )
    before, expected = proto.SerializeToString(), torch.tensor([[100.0] * 2, [105.0] * 2, [100.0] * 2])
    for model in (export.fuse(proto), proto):
        y = Graph(model, device="cpu", ops=NODES)({"p": torch.tensor(True)})["y"]
        assert torch.equal(y, expected)
    assert proto.SerializeToString() == before


def test_a_model_of_onnx_ir_stays_as_it_is():
    pytest.importorskip("onnxscript")
    ir = pytest.importorskip("onnx_ir")
    given = ir.from_proto(_onnx_model(torch.float32))
    before = [node.op_type for node in given.graph]
    assert [node.op_type for node in export.fuse(given).graph] == ["MaskedScatterNDOfShape"]
    assert [node.op_type for node in given.graph] == before


def test_a_model_of_onnx_ir_that_cannot_be_written_is_refused_in_a_sentence():
    ir = pytest.importorskip("onnx_ir")
    model = ir.from_proto(_onnx_model(torch.float32))
    model.graph.node(0).attributes["odd"] = ir.Attr("odd", ir.AttributeType.STRING, 5)
    with pytest.raises(ValueError, match="ort.Graph: expected a model that onnx_ir can take"):
        Graph(model, device="cpu")


def test_without_onnxscript_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    for call in (export.translations, lambda: export.fuse(None)):
        with pytest.raises(
            ModuleNotFoundError, match="onnxscript is not installed; it comes with Fusebook's extra 'ort'"
        ):
            call()


# Weights of few bits --------------------------------------------------------------------------------------------------


def nbits(
    K=96, N=48, bits=4, group=32, dtype=torch.float16, zeros=False, bias=False, g_idx=False, constant=True, **more
):
    """A model of MatMulNBits, its initializers, and the values of its weight in float64."""
    rng = torch.Generator().manual_seed(K + N + bits)
    groups, kind = -(-K // group), {torch.float16: 10, torch.bfloat16: 16}[dtype]
    codes = torch.randint(2**bits, (N, groups * group), generator=rng, dtype=torch.uint8)
    points = torch.randint(2**bits, (N, groups), generator=rng, dtype=torch.uint8)
    scales = (torch.rand(N, groups, generator=rng) + 0.5).to(dtype)

    def stored(values):
        values = torch.nn.functional.pad(values, (0, values.shape[1] % (8 // bits)))
        return values if bits == 8 else values[:, ::2] | values[:, 1::2] << 4

    given = {"codes": stored(codes).view(N, groups, group * bits // 8), "scales": scales}
    if zeros:
        given["zeros"] = stored(points)
    if g_idx:
        given["g_idx"] = torch.arange(K, dtype=torch.int32) // group
    if bias:
        given["bias"] = torch.randn(N, generator=rng).to(dtype)
    names = ["x", *(name if name in given else "" for name in ("codes", "scales", "zeros", "g_idx", "bias"))]
    while not names[-1]:
        names.pop()
    sizes = {"K": K, "N": N, "bits": bits, "block_size": group, **more}
    made = oh.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", **sizes)
    kinds = {torch.uint8: 2, torch.int32: 6, dtype: kind}
    constants = [
        oh.make_tensor(name, kinds[v.dtype], v.shape, v.contiguous().view(torch.uint8).numpy().tobytes(), raw=True)
        for name, v in given.items()
    ]
    graph_inputs = [oh.make_tensor_value_info("x", kind, ["M", K])]
    if not constant:
        graph_inputs.append(oh.make_tensor_value_info("scales", kind, scales.shape))
    graph = oh.make_graph([made], "g", graph_inputs, [oh.make_tensor_value_info("y", kind, ["M", N])], constants)
    opsets = [oh.make_opsetid("", 18), oh.make_opsetid("com.microsoft", 1)]
    middle = points.double() if zeros else torch.full((N, groups), 2.0 ** (bits - 1)).double()
    wide = [v.repeat_interleave(group, 1) for v in (middle, scales.double())]
    weight = ((codes.double() - wide[0]) * wide[1])[:, :K]
    return oh.make_model(graph, ir_version=10, opset_imports=opsets), given, weight


@pytest.mark.parametrize(
    ("M", "options"),
    [
        (1, {}),
        (8, {"zeros": True, "bias": True, "group": 64, "K": 208}),
        (9, {"bits": 8, "group": 128, "K": 256, "bias": True}),
        (16, {"bits": 8, "zeros": True, "N": 17}),
        (3, {"dtype": torch.bfloat16, "zeros": True}),
    ],
)
def test_a_matmul_of_few_bits_becomes_ours(M, options, device):
    pytest.importorskip("onnxscript")
    proto, given, weight = nbits(**options)
    fused = export.fuse(proto)
    assert domains(fused) == [("fusebook", "QuantizedMatMul")]
    names = {tensor.name for tensor in fused.graph.initializer}
    assert names == {"y/words", "y/scales", "bias" if "bias" in given else "y/bias"} | {
        f"y/{n}" for n in given if n == "zeros"
    }
    x = torch.randn(M, weight.shape[1], generator=torch.Generator().manual_seed(M)).to(given["scales"].dtype)
    got = Graph(fused, device=device, ops=NODES)({"x": x.to(device)})["y"].double().cpu()
    exact = x.double() @ weight.T + given.get("bias", torch.zeros(1)).double()
    eps = torch.finfo(x.dtype).eps
    error = (got - exact).abs() / (eps * exact.abs() + 2**-18 * (x.double().abs() @ weight.abs().T))
    assert error.max() <= 1
    if x.dtype == torch.float16:  # of which ONNX Runtime's CPU has a kernel
        theirs = Graph(proto, device="cpu")({"x": x})["y"].double()
        torch.testing.assert_close(got, theirs, atol=0.05, rtol=0.02)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"zeros": True, "group": 64, "K": 208}, {"bits": 8, "zeros": True, "N": 17}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_compiled_matmul_of_few_bits_is_that_of_python(options, dtype, library):
    proto, _, weight = nbits(dtype=dtype, **options)
    fused = export.fuse(proto)
    compiled, python = Graph(fused, library=library), Graph(fused, ops=NODES)
    for M in (0, 1, 8, 9, 16, 33):
        x = torch.randn(M, weight.shape[1], device="cuda", dtype=dtype)
        assert torch.equal(compiled({"x": x})["y"], python({"x": x})["y"])


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_compiled_matmul_takes_no_unaligned_weight(library):
    """Its kernels are compiled for addresses that are multiples of 16."""
    fused = export.fuse(nbits(zeros=True)[0])
    x = torch.randn(3, 96, device="cuda", dtype=torch.float16)
    for tensor in fused.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        fused.graph.input.append(oh.make_tensor_value_info(tensor.name, tensor.data_type, array.shape))
        weight = torch.from_numpy(array.copy()).cuda()
        odd = torch.empty(weight.numel() + 1, device="cuda", dtype=weight.dtype)[1:].view(weight.shape).copy_(weight)
        graph = Graph(fused, library=library)
        with pytest.raises(Exception, match="multiples of 16 bytes"):
            graph({"x": x, tensor.name: odd})
        assert torch.equal(graph({"x": x, tensor.name: weight})["y"], graph({"x": x})["y"])


def test_a_weight_of_other_sizes_is_refused(device):
    pytest.importorskip("onnxscript")
    fused = export.fuse(nbits()[0])
    fused.graph.node[0].attribute.append(oh.make_attribute("group", 64))
    del fused.graph.node[0].attribute[[a.name for a in fused.graph.node[0].attribute].index("group")]
    with pytest.raises(Exception, match="expected scales of shape"):
        Graph(fused, device=device, ops=NODES)({"x": torch.zeros(1, 96, dtype=torch.float16, device=device)})


def test_a_weight_of_few_bits_comes_back():
    pytest.importorskip("onnxscript")
    proto, given, _ = nbits(K=208, group=64, zeros=True)
    tensors = {
        t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in export.fuse(proto).graph.initializer
    }
    packed = fusebook.PackedWeight(*(tensors[f"y/{name}"] for name in ("words", "scales", "zeros")), (48, 208), 4, 64)
    codes, scales, zeros = packed.codes()
    codes = torch.nn.functional.pad(codes, (0, 256 - 208))
    want = given["codes"].view(48, -1)
    assert torch.equal((codes[:, ::2] | codes[:, 1::2] << 4)[:, :104], want[:, :104])
    assert torch.equal(zeros[:, ::2] | zeros[:, 1::2] << 4, given["zeros"]) and torch.equal(scales, given["scales"])


@pytest.mark.parametrize(
    "options",
    [
        {"group": 256, "K": 256},
        {"constant": False},
        {"K": 100},
        {"N": 0},
        {"weight_prepacked": 1},
        {"accuracy_level": "4"},
    ],
)
def test_a_matmul_of_few_bits_that_ours_does_not_take_stays(options):
    pytest.importorskip("onnxscript")
    assert domains(export.fuse(nbits(**options)[0])) == [("com.microsoft", "MatMulNBits")]


@INTERPRETED_ONLY
def test_a_repacked_weight_takes_no_name_of_the_model():
    pytest.importorskip("onnxscript")
    proto, _, _ = nbits()
    names = ["y/words", "y/bias", "y/scales"]
    proto.graph.initializer.extend(oh.make_tensor(n, 10, [1], [i]) for i, n in enumerate(names, 2))
    proto.graph.node.append(oh.make_node("Sum", ["y", *names], ["z"]))
    proto.graph.output.append(oh.make_tensor_value_info("z", 10, None))
    given = proto.SerializeToString()
    fused = Graph(export.fuse(proto), device="cpu", ops=NODES)
    assert proto.SerializeToString() == given
    got = fused({"x": torch.ones(1, 96, dtype=torch.float16)})
    torch.testing.assert_close(got["z"], got["y"] + 9)


def test_a_matmul_whose_groups_are_scattered_stays_with_a_sentence():
    pytest.importorskip("onnxscript")
    with pytest.warns(UserWarning, match=r"expected MatMulNBits without g_idx.*stays as it is"):
        assert domains(export.fuse(nbits(g_idx=True)[0])) == [("com.microsoft", "MatMulNBits")]


def test_a_weight_of_few_bits_stays_where_there_is_no_gpu_to_pack_it(monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(export, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match=r"expected a GPU, on which weights are packed.*stays as it is"):
        assert domains(export.fuse(nbits()[0])) == [("com.microsoft", "MatMulNBits")]
