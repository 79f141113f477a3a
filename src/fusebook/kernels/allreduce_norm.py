"""What several GPUs hold in parts, added up, added to a residual, and normalised: the step between split layers.

For parts ``x_g [rows, N]``, one on each GPU g, and a residual ``r [rows, N]`` and weights ``w [N]``, alike on all,

    h = r + sum of x_g over all g
    y = h / sqrt(mean of h**2 over a row + eps) * w

Fused: the sum over GPUs with all that follows. Apart, an all-reduce writes the sum to memory and a kernel reads it
again. The least is to read the part of every GPU, the others' over NVLink, and r; and to write h and y.

Every GPU computes all rows, from the same numbers in the same order: the same bits on each. That is the least traffic
for two GPUs. Of G GPUs each reads G - 1 parts, where an all-reduce in two steps moves 2 (G - 1) / G of one: the plan
leaves many rows, and many GPUs, to that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from ._call import check_stored, empty_like, gpu, launch, launching, number, shapes
from ._peers import Peers, meet, reachable

__all__ = ["AllReduceNorm"]


# The unfused chain ----------------------------------------------------------------------------------------------------


def allreduce_norm_eager(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """By PyTorch, one operation after another; `x`, this GPU's part, becomes the sum."""
    dist.all_reduce(x)  # NVLink; write MN
    h = residual + x  # read 2MN, write MN
    return torch.nn.functional.rms_norm(h, weight.shape, weight, eps), h  # read MN, write MN


# The kernel -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def _allreduce_norm(
    y_ptr, h_ptr, parts, residual_ptr, weight_ptr, turns_ptr, flags, rows, N, eps, SLOTS,
    ME: tl.constexpr, MEET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows in turn, one a program at a time. MEET: the parts of other GPUs are there when their programs come."""
    p = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < N
    row = p.to(tl.int64)
    live = at < tl.where(row < rows, N, 0)
    # What needs nobody is on its way before the others are waited for.
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(parts[ME] + row * N + at, mask=live, other=0.0)
    residual = tl.load(residual_ptr + row * N + at, mask=live, other=0.0)
    if MEET:
        times = tl.load(turns_ptr + p) + 1
        meet(times, flags, SLOTS, ME)
        tl.store(turns_ptr + p, times)
    while row < rows:
        h = tl.zeros([BLOCK], tl.float32)
        for r in tl.static_range(len(parts)):
            if r == ME:
                h += own.to(tl.float32)
            else:
                h += tl.load(parts[r] + row * N + at, mask=inside, other=0.0).to(tl.float32)  # over NVLink
        h += residual.to(tl.float32)
        to = row * N + at
        row += tl.num_programs(0)
        live = at < tl.where(row < rows, N, 0)
        own = tl.load(parts[ME] + row * N + at, mask=live, other=0.0)  # read MN
        residual = tl.load(residual_ptr + row * N + at, mask=live, other=0.0)  # read MN
        tl.store(h_ptr + to, h.to(h_ptr.dtype.element_ty), mask=inside)  # write MN
        scale = tl.rsqrt(tl.sum(h * h, 0) / N + eps)
        tl.store(y_ptr + to, (h * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)  # write MN


# The plan -------------------------------------------------------------------------------------------------------------


#: How the parts become a sum: by NCCL, or whatever the group uses; by PyTorch's kernels on symmetric memory; by ours.
WAYS = ("group", "one-shot", "two-shot", "fused")


class Plan(NamedTuple):
    """How a call is made."""

    way: str  # of WAYS
    programs: int
    warps: int


def plan(rows: int, N: int, world: int, multiprocessors: int, way: str | None = None) -> Plan:
    """The way for so many rows over so many GPUs, and how the kernel is cut.

    Parameters
    ----------
    rows, N, world, multiprocessors : int
    way : str, optional
        One of `WAYS`; the fastest unless given.

    Returns
    -------
    Plan
    """
    if way is None:
        # Of two GPUs each needs all that the other has, however it gets it. Of more, few rows are a matter of latency,
        # and many of bytes, of which two steps move less.
        way = "fused" if world == 2 or (world - 1) * rows * N <= 2**19 else "two-shot"
    # A program on each multiprocessor has enough on its way to fill the link; more of them only wait for each other.
    return Plan(way, min(rows, multiprocessors), 8)


# The launcher ---------------------------------------------------------------------------------------------------------


def _multiprocessors() -> int:
    here = torch.cuda.current_device() if torch.cuda.is_available() else None
    return gpu(torch.device("cpu" if here is None else f"cuda:{here}"))[1]


class AllReduceNorm:
    """The sum of parts on all GPUs of a group, added to a residual and normalised.

    All processes of the group make one together, one process a GPU, and call it together. The memory of parts is its
    own, since the others read it: what makes a part writes it to `part`. There are two such memories, in turn: while
    the others may still read one part, the next is written to the other. So a CUDA graph holds an even number of calls.

    Parameters
    ----------
    rows, columns : int
        Of the largest part.
    dtype : torch.dtype
        Of parts, residuals, weights and results.
    group : torch.distributed.ProcessGroup, optional
        All processes unless given.

    Examples
    --------
    >>> reduce = fusebook.AllReduceNorm(4096, 8192)  # doctest: +SKIP
    >>> torch.mm(a, b, out=reduce.part(rows))  # doctest: +SKIP
    >>> y, h = reduce(residual, weight)  # doctest: +SKIP
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, *, group: Any = None) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.peers = Peers(_multiprocessors(), group) if reachable(group) else None
        self.turn = 0
        shape = (rows, columns)
        if self.peers is not None:
            self.parts = tuple(self.peers.shared(shape, dtype) for _ in range(2))
        else:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self.parts = tuple((torch.zeros(shape, dtype=dtype, device=device),) * self.world for _ in range(2))

    def part(self, rows: int) -> Tensor:
        """Where this GPU's part of the next sum is to be written, as a whole.

        Parameters
        ----------
        rows : int

        Returns
        -------
        torch.Tensor
            ``[rows, columns]``.

        Raises
        ------
        ValueError
            For more rows than there is memory for.
        """
        own = self.parts[self.turn][self.rank]
        if not 0 <= rows <= len(own):
            raise ValueError(f"AllReduceNorm: expected 0 to {len(own)} rows, got {rows}; make one for more rows")
        return own[:rows]

    def __call__(
        self, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, way: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add up the parts that were written, add the residual, and normalise.

        Parameters
        ----------
        residual : torch.Tensor
            ``[rows, columns]``, the same on all GPUs.
        weight : torch.Tensor
            ``[columns]``, the same on all GPUs.
        eps : float
        way : str, optional
            ``group``, ``one-shot``, ``two-shot`` or ``fused``; the fastest unless given. All GPUs are given the same.

        Returns
        -------
        y, h : torch.Tensor
            The normalised rows, and the sums that are the next residual; the same bits on all GPUs.

        Raises
        ------
        TypeError, ValueError
            For what is no tensor, of another dtype, shape or device than announced, and for an unknown way, or one that
            GPUs which do not read each other's memory cannot go.
        NotImplementedError
            For a residual or a weight that requires a gradient, which results do not have.
        """
        name = "AllReduceNorm"
        x = self.part(len(residual) if isinstance(residual, Tensor) and residual.dim() else 0)
        shapes(name, **{"a part": (x, "[rows, D]")}, residual=(residual, "[rows, D]"), weight=(weight, "[D]"))
        check_stored(name, "residual", residual)
        check_stored(name, "weight", weight)
        eps = number(name, "eps", eps, "give a float such as 1e-6")
        if torch.is_grad_enabled() and (residual.requires_grad or weight.requires_grad):
            raise NotImplementedError(
                f"{name}: expected residual and weight that require no gradient, since its results have none; detach "
                "them, or call it under torch.no_grad()"
            )
        own = ("group",) if self.peers is None else WAYS
        made = plan(len(x), x.shape[1], self.world, _multiprocessors(), way if self.peers or way else "group")
        if made.way not in own:
            raise ValueError(f"{name}: expected the way to be one of {', '.join(own)}, got {made.way!r}; choose one")
        parts = tuple(part[: len(x)] for part in self.parts[self.turn])
        self.turn = 1 - self.turn
        if not x.numel():
            return empty_like(residual), empty_like(residual)
        if made.way != "fused":
            parts = (self._sum(x, made.way),)
        return self._norm(parts, residual.contiguous(), weight.contiguous(), eps, made)

    def _sum(self, x: Tensor, way: str) -> Tensor:
        if way == "group":
            if self.world > 1:
                dist.all_reduce(x, group=self.group)
            return x
        named = (self.group or dist.distributed_c10d._get_default_group()).group_name
        if way == "one-shot":
            return torch.ops.symm_mem.one_shot_all_reduce(x, "sum", named)
        return torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", named)

    def _norm(
        self, parts: tuple[Tensor, ...], residual: Tensor, weight: Tensor, eps: float, made: Plan
    ) -> tuple[Tensor, Tensor]:
        y, h = empty_like(residual), empty_like(residual)
        meets = len(parts) > 1
        with launching(residual):
            launch(
                _allreduce_norm, (made.programs,),
                y, h, parts, residual, weight,
                *((self.peers.turns, self.peers.flags) if meets and self.peers else (None, parts)),
                *residual.shape, eps, self.peers.slots if self.peers else 1,
                ME=self.rank if meets else 0, MEET=meets, BLOCK=triton.next_power_of_2(residual.shape[1]),
                num_warps=made.warps,
            )  # fmt: skip
        return y, h
