"""Files that others wrote are data: nothing in them is run, and names in them lead nowhere and mean nothing else."""

import itertools
import json

import pandas as pd
import pytest
import torch

from fusebook import tables
from fusebook.lesson._claims import Claim, Claims
from fusebook.lesson._show import downloads, table
from fusebook.measure import bench, explore, record
from fusebook.measure import machine as machines
from fusebook.measure.bench import Origin
from fusebook.measure.inputs import generator
from toy import machine, toy

HOSTILE = "<script>alert('x')</script>\"&"
OUTSIDE = ["../elsewhere", "/tmp/elsewhere", "a/../../b", "..", "pages/../x", "a\x00b", "con\\x"]


# Names


@pytest.fixture
def frame(tmp_path, monkeypatch):
    """Results in which all that is text would be a mark in HTML."""
    monkeypatch.setenv("_FUSEBOOK_DOWNLOADS", str(tmp_path / "downloads"))
    found = bench.run(toy(), config="small", repeat=2, warmup=0)
    for column in ("op", "variant", "note", "zone", "versions", "date", "status"):
        found[column] = found[column].astype(object)
        found.loc[:, column] = HOSTILE
    on = machine(
        **dict.fromkeys(("name", "driver", "cuda", "python", "torch", "triton", "cpu", "commit", "date"), HOSTILE)
    )
    found.attrs["origin"] = Origin(on, measured=True, stale=(HOSTILE,), page="", versions=HOSTILE, commit=HOSTILE)
    return found


def test_names_are_escaped_in_html(frame):
    shown = [
        table(frame.set_index("variant"), HOSTILE),
        table(frame[:0], HOSTILE),
        Claims([Claim(HOSTILE, True)]),
    ]
    for one in shown:
        text = one._repr_html_()
        assert "<script" not in text and "alert(" in text


def test_a_file_that_is_offered_lies_in_its_folder(frame, tmp_path):
    frame.loc[:, "op"] = "../../elsewhere"
    downloads(frame, "offered")
    assert [f.parent for f in tmp_path.rglob("*.csv")] == [tmp_path / "downloads"]
    for name in OUTSIDE[:4]:
        with pytest.raises(ValueError, match="no folder"):
            downloads(frame, name)


FORMULAS = ["=1+1", "+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1"]


def test_no_cell_of_a_file_is_a_formula(tmp_path, monkeypatch):
    openpyxl = pytest.importorskip("openpyxl")
    monkeypatch.setenv("_FUSEBOOK_DOWNLOADS", str(tmp_path))
    df = pd.DataFrame({"=A1": FORMULAS[:4], "number": [-1.5, 2, -3, 4], "plain": ["a=b", "", "x-y", "1+1"]})
    downloads(df, "offered")
    again = pd.read_csv(tmp_path / "offered.csv")
    assert list(again) == ["'=A1", "number", "plain"] and again["'=A1"].tolist() == [f"'{f}" for f in FORMULAS[:4]]
    assert again["number"].tolist() == [-1.5, 2, -3, 4] and again["plain"].tolist()[::2] == ["a=b", "x-y"]
    cells = itertools.chain(*openpyxl.load_workbook(tmp_path / "offered.xlsx").active.iter_rows())
    assert "f" not in {cell.data_type for cell in cells}
    assert [tables.harmless(f) for f in FORMULAS] == [f"'{f}" for f in FORMULAS]
    assert tables.harmless(-1.5) == -1.5 and tables.harmless("") == ""
    assert tables.harmless("\x1b[91merror\x1b[0m: \x07=") == "error: =" and tables.harmless("\x1b[1m=1") == "'=1"


def test_no_cell_of_a_record_is_a_formula(tmp_path):
    found = bench.run(toy(), config="small", repeat=2, warmup=0)
    found["note"] = "=HYPERLINK()"
    found.attrs["origin"] = Origin(machine(), measured=True)
    file = record.write(found, tmp_path)
    assert ",'=HYPERLINK()," in file.read_text() and ",=" not in file.read_text()
    assert record.read("toy", "test-gpu", tmp_path)["note"].tolist() == ["'=HYPERLINK()"] * 2


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_no_name_leads_out_of_the_folder_of_records(name, tmp_path):
    with pytest.raises(record.RecordError):
        record.path(name, "test-gpu", tmp_path)
    for asked in (lambda: record.path("toy", name, tmp_path), lambda: explore.path(name, "toy", tmp_path)):
        with pytest.raises(ValueError, match="expected the folder of a GPU"):
            asked()
    frame = pd.DataFrame({"x": [1]})
    frame.attrs["origin"] = Origin(machine(), measured=True, page="x")
    with pytest.raises(record.RecordError, match="expected a name like pages/transfers"):
        record.write(frame, tmp_path, f"pages/{name}")
    frame.attrs["origin"] = Origin(machine(slug=name), measured=True, page="x")
    with pytest.raises(ValueError):
        record.write(frame, tmp_path, "pages/x")
    assert not list(tmp_path.rglob("*"))


def test_a_machine_that_names_another_folder_is_refused(tmp_path):
    file = tmp_path / "machine.json"
    machines.save(machine(), file)
    values = json.loads(file.read_text()) | {"slug": "../../elsewhere"}
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="folder of a GPU"):
        machines.load(file)


#: Changes of a machine.json: a field by its path, and what replaces it; None removes it.
ESCAPE = "NVIDIA \x1b]0;title\x07\x1b[2J"
WRONG = [
    *((f"{key}", ESCAPE) for key in ("name", "driver", "torch", "cpu", "commit", "date")),
    ("name", "a\nb"),
    ("name", "a\u202eb"),
    ("name", "\x9b2J"),
    ("beside torch-overrides", ESCAPE),
    (f"beside {ESCAPE}", "1"),
    ("name", 5),
    ("name", None),
    (ESCAPE, 1),
    ("recorded", True),
    *(("copy", value) for value in (float("nan"), float("inf"), 0, -1, 10**400, True, "fast", None, [])),
    *(("sms", value) for value in (0, -1, 1.5, True, "132")),
    ("rates", "fast"),
    ("rates float32", None),
    ("rates float32", "x"),
    ("rates float7", 1e12),
    ("floor_cold", {}),
    ("floor_cold", {"1": 1e-6}),
    ("floor_cold one", 1e-6),
    (f"floor_warm {'9' * 5000}", 1e-6),
    ("clocks sm", -1),
    ("clocks", []),
    ("bandwidth", "x"),
    ("bandwidth", [{"bytes": 1}]),
    ("capability", "90"),
    ("capability", [9]),
    ("capability", [9, "0"]),
    ("beside", []),
]


@pytest.mark.parametrize(("where", "value"), WRONG, ids=lambda value: ascii(value)[:40])
def test_a_machine_with_a_wrong_value_is_refused_in_a_line_that_names_its_file(where, value, tmp_path):
    file = tmp_path / "machine.json"
    machines.save(machine(), file)
    values = json.loads(file.read_text())
    first, _, second = (where, "", "") if where == ESCAPE else where.partition(" ")
    place, key = (values[first], second) if second else (values, first)
    if value is None and not second:
        del place[key]
    else:
        place[key] = value
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"machine\.json: not a machine\.json of this version") as caught:
        machines.load(file)
    assert str(caught.value).isprintable() and len(str(caught.value)) < len(str(file)) + 250


def test_a_machine_is_read_as_it_was_written(tmp_path):
    for on in (machine(), machine(beside={"torch-overrides": "none"}, clocks={}, onnxruntime="", bandwidth=[])):
        machines.save(on, tmp_path / "machine.json")
        assert machines.load(tmp_path / "machine.json") == on
    for name in machines.slugs():
        assert machines.recorded(name).slug == name


@pytest.mark.parametrize(
    "text", ["[]", "5", '{"plot_1": "5"}', '{"plot_1": NaN}', '{"plot_\\u001b[2J": 5}', "{", "\x00"]
)
def test_seconds_of_pages_are_names_and_numbers(text, tmp_path):
    file = tmp_path / "seconds.json"
    assert machines.seconds(file) == {}
    file.write_text('{"plot_1": 0.0, "plot_2": 5}')
    assert machines.seconds(file) == {"plot_1": 0.0, "plot_2": 5.0}
    file.write_text(text)
    with pytest.raises(ValueError, match=r"seconds\.json: not seconds by page") as caught:
        machines.seconds(file)
    assert str(caught.value).isprintable()


def test_the_first_line_of_a_record_is_bounded_and_printable(tmp_path):
    found = bench.run(toy(), config="small", repeat=2, warmup=0)
    found.attrs["origin"] = Origin(machine(), measured=True)
    file = record.write(found, tmp_path)
    head, _, body = file.read_text().partition("\n")
    assert record.read(toy(), "test-gpu", tmp_path) is not None
    for other in (
        head.replace("rows=2", f"rows={'2' * 5000}"),
        head.replace("record 3", f"record {'2' * 5000}", 1),
        *(f"{head} | {key}={ESCAPE}" for key in ("versions", "date", "commit")),
        f"{head} | date=\x9b2J",
    ):
        assert other != head
        file.write_text(f"{other}\n{body}")
        with pytest.raises(record.RecordError, match=r"toy\.csv: ") as caught:
            record.read(toy(), "test-gpu", tmp_path)
        assert str(caught.value).isprintable()


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    found = bench.run(toy(), config="small", repeat=2, warmup=0)
    found.attrs["origin"] = Origin(machine(), measured=True)
    for file in (record.write(found, tmp_path), tmp_path / "test-gpu" / "machine.json"):
        text = file.read_text()
        file.unlink()
        file.mkdir()
        with pytest.raises(record.RecordError, match=file.name):
            record.read(toy(), "test-gpu", tmp_path)
        file.rmdir()
        file.write_text(text)


# Values


@pytest.fixture
def witness(tmp_path, monkeypatch):
    """Text that leaves a file behind where somebody evaluates it, and the file."""
    file = tmp_path / "evaluated"
    monkeypatch.setenv("WITNESS", str(file))
    yield "__import__('os').system('touch $WITNESS')", file
    assert not file.exists()


def test_nothing_in_a_record_is_run(witness, tmp_path):
    text, _ = witness
    found = bench.run(toy(), config="small", repeat=2, warmup=0)
    for column in ("note", "variant", "code", "host", "versions"):
        found[column] = text
    found.attrs["origin"] = Origin(machine(commit=text, driver=text), measured=True)
    record.write(found, tmp_path)
    again = record.read(toy(), "test-gpu", tmp_path)
    assert again["note"].tolist() == [text] * 2
    assert set(again["stale"]) == {"is not an implementation of its card any more"}
    table(again, text)._repr_html_()


# ONNX models


def opsets(kind):
    """All of them for the plain chain; for others those at which something changed, and the last."""
    return range(13, 24) if kind == "plain" else (15, 16, 18, 23)


def chain(opset, dtype, kind):
    """A model with the standard chain, as somebody else may write it, and its inputs."""
    import numpy as np
    import onnx
    import onnx.helper as oh
    from onnx import numpy_helper as nh

    number = {torch.float32: 1, torch.float16: 10, torch.int64: 7}[dtype]
    zero = np.zeros(1, {1: np.float32, 10: np.float16, 7: np.int64}[number])
    axes = 3 if kind == "further axes" else 2
    sizes = (5, 4, 4)[:axes]
    n = 4
    names = {k: k for k in ("zeros", "masked", "hit", "kept", "y")}
    if kind == "names that collide":
        names |= {"zeros": "fusebook", "kept": "MaskedScatterNDOfShape_0", "hit": "val_0", "masked": "anonymous:0"}
    constants = [nh.from_array(np.array([-1]), names["masked"]), nh.from_array(zero, "nothing")]
    nodes = [
        oh.make_node("ConstantOfShape", ["shape"], [names["zeros"]], value=nh.from_array(zero, "v")),
        oh.make_node("Equal", ["indices", names["masked"]], [names["hit"]]),
        oh.make_node("Where", [names["hit"], "nothing", "updates"], [names["kept"]]),
        oh.make_node("ScatterND", [names["zeros"], "indices", names["kept"]], [names["y"]], reduction="add"),
    ]
    if opset < 16:
        del nodes[3].attribute[:]
    known = kind != "missing shapes"
    inputs = [
        oh.make_tensor_value_info("shape", 7, [axes]),
        oh.make_tensor_value_info("indices", 7, [n, 1] if known else None),
        oh.make_tensor_value_info("updates", number, [n, *sizes[1:]] if known else None),
    ]
    out = [oh.make_tensor_value_info(names["y"], number, [None] * axes)]
    functions, imports = [], [oh.make_opsetid("", opset)]
    if kind == "a mask that a caller may replace":
        inputs.append(oh.make_tensor_value_info(names["masked"], 7, [1]))
    if kind == "a subgraph":
        branch = oh.make_graph(nodes, "then", [], out)
        other = oh.make_graph(
            [oh.make_node("ConstantOfShape", ["shape"], ["o"], value=nh.from_array(zero, "v"))],
            "else", [], [oh.make_tensor_value_info("o", number, [None] * axes)],
        )  # fmt: skip
        constants.append(nh.from_array(np.array(True), "yes"))
        nodes = [oh.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=other)]
    if kind == "a function":
        body = [oh.make_node("Constant", [], ["masked"], value=constants[0])]
        body += [oh.make_node("Constant", [], ["nothing"], value=constants[1]), *nodes]
        functions = [oh.make_function("local", "Scatter", ["shape", "indices", "updates"], ["y"], body, imports)]
        nodes = [oh.make_node("Scatter", ["shape", "indices", "updates"], ["y"], domain="local")]
        imports = [*imports, oh.make_opsetid("local", 1)]
    graph = oh.make_graph(nodes, "g", inputs, out, constants)
    made = oh.make_model(graph, ir_version=8 if opset < 20 else 10, opset_imports=imports, functions=functions)
    if known:
        onnx.checker.check_model(made)
    rng = generator(opset, "cpu")
    updates = torch.randint(-9, 9, (n, *sizes[1:]), generator=rng).to(dtype)
    feeds = {"shape": torch.tensor(sizes), "indices": torch.tensor([[1], [-1], [2], [1]]), "updates": updates}
    return made, feeds


def operators(model):
    """Domain and name of every node, those of functions and subgraphs too."""
    found, graphs = [], [model.graph, *model.functions]
    while graphs:
        for node in graphs.pop().node:
            found.append((node.domain, node.op_type))
            graphs += [a.g for a in node.attribute if a.HasField("g")]
    return found


KINDS = [
    "plain", "missing shapes", "names that collide", "a subgraph", "a function", "further axes",
    "a mask that a caller may replace",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_rewritten_equals_onnx_runtime_on_the_original(kind, device):
    ort, *_ = map(pytest.importorskip, ("onnxruntime", "onnx", "onnxscript"))
    if device == "cuda" and "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    from fusebook.ort import Graph, export
    from fusebook.ort.nodes import NODES

    rewritten = 0
    for opset in opsets(kind):
        for dtype in (torch.float32,) if opset not in (16, 18) else (torch.float32, torch.int64):
            model, feeds = chain(opset, dtype, kind)
            before = model.SerializeToString()
            fused = export.fuse(model)
            assert model.SerializeToString() == before
            ours = [op for domain, op in operators(fused) if domain == "fusebook"]
            if opset < 16 or dtype == torch.int64 or kind == "a function":  # functions stay as they are
                assert not ours
            if kind in ("a mask that a caller may replace", "missing shapes", "further axes"):
                assert "MaskedScatterNDOfShape" not in ours
            rewritten += len(ours)
            want = Graph(model, device="cpu")(feeds)
            # What was left as it is need not be anything that ONNX Runtime has for a GPU.
            got = Graph(fused, device=device if ours else "cpu", ops=NODES)(feeds)
            for a, b in zip(got.values(), want.values(), strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0)
    assert rewritten >= 3 or kind == "a function", "nothing was tried"


@pytest.mark.parametrize("which", ["masked", "nothing", "v"])
def test_no_file_that_a_model_names_is_read(which, tmp_path, monkeypatch):
    """Of numbers that lie elsewhere only the place is known, and that may be anybody's file."""
    onnx, *_ = map(pytest.importorskip, ("onnx", "onnxscript"))
    from fusebook.ort import export

    model, _ = chain(18, torch.float32, "plain")
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path / "secret", "../secret", "/dev/zero", "nowhere"):
        (tmp_path / "secret").write_bytes(bytes(8))
        told = onnx.ModelProto.FromString(model.SerializeToString())
        values = {t.name: t for t in told.graph.initializer}
        values["v"] = told.graph.node[0].attribute[0].t
        values[which].ClearField("raw_data")
        values[which].data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", place), ("offset", 0), ("length", 8 if which == "masked" else 4)):
            values[which].external_data.add(key=key, value=str(value))
        ours = [name for domain, name in operators(export.fuse(told)) if domain]
        assert ours == ([] if which == "v" else ["ScatterNDOfShape"])  # which needs no more than the zeros


def odd_value(told):
    told.graph.node[0].attribute[0].Clear()
    told.graph.node[0].attribute[0].name, told.graph.node[0].attribute[0].type = "value", 2  # a whole number
    told.graph.node[0].attribute[0].i = 0


def odd_dtype(told):
    told.graph.node[0].attribute[0].t.data_type = 0


def few_bytes(told):
    for tensor in (*told.graph.initializer, told.graph.node[0].attribute[0].t):
        tensor.raw_data = b"0"


def no_axes(told):
    next(v for v in told.graph.input if v.name == "indices").type.tensor_type.shape.ClearField("dim")


@pytest.mark.parametrize(
    ("change", "left"), [(odd_value, []), (odd_dtype, []), (few_bytes, []), (no_axes, ["ScatterNDOfShape"])]
)
def test_a_model_of_odd_parts_is_left_as_it_is(change, left):
    onnx, *_ = map(pytest.importorskip, ("onnx", "onnxscript"))
    from fusebook.ort import export

    model, _ = chain(18, torch.float32, "plain")
    told = onnx.ModelProto.FromString(model.SerializeToString())
    change(told)
    assert [name for domain, name in operators(export.fuse(told)) if domain] == left
    for other in (None, "model.onnx", model.SerializeToString()):
        with pytest.raises(TypeError, match=r"fuse: expected an onnx\.ModelProto or onnx_ir\.Model, got \w+; load it"):
            export.fuse(other)
