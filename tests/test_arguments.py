"""The sentences in which launchers refuse a tensor."""

import math
import re
import types

import numpy as np
import pytest
import torch

import fusebook
from fusebook.kernels._call import FLOATING, _sizes_of, check_tensor, integer, number, shapes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_floating_tensors_pass():
    check_tensor("f", "x", torch.zeros(2, dtype=torch.bfloat16, device=DEVICE))
    check_tensor("f", "y", torch.zeros(2, device=DEVICE), like=("x", torch.ones(3, device=DEVICE)))


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
    x = torch.ones(3, dtype=torch.complex64, device=DEVICE).conj().imag
    with pytest.raises(ValueError, match="f: expected x to stand in memory as it is, .* call resolve_neg\\(\\) first"):
        check_tensor("f", "x", x)
    check_tensor("f", "x", x.resolve_neg())


def test_only_the_dtypes_that_are_asked_for_pass():
    with pytest.raises(TypeError, match="expected i to be int64, got torch.float32"):
        check_tensor("f", "i", torch.zeros(2), (torch.int64,))


def test_true_is_neither_a_number_nor_an_integer():
    for check, kind in ((number, "a number"), (integer, "an integer")):
        with pytest.raises(TypeError, match=f"f: expected n to be {kind}, got bool; say how many"):
            check("f", "n", True, "say how many")


def test_an_integer_has_64_bits():
    assert [integer("f", "n", n, "say how many") for n in (-(2**63), 2**63 - 1)] == [-(2**63), 2**63 - 1]
    for n in (-(2**63) - 1, 2**63):
        with pytest.raises(ValueError, match=f"f: expected n to be an integer of 64 bits, got {n}; say how many"):
            integer("f", "n", n, "say how many")


def test_another_dtype_or_device_is_refused():
    x = torch.zeros(2, device=DEVICE)
    with pytest.raises(TypeError, match="expected y to be torch.float32 as x is, got torch.float64"):
        check_tensor("f", "y", x.double(), like=("x", x))
    check_tensor("f", "y", x.double(), FLOATING, ("x", x))
    with pytest.raises(ValueError, match=f"expected y on {x.device} as x is, got meta"):
        check_tensor("f", "y", x.to("meta"), like=("x", x))


def test_letters_stand_for_one_size_each():
    x, w = drawn(2, 3, 4), drawn(4)
    assert shapes("f", x=(x, "[..., D]"), w=(w, "[D]")) == {"...": (2, 3), "D": 4}
    assert shapes("f", x=(x, ""), w=(None, "[D]?"), y=(x[0, 0].double(), "[D > 0]", FLOATING)) == {"D": 4}
    assert shapes("f", x=(x, (2, 3, 4)), square=(x[0, :, :3], "[N, N]")) == {"N": 3}
    assert shapes("f", w=(w, "[D]"), more=(drawn(2, 5), "[N, D + 1]")) == {"D": 4, "N": 2}


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        (r"x of shape [N, D], got [2, 3, 4]", {"x": ((2, 3, 4), "[N, D]")}),
        (r"x of shape [N, D], got [3]", {"x": ((3,), "[N, D]")}),
        (r"x of shape [..., M, D], got [3]", {"x": ((3,), "[..., M, D]")}),
        (r"x of shape [N, N], got [3, 4]", {"x": ((3, 4), "[N, N]")}),
        (r"x of shape [N, 2], got [3, 4]", {"x": ((3, 4), "[N, 2]")}),
        (r"x of shape [5, 4], got [3, 4]", {"x": ((3, 4), (5, 4))}),
        (r"x of shape [N > 0, D], got [0, 4]; give one at least", {"x": ((0, 4), "[N > 0, D]")}),
        (r"w of shape [4], [D] where x is [N, D], got [3]", {"x": ((3, 4), "[N, D]"), "w": ((3,), "[D]?")}),
        (
            r"w of shape [5], [D + 1] where x is [N, D], got [4]; slice",
            {"x": ((3, 4), "[N, D]"), "w": ((4,), "[D + 1]")},
        ),
        (
            r"z of shape [2, 3, 7, E], [..., F, E] where x is [..., D] and y is [D, F], got [2, 4, 7, 1]; slice",
            {"x": ((2, 3, 4), "[..., D]"), "y": ((4, 7), "[D, F]"), "z": ((2, 4, 7, 1), "[..., F, E]")},
        ),
    ],
)
def test_another_shape_is_refused_by_what_its_letters_stand_for(said, arguments):
    with pytest.raises(ValueError, match=re.escape(f"f: expected {said}")):
        shapes("f", **{what: (drawn(*size), shape) for what, (size, shape) in arguments.items()})


class Traced(int):
    """A size as torch 2.11 traces it, which is not compared with a bool."""

    def __sub__(self, other):
        return Traced(int(self) - other)

    def __lt__(self, other):
        assert type(other) is not bool
        return int(self) < other


def test_sizes_are_compared_with_numbers_alone():
    assert _sizes_of((Traced(2), Traced(3)), ["N > 0", "D"], {}) == {"N": 2, "D": 3}


def drawn(*shape):
    return torch.rand(shape, device=DEVICE)


X, W, LABEL = drawn(3, 4), drawn(4), torch.tensor([0, 2, 1], device=DEVICE)
NORM = {"eps": 1e-6, "dtype": None}
LOSS = {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 5.0}
#: Of functions a call that is right.
RIGHT = {
    "multiply": ([X, X], {}),
    "double": ([X], {}),
    "silu_mul": ([X, X], {}),
    "add_add_multiply": ([X, X, X, X], {}),
    "softmax": ([X, -1], {}),
    "softmax_backward": ([X, X, -1], {}),
    "masked_scatter_nd_of_shape": ([(5, 4), LABEL[:, None], X], {"masked_value": -1, "reduction": "add"}),
    "scatter_nd_of_shape": ([(5, 4), LABEL[:, None], X], {"reduction": "add", "strategy": None}),
    "embedding_backward": ([X, LABEL, 5], {"padding_idx": 1}),
    "rms_norm": ([X, W, W], NORM),
    "add_layer_norm": ([X, X, W, W], NORM),
    "layer_norm_backward": ([X, X, W, W, X], {"eps": 1e-6}),
    "cross_entropy": ([X, LABEL, W], LOSS),
    "linear_cross_entropy": ([X, drawn(4, 4), LABEL, W], LOSS | {"rows": 2, "bias": W}),
    "concat_gemm": ([X, [drawn(4, 2), drawn(4, 2)]], {"tf32": None, "strategy": None}),
    "swiglu": ([X, drawn(4, 2), drawn(4, 2)], {"tf32": None, "strategy": None, "recompute": False}),
    "logistic_step": ([X, LABEL % 2.0, W, drawn(1), 0.1, 0.1], {}),
    "logistic_fit": ([X, LABEL % 2.0, W, drawn(1), 0.1, 0.1], {"steps": 1}),
    "kmeans_assign": ([X, drawn(2, 4)], {"label_dtype": torch.int64}),
    "kmeans_update": ([X, LABEL, 3], {"centres": X}),
    "kmeans_share": ([10, 0, 2], {}),
    "kmeans": ([X, 2], {"init": "random", "max_iter": 1, "tol": 1e-3, "seed": 0}),
    "adamw_step": (
        [[drawn(4)], [drawn(4)], [drawn(4)], [drawn(4)]],
        {
            "step": 1,
            "lr": 0.1,
            "beta1": 0.9,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "seed": None,
            "norm": None,
            "max_norm": 1.0,
            "grad_scale": None,
            "found_inf": None,
        },
    ),
}
STRANGE = {
    "nothing": None,
    "text": "x",
    "a list": [1.0],
    "an object": object(),
    "more than 64 bits": 2**70,
    "no number": float("nan"),
    "a nested tensor": torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], device=DEVICE),
    "a sparse tensor": X.to_sparse(),
    "compressed rows": X.to_sparse_csr(),
    "an array": np.ones((3, 4), dtype=np.float32),
    "an array of objects": np.array([None]),
    "a class": torch.Tensor,
    "complex numbers": X.to(torch.complex64),
    "eight bits": X.to(torch.float8_e4m3fn),
    "another shape": drawn(7, 9),
    "a single number": drawn(),
    "nothing in it": drawn(0, 0),
    "another device": torch.ones(3, 4, device="meta"),
    "a function": len,
    "a list for a shape": types.SimpleNamespace(shape=[3, 4]),
}


LISTS = [[drawn(4)] for _ in range(4)]


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("inplace to be True or False, got 'no'", lambda: fusebook.cross_entropy(X, LABEL, inplace="no")),
        ("maximize to be True or False, got 'no'", lambda: fusebook.adamw_step(*LISTS, step=1, maximize="no")),
        ("max_norm of 0 or more, got -1.0", lambda: fusebook.adamw_step(*LISTS, step=1, norm=W[0], max_norm=-1)),
        ("max_norm of 0 or more, got nan", lambda: fusebook.adamw_step(*LISTS, step=1, norm=W[0], max_norm=math.nan)),
        ("grads to be a list of tensors, got set", lambda: fusebook.adamw_step(LISTS[0], {W}, *LISTS[2:], step=1)),
        ("grads to be a list of tensors, got dict", lambda: fusebook.adamw_step(LISTS[0], {0: W}, *LISTS[2:], step=1)),
        (
            "on_chip to be True, False or None, got 'no'",
            lambda: fusebook.logistic_fit(X, LABEL % 2.0, W, drawn(1), 0.1, 0.1, steps=1, on_chip="no"),
        ),
        (
            "hidden of shape [..., K > 0], got [3, 0]; give one at least",
            lambda: fusebook.linear_cross_entropy(X[:, :0], drawn(4, 0), LABEL),
        ),
    ],
)
def test_what_would_be_taken_for_something_else_is_refused(said, call):
    with pytest.raises((TypeError, ValueError), match=re.escape(f": expected {said}")):
        call()


@pytest.mark.parametrize("name", RIGHT)
def test_what_makes_no_sense_is_refused_in_a_sentence(name):
    """What was given, what is accepted, and what to do: or it does make sense."""
    function, (args, options) = getattr(fusebook, name), RIGHT[name]
    function(*args, **options)
    refused = []
    for slot in [*range(len(args)), *options]:
        for what, value in STRANGE.items():
            places, named = list(args), dict(options)
            (places if isinstance(slot, int) else named)[slot] = value
            try:
                function(*places, **named)
            except Exception as refusal:
                refused.append(f"{slot} is {what}: {type(refusal).__name__}: {refusal}")
    kinds = "TypeError|ValueError|IndexError|NotImplementedError"
    said = re.compile(rf"[^:]+: ({kinds}): \w+: expected .+, got .+; .+", re.DOTALL)
    assert not [refusal for refusal in refused if not said.fullmatch(refusal)]
    assert len(refused) > 5 * (len(args) + len(options)) / 2
