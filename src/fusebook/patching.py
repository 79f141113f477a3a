# SPDX-License-Identifier: BSD-3-Clause
"""Fusebook's operators in a model of transformers: `patch` puts them in, and `unpatch` takes them out.

A module keeps its class, parameters and hooks, and gets another ``forward``. Two questions decide about it.
Where is its forward from? It must be that of a known family, so a subclass with another one is left alone. What does it
compute? Its class runs at a small size, and the result and the gradients must be those of the replacement. The second
question finds what another release of transformers, another activation or another helper changed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusebook.kernels.elementwise import silu_mul, silu_mul_eager
from fusebook.kernels.losses import linear_cross_entropy
from fusebook.kernels.norms import rms_norm, rms_norm_eager
from fusebook.kernels.rope import rope, rope_eager

__all__ = ["Patched", "patch", "unpatch"]

#: The families of transformers whose modules are known, and the modules that define them.
FAMILIES = ("gemma", "llama", "mistral", "qwen2", "qwen3")
_SOURCES = tuple(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES)


class Patched(NamedTuple):
    """What `patch` did. Printed, it has a line for each kind of module.

    ``replaced`` has what computes each replaced module, by its name. ``left`` has why each other module that is of a
    known kind was left alone.
    """

    replaced: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        """List each sentence once, with the first module that it is about."""
        lines = []
        for title, sentences in zip(self._fields, self, strict=True):
            for sentence in dict.fromkeys(sentences.values()):
                first, *more = (name or "the model" for name, said in sentences.items() if said == sentence)
                lines.append(f"{title}: {first}{f' and {len(more)} more' if more else ''}: {sentence}")
        return "\n".join(lines)


# What a backward pass computes again ---------------------------------------------------------------------------------

_autograd: Any = torch._C._autograd


def _memory(t: Tensor) -> Any:
    """What two tensors of the same elements in the same memory share."""
    return t.data_ptr(), t.numel(), t.dtype, t.is_contiguous(), t._version


class _Again:
    """How a result is computed again: once for all operations whose gradients need it."""

    def __init__(self, y: Tensor, function: Callable[..., Any], args: Sequence[Tensor], options: Any) -> None:
        self.memory, self.function, self.options = _memory(y), function, options
        self.args = [t.detach() for t in args]
        self.found: Tensor | None = None

    def __call__(self) -> Tensor:
        if self.found is None:
            with torch.no_grad():
                self.found = self.function(*self.args, **self.options)
        return self.found


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors whose result says how to compute it again.

    It does not under autocast, where it would have another dtype, nor where others decide what is kept for the backward
    pass: a compiler, checkpointing or offload.
    """

    def call(*args: Tensor, **options: Any) -> Any:
        y = function(*args, **options)
        if (
            not torch.compiler.is_compiling()
            and type(y) is Tensor
            and y.requires_grad
            and y.is_contiguous()
            and not y.is_meta
            and not torch.is_autocast_enabled(y.device.type)
            and _autograd._saved_tensors_hooks_is_enabled()
            and not _autograd._top_saved_tensors_default_hooks(True)
        ):
            y.fusebook_again = _Again(y, function, args, options)  # type: ignore[attr-defined]
        return y

    return call


def _recomputing(y: Tensor) -> Any:
    """Operations within it keep how `y` is computed, and not `y`."""
    again: Any = None if torch.compiler.is_compiling() else getattr(y, "fusebook_again", None)
    if again is None:
        return contextlib.nullcontext()

    def pack(t: Tensor) -> Any:
        same = type(t) is Tensor and t.layout is torch.strided and _memory(t) == again.memory
        return (again, t.shape) if same else t.detach()

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0]().view(kept[1])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _mlp_again(product: Callable[..., Any]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        with _recomputing(x):
            gate, up = self.gate_proj(x), self.up_proj(x)
        y = product(gate, up)
        with _recomputing(y):
            return self.down_proj(y)  # type: ignore[no-any-return]

    return forward


def _attention_again(function: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _recomputing(hidden_states):
            return function(self, hidden_states, *args, **kwargs)

    return forward


# Replacements --------------------------------------------------------------------------------------------------------

# Each is made of the operator that it calls: Fusebook's in a model, PyTorch's where it is compared.


def _rms(norm: Callable[..., Any]) -> Callable[..., Tensor]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if hidden_states.dtype != weight.dtype:  # the result has the wider one
            hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, weight.dtype))
        return norm(hidden_states, weight, eps=self.variance_epsilon)  # type: ignore[no-any-return]

    return forward


def _rms_of_one_more(norm: Callable[..., Any]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        weight = 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        return norm(x, weight, eps=self.eps)  # type: ignore[no-any-return]

    return forward


def _mlp(product: Callable[..., Any]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:  # calls the layers, which may have hooks and adapters
        return self.down_proj(product(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]

    return forward


class _Kind(NamedTuple):
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    fused: Callable[..., Any]
    eager: Callable[..., Any]
    said: str
    again: Callable[[Callable[..., Any]], Callable[..., Any]]  # if it is given what says how to compute it again


_RMS = _Kind(_rms, rms_norm, rms_norm_eager, "fusebook.rms_norm", _rms)
_RMS_OF_ONE_MORE = _Kind(
    _rms_of_one_more, rms_norm, rms_norm_eager, "fusebook.rms_norm with 1 + weight", _rms_of_one_more
)
_MLP = _Kind(_mlp, silu_mul, silu_mul_eager, "fusebook.silu_mul between its matmuls", _mlp_again)


def _kind_of(module: nn.Module) -> _Kind | None:
    """The replacement that a module may have, by its parameters, children and options."""
    own = dict(module.named_parameters(recurse=False))
    children = {name for name, _ in module.named_children()}
    if {*own} == {"weight"} and own["weight"].dim() == 1 and not children:
        return _RMS if hasattr(module, "variance_epsilon") else _RMS_OF_ONE_MORE
    return _MLP if {"gate_proj", "up_proj", "down_proj"} <= children else None


def _values(*shape: int) -> Tensor:
    """Numbers without a pattern that use no generator."""
    size = torch.Size(shape).numel()
    return torch.arange(1, size + 1, dtype=torch.float64, device="cpu").mul_(1.7).sin_().view(shape)


def _small(module: nn.Module) -> nn.Module:
    """A module of the same class and options, on the CPU, with rows of 8 elements."""
    small = object.__new__(type(module))  # the arguments of its class are not known
    nn.Module.__init__(small)
    vars(small).update({name: value for name, value in vars(module).items() if name not in vars(small)})
    for name, _ in module.named_parameters(recurse=False):
        small.register_parameter(name, nn.Parameter(_values(8)))
    for name, child in module.named_children():
        if name.endswith("_proj"):
            rows, columns = (8, 16) if name == "down_proj" else (16, 8)
            child = nn.Linear(columns, rows, getattr(child, "bias", None) is not None, device="meta")
            for key, p in [*child.named_parameters()]:
                setattr(child, key, nn.Parameter(_values(*p.shape)))
        small.add_module(name, child)
    return small


def _differs(module: nn.Module, kind: _Kind) -> str:
    """How the results or gradients of a module's class differ from those of a replacement; empty if they agree."""
    found = []
    with torch.inference_mode(False), torch.enable_grad():
        small = _small(module)
        for forward in (type(module).forward, kind.make(kind.eager)):
            # Rows so small that eps counts, so large that a limit would, and some between.
            scales = torch.tensor([[1e-3], [0.1], [1.0], [1e3]], dtype=torch.float64, device="cpu")
            x = (_values(4, 8) * scales).requires_grad_()
            try:
                y = forward(small, x)
                found.append([y, *torch.autograd.grad(y, [x, *small.parameters()], _values(*y.shape))])
            except Exception as error:  # whatever it does, it is not known
                return f"it does not run at a small size: {type(error).__name__}: {error}"
    for own, other in zip(*found, strict=True):
        # Norms compute in float32, whatever they are given.
        if own.shape != other.shape or not bool(((own - other).abs() <= 1e-4 * other.abs().amax(-1, True)).all()):
            return f"at a small size its results or gradients are not those of {kind.said}"
    return ""


# Rotary embedding ----------------------------------------------------------------------------------------------------

_ROTATE = "apply_rotary_pos_emb"  # the global function that every attention calls


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return rope(q, cos, sin, k, heads=unsqueeze_dim - 4)


def _with_global(function: Any, name: str, value: Any) -> Any:
    """A copy of a function, and of the one that it wraps, in which a global name has another value."""
    inner, cells, names = getattr(function, "__wrapped__", None), function.__closure__, function.__globals__
    if inner is None:
        names = {**names, name: value}
        names.pop("__name__")  # or torch.compile looks for the globals of this module
    else:
        within = _with_global(inner, name, value)
        cells = tuple(types.CellType(within) if c.cell_contents is inner else c for c in cells or ())
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    if inner is not None:
        made.__wrapped__ = within  # type: ignore[attr-defined]
    return made


def _unknown_rotation(attention: nn.Module) -> str:
    """Why an attention's rotation cannot be replaced; empty if it can."""
    inner = inspect.unwrap(type(attention).forward)
    rotate = inner.__globals__.get(_ROTATE)
    if _ROTATE not in inner.__code__.co_names or getattr(rotate, "__module__", None) != inner.__module__:
        return f"its forward does not call the {_ROTATE} of its own module"
    x, angles = _values(2, 1, 2, 3, 8), _values(1, 3, 4).repeat(1, 1, 2)
    for dim in (1, 2):
        q, k = x if dim == 1 else x.transpose(2, 3)
        found = rotate(q, k, angles.cos(), angles.sin(), unsqueeze_dim=dim)
        wanted = [rope_eager(t, angles.cos().unsqueeze(dim), angles.sin().unsqueeze(dim)) for t in (q, k)]
        if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True)):
            return f"its {_ROTATE} does not compute what fusebook.rope does"
    return ""


def _unknown_angles(rotary: nn.Module) -> str:
    """Why the angles of a model may be others than `rope` reads: each of the first half twice; empty if they are."""
    if why := _unknown(rotary):
        return f"angles are from its model's rotary_emb, and {why}"
    small = copy.copy(rotary)
    vars(small)["_buffers"] = {name: _values(4) for name in rotary._buffers}
    try:
        angles = type(rotary).forward(small, _values(1, 3, 8), torch.arange(3, device="cpu")[None])
    except Exception as error:
        return f"its model's rotary_emb does not run at a small size: {type(error).__name__}: {error}"
    twice = all(torch.equal(*t.chunk(2, -1)) for t in angles)
    return "" if twice else "the angles of its model's rotary_emb are not each there twice"


# The loss ------------------------------------------------------------------------------------------------------------


class _WithoutLogits:
    """What the forward of a causal LM gets as its model: the head returns hidden states, and the loss applies it."""

    def __init__(self, whole: Any) -> None:
        self.model, self.config, self.whole = whole.model, whole.config, whole

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden

    def loss_function(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **rest: Any,
    ) -> Tensor:
        if shift_labels is None:  # each token predicts the next one, and the last one nothing
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        summed = num_items_in_batch is not None
        options = {"reduction": "sum" if summed else "mean", "ignore_index": ignore_index}
        loss = self.whole.lm_head(logits.reshape(-1, logits.shape[-1]), target, **options)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch if summed else loss  # type: ignore[no-any-return]


#: Hidden states whose logits are in memory at a time, without and with `recompute`.
_ROWS = 2048, 1024


def _head(check: bool | None, rows: int) -> Callable[..., Tensor]:
    """The forward of a last layer that computes its loss, too: within the module, where FSDP has its weights."""

    def forward(self: Any, input: Tensor, target: Tensor | None = None, **options: Any) -> Tensor:
        if target is None:
            return nn.functional.linear(input, self.weight, self.bias)
        options |= {"rows": rows, "check": check}
        return linear_cross_entropy(input, self.weight, target, bias=self.bias, **options)

    return forward


def _causal(original: Callable[..., Any], loss: Callable[..., Any]) -> Callable[..., Any]:
    names = [*inspect.signature(original).parameters][1:]

    @functools.wraps(original)  # trainers read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        as_dict = given.get("return_dict")
        if (
            given.get("labels") is None
            or not torch.is_grad_enabled()
            or self.loss_function is not loss
            or not (self.config.return_dict if as_dict is None else as_dict)
        ):
            return original(self, *args, **kwargs)
        output = original(_WithoutLogits(self), **given)
        return type(output)(**{**output, "logits": None})

    return forward


class _Nothing:
    """An output all of whose fields are None, but for those that are given."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def __getattr__(self, name: str) -> None:
        return None


def _unknown_loss(model: Any, known: Callable[..., Any]) -> str:
    """Why the logits of a causal LM are needed; empty if they go from its head to its loss, and nowhere else."""
    head = model.lm_head
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return f"its head is a {type(head).__name__}, or has a forward of its own, and no plain torch.nn.Linear"
    if model.loss_function is not known:
        return "its loss is not transformers' ForCausalLMLoss"
    hidden, logits, labels, loss, items = torch.zeros(1, 2, 3, device="cpu"), object(), object(), object(), object()
    seen: list[Any] = []

    def returning(result: Any) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            seen.append((given, named))
            return result

        return noted

    stub = types.SimpleNamespace(
        config=model.config,
        model=lambda *args, **kwargs: _Nothing(last_hidden_state=hidden),
        lm_head=returning(logits),
        loss_function=returning(loss),
    )
    try:
        output = type(model).forward(stub, input_ids=None, labels=labels, num_items_in_batch=items, return_dict=True)
        ((rows,), _), (_, given) = seen
        same = rows.shape == hidden.shape and given["logits"] is logits is output.logits
        same = same and given["labels"] is labels and given["num_items_in_batch"] is items and output.loss is loss
    except Exception as error:
        return f"its forward is not one that is known: {type(error).__name__}: {error}"
    return "" if same else "its forward does more with the logits than to pass them to the loss"


# Patching ------------------------------------------------------------------------------------------------------------


def _put(module: nn.Module, forward: Callable[..., Any]) -> None:
    forward.fusebook = True  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)


def _is_ours(forward: Any) -> bool:
    return hasattr(getattr(forward, "__func__", None), "fusebook")


def _unknown(module: nn.Module) -> str:
    """Why the forward of a module is not that of a known family; empty if it is."""
    own = vars(module).get("forward")
    if own is not None:
        return "it is patched already" if _is_ours(own) else "its forward was set on the module itself"
    definer = next(c for c in type(module).__mro__ if "forward" in vars(c))
    if definer.__module__ not in _SOURCES:
        return f"the forward of {definer.__module__}.{definer.__qualname__} is not known; known are {_known()}"
    source = getattr(vars(definer)["forward"], "__module__", None)
    if source != definer.__module__:
        return f"the forward of {definer.__qualname__} was replaced by one of {source}"
    return ""


def _known() -> str:
    return ", ".join(family.capitalize() for family in FAMILIES)


def patch(model: nn.Module, *, loss: bool = True, recompute: bool = False, check: bool | None = None) -> Patched:
    """Let a model of transformers compute with Fusebook's operators: Llama, Mistral, Qwen2, Qwen3 or Gemma.

    RMS norms become `rms_norm`, the MLP's activation and product `silu_mul`, and the rotary embedding `rope`. If the
    model is given ``labels`` and a gradient is recorded, its loss becomes `linear_cross_entropy`. Parameters,
    state_dict, classes and hooks of the modules stay.

    Parameters
    ----------
    model : torch.nn.Module
        The model, or a module that has it inside, such as DistributedDataParallel. Patch before torch.compile.
    loss : bool
        Whether to replace the loss. Its logits are then not computed: ``output.logits`` is None in a step that records
        a gradient and has labels. In evaluation, under `torch.no_grad`, logits are there as before.
    recompute : bool
        Whether to save memory at the cost of some time. The backward pass then computes the results of norms and MLPs'
        activations again, and the loss takes fewer rows at a time. It leaves everything as it is under torch.compile,
        autocast and checkpointing, which decide themselves what is kept.
    check : bool, optional
        As of `linear_cross_entropy`: whether labels are read on the host before the loss.

    Returns
    -------
    Patched
        ``replaced`` and ``left``: by the name of each module, a sentence. Print it to see each sentence once.

    Raises
    ------
    TypeError
        If `model` is no `torch.nn.Module`.

    Notes
    -----
    A module is replaced if its forward is that of a known family, and if its class gives the same results and gradients
    at a small size. Everything else is left alone: a subclass with another forward, Gemma's MLP, which has another
    activation, and families that are not known. A weight that is sparse or a DTensor when the module runs is refused.

    A patched module refers to itself. The memory of a model that was deleted is free after `gc.collect`, or at once if
    the model was unpatched before.

    Examples
    --------
    >>> import fusebook, transformers  # doctest: +SKIP
    >>> model = transformers.AutoModelForCausalLM.from_pretrained("path")  # doctest: +SKIP
    >>> print(fusebook.patch(model))  # doctest: +SKIP
    """
    _check_model("patch", model)
    replaced: dict[str, str] = {}
    left: dict[str, str] = {}
    tried: dict[Any, str] = {}
    rotaries: list[Any] = [
        m.rotary_emb for m in model.modules() if isinstance(getattr(m, "rotary_emb", None), nn.Module)
    ]
    angles = [_unknown_angles(rotary) for rotary in rotaries] or ["no rotary_emb is in what was given"]
    for name, module in model.named_modules():
        kind, children = _kind_of(module), {child for child, _ in module.named_children()}
        attention, whole = {"q_proj", "k_proj"} <= children, "lm_head" in children
        if not (kind or attention or whole):
            continue
        said, why = "", _unknown(module)
        if why:
            pass
        elif kind:
            options = {name: value for name, value in vars(module).items() if isinstance(value, (int, float))}
            activation = getattr(module, "act_fn", None)
            key = type(module), kind, activation, *options.items()
            if key not in tried:
                tried[key] = _differs(module, kind)
            said, why = kind.said, tried[key]
            if why and activation is not None:
                why += f"; its activation is {type(activation).__name__}"
            elif not why:
                _put(module, kind.again(_again(kind.fused)) if recompute else kind.make(kind.fused))
        elif attention:
            said, why = "fusebook.rope for its queries and keys", next(filter(None, angles), "")
            why = why or _unknown_rotation(module)
            if not why:
                forward = _with_global(type(module).forward, _ROTATE, _rotate)
                _put(module, _attention_again(forward) if recompute else forward)
        elif not loss:
            why = "its loss was not to be replaced"
        else:
            from transformers.loss.loss_utils import ForCausalLMLoss

            said = "fusebook.linear_cross_entropy for its loss, without logits"
            why = _unknown_loss(module, ForCausalLMLoss)
            if not why:
                _put(module.get_submodule("lm_head"), _head(check, _ROWS[recompute]))
                _put(module, _causal(type(module).forward, ForCausalLMLoss))
        if why:
            left[name] = why
        else:
            replaced[name] = said
    if not replaced and not left:
        left[""] = f"it has no module of a known kind; known are those of {_known()}"
    return Patched(replaced, left)


def _check_model(name: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{name}: expected model to be a torch.nn.Module, got {type(model).__name__}; pass the model itself"
        )


def unpatch(model: nn.Module) -> list[str]:
    """Undo `patch`, in this model or in a copy of it.

    Parameters
    ----------
    model : torch.nn.Module
        What `patch` was given.

    Returns
    -------
    list of str
        The names of the modules that have their own forward again.
    """
    _check_model("unpatch", model)
    found = [(name, m) for name, m in model.named_modules() if _is_ours(vars(m).get("forward"))]
    for _, module in found:
        del module.forward
    return [name for name, _ in found]
