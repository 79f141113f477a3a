"""The sentences in which launchers refuse a tensor."""

import pytest
import torch

from fusebook.kernels._operator import check_alike, check_tensor


def test_floating_tensors_pass():
    check_tensor("f", "x", torch.zeros(2, dtype=torch.bfloat16))
    check_alike("f", "y", torch.zeros(2), "x", torch.ones(3))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0], "f: expected x to be a torch.Tensor, got list; use torch.as_tensor"),
        (torch.zeros(2, dtype=torch.int64), "float16, bfloat16, float32 or float64, got torch.int64; cast it first"),
        (torch.zeros(2, 2).to_sparse(), "f: expected x to be dense, got torch.sparse_coo; call to_dense\\(\\) first"),
    ],
)
def test_what_is_no_floating_tensor_is_refused_with_what_to_do(value, said):
    with pytest.raises(TypeError, match=said):
        check_tensor("f", "x", value)


def test_a_view_that_negates_is_refused_with_what_to_do():
    x = torch.ones(3, dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match="f: expected x to stand in memory as it is, .* call resolve_neg\\(\\) first"):
        check_tensor("f", "x", x)
    check_tensor("f", "x", x.resolve_neg())


def test_only_the_dtypes_that_are_asked_for_pass():
    with pytest.raises(TypeError, match="expected i to be int64, got torch.float32"):
        check_tensor("f", "i", torch.zeros(2), (torch.int64,))


def test_another_dtype_or_device_is_refused():
    x = torch.zeros(2)
    with pytest.raises(TypeError, match="expected y to be torch.float32 as x is, got torch.float64"):
        check_alike("f", "y", x.double(), "x", x)
    check_alike("f", "y", x.double(), "x", x, dtype=False)
    with pytest.raises(ValueError, match="expected y on cpu as x is, got meta"):
        check_alike("f", "y", x.to("meta"), "x", x)
