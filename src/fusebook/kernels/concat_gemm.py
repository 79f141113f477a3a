"""Matrix products that share their left side, side by side in one output.

For x ``[M, K]`` and weights ``w_i`` ``[K, N_i]``,

    y = [x @ w_0, x @ w_1, ...]        [M, N_0 + N_1 + ...]

Fused: every product writes into its own columns of one output, so that nothing is concatenated. Two products and a
concatenation write 2MN each and read 2MN to copy it. Kernels and plans are those of `_products`.

Limits: the output is contiguous; more than four weights, and weights whose layouts differ, take several launches into
the same output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._call import Operator, apply, empty, gpu, launch, lower
from ._products import (
    _FEW,
    _FEW_TILES,
    _MIDDLE,
    _MOST,
    Cost,
    Plan,
    _asked,
    _by_torch,
    _by_words,
    _cut,
    _describable,
    _ends,
    _fetchable,
    _kind,
    _late,
    _math,
    _matrix,
    _one_by_one,
    _options,
    _pick,
    _place,
    _plan,
    _product,
    _programs,
    _shared_out,
    _starts,
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
    microseconds,
)

__all__ = ["concat_gemm", "concat_gemm_eager"]

# The unfused chain ---------------------------------------------------------------------------------------------------


def concat_gemm_eager(x: Tensor, *weights: Tensor) -> Tensor:
    """Products side by side, one operation after another: what fusing saves.

    Parameters
    ----------
    x : torch.Tensor
        ``[M, K]``.
    *weights : torch.Tensor
        ``[K, N_i]``; N is the sum of their widths.

    Returns
    -------
    torch.Tensor
        ``[M, N]``.
    """
    products = [x @ w for w in weights]  # read MK for each weight, read KN, write MN
    return torch.cat(products, 1)  # read MN, write MN


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M", "PROGRAMS"])
def _concat_gemm_tiles(
    out_ptr, y_tiles, x_tiles, w0_tiles, w1_tiles, w2_tiles, w3_tiles, M, K, widths, LD, PROGRAMS,
    COUNT: tl.constexpr, COLUMN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, FLAT: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    LATE: tl.constexpr = False,
):  # fmt: skip
    """Every PROGRAMS-th tile of the output; those of one weight come before those of the next."""
    _take_over(LATE)
    w_tiles = (w0_tiles, w1_tiles, w2_tiles, w3_tiles)
    rows = tl.cdiv(M, BM)
    steps = tl.cdiv(K, BK)
    ahead = 0  # tiles of the weights before this one
    start = 0  # where its columns begin in the output
    for i in tl.static_range(COUNT):
        N = widths[i]
        columns = tl.cdiv(N, BN)
        # The program that would be next takes the first tile, so that all have as many.
        first = (tl.program_id(0) + PROGRAMS - ahead % PROGRAMS) % PROGRAMS
        # FLAT: the first steps of the next tile are fetched while this one is finished.
        for tile in tl.range(first, rows * columns, PROGRAMS, flatten=FLAT):
            r, c = _place(tile, rows, columns, GROUP)
            n = c * BN
            y = tl.zeros([BM, BN], tl.float32)
            for k in range(steps):
                x = x_tiles.load([r * BM, k * BK])  # [BM, BK]; read MK for each column of tiles, from L2 but once
                if COLUMN:
                    w = w_tiles[i].load([n, k * BK]).T  # [BK, BN]; read KN for each row of tiles, likewise
                else:
                    w = w_tiles[i].load([k * BK, n])  # [BK, BN]
                if WIDE:
                    x = x.to(tl.float32)
                    w = w.to(tl.float32)
                y = tl.dot(x, w, y, input_precision=PRECISION)
            # BULK: the copy engine stores; in two halves, a tile needs half the shared memory for it, which leaves
            # room for one more step under way.
            if BULK == 2:
                left, right = y.to(y_tiles.dtype).reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
                y_tiles.store([r * BM, start + n], left)  # write MN, with the next line
                y_tiles.store([r * BM, start + n + BN // 2], right)
            elif BULK == 1:
                y_tiles.store([r * BM, start + n], y.to(y_tiles.dtype))  # write MN
            else:
                _store(out_ptr + start, y, r * BM + tl.arange(0, BM), n + tl.arange(0, BN), M, N, LD)  # write MN
        ahead += rows * columns
        start += N


@triton.jit(do_not_specialize=["M"])
def _concat_gemm_strided(
    out_ptr, parts_ptr, counts_ptr, x_ptr, weights, M, K, widths, LD, XM, XK, row_steps, column_steps,
    COUNT: tl.constexpr, LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    LATE: tl.constexpr = False, X_BY: tl.constexpr = 1, W_BY: tl.constexpr = 1,
):  # fmt: skip
    """One tile of the output, or one of SPLIT parts of its sum; the last program to finish adds the parts."""
    first = (0,)
    ends = _ends(widths, BN, COUNT)
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    r, c = _place(tile, tl.cdiv(M, BM), ends[COUNT - 1], GROUP)
    w_ptr = _pick(c, ends, weights, COUNT)
    N = _pick(c, ends, widths, COUNT)
    start = _pick(c, ends, _starts(0, widths, COUNT), COUNT)
    XM = _whole(XM, X_BY)
    K = _whole(K, X_BY)
    if LAYOUT == "row":
        N = _whole(N, W_BY)
    else:
        K = _whole(K, W_BY)
    m = r * BM + tl.arange(0, BM)  # [BM]
    n = (c - _pick(c, ends, first + ends, COUNT)) * BN + tl.arange(0, BN)  # [BN]
    k = tl.arange(0, BK)  # [BK]
    # Strides from row to row of a weight and from column to column; one of them is 1 unless the layout is "any".
    if LAYOUT == "row":
        WK = tl.cast(_whole(_pick(c, ends, row_steps, COUNT), W_BY), tl.int64)
        w_ptrs = w_ptr + k[:, None] * WK + n[None, :]  # [BK, BN]
    elif LAYOUT == "column":
        WK = 1
        WN = tl.cast(_whole(_pick(c, ends, column_steps, COUNT), W_BY), tl.int64)
        w_ptrs = w_ptr + n[None, :] * WN + k[:, None]
    else:
        WK = tl.cast(_pick(c, ends, row_steps, COUNT), tl.int64)
        WN = tl.cast(_pick(c, ends, column_steps, COUNT), tl.int64)
        w_ptrs = w_ptr + n[None, :] * WN + k[:, None] * WK
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * XM + k[None, :] * XK  # [BM, BK]
    share = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    first = part * share
    x_ptrs += first.to(tl.int64) * XK
    w_ptrs += first.to(tl.int64) * WK
    y = tl.zeros([BM, BN], tl.float32)
    sums = ()
    if BM < 16:
        for _ in tl.static_range(BM):
            sums += (tl.zeros([BK, BN], tl.float32),)  # type: ignore[assignment]
    for k0 in range(first, tl.minimum(K, first + share), BK):
        there = k < K - k0
        w = tl.load(w_ptrs, mask=there[:, None] & (n < N)[None, :], other=0.0)  # [BK, BN]; read KN, M / BM times
        if BM < 16:  # tensor cores would multiply 16 rows: a number of a weight is multiplied where it was loaded
            more = ()
            for i in tl.static_range(BM):
                row = r * BM + i
                at = x_ptr + row.to(tl.int64) * XM + (k0 + k).to(tl.int64) * XK  # [BK]
                x = tl.load(at, mask=k < tl.where(row < M, K - k0, 0), other=0.0).to(tl.float32)
                more += (sums[i] + x[:, None] * w.to(tl.float32),)  # type: ignore[assignment]
            sums = more
        else:
            x = tl.load(x_ptrs, mask=(m < M)[:, None] & there[None, :], other=0.0)  # [BM, BK]; read MK, from L2 mostly
            if WIDE:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            y = tl.dot(x, w, y, input_precision=PRECISION)
            x_ptrs += BK * XK
        w_ptrs += BK * WK
    if BM < 16:
        y = _summed(sums, BM, BN)
    if LATE:
        tl.extra.cuda.gdc_wait()  # for the counters
    if SPLIT > 1:
        _store(parts_ptr + part.to(tl.int64) * M * LD + start, y, m, n, M, N, LD)
        tl.debug_barrier()  # all threads have stored before the counter says so
        if tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            y = _sum_of_parts(parts_ptr + start, m, n, M, N, LD, BM, BN, SPLIT)
            _store(out_ptr + start, y, m, n, M, N, LD)
    else:
        _store(out_ptr + start, y, m, n, M, N, LD)  # write MN


# Plans ---------------------------------------------------------------------------------------------------------------


def _ragged(widths: Iterable[int], itemsize: int) -> bool:
    """Whether products side by side leave some row of theirs beginning at no multiple of 16 bytes.

    Torch's products into such rows were much slower where that was measured: its fastest kernels want whole 16 bytes.
    Ours fetches by descriptors all the same; only its threads store, one by one.
    """
    return any(width * itemsize % 16 for width in widths)


def _narrowed(
    plan: Plan, M: int, K: int, widths: Sequence[int], math: str, aligned: bool, multiprocessors: int
) -> Plan:  # fmt: skip
    """Tiles by pointers of weights side by side: narrow ones with long steps where programs are few.

    Their loads are under way together. No descriptor describes weights of half types, others may be described; and no
    steps go beyond K. Fitted to problems drawn to tune by.
    """
    if plan.kernel != "strided" or plan.bm < 16 or (math == "half" and aligned):
        return plan
    if M > _FEW and K <= 64 < plan.bk:
        return plan._replace(bn=64, bk=64, stages=4)
    tiles = triton.cdiv(M, plan.bm) * sum(triton.cdiv(N, 32) for N in widths)
    if math != "half":
        return plan._replace(bn=32, bk=64) if M <= _FEW and tiles < multiprocessors else plan
    if M <= _MIDDLE and tiles < (1 if M <= 16 else 2) * multiprocessors:
        return plan._replace(bn=32, bk=128, stages=3)
    wide = tiles < 8 * multiprocessors if M <= 16 else 32 < M <= _FEW
    return plan._replace(bn=64, bk=64, stages=4) if wide else plan


def _of_few_tiles(M: int, K: int, widths: Sequence[int], multiprocessors: int, torch: bool) -> Plan:
    """Of `_FEW_TILES` the one that costs least; with `torch`, or torch's products, whose tiles fill their rounds.

    Fitted to products of 65 to 512 rows on an H200, of problems drawn to tune by.
    """

    def cost(plan: Plan) -> float:
        return microseconds(Cost(plan, *_FEW_TILES[plan]), M, K, widths, 2, multiprocessors)

    best = min(_FEW_TILES, key=cost)
    torchs = 7 + K * (0.0036 + 0.0055 * 64 * triton.cdiv(M, 64) * sum(widths) / (multiprocessors * 2**14))
    return Plan("torch") if torch and torchs < cost(best) else best


# Launchers -----------------------------------------------------------------------------------------------------------


def _launch_concat(out: Tensor, x: Tensor, weights: Sequence[Tensor], math: str, layout: str, plan: Plan) -> None:
    """Up to four weights of one layout into neighbouring columns: `out`, a part of an output of LD columns."""
    (M, K), LD = x.shape, out.stride(0)
    all_of = (*weights, *[weights[0]] * (_MOST - len(weights)))
    widths = tuple(w.shape[1] for w in all_of)
    tiles = triton.cdiv(M, plan.bm) * sum(triton.cdiv(w.shape[1], plan.bn) for w in weights)
    options = {"COUNT": len(weights), **_options(plan, x.dtype, math)}
    if plan.kernel == "tiles":
        # The copy engine would write beyond a weight's columns, into its neighbour's.
        whole = all(width % plan.bn == 0 for width in widths[: len(weights) - 1])
        bulk = plan.bulk if whole and (out.data_ptr() | LD * out.element_size()) % 16 == 0 else 0
        y = TensorDescriptor(out, list(out.shape), [LD, 1], [plan.bm, plan.bn // bulk]) if bulk else None
        w_tiles = [_tiles_of(w, layout, plan.bk, plan.bn) for w in weights]
        w_tiles += w_tiles[:1] * (_MOST - len(weights))
        programs = _programs(plan, tiles, x.device)
        launch(
            _concat_gemm_tiles, (programs,),
            out, y, _tiles_of(x, "row", plan.bm, plan.bk), *w_tiles, M, K, widths, LD, programs,
            COLUMN=layout == "column", FLAT=plan.flat, BULK=bulk, **options, **_late(plan, x),
        )  # fmt: skip
        return
    # The parts are laid out as the columns of `out` are, but without its other columns.
    width = sum(w.shape[1] for w in weights)
    if plan.split > 1 and width != LD:
        plan = plan._replace(split=1)
    parts, counts, late = _workspace(plan, tiles, M * width, out)
    row_steps, column_steps = (tuple(w.stride(i) for w in all_of) for i in (0, 1))
    launch(
        _concat_gemm_strided, (tiles * plan.split,),
        out, parts, counts, x, all_of, M, K, widths, LD, *x.stride(), row_steps, column_steps,
        LAYOUT=layout, SPLIT=plan.split, **options, **late, **_by_words(x, weights, layout),
    )  # fmt: skip


def _outputs(x: Tensor, weights: Sequence[Tensor], tf32: bool, strategy: str) -> Tensor:
    return empty((*x.shape[:-1], sum(w.shape[1] for w in weights)), x.dtype, x.device)


def _into(out: Tensor, x: Tensor, weights: Sequence[Tensor], tf32: bool, strategy: str) -> None:
    """An empty `strategy` leaves the choice to the plan."""
    if x.shape[-1] == 0:
        apply(Tensor.zero_, out)
        return
    given = x = _matrix(x)
    M, N = len(x), out.shape[-1]
    out = out if out.dim() == 2 else out.view(M, N)  # a plan makes each view again, which takes the host's time
    math, hardware = _math(x.dtype, tf32), gpu(x.device)
    weights = [w for w in weights if w.shape[1]]
    # Weights that few rows need are not copied: one whose rows begin anywhere is not to slow down large ones beside it.
    large = M <= _FEW and N * x.shape[1] >= 2**26
    layouts = [(how := layout_of(w), large and _describable(w, how)) for w in weights]
    # Plans were tuned on columns that begin at multiples of 16 bytes: their notes on torch do not hold for others.
    ragged = math == "half" and _ragged((w.shape[1] for w in weights), x.element_size())
    start = at = 0
    while at < len(weights):
        # The weights that follow and have the same layout, as many as one launch takes.
        end = at + 1
        while end < min(at + _MOST, len(weights)) and layouts[end] == layouts[at]:
            end += 1
        group: Sequence[Tensor] = weights[at:end]
        layout, _ = layouts[at]
        width = sum(w.shape[1] for w in group)
        wanted = _wanted("concat_gemm", x, group, math, layout, hardware, strategy, width == N)
        x, group, aligned, copied = _fetchable(x, group, layout, math, hardware[0], strategy, True, wanted)
        layout = layout_of(group[0]) if copied else layout
        widths, plan = [w.shape[1] for w in group], None
        if wanted is not None:
            plan, _ = wanted
        elif strategy != "views" and width == N:  # parts lie as the whole output does
            plan = _shared_out("concat_gemm", M, x.shape[1], widths, math, aligned, hardware[1])
        if plan is None:
            kind = _kind(x, group, layout) if aligned else ""
            # What was copied to where it is aligned was copied for ours; x, perhaps, with earlier weights.
            way = strategy or ("fused" if aligned and (ragged or copied or x is not given) else None)
            plan = _plan("concat_gemm", (M, N), math, layout + kind, aligned, hardware, way)
            if hardware[0] is not None:
                plan = _narrowed(plan, M, x.shape[1], widths, math, aligned, hardware[1])
                if math == "half" and aligned and way != "views" and _FEW < M <= _MIDDLE and M * N >= 2**18:
                    plan = _of_few_tiles(M, x.shape[1], widths, hardware[1], way is None)
            if width == N:
                plan = _cut(plan, M, x.shape[1], widths, math, aligned, hardware[1])
            one_by_one = _one_by_one(group, layout)
            if not strategy and _by_torch("concat_gemm", M, x.shape[1], N, math, aligned, layout, one_by_one):
                plan = Plan("torch")
            if plan.kernel == "torch" and not strategy and layout != "any" and M > _FEW and x.shape[1] * width <= 2**23:
                plan = Plan("joined")  # small beside x, and two launches less
        columns = out if width == N else out.narrow(1, start, width)
        if plan.kernel in ("torch", "joined"):
            group = _joined(group, layout) if plan.kernel == "joined" else group
            _products_of(columns, x, group, tf32)
        else:
            _launch_concat(columns, x, group, math, layout, plan)
        start, at = start + width, end


def _joined(weights: Sequence[Tensor], layout: str) -> list[Tensor]:
    """Weights side by side in one, as they lie in memory."""
    if len(weights) == 1:
        return list(weights)
    if layout == "row":
        return [apply(torch.cat, list(weights), 1)]
    return [apply(torch.cat, [w.mT for w in weights]).mT]


def _products_of(out: Tensor, x: Tensor, weights: Sequence[Tensor], tf32: bool) -> None:
    """Torch's products, each into its own columns: nothing is concatenated, and no kernel of ours is needed."""
    parts = (out,) if len(weights) == 1 else out.split([w.shape[1] for w in weights], 1)
    for w, columns in zip(weights, parts, strict=True):
        _product(x, w, columns, tf32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, *_ = inputs
    ctx.save_for_backward(x, *weights)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Two products of torch's for each weight."""
    x, *weights = ctx.saved_tensors
    parts = dy.split([w.shape[1] for w in weights], -1)
    for_x = sum(part @ w.mT for part, w in zip(parts, weights, strict=True)) if x.requires_grad else None
    turned = x.reshape(-1, x.shape[-1]).mT
    for_weights = [turned @ part.reshape(-1, part.shape[-1]) for part in parts]
    return for_x, for_weights, None, None


def _check(x: Any, weights: Any, tf32: Any, strategy: Any) -> tuple[Tensor, list[Tensor], bool, str]:
    name = "concat_gemm"
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence):
        raise TypeError(
            f"{name}: expected weights to be a sequence of tensors, got {type(weights).__name__}; pass a list"
        )
    if not weights:
        raise ValueError(f"{name}: expected one weight at least, got none; pass a list of matrices [K, N]")
    fast = _takes_tf32(name, x, tf32, strategy, **{f"weights[{i}]": (w, f"[K, N{i}]") for i, w in enumerate(weights)})
    return x, list(weights), fast, strategy or ""


_concat_gemm = Operator(
    "concat_gemm",
    "(Tensor x, Tensor[] weights, bool tf32, str strategy) -> Tensor",
    check=_check,
    outputs=_outputs,
    into=_into,
    places=lambda x, weights, tf32, _: _asked(x, weights, tf32),
    gradient=(_gradients, _keep),
    autocast=lower,
)


def concat_gemm(
    x: Tensor, weights: Sequence[Tensor], *, tf32: bool | None = None, strategy: str | None = None
) -> Tensor:
    """Products of one matrix with several, side by side in one output; nothing is concatenated.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., K]``, float16, bfloat16, float32 or float64, on a CUDA device (or on the CPU where Triton interprets).
    weights : sequence of torch.Tensor
        ``[K, N_i]`` each, of any widths and strides, of the dtype and on the device of `x`. Rows or columns that
        lie side by side in memory are taken as they are, so that ``linear.weight.T`` is no copy.
    tf32 : bool, optional
        Whether float32 is multiplied in TF32, with ten bits of mantissa. ``torch.backends.cuda.matmul.allow_tf32``
        where None. Other dtypes do not ask.
    strategy : str, optional
        ``"fused"``: one launch of Fusebook's kernel, which float64 does not have. ``"views"``: a product of torch's for
        each weight, each into its own columns of the output. Where None, the one that was faster for such sizes when
        this kind of GPU was tuned; in half types fused where torch would write columns that begin at no multiple of 16
        bytes, unless `x` or a weight has such rows too.

    Returns
    -------
    torch.Tensor
        ``[..., N_0 + N_1 + ...]``, contiguous, of the dtype of `x`. The fused kernel's sums are float32, rounded once.

    Raises
    ------
    TypeError
        For arguments that are no dense tensors, other dtypes, dtypes that differ, and float64 where the fused kernel is
        asked for.
    ValueError
        For no weights, shapes that do not match, tensors on different devices, an unknown strategy.

    Notes
    -----
    Up to four neighbouring weights of one layout share a launch; more take further launches into the same output.
    Tensor descriptors need addresses and strides that are multiples of 16 bytes. Where they are not, what is not so is
    copied first in half types and TF32, unless there is little to compute; else a slower kernel takes over. Works under
    `torch.compile`. Differentiable: gradients are torch's products, which follow
    ``torch.backends.cuda.matmul.allow_tf32`` whatever `tf32` was.

    Where descriptors fetch it, float32 is three products in TF32, added up: as exact as float32 but at the ends of its
    range. Numbers within a 4096th of the largest count as infinite, and those below 1e-34 lose digits. Torch's
    products, by ``"views"``, have neither limit.

    Examples
    --------
    >>> import fusebook, torch
    >>> x, w = torch.randn(8, 64, device="cuda"), torch.randn(64, 96, device="cuda")  # doctest: +SKIP
    >>> fusebook.concat_gemm(x, [w, w[:, :32]]).shape  # doctest: +SKIP
    torch.Size([8, 128])
    """
    return _concat_gemm.call(x, weights, tf32, strategy)
