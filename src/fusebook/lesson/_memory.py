"""A lesson whose subject is memory: its verdict, its pictures of memory over time, and when to use the library."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pandas as pd
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from fusebook import tables
from fusebook.lesson import _numbers, _show, picture
from fusebook.lesson._draw import _AMBER, _BLUE, _WIDTH, _arrow, _box, _drawing, _text
from fusebook.lesson._page import Page, _or_banner
from fusebook.lesson._results import measured
from fusebook.lesson._show import Shown
from fusebook.measure import inputs
from fusebook.measure.op import Op

__all__ = ["MemoryPage", "counted", "over_time", "pairs"]

GIB = 2**30


# Memory, counted ------------------------------------------------------------------------------------------------------


class _Live(TorchDispatchMode):
    """Note the bytes that tensors hold after each operation; those from before count nothing."""

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        held = [v.untyped_storage() for v in given if isinstance(v, torch.Tensor)]
        self.before = {storage._cdata for storage in held}
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor) and (storage := made.untyped_storage())._cdata not in self.before:
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()}
        self.seen.append(sum(size for _, size in self.held.values()))
        return out


def counted(op: Op, function: Callable[..., Any], dims: Mapping[str, int], dtype: torch.dtype) -> list[int]:
    """Bytes that a function holds beyond its inputs after each of its operations, of tensors on the meta device.

    The meta device has shapes and no memory. Triton kernels are not launched, and what they fill is given to them.

    Parameters
    ----------
    op : Op
        Whose inputs it takes.
    function : callable
    dims : mapping of str to int
        Sizes of the problem.
    dtype : torch.dtype
    """
    few = op.make(inputs.generator(0, "cpu"), dtype, **dict.fromkeys(dims, 2))
    shapes = iter(_shapes(op, dims))
    given = [v.new_empty(next(shapes), device="meta") if isinstance(v, torch.Tensor) else v for v in few]
    with mock.patch.object(JITFunction, "run"), mock.patch.object(InterpretedFunction, "run"), _Live(given) as live:
        function(*given)
    return live.seen


def _shapes(op: Op, dims: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The shapes of an operator's inputs, from those at two sets of small primes."""
    primes = dict(zip(dims, (3, 5, 7, 11), strict=False))
    names = {prime: name for name, prime in primes.items()}
    made = op.make(inputs.generator(0, "cpu"), torch.float32, **primes)
    return [tuple(dims[names[n]] for n in v.shape) for v in made if isinstance(v, torch.Tensor)]


# Pictures -------------------------------------------------------------------------------------------------------------


def over_time(caption: str, held: Mapping[str, Sequence[float]]) -> Shown:
    """What implementations hold over time, each in a panel, to one scale.

    Parameters
    ----------
    caption : str
    held : mapping of str to sequence of float
        By implementation: GiB after each operation.
    """
    top, height, gap, left = 20.0, 96.0, 14.0, 8.0
    width = (_WIDTH - 2 * left - gap * (len(held) - 1)) / len(held)
    most = max(max(values) for values in held.values())
    parts, told, ground = [], [], top + height
    for i, (name, values) in enumerate(held.items()):
        x, step = left + i * (width + gap), width / len(values)
        points = [f"{x:.1f},{ground:.1f}"]
        for k, value in enumerate(values):
            y = ground - height * value / most
            points += [f"{x + k * step:.1f},{y:.1f}", f"{x + (k + 1) * step:.1f},{y:.1f}"]
        points.append(f"{x + width:.1f},{ground:.1f}")
        peak = max(values)
        at = max(ground - height * peak / most - 5, 12)
        parts.append(f'<polygon points="{" ".join(points)}" fill="{_BLUE}" fill-opacity="0.25" stroke="{_BLUE}"/>')
        parts.append(_text(x + width / 2, at, f"{peak:.2f} GiB", "middle"))
        parts.append(_text(x + width / 2, ground + 16, name, "middle"))
        told.append(f"{name} holds {peak:.2f} GiB at most")
    parts.append(_arrow(left, ground + 26, _WIDTH - left, ground + 26))
    parts.append(_text(_WIDTH / 2, ground + 42, "operations, in their order", "middle"))
    return _drawing(caption, told, ground + 48, parts)


def pairs(caption: str, frame: pd.DataFrame, together: bool = False) -> Shown:
    """Two numbers of each row as bars in two panels, such as time and memory.

    Parameters
    ----------
    caption : str
    frame : pandas.DataFrame
        Two columns, whose titles end in their unit; its index names the rows.
    together : bool
        Whether both panels have one scale.
    """
    left, top, step = max(84.0, 14 + 6.2 * max(map(len, map(str, frame.index)))), 18.0, 21.0
    width = (_WIDTH - left - 20) / 2 - 40
    panels = dict(zip(map(str, frame), ((left, _AMBER), (left + width + 60, _BLUE)), strict=True))
    parts = [_text(x, 12, title) for title, (x, _) in panels.items()]
    told = []
    for i, (label, row) in enumerate(zip(frame.index, frame.to_dict("records"), strict=True)):
        y = top + i * step
        parts.append(_text(left - 8, y + 13, str(label), "end"))
        words = []
        for title, (x, colour) in panels.items():
            unit = title.split()[-1]
            if math.isnan(row[title]):  # as the record says: the GPU did not stay busy during the call
                words.append("not measured")
                parts.append(_text(x, y + 13, "not measured"))
                continue
            shown = f"{row[title]:{'.2f' if unit == 'GiB' else '.1f'}}"
            words.append(f"{shown} {unit}")
            long = width * row[title] / float((frame if together else frame[[title]]).max().max())
            parts += [_box(x, y, long, 16, colour), _text(x + long + 5, y + 13, shown)]
        told.append(f"{label}: {', '.join(words)}")
    return _drawing(caption, told, top + step * len(frame) + 4, parts)


# The page -------------------------------------------------------------------------------------------------------------


def _size(own: Any, frame: pd.DataFrame) -> str:
    return " x ".join(f"{own[name]:.0f}" for name in tables.dims(frame))


def _beyond(frame: pd.DataFrame) -> pd.Series:
    """GiB at the peak beyond inputs and gradients: logits, workspaces and the loss."""
    return (frame["peak_bytes"] - frame["write_bytes"]) / GIB


class MemoryPage(Page):
    """The page of a lesson whose subject is memory; its outputs are gradients."""

    @_or_banner
    def verdict(self) -> Shown:
        """The box: memory at one size, time at the same size, and where all logits fit."""
        frame = self._everything()
        point = self._point(frame)
        point = point[point["status"] == "ok"]
        own, beyond = point.loc["fusebook"], _beyond(point).sort_values()
        size = self.about.WORDS.format(**{name: own[name] for name in self.about.EXAMPLE})
        saved = ", ".join(f"{name} {gib:.2f} GiB" for name, gib in beyond.drop("fusebook").items())
        gpu = point["gpu_us"].dropna().drop("fusebook").sort_values() / 1000
        slower = ", ".join(f"{name} {ms:.1f} ms" for name, ms in gpu.items())
        lines = [
            f"**Memory.** With {size}, the peak of a call is **{beyond['fusebook']:.2f} GiB** above its inputs "
            f"and gradients. Others: {saved}. The gradients are {own['write_bytes'] / GIB:.2f} GiB in each.",
            f"**Time.** It takes **{own['gpu_us'] / 1000:.1f} ms** of GPU time. Others: {slower}.",
            self._smaller(frame),
        ]
        bars = dict(beyond.sort_values(ascending=False).rename({"fusebook": "Fusebook"}))
        shown = picture.bars(
            f"Peak memory of {_size(own, frame)}, {own['dtype']}, above inputs and gradients. "
            "torch is a matmul and PyTorch's loss; torch.compile compiles the two.",
            bars,
            {n: f"{gib:.2f} GiB" for n, gib in bars.items()},
            ["Fusebook"],
        )
        return self._box(lines, shown, _numbers.origin(frame))

    def _point(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The implementations at one size, without the baseline that has a line per operation."""
        point = _numbers._point(frame, self.about.EXAMPLE)
        point = point[point["variant"] != next(iter(self.op.variants))]
        return point.drop_duplicates("variant").set_index("variant")

    def _smaller(self, frame: pd.DataFrame) -> str:
        """Where other implementations take no more memory."""
        ok = tables.where(frame, status="ok")
        peak = ok.assign(size=tables.label(ok)).pivot_table("peak_bytes", "size", "variant", sort=False)
        least = peak.drop(columns="fusebook").min(axis=1)
        equal = peak.index[peak["fusebook"] > (1 - tables.WITHIN) * least]
        if not len(equal):
            return f"**Sizes.** No other implementation takes as little memory at any of {len(peak)} sizes."
        best = peak.drop(columns="fusebook").loc[equal].idxmin(axis=1)
        named = ", ".join(f"{size.replace('x', ' x ')} ({best[size]})" for size in equal)
        names = " x ".join(tables.dims(frame))
        return (
            f"**Sizes.** At {len(equal)} of {len(peak)} sizes, another implementation takes as little memory or less: "
            f"{names} = {named}."
        )

    def memory(self, **functions: Callable[..., Any]) -> Shown:
        """Count the memory that functions hold over time at the verdict's size, and draw it.

        Parameters
        ----------
        **functions : callable
            By name; each takes the operator's inputs.
        """
        dims = {name: value for name, value in self.about.EXAMPLE.items() if name != "dtype"}
        dtype = getattr(torch, self.about.EXAMPLE["dtype"])
        held = {name: [v / GIB for v in counted(self.op, f, dims, dtype)] for name, f in functions.items()}
        size = " x ".join(map(str, dims.values()))
        return over_time(
            f"Counted at {size} in {self.about.EXAMPLE['dtype']}: memory beyond the inputs, gradients included. "
            "The count leaves out what matmuls take for themselves.",
            held,
        )._now()

    @_or_banner
    def trade(self) -> Shown:
        """Time and memory of the library by the rows of a chunk: measured on a GPU, else replayed."""
        if "rows" not in self.frames.known:
            spec = self.about.FRAMES["rows"]
            frame = measured(spec.name, spec.function)
            self.frames.known["rows"] = spec.renamed(frame)
            self.frames.known["rows"].attrs.update(frame.attrs)
        frame = self.frames["rows"]
        shown = pd.DataFrame({"memory in GiB": frame["beyond"] / GIB, "GPU time in ms": frame["gpu_us"] / 1000})
        shown.index = pd.Index([f"{rows} rows" for rows in frame["step"]])
        size = " x ".join(str(v) for name, v in self.about.EXAMPLE.items() if name != "dtype")
        caption = f"{size} by rows of a chunk, memory beyond inputs and gradients; {_numbers.origin(frame)}."
        return pairs(caption, shown)._now()

    @_or_banner
    def use(self) -> Shown:
        """When to use the library: memory and times of every implementation at one size, and how to install it."""
        frame = self._everything()
        point = self._point(frame)
        told = pd.DataFrame(
            {
                "GiB beyond inputs and gradients": _beyond(point),
                "GPU time, ms": point["gpu_us"] / 1000,
                "end-to-end, ms": tables.paid(point) / 1000,
            }
        )
        ok = point["status"].eq("ok")
        told = told[ok].sort_values("GiB beyond inputs and gradients")
        told = told.rename(index={"fusebook": f"fusebook.{self.op.name}"})
        told.index.name = None
        own: Any = point.loc["fusebook"]
        size = f"{_size(own, frame)} in {own['dtype']}"
        made = _show.table(told, f"{size}; without a GPU time: the call waits for the GPU", fold=False)
        why = {"wrong": "its error is above the tolerance", "refused": "it raised an error"}
        left = [
            f"`{name}` has no row, as {why.get(row['status'], row['status'])}: {re.split('[;:]', row['note'])[0]}."
            for name, row in point[~ok].iterrows()
        ]
        install = _numbers.install()
        return Shown(
            f"{made._repr_html_()}<p>{_numbers.joined(left)}</p><p>{_numbers.joined(install)}</p>",
            "\n".join([*(_numbers.plainly([line]) for line in left), _numbers.plainly(install)]),
        )._now()

    def _staircase(self, frame: pd.DataFrame, steps: Mapping[str, Callable[..., Any]]) -> tuple[pd.DataFrame, str]:
        wide = frame.drop_duplicates("step").set_index("step").reindex([*steps, "fusebook"])
        lines = {name: _show.lines_of(*_numbers.plain(step)) for name, step in steps.items()}
        lines["fusebook"] = _numbers.library_lines(self.op)
        told = pd.DataFrame(
            {
                "GiB, gradients included": wide["peak_bytes"] / GIB,
                "GPU time, ms": wide["gpu_us"] / 1000,
                "lines": pd.Series(lines),
            }
        )
        numbered = {name: f"step {i}, {name}" if i else name for i, name in enumerate(steps)}
        told = told.rename(index={**numbered, "fusebook": f"fusebook.{self.op.name}"})
        size = " x ".join(map(str, self.about.SHAPES[0]))
        waits = "; without a GPU time: the call waits for the GPU" if wide["gpu_us"].isna().any() else ""
        return told, f"Memory beyond the inputs, and GPU time, of {size} in {self.about.DTYPES[0]}{waits}"
