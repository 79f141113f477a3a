"""A step of AdamW for a list of tensors: its meaning, costs and rivals."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fusebook.cards import _draws
from fusebook.cards._peers import compiled
from fusebook.kernels.adamw import adamw_step, adamw_step_eager
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["ADAMW_STEP", "PAGE"]

#: The page that tells of it.
PAGE = 304

_BETA1, _BETA2, _EPS, _DECAY = 0.9, 0.999, 1e-8, 0.1


def _widths(numbers: int, tensors: int, sizes: str) -> tuple[int, ...]:
    """How many numbers each tensor has: all the same, or the first a thousand times as many as the last."""
    parts = [1.0 if sizes == "equal" else 1000 ** (-i / max(1, tensors - 1)) for i in range(tensors)]
    widths = [int(numbers * part / sum(parts)) for part in parts]
    return widths[0] + numbers - sum(widths), *widths[1:]


def _state(dtype: torch.dtype, kind: str) -> torch.dtype:
    """The dtype of the averages; half types keep them in float32 where they do not round them away."""
    return torch.promote_types(dtype, torch.float32) if kind in ("masters", "chance") else dtype


def _make(
    rng: torch.Generator, dtype: torch.dtype, *, numbers: int, tensors: int, sizes: str, kind: str
) -> tuple[Any, ...]:
    """All tensors one behind the other, which `_apart` takes apart."""
    wide = torch.promote_types(dtype, torch.float32)

    def normal() -> Tensor:
        return torch.randn(numbers, generator=rng, device=rng.device, dtype=wide)

    g = normal() * 10 ** normal()  # gradients within a model differ by orders of magnitude
    noise = normal()
    m, v = 0.1 * (g + noise), 0.1 * (g.square() + noise.square())  # of one past, so that m is never large beside v
    g[::7] = 0
    state = _state(dtype, kind)
    extra = {"masters": normal(), "amsgrad": 1.5 * v.to(state)}.get(kind)
    p = normal() if kind != "masters" or extra is None else extra
    if kind == "masters" and wide == dtype:  # who has all digits needs no master
        extra = None
    # Step 7, and so long a one that it shows in bfloat16.
    return p.to(dtype), g.to(dtype), m.to(state), v.to(state), extra, _widths(numbers, tensors, sizes), kind, 7, 0.25


def _reference(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, extra: Tensor | None, widths: tuple[int, ...], kind: str, step: int,
    lr: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    kinds = p.dtype, m.dtype
    top, exact = (extra, None) if kind == "amsgrad" else (None, extra)
    g, start = g.to(m.dtype), p if exact is None else exact
    start = start.to(torch.promote_types(p.dtype, m.dtype))
    m = _BETA1 * m + (1 - _BETA1) * g
    v = _BETA2 * v + (1 - _BETA2) * g * g
    top = None if top is None else torch.maximum(top, v)
    root = (v if top is None else top).sqrt() / (1 - _BETA2**step) ** 0.5 + _EPS
    new = start * (1 - lr * _DECAY) - lr / (1 - _BETA1**step) * m / root
    found = [new.to(kinds[0]), m.to(kinds[1]), v.to(kinds[1])]
    found += [] if top is None else [top]
    found += [] if exact is None else [new.to(exact.dtype)]
    return tuple(part for t in found for part in t.split(widths))


def _whole(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """All tensors of a list as one, which is scored."""
    n = len(inputs[5])
    return tuple(torch.cat(outputs[i : i + n]) for i in range(0, len(outputs), n))


def _apart(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, extra: Tensor | None, widths: tuple[int, ...], *rest: Any
) -> tuple[Any, ...]:  # fmt: skip
    """Lists of tensors as a model has them: copies, each in memory of its own, since a step is in place."""
    lists = [[] if t is None else [part.clone() for part in t.split(widths)] for t in (p, g, m, v, extra)]
    return *lists, *rest


def _outputs(ps: list[Tensor], ms: list[Tensor], vs: list[Tensor], extras: list[Tensor]) -> tuple[Tensor, ...]:
    return *ps, *ms, *vs, *extras


def _eager(
    ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor], extras: list[Tensor], kind: str, step: int,
    lr: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    if extras or ps[0].dtype != ms[0].dtype:
        raise NotImplementedError(f"the loop is the plain step, not {kind}")
    adamw_step_eager(ps, gs, ms, vs, step, lr, _BETA1, _BETA2, _EPS, _DECAY)
    return _outputs(ps, ms, vs, [])


def _counted(fused: bool, *inputs: Any) -> tuple[Any, ...]:
    """The lists, and how many steps each tensor has had, which torch counts in tensors."""
    ps, *_, step, lr = lists = _apart(*inputs)
    device = ps[0].device if fused else "cpu"
    return *lists[:6], [torch.tensor(step - 1.0, device=device) for _ in ps], lr


def _torch(how: str) -> Any:
    """torch.optim's own step: one of its three ways."""
    function = functools.partial(
        adamw, beta1=_BETA1, beta2=_BETA2, eps=_EPS, weight_decay=_DECAY, maximize=False,
        foreach=how == "foreach", fused=how == "fused", has_complex=False, grad_scale=None, found_inf=None,
    )  # fmt: skip

    def run(
        ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor], extras: list[Tensor], kind: str,
        steps: list[Tensor], lr: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if kind in ("masters", "chance") and ps[0].dtype.itemsize == 2:
            raise NotImplementedError(f"torch.optim.AdamW has no {kind}")
        with torch.no_grad():
            function(ps, gs, ms, vs, extras, steps, amsgrad=bool(extras), lr=lr)
        return _outputs(ps, ms, vs, extras)

    return run


def _compiled_step(steps: list[Tensor], lr: float, lists: tuple[list[Tensor], ...]) -> None:
    ps, gs, ms, vs, tops = lists
    adamw(
        ps, gs, ms, vs, tops, steps, amsgrad=bool(tops), lr=lr, beta1=_BETA1, beta2=_BETA2, eps=_EPS,
        weight_decay=_DECAY, maximize=False, foreach=True, fused=False, capturable=steps[0].is_cuda,
    )  # fmt: skip


def _torch_compile(
    ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor], extras: list[Tensor], kind: str,
    steps: list[Tensor], lr: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    if kind in ("masters", "chance") and ps[0].dtype.itemsize == 2:
        raise NotImplementedError(f"torch.optim.AdamW has no {kind}")
    if len(ps) > 100:
        raise NotImplementedError("compiled for 100 tensors at most: for more it takes minutes")
    with torch.no_grad():
        compiled(_compiled_step)(steps, lr, (ps, gs, ms, vs, extras))
    return _outputs(ps, ms, vs, extras)


def _fusebook(
    ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor], extras: list[Tensor], kind: str, step: int,
    lr: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    tops, masters = (extras, ()) if kind == "amsgrad" else ((), extras)
    seed = 1 if kind == "chance" and ps[0].dtype == torch.bfloat16 else None
    adamw_step(ps, gs, ms, vs, tops, masters, step=step, lr=lr, weight_decay=_DECAY, seed=seed)
    return _outputs(ps, ms, vs, extras)


def _cost(itemsize: int, *, numbers: int, tensors: int, sizes: str, kind: str) -> Cost:
    wide = max(itemsize, 4)
    state = wide if kind in ("masters", "chance") else itemsize
    read, write = 2 * itemsize + 2 * state, itemsize + 2 * state
    if kind == "amsgrad":
        read, write = read + state, write + state
    elif kind == "masters" and wide != itemsize:  # p is written and not read
        read, write = read + wide - itemsize, write + wide
    return Cost(read=read * numbers, write=write * numbers, flop=14 * numbers)


def _cost_eager(itemsize: int, *, numbers: int, **_: Any) -> Cost:
    return Cost(read=12 * itemsize * numbers, write=8 * itemsize * numbers, flop=14 * numbers)


def _draw(rng: random.Random) -> Dims:
    """A few numbers to tens of millions, in up to a thousand tensors, alike or not. Whatever lies where is copied."""
    dtype = _draws.dtype(rng, (torch.float32, torch.bfloat16, torch.float64))
    numbers = _draws.count(rng, _draws.BYTES // (10 * max(4, _draws.itemsize(dtype))))
    tensors = _draws.count(rng, min(1000, numbers))
    kind = rng.choice(["plain", "plain", "amsgrad", "masters", "chance"])
    sizes = rng.choice(["equal", "uneven"])
    return _point(numbers, tensors, sizes, kind) | {"dtype": dtype, "layout": _draws.layout(rng, _draws.ROWS)}


def _point(numbers: int, tensors: int, sizes: str = "equal", kind: str = "plain") -> dict[str, int | str]:
    return {"numbers": numbers, "tensors": tensors, "sizes": sizes, "kind": kind}


ADAMW_STEP = Op(
    name="adamw_step",
    reference=_reference,
    make=_make,
    cost=_cost,
    variants={
        "loop": Variant(_eager, cost=_cost_eager, needs=(), prepare=_apart, in_place=True),
        "foreach": Variant(_torch("foreach"), needs=(), prepare=functools.partial(_counted, False), in_place=True),
        "fused=True": Variant(_torch("fused"), needs=(), prepare=functools.partial(_counted, True), in_place=True),
        "torch.compile": Variant(
            _torch_compile, prepare=functools.partial(_counted, True), recompiles=True, in_place=True
        ),
        "fusebook": Variant(_fusebook, needs=(), prepare=_apart, in_place=True),
    },
    configs={
        "small": tuple(_point(10**7, n) for n in (1, 100, 1000)),
        "large": tuple(_point(10**8, n) for n in (100, 1000)),
        "uneven": (_point(10**8, 1000, "uneven"),),
        "kinds": tuple(_point(10**8, 100, "equal", kind) for kind in ("plain", "amsgrad", "masters", "chance")),
    },
    draw=_draw,
    # One ragged chunk; tensors of two chunks; many small ones, some of them empty; whole chunks, in all kinds.
    edges=(
        _point(7, 1),
        _point(3000, 2),
        _point(400, 30, "uneven"),
        *(_point(3072, 3, "equal", kind) for kind in ("amsgrad", "masters", "chance")),
    ),
    dtypes=(torch.float32, torch.bfloat16, torch.float64),
    meaning=_whole,
)
