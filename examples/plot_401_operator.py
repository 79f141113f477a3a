# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
A kernel becomes an operator
============================

A function that launches a kernel gives the right numbers, and PyTorch knows
nothing of it: a gradient is lost without a word, and ``torch.compile`` and
``torch.export`` meet a function that needs the address of real memory. This
page makes an **operator** of such a function, one registration at a time, asks
after each what PyTorch can now do with it, and what a caller pays for it.

With a CUDA GPU the costs are measured as the page runs. Without one, they are
replayed from the record of a GPU that is named at the end, and everything else
runs in Triton's interpreter.

For whom: those who have a kernel and want gradients, vmap and torch.compile
to work with it.

Read before: 003, 101.
"""

# %%
# The problem
# -----------
#
# The operation is SiLU, :math:`y = x \, \sigma(x)`, and its gradient is
# :math:`dx = dy \, \sigma(x) (1 + x (1 - \sigma(x)))`. Both are one pass over
# memory. What is of interest here is all that is not in the kernel.
#
# In 2012 the `manual of Theano <https://github.com/Theano/Theano/blob/
# master/doc/tutorial/using_gpu.txt>`__ made an operator of a kernel in CUDA C
# by a class: ``make_node`` said of which type the result is, as a fake does
# below, and ``make_thunk`` compiled the kernel and returned what launches it.
# Its example had no gradient, and no batch.

# sphinx_gallery_tags = ["custom operator", "gradient", "torch.compile"]
import ast
import inspect
import itertools
import logging
import textwrap
import warnings
from functools import partial

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook.cards.elementwise import SILU
from fusebook.measure import bench, timing
from fusebook.measure.check import yardstick
from fusebook.measure.inputs import generator
from fusebook.page import (
    NoResults,
    claim,
    claims,
    downloads,
    exercise,
    lines_behind,
    lines_of,
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
from torch._subclasses.fake_tensor import FakeTensorMode

where = generator(0).device

# %%
# What eager costs
# ----------------
#
# Two operations, *the chain* of the tables below: PyTorch reads three times
# what it needs and writes twice. (It has an operation for SiLU too, which is
# what the costs are compared with.)


def silu_eager(x):
    s = torch.sigmoid(x)  # read N, write N
    return x * s  # read 2N, write N


# %%
# The kernel
# ----------


@triton.jit
def silu_forward(y_ptr, x_ptr, SIZE, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < SIZE)
    s = 1 / (1 + tl.exp(-x))
    tl.store(y_ptr + i, x * s, mask=i < SIZE)


@triton.jit
def silu_backward(dx_ptr, dy_ptr, x_ptr, SIZE, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < SIZE)
    dy = tl.load(dy_ptr + i, mask=i < SIZE)
    s = 1 / (1 + tl.exp(-x))
    tl.store(dx_ptr + i, dy * s * (1 + x * (1 - s)), mask=i < SIZE)


def forward(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    silu_forward[(triton.cdiv(n, 1024),)](y, x, n, BLOCK=1024)
    return y


def backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    dx, n = torch.empty_like(x), x.numel()
    silu_backward[(triton.cdiv(n, 1024),)](dx, dy, x, n, BLOCK=1024)
    return dx


# %%
# A name
# ~~~~~~
#
# ``torch.library.custom_op`` gives a function a name in PyTorch's dispatcher:
# ``torch.ops.<name>``. From then on it is one node in a program, which nobody
# looks into. The types in its signature are its schema.
#
# Shapes without memory
# ~~~~~~~~~~~~~~~~~~~~~
#
# Whoever traces a program runs it on :term:`fake tensors <fake tensor>`, which
# have a shape, a stride, a dtype and a device, and no memory.
# ``register_fake`` says what comes out. It must agree with what the kernel
# does: with its strides as well.
#
# A gradient
# ~~~~~~~~~~
#
# ``register_autograd`` takes a function that keeps what the gradient needs,
# and the gradient, which is an operator again: else nobody could trace it.
#
# A batch
# ~~~~~~~
#
# ``torch.vmap`` calls a function of one member with a batch of them.
# ``register_vmap`` gets the batch, and along which axis it lies. Here it is
# easy: each number is computed for itself. Without a rule PyTorch calls the
# operator once for each member.

counter = itertools.count()


def operator(fake=False, gradient=False, batch=False):
    """The kernel as an operator, registered as far as is asked for."""
    n = next(counter)
    op = torch.library.custom_op(f"page401::silu{n}", forward, mutates_args=())
    slope = torch.library.custom_op(
        f"page401::slope{n}", backward, mutates_args=()
    )
    if fake:

        @op.register_fake
        def _(x):
            return torch.empty_like(x, memory_format=torch.contiguous_format)

        @slope.register_fake
        def _(dy, x):
            return torch.empty_like(x, memory_format=torch.contiguous_format)

    if gradient:
        op.register_autograd(
            lambda ctx, dy: slope(dy, *ctx.saved_tensors),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(
                *inputs
            ),
        )
    if batch:

        @op.register_vmap
        def _(info, along, x):
            return op(x), along[0]

    return op


stages = {
    "a function": forward,
    "a name": operator(),
    "+ fake": operator(fake=True),
    "+ gradient": operator(fake=True, gradient=True),
    "+ batch": operator(fake=True, gradient=True, batch=True),
}

# %%
# Is it right?
# ------------
#
# Seven requests, each of a function and of the four operators. What is
# refused is told by the name of the error, and what is lost is lost silently.
# Two requests are not made of the plain function: under them a tensor has no
# memory, its kernel would read an address that is not valid, and after such an
# error no call of the process succeeds.

x = torch.randn(64, 33, generator=generator(1), device=where)
want = torch.nn.functional.silu(x)


class Module(torch.nn.Module):
    """A module, since those are what is exported."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def same(got, want):
    return "right" if torch.allclose(got, want, atol=1e-6) else "wrong"


def slope_of(f):
    leaf = x.clone().requires_grad_()
    y = f(leaf)
    return torch.autograd.grad(y.sum(), leaf)[0] if y.requires_grad else None


def its_gradient(f):
    got = slope_of(f)
    return "lost" if got is None else same(got, slope_of(silu_eager))


def without_memory(f):
    if f is forward:
        return "not asked"
    with FakeTensorMode() as mode:
        y = f(mode.from_tensor(x))
    return "right" if y.shape == x.shape else "wrong"


def in_one_graph(f):
    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    return same(compiled(x), want)


def exported(f):
    if f is forward:
        return "not asked"
    return same(torch.export.export(Module(f), (x,)).module()(x), want)


def checked(f):
    if f is forward:
        return "no operator"
    torch.library.opcheck(f, (x.clone().requires_grad_(),))
    return "right"


requests = {
    "a call": lambda f: same(f(x), want),
    "a gradient": its_gradient,
    "a batch, by vmap": lambda f: same(torch.vmap(f)(x), want),
    "a fake tensor": without_memory,
    "torch.compile, one graph": in_one_graph,
    "torch.export": exported,
    "torch.library.opcheck": checked,
}


def answer(request, f):
    logging.disable()  # of errors that are the answer
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return request(f)
    except Exception as error:
        return type(error).__name__
    finally:
        logging.disable(logging.NOTSET)


answers = pd.DataFrame(
    {
        stage: {name: answer(ask, f) for name, ask in requests.items()}
        for stage, f in stages.items()
    }
)
table(answers, "What PyTorch can do with it", fold=False)

# %%
claims(
    claim(
        "The kernel gives the right numbers in all five.",
        answers.loc["a call"] == "right",
    ),
    claim(
        "A function loses the gradient without a word.",
        answers.loc["a gradient", "a function"] == "lost",
    ),
    claim(
        "With all registrations every request is answered rightly.",
        answers["+ batch"] == "right",
    ),
)

# %%
# opcheck
# ~~~~~~~
#
# ``torch.library.opcheck`` runs an operator as tracing does, and compares:
# does the schema say the truth, does the fake agree, is the gradient
# registered where it must be. This fake forgets that the kernel packs what is
# strided. Without the check it would show much later, as a wrong stride in
# somebody's compiled program.

forgetful = torch.library.custom_op(
    "page401::forgetful", forward, mutates_args=()
)
forgetful.register_fake(torch.empty_like)
found = {}
for name, given in {"packed": x, "transposed": x.mT}.items():
    report = torch.library.opcheck(forgetful, (given,), raise_exception=False)
    found[name] = {
        test: "right" if said == "SUCCESS" else "caught"
        for test, said in report.items()
    }
table(pd.DataFrame(found), "opcheck of a fake that forgets", fold=False)

# %%
claims(
    claim(
        "On a packed tensor none of opcheck's tests finds anything.",
        pd.Series(found["packed"]) == "right",
    ),
    claim(
        "On a transposed one it finds the fake.",
        "caught" in found["transposed"].values(),
    ),
)

# %%
# How fast?
# ---------
#
# The same 4096 numbers each time, which the device finishes before Python has
# returned. What is measured is the host: what it does to queue one call.


class Differentiable(torch.autograd.Function):
    """A gradient that goes by the dispatcher's side."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return forward(x)

    @staticmethod
    def backward(ctx, dy):
        return backward(dy, *ctx.saved_tensors)


library = torch.library.Library("page401", "FRAGMENT")
library.define("trusted(Tensor x) -> Tensor")
for device in ("CPU", "CUDA"):
    library.impl("trusted", forward, device)

# %%
# A compiler does not look into any of these. ``torch.library.triton_op`` is
# the way that lets it: the function is registered as by ``custom_op``, and
# launches through ``wrap_triton``. Then tracing sees an allocation and a
# kernel of Triton's, knows shapes without a fake, and the generated code
# launches the kernel itself. The interpreter's kernels cannot be wrapped, so
# this one runs on a GPU only.


def transparent(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    launch = torch.library.wrap_triton(silu_forward)
    launch[(triton.cdiv(n, 1024),)](y, x, n, BLOCK=1024)
    return y


seen = torch.library.triton_op("page401::seen", transparent, mutates_args=())

# %%


def costs():
    x = torch.randn(4096, device="cuda")
    leaf = x.clone().requires_grad_()
    batch = x.view(64, 64)
    silu, full = torch.nn.functional.silu, stages["+ batch"]
    compiled = torch.compile(full, fullgraph=True)
    ours = torch.compile(fusebook.silu, fullgraph=True)
    eager = torch.compile(silu_eager, fullgraph=True)
    looked_into = torch.compile(seen, fullgraph=True)
    program = torch.export.export(Module(full), (x,)).module()
    compiled(x), ours(x), eager(x), looked_into(x)

    def there_and_back(f):
        return lambda: torch.autograd.grad(f(leaf).sum(), leaf)

    ways = {
        "torch's silu": lambda: silu(x),
        "the function": lambda: forward(x),
        "Library.impl": lambda: torch.ops.page401.trusted(x),
        "custom_op, a name": lambda: stages["a name"](x),
        "custom_op, + gradient": lambda: stages["+ gradient"](x),
        "custom_op, + batch": lambda: full(x),
        "triton_op": lambda: seen(x),
        "fusebook.silu": lambda: fusebook.silu(x),
        "torch.compile of the operator": lambda: compiled(x),
        "torch.compile of the triton_op": lambda: looked_into(x),
        "torch.compile of fusebook.silu": lambda: ours(x),
        "torch.compile of the chain": lambda: eager(x),
        "the exported program": lambda: program(x),
        "torch's silu in vmap": lambda: torch.vmap(silu)(batch),
        "custom_op in vmap, no rule": lambda: torch.vmap(stages["+ gradient"])(
            batch
        ),
        "custom_op in vmap": lambda: torch.vmap(full)(batch),
        "fusebook.silu in vmap": lambda: torch.vmap(fusebook.silu)(batch),
        "torch's silu and back": there_and_back(silu),
        "autograd.Function and back": there_and_back(Differentiable.apply),
        "custom_op and back": there_and_back(full),
        "fusebook.silu and back": there_and_back(fusebook.silu),
    }
    times = timing.host(ways)
    rows = [(k, 1e6 * q.q50) for k, q in times.items() if q is not None]
    return pd.DataFrame(rows, columns=["way", "host us"])


paid = measured("operator_costs", costs)
by_way = paid.set_index("way")
table(by_way, "4096 numbers, in microseconds of the host", fold=False)

# %%
# How far from the roof?
# ----------------------
#
# A small call is held against PyTorch's own operator. What stands above the
# function's own time is the price of being an operator.

us = by_way["host us"]
above = us - us["the function"]
compiled = []
if "torch.compile of fusebook.silu" in us:
    compiled = [
        say(
            "Compiled, the chain costs {chain:.0f} us, the operator {op:.0f} "
            "and fusebook.silu {ours:.0f}. Code that the compiler generates "
            "asks the dispatcher for an operator at each call; that of "
            "fusebook.silu asks for its plan. The exported program of the "
            "operator costs {exported:.0f} us.",
            exported=us["the exported program"],
            chain=us["torch.compile of the chain"],
            op=us["torch.compile of the operator"],
            ours=us["torch.compile of fusebook.silu"],
        )
    ]
if "torch.compile of the triton_op" in us:
    compiled.append(
        say(
            "A triton_op costs {plain:.0f} us a call, custom_op {op:.0f}; "
            "compiled, {looked:.0f} and {whole:.0f}, since the generated code "
            "launches the kernel of the one and calls the other.",
            plain=us["triton_op"],
            op=us["custom_op, a name"],
            looked=us["torch.compile of the triton_op"],
            whole=us["torch.compile of the operator"],
        )
    )
claims(
    say(
        "The function costs {function:.0f} us a call, torch's own operator "
        "{torch:.0f}. Page 003 measures what a launch by `kernel[grid](...)` "
        "spends its time on.",
        function=us["the function"],
        torch=us["torch's silu"],
    ),
    say(
        "A name costs {name:.0f} us more by custom_op and {trusted:.0f} by "
        "Library.impl; a gradient that is registered and not asked for "
        "{gradient} us more than the name.",
        name=above["custom_op, a name"],
        trusted=above["Library.impl"],
        gradient=round(us["custom_op, + gradient"] - us["custom_op, a name"]),
    ),
    say(
        "Forward and back cost {op:.0f} us by custom_op, {function:.0f} by "
        "autograd.Function, {ours:.0f} by fusebook.silu and {torch:.0f} by "
        "torch's own.",
        op=us["custom_op and back"],
        function=us["autograd.Function and back"],
        ours=us["fusebook.silu and back"],
        torch=us["torch's silu and back"],
    ),
    say(
        "Under vmap a call costs {none:.0f} us without a rule, {rule:.0f} "
        "with one, {ours:.0f} by fusebook.silu and {torch:.0f} by torch's "
        "own.",
        none=us["custom_op in vmap, no rule"],
        rule=us["custom_op in vmap"],
        ours=us["fusebook.silu in vmap"],
        torch=us["torch's silu in vmap"],
    ),
    *compiled,
    claim(
        "custom_op costs more than Library.impl: {custom:.0f} and {plain:.0f} "
        "us a call.",
        us["custom_op, a name"] > us["Library.impl"],
        custom=us["custom_op, a name"],
        plain=us["Library.impl"],
    ),
    claim(
        "A plain call of the library's operator, which bypasses PyTorch's "
        "dispatcher where nothing is traced or recorded, costs the host less "
        "than the bare function, which launches by `kernel[grid](...)`: "
        "{ours:.0f} and {function:.0f} us.",
        us["fusebook.silu"] < us["the function"],
        ours=us["fusebook.silu"],
        function=us["the function"],
        headline=True,
    ),
)

# %%
# How can that be? ``fusebook.silu`` is registered, as these operators are, for
# tracing and for transforms. A plain call does not use the registration: it
# checks that nothing traces or transforms, and launches by a plan (page 003).
# Its gradient is recorded by an ``autograd.Function`` where one is needed.

# %%
# On many numbers
# ~~~~~~~~~~~~~~~
#
# The price of an operator is the host's. A caller who waits after each call
# pays it on top of the device's time. One who queues calls ahead pays the
# longer of the two, which on 8192 x 8192 numbers is the device's. These are
# the steps of this page, from the chain to the :term:`roof`, each checked
# there.


# site: fold
def operator_steps():
    made = SILU.make(generator(0), torch.float32, M=8192, N=8192)
    yard = yardstick(SILU, made)
    ways = {
        "the chain": silu_eager,
        **{name.replace("+", "and a"): f for name, f in stages.items()},
        "triton_op": seen,
        "torch's silu": torch.nn.functional.silu,
        "fusebook.silu": fusebook.silu,
    }
    steps = {name: partial(way, *made) for name, way in ways.items()}
    frame = bench.staircase(
        steps, lambda got: yard.judge(got).ok, kind="call", repeat=15
    )
    times = timing.measure(steps, repeat=15, kinds=("cold",))
    frame["cold us"] = frame["step"].map(
        {k: 1e6 * q["cold"].q50 for k, q in times.items() if q["cold"]}
    )
    return frame


def lines_of_steps():
    """Each step with those that it builds upon."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(operator)))
    more = {
        node.test.id: sum(len(ast.unparse(s).splitlines()) for s in node.body)
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
    }
    steps = {
        "a function": lines_of(silu_forward, forward),
        "a name": 1,
        "and a fake": more["fake"],
        "and a gradient": more["gradient"]
        + lines_of(silu_backward, backward)
        + 1,
        "and a batch": more["batch"],
    }
    return {
        "the chain": lines_of(silu_eager),
        **dict(zip(steps, itertools.accumulate(steps.values()), strict=True)),
        "triton_op": lines_of(silu_forward, transparent) + 1,
        "fusebook.silu": lines_behind(SILU.reference),
    }


try:
    stairs = measured("operator_steps", operator_steps).set_index("step")
except NoResults:
    stairs = None
if stairs is not None:
    roof = 1e6 * stairs.attrs["origin"].machine.roof(
        SILU.cost(4, M=8192, N=8192), "float32"
    )
    shown = pd.concat(
        [stairs, pd.DataFrame({"us": roof, "cold us": roof}, ["the roof"])]
    ).assign(lines=pd.Series(lines_of_steps()))
table(
    shown[["us", "cold us", "registers", "lines"]].set_axis(
        [
            "a call, us",
            "the device, us",
            "registers a thread",
            "lines of code",
        ],
        axis=1,
    ),
    "SiLU of 8192 x 8192 numbers in float32; from the function to the batch "
    "a row's lines hold those of the rows above it, too",
    fold=False,
) if stairs is not None else claims(
    say(
        "These steps are not recorded yet: `nox -s record -- operator` "
        "records them."
    )
)

# %%
if stairs is not None:
    both = stairs[["us", "cold us"]]
    beside = both.loc["a name":"and a batch"] / both.loc["a function"]
claims(
    claim("Each step is right.", stairs["right"]),
    claim(
        "By the device an operator takes the time of its function, with all "
        "registrations and with none: {least:.3f} to {most:.3f} times.",
        (beside["cold us"] - 1).abs() <= 0.02,
        fatal=False,
        least=beside["cold us"].min(),
        most=beside["cold us"].max(),
    ),
    say(
        "By a call that is waited for it takes {least:.2f} to {most:.2f} "
        "times the function's. On the device the chain takes {chain:.2f} "
        "times the function's time, and the function {roof:.2f} times the "
        "roof.",
        least=beside["us"].min(),
        most=beside["us"].max(),
        chain=stairs["cold us"]["the chain"] / stairs["cold us"]["a function"],
        roof=stairs["cold us"]["a function"] / roof,
    ),
) if stairs is not None else None

# %%
provenance(*([paid] if stairs is None else [paid, stairs]))

# %%
downloads(paid, "operator_costs")

# %%
# Lessons
# -------
#
# - A launch is not an operator. PyTorch refuses what is missing, except for a
#   gradient: that is lost without a word.
# - Register a name and a fake, and programs can be traced, compiled and
#   exported. Register the gradient as an operator too, and those of
#   training as well.
# - Run ``opcheck`` on strided tensors and on those that require a gradient.
# - ``triton_op`` is ``custom_op`` for kernels of Triton's that a compiler may
#   look into: it plans their memory, and needs no fake.
# - ``custom_op`` guards every call. Where calls are small, ``Library`` with
#   ``define`` and ``impl`` is the same registration without the guards, and a
#   call can bypass the dispatcher.
#
# Exercises
# ---------
#
# No GPU is needed.
#
# 1. A fake that agrees
# ~~~~~~~~~~~~~~~~~~~~~
#
# An operator takes the sum of each row of a matrix. This fake has the wrong
# shape. Mend it.


def fake_row_sums(x):
    return torch.empty_like(x)


exercise(
    "fake_row_sums has the shape and the dtype of the sums",
    lambda x: torch.zeros_like(fake_row_sums(x)),
    lambda x: torch.zeros_like(x.sum(-1)),
    [(torch.ones(4, 3),), (torch.ones(2, 5, dtype=torch.float64),)],
)

# %%
# 2. A batch that lies elsewhere
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The rule of an operator that sums the last axis. It is given a batch, and
# along which axis that lies; it returns the sums, and the axis of the batch
# in them. This one believes that the batch is always in front.


def batched_row_sums(x, along):
    return x.sum(-1), 0


def by_vmap(f):
    def run(x, along):
        y, out = f(x, along)
        return y.movedim(out, 0)

    return run


x3 = torch.arange(24.0).view(2, 3, 4)
exercise(
    "batched_row_sums knows where the batch is",
    lambda x, along: by_vmap(batched_row_sums)(x, along),
    lambda x, along: torch.vmap(lambda row: row.sum(-1), along)(x),
    [(x3, 0), (x3, 1), (x3, 2)],
)

# %%
# 3. A gradient of two arguments
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# SwiGLU's gate: :math:`z = x \, \sigma(x) \, u`. Return the gradients of both.


def gate_slopes(dz, x, u):
    return backward(dz, x), dz


def gate_by_torch(dz, x, u):
    x, u = (t.detach().requires_grad_() for t in (x, u))
    with torch.enable_grad():
        return torch.autograd.grad(silu_eager(x) * u, (x, u), dz)


rng = generator(3)
three = [torch.randn(100, generator=rng, device=where) for _ in range(3)]
exercise(
    "gate_slopes agree with PyTorch's",
    gate_slopes,
    gate_by_torch,
    [tuple(three), tuple(t[:7] for t in three)],
)

# %%
solution("solutions/plot_401_operator.py")
