"""Evidence of the lesson on NumPy code under torch.compile, and what it measures."""

from __future__ import annotations

import contextlib
import functools
import html
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import fusebook
from fusebook import tables
from fusebook.extras import extra
from fusebook.lesson import _numbers, _place, _show, picture
from fusebook.lesson._page import Page, _or_banner
from fusebook.lesson._results import measured
from fusebook.lesson._show import Shown
from fusebook.lesson.evidence import Claim, Frames, Measured, NotRecorded, Recorded, within_tolerance
from fusebook.measure import inputs

with extra("book"):
    import pandas as pd

OPERATORS = ("kmeans_assign",)
CLOCK = "call"
EXAMPLE = {"n": 20_000_000, "d": 2, "k": 2, "labels": "int64", "law": "blobs", "dtype": "float32"}
STEPS = ("numpy", "arrays", "tensors", "kernel")
#: Points, coordinates and centres.
SHAPES = ((20_000_000, 2, 2),)
DTYPES = ("float32", "float64")
INTERPRETED = 3000
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS = {"kmeans_assign": ("_kmeans_few",)}

#: Rows of the table, by step.
_SAID = {
    "numpy": "NumPy",
    "arrays": "step 1, arrays",
    "copies": "copies of step 1 alone",
    "copies, old": "the same, labels to memory used before",
    "tensors": "step 2, tensors",
    "kernel": "kernel by hand",
    "fusebook": "fusebook.kmeans_assign",
}
CENTRES = ((5.0, 1.0), (0.0, 9.0))


# What is measured -----------------------------------------------------------------------------------------------------

#: A program whose log can be read and whose threads can be counted. The number of threads is written into the code that
#: is compiled.
ON_THE_CPU = """
import json, sys, time
import numpy as np
import torch


def nearest(X, means):
    return np.argmin(np.linalg.norm(X - means[:, None], axis=2), axis=0)


def seconds(function, tries=5):
    taken = []
    for _ in range(tries):
        start = time.perf_counter()
        result = function()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[tries // 2], result


torch._dynamo.config.numpy_default_float = "float32"  # for later
rng = np.random.default_rng(0)
means = np.array([[5.0, 1.0], [0.0, 9.0]])
X = np.repeat(means, int(sys.argv[1]) // 2, axis=0)
X = X + rng.standard_normal(X.shape)
row = {"by itself": torch.get_num_threads()}
more = torch.compile(lambda x: x + np.zeros(3), backend="eager")
row["with zeros"] = more(np.ones(3, np.float32)).dtype.name
for way in sys.argv[2:]:
    dtype, threads = way.split(":")
    if dtype != row.get("dtype"):
        x, m = X.astype(dtype), means.astype(dtype)
        row["NumPy"], labels = seconds(lambda: nearest(x, m), 3)
    row |= {"dtype": dtype, "threads": int(threads)}
    torch.compiler.reset()
    torch.set_num_threads(int(threads))
    compiled = torch.compile(nearest, options={"cpp.threads": int(threads)})
    row["same"] = bool((compiled(x, m) == labels).all())
    row["compiled"], _ = seconds(lambda: compiled(x, m))
    print(json.dumps(row))
"""


def _run(script: str, *argv: str, timeout: float = 240) -> tuple[str, str]:
    """A program in another process: what it printed, and the code that was generated."""
    more = {
        "TORCH_LOGS": "output_code",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_INTERPRET": "0",
    }
    # Files, not pipes: a compiler that outlives its parent keeps a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-c", script, *argv]
        child = subprocess.Popen(command, stdout=out, stderr=log, env={**os.environ, **more}, start_new_session=True)
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # with its compilers
            raise
        texts = []
        for file in (out, log):
            file.seek(0)
            texts.append(file.read())
    if code:
        raise RuntimeError(texts[1].strip().splitlines()[-1])
    return texts[0], "\n".join(re.findall(r"^.*?\[__output_code\] ?(.*)$", texts[1], re.MULTILINE))


def kernel_of(code: str, begin: str) -> str:
    """The last kernel among the rest of what is generated."""
    found = re.findall(rf"{begin}.*?^'''", code, re.DOTALL | re.MULTILINE)
    return str(found[-1]).rstrip("'").rstrip() if found else "(nothing)"


def compiled_for_the_cpu(points: int = SHAPES[0][0]) -> pd.DataFrame:
    """The line in NumPy and compiled, by threads, and the C++ that was generated."""
    most = os.cpu_count() or 1
    runs = [f"float64:{n}" for n in sorted({1, 2, most})]
    out, code = _run(ON_THE_CPU, str(points), "float32:2", *runs)
    frame = pd.DataFrame([json.loads(line) for line in out.splitlines()])
    return frame.assign(points=points, cores=most, torch=torch.__version__, code=kernel_of(code, 'extern "C"'))


def compiled_for_cuda() -> pd.DataFrame:
    """The Triton kernel that was generated."""
    from torch._inductor.utils import run_and_get_code

    points, means = (torch.rand(n, 2, device="cuda") for n in (SHAPES[0][0], 2))
    with torch._inductor.config.patch(fx_graph_cache=False):  # else nothing may be generated
        _, code = run_and_get_code(torch.compile(_adapted), points, means)
    return pd.DataFrame({"code": [kernel_of("\n".join(code), "@triton.jit")]})


def planted(n: int, middle: Any, seed: int = 0) -> np.ndarray:
    """As many points around each of the centres."""
    rng = np.random.default_rng(seed)
    return np.repeat(np.asarray(middle), n, axis=0) + rng.standard_normal((n * len(middle), 2))


def _line(X: Any, means: Any) -> Any:
    return np.argmin(np.linalg.norm(X - means[:, None], axis=2), axis=0)


def _functions(X: Any, means: Any) -> Any:
    """The same line, its operator written as a function."""
    return np.argmin(np.linalg.norm(np.subtract(X, means[:, None]), axis=2), axis=0)


def _adapted(X: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(_line(X.numpy(), means.numpy()))


def spellings() -> pd.DataFrame:
    """Which spellings of NumPy code run on CUDA."""
    X, means = planted(100_000, CENTRES), np.asarray(CENTRES)
    want = _line(X, means)
    on = torch.from_numpy(X).cuda(), torch.from_numpy(means).cuda()

    def under(function: Callable[..., Any], *values: Any) -> Any:
        with torch.device("cuda"):
            return function(*values)

    runs: dict[str, Callable[[], Any]] = {
        "the line, arrays, under the device": lambda: under(torch.compile(_line), X, means),
        "functions for operators, arrays, under the device": lambda: under(torch.compile(_functions), X, means),
        "the line, tensors, under the device": lambda: under(torch.compile(_adapted), *on),
        "the line, tensors, no device": lambda: torch.compile(_adapted)(*on),
        "the line, torch.compiler.wrap_numpy, tensors": lambda: torch.compile(torch.compiler.wrap_numpy(_line))(*on),
        "the adaptor without torch.compile": lambda: _adapted(*on),
        "the same, by numpy(force=True)": lambda: torch.from_numpy(_line(*(t.numpy(force=True) for t in on))),
    }
    rows = []
    for name, run in runs.items():
        torch.compiler.reset()
        try:
            got = run()
        except Exception as error:
            why = re.search(r"'ndarray' object[^\")]*|can't convert", str(error))
            rows.append((name, "no", why.group(0) if why else "an error"))
            continue
        right = np.array_equal(want, got.cpu().numpy() if isinstance(got, torch.Tensor) else got)
        kind = "an array" if isinstance(got, np.ndarray) else str(got.device)
        rows.append((name, "yes" if right else "wrong", f"gives {kind}"))
    return pd.DataFrame(rows, columns=["step", "runs", "what happens"]).assign(torch=torch.__version__)


def _seconds(function: Callable[[], Any], tries: int = 5) -> float:
    """The median latency of a function that was called before, by the host's clock."""
    taken = []
    for _ in range(tries):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[tries // 2]


def _array(got: Any) -> np.ndarray:
    found: np.ndarray = got.cpu().numpy() if isinstance(got, torch.Tensor) else got
    return found


def _under_the_device(X: np.ndarray, means: np.ndarray) -> np.ndarray:
    with torch.device("cuda"):
        found: np.ndarray = torch.compile(_functions, dynamic=False)(X, means)
        return found


def timed(steps: Mapping[str, Callable[..., Any]], dtypes: Sequence[str] = DTYPES) -> pd.DataFrame:
    """Check and time NumPy's line, the steps of the lesson, the copies of step 1 and the library's function."""
    n, _, k = SHAPES[0]
    X, rows = planted(n // k, CENTRES), []
    for dtype in dtypes:
        x, m = X.astype(dtype), np.asarray(CENTRES, dtype)
        on = [torch.as_tensor(v, device=inputs.generator(0).device) for v in (x, m)]
        labels = torch.zeros(n, dtype=torch.int64)

        def copies(x: np.ndarray = x, device: torch.device = on[0].device) -> None:
            torch.from_numpy(x).to(device)
            torch.empty(n, dtype=torch.int64, device=device).cpu()

        def copies_to(x: np.ndarray = x, labels: torch.Tensor = labels, device: torch.device = on[0].device) -> None:
            torch.from_numpy(x).to(device)
            labels.copy_(torch.empty(n, dtype=torch.int64, device=device))

        calls = {"numpy": functools.partial(steps["numpy"], x, m), "arrays": functools.partial(steps["arrays"], x, m)}
        calls |= {name: functools.partial(steps[name], *on) for name in ("tensors", "kernel") if name in steps}
        calls |= {"fusebook": functools.partial(fusebook.kmeans_assign, *on, check=False)}
        want = steps["numpy"](x, m)
        for name, call in calls.items():
            torch.compiler.reset()
            got = want if name == "numpy" else _array(call())
            correct = bool((got == want).mean() > 1 - 1e-6)  # a point halfway may go to either
            seconds = _seconds(call, 1 if name == "numpy" else 5)
            rows.append({"step": name, "dtype": dtype, "seconds": seconds, "correct": correct})
        for name, copy in (("copies", copies), ("copies, old", copies_to)):
            copy()
            rows.append({"step": name, "dtype": dtype, "seconds": _seconds(copy), "correct": True})
    return pd.DataFrame(rows)


def beyond_numpy() -> pd.DataFrame:
    """What SciPy and scikit-learn make of a tensor on the GPU."""
    os.environ["SCIPY_ARRAY_API"] = "1"  # before SciPy is imported
    names = ("scipy", "scipy.special", "sklearn", "sklearn.cluster", "sklearn.preprocessing")
    scipy, special, sklearn, cluster, preprocessing = map(importlib.import_module, names)
    x = torch.rand(1000, 3, device="cuda")
    runs: dict[str, Callable[[], Any]] = {
        f"scipy.special.expit, SciPy {scipy.__version__}": lambda: special.expit(x),
        f"MinMaxScaler, scikit-learn {sklearn.__version__}": lambda: preprocessing.MinMaxScaler().fit_transform(x),
        f"KMeans, scikit-learn {sklearn.__version__}": lambda: cluster.KMeans(2, n_init=1).fit(x).cluster_centers_,
    }
    rows = []
    with sklearn.config_context(array_api_dispatch=True):
        for name, run in runs.items():
            try:
                got = run()
                kind = f"{type(got).__name__} on {got.device}"
            except Exception as error:
                kind = type(error).__name__
            rows.append((name, kind))
    return pd.DataFrame(rows, columns=["step", "out"])


# Records --------------------------------------------------------------------------------------------------------------


class _Steps(Measured):
    """Steps, with their sizes and with latencies in microseconds."""

    def renamed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The same rows with both."""
        n, d, k = SHAPES[0]
        found = frame.assign(shape=f"{d}x{k}x{n}", latency_us=1e6 * frame["seconds"])
        found.attrs.update(frame.attrs)
        return found


#: Page 303 compares others, too.
_COMPARED = ("eager", "torch.compile", "fusebook", "fusebook, checked")
FRAMES: dict[str, Any] = {
    "sweep": Recorded("kmeans_assign", "plane", "float32", _COMPARED, borrowed=True),
    "steps": _Steps("kmeans_ladder"),
    "cpu": Measured("kmeans_cpu", function=compiled_for_the_cpu),
    "inductor": Measured("kmeans_inductor", function=compiled_for_cuda),
    "spellings": Measured("kmeans_ways", function=spellings),
    "beyond": Measured("kmeans_beyond", function=beyond_numpy),
}


# The page -------------------------------------------------------------------------------------------------------------


class NumpyPage(Page):
    """The page of a lesson on NumPy code that torch.compile translates."""

    def _frame(self, name: str) -> pd.DataFrame:
        """What this run measures, or its record."""
        if name not in self.frames.known:
            self.measure(FRAMES[name].function, FRAMES[name].name)
        return self.frames[name]

    @_or_banner
    def verdict(self) -> Shown:
        """The box: time on the GPU, on the CPU, and memory."""
        cpu, frame = self._frame("cpu"), self._everything()
        steps = self._ladder()
        us = tables.where(steps, dtype="float32").set_index("step")["latency_us"]
        gib = tables.where(frame, status="ok", **EXAMPLE).set_index("variant")["peak_bytes"] / 2**30
        least = tables.where(cpu, dtype="float32").iloc[0]
        lines = [
            f"**Time.** A line of NumPy labels {EXAMPLE['n']:,} points in **{us['numpy'] / 1e6:.2f} s**. Compiled for "
            f"a GPU, it takes {_numbers.microseconds(us['arrays'])} with arrays, and "
            f"**{_numbers.microseconds(us['tensors'])}** if the points are on the GPU already. There "
            f"`fusebook.kmeans_assign` takes {_numbers.microseconds(us['fusebook'])}.",
            f"**CPU.** Compiled for {least['threads']} threads of the CPU, it takes "
            f"{_numbers.microseconds(1e6 * least['compiled'])}, 1/{least['NumPy'] / least['compiled']:.0f} of NumPy in "
            f"the same process ({least['NumPy']:.2f} s). The time of NumPy varies from process to process.",
            f"**Memory.** On the GPU, eager PyTorch allocates {gib['eager']:.2f} GiB for it at its peak, torch.compile "
            f"{gib['torch.compile']:.2f} GiB and Fusebook {gib['fusebook']:.2f} GiB: the labels.",
        ]
        bars = {"NumPy": us["numpy"], f"compiled, {least['threads']} threads": 1e6 * least["compiled"]}
        bars |= {"compiled, GPU": us["tensors"], "Fusebook, GPU": us["fusebook"]}
        texts = {name: f"{t / 1e6:.2f} s" if t > 1e6 else _numbers.microseconds(t) for name, t in bars.items()}
        shown = picture.bars(
            f"Latency with {EXAMPLE['n']:,} points and two centres, float32. Points for the GPU are already there.",
            bars,
            texts,
            ["Fusebook, GPU"],
        )
        label = _numbers.origin(steps if steps.attrs.get("origin") else cpu)
        return self._box(lines, shown, f"{label}; the CPU is that of its host, with {least['cores']} cores")

    def _lacking(self) -> str:
        """The kernel by hand is no numbered step."""
        return " Not measured yet: the kernel by hand." if super()._lacking() else ""

    def _ladder(self) -> pd.DataFrame:
        """The steps as recorded, or, before the lesson has defined its own, measured by the same code."""
        if self.frames.replay:
            return self.frames["steps"]
        own = {"numpy": _line, "arrays": _under_the_device, "tensors": torch.compile(_adapted, dynamic=False)}
        return FRAMES["steps"].renamed(timed(own, DTYPES[:1]))

    @_or_banner
    def threads(self) -> Shown:
        """The line in NumPy and compiled for the CPU, by threads, and the C++ that was generated."""
        frame = self._frame("cpu")
        rows = tables.where(frame, dtype="float64").sort_values("threads")
        bars = {"NumPy": 1e3 * float(rows["NumPy"].median())}
        for threads, seconds in zip(rows["threads"], rows["compiled"], strict=True):
            bars[f"compiled, {threads} thread{'s' * (threads > 1)}"] = 1e3 * seconds
        caption = (
            f"Milliseconds with {rows['points'].iloc[0]:,} points in float64, on a CPU of {rows['cores'].iloc[0]} "
            f"cores, in another process than other times on this page: compare within this figure; "
            f"{_numbers.origin(frame)}."
        )
        shown = picture.bars(caption, bars, {name: f"{ms:.0f} ms" for name, ms in bars.items()}, list(bars)[1:])
        folded = _folded("The C++ that was generated", rows["code"].iloc[0], "cpp")
        return Shown(f"{shown._repr_html_()}{folded}", shown.text)._now()

    @_or_banner
    def generated(self) -> Shown:
        """The Triton kernel that Inductor generated, folded."""
        code = self._frame("inductor")["code"].iloc[0]
        title = f"The Triton that was generated ({len(code.splitlines())} lines)"
        return Shown(_folded(title, code, "python"), title)._now()

    def graphs(self, function: Callable[..., Any], *given: Any) -> Shown:
        """Into how many graphs torch.compile cuts a function, and how many operations each has.

        Parameters
        ----------
        function : callable
            Of NumPy code.
        *given
            Its arguments.
        """
        sizes = graphs(function, *given)
        parts = " and ".join(map(str, sizes))
        many = f"{len(sizes)} graph{'s' * (len(sizes) > 1)}, of {parts} operation{'s' * (sizes[-1] > 1)}"
        return Shown(f'<p class="fb-check">{_show.rich(f"`{function.__name__}`: {many}.")}</p>', many)._now()

    @_or_banner
    def steps(self, **steps: Callable[..., Any]) -> Shown:
        """Time every step of the lesson, or replay its record: milliseconds by dtype.

        Parameters
        ----------
        **steps : callable
            The steps in their order.
        """
        if tuple(steps) != STEPS:
            raise ValueError(f"page.steps: expected {', '.join(STEPS)}, got {', '.join(steps)}")
        spec = FRAMES["steps"]
        frame = measured(spec.name, lambda: timed(steps), code_of=[steps["kernel"], timed, SHAPES])
        renamed = spec.renamed(frame)
        self.frames.known["steps"] = renamed
        _place.remember("gains", self.frames)
        wide = renamed.assign(ms=1e3 * renamed["seconds"]).pivot_table("ms", "step", "dtype", sort=False)
        n, d, _ = SHAPES[0]
        moved = {dtype: n * (d * np.dtype(dtype).itemsize + 8) / 1e6 for dtype in DTYPES}
        wide = wide.reindex(index=[*_SAID], columns=[*DTYPES])
        bus = {name: moved["float32"] for name in ("arrays", "copies", "copies, old")}
        wide["MB over the bus, float32"] = pd.Series(bus)
        wide = wide.rename(index=_SAID, columns={dtype: f"{dtype}, ms" for dtype in DTYPES})
        wide.index.name = wide.columns.name = None
        empty = "; empty: none, or not measured" if wide.isna().any(axis=None) else ""
        caption = f"Latency with {n:,} points and two centres{empty}; {_numbers.origin(frame)}"
        return _show.table(wide, caption, fold=False)

    def _record(self) -> None:
        with contextlib.suppress(ModuleNotFoundError):  # SciPy and scikit-learn, which the last frame is about
            super()._record()

    @_or_banner
    def use(self) -> Shown:
        """When to use the library: time and memory of each implementation on the GPU, and how to install it."""
        frame = self._everything()
        rows = tables.where(frame, status="ok", labels=["int64", "uint8"])
        late = rows.drop_duplicates(["variant", "labels"]).set_index(["variant", "labels"])["latency_us"]
        parts: dict[str, pd.Series] = {}
        for labels, some in tables.timed(rows, "cold").groupby("labels", sort=True):
            point = some.drop_duplicates("variant").set_index("variant")
            parts |= {f"{labels}: GPU time, us": point["gpu_us"], f"{labels}: peak, MiB": point["peak_bytes"] / 2**20}
        wide = pd.DataFrame(parts)
        wide.index.name = None
        told = []
        if ("fusebook, checked", "int64") in late:
            more = late["fusebook, checked", "int64"] - late["fusebook", "int64"]
            told.append(
                f"**A check** adds {_numbers.microseconds(more)} to the latency of a call with labels in int64."
            )
        made = _show.table(
            wide,
            f"{EXAMPLE['n']:,} points on the GPU, float32, by the dtype of labels; here torch.compile compiles PyTorch "
            f"code; {_numbers.origin(frame)}",
            fold=False,
        )
        install = [*told, *_numbers.install()]
        return Shown(f"{made._repr_html_()}<p>{_numbers.joined(install)}</p>", _numbers.plainly(install))._now()


PAGE = NumpyPage


def _folded(title: str, code: str, language: str) -> str:
    text = _show._coloured(code, language)
    return (
        f'<details class="fb-fold"><summary>{html.escape(title)}</summary><div class="highlight notranslate">'
        f'<pre tabindex="0">{text}</pre></div></details>'
    )


def graphs(function: Callable[..., Any], *given: Any) -> list[int]:
    """The operations of each graph that a call is cut into."""
    sizes = []

    def backend(graph: Any, _: Any) -> Any:
        sizes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend)(*given)
    return sizes


# What claims read -----------------------------------------------------------------------------------------------------


def _one(value: float) -> pd.Series:
    return pd.Series([float(value)], index=[""])


def _ms(frames: Frames) -> pd.Series:
    """Milliseconds by dtype and step."""
    return frames["steps"].set_index(["dtype", "step"])["seconds"] * 1e3


def _over(frames: Frames, slow: str, fast: str, dtype: str = "float32") -> pd.Series:
    """How many times as long one step takes as another."""
    ms = _ms(frames)
    for step in (slow, fast):
        if (dtype, step) not in ms.index:
            raise NotRecorded(f"{step} was not measured in {dtype}")
    return _one(ms[dtype, slow] / ms[dtype, fast])


def _narrow(frames: Frames, step: str) -> pd.Series:
    """How many times as long a step takes in float64 as in float32."""
    ms = _ms(frames)
    return _one(ms["float64", step] / ms["float32", step])


def _threads(frames: Frames, dtype: str = "float64") -> pd.Series:
    """How many times as fast as NumPy the compiled line is, by threads."""
    rows = tables.where(frames["cpu"], dtype=dtype).set_index("threads").sort_index()
    return rows["NumPy"] / rows["compiled"]


def _correct(frames: Frames) -> pd.Series:
    return frames["steps"].set_index(["step", "dtype"])["correct"]


def _true(what: Any) -> pd.Series:
    return _one(bool(what))


def _runs(frames: Frames, name: str, outcome: str = "yes") -> pd.Series:
    return _true(frames["spellings"].set_index("step")["runs"][name] == outcome)


def _out(frames: Frames, name: str) -> pd.Series:
    rows = frames["beyond"]
    return _true(rows.loc[rows["step"].str.startswith(name), "out"].str.contains("Tensor").all())


# Claims ---------------------------------------------------------------------------------------------------------------

_LADDER = "20 million points of two coordinates, two centres; latency"
_CPU = (
    "20 million points of two coordinates, two centres, float64; NumPy over the compiled line, on the CPU of the host"
)
_COUNT = "the code that torch generated for the record"
_RAN = "the versions of the record"


def _published(
    id: str,
    text: str,
    values: Callable[[Frames], pd.Series],
    condition: str,
    scope: str,
    numbers: Callable[[Frames], Mapping[str, Any]] | None = None,
) -> Claim:
    return Claim(id, text, values, condition, scope, kind="statement", numbers=numbers)


CLAIMS = (
    # The lesson's findings
    Claim(
        "one-core",
        "The post of 2023: on one core the compiled line is at least 9x faster than NumPy, as the traffic predicts. "
        "Measured: {median:.1x}.",
        lambda frames: _threads(frames)[[1]],
        ">= 9",
        _CPU,
        kind="statement",
        lesson=True,
    ),
    Claim(
        "keep-on-the-gpu",
        "With points that stay on the GPU, the compiled line is {median:.0f}x faster than with arrays that travel in "
        "each call. With such arrays it is {arrays:.0f}x faster than NumPy.",
        lambda frames: _over(frames, "arrays", "tensors"),
        ">= 10",
        _LADDER + ", float32",
        lesson=True,
        numbers=lambda frames: {"arrays": _over(frames, "numpy", "arrays").iloc[0]},
    ),
    Claim(
        "copies",
        "With arrays, copies are {median:.0%} of the time. If the labels return to memory that was used before, these "
        "copies take {old:.0%} of what they take otherwise.",
        lambda frames: _over(frames, "copies", "arrays"),
        "> 0.5",
        _LADDER + ", float32",
        lesson=True,
        numbers=lambda frames: {"old": _over(frames, "copies, old", "copies").iloc[0]},
    ),
    Claim(
        "library",
        "`fusebook.kmeans_assign` takes {median:.2f} of the latency of the compiled line in float32, and {wide:.2f} "
        "of it in float64.",
        lambda frames: _over(frames, "fusebook", "tensors"),
        "< 0.98",
        _LADDER + ", float32",
        lesson=True,
        numbers=lambda frames: {"wide": _over(frames, "fusebook", "tensors", "float64").iloc[0]},
    ),
    # Correctness
    Claim(
        "steps-correct",
        "Every step gives NumPy's labels.",
        _correct,
        "== 1",
        "20 million points, float32 and float64; at most one point in a million differs",
    ),
    Claim(
        "labels",
        "The line that is compiled for the CPU gives NumPy's labels.",
        lambda frames: frames["cpu"].set_index(["dtype", "threads"])["same"],
        "== 1",
        "20 million points; every number of threads",
    ),
    within_tolerance(
        lambda frames: tables.where(frames["sweep"], variant="fusebook").set_index("labels"),
        "20 million points of two coordinates, two centres, float32; labels of three widths",
        "`fusebook.kmeans_assign` is within tolerance wherever it was timed.",
    ),
    # Steps
    Claim(
        "kernel-gain",
        "The kernel by hand takes {median:.2f} of the latency of the compiled line.",
        lambda frames: _over(frames, "kernel", "tensors"),
        "< 1",
        _LADDER + ", float32",
    ),
    Claim(
        "compiled-kernel",
        "In GPU time, the kernel that torch.compile generates takes {least:.2f} to {most:.2f} times as long as "
        "Fusebook's.",
        lambda frames: tables.ratio(frames["sweep"], "torch.compile", "fusebook"),
        "",
        "20 million points of two coordinates, two centres, float32; labels of three widths, cold L2",
    ),
    Claim(
        "float32",
        "On the GPU the compiled line is {median:.2x} faster in float32 than in float64.",
        lambda frames: _narrow(frames, "tensors"),
        "",
        _LADDER + ", tensors",
    ),
    Claim(
        "functions",
        "With `np.subtract` instead of the minus sign, the line runs on arrays under a device.",
        lambda frames: _runs(frames, "functions for operators, arrays, under the device"),
        "== 1",
        _RAN,
    ),
    # Targets
    Claim(
        "target-threads",
        "On two threads the compiled line is at least 10x faster than NumPy: {median:.1x}.",
        lambda frames: _threads(frames)[[2]],
        ">= 10",
        _CPU,
        kind="target",
    ),
    # Published claims
    _published(
        "all-cores",
        "On all cores, 32 of them, the compiled line is at least 57x faster than NumPy: {median:.0f}x.",
        lambda frames: _threads(frames).iloc[[-1]],
        ">= 57",
        _CPU,
    ),
    _published(
        "default-threads",
        "Unless it is set otherwise, PyTorch uses all cores.",
        lambda frames: _true((cpu := frames["cpu"].iloc[0])["by itself"] == cpu["cores"]),
        "== 1",
        _RAN,
    ),
    _published(
        "one-loop",
        "The generated C++ is one loop over all points.",
        lambda frames: _one(len(re.findall(r"for\(int64_t x0=", frames["cpu"]["code"].iloc[0]))),
        "== 1",
        _COUNT,
    ),
    _published(
        "openmp",
        "OpenMP shares the loop among the threads.",
        lambda frames: _true("#pragma omp for" in frames["cpu"]["code"].iloc[0]),
        "== 1",
        _COUNT,
    ),
    _published(
        "one-kernel",
        "The line becomes one Triton kernel.",
        lambda frames: _true("_0(in_ptr0" in frames["inductor"]["code"].iloc[0]),
        "== 1",
        _COUNT + "; the last kernel is number 0",
    ),
    _published(
        "arrays-float64",
        "With arrays the compiled line is at least 8x faster than NumPy in float64, on an RTX 2060: {median:.1x}.",
        lambda frames: _over(frames, "numpy", "arrays", "float64"),
        ">= 8",
        _LADDER + ", float64",
    ),
    _published(
        "arrays-float32",
        "With arrays the compiled line is about 11x faster than NumPy in float32: {median:.1x}.",
        lambda frames: _over(frames, "numpy", "arrays"),
        ">= 10.78",
        _LADDER + ", float32; 2 % less than 11 is accepted",
    ),
    _published(
        "numpy-float32",
        "NumPy gets about 9 % faster in float32: {faster:.0%}.",
        lambda frames: (_narrow(frames, "numpy") - 1.09).abs(),
        "<= 0.05",
        _LADDER + ", NumPy; distance of the ratio from 1.09",
        lambda frames: {"faster": _narrow(frames, "numpy").iloc[0] - 1},
    ),
    _published(
        "compiled-float32",
        "With arrays the compiled line gets at least 40 % faster in float32: {faster:.0%}.",
        lambda frames: _narrow(frames, "arrays"),
        ">= 1.4",
        _LADDER + ", arrays",
        lambda frames: {"faster": _narrow(frames, "arrays").iloc[0] - 1},
    ),
    _published(
        "tensors-float32",
        "With tensors on the GPU it is at least 200x faster than NumPy in float32: {median:.0f}x.",
        lambda frames: _over(frames, "numpy", "tensors"),
        ">= 200",
        _LADDER + ", float32",
    ),
    _published(
        "device",
        "The line runs on arrays under `torch.device`, as it is.",
        lambda frames: _runs(frames, "the line, arrays, under the device"),
        "== 1",
        _RAN,
    ),
    _published(
        "adaptor-device",
        "The line runs on tensors under `torch.device`, by an adaptor.",
        lambda frames: _runs(frames, "the line, tensors, under the device"),
        "== 1",
        _RAN,
    ),
    _published(
        "adaptor-eager",
        "The adaptor does not run without torch.compile.",
        lambda frames: _runs(frames, "the adaptor without torch.compile", "no"),
        "== 1",
        _RAN,
    ),
    _published(
        "forced",
        "With `numpy(force=True)` it runs, on the CPU.",
        lambda frames: _runs(frames, "the same, by numpy(force=True)"),
        "== 1",
        _RAN,
    ),
    _published(
        "default-float",
        "With `numpy_default_float` set to float32, `np.zeros` makes float32.",
        lambda frames: _true(frames["cpu"]["with zeros"].iloc[0] == "float32"),
        "== 1",
        _RAN,
    ),
    _published(
        "scipy",
        "SciPy takes tensors on the GPU in places: `expit`.",
        lambda frames: _out(frames, "scipy"),
        "== 1",
        _RAN,
    ),
    _published(
        "scikit-learn",
        "scikit-learn takes tensors on the GPU in places: `MinMaxScaler`.",
        lambda frames: _out(frames, "MinMaxScaler"),
        "== 1",
        _RAN,
    ),
)

LOG = (
    "The source is *Compiling NumPy code into C++ or CUDA via torch.compile*, an announcement by Quansight and PyTorch "
    "of 2023. It timed the line on a Ryzen 3970X and an RTX 2060.",
    "Its example plants two clusters around (5, 5) and (10, 10). Both centres are on the diagonal, so an exchange of "
    "coordinates changes no label. The lesson has other centres.",
    "Under ``torch.device``, Dynamo looks for the method ``sub`` of a NumPy array, and finds none. Functions work.",
    "NumPy's line takes another time in a fresh process than in one that has done much before. So two times of NumPy "
    "that differ by less than a fifth decide nothing.",
    "Results of step 1 are fresh arrays, as in such a program. So the copy of the labels also waits for new memory of "
    "the host.",
    "``numpy_default_float`` is read once in a process, when the first NumPy code is compiled.",
    "A write through a boolean mask breaks the graph or takes more operations than ``np.where``. A loop with a known "
    "number of turns is unrolled. A loop that ends when something has converged is not: compile its body.",
    "``torch._numpy`` runs a program eagerly on tensors, to see whether the program or the compiler is at fault. It "
    "is private, and takes many times as long as PyTorch's own functions on ten points.",
)
