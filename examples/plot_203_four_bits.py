"""
One token at a time: weights of four bits
=========================================

A language model reads every weight once for each token. Four bits are a
quarter of the bytes of float16, but unpacking them costs instructions.

You will learn

- how many instructions per weight a GPU can afford,
- how to turn codes into float16 numbers, two at a time,
- how to feed tensor cores, so that eight tokens cost what one costs.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_102_softmax`. No GPU is
needed: without one, kernels run in Triton's interpreter, on the CPU, and
times come from a record.
"""

import functools

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["matmul", "quantization", "inference"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_203_four_bits")
page.verdict()

# %%
# The third roof: instructions per weight
# ---------------------------------------
#
# A layer multiplies M rows of x, one per token, by a weight [N, K]. Here it is
# *codes* from 0 to 15, and a *scale* for each *group* of 128 columns in a row.
# The value of a code is (code - 8) * scale.


@functools.lru_cache(maxsize=4)  # a weight is converted once
def dequantized(codes, scales):
    return (codes.to(scales.dtype) - 8) * scales.repeat_interleave(128, 1)


def matmul_float16(x, codes, scales, bits=4):
    return x @ dequantized(codes, scales).T  # reads 2NK bytes


# %%
# With one row of x a weight is used once, so time is bytes over bandwidth.
# Such a limit is a :term:`roof`. The second roof, arithmetic, is far away. The
# third is *instructions*: the four schedulers of a :term:`multiprocessor` each
# issue one per clock, for 32 threads. If they take longer, memory waits. By an
# H100's data sheet:

issued = 132 * 4 * 32 * 1.98e9  # multiprocessors, schedulers, threads, Hz
unit = issued / 3.35e12 / 8  # for each bit that the memory delivers
budget = {f"{n} bits": n * unit for n in (16, 8, 4)}
texts = {name: f"{count:.1f}" for name, count in budget.items()}
page.picture.bars("Instructions per weight that arrives", budget, texts)

# %%
# .. _four-bits-shift:
#
# Step 1: shift and mask {gain shift at M=1, N=28672}
# ---------------------------------------------------
#
# A word of 32 bits holds eight codes, and 16 words a group. Code j of word w
# is for column 16 j + w of the group. So codes j of words 0 to 15 are for 16
# neighbouring columns of x. K is a multiple of 128, N of 16.


@functools.lru_cache(maxsize=4)  # a weight is packed once
def pack(codes, shape=(-1, 8, 16), order=(0, 2, 1)):
    parts = codes.view(shape).permute(order).reshape(-1, 8).to(torch.int32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    return (parts << shifts).sum(1, dtype=torch.int32)


@triton.jit
def one_row(
    y_ptr, x_ptr, q_ptr, s_ptr, N, W, G,  # W words and G groups in a row
    PRODUCTS: tl.constexpr, WORDS: tl.constexpr, PLAIN: tl.constexpr,
    ROWS: tl.constexpr = 4, BLOCK: tl.constexpr = 128,
):  # fmt: skip
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    x_ptr += tl.program_id(0) * W * 8  # one row of x
    total = tl.zeros([ROWS, BLOCK // WORDS], tl.float32)
    for start in range(0, W, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
        words = tl.load(q_ptr + n * W + at, mask=(at < W) & (n < N), other=0)
        part = PRODUCTS(words, x_ptr, at, W, PLAIN)  # shifted: [ROWS, BLOCK]
        part = tl.sum(tl.reshape(part, [ROWS, BLOCK // WORDS, WORDS]), 2)
        some = start + tl.arange(0, BLOCK // WORDS)[None, :] * WORDS
        inside = (some < W) & (n < N)
        scale = tl.load(s_ptr + n * G + some // 16, mask=inside, other=0.0)
        total += part * scale.to(tl.float32)
    y = tl.sum(total, 1)[:, None]
    tl.store(y_ptr + tl.program_id(0) * N + n, y, mask=n < N)


@triton.jit
def shifted(words, x_ptr, at, W, PLAIN: tl.constexpr):
    part = tl.zeros(words.shape, tl.float32)
    for j in tl.static_range(8):  # unrolled: j is a constant
        column = at // 16 * 128 + j * 16 + at % 16
        x = tl.load(x_ptr + column, mask=at < W, other=0.0)
        code = (words >> 4 * j) & 15
        part += (code - 8).to(tl.float32) * x.to(tl.float32)
    return part


def row_by_row(x, codes, scales, **step):
    (M, K), N = x.shape, len(codes)
    y, sizes = x.new_empty(M, N), (N, K // 8, K // 128)
    step |= {"PLAIN": not x.is_cuda, "num_warps": 1}
    one_row[M, N // 4](y, x, pack(codes), scales, *sizes, **step)
    return y


def matmul_shift(x, codes, scales, bits=4):
    return row_by_row(x, codes, scales, PRODUCTS=shifted, WORDS=1)


given = page.stress(3, 1280, 48, dtype=torch.float16)  # M, K, N
page.check(matmul_shift, *given)

# %%
# x has large values and rows far from 0. The error is relative to float64 with
# these codes, in *eps*, the distance from 1 to the next float16. *SASS per
# weight* counts machine instructions of the loop for each weight that it
# reads.
#
# A program is one warp. It owns four rows of the weight and one row of x: four
# elements of the result. A thread loads four words of a row at once. A
# code then takes a shift, a mask, a subtraction, a conversion and a
# multiply-add: the whole budget.

# %%
# .. _four-bits-pairs:
#
# Step 2: two codes at a time {gain pairs at M=1, N=28672}
# --------------------------------------------------------
#
# The bits ``0x6400`` are the float16 number 1024. From there on, float16
# numbers are 1 apart, so ``0x6400 | code`` is 1024 + code. Subtracting 1032 is
# exact and leaves code - 8. One instruction treats two float16.
#
# Triton has no such operations, so ``inline_asm_elementwise`` inserts PTX, the
# GPU's assembly language. You can skip it: it does these two steps for the 16
# codes of two neighbouring words, ``$8`` and ``$9``. ``$0`` to ``$7`` are
# eight pairs of results. ``lop3`` with ``0xea`` is (a & b) | c, and ``prmt``
# picks bytes.


@triton.jit
def numbers(words, PLAIN: tl.constexpr):
    if PLAIN:  # the interpreter knows no PTX
        found = ()
        for j in tl.static_range(8):
            found += ((((words >> 4 * j) & 15) - 8).to(tl.float16),)
        return found
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, m, low, high, less, part, add;
            mov.b32 m, 0x64006400;     mov.b32 less, 0x64086408;  // 1024, 1032
            mov.b32 part, 0x2C002C00;  mov.b32 add, 0xD480D480;   // 1/16, -72
            mov.b32 low, 0x000f000f;   mov.b32 high, 0x00f000f0;
            prmt.b32 t, $8, $9, 0x5410;  // the lower halves of both words
            prmt.b32 u, $8, $9, 0x7632;  // the upper halves
            lop3.b32 $0, t, low, m, 0xea;  lop3.b32 $1, t, high, m, 0xea;
            lop3.b32 $4, u, low, m, 0xea;  lop3.b32 $5, u, high, m, 0xea;
            shr.u32 t, t, 8;               shr.u32 u, u, 8;
            lop3.b32 $2, t, low, m, 0xea;  lop3.b32 $3, t, high, m, 0xea;
            lop3.b32 $6, u, low, m, 0xea;  lop3.b32 $7, u, high, m, 0xea;
            sub.f16x2 $0, $0, less;  fma.rn.f16x2 $1, $1, part, add;
            sub.f16x2 $2, $2, less;  fma.rn.f16x2 $3, $3, part, add;
            sub.f16x2 $4, $4, less;  fma.rn.f16x2 $5, $5, part, add;
            sub.f16x2 $6, $6, less;  fma.rn.f16x2 $7, $7, part, add;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words],
            (tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip


# %%
# Codes under the mask ``high`` begin at bit 4, so they arrive 16 times as
# large: (1024 + 16 * code) / 16 - 72 is code - 8. The products are float16
# too, and the compiler makes pairs of them. Four are added before float32
# takes over, which costs accuracy: see the error. A scale is multiplied once
# for the four words of a thread: ``WORDS=4``.


@triton.jit
def in_pairs(words, x_ptr, at, W, PLAIN: tl.constexpr):
    w = numbers(words, PLAIN)
    part = tl.zeros(words.shape, tl.float32)
    for j in tl.static_range(0, 8, 4):
        few = tl.zeros(words.shape, tl.float16)
        for i in tl.static_range(j, j + 4):
            column = at // 16 * 128 + i * 16 + at % 16
            few += w[i] * tl.load(x_ptr + column, mask=at < W, other=0.0)
        part += few.to(tl.float32)
    return part


def matmul_pairs(x, codes, scales, bits=4):
    return row_by_row(x, codes, scales, PRODUCTS=in_pairs, WORDS=4)


page.check(matmul_pairs, *given)

# %%
# .. _four-bits-tensor:
#
# Step 3: tensor cores {gain tensor at M=8, N=28672}
# --------------------------------------------------
#
# Steps 1 and 2 spend all their instructions again for each row of x. A tensor
# core multiplies 16 x 16 weights with *eight* rows of x in one instruction,
# ``mma.m16n8k16``. So a program owns 16 rows of the weight and eight of x. Its
# four warps take different groups of columns. The instruction prescribes which
# of the 32 threads of a warp, its *lanes*, holds which weight:

page.picture.operand(lane=5)

# %%
# For a group of 128 columns, a warp executes eight such instructions. In each
# a lane holds eight weights: its places in the figure. So a lane gets a word
# for each place, and code j of a word is for instruction j.


@triton.jit
def operand(w):
    """Numbers as loaded, [8, 128], as 16 x 16 weights for each of 4 warps."""
    w = tl.reshape(
        w, [2, 4, 8, 4, 2, 2]
    )  # column half, warp, row, pair, row half, one
    return tl.reshape(tl.permute(w, [1, 4, 2, 0, 3, 5]), [4, 16, 16])


@triton.jit
def eight_rows(y_ptr, x_ptr, q_ptr, s_ptr, M, N, K, PLAIN: tl.constexpr):
    tile, blocks, first = tl.program_id(0), K // 128, tl.program_id(1) * 8
    warp = tl.arange(0, 4)[:, None]  # each takes every fourth block
    h = tl.arange(0, 8)[:, None]  # two halves of a block, for each warp
    i = tl.arange(0, 256)[None, :]  # eight rows of x by 32 columns
    word = tl.arange(0, 128)[None, :]
    n = tile * 16 + tl.arange(0, 16)[None, :]
    total = tl.zeros([4, 16, 8], tl.float32)
    for b in range(0, blocks, 4):
        at = (tile * blocks + b + h % 4) * 256 + h // 4 * 128 + word
        w = tl.load(q_ptr + at, mask=b + h % 4 < blocks, other=0)
        w = numbers(w, PLAIN)
        part = tl.zeros([4, 16, 8], tl.float32)
        for q in tl.static_range(4):
            m, k = first + i // 32, (b + warp) * 128 + q * 32 + i % 32
            inside = (m < M) & (k < K)
            x = tl.load(x_ptr + m * K + k, mask=inside, other=0.0)
            # Warp, row, pair, even or odd, column half, one of the pair.
            x = tl.reshape(x, [4, 8, 4, 2, 2, 2])
            x = tl.permute(x, [0, 4, 2, 5, 1, 3])
            even, odd = tl.split(tl.reshape(x, [4, 16, 8, 2]))
            part = tl.dot(operand(w[2 * q]), even, part)
            part = tl.dot(operand(w[2 * q + 1]), odd, part)
        inside = b + warp < blocks
        scale = tl.load(s_ptr + n * blocks + b + warp, mask=inside, other=0.0)
        total += part * scale.to(tl.float32)[:, :, None]
    y = tl.trans(tl.sum(total, 0))  # [8, 16], the sum over the warps
    m = first + tl.arange(0, 8)[:, None]
    tl.store(y_ptr + m * N + n, y, mask=m < M)


def matmul_tensor(x, codes, scales, bits=4):
    (M, K), N = x.shape, len(codes)
    # Tile, row half, row, block, q, pair, even or odd, column half, one.
    blocks = N // 16, 2, 8, K // 128, 4, 4, 2, 2, 2
    words = pack(codes, blocks, (0, 3, 7, 2, 5, 1, 8, 4, 6))
    y, grid = x.new_empty(M, N), (N // 16, triton.cdiv(M, 8))
    how = {"PLAIN": not x.is_cuda, "num_stages": 1}  # words stay in registers
    eight_rows[grid](y, x, words, scales, M, N, K, **how)
    return y


page.check(matmul_tensor, *given)

# %%
# In ``operand``, the axes *row* and *pair* pick a lane of a warp, the halves
# and *one* pick a value in it. So no value moves to another lane: the compiler
# only renames registers. The sum over columns may have any order. We chose one
# where the eight elements of x that a lane needs for two ``tl.dot`` are
# neighbours: 16 bytes, the widest load. The library's kernel loads words
# ahead, and reads a weight once for 16 rows:

page.source("quantized_matmul", fold=True)

# %%
# What do four bits cost?
# -----------------------
#
# Rounding a weight to codes costs far more than the errors of kernels above.
# Group 0 is a whole row.

weight = torch.randn(512, 1280, generator=torch.Generator().manual_seed(0))
page.rounding(given[0], weight, bits=(8, 4), groups=(32, 128, 0))

# %%
# How fast is it?
# ---------------
#
# *GPU time* is the time of one call on the GPU, after the L2 cache was flushed
# (*cold L2*). In the figure the weight has 8192 x 8192 codes. *torch in 16
# bits* is cuBLAS, NVIDIA's matmuls, with the same weight in float16. *eager*
# converts the weight in each call.

page.plot("times", over="M")

# %%
# In the table the weight has 28672 x 8192 codes. A copy that reads and writes
# as many bytes as x, codes, scales and y have is 100 %. A code has 4 + 16 /
# 128 bits, scale included. So float16, which reads 3.9 times as many, cannot
# exceed 26 %. *tinygemm* is torch's four-bit kernel, in bfloat16.

steps = {"shift": matmul_shift, "pairs": matmul_pairs}
page.steps(float16=matmul_float16, **steps, tensor=matmul_tensor)

# %%
# Only step 1 exceeds the budget, but too little to explain its time. We do not
# know why step 3 loses with one row. A call has few loads in flight at its
# start and end.

page.findings()

# %%
# .. _four-bits-use:
#
# When to use it
# --------------
#
# Eight bits, zero points, a bias and any sizes work, too. A layer is
# ``fusebook.nn.QuantizedLinear``.

part = weight[:64].to(given[0])
packed = fusebook.quantize(part, bits=4, group=128)  # once, when loaded
y = fusebook.quantized_matmul(given[0], packed)

# %%
# **Do not use it** for prompts and training: above 96 rows it converts the
# whole weight in each call, into 2NK more bytes, and multiplies by cuBLAS.

page.use()

# %%
# Takeaways
# ---------
#
# - Divide instructions per second by weights per second: that is the budget.
# - Put integers into the mantissa of a float, and subtract what was there.
# - Store a weight in the order of the registers that will hold it.
#
# Exercises
# ---------
#
# With *zero points* a code's value is (code - zero) * scale, and each group
# has its own zero. This function ignores them. Fix it and run its cell again.
# Change no kernel: add a multiple of each group's sum of x.


def with_zeros(x, codes, scales, zeros):
    return matmul_shift(x, codes, scales)


def by_torch(x, codes, scales, zeros):
    wide = [t.to(x.dtype).repeat_interleave(128, 1) for t in (zeros, scales)]
    return x @ ((codes.to(x.dtype) - wide[0]) * wide[1]).T


x, codes, scales, _ = page.stress(3, 256, 16, dtype=torch.float16, seed=1)
zeros = (codes[:, ::128] + 3) % 16
page.exercise(with_zeros, by_torch, [(x, codes, scales, zeros)])

# %%
# Evidence
# --------

page.footer()
