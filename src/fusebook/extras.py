"""Modules beyond torch, Triton and NumPy come with an extra of the package; the error for a missing one names it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["extra"]


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Import in this block what an extra brings; where it is not installed, say which one to install.

    Parameters
    ----------
    name : str
        ``"book"``, ``"ort"`` or ``"peers"``.

    Raises
    ------
    ModuleNotFoundError
        Names the missing module and the extra.

    Examples
    --------
    >>> with extra("book"):
    ...     import pandas as pd
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None:  # said already, by a module of ours that this block imports
            raise
        raise ModuleNotFoundError(
            f"the module {error.name} is not installed; it comes with Fusebook's extra {name!r}: "
            f"pip install 'PATH[{name}]', where PATH is a checkout of its source"
        ) from error
