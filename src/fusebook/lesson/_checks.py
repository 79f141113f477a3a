"""Whether a function is correct: against the operator's reference in float64, on inputs that do not forgive."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusebook.lesson import _place
from fusebook.lesson._show import Shown, rich
from fusebook.measure import check, inputs
from fusebook.measure.op import Op

#: Primes: a count of elements is a sum of products of sizes in one way only.
_PRIMES = (97, 89, 83, 79, 73)


class Line(Shown):
    """A result in one line, with a mark that needs no colour."""

    def __init__(self, good: bool, text: str, more: str = "") -> None:
        mark, word = ("✓", "correct") if good else ("✗", "incorrect")
        super().__init__(
            f'<p class="fb-check {"fb-true" if good else "fb-false"}"><span class="fb-mark" role="img" '
            f'aria-label="{word}">{mark}</span> {rich(text)}</p>',
            "\n".join(filter(None, [f"{mark} {text.replace('`', '')}", more])),
        )
        self.good = good

    def strictly(self) -> Line:
        """Show it; under FUSEBOOK_STRICT=1 an incorrect result is an error."""
        if not self.good and _place.flag("FUSEBOOK_STRICT"):
            raise AssertionError(self.text)
        return self._now()


def _name(function: Callable[..., Any]) -> str:
    name = str(getattr(function, "_name", "") or getattr(function, "__name__", function))  # first: torch.library's
    return f"fusebook.{name}" if str(getattr(function, "__module__", "")).startswith("fusebook.") else name


def sizes(value: Any, rows: str = "") -> str:
    """The shape and dtype of a tensor, or the value itself; `rows` in the place of its rows."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape = [*map(str, value.shape)]
    return f"{' x '.join([rows, *shape[1:]] if rows else shape)}, {str(value.dtype)[6:]}"


def _judged(op: Op, function: Callable[..., Any], given: Sequence[Any]) -> tuple[check.Yardstick, Any, check.Verdict]:
    yard = check.yardstick(op, given)
    device = next((v.device for v in given if isinstance(v, torch.Tensor)), torch.device("cpu"))
    inputs.poison(yard.outputs(device))
    with np.errstate(all="ignore"):  # the interpreter is NumPy, which warns of NaN
        got = function(*given)
    return yard, got, yard.judge(got)


def _eps(value: float, given: Sequence[Any]) -> str:
    dtype = next(v.dtype for v in given if isinstance(v, torch.Tensor) and v.is_floating_point())
    if not np.isfinite(value):
        return "infinite"
    return f"{value / torch.finfo(dtype).eps:.2g} eps"


def checked(op: Op, function: Callable[..., Any], given: Sequence[Any], rows: str = "", more: str = "") -> Line:
    """The line of `fusebook.lesson.Page.check`."""
    yard, got, verdict = _judged(op, function, given)
    where = sizes(next(v for v in given if isinstance(v, torch.Tensor) and v.is_floating_point()), rows)
    numbers = f"error {_eps(verdict.error, given)}, tolerance {_eps(verdict.tolerance, given)}"
    if verdict.ok:
        text = f"`{_name(function)}` is correct on {where}: {numbers}."
    else:
        text = f"`{_name(function)}` is incorrect on {where}: {numbers}; {yard.where(got)}."
    return Line(verdict.ok, text, more).strictly()


def caught(op: Op, function: Callable[..., Any], named: dict[str, Any]) -> Line:
    """The line of `fusebook.lesson.Page.catches`."""
    said, last = [], True
    for name, given in named.items():
        yard, got, verdict = _judged(op, function, given if isinstance(given, tuple) else (given,))
        where = "" if verdict.ok else f" ({yard.where(got)})"
        said.append(f"{'passes' if verdict.ok else 'fails'} on `{name}`{where}")
        last = verdict.ok
    return Line(not last, f"`{_name(function)}` {', '.join(said[:-1])}, and {said[-1]}.").strictly()


def _special(op: Op, dtype: torch.dtype, names: Sequence[str]) -> tuple[Any, ...]:
    """Rows of -inf, NaN, inf and the largest finite values."""
    made = op.make(inputs.generator(7), dtype, **dict(zip(names, (8, 1000), strict=False)))
    x = next(v for v in made if isinstance(v, torch.Tensor))
    x[0] = x[1] = -torch.inf
    x[1, 7] = 3.0
    x[2, 500] = torch.nan
    x[3, 999] = torch.inf
    x[4, ::2] = -torch.inf
    x[5, 0] = torch.finfo(dtype).max
    x[6] = torch.finfo(dtype).min
    return made


def _many(op: Op, shapes: Sequence[Sequence[int]], special: bool) -> Iterator[tuple[Any, ...]]:
    """Inputs of the card's edges and of the lesson's widths, small enough for the interpreter, in three dtypes."""
    names = [name for name, value in op.edges[0].items() if isinstance(value, int)]
    edges = [dims for dims in op.edges if all(0 < int(dims[name]) <= 2**14 for name in names)]
    edges += [{**op.edges[0], **dict(zip(names, (3, *shape[1:]), strict=True))} for shape in shapes]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed, dims in enumerate([*edges, *edges]):
            yield op.make(inputs.generator(seed), dtype, **dims)
        if special:
            yield _special(op, dtype, names)


def all_checked(
    op: Op, functions: Sequence[Callable[..., Any]], shapes: Sequence[Sequence[int]], special: bool
) -> Line:
    """The line of `fusebook.lesson.Page.check_all`."""
    count = 0
    for count, given in enumerate(_many(op, shapes, special), 1):  # noqa: B007
        for function in functions:
            yard, got, verdict = _judged(op, function, given)
            if not verdict.ok:
                numbers = f"error {_eps(verdict.error, given)}, tolerance {_eps(verdict.tolerance, given)}"
                where = f"{sizes(given[0])}: {numbers}; {yard.where(got)}"
                return Line(False, f"`{_name(function)}` is incorrect on {where}.").strictly()
    rows = ", with rows of -inf, NaN, inf and largest finite values" if special else ""
    which = {1: f"`{_name(functions[0])}` is", 2: "Both are"}.get(len(functions), f"All {len(functions)} are")
    text = f"{which} correct on {count} inputs in three dtypes{rows}."
    return Line(True, text).strictly()


class _Traffic(TorchDispatchMode):
    """Note how many elements each operation reads and writes; one of a longer dtype counts as several."""

    def __init__(self, itemsize: int) -> None:
        super().__init__()
        self.itemsize = itemsize
        self.seen: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.replace("_to_copy", "convert")
        given = {id(a): a for a in args if isinstance(a, torch.Tensor)}.values()  # x * x reads x once
        if name in ("gather", "scatter_"):  # one element per index, of a tensor that is not read as a whole
            self.seen.append((name, 2 * args[2].numel(), args[2].numel()))
        elif not all(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):  # a view moves nothing
            self.seen.append((name, sum(map(self._elements, given)), self._elements(out)))
        return out

    def _elements(self, a: torch.Tensor) -> int:
        return a.numel() * max(1, a.itemsize // self.itemsize) if a.is_floating_point() else a.numel()


def units(op: Op, unit: Mapping[str, str] | None = None) -> dict[str, str]:
    """The sizes whose product is the unit of a count of elements, and what a reader sees instead of each."""
    return dict(unit) if unit else {name: name for name, value in op.edges[0].items() if isinstance(value, int)}


def traffic(
    op: Op,
    function: Callable[..., Any],
    dtype: torch.dtype,
    unit: Mapping[str, str] | None = None,
    taking: Callable[..., Sequence[Any]] | None = None,
) -> tuple[list[tuple[str, str, str]], str, list[tuple[int, int]], int]:
    """Count what a function moves, on the meta device, which has shapes and no memory.

    Parameters
    ----------
    op : Op
    function : callable
    dtype : torch.dtype
    unit : mapping of str to str, optional
        As `units` takes it; all others of its sizes are those of the card's first edge.
    taking : callable, optional
        From the card's inputs to the arguments of `function`.

    Returns
    -------
    list of (str, str, str)
        Of each operation: its name, what it reads and what it writes, as ``MN + M``.
    str
        The total, as ``8MN + 4M``.
    list of (int, int)
        The same in elements.
    int
        Elements of the unit, which is the product of all sizes.
    """
    letters = units(op, unit)
    dims = dict(zip(letters, _PRIMES, strict=False))
    made = op.make(inputs.generator(0, "cpu"), dtype, **{**op.edges[0], **dims})
    shapes = [v.to("meta") if isinstance(v, torch.Tensor) else v for v in made]
    shapes = [*taking(*shapes)] if taking else shapes
    with _Traffic(dtype.itemsize) as counted:
        function(*shapes)
    seen = counted.seen
    product = int(np.prod(list(dims.values())))

    def written(count: int) -> str:
        said = []
        by_size = sorted(((letters[name], size) for name, size in dims.items()), key=lambda item: -item[1])
        for name, size in [("".join(letters.values()), product), *by_size]:
            many, count = divmod(count, size)
            said += [f"{many if many > 1 else ''}{name}"] if many else []
        return " + ".join([*said, *([str(count)] if count else [])])

    steps = [(name, written(read), written(write)) for name, read, write in seen]
    total = written(sum(read + write for _, read, write in seen))
    total = re.sub(r" \+ \d+$", "", total)  # without a few elements that belong to no row
    return steps, total, [(read, write) for _, read, write in seen], product


def predicted(
    op: Op,
    eager: Callable[..., Any],
    fused: float,
    dtype: torch.dtype,
    unit: Mapping[str, str] | None = None,
    taking: Callable[..., Sequence[Any]] | None = None,
) -> tuple[float, list[tuple[str, int, int]], str]:
    """What a fused kernel saves by the count of elements, against what the card states.

    Raises
    ------
    ValueError
        Where the count of the eager code, or `fused`, is not what the card states.
    """
    steps, total, counted, one = traffic(op, eager, dtype, unit, taking)
    dims = {**op.edges[0], **dict(zip(units(op, unit), _PRIMES, strict=False))}
    least, first = op.cost(dtype.itemsize, **dims), next(iter(op.variants.values()))
    stated = first.cost(dtype.itemsize, **dims) if first.cost else least
    moved = sum(read + write for read, write in counted)
    known, most = ((cost.read + cost.write) / dtype.itemsize for cost in (least, stated))
    if round(moved / one) != round(most / one):  # cards leave out what rows add
        raise ValueError(f"page.traffic: counted {moved} elements, the card states {most:.0f}")
    if round(known / one) != fused:
        raise ValueError(f"page.traffic: expected fused={round(known / one)}, got {fused:g}")
    bars = [
        (name, round(read / one), round(write / one))
        for (name, _, _), (read, write) in zip(steps, counted, strict=True)
        if read + write > one / 2
    ]
    bars.append(("one kernel", round(least.read / dtype.itemsize / one), round(least.write / dtype.itemsize / one)))
    return round(moved / one) / fused, bars, total


def plain(function: Callable[..., Any]) -> list[Any]:
    """A launcher with the kernels and functions of its file that it calls, and what they call, to count lines."""
    import types

    from triton.runtime import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    found: list[Any] = [function]
    for part in found:  # grows meanwhile
        code = getattr(part, "fn", part)
        named = [code.__globals__.get(name) for name in code.__code__.co_names]
        named = [v.__wrapped__ if isinstance(v, functools._lru_cache_wrapper) else v for v in named]
        own = (v for v in named if isinstance(v, types.FunctionType) and v.__globals__ is code.__globals__)
        kernels = (v for v in named if isinstance(v, JITFunction | InterpretedFunction))
        found += [v for v in (*own, *kernels) if v not in found]
    return found
