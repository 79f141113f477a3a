"""Optimizers of PyTorch whose step is one launch of Fusebook's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusebook.kernels._call import integer
from fusebook.kernels.adamw import adamw_step

__all__ = ["AdamW"]

#: `torch.compiler.disable` that does not import the compiler, as torch's own optimizers have it.
_uncompiled: Any = getattr(torch, "_disable_dynamo", lambda function: function)
_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_DENSE = torch.strided


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with one launch a step, for each group of parameters, device and number of steps done.

    It is a `torch.optim.AdamW`: schedulers, gradient clipping, ``GradScaler``, hooks and closures work with it. Each of
    the two loads the ``state_dict`` of the other.

    Parameters
    ----------
    params : iterable
        Parameters, groups or named parameters, as of `torch.optim.AdamW`. Parameters without gaps in memory, float16,
        bfloat16, float32 or float64. Of a DTensor, as FSDP2 has it, each process steps its own shard.
    lr : float or torch.Tensor
        The learning rate. A tensor on the device of the parameters is read there, without waiting for it.
    betas, eps, weight_decay, amsgrad, maximize
        As of `torch.optim.AdamW`.
    capturable : bool
        Count steps on the device, so that a CUDA graph can hold the step. Step once before the capture.
    seed : int, optional
        Round bfloat16 parameters by chance, see `fusebook.adamw_step`. Saved with the state.

    Raises
    ------
    ValueError
        For numbers out of range. By ``load_state_dict``, before anything changes, for a state of other shapes or
        lengths, or one of another optimizer.
    RuntimeError
        By ``step``, for a first step while a CUDA graph is captured, and without `capturable` for every step.

    Notes
    -----
    ``GradScaler`` divides the gradients by its scale before the step, and reads on the host whether all are finite.

    The averages have the dtype of their parameter, as in `torch.optim.AdamW`.

    Examples
    --------
    >>> import fusebook, torch
    >>> model = torch.nn.Linear(2, 1, device="cuda")  # doctest: +SKIP
    >>> optimizer = fusebook.optim.AdamW(model.parameters(), lr=0.1)  # doctest: +SKIP
    >>> model(torch.ones(1, 2, device="cuda")).sum().backward()  # doctest: +SKIP
    >>> optimizer.step()  # doctest: +SKIP
    """

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
        capturable: bool = False, seed: int | None = None,
    ) -> None:  # fmt: skip
        if seed is not None:
            seed = _seed(seed)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable)
        self.defaults["seed"] = seed
        for group in self.param_groups:
            group.setdefault("seed", seed)

    @_uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss and its gradients again.

        Returns
        -------
        Any
            What `closure` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                "AdamW: expected gradients that are scaled back, got grad_scale or found_inf; delete these attributes, "
                "and call unscale_ of GradScaler"
            )
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        launches = [made for group in self.param_groups for made in self._launches(group, capturing)]
        for i, (group, params, count) in enumerate(launches):
            seed = None if group["seed"] is None else _seed(group["seed"]) + i * 0x9E3779B1
            self._launch(group, params, count, None if seed is None else seed % 0x7FFFFFFF)  # more is not used
        return loss

    def _launches(self, group: dict[str, Any], capturing: bool) -> list[tuple[dict[str, Any], list[Tensor], Tensor]]:
        """Parameters of a group that one launch steps: of one device, after the same number of steps."""
        params = [p for p in group["params"] if p.grad is not None]
        new = [p for p in params if not self.state[p]]
        if capturing and (new or not group["capturable"]):
            raise RuntimeError(
                "AdamW: expected capturable=True and a step before a CUDA graph is captured, got a first step or "
                "capturable=False; step once, then capture"
            )
        for p in new:
            # Of a known number, so that fake tensors count too.
            self.state[p]["step"] = torch.tensor(0.0, device="cpu")
            self.state[p].update({key: torch.zeros_like(p) for key in _STATE[: 3 if group["amsgrad"] else 2]})
        if new:
            self._share_counts(group, new)
        known: dict[int, Any] = {}
        launches: dict[Any, list[Tensor]] = {}
        for p in params:
            count = self.state[p]["step"]
            if id(count) not in known:  # tensors on the device are not read: they are the same, or count apart
                known[id(count)] = id(count) if group["capturable"] else count.item()
            rounded = group["seed"] is not None and p.dtype == torch.bfloat16
            launches.setdefault((known[id(count)], p.device, rounded), []).append(p)
        made = []
        taken = {id(self.state[p]["step"]) for p in group["params"] if p.grad is None and self.state.get(p)}
        for some in launches.values():
            count = self.state[some[0]]["step"]
            if not group["capturable"]:
                count = count.cpu() + 1
            elif id(count) in taken:  # by parameters that are not stepped now, or by another launch
                if capturing:
                    raise RuntimeError(
                        "AdamW: expected gradients of the parameters that the steps before had, got those of others; "
                        "step once with these, then capture"
                    )
                count = count.clone()
            made.append((group, some, count))
            taken.add(id(count))
        return made

    def _launch(self, group: dict[str, Any], params: list[Tensor], count: Tensor, seed: int | None) -> None:
        states = [self.state[p] for p in params]
        try:
            lists = [[_local(s[key]) for s in states] for key in _STATE[: 3 if group["amsgrad"] else 2]]
        except KeyError:  # since amsgrad was set
            _check_group(group, self.state)
            raise
        beta1, beta2 = (b.item() if isinstance(b, Tensor) else b for b in group["betas"])
        mine = [_local(p) for p in params]
        lr = group["lr"]
        if isinstance(lr, Tensor):  # as torch.optim has it, one on the CPU is a number
            device = mine[0].device
            lr = lr.item() if lr.device.type == "cpu" != device.type else lr.to(device)
        adamw_step(
            mine, [_gradient(p, local) for p, local in zip(params, mine, strict=True)], *lists,
            step=count if group["capturable"] else int(count), lr=lr, beta1=beta1, beta2=beta2,
            eps=group["eps"], weight_decay=group["weight_decay"], maximize=group["maximize"],
            seed=seed if params[0].dtype == torch.bfloat16 else None,
        )  # fmt: skip
        for s in states:
            s["step"] = count

    def _share_counts(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Give parameters that did as many steps one tensor that counts them, so that one launch steps all of them."""
        shared: dict[Any, Tensor] = {}
        for p in params:
            count = self.state[p]["step"]
            device = p.device if group["capturable"] else torch.device("cpu")
            placed = count.detach().to(device, torch.float32, copy=True).view(())
            self.state[p]["step"] = shared.setdefault((device, float(count)), placed)

    def state_dict(self) -> dict[str, Any]:
        """The state as of `torch.optim.AdamW`, which counts the steps of each parameter apart.

        Returns
        -------
        dict
            The state and the groups. Averages are not copied.
        """
        found = super().state_dict()
        found["state"] = {
            key: {**state, "step": state["step"].clone()} if "step" in state else state
            for key, state in found["state"].items()
        }
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            _check_group(group, state["state"])
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("seed", self.defaults.get("seed"))
            stepped = [p for p in group["params"] if self.state.get(p)]
            for p in stepped:
                for key in _STATE:
                    value = self.state[p].get(key)
                    if value is not None and _local(value).stride() != _local(p).stride():
                        self.state[p][key] = torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)
            self._share_counts(group, stepped)


def _seed(value: Any) -> int:
    return integer("AdamW", "seed", value, "None rounds to the nearest")


def _check_group(group: dict[str, Any], states: Any) -> None:
    """Refuse a state that is not one of AdamW for these parameters."""
    remedy = "load a state of AdamW for the same model"
    if missing := [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]:
        raise ValueError(f"AdamW: expected groups with {missing[0]}, got {sorted(group)}; {remedy}")
    if not isinstance(group["betas"], (tuple, list)) or len(group["betas"]) != 2:
        raise ValueError(f"AdamW: expected betas to be two numbers, got {group['betas']!r}; {remedy}")
    for p in group["params"]:
        state = states.get(p)
        if not state:
            continue
        for key in ("step", *_STATE[: 3 if group.get("amsgrad") else 2]):
            if key not in state:
                raise ValueError(f"AdamW: expected a state with {key}, got {sorted(state)}; {remedy}")
            value = state[key]
            if key == "step":
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise ValueError(f"AdamW: expected step to be one number, got {tuple(value.shape)}; {remedy}")
                try:
                    dense = getattr(value, "layout", _DENSE) is _DENSE
                    known = dense and 0 <= float(value) < 2**63 and float(value) % 1 == 0
                except (TypeError, ValueError, OverflowError, RuntimeError):  # text, complex numbers, or on meta
                    known = False
                if not known:
                    raise ValueError(f"AdamW: expected step to be a number of steps done, got {value!r}; {remedy}")
            elif not isinstance(value, Tensor) or value.shape != p.shape:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"AdamW: expected {key} of shape {tuple(p.shape)} as its parameter, got {got}; {remedy}"
                )
            elif value.layout is not _DENSE:
                raise ValueError(f"AdamW: expected {key} to be dense, got {value.layout}; {remedy}")
            elif _placed(value) != _placed(p):
                raise ValueError(
                    f"AdamW: expected {key} to be placed as its parameter, which is {_placed(p)}, got "
                    f"{_placed(value)}; use torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
                )


def _placed(t: Any) -> Any:
    """The mesh and the placements of a DTensor."""
    return (t.device_mesh, t.placements) if hasattr(t, "to_local") else "a tensor of one process"


def _local(t: Any) -> Any:
    """The part of a DTensor that this process has, or the tensor."""
    return t.to_local() if hasattr(t, "to_local") else t


def _gradient(p: Any, local: Tensor) -> Tensor:
    """The gradient of the local part, with its strides."""
    g = p.grad
    if hasattr(p, "to_local") and g.placements != p.placements:  # a sum that is still apart, for example
        g = g.redistribute(p.device_mesh, p.placements)
    g = _local(g)
    if g.layout is torch.strided and g.stride() != local.stride():
        g = torch.empty_like(local, dtype=g.dtype, requires_grad=False).copy_(g)
    return g  # type: ignore[no-any-return]
