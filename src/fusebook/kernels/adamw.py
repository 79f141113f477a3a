# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/adamw.py. It needs torch, Triton, NumPy and _call.py.
r"""AdamW for a list of tensors: one launch for all of them, however many there are and whatever their sizes.

Of each parameter p with gradient g, averages m of g and v of its square, in step t::

    p -= lr * weight_decay * p
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g * g - v)
    p -= lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)

Fused are the whole step and the whole list. A table on the device tells a program the addresses of its tensor and which
chunk of it to step; it is built once per list. In float32 a step reads 16 bytes of each parameter and writes 12; an
operation of PyTorch at a time reads 64 and writes 40. Numbers are float32 in between, float64 where a parameter is.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Parameter

from ._call import (
    FLOATING,
    INTERPRETED,
    LIBRARY,
    NAMESPACE,
    _below,
    _guards,
    _modes,
    _private,
    apply,
    check_local,
    check_stored,
    check_tensor,
    flag,
    gpu,
    integer,
    launch,
    launching,
    number,
    plain,
    register_writes,
    skipped,
    unhooked,
    watched,
)

__all__ = ["adamw_step", "adamw_step_eager"]


def adamw_step_eager(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """The unfused step: a loop over tensors, and a launch for every operation on each. Traffic in numbers a parameter.

    Parameters
    ----------
    params, grads, exp_avgs, exp_avg_sqs : sequence of torch.Tensor
    step : int
        From 1 up.
    lr, beta1, beta2, eps, weight_decay : float
    """
    for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        p.mul_(1 - lr * weight_decay)  # read 1, write 1
        m.lerp_(g, 1 - beta1)  # read 2, write 1
        v.mul_(beta2)  # read 1, write 1
        v.addcmul_(g, g, value=1 - beta2)  # read 2, write 1
        root = v.sqrt()  # read 1, write 1
        root /= math.sqrt(1 - beta2**step)  # read 1, write 1
        root += eps  # read 1, write 1
        p.addcdiv_(m, root, value=-lr / (1 - beta1**step))  # read 3, write 1: in all read 12, write 8


# Kernels --------------------------------------------------------------------------------------------------------------


@triton.jit
def _mixed(x):
    """32 bits that look random, by those of a counter. Products may overflow where Triton looks for that, too."""
    x ^= x >> 16
    x = tl.mul(x, 0x7FEB352D, sanitize_overflow=False)
    x ^= x >> 15
    x = tl.mul(x, 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def _rounded_by_chance(x, bits):
    """float32 as one of the two bfloat16 around it, the nearer one more often, so that the mean of many is right."""
    raw = x.to(tl.uint32, bitcast=True)
    up = tl.add(raw, bits & 0xFFFF, sanitize_overflow=False) & 0xFFFF0000
    up = tl.where((raw & 0x7F800000) == 0x7F800000, raw, up)  # what is not finite stays what it is
    return up.to(tl.float32, bitcast=True)


@triton.jit
def _root(x):
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def _memory(address, first, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a chunk begins of the tensor at an address."""
    memory = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        memory = tl.multiple_of(memory, 16)
    return memory + first


@triton.jit
def _chunk(
    row, tensors, grad, first, live, key, scalars, P: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    TOP: tl.constexpr, EXACT: tl.constexpr, CHANCE: tl.constexpr, FLOAT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Step the chunk of a tensor that begins at `first`: all of it where it is aligned, else its `live` numbers."""
    g_ptr = _memory(grad, first, G, ALIGNED)
    p_ptr = _memory(tl.load(row + tensors), first, P, ALIGNED)
    m_ptr = _memory(tl.load(row + 2 * tensors), first, S, ALIGNED)
    v_ptr = _memory(tl.load(row + 3 * tensors), first, S, ALIGNED)
    top_ptr = _memory(tl.load(row + 4 * tensors), first, S, ALIGNED)
    exact_ptr = _memory(tl.load(row + 5 * tensors), first, tl.float32, ALIGNED)
    scale, keep, size, eps, beta1, rest1, beta2, rest2, root = scalars
    for step in range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)  # [BLOCK], as all that follows
        mask = None if ALIGNED else at < live
        g = tl.load(g_ptr + at, mask).to(FLOAT) * scale
        m = tl.load(m_ptr + at, mask).to(FLOAT)
        v = tl.load(v_ptr + at, mask).to(FLOAT)
        p = tl.load((exact_ptr if EXACT else p_ptr) + at, mask).to(FLOAT) * keep
        # From the nearer of the two, as torch.lerp: where beta1 is 0, m is g, whatever it was.
        m = tl.where(rest1 < 0.5, m + rest1 * (g - m), g - beta1 * (g - m))
        v = v * beta2 + rest2 * g * g
        tl.store(m_ptr + at, m.to(S), mask)
        tl.store(v_ptr + at, v.to(S), mask)
        if TOP:
            v = tl.maximum(tl.load(top_ptr + at, mask).to(FLOAT), v, propagate_nan=tl.PropagateNan.ALL)
            tl.store(top_ptr + at, v.to(S), mask)
        p -= size * m / (_root(v) / root + eps)
        if EXACT:
            tl.store(exact_ptr + at, p, mask)
        if CHANCE:
            p = _rounded_by_chance(p, _mixed(first.to(tl.uint32) + at.to(tl.uint32) ^ key))
        tl.store(p_ptr + at, p.to(P), mask)


@triton.jit(do_not_specialize=["grads_ptr", "t", "seed"])
def _adamw_chunks(
    table_ptr, grads_ptr, chunks_ptr, ticket_ptr, count_ptr, rate_ptr, norm_ptr, scale_ptr, found_ptr, tensors, t, seed,
    lr: tl.float64, beta1: tl.float64, beta2: tl.float64, fraction1: tl.float64, fraction2: tl.float64,
    eps: tl.float64, decay: tl.float64, most: tl.float64,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, EXACT: tl.constexpr, FLOAT: tl.constexpr,
    MAXIMIZE: tl.constexpr, CHANCE: tl.constexpr, ADVANCE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Step one chunk of one tensor, both of which the list of chunks tells.

    `table_ptr` holds for all tensors their sizes, then the addresses of p, m, v, and of what else there is, and whether
    all of these are aligned; `grads_ptr` points to the addresses of g, or to the only g.
    """
    if found_ptr is not None:
        if tl.load(found_ptr) != 0:  # a gradient is not finite: nothing is stepped, and this is no step
            return
    where = tl.load(chunks_ptr + tl.program_id(0))
    i, first = where >> 32, (where & 0xFFFFFFFF) * (BLOCK * STEPS)
    # float64, since what a bias correction subtracts from 1 is nearly 1.
    one = tl.full([1], 1.0, tl.float64)
    rate, fraction1, fraction2 = one * lr, one * fraction1, one * fraction2
    if rate_ptr is not None:
        rate = tl.load(rate_ptr + tl.arange(0, 1)).to(tl.float64)
    if count_ptr is not None:
        t = tl.load(count_ptr).to(tl.int64) + 1
        fraction1 = 1 - tl.exp(t * tl.log(one * beta1))
        fraction2 = 1 - tl.exp(t * tl.log(one * beta2))
    scale = -one if MAXIMIZE else one
    if scale_ptr is not None:
        scale /= tl.load(scale_ptr + tl.arange(0, 1)).to(tl.float64)
    if norm_ptr is not None:
        factor = most / (tl.load(norm_ptr + tl.arange(0, 1)).to(tl.float64) * tl.abs(scale) + 1e-6)
        scale *= tl.where(factor > 1, 1.0, factor)  # NaN stays NaN
    key = 0
    if CHANCE:
        # Of the place in the tensor, whatever other tensors there are, and however this GPU's plan cuts them.
        key = _mixed(_mixed(_mixed(seed.to(tl.uint32)) ^ t.to(tl.uint32)) ^ i.to(tl.uint32))
        key = _mixed(key ^ (first >> 32).to(tl.uint32))
    scalars = (
        scale.to(FLOAT), (1 - rate * decay).to(FLOAT), (rate / fraction1).to(FLOAT), tl.full([1], eps, FLOAT),
        tl.full([1], beta1, FLOAT), (1 - one * beta1).to(FLOAT), tl.full([1], beta2, FLOAT),
        (1 - one * beta2).to(FLOAT), tl.sqrt(fraction2).to(FLOAT),
    )  # fmt: skip
    row = table_ptr + i
    grad = tl.load(grads_ptr + i) if grads_ptr.dtype.element_ty == tl.int64 else grads_ptr.to(tl.int64)
    live = tl.load(row) - first
    if (tl.load(row + 6 * tensors) != 0) & (grad % 16 == 0) & (live >= BLOCK * STEPS):
        _chunk(
            row, tensors, grad, first, live, key, scalars,
            P, G, S, TOP, EXACT, CHANCE, FLOAT, True, BLOCK, STEPS,
        )  # fmt: skip
    else:  # a ragged end, or what lies anywhere: one number after another
        _chunk(
            row, tensors, grad, first, live, key, scalars,
            P, G, S, TOP, EXACT, CHANCE, FLOAT, False, BLOCK, STEPS,
        )  # fmt: skip
    if ADVANCE:  # by the last program to come here: all others have read the number of steps
        tl.debug_barrier()  # and so have all threads of this one
        if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(ticket_ptr, 0)
            tl.store(count_ptr, t.to(count_ptr.dtype.element_ty))


# The plan -------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """A program steps a chunk of `steps` blocks."""

    block: int
    steps: int
    warps: int


def _adamw_plan(itemsize: int, numbers: int, capability: tuple[int, int] | None, multiprocessors: int) -> Plan:
    """How many numbers a program steps; `itemsize` is that of the averages, `numbers` are those of all tensors."""
    if capability is None or itemsize != 2:
        return Plan(1024, 1, 4)
    # What all programs have in flight hides what each waits for at its start. Of half types they have half as much, and
    # a longer chunk makes up for it; where all programs run at once, each waits for every block of its chunk in turn.
    return Plan(512, 1, 4) if numbers <= 2**14 * multiprocessors else Plan(1024, 4, 4)


# The launcher ---------------------------------------------------------------------------------------------------------

_NAME = "adamw_step"
_LISTED = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters")
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
#: Tensors whose addresses and kinds are asked for together, while they are in the CPU's cache.
_PART = 256
_NONE = type(None)


class _Begun(threading.local):
    """How many steps this thread has begun, so that an error within a step is not taken for a refusal."""

    number = 0


begun_steps = _Begun()
#: What is known of lists, by the first address and the length; with one more it begins anew.
_known: dict[Any, _List] = {}
_LISTS = 256
#: Without a frame of Python, before which Ctrl-C could come.
_raise_versions = _private("torch:_C._increment_version", torch.autograd.graph.increment_version)
#: Beyond all addresses.
_FAR = 2**62
#: What is below may be no address, but an offset into storage that was freed.
_LOW = 2**40
#: What graphs read, which may be replayed as long as the process lives.
_captured: list[Any] = []


def _on_device(values: Any, device: torch.device, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Integers on the device, and where they come from, which must outlast the copy if a graph holds that."""
    cuda = device.type == "cuda"  # pinned, or the host would wait for the device
    host = torch.empty(len(values), dtype=torch.int64, device="cpu", pin_memory=cuda)
    host.numpy()[:] = values
    if table is None:
        with torch.inference_mode(False):  # else nothing may write to it outside
            table = torch.empty(len(values), dtype=torch.int64, device=device)
    return table.copy_(host, non_blocking=True), host


class _Group:
    """Tensors of one device and the same dtypes: what one launch steps.

    `lists` are of their p, m, v, and what else there is; `dtypes` those of p, of g, and of m and v.
    """

    def __init__(self, lists: Sequence[list[Tensor]], dtypes: tuple[Any, ...]) -> None:
        self.tensors, self.device = len(lists[0]), lists[0][0].device
        single = tl.float64 if dtypes[0] == torch.float64 else tl.float32
        self.kinds = *(_TYPES[dtype] for dtype in dtypes), bool(lists[3]), bool(lists[4]), single
        #: A number of its dtypes.
        self.mixture = sum([*_TYPES].index(dtype) * len(_TYPES) ** i for i, dtype in enumerate(dtypes))
        self.compiled: dict[Any, Any] = {}
        none = [0] * self.tensors
        rows = np.array([[t.data_ptr() for t in tensors] if tensors else none for tensors in lists])
        sizes = np.array([t.numel() for t in lists[0]])
        self.plan = _adamw_plan(dtypes[2].itemsize, int(sizes.sum()), *gpu(self.device))
        each = -(-sizes // (self.plan.block * self.plan.steps))
        self.programs = int(each.sum())
        # Chunk 0, 1, ... of each tensor, behind its number.
        starts = np.repeat(each.cumsum() - each, each)
        chunks = (np.repeat(np.arange(self.tensors), each) << 32) + np.arange(self.programs) - starts
        table = np.concatenate([sizes, *rows, (rows % 16 == 0).all(0), [0]])
        self.held = [_on_device(v, self.device) for v in (table, chunks)]
        self.table, self.chunks = (on_device for on_device, _ in self.held)
        self.ticket = self.table[-1:].view(torch.int32)

    def launch(
        self, grads: Any, tensors: tuple[Any, ...], numbers: tuple[Any, ...], maximize: bool, chance: bool, last: bool
    ) -> None:  # fmt: skip
        """Step all; `tensors` are those of `_SINGLES`, each on the device or None."""
        args = self.table, grads, self.chunks, self.ticket, *tensors, self.tensors, *numbers
        advance = last and tensors[0] is not None
        key = maximize, chance, advance, *(None if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors)
        compiled = self.compiled.get(key)
        constants = *self.kinds, maximize, chance, advance, self.plan.block, self.plan.steps
        current = self.device.type == "cuda" and torch.cuda.current_device() == self.device.index
        if compiled is not None and current and unhooked():  # Triton would derive anew what has not changed
            stream = torch._C._cuda_getCurrentRawStream(self.device.index)
            run, known, packed, _ = compiled
            values = (*args, *constants)
            run(self.programs, 1, 1, stream, *known, *((values,) if packed else values))
            return
        with launching(self.table):
            compiled = launch(_adamw_chunks, (self.programs,), *args, *constants, num_warps=self.plan.warps)
        if hasattr(compiled, "packed_metadata"):
            known = compiled.function, compiled.packed_metadata, None, None, None
            below = _below(compiled, (self.programs, 1, 1), known, len(args) + len(constants))
            self.compiled[key] = *below, compiled  # kept, since Triton unloads what nobody holds


def guard(tensors: Sequence[Tensor]) -> Callable[[list[Any]], list[int] | None]:
    """A function that returns the addresses of as many tensors of the same kinds, and None for any others."""
    return _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).addresses  # type: ignore[no-any-return]


class _List:
    """What is known of a list of tensors: that it can be stepped, and the tables of its groups.

    `lists` are of p, m, v, the largest v, exact p, g; `tensors` all of them.
    """

    def __init__(self, lists: tuple[list[Tensor], ...], tensors: list[Tensor]) -> None:
        _no_gradient_of(lists[-1])
        _check_lists(*lists)
        if any([type(t) not in (Tensor, Parameter) for t in tensors]):
            lists = tuple([plain(t) for t in of] for of in lists)
            _check_lists(*lists)
        params, ms, *_, grads = lists
        self.device = params[0].device
        if INTERPRETED and self.device.type != "cpu":
            raise ValueError(
                f"{_NAME}: expected tensors on the CPU where Triton interprets, since they are read by address, "
                f"got some on {self.device}; move them, or unset TRITON_INTERPRET"
            )
        self.asked = any(g.requires_grad for g in grads)
        states = tensors[: -len(grads)]
        with torch.no_grad():  # so that they also notice a gradient that is recorded
            self.grads = guard(tensors[-len(grads) :])
            parts = [(i, states[i : i + _PART]) for i in range(0, len(states), _PART)]
            self.parts = [(i, list(map(Tensor.data_ptr, part)), guard(part)) for i, part in parts]
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for of in lists[:-1] for t in of)
        self.starts, self.ends = np.array([*spans, (_FAR, _FAR)]).T.copy()
        self.sizes = np.array([g.numel() * g.element_size() or -_FAR for g in grads])
        kinds: dict[Any, list[int]] = {}
        for i, p in enumerate(params):
            kinds.setdefault((p.device, (p.dtype, grads[i].dtype, ms[i].dtype)), []).append(i)
        if (self.starts[1:] < self.ends[:-1]).any():
            raise ValueError(
                f"{_NAME}: expected tensors that share no memory, and two that are written do; give each of them once"
            )
        groups = [
            (at, _Group([[of[i] for i in at] if of else [] for of in lists[:-1]], dtypes))
            for (_, dtypes), at in kinds.items()
        ]
        self.groups = [group for _, group in groups if group.programs]
        self.order = np.array([i for at, group in groups if group.programs for i in at], np.int64)
        self.placed: _Placed | None = None
        # The stream of the last step, or of the tables' allocation.
        self.stream = torch._C._cuda_getCurrentRawStream(self.device.index) if self.device.type == "cuda" else None

    def holds(self, states: list[Tensor], grads: list[Tensor]) -> list[int] | None:
        """The addresses of the gradients, if all are of the kinds of the tensors that it knows, and states are there.

        The same objects are asked too: a new ``data`` may be shorter and begin at the same address.
        """
        if self.asked and torch.is_grad_enabled():
            return None
        known = all(found(states[i : i + _PART]) == addresses for i, addresses, found in self.parts)
        return self.grads(grads) if known else None

    def meets(self, first: Any, sizes: Any) -> bool:
        """Whether a step writes any of so many bytes from these addresses on."""
        return bool((self.starts[self.ends.searchsorted(first, "right")] < first + sizes).any())

    def keep(self) -> None:
        """If the list is dropped, nobody else gets the memory of its tables before the current stream has read them."""
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream != self.stream:
            self.stream, of = stream, torch.cuda.current_stream(self.device)
            told = self.placed.told if self.placed else ()
            for table in (*told, *(t for group in self.groups for t in (group.table, group.chunks))):
                table.record_stream(of)

    def place(self, grads: list[Tensor], addresses: list[int], kept: _Placed | None) -> _Placed:
        """Tell the device where the gradients are, in the table that it keeps if it may write to that."""
        # Not of torch, which wakes threads for a few hundred numbers.
        first = np.fromiter(addresses, np.int64, len(addresses))
        if ((first < _LOW) & (self.sizes > 0)).any():
            for i, g in enumerate(grads):
                check_stored(_NAME, f"grads[{i}]", g)
        if self.meets(first, self.sizes):
            raise ValueError(f"{_NAME}: expected gradients apart from what is written, got one in its memory; copy it")
        if len(addresses) == 1:  # an argument of the launch
            return _Placed(addresses, first)
        if kept is not None and kept.table is not None:
            _, held = _on_device(first[self.order], self.device, kept.table)
            return _Placed(addresses, first, kept.told, kept.table, held)
        table, held = _on_device(first[self.order], self.device)
        return _Placed(addresses, first, table.split([group.tensors for group in self.groups]), table, held)


class _Placed(NamedTuple):
    """Where gradients are, the parts of groups in a table of that, the table if it may change, and its source."""

    addresses: list[int]
    first: Any  # the same, for NumPy
    told: Sequence[Tensor] = ()
    table: Tensor | None = None
    held: Tensor | None = None


def _no_gradient_of(grads: list[Tensor]) -> None:
    """Refuse a step that would have to be recorded."""
    if torch.is_grad_enabled() and any(getattr(g, "requires_grad", False) for g in grads):
        raise NotImplementedError(
            f"{_NAME}: expected no gradient to be asked for, since a step has none; detach grads, or call it under "
            "torch.no_grad()"
        )


def _dense(t: Tensor) -> bool:
    """Whether its numbers lie side by side in memory, in whatever order of the axes."""
    together = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != together:
            return False
        together *= size
    return True


def _laid(t: Tensor) -> list[int]:
    """The strides that decide where elements are: not those of axes of length 1."""
    return [stride for n, stride in zip(t.shape, t.stride(), strict=True) if n != 1]


def _check_lengths(params: list[Any], named: dict[str, list[Any]]) -> None:
    """Refuse lists of other lengths; the last two may be empty."""
    for name, of in named.items():
        if len(of) != len(params) and (of or name in _LISTED[:4]):
            raise ValueError(
                f"{_NAME}: expected {len(params)} {name} as there are params, got {len(of)}; give one for each"
            )


def _check_numbers(
    params: list[Any], step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float, seed: int | None,
    most: float,
) -> None:  # fmt: skip
    """Refuse numbers out of range, and a seed where nothing is rounded by chance."""
    fine = step >= 1 and 0 <= beta1 < 1 and 0 <= beta2 < 1 and most >= 0
    if fine and seed is None and 0 <= lr < math.inf and 0 <= eps < math.inf and 0 <= decay < math.inf:
        return

    def within(what: str, value: float, fine: bool, accepted: str) -> None:
        if not fine:
            raise ValueError(f"{_NAME}: expected {what} {accepted}, got {value}; see torch.optim.AdamW")

    within("step", step, step >= 1, "of 1 or more")
    for what, size in (("beta1", beta1), ("beta2", beta2)):
        within(what, size, 0 <= size < 1, "from 0 to below 1")
    for what, size in (("lr", lr), ("eps", eps), ("weight_decay", decay)):
        within(what, size, 0 <= size < math.inf, "of 0 or more")
    within("max_norm", most, most >= 0, "of 0 or more")  # below, gradients would change their signs
    if seed is not None:
        if other := next((p.dtype for p in params if getattr(p, "dtype", torch.bfloat16) != torch.bfloat16), None):
            raise TypeError(
                f"{_NAME}: expected bfloat16 where a seed asks for stochastic rounding, got {other}; give no seed"
            )


def _check_lists(params: Any, ms: Any, vs: Any, tops: Any, exacts: Any, grads: Any) -> None:
    """Refuse lists of which a step would not be what torch's is."""
    named = {"grads": grads, "exp_avgs": ms, "exp_avg_sqs": vs, "max_exp_avg_sqs": tops, "masters": exacts}
    _check_lengths(params, named)
    for i, p in enumerate(params):
        of = f"params[{i}]"
        check_tensor(_NAME, of, p, FLOATING, ("params[0]", params[0]))
        check_stored(_NAME, of, p, meta=True)
        if p.numel() and not _dense(p):
            raise ValueError(f"{_NAME}: expected {of} without gaps, got strides {p.stride()}; call contiguous() first")
        narrow = p.dtype in (torch.float16, torch.bfloat16)
        if exacts and not narrow:
            raise TypeError(f"{_NAME}: expected masters of float16 or bfloat16, got {of} of {p.dtype}; give none")
        for name, tensors in named.items():
            if not tensors:
                continue
            what, t = f"{name}[{i}]", tensors[i]
            single = (torch.float32,) if narrow else ()
            check_tensor(_NAME, what, t, single if name == "masters" else (p.dtype, *single), (of, p))
            check_stored(_NAME, what, t, meta=True)
            if t.shape != p.shape or (t.numel() and _laid(t) != _laid(p)):
                raise ValueError(
                    f"{_NAME}: expected {what} of shape {tuple(p.shape)} and strides {p.stride()} as {of} has, got "
                    f"{tuple(t.shape)} and {t.stride()}; copy it into torch.empty_like({of})"
                )
        for name, tensors in (("exp_avgs", ms), ("max_exp_avg_sqs", tops)):  # a kernel takes them for one dtype
            if tensors and tensors[i].dtype != vs[i].dtype:
                raise TypeError(
                    f"{_NAME}: expected {name}[{i}] and exp_avg_sqs[{i}] of one dtype, got {tensors[i].dtype} and "
                    f"{vs[i].dtype}; cast one of them"
                )


def _step(
    params: list[Tensor], grads: list[Tensor], ms: list[Tensor], vs: list[Tensor], tops: list[Tensor],
    exacts: list[Tensor], count: Tensor | None, step: int, rate: Tensor | None, lr: float, beta1: float, beta2: float,
    eps: float, decay: float, maximize: bool, seed: int | None, norm: Tensor | None, most: float,
    scale: Tensor | None = None, found: Tensor | None = None,
) -> None:  # fmt: skip
    """The operator, where the device of its tensors is current."""
    _check_numbers(params, step, lr, beta1, beta2, eps, decay, seed, most)
    if not params:
        return
    states = [*params, *ms, *vs, *tops, *exacts]
    first = params[0]
    given: Any = count, rate, norm, scale, found
    singles: list[tuple[str, Tensor]] = []
    if not count is rate is norm is scale is found is None:
        singles = [(what, t) for what, t in zip(_SINGLES, given, strict=True) if t is not None]
    for what, single in singles:
        _single(what, single, first)
        check_stored(_NAME, what, single, meta=first.is_meta)
    with torch._C.DisableTorchFunction():
        count, rate, norm, scale, found = given = [t if t is None else plain(t) for t in given]
        singles = [(what, plain(t)) for what, t in singles]
        if plain(first).is_meta:  # nothing to compute, and every address is 0
            _no_gradient_of(grads)
            _check_lists(params, ms, vs, tops, exacts, grads)
            return
        try:
            key: Any = (first.data_ptr(), len(params), len(tops), len(exacts))
        except RuntimeError:  # it has no memory
            key = None
        capture = first.is_cuda and torch.cuda.is_current_stream_capturing()
        # Taken out: a thread, or the handler of a signal, that steps this list meanwhile makes tables of its own.
        of = _known.pop(key, None)
        addresses = of.holds(states, grads) if of else None
        known = addresses is not None
        if of is None or addresses is None:
            of = _List((params, ms, vs, tops, exacts, grads), [*states, *grads])
            if capture:  # also if the step is refused below, since the graph has copies that read from the host
                _captured.append(of)
            addresses = list(map(Tensor.data_ptr, grads))
        if seed is not None and any([group.kinds[0] is not tl.bfloat16 for group in of.groups]):  # a class may err
            _check_numbers([plain(p) for p in params], step, lr, beta1, beta2, eps, decay, seed, most)
        for what, single in singles:
            if of.meets(single.data_ptr(), single.element_size()):
                raise ValueError(f"{_NAME}: expected {what} apart from what is written, got it in its memory; clone it")
        # Steps of a list follow each other, on whatever streams: when one begins, its table is there and nobody's else.
        if first.is_cuda and not capture:
            of.keep()
        kept = of.placed
        stayed = kept is not None and kept.addresses == addresses
        placed: _Placed = kept if kept and stayed else of.place(grads, addresses, None if capture else kept)
        if count is not None:  # it is written too
            begin, end = count.data_ptr(), count.data_ptr() + count.element_size()
            meeting = [what for what, t in singles[1:] if begin - t.element_size() < t.data_ptr() < end]
            if ((placed.first < end) & (placed.first + of.sizes > begin)).any():
                meeting.append("gradients")
            if meeting:
                raise ValueError(f"{_NAME}: expected step apart from {meeting[0]}, got it in the same memory; clone it")
    if not capture:
        of.placed = placed
    else:
        _captured.append((of, placed))
        if stayed:  # nobody writes any more to what a graph reads
            of.placed = placed._replace(table=None)
    fractions = (1 - beta1**step, 1 - beta2**step)
    begun_steps.number += 1
    numbers = lr, beta1, beta2, *fractions, eps, decay, most
    written = states if count is None else [*states, count]
    try:
        for group, told in zip(of.groups, placed.told or [plain(grads[0])], strict=False):
            # Tensors of every group have the same numbers, and so would have the same random bits.
            seeded = step & 0x7FFFFFFF, ((seed or 0) + group.mixture * 0x2545F491) % 0x7FFFFFFF, *numbers
            group.launch(told, given, seeded, maximize, seed is not None, group is of.groups[-1])
        if count is not None and not of.groups:
            apply(Tensor.add_, count, 1 if found is None else found.view(()) == 0)
    finally:  # for graphs that kept one; a step that fails may have written too
        _raise_versions(written)
    # Back only now: a step that fails may leave tables half-written, or, if it is interpreted, a ticket.
    if known or not capture:
        if len(_known) >= _LISTS:
            _known.clear()
        _known[key] = of


def _stepped(params: list[Tensor], *others: Any) -> None:
    """The operator. Torch pins memory, and says whether a stream is captured, for the device that is current."""
    if params and params[0].is_cuda and torch.cuda.current_device() != params[0].device.index:
        with torch.cuda.device(params[0].device):
            _step(params, *others)
    else:
        _step(params, *others)


# Where a compiled function begins eagerly, torch.compile looks at what it calls, which here writes by addresses.
skipped(_stepped)

_SCHEMA = (
    "adamw_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] masters, Tensor(f!)? count, SymInt step, Tensor? rate, float lr, "
    "float beta1, float beta2, float eps, float weight_decay, bool maximize, int? seed, Tensor? norm, float max_norm, "
    "Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
)
# A CUDA graph of torch.compile gives the memory of its pool out again, which tables that are kept must not be in.
LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe))
for _device in ("CUDA", "CPU"):  # where torch.compile has given up a caller, it would follow into the operator
    LIBRARY.impl(_NAME, getattr(torch, "_disable_dynamo", lambda function: function)(_stepped), _device)


def _without_memory(
    params: list[Tensor], grads: list[Tensor], ms: list[Tensor], vs: list[Tensor], tops: list[Tensor],
    exacts: list[Tensor], count: Tensor | None, step: int, rate: Tensor | None, lr: float, beta1: float, beta2: float,
    eps: float, decay: float, maximize: bool, seed: int | None, norm: Tensor | None, most: float,
    scale: Tensor | None = None, found: Tensor | None = None,
) -> None:  # fmt: skip
    """The operator under a compiler. The dispatcher also comes here where only some of the tensors are on meta."""
    _check_numbers(params, step, lr, beta1, beta2, eps, decay, seed, most)
    given = [t for t in (*params, *grads, *ms, *vs, *tops, *exacts, count, rate, norm, scale, found) if t is not None]
    for t in given:
        check_tensor(_NAME, "all tensors", t, (t.dtype,), ("the first", given[0]))


torch.library.register_fake(f"{NAMESPACE}::{_NAME}", _without_memory, lib=LIBRARY)
_custom = getattr(torch.ops, NAMESPACE).adamw_step.default
register_writes(_custom)
#: The mode of `torch.autograd.graph.allow_mutation_on_saved_tensors`, which fails if an operator may write to None.
_Cloning = _private("torch.autograd.graph:_CloneArgBeforeMutateMode", ())
_stack = _private("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", list)


def _no_batch(*_: Any) -> None:
    raise NotImplementedError(
        f"{_NAME}: expected tensors, got batches of torch.vmap; give all members in one list, which is one launch too"
    )


torch.library.register_vmap(f"{NAMESPACE}::{_NAME}", _no_batch, lib=LIBRARY)


def _listed(what: str, of: Any) -> list[Any]:
    """The tensors of an argument; a tensor has rows, which are nobody's parameters."""
    try:
        if not isinstance(of, (Tensor, Set, Mapping)):  # whose order is chance, or that hold names
            return list(of)
    except TypeError:
        pass
    raise TypeError(f"{_NAME}: expected {what} to be a list of tensors, got {type(of).__name__}; put it in a list")


_SINGLES = {
    "step": (torch.float32, torch.int32, torch.int64),
    "lr": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "norm": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "grad_scale": (torch.float32, torch.float64),
    "found_inf": (torch.float32,),
}


def _single(what: str, value: Tensor, p: Tensor) -> None:
    """Refuse what is not one number on the device of the parameters."""
    check_tensor(_NAME, what, value, _SINGLES[what], ("params[0]", p))
    if value.numel() != 1:
        raise ValueError(f"{_NAME}: expected {what} to be one number, got shape {tuple(value.shape)}; take one of them")


def adamw_step(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor], max_exp_avg_sqs: Sequence[Tensor] = (), masters: Sequence[Tensor] = (), *,
    step: int | Tensor, lr: float | Tensor = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
    weight_decay: float = 1e-2, maximize: bool = False, seed: int | None = None, norm: Tensor | None = None,
    max_norm: float = 1.0, grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """One step of AdamW, in place, for a list of tensors in one launch.

    Parameters
    ----------
    params : sequence of torch.Tensor
        Of any shapes, float16, bfloat16, float32 or float64, all on one CUDA device, or on the CPU where Triton
        interprets. Without gaps, with their axes in any order. Of each mixture of dtypes there is one launch.
    grads : sequence of torch.Tensor or None
        A gradient for each parameter, of its shape and strides, in its dtype, or in float32 beside half types. Strides
        of axes of length 1 may differ. A parameter whose gradient is None is left as it is, with all that belongs to
        it. Without any gradient nothing is done, nor counted.
    exp_avgs, exp_avg_sqs : sequence of torch.Tensor
        The running averages m and v, zeros before the first step, as `grads`; both of one dtype.
    max_exp_avg_sqs : sequence of torch.Tensor, optional
        The largest v of all steps, of the dtype of `exp_avg_sqs`. Where it is given the step divides by it: AMSGrad.
    masters : sequence of torch.Tensor, optional
        The parameters in float32, where `params` are float16 or bfloat16: they are stepped, and `params` are their
        roundings.
    step : int or torch.Tensor
        The number of this step, from 1 up. Or one number on the device, float32, int32 or int64, which counts the steps
        done, from 0 up, and to which this one is added: it is not read by the host.
    lr : float or torch.Tensor
        The learning rate; as a tensor, one number on the device, float16, bfloat16, float32 or float64.
    beta1, beta2, eps, weight_decay : float
        As of `torch.optim.AdamW`.
    maximize : bool
        Go up the gradient.
    seed : int, optional
        Round bfloat16 parameters by chance, by bits that follow from the seed, the number of the step, the place of a
        tensor among those of its dtypes that have a gradient, and that of a number in the tensor. Give other lists of
        the same step another seed.
    norm : torch.Tensor, optional
        The norm of all gradients, one number on the device. Where it is above `max_norm` gradients are scaled by
        ``max_norm / (norm + 1e-6)``, as `torch.nn.utils.clip_grad_norm_` does, but not written.
    max_norm : float
        See `norm`.
    grad_scale : torch.Tensor, optional
        What the gradients, and `norm`, are divided by; they are not written. One number on the device, float32 or
        float64, as `torch.amp.GradScaler` has it.
    found_inf : torch.Tensor, optional
        One float32 number on the device. If it is not 0, nothing is stepped, nor counted by a `step` on the device.

    Raises
    ------
    TypeError
        For arguments that are no tensors, and other dtypes than those above. Also for tensors without memory of their
        own: pass ``to_local()`` of a DTensor.
    ValueError
        For lists of different lengths, shapes or strides that do not match, several devices, tensors that share memory
        with one that is written, and numbers out of range.
    NotImplementedError
        Where gradients require gradients and those are recorded, and for tensors with tangents: a step has no
        derivative.

    Notes
    -----
    Tensors on meta are checked, and nothing is computed. If a tensor is of a subclass with memory, the step
    uses that memory directly. ``torch.compile`` leaves a step out of its CUDA graphs, but for ``backend="cudagraphs"``,
    which fails. An operator of a program that steps needs the tag ``torch.Tag.cudagraph_unsafe`` for that.

    Autograd does not see a step: a derivative with respect to what a parameter, or `lr`, was computed from takes the
    new values for given. To differentiate through steps, write them in operations of PyTorch.

    Arithmetic is float32, float64 for float64, and is the same in every run. The first step of a list puts tables of
    addresses on the device; later ones look whether they still hold. A graph that is captured behind such a step reads
    its tables, which then live as long as the process, and copies at most the addresses of gradients, where these lie
    elsewhere. Steps of a list on several streams have to wait for each other, as for all that works in place. A signal
    handler that interrupts a step must not give its tensors other memory, as ``Module.to`` does. Where Triton
    interprets, it must neither step nor wait for a thread that steps. Threads that step one list of several dtypes with
    a `step` on the device must take turns by a lock.

    The formula is that of I. Loshchilov and F. Hutter, "Decoupled Weight Decay Regularization", 2019.

    Examples
    --------
    >>> import fusebook, torch
    >>> p, m, v = (torch.zeros(2, device="cuda") for _ in range(3))  # doctest: +SKIP
    >>> fusebook.adamw_step([p], [torch.ones_like(p)], [m], [v], step=1, lr=0.5)  # doctest: +SKIP
    >>> p  # doctest: +SKIP
    tensor([-0.5000, -0.5000], device='cuda:0')
    """
    given: Any = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters)
    lists: Any = [[*of] if type(of) is list else _listed(name, of) for name, of in zip(_LISTED, given, strict=True)]
    tensors = len(lists[0])
    if [*map(len, lists)] != [tensors, tensors, tensors, tensors, 0, 0]:
        _check_lengths(lists[0], dict(zip(_LISTED[1:], lists[1:], strict=True)))
    if _NONE in set(map(type, lists[1])):  # as torch.optim has it, these are left as they are
        some = [i for i, g in enumerate(lists[1]) if g is not None]
        lists = [[of[i] for i in some] if of else of for of in lists]
    count = step if isinstance(step, Tensor) else None
    rate = lr if isinstance(lr, Tensor) else None
    first = lists[0][0] if lists[0] else None
    if lists[0]:
        check_tensor(_NAME, "params[0]", first)
    done = 1 if count is not None else integer(_NAME, "step", step, "give the number of this step")
    flag(_NAME, "maximize", maximize)
    values: Any = beta1, beta2, lr if rate is None else 0.0, eps, weight_decay, max_norm
    if {*map(type, values)} != {float}:
        names = "beta1", "beta2", "lr", "eps", "weight_decay", "max_norm"
        values = [number(_NAME, *named, "see torch.optim.AdamW") for named in zip(names, values, strict=True)]
    beta1, beta2, speed, eps, decay, most = values
    if seed is not None:
        seed = integer(_NAME, "seed", seed, "None rounds to the nearest")
    numbers: Any = count, done, rate, speed, beta1, beta2, eps, decay, maximize, seed, norm, most, grad_scale, found_inf
    if not lists[0] or not watched():  # without a tensor, the dispatcher finds no operator
        _stepped(*lists, *numbers)
    else:
        singles = [count, rate, norm, grad_scale, found_inf]
        if torch._C._get_tracing_state():
            raise NotImplementedError(
                f"{_NAME}: expected a step that is made, got one that torch.jit.trace takes down, which misses what is "
                "written into lists; use torch.compile"
            )
        if not torch.compiler.is_compiling():
            for name, of in zip((*_LISTED, "each single number"), (*lists, singles), strict=True):
                for t in of:
                    check_local(_NAME, name, t)
                    if t is not None and unpack_dual(t).tangent is not None:
                        raise NotImplementedError(
                            f"{_NAME}: expected {name} without tangents, since a step has no derivative, got one; "
                            "call it outside of forward mode"
                        )
        for what, single in zip(_SINGLES, singles, strict=True):
            if single is not None and first is not None:
                _single(what, single, first)
        _no_gradient_of(lists[1])
        if count is None and not torch.compiler.is_compiling() and _modes():
            if any(isinstance(mode, _Cloning) for mode in _stack()):
                numbers = (torch.full((), done - 1, device=lists[0][0].device), *numbers[1:])
        with torch.no_grad():
            _custom(*lists, *numbers)
