# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]", "scikit-learn"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
From NumPy to C++ and CUDA: torch.compile
=========================================

One line of NumPy says which centre is nearest to each point. `torch.compile`
turns it into C++ and into Triton without a change, or nearly so. This page
compiles that line for the CPU and for the GPU and shows what each step
removes: passes over memory, bytes of a number, copies to and from the GPU. It
asks of every statement of the announcement of 2023 whether it still holds. The
kernel that one would write by hand, and k-means to its end, are
:doc:`plot_303_kmeans`.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them, and so are those of its host.

For whom: those who have NumPy code and want it on a GPU without writing a
kernel.

Read before: 002, 101.
"""

# %%
# The problem
# -----------
#
# Points :math:`x_i` with d coordinates, centres :math:`c_j`, k of them:
#
# .. math::
#
#    \ell_i = \arg\min_j |x_i - c_j|, \qquad
#    c_j' = \frac{1}{n_j} \sum_{i:\; \ell_i = j} x_i
#
# The first half is the assignment, the second the update; k-means alternates
# between them until the centres stand still. The assignment in NumPy is one
# line, found in many a textbook, and it was the example when Quansight and
# PyTorch announced in 2023 that ``torch.compile`` takes NumPy code:
# `Compiling NumPy code into C++ or CUDA via torch.compile
# <https://pytorch.org/blog/compiling-numpy-code/>`_. This page follows the
# announcement and tests it.

# sphinx_gallery_tags = ["torch.compile", "NumPy"]
# sphinx_gallery_parallel = False
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots
from fusebook.cards.kmeans import KMEANS_ASSIGN
from fusebook.measure.inputs import generator
from fusebook.page import (
    Folded,
    Listing,
    claim,
    claims,
    holds,
    measured,
    provenance,
    say,
    study,
    table,
    target,
)

import numpy as np
import pandas as pd
import torch

asked = study(KMEANS_ASSIGN, config="plane", dtype="float32", repeat=20)


def nearest(X, means):
    return np.argmin(np.linalg.norm(X - means[:, None], axis=2), axis=0)


def planted(n, middle, seed=0):
    """n points around each of the middles, and where each belongs."""
    label = np.repeat(np.arange(len(middle)), n)
    noise = np.random.default_rng(seed).standard_normal((len(label), 2))
    return np.asarray(middle)[label] + noise, label


DIAGONAL = np.array([[5.0, 5.0], [10.0, 10.0]])  # as it was published
CROOKED = np.array([[5.0, 1.0], [0.0, 9.0], [-8.0, 3.0]])
X, truth = planted(2000, CROOKED)
title = "Planted clusters and their centres"
plots.clusters(X[::5], truth[::5], CROOKED, title=title)

# %%
# Which clusters?
# ~~~~~~~~~~~~~~~
#
# The published example plants two clusters, around (5, 5) and (10, 10). Both
# lie on the diagonal, so the picture is its own mirror image. If code
# exchanges x and y somewhere, every label stays right, and nobody can see the
# mistake. Our clusters are not symmetric, on purpose.


def axes_exchanged(X, means):
    """A mistake: it takes the coordinates of the centres in turn."""
    return nearest(X, means[:, ::-1])


straight, where_straight = planted(100_000, DIAGONAL)
on_diagonal = nearest(straight, DIAGONAL)
claims(
    claim(
        "With both centres on the diagonal, the mistake changes no label.",
        np.array_equal(axes_exchanged(straight, DIAGONAL), on_diagonal),
    ),
    claim(
        "On our clusters the mistake gives {share:.0%} of the points a wrong "
        "label.",
        (axes_exchanged(X, CROOKED) != truth).mean() > 0.5,
        share=(axes_exchanged(X, CROOKED) != truth).mean(),
    ),
    claim(
        "On our clusters the line of NumPy labels more than 99 % of the "
        "points as they were planted.",
        (nearest(X, CROOKED) == truth).mean() > 0.99,
    ),
    say(
        "Of {n} points around the published centres, {lost} lie nearer to the "
        "other centre, so no code that looks for the nearest can label them "
        "as they were planted.",
        n=len(straight),
        lost=int((on_diagonal != where_straight).sum()),
    ),
)

# %%
# What eager costs
# ----------------
#
# NumPy
# ~~~~~
#
# Each operation of the line is a pass over memory, which writes its whole
# result. For n points in the plane and two centres, in float64:

n, d, k = 20_000_000, 2, 2
passes = pd.DataFrame(
    [
        ("X - means[:, None]", n * d * 8, n * k * d * 8),
        ("its squares", n * k * d * 8, n * k * d * 8),
        ("their sum over axis 2", n * k * d * 8, n * k * 8),
        ("the square root", n * k * 8, n * k * 8),
        ("argmin over axis 0", n * k * 8, n * 8),
    ],
    columns=["operation", "read", "written"],
).set_index("operation")
chain = passes.to_numpy().sum()
least = KMEANS_ASSIGN.cost(
    8, n=n, d=d, k=k, labels="int64", law="blobs"
)  # the points once, the labels once
least = least.read + least.write
table(passes / 1e6, "What the line moves, in megabytes", fold=False)

# %%
say(
    "In all {chain:.2f} GB. The points have to be read once and the labels "
    "written once, {least:.2f} GB. So by its traffic the fused line can be "
    "{gain:.1f} times as fast, on the same single core.",
    chain=chain / 1e9,
    least=least / 1e9,
    gain=chain / least,
)

# %%
# Compiled for the CPU
# ~~~~~~~~~~~~~~~~~~~~
#
# The line runs in a program of its own, so that its log can be read and its
# threads can be counted. The program is NumPy, and one line more.
# ``TORCH_LOGS=output_code`` in its environment shows what :term:`Inductor`
# generated. (The number of threads is given to the compiler, since it is
# written into the code. Two more settings save time on a machine that has
# compiled nothing yet.)

SCRIPT = """
import json, sys, time
import numpy as np
import torch


def nearest(X, means):
    return np.argmin(np.linalg.norm(X - means[:, None], axis=2), axis=0)


def seconds(function, tries=5):
    # The median of a call, and what it returns.
    taken = []
    for _ in range(tries):
        start = time.perf_counter()
        result = function()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[tries // 2], result


torch._dynamo.config.numpy_default_float = "float32"  # for later
rng = np.random.default_rng(0)
means = np.array([[5.0, 1.0], [0.0, 9.0]])
X = np.repeat(means, int(sys.argv[1]) // 2, axis=0)
X = X + rng.standard_normal(X.shape)
row = {"by itself": torch.get_num_threads()}
more = torch.compile(lambda x: x + np.zeros(3), backend="eager")
row["with zeros"] = more(np.ones(3, np.float32)).dtype.name
for way in sys.argv[2:]:
    dtype, threads = way.split(":")
    if dtype != row.get("dtype"):
        x, m = X.astype(dtype), means.astype(dtype)
        row["NumPy"], labels = seconds(lambda: nearest(x, m), 3)
    row |= {"dtype": dtype, "threads": int(threads)}
    torch.compiler.reset()
    torch.set_num_threads(int(threads))
    compiled = torch.compile(nearest, options={"cpp.threads": int(threads)})
    row["same"] = bool((compiled(x, m) == labels).all())
    row["compiled"], _ = seconds(lambda: compiled(x, m))
    print(json.dumps(row))
"""


# site: fold
def generated(log):
    """The code in a log of output_code, without the log's own columns."""
    lines = re.findall(r"^.*?\[__output_code\] ?(.*)$", log, re.MULTILINE)
    return "\n".join(lines)


# site: fold
def run(script, *argv, timeout=240):
    """A program in a process of its own: what it printed, what it logged."""
    more = {
        "TORCH_LOGS": "output_code",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_INTERPRET": "0",
    }
    # Files, not pipes: a compiler that outlives its parent keeps a pipe open.
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as log,
    ):
        child = subprocess.Popen(
            [sys.executable, "-c", script, *argv],
            stdout=out,
            stderr=log,
            env={**os.environ, **more},
            start_new_session=True,
        )
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # with its compilers
            raise
        texts = []
        for file in (out, log):
            file.seek(0)
            texts.append(file.read())
    if code:
        raise RuntimeError(texts[1].strip().splitlines()[-1])
    return texts[0], generated(texts[1])


# site: fold
def kernel_of(code, begin):
    """The last kernel among the rest of what is generated."""
    found = re.findall(rf"{begin}.*?^'''", code, re.DOTALL | re.MULTILINE)
    return found[-1].rstrip("'").rstrip() if found else "(nothing)"


def compiled_for_the_cpu():
    # As many as in 2023 where a record is made; a builder has less time.
    points = 20_000_000 if generator().device.type == "cuda" else 1_000_000
    most = os.cpu_count() or 1
    ways = [f"float64:{n}" for n in sorted({1, 2, most})]
    out, code = run(SCRIPT, str(points), "float32:2", *ways)
    frame = pd.DataFrame([json.loads(line) for line in out.splitlines()])
    frame["points"], frame["cores"] = points, most
    frame["torch"] = torch.__version__
    frame["code"] = kernel_of(code, 'extern "C"')
    return frame


cpu = measured("kmeans_cpu", compiled_for_the_cpu)


def by_threads(frame):
    return pd.DataFrame(
        {
            "dtype": frame["dtype"],
            "threads": frame["threads"],
            "NumPy, ms": frame["NumPy"] * 1e3,
            "compiled, ms": frame["compiled"] * 1e3,
            "times as fast": frame["NumPy"] / frame["compiled"],
        }
    ).sort_values(["dtype", "threads"], ascending=[False, True])


def where_and_when(frame):
    when = "just now" if frame.attrs["origin"].measured else "as recorded"
    return (
        f"{frame['points'][0]} points on a CPU of {frame['cores'][0]} cores, "
        f"a fresh result a call, torch {frame['torch'][0]}, {when}"
    )


threads = by_threads(cpu).set_index(["dtype", "threads"])
table(threads, where_and_when(cpu), fold=False)

# %%
# The code is a loop over points, several at a time in vector registers, shared
# among threads by OpenMP; the two centres are unrolled in its body.
# Differences and distances exist in registers only.

code = cpu["code"][0]
Folded("The C++ that was generated", Listing(code, "cpp"))

# %%
times = threads["times as fast"]
there = times.loc["float64"]
claims(
    holds(
        "The generated C++ is one loop over all points (2023).",
        len(re.findall(r"for\(int64_t x0=", code)) == 1,
    ),
    holds(
        "Compiled for several threads, OpenMP shares the loop among them "
        "(2023).",
        "#pragma omp for" in code,
    ),
    holds(
        "Unless told otherwise PyTorch uses all cores (2023).",
        cpu["by itself"][0] == cpu["cores"][0],
    ),
    holds(
        "On one core the compiled line is at least 9 times as fast as NumPy, "
        "in float64, with 20 million points (2023): here {gain:.1f} times "
        "with {points}.",
        there[1] >= 9,
        gain=there[1],
        points=cpu["points"][0],
    ),
    holds(
        "On all 32 cores it is at least 57 times as fast as NumPy (2023): "
        "here {gain:.0f} times on {cores} cores.",
        there.iloc[-1] >= 57,
        gain=there.iloc[-1],
        cores=cpu["cores"][0],
    ),
    target(
        "On two threads the compiled line is {gain:.0f} times as fast as "
        "NumPy in the record; 10 times was the target.",
        there[2] >= 10,
        gain=there[2],
    ),
    claim("The compiled line gives NumPy's labels.", cpu["same"]),
    say(
        "In float32 the record has {gain:.0f} times NumPy on two threads: "
        "twice as many points fit into a vector register, and points, but not "
        "labels, have half as many bytes.",
        gain=times["float32", 2],
    ),
)

# %%
# Compiled for CUDA
# ~~~~~~~~~~~~~~~~~
#
# The announcement calls the compiled function under ``torch.device("cuda")``,
# and that is all. Does that still work? Any device will tell, the CPU too:


def attempt(function, *values, device="cpu"):
    """What a compiled function gives, or what went wrong in one line."""
    torch.compiler.reset()
    compiled = torch.compile(function, backend="eager")
    try:
        with torch.device(device):
            return compiled(*values)
    except Exception as error:
        found = re.search(r"'ndarray' object[^\")]*", str(error))
        return found.group(0) if found else type(error).__name__


def squared(X, means):
    return X**2


def nearest_by_name(X, means):
    """The same line, its operator written as a function."""
    far = np.linalg.norm(np.subtract(X, means[:, None]), axis=2)
    return np.argmin(far, axis=0)


some, its_means = X[::20], CROOKED
written = attempt(nearest, some, its_means)
named = attempt(nearest_by_name, some, its_means)
power = attempt(squared, some, its_means)
claims(
    holds(
        "The line runs under a device as it stands (2023).",
        isinstance(written, np.ndarray),
    ),
    say("PyTorch {v} says: {why}.", v=torch.__version__, why=str(written)[:60])
    if isinstance(written, str)
    else say("PyTorch {v} runs it.", v=torch.__version__),
    say("`X**2` says: {why}.", why=str(power)[:60])
    if isinstance(power, str)
    else say("`X**2` runs."),
    claim(
        "With `np.subtract` in place of the minus sign the line runs.",
        isinstance(named, np.ndarray)
        and np.array_equal(named, nearest(some, its_means)),
    ),
)

# %%
# Where an operator such as ``-`` or ``**`` fails, ``torch.device`` is the
# cause: under it, Dynamo, the part of ``torch.compile`` that reads Python,
# looks up ``sub`` on the NumPy array itself and finds no such method. Calls of
# functions work. So write operators as functions, or drop the context and hand
# over tensors that are on the GPU already. Here is what ran on the recorded
# GPU.

N = 20_000_000


def on_tensors(function):
    """The adaptor of 2023: tensors in, tensors out, NumPy between."""

    def adapted(X, means):
        return torch.from_numpy(function(X.numpy(), means.numpy()))

    return adapted


def ways_to_cuda():
    X, _ = planted(100_000, CROOKED[:2])
    means = CROOKED[:2]
    want = nearest(X, means)
    on = torch.from_numpy(X).cuda(), torch.from_numpy(means).cuda()

    def under(function, *values):
        with torch.device("cuda"):
            return function(*values)

    ways = {
        "the line, arrays, under the device": lambda: under(
            torch.compile(nearest), X, means
        ),
        "functions for operators, arrays, under the device": lambda: under(
            torch.compile(nearest_by_name), X, means
        ),
        "the line, tensors, under the device": lambda: under(
            torch.compile(on_tensors(nearest)), *on
        ),
        "the line, tensors, no device": lambda: torch.compile(
            on_tensors(nearest)
        )(*on),
        "the line, torch.compiler.wrap_numpy, tensors": lambda: torch.compile(
            torch.compiler.wrap_numpy(nearest)
        )(*on),
        "the adaptor without torch.compile": lambda: on_tensors(nearest)(*on),
        "the same, by numpy(force=True)": lambda: torch.from_numpy(
            nearest(*(tensor.numpy(force=True) for tensor in on))
        ),
    }
    rows = []
    for name, way in ways.items():
        torch.compiler.reset()
        try:
            got = way()
        except Exception as error:
            why = re.search(
                r"'ndarray' object[^\")]*|can't convert", str(error)
            )
            rows.append((name, "no", why.group(0) if why else "an error"))
            continue
        right = np.array_equal(
            want, got.cpu().numpy() if isinstance(got, torch.Tensor) else got
        )
        kind = "an array" if isinstance(got, np.ndarray) else str(got.device)
        rows.append((name, "yes" if right else "wrong", f"gives {kind}"))
    frame = pd.DataFrame(rows, columns=["way", "runs", "what happens"])
    frame["torch"] = torch.__version__
    return frame


ways = measured("kmeans_ways", ways_to_cuda)
table(
    ways.set_index("way")[["runs", "what happens"]],
    f"NumPy code on CUDA, torch {ways['torch'][0]}",
    fold=False,
)

# %%
# And this is what Inductor made of it: readable Triton, as promised. It reads
# x and y of a point by a load each, every second number of memory.

TRITON = """
import numpy as np
import torch


def nearest(X, means):
    return np.argmin(np.linalg.norm(X - means[:, None], axis=2), axis=0)


@torch.compile
def adapted(X, means):
    return torch.from_numpy(nearest(X.numpy(), means.numpy()))


def drawn(n):
    return torch.rand(n, 2, device="cuda")


adapted(drawn(20_000_000), drawn(2))
"""


def compiled_for_cuda():
    _, code = run(TRITON)
    return pd.DataFrame({"code": [kernel_of(code, "@triton.jit")]})


inductor = measured("kmeans_inductor", compiled_for_cuda)
its_code = inductor["code"][0]
Folded("The Triton that Inductor generated", Listing(its_code, "python"))

# %%
# The ladder
# ~~~~~~~~~~
#
# From arrays in and out to tensors that never leave the GPU, and what each
# step takes away: passes over memory, bytes of a number, and copies over the
# bus (16 bytes of a point in float64 to the GPU, 8 bytes of a label back).
# Results are fresh arrays, as in such a program, so the copy of the labels
# also waits for new memory. In the second row of copies the labels return into
# an array that is there already.


def wall(function, tries=5):
    """Seconds of a call, arrays in hand or the device idle again."""
    function()
    taken = []
    for _ in range(tries):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[tries // 2]


def climbed():
    X, _ = planted(N // 2, CROOKED[:2])
    rows = []

    def step(name, dtype, function, tries=5):
        torch.compiler.reset()
        rows.append((name, dtype, wall(function, tries)))

    for dtype in ("float64", "float32"):
        x, m = X.astype(dtype), CROOKED[:2].astype(dtype)
        on = torch.from_numpy(x).cuda(), torch.from_numpy(m).cuda()
        arrays = torch.compile(nearest_by_name, dynamic=False)
        tensors = torch.compile(on_tensors(nearest), dynamic=False)

        def in_and_out(x=x, m=m, arrays=arrays):
            with torch.device("cuda"):
                return arrays(x, m)

        def copies(x=x):
            torch.from_numpy(x).cuda()
            torch.empty(N, dtype=torch.int64, device="cuda").cpu()

        labels = torch.zeros(N, dtype=torch.int64)

        def copies_reused(x=x, labels=labels):
            torch.from_numpy(x).cuda()
            labels.copy_(torch.empty(N, dtype=torch.int64, device="cuda"))

        def ours(on=on):
            return fusebook.kmeans_assign(*on, check=False)

        step("NumPy", dtype, lambda x=x, m=m: nearest(x, m), tries=1)
        step("compiled, arrays in and out", dtype, in_and_out)
        step("the copies alone", dtype, copies)
        step("copies, into old labels", dtype, copies_reused)
        step(
            "compiled, tensors in and out",
            dtype,
            lambda on=on, tensors=tensors: tensors(*on),
        )
        step("Fusebook, tensors in and out", dtype, ours)
    return pd.DataFrame(rows, columns=["step", "dtype", "seconds"])


ladder = measured("kmeans_ladder", climbed)
size = ladder["dtype"].map({"float64": 8, "float32": 4})
one_pass = N * (2 * size + 8)  # the points once, the labels once
by_numpy, copying, kept = (
    ladder["step"].str.contains(word) for word in ("NumPy", "cop", "tensors")
)
ladder["times as fast as NumPy"] = (
    ladder["dtype"].map(ladder[by_numpy].set_index("dtype")["seconds"])
    / ladder["seconds"]
)
ladder["passes"] = np.where(by_numpy, len(passes), 1) * ~copying
ladder["MB of memory"] = (
    one_pass.where(~by_numpy, (chain - 8 * N) * size / 8 + 8 * N)
    * ~copying
    / 1e6
)
ladder["MB over the bus"] = one_pass * ~(by_numpy | kept) / 1e6
ladder["ms"] = ladder.pop("seconds") * 1e3
rungs = ladder.set_index(["dtype", "step"])
table(rungs, "20 million points, two centres, by the host's clock", fold=False)

# %%
up = rungs["times as fast as NumPy"]
ms = rungs["ms"]


def climb(dtype, step):
    return up[dtype, f"compiled, {step}"]


def gained(step):
    """How many times as fast a step is in float32 as in float64."""
    return ms["float64", step] / ms["float32", step]


def reused(ms):
    """The part of the copies that is left where the labels' array is old."""
    old = ms.get(("float32", "copies, into old labels"))
    return old and f"{old / ms['float32', 'the copies alone']:.0%}"


numpy_gains = 0.04 < gained("NumPy") - 1 < 0.14  # about 9 %
compiled_gains = gained("compiled, arrays in and out") >= 1.4
claims(
    holds(
        "With arrays in and out the compiled line is at least 8 times as fast "
        "as NumPy in float64 (2023, on an RTX 2060): here {gain:.1f} times.",
        climb("float64", "arrays in and out") >= 8,
        gain=climb("float64", "arrays in and out"),
    ),
    holds(
        "In float32 NumPy itself gets about 9 % faster (2023, taken as 4 to "
        "14 %): here {gain:.0%} faster.",
        numpy_gains,
        gain=gained("NumPy") - 1,
    ),
    holds(
        "In float32 the compiled line gets at least 40 % faster (2023): here "
        "{gain:.0%} faster.",
        compiled_gains,
        gain=gained("compiled, arrays in and out") - 1,
    ),
    holds(
        "With arrays in and out the compiled line is at least 11 times as "
        "fast as NumPy in float32 (2023, give or take 2 %): here {gain:.1f} "
        "times.",
        climb("float32", "arrays in and out") >= 0.98 * 11,
        gain=climb("float32", "arrays in and out"),
    ),
    holds(
        "When tensors stay on the GPU it is at least 200 times as fast as "
        "NumPy in float32 (2023): here {gain:.0f} times.",
        climb("float32", "tensors in and out") >= 200,
        gain=climb("float32", "tensors in and out"),
    ),
    say(
        "Fusebook's kernel, which is on the page on k-means, takes {ours:.2f} "
        "times as long as the compiled line in float32 and {wide:.2f} times "
        "in float64, by one call that is waited for.",
        ours=ms["float32", "Fusebook, tensors in and out"]
        / ms["float32", "compiled, tensors in and out"],
        wide=ms["float64", "Fusebook, tensors in and out"]
        / ms["float64", "compiled, tensors in and out"],
    ),
    claim(
        "With float32 arrays in and out, copies are {share:.0%} of the time, "
        "more than half.",
        ms["float32", "the copies alone"]
        > ms["float32", "compiled, arrays in and out"] / 2,
        fatal=False,
        share=ms["float32", "the copies alone"]
        / ms["float32", "compiled, arrays in and out"],
    ),
    say(
        "NumPy's line takes {once:.0f} ms here, called once in a process that "
        "has done much before, and {alone:.0f} ms in the process of its own "
        "above (float64); the announcement had 1260 on a Ryzen 3970X. The "
        "first two are one line on one machine and differ by {apart:.0%}: a "
        "verdict on numbers that differ by less is not certain.",
        apart=abs(
            ms["float64", "NumPy"]
            / threads.loc["float64", "NumPy, ms"].median()
            - 1
        ),
        once=ms["float64", "NumPy"],
        alone=threads.loc["float64", "NumPy, ms"].median(),
    ),
    say(
        "When the labels return into an array that is there already, these "
        "copies take {reused} of the time that they take into a new one. The "
        "rest is not the bus: the host hands out memory.",
        reused=reused(ms),
    ),
    claim(
        "Keep data on the GPU: in float32 the compiled line is {gain:.0f} "
        "times as fast with tensors that stay there as with arrays that "
        "travel with every call, into fresh memory each time. With such "
        "arrays it is {climb:.0f} times as fast as NumPy.",
        ms["float32", "compiled, tensors in and out"]
        < ms["float32", "compiled, arrays in and out"] / 10,
        fatal=False,
        headline=True,
        gain=ms["float32", "compiled, arrays in and out"]
        / ms["float32", "compiled, tensors in and out"],
        climb=climb("float32", "arrays in and out"),
    ),
    say(
        "On this GPU, by one call that is waited for, the compiled line on "
        "tensors is {half:.1f} times as fast in float32 as in float64. Many "
        "GPUs, consumer ones above all, have few units for float64: page 001 "
        "has the published ratios.",
        half=gained("compiled, tensors in and out"),
    ),
)

# %%
# The advice
# ~~~~~~~~~~
#
# Each piece of the announcement's advice is checked as the page is built.
# First, ``numpy_default_float`` decides what creation functions make. The
# program above set it before anything else, and then added ``np.zeros(3)`` to
# an array of float32, as this function does:


def compiled(function, **more):
    torch.compiler.reset()
    return torch.compile(function, backend="eager", **more)


def zeros(X):
    return X + np.zeros(3)


narrow = np.ones(3, np.float32)
default = compiled(zeros)(narrow).dtype
with torch._dynamo.config.patch(numpy_default_float="float32"):
    late = compiled(zeros)(narrow).dtype
claims(
    holds(
        "Compiled, `np.zeros` is float64 as in NumPy, and makes float64 of "
        "all that it meets (2023).",
        default == np.float64 == zeros(narrow).dtype,
    ),
    holds(
        'numpy_default_float = "float32" makes `np.zeros` float32, and all '
        "stays as narrow as it was (2023).",
        cpu["with zeros"][0] == "float32",
    ),
    say(
        "Once other NumPy code has been compiled, the setting {works}.",
        works="still works" if late == np.float32 else "has no effect",
    ),
)

# %%
# A setting without effect by then was read once in the process, when the first
# NumPy code was compiled: set it before that.
#
# *Graph breaks.* An ``if`` on a value that is only known at run time cuts the
# graph in two (a :term:`graph break`), and each part is compiled and launched
# by itself. Written without branches it is one graph. A backend is a function
# of a graph, so graphs are easily counted.


def branching(X):
    if X.sum() > 0:  # who knows?
        X = X / X.max()
    else:
        X = X * 2
    return X + 1


def branchless(X):
    scale = np.where(X.sum() > 0, 1 / X.max(), 2)
    return X * scale + 1


def clipped_in_place(X):
    X = X.copy()
    X[X < 3] = 3
    return X + 1


def clipped(X):
    return np.where(X < 3, 3, X) + 1


def graphs(function, *values):
    """The sizes of the graphs that a call is cut into."""
    sizes = []

    def backend(graph, inputs):
        called = [n for n in graph.graph.nodes if n.op == "call_function"]
        sizes.append(len(called))
        return graph.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend)(*values)
    return sizes


ones = np.arange(1.0, 9.0)
cut, whole = graphs(branching, ones), graphs(branchless, ones)
written_in, chosen = graphs(clipped_in_place, ones), graphs(clipped, ones)
claims(
    say(
        "With a branch: {n} graphs, of {ops} operations.",
        n=len(cut),
        ops=" and ".join(map(str, cut)),
    ),
    holds("An if on a value breaks the graph (2023).", len(cut) > 1),
    holds(
        "Code without branches does not break the graph (2023).",
        len(whole) == 1,
    ),
    claim(
        "The code with and the code without the branch mean the same.",
        np.allclose(branching(ones), branchless(ones)),
    ),
    holds(
        "A write through a boolean mask is supported (2023).",
        np.array_equal(compiled(clipped_in_place)(ones), clipped(ones)),
    ),
    holds(
        "Such a write slows the code down (2023), as counted, not timed: it "
        "breaks the graph, or takes more operations than `np.where`.",
        len(written_in) > 1 or sum(written_in) > sum(chosen),
    ),
)

# %%
# *Loops.* A loop with a known number of iterations is unrolled: the graph
# grows with them, and so does the time to compile it. A loop that ends when
# something has converged cannot be unrolled. Compile its body.


def smoothed(X, turns):
    for _ in range(turns):
        X = (X + np.roll(X, 1)) / 2
    return X


def body(X):
    return (X + np.roll(X, 1)) / 2


def until_flat(X, step):
    turns = 0
    while X.max() - X.min() > 1e-3:
        X, turns = step(X), turns + 1
    return X, turns


short, long = (graphs(smoothed, ones, turns) for turns in (4, 16))
one = graphs(body, ones)
endless = graphs(lambda X: until_flat(X, body)[0], ones)
flat, turns = until_flat(ones, compiled(body))
by_fours, calls = until_flat(ones, compiled(lambda X: smoothed(X, 4)))
claims(
    holds("A for loop is unrolled (2023).", sum(long) > 3 * sum(short)),
    holds(
        "A loop that ends when something has converged is not unrolled "
        "(2023).",
        len(endless) > 1,
    ),
    say(
        "4 iterations are {short} operations, 16 are {long}; the body alone "
        "is {one}, compiled once for {turns} iterations. Compiled with its "
        "loop, the same comes to {cut} graphs.",
        short=sum(short),
        long=sum(long),
        one=sum(one),
        turns=turns,
        cut=len(endless),
    ),
    claim(
        "A compiled body in a plain loop converges to NumPy's result.",
        np.allclose(flat, until_flat(ones, body)[0]),
    ),
    holds(
        "A few iterations at a time can be compiled (2023): in fours the loop "
        "makes {calls} calls in place of {turns}, and converges as well.",
        calls < turns and np.ptp(by_fours) <= 1e-3,
        calls=calls,
        turns=turns,
    ),
)

# %%
# *Debugging.* Is it the program or the compiler? ``torch._numpy`` runs the
# program's own calls eagerly on tensors, without any compiler. It is private,
# and may change.

import torch._numpy as tnp


def nearest_in(numpy, X, means):
    far = numpy.linalg.norm(X - means[:, None], axis=2)
    return numpy.argmin(far, axis=0)


def microseconds(function, times=200):
    """Of a call: the best of three means over many."""
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(times):
            function()
        taken.append((time.perf_counter() - start) / times * 1e6)
    return min(taken)


def in_torch(X, means):
    far = torch.linalg.vector_norm(X - means[:, None], dim=2)
    return torch.argmin(far, dim=0)


few = some[:10]
debugged = nearest_in(tnp, tnp.asarray(some), tnp.asarray(CROOKED))
points_and_means = few, CROOKED
wrapped = [tnp.asarray(array) for array in points_and_means]
plain_tensors = [torch.from_numpy(array) for array in points_and_means]
slow = microseconds(lambda: nearest_in(tnp, *wrapped))
quick = microseconds(lambda: in_torch(*plain_tensors))
claims(
    holds(
        "`import torch._numpy as np` runs the program eagerly (2023).",
        np.array_equal(debugged.tensor.numpy(), nearest(some, CROOKED)),
    ),
    holds(
        "`torch._numpy` is much slower than PyTorch's own functions (2023): "
        "here {times:.1f} times their time for ten points.",
        slow > 2 * quick,
        times=slow / quick,
    ),
)

# %%
# *NumPy's scalars and type promotion.* In 2023 compiled NumPy differed from
# NumPy there. Since NumPy 2 a Python number no longer widens an array (`NEP 50
# <https://numpy.org/neps/nep-0050-scalar-promotion.html>`__).

u = np.int32(2)


def outcome(function):
    """What a function gives, as text, or the kind of its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = function()
        except Exception as error:
            over = "OverflowError" in f"{type(error)} {error}"
            return "OverflowError" if over else type(error).__name__
    if isinstance(got, np.ndarray):
        return f"array({got.tolist()}, {got.dtype})"
    return repr(got)


cases = {
    "np.asarray(2) * [1, 2, 3]": lambda: np.asarray(2) * [1, 2, 3],
    "u * [1, 2, 3]": lambda: u * [1, 2, 3],
    "int(u) * [1, 2, 3]": lambda: int(u) * [1, 2, 3],
    "np.zeros(1, np.int8) + 127": lambda: np.zeros(1, np.int8) + 127,
    "np.zeros(1, np.int8) + 128": lambda: np.zeros(1, np.int8) + 128,
    "np.float32(3) + 3.0": lambda: np.asarray(np.float32(3) + 3.0).dtype.name,
}
said = pd.DataFrame(
    {
        text: {
            f"NumPy {np.__version__}": outcome(function),
            "compiled": outcome(compiled(function)),
        }
        for text, function in cases.items()
    }
).T
table(said, "u is np.int32(2)", fold=False)

# %%
plain, under = said.iloc[:, 0], said.iloc[:, 1]
claims(
    holds(
        "A NumPy scalar times a list repeats the list (2023, NumPy).",
        plain["u * [1, 2, 3]"] == "[1, 2, 3, 1, 2, 3]",
    ),
    holds(
        "Compiled, a NumPy scalar is an array and multiplies the list (2023).",
        under["u * [1, 2, 3]"].startswith("array([2, 4, 6]"),
    ),
    holds(
        "Compiled, `int(u)` repeats the list again (2023).",
        under["int(u) * [1, 2, 3]"] == "[1, 2, 3, 1, 2, 3]",
    ),
    holds(
        "A 0-D array times a list multiplies, in both (2023).",
        plain["np.asarray(2) * [1, 2, 3]"].startswith("array([2, 4, 6]")
        and under["np.asarray(2) * [1, 2, 3]"].startswith("array([2, 4, 6]"),
    ),
    holds(
        "int8 plus 127 is int8, in both (2023).",
        plain["np.zeros(1, np.int8) + 127"]
        == under["np.zeros(1, np.int8) + 127"]
        == "array([127], int8)",
    ),
    holds(
        "int8 plus 128 is int16 in NumPy (2023, NumPy 1).",
        plain["np.zeros(1, np.int8) + 128"] == "array([128], int16)",
    ),
    holds(
        "Compiled, int8 plus 128 is what NumPy 2 makes of it (2023).",
        plain["np.zeros(1, np.int8) + 128"]
        == under["np.zeros(1, np.int8) + 128"],
    ),
)

# %%
# Beyond NumPy
# ------------
#
# The announcement ends with SciPy and scikit-learn, which had begun to take
# PyTorch's tensors as they are.


def beyond():
    os.environ["SCIPY_ARRAY_API"] = "1"  # before SciPy is imported
    import scipy
    import sklearn
    from scipy.special import expit
    from sklearn.cluster import KMeans
    from sklearn.preprocessing import MinMaxScaler

    x = torch.rand(1000, 3, device="cuda")
    ways = {
        f"scipy.special.expit, SciPy {scipy.__version__}": lambda: expit(x),
        f"MinMaxScaler, scikit-learn {sklearn.__version__}": lambda: (
            MinMaxScaler().fit_transform(x)
        ),
        f"KMeans, scikit-learn {sklearn.__version__}": lambda: (
            KMeans(2, n_init=1).fit(x).cluster_centers_
        ),
    }
    rows = []
    with sklearn.config_context(array_api_dispatch=True):
        for name, way in ways.items():
            try:
                got = way()
                kind = f"{type(got).__name__} on {got.device}"
            except Exception as error:
                kind = type(error).__name__
            rows.append((name, kind))
    return pd.DataFrame(rows, columns=["a tensor on the GPU goes in", "out"])


past = measured("kmeans_beyond", beyond)
out = past["out"].tolist()
table(
    past.set_index("a tensor on the GPU goes in"), "Beyond NumPy", fold=False
)

# %%
# What became of the statements of 2023
# ---------------------------------------
#
# The table has the main ones in the order of the announcement, a row each.
# *Yes* means that a statement holds with the versions of this page and of the
# record; where it has a number, that it is at least that much. The box at the
# top counts other sentences: those that have a verdict of their own above.
# Some of them are not in the table, and some rows have no verdict above, only
# a line in one of the tables.

runs = ways.set_index("way")["runs"]
statements = {
    "compiled, it gives NumPy's labels": cpu["same"],
    "9 times NumPy on one core": there[1] >= 9,
    "57 times on all cores (32 then)": there.iloc[-1] >= 57,
    "all cores are used by default": cpu["by itself"][0] == cpu["cores"][0],
    "one loop in C++": len(re.findall(r"for\(int64_t x0=", code)) == 1,
    "the line runs under torch.device as it stands": isinstance(
        written, np.ndarray
    ),
    "on CUDA, too": runs["the line, arrays, under the device"] == "yes",
    # The last is shown; where it is number 0, it is also the first.
    "one Triton kernel": "_0(in_ptr0" in its_code,
    "8 times NumPy with copies": climb("float64", "arrays in and out") >= 8,
    "11 times in float32": climb("float32", "arrays in and out") >= 0.98 * 11,
    "NumPy itself is 9 % faster in float32": numpy_gains,
    "compiled, float32 is 40 % faster": compiled_gains,
    "numpy_default_float makes creation functions float32": cpu["with zeros"][
        0
    ]
    == "float32",
    "the adaptor runs under the device": runs[
        "the line, tensors, under the device"
    ]
    == "yes",
    "200 times NumPy without copies": climb("float32", "tensors in and out")
    >= 200,
    "the adaptor does not run without torch.compile": runs[
        "the adaptor without torch.compile"
    ]
    == "no",
    "numpy(force=True) does": runs["the same, by numpy(force=True)"] == "yes",
    "an if on a value breaks the graph": len(cut) > 1,
    "branchless code does not": len(whole) == 1,
    "a write through a mask slows it down": len(written_in) > 1
    or sum(written_in) > sum(chosen),
    "a for loop is unrolled": sum(long) > 3 * sum(short),
    "a while loop is not": len(endless) > 1,
    "torch._numpy debugs": isinstance(debugged, tnp.ndarray),
    "and is much slower than PyTorch": slow > 2 * quick,
    "a NumPy scalar repeats a list": plain["u * [1, 2, 3]"]
    == "[1, 2, 3, 1, 2, 3]",
    "compiled, it multiplies the list": under["u * [1, 2, 3]"].startswith(
        "array([2, 4, 6]"
    ),
    "int(u) repeats it again": under["int(u) * [1, 2, 3]"]
    == "[1, 2, 3, 1, 2, 3]",
    "int8 plus 128 is int16 in NumPy": plain["np.zeros(1, np.int8) + 128"]
    == "array([128], int16)",
    "compiled NumPy follows NumPy 2": plain["np.zeros(1, np.int8) + 128"]
    == under["np.zeros(1, np.int8) + 128"],
    "SciPy takes tensors in places": "Tensor" in out[0],
    "scikit-learn takes tensors in places": "Tensor" in out[1],
}
held = pd.Series({what: bool(np.all(v)) for what, v in statements.items()})
table(
    held.map({True: "yes", False: "no"}).to_frame("holds"),
    f"Statements of 2023: {held.sum()} of {len(held)} hold; no longer: "
    + "; ".join(held.index[~held]),
    fold=True,
)

# %%
provenance(ladder, ways)

# %%
# What to take along:
#
# - Count what travels first. Where arrays go to the GPU and back with every
#   call, copies and the host's new memory are most of the time: write results
#   over old ones, or keep tensors on the GPU.
# - A compiler fuses a short chain into one loop. It does not know how wide a
#   label needs to be, nor that the update needs the same points.
# - Test with data that has no symmetry which could hide a mistake.
# - PyTorch has an `introduction to torch.compile
#   <https://docs.pytorch.org/tutorials/intermediate/
#   torch_compile_tutorial.html>`__
#   and a `FAQ
#   <https://docs.pytorch.org/docs/main/user_guide/torch_compiler/
#   torch.compiler_faq.html>`__
#   with a section on NumPy, and the announcement points to more.

# sphinx_gallery_thumbnail_number = 2
