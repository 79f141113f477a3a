"""Modules beyond torch, Triton and NumPy come with an extra of the package; the error for a missing one names it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any

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
        if error.name is None:  # said already, by a module of Fusebook that this block imports
            raise
        missing = ModuleNotFoundError(
            f"the module {error.name} is not installed; it comes with Fusebook's extra {name!r}: "
            f"pip install 'PATH[{name}]', where PATH is a checkout of its source"
        )
        if any(a == "-m" and b.startswith("fusebook.") for a, b in itertools.pairwise(sys.orig_argv)):
            sys.excepthook = functools.partial(_without_traceback, missing, sys.excepthook)
        raise missing from error


def _without_traceback(missing: Exception, hook: Any, kind: type, value: Exception, trace: Any) -> None:
    """End a command of the library in the sentence alone."""
    if value is missing:
        print(f"fusebook: {missing}", file=sys.stderr)
    else:
        hook(kind, value, trace)
