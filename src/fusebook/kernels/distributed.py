# SPDX-License-Identifier: BSD-3-Clause
# From Fusebook, src/fusebook/kernels/distributed.py. It needs torch, Triton, NumPy, _call.py and kmeans.py.
"""Kernels on several GPUs: an iteration of k-means, and an all-reduce fused with a norm.

Each GPU of a group has memory that the others read and write over NVLink (`torch.distributed._symmetric_memory`).
Nothing there waits: a kernel that reads what another GPU has written first meets the kernel of that GPU.

*K-means.* Each GPU has some of the points, and all have the same centres. A GPU labels its points and adds them up, k
(d + 1) numbers. The sums of all GPUs give the new centres, with the same bits on each GPU. NCCL, or the backend of the
group, adds the sums. If GPUs write to each other's memory, the kernel that computes the centres sends and receives the
sums itself. Sums are float64 and added in the order of the GPUs.

*All-reduce and norm*, the step between layers that are split over GPUs. For parts ``x_g [rows, N]``, one on each GPU g,
and a residual ``r [rows, N]`` and weights ``w [N]``, the same on all,

    h = r + sum of x_g over all g
    y = h / sqrt(mean of h**2 over a row + eps) * w

The kernel fuses the sum over GPUs with the rest. Unfused, an all-reduce writes the sum to memory and a kernel reads it
again. The least traffic is to read the part of every GPU, the others' over NVLink, and r; and to write h and y.

Every GPU computes all rows, from the same numbers in the same order: the same bits on each. That is the least traffic
for two GPUs. Of G GPUs each reads G - 1 parts, and an all-reduce in two steps moves only 2 (G - 1) / G of one. So that
all-reduce is used on more than two GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from ._call import (
    OPERATORS,
    check_stored,
    check_tensor,
    gpu,
    integer,
    launch,
    launching,
    number,
    shapes,
)
from .kmeans import DTYPES  # and its operators

__all__ = ["AllReduceNorm", "SharedKMeans", "kmeans_share"]

# Memory that all GPUs see, and how their programs meet ---------------------------------------------------------------


@triton.jit
def meet(times, flags, SLOTS, ME: tl.constexpr):
    """Wait until program p of every GPU has called this for the `times`-th time; each program p waits alone.

    From here on, the other GPUs see what this program and earlier kernels have written, and it sees their writes.
    `flags` are [GPUs, SLOTS] in the memory of each GPU; ME is the number of this one.
    """
    p = tl.program_id(0)
    tl.debug_barrier()  # all threads have written before one of them signals
    for r in tl.static_range(len(flags)):
        if r != ME:
            tl.atomic_xchg(flags[r] + ME * SLOTS + p, times, sem="release", scope="sys")
    for r in tl.static_range(len(flags)):
        if r != ME:
            # An atomic addition of 0 is a load that is neither moved nor cached.
            seen = tl.atomic_add(flags[ME] + r * SLOTS + p, 0, sem="acquire", scope="sys")
            while seen - times < 0:  # the difference, which a counter that overflows does not confuse
                seen = tl.atomic_add(flags[ME] + r * SLOTS + p, 0, sem="acquire", scope="sys")


@triton.jit
def _barrier(turns_ptr, flags, SLOTS, ME: tl.constexpr):
    times = tl.load(turns_ptr) + 1
    meet(times, flags, SLOTS, ME)
    tl.store(turns_ptr, times)


def reachable(group: Any = None) -> bool:
    """Whether a group is GPUs of one machine that can read each other's memory. All of the group call this together."""
    if dist.get_world_size(group) == 1 or dist.get_backend(group) != "nccl":
        return False
    here, there = torch.cuda.current_device(), range(torch.cuda.device_count())
    reads = all(torch.cuda.can_device_access_peer(here, other) for other in there if other != here)
    machine = Path("/proc/sys/kernel/random/boot_id").read_text() if reads else None  # an id of the machine's start
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, (machine, here), group=group)
    machines, numbers = ({*each} for each in zip(*every, strict=True))
    # Symmetric memory refuses two GPUs of one number, as in processes that CUDA_VISIBLE_DEVICES shows different ones.
    return None not in machines and len(machines) == 1 and len(numbers) == len(every)


class Peers:
    """The GPUs of a group, one a process, and the flags by which the programs of their kernels meet.

    `programs` is the largest number of programs of a kernel that meets. The group is all processes unless given.
    """

    def __init__(self, programs: int, group: Any = None) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.slots = programs
        #: How often each program has met. A kernel counts, so that a graph of it can be replayed.
        self.turns = torch.zeros(programs, dtype=torch.int32, device="cuda")
        self.flags = self.shared((self.world, programs), torch.int32)  # a tensor for each GPU

    def shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Memory of this shape on every GPU, full of zeros. All of the group call this together.

        Returns a tensor for each GPU; that of `rank` is on this GPU.
        """
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(shape, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device())).zero_()
        handle = symmetric.rendezvous(own, self.group)
        found = [own if r == self.rank else handle.get_buffer(r, shape, dtype) for r in range(self.world)]
        torch.cuda.synchronize()
        dist.barrier(self.group)  # no GPU writes before all of them are zero
        return tuple(found)

    def barrier(self) -> None:
        """Make the current stream wait for those of all GPUs."""
        with launching(self.turns):
            launch(_barrier, (1,), self.turns, self.flags, self.slots, ME=self.rank, num_warps=1)


# K-means -------------------------------------------------------------------------------------------------------------


@triton.jit
def _kmeans_shared_means(
    out_ptr, words, parts_ptr, old_ptr, turns_ptr, PARTS, K, D,
    ME: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_K centres from the sums of all GPUs: PARTS of them on this GPU, [K, D + 1] each.

    A sum is sent in two words of 64 bits, each half of it and the number of the iteration. A word arrives whole: a GPU
    that finds the number there has that half, and needs no flag. `words` are [GPUs, 2, K, D + 1, 2] in the memory of
    each GPU. Each sender writes to two in turn: it has read those of the last iteration before it sends the next.
    """
    LOW: tl.constexpr = 0xFFFFFFFF
    p = tl.program_id(0)
    times = tl.load(turns_ptr + p) + 1
    number = times.to(tl.int64) & LOW
    j = p * BLOCK_K + tl.arange(0, BLOCK_K)
    a = tl.arange(0, BLOCK_D)
    inside = (j < K)[:, None] & (a <= D)[None, :]
    at = j[:, None] * (D + 1) + a[None, :]  # [BLOCK_K, BLOCK_D]
    known = (j < K)[:, None] & (a < D)[None, :]
    old = tl.load(old_ptr + j[:, None] * D + a[None, :], mask=known, other=0.0).to(tl.float64)
    own = tl.zeros([BLOCK_K, BLOCK_D], tl.float64)
    for first in range(0, PARTS, BLOCK):
        part = first + tl.arange(0, BLOCK)
        live = (part < PARTS)[:, None, None] & inside[None, :, :]
        x = tl.load(parts_ptr + part[:, None, None] * (K * (D + 1)) + at[None, :, :], mask=live, other=0.0)
        own += tl.sum(x.to(tl.float64), 0)
    bits = own.to(tl.int64, bitcast=True)
    turn = times & 1
    for r in tl.static_range(len(words)):
        if r != ME:
            to = words[r] + 2 * ((2 * ME + turn) * (K * (D + 1)) + at)
            tl.atomic_xchg(to, (bits & ~LOW) | number, mask=inside, sem="relaxed", scope="sys")
            tl.atomic_xchg(to + 1, (bits << 32) | number, mask=inside, sem="relaxed", scope="sys")
    total = tl.zeros([BLOCK_K, BLOCK_D], tl.float64)
    for r in tl.static_range(len(words)):
        if r == ME:
            total += own
        else:
            come = words[ME] + 2 * ((2 * r + turn) * (K * (D + 1)) + at)
            high = tl.load(come, mask=inside, other=number, volatile=True)
            low = tl.load(come + 1, mask=inside, other=number, volatile=True)
            while tl.max(tl.max((((high ^ number) | (low ^ number)) & LOW), 1), 0) != 0:
                high = tl.load(come, mask=inside, other=number, volatile=True)
                low = tl.load(come + 1, mask=inside, other=number, volatile=True)
            total += ((high & ~LOW) | ((low >> 32) & LOW)).to(tl.float64, bitcast=True)
    many = tl.sum(tl.where((a == D)[None, :], total, 0.0), 1)  # [BLOCK_K]
    mean = tl.where((many > 0)[:, None], total / many[:, None], old)
    tl.store(out_ptr + j[:, None] * D + a[None, :], mean.to(out_ptr.dtype.element_ty), mask=known)
    tl.debug_barrier()  # every warp has read the count: a late one would wait for an iteration that is not sent
    tl.store(turns_ptr + p, times)


def _shared_config(parts: int, k: int, d: int) -> tuple[int, int, int, int]:
    """Parts and centres that a program adds up at a time, its columns, and its warps.

    There are at least as many sums as threads, except with a single warp. With fewer sums, several warps would poll for
    a copy of one word at different times, and one of them would decide for all. A single warp also polls more often.
    """
    wide = triton.next_power_of_2(d + 1)
    centres = 4 if k * wide <= 512 else 2
    most = max(1, 4096 // (centres * wide))
    return min(triton.next_power_of_2(parts), most), centres, wide, max(1, min(4, centres * wide // 32))


#: No two programs share so many points, whatever the launch config.
_WHOLE = 8192


def kmeans_share(n: int, rank: int, world: int) -> slice:
    """The share of n points of a process: about as many for each, cut where the points of a program end.

    So programs add up the same points for any number of GPUs.

    Parameters
    ----------
    n, rank, world : int

    Returns
    -------
    slice
        Empty for some where there are few points.
    """
    name = "kmeans_share"
    n = integer(name, "n", n, "give the number of points", "of 0 or more", lambda n: n >= 0)
    world = integer(name, "world", world, "give the number of processes", "of 1 or more", lambda world: world >= 1)
    rank = integer(name, "rank", rank, "give that of a process", f"from 0 to {world - 1}", lambda r: 0 <= r < world)
    whole = triton.cdiv(n, _WHOLE)
    begin, end = (min(n, whole * r // world * _WHOLE) for r in (rank, rank + 1))
    return slice(begin, end)


class SharedKMeans:
    """Iterations of k-means over the points of all processes of a group, one a GPU.

    All processes make one together, and call it together. For a CUDA graph, too: it is replayed on all of them.

    Parameters
    ----------
    k, d : int
        The number of centres and of coordinates.
    group : torch.distributed.ProcessGroup, optional
        All processes unless given.
    nvlink : bool, optional
        Whether GPUs send each other their sums themselves. By default, if they can. Otherwise the group adds them.
    """

    def __init__(self, k: int, d: int, *, group: Any = None, nvlink: bool | None = None) -> None:
        self.k, self.d = k, d
        self.group = group
        self.alone = dist.get_world_size(group) == 1
        self.peers = None
        if reachable(group) if nvlink is None else nvlink:
            self.peers = Peers(triton.cdiv(k, _shared_config(1, k, d)[1]), group)
            self.words = self.peers.shared((self.peers.world, 2, k, d + 1, 2), torch.int64)

    def __call__(
        self, points: Tensor, centres: Tensor, *, label_dtype: torch.dtype = torch.int64
    ) -> tuple[Tensor, Tensor]:
        """Label this process's points, and move the centres to the means of all points.

        Parameters
        ----------
        points : torch.Tensor
            ``[n, d]``, those of this process: none, too.
        centres : torch.Tensor
            ``[k, d]``, the same in all processes.
        label_dtype : torch.dtype

        Returns
        -------
        labels : torch.Tensor
            ``[n]``.
        centres : torch.Tensor
            ``[k, d]``, the same bits in all processes; one without points stays where it was.

        Raises
        ------
        TypeError, ValueError
            As `fusebook.kmeans_assign`; ValueError for centres of another shape than was announced.
        """
        for what, value in (("points", points), ("centres", centres)):
            check_tensor("SharedKMeans", what, value, DTYPES)
            check_stored("SharedKMeans", what, value)
        if tuple(centres.shape) != (self.k, self.d):
            raise ValueError(
                f"SharedKMeans: expected centres of shape {(self.k, self.d)}, got {tuple(centres.shape)}; make another"
            )
        if self.alone:
            return OPERATORS["kmeans_step"](points, centres, label_dtype)
        labels, parts = OPERATORS["kmeans_sums"](points, centres, label_dtype)
        if self.peers is None:
            total = parts.sum(0, dtype=torch.float64, keepdim=True)
            dist.all_reduce(total, group=self.group)
            return labels, OPERATORS["kmeans_means"](total, centres)
        centres = centres.contiguous()
        new = torch.empty_like(centres)  # contiguous as well
        block, block_k, block_d, warps = _shared_config(len(parts), self.k, self.d)
        with launching(points):
            launch(
                _kmeans_shared_means, (self.peers.slots,),
                new, self.words, parts, centres, self.peers.turns, len(parts), self.k, self.d,
                ME=self.peers.rank, BLOCK=block, BLOCK_K=block_k, BLOCK_D=block_d, num_warps=warps,
            )  # fmt: skip
        return labels, new


# All-reduce and norm -------------------------------------------------------------------------------------------------


def allreduce_norm_eager(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Separate PyTorch operations; `x`, the part of this GPU, becomes the sum."""
    dist.all_reduce(x)  # NVLink; write MN
    h = residual + x  # read 2MN, write MN
    return torch.nn.functional.rms_norm(h, weight.shape, weight, eps), h  # read MN, write MN


@triton.jit(do_not_specialize=["rows"])
def _allreduce_norm(
    y_ptr, h_ptr, parts, residual_ptr, weight_ptr, turns_ptr, flags, rows, N, eps, SLOTS,
    ME: tl.constexpr, MEET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs take rows in turn. MEET: the parts of other GPUs are complete when their programs arrive."""
    p = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < N
    row = p.to(tl.int64)
    live = at < tl.where(row < rows, N, 0)
    # Loads that need no other GPU start before the wait.
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


#: How the parts are added: by NCCL or the group's backend, by PyTorch's kernels on symmetric memory, or fused.
WAYS = ("group", "one-shot", "two-shot", "fused")


class Config(NamedTuple):
    """Launch config of a call."""

    way: str  # of WAYS
    programs: int
    warps: int


def allreduce_config(rows: int, N: int, world: int, multiprocessors: int, way: str | None = None) -> Config:
    """The implementation for so many rows over so many GPUs, and its launch config.

    Parameters
    ----------
    rows, N, world, multiprocessors : int
    way : str, optional
        One of `WAYS`; the fastest unless given.

    Returns
    -------
    Config
    """
    if way is None:
        # With two GPUs, each needs all data of the other in any case. With more, two steps move less, and few rows wait
        # for fewer flags.
        way = "fused" if world == 2 else "two-shot"
    # One program on each multiprocessor has enough loads in flight to fill the link.
    return Config(way, min(rows, multiprocessors), 8)


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
        made = allreduce_config(
            len(x), x.shape[1], self.world, _multiprocessors(), way if self.peers or way else "group"
        )
        if made.way not in own:
            raise ValueError(f"{name}: expected the way to be one of {', '.join(own)}, got {made.way!r}; choose one")
        parts = tuple(part[: len(x)] for part in self.parts[self.turn])
        self.turn = 1 - self.turn
        if not x.numel():
            return torch.empty_like(residual), torch.empty_like(residual)
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
        self, parts: tuple[Tensor, ...], residual: Tensor, weight: Tensor, eps: float, made: Config
    ) -> tuple[Tensor, Tensor]:
        y, h = torch.empty_like(residual), torch.empty_like(residual)
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
