"""Evidence of the lesson on training, and what it measures: steps of models of transformers."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import fusebook
from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.lesson import _memory, _numbers, _show
from fusebook.lesson._page import _or_banner
from fusebook.lesson._results import NoResults, measured
from fusebook.lesson._show import Shown
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
from fusebook.measure import inputs, timing

with extra("book"):
    import pandas as pd

OPERATORS = ("rope",)
EXAMPLE = {"B": 4, "H": 32, "K": 8, "R": 64, "P": 0, "N": 2048, "style": "neox", "dtype": "bfloat16"}
STEPS = ("eager", "one", "both")
SHAPES = ((4, 32, 8, 64, 0, 2048), (1, 32, 8, 64, 0, 512))
DTYPES = ("bfloat16",)
EXTRA_STEPS: Mapping[str, Callable[..., Any]] = {}
KERNELS = {"rope": ("_rotate_heads",)}
IMPORTS = (
    "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3", "liger_kernel.ops",
)  # fmt: skip

Run = tuple[Callable[..., Any], torch.optim.Optimizer]

#: The family of each model, and its sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": (
        "Llama",
        {
            "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256,
        },
    ),
    "Qwen3 0.6B": (
        "Qwen3",
        {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
        },
    ),
    "small Llama": (
        "Llama",
        {
            "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
            "num_key_value_heads": 2, "vocab_size": 8192,
        },
    ),
}  # fmt: skip
SEQUENCES, LENGTHS = 4, (2048, 512)
# Bytes of GPU memory: less than the weights of the first two models, which are measured.
_KEPT = 2**30


# Models and what trains them ------------------------------------------------------------------------------------------


def _needs_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise NoResults(
            "This part trains models of transformers, which is not installed here: `pip install transformers`.",
            excused=True,
        )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _free() -> int:
    """Free the model before, and return the bytes of GPU memory that remain, such as those which flush the L2 cache."""
    torch._dynamo.reset()
    if not torch.cuda.is_available():
        return 0
    if torch.cuda.memory_allocated() > _KEPT:  # a patched model is in a cycle; a collection of garbage is slow
        gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _build(name: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    """A model with the same random weights each time; what came before it is freed."""
    import transformers

    _free()
    family, known = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        **{**known, "max_position_embeddings": max(LENGTHS), "use_cache": False, **sizes}
    )
    torch.manual_seed(0)
    with torch.device(_device()):
        return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).train()


def _torchs(model: Any, lr: float = 1e-4) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def _books(model: Any, lr: float = 1e-4) -> torch.optim.Optimizer:
    return fusebook.optim.AdamW(model.parameters(), lr=lr)


def _alone(operator: str, model: Any) -> Run:
    """A model with the replacements by one operator, and torch's optimizer."""
    replaced = fusebook.patch(model).replaced
    for name, module in model.named_modules():
        if "forward" in vars(module) and not replaced.get(name, replaced[""]).startswith(f"fusebook.{operator}"):
            del module.forward
    return model, _torchs(model)


def _patched(model: Any, **options: Any) -> Run:
    fusebook.patch(model, **options)
    return model, _books(model)


def _compiled(run: Callable[[Any], Run], model: Any) -> Run:
    model, optimizer = run(model)
    return torch.compile(model), optimizer


def _causal(run: Callable[[Any], Run], model: Any) -> Run:
    """Without a mask: before torch 2.14 transformers makes one while it is compiled, and attention reads it."""
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register("causal", sdpa_attention_forward)
    model.set_attn_implementation("causal")
    return _compiled(run, model)


def _eager(model: Any) -> Run:
    return model, _torchs(model)


def _liger(model: Any) -> Run:
    import liger_kernel.transformers as liger

    put = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")
    put(rope=True, swiglu=True, rms_norm=True, cross_entropy=False, fused_linear_cross_entropy=True, model=model)
    return model, _torchs(model)


#: One replacement alone, by what a reader sees.
REPLACED: dict[str, Callable[[Any], Run]] = {
    "norms": functools.partial(_alone, "rms_norm"),
    "rope": functools.partial(_alone, "rope"),
    "MLP's product": functools.partial(_alone, "silu_mul"),
    "loss": functools.partial(_alone, "linear_cross_entropy"),
    "AdamW": lambda model: (model, _books(model)),
}
IMPLEMENTATIONS: dict[str, Callable[[Any], Run]] = {
    "eager": _eager,
    **REPLACED,
    "Fusebook": _patched,
    "torch.compile": functools.partial(_compiled, _eager),
    "torch.compile, no mask": functools.partial(_causal, _eager),
    "Fusebook, compiled": functools.partial(_compiled, _patched),
    "Liger": _liger,
}
if "recompute" in inspect.signature(fusebook.patch).parameters:
    IMPLEMENTATIONS["Fusebook, recompute"] = functools.partial(_patched, recompute=True)
#: Implementations that are measured with two models and every length, as is Liger.
EVERYWHERE = ("eager", "Fusebook")
#: Those that a process of their own measures: Liger's patch changes transformers' classes, and compilers take a core.
APART = ("torch.compile", "torch.compile, no mask", "Fusebook, compiled", "Liger")
#: Whose kernels are listed.
PROFILED = ("eager", "Fusebook", "torch.compile", "torch.compile, no mask", "Fusebook, compiled")


def _step(run: Callable[..., Any], optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    loss = run(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()  # type: ignore[no-any-return]


# What is measured -----------------------------------------------------------------------------------------------------


def _wait() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


#: Kinds of kernels, and what names of theirs contain; the first that fits. All others are PyTorch's.
KINDS = {
    "attention": r"sdpa|flash|fmha|compute_dot_do_o|convert_dq",
    "matmuls": r"nvjet|gemm|cutlass|splitK|xmma",
    "AdamW": r"adamw|multi_tensor_apply|_copy_states",
    "loss": r"softmax|nll_loss|_cross_entropy",
    "norms": r"_norm_|_column_sums",
    "rope": r"_rope_",
    "MLP's product": r"_elementwise_flat",
}
OTHER = "other kernels of PyTorch"


def kind_of(kernel: str) -> str:
    """What a kernel of a training step is for, as far as its name says."""
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE))
    return next(found, OTHER)


def _kernels(step: Callable[[], Any], steps: int = 2) -> dict[str, float]:
    """Milliseconds of the kernels of a step, by their kind."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        _wait()
    ms = dict.fromkeys([*KINDS, OTHER], 0.0)
    for event in found.key_averages():
        if event.device_type == DeviceType.CUDA:
            ms[kind_of(event.key)] += event.self_device_time_total / steps / 1e3
    return {f"{kind}, ms": t for kind, t in ms.items()}


def _row(
    name: str, model: str, tokens: int, blocks: int = 3, each: int = 3, begun: Callable[[], Any] | None = None,
    **sizes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds of a step, by the host's clock, in blocks of some steps; the peak of memory; losses.

    `begun` is called after the first step, which compiles.
    """
    row: dict[str, Any] = {"implementation": name, "model": model, "sequences": SEQUENCES, "tokens": tokens}
    try:
        held = _free()  # by the process, not by the model
        made = _build(model, **sizes)
        run, optimizer = IMPLEMENTATIONS[name](made)
        rng = torch.Generator(_device()).manual_seed(0)
        ids = torch.randint(made.config.vocab_size, (SEQUENCES, tokens), generator=rng, device=_device())
        start = _wait()
        losses = [_step(run, optimizer, ids)]
        row["first_s"] = _wait() - start
        if begun:
            begun()
        for _ in range(2):
            losses.append(_step(run, optimizer, ids))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        ms = []
        for _ in range(blocks):
            start = _wait()
            for _ in range(each):
                losses.append(_step(run, optimizer, ids))
            ms.append((_wait() - start) / each * 1e3)
        peak = torch.cuda.max_memory_allocated() - held if torch.cuda.is_available() else math.nan
        row |= {"ms": float(pd.Series(ms).median()), "least_ms": min(ms), "most_ms": max(ms), "peak_bytes": peak}
        row |= {"loss": float(losses[0]), "last_loss": float(losses[-1]), "note": ""}
        if torch.cuda.is_available() and name in PROFILED and (model, tokens) == (next(iter(MODELS)), LENGTHS[0]):
            row |= _kernels(functools.partial(_step, run, optimizer, ids))
    except torch.OutOfMemoryError as error:
        row["note"] = str(error).partition(".")[0]
    return row


def alone(name: str) -> None:
    """Print the rows of an implementation, in a process that ends then.

    It imports its packages, then makes its first step, and then measures. It waits before each, for a line on stdin.
    """
    for module in (*IMPORTS, "liger_kernel.transformers" if name == "Liger" else "torch._inductor.compile_fx"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)

    def turn() -> None:
        if not sys.stdin.readline():
            raise SystemExit(1)

    def begun() -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # others are measured first
        print(_BEGUN, flush=True)
        turn()

    turn()
    first, *others = [(model, tokens) for model in [*MODELS][:2] for tokens in LENGTHS]
    rows = [_row(name, *first, begun=begun)] + [_row(name, *other) for other in others if name == "Liger"]
    print(json.dumps(rows))
    gc.freeze()  # the next process waits, and to free all objects one by one takes seconds


#: What a process prints after its first step, and how the line with its rows begins.
_BEGUN, _ROWS = "begun", '[{"'


def _begun(process: subprocess.Popen[str]) -> list[str]:
    """Wait until a process has made its first step: the lines that it printed."""
    assert process.stdout
    # They are all that it says, if that step takes more memory than there is.
    return [*itertools.takewhile(lambda line: line.strip() != _BEGUN, process.stdout)]


def _ended(name: str, process: subprocess.Popen[str], lines: str, said: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a process that measures when it gets these lines, and what it said before."""
    found = next((line for line in said if line.startswith(_ROWS)), "")
    with contextlib.suppress(BrokenPipeError), process:  # one that has ended takes no lines
        print(lines, end="", file=process.stdin, flush=True)
        # Not to the end: a compiler that outlives its parent keeps the pipe open.
        found = found or next((line for line in process.stdout or () if line.startswith(_ROWS)), "")
    if process.returncode or not found:
        raise RuntimeError(f"the process of {name} ended with {process.returncode}; see above")
    rows: list[dict[str, Any]] = json.loads(found)
    return rows


def training() -> pd.DataFrame:
    """A row for each implementation, model and length; eager again at the end, as the GPU's clock may change."""
    _needs_transformers()
    first, second = [*MODELS][:2]
    apart = {}
    for name in APART:
        if name != "Liger" or importlib.util.find_spec("liger_kernel"):
            code = f"import {__name__} as evidence; evidence.alone({name!r})"
            pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
            apart[name] = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    compiled = {name: process for name, process in apart.items() if name != "Liger"}
    for process in compiled.values():
        print(file=process.stdin, flush=True)
    for model in (first, second):
        _row("Fusebook", model, LENGTHS[0], blocks=1, each=1)  # compiles kernels, while those processes compile
    said = {name: _begun(process) for name, process in compiled.items()}
    rows = [_row(name, first, LENGTHS[0]) for name in IMPLEMENTATIONS if name not in APART]
    for model, tokens in ((first, LENGTHS[1]), (second, LENGTHS[0]), (second, LENGTHS[1])):
        rows += [_row(name, model, tokens) for name in EVERYWHERE]
    rows.append({**_row("eager", first, LENGTHS[0]), "implementation": "eager, again"})
    _free()  # others measure now
    for name, process in apart.items():
        rows += _ended(name, process, "\n" if name in said else "\n\n", said.get(name, ()))
    return pd.DataFrame(rows)


def _batches(steps: int = 100, sequences: int = 8, tokens: int = 256, vocabulary: int = 8192) -> torch.Tensor:
    """Batches that can be learnt: half of all tokens follow from the one before, and few tokens are frequent."""
    rng = torch.Generator(_device()).manual_seed(0)
    device: Any = {"generator": rng, "device": _device()}
    often = 1 / torch.arange(1, vocabulary + 1, device=_device(), dtype=torch.float64)
    ids = torch.multinomial(often, steps * sequences * tokens, replacement=True, generator=rng)
    ids = ids.view(steps * sequences, tokens)
    after, follows = torch.randperm(vocabulary, **device), torch.rand(ids.shape, **device) < 0.5
    for t in range(1, tokens):
        ids[:, t] = torch.where(follows[:, t], after[ids[:, t - 1]], ids[:, t])
    return ids.view(steps, sequences, tokens)


def _trained(model: Any, implementation: str, batches: torch.Tensor) -> list[float]:
    """The losses of a step with each batch."""
    if implementation.startswith("Fusebook"):
        fusebook.patch(model)
    optimizer = (_books if implementation == "Fusebook" else _torchs)(model, 1e-3)
    return torch.stack([_step(model, optimizer, ids) for ids in batches]).tolist()


def losses(**sizes: Any) -> pd.DataFrame:
    """Losses of a small model, of runs that differ by nothing but rounding.

    Eager's second run has the sequences of each batch in another order, so that sums over tokens round differently. Its
    third run has transformers' attention in eager PyTorch, so that activations do, too.
    """
    _needs_transformers()
    batches = _batches(**sizes)
    orders = {"eager": batches, "eager, reversed": batches.flip(1), "eager, other attention": batches}
    runs = {**orders, "Fusebook": batches, "Fusebook but for AdamW": batches}
    rows = []
    for name, given in runs.items():
        model = _build("small Llama")
        if "attention" in name:
            model.set_attn_implementation("eager")
        found = _trained(model, name.partition(",")[0], given)
        rows += [{"run": name, "number": i, "loss": loss} for i, loss in enumerate(found, 1)]
    return pd.DataFrame(rows)


def _layer(parameter: str) -> str:
    if found := re.search(r"layers\.(\d+)\.", parameter):
        return f"layer {found[1]}"
    return {"embed_tokens": "embedding", "norm": "last norm", "lm_head": "head"}[parameter.split(".")[-2]]


def gradients(**sizes: Any) -> pd.DataFrame:
    """The distance of gradients from those in float64, over the norm of these: by layer, before and after training."""
    _needs_transformers()
    batches = _batches(**sizes)
    model, ids, rows = _build("small Llama"), batches[-1], []
    for after in (0, len(batches)):
        if after:
            _trained(model, "eager", batches)
        weights = {name: p.detach().clone() for name, p in model.state_dict().items()}

        def found(
            implementation: str, dtype: torch.dtype, weights: Mapping[str, torch.Tensor] = weights
        ) -> dict[str, torch.Tensor]:
            other = _build("small Llama", dtype)
            other.load_state_dict(weights)
            if implementation == "Fusebook":
                fusebook.patch(other)
            other(input_ids=ids, labels=ids).loss.backward()
            return {name: p.grad.double() for name, p in other.named_parameters()}

        exact = found("eager", torch.float64)
        for dtype in (torch.bfloat16, torch.float32):
            for name in ("eager", "Fusebook"):
                off: dict[str, list[float]] = {}
                for parameter, g in found(name, dtype).items():
                    here = off.setdefault(_layer(parameter), [0.0, 0.0])
                    here[0] += float((g - exact[parameter]).square().sum())
                    here[1] += float(exact[parameter].square().sum())
                row = {"implementation": name, "dtype": str(dtype)[6:], "after": after}
                rows += [{**row, "layer": layer, "error": (a / b) ** 0.5} for layer, (a, b) in off.items()]
    return pd.DataFrame(rows)


def rotated_back() -> pd.DataFrame:
    """GPU time of the rotary embedding's gradient, of a copy of as many bytes, and of the rotation itself."""
    op, dims = OPS["rope"], {name: value for name, value in EXAMPLE.items() if name != "dtype"}
    q, k, cos, sin, style = op.make(inputs.generator(0), torch.bfloat16, **dims)
    calls: dict[str, Callable[[], Any]] = {}
    for name in ("eager", "fusebook"):
        variant = op.variants[name]
        given = [t.detach().requires_grad_() for t in (q, k)]
        out = variant.run(*variant.given(*given, cos, sin, style))
        calls[name] = functools.partial(torch.autograd.grad, out, given, [q, k], retain_graph=True)
    bytes_ = torch.empty(2 * (q.numel() + k.numel()), dtype=torch.int8, device=q.device)
    calls["copy"] = functools.partial(torch.empty_like(bytes_).copy_, bytes_)
    calls["forward"] = functools.partial(op.variants["fusebook"].run, q, k, cos, sin, style)
    times = timing.cold(calls)
    return pd.DataFrame(
        [{"implementation": name, "gpu_us": t.q50 * 1e6 if (t := times[name]) else math.nan} for name in calls]
    )


_NAMED = {"implementation": "step"}
FRAMES = {
    "sweep": Recorded("rope", "small,large", "bfloat16"),
    "steps": Measured("rope_steps"),
    "gradient": Measured("rope_gradient", _NAMED, rotated_back),
    "training": Measured("training", _NAMED, training),
    "losses": Measured("training_losses", {"run": "step"}, losses),
    "gradients": Measured("training_gradients", _NAMED, gradients),
}


# The page -------------------------------------------------------------------------------------------------------------

GIB = 2**30
#: Names of implementations without a comma, for lists.
SAID = {
    "torch.compile, no mask": "torch.compile without mask",
    "Fusebook, compiled": "Fusebook in torch.compile",
    "Fusebook, recompute": "Fusebook with recompute",
}


class TrainingPage(_memory.MemoryPage):
    """The page of a lesson whose subject is a training step."""

    def _frame(self, name: str) -> pd.DataFrame:
        """What this run measures, or its record."""
        if name not in self.frames.known:
            spec = FRAMES[name]
            assert isinstance(spec, Measured) and spec.function
            frame = measured(spec.name, spec.function)
            self.frames.known[name] = spec.renamed(frame)
            self.frames.known[name].attrs.update(frame.attrs)
        return self.frames[name]

    @_or_banner
    def verdict(self) -> Shown:
        """The box: time and memory of a training step, and other models and lengths."""
        from fusebook.lesson import picture

        frame = self._frame("training")
        point = _point(frame).drop(index=[*REPLACED, "eager, again"], errors="ignore").rename(index=SAID)
        ms, gib = point["ms"].sort_values(ascending=False), point["peak_bytes"] / GIB
        slower = _numbers.compared({name: t / ms["Fusebook"] for name, t in ms.drop("Fusebook")[::-1].items()})
        more = "; ".join(f"{name} {held:.1f}" for name, held in gib.drop("Fusebook").sort_values().items())
        wide = _wide(frame, "ms")
        ratio = wide["Fusebook"] / wide["eager"]
        lines = [
            f"**Time.** A training step of a Llama takes **{ms['Fusebook']:.1f} ms** with `fusebook.patch` and "
            f"`fusebook.optim.AdamW`. {slower}",
            f"**Memory.** With Fusebook the peak of a step is **{gib['Fusebook']:.1f} GiB**. Others, in GiB: {more}.",
            f"**Models.** For {len(ratio)} pairs of a model and a sequence length, Fusebook is "
            f"{_numbers.times(1 / ratio.max())} to {_numbers.times(1 / ratio.min())} faster than eager.",
        ]
        bars = dict(ms)
        shown = picture.bars(
            f"A step with {SEQUENCES} x {LENGTHS[0]} tokens: milliseconds by the host's clock. Eager is PyTorch, one "
            "operation after another. Liger is a library of kernels. For other names, see the last table.",
            bars,
            {name: f"{t:.1f} ms" for name, t in bars.items()},
            ["Fusebook"],
        )
        return self._box(lines, shown, _numbers.origin(frame))

    @_or_banner
    def profile(self) -> Shown:
        """The kernels of a step by their kind, eager next to patched: measured on a GPU, else replayed."""
        frame = self._frame("training")
        wide = pd.DataFrame({f"{name}, ms": _shares(_point(frame), name) for name in ("eager", "Fusebook")})
        small = ["norms", "rope", "MLP's product", OTHER]  # in an eager step, their kernels have the same names
        wide.loc["norms, rope, MLP, others"] = wide.loc[small].sum()
        wide = wide.drop(index=small)
        caption = f"Milliseconds of a step by kind of kernel, {SEQUENCES} x {LENGTHS[0]} tokens"
        return _memory.pairs(f"{caption}; {_numbers.origin(frame)}.", wide, together=True)._now()

    @_or_banner
    def replacements(self) -> Shown:
        """Time and memory of a step with one replacement alone, and with all: measured on a GPU, else replayed."""
        frame = self._frame("training")
        point = _point(frame).loc[["eager", *REPLACED, "Fusebook"]].rename(index={"Fusebook": "all of them"})
        shown = pd.DataFrame({"ms": point["ms"], "GiB": point["peak_bytes"] / GIB})
        caption = f"A step of the Llama with one replacement at a time; {_numbers.origin(frame)}."
        return _memory.pairs(caption, shown)._now()

    @_or_banner
    def use(self) -> Shown:
        """When to use the library: time and memory by model, length and implementation, and how to install it."""
        frame = self._frame("training")
        kept = frame[~frame["step"].isin([*REPLACED, "eager, again"])]
        parts = {
            f"{model}, {tokens}": some.set_index("step")
            for (model, tokens), some in kept.groupby(["model", "tokens"], sort=False)
        }
        columns = {f"{name}: ms": some["ms"] for name, some in parts.items()}
        columns |= {f"{name}: GiB": some["peak_bytes"] / GIB for name, some in parts.items()}
        wide = pd.DataFrame(columns).sort_values(next(iter(columns))).rename(index=SAID)
        wide.index.name = None
        made = _show.table(
            wide,
            f"A training step by model and tokens of each of {SEQUENCES} sequences; empty: not measured; "
            f"{_numbers.origin(frame)}",
            fold=False,
        )
        first = _point(frame).filter(like="compile", axis=0)["first_s"]
        left = (
            "The **mask** is one that transformers makes under torch.compile, and attention reads. **Recompute** is "
            "`recompute=True`. We measured the rows with torch.compile or recompute for one model and one length only. "
            f"Under torch.compile the first step takes {first.min():.0f} to {first.max():.0f} seconds, and more with "
            "more layers. "
            f"Where {LENGTHS[-1]} tokens take nearly as long as {LENGTHS[0]}, the CPU is the limit."
        )
        install = [
            left,
            *_numbers.install(),
            "`fusebook.patch` needs `pip install transformers`, version 4.57 or later.",
        ]
        return Shown(f"{made._repr_html_()}<p>{_numbers.joined(install)}</p>", _numbers.plainly(install))._now()

    def _staircase(self, frame: pd.DataFrame, steps: Mapping[str, Callable[..., Any]]) -> tuple[pd.DataFrame, str]:
        tokens = frame["shape"].str.extract(r"^(\d+)x.*x(\d+)$").agg(" x ".join, axis=1) + " tokens"
        wide = _numbers.staircase(self.op, self.about, frame.assign(at=tokens), steps)
        return wide, f"Percent of copy speed in GPU time, {DTYPES[0]}"

    def _record(self) -> None:
        with contextlib.suppress(NoResults):  # transformers is missing, as the page has said
            super()._record()


PAGE = TrainingPage


# What claims read -----------------------------------------------------------------------------------------------------


def _point(frame: pd.DataFrame) -> Any:
    """The implementations with the first model at the first length."""
    return tables.where(frame, model=next(iter(MODELS)), tokens=LENGTHS[0]).set_index("step")


def _wide(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column by model and length, and by implementation."""
    return frame.pivot_table(column, ["model", "tokens"], "step", sort=False)


def _over(frames: Frames, own: str, other: str, column: str = "ms") -> pd.Series:
    """The time or memory of one implementation over that of another, with the first model at the first length."""
    point = _point(frames["training"])
    for name in (own, other):
        if name not in point.index or math.isnan(point[column][name]):
            raise NotRecorded(f"{name} was not measured")
    return _one(point[column][own] / point[column][other])


def _one(value: float) -> pd.Series:
    return pd.Series([value], index=[""])


def _ms(frames: Frames, *names: str) -> dict[str, Any]:
    """Fields of a sentence: milliseconds and GiB of implementations."""
    point = _point(frames["training"]).reindex([*names])
    found = {f"ms{i}": value for i, value in enumerate(point["ms"])}
    return found | {f"gib{i}": value / GIB for i, value in enumerate(point["peak_bytes"])}


def _target(id: str, text: str, own: str, other: str, condition: str, column: str = "ms") -> Claim:
    """A target for one implementation next to another, whose numbers are in the text."""
    values = functools.partial(_over, own=own, other=other, column=column)
    return Claim(id, text, values, condition, _LLAMA, kind="target", numbers=lambda frames: _ms(frames, own, other))


def _saved(frames: Frames) -> pd.Series:
    """Milliseconds that each replacement alone saves of a step."""
    ms = _point(frames["training"])["ms"]
    return ms["eager"] - ms[[*REPLACED]]


def _curves(frames: Frames) -> pd.DataFrame:
    return frames["losses"].pivot_table("loss", "number", "step", sort=False)


def _spread(frames: Frames) -> float:
    """The largest distance of two eager runs at one step."""
    eager = _curves(frames).filter(like="eager")
    return float((eager.max(axis=1) - eager.min(axis=1)).max())


def _apart(frames: Frames) -> pd.Series:
    """The largest distance of each run from the first."""
    curves = _curves(frames)
    return curves.sub(curves["eager"], axis=0).abs().max().drop("eager")


def _outside(frames: Frames) -> pd.Series:
    """How far each patched run is outside of the eager runs at the same step, at most."""
    curves = _curves(frames)
    eager, own = curves.filter(like="eager"), curves.filter(like="Fusebook")
    above, below = own.sub(eager.max(axis=1), axis=0), own.rsub(eager.min(axis=1), axis=0)
    return above.combine(below, lambda a, b: a.where(a > b, b)).clip(lower=0).max()


def _errors(frames: Frames, dtype: str) -> pd.DataFrame:
    rows = tables.where(frames["gradients"], dtype=dtype)
    return rows.pivot_table("error", ["after", "layer"], "step", sort=False)


def _error_ratio(frames: Frames, dtype: str = "bfloat16") -> pd.Series:
    """The error of patched gradients over that of eager's, by steps before and layer."""
    wide = _errors(frames, dtype)
    return wide["Fusebook"] / wide["eager"]


def _shares(point: Any, name: str) -> pd.Series:
    """Milliseconds of a step by kind of kernel, and those without one."""
    ms = pd.Series({kind: float(point.loc[name, f"{kind}, ms"]) for kind in [*KINDS, OTHER]})
    ms["no kernel"] = max(0.0, point.loc[name, "ms"] - ms.sum())
    return ms


def _kinds(frames: Frames, name: str) -> pd.Series:
    point = _point(frames["training"])
    if name not in point.index:
        raise NotRecorded(f"{name} was not measured")
    return _shares(point, name)


def _gradient(frames: Frames) -> pd.Series:
    return frames["gradient"].set_index("step")["gpu_us"]


def _taken(frames: Frames, tokens: int = 2048) -> pd.Series:
    """GPU time of the lesson's steps at one length."""
    steps = frames["steps"]
    found = steps[steps["shape"].str.endswith(f"x{tokens}")].set_index("step")["gpu_us"]
    if not {*STEPS, "fusebook"} <= {*found.index}:
        raise NotRecorded("some steps were not measured")
    return found


def _own(frames: Frames) -> pd.DataFrame:
    rows = tables.where(frames["sweep"], variant="fusebook", status="ok")
    return rows.set_index(tables.label(rows))


# Claims ---------------------------------------------------------------------------------------------------------------

_LLAMA = "Llama with 8 layers of 2048, a vocabulary of 128256, 4 x 2048 tokens, bfloat16"
_SMALL = "Llama with 4 layers of 512, a vocabulary of 8192, 8 x 256 tokens"
_CASES = "two models, sequences of 2048 and 512 tokens, bfloat16"
_ROPE = "32 heads of queries and 8 of keys, 4 x 2048 tokens, bfloat16"
_ALL = "every recorded size, bfloat16"

CLAIMS = (
    # The lesson's findings
    Claim(
        "step-time",
        "A step takes {ms0:.1f} ms with Fusebook and {ms1:.1f} ms with torch.compile: {median:.2f} of its time. "
        "Under torch.compile attention takes {slow:.1f} ms instead of {fast:.1f} ms, since transformers makes a mask. "
        "Without the mask, torch.compile takes {ms2:.1f} ms.",
        lambda frames: _over(frames, "Fusebook", "torch.compile"),
        "<= 0.84",
        _LLAMA + "; time of Fusebook over torch.compile",
        kind="target",
        lesson=True,
        numbers=lambda frames: {
            **_ms(frames, "Fusebook", "torch.compile", "torch.compile, no mask"),
            "slow": _kinds(frames, "torch.compile")["attention"],
            "fast": _kinds(frames, "Fusebook")["attention"],
        },
    ),
    Claim(
        "step-memory",
        "Its peak is {gib0:.1f} GiB, torch.compile's {gib1:.1f} GiB and eager's {gib2:.1f} GiB.",
        lambda frames: _over(frames, "Fusebook", "torch.compile", "peak_bytes"),
        "<= 0.66",
        _LLAMA + "; peak of Fusebook over torch.compile",
        kind="target",
        lesson=True,
        numbers=lambda frames: _ms(frames, "Fusebook", "torch.compile", "eager"),
    ),
    Claim(
        "losses-alike",
        "Over 100 steps the losses of two patched runs, one with torch's AdamW, leave the range of three eager runs by "
        "at most {most:.4f}. Losses of eager runs that differ by rounding are up to {spread:.4f} apart.",
        lambda frames: _outside(frames) / _spread(frames),
        "<= 1",
        _SMALL + ", bfloat16; over the largest distance of two eager runs",
        lesson=True,
        numbers=lambda frames: {"most": _outside(frames).max(), "spread": _spread(frames)},
    ),
    Claim(
        "gradients-alike",
        "Before the first step and after 100 steps, errors of gradients in bfloat16 are {least:.2f} to {most:.2f} "
        "times those of eager, by layer.",
        _error_ratio,
        "<= 1.05",
        _SMALL + "; distance from eager's gradients in float64, where transformers computes norms and loss in float32",
        lesson=True,
    ),
    Claim(
        "no-mask",
        "Where torch.compile makes no mask, a step takes {median:.2f} of its time: {ms0:.1f} and {ms1:.1f} ms.",
        lambda frames: _over(frames, "Fusebook", "torch.compile, no mask"),
        "< 1",
        _LLAMA,
        numbers=lambda frames: _ms(frames, "Fusebook", "torch.compile, no mask"),
    ),
    # Targets
    _target(
        "recompute-memory",
        "With `recompute=True` the peak is {median:.2f} of that of torch.compile: {gib0:.1f} and {gib1:.1f} GiB.",
        "Fusebook, recompute",
        "torch.compile",
        "<= 0.56",
        "peak_bytes",
    ),
    _target(
        "recompute-time",
        "With `recompute=True` a step takes {median:.2f} of the time of torch.compile: {ms0:.1f} and {ms1:.1f} ms.",
        "Fusebook, recompute",
        "torch.compile",
        "<= 0.9",
    ),
    _target(
        "liger-time",
        "A step takes {median:.2f} of the time that it takes with Liger's patch: {ms0:.1f} and {ms1:.1f} ms, in "
        "{gib0:.1f} and {gib1:.1f} GiB.",
        "Fusebook",
        "Liger",
        "<= 0.85",
    ),
    _target(
        "inside-compile",
        "Inside torch.compile, a patched step takes {median:.2f} of the time of torch.compile alone, in {gib0:.1f} "
        "instead of {gib1:.1f} GiB.",
        "Fusebook, compiled",
        "torch.compile",
        "<= 0.97",
    ),
    # A step
    Claim(
        "models",
        "A patched step takes {least:.2f} to {most:.2f} of eager's time.",
        lambda frames: (wide := _wide(frames["training"], "ms"))["Fusebook"] / wide["eager"],
        "< 1",
        _CASES,
    ),
    Claim(
        "models-memory",
        "Its peak is {least:.2f} to {most:.2f} of eager's.",
        lambda frames: (wide := _wide(frames["training"], "peak_bytes"))["Fusebook"] / wide["eager"],
        "< 1",
        _CASES,
    ),
    Claim(
        "models-liger",
        "It takes {least:.2f} to {most:.2f} of the time with Liger's patch.",
        lambda frames: (wide := _wide(frames["training"], "ms"))["Fusebook"] / wide.get("Liger", float("nan")),
        "< 1",
        _CASES,
    ),
    Claim(
        "each-saves",
        "Alone, the replacements save {least:.1f} to {most:.1f} ms of a step, in all {total:.1f} ms. Together they "
        "save {all:.1f} ms.",
        _saved,
        "> 0",
        _LLAMA + "; milliseconds that one replacement saves",
        numbers=lambda frames: {
            "total": _saved(frames).sum(),
            "all": (ms := _point(frames["training"])["ms"])["eager"] - ms["Fusebook"],
        },
    ),
    Claim(
        "idle",
        "Kernels run in {share:.0%} of an eager step, and in {own:.0%} of a patched one.",
        lambda frames: _one(_kinds(frames, "Fusebook")["no kernel"] / _kinds(frames, "Fusebook").sum()),
        "",
        _LLAMA + "; share of a patched step without a kernel",
        numbers=lambda frames: {
            "share": 1 - (eager := _kinds(frames, "eager"))["no kernel"] / eager.sum(),
            "own": 1 - (own := _kinds(frames, "Fusebook"))["no kernel"] / own.sum(),
        },
    ),
    Claim(
        "clock-drift",
        "Eager's step was measured first and last: {ms0:.1f} and {ms1:.1f} ms.",
        lambda frames: (_over(frames, "eager, again", "eager") - 1).abs(),
        "<= 0.03",
        _LLAMA + "; distance of the ratio from 1",
        numbers=lambda frames: _ms(frames, "eager", "eager, again"),
    ),
    Claim(
        "first-loss",
        "All implementations have the same loss at the first step, within {most:.5f}.",
        lambda frames: (wide := _wide(frames["training"], "loss")).sub(wide["eager"], axis=0).abs().max(),
        "<= 0.005",
        _CASES + "; distance from eager's loss, by implementation",
    ),
    Claim(
        "learns",
        "In 100 steps the loss falls from {first:.2f} to {last:.2f}.",
        lambda frames: (curves := _curves(frames)).iloc[-1] / curves.iloc[0],
        "<= 0.8",
        _SMALL + ", bfloat16; last loss over first, by run",
        numbers=lambda frames: {
            "first": _curves(frames)["Fusebook"].iloc[0],
            "last": _curves(frames)["Fusebook"].iloc[-1],
        },
    ),
    Claim(
        "order-alone",
        "Two eager runs that differ by the order of sequences alone are up to {order:.4f} apart, and a patched run is "
        "up to {own:.4f} from eager.",
        _apart,
        "",
        _SMALL + ", bfloat16; largest distance from the first eager run",
        numbers=lambda frames: {"order": (far := _apart(frames))["eager, reversed"], "own": far["Fusebook"]},
    ),
    Claim(
        "gradients-float32",
        "In float32, errors of gradients are at most {most:.2f} times those of eager, by layer.",
        lambda frames: _error_ratio(frames, "float32"),
        "<= 1.5",
        _SMALL + "; distance from eager's gradients in float64, before and after 100 steps",
    ),
    # The rotary embedding
    steps_correct(_ROPE + ", and 1 x 512 tokens"),
    Claim(
        "one-gain",
        "One kernel is {median:.1x} faster than eager, whose operations move five times the memory.",
        lambda frames: _one((us := _taken(frames))["eager"] / us["one"]),
        ">= 5",
        _ROPE,
    ),
    Claim(
        "both-gain",
        "Queries and keys in one launch are {least:.2x} to {most:.2x} faster than in two.",
        lambda frames: pd.Series({n: (us := _taken(frames, n))["one"] / us["both"] for n in LENGTHS}),
        "> 1",
        "32 heads of queries and 8 of keys, 4 x 2048 and 1 x 512 tokens, bfloat16",
    ),
    Claim(
        "copy-speed",
        "`fusebook.rope` runs at {least:.0%} of copy speed or more with 8192 tokens and more.",
        lambda frames: tables.share(tables.where(frames["sweep"], config="large"), "fusebook", of="copy"),
        ">= 0.9",
        "sizes with 8192 tokens and more, bfloat16, cold L2",
    ),
    Claim(
        "gradient-like-forward",
        "The gradient takes {own:.1f} us, a copy of as many bytes {copy:.1f} us, and eager's gradient {eager:.0f} us.",
        lambda frames: _one((us := _gradient(frames))["fusebook"] / us["forward"]),
        "<= 1.1",
        _ROPE + "; gradient over forward",
        numbers=lambda frames: {"own": (us := _gradient(frames))["fusebook"], "copy": us["copy"], "eager": us["eager"]},
    ),
    Claim(
        "never-slower",
        "No other implementation of the rotary embedding is more than 2 % faster at any size.",
        lambda frames: tables.behind(frames["sweep"])["times as long"],
        "<= 1.02",
        _ALL + "; GPU time over that of the fastest other implementation",
    ),
    within_tolerance(_own, _ALL, "`fusebook.rope` is within tolerance wherever it was timed."),
    deterministic(_own, _ALL, "Two runs of `fusebook.rope` give the same bits."),
)

LOG = (
    "Each row of the training table is a new model with the same weights; the one before is freed first. Three steps "
    "come before the clock. A step's time is the median of three blocks of three steps, by the host's clock.",
    "Liger's patch changes the classes of transformers for the whole process, so its rows come from a process that "
    "ends then. `fusebook.patch` changes one model. Each row with `torch.compile` has a process, too. First steps of "
    "these are made at the same time, before all rows, and all other steps in turn.",
    "Rows with `torch.compile`, and the one of `recompute=True`, are for one model and length. A first step with it "
    "takes long, and the second model has 28 layers. Before torch 2.14, transformers makes a mask of the causal order "
    "while it is compiled, and attention then takes a slower kernel. *No mask* is an attention of the same code for "
    "which transformers makes no mask.",
    "Kernels are sorted by their names. In an eager step, those of norms, rotary embedding and MLP's product have the "
    "same names as other elementwise kernels, so they are not separate.",
    "Two eager runs can give the same bits, so they show no spread. Another order of sequences changes sums over "
    "tokens alone: every activation keeps its bits, and in a trial patched runs left the range of such runs. Another "
    "implementation of attention rounds activations differently, as any kernel does, so one run has that.",
)
