"""Evidence of the lesson on a kernel that becomes an operator."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import fusebook
from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.lesson import _launches
from fusebook.lesson.evidence import (
    Claim,
    Frames,
    Measured,
    NotRecorded,
    Recorded,
    deterministic,
    steps_correct,
    within_tolerance,
)
from fusebook.measure import check, inputs, timing

with extra("book"):
    import pandas as pd

PAGE = _launches.LaunchesPage
CLOCK = "paid"
OPERATORS = ("silu",)
EXAMPLE = {"M": 480, "N": 480, "dtype": "float32"}
WORDS = "{M} x {N} in {dtype}"
STEPS = ("eager", "function", "operator", "library", "visible")
SHAPES = ((64, 64), (8192, 8192))
DTYPES = ("float32",)
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS: Mapping[str, tuple[str, ...]] = {}
LINES = False
CAPTION = "Microseconds; CPU launch time of 64 x 64 elements, but for the last column"
TABLE = {
    "a call": ("launch_us", "64x64"),
    "forward and backward": ("gradient_us", "64x64"),
    "under vmap": ("vmap_us", "64x64"),
    "compiled": ("compiled_us", "64x64"),
    "GPU, 8192 x 8192": ("gpu_us", "8192x8192"),
}


# What is measured -----------------------------------------------------------------------------------------------------


def timed(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """The steps, torch's operator, the library's, and an operator without a batch rule; the first size in each use."""
    op, parts = OPS["silu"], []
    launcher = steps["function"]

    def one(x: Tensor) -> Tensor:
        return launcher(x)  # type: ignore[no-any-return]

    without = torch.library.custom_op("fusebook_evidence::silu", one, mutates_args=(), schema="(Tensor x) -> Tensor")
    functions: dict[str, Any] = {
        **steps,
        "no batch rule": without,
        "torch": torch.nn.functional.silu,
        "fusebook": fusebook.silu,
    }
    for M, N in SHAPES:
        made = op.make(inputs.generator(0), torch.float32, M=M, N=N)
        calls = {name: functools.partial(f, *made) for name, f in functions.items()}
        frame = _launches.clocked(calls, check.yardstick(op, made))
        for column, uses in in_use(functions, *made).items() if (M, N) == SHAPES[0] else ():
            times: dict[str, Any] = {**timing.host(uses, warmup=2, repeat=10)}
            # A call of milliseconds is taken for one that waits for the GPU: its latency is its CPU launch time.
            times |= timing.call({name: uses[name] for name in uses if not times[name]}, warmup=2, repeat=10)
            frame[column] = [1e6 * q.q50 if (q := times.get(name)) else math.nan for name in frame["step"]]
        parts.append(frame.assign(shape=f"{M}x{N}", dtype="float32"))
    return pd.concat(parts, ignore_index=True)


def in_use(functions: Mapping[str, Callable[..., Any]], x: Tensor) -> dict[str, dict[str, Callable[[], Any]]]:
    """Calls with a gradient, under vmap, and compiled, of the functions that take them: by column and function."""
    leaf = x.clone().requires_grad_()

    def there_and_back(f: Callable[..., Any]) -> Any:
        return torch.autograd.grad(f(leaf).sum(), leaf)

    def partials(f: Callable[..., Any], *names: str) -> dict[str, Callable[[], Any]]:
        return {name: functools.partial(f, functions[name]) for name in names}

    found = {
        "gradient_us": partials(there_and_back, "eager", "operator", "torch", "fusebook"),
        "vmap_us": partials(lambda f: torch.vmap(f)(x), "eager", "operator", "no batch rule", "torch", "fusebook"),
    }
    if x.is_cuda:  # a compiler has nothing to do with interpreted kernels
        compiled = {
            n: torch.compile(functions[n], fullgraph=True) for n in ("eager", "operator", "visible", "fusebook")
        }
        found["compiled_us"] = {name: functools.partial(f, x) for name, f in compiled.items()}
    return found


# Records --------------------------------------------------------------------------------------------------------------

FRAMES: dict[str, Any] = {
    "sweep": Recorded("silu", "small", "float32", ("eager", "torch", "torch.compile", "fusebook"), borrowed=True),
    "steps": Measured("operator_steps"),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _us(frames: Frames, column: str = "launch_us", shape: str = "64x64") -> pd.Series:
    """Times by step."""
    rows = tables.where(frames["steps"], shape=shape)
    if column not in rows:
        raise NotRecorded(f"{column} was not measured")
    return rows.set_index("step")[column]


def _ratio(step: str, over: str, column: str = "launch_us", shape: str = "64x64") -> Callable[[Frames], pd.Series]:
    """The time of a step over that of another one."""

    def ratio(frames: Frames) -> pd.Series:
        us = _us(frames, column, shape)
        if us.reindex([step, over]).isna().any():
            raise NotRecorded(f"{step} or {over} was not measured")
        return pd.Series({shape.replace("x", " x "): us[step] / us[over]})

    return ratio


def _times(column: str = "launch_us") -> Callable[[Frames], Mapping[str, Any]]:
    """The times of all steps, by name, for a sentence."""
    return lambda frames: {str(name): us for name, us in _us(frames, column).items()}


def _as_the_function(frames: Frames) -> pd.Series:
    """How far the GPU time of each operator is from that of its launcher."""
    us = _us(frames, "gpu_us", "8192x8192")
    return (us[us.index.isin(("operator", "library", "visible"))] / us["function"] - 1).abs()


def _own(frames: Frames) -> pd.DataFrame:
    rows = tables.where(frames["sweep"], variant="fusebook", status="ok")
    return rows.set_index([tables.label(rows), "dtype"])


# Claims ---------------------------------------------------------------------------------------------------------------

_SMALL = "64 x 64, float32, CPU launch time"
_LARGE = "8192 x 8192, float32, cold L2"
_OWN = "20 x 10 and 480 x 480, float32"

CLAIMS = (
    # The lesson's findings
    Claim(
        "library-cheaper",
        "A call of the launcher costs {function:.0f} us, of `custom_op` {operator:.0f} us, and of `Library` "
        "{library:.0f} us.",
        _ratio("operator", "library"),
        "> 1.02",
        _SMALL + "; time of step 2 over step 3",
        lesson=True,
        numbers=_times(),
    ),
    Claim(
        "visible-compiled",
        "Compiled, step 2 costs {operator:.0f} us and step 4 {visible:.0f} us: the generated code calls the operator "
        "of step 2, and launches the kernel of step 4 itself.",
        _ratio("operator", "visible", "compiled_us"),
        "> 1.02",
        _SMALL + "; time of step 2 over step 4, compiled",
        lesson=True,
        numbers=_times("compiled_us"),
    ),
    Claim(
        "batch-rule",
        "A batch rule makes vmap {median:.0x} faster for 64 rows: one launch instead of 64.",
        _ratio("no batch rule", "operator", "vmap_us"),
        "> 2",
        _SMALL + ", under vmap; time without a rule over step 2",
        lesson=True,
    ),
    Claim(
        "library-bypasses",
        "A plain call of `fusebook.silu` costs {fusebook:.0f} us, which is less than the launcher of step 1.",
        _ratio("function", "fusebook"),
        "> 1.02",
        _SMALL + "; time of step 1 over the library",
        lesson=True,
        numbers=_times(),
    ),
    # The GPU
    Claim(
        "gpu-same",
        "The GPU time of an operator is that of its launcher, within 2 %.",
        _as_the_function,
        "<= 0.02",
        _LARGE + "; steps 2 to 4",
    ),
    Claim(
        "gain-over-eager",
        "Predicted 2.5x faster than eager, measured {median:.2x}.",
        _ratio("eager", "function", "gpu_us", "8192x8192"),
        ">= 2.25",
        _LARGE + "; time of eager over step 1",
    ),
    # Other uses
    Claim(
        "gradient",
        "Forward and backward cost {operator:.0f} us by `custom_op`, {fusebook:.0f} us by `fusebook.silu` and "
        "{torch:.0f} us by torch's own operator.",
        _ratio("operator", "fusebook", "gradient_us"),
        "> 1.02",
        _SMALL + "; time of step 2 over the library",
        numbers=_times("gradient_us"),
    ),
    Claim(
        "visible-plain",
        "Without a compiler, a `triton_op` costs {visible:.0f} us and a `custom_op` {operator:.0f} us.",
        _ratio("visible", "operator"),
        "> 1",
        _SMALL + "; time of step 4 over step 2",
        numbers=_times(),
    ),
    Claim(
        "library-vmap",
        "Under vmap, a call of `fusebook.silu` should take at most as long as step 2: {median:.2f} times.",
        _ratio("fusebook", "operator", "vmap_us"),
        "<= 1.02",
        _SMALL + ", under vmap; time of the library over step 2",
    ),
    Claim(
        "registrations-free",
        "Registrations that a call does not use cost nothing. An operator with a name alone takes {median:.2f} times "
        "as long as one with a fake, a gradient and a batch rule.",
        _ratio("no batch rule", "operator"),
        "> 0.9",
        _SMALL + "; time of the name alone over step 2",
    ),
    # Correctness
    steps_correct("8192 x 8192, float32"),
    within_tolerance(_own, _OWN, "The library's kernel is within tolerance wherever it was timed."),
    deterministic(_own, _OWN, "Two runs of the library's kernel give the same bits."),
)

LOG = (
    "`custom_op` costs more than `Library`, because it enters Python twice more in each call. One function checks if "
    "a gradient is needed, and another one if the result shares memory with an argument.",
    "Code that the compiler generates asks the dispatcher for an operator at each call. A `triton_op` is replaced by "
    "its allocation and its kernel when it is traced.",
    "A launcher that is given a fake tensor would read an address that is not valid. After such an error no call of "
    "the process succeeds, so the lesson does not ask a plain launcher for it.",
    "In 2012 the manual of Theano made an operator of a CUDA C kernel by a class. Its `make_node` gave the type of the "
    "result, as a fake does, and its `make_thunk` compiled the kernel. The example had no gradient and no batch.",
)
