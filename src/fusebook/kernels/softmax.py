# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/softmax.py. It needs torch, Triton, NumPy, _call.py and _rows.py.
"""Softmax along one axis and its gradient: every row is read once and written once.

For a row of N elements,

    y[i] = exp(x[i] - max_j x[j]) / sum_k exp(x[k] - max_j x[j])
    dx[i] = y[i] * (dy[i] - sum_k y[k] dy[k])

Fused: the maximum, the subtraction, the exponential, the sum and the division; in the gradient the product, the sum,
the difference and the second product. For M rows, a chain of separate operations reads 5MN + 2M elements and writes 3MN
+ 2M, and its gradient reads 6MN + M and writes 3MN + M. The fused kernels read MN and 2MN, and write MN.

A row of up to some 128 KiB is held in the registers of one program. A wider row is shared by several programs, see
`_rows`. Limits: float64 rows wider than that, and rows of more than 2**20 elements, are computed by torch. A tensor of
an unusual layout is copied first.
"""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._call import INTERPRETED, Operator, apply, contiguous, launch, shapes, wide
from ._call import accumulated as accumulated_in
from ._rows import (
    INTERPRETER,
    NEUTRAL_MAX_SUM,
    NEUTRAL_SUM,
    WIDEST,
    Config,
    Parts,
    accumulated,
    across_constants,
    alignment,
    batched,
    checked_axis,
    copy_strided,
    fast_exp,
    finite_or_zero,
    first_missing,
    first_that_fits,
    layout_of,
    load_row,
    load_row_part,
    merge_max_sum,
    merge_sum,
    opaque_zero,
    pack,
    publish,
    reconvert,
    row_constants,
    row_max,
    row_offset,
    row_vectors,
    rows_of_program,
    shared,
    store_chunk,
    store_row_part,
    vector_width,
    wait_for,
    with_adjacent_elements,
    workspace,
)

__all__ = ["softmax", "softmax_backward", "softmax_backward_eager", "softmax_eager"]

# The unfused chains --------------------------------------------------------------------------------------------------


def softmax_eager(x: Tensor) -> Tensor:
    """Softmax over the last axis, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        M rows of N elements.

    Returns
    -------
    torch.Tensor
        Of the shape and dtype of `x`.
    """
    top = x.amax(-1, keepdim=True)  # read MN, write M
    shifted = x - top  # read MN + M, write MN
    e = shifted.exp()  # read MN, write MN
    total = e.sum(-1, keepdim=True)  # read MN, write M
    return e / total  # read MN + M, write MN: in all read 5MN + 2M, write 3MN + 2M


def softmax_backward_eager(y: Tensor, dy: Tensor) -> Tensor:
    """The gradient of softmax over the last axis, one operation after another: what fusing saves.

    Parameters
    ----------
    y, dy : torch.Tensor
        M rows of N elements.

    Returns
    -------
    torch.Tensor
        Of the shape and dtype of `y`.
    """
    product = y * dy  # read 2MN, write MN
    dot = product.sum(-1, keepdim=True)  # read MN, write M
    centred = dy - dot  # read MN + M, write MN
    return y * centred  # read 2MN, write MN: in all read 6MN + M, write 3MN + M


# Softmax -------------------------------------------------------------------------------------------------------------


@triton.jit
def _softmax_rows(
    y_ptr, x_ptr, INNER, N, y_strides, x_strides, ALIGN: tl.constexpr, FLAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """ROWS rows, held in registers as CHUNKS tiles of BLOCK columns."""
    N = N * ALIGN
    outer, inner, live = rows_of_program(INNER, ROWS, FLAT)
    x_ptr += row_offset(outer, inner, x_strides, ALIGN)  # [ROWS, 1]
    y_ptr += row_offset(outer, inner, y_strides, ALIGN)
    x = load_row(x_ptr, x_strides[2], N, live, float("-inf"), BLOCK, CHUNKS)  # read MN
    # Without its maximum, exp overflows from 89 on in float32. A row that is all -inf becomes NaN, as it should.
    top = row_max(x, CHUNKS)  # [ROWS, 1]
    totals = tl.zeros([ROWS, BLOCK], top.dtype)
    for i in tl.static_range(CHUNKS):
        totals += fast_exp(accumulated(x[i]) - top)
    scale = 1 / tl.sum(totals, 1)[:, None]  # [ROWS, 1]: one division a row, not one an element
    for i in tl.static_range(CHUNKS):
        y = fast_exp(accumulated(x[i]) - top) * scale  # the exponential of before: the compiler keeps it
        store_chunk(y_ptr, y, i, y_strides[2], N, live, BLOCK, CHUNKS)  # write MN


@triton.jit
def _softmax_part(x_ptr, begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """The elements of a part [BLOCK]; its maximum and sum of exponentials, packed into a word."""
    at, low, high = row_vectors(begin, N, part * SPAN, SPAN, VEC)
    x = load_row_part(x_ptr + at, low, high, float("-inf"), VEC, BLOCK)  # read MN
    top = tl.max(accumulated(x), 0)
    e = fast_exp(reconvert(x, opaque_zero(N, top)) - finite_or_zero(top))
    return x, pack(top, tl.sum(e, 0))


@triton.jit(do_not_specialize=["INNER", "SPAN", "PARTS"])
def _softmax_shared(
    y_ptr, x_ptr, workspace_ptr, INNER, N, y_strides, x_strides, SPAN, PARTS,
    VEC: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """A row shared by PARTS programs, each of which holds SPAN vectors."""
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    outer, inner = (row // INNER).to(tl.int64), (row % INNER).to(tl.int64)
    begin = row_offset(outer, inner, x_strides)
    SPAN = SPAN * VEC
    x, word = _softmax_part(x_ptr, begin, N, part, SPAN, VEC, BLOCK)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the workspace's zeros; the part is already here
    workspace_ptr += row.to(tl.int64) * PARTS
    publish(workspace_ptr + part, word)
    lanes = tl.arange(0, LANES)  # [LANES]
    words, missing = wait_for(workspace_ptr, lanes, PARTS, NEUTRAL_MAX_SUM, TRIES)
    if missing < LANES:
        while missing < LANES:
            _, word = _softmax_part(x_ptr, begin, N, missing, SPAN, VEC, BLOCK)
            publish(workspace_ptr + missing, word)
            words = tl.where(lanes == missing, word, words)
            missing = first_missing(words, lanes)
        # Load its own part again, so that the loop does not keep it in registers. The index adds missing - LANES,
        # which is 0 here: without it the compiler would keep the part.
        x, _ = _softmax_part(x_ptr, begin, N, part + missing - LANES, SPAN, VEC, BLOCK)
    top, total = merge_max_sum(words)
    scale = 1 / total
    # fp16 and bf16 were held packed: their exponentials are computed once more.
    y = fast_exp(reconvert(x, opaque_zero(N, scale)) - top) * scale
    y_at, _, _ = row_vectors(row_offset(outer, inner, y_strides), N, part * SPAN, SPAN, VEC)
    _, low, high = row_vectors(begin, N, part * SPAN, SPAN, VEC)
    store_row_part(y_ptr + y_at, y, tl.arange(0, BLOCK), low, high, VEC)  # write MN


# Its gradient --------------------------------------------------------------------------------------------------------


@triton.jit
def _softmax_backward_rows(
    dx_ptr, y_ptr, dy_ptr, INNER, N, y_strides, dy_strides, ALIGN: tl.constexpr, FLAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The gradient of ROWS rows; y and dy are held in registers. dx has the layout of y."""
    N = N * ALIGN
    outer, inner, live = rows_of_program(INNER, ROWS, FLAT)
    at = row_offset(outer, inner, y_strides, ALIGN)  # [ROWS, 1]
    dy_ptr += row_offset(outer, inner, dy_strides, ALIGN)
    y = load_row(y_ptr + at, y_strides[2], N, live, 0.0, BLOCK, CHUNKS)  # read MN
    dy = load_row(dy_ptr, dy_strides[2], N, live, 0.0, BLOCK, CHUNKS)  # read MN
    dots = accumulated(y[0]) * accumulated(dy[0])
    for i in tl.static_range(1, CHUNKS):
        dots += accumulated(y[i]) * accumulated(dy[i])
    dot = tl.sum(dots, 1)[:, None]  # [ROWS, 1]
    for i in tl.static_range(CHUNKS):
        dx = accumulated(y[i]) * (accumulated(dy[i]) - dot)
        store_chunk(dx_ptr + at, dx, i, y_strides[2], N, live, BLOCK, CHUNKS)  # write MN


@triton.jit
def _backward_part(
    y_ptr, dy_ptr, y_begin, dy_begin, N, part, SPAN, VEC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y and dy of a part [BLOCK]; the sum of their products, as a word."""
    y_at, low, high = row_vectors(y_begin, N, part * SPAN, SPAN, VEC)
    dy_at, _, _ = row_vectors(dy_begin, N, part * SPAN, SPAN, VEC)
    y = load_row_part(y_ptr + y_at, low, high, 0.0, VEC, BLOCK)  # read MN
    dy = load_row_part(dy_ptr + dy_at, low, high, 0.0, VEC, BLOCK)  # read MN
    dot = tl.sum(accumulated(y) * accumulated(dy), 0)
    return y, dy, pack(dot, tl.zeros([], tl.float32))


@triton.jit(do_not_specialize=["INNER", "SPAN", "PARTS"])
def _softmax_backward_shared(
    dx_ptr, y_ptr, dy_ptr, workspace_ptr, INNER, N, y_strides, dy_strides, SPAN, PARTS,
    VEC: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """The gradient of a row shared by PARTS programs, each of which holds SPAN vectors."""
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    outer, inner = (row // INNER).to(tl.int64), (row % INNER).to(tl.int64)
    y_begin = row_offset(outer, inner, y_strides)
    dy_begin = row_offset(outer, inner, dy_strides)
    SPAN = SPAN * VEC
    y, dy, word = _backward_part(y_ptr, dy_ptr, y_begin, dy_begin, N, part, SPAN, VEC, BLOCK)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the workspace's zeros; the part is already here
    workspace_ptr += row.to(tl.int64) * PARTS
    publish(workspace_ptr + part, word)
    lanes = tl.arange(0, LANES)  # [LANES]
    words, missing = wait_for(workspace_ptr, lanes, PARTS, NEUTRAL_SUM, TRIES)
    if missing < LANES:
        while missing < LANES:
            _, _, word = _backward_part(y_ptr, dy_ptr, y_begin, dy_begin, N, missing, SPAN, VEC, BLOCK)
            publish(workspace_ptr + missing, word)
            words = tl.where(lanes == missing, word, words)
            missing = first_missing(words, lanes)
        # Load its own part again, so that the loop does not keep it in registers. The index adds missing - LANES,
        # which is 0 here: without it the compiler would keep the part.
        part += missing - LANES
        y, dy, _ = _backward_part(y_ptr, dy_ptr, y_begin, dy_begin, N, part, SPAN, VEC, BLOCK)
    dot = merge_sum(words)
    zero = opaque_zero(N, dot)
    dx = reconvert(y, zero) * (reconvert(dy, zero) - dot)
    at, low, high = row_vectors(y_begin, N, part * SPAN, SPAN, VEC)
    store_row_part(dx_ptr + at, dx, tl.arange(0, BLOCK), low, high, VEC)  # write MN


# Launch configs and launchers ----------------------------------------------------------------------------------------


class _Family(NamedTuple):
    """The kernels of an operator, its tables by element size, and what computes the rows that these leave out."""

    rows: Any
    shared: Any
    configs: Mapping[int, Sequence[Config]]
    parts: Mapping[int, Sequence[Parts]]
    unaligned: int  # fp16 and bf16 rows wider than this, in bytes, are shared if they begin at odd elements
    library: Callable[..., None]


def _launch(family: _Family, out: Tensor, *given: Any) -> None:
    """Fill `out`, given tensors and an axis. All are contiguous but the last tensor, which may have any layout."""
    *dense, x, dim = given
    layout = layout_of(dim, out, x)
    if layout is None:
        x = contiguous(x)
        layout = layout_of(dim, out, x)
        assert layout is not None
    (outer, inner, n), strides = layout
    size = x.element_size()
    align = alignment(layout, out, *dense, x)
    config = INTERPRETER if INTERPRETED else first_that_fits(family.configs, n, size)
    parts = first_that_fits(family.parts, n, size)
    if align * size < 4 and n * size > family.unaligned and not INTERPRETED:
        config = None  # single elements of 2 bytes are loaded slowly; parts are loaded by whole vectors
    if n > WIDEST or (config is None and parts is None):
        apply(family.library, out, *dense, x, dim)
        return
    constants: dict[str, Any] | None
    if not layout.along:
        constants = across_constants(layout, (len(dense) + 1) * size, INTERPRETED)
        if constants is None:
            _launch_transposed(family, out, (*dense, x), dim)
            return
    elif config is not None:
        constants = row_constants(config, n, inner)
    else:
        share = shared(parts, n, size, vector_width(layout, out, *dense, x))
        programs = outer * inner * share.parts
        words, late = workspace(programs, x.device)
        launch(
            family.shared, (programs,), out, *dense, x, words, inner, n, *strides, share.span, share.parts,
            **share.constants, **late,
        )  # fmt: skip
        return
    units = [(a // align, b // align, step) for a, b, step in strides]
    grid = (outer * triton.cdiv(inner, constants["ROWS"]),)
    launch(family.rows, grid, out, *dense, x, inner, n // align, *units, ALIGN=align, FLAT=outer == 1, **constants)


def _launch_transposed(family: _Family, out: Tensor, ins: tuple[Tensor, ...], dim: int) -> None:
    """Copy wide rows so that their elements are adjacent, and results back: less work than wide tiles across."""
    moved = (t.movedim(dim, -1) for t in ins)
    ins = tuple(t if t.stride(-1) == 1 else with_adjacent_elements(t) for t in moved)
    target = out.movedim(dim, -1)
    found = target if target.stride(-1) == 1 else out.new_empty(target.shape)
    _launch(family, found, *ins, target.dim() - 1)
    if found is not target:
        copy_strided(target, found)


def _torch_softmax(y: Tensor, x: Tensor, dim: int) -> None:
    torch.softmax(x, dim, out=y)


def _torch_softmax_backward(dx: Tensor, y: Tensor, dy: Tensor, dim: int) -> None:
    torch.ops.aten._softmax_backward_data.out(dy, y, dim, y.dtype, grad_input=dx)


# For each element size, the first line whose limit holds a row. Measured on an H100.
_SOFTMAX = _Family(
    _softmax_rows,
    _softmax_shared,
    {  # bytes of a row, columns of a chunk, warps, elements of a program
        2: (
            Config(16, 8, 4, 512), Config(1024, 512, 1, 1024), Config(4096, 512, 1), Config(16384, 1024, 4),
            Config(49152, 2048, 8), Config(65536, 2048, 16),
        ),
        4: (
            Config(32, 8, 4, 512), Config(2048, 512, 1, 512), Config(4096, 1024, 4), Config(8192, 512, 4),
            Config(32768, 1024, 4), Config(131072, 2048, 16),
        ),
        8: (Config(2048, 256, 1, 256), Config(16384, 2048, 4), Config(32768, 512, 8), Config(131072, 1024, 16)),
    },
    {  # bytes of a row, columns of a part, warps, registers of a thread
        2: (Parts(131072, 4096, 2, 96), Parts(2**21, 8192, 4, 96)),
        4: (Parts(2**22, 4096, 4, 80),),
        8: (),
    },
    40960,
    _torch_softmax,
)  # fmt: skip
_BACKWARD = _Family(
    _softmax_backward_rows,
    _softmax_backward_shared,
    {
        2: (
            Config(16, 8, 4, 512), Config(1024, 512, 4, 1024), Config(4096, 512, 1), Config(16384, 1024, 4),
            Config(57344, 2048, 8),
        ),
        4: (
            Config(32, 8, 4, 512), Config(2048, 512, 1, 512), Config(16384, 1024, 4), Config(32768, 1024, 8),
            Config(65536, 2048, 16), Config(98304, 4096, 32),
        ),
        8: (Config(2048, 256, 1, 256), Config(16384, 2048, 4), Config(32768, 512, 8), Config(65536, 1024, 16)),
    },
    {
        2: (Parts(2**21, 4096, 4, 56),),
        4: (Parts(2**22, 2048, 4, 56),),
        8: (),
    },
    24576,
    _torch_softmax_backward,
)  # fmt: skip


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dim = inputs[1]


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    return _softmax_backward.call(y, dy, ctx.dim), None


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, dy, dim = inputs
    ctx.save_for_backward(y, dy)
    ctx.dim = dim


def _second_gradient(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
    """The gradient of dx = y (dy - sum(y dy)): for y in separate operations, for dy fused."""
    y, dy = ctx.saved_tensors
    if y.dim() == 0:
        return torch.zeros_like(y), torch.zeros_like(dy), None
    wide = accumulated_in(y.dtype)  # as in the kernels: both sums cancel
    wide_y, wide_dy, wide_g = y.to(wide), dy.to(wide), g.to(wide)
    dot = (wide_y * wide_dy).sum(ctx.dim, keepdim=True)
    for_y = wide_g * (wide_dy - dot) - wide_dy * (wide_y * wide_g).sum(ctx.dim, keepdim=True)
    return for_y.to(y.dtype), softmax_backward(y, g, ctx.dim), None


def _check_backward(y: Any, dy: Any, dim: Any) -> tuple[Tensor, Tensor, int]:
    y, dim = checked_axis("softmax_backward", "y", y, dim)
    shapes("softmax_backward", y=(y, "[...]"), dy=(dy, "[...]"))
    return y, dy, dim


_softmax: Operator = Operator(
    "softmax",
    "(Tensor x, SymInt dim) -> Tensor",
    check=lambda x, dim: checked_axis("softmax", "x", x, dim),
    outputs=lambda x, *_: x.new_empty(x.shape),
    into=lambda y, x, dim: _launch(_SOFTMAX, y, x, dim),
    gradient=(_gradient, _keep),
    batched=lambda *batch: batched(_softmax, *batch),
    traced=lambda x, dim: (x, dim + x.dim() if dim < 0 else dim),
    autocast=wide,
)

_softmax_backward: Operator = Operator(
    "softmax_backward",
    "(Tensor y, Tensor dy, SymInt dim) -> Tensor",
    check=_check_backward,
    outputs=lambda x, *_: x.new_empty(x.shape),
    into=lambda dx, y, dy, dim: _launch(_BACKWARD, dx, contiguous(y), dy, dim),
    gradient=(_second_gradient, _keep_backward),
    batched=lambda *batch: batched(_softmax_backward, *batch),
)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax along one axis, in one read and one write.

    Parameters
    ----------
    x : torch.Tensor
        float16, bfloat16, float32 or float64, of any shape and strides, on a CUDA device (or on the CPU where Triton
        interprets). Half types are computed in float32.
    dim : int, default -1
        The axis that is normalised.

    Returns
    -------
    torch.Tensor
        Contiguous, of the shape, dtype and device of `x`. Each row along `dim` sums to one; a row that holds NaN or
        +inf, or nothing but -inf, is NaN, as in `torch.softmax`.

    Raises
    ------
    TypeError
        If `x` is no dense floating-point tensor or `dim` no integer.
    IndexError
        If `x` has no axis `dim`.
    ValueError
        If `x` is on the CPU and Triton compiles, or a view that negates.

    Notes
    -----
    Differentiable, twice as well; works under `torch.compile` and `torch.vmap`.

    Examples
    --------
    >>> import fusebook, torch
    >>> y = fusebook.softmax(torch.randn(3, 5, device="cuda"), dim=-1)  # doctest: +SKIP
    """
    return _softmax.call(x, dim)


def softmax_backward(y: Tensor, dy: Tensor, dim: int = -1) -> Tensor:
    """Gradient of softmax along one axis, in two reads and one write.

    Parameters
    ----------
    y : torch.Tensor
        What `softmax` returned.
    dy : torch.Tensor
        The gradient with respect to `y`, of its shape and dtype.
    dim : int, default -1
        The axis that was normalised.

    Returns
    -------
    torch.Tensor
        The gradient with respect to the input of softmax; contiguous, of the shape and dtype of `y`.

    Raises
    ------
    TypeError
        If `y` or `dy` is no dense floating-point tensor, their dtypes differ, or `dim` is no integer.
    IndexError
        If `y` has no axis `dim`.
    ValueError
        If shapes or devices differ, or the tensors are on the CPU and Triton compiles, or views that negate.
    """
    return _softmax_backward(y, dy, dim)
