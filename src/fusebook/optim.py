"""Optimizers of PyTorch whose step is one launch of Fusebook's kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fusebook.kernels._call import integer, plain
from fusebook.kernels.adamw import adamw_step, begun_steps

__all__ = ["AdamW"]

#: `torch.compiler.disable` that does not import the compiler, as torch's own optimizers have it.
_uncompiled: Any = getattr(torch, "_disable_dynamo", lambda function: function)
_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_DENSE = torch.strided
_REMEDY = "load a state of AdamW for the same model"
#: What a `torch.amp.GradScaler` leaves for a step.
_SCALING = ("grad_scale", "found_inf")


@dataclasses.dataclass(slots=True)
class _Launch:
    """Parameters that one launch steps: of one device, after the same number of steps.

    `check` notices gradients of another kind. It is None where a tensor is not passed on as it is.
    """

    params: list[Tensor]
    states: list[dict[str, Any]]
    place: int  # of the first one in its group
    count: Tensor  # on the device one number that all share, else a number for each
    counts: list[Tensor] = dataclasses.field(default_factory=list)  # what the states have of it
    done: int = -1  # by the host; below 0 where the device counts
    seen: bytes | None = None  # what `count` holds where the host counts, unless a program writes to it
    kinds: list[type] | None = None  # of gradients that are stepped as they are
    shared: bool = False  # whether other processes may count in the same memory

    def count_by(self, count: Tensor) -> None:
        """Give all parameters one tensor for the number of steps done, which the device counts."""
        self._give(count, [count] * len(self.states), -1)

    def count_apart(self, done: int) -> None:
        """Give each parameter a number of steps done, which a program may write to."""
        with torch.inference_mode(False):  # else nothing may write to it outside
            count = torch.tensor([float(done)] * len(self.states), device="cpu", dtype=torch.float32)
            if type(count) is Tensor:
                self._give(count, [*count.unbind()], done)
                self.seen = count.numpy().tobytes()
            else:  # a fake tensor has a value where it is made of a number
                counts = [torch.tensor(float(done), device="cpu", dtype=torch.float32) for _ in self.states]
                self._give(count, counts, done)

    def count_on(self, by: int) -> None:
        """Count a step on the host, or take it back."""
        if self.shared:
            for s in self.states:
                s["step"].add_(by)
            return
        if type(self.count) is not Tensor:
            self.count_apart(self.done + by)
            return
        self.count.add_(by)
        self.done, self.seen = self.done + by, self.count.numpy().tobytes()

    def _give(self, count: Tensor, counts: list[Tensor], done: int) -> None:
        self.count, self.counts, self.done, self.seen = count, counts, done, None
        for s, own in zip(self.states, counts, strict=True):
            s["step"] = own

    def again(self) -> Any:
        """The gradients of the next step, or None if anything else has changed."""
        grads = [p.grad for p in self.params]
        counts = [s.get("step") for s in self.states]
        known = self.kinds == [*map(type, grads)] and _same(counts, self.counts)
        # Bytes, since a write by `data` or NumPy leaves no new version.
        known = known and (self.seen is None or self.count.numpy().tobytes() == self.seen)
        return grads if known else None


@dataclasses.dataclass(slots=True)
class _Kept:
    """What a step has found out about a group; the parameters `left` had no gradient."""

    params: list[Tensor]
    left: list[Tensor]
    seed: Any
    dtypes: list[torch.dtype]  # of `params`, of which a seed is for some
    launches: list[_Launch]

    def again(self, group: dict[str, Any]) -> list[Any]:
        """The gradients of each launch, with None among them if the next step has other launches."""
        if (
            len(self.params) != len(group["params"])
            or not _same(self.params, group["params"])
            or self.seed is not group.get("seed")
            or (self.seed is not None and [p.dtype for p in self.params] != self.dtypes)
            or any([p.grad is not None for p in self.left])
        ):
            return [None]
        return [launch.again() for launch in self.launches]


def _same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether these are the same objects, as far as the shorter one goes."""
    return all(map(operator.is_, some, others))


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
        Round bfloat16 parameters by chance, see `fusebook.adamw_step`. Saved with the state. If a
        state without seeds is loaded, such as torch's, this seed applies to all groups. Processes round a replica by
        the same bits if it is at the same place of the same group, the same replicas of that group have had gradients
        in the same steps, and all processes load a state where one does. Sizes of others do not matter. Give plain
        tensors that have a gradient on some processes only a separate group.

    Raises
    ------
    ValueError
        For numbers out of range, and groups whose weight decay is not decoupled. By ``load_state_dict``, before
        anything changes, for a state of other shapes or lengths, or one of another optimizer.
    TypeError
        By ``step``, for a gradient on another mesh than its parameter, and for a parameter that is a partial sum.
    RuntimeError
        By ``step``, for a first step while a CUDA graph is captured, and without `capturable` for every step.

    Notes
    -----
    A step by ``GradScaler`` does not wait for the GPU, as with ``fused=True``. The kernel divides gradients by the
    scale, and does nothing if one is not finite. Steps are then counted on the device. Unlike torch's step, this one
    leaves gradients scaled, unless ``unscale_`` was called. Call it of a ``ShardedGradScaler``, as for ``fused=True``:
    otherwise only processes with gradients that are not finite skip a step.

    If a parameter or a gradient is of a tensor subclass with memory, the step uses that memory directly.

    Where steps are counted on the device, also after `capturable` is set back, parameters share the tensor ``step`` in
    their states. To change the number of one of them, replace that tensor instead of writing to it. Give another
    optimizer a copy of a state. Between replays of a graph that holds the step, call ``step`` only if the same
    parameters have gradients. Where the host counts, a program may write to ``step``, but must not give it other memory
    by ``data`` or ``set_``. A step may replace these tensors, so look them up in the state each time.

    The averages have the dtype of their parameter, as in `torch.optim.AdamW`. Numbers of steps are float32, and end
    at 2**24, also if torch's default dtype is another. Threads that step one optimizer at once may lose counts, as
    there: let them take turns by a lock. If a signal's handler raises an error within a step, the step may be done in
    part, as there, and is not counted where the device counts.

    Examples
    --------
    >>> import fusebook, torch
    >>> model = torch.nn.Linear(2, 1, device="cuda")  # doctest: +SKIP
    >>> optimizer = fusebook.optim.AdamW(model.parameters(), lr=0.1)  # doctest: +SKIP
    >>> model(torch.ones(1, 2, device="cuda")).sum().backward()  # doctest: +SKIP
    >>> optimizer.step()  # doctest: +SKIP
    """

    _step_supports_amp_scaling = True  # what a GradScaler asks
    #: Of each group what its last step found out, while the state has the same parameters and the same entries.
    _kept: dict[int, _Kept]
    _keys: list[Tensor]
    _states: list[dict[str, Any]]

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
        capturable: bool = False, seed: int | None = None,
    ) -> None:  # fmt: skip
        if seed is not None:
            seed = _seed(seed)
        self._forget()
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable)
        if seed is not None:  # torch's checkpoints have none, and those that are flattened lack what a group has
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
        scaling = {key: value for key in _SCALING if (value := getattr(self, key, None)) is not None}
        states = self.state
        if len(states) != len(self._states) or not (_same(self._keys, states) and _same(self._states, states.values())):
            self._forget()
        capturing = _capturing()
        # Each group is looked at after the one before is stepped, which may have counted a step of the same parameter.
        groups = enumerate(self.param_groups)
        launches = ((i, group, *made) for i, group in groups for made in self._launches(group, capturing))
        for i, group, launch, grads in launches:
            seed = group.get("seed")
            if seed is not None:
                # The number of the launch would differ in a process that lacks a gradient, or has fewer experts.
                seed = (_seed(seed) + launch.place * 0x9E3779B1 + i * 0x85EBCA6B) % 0x7FFFFFFF  # more is not used
            self._launch(group, launch, grads, seed, scaling)
        if len(states) != len(self._states):
            self._keys, self._states = [*states], [*states.values()]
        return loss

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Give a step its hooks, as torch does, and let none of their errors leave anything of a ``GradScaler``.

        Parameters
        ----------
        func : callable
            The step of a class.

        Returns
        -------
        callable
            The step with hooks.
        """
        hooked = torch.optim.Optimizer.profile_hook_step(func)  # a program may put this class for torch.optim.AdamW

        @functools.wraps(hooked)
        def step(self: AdamW, *args: Any, **kwargs: Any) -> Any:
            try:
                return hooked(self, *args, **kwargs)
            except BaseException:
                for key in _SCALING:  # it deletes them after a step that returns, else its next one takes both
                    vars(self).pop(key, None)
                raise

        return step

    def _forget(self) -> None:
        self._kept, self._keys, self._states = {}, [], []

    def _launches(self, group: dict[str, Any], capturing: bool) -> list[tuple[_Launch, Any]]:
        """What steps a group, and the gradients; the launches of the step before, where nothing else has changed."""
        if not group.get("decoupled_weight_decay", True) and group["weight_decay"]:  # what torch calls Adam
            raise ValueError(
                "AdamW: expected groups with decoupled_weight_decay=True, got False, which adds the decay to the "
                "gradient; use torch.optim.Adam"
            )
        if not hasattr(group["params"], "__len__"):  # an iterator that a program has put there
            group["params"] = [*group["params"]]
        kept = None if capturing else self._kept.get(id(group))
        if kept is not None and all(again := kept.again(group)):
            return [*zip(kept.launches, again, strict=True)]
        params: list[Tensor] = []
        left: list[Tensor] = []
        for p in group["params"]:
            (left if p.grad is None else params).append(p)
        new = [p for p in params if not self.state[p]]
        if capturing and (new or not group["capturable"]):
            raise RuntimeError(
                "AdamW: expected capturable=True and a step before a CUDA graph is captured, got a first step or "
                "capturable=False; step once, then capture"
            )
        try:
            for p in new:
                averages = {key: torch.zeros_like(p) for key in _STATE[: 3 if group["amsgrad"] else 2]}
                # Of a known number, so that fake tensors count too.
                self.state[p].update(step=torch.tensor(0.0, device="cpu"), **averages)
            if new:
                self._share_counts(group, new)
        except BaseException:  # out of memory, or Ctrl-C
            for p in new:
                self.state.pop(p, None)
            raise
        known: dict[int, Any] = {}
        found: dict[Any, list[Tensor]] = {}
        for p in params:
            count = self.state[p].get("step")
            if id(count) not in known:  # tensors on the device are not read: they are the same, or count apart
                if not isinstance(count, Tensor):
                    _check_group(group, self.state)
                    raise TypeError(f"AdamW: expected step to be a tensor, got {type(count).__name__}; put it in one")
                apart = group["capturable"] or count.device.type != "cpu"
                known[id(count)] = _memory(count) if apart else _done(count)
            # Random bits follow the place in a launch. So shards, whose sizes differ by rank, do not precede replicas.
            rounded = group.get("seed") is not None and p.dtype == torch.bfloat16 and _placed(p)
            found.setdefault((known[id(count)], p.device, rounded), []).append(p)
        launches = []
        stepped = {*map(id, params)}
        # A program may keep other entries there too.
        taken = {_memory(s["step"]) for p, s in self.state.items() if id(p) not in stepped and _counted(s)}
        places = {id(p): i for i, p in enumerate(group["params"])}
        for (done, *_), some in found.items():
            states = [self.state[p] for p in some]
            launch = _Launch(some, states, places[id(some[0])], states[0]["step"])
            launches.append(launch)
            if not (group["capturable"] or launch.count.device.type != "cpu"):
                if any(_shared(s["step"]) for s in states):
                    launch.done, launch.shared = done, True
                else:
                    launch.count_apart(done)
                continue
            if _memory(launch.count) in taken:  # by parameters that are not stepped now, or by another launch
                if capturing:
                    raise RuntimeError(
                        "AdamW: expected gradients of the parameters that the steps before had, got those of others; "
                        "step once with these, then capture"
                    )
                launch.count = launch.count.clone()
            launch.count_by(launch.count)
            taken.add(_memory(launch.count))
        dtypes = [p.dtype for p in group["params"]]
        if len(self._kept) > len(self.param_groups):  # the program has replaced groups
            self._kept.clear()
        self._kept[id(group)] = _Kept([*group["params"]], left, group.get("seed"), dtypes, launches)
        # In the order of the group, because the launches, and so the order of collectives, may differ by rank.
        grads = {id(p): _reduced(p) for p in params}
        return [(launch, [grads[id(p)] for p in launch.params]) for launch in launches]

    def _launch(
        self, group: dict[str, Any], launch: _Launch, grads: Any, seed: int | None, scaling: dict[str, Any]
    ) -> None:  # fmt: skip
        params, given, as_they_are = launch.params, grads, False
        try:
            lists = [[s[key] for s in launch.states] for key in _STATE[: 3 if group["amsgrad"] else 2]]
            beta1, beta2 = group["betas"]
        except (KeyError, TypeError, ValueError):  # since amsgrad or betas were set
            _check_group(group, self.state)
            raise
        whole: list[Tensor] = []
        if launch.kinds is None:
            whole = [*params, *(t for of in lists for t in of)]
            lists = [[*map(_local, of)] for of in lists]
            params = [*map(_local, params)]
            grads = [_gradient(g, local) for g, local in zip(grads, params, strict=True)]
            as_they_are = _same(params, launch.params) and _same(grads, given)
        beta1, beta2 = [b.item() if isinstance(b, Tensor) and b.numel() == 1 else b for b in (beta1, beta2)]
        lr, device = group["lr"], params[0].device
        if isinstance(lr, Tensor) and not lr.is_meta:  # as torch.optim has it, one on the CPU is a number
            lr = lr.item() if lr.device.type == "cpu" != device.type and lr.numel() == 1 else lr.to(device)
        if scaling:
            scaling = {
                key: _local(value).to(device, non_blocking=True) if isinstance(value, Tensor) else value
                for key, value in scaling.items()
            }
        counting = group["capturable"] or scaling or launch.done < 0
        if counting and launch.done >= 0:  # a copy would wait for the device
            launch.count_by(torch.full((), float(launch.done), device=device, dtype=torch.float32))
        number, begun = launch.done + 1, _written(params[0])
        if not counting:  # ahead, as torch does, since an error may come behind the launches
            launch.count_on(1)
        try:
            adamw_step(
                params, grads, *lists,
                step=launch.count if counting else number, lr=lr, beta1=beta1, beta2=beta2,
                eps=group["eps"], weight_decay=group["weight_decay"], maximize=bool(group["maximize"]),
                seed=seed if params[0].dtype == torch.bfloat16 else None, **scaling,
            )  # fmt: skip
        except BaseException as error:
            if _written(params[0]) != begun:  # the error is of a handler or a dispatch mode
                if whole and not as_they_are:
                    torch.autograd.graph.increment_version(whole)
                raise
            if not counting:
                launch.count_on(-1)
            if not isinstance(error, ValueError) or not str(error).startswith("adamw_step: "):
                raise
            # Since one got other strides, as by Module.to(memory_format=...), or is a view that negates.
            lays = launch.kinds is None  # else gradients alone may be the reason
            if lays and (_capturing() or not any([_lay(*of) for of in zip(launch.params, launch.states, strict=True)])):
                raise
            launch.kinds = None
            self._launch(group, launch, given, seed, scaling)
            return
        if whole and not as_they_are:  # autograd keeps a DTensor, and the step wrote its local part
            torch.autograd.graph.increment_version(whole)
        if as_they_are and not launch.shared:
            launch.kinds = [*map(type, grads)]

    def _share_counts(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Give parameters that did as many steps one tensor on the device, by which one launch counts for all."""
        shared: dict[Any, Tensor] = {}
        for p in params:
            count = self.state[p]["step"]
            if group["capturable"]:
                placed = torch.full((), float(count), dtype=torch.float32, device=p.device)
                self.state[p]["step"] = shared.setdefault((p.device, float(count)), placed)
            else:
                self.state[p]["step"] = count.detach().to("cpu", torch.float32, copy=True).view(())

    def state_dict(self) -> dict[str, Any]:
        """The state as of `torch.optim.AdamW`, which counts the steps of each parameter apart.

        Returns
        -------
        dict
            The state and the groups. Numbers of steps are copied, averages are not: use ``copy.deepcopy`` to keep a
            state while training goes on.
        """
        found = super().state_dict()
        if isinstance(found, dict) and isinstance(found.get("state"), dict):  # a hook may have returned anything
            found["state"] = {
                key: {**state, "step": state["step"].clone()} if _counted(state) else state
                for key, state in found["state"].items()
            }
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            _check_group(group, state["state"])
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            if "seed" in self.defaults:
                group.setdefault("seed", self.defaults["seed"])
            stepped = [p for p in group["params"] if self.state.get(p)]
            for p in stepped:
                _lay(p, self.state[p])
            if "defaults" in state:  # unpickled, perhaps in another process
                stepped = [p for p in stepped if not _shared(self.state[p]["step"])]
            self._share_counts(group, stepped)


def _capturing() -> bool:
    """Whether a CUDA graph is being captured, whose replays would do again what is done once."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _seed(value: Any) -> int:
    return integer("AdamW", "seed", value, "None rounds to the nearest")


def _counted(state: Any) -> bool:
    return isinstance(state, dict) and isinstance(state.get("step"), Tensor)


def _shared(count: Tensor) -> bool:
    """Whether it is a number in memory that processes share, where each of them counts its steps."""
    return type(count) is Tensor and count.device.type == "cpu" and count.is_shared()


def _memory(count: Tensor) -> Any:
    """The memory of a number, where its views are too; the tensor's identity if it has no address."""
    for _ in range(2):  # since an error of a signal's handler may come first
        with contextlib.suppress(RuntimeError):
            return (count.device, address) if (address := count.data_ptr()) else id(count)
    return id(count)


def _done(value: Any) -> int:
    """The number of steps done that a state has."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"AdamW: expected step to be one number, got {tuple(value.shape)}; {_REMEDY}")
    try:
        done = float(value) if getattr(value, "layout", _DENSE) is _DENSE else -1.0
    except (TypeError, ValueError, OverflowError, RuntimeError):  # text, complex numbers, or on meta
        done = -1.0
    if not (0 <= done < 2**63 and done % 1 == 0):
        raise ValueError(f"AdamW: expected step to be a number of steps done, got {value!r}; {_REMEDY}")
    return int(done)


def _check_group(group: dict[str, Any], states: Any) -> None:
    """Refuse a state that is not one of AdamW for these parameters."""
    if missing := [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]:
        raise ValueError(f"AdamW: expected groups with {missing[0]}, got {sorted(group)}; {_REMEDY}")
    if not isinstance(group["betas"], (tuple, list)) or len(group["betas"]) != 2:
        raise ValueError(f"AdamW: expected betas to be two numbers, got {group['betas']!r}; {_REMEDY}")
    for p in group["params"]:
        state = states.get(p)
        if not state:
            continue
        for key in ("step", *_STATE[: 3 if group.get("amsgrad") else 2]):
            if key not in state:
                raise ValueError(f"AdamW: expected a state with {key}, got {sorted(state)}; {_REMEDY}")
            value = state[key]
            if key == "step":
                _done(value)
            elif not isinstance(value, Tensor) or value.shape != p.shape:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"AdamW: expected {key} of shape {tuple(p.shape)} as its parameter, got {got}; {_REMEDY}"
                )
            elif value.layout is not _DENSE:
                raise ValueError(f"AdamW: expected {key} to be dense, got {value.layout}; {_REMEDY}")
            elif _placed(value) != _placed(p):
                raise ValueError(
                    f"AdamW: expected {key} to be placed as its parameter, which is {_placed(p)}, got "
                    f"{_placed(value)}; use torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
                )


def _placed(t: Any) -> Any:
    """The mesh and the placements of a DTensor."""
    return (t.device_mesh, t.placements) if hasattr(t, "to_local") else "a tensor of one process"


def _local(t: Any) -> Any:
    """The part of a DTensor that this process has, or the tensor, without a collective that may still run."""
    t = t.to_local() if hasattr(t, "to_local") else t
    return t.trigger_wait() if hasattr(t, "trigger_wait") else t


def _written(p: Tensor) -> int:
    """A number that is another one once a step has begun to write a parameter."""
    p = plain(p)
    return begun_steps.number if p.is_inference() else p._version  # autograd counts no writes to the former


def _lay(p: Tensor, state: dict[str, Any]) -> bool:
    """Give averages the strides of their parameter; return whether some had others, and all have these now."""
    strides = _local(p).stride()
    apart = {key: t for key in _STATE if (t := state.get(key)) is not None and _local(t).stride() != strides}
    if any(t.shape != p.shape for t in apart.values()):
        return False
    for key, t in apart.items():
        state[key] = torch.empty_like(p, dtype=t.dtype, requires_grad=False).copy_(t)
    return bool(apart) and all(_local(state[key]).stride() == strides for key in apart)


def _reduced(p: Any) -> Any:
    """The gradient, placed as the parameter."""
    g = p.grad
    mesh, got = (t.device_mesh if hasattr(t, "to_local") else None for t in (p, g))
    if got != mesh:
        raise TypeError(
            f"AdamW: expected a gradient on the mesh of its parameter, {mesh}, got one on {got}; make the parameter a "
            "DTensor of that mesh, or set full_tensor() of the gradient"
        )
    if mesh is not None and any(placement.is_partial() for placement in p.placements):
        raise TypeError(f"AdamW: expected no parameter of partial sums, got {p.placements}; redistribute it first")
    # The gradient may be a partial sum, for example.
    return g if mesh is None or g.placements == p.placements else g.redistribute(mesh, p.placements)


def _gradient(g: Any, local: Tensor) -> Tensor:
    """The local part of a gradient, with the strides of the parameter's, in memory as it is."""
    g = _local(g)
    # Autograd leaves a view that negates behind torch.conj, for a parameter of one element.
    if g.layout is torch.strided and not g.is_nested and (g.stride() != local.stride() or g.is_neg()):
        g = torch.empty_like(local, dtype=g.dtype, requires_grad=False).copy_(g)
    return g  # type: ignore[no-any-return]
