"""What each way to compute an operator does, as digests: whether what was measured in any layout is still the code.

Of ours, what is asked of the GPU counts: kernels, plans and the tuned rows of its kind, what allocates and launches,
and what may be refused. How launchers are called, and how plans are kept, does not. Of others, the functions that call
them count; see `fusebook.digests` for what is left out of all of them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any

from fusebook import kernels
from fusebook.digests import digest
from fusebook.kernels._operator import Operator
from fusebook.kernels._products import read
from fusebook.op import Op

__all__ = ["PROBLEMS", "changed", "told", "ways"]

#: What stands for the problems themselves, beside the names of variants.
PROBLEMS = "problems"

# Functions of `fusebook.kernels._operator` through which all launchers go. How they do it is no operator's matter.
_MECHANICS = ("apply", "empty", "empty_like", "launch", "launching", "record", "watched")


def _instead(value: Any) -> Any:
    """What of an operator of ours decides what it launches; mechanics by their names, and refusals as one."""
    if isinstance(value, Operator):
        return [value.into, value.outputs, value.check, value.read]
    module, name = str(getattr(value, "__module__", "")), getattr(value, "__name__", "")
    if module in ("fusebook.kernels._arguments", "fusebook.kernels._tape"):
        return "refusals and plans"
    if module == "fusebook.kernels._operator" and name in _MECHANICS:
        return f"to {name}"
    return value


def ways(op: Op, capability: tuple[int, int] | None, variants: Iterable[str]) -> dict[str, str]:
    """Digests of what variants of an operator do, and of how its problems are made.

    Parameters
    ----------
    capability : tuple of int or None
        Of the GPU whose tuned rows count.
    variants : iterable of str
        Their names; those that the card does not have are left out.

    Returns
    -------
    dict of str to str
        By variant, and by `PROBLEMS`. Ours are those whose names begin with "fusebook".
    """
    arch = "".join(map(str, capability or ()))
    rows = read(pathlib.Path(kernels.__path__[0]) / "tuned" / f"{op.name}.csv")
    tuned = {key: row for key, row in rows.items() if key[0] == arch}
    found = {PROBLEMS: digest([op.make, op.draw], _instead)}
    for name in variants:
        if (variant := op.variants.get(name)) is None:
            continue
        given = [variant.run, variant.prepare, *([tuned] if tuned and name.startswith("fusebook") else [])]
        found[name] = digest(given, _instead)
    return found


def told(op: Op, capability: tuple[int, int] | None, variants: Iterable[str]) -> str:
    """What some variants do, and how their problems are made, as a text that `changed` reads."""
    return "; ".join(f"{name} {way}" for name, way in ways(op, capability, variants).items())


def changed(op: Op, capability: tuple[int, int] | None, then: str) -> set[str]:
    """The names that do something else today than a text of `told` says; `PROBLEMS`, too, where others are drawn."""
    before = dict(part.rsplit(" ", 1) for part in then.split("; "))
    now = ways(op, capability, before)
    return {name for name in before if now.get(name) != before[name]}
