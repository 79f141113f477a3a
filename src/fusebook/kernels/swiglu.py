"""SwiGLU: two matrix products that share their left side, and what combines them, in one kernel.

For x ``[M, K]``, gate and up ``[K, N]``,

    y = silu(x @ gate) * (x @ up)      [M, N], with silu(z) = z / (1 + exp(-z))

Fused: neither product is written at all. One operation after another writes 4MN more than MN and reads as much. Kernels
and plans are those of `_products`; where torch's products are taken, one kernel does the rest.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._call import INTERPRETED, Operator, contiguous, empty, gpu, launch, lower
from ._products import (
    Plan,
    _asked,
    _by_torch,
    _by_words,
    _cut,
    _fetchable,
    _late,
    _leading,
    _math,
    _matrix,
    _one_by_one,
    _options,
    _place,
    _plan,
    _product,
    _programs,
    _shared_out,
    _stack,
    _store,
    _sum_of_parts,
    _summed,
    _take_over,
    _takes_tf32,
    _tiles_of,
    _wanted,
    _whole,
    _workspace,
    layout_of,
)

__all__ = ["swiglu", "swiglu_eager"]

# The unfused chain ---------------------------------------------------------------------------------------------------


def swiglu_eager(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
    """SwiGLU, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        ``[M, K]``.
    gate, up : torch.Tensor
        ``[K, N]``.
    bias : torch.Tensor, optional
        ``[2, N]``, of the gate and of the other product.

    Returns
    -------
    torch.Tensor
        ``[M, N]``.
    """
    g = x @ gate  # read MK + KN, write MN
    u = x @ up  # read MK + KN, write MN
    if bias is not None:
        g, u = g + bias[0], u + bias[1]  # read 2MN, write 2MN
    s = torch.nn.functional.silu(g)  # read MN, write MN
    return s * u  # read 2MN, write MN


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _gated(g, u, bias_ptr, n, N, BIAS: tl.constexpr):
    """The products of a tile become its output, in registers and in the dtype of the products."""
    if BIAS:
        g += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(g.dtype)[None, :]
        u += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(g.dtype)[None, :]
    return g / (1 + tl.exp(-g)) * u


@triton.jit
def _gated_ones(out_ptr, g_ptr, u_ptr, bias_ptr, at, inside, N, BIAS: tl.constexpr):
    g = tl.load(g_ptr + at, mask=inside)  # read MN
    u = tl.load(u_ptr + at, mask=inside)  # read MN
    if g.dtype != tl.float64:
        g = g.to(tl.float32)
        u = u.to(tl.float32)
    if BIAS:
        g += tl.load(bias_ptr + at % N, mask=inside).to(g.dtype)
        u += tl.load(bias_ptr + N + at % N, mask=inside).to(g.dtype)
    y = g / (1 + tl.exp(-g)) * u
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)  # write MN


@triton.jit
def _swiglu_gate(out_ptr, g_ptr, u_ptr, bias_ptr, SIZE, N, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of the output of SwiGLU, from both products; it may take the place of one of them."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)  # [BLOCK]
    # A mask that ends anywhere forces loads of one element each. Only the last block has need of one.
    if start + BLOCK <= SIZE:
        _gated_ones(out_ptr, g_ptr, u_ptr, bias_ptr, at, None, N, BIAS)
    else:
        _gated_ones(out_ptr, g_ptr, u_ptr, bias_ptr, at, at < SIZE, N, BIAS)


@triton.jit(do_not_specialize=["M", "PROGRAMS"])
def _swiglu_tiles(
    out_ptr, y_tiles, x_tiles, gate_tiles, up_tiles, bias_ptr, M, K, N, PROGRAMS, COLUMN: tl.constexpr,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLAT: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th tile of the output: two sums in registers, which share each tile of x."""
    rows = tl.cdiv(M, BM)
    columns = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=FLAT):
        r, c = _place(tile, rows, columns, GROUP)
        n = c * BN
        g = tl.zeros([BM, BN], tl.float32)
        u = tl.zeros([BM, BN], tl.float32)
        for k in range(steps):
            x = x_tiles.load([r * BM, k * BK])  # [BM, BK]
            if COLUMN:
                gate = gate_tiles.load([n, k * BK]).T  # [BK, BN]
                up = up_tiles.load([n, k * BK]).T
            else:
                gate = gate_tiles.load([k * BK, n])
                up = up_tiles.load([k * BK, n])
            if WIDE:
                x = x.to(tl.float32)
                gate = gate.to(tl.float32)
                up = up.to(tl.float32)
            g = tl.dot(x, gate, g, input_precision=PRECISION)
            u = tl.dot(x, up, u, input_precision=PRECISION)
        y = _gated(g, u, bias_ptr, n + tl.arange(0, BN), N, BIAS)  # no traffic: neither product leaves the registers
        if BULK:  # the copy engine stores, and cuts off what is out of range
            y_tiles.store([r * BM, n], y.to(y_tiles.dtype))  # write MN
        else:
            _store(out_ptr, y, r * BM + tl.arange(0, BM), n + tl.arange(0, BN), M, N, N)  # write MN


@triton.jit(do_not_specialize=["M", "LAST", "PROGRAMS"])
def _swiglu_stacked(
    out_ptr, y_tiles, x_tiles, w_tiles, bias_ptr, M, K, N, LAST, PROGRAMS, BIAS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr, BULK: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, SWAP: tl.constexpr = False, LATE: tl.constexpr = False,
):  # fmt: skip
    """As `_swiglu_tiles`, of weights in one descriptor: a tile has columns of both, so one sum suffices.

    SWAP multiplies the transposes, for few rows: Hopper's matrix units take 64 rows at least, but as few as 8 columns.
    There the next kernel is let in at the end only: its programs would take places unevenly, and bandwidth is all.
    """
    if not SWAP:
        _take_over(LATE)
    elif LATE:
        tl.extra.cuda.gdc_wait()
    rows = tl.cdiv(M, BM)
    columns = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=FLAT):
        r, c = _place(tile, rows, columns, GROUP)
        n = c * BN
        if SWAP:
            both = tl.zeros([2 * BN, BM], tl.float32)
        else:
            both = tl.zeros([BM, 2 * BN], tl.float32)
        for k in range(steps):
            x = x_tiles.load([r * BM, k * BK])  # [BM, BK]
            w = w_tiles.load([0, n, k * BK]).reshape(2 * BN, BK)  # [2 BN, BK]
            if WIDE:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            if SWAP:
                both = tl.dot(w, x.T, both, input_precision=PRECISION)
            else:
                both = tl.dot(x, w.T, both, input_precision=PRECISION)
        if SWAP:
            both = both.T
            if LATE:
                tl.extra.cuda.gdc_launch_dependents()
        # A thread holds the same columns of either half, so that nothing is exchanged here.
        first, second = both.reshape(BM, 2, BN).permute(0, 2, 1).split()
        g = tl.where(LAST == 0, first, second)  # the weight with the lower address comes first
        u = tl.where(LAST == 0, second, first)
        y = _gated(g, u, bias_ptr, n + tl.arange(0, BN), N, BIAS)  # no traffic: neither product leaves the registers
        if BULK:  # the copy engine stores, and cuts off what is out of range
            y_tiles.store([r * BM, n], y.to(y_tiles.dtype))  # write MN
        else:
            _store(out_ptr, y, r * BM + tl.arange(0, BM), n + tl.arange(0, BN), M, N, N)  # write MN


@triton.jit(do_not_specialize=["M"])
def _swiglu_strided(
    out_ptr, parts_ptr, counts_ptr, x_ptr, gate_ptr, up_ptr, bias_ptr, M, K, N, XM, XK, GK, GN, UK, UN,
    LAYOUT: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    LATE: tl.constexpr = False, X_BY: tl.constexpr = 1, W_BY: tl.constexpr = 1,
):  # fmt: skip
    """One tile of the output, or one of SPLIT parts of its two sums; the last program to finish adds the parts."""
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    r, c = _place(tile, tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m = r * BM + tl.arange(0, BM)  # [BM]
    n = c * BN + tl.arange(0, BN)  # [BN]
    k = tl.arange(0, BK)  # [BK]
    XM = _whole(XM, X_BY)
    K = _whole(K, X_BY)
    if LAYOUT == "row":
        N = _whole(N, W_BY)
        GK = _whole(GK, W_BY)
        UK = _whole(UK, W_BY)
        GN = 1
        UN = 1
    elif LAYOUT == "column":
        K = _whole(K, W_BY)
        GN = _whole(GN, W_BY)
        UN = _whole(UN, W_BY)
        GK = 1
        UK = 1
    wide_k = k.to(tl.int64)[:, None]
    wide_n = n.to(tl.int64)[None, :]
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * XM + k[None, :] * XK  # [BM, BK]
    gate_ptrs = gate_ptr + wide_k * GK + wide_n * GN  # [BK, BN]
    up_ptrs = up_ptr + wide_k * UK + wide_n * UN
    share = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    first = part * share
    x_ptrs += first.to(tl.int64) * XK
    gate_ptrs += first.to(tl.int64) * GK
    up_ptrs += first.to(tl.int64) * UK
    g = tl.zeros([BM, BN], tl.float32)
    u = tl.zeros([BM, BN], tl.float32)
    gs = ()
    us = ()
    if BM < 16:
        for _ in tl.static_range(BM):
            gs += (tl.zeros([BK, BN], tl.float32),)  # type: ignore[assignment]
            us += (tl.zeros([BK, BN], tl.float32),)  # type: ignore[assignment]
    for k0 in range(first, tl.minimum(K, first + share), BK):
        there = k < K - k0
        mask = there[:, None] & (n < N)[None, :]
        gate = tl.load(gate_ptrs, mask=mask, other=0.0)  # [BK, BN]; read KN, M / BM times
        up = tl.load(up_ptrs, mask=mask, other=0.0)  # [BK, BN]; read KN, M / BM times
        gate_ptrs += BK * tl.cast(GK, tl.int64)
        up_ptrs += BK * tl.cast(UK, tl.int64)
        if BM < 16:  # tensor cores would multiply 16 rows: a number of a weight is multiplied where it was loaded
            more = ()
            others = ()
            for i in tl.static_range(BM):
                row = r * BM + i
                at = x_ptr + row.to(tl.int64) * XM + (k0 + k).to(tl.int64) * XK  # [BK]
                x = tl.load(at, mask=k < tl.where(row < M, K - k0, 0), other=0.0).to(tl.float32)[:, None]
                more += (gs[i] + x * gate.to(tl.float32),)  # type: ignore[assignment]
                others += (us[i] + x * up.to(tl.float32),)  # type: ignore[assignment]
            gs = more
            us = others
        else:
            x = tl.load(x_ptrs, mask=(m < M)[:, None] & there[None, :], other=0.0)  # [BM, BK]; read MK, from L2 mostly
            x_ptrs += BK * XK
            if WIDE:
                x = x.to(tl.float32)
                gate = gate.to(tl.float32)
                up = up.to(tl.float32)
            g = tl.dot(x, gate, g, input_precision=PRECISION)
            u = tl.dot(x, up, u, input_precision=PRECISION)
    if BM < 16:
        g = _summed(gs, BM, BN)
        u = _summed(us, BM, BN)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the counters
    if SPLIT > 1:
        _store(parts_ptr + part.to(tl.int64) * M * N, g, m, n, M, N, N)
        _store(parts_ptr + (SPLIT + part.to(tl.int64)) * M * N, u, m, n, M, N, N)
        tl.debug_barrier()  # all threads have stored before the counter says so
        if tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            g = _sum_of_parts(parts_ptr, m, n, M, N, N, BM, BN, SPLIT)
            u = _sum_of_parts(parts_ptr + tl.cast(SPLIT, tl.int64) * M * N, m, n, M, N, N, BM, BN, SPLIT)
            _store(out_ptr, _gated(g, u, bias_ptr, n, N, BIAS), m, n, M, N, N)
    else:
        _store(out_ptr, _gated(g, u, bias_ptr, n, N, BIAS), m, n, M, N, N)  # write MN


# Launchers -----------------------------------------------------------------------------------------------------------


def _launch_swiglu(
    out: Tensor, x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, math: str, layout: str, plan: Plan
) -> None:  # fmt: skip
    """One launch."""
    (M, K), N = x.shape, gate.shape[1]
    tiles = triton.cdiv(M, plan.bm) * triton.cdiv(N, plan.bn)
    options = {"BIAS": bias is not None, **_options(plan, x.dtype, math)}
    biases = x if bias is None else contiguous(bias)  # without a bias it is not followed
    if plan.kernel == "tiles":
        programs = _programs(plan, tiles, x.device)
        bulk = plan.bulk > 0 and N * out.element_size() % 16 == 0
        options |= {"FLAT": plan.flat, "BULK": bulk}
        y = _tiles_of(out, "row", plan.bm, plan.bn) if bulk else None
        x_tiles = _tiles_of(x, "row", plan.bm, plan.bk)
        stack = _stack((gate, up), layout)
        if layout == "column" and stack is not None:
            distance, last = stack
            lower = up if last else gate
            strides = [distance, _leading(lower, layout), 1]
            w = TensorDescriptor(lower, [2, N, K], strides, [2, plan.bn, plan.bk])
            launch(
                _swiglu_stacked, (programs,),
                out, y, x_tiles, w, biases, M, K, N, last, programs, SWAP=plan.swap, **options, **_late(plan, x),
            )  # fmt: skip
            return
        launch(
            _swiglu_tiles, (programs,),
            out, y, x_tiles, _tiles_of(gate, layout, plan.bk, plan.bn), _tiles_of(up, layout, plan.bk, plan.bn),
            biases, M, K, N, programs, COLUMN=layout == "column", **options,
        )  # fmt: skip
        return
    parts, counts, late = _workspace(plan, tiles, 2 * M * N, out)
    launch(
        _swiglu_strided, (tiles * plan.split,),
        out, parts, counts, x, gate, up, biases, M, K, N, *x.stride(), *gate.stride(), *up.stride(),
        LAYOUT=layout, SPLIT=plan.split, **options, **late, **_by_words(x, (gate, up), layout),
    )  # fmt: skip


def _products_gated(out: Tensor, x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, tf32: bool) -> None:
    """Torch's products, and one kernel that does the rest."""
    other = empty(out.shape, out.dtype, out.device)
    _product(x, gate, out, tf32)
    _product(x, up, other, tf32)
    # The interpreter's cost is the number of programs.
    block, warps = (2**16, 1) if INTERPRETED else (4096 // out.element_size(), 8 if out.element_size() >= 4 else 4)
    launch(
        _swiglu_gate, (triton.cdiv(out.numel(), block),),
        out, out, other, out if bias is None else contiguous(bias), out.numel(), out.shape[1],
        BIAS=bias is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _outputs(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, tf32: bool, strategy: str) -> Tensor:
    return empty((*x.shape[:-1], gate.shape[1]), x.dtype, x.device)


def _into(
    out: Tensor, x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, tf32: bool, strategy: str
) -> None:  # fmt: skip
    """An empty `strategy` leaves the choice to the plan."""
    x = _matrix(x)
    M, N = len(x), gate.shape[1]
    out = out.view(M, N)
    math = _math(x.dtype, tf32)
    layout = layout_of(gate) if layout_of(gate) == layout_of(up) else "any"
    hardware = gpu(x.device)
    wanted = _wanted("swiglu", x, (gate, up), math, layout, hardware, strategy)
    x, (gate, up), aligned, copied = _fetchable(x, (gate, up), layout, math, hardware[0], strategy, wanted=wanted)
    layout = layout_of(gate) if copied else layout
    plan = None
    if wanted is not None:
        plan, _ = wanted
    elif strategy != "views":
        plan = _shared_out("swiglu", M, x.shape[1], (N,), math, aligned, hardware[1])
    if plan is None:
        # What was copied to where it is aligned was copied for ours.
        plan = _plan("swiglu", (M, 2 * N), math, layout, aligned, hardware, strategy or ("fused" if copied else None))
        plan = _cut(plan, M, x.shape[1], (N,), math, aligned, hardware[1])
        one_by_one = _one_by_one((gate, up), layout)
        if not strategy and _by_torch("swiglu", M, x.shape[1], 2 * N, math, aligned, layout, one_by_one):
            plan = Plan("torch")
    if plan.kernel == "torch":
        _products_gated(out, x, gate, up, bias, tf32)
    else:
        _launch_swiglu(out, x, gate, up, bias, math, layout, plan)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gate, up, bias, *_ = inputs
    ctx.save_for_backward(x, gate, up, bias)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """The two products once more, since neither was kept; then torch's products of their gradients."""
    x, gate, up, bias = ctx.saved_tensors
    shape = x.shape
    if len(shape) != 2:
        x, dy = x.reshape(-1, shape[-1]), dy.reshape(-1, dy.shape[-1])
    g, u = x @ gate, x @ up
    if bias is not None:
        g, u = g + bias[0], u + bias[1]
    if torch.is_grad_enabled():  # torch's kernel has no gradient of its own
        s = torch.sigmoid(g)
        for_u, for_g = dy * g * s, dy * u * s * (1 + g * (1 - s))
    else:
        for_u, for_g = dy * torch.nn.functional.silu(g), torch.ops.aten.silu_backward(dy * u, g)
    for_bias = None if bias is None else torch.stack([for_g.sum(0), for_u.sum(0)])
    for_x = torch.addmm(for_g @ gate.mT, for_u, up.mT)
    turned = x.mT
    return for_x.view(shape), turned @ for_g, turned @ for_u, for_bias, None, None


def _check(
    x: Any, gate: Any, up: Any, bias: Any, tf32: Any, strategy: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, str]:
    name = "swiglu"
    fast = _takes_tf32(
        name, x, tf32, strategy, gate=(gate, "[K, N]"), up=(up, "[K, N]"), bias=(bias, "[2, N]?")
    )  # fmt: skip
    return x, gate, up, bias, fast, strategy or ""


_swiglu = Operator(
    "swiglu",
    "(Tensor x, Tensor gate, Tensor up, Tensor? bias, bool tf32, str strategy) -> Tensor",
    check=_check,
    outputs=_outputs,
    into=_into,
    places=lambda x, gate, up, bias, tf32, _: _asked(x, (gate, up), tf32),
    gradient=(_gradients, _keep),
    autocast=lower,
)


def swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    bias: Tensor | None = None,
    *,
    tf32: bool | None = None,
    strategy: str | None = None,
) -> Tensor:
    """SwiGLU of two products, ``silu(x @ gate) * (x @ up)``, of which neither is ever written to memory.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., K]``, float16, bfloat16, float32 or float64, on a CUDA device (or on the CPU where Triton interprets).
    gate, up : torch.Tensor
        ``[K, N]``, of any strides, of the dtype and on the device of `x`.
    bias : torch.Tensor, optional
        ``[2, N]``: what is added to the gate's product, and to the other one.
    tf32 : bool, optional
        As in `concat_gemm`.
    strategy : str, optional
        ``"fused"``: one launch of Fusebook's kernel, which float64 does not have. ``"views"``: torch's two products,
        written side by side after all, and one kernel that reads them. Where None, half types are fused, so that
        products are not rounded, unless 65 to 512 rows fill the rounds of tiles too badly; float32, in TF32 or not,
        takes the one that was faster for such sizes when this kind of GPU was tuned.

    Returns
    -------
    torch.Tensor
        ``[..., N]``, contiguous, of the dtype of `x`. Biases, silu and the last product are float32 for all dtypes but
        float64; fused, the sums are float32 as well, and all is rounded once.

    Raises
    ------
    TypeError
        For arguments that are no dense tensors, other dtypes, dtypes that differ, and float64 where the fused kernel is
        asked for.
    ValueError
        For shapes that do not match, tensors on different devices, an unknown strategy.

    Notes
    -----
    Weights that differ in layout, or whose rows begin at no multiples of 16 bytes, are treated as in `concat_gemm`;
    float32 is multiplied as there, with the same limits at the ends of its range. Works under `torch.compile`.
    Differentiable: the backward pass computes the two products again instead of keeping them, and all its products are
    torch's, which follow ``torch.backends.cuda.matmul.allow_tf32`` whatever `tf32` was.

    Examples
    --------
    >>> import fusebook, torch
    >>> layer = torch.nn.Linear(64, 2 * 96, device="cuda")  # doctest: +SKIP
    >>> gate, up = layer.weight.T.chunk(2, 1)  # doctest: +SKIP
    >>> fusebook.swiglu(torch.randn(8, 64, device="cuda"), gate, up).shape  # doctest: +SKIP
    torch.Size([8, 96])
    """
    return _swiglu.call(x, gate, up, bias, tf32, strategy)
