"""Turns on a GPU that several processes share."""

import fcntl
import time

import pytest
import torch
import triton
from torch._dynamo import callback

from fusebook.measure import turns


@pytest.fixture
def turn(tmp_path, monkeypatch):
    """Takes the turn with a compiler of Triton's that notes whether the turn is free; `compiled` has what it noted."""
    file = tmp_path / "turn"

    def free():
        with open(file, "a") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def compiles(*given):
        take.compiled.append(free())
        return given

    def take(**how):
        turns.take(file, **how)
        assert not free()

    handler = callback.CompilationCallbackHandler
    for of, name, value in (
        *((part, "compile", compiles) for part in (triton, triton.compiler)),
        (handler, "install_callbacks", handler.install_callbacks),
        *((turns, name, getattr(turns, name)) for name in ("_file", "_held", "_waited")),
    ):
        monkeypatch.setattr(of, name, value)
    take.compiled, take.free = [], free
    yield take
    turns._file.close()


def test_others_have_the_turn_while_triton_compiles(turn):
    turn()
    assert triton.compile(1, 2) == (1, 2) and triton.compiler.compile(3) == (3,)
    assert turn.compiled == [True, True] and not turn.free()
    with pytest.raises(TypeError):
        triton.compile(unknown=1)
    assert not turn.free(), "it is taken again after an error"


def test_others_have_the_turn_while_torch_compiles(turn):
    def backend(graph, inputs):
        turn.compiled.append(turn.free())
        triton.compile()  # within
        return graph

    turn()
    torch.compiler.reset()
    assert torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(3)).tolist() == [1, 1, 1]
    assert turn.compiled == [True, True] and not turn.free()


def test_who_keeps_the_turn_gives_it_to_nobody(turn):
    turn(keep=True)
    triton.compile()
    assert turn.compiled == [False] and not turn.free()


def test_waiting_is_no_time(turn, monkeypatch):
    turn()
    real = fcntl.flock

    def slow(file, how):
        time.sleep(0.3 if how == fcntl.LOCK_EX else 0)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    start, before = turns.clock(), turns.waited()
    triton.compile()
    assert turns.waited() - before >= 0.3 and turns.clock() - start < 0.2
