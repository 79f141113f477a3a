"""Checks of what the book says about other GPUs: compiled code is up to date, and no GPU is chosen by its name."""

import ast
import os
import re
import types
from pathlib import Path

import pandas as pd
import pytest
import torch
import triton

import answers
import gpus
import on_gpus
from fusebook.cards import OPS
from fusebook.kernels import _call
from fusebook.lesson import _show
from fusebook.measure import machine, record

ROOT = Path(__file__).resolve().parents[1]


def test_recorded_operators_were_compiled_for_every_gpu_and_fit():
    rows = gpus.rows()
    ours = [name for name in OPS if "fusebook" in OPS[name].variants and record.exists(name)]
    missing = [(kind.names[0], name) for kind in gpus.KINDS for name in ours if (kind.names[0], name) not in rows]
    assert not missing, "python tests/gpus.py compiles them"
    shared = {kind.names[0]: kind.shared for kind in gpus.KINDS}
    assert all(int(row["shared"]) <= shared[gpu] for (gpu, _), row in rows.items() if row["status"] == "compiled")


def test_what_runs_on_nvidias_gpus_compiles():
    failed = {key: row["status"] for key, row in gpus.rows().items() if row["status"] not in ("compiled", "refused")}
    assert not {key for key in failed if key[0] != "MI300X"}, failed


def test_a_row_of_other_code_is_compiled_again_and_says_so(monkeypatch):
    kind, op = gpus.KINDS[0], OPS["softmax"]
    key = kind.names[0], op.name
    fresh = {key: {"code": gpus.sources.of_variant(op, "fusebook")[0], "operator": op.name}}
    assert gpus.due([kind], [op.name], fresh) == []
    old = {key: fresh[key] | {"code": "0"}}
    assert gpus.due([kind], [op.name], old) == [(kind, op)]
    for rows, names in ((fresh, []), (old, ["softmax"])):
        monkeypatch.setattr(on_gpus, "compiled", lambda rows=rows: rows)
        assert on_gpus.stale() == names


def test_a_cell_says_how_it_is_known(monkeypatch):
    row = {"status": "compiled", "features": "fp8; mma"}
    failed = {"status": "KeyError: no", "features": ""}
    monkeypatch.setattr(on_gpus, "compiled", lambda: {("A100", "softmax"): row, ("L4", "softmax"): failed})
    monkeypatch.setattr(on_gpus, "ran", lambda gpu, op: gpu == "H200")
    assert [on_gpus.word(gpu, "softmax") for gpu in ("A100", "L4", "H200", "B200")] == [
        "compiled", "fails", "ran", "predicted",
    ]  # fmt: skip
    assert on_gpus.features("A100", "softmax") == {"fp8", "mma"}
    paths = on_gpus.paths().loc["softmax"]
    assert paths.loc["fp8", "A100"] == "compiled" and paths.loc["fp8", "L4"] == ""
    assert paths.loc["instead: refused; int8 runs", "L4"] == "fails"


def _row(us, **more):
    same = {"code": "1", "host": "", "variant": "torch", "versions": "torch 2.11.0", "math": "", "dtype": "bfloat16"}
    took = {"gpu_us": us, "gpu_us_20": us, "gpu_us_80": us, "launch_us": 5.0, "copy_us": 10.0, "floor_us": 2.0}
    return pd.Series(same | {"zone": "memory"} | took | more)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            (_row(10), _row(10)),
            (_row(20), _row(10)),
            "bandwidth (x 0.50): Fusebook follows it (x 0.50), torch does not (x 1.00)",
        ),
        (
            (_row(10), _row(10)),
            (_row(10), _row(20)),
            "bandwidth (x 0.50): torch follows it (x 0.50), Fusebook does not",
        ),
        ((_row(10), _row(10)), (_row(15), _row(10)), "not explained by bandwidth, L2, rate or launch"),
        ((_row(10), _row(10.4)), (_row(21), _row(20)), "not explained"),
        ((_row(10, zone="launch"), _row(10)), (_row(9.5), _row(10)), "a launch takes most of the time"),
        ((_row(10), _row(10)), (_row(20, code="2"), _row(10)), "different kernels"),
        ((_row(10), _row(10)), (_row(20, code=""), _row(10)), "bandwidth"),
        ((_row(10), _row(10)), (_row(20), _row(10, versions="torch 2.13.0")), "the versions: torch 2.11.0 and 2.13.0"),
        ((_row(10), _row(10)), (_row(20), _row(10, versions="torch 2.11.0; ptxas 12.8")), "bandwidth"),
        ((_row(10, gpu_us_80=16.0), _row(10)), (_row(20), _row(10)), "samples of torch are from 10.0 to 16.0"),
        ((_row(10), _row(10)), (_row(20), _row(19.6)), "a change of 2 %, around the 2 % that count as equal"),
        (
            (_row(10, launch_us=27.0, host="1"), _row(10)),
            (_row(5, host="2"), _row(10)),
            "of Fusebook and of torch: 27 and 5 us on H100, 5 and 5 us on H200; Fusebook's call path has changed",
        ),
    ],
)
def test_a_cause_is_named_where_one_implementation_follows_it(first, second, words):
    on = [
        types.SimpleNamespace(name=f"NVIDIA {name}", copy=copy, rates={"bfloat16": 1.0})
        for name, copy in (("H100", 2.0), ("H200", 1.0))
    ]
    for row in second:
        row["copy_us"] = 20.0
    times = [ours["gpu_us"] / other["gpu_us"] for ours, other in (first, second)]
    assert words in on_gpus.cause([first, second], on, times)


def test_verdicts_that_differ_are_compared_on_the_problems_of_both(monkeypatch):
    def frame(*lost):
        rows = [{"dtype": "float32", "M": m, "status": "ok", "lost": m in lost} for m in range(1, 5)]
        return pd.DataFrame(rows)

    first, second = frame(), frame(4)
    found = {"a": {"softmax": first[first["M"] < 4]}, "b": {"softmax": second}}
    monkeypatch.setattr(on_gpus, "column", str.upper)
    monkeypatch.setattr(
        answers, "verdict", lambda op, rows: types.SimpleNamespace(word="no" if rows["lost"].any() else "yes")
    )
    row = on_gpus.differing(found).loc["softmax"]
    assert row.to_dict() == {"A": "yes", "B": "no", "problems": "3 and 4", "on those of both": "yes"}
    found["a"] = {"softmax": first}
    assert on_gpus.differing(found).loc["softmax", "on those of both"] == "yes and no"


def test_problems_that_do_not_fit_into_memory_are_named(monkeypatch):
    rows = pd.DataFrame({"dtype": "float32", "M": [1, 2, 2], "status": ["ok", "out of memory", "out of memory"]})
    monkeypatch.setattr(on_gpus, "column", str.upper)
    monkeypatch.setattr(on_gpus, "machines", lambda: dict.fromkeys("ab", types.SimpleNamespace(memory=80 * 2**30)))
    assert on_gpus.exceeding({"a": {"softmax": rows}, "b": {"softmax": rows[:1]}}) == [
        "These do not fit into the 80 GiB of A: ``softmax`` at 2 float32.",
        "All recorded problems fit into the 80 GiB of B.",
    ]


def test_no_code_chooses_by_the_name_of_a_gpu():
    """A launch config depends on capability, multiprocessors and sizes; names are for records and messages."""
    package = ROOT / "src" / "fusebook"
    for file in sorted([*package.glob("kernels/*.py"), *package.glob("ort/*.py"), *package.glob("*.py")]):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                assert not re.search(r"\b([ABH]\d{2,3}|L4|L40|RTX|GeForce|MI\d{3})\b", node.value), (
                    file.name,
                    node.value,
                )
            if isinstance(node, ast.Attribute):
                by_name = node.attr == "name" and "properties" in ast.unparse(node.value)
                assert node.attr != "get_device_name" and not by_name, f"{file.name}:{node.lineno}"


def test_the_newest_versions_are_those_that_are_tested():
    here = {"torch": torch.__version__, "triton": triton.__version__}
    number = {name: tuple(map(int, version.split(".")[:2])) for name, version in here.items()}
    newest = {name: tuple(map(int, version.split("."))) for name, version in machine.NEWEST.items()}
    assert all(number[name] <= newest[name] for name in newest), "raise machine.NEWEST"
    if os.environ.get("CI") and not torch.cuda.is_available():
        assert number == newest


def test_a_page_says_which_version_is_newer():
    newest = machine.NEWEST["triton"]
    assert _show._once(["torch 2.11.0; triton 3.6.0"]).endswith(f"triton 3.6.0 (the newest is {newest})")
    assert _show._once([f"triton {newest}.1", "triton 3.6.0", "quack 0.1"]) == f"triton {newest}.1 and 3.6.0; quack 0.1"


def test_an_amd_gpu_has_no_capability_of_nvidias(monkeypatch):
    """Its driver says 9.4, as if it were a later Hopper; AMD's compiler takes neither option of such a launch."""
    like = types.SimpleNamespace(major=9, minor=4, multi_processor_count=304)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: like)
    monkeypatch.setattr(_call, "INTERPRETED", False)
    for hip, capability in ((None, (9, 4)), ("6.4", _call.AMD)):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert _call.gpu.__wrapped__(torch.device("cuda")) == (capability, 304)
    monkeypatch.setattr(_call, "gpu", lambda device: (_call.AMD, 304))
    assert _call.overlapping(torch.device("cuda")) == {}
    monkeypatch.setattr(_call, "_nvidia", lambda: False)
    taken = _call.launch({(1,): lambda **options: options}, (1,), maxnreg=64, num_warps=32)
    assert taken == {"num_warps": 16}
