"""The modules: the same parameters, results and gradients as what they replace, and sentences for bad input."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusebook

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Gemma(nn.Module):
    """Gemma's norm: rows times one more than the weight."""

    def __init__(self, n, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(n)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class Chain(nn.Module):
    """A Llama's MLP, one operation after another."""

    def __init__(self, k, n, bias):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(k, n, bias), nn.Linear(k, n, bias)
        self.down_proj = nn.Linear(n, k, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Head(nn.Module):
    """A last layer and its loss, with the names of `torch.nn.LinearCrossEntropyLoss`."""

    def __init__(self, k, n, bias, weight=None, **options):
        super().__init__()
        self.linear, self.options = nn.Linear(k, n, bias), options
        self.register_buffer("weight", weight)

    def forward(self, x, target):
        return F.cross_entropy(self.linear(x), target, self.weight, **self.options)


COUNTS = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.0])
PAIRS = {
    "rms": (lambda: fusebook.nn.RMSNorm(8, 1e-2), lambda: nn.RMSNorm(8, 1e-2)),
    "rms without weight": (
        lambda: fusebook.nn.RMSNorm(8, 1e-2, elementwise_affine=False),
        lambda: nn.RMSNorm(8, 1e-2, elementwise_affine=False),
    ),
    "gemma": (lambda: fusebook.nn.RMSNorm(8, 1e-2, add_one=True), lambda: Gemma(8, 1e-2)),
    "layer": (lambda: fusebook.nn.LayerNorm(8), lambda: nn.LayerNorm(8)),
    "layer without bias": (lambda: fusebook.nn.LayerNorm(8, bias=False), lambda: nn.LayerNorm(8, bias=False)),
    "swiglu": (lambda: fusebook.nn.SwiGLU(8, 16), lambda: Chain(8, 16, False)),
    "swiglu with bias": (lambda: fusebook.nn.SwiGLU(8, 16, bias=True, recompute=True), lambda: Chain(8, 16, True)),
    "loss": (lambda: fusebook.nn.LinearCrossEntropyLoss(8, 5), lambda: Head(8, 5, False)),
    "loss with options": (
        lambda: fusebook.nn.LinearCrossEntropyLoss(8, 5, bias=True, weight=COUNTS, label_smoothing=0.1),
        lambda: Head(8, 5, True, COUNTS, label_smoothing=0.1),
    ),
}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)
def test_a_module_is_what_it_replaces(ours, theirs):
    module, plain = ours().to(DEVICE, torch.float64), theirs().to(DEVICE, torch.float64)
    for own, other in zip(module.parameters(), plain.parameters(), strict=True):
        if own.dim() == 1 and "Linear" not in str(plain):
            torch.testing.assert_close(own, other, rtol=0, atol=0)  # as they begin
        nn.init.uniform_(other, -1, 1)
    module.load_state_dict(plain.state_dict())
    assert list(module.state_dict()) == list(plain.state_dict())
    x = torch.randn(2, 3, 8, dtype=torch.float64, device=DEVICE)
    rest = []
    if hasattr(plain, "linear"):
        x, rest = x.flatten(0, 1), [torch.tensor([0, 1, 4, 2, -100, 3], device=DEVICE)]
    results = []
    for each in (module, plain):
        given = x.clone().requires_grad_()
        y = each(given, *rest)
        y.backward(torch.ones_like(y).cumsum(-1) if y.dim() else None)
        results.append([y, given.grad, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(*results)


def test_a_bfloat16_weight_is_not_rounded_after_one_is_added():
    norm = fusebook.nn.RMSNorm(64, add_one=True, device=DEVICE, dtype=torch.bfloat16)
    nn.init.constant_(norm.weight, 2.0**-10)  # next to 1 bfloat16 has steps of 2**-7
    x = torch.randn(2, 64, device=DEVICE)
    expected = fusebook.rms_norm(x, torch.full((64,), 1 + 2.0**-10, device=DEVICE))
    torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=0)


def test_what_a_module_does_not_take():
    for norm in (fusebook.nn.RMSNorm, fusebook.nn.LayerNorm):
        with pytest.raises(ValueError, match="to have one axis"):
            norm((3, 4))
        with pytest.raises(ValueError, match="expected rows of 4 elements"):
            norm(4, elementwise_affine=False, device=DEVICE)(torch.ones(2, 5, device=DEVICE))
    with pytest.raises(TypeError, match=r"options among .*, got reduce; leave"):
        fusebook.nn.LinearCrossEntropyLoss(4, 5, reduce="mean")
    mlp = fusebook.nn.SwiGLU(4, 8, device=DEVICE)
    mlp.up_proj = nn.Bilinear(4, 4, 8)
    with pytest.raises(TypeError, match=r"up_proj to be a torch.nn.Linear, got Bilinear; call fusebook.silu_mul"):
        mlp(torch.ones(2, 4, device=DEVICE))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("ours", [ours for ours, _ in PAIRS.values()], ids=PAIRS)
def test_a_nested_tensor_is_refused_behind_a_dense_one(ours):
    module, x = ours().to(DEVICE), torch.ones(2, 8, device=DEVICE, requires_grad=True)
    rest = [torch.zeros(2, dtype=torch.int64, device=DEVICE)] if hasattr(module, "linear") else []
    for _ in range(3):
        module(x, *rest).sum().backward()
    with pytest.raises(TypeError, match="to be dense, got a nested tensor"):
        module(torch.nested.nested_tensor([x.detach()] * 2), *rest)


def test_weights_of_another_kind_are_taken_or_refused():
    x = torch.randn(3, 8, dtype=torch.bfloat16, device=DEVICE)
    norm = fusebook.nn.RMSNorm(8, device=DEVICE)
    assert norm(x).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="swiglu: expected gate to be"):
        fusebook.nn.SwiGLU(8, 16, device=DEVICE)(x)
    with pytest.raises(TypeError, match="expected head to be"):
        fusebook.nn.LinearCrossEntropyLoss(8, 5, device=DEVICE)(x, torch.tensor([0, 1, 2], device=DEVICE))
    norm.weight = nn.Parameter(norm.weight.detach().to_sparse())
    with pytest.raises(TypeError, match="expected weight to be dense"):
        norm(x)
    meta = fusebook.nn.SwiGLU(8, 16, device="meta")
    assert meta(torch.ones(3, 8, device="meta")).is_meta


# Weights of few bits --------------------------------------------------------------------------------------------------


def quantized(bias=True, dtype=torch.float16, **options):
    torch.manual_seed(0)
    return fusebook.nn.QuantizedLinear.from_linear(nn.Linear(72, 20, bias, DEVICE, dtype), **options)


@pytest.mark.parametrize("options", [{}, {"bits": 8, "group": 32, "symmetric": False, "bias": False}])
def test_a_quantized_layer_is_its_matmul_and_comes_back(options):
    layer, x = quantized(**options), torch.randn(2, 3, 72, device=DEVICE, dtype=torch.float16)
    want = fusebook.quantized_matmul(x, layer.packed, layer.bias)
    assert torch.equal(layer(x), want)
    exact = F.linear(
        x.double(), layer.packed.dequantize().double(), None if layer.bias is None else layer.bias.double()
    )
    torch.testing.assert_close(want.double(), exact, atol=2e-3, rtol=2e-3)
    again = fusebook.nn.QuantizedLinear(72, 20, device=DEVICE, dtype=torch.float16, **{"bias": True, **options})
    assert not again(x).any()
    again.load_state_dict(torch.load(_saved(layer.state_dict()), weights_only=True))
    copies = [again, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to(DEVICE)]
    assert all(torch.equal(each(x), want) for each in copies)
    assert {*layer.state_dict()} >= {"words", "scales", "format"}


def _saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_quantized_layer_that_is_cast_keeps_its_scales():
    layer = quantized(dtype=torch.float32)
    cast = copy.deepcopy(layer).to(torch.bfloat16)
    assert cast.scales.dtype == torch.float32 and torch.equal(cast.scales, layer.scales)
    x = torch.randn(3, 72, device=DEVICE).bfloat16()
    assert cast.bias.dtype == torch.bfloat16
    torch.testing.assert_close(cast(x), layer(x), atol=0.02, rtol=0.02)
    with pytest.raises(TypeError, match="expected x to be float16 or bfloat16"):
        layer(x.float())


def test_gradients_of_a_quantized_layer_flow_to_its_input_and_bias():
    layer, x = quantized(), torch.randn(3, 72, device=DEVICE, dtype=torch.float16, requires_grad=True)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    layer(x).sum().backward()
    weight = layer.packed.dequantize()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 72), atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(layer.bias.grad, torch.full_like(layer.bias, 3))


def test_a_quantized_layer_compiles():
    layer, x = quantized(), torch.randn(3, 72, device=DEVICE, dtype=torch.float16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def test_what_a_quantized_layer_refuses():
    layer = quantized()
    other = fusebook.nn.QuantizedLinear(72, 20, group=64, device=DEVICE, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"of version 2, bits 4, group 64, .*got version 2, bits 4, group 128"):
        other.load_state_dict(layer.state_dict())
    newer = {**layer.state_dict(), "format": layer.format + torch.tensor([1, 0, 0, 0, 0], device=layer.format.device)}
    with pytest.raises(ValueError, match=r"got version 3, .* pack weights of another version again"):
        layer.load_state_dict(newer)
    with pytest.raises(TypeError, match="expected a torch.nn.Linear, got Bilinear"):
        fusebook.nn.QuantizedLinear.from_linear(nn.Bilinear(4, 4, 8))
    meta = fusebook.nn.QuantizedLinear(72, 20, device="meta", dtype=torch.float16)
    assert meta(torch.ones(3, 72, device="meta", dtype=torch.float16)).is_meta
