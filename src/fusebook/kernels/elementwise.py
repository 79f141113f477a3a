# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/elementwise.py. It needs torch, Triton, NumPy and _call.py.
"""Expressions of neighbouring elements: every operand is read once, every result is written once.

For operands that broadcast against each other, element by element,

    multiply            x * y
    double              2 * x
    add_sub             x + y and x - y
    multiply_add        x * y + z
    silu                x * sigmoid(x)
    silu_mul            x * sigmoid(x) * y
    add_add_multiply    (x + y + z) * w
    exp                 exp(x)

Fused: all operations of an expression, and all its results. A chain of separate operations writes each intermediate
result to memory and reads it back: for SIZE elements, `add_add_multiply` reads 6 SIZE and writes 3 SIZE that way, and
4 SIZE and SIZE here. `add_sub` reads its two operands once for both results.

There are two kernels for all of them. *Flat* takes what lies side by side in the results, and looks for each operand's
elements by its strides where operands do not lie alike; one that is broadcast has stride 0 there. *Tiles* is for an
operand that lies across, and takes axes ``[B, R, C]``. Arithmetic is float32, in float64 it is float64, and each result
is rounded once.

Results are new tensors, so that they never overlap an operand or each other.
"""

# Device code grows tuples of operands; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import FLOATING, Operator, gpu, launch, shapes, wide

__all__ = [
    "add_add_multiply", "add_add_multiply_eager", "add_sub", "add_sub_eager", "double", "exp", "multiply",
    "multiply_add", "multiply_add_eager", "silu", "silu_eager", "silu_mul", "silu_mul_eager",
]  # fmt: skip

# The unfused chains --------------------------------------------------------------------------------------------------


def add_sub_eager(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and difference, one operation after another: each reads both operands.

    Parameters
    ----------
    x, y : torch.Tensor

    Returns
    -------
    tuple of torch.Tensor
    """
    total = x + y  # read 2 SIZE, write SIZE
    return total, x - y  # read 2 SIZE, write SIZE


def multiply_add_eager(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """A product and a sum, one operation after another: what fusing saves.

    Parameters
    ----------
    x, y, z : torch.Tensor

    Returns
    -------
    torch.Tensor
    """
    product = x * y  # read 2 SIZE, write SIZE
    return product + z  # read 2 SIZE, write SIZE


def silu_eager(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor

    Returns
    -------
    torch.Tensor
    """
    gate = torch.sigmoid(x)  # read SIZE, write SIZE
    return x * gate  # read 2 SIZE, write SIZE


def silu_mul_eager(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, one operation after another: what fusing saves.

    Parameters
    ----------
    gate, up : torch.Tensor

    Returns
    -------
    torch.Tensor
    """
    return silu_eager(gate) * up  # and read 2 SIZE, write SIZE


def add_add_multiply_eager(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """Two sums and a product, one operation after another: what fusing saves.

    Parameters
    ----------
    x, y, z, w : torch.Tensor

    Returns
    -------
    torch.Tensor
    """
    two = x + y  # read 2 SIZE, write SIZE
    three = two + z  # read 2 SIZE, write SIZE
    return three * w  # read 2 SIZE, write SIZE


# Kernels -------------------------------------------------------------------------------------------------------------
#
# An expression takes as many operands as it has arguments and returns a tuple of results. The kernels take a tuple of
# pointers for each side and are compiled anew for each expression: loops over tuples are unrolled, and nothing of this
# is left in the machine code. Tensors may have more than 2**31 elements.


@triton.jit
def _exp(x):
    """The exponential to the last digits or so, also of large numbers."""
    if x.dtype == tl.float64:
        y = tl.exp(x)
    else:
        # The hardware has powers of two. x * log2(e) is rounded where it is large, and what is lost there, the error of
        # the product and that of log2(e) itself, scales the result: tl.exp is off by some forty eps at x = 88.
        power = x * 1.4426950408889634
        lost = tl.fma(x, 1.4426950408889634, -power) + x * 1.925963033500e-08
        # Infinite operands would become NaN here; beyond 256 there is nothing but zero and infinity.
        lost = tl.where(tl.abs(power) < 256, lost, 0.0)
        y = tl.exp2(power) * (1 + lost * 0.6931471805599453)  # log(2)
    return y


@triton.jit
def _multiply(x, y):
    return (x * y,)


@triton.jit
def _double(x):
    return (x + x,)


@triton.jit
def _add_sub(x, y):
    return x + y, x - y


@triton.jit
def _multiply_add(x, y, z):
    return (x * y + z,)


@triton.jit
def _silu(x):
    return (x / (1 + _exp(-x)),)


@triton.jit
def _silu_mul(x, y):
    return (x / (1 + _exp(-x)) * y,)


@triton.jit
def _silu_mul_backward(x, y, d):
    """The gradients of both operands, given that of the result."""
    s = 1 / (1 + _exp(-x))
    silu = x * s
    return d * y * (s + silu * (1 - s)), d * silu


@triton.jit
def _add_add_multiply(x, y, z, w):
    return ((x + y + z) * w,)


@triton.jit
def _exponential(x):
    return (_exp(x),)


@triton.jit
def _load(ptr, inside):
    """One operand, in float32 at least: bfloat16 products are wrong in Triton's interpreter, and coarse everywhere."""
    x = tl.load(ptr, mask=inside)  # read SIZE
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def _row_at(row, SIZES, strides):
    """Where an operand has a row, counted along all axes but the fastest."""
    place = tl.zeros([], row.dtype)
    for k in tl.static_range(1, len(SIZES)):
        place += (row % SIZES[k]) * strides[k]
        row = row // SIZES[k]
    return place + row * strides[len(SIZES)]


@triton.jit
def _place(first, within, SIZES, strides):
    """Where an operand has elements ``first + within``, counted along axes of `SIZES` and a slowest one, fastest first.

    One division for each axis serves a group `within`: no group passes the end of a row.
    """
    if len(SIZES) == 0:
        return (first + within) * strides[0]
    else:
        row, at = first // SIZES[0], first % SIZES[0]
        at = at // within.shape[1] * within.shape[1] + within  # nothing new but to the compiler
        return _row_at(row, SIZES, strides) + at * strides[0]


@triton.jit
def _elements_at(
    outs, ins, first, within, inside, ALIKE: tl.constexpr, SIZES, in_strides, EXPRESSION: tl.constexpr
):  # fmt: skip
    """Load, compute and store elements that are neighbours in the results."""
    values = ()
    for i in tl.static_range(len(ins)):
        place = first + within if ALIKE >> i & 1 else _place(first, within, SIZES, in_strides[i])
        place, there = tl.broadcast(place, inside)
        values += (_load(ins[i] + place, there),)
    results = EXPRESSION(*values)
    for i in tl.static_range(len(outs)):
        tl.store(outs[i] + (first + within), results[i], mask=inside)  # write SIZE


@triton.jit
def _elementwise_flat(
    outs, ins, SIZE, EXPRESSION: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    ALIKE: tl.constexpr, SIZES=None, in_strides=None,
):  # fmt: skip
    """BLOCK neighbours of the results, in groups that a thread takes.

    Operands have the strides of the results where a bit of ALIKE says so; others have `in_strides`. Rows of these are
    whole groups.
    """
    # Half the work where no tensor reaches beyond 2**31 elements.
    start = tl.program_id(0).to(tl.int64 if WIDE else tl.int32) * BLOCK
    first = start + tl.arange(0, BLOCK // GROUP)[:, None] * GROUP  # [BLOCK / GROUP, 1]
    within = tl.arange(0, GROUP)[None, :]  # [1, GROUP]
    # Whole groups, moved by one instruction each; then what is left, element by element.
    _elements_at(outs, ins, first, within, first <= SIZE - GROUP, ALIKE, SIZES, in_strides, EXPRESSION)
    if (start > SIZE - BLOCK) & (SIZE % GROUP > 0):
        rest = tl.zeros([1, 1], start.dtype) + SIZE // GROUP * GROUP
        _elements_at(outs, ins, rest, within, rest + within < SIZE, ALIKE, SIZES, in_strides, EXPRESSION)


@triton.jit
def _elementwise_tiles(
    outs, ins, R, C, out_strides, in_strides, EXPRESSION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A tile of ROWS x BLOCK elements, of tensors ``[B, R, C]`` with strides of their own, 0 where broadcast."""
    down, across = tl.cdiv(R, ROWS), tl.cdiv(C, BLOCK)
    program = tl.program_id(0)
    b = (program // (down * across)).to(tl.int64)
    r = ((program // across) % down).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    c = (program % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (r < R) & (c < C)
    values = ()
    for i in tl.static_range(len(ins)):
        s = in_strides[i]
        values += (_load(ins[i] + (b * s[0] + r * s[1] + c * s[2]), inside),)  # [ROWS, BLOCK]
    results = EXPRESSION(*values)
    at = b * out_strides[0] + r * out_strides[1] + c * out_strides[2]
    for i in tl.static_range(len(outs)):
        tl.store(outs[i] + at, results[i], mask=inside)


# Plans ---------------------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """One axis of a problem, neighbours folded: its length and the step that each tensor takes along it."""

    size: int
    out: int
    ins: tuple[int, ...]


def _fold(shape: Sequence[int], out: Sequence[int], ins: Sequence[Sequence[int]]) -> list[Axis]:
    """As few axes as there can be, the one along which results are neighbours last; none for a single element.

    `shape` is without zeros, `out` are the strides of the results, which have no gaps, and `ins` those of the operands,
    0 where they are broadcast.
    """
    axes = [Axis(n, out[i], tuple(s[i] for s in ins)) for i, n in enumerate(shape) if n > 1]
    axes.sort(key=lambda axis: -axis.out)
    folded: list[Axis] = []
    for axis in axes:
        if folded:
            above = folded[-1]
            steps = (axis.out, *axis.ins)
            if (above.out, *above.ins) == tuple(step * axis.size for step in steps):
                folded[-1] = Axis(above.size * axis.size, *axis[1:])
                continue
        folded.append(axis)
    return folded


class Plan(NamedTuple):
    """How an expression is launched."""

    tiled: bool  # by `_elementwise_tiles`, or else by `_elementwise_flat`
    programs: int
    axes: tuple[Axis, ...]  # three where tiled; none where all operands lie alike
    constants: dict[str, int]  # and the number of warps


def _elementwise_plan(
    shape: tuple[int, ...],
    out: tuple[int, ...],
    ins: tuple[tuple[int, ...], ...],
    itemsize: int,
    capability: tuple[int, int] | None,
) -> Plan:
    """Choose the kernel and its constants.

    The first three are those of `_fold`; `itemsize` is that of the widest tensor, and `capability` None in the
    interpreter, whose cost is the number of programs.
    """
    size = math.prod(shape)
    axes = _fold(shape, out, ins)
    interpreted = capability is None
    # An operand that is broadcast along the last axis is never across.
    lying = [i for i in range(len(ins)) if axes and axes[-1].ins[i]]
    # What is read across within a block comes from the cache; steps that lie further apart pay for a tile at six.
    across = [
        axis
        for axis in axes[:-1]
        if any(
            axis.ins[i] == 1 and min(axis.size, axes[-1].size) >= (6 if 8 * itemsize * axis.out > 4096 else 32)
            for i in lying
        )
    ]
    if across and len(axes) <= 3 and (interpreted or size > 2**16):
        # An operand lies across, and the neighbours of its elements are in its rows: in a square tile both kinds of
        # lines are whole. Few rows are longer.
        B = [axis for axis in (Axis(1, 0, (0,) * len(ins)), *axes[:-1]) if axis is not across[-1]][-1]
        R, C = across[-1], axes[-1]
        numbers, warps = (2**16, 1) if interpreted else (4096, 8) if itemsize >= 4 else (2048, 4)
        if not interpreted:  # small tiles where there would be fewer than multiprocessors
            numbers = min(numbers, max(1024, triton.next_power_of_2(size // 132)))
        rows = min(256 if interpreted else 64 if numbers > 1024 else 32, triton.next_power_of_2(R.size))
        block = min(numbers // rows, triton.next_power_of_2(C.size))
        programs = B.size * -(-R.size // rows) * -(-C.size // block)
        return Plan(True, programs, (B, R, C), {"ROWS": rows, "BLOCK": block, "num_warps": warps})
    # Tried on an H200: one load of 16 bytes a thread, of each operand; what is under way in many small programs beats
    # loops and larger blocks. Half types have two such loads where there is much to load.
    most = min(4096 // itemsize, 1024 if size <= 2**20 else 2048)
    block, warps = (2**16, 1) if interpreted else (most, 8 if itemsize >= 4 else 4)
    alike = [all(axis.ins[i] == axis.out for axis in axes) for i in range(len(ins))]
    constants = {"BLOCK": min(block, triton.next_power_of_2(size)), "ALIKE": sum(a << i for i, a in enumerate(alike))}
    group = 16 // itemsize
    if len(axes) > 1:
        group = math.gcd(group, axes[-1].size)  # a row is whole groups
    if not interpreted and (size <= 2**16 or group == 1):  # few elements take fewer instructions one by one
        group, warps, constants["BLOCK"] = 1, 8, 512
    reaches = (sum((axis.size - 1) * axis.ins[i] for axis in axes) for i in range(len(ins)))
    constants |= {"GROUP": min(group, constants["BLOCK"]), "WIDE": max(size, *reaches) >= 2**31, "num_warps": warps}
    return Plan(False, -(-size // constants["BLOCK"]), () if all(alike) else tuple(axes), constants)


# Launchers -----------------------------------------------------------------------------------------------------------


class Expression(NamedTuple):
    """What is computed of each element, of which operands, in how many results; its gradients in plain PyTorch."""

    kernel: Any
    operands: str
    results: int
    gradients: Callable[..., tuple[Tensor, ...]]
    by_result: bool = False  # the gradient takes the one result, in place of the one operand


_aten_silu_backward = torch.ops.aten.silu_backward.default  # not the packet, which tries each overload


def _silu_gradient(x: Tensor, dy: Tensor) -> tuple[Tensor]:
    if not torch.is_grad_enabled():  # torch's kernel has no gradient of its own
        return (_aten_silu_backward(dy, x),)
    gate = torch.sigmoid(x)
    return (dy * gate * (1 + x * (1 - gate)),)


def _silu_mul_gradients(x: Tensor, y: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """In one pass as well: it is an expression of its own."""
    return _OPERATORS["silu_mul_backward"].call(x, y, d)  # type: ignore[no-any-return]


def _silu_mul_second(x: Tensor, y: Tensor, d: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gradients, which are ``d * y * first`` and ``d * x * s``."""
    s = torch.sigmoid(x)
    first = s * (1 + x * (1 - s))
    second = s * (1 - s) * (2 + x * (1 - 2 * s))
    return p * d * y * second + q * d * first, p * d * first, p * y * first + q * x * s


_EXPRESSIONS = {
    "multiply": Expression(_multiply, "xy", 1, lambda x, y, d: (d * y, d * x)),
    "double": Expression(_double, "x", 1, lambda x, d: (d + d,)),
    "add_sub": Expression(_add_sub, "xy", 2, lambda x, y, d, e: (d + e, d - e)),
    "multiply_add": Expression(_multiply_add, "xyz", 1, lambda x, y, z, d: (d * y, d * x, d)),
    "silu": Expression(_silu, "x", 1, _silu_gradient),
    "silu_mul": Expression(_silu_mul, "xy", 1, _silu_mul_gradients),
    "silu_mul_backward": Expression(_silu_mul_backward, "xyd", 2, _silu_mul_second),
    "add_add_multiply": Expression(
        _add_add_multiply, "xyzw", 1, lambda x, y, z, w, d: (d * w, d * w, d * w, d * (x + y + z))
    ),
    "exp": Expression(_exponential, "x", 1, lambda y, d: (d * y,), by_result=True),
}  # fmt: skip
_plan = functools.lru_cache(maxsize=4096)(_elementwise_plan)


def _dtype_of(operands: Sequence[Tensor]) -> torch.dtype:
    """The dtype of the results, as PyTorch has it: single numbers do not widen tensors."""
    counting = [t for t in operands if t.dim()] or operands
    return functools.reduce(torch.promote_types, (t.dtype for t in counting))


def _outputs(results: int, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Memory for the results: laid out as the operands where all lie alike, and contiguous otherwise."""
    x, dtype = operands[0], _dtype_of(operands)
    if all(t.shape == x.shape and t.stride() == x.stride() for t in operands[1:]):
        outs = tuple(torch.empty_like(x, dtype=dtype) for _ in range(results))
    else:
        shape = torch.broadcast_shapes(*(t.shape for t in operands))
        outs = tuple(x.new_empty(shape, dtype=dtype) for _ in range(results))
    return outs if results > 1 else outs[0]


def _elementwise_into(expression: Expression, outs: Tensor | tuple[Tensor, ...], *operands: Tensor) -> None:
    outs = outs if isinstance(outs, tuple) else (outs,)
    out, shape = outs[0], outs[0].shape
    ins = tuple(t if t.shape == shape else t.expand(shape) for t in operands)
    itemsize = max(t.element_size() for t in (out, *ins))
    plan = _plan(shape, out.stride(), tuple(t.stride() for t in ins), itemsize, gpu(out.device)[0])
    grid, constants = (plan.programs,), {"EXPRESSION": expression.kernel, **plan.constants}
    if plan.tiled:
        B, R, C = plan.axes
        strides = (B.out, R.out, C.out), tuple(zip(B.ins, R.ins, C.ins, strict=True))
        launch(_elementwise_tiles, grid, outs, ins, R.size, C.size, *strides, **constants)
    elif plan.axes:
        fastest_first = plan.axes[::-1]
        sizes = tuple(axis.size for axis in fastest_first[:-1])
        strides = tuple(zip(*(axis.ins for axis in fastest_first), strict=True))
        launch(_elementwise_flat, grid, outs, ins, out.numel(), SIZES=sizes, in_strides=strides, **constants)
    else:
        launch(_elementwise_flat, grid, outs, ins, out.numel(), **constants)


def _keep(expression: Expression, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*((output,) if expression.by_result else inputs))


def _gradients(expression: Expression, ctx: Any, *dys: Tensor | None) -> tuple[Tensor, ...]:
    """Each in its operand's shape and dtype: what was broadcast is summed up."""
    operands = ctx.saved_tensors
    if len(dys) > 1 and any(d is None for d in dys):  # a result that is not used
        shape, dtype = torch.broadcast_shapes(*(t.shape for t in operands)), _dtype_of(operands)
        dys = tuple(torch.zeros(shape, dtype=dtype, device=operands[0].device) if d is None else d for d in dys)
    found = expression.gradients(*operands, *dys)
    if len(operands) == 1:  # nothing was broadcast, nor cast
        return found
    pairs = zip(found, operands, strict=True)
    return tuple([(g if g.shape == x.shape else g.sum_to_size(x.shape)).to(x.dtype) for g, x in pairs])


def _check(name: str, letters: str, *operands: Any) -> tuple[Tensor, ...]:
    shapes(name, **{what: (value, "", FLOATING) for what, value in zip(letters, operands, strict=True)})
    if any(t.shape != operands[0].shape for t in operands):
        try:
            torch.broadcast_shapes(*(t.shape for t in operands))
        except RuntimeError:
            given = " and ".join(str(tuple(t.shape)) for t in operands)
            raise ValueError(
                f"{name}: expected shapes that broadcast, got {given}; sizes must be equal or 1, counted from the "
                "last axis"
            ) from None
    return operands


def _batched(name: str, info: Any, in_dims: tuple[Any, ...], *operands: Tensor) -> Any:
    """The rule for `torch.vmap`: the batch in front of all axes that members have, where dtypes are alike."""
    operator, results = _OPERATORS[name], _EXPRESSIONS[name].results
    if any(t.dtype != operands[0].dtype for t in operands):  # a member may be a single number, which widens nothing
        return operator.one_by_one(info, in_dims, *operands)
    axes = max(t.dim() - (at is not None) for t, at in zip(operands, in_dims, strict=True))
    fronts = [t if at is None else t.movedim(at, 0) for t, at in zip(operands, in_dims, strict=True)]
    aligned = [
        t if at is None else t.reshape(t.shape[0], *[1] * (axes + 1 - t.dim()), *t.shape[1:])
        for t, at in zip(fronts, in_dims, strict=True)
    ]
    return operator.dispatched(*aligned), 0 if results == 1 else (0,) * results


def _operator(name: str) -> Operator:
    expression = _EXPRESSIONS[name]
    operands = ", ".join(f"Tensor {letter}" for letter in expression.operands)
    results = ", ".join(["Tensor"] * expression.results)
    return Operator(
        name,
        f"({operands}) -> {results if expression.results == 1 else f'({results})'}",
        check=functools.partial(_check, name, expression.operands),
        outputs=functools.partial(_outputs, expression.results),
        into=functools.partial(_elementwise_into, expression),
        gradient=(functools.partial(_gradients, expression), functools.partial(_keep, expression)),
        batched=functools.partial(_batched, name),
        traced=lambda *operands: operands,
        autocast=functools.partial(wide, like="exp") if name == "exp" else None,
    )


_OPERATORS = {name: _operator(name) for name in _EXPRESSIONS}


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """The product of two tensors, element by element.

    Parameters
    ----------
    x, y : torch.Tensor
        float16, bfloat16, float32 or float64, of shapes that broadcast and of any strides, on one device: CUDA, or the
        CPU where Triton interprets.

    Returns
    -------
    torch.Tensor
        Of the common shape and, where dtypes differ, of the wider one, as PyTorch has it. It lies in memory as the
        operands do where all lie alike, and is contiguous otherwise; it is new, and overlaps nothing.

    Raises
    ------
    TypeError
        For what is no tensor, no dense one, or of another dtype.
    ValueError
        For shapes that do not broadcast, tensors on different devices, or on the CPU where Triton compiles.

    Notes
    -----
    All functions of this module share this contract. Arithmetic is float32 at least, and a result is rounded once.
    They are differentiable, any number of times, and work under torch.compile and in CUDA graphs.

    Examples
    --------
    >>> import fusebook, torch
    >>> fusebook.multiply(torch.ones(20, 10, device="cuda"), torch.arange(10.0, device="cuda"))  # doctest: +SKIP
    """
    return _OPERATORS["multiply"].call(x, y)


def double(x: Tensor) -> Tensor:
    """Twice a tensor. What it takes, returns and refuses is as of `multiply`."""
    return _OPERATORS["double"].call(x)


def add_sub(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and the difference of two tensors, which are read once for both.

    Returns
    -------
    tuple of torch.Tensor
        ``x + y`` and ``x - y``, each as from `multiply`. What it takes and refuses is as there.
    """
    return _OPERATORS["add_sub"].call(x, y)


def multiply_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """``x * y + z``, in one pass. What it takes, returns and refuses is as of `multiply`."""
    return _OPERATORS["multiply_add"].call(x, y, z)


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``, in one pass. What it takes, returns and refuses is as of `multiply`."""
    return _OPERATORS["silu"].call(x)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of two tensors, in one pass: what `swiglu` does to its products.

    It is for layers that make both by other means: with adapters, of quantised weights, or shared by several GPUs.
    What it takes, returns and refuses is as of `multiply`. Its gradients are one pass as well.

    Examples
    --------
    >>> import fusebook, torch
    >>> both = torch.nn.Linear(64, 2 * 96, device="cuda")(torch.randn(8, 64, device="cuda"))  # doctest: +SKIP
    >>> fusebook.silu_mul(*both.chunk(2, -1)).shape  # doctest: +SKIP
    torch.Size([8, 96])
    """
    return _OPERATORS["silu_mul"].call(gate, up)


def add_add_multiply(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """``(x + y + z) * w``, in one pass. What it takes, returns and refuses is as of `multiply`."""
    return _OPERATORS["add_add_multiply"].call(x, y, z, w)


def exp(x: Tensor) -> Tensor:
    """The exponential of every element. What it takes, returns and refuses is as of `multiply`."""
    return _OPERATORS["exp"].call(x)
