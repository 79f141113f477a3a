"""What kernels that read the memory of other GPUs share: memory that all of them see, and a place to meet.

Each GPU of a group has memory that the others read and write over NVLink, `torch.distributed._symmetric_memory`. Nobody
waits for anybody there, so a kernel that reads what another GPU has written first meets the kernel of that GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from ._call import launch, launching


@triton.jit
def meet(times, flags, SLOTS, ME: tl.constexpr):
    """Wait until program p has come here for the `times`-th time on every GPU, for every program p by itself.

    What this program has written, and what ran before its kernel, the others see from here on, and it sees theirs.
    `flags` are [GPUs, SLOTS] in the memory of each GPU; ME is the number of this one.
    """
    p = tl.program_id(0)
    tl.debug_barrier()  # what any thread of the program wrote was written before one of them tells
    for r in tl.static_range(len(flags)):
        if r != ME:
            tl.atomic_xchg(flags[r] + ME * SLOTS + p, times, sem="release", scope="sys")
    for r in tl.static_range(len(flags)):
        if r != ME:
            # An atomic addition of nothing is a load that nobody may move or keep.
            told = tl.atomic_add(flags[ME] + r * SLOTS + p, 0, sem="acquire", scope="sys")
            while told - times < 0:  # the difference, which a counter that overflows does not confuse
                told = tl.atomic_add(flags[ME] + r * SLOTS + p, 0, sem="acquire", scope="sys")


@triton.jit
def _barrier(turns_ptr, flags, SLOTS, ME: tl.constexpr):
    times = tl.load(turns_ptr) + 1
    meet(times, flags, SLOTS, ME)
    tl.store(turns_ptr, times)


def reachable(group: Any = None) -> bool:
    """Whether all of a group are GPUs of one machine that can read each other's memory; all of it ask together."""
    if dist.get_world_size(group) == 1 or dist.get_backend(group) != "nccl":
        return False
    here, there = torch.cuda.current_device(), range(torch.cuda.device_count())
    reads = all(torch.cuda.can_device_access_peer(here, other) for other in there if other != here)
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, Path("/proc/sys/kernel/random/boot_id").read_text() if reads else None, group=group)
    return None not in every and len(set(every)) == 1  # a machine is known by when it started


class Peers:
    """The GPUs of a group, one a process, and the flags by which the programs of their kernels meet.

    `programs` are the most that a kernel has which meets. The group is that of all processes unless given.
    """

    def __init__(self, programs: int, group: Any = None) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.slots = programs
        #: How often each program has met. A kernel counts, so that a graph of it can be replayed.
        self.turns = torch.zeros(programs, dtype=torch.int32, device="cuda")
        self.flags = self.shared((self.world, programs), torch.int32)  # a tensor for each GPU

    def shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Memory of this shape on every GPU, full of zeros; all of the group ask for it together.

        A tensor for each GPU; that of `rank` is this one's own.
        """
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(shape, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device())).zero_()
        handle = symmetric.rendezvous(own, self.group)
        found = [own if r == self.rank else handle.get_buffer(r, shape, dtype) for r in range(self.world)]
        torch.cuda.synchronize()
        dist.barrier(self.group)  # nobody writes before all of them are zero
        return tuple(found)

    def barrier(self) -> None:
        """Wait on the current stream until the streams of all GPUs have come here."""
        with launching(self.turns):
            launch(_barrier, (1,), self.turns, self.flags, self.slots, ME=self.rank, num_warps=1)
