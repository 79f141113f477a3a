"""Memory: what kernels read and write is theirs, wherever it lies. Interpreted, accesses are checked: see memcheck."""

import pytest
import torch
import triton
import triton.language as tl

import fusebook
import memcheck
from fusebook.kernels._call import INTERPRETED
from fusebook.kernels.products import _pair

interpreted = pytest.mark.skipif(not INTERPRETED, reason="compute-sanitizer does this on a GPU")
#: Elements between neighbours that int32 can number, though not the second of them.
FAR = 2**30 + 8


@pytest.fixture(autouse=True, scope="module")
def _guarded():
    with memcheck.guarded():
        yield


@triton.jit
def _copied(y_ptr, x_ptr, SIZE, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < SIZE, other=0.0), mask=at < SIZE)


@triton.jit
def _paired(y_ptr, x_ptr, SIZE, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    pairs = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(y_ptr + at, tl.load(pairs + at, mask=at < SIZE, other=0), mask=at < SIZE)


@triton.jit
def _counted(y_ptr, SIZE, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + at, 1.0, mask=at < SIZE)


@triton.jit
def _joined(y_ptr, x_ptr, SIZE, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    y, _ = _pair(x_ptr, x_ptr, x_ptr, at, at < SIZE, SIZE, SIZE, False, 2)
    tl.store(y_ptr + at, y)


@interpreted
def test_an_access_outside_of_all_tensors_is_found():
    x, y = torch.ones(100), torch.zeros(100)
    _copied[(1,)](y, x, 100, BLOCK=128)
    for too_short in ((y[:99].clone(), x), (y, x[:99].clone())):
        with pytest.raises(Exception, match="outside of the kernel's tensors"):
            _copied[(1,)](*too_short, 100, BLOCK=128)
    with pytest.raises(Exception, match="an atomic operation of 4 bytes outside"):
        _counted[(1,)](y, 101, BLOCK=128)


@interpreted
def test_a_misaligned_access_is_found():
    x, y = torch.ones(102, dtype=torch.float16), torch.zeros(50, dtype=torch.int32)
    _paired[(1,)](y, x, 50, BLOCK=64)
    with pytest.raises(Exception, match="no multiple of 4"):
        _paired[(1,)](y, x[1:], 50, BLOCK=64)


def far(rows, columns, dtype, device, seed=0):
    """Random rows that lie gigabytes apart, of which memory is never touched between them."""
    memory = torch.empty((rows - 1) * FAR + columns, dtype=dtype, device=device)
    view = memory.as_strided((rows, columns), (FAR, 1))
    return view.copy_(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))


FAR_APART = {
    "softmax": lambda x: (fusebook.softmax(x, 1), torch.softmax(x, 1)),
    "softmax, at odd distances": lambda x: softmax_of(x.as_strided(x.shape, (FAR - 7, 1)).copy_(x.clone())),
    "softmax along the rows": lambda x: (fusebook.softmax(x, 0), torch.softmax(x, 0)),
    "a gradient of softmax": lambda x: (
        torch.func.vjp(fusebook.softmax, x.contiguous())[1](x)[0],
        torch.func.vjp(lambda v: torch.softmax(v, -1), x.contiguous())[1](x)[0],
    ),
    "elementwise": lambda x: (fusebook.multiply(x, x), x * x),
    "elementwise, transposed": lambda x: turned(x.as_strided((33, 40), (FAR // 16, 1)).copy_(torch.randn(33, 40))),
    "atomic": lambda x: scattered(x, "atomic"),
    "sorted": lambda x: scattered(x, "sorted"),
    "owner": lambda x: scattered(x, "owner"),
    "products": lambda x: products(x, "fused"),
    "swiglu": lambda x: (
        fusebook.swiglu(x, x.new_ones(x.shape[1], 3), x.new_ones(x.shape[1], 3)),
        (lambda s: torch.nn.functional.silu(s) * s)(x.sum(1, keepdim=True).expand(-1, 3)),
    ),
    "logistic": lambda x: logistic(x),
}


def turned(x):
    """With an operand that lies across, and so many rows that tiles are made of them."""
    across = x.t().contiguous().t()
    return fusebook.multiply(x, across), x * across


def softmax_of(x):
    """Addresses in whole vectors are smaller: these are in numbers."""
    return fusebook.softmax(x, 1), torch.softmax(x, 1)


def scattered(x, strategy):
    rows = torch.tensor([[1], [0], [1]], device=x.device)
    want = torch.zeros(2, x.shape[1], device=x.device).index_add_(0, rows[:, 0], x.float())
    return fusebook.scatter_nd_of_shape((2, x.shape[1]), rows, x, strategy=strategy), want.to(x.dtype)


def products(x, strategy):
    w = torch.randn(x.shape[1], 7, device=x.device, dtype=x.dtype)
    return fusebook.concat_gemm(x, [w, w], strategy=strategy), torch.cat([x @ w, x @ w], 1)


def logistic(x):
    """Of wide rows: interpreted, the number in a loop is int32 whatever its bounds are, as it is for narrow ones."""
    y, w, b = x.new_tensor([0, 1, 1]), torch.zeros(x.shape[1], device=x.device), torch.zeros((), device=x.device)
    return fusebook.logistic_step(x, y, w, b, lr=1.0, l2=0.0)[0], ((y.float() - 0.5) @ x.float()) / 3


@pytest.mark.parametrize(("name", "case"), FAR_APART.items(), ids=FAR_APART)
def test_rows_that_lie_far_apart_are_found(name, case, device, room):
    """Of 4 GiB of memory a few pages are touched: on the CPU the others are never there."""
    room(6 * 2**30)
    x = far(3, 600 if name == "logistic" and device == "cpu" else 40, torch.float16, device)
    got, want = case(x)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3, check_dtype=False)


def test_parts_of_a_sum_that_lie_far_apart_are_found(device, room):
    room(6 * 2**30)
    x, y = torch.empty(2 * FAR + 8, dtype=torch.float16, device=device), torch.empty(8, device=device)
    x[:8], x[-8:] = 1, 2
    _joined[(1,)](y, x, FAR, BLOCK=8)
    assert y.tolist() == [3] * 8
