"""What launchers take, and the sentences in which they refuse others: what was given, what is accepted, what to do."""

from __future__ import annotations

import contextlib
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._operator import check_device

#: The dtypes that floating-point kernels take.
FLOATING: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Those of classes and indices.
INTEGERS: tuple[torch.dtype, ...] = (torch.int64, torch.int32)


def check_tensor(name: str, what: str, value: object, dtypes: Sequence[torch.dtype] = FLOATING) -> None:
    """Refuse what is not a dense tensor of one of `dtypes`, whose numbers stand in memory as they are.

    `name` is the function that was called, and `what` the argument, for the message. TypeError for what is no tensor,
    of another dtype, or not dense; ValueError for a view that negates what it shows, as the imaginary part of a
    conjugate is: a kernel would read the numbers with their old sign.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name}: expected {what} to be a torch.Tensor, got {type(value).__name__}; use torch.as_tensor"
        )
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected {what} to be {_any_of(dtypes)}, got {value.dtype}; cast it first")
    if value.layout is not torch.strided or value.is_nested:
        kind, remedy = ("a nested tensor", "to_padded_tensor") if value.is_nested else (value.layout, "to_dense")
        raise TypeError(f"{name}: expected {what} to be dense, got {kind}; call {remedy}() first")
    # Compiled code passes torch's dispatcher, which negates; there this cannot be asked.
    if not torch.compiler.is_compiling() and value.is_neg():
        raise ValueError(
            f"{name}: expected {what} to stand in memory as it is, got a view that negates; call resolve_neg() first"
        )


def check_local(name: str, what: str, value: object) -> None:
    """Refuse, by TypeError, a DTensor: each process holds a part of it, and `to_local` returns that part."""
    if hasattr(value, "to_local"):
        raise TypeError(f"{name}: expected {what} to be a local tensor, got a DTensor; pass to_local()")


def check_stored(name: str, what: str, value: Tensor, *, meta: bool = False) -> None:
    """Refuse, by TypeError, a tensor without memory for all of its elements. `meta`: those on meta pass.

    Every launcher that passes addresses without torch's dispatcher asks this. The dispatcher hands wrappers to their
    own class; their address is 0, or that of an offset. The same holds for fake tensors and for freed storage.
    """
    if torch.compiler.is_compiling():
        return
    check_local(name, what, value)
    if meta and value.is_meta:
        return
    try:
        storage = value.untyped_storage()
        address = storage.data_ptr()  # that of a wrapper is refused
        extents = zip(value.shape, value.stride(), strict=True)
        end = value.storage_offset() + 1 + sum((n - 1) * stride for n, stride in extents)
        if not value.numel() or (address and storage.nbytes() >= end * value.element_size()):
            return
    except RuntimeError:
        pass
    raise TypeError(
        f"{name}: expected {what} with memory for its elements, got {type(value).__name__} without; pass the tensor "
        "that it wraps, or a clone"
    )


def check_alike(name: str, what: str, value: Tensor, model: str, other: Tensor, *, dtype: bool = True) -> None:
    """Refuse a tensor whose device, or dtype, is not that of `other`, which is the argument `model`.

    TypeError where the dtypes differ, unless `dtype` is False; ValueError where the devices differ.
    """
    if dtype and value.dtype != other.dtype:
        raise TypeError(
            f"{name}: expected {what} to be {other.dtype} as {model} is, got {value.dtype}; cast one of them"
        )
    if value.device != other.device:
        raise ValueError(
            f"{name}: expected {what} on {other.device} as {model} is, got {value.device}; move one of them"
        )


def _any_of(accepted: Sequence[Any]) -> str:
    *others, last = (str(value).removeprefix("torch.") for value in accepted)
    return f"{', '.join(others)} or {last}" if others else last


def _sizes_of(shape: Sequence[Any], letters: Sequence[Any], known: dict[Any, Any]) -> dict[Any, Any] | None:
    """What letters stand for, where they can stand for this shape; those that are `known` stand for no other size."""
    some = "..." in letters[:1]
    ahead = len(shape) - len(letters) + some
    if ahead < 0 or (ahead and not some):
        return None
    found = dict(known)
    if some and found.setdefault("...", shape[:ahead]) != shape[:ahead]:
        return None
    for letter, size in zip(letters[some:], shape[ahead:], strict=True):
        if isinstance(letter, str) and not letter.isdigit():
            letter, _, rule = letter.partition(" ")
            size -= int(rule.removeprefix("+ ")) if rule.startswith("+") else 0
            if size < int(rule == "> 0") or size != found.setdefault(letter, size):
                return None
        elif size != (int(letter) if isinstance(letter, str) else letter):  # int() would make a symbol a number
            return None
    return found


def _filled(letter: Any, sizes: dict[Any, Any]) -> Any:
    """What a letter stands for, or the letter where that is not known; ``D + 1`` too."""
    base, _, more = str(letter).partition(" + ")
    return sizes[base] + int(more) if more and base in sizes else sizes.get(letter, letter)


def shapes(name: str, /, **arguments: Any) -> dict[Any, Any]:
    """Refuse arguments that are not tensors of one device whose shapes fit together; return the sizes of letters.

    ``shapes("f", x=(x, "[..., D]"), weight=(weight, "[D]?", FLOATING))`` takes an `x` of any floating dtype and of one
    axis or more, and a weight, or None, for each of its columns.

    Parameters
    ----------
    name : str
        The function that was called, for the message.
    **arguments
        For each the value, its shape and, optionally, the dtypes that it may have: unless given, those of `FLOATING`
        for the first argument and the dtype of the first for the others. A shape is a tuple of sizes, or a text of
        numbers, of letters, each of which stands for one size wherever it is, of ``N > 0`` for a size that is not 0, of
        ``N + 1`` for one that is larger by 1, and of ``...`` in front for any number of axes. With ``?`` behind, None
        passes; an empty text is any shape.

    Returns
    -------
    dict
        What each letter stands for, and ``...`` a tuple.

    Raises
    ------
    TypeError, ValueError
        As `check_tensor`, `check_alike` and `check_device`; ValueError for another shape.
    """
    sizes: dict[Any, Any] = {}
    owners: dict[Any, tuple[str, Any]] = {}  # of each letter the argument that had it first
    first: tuple[Any, ...] = ()
    for what, (value, shape, *dtypes) in arguments.items():
        if value is None and "?" in shape:
            continue
        check_tensor(name, what, value, *dtypes)
        if first:
            check_alike(name, what, value, *first, dtype=not dtypes)
        else:
            first = what, value
        if shape == "":
            continue
        letters = shape.strip("[]?").split(", ") if isinstance(shape, str) else shape
        found = _sizes_of(value.shape, letters, sizes)
        if found is None:
            filled = [_filled(letter, sizes) for letter in letters]
            text = f"[{', '.join(str(list(s))[1:-1] if isinstance(s, tuple) else str(s) for s in filled)}]"
            names = [str(letter).partition(" + ")[0] for letter in letters]
            if models := dict.fromkeys(owners[letter] for letter in names if letter in owners):
                text += f", {shape.strip('?')} where {' and '.join(f'{other} is {its}' for other, its in models)}"
            remedy = "give one at least" if 0 in value.shape and " > " in text else "slice, expand or reshape it"
            raise ValueError(f"{name}: expected {what} of shape {text}, got {list(value.shape)}; {remedy}")
        owners = {letter: owners.get(letter, (what, shape)) for letter in found}
        sizes = found
    check_device(name, first[1])
    return sizes


def one_of(name: str, what: str, value: Any, accepted: Sequence[Any], remedy: str = "choose one of them") -> None:
    """Refuse, by ValueError, what is none of the values that are accepted."""
    if not any(value is a or (type(value) is type(a) and value == a) for a in accepted):
        raise ValueError(f"{name}: expected {what} to be {_any_of(accepted)}, got {value!r}; {remedy}")


def flag(name: str, what: str, value: Any) -> None:
    """Refuse, by TypeError, what is neither True nor False: a text such as "no" would count as True."""
    if type(value) is not bool:
        raise TypeError(f"{name}: expected {what} to be True or False, got {value!r}; give one of the two")


def integer(
    name: str, what: str, value: Any, remedy: str, accepted: str = "", fine: Callable[[int], bool] | None = None
) -> int:
    """An argument that counts, as Python's int: NumPy's integers too, but no bool, no float and no tensor.

    `name`, `what` and `remedy` are for the message: the function, the argument and what to do. What is not `fine` is
    refused as well, in the words of `accepted`, such as "of 1 or more".
    """
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    # What torch.compile traces as an integer has no more attributes to be asked for.
    if not isinstance(value, int) and not isinstance(value, Tensor) and hasattr(value, "__index__"):
        with contextlib.suppress(TypeError):  # an array has one, and is no number
            value = operator.index(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected {what} to be an integer, got {type(value).__name__}; {remedy}")
    # A size that torch.compile traces has 64 bits, and to compare it would bound the sizes that an export takes.
    if not torch.compiler.is_compiling() and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected {what} to be an integer of 64 bits, got {value}; {remedy}")
    if fine is not None and not fine(value):
        raise ValueError(f"{name}: expected {what} {accepted}, got {value}; {remedy}")
    return value  # type: ignore[no-any-return]


def number(
    name: str, what: str, value: Any, remedy: str, accepted: str = "", fine: Callable[[float], bool] | None = None
) -> float:
    """An argument that measures, as Python's float: NumPy's numbers too, but no bool, no text and no tensor.

    The other arguments are as those of `integer`.
    """
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected {what} to be a number, got {type(value).__name__}; {remedy}")
    try:
        size = float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected {what} that float64 can hold, got an integer beyond it; {remedy}") from None
    if fine is not None and not fine(size):
        raise ValueError(f"{name}: expected {what} {accepted}, got {value}; {remedy}")
    return size
