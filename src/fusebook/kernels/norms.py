"""Norms of rows: RMSNorm and LayerNorm, with a residual added before and a quantised result, in one pass.

For a row of N elements x (of which a residual may be a part: x = x + residual),

    rms_norm:    y[i] = x[i] / sqrt(mean_j x[j]**2 + eps) * weight[i] + bias[i]
    layer_norm:  y[i] = (x[i] - mean_j x[j]) / sqrt(mean_j (x[j] - mean)**2 + eps) * weight[i] + bias[i]

Fused: the sum with the residual, the statistics of the row, the division, weight and bias, and, where the result is
asked for in eight bits, the row's largest magnitude and the rounding. A row is read once and written once; the sum with
the residual, which the next layer needs, is written too. The gradients are in `norms_backward`.

A row of up to 32768 numbers stays in the registers of one program between its load and its store. A wider one is
shared by several programs, each of which holds a part of it, and tells the others what it found.

Limits: a wide row whose result is quantised is read three times, by one program, and so is a row for which the GPU has
no room. Tensors whose rows do not lie one behind the other at equal distances, each without gaps, are copied first.
"""

# Device code grows tuples of tiles; mypy sees a tuple of another length as another type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._operator import (
    Operator,
    accumulated,
    check_alike,
    check_device,
    check_tensor,
    contiguous,
    empty,
    gpu,
    launch,
    overlapping,
)
from ._rows import leave, missing_of, tile_of, words_of
from ._tl import fill

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "layer_norm_eager", "rms_norm", "rms_norm_eager"]

# The unfused chains --------------------------------------------------------------------------------------------------


def rms_norm_eager(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last axis, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        M rows of N elements.
    weight : torch.Tensor
        N elements.
    eps : float

    Returns
    -------
    torch.Tensor
        Of the shape of `x`.
    """
    wide = x.to(accumulated(x.dtype))  # half types: read MN, write 2MN, and all below counts twice
    squares = wide * wide  # read MN, write MN
    mean = squares.mean(-1, keepdim=True)  # read MN, write M
    normed = wide * torch.rsqrt(mean + eps)  # read MN + M, write MN
    return normed.to(x.dtype) * weight  # read MN + N, write MN


def layer_norm_eager(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last axis, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        M rows of N elements.
    weight, bias : torch.Tensor
        N elements.
    eps : float

    Returns
    -------
    torch.Tensor
        Of the shape of `x`.
    """
    wide = x.to(accumulated(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return (centred * torch.rsqrt(variance + eps)).to(x.dtype) * weight + bias


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _row(x_ptr, r_ptr, at_x, at_r, inside):
    """Numbers of x, the residual's added to them and rounded, as they are stored for the next layer."""
    x = tl.load(x_ptr + at_x, mask=inside, other=0.0)
    if r_ptr is not None:
        FLOAT: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
        x = (x.to(FLOAT) + tl.load(r_ptr + at_r, mask=inside, other=0.0).to(FLOAT)).to(x.dtype)
    return x


@triton.jit
def loaded(ptr, columns, inside, OTHER: tl.constexpr):
    """A weight or a bias; OTHER everywhere where there is none."""
    if ptr is None:
        return tl.full(columns.shape, OTHER, tl.float32)
    elif inside is None:
        return tl.load(ptr + columns)
    else:
        return tl.load(ptr + columns, mask=inside, other=0.0)


@triton.jit
def _normed(x, mean, factor, w, b):
    """Weighted numbers of a row, in the precision of its statistics."""
    return (x.to(mean.dtype) - mean) * factor * w.to(mean.dtype) + b.to(mean.dtype)


@triton.jit
def _result(x, mean, factor, w_ptr, b_ptr, columns, inside):
    """The same, with weight and bias from memory."""
    return _normed(x, mean, factor, loaded(w_ptr, columns, inside, 1.0), loaded(b_ptr, columns, inside, 0.0))


@triton.jit
def _magnitude(y):
    """|y| as an integer: such integers are ordered as the numbers are, and NaN stands above all."""
    if y.dtype == tl.float64:
        return y.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(top, FLOAT: tl.constexpr, LIMIT: tl.constexpr):
    """The scale of rows whose largest magnitude is `top`; of zeros alone it is 1."""
    scale = top.to(FLOAT, bitcast=True) / LIMIT
    return tl.where(top == 0, 1.0, scale)


@triton.jit
def _quantised(y, scale, TYPE: tl.constexpr):
    y = y / scale
    if TYPE == tl.int8:  # to the nearest, the even one of two: the sum has no room for a fraction
        y = y.to(tl.float32) + 12582912.0 - 12582912.0
    return y.to(tl.float32).to(TYPE)


@triton.jit
def _norm_rows(
    y_ptr, sum_ptr, scale_ptr, x_ptr, r_ptr, w_ptr, b_ptr, M, N, x_stride, r_stride,
    ALIGN: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """ROWS rows in registers, as CHUNKS tiles of BLOCK columns, of which only the last is masked."""
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N * ALIGN
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    live = (rows < M)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    at_x = rows[:, None] * (x_stride * ALIGN)
    at_r = rows[:, None] * (r_stride * ALIGN)
    at_y = rows[:, None] * N

    chunks = ()
    totals = tl.zeros([ROWS, BLOCK], FLOAT)
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK + columns
        inside = live if i < CHUNKS - 1 else live & (at < N)
        x = _row(x_ptr, r_ptr, at_x + at, at_r + at, inside)  # [ROWS, BLOCK]; read MN, with a residual 2MN
        if r_ptr is not None:
            tl.store(sum_ptr + at_y + at, x, mask=inside)  # write MN
        chunks += (x,)
        x = x.to(FLOAT)
        totals += x if CENTRED else x * x
    total = tl.sum(totals, 1)[:, None]  # [ROWS, 1]
    mean = tl.zeros([ROWS, 1], FLOAT)
    if CENTRED:
        mean = total / N
        # Not the mean of squares less the square of the mean, which cancels where a row lies far from zero.
        totals = tl.zeros([ROWS, BLOCK], FLOAT)
        for i in tl.static_range(CHUNKS):
            x = chunks[i].to(FLOAT) - mean
            if i == CHUNKS - 1:
                x = tl.where(i * BLOCK + columns < N, x, 0.0)
            totals += x * x
        total = tl.sum(totals, 1)[:, None]
    factor = 1 / tl.sqrt(total / N + EPS)  # [ROWS, 1]
    if LIMIT > 0:
        tops = tl.zeros([ROWS, BLOCK], tl.int64 if FLOAT == tl.float64 else tl.int32)
        for i in tl.static_range(CHUNKS):
            at = i * BLOCK + columns
            y = _result(chunks[i], mean, factor, w_ptr, b_ptr, at, at < N)
            if i == CHUNKS - 1:
                y = tl.where(at < N, y, 0.0)
            tops = tl.maximum(tops, _magnitude(y))
        scale = _scale_of(tl.max(tops, 1)[:, None], FLOAT, LIMIT)  # [ROWS, 1]
        tl.store(scale_ptr + rows[:, None], scale, mask=live)  # write M
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK + columns
        inside = live if i < CHUNKS - 1 else live & (at < N)
        y = _result(chunks[i], mean, factor, w_ptr, b_ptr, at, None if i < CHUNKS - 1 else at < N)
        if LIMIT > 0:
            y = _quantised(y, scale, y_ptr.dtype.element_ty)
        tl.store(y_ptr + at_y + at, y.to(y_ptr.dtype.element_ty), mask=inside)  # write MN


@triton.jit
def _norm_looped(
    y_ptr, sum_ptr, scale_ptr, x_ptr, r_ptr, w_ptr, b_ptr, M, N, x_stride, r_stride,
    ALIGN: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of any width, read as often as it is needed."""
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    N = N.to(tl.int64) * ALIGN
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * (x_stride * ALIGN)
    y_ptr += row * N
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    if r_ptr is not None:
        r_ptr += row * (r_stride * ALIGN)
        sum_ptr += row * N
    count = tl.zeros([BLOCK], FLOAT)
    means = tl.zeros([BLOCK], FLOAT)
    totals = tl.zeros([BLOCK], FLOAT)
    for start in range(0, N, BLOCK):
        at = start + columns
        x = _row(x_ptr, r_ptr, at, at, at < N)
        if r_ptr is not None:
            tl.store(sum_ptr + at, x, mask=at < N)
        x = x.to(FLOAT)
        if CENTRED:  # each lane's mean and sum of squares around it, one number after another
            count += tl.where(at < N, 1.0, 0.0)
            away = tl.where(at < N, x - means, 0.0)
            means += away / tl.maximum(count, 1.0)
            totals += away * (x - means)
        else:
            totals += x * x
    mean = tl.zeros([1], FLOAT)
    total = tl.sum(totals, 0)
    if CENTRED:
        mean += tl.sum(means * count, 0) / N
        total += tl.sum(count * (means - mean) * (means - mean), 0)
    factor = 1 / tl.sqrt(total / N + EPS)
    scale = mean
    if LIMIT > 0:
        tops = tl.zeros([BLOCK], tl.int64 if FLOAT == tl.float64 else tl.int32)
        for start in range(0, N, BLOCK):
            at = start + columns
            y = _result(_row(x_ptr, r_ptr, at, at, at < N), mean, factor, w_ptr, b_ptr, at, at < N)
            tops = tl.maximum(tops, tl.where(at < N, _magnitude(y), 0))
        scale = _scale_of(tl.max(tops, 0), FLOAT, LIMIT)
        tl.store(scale_ptr + row, scale)
    for start in range(0, N, BLOCK):
        at = start + columns
        y = _result(_row(x_ptr, r_ptr, at, at, at < N), mean, factor, w_ptr, b_ptr, at, at < N)
        if LIMIT > 0:
            y = _quantised(y, scale, y_ptr.dtype.element_ty)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def word_of(number):
    """A number as a word that is not zero: -0.0 stands for 0.0."""
    if number.dtype == tl.float64:
        word = number.to(tl.int64, bitcast=True)
        return tl.where(word == 0, -9223372036854775808, word)
    word = number.to(tl.int32, bitcast=True)
    return tl.where(word == 0, -2147483648, word)


@triton.jit
def _part(x, own, count, CENTRED: tl.constexpr, FLOAT: tl.constexpr):
    """Of a part of a row: its sum and the squares around its mean; not centred, the sum of its squares twice."""
    x = x.to(FLOAT)
    if CENTRED:
        total = tl.sum(x, 0)
        x = tl.where(own, x - total / count, 0.0)
        return total, tl.sum(x * x, 0)
    total = tl.sum(x * x, 0)
    return total, total


@triton.jit
def _norm_shared(
    y_ptr, sum_ptr, x_ptr, r_ptr, w_ptr, b_ptr, board_ptr, M, N, x_stride, r_stride, GROUPS, SPAN, PARTS,
    ALIGN: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """Rows of any width, each by PARTS programs that hold up to SPAN of its numbers; GROUPS of them take all rows.

    A program loads its part of the next row before it waits for what the others found in this one.
    """
    FLOAT: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    NOTHING: tl.constexpr = -9223372036854775808 if FLOAT == tl.float64 else -2147483648  # -0.0
    WORDS: tl.constexpr = 2 if CENTRED else 1
    N = N * ALIGN
    part = tl.program_id(0) % PARTS
    group = tl.program_id(0) // PARTS
    lanes = tl.arange(0, LANES)  # [LANES]
    inner = tl.arange(0, BLOCK)  # [BLOCK]
    counts = tl.maximum(tl.minimum(N - (lanes // WORDS) * SPAN, SPAN), 0).to(FLOAT)  # [LANES]
    columns = part * SPAN + inner
    own = (inner < SPAN) & (columns < N)
    count = tl.minimum(N - part * SPAN, SPAN)
    row = group.to(tl.int64)
    x = _row(x_ptr, r_ptr, row * (x_stride * ALIGN) + columns, row * (r_stride * ALIGN) + columns, own)
    w = loaded(w_ptr, columns, own, 1.0)  # [BLOCK]
    b = loaded(b_ptr, columns, own, 0.0)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the zeros on the board; the first row is here already
    for _ in range(group, M, GROUPS):
        if r_ptr is not None:
            tl.store(sum_ptr + row * N + columns, x, mask=own)  # write MN
        total, squares = _part(x, own, count, CENTRED, FLOAT)
        following = row + GROUPS
        on = own & (columns < tl.where(following < M, N, 0))
        at_x = following * (x_stride * ALIGN) + columns
        ahead = _row(x_ptr, r_ptr, at_x, following * (r_stride * ALIGN) + columns, on)  # [BLOCK]; read MN
        at = board_ptr + row * (PARTS * WORDS)
        leave(at + part * WORDS, word_of(total))
        if CENTRED:
            leave(at + part * WORDS + 1, word_of(squares))
        words, missing = words_of(at, lanes, PARTS * WORDS, NOTHING, TRIES)
        if missing < LANES:
            # Nothing promises that the others run at the same time: what is missing is found by their own steps.
            while missing < LANES:
                other = missing // WORDS
                its = other * SPAN + inner
                there = (inner < SPAN) & (its < N)
                numbers = _row(x_ptr, r_ptr, row * (x_stride * ALIGN) + its, row * (r_stride * ALIGN) + its, there)
                total, squares = _part(numbers, there, tl.minimum(N - other * SPAN, SPAN), CENTRED, FLOAT)
                leave(at + other * WORDS, word_of(total))
                words = tl.where(lanes == other * WORDS, word_of(total), words)
                if CENTRED:
                    leave(at + other * WORDS + 1, word_of(squares))
                    words = tl.where(lanes == other * WORDS + 1, word_of(squares), words)
                missing = missing_of(words, lanes)
            # Its own numbers again, rather than held meanwhile.
            x = _row(x_ptr, r_ptr, row * (x_stride * ALIGN) + columns, row * (r_stride * ALIGN) + columns, own)
            ahead = _row(x_ptr, r_ptr, at_x, following * (r_stride * ALIGN) + columns, on)
        found = words.to(FLOAT, bitcast=True)  # [LANES]
        mean = tl.zeros([1], FLOAT)
        if CENTRED:
            totals, squared = tl.split(tl.reshape(found, [LANES // 2, 2]))  # [LANES / 2]
            numbers, _again = tl.split(tl.reshape(counts, [LANES // 2, 2]))
            mean += tl.sum(totals, 0) / N
            away = totals / tl.maximum(numbers, 1.0) - mean
            variance = tl.sum(squared + numbers * away * away, 0) / N
        else:
            variance = tl.sum(found, 0) / N
        y = _normed(x, mean, 1 / tl.sqrt(variance + EPS), w, b)
        tl.store(y_ptr + row * N + columns, y.to(y_ptr.dtype.element_ty), mask=own)  # write MN
        x = ahead
        row = following


# Plans ---------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How rows are launched: by which kernel, with which constants, by how many programs of how many warps."""

    kernel: str  # "rows", "shared" or "looped"
    constants: Mapping[str, int]
    programs: int
    warps: int
    span: int = 0  # columns of a part, where several programs share a row
    parts: int = 1  # programs that share a row


def norm_plan(
    rows: int, n: int, size: int, capability: tuple[int, int] | None, processors: int, quantised: bool
) -> Plan:
    """Choose the kernel and its constants, for `rows` rows of `n` numbers of `size` bytes.

    But for the interpreter, whose `capability` is None, the width alone decides how a row is cut and added up: so a
    row's result is the same, bit for bit, however many rows there are.
    """
    if n <= {2: 32768, 4: 32768, 8: 16384}[size]:
        block, warps = tile_of(n, size, 1)
        together = max(1, (1024 if size == 2 else 512) // triton.next_power_of_2(n))
        if ROWS_TUNED:
            block, warps, together = ROWS_TUNED
        chunks = max(1, triton.cdiv(n, block))
        if capability is None:  # the interpreter's cost is programs times operations, whatever their size
            together = max(together, min(triton.next_power_of_2(rows), max(1, 2**15 // (block * chunks))))
        constants = {"ROWS": together, "BLOCK": block, "CHUNKS": chunks}
        return Plan("rows", constants, triton.cdiv(rows, together), warps)
    block, warps, resident, registers = TUNED or (16384 // size, 8, 2, 128)
    block = block if capability is not None else 16384
    parts, span = parts_of(n, size, block)
    if quantised or parts > 2 * processors:
        return Plan("looped", {"BLOCK": 32768 // size}, rows, 16)
    groups = min(rows, max(1, resident * processors // parts))
    constants = {"BLOCK": triton.next_power_of_2(span), "maxnreg": registers}
    return Plan("shared", constants, groups * parts, warps, span, parts)


TUNED: Any = None
ROWS_TUNED: Any = None


def parts_of(n: int, size: int, block: int) -> tuple[int, int]:
    """Into how many parts of at most `block` numbers a row is cut, and their width: whole lines of 128 bytes."""
    line = 128 // size
    span = triton.cdiv(triton.cdiv(n, triton.cdiv(n, block)), line) * line
    return triton.cdiv(n, span), span


def waiting(parts: int, words: int, warps: int, capability: tuple[int, int] | None) -> dict[str, int]:
    """Constants of kernels whose programs wait for each other's words; as many lanes as threads or more."""
    lanes = max(32 * warps, triton.next_power_of_2(parts * words))
    return {"LANES": lanes, "TRIES": 0 if capability is None else 4096}  # some milliseconds


_plan = functools.lru_cache(maxsize=4096)(norm_plan)

# Launching -----------------------------------------------------------------------------------------------------------


def rows_in(x: Tensor) -> Tensor:
    """A tensor as a matrix of its rows, whose numbers lie side by side; copied where they do not."""
    n = x.shape[-1]
    if n > 1 and x.stride(-1) != 1:
        return contiguous(x).view(-1, n)
    try:
        return x.view(-1, n)
    except RuntimeError:
        return contiguous(x).view(-1, n)


def aligned(n: int, *tensors: Tensor | None) -> int:
    """Of how many numbers, up to those of 16 bytes, widths and strides of matrices are multiples."""
    return math.gcd(n, *(v for t in tensors if t is not None for v in (16 // t.element_size(), t.stride(0))))


def board_of(words: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, dict[str, Any], dict[str, bool]]:
    """Zeros for programs to leave words on; whether these wait for them to be there, and how they are launched."""
    early = overlapping(device)
    board = empty((words,), torch.int64 if dtype == torch.float64 else torch.int32, device)
    block = 16384 // board.element_size()
    launch(fill, (triton.cdiv(words, block),), board, words, BLOCK=block, EARLY=bool(early), num_warps=8)
    return board, {"LATE": bool(early)}, early


#: The largest magnitude in eight bits.
_LIMITS = {torch.float8_e4m3fn: 448, torch.int8: 127}


def _into(
    y: Tensor,
    total: Tensor | None,
    scale: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    eps: float,
) -> None:
    capability, processors = gpu(x.device)
    if y.dtype == torch.float8_e4m3fn and capability is not None and capability < (8, 9):
        raise NotImplementedError(
            f"norms: expected a GPU of capability 8.9 or more for float8_e4m3fn, got {capability[0]}.{capability[1]}; "
            "ask for torch.int8"
        )
    n = x.shape[-1]
    x = rows_in(x)
    residual = None if residual is None else rows_in(residual)
    weight = None if weight is None else contiguous(weight)
    bias = None if bias is None else contiguous(bias)
    plan = _plan(len(x), n, x.element_size(), capability, processors, scale is not None)
    align = aligned(n, x, residual)
    sizes = (len(x), n // align, x.stride(0) // align, 0 if residual is None else residual.stride(0) // align)
    constants = {"ALIGN": align, "EPS": eps, "CENTRED": centred, **plan.constants, "num_warps": plan.warps}
    grid = (plan.programs,)
    if plan.kernel == "shared":
        words = 2 if centred else 1
        board, late, early = board_of(len(x) * plan.parts * words, x.dtype, x.device)
        launch(
            _norm_shared, grid, y, total, x, residual, weight, bias, board, *sizes, plan.programs // plan.parts,
            plan.span, plan.parts, **constants, **waiting(plan.parts, words, plan.warps, capability), **late, **early,
        )  # fmt: skip
    else:
        launch(
            {"rows": _norm_rows, "looped": _norm_looped}[plan.kernel], grid, y, total, scale, x, residual, weight, bias,
            *sizes, LIMIT=_LIMITS.get(y.dtype, 0), **constants,
        )  # fmt: skip


# Arguments and results -----------------------------------------------------------------------------------------------


def check_norm(
    name: str, x: Any, like: Mapping[str, Any], vectors: Mapping[str, Any], centred: bool, eps: Any
) -> tuple[Any, ...]:
    """The arguments of a norm or its gradient: x, tensors `like` it, `vectors` of its width, or a sentence."""
    check_tensor(name, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{name}: expected x of one axis or more, got a single number; give it an axis: x[None]")
    for what, tensor in like.items():
        check_tensor(name, what, tensor)
        check_alike(name, what, tensor, "x", x)
        if tensor.shape != x.shape:
            raise ValueError(
                f"{name}: expected {what} of shape {tuple(x.shape)} as x has, got {tuple(tensor.shape)}; "
                "expand it first"
            )
    for what, vector in vectors.items():
        if vector is not None:
            check_tensor(name, what, vector)
            check_alike(name, what, vector, "x", x, dtype=False)
            if vector.shape != x.shape[-1:]:
                raise ValueError(
                    f"{name}: expected {what} of shape ({x.shape[-1]},), a number for each of a row of x, got "
                    f"{tuple(vector.shape)}; slice or expand it first"
                )
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{name}: expected eps to be a number, got {type(eps).__name__}; give a float such as 1e-6")
    check_device(name, x)
    return x, *like.values(), *vectors.values(), bool(centred), float(eps)


def _check(x: Any, weight: Any, bias: Any, centred: bool, eps: Any) -> tuple[Any, ...]:
    return check_norm(_name(centred), x, {}, {"weight": weight, "bias": bias}, centred, eps)


def _check_sum(x: Any, residual: Any, weight: Any, bias: Any, centred: bool, eps: Any) -> tuple[Any, ...]:
    like, vectors = {"residual": residual}, {"weight": weight, "bias": bias}
    return check_norm(f"add_{_name(centred)}", x, like, vectors, centred, eps)


def _check_quantised(x: Any, residual: Any, *rest: Any) -> tuple[Any, ...]:
    *vectors, centred, eps, dtype = rest
    if dtype not in _LIMITS:
        raise TypeError(
            f"{_name(centred)}: expected dtype to be float8_e4m3fn or int8, got {dtype}; leave it out for that of x"
        )
    if residual is None:
        x, *found = _check(x, *vectors, centred, eps)
    else:
        x, residual, *found = _check_sum(x, residual, *vectors, centred, eps)
    return x, residual, *found, dtype


def _name(centred: bool) -> str:
    return "layer_norm" if centred else "rms_norm"


def _alike(x: Tensor, *_: Any) -> Tensor:
    return empty(x.shape, x.dtype, x.device)


def _with_sum(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _alike(x), _alike(x)


def _with_scale(x: Tensor, residual: Tensor | None, weight: Any, bias: Any, *rest: Any) -> list[Tensor]:
    quantised = [empty(x.shape, rest[-1], x.device), empty((*x.shape[:-1], 1), accumulated(x.dtype), x.device)]
    return quantised if residual is None else [*quantised, _alike(x)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, *_, weight, bias, centred, eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if isinstance(output, tuple) else x, weight, bias)
    ctx.centred, ctx.eps = centred, eps


def _gradients(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> tuple[Any, ...]:
    """For what was normalised, for weight and bias, for nothing of the rest."""
    from .norms_backward import norm_backward

    x, weight, bias = ctx.saved_tensors
    if dy is None:
        return dtotal, None, None, None, None
    dx, *rest = norm_backward(x, dy, dtotal, weight, bias, ctx.centred, ctx.eps)
    dweight = None if weight is None else rest.pop(0)
    return dx, dweight, rest[0] if rest else None, None, None


def _gradients_of_sum(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Any, ...]:
    dx, *rest = _gradients(ctx, dy, dtotal)
    return dx, dx, *rest


_norm: Operator = Operator(
    "norm",
    "(Tensor x, Tensor? weight, Tensor? bias, bool centred, float eps) -> Tensor",
    check=_check,
    outputs=_alike,
    into=lambda y, x, *rest: _into(y, None, None, x, None, *rest),
    gradient=(_gradients, _keep),
)
_add_norm: Operator = Operator(
    "add_norm",
    "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, bool centred, float eps) -> (Tensor, Tensor)",
    check=_check_sum,
    outputs=_with_sum,
    into=lambda found, *rest: _into(found[0], found[1], None, *rest),
    gradient=(_gradients_of_sum, _keep),
)
_quantised_norm: Operator = Operator(
    "quantised_norm",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, bool centred, float eps, ScalarType dtype) -> Tensor[]",
    check=_check_quantised,
    outputs=_with_scale,
    into=lambda found, *rest: _into(found[0], found[2] if len(found) > 2 else None, found[1], *rest[:-1]),
)

# The functions -------------------------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows over the root of the mean of their squares, in one read and one write.

    Parameters
    ----------
    x : torch.Tensor
        Rows of N elements along the last axis, of any shape and strides: float16, bfloat16, float32 or float64, on a
        CUDA device (or on the CPU where Triton interprets). Half types are computed in float32 and rounded once.
    weight, bias : torch.Tensor, optional
        N elements, of any of these dtypes.
    eps : float, default 1e-6
        Added to the mean of the squares.
    dtype : torch.dtype, optional
        ``torch.float8_e4m3fn`` or ``torch.int8``: the result in eight bits, each row over its scale, which is the
        row's largest magnitude over 448 or 127 (1 for a row of zeros).

    Returns
    -------
    y : torch.Tensor
        Contiguous, of the shape, dtype and device of `x`.
    scale : torch.Tensor
        With `dtype`: one number a row, in float32 (float64 for that), of the shape of `x` with a last axis of 1. The
        result is ``y * scale``.

    Raises
    ------
    TypeError
        If an argument is no dense floating-point tensor, `eps` no number, or `dtype` another one.
    ValueError
        If shapes or devices do not fit, or the tensors are on the CPU and Triton compiles, or views that negate.
    NotImplementedError
        If `dtype` is ``torch.float8_e4m3fn`` and the GPU has no such numbers, or if its gradient is asked for.

    Notes
    -----
    Differentiable once, but for results in eight bits; works under `torch.compile` and `torch.vmap`. Of a row its
    result depends on nothing else, bit for bit.

    Examples
    --------
    >>> import fusebook, torch
    >>> y = fusebook.rms_norm(torch.randn(3, 5, device="cuda"), torch.ones(5, device="cuda"))  # doctest: +SKIP
    """
    if dtype is None:
        return _norm(x, weight, bias, False, eps)
    return tuple(_quantised_norm(x, None, weight, bias, False, eps, dtype))


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows less their mean, over the root of their variance, in one read and one write.

    Parameters
    ----------
    x, weight, bias, eps, dtype
        As of `rms_norm`; `eps` is added to the variance.

    Returns
    -------
    y, scale : torch.Tensor
        As of `rms_norm`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `rms_norm`.
    """
    if dtype is None:
        return _norm(x, weight, bias, True, eps)
    return tuple(_quantised_norm(x, None, weight, bias, True, eps, dtype))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Add a residual and normalise the sum as `rms_norm` does, in two reads and two writes.

    Parameters
    ----------
    x, weight, bias, eps, dtype
        As of `rms_norm`.
    residual : torch.Tensor
        Of the shape and dtype of `x`, of any strides.

    Returns
    -------
    y : torch.Tensor
        The norm of the sum.
    scale : torch.Tensor
        With `dtype`, as of `rms_norm`.
    total : torch.Tensor
        The sum, rounded to the dtype of `x`: what is normalised, and what the next layer adds to.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `rms_norm`.
    """
    if dtype is None:
        return _add_norm(x, residual, weight, bias, False, eps)
    return tuple(_quantised_norm(x, residual, weight, bias, False, eps, dtype))


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Add a residual and normalise the sum as `layer_norm` does, in two reads and two writes.

    Parameters
    ----------
    x, residual, weight, bias, eps, dtype
        As of `add_rms_norm`; `eps` is added to the variance.

    Returns
    -------
    y, scale, total : torch.Tensor
        As of `add_rms_norm`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `rms_norm`.
    """
    if dtype is None:
        return _add_norm(x, residual, weight, bias, True, eps)
    return tuple(_quantised_norm(x, residual, weight, bias, True, eps, dtype))
