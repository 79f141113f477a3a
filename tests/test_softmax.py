"""What is special to softmax: axes, strides, tables, rows that several programs share."""

import functools
import random

import pytest
import torch
import triton
import triton.language as tl  # noqa: F401  (interpreted code looks for it)
from hypothesis import given, settings
from hypothesis import strategies as st

import fusebook
from fusebook.cards._peers import quack_takes
from fusebook.cards.softmax import SOFTMAX_BACKWARD
from fusebook.kernels import _call, _rows
from fusebook.kernels import softmax as kernels
from fusebook.kernels._call import OPERATORS
from fusebook.kernels.softmax import softmax_backward
from fusebook.measure import check
from fusebook.measure.inputs import generator

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
NEEDS_CUDA = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def assert_like_float64(got, want, eps=8.0):
    """Close to a float64 result, as a share of each element and of the largest; special values in the same places."""
    assert got.shape == want.shape
    rounded = want.to(got.dtype)
    special = ~rounded.isfinite()
    assert torch.equal(got[special].nan_to_num(7.0), rounded[special].nan_to_num(7.0))
    error = torch.where(special, 0, (got.double() - want).abs())
    scale = torch.where(special, 0, want.abs())
    scale = scale + (scale.max() if scale.numel() else 0)
    assert (error <= eps * torch.finfo(got.dtype).eps * scale).all()


def assert_softmax(x, dim):
    got = fusebook.softmax(x, dim)
    assert got.is_contiguous()
    assert got.dtype == x.dtype
    assert_like_float64(got, torch.softmax(x.double(), dim))


def assert_gradient(y, dy, dim):
    """Close to float64 as a share of the terms: where they cancel, nothing is left to be close to."""
    got = softmax_backward(y, dy, dim)
    assert got.is_contiguous()
    assert got.dtype == y.dtype
    assert_gradient_of(got, y, dy, dim)


def assert_gradient_of(got, y, dy, dim):
    y, dy = y.double(), dy.double()
    want = y * (dy - (y * dy).sum(dim, keepdim=True))
    terms = y * (dy.abs() + (y * dy).abs().sum(dim, keepdim=True))
    assert ((got.double() - want).abs() <= 8 * torch.finfo(got.dtype).eps * (terms + terms.max() / 16)).all()


def test_a_gradient_is_judged_by_the_rounded_y_that_every_way_is_given():
    made = SOFTMAX_BACKWARD.make(generator(0, DEVICE), torch.float16, M=2, N=201088)
    y, dy = (t.double() for t in SOFTMAX_BACKWARD.variants["fusebook"].prepare(*made))
    exact = y * (dy - (y * dy).sum(-1, keepdim=True))
    yard = check.yardstick(SOFTMAX_BACKWARD, made)
    assert yard.error((exact.half(),)) <= 1.01 * yard.rounded


# Axes and strides


@EVERY_DTYPE
@pytest.mark.parametrize("dim", range(-4, 4))
def test_any_axis(dim, dtype):
    assert_softmax(torch.randn(3, 4, 5, 6, device=DEVICE).to(dtype), dim)


@EVERY_DTYPE
def test_a_long_axis_before_the_last(dtype):
    assert_softmax(torch.randn(2, 700, 37, device=DEVICE).to(dtype), 1)


def test_an_axis_before_the_last_that_one_program_could_not_finish_in_time():
    assert_softmax(torch.randn(20000, 3, device=DEVICE), 0)


NARROW = {
    "an odd number of rows": lambda randn: randn(9, 10001 if CUDA else 101).t(),
    "few neighbours": lambda randn: randn(5000 if CUDA else 50, 7, 2).permute(2, 0, 1),
    "four axes permuted": lambda randn: randn(50 if CUDA else 2, 17, 7, 30).permute(2, 0, 3, 1),
    "five axes, of which no two fold": lambda randn: randn(40 if CUDA else 4, 3, 12, 5, 8).permute(2, 0, 4, 3, 1)[
        :, :, :7
    ],
    "two numbers": lambda randn: randn(2, 33333 if CUDA else 33).t(),
}


@EVERY_DTYPE
@pytest.mark.parametrize("view", NARROW.values(), ids=NARROW.keys())
def test_narrow_rows_across(view, dtype):
    x = view(functools.partial(torch.randn, device=DEVICE)).to(dtype)
    assert_softmax(x, -1)
    y = torch.softmax(torch.randn(x.shape, device=DEVICE), -1).to(dtype)
    assert_gradient(y, x, x.dim() - 1)
    rows = x.movedim(-1, 0)
    assert_softmax(rows, 0)  # the result lies as the rows do
    x[0] = float("-inf")
    assert_softmax(x, -1)


VIEWS = {
    "transposed": lambda randn: randn(40, 70).t(),
    "columns cut off": lambda randn: randn(9, 70)[:, 3:60],
    "an odd width": lambda randn: randn(9, 71),
    "an odd width cut off": lambda randn: randn(9, 73)[:, :71],
    "rows left out": lambda randn: randn(19, 70)[::2],
    "columns left out": lambda randn: randn(9, 70)[:, ::3],
    "one row repeated": lambda randn: randn(1, 70).expand(9, 70),
    "one column repeated": lambda randn: randn(9, 1).expand(9, 70),
    "one element repeated": lambda randn: randn(1, 1).expand(9, 70),
    "axes swapped": lambda randn: randn(5, 6, 70).transpose(0, 1),
    "channels last": lambda randn: randn(2, 8, 5, 6).to(memory_format=torch.channels_last),
    "four axes permuted": lambda randn: randn(3, 4, 5, 6).permute(2, 0, 3, 1),
    "five axes, of which no two fold": lambda randn: randn(2, 2, 3, 2, 5).permute(2, 0, 4, 3, 1)[:, :, :4],
    "an offset that no vector load starts at": lambda randn: randn(9 * 64 + 1)[1:].view(9, 64),
    "an odd width at an odd offset": lambda randn: randn(9 * 71 + 1)[1:].view(9, 71),
    "an odd distance between the outer rows only": lambda randn: randn(3 * 257).as_strided((3, 4, 64), (257, 64, 1)),
}
TWO_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@TWO_DTYPES
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_any_strides(view, dtype):
    x = view(functools.partial(torch.randn, device=DEVICE, dtype=dtype))
    for dim in range(x.dim()):
        assert_softmax(x, dim)


@TWO_DTYPES
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_any_strides_of_a_gradient(view, dtype):
    dy = view(functools.partial(torch.randn, device=DEVICE, dtype=dtype))
    for dim in range(dy.dim()):
        assert_gradient(torch.softmax(torch.randn_like(dy), dim), dy, dim)


@EVERY_DTYPE
def test_wide_rows_across_are_copied(dtype, monkeypatch):
    copied = []
    original = kernels.with_adjacent_elements
    monkeypatch.setattr(kernels, "with_adjacent_elements", lambda x: copied.append(x) or original(x))
    constants = kernels.across_constants
    if not CUDA:  # interpreted, a tile holds any row
        monkeypatch.setattr(
            kernels, "across_constants", lambda layout, *_: constants(layout, *_) if layout.sizes[2] <= 1000 else None
        )
    with _call.uncached():
        rows = 260 if CUDA else 36
        x = torch.randn(2100, rows, device=DEVICE).to(dtype).mT
        y = torch.softmax(torch.randn(rows, 2100, device=DEVICE), 1).to(dtype)
        assert_softmax(x, 1)
        assert len(copied) == 1
        assert_softmax(x[:, :100], 1)  # these fit into registers
        assert len(copied) == 1
        assert_softmax(x.mT, 0)  # the result is across as well
        assert len(copied) == 2
        assert_gradient(y, x, 1)
        assert len(copied) == 3
        assert_gradient(y.mT.contiguous(), x.mT, 0)
        assert len(copied) == 5


#: Of these views the rows are copied for some axis: elements or rows that are neither adjacent, or too many axes.
COPIED = {
    "columns left out", "one column repeated", "one element repeated", "four axes permuted",
    "five axes, of which no two fold", "axes swapped", "channels last",
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_is_copied_only_if_neither_its_elements_nor_its_rows_are_adjacent(view, request, monkeypatch):
    copies = []
    monkeypatch.setattr(kernels, "contiguous", lambda t: copies.append(t) or t.contiguous())
    x = view(functools.partial(torch.randn, device=DEVICE))
    with _call.launching(x):
        for dim in range(x.dim()):
            OPERATORS["softmax"].into(torch.empty(x.shape, device=DEVICE), x, dim)
    assert not copies or request.node.callspec.id in COPIED


@EVERY_DTYPE
@pytest.mark.parametrize(
    "name", ["along", "across", "with gaps", "with an offset", "expanded", "overlapping", "unmergeable"]
)
def test_a_tiled_copy_has_every_element_in_its_place(name, dtype):
    base = torch.arange(6 * 70 * 90, device=DEVICE).to(dtype)
    x = {
        "along": base.view(6, 70, 90),
        "across": base.view(6, 90, 70).mT,
        "with gaps": base.view(6, 70, 90)[:, ::2, 1::3],
        "with an offset": base[1 : 1 + 6 * 60 * 70].view(6, 70, 60).mT,
        "expanded": base[:90].expand(6, 70, 90).transpose(0, 2),
        "overlapping": base.as_strided((6, 70, 90), (70, 1, 3)),
        "unmergeable": base.view(2, 3, 70, 9, 10).permute(0, 3, 1, 4, 2),
    }[name]
    with _call.launching(x):
        assert torch.equal(_rows.contiguous_rows(x), x.reshape(-1, x.shape[-1]))
        y = torch.empty(x.shape, dtype=dtype, device=DEVICE).mT.contiguous().mT
        _rows.copy_strided(y, x)
    assert torch.equal(y, x)


@NEEDS_CUDA
def test_a_tiled_copy_of_more_than_2_to_the_31_elements(room):
    room(2**34)
    x = torch.empty(2**16 + 8, 2**15 + 8, dtype=torch.float16, device=DEVICE)
    x[-9:, -9:] = torch.randn(9, 9, device=DEVICE)
    y = _rows.with_adjacent_elements(x.mT)
    assert torch.equal(y[-9:, -9:], x[-9:, -9:].mT)


@pytest.mark.parametrize("dim", [-1, 0])
def test_without_axes(dim):
    x = torch.tensor(3.0, device=DEVICE, requires_grad=True)
    y = fusebook.softmax(x, dim)
    assert y.shape == ()
    assert y.item() == 1
    y.backward()
    assert x.grad.item() == 0
    assert fusebook.softmax(torch.tensor(float("inf"), device=DEVICE)).isnan()


@EVERY_DTYPE
@pytest.mark.parametrize("n", [1, 2, 31, 128, 129, 1000, 4104, 12672, 20001, 30000, 70001], ids="{}-columns".format)
def test_widths_on_both_sides_of_each_choice(n, dtype):
    x = torch.randn(3, n, device=DEVICE).to(dtype)
    assert_softmax(x, 1)
    y, dy = torch.softmax(x, 1), (1 + torch.randn(3, n, device=DEVICE)).to(dtype)
    assert_gradient(y, dy, 1)


TABLES = {"forward": (1, kernels._SOFTMAX), "backward": (2, kernels._BACKWARD)}


@pytest.mark.parametrize(("tensors", "family"), TABLES.values(), ids=TABLES.keys())
def test_every_line_of_a_table_holds_its_rows_in_registers(tensors, family):
    for size, lines in family.configs.items():
        limits = [line.limit for line in lines]
        assert limits == sorted(set(limits)) and len(lines) <= 8
        for line, shortest in zip(lines, [1, *limits], strict=False):
            for n in {max(1, shortest // size + 1), line.limit // size}:
                made = _rows.row_constants(line, n, 10**6)
                assert (made["CHUNKS"] - 1) * made["BLOCK"] < n <= made["CHUNKS"] * made["BLOCK"]
                held = made["ROWS"] * made["CHUNKS"] * made["BLOCK"] * tensors * max(4, size) // 4
                assert held <= 224 * 32 * made["num_warps"], "of a thread's 255 registers"


@pytest.mark.parametrize(("tensors", "family"), TABLES.values(), ids=TABLES.keys())
def test_no_table_leaves_out_rows_between_registers_and_torch(tensors, family):
    for size in (2, 4):
        assert family.parts[size][-1].limit == size * _rows.WIDEST
        assert family.unaligned < family.configs[2][-1].limit
    assert not family.parts[8]


@EVERY_DTYPE
def test_more_wide_rows_than_processors(dtype):
    x = torch.randn(3 if DEVICE == "cpu" else 200, 66000, device=DEVICE).to(dtype)
    assert_softmax(x, 1)
    assert_gradient(torch.softmax(x, 1), x, 1)


def test_a_row_of_more_than_a_million():
    x = torch.randn(2, 2**20 + 3, device=DEVICE)
    x[1, -1] = 30  # nearly all the weight, on the last and ragged tile
    assert_softmax(x, 1)


# Rows beyond the registers of one program


@pytest.fixture
def force_parts(monkeypatch):
    """Rows of any width are shared, in parts of up to `block` columns, in the interpreter as well."""

    def force(block):
        parts = {size: (_rows.Parts(2**40, block, 4),) for size in (2, 4)}
        none = {2: (), 4: (), 8: kernels._SOFTMAX.configs[8]}
        for name in ("_SOFTMAX", "_BACKWARD"):
            monkeypatch.setattr(kernels, name, getattr(kernels, name)._replace(configs=none, parts=parts | {8: ()}))
        monkeypatch.setattr(kernels, "INTERPRETED", False)
        if not CUDA:  # programs run in turn: looking again finds nothing new
            monkeypatch.setattr(_rows, "TRIES", 0)

    with _call.uncached():
        yield force


WIDE = {
    "an odd width": lambda randn: randn(5, 50257),
    "an odd width at an odd offset": lambda randn: randn(3 * 40963 + 1)[1:].view(3, 40963),
    "columns cut off": lambda randn: randn(5, 33300)[:, 3:33100],
    "columns cut off at a whole vector": lambda randn: randn(5, 33312)[:, 16:33101],
    "two outer strides": lambda randn: randn(4, 3, 33000)[::2, :, 1:].transpose(0, 1),
    "three outer strides": lambda randn: randn(2, 3, 2, 33100)[..., 4:33004].permute(2, 0, 1, 3)[:, :, :2],
    "one row repeated": lambda randn: randn(1, 66001).expand(3, 66001),
    "a width that a row's beginning pushes into one more tile": lambda randn: randn(4, 12 * 4096 - 1),
}


@TWO_DTYPES
@pytest.mark.parametrize("view", WIDE.values(), ids=WIDE.keys())
def test_wide_rows_of_any_strides(view, dtype):
    x = view(functools.partial(torch.randn, device=DEVICE, dtype=dtype))
    if 0 not in x.stride():
        x[0, ..., -1], x[-1, ..., 0] = 10, 11  # what a row begins and ends with counts
    assert_softmax(x, -1)


@TWO_DTYPES
@pytest.mark.parametrize("view", WIDE.values(), ids=WIDE.keys())
def test_a_gradient_of_wide_rows_of_any_strides(view, dtype):
    dy = view(functools.partial(torch.randn, device=DEVICE, dtype=dtype))
    assert_gradient(torch.softmax(torch.randn_like(dy), -1), dy, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("where", [0, 30000, 65999], ids="the largest at {}".format)
def test_parts_of_a_wide_row_may_be_far_apart(where, dtype, force_parts):
    force_parts(32768)
    """Each part has its own maximum: one that is far below another counts for nothing, and for no NaN."""
    x = torch.full((3, 66000), -float("inf"), device=DEVICE, dtype=dtype)
    x[0] = torch.randn(66000, device=DEVICE) - 900
    x[0, where] = 900
    x[1, where] = -3
    want = torch.zeros_like(x)
    want[:2, where] = 1
    got = fusebook.softmax(x)
    assert torch.equal(got[:2], want[:2]) and got[2].isnan().all()
    low = x[:1] * 1e-3 - 2000  # all far below what lanes hold that have no part
    torch.testing.assert_close(
        fusebook.softmax(low), torch.softmax(low, 1), rtol=1e-13 if dtype == torch.float64 else 1e-4, atol=0
    )


def test_rows_that_programs_share_are_the_same_in_spoiled_memory(force_parts):
    """The workspace is in memory that holds the words of other calls."""
    force_parts(32768)
    x = torch.randn(2, 66001, device=DEVICE)
    want = fusebook.softmax(x)
    gradient = softmax_backward(want, x, 1)
    torch.testing.assert_close(want, torch.softmax(x, 1))
    for _ in range(100 if CUDA else 1):
        spoiled = [torch.full((64,), -1, dtype=torch.int64, device=DEVICE) for _ in range(64)]
        del spoiled
        assert torch.equal(fusebook.softmax(x), want)
        assert torch.equal(softmax_backward(want, x, 1), gradient)


@TWO_DTYPES
@pytest.mark.parametrize(("n", "parts"), [(3000, 2), (3001, 3)], ids=["aligned", "odd"])
@pytest.mark.parametrize("when", ["in turn", "on time"] if CUDA else ["on time", "late"])
def test_a_shared_row_has_the_same_bits_whenever_words_arrive(when, n, parts, dtype, force_parts, monkeypatch):
    """In the interpreter programs run in turn: the first recomputes all words, the others find them.

    On time: a launch finds the words of the one before. Late: words are never seen, so every program recomputes all,
    for which `publish` is replaced: not possible in compiled code, where TRIES = 0 is tested.
    """
    force_parts(2048 if parts == 2 else 1024)
    x = torch.randn(3, n, device=DEVICE).to(dtype)
    x[1, : n // 3 * 2] = float("-inf")  # a part, or two, without anything
    x[2, -1] = 50
    y, dy = torch.softmax(x.float(), 1).to(dtype), torch.randn(3, n, device=DEVICE).to(dtype)
    with _call.uncached():
        assert_softmax(x, 1)
        want, gradient = fusebook.softmax(x), softmax_backward(y, dy)
        assert_gradient_of(gradient, y, dy, 1)
        boards = []
        if when == "late":
            monkeypatch.setattr(kernels, "publish", nothing)
        if when == "on time":
            made = kernels.workspace
            monkeypatch.setattr(kernels, "workspace", lambda *a: boards.append(made(*a)) or boards[-1])
            fusebook.softmax(x), softmax_backward(y, dy)
            assert [len(words) for words, _ in boards] == [3 * parts] * 2 and all((w != 0).all() for w, _ in boards)
            kept = iter(boards[:2])
            monkeypatch.setattr(kernels, "workspace", lambda *_: next(kept))
            monkeypatch.setattr(
                kernels, "first_missing", None if not CUDA else kernels.first_missing
            )  # nothing to redo
        assert torch.equal(fusebook.softmax(x), want)
        assert torch.equal(softmax_backward(y, dy), gradient)


@triton.jit
def nothing(workspace_ptr, word):
    """Replaces `publish`, so that no program ever sees a word of another."""


@NEEDS_CUDA  # interpreted, programs run in turn
@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("n", [66001, 131072])
@TWO_DTYPES
def test_what_other_programs_publish_is_what_a_program_recomputes(dtype, rows, n, monkeypatch):
    x = torch.randn(rows, n, device=DEVICE, dtype=dtype)
    want = fusebook.softmax(x)
    gradient = softmax_backward(want, x, 1)
    monkeypatch.setattr(_rows, "TRIES", 0)
    with _call.uncached():
        assert torch.equal(fusebook.softmax(x), want)
        assert torch.equal(softmax_backward(want, x, 1), gradient)


@pytest.mark.parametrize(("tensors", "family"), TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("aligned", [True, False])
def test_parts_hold_every_element_once(size, aligned, tensors, family):
    rng = random.Random(0)
    vec = 16 // size if aligned else 1
    for n in [
        *(2**i + j for i in range(14, 20) for j in (-1, 0, 1)),
        *(rng.randrange(8192, 2**20) for _ in range(200)),
        2**20,
    ]:
        line = _rows.first_that_fits(family.parts, n, size)
        made = _rows.shared(line, n, size, vec)
        reach = n if n % vec == 0 else n + vec - 1  # where a row begins with the last element of a vector
        span = made.span * vec
        assert (made.parts - 1) * span < reach <= made.parts * span
        assert span <= made.constants["BLOCK"] and span * size % 128 == 0
        # A word a lane, and no thread without one.
        assert max(made.parts, 32 * line.warps) <= made.constants["LANES"]
        # On an H100 all programs of a row run at once.
        assert made.parts <= 132 * (65536 // ((line.registers or 255) * 32 * line.warps))


@pytest.mark.parametrize("n", [2**20 + 8, 20000], ids=["wider than a block", "float64"])
def test_what_no_kernel_holds_is_computed_by_torch(n, monkeypatch):
    dtype = torch.float64 if n == 20000 else torch.bfloat16
    asked = []
    for name in ("_SOFTMAX", "_BACKWARD"):
        family = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, family._replace(library=lambda *a, f=family.library: asked.append(f) or f(*a))
        )
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    x = torch.randn(2, n, device=DEVICE, dtype=dtype)
    x[0, :5] = float("-inf")
    with _call.uncached():
        assert_softmax(x, 1)
        assert_softmax(x.t().contiguous().t(), 1)
        assert_softmax(x.t().contiguous(), 0)
        assert_gradient(torch.softmax(x, 1), torch.randn_like(x), 1)
    assert len(asked) == 4


# Special values


@EVERY_DTYPE
def test_exponentials_do_not_overflow(dtype):
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).min
    rows = [[1000, 999, -1000], [-1000, -1001, -1002], [most, most, most], [most, least, least], [least, -3, most]]
    assert_softmax(torch.tensor(rows, device=DEVICE, dtype=dtype), 1)


# Gradients


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_of_both_orders(dim):
    x = torch.randn(2, 3, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: fusebook.softmax(t, dim), x)
    assert torch.autograd.gradgradcheck(lambda t: fusebook.softmax(t, dim), x, fast_mode=True)


# Tracing and transforms


def test_vmap_moves_the_axis():
    x = torch.randn(4, 3, 5, device=DEVICE)
    torch.testing.assert_close(torch.vmap(lambda t: fusebook.softmax(t, 0))(x), torch.softmax(x, 1))
    torch.testing.assert_close(
        torch.vmap(lambda t: fusebook.softmax(t, -1), in_dims=2)(x), x.permute(2, 0, 1).softmax(2)
    )
    numbers, ones = torch.randn(5, device=DEVICE), torch.ones(5, device=DEVICE)
    assert torch.equal(torch.vmap(fusebook.softmax)(numbers), ones)
    assert torch.equal(torch.vmap(lambda t: fusebook.softmax(t, 0))(numbers), ones)
    assert torch.equal(torch.vmap(fusebook.softmax)(numbers[:, None]), ones[:, None])


def test_a_parameter_and_a_subclass_are_tensors():
    class Named(torch.Tensor):
        pass

    x = torch.randn(3, 5, device=DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(fusebook.softmax(torch.nn.Parameter(x)), torch.softmax(x, -1))
    torch.testing.assert_close(torch.Tensor(fusebook.softmax(x.as_subclass(Named))), torch.softmax(x, -1))


# Bad input


def ones(*shape):
    return torch.ones(shape, device=DEVICE)


BAD = {
    "dim too large": (lambda: fusebook.softmax(ones(3, 5), 2), IndexError, r"from -2 to 1 .*\(3, 5\), got 2"),
    "dim too small": (lambda: fusebook.softmax(ones(3, 5), -3), IndexError, "got -3"),
    "dim without axes": (lambda: fusebook.softmax(torch.tensor(1.0, device=DEVICE), 1), IndexError, "from -1 to 0"),
    "no dim": (lambda: fusebook.softmax(ones(3), None), TypeError, "dim to be an integer, got NoneType"),
    "two dims": (lambda: fusebook.softmax(ones(3, 5), (0, 1)), TypeError, "got tuple; give one axis"),
    "dy of another shape": (
        lambda: softmax_backward(ones(3), ones(4)),
        ValueError,
        r"expected dy of shape \[3\], \[...\] where y is \[...\], got \[4\]",
    ),
    "dy of another dtype": (
        lambda: softmax_backward(ones(3), ones(3).half()),
        TypeError,
        "expected dy to be torch.float32 as y is, got torch.float16",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_says_what_was_given(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_quack_refuses_rows_that_its_vectors_do_not_fill():
    quack_takes(torch.ones(2, 1000, dtype=torch.float16))
    with pytest.raises(NotImplementedError, match="quack takes rows of whole 16-byte vectors, got 781 columns of"):
        quack_takes(torch.ones(2, 781, dtype=torch.float16))


def test_a_cpu_tensor_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(_call, "INTERPRETED", False)
    if CUDA:  # a real driver takes CUDA tensors only
        message = "expected a CUDA tensor, got one on cpu; .*TRITON_INTERPRET=1"
    else:
        message = "expected a CUDA tensor, got one on cpu; move it to a GPU"
    with pytest.raises(ValueError, match=message):
        fusebook.softmax(torch.randn(3, 5))


# Laws


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 300), st.integers(-64, 64))
def test_a_shift_changes_nothing(m, n, shift):
    x = (torch.randn(m, n, device=DEVICE) * 256).round() / 64  # so that adding a small integer is exact
    assert torch.equal(fusebook.softmax(x), fusebook.softmax(x + shift))


# What only a GPU has


BEYOND = {
    "many rows": ((2**21 + 1, 1025), 1, (slice(-2, None),)),
    "two rows": ((2, 2**30 + 5), 1, (slice(-1, None),)),
    "an axis before the last": ((3, 1025, 2**20), 1, (slice(-1, None), slice(None), slice(-1000, None))),
}


@NEEDS_CUDA
@pytest.mark.parametrize(("shape", "dim", "end"), BEYOND.values(), ids=BEYOND.keys())
def test_more_than_2_to_the_31_elements(shape, dim, end, room):
    room(2**36)
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    y = fusebook.softmax(x, dim)
    # The last rows lie beyond what int32 can address; of their columns the last million is enough.
    assert_like_float64(y[end][..., -(2**20) :], torch.softmax(x[end].double(), dim)[..., -(2**20) :])
    dx = softmax_backward(y, x, dim)[end]
    dot = (y[end].double() * x[end]).sum(dim, keepdim=True)
    want = y[end][..., -(2**20) :].double() * (x[end][..., -(2**20) :].double() - dot[..., -(2**20) :])
    assert_like_float64(dx[..., -(2**20) :], want)


def test_a_second_gradient_in_half_precision_has_sums_in_float32():
    y = torch.full((2, 2000), 1 / 2000, dtype=torch.float16, device=DEVICE)
    dy = (200 + torch.randn(2, 2000, device=DEVICE)).half()
    g = torch.randn(2, 2000, device=DEVICE).half()
    own = [t.clone().requires_grad_() for t in (y, dy)]
    for_y, for_dy = torch.autograd.grad(softmax_backward(*own, -1), own, g)
    y, dy, g = y.double(), dy.double(), g.double()
    want = g * (dy - (y * dy).sum(1, keepdim=True)) - dy * (y * g).sum(1, keepdim=True)
    assert (for_y.double() - want).abs().max() < 2e-3 * want.abs().max()
    assert_gradient_of(for_dy, y, g, -1)


@TWO_DTYPES
def test_what_is_zero_is_found_in_the_workspace(dtype, force_parts):
    """A part's sum or maximum of zero is a word like any other, not one that is missing."""
    force_parts(32768)
    y = torch.softmax(torch.randn(2, 66001, device=DEVICE), 1).to(dtype)
    assert torch.equal(softmax_backward(y, torch.zeros_like(y), 1), torch.zeros_like(y))
    zeros = torch.zeros_like(y)
    torch.testing.assert_close(fusebook.softmax(zeros), zeros + 1 / 66001)


def test_parts_are_loaded_by_vectors_only_if_all_rows_begin_alike():
    memory = torch.randn(2 * 33001 + 8, device=DEVICE).half()
    y = torch.empty(2, 33000, device=DEVICE, dtype=torch.half)

    def width(x, out=y):
        return _rows.vector_width(_rows.layout_of(1, out, x), out, x)

    assert width(memory[:66000].view(2, 33000)) == width(memory[8:66008].view(2, 33000)) == 8
    assert width(memory[1:66001].view(2, 33000)) == 1
    assert width(memory[:66002].view(2, 33001)[:, :33000]) == 1
    odd = torch.empty(2, 33001, device=DEVICE, dtype=torch.half)
    assert width(memory[:66002].view(2, 33001), odd) == 8  # neither is aligned, but both rows alike
