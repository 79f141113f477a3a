"""The error of a result, one number, and its tolerance.

The error is the largest of ``|got - want| / (|want| + rms of want's row)`` over all elements, where `want` is the
reference in float64. It is free of scale. A result of zeros has an error of at least 0.5 for any operator. One
incorrect row is as visible as an incorrect tensor. Rounding makes an error of a few eps. A constant absolute
tolerance has none of these: a softmax over a hundred thousand columns that writes 1/N everywhere passes ``atol=1e-3``.
Below the normal range of a dtype, one of its steps is no error, since steps do not shrink there. Zero is no error below
the normal range of float32.
"""

from __future__ import annotations

import math as _math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusebook.measure.op import Op

__all__ = ["Verdict", "Yardstick", "alone", "yardstick"]

# Elements compared at a time: float64 temporaries of a 2 GiB result would otherwise take tens of GiB.
_CHUNK = 2**26


@dataclass(frozen=True)
class Verdict:
    """An error and its tolerance: `error` and `tolerance`."""

    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error is within tolerance; NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Yardstick:
    """The reference of a problem, to which results are compared.

    Attributes
    ----------
    op : Op
    inputs : tuple
        The inputs, floating-point tensors in float64, for `Op.meaning`; empty where the card has none.
    want : tuple of torch.Tensor
        The reference in float64, after `Op.meaning`.
    shapes, dtypes : tuple
        What each output must be.
    dtype : torch.dtype
        The dtype of the first floating-point input, whose eps makes the tolerance.
    rounded : float
        The error of the reference in float32, rounded to the outputs' dtypes; 0 in float64.
    """

    op: Op
    inputs: tuple[Any, ...]
    want: tuple[torch.Tensor, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    dtype: torch.dtype
    rounded: float

    def judge(self, outputs: Any, math: str | None = None) -> Verdict:
        """The error of `outputs` and its tolerance."""
        return Verdict(self.error(outputs), self.tolerance(math))

    def error(self, outputs: Any) -> float:
        """The error of `outputs`, the largest of all; 0 is exact.

        It is infinite if the number of outputs, a shape or a dtype differs. It is infinite, too, if NaN or infinity is
        not where the reference has it, or if a row should be zero and is not.
        """
        got = _tuple(outputs)
        if len(got) != len(self.shapes):
            return _math.inf
        for out, shape, dtype in zip(got, self.shapes, self.dtypes, strict=True):
            if not isinstance(out, torch.Tensor) or out.shape != shape or out.dtype != dtype:
                return _math.inf
        with torch.no_grad():
            meant = self._meant(tuple(o.detach() for o in got))
            return max((_distance(g, w) for g, w in zip(meant, self.want, strict=True)), default=0.0)

    def tolerance(self, math: str | None = None) -> float:
        """The tolerance: the largest error of a correct result.

        It is 8 eps for fp16 and bf16, and 64 eps for float32 and float64. Except in float64, it is twice the error of
        the reference in float32, rounded, if that is larger. It is never above 0.25, and no implementation sets it.

        Parameters
        ----------
        math : str, optional
            ``"tf32"``: float32 multiplied with ten bits of mantissa, whose eps is float16's, 2**-10.
        """
        if math == "tf32" and self.dtype == torch.float32:
            allowed = 8 * 2.0**-10
        elif self.dtype in (torch.float16, torch.bfloat16):
            allowed = 8 * torch.finfo(self.dtype).eps
        else:
            allowed = 64 * torch.finfo(self.dtype).eps
        return min(max(allowed, 2 * self.rounded), 0.25)

    def where(self, outputs: Any) -> str:
        """The place of the largest error in `outputs`, for messages.

        What was returned and what was expected: the number of outputs, a shape and dtype, or the worst element with its
        position. Empty where everything is exact.
        """
        got = _tuple(outputs)
        if len(got) != len(self.shapes):
            return f"got {len(got)} outputs, expected {len(self.shapes)}"
        for i, (out, shape, dtype) in enumerate(zip(got, self.shapes, self.dtypes, strict=True)):
            like = (out.shape, out.dtype) if isinstance(out, torch.Tensor) else None
            if like != (shape, dtype):
                given = f"{like[1]} of shape {tuple(like[0])}" if like else type(out).__name__
                return f"output {i}: got {given}, expected {dtype} of shape {tuple(shape)}"
        found: tuple[float, str] = (0.0, "")
        with torch.no_grad():
            meant = self._meant(tuple(o.detach() for o in got))
            for i, (g, w) in enumerate(zip(meant, self.want, strict=True)):
                if w.numel() == 0:
                    continue
                of = f" of output {i}" if len(meant) > 1 else ""
                columns = w.shape[-1] if w.dim() else 1
                step = max(1, _CHUNK // columns)
                rows, wanted = g.reshape(-1, columns), w.reshape(-1, columns)
                for start in range(0, len(wanted), step):
                    a, b = rows[start : start + step], wanted[start : start + step]
                    ratio = _rows(a, b) if w.is_floating_point() else torch.where(a == b, 0.0, _math.inf)
                    at = int(ratio.argmax())
                    if (most := ratio.reshape(-1)[at].item()) > found[0]:
                        here = start * columns + at
                        place: list[int] = []
                        for size in reversed(w.shape):
                            here, along = divmod(here, size)
                            place.insert(0, along)
                        values = f"got {a.reshape(-1)[at].item():.6g}, expected {b.reshape(-1)[at].item():.6g}"
                        found = most, f"worst at {place}{of}: {values}"
        return found[1]

    def outputs(self, device: torch.device) -> list[torch.Tensor]:
        """Memory of the shapes and dtypes that results have, on a device."""
        return [torch.empty(s, dtype=d, device=device) for s, d in zip(self.shapes, self.dtypes, strict=True)]

    def _meant(self, outputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """The floating-point tensors that are compared."""
        return outputs if self.op.meaning is None else _tuple(self.op.meaning(self.inputs, outputs))


def yardstick(op: Op, inputs: Sequence[Any]) -> Yardstick:
    """Run the reference: in float64 for the correct result, in float32 for the error of rounding.

    Parameters
    ----------
    inputs : sequence
        What ``op.make`` returned.
    """
    with torch.no_grad():
        # Shapes and dtypes come from the reference on the inputs as they are; on the meta device, where an operation
        # takes as long whatever its size, if they are large.
        try:
            large = sum(v.numel() for v in inputs if isinstance(v, torch.Tensor)) > 2**16
            at = [v.to("meta") if large and isinstance(v, torch.Tensor) else v for v in inputs]
            like = _tuple(op.reference(*at))
        except (NotImplementedError, RuntimeError):  # a reference whose shapes depend on values
            like = _tuple(op.reference(*inputs))
        exact = _cast(inputs, torch.float64)
        want = _tuple(op.reference(*exact))
        want = want if op.meaning is None else _tuple(op.meaning(exact, want))
        floats = [v.dtype for v in inputs if isinstance(v, torch.Tensor) and v.is_floating_point()]
        dtype = floats[0] if floats else torch.float32
        yard = Yardstick(
            op,
            exact if op.meaning else (),
            want,
            tuple(o.shape for o in like),
            tuple(o.dtype for o in like),
            dtype,
            rounded=0.0,
        )
        if dtype == torch.float64:
            return yard
        single = _tuple(op.reference(*_cast(inputs, torch.float32)))
        rounded = tuple(o.to(d) for o, d in zip(single, yard.dtypes, strict=True))
        return replace(yard, rounded=yard.error(rounded))


def _tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def _cast(inputs: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(v.detach().to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in inputs)


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    if not want.is_floating_point():  # integers are correct or not
        return 0.0 if torch.equal(got, want) else _math.inf
    columns = want.shape[-1] if want.dim() else 1
    got, want = got.reshape(-1, columns), want.reshape(-1, columns)
    step = max(1, _CHUNK // columns)
    return max(_largest(got[i : i + step], want[i : i + step]) for i in range(0, len(want), step))


def _largest(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error of all elements.

    Ordinary numbers need a third of the time that `_rows` takes, for the same answer. Others are infinite or NaN, or
    some are so small that one step of their dtype may be no error.
    """
    if got.dtype in (torch.bfloat16, torch.float32, torch.float64):
        scale = _scale(want, want.shape[1])
        least, largest = scale.aminmax(dim=1)
        tiny = (least < 1e-15) & (largest > 0)
        most = (got.double() - want).abs_().div_(scale.clamp_(min=1e-300)).max().item()
        if (most == 0 or 1e-20 < most < 1) and not tiny.any() and largest.max() < torch.finfo(got.dtype).max:
            return float(most)
    return float(_rows(got, want).max().item())


def _scale(want: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """What an error is divided by: the absolute value, and the root of the mean square of so many in its row."""
    return want.abs() + want.square().sum(1, keepdim=True).div(count).sqrt()


def _rows(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The error of each element."""
    # What float64 holds may be infinite in the result's dtype, so infinities are looked for after rounding.
    rounded = want.to(got.dtype)
    finite = rounded.isfinite()
    alike = torch.where(rounded.isnan(), got.isnan(), got == rounded)
    want = torch.where(finite, want, 0)
    error = torch.where(finite, (got.double() - want).abs(), 0)
    # Below the normal range numbers are a fixed step apart: no result can be expected to be nearer than that. Below
    # that of float32, in which half types are computed, too, zero is correct: 1 + exp(-x) overflows there.
    info = torch.finfo(got.dtype)
    step = info.smallest_normal * info.eps
    held = (error <= step) & (want.abs() < info.smallest_normal)
    if got.dtype != torch.float64:
        held |= (got == 0) & (want.abs() < torch.finfo(torch.float32).smallest_normal)
    error = torch.where(held & (want != 0), 0, error)
    scale = _scale(want, finite.sum(1, keepdim=True).clamp(min=1))
    ratio = torch.where(error == 0, 0, error / scale)  # a zero row divides by zero: infinite if not zero
    ratio = torch.where(ratio.isnan(), _math.inf, ratio)  # NaN where the reference has a number
    return torch.where(alike | finite, ratio, _math.inf)


# Whether rows are alone -----------------------------------------------------------------------------------------------


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, so that NaN equals itself and -0.0 differs from 0.0."""
    if x.numel() == 0:  # where strides may be zero, which a view of other elements does not take
        return torch.empty(0, dtype=torch.uint8)
    return x.reshape(-1).contiguous().view(torch.uint8)


def alone(op: Op, call: Callable[..., Any], inputs: Sequence[Any]) -> bool | None:
    """Whether each row is the same, bit for bit, whatever number of rows it comes with: batch invariance.

    The first and the last row alone, sixteen of them, and half of all are computed once more and compared with the same
    rows of the whole.

    Parameters
    ----------
    op : Op
        Its ``rows`` says which inputs have rows.
    call : callable
        The inputs to the outputs, preparation included.
    inputs : sequence
        What ``op.make`` returned.

    Returns
    -------
    bool or None
        None where the operator has no rows, or the inputs have less than two.
    """
    count = len(inputs[op.rows[0]]) if op.rows else 0
    if count < 2:
        return None
    whole = _tuple(call(*inputs))
    some = {(0, 1), (count - 1, count), (0, min(16, count - 1)), (count - count // 2, count)}
    for first, last in sorted(some):
        # Copies, as a batch of so many rows would be: a view might begin at an address that is aligned less.
        given = [
            v[first:last].clone() if i in op.rows and len(v) == count else v  # what is broadcast has one row for all
            for i, v in enumerate(inputs)
        ]
        for part, of in zip(_tuple(call(*given)), whole, strict=True):
            if not torch.equal(_bits(part), _bits(of[first:last])):
                return False
    return True
