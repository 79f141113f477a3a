"""What is special to ScatterND: indices that meet, that are masked, that are wrong; the strategies."""

import numpy as np
import pytest
import torch

import fusebook
from fusebook.cards.scatter import EMBEDDING_BACKWARD, MASKED_SCATTER_ND
from fusebook.kernels import scatter
from fusebook.kernels.scatter import STRATEGIES, scatter_config
from fusebook.measure import bench, check
from fusebook.measure.inputs import generator, poison, rough

LAWS = ("uniform", "equal", "zipf", "masked", "none masked")
masked, plain = fusebook.masked_scatter_nd_of_shape, fusebook.scatter_nd_of_shape


def made(law, device, R=37, D=20, n=150, dtype=torch.float32, seed=0):
    rng = generator(seed, device)
    shape, indices, updates = MASKED_SCATTER_ND.make(
        rng, dtype, R=R, D=D, n=n, law="uniform" if law == "none masked" else law
    )
    if law == "uniform":  # many duplicates and many masks
        indices = torch.where(torch.rand(n, 1, generator=rng, device=device) < 0.3, -1, indices % 5)
    if law == "none masked":
        indices = indices.clamp(min=0)
    return shape, indices, updates


def right(inputs, got):
    verdict = check.yardstick(MASKED_SCATTER_ND, inputs).judge(got)
    return verdict.ok


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("law", LAWS)
def test_a_hundred_runs_are_right(law, strategy, device):
    # A race is right most of the time. In the interpreter programs run one after another, so few runs show as much.
    for run in range(100 if device == "cuda" else 2):
        inputs = made(law, device, seed=run)
        poison([inputs[2].new_empty(inputs[0])])
        assert right(inputs, masked(*inputs, strategy=strategy)), f"run {run}"


def test_deterministic_algorithms_choose_sorted(device, monkeypatch):
    inputs = made("uniform", device)
    chosen = []
    plan = scatter_config
    monkeypatch.setattr(scatter, "_config", lambda *a, **k: chosen.append(plan(*a, **k)) or chosen[-1])
    torch.use_deterministic_algorithms(True)
    try:
        assert right(inputs, masked(*inputs))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [p.strategy for p in chosen] == ["sorted"]


GROUNDS = {
    "few updates of few rows": ((256, 512, 512), torch.float32, "owner"),
    "float32 that stays in L2": ((1024, 2048, 2048), torch.float32, "atomic"),
    "half types, which have no fast addition in memory": ((1024, 2048, 2048), torch.float16, "sorted"),
    "few of many rows": ((32000, 4096, 2048), torch.float32, "sorted"),
    "more updates than a short sort takes": ((8192, 16384, 16384), torch.float32, "owner"),
}


@pytest.mark.parametrize(("size", "dtype", "strategy"), GROUNDS.values(), ids=GROUNDS)
def test_each_strategy_has_its_ground(size, dtype, strategy):
    assert scatter_config(size, dtype, (9, 0)).strategy == strategy
    assert scatter_config(size, dtype, (9, 0), deterministic=True).strategy == "sorted"


MEASURED = {
    # R, D, n; float32, float16: the fastest of the three on an H200, or within 3 % of it, uniform or with a hot row
    (1048576, 64, 65536): ("atomic", "owner"),
    (1048576, 64, 2048): ("atomic", "sorted"),
    (1392598, 10, 27206): (None, "atomic"),
    (300000, 24, 30000): (None, "atomic"),
    (452, 3524, 3): ("atomic", None),
    (17, 774, 3): ("owner", None),
    (1000003, 33, 5000): ("atomic", None),
    (262144, 128, 524288): ("atomic", "owner"),
    (50257, 768, 16384): ("atomic", "owner"),
    (50257, 768, 1024): (None, "sorted"),
    (32000, 4096, 2048): ("sorted", "sorted"),
    (13403, 896, 3568): (None, "sorted"),
    (834, 5120, 1208): (None, "sorted"),
    (2146, 5120, 1555): (None, "sorted"),
    (32000, 4096, 32000): ("owner", "owner"),
    (128256, 4096, 16384): ("owner", "owner"),
    (201088, 2880, 32768): ("owner", "owner"),
    (2048, 4096, 4096): ("owner", None),
    (8192, 16384, 16384): ("owner", "owner"),
    (256, 512, 512): ("owner", "owner"),
    (1024, 2048, 2048): ("atomic", "sorted"),
    (1504, 2016, 3148): (None, "atomic"),
    (553, 4449, 479): (None, "sorted"),
    (12, 12, 22969): (None, "atomic"),  # two thousand of each row
    (70, 8, 51038): (None, "atomic"),
    (62, 768, 29185): (None, "atomic"),
    (3457, 3584, 48254): (None, "owner"),
}


@pytest.mark.parametrize("size", MEASURED, ids=str)
def test_a_plan_takes_the_strategy_that_was_fastest(size):
    for dtype, fastest in zip((torch.float32, torch.float16), MEASURED[size], strict=True):
        if fastest is not None:
            assert scatter_config(size, dtype, (9, 0)).strategy == fastest


def test_owners_of_few_rows_and_many_updates_are_as_many_as_can_be():
    few, many = (scatter_config((R, 2048, 60000), torch.bfloat16, (9, 0)) for R in (14, 4000))
    assert few.strategy == many.strategy == "owner"
    assert few.steps * few.rows * few.block < many.steps * many.rows * many.block


def test_narrow_halves_have_small_tiles_and_long_pieces():
    """Where a few rows have most of some thousand updates, a tile waits for the longest stretch that begins in it."""
    plan = scatter_config
    half, single = torch.float16, torch.float32
    for dtype, D, tile, chunk in ((half, 77, 256, 32), (half, 300, 1024, 16), (single, 77, 1024, 16)):
        found = plan((200_000, D, 2000), dtype, (9, 0), strategy="sorted")
        assert (found.grouping, found.rows * found.block, found.chunk) == ("count", tile, chunk)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hot_row_among_others_is_cut_into_pieces(strategy, device):
    # Longer than several chunks, beginning and ending in the middle of one, between rows of one update.
    n = 200 if device == "cpu" else 5000
    row = torch.arange(n, device=device)
    k = torch.where((row > n // 7) & (row < n - 5), 9, row % 8 + 1)[:, None]
    u = rough(generator(1, device), (n, 50), torch.float32)
    inputs = (12, 50), k, u
    assert right(inputs, masked(*inputs, strategy=strategy))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("law", ["equal", "zipf", "masked"])
def test_zeros_are_written_beside_the_sort(law, rows, device, monkeypatch):
    plan = scatter_config
    monkeypatch.setattr(scatter, "_config", lambda *a, **k: plan(*a, **k)._replace(rows=rows, chunk=8))
    inputs = made(law, device, n=50)
    poison([inputs[2].new_empty(inputs[0])])
    assert right(inputs, masked(*inputs, strategy="sorted"))


def test_what_memory_held_before_names_no_row(device, monkeypatch):
    """Starts of rows without updates are never written: there may stand what looks like a start."""
    empty, pieces = torch.empty, []

    def held(*shape, **options):
        memory = empty(*shape, **options)
        if memory.dtype == torch.uint8:  # a piece of memory for all of them
            pieces.append(memory.view(torch.int32).random_(0, 50))
        return memory

    monkeypatch.setattr(torch, "empty", held)
    for seed in range(3):
        inputs = made("uniform", device, R=300, n=50, seed=seed)
        poison([inputs[2].new_empty(inputs[0])])
        assert right(inputs, masked(*inputs, strategy="sorted")) and len(pieces) == seed + 1


def test_a_wrong_shared_index_of_old_is_caught(device):
    """It took index i mod 128: right up to 128 updates, and not seen by a page that compared nothing."""
    for n, fine in ((128, True), (150, False)):
        inputs = made("none masked", device, n=n)
        shape, k, u = inputs
        wrong = k[torch.arange(n, device=device) % 128]
        assert right(inputs, fusebook.masked_scatter_nd_eager(shape, wrong, u)) is fine


def test_sums_of_half_types_are_float32(device):
    n = 4096 if device == "cuda" else 600
    u = torch.full((n, 8), 1.0, dtype=torch.float16, device=device)
    u[0] = 2048.0  # float16 cannot add one to it
    k = torch.zeros(n, 1, dtype=torch.int64, device=device)
    for strategy in STRATEGIES:
        y = masked((2, 8), k, u, strategy=strategy)
        assert torch.equal(y[0], torch.full((8,), 2047.0 + n, device=device).half())


# Indices --------------------------------------------------------------------------------------------------------------


def test_negative_indices_count_from_the_end_and_the_masked_value_does_not(device):
    u = torch.arange(1.0, 5.0, device=device)[:, None].expand(4, 2)
    k = torch.tensor([[-2], [-1], [0], [3]], device=device)
    assert plain((4, 2), k, u)[:, 0].tolist() == [3.0, 0.0, 1.0, 6.0]
    assert masked((4, 2), k, u)[:, 0].tolist() == [3.0, 0.0, 1.0, 4.0]
    assert masked((4, 2), k, u, masked_value=-2)[:, 0].tolist() == [3.0, 0.0, 0.0, 6.0]
    assert masked((4, 2), k, u, masked_value=0)[:, 0].tolist() == [0.0, 0.0, 1.0, 6.0]


def test_a_row_is_masked_when_any_component_is(device):
    k = torch.tensor([[0, 1], [-1, 1], [2, -1], [1, -2]], device=device)
    u = torch.ones(4, 3, device=device)
    want = torch.zeros(3, 4, 3, device=device)
    want[0, 1] = want[1, 2] = 1
    assert torch.equal(masked((3, 4, 3), k, u), want)


@pytest.mark.parametrize("k", range(6))
def test_any_number_of_components(k, device):
    """As index_put_ does; none names the whole output."""
    shape = (2, 3, 2, 2, 3)
    rng = generator(k, device)
    indices = torch.stack(
        [torch.randint(-s, s, (4, 5), generator=rng, device=device) for s in shape[:k]], -1
    ) if k else torch.zeros(4, 5, 0, dtype=torch.int64, device=device)  # fmt: skip
    updates = torch.randn(4, 5, *shape[k:], generator=rng, device=device)
    want = torch.zeros(shape, device=device)
    if k:
        want.index_put_(tuple(indices.unbind(-1)), updates, accumulate=True)
    else:
        want = updates.sum((0, 1))
    for strategy in STRATEGIES:
        got = plain(shape, indices, updates, strategy=strategy)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(plain(shape, indices.int(), updates, strategy=strategy), want)


@pytest.mark.parametrize("n", [5, 40])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_components_take_no_launch_and_change_no_bits(strategy, n, device, monkeypatch):
    """Three components of an index are one number where they are read, or before a sort that reads them often."""
    rng = generator(n, device)
    row = torch.randint(600, (n, 1), generator=rng, device=device)
    components = torch.cat([row // 30, row // 6 % 5 - 5, row % 6], -1)
    updates, wanted, launch = torch.randn(n, 7, generator=rng, device=device), [], scatter.launch
    monkeypatch.setattr(scatter, "launch", lambda f, *a, **k: wanted.append(f.__name__) or launch(f, *a, **k))
    one = plain((600, 7), row, updates, check=False, strategy=strategy)
    several = plain((20, 5, 6, 7), components, updates, check=False, strategy=strategy)
    half = len(wanted) // 2
    assert wanted[:half] == wanted[half:] and half
    monkeypatch.setitem(scatter._FOLDING, "count", n - 1)
    apart = plain((20, 5, 6, 7), components.int(), updates, check=False, strategy=strategy)
    assert ("_scatter_nd_keys" in wanted) == (strategy == "sorted")
    for got in (several, apart):
        if strategy == "sorted":
            assert torch.equal(got.view(600, 7), one)
        torch.testing.assert_close(got.view(600, 7), one)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unchecked_indices_out_of_range_write_nowhere(strategy, device):
    k = torch.tensor([[0], [7], [-8], [2**40], [6], [-(2**62)]], device=device)
    u = torch.ones(6, 3, device=device)
    y = plain((7, 3), k, u, check=False, strategy=strategy)
    assert y[:, 0].tolist() == [1.0, 0, 0, 0, 0, 0, 1.0]


def test_checked_indices_out_of_range_are_named_by_their_position(device):
    k = torch.zeros(2, 3, 2, dtype=torch.int64, device=device)
    u = torch.ones(2, 3, 4, device=device)
    k[1, 2, 1] = 6  # the first number that is out of range
    with pytest.raises(IndexError, match=r"got 6 at indices\[1, 2, 1\]"):
        plain((5, 6, 4), k, u)
    k[1, 2, 1] = 9
    with pytest.raises(IndexError, match=r"got 9 at indices\[1, 2, 1\]"):
        plain((5, 6, 4), k, u)
    with pytest.raises(IndexError, match=r"from -6 to 5 in component 1 .* only -1 is masked"):
        masked((5, 6, 4), k, u)
    assert masked((5, 6, 4), k, u, masked_value=9)[0, 0, 0].item() == 5  # what is masked may be out of range
    k[1, 2, 0] = -1  # so may what stands beside what is masked
    assert masked((5, 6, 4), k, u)[0, 0, 0].item() == 5
    k[1, 2, 0] = 0
    k[0, 0, 0] = -6
    with pytest.raises(IndexError, match=r"got -6 at indices\[0, 0, 0\]"):
        plain((5, 6, 4), k, u)


def test_what_is_masked_is_not_read(device):
    u = torch.full((3, 2), float("nan"), device=device)
    k = torch.full((3, 1), -1, device=device)
    for strategy in STRATEGIES:
        assert torch.equal(masked((4, 2), k, u, strategy=strategy), torch.zeros(4, 2, device=device))


# Input ----------------------------------------------------------------------------------------------------------------


def test_a_shape_may_be_a_tensor_on_the_host(device):
    k, u = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.ones(1, 2, device=device)
    assert plain(torch.tensor([3, 2]), k, u).shape == (3, 2)
    assert plain(torch.Size([3, 2]), k, u).shape == (3, 2)
    assert plain([3, 2], k, u).shape == (3, 2)


def test_integers_may_be_of_numpy(device):
    k, u = torch.tensor([[0], [1], [2]], device=device), torch.ones(3, 2, device=device)
    want = masked((3, 2), k, u, masked_value=1)
    assert torch.equal(masked((3, 2), k, u, masked_value=np.int64(1)), want)
    assert torch.equal(masked(tuple(np.array([3, 2])), k, u, masked_value=1), want)
    assert torch.equal(fusebook.embedding_backward(u, k[:, 0], 3, padding_idx=np.int32(1)), want)


REFUSED = {
    "shape of two axes": (TypeError, "one axis", dict(shape=torch.ones(1, 2, dtype=torch.int64))),
    "shape of more bytes than there are addresses": (ValueError, r"less than 2\*\*63 bytes", dict(shape=(2**62, 2))),
    "shape that no memory holds": (torch.OutOfMemoryError, "that memory on .* can hold", dict(shape=(2**58, 2))),
    "negative size": (ValueError, "sizes from 0 up", dict(shape=(-3, 2))),
    "empty shape": (ValueError, "at most 0 components", dict(shape=())),
    "indices of bools": (TypeError, "int64 or int32", dict(indices=torch.zeros(4, 1, dtype=torch.bool))),
    "indices is a number": (ValueError, r"shape \[..., k\], got \[\]", dict(indices=torch.tensor(1))),
    "k beyond the rank": (ValueError, "at most 2 components", dict(indices=torch.zeros(4, 3, dtype=torch.int64))),
    "updates too wide": (ValueError, r"updates of shape \[4, 2\]", dict(updates=torch.ones(4, 3))),
    "updates too few": (ValueError, r"updates of shape \[4, 2\]", dict(updates=torch.ones(3, 2))),
    "reduction max": (NotImplementedError, "not implemented", dict(reduction="max")),
    "reduction none": (NotImplementedError, "not implemented", dict(reduction="none")),
}


@pytest.mark.parametrize(("error", "message", "changed"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_in_one_sentence(error, message, changed, device):
    given = {"shape": (3, 2), "indices": torch.zeros(4, 1, dtype=torch.int64), "updates": torch.ones(4, 2)} | changed
    for name in ("indices", "updates"):
        if isinstance(given[name], torch.Tensor) and given[name].device.type == "cpu":
            given[name] = given[name].to(device)
    with pytest.raises(error, match=message) as raised:
        masked(given.pop("shape"), given.pop("indices"), given.pop("updates"), **given)
    assert "\n" not in str(raised.value)


# Gradients and transformations ----------------------------------------------------------------------------------------


def test_gradients_agree_with_differences(device):
    k = torch.tensor([[[0], [-1]], [[2], [0]], [[-3], [7]]], device=device)
    u = torch.randn(3, 2, 4, dtype=torch.float64, device=device, requires_grad=True)
    for function, value in ((masked, -1), (masked, 2)):
        call = lambda u, f=function, v=value: f((5, 4), k, u, masked_value=v, check=False)  # noqa: E731
        assert torch.autograd.gradcheck(call, u, nondet_tol=1e-12, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, u, nondet_tol=1e-12, fast_mode=True)


def test_gradient_of_components_is_a_gather(device):
    k = torch.tensor([[0, 1], [-1, 3], [1, -2], [1, 9]], device=device)
    u = torch.randn(4, 3, device=device, requires_grad=True)
    dy = torch.randn(2, 4, 3, device=device)
    masked((2, 4, 3), k, u, check=False).backward(dy)
    nothing = torch.zeros_like(dy[0, 0])
    assert torch.equal(u.grad, torch.stack([dy[0, 1], nothing, dy[1, 2], nothing]))


def test_the_gather_of_gradients_is_registered_whole(device):
    k = torch.tensor([[0], [-1], [2]], device=device)
    torch.library.opcheck(torch.ops.fusebook.gather_nd, (torch.randn(5, 4, device=device, requires_grad=True), k, None))


def test_under_compile_the_check_is_left_out(device):
    k = torch.tensor([[0], [9], [2]], device=device)
    u = torch.randn(3, 4, device=device)
    torch.compiler.reset()
    compiled = torch.compile(lambda k, u: masked((5, 4), k, u) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(k, u), masked((5, 4), k, u, check=False) * 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("size", [(32000, 4096, 2048), (1024, 2048, 2048)])
def test_kernels_that_overlap_wait_for_each_other(size, law):
    """Kernels that start before the one ahead has ended, a hundred times, and in a graph, into poisoned memory."""
    R, D, n = size
    inputs = made(law, "cuda", R=R, D=D, n=n)
    for strategy in ("sorted", "atomic"):
        run = lambda s=strategy: masked(*inputs, check=False, strategy=s)  # noqa: E731
        first = run()
        assert right(inputs, first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
            copied = y.clone()  # what comes next in the stream must find all of it
        for _ in range(100):
            y.fill_(float("nan"))
            graph.replay()
            poison([first])
            got = run().clone()
            if strategy == "sorted":
                assert torch.equal(copied, first) and torch.equal(got, first)
        assert right(inputs, copied) and right(inputs, got)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_beyond_two_to_the_31_elements(strategy, room):
    room(40 * 2**30)
    R, D = 2**19 + 3, 4096  # the last rows begin beyond 2**31
    k = torch.tensor([[R - 1], [0], [R - 1], [R - 2]], device="cuda")
    u = torch.randn(4, D, device="cuda", dtype=torch.float16)
    y = masked((R, D), k, u, strategy=strategy)
    want = torch.stack([u[1], u[0] + u[2], u[3]])
    torch.testing.assert_close(y[[0, R - 1, R - 2]], want, atol=1e-2, rtol=1e-2)
    assert not y[1 : R - 2 : 4099].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", ["sorted", "owner"])
def test_more_rows_than_int32_can_number(strategy, room):
    room(64 * 2**30)
    R = 2**31 + 7
    k = torch.tensor([[R - 1], [0], [R - 1], [R - 2]], device="cuda").repeat(300, 1)  # more than are simply read
    u = torch.ones(len(k), 1, device="cuda", dtype=torch.float16)
    y = masked((R, 1), k, u, strategy=strategy)[:, 0]
    assert y[[0, R - 1, R - 2, R - 3]].tolist() == [300, 600, 300, 0]
    assert int(torch.count_nonzero(y)) == 3


def test_the_gradient_of_an_embedding_is_torchs(device):
    dy, k, rows = EMBEDDING_BACKWARD.make(generator(0, device), torch.float32, R=11, D=6, n=40, law="zipf")
    want = torch.ops.aten.embedding_dense_backward(dy, k, rows, -1, False)
    torch.testing.assert_close(fusebook.embedding_backward(dy, k, rows), want)
    want = torch.ops.aten.embedding_dense_backward(dy, k, rows, 3, False)
    torch.testing.assert_close(fusebook.embedding_backward(dy.view(4, 10, 6), k.view(4, 10), rows, padding_idx=3), want)
    with pytest.raises(TypeError, match="dy to be a torch.Tensor"):
        fusebook.embedding_backward(None, k, rows)


@pytest.mark.parametrize("strategy", [None, "atomic", "sorted", "owner"])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_a_padding_row_is_counted_from_either_end_and_gets_nothing(kind, strategy, device):
    looked = torch.tensor([[0, 4, 4], [2, 4, 0]], device=device, dtype=kind)
    dy = torch.arange(1.0, 13.0, device=device).view(2, 3, 2)
    for padding in (-1, 4, -5, 0, np.int64(-3)):
        table = torch.zeros(5, 2, device=device, requires_grad=True)
        torch.nn.functional.embedding(looked, table, padding_idx=int(padding)).backward(dy)
        for named in (looked, looked - 5):  # every lookup from the start, and from the end
            got = fusebook.embedding_backward(dy, named, 5, padding_idx=padding, strategy=strategy)
            assert torch.equal(got, table.grad)
    nan = torch.where((looked == 4)[..., None], float("nan"), dy)
    assert fusebook.embedding_backward(nan, looked, 5, padding_idx=-1, strategy=strategy).isfinite().all()


@pytest.mark.parametrize(("padding", "rows"), [(5, 5), (7, 5), (-6, 5), (0, 0), (-1, 0)])
def test_a_padding_row_outside_of_the_table_is_refused(padding, rows, device):
    with pytest.raises(ValueError, match=f"padding_idx from {-rows} to {rows - 1}, got {padding}; give a row"):
        fusebook.embedding_backward(
            torch.ones(4, 2, device=device), torch.zeros(4, dtype=torch.int64, device=device), rows, padding_idx=padding
        )


def test_the_card_draws_what_it_says():
    for law in ("uniform", "zipf", "equal", "masked"):
        _, k, _ = MASKED_SCATTER_ND.make(generator(0, "cpu"), torch.float32, R=20, D=1, n=2000, law=law)
        count = torch.bincount(k[:, 0] + 1, minlength=21)
        assert {"equal": count.max() == 2000, "masked": count[0] == 2000}.get(law, count[1:].min() > 0)
    with pytest.raises(ValueError, match="none of uniform"):
        MASKED_SCATTER_ND.make(generator(0, "cpu"), torch.float32, R=20, D=1, n=2, law="pareto")
    assert bench.points(MASKED_SCATTER_ND, "4x5x6") == [("4x5x6", {"R": 4, "D": 5, "n": 6, "law": "uniform"})]


# What is cut, counted and numbered


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n", [16, 40, 64, 300])
def test_a_row_of_any_length_among_others(n, strategy, device):
    """On both sides of a multiple of all chunks, wherever it begins; of more rows than one program makes spans of."""
    R = 3000 if n == 300 else 12
    for length, before in ((1, 0), (8, 3), (9, 0), (9, 8), (33, 3), (33, 0)):
        place = torch.arange(n, device=device)
        row = torch.where((place >= before) & (place < before + length), 1, 2 + place * 7 % (R - 2))[:, None]
        inputs = (R, 6), row, rough(generator(length, device), (n, 6), torch.float32)
        poison([inputs[2].new_empty(inputs[0])])
        assert right(inputs, masked(*inputs, strategy=strategy)), f"{length} updates behind {before}"


@pytest.mark.parametrize("n", [1, 8, 9, 33, 65, 161])
def test_all_updates_of_one_row(n, device):
    """The last of them may be all that stands behind a multiple of the chunk."""
    inputs = (
        (3, 6),
        torch.ones(n, 1, dtype=torch.int64, device=device),
        rough(generator(n, device), (n, 6), torch.float32),
    )
    for strategy in STRATEGIES:
        assert right(inputs, masked(*inputs, strategy=strategy))


def test_pieces_of_wide_rows_are_counted_for_each_tile_of_columns(device):
    """A row of more columns than a program takes, and of more updates."""
    inputs = (3, 16400), torch.ones(20, 1, dtype=torch.int64, device=device), torch.ones(20, 16400, device=device)
    y = masked(*inputs, strategy="sorted")
    assert torch.equal(y[1], torch.full_like(y[1], 20)) and not y[::2].any()


def test_row_numbers_times_updates_may_be_beyond_int32(device):
    """Sorted by counting, each update has one number that is made of both."""
    R, n = 2**23 + 2**20, 250
    rows = torch.randperm(R, generator=torch.Generator().manual_seed(0))[:n].sort(descending=True)[0].to(device)
    u = torch.arange(1.0, n + 1, device=device)
    assert (R + 2) * n >= 2**31
    y = masked((R, 1), rows[:, None], u[:, None], strategy="sorted")[:, 0]
    assert torch.equal(y[rows], u) and y.count_nonzero() == n
