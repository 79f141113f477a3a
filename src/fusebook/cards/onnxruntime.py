"""Masked ScatterND as a graph of ONNX Runtime: three models that mean the same, and what a run of them costs."""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
import tempfile
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fusebook import check, inputs, timing
from fusebook.cards.scatter_nd import MASKED_SCATTER_ND
from fusebook.kernels.scatter_nd import masked_scatter_nd_of_shape
from fusebook.op import Cost, Op, Variant
from fusebook.ort import Bound, Graph, custom_op
from fusebook.ort.aot import cached
from fusebook.ort.custom import _ELEMENTS
from fusebook.ort.nodes import NODES

__all__ = ["MODELS", "NODES_OF_ONNX_RUNTIME", "OPS", "PAGE", "alone", "captured", "model", "overhead"]

#: The page that tells of them.
PAGE = 501

#: From the standard chain to one node.
MODELS = ("ScatterND", "ScatterNDOfShape", "MaskedScatterNDOfShape")


@functools.cache
def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A graph that adds masked updates to zeros.

    Parameters
    ----------
    name : str
        One of `MODELS`, the node that adds; or ``"Identity"``, a graph that does nothing.
    dtype : torch.dtype
        Of the updates.

    Returns
    -------
    onnx.ModelProto
        Inputs ``shape``, ``indices [n, 1]`` and ``updates [n, D]``, output ``y``; of Identity, ``updates`` and ``y``.
    """
    from onnx import TensorProto, helper, numpy_helper

    kind = _ELEMENTS[dtype]
    zero = helper.make_tensor("zero", kind, [1], [0.0])
    mask = [
        helper.make_node("Equal", ["indices", "masked"], ["is_masked"]),
        helper.make_node("Where", ["is_masked", "nothing", "updates"], ["kept"]),
    ]
    ours: dict[str, Any] = {"domain": "fusebook", "reduction": "add"}
    chains = {
        "ScatterND": [
            helper.make_node("ConstantOfShape", ["shape"], ["zeros"], value=zero),
            *mask,
            helper.make_node("ScatterND", ["zeros", "indices", "kept"], ["y"], reduction="add"),
        ],
        "ScatterNDOfShape": [*mask, helper.make_node("ScatterNDOfShape", ["shape", "indices", "kept"], ["y"], **ours)],
        "MaskedScatterNDOfShape": [
            helper.make_node(
                "MaskedScatterNDOfShape", ["shape", "indices", "updates"], ["y"], maskedValue=-1, **ours
            )
        ],
        "Identity": [helper.make_node("Identity", ["updates"], ["y"])],
    }  # fmt: skip
    constants = [
        numpy_helper.from_array(torch.tensor([-1]).numpy(), "masked"),
        helper.make_tensor("nothing", kind, [1], [0.0]),
    ]
    taken = [
        helper.make_tensor_value_info("shape", TensorProto.INT64, ["axes"]),
        helper.make_tensor_value_info("indices", TensorProto.INT64, ["n", 1]),
        helper.make_tensor_value_info("updates", kind, ["n", "D"]),
    ]
    graph = helper.make_graph(
        chains[name],
        name,
        taken[2:] if name == "Identity" else taken,
        [helper.make_tensor_value_info("y", kind, ["R", "D"])],
        constants if len(chains[name]) > 1 else [],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("fusebook", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def _session(name: str, dtype: torch.dtype, device: torch.device, how: str, captured: bool = False) -> Graph:
    options = {"enable_cuda_graph": "1"} if captured else None
    if how == "ahead of time":
        major, minor = torch.cuda.get_device_capability(device)
        library = cached((10 * major + minor,), (str(dtype).removeprefix("torch."),))
        return Graph(model(name, dtype), device=device, library=library, options=options)
    return Graph(model(name, dtype), device=device, ops=NODES if how == "callback" else (), options=options)


_kept_session = functools.cache(_session)  # to make one takes longer than all that is asked of it here


def _bound(graph: Graph, shape: tuple[int, ...], indices: Tensor, updates: Tensor) -> Bound:
    y = torch.empty(shape, dtype=updates.dtype, device=updates.device)
    return graph.bind({"shape": torch.tensor(shape), "indices": indices, "updates": updates}, {"y": y})


def _prepared(name: str, how: str) -> Any:
    def prepare(shape: tuple[int, int], indices: Tensor, updates: Tensor) -> tuple[Bound]:
        if updates.dtype == torch.bfloat16 and name != MODELS[2]:
            raise NotImplementedError("ONNX Runtime's own nodes of this graph do not take bfloat16")
        return (_bound(_kept_session(name, updates.dtype, updates.device, how), shape, indices, updates),)

    return prepare


def _run(bound: Bound) -> Tensor:
    return bound()["y"]


def _of_shape_cost(itemsize: int, *, R: int, D: int, n: int, law: str) -> Cost:
    # Masking in nodes of their own reads the updates and writes them; adding reads them again.
    return Cost(read=2 * n * D * itemsize + 16 * n, write=(R * D + n * D) * itemsize + n, flop=n * D)


def _in_torch(shape: tuple[int, int], indices: Tensor, updates: Tensor) -> Tensor:
    return masked_scatter_nd_of_shape(shape, indices, updates, check=False)


_NEEDS = ("cuda", "onnxruntime", "onnx")
_card = MASKED_SCATTER_ND

NODES_OF_ONNX_RUNTIME = Op(
    name="onnxruntime_nodes",
    reference=_card.reference,
    make=_card.make,
    cost=_card.cost,
    variants={
        "ScatterND": Variant(_run, _card.variants["eager"].cost, _NEEDS, _prepared("ScatterND", "")),
        "fusebook OfShape, callback": Variant(_run, _of_shape_cost, _NEEDS, _prepared(MODELS[1], "callback")),
        "fusebook OfShape, ahead of time": Variant(_run, _of_shape_cost, _NEEDS, _prepared(MODELS[1], "ahead of time")),
        "fusebook Masked, callback": Variant(_run, None, _NEEDS, _prepared(MODELS[2], "callback")),
        "fusebook Masked, ahead of time": Variant(_run, None, _NEEDS, _prepared(MODELS[2], "ahead of time")),
        "fusebook from torch": Variant(_in_torch),
    },
    configs=_card.configs,
    edges=_card.edges,
)

OPS = (NODES_OF_ONNX_RUNTIME,)


# What no card measures ---------------------------------------------------------------------------------------------


def _timed(functions: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    # The host alone: calls that are not waited for, which is what a program with more to do pays.
    host = {name: timing._host_seconds(function) for name, function in functions.items()}
    times = timing.measure(functions, warmup=20, repeat=100, kinds=("cold", "call"))
    rows = []
    for name, by_kind in times.items():
        row = {"run": name, **more, "host_us": host[name] * 1e6}
        for kind in ("cold", "call"):
            if (q := by_kind[kind]) is not None:
                row |= {f"{kind}_us_20": q.q20 * 1e6, f"{kind}_us": q.q50 * 1e6, f"{kind}_us_80": q.q80 * 1e6}
        rows.append(row)
    return rows


def overhead() -> pd.DataFrame:
    """What a run costs before a kernel has done anything: graphs of one node on a tensor of 4 KiB.

    Returns
    -------
    pandas.DataFrame
        A row for each graph; times in microseconds: `cold` and `call` as in `fusebook.timing`, `host` is the time until
        the call returns.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(8, 128, device=device)

    def bound(name: str, domain: str, **given: Any) -> Bound:
        return Graph(_unary(name, domain), device=device, **given).bind({"x": x}, {"y": torch.empty_like(x)})

    empty = custom_op("Nothing", lambda x, out: None, {"x": torch.float32}, {"y": torch.float32}, "x")
    major, minor = torch.cuda.get_device_capability(device)
    library = cached((10 * major + minor,), ("float32",))
    return pd.DataFrame(
        _timed(
            {
                "Identity": bound("Identity", ""),
                "Softmax of ONNX Runtime": bound("Softmax", ""),
                "Softmax, ahead of time": bound("Softmax", "fusebook", library=library),
                "a callback that does nothing": bound("Nothing", "fusebook", ops=[empty]),
                "Softmax, callback": bound("Softmax", "fusebook", ops=NODES),
                "fusebook.softmax from torch": functools.partial(_softmax, x),
            }
        )
    )


def _softmax(x: Tensor) -> Tensor:
    import fusebook

    return fusebook.softmax(x)


def _unary(name: str, domain: str) -> Any:
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node(name, ["x"], ["y"], domain=domain)],
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", "N"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", "N"])],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("fusebook", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def captured() -> pd.DataFrame:
    """The same runs when ONNX Runtime captures them in a CUDA graph and replays it.

    Returns
    -------
    pandas.DataFrame
        As `overhead`, with R, D and n, and whether a replay on new values gives the right result.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for R, D, n in ((256, 512, 512), (32000, 4096, 2048)):
        dims = {"R": R, "D": D, "n": n}
        made = _card.make(inputs.generator(0), torch.float32, **dims, law="uniform")
        functions, right = {}, {}
        for name, how in (("ScatterND", ""), *itertools.product(MODELS[2:], ("callback", "ahead of time"))):
            bound = _bound(_session(name, torch.float32, device, how, captured=True), *made)
            for _ in range(3):
                bound()
            # Values change in place, the captured graph reads them anew; what it does not write stays NaN.
            made[2].mul_(-1.5)
            bound._given["y"].fill_(torch.nan)
            verdict = check.judge(_card, _run(bound), check.yardstick(_card, made))
            label = f"Masked, {how}" if how else name
            functions[label], right[label] = bound, verdict.ok
        small = torch.zeros(8, 128, device=device)
        identity = Graph(_unary("Identity", ""), device=device, options={"enable_cuda_graph": "1"})
        functions["Identity"] = identity.bind({"x": small}, {"y": torch.empty_like(small)})
        rows += [row | {"right": right.get(row["run"], True)} for row in _timed(functions, **dims)]
    return pd.DataFrame(rows)


_ALONE = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "fusebook"):
            raise ImportError(name)

sys.meta_path.insert(0, Absent())
import numpy as np
import onnxruntime

if hasattr(onnxruntime, "preload_dlls"):
    onnxruntime.preload_dlls()
library, model, provider = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
options.register_custom_ops_library(library)
session = onnxruntime.InferenceSession(model, options, providers=[provider])
rng = np.random.default_rng(0)
indices, updates = rng.integers(-1, 300, (600, 1)), rng.integers(-9, 9, (600, 128)).astype(np.float32)
want = np.zeros((300, 128), np.float32)
live = indices[:, 0] != -1
np.add.at(want, indices[live, 0], updates[live])
(got,) = session.run(None, {"shape": np.array(want.shape), "indices": indices, "updates": updates})
print(json.dumps({
    "provider": session.get_providers()[0],
    "onnxruntime": onnxruntime.__version__,
    "elements": got.size,
    "wrong": int((got != want).sum()),
    "modules": ", ".join(sorted({"torch", "triton", "fusebook"} & set(sys.modules))) or "none",
}))
"""


def alone(library: Any = None, provider: str = "CUDAExecutionProvider") -> pd.DataFrame:
    """Load the library in a process that can import neither torch nor triton nor fusebook, and run it.

    Parameters
    ----------
    library : path, optional
        What ``python -m fusebook.ort build`` made; made for this GPU by default.
    provider : str

    Returns
    -------
    pandas.DataFrame
        One row: the provider, elements computed and elements wrong, and which of the three modules were there.

    Raises
    ------
    RuntimeError
        With the last line of what that process said where it failed.
    """
    if library is None:
        major, minor = torch.cuda.get_device_capability()
        library = cached((10 * major + minor,), ("float32",))
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        file.write(model(MODELS[2]).SerializeToString())
        file.flush()
        command = [sys.executable, "-c", _ALONE, str(library), file.name, provider]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"fusebook.ort: {(done.stderr.strip().splitlines() or ['the process died'])[-1]}")
    return pd.DataFrame([json.loads(done.stdout.strip().splitlines()[-1])])
