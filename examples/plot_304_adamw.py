# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
An optimizer step in one launch
===============================

A model has hundreds of parameters, and AdamW takes eight operations to step
one of them. The device could pass over all of them once, at the rate of its
memory; the host asks it thousands of times instead. This page writes the step
for a whole list of tensors as one kernel, which finds its tensors in a table
of addresses, and then looks at what is left of the host's time.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them.

For whom: those who train models of many parameters and see the optimizer wait
for Python.

Read before: 003, 101.
"""

# %%
# The problem
# -----------
#
# AdamW keeps two running averages of each gradient :math:`g`: of itself,
# :math:`m`, and of its square, :math:`v`. In step :math:`t`:
#
# .. math::
#
#    m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
#    v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
#    p &\leftarrow (1 - \eta \lambda) p - \frac{\eta}{1 - \beta_1^t} \,
#        \frac{m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}
#
# Each number of a parameter is stepped by itself. So it does not matter which
# tensor it belongs to, and a list of a thousand tensors is one long row of
# numbers, only not in one piece.

# sphinx_gallery_tags = ["training step", "optimizer", "pointer table"]
import functools
import statistics
import time

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots, tables
from fusebook.cards.adamw import ADAMW_STEP
from fusebook.measure import compiled, timing
from fusebook.measure.check import yardstick
from fusebook.measure.inputs import generator
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
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import TorchDispatchMode

asked = study(ADAMW_STEP, config="small", dtype="float32")
where = generator(0).device


def model(sizes, seed=0):
    """Parameters, gradients and averages of a model that has begun."""
    rng = generator(seed)
    at = {"generator": rng, "device": rng.device}
    ps, gs, ms = ([torch.randn(n, **at) for n in sizes] for _ in range(3))
    return ps, gs, ms, [torch.rand(n, **at) for n in sizes]


ps, gs, ms, vs = model([300, 5000, 40])
fusebook.adamw_step(ps, gs, ms, vs, step=1, lr=1e-3)
claims(
    say(
        "A model of three tensors has taken a step: the first of them begins "
        "with {numbers} now.",
        numbers=", ".join(f"{x:.3f}" for x in ps[0][:3].tolist()),
    )
)

# %%
# What eager costs
# ----------------

Source(fusebook.adamw_step_eager)

# %%
# Every line is a pass over memory, and a launch for every tensor. Let us
# count: the operations that PyTorch dispatches, and the bytes that the card of
# this operator says they move.


# site: fold
class Counted(TorchDispatchMode):
    """Counts the operations that are dispatched."""

    operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))


rest = (1, 1e-3, 0.9, 0.999, 1e-8, 0.01)
with Counted() as counted:
    fusebook.adamw_step_eager(ps, gs, ms, vs, *rest)

point = {"numbers": 10**9, "tensors": 1000, "sizes": "equal", "kind": "plain"}
chain = ADAMW_STEP.variants["loop"].cost(4, **point)
least = ADAMW_STEP.cost(4, **point)
predicted = (chain.read + chain.write) / (least.read + least.write)
claims(
    say(
        "A tensor takes {n} operations: a thousand tensors take {all}.",
        n=counted.operations // len(ps),
        all=1000 * counted.operations // len(ps),
    ),
    say(
        "The loop moves {chain:.0f} bytes for each number, one pass "
        "{least:.0f}: predicted {gain:.2f} times as fast where memory is the "
        "limit.",
        chain=(chain.read + chain.write) / 1e9,
        least=(least.read + least.write) / 1e9,
        gain=predicted,
    ),
)

# %%
# The kernel
# ----------
#
# Step one: one tensor
# ~~~~~~~~~~~~~~~~~~~~
#
# Four loads, the formula, three stores. The bias corrections are the same for
# all numbers, so the host computes them.


@triton.jit
def stepped(p_ptr, g_ptr, m_ptr, v_ptr, i, inside, keep, size, root, eps):
    g = tl.load(g_ptr + i, mask=inside)
    m = 0.9 * tl.load(m_ptr + i, mask=inside) + 0.1 * g
    v = 0.999 * tl.load(v_ptr + i, mask=inside) + 0.001 * g * g
    p = keep * tl.load(p_ptr + i, mask=inside)
    tl.store(m_ptr + i, m, mask=inside)
    tl.store(v_ptr + i, v, mask=inside)
    p -= size * m / (tl.sqrt(v) / root + eps)
    tl.store(p_ptr + i, p, mask=inside)


@triton.jit
def one_tensor(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    N,
    keep,
    size,
    root,
    eps,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stepped(p_ptr, g_ptr, m_ptr, v_ptr, i, i < N, keep, size, root, eps)


def numbers_of(t, lr, decay=0.01):
    """What the host computes of a step: keep, size, root, eps."""
    return (
        1 - lr * decay,
        lr / (1 - 0.9**t),
        (1 - 0.999**t) ** 0.5,
        1e-8,
    )


def step_one(ps, gs, ms, vs, t, lr):
    for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
        grid = (triton.cdiv(p.numel(), 1024),)
        one_tensor[grid](p, g, m, v, p.numel(), *numbers_of(t, lr), BLOCK=1024)


# %%
# That is one pass over memory. It is still a launch for each tensor, and many
# tensors of a model are small: norms and biases of a few thousand numbers.
#
# Step two: a table of addresses
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A kernel's arguments are fixed in number, a list's tensors are not. But an
# address is a number, and numbers can be read from memory. A
# :term:`pointer table` holds the addresses of all tensors, a list of chunks
# says which tensor a program steps and where in it, and both are put on the
# device once.
# PyTorch's fused optimizers pass such a table by value, within the 4 KB that
# arguments of a kernel may have, and launch again when it is full.


@triton.jit
def whole_list(
    table_ptr,
    chunks_ptr,
    T,
    keep,
    size,
    root,
    eps,
    BLOCK: tl.constexpr,
):
    chunk = tl.load(chunks_ptr + tl.program_id(0))
    tensor, first = chunk >> 32, (chunk & 0xFFFFFFFF) * BLOCK
    FLOATS: tl.constexpr = tl.pointer_type(tl.float32)
    row = table_ptr + tensor
    N = tl.load(row)
    p_ptr = tl.load(row + T).to(FLOATS)
    g_ptr = tl.load(row + 2 * T).to(FLOATS)
    m_ptr = tl.load(row + 3 * T).to(FLOATS)
    v_ptr = tl.load(row + 4 * T).to(FLOATS)
    i = first + tl.arange(0, BLOCK)
    stepped(p_ptr, g_ptr, m_ptr, v_ptr, i, i < N, keep, size, root, eps)


def chunks_of(sizes, block):
    """Tensor and chunk in one number: 0, 1, ... for each tensor in turn."""
    return [
        (i << 32) + c
        for i, n in enumerate(sizes)
        for c in range(triton.cdiv(n, block))
    ]


def tables_of(lists, block=1024):
    sizes = [p.numel() for p in lists[0]]
    rows = [sizes, *([t.data_ptr() for t in ts] for ts in lists)]
    put = functools.partial(torch.tensor, device=lists[0][0].device)
    return put(rows), put(chunks_of(sizes, block))


def step_two(ps, gs, ms, vs, t, lr, tables=None):
    addresses, chunks = tables or tables_of((ps, gs, ms, vs))
    whole_list[(len(chunks),)](
        addresses, chunks, len(ps), *numbers_of(t, lr), BLOCK=1024
    )


# %%
# Step three: what a list may be
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Triton reads and writes 16 bytes at a time where it knows that an address is
# a multiple of 16. It looks at the addresses that are arguments. Of one that
# comes from a table it knows nothing, so step two reads 4 bytes at a time. So
# the table also says whether a tensor is aligned, and the kernel has two ways:
# whole chunks of aligned tensors, and all others. In PTX the first shows as
# ``ld.global.v4``.
#
# The learning rate, the number of steps and the gradients' norm may be on the
# device, so that a :term:`CUDA graph` of a step can be replayed. Then the
# kernel has to count: all programs read the number of steps, and one may write
# the next, but only when all have read. Each takes a ticket, and the last one
# counts.
#
# Step four: sixteen bits
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# A bfloat16 number has eight bits of mantissa. A step that is smaller than
# half of the last of them is rounded away, and the parameter never moves.
# There are two remedies. A float32 master beside each parameter is what is
# really stepped (:term:`master weights`), at 4 bytes more for each number. Or
# the rounding is left to chance: :term:`stochastic rounding` goes up as often
# as the lost digits say, so that the mean of many steps is right.

Folded("The library's kernels", Kernels(fusebook.adamw_step))

# %%
# The random bits come from a counter that a few multiplications have mixed:
# nothing is stored, and the same seed and step give the same bits.
#
# What the hardware counts
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# The bytes from memory, the :term:`sectors <sector>` that a load of a
# :term:`warp` asks for and the :term:`occupancy`, by the counters of the GPU
# (see :doc:`plot_101_elementwise`), for two tensors of 16 million numbers.
# Sectors and occupancy are of the kernel that reads most. A load of 4 bytes a
# thread asks for 4 sectors, one of 16 bytes for 16, and one of a number in a
# table for one, which lowers the average. What is still in the L2 cache when a
# kernel ends is not counted as written.


# site: fold
def to_count():
    lists = model([2**24] * 2)
    put = tables_of(lists)
    return {
        "the loop": lambda: fusebook.adamw_step_eager(*lists, *rest),
        "step one": lambda: step_one(*lists, 1, 1e-3),
        "step two": lambda: step_two(*lists, 1, 1e-3, put),
        "the library": lambda: fusebook.adamw_step(*lists, step=1, lr=1e-3),
    }


seen = counters("adamw_counters", to_count)
traffic = by_step(seen, 4.0 * 2**25, "in parameters")
table(
    traffic,
    "A step of 33 million parameters: one is the bytes of the parameters",
    fold=False,
)

# %%
reads, sectors = traffic["read, in parameters"], traffic["sectors a load"]
claims(
    claim(
        "Both steps and the library read parameters, gradients and two "
        "averages once, to 2 %; the loop reads {loop:.1f} times the "
        "parameters.",
        (reads.drop("the loop", errors="ignore") / 4 - 1).abs() < 0.02,
        of=reads,
        fatal=False,
        loop=reads.get("the loop"),
    ),
    claim(
        "A load of step two asks on average for {two:.1f} sectors, one of the "
        "library's kernel for at least twice as many, {ours:.1f}.",
        sectors.filter(items=["the library"]).div(2)
        >= sectors.get("step two", 0.0),
        of=sectors,
        fatal=False,
        two=sectors.get("step two"),
        ours=sectors.get("the library"),
    ),
) if len(traffic) else None

# %%
# Is it right?
# ------------
#
# The lists are compared with the formula in float64: parameters and averages,
# and the worst of the three counts. All ways get copies of the same state.

inputs = ADAMW_STEP.make(
    generator(0),
    torch.float32,
    numbers=3000,
    tensors=5,
    sizes="uneven",
    kind="plain",
)
yard = yardstick(ADAMW_STEP, inputs)
prepare = ADAMW_STEP.variants["fusebook"].prepare


def verdict_of(step):
    ps, gs, ms, vs, _, _, t, lr = prepare(*inputs)
    step(ps, gs, ms, vs, t, lr)
    return yard.judge((*ps, *ms, *vs))


def ours(ps, gs, ms, vs, t, lr, **options):
    options = {"weight_decay": 0.1} | options
    fusebook.adamw_step(ps, gs, ms, vs, step=t, lr=lr, **options)


def as_a_penalty(ps, gs, ms, vs, t, lr):
    """Adam with a penalty on squares: the decay goes into the averages."""
    gs = [g + 0.1 * p for p, g in zip(ps, gs, strict=True)]
    ours(ps, gs, ms, vs, t, lr, weight_decay=0.0)


def by_teaching(step):
    def run(ps, gs, ms, vs, t, lr):
        for p in ps:
            p.mul_((1 - lr * 0.1) / (1 - lr * 0.01))  # the card's decay
        step(ps, gs, ms, vs, t, lr)

    return run


ways = {
    "fusebook": ours,
    "step one": by_teaching(step_one),
    "step two": by_teaching(step_two),
    "one step too late": lambda ps, gs, ms, vs, t, lr: ours(
        ps, gs, ms, vs, t + 1, lr
    ),
    "decay as a penalty": as_a_penalty,
    "no decay": functools.partial(ours, weight_decay=0.0),
}
verdicts = {name: verdict_of(step) for name, step in ways.items()}
scores = pd.DataFrame(
    {
        name: {"error": v.error, "tolerance": v.tolerance, "right": v.ok}
        for name, v in verdicts.items()
    }
).T
table(scores, "One step of five tensors", fold=False)

# %%
claims(
    claim(
        "The library's step is right, and so are steps one and two.",
        scores["right"][:3].astype(bool),
    ),
    claim("The three mistakes are caught.", ~scores["right"][3:].astype(bool)),
)

# %%
# Too small for bfloat16
# ~~~~~~~~~~~~~~~~~~~~~~
#
# A thousand parameters of 1 and a gradient that is always 1: every step is the
# learning rate. Forty steps of 0.0005 should lead to 0.98.


def walked(dtype, **options):
    at = {"device": where}
    ps = [torch.ones(1000, dtype=dtype, **at)]
    state = [[torch.zeros(1000, **at)] for _ in range(2)]
    if options.pop("exact", False):
        options["masters"] = [torch.ones(1000, **at)]
    for t in range(1, 41):
        gs = [torch.ones_like(ps[0])]
        numbers = {"step": t, "lr": 5e-4, "weight_decay": 0.0}
        fusebook.adamw_step(ps, gs, *state, **numbers, **options)
    return ps[0].double()


def walks():
    ways = {
        "float32": walked(torch.float32),
        "bfloat16, rounded to nearest": walked(torch.bfloat16),
        "bfloat16, rounded by chance": walked(torch.bfloat16, seed=1),
        "bfloat16, with a float32 master": walked(torch.bfloat16, exact=True),
    }
    rows = [(k, p.mean().item(), p.unique().numel()) for k, p in ways.items()]
    return pd.DataFrame(rows, columns=["way", "mean", "different values"])


walk = measured("adamw_walk", walks, by_device=True).set_index("way")
table(walk, "Where forty steps of 0.0005 lead from 1", fold=False)

# %%
mean = walk["mean"]
claims(
    claim(
        "Rounded to nearest, no step is ever taken.",
        mean["bfloat16, rounded to nearest"] == 1,
    ),
    claim(
        "Rounded by chance, the mean of a thousand parameters is right within "
        "a tenth of the way.",
        abs(mean["bfloat16, rounded by chance"] - 0.98) < 0.002,
    ),
    claim(
        "With a master the parameter is the nearest bfloat16.",
        abs(mean["bfloat16, with a float32 master"] - 0.98) < 0.002,
    ),
)

# %%
# Bad input
# ~~~~~~~~~
#
# A parameter without a gradient is left as it is, as ``torch.optim`` leaves
# it. What would be a race, or a step of something else, is refused.

ps, gs, ms, vs = model([8, 9])
before = ps[0].clone()
fusebook.adamw_step(ps, [None, gs[1]], ms, vs, step=1)
said = []
for wrong in (
    ([ps[0], ps[0]], [gs[0], gs[0]], [ms[0], ms[0]], [vs[0], vs[0]]),
    (ps, [gs[0], ps[1]], ms, vs),
    (ps, gs, ms[:1], vs),
    (ps, gs, [m.double() for m in ms], vs),
):
    try:
        fusebook.adamw_step(*wrong, step=1)
    except (TypeError, ValueError) as error:
        said.append(str(error))
claims(
    claim(
        "A parameter without a gradient does not move.",
        torch.equal(ps[0], before),
    ),
    *(say("{sentence}", sentence=sentence) for sentence in said),
    claim("Each of four mistakes is refused with a sentence.", len(said) == 4),
)

# %%
# How fast?
# ---------
#
# A list has ten million numbers, in one tensor, in a hundred or in a thousand;
# the table is of a thousand. *Host* is what Python does to queue a step,
# *cold* what the device needs for it. Where a step is more launches than the
# device's queue can hold, the host waits in its midst: such a step has no cold
# time, and often none of the host. The loop is the chain further up;
# ``foreach``, ``fused=True`` and ``torch.compile`` are torch's own function
# for lists, ``torch.optim.adamw.adamw``, without the class around it.

small = asked.results()
table(
    tables.clocks(tables.where(small, tensors=1000)),
    "Ten million numbers in 1000 tensors, in microseconds by each clock",
    fold=False,
)

# %%
provenance(small)

# %%
downloads(small, "adamw_step")

# %%
# Where the host's time goes
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# One launch takes as long as another, whatever is in the table. What is left
# grows with the list: checking that the table is still true. A tensor's memory
# may be exchanged between two steps, and gradients usually are. So each call
# collects all addresses and compares them with the table's. Torch's own guards
# compare the shapes, strides and dtypes of all tensors with those of the last
# step. The address alone is not enough: ``p.data = p.data[:5]`` keeps it.
# Each of these is one call of C for a whole list, and no loop of Python.
# Only gradients that moved are written into the table anew. The gradient of a
# list of one tensor is an argument of the launch instead. A step that is
# captured in a graph reads the same tables. A replay copies only those
# addresses of gradients that the table did not have at the capture.
#
# ``Optimizer.step`` is what a training loop calls. It does all that the
# function does, and looks up the state of each parameter before.


def seconds(function, repeat=15):
    """The host's time to queue a call: the median of some."""
    times = []
    for _ in range(repeat + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times[3:])


def host_times():
    rows = []
    for n in (1, 100, 1000):
        ps, gs, ms, vs = model([10**7 // n] * n)
        lists = (ps, gs, ms, vs)
        step = functools.partial(fusebook.adamw_step, step=7)
        others = [[g.clone() for g in gs], gs]

        def moved(step=step, ps=ps, ms=ms, vs=vs, others=others):
            others.reverse()
            step(ps, others[0], ms, vs)

        everything = [*ps, *ms, *vs, *gs]
        counts = [torch.ones((), device=p.device) for p in ps]
        fused = functools.partial(
            adamw, *lists, [], counts, lr=1e-3, beta1=0.9, beta2=0.999,
            eps=1e-8, weight_decay=0.01, amsgrad=False, maximize=False,
            fused=True, foreach=False,
        )  # fmt: skip
        calls = {
            "adamw_step": functools.partial(step, *lists),
            "adamw_step, gradients moved": moved,
            "all addresses": lambda a=everything: [t.data_ptr() for t in a],
            "adamw(fused=True)": torch.no_grad()(fused),
        }
        for way in ("foreach", "fused"):
            own = [torch.nn.Parameter(p.clone()) for p in ps]
            for p, g in zip(own, gs, strict=True):
                p.grad = g
            optimizer = torch.optim.AdamW(own, **{way: True})
            calls[f"torch.optim.AdamW({way}=True).step"] = optimizer.step
        for name, call in calls.items():
            rows.append((n, name, 1e6 * seconds(call)))
    return pd.DataFrame(rows, columns=["tensors", "call", "host us"])


host = measured("adamw_host", host_times)
calls = host.pivot_table(
    index="call", columns="tensors", values="host us", sort=False
)
table(calls, "Microseconds of the host for one step, by tensors", fold=False)

# %%
plots.lines(
    calls.T,
    title="What a step costs the host: ten million numbers in all",
    ylabel="microseconds",
    source=host,
    clock="the host's clock",
    logy=True,
)

# %%
in_place, renewed, by_class = (
    calls.loc[name]
    for name in (
        "adamw_step",
        "adamw_step, gradients moved",
        "torch.optim.AdamW(fused=True).step",
    )
)
claims(
    claim(
        "A step costs the host less than Optimizer.step of the fused way does "
        "where no gradient has moved, in 1, 100 and 1000 tensors: {least:.2f} "
        "to {most:.2f} times its time.",
        in_place < by_class,
        least=(in_place / by_class).min(),
        most=(in_place / by_class).max(),
    ),
    claim(
        "Where all gradients have moved, a step costs the host less than "
        "Optimizer.step, too: {least:.2f} to {most:.2f} times its time.",
        renewed < by_class,
        least=(renewed / by_class).min(),
        most=(renewed / by_class).max(),
        fatal=False,
    ),
    target(
        "A step of 1000 tensors costs the host {us:.0f} microseconds; the "
        "target was 1000.",
        in_place[1000] <= 1000,
        us=in_place[1000],
    ),
)

# %%
# Larger models
# ~~~~~~~~~~~~~
#
# The first table below is of a step of 16 GB of state and gradients, a
# thousand tensors of a million numbers, beside a copy of as many bytes;
# samples of every tensor are compared with float64. The second table has each
# step of this page for ten million numbers in a thousand tensors. The next
# section has a hundred million numbers: in a thousand float32 tensors, the
# largest a thousand times the smallest, and in a hundred bfloat16 ones,
# *plain*, with *masters*, rounded by *chance*, or with *amsgrad*, which also
# keeps the largest v. These are compared with ``fused=True`` alone, since the
# others take long to measure. (A step of a thousand tensors stands in several
# tables. Each is a run of its own, and the host is not always equally fast:
# compare the ways of one table.)


def billion():
    ps, gs, ms, vs = model([10**6] * 1000)
    at = slice(None, None, 9973)
    first = [
        torch.stack([t[at] for t in ts]).double() for ts in (ps, gs, ms, vs)
    ]
    fusebook.adamw_step(ps, gs, ms, vs, step=1, lr=1e-3)
    p, g, m, v = first
    fusebook.adamw_step_eager([p], [g], [m], [v], 1, 1e-3, *rest[2:])
    got = torch.stack([t[at] for t in ps]).double()
    score = ((got - p).abs() / (p.abs() + p.square().mean().sqrt())).max()
    x = torch.empty(28 * 10**9 // 8, device="cuda").normal_()
    y = torch.empty_like(x)
    steps = [torch.ones((), device="cuda") for _ in ps]
    scalars = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    fused = functools.partial(
        adamw, ps, gs, ms, vs, [], steps, **scalars,
        weight_decay=0.01, amsgrad=False, maximize=False, fused=True,
        foreach=False,
    )  # fmt: skip
    ways = {
        "a copy of the same bytes": lambda: y.copy_(x),
        "fusebook": lambda: fusebook.adamw_step(ps, gs, ms, vs, step=2),
        "fused=True": fused,
    }
    with torch.no_grad():
        times = timing.measure(
            ways, kinds=("cold", "host", "call"), warmup=2, repeat=10
        )
    rows = []
    for name, kinds in times.items():
        # A step that fills the device's queue has no cold time.
        clock = "cold" if kinds["cold"] else "call"
        queued = 1e6 * kinds["host"].q50 if kinds["host"] else None
        rows.append((name, 1e6 * kinds[clock].q50, clock, queued))
    frame = pd.DataFrame(rows, columns=["way", "us", "clock", "host us"])
    return frame.assign(error=score.item())


def staircase():
    lists = model([10**4] * 1000)
    kept = tables_of(lists)
    ways = {
        "a loop of operations": lambda: fusebook.adamw_step_eager(
            *lists, *rest
        ),
        "step one, a launch a tensor": lambda: step_one(*lists, 7, 1e-3),
        "step two, a table, built anew": lambda: step_two(*lists, 7, 1e-3),
        "step two, a table, kept": lambda: step_two(*lists, 7, 1e-3, kept),
        "fusebook": lambda: fusebook.adamw_step(*lists, step=7),
    }
    rows = []
    for name, call in ways.items():
        with compiled.kernels() as kernels:
            call()
        most = max((kernel.n_regs for kernel in kernels), default=None)
        cold = timing.cold({name: call}, warmup=2, repeat=10)[name]
        device = None if cold is None else 1e6 * cold.q50
        rows.append((name, 1e6 * seconds(call), device, most))
    columns = ["way", "host us", "device us", "registers a thread"]
    return pd.DataFrame(rows, columns=columns)


ask = functools.partial(asked.results, variants=["fused=True", "fusebook"])
large = ask(config="uneven", dtype="float32")
sixteen = ask(config="kinds", dtype="bfloat16")


def larger():
    """What this page alone measures, or None while it is not recorded."""
    try:
        return (
            measured("adamw_billion", billion),
            measured("adamw_steps", staircase),
        )
    except NoResults:
        return None


more = larger()
claims(
    say(
        "The times of a thousand million numbers and of this page's steps "
        "are not recorded yet: `nox -s record -- adamw` records them."
    )
) if more is None else None

# %%
if more:
    billion_times, stairs = more
    big = billion_times.set_index("way")
    stair = stairs.set_index("way")
    on = stairs.attrs["origin"].machine
    copied = big["clock"]["a copy of the same bytes"]
    same_clock = big["clock"]["fusebook"] == copied
    share = big["us"]["a copy of the same bytes"] / big["us"]["fusebook"]
table(
    big[["us", "clock", "host us"]],
    "1e9 float32 parameters in 1000 tensors",
    fold=False,
) if more else None

# %%
claims(
    target(
        "A step of 1e9 float32 parameters in 1000 tensors runs at 96 % of the "
        "rate of a copy of the same bytes, or more: {share:.1%}.",
        share >= 0.96 if same_clock else None,
        share=share,
    ),
    claim(
        "The samples agree with float64.",
        big["error"].iloc[0] <= 64 * torch.finfo(torch.float32).eps,
    ),
) if more else None

# %%
by_a_table = (whole_list, stepped, chunks_of, tables_of, step_two)
of_step = {
    "a loop of operations": (fusebook.adamw_step_eager,),
    "step one, a launch a tensor": (one_tensor, stepped, step_one),
    "step two, a table, built anew": by_a_table,
    "step two, a table, kept": by_a_table,
}
by_lines = pd.Series({at: lines_of(*of) for at, of in of_step.items()})
by_lines["fusebook"] = lines_behind(fusebook.adamw_step_eager)
ten_million = {**point, "numbers": 10**7}
roof = on.memory_seconds(ADAMW_STEP.cost(4, **ten_million)) if more else None
table(
    pd.concat(
        [stair, pd.DataFrame({"device us": {"the roof": 1e6 * roof}})]
    ).assign(**{"lines of code": by_lines}),
    "Each step of this page: ten million numbers in 1000 tensors",
) if more else None

# %%
provenance(host, *(more or ()))

# %%
# How far from the roof?
# ----------------------
#
# The roof is one pass: 16 bytes of each parameter read and 12 written. Ten
# million numbers of four lists do not fit into the L2 cache.

table(
    tables.shares(small),
    "Ten million float32 numbers, against the roof of one pass",
    fold=False,
)

# %%
of_roof = tables.share(
    pd.concat([small, large, sixteen]), "fusebook", of="roof"
)
claims(
    claim(
        "A step reaches 90 % of the roof of one pass, or more, at every list "
        "here, of float32 and of bfloat16: {least:.1%} to {most:.1%}.",
        of_roof >= 0.90,
        headline=True,
        least=of_roof.min(),
        most=of_roof.max(),
    ),
)

# %%
table(
    tables.shares(large),
    "A hundred million float32 numbers in tensors of a thousand sizes, "
    "against the roof of one pass",
    fold=False,
)

# %%
table(
    tables.shares(sixteen),
    "bfloat16 parameters, against the roof of each kind",
    fold=False,
)

# %%
provenance(large, sixteen)

# %%
# Lessons
# -------

both = tables.together(small, large)
every = pd.concat([both, sixteen])
gain = tables.ratio(tables.where(small, tensors=1), "loop", "fusebook").iloc[0]
claims(
    say(
        "Predicted from bytes {predicted:.2f} times as fast as the loop, "
        "measured {gain:.2f} for ten million numbers in one tensor.",
        predicted=predicted,
        gain=gain,
    ),
    claim(
        "The loop's time over ours is as predicted, within a quarter.",
        abs(gain / predicted - 1) < 0.25,
        fatal=False,
    ),
    say(
        "A step of 1000 tensors costs the host {ours:.0f} us, "
        "Optimizer.step of the fused way {step:.0f} us.",
        ours=in_place[1000],
        step=by_class[1000],
    ),
    claim(
        "Two runs give the same bits in every case that is recorded.",
        tables.where(every, variant="fusebook")["deterministic"] == "yes",
    ),
)

# %%
# Where it does not win
# ~~~~~~~~~~~~~~~~~~~~~
#
# Every point at which another way is faster by more than 2 %, by the device's
# clock:

table(
    tables.losses(both),
    "Where another way is faster, cold: the fastest, and how far behind",
    fold=False,
)

# %%
# And replayed many times in a CUDA graph, where the cache is warm:

table(
    tables.losses(both, kind="warm"),
    "Where another way is faster, warm",
    fold=False,
)

# %%
# The state of these steps does not fit into the cache, so a replayed step
# should take as long as a cold one. It would take longer where the graph also
# copies the addresses of gradients, because the device's table has others. A
# step whose gradients lie where they lay in the step before is captured
# without that copy.

mine = tables.where(small, variant="fusebook").set_index("tensors")
replayed = mine["gpu_warm_us"] / mine["gpu_us"]
claims(
    claim(
        "Replayed, our step of ten million numbers takes at most 1.05 times "
        "as long as cold: it takes {least:.2f} to {most:.2f} times.",
        replayed <= 1.05,
        fatal=False,
        least=replayed.min(),
        most=replayed.max(),
    ),
)

# %%
# In a loop
# ~~~~~~~~~
#
# A training loop does not wait for each step. The device works while the host
# queues what comes next, and the program pays the larger of the two times.

callers = tables.alike(both)
by_clock(callers)

# %%
table(
    tables.losses(callers, kind="paid"),
    "Where another way is faster for an eager program",
)

# %%
# What to take to the next kernel:
#
# - A list is no reason for a loop. Addresses are numbers, and a kernel can
#   read them.
# - What is known once is put on the device once. What may change is compared
#   in each step, and the host pays for that.
# - Say what is aligned. A kernel that gets its addresses from a table has to
#   be told.
# - Where the device keeps a count, the last program of a kernel updates it.
# - Small steps need digits: of a master, or of chance.
#
# Exercises
# ---------
#
# Each has a function that is wrong, and a check that says so. Mend it; run the
# page, or the notebook, again. No GPU is needed.
#
# 1. Decoupled
# ~~~~~~~~~~~~
#
# This step adds the decay to the gradient, as Adam did before AdamW. Then the
# averages know of it. Decouple it.


def decoupled(p, g, m, v, t, lr, decay):
    g = g + decay * p
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    root = (v / (1 - 0.999**t)).sqrt() + 1e-8
    return p - lr / (1 - 0.9**t) * m / root, m, v


def by_torch(p, g, m, v, t, lr, decay):
    own = [x.clone() for x in (p, g, m, v)]
    fusebook.adamw_step_eager(
        *([x] for x in own), t, lr, 0.9, 0.999, 1e-8, decay
    )
    return own[0], own[2], own[3]


def state(seed, n):
    return tuple(ts[0] for ts in model([n], seed))


exercise(
    "decoupled steps as AdamW does",
    decoupled,
    by_torch,
    [(*state(1, 50), 3, 0.1, 0.1), (*state(2, 9), 1, 0.01, 0.5)],
)

# %%
# 2. A list with gaps
# ~~~~~~~~~~~~~~~~~~~
#
# Which chunks are there? A tensor's last one may be ragged, and a tensor may
# have none. Give pairs of tensor and chunk, as rows.


def pairs(sizes, block):
    rows = [(i, c) for i, n in enumerate(sizes) for c in range(n // block)]
    return torch.tensor(rows).view(-1, 2)


def right_pairs(sizes, block):
    chunks = torch.tensor(chunks_of(sizes, block))
    return torch.stack([chunks >> 32, chunks & 0xFFFFFFFF], 1)


exercise(
    "pairs covers every number once",
    pairs,
    right_pairs,
    [([5, 0, 8, 1], 4), ([16], 4), ([3, 3], 8)],
)

# %%
# 3. Clipping
# ~~~~~~~~~~~
#
# Gradients whose norm is above a limit are multiplied by limit / norm. The
# norm was left on the device by another kernel: a float would wait for it.
# Load it in ``one_tensor``, and multiply. This attempt knows nothing of it.


def clipped(p, g, m, v, norm, most, t, lr):
    own = [x.clone() for x in (p, g, m, v)]
    step_one(*([x] for x in own), t, lr)
    return own[0]


def clipped_by_torch(p, g, m, v, norm, most, t, lr):
    g = g * (most / norm).clamp(max=1)
    return by_torch(p, g, m, v, t, lr, 0.01)[0]


def clipping(seed, n, norm):
    norm = torch.tensor([norm], device=where)
    return *state(seed, n), norm, 1.0, 3, 0.1


exercise(
    "clipped scales gradients that are too long, and no others",
    clipped,
    clipped_by_torch,
    [clipping(3, 50, 4.0), clipping(4, 2000, 0.5)],
)

# %%
solution("solutions/plot_304_adamw.py")
