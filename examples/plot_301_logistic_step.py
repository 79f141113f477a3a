# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
A training step in one kernel
=============================

Four hundred pictures of 784 pixels, a weight for each pixel, and ten thousand
steps of gradient descent: a small problem of the year 2012, whose text asked
what can be done to make the GPU faster, and left the answer as an exercise.
This page is an answer. It writes a step that reads the data once, and then a
kernel that reads the data once in all the ten thousand steps.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them.

For whom: those who iterate on a small problem many thousand times and see the
GPU idle.

Read before: 003, 102.
"""

# %%
# The problem
# -----------
#
# Logistic regression says how likely a row :math:`x_i` is of the second kind:
# :math:`p_i = \sigma(z_i)`, with the *margin* :math:`z_i = x_i w + b`. Its
# loss is the mean cross entropy of the targets :math:`y_i`, and a penalty that
# keeps the weights small:
#
# .. math::
#
#    L = \frac{1}{N} \sum_i \left( -y_i \log p_i
#        - (1 - y_i) \log (1 - p_i) \right) + \lambda \sum_j w_j^2
#
# Its gradient is short, and that is all that a step needs:
#
# .. math::
#
#    w \leftarrow w - \eta \left( \frac{1}{N} X^T (p - y) + 2 \lambda w
#    \right), \qquad
#    b \leftarrow b - \eta \, \frac{1}{N} \sum_i (p_i - y_i)
#
# X is used twice: row by row for the margins, and column by column for the
# gradient. Everything else is small: N or D numbers.

# sphinx_gallery_tags = ["training step", "grid barrier", "CUDA graph"]
import functools
import time

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots, tables
from fusebook.cards.logistic_step import LOGISTIC_FIT, LOGISTIC_STEP
from fusebook.measure import bench, timing
from fusebook.measure.check import yardstick
from fusebook.measure.inputs import generator
from fusebook.page import (
    Folded,
    Kernels,
    Source,
    by_clock,
    by_step,
    claim,
    claims,
    counters,
    downloads,
    draw,
    every_clock,
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
import triton
import triton.language as tl
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

asked = study(LOGISTIC_STEP, config="classic", dtype="float32")


def problem_of_2012(N=400, D=784, device=None):
    """Data, targets and first weights as the text of 2012 draws them."""
    rng = generator(301, device)
    at = {"generator": rng, "device": rng.device}
    X = torch.randn(N, D, **at)
    y = torch.randint(0, 2, (N,), **at).float()
    return X, y, torch.randn(D, **at), torch.zeros((), device=rng.device)


X, y, w, b = problem_of_2012(40, 60)
w, b, loss = fusebook.logistic_step(X, y, w, b, lr=0.01, l2=0.01)
claims(say("The loss before the first step: {loss:.4f}", loss=loss.item()))

# %%
# What eager costs
# ----------------

Source(fusebook.logistic_step_eager, doc=False)

# %%
# X is read twice. With a million rows that should be what a step costs, and a
# fused step reads once.
#
# With 400 rows X has 1.25 MB and stays in the L2 cache. There a step should
# cost its launches. Each operation that PyTorch
# dispatches is a launch, or several, and Python has to prepare each.


# site: fold
class Counted(TorchDispatchMode):
    """Counts the operations that are not just another view of a tensor."""

    operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += not function.is_view
        return function(*args, **(kwargs or {}))


with Counted() as counted:
    fusebook.logistic_step_eager(X, y, w, b, 0.01, 0.01)

big, small = {"N": 1_000_000, "D": 784}, {"N": 400, "D": 784}
chain = LOGISTIC_STEP.variants["eager"].cost(4, **big)
least = LOGISTIC_STEP.cost(4, **big)
predicted = (chain.read + chain.write) / (least.read + least.write)
claims(
    say(
        "Predicted from traffic, for a million rows: {gain:.2f} times as "
        "fast.",
        gain=predicted,
    ),
    say(
        "Predicted from launches, for four hundred: {n} operations become "
        "two launches.",
        n=counted.operations,
    ),
)

# %%
# The kernel
# ----------
#
# Step one: keep the row
# ~~~~~~~~~~~~~~~~~~~~~~
#
# A program takes some rows of X into its registers and computes their margins,
# and from these the error of each prediction. The rows are still there, so the
# second use of X costs no memory traffic. The gradient is a sum over all rows,
# to which each program adds its part.


@triton.jit
def step_rows(
    g_ptr, x_ptr, y_ptr, w_ptr, b_ptr, N, D,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    j = tl.arange(0, BLOCK)  # [BLOCK]
    inside = (i < N)[:, None] & (j < D)[None, :]
    at = i[:, None] * D + j[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)  # [ROWS, BLOCK]; read ND
    w = tl.load(w_ptr + j, mask=j < D, other=0.0)
    y = tl.load(y_ptr + i, mask=i < N, other=0.0)
    z = tl.sum(x * w[None, :], 1) + tl.load(b_ptr)  # [ROWS]
    e = tl.exp(-tl.abs(z.to(tl.float32)))  # between 0 and 1
    p = tl.where(z >= 0, 1.0, e) / (1.0 + e)
    r = tl.where(i < N, (p - y) / N, 0.0)
    g = tl.sum(x * r[:, None], 0)  # [BLOCK]; x once more, from registers
    tl.atomic_add(g_ptr + j, g.to(g_ptr.dtype.element_ty), mask=j < D)
    total = tl.sum(r, 0).to(g_ptr.dtype.element_ty)
    tl.atomic_add(g_ptr + D, total)  # the gradient of the bias


def step_one(X, y, w, b, lr, l2):
    (N, D), rows = X.shape, 16
    g = X.new_zeros(D + 1)
    grid = (triton.cdiv(N, rows),)
    block = triton.next_power_of_2(D)
    step_rows[grid](g, X, y, w, b, N, D, ROWS=rows, BLOCK=block)
    return w - lr * (g[:D] + 2 * l2 * w), b - lr * g[D]


# %%
# Three things are missing. There is no loss. Many programs add to one address
# in the order of the hardware, so two runs differ in their last bits, and
# after ten thousand steps in more. And six launches of PyTorch update the
# weights.
#
# Step two: the same sum, always in the same order
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Each program goes over many tiles of rows and keeps one partial gradient,
# which it writes beside those of the others: a few hundred rows of D numbers,
# whatever N is.
#
# A second launch adds them up in their order and takes the step. In the first
# launch a program would have to wait for all others, and the end of a launch
# is the simplest :term:`barrier`.

Folded("The library's kernels", Kernels(fusebook.logistic_step))

# %%
# The textbook's formula of the **loss** fails. At a margin of 20 the float32
# number nearest to p is 1, and the logarithm of 1 - p is minus infinity. With
# :math:`e = \exp(-|z|)`, which never overflows, the smaller of p and 1 - p is
# e / (1 + e), and the loss is a sum of positive terms.
#
# Step three: many steps in one launch
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The next step reads the same X, which left the registers only because the
# launch has ended. So let one program hold all rows and do all the steps.


@triton.jit
def fit_alone(
    w_ptr, b_ptr, x_ptr, y_ptr, N, D, steps, lr, l2,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)
    inside = (i < N)[:, None] & (j < D)[None, :]
    at = i[:, None] * D + j[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + j, mask=j < D, other=0.0).to(tl.float32)
    b = tl.load(b_ptr).to(tl.float32)
    for _ in range(steps):  # no memory is touched in here
        z = tl.sum(x * w[None, :], 1) + b
        e = tl.exp(-tl.abs(z))
        p = tl.where(z >= 0, 1.0, e) / (1.0 + e)
        r = tl.where(i < N, (p - y) / N, 0.0)
        w -= lr * (tl.sum(x * r[:, None], 0) + 2 * l2 * w)
        b -= lr * tl.sum(r, 0)
    tl.store(w_ptr + j, w, mask=j < D)
    tl.store(b_ptr, b)


def step_three(X, y, w, b, lr, l2, steps):
    (N, D), (w, b) = X.shape, (w.clone(), b.clone())
    rows, block = triton.next_power_of_2(N), triton.next_power_of_2(D)
    fit_alone[(1,)](w, b, X, y, N, D, steps, lr, l2, ROWS=rows, BLOCK=block)
    return w, b


# %%
# That is all of training, for data that fits into the registers of one
# multiprocessor: 256 KB on an H200. The pictures need five times as much. All
# multiprocessors together have 33 MB of registers. This page calls data that
# stays there **on the chip**. But then programs have to talk: in each step
# every program's part of the gradient must reach every program's weights.
#
# Step four: a barrier
# ~~~~~~~~~~~~~~~~~~~~
#
# Programs of one launch can wait for each other if all of them run at the same
# time, which a *cooperative* launch promises. Each adds one to a counter and
# waits until all have. The counter only grows, so nobody has to reset it.


@triton.jit
def wait_for_all(counter_ptr, target):
    counter = counter_ptr.to(tl.pointer_type(tl.int32))
    tl.debug_barrier()  # all threads of this program have stored
    tl.atomic_add(counter, 1, sem="release")  # what they stored is seen first
    while tl.load(counter, volatile=True) < target:
        pass
    tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def fit_barriers(
    w_ptr, b_ptr, parts_ptr, counter_ptr, x_ptr, y_ptr, N, D, steps, lr, l2,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    P, me = tl.num_programs(0), tl.program_id(0)
    i = me * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)
    inside = (i < N)[:, None] & (j < D)[None, :]
    at = i[:, None] * D + j[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)  # my rows, for all steps
    y = tl.load(y_ptr + i, mask=i < N, other=0.0)
    w = tl.load(w_ptr + j, mask=j < D, other=0.0).to(tl.float32)
    b = tl.load(b_ptr).to(tl.float32)
    mine = me * SLICE + tl.arange(0, SLICE)  # the weights I answer for
    q = tl.arange(0, PARTS)
    theirs = q[:, None] * (D + 1) + mine[None, :]  # [PARTS, SLICE]
    wanted = (q < P)[:, None] & (mine < D)[None, :]
    for t in range(steps):
        z = tl.sum(x * w[None, :], 1) + b
        e = tl.exp(-tl.abs(z.to(tl.float32)))
        p = tl.where(z >= 0, 1.0, e) / (1.0 + e)
        r = tl.where(i < N, (p - y) / N, 0.0)
        part = parts_ptr + me * (D + 1)
        tl.store(part + j, tl.sum(x * r[:, None], 0), mask=j < D)
        tl.store(part + D, tl.sum(r, 0))
        wait_for_all(counter_ptr, (2 * t + 1) * P)  # all parts are written
        # .cg: past L1, where what was read in the last step may still be
        g = tl.load(
            parts_ptr + theirs, mask=wanted, other=0.0, cache_modifier=".cg"
        )
        own = tl.load(
            w_ptr + mine, mask=mine < D, other=0.0, cache_modifier=".cg"
        )
        own = own - lr * (tl.sum(g, 0) + 2 * l2 * own)
        tl.store(w_ptr + mine, own, mask=mine < D)
        slopes = parts_ptr + q * (D + 1) + D
        b -= lr * tl.sum(
            tl.load(slopes, mask=q < P, other=0.0, cache_modifier=".cg"), 0
        )
        wait_for_all(counter_ptr, (2 * t + 2) * P)  # all weights are new
        w = tl.load(w_ptr + j, mask=j < D, other=0.0, cache_modifier=".cg").to(
            tl.float32
        )
    if me == 0:
        tl.store(b_ptr, b)


def step_four(X, y, w, b, lr, l2, steps):
    (N, D), (w, b) = X.shape, (w.clone(), b.clone())
    # Interpreted, programs run one after the other: one must hold all rows.
    alone = not X.is_cuda
    rows = triton.next_power_of_2(N) if alone else 4
    programs = triton.cdiv(N, rows)
    sizes = (rows, D, triton.cdiv(D, programs), programs)
    names = ("ROWS", "BLOCK", "SLICE", "PARTS")
    constants = zip(names, map(triton.next_power_of_2, sizes), strict=True)
    parts = X.new_empty(programs, D + 1)
    counter = X.new_zeros(1)
    fit_barriers[(programs,)](
        w, b, parts, counter, X, y, N, D, steps, lr, l2,
        **dict(constants), launch_cooperative_grid=True,
    )  # fmt: skip
    return w, b


# %%
# If every program added up all partial gradients, each would read D numbers
# from each of the others. So each program owns one slice of the weights: it
# adds up the gradient of its slice, writes the new weights, and reads the
# slices of all others. That makes two barriers a step. Each barrier is three
# trips to the :term:`L2 cache`: to write the data, to add to the counter, and
# to read it.
#
# Step five: the message is the signal
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A machine word of 64 bits is written and read as a whole. Half of it holds a
# float32, the other half the number of the step. A program that waits for a
# number reads the word until the step in it is right. There is no counter and
# no barrier, and there is one trip less each way. NCCL calls this its
# :term:`LL protocol`.
#
# The library's kernel is made of these. Each program owns some rows of X and a
# slice of the weights. In each step it sends its part of the gradient to the
# owners of the slices, and receives new weights from them. Two buffers
# alternate, one for even and one for odd steps. A program may overwrite a
# buffer only after every other program has answered the message that was in
# it; by step t + 2 all have.

draw.lanes(
    "Three programs and two steps: each message carries the number of its "
    "step (only those of program 0 are drawn)",
    {
        "program 0": [
            (0, 2, "step t"),
            (2, 3.2, "waits"),
            (3.2, 5, "its weights"),
            (5, 7.2, "step t + 1"),
        ],
        "program 1": [
            (0, 2.4, "step t"),
            (2.4, 3.4, "waits"),
            (3.4, 5.1, "its weights"),
            (5.1, 7.2, "step t + 1"),
        ],
        "program 2": [
            (0, 2.2, "step t"),
            (2.2, 3.3, "waits"),
            (3.3, 5.05, "its weights"),
            (5.05, 7.2, "step t + 1"),
        ],
    },
    [
        ("program 0", 2.0, "program 1", 3.2),
        ("program 0", 1.9, "program 2", 3.2),
        ("program 0", 4.9, "program 1", 5.1),
        ("program 0", 4.8, "program 2", 5.05),
    ],
)

# %%
# One detail is Triton's. The thread that waits for a word must be the thread
# that uses it, so a tile of words needs as many words as there are threads.
# Say there were 64 words and 128 threads: then two threads would load each
# word, the loop would look at one of the two copies, and the other copy might
# still be the old word. The result would be slightly wrong once in a while.
#
# The :term:`plan` keeps half of the registers for the data. Data that does not
# fit there is left to a loop of fused steps, and so is float64: a word of 64
# bits has no room for a float64 and a step.
#
# What the hardware counts
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# How often does X come from memory? By the counters of the GPU, which Nsight
# Compute reads, for one step of 100000 x 784, and for a hundred steps of the
# pictures in one launch, whose programs talk by messages.
# Sectors and :term:`occupancy` are of the kernel that reads most. On the chip
# it has few warps on purpose: they keep the data in registers.


# site: fold
def to_count():
    rows, few = problem_of_2012(100_000), problem_of_2012()
    return {
        "eager": lambda: fusebook.logistic_step_eager(*rows, 0.01, 0.01),
        "step one": lambda: step_one(*rows, 0.01, 0.01),
        "the library": lambda: fusebook.logistic_step(
            *rows, 0.01, 0.01, check=False
        ),
        "a hundred steps, on the chip": lambda: fusebook.logistic_fit(
            *few, 0.01, 0.01, steps=100, check=False
        ),
    }


OF_X = dict.fromkeys(("eager", "step one", "the library"), 4.0 * 100_000 * 784)
OF_X["a hundred steps, on the chip"] = 4.0 * 400 * 784
traffic = by_step(counters("logistic_counters", to_count), OF_X, "X")
table(traffic, "One is the bytes of X, as large as it is there", fold=False)

# %%
reads = traffic["read, X"]
claims(
    claim(
        "Eager reads X twice, to 5 %.",
        (reads.filter(items=["eager"]) / 2 - 1).abs() < 0.05,
        of=reads,
        fatal=False,
    ),
    claim(
        "Step one and the library's step read X once, to 2 %.",
        (reads.filter(items=["step one", "the library"]) - 1).abs() < 0.02,
        of=reads,
        fatal=False,
    ),
    claim(
        "A hundred steps on the chip read less than twice the bytes of X: "
        "{chip:.2f} times.",
        reads.filter(items=["a hundred steps, on the chip"]) < 2,
        of=reads,
        fatal=False,
        chip=reads.get("a hundred steps, on the chip"),
    ),
) if len(traffic) else None

# %%
# Is it right?
# ------------
#
# A step is compared with the chain in float64: new weights, new bias and loss,
# and the worst of the three counts. The inputs are two clouds of points, and
# random weights, so that a step changes them visibly. Every tenth row has
# forty times the norm of the others: there an exponential overflows.

inputs = LOGISTIC_STEP.make(generator(0), torch.float32, N=100, D=60)
yard = yardstick(LOGISTIC_STEP, inputs)


# site: fold
def textbook(X, y, w, b, lr, l2):
    """The step in the words of the formula, loss included."""
    p = torch.sigmoid(X @ w + b)
    loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
    r = (p - y) / len(y)
    new = w - lr * (X.T @ r + 2 * l2 * w)
    return new, b - lr * r.sum(), loss + l2 * (w * w).sum()


# site: fold
def without_penalty(*inputs):
    return fusebook.logistic_step(*inputs[:5], 0.0)


# site: fold
def loss_afterwards(X, y, w, b, lr, l2):
    w, b, _ = fusebook.logistic_step(X, y, w, b, lr, l2)
    return w, b, fusebook.logistic_step(X, y, w, b, lr, l2)[2]


# site: fold
def with_our_loss(step):
    """New weights by `step`, which has no loss."""
    return lambda *a: (*step(*a), fusebook.logistic_step(*a)[2])


ways = {
    "fusebook": fusebook.logistic_step,
    "step one, its weights": with_our_loss(step_one),
    "the formula as it is written": textbook,
    "without the penalty": without_penalty,
    "the loss after the step": loss_afterwards,
}
verdicts = {name: yard.judge(f(*inputs)) for name, f in ways.items()}
scores = pd.DataFrame(
    {
        name: {"error": v.error, "tolerance": v.tolerance, "right": v.ok}
        for name, v in verdicts.items()
    }
).T
table(
    scores,
    "One step of 100 x 60, and what it must not be mistaken for",
    fold=True,
)

# %%
MISTAKES = {
    "the formula as it is written": "the formula of a textbook, whose loss "
    "overflows",
    "without the penalty": "a step without its penalty",
    "the loss after the step": "a loss that is taken after the step",
}
claims(
    claim("The library's step is right.", verdicts["fusebook"].ok),
    claim("Step one is right.", verdicts["step one, its weights"].ok),
    *(
        claim(f"The check catches {mistake}.", not verdicts[name].ok)
        for name, mistake in MISTAKES.items()
    ),
)

# %%
# Many steps
# ~~~~~~~~~~
#
# Over many steps, errors must not grow. With a penalty on the weights they do
# not: steps that are small enough pull all starting points together.

many = LOGISTIC_FIT.make(generator(1), torch.float32, N=50, D=30, steps=40)
fit_yard = yardstick(LOGISTIC_FIT, many)
*given, steps = many
whole = fusebook.logistic_fit(*given, steps=steps)


def of_fit(outputs):
    """The verdict on weights and bias, with the losses of `whole`."""
    return fit_yard.judge((*outputs[:2], whole[2])).ok


claims(
    claim("logistic_fit is right after 40 steps.", of_fit(whole)),
    claim(
        "One program alone, step three, is right after 40 steps.",
        of_fit(step_three(*many)),
    ),
    claim(
        "Programs with barriers, step four, are right after 40 steps.",
        of_fit(step_four(*many)),
    ),
    claim(
        "The loss of logistic_fit falls at every one of 40 steps.",
        whole[2].diff().max().item() < 0,
    ),
)

# %%
# How fast?
# ---------
#
# First one step of the problem of 2012, 400 x 784. *Call* is how long Python
# waits for it; *cold* and *warm* are the device's time, without and with X in
# the L2 cache; *host* is what Python needs to queue it; *paid* is the larger
# of host and cold. *Fusebook, checked* also reads whether all targets are 0 or
# 1, and waits for the answer. *Reduce-overhead* also copies its results out of
# its graph. Eager's *warm* time is that of eager PyTorch in a :term:`CUDA
# graph`. (NumPy and PyTorch on the CPU are left out: between calls of others
# they first wake their threads and fetch the data; in the loop below they are
# alone.)

one = asked.results()
one = one[~one["variant"].isin(["NumPy", "torch on the CPU"])]
table(
    tables.clocks(one),
    "One step of 400 x 784, in microseconds by each clock",
    fold=False,
)

# %%
downloads(one, "logistic_step")

# %%
# Now the loop of 2012: ten thousand steps, and the loss before each. Every way
# starts from the same weights, and is compared with the chain in float64. The
# library writes down which kernels the first call of a launcher launched, and
# later calls launch these (:doc:`plot_003_launching`). Of a loop of fused
# steps it writes down twenty at a time. PyTorch on the CPU is given all cores,
# and then one: for work as small as this, threads may cost more than they
# save.

ALL_CORES, ONE_CORE = "torch on the CPU", "torch on one core"
WAYS = (
    "NumPy",
    ALL_CORES,
    ONE_CORE,
    "eager",
    "torch.compile",
    "reduce-overhead",
    "eager in a graph",
    "torch.compile in a graph",
    "fusebook steps",
    "fusebook",
)


@functools.cache
def ten_thousand():
    """Each way's seconds and losses, and how its predictions differ."""
    inputs = (*problem_of_2012(), 0.01, 0.01, 10_000)
    exact = [v.double() for v in inputs[:4]]
    variants = LOGISTIC_FIT.variants
    cores = torch.get_num_threads()

    def run(name, inputs):
        variant = variants[ALL_CORES if name == ONE_CORE else name]
        torch.set_num_threads(1 if name == ONE_CORE else cores)
        for steps in (20, inputs[-1]):  # the first call compiles
            given = (*inputs[:-1], steps)
            ready = variant.prepare(*given) if variant.prepare else given
            torch.cuda.synchronize()
            start = time.perf_counter()
            w, b, losses = variant.run(*ready)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        w, b, losses = (v.to(inputs[0].device) for v in (w, b, losses))
        return seconds, inputs[0].to(w.dtype) @ w + b > 0, losses.double()

    _, truth, want = run("eager in a graph", (*exact, *inputs[4:]))
    scale = want.abs() + want.square().mean().sqrt()
    rows, curves = [], {"float64": want}
    for name in WAYS:
        seconds, predicted, losses = run(name, inputs)
        error = (losses - want).abs() / scale
        differ = int((predicted != truth).sum())
        rows.append((name, seconds, differ, error.max().item()))
        curves |= {name: losses, f"score of {name}": error}
    columns = ["way", "seconds", "predictions that differ", "error"]
    ways = pd.DataFrame(rows, columns=columns)
    # As the check has it: 64 eps, or twice what float32 costs the chain.
    rounded = ways.set_index("way")["error"]["eager"]
    limit = max(64 * torch.finfo(torch.float32).eps, 2 * rounded)
    return ways.assign(tolerance=limit), curves


def seconds_of_each_way():
    return ten_thousand()[0]


def losses_of_each_way():
    at = sorted({round(10 ** (k / 8)) for k in range(33)})
    index = [t - 1 for t in at]
    curves = ten_thousand()[1].items()
    picked = {name: curve[index].cpu().numpy() for name, curve in curves}
    return pd.DataFrame({"step": at} | picked)


seconds = measured("logistic_seconds", seconds_of_each_way)
by_way = seconds.set_index("way")
by_way["microseconds a step"] = 100 * by_way["seconds"]
table(by_way, "Ten thousand steps of 400 x 784", fold=False)

# %%
# How far the losses of four of these ways are from those of float64, in parts
# of what the check allows:

losses = measured("logistic_losses", losses_of_each_way)
curves = losses.set_index("step")
four = ["NumPy", "eager", "fusebook steps", "fusebook"]
apart = curves[[f"score of {name}" for name in four]]
apart = apart / by_way["tolerance"].iloc[0]
apart.columns = four
ax = plots.lines(
    apart,
    title="Distance of the losses from those in float64",
    ylabel="parts of the limit",
    source=losses,
)

# %%
claims(
    claim(
        "The loss curve of every way lies on that of float64, within the "
        "limit.",
        by_way["error"] <= by_way["tolerance"],
    ),
    claim(
        "Every way predicts the same as float64 for all 400 rows.",
        by_way["predictions that differ"] == 0,
    ),
    say(
        "On one core PyTorch takes {ratio:.2f} times the time that it takes "
        "on all of them.",
        ratio=by_way["seconds"].get(ONE_CORE) / by_way["seconds"][ALL_CORES],
    ),
)

# %%
provenance(one, seconds, losses)

# %%
# A profile of the step
# ~~~~~~~~~~~~~~~~~~~~~
#
# "Is time being used sensibly?" was a question of 2012. In a hundred steps of
# each way `torch.profiler` counts the kernels of a step and how long the GPU
# is busy with them; the time of a step is taken without the profiler, in
# another run than the loop's above. A fused step is a call of its own here,
# and not one of twenty that were written down.


# site: fold
def profile_of_a_step():
    X, y, w, b = problem_of_2012()

    def steps(step):
        def run():
            now = w, b
            for _ in range(100):
                now = step(X, y, *now, 0.01, 0.01)[:2]

        return run

    def ours(*given):
        return fusebook.logistic_step(*given, check=False)

    def at_once():
        return fusebook.logistic_fit(
            X, y, w, b, 0.01, 0.01, steps=100, check=False
        )

    ways = {
        "eager": steps(fusebook.logistic_step_eager),
        "fused step": steps(ours),
        "many steps in one launch": at_once,
    }
    times = timing.call(ways, warmup=3, repeat=9)
    rows = []
    for way, run in ways.items():
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
        for e in seen.key_averages():
            if e.self_device_time_total > 0:
                rows.append(
                    {
                        "way": way,
                        "kernel": e.key[:60],
                        "a step": e.count / 100,
                        "GPU us a step": e.self_device_time_total / 100,
                        "us a step": times[way].q50 * 1e4,
                    }
                )
    return pd.DataFrame(rows)


profiled = measured("logistic_profile", profile_of_a_step)
seen = profiled.groupby("way", sort=False).agg(
    {"a step": "sum", "GPU us a step": "sum", "us a step": "first"}
)
seen = seen.rename(columns={"a step": "kernels a step"})
seen["GPU busy"] = seen["GPU us a step"] / seen["us a step"]
table(seen, "A step in a profile, without a graph", fold=False)

# %%
# What each step was worth
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# The kernels of this page as they were shown: a hundred steps in a CUDA graph,
# so that Python costs nothing, and the time of one. Step three holds all data
# in one program, so it is timed on 16 rows only.


# site: fold
def logistic_steps():
    def steps(step, given):
        def run():
            now = given[2:]
            for _ in range(100):
                now = step(*given[:2], *now, 0.01, 0.01)[:2]
            return now

        return run

    def at_once(fit, given):
        return lambda: fit(*given, 0.01, 0.01, steps=100)[:2]

    def library_step(*given):
        return fusebook.logistic_step(*given, check=False)

    def library_fit(*given, steps):
        return fusebook.logistic_fit(*given, steps=steps, check=False)

    parts = []
    for N, D in ((16, 784), (400, 784)):
        given = problem_of_2012(N, D)
        want = steps(
            fusebook.logistic_step_eager, [v.double() for v in given]
        )()[0]
        scale = want.abs() + want.square().mean().sqrt()

        def score(got, want=want, scale=scale):
            return ((got[0] - want).abs() / scale).max().item()

        rounded = score(steps(fusebook.logistic_step_eager, given)())
        limit = max(64 * torch.finfo(torch.float32).eps, 2 * rounded)
        torch.compiler.reset()
        compiled = torch.compile(fusebook.logistic_step_eager, dynamic=False)
        ways = {
            "eager": steps(fusebook.logistic_step_eager, given),
            "torch.compile": steps(compiled, given),
            "step one": steps(step_one, given),
            "step two, the library's": steps(library_step, given),
            "step three, one program": at_once(step_three, given),
            "step four, barriers": at_once(step_four, given),
            "step five, the library's": at_once(library_fit, given),
        }
        if N > 16:
            del ways["step three, one program"]
        frame = bench.staircase(
            ways,
            lambda got, limit=limit, score=score: score(got) <= limit,
            kind="warm",
            repeat=15,
        )
        frame["us"] /= 100
        parts.append(frame.assign(N=N, D=D))
    return pd.concat(parts, ignore_index=True)


stairs = measured("logistic_steps", logistic_steps)
stair_us = stairs.pivot_table("us", "step", "N", sort=False)
stair_us.columns = [f"{N} rows, us" for N in stair_us.columns]
stair_us["registers a thread"] = stairs.drop_duplicates("step").set_index(
    "step"
)["registers"]
stair_us["lines of code"] = pd.Series(
    {
        "eager": lines_of(fusebook.logistic_step_eager),
        "step one": lines_of(step_rows, step_one),
        "step three, one program": lines_of(fit_alone, step_three),
        "step four, barriers": lines_of(wait_for_all, fit_barriers, step_four),
        "step five, the library's": lines_behind(fusebook.logistic_step_eager),
    }
)
table(stair_us, "One step of a hundred, 784 features, in a graph", fold=False)

# %%
few, all_rows = stair_us["16 rows, us"], stair_us["400 rows, us"]
claims(
    claim("A hundred steps of each kernel are right.", stairs["right"]),
    claim(
        "With 400 rows each step of this page is faster than the one before "
        "it. (Step three has no room for them.)",
        all_rows.drop(["eager", "torch.compile"]).dropna().diff().dropna() < 0,
        of=all_rows.drop(["eager", "torch.compile", "step one"]),
        fatal=False,
    ),
    say(
        "With 400 rows, in the same graph, a step that torch.compile made "
        "takes {fused:.1f} times the time of the fused step, and {chip:.1f} "
        "times that of a step on the chip.",
        fused=all_rows["torch.compile"] / all_rows["step two, the library's"],
        chip=all_rows["torch.compile"] / all_rows["step five, the library's"],
    ),
    say(
        "With 400 rows messages in place of barriers save {saved:.0%} of a "
        "step.",
        saved=1
        - all_rows["step five, the library's"]
        / all_rows["step four, barriers"],
    ),
    say(
        "With 16 rows one program alone, which waits for nobody, takes "
        "{times:.2f} times the time of the library's kernel.",
        times=few["step three, one program"] / few["step five, the library's"],
    ),
)

# %%
# Over rows and features
# ~~~~~~~~~~~~~~~~~~~~~~
#
# Fifty steps are timed at once, and the device's time of one of them is shown.
# All ways are captured in a CUDA graph, since launches by Python would hide
# the rest. Up to some thousand rows the data fits on the chip; beyond,
# `logistic_fit` is a loop of fused steps.

sweep = asked.results(
    LOGISTIC_FIT,
    config="rows,features",
    dtype="float32",
    variants=[
        *("eager", "torch.compile", "eager in a graph"),
        *("torch.compile in a graph", "fusebook steps", "fusebook"),
    ],
)
# A graph that is replayed is not captured in another one.
loops = sweep[~sweep["variant"].str.endswith("in a graph")]
a_step = loops.assign(gpu_warm_us=loops["gpu_warm_us"] / loops["steps"])
rows = tables.where(a_step, D=784).drop_duplicates(["N", "variant"])
ax = plots.times(
    rows,
    x="N",
    xlabel="rows, N",
    kind="warm",
    title="One step of many, over the rows, with 784 features",
)
ax.set_xscale("log")

# %%
on = sweep.attrs["origin"].machine
points = a_step.pivot_table(
    index=["N", "D"], columns="variant", values="gpu_warm_us"
)
points["MB of X"] = [4e-6 * N * D for N, D in points.index]
# X is kept in half of the registers: 2**16 of four bytes a multiprocessor.
points["on the chip"] = points["MB of X"] <= on.sms * 2**17 / 1e6
table(points, "One step of many, in microseconds", fold=True)

# %%
# The same fits by one call of each way, as Python waits for it: loops that are
# captured beforehand, by a program that will fit the same shape again, ask the
# host for one replay.

calls = sweep.pivot_table(
    index=["N", "D"], columns="variant", values="latency_us"
)
table(calls, "Fifty steps by one call, in microseconds", fold=True)

# %%
# Fifty steps by the clock of the device and ten thousand by that of the host
# should agree on a step on the chip.

on_chip = points.loc[(400, 784), "fusebook"]
at_once = by_way.loc["fusebook", "microseconds a step"]
claims(
    say(
        "A step on the chip takes {at_once:.2f} microseconds among ten "
        "thousand, and {on_chip:.2f} among fifty.",
        at_once=at_once,
        on_chip=on_chip,
    ),
    claim(
        "The two times of a step on the chip agree within a fifth.",
        abs(at_once / on_chip - 1) < 0.2,
        fatal=False,
    ),
)

# %%
# Where the time of a small step goes
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# An eager step and a fused one by Python's clock and by the device's, beside
# as many empty launches as a step has operations, on this machine:

eager = tables.where(one, variant="eager").iloc[0]
ours = tables.where(one, variant="fusebook").iloc[0]
budget = {
    "Python waits for an eager step": eager["latency_us"],
    "the device works on it (in a graph)": eager["gpu_warm_us"],
    f"{counted.operations} empty launches": counted.operations
    * eager["floor_warm_us"],
    "Python waits for a fused step": ours["latency_us"],
    "the device works on it": ours["gpu_warm_us"],
    "two empty launches": 2 * ours["floor_warm_us"],
    "a step on the chip (of fifty)": on_chip,
    "X from memory, once": ours["roof_us"],
}
budget = pd.DataFrame({"microseconds": budget})
table(budget, "A step of 400 x 784", fold=True)

# %%
# How far from the roof?
# ----------------------
#
# Where X does not fit into the L2 cache, the :term:`roof` of a step is to read
# it once, at the rate that a sum reaches on this machine.

large = asked.results(
    config="roof",
    dtype="float32",
    variants=["eager", "torch.compile", "fusebook"],
)
device = ["eager", "torch.compile", "eager in a graph", "fusebook"]
both = tables.together(tables.where(one, variant=device), large)
plots.dots(both[both["variant"] != "eager in a graph"], of="roof")

# %%
table(
    tables.shares(large),
    "A step of a million rows, against the roof of one read",
    fold=False,
)

# %%
provenance(large, sweep)

# %%
# Lessons
# -------
#
# The old text asked: **Is there an increase in speed from CPU to GPU? Where
# does it come from?** Its third question is the next heading.

each = by_way["seconds"]
claims(
    claim(
        "Eager PyTorch on the GPU is slower than NumPy on the CPU, by the "
        "host's clock.",
        each["eager"] > each["NumPy"],
        fatal=False,
    ),
    claim(
        "Ten thousand steps take NumPy {numpy:.2f} s, eager PyTorch on the "
        "GPU {eager:.2f} s, eager in a CUDA graph {graph:.2f} s, "
        "torch.compile in one {compiled:.3f} s, and one kernel on the chip "
        "{chip:.3f} s, less than a tenth of NumPy's.",
        each["fusebook"] <= each["NumPy"] / 10,
        fatal=False,
        headline=True,
        numpy=each["NumPy"],
        eager=each["eager"],
        graph=each["eager in a graph"],
        compiled=each["torch.compile in a graph"],
        chip=each["fusebook"],
    ),
    claim(
        "The device works for less than half of an eager step: for "
        "{share:.0%} of it.",
        eager["gpu_warm_us"] < eager["latency_us"] / 2,
        share=eager["gpu_warm_us"] / eager["latency_us"],
    ),
)

# %%
# What can be done to further increase the speed?
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Ask less often: a graph asks once for many launches, fusion needs fewer of
# them, and a :term:`persistent kernel` needs one for all steps.

chip = tables.where(rows, variant="fusebook").set_index("N")["gpu_warm_us"]
fits = points["on the chip"]
ways = points.columns.intersection(loops["variant"].unique())
faster = points["fusebook"] <= 1.02 * points[ways].min(axis=1)
claims(
    say(
        "By the host's clock, over ten thousand steps: eager in a graph is "
        "{graph:.1f} times as fast as eager, a loop of fused steps "
        "{fused:.1f} times, the kernel on the chip {chip:.0f} times. That "
        "kernel is {again:.0f} times as fast as eager in a graph, "
        "{compiled:.1f} times as fast as torch.compile in a graph, and "
        "{all:.0f} times as fast as NumPy.",
        graph=each["eager"] / each["eager in a graph"],
        fused=each["eager"] / each["fusebook steps"],
        chip=each["eager"] / each["fusebook"],
        again=each["eager in a graph"] / each["fusebook"],
        compiled=each["torch.compile in a graph"] / each["fusebook"],
        all=each["NumPy"] / each["fusebook"],
    ),
    say(
        "By the device's clock, in a graph: a fused step is {fused:.1f} times "
        "as fast as an eager one, a step on the chip {chip:.1f} times as fast "
        "as a fused one, and what torch.compile generates {compiled:.1f} "
        "times as fast as eager.",
        fused=eager["gpu_warm_us"] / ours["gpu_warm_us"],
        chip=ours["gpu_warm_us"] / on_chip,
        compiled=all_rows["eager"] / all_rows["torch.compile"],
    ),
    claim(
        "In a graph a fused step takes at most half of an eager one.",
        ours["gpu_warm_us"] <= eager["gpu_warm_us"] / 2,
    ),
    target(
        "A step on the chip takes {on_chip:.2f} us; the target was five.",
        on_chip <= 5,
        on_chip=on_chip,
    ),
    target(
        "A fused step of a million rows of 784 reaches {share:.0%} of the "
        "roof of one read; the target was 85 %.",
        tables.share(large, "fusebook", of="roof") >= 0.85,
        share=tables.share(large, "fusebook", of="roof").min(),
    ),
    claim(
        "Where the data fits on the chip, the kernel on the chip is never "
        "slower by more than 2 % than another way of the table: {ways}.",
        faster[fits],
        of=faster,
        ways=", ".join(w for w in ways if w != "fusebook"),
    ),
    claim(
        "By one call, too, fifty steps on the chip are never slower by more "
        "than 2 % than a loop of the table: {ways}.",
        (calls["fusebook"] <= 1.02 * calls.min(axis=1))[fits],
        fatal=False,
        of=calls,
        ways=", ".join(w for w in calls if w != "fusebook"),
    ),
    claim(
        "Two runs give the same bits at every size.",
        tables.where(pd.concat([one, large, sweep]), variant="fusebook")[
            "deterministic"
        ]
        == "yes",
    ),
    say(
        "For a million rows the traffic predicts {predicted:.2f} times as "
        "fast as eager; measured {gain:.2f}.",
        predicted=predicted,
        gain=tables.ratio(large, "eager", "fusebook").iloc[0],
    ),
    claim(
        "What does not fit on the chip is never slower than single fused "
        "steps by more than 5 %.",
        (points["fusebook"] <= 1.05 * points["fusebook steps"])[~fits],
        fatal=False,
        of=points,
    ),
    say(
        "With 400 rows on the chip a step of 784 features takes {small:.1f} "
        "times as long as one of 16, whose data is 49 times as small.",
        small=points.loc[(400, 784), "fusebook"]
        / points.loc[(400, 16), "fusebook"],
    ),
)

# %%
# By the caller's clock
# ~~~~~~~~~~~~~~~~~~~~~
#
# In a loop nobody waits for each step. The device works while the host queues
# what comes next, and an eager program of many calls pays, for each, the
# larger of the host's time and the device's: *paid*. A fused step can be
# captured in a CUDA graph as well; then neither its launches nor Python cost
# the host anything.

callers = tables.alike(pd.concat([one, large]))
by_clock(callers)

# %%
every_clock(callers)

# %%
# The points of the step at which another way is faster by more than 2 %, cold:

table(
    tables.losses(both),
    "Where another way is faster, cold: the fastest, and how far behind",
    fold=False,
)

# %%
# What to take to the next kernel:
#
# - Count launches before bytes. A small problem costs what it asks for, not
#   what it computes.
# - Data that is used twice should be read once: keep the tile, and turn the
#   loops so that both uses meet it.
# - A launch is a barrier that costs a trip to the host's queue. Programs that
#   run at the same time can do with less: a message that carries the number of
#   its step.
# - Add up in a fixed order: ten thousand steps later the result is still the
#   same.
# - The loss is the first thing to overflow.
#
# Exercises
# ---------
#
# Each has a function that is wrong, and a check that says so. Mend it, and run
# the page or the notebook again. No GPU is needed.
#
# 1. The logarithm that overflows
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The cross entropy of a margin, without ever computing 1 - p. Margins of 100
# are asked for.


def cross_entropy(z, y):
    p = torch.sigmoid(z)
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p))


def margins(seed):
    rng = generator(seed)
    z = 40 * torch.randn(200, generator=rng, device=rng.device)
    return z, (z > 0).float().roll(1)


exercise(
    "cross_entropy is finite and right at every margin",
    cross_entropy,
    lambda z, y: torch.nn.functional.binary_cross_entropy_with_logits(
        z, y, reduction="none"
    ),
    [margins(2), margins(3)],
)

# %%
# 2. Momentum
# ~~~~~~~~~~~
#
# A ball that rolls: :math:`v \leftarrow \mu v - \eta g` and then :math:`w
# \leftarrow w + v`, for the weights and for the bias. The velocities start at
# zero and need not leave the registers. Write it into ``fit_alone``; this
# attempt has no momentum.


def fit_with_momentum(X, y, w, b, lr, l2, mu, steps):
    return step_three(X, y, w, b, lr, l2, steps)


def rolled(X, y, w, b, lr, l2, mu, steps):
    """The same in PyTorch, one step after another."""
    v, u = torch.zeros_like(w), torch.zeros_like(b)
    for _ in range(steps):
        r = (torch.sigmoid(X @ w + b) - y) / len(y)
        v = mu * v - lr * (X.T @ r + 2 * l2 * w)
        u = mu * u - lr * r.sum()
        w, b = w + v, b + u
    return w, b


def drawn(seed, N, D):
    """Data, targets and weights, as the card draws them."""
    return LOGISTIC_FIT.make(
        generator(seed), torch.float32, N=N, D=D, steps=1
    )[:4]


exercise(
    "fit_with_momentum rolls for eight steps",
    fit_with_momentum,
    rolled,
    [
        (*drawn(4, 30, 12), 0.1, 0.01, 0.9, 8),
        (*drawn(5, 9, 3), 0.2, 0, 0.5, 8),
    ],
)

# %%
# 3. Rows that count more
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# Give each row a weight :math:`s_i`, by which its part of the gradient is
# multiplied; the mean is still over N rows. One load and one product more in
# ``step_rows``.


def weighted_step(X, y, s, w, b, lr, l2):
    return step_one(X, y, w, b, lr, l2)


def weighted(X, y, s, w, b, lr, l2):
    """The same in PyTorch."""
    r = s * (torch.sigmoid(X @ w + b) - y) / len(y)
    return w - lr * (X.T @ r + 2 * l2 * w), b - lr * r.sum()


def rows_that_count(seed, N, D):
    X, y, w, b = drawn(seed, N, D)
    return X, y, torch.where(y > 0, 1.0, 5.0), w, b, 0.5, 0.01


exercise(
    "weighted_step multiplies the part of each row",
    weighted_step,
    weighted,
    [rows_that_count(6, 40, 20), rows_that_count(7, 21, 5)],
)

# %%
solution("solutions/plot_301_logistic_step.py")
