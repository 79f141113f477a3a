"""What is found out of kernels that were compiled without a GPU."""

import pytest
import triton

from fusebook.measure import compiled


def softmax_of(*widths):
    import torch

    import fusebook

    for n in widths:
        fusebook.softmax(torch.zeros(4, n, dtype=torch.bfloat16))


def refused():
    raise ValueError("nothing to launch")


def test_registers_are_counted_without_a_gpu():
    version, registers = compiled.registers(softmax_of, 1024, 8192)
    assert version == triton.__version__
    assert len(registers) == 2 and all(16 <= n <= 255 for n in registers)
    with pytest.raises(compiled.Unknown, match="nothing to launch"):
        compiled.registers(refused)


def test_what_is_compiled_ahead_is_no_launch(monkeypatch):
    monkeypatch.setattr(compiled.JITFunction, "run", lambda self, *_, grid, warmup: f"compiled {warmup}")
    with compiled.kernels() as found:
        for warmup in (True, False):
            compiled.JITFunction.run(None, grid=(1,), warmup=warmup)
    assert found == ["compiled False"]
