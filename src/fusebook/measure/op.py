"""The card of an operator: its meaning, its cost, and its implementations.

A card is a frozen record of plain functions. Tests, benchmarks, tables, records and pages all read the same card.
Tolerances are in `fusebook.measure.check`, clocks in `fusebook.measure.timing`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusebook.measure import inputs

__all__ = ["Cost", "Dims", "Op", "Variant"]

#: One point of a sweep: the sizes of a problem by name, and words that name a kind of input.
#: ``{"M": 4096, "N": 1024}`` becomes columns of a table and the arguments of ``Op.make`` and ``Op.cost``.
#: What ``Op.draw`` returns has two words more, ``dtype`` and ``layout``, which those do not take.
Dims = Mapping[str, int | str]


@dataclass(frozen=True)
class Cost:
    """The DRAM traffic of a computation, and its arithmetic.

    Attributes
    ----------
    read, write : int
        Bytes.
    flop : int
        Floating-point operations.
    """

    read: int
    write: int
    flop: int


@dataclass(frozen=True)
class Variant:
    """One implementation of an operator.

    Attributes
    ----------
    run : callable
        Takes the result of `prepare`, or the inputs; returns a tensor or a tuple of tensors. Raises
        ``NotImplementedError(why)`` for a problem that it does not take.
    cost : callable, optional
        ``cost(itemsize, **dims) -> Cost`` if this implementation moves more than the least.
    needs : tuple of str
        What the machine must have: ``"cuda"``, or the name of a package that can be imported.
    prepare : callable, optional
        From the inputs to the arguments of `run`, untimed: packed weights, a bound session, a forward pass. It is
        repeated when the inputs change.
    math : str, optional
        ``"tf32"`` if float32 is multiplied in TF32; tolerance and roof follow.
    recompiles : bool
        It compiles for every shape, which takes longer than timing: few sizes of a card are enough.
    rate : str, optional
        ``"tf32"`` if TF32 matmuls help to find a float32 result: their rate is the roof, the tolerance is float32's.
    on_cpu : bool
        It computes in the host's memory, from copies that `prepare` made. Only its latency is measured, without
        copying the result to the GPU.
    in_place : bool
        It changes the copies that `prepare` made: the first call with these is checked.
    """

    run: Callable[..., Any]
    cost: Callable[..., Cost] | None = None
    needs: tuple[str, ...] = ("cuda",)
    prepare: Callable[..., tuple[Any, ...]] | None = None
    math: str | None = None
    recompiles: bool = False
    rate: str | None = None
    on_cpu: bool = False
    in_place: bool = False

    def given(self, *inputs: Any) -> tuple[Any, ...]:
        """The arguments of `run`: the inputs, or the result of `prepare`."""
        return inputs if self.prepare is None else self.prepare(*inputs)


@dataclass(frozen=True)
class Op:
    """The card of an operator.

    Attributes
    ----------
    name : str
        The name of its record and of its rows in tables.
    reference : callable
        The meaning, in plain PyTorch. The check runs it in float64.
    make : callable
        ``make(rng, dtype, **dims) -> inputs``, a tuple of tensors and plain values on the device of ``rng``.
    cost : callable
        ``cost(itemsize, **dims) -> Cost``: the least of any implementation.
    variants : mapping of str to Variant
        The first is the baseline.
    configs : mapping of str to sequence of Dims
        What benchmarks sweep: workloads.
    draw : callable
        ``draw(rng) -> Dims``, with `rng` a ``random.Random``: a random problem. It has a ``dtype`` and a ``layout``
        of `fusebook.measure.inputs.laid`, and does not depend on launch configs.
    edges : sequence of Dims
        What tests try: the smallest sizes that reach every branch.
    dtypes : sequence of torch.dtype
        The dtypes that are tested.
    meaning : callable, optional
        ``meaning(inputs, outputs)`` -> the floating-point tensors that are compared instead of the outputs, such as
        the distance to the chosen centre instead of a label, so that ties do not matter.
    rows : tuple of int
        The places of the inputs whose first axis is that of the outputs, row by row; empty where an operator has no
        rows that are computed each for itself.
    """

    name: str
    reference: Callable[..., Any]
    make: Callable[..., tuple[Any, ...]]
    cost: Callable[..., Cost]
    variants: Mapping[str, Variant]
    configs: Mapping[str, Sequence[Dims]]
    draw: Callable[[random.Random], Dims]
    edges: Sequence[Dims]
    dtypes: Sequence[torch.dtype] = field(default=(torch.float32, torch.float16, torch.bfloat16))
    meaning: Callable[..., Any] | None = None
    rows: tuple[int, ...] = ()

    def problem(self, seed: int, case: int) -> Dims:
        """A problem of a seed, drawn by itself: the tenth is the same however many are asked for."""
        return self.draw(random.Random(f"{self.name} {seed} {case}"))

    def made(self, dims: Dims, device: str) -> tuple[Any, ...]:
        """The inputs of a problem.

        Parameters
        ----------
        dims : Dims
            As `draw` returns them. The ``layout`` is that of the first matrix of floats, and of others with as
            many rows.
        device : str
            Where the inputs are made.
        """
        sizes = dict(dims)
        kind, how = getattr(torch, str(sizes.pop("dtype"))), str(sizes.pop("layout", "contiguous"))
        made = self.make(inputs.generator(0, device), kind, **sizes)
        data = [v for v in made if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() > 1]
        rows = len(data[0]) if data else 0
        return tuple(inputs.laid(v, how) if any(v is d for d in data) and len(v) == rows else v for v in made)
