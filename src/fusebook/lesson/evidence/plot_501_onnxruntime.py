"""Evidence of the lesson on kernels in ONNX Runtime, and what it measures: runs of sessions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusebook import plots, tables
from fusebook.cards.onnxruntime import MODELS, NODES_OF_ONNX_RUNTIME, model
from fusebook.extras import extra
from fusebook.lesson import _checks, _numbers, _place, _show, picture
from fusebook.lesson._draw import _AMBER, _BLUE, _WIDTH, _arrow, _box, _drawing, _text
from fusebook.lesson._page import Page, _or_banner
from fusebook.lesson._results import measured
from fusebook.lesson._show import Shown
from fusebook.lesson.evidence import (
    Claim,
    Frames,
    Measured,
    NotRecorded,
    Recorded,
    steps_correct,
    within_tolerance,
)
from fusebook.measure import bench, check, inputs, timing
from fusebook.ort import NODES, Graph, custom_op
from fusebook.ort.alone import alone
from fusebook.ort.aot import cached
from fusebook.ort.custom import C

with extra("book"):
    import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OPERATORS = ("onnxruntime_nodes",)
CALLED = "ort.Graph"
CLOCK = "call"
EXAMPLE = {"R": 256, "D": 512, "n": 512, "law": "uniform", "dtype": "float32"}
STEPS = ("chain", "callback", "library", "built", "captured")
#: Rows, columns and updates: a small table, and a Llama's embedding.
SHAPES = ((256, 512, 512), (32000, 4096, 2048))
DTYPES = ("float32",)
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}

CHAIN, OF_SHAPE, CALLBACK = "ScatterND", "fusebook OfShape, callback", "fusebook Masked, callback"
BUILT, TORCH = "fusebook Masked, ahead of time", "fusebook from torch"
#: What a reader sees instead of the names of the record.
_SAID = {
    CHAIN: "chain of ONNX Runtime",
    CALLBACK: "library, callback",
    BUILT: "library, compiled",
    TORCH: "library, from torch",
}
_CAPTURED = {"enable_cuda_graph": "1"}
_op = NODES_OF_ONNX_RUNTIME

Makers = Mapping[str, Callable[..., Graph]]


# What is measured -----------------------------------------------------------------------------------------------------


def library() -> Any:
    """The library for this GPU; the first call compiles it."""
    major, minor = torch.cuda.get_device_capability()
    return cached((10 * major + minor,), ("float32",))


def feeds(shape: Sequence[int], indices: Tensor, updates: Tensor) -> dict[str, Tensor]:
    """The inputs of a graph, by name, from those of the card."""
    return {"shape": torch.tensor(shape), "indices": indices, "updates": updates}


def _bound(graph: Graph, given: Sequence[Any]) -> Callable[[], Any]:
    """A session on its own output; ONNX Runtime captures a graph in the first runs."""
    y = torch.full(given[0], torch.nan, dtype=given[2].dtype, device=given[2].device)
    bound = graph.bind(feeds(*given), {"y": y})
    for _ in range(3 * graph._fixed):
        bound()
    y.fill_(torch.nan)
    return bound


def _result(got: Any, device: torch.device) -> Tensor:
    """The output of a session, of its Python interface or of torch."""
    y = got["y"] if isinstance(got, dict) else got
    return torch.as_tensor(y[0] if isinstance(y, list) else y, device=device)


def timed(makers: Makers) -> pd.DataFrame:
    """Check and time a run of each session: latency, CPU launch time and GPU time."""
    import onnxruntime

    plainly = onnxruntime.RunOptions()
    plainly.add_run_config_entry("gpu_graph_id", "0")  # else a lookup fails in every run, by an exception
    parts = []
    for R, D, n in SHAPES:
        given = _op.make(inputs.generator(0), torch.float32, R=R, D=D, n=n, law="uniform")
        yard = check.yardstick(_op, given)
        runs = {name: _bound(make(), given) for name, make in makers.items()}
        for name in ("chain", "library", "built"):
            runs[f"{name}, captured"] = _bound(makers[name](options=_CAPTURED), given)
        runs["from torch"] = functools.partial(_op.variants[TORCH].run, *given)

        def right(got: Any, yard: check.Yardstick = yard, device: torch.device = given[2].device) -> bool:
            return yard.judge(_result(got, device)).ok

        arrays = {name: feed.cpu().numpy() for name, feed in feeds(*given).items()}
        copied = {"chain, arrays": functools.partial(makers["chain"]().session.run, ["y"], arrays, plainly)}
        frame = bench.staircase({**copied, **runs}, right, kind="call", repeat=15)
        times = timing.measure(runs, repeat=15, kinds=("cold", "host"))
        for kind in ("cold", "host"):
            us = {name: 1e6 * q.q50 for name, by in times.items() if (q := by[kind])}
            frame[timing.COLUMN[kind]] = frame["step"].map(us)
        parts.append(frame.assign(shape=f"{R}x{D}x{n}", dtype="float32"))
    return pd.concat(parts, ignore_index=True).rename(columns={"us": "latency_us", "right": "correct"})


def _unary(name: str, domain: str) -> Any:
    """A graph of one node that takes a matrix and returns one."""
    import onnx.parser

    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18, "fusebook": 1]> one (float[M, N] x) => (float[M, N] y) '
        f"{{ y = {domain}{name} (x) }}"
    )


def _clocked(functions: Mapping[str, Callable[[], Any]], **more: Any) -> list[dict[str, Any]]:
    """A row for each function; times in microseconds."""
    kinds = ("cold", "call", "host")
    times = timing.measure(functions, warmup=20, repeat=100, kinds=kinds)
    rows = [{"step": name, **more} for name in functions]
    for row in rows:
        for kind in kinds:
            if (q := times[row["step"]][kind]) is not None:
                row[f"{timing.COLUMN[kind]}_20"] = q.q20 * 1e6
                row[timing.COLUMN[kind]] = q.q50 * 1e6
                row[f"{timing.COLUMN[kind]}_80"] = q.q80 * 1e6
    return rows


def overhead() -> pd.DataFrame:
    """Runs of graphs of one node on 4 KiB."""
    x = torch.randn(8, 128, device=inputs.generator(0).device)

    def bound(name: str, domain: str = "fusebook.", **how: Any) -> Callable[[], Any]:
        return Graph(_unary(name, domain), **how).bind({"x": x}, {"y": torch.empty_like(x)})

    kinds = {"x": torch.float32}, {"y": torch.float32}
    empty = custom_op("Nothing", lambda x, out: None, *kinds, "x")
    softmax = _softmax()
    runs = {
        "Identity": bound("Identity", ""),
        "Softmax of ONNX Runtime": bound("Softmax", ""),
        "Softmax, ahead of time": bound("Softmax", library=library()),
        "a callback that does nothing": bound("Nothing", ops=[empty]),
        "Softmax, callback": bound("Softmax", ops=NODES),
        "fusebook.softmax from torch": lambda: softmax(x),
    }
    return pd.DataFrame(_clocked(runs))


def _softmax() -> Callable[[Tensor], Tensor]:
    import fusebook

    return fusebook.softmax


def replayed() -> pd.DataFrame:
    """Runs that ONNX Runtime captured in a CUDA graph, on values that have changed since."""
    rows = []
    for R, D, n in SHAPES:
        given = _op.make(inputs.generator(0), torch.float32, R=R, D=D, n=n, law="uniform")
        node, updates = model(MODELS[2]), given[2]
        sessions: dict[str, tuple[Any, dict[str, Any]]] = {
            "ScatterND": (model("ScatterND"), {}),
            "Masked, callback": (node, {"ops": NODES}),
            "Masked, ahead of time": (node, {"library": library()}),
        }
        runs: dict[str, Callable[[], Any]] = {}
        right = {"Identity": True}
        for name, (graph, how) in sessions.items():
            run = _bound(Graph(graph, options=_CAPTURED, **how), given)
            updates.mul_(-1.5)  # values change where they are, and the captured graph reads them
            runs[name], right[name] = run, check.yardstick(_op, given).judge(run()["y"]).ok
        x = torch.zeros(8, 128, device=updates.device)
        identity = Graph(_unary("Identity", ""), options=_CAPTURED)
        runs["Identity"] = identity.bind({"x": x}, {"y": torch.empty_like(x)})
        sizes = {"R": R, "D": D, "n": n}
        rows += [row | {"correct": right[row["step"]]} for row in _clocked(runs, **sizes)]
    return pd.DataFrame(rows)


def without_python() -> pd.DataFrame:
    """A process that has neither torch nor Triton nor Fusebook runs the compiled library."""
    return pd.DataFrame([{"step": "built", **alone(model(MODELS[2]), library())}])


# Records --------------------------------------------------------------------------------------------------------------

FRAMES: dict[str, Any] = {
    "sweep": Recorded("onnxruntime_nodes", "small,medium,large", "float32"),
    "llama": Recorded("onnxruntime_nodes", "32000x4096x2048", "float32,float16"),
    "steps": Measured("onnxruntime_steps"),
    "overhead": Measured("onnxruntime_overhead", function=overhead),
    "captured": Measured("onnxruntime_captured", function=replayed),
    "alone": Measured("onnxruntime_alone", function=without_python),
}


# The page -------------------------------------------------------------------------------------------------------------


def calls(rows: Mapping[str, Sequence[tuple[str, float | None]]], caption: str) -> Shown:
    """Who calls whom, in a row for each kind of run, with microseconds on the arrows.

    Parameters
    ----------
    rows : mapping of str to sequence of (str, float or None)
        Each actor, and the microseconds until it is reached; None for the first, and where the next arrow counts both.
    caption : str
    """
    step, top, box = 54.0, 18.0, 24.0
    parts, told = [], []
    for i, (name, actors) in enumerate(rows.items()):
        y, total = top + step * i, sum(us for _, us in actors if us is not None)
        parts.append(_text(0, y - 5, f"{name}: {total:.1f} us of CPU time"))
        wide = [12 + 7.0 * len(actor) for actor, _ in actors]
        gap = (_WIDTH - sum(wide)) / (len(actors) - 1)
        x = 0.0
        said = []
        for k, ((actor, us), width) in enumerate(zip(actors, wide, strict=True)):
            colour = _AMBER if actor in ("Python", "launcher") else _BLUE
            parts += [_box(x, y, width, box, colour), _text(x + width / 2, y + 16, actor, "middle")]
            if k:
                text = "" if us is None else f"{us:.1f}" if k == 1 else f"{us:+.1f}"
                parts += [_arrow(x - gap, y + 12, x, y + 12), _text(x - gap / 2 - 3, y + 8, text, "middle")]
            said.append(actor if us is None else f"{us:.1f} microseconds to {actor}")
            x += width + gap
        told.append(f"{name}: {', '.join(said)}")
    return _drawing(caption, told, top + step * len(rows) - 24, parts)


class OnnxPage(Page):
    """The page of a lesson whose steps are sessions of ONNX Runtime, made by functions of its options."""

    def __init__(self, about: Any) -> None:
        super().__init__(about)
        with extra("ort"):
            import onnx  # noqa: F401  so that a page without it says what to install

    def _frame(self, name: str) -> pd.DataFrame:
        """What this run measures, or its record."""
        if name not in self.frames.known:
            self.measure(FRAMES[name].function, FRAMES[name].name)
        return self.frames[name]

    @_or_banner
    def verdict(self) -> Shown:
        """The box: latency at one size, over all sizes, and what a call costs."""
        frame = self._everything()
        point = tables.where(frame, **EXAMPLE).set_index("variant")["latency_us"]
        us = {name: float(point[variant]) for variant, name in _SAID.items()}
        gain = tables.ratio(frame, CHAIN, BUILT, "call")
        added = _added(self.frames if self.frames.replay else _with(self, "overhead"))
        lines = [
            f"**Time.** A run that adds 512 rows to a table of {EXAMPLE['R']} x {EXAMPLE['D']} takes ONNX Runtime's "
            f"chain of nodes **{us[_SAID[CHAIN]]:.0f} us** of latency. One node of Fusebook's library takes "
            f"{us[_SAID[CALLBACK]]:.0f} us as a callback into Python, and **{us[_SAID[BUILT]]:.0f} us** compiled ahead "
            "of time.",
            f"**All sizes.** Over {len(gain)} recorded pairs of size and dtype, the compiled library is "
            f"{_numbers.times(float(gain.median()))} faster than the chain in the median, and at least "
            f"{gain.min():.1f}x.",
            f"**Calls.** An empty run, which copies its input, takes the CPU {added['empty']:.0f} us. A run that "
            f"launches a kernel takes it {added['empty'] + added['callback'] + added['launch']:.0f} us by a callback, "
            f"and {added['empty'] + added['library']:.0f} us by the compiled library.",
        ]
        bars = dict(sorted(us.items(), key=lambda item: -item[1]))
        shown = picture.bars(
            f"Latency of one run, {EXAMPLE['R']} x {EXAMPLE['D']} with {EXAMPLE['n']} updates, float32. From torch: "
            "the library's function, without ONNX Runtime.",
            bars,
            {name: f"{value:.0f} us" for name, value in bars.items()},
            [name for name in bars if name.startswith("library")],
        )
        return self._box(lines, shown, _numbers.origin(frame))

    @_or_banner
    def calls(self) -> Shown:
        """The call from Python to the kernel, with microseconds on its arrows: measured on a GPU, else replayed."""
        frame, graph = self._frame("overhead"), self._frame("captured")
        added = _added({"overhead": frame})
        us = tables.where(graph, R=SHAPES[0][0]).set_index("step")["launch_us"]
        rows: dict[str, list[tuple[str, float | None]]] = {
            "callback": [
                ("Python", None),
                ("ONNX Runtime", added["empty"]),
                ("launcher", added["callback"]),
                ("kernel", added["launch"]),
            ],
            "compiled library": [
                ("Python", None),
                ("ONNX Runtime", added["empty"]),
                ("C library", None),
                ("kernel", added["library"]),
            ],
            "captured in a CUDA graph": [
                ("Python", None),
                ("ONNX Runtime", us["Identity"]),
                ("kernel", us["Masked, callback"] - us["Identity"]),
            ],
            "from torch": [("Python", None), ("kernel", added["torch"])],
        }
        gpu, origin = frame.set_index("step")["gpu_us"], _numbers.origin(frame)
        caption = (
            "Microseconds of CPU time on the arrows: a whole run, then differences of runs, with their signs. "
            "A compiled node launches where the empty run copies, so its difference may be negative. "
            "The kernel is a Softmax of 4 KiB and takes "
            f"{gpu['Softmax, callback']:.1f} us on the GPU; in the graph it is the scatter below. An empty run copies "
            f"its input, so the first arrow has one launch in it. Latency, below, adds the time of the GPU. "
            f"{origin[:1].upper()}{origin[1:]}."
        )
        return calls(rows, caption)._now()

    def check_graph(self, make: Callable[..., Graph], *given: Any) -> Shown:
        """Whether a session is correct, on outputs that are full of NaN before it runs.

        Parameters
        ----------
        make : callable
            Returns the session.
        *given
            Inputs of the card.
        """

        @functools.wraps(make)
        def run(*given: Any) -> Tensor:
            y: Tensor = _bound(make(), given)()["y"]
            return y

        return _checks.checked(self.op, run, given, more=self._heading() if _place.script() else "")

    def c(self, *names: str) -> Shown:
        """Functions of the C library, folded.

        Parameters
        ----------
        *names : str
            Of the functions.
        """
        text = (C / "library.c").read_text(encoding="utf-8")
        found = [re.search(rf"(?ms)^static Status {name}\(.*?^}}", text) for name in names]
        code = [_show._coloured(part[0], "c") for part in found if part]
        made = "".join(f'<div class="highlight notranslate"><pre tabindex="0">{part}</pre></div>' for part in code)
        title = f"From machine code to a launch, in C: {' and '.join(f'<code>{name}</code>' for name in names)}"
        return Shown(
            f'<details class="fb-fold"><summary>{title}</summary>{made}</details>',
            f"{' and '.join(names)}: {C / 'library.c'}",
        )._now()

    @_or_banner
    def plot(self, kind: str, over: str) -> Axes | Shown:
        """The sweep over the rows of the table: latency of a run."""
        sweep = self._sweep()
        rows = tables.where(sweep, variant=[CHAIN, CALLBACK, BUILT], dtype="float32")
        rows = rows.assign(variant=rows["variant"].replace(_SAID))
        rows.attrs.update(sweep.attrs)
        title = "masked ScatterND, R rows, 2R columns and 2R updates, float32"
        ax: Axes = getattr(plots, kind)(rows, over, title=title, xlabel="rows of the table, R")
        ax.figure.set_size_inches(8.0, 2.8)  # type: ignore[union-attr]
        sizes = sorted(rows[over].unique())
        ax.set_xscale("log")
        ax.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
        ax.xaxis.minorticks_off()
        if _place.script():
            return Shown("", f"Figure: {ax.get_title(loc='left')} ({_numbers.origin(sweep)})")._now()
        return ax

    @_or_banner
    def steps(self, **steps: Callable[..., Any]) -> Shown:
        """Time a run of each step's session, or replay its record: latency and GPU time, and lines of code.

        Parameters
        ----------
        **steps : callable
            Functions of the options of `fusebook.ort.Graph`, which return a session.
        """
        if tuple(steps) != STEPS:
            raise ValueError(f"page.steps: expected {', '.join(STEPS)}, got {', '.join(steps)}")
        spec = FRAMES["steps"]
        frame = measured(spec.name, lambda: timed(steps), code_of=[*steps.values(), timed, SHAPES])
        renamed = spec.renamed(frame)
        self.frames.known["steps"] = renamed
        _place.remember("gains", self.frames)
        return _show.table(
            staircase(renamed), f"Microseconds of a run by size, float32; {_numbers.origin(frame)}", fold=False
        )

    @_or_banner
    def use(self) -> Shown:
        """When to use the library: what each kind of session needs and costs, and how to install it."""
        frame = self._everything()
        times = tables.times(tables.where(frame, variant=[CHAIN, CALLBACK, BUILT]), "call")
        least = times.min(axis=1)
        needs = {
            CHAIN: "ONNX Runtime",
            CALLBACK: "ONNX Runtime, Python, torch, Triton, a C compiler",
            BUILT: "ONNX Runtime and one file",
        }
        rows = {
            _SAID[name]: {
                "needs, to run": needs[name],
                "fastest, or within 2 %": f"{int((times[name] <= (1 + tables.WITHIN) * least).sum())} of {len(times)}",
                "median latency": _numbers.times(float((times[name] / least).median())),
            }
            for name in (CHAIN, CALLBACK, BUILT)
        }
        made = _show.table(
            pd.DataFrame.from_dict(rows, orient="index"),
            "By latency of a run over recorded sizes and dtypes; the fastest = 1",
            fold=False,
        )
        lost = tables.ratio(frame, BUILT, CALLBACK)
        worst: Any = lost.idxmax()
        rows_of, width, updates = re.findall(r"\d+", worst[0])[:3]
        told = [
            "**Many updates:** the compiled library has only the kernels that were listed for it. In GPU time it is "
            f"slower than the callback at {int((lost > 1 + tables.WITHIN).sum())} of {len(lost)} sizes and dtypes, "
            f"at worst {_numbers.times(float(lost.max()))}, with {updates} updates to a table of {rows_of} x {width} "
            f"in {worst[1]}.",
            "**Memory:** the chain holds a masked copy of all updates, and one node holds none. What ONNX Runtime "
            "keeps for itself was not measured.",
        ]
        install = [
            *_numbers.install(),
            "Graphs need `pip install onnx`, and ONNX Runtime, as `onnxruntime-gpu` or, without a GPU, `onnxruntime`.",
        ]
        return Shown(
            f"{made._repr_html_()}<p>{_numbers.joined(told)}</p><p>{_numbers.joined(install)}</p>",
            "\n".join([*(_numbers.plainly([line]) for line in told), _numbers.plainly(install)]),
        )._now()


PAGE = OnnxPage


def _with(page: OnnxPage, name: str) -> dict[str, pd.DataFrame]:
    return {name: page._frame(name)}


def staircase(frame: pd.DataFrame) -> pd.DataFrame:
    """Latency and GPU time by step and size."""
    labels = _numbers.labels(type("", (), {"STEPS": STEPS}))
    names = {name: f"{labels[name]}, {name}" if name != "chain" else name for name in STEPS}
    wide = pd.DataFrame(index=pd.Index(names))
    for shape in SHAPES:
        rows = tables.where(frame, shape="x".join(map(str, shape))).set_index("step")
        for title, column in (("latency", "latency_us"), ("GPU", "gpu_us")):
            wide[f"{shape[0]} x {shape[1]}: {title}"] = rows[column].astype(float)
    return wide.rename(index=names)


# What claims read -----------------------------------------------------------------------------------------------------


def _one(value: float) -> pd.Series:
    return pd.Series([float(value)], index=[""])


def _added(frames: Any) -> dict[str, float]:
    """Microseconds of CPU time of an empty run, and what a callback, its launch and the library add."""
    us = frames["overhead"].set_index("step")["launch_us"]
    empty, nothing = us["Identity"], us["a callback that does nothing"]
    return {
        "empty": float(empty),
        "callback": float(nothing - empty),
        "launch": float(us["Softmax, callback"] - nothing),
        "library": float(us["Softmax, ahead of time"] - empty),
        "torch": float(us["fusebook.softmax from torch"]),
    }


def _latency(frames: Frames) -> pd.Series:
    """Microseconds of latency of graphs of one node."""
    return frames["overhead"].set_index("step")["latency_us"]


def _every(frames: Frames) -> pd.DataFrame:
    """All points: the sweep and the embedding."""
    return frames.of("onnxruntime_nodes")


def _own(frames: Frames) -> pd.DataFrame:
    """The rows of the library's nodes, with their names."""
    rows = tables.where(_every(frames), variant=[OF_SHAPE, CALLBACK, BUILT, "fusebook OfShape, ahead of time"])
    return rows.assign(size=tables.label(rows)).set_index(["variant", "size", "dtype"])


def _gain(frames: Frames, slow: str, fast: str, kind: str = "cold", **at: Any) -> pd.Series:
    """How many times as long as `fast` another takes."""
    return tables.ratio(tables.where(_every(frames), **at), slow, fast, kind)


_LLAMA: dict[str, Any] = {"R": 32000, "dtype": "float32"}
_SMALL: dict[str, Any] = {"R": 256, "dtype": "float32"}


def _us(frames: Frames, clock: str = "latency_us", shape: str = "256x512x512") -> pd.Series:
    found = tables.where(frames["steps"], shape=shape).set_index("step")[clock]
    if not {"chain", *STEPS} <= {*found.index}:
        raise NotRecorded("the steps were not measured")
    return found


def _saved(frames: Frames, name: str) -> pd.Series:
    """Microseconds of latency that a CUDA graph saves, by size."""
    by_size = {"x".join(map(str, shape)): _us(frames, shape="x".join(map(str, shape))) for shape in SHAPES}
    return pd.Series({size: us[name] - us[f"{name}, captured"] for size, us in by_size.items()}).rename_axis("size")


def _identity(frames: Frames) -> float:
    """The least latency of an Identity: subtracted from a run, it is never too much."""
    found = [tables.where(frames[name], step="Identity")["latency_us"].min() for name in ("overhead", "captured")]
    return float(min(found))


def _of_roof(frames: Frames, variant: str) -> pd.Series:
    """Latency of a run on the embedding less that of an Identity, over the roofline."""
    rows = tables.where(_every(frames), variant=variant, **_LLAMA)
    return _one(((rows["latency_us"] - _identity(frames)) / rows["roof_us"]).iloc[0])


def _captured_of_roof(frames: Frames) -> pd.Series:
    roof = tables.where(_every(frames), variant=BUILT, **_LLAMA)["roof_us"].iloc[0]
    rows = tables.where(frames["captured"], R=32000, step=["Masked, callback", "Masked, ahead of time"])
    return (rows.set_index("step")["latency_us"] - _identity(frames)) / roof


def _replayed_gain(frames: Frames) -> pd.Series:
    chain = tables.where(_every(frames), variant=CHAIN, **_SMALL)["latency_us"].iloc[0]
    own = tables.where(frames["captured"], R=256, step="Masked, callback")["latency_us"].iloc[0]
    return _one(chain / own)


# Claims ---------------------------------------------------------------------------------------------------------------

_AT_SMALL = "512 updates to 256 x 512, float32"
_AT_LLAMA = "2048 updates to 32000 x 4096, float32"
_ALL = "512 to 16384 updates, float32; a Llama's embedding also in float16; uniform indices"
_FOUR_KIB = "graphs of one node on 4 KiB, CPU launch time"


def _target(id: str, text: str, values: Callable[[Frames], pd.Series], condition: str, scope: str) -> Claim:
    return Claim(id, text, values, condition, scope, kind="target")


CLAIMS = (
    # The lesson's findings
    Claim(
        "scatter-or-fusion",
        "In GPU time, replacing ONNX Runtime's ScatterND gains {least:.0f}x to {most:.0f}x. Fusing the mask as well "
        "gains another {few:.1f}x to {many:.1f}x.",
        lambda frames: _gain(frames, CHAIN, OF_SHAPE) / _gain(frames, OF_SHAPE, CALLBACK),
        "> 1",
        _ALL + ", cold L2; the first gain over the second",
        lesson=True,
        numbers=lambda frames: {
            "least": (left := _gain(frames, CHAIN, OF_SHAPE)).min(),
            "most": left.max(),
            "few": (fused := _gain(frames, OF_SHAPE, CALLBACK)).min(),
            "many": fused.max(),
        },
    ),
    Claim(
        "graph-saves",
        "On a small table a CUDA graph saves {called:.0f} us of a run with the library's callback. Of the chain it "
        "saves {chain:.0f} us, and with the compiled library {built:.0f} us.",
        lambda frames: pd.concat(
            {
                "chain over callback": _saved(frames, "chain") / _saved(frames, "library"),
                "compiled over chain": _saved(frames, "built") / _saved(frames, "chain"),
            },
            names=["saved"],
        ),
        "< 1",
        "latency at both sizes of the steps, float32; what is saved over what is saved",
        lesson=True,
        numbers=lambda frames: {
            "called": _saved(frames, "library").iloc[0],
            "chain": _saved(frames, "chain").iloc[0],
            "built": _saved(frames, "built").iloc[0],
        },
    ),
    Claim(
        "few-updates",
        "With 4096 updates or fewer, a run with the compiled library takes {least:.2f} to {most:.2f} of the latency of "
        "one with the callback.",
        lambda frames: 1 / _gain(frames, CALLBACK, BUILT, "call", n=lambda n: n <= 4096),
        "< 1",
        "512 to 4096 updates, and the Llama's embedding, latency",
        lesson=True,
    ),
    Claim(
        "alone",
        "The compiled library computes every element correctly in a process without torch, Triton and Fusebook.",
        lambda frames: (
            (frames["alone"]["wrong"] == 0)
            & (frames["alone"]["modules"] == "none")
            & (frames["alone"]["provider"] == "CUDAExecutionProvider")
        ),
        "== 1",
        "600 updates to 300 x 128, float32, on a GPU",
        lesson=True,
    ),
    # Correctness
    within_tolerance(_own, _ALL, "Every node of the library is within tolerance wherever it was timed."),
    steps_correct("both sizes, float32, and the sessions that only the evidence shows"),
    Claim(
        "replayed-correct",
        "A captured graph reads values that changed after it was captured, and is correct.",
        lambda frames: frames["captured"].set_index(["step", "R"])["correct"],
        "== 1",
        "both sizes, float32; the chain, the callback and the compiled library",
    ),
    # Other sizes
    Claim(
        "many-updates",
        "With 8192 updates or more, the compiled library takes {least:.2f} to {most:.2f} times the GPU time of the "
        "callback, and {fewest:.2f} to {fewer:.2f} times with 4096 or fewer.",
        lambda frames: 1 / _gain(frames, CALLBACK, BUILT, n=lambda n: n >= 8192),
        "> 1",
        "8192 to 16384 updates, float32, cold L2",
        numbers=lambda frames: {
            "fewest": (some := 1 / _gain(frames, CALLBACK, BUILT, n=lambda n: n <= 4096)).min(),
            "fewer": some.max(),
        },
    ),
    Claim(
        "arrays",
        "A session that is given arrays of NumPy takes {least:.1f} to {most:.1f} times the latency of one on memory of "
        "the GPU.",
        lambda frames: pd.Series(
            {
                shape: (us := _us(frames, shape=shape))["chain, arrays"] / us["chain"]
                for shape in ("x".join(map(str, sizes)) for sizes in SHAPES)
            }
        ),
        "> 1",
        "the chain at both sizes, float32",
    ),
    Claim(
        "small-softmax",
        "For a Softmax of 4 KiB, a callback takes {called:.2f} times the latency of ONNX Runtime's node, and the "
        "compiled library {built:.2f} times.",
        lambda frames: _one((us := _latency(frames))["Softmax, ahead of time"] / us["Softmax of ONNX Runtime"]),
        "<= 1.1",
        "8 x 128, float32; the compiled library over ONNX Runtime",
        numbers=lambda frames: {
            "called": (us := _latency(frames))["Softmax, callback"] / us["Softmax of ONNX Runtime"],
            "built": us["Softmax, ahead of time"] / us["Softmax of ONNX Runtime"],
        },
    ),
    # Published claims
    *(
        Claim(
            f"source-{id}",
            f"{said} With {how} it is {{least:.2f}}x to {{most:.2f}}x faster.",
            functools.partial(_gain, slow=f"fusebook OfShape, {name}", fast=f"fusebook Masked, {name}", kind="call"),
            "> 1",
            _ALL + ", latency",
            kind="statement",
        )
        for id, how, name, said in (
            (
                *("callback", "the callback", "callback"),
                'The source of 2024: "The fused operator with mask seems more efficient in any case compare to the '
                'fused operator without mask".',
            ),
            ("built", "the compiled library", "ahead of time", "The same statement."),
        )
    ),
    # Targets
    _target(
        "target-gpu",
        "On the Llama's embedding the library's node is at least 10x faster than the chain: {median:.1x}.",
        lambda frames: _gain(frames, CHAIN, CALLBACK, **_LLAMA),
        ">= 10",
        _AT_LLAMA + ", cold L2",
    ),
    _target(
        "target-small-built",
        "A small run with the compiled library is at least 6x faster than one of the chain: {median:.1x}.",
        lambda frames: _gain(frames, CHAIN, BUILT, "call", **_SMALL),
        ">= 6",
        _AT_SMALL + ", latency",
    ),
    _target(
        "target-small-callback",
        "A small run with the library's callback is at least 4x faster than one of the chain: {median:.1x}.",
        lambda frames: _gain(frames, CHAIN, CALLBACK, "call", **_SMALL),
        ">= 4",
        _AT_SMALL + ", latency",
    ),
    _target(
        "target-small-captured",
        "Captured in a CUDA graph, a small run with the callback is at least 4x faster than the chain: {median:.1x}.",
        _replayed_gain,
        ">= 4",
        _AT_SMALL + ", latency; the chain is not captured",
    ),
    _target(
        "target-large-built",
        "On the Llama's embedding a run with the compiled library is at least 10x faster: {median:.1x}.",
        lambda frames: _gain(frames, CHAIN, BUILT, "call", **_LLAMA),
        ">= 10",
        _AT_LLAMA + ", latency",
    ),
    _target(
        "target-roof-built",
        "A run with the compiled library, less an empty one, takes at most 1.15 times the roofline: {median:.2f}.",
        lambda frames: _of_roof(frames, BUILT),
        "<= 1.15",
        _AT_LLAMA + ", latency",
    ),
    _target(
        "target-roof-callback",
        "A run with the library's callback, less an empty one, takes at most 1.15 times the roofline: {median:.2f}.",
        lambda frames: _of_roof(frames, CALLBACK),
        "<= 1.15",
        _AT_LLAMA + ", latency",
    ),
    _target(
        "target-roof-captured",
        "Captured in a CUDA graph, both take at most 1.15 times the roofline: up to {most:.2f}.",
        _captured_of_roof,
        "<= 1.15",
        _AT_LLAMA + ", latency, less an empty run",
    ),
    _target(
        "target-launch-built",
        "To launch Softmax from the compiled library adds at most 10 us to an empty run: {median:+.1f} us.",
        lambda frames: _one(_added(frames)["library"]),
        "<= 10",
        _FOUR_KIB,
    ),
    _target(
        "target-launch-callback",
        "To launch Softmax adds at most 12 us to a callback that does nothing: {median:+.1f} us.",
        lambda frames: _one(_added(frames)["launch"]),
        "<= 12",
        _FOUR_KIB,
    ),
)

LOG = (
    "The source is *Optimizing Masked ScatterND operator on CUDA* of onnx-extended (2024), which timed runs of "
    "sessions. Page 103 explains why ONNX Runtime's ScatterND is slow.",
    "Between ONNX Runtime and Python is a C file that knows no operator. The system's C compiler compiles it when it "
    "is first needed. It needs no header: ONNX Runtime's interface is a table of functions whose places never change.",
    "ONNX Runtime's stream becomes PyTorch's current stream while a launcher runs. To set it costs a third of what "
    "``torch.cuda.stream`` costs.",
    "ONNX Runtime looks for the id of a CUDA graph in every run. Without one, a C++ exception takes longer than the "
    "rest of a small run. So sessions of Fusebook set it.",
    "A domain can be registered once in a session. So a session has the callbacks or the compiled library.",
    "While a graph is captured, memory that a launcher allocates is kept for as long as the session.",
    "Compare times within one table. In the table of steps ten sessions take turns, and the same run takes longer "
    "there than where four take turns.",
)
