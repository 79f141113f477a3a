# SPDX-License-Identifier: BSD-3-Clause
"""Modules on Fusebook's operators, with the parameters and the state_dict keys of what they replace."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fusebook.kernels.losses import linear_cross_entropy
from fusebook.kernels.norms import layer_norm, rms_norm
from fusebook.kernels.products import swiglu
from fusebook.kernels.quantized import VERSION, PackedWeight, quantize, quantized_matmul

__all__ = ["LayerNorm", "LinearCrossEntropyLoss", "QuantizedLinear", "RMSNorm", "SwiGLU"]


def _check_rows(module: nn.Module, shape: tuple[int, ...], x: Any) -> None:
    """Refuse rows of another length, which an operator without weights would take."""
    if isinstance(x, Tensor) and not x.is_nested and x.shape[-1:] != shape:
        raise ValueError(
            f"{type(module).__name__}: expected rows of {shape[0]} elements, got {tuple(x.shape)}; pass another "
            "tensor, or make the module for this size"
        )


def _one_axis(module: nn.Module, shape: tuple[int, ...]) -> None:
    if len(shape) != 1:
        raise ValueError(
            f"{type(module).__name__}: expected normalized_shape to have one axis, got {shape}; flatten its axes first"
        )


class RMSNorm(nn.RMSNorm):
    """`fusebook.rms_norm` as a module: a `torch.nn.RMSNorm` of the last axis.

    Parameters
    ----------
    normalized_shape : int
        The number of elements of a row.
    eps : float, default 1e-6
        Added to the mean of the squares.
    elementwise_affine : bool
        Whether rows are multiplied by a learned weight.
    device, dtype
        Of the weight.
    add_one : bool
        Whether rows are multiplied by ``1 + weight``, as Gemma's are. The weight is then zeros at first.

    Notes
    -----
    The result has the dtype of the input. The weight may have another one; ``1 + weight`` is not rounded to it.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        add_one: bool = False,
    ) -> None:
        self.add_one = add_one  # which resetting parameters reads
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _one_axis(self, self.normalized_shape)

    def reset_parameters(self) -> None:
        """Set the weight so that the module multiplies by one."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 0.0 if self.add_one else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows along the last axis."""
        _check_rows(self, self.normalized_shape, x)
        weight: Tensor | None = self.weight
        if self.add_one and weight is not None:
            weight = 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        return rms_norm(x, weight, eps=self.eps)  # type: ignore[arg-type, return-value]

    def extra_repr(self) -> str:
        """Say what was given, besides the device and the dtype."""
        return super().extra_repr() + (", add_one=True" if self.add_one else "")


class LayerNorm(nn.LayerNorm):
    """`fusebook.layer_norm` as a module: a `torch.nn.LayerNorm` of the last axis, with the same parameters.

    The result has the dtype of the input.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _one_axis(self, self.normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows along the last axis."""
        _check_rows(self, self.normalized_shape, x)
        return layer_norm(x, self.weight, self.bias, eps=self.eps)  # type: ignore[return-value]


class SwiGLU(nn.Module):
    """The MLP of a Llama, ``down_proj(silu(gate_proj(x)) * up_proj(x))``, by `fusebook.swiglu` and a matmul.

    Parameters
    ----------
    hidden_size, intermediate_size : int
        The elements of a row of the input, and of a row between the matmuls.
    bias : bool
        Whether the three matmuls add a bias.
    recompute : bool
        As of `fusebook.swiglu`: whether to save memory or time where a gradient is recorded.
    device, dtype
        Of the weights.

    Notes
    -----
    The weights are those of three `torch.nn.Linear`, with the names that transformers gives them. Of ``gate_proj`` and
    ``up_proj`` only the weights are read: their hooks do not run. An adapter instead of one of them is refused.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        recompute: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to rows along the last axis."""
        gate, up = self.gate_proj, self.up_proj
        for name, linear in (("gate_proj", gate), ("up_proj", up)):
            if type(linear).forward is not nn.Linear.forward:
                raise TypeError(
                    f"SwiGLU: expected {name} to be a torch.nn.Linear, got {type(linear).__name__}; call "
                    "fusebook.silu_mul on the results of both layers"
                )
        bias = None if gate.bias is None else torch.stack([gate.bias, up.bias])
        rows = swiglu(x, gate.weight.T, up.weight.T, bias, recompute=self.recompute)
        return self.down_proj(rows)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Say whether the backward pass computes both products again."""
        return "recompute=True" if self.recompute else ""


class LinearCrossEntropyLoss(nn.Module):
    """`fusebook.linear_cross_entropy` as a module, with a last layer whose logits are never all in memory.

    Parameters
    ----------
    in_features, num_classes : int
        The elements of a hidden state, and the number of classes.
    bias : bool
        Whether the last layer adds a bias to its logits.
    weight : torch.Tensor, optional
        What each class counts, as in `torch.nn.CrossEntropyLoss`.
    device, dtype
        Of the last layer.
    **options
        ``reduction``, ``ignore_index``, ``label_smoothing``, ``z_loss``, ``softcap``, ``rows`` and ``check``, as of
        `fusebook.linear_cross_entropy`.

    Notes
    -----
    The keys of its state_dict are those of `torch.nn.LinearCrossEntropyLoss`, which torch has since 2.13. To train a
    head that a model has already, assign it: ``loss.linear = model.lm_head``.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        accepted = {*(linear_cross_entropy.__kwdefaults__ or {})} - {"bias"}
        if unknown := {*options} - accepted:
            raise TypeError(
                f"LinearCrossEntropyLoss: expected options among {', '.join(sorted(accepted))}, got "
                f"{', '.join(sorted(unknown))}; leave them out"
            )
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)
        self.register_buffer("weight", weight)
        self.options = options

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of hidden states, given the class of each."""
        linear = self.linear
        given = hidden, linear.weight, target, self.weight
        return linear_cross_entropy(*given, bias=linear.bias, **self.options)

    def extra_repr(self) -> str:
        """List the options that were given."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class QuantizedLinear(nn.Module):
    """`fusebook.quantized_matmul` as a module: a linear layer whose weight has four or eight bits.

    Made by `from_linear`. What the constructor makes is zero, for a state_dict to be loaded into.

    Parameters
    ----------
    in_features, out_features : int
        The elements of a row of the input, and of the result.
    bias : bool
        Whether a bias is added.
    bits, group, symmetric
        As of `fusebook.quantize`.
    device, dtype
        Of the scales and of the bias: float16, bfloat16 or float32.

    Notes
    -----
    The weight is fixed: it is in buffers, and training changes the bias alone. Gradients flow to the input. The input
    is float16 or bfloat16, and so is the result; a bias of another dtype is cast. Scales keep their dtype where the
    module is cast, as other ones would not fit the codes.
    """

    format: Tensor
    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bits: int = 4,
        group: int = 128,
        symmetric: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = out_features, in_features
        dtype = torch.get_default_dtype() if dtype is None else dtype
        packed = PackedWeight.of_zeros(*sizes, bits, group, symmetric, dtype=dtype, device=device)
        self._keep(packed, torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    def _keep(self, packed: PackedWeight, bias: Tensor | None) -> None:
        self.out_features, self.in_features = packed.shape
        self.bits, self.group, self.symmetric = packed.bits, packed.group, packed.zeros is None
        self.register_buffer("words", packed.words)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("zeros", packed.zeros)
        self.register_buffer("format", torch.tensor(self._format()))  # so that a state_dict has it
        self.bias = None if bias is None else nn.Parameter(bias)

    def _format(self) -> list[int]:
        return [VERSION, self.bits, self.group, self.out_features, self.in_features]

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, bits: int = 4, group: int = 128, symmetric: bool = True
    ) -> "QuantizedLinear":
        """Quantize a layer; its weight and its bias stay as they are.

        Parameters
        ----------
        linear : torch.nn.Linear
            Of finite weights, on the device on which the module will run.
        bits, group, symmetric
            As of `fusebook.quantize`.
        """
        if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
            raise TypeError(
                f"QuantizedLinear.from_linear: expected a torch.nn.Linear, got {type(linear).__name__}; merge an "
                "adapter into its layer first"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        bias = None if linear.bias is None else linear.bias.detach().clone()
        made._keep(quantize(linear.weight, bits, group, symmetric), bias)
        return made.train(linear.training)

    @property
    def packed(self) -> PackedWeight:
        """The weight, as `fusebook.quantized_matmul` takes it."""
        shape = self.out_features, self.in_features
        return PackedWeight(self.words, self.scales, self.zeros, shape, self.bits, self.group)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply rows along the last axis by the weight."""
        bias: Tensor | None = self.bias
        if bias is not None and isinstance(x, Tensor):
            bias = bias.to(x.dtype)
        return quantized_matmul(x, self.packed, bias)

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedLinear":
        before = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != before.dtype:
            self.scales = before.to(self.scales.device)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        found = state_dict.get(f"{prefix}format")
        if found is not None and found.tolist() != self._format():
            names = ("version", "bits", "group", "out_features", "in_features")
            got, wanted = (", ".join(map("{} {}".format, names, values)) for values in (found.tolist(), self._format()))
            raise ValueError(
                f"QuantizedLinear: expected a packed weight of {wanted}, got {got}; make the module alike, and pack "
                "weights of another version again"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """Say what was given, besides the device and the dtype."""
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{text}, bits={self.bits}, group={self.group}, symmetric={self.symmetric}"
