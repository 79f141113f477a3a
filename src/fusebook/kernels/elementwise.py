"""Expressions of neighbouring elements: every operand is read once, every result is written once.

For operands that broadcast against each other, element by element,

    multiply            x * y
    double              2 * x
    add_sub             x + y and x - y
    multiply_add        x * y + z
    silu                x * sigmoid(x)
    add_add_multiply    (x + y + z) * w
    exp                 exp(x)

Fused: all operations of an expression, and all its results. A chain of separate operations writes each intermediate
result to memory and reads it back: for SIZE elements, `add_add_multiply` reads 6 SIZE and writes 3 SIZE that way, and
4 SIZE and SIZE here. `add_sub` reads its two operands once for both results.

There are two kernels for all of them. *Flat* takes neighbours in memory, for operands that lie alike. *Tiles* takes
operands of different strides as axes ``[B, R, C]``: an operand that is broadcast has stride 0 there, and a row of it is
read again from the L2 cache, not from memory. Arithmetic is float32, in float64 it is float64, and each result is
rounded once.

Limits: what does not fold into three axes is copied first. Results are new tensors, so that they never overlap an
operand or each other.
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

from fusebook.inputs import rough
from fusebook.kernels._arguments import check_alike, check_tensor
from fusebook.kernels._launch import check_device, gpu, launching
from fusebook.op import Cost, Op, Variant

__all__ = [
    "ADD_ADD_MULTIPLY",
    "ADD_SUB",
    "DOUBLE",
    "EXP",
    "MULTIPLY",
    "MULTIPLY_ADD",
    "OPS",
    "SILU",
    "add_add_multiply",
    "add_add_multiply_eager",
    "add_sub",
    "add_sub_eager",
    "cuda_source",
    "double",
    "exp",
    "multiply",
    "multiply_add",
    "multiply_add_eager",
    "silu",
    "silu_eager",
]

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
# is left in the machine code. Addresses are int64, because tensors may have more than 2**31 elements.


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
def _neighbours(outs, ins, at, inside, EXPRESSION: tl.constexpr):
    """Load, compute and store what lies at the same place in all tensors."""
    values = ()
    for i in tl.static_range(len(ins)):
        values += (_load(ins[i] + at, inside),)
    results = EXPRESSION(*values)
    for i in tl.static_range(len(outs)):
        tl.store(outs[i] + at, results[i], mask=inside)  # write SIZE


@triton.jit
def _elementwise_flat(outs, ins, SIZE, EXPRESSION: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK neighbours, of tensors that all lie alike."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)  # [BLOCK]
    # A mask that ends anywhere forces loads of one element each. Only the last block has need of one.
    if start + BLOCK <= SIZE:
        _neighbours(outs, ins, at, None, EXPRESSION)
    else:
        _neighbours(outs, ins, at, at < SIZE, EXPRESSION)


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
    """As few axes as there can be, the one along which results are neighbours last.

    Parameters
    ----------
    shape : sequence of int
        Without zeros.
    out : sequence of int
        Strides of the results, which have no gaps.
    ins : sequence of sequence of int
        Strides of the operands, 0 where they are broadcast.

    Returns
    -------
    list of Axis
        Empty where there is a single element.
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
    """How an expression is launched.

    Attributes
    ----------
    flat : bool
        Whether `_elementwise_flat` is launched, or else `_elementwise_tiles`.
    copied : bool
        Whether operands are first copied into the layout of the results.
    programs : int
        Of the grid.
    B, R, C : Axis
        For tiles.
    constants : dict
        Constant arguments and the number of warps.
    """

    flat: bool
    copied: bool
    programs: int
    B: Axis
    R: Axis
    C: Axis
    constants: dict[str, int]


def _elementwise_plan(
    shape: tuple[int, ...],
    out: tuple[int, ...],
    ins: tuple[tuple[int, ...], ...],
    itemsize: int,
    capability: tuple[int, int] | None,
) -> Plan:
    """Choose the kernel and its constants.

    Parameters
    ----------
    shape, out, ins
        As those of `_fold`.
    itemsize : int
        Bytes of an element of the widest tensor.
    capability : tuple of int, optional
        The GPU's; None for the interpreter, whose cost is the number of programs.

    Returns
    -------
    Plan
    """
    size = math.prod(shape)
    axes = _fold(shape, out, ins)
    copied = len(axes) > 3
    if copied or not axes:
        axes = [Axis(size, 1, (1,) * len(ins))]
    one = Axis(1, 0, (0,) * len(ins))
    B, R, C = ([one] * 3 + axes)[-3:]
    interpreted = capability is None
    if len(axes) == 1 and set(C.ins) == {1}:
        # Tried on an H200: one load of 16 bytes a thread, of each operand; what is under way in many small programs
        # beats loops and larger blocks. Half types have two such loads.
        block, warps = (2**16, 1) if interpreted else (4096 // itemsize, 8 if itemsize >= 4 else 4)
        block = min(block, triton.next_power_of_2(size))
        return Plan(True, copied, -(-size // block), B, R, C, {"BLOCK": block, "num_warps": warps})
    if 1 in R.ins and R.size > 1:
        # An operand lies across, and the neighbours of its elements are in its rows: in a square tile both kinds of
        # lines are whole.
        rows, block, warps = (256, 256, 1) if interpreted else (64, 64, 8)
    else:
        rows, block, warps = (64, 1024, 1) if interpreted else (8, 2048 // itemsize, 4)
    block, rows = min(block, triton.next_power_of_2(C.size)), min(rows, triton.next_power_of_2(R.size))
    programs = B.size * -(-R.size // rows) * -(-C.size // block)
    return Plan(False, copied, programs, B, R, C, {"ROWS": rows, "BLOCK": block, "num_warps": warps})


# Launchers -----------------------------------------------------------------------------------------------------------


class Expression(NamedTuple):
    """What is computed of each element, in how many results, and its gradients in plain PyTorch."""

    kernel: Any
    results: int
    gradients: Callable[..., tuple[Tensor, ...]]


def _silu_gradient(x: Tensor, dy: Tensor) -> tuple[Tensor]:
    gate = torch.sigmoid(x)
    return (dy * gate * (1 + x * (1 - gate)),)


_EXPRESSIONS = {
    "multiply": Expression(_multiply, 1, lambda x, y, d: (d * y, d * x)),
    "double": Expression(_double, 1, lambda x, d: (d + d,)),
    "add_sub": Expression(_add_sub, 2, lambda x, y, d, e: (d + e, d - e)),
    "multiply_add": Expression(_multiply_add, 1, lambda x, y, z, d: (d * y, d * x, d)),
    "silu": Expression(_silu, 1, _silu_gradient),
    "add_add_multiply": Expression(
        _add_add_multiply, 1, lambda x, y, z, w, d: (d * w, d * w, d * w, d * (x + y + z))
    ),
    "exp": Expression(_exponential, 1, lambda x, d: (d * torch.exp(x),)),
}  # fmt: skip


_plan = functools.lru_cache(maxsize=4096)(_elementwise_plan)


def _dtype_of(operands: Sequence[Tensor]) -> torch.dtype:
    """The dtype of the results, as PyTorch has it: single numbers do not widen tensors."""
    counting = [t for t in operands if t.dim()] or operands
    return functools.reduce(torch.promote_types, (t.dtype for t in counting))


def _allocate(name: str, operands: Sequence[Tensor]) -> list[Tensor]:
    """Memory for the results: laid out as the operands where all lie alike, and contiguous otherwise."""
    x, dtype = operands[0], _dtype_of(operands)
    if all(t.shape == x.shape and t.stride() == x.stride() for t in operands[1:]):
        return [torch.empty_like(x, dtype=dtype) for _ in range(_EXPRESSIONS[name].results)]
    shape = torch.broadcast_shapes(*(t.shape for t in operands))
    return [x.new_empty(shape, dtype=dtype) for _ in range(_EXPRESSIONS[name].results)]


def _copied_like(x: Tensor, out: Tensor) -> Tensor:
    """The same numbers in the layout of `out`."""
    return torch.empty_strided(out.shape, out.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _elementwise(name: str, operands: Sequence[Tensor]) -> list[Tensor]:
    """Allocate and launch; operands are valid."""
    outs = _allocate(name, operands)
    out, shape = outs[0], outs[0].shape
    if out.numel() == 0:
        return outs
    ins = [t if t.shape == shape else t.expand(shape) for t in operands]
    itemsize = max(t.element_size() for t in (out, *ins))
    plan = _plan(shape, out.stride(), tuple(t.stride() for t in ins), itemsize, gpu(out.device)[0])
    if plan.copied:
        ins = [_copied_like(t, out) for t in ins]
    expression, (B, R, C) = _EXPRESSIONS[name].kernel, plan[3:6]
    with launching(out):
        if plan.flat:
            _elementwise_flat[(plan.programs,)](
                tuple(outs), tuple(ins), out.numel(), EXPRESSION=expression, **plan.constants
            )
        else:
            _elementwise_tiles[(plan.programs,)](
                tuple(outs), tuple(ins), R.size, C.size,
                (B.out, R.out, C.out), tuple(zip(B.ins, R.ins, C.ins, strict=True)),
                EXPRESSION=expression, **plan.constants,
            )  # fmt: skip
    return outs


# A custom operator, so that torch.compile takes the kernels as they are and autograd knows their gradients.
_elementwise_op = torch.library.custom_op(
    "fusebook::elementwise", _elementwise, mutates_args=(), schema="(str name, Tensor[] operands) -> Tensor[]"
)


@_elementwise_op.register_fake
def _(name: str, operands: Sequence[Tensor]) -> list[Tensor]:
    return _allocate(name, operands)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.name, operands = inputs
    ctx.save_for_backward(*operands)


def _gradients(ctx: Any, dys: Sequence[Tensor | None]) -> tuple[None, list[Tensor]]:
    """Each in its operand's shape: what was broadcast is summed up."""
    operands = ctx.saved_tensors
    like = _allocate_meta(ctx.name, operands)
    given = [torch.zeros(o.shape, dtype=o.dtype, device=operands[0].device) if d is None else d
             for d, o in zip(dys, like, strict=True)]  # fmt: skip
    found = _EXPRESSIONS[ctx.name].gradients(*operands, *given)
    return None, [g.sum_to_size(x.shape).to(x.dtype) for g, x in zip(found, operands, strict=True)]


def _allocate_meta(name: str, operands: Sequence[Tensor]) -> list[Tensor]:
    return _allocate(name, [t.detach().to("meta") for t in operands])


_elementwise_op.register_autograd(_gradients, setup_context=_keep)


def _direct(operands: Sequence[Tensor]) -> bool:
    """Whether the kernels can be launched at once, which saves a small call the time of torch's dispatcher.

    Not where a gradient is recorded, the call is traced or transformed, or a tensor is a stand-in without memory.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or any(type(t) not in (Tensor, torch.nn.Parameter) or t.device.type not in ("cpu", "cuda") for t in operands)
        or (torch.is_grad_enabled() and any(t.requires_grad for t in operands))
    )


def _call(name: str, **operands: Any) -> list[Tensor]:
    """Validate, and launch."""
    first = next(iter(operands))
    for what, value in operands.items():
        check_tensor(name, what, value)
        check_alike(name, what, value, first, operands[first], dtype=False)
    tensors = list(operands.values())
    if any(t.shape != tensors[0].shape for t in tensors):
        try:
            torch.broadcast_shapes(*(t.shape for t in tensors))
        except RuntimeError:
            shapes = " and ".join(str(tuple(t.shape)) for t in tensors)
            raise ValueError(
                f"{name}: expected shapes that broadcast, got {shapes}; sizes must be equal or 1, counted from the "
                "last axis"
            ) from None
    if tensors[0].device.type in ("cpu", "cuda"):  # a stand-in on another device is only asked for its shape
        check_device(name, tensors[0])
    return _elementwise(name, tensors) if _direct(tensors) else _elementwise_op(name, tensors)


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
    return _call("multiply", x=x, y=y)[0]


def double(x: Tensor) -> Tensor:
    """Twice a tensor.

    Parameters
    ----------
    x : torch.Tensor
        As those of `multiply`.

    Returns
    -------
    torch.Tensor
        As from `multiply`.

    Raises
    ------
    TypeError, ValueError
        As `multiply`.
    """
    return _call("double", x=x)[0]


def add_sub(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and the difference of two tensors, which are read once for both.

    Parameters
    ----------
    x, y : torch.Tensor
        As those of `multiply`.

    Returns
    -------
    tuple of torch.Tensor
        ``x + y`` and ``x - y``, each as from `multiply`.

    Raises
    ------
    TypeError, ValueError
        As `multiply`.
    """
    total, difference = _call("add_sub", x=x, y=y)
    return total, difference


def multiply_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """``x * y + z``, in one pass.

    Parameters
    ----------
    x, y, z : torch.Tensor
        As those of `multiply`.

    Returns
    -------
    torch.Tensor
        As from `multiply`.

    Raises
    ------
    TypeError, ValueError
        As `multiply`.
    """
    return _call("multiply_add", x=x, y=y, z=z)[0]


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``, in one pass.

    Parameters
    ----------
    x : torch.Tensor
        As those of `multiply`.

    Returns
    -------
    torch.Tensor
        As from `multiply`.

    Raises
    ------
    TypeError, ValueError
        As `multiply`.
    """
    return _call("silu", x=x)[0]


def add_add_multiply(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """``(x + y + z) * w``, in one pass.

    Parameters
    ----------
    x, y, z, w : torch.Tensor
        As those of `multiply`.

    Returns
    -------
    torch.Tensor
        As from `multiply`.

    Raises
    ------
    TypeError, ValueError
        As `multiply`.
    """
    return _call("add_add_multiply", x=x, y=y, z=z, w=w)[0]


def exp(x: Tensor) -> Tensor:
    """The exponential of every element.

    Parameters
    ----------
    x : torch.Tensor
        As those of `multiply`.

    Returns
    -------
    torch.Tensor
        As from `multiply`.

    Raises
    ------
    TypeError, ValueError
        As `multiply`.
    """
    return _call("exp", x=x)[0]


# The cards -----------------------------------------------------------------------------------------------------------


def _twice(x: Tensor) -> Tensor:
    return x + x


def _operand(rng: torch.Generator, dtype: torch.dtype, M: int, N: int, how: str) -> Tensor:
    """A matrix, one that lies across, a row or a column."""
    if how == "transposed":
        return rough(rng, (N, M), dtype).mT
    return rough(rng, {"matrix": (M, N), "row": (1, N), "column": (M, 1)}[how], dtype)


def _make_one(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int) -> tuple[Tensor, ...]:
    return (rough(rng, (M, N), dtype),)


def _make_exponents(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int) -> tuple[Tensor, ...]:
    # A 16th, so that float16 holds the results.
    return (rough(rng, (M, N), dtype) / 16,)


def _make_two(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int, y: str) -> tuple[Tensor, ...]:
    return rough(rng, (M, N), dtype), _operand(rng, dtype, M, N, y)


def _make_three(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int, y: str) -> tuple[Tensor, ...]:
    return rough(rng, (M, N), dtype), *(_operand(rng, dtype, M, N, y) for _ in range(2))


def _make_four(rng: torch.Generator, dtype: torch.dtype, *, M: int, N: int, y: str) -> tuple[Tensor, ...]:
    return rough(rng, (M, N), dtype), *(_operand(rng, dtype, M, N, y) for _ in range(3))


def _bytes(itemsize: int, M: int, N: int, y: str, others: int, read: int, write: int, flop: int) -> Cost:
    """`others` operands are of the shape that `y` names, x is a matrix; so many reads and writes of matrices beyond."""
    least = {"row": N, "column": M}.get(y, M * N)
    return Cost((read * M * N + others * least) * itemsize, write * M * N * itemsize, flop * M * N)


def _cost_one(itemsize: int, *, M: int, N: int) -> Cost:
    return _bytes(itemsize, M, N, "", 0, 1, 1, 1)


def _cost_silu(itemsize: int, *, M: int, N: int) -> Cost:
    return _bytes(itemsize, M, N, "", 0, 1, 1, 4)


def _cost_silu_eager(itemsize: int, *, M: int, N: int) -> Cost:
    return _bytes(itemsize, M, N, "", 0, 3, 2, 4)


def _cost_two(itemsize: int, *, M: int, N: int, y: str) -> Cost:
    return _bytes(itemsize, M, N, y, 1, 1, 1, 1)


def _cost_add_sub(itemsize: int, *, M: int, N: int, y: str) -> Cost:
    return _bytes(itemsize, M, N, y, 1, 1, 2, 2)


def _cost_add_sub_eager(itemsize: int, *, M: int, N: int, y: str) -> Cost:
    return _bytes(itemsize, M, N, y, 2, 2, 2, 2)


def _cost_three(itemsize: int, *, M: int, N: int, y: str) -> Cost:
    return _bytes(itemsize, M, N, y, 2, 1, 1, 2)


def _cost_three_eager(itemsize: int, *, M: int, N: int, y: str) -> Cost:
    return _bytes(itemsize, M, N, y, 2, 2, 2, 2)


def _cost_four(itemsize: int, *, M: int, N: int, y: str) -> Cost:
    return _bytes(itemsize, M, N, y, 3, 1, 1, 3)


def _cost_four_eager(itemsize: int, *, M: int, N: int, y: str) -> Cost:
    return _bytes(itemsize, M, N, y, 3, 3, 3, 3)


@functools.cache
def _compiled(function: Any) -> Any:
    # The default mode, for one shape at a time: what a reader gets from the decorator alone, at its best.
    return torch.compile(function, dynamic=False)


def _torch_compile(function: Any) -> Variant:
    return Variant(lambda *operands: _compiled(function)(*operands), recompiles=True)


#: The bodies of CUDA C kernels that say the same, for element i of n.
_CUDA_BODIES = {
    "multiply": "out[i] = x[i] * y[i];",
    "double": "out[i] = 2 * x[i];",
    "add_sub": "out[i] = x[i] + y[i]; also[i] = x[i] - y[i];",
    "multiply_add": "out[i] = x[i] * y[i] + z[i];",
    "exp": "out[i] = expf(x[i]);",
}


def cuda_source(name: str) -> str:
    """The expression in CUDA C, for float32: a thread for each element.

    Parameters
    ----------
    name : str
        ``multiply``, ``double``, ``add_sub``, ``multiply_add`` or ``exp``.

    Returns
    -------
    str
    """
    body = _CUDA_BODIES[name]
    outs = [p for p in ("out", "also") if f"{p}[" in body]
    ins = [p for p in ("x", "y", "z") if f"{p}[i]" in body]
    pointers = ", ".join([f"float* {p}" for p in outs] + [f"const float* {p}" for p in ins])
    statements = body.replace("; ", ";\n        ")
    return f"""\
extern "C" __global__
void {name}_kernel({pointers}, long long n)
{{
    long long i = (long long) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {{
        {statements}
    }}
}}
"""


@functools.cache
def _cuda_kernel(name: str, options: tuple[str, ...] = ()) -> Any:
    import cupy

    return cupy.RawKernel(cuda_source(name), f"{name}_kernel", options=options)


def _cuda_c(name: str, results: int = 1, options: tuple[str, ...] = ()) -> Variant:
    """CUDA C by way of CuPy, on torch's memory and torch's stream."""

    def run(*operands: Tensor) -> Any:
        import cupy
        import numpy as np

        x = operands[0]
        if x.dtype != torch.float32:
            raise NotImplementedError(f"written for float32, got {x.dtype}")
        if any(t.shape != x.shape or not t.is_contiguous() for t in operands):
            raise NotImplementedError("written for contiguous operands of one shape")
        outs = [torch.empty_like(x) for _ in range(results)]
        n = x.numel()
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            arguments = [np.uint64(t.data_ptr()) for t in (*outs, *operands)]
            _cuda_kernel(name, options)((triton.cdiv(n, 512),), (512,), (*arguments, np.int64(n)))
        return outs[0] if results == 1 else tuple(outs)

    return Variant(run, needs=("cuda", "cupy"))


def _onnx_model(chain: Sequence[tuple[str, str, str]], operands: str, dtype: torch.dtype) -> Any:
    """A chain of operators; each names its kind, its operands and its result. The last one's is ``out``."""
    from onnx import TensorProto, helper

    kinds = {
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.bfloat16: TensorProto.BFLOAT16,
        torch.float64: TensorProto.DOUBLE,
    }
    kind = kinds[dtype]
    nodes = [helper.make_node(op, names.split(), [result]) for op, names, result in chain]
    inputs = [helper.make_tensor_value_info(name, kind, [f"{name}M", f"{name}N"]) for name in operands.split()]
    output = helper.make_tensor_value_info("out", kind, ["M", "N"])
    graph = helper.make_graph(nodes, "chain", inputs, [output])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


_CHAINS = {
    "multiply_add": ("x y z", (("Mul", "x y", "product"), ("Add", "product z", "out"))),
    "silu": ("x", (("Sigmoid", "x", "gate"), ("Mul", "x gate", "out"))),
    "add_add_multiply": ("x y z w", (("Add", "x y", "two"), ("Add", "two z", "three"), ("Mul", "three w", "out"))),
}


def _onnx(name: str, cost: Any) -> Variant:
    def prepare(*operands: Tensor) -> tuple[Any]:
        from fusebook.onnx import Graph

        names, chain = _CHAINS[name]
        shape = torch.broadcast_shapes(*(t.shape for t in operands))
        if 0 in shape:
            raise NotImplementedError(f"an output without elements has no memory to bind, got shape {tuple(shape)}")
        if not all(t.is_contiguous() for t in operands):
            raise NotImplementedError("memory is bound as it lies, so operands must be contiguous")
        graph = Graph(_onnx_model(chain, names, operands[0].dtype), device=operands[0].device)
        out = operands[0].new_empty(shape)
        return (graph.bind(dict(zip(names.split(), operands, strict=True)), {"out": out}),)

    return Variant(
        lambda bound: bound()["out"], cost=cost, needs=("cuda", "onnxruntime", "onnx"), prepare=prepare
    )  # fmt: skip


def _of(M: int, N: int) -> dict[str, int]:
    return {"M": M, "N": N}


def _with(M: int, N: int, y: str = "matrix") -> dict[str, int | str]:
    return {"M": M, "N": N, "y": y}


# Small are those of the manuals of 2012: matrices of 20 x 10, and 480 x 480 = 10 * 30 * 768 numbers. Of the large ones,
# float32 moves 256 MiB at least, for which the roof is that of memory.
_SMALL = ((20, 10), (480, 480))
_LARGE = ((2048, 8192), (4096, 8192), (8192, 8192))
_ONE = {
    "small": [_of(*s) for s in _SMALL],
    "large": [_of(*s) for s in _LARGE],
}
_SEVERAL: dict[str, list[dict[str, int | str]]] = {
    "small": [_with(*s) for s in _SMALL],
    "large": [_with(*s) for s in _LARGE],
    "shapes": [_with(8192, 8192, how) for how in ("row", "column", "transposed")],
}
# All have the same kernels: three of them are tried in every type, the others in two.
_TWO_TYPES = (torch.float32, torch.bfloat16)
_ONE_EDGES = (_of(3, 781), _of(0, 5))
_SEVERAL_EDGES = (_with(3, 781), _with(0, 5), _with(37, 50, "row"), _with(70, 45, "transposed"))

MULTIPLY = Op(
    name="multiply",
    reference=torch.mul,
    make=_make_two,
    cost=_cost_two,
    variants={
        "eager": Variant(torch.mul, needs=()),
        "CUDA C": _cuda_c("multiply"),
        "fusebook": Variant(multiply, needs=()),
    },
    configs=_SEVERAL,
    edges=(*_SEVERAL_EDGES, _with(1, 1), _with(37, 50, "column")),
)

DOUBLE = Op(
    name="double",
    reference=_twice,
    make=_make_one,
    cost=_cost_one,
    variants={
        "eager": Variant(lambda x: 2 * x, needs=()),
        "CUDA C": _cuda_c("double"),
        "fusebook": Variant(double, needs=()),
    },
    configs=_ONE,
    edges=(*_ONE_EDGES, _of(1, 1)),
    dtypes=_TWO_TYPES,
)

ADD_SUB = Op(
    name="add_sub",
    reference=add_sub_eager,
    make=_make_two,
    cost=_cost_add_sub,
    variants={
        "eager": Variant(add_sub_eager, cost=_cost_add_sub_eager, needs=()),
        "torch.compile": _torch_compile(add_sub_eager),
        "CUDA C": _cuda_c("add_sub", results=2),
        "fusebook": Variant(add_sub, needs=()),
    },
    configs=_SEVERAL,
    edges=_SEVERAL_EDGES,
    dtypes=_TWO_TYPES,
)

MULTIPLY_ADD = Op(
    name="multiply_add",
    reference=multiply_add_eager,
    make=_make_three,
    cost=_cost_three,
    variants={
        "eager": Variant(multiply_add_eager, cost=_cost_three_eager, needs=()),
        "torch": Variant(lambda x, y, z: torch.addcmul(z, x, y), needs=()),
        "torch.compile": _torch_compile(multiply_add_eager),
        "ONNX Runtime": _onnx("multiply_add", _cost_three_eager),
        "CUDA C": _cuda_c("multiply_add"),
        "fusebook": Variant(multiply_add, needs=()),
    },
    configs=_SEVERAL,
    edges=_SEVERAL_EDGES,
    dtypes=_TWO_TYPES,
)

SILU = Op(
    name="silu",
    reference=silu_eager,
    make=_make_one,
    cost=_cost_silu,
    variants={
        "eager": Variant(silu_eager, cost=_cost_silu_eager, needs=()),
        "torch": Variant(torch.nn.functional.silu, needs=()),
        "torch.compile": _torch_compile(silu_eager),
        "ONNX Runtime": _onnx("silu", None),
        "fusebook": Variant(silu, needs=()),
    },
    configs=_ONE,
    edges=_ONE_EDGES,
)

ADD_ADD_MULTIPLY = Op(
    name="add_add_multiply",
    reference=add_add_multiply_eager,
    make=_make_four,
    cost=_cost_four,
    variants={
        "eager": Variant(add_add_multiply_eager, cost=_cost_four_eager, needs=()),
        "torch.compile": _torch_compile(add_add_multiply_eager),
        "ONNX Runtime": _onnx("add_add_multiply", _cost_four_eager),
        "fusebook": Variant(add_add_multiply, needs=()),
    },
    configs=_SEVERAL,
    edges=_SEVERAL_EDGES,
    dtypes=_TWO_TYPES,
)

EXP = Op(
    name="exp",
    reference=torch.exp,
    make=_make_exponents,
    cost=_cost_one,
    variants={
        "eager": Variant(torch.exp, needs=()),
        "CUDA C": _cuda_c("exp"),
        "CUDA C, fast math": _cuda_c("exp", options=("--use_fast_math",)),
        "fusebook": Variant(exp, needs=()),
    },
    configs=_ONE,
    edges=_ONE_EDGES,
)

OPS = (MULTIPLY, DOUBLE, ADD_SUB, MULTIPLY_ADD, SILU, ADD_ADD_MULTIPLY, EXP)
