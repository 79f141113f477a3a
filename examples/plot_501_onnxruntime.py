"""
ONNX Runtime: from Python to the kernel
=======================================

Many models are served by ONNX Runtime. There, a kernel is of use once it is a
node of a graph. We make a node of a Triton kernel in a few lines. Then we
remove Python from its call, by a C library and by a CUDA graph.

You will learn

- how long each call between Python and the GPU takes, and how to measure it,
- how a Triton launcher becomes a node of a graph,
- how to ship Triton's machine code in a library that needs no Python.

Prerequisites: :doc:`plot_002_measuring`, :doc:`plot_103_scatter_nd`. The page
also needs ``pip install onnx onnxruntime-gpu``. Without a GPU, take
``onnxruntime``: kernels then run in Triton's interpreter, on the CPU, and
times come from a record.
"""

import functools

import fusebook  # first: without a GPU it turns Triton's interpreter on
import fusebook.lesson as lesson

# sphinx_gallery_tags = ["ONNX Runtime", "ONNX", "custom operator"]
import torch
import triton
import triton.language as tl

page = lesson.open("plot_501_onnxruntime")
page.verdict()

# %%
# Who calls whom
# --------------
#
# A *session* is a graph that has been loaded, and a *run* computes its nodes
# one after another. A node is a function on the CPU, which launches kernels.
# We subtract whole runs to find what each call takes. A run of an empty graph
# is the first arrow. A node that calls Python and does nothing adds the next:

page.calls()

# %%
# Kernels on small inputs take a few microseconds, so **we predict that calls
# decide the time of small runs**, and traffic that of large ones.
#
# .. _onnx-callback:
#
# Step 1: a launcher becomes a node {gain callback at N=512}
# ----------------------------------------------------------
#
# The example is step 2 of :doc:`plot_103_scatter_nd`. *n* rows of D elements
# are added to a table of zeros, and an index says to which row. A row with
# index -1 is left out (*masked*). Program *r* owns row *r* of the output. It
# adds its updates in registers.


@triton.jit
def own_row(y_ptr, k_ptr, u_ptr, D, n, N: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)  # [N]
    mine = tl.load(k_ptr + i, mask=i < n, other=-1) == r
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    total = tl.zeros([BLOCK], tl.float32)
    at = tl.min(tl.where(mine, i, N), 0)  # the first of mine, N if none
    while at < N:
        u_row = u_ptr + at.to(tl.int64) * D + columns
        total += tl.load(u_row, mask=columns < D, other=0.0).to(tl.float32)
        at = tl.min(tl.where(mine & (i > at), i, N), 0)  # the next
    tl.store(y_ptr + r * D + columns, total, mask=columns < D)


def add_rows(shape, indices, updates, out):
    n, D = updates.shape
    block, N = triton.next_power_of_2(D), triton.next_power_of_2(n)
    own_row[(out.shape[0],)](out, indices, updates, D, n, N=N, BLOCK=block)


def from_torch(shape, indices, updates):
    y = updates.new_empty(shape)
    add_rows(shape, indices, updates, out=y)
    return y


shape, indices, updates = page.stress(37, 100, 60)  # R, D, n
page.check(from_torch, shape, indices, updates)

# %%
# The launcher allocates nothing. Its last argument says where to write, as
# ONNX Runtime owns the memory of outputs. An operator has a name, inputs with
# types, and outputs. Here the *values* of the input ``shape`` are the shape of
# the output. They are needed on the CPU (``host``), since fetching them from
# the GPU would mean waiting for it.

adding = fusebook.ort.custom_op(
    "AddRows",
    add_rows,
    inputs={
        "shape": torch.int64,
        "indices": torch.int64,
        "updates": torch.float32,
    },
    outputs={"y": torch.float32},
    shape="shape",
    host=["shape"],
)

# %%
# Graphs can be written as text. The first one has this node. The second one is
# the chain of standard nodes that it replaces, each of which reads and writes
# memory:

import onnx.parser

HEAD = '<ir_version: 10, opset_import: ["": 18, "fusebook": 1]>'
GIVEN = "(int64[2] shape, int64[n, 1] indices, float[n, D] updates)"


def graph(nodes, given=GIVEN, constants=""):
    text = f"{HEAD} g {given} => (float[R, D] y) {constants} {{ {nodes} }}"
    return onnx.parser.parse_model(text)


one_node = graph("y = fusebook.AddRows (shape, indices, updates)")
standard = graph(
    """
    zeros = ConstantOfShape <value = float[1] {0}> (shape)
    is_masked = Equal (indices, masked)
    kept = Where (is_masked, nothing, updates)
    y = ScatterND <reduction = "add"> (zeros, indices, kept)
    """,
    constants="<int64[1] masked = {-1}, float[1] nothing = {0}>",
)

# %%
# ``ops`` gives a session the operator. A session takes tensors of torch, and
# nothing is copied: ONNX Runtime gets their addresses (*IO binding*).

session = fusebook.ort.Graph(one_node, ops=[adding])
feeds = {"shape": torch.tensor(shape), "indices": indices, "updates": updates}
y = session(feeds)["y"]


def chain(**options):
    return fusebook.ort.Graph(standard, **options)


def callback(**options):
    return fusebook.ort.Graph(one_node, ops=[adding], **options)


page.check_graph(callback, shape, indices, updates)

# %%
# When the node runs, ONNX Runtime calls a small C function, which calls the
# launcher: a *callback*. Its arguments are tensors over ONNX Runtime's memory,
# and ONNX Runtime's :term:`stream` is torch's current stream. An exception in
# the launcher becomes the error of the run, with its message.

# %%
# .. _onnx-library:
#
# Step 2: the library's nodes {gain library at N=512}
# ---------------------------------------------------
#
# The library's operators are nodes too. On a small table its kernel takes the
# GPU about as long as the one of step 1, so the *launchers* make the
# difference. The library's launcher serves all sizes and dtypes: it checks
# arguments, and chooses a kernel. It keeps what it derived from the arguments
# of the last calls, the subject of :doc:`plot_003_launching`.

masked = graph("y = fusebook.MaskedScatterNDOfShape (shape, indices, updates)")


def library(**options):
    return fusebook.ort.Graph(masked, ops=fusebook.ort.NODES, **options)


page.check_graph(library, shape, indices, updates)

# %%
# .. _onnx-built:
#
# Step 3: compile ahead of time {gain built at N=512}
# ---------------------------------------------------
#
# A program that serves a model may have no Python at all. This command
# compiles the kernels for three generations of GPUs, and needs none of them:
#
# .. code-block:: bash
#
#    python -m fusebook.ort build --arch 80,90,100 --out kernels.so
#
# The file holds machine code and a C function for each node. When the first
# node runs, ``load`` hands the code for the GPU that is there to CUDA's
# driver. Then ``launch`` is one call of the driver. The same lines work in any
# C program:

page.c("load", "launch")

# %%
# The price is that choices are made beforehand. Triton compiles a kernel again
# for another tile, or for rows at addresses that are not aligned. A library
# has the kernels that its author listed.


def built(**options):
    major, minor = torch.cuda.get_device_capability()
    arch = (10 * major + minor,)
    file = fusebook.ort.aot.cached(arch, ("float32",))  # built at first use
    return fusebook.ort.Graph(masked, library=file, **options)


# %%
# .. _onnx-captured:
#
# Step 4: capture the run {gain captured over callback at N=512}
# --------------------------------------------------------------
#
# ONNX Runtime can record what a run launches in a :term:`CUDA graph`, and
# replay it. Then no node is executed, and no callback is called. So even the
# callback of step 1 needs no Python once its run is recorded.


def captured():
    return callback(options={"enable_cuda_graph": "1"})


page.check_graph(captured, shape, indices, updates)

# %%
# Inputs and outputs have to stay where they are, with one shape. So they are
# bound once, and new values are copied to the same memory:

run = captured().bind(feeds, {"y": torch.empty_like(y)})
run()  # on a GPU, one of the first runs is recorded, and later ones replay it
updates.mul_(2)
y = run()["y"]

# %%
# A launcher that decides by values on the CPU decides once, at the capture.

# %%
# How fast is it?
# ---------------
#
# *Latency* is the time of one run, from a call in Python until the GPU has
# finished. *GPU* is GPU time, after the L2 cache was flushed. All memory is
# bound. The table of 256 x 512 gets 512 updates. That of 32000 x 4096, the
# embedding of a Llama, gets 2048.

steps = {"callback": callback, "library": library, "built": built}
page.steps(chain=chain, **steps, captured=captured)

# %%
# On the small table the chain's kernels are slow. In sessions of one node,
# calls decide, as predicted. On the embedding the kernel takes most of the
# time. The box at the top is of another process, in which the CPU took longer
# for each call. So compare times within one table. The figure has tables of R
# rows with 2R updates:

page.plot("times", over="R")

# %%

page.findings()

# %%
# So a callback is for trying an operator, and the compiled library for
# shipping it. A captured graph makes the difference disappear.
#
# .. _onnx-use:
#
# When to use it
# --------------
#
# Call ``import fusebook.ort`` first. A model that was exported elsewhere has
# the chain of four nodes. ``fuse`` replaces it by one node, and leaves it
# alone where that would change the result.

fused = fusebook.ort.fuse(standard)
[node.op_type for node in fused.graph.node]

# %%
# A torch module that calls ``fusebook.softmax`` or another operator is
# exported to these nodes:
#
# .. code-block:: python
#
#    torch.onnx.export(
#        module, inputs, dynamo=True,
#        custom_translation_table=fusebook.ort.translations(),
#    )
#
# **Do not use it** where ONNX Runtime's own kernel is good. In a small Softmax
# the compiled library gains nothing, and a callback loses. Nodes do not check
# indices, as ``check=True`` would wait for the GPU in every run. An index out
# of range is left out.

page.use()

# %%
# Takeaways
# ---------
#
# - Measure an empty run before you tune what is in it.
# - Let the caller allocate: a launcher that takes ``out`` fits anywhere.
# - Capture what has fixed shapes, a callback's run first of all.
# - Triton's machine code needs no Python: load it by CUDA's driver.
#
# Exercises
# ---------
#
# Each launcher is incorrect, and the line below it names a wrong element of
# its result. Fix it and run the cell again. No GPU is needed.
#
# 1. An attribute
# ~~~~~~~~~~~~~~~
#
# A node may carry numbers, which a launcher gets by their names. This one gets
# ``alpha``, and forgets it.


def leaky(x, out, *, alpha):
    torch.clamp(x, min=0, out=out)


def as_node(launcher, model, inputs, shape, **how):
    """A function of tensors that runs a launcher as the node of a graph."""
    kinds = inputs, {"y": torch.float32}
    op = fusebook.ort.custom_op("Mine", launcher, *kinds, shape, **how)

    @functools.wraps(launcher)
    def run(*given):
        given = [torch.as_tensor(value) for value in given]
        node = fusebook.ort.Graph(model, ops=[op])
        return node(dict(zip(inputs, given, strict=True)))["y"]

    return run


model = graph("y = fusebook.Mine <alpha = 0.125> (x)", "(float[R, D] x)")
how = {"attributes": {"alpha": 0.01}}
x = updates[:7, :9].contiguous()
page.exercise(
    as_node(leaky, model, {"x": torch.float32}, "x", **how),
    lambda x: torch.where(x > 0, x, x * 0.125),
    [(x,)],
)

# %%
# 2. Another mask
# ~~~~~~~~~~~~~~~
#
# The graph's author may choose another mask than -1. Then -1 is an index like
# any other that counts from the end. This launcher ignores the choice.


def masked_by(shape, indices, updates, out, *, maskedValue):
    live = indices[:, 0] != -1
    out.zero_()
    out.index_add_(0, indices[live, 0], updates[live])


def masked_by_two(shape, indices, updates):
    rows = indices[:, 0] % shape[0]
    kept = torch.where(indices == 2, 0, updates)
    return updates.new_zeros(shape).index_add_(0, rows, kept)


model = graph("y = fusebook.Mine <maskedValue = 2> (shape, indices, updates)")
how = {"attributes": {"maskedValue": int}, "host": ["shape"]}
drawn = torch.tensor([[0], [2], [-1], [3], [2], [-1]], device=x.device)
page.exercise(
    as_node(masked_by, model, adding.inputs, "shape", **how),
    masked_by_two,
    [((5, 9), drawn, x[:6])],
)

# %%
# Evidence
# --------

page.footer()
