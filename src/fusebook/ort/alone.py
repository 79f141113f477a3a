"""The library that is compiled ahead of time, in a process that can import neither torch nor Triton nor Fusebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

__all__ = ["alone"]

_SCRIPT = """
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


def alone(model: Any, library: str | os.PathLike[str], provider: str = "CUDAExecutionProvider") -> dict[str, Any]:
    """Run a node of masked ScatterND where there is nothing but ONNX Runtime and the library, and compare with NumPy.

    Parameters
    ----------
    model : onnx.ModelProto
        With inputs ``shape``, ``indices [n, 1]`` and ``updates [n, D]``, in float32.
    library : path
        What ``python -m fusebook.ort build`` made.

    Returns
    -------
    dict
        The provider, ONNX Runtime's version, elements computed and elements wrong, and which of the three modules were
        there.

    Raises
    ------
    RuntimeError
        With the last line of what that process said where it failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        file.write(model.SerializeToString())
        file.flush()
        command = [sys.executable, "-P", "-c", _SCRIPT, os.path.abspath(library), file.name, provider]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"fusebook.ort: {(done.stderr.strip().splitlines() or ['the process died'])[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
