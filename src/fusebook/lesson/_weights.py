"""A lesson on weights of few bits: instructions per weight, and what rounding a weight costs."""

from __future__ import annotations

import contextlib
import copy
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
import triton

import fusebook
from fusebook import plots
from fusebook.lesson import _numbers, _place
from fusebook.lesson._page import Page, _or_banner
from fusebook.lesson._show import Shown, rich
from fusebook.lesson.evidence import Frames, NotRecorded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["WeightsPage", "look", "loop_of", "per_weight"]


# Instructions ---------------------------------------------------------------------------------------------------------


def loop_of(code: str) -> list[str]:
    """The instructions of the longest loop in a disassembled kernel: from a label to the branch back to it."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    longest: list[str] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            lines.append(found[1])
            back = re.search(r"\bBRA\b.*(\.L_x_\d+)", found[1])
            if back and back[1] in labels:
                longest = max(longest, lines[labels[back[1]] :], key=len)
    return longest


def look(kernel: Any) -> dict[str, Any]:
    """Instructions of a compiled kernel's longest loop for each weight of four bits, by Triton's disassembler.

    An instruction of a tensor core takes 8 weights of each thread, for 8 rows. Without any, words are loaded 16 bytes
    at a time, which are 32 weights.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        code = subprocess.check_output([triton.knobs.nvidia.nvdisasm.path, "-c", file.name], text=True)
    loop = loop_of(code)
    products = sum("HMMA" in line for line in loop)
    weights = 8 * products or 32 * sum("LDG.E.128" in line for line in loop)
    return {"instructions": len(loop) / weights if weights else float("nan")}


def per_weight(frames: Frames) -> pd.Series:
    """Instructions of a thread for each weight of one row of x, by step, where it has a kernel of Triton."""
    steps = frames["steps"]
    if "instructions" not in steps:
        raise NotRecorded("instructions were not counted")
    return steps.drop_duplicates("step").set_index("step")["instructions"].dropna()


# The page -------------------------------------------------------------------------------------------------------------


class WeightsPage(Page):
    """The page of a lesson whose subject is a weight of few bits."""

    def check(self, function: Callable[..., Any], *given: Any) -> Shown:
        """Whether a function is correct, and, for a step, how many instructions its record counts for each weight."""
        line = super().check(function, *given)
        step = function.__name__.removeprefix("matmul_")
        if step not in self.about.STEPS[1:]:
            return line
        try:
            count = per_weight(self.frames if self.frames.replay else Frames(self.about)).get(step)
        except NotRecorded:
            count = None
        if count is None:
            return line
        text = f"SASS per weight: {count:.1f}."
        Shown("", text)._now()
        shown = copy.copy(line)
        shown.html, shown.text = f"{line.html.removesuffix('</p>')} {text}</p>", f"{line.text}\n{text}"
        return shown

    def rounding(self, x: torch.Tensor, weight: torch.Tensor, bits: Sequence[int], groups: Sequence[int]) -> Shown:
        """How far ``x @ weight.T`` moves when the weight is rounded: root mean square over that of the result.

        Parameters
        ----------
        x, weight : torch.Tensor
        bits, groups : sequence of int
            Formats of `fusebook.quantize`.
        """
        x, weight = x.double(), weight.double().to(x.device)
        want, said = x @ weight.T, []
        for width in bits:
            found = []
            for group in groups:
                codes, scales, _ = fusebook.quantize(weight.float(), width, group).codes()
                wide = scales.double().repeat_interleave(group or weight.shape[1], 1)[:, : weight.shape[1]]
                off = x @ ((codes.double() - 2 ** (width - 1)) * wide - weight).T
                found.append(f"{(off.square().mean() / want.square().mean()).sqrt():.2%} (group {group})")
            said.append(f"{width} bits: {', '.join(found)}")
        text = f"Error of the result by rounding the weight, root mean square. {'; '.join(said)}."
        return Shown(f"<p>{rich(text)}</p>", text)._now()

    @_or_banner
    def plot(self, kind: str, over: str) -> Axes | Shown:
        """The sweep over rows: GPU time by implementation."""
        sweep = self._sweep()
        ax: Axes = getattr(plots, kind)(sweep, over, kind="cold", xlabel=f"rows of x, {over}")
        ax.figure.set_size_inches(8.0, 2.6)  # type: ignore[union-attr]
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        if _place.script():
            return Shown("", f"Figure: {ax.get_title(loc='left')} ({_numbers.origin(sweep)})")._now()
        return ax

    def _staircase(self, frame: pd.DataFrame, steps: Mapping[str, Callable[..., Any]]) -> tuple[pd.DataFrame, str]:
        rows = frame["shape"].str.partition("x")[0]
        words = rows + rows.map(lambda count: " row" if count == "1" else " rows")
        wide = _numbers.staircase(self.op, self.about, frame.assign(at=words), steps)
        with contextlib.suppress(NotRecorded):
            named = {name: f"step {i}, {name}" for i, name in enumerate(steps)}
            count = per_weight(self.frames).rename({**named, "fusebook": f"fusebook.{self.op.name}"})
            wide.insert(len(wide.columns) - 1, "instructions per weight", count)
        return wide, "Percent of copy speed in GPU time, by rows of x, float16"
