"""
Descriptors and persistent kernels: no wait between tiles
=========================================================

The matmul of page 201 waits: for addresses, for the first loads of a tile, and
for a launch. GPUs from NVIDIA's Hopper on, such as the H100, can hide each of
these waits. We remove them one by one, with a few lines each.

You will learn

- how one thread loads a whole tile by a tensor descriptor,
- how a persistent kernel loads a tile while it finishes the one before,
- how a kernel starts before the one ahead of it has ended.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_201_gemm_concat`. No GPU
is needed: without one, kernels run in Triton's interpreter, and times come
from a record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["matmul", "TMA", "persistent kernel"]
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

page = lesson.open("plot_204_descriptors")
page.verdict()

# %%
# The matmul to improve
# ---------------------
#
# The problem is that of page 201: two matmuls of one x, side by side in one
# output. We compare with *views*, where torch writes both into their places:


def in_views(x, w0, w1):
    y = x.new_empty(x.shape[0], 2 * w0.shape[1])
    left, right = y.chunk(2, 1)  # they share the memory of y
    torch.mm(x, w0, out=left)
    torch.mm(x, w1, out=right)
    return y


# %%
# .. _tiles-pointers:
#
# Step 1: tiles by pointers {gain pointers at N=4096}
# ---------------------------------------------------
#
# This is the last kernel of page 201. A program owns a tile of the output, and
# ``place`` says which one: eight rows of tiles are taken together, so programs
# share what they load in L2. Each of the next steps removes a wait.


@triton.jit
def place(tile, rows, columns, GROUP: tl.constexpr):
    first = tile // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    inside = tile % (GROUP * columns)
    return first + inside % height, inside // height


@triton.jit
def by_pointers(
    y_ptr, x_ptr, w0_ptr, w1_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BN)
    r, c = place(tl.program_id(0), tl.cdiv(M, BM), 2 * columns, 8)
    w_ptr = tl.where(c < columns, w0_ptr, w1_ptr)
    start = tl.where(c < columns, 0, N)
    m = r * BM + tl.arange(0, BM)
    n = c % columns * BN + tl.arange(0, BN)
    y = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x_mask = (m < M)[:, None] & (k < K)[None, :]
        w_mask = (k < K)[:, None] & (n < N)[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=x_mask, other=0)
        w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=w_mask, other=0)
        if WIDEN:  # the interpreter multiplies bfloat16 incorrectly
            x, w = x.to(tl.float32), w.to(tl.float32)
        y = tl.dot(x, w, y, input_precision="ieee")
    y_mask = (m < M)[:, None] & (n < N)[None, :]
    y_ptrs = y_ptr + m[:, None] * (2 * N) + (start + n)[None, :]
    tl.store(y_ptrs, y, mask=y_mask)


def sizes(x, w):  # M, N, K, then the constants of all kernels of this page
    BK = 128 // x.element_size()  # so that float32 fits shared memory, too
    constants = {"BM": 128, "BN": 256, "BK": BK, "WIDEN": not x.is_cuda}
    return (x.shape[0], w.shape[1], w.shape[0]), constants | {"num_warps": 8}


def tiles(M, N):  # of both weights
    return triton.cdiv(M, 128) * 2 * triton.cdiv(N, 256)


def matmul_pointers(x, w0, w1):
    (M, N, K), constants = sizes(x, w0)
    y = x.new_empty(M, 2 * N)
    by_pointers[(tiles(M, N),)](y, x, w0, w1, M, N, K, **constants)
    return y


x, w0, w1 = page.stress(70, 96, 264)  # M, K, N
given = x.repeat(17, 1), w0, w1  # so that rows of tiles are two groups
page.check(matmul_pointers, *given)

# %%
# .. _tiles-descriptors:
#
# Step 2: tensor descriptors {gain descriptors at N=4096}
# -------------------------------------------------------
#
# A turn of the loop loads (128 + 256) x 64 elements. In bfloat16 these are
# 3072 pieces of 16 bytes, 12 for each of 256 threads. For each piece a thread
# computes an address and a mask. These instructions compete with those that
# feed the :term:`tensor cores <tensor core>`.
#
# Hopper has a copy engine in each :term:`multiprocessor`, the :term:`TMA`. A
# *tensor descriptor* holds a tensor's address, sizes and strides, and the size
# of a tile. One thread asks for a tile by its coordinates, and the engine
# brings it to :term:`shared memory`, the fast memory of a multiprocessor.
# Outside the tensor it brings zeros and stores nothing, so no masks are
# needed.


@triton.jit
def multiplied(
    x_tiles, w_tiles, r, c, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of a product."""
    y = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        x = x_tiles.load([r * BM, k])  # two requests for the whole program
        w = w_tiles.load([k, c * BN])
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        y = tl.dot(x, w, y, input_precision="ieee")
    return y


@triton.jit
def by_descriptors(
    y0_tiles, y1_tiles, x_tiles, w0_tiles, w1_tiles, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    r, c = place(tl.program_id(0), rows, 2 * columns, 8)
    for i in tl.static_range(2):  # unrolled: the code exists for each weight
        w_tiles, y_tiles = (w0_tiles, w1_tiles)[i], (y0_tiles, y1_tiles)[i]
        if c // columns == i:
            n = c % columns
            y = multiplied(x_tiles, w_tiles, r, n, K, BM, BN, BK, WIDEN)
            y_tiles.store([r * BM, n * BN], y.to(y_tiles.dtype))


def described(x, height, width):
    return TensorDescriptor(x, [*x.shape], [*x.stride()], [height, width])


def all_described(x, w0, w1):
    y = x.new_empty(x.shape[0], 2 * w0.shape[1])
    found = [described(half, 128, 256) for half in y.chunk(2, 1)]
    BK = sizes(x, w0)[1]["BK"]
    found += [described(x, 128, BK)]
    return y, found + [described(w, BK, 256) for w in (w0, w1)]


def matmul_descriptors(x, w0, w1):
    (M, N, K), constants = sizes(x, w0)
    y, found = all_described(x, w0, w1)
    by_descriptors[(tiles(M, N),)](*found, M, N, K, **constants)
    return y


page.check(matmul_descriptors, *given)

# %%
# A descriptor has one base, so each weight has its own. So has each half of
# the output: what reaches beyond the left half must not land in the right one.
# ``tl.where`` chooses between two pointers, but not between two descriptors.
# ``tl.static_range`` therefore repeats the code, with one weight in each copy.
# Rows have to begin at multiples of 16 bytes.

# %%
# .. _tiles-persistent:
#
# Step 3: a persistent kernel {gain persistent at N=4096}
# -------------------------------------------------------
#
# A program of step 2 waits for its first loads, and loads nothing while it
# stores its tile. A :term:`persistent kernel` has one program for each
# multiprocessor. It takes one tile after another, and loads ahead.
#
# A tile with K = 4096 takes 64 turns of the loop. We guess that the first
# loads take three turns, and the store two. The loads can be hidden, and part
# of the store: **we predict 7 % at most**, 5 of 69 turns.

spans = {"step 2: loads": [(0, 4, "tile 0"), (7, 11, "tile 132")]}
spans["step 2: multiplies"] = [(1, 5, "tile 0"), (8, 12, "tile 132")]
spans["step 2: stores"] = [(5, 7, "0"), (12, 14, "132")]
spans["step 3: loads"] = [(0, 4, "tile 0"), (4, 8, "tile 132")]
spans["step 3: multiplies"] = [(1, 5, "tile 0"), (6, 10, "tile 132")]
spans["step 3: stores"] = [(5, 7, "0"), (10, 12, "132")]
page.picture.lanes("What one of 132 multiprocessors does", spans)

# %%
# Comments mark what is new.


@triton.jit
def persistent(
    y0_tiles, y1_tiles, x_tiles, w0_tiles, w1_tiles, M, N, K, PROGRAMS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    count = rows * columns  # tiles of one weight
    for i in tl.static_range(2):
        w_tiles, y_tiles = (w0_tiles, w1_tiles)[i], (y0_tiles, y1_tiles)[i]
        # If the first weight ends at program 3, the second begins at 4.
        first = tl.program_id(0) + i * (PROGRAMS - count % PROGRAMS)
        # Every PROGRAMS-th tile.
        for tile in tl.range(first % PROGRAMS, count, PROGRAMS, flatten=True):
            r, n = place(tile, rows, columns, 8)  # of one weight
            y = multiplied(x_tiles, w_tiles, r, n, K, BM, BN, BK, WIDEN)
            y_tiles.store([r * BM, n * BN], y.to(y_tiles.dtype))


def programs_for(x, count):
    if not x.is_cuda:
        return 3  # in the interpreter: fewer than there are tiles
    gpu = torch.cuda.get_device_properties(x.device)
    return min(gpu.multi_processor_count, count)


def matmul_persistent(x, w0, w1):
    (M, N, K), constants = sizes(x, w0)
    y, found = all_described(x, w0, w1)
    programs = programs_for(x, tiles(M, N))
    persistent[(programs,)](*found, M, N, K, programs, **constants)
    return y


page.check(matmul_persistent, *given)

# %%
# ``flatten=True`` makes one loop of two: the one over tiles and the one over
# K. Triton's compiler starts the loads of some turns ahead of their use. In
# one long loop, it can also start those of the next tile.
#
# The tiles are taken in rounds of one for each multiprocessor. A last round
# that is hardly filled takes as long as a full one: see
# :term:`wave quantization`.

# %%
# .. _tiles-dependent:
#
# Step 4: an early launch {gain dependent at N=1024, warm}
# --------------------------------------------------------
#
# Between two kernels the GPU is idle: the second one starts after the last
# program of the first has ended. With :term:`programmatic dependent launch`
# its programs start earlier: a multiprocessor that has finished its last tile
# of the first kernel starts them, while others still compute. They wait there
# until all that the first kernel wrote can be read. A gap of a microsecond
# counts where the matmuls are small.

spans = {"first kernel": [(0, 4, "multiplies")]}
spans["second kernel"] = [(2.6, 4.05, "waits"), (4.05, 8, "multiplies")]
arrow = ("first kernel", 4, "second kernel", 4.05)
page.picture.lanes("Two kernels in one stream", spans, [arrow])

# %%


@triton.jit
def dependent(
    y0_tiles, y1_tiles, x_tiles, w0_tiles, w1_tiles, M, N, K, PROGRAMS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    if LATE:
        tl.extra.cuda.gdc_wait()  # for what kernels ahead have written
        tl.extra.cuda.gdc_launch_dependents()  # the next one may start
    persistent(
        y0_tiles, y1_tiles, x_tiles, w0_tiles, w1_tiles, M, N, K, PROGRAMS,
        BM, BN, BK, WIDEN,
    )  # fmt: skip


def matmul_dependent(x, w0, w1):
    (M, N, K), constants = sizes(x, w0)
    y, found = all_described(x, w0, w1)
    programs = programs_for(x, tiles(M, N))
    late = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    early = {"LATE": late} | ({"launch_pdl": True} if late else {})
    dependent[(programs,)](*found, M, N, K, programs, **constants, **early)
    return y


page.check(matmul_dependent, *given)

# %%
# ``launch_pdl`` permits the early start, and ``gdc_wait`` makes it safe. Only
# a chain of calls in one :term:`stream` gains, so the gain in the heading is
# that of calls in a row, *warm*. The library's kernel has all four steps. It
# also takes up to four weights, weights by columns, and few rows of x:

page.source("concat_gemm", fold=True)

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). The table has the rate in TFLOP/s, or 10 to the 12 operations
# per second. An H100 has 989 of them by its data sheet. Lines of code count a
# kernel with its launcher. Page 201 has a figure with more sizes.

steps = {"pointers": matmul_pointers, "descriptors": matmul_descriptors}
steps |= {"persistent": matmul_persistent, "dependent": matmul_dependent}
page.steps(views=in_views, **steps)

# %%
page.findings()

# %%
# .. _tiles-use:
#
# When to use it
# --------------
#
# The library launches its kernel where a table says it beats torch.
# ``strategy="fused"`` always launches it:

x, w0, w1 = given
y = fusebook.concat_gemm(x, [w0, w1], strategy="fused")

# %%
# - **Use descriptors** in a kernel of yours that multiplies, on Hopper and
#   later. On older GPUs Triton turns them into loads by pointers.
# - **Use a persistent kernel** where there are more tiles than
#   multiprocessors. Its programs hold every multiprocessor until the end, so
#   kernels of other streams have to wait.
# - **Do not write one** for a plain matmul: torch's are hard to beat.
# - **Checks.** There is no ``check=``, and no call waits for the GPU.

page.use()

# %%
# Takeaways
# ---------
#
# - Let the copy engine compute addresses, so that threads need not.
# - Between tiles, keep loading: one long loop can hide what short ones wait
#   for.
# - Spread the tiles: the shares of any two programs should differ by at most
#   one tile.
# - A kernel that says where it has to wait can start early.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it says where. Fix it and run
# its cell again. No GPU is needed.
#
# 1. Equal shares
# ~~~~~~~~~~~~~~~
#
# How many of 2 x 32 tiles does each of 12 programs take in step 3? Here both
# weights begin with program 0, so some take six and others four.


def shares(program):
    return 2 * torch.ceil((32 - program) / 12)


programs = torch.arange(12.0)
page.exercise(shares, lambda p: torch.ceil((64 - p) / 12), [(programs,)])

# %%
# 2. Three weights
# ~~~~~~~~~~~~~~~~
#
# Queries, keys and values are three. Teach step 2 a third weight of the same
# width.


def three(x, w0, w1, w2):
    two = matmul_descriptors(x, w0, w1)
    return torch.cat([two, two[:, : w2.shape[1]]], 1)


def by_torch(x, *weights):
    return torch.cat([x @ w for w in weights], 1)


x, w0, w1 = page.stress(33, 96, 72, seed=3)
page.exercise(three, by_torch, [(x, w0, w1, w0 - w1)])

# %%
# Evidence
# --------

page.footer()
