"""Evidence of the lesson on SwiGLU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

import fusebook
from fusebook import tables
from fusebook.cards import OPS
from fusebook.extras import extra
from fusebook.lesson import _products
from fusebook.lesson.evidence import Claim, Frames, Measured, NotRecorded, Recorded, steps_correct
from fusebook.measure import bench, inputs, timing

with extra("book"):
    import pandas as pd

PAGE = _products.TokensPage
OPERATORS = ("swiglu",)
EXAMPLE = {"M": 4096, "K": 4096, "N": 11008, "dtype": "bfloat16"}
WORDS = "{M} tokens of {K} with weights of {K} x {N} in {dtype}"
STEPS = ("eager", "small", "large", "stacked", "few")
SHAPES = ((4096, 4096, 11008), (1, 4096, 11008))
DTYPES = ("bfloat16",)
KERNELS = {"swiglu": ("_swiglu",)}
IMPORTS = ("liger_kernel.ops",)
#: Tokens, columns of x and columns of a weight at which Nsight Compute counts.
COUNTED = (4096, 4096, 11008)

_OP = OPS["swiglu"]
_TF32 = ("packed, TF32", "fusebook, TF32", "fusebook (chosen), TF32")
_FREE = tuple(name for name in _OP.variants if name not in (*_TF32, "fusebook (chosen)"))
_OWN = ("fusebook", "fusebook (chosen)")
_BARE = "the matmul alone"


def _compiled(mode: str | None) -> Callable[..., Callable[..., Any]]:
    """The eager code as torch.compile has it: two matmuls, and what follows."""
    return lambda steps: torch.compile(fusebook.swiglu_eager, dynamic=False, mode=mode)


EXTRA_STEPS: Mapping[str, Callable[..., Callable[..., Any]]] = {
    "packed + compiled": lambda steps: lambda *given: _packed(given),
    "torch.compile": _compiled(None),
    "max-autotune": _compiled("max-autotune-no-cudagraphs"),
}


#: max-autotune would search again in the process that counts.
COUNT_EXTRA = False


@functools.lru_cache(maxsize=1)  # packed before the clock starts
def _prepared(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return _OP.variants["packed + compiled"].given(*given)


def _packed(given: tuple[Any, ...]) -> Any:
    return _OP.variants["packed + compiled"].run(*_prepared(given))


# What is measured besides the steps -----------------------------------------------------------------------------------


def in_turn() -> pd.DataFrame:
    """GPU times of all implementations and of the matmul of packed weights alone, timed in turn."""
    parts = []
    for shape in ((4096, 4096, 11008), (8192, 4096, 14336)):
        dims = dict(zip("MKN", shape, strict=True))
        given = _OP.make(inputs.generator(0), torch.bfloat16, **dims)
        calls = {_BARE: functools.partial(torch.mm, *_OP.variants["packed"].given(*given))}
        for name in _FREE:
            variant = _OP.variants[name]
            if bench.missing(variant):
                continue
            call = functools.partial(variant.run, *variant.given(*given))
            try:
                call()
            except Exception as error:  # another library must not end the record
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            else:
                calls[name] = call
        times = timing.measure(calls, repeat=15, kinds=("cold", "warm"))
        for name, kinds in times.items():
            medians = {tables.column(kind): 1e6 * q.q50 for kind, q in kinds.items() if q is not None}
            parts.append({"step": name, **dims, **medians})
    return pd.DataFrame(parts)


FRAMES = {
    "sweep": Recorded("swiglu", ",".join(f"{M}x4096x11008" for M in (1, 16, 64, 1024, 4096)), "bfloat16", _FREE),
    "layers": Recorded("swiglu", "256x1024x2816,8192x4096x14336,16x8192x28672", "bfloat16", _FREE),
    "others": Recorded("swiglu", "small", "float16,float32", ("eager", "packed", *_OWN, *_TF32)),
    "steps": Measured("swiglu_compiled"),
    "counters": Measured("swiglu_counters"),
    "turns": Measured("swiglu_in_turn", function=in_turn),
}


# What claims read -----------------------------------------------------------------------------------------------------


def _half(frames: Frames, many: bool) -> pd.DataFrame:
    """Rows in bfloat16 of thousands of tokens, or of at most 64."""
    rows = pd.concat([frames["sweep"], frames["layers"]], ignore_index=True)
    return tables.where(rows, M=lambda M: M >= 4096 if many else M <= 64)


def _over(frame: pd.DataFrame, *others: str, kind: str = "cold") -> pd.Series:
    """GPU time of the fastest of some implementations over that of Fusebook."""
    wide = tables.times(frame, kind)
    named = [name for name in others if name in wide]
    if "fusebook" not in wide or not named:
        raise NotRecorded(f"{', '.join(others)} was not measured")
    return (wide[named].min(axis=1) / wide["fusebook"]).dropna()


_TORCH = ("eager", "packed", "packed + compiled")


def _turns(frames: Frames) -> pd.DataFrame:
    """Times in turn over that of the matmul alone: a row per size."""
    wide = frames["turns"].pivot_table("gpu_us", ["M", "K", "N"], "step", sort=False)
    return wide.div(wide[_BARE], axis=0).drop(columns=_BARE)


def _predicted(frames: Frames, variant: str, M: int) -> float:
    """Time of an implementation over the roofline of SwiGLU, by the rates that the machine was measured to reach."""
    origin = frames["sweep"].attrs.get("origin")
    if origin is None or origin.machine is None:
        raise NotRecorded("the machine is unknown")
    on, dims = origin.machine, {"M": M, "K": 4096, "N": 11008}
    least, cost = _OP.cost(2, **dims), _OP.variants[variant].cost
    assert cost is not None
    needed = on.roof(least, "bfloat16")
    return float((needed + on.memory_seconds(cost(2, **dims)) - on.memory_seconds(least)) / needed)


def _one(value: float) -> pd.Series:
    return pd.Series([value], index=[""])


def _step(frames: Frames, tokens: int) -> pd.Series:
    steps = frames["steps"]
    return steps[steps["shape"].str.startswith(f"{tokens}x")].drop_duplicates("step").set_index("step")["gpu_us"]


def _gain(frames: Frames, tokens: int, step: str, over: str) -> pd.Series:
    taken = _step(frames, tokens)
    if not {step, over} <= {*taken.index}:
        raise NotRecorded(f"{step} or {over} was not measured")
    return _one(taken[over] / taken[step])


def _moved(frames: Frames) -> pd.Series:
    """Bytes read and written by the hardware counters over those of the result, by step."""
    seen = frames["counters"]
    moved = seen.groupby("step", sort=False)[["read", "written"]].sum().sum(axis=1)
    return moved / (2 * COUNTED[0] * COUNTED[2])


def _of_roof(frames: Frames, tokens: int, column: str) -> pd.Series:
    """The share of the roofline, by weight."""
    rows = tables.where(_half(frames, False), variant="fusebook", M=tokens).set_index(["K", "N"])
    return rows["roof_us"] / rows[column]


def _errors(frames: Frames) -> pd.Series:
    rows = tables.where(frames.of("swiglu"), status="ok")
    return (rows["error"] / rows["tolerance"]).set_axis(
        pd.MultiIndex.from_arrays([rows["variant"], tables.label(rows), rows["dtype"]])
    )


def _rounding(frames: Frames) -> pd.Series:
    """The error of Fusebook over that of eager PyTorch, in bfloat16 and float16."""
    rows = tables.where(frames.of("swiglu"), dtype=["bfloat16", "float16"])
    wide = rows.assign(at=tables.label(rows)).pivot_table("error", ["at", "dtype"], "variant", sort=False)
    return (wide["fusebook"] / wide["eager"]).dropna()


def _other(frames: Frames, variant: str, over: str, dtype: str = "float32") -> pd.Series:
    """GPU time of one implementation over another's, where both have one."""
    wide = tables.times(tables.where(frames["others"], dtype=dtype))
    if not {variant, over} <= {*wide}:
        raise NotRecorded(f"{variant} or {over} was not measured")
    return (wide[variant] / wide[over]).dropna()


# Claims ---------------------------------------------------------------------------------------------------------------

_MANY = "4096 tokens with weights of 4096 x 11008 and 8192 with 4096 x 14336, bfloat16, cold L2"
_AT_4096 = "4096 tokens with weights of 4096 x 11008, bfloat16, cold L2"
_AT_1 = "one token with weights of 4096 x 11008, bfloat16, cold L2"
_FEW = "16 tokens with weights of 4096 x 11008 and 8192 x 28672, bfloat16"

CLAIMS = (
    # The lesson's findings
    Claim(
        "prediction",
        "With 4096 tokens eager takes {measured:.2f} times as long as `fusebook.swiglu`. The data sheet predicted 1.22 "
        "times, and the rates that this GPU was measured to reach predict {predicted:.2f} times.",
        lambda frames: (
            _over(tables.where(frames["sweep"], M=4096), "eager") / _predicted(frames, "eager", 4096) - 1
        ).abs(),
        "<= 0.1",
        _AT_4096 + "; distance of the measured ratio from the predicted one",
        lesson=True,
        numbers=lambda frames: {
            "measured": _over(tables.where(frames["sweep"], M=4096), "eager").iloc[0],
            "predicted": _predicted(frames, "eager", 4096),
        },
    ),
    Claim(
        "over-torch",
        "With 4096 and 8192 tokens `fusebook.swiglu` is {least:.2x} to {most:.2x} faster than the fastest code of "
        "torch.",
        lambda frames: _over(_half(frames, True), *_TORCH),
        "> 1.02",
        _MANY + "; eager, packed weights, and packed weights with torch.compile",
        lesson=True,
    ),
    Claim(
        "over-quack",
        "With 4096 and 8192 tokens `fusebook.swiglu` is faster than quack, which takes {least:.2f} to {most:.2f} times "
        "as long.",
        lambda frames: _over(_half(frames, True), "quack"),
        "> 1",
        _MANY,
    ),
    Claim(
        "few-cold",
        "With 16 tokens `fusebook.swiglu` reads the weights at 90 % of the rate of memory or more: {least:.0%} to "
        "{most:.0%}.",
        lambda frames: _of_roof(frames, 16, "gpu_us"),
        ">= 0.9",
        _FEW + ", cold L2",
        kind="target",
        lesson=True,
    ),
    # The prediction
    Claim(
        "predicted-few",
        "Predicted: with 16 tokens eager takes {median:.2f} times as long as the roofline, since weights are "
        "{share:.1%} of the traffic.",
        lambda frames: _one(_predicted(frames, "eager", 16)),
        "< 1.05",
        "16 tokens with weights of 4096 x 11008, bfloat16, from the rates of the machine, without launches",
        numbers=lambda frames: {
            "share": 2 * 2 * 4096 * 11008 / ((cost := _OP.cost(2, M=16, K=4096, N=11008)).read + cost.write)
        },
    ),
    Claim(
        "predicted-compiled",
        "With 4096 tokens packed weights and torch.compile take what was predicted, within 10 %: {measured:.2f} times "
        "the matmul alone, where {predicted:.2f} were predicted.",
        lambda frames: _one(
            abs(_turns(frames)["packed + compiled"].iloc[0] / _predicted(frames, "packed + compiled", 4096) - 1)
        ),
        "<= 0.1",
        _AT_4096 + ", timed in turn; distance of the measured ratio from the predicted one",
        numbers=lambda frames: {
            "measured": _turns(frames)["packed + compiled"].iloc[0],
            "predicted": _predicted(frames, "packed + compiled", 4096),
        },
    ),
    Claim(
        "moved",
        "By the hardware counters `fusebook.swiglu` moves {fusebook:.1f} times the bytes of the result, and eager "
        "{eager:.1f} times. The least is {needed:.1f} times.",
        lambda frames: _one((moved := _moved(frames))["eager"] / moved["fusebook"]),
        "> 1",
        _AT_4096 + "; bytes of eager over those of the library",
        numbers=lambda frames: {
            **_moved(frames),
            "needed": ((cost := _OP.cost(2, M=4096, K=4096, N=11008)).read + cost.write) / cost.write,
        },
    ),
    # Correctness
    Claim(
        "within-tolerance",
        "All implementations are within tolerance wherever they were timed.",
        _errors,
        "<= 1",
        "every recorded size",
    ),
    Claim(
        "rounds-once",
        "In half precision the error of `fusebook.swiglu`, which rounds once, is {least:.2f} to {most:.2f} times that "
        "of eager, which rounds each matmul.",
        _rounding,
        "<= 1",
        "every recorded size, bfloat16 and float16",
    ),
    steps_correct("4096 tokens and one, weights of 4096 x 11008, bfloat16"),
    # Steps
    Claim(
        "stacked-gain",
        "With 4096 tokens one sum of 256 columns is {median:.2x} faster than two of 128.",
        lambda frames: _gain(frames, 4096, "stacked", "large"),
        "> 1.02",
        _AT_4096 + "; GPU time of step 2 over step 3",
    ),
    Claim(
        "few-gain",
        "With one token tiles of 16 x 16 are {median:.1x} faster than tiles of 128 x 128.",
        lambda frames: _gain(frames, 1, "few", "stacked"),
        "> 1.02",
        _AT_1 + "; GPU time of step 3 over step 4",
    ),
    Claim(
        "library-over-large",
        "With 4096 tokens `fusebook.swiglu` is {median:.2x} faster than step 2.",
        lambda frames: _gain(frames, 4096, "fusebook", "large"),
        "> 1.02",
        _AT_4096,
    ),
    # Compilers
    Claim(
        "over-max-autotune",
        "With 4096 tokens `fusebook.swiglu` is {median:.2x} faster than what the search of max-autotune finds for two "
        "weights.",
        lambda frames: _gain(frames, 4096, "fusebook", "max-autotune"),
        "> 1",
        _AT_4096,
    ),
    Claim(
        "over-max-autotune-one",
        "With one token the code of max-autotune takes {median:.2f} times as long as `fusebook.swiglu`.",
        lambda frames: _gain(frames, 1, "fusebook", "max-autotune"),
        "> 1",
        _AT_1,
    ),
    # Other dtypes
    Claim(
        "float32-over-eager",
        "In float32 the kernel, which adds three matmuls in TF32, takes {least:.2f} to {most:.2f} times as long as "
        "eager.",
        lambda frames: _other(frames, "fusebook", "eager"),
        "< 1",
        "256 and 1024 tokens, float32, where both have a time",
    ),
    Claim(
        "float32-chosen-eager",
        "In float32 the library's choice takes {least:.2f} to {most:.2f} times as long as eager.",
        lambda frames: _other(frames, "fusebook (chosen)", "eager"),
        "<= 1.03",
        "256 and 1024 tokens, float32, where both have a time",
    ),
    Claim(
        "float32-chosen-packed",
        "In float32 the library's choice takes {least:.2f} to {most:.2f} times as long as packed weights.",
        lambda frames: _other(frames, "fusebook (chosen)", "packed"),
        "<= 1.03",
        "256 and 1024 tokens, float32, where both have a time",
    ),
    Claim(
        "tf32-chosen-packed",
        "In TF32 the library's choice takes {least:.2f} to {most:.2f} times as long as packed weights.",
        lambda frames: _other(frames, "fusebook (chosen), TF32", "packed, TF32"),
        "<= 1.03",
        "256 and 1024 tokens, TF32",
    ),
    # Targets
    Claim(
        "target-matmul",
        "With 4096 and 8192 tokens `fusebook.swiglu` takes at most 1.08 times as long as the packed matmul alone: "
        "{least:.2f} to {most:.2f} times.",
        lambda frames: _turns(frames)["fusebook"],
        "<= 1.08",
        _MANY + ", timed in turn",
        kind="target",
    ),
    Claim(
        "few-warm",
        "With 16 tokens and a warm cache `fusebook.swiglu` reads the weights at {least:.0%} to {most:.0%} of the rate "
        "of memory.",
        lambda frames: _of_roof(frames, 16, "gpu_warm_us"),
        ">= 0.9",
        _FEW + ", warm L2",
        kind="target",
    ),
)

LOG = (
    "The matmul alone is one of packed weights, without the activation and the last product. It computes less than "
    "SwiGLU and writes two results instead of one, so SwiGLU may take less time.",
    "Implementations that are compared with the matmul alone are timed in turn with it, so that a drift of the clock "
    "is the same for all. Large matmuls draw as much power as the GPU may.",
    "With few rows of float32 several programs share the sum of a tile over K, and a second kernel adds their parts.",
    "A time that is less than the roofline is not kept, and the record says too fast. In float32 the roofline is the "
    "rate of torch's own matmul, and three matmuls in TF32 can take less.",
    "Random problems, few to some hundred rows: one library matmul of packed weights and one compiled kernel are "
    "faster at some. A tile of Fusebook's kernel also holds sums of both weights, which leaves half as many tiles to "
    "choose from. Tiles of 64 x 32 to 128 x 128 columns of both were tried, and two and three programs per "
    "multiprocessor. Where the table says so, PyTorch computes both matmuls, and one kernel does the rest.",
    "Random problems: at some sizes PyTorch's matmul takes much longer in float16 than in bfloat16, and the table "
    "does not distinguish the two.",
    "Random problems, thousands of rows: quack is faster. Some of its warps use the tensor cores while others finish "
    "a tile. In Fusebook all warps do the same at once. Loads of the next tile before the end of this one were tried, "
    "stores by the copy engine, and tiles walked in groups of 8 and 16 rows.",
    "Random problems in float32: at small sizes, and at a long K with few columns, one packed matmul is faster, "
    "because it divides its sums faster.",
)
