"""Rotary embeddings: styles, tables, axes of heads, positions, in place and back, against the chain in float64."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from fusebook import rope, rope_eager
from fusebook.kernels import rope as family
from fusebook.kernels._call import OPERATORS
from fusebook.measure.inputs import generator, poison

#: Rows of a table, heads of queries, heads of keys, elements of a head.
S, H, K, D = 7, 5, 2, 24


def tables(device, columns=D // 2, dtype=torch.float32):
    angles = torch.linspace(-3, 40, S * columns, device=device).view(S, columns)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def chain(x, cos, sin, interleaved=False):
    """The rotation in float64; half tables that broadcast to `x`."""
    rotary, x = 2 * cos.shape[-1], x.double()
    at = (slice(0, rotary, 2), slice(1, rotary, 2)) if interleaved else (slice(rotary // 2), slice(rotary // 2, rotary))
    a, b, y, cos, sin = x[..., at[0]], x[..., at[1]], x.clone(), cos.double(), sin.double()
    y[..., at[0]], y[..., at[1]] = a * cos - b * sin, b * cos + a * sin
    return y


def close(got, want):
    """Each element is off by what rounding it once explains, and an eps of float32 of its row."""
    eps = torch.finfo(got.dtype).eps
    scale = want.abs() + (4e-7 / eps if eps > 1e-8 else 1) * want.abs().amax(-1, keepdim=True)
    assert ((got.double() - want).abs() <= eps * scale).all(), ((got.double() - want).abs() / scale).max().item() / eps


def heads_of(device, heads=H, dtype=torch.float32, batch=2):
    """(batch, heads, sequence, dim) as a linear layer returns it."""
    rng = generator(heads, device)
    return torch.randn(batch, S, heads, D, generator=rng, device=device).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rotary", [None, 18, 2])
def test_queries_and_keys_are_rotated_and_rounded_once(interleaved, dtype, rotary, device):
    q, k = heads_of(device, dtype=dtype), heads_of(device, K, dtype)
    cos, sin = tables(device, (rotary or D) // 2)
    poison([q, k])
    found = rope(q, cos, sin, k, rotary_dim=rotary, interleaved=interleaved)
    for got, x in zip(found, (q, k), strict=True):
        assert got.dtype == dtype and got.stride() == x.stride()
        close(got, chain(x, cos, sin, interleaved))
        assert torch.equal(got[..., rotary or D :], x[..., rotary or D :])
        assert torch.equal(got, rope(x, cos, sin, rotary_dim=rotary, interleaved=interleaved))
    over = q.clone(), k.clone()
    assert all(a is b for a, b in zip(rope(over[0], cos, sin, over[1], rotary_dim=rotary, interleaved=interleaved,
        inplace=True), over, strict=True))  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(over, found, strict=True))


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
def test_tables_may_have_each_angle_twice_and_a_batch(interleaved, device):
    q, (cos, sin) = heads_of(device), tables(device)
    want = rope(q, cos, sin, interleaved=interleaved)
    twice = [t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin)]
    for given in (
        twice,
        [t[None] for t in twice],
        [t.expand(2, -1, -1) for t in twice],
        [t.clone().mT.clone().mT for t in twice],
    ):
        assert torch.equal(rope(q, *given, interleaved=interleaved), want)
    assert torch.equal(
        rope(q, cos, twice[1][:, : D // 2] if not interleaved else sin.clone(), interleaved=interleaved), want
    )
    apart = torch.stack((cos, sin)), torch.stack((sin, cos))
    close(rope(q, *apart, interleaved=interleaved), chain(q, *(t[:, None] for t in apart), interleaved))
    half = rope(q[..., : D // 2], cos, sin, interleaved=interleaved)  # of D / 2 elements, the same columns are all
    close(
        half,
        chain(
            q[..., : D // 2],
            cos[:, :: 2 if interleaved else 1][:, : D // 4],
            sin[:, :: 2 if interleaved else 1][:, : D // 4],
            interleaved,
        ),
    )


def test_heads_may_be_any_axis_or_none(device):
    q, (cos, sin) = heads_of(device), tables(device)
    want = rope(q, cos, sin)
    for x, heads in ((q.transpose(1, 2), -2), (q.transpose(1, 2), 2), (q.transpose(0, 1), 0), (q, 1), (q, -3)):
        got = rope(x, cos, sin, heads=heads)
        assert torch.equal(got.movedim(heads, 1), want) and got.stride() == x.stride()
    assert torch.equal(rope(q[:, 0], cos, sin, heads=None), want[:, 0])
    assert torch.equal(rope(q[0, 0], cos, sin, heads=None), want[0, 0])
    deep = torch.stack((q, q * 2)).transpose(0, 2)  # (heads, batch, 2, sequence, dim), whose axes do not fold
    assert torch.equal(rope(deep, cos, sin, heads=0), torch.stack((want, rope(q * 2, cos, sin))).transpose(0, 2))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_positions_choose_rows_and_give_nan_where_there_is_none(kind, device):
    cos, sin = torch.cat(tables(device), -1).chunk(2, -1)  # a cache of both, as servers have it
    at = torch.tensor([3, 0, S - 1, 3, S, -1, 2**31 - 1], dtype=kind, device=device)
    x = heads_of(device)[0].transpose(0, 1)  # (tokens, heads, dim)
    got = rope(x, cos, sin, positions=at, heads=-2)
    close(got[:4], chain(x[:4], cos[at[:4].long()][:, None], sin[at[:4].long()][:, None]))
    assert got[4:].isnan().all()
    q, at = heads_of(device), torch.stack((at[:4], at[:4].flip(0)))
    got = rope(q[:, :, :4], cos, sin, positions=at)
    close(got, chain(q[:, :, :4], cos[at.long()][:, None], sin[at.long()][:, None]))


def test_in_place_writes_views_of_one_memory_and_nothing_else(device):
    (cos, sin), n = tables(device), (H + K) * D
    whole = torch.randn(2, S, n + 3, generator=generator(0, device), device=device)
    q = whole[..., : H * D].view(2, S, H, D).transpose(1, 2)
    k = whole[..., H * D : n].view(2, S, K, D).transpose(1, 2)
    before, version = whole.clone(), q._version
    want = rope(q, cos, sin, k)
    assert torch.equal(whole, before)
    rope(q, cos, sin, k, inplace=True)
    assert torch.equal(q, want[0]) and torch.equal(k, want[1]) and torch.equal(whole[..., n:], before[..., n:])
    assert q._version > version


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
def test_gradients_of_every_order_are_rotations(interleaved, device):
    cos, sin = tables(device, 2, torch.float64)
    q, k = (torch.randn(1, n, 2, 5, dtype=torch.float64, device=device).requires_grad_() for n in (2, 1))

    def both(q, k):
        return rope(q, cos[:2], sin[:2], k, rotary_dim=4, interleaved=interleaved)

    assert torch.autograd.gradcheck(both, (q, k), fast_mode=True) and torch.autograd.gradgradcheck(
        both, (q, k), fast_mode=True
    )
    found = both(q, k)
    of = [torch.randn_like(t) for t in found]
    want = [chain(g, cos[:2], -sin[:2], interleaved) for g in of]
    got = torch.autograd.grad(found, (q, k), of, retain_graph=True)
    for g, w in zip(got, want, strict=True):
        close(g, w)
    # A result that is not used, and a gradient of other strides.
    assert torch.equal(torch.autograd.grad(found[1], k, of[1].mT.contiguous().mT, retain_graph=True)[0], got[1])
    assert torch.equal(
        torch.autograd.grad(found[0].sum(), q)[0],
        rope(torch.ones_like(q), cos[:2], -sin[:2], rotary_dim=4, interleaved=interleaved),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_half_types_are_those_of_float64_rounded_once(dtype, device):
    q, (cos, sin) = heads_of(device, dtype=dtype).requires_grad_(), tables(device)
    g = torch.randn_like(q)
    (got,) = torch.autograd.grad(rope(q, cos, sin), q, g)
    assert got.dtype == dtype
    close(got, chain(g, cos, -sin))


def test_a_model_exported_compiled_in_place_batched_and_under_autocast(device):
    q, k, (cos, sin) = heads_of(device), heads_of(device, K), tables(device)

    class Attention(torch.nn.Module):
        def forward(self, q, k):
            return rope(q * 2, cos, sin, k)

    want = Attention()(q, k)
    got = torch.export.export(Attention(), (q, k)).module()(q, k)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def over(q, k):
        q, k = q * 2, k * 1
        rope(q, cos, sin, k, inplace=True)
        return q, k

    got = torch.compile(over, backend="aot_eager", fullgraph=True)(q, k)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with torch.autocast(device, torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(Attention()(q, k), want, strict=True))

    def loss(q, cos, sin):
        return rope(q, cos, sin, k[0]).__getitem__(0).square().sum() / 2

    each = torch.stack((cos, cos * 2)), torch.stack((sin, sin * 2))
    got = torch.vmap(torch.func.grad(loss), (0, 0, 0))(q, *each)
    for i in range(2):  # the rotation back of the rotation
        torch.testing.assert_close(got[i], q[i] * (i + 1) ** 2)
    at = torch.stack((torch.arange(S, device=device), torch.arange(S, device=device).flip(0)))
    for places in ((0, None, None, 0), (0, 0, None, None), (0, 0, 0, 0), (None, None, 0, None)):
        given = [t if place is None else torch.stack((t, t / 2)) if t.is_floating_point() else at
                 for t, place in zip((q, cos, sin, at[0]), places, strict=True)]  # fmt: skip
        got = torch.vmap(lambda q, cos, sin, at: rope(q, cos, sin, positions=at), places)(*given)
        for i in range(2):
            member = [t if place is None else t[i] for t, place in zip(given, places, strict=True)]
            assert torch.equal(got[i], rope(*member[:3], positions=member[3])), places


@pytest.mark.parametrize(("pairs", "shape"), [*itertools.product((4, 16), ((3, 5), (1, 1), (7, 3)))])
def test_tiles_of_a_gpu_cover_all_heads_and_tokens(pairs, shape, device, monkeypatch):
    """Several tiles of heads, of keys more than of queries too, and several tokens a program, the last ones ragged."""
    for name in ("_BYTES", "_INTERPRETED"):
        monkeypatch.setattr(family, name, 4 * pairs)
    (tokens, heads), rng = shape, generator(0, device)
    for n in (1, 9):
        q, k = (torch.randn(tokens, h, 6, generator=rng, device=device) for h in (heads, n))
        angles = torch.randn(tokens, 3, generator=rng, device=device)
        for interleaved in (False, True):
            poison([q, k])
            found = rope(q, angles.cos(), angles.sin(), k, heads=-2, interleaved=interleaved)
            for got, x in zip(found, (q, k), strict=True):
                close(got, chain(x, angles.cos()[:, None], angles.sin()[:, None], interleaved))


def test_a_launch_takes_heads_before_tokens():
    config = family._rope_config
    assert config(8192, 32, 8, 64, 2, False) == dict(TOKENS=1, HEADS=32, K_TILE=8, TILES=1, BLOCK=64, num_warps=4)
    assert config(8192, 128, 1, 64, 2, False)["TILES"] == 4 and config(1, 1, 0, 4096, 8, False)["HEADS"] == 1
    assert config(5, 1, 0, 1, 8, False)["TOKENS"] == 8


def test_the_eager_chain_is_the_same(device):
    q, (cos, sin) = heads_of(device, dtype=torch.float64), tables(device, dtype=torch.float64)
    close(rope_eager(q, *(torch.cat((t, t), -1) for t in (cos, sin))), chain(q, cos, sin))


# Bad input ------------------------------------------------------------------------------------------------------------


def refused(error, message, **change):
    return pytest.param(error, message, change, id=f"{[*change]} {message}"[:60])


LEAF = torch.zeros(2, H, S, D, requires_grad=True)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        refused(TypeError, "x to be a torch.Tensor, got list", x=[1.0]),
        refused(TypeError, "x to be float16", x=torch.zeros(2, 3, 4, dtype=torch.int32)),
        refused(TypeError, "x to be dense", x=torch.zeros(2, H, S, D).to_sparse()),
        refused(TypeError, "k to be torch.float32 as x is", k=torch.zeros(2, H, S, D, dtype=torch.bfloat16)),
        refused(TypeError, "positions to be int64", positions=torch.zeros(S)),
        refused(TypeError, "heads to be an integer", heads=1.0),
        refused(TypeError, "interleaved to be True or False", interleaved="no"),
        refused(TypeError, "inplace to be True or False", inplace=1),
        refused(ValueError, "cos on cpu as x is, got meta", cos=torch.zeros(S, D, device="meta")),
        refused(ValueError, "x of 2 axes or more", x=torch.zeros(D)),
        refused(IndexError, "heads to be an axis before the last", heads=-1),
        refused(IndexError, "heads to be an axis before the last", heads=4),
        refused(IndexError, "None where there is no axis", x=torch.zeros(S, D)),
        refused(ValueError, "an even rotary_dim from 2", rotary_dim=7),
        refused(ValueError, "an even rotary_dim from 2", rotary_dim=D + 2),
        refused(ValueError, "an even rotary_dim from 2", x=torch.zeros(2, H, S, 5)),
        refused(ValueError, "an even rotary_dim from 2", x=torch.zeros(1, 1, 1, 8194)),
        refused(ValueError, r"k of shape \[2, -1, 7, 24\] as x has", k=torch.zeros(2, H, S + 1, D)),
        refused(ValueError, "one shape with 12 or 24 columns", cos=torch.zeros(S, 10)),
        refused(ValueError, "one shape with 12 or 24 columns", cos=torch.zeros(S, D)),
        refused(ValueError, r"cos for positions \[2, 7\]", cos=torch.zeros(S - 1, 12), sin=torch.zeros(S - 1, 12)),
        refused(ValueError, "cos of shape .positions, columns.", positions=torch.arange(S), cos=torch.zeros(1, S, 12),
            sin=torch.zeros(1, S, 12)),
        refused(ValueError, r"positions for positions \[2, 7\]", positions=torch.arange(S - 1)),
        refused(ValueError, "without overlap", inplace=True, x=torch.zeros(2, 1, S, D).expand(2, H, S, D)),
        refused(NotImplementedError, "no gradient to be recorded for inplace", inplace=True, x=LEAF),
        refused(NotImplementedError, "cos and sin that require no gradient", x=LEAF, cos=LEAF[0, 0, :, :12]),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_sentence(error, message, change):
    if torch.cuda.is_available():
        pytest.skip("the tensors are on the CPU")
    cos, sin = tables("cpu")
    given = {"x": torch.zeros(2, H, S, D), "cos": cos, "sin": sin} | change
    with pytest.raises(error, match=message) as raised:
        rope(given.pop("x"), given.pop("cos"), given.pop("sin"), given.pop("k", None), **given)
    assert "\n" not in str(raised.value) and str(raised.value).startswith("rope: expected")


def test_one_tensor_is_not_rotated_twice_in_place(device):
    q = heads_of(device)
    with pytest.raises(ValueError, match="x and k apart"):
        rope(q, *tables(device), q, inplace=True)


def test_meta_tensors_have_shapes_and_dtensors_are_refused(device):
    q, cos, sin = (t.to("meta") for t in (heads_of("cpu"), *tables("cpu")))
    assert rope(q, cos, sin).is_meta and rope(q, cos, sin, q)[1].stride() == q.stride()
    if device == "cuda":
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        q = distribute_tensor(heads_of("cpu"), init_device_mesh("cpu", (1,)), [Replicate()])
        for inplace in (False, True):
            with pytest.raises(TypeError, match=r"got a DTensor; pass to_local\(\)"):
                rope(q, *tables("cpu"), inplace=inplace)
    finally:
        dist.destroy_process_group()


def test_operators_are_known_by_their_names():
    assert {"rope", "rope_two", "rope_over"} <= OPERATORS.keys()


def test_in_place_of_nothing(device):
    x = torch.zeros(0, 2, 3, 16, device=device)
    assert rope(x, *torch.ones(2, 3, 8, device=device), inplace=True) is x
