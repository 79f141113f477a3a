# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book,ort]", "onnxruntime"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
Kernels as nodes of ONNX Runtime
================================

Many models run in ONNX Runtime, where a kernel is of use once it is a node of
a graph. This page makes nodes in two ways: of a Python function that launches
a Triton kernel, and of a library compiled ahead of time, whose C code launches
Triton's machine code through CUDA's driver. The library needs neither Python
nor Triton where it runs.

Whoever writes CUDA finds three answers here: how long a framework takes before
the first launch, how much of that a CUDA graph saves, and how a program in C
launches kernels that were written in Triton.

The example is masked ScatterND, which has a page of its own. Its source is a
page of onnx-extended, *Optimizing Masked ScatterND operator on CUDA* (2024).
What fusion gives is told apart from what leaving ONNX Runtime's own ScatterND
gives.

For whom: those who run models in ONNX Runtime and want an operator of their
own in it, and those who write CUDA and want Triton's kernels in C or C++.

Read before: 103.
"""

# %%
# The problem
# -----------
#
# There are n updates of D numbers each, and indices that say to which of R
# rows they are added. An index of -1 is masked. In ONNX that is a chain of
# four nodes; with two operators of our own it takes three nodes, or one. What
# ONNX Runtime calls so is in the words of CUDA:
#
# .. list-table::
#
#    * - node
#      - a function on the host: it gets pointers, shapes and a :term:`stream`,
#        has the outputs allocated, and launches kernels
#    * - session
#      - a graph that has been loaded; a *run* calls node after node
#    * - provider
#      - the functions for one device: CUDA is one provider, the CPU another
#    * - IO binding
#      - the caller gives pointers of the device, so nothing crosses the bus
#    * - custom operator
#      - a name, the types of inputs and outputs, and one's own function for a
#        provider, from a shared library

# sphinx_gallery_tags = ["ONNX Runtime", "ONNX", "custom operator"]
import re
from functools import partial

import fusebook  # before triton: it decides who runs kernels
from fusebook import plots, tables
from fusebook.cards.onnxruntime import (
    MODELS,
    NODES_OF_ONNX_RUNTIME,
    model,
)
from fusebook.measure import bench, timing
from fusebook.measure.check import yardstick
from fusebook.measure.inputs import generator, poison
from fusebook.ort import NODES, Graph, custom_op, fuse
from fusebook.ort.alone import alone
from fusebook.ort.aot import cached, specs
from fusebook.ort.custom import C
from fusebook.ort.nodes import MASKED_SCATTER_ND, softmax_into
from fusebook.page import (
    Folded,
    Listing,
    NoResults,
    Source,
    claim,
    claims,
    downloads,
    exercise,
    extra,
    holds,
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

with extra("ort"):
    import onnx
    import onnx.helper as oh

asked = study(
    NODES_OF_ONNX_RUNTIME, config="small,medium,large", dtype="float32"
)
Listing("\n\n".join(onnx.printer.to_text(model(name)) for name in MODELS))

# %%
# The second and third graph need one custom operator each.
#
# What eager costs
# ----------------
#
# Here eager is the chain of nodes. Between two nodes everything passes through
# memory: replacing masked updates by zeros reads and writes all updates.

shapes = {"square, n = 2R": (1024, 2048, 2048), "Llama": (32000, 4096, 2048)}
variants = NODES_OF_ONNX_RUNTIME.variants
chosen = {
    "ScatterND": variants["ScatterND"].cost,
    "ScatterNDOfShape": variants["fusebook OfShape, callback"].cost,
    "MaskedScatterNDOfShape": NODES_OF_ONNX_RUNTIME.cost,
}
moved = {}
for label, (R, D, n) in shapes.items():
    for name, cost in chosen.items():
        c = cost(4, R=R, D=D, n=n, law="uniform")
        moved.setdefault(name, {})[label] = (c.read + c.write) / 1e6
traffic = pd.DataFrame.from_dict(moved, orient="index")
table(traffic, "Traffic of the three graphs in float32, in MB", fold=False)

# %%

gain = traffic.loc["ScatterND"] / traffic.loc["MaskedScatterNDOfShape"]
claims(
    say(
        "Predicted from traffic: one node is {square:.1f} times as fast as "
        "the chain on the square, and {llama:.2f} times on the Llama's table.",
        square=gain.iloc[0],
        llama=gain.iloc[1],
    ),
)

# %%
# The kernel
# ----------
#
# Step one: a kernel and its launcher
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A program for each row of the output reads all indices, adds the updates of
# its row in registers, and writes the row once. The launcher does not allocate
# its output: its last argument says where to write.


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


# %%
# Step two: an operator
# ~~~~~~~~~~~~~~~~~~~~~
#
# An operator has names and types, and says where the shape of its output comes
# from. ``T`` stands for a type that is the same wherever it is named. The
# input ``shape`` is wanted on the host, since its *values* say how large the
# output is, and to fetch them from a GPU would mean to wait for it.

adding = custom_op(
    "AddRows",
    add_rows,
    inputs={"shape": torch.int64, "indices": torch.int64, "updates": "T"},
    outputs={"y": "T"},
    shape="shape",
    types={"T": (torch.float32, torch.float16, torch.bfloat16)},
    host=["shape"],
)


def one_node(op, **attributes):
    """A graph of one node of our domain, in float32."""
    kinds = {"shape": 7, "indices": 7}  # int64; the others are floats
    infos = {
        name: oh.make_tensor_value_info(name, kinds.get(name, 1), None)
        for name in [*op.inputs, *op.outputs]
    }
    node = oh.make_node(
        op.name,
        list(op.inputs),
        list(op.outputs),
        domain=op.domain,
        **attributes,
    )
    graph = oh.make_graph(
        [node],
        op.name,
        [infos[name] for name in op.inputs],
        [infos[name] for name in op.outputs],
    )
    opsets = [oh.make_opsetid("", 18), oh.make_opsetid(op.domain, 1)]
    return oh.make_model(graph, ir_version=10, opset_imports=opsets)


device = generator(0).device
k = torch.tensor([[3], [-1], [0], [3]], device=device)
u = torch.arange(8.0, device=device).view(4, 2)
session = Graph(one_node(adding), ops=[adding])
y = session({"shape": torch.tensor([5, 2]), "indices": k, "updates": u})["y"]
table(pd.DataFrame(y.cpu().numpy()), "The node's output y", fold=False)

# %%
# No more is needed. Between ONNX Runtime and Python stands a C file of a few
# hundred lines that knows no operator. The system's C compiler compiles it
# when it is first needed. It needs no header: ONNX Runtime's interface is a
# table of functions whose places never change. When a node runs, ONNX Runtime
# calls the launcher, a *callback*. It hands over pointers with shapes and
# types, which become tensors over *the same memory*: nothing is copied. On a
# GPU its stream is PyTorch's current stream while the launcher runs.
#
# Step three: what goes wrong
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# An exception in a launcher becomes the error of the run, with its message,
# and the session can be used again.


def picky(x, out):
    raise ValueError("picky: expected nothing at all; give less")


wants_less = custom_op(
    "Picky", picky, {"x": torch.float32}, {"y": torch.float32}, "x"
)
try:
    Graph(one_node(wants_less), ops=[wants_less])({"x": u})
    said = ""
except RuntimeError as error:
    said = str(error)
claims(
    say("ONNX Runtime says: {said}", said=said),
    claim(
        "The error of the run has the launcher's message.",
        "give less" in said,
    ),
)

# %%
# Step four: Fusebook's own kernels
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Fusebook's own kernels can be nodes, too. Their launchers allocate what they
# return, so each has a second form that takes its output. Here is Softmax,
# with an attribute:

Source(softmax_into)

# %%
# Step five: ahead of time
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# A program that serves a model may have no Python at all. ``python -m
# fusebook.ort build --arch 80,90,100`` compiles the kernels to machine code,
# which needs no GPU, and packs them into one file with a plan in C: *the
# library* on the rest of this page. It finds CUDA's driver when its first node
# runs, takes the code for the GPU that is there, and says so if it has none.
# What it calls for that is no matter of ONNX Runtime's, and would do the same
# in any program in C:

library_c = (C / "library.c").read_text()
Folded(
    "From machine code to a launch, in C",
    *(
        Listing(text, "c")
        for text in re.findall(
            r"(?ms)^static Status (?:load|launch)\(.*?^}", library_c
        )
    ),
)

# %%
# The price is that the choices are made beforehand. Triton compiles a kernel
# anew for another tile or for rows that begin at odd addresses; a library has
# the kernels that somebody listed. This is the list for one type.

listed = pd.DataFrame(
    [
        {
            "kernel": spec.function,
            "rows at multiples of 16 bytes": spec.aligned,
            "up to": spec.limit or "any",
            "warps": spec.warps,
        }
        for spec in specs(["float32"])
    ]
)
table(listed, "What is compiled for float32, for each architecture")

# %%
# Step six: from a model
# ~~~~~~~~~~~~~~~~~~~~~~
#
# A torch module that calls ``fusebook.softmax`` is exported with
#
# .. code-block:: python
#
#    torch.onnx.export(
#        module, inputs, dynamo=True,
#        custom_translation_table=fusebook.ort.translations(),
#    )
#
# and in a graph that somebody else has exported, ``fuse`` replaces the chain
# of four nodes by one. It leaves the chain alone where that would change the
# result: where the zeros are ones, say, or another node reads them.

fused = fuse(model("ScatterND"))
Listing(onnx.printer.to_text(fused))

# %%
# Is it right?
# ------------
#
# The three graphs, the one that was rewritten, and the node of step one run on
# this machine and are compared with `index_add_` in float64. Indices are
# uniform, follow Zipf's law, are all equal, or all masked. Freed memory of the
# output's size is filled with NaN before each run.

sizes = {"R": 12, "D": 33, "n": 40}
sessions = {name: Graph(model(name), ops=NODES) for name in MODELS}
sessions |= {"rewritten": Graph(fused, ops=NODES), "step one": session}
rows = []
for law in ("uniform", "zipf", "equal", "masked"):
    made = NODES_OF_ONNX_RUNTIME.make(
        generator(2), torch.float32, law=law, **sizes
    )
    yard = yardstick(NODES_OF_ONNX_RUNTIME, made)
    shape, indices, updates = made
    feeds = {
        "shape": torch.tensor(shape),
        "indices": indices,
        "updates": updates,
    }
    for name, graph in sessions.items():
        poison([updates.new_empty(shape)])
        verdict = yard.judge(graph(feeds)["y"])
        rows.append((law, name, verdict.error, verdict.tolerance, verdict.ok))
scores = pd.DataFrame(
    rows, columns=["indices", "graph", "error", "tolerance", "right"]
).set_index(["indices", "graph"])
table(scores, "Scores")

# %%
# The library that is compiled ahead of time is loaded by a process in which
# the import of torch, triton and fusebook fails; that was done where the times
# were measured.


def library():
    """For this GPU, compiled when it is asked for the first time."""
    major, minor = torch.cuda.get_device_capability()
    return cached((10 * major + minor,), ("float32",))


def without_python():
    return pd.DataFrame([alone(model(MODELS[2]), library())])


by_itself = measured("onnxruntime_alone", without_python)
table(by_itself, "A process without Python's GPU stack", fold=False)

# %%

claims(
    claim("All graphs are right on all indices.", scores["right"]),
    claim(
        "Without Python, the library computes every element rightly on a GPU.",
        (by_itself["wrong"] == 0)
        & (by_itself["modules"] == "none")
        & (by_itself["provider"] == "CUDAExecutionProvider"),
    ),
)

# %%
# How fast?
# ---------
#
# What a run costs before a kernel has begun
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A graph of one Identity on 4 KiB is the least that ONNX Runtime can be asked
# for. *Host* is the time until the run returns to Python; *call* waits for the
# GPU as well; *cold* is the time on the GPU alone.


def unary(name, domain):
    """A graph of one node that takes a matrix and returns one."""
    x, y = (oh.make_tensor_value_info(n, 1, ["M", "N"]) for n in "xy")
    node = oh.make_node(name, ["x"], ["y"], domain=domain)
    graph = oh.make_graph([node], name, [x], [y])
    opsets = [oh.make_opsetid("", 18), oh.make_opsetid("fusebook", 1)]
    return oh.make_model(graph, ir_version=10, opset_imports=opsets)


def timed(functions, **more):
    """A row for each function; times in microseconds."""
    kinds = ("cold", "call", "host")
    times = timing.measure(functions, warmup=20, repeat=100, kinds=kinds)
    rows = [{"run": name, **more} for name in functions]
    for row in rows:
        for kind in kinds:
            if (q := times[row["run"]][kind]) is not None:
                row[f"{timing.COLUMN[kind]}_20"] = q.q20 * 1e6
                row[timing.COLUMN[kind]] = q.q50 * 1e6
                row[f"{timing.COLUMN[kind]}_80"] = q.q80 * 1e6
    return rows


def overhead():
    x = torch.randn(8, 128, device="cuda")

    def bound(name, domain="fusebook", **given):
        graph = Graph(unary(name, domain), **given)
        return graph.bind({"x": x}, {"y": torch.empty_like(x)})

    x_in, y_out = {"x": torch.float32}, {"y": torch.float32}
    empty = custom_op("Nothing", lambda x, out: None, x_in, y_out, "x")
    runs = {
        "Identity": bound("Identity", ""),
        "Softmax of ONNX Runtime": bound("Softmax", ""),
        "Softmax, ahead of time": bound("Softmax", library=library()),
        "a callback that does nothing": bound("Nothing", ops=[empty]),
        "Softmax, callback": bound("Softmax", ops=NODES),
        "fusebook.softmax from torch": lambda: fusebook.softmax(x),
    }
    return pd.DataFrame(timed(runs))


before = measured("onnxruntime_overhead", overhead)
least = before.set_index("run")[["launch_us", "latency_us", "gpu_us"]]
table(least, "Graphs of one node on 4 KiB, in microseconds", fold=False)

# %%
# An Identity whose result leaves the graph is a copy. The callback adds
# Python: to enter it, to make a tensor for each input and output, and then
# what the launcher does anyway.
#
# Three sessions
# ~~~~~~~~~~~~~~
#
# The source timed the run of its sessions, so this is the *call*: one run,
# waited for. All outputs were compared with float64 on the GPU before and
# after they were timed.

sweep = asked.results()
table(
    tables.times(sweep, "call", words=True),
    "Time of a run, in microseconds",
    fold=False,
)

# %%
by_run = tables.times(sweep, "call")
faster = by_run.rdiv(by_run.pop("ScatterND"), axis=0)
faster.attrs["best"] = "most in a row"
table(faster, "Times as fast as the standard graph", fold=False)

# %%
# These times include the host's, which varies with what else the machine does;
# the quantiles are in the file below.

ways = [name for name in variants if "OfShape" not in name]
plots.times(
    tables.where(sweep, dtype=sweep["dtype"].iloc[0], variant=ways),
    x="R",
    xlabel="rows of the output, R",
)

# %%
# The Llama's table
# ~~~~~~~~~~~~~~~~~
#
# 2048 updates for 32000 rows of 4096 numbers:

llama = asked.results(config="32000x4096x2048", dtype="float32,float16")
table(
    tables.times(llama, "call", words=True).droplevel("law"),
    "The gradient of an embedding: time of a run, in microseconds",
    fold=False,
)

# %%
# The source, in the gallery of `onnx-extended
# <https://github.com/sdpython/onnx-extended>`__, compares the node with a mask
# with the node without one, which needs two more nodes for the masking.

one_or_three = {
    how: tables.ratio(
        pd.concat([sweep, llama]),
        f"fusebook OfShape, {how}",
        f"fusebook Masked, {how}",
        kind="call",
    )
    for how in ("callback", "ahead of time")
}
claims(
    *(
        holds(
            '"The fused operator with mask seems more efficient in any case '
            'compare to the fused operator without mask" (the source, 2024): '
            "here by a call, {how}, it is {least:.2f} to {most:.2f} times as "
            "fast.",
            gain > 1,
            how=how,
            least=gain.min(),
            most=gain.max(),
        )
        for how, gain in one_or_three.items()
    )
)

# %%
# Captured
# ~~~~~~~~
#
# ONNX Runtime can record a run in a :term:`CUDA graph` and replay it. Then no
# node is executed and no callback is called: the recorded launches run by
# themselves. Memory that a launcher allocated is kept as long as the session.
# The price is one set of shapes, with inputs and outputs at fixed places, and
# what a launcher decides by values on the host is decided once.


def captured():
    rows, options = [], {"enable_cuda_graph": "1"}
    for R, D, n in ((256, 512, 512), (32000, 4096, 2048)):
        made = NODES_OF_ONNX_RUNTIME.make(
            generator(0), torch.float32, R=R, D=D, n=n, law="uniform"
        )
        shape, indices, updates = made
        feeds = {
            "shape": torch.tensor(shape),
            "indices": indices,
            "updates": updates,
        }
        ways = {
            "ScatterND": (model("ScatterND"), {}),
            "Masked, callback": (model(MODELS[2]), {"ops": NODES}),
            "Masked, ahead of time": (
                model(MODELS[2]),
                {"library": library()},
            ),
        }
        runs, right = {}, {"Identity": True}
        for name, (graph, how) in ways.items():
            y = updates.new_empty(shape)
            run = Graph(graph, options=options, **how).bind(feeds, {"y": y})
            for _ in range(3):
                run()
            # Values change in place, and the captured graph reads them anew;
            # what it does not write stays NaN.
            updates.mul_(-1.5)
            y.fill_(torch.nan)
            yard = yardstick(NODES_OF_ONNX_RUNTIME, made)
            verdict = yard.judge(run()["y"])
            runs[name], right[name] = run, verdict.ok
        x = torch.zeros(8, 128, device=updates.device)
        graph = Graph(unary("Identity", ""), options=options)
        runs["Identity"] = graph.bind({"x": x}, {"y": torch.empty_like(x)})
        sizes = {"R": R, "D": D, "n": n}
        rows += [
            row | {"right": right[row["run"]]} for row in timed(runs, **sizes)
        ]
    return pd.DataFrame(rows)


replayed = measured("onnxruntime_captured", captured)
names = replayed[["R", "D", "n"]].itertuples(index=False)
runs = replayed.assign(size=[f"{R}x{D}, {n}" for R, D, n in names])
table(
    runs.pivot_table("latency_us", "run", "size", sort=False),
    "Captured in a CUDA graph: time of a run, in microseconds",
    fold=False,
)

# %%
# What each step was worth
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# The steps of this page from the chain to the roof, timed in turn in one
# process, and each checked. A session that is given arrays of NumPy copies
# them over the bus, and its result back. In all other rows memory of the GPU
# is bound.

ON_THE_HOST = "the chain, arrays of NumPy"
OURS_CALLED = "Fusebook's kernels, callback"
OURS_BUILT = "Fusebook's kernels, ahead of time"
SIZES = (256, 512, 512), (32000, 4096, 2048)


# site: fold
def steps_of_runs():
    import onnxruntime

    # Otherwise a lookup fails in every run, by an exception.
    plainly = onnxruntime.RunOptions()
    plainly.add_run_config_entry("gpu_graph_id", "0")
    parts = []
    for R, D, n in SIZES:
        made = NODES_OF_ONNX_RUNTIME.make(
            generator(0), torch.float32, R=R, D=D, n=n, law="uniform"
        )
        yard = yardstick(NODES_OF_ONNX_RUNTIME, made)
        shape, indices, updates = made
        feeds = {
            "shape": torch.tensor(shape),
            "indices": indices,
            "updates": updates,
        }
        arrays = {name: feed.cpu().numpy() for name, feed in feeds.items()}
        run = Graph(model("ScatterND")).session.run
        steps = {ON_THE_HOST: partial(run, ["y"], arrays, plainly)}
        node = model(MODELS[2])
        for captured in (False, True):
            for name, graph, how in (
                ("the chain", model("ScatterND"), {}),
                ("step one, callback", one_node(adding), {"ops": [adding]}),
                (OURS_CALLED, node, {"ops": NODES}),
                (OURS_BUILT, node, {"library": library()}),
            ):
                how |= {"options": {"enable_cuda_graph": str(int(captured))}}
                y = updates.new_empty(shape)
                bound = Graph(graph, **how).bind(feeds, {"y": y})
                for _ in range(3 * captured):
                    bound()
                y.fill_(torch.nan)
                steps[f"{name}, captured" if captured else name] = bound
        from_torch = variants["fusebook from torch"].run
        steps["Fusebook's kernels, from torch"] = partial(from_torch, *made)

        def right(got, yard=yard, on=updates.device):
            y = got["y"] if isinstance(got, dict) else got
            y = y[0] if isinstance(y, list) else y
            return yard.judge(torch.as_tensor(y, device=on)).ok

        frame = bench.staircase(steps, right, kind="call", repeat=15)
        del steps[ON_THE_HOST]  # most of its work is not the device's
        times = timing.measure(steps, repeat=15, kinds=("cold",))
        frame["cold us"] = frame["step"].map(
            {k: 1e6 * q["cold"].q50 for k, q in times.items() if q["cold"]}
        )
        parts.append(frame.assign(R=R, D=D, n=n))
    return pd.concat(parts, ignore_index=True)


try:
    stairs = measured("onnxruntime_steps", steps_of_runs)
except NoResults:
    stairs = None

# %%


def staircase():
    """A row a step, and the roof; columns by size and clock."""
    on, columns, roofs = stairs.attrs["origin"].machine, {}, {}
    for R, D, n in SIZES:
        rows = stairs[stairs["R"] == R].set_index("step")
        cost = NODES_OF_ONNX_RUNTIME.cost(4, R=R, D=D, n=n, law="uniform")
        for clock, column in (("call", "us"), ("device", "cold us")):
            name = f"{R} x {D}, {n}: {clock}"
            columns[name] = rows[column].astype(float)
            roofs[name] = 1e6 * on.memory_seconds(cost)
    nodes = len(model("ScatterND").graph.node)
    lines = {
        "the chain": nodes,
        "step one": lines_of(own_row, add_rows),
        "Fusebook": lines_behind(fusebook.masked_scatter_nd_eager),
    }
    shown = pd.DataFrame(columns)
    shown.loc["the roof"] = roofs
    # What is captured launches what its session launched before.
    most = stairs.groupby("step")["registers"].max()
    source = [step.removesuffix(", captured") for step in shown.index]
    shown["registers a thread"] = most.reindex(source).to_numpy()
    shown["lines of code"] = [
        next((n for of, n in lines.items() if step.startswith(of)), None)
        for step in shown.index
    ]
    return shown


table(
    staircase(),
    "Each step, in microseconds: a call that is waited for, and the device's "
    "time of it; a node counts as a line",
    fold=False,
) if stairs is not None else claims(
    say(
        "The steps of this page are not recorded yet: `nox -s record -- "
        "onnxruntime` records them."
    )
)

# %%
# Registers are the most of both sizes, and are known only of kernels that
# Triton launches: ONNX Runtime's own, and those that are compiled ahead of
# time, are loaded by C code. A run with arrays of NumPy is mostly copies and
# has no time of the device here.

CALLED = ("the chain", OURS_CALLED, OURS_BUILT)
worth = None if stairs is None else stairs.set_index(["R", "step"])["us"]
if stairs is not None:
    by_device = stairs.set_index(["R", "step"])["cold us"]
    # What a CUDA graph saves of a call.
    by_graph = pd.DataFrame(
        {
            at: {
                R: worth[R, at] - worth[R, f"{at}, captured"]
                for R, *_ in SIZES
            }
            for at in CALLED
        }
    )
claims(
    claim("Every step is right.", stairs["right"]),
    *(
        say(
            "At {R} x {D} with {n} updates, by a call: binding memory makes "
            "the chain {bound:.1f} times as fast, step one's kernel makes "
            "that another {one:.1f} times as fast, Fusebook's kernels that "
            "{ours:.2f} times, and the library, ahead of time, that "
            "{built:.2f} times. By the device step one is {kernel:.0f} times "
            "as fast as the chain. A CUDA graph saves {chain:.0f} us of the "
            "chain's call, {callback:.0f} of that by the callback and "
            "{library:.0f} of the library's.",
            R=R,
            D=D,
            n=n,
            bound=worth[R, ON_THE_HOST] / worth[R, "the chain"],
            one=worth[R, "the chain"] / worth[R, "step one, callback"],
            ours=worth[R, "step one, callback"] / worth[R, OURS_CALLED],
            built=worth[R, OURS_CALLED] / worth[R, OURS_BUILT],
            kernel=by_device[R, "the chain"]
            / by_device[R, "step one, callback"],
            chain=by_graph.loc[R, "the chain"],
            callback=by_graph.loc[R, OURS_CALLED],
            library=by_graph.loc[R, OURS_BUILT],
        )
        for R, D, n in SIZES
    ),
    claim(
        "At both sizes a CUDA graph saves more of a call by the callback than "
        "of the chain's four nodes, and least of the library's.",
        (by_graph[OURS_CALLED] > by_graph["the chain"])
        & (by_graph["the chain"] > by_graph[OURS_BUILT]),
        fatal=False,
    ),
    say(
        "Compare times within one table. By a call the callback, captured, "
        "takes {here:.0f} us at 256 x 512 where ten steps take turns, and "
        "{there:.0f} in the table before, where four runs do.",
        here=worth[256, f"{OURS_CALLED}, captured"],
        there=replayed.set_index(["R", "run"])["latency_us"][
            256, "Masked, callback"
        ],
    ),
) if stairs is not None else None

# %%
provenance(
    *(sweep, llama, before, by_itself, replayed),
    *([] if stairs is None else [stairs]),
)

# %%
downloads(sweep, "onnxruntime_nodes")

# %%
# How far from the roof?
# ----------------------
#
# The :term:`roof` is about memory only, and a run has more to do. So the time
# of an Identity is subtracted before a run is compared with the roof of its
# traffic: the smallest that we measured, so that we never subtract too much.
# The launch of the node remains in it, which shows where updates are few.

of_identity = replayed[replayed["run"] == "Identity"]["latency_us"]
identity = min(least.loc["Identity", "latency_us"], of_identity.min())
everything = tables.together(sweep, llama)
ours = tables.where(
    everything,
    variant=["fusebook Masked, callback", "fusebook Masked, ahead of time"],
    dtype="float32",
    status="ok",
)
held = ours.assign(
    size=tables.label(ours),
    times=(ours["latency_us"] - identity) / ours["roof_us"],
)
table(
    held.pivot_table("times", "size", "variant", sort=False),
    "A run less the Identity, over the roof",
    fold=False,
)

# %%
# Without what a run costs, by events on the GPU:

plots.dots(tables.where(everything, dtype="float32", variant=ways), of="roof")

# %%
# Lessons
# -------
#
# What fusion gives, and what leaving ONNX Runtime's scatter gives
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# From ScatterND to ScatterNDOfShape another scatter kernel runs, which also
# writes the zeros; Equal and Where stay as they were. From there to
# MaskedScatterNDOfShape is fusion of the mask. The times are those of the GPU.
# (:doc:`plot_103_scatter_nd` goes from ONNX Runtime to PyTorch's chain, and
# from there to our kernel.)


def step(a, b, df=everything, kind="cold"):
    """How many times as fast b is as a."""
    return tables.ratio(df, a, b, kind)


OF_SHAPE, MASKED = "fusebook OfShape, callback", "fusebook Masked, callback"
BUILT = "fusebook Masked, ahead of time"
apart = pd.DataFrame(
    {
        "leaving ONNX Runtime's ScatterND": step("ScatterND", OF_SHAPE),
        "fusing the mask": step(OF_SHAPE, MASKED),
        "both": step("ScatterND", MASKED),
    }
)
table(apart, "Times as fast on the GPU, by what was changed", fold=False)

# %%

LLAMA = "32000x4096x2048 uniform"
SMALL = "256x512x512 uniform"


def at(series, label):
    """The value at a size, in float32."""
    return series.get((label, "float32"))


def over_identity(run):
    """Host time of a run beyond that of the Identity."""
    return least.loc[run, "launch_us"] - least.loc["Identity", "launch_us"]


near_roof = held[held["size"] == LLAMA].set_index("variant")["times"]
big = runs[(runs["R"] == 32000) & runs["run"].str.startswith("Masked")]
roof = ours[ours["R"] == 32000]["roof_us"].iloc[0]
replayed_near_roof = (big.set_index("run")["latency_us"] - identity) / roof
replay = runs.set_index(["run", "size"])["latency_us"]
nothing = over_identity("a callback that does nothing")
softmax = over_identity("Softmax, callback")
small_chain = tables.where(
    everything, variant="ScatterND", R=256, D=512, dtype="float32"
)["latency_us"].iloc[0]
claims(
    claim(
        "Replacing ONNX Runtime's ScatterND and its zeros makes the graph "
        "{least:.0f} to {most:.0f} times as fast on the GPU, and fusing the "
        "mask another {few:.1f} to {many:.1f} times: less at every size.",
        apart["leaving ONNX Runtime's ScatterND"] > apart["fusing the mask"],
        headline=True,
        least=apart["leaving ONNX Runtime's ScatterND"].min(),
        most=apart["leaving ONNX Runtime's ScatterND"].max(),
        few=apart["fusing the mask"].min(),
        many=apart["fusing the mask"].max(),
    ),
    target(
        "At 32000 x 4096 our operator is {times:.1f} times as fast as the "
        "chain, by the device's time; the target was 10.",
        at(apart["both"], LLAMA) >= 10,
        times=at(apart["both"], LLAMA),
    ),
    target(
        "At 256 x 512 a run with the library compiled ahead of time is "
        "{times:.1f} times as fast as the chain's; the target was 6.",
        at(step("ScatterND", BUILT, kind="call"), SMALL) >= 6,
        times=at(step("ScatterND", BUILT, kind="call"), SMALL),
    ),
    target(
        "At 256 x 512 a run with the callback is {times:.1f} times as fast as "
        "the chain's; the target was 4.",
        at(step("ScatterND", MASKED, kind="call"), SMALL) >= 4,
        times=at(step("ScatterND", MASKED, kind="call"), SMALL),
    ),
    target(
        "At 256 x 512 a run with the callback that is captured in a CUDA "
        "graph is {times:.1f} times as fast as the chain's; the target was 4.",
        small_chain / replay["Masked, callback", "256x512, 512"] >= 4,
        times=small_chain / replay["Masked, callback", "256x512, 512"],
    ),
    target(
        "At 32000 x 4096 a run with the library compiled ahead of time is "
        "{times:.1f} times as fast as the chain's; the target was 10.",
        at(step("ScatterND", BUILT, kind="call"), LLAMA) >= 10,
        times=at(step("ScatterND", BUILT, kind="call"), LLAMA),
    ),
    target(
        "At 32000 x 4096 a run with the library, less an Identity, takes "
        "{times:.2f} times the roof; the target was 1.15.",
        near_roof[BUILT] <= 1.15,
        times=near_roof[BUILT],
    ),
    target(
        "At 32000 x 4096 a run with the callback, less an Identity, takes "
        "{times:.2f} times the roof; the target was 1.15.",
        near_roof[MASKED] <= 1.15,
        times=near_roof[MASKED],
    ),
    target(
        "Captured in a CUDA graph, a run at 32000 x 4096, less an Identity, "
        "takes up to {times:.2f} times the roof; the target was 1.15.",
        replayed_near_roof <= 1.15,
        times=replayed_near_roof.max(),
    ),
    target(
        "To launch Softmax by the library changes the host's time by "
        "{more:+.1f} us from that of an Identity; the target was at most +10.",
        over_identity("Softmax, ahead of time") <= 10,
        more=over_identity("Softmax, ahead of time"),
    ),
    target(
        "To launch Softmax changes the host's time of a callback by "
        "{more:+.1f} us from one that does nothing; the target was at most "
        "+12.",
        softmax - nothing <= 12,
        more=softmax - nothing,
    ),
    claim("Replayed graphs read new values and are right.", replayed["right"]),
    say(
        "Against an Identity, a callback that does nothing costs the host "
        "{nothing:+.0f} microseconds, one that launches Softmax "
        "{softmax:+.0f}, and Softmax compiled ahead of time {built:+.0f}.",
        nothing=nothing,
        softmax=softmax,
        built=over_identity("Softmax, ahead of time"),
    ),
)

# %%
# Where it does not win
# ~~~~~~~~~~~~~~~~~~~~~
#
# The library compiled ahead of time has fewer ways to scatter than Python has:
# with very many updates it adds atomically where the callback groups them
# first.

table(
    tables.losses(
        tables.where(everything, variant=[MASKED, BUILT]), BUILT, "cold"
    ),
    "Points where the callback's kernels are faster, on the GPU",
    fold=False,
)

# %%

many = tables.where(sweep, n=lambda n: n >= 8192)
some = tables.where(everything, n=lambda n: n <= 4096)
fewer = tables.ratio(some, BUILT, MASKED)
claims(
    claim(
        "With 8192 updates or more the callback's kernels are faster than the "
        "library's by the device's clock; with 4096 or fewer the library's "
        "take {least:.2f} to {most:.2f} times their time.",
        tables.ratio(many, MASKED, BUILT) < 1,
        of=tables.ratio(everything, MASKED, BUILT),
        least=fewer.min(),
        most=fewer.max(),
    ),
    claim(
        "With 4096 updates or fewer a run with the library is faster than one "
        "with the callback; with more it takes {least:.2f} to {most:.2f} "
        "times its time.",
        tables.ratio(some, BUILT, MASKED, "call") < 1,
        of=tables.ratio(everything, BUILT, MASKED, "call"),
        least=tables.ratio(many, BUILT, MASKED, "call").min(),
        most=tables.ratio(many, BUILT, MASKED, "call").max(),
    ),
)

# %%
# What to take along:
#
# - Measure an empty run before you tune what is in it.
# - A captured run leaves the host out, nodes and callbacks alike. Capture what
#   has fixed shapes, a callback's run first of all.
# - Let whoever runs the graph allocate. A launcher that takes ``out`` can be
#   used anywhere; from one that allocates, the result has to be copied.
# - A callback is for trying an operator, a library for shipping it: the same
#   kernels, though fewer of them.
#
# Two limits are ONNX Runtime's. A domain can be registered once in a session,
# so the callback and the library exclude each other there. And an empty run
# has a price: that of an Identity in the table of graphs of one node, or, if
# it is captured, in the table of captured runs.
#
# Exercises
# ---------
#
# Each has a function that is wrong, and a check that says so. Mend it and run
# the page again. A C compiler is needed, a GPU is not.
#
# 1. An attribute
# ~~~~~~~~~~~~~~~
#
# A node may carry numbers. This launcher gets ``alpha``, and forgets it.


def leaky(x, out, *, alpha):
    torch.clamp(x, min=0, out=out)


def as_node(launcher, **attributes):
    """Run a launcher of one input as a node with attributes."""
    kinds = {"x": torch.float32}, {"y": torch.float32}
    op = custom_op("Mine", launcher, *kinds, "x", attributes=attributes)
    graph = Graph(one_node(op, **attributes), ops=[op])
    return lambda x: graph({"x": x})["y"]


x = torch.randn(7, 9, generator=generator(3), device=device)
exercise(
    "leaky lets a part of what is below zero through",
    as_node(leaky, alpha=0.125),
    lambda x: torch.where(x > 0, x, x * 0.125),
    [(x,), (x[:0],)],
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


def scattered(launcher):
    """Run a launcher as a node that masks by 2."""
    kinds = MASKED_SCATTER_ND.inputs | {"indices": torch.int64}
    op = custom_op(
        "Mine",
        launcher,
        kinds | {"updates": torch.float32},
        {"y": torch.float32},
        "shape",
        attributes={"maskedValue": int},
        host=["shape"],
    )
    graph = Graph(one_node(op, maskedValue=2), ops=[op])
    return lambda shape, indices, updates: graph(
        {"shape": torch.tensor(shape), "indices": indices, "updates": updates}
    )["y"]


def masked_by_two(shape, indices, updates):
    y = updates.new_zeros(shape)
    rows = indices[:, 0] % shape[0]
    kept = torch.where(indices == 2, 0, updates)
    return y.index_add_(0, rows, kept)


drawn = torch.tensor([[0], [2], [-1], [3], [2], [-1]], device=device)
exercise(
    "masked_by leaves out what equals its attribute, and nothing else",
    scattered(masked_by),
    masked_by_two,
    [((5, 9), drawn, x[:6])],
)

# %%
solution("solutions/plot_501_onnxruntime.py")
