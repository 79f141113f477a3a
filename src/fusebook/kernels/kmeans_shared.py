"""K-means over several GPUs: an iteration of points that lie on all of them.

Each GPU has some of the points, and all have the same centres. A GPU labels its points and adds them up, k (d + 1)
numbers; what all GPUs have added up makes the new centres, the same bits on each of them.

The sums are added by NCCL, or by whatever a group of processes uses. Where GPUs write to each other's memory, the
kernel that makes centres of sums sends and receives them itself. Sums are float64 and added in the order of the GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from . import kmeans_update  # noqa: F401  (it defines the parts of the step)
from ._call import OPERATORS, check_stored, check_tensor, empty_like, integer, launch, launching
from ._peers import Peers, reachable
from ._points import DTYPES

__all__ = ["SharedKMeans", "kmeans_share"]


# The kernel -----------------------------------------------------------------------------------------------------------


@triton.jit
def _kmeans_shared_means(
    out_ptr, words, parts_ptr, old_ptr, turns_ptr, PARTS, K, D,
    ME: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_K centres of what all GPUs have added up of their points: PARTS of it here, [K, D + 1] each.

    A sum is sent in two words of 64 bits: half of it, and the number of the iteration. A word arrives whole, so who
    finds the number there has the half, and no flag is waited for. `words` are [GPUs, 2, K, D + 1, 2] in the memory of
    each GPU: from each sender two in turn, because who sends for the next time has read what was sent for the last.
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
    tl.debug_barrier()  # every warp has read the count: one that came late would wait for a time that nobody sends
    tl.store(turns_ptr + p, times)


def _shared_plan(parts: int, k: int, d: int) -> tuple[int, int, int, int]:
    """Parts and centres that a program adds up at a time, its columns, and its warps.

    There are as many sums as threads, but for a single warp: of fewer, several warps would look for a copy of a word,
    each at a time of its own, and one of them would decide for all. A warp that waits alone looks again sooner, too.
    """
    wide = triton.next_power_of_2(d + 1)
    centres = 4 if k * wide <= 512 else 2
    most = max(1, 4096 // (centres * wide))
    return min(triton.next_power_of_2(parts), most), centres, wide, max(1, min(4, centres * wide // 32))


# The launcher ---------------------------------------------------------------------------------------------------------

#: Points that no two programs share a part of, whatever the plan.
_WHOLE = 8192


def kmeans_share(n: int, rank: int, world: int) -> slice:
    """Which of n points are a process's: about as many for each, cut where a program's points end.

    So programs add up the same points however many GPUs there are.

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
        Whether GPUs send each other their sums themselves; where they can, unless told. Otherwise the group adds them.
    """

    def __init__(self, k: int, d: int, *, group: Any = None, nvlink: bool | None = None) -> None:
        self.k, self.d = k, d
        self.group = group
        self.alone = dist.get_world_size(group) == 1
        self.peers = None
        if reachable(group) if nvlink is None else nvlink:
            self.peers = Peers(triton.cdiv(k, _shared_plan(1, k, d)[1]), group)
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
        new = empty_like(centres)  # contiguous as well
        block, block_k, block_d, warps = _shared_plan(len(parts), self.k, self.d)
        with launching(points):
            launch(
                _kmeans_shared_means, (self.peers.slots,),
                new, self.words, parts, centres, self.peers.turns, len(parts), self.k, self.d,
                ME=self.peers.rank, BLOCK=block, BLOCK_K=block_k, BLOCK_D=block_d, num_warps=warps,
            )  # fmt: skip
        return labels, new
