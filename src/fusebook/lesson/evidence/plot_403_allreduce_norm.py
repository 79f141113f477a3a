"""Evidence of the lesson on an all-reduce that is fused with a norm, and what its ranks measure."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fusebook
from fusebook import plots, tables
from fusebook.extras import extra
from fusebook.kernels.distributed import allreduce_config
from fusebook.lesson import _numbers, _ranks, _show, picture
from fusebook.lesson.evidence import Claim, Frames, Measured, NotRecorded
from fusebook.measure.inputs import generator
from fusebook.measure.op import Cost

with extra("book"):
    import pandas as pd

PAGE = _ranks.RanksPage
OPERATORS = ("add_rms_norm",)
CALLED = "AllReduceNorm"
STEPS = ("eager", "norm", "twice", "once")
DTYPES = ("bfloat16",)
TOKENS = (1, 8, 32, 64, 128, 256, 1024, 4096)
COLUMNS = (4096, 8192)
SHAPES = tuple((tokens, columns) for columns in COLUMNS for tokens in TOKENS)
KERNELS = {"AllReduceNorm": ("_allreduce_norm",)}
EPS = 1e-6
#: Sizes with torch.compile; with the host's clock, and with NCCL alone in several settings.
COMPILED = ((64, 4096), (4096, 4096))
PAID = ((1, 4096), (64, 4096), (1024, 4096), (4096, 4096))
#: Parts of implementations.
PARTS = ("copy", "flag", "norm alone", "NCCL", "NCCL, parts", "NCCL, other kernel", "NCCL, parts, other kernel")


# What ranks measure ---------------------------------------------------------------------------------------------------


def _on_gpus(cases: Any, few: Any) -> Any:
    """The cases, or few where kernels are interpreted."""
    return cases if torch.cuda.is_available() else few


Layer = tuple[fusebook.AllReduceNorm, list[torch.Tensor], torch.Tensor, torch.Tensor]


def _layer(rows: int, columns: int) -> Layer:
    """A place to reduce in, the parts of all ranks, a residual and weights."""
    reduce = fusebook.AllReduceNorm(rows, columns)
    rng = generator(1)
    at: dict[str, Any] = {"generator": rng, "device": rng.device}
    residual = torch.randn(rows, columns, **at).bfloat16()
    weight = torch.randn(columns, **at).bfloat16()
    every = [torch.randn(rows, columns, **at).bfloat16() for _ in range(dist.get_world_size())]
    return reduce, every, residual, weight


class _Careless:
    """The same sums and norm, without waiting for the other GPUs."""

    def __init__(self, reduce: fusebook.AllReduceNorm) -> None:
        self.reduce, self.part = reduce, reduce.part

    def __call__(self, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = tuple(part[: len(residual)] for part in self.reduce.parts[self.reduce.turn])
        self.reduce.turn = 1 - self.reduce.turn
        h = sum((part.float() for part in parts), residual.float())
        y = F.rms_norm(h, weight.shape, weight.float(), EPS).to(residual.dtype)
        return y, h.to(residual.dtype)


def _ways(
    steps: Mapping[str, Callable[..., Any]], reduce: fusebook.AllReduceNorm, rows: int, columns: int
) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Of each implementation that has memory for parts: where a part is written, and the call."""

    def by(way: str | None) -> Callable[..., Any]:
        return lambda residual, weight: reduce(residual, weight, EPS, way=way)

    found = {"group": (reduce.part, by("group")), "chosen": (reduce.part, by(None))}
    if reduce.peers is not None:
        found |= {way: (reduce.part, by(way)) for way in ("one-shot", "two-shot", "fused")}
        for name in STEPS[2:]:
            step = steps[name](rows, columns)
            found[name] = step.part, step
    return found


def _disturbed(write: Callable[..., Any], call: Callable[..., Any], layer: Layer, repeats: int) -> int:
    """At how many repeats some rank had wrong sums; each time one rank, drawn by lot, is late."""
    _, every, residual, weight = layer
    rank, world = dist.get_rank(), dist.get_world_size()
    lot = torch.Generator().manual_seed(2)
    wrong = torch.zeros((), device=residual.device)
    for _ in range(repeats):
        who, cycles, shift = torch.randint(100_000, (3,), generator=lot).tolist()
        if who % (world + 1) == rank and residual.is_cuda:
            torch.cuda._sleep(cycles)
        now = [part.roll(shift + 7 * r, 1) for r, part in enumerate(every)]
        write(len(residual)).copy_(now[rank])
        want = sum(part.float() for part in now) + residual.float()
        _, h = call(residual, weight)
        wrong += (h != want.bfloat16()).any()
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    return int(wrong)


def _scored(write: Callable[..., Any], call: Callable[..., Any], layer: Layer) -> tuple[float, bool]:
    """The error of y and h in units of bfloat16, and whether all ranks have the same bits."""
    _, every, residual, weight = layer
    write(len(residual)).copy_(every[dist.get_rank()])
    y, h = call(residual, weight)
    wide = sum((part.double() for part in every), residual.double())
    normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS) * weight.double()
    errors = [
        ((got.double() - want).abs() / (want.abs() + 1)).max().item() * 2**8 for got, want in ((h, wide), (y, normed))
    ]
    all_of_them = [torch.empty_like(y) for _ in every]
    dist.all_gather(all_of_them, y)
    return max(errors), all(torch.equal(other, y) for other in all_of_them)


def _checked(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    rows = []
    for tokens in _on_gpus((1, 33, 1000), (3,)):
        columns = _on_gpus(4096, 64)
        layer = _layer(tokens, columns)
        ways = _ways(steps, layer[0], tokens, columns)
        for way, (write, call) in ways.items():
            error, alike = _scored(write, call, layer)
            rows.append((tokens, way, "error", error, alike))
        if layer[0].peers is not None:
            careless = _Careless(layer[0])
            for way, many in (("fused", 1000), ("twice", 300), ("once", 300), ("careless", 100)):
                write, call = (careless.part, careless) if way == "careless" else ways[way]
                wrong = _disturbed(write, call, layer, many)
                rows.append((tokens, way, f"wrong of {many}", wrong, True))
    return pd.DataFrame(rows, columns=["tokens", "way", "what", "value", "alike"])


def _calls(
    steps: Mapping[str, Callable[..., Any]], rows: int, columns: int
) -> tuple[dict[str, Callable[[], Any]], Callable[[], None]]:
    """Implementations and their parts, and what resets a part: a sum in place grows from call to call."""
    reduce, every, residual, weight = layer = _layer(rows, columns)
    mine, x = every[dist.get_rank()], torch.empty_like(residual)
    ways = _ways(steps, reduce, rows, columns)

    def again() -> None:
        x.copy_(mine)
        for turn in reduce.parts:
            turn[reduce.rank].copy_(mine)
        for name in {"twice", "once"} & ways.keys():
            for turn in ways[name][1].parts:  # type: ignore[attr-defined]
                turn[reduce.rank].copy_(mine)

    def of(call: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: call(residual, weight)

    names = {"group": "NCCL, one norm", "one-shot": "one-shot, one norm", "two-shot": "two-shot, one norm"}
    found = {names.get(way, way): of(call) for way, (_, call) in ways.items()}
    found["NCCL, eager"] = lambda: steps["eager"](x, residual, weight)
    found["norm"] = lambda: steps["norm"](x, residual, weight)
    if (rows, columns) in PAID:
        found |= _apart(reduce, x, layer)
    if (rows, columns) in COMPILED and torch.cuda.is_available():

        def rest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = residual + x
            return F.rms_norm(h, (columns,), weight, EPS), h

        compiled = torch.compile(rest, dynamic=False)
        compiled(x)

        def nccl_compiled() -> Any:
            dist.all_reduce(x)
            return compiled(x)

        found["NCCL, torch.compile"] = nccl_compiled
    if reduce.peers is not None:
        here, other = torch.empty_like(residual), reduce.parts[0][(reduce.rank + 1) % reduce.world]
        found |= {"copy": lambda: here.copy_(other), "flag": reduce.peers.barrier, "NCCL": lambda: dist.all_reduce(x)}
        found["norm alone"] = lambda: fusebook.add_rms_norm(mine, residual, weight, eps=EPS)
    again()
    return found, again


def _apart(reduce: fusebook.AllReduceNorm, x: torch.Tensor, layer: Layer) -> dict[str, Callable[[], Any]]:
    """NCCL's all-reduce alone and before a kernel that reads other memory, of ordinary and of symmetric memory."""
    _, every, residual, weight = layer
    mine = every[dist.get_rank()]

    def parts() -> None:
        dist.all_reduce(reduce.parts[reduce.turn][reduce.rank])
        reduce.turn = 1 - reduce.turn

    def other(first: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            first()
            return fusebook.add_rms_norm(mine, residual, weight, eps=EPS)

        return call

    return {
        "NCCL, parts": parts,
        "NCCL, other kernel": other(lambda: dist.all_reduce(x)),
        "NCCL, parts, other kernel": other(parts),
    }


def _speed(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """Microseconds in a CUDA graph; at some sizes also end to end, as an eager program pays."""
    rows = []
    for tokens in _on_gpus(TOKENS, (3,)):
        for columns in _on_gpus(COLUMNS, (64,)):
            found, again = _calls(steps, tokens, columns)
            taken = {"device": _ranks.timed(found, calls=20 if tokens <= 256 else 6, before=again)}
            if (tokens, columns) in PAID:
                ways = {way: found[way] for way in found if way not in PARTS}
                taken["host"] = _ranks.timed(ways, calls=30, repeat=5, before=again, graph=False)
            rows += [(tokens, columns, clock, way, us) for clock, times in taken.items() for way, us in times.items()]
    times_of = pd.DataFrame(rows, columns=["tokens", "columns", "clock", "way", "us"])
    return times_of.assign(NVLS=os.environ.get("NCCL_NVLS_ENABLE", "as NCCL decides"))


def on_ranks(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """All that ranks measure together, with the name of its frame in the column ``frame``."""
    found = [_speed(steps).assign(frame="steps"), _checked(steps).assign(frame="checks")]
    return pd.concat(found, ignore_index=True)


# Records --------------------------------------------------------------------------------------------------------------


class _Named(Measured):
    """Rows of ranks, with steps by their names in the lesson, and sizes as headings name them."""

    def renamed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The same rows with ``step``; those of times also with ``shape``, ``dtype`` and ``gpu_us``."""
        found = frame if "GPUs" in frame else frame.assign(GPUs=2)
        found = _with_library(found.assign(step=found["way"].replace({"NCCL, eager": "eager"})))
        if "us" in found:
            shape = found["tokens"].astype(str) + "x" + found["columns"].astype(str)
            timed = found["us"].where(found["clock"] == "device")
            found = found.assign(shape=shape, dtype="bfloat16", gpu_us=timed)
            found = found.sort_values("GPUs", key=lambda gpus: gpus != 2, kind="stable")  # headings quote two GPUs
        found.attrs.update(frame.attrs)
        return found


def _with_library(found: pd.DataFrame) -> pd.DataFrame:
    """Rows of the library: those of the implementation that it selects today for so many GPUs."""
    rows = []
    for gpus, some in found.groupby("GPUs", sort=False):
        world: Any = gpus
        way = allreduce_config(TOKENS[0], COLUMNS[0], world, 132).way if world > 1 else "chosen"
        rows.append(some[some["way"].isin([way, f"{way}, one norm"])].assign(step="fusebook"))
    return pd.concat([found[found["way"] != "chosen"], *rows], ignore_index=True)


FRAMES: dict[str, Any] = {"steps": _Named("allreduce_norm_times"), "checks": _Named("allreduce_norm_checks")}


# What the lesson and claims read --------------------------------------------------------------------------------------

#: Unfused chains: an all-reduce, then a norm.
NCCL = ("eager", "norm", "NCCL, torch.compile", "NCCL, one norm")
CHAINS = (*NCCL, "one-shot, one norm", "two-shot, one norm")
KEYS = ["GPUs", "columns", "tokens"]


def _wide(frames: Frames, clock: str = "device") -> Any:
    """A row for each size on more than one GPU, a column for each implementation."""
    rows = frames["steps"]
    rows = rows[(rows["GPUs"] > 1) & (rows["clock"] == clock)]
    return rows.pivot_table("us", KEYS, "step", sort=False)


def _fastest(wide: Any, chains: Sequence[str] = CHAINS) -> pd.Series:
    """The time of the fastest of some chains."""
    found: pd.Series = wide[[way for way in chains if way in wide]].min(axis=1)
    return found


def _over(
    step: str, clock: str = "device", chains: Sequence[str] = CHAINS, gpus: Callable[[int], bool] = lambda _: True
) -> Callable[[Frames], pd.Series]:
    """How many times as long an implementation takes as the fastest of some chains, on some numbers of GPUs."""

    def ratio(frames: Frames) -> pd.Series:
        wide = _needed(frames, step, clock=clock)
        found: pd.Series = (wide[step] / _fastest(wide, chains)).dropna()
        found = found[[gpus(int(n)) for n in found.index.get_level_values("GPUs")]]
        if found.empty:
            raise NotRecorded("so many GPUs were not measured")
        return found

    return ratio


def _of(way: str, *over: str, most: int = 0, least: int = 0) -> Callable[[Frames], pd.Series]:
    """How many times as long a way takes as the sum of others, from `least` to `most` tokens."""

    def ratio(frames: Frames) -> pd.Series:
        wide = _needed(frames, way, *over)
        found = (wide[way] / wide[[*over]].sum(axis=1, min_count=len(over))).dropna()
        tokens = found.index.get_level_values("tokens")
        found = found[(tokens <= (most or max(tokens))) & (tokens >= least)]
        return pd.Series(found)

    return ratio


def _own(frames: Frames) -> pd.Series:
    """Microseconds of the traffic of a GPU's own memory: two parts read and two results written."""
    wide = _wide(frames)
    if "norm alone" in wide:
        return pd.Series(wide["norm alone"])
    on = frames["steps"].attrs["origin"].machine
    sizes = [2 * columns * tokens for _, columns, tokens in wide.index]
    return pd.Series([on.memory_seconds(Cost(2 * size, 2 * size, 0)) * 1e6 for size in sizes], wide.index)


def _needed(frames: Frames, *steps: str, clock: str = "device") -> Any:
    """`_wide`, if it has these."""
    wide = _wide(frames, clock)
    if missing := {*steps} - {*wide}:
        raise NotRecorded(f"{', '.join(missing)} was not measured")
    return wide


def _moved(frames: Frames) -> pd.Series:
    """Microseconds of a flag and of copies of the parts of all other GPUs."""
    wide = _needed(frames, "fused", "copy", "flag")
    return pd.Series(wide["flag"] + wide["copy"] * (wide.index.get_level_values("GPUs") - 1))


def _near(least: int = 0, most: int = TOKENS[-1], own: bool = False) -> Callable[[Frames], pd.Series]:
    """The fused kernel over copies and a flag, and with `own` also over the traffic of a GPU's own memory."""

    def ratio(frames: Frames) -> pd.Series:
        found = _needed(frames, "fused")["fused"] / (_moved(frames) + (_own(frames) if own else 0))
        tokens = found.index.get_level_values("tokens")
        return pd.Series(found[(tokens >= least) & (tokens <= most)]).dropna()

    return ratio


def _hidden(frames: Frames) -> pd.Series:
    """The share of the own traffic that runs while the link is busy, with 4096 tokens on two GPUs."""
    own = _own(frames)
    found = (_moved(frames) + own - _wide(frames)["fused"]) / own
    return pd.Series(found.xs(TOKENS[-1], level="tokens", drop_level=False).loc[[2]])


def _odd(frames: Frames) -> pd.Series:
    """NCCL's all-reduce of ordinary memory alone, over one of symmetric memory with a norm behind it."""
    return _of("NCCL", "NCCL, one norm")(frames)


def _rate(frames: Frames) -> float:
    """GB/s over the link that the fused kernel reaches on two GPUs, with the most tokens."""
    wide = _wide(frames)["fused"]
    return float(2 * COLUMNS[-1] * TOKENS[-1] / wide.loc[2, COLUMNS[-1], TOKENS[-1]] / 1e3)


_AT = (64, 4096)


def verdict(frames: Frames) -> tuple[list[str], _show.Shown]:
    """The three sentences of the box, and its bars."""
    wide = _wide(frames)
    gpus = 2
    tokens, columns = _AT
    at = wide.loc[gpus, columns, tokens].dropna()
    own, best = at["fusebook"], _fastest(wide, NCCL) / wide["fusebook"]
    chains = at[[way for way in CHAINS if way in at]].sort_values()
    ratios = {_SAID[str(name)]: us / own for name, us in chains.items()}
    by_gpus = [
        f"{_numbers.times(ratio.median())} on {n} GPUs (range {_numbers.times(ratio.min())} to "
        f"{_numbers.times(ratio.max())})"
        for n, ratio in best.groupby("GPUs")
    ]
    lines = [
        f"**Time.** `fusebook.AllReduceNorm` takes **{_numbers.microseconds(own)}** of GPU time for {tokens} tokens of "
        f"{columns} elements on {gpus} GPUs. {_numbers.compared(ratios)}",
        f"**All sizes.** In the median of {len(best.groupby(['columns', 'tokens']))} sizes, the speedup over NCCL and "
        f"the fastest norm is {' and '.join(by_gpus)}.",
        "**Fusing** pays on two GPUs. On more, the library adds parts in two steps, and then normalises.",
    ]
    bars = {**{_SAID[str(name)]: us for name, us in chains[::-1].items()}, "Fusebook": own}
    texts = {name: _numbers.microseconds(us) for name, us in bars.items()}
    caption = f"GPU time of {tokens} tokens of {columns} elements on {gpus} GPUs, bfloat16, in a CUDA graph. "
    caption += "One-shot and two-shot are PyTorch's all-reduces on symmetric memory."
    return lines, picture.bars(caption, bars, texts, ["Fusebook"])


#: Implementations, as a reader sees them.
_SAID = {
    "eager": "NCCL, eager",
    "norm": "NCCL, step 1",
    "NCCL, one norm": "NCCL, Fusebook's norm",
    "NCCL, torch.compile": "NCCL, torch.compile",
    "one-shot, one norm": "one-shot, a norm",
    "two-shot, one norm": "two-shot, a norm",
}


def table(frames: Frames, steps: Mapping[str, Callable[..., Any]]) -> tuple[pd.DataFrame, str]:
    """Microseconds of each step by GPUs and tokens."""
    wide = _wide(frames).xs(COLUMNS[0], level="columns")
    tokens = [n for n in (1, 64, 1024, 4096) if n in wide.index.get_level_values("tokens")]
    columns = {f"G = {gpus}, M = {n}": wide.loc[(gpus, n)] for gpus in wide.index.unique("GPUs") for n in tokens}
    rows = {**{name: name for name in steps}, "fusebook": "fusebook.AllReduceNorm"}
    named = {n: f"step {i}, {n}" if i else "eager" for i, n in enumerate(steps)}
    made = pd.DataFrame(columns).reindex([*rows]).rename(index={**rows, **named})
    return made, "Microseconds of GPU time with M tokens of 4096 elements on G GPUs, bfloat16"


def figure(frames: Frames, kind: str, over: str) -> Any:
    """The fused kernel and two-shot over the fastest chain with NCCL, by tokens."""
    wide = _wide(frames).xs(COLUMNS[0], level="columns")
    named = {"fused": "fused", "two-shot, one norm": "two-shot"}
    parts = {
        f"{name}, {gpus} GPUs": (some[way] / _fastest(some, NCCL)).droplevel("GPUs")
        for gpus, some in wide.groupby("GPUs")
        for way, name in named.items()
    }
    ratio = pd.DataFrame(parts)
    return getattr(plots, kind)(
        ratio,
        title=f"Time over that of NCCL and the fastest norm, {COLUMNS[0]} columns",
        ylabel="times as long",
        source=frames["steps"],
        clock="in a graph",
        marks={"NCCL and the fastest norm": 1},
    )


def use(frames: Frames) -> tuple[pd.DataFrame, str, list[str]]:
    """When to use the library: time over the fastest chain with NCCL, in a graph and end to end."""
    graph, host = _over("fusebook", chains=NCCL)(frames), _over("fusebook", "host", NCCL)(frames)
    told = pd.DataFrame(
        {
            f"{gpus} GPUs": {
                "in a CUDA graph, median": ratio.median(),
                "in a CUDA graph, worst": ratio.max(),
                "end to end, worst": host.get(gpus, pd.Series(dtype=float)).max(),
            }
            for gpus, ratio in graph.groupby("GPUs")
        }
    )
    said = [
        "**Use it** where layers are split over GPUs of one machine, in a CUDA graph, for any number of tokens.",
        "**Do not use it** where an eager program queues single calls and the CPU is the limit; see the last row.",
    ]
    return told, "Time over that of NCCL and the fastest norm", said


# Claims ---------------------------------------------------------------------------------------------------------------


def _errors(frames: Frames) -> pd.DataFrame:
    return tables.where(frames["checks"], what="error").set_index(["GPUs", "tokens", "step"])


def _score(frames: Frames) -> Any:
    """The error of each implementation, by size."""
    wide = tables.where(frames["checks"], what="error").pivot_table("value", ["GPUs", "tokens"], "way", sort=False)
    return wide[wide["fused"].notna()] if "fused" in wide else wide


def _wrong(frames: Frames, *steps: str) -> pd.Series:
    rows = frames["checks"]
    rows = rows[(rows["what"] != "error") & rows["step"].isin(steps)]
    if missing := {*steps} - {*rows["step"]}:
        raise NotRecorded(f"{', '.join(missing)} was not measured")
    return rows.set_index(["GPUs", "tokens", "step"])["value"]


_SIZES = "1 to 4096 tokens of 4096 and 8192 elements, bfloat16"
_GRAPH = _SIZES + "; GPU time in a CUDA graph, the slowest GPU"
_CHECKS = "1, 33 and 1000 tokens of 4096 elements, bfloat16"
_NCCL = "sizes at which both were measured; GPU time in a CUDA graph"

CLAIMS = (
    # The lesson's findings
    Claim(
        "pays-graph",
        "On two GPUs fusing pays at {good} of {count} sizes: the fused kernel takes {least:.2f} to {most:.2f} times as "
        "long as the fastest unfused chain.",
        _over("fused", gpus=lambda gpus: gpus == 2),
        "< 0.98",
        _GRAPH,
        lesson=True,
    ),
    Claim(
        "pays-more",
        "On more GPUs it does not pay: the fused kernel takes {least:.2f} to {most:.2f} times as long as the fastest "
        "unfused chain. An all-reduce in two steps moves less.",
        _over("fused", gpus=lambda gpus: gpus > 2),
        ">= 1",
        _GRAPH,
        lesson=True,
    ),
    Claim(
        "own-traffic",
        "With 4096 tokens on two GPUs, the fused kernel takes {many_least:.2f} to {many_most:.2f} times as long as "
        "a copy of the other part and a flag. In that time it also moves four times the bytes of a part in its own "
        "memory.",
        lambda frames: _near(own=True)(frames).loc[[2]],
        "<= 1",
        _SIZES + "; GPU time over that of a copy, a flag and a GPU's own traffic in a row",
        lesson=True,
        numbers=lambda frames: {
            "many_least": (many := _near(least=TOKENS[-1])(frames).loc[[2]]).min(),
            "many_most": many.max(),
        },
    ),
    Claim(
        "nccl-behind",
        "For few tokens, NCCL's all-reduces are slower right after one another. An all-reduce and a kernel that "
        "reads other memory take {least:.2f} to {most:.2f} times as long as an all-reduce alone.",
        _of("NCCL, other kernel", "NCCL", most=64),
        "< 1",
        "1 and 64 tokens of 4096 elements; ordinary memory, GPU time in a CUDA graph",
    ),
    Claim(
        "copy-and-flag",
        "Up to 64 tokens, the fused kernel should take at most 1.1 times as long as copies of the other parts and a "
        "flag: {least:.2f} to {most:.2f} times.",
        _near(most=64),
        "<= 1.1",
        "up to 64 tokens of 4096 and 8192 elements; GPU time in a CUDA graph",
    ),
    Claim(
        "pays-host",
        "Without a graph, too, the library should take less time than the fastest unfused chain: {least:.2f} to "
        "{most:.2f} times. For few tokens the CPU is the limit.",
        _over("fusebook", "host"),
        "< 1",
        "1, 64, 1024 and 4096 tokens of 4096 elements; end-to-end time of calls in a row",
    ),
    # How far from the roof
    Claim(
        "hidden",
        "On two GPUs with 4096 tokens, {least:.0%} to {most:.0%} of the traffic of a GPU's own memory overlaps with "
        "the link.",
        _hidden,
        "> 0",
        "4096 tokens of 4096 and 8192 elements; (copy + flag + own traffic - fused) over own traffic",
    ),
    Claim(
        "link-rate",
        "On two GPUs with 4096 tokens of 8192 elements, the fused kernel moves {median:.0f} GB/s over the link.",
        lambda frames: pd.Series({"": _rate(frames)}),
        "",
        "bytes of the other part over GPU time",
    ),
    Claim(
        "tie",
        "For many tokens a tie at best was predicted. With 4096 tokens on two GPUs, the fastest unfused chain takes "
        "{least:.2f} to {most:.2f} times as long as the fused kernel.",
        lambda frames: 1 / _over("fused", gpus=lambda n: n == 2)(frames).xs(TOKENS[-1], level="tokens"),
        "",
        "4096 tokens of 4096 and 8192 elements; GPU time in a CUDA graph",
    ),
    Claim(
        "flashinfer",
        "At 128 tokens of 8192 elements a fused all-reduce and norm does not pay. FlashInfer's one-shot kernel is 0.55 "
        "times as fast as the two apart on two H100 (vLLM's pull request 22086). Fusebook's takes {median:.2f} times "
        "as long as the fastest unfused chain.",
        lambda frames: pd.Series({"128 x 8192 on 2 GPUs": _over("fused")(frames).loc[2, 8192, 128]}),
        "> 1",
        "two GPUs; GPU time in a CUDA graph",
        kind="statement",
    ),
    # Steps
    Claim(
        "norm-gain",
        "One norm behind NCCL takes {least:.2f} to {most:.2f} times as long as eager's two kernels.",
        _of("norm", "eager"),
        "",
        _GRAPH + "; step 1 over eager",
    ),
    Claim(
        "twice-gain",
        "One kernel that meets twice takes {least:.2f} to {most:.2f} times as long as NCCL and one norm.",
        _of("twice", "norm"),
        "",
        _GRAPH + "; step 2 over step 1",
    ),
    Claim(
        "once-gain",
        "With two buffers, the second meeting goes: {least:.2f} to {most:.2f} times the time.",
        _of("once", "twice"),
        "<= 1.02",
        _GRAPH + "; step 3 over step 2",
    ),
    Claim(
        "library-once",
        "On two GPUs, the library's fused kernel takes {least:.2f} to {most:.2f} times as long as step 3. It loads "
        "what needs no other GPU before it waits, and its next row ahead.",
        lambda frames: _of("fused", "once")(frames).loc[[2]],
        "",
        _GRAPH,
    ),
    # NCCL
    Claim(
        "nccl-alone",
        "NCCL's all-reduce of ordinary memory alone takes {least:.2f} to {most:.2f} times as long as one of symmetric "
        "memory with a norm behind it.",
        _odd,
        "",
        _GRAPH,
    ),
    Claim(
        "nccl-memory",
        "The kind of memory is not the cause: NCCL takes {least:.2f} to {most:.2f} times as long for symmetric memory "
        "as for ordinary memory.",
        lambda frames: (_of("NCCL, parts", "NCCL")(frames) - 1).abs(),
        "<= 0.15",
        _NCCL + "; distance of the ratio from 1",
        numbers=lambda frames: {
            "least": (found := _of("NCCL, parts", "NCCL")(frames)).min(),
            "most": found.max(),
        },
    ),
    Claim(
        "nccl-behind-parts",
        "For symmetric memory, NCCL and a kernel that reads other memory should take less time than NCCL alone: "
        "{least:.2f} to {most:.2f} times.",
        _of("NCCL, parts, other kernel", "NCCL, parts", most=64),
        "< 1",
        "1 and 64 tokens of 4096 elements; symmetric memory, GPU time in a CUDA graph",
    ),
    # Correctness
    Claim(
        "within-tolerance",
        "All implementations are within tolerance, {most:.1f} roundings of bfloat16 at most.",
        lambda frames: _errors(frames)["value"],
        "<= 16",
        _CHECKS + "; error over 1 + the magnitude, in 1/256",
    ),
    Claim(
        "smallest-error",
        "The fused kernel has a smaller error than a chain, which rounds once more between all-reduce and norm.",
        lambda frames: (
            _score(frames)["fused"]
            / _score(frames)[[way for way in ("group", "one-shot", "two-shot") if way in _score(frames)]].min(axis=1)
        ),
        "<= 1",
        _CHECKS + "; its error over the smallest of the chains",
    ),
    Claim(
        "alike",
        "All GPUs have the same bits.",
        lambda frames: _errors(frames)["alike"].astype(float),
        "== 1",
        _CHECKS,
    ),
    Claim(
        "late",
        "With a late rank, none of a thousand repeats of the fused kernel is wrong.",
        lambda frames: _wrong(frames, "fused"),
        "== 0",
        _CHECKS + "; each repeat has new parts, and one rank, drawn by lot, sleeps before it writes its part",
    ),
    Claim(
        "late-steps",
        "With a late rank, none of 300 repeats of steps 2 and 3 is wrong.",
        lambda frames: _wrong(frames, "twice", "once"),
        "== 0",
        _CHECKS + "; each repeat has new parts, and one rank, drawn by lot, sleeps before it writes its part",
    ),
    Claim(
        "careless",
        "Without the meeting, {least:.0f} to {most:.0f} of 100 repeats are wrong, and the check says so.",
        lambda frames: _wrong(frames, "careless"),
        "> 0",
        _CHECKS + "; parts of other GPUs are read without waiting",
    ),
)

LOG = (
    "Each of two GPUs must get all data of the other, so no all-reduce moves less than the fused kernel. With more "
    "GPUs an all-reduce in two steps moves less, and the library uses it.",
    "The rows of the H100 were measured before this choice, which was by bytes then. The row of the library's choice "
    "on four GPUs is of the earlier one, and claims take the row of the kernel that it chooses now.",
    "One flag is enough for all rows of a program. A word with its own number would double the bytes, which are many "
    "here.",
    "One program per multiprocessor has enough loads in flight to fill the link. Rows of a program come in turn, and "
    "the GPU's own part of the next row is loaded while the current one is normalised.",
    "A copy of the other part moves only what comes over the link. The fused kernel also reads its own part and the "
    "residual, and writes two results. These are four times as many bytes of the GPU's own memory. It overlaps them "
    "with the link, but a program waits at the end of each row for its sum. A GPU with less bandwidth therefore needs "
    "longer.",
    "NCCL's all-reduces in a row leave a gap of some microseconds between them in a CUDA graph. Any kernel between two "
    "of them closes it, even an addition of one element, so that the pair is faster than NCCL alone. The gap is the "
    "same for ordinary and for symmetric memory, for zeros and for random numbers, and for two buffers in turn. The "
    "profiler's time of NCCL's kernel does not contain it. We do not know its cause inside NCCL. A model always has "
    "a kernel between two all-reduces, so this page compares chains.",
    "On four GPUs the fused kernel reads three parts, and an all-reduce in two steps moves half of that. For few "
    "tokens a program raises and awaits three flags, one after the other.",
    "In a benchmark that repeats the same parts, a kernel without the meeting is correct: the memory has the right "
    "numbers from the call before. Each repeat of the check has other parts, and one rank is late.",
)
