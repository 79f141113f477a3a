"""Evidence of the lesson on k-means over several GPUs, and what its ranks measure."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import fusebook
from fusebook import tables
from fusebook.extras import extra
from fusebook.lesson import _numbers, _ranks, _show, picture
from fusebook.lesson.evidence import Claim, Frames, Measured, NotRecorded
from fusebook.measure.inputs import generator

with extra("book"):
    import pandas as pd

PAGE = _ranks.RanksPage
OPERATORS = ("kmeans_step",)
CALLED = "SharedKMeans"
STEPS = ("nccl", "flag", "words")
DTYPES = ("float32",)
#: Points, coordinates and centres; the first is what headings and the box quote.
CASES = ((20_000_000, 2, 2), (100_000_000, 2, 2), (2_000_000, 64, 256), (1_000_000, 2, 2))
SHAPES = CASES
#: Points of a case for each GPU; iterations of a job.
SMALL, ITERATIONS = 100_000, 100


# What ranks measure ---------------------------------------------------------------------------------------------------


def _on_gpus(cases: tuple[Any, ...], few: tuple[Any, ...] = ((9000, 2, 2), (40, 20, 5))) -> tuple[Any, ...]:
    """The cases, or few points where kernels are interpreted."""
    return cases if torch.cuda.is_available() else few


def _drawn(n: int, d: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n points around k middles, and centres not far from these, which are the same for each seed."""
    rng = generator(0)
    at: dict[str, Any] = {"generator": rng, "device": rng.device}
    middle = 3 * torch.randn(k, d, **at)
    start = middle + 0.3 * torch.randn(k, d, **at)
    rng.manual_seed(seed)
    points = torch.empty(n, d, device=rng.device)
    for some in points.split(10_000_000):
        label = torch.randint(k, (len(some),), **at)
        some.copy_(torch.randn(len(some), d, **at) + middle[label])
    return points, start


def _alone(points: torch.Tensor, centres: torch.Tensor) -> Any:
    return torch.ops.fusebook.kmeans_step(points, centres, torch.uint8)


def _in_halves(points: torch.Tensor, centres: torch.Tensor) -> Any:
    """The sums of one half are added by NCCL while the other half is labelled."""
    first, second = points.chunk(2)
    labels, parts = torch.ops.fusebook.kmeans_sums(first, centres, torch.uint8)
    total = parts.sum(0, dtype=torch.float64, keepdim=True)
    sent = dist.all_reduce(total, async_op=True)
    others, parts = torch.ops.fusebook.kmeans_sums(second, centres, torch.uint8)
    rest = parts.sum(0, dtype=torch.float64, keepdim=True)
    dist.all_reduce(rest)
    sent.wait()
    return (labels, others), torch.ops.fusebook.kmeans_means(torch.cat([total, rest]), centres)


def _ways(steps: Mapping[str, Callable[..., Any]], d: int, k: int) -> dict[str, Callable[..., Any]]:
    """Each implementation for k centres of d coordinates; those of symmetric memory where ranks have it."""
    step = fusebook.SharedKMeans(k, d)

    def chosen(points: torch.Tensor, centres: torch.Tensor) -> Any:
        return step(points, centres, label_dtype=torch.uint8)

    found = {"NCCL": steps["nccl"], "chosen": chosen}
    if step.peers is not None:
        found |= {name: steps[name](k, d) for name in STEPS[1:]}
    return found


def _scaling(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """Microseconds of an iteration, by case, scaling and implementation."""
    rows, world = [], dist.get_world_size()
    for n, d, k in _on_gpus(CASES):
        points, centres = _drawn(n, d, k, 100 + dist.get_rank())
        share = points[: n // world]
        calls: dict[Any, Callable[[], Any]] = {("one GPU", "alone"): functools.partial(_alone, points, centres)}
        for way, step in (_ways(steps, d, k) | {"halves": _in_halves}).items():
            for kind, own in (("weak", points), ("strong", share)):
                calls[kind, way] = functools.partial(step, own, centres)
        us_of: dict[Any, float] = _ranks.timed(calls, calls=max(2, min(20, 200_000_000 // (n * d))), repeat=11)
        for (kind, way), us in us_of.items():
            many = n * world if kind == "weak" else n
            rows.append((n, d, k, kind, way, many, us))
    return pd.DataFrame(rows, columns=["n", "d", "k", "scaling", "way", "points", "us"])


def _processes() -> pd.DataFrame:
    """Microseconds of a small job by the host's clock, where each rank has one: by the slowest rank."""
    points, centres = _drawn(SMALL if torch.cuda.is_available() else 90, 2, 2, dist.get_rank())

    def job() -> None:
        for _ in range(ITERATIONS if points.is_cuda else 2):
            _alone(points, centres)

    took = _ranks.timed({"a process each": job}, calls=1, repeat=5, graph=False)
    return pd.DataFrame(
        [(len(points), 2, 2, "jobs", way, len(points), us) for way, us in took.items()],
        columns=["n", "d", "k", "scaling", "way", "points", "us"],
    )


CHECKED = ((8_000_000, 2, 2), (500_000, 64, 256))
TIMES, LATE = 10, 1000


def _alike(centres: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    every = [torch.empty_like(centres) for _ in range(dist.get_world_size())]
    dist.all_gather(every, centres)
    return all(torch.equal(other, centres) for other in every)


def _cuts(n: int) -> dict[str, slice]:
    """The points of this rank, by how n points are shared."""
    rank, world = dist.get_rank(), dist.get_world_size()
    last = rank == world - 1
    return {
        "where a program ends": fusebook.kmeans_share(n, rank, world),
        "anywhere": slice(min(n, 999 * rank), n if last else 999 * (rank + 1)),
        "all to the last": slice(0, n if last else 0),
    }


def _late(step: Callable[..., Any], points: torch.Tensor, centres: torch.Tensor) -> int:
    """How many of many calls are correct, if one rank, drawn by lot, is late each time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lot = torch.Generator().manual_seed(1)
    want, wrong = step(points, centres)[1], torch.zeros((), device=points.device)
    calls = LATE if points.is_cuda else 3
    for _ in range(calls):
        who, cycles = torch.randint(200_000, (2,), generator=lot).tolist()
        if who % world == rank and points.is_cuda:
            torch.cuda._sleep(cycles)
        wrong += (step(points, centres)[1] != want).any()
    return calls - int(wrong)


def _agreement(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """Iterations on all ranks, compared with those of one GPU bit by bit; every rank knows all points."""
    rows = []
    for n, d, k in _on_gpus(CHECKED):
        points, start = _drawn(n, d, k, 7)
        for way, step in _ways(steps, d, k).items():
            mine = slice(0)
            for cut, mine in _cuts(len(points)).items():
                alone, own, same = start, start, 0
                for _ in range(TIMES):
                    alone = _alone(points, alone)[1]
                    own = step(points[mine], own)[1]
                    same += torch.equal(own, alone)
                off = ((own - alone).abs() / (alone.abs() + 1)).max().item()
                rows.append((d, k, cut, way, same, off, _alike(own)))
            if way != "NCCL":
                right = _late(step, points[mine][:100_000], start)
                rows.append((d, k, "late", way, right, 0.0, True))
    return pd.DataFrame(rows, columns=["d", "k", "cut", "way", "same", "off", "alike"])


def on_ranks(steps: Mapping[str, Callable[..., Any]]) -> pd.DataFrame:
    """All that ranks measure together, with the name of its frame in the column ``frame``."""
    found = [_scaling(steps), _processes()]
    found = [part.assign(frame="steps") for part in found]
    if dist.get_world_size() > 1:
        found.append(_agreement(steps).assign(frame="agreement"))
    return pd.concat(found, ignore_index=True)


# What one process measures on two GPUs --------------------------------------------------------------------------------


def _everywhere() -> None:
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)


def _clocked(function: Callable[[], Any], times: int = 1) -> float:
    """Seconds of so many calls, until every GPU has finished; the best of five."""
    best = float("inf")
    for _ in range(5):
        _everywhere()
        start = time.perf_counter()
        for _ in range(times):
            function()
        _everywhere()
        best = min(best, time.perf_counter() - start)
    return best


def _through(from_: torch.Tensor, pinned: torch.Tensor, to: torch.Tensor) -> None:
    to.copy_(pinned.copy_(from_))


def copies() -> pd.DataFrame:
    """GB/s of copies within one GPU, to another one, and to another one through the host's memory."""
    rows = []
    for mib in (1, 16, 256):
        from_, to = (torch.ones(mib * 2**18, device=f"cuda:{i}") for i in (0, 1))
        pinned = torch.empty(mib * 2**18, pin_memory=True)
        ways: dict[str, Callable[[], Any]] = {
            "from GPU to GPU": functools.partial(to.copy_, from_),
            "by way of the host": functools.partial(_through, from_, pinned, to),
            "within one GPU": from_.clone,
        }
        rows += [(way, mib, mib * 2**20 / (_clocked(copy, 10) / 10) / 1e9) for way, copy in ways.items()]
    return pd.DataFrame(rows, columns=["way", "MiB", "GB/s"])


Job = tuple[torch.Tensor, torch.Tensor]


def _step(job: Job) -> None:
    with torch.cuda.device(job[0].device):
        _alone(*job)


def _in_turn(*jobs: Job) -> None:
    for _ in range(ITERATIONS):
        for job in jobs:
            _step(job)


def _whole(*jobs: Job) -> None:
    for job in jobs:
        for _ in range(ITERATIONS):
            _step(job)


def _threads(*jobs: Job) -> None:
    every = [threading.Thread(target=_in_turn, args=(job,)) for job in jobs]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join()


def _captured(job: Job) -> tuple[torch.device, torch.cuda.CUDAGraph]:
    with torch.cuda.device(job[0].device):
        _step(job)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # its default one is of the first GPU
            _in_turn(job)
    return job[0].device, graph


def _replay(*graphs: tuple[torch.device, torch.cuda.CUDAGraph]) -> None:
    for device, graph in graphs:
        with torch.cuda.device(device):
            graph.replay()


def jobs() -> pd.DataFrame:
    """Milliseconds of a hundred iterations of each job, in one process; and of calls that do next to nothing."""
    rows = []
    for n in (SMALL, 20_000_000):
        made: list[Job] = []
        for gpu in range(2):
            with torch.cuda.device(gpu):
                rng = torch.Generator(f"cuda:{gpu}").manual_seed(gpu)
                at: dict[str, Any] = {"generator": rng, "device": rng.device}
                made.append((torch.randn(n, 2, **at), torch.randn(2, 2, **at)))
        graphs = [_captured(job) for job in made]
        calls: dict[str, Callable[[], Any]] = {
            "one job": functools.partial(_in_turn, made[0]),
            "two jobs, one GPU": functools.partial(_in_turn, made[0], made[0]),
            "two jobs, two GPUs": functools.partial(_in_turn, *made),
            "two jobs, two GPUs, one queued after the other": functools.partial(_whole, *made),
            "two jobs, two GPUs, a thread each": functools.partial(_threads, *made),
            "one job, a graph": functools.partial(_replay, graphs[0]),
            "two jobs, two GPUs, a graph each": functools.partial(_replay, *graphs),
        }
        rows += [(n, way, 1e3 * _clocked(call)) for way, call in calls.items()]
    one = [torch.zeros(1, device=f"cuda:{gpu}") for gpu in (0, 1)]

    def switches(*gpus: int) -> None:
        for _ in range(ITERATIONS):
            for gpu in gpus:
                with torch.cuda.device(gpu):
                    pass

    def adds(*gpus: int) -> None:
        for _ in range(ITERATIONS):
            for gpu in gpus:
                one[gpu].add_(1)

    for what, call in (("switch", switches), ("add", adds)):
        rows.append((0, f"{what}, one GPU", 1e3 * _clocked(functools.partial(call, 0, 0))))
        rows.append((0, f"{what}, two GPUs", 1e3 * _clocked(functools.partial(call, 0, 1))))
    return pd.DataFrame(rows, columns=["points", "way", "ms"])


# Records --------------------------------------------------------------------------------------------------------------

#: Implementations by the names that records have.
_STEP = {"NCCL": "nccl", "chosen": "fusebook"}


class _Named(Measured):
    """Rows of ranks, with steps by their names in the lesson, and sizes as headings name them."""

    def renamed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The same rows with ``step``; those of times also with ``shape``, ``dtype`` and ``gpu_us``."""
        found = frame.assign(step=frame["way"].replace(_STEP))
        if "us" in found:
            shape = found["points"].astype(str) + "x" + found["GPUs"].astype(str)
            found = found.assign(shape=shape, dtype="float32").rename(columns={"us": "gpu_us"})
        found.attrs.update(frame.attrs)
        return found


FRAMES: dict[str, Any] = {
    "steps": _Named("gpus_scaling"),
    "agreement": _Named("gpus_agreement"),
    "copies": Measured("gpus_copies", function=copies),
    "jobs": Measured("gpus_jobs", function=jobs),
}


# What the lesson and claims read --------------------------------------------------------------------------------------


def _rows(frames: Frames) -> pd.DataFrame:
    """Times on several GPUs, with the share of the ideal: the time of one GPU, divided by their number if strong."""
    rows = frames["steps"]
    keys = ["GPUs", "n", "d", "k"]
    one = tables.where(rows, step="alone").set_index(keys)["gpu_us"].rename("one_us")
    found = rows[rows["scaling"].isin(["weak", "strong"]) & (rows["GPUs"] > 1)].join(one, on=keys)
    ideal = found["one_us"] / found["GPUs"].where(found["scaling"] == "strong", 1)
    found["case"] = [f"{n:,} x {d}, {k} centres" for n, d, k in zip(found["n"], found["d"], found["k"], strict=True)]
    return found.assign(share=ideal / found["gpu_us"])


def _wide(frames: Frames, column: str = "gpu_us") -> Any:
    """A row for each number of GPUs, scaling and case, a column for each step."""
    return _rows(frames).pivot_table(column, ["GPUs", "scaling", "case"], "step", sort=False)


def _over(step: str, other: str) -> Callable[[Frames], pd.Series]:
    """How many times as long a step takes as another one."""

    def ratio(frames: Frames) -> pd.Series:
        us = _wide(frames)
        if missing := {step, other} - {*us}:
            raise NotRecorded(f"{', '.join(missing)} was not measured")
        found: pd.Series = us[step] / us[other]
        return found

    return ratio


def _share(gpus: int, n: int, k: int, scaling: str = "weak") -> Callable[[Frames], pd.Series]:
    """Share of the ideal of the library at one case."""

    def share(frames: Frames) -> pd.Series:
        found = tables.where(_rows(frames), step="fusebook", GPUs=gpus, n=n, k=k, scaling=scaling)
        if found.empty:
            raise NotRecorded(f"{gpus} GPUs were not measured")
        return found.set_index("case")["share"]

    return share


def _most(frames: Frames) -> int:
    return int(frames["steps"]["GPUs"].max())


def verdict(frames: Frames) -> tuple[list[str], _show.Shown]:
    """The three sentences of the box, and its bars."""
    gpus, (n, d, k) = _most(frames), CASES[0]
    rows = tables.where(_rows(frames), GPUs=gpus, n=n, d=d, k=k)
    weak, strong = (tables.where(rows, scaling=kind).set_index("step") for kind in ("weak", "strong"))
    one = float(weak["one_us"].iloc[0])
    same = frames["agreement"]
    ranks = same["alike"].all()
    exact = tables.where(same, d=2, cut="where a program ends", step="fusebook")["same"].eq(TIMES).all()
    bits = "All ranks have the same centres to the bit" if ranks else "Ranks have different centres"
    lines = [
        f"**Weak scaling.** With {n:,} points in the plane on each of {gpus} GPUs, an iteration of "
        f"`fusebook.SharedKMeans` keeps **{weak['share']['fusebook']:.0%}** of one GPU's speed. With NCCL it keeps "
        f"{weak['share']['nccl']:.0%}.".replace("%", " %"),
        f"**Strong scaling.** With {n:,} points on all of them together, it is "
        f"**{_numbers.times(one / strong['gpu_us']['fusebook'])}** faster than one GPU. With NCCL it is "
        f"{_numbers.times(one / strong['gpu_us']['nccl'])} faster.",
        f"**Same bits.** {bits}" + (". With points in the plane, one GPU alone has them, too." if exact else "."),
    ]
    bars = {"NCCL": weak["gpu_us"]["nccl"], "Fusebook": weak["gpu_us"]["fusebook"], "one GPU alone": one}
    texts = {name: _numbers.microseconds(us) for name, us in bars.items()}
    caption = f"An iteration of {n:,} points in the plane on each of {gpus} GPUs; on one GPU for comparison"
    return lines, picture.bars(caption, bars, texts, ["Fusebook"])


def table(frames: Frames, steps: Mapping[str, Callable[..., Any]]) -> tuple[pd.DataFrame, str]:
    """Percent of the ideal."""
    n, d, k = CASES[0]
    rows = tables.where(_rows(frames), n=n, d=d, k=k)
    at = rows["scaling"] + " scaling, N = " + rows["GPUs"].astype(str)
    wide: Any = rows.assign(at=at, share=100 * rows["share"]).pivot_table("share", "step", "at", sort=False)
    wide = wide[sorted(wide, reverse=True)].reindex([*steps, "fusebook"])
    named = {"nccl": "NCCL", "flag": "step 1, flag", "words": "step 2, words", "fusebook": "fusebook.SharedKMeans"}
    return wide.rename(index=named).rename_axis(None).rename_axis(None, axis=1), (
        f"Percent of the ideal on N GPUs, {n:,} points in the plane, two centres"
    )


def use(frames: Frames) -> tuple[pd.DataFrame, str, list[str]]:
    """When to use the library: each case on the most GPUs."""
    gpus = _most(frames)
    rows = tables.where(_rows(frames), GPUs=gpus)
    shown = rows[rows["step"].isin(["nccl", "fusebook"])].replace({"step": {"nccl": "NCCL", "fusebook": "Fusebook"}})
    wide: Any = shown.pivot_table("share", ["scaling", "case"], "step", sort=False)[["Fusebook", "NCCL"]]
    told = pd.DataFrame({f"{name}, % of the ideal": 100 * wide[name] for name in wide})
    slow = wide["Fusebook"][wide["Fusebook"] < 0.8]
    said = ["**Use it** for points that do not fit on one GPU, or where one GPU takes too long."]
    if len(slow):
        said.append(
            f"**Do not use it** for few points. In {len(slow)} of {len(wide)} rows of the table, waiting for the other "
            "GPUs takes over a fifth of an iteration."
        )
    said.append("**Memory:** every GPU holds 32 bytes for each sum of each GPU, that is 32 G K (D + 1) for G GPUs.")
    return told, f"Share of the ideal on {gpus} GPUs", said


# Claims ---------------------------------------------------------------------------------------------------------------


def _added(frames: Frames, step: str) -> pd.Series:
    """Microseconds that an iteration takes longer than on one GPU alone."""
    n, d, k = CASES[0]
    rows = tables.where(_rows(frames), GPUs=_most(frames), n=n, d=d, k=k, scaling="weak", step=step)
    return (rows["gpu_us"] - rows["one_us"]).set_axis(rows["case"])


def _agreed(frames: Frames, **where: Any) -> pd.DataFrame:
    rows = frames["agreement"]
    rows = tables.where(rows[rows["cut"] != "late"], **where)
    return rows.set_index(["GPUs", "d", "k", "cut", "step"])


def _waited(frames: Frames) -> pd.Series:
    return tables.where(frames["agreement"], cut="late").set_index(["GPUs", "d", "k", "step"])["same"]


def _ended(frames: Frames, d: int) -> pd.Series:
    return _agreed(frames, cut="where a program ends", d=d)["same"]


def _jobs(frames: Frames, points: int = SMALL) -> pd.Series:
    """Milliseconds of jobs, by how they run."""
    return tables.where(frames["jobs"], points=points).set_index("way")["ms"]


def _ratio(way: str, over: str, points: int = SMALL) -> Callable[[Frames], pd.Series]:
    """Time of jobs over that of jobs that run otherwise."""

    def ratio(frames: Frames) -> pd.Series:
        ms = _jobs(frames, points)
        if missing := {way, over} - {*ms.index}:
            raise NotRecorded(f"{', '.join(missing)} was not measured")
        return pd.Series({f"{points:,} points": ms[way] / ms[over]})

    return ratio


def _switch_us(frames: Frames) -> float | None:
    """Microseconds that a call takes longer if the call before it was on another GPU."""
    ms = _jobs(frames)
    return 1e3 * float(ms["two jobs, two GPUs"] - ms["two jobs, one GPU"]) / (2 * ITERATIONS)


def _little_us(frames: Frames, what: str) -> pd.Series:
    """The same of calls that do next to nothing."""
    ms = _jobs(frames, 0)
    if f"{what}, two GPUs" not in ms.index:
        raise NotRecorded(f"{what} was not measured")
    return pd.Series({"": 1e3 * float(ms[f"{what}, two GPUs"] - ms[f"{what}, one GPU"]) / (2 * ITERATIONS)})


def _each(frames: Frames) -> pd.Series:
    """A small job in a process for each GPU, over one in a single process."""
    rows = tables.where(frames["steps"], scaling="jobs").set_index("GPUs")["gpu_us"]
    if 1 not in rows.index or len(rows) < 2:
        raise NotRecorded("jobs in a process each were not measured")
    return rows[rows.index > 1].rename(index=lambda gpus: f"{gpus} GPUs") / rows[1]


def _copied(frames: Frames) -> pd.Series:
    rates = tables.where(frames["copies"], MiB=256).set_index("way")["GB/s"]
    return pd.Series({"256 MiB": rates["from GPU to GPU"] / rates["by way of the host"]})


_PLANE, _WIDE = CASES[0], CASES[2]
_ALL = "all cases in weak and in strong scaling, iterations in a CUDA graph, the slowest rank"
_RUNS = f"{TIMES} iterations of 8 million points in the plane and of 500,000 points of 64 coordinates; three cuts"
_TWO = f"{ITERATIONS} iterations of each job, queued by one process; until both GPUs have finished"

CLAIMS = (
    # The lesson's findings
    Claim(
        "added",
        "Over one GPU alone, NCCL adds {nccl:.1f} us to an iteration and the library {library:.1f} us, {median:.0%} "
        "less. The rest is the trip of the sums and the wait for the slowest GPU.",
        lambda frames: 1 - _added(frames, "fusebook") / _added(frames, "nccl"),
        "> 0.5",
        "20 million points in the plane on each of the most GPUs, in weak scaling",
        lesson=True,
        numbers=lambda frames: {
            "nccl": _added(frames, "nccl").iloc[0],
            "library": _added(frames, "fusebook").iloc[0],
        },
    ),
    Claim(
        "words-over-nccl",
        "An iteration with the library's kernel takes {least:.2f} to {most:.2f} times as long as one with NCCL.",
        _over("fusebook", "nccl"),
        "<= 1.02",
        _ALL,
        lesson=True,
    ),
    Claim(
        "bits-of-one",
        "In the plane, several GPUs give the same bits as one GPU in {good} of {count} comparisons.",
        lambda frames: _ended(frames, 2),
        f"== {TIMES}",
        "ten iterations of 8 million points, shares cut by `fusebook.kmeans_share`",
        lesson=True,
    ),
    Claim(
        "two-jobs-large",
        "Two large jobs on two GPUs should take at most 1.1 times as long as one on one GPU. They take {median:.2f} "
        "times as long: one CPU thread queues both, and is the limit.",
        _ratio("two jobs, two GPUs", "one job", 20_000_000),
        "<= 1.1",
        "20 million points in the plane; " + _TWO,
        lesson=True,
    ),
    Claim(
        "two-jobs-small",
        "Two small jobs take {median:.2f} times as long on two GPUs as on one. The CPU is the limit there: a call "
        "takes {switch:.1f} us more of its time if the call before was on another GPU.",
        _ratio("two jobs, two GPUs", "two jobs, one GPU"),
        "> 1",
        f"{SMALL:,} points in the plane; " + _TWO,
        numbers=lambda frames: {"switch": _switch_us(frames)},
    ),
    # Why small jobs are slow
    Claim(
        "two-jobs-queued",
        "If one small job is queued whole before the other, two GPUs take {median:.2f} times as long as one: without "
        "the switches, two GPUs cost nothing more.",
        _ratio("two jobs, two GPUs, one queued after the other", "two jobs, one GPU"),
        "<= 1.1",
        f"{SMALL:,} points in the plane; " + _TWO,
    ),
    Claim(
        "switch-add",
        "A PyTorch addition of one element should take the CPU longer if the call before was on another GPU: "
        "{median:.2f} us.",
        lambda frames: _little_us(frames, "add"),
        "> 0",
        "200 additions on two GPUs in turn, less 200 on one",
    ),
    Claim(
        "switch-alone",
        "To make another GPU the current one takes the CPU {median:.1f} us.",
        lambda frames: _little_us(frames, "switch"),
        "> 0",
        "200 times `torch.cuda.device` on two GPUs in turn, less 200 on one",
    ),
    Claim(
        "two-jobs-threads",
        "With a thread for each GPU, two small jobs take {median:.2f} times as long as on one GPU. Python runs one "
        "thread at a time.",
        _ratio("two jobs, two GPUs, a thread each", "two jobs, one GPU"),
        ">= 0.9",
        f"{SMALL:,} points in the plane; " + _TWO,
    ),
    Claim(
        "two-jobs-graphs",
        "As a CUDA graph for each GPU, two jobs take {least:.2f} to {most:.2f} times as long as one.",
        lambda frames: pd.concat(
            [_ratio("two jobs, two GPUs, a graph each", "one job, a graph", n)(frames) for n in (SMALL, 20_000_000)]
        ),
        "<= 1.2",
        f"{SMALL:,} and 20 million points in the plane; {ITERATIONS} iterations in a graph",
    ),
    Claim(
        "jobs-processes",
        "With a process for each GPU, the slowest small job takes {least:.2f} to {most:.2f} times as long as one "
        "alone.",
        _each,
        "",
        f"{SMALL:,} points in the plane, {ITERATIONS} iterations; end-to-end time",
    ),
    Claim(
        "one-per-process",
        '"There is a limit of one GPU per process" (Theano\'s manual, 2012): two jobs on two GPUs, called by one '
        "process, should take as long as on one: {median:.2f} times.",
        _ratio("two jobs, two GPUs", "two jobs, one GPU", 20_000_000),
        "> 0.9",
        "20 million points in the plane; " + _TWO,
        kind="statement",
    ),
    # Scaling
    Claim(
        "weak-plane-2",
        "On 2 GPUs with 20 million points in the plane each, an iteration keeps {median:.1%} of one GPU's speed.",
        _share(2, _PLANE[0], _PLANE[2]),
        ">= 0.95",
        "weak scaling, two centres, in a CUDA graph, the slowest rank",
        kind="target",
    ),
    Claim(
        "weak-wide-2",
        "On 2 GPUs with 2 million points of 64 coordinates each, an iteration keeps {median:.1%} of one GPU's speed.",
        _share(2, _WIDE[0], _WIDE[2]),
        ">= 0.97",
        "weak scaling, 256 centres, in a CUDA graph, the slowest rank",
        kind="target",
    ),
    Claim(
        "weak-plane-4",
        "On 4 GPUs with 20 million points in the plane each, an iteration keeps {median:.1%} of one GPU's speed.",
        _share(4, _PLANE[0], _PLANE[2]),
        ">= 0.93",
        "weak scaling, two centres, in a CUDA graph, the slowest rank",
        kind="target",
    ),
    Claim(
        "strong-plane",
        "With 100 million points in the plane on all GPUs together, an iteration keeps {least:.1%} or more of the "
        "ideal.",
        lambda frames: tables.where(_rows(frames), step="fusebook", scaling="strong", n=CASES[1][0]).set_index("GPUs")[
            "share"
        ],
        "",
        "strong scaling, two centres, in a CUDA graph, the slowest rank",
    ),
    Claim(
        "words-over-flag",
        "Words take {least:.2f} to {most:.2f} times the time of sums with a flag behind them.",
        _over("words", "flag"),
        "<= 1.02",
        _ALL,
    ),
    Claim(
        "halves",
        "Adding the sums of one half while the other is labelled takes {least:.2f} to {most:.2f} times the time of "
        "NCCL in one go.",
        _over("halves", "nccl"),
        ">= 0.98",
        _ALL,
    ),
    # Correctness
    Claim(
        "alike",
        "All ranks have the same centres to the bit, for any shares of points.",
        lambda frames: _agreed(frames)["alike"].astype(float),
        "== 1",
        _RUNS,
    ),
    Claim(
        "near-one",
        "For any shares of points, the centres are within 1e-5 of those of one GPU.",
        lambda frames: _agreed(frames)["off"],
        "< 0.00001",
        _RUNS + "; largest difference over 1 + the magnitude",
    ),
    Claim(
        "bits-wide",
        "With 64 coordinates, {median:.0f} of ten iterations give the bits of one GPU: there the last bits may depend "
        "on the number of GPUs.",
        lambda frames: _ended(frames, 64),
        "",
        "ten iterations of 500,000 points, shares cut by `fusebook.kmeans_share`",
    ),
    Claim(
        "late",
        "Late ranks spoil none of a thousand iterations.",
        _waited,
        f"== {LATE}",
        "one rank, drawn by lot, sleeps before each iteration; bits of the centres",
    ),
    # Copies
    Claim(
        "copies",
        "A copy of 256 MiB from GPU to GPU is {median:.0f} times as fast as one through the host's memory.",
        _copied,
        "> 1",
        "pinned memory, both copies queued by one process",
    ),
)

LOG = (
    "An iteration needs a message of a few bytes and a pass over the points, and the two cannot overlap. A point is "
    "labelled when the centres are known. Half of the sums can travel while the other half is labelled. But the rest "
    "must follow, and one pass becomes two.",
    "A call returns before the GPU has finished, so one process keeps two GPUs busy if it queues faster than they "
    "work. A small job is done before the next call is queued. Then the time is the CPU's, which is the sum over both "
    "jobs. On two GPUs, each call also makes another GPU the current one, and the CUDA driver changes its context.",
    "Sums of a program are kept in registers in the plane and added in float64. A float64 sum of some thousand float32 "
    "sums of about the same size is exact, so its order does not matter. The float32 sum of a program's own points "
    "does depend on them, so shares are cut where a program's points end.",
    "With many coordinates, points are sorted by cluster, and each cluster is cut into parts by its length. On several "
    "GPUs a cluster's share is shorter, so it is cut elsewhere, and float32 sums round otherwise. The last bits depend "
    "on the number of GPUs, not on the run, and all GPUs have the same ones.",
    "The threads of a program do not run in step. All must have read the number of the iteration before one of them "
    "writes the next: a late warp would wait for an iteration that is not sent. That happened once in many runs.",
    "A rank that dies leaves the others waiting. On its own machine `torchrun` ends them and shows what it said. For "
    "another machine the group has a time limit, far shorter than PyTorch's ten minutes.",
    "Ray, Dask and joblib schedule tasks that are unlike, or more than the machine holds. An iteration has one task "
    "per GPU, all alike, whose data stays. They help with many data sets, or when a machine fails.",
)
