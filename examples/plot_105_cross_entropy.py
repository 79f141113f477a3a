# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Cross entropy: a loss that never holds all its logits
=====================================================

The loss of a language model reads one logit for each word of its vocabulary
and each token, and its gradient is as large again. This page finds both in
one pass. Then it never holds all logits at once: it computes those of some
rows at a time, from hidden states and the weight of the head, and asks what
that costs in time and what it saves in memory.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them.

For whom: those who train language models and run out of time or memory at the
loss.

Read before: 102.
"""

# %%
# The problem
# -----------
#
# A row :math:`x` of N logits, whose class is t, has the loss and the gradient
#
# .. math::
#
#    \ell = \log \sum_j e^{x_j} - x_t, \qquad
#    \frac{\partial \ell}{\partial x_j} = \frac{e^{x_j}}{\sum_k e^{x_k}}
#    - [j = t]
#
# The gradient is a softmax with one taken off at the class, so it needs the
# same two numbers of the row as the loss: the maximum and the sum. A
# program that holds the row for the loss can write the gradient as well. A
# loss that leaves the gradient to a backward pass reads the logits again, and
# keeps them until then.

# sphinx_gallery_tags = ["cross entropy", "reduction", "memory", "training"]
from functools import partial

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots, tables
from fusebook.cards.losses import CROSS_ENTROPY, LINEAR_CROSS_ENTROPY
from fusebook.measure import bench, machine
from fusebook.measure.check import yardstick
from fusebook.measure.inputs import generator, rough
from fusebook.measure.timing import measure
from fusebook.page import (
    Folded,
    Kernels,
    NoResults,
    Source,
    by_clock,
    by_step,
    claim,
    claims,
    counters,
    downloads,
    draw,
    exercise,
    lines_behind,
    lines_of,
    measured,
    provenance,
    say,
    solution,
    study,
    table,
    target,
)

import pandas as pd
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

asked = study(CROSS_ENTROPY, config="large", dtype="bfloat16", repeat=15)
on = machine.current()

# %%
# What eager costs
# ----------------
#
# The loss and its gradient, an operation a line, with the multiples of MN
# elements that each reads and writes.

Source(fusebook.cross_entropy_eager, doc=False)

# %%
# The least is to read each logit once and to write each gradient once. A
# loss that leaves its gradient to the backward pass reads the logits twice.

SHAPE = {"M": 8192, "N": 131072}
costs = {
    "an operation a line": CROSS_ENTROPY.variants["eager"].cost(2, **SHAPE),
    "loss, then gradient": CROSS_ENTROPY.variants["quack"].cost(2, **SHAPE),
    "both in one pass": CROSS_ENTROPY.cost(2, **SHAPE),
}
draw.traffic(
    "Loss and gradient of 8192 x 131072 in bfloat16: bytes read, then written",
    costs,
)

# %%
moved = {name: cost.read + cost.write for name, cost in costs.items()}
least = moved["both in one pass"]
claims(
    say(
        "Predicted: one pass is {two:.2f} times as fast as two, and "
        "{eager:.2f} times as fast as an operation a line.",
        two=moved["loss, then gradient"] / least,
        eager=moved["an operation a line"] / least,
    ),
    claim(
        "Two passes move half as much again as one.",
        round(moved["loss, then gradient"] / least, 2) == 1.5,
    ),
)

# %%
# The kernel
# ----------
#
# Step one: the loss
# ~~~~~~~~~~~~~~~~~~
#
# One program a row, as in :doc:`plot_102_softmax`. The logit of the class is
# one more load; subtracting the maximum from it first keeps small losses
# exact.


@triton.jit
def loss_of_row(loss_ptr, x_ptr, target_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    x_ptr += row * N
    x = tl.load(x_ptr + columns, mask=columns < N, other=float("-inf"))
    x = x.to(tl.float32)
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - top), 0)
    x_t = tl.load(x_ptr + tl.load(target_ptr + row)).to(tl.float32)
    tl.store(loss_ptr + row, tl.log(total) + (top - x_t))


def step_one(x, target):
    """A loss for each row."""
    M, N = x.shape
    loss = x.new_empty(M, dtype=torch.float32)
    loss_of_row[(M,)](loss, x, target, N, BLOCK=triton.next_power_of_2(N))
    return loss


# %%
# Step two: the gradient beside it
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Three lines more, and the gradient is written from what is in registers. It
# may go where the logits were: the program has read all of its row by then.


@triton.jit
def both_of_row(loss_ptr, dx_ptr, x_ptr, target_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    x_ptr += row * N
    x = tl.load(x_ptr + columns, mask=columns < N, other=float("-inf"))
    x = x.to(tl.float32)
    top = tl.max(x, 0)
    e = tl.exp(x - top)
    total = tl.sum(e, 0)
    target = tl.load(target_ptr + row)
    x_t = tl.load(x_ptr + target).to(tl.float32)
    tl.store(loss_ptr + row, tl.log(total) + (top - x_t))
    dx = e / total - tl.where(columns == target, 1.0, 0.0)
    tl.store(dx_ptr + row * N + columns, dx, mask=columns < N)  # write N


def step_two(x, target, warps=4):
    """Losses and the gradient of their sum."""
    M, N = x.shape
    loss, dx = x.new_empty(M, dtype=torch.float32), torch.empty_like(x)
    both_of_row[(M,)](
        *(loss, dx, x, target, N),
        BLOCK=triton.next_power_of_2(N),
        num_warps=warps,
    )
    return loss, dx


# %%
# The finished kernel
# ~~~~~~~~~~~~~~~~~~~
#
# A vocabulary of 128256 is a row of 256 KiB in half types, and no program has
# registers for that. As in the softmax, several programs then share a row, and
# each writes the maximum and the sum of its part, one word of 64 bits, where
# the others read it: the :term:`board`. Beside that the kernel has what
# training asks for: rows that are ignored, weights of classes, smoothing, a
# z-loss, a cap, a mean whose divisor another kernel has found. Half-precision
# numbers are held two in a register and converted each time they are needed.
# And whatever a row needs beside its logits is asked for
# while these are on their way.

Folded("The library's kernels", Kernels(fusebook.cross_entropy))

# %%
# In place, sharing a row has a trap. A program that has waited long for
# another one's word computes that word itself, from the other's logits. But if
# the other is only slow, it may overwrite these logits with its gradient in
# the meantime. So the word goes onto the board by a compare-and-swap: if the
# other's own word is there by then, that one counts.

# %%
# What the hardware counts
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# Are the logits read once? The counters of the GPU, as on
# :doc:`plot_101_elementwise`, say what came from memory, by all kernels of a
# way. Of what is written some stays in the :term:`L2 cache`. 4096 rows of
# 32000 numbers and 1000 rows of 131072, which several programs share, have as
# many numbers, MN. Sectors and :term:`occupancy` are those of the kernel that
# reads most. The library launches a short kernel before and one after it.


# site: fold
def to_count():
    short, wide = (
        CROSS_ENTROPY.make(generator(0), torch.bfloat16, M=M, N=N)
        for M, N in ((4096, 32000), (1000, 131072))
    )
    ours = partial(fusebook.cross_entropy_with_gradient, check=False)
    ways = CROSS_ENTROPY.variants
    return {
        "an operation a line": partial(ways["eager"].run, *short),
        "torch": partial(ways["torch"].run, *short),
        "the library": partial(ours, *short),
        "the library, rows of 131072": partial(ours, *wide),
    }


MN = 2 * 4096 * 32000  # bytes
traffic = by_step(counters("cross_entropy_counters", to_count), MN, "MN")
table(traffic, "Loss and gradient, in bytes of the logits", fold=False)

# %%
reads = traffic["read, MN"]
claims(
    claim(
        "The library reads the logits once, to 2 %, also where programs share "
        "a row.",
        (reads.filter(like="the library") - 1).abs() < 0.02,
        of=reads,
        fatal=False,
    ),
    say(
        "An operation a line reads {chain:.1f}MN, PyTorch's own loss and "
        "backward pass {torch:.1f}MN.",
        chain=reads.get("an operation a line"),
        torch=reads.get("torch"),
    ),
) if len(traffic) else None

# %%
# Is it right?
# ------------
#
# The reference is the formula in float64. Rows are rough: a third plain, a
# third with three large values, a third shifted by 100. What else the library
# computes is compared with PyTorch in float64: smoothing with weights of
# classes, rows that are ignored, each reduction.

rng = generator(seed=0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
found = pd.concat(
    [
        asked.judged(
            {"M": 37, "N": n},
            dtype,
            eager=CROSS_ENTROPY.variants["eager"].run,
            fusebook=fusebook.cross_entropy_with_gradient,
        )
        for dtype in DTYPES
        for n in (100, 781)
    ],
    ignore_index=True,
)
table(found, "Scores, each within its limit", fold=False)

# %%


def against_torch(reduction, smoothing, weighted):
    """The largest difference from PyTorch in float64, of loss and gradient."""
    x = torch.randn(9, 300, generator=rng, device=rng.device)
    target = torch.randint(0, 300, (9,), generator=rng, device=rng.device)
    target[4] = -100
    weight = torch.rand(300, generator=rng, device=rng.device) + 0.5
    weight = weight if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing}
    own = x.clone().requires_grad_()
    loss = fusebook.cross_entropy(own, target, weight, **options)
    (dx,) = torch.autograd.grad(loss.sum(), own)
    wide = x.double().requires_grad_()
    weight = None if weight is None else weight.double()
    want = F.cross_entropy(wide, target, weight, **options)
    (want_dx,) = torch.autograd.grad(want.sum(), wide)
    scale = want.abs().max(), want_dx.abs().max()
    return [
        ((a - b).abs().max() / s).item()
        for a, b, s in zip((loss, dx), (want, want_dx), scale, strict=True)
    ]


TERMS = [
    (reduction, smoothing, weighted)
    for reduction in ("mean", "sum", "none")
    for smoothing, weighted in ((0.0, False), (0.1, False), (0.1, True))
]
terms = pd.DataFrame(
    [against_torch(*t) for t in TERMS],
    index=pd.MultiIndex.from_tuples(
        TERMS, names=["reduction", "smoothing", "weights"]
    ),
    columns=["loss", "gradient"],
)
table(terms / 2**-23, "Off from PyTorch in float64, in eps of float32")

# %%
# And hostile rows: a NaN, an infinity, nothing but minus infinity, a masked
# class as the target, and no row that counts. In float16 gradients of a mean
# may be too small for a normal number, so training scales the loss; there the
# gradient is computed in the backward pass, when the scale is known.

inf, nan = float("inf"), float("nan")
hostile = rough(rng, (5, 1000), torch.float32)
hostile[0, 500] = nan
hostile[1, 7] = inf
hostile[2] = -inf
hostile[3, 0] = -inf
classes = torch.zeros(5, dtype=torch.int64, device=hostile.device)
ours = fusebook.cross_entropy(hostile, classes, reduction="none")
theirs = F.cross_entropy(hostile.double(), classes, reduction="none")
plain = rough(rng, (5, 781), torch.float32)
of_rows = F.cross_entropy(plain.double(), classes, reduction="none")
none_left = torch.full_like(classes, -100)
lost, zeros = fusebook.cross_entropy_with_gradient(hostile, none_left)
narrow = torch.randn(64, 300, generator=rng, device=rng.device).half()
own = narrow.clone().requires_grad_()
labels = torch.arange(64, device=own.device)
scaled = 2.0**16 * fusebook.cross_entropy(own, labels)
(small,) = torch.autograd.grad(scaled, own)
exact = narrow.double().requires_grad_()
(wanted,) = torch.autograd.grad(F.cross_entropy(exact, labels), exact)
try:
    fusebook.cross_entropy(hostile, classes + 1000)
    refusal = ""
except IndexError as error:
    refusal = str(error)
claims(
    claim("Every way is within its limit.", found["right"]),
    claim(
        "Steps one and two give PyTorch's loss of each row, to 1e-5.",
        pd.Series(
            {
                name: torch.allclose(loss.double(), of_rows, rtol=1e-5)
                for name, loss in (
                    ("step one", step_one(plain, classes)),
                    ("step two", step_two(plain, classes)[0]),
                )
            }
        ),
    ),
    claim(
        "Each reduction, smoothing and weights give PyTorch's loss and "
        "gradient to 16 eps.",
        (terms <= 16 * 2**-23).all(axis=1),
    ),
    claim(
        "Hostile rows have PyTorch's loss: NaN three times, infinity, and a "
        "number.",
        torch.allclose(ours.double(), theirs, rtol=1e-6, equal_nan=True),
    ),
    claim(
        "Where all rows are ignored, the mean is NaN as in PyTorch, and the "
        "gradient is zero, even of rows that hold NaN.",
        bool(lost.isnan()) and not zeros.any(),
    ),
    claim(
        "With a loss in float16 that is scaled by 65536 every gradient keeps "
        "its digits; without the scale {share:.0%} of the gradients would be "
        "subnormal or zero.",
        torch.allclose(small.double(), 2.0**16 * wanted, rtol=2**-9, atol=0),
        share=(wanted.abs() < 2**-14).double().mean().item(),
    ),
    claim(
        "A class that does not exist is refused by name and place.",
        "got 1000 at target[0]" in refusal,
    ),
)

# %%
# How fast?
# ---------
#
# Loss and gradient of 8192 x 131072, and of 2048 tokens by vocabularies that
# models have. *torch*, *torch.compile* and *quack* find the gradient in their
# backward pass. *Liger* waits for the device in each call, so it has no time
# on the device alone, see the caller's clock; and it overwrites the logits, so
# here it is given a copy. Times of all of them in place are further down.

WAYS = [n for n in CROSS_ENTROPY.variants if not n.startswith("Liger")]
widest = asked.results()
models = asked.results(config="vocabularies", variants=WAYS)
sweep = tables.together(widest, models).reset_index(drop=True)
plots.dots(sweep, of="roof")

# %%
table(
    tables.times(sweep, words=True),
    "Loss and gradient: cold time in microseconds",
    fold=False,
)

# %%
provenance(widest, models)

# %%
downloads(sweep, "cross_entropy")

# %%
# What each step was worth
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# The steps as they were shown, step two with the four warps that Triton takes
# unless it is told otherwise, and with sixteen, between the chain and the
# library's kernel. Step one writes no gradient. Step two leaves a loss for
# each row; the library also counts the rows and adds up their losses, in two
# more launches. A row of 32000 is the widest here that one program can hold.

EACH = {
    "an operation a line": CROSS_ENTROPY.variants["eager"].run,
    "step one, the loss alone": step_one,
    "step two, 4 warps": step_two,
    "step two, 16 warps": partial(step_two, warps=16),
    "the library": partial(fusebook.cross_entropy_with_gradient, check=False),
}


def right(yard, given, got):
    """Whether a loss and its gradient are right; step two gives sums."""
    if isinstance(got, torch.Tensor):
        x, target = given
        of_rows = F.cross_entropy(x.double(), target, reduction="none")
        return torch.allclose(got.double(), of_rows, rtol=1e-5)
    loss, dx = got
    if loss.dim():
        got = loss.mean().to(yard.dtypes[0]), dx / len(dx)
    return yard.judge(got).ok


def cross_entropy_steps():
    parts = []
    for N in (8192, 32000):
        given = CROSS_ENTROPY.make(generator(0), torch.bfloat16, M=4096, N=N)
        frame = bench.staircase(
            {k: partial(f, *given) for k, f in EACH.items()},
            partial(right, yardstick(CROSS_ENTROPY, given), given),
            repeat=15,
        )
        parts.append(frame.assign(at=f"4096 x {N}"))
    return pd.concat(parts, ignore_index=True)


try:
    stairs = measured(
        "cross_entropy_steps", cross_entropy_steps, by_device=True
    )
except NoResults:
    stairs = None
roofs = {
    f"4096 x {N}": 1e6 * on.memory_seconds(CROSS_ENTROPY.cost(2, M=4096, N=N))
    for N in (8192, 32000)
}
table(
    tables.staircase(
        stairs.pivot_table("us", "step", "at", sort=False),
        stairs,
        roof=roofs,
        lines={
            "an operation a line": lines_of(fusebook.cross_entropy_eager),
            "step one, the loss alone": lines_of(loss_of_row, step_one),
            "step two, 4 warps": lines_of(both_of_row, step_two),
            "step two, 16 warps": lines_of(both_of_row, step_two),
            "the library": lines_behind(fusebook.cross_entropy_eager),
        },
    ),
    "Each step, bfloat16, cold, in microseconds",
    fold=False,
) if stairs is not None else claims(say("The steps are not recorded yet."))

# %%
step_us = (
    pd.DataFrame()
    if stairs is None
    else stairs.pivot_table("us", "at", "step", sort=False)
)
claims(
    claim(
        "Every step is right.",
        None if stairs is None else stairs["right"],
        fatal=False,
    ),
    *(
        say(
            "At {at} the library takes {ratio:.2f} times as long as step two "
            "with the better of four and sixteen warps.",
            at=at,
            ratio=us["the library"]
            / us[["step two, 4 warps", "step two, 16 warps"]].min(),
        )
        for at, us in step_us.iterrows()
    ),
)

# %%
# In place, through autograd
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# What a training step calls: the loss, and its gradient by ``autograd``, which
# may overwrite the logits. A backward pass that is handed a gradient of one
# has nothing left to do: one launch looks at that number and ends. Memory is
# what a call allocates at its peak beside the logits. The row *quack, one
# pass* is a function of quack's that knows no autograd and gives the sum of
# losses, so that it has no divisor to wait for.


def of_liger(x, target):
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    return LigerCrossEntropyFunction.apply(x, target, None)[0]


def of_quack(x, target):
    from quack.cross_entropy import cross_entropy

    return cross_entropy(x, target, inplace_backward=True)


def quack_once(x, target):
    from quack.cross_entropy import cross_entropy_fwd

    return cross_entropy_fwd(x, target, return_dx=True, inplace_backward=True)


def stepped(loss_of, x, target):
    """The loss and its gradient; the logits are lost."""
    own = x.detach().requires_grad_()
    loss = loss_of(own, target)
    return loss, torch.autograd.grad(loss, own)[0]


def peak(call):
    """Bytes that a call allocates at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    bytes_ = torch.cuda.max_memory_allocated() - before
    del kept
    return bytes_


def in_turn(calls, **columns):
    """Cold time and peak memory of each call, or why there is none."""
    rows, able = [], {}
    for name, call in calls.items():
        try:
            call()
            able[name] = peak(call)
        except Exception as error:  # a library may raise anything
            note = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            rows.append({**columns, "variant": name, "note": note})
    times = measure(
        {n: calls[n] for n in able}, repeat=10, kinds=("cold", "call")
    )
    for name, kinds in times.items():
        q = kinds["cold"] or kinds["call"]  # who waits has only the latter
        row = {
            "variant": name,
            "gpu_us": 1e6 * q.q50,
            "peak_bytes": able[name],
        }
        rows.append({**columns, **row, "note": ""})
    return rows


def in_place():
    """Each way of a training step, which overwrites the logits."""
    x = torch.randn(8192, 131072, device="cuda").to(torch.bfloat16)
    target = torch.randint(0, 131072, (8192,), device="cuda")
    ours = partial(fusebook.cross_entropy, inplace=True, check=False)
    ways = {
        "fusebook": ours,
        "Liger": of_liger,
        "quack": of_quack,
        "torch": F.cross_entropy,
    }
    calls = {n: partial(stepped, f, x, target) for n, f in ways.items()}
    calls["quack, one pass"] = partial(quack_once, x, target)
    return pd.DataFrame(in_turn(calls))


over = measured("cross_entropy_in_place", in_place).set_index("variant")
over["MiB beside the logits"] = over["peak_bytes"] / 2**20
over["us"] = over["gpu_us"]
table(
    over[["us", "MiB beside the logits", "note"]],
    "8192 x 131072, bfloat16, the gradient over the logits: cold, and Liger, "
    "which waits for the device, by a call",
    fold=False,
)

# %%
# How far from the roof?
# ----------------------

table(tables.shares(sweep), "Each way, cold")

# %%
# Some logits at a time
# ~~~~~~~~~~~~~~~~~~~~~
#
# The logits are a product, of hidden states and the weight of the head. Here
# is what each takes for 8192 tokens, 4096 numbers of a hidden state and 128256
# classes:

LLAMA = {"M": 8192, "K": 4096, "N": 128256}
M, K, N = LLAMA.values()
sizes = {
    "hidden states": 2 * M * K,
    "the head": 2 * N * K,
    "logits": 2 * M * N,
    "logits in float32": 4 * M * N,
}
table(
    pd.DataFrame({"GiB": {k: v / 2**30 for k, v in sizes.items()}}),
    "What a loss of 8192 tokens holds, bfloat16",
    fold=False,
)

# %%
# A fused product would keep them in registers, and would need each of them
# twice: once for the sum, once for the gradient. The second time it would have
# to multiply again: four products in place of three. Instead we take the
# tokens some rows at a time. Their logits are a product of cuBLAS into a
# buffer; the kernel above turns them into their gradient in place; two more
# products read that. Then the buffer is free for the next rows.
#
# How many rows? Few rows take little memory. But each chunk reads the head
# again, and to add to the head's gradient it reads and writes that, too.
# So the chunk is a trade of memory against time:


def by_chunk():
    """Time and memory of linear cross entropy by rows of a chunk."""
    *given, _ = LINEAR_CROSS_ENTROPY.make(
        generator(0), torch.bfloat16, **LLAMA
    )
    call = partial(fusebook.linear_cross_entropy_with_gradients, *given)
    calls = {
        rows: partial(call, rows=rows, check=False)
        for rows in (256, 512, 1024, 2048, 4096, 8192)
    }
    found = pd.DataFrame(in_turn(calls)).rename(columns={"variant": "rows"})
    gradients = 2 * (M * K + N * K)
    return found.assign(beyond=found["peak_bytes"] - gradients)


chunks = measured("linear_cross_entropy_chunks", by_chunk).set_index("rows")
trade = pd.DataFrame(
    {
        "ms": chunks["gpu_us"] / 1e3,
        "GiB beyond inputs and gradients": chunks["beyond"] / 2**30,
    }
)
table(trade, "By rows of a chunk, 8192 x 4096 x 128256, bfloat16", fold=False)

# %%
# Memory comes first, since the chunks are there to save it. *Beyond* is the
# peak of a call beyond its inputs and gradients. *Liger* waits for the device
# and so has no time on the device alone. ``F.linear_cross_entropy`` has a row
# only where it was timed with PyTorch 2.13 or later.
#
# How wrong may the head's gradient be? The gradient of a class is one sum less
# another: hidden states times their probabilities, less the hidden states of
# the tokens whose target it is. Where there are a hundred thousand classes,
# the two sums are nearly equal for some of them. The terms of the sums are
# rounded to a half type first, and what is left of nearly equal sums may be
# smaller than these roundings, whoever computes it. So the error is scored
# relative to the sums, and not to their difference.

heads = asked.results(
    LINEAR_CROSS_ENTROPY,
    config="llama,heads",
    dtype="bfloat16",
    variants=[n for n in LINEAR_CROSS_ENTROPY.variants if "chunks" not in n],
)
timed = heads[heads["status"] == "ok"].copy()
timed["GiB beyond"] = (timed["peak_bytes"] - timed["write_bytes"]) / 2**30
timed["ms"] = timed["gpu_us"] / 1e3
AXES = ["GiB beyond", "ms"]
axes = timed.set_index(["M", "K", "N", "variant"])[[*AXES, "error"]]
table(axes, "Memory, then time, bfloat16", fold=False)

# %%
# What has no time, and why:

together = pd.concat([sweep, heads])
missing = together[together["status"] != "ok"]
table(
    missing.set_index(["op", "M", "N", "variant"])[["status", "note"]],
    "Not timed, and why",
    fold=True,
)

# %%
judge = missing["note"].fillna("").str.startswith("inputs and reference")
claims(
    say(
        "A note that begins with `inputs and reference` is not about the way "
        "that it stands beside: what ran out of memory was the reference, "
        "which was computed in float64 for all rows at once. It takes some "
        "rows at a time now."
    )
) if judge.any() else None

# %%
provenance(heads)

# %%
# The sum over chunks
# ~~~~~~~~~~~~~~~~~~~
#
# Each product adds up in float32 and rounds its result once. The gradient of
# the head is a sum over chunks, kept in the head's own dtype: it is rounded
# once more for each chunk. A float32 sum would be rounded once in all, and
# take twice the memory of the gradient. The error against float64, relative to
# the size of the gradient:


def rounded_by(rows):
    """Error of the head's gradient, in eps of bfloat16."""
    h, head, target, scale = LINEAR_CROSS_ENTROPY.make(
        generator(1), torch.bfloat16, M=256, K=16, N=97
    )
    wide = h.double(), head.double(), target, scale
    want = LINEAR_CROSS_ENTROPY.reference(*wide)[2]
    ours = fusebook.linear_cross_entropy_with_gradients
    got = ours(h, head, target, rows=rows)[2]
    return ((got - want).norm() / want.norm() / 2**-7).item()


chunked = pd.Series({256 // r: rounded_by(r) for r in (256, 128, 64, 16, 4)})
table(
    chunked.rename_axis("chunks").to_frame("error in eps"),
    "Error of the head's gradient, by the number of chunks, bfloat16",
    fold=False,
)

# %%
# Lessons
# -------

large = sweep[sweep["N"] == 131072]
fused = tables.where(large, variant="fusebook", status="ok")
peers = [n for n in CROSS_ENTROPY.variants if n not in ("eager", "fusebook")]
times = tables.times(sweep)
rivals = times.reindex(columns=peers)
lacking = rivals.isna().sum()
llama = timed[timed["N"] == N].set_index("variant")[AXES]
best = llama.drop(index="fusebook")["ms"].idxmin()
unjudged = heads[
    (heads["N"] == N) & ~heads["variant"].isin(llama["ms"].dropna().index)
]
claims(
    claim(
        "No other way finds loss and gradient faster, at any vocabulary: the "
        "fastest other takes {least:.1f} to {most:.1f} times as long. Ways "
        "without a time on the device: {untimed}.",
        times["fusebook"] <= 1.02 * rivals.min(axis=1),
        fatal=False,
        headline=True,
        least=(rivals.min(axis=1) / times["fusebook"]).min(),
        most=(rivals.min(axis=1) / times["fusebook"]).max(),
        untimed=", ".join(
            f"{k} at {n} of {len(times)} sizes"
            for k, n in lacking.items()
            if n
        )
        or "none",
    ),
    target(
        "8192 x 131072 in bfloat16 takes at most 1.1 times the roof, the "
        "target: it takes {share:.2f} times. The tables above have the other "
        "shapes.",
        fused["gpu_us"] <= 1.1 * fused["roof_us"],
        of=tables.where(sweep, variant="fusebook", status="ok"),
        share=(fused["gpu_us"] / fused["roof_us"]).max(),
    ),
    claim(
        "In place, a training step takes {most:.2f} MiB beside the logits, "
        "less than 2.",
        over.loc["fusebook", "peak_bytes"] <= 2 * 2**20,
        most=over.loc["fusebook", "MiB beside the logits"],
    ),
    target(
        "Linear cross entropy of 8192 x 4096 x 128256 takes {ours:.2f} GiB "
        "beyond inputs and gradients; the target was at most 1.2, and no more "
        "than the fastest other way, {best}, which takes {theirs:.2f}.",
        llama.loc["fusebook", "GiB beyond"]
        <= min(1.2, llama.loc[best, "GiB beyond"]),
        headline=True,
        ours=llama.loc["fusebook", "GiB beyond"],
        best=best,
        theirs=llama.loc[best, "GiB beyond"],
        of=llama,
    ),
    target(
        "Linear cross entropy of that size takes {ratio:.2f} times the time "
        "of {best}; the target was 1.05. Left out, since they have no time on "
        "the device or are wrong: {untimed}.",
        llama.loc["fusebook", "ms"] <= 1.05 * llama.loc[best, "ms"],
        ratio=llama.loc["fusebook", "ms"] / llama.loc[best, "ms"],
        best=best,
        of=llama,
        untimed=", ".join(unjudged["variant"]) or "none",
    ),
    claim(
        "Two runs of ours give the same bits, of either loss, at every shape.",
        pd.concat([sweep, heads]).query(
            "variant == 'fusebook' and status == 'ok'"
        )["deterministic"]
        == "yes",
    ),
    claim(
        "Up to sixteen chunks leave the head's gradient within an eps of "
        "bfloat16 of float64; {many}, of four rows each, leave it {error:.1f} "
        "eps away.",
        chunked[chunked.index <= 16] <= 1,
        of=chunked,
        many=chunked.index[-1],
        error=chunked.iloc[-1],
    ),
)

# %%
# Where it does not win
# ~~~~~~~~~~~~~~~~~~~~~
#
# Every point at which some other way is faster by more than 2 %, the worst
# first. Tables of linear cross entropy compare times, not memory.

everything = tables.together(widest, models, heads)
table(
    tables.losses(everything),
    "Where another way is faster, cold: the fastest, and how far behind",
    fold=False,
)

# %%
# By the caller's clock
# ~~~~~~~~~~~~~~~~~~~~~
#
# The device works while the host queues what comes next. So an eager program
# of many calls pays the larger of the two times for each, *paid*. All of these
# times are without a check of the classes: ``check=True`` waits for the GPU.

callers = tables.alike(everything)
by_clock(callers)

# %%
table(tables.clocks(callers), "Every way by every clock, in microseconds")

# %%
table(
    tables.losses(callers, kind="paid"),
    "Where another way is faster for an eager program",
)

# %%
table(
    tables.losses(callers, kind="call"),
    "Where another way is faster by a call that is waited for",
)

# %%
# What to take to the next kernel:
#
# - A gradient that needs what the forward pass has in registers is best found
#   there.
# - Memory is a currency like time: print both, and say what one buys of the
#   other.
# - Before you fuse a product, count how often you would have to multiply.
# - Overwriting an input needs a reason why nobody reads it any more, in every
#   order in which programs may run.
#
# Exercises
# ---------
#
# Each has a function that is wrong, and a check that says so. Mend it; run the
# page, or the notebook, again.
#
# 1. Rows that are ignored
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# Tokens of a prompt shall not be learned: their target is -100, their loss and
# gradient are zero, even where a logit is NaN. Step two reads in front of the
# row for them.


def ignoring(x, target):
    return step_two(x, target.clamp(min=0))


def ignored(x, target):
    """Losses and their gradient, by PyTorch."""
    own = x.detach().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(own, target, reduction="none")
        (dx,) = torch.autograd.grad(loss.sum(), own)
    return loss.detach().to(torch.promote_types(x.dtype, torch.float32)), dx


def drawn(seed, some=-100):
    """Rows, and classes of which every third is `some`."""
    rng = generator(seed)
    x = torch.randn(12, 90, generator=rng, device=rng.device)
    target = torch.randint(0, 90, (12,), generator=rng, device=rng.device)
    target[::3] = some
    return x, target


exercise(
    "ignoring has no loss and no gradient where the target is -100",
    ignoring,
    ignored,
    [drawn(1), drawn(2)],
)

# %%
# 2. A z-loss
# ~~~~~~~~~~~
#
# Large models drift: nothing holds the sum of exponentials at one. Add
# 0.01 times the square of its logarithm to the loss, in the same pass. What
# does the gradient get?


def with_z_loss(x, target):
    return step_two(x, target)


def z_lossed(x, target):
    """Cross entropy with a z-loss, by PyTorch."""
    own = x.detach().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(own, target, reduction="none")
        loss = loss + 0.01 * own.logsumexp(-1) ** 2
        (dx,) = torch.autograd.grad(loss.sum(), own)
    return loss.detach().to(torch.promote_types(x.dtype, torch.float32)), dx


exercise(
    "with_z_loss adds the square, and its gradient",
    with_z_loss,
    z_lossed,
    [drawn(3, 0), drawn(4, 1)],
)

# %%
solution("solutions/plot_105_cross_entropy.py")
