"""Weights of four and eight bits: packing, products, formats of others, and refusals."""

import dataclasses
import functools

import numpy
import pytest
import torch

import fusebook
from fusebook import PackedWeight, quantize, quantized_matmul, quantized_swiglu
from fusebook.kernels import _call, quantized

HALVES = [torch.float16, torch.bfloat16]
#: How far to each side a row goes, of the largest number.
LARGE = [(0.0, 1.0), (1.0, 0.0), (0.43, 1.0), (0.4286, 1.0), (1.0, 0.43), (0.45, 0.52)]


def values(packed):
    """What the codes stand for, in float64."""
    codes, scales, zeros = packed.codes()
    K, group = packed.shape[1], packed.group or max(1, packed.shape[1])
    middle = torch.full(scales.shape, 2 ** (packed.bits - 1)) if zeros is None else zeros
    wide = [t.double().cpu().repeat_interleave(group, 1)[:, :K] for t in (middle, scales)]
    return (codes.double().cpu() - wide[0]) * wide[1]


def assert_close(y, x, weight, bias=None):
    """The error of float32 sums, of one rounding, which the interpreter does by cutting, and of rounded values."""
    exact = x.double().cpu() @ weight.T
    size = x.double().cpu().abs() @ weight.abs().T
    if bias is not None:
        exact, size = exact + bias.double().cpu(), size + bias.double().cpu().abs()
    eps = torch.finfo(y.dtype).eps
    size = size * (2**-20 if len(x) <= quantized.FEW_ROWS else eps / 2)
    worst = ((y.double().cpu() - exact).abs() / (eps * exact.abs() + size + 1e-7)).max()
    assert worst <= 1, f"{worst} of the tolerance"


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 0])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", HALVES)
def test_products_of_odd_sizes(dtype, bits, group, symmetric, device):
    N, K = 37, 307
    packed = quantize(torch.randn(N, K, device=device).to(dtype), bits, group, symmetric)
    x, bias = torch.randn(3, K, device=device).to(dtype), torch.randn(N, device=device).to(dtype)
    y = quantized_matmul(x, packed, bias)
    assert_close(y, x, values(packed), bias)
    assert torch.equal(y, quantized_matmul(x, packed, bias)), "each run gives the same bits"
    torch.testing.assert_close(packed.dequantize(dtype).double().cpu(), values(packed), atol=0, rtol=2**-6)


@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 1, 1), (1, 16, 128), (8, 16, 1056), (9, 33, 129), (17, 16, 64), (97, 20, 40)]
)
def test_rows_up_to_those_of_cublas(M, N, K, device):
    packed = quantize(torch.randn(N, K, device=device).half(), 4, 32)
    x = torch.randn(M, K, device=device).half()
    assert_close(quantized_matmul(x, packed), x, values(packed))


def test_every_code_of_every_position(device):
    """A row of each code at each column of a block, with weights of x that tell columns apart."""
    for bits in (4, 8):
        K = 512 // bits
        codes = (torch.arange(32)[:, None] * 8 + torch.arange(K) * 5).remainder(2**bits).to(torch.uint8).to(device)
        for dtype in HALVES:
            scales = torch.ones(32, 1, device=device, dtype=dtype)
            packed = PackedWeight.from_codes(codes, scales, bits=bits, group=0)
            x = torch.eye(K, device=device, dtype=dtype)
            for rows in x.split(16):
                found = quantized_matmul(rows, packed)
                at = rows.argmax(1)
                assert torch.equal(found.double(), (codes.double() - 2 ** (bits - 1)).T[at])


@pytest.mark.parametrize("dtype", HALVES)
def test_large_small_and_hostile_values(dtype, device):
    N, K = 16, 256
    packed = quantize(torch.randn(N, K, device=device).to(dtype), 4, 128, False)
    big = torch.full((2, K), torch.finfo(dtype).max / 1024, device=device, dtype=dtype)
    big[1, ::2] *= -1
    assert_close(quantized_matmul(big, packed), big, values(packed))
    for value in (float("nan"), float("inf")):
        x = torch.randn(3, K, device=device).to(dtype)
        x[1, 5] = value
        y = quantized_matmul(x, packed)
        assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all(), "only the row that has it"
    packed.scales[0, 0, 3, 0] = float("nan")  # of row 3
    y = quantized_matmul(torch.randn(3, K, device=device).to(dtype), packed)
    assert y[:, 3].isnan().all() and y[:, :3].isfinite().all() and y[:, 4:].isfinite().all()
    tiny = quantize(torch.full((N, K), torch.finfo(torch.float32).tiny, device=device), 4, 128)
    assert not quantized_matmul(torch.zeros(1, K, device=device, dtype=dtype), tiny).any()


def test_a_row_does_not_depend_on_others(device):
    packed = quantize(torch.randn(48, 200, device=device).half(), 4, 64, False)
    x = torch.randn(20, 200, device=device).half()
    whole = quantized_matmul(x, packed)
    for M in (1, 5, 9, 16):
        assert torch.equal(quantized_matmul(x[:M], packed), whole[:M])


@pytest.mark.parametrize(
    "how",
    [{"DEPTH": 3}, {"ABREAST": 2}, {"ROWS": 2}, {"ROWS": 2, "ABREAST": 2, "DEPTH": 2}],
    ids=str,
)
@pytest.mark.parametrize("M", [3, 16])
def test_a_row_does_not_depend_on_the_launch(M, how, device, monkeypatch):
    packed = quantize(torch.randn(40, 700, device=device).half(), 8, 64, False)
    x, bias = torch.randn(M, 700, device=device).half(), torch.randn(40, device=device).half()
    simple = {"SLICES": 4, "ABREAST": 1, "DEPTH": 1, "ROWS": 1, "TILES": -(-M // 8)}
    monkeypatch.setattr(quantized, "launch_config", lambda *_: dict(simple))
    want = quantized_matmul(x, packed, bias), quantized_swiglu(x, packed, packed)
    monkeypatch.setattr(quantized, "launch_config", lambda *_: simple | how)
    with _call.uncached():
        assert torch.equal(quantized_matmul(x, packed, bias), want[0])
        assert torch.equal(quantized_swiglu(x, packed, packed), want[1])


def test_slices_do_not_depend_on_rows(device, monkeypatch):
    """A weight of 4 slices, and one of 8."""
    monkeypatch.setattr(quantized, "MANY_TILES", 2)
    half = torch.randn(32, 384, device=device).half()
    for N in (32, 16):
        packed = quantize(torch.cat([half, -half], 1)[:N])  # the result is what rounding leaves of zero
        x = torch.randn(9, 384, device=device).half().repeat(1, 2)
        with _call.uncached():
            whole = quantized_matmul(x, packed)
            assert torch.equal(quantized_matmul(x[:1], packed), whole[:1])
        assert quantized.slices_of(*packed.words.shape[:2]) == (4 if N == 32 else 8)


@pytest.mark.parametrize(("K", "units"), [(104, 13), (256, 32), (150, 75), (37, 37), (0, 0)])
def test_rows_of_whole_vectors_are_loaded_by_them(K, units, device, monkeypatch):
    """Triton only sees whether 16 divides an integer, and so not that rows of 104 elements begin at whole vectors."""
    given, own = [], quantized.launch

    def launch(kernel, grid, *args, **constants):
        if kernel is quantized._quantized:
            given.append((args[11], constants["ALIGN"] * args[11]))
        own(kernel, grid, *args, **constants)

    monkeypatch.setattr(quantized, "launch", launch)
    weight, x = (torch.randn(rows, K, device=device).half() for rows in (37, 3))
    packed = quantize(weight)
    with _call.uncached():
        assert_close(quantized_matmul(x, packed), x, values(packed))
    assert given == [(units, K)]


def test_strides_offsets_and_axes(device):
    packed = quantize(torch.randn(24, 96, device=device).half(), 8, 32)
    x = torch.randn(4, 5, 193, device=device).half()[..., 1::2]
    y = quantized_matmul(x, packed)
    assert y.shape == (4, 5, 24)
    assert_close(y.view(20, 24), x.reshape(20, 96), values(packed))
    assert_close(quantized_matmul(x[0, 0], packed)[None], x[0, :1], values(packed))


def test_empty(device):
    packed = quantize(torch.randn(16, 64, device=device).half())
    assert quantized_matmul(torch.empty(0, 64, device=device).half(), packed).shape == (0, 16)
    none = quantize(torch.empty(16, 0, device=device).half())
    bias = torch.randn(16, device=device).half()
    assert torch.equal(quantized_matmul(torch.empty(2, 0, device=device).half(), none, bias), bias.expand(2, 16))
    x = torch.ones(2, 8, device=device).half().requires_grad_()
    y = quantized_matmul(x, quantize(torch.empty(0, 8, device=device)))
    y.sum().backward()
    assert y.shape == (2, 0) and not x.grad.any()
    x = torch.empty(2, 0, device=device).half().requires_grad_()
    quantized_swiglu(x, none, none).sum().backward()
    assert x.grad.shape == (2, 0)


@pytest.mark.parametrize("M", [1, 9, 97])
def test_swiglu_of_two_weights(M, device):
    gate, up = (quantize(torch.randn(40, 300, device=device).half() / 8, 4, 128, False) for _ in range(2))
    x = torch.randn(M, 300, device=device).half()
    g, u = (x.double().cpu() @ values(p).T for p in (gate, up))
    exact = torch.nn.functional.silu(g) * u
    error = (quantized_swiglu(x, gate, up).double().cpu() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 2**-8).all()


def test_quantize_rounds_to_the_nearest_code(device):
    weight = torch.randn(8, 100, device=device)
    for bits, symmetric in ((4, True), (8, True), (4, False), (8, False)):
        packed = quantize(weight, bits, 32, symmetric)
        step = packed.codes()[1].double().cpu().repeat_interleave(32, 1)[:, :100]
        assert ((values(packed) - weight.double().cpu()).abs() <= 0.5001 * step).all()
    for same in (0.0, 3.0, -3.0):
        packed = quantize(torch.full((2, 64), same, device=device), 4, 32, False)
        torch.testing.assert_close(values(packed), torch.full((2, 64), same).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_numbers_stay_finite(bits, symmetric, dtype, device):
    top = torch.finfo(dtype).max
    ends = [(low, high) for low, high in LARGE if dtype == torch.float16 or low + high <= 1]  # differences in float32
    rows = [torch.linspace(-low * top, high * top, 32, dtype=torch.float64).to(dtype) for low, high in ends]
    weight = torch.stack(rows).to(device)
    packed = quantize(weight, bits, 32, symmetric)
    made = packed.dequantize(dtype)
    assert made.isfinite().all()
    # To the nearest code; a rounded zero point moves both ends by half a step more.
    steps = torch.tensor([0.51 if symmetric or not low * high else 1.1 for low, high in ends], device=device)[:, None]
    step = steps * packed.codes()[1].double()
    assert ((made.double() - weight.double()).abs() <= step + 2 * torch.finfo(dtype).eps * top).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_formats_of_others_come_back(bits, device):
    """Written here by NumPy, from what the formats say, and read again."""
    N, K, group, rng = 64, 256, 64, numpy.random.default_rng(0)
    codes = rng.integers(0, 2**bits, (N, K), dtype=numpy.uint8)
    zeros = rng.integers(0, 2**bits, (N, K // group), dtype=numpy.uint8)
    scales = torch.rand(N, K // group, device=device).half()
    given = functools.partial(torch.as_tensor, device=device)
    each = 32 // bits

    def words(lines):
        """32-bit words of neighbours in the last axis, the first one in the lowest bits."""
        parts = (
            lines.reshape(*lines.shape[:-1], -1, each).astype(numpy.uint64)
            << numpy.arange(each, dtype=numpy.uint64) * bits
        )
        return given(parts.sum(-1).astype(numpy.uint32).view(numpy.int32))

    def check(packed):
        found = packed.codes()
        assert torch.equal(found[0], given(codes)) and torch.equal(found[1], scales)
        assert torch.equal(found[2], given(zeros))

    check(PackedWeight.from_codes(given(codes), scales, given(zeros), bits=bits, group=group))
    stored = (zeros.astype(int) - 1) % 2**bits
    check(PackedWeight.from_gptq(words(codes).T, scales.T, words(stored.T.astype(numpy.uint8)), bits=bits, group=group))
    blob = words(codes).cpu().numpy().view(numpy.uint8).reshape(N, K // group, -1)
    flat = zeros if bits == 8 else zeros[:, ::2] | zeros[:, 1::2] << 4
    check(PackedWeight.from_onnx(given(blob), scales.reshape(-1), given(flat), K=K, bits=bits, group=group))
    if bits == 4:
        place = [0, 2, 4, 6, 1, 3, 5, 7]  # AWQ: which of eight columns is at each position of a word
        lines, points = codes.T.reshape(K, -1, 8)[..., place], zeros.T.reshape(K // group, -1, 8)[..., place]
        check(PackedWeight.from_awq(words(lines.reshape(K, N)), scales.T, words(points.reshape(-1, N)), group=group))


def test_equal_weights(device):
    weight = torch.randn(20, 72, device=device).half()
    packed = quantize(weight, group=32)
    same = PackedWeight.from_codes(*packed.codes(), group=32)
    assert packed == same and hash(packed) == hash(same) and packed == packed and packed != weight
    others = [quantize(-weight, group=32), quantize(weight, 8, 32), quantize(weight, group=64), packed.to("meta")]
    others += [quantize(weight.float(), group=32), quantize(weight, group=32, symmetric=False)]
    others += [dataclasses.replace(packed, version=0), dataclasses.replace(packed, shape=(19, 72))]
    for other in others:
        assert packed != other and other != packed


@pytest.mark.parametrize("M", [2, 97])
def test_gradients(M, device):
    packed = quantize(torch.randn(24, 80, device=device).half(), 4, 32)
    x = torch.randn(M, 80, device=device).half().requires_grad_()
    bias = torch.randn(24, device=device).half().requires_grad_()
    dy = torch.randn(M, 24, device=device).half()
    dx, db = torch.autograd.grad(quantized_matmul(x, packed, bias), (x, bias), dy)
    assert_close(dx, dy, values(packed).T.to(torch.float64).half().double())
    torch.testing.assert_close(db, dy.sum(0), atol=0.02, rtol=0.01)
    (found,) = torch.autograd.grad(quantized_swiglu(x, packed, packed).sum(), x)
    assert found.shape == x.shape and found.isfinite().all()


def test_autocast_leaves_scales(device):
    packed = quantize(torch.randn(16, 64, device=device))
    x = torch.randn(2, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = quantized_matmul(x, packed)
    assert y.dtype == torch.bfloat16 and torch.equal(y, quantized_matmul(x.bfloat16(), packed))


def test_the_operator_passes_the_checks_of_torch(device):
    packed = quantize(torch.randn(16, 64, device=device).half(), symmetric=False)
    x = torch.randn(2, 64, device=device).half().requires_grad_()
    args = x, [packed.words, packed.scales, packed.zeros], [], None, 16, 64, 4, 128
    torch.library.opcheck(torch.ops.fusebook.quantized_matmul.default, args)


def test_export_keeps_the_call(device):
    packed = quantize(torch.randn(16, 64, device=device).half())

    class Layer(torch.nn.Module):
        def forward(self, x):
            return quantized_matmul(x, packed) + 1

    x = torch.randn(2, 64, device=device).half()
    exported = torch.export.export(Layer(), (x,))
    assert "fusebook.quantized_matmul" in str(exported.graph)
    assert torch.equal(exported.module()(x), quantized_matmul(x, packed) + 1)


def refusals(device):
    weight = torch.randn(16, 64, device=device).half()
    packed = quantize(weight)
    x = torch.randn(2, 64, device=device).half()
    codes, scales, _ = packed.codes()
    yield "float32", lambda: quantized_matmul(x.float(), packed), TypeError, "float16 or bfloat16"
    yield "columns", lambda: quantized_matmul(x[:, 1:], packed), ValueError, r"\[\.\.\., 64\]|64"
    yield "plain", lambda: quantized_matmul(x, weight), TypeError, "call fusebook.quantize first"
    yield "version", lambda: quantized_matmul(x, dataclasses.replace(packed, version=1)), ValueError, "version 1"
    yield "old codes", lambda: dataclasses.replace(packed, version=1).codes(), ValueError, "version 1"
    yield "bias", lambda: quantized_matmul(x, packed, weight[:, 0].float()), TypeError, "bias"
    yield "bits", lambda: quantize(weight, bits=3), ValueError, "4 or 8"
    yield "group", lambda: quantize(weight, group=100), ValueError, "whole rows"
    yield "nan", lambda: quantize(weight * float("nan")), ValueError, "finite"
    yield "meta", lambda: quantize(weight.to("meta")), ValueError, "values can be read, got one on meta"
    yield "flag", lambda: quantize(weight, symmetric="no"), TypeError, "symmetric to be True or False"
    yield "axes", lambda: quantize(weight[0]), ValueError, r"\[N, K\]"
    yield "scales", lambda: PackedWeight.from_codes(codes, scales * float("inf")), ValueError, "finite scales"
    yield "groups", lambda: PackedWeight.from_codes(codes, scales, group=32), ValueError, "scales"
    yield "codes", lambda: PackedWeight.from_codes(codes + 16, scales), ValueError, "below 16"
    zeros = torch.full((16, 1), 16, device=device)
    yield "zeros", lambda: PackedWeight.from_codes(codes, scales, zeros), ValueError, "from 0 to 15"
    yield "below", lambda: PackedWeight.from_codes(codes, scales, zeros - 17), ValueError, "got -1 to -1"
    for other in {"cpu", "meta"} - {device}:
        yield "device", lambda other=other: quantized_matmul(x, packed.to(other)), ValueError, f"words.*{other}"
    yield "unlike", lambda: quantized_swiglu(x, packed, quantize(weight, 8)), ValueError, "quantize both alike"
    changes = {
        "words of shape": {"words": packed.words[:0]}, "scales of shape": {"group": 32}, "4 or 8": {"bits": 2},
        "scales without gaps": {"scales": packed.scales.expand(1, 1, 8, 2).transpose(2, 3)},
        "zeros to be int8": {"zeros": packed.words}, "to be 0, 32": {"group": -1}, "words to be": {"words": None},
    }  # fmt: skip
    for text, change in changes.items():
        made = dataclasses.replace(packed, **change)
        for use in (lambda p: quantized_matmul(x, p), lambda p: quantized_swiglu(x, p, p), PackedWeight.dequantize):
            yield text, lambda use=use, made=made: use(made), (TypeError, ValueError), text
    yield "dtype", lambda: packed.dequantize(torch.float32), ValueError, "float16"


def test_refusals(device):
    for what, call, error, text in refusals(device):
        with pytest.raises(error, match=text):
            pytest.fail(f"{what} is not refused: {call()}")


def test_public_names():
    for name in ("PackedWeight", "quantize", "quantized_matmul", "quantized_swiglu"):
        assert getattr(fusebook, name) is getattr(quantized, name) and name in fusebook.__all__
