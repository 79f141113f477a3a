"""
A kernel becomes an operator
============================

A function that launches a kernel computes the correct elements, and PyTorch
knows nothing about it. Its gradient is lost, ``torch.vmap`` stops with an
error, and ``torch.export`` cannot trace it. We register the function as an
*operator*, one ability at a time, and measure what a call of it costs.

You will learn

- which registrations gradients, batches and compiled programs need,
- how to test an operator with ``torch.library.opcheck``,
- what an operator costs for each call, and which of three forms to use.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_101_elementwise`. No GPU
is needed: without one, kernels run in Triton's interpreter, and times come
from a record.
"""

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["custom operator", "gradient", "torch.compile"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_401_operator")
page.verdict()

# %%
# The operation
# -------------
#
# The operation is SiLU, :math:`y = x \, \sigma(x)`, where :math:`\sigma` is
# the sigmoid. In eager code it is two kernels. A matrix has M x N elements.


def silu_eager(x):
    s = torch.sigmoid(x)  # read MN, write MN
    return x * s  # read 2MN, write MN


page.traffic(eager=silu_eager, fused=2)

# %%
# .. _operator-function:
#
# Step 1: a kernel and its launcher {gain function at N=8192}
# -----------------------------------------------------------
#
# The gradient of a loss with respect to x is :math:`dx = dy \, \sigma(x) (1 +
# x (1 - \sigma(x)))`, where dy is the gradient with respect to y. So there are
# two kernels. In each, a program owns 1024 adjacent elements.


@triton.jit
def silu_forward(y_ptr, x_ptr, SIZE, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK  # may exceed 2**31
    i = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < SIZE)  # read MN
    s = 1 / (1 + tl.exp(-x))
    tl.store(y_ptr + i, x * s, mask=i < SIZE)  # write MN


@triton.jit
def silu_backward(dx_ptr, dy_ptr, x_ptr, SIZE, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < SIZE)  # read MN
    dy = tl.load(dy_ptr + i, mask=i < SIZE)  # read MN
    s = 1 / (1 + tl.exp(-x))
    tl.store(dx_ptr + i, dy * s * (1 + x * (1 - s)), mask=i < SIZE)


def function(x):
    x = x.contiguous()
    y, SIZE = torch.empty_like(x), x.numel()
    silu_forward[(triton.cdiv(SIZE, 1024),)](y, x, SIZE, BLOCK=1024)
    return y


def slope(dy, x):
    dy, x = dy.contiguous(), x.contiguous()
    dx, SIZE = torch.empty_like(x), x.numel()
    silu_backward[(triton.cdiv(SIZE, 1024),)](dx, dy, x, SIZE, BLOCK=1024)
    return dx


x = page.stress(64, 33)
page.check(function, x)

# %%
# *eps* is the distance from 1 to the next number. Now we request more than a
# call. Each result below is compared with that of eager code. With
# ``fullgraph=True``, ``torch.compile`` raises an error where it cannot trace.
# With ``aot_eager`` it traces, and generates no code.


def grad_of(f):
    leaf = x.clone().requires_grad_()
    y = f(leaf)
    return torch.autograd.grad(y.sum(), leaf)[0] if y.requires_grad else None


def compiled(f):
    torch.compiler.reset()
    return torch.compile(f, fullgraph=True, backend="aot_eager")


requests = {
    "call": lambda f: f(x),
    "grad": grad_of,
    "vmap": lambda f: torch.vmap(f)(x),  # x is a batch of 64 rows
    "compile": lambda f: compiled(f)(x),
}


def answers(f, *names):
    found = {}
    for name in names or requests:
        try:
            got = requests[name](f)
        except Exception:
            found[name] = "error"
            continue
        want = requests[name](silu_eager)
        good = got is not None and torch.allclose(got, want, atol=1e-5)
        found[name] = "lost" if got is None else "ok" if good else "wrong"
    return found


answers(function, "call", "grad", "vmap")

# %%
# The gradient is lost, and nothing says so: a model would train without it.
# Under vmap there is no address of one row that a launcher could use. We do
# not compile it here. A compiler traces a program with :term:`fake tensors
# <fake tensor>`, which have a shape, strides and a dtype, and no memory. A
# launcher must not take an address of these.

# %%
# .. _operator-custom:
#
# Step 2: an operator {gain operator at N=64}
# -------------------------------------------
#
# An operator has a name in PyTorch's *dispatcher*, and several functions. The
# dispatcher calls the one that serves the caller.

caption = "A caller, what we register for it, and what that does."
callers = [
    ("a plain call", "custom_op", "launch the kernel"),
    ("torch.compile", "register_fake", "return only shapes"),
    ("autograd", "register_autograd", "save x, use slope"),
    ("torch.vmap", "register_vmap", "one call for all"),
]
page.picture.routes(caption, callers)

# %%
# The types in its signature are the operator's *schema*. In a traced program,
# the operator is one node, and the compiler does not see the kernel in it.


@torch.library.custom_op("lesson::silu", mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    return function(x)


page.check(operator, x)

# %%

answers(operator)

# %%
# The gradient is not lost any more: it is an error. Without a rule, vmap calls
# the operator for each row, which is correct and slow.
#
# A *fake* says which tensor comes out. It must agree with what the launcher
# allocates, strides included. Then programs can be traced:


@operator.register_fake
def allocated(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


answers(operator)

# %%
# A *gradient* is two functions: the first saves what the second needs. The
# second calls an operator again, because a program for training is traced too.


@torch.library.custom_op("lesson::silu_slope", mutates_args=())
def slope_operator(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return slope(dy, x)


@slope_operator.register_fake
def allocated_slope(dy, x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, dy):
    return slope_operator(dy, *ctx.saved_tensors)


operator.register_autograd(backward, setup_context=save)
answers(operator)

# %%
# A *batch rule* gets the whole batch, and for each argument the axis of the
# batch. It returns the result, and the axis of the batch in the result. SiLU
# computes each element by itself, so one call is enough for the whole batch.


@operator.register_vmap
def for_all(info, axes, x):
    return operator(x), axes[0]


assert set(answers(operator).values()) == {"ok"}

# %%
# .. _operator-library:
#
# Step 3: the same without guards {gain library at N=64}
# ------------------------------------------------------
#
# In each call, ``custom_op`` checks that the result shares no memory with an
# argument, and whether a gradient is needed. The older interface, ``Library``,
# has no such guards. A fake, a gradient and a batch rule are registered by the
# name ``lesson::trusted``; the code below leaves them out.

fragment = torch.library.Library("lesson", "FRAGMENT")
fragment.define("trusted(Tensor x) -> Tensor")
for device in ("CPU", "CUDA"):
    fragment.impl("trusted", function, device)


def library(x):
    return torch.ops.lesson.trusted(x)


torch.testing.assert_close(library(x), silu_eager(x))

# %%
# .. _operator-visible:
#
# Step 4: a kernel that the compiler sees {gain visible over operator at N=64}
# ----------------------------------------------------------------------------
#
# The gain of this step is in compiled programs, and not in the plain call of
# the heading. ``triton_op`` is ``custom_op`` for functions that launch Triton
# kernels. A compiler looks into it and sees an allocation and a kernel. It
# needs no fake, and launches the kernel from the code that it generates.
# Triton's interpreter compiles no kernel, so there the function calls it
# directly.


@torch.library.triton_op("lesson::visible", mutates_args=())
def visible(x: torch.Tensor) -> torch.Tensor:
    x, kernel = x.contiguous(), silu_forward
    y, SIZE = torch.empty_like(x), x.numel()
    if isinstance(kernel, triton.JITFunction):  # not in the interpreter
        kernel = torch.library.wrap_triton(silu_forward)
    kernel[(triton.cdiv(SIZE, 1024),)](y, x, SIZE, BLOCK=1024)
    return y


page.check(visible, x)

# %%
# Is it correct?
# --------------
#
# ``torch.library.opcheck`` runs an operator as tracing does, and compares its
# schema, its fake and its gradient with what it does. A check is worth what it
# catches. The launcher packs a transposed matrix, and this fake forgets that:


@torch.library.custom_op("lesson::forgetful", mutates_args=())
def forgetful(x: torch.Tensor) -> torch.Tensor:
    return function(x)


forgetful.register_fake(torch.empty_like)


def passes(op, x):
    found = torch.library.opcheck(op, (x,), raise_exception=False)
    return all(result == "SUCCESS" for result in found.values())


leaf = x.clone().requires_grad_()
assert all(passes(operator, t) for t in (x, x.mT, leaf))
assert passes(forgetful, x) and not passes(forgetful, x.mT)

# %%
# Only the transposed matrix shows the mistake. Test with tensors that are not
# contiguous, and with tensors that need a gradient. Step 2 passes on each.
#
# How fast is it?
# ---------------
#
# A matrix of 64 x 64 elements is done before Python has returned. So the time
# of a call is its *CPU launch* time, which Python needs to queue it. Under
# vmap, the 64 rows are a batch. The column *GPU* is for a matrix of 8192 x
# 8192, which is large enough to measure the kernel.

steps = {"function": function, "operator": operator, "library": library}
page.steps(eager=silu_eager, **steps, visible=visible)

# %%
page.findings()

# %%
# An operator costs CPU time, and none of the GPU's. A caller who queues many
# calls pays the larger of the two. So the cost matters for small tensors, and
# a CUDA graph removes it.
#
# .. _operator-use:
#
# When to use it
# --------------
#
# Register a kernel if it is to be used in training, in vmap, or in a compiled
# or exported program. **Do not register** a kernel that is only called: a
# plain launcher takes less of the CPU's time. ``fusebook.silu`` is registered
# as in step 3. A plain call of it avoids the dispatcher: it checks that
# nothing traces or transforms the call, and repeats a launch that it has
# prepared before (:doc:`plot_003_launching`). Under vmap it goes through the
# dispatcher, and through a batch rule for all elementwise operators, which
# does more than the rule of step 2.

y = fusebook.silu(x)
page.use()

# %%
# Takeaways
# ---------
#
# - A launcher loses its gradient and says nothing. An operator without one
#   raises an error.
# - A fake makes an operator traceable. Make the gradient an operator too.
# - Write a batch rule. Without one, vmap launches once for each member.
# - Use ``triton_op`` where programs are compiled, ``custom_op`` for any other
#   code, and ``Library`` where calls are small and tested.
#
# Exercises
# ---------
#
# Each function is incorrect, and the line below it says where. Fix it and run
# the cell again. No GPU is needed.
#
# 1. A fake that agrees
# ~~~~~~~~~~~~~~~~~~~~~
#
# An operator takes the sum of each row of a matrix. This fake returns another
# shape. Fix it.


def fake_row_sums(x):
    return torch.zeros_like(x)  # without memory, zeros cost nothing


def sums_of_zeros(x):
    return torch.zeros_like(x).sum(-1)


doubles = torch.ones(2, 5, dtype=torch.float64)
page.exercise(fake_row_sums, sums_of_zeros, [(torch.ones(4, 3),), (doubles,)])

# %%
# 2. A batch along another axis
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# This is the batch rule of an operator that sums the last axis. It is given a
# batch and the axis of the batch. It returns the sums, and the axis of the
# batch in them. This rule is correct only where the batch comes first.


def batched_row_sums(x, axis):
    return x.sum(-1), 0


def by_rule(x, axis):
    y, out = batched_row_sums(x, axis)
    return y.movedim(out, 0)


def by_vmap(x, axis):
    return torch.vmap(lambda row: row.sum(-1), axis)(x)


cube = torch.arange(24.0).view(2, 3, 4)
page.exercise(by_rule, by_vmap, [(cube, 0), (cube, 1), (cube, 2)])

# %%
# 3. A gradient of two arguments
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The gate of SwiGLU is :math:`z = x \, \sigma(x) \, u`. Return the gradients
# with respect to x and u.


def gate_slopes(dz, x, u):
    return slope(dz, x), dz


def gate_by_torch(dz, x, u):
    x, u = (t.detach().requires_grad_() for t in (x, u))
    with torch.enable_grad():
        return torch.autograd.grad(silu_eager(x) * u, (x, u), dz)


three = [page.stress(10, 10, seed=seed) for seed in (1, 2, 3)]
page.exercise(gate_slopes, gate_by_torch, [three, [t[:3] for t in three]])

# %%
# Evidence
# --------

page.footer()
