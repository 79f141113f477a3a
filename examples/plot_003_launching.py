# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Launching: where the microseconds go
====================================

A small kernel is over before Python has launched the next one. What such a
program waits for is the host: Python that looks at its arguments, PyTorch that
allocates, Triton that finds the compiled kernel, the driver that queues it.
This page measures each of these, and builds what the kernels of this book
launch with: a **plan cache**, in some thirty lines, and eleven traps that such
a cache must not step into.

With a CUDA GPU everything is measured as the page runs. Without one, it is
replayed from the record of a GPU that is named at the end, and the cache is
checked in Triton's interpreter.

For whom: those whose GPU waits for Python: small kernels, few tokens, many
calls.

Read before: 002.
"""

# %%
# One operation, a dozen ways to call it
# --------------------------------------
#
# The work is the same in each: the exponential of 4096 numbers, which the
# device finishes in a time that nobody would notice. The *host* clock counts
# what Python and the driver do to queue one call among many; *warm* is what
# the device needs, from a :term:`CUDA graph`.

# sphinx_gallery_tags = ["launching", "plan cache", "custom operator"]
import copy
import functools
import threading
import time

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook.measure import timing
from fusebook.measure.inputs import generator
from fusebook.page import (
    NoResults,
    claim,
    claims,
    downloads,
    exercise,
    measured,
    provenance,
    say,
    solution,
    table,
)

import pandas as pd
import torch
import triton
import triton.language as tl


@triton.jit
def exponential(y_ptr, x_ptr, SIZE, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < SIZE).to(tl.float32)
    tl.store(y_ptr + i, tl.exp(x), mask=i < SIZE)


def by_brackets(x):
    """What every tutorial shows: allocate, and launch with brackets."""
    y = torch.empty_like(x)
    SIZE = x.numel()
    exponential[(triton.cdiv(SIZE, 1024),)](y, x, SIZE, BLOCK=1024)
    return y


# %%
# ``torch.library.custom_op`` makes such a function an operator that
# ``torch.compile`` leaves whole. It guards against operators that return or
# change their inputs, on every call. ``torch.library.Library`` registers the
# same function with PyTorch's dispatcher, and trusts it.

as_custom_op = torch.library.custom_op(
    "launching::custom",
    by_brackets,
    mutates_args=(),
    schema="(Tensor x) -> Tensor",
)
as_custom_op.register_fake(torch.empty_like)

library = torch.library.Library("launching", "FRAGMENT")
library.define("plain(Tensor x) -> Tensor")
for device in ("CPU", "CUDA"):
    library.impl("plain", by_brackets, device)

# %%
# A plan cache in thirty lines
# ----------------------------
#
# ``kernel[grid](...)`` asks the same questions at every call: what dtype is
# each tensor, which sizes are multiples of 16, which compiled kernel belongs
# to these, how many warps does it have. The answers depend on what can be seen
# of the arguments without reading their values. Use that as the key of a
# dictionary, and nothing has to be asked twice:


def key_of(x):
    """All that a launch depends on, besides where the numbers stand."""
    return (
        x.shape,
        x.stride(),
        x.dtype,
        x.get_device(),
        x.data_ptr() % 16,  # Triton compiles for aligned addresses
        x.is_neg(),  # a view that negates: its memory holds other numbers
    )


# %%
# What is kept is a function that launches: the compiled kernel's own ``run``,
# with everything filled in but the addresses and the stream. The stream is
# asked for at every call, since a captured graph and a ``with`` block change
# it. In the interpreter we call ``kernel[grid]``.


def plan_of(x):
    """Launch once in the usual way, and keep what that found out."""
    SIZE, grid = x.numel(), (triton.cdiv(x.numel(), 1024), 1, 1)
    if not x.is_cuda:
        return lambda y, x: exponential[grid](y, x, SIZE, BLOCK=1024)
    compiled = exponential[grid](torch.empty_like(x), x, SIZE, BLOCK=1024)
    run, kernel = compiled.run, compiled.function
    options, device = compiled.packed_metadata, x.get_device()
    # Its address. torch.cuda.current_stream() makes an object around it first.
    current_stream = torch._C._cuda_getCurrentRawStream

    def launch(y, x):
        stream = current_stream(device)
        # No metadata for hooks, and no hook before or after the launch.
        before = (stream, kernel, options, None, None, None)
        run(*grid, *before, y.data_ptr(), x.data_ptr(), SIZE, 1024)

    return launch


plans = {}


def planned(x):
    """The exponential of a dense tensor; the second call is the cheap one."""
    key = key_of(x)
    launch = plans.get(key)
    if launch is None:
        if x.is_neg() or not x.is_contiguous():
            x = x.resolve_neg().contiguous()
            return planned(x)
        if len(plans) > 1000:  # bounded: shapes may never come again
            plans.clear()
        launch = plans[key] = plan_of(x)
    y = torch.empty_like(x)
    launch(y, x)
    return y


# %%
# The library does the same for any number of tensors, allocations and
# launches: the first call is recorded, and a loop replays the record. It saves
# one thing more. Triton's launcher is a Python object around a function in C;
# a replay calls that function itself.
#
# A gradient takes more. An operator of PyTorch finds its gradient through the
# dispatcher; called directly, ``torch.autograd.Function`` records it.


class Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = planned(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return dy * y


# %%
# Traps
# -----
#
# A cache that forgets one thing is right until that thing changes. Each line
# changes one thing after a first call, and compares with PyTorch.


def same(x, result=None):
    got = planned(x) if result is None else result
    return bool(torch.allclose(got, torch.exp(x), rtol=1e-5))


def traps(device):
    memory = torch.randn(64 * 33 + 1, device=device)
    x = memory[:-1].view(64, 33)
    planned(x)
    rows = [
        ("the same again", same(x)),
        ("other numbers in the same memory", same(x.copy_(x.flip(0)))),
        ("another address", same(x.clone())),
        ("another shape", same(x[:5])),
        ("an address that 16 does not divide", same(memory[1:].view(64, 33))),
        ("another dtype", same(x.double())),
        ("transposed", same(x.mT)),
        ("every second column", same(x[:, ::2])),
        ("a view that negates", same(torch.complex(x, x).conj().imag)),
    ]
    reused = []
    for i in range(50):  # freed at once, and handed out again
        y = torch.full((64, 33), i / 50, device=device)
        reused.append(same(y))
    rows.append(("memory that was freed and handed out again", all(reused)))
    leaf = x.clone().requires_grad_()
    Differentiable.apply(leaf).sum().backward()
    rows.append(("a gradient", same(x, leaf.grad)))
    if device == "cuda":  # the interpreter knows no streams, and one thread
        found = []
        threads = [
            threading.Thread(target=lambda n=n: found.append(same(x[:n])))
            for n in (3, 4, 3, 4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows.append(("four threads", found == [True] * 4))
        side, late = torch.cuda.Stream(), torch.zeros_like(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # the side stream is late
            late.copy_(x)
            result = planned(late)
        side.synchronize()
        rows.append(("another stream", same(x, result)))
        graph, still = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            result = planned(still)
        still.copy_(x + 1)
        graph.replay()
        rows.append(("a captured graph", same(x + 1, result)))
    return pd.DataFrame(
        [(what, "yes" if right else "no") for what, right in rows],
        columns=["after a first call", "right"],
    )


trapped = traps(generator(0).device.type)
table(trapped, "The plan cache where things change", fold=False)

# %%
claims(
    claim(
        "With the whole key the cache gives the right result in every line.",
        trapped["right"] == "yes",
    ),
)

# %%
# What a call costs
# -----------------
#
# ``torch.compile`` turns a function into generated code. Before that code
# stand checks of all that was traced; in it, each kernel is a launch, the
# compiler's or another's. To see what one more kernel costs there, we start
# from a compiled ``2 x + 1``, which is one kernel, and add one of three: a
# second kernel of the compiler's own; ``airy_ai``, an operator of PyTorch that
# the compiler does not fuse and calls as it is; or our operator.
# (``torch.exp`` alone is no measure: a function of C is wrapped in one of
# Python before it is compiled.)
#
# ``mode="reduce-overhead"`` has the compiler capture what it made in a CUDA
# graph and replay that. The checks remain, and so does a copy of the input
# into the graph's own memory.


def ways_to_call():
    x = torch.randn(4096, device="cuda")
    out = torch.empty_like(x)
    leaf = x.clone().requires_grad_()
    functions = {
        "": torch.exp,
        ", fusebook.exp": lambda x: fusebook.exp(x),
        ", 2 x + 1": lambda x: 2 * x + 1,
        ", two kernels of its own": lambda x: (2 * x + 1, x[:1000].exp()),
        ", airy_ai(2 x + 1)": lambda x: torch.special.airy_ai(2 * x + 1),
        ", fusebook.exp(2 x + 1)": lambda x: fusebook.exp(2 * x + 1),
        ", fusebook.exp twice": lambda x: fusebook.exp(
            fusebook.exp(2 * x + 1)
        ),
    }
    compiled = {
        f"torch.compile{what}": functools.partial(torch.compile(function), x)
        for what, function in functions.items()
    }
    by_mode = {
        f"reduce-overhead{what}": functools.partial(
            torch.compile(functions[what], mode="reduce-overhead"), x
        )
        for what in (", 2 x + 1", ", fusebook.exp(2 x + 1)")
    }
    for call in [*compiled.values(), *by_mode.values()]:
        for _ in range(3):  # a graph is captured by the second call
            call()
    graph = torch.cuda.CUDAGraph()
    by_brackets(x)
    with torch.cuda.graph(graph):
        for _ in range(100):
            by_brackets(x)
    grid = (4,)
    ways = {
        "torch.exp": lambda: torch.exp(x),
        "kernel[grid], old memory": lambda: exponential[grid](
            out, x, 4096, BLOCK=1024
        ),
        "kernel[grid]": lambda: by_brackets(x),
        "custom_op": lambda: as_custom_op(x),
        "Library.impl": lambda: torch.ops.launching.plain(x),
        **compiled,
        "this page's plan": lambda: planned(x),
        "fusebook.exp": lambda: fusebook.exp(x),
        "torch.exp, gradient recorded": lambda: torch.exp(leaf),
        "this page's plan, gradient recorded": lambda: Differentiable.apply(
            leaf
        ),
        "fusebook.exp, gradient recorded": lambda: fusebook.exp(leaf),
    }
    times = timing.measure(ways, kinds=("host", "warm"))
    rows = []
    for name, kinds in times.items():
        kinds = {k: q.q50 * 1e6 for k, q in kinds.items() if q is not None}
        rows.append({"way": name, **{f"{k} us": v for k, v in kinds.items()}})
    for name, q in timing.host(by_mode).items():
        rows.append({"way": name, "host us": q.q50 * 1e6})
    replay = timing.host({"graph": graph.replay})["graph"]
    rows.append({"way": "CUDA graph of 100", "host us": replay.q50 * 1e4})
    return pd.DataFrame(rows)


ways = measured("launching_ways", ways_to_call)
table(ways, "The exponential of 4096 numbers, in microseconds a call")

# %%
each = ways.set_index("way")["host us"]
warm = ways.set_index("way")["warm us"]
eager, graph = each["torch.exp"], each["CUDA graph of 100"]
brackets, plan = each["kernel[grid]"], each["this page's plan"]

compiled = []
if "torch.compile, airy_ai(2 x + 1)" in each:
    added = each - each["torch.compile, 2 x + 1"]
    own = added["torch.compile, two kernels of its own"]
    called = added["torch.compile, airy_ai(2 x + 1)"]
    ours = added["torch.compile, fusebook.exp(2 x + 1)"]
    twice = added["torch.compile, fusebook.exp twice"]
    compiled = [
        say(
            "To a compiled call a second kernel of the compiler's own adds "
            "{own:.1f} us, an operator of PyTorch that it calls {called:.1f} "
            "us, ours {ours:.1f} us, and ours once more {more:.1f} us.",
            own=own,
            called=called,
            ours=ours,
            more=twice - ours,
        ),
        claim(
            "Inside torch.compile our operator adds at most {most} us more "
            "than a second kernel of the compiler's own: {over:.1f} us more, "
            "which is {part:.0%} of what that kernel adds.",
            ours - own <= 5,
            most=5,
            over=ours - own,
            part=ours / own - 1,
        ),
    ]
replayed = "reduce-overhead, fusebook.exp(2 x + 1)"
if replayed in each:
    compiled.append(
        say(
            'With mode="reduce-overhead" the compiled call of ours takes '
            "{ours:.1f} us of the host's time in place of {before:.1f}, and "
            "2 x + 1 alone {alone:.1f} in place of {plain:.1f}.",
            ours=each[replayed],
            before=each["torch.compile, fusebook.exp(2 x + 1)"],
            alone=each["reduce-overhead, 2 x + 1"],
            plain=each["torch.compile, 2 x + 1"],
        )
    )
claims(
    claim(
        "A small kernel costs its launch. For 4096 numbers the device needs "
        "{device:.1f} us; the host needs {brackets:.0f} us to launch it by "
        "`kernel[grid](...)`, {plan:.0f} us by this page's plan cache, "
        "{eager:.0f} us in torch, and {graph:.2f} us in a CUDA graph.",
        each.drop("CUDA graph of 100") > warm["torch.exp"],
        of=each,
        headline=True,
        device=warm["kernel[grid]"],
        brackets=brackets,
        plan=plan,
        eager=eager,
        graph=each["CUDA graph of 100"],
    ),
    claim(
        "A call by this page's plan cache takes less than three quarters of "
        "the host's time of `kernel[grid](...)`.",
        plan < 0.75 * brackets,
    ),
    claim(
        "A call of the library takes at most twice the host's time of "
        "torch.exp: {ours:.1f} and {eager:.1f} us.",
        each["fusebook.exp"] <= 2 * eager,
        ours=each["fusebook.exp"],
        eager=eager,
    ),
    *compiled,
    claim(
        "Registered by torch.library.custom_op, `kernel[grid](...)` takes "
        "{custom:.1f} us more, by Library.impl {plain:.1f}: the former adds "
        "more than twice as much.",
        each["custom_op"] - brackets > 2 * (each["Library.impl"] - brackets),
        custom=each["custom_op"] - brackets,
        plain=each["Library.impl"] - brackets,
    ),
    claim(
        "A call of the library that records a gradient takes less of the "
        "host's time than `kernel[grid](...)`, which records none: "
        "{ours:.1f} and {brackets:.1f} us.",
        each["fusebook.exp, gradient recorded"] < brackets,
        ours=each["fusebook.exp, gradient recorded"],
        brackets=brackets,
    ),
    say(
        "In a graph a call costs the host {graph:.2f} us: whoever runs the "
        "same shapes again and again should capture them.",
        graph=graph,
    ),
)

# %%
dearest = ways.dropna(subset=["host us"]).sort_values("host us")
ax = dearest.plot.barh(x="way", y="host us", legend=False, figsize=(8, 4.6))
ax.set(
    title="Host time of one small call, by way of calling",
    xlabel="microseconds a call, host's clock",
    ylabel="",
)
ax.figure.tight_layout()
ax

# %%
# Where the rest goes
# -------------------
#
# A planned call is measured part by part, each part alone in a loop. The loop
# and the call of a Python function are in all of them, and what joins the
# parts is in none: they need not add up to the whole.


def parts_of_a_call():
    x = torch.randn(4096, device="cuda")
    y = planned(x)
    key, launch = key_of(x), plans[key_of(x)]
    compiled = exponential[(4,)](y, x, 4096, BLOCK=1024)
    run, kernel = compiled.run, compiled.function
    before = (kernel, compiled.packed_metadata, None, None, None)
    stream = torch.cuda.current_stream().cuda_stream
    to, at = y.data_ptr(), x.data_ptr()
    guards = torch._C._dynamo.guards.TensorGuards(
        x, dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    passed = []  # what Triton's launcher passes to the function of C
    other = copy.copy(run)
    other.launch = lambda *arguments: passed.extend(arguments)
    other(4, 1, 1, stream, *before, to, at, 4096, 1024)

    parts = {
        "nothing: the loop and a function": lambda: None,
        "the key": lambda: key_of(x),
        "the lookup": lambda: plans.get(key),
        "guards instead of both": lambda: guards.check(x),
        "torch.empty_like": lambda: torch.empty_like(x),
        "the current stream": lambda: torch._C._cuda_getCurrentRawStream(0),
        "the same, by torch.cuda": lambda: (
            torch.cuda.current_stream().cuda_stream
        ),
        "two addresses": lambda: (y.data_ptr(), x.data_ptr()),
        "Triton's launcher and the driver": lambda: run(
            4, 1, 1, stream, *before, to, at, 4096, 1024
        ),
        "the function of C in it": lambda: run.launch(*passed),
        "launch(y, x)": lambda: launch(y, x),
        "the whole call": lambda: planned(x),
        "fusebook.exp": lambda: fusebook.exp(x),
        "torch.exp": lambda: torch.exp(x),
    }
    rows = []
    for name, part in parts.items():
        best = float("inf")
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                part()
            best = min(best, (time.perf_counter() - start) / 200)
        torch.cuda.synchronize()
        rows.append({"part": name, "us": best * 1e6})
    return pd.DataFrame(rows)


parts = measured("launching_parts", parts_of_a_call)
table(parts, "Parts of a planned call, the best of nine loops", fold=False)

# %%
of = parts.set_index("part")["us"]
library = []
if "fusebook.exp" in of:
    library = [
        say(
            "The library's call takes {ours:.1f} us, torch.exp {torch:.1f} "
            "us. Instead of Triton's launcher it calls the function in C, "
            "{launch:.1f} us.",
            ours=of["fusebook.exp"],
            torch=of["torch.exp"],
            launch=of["the function of C in it"],
        )
    ]
claims(
    say(
        "Of the {whole:.1f} us of the whole call, Triton's launcher and the "
        "driver behind it take {run:.1f} us, the memory of the result "
        "{memory:.1f} us, the key and the lookup {key:.1f} us, and the "
        "current stream {stream:.1f} us{how}; each is measured alone.",
        whole=of["the whole call"],
        run=of["Triton's launcher and the driver"],
        key=of["the key"] + of["the lookup"],
        memory=of["torch.empty_like"],
        stream=of["the current stream"],
        how=""
        if "the same, by torch.cuda" in of
        else ", asked for by torch.cuda, which makes an object of it",
    ),
    *library,
    claim(
        "Making the key and looking it up takes less time than the launch "
        "that is found.",
        of["the key"] + of["the lookup"]
        < of["Triton's launcher and the driver"],
    ),
)

# %%
# What is left of the library's call is the driver, the allocator and calls of
# Python. A library that was compiled ahead of time has no
# interpreter: see :doc:`plot_501_onnxruntime`, whose operators run in a
# process without Python.
#
# What a check costs
# ------------------
#
# Some operators of the library look at their input before they compute: is
# each index in range, is each class one that exists, is each point finite?
# That is ``check=True``, the default but for losses. The answer is on the
# device, so the host waits for it, and can queue nothing meanwhile. Unless a
# page says otherwise, its times are taken with ``check=False``. Here is the
# latency of a call with either.


def calls_with_checks():
    on = {"device": "cuda"}
    rows = torch.randint(0, 32000, (2048, 1), **on)
    updates = torch.randn(2048, 4096, **on)
    logits = torch.randn(2048, 32000, dtype=torch.bfloat16, **on)
    classes = torch.randint(0, 32000, (2048,), **on)
    points, centres = (
        torch.randn(1_000_000, 16, **on),
        torch.randn(16, 16, **on),
    )
    X, w = torch.randn(400, 784, **on), torch.zeros(784, **on)
    y, b = (torch.rand(400, **on) < 0.5).float(), torch.zeros((), **on)
    functions = {
        "masked_scatter_nd_of_shape, 2048 updates": functools.partial(
            fusebook.masked_scatter_nd_of_shape, (32000, 4096), rows, updates
        ),
        "cross_entropy, 2048 x 32000": functools.partial(
            fusebook.cross_entropy, logits, classes
        ),
        "kmeans_assign, a million points": functools.partial(
            fusebook.kmeans_assign, points, centres
        ),
        "logistic_step, 400 x 784": functools.partial(
            fusebook.logistic_step, X, y, w, b, 0.1, 0.01
        ),
    }
    found = []
    for name, function in functions.items():
        with torch.no_grad():
            times = timing.call(
                {
                    c: functools.partial(function, check=c)
                    for c in (False, True)
                }
            )
        us = {f"check={c} us": q.q50 * 1e6 for c, q in times.items()}
        found.append({"call": name, **us})
    return pd.DataFrame(found)


try:
    checked = measured("launching_checks", calls_with_checks)
    told = table(
        checked.set_index("call"),
        "A call, waited for, in microseconds",
        fold=False,
    )
except NoResults:
    checked = None
    told = say("Not measured on this GPU yet: `nox -s record` does it.")
told

# %%
longer = None
if checked is not None:
    longer = checked["check=True us"] / checked["check=False us"]
claims(
    say("What the checks cost was not measured.")
    if longer is None
    else say(
        "With its check a call takes {least:.1f} to {most:.1f} times as long. "
        "Check while a program is new, and say check=False where its input "
        "is known to be right.",
        least=longer.min(),
        most=longer.max(),
    )
)

# %%
# Lessons
# -------
#
# - A small call is the host's time first. Look at the *host* clock before
#   tuning a kernel for small sizes.
# - ``kernel[grid](...)`` finds out at every call what the call before it found
#   out. What that depends on can be seen without the device: use it as a key.
# - The key holds all that a launcher looks at: shapes, strides, dtypes,
#   devices, alignment, plain arguments, and global modes such as determinism.
#   What may change from call to call is asked for at each: the stream, the
#   addresses, the memory.
# - Fall back to the slow path while PyTorch traces or transforms, for
#   subclasses of tensors, and while a hook of Triton's is installed.
# - Before every call a compiled program compares each Python object that it
#   was traced through. So each object that an operator lets the compiler see
#   costs its caller time: let it see one call.
# - A CUDA graph leaves the host nothing to do, and fixes shapes and addresses.
#
# Exercises
# ---------
#
# 1. A key that forgets
# ~~~~~~~~~~~~~~~~~~~~~
#
# The key of this cache is shape and dtype. It is right until a tensor has
# other strides. Mend the key.


def forgetful(first, second):
    """The exponential of `second`, after one of `first`."""
    kept = {}

    def call(x):
        key = (x.shape, x.dtype)
        if key not in kept:
            kept[key] = x.stride()
        values = torch.exp(torch.as_strided(x, (x.numel(),), (1,)))
        return torch.as_strided(values, x.shape, kept[key])

    call(first)
    return call(second)


x = torch.arange(12.0).view(4, 3)
exercise(
    "forgetful is right for a transposed matrix after a contiguous one",
    forgetful,
    lambda first, second: torch.exp(second),
    [(x, x + 1), (x, (x + 1).view(3, 4).mT)],
)

# %%
# 2. Two operands
# ~~~~~~~~~~~~~~~
#
# Make a planned sum of two tensors of one shape. Either address may be a
# multiple of 16 or not: how many plans are there for one shape?


def planned_sum(x, y):
    return planned(x)


exercise(
    "planned_sum adds",
    planned_sum,
    torch.add,
    [(x, x + 1), (x + 1, x), (x.flatten()[1:], x.flatten()[:-1])],
)

# %%
solution("solutions/plot_003_launching.py")

# %%
provenance(ways, parts)

# %%
downloads(ways, "launching")
