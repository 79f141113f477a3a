"""Turns on a GPU that several processes share: one uses it, and the others compile, or wait.

Compilation is a large part of a recording, and needs the CPU alone. A process that has taken its turn gives it back
while torch.compile or Triton compiles, and takes it again before anything runs. Nothing is timed without the turn, so
two processes need not disturb each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch
import triton

__all__ = ["clock", "take", "waited"]

# The file whose lock is the turn, while this process takes part; whether it has the turn; the seconds that it waited.
_file: IO[str] | None = None
_held = False
_waited = 0.0
# More bytes of memory than these that this process has and does not use are for the others, too.
_SPARE = 2**30


def waited() -> float:
    """Seconds for which this process has waited for its turn."""
    return _waited


def clock() -> float:
    """Seconds by the host's clock, without those that this process has waited for its turn."""
    return time.perf_counter() - _waited


def take(path: str | pathlib.Path, keep: bool = False) -> None:
    """Wait for the turn, and from now on give it back while something is compiled.

    Parameters
    ----------
    path : path
        A file that the processes have in common; it is made where it is missing.
    keep : bool
        Whether this process keeps the turn while it compiles.
    """
    global _file
    _file = open(path, "a")
    if not keep:
        triton.compile = triton.compiler.compile = _outside(triton.compile)
        from torch._dynamo import callback

        handler: Any = callback.CompilationCallbackHandler
        install = handler.install_callbacks
        compiles = (callback.CallbackTrigger.DYNAMO, callback.CallbackTrigger.LAZY_BACKWARD)

        @contextlib.contextmanager
        def noted(self: Any, trigger: Any, *given: Any) -> Iterator[None]:
            with _given_back() if trigger in compiles else contextlib.nullcontext(), install(self, trigger, *given):
                yield

        handler.install_callbacks = noted
    _wait()


def _wait() -> None:
    global _held, _waited
    assert _file is not None
    start = time.perf_counter()
    fcntl.flock(_file, fcntl.LOCK_EX)
    _held, _waited = True, _waited + time.perf_counter() - start


@contextlib.contextmanager
def _given_back() -> Iterator[None]:
    """Inside, other processes use the GPU, and this one must not."""
    global _held
    if not _held or threading.current_thread() is not threading.main_thread():
        yield
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _SPARE:
            torch.cuda.empty_cache()
    assert _file is not None
    _held = False
    fcntl.flock(_file, fcntl.LOCK_UN)
    try:
        yield
    finally:
        _wait()


def _outside(compiles: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler that runs while others use the GPU."""

    @functools.wraps(compiles)
    def run(*given: Any, **named: Any) -> Any:
        with _given_back():
            return compiles(*given, **named)

    return run
