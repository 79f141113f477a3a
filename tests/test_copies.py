"""Families of kernels copied out: a file with what it needs, in an empty folder, without Fusebook.

A copy launches the same kernels with the same grids as the package. Its operators have the name of its own package, so
that both work in one process.
"""

import ast
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import fusebook
import warm

KERNELS = Path(fusebook.__file__).parent / "kernels"
#: For each family the files besides `_call.py` and `_rows.py`, and a few small calls.
FAMILIES = {
    "softmax": ((), "softmax(x).sum().backward(); softmax(wide, 0)"),
    "elementwise": ((), "silu(x).sum().backward(); add_sub(x, x[0]); silu_mul(x, x)"),
    "products": ((), "concat_gemm(x, [w, w[:, :3]]).sum().backward(); swiglu(x, w, w)"),
    "scatter": ((), "embedding_backward(x, at, 9); scatter_nd_of_shape([9, 16], at[:, None], x)"),
    "kmeans": ((), "kmeans(wide, 3); kmeans_update(wide, kmeans_assign(wide, wide[:3].clone()), 3)"),
    "distributed": (("kmeans",), "SharedKMeans(3, 16)(wide, wide[:3].clone())"),
    "logistic_step": ((), "logistic_step(wide, wide[:, 0] * 0, wide[0] * 0, wide[0, :1] * 0, 0.1, 0)"),
    "adamw": ((), "adamw_step([wide], [wide * 1], [wide * 0], [wide * 0], step=1)"),
    "losses": ((), "cross_entropy(x, at).backward(); linear_cross_entropy(x, w.mT, at).backward()"),
    "norms": (
        (),
        "rms_norm(x, w[0]).sum().backward(); add_layer_norm(x, x, w[0]); rms_norm(wide, dtype=torch.int8)",
    ),
    "rope": ((), "rope(x, w[:4, :8], w[:4, :8], heads=None).sum().backward(); rope(wide, w[0], w[1], heads=None)"),
    "quantized": ((), "quantized_matmul(wide.half(), quantize(wide.half(), 8, 32))"),
}

#: In a process without Fusebook: the launches of each copy; then with it, those of the package.
PROGRAM = """
import importlib, json, sys, traceback
import torch, triton
import torch.distributed as dist
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

folder, package, calls = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
launches = []

def watch(cls):
    run = cls.run

    def watched(self, *args, grid, **options):
        launches.append([self.fn.__name__, list(grid), [v for v in args if type(v) in (int, float, bool)]])
        return run(self, *args, grid=grid, **options)

    cls.run = watched

watch(InterpretedFunction)
watch(JITFunction)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def launched(name, family):
    launches.clear()
    try:
        torch.manual_seed(0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x, w = (torch.randn(4, 16, device=device), torch.randn(16, 16, device=device))
        given = {"torch": torch, "x": x.requires_grad_(), "w": w, "wide": torch.randn(300, 16, device=device)}
        given["at"] = torch.tensor([1, 0, 3, 7], device=device)
        exec(calls[family], vars(importlib.import_module(f"{name}.{family}")) | given)
        return list(launches)
    except Exception:
        return traceback.format_exc()

sys.path.insert(0, folder)
alone = {family: launched(f"copied_{family}", family) for family in calls}
loaded = [name for name in sys.modules if name.startswith("fusebook")]
sys.path.insert(0, package)
both = {family: launched("fusebook.kernels", family) for family in calls}
again = {family: launched(f"copied_{family}", family) for family in calls}
operators = [name.partition("::")[::2] for name in torch._C._dispatch_get_all_op_names()]
print(json.dumps([alone, loaded, both, again, operators]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    for family, (others, _) in FAMILIES.items():
        copy = folder / f"copied_{family}"
        copy.mkdir()
        for name in ("_call", "_rows", family, *others):
            (copy / f"{name}.py").write_text((KERNELS / f"{name}.py").read_text())
    calls = json.dumps({family: call for family, (_, call) in FAMILIES.items()})
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
    done = warm.run("-c", PROGRAM, str(folder), str(KERNELS.parents[1]), calls, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_works_alone_and_next_to_the_package(family, found):
    alone, loaded, both, again, operators = found
    assert not loaded, "the copies have imported the package"
    assert isinstance(alone[family], list) and alone[family], alone[family]
    assert alone[family] == both[family] == again[family]
    own, package = ({name for space, name in operators if space == of} for of in (f"copied_{family}", "fusebook"))
    assert own and own <= package


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_imports_torch_triton_numpy_and_what_is_copied_with_it(family):
    others, _ = FAMILIES[family]
    for name in (family, *others):
        for node in ast.parse((KERNELS / f"{name}.py").read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            if isinstance(node, ast.ImportFrom) and node.level:
                assert {*([node.module] if node.module else names)} <= {"_call", "_rows", family, *others}, name
            elif names:
                roots = {root.partition(".")[0] for root in ([node.module] if hasattr(node, "module") else names)}
                assert roots <= {*sys.stdlib_module_names, "torch", "triton", "numpy"}, name
