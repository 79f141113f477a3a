"""What a call launches: found without a GPU, changed by what changes it, and by nothing else."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import fusebook
import warm
from fusebook import digests, launches, ways
from fusebook.cards import OPS
from fusebook.kernels import _operator, _products
from fusebook.kernels._operator import INTERPRETED, OPERATORS
from fusebook.ort import custom

HOPPER = (9, 0), 132
LIBRARY = Path(fusebook.__file__).parent

#: A number that functions below use.
CALLS = 1

#: A cheap point of each operator that is looked at, and of two rivals.
POINTS = {
    "softmax": [("fusebook", "float32", {"M": 64, "N": 1000}), ("Liger", "float32", {"M": 64, "N": 1000})],
    "softmax_backward": [("fusebook", "float32", {"M": 64, "N": 1000})],
    "masked_scatter_nd_of_shape": [
        (name, "float32", {"R": 2**16, "D": 4096, "n": 4096, "law": "uniform"})
        for name in ("fusebook", "fusebook atomic")
    ],
    "silu": [("fusebook", "float32", {"M": 64, "N": 64}), ("torch.compile", "float32", {"M": 64, "N": 64})],
    "exp": [("fusebook", "float32", {"M": 64, "N": 64})],
    "swiglu": [("fusebook", "float16", {"M": 4096, "K": 4096, "N": 11008})],
    "concat_gemm": [
        ("fusebook", "float16", {"M": 512, "K": 512, "N": 512, "weights": "two"}),
        ("fusebook, TF32", "float16", {"M": 512, "K": 512, "N": 512, "weights": "two"}),
    ],
    "logistic_step": [("fusebook", "float32", {"N": 4096, "D": 64})],
    "logistic_fit": [("fusebook", "float32", {"N": 4096, "D": 64, "steps": 100})],
    "kmeans_assign": [("fusebook", "float32", {"n": 4096, "d": 2, "k": 8, "labels": "int64", "law": "blobs"})],
}  # fmt: skip


class Copy:
    """A copy of the library to be changed."""

    def __init__(self, folder):
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "records")
        shutil.copytree(LIBRARY, folder / "fusebook", ignore=ignored)

    def change(self, old, new, folder="."):
        """Replace what a pattern matches, wherever it stands; it must stand somewhere."""
        count = 0
        for file in (self.folder / "fusebook" / folder).rglob("*"):
            if file.suffix in (".py", ".json", ".csv"):
                text, n = re.subn(old, new, file.read_text())
                count += n
                if n:
                    file.write_text(text)
        assert count, f"nothing in {folder} matches {old!r}"

    def found(self, compile=False, **points):
        found = launches.elsewhere(points or POINTS, *HOPPER, compile=compile, library=self.folder)
        return {(op, point[0]): pair for op, asked in (points or POINTS).items()
                for point, pair in zip(asked, found[op], strict=True)}  # fmt: skip


@pytest.fixture(scope="module")
def original():
    """Found by a process of its own, as the library does it; the copies below are asked by forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "subprocess", subprocess)
        found = launches.elsewhere(POINTS, *HOPPER)
    return {(op, p[0]): pair[0] for op in found for p, pair in zip(POINTS[op], found[op], strict=True)}


def test_every_launch_is_found_or_refused(original):
    assert original.pop(("concat_gemm", "fusebook, TF32")) == launches.REFUSED  # of float16
    assert all(re.fullmatch("[0-9a-f]{12}", found) for found in original.values()), original
    ours = [found for (_, variant), found in original.items() if variant.startswith("fusebook")]
    assert len(set(ours)) == len(ours)


def test_another_gpu_is_another_matter():
    point = ("fusebook", "float16", {"M": 4096, "K": 4096, "N": 1024, "weights": "columns"})
    gpus = HOPPER, ((9, 0), 66), ((8, 0), 132)
    assert len({launches.elsewhere({"concat_gemm": [point]}, *gpu)["concat_gemm"][0] for gpu in gpus}) == 3


#: What is changed, and what by: a pattern, its replacement, and the variants that launch something else then.
NOTICED = {
    "a token of a kernel": (r"tl\.maximum\(tops, x\)", "tl.maximum(x, tops)", {("softmax", "fusebook")}),
    "a global constant": (
        r"_GROUPING = 576", "_GROUPING = 2**30", {("masked_scatter_nd_of_shape", "fusebook")},
    ),
    "a default of a NamedTuple": (r"warps: int = 4\b", "warps: int = 2", {("kmeans_assign", "fusebook")}),
    "a dict of expressions": (
        r'"silu": Expression\(_silu', '"silu": Expression(_double', {("silu", "fusebook")},
    ),
    "a tuned row": (r"(?m)^(90,half,.*,tiles,)128,", r"\g<1>64,", {("swiglu", "fusebook")}),
    "another number of warps": (
        r"WIDE=plan\.wide, LATE=bool\(early\), num_warps=4", "WIDE=plan.wide, LATE=bool(early), num_warps=8",
        {("logistic_step", "fusebook")},
    ),
    "another grid": (
        r"_logistic_fit_losses, \(triton\.cdiv\(steps, rows\),\)",
        "_logistic_fit_losses, (triton.cdiv(steps, rows) + 1,)",
        {("logistic_fit", "fusebook")},
    ),
    "a rival's wrapper": (r"LigerSoftmaxFunction\.apply\(", "LigerSoftmaxFunction.apply(*", {("softmax", "Liger")}),
}  # fmt: skip


def test_what_changes_the_launches_is_noticed_and_nowhere_else(original, tmp_path):
    copy = Copy(tmp_path)
    for old, new, _ in NOTICED.values():
        copy.change(old, new)
    now = {key: pair[0] for key, pair in copy.found().items()}
    changed = {key for key in original if now[key] != original[key]}
    for what, (*_, which) in NOTICED.items():
        assert which <= changed, what
    # What shares a module or a dict with something that has changed has not.
    assert changed == set().union(*(which for *_, which in NOTICED.values()))


UNNOTICED = {
    "a docstring": (r"ROWS rows of any width, read twice", "Rows, and not one of them read once"),
    "a comment": (r"(\n    tops = tl\.full)", r"\n    # So small that anything is larger.\1"),
    "a comment at the end": (r"(program = tl\.program_id\(0\))\n", r"\1  # whoever we are\n"),
    "an annotation": (r"def _load\(ptr, inside\):", 'def _load(ptr: "pointer", inside) -> "tile":'),
    "a renamed kernel": (r"\b_softmax_rows\b", "_rows_kept_in_registers"),
    "a renamed helper": (r"\brows_of\b", "_mine"),
    "a renamed function of the host": (r"\b_launch_fit\b", "_go"),
    "renamed variables of a kernel": (r"\bEXPRESSION\b", "FUNCTION"),
    "an error message": (r"move it to a GPU", "carry it to a GPU"),
    "a constant by its value": (r"2\*\*26", "67108864"),
}


def test_what_changes_no_launch_is_not_noticed(original, tmp_path):
    copy = Copy(tmp_path)
    for old, new in UNNOTICED.values():
        copy.change(old, new)
    # A renamed file.
    (tmp_path / "fusebook/kernels/logistic_step.py").rename(tmp_path / "fusebook/kernels/descent.py")
    copy.change(r"fusebook\.kernels\.logistic_step\b", "fusebook.kernels.descent")
    now = {key: pair[0] for key, pair in copy.found().items()}
    assert {key for key in original if now[key] != original[key]} == set()


@pytest.mark.slow
def test_code_is_the_same_where_the_gpu_does_the_same(tmp_path):
    """A kernel written otherwise, whose PTX is equal, on one side; another grid and another constant on the other."""
    asked = {name: POINTS[name][:1] for name in ("exp", "silu")}
    before = Copy(tmp_path / "before").found(True, **asked)
    same, other = Copy(tmp_path / "same"), Copy(tmp_path / "other")
    same.change(r"first = start \+ (tl\.arange\(0, BLOCK // GROUP\)\[:, None\] \* GROUP)", r"first = \1 + start")
    same.change(r"\b_elementwise_flat\b", "_neighbours_of_all")
    after = same.found(True, **asked)
    for key in before:
        assert before[key][0] != after[key][0] and before[key][1] == after[key][1] != "", key
    other.change(r"grid, constants = \(plan\.programs,\)", "grid, constants = (plan.programs + 1,)")
    other.change(r"lost \* 0\.6931471805599453", "lost * 0.69")
    after = other.found(True, **asked)
    assert all(before[key][1] != after[key][1] for key in before)


def test_code_does_not_depend_on_the_assembler_that_was_found():
    text = ".version {}\n.target sm_90a\n.visible .entry f()\n{{\n  ret;\n}}\n"
    earlier, later = (launches._ptx(text.format(version), "f") for version in ("8.7", "9.0"))
    assert earlier == later != launches._ptx(text.format("9.0").replace("ret", "trap"), "f")


def parameter(name, constant=False):
    return types.SimpleNamespace(name=name, default=None, has_default=False, is_constexpr=constant)


def test_what_a_launch_is_made_of(monkeypatch):
    kernel = types.SimpleNamespace(params=[parameter("x_ptr"), parameter("n"), parameter("BLOCK", True)])
    monkeypatch.setattr(launches, "_of_kernel", str)
    ptx = types.SimpleNamespace(asm={"ptx": "ret;"}, metadata=types.SimpleNamespace(name="f"))
    memory = torch.zeros(32)
    x = memory[(-memory.data_ptr() % 16) // 4 :]

    def traced(pointer=x, n=7, grid=(3,), **given):
        trace = launches.Trace()
        trace.launched(kernel, (pointer, n), grid, {"BLOCK": 64} | given, ptx)
        return trace.launches, trace.code

    def tiles(*block):
        return types.SimpleNamespace(base=x, shape=[4, 8], block_shape=list(block), padding="zero")

    calls = [{}, {"n": 8}, {"grid": (4,)}, {"BLOCK": 32}, {"num_warps": 8}, {"pointer": x.double()}, {"pointer": x[1:]}]
    calls += [{"pointer": tiles(2, 8)}, {"pointer": tiles(4, 8)}]
    assert len({traced(**call)[0] for call in calls}) == len(calls)
    assert traced(pointer=x.clone()) == traced(grid=lambda given: (3, 1, 1)) == traced()
    assert traced(n=8)[1] != traced()[1] != traced(grid=(4,))[1], "numbers and grids are given to the same code"
    assert traced(n=1)[1] == traced(n=None)[1], "and these are part of it"


def test_what_a_call_of_torch_is_made_of():
    x = torch.ones(4, 6)

    def called(*args, tf32=False, **kwargs):
        trace = launches.Trace()
        with _products.torch_in_tf32(tf32):
            trace.called("mm", args, kwargs)
        return trace.launches

    calls = [called(x), called(x[:2]), called(x.T), called(x.double()), called(x, alpha=2), called(x, tf32=True)]
    assert len(set(calls)) == 6 and called(x + 1) == called(x, device="cpu") == calls[0]
    assert not launches._works("t", {}, [x], [x.T]) and launches._works("mm", {"out": x}, [x], [x])


def test_what_is_compiled_ahead_is_no_launch(monkeypatch):
    monkeypatch.setattr(launches.JITFunction, "run", lambda self, *_, grid, warmup: f"compiled {warmup}")
    with launches.kernels() as found:
        for warmup in (True, False):
            launches.JITFunction.run(None, grid=(1,), warmup=warmup)
    assert found == ["compiled False"]


def test_memory_that_was_read_is_zero_again():
    place = launches._Nowhere()
    for make, number in ((torch.ones, 1), (torch.empty, 0), (torch.zeros, 0)):
        with place:
            assert make(4).tolist() == [number] * 4
        place.again(everything=True)


SAME_BOTH_WAYS = """
import fusebook, torch
from fusebook import digests, inputs, launches
from fusebook.cards import OPS

points = [
    ("exp", "fusebook", {"M": 64, "N": 64}),
    ("masked_scatter_nd_of_shape", "fusebook, checked", {"R": 2000, "D": 16, "n": 100, "law": "uniform"}),
    ("embedding_backward", "fusebook sorted", {"R": 40, "D": 16, "n": 5000, "law": "uniform"}),
]
for op, variant, dims in points:
    op = OPS[op]
    [(there, _)] = launches.found(op, [(variant, "float32", dims)], launches.AbsentGPU())
    made = op.make(inputs.generator(0, "cpu"), torch.float32, **dims)
    with launches.observed() as trace:
        op.variants[variant].run(*made)
    assert trace.launches == there, (op.name, trace.steps)
    assert trace.code and any(isinstance(step[0], str) for step in trace.steps)
"""


@pytest.mark.slow
def test_calls_that_run_are_taken_down_as_those_that_do_not():
    """With tensors that are there, a driver that launches nothing, and kernels that are compiled."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(LIBRARY.parent)}
    process = warm.run("-W", "ignore", "-c", SAME_BOTH_WAYS, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]


def test_where_nothing_can_be_found_out_the_reason_is_told(tmp_path):
    with pytest.raises(launches.Unknown, match="no_such_module"):
        launches.elsewhere(POINTS, *HOPPER, cards="no_such_module:OPS")


# Functions of the host, by which rivals are known ---------------------------------------------------------------------

SCALE = 3


def helper(x):
    return SCALE * x


def uses(x):
    """Calls a helper."""
    y = helper(x)
    if y is None:
        raise ValueError(f"expected a number, got {y}")
    return y


def uses_too(number: int) -> int:
    # Not a word is the same.
    scaled: int = helper(number)
    if scaled is None:
        raise ValueError("nothing")
    return scaled


def uses_otherwise(x):
    y = helper(x)
    if y is not None:
        raise ValueError(f"expected a number, got {y}")
    return y


def asks():
    """Reads what differs from one machine to the next, and from one process to the next."""
    found = sys.executable, torch.__version__, torch.version.cuda, torch._C._cuda_getCurrentRawStream, __file__, __doc__
    found += INTERPRETED, _operator.INTERPRETED, OPERATORS, custom._OPS, np.random.default_rng(0), _operator._forward
    return *found, CALLS


def again(n):
    return 0 if n == 0 else again(n - 1)


def refuses(x):
    if x is None:
        raise ValueError
    return x


def refuses_otherwise(x):
    if x is None:
        raise TypeError
    return x


@triton.jit
def specialised(x_ptr, n):
    tl.store(x_ptr, n)


@triton.jit(do_not_specialize=["n"])
def not_specialised(x_ptr, n):
    tl.store(x_ptr, n)


def test_what_a_page_keeps_is_begun_empty_where_a_gallery_runs_it(tmp_path):
    page = tmp_path / "plot_page.py"
    page.write_text("plans = {}\n\n\ndef planned(x):\n    return plans.setdefault(x, x)\n")
    found = []
    for file in (str(page), "plot_page.py"):  # a gallery is in another folder by then
        scope = {"__name__": "__main__", "__file__": file}
        exec(compile(page.read_text(), str(page), "exec"), scope)
        for _ in range(2):
            found.append(digests.digest(scope["planned"]))
            scope["planned"](7)
    assert len(set(found)) == 1


def test_a_function_is_what_it_does(monkeypatch):
    assert digests.digest(uses) == digests.digest(uses_too) != digests.digest(uses_otherwise)
    assert digests.digest(again) == digests.digest(again)
    assert digests.digest(refuses) != digests.digest(refuses_otherwise)
    assert digests.digest(specialised) != digests.digest(not_specialised)

    def adding(n):
        def adds(x, n=n):
            return x + n

        return adds

    assert digests.digest(adding(1)) == digests.digest(adding(1)) != digests.digest(adding(2))
    before = digests.digest(uses), digests.digest(functools.partial(uses, 1))
    assert before[1] != digests.digest(functools.partial(uses, 2)) != before[0]
    monkeypatch.setitem(globals(), "SCALE", 4)
    assert digests.digest(uses) != before[0]


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (sys, "executable", "/elsewhere/bin/python"),
        (torch, "__version__", "1.0"),
        (torch.version, "cuda", "99.9"),
        (torch._C, "_cuda_getCurrentRawStream", len),
        (_operator, "INTERPRETED", not INTERPRETED),
        (sys.modules[__name__], "INTERPRETED", not INTERPRETED),
        (sys.modules[__name__], "__file__", str(Path(__file__).parent / ".." / "tests" / Path(__file__).name)),
        (_operator.OPERATORS, "another", None),
        (custom._OPS, -1, None),
        (torch.autograd.forward_ad, "another", None),
    ],
)
def test_a_function_is_the_same_on_every_machine(monkeypatch, where, name, value):
    before = digests.digest(asks)
    if isinstance(where, dict):
        monkeypatch.setitem(where, name, value)
    else:
        monkeypatch.setattr(where, name, value, raising=False)
    assert digests.digest(asks) == before
    monkeypatch.setitem(globals(), "CALLS", CALLS + 1)
    assert digests.digest(asks) != before


def test_what_is_chosen_by_whether_triton_interprets_counts_as_where_it_compiles(monkeypatch):
    before = digests.digest(_operator.launch)
    for other in (threading.RLock(), contextlib.nullcontext()):
        monkeypatch.setattr(_operator, "_by_turns", other)
        assert digests.digest(_operator.launch) == before


def test_a_function_is_the_same_with_another_build_of_torch_and_triton(monkeypatch):
    """What their modules hold, and where their files lie, is theirs."""
    asked = [fusebook.adamw_step, *(way.run for op in OPS.values() for way in op.variants.values())]
    before = [digests.digest(function) for function in asked]
    abroad = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("torch", "triton")]
    for module in abroad:
        monkeypatch.setitem(vars(module), "__cached__", "/elsewhere/of_another_build.pyc")
    assert [digests.digest(function) for function in asked] == before


def test_functions_of_one_line_are_told_apart():
    one, two, three = (lambda x: x + 1), (lambda y: y + 1), (lambda x: x + 2)
    assert digests.digest(one) == digests.digest(two) != digests.digest(three)

    def adds(n):
        return lambda x: x + n

    assert digests.digest(adds(1)) == digests.digest(adds(1)) != digests.digest(adds(2))


def test_what_a_process_keeps_is_no_code(monkeypatch):
    """Operators that ONNX Runtime was told of stand in a dict that its module begins empty."""
    variant = OPS["silu"].variants["ONNX Runtime"]
    before = launches.of_wrapper(variant)
    monkeypatch.setitem(custom._OPS, -1, str)
    assert launches.of_wrapper(variant) == before


# What an operator does, whatever it is asked for ----------------------------------------------------------------------

WAYS = """
import json
from fusebook import ways
from fusebook.cards import OPS
asked = "softmax exp silu swiglu concat_gemm kmeans_step logistic_step masked_scatter_nd_of_shape"
print(json.dumps({op: ways.ways(OPS[op], (9, 0), OPS[op].variants) for op in asked.split()}))
"""


def ways_of(copy):
    process = warm.run("-W", "ignore", "-c", WAYS, env=os.environ | {"PYTHONPATH": str(copy.folder)})
    assert process.returncode == 0, process.stderr[-3000:]
    return {(op, name): way for op, found in json.loads(process.stdout).items() for name, way in found.items()}


@pytest.fixture(scope="module")
def original_ways(tmp_path_factory):
    return ways_of(Copy(tmp_path_factory.mktemp("ways")))


#: As above: what is changed, and what by, and the operators of which a variant of ours does something else then.
CHANGED = {
    "a token of a kernel": (r"tl\.maximum\(tops, x\)", "tl.maximum(x, tops)", {"softmax"}),
    "a kernel of an operator that is found by its name": (
        r"live = first \+ part < PARTS", "live = PARTS > first + part", {"kmeans_step"},
    ),
    **{what: (*NOTICED[what][:2], which) for what, which in {
        "a global constant": {"masked_scatter_nd_of_shape"},
        "a dict of expressions": {"silu"},
        "a tuned row": {"swiglu", "concat_gemm"},
        "a rival's wrapper": set(),
    }.items()},
}  # fmt: skip


def test_what_an_operator_does_otherwise_is_noticed_and_nowhere_else(original_ways, tmp_path):
    copy = Copy(tmp_path)
    for old, new, _ in CHANGED.values():
        copy.change(old, new)
    now = ways_of(copy)
    changed = {key for key in original_ways if now[key] != original_ways[key]}
    ours = set().union(*(which for *_, which in CHANGED.values()))
    expected = {(op, name) for op, name in original_ways if op in ours and name.startswith("fusebook")}
    assert changed == expected | {("softmax", "Liger")}


@pytest.mark.parametrize("what", ["into", "outputs", "check", "read"])
def test_all_of_an_operator_counts(what, monkeypatch):
    asked = OPS["scatter_nd_of_shape"], (9, 0), ("fusebook", "eager")
    before = ways.ways(*asked)
    monkeypatch.setattr(OPERATORS["scatter_nd"], what, lambda *given: given)
    assert {name for name, way in ways.ways(*asked).items() if way != before[name]} == {"fusebook"}


@pytest.mark.parametrize("what", ["make", "draw"])
def test_problems_are_what_draws_and_what_makes_them(what):
    op = OPS["softmax"]
    other = dataclasses.replace(op, **{what: lambda *given: given})
    before, now = (ways.ways(of, (9, 0), op.variants) for of in (op, other))
    assert {name for name, way in now.items() if way != before[name]} == {ways.PROBLEMS}


def test_what_an_operator_does_is_the_same_however_it_is_said(original_ways, tmp_path):
    copy = Copy(tmp_path)
    for what, (old, new) in UNNOTICED.items():
        # Launchers name a kernel's parameters and hold constants that nothing evaluates: there, words count.
        if what not in ("renamed variables of a kernel", "a constant by its value"):
            copy.change(old, new)
    copy.change(r"\bfastest_first\b", "from_the_last")
    copy.change(r"\binside\b", "within_it", "kernels")
    copy.change(r"def _caller\(self\)", "def _made_quick(self)")
    copy.change(r"self\._caller\(\)", "self._made_quick()")
    copy.change(r"(?m)^90(,half,any,rows 16,.*)$", r"90\1\n80\1")
    assert ways_of(copy) == original_ways


def of_two_blocks(blocks):
    """Launch a kernel whose threads keep a row of so many numbers."""
    import torch

    from fusebook.kernels.allreduce_norm import _allreduce_norm

    turns = torch.zeros(4, dtype=torch.int32)
    for block in blocks:
        x = torch.zeros(4, block, dtype=torch.bfloat16)
        _allreduce_norm[(4,)](
            x, x, (x, x), x, x, turns, (turns, turns), 4, block, 1e-6, 4, ME=0, MEET=True, BLOCK=block, num_warps=8
        )


def refused():
    raise ValueError("nothing to launch")


def test_registers_are_counted_without_a_gpu():
    version, (few, many) = launches.registers(of_two_blocks, [1024, 8192])
    assert version == triton.__version__
    assert 16 <= few < many <= 255
    with pytest.raises(launches.Unknown, match="nothing to launch"):
        launches.registers(refused)
