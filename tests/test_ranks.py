"""Several GPUs: kernels that send and meet, the processes of a page, and what ends them. Here they are on the CPU."""

import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fusebook
import fusebook.lesson._ranks as processes
import warm
from fusebook.kernels._call import OPERATORS
from fusebook.kernels.distributed import (
    WAYS,
    _allreduce_norm,
    _kmeans_shared_means,
    _shared_config,
    allreduce_config,
    reachable,
)
from fusebook.kernels.kmeans import _sums_fit
from fusebook.lesson import evidence
from fusebook.lesson import open as open_lesson
from fusebook.lesson._ranks import enough, join, ranks, timed
from fusebook.measure import machine as machines
from fusebook.measure import record
from fusebook.measure.inputs import generator
from toy import machine

ROOT = Path(__file__).resolve().parents[1]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU pretends to be several")


@pytest.mark.parametrize(("n", "world"), [(0, 3), (1, 4), (8192, 2), (20_000, 2), (100_000, 3), (8193, 1)])
def test_shares_are_all_points_once_and_cut_where_a_programs_points_end(n, world):
    shares = [fusebook.kmeans_share(n, rank, world) for rank in range(world)]
    assert [i for share in shares for i in range(n)[share]] == list(range(n))
    assert all(share.start % 8192 == 0 or share.start == n for share in shares)


@pytest.mark.parametrize(("n", "d", "k"), [(5000, 2, 2), (60, 20, 5), (0, 2, 2), (7, 0, 2), (1, 3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_means_are_a_step(n, d, k, dtype, device):
    rng = generator(0)
    points, centres = (torch.randn(rows, d, generator=rng, device=device, dtype=dtype) for rows in (n, k))
    labels, new = OPERATORS["kmeans_step"](points, centres, torch.uint8)
    found, sums = OPERATORS["kmeans_sums"](points, centres, torch.uint8)
    assert torch.equal(found, labels)
    assert sums[:, :, d].sum() == n
    if d and _sums_fit(d, k):  # else a step of few points adds in another order
        assert torch.equal(OPERATORS["kmeans_means"](sums, centres), new)
    elif d:
        torch.testing.assert_close(OPERATORS["kmeans_means"](sums, centres), new)


def test_sums_of_another_shape_are_refused(device):
    said = r"expected sums of shape \[parts > 0, 2, 4\], .* where old is \[k, d\], got \[2, 4\]; slice"
    with pytest.raises(ValueError, match=said):
        OPERATORS["kmeans_means"](torch.zeros(2, 4, device=device), torch.zeros(2, 3, device=device))


# Kernels, each GPU of several in turn


LOW = 0xFFFFFFFF


def sent(sums, number):
    """The words in which a GPU sends its sums [K, D + 1]."""
    bits = sums.view(torch.int64)
    return torch.stack([(bits & ~LOW) | number, (bits << 32) | number], -1)


def received(words):
    """The sums in such words, and the numbers in them."""
    high, low = words.unbind(-1)
    return ((high & ~LOW) | ((low >> 32) & LOW)).view(torch.float64), set((words & LOW).unique().tolist())


@interpreted
@pytest.mark.parametrize(("k", "d", "parts", "world"), [(2, 2, 5, 2), (5, 20, 3, 3), (1, 1, 1, 2)])
def test_every_gpu_makes_the_same_centres_of_what_all_have_sent(k, d, parts, world):
    rng, number = generator(1), 7
    sums = torch.randn(world, parts, k, d + 1, generator=rng, dtype=torch.float64)
    sums[..., d] = torch.randint(1, 9, (world, parts, k), generator=rng).double()
    if k > 1:
        sums[:, :, 0] = 0  # nobody has points of the first centre
    old, total, made = torch.randn(k, d, generator=rng), sums.sum((0, 1)), []
    for me in range(world):
        words = [torch.zeros(world, 2, k, d + 1, 2, dtype=torch.int64) for _ in range(world)]
        for r in set(range(world)) - {me}:
            words[me][r, :] = sent(sums[r].sum(0), number)  # in both places: who looks at the wrong one is not to wait
        block, block_k, block_d, warps = _shared_config(parts, k, d)
        turns = torch.full((-(-k // block_k),), number - 1, dtype=torch.int32)
        made.append(torch.full_like(old, torch.nan))
        _kmeans_shared_means[(len(turns),)](
            made[-1], tuple(words), sums[me], old, turns, parts, k, d,
            ME=me, BLOCK=block, BLOCK_K=block_k, BLOCK_D=block_d, num_warps=warps,
        )  # fmt: skip
        assert set(turns.tolist()) == {number}
        for r in set(range(world)) - {me}:
            got, numbers = received(words[r][me, number & 1])
            torch.testing.assert_close(got, sums[me].sum(0), rtol=1e-13, atol=1e-13)
            assert numbers == {number}
            assert not words[r][me, 1 - number & 1].any(), "what may still be read is left alone"
    want = torch.where(total[:, d:] > 0, total[:, :d] / total[:, d:], old.double())
    torch.testing.assert_close(made[0], want.float())
    assert all(torch.equal(other, made[0]) for other in made)


@interpreted
@pytest.mark.parametrize(("rows", "columns", "programs"), [(3, 60, 2), (1, 64, 1), (5, 130, 5)])
def test_every_gpu_adds_and_normalises_the_parts_of_all(rows, columns, programs):
    rng, world = generator(2), 3
    *parts, residual = (torch.randn(rows, columns, generator=rng) for _ in range(world + 1))
    weight = torch.randn(columns, generator=rng)
    h64 = sum(part.double() for part in parts) + residual.double()
    want = h64 * torch.rsqrt(h64.square().mean(1, keepdim=True) + 1e-6) * weight.double()
    made = []
    for me in range(world):
        flags = [torch.full((world, 8), 5, dtype=torch.int32) for _ in range(world)]  # the others have come
        turns = torch.full((8,), 4, dtype=torch.int32)
        y, h = (torch.full_like(residual, torch.nan) for _ in range(2))
        _allreduce_norm[(programs,)](
            y, h, tuple(parts), residual, weight, turns, tuple(flags), rows, columns, 1e-6, 8,
            ME=me, MEET=True, BLOCK=256,
        )  # fmt: skip
        assert turns.tolist() == [5] * programs + [4] * (8 - programs)
        assert all(flags[r][me].tolist() == [5] * 8 for r in range(world))
        made.append((y, h))
        torch.testing.assert_close(h, h64.float())
        torch.testing.assert_close(y, want.float())
    assert all(torch.equal(a, b) for other in made for a, b in zip(other, made[0], strict=True))


def test_the_plan_depends_on_numbers_that_all_gpus_share():
    for rows, columns, world in itertools.product((1, 64, 4096), (4096, 8192), (2, 4, 8)):
        made = allreduce_config(rows, columns, world, 132)
        assert made.way in WAYS and 1 <= made.programs <= min(rows, 132)
    assert allreduce_config(4096, 8192, 2, 132).way == "fused" != allreduce_config(4096, 8192, 8, 132).way
    assert allreduce_config(1, 4096, 4, 132).way == "two-shot"
    assert allreduce_config(1, 4096, 2, 132, "group").way == "group"


#: Compiles what is launched, for a GPU that is not there; the sizes are those at which a kernel is cut differently.
COMPILED = """
import re, torch, triton
import fusebook
from fusebook.kernels.distributed import _allreduce_norm, _barrier, _kmeans_shared_means, _shared_config
from fusebook.measure.compiled import AbsentGPU
names = []
gpu = AbsentGPU((9, 0), shared=96 * 1024, launched=lambda found: names.append(found.name))
triton.runtime.driver.set_active(gpu)
turns, flags = torch.zeros(8, dtype=torch.int32), (torch.zeros(2, 8, dtype=torch.int32),) * 2

def counts_behind_a_barrier(kernel):
    # Every thread reads how often its program has come before one of them counts on.
    ptx = kernel.asm["ptx"]
    read, count = (re.search(rf"{what}\\.global\\.b32", ptx) for what in ("ld", "st"))
    assert "bar.sync" in ptx[read.end() : count.start()], ptx

for k, d, parts in ((2, 2, 64), (16, 9, 8), (256, 64, 32)):
    words, sums = (torch.zeros(2, 2, k, d + 1, 2, dtype=torch.int64),) * 2, torch.zeros(parts, k, d + 1).double()
    block, block_k, block_d, warps = _shared_config(parts, k, d)
    found = _kmeans_shared_means[(1,)](sums, words, sums, sums, turns, parts, k, d,
                                       ME=1, BLOCK=block, BLOCK_K=block_k, BLOCK_D=block_d, num_warps=warps)
    if warps > 1:
        counts_behind_a_barrier(found)
x = torch.zeros(4, 4096, dtype=torch.bfloat16)
for parts, meets in (((x, x), True), ((x,), False)):
    found = _allreduce_norm[(4,)](x, x, parts, x, x, turns, flags, 4, 4096, 1e-6, 8,
                                  ME=0, MEET=meets, BLOCK=4096, num_warps=8)
    if meets:
        counts_behind_a_barrier(found)
_barrier[(1,)](turns, flags, 8, ME=1, num_warps=1)
print(*names)
"""


def test_kernels_compile_for_a_gpu_that_is_not_there(path):
    env = os.environ | {"TRITON_INTERPRET": "0"}
    end = warm.run("-c", COMPILED, env=env)
    assert end.returncode == 0, end.stderr[-2000:]
    assert end.stdout.split() == ["_kmeans_shared_means"] * 3 + ["_allreduce_norm"] * 2 + ["_barrier"]


def test_no_two_warps_wait_for_copies_of_one_sum():
    for parts, k, d in itertools.product((1, 64, 5000), (1, 2, 16, 256, 3000), (1, 2, 7, 8, 15, 16, 31, 64, 300)):
        _, centres, wide, warps = _shared_config(parts, k, d)
        assert warps in (1, 2, 4) and (warps == 1 or 32 * warps <= centres * wide)


@pytest.mark.parametrize(
    ("told", "numbers", "reads", "yes"),
    [
        ("aa", "01", True, True),
        ("ab", "01", True, False),
        ("aa", "01", False, False),
        ("a", "0", True, False),
        ("aa", "00", True, False),  # each process sees another GPU as its only one
        ("aaaa", "0101", True, False),  # two groups of processes, as if on two machines
        ("abab", "0123", True, False),
    ],
)
def test_memory_is_shared_by_gpus_of_one_machine_with_numbers_of_their_own_only(monkeypatch, told, numbers, reads, yes):
    """Each of the group names its machine and its GPU; one that cannot read its neighbour names no machine."""

    def gather(every, mine, group):
        assert mine[1] == 0
        every[:] = [(mine[0] and machine, int(number)) for machine, number in zip(told, numbers, strict=True)]

    monkeypatch.setattr(dist, "get_world_size", lambda group: len(told))
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, other: reads)
    assert reachable() is yes


# Processes

WORKER = """
import sys
import fusebook
import pandas as pd, torch, torch.distributed as dist
from fusebook.measure.inputs import generator
from fusebook.kernels._call import OPERATORS
from fusebook.lesson._ranks import work

def found():
    rank, world = dist.get_rank(), dist.get_world_size()
    at = {"generator": generator(0)}
    points, start = torch.randn(300, 2, **at), torch.randn(3, 2, **at)
    rows = {}
    for name, cuts in {"uneven": (0, 7, 300), "empty": (0, 0, 300)}.items():
        mine = points[cuts[rank] : cuts[rank + 1]] if world > 1 else points
        alone = shared = start
        step = fusebook.SharedKMeans(3, 2)
        for _ in range(3):
            alone = OPERATORS["kmeans_step"](points, alone, torch.uint8)[1]
            labels, shared = step(mine, shared, label_dtype=torch.uint8)
        rows[name] = float((shared - alone).abs().max())
        assert len(labels) == len(mine)
    reduce = fusebook.AllReduceNorm(4, 48, torch.float32)
    *every, residual = (torch.randn(4, 48, **at) for _ in range(world + 1))
    weight = torch.randn(48, **at)
    last = None
    for used in (4, 1, 0):
        assert reduce.part(4).data_ptr() != last, "the others may still read the last one"
        last = reduce.part(4).data_ptr()
        reduce.part(used).copy_(every[rank][:used])
        y, h = reduce(residual[:used], weight)
        want = sum(every)[:used] + residual[:used]
        torch.testing.assert_close(h, want)
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(want, (48,), weight, 1e-6))
    for many, wide, way in ((5, 48, None), (4, 7, None), (4, 48, "fused")):
        try:
            reduce.part(many)
            reduce(residual, weight[:wide], way=way)
        except ValueError as error:
            assert "AllReduceNorm: expected" in str(error)
        else:
            raise AssertionError("not refused")
    return pd.DataFrame([rows | {"world": world}])

def dies():
    if dist.get_rank() == 1:
        raise ValueError("this rank has had enough")
    dist.all_reduce(torch.zeros(1))  # which never comes
    return pd.DataFrame()

def meets_and_dies():
    have = torch.ones(1)
    dist.all_reduce(have)
    print(f"all {int(have)} have met", file=sys.stderr, flush=True)
    return dies()

work(found, dies, meets_and_dies)
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The file of a page, and its workers; a process that is no rank runs it to its end."""
    file = tmp_path_factory.mktemp("ranks") / "page.py"
    file.write_text(WORKER)
    names = {"__file__": str(file), "__name__": "page"}
    exec(compile(WORKER, str(file), "exec"), names)
    return names


@pytest.fixture
def path(monkeypatch):
    """For the processes: the library, and neither a GPU nor threads."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_shares_of_any_size_give_what_one_process_gives(page, path):
    frame = ranks(page["found"], 2, seconds=120)
    assert frame["world"].tolist() == [2]
    assert frame[["uneven", "empty"]].to_numpy().max() < 1e-5


@pytest.fixture
def alone():
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@interpreted
def test_a_world_of_one(page, alone):
    assert page["found"]()[["uneven", "empty", "world"]].to_numpy().tolist() == [[0, 0, 1]]


@interpreted
def test_a_dtensor_is_refused_and_says_what_to_pass(alone):
    def sharded(*shape):
        return distribute_tensor(torch.ones(shape), init_device_mesh("cpu", (1,)), [Shard(0)])

    step, reduce = fusebook.SharedKMeans(2, 3), fusebook.AllReduceNorm(4, 8, torch.float32)
    calls = [
        lambda: fusebook.kmeans(sharded(5, 3), 2),
        lambda: fusebook.kmeans(torch.ones(5, 3), 2, init=sharded(2, 3)),
        lambda: step(sharded(5, 3), torch.ones(2, 3)),
        lambda: step(torch.ones(5, 3), sharded(2, 3)),
        lambda: reduce(sharded(4, 8), torch.ones(8)),
        lambda: reduce(torch.ones(4, 8), sharded(8)),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"expected \w+ to be a local tensor, got a DTensor; pass to_local\(\)"):
            call()
    without = torch._efficientzerotensor((4, 8))
    with pytest.raises(TypeError, match="AllReduceNorm: expected residual with memory for its elements"):
        reduce(without, torch.ones(8))
    with pytest.raises(TypeError, match="SharedKMeans: expected points with memory for its elements"):
        step(torch._efficientzerotensor((5, 3)), torch.ones(2, 3))


@interpreted
def test_a_gradient_that_would_be_dropped_is_refused(alone):
    reduce = fusebook.AllReduceNorm(4, 8, torch.float32)
    residual, weight = torch.ones(4, 8), torch.nn.Parameter(torch.ones(8))
    for given in ((residual, weight), (residual.clone().requires_grad_(), torch.ones(8))):
        with pytest.raises(NotImplementedError, match="AllReduceNorm: expected residual and weight that require no"):
            reduce(*given)
    with torch.no_grad():
        reduce.part(4).zero_()
        assert torch.equal(reduce(residual, weight)[1], residual)
    with pytest.raises(TypeError, match="AllReduceNorm: expected eps to be a number, got str"):
        reduce(residual, torch.ones(8), "small")


@interpreted
def test_centres_in_any_layout_are_moved_where_gpus_write_to_each_other(alone, monkeypatch):
    """A group of one that sends its sums as several do: centres stored by columns stay in their places."""
    points, centres = torch.randn(50, 3, generator=generator(3)), torch.randn(4, 3, generator=generator(4))
    step = fusebook.SharedKMeans(4, 3)
    slots = -(-4 // _shared_config(1, 4, 3)[1])
    step.peers = SimpleNamespace(rank=0, slots=slots, turns=torch.zeros(slots, dtype=torch.int32))
    step.words, step.alone = (torch.zeros(1, 2, 4, 4, 2, dtype=torch.int64),), False
    want = OPERATORS["kmeans_step"](points, centres, torch.int64)
    for laid in (centres, centres.t().contiguous().t(), torch.stack([centres, centres], -1)[..., 0]):
        labels, moved = step(points, laid)
        assert torch.equal(labels, want[0])
        torch.testing.assert_close(moved, want[1])


def test_a_rank_that_dies_ends_the_others_with_its_error(page, path):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)dies failed on 2 ranks:.*ValueError: this rank has had enough"):
        ranks(page["dies"], 2, seconds=120)
    assert time.monotonic() - start < 60  # to start them takes its time where the machine is busy


def test_ranks_that_end_too_late_are_ended(page, path):
    with pytest.raises(RuntimeError, match=r"(?s)dies failed on 1 ranks:.*none ended within 1 s"):
        ranks(page["dies"], 1, seconds=1)


@pytest.mark.slow_interpreted
def test_two_machines_are_two_torchruns_of_the_same_script_and_neither_outlives_the_other(page, path, tmp_path):
    rows, port = tmp_path / "rows.csv", str(20_000 + os.getpid() % 20_000)
    env = os.environ | {"_FUSEBOOK_RANKS": f"meets_and_dies={rows}", "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
             "--master-addr", "127.0.0.1", "--master-port", port, page["__file__"]],
            env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip
    said = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1]
    assert all("all 2 have met" in text for text in said)
    assert "this rank has had enough" in said[1]


def test_times_are_of_the_slowest_rank_begin_together_and_leave_out_what_comes_before(monkeypatch):
    clock, told = [0.0], []

    def takes(seconds, name=""):
        def run(*_, **__):
            told.append(name)
            clock[0] += seconds.pop(0) if isinstance(seconds, list) else seconds

        return run

    def gather(every, mine):  # another rank takes twice as long
        every[:] = [mine, {name: [2 * us for us in times] for name, times in mine.items()}]

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(processes.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", takes(10.0, "together"))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    a = takes([1e-6, 1e-6, 5e-6, 5e-6, 9e-6, 9e-6], "a")  # two calls in each of three rounds
    found = timed({"a": a, "b": takes(3e-6, "b")}, calls=2, repeat=3, before=takes(7.0, "before"), graph=False)
    assert found == pytest.approx({"a": 2 * 5, "b": 2 * 3})
    one = {name: ["before", "together", name, name] for name in "ab"}
    assert told == [*one["b"], *one["a"], *one["a"], *one["b"], *one["b"], *one["a"]]


def test_rank_0_alone_writes_the_rows(monkeypatch, tmp_path, page):
    def rows():
        return pd.DataFrame([{"rank": dist.get_rank()}])

    monkeypatch.setattr(processes, "join", lambda: None)
    monkeypatch.setattr(processes.faulthandler, "register", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    file = tmp_path / "rows.csv"
    monkeypatch.setenv("_FUSEBOOK_RANKS", f"rows={file}")
    for rank in (1, 0):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        processes._work(rows, page["dies"])
        assert file.exists() == (rank == 0)
    assert pd.read_csv(file)["rank"].tolist() == [0]


def test_a_rank_that_fails_when_the_rows_are_there_is_told(monkeypatch, page):
    class Failed(contextlib.nullcontext):
        returncode = 1

        def __init__(self, command, env, **_):
            super().__init__(self)
            Path(env["_FUSEBOOK_RANKS"].partition("=")[2]).write_text("rows")

        def communicate(self, timeout):
            return "rank 1 had enough", None

    monkeypatch.setattr(processes.subprocess, "Popen", Failed)
    with pytest.raises(RuntimeError, match=r"dies failed on 2 ranks:\nrank 1 had enough"):
        ranks(page["dies"], 2)


# A lesson


@pytest.mark.parametrize("name", ["plot_402_two_gpus", "plot_403_allreduce_norm"])
def test_a_lesson_records_what_ranks_measured_on_each_number_of_gpus(name, monkeypatch, tmp_path):
    """The ranks' rows come from the record, and GPUs are pretended: each frame is written with its own rows."""
    lesson = evidence.load(name)
    known = {frame: spec.read() for frame, spec in lesson.FRAMES.items()}
    asked = []

    def found(worker, gpus):
        asked.append((worker.__name__, gpus))
        frames = [rows.assign(frame=frame) for frame, rows in known.items() if not lesson.FRAMES[frame].function]
        return pd.concat([rows.drop(columns=["step", "GPUs"]) for rows in frames], ignore_index=True)

    monkeypatch.setattr(processes, "ranks", found)
    monkeypatch.setattr(processes, "enough", lambda *_: True)
    monkeypatch.setattr(processes._place, "live", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(machines, "here", machine)
    monkeypatch.setenv("_FUSEBOOK_RECORD", str(tmp_path))
    for frame, spec in lesson.FRAMES.items():
        if spec.function:
            spec = dataclasses.replace(spec, function=lambda frame=frame: known[frame])
            monkeypatch.setitem(lesson.FRAMES, frame, spec)
    page = open_lesson(name, gpus=4)

    def first():
        """A step."""

    shown = page.steps(**dict.fromkeys(lesson.STEPS, first))
    assert asked == [("first", 1), ("first", 2), ("first", 4)]
    for frame, spec in lesson.FRAMES.items():
        written = record.read(f"pages/{spec.name}", "test-gpu", tmp_path)
        if not spec.function:
            assert sorted(written["GPUs"].unique()) == [1, 2, 4]
            assert "frame" not in written and not written.isna().all().any()
        assert len(written) == len(known[frame]) * (1 if spec.function else 3)
    letter = "N" if name == "plot_402_two_gpus" else "G"  # of the number of GPUs
    assert "measured now on Test GPU" in repr(shown) and f"{letter} = 4" in repr(shown)


def test_a_rank_of_a_lesson_shows_nothing_and_measures_its_steps(monkeypatch):
    monkeypatch.setattr(processes._place, "ranked", lambda: True)
    monkeypatch.setattr(processes._place, "script", lambda: True)
    monkeypatch.setattr(processes, "options", lambda gpus: SimpleNamespace(gpus=gpus))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    page = open_lesson("plot_403_allreduce_norm")
    assert not page.verdict().html and not page.check(None).html and not page.picture.meeting().html
    monkeypatch.setattr(page.about, "on_ranks", lambda steps: list(steps))
    monkeypatch.setattr(processes, "work", lambda worker: sys.exit(f"{worker.__name__}: {worker()}"))

    def reduce_eager():
        """A step."""

    with pytest.raises(SystemExit, match=r"reduce_eager: \['eager'\]"):
        page.steps(eager=reduce_eager)


# What is missing


def test_a_page_starts_ranks_only_where_each_has_a_gpu_and_they_have_nccl(page, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert enough(page["found"], 2) and enough(page["found"], 1)
    assert not enough(page["found"], 3) and not enough(page["found"], 0)
    assert not enough(eval("lambda: None"), 2), "a notebook's cell is no file"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert not enough(page["found"], 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not enough(page["found"], 1)


@pytest.mark.parametrize(
    ("here", "nccl", "words"),
    [(3, True, "expected a GPU for each of 3 ranks of this machine, got 2; ask"), (2, False, "a PyTorch with NCCL")],
)
def test_a_rank_without_a_gpu_or_nccl_says_so(monkeypatch, here, nccl, words):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    with pytest.raises(RuntimeError, match=words):
        join()
