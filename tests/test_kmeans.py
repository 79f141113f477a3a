"""What is special to k-means: ties, doubt, NaN, empty clusters, arrays in and out."""

import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import compiling
import fusebook
import strategies
import warm
from fusebook.cards import kmeans as card
from fusebook.cards.kmeans import KMEANS_ASSIGN
from fusebook.kernels import kmeans as module
from fusebook.kernels._call import OPERATORS, uncached
from fusebook.kernels.kmeans import Config, kmeans_assign_eager, kmeans_update_eager
from fusebook.measure.inputs import generator

assign, update, cluster = fusebook.kmeans_assign, fusebook.kmeans_update, fusebook.kmeans
step = OPERATORS["kmeans_step"]


def drawn(law, device, n=150, d=20, k=40, dtype=torch.float32, seed=0):
    return card._draw(generator(seed, device), dtype, n, d, k, law)


def planted(device, n=100, seed=0):
    """Three clusters that are no mirror image of each other when the axes change places."""
    rng = generator(seed, device)
    middle = torch.tensor([[5.0, 1.0], [0.0, 9.0], [-8.0, 3.0]], device=device)
    points = [torch.randn(n + 40 * j, 2, generator=rng, device=device) + middle[j] for j in range(3)]
    return torch.cat(points), middle


def nearest(points, centres):
    """By differences in float64, the lowest of equals."""
    return card._reference_assign(points.double(), centres.double(), torch.int64)


# Assignment -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["near", "far", "rough", "blobs"])
@pytest.mark.parametrize(
    ("n", "d", "k"), [(150, 20, 40), (40, 20, 140), (6, 5000, 17)], ids=["tile", "product", "wide"]
)
def test_labels_are_those_of_differences_however_far_the_points(law, n, d, k, device):
    points, centres = drawn(law, device, n=n, d=d, k=k)
    got = assign(points, centres)
    distance = card._distances(points.double(), centres.double(), got)
    least = card._distances(points.double(), centres.double(), nearest(points, centres))
    assert ((distance - least) / least).max() < 1e-6


def test_a_plain_product_is_wrong_where_ours_is_right(device):
    """What screening is for: |c|**2 - 2 x.c, as everybody writes it, cancels far from the origin."""
    points, centres = drawn("far", device, n=400)
    exact = nearest(points, centres)
    plain = card._product_assign(points, centres, torch.int64)
    ours = assign(points, centres)
    inputs = points.double(), centres.double(), torch.int64
    least, off, kept = (card._meaning_assign(inputs, (labels,)) for labels in (exact, plain, ours))
    assert (off / least - 1).max() > 1e-5
    assert (kept / least - 1).max() < 1e-6


@pytest.mark.parametrize("d", [3, 4, 8])
def test_every_coordinate_is_its_own(d, device):
    """Points that are loaded side by side are told apart: each centre lies on an axis of its own."""
    points = 5 * torch.eye(d, device=device).repeat(40, 1) + torch.randn(40 * d, d, device=device) / 8
    assert assign(points, torch.eye(d, device=device)).tolist() == [*range(d)] * 40


def test_what_pads_the_centres_is_never_the_nearest(device):
    """All lie far from their mean, where the points are, and where a zero would be, which alone fills a tile."""
    half = torch.randn(79, 20, device=device)
    half *= torch.linspace(50, 60, 79, device=device)[:, None] / half.norm(dim=1, keepdim=True)
    centres = torch.cat([half, -half, 1.1 * half[:1]])
    points = torch.randn(20, 20, device=device)
    assert torch.equal(assign(points, centres), nearest(points, centres))


def test_neighbours_among_centres_are_told_apart(device):
    """Each centre has a twin beside it, so near that a product in TF32 cannot tell which is nearer."""
    one = torch.randn(70, 20, device=device)
    centres = torch.stack([one, one + 1e-4 * torch.randn(70, 20, device=device)], 1).flatten(0, 1)
    points = one[:40] + 0.1 * torch.randn(40, 20, device=device)
    assert torch.equal(assign(points, centres), nearest(points, centres))


def test_one_centre_is_the_nearest_to_all(device):
    points, _ = drawn("near", device, n=40, d=2, k=2)
    assert fusebook.kmeans_assign(points, points[:1]).tolist() == [0] * 40


@pytest.mark.parametrize("d", [2, 3, 20])
def test_the_lowest_of_equally_near_centres_wins(d, device):
    points, centres = drawn("near", device, n=60, d=d, k=5)
    twice = torch.cat([centres, centres, centres])
    assert torch.equal(assign(points, twice), nearest(points, centres))
    equal = assign(torch.zeros(3, d, device=device), torch.ones(17, d, device=device))
    assert equal.tolist() == [0, 0, 0]


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_what_a_product_may_lose_is_more_than_rounding_loses(precision):
    """The bound of the screen against products of factors that are rounded to TF32, or cut, as tensor cores do."""
    rng = generator(3, "cpu")
    for d in (16, 64, 300):
        x, c = (torch.randn(200, d, generator=rng) for _ in range(2))

        def cut(v):
            return (v.view(torch.int32) & -(2**13)).view(torch.float32)

        def rounded(v):
            return cut((v.view(torch.int32) + 2**12).view(torch.float32))

        keep = rounded if precision == "tf32" else cut
        high = keep(x).double(), keep(c).double()
        got = (high[0] * high[1]).sum(1)
        if precision == "tf32x3":
            low = cut(x - cut(x)).double(), cut(c - cut(c)).double()
            got += (high[0] * low[1] + low[0] * high[1]).sum(1)
        lost = (got - (x.double() * c.double()).sum(1)).abs()
        assert (lost <= module._loose(precision, d) * x.norm(dim=1) * c.norm(dim=1)).all()


def test_a_product_that_rounding_turns_around_is_in_doubt(device):
    """Every coordinate is rounded to TF32 so that the farther of two centres looks nearer, by half of the bound."""
    d = 64
    sign = torch.where(torch.arange(d, device=device) % 2 == 0, 1.0, -1.0)
    halfway = 1 + 2.0**-11  # between two numbers of TF32
    point = halfway - sign * 2.0**-20  # with the sign of the nearer centre rounded down, against it up
    point[0] += 2.0**-8
    assert by(Config("screen", 16, 16, d), point.repeat(40, 1), torch.stack([sign, -sign])).tolist() == [0] * 40


def test_of_candidates_that_are_equally_near_the_lowest_wins_and_no_other_centre_counts(device):
    """In doubt between centres 3, 9 and 25 of 30, in two groups of eight that are read and two that are not."""
    points = torch.zeros(5, 200, device=device)
    centres = torch.full((30, 200), 50.0, device=device)
    centres[[3, 9, 25]] = 1.0
    assert assign(points, centres).tolist() == [3] * 5
    centres[[9, 25], 7] -= 2.0**-10
    assert assign(points, centres).tolist() == [9] * 5


def test_points_with_nan_get_label_0_and_a_centre_with_nan_is_nearest_to_none(device):
    for d in (2, 20):
        points, centres = drawn("near", device, n=40, d=d, k=4)
        points[7, 1], points[9, 0] = math.nan, math.inf
        want = nearest(points, centres)
        assert want[7] == 0 and want[9] == 0
        assert torch.equal(assign(points, centres, check=False), want)
        spoilt = centres.clone()
        spoilt[2, 0] = math.nan
        assert not (assign(points[:5], spoilt, check=False) == 2).any()


@pytest.mark.parametrize(("what", "value"), [("points", math.nan), ("points", -math.inf), ("centres", math.inf)])
def test_values_that_are_not_finite_are_named(what, value, device):
    given = dict(zip(("points", "centres"), drawn("near", device, n=30, d=3, k=4), strict=True))
    given[what][2, 1] = value
    with pytest.raises(ValueError, match=rf"kmeans_assign: expected finite {what}, got .* at {what}\[2, 1\]"):
        assign(**given)


def test_large_finite_values_pass_the_check(device):
    x = torch.full((4, 2), 1e308, dtype=torch.float64, device=device)
    assert assign(x, torch.zeros(1, 2, dtype=torch.float64, device=device)).tolist() == [0, 0, 0, 0]


# The update -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["direct", "ones", "sorted"])
def path(request, monkeypatch):
    """How points find their centres where the sums of all do not fit in registers."""
    if request.param != "direct":
        monkeypatch.setattr(module, "_direct_pays", lambda *_: False)
        monkeypatch.setattr(module, "_ones_pay", lambda *_: request.param == "ones")
    with uncached():
        yield


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("d", "k"), [(2, 2), (20, 5)])
def test_an_empty_cluster_keeps_its_centre_and_has_none_without_one(d, k, device):
    points, old = drawn("near", device, n=30, d=d, k=k)
    labels = torch.zeros(30, dtype=torch.int64, device=device)
    kept = update(points, labels, k, centres=old)
    assert torch.equal(kept[1:], old[1:])
    assert torch.allclose(kept[0], points.mean(0), atol=1e-6)
    assert update(points, labels, k)[1:].isnan().all()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("d", "k"), [(2, 2), (20, 5)])
def test_labels_out_of_range_are_left_out_unless_checked(d, k, device):
    points, _ = drawn("near", device, n=40, d=d, k=1)
    labels = torch.arange(40, device=device) % min(k, 5)
    astray = labels.clone()
    astray[3], astray[4], astray[5], astray[6] = -1, k, k + 256, -(2**40)
    live = torch.ones(40, dtype=torch.bool, device=device)
    live[3:7] = False
    got, want = update(points, astray, k, check=False), update(points[live], labels[live], k)
    assert torch.allclose(got, want, equal_nan=True, atol=1e-6)
    with pytest.raises(IndexError, match=rf"expected labels from 0 to {k - 1}, got -1 at labels\[3\]"):
        update(points, astray, k)
    labels[7] = k
    with pytest.raises(IndexError, match=rf"expected labels from 0 to {k - 1}, got {k} at labels\[7\]"):
        update(points, labels, k)


def test_sums_of_parts_end_with_the_parts(device):
    """Of five parts, by twos: the third group has one, and nothing that stands behind."""
    memory = torch.full((8, 3), math.nan, dtype=torch.float64, device=device)
    memory[:5] = torch.arange(15.0, device=device).view(5, 3)
    groups = torch.empty(3, 3, dtype=torch.float64, device=device)
    module._kmeans_groups[(3,)](groups, memory, 5, 3, 2, BLOCK=2, BLOCK_W=4)
    assert groups.tolist() == [[3, 5, 7], [15, 17, 19], [12, 13, 14]]


@pytest.mark.usefixtures("path")
def test_labels_in_range_count_even_where_k_is_beyond_their_dtype(device):
    points, _ = drawn("near", device, n=60, d=9, k=1)
    labels = (torch.arange(60, device=device) * 4 + 19).to(torch.uint8)  # to 255
    got, want = update(points, labels, 260, check=False), kmeans_update_eager(points, labels, 260)
    assert torch.allclose(got, want, equal_nan=True, atol=1e-6)
    astray = labels.to(torch.int32)
    astray[0] = 256  # beyond k = 256, and 0 in eight bits
    assert update(points, astray, 256, check=False)[0].isnan().all()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", module.DTYPES)
def test_a_point_that_is_not_finite_spoils_its_centre_alone(dtype, device):
    points = torch.randn(300, 20, generator=generator(0, device), device=device).to(dtype)
    labels = torch.arange(300, device=device) % 90 - 3  # some are out of range
    points[5, 3], points[8, 19], points[70, 4], points[2] = math.nan, math.inf, -math.inf, math.nan
    got = update(points, labels, 80, check=False)
    real = (labels >= 0) & (labels < 80)
    want = kmeans_update_eager(points[real].double(), labels[real], 80)
    exact = 2e-3 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(got.double(), want, rtol=exact, atol=exact, equal_nan=True)


@pytest.mark.parametrize("n", [1, 3, 16])
def test_points_much_fewer_than_centres(n, device, monkeypatch):
    """A program takes several centres at once, but no more than leave room for a point of each."""
    k, capability = 3000, module.gpu(torch.device(device))[0]
    monkeypatch.setattr(module, "gpu", lambda _: (capability, 2))
    points = torch.randn(n, 130, generator=generator(0, device), device=device)
    labels = torch.arange(n, device=device) * 7 % k
    got, want = update(points, labels, k), kmeans_update_eager(points, labels, k)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_offsets_of_points_that_are_multiplied_by_ones_fit_32_bits():
    assert module._ones_pay(2**30 - 1, 16, 16, torch.float16)
    assert not module._ones_pay(2**31 - 1, 16, 16, torch.float16), "a program's end is beyond the last point"


def test_keys_hold_the_number_that_stands_for_labels_out_of_range():
    narrow = {255: torch.uint8, 256: torch.int16, 2**15 - 1: torch.int16, 2**15: torch.int32, 2**31 - 1: torch.int32}
    assert {k: module._narrowest(k) for k in narrow} == narrow


@pytest.mark.parametrize("dtype", module.DTYPES)
@pytest.mark.parametrize(
    ("n", "d", "k", "parts"),
    [(1, 1, 1, 1), (2, 20, 7, 1), (5, 3, 40, 1), (130, 33, 9, 1), (3, 300, 5, 1), (1024, 2, 2, 1), (2600, 20, 3, 3)],
)
def test_a_small_problem_is_one_launch_or_two(n, d, k, parts, dtype, device):
    """Whatever was in the output before; points and labels lie across, and the last centre has none of them."""
    rng = generator(0, device)
    points = torch.randn(d, n, generator=rng, dtype=torch.float64, device=device).to(dtype).T
    near = torch.randint(max(1, k - 1), (n, 2), generator=rng, device=device)
    for label_dtype, old in ((torch.uint8, None), (torch.int32, points.new_ones(k, d)), (torch.int64, None)):
        labels, got = near.to(label_dtype)[:, 0], points.new_full((k, d), 77)
        with strategies.launched() as log:
            module._update_into(got, points, labels, k, old)
        assert [name for name, *_ in log] == ["_kmeans_direct", "_kmeans_means"][: min(parts, 2)]
        assert log[0][1][2] == parts
        want = kmeans_update_eager(points.double(), labels, k)
        want = want if old is None else want.nan_to_num(1)
        exact = {torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
        torch.testing.assert_close(got.double(), want, rtol=exact, atol=exact, equal_nan=True)
        again = points.new_full((k, d), -5)
        module._update_into(again, points, labels, k, old)
        assert torch.equal(got.nan_to_num(9), again.nan_to_num(9))


@pytest.mark.parametrize(("d", "k"), [(2, 3), (20, 3)])
def test_a_cluster_of_one_point_moves_there(d, k, device):
    points, old = drawn("near", device, n=9, d=d, k=k)
    labels = torch.tensor([0] * 8 + [2], device=device)
    assert torch.equal(update(points, labels, k, centres=old)[1:], torch.stack([old[1], points[8]]))


def test_a_gradient_that_is_asked_for_is_refused(device):
    points, centres = drawn("near", device, n=20, d=2, k=3)
    points.requires_grad_()
    labels = assign(points, centres)
    assert not labels.requires_grad
    new = update(points, labels, 3, centres=centres)
    with pytest.raises(NotImplementedError, match="kmeans_update: expected no gradient to be asked for"):
        new.sum().backward()
    with pytest.raises(NotImplementedError, match="kmeans: expected points and init that require no gradient"):
        cluster(points, 3)
    with torch.no_grad():
        assert not cluster(points, 3, max_iter=1).centres.requires_grad


def test_a_mean_of_many_halves_is_not_a_sum_in_halves(device):
    n = 200_000 if device == "cuda" else 5000
    points = torch.full((n, 2), 40.0, dtype=torch.float16, device=device)  # the sum is beyond float16
    labels = torch.zeros(n, dtype=torch.uint8, device=device)
    assert update(points, labels, 1).tolist() == [[40.0, 40.0]]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("law", ["all of one", "most of one", "a chunk each", "across chunks", "few have any"])
def test_labels_are_added_up_over_chunks(law, device):
    n, d, k = 700, 20, 9
    i = torch.arange(n)
    labels = {
        "all of one": torch.full((n,), 4),
        "most of one": torch.where(i % 10 == 0, i // 10 % k, 2),
        "a chunk each": (i // 64).clamp(max=k - 1),
        "across chunks": i * k // n,
        "few have any": torch.where(i < 640, 8, 3),
    }[law][torch.randperm(n, generator=torch.Generator().manual_seed(0))].to(device)
    points = torch.randn(n, d, generator=generator(0, device), device=device)
    sums = torch.zeros(k, d, dtype=torch.float64, device=device).index_add_(0, labels, points.double())
    counts = torch.bincount(labels, minlength=k)[:, None]
    torch.testing.assert_close(update(points, labels, k).double(), sums / counts, rtol=1e-5, atol=1e-6, equal_nan=True)


# The whole ------------------------------------------------------------------------------------------------------------


def test_planted_clusters_are_found_with_their_coordinates_in_place(device):
    """Centres with swapped axes would be far from all of these; on a symmetric example nobody could see it."""
    points, middle = planted(device)
    found = cluster(points, 3, tol=0)
    order = torch.cdist(middle, found.centres).argmin(1)
    assert (found.centres[order] - middle).abs().max() < 0.4
    assert torch.cdist(middle.flip(1), found.centres).min() > 2
    want = (points.double() - found.centres.double()[found.labels]).square().sum().item()
    assert found.inertia == pytest.approx(want, rel=1e-5)
    # The centres stand still: each is the mean of its points, bit for bit.
    assert torch.equal(step(points, found.centres, torch.int64)[1], found.centres)


@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_the_same_seed_gives_the_same_bits(init, device):
    points, _ = planted(device)
    a, b = (cluster(points, 3, init=init, seed=5) for _ in range(2))
    assert torch.equal(a.centres, b.centres) and torch.equal(a.labels, b.labels) and a[2:] == b[2:]


def test_every_first_centre_is_drawn_by_its_distance_wherever_it_lies(device):
    """In one of many blocks of points there is a second place, and nothing else has any distance."""
    points = torch.zeros(3 * module._SPREAD + 7, 2, device=device)
    far = 2 * module._SPREAD + 5
    points[far] = 3.0
    for seed in range(3):
        centres = module._plus_plus(points, 2, random.Random(seed))
        assert sorted(centres[:, 0].tolist()) == [0, 3]


def test_first_centres_keep_away_from_all_that_were_drawn_before(device):
    points = torch.tensor([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0]], device=device).repeat(50, 1)
    for seed in range(8):
        assert module._plus_plus(points, 3, random.Random(seed)).unique(dim=0).shape == (3, 2)


def test_the_tolerance_is_of_the_data_s_own_scale(device):
    generous = [cluster(planted(device)[0] * scale, 3, tol=0.5, seed=1) for scale in (1.0, 1024.0)]
    assert generous[0].iterations == generous[1].iterations
    assert generous[0].iterations < cluster(planted(device)[0], 3, tol=0, seed=1).iterations


def test_the_tolerance_is_of_a_coordinate_s_variance_wherever_the_data_lies(device):
    """Of all numbers together, the variance would be that of how far apart the axes lie."""
    points, _ = planted(device)
    here, there = (cluster(p, 3, init=p[:3], tol=1e-3) for p in (points, points + points.new_tensor([0.0, 512.0])))
    assert here.iterations == there.iterations > 1


def test_labels_are_those_of_the_centres_that_are_returned(device):
    points, _ = planted(device)
    found = cluster(points, 3, init=points[:3], max_iter=1)
    assert found.iterations == 1
    assert torch.equal(found.labels, nearest(points, found.centres))
    assert not torch.equal(found.labels, nearest(points, points[:3])), "else any labels would do"


def test_more_centres_than_a_byte_counts(device):
    points = torch.arange(257.0, device=device)[:, None]
    found = cluster(points, 257, init=points, max_iter=1)
    assert found.inertia == 0 and torch.equal(found.centres, points)


def test_scikit_learn_goes_the_same_way_from_the_same_start(device):
    sklearn = pytest.importorskip("sklearn.cluster")
    points, _ = planted(device)
    start = points[[0, 1, 2]]
    ours = cluster(points.cpu().numpy(), 3, init=start.cpu().numpy(), tol=0)
    theirs = sklearn.KMeans(3, init=start.cpu().numpy(), n_init=1, tol=0, algorithm="lloyd").fit(points.cpu().numpy())
    assert np.allclose(ours.centres, theirs.cluster_centers_, rtol=1e-4)
    assert np.array_equal(ours.labels, theirs.labels_)
    assert ours.inertia == pytest.approx(theirs.inertia_, rel=1e-5)


def test_points_that_are_all_equal_and_as_many_centres_as_points(device):
    same = cluster(torch.ones(5, 3, device=device), 3)
    assert same.inertia == 0 and same.labels.tolist() == [0] * 5
    each, _ = planted(device, n=2)
    assert cluster(each[:6], 6, init=each[:6]).inertia == 0


def test_arrays_give_arrays_and_are_not_changed(device):
    points, centres = (v.cpu().numpy() for v in drawn("near", device, n=50, d=3, k=4))
    points.flags.writeable = False
    labels = assign(points, centres, label_dtype=torch.int32)
    assert isinstance(labels, np.ndarray) and labels.dtype == np.int32
    want = nearest(torch.tensor(points), torch.tensor(centres)).numpy()
    assert np.array_equal(labels, want)
    assert np.array_equal(assign(points[::-1], centres), want[::-1])
    moved = update(points, labels, 4, centres=centres)
    assert isinstance(moved, np.ndarray) and moved.dtype == points.dtype
    found = cluster(points, 4, max_iter=2)
    assert isinstance(found.centres, np.ndarray) and isinstance(found.labels, np.ndarray) and found.iterations <= 2


def spread(scale, d=3):
    """Two clusters of 40 points, as arrays of float64: their labels do not depend on the scale."""
    rng = np.random.default_rng(0)
    return np.concatenate([rng.normal(0, 0.1, (40, d)), rng.normal(5, 0.1, (40, d))]) * scale


@pytest.mark.parametrize("init", ["given", "k-means++", "random"])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(np.float32, s) for s in (1e19, 1e30, 6e37, 1e-19, 1e-25, 1e-36)]
    + [(np.float64, s) for s in (1e160, 3e307, 1e-170, 1e-300)],
)
def test_clusters_are_found_at_every_scale_that_a_dtype_holds(dtype, scale, init):
    exact = spread(1.0)
    points = (exact * scale).astype(dtype)
    kept = points.copy()
    found = cluster(points, 2, init=points[[0, 40]].copy() if init == "given" else init, tol=0)
    labels = found.labels ^ found.labels[0]
    assert labels.tolist() == [0] * 40 + [1] * 40 and np.array_equal(points, kept)
    means = np.stack([exact[:40].mean(0), exact[40:].mean(0)])[[found.labels[0], 1 - found.labels[0]]]
    np.testing.assert_allclose(found.centres.astype(np.float64) / scale, means, rtol=1e-4, atol=1e-3)
    plain = cluster(exact, 2, init=exact[[0, 40]])
    with np.errstate(over="ignore"):
        size = float(np.float64(plain.inertia) * scale * scale)  # infinite in float64 for the largest scales
    assert found.inertia == pytest.approx(size, rel=1e-3)


def test_a_far_point_leaves_the_others_apart(device):
    points = torch.tensor(np.concatenate([spread(1.0), [[1e25] * 3]]), dtype=torch.float32, device=device)
    found = cluster(points, 3, init=points[[0, 40, 80]])
    assert found.labels.tolist() == [0] * 40 + [1] * 40 + [2]


@pytest.mark.parametrize("d", [2, 20, 200])
def test_magnitudes_that_a_check_accepts_give_the_nearest_and_others_are_refused(d):
    points = spread(1.0, d)
    points /= np.abs(points).max()
    limit = module._farthest(torch.float32, d)
    for scale in (0.999 * limit, 1.2e-16):
        given = (points * scale).astype(np.float32)
        centres = np.concatenate([given[[0, 40]]] * 20 + [given[5:9]])
        wide = ((given.astype(np.float64)[:, None] - centres.astype(np.float64)) ** 2).sum(-1)
        found = wide[np.arange(80), assign(given, centres)]
        np.testing.assert_allclose(found, wide.min(1), rtol=1e-3)
    for scale, said in ((1.001 * limit, "points of magnitudes up to"), (1e-16, "points or centres of magnitudes from")):
        given = (points * scale).astype(np.float32)
        with pytest.raises(ValueError, match=f"kmeans_assign: expected {said} .*; scale all of them"):
            assign(given, given[[0, 40]])


def test_sums_of_far_points_are_finite_or_refused():
    labels = np.zeros(9000, np.int64)
    for d in (2, 20):
        points = np.full((9000, d), 4.1e34, np.float32)
        np.testing.assert_allclose(update(points, labels, 1), points[:1], rtol=1e-5)
        with pytest.raises(ValueError, match="kmeans_update: expected points of magnitudes up to"):
            update(points * np.float32(1.1), labels, 1)


def test_masked_values_are_refused_and_arrays_without_any_taken():
    points = spread(1.0).astype(np.float32)
    masked, some = np.ma.masked_array(points, points > 5), np.ma.masked_array([0] * 80, [1] + [0] * 79)
    calls = [
        lambda: cluster(masked, 2),
        lambda: cluster(points, 2, init=masked[40:42]),
        lambda: assign(masked, points[:2]),
        lambda: assign(points, masked[40:42]),
        lambda: update(masked, np.zeros(80, np.int64), 2),
        lambda: update(points, some, 2),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"without masked values, got a masked array; leave out .* with filled\(\)"):
            call()
    whole = masked[~masked.mask.any(1)]
    assert len(cluster(whole, 2).labels) == len(whole) < 80
    assert np.array_equal(assign(np.ma.masked_array(points), points[:2]), assign(points, points[:2]))


def test_arrays_of_another_byte_order_are_computed_and_others_refused_in_a_sentence():
    points = spread(1.0)
    want = cluster(points, 2, init=points[[0, 40]])
    for kind in (">f8", ">f4", ">f2"):
        foreign = points.astype(kind)
        found = cluster(foreign, 2, init=foreign[[0, 40]])
        assert found.centres.dtype == np.dtype(kind).newbyteorder("=")
        np.testing.assert_allclose(found.centres, want.centres, rtol=1e-2)
        assert np.array_equal(assign(foreign, foreign[[0, 40]]), want.labels)
        np.testing.assert_allclose(update(foreign, want.labels.astype(">i8"), 2), want.centres, rtol=1e-2)
    for array in (
        points.astype(np.longdouble),
        points.astype(object),
        points.astype("U5"),
        np.zeros(80, [("x", "f4")]),
    ):
        if array.dtype == np.float64:  # a machine whose long double is that
            continue
        with pytest.raises(TypeError, match="expected points to be an array of numbers that torch has, got .*; use"):
            cluster(array, 2)


class Wrapper(torch.Tensor):
    """A tensor whose elements are in another one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("nothing is computed")


def test_points_without_memory_are_refused(device):
    points = drawn("near", device, n=20, d=3, k=2)[0]
    freed = points.clone()
    freed.untyped_storage().resize_(0)
    others = (
        Wrapper(points),
        torch._to_functional_tensor(points),
        torch._efficientzerotensor((20, 3), device=device),
        freed,
    )
    for other in others:
        with pytest.raises(TypeError, match="kmeans: expected points with memory for its elements, got .*; pass"):
            cluster(other, 2)
        with pytest.raises(TypeError, match="kmeans: expected init with memory for its elements, got .*; pass"):
            cluster(points, 20, init=other)


def test_no_bar_is_drawn_where_there_is_no_terminal():
    code = (
        "import fusebook, torch; "
        "x = torch.randn(50, 2, device='cuda' if torch.cuda.is_available() else 'cpu'); fusebook.kmeans(x, 3)"
    )
    end = warm.run("-c", code)
    assert end.returncode == 0 and end.stdout == "" and "kmeans" not in end.stderr


# What is refused ------------------------------------------------------------------------------------------------------


def refusals(device):
    x, c = drawn("near", device, n=10, d=3, k=4)
    labels = torch.zeros(10, dtype=torch.int64, device=device)
    many = torch.zeros(300, 3, device=device)
    yield TypeError, "expected points to be float16, float32 or float64, got torch.int64", lambda: assign(x.long(), c)
    yield TypeError, "expected points to be float16, .* got torch.bfloat16", lambda: assign(x.bfloat16(), c)
    yield (
        TypeError,
        "expected centres to be torch.float32 as points is, got torch.float64",
        lambda: assign(x, c.double()),
    )
    yield TypeError, "arrays only, or tensors only", lambda: assign(x.cpu().numpy(), c)
    yield ValueError, r"expected points of shape \[n, d\], got \[3\]", lambda: assign(x[0], c)
    yield (
        ValueError,
        r"expected centres of shape \[k > 0, 3\], .* where points is \[n, d\], got \[4, 2\]",
        lambda: assign(x, c[:, :2]),
    )
    yield (
        ValueError,
        r"expected centres of shape \[k > 0, 3\], .*got \[0, 3\]; give one at least",
        lambda: assign(x, c[:0]),
    )
    yield TypeError, "expected label_dtype to be .* got torch.int16", lambda: assign(x, c, label_dtype=torch.int16)
    yield ValueError, "counts to 299, got torch.uint8", lambda: assign(x, many, label_dtype=torch.uint8)
    yield ValueError, "counts to 256, got torch.uint8", lambda: assign(x, many[:257], label_dtype=torch.uint8)
    yield TypeError, "expected labels to be int64, int32 or uint8", lambda: update(x, labels.float(), 4)
    yield ValueError, r"expected labels of shape \[10\]", lambda: update(x, labels[:9], 4)
    yield ValueError, "expected k from 1 to", lambda: update(x, labels, 0)
    yield ValueError, "expected k = 5 centres, got 4", lambda: update(x, labels, 5, centres=c)
    yield ValueError, "expected k to be at most the number of points, 10, got 11", lambda: cluster(x, 11)
    yield ValueError, r"expected points of shape \[n > 0, d\], got \[0, 3\]; give one", lambda: cluster(x[:0], 1)
    yield ValueError, "expected k = 3 centres in init, got 4", lambda: cluster(x, 3, init=c)
    yield ValueError, "expected init of magnitudes up to", lambda: cluster(x, 4, init=c * 1e25)
    yield ValueError, "expected max_iter of 1 or more", lambda: cluster(x, 2, max_iter=0)
    yield (
        ValueError,
        "expected finite points, got nan at points",
        lambda: cluster(x / x.new_tensor([1, 1, math.nan]), 2),
    )


def test_bad_input_is_refused_in_one_sentence(device):
    for kind, text, call in refusals(device):
        with pytest.raises(kind, match=text) as caught:
            call()
        assert "\n" not in str(caught.value) and "; " in str(caught.value), "says what to do, too"


# Operators ------------------------------------------------------------------------------------------------------------


def test_the_baselines_of_the_cards_agree(device):
    points, centres = drawn("blobs", device, n=60, d=3, k=4)
    labels = kmeans_assign_eager(points, centres)
    assert torch.equal(labels, nearest(points, centres))
    assert torch.allclose(kmeans_update_eager(points, labels, 4), update(points, labels, 4), atol=1e-5, equal_nan=True)


def test_a_plan_keeps_to_what_the_kernels_can(device):
    for dtype in module.DTYPES:
        for d in (1, 2, 8, 9, 64, 100, 128, 129, 256, 257, 4096):
            for k in (1, 2, 16, 17, 1024, 65536):
                for n in (None, 1, 3000, 10**7):
                    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), None):
                        plan = module.kmeans_config(n, d, k, dtype, 8, capability)
                        assert d <= {"few": 8, "pairs": 32}.get(plan.how, d)
                        assert plan.how != "screen" or (dtype == torch.float32 and d <= plan.chunk <= 256)
                        assert plan.how != "each" or k <= 16
                        if plan.how == "product":
                            assert (plan.precision == "ieee") >= (dtype == torch.float64)
                            assert -(-k // (plan.steps * plan.block_k)) <= 1056, "parts are compared at once"


def test_points_that_lie_across_or_begin_anywhere_are_not_copied_for_a_product(device):
    """What a copy costs is a part of what the other ways cost."""
    for n, d, k in ((600_000, 384, 9), (30_000, 1107, 14)):
        ways = [module.kmeans_config(n, d, k, torch.float32, 8, (9, 0), dense).how for dense in (True, False)]
        assert ways[1] == "product", ways


def test_a_config_suits_its_sizes():
    def how(n, d, k, capability=(9, 0), dtype=torch.float32):
        return module.kmeans_config(n, d, k, dtype, 8, capability)

    assert how(3, 1319, 1231).block < how(100, 512, 1000).block  # a program has more points where there are more
    assert how(3, 1319, 1231).how == "some" and how(100_000, 500, 64).how == "product"
    # Of few coordinates: tiles of pairs where a thread a point would be few threads, or where points had to be copied.
    assert [how(n, 3, 785).how for n in (80, 3580, 5_000_000)] == ["pairs", "pairs", "few"]
    assert module.kmeans_config(130_093, 7, 3, torch.float16, 1, (9, 0), False).how == "pairs"
    # Few coordinates are no product: a thread a point, and tiles of pairs where those were few.
    assert [how(*size).how for size in ((4_000_000, 5, 900), (60_000, 3, 1200), (9000, 1, 1600))] == [
        "few", "pairs", "pairs"
    ]  # fmt: skip
    assert how(9000, 1, 1600).block_k == 4 * how(60_000, 3, 1200).block_k, "few programs wait less often for centres"
    assert how(34_295, 38, 3).how == how(17_668, 2863, 2).how == "each"
    assert how(1, 4070, 3).chunk == 4096 and how(20_000, 3000, 50).block == 32
    assert [how(n, 512, 229)[1:4] for n in (1405, 6000)] == [(32, 32, 32), (64, 64, 16)], "tiles for all"
    assert how(10**6, 64, 256).how == "screen"
    # Odd rows are copied where the product takes long enough: that of many centres, and of many points.
    assert [how(n, d, k).pad for n, d, k in ((19_553, 403, 2431), (19_553, 404, 2431), (19_553, 403, 64))] == [16, 1, 1]
    # A copy is a launch of its own: few points are compared where they lie.
    ways = [module.kmeans_config(9, 4, 3, torch.float64, 4, (9, 0), dense).how for dense in (True, False)]
    assert ways == ["few", "pairs"]
    # Only some GPUs multiply float64 fast.
    for capability in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)):
        precision = how(10**5, 2000, 1000, capability).precision
        assert precision == ("ieee" if capability in ((8, 0), (9, 0)) else "tf32x3")


def test_deterministic_a_label_does_not_depend_on_how_many_points_there_are(device, monkeypatch):
    points, centres = drawn("near", device)
    asked, plan = [], module._config
    monkeypatch.setattr(module, "_config", lambda n, *rest: asked.append(n) or plan(n, *rest))
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for deterministic in (True, False):
            torch.use_deterministic_algorithms(deterministic)
            # Another number of points each time: no launch is kept for it.
            assign(points[: len(points) - len(asked)], centres)
    finally:
        torch.use_deterministic_algorithms(before)
    assert asked == [None, len(points) - 1]


# Plans that a test of small sizes would not meet by itself: one tile of centres and several, one part and several.
OTHERS = [
    Config("some", 4, 8, 16, steps=2),
    Config("some", 1, 16, 64, steps=9),
    Config("pairs", 4, 8, steps=2),
    Config("pairs", 2, 16, steps=9),
    Config("product", 16, 16, 16, steps=9, precision="ieee"),
    Config("product", 16, 16, 16, steps=2, precision="ieee"),
    Config("product", 16, 16, 32, steps=1, precision="tf32x3"),
    Config("product", 16, 16, 16, steps=2, precision="ieee", pad=16),
    Config("screen", 16, 16, 64),
]


def named(plan):
    return f"{plan.how} {plan.block_k} {plan.steps} {plan.precision} {plan.pad}"


def by(plan, points, centres):
    labels = torch.full((len(points),), 77, device=points.device)
    module._launched(labels, points.T.contiguous().T if plan.how in ("product", "pairs") else points, centres, plan)
    return labels


#: Every law in one dtype, and every dtype.
LAWS = [(law, torch.float32) for law in ("near", "far", "rough", "blobs")]
LAWS += [("rough", dtype) for dtype in module.DTYPES if dtype != torch.float32]


@pytest.mark.parametrize(("law", "dtype"), LAWS)
@pytest.mark.parametrize("plan", OTHERS, ids=named)
def test_however_centres_are_shared_out_labels_are_those_of_differences(plan, law, dtype, device):
    if dtype != torch.float32 and (plan.how == "screen" or plan.precision == "tf32x3"):
        pytest.skip("planned for float32 alone")
    for n, d, k in ((13, 37, 70), (1, 20, 3)):
        points, centres = drawn(law, device, n=n, d=d, k=k, dtype=dtype)
        wide = points.double(), centres.double(), torch.int64
        best, got = (card._meaning_assign(wide, (x,)) for x in (nearest(points, centres), by(plan, points, centres)))
        assert (got <= best * (1 + 1e-6)).all()


@pytest.mark.parametrize("plan", OTHERS, ids=named)
def test_however_centres_are_shared_out_the_lowest_of_equals_wins_and_nan_is_near_to_none(plan, device):
    points, centres = drawn("near", device, n=9, d=20, k=25)
    assert torch.equal(by(plan, points, torch.cat([centres] * 3)), nearest(points, centres))
    assert by(plan, torch.zeros_like(points), torch.ones_like(centres)).tolist() == [0] * 9
    points[3, 2], points[4], centres[[0, 7, 24], 1] = math.nan, math.inf, math.nan
    want = nearest(points, torch.where(centres.isnan(), 1e18, centres))
    assert torch.equal(by(plan, points, centres), want) and want[3] == want[4] == 0


def test_of_centres_equally_near_but_for_rounding_the_lowest_wins(device):
    """Each point lies halfway between two centres, exactly; products of float64 round to one side or the other."""
    rng = generator(5, device)
    points, way = ((torch.randn(30, 12, generator=rng, device=device).double() * m).round() for m in (2.0**35, 2.0**30))
    beside = torch.stack([points + way, points - way], 1).flatten(0, 1)
    apart = torch.cat([points + way, points - way])  # in other tiles, and in other parts
    for steps in (1, 9):
        plan = Config("product", 16, 16, 16, steps=steps, precision="ieee")
        assert by(plan, points, beside).tolist() == [*range(0, 60, 2)]
        assert by(plan, points, apart).tolist() == [*range(30)]


COMPILED = """
import re
import torch, triton
import fusebook
from fusebook.kernels import kmeans
from fusebook.kernels.kmeans import Config
from fusebook.measure.compiled import AbsentGPU

triton.runtime.driver.set_active(AbsentGPU((9, 0)))
made, launch = [], kmeans.launch
kmeans.launch = lambda *args, **options: made.append(launch(*args, **options))
labels, points, centres = torch.empty(9, dtype=torch.int64), torch.empty(9, 4), torch.empty(20, 4)
kmeans._launched(labels, points, centres, Config("some", 4, 32, 4))
lanes, fused = set(), 0
for line in made[0].asm["ptx"].splitlines():
    to, *of = re.findall(r"%\\w+", line) or [""]
    if "shfl" in line or ("mov" in line and lanes & set(of)):
        lanes.add(to)
    fused += "fma" in line and bool(lanes & set(of))
print(len(lanes) > 0, fused)
"""


def test_no_square_is_fused_with_what_another_lane_adds():
    """Lanes that add up the same squares have the same bits, since one of them is kept, whichever."""
    environment = compiling.environment() | {"TRITON_STORE_BINARY_ONLY": "0"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "True 0\n"


SORTED = """
import torch, triton
import fusebook
from fusebook.kernels import kmeans
from fusebook.measure.compiled import AbsentGPU

for capability in ((9, 0), (8, 0)):
    triton.runtime.driver.set_active(AbsentGPU(capability))
    for dtype in kmeans.DTYPES:
        points, out = torch.empty(4000, 20, dtype=dtype), torch.empty(9, 20, dtype=dtype)
        labels = torch.zeros(4000, dtype=torch.uint8)
        kmeans._launch_means(out, kmeans._launch_chunks(points, labels, 9), out)
        kmeans._launch_direct(out, points, labels, None)
        kmeans._launch_ones(out, points, labels, None)
"""


@pytest.mark.slow
def test_what_small_problems_do_not_launch_compiles():
    subprocess.run([sys.executable, "-W", "ignore", "-c", SORTED], env=compiling.environment(), check=True)


@pytest.mark.parametrize("plan", OTHERS, ids=named)
def test_an_infinite_point_is_as_far_from_all_centres(plan, device):
    """A product with it is infinite, and of the sign that looks nearest."""
    points, centres = drawn("near", device, n=9, d=20, k=25)
    centres[:, 3] = torch.linspace(-1, 1, 25, device=device)
    points[2, 3], points[5, 3] = math.inf, -math.inf
    assert torch.equal(by(plan, points, centres), nearest(points, centres))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device with room")
def test_more_than_two_to_the_31_numbers(room):
    room(16 * 2**30)
    n = 2**30 + 1000
    points = torch.zeros(n, 2, dtype=torch.float16, device="cuda")
    points[-7:] = 5
    centres = torch.tensor([[0.0, 0.0], [4.0, 4.0]], dtype=torch.float16, device="cuda")
    labels = assign(points, centres, label_dtype=torch.uint8, check=False)
    assert int(labels.sum()) == 7 and bool(labels[-7:].all())
    assert update(points, labels, 2, check=False).tolist() == [[0.0, 0.0], [5.0, 5.0]]


def test_the_card_says_which_label_is_out_of_range(device):
    points, centres = drawn("near", device, n=4, d=2, k=2)
    inputs = points.double(), centres.double(), torch.int64
    assert KMEANS_ASSIGN.meaning(inputs, (torch.tensor([0, 1, 2, -1], device=device),)).isinf().tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "d", "k"), [(37, 9, 2), (33, 17, 16), (3, 300, 5), (1, 64, 9)])
def test_each_of_few_centres_is_compared_by_differences(n, d, k, dtype, device):
    """Far from the origin, where products cancel; odd widths; what is not finite is nearest to nobody."""
    points = (torch.randn(n, d, dtype=torch.float64) + 100).to(dtype)
    centres = (torch.randn(k, d, dtype=torch.float64) + 100).to(dtype)
    points[0, -1] = torch.nan
    centres[-1, 0] = torch.inf
    found = fusebook.kmeans_assign(points.to(device), centres.to(device), check=False).cpu()
    distances = torch.cdist(points.double(), centres.double(), compute_mode="donot_use_mm_for_euclid_dist")
    assert found[0] == 0
    chosen = distances.gather(1, found[:, None])[1:, 0]
    assert (chosen <= distances[1:, :-1].amin(1) * (1 + 1e-6)).all()
